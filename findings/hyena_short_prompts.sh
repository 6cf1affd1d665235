#!/usr/bin/env bash
# vtx 1.1.0 and stripedhyena 0.2.2, the libraries of Evo 2 and Evo (torch 2.13.0 on a CPU): behind a prompt shorter than
# a filter, steps with the cache compute something else than a pass over the whole text.
#
# Expected: a prompt in one pass and then single steps give the outputs of one pass, for prompts of any length.
# (Sequences of DNA are often begun with one letter, or with ACGT, as the examples of these models do.)
# Seen: that is so for prompts with as many tokens as the filter has behind its first one. With shorter ones it is not, and
# nothing is raised.
# vtx: `HyenaInferenceEngine.step_fir` (vortex/model/engine.py) lets a short state grow, but multiplies it with the
# first numbers of the filter, where a convolution needs the last ones. So all steps are wrong until the state is full.
# Evo 2's short filters hold 3 and 7 numbers. Filters of 128, which are stored the other way round, are right.
# stripedhyena: `HyenaInferenceEngine.step_fir` (engine.py) never lets the state grow. Behind one token its single column is
# multiplied with each number of the filter, and all later steps are wrong.
# Its `prefill_style="recurrence"` gives other outputs than the default "fft" for a prompt of any length, since
# `prefill_via_direct_recurrence` takes the new real part of a state when it computes the imaginary one.
#
#     vtx, a filter of 3:                      1: 1.79 2: 0.00 4: 0.00 6: 0.00 8: 0.00
#     vtx, a filter of 7:                      1: 5.16 2: 5.16 4: 5.16 6: 0.00 8: 0.00
#     vtx, a filter of 128:                    1: 0.00 2: 0.00 4: 0.00 6: 0.00 8: 0.00
#     stripedhyena, prefill_style fft:         1: 7.41 2: 0.00 4: 0.00 6: 0.00 8: 0.00
#     stripedhyena, prefill_style recurrence:  1: 7.40 2: 0.62 4: 2.23 6: 2.23 8: 2.23
# (Layers with random weights, a text of 16 tokens, prompts of 1 to 8. The largest difference of an output from one pass, in units
# of their standard deviation. The layers are tried alone, since those with attention need a GPU.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile einops==0.8.1 rich==14.3.3 pyyaml==6.0.4 tqdm==4.67.1 wheel==0.45.1 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps vtx==1.1.0 stripedhyena==0.2.2 2> "$work/log"
cd "$work"  # vtx writes a log here
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import warnings

import torch
from stripedhyena.cache import RecurrentInferenceParams
from stripedhyena.model import ParallelHyenaFilter
from stripedhyena.utils import dotdict
from vortex.model.engine import HyenaInferenceEngine

warnings.filterwarnings("ignore")
torch.set_grad_enabled(False)
LENGTH, SIZE = 16, 32


def show(name, off):
    print(f"{name + ':':40}", *(f"{prompt}: {error:.2f}" for prompt, error in off.items()))


def text(size):
    return torch.randn(2, LENGTH, size, generator=torch.Generator().manual_seed(1))


for taps in (3, 7, 128):
    torch.manual_seed(0)
    engine, u = HyenaInferenceEngine(layer_idx=0), text(SIZE).transpose(1, 2)
    weight, bias, flip = torch.randn(SIZE, 1, taps), torch.randn(SIZE), taps >= 128

    def convolve(part, **options):
        return engine.parallel_fir(torch.nn.functional.conv1d, part, weight, bias, part.shape[2], dims=None, dim_last=False,
                                   fir_length=taps, gated_bias=flip, **options)

    right, off = convolve(u)[0], {}
    for prompt in (1, 2, 4, 6, 8):
        first, state = convolve(u[..., :prompt], inference_params={})
        rows = [first]
        for token in u[..., prompt:].unbind(2):
            row, state = engine.step_fir(token, state, weight, bias, gated_bias=flip, flip_filter=flip)
            rows.append(row[..., None])
        off[prompt] = float((torch.cat(rows, 2) - right).abs().max() / right.std())
        wrong = not flip and prompt < taps - 1
        assert off[prompt] > 0.1 if wrong else off[prompt] < 1e-3, "the behaviour has changed"
    show(f"vtx, a filter of {taps}", off)

for style in ("fft", "recurrence"):
    torch.manual_seed(0)
    layer = ParallelHyenaFilter(dotdict(state_size=4, hidden_size=SIZE, num_filters=SIZE, num_attention_heads=4,
                                        short_filter_length=3, short_filter_bias=True, hyena_filter_groups=1,
                                        prefill_style=style, use_flashfft=False), 0)
    layer.poles.data = torch.rand_like(layer.poles) * torch.tensor([0.8, 0.5])
    layer.D.data.normal_()
    u = text(3 * SIZE)
    right, off = layer(u)[0], {}
    for prompt in (1, 2, 4, 6, 8):
        cache = RecurrentInferenceParams(fir_filter_length=3, state_dim=4)
        rows = [layer(part, inference_params=cache)[0] for part in u.split([prompt] + (LENGTH - prompt) * [1], 1)]
        off[prompt] = float((torch.cat(rows, 1) - right).abs().max() / right.std())
        wrong = prompt == 1 or style == "recurrence"
        assert off[prompt] > 0.1 if wrong else off[prompt] < 1e-3, "the behaviour has changed"
    show(f"stripedhyena, prefill_style {style}", off)
PY
