#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1 (torch 2.13.0 on a CPU): with xpos, cached keys get other scores than a whole pass.
#
# Expected: rotate_queries_with_cached_keys(q[-1:], k) gives the scores of the last row of rotate_queries_and_keys(q, k).
# The readme recommends the first for caches of keys and values. Both know use_xpos=True.
# Seen: with xpos they differ, the more the longer the cache is. xpos scales a query and a key by their distance to a
# centre. The keys get half of their number as centre, the queries half of the number of queries. So each part of a score
# has a factor too many, and that factor grows with the length of the cache. Equal numbers of queries and keys are
# exact, and so is plain RoPE. Nothing is raised.
#
#     seed 0, plain RoPE: one query behind 64, 256, 1024 keys 0.00, 0.00, 0.00 off; all queries 0.00 off
#     seed 0, xpos: one query behind 64, 256, 1024 keys 0.08, 0.39, 1.02 off; all queries 0.00 off
#     seed 1, plain RoPE: one query behind 64, 256, 1024 keys 0.00, 0.00, 0.00 off; all queries 0.00 off
#     seed 1, xpos: one query behind 64, 256, 1024 keys 0.07, 0.40, 1.02 off; all queries 0.00 off
# (Random queries and keys, 32 numbers each, two seeds. The largest difference of a score, in units of the scores'
# standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile einops==0.8.2 rotary-embedding-torch==0.9.1 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from rotary_embedding_torch import RotaryEmbedding

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def scores(queries, keys):
    return queries @ keys.transpose(-1, -2)


for seed in (0, 1):
    for xpos, words in ((False, "plain RoPE"), (True, "xpos")):
        alone, whole = [], []
        for length in (64, 256, 1024):
            torch.manual_seed(seed)
            queries, keys = torch.randn(2, 1, 2, length, 32)
            rotary = RotaryEmbedding(32, use_xpos=xpos)
            if xpos:
                right = scores(*rotary.rotate_queries_and_keys(queries, keys))
            else:
                right = scores(rotary.rotate_queries_or_keys(queries), rotary.rotate_queries_or_keys(keys))
            for number, errors in ((1, alone), (length, whole)):
                found = scores(*rotary.rotate_queries_with_cached_keys(queries[..., -number:, :], keys))
                errors.append(float((found - right[..., -number:, :]).abs().max() / right.std()))
        print(f"seed {seed}, {words}: one query behind 64, 256, 1024 keys {', '.join(f'{error:.2f}' for error in alone)} off;",
              f"all queries {max(whole):.2f} off")
        assert max(whole) < 1e-3, "the behaviour has changed"
        assert (alone[0] > 0.05 and alone[2] > alone[0]) if xpos else max(alone) < 1e-3, "the behaviour has changed"
PY
