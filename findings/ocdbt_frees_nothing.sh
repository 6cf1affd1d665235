#!/usr/bin/env bash
# tensorstore 0.1.86: a key-value store in OCDBT keeps the bytes of pages that were overwritten or deleted.
#
# Expected: after eight pages of 1 MiB were written six times, the directory holds about 8 MiB, at most some
# more until a clean-up, and after all of them were deleted next to nothing.
# Seen: every version stays on the disk, also after the store was opened again. No key is listed, and 48 MiB
# are taken. A cache of pages that evicts from such a store grows without a limit.
#
#     8 pages: 8.0 MiB, written five times again: 48.0 MiB
#     all deleted, opened again: 0 keys, 48.0 MiB
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile tensorstore==0.1.86 numpy==2.4.6
"$work/venv/bin/python" - "$work/pages" <<'PY'
import os
import sys
import tensorstore

names = [f"page{number}" for number in range(8)]


def opened():
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{sys.argv[1]}/"}).result()


def mebibytes():
    files = (os.path.join(folder, name) for folder, _, found in os.walk(sys.argv[1]) for name in found)
    return sum(map(os.path.getsize, files)) / 2**20


sizes, store = [], opened()
for turn in range(6):
    for name in names:
        store.write(name, os.urandom(1 << 20)).result()
    sizes.append(mebibytes())
print(f"8 pages: {sizes[0]:.1f} MiB, written five times again: {sizes[-1]:.1f} MiB")
for name in names:
    store.delete_range(tensorstore.KvStore.KeyRange(name, name + "\0")).result()
left = opened().list().result()
print(f"all deleted, opened again: {len(left)} keys, {mebibytes():.1f} MiB")
assert 8 <= sizes[0] < 9 and not left and mebibytes() >= sizes[-1] >= 48, "the behaviour has changed"
PY
