#!/usr/bin/env bash
# adapters 1.3.0 (transformers 4.57.6, which it asks for; torch 2.13.0 on a CPU): prefix tuning with the default
# attention (SDPA) hides the last tokens of a text from each other, and does nothing at all in a padded batch.
#
# Expected: with a prefix of 10, the last logits of GPT-2 or Llama depend on all tokens of a text, are those of the
# eager implementation of attention, and stay the same if a longer text is in the batch.
# Seen: a text without padding has no mask, and SDPA is told to be causal. `PrefixTuningLayer` (methods/
# prefix_tuning.py) puts the prefix in front of the keys and leaves the missing mask as it is. SDPA aligns its causal
# mask with the first keys: the token at place i sees i + 1 keys, ten of them the prefix. So no token sees itself and
# the 9 before it. In a padded batch there is a mask of booleans, where true means "look". The layer adds zeros for
# the prefix (`invert_mask`), which hide it: the logits are those of the model without an adapter. With eager
# attention zero means "look", and all is right. Nothing warns.
#
#     GPT-2, sdpa:  last logits depend on 14 of the 23 tokens before
#     GPT-2, sdpa:  beside a longer text, off by 0.00 from the model without a prefix, by 2.21 from eager attention
#     GPT-2, eager: last logits depend on 23 of the 23 tokens before
#     GPT-2, eager: beside a longer text, off by 2.21 from the model without a prefix, by 0.00 from eager attention
#     (the same for Llama; in units of the logits' standard deviation)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==4.57.6 adapters==1.3.0
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import adapters
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
ends = dict(vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0)
kinds = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, **ends)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        **ends)),
}
text = torch.randint(4, 300, (1, 24), generator=torch.Generator().manual_seed(5))
batch = torch.randint(4, 300, (2, 30), generator=torch.Generator().manual_seed(6))
mask = torch.ones_like(batch)
batch[0, :24], batch[0, 24:], mask[0, 24:] = text, 0, 0

for name, build in kinds.items():
    model = build().eval()
    adapters.init(model)
    model.add_adapter("prefix", config=adapters.PrefixTuningConfig(prefix_length=10, flat=True))
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.15)

    def last(ids, mask=None):
        return model(ids, attention_mask=torch.ones_like(ids) if mask is None else mask).logits[0, 23]

    without = last(text)
    model.set_active_adapters("prefix")
    model.set_attn_implementation("eager")
    right = last(text)
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        alone, reached = last(text), 0
        for place in range(23):
            changed = text.clone()
            changed[0, place] = (changed[0, place] + 50) % 290 + 4
            reached += bool((last(changed) - alone).abs().max() > 1e-4)
        far = [float((last(batch, mask) - one).abs().max() / right.std()) for one in (without, right)]
        words = f"{name}, {kind}:".ljust(13)
        print(words, f"last logits depend on {reached} of the 23 tokens before")
        print(words, f"beside a longer text, off by {far[0]:.2f} from the model without a prefix, by {far[1]:.2f} "
              "from eager attention")
        expected = reached == 14 and far[0] < 1e-3 < far[1] if kind == "sdpa" else reached == 23 and far[1] < 1e-3
        assert expected, "the behaviour has changed"
PY
