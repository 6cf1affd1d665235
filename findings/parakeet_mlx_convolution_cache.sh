#!/usr/bin/env bash
# parakeet-mlx 0.7.0 (mlx 0.32.4 on a CPU): a streamed portion's convolution takes the portion's own end for its past.
#
# Expected: the documentation says that with `depth` 1 the first encoder layer matches the pass without streaming exactly, and
# with `depth` N all layers do. So a layer's convolution with the streaming cache gives the frames of one pass, for all frames
# that are not computed again with the next portion.
# Seen: the first frames of each portion are wrong, as many as the convolution looks back. The cache stores the last frames of
# the new portion first, and then puts what it has stored in front of the portion. So the left context of a portion is its own
# end, also for the very first one, which has no past. With `keep_original_attention`, the cache of keys has a fault of its own: it
# counts all frames, also those that it has dropped, and the encoder makes the relative positions for that many. Once the cache
# is full, the positions are wrong. Nothing is raised.
# (cache.py: `RotatingConformerCache.update_and_fetch_conv` and `update_and_fetch_kv`; conformer.py: `Conformer.__call__`.)
#
#     convolution, portions of 10 new frames: frames 0 to 3 of each portion off by up to 2.96, the others by 0.00
#     attention, portions of 8, the cache keeps 16: off by 0.00 0.00 0.00 0.31 0.43 0.44 0.32 0.30 0.64 0.39
# (Random weights. A kernel of 9, so 4 frames to the left; 4 more frames come with each portion and again with the next one. In
# units of the standard deviation. Two of four lines.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "mlx[cpu]==0.32.4" numpy==2.4.6 librosa==0.11.0 dacite==1.9.2 huggingface-hub==2.4.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps parakeet-mlx==0.7.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import mlx.core as mx
from parakeet_mlx.attention import RelPositionalEncoding, RelPositionMultiHeadAttention
from parakeet_mlx.cache import RotatingConformerCache
from parakeet_mlx.conformer import ConformerArgs, Convolution

mx.set_default_device(mx.cpu)
mx.random.seed(0)
WIDTH, FRAMES, SIDE, KEPT = 32, 80, 4, 16
sounds = mx.random.normal((1, FRAMES, WIDTH))

convolution = Convolution(ConformerArgs(feat_in=WIDTH, n_layers=1, d_model=WIDTH, n_heads=4, ff_expansion_factor=2,
                                        subsampling_factor=1, self_attention_model="rel_pos", subsampling="dw_striding",
                                        conv_kernel_size=2 * SIDE + 1, subsampling_conv_channels=8, pos_emb_max_len=200))
convolution.eval()
whole = convolution(sounds)
for size in (10, 20):
    cache, first, others = RotatingConformerCache(KEPT, cache_drop_size=SIDE), 0.0, 0.0
    for start in range(0, FRAMES - size, size):
        made = convolution(sounds[:, start:start + size + SIDE], cache=cache)[:, :size]
        errors = mx.abs(made - whole[:, start:start + size]).max(axis=(0, 2)) / mx.sqrt(mx.var(whole))
        first, others = max(first, float(errors[:SIDE].max())), max(others, float(errors[SIDE:].max()))
    print(f"convolution, portions of {size} new frames: frames 0 to {SIDE - 1} of each portion off by up to {first:.2f}, the others by {others:.2f}")
    assert first > 0.5 and others < 1e-3, "the behaviour has changed"


def first_frame(end):
    portion = mx.concatenate([sounds[:, :20], mx.full((1, 4, WIDTH), end)], axis=1)
    return convolution(portion, cache=RotatingConformerCache(KEPT, cache_drop_size=SIDE))[:, 0]


change = float(mx.abs(first_frame(0.0) - first_frame(3.0)).max() / mx.sqrt(mx.var(whole)))
print(f"convolution: the last frames of a portion of 24 change its first frame by {change:.2f}")
assert change > 0.1, "the behaviour has changed"

attention, positions, size = RelPositionMultiHeadAttention(4, WIDTH), RelPositionalEncoding(WIDTH, 200, False), 8
cache, right, made = RotatingConformerCache(KEPT), [], []
for start in range(0, FRAMES, size):
    portion = sounds[:, start:start + size]
    made.append(attention(portion, portion, portion, pos_emb=positions(portion, offset=cache.offset)[1], cache=cache))
    seen = sounds[:, max(0, start - KEPT):start + size]
    right.append(attention(seen, seen, seen, pos_emb=positions(seen)[1])[:, -size:])
unit = mx.sqrt(mx.var(mx.concatenate(right, axis=1)))
errors = [float(mx.abs(one - other).max() / unit) for one, other in zip(made, right)]
print(f"attention, portions of {size}, the cache keeps {KEPT}: off by", *(f"{error:.2f}" for error in errors))
full = KEPT // size
assert max(errors[:full + 1]) < 1e-3 and min(errors[full + 1:]) > 0.1, "the behaviour has changed"
PY
