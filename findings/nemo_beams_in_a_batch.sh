#!/usr/bin/env bash
# nemo_toolkit 3.0.0 (torch 2.13.0 on a CPU): in a batch, a beam search with the attention decoder gives a sentence the prompt
# memory of another sentence.
#
# Expected: a sentence gets the same text alone and in a batch of sentences with equal length. Greedy search does so.
# Seen: with two beams and more it does not, if the decoder has two layers and more. The search repeats the decoder's cached
# memories for its beams row after row (1 2 3 1 2 3), but the texts, the audio and the masks sentence after sentence (1 1 2 2 3 3).
# So the memories of the prompt, which depend on the audio from the second layer on, stand at the wrong sentences. Canary models
# decode with this search. Nothing is raised. (asr/modules/transformer/transformer_generators.py:
# `BeamSearchSequenceGenerator._forward`.)
#
#     1 layers: texts in a batch as alone: greedy 8 of 8, 1 beam 8, 2 beams 8, 4 beams 8
#     2 layers: texts in a batch as alone: greedy 8 of 8, 1 beam 8, 2 beams 4, 4 beams 5
# (Random weights, two batches of four sentences with one prompt.)
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
from nemo.collections.asr.modules.transformer.transformer_decoders import TransformerDecoder
from nemo.collections.asr.modules.transformer.transformer_generators import BeamSearchSequenceGenerator, GreedySequenceGenerator
from nemo.collections.asr.modules.transformer.transformer_modules import TransformerEmbedding
from nemo.collections.asr.parts.submodules.token_classifier import TokenClassifier

torch.set_num_threads(1)
torch.set_grad_enabled(False)
MANY, WIDTH, LENGTH, ROWS, SEEDS, PAD, BOS, EOS = 30, 32, 14, 4, 2, 0, 1, 2


def text(row):
    row = row.tolist()
    ends = [place for place, token in enumerate(row) if token in (EOS, PAD)]
    return row[:ends[0]] if ends else row


for layers in (1, 2):
    same = {}
    for beams in (None, 1, 2, 4):
        same[beams] = 0
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            parts = (TransformerEmbedding(MANY, WIDTH, 64, num_token_types=0), TransformerDecoder(layers, WIDTH, 64, 4, pre_ln=True),
                     TokenClassifier(WIDTH, MANY))
            for part in parts:
                for weight in (weight for weight in part.eval().parameters() if weight.dim() > 1):
                    weight.normal_(0, 0.4)
            options = dict(pad=PAD, bos=BOS, eos=EOS, max_sequence_length=LENGTH)
            search = BeamSearchSequenceGenerator(*parts, beam_size=beams, **options) if beams else GreedySequenceGenerator(*parts, **options)
            audio, prompts = torch.randn(ROWS, 12, WIDTH), torch.randint(3, MANY, (1, 4)).repeat(ROWS, 1)

            def run(rows):
                found = search(decoder_input_ids=prompts[rows], encoder_hidden_states=audio[rows],
                               encoder_input_mask=torch.ones(audio[rows].shape[:2]))
                return [text(row[4:]) for row in (found if beams else found[0])]

            together = run(slice(None))
            same[beams] += sum(run(slice(row, row + 1))[0] == together[row] for row in range(ROWS))
    total = SEEDS * ROWS
    print(f"{layers} layers: texts in a batch as alone: greedy {same[None]} of {total}, 1 beam {same[1]}, 2 beams {same[2]}, 4 beams {same[4]}")
    assert same[None] == same[1] == total, "the behaviour has changed"
    assert same[2] == same[4] == total if layers == 1 else max(same[2], same[4]) < total, "the behaviour has changed"
PY
