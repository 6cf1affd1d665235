#!/usr/bin/env bash
# mlx-lm 0.32.2, mlx 0.32.4 (CPU): LRUPromptCache evicts a prompt that it has just served.
#
# Expected: a cache that is named LRU evicts the entry that was used least recently.
# Seen: `fetch_nearest_cache` does not count as use. Only `insert_cache` moves an entry, so the order is first
# in, first out. A system prompt that is fetched with every request leaves before a prompt that was never
# asked again.
#
#     fetched 5 times: prompt 0
#     cached before the insertion: [0, 1, 2]
#     cached after the insertion:  [1, 2, 3]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 \
    sentencepiece==0.2.3 protobuf==7.36.2
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-lm==0.32.2
"$work/venv/bin/python" - <<'PY'
import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

mx.set_default_device(mx.cpu)


def filled():
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 20, 64)), mx.ones((1, 1, 20, 64)))
    return [cache]


def found():
    return [number for number in range(4) if prompts.fetch_nearest_cache("model", [number] * 20 + [9])[0]]


prompts = LRUPromptCache(max_size=3)
for number in range(3):
    prompts.insert_cache("model", [number] * 20, filled())
before = found()
for _ in range(5):
    assert prompts.fetch_nearest_cache("model", [0] * 20 + [9])[1] == [9]  # a hit: one token is left
prompts.insert_cache("model", [3] * 20, filled())
after = found()
print("fetched 5 times: prompt 0")
print("cached before the insertion:", before)
print("cached after the insertion: ", after)
assert before == [0, 1, 2] and after == [1, 2, 3], "the behaviour has changed"
PY
