#!/usr/bin/env bash
# adapters 1.3.0 (transformers 4.57.6, which it asks for; torch 2.13.0 on a CPU): a Llama or Mistral prepared with
# `adapters.init` writes its answers without a look at the prompt, since its layers do not use the cache.
#
# Expected: `generate` gives the same greedy tokens with and without `use_cache`, as it does for GPT-2 and GPT-J,
# and as Llama does before `adapters.init`.
# Seen: only the first token is right. The classes `LlamaAttentionWithAdapters`, `LlamaDecoderLayerWithAdapters`
# and those of Mistral (models/llama/modeling_llama.py, models/mistral/modeling_mistral.py) call the cache
# `past_key_value`. Transformers passes `past_key_values`, and that goes into `**kwargs`. The cache that comes back
# is empty, and each new token sees itself only. No adapter needs to be active, a LoRA does not change it, and
# nothing warns. A pass over the whole text (training, scores) is right.
#
#     Llama before init:       12 of 12 tokens as without a cache
#     Llama after init:        1 of 12 tokens as without a cache, with a LoRA 1, keys in the cache 0
#     Mistral before init:     12 of 12 tokens as without a cache
#     Mistral after init:      1 of 12 tokens as without a cache, with a LoRA 1, keys in the cache 0
#     GPT-2 before init:       12 of 12 tokens as without a cache
#     GPT-2 after init:        12 of 12 tokens as without a cache, with a LoRA 12, keys in the cache 31
#     two prompts that end with the same first new token: the same 11 tokens follow: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==4.57.6 adapters==1.3.0
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import adapters
import torch
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
ends = dict(vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, **ends)
kinds = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, **shape)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, **ends)),
}
prompt = torch.randint(4, 300, (1, 20), generator=torch.Generator().manual_seed(5))


def generate(model, ids=prompt, **options):
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                          min_new_tokens=12, return_dict_in_generate=True, **options)


def same(model):
    cached, plain = generate(model).sequences, generate(model, use_cache=False).sequences
    return int((cached == plain)[0, 20:].sum())


for name, build in kinds.items():
    model = build().eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.15)
    before = same(model)
    adapters.init(model)
    after, kept = same(model), generate(model).past_key_values.get_seq_length()
    if name == "Llama":
        seen = {}
        for seed in range(400):  # look for two prompts with the same first new token
            ids = torch.randint(4, 300, (1, 20), generator=torch.Generator().manual_seed(seed))
            first = int(model(ids).logits[0, -1].argmax())
            if first in seen:
                one, two = (generate(model, text).sequences[0, 20:].tolist() for text in (seen[first], ids))
                equal = one == two
                break
            seen[first] = ids
    model.add_adapter("lora", config=adapters.LoRAConfig(r=4))
    model.set_active_adapters("lora")
    for key, weight in model.named_parameters():
        if "loras" in key:
            weight.normal_(0, 0.3)
    tuned = same(model)
    print(f"{name} before init:".ljust(24), f"{before} of 12 tokens as without a cache")
    print(f"{name} after init:".ljust(24), f"{after} of 12 tokens as without a cache, with a LoRA {tuned}, keys in "
          f"the cache {kept}")
    broken = name != "GPT-2"
    assert before == 12 and (after < 12) == (tuned < 12) == (kept == 0) == broken, "the behaviour has changed"
print("two prompts that end with the same first new token: the same 11 tokens follow:", equal)
assert equal, "the behaviour has changed"
PY
