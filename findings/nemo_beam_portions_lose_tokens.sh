#!/usr/bin/env bash
# nemo_toolkit 3.0.0 (torch 2.13.0 on a CPU): a transducer's beam search in portions loses the first token of each later portion.
#
# Expected: sounds in portions, each with the hypothesis of the one before it (`partial_hypotheses`), give the tokens of one pass.
# Greedy search does so. With one beam the beam search is greedy, so it should, too.
# Seen: each portion behind the first one lacks its first token. Those portions begin with the last token of the one before.
# The search takes this token away at its end, and the packing of hypotheses takes the first token away once more, as it
# stands for the start of a text there. A portion with one token gives none, and then the next one starts without any state.
# Streaming models hand on their hypotheses in this way. Nothing is raised.
# (asr/parts/submodules/rnnt_beam_decoding.py: `BeamRNNTInfer.greedy_search` and `pack_hypotheses`; by its source, the default
# search with more beams does the same.)
#
#     greedy: in portions as at once 4 of 4, 0 tokens fewer
#     1 beam: in portions as at once 0 of 4, 8 tokens fewer
# (An LSTM predictor and random weights, four inputs of 18 frames in portions of 6. The first input's tokens are shown.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile "nemo_toolkit[asr]==3.0.0" lightning==2.4.0 omegaconf==2.3.0 hydra-core==1.3.2 \
    transformers==5.24.0 torchmetrics==1.9.0 datasets==5.2.0 lhotse==1.33.0 librosa==0.11.0 onnx==1.23.2 pandas==3.1.1 scipy==1.17.1 \
    scikit-learn==1.9.1 numba==0.68.1 nv-one-logger-core==2.3.1 huggingface-hub==2.4.0 wandb==0.31.0 torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint
from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInfer
from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import GreedyRNNTInfer
from nemo.utils import logging

logging.setLevel(logging.ERROR)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
BLANK, WIDTH, FRAMES, PORTION, INPUTS = 12, 20, 18, 6, 4


def run(search, sounds, before=None):
    return search(encoder_output=sounds, encoded_lengths=torch.tensor([sounds.size(2)]), partial_hypotheses=before)[0]


def tokens(hypotheses):
    return hypotheses[0].y_sequence.tolist()


for name in ("greedy", "1 beam"):
    same = lost = 0
    for seed in range(INPUTS):
        torch.manual_seed(seed)
        predictor = RNNTDecoder(dict(pred_hidden=24, pred_rnn_layers=1, t_max=None, dropout=0.0), vocab_size=BLANK).eval()
        joint = RNNTJoint(dict(encoder_hidden=WIDTH, pred_hidden=24, joint_hidden=32, activation="relu", dropout=0.0),
                          num_classes=BLANK, vocabulary=list("abcdefghijkl")).eval()
        for weight in [*predictor.parameters(), *joint.parameters()]:
            if weight.dim() > 1:
                weight.normal_(0, 0.5)
        joint.joint_net[-1].bias[BLANK] += 3  # few tokens for a frame
        if name == "greedy":
            search = GreedyRNNTInfer(predictor, joint, blank_index=BLANK, max_symbols_per_step=5)
        else:
            search = BeamRNNTInfer(predictor, joint, beam_size=1)
        sounds = torch.randn(1, WIDTH, FRAMES)
        whole, found, hypotheses = tokens(run(search, sounds)), [], None
        for portion in sounds.split(PORTION, 2):
            hypotheses = run(search, portion, hypotheses)
            found.append(tokens(hypotheses))
        joined = found[-1] if name == "greedy" else sum(found, [])  # greedy search hands on all tokens so far
        same += joined == whole
        lost += len(whole) - len(joined)
        if not seed:
            first = whole, found
    print(f"{name}: in portions as at once {same} of {INPUTS}, {lost} tokens fewer")
    if name != "greedy":
        print("    at once    ", *first[0])
        print("    in portions", " | ".join(" ".join(map(str, some)) for some in first[1]))
    assert (same, lost) == ((INPUTS, 0) if name == "greedy" else (0, INPUTS * (FRAMES // PORTION - 1))), "the behaviour has changed"
PY
