#!/usr/bin/env bash
# memorizing-transformers-pytorch 0.4.1 (faiss-cpu 1.15.1): once a memory of keys and values has been full, it answers
# with the values of other keys.
#
# Expected: `KNNMemory` with room for 32 memories keeps the newest 32, and a search for a stored key finds this key and
# its own value. `clear([0])` empties row 0 only.
# Seen: that holds until a portion exceeds the room. Then the index is emptied and gets the new portion only, and
# searches find nothing at all until one more portion is added. After that they find places counted from the emptied
# index, but read the store at these places, where older or other memories lie. So the key that comes back is not the
# key that was asked for, although it is stored, and nothing is raised.
#
#     12 stored: 1.00 of the newest keys found, 1.00 with their own value
#     40 stored: 0.00 of the newest keys found, 0.00 with their own value
#     44 stored: 1.00 of the newest keys found, 0.00 with their own value
# (Two rows, keys of 16 numbers, portions of 12, 28 and 4; the newest 4 keys are searched, the nearest one each.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps memorizing-transformers-pytorch==0.4.1 faiss-cpu==1.15.1 einops==0.8.2 \
    einops-exts==0.0.4 filelock==3.20.0 joblib==1.5.2 packaging==26.4 2> "$work/log"
cd "$work"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from memorizing_transformers_pytorch.knn_memory import KNNMemory

torch.manual_seed(0)
memory, found, own = KNNMemory(dim=16, max_memories=32, num_indices=2, memmap_filename="memory", multiprocessing=False), {}, {}
stored = 0
for count in (12, 28, 4):
    portion = torch.nn.functional.normalize(torch.randn(2, count, 2, 16), dim=-1)  # so that a key is nearest to itself
    memory.add(portion)
    stored += count
    nearest, mask = memory.search(portion[:, -4:, 0].contiguous(), topk=1)
    found[stored] = mask.float().mean().item()
    own[stored] = (nearest[:, :, 0] == portion[:, -4:]).all(-1).all(-1).float().mean().item()
    print(f"{stored} stored: {found[stored]:.2f} of the newest keys found, {own[stored]:.2f} with their own value")
assert found == {12: 1, 40: 0, 44: 1} and own == {12: 1, 40: 0, 44: 0}, "the behaviour has changed"
PY
