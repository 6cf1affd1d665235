#!/usr/bin/env bash
# executorch 1.5.1 (its static attention, torch 2.13.0 on a CPU): lookahead decoding writes another text than plain
# decoding as soon as a layer has a sliding window.
#
# Expected: `lookahead_decode` gives the tokens of `decode`. It is greedy only, and it keeps a guessed token only if
# the model says the same. The window belongs to the model, and prefill and `decode` keep to it.
# Seen: with full caches all tokens are equal. With caches of 16 tokens in every second layer most are not. Prefill
# and `decode` narrow the masks before each call, so that a row sees 16 keys with its own; `lookahead_decode` does
# not, and its first row sees 17, the others more. Nothing warns. `decode` agrees with a loop over passes without
# a cache.
#
#     model 0, no windows: decode 41 and 41, lookahead 41 and 41 of 41 tokens as without a cache
#     model 0, windows of 16: decode 41 and 41, lookahead 3 and 3 of 41 tokens as without a cache
#     model 1, no windows: decode 41 and 41, lookahead 41 and 41 of 41 tokens as without a cache
#     model 1, windows of 16: decode 41 and 41, lookahead 25 and 2 of 41 tokens as without a cache
#     model 2, no windows: decode 41 and 41, lookahead 41 and 41 of 41 tokens as without a cache
#     model 2, windows of 16: decode 41 and 41, lookahead 15 and 5 of 41 tokens as without a cache
# (Small Llamas with random weights, a prompt of 40 tokens, n-grams of 3, a window of 8 guesses, 8 checks.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps executorch==1.5.1 torchao==0.18.0 \
    ruamel.yaml==0.19.1 pytorch_tokenizers==1.5.0 pandas==3.1.1 PyYAML==6.0.4 packaging==26.4 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from executorch.examples.models.llama.llama_transformer import construct_transformer
from executorch.examples.models.llama.model_args import ModelArgs
from executorch.examples.models.llama.static_attention import (
    StaticAttentionIOManager, transform_attention_mha_to_static_attention)

NEW, WINDOW, INPUT = 40, 16, 32
torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=128, hidden_dim=96, max_seq_len=256,
             max_context_len=256, generate_full_logits=True)


def count(left, right):
    return sum(one == other for one, other in zip(left, right))


for seed in range(3):
    generator = torch.Generator().manual_seed(seed)
    model = construct_transformer(ModelArgs(**sizes)).eval()
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.normal_(0, 0.15, generator=generator)
    static = transform_attention_mha_to_static_attention(model, inplace=False)
    prompt = torch.randint(0, 128, (1, 40), generator=generator)
    for windowed in (False, True):
        caches = [WINDOW if windowed and layer % 2 == 0 else 200 for layer in range(4)]
        if windowed:
            for layer in model.layers[::2]:
                layer.attention.mask = layer.attention.mask.triu(1 - WINDOW)
        text = prompt
        while text.shape[1] < prompt.shape[1] + NEW + 1:
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        texts = {}
        for style in ("shift_pointer", "smart_mask"):
            for lookahead in (False, True):
                manager = StaticAttentionIOManager(
                    ModelArgs(**sizes, attention_type="static"), INPUT, caches, style=style)
                first = int(manager.prefill(static, prompt)[0, -1].argmax())
                texts[style, lookahead] = manager.lookahead_decode(
                    static, first, NEW, ngram_size=3, window_size=8, n_verifications=8) if lookahead else \
                    manager.decode(static, first, NEW)
        right = text[0, prompt.shape[1]:].tolist()
        same = {key: count(ids, right) for key, ids in texts.items()}
        print(f"model {seed}, {'windows of 16' if windowed else 'no windows'}: decode",
              f"{same['shift_pointer', False]} and {same['smart_mask', False]}, lookahead",
              f"{same['shift_pointer', True]} and {same['smart_mask', True]} of {NEW + 1} tokens as without a cache")
        assert same["shift_pointer", False] == same["smart_mask", False] == NEW + 1, "the behaviour has changed"
        for style in ("shift_pointer", "smart_mask"):
            assert (same[style, True] < NEW - 5) == windowed, "the behaviour has changed"
PY
