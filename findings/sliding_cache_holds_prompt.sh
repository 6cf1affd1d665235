#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): after a prefill, a sliding-window cache holds K and V of the whole
# prompt.
#
# Expected: a window of 64 keeps 63 tokens of K and V in memory, and saving the cache writes these.
# Seen: the layer keeps a view of the last 63 rows, and the view holds the tensor of all 4,096 rows. So a
# cache that is kept after its prefill (a prefix cache, a snapshot) takes 65 times the bytes that its tensors
# report. `deepcopy` copies them all, and `torch.save` writes them all. The next token frees them. `crop` of a
# DynamicCache is a view too.
#
#     reported 129,024 bytes, held 8,388,608, saved 8,390,000, held after one more token 131,072
#     DynamicCache cropped from 4,096 to 96 tokens: reported 196,608 bytes, held 8,388,608
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
import io
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

torch.manual_seed(0)
tokens = torch.randint(0, 300, (1, 4097))
sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192)


def prefill(window):
    model = MistralForCausalLM(MistralConfig(sliding_window=window, **sizes)).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :4096], cache=cache, use_cache=True)
    return model, cache


def measure(cache):
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    file = io.BytesIO()
    torch.save(tensors, file)
    return sum(t.nbytes for t in tensors), sum(t.untyped_storage().nbytes() for t in tensors), file.tell()


model, cache = prefill(64)
reported, held, saved = measure(cache)
with torch.no_grad():
    model(tokens[:, 4096:], cache=cache, use_cache=True)
later = measure(cache)[1]
print(f"reported {reported:,} bytes, held {held:,}, saved {saved:,}, held after one more token {later:,}")
full = prefill(None)[1]
full.crop(-4000)
cropped = measure(full)
print(f"DynamicCache cropped from 4,096 to 96 tokens: reported {cropped[0]:,} bytes, held {cropped[1]:,}")
assert held == cropped[1] == 8388608 <= saved, "the behaviour has changed"
assert reported == 129024 and later < 140000, "the behaviour has changed"
PY
