#!/usr/bin/env bash
# torch 2.13.0 (CPU): attention without a batch dimension, or over one K and V for several rows, holds all
# scores in memory.
#
# Expected: the same numbers take the same kernel, whether they are [heads, tokens, 64] or [1, heads, tokens,
# 64], and whether K and V are given once for four rows or expanded to four (a view, no copy).
# Seen: the fused kernel takes four dimensions, equal batches and K whose last dimension is contiguous.
# Everything else computes the right result with the plain formula: scores, softmax and copies of 8 heads x
# 1,024 x 1,024. No warning.
#
#     [1, 8, 1024, 64]                         3.3 MB allocated
#     [8, 1024, 64]                           88.1 MB allocated
#     K kept as [1, 8, 64, 1024], transposed  88.1 MB allocated
#     V with 32 numbers a head                87.0 MB allocated
#     4 rows, K and V expanded to 4            0.0 MB allocated
#     4 rows, K and V of batch 1              19.2 MB allocated
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" - 2> >(grep -v USDT >&2) <<'PY'
import torch
import torch.nn.functional as F
from torch.profiler import profile

draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 8, 1024, 64, generator=draw) for _ in range(3))
rows = torch.randn(4, 8, 1, 64, generator=draw)


def megabytes(q, k, v, **options):
    with profile(profile_memory=True) as seen:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events()) / 1e6, out


cases = {
    "[1, 8, 1024, 64]": (megabytes(q, k, v, is_causal=True), True),
    "[8, 1024, 64]": (megabytes(q[0], k[0], v[0], is_causal=True), False),
    "K kept as [1, 8, 64, 1024], transposed": (megabytes(q, k.mT.contiguous().mT, v, is_causal=True), False),
    "V with 32 numbers a head": (megabytes(q, k, v[..., :32].contiguous(), is_causal=True), False),
    "4 rows, K and V expanded to 4": (megabytes(rows, *(t.expand(4, -1, -1, -1) for t in (k, v))), True),
    "4 rows, K and V of batch 1": (megabytes(rows, k, v), False),
}
outs = [out for (_, out), _ in cases.values()]
for name, ((size, _), fused) in cases.items():
    print(f"{name:38} {size:5.1f} MB allocated")
    assert size < 5 if fused else size > 15, "the behaviour has changed"
for one, other in (outs[0][0], outs[1]), (outs[0], outs[2]), (outs[0][..., :32], outs[3]), (outs[4], outs[5]):
    torch.testing.assert_close(one, other)
PY
