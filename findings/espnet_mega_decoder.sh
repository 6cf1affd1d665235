#!/usr/bin/env bash
# espnet 202511 (torch 2.13.0 on a CPU): the MEGA decoder of a transducer attends to a key and a value of zeros before the first
# token.
#
# Expected: the decoder gives the same outputs for a text at once, as in training, and step by step, as in the search. A
# hypothesis gets the same output alone and in a batch of hypotheses. The decoder with an LSTM does both.
# Seen: the first state holds a key and a value of zeros, where nothing was read yet. Attention gives them weight at each step
# of the search; the first step is the most wrong one. A batch of hypotheses with unequal lengths is filled up with zeros in
# front, and no mask hides them: a second error, for the shorter ones. With an empty first state the steps are right. Nothing is
# raised. (asr_transducer/decoder/mega_decoder.py: `init_state`, `stack_qk_states`.)
#
#     LSTM            steps 0.00 off; in a batch beside longer ones 0.00 off
#     MEGA, simple    steps 0.37 off, from an empty state 0.00 off; in a batch beside longer ones 0.17 off
#     MEGA, rotary    steps 0.23 off, from an empty state 0.00 off; in a batch beside longer ones 0.10 off
# (Three blocks with random weights. The largest difference of an output, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile typeguard==4.6.1 editdistance==0.8.1 packaging==26.4 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps espnet==202511 torch-complex==0.4.4 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from espnet2.asr_transducer.beam_search_transducer import Hypothesis
from espnet2.asr_transducer.decoder.mega_decoder import MEGADecoder
from espnet2.asr_transducer.decoder.rnn_decoder import RNNDecoder

torch.set_num_threads(1)
torch.set_grad_enabled(False)
texts = torch.randint(1, 20, (3, 14), generator=torch.Generator().manual_seed(0))


def build(name):
    torch.manual_seed(0)
    if name == "LSTM":
        model = RNNDecoder(20, 16, 24, "lstm", 2)
    else:
        model = MEGADecoder(20, 32, 48, 16, 32, 4, name.split()[1], num_blocks=3, max_positions=64)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    return model.eval()


def steps(model, text, state):
    model.score_cache, outputs = {}, []
    for place in range(len(text)):
        output, state = model.score(text[:place + 1].tolist(), state)
        outputs.append(output.reshape(-1))
    return torch.stack(outputs), state


def without_batch(state):
    """The state of one hypothesis, as the search takes it out of a batch."""
    return state if isinstance(state, tuple) else [
        {name: part[0] if part.dim() == 3 else part for name, part in layer.items()} for layer in state]


for name in ("LSTM", "MEGA, simple", "MEGA, rotary"):
    model = build(name)
    right = model(texts)
    off = max(float((steps(model, text, model.init_state(1))[0] - out).abs().max()) for text, out in zip(texts, right))
    off /= float(right.std())
    words = f"steps {off:.2f} off"
    if name != "LSTM":
        empty = 0.0
        for text, out in zip(texts, right):
            state, made = model.init_state(1), []
            for layer in state:
                layer["prev_key"], layer["prev_value"] = layer["prev_key"][:, :0], layer["prev_value"][:, :0]
            for token in text:
                step, state = model.inference(token.reshape(1, 1), state)
                made.append(step.reshape(-1))
            empty = max(empty, float((torch.stack(made) - out).abs().max() / right.std()))
        words += f", from an empty state {empty:.2f} off"
        assert empty < 1e-3, "the behaviour has changed"
    together, alone = [], []
    for text, length in zip(texts, (13, 4, 8)):
        state = steps(model, text[:length], model.init_state(1))[1]
        alone.append(steps(model, text[:length + 1], model.init_state(1))[0][-1])
        together.append(Hypothesis(0.0, text[:length + 1].tolist(), without_batch(state)))
    outputs = model.batch_score(together)[0]
    batch = max(float((a.reshape(-1) - b).abs().max()) for a, b in zip(outputs, alone)) / float(right.std())
    print(f"{name:15} {words}; in a batch beside longer ones {batch:.2f} off")
    assert all((value < 1e-3) == (name == "LSTM") for value in (off, batch)), "the behaviour has changed"
PY
