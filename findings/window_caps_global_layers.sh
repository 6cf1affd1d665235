#!/usr/bin/env bash
# sparkfit 0.5.0 and llm-flops 0.0.1 (beside transformers 5.24.0): the K and V of Gemma 2, Gemma 3 and gpt-oss
# stop growing at the window, though a part of their layers has no window.
#
# Expected: both programs say that they know sliding windows, and name Gemma. A layer with a window keeps the
# tokens of the window, the other layers keep all of them. Mistral and Llama are right.
# Seen: both take one window for the whole model. llm-flops caps every layer with it. sparkfit first drops the
# layers that have a window, and then caps those that have none. So at 131072 tokens Gemma 3 27B needs 11 GB
# for K and V, and the programs say 0.1 and 0.5 GB. sparkfit finds room for 20 such streams in 128 GB.
# Cause: parse_hf_config, effective_context and kv_total_bytes (sparkfit.py); ModelConfig.effective_context
# (llmflops/config.py) with _map_hf_config (registry.py), which does not read `layer_types`.
#
#     tokens          4096                    32768                   131072
#     Llama 3.1 8B    0.54 (0.54, 0.54)       4.29 (4.29, 4.29)      17.18 (17.18, 17.18)
#     Mistral 7B      0.54 (0.54, 0.54)       0.54 (0.54, 0.54)       0.54 (0.54, 0.54)
#     Gemma 2 9B      1.41 (0.70, 1.41)       6.34 (0.70, 1.41)      23.25 (0.70, 1.41)
#     Gemma 3 27B     0.77 (0.08, 0.52)       3.12 (0.08, 0.52)      11.17 (0.08, 0.52)
#     gpt-oss 20B     0.10 (0.00, 0.01)       0.81 (0.00, 0.01)       3.22 (0.00, 0.01)
#     sparkfit: 20 streams of Gemma 3 27B with 131072 tokens fit in 128 GB: True (K and V: 223 GB)
# (GB in the cache of transformers, two bytes for a number; in brackets sparkfit and llm-flops.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 sparkfit==0.5.0 llm-flops==0.0.1
cd "$work"
"$work/venv/bin/python" - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import json
import pathlib
import subprocess
import sys
import llmflops
import sparkfit
import torch
from llmflops.registry import _map_hf_config
from transformers import AutoConfig, DynamicCache


def sizes(kind, hidden, inner, layers, heads, groups, width, words, **more):
    return dict(model_type=kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, vocab_size=words,
                max_position_embeddings=131072, **more)


families = {
    "Llama 3.1 8B": sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256),
    "Mistral 7B": sizes("mistral", 4096, 14336, 32, 32, 8, 128, 32000, sliding_window=4096),
    "Gemma 2 9B": sizes("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, sliding_window=4096),
    "Gemma 3 27B": sizes("gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, sliding_window=1024),
    "gpt-oss 20B": sizes("gpt_oss", 2880, 2880, 24, 64, 8, 64, 201088, sliding_window=128, num_local_experts=32,
                         num_experts_per_tok=4)}
lengths = (4096, 32768, 131072)
pathlib.Path("config.json").write_text("")


def real(config, length):
    cache = DynamicCache(config=config)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(2)), layer)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


print("tokens".ljust(13) + "".join(f"{length:8}".ljust(24) for length in lengths).rstrip())
for name, options in families.items():
    config = AutoConfig.for_model(**options)
    raw = json.loads(config.to_json_string(use_diff=False)) | dict(torch_dtype="bfloat16")
    pathlib.Path("config.json").write_text(json.dumps(raw))
    spec, model, row = sparkfit.load_local_config("config.json"), _map_hf_config(name, raw), []
    for length in lengths:
        details = llmflops.estimate(model, sequence_length=length, num_generated_tokens=0)["details"]
        gb = [number / 1e9 for number in (
            real(config, length), sparkfit.kv_total_bytes(spec, length, 1), details["memory"]["kv_cache"])]
        row.append(gb)
        if name in ("Llama 3.1 8B", "Mistral 7B"):
            assert max(gb) < 1.001 * min(gb), "the behaviour has changed"
        elif length == 131072:
            assert gb[0] > 10 * max(gb[1:]), "the behaviour has changed"
    print(name.ljust(13) + "".join("{:8.2f} ({:.2f}, {:.2f})".format(*gb).ljust(24) for gb in row).rstrip())
    assert name[:3] in ("Lla", "Mis") or row[1][1:] == row[2][1:], "the behaviour has changed"
    if name == "Gemma 3 27B":
        command = [pathlib.Path(sys.executable).with_name("sparkfit"), "config.json", "-c", "131072", "-n", "20"]
        plan = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
        needed = 20 * row[2][0]
print(f"sparkfit: 20 streams of Gemma 3 27B with 131072 tokens fit in 128 GB: {plan['fits']} "
      f"(K and V: {needed:.0f} GB)")
assert plan["fits"] and needed > 128, "the behaviour has changed"
PY
