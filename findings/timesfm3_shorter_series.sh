#!/usr/bin/env bash
# timesfm 3.0.2 (torch 2.13.0 on a CPU): with a longer series in its batch, TimesFM 3 gives a series another forecast.
#
# Expected: `predict_batch` forecasts each series as `predict` does alone. Shorter series get padding in front, which
# is masked. The batch is then only a matter of speed.
# Seen: all but the longest series of a batch get another forecast, and with covariates whose future is known it
# differs much more. Nothing is raised. We found two causes:
# 1. Positions count the padding, and RoPE is not relative here, since `MultiHeadAttention.forward` (timesfm3/torch/
#    transformer.py) multiplies each number of Q and K with its own weight after the rotation (`query_ln`, `key_ln`,
#    `per_dim_scale`). TimesFM 2.5, in the same package, takes the masked patches off its positions.
# 2. Behind each patch of a covariate stand its next values. `TimesFM3Torch._preprocess` (model.py) calls a patch masked
#    only if those are masked as well. So the last patches of padding stay visible, and hold the first real values,
#    which no mean and deviation of this series scale yet.
# In a test of ours, positions without the padding brought the first two lines to 0.000, and masking these patches
# as well the third.
#
#     no covariates:             0.000 0.085 0.085 0.075
#     covariates of the past:    0.000 0.099 0.083 0.082
#     covariates of the future:  0.000 0.388 0.220 0.446
# (A small model with random weights, 4 series of 320, 128, 200 and 37 values. The largest difference of a forecast in
# the batch from the same alone, in units of its standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile safetensors==0.8.0 huggingface_hub==2.4.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps timesfm==3.0.2 2> "$work/log"
WORK="$work" "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import os

import numpy as np
import torch
from safetensors.torch import save_file
from timesfm3 import ModelConfig, TimesFM3Forecaster, TimesFM3Torch
from timesfm3.configs import ResidualBlockConfig, StackedTransformersConfig, TransformerConfig

LENGTHS, HORIZON, SIZE = (320, 128, 200, 37), 96, 64
blocks = ResidualBlockConfig(hidden_dims=SIZE, output_dims=SIZE, use_bias=False, activation="relu")
layers = StackedTransformersConfig(num_layers=3, transformer=TransformerConfig(
    model_dims=SIZE, hidden_dims=SIZE, num_heads=4, attention_norm="rms", feedforward_norm="rms", qk_norm="rms",
    use_rope_seq=True, use_rope_var=True, use_bias=False, ff_activation="relu", deterministic=True))
config = ModelConfig(checkpoint_path=os.environ["WORK"] + "/model.safetensors", device="cpu",
                     residual_block_config=blocks, transformer_config=layers)
torch.manual_seed(0)
model = TimesFM3Torch(input_patch_len=config.input_patch_length, output_patch_len=config.output_patch_length,
                      quantiles=config.quantiles, residual_block_config=blocks, transformer_config=layers)
model.pre_transformer_resblock.set_input_dims(2 * (config.input_patch_length + config.output_patch_length))
for weight in model.parameters():
    weight.data.normal_(0 if weight.dim() > 1 else 0.5, 0.15 if weight.dim() > 1 else 0.1)
save_file(model.state_dict(), config.checkpoint_path)
forecaster = TimesFM3Forecaster(config)

draw = np.random.default_rng(0)
series = [10 + draw.normal(size=length).cumsum() for length in LENGTHS]
past = [5 + draw.normal(size=(2, length)) for length in LENGTHS]
future = [20 + draw.normal(size=(1, length + HORIZON)) for length in LENGTHS]
for words, covariates in {"no covariates": {}, "covariates of the past": {"past_only_covariates": past},
                          "covariates of the future": {"past_future_covariates": future}}.items():
    together = [output.forecast for output in forecaster.predict_batch(list(series), HORIZON, **covariates)]
    off = []
    for row, forecast in enumerate(together):
        alone = forecaster.predict(series[row], HORIZON, **{name: rows[row] for name, rows in covariates.items()}).forecast
        off.append(float(np.abs(forecast - alone).max() / alone.std()))
    print(f"{words + ':':26}", *(f"{error:.3f}" for error in off))
    assert off[0] < 1e-4 and min(off[1:]) > (0.1 if "future" in words else 0.02), "the behaviour has changed"
PY
