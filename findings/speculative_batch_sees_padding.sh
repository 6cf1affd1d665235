#!/usr/bin/env bash
# speculative-decoding 0.2.0 (torch 2.13.0 on a CPU): rows of a batch see the padding that a rejected draft leaves.
#
# Expected: with one candidate a token (filter_thres near 1) speculative decoding gives the greedy tokens of the large
# model, for each row of a batch.
# Seen: a batch of one row does, a batch of four rows mostly does not. Rows that accept fewer drafts are shifted to the
# right and padded on the left. The functions pass `seq_start_pos` for that, and the decoder builds a mask from it, but
# its layers do not get the mask. So such rows attend to the padding. A call of the decoder with a row that is padded
# on the left, and with its seq_start_pos, shows the same. Nothing is raised.
#
#     seed 0: rows that are not greedy, of 4: base 0; drafts of 1, 3, 5 alone 0, 0, 0, in a batch 4, 4, 4; a padded
#         row with seq_start_pos 3.34 off
#     seed 1: rows that are not greedy, of 4: base 0; drafts of 1, 3, 5 alone 0, 0, 0, in a batch 3, 3, 4; a padded
#         row with seq_start_pos 3.37 off
# (Two layers with random weights, a draft model of one of them, prompts of 9 tokens, 40 tokens in all, two seeds. The
# largest difference of a logit, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile einops==0.8.2 beartype==0.23.1 speculative-decoding==0.2.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
import torch.nn.functional as F
from speculative_decoding import Decoder, base_decoding, speculative_decoding

torch.set_num_threads(1)
torch.set_grad_enabled(False)
GREEDY = {"temperature": 1.0, "filter_thres": 0.999}  # of 64 tokens, one candidate stays

for seed in (0, 1):
    torch.manual_seed(seed)
    large, small = (Decoder(num_tokens=64, dim=32, depth=depth, heads=2, dim_head=16).eval() for depth in (2, 1))
    for matrix in (weight for weight in large.parameters() if weight.dim() > 1):
        matrix.normal_(0, 0.15)
    small.token_emb, small.to_logits, small.layers[0] = large.token_emb, large.to_logits, large.layers[0]
    prompts = torch.randint(64, (4, 9))
    greedy = prompts
    while greedy.size(1) < 40:
        greedy = torch.cat((greedy, large(greedy)[:, -1:].argmax(-1)), 1)
    greedy = greedy[:, 9:]
    base = base_decoding(large, prompts, 40, **GREEDY)
    one, four = [], []
    for gamma in (1, 3, 5):
        alone = torch.cat([speculative_decoding(large, small, row[None], 40, gamma=gamma, **GREEDY)[0] for row in prompts])
        together = speculative_decoding(large, small, prompts, 40, gamma=gamma, **GREEDY)[0]
        one.append(int((alone != greedy).any(1).sum()))
        four.append(int((together != greedy).any(1).sum()))
    right = large(prompts)
    shifted = large(F.pad(prompts, (3, 0)), seq_start_pos=torch.full((4,), 3))[:, 3:]
    off = float((shifted - right).abs().max() / right.std())
    print(f"seed {seed}: rows that are not greedy, of 4: base {int((base != greedy).any(1).sum())};",
          f"drafts of 1, 3, 5 alone {', '.join(map(str, one))}, in a batch {', '.join(map(str, four))};",
          f"a padded row with seq_start_pos {off:.2f} off")
    assert torch.equal(base, greedy) and not any(one), "the behaviour has changed"
    assert all(four) and off > 0.1, "the behaviour has changed"
PY
