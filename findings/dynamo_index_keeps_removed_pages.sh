#!/usr/bin/env bash
# ai-dynamo-runtime 1.6.1: the router's index of cached blocks refuses the events of a second worker whose
# engine names the same tokens by other hashes.
#
# Expected: an event names a worker, so RadixTree looks a block up under that worker's own hash. The hashes
# are the engine's (vLLM begins them with a random number per process, unless PYTHONHASHSEED is set), and
# the tree itself is walked by hashes of tokens.
# Seen: a block remembers the hash of the worker that stored it first. The second worker's blocks are
# counted, but its removals fail ("Failed to find block"), and the index goes on to promise four blocks that
# are gone. A block that follows its own stored blocks is refused as well ("Failed to find parent block").
#
#     same hashes:  stored {1: 4, 2: 4}, worker 2 removed all: {1: 4}
#     other hashes: stored {1: 4, 2: 4}, worker 2 removed all: {1: 4, 2: 4}
#     same hashes:  worker 2 stores two blocks, then two more: 4 found
#     other hashes: worker 2 stores two blocks, then two more: 2 found
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile ai-dynamo-runtime==1.6.1 uvloop==0.23.0 pydantic==2.13.5
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import json
from dynamo._core import RadixTree, compute_block_hash_for_seq

hashes = compute_block_hash_for_seq(list(range(64)), 16)


def apply(tree, worker, data):
    try:
        tree.apply_event(worker, json.dumps({"event_id": 1, "dp_rank": 0, "data": data}).encode())
    except RuntimeError:
        return False
    return True


def store(tree, worker, first, start=0, end=4):
    blocks = [{"block_hash": first + at, "tokens_hash": hashes[at]} for at in range(start, end)]
    parent = first + start - 1 if start else None
    return apply(tree, worker, {"stored": {"parent_hash": parent, "blocks": blocks}})


def found(tree):
    return {worker: blocks for (worker, _), blocks in sorted(tree.find_matches(hashes).scores.items())}


for name, second, kept in (("same", 100, {1: 4}), ("other", 500, {1: 4, 2: 4})):
    tree = RadixTree()
    assert store(tree, 1, 100) and store(tree, 2, second)
    before = found(tree)
    removed = apply(tree, 2, {"removed": {"block_hashes": [second + at for at in (3, 2, 1, 0)]}})
    print(f"{name} hashes:".ljust(13), f"stored {before}, worker 2 removed all: {found(tree)}")
    assert (found(tree), removed) == (kept, name == "same"), "the behaviour has changed"
for name, second, count in (("same", 100, 4), ("other", 500, 2)):
    tree = RadixTree()
    assert store(tree, 1, 100, 0, 2) and store(tree, 2, second, 0, 2)
    more = store(tree, 2, second, 2, 4)
    print(f"{name} hashes:".ljust(13), f"worker 2 stores two blocks, then two more: {found(tree)[2]} found")
    assert (found(tree)[2], more) == (count, name == "same"), "the behaviour has changed"
PY
