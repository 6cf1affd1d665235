#!/usr/bin/env bash
# dantinox 0.4.14 (jax 0.9.2 and flax 0.12.6 on a CPU): with learned positions, or with latent attention (MLA), `generate`
# with its cache answers by another model than without.
#
# Expected: greedy tokens with `use_cache=True` (the default) are those of `use_cache=False`, and each is the best token of
# one pass over the finished text.
# Seen: so it is with multi-head attention and rotary or fixed positions. With `pos_encoding="learned"` every token but the
# first is computed as if it stood at the start of the text: `Transformer._add_pos` (dantinox/core/model.py) takes learned
# positions from zero, whatever `cache_index` is. With `attention="mla"` every token but the first sees nothing but itself:
# the branch of `MLAAttention.__call__` (dantinox/core/attention.py) for `inference_mode=False`, the default, does not use
# the cache that it is given. With `inference_mode=True` MLA is exact. Nothing is raised, and no warning is given.
#
#     attention mha, positions rotary:   with the cache 1.00, without 1.00
#     attention mha, positions absolute: with the cache 1.00, without 1.00
#     attention mha, positions learned:  with the cache 0.22, without 1.00
#     attention mla, positions rotary:   with the cache 0.04, without 1.00
#     attention mla, inference mode:     with the cache 1.00, without 1.00
# (Two layers with random weights in float32, two prompts of 7 tokens, 25 new ones. The share of the new tokens that are the
# best ones in one pass over the finished text.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jax==0.9.2 jaxlib==0.9.2 flax==0.12.6 optax==0.2.8 numpy==2.4.6 \
    orbax-checkpoint==0.12.8 tensorstore==0.1.86 PyYAML==6.0.4 tokenizers==0.23.3 huggingface-hub==2.4.0 msgpack==1.2.4 \
    tqdm==4.70.1 dantinox==0.4.14 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import dantinox as dx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PROMPT, NEW = 7, 25
rng = np.random.default_rng(0)
prompts = jnp.asarray(rng.integers(3, 64, (2, PROMPT)), jnp.int32)


@nnx.jit
def best(model, tokens):
    return model(tokens, deterministic=True).logits.argmax(-1)


for name, options, broken in (
        ("attention mha, positions rotary:", {}, False),
        ("attention mha, positions absolute:", {"pos_encoding": "absolute"}, False),
        ("attention mha, positions learned:", {"pos_encoding": "learned"}, True),
        ("attention mla, positions rotary:", {"attention": "mla"}, True),
        ("attention mla, inference mode:", {"attention": "mla", "inference_mode": True}, False)):
    paradigm = dx.Paradigm(dx.ModelConfig(
        paradigm="ar", dim=32, n_heads=4, num_blocks=2, vocab_size=64, max_context=PROMPT + NEW, down_dim_q=24,
        down_dim_kv=24, rope_dim=8, **options))
    model = paradigm.build_model(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.35, leaf.shape), leaf.dtype)
                                   if leaf.ndim > 1 else leaf, nnx.state(model, nnx.Param)))
    share = []
    for use_cache in (True, False):
        texts = paradigm.generate(model, prompts, jax.random.key(0), max_new_tokens=NEW, greedy=True, use_cache=use_cache)
        wanted = np.asarray(best(model, texts))[:, PROMPT - 1:-1]
        share.append(float((wanted == np.asarray(texts)[:, PROMPT:]).mean()))
    print(f"{name:34} with the cache {share[0]:.2f}, without {share[1]:.2f}")
    assert share[1] == 1 and (share[0] < 0.4 if broken else share[0] == 1), "the behaviour has changed"
PY
