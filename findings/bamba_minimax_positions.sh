#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): with a cache and without `position_ids` Bamba and MiniMax give
# the next token a wrong position.
#
# Expected: the cache knows its length, so a token that follows 50 cached ones gets position 50, as with
# Llama and Granite hybrid.
# Seen: Bamba counts from zero in every call. MiniMax asks the cache, which answers 0 when the first layer
# is a linear one, as in MiniMax-Text-01. Both are right when the caller passes the positions, as `generate`
# does. But `generate` with a restored MiniMax cache believes it empty, reads the whole prompt once more
# behind the cached tokens, and writes other tokens.
#
#     llama:            by default 0.00, with positions 0.00, length of the cache 60
#     granitemoehybrid: by default 0.00, with positions 0.00, length of the cache 60
#     bamba:            by default 0.59, with positions 0.00, length of the cache 60
#     minimax:          by default 1.93, with positions 0.00, length of the cache 0
#     minimax, generate with 40 of 60 tokens restored: 0 of 12 tokens as without a cache
# (Differences of the last logits from one pass, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0
"$work/venv/bin/python" - <<'PY' 2> "$work/warnings" || { tail -n 5 "$work/warnings"; exit 1; }
import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)
heads = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1)
experts = dict(num_local_experts=2, num_experts_per_tok=1)
options = dict(
    llama={}, bamba=dict(attn_layer_indices=[1, 3], **heads),
    granitemoehybrid=dict(layer_types=["mamba", "attention"] * 2, shared_intermediate_size=64,
                          position_embedding_type="rope", **heads, **experts),
    minimax=dict(layer_types=["linear_attention", "full_attention"] * 2, block_size=16, **experts))
tokens = torch.randint(3, 300, (1, 60), generator=torch.Generator().manual_seed(0))


def build(name):
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4, pad_token_id=0,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | options[name])).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.data.normal_(0, 0.15)
    return model


@torch.no_grad()
def read(model, first, positions=False):
    output = model(tokens[:, :first], use_cache=True)
    for at in range(first, 60):
        place = {"position_ids": torch.tensor([[at]])} if positions else {}
        output = model(tokens[:, at:at + 1], cache=output.cache, use_cache=True, **place)
    return output


for name in ("llama", "granitemoehybrid", "bamba", "minimax"):
    model = build(name)
    whole = read(model, 60).logits[0, -1]
    default, placed = (float((read(model, 30, positions).logits[0, -1] - whole).abs().max() / whole.std())
                       for positions in (False, True))
    length = read(model, 60).cache.get_seq_length()
    print(f"{name + ':':17} by default {default:.2f}, with positions {placed:.2f}, "
          f"length of the cache {length}")
    assert placed < 0.01, "the behaviour has changed"
    assert default > 0.5 if name in ("bamba", "minimax") else default < 0.01, "the behaviour has changed"
    assert length == (0 if name == "minimax" else 60), "the behaviour has changed"
saved = model(tokens[:, :40], use_cache=True).cache
right, restored = (model.generate(tokens, max_new_tokens=12, do_sample=False, **cache)[0, 60:].tolist()
                   for cache in ({"use_cache": False}, {"cache": saved}))
same = sum(a == b for a, b in zip(right, restored))
print(f"minimax, generate with 40 of 60 tokens restored: {same} of 12 tokens as without a cache")
assert same < 6, "the behaviour has changed"
PY
