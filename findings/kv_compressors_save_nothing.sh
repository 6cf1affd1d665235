#!/usr/bin/env bash
# nexusquant-kv 0.6.3 and turboquant 0.2.0 (transformers 5.24.0, torch 2.13.0): a "compressed" KV cache takes
# as many bytes as before, or more.
#
# Expected: a cache of 3 bits a number takes about a fifth of float16's bytes, as the packages' descriptions
# say, and a report of saved memory counts the tensors that the cache holds.
# Seen: `compress_kv_cache` of nexusquant rounds the numbers and returns a cache of the same dtype and size:
# worse K and V, no byte saved. `TurboQuantCache` keeps one byte for each index, whatever the bits, and beside
# it K and V in full. `memory_usage_bytes` leaves these out and reports a saving.
#
#     nexusquant, 3 bits: 4,194,304 bytes before, 4,194,304 after, mean squared error of K 0.034
#     turboquant, 2 bits: 4,194,304 bytes without it, 1.832 reported as saving, 10,416,128 bytes held
#     turboquant, 4 bits: 4,194,304 bytes without it, 1.832 reported as saving, 10,416,128 bytes held
# (numpy is held at 1.26.4 for turboquant, so this needs Python 3.10 to 3.12.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==1.26.4
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 \
    numpy==1.26.4 scipy==1.14.1 zstandard==0.25.0
"$work/venv/bin/pip" install -q --no-compile --no-deps nexusquant-kv==0.6.3 turboquant==0.2.0
"$work/venv/bin/python" - <<'PY'
import torch
from nexusquant import compress_kv_cache
from transformers import DynamicCache
from turboquant.cache import TurboQuantCache

torch.manual_seed(0)
keys, values = torch.randn(2, 1, 4, 2048, 128).half().unbind()


def held(layer):
    tensors = [item for item in vars(layer).values() if torch.is_tensor(item)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


cache = DynamicCache()
cache.update(keys.clone(), values.clone(), 0)
before = held(cache.layers[0])
after = held(compress_kv_cache(cache, mode="quant_only").layers[0])
error = float((cache.layers[0].keys.float() - keys.float()).square().mean())
print(f"nexusquant, 3 bits: {before:,} bytes before, {after:,} after, mean squared error of K {error:.3f}")
assert before == after and error > 0.01, "the behaviour has changed"
reports = []
for bits in 2, 4:
    cache = TurboQuantCache(bits=bits)
    cache.update(keys, values, 0)
    reports.append(cache.memory_usage_bytes()["savings_ratio"])
    print(f"turboquant, {bits} bits: {before:,} bytes without it, {reports[-1]:.3f} reported as saving, "
          f"{held(cache.layers[0]):,} bytes held")
    assert held(cache.layers[0]) > 2 * before, "the behaviour has changed"
assert reports[0] == reports[1] > 1.5, "the behaviour has changed"
PY
