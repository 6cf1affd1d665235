#!/usr/bin/env bash
# ibm-fms 1.13.1 (torch 2.13.0 on a CPU): `generate` without a cache, its default, gives a padded batch wrong
# tokens. With the cache, it gives the right ones.
#
# Expected: with the mask and the positions of `pad_input_ids`, each request of a batch gets the tokens that it
# gets alone. A run without a cache is the reference that a run with a cache is compared with.
# Seen: that holds with `use_cache=True` only. Without a cache, the first token is right and the next ones are
# not, even for the longest request, which has no padding. After each token, `generate` keeps the last row of the
# mask, as a step with a cache needs it. Without a cache, this row is broadcast to all queries, so that each token
# sees the tokens after it. No call raises an error.
#
#     llama:       with cache 20, 20, 20 of 20 tokens as alone; without cache 2, 6, 7
#     gpt_bigcode: with cache 20, 20, 20 of 20 tokens as alone; without cache 13, 3, 1
#     mixtral:     with cache 20, 20, 20 of 20 tokens as alone; without cache 1, 1, 2
#     mistral:     with cache 20, 20, 20 of 20 tokens as alone; without cache 4, 1, 1
#     qwen3:       with cache 20, 20, 20 of 20 tokens as alone; without cache 3, 3, 3
# (Small models with random weights; prompts of 30, 12 and 21 tokens. A later token may be equal by chance.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile ibm-fms==1.13.1 transformers==5.24.0
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from fms.models import get_model
from fms.utils.generation import generate, pad_input_ids

torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(src_vocab_size=300, nheads=4, nlayers=3, max_expected_seq_len=256)
families = dict(
    llama=("7b", dict(emb_dim=64, kvheads=2)),
    gpt_bigcode=("micro", dict(emb_dim=64, pad_id=-1)),
    mixtral=("8x7b", dict(dim=64, hidden_dim=96, kvheads=2, num_experts=4)),
    mistral=("7b", dict(emb_dim=64, head_dim=16, kvheads=2)),
    qwen3=("0.6b", dict(emb_dim=64, head_dim=16, kvheads=2)))
generator = torch.Generator().manual_seed(1)
prompts = [torch.randint(3, 300, (length,), generator=generator) for length in (30, 12, 21)]
batch, padding = pad_input_ids(prompts)


def answer(model, prompt, use_cache, **options):
    result = generate(model, prompt, max_new_tokens=20, do_sample=False, use_cache=use_cache, **options)
    return result[..., -20:].tolist()


for name, (variant, options) in families.items():
    torch.manual_seed(0)
    model = get_model(name, variant, **sizes | options).eval()
    for weight in (weight for weight in model.parameters() if weight.dim() > 1):
        weight.normal_(0, 0.15)
    alone = [answer(model, prompt, False) for prompt in prompts]
    assert alone == [answer(model, prompt, True) for prompt in prompts]
    cached, uncached = ([sum(one == two for one, two in zip(*pair)) for pair in
                         zip(alone, answer(model, batch, use_cache, extra_kwargs=dict(padding)))]
                        for use_cache in (True, False))
    print(f"{name + ':':12} with cache {str(cached)[1:-1]} of 20 tokens as alone; without cache {str(uncached)[1:-1]}")
    assert cached == [20] * 3 and max(uncached) < 15, "the behaviour has changed"
PY
