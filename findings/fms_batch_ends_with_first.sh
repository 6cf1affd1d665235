#!/usr/bin/env bash
# ibm-fms 1.13.1 (torch 2.13.0 on a CPU): `generate` ends a batch when the first of its requests ends, and does
# not end it when two requests end with the same token.
#
# Expected: with `eos_token_id`, a batch goes on until all of its requests have written their end token, as the
# comment in the loop says. Each request then has the tokens that it gets alone.
# Seen: the first end token cuts off the other answers. If two answers end at the same step, the batch goes on up
# to `max_new_tokens`. A vector of flags meets a column of tokens: broadcasting makes a square of flags, in which
# one ended request counts as many as the batch has rows. Nothing warns.
#
#     four requests, alone: 8, 40, 26, 40 tokens; as a batch: 8
#     one request twice, alone: 8 tokens; as a batch: 40
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile ibm-fms==1.13.1 transformers==5.24.0
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from fms.models import get_model
from fms.utils.generation import generate

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
model = get_model("llama", "7b", src_vocab_size=300, emb_dim=64, nheads=4, kvheads=2, nlayers=3,
                  max_expected_seq_len=256).eval()
for weight in (weight for weight in model.parameters() if weight.dim() > 1):
    weight.normal_(0, 0.15)
generator = torch.Generator().manual_seed(1)
prompts = torch.stack([torch.randint(3, 300, (30,), generator=generator) for _ in range(4)])


def answer(prompts, **options):
    return generate(model, prompts, max_new_tokens=40, do_sample=False, use_cache=True, **options)[..., 30:]


whole = [answer(prompt).tolist() for prompt in prompts]
assert answer(prompts).tolist() == whole, "without an end token, a batch has the tokens of each request alone"
end = whole[0][7]
alone = [len(answer(prompt, eos_token_id=end)) for prompt in prompts]
together = answer(prompts, eos_token_id=end).shape[1]
print(f"four requests, alone: {str(alone)[1:-1]} tokens; as a batch: {together}")
assert together == min(alone) < max(alone), "the behaviour has changed"
twice = answer(prompts[[0, 0]], eos_token_id=end).shape[1]
print(f"one request twice, alone: {alone[0]} tokens; as a batch: {twice}")
assert twice == 40 > alone[0], "the behaviour has changed"
PY
