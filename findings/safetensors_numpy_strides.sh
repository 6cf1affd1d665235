#!/usr/bin/env bash
# safetensors 0.8.0, numpy 2.4.6: the NumPy writer stores other numbers for a view, without an error.
#
# Expected: `safetensors.numpy.save` copies a view, or refuses it as `safetensors.torch.save` does.
# Seen: it writes the bytes that lie behind the view's first number and ignores the strides. Shape and dtype
# are right. Every second page of K, K with heads and tokens exchanged, and an array in Fortran order are all
# read back wrong.
# (The documentation asks for contiguous arrays. Only the writer for PyTorch checks.)
#
#     every second page:         wrong, read [0, 1, 2, 3, 4, 5], written [0, 1, 2, 3, 8, 9]
#     heads and tokens exchanged: wrong, read [0, 1, 2, 3, 4, 5], written [0, 1, 12, 13, 2, 3]
#     Fortran order:             wrong, read [0, 12, 4, 16, 8, 20], written [0, 1, 2, 3, 4, 5]
#     a copy of the first:       right
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile safetensors==0.8.0 numpy==2.4.6
"$work/venv/bin/python" - <<'PY'
import numpy as np
from safetensors.numpy import load, save

pages = np.arange(24, dtype=np.float32).reshape(6, 4)
cases = {"every second page": pages[::2], "heads and tokens exchanged": pages.reshape(2, 6, 2).swapaxes(0, 1),
         "Fortran order": np.asfortranarray(pages.reshape(2, 3, 4)), "a copy of the first": pages[::2].copy()}
for name, given in cases.items():
    read = load(save({"K": given}))["K"]
    right = np.array_equal(read, given)
    numbers = [array.ravel()[:6].astype(int).tolist() for array in (read, given)]
    print(f"{name}: {'right' if right else 'wrong'}, read {numbers[0]}, written {numbers[1]}")
    assert read.shape == given.shape and right == name.startswith("a copy"), "the behaviour has changed"
PY
