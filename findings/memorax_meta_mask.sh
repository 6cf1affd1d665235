#!/usr/bin/env bash
# memorax 1.0.1 (jax 0.10.2, flax 0.12.7 on a CPU): `MetaMaskWrapper` empties the memory at each step within a trial, and keeps it
# from one trial to the next.
#
# Expected: in meta learning the memory lives through all episodes of a trial (`steps_per_trial` steps), and is emptied at the
# start of the next one. A mask of 1 empties it, as in all memories of the package.
# Seen: the other way round. Within a trial, an output depends on its own input alone. The first output of a trial depends on
# the last step of the trial before. Nothing is raised. Without the wrapper, with a mask that is 1 at the first step of
# each trial, the memory is as expected.
# Cause: networks/sequence_models/wrappers.py, `MetaMaskWrapper.__call__`: the mask is `steps % self.steps_per_trial != 0`, and
# would have to be `== 0`.
#
#     GRU with this mask: step 0 changes 0, 1, 2, 3, 4, 5; step 2 changes 2, 3, 4, 5; step 5 changes 5
#     GRU in the wrapper: step 0 changes 0; step 2 changes 2; step 5 changes 5, 6
#     LRU with this mask: step 0 changes 0, 1, 2, 3, 4, 5; step 2 changes 2, 3, 4, 5; step 5 changes 5
#     LRU in the wrapper: step 0 changes 0; step 2 changes 2; step 5 changes 5, 6
# (Random weights, two trials of 6 steps. The outputs that change if the input of one step changes.)
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
from memorax.networks.sequence_models import RNN, LRUCell, Memoroid, MetaMaskWrapper

TRIAL, LENGTH, SIZE = 6, 12, 8
inputs = jax.random.normal(jax.random.key(0), (1, LENGTH, SIZE))
starts = (jnp.arange(LENGTH) % TRIAL == 0).astype(jnp.int32)[None]

for words, memory in {"GRU": RNN(nn.GRUCell(SIZE)), "LRU": Memoroid(LRUCell(features=SIZE, hidden_dim=8))}.items():
    for wrapped in (False, True):
        model = MetaMaskWrapper(memory, steps_per_trial=TRIAL) if wrapped else memory
        weights = model.init(jax.random.key(1), inputs, starts)
        call = jax.jit(lambda inputs: model.apply(weights, inputs, starts)[1][0])
        reached = []
        for step in (0, 2, TRIAL - 1):
            change = jnp.abs(call(inputs.at[:, step].add(1)) - call(inputs)).max(-1)
            reached.append([number for number in range(LENGTH) if change[number] > 1e-6])
        print(f"{words} {'in the wrapper' if wrapped else 'with this mask'}:",
              "; ".join(f"step {step} changes {', '.join(map(str, steps))}" for step, steps in zip((0, 2, TRIAL - 1), reached)))
        right = [list(range(TRIAL)), list(range(2, TRIAL)), [TRIAL - 1]]
        assert reached == ([[0], [2], [TRIAL - 1, TRIAL]] if wrapped else right), "the behaviour has changed"
PY
