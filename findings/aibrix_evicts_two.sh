#!/usr/bin/env bash
# aibrix-kvcache 0.8.0 (its memory tier on a CPU): a page too many throws two pages out, room for one page
# keeps none, and the default policy's memory grows with every page that it ever saw.
#
# Expected: room for four pages holds four after a fifth was written, and room for one holds the newest. A
# cache of fixed size takes fixed memory.
# Seen: an eviction goes on until a byte more than needed is free, so a whole page more leaves, in all three
# policies. With room for one, the page that was just written goes as well, and `put` reports success.
# S3FIFO, the default, remembers each evicted key with its tokens in a list whose limit is counted in bytes
# of K and V. These entries hold none, so the limit is never reached.
#
#     S3FIFO: room for 4, 5 written: 3 kept; room for 1, 2 written: 0 kept; 10,000 more pages: 8.1 MiB
#     LRU:    room for 4, 5 written: 3 kept; room for 1, 2 written: 0 kept; 10,000 more pages: 0.0 MiB
#     FIFO:   room for 4, 5 written: 3 kept; room for 1, 2 written: 0 kept; 10,000 more pages: 0.0 MiB
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile --no-deps aibrix-kvcache==0.8.0 cityhash==0.4.10 \
    msgspec==0.22.0 more-itertools==11.2.1 nvtx==0.2.17 rocksdict==0.3.29 sortedcontainers==2.4.0 \
    tqdm==4.70.1 uvloop==0.23.0 validators==0.36.0 zstandard==0.25.0 netifaces==0.11.0 redis==6.0.0
"$work/venv/bin/python" - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import gc
import tracemalloc
import torch
from aibrix_kvcache.cache_hashable import TokenListView
from aibrix_kvcache.l1 import L1Cache
from aibrix_kvcache.memory import TensorPoolAllocator
from aibrix_kvcache.spec import KVCacheBlockLayout, KVCacheBlockSpec, KVCacheTensorSpec

spec = KVCacheBlockSpec(16, torch.float16, KVCacheBlockLayout.LCND, KVCacheTensorSpec([0], [0], 64))
page = torch.zeros(spec.block_shape, dtype=torch.float16)
TensorPoolAllocator.SLAB_MAX_NBYTES = 8 * spec.block_nbytes  # memory comes in slabs of 1 GiB otherwise


def cache(policy, room):
    size = room * spec.block_nbytes
    return L1Cache(policy, size, TensorPoolAllocator.create(capacity_nbytes=8 * spec.block_nbytes), spec)


def write(cache, numbers):
    for number in numbers:
        query = TokenListView(list(range(16 * number, 16 * number + 16)))
        status = cache.put(None, query, page)
        assert status.is_ok()


for policy in ("S3FIFO", "LRU", "FIFO"):
    four, one = cache(policy, 4), cache(policy, 1)
    write(four, range(5))
    write(one, range(2))
    kept = [len(some) // spec.block_nbytes for some in (four, one)]
    write(four, range(5, 100))
    gc.collect()
    tracemalloc.start()
    write(four, range(100, 10100))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    print(f"{policy + ':':7} room for 4, 5 written: {kept[0]} kept; room for 1, 2 written: {kept[1]} kept; "
          f"10,000 more pages: {grown:.1f} MiB")
    assert kept == [3, 0], "the behaviour has changed"
    assert grown > 2 if policy == "S3FIFO" else grown < 0.5, "the behaviour has changed"
PY
