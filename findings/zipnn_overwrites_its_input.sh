#!/usr/bin/env bash
# zipnn 0.5.4 (torch 2.13.0): compressing K and V overwrites the caller's tensor, and even an immutable
# `bytes` object.
#
# Expected: `compress` only reads its input.
# Seen: for float32 and bfloat16 it moves each sign bit within the caller's own memory and leaves it there.
# The decompressed numbers are right, so a test of the round trip passes. But a cache that is compressed for
# the disk and then used further holds other numbers. float16 stays as it is.
#
#     float32, bfloat16: before [0.5, -1.25, 3.0, 100.0] after [4.25e+37, nan, -5.88e-39, -9.40e-36]
#     float16:           unchanged
#     decompressed:      True (right) for all three
#     bytes changed: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
"$work/venv/bin/pip" install -q --no-compile --no-deps zipnn==0.5.4
"$work/venv/bin/python" - <<'PY'
import torch
from zipnn import ZipNN

for dtype, changes in (torch.float32, True), (torch.bfloat16, True), (torch.float16, False):
    keys = torch.tensor([0.5, -1.25, 3.0, 100.0]).repeat(8192).view(8, 64, 64).to(dtype)
    before = keys.clone()
    packer = ZipNN(input_format="torch")
    right = torch.equal(packer.decompress(packer.compress(keys)), before)
    first = [tensor.flatten()[:4].tolist() for tensor in (before, keys)]
    print(dtype, "before", first[0], "after", first[1], "decompressed", right)
    assert right and torch.equal(keys, before) != changes, "the behaviour has changed"

data = before.float().numpy().tobytes()
copy = bytes(bytearray(data))
ZipNN(bytearray_dtype="float32").compress(data)
print("bytes changed:", data != copy)
assert data != copy, "the behaviour has changed"
PY
