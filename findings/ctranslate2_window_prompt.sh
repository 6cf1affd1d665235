#!/usr/bin/env bash
# CTranslate2 4.8.5 (CPU, float32): a Mistral whose prompt is longer than its sliding window answers with other
# tokens.
#
# Expected: the tokens of transformers 5.24.0, whose window gives the same tokens with and without a KV cache.
# Seen: they are equal while the prompt is no longer than the window and one token, however far the answer goes
# beyond the window. With longer prompts they differ, without a word. (Mistral 7B 0.1 has a window of 4,096;
# here it is 64.) The converter accepts such models.
#
#     prompt of  40 tokens: 40 of 40 tokens equal; transformers without a cache: 40 of 40
#     prompt of  65 tokens: 40 of 40 tokens equal; transformers without a cache: 40 of 40
#     prompt of  80 tokens: 15 of 40 tokens equal; transformers without a cache: 40 of 40
#     prompt of 200 tokens:  5 of 40 tokens equal; transformers without a cache: 40 of 40
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 ctranslate2==4.8.5
cd "$work"
venv/bin/python - <<'PY'
import json

import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedTokenizerFast

NEW, WINDOW = 40, 64
torch.manual_seed(0)
torch.set_num_threads(1)
config = MistralConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, sliding_window=WINDOW, initializer_range=0.15,
    bos_token_id=0, eos_token_id=1)
AutoModelForCausalLM.from_config(config).save_pretrained("model")
words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(297))]
PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>")),
    bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained("model")
TransformersConverter("model").convert("converted")
vocabulary = json.load(open("converted/vocabulary.json"))
theirs = ctranslate2.Generator("converted", compute_type="float32", intra_threads=1)
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
for length in (40, 65, 80, 200):
    prompt = torch.randint(3, 300, (1, length), generator=torch.Generator().manual_seed(length))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    right = model.generate(prompt, **options)[0, length:].tolist()
    plain = model.generate(prompt, use_cache=False, **options)[0, length:].tolist()
    (result,) = theirs.generate_batch(
        [[vocabulary[token] for token in prompt[0].tolist()]], max_length=NEW, sampling_topk=1,
        include_prompt_in_result=False, end_token=[])
    same, without = (sum(one == other for one, other in zip(right, ids)) for ids in (result.sequences_ids[0], plain))
    print(f"prompt of {length:3} tokens: {same:2} of {NEW} tokens equal; transformers without a cache: {without} of {NEW}")
    assert without == NEW and (same == NEW) == (length <= WINDOW + 1), "the behaviour has changed"
PY
