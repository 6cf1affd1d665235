#!/usr/bin/env bash
# peft 0.21.2 (transformers 5.23.0, torch 2.13.0 on a CPU): with prompt tuning, `generate` skips tokens of a second
# turn that comes with a kept cache, and of a prompt that is read in portions.
#
# Expected: a second turn with the cache of the first one gives the greedy tokens that the whole text gives from
# the start, and `prefill_chunk_size` changes nothing, as with LoRA.
# Seen: the virtual tokens are in the cache, so it is longer than the text behind it. Transformers passes the tokens
# that the cache's length leaves over: of 11 new tokens it drops the first 8, as many as there are virtual tokens.
# `PeftModelForCausalLM.prepare_inputs_for_generation` (peft_model.py) then keeps only the last token, if the cache is
# at least as long as what is left. So the model reads 1 token of a new turn, and 1 of each later portion. No call
# raises an error. (transformers 5.24.0 has another fault in the same place, and so is not used here.)
#
#     LoRA:          second turn 12 of 12 tokens as from the start (read 11 tokens), in portions 12 of 12 (read 8 8 4 tokens)
#     prompt tuning: second turn 0 of 12 tokens as from the start (read 1 tokens), in portions 0 of 12 (read 16 1 1 tokens)
#     P-tuning:      second turn 2 of 12 tokens as from the start (read 1 tokens), in portions 4 of 12 (read 16 1 1 tokens)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile peft==0.21.2 transformers==5.23.0
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
text = torch.randint(4, 300, (1, 20), generator=torch.Generator().manual_seed(5))
question = torch.randint(4, 300, (1, 10), generator=torch.Generator().manual_seed(6))
kinds = {
    "LoRA": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, encoder_hidden_size=32),
}
for name, config in kinds.items():
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.15)
    tuned = get_peft_model(model, config).eval()
    for key, weight in tuned.named_parameters():
        if "lora_B" in key or "prompt_encoder" in key:
            weight.normal_(0, 0.2)
    steps = []
    model.model.norm.register_forward_pre_hook(lambda module, given: steps.append(given[0].shape[1]))

    def generate(ids, **options):
        steps.clear()
        made = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                              min_new_tokens=12, return_dict_in_generate=True, **options)
        return made, made.sequences[0, ids.shape[1]:], list(steps)

    first, answer, _ = generate(text)
    both = torch.cat([first.sequences, question], 1)
    _, start, _ = generate(both)
    _, kept, read = generate(both, past_key_values=first.past_key_values)
    _, portions, parts = generate(text, prefill_chunk_size=8)
    turn, split = int((kept == start).sum()), int((portions == answer).sum())
    print(f"{name + ':':14} second turn {turn} of 12 tokens as from the start (read {read[0]} tokens), in portions {split} "
          "of 12 (read", *parts[:3], "tokens)")
    assert (turn == 12) == (split == 12) == (name == "LoRA"), "the behaviour has changed"
PY
