#!/usr/bin/env bash
# ibm-fms 1.13.1 (torch 2.13.0 on a CPU): a second portion of a prompt sees only the beginning of the cached tokens,
# and not its own ones.
#
# Expected: a prompt whose first tokens are in `past_key_value_states` gets the logits of one pass. Positions
# and the causal mask follow from the length of the cache, as they do for a single token.
# Seen: a single token after the cache is right. In a portion of 2 tokens and more, all rows are wrong. Row i of the
# portion sees the first i + 1 keys of the cache, since PyTorch's `is_causal` aligns queries and keys at their
# beginning. No call raises an error. An explicit mask, the paged attention ("spyre_paged_attn") and the families
# with sinks (gpt_oss) are right.
#
#     gpt_oss:     1 token 0 of 1 rows off, 2 tokens 0 of 2, 50 tokens 0 of 50; with a mask 0 of 50
#     gpt_bigcode: 1 token 0 of 1 rows off, 2 tokens 2 of 2, 50 tokens 50 of 50; with a mask 0 of 50
#     mixtral:     1 token 0 of 1 rows off, 2 tokens 2 of 2, 50 tokens 50 of 50; with a mask 0 of 50
#     mistral:     1 token 0 of 1 rows off, 2 tokens 2 of 2, 50 tokens 50 of 50; with a mask 0 of 50
#     qwen3:       1 token 0 of 1 rows off, 2 tokens 2 of 2, 50 tokens 50 of 50; with a mask 0 of 50
#     llama:       1 token 0 of 1 rows off, 2 tokens 2 of 2, 50 tokens 50 of 50; with a mask 0 of 50
#     llama, another token at 60, the portion's 10th: the last row changes by 0.00 (one pass: 0.31)
# (Small models with random weights, 100 tokens, the last ones as a portion. A row is off if a logit differs by
# more than 1 % of the logits' standard deviation, the unit of the last line.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile ibm-fms==1.13.1 transformers==5.24.0
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from fms.models import get_model

torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(src_vocab_size=300, nheads=4, nlayers=3, max_expected_seq_len=256)
families = dict(
    gpt_oss=("20b", dict(emb_dim=64, head_dim=16, kvheads=2)),
    gpt_bigcode=("micro", dict(emb_dim=64, pad_id=-1)),
    mixtral=("8x7b", dict(dim=64, hidden_dim=96, kvheads=2, num_experts=4)),
    mistral=("7b", dict(emb_dim=64, head_dim=16, kvheads=2)),
    qwen3=("0.6b", dict(emb_dim=64, head_dim=16, kvheads=2)),
    llama=("7b", dict(emb_dim=64, kvheads=2)))
tokens = torch.randint(3, 300, (1, 100), generator=torch.Generator().manual_seed(1))


def read_end(tokens, length, **options):
    _, cache = model(tokens[:, :-length], use_cache=True)
    return model(tokens[:, -length:], past_key_value_states=cache, use_cache=True, **options)[0][0]


def count_off(length, **options):
    difference = read_end(tokens, length, **options) - right[-length:]
    return int((difference.abs().amax(1) > 0.01 * right.std()).sum())


for name, (variant, options) in families.items():
    torch.manual_seed(0)
    model = get_model(name, variant, **sizes | options).eval()
    for key, weight in model.named_parameters():
        if weight.dim() > 1 or "sinks" in key:
            weight.normal_(0, 0.15)
    right = model(tokens)[0]
    off = [count_off(length) for length in (1, 2, 50)]
    masked = count_off(50, mask=torch.ones(1, 100, 100, dtype=torch.bool).tril()[:, -50:])
    print(f"{name + ':':12} 1 token {off[0]} of 1 rows off, 2 tokens {off[1]} of 2, 50 tokens {off[2]} of 50; "
          f"with a mask {masked} of 50")
    assert off == ([0, 0, 0] if name == "gpt_oss" else [0, 2, 50]) and masked == 0, "the behaviour has changed"
other = tokens.clone()
other[0, 60] = (other[0, 60] + 100) % 300
portion, whole = (float((one[-1] - two[-1]).abs().max() / right.std()) for one, two in
                  ((read_end(tokens, 50), read_end(other, 50)), (right, model(other)[0])))
print(f"llama, another token at 60, the portion's 10th: the last row changes by {portion:.2f} (one pass: {whole:.2f})")
assert portion == 0 < 0.1 < whole, "the behaviour has changed"
PY
