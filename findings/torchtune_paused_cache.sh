#!/usr/bin/env bash
# torchtune 0.6.1, torchao 0.10.0, torch 2.13.0 (CPU): in a model whose KV caches are switched off for a pass,
# each token also sees the tokens after it.
#
# Expected: within `disable_kv_cache`, which is there for passes without caches between others with them, a pass
# gives the logits of the same model without caches. Without a mask, attention is causal, as its page says.
# Seen: it is causal only in a model that has no caches at all. Another last token changes the logits of the
# first one. Nothing warns. With a causal mask, the logits are right; the caches stay as they were.
#
#     without caches:             0.00 from the right logits; another last token changes the first logits by 0.00
#     caches switched off:        4.88 from the right logits; another last token changes the first logits by 0.63
#     switched off, with a mask:  0.00 from the right logits; another last token changes the first logits by 0.00
# (In units of the logits' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile torchtune==0.6.1 torchao==0.10.0 pillow==12.0.0
"$work/venv/bin/python" - <<'PY'
import torch
from torchtune.models.llama3 import llama3
from torchtune.modules import disable_kv_cache

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
model = llama3(vocab_size=300, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=128,
               intermediate_dim=128).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.normal_(0, 0.15)
tokens = torch.randint(3, 300, (1, 40))
other = tokens.clone()
other[0, -1] = (other[0, -1] + 1) % 300
right = model(tokens)[0]


def compare(words: str, **options) -> tuple[float, float]:
    ours, changed = model(tokens, **options)[0], model(other, **options)[0]
    far, first = (float((one - two).abs().max() / right.std()) for one, two in ((ours, right), (ours[0], changed[0])))
    print(f"{words + ':':27} {far:.2f} from the right logits; another last token changes the first logits by {first:.2f}")
    return far, first


assert max(compare("without caches")) == 0
model.setup_caches(1, torch.float32, decoder_max_seq_len=128)
with disable_kv_cache(model):
    assert min(compare("caches switched off")) > 0.1, "the behaviour has changed"
    mask = torch.ones(1, 40, 40, dtype=torch.bool).tril()
    assert max(compare("switched off, with a mask", mask=mask)) < 1e-3, "the behaviour has changed"
PY
