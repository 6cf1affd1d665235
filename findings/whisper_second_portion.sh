#!/usr/bin/env bash
# openai-whisper 20250625 (torch 2.13.0 on a CPU): with a KV cache, a later portion of several tokens sees the first keys.
#
# Expected: a text has the same logits at once and in portions with the cache of `install_kv_cache_hooks`, whatever
# their lengths. The decoder asks the cache where a portion begins, and documents tokens of any length up to the context.
# Seen: a first portion of any length, and then single tokens, have them. A later portion of several tokens does not:
# its attention is asked to be causal, and PyTorch's causal mask begins at the first key. So row i of the portion sees
# the first i + 1 tokens of the text, not those before it. Nothing is raised. (Whisper's own decoding appends single
# tokens, so it is right; checking drafts, or continuing a text, is not.)
#
#     seed 0: at once 0.00 off, 8 and single tokens 0.00, 8 and portions of 4 3.80, portions of 2 3.80
#     seed 1: at once 0.00 off, 8 and single tokens 0.00, 8 and portions of 4 3.36, portions of 2 3.27
# (A small model with random weights, a text of 24 tokens, two seeds. The largest difference of a logit, in units of
# their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 tqdm==4.67.1 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps openai-whisper==20250625 tiktoken==0.14.0 regex==2026.11.19 requests==2.32.5 \
    numba==0.68.1 llvmlite==0.50.0 more-itertools==10.8.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from whisper.model import ModelDimensions, Whisper

torch.set_num_threads(1)
torch.set_grad_enabled(False)
PORTIONS = {"at once": [24], "8 and single tokens": [8] + 16 * [1], "8 and portions of 4": [8] + 4 * [4],
            "portions of 2": 12 * [2]}

for seed in (0, 1):
    torch.manual_seed(seed)
    model = Whisper(ModelDimensions(n_mels=80, n_audio_ctx=30, n_audio_state=64, n_audio_head=4, n_audio_layer=2,
                                    n_vocab=200, n_text_ctx=40, n_text_state=64, n_text_head=4, n_text_layer=2)).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.normal_(0, 0.15)
    sound, text = model.encoder(torch.randn(2, 80, 60)), torch.randint(0, 200, (2, 24))
    right, off = model.decoder(text, sound), {}
    for words, lengths in PORTIONS.items():
        cache, hooks = model.install_kv_cache_hooks()
        rows = [model.decoder(portion, sound, kv_cache=cache) for portion in text.split(lengths, 1)]
        for hook in hooks:
            hook.remove()
        off[words] = float((torch.cat(rows, 1) - right).abs().max() / right.std())
    print(f"seed {seed}:", ", ".join(f"{words} {error:.2f}" for words, error in off.items()).replace("0.00", "0.00 off", 1))
    for words, error in off.items():
        assert error > 0.5 if "portions" in words else error < 1e-3, "the behaviour has changed"
PY
