#!/usr/bin/env bash
# jax 0.10.2, flax 0.12.8 (CPU): a decode step with `is_causal` or a window sees the first cached key alone,
# an empty cache answers with the mean of its slots, and a full cache is written over.
#
# Expected: the one query of a decode step stands at the end of the keys, or the call is refused. A row with
# zero valid keys gives zeros or NaN. A thirteenth token in a cache of twelve raises an error.
# Seen: `dot_product_attention` counts queries and keys from the same start, so the newest token counts as
# position 0. With a length of zero it weighs all slots alike, also those that hold another request's V.
# `MultiHeadAttention` of flax writes tokens that find no room into the last slot, and its index goes on.
# `dynamic_update_slice` moves a page that does not fit back over tokens that are valid.
#
#     decode step, causal: 2.350 off, from the first value: 0.000
#     decode step, window: 2.602 off, from the first value: 0.000
#     no valid keys, from the mean of all six values: 0.000
#     12 tokens in a cache of 8, from token 9 on off by: 0.175 0.184 0.682 1.084, index 12
#     a page of 4 tokens at 6 of 8: [0, 1, 2, 3, 90, 91, 92, 93]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6 jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import dot_product_attention as attention


def off(a, b):
    return float(jnp.abs(a - b).max())


query, key, value = (jax.random.normal(jax.random.key(seed), (1, 6, 4, 8)) for seed in (1, 2, 3))
last = query[:, -1:]
for name, options in (("causal", {}), ("window", {"local_window_size": (2, 0)})):
    right = attention(query, key, value, is_causal=True, **options)[:, -1:]
    step = attention(last, key, value, **(options or {"is_causal": True}))
    first = off(step, value[:, :1])
    print(f"decode step, {name}: {off(step, right):.3f} off, from the first value: {first:.3f}")
    assert off(step, right) > 1 and first < 1e-5, "the behaviour has changed"
empty = attention(last, key, value, key_value_seq_lengths=jnp.array([0]))
mean = off(empty, value.mean(1, keepdims=True))
print(f"no valid keys, from the mean of all six values: {mean:.3f}")
assert mean < 1e-5, "the behaviour has changed"

hidden = jax.random.normal(jax.random.key(0), (1, 12, 32))
layer = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
whole = layer(hidden, mask=nnx.make_causal_mask(jnp.ones((1, 12))))
layer.init_cache((1, 8, 32))
errors = [off(layer(hidden[:, at:at + 1], decode=True), whole[:, at:at + 1]) for at in range(12)]
index = int(layer.cache_index[...])
print("12 tokens in a cache of 8, from token 9 on off by:", *(f"{error:.3f}" for error in errors[8:]), end="")
print(f", index {index}")
assert max(errors[:8]) < 1e-4 and min(errors[8:]) > 0.05 and index == 12, "the behaviour has changed"
pages = jax.lax.dynamic_update_slice(jnp.arange(8), jnp.arange(90, 94), (6,)).tolist()
print(f"a page of 4 tokens at 6 of 8: {pages}")
assert pages == [0, 1, 2, 3, 90, 91, 92, 93], "the behaviour has changed"
PY
