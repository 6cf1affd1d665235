#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): Moshi and Kyutai Speech to Text have their sliding window only in the cache.
#
# Expected: `sliding_window` (3000 steps for Moshi, 375 for the recognizer, which are 30 seconds) holds for each pass. So one
# pass over a sequence, a pass in two portions and steps with a cache give equal logits, and `generate` gives the same tokens
# with and without a cache.
# Seen: the cache is made from the configuration and drops what is behind the window. The mask comes from
# `create_causal_mask`, which has no window, and the attention has none either. So a pass without a cache sees the whole
# sequence, and so does a prompt that is longer than the window. Of a second portion, each token sees all that the cache still
# has. Only single steps have the window: they are equal to a pass with a mask for the window. Up to the window all agree.
# Nothing warns. (models/moshi/modeling_moshi.py: `MoshiModel.forward`; the other model has a copy of it.)
#
#     seed 0, Moshi: with a mask for the window 0.00 off; without a cache 5.60
#         (0.00 up to the window), a prompt of 16 and steps 4.99, two portions 4.99
#     seed 0, recognizer: with a mask for the window 0.00 off; without a cache 3.55
#         (0.00 up to the window), a prompt of 16 and steps 3.06, two portions 3.14
#     Moshi, generate: of 12 tokens, 2 are equal with and without a cache
# (Small models with random weights, a window of 8, 24 steps, two seeds. The largest difference of a logit from single steps,
# in units of the standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import (DynamicCache, KyutaiSpeechToTextConfig, KyutaiSpeechToTextForConditionalGeneration, MoshiConfig,
                          MoshiForCausalLM)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
WINDOW, STEPS = 8, 24
small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
             ffn_dim=64, sliding_window=WINDOW, max_position_embeddings=64, num_codebooks=4)
codec = dict(model_type="mimi", hidden_size=16, num_filters=4, codebook_size=32, codebook_dim=8, num_quantizers=4,
             vector_quantization_hidden_dimension=8, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
             num_key_value_heads=2, head_dim=8, upsample_groups=16)


def off(found, right):
    return float((found - right).abs().max() / right.std())


for seed in (0, 1):
    torch.manual_seed(seed)
    moshi = MoshiForCausalLM(MoshiConfig(**small, audio_encoder_config=codec)).eval()
    recognizer = KyutaiSpeechToTextForConditionalGeneration(KyutaiSpeechToTextConfig(
        **small, codebook_vocab_size=33, audio_bos_token_id=32, audio_pad_token_id=64 + 4 * 33, bos_token_id=1, pad_token_id=3,
        codec_config=codec)).eval()
    text, sound = torch.randint(4, 64, (1, STEPS)), torch.randint(0, 32, (1, STEPS, 4))
    for name, model, inputs in (("Moshi", moshi, text), ("recognizer", recognizer, torch.cat([text[..., None], sound], 2))):
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)

        def portions(*lengths):
            cache = DynamicCache(config=model.config)
            return torch.cat([model(input_ids=part, cache=cache, use_cache=True).logits for part in inputs.split(lengths, 1)], 1)

        steps = portions(*[1] * STEPS)
        place = torch.arange(STEPS)
        seen = (place[:, None] >= place) & (place[:, None] - place < WINDOW)
        mask = torch.zeros(1, 1, STEPS, STEPS).masked_fill(~seen, torch.finfo(torch.float32).min)
        window = off(model(input_ids=inputs, attention_mask=mask, use_cache=False).logits, steps)
        whole = model(input_ids=inputs, use_cache=False).logits
        within = off(whole[:, :WINDOW], steps[:, :WINDOW])
        found = off(whole, steps), off(portions(16, *[1] * 8), steps), off(portions(12, 12), steps)
        print(f"seed {seed}, {name}: with a mask for the window {window:.2f} off; without a cache {found[0]:.2f} ({within:.2f} "
              f"up to the window), a prompt of 16 and steps {found[1]:.2f}, two portions {found[2]:.2f}")
        assert max(window, within) < 1e-3 and min(found) > 0.5, "the behaviour has changed"

    prompt = text[:, :12]
    answers = [moshi.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, use_cache=kept)
               for kept in (True, False)]
    same = int((answers[0] == answers[1])[:, 12:].sum())
    print(f"    Moshi, generate: of 12 tokens, {same} are equal with and without a cache")
    assert same < 9, "the behaviour has changed"
PY
