#!/usr/bin/env bash
# espnet 202511 (torch 2.13.0 on a CPU): streaming encoders without convolutions in front read a frame twice at each border.
#
# Expected: the two encoders for streaming give the same frames for an input in portions and at once. With convolutions in
# front, the default, they do, for portions of all lengths here.
# Seen: with `input_layer="linear"` or none, a portion that is not the last one gives its last two frames to the next one, too.
# But it leaves out only one of them itself. So one frame at each border goes through the encoder twice. The output has one
# frame more for each border, and all frames behind the first border stand at wrong places. The overlap is meant for
# convolutions, which need it. Nothing is raised.
# (asr/encoder/contextual_block_transformer_encoder.py and contextual_block_conformer_encoder.py: `forward_infer`.)
#
#     transformer, conv2d: 400 frames in portions of 16, 40, 100: 99 99 99 frames (at once 99), 0.00 0.00 0.00 off
#     transformer, linear: 400 frames in portions of 16, 40, 100: 424 409 403 frames (at once 400), 5.38 5.26 5.65 off
# (Two of six lines. Two layers with random weights. The largest difference of the frames that both have, in units of their
# standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile typeguard==4.6.1 editdistance==0.8.1 packaging==26.4 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps espnet==202511 torch-complex==0.4.4 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from espnet2.asr.encoder.contextual_block_conformer_encoder import ContextualBlockConformerEncoder
from espnet2.asr.encoder.contextual_block_transformer_encoder import ContextualBlockTransformerEncoder

torch.set_num_threads(1)
torch.set_grad_enabled(False)
frames, sizes = 400, (16, 40, 100)
for name, kind in (("transformer", ContextualBlockTransformerEncoder), ("conformer", ContextualBlockConformerEncoder)):
    for front in ("conv2d", "linear", None):
        torch.manual_seed(0)
        model = kind(32, 32, 4, 48, 2, block_size=20, hop_size=8, look_ahead=4, input_layer=front).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
        inputs = torch.randn(1, frames, 32)
        whole = model(inputs, torch.tensor([frames]), infer_mode=True)[0]
        counts, off = [], []
        for size in sizes:
            state, made, portions = None, [], inputs.split(size, 1)
            for place, portion in enumerate(portions, 1):
                output, _, state = model(portion, torch.tensor([portion.size(1)]), state,
                                         is_final=place == len(portions), infer_mode=True)
                made.append(output)
            made = torch.cat(made, 1)
            counts.append(made.size(1))
            off.append(float((made[:, :whole.size(1)] - whole).abs().max() / whole.std()))
        print(f"{name}, {front or 'none'}: {frames} frames in portions of {', '.join(map(str, sizes))}: "
              f"{' '.join(map(str, counts))} frames (at once {whole.size(1)}), "
              f"{' '.join(f'{value:.2f}' for value in off)} off")
        extra = [0] * 3 if front == "conv2d" else [-(-frames // size) - 1 for size in sizes]
        assert counts == [whole.size(1) + more for more in extra], "the behaviour has changed"
        assert all((value < 1e-3) == (front == "conv2d") for value in off), "the behaviour has changed"
PY
