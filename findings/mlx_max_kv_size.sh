#!/usr/bin/env bash
# mlx-lm 0.32.2, mlx 0.32.4 (CPU): `max_kv_size` has no effect on a Llama. With Qwen2, where it has one, the
# logits depend on the size of the prefill steps.
#
# Expected: both models keep 64 tokens, and the same 200 tokens give the same logits in one step or token by
# token.
# Seen: a model with a `make_cache` method of its own ignores the limit, and Llama has one, also without any
# sliding window. The rotating cache keeps the first four tokens as attention sinks, but the mask of a prefill
# step hides them, and single tokens see them.
#
#     Llama: max_kv_size 64, 200 tokens read, keys of 200 tokens attended to
#     Qwen2: max_kv_size 64, 200 tokens read, keys of 64 tokens attended to
#     Qwen2, keep=4: largest difference 0.842, largest logit 4.7
#     Qwen2, keep=0: largest difference 0.000, largest logit 4.5
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 \
    sentencepiece==0.2.3 protobuf==7.36.2
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-lm==0.32.2
"$work/venv/bin/python" - <<'PY'
import random
import mlx.core as mx
from mlx_lm.models import llama, qwen2
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

mx.set_default_device(mx.cpu)
sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=2,
             vocab_size=300, rms_norm_eps=1e-5, num_key_value_heads=1, rope_theta=10000.0,
             tie_word_embeddings=True)
draw = random.Random(0)
tokens = [draw.randrange(300) for _ in range(200)]


def read(model, cache, step):
    for start in range(0, 200, step):
        logits = model(mx.array([tokens[start:start + step]]), cache=cache)[0, -1]
        mx.eval(logits)
    return logits


def attended(model, cache):
    read(model, cache, 1)
    return cache[0].keys_and_values()[0].shape[2]


mx.random.seed(0)
models = {"Llama": llama.Model(llama.ModelArgs(model_type="llama", head_dim=32, **sizes)),
          "Qwen2": qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **sizes))}
for name, model in models.items():
    count = attended(model, make_prompt_cache(model, max_kv_size=64))
    print(f"{name}: max_kv_size 64, 200 tokens read, keys of {count} tokens attended to")
    assert count == {"Llama": 200, "Qwen2": 64}[name], "the behaviour has changed"

model = models["Qwen2"]
for keep in 4, 0:
    one, single = (read(model, [RotatingKVCache(64, keep=keep) for _ in range(2)], step) for step in (200, 1))
    worst, largest = (float(mx.abs(numbers).max()) for numbers in (one - single, single))
    print(f"Qwen2, keep={keep}: largest difference {worst:.3f}, largest logit {largest:.1f}")
    assert worst > 0.1 if keep else worst < 1e-3, "the behaviour has changed"
PY
