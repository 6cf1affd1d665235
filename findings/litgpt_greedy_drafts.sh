#!/usr/bin/env bash
# litgpt 0.5.13 (torch 2.13.0 on a CPU): speculative decoding at temperature 0 gives tokens that the target
# model would not choose, and another answer in each run.
#
# Expected: at temperature 0 the answer is the target's greedy answer, whatever the draft model proposes.
# Seen: temperature 0 picks the likeliest draft, but the rule that accepts it compares the probabilities at
# temperature 1 and draws a random number. A rejected draft is replaced by the token with the largest
# difference of probabilities, not by the target's likeliest one. With a draft model near the target, 16 of 40
# tokens are not the target's, and each seed gives another answer. The answer also lacks its first token.
#
#     draft = target:     0 of 40 tokens not the target's, 1 different in 4 runs
#     draft = target:    the answer starts at token 2 of the greedy answer
#     draft near target: 16 of 40 tokens not the target's, 4 different in 4 runs
# (Each token is compared with the target's choice after the tokens before it.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile litgpt==0.5.13 lightning==2.6.6
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from litgpt.config import Config
from litgpt.generate import base, speculative_decoding
from litgpt.model import GPT

torch.set_num_threads(1)
torch.set_grad_enabled(False)
prompt = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(3))


def build(noise=0.0):
    torch.manual_seed(0)
    model = GPT(Config.from_name(
        "Llama-3.1-8B", n_layer=3, n_head=4, n_query_groups=2, n_embd=64, head_size=16,
        intermediate_size=128, block_size=256, vocab_size=300, padded_vocab_size=300)).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.data.normal_(0, 0.12)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=noise)
    model.set_kv_cache(batch_size=1)
    return model


target = build()
right = base.generate(target, prompt, 61, temperature=0.0)[20:]
for name, draft in (("draft = target:", build()), ("draft near target:", build(0.02))):
    answers = set()
    for seed in range(4):
        torch.manual_seed(seed)
        text, _ = speculative_decoding.generate(draft, target, prompt, 60, temperature=0.0, speculative_k=4)
        answers.add(tuple(text[20:60].tolist()))
    answer = torch.tensor(min(answers))
    chosen = target(torch.cat([prompt, right[:1], answer])[None])[0].argmax(1)[20:-1]
    wrong = int((answer != chosen).sum())
    print(f"{name:18} {wrong:2} of {len(answer)} tokens not the target's, {len(answers)} different in 4 runs")
    if name == "draft = target:":
        start = next(place for place in range(20) if torch.equal(right[place:place + 20], answer[:20]))
        print(f"{name:18} the answer starts at token {start + 1} of the greedy answer")
        assert wrong == 0 and len(answers) == 1 and start == 1, "the behaviour has changed"
    else:
        assert wrong > 5 and len(answers) > 1, "the behaviour has changed"
PY
