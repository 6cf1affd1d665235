#!/usr/bin/env bash
# recurrent-transformer-pytorch 0.0.17 (torch 2.13.0 on a CPU): with blocks, decoding token by token computes other logits.
#
# Expected: `generate` at temperature 0 writes the tokens that passes over the text so far find best, and a prompt in portions
# gives the logits of one pass, since both modes of a pass, "tiled" and "naive", agree.
# Seen: that holds for `block_size` 1, the default. With larger blocks, steps behind a prompt give other logits than the
# pass with which the model is trained, and `generate` writes another text. Portions whose sizes are not multiples of the
# block are off too, portions of whole blocks are right. Nothing is raised.
# Cause: recurrent_transformer/recurrent_transformer.py. `Attention.forward_naive_recurrent` cuts each portion into blocks from
# its own start, so a single token is a block of its own. Within a block, tokens should see the temporary keys and
# values of the tokens before them, and a GRU's summary of these; the step sees the final ones, and an empty GRU.
#
#     block size 1: the naive mode 0.00, portions of 8 0.00, steps 0.00; text: 24 of 24 tokens
#     block size 2: the naive mode 0.00, portions of 8 0.00, steps 4.37; text: 2 of 24 tokens
#     block size 4: the naive mode 0.00, portions of 8 0.00, steps 4.75; text: 2 of 24 tokens
#     block size 8: the naive mode 0.00, portions of 8 0.00, steps 4.91; text: 2 of 24 tokens
# (Three layers with random weights, 40 tokens, of which 16 are the prompt. The largest difference of a logit from those of one
# pass, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps recurrent-transformer-pytorch==0.0.17 x-mlps-pytorch==0.6.9 \
    torch-einops-utils==0.2.0 einops==0.8.2 einx==0.4.3 frozendict==2.5.1 loguru==0.7.3 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from recurrent_transformer import RecurrentTransformer

torch.set_num_threads(1)
torch.set_grad_enabled(False)
PROMPT, LENGTH = 16, 40

for block in (1, 2, 4, 8):
    torch.manual_seed(0)
    model = RecurrentTransformer(num_tokens=200, dim=64, depth=3, heads=2, dim_head=32, recurrent=True, block_size=block).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    tokens = torch.randint(200, (1, LENGTH))
    right = model(tokens)

    def compare(logits: torch.Tensor) -> float:
        return float((logits - right[:, -logits.size(1):]).abs().max() / right.std())

    def read(size: int) -> torch.Tensor:
        _, memories = model(tokens[:, :PROMPT], return_memories=True)
        parts = []
        for portion in tokens[:, PROMPT:].split(size, 1):
            logits, memories = model(portion, memories=memories, recurrent_mode="naive", return_memories=True)
            parts.append(logits)
        return torch.cat(parts, 1)

    naive, steps, blocks = compare(model(tokens, recurrent_mode="naive")), compare(read(1)), compare(read(8))
    written = model.generate(tokens[:, :PROMPT], LENGTH - PROMPT, temperature=0.0)
    text = tokens[:, :PROMPT]
    while text.size(1) < LENGTH:
        text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
    same = int((written == text[:, PROMPT:]).sum())
    print(f"block size {block}: the naive mode {naive:.2f}, portions of 8 {blocks:.2f}, steps {steps:.2f};",
          f"text: {same} of {LENGTH - PROMPT} tokens")
    assert naive < 1e-3 and blocks < 1e-3, "the behaviour has changed"
    if block == 1:
        assert steps < 1e-3 and same == LENGTH - PROMPT, "the behaviour has changed"
    else:
        assert steps > 0.5 and same < LENGTH - PROMPT, "the behaviour has changed"
PY
