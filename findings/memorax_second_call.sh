#!/usr/bin/env bash
# memorax 1.0.1 (jax 0.10.2, flax 0.12.7 on a CPU): two of its memories are wrong from the second call on, so acting step by step
# computes other values than training on whole sequences.
#
# Expected: a sequence in portions, with the carry that each call returns, gives the outputs of one call. An agent acts in
# single steps, and is trained on whole sequences.
# Seen: that holds for the other memories (LRU, S5, Mamba, minGRU, mLSTM, linear attention, GRU, sLSTM, SHM, attention
# without positions and with ALiBi; two of them below). It does not hold for fast and forgetful memory, and for attention
# with RoPE. Nothing is raised.
# Cause: networks/sequence_models/ffm.py, `FFMCell.__call__`, gives the inputs of each call the times 0, 1, 2, ..., while the
# carry has the time of the last call's end. So the memory does not fade between single steps, and grows behind longer portions.
# networks/sequence_models/self_attention.py, `SelfAttention.__call__`, stores the keys after RoPE, and the next call
# rotates them again.
#
#     LRU:                     portions of 6: 0.00, of 2: 0.00, of 1: 0.00
#     attention:               portions of 6: 0.00, of 2: 0.00, of 1: 0.00
#     fast and forgetful:      portions of 6: 4.69, of 2: 3.96, of 1: 3.77
#     attention with RoPE:     portions of 6: 1.16, of 2: 1.20, of 1: 1.78
# (One layer each, with random weights, a sequence of 12. The largest difference of an output from those of one call, in units
# of the outputs' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jax==0.10.2 jaxlib==0.10.2 flax==0.12.7 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile memorax==1.0.1 distrax==0.1.8 chex==0.1.92 optax==0.2.8 tfp-nightly==0.26.0.dev20261027 \
    flashbax==0.1.3 gymnax==1.0.1 tensorboardx==2.6.5 wandb==0.31.0 neptune-scale==0.30.0 \
    jax==0.10.2 jaxlib==0.10.2 flax==0.12.7 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import flax.linen as nn
import jax
import jax.numpy as jnp
from memorax.networks.positional_embeddings import RoPE
from memorax.networks.sequence_models import FFMCell, LRUCell, Memoroid, SelfAttention

LENGTH, SIZE = 12, 16
ATTENTION = dict(features=SIZE, num_heads=2, context_length=LENGTH, dtype=jnp.float32, param_dtype=jnp.float32,
                 kernel_init=nn.initializers.lecun_normal(), bias_init=nn.initializers.zeros_init())
inputs = jax.random.normal(jax.random.key(0), (2, LENGTH, SIZE))
starts = jnp.zeros((2, LENGTH), jnp.int32).at[:, 0].set(1)

for words, model in {"LRU": Memoroid(LRUCell(features=SIZE, hidden_dim=16)), "attention": SelfAttention(**ATTENTION),
                     "fast and forgetful": Memoroid(FFMCell(features=SIZE, memory_size=8, context_size=4, max_period=64)),
                     "attention with RoPE": SelfAttention(**ATTENTION, positional_embedding=RoPE())}.items():
    weights = model.init(jax.random.key(1), inputs, starts)
    call = jax.jit(lambda inputs, starts, carry=None: model.apply(weights, inputs, starts, initial_carry=carry))
    right = call(inputs, starts)[1]
    off = []
    for size in (6, 2, 1):
        carry, parts = None, []
        for first in range(0, LENGTH, size):
            carry, outputs = call(inputs[:, first:first + size], starts[:, first:first + size], carry)
            parts.append(outputs)
        off.append(float(jnp.abs(jnp.concatenate(parts, 1) - right).max() / right.std()))
    print(f"{words + ':':24} portions of 6: {off[0]:.2f}, of 2: {off[1]:.2f}, of 1: {off[2]:.2f}")
    wrong = words in ("fast and forgetful", "attention with RoPE")
    assert min(off) > 0.1 if wrong else max(off) < 1e-3, "the behaviour has changed"
PY
