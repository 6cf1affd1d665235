#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): RecurrentGemma keeps its recurrent state in the model, not in the cache.
#
# Expected: a cache holds all that a text needs to go on. So two texts with a cache each can take turns, a copied cache goes on
# where it was copied, beams are equal with and without a cache, and an answer does not depend on the request before it. One
# text with one cache is right. Beams without a cache are right.
# Seen: the cache has only the keys and values of the attention layers. The two other states, of the convolution and of the
# recurrence, are attributes of the layers (conv1d_state in RecurrentGemmaRecurrentBlock and recurrent_states in
# RecurrentGemmaRglru, models/recurrent_gemma/modeling_recurrent_gemma.py). Each call writes over them, whatever cache it was
# given. Beams reorder the cache, and the states stay with the old beams. `generate` always gives a cache, and then nothing
# resets the states. A prompt of one token is then read as a step, with the convolution's state of the request before. Nothing
# is raised.
#
#     one text, its own cache:           0.00 off
#     two texts in turns:                4.89 and 5.37 off
#     a copied cache, after other steps: 2.91 off
#     greedy, equal with and without a cache: 10 of 10; 2 beams: 0 of 10; 4 beams: 0 of 10
#     a prompt of one token, asked again after another request: 0 of 10 answers stay
# (A small model with random weights. The largest difference of a logit from one pass over the text, in units of the logits'
# standard deviation. Answers have 12 tokens.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import copy

import torch
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
config = RecurrentGemmaConfig(vocab_size=98, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
                              num_key_value_heads=1, intermediate_size=96, lru_width=64, attention_window_size=64,
                              pad_token_id=0, eos_token_id=None, bos_token_id=None)
model = RecurrentGemmaForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.25)
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


def read(tokens, cache):
    return model(tokens, cache=cache, use_cache=True).logits


def off(found, right):
    return float((torch.cat(found, 1) - right).abs().max() / right.std())


def answer(prompt, **options):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, **options)


first, second = torch.randint(3, 98, (2, 1, 30))
whole = [model(text, use_cache=False).logits for text in (first, second)]

cache = DynamicCache(config=config)
found = [read(first[:, :10], cache)] + [read(first[:, step:step + 1], cache) for step in range(10, 30)]
alone = off(found, whole[0])
assert cache.get_seq_length() == 30, "the behaviour has changed"
print(f"one text, its own cache:           {alone:.2f} off")

caches = [DynamicCache(config=config) for _ in range(2)]
found = [[read(text[:, :10], cache)] for text, cache in zip((first, second), caches)]
for step in range(10, 30):
    for parts, text, cache in zip(found, (first, second), caches):
        parts.append(read(text[:, step:step + 1], cache))
turns = [off(parts, right) for parts, right in zip(found, whole)]
print(f"two texts in turns:                {turns[0]:.2f} and {turns[1]:.2f} off")

cache = DynamicCache(config=config)
read(first[:, :20], cache)
kept = copy.deepcopy(cache)
for step in range(20, 25):
    read(second[:, step:step + 1], cache)
copied = off([read(first[:, step:step + 1], kept) for step in range(20, 30)], whole[0][:, 20:])
print(f"a copied cache, after other steps: {copied:.2f} off")

prompts = torch.randint(3, 98, (10, 1, 10))
equal = [sum(torch.equal(answer(prompt, num_beams=beams), answer(prompt, num_beams=beams, use_cache=False))
             for prompt in prompts) for beams in (1, 2, 4)]
print(f"greedy, equal with and without a cache: {equal[0]} of 10; 2 beams: {equal[1]} of 10; 4 beams: {equal[2]} of 10")

stay = 0
for prompt in prompts:
    right = answer(prompt[:, :1], use_cache=False)
    assert torch.equal(answer(prompt[:, :1]), right), "the behaviour has changed"
    answer(first)
    stay += torch.equal(answer(prompt[:, :1]), right)
print(f"a prompt of one token, asked again after another request: {stay} of 10 answers stay")

assert alone < 1e-3 and equal[0] == 10, "the behaviour has changed"
assert min(turns) > 0.5 and copied > 0.5 and max(equal[1:]) < 5 and stay < 8, "the behaviour has changed"
PY
