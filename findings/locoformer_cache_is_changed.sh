#!/usr/bin/env bash
# locoformer 0.3.2 (torch 2.13.0 on a CPU): a step at the end of a window changes the cache that it was given.
#
# Expected: a step returns a new cache and leaves the old one, so that two steps from one cache, such as two actions to
# compare from one state, give what each gives alone.
# Seen: at the end of each window from the second one on, the step puts a segment into the old cache's own queue of
# memory segments, which the new cache shares. The second step from the old cache has another memory, and with the
# very same input it gives another output. Its keys and values are not changed, so a step within a window is exact.
# Nothing is raised.
#
#     seed 0, memory of 1: within windows 0.00 off; at step 16 1.67 off, at step 24 3.44 off, at step 32 3.25 off, at
#         step 40 2.55 off; from two copies of the cache 0.00 off
#     seed 0, memory of 2: within windows 0.00 off; at step 16 0.43 off, at step 24 0.83 off, at step 32 2.08 off, at
#         step 40 3.55 off; from two copies of the cache 0.00 off
# (Three layers with random weights, a window of 8, steps of one token, two seeds. The same step twice from one cache:
# the largest difference of an output, in units of the outputs' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps \
    locoformer==0.3.2 rotary-embedding-torch==0.9.1 accelerate==1.15.0 assoc-scan==0.0.6 attrs==26.1.0 beartype==0.23.1 boltons==26.2.0 \
    discrete-continuous-embed-readout==0.2.12 einops==0.8.2 einx==0.4.3 ema-pytorch==0.8.3 env-ssl-wrapper==0.6.3 \
    evolutionary-policy-optimization==0.5.0 face==26.0.1 frozendict==2.5.1 glom==25.12.0 hl-gauss-pytorch==0.3.0 huggingface_hub==2.4.0 \
    hyper-connections==0.4.11 loguru==0.7.3 mean-conc-beta==0.2.9 memmap-replay-buffer==0.2.3 packaging==26.4 psutil==7.2.2 pyyaml==6.0.4 \
    safetensors==0.8.0 torch-einops-utils==0.2.0 tqdm==4.70.1 x-evolution==0.1.35 x-mlps-pytorch==0.6.9 x-ppo==0.0.26 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import copy
import torch
from locoformer.locoformer import TransformerXL

torch.set_num_threads(1)
torch.set_grad_enabled(False)

for seed in (0, 1):
    for segments in (1, 2):
        torch.manual_seed(seed)
        model = TransformerXL(dim=32, depth=3, window_size=8, dim_head=16, heads=2, max_mem_segments=segments).eval()
        for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
            matrix.normal_(0, 0.2)
        steps, cache, outputs, twice, copied = torch.randn(2, 40, 32), None, [], {}, {}
        for number, step in enumerate(steps.split(1, 1), 1):
            if number > 1:
                saved = copy.deepcopy(cache)
                first, _ = model(step, cache=copy.deepcopy(saved), return_kv_cache=True)
                again, _ = model(step, cache=copy.deepcopy(saved), return_kv_cache=True)
                copied[number] = float((first - again).abs().max())
                model(step, cache=cache, return_kv_cache=True)
                second, _ = model(step, cache=cache, return_kv_cache=True)
                twice[number] = float((first - second).abs().max())
                cache = saved
            output, cache = model(step, cache=cache, return_kv_cache=True)
            outputs.append(output)
        scale = float(torch.cat(outputs, 1).std())
        ends = {number: twice[number] / scale for number in (16, 24, 32, 40)}
        within = max(error / scale for number, error in twice.items() if number not in ends)
        print(f"seed {seed}, memory of {segments}: within windows {within:.2f} off;",
              ", ".join(f"at step {number} {error:.2f} off" for number, error in ends.items()) + ";",
              f"from two copies of the cache {max(copied.values()) / scale:.2f} off")
        assert within < 1e-3 and max(copied.values()) < 1e-5, "the behaviour has changed"
        assert min(ends[number] for number in (24, 32, 40)) > 0.1, "the behaviour has changed"
PY
