#!/usr/bin/env bash
# mlx-vlm 0.7.10, mlx 0.32.4 (CPU): Llama 3.2 Vision (mllama) is not causal in a text without images, and its cached steps
# give other logits than one pass.
#
# Expected: without an image, a text in portions with the cache gives the logits of one pass, and later tokens do not
# change the logits of earlier ones. Layers with cross-attention have nothing to attend to.
# Seen: both fail. Without the states of an image, a cross-attention layer takes half of its own query heads as keys and the
# other half as values, without a mask. So in one pass each token attends to later tokens, and in a cached step the token
# attends to itself only. With the gates of these layers at 0, as before training, all is exact. Nothing is raised.
#
#     seed 0, gates 0.0: portions of 1 0.00 off, of 10 0.00, of 30 0.00; without the last 30 tokens, the first 30 are
#         0.00 off
#     seed 0, gates 0.5: portions of 1 3.27 off, of 10 1.95, of 30 0.90; without the last 30 tokens, the first 30 are
#         0.90 off
# (Three layers with self-attention and one with cross-attention, random weights, two seeds, 60 tokens. The largest
# difference of a logit, in units of the standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 requests==2.34.2 pillow==13.0.0 \
    opencv-python-headless==5.0.0.93 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-vlm==0.7.10 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.mllama.config import TextConfig
from mlx_vlm.models.mllama.language import LanguageModel

mx.set_default_device(mx.cpu)


def off(logits, right):
    return float(mx.abs(logits - right).max() / mx.std(right))


for seed in (0, 1):
    for gate in (0.0, 0.5):
        mx.random.seed(seed)
        model = LanguageModel(TextConfig(hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4,
                                         num_key_value_heads=2, vocab_size=128, cross_attention_layers=[1])).eval()
        model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
        layer = model.model.layers[1]
        layer.cross_attn_attn_gate = layer.cross_attn_mlp_gate = mx.array([gate])
        tokens = mx.array(np.random.default_rng(seed).integers(0, 128, (1, 60)))
        right, portions = model(tokens).logits, {}
        for length in (1, 10, 30):
            cache = make_prompt_cache(model)
            portions[length] = off(mx.concatenate([model(tokens[:, start:start + length], cache=cache).logits
                                                   for start in range(0, 60, length)], 1), right)
        earlier = off(model(tokens[:, :30]).logits, right[:, :30])
        print(f"seed {seed}, gates {gate}: portions of 1 {portions[1]:.2f} off, of 10 {portions[10]:.2f}, of 30",
              f"{portions[30]:.2f}; without the last 30 tokens, the first 30 are {earlier:.2f} off")
        values = [*portions.values(), earlier]
        assert max(values) < 1e-3 if gate == 0 else min(values) > 0.1, "the behaviour has changed"
PY
