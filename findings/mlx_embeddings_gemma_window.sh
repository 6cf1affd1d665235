#!/usr/bin/env bash
# mlx-embeddings 0.1.0, mlx-lm 0.32.2, mlx 0.32.4 (CPU) beside transformers 5.24.0 (torch 2.13.0): Gemma 3's vectors are
# computed without the sliding window.
#
# Expected: the same weights and the same configuration give the vectors that transformers gives. EmbeddingGemma, which
# this module is for, has layers with a window: each token sees the tokens at most half a window before and behind it.
# Seen: all layers see the whole text, since a mask for padding is always made, and a given mask replaces those of the
# windows. Texts that fit into the window are exact, and longer ones move away from the reference. A window of 512 in the
# configuration reaches 256 tokens to each side, so documents of more than 257 tokens are concerned. Nothing warns.
# (models/gemma3_text.py: `Model.__call__` and `Gemma3Model.__call__`.)
#
#     window of 32:  16 tokens: largest difference 0.000, cosine of the means 1.0000
#     window of 32:  17 tokens: largest difference 0.000, cosine of the means 1.0000
#     window of 32:  18 tokens: largest difference 0.339, cosine of the means 0.9998
#     window of 32: 100 tokens: largest difference 3.055, cosine of the means 0.9085
# (A model of four layers with random weights. Its largest number is about 3.4.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 mlx-vlm==0.7.10 \
    transformers==5.24.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-embeddings==0.1.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import mlx.core as mx
import numpy as np
import torch
from mlx_embeddings.models import gemma3_text
from transformers import Gemma3TextConfig, Gemma3TextModel

mx.set_default_device(mx.cpu)
torch.set_grad_enabled(False)
torch.manual_seed(0)
common = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, vocab_size=128, query_pre_attn_scalar=16, rms_norm_eps=1e-6, sliding_window=32,
              max_position_embeddings=512)
reference = Gemma3TextModel(Gemma3TextConfig(
    **common, use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention"] * 2,
    attn_implementation="eager",
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})).eval()
for weight in (weight for weight in reference.parameters() if weight.dim() > 1):
    weight.normal_(0, 0.2)
model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(dict(
    common, model_type="gemma3_text", sliding_window_pattern=2, rope_theta=1e6, rope_local_base_freq=1e4)))
model.load_weights([(f"model.{name}", mx.array(weight.numpy())) for name, weight in reference.state_dict().items()],
                   strict=False)
model.eval()
for length in (8, 16, 17, 18, 40, 100):
    tokens = np.random.default_rng(length).integers(1, 128, (1, length))
    right = reference(torch.tensor(tokens)).last_hidden_state.numpy()
    other = np.array(model(mx.array(tokens)).last_hidden_state)
    off, means = np.abs(right - other).max(), (right.mean((0, 1)), other.mean((0, 1)))
    cosine = means[0] @ means[1] / np.linalg.norm(means[0]) / np.linalg.norm(means[1])
    print(f"window of 32: {length:3} tokens: largest difference {off:.3f}, cosine of the means {cosine:.4f}")
    assert off < 1e-4 if length <= 17 else off > 0.1, "the behaviour has changed"
assert cosine < 0.97, "the behaviour has changed"
PY
