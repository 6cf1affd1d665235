#!/usr/bin/env bash
# funasr 1.4.16 (torch 2.13.0 on a CPU): with a `chunk_size` without look-ahead, a streaming encoder reads all earlier portions
# again, and its look-back is empty.
#
# Expected: `chunk_size=[0, 10, 5]` means portions of 10 frames and 5 frames of look-ahead. So with `[0, 10, 0]` each portion gives
# 10 frames, and `encoder_chunk_look_back=4` lets it see the 4 portions before it.
# Seen: the portions give 10, 20, 30, 40, 50 frames. The cache of frames is cut to its last 0 frames, which is all of them. The
# caches of keys and values are cut up to their last 0 frames, which leaves none. So the look-back changes nothing. The predictor of
# tokens reads only the first 10 frames of each output, which are the first portion's each time. Nothing is raised.
# (models/scama/encoder.py: `_add_overlap_chunk`; models/sanm/attention.py: `MultiHeadedAttentionSANM.forward_chunk`.)
#
#     look-ahead 5: 15 15 15 15 15 frames, 40 kept keys, look-back changes frames by 2.19
#     look-ahead 0: 10 20 30 40 50 frames, 0 kept keys, look-back changes frames by 0.00
# (Two of three lines. Three layers with random weights, 50 frames.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 PyYAML==6.0.3 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps funasr==1.4.16 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import contextlib
import io

import torch

with contextlib.redirect_stdout(io.StringIO()):  # importing names the optional packages that are missing
    from funasr.models.scama.encoder import SANMEncoderChunkOpt

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
FRAMES, SIZE, INPUT, WIDTH = 50, 10, 20, 32
encoder = SANMEncoderChunkOpt(input_size=INPUT, output_size=WIDTH, attention_heads=4, linear_units=64, num_blocks=3,
                              input_layer="pe_online", kernel_size=5).eval()
for weight in (weight for weight in encoder.parameters() if weight.dim() > 1):
    weight.normal_(0, 0.3)
sounds = torch.randn(1, FRAMES, INPUT)


def stream(ahead, back):
    cache = dict(start_idx=0, chunk_size=[0, SIZE, ahead], encoder_chunk_look_back=back, last_chunk=False, opt=None,
                 feats=torch.zeros(1, ahead, INPUT), tail_chunk=False)
    frames = [encoder.forward_chunk(portion.clone(), torch.tensor([SIZE]), cache=cache)[0] for portion in sounds.split(SIZE, 1)]
    return frames, cache["opt"][0]["k"].shape[2] if back else 0


for ahead in (5, 1, 0):
    frames, keys = stream(ahead, 4)
    change = max(float((one - other).abs().max()) for one, other in zip(frames, stream(ahead, 0)[0]))
    counts = [one.size(1) for one in frames]
    print(f"look-ahead {ahead}: {' '.join(map(str, counts))} frames, {keys} kept keys, look-back changes frames by {change:.2f}")
    if ahead:
        assert counts == [SIZE + ahead] * 5 and keys == 4 * SIZE and change > 0.1, "the behaviour has changed"
    else:
        assert counts == [10, 20, 30, 40, 50] and keys == 0 and change == 0, "the behaviour has changed"
PY
