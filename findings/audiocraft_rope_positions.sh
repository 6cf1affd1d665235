#!/usr/bin/env bash
# audiocraft 1.3.0 (torch 2.13.0 on a CPU): a streaming transformer with RoPE goes on at wrong positions in two cases.
#
# Expected: a causal StreamingTransformer gives the same outputs for a sequence at once and streamed. With sinusoidal
# positions it does in all cases here.
# Seen: with a context (past_context) and a first portion that is longer, all later steps are rotated as if the steps
# cut off from that portion had never been: the first cut is not counted, since that call only sets the counter to zero.
# With memory_efficient each step is rotated by the number of heads: the length of the past is read from the dimension
# of the heads, since this mode orders them the other way. With one head or a first step alone nothing shows. Nothing
# is raised. (StreamingMultiheadAttention in modules/transformer.py: _complete_kv and _apply_rope.)
#
#     sin, context 8: single steps 0.00 off, 8 at first 0.00 off, 20 at first 0.00 off
#     rope, context 8: single steps 0.00 off, 8 at first 0.00 off, 20 at first 1.16 off
#     sin, memory efficient: single steps 0.00 off, 8 at first 0.00 off, 20 at first 0.00 off
#     rope, memory efficient: single steps 2.03 off, 8 at first 1.94 off, 20 at first 1.84 off
# (Two layers with random weights, 40 steps, two sequences. The largest difference of an output, in units of their
# standard deviation. Only the modules of the package are loaded, not its parts for audio.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile einops==0.8.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps audiocraft==1.3.0 xformers==0.0.35 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import importlib.util
import sys
import types

import torch

folder = importlib.util.find_spec("audiocraft").submodule_search_locations[0]
for name, place in (("audiocraft", folder), ("audiocraft.modules", folder + "/modules")):  # without their parts for audio
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [place]
from audiocraft.modules.transformer import StreamingTransformer

torch.set_num_threads(1)
torch.set_grad_enabled(False)
for words, options in (("context 8", dict(past_context=8)), ("memory efficient", dict(memory_efficient=True))):
    for kind in ("sin", "rope"):
        torch.manual_seed(0)
        model = StreamingTransformer(64, 4, 2, 96, causal=True, custom=True, dropout=0., positional_embedding=kind,
                                     **options).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
        steps = torch.randn(2, 40, 64)
        right, off = model(steps), {}
        for first in (1, 8, 20):
            with model.streaming():
                streamed = torch.cat([model(portion) for portion in steps.split([first] + [1] * (40 - first), 1)], 1)
            off[first] = float((streamed - right).abs().max() / right.std())
        print(f"{kind}, {words}: single steps {off[1]:.2f} off, 8 at first {off[8]:.2f} off, 20 at first {off[20]:.2f} off")
        wrong = [] if kind == "sin" else [20] if "context" in words else [1, 8, 20]
        assert all((off[first] > 0.3) == (first in wrong) for first in off), "the behaviour has changed"
        assert all(off[first] < 1e-3 for first in off if first not in wrong), "the behaviour has changed"
PY
