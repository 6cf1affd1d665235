#!/usr/bin/env bash
# ftllm 1.9.0 (fastllm, its CPU library): Llama models whose heads are not of 128 numbers answer wrongly when two requests run
# at once.
#
# Expected: greedy answers of requests that run together are those that the same requests get alone.
# Seen: with heads of 128 numbers all answers are equal. With heads of 64 numbers (as in Llama 3.2 1B, TinyLlama or SmolLM) the
# first token is right, and then each answer leaves its way. Nothing is raised, and each request alone is right.
# Cause: a step for one request, and the first portion of each prompt, divide the scores by the root of the size of a head. A
# step for several requests (AttentionBatch in LlamaModel::ForwardBatch, src/models/llama.cpp) divides them by `scale_attn`,
# which keeps its default, the root of 128. A loop with transformers whose steps divide by the root of 128 gives the tokens of
# the requests that ran together.
#
#     heads of 128: 12, 12, 12 of 12 tokens as alone
#     heads of 64: 6, 2, 1 of 12 tokens as alone
# (Two layers with random weights, float32. Three prompts of 40, 129 and 200 tokens. How soon an answer leaves its way depends
# on when the requests meet.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile uv==0.13.9 2> "$work/log"
uv() { "$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" "$@"; }
uv numpy==2.4.6 transformers==5.12.1 tokenizers==0.22.2 safetensors==0.8.0 jinja2==3.1.6 requests==2.34.2 pillow==12.3.0 imageio==2.37.3
uv --no-deps ftllm==1.9.0
cd "$work"
venv/bin/python - > log 2>&1 <<'PY' || { tail -n 5 log; exit 1; }
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

pieces = [chr(code) for code in range(33, 127)] + ["\u0120"] + [f"<{number}>" for number in range(206)]
words = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
for head in (128, 64):
    random, queries, keys = np.random.default_rng(0), 256, 128
    shapes = {"lm_head.weight": (303, 256), "model.embed_tokens.weight": (303, 256), "model.norm.weight": (256,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {layer + name + ".weight": shape for name, shape in {
            "self_attn.q_proj": (queries, 256), "self_attn.k_proj": (keys, 256), "self_attn.v_proj": (keys, 256),
            "self_attn.o_proj": (256, queries), "mlp.gate_proj": (128, 256), "mlp.up_proj": (128, 256), "mlp.down_proj": (256, 128),
            "input_layernorm": (256,), "post_attention_layernorm": (256,)}.items()}
    LlamaConfig(vocab_size=303, hidden_size=256, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=256 // head, num_key_value_heads=128 // head, head_dim=head, max_position_embeddings=1024, bos_token_id=301, eos_token_id=302,
                pad_token_id=0, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
                dtype="float32").save_pretrained(f"llama{head}")
    save_file({name: (random.normal(0, 0.12, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
               for name, shape in shapes.items()}, f"llama{head}/model.safetensors", {"format": "pt"})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<b>", eos_token="<e>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(f"llama{head}")
PY
for head in 128 64; do
    timeout 120 venv/bin/python - "$head" > log 2>&1 <<'PY' || { tail -n 5 log; exit 1; }
import ctypes
import os
import sys

import numpy as np

os.environ["FASTLLM_USE_CPU"] = "1"
from ftllm import llm

head = int(sys.argv[1])
llm.set_cpu_threads(1)
model, library = llm.model(f"llama{head}", dtype="float32"), llm.fastllm_lib


def start(tokens):  # these two are the calls of the package's own stream_response_raw
    return library.launch_response_llm_model(
        model.model, len(tokens), (ctypes.c_int * len(tokens))(*tokens), ctypes.c_int(12), ctypes.c_int(12), ctypes.c_bool(False),
        ctypes.c_float(1), ctypes.c_int(1), ctypes.c_float(1), ctypes.c_float(1), ctypes.c_bool(False), *model.stop_token_ctypes(None))


def fetch(handle):
    return list(iter(lambda: max(-1, library.fetch_response_llm_model(model.model, handle)), -1))


random = np.random.default_rng(3)
prompts = [random.integers(3, 300, length).tolist() for length in (40, 129, 200)]
alone = [fetch(start(prompt)) for prompt in prompts]
together = [fetch(handle) for handle in [start(prompt) for prompt in prompts]]
again = [fetch(start(prompt)) for prompt in prompts]
same = [sum(map(int.__eq__, *pair)) for pair in zip(alone, together)]
print(f"\nRESULT heads of {head}: {', '.join(map(str, same))} of 12 tokens as alone")
assert alone == again and all(len(tokens) == 12 for tokens in alone), "the behaviour has changed"
assert min(same) == 12 if head == 128 else sum(same) < 30, "the behaviour has changed"
sys.stdout.flush()
os._exit(0)
PY
    sed -n 's/^RESULT //p' log
done
