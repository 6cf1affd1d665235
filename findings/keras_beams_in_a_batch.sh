#!/usr/bin/env bash
# keras-hub 0.32.0 (keras 3.15.1, torch 2.13.0 on a CPU): beam search in a batch gives a longer prompt another,
# less likely answer than alone, since its beams are copies of one text.
#
# Expected: with the beam sampler, a prompt gets the same answer alone and beside a shorter prompt.
# Seen: beside one, a third of the answers are equal, and most of the others are less likely. The search starts at
# the length of the shortest prompt. On the tokens that the longer prompt has already, it still takes the four best
# continuations of the model, adds their scores, and then writes the prompt's token over each. So the answer starts
# from four beams with the same text and the scores of tokens that are in none of them. More answers than alone are
# those of greedy search. With a neighbour of the same length, all answers are equal.
#
#     4 beams, prompt of 10 tokens beside one of 10: 24 of 24 answers as alone
#     4 beams, prompt of 10 tokens beside one of  4:  9 of 24 answers as alone, 11 less likely, 9 as greedy (alone 4)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile keras==3.15.1 keras-hub==0.32.0 numpy==2.4.6 2> "$work/log"
export KERAS_BACKEND=torch TF_CPP_MIN_LOG_LEVEL=3
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import keras
import numpy as np
import torch
from keras_hub.models import LlamaBackbone, LlamaCausalLM
from keras_hub.samplers import BeamSampler

PROMPT, TOTAL, TRIES = 10, 18, 24
torch.set_num_threads(1)
torch.set_grad_enabled(False)
model = LlamaCausalLM(LlamaBackbone(
    vocabulary_size=200, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64, intermediate_dim=128))
numbers = np.random.default_rng(1)
for matrix in (weight for weight in model.weights if len(weight.shape) > 1):
    matrix.assign(numbers.normal(0, 0.12, matrix.shape))
texts = [[numbers.integers(3, 200, length) for length in (PROMPT, PROMPT, 4)] for _ in range(TRIES)]


def generate(sampler, rows):
    """Return the answer to the first of the prompts."""
    model.compile(sampler=sampler)
    tokens, mask = np.zeros((2, len(rows), TOTAL), "int32")
    for at, row in enumerate(rows):
        tokens[at, :len(row)], mask[at, :len(row)] = row, 1
    return model.generate({"token_ids": tokens, "padding_mask": mask}, stop_token_ids=None)["token_ids"][0].tolist()


def score(text):
    """Return the log probability of the answer, by a pass without a cache."""
    tokens = np.array([text], "int32")
    logits = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})[0].double()
    return float(logits.log_softmax(-1)[range(PROMPT - 1, TOTAL - 1), text[PROMPT:]].sum())


beams = BeamSampler(num_beams=4)
equal = short = worse = greedy = greedy_alone = 0
for prompt, other, shorter in texts:
    alone, best = generate(beams, [prompt]), generate("greedy", [prompt])
    equal += generate(beams, [prompt, other]) == alone
    mixed = generate(beams, [prompt, shorter])
    short += mixed == alone
    worse += score(mixed) < score(alone) - 1e-3
    greedy += mixed == best
    greedy_alone += alone == best
print(f"4 beams, prompt of {PROMPT} tokens beside one of {PROMPT}: {equal} of {TRIES} answers as alone")
print(f"4 beams, prompt of {PROMPT} tokens beside one of  4: {short:2} of {TRIES} answers as alone, "
      f"{worse} less likely, {greedy} as greedy (alone {greedy_alone})")
assert equal == TRIES and short < TRIES // 2 < worse + short and greedy > greedy_alone, "the behaviour has changed"
PY
