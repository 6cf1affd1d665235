#!/usr/bin/env bash
# hf-mem 0.5.6 (beside transformers 5.24.0): its memory for K and V is too small for GGUF files of Qwen3 and
# of models with scaled RoPE, and 25 times too large for DeepSeek V3.
#
# Expected: with `experimental=True`, `run` gives the bytes of K and V of a model at its context length.
# Seen: for safetensors it takes `head_dim` from the configuration, and Qwen3 is right. For GGUF it divides
# the hidden size by the heads, and ignores `attention.key_length` and `value_length`, which the file holds.
# It also finds the context by the end of a key's name. `rope.scaling.original_context_length` ends with
# `context_length` too and comes later in the file, so Phi-3.5 gets 4096 tokens and not 131072. With
# safetensors DeepSeek V3 gets K and V for 128 heads of 56 numbers, a width that it has nowhere. Its cache
# holds 512 + 64 numbers for all heads together, in transformers as in the serving engines. (`fp8_ds_mla`, the
# format of that cache, is one of the options.) No call gives a warning about it.
# Cause: compute_gguf_kv_cache_size (gguf/kv_cache.py), parse_gguf_metadata (gguf/metadata.py) and
# compute_safetensors_kv_cache_size (safetensors/kv_cache.py).
#
#     Qwen3 0.6B, safetensors:    8192 bytes for a token, real  8192; context  40960 of  40960
#     Qwen3 0.6B, GGUF:           4096 bytes for a token, real  8192; context  40960 of  40960
#     Phi-3.5 mini, GGUF:        24576 bytes for a token, real 24576; context   4096 of 131072
#     DeepSeek V3, safetensors:  57344 bytes for a token, real  2304; context 163840 of 163840
# (Two layers each, two bytes for a number. The files are served from memory.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 hf-mem==0.5.6 httpx2==2.16.2 h2==4.4.1 \
    gguf==0.19.0
cd "$work"
"$work/venv/bin/python" - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import json
import struct
import gguf
import hf_mem
import httpx2
import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM

files = {}


def answer(request):
    name = request.url.path.rsplit("/", 1)[1]
    if "/tree/" in request.url.path:
        return httpx2.Response(200, json=[dict(type="file", path=file) for file in files])
    return httpx2.Response(200, content=files[name])


class Client(httpx2.AsyncClient):
    def __init__(self, **options):
        super().__init__(transport=httpx2.MockTransport(answer))


httpx2.AsyncClient = Client


def real(config):
    small = dict(vocab_size=64, intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if "n_routed_experts" in config:
        small |= dict(n_routed_experts=8, n_group=1, topk_group=1, moe_intermediate_size=16)
    config = AutoConfig.for_model(**config | small)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.zeros((1, 8), dtype=torch.long), use_cache=True).cache
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 8


def safetensors(config, architecture):
    header = json.dumps(dict(norm=dict(dtype="BF16", shape=[8], data_offsets=[0, 16]))).encode()
    files["model.safetensors"] = struct.pack("<Q", len(header)) + header + bytes(16)
    config = config | dict(architectures=[architecture], torch_dtype="bfloat16")
    files["config.json"] = json.dumps(config).encode()


def ggufs(config, name, original=None):
    writer = gguf.GGUFWriter("model.gguf", name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_tensor("output_norm.weight", numpy.zeros(8, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files["model.gguf"] = open("model.gguf", "rb").read()


def show(name, config):
    result = hf_mem.run(model_id="some/model", experimental=True,
                        gguf_file="model.gguf" if "model.gguf" in files else None)
    kept = next(iter(result.gguf_files.values())).kv_cache if result.gguf_files else result.kv_cache_metadata
    token, context = result.kv_cache // kept.max_model_len, config["max_position_embeddings"]
    needed = real(config)
    print(f"{name + ':':25}{token:7} bytes for a token, real {needed:5}; "
          f"context {kept.max_model_len:6} of {context:6}")
    files.clear()
    return token / needed, kept.max_model_len / context


qwen = dict(model_type="qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
            num_hidden_layers=2, max_position_embeddings=40960)
phi = dict(model_type="llama", hidden_size=3072, num_attention_heads=32, num_key_value_heads=32, head_dim=96,
           num_hidden_layers=2, max_position_embeddings=131072)
deepseek = dict(model_type="deepseek_v3", hidden_size=7168, num_attention_heads=128, num_key_value_heads=128,
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                num_hidden_layers=2, max_position_embeddings=163840, n_routed_experts=256, n_shared_experts=1,
                num_experts_per_tok=8, n_group=8, topk_group=4, moe_intermediate_size=2048,
                first_k_dense_replace=1)
safetensors(qwen, "Qwen3ForCausalLM")
assert show("Qwen3 0.6B, safetensors", qwen) == (1, 1), "the behaviour has changed"
ggufs(qwen, "qwen3")
assert show("Qwen3 0.6B, GGUF", qwen) == (0.5, 1), "the behaviour has changed"
ggufs(phi, "phi3", original=4096)
assert show("Phi-3.5 mini, GGUF", phi) == (1, 1 / 32), "the behaviour has changed"
safetensors(deepseek, "DeepseekV3ForCausalLM")
ratio, context = show("DeepSeek V3, safetensors", deepseek)
assert 24 < ratio < 26 and context == 1, "the behaviour has changed"
PY
