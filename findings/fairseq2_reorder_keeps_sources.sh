#!/usr/bin/env bash
# fairseq2 0.8.1 (torch 2.13.0 on a CPU; torch 2.9.1, which the package asks for, gives the same): rows of a state that
# change places keep the sources of the old places.
#
# Expected: after reorder of an IncrementalStateBag, each row goes on with its text and its source, for any new order.
# Seen: an encoder-decoder model goes on with the right text and a wrong source, if the new order has as many rows as the
# old one. The keys and values of the sources (StaticAttentionState.reorder in models/transformer/multihead_attention.py)
# are moved only if the number of rows changes; the texts are always moved. Orders with fewer or more rows are exact.
# Nothing is raised. A beam search of the package meets this only if one text ends while others get their beams.
#
#     rows 0 1 2 off by 0.00 0.00 0.00
#     rows 1 0 2 off by 1.18 1.04 0.00
#     rows 1 1 2 off by 1.19 0.00 0.00
#     rows 2 0 off by 0.00 0.00
#     rows 1 1 0 2 off by 0.00 0.00 0.00 0.00
# (Random weights, three sources, a new order after 6 of 12 tokens. For each row the largest difference of a later logit
# from those of the whole text at once, in units of their standard deviation. The compiled part of the package, which
# reads data, is left out.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile importlib_resources==7.1.0 importlib_metadata==10.2.0 ruamel.yaml==0.19.1 \
    safetensors==0.8.0 huggingface_hub==2.4.0 transformers==5.24.0 tiktoken==0.14.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps fairseq2==0.8.1 clusterscope==0.0.32 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
import types

reader = types.ModuleType("fairseq2n")  # the compiled part, which reads data, asks for another torch: without it
reader.DOC_MODE, reader.__version__ = True, "0.8.1"
sys.modules["fairseq2n"] = reader

import torch
from fairseq2.models.nllb import NllbConfig
from fairseq2.models.nllb.factory import create_nllb_model
from fairseq2.nn import BatchLayout, IncrementalStateBag

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
model = create_nllb_model(NllbConfig(
    model_dim=32, max_seq_len=128, vocab_size=60, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attn_heads=4,
    num_decoder_attn_heads=4, ffn_inner_dim=64)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.normal_(0, 0.2)
sources, texts = torch.randint(5, 60, (3, 9)), torch.randint(5, 60, (3, 12))
for order in ([0, 1, 2], [1, 0, 2], [1, 1, 2], [2, 0], [1, 1, 0, 2]):
    state, rows = IncrementalStateBag(32), slice(None)
    parts = []
    for place, tokens in enumerate(texts.split([6, 1, 1, 1, 1, 1, 1], 1)):
        if place == 1:
            state.reorder(torch.tensor(order))
            rows = order
        parts.append(model(sources[rows], BatchLayout.of(sources[rows]), tokens[rows], BatchLayout.of(tokens[rows]),
                           state_bag=state))
        state.increment_step_nr(tokens.size(1))
    right = model(sources[order], BatchLayout.of(sources[order]), texts[order], BatchLayout.of(texts[order]))
    off = ((torch.cat(parts[1:], 1) - right[:, 6:]).abs().amax((1, 2)) / right.std()).tolist()
    print("rows", *order, "off by", *[f"{error:.2f}" for error in off])
    moved = [len(order) == 3 and row != place for place, row in enumerate(order)]
    assert all((error > 0.1) == wrong for error, wrong in zip(off, moved)), "the behaviour has changed"
PY
