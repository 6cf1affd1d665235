#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): the length that a StaticCache returned earlier grows with the
# cache.
#
# Expected: `get_seq_length()` returns a number, as DynamicCache does.
# Seen: it returns the cache's own counter, a tensor that later steps change in place. The usual way to try
# tokens and take them back (keep the length, run the model, crop by the difference) then removes nothing. No
# error is raised, and the next logits are those of another text.
#
#     DynamicCache: kept 20, after ten more tokens 20, length after the crop 20
#     StaticCache:  kept 20, after ten more tokens 30, length after the crop 30
#     largest difference of the next logits: 0.09
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0
"$work/venv/bin/python" - <<'PY'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2)).eval()
tokens = torch.randint(0, 300, (1, 34))


def run(cache, start, end):
    with torch.no_grad():
        return model(tokens[:, start:end], cache=cache, use_cache=True).logits[:, -1]


logits = []
for cache in DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64):
    run(cache, 0, 20)
    kept = cache.get_seq_length()
    before = int(kept)
    run(cache, 20, 30)
    after = int(kept)
    cache.crop(int(kept - cache.get_seq_length()))
    length = int(cache.get_seq_length())
    print(f"{type(cache).__name__}: kept {before}, after ten more tokens {after}, "
          f"length after the crop {length}")
    logits.append(run(cache, 30, 34))
worst = float((logits[0] - logits[1]).abs().max())
print(f"largest difference of the next logits: {worst:.2f}")
assert (before, after, length) == (20, 30, 30) and worst > 0.01, "the behaviour has changed"
PY
