#!/usr/bin/env bash
# peft 0.21.2 (transformers 5.24.0, torch 2.13.0 on a CPU): an activated LoRA (aLoRA) computes the wrong
# tokens without a cache, with a prefill in portions, and with drafts.
#
# Expected: `generate` gives the same greedy tokens with and without `use_cache`, with `prefill_chunk_size`,
# and with `prompt_lookup_num_tokens`, as it does for a plain LoRA. Beam search raises an error for aLoRA.
# Seen: `generate` counts once how many tokens of the prompt get the adapter. Each forward pass applies the
# adapter to that many of its own last rows. Without a cache the start moves one token to the right at each
# step. Each portion applies the adapter to its own last rows. Prompt lookup adds three drafts to the pass
# over the prompt, and the start moves by three. No call raises an error.
#
#     use_cache=False:               LoRA 12 of 12 tokens, aLoRA 3 of 12 tokens
#     prefill_chunk_size=16:         LoRA 12 of 12 tokens, aLoRA 0 of 12 tokens
#     prompt_lookup_num_tokens=3:    LoRA 12 of 12 tokens, aLoRA 0 of 12 tokens
# (Tokens at the same place as with the cache and one prefill.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 peft==0.21.2
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

invocation = [5, 6, 7]
draw = torch.Generator().manual_seed(1)
context = torch.randint(10, 290, (1, 40), generator=draw)
question = torch.randint(10, 290, (1, 4), generator=draw)
prompt = torch.cat([context, torch.tensor([invocation]), question], 1)


def answers(**adapter):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=298, eos_token_id=299, pad_token_id=0))
    for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
        matrix.data.normal_(0, 0.12)
    model = get_peft_model(model, LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "k_proj", "v_proj"], **adapter)).eval()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.2)

    def generate(**options):
        made = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False, **options)
        return made[0, prompt.shape[1]:].tolist()

    right = generate()
    for options in ({"use_cache": False}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}):
        yield options, sum(a == b for a, b in zip(generate(**options), right))


plain, activated = list(answers()), list(answers(alora_invocation_tokens=invocation))
for (options, same), (_, activated_same) in zip(plain, activated):
    (name, value), = options.items()
    print(f"{name}={value}:".ljust(30), f"LoRA {same} of 12 tokens, aLoRA {activated_same} of 12 tokens")
    assert same == 12 and activated_same < 12, "the behaviour has changed"
PY
