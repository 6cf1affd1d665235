#!/usr/bin/env bash
# onnxruntime-genai 0.18.0, onnxruntime 1.32.0 (CPU): the second turn of a chat lacks K and V of the last
# token that was generated, and after `rewind_to` one step gives two tokens.
#
# Expected: `append_tokens` after `generate_next_token` computes the generated token first, so the logits
# are those of a fresh generator that reads the same sequence. After `rewind_to(60)` each step adds one
# token.
# Seen: the last generated token stays in the sequence, but the model never reads it. With the shared buffer
# (the default) its slot is empty, and the next answer differs without a word; without the buffer the model
# raises an error about lengths. A call of `get_logits` in between computes the token and repairs the turn.
# After a rewind the first step adds two tokens, and `get_next_tokens` shows the second one only.
#
#     second turn:                    0.416 off, 0 of 10 tokens as with a fresh generator
#     second turn, get_logits called: 0.000 off, 10 of 10 tokens as with a fresh generator
#     10 tokens generated, rewound to 60 tokens, one step: 62 tokens, shown: [114] of [37, 114]
# (Logits: largest difference in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 onnx==1.23.2 onnx_ir==1.1.0 \
    onnxruntime==1.32.0 onnxruntime-genai==0.18.0
cd "$work"
venv/bin/python - > log 2>&1 <<'PY' || { tail -n 5 log; exit 1; }
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=303, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=301, eos_token_id=302, pad_token_id=0))
for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
    matrix.data.normal_(0, 0.12)
model.save_pretrained("llama")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(303)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w302").save_pretrained("llama")
PY
venv/bin/python -m onnxruntime_genai.models.builder -i llama -o onnx -p fp32 -e cpu -c cache > log 2>&1 ||
    { tail -n 5 log; exit 1; }
venv/bin/python - <<'PY'
import numpy as np
import onnxruntime_genai as genai

model = genai.Model("onnx")
prompt = np.random.default_rng(0).integers(3, 300, (1, 60)).astype(np.int32)


def read(tokens):
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=200, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(tokens)
    return generator


def generate(generator, count):
    for _ in range(count):
        generator.generate_next_token()
    return generator.get_sequence(0)[-count:].tolist()


for called in (False, True):
    chat = read(prompt[:, :30])
    generate(chat, 5)
    if called:
        chat.get_logits()
    chat.append_tokens(prompt[:, 30:45])
    fresh = read(chat.get_sequence(0)[None])
    right, logits = (generator.get_logits().ravel() for generator in (fresh, chat))
    off = float(np.abs(logits - right).max() / right.std())
    same = sum(a == b for a, b in zip(generate(fresh, 10), generate(chat, 10)))
    name = "second turn" + (", get_logits called:" if called else ":")
    print(f"{name:31} {off:.3f} off, {same} of 10 tokens as with a fresh generator")
    assert (off < 0.001 and same == 10) if called else off > 0.1, "the behaviour has changed"
chat = read(prompt)
generate(chat, 10)
chat.rewind_to(60)
chat.generate_next_token()
added, shown = chat.get_sequence(0)[60:].tolist(), chat.get_next_tokens().tolist()
print(f"10 tokens generated, rewound to 60 tokens, one step: {60 + len(added)} tokens, "
      f"shown: {shown} of {added}")
assert len(added) == 2 and shown == added[1:], "the behaviour has changed"
PY
