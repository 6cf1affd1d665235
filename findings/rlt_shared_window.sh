#!/usr/bin/env bash
# rlt-pytorch 0.1.9 (torch 2.13.0 on a CPU): with shared weights the encoder has the decoder's window, but not in single steps.
#
# Expected: tokens read one by one, with the memories that each call returns, give the logits of one pass, and `generate`
# at temperature 0 writes the tokens that passes over the text so far find best. The encoder attends to all tokens, and
# `dec_sliding_window_size` (16 by default) is the decoder's window.
# Seen: with `shared_weights=True` this holds up to the window. From there on the logits differ, and `generate` writes
# other tokens. Portions of two and more tokens agree with the pass. Nothing is raised. Without shared weights, or with
# a window that is longer than the text, all agree.
# Cause: RLT/RLT.py. `RLT.__init__` gives the encoder the decoder's own attention modules. `Attention.forward` takes the
# module's window if the caller has none, so passes of the encoder get it too. A single token skips the masks, as its
# memories would have been cut to the window before, but the encoder does not cut its memories.
#
#     own weights, window 16:    portions of 5 0.00, of 1 0.00 (the first 16 tokens 0.00); text: 24 of 24 tokens
#     shared weights, window 16: portions of 5 0.00, of 1 4.66 (the first 16 tokens 0.00); text: 4 of 24 tokens
#     shared weights, window 8:  portions of 5 0.00, of 1 4.99 (the first 8 tokens 0.00); text: 3 of 24 tokens
#     shared weights, window 40: portions of 5 0.00, of 1 0.00 (the first 40 tokens 0.00); text: 24 of 24 tokens
# (Two layers each with random weights in float64, 40 tokens, of which 16 are the prompt of the text. The largest difference
# of a logit from those of one pass, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps rlt-pytorch==0.1.9 rotary-embedding-torch==0.9.1 x-mlps-pytorch==0.6.9 \
    torch-einops-utils==0.2.0 einops==0.8.2 einx==0.4.3 frozendict==2.5.1 loguru==0.7.3 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from RLT import RLT

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
PROMPT, LENGTH = 16, 40

for shared, window in ((False, 16), (True, 16), (True, 8), (True, 40)):
    torch.manual_seed(0)
    model = RLT(dim=64, enc_depth=2, dec_depth=2, num_tokens=200, heads=2, dim_head=32, shared_weights=shared,
                dec_sliding_window_size=window).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    tokens = torch.randint(200, (1, LENGTH))
    right = model(tokens)[0]
    off = []
    for size in (5, 1):
        memories, parts = None, []
        for portion in tokens.split(size, 1):
            logits, memories = model(portion, memories=memories)
            parts.append(logits)
        off.append(((torch.cat(parts, 1) - right).abs().amax((0, 2)) / right.std()))
    written = model.generate(tokens[:, :PROMPT], max_len=LENGTH, temperature=0.0)
    text = tokens[:, :PROMPT]
    while text.size(1) < LENGTH:
        text = torch.cat((text, model(text)[0][:, -1:].argmax(-1)), 1)
    same = int((written == text[:, PROMPT:]).sum())
    words = f"{'shared' if shared else 'own'} weights, window {window}:"
    print(f"{words:26} portions of 5 {off[0].max():.2f}, of 1 {off[1].max():.2f} (the first {window} tokens",
          f"{off[1][:window].max():.2f}); text: {same} of {LENGTH - PROMPT} tokens")
    assert off[0].max() < 1e-3 and off[1][:window].max() < 1e-3, "the behaviour has changed"
    if shared and window < LENGTH:
        assert off[1].max() > 0.5 and same < LENGTH - PROMPT, "the behaviour has changed"
    else:
        assert off[1].max() < 1e-3 and same == LENGTH - PROMPT, "the behaviour has changed"
PY
