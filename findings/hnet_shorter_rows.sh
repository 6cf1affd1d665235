#!/usr/bin/env bash
# h-net-dynamic-chunking 0.5.19 (torch 2.13.0 on a CPU): with a cache, rows shorter than the longest go on from padding.
#
# Expected: a batch of prompts of unequal lengths, with `lens` and return_hiddens=True, and then single steps with the
# returned cache give each row what it gets alone. And a nested HNet in portions gives what it gives at once.
# Seen: the prompts are right, and so are the steps of the longest row. Steps of shorter rows are wrong for most
# seeds. The chunker keeps the key and the upsampled vector of the last place of the padded batch, not those of a
# row's own last token. So a shorter row looks for its next boundary beside padding. A nested HNet does this by
# itself: its outer level gives rows of unequal numbers of chunks to the inner one, so portions of several steps are
# wrong for a batch, and right for a batch of one and for single steps.
# Nothing is raised.
#
#     seed 0: prompts of 5, 8, 3 0.00 off, their steps 2.08, 0.00, 0.37 off; nested, portions of 1, 2, 3, 5: one row
#         0.00, 0.00, 0.00, 0.00 off, three rows 0.00, 1.58, 1.50, 1.56 off
#     seed 1: prompts of 5, 8, 3 0.00 off, their steps 1.04, 0.00, 2.15 off; nested, portions of 1, 2, 3, 5: one row
#         0.00, 0.00, 0.00, 0.00 off, three rows 0.00, 1.15, 1.15, 1.54 off
# (Random weights, identities as encoder, network and decoder as in the readme, three seeds. The largest difference of
# an output, in units of the outputs' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps \
    h-net-dynamic-chunking==0.5.19 assoc-scan==0.0.6 einops==0.8.2 einx==0.4.3 frozendict==2.5.1 loguru==0.7.3 packaging==26.4 \
    torch-einops-utils==0.2.0 tqdm==4.70.1 vector-quantize-pytorch==1.32.0 x-mlps-pytorch==0.6.9 x-transformers==2.31.10 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from torch.nn import Identity
from h_net_dynamic_chunking.h_net import HNet

torch.set_num_threads(1)
torch.set_grad_enabled(False)
PROMPTS, NEW = torch.tensor([5, 8, 3]), 8


def build(inner):
    model = HNet(Identity(), inner, Identity(), dim=32).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.normal_(0, 0.15)
    return model


def in_portions(model, steps, length):
    cache, parts = None, []
    for portion in steps.split(length, 1):
        result = model(portion, cache=cache, return_hiddens=True)
        cache = result.next_cache
        parts.append(result.output)
    return torch.cat(parts, 1)


shorter, batch = [], []
for seed in (0, 1, 2):
    torch.manual_seed(seed)
    flat, nested = build(Identity()), build(build(Identity()))
    steps = torch.randn(3, 24, 32)
    alone = [flat(steps[row:row + 1, :length + NEW]).output[0] for row, length in enumerate(PROMPTS)]
    scale = torch.cat(alone).std()
    result = flat(steps[:, :8], lens=PROMPTS, return_hiddens=True)
    off = {"prompt": [float((result.output[row, :length] - alone[row][:length]).abs().max() / scale)
                      for row, length in enumerate(PROMPTS)], "steps": [0.0] * 3}
    for new in range(NEW):
        step = torch.stack([steps[row, length + new] for row, length in enumerate(PROMPTS)])[:, None]
        result = flat(step, cache=result.next_cache, return_hiddens=True)
        for row, length in enumerate(PROMPTS):
            error = float((result.output[row, 0] - alone[row][length + new]).abs().max() / scale)
            off["steps"][row] = max(off["steps"][row], error)
    right = nested(steps).output
    one, three = ([float((in_portions(nested, steps[:rows], length) - right[:rows]).abs().max() / right.std())
                   for length in (1, 2, 3, 5)] for rows in (1, 3))
    print(f"seed {seed}: prompts of 5, 8, 3 {max(off['prompt']):.2f} off, their steps",
          f"{', '.join(f'{error:.2f}' for error in off['steps'])} off; nested, portions of 1, 2, 3, 5: one row",
          f"{', '.join(f'{error:.2f}' for error in one)} off, three rows {', '.join(f'{error:.2f}' for error in three)} off")
    assert max(off["prompt"]) < 1e-3 and off["steps"][1] < 1e-3 and max(one) < 1e-3 and three[0] < 1e-3, "the behaviour has changed"
    shorter += [off["steps"][0], off["steps"][2]]
    batch += three[1:]
assert max(shorter) > 0.3 and min(batch) > 0.3, "the behaviour has changed"
PY
