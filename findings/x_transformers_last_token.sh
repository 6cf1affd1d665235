#!/usr/bin/env bash
# x-transformers 2.31.10, torch 2.13.0 (CPU): with a cache a model reads only the last of the new tokens,
# and two options give wrong logits for each of them.
#
# Expected: five tokens that follow 20 cached ones give five rows of logits, as without a cache; with
# `input_not_include_cache=True` the input is the new tokens alone. A model that says `can_cache_kv` writes
# the same text with and without a cache.
# Seen: the attention layers keep the last position of the input and drop the others without a word, so the
# cache lacks their K and V. With `shift_tokens` each token misses the features of the token before it. With
# data dependent ALiBi (the forgetting transformer) the decay of the cached tokens is lost.
#
#     rotary_pos_emb:            1 new token 0.00, 5 new tokens: 1 row, 1.73; text: 20 of 20 tokens
#     shift_tokens:              1 new token 3.12, 5 new tokens: 1 row, 3.85; text: 1 of 20 tokens
#     attn_data_dependent_alibi: 1 new token 0.23, 5 new tokens: 1 row, 1.32; text: 6 of 20 tokens
# (Differences of the last logits from those without a cache, in units of their standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile --no-deps x-transformers==2.31.10 einops==0.8.2 einx==0.4.3 \
    frozendict==2.5.1 torch-einops-utils==0.2.0 loguru==0.7.3 packaging==26.0
"$work/venv/bin/python" - <<'PY'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.set_num_threads(1)
tokens = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(1))
for option in ("rotary_pos_emb", "shift_tokens", "attn_data_dependent_alibi"):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=3, heads=2, attn_dim_head=32, **{option: 1})
    model = TransformerWrapper(num_tokens=200, max_seq_len=64, attn_layers=layers).eval()
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.data.normal_(0, 0.2)
    assert model.can_cache_kv
    errors = []
    with torch.no_grad():
        whole = model(tokens)[0]
        for count in (1, 5):
            cache = model(tokens[:, :20], return_intermediates=True)[1]
            part = model(tokens[:, 20:20 + count], cache=cache, input_not_include_cache=True)[0]
            errors.append(float((part[-1] - whole[19 + count]).abs().max() / whole.std()))
    texts = [AutoregressiveWrapper(model).generate(tokens[:, :20], 20, temperature=0.0, cache_kv=cached)[0]
             for cached in (True, False)]
    same = int((texts[0] == texts[1]).sum())
    print(f"{option + ':':26} 1 new token {errors[0]:.2f}, 5 new tokens: {len(part)} row, {errors[1]:.2f}; "
          f"text: {same} of 20 tokens")
    assert len(part) == 1 and errors[1] > 0.5, "the behaviour has changed"
    assert same == 20 and errors[0] < 0.01 if option == "rotary_pos_emb" else \
        same < 20 and errors[0] > 0.1, "the behaviour has changed"
PY
