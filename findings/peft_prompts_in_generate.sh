#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 (the newest of both; torch 2.13.0 on a CPU): `generate` drops a tuned prefix,
# and puts a tuned prompt in again at every step.
#
# Expected: `generate` gives the greedy tokens of a loop that passes the whole text to the same model at each step,
# as it does with transformers 5.23.0.
# Seen: transformers 5.24 calls the cache of its models `cache`. In `PeftModelForCausalLM.prepare_inputs_for_
# generation` (peft_model.py) peft looks for `past_key_values`, finds none, and so takes each step for the first one.
# For prefix tuning it adds `past_key_values` with the prefix beside the empty `cache`, and the model takes `cache`:
# the tokens are those of the model without the adapter where only distances count (Llama); GPT-2 also gets
# its positions moved. For prompt tuning (also P-tuning, multitask prompts and CPT) each step runs over the virtual
# tokens once more, behind the others. No call raises an error. A pass over a text (training) is right. With
# use_cache=False prompt tuning is right.
#
#     transformers 5.23.0
#     Llama, prefix tuning: 12 of 12 tokens as in the loop, 2 as without the adapter; tokens per step 20 1 1
#     Llama, prompt tuning: 12 of 12 tokens as in the loop, 0 as without the adapter; tokens per step 28 1 1
#     GPT-2, prefix tuning: 12 of 12 tokens as in the loop, 0 as without the adapter; tokens per step 20 1 1
#     GPT-2, prompt tuning: 12 of 12 tokens as in the loop, 2 as without the adapter; tokens per step 28 1 1
#     transformers 5.24.0
#     Llama, prefix tuning: 2 of 12 tokens as in the loop, 12 as without the adapter; tokens per step 20 1 1
#     Llama, prompt tuning: 1 of 12 tokens as in the loop, 1 as without the adapter; tokens per step 28 9 9
#     GPT-2, prefix tuning: 5 of 12 tokens as in the loop, 0 as without the adapter; tokens per step 20 1 1
#     GPT-2, prompt tuning: 1 of 12 tokens as in the loop, 1 as without the adapter; tokens per step 28 9 9
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile peft==0.21.2 transformers==5.23.0
cat > "$work/check.py" <<'PY'
import sys

import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
ends = dict(vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0)
kinds = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        **ends)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, **ends)),
}
text = torch.randint(4, 300, (1, 20), generator=torch.Generator().manual_seed(5))


def generate(model):
    return model.generate(input_ids=text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=12,
                          min_new_tokens=12)[0, 20:]


def loop(model):
    ids = text
    for _ in range(12):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        logits[2] = -1e9  # no end before 12 tokens
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, 20:]


print("transformers", transformers.__version__)
for name, build in kinds.items():
    for words, config in (("prefix", PrefixTuningConfig), ("prompt", PromptTuningConfig)):
        model = build().eval()
        torch.manual_seed(0)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
        plain = generate(model)
        tuned = get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=8)).eval()
        for weight in tuned.prompt_encoder.parameters():
            weight.normal_(0, 0.5)
        steps, head = [], model.model.norm if name == "Llama" else model.transformer.ln_f
        hook = head.register_forward_pre_hook(lambda module, given: steps.append(given[0].shape[1]))
        made = generate(tuned)
        hook.remove()
        same, without = int((made == loop(tuned)).sum()), int((made == plain).sum())
        print(f"{name}, {words} tuning: {same} of 12 tokens as in the loop, {without} as without the adapter; tokens "
              "per step", *steps[:3])
        right = sys.argv[1] == "right"
        assert (same == 12) == right and (steps[1] == (9 if words == "prompt" and not right else 1)), \
            "the behaviour has changed"
        if name == "Llama" and words == "prefix":
            assert (without == 12) != right, "the behaviour has changed"
PY
"$work/venv/bin/python" -W ignore "$work/check.py" right 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0
"$work/venv/bin/python" -W ignore "$work/check.py" wrong 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
