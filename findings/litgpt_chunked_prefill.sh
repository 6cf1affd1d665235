#!/usr/bin/env bash
# litgpt 0.5.13 (torch 2.13.0 on a CPU): a prefill in chunks, which the library's own error message advises,
# computes wrong logits as soon as the prompt is longer than the sliding window.
#
# Expected: a prompt that is longer than the window raises an error ("Please use chunked prefill with chunk
# size <= 16"), and chunks of that size give the logits of one pass without a cache.
# Seen: chunks of 1 token give these logits. With chunks of 2 tokens and more, every row after the first 16
# is wrong, and no call raises an error. A chunk overwrites the window's oldest slots before its first rows have read
# them, and the mask has the order of the text, while the slots have the order of a ring.
#
#     Mistral-7B-v0.1:          one pass: error, chunks of 1: 0 of 100 rows off, of 2: 84, of 8: 84, of 16: 84
#     Gemma-3-1b-it:            one pass: error, chunks of 1: 0 of 100 rows off, of 2: 84, of 8: 84, of 16: 84
#     Phi-3-mini-128k-instruct: one pass: error, chunks of 1: 0 of 100 rows off, of 2: 84, of 8: 84, of 16: 84
# (Each family has its configuration with smaller sizes, random weights and a window of 16 tokens. A row is
# off if a logit differs by more than 1 % of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile litgpt==0.5.13 lightning==2.6.6
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from litgpt.config import Config, name_to_config
from litgpt.model import GPT

torch.set_num_threads(1)
torch.set_grad_enabled(False)
tokens = torch.randint(0, 300, (1, 100), generator=torch.Generator().manual_seed(0))


def build(name):
    torch.manual_seed(0)
    sizes = dict(n_layer=6, n_head=4, n_query_groups=2, n_embd=64, head_size=16, intermediate_size=128,
                 block_size=256, vocab_size=300, padded_vocab_size=300, sliding_window_size=16)
    for key in ("sliding_window_indices", "rope_indices"):
        if name_to_config[name].get(key) is not None:
            sizes[key] = name_to_config[name][key][:6]
    model = GPT(Config.from_name(name, **sizes)).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.data.normal_(0, 0.12)
    return model


def read(model, chunk):
    model.clear_kv_cache()
    model.set_kv_cache(batch_size=1)
    parts = [torch.arange(start, min(start + chunk, 100)) for start in range(0, 100, chunk)]
    return torch.cat([model(tokens[:, part], part, int(part[-1]) + 1) for part in parts], 1)[0]


for name in ("Mistral-7B-v0.1", "Gemma-3-1b-it", "Phi-3-mini-128k-instruct"):
    model = build(name)
    right = model(tokens)[0]
    try:
        read(model, 100)
        raise AssertionError("the behaviour has changed")
    except ValueError as error:
        assert "Please use chunked prefill with chunk size <= 16" in str(error), "the behaviour has changed"
    off = [int(((read(model, chunk) - right).abs().amax(1) > 0.01 * right.std()).sum())
           for chunk in (1, 2, 8, 16)]
    print(f"{name + ':':25} one pass: error, chunks of 1: {off[0]} of 100 rows off, "
          f"of 2: {off[1]}, of 8: {off[2]}, of 16: {off[3]}")
    assert off[0] == 0 and min(off[1:]) > 50, "the behaviour has changed"
PY
