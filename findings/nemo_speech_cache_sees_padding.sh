#!/usr/bin/env bash
# nemo_toolkit 3.0.0 (torch 2.13.0 on a CPU): with its cache, the decoder of MagpieTTS sees the padding between a short context
# and the sounds.
#
# Expected: steps with the cache of keys and values give the outputs of steps without it, also in a batch, where a shorter
# context is padded up to the longest one and masked.
# Seen: the row without padding is exact. The padded row is far off from the first cached step on. A cached step keeps the
# mask of its last position only, so the padded keys are no longer hidden. Their keys are zero, but softmax gives zeros a share
# all the same. Without the cache the padded row is as alone. Speech is made so from batches with contexts of unequal lengths,
# if `use_kv_cache_for_inference` is set. Nothing is raised. (tts/modules/transformer_2501.py: `Attention.attn_naive` and
# `SelfAttention.compute_qkv_and_mask`.)
#
#     seed 0: with the cache and without it: full row 0.00, padded row 0.87; padded row without it and alone 0.00
# (Two layers with random weights, contexts of 6 and 3 frames, then 8 steps. The largest difference of an output; their standard
# deviation is 1.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile lightning==2.4.0 torchmetrics==1.9.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps nemo_toolkit==3.0.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import importlib.util
import os
import sys
import types

root = os.path.dirname(importlib.util.find_spec("nemo").origin)
for name in ("tts", "tts/modules"):  # without what these two packages import for training and data
    package = types.ModuleType("nemo.collections." + name.replace("/", "."))
    package.__path__ = [os.path.join(root, "collections", name)]
    sys.modules[package.__name__] = package
import torch
from nemo.collections.tts.modules.transformer_2501 import Transformer

torch.set_num_threads(1)
torch.set_grad_enabled(False)
LONG, SHORT, STEPS, WIDTH = 6, 3, 8, 32


def run(decoder, inputs, mask, start, cached):
    decoder.reset_cache(use_cache=cached)
    made = [decoder(inputs[:, :end], mask[:, :end])["output"][:, -1] for end in range(start + 1, inputs.size(1) + 1)]
    decoder.reset_cache(use_cache=False)
    return torch.stack(made, 1)


for seed in (0, 1):
    torch.manual_seed(seed)
    decoder = Transformer(n_layers=2, d_model=WIDTH, d_ffn=64, sa_n_heads=4, kernel_size=1, is_causal=True, apply_norm_out=True,
                          max_length_causal_mask=64).eval()
    for weight in (weight for weight in decoder.parameters() if weight.dim() > 1):
        weight.normal_(0, 0.3)
    inputs, mask = torch.randn(2, LONG + STEPS, WIDTH), torch.ones(2, LONG + STEPS, dtype=torch.bool)
    mask[1, SHORT:LONG] = False
    plain, cached = (run(decoder, inputs, mask, LONG, with_cache) for with_cache in (False, True))
    alone = run(decoder, inputs[1:, mask[1]], mask[1:, mask[1]], SHORT, False)[0]
    off = [float((one - other).abs().max()) for one, other in ((plain[0], cached[0]), (plain[1], cached[1]), (plain[1], alone))]
    print(f"seed {seed}: with the cache and without it: full row {off[0]:.2f}, padded row {off[1]:.2f}; padded row without it and alone {off[2]:.2f}")
    assert off[0] < 1e-3 and off[1] > 0.1 and off[2] < 1e-3, "the behaviour has changed"
PY
