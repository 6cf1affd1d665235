#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 (CPU, float32): once a LoRA adapter is switched on or off, a known prompt is answered
# from the other weights' KV cache.
#
# Expected: `generate(..., adapters=...)` gives the tokens of the model with these adapters, whatever was
# generated before. The documentation promises a change of adapters between calls without a new pipeline.
# Seen: LLMPipeline caches prefixes unless told otherwise, and it finds their blocks by their tokens alone. A prompt
# of more than one block (32 tokens) that was read with the adapter gives wrong tokens without it, and the other
# way round, without a word. The blocks of another strength (alpha) are taken, too. Without prefix caching all
# answers are right.
#
#     prefix caching (default), prompt of  31 tokens: with 30, without 30, with 30, half 30 of 30 tokens right
#     prefix caching (default), prompt of 100 tokens: with 30, without 0, with 30, half 0 of 30 tokens right
#     no prefix caching,        prompt of 100 tokens: with 30, without 30, with 30, half 30 of 30 tokens right
# (Right: the tokens of transformers 5.5.4 with the adapter's product added to the weights.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0
"$work/venv/bin/pip" install -q --no-compile transformers==5.5.4 nncf==3.4.0 openvino==2026.4.1 \
    openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 huggingface_hub==1.21.0 requests==2.34.2
"$work/venv/bin/pip" install -q --no-compile --no-deps optimum==2.3.0 optimum-intel==2.2.0
cd "$work"
cat > run.py <<'PY'
import warnings

import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
from optimum.intel import OVModelForCausalLM
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

NEW = 30
warnings.simplefilter("ignore")
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
config = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, eos_token_id=1)
model = LlamaForCausalLM(config).eval()
model.save_pretrained("llama")
OVModelForCausalLM.from_pretrained("llama", export=True, load_in_8bit=False).save_pretrained("openvino")
model.generation_config.eos_token_id = None
adapter, products = {}, []
for layer, block in enumerate(model.model.layers):
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = getattr(block.self_attn, name).weight
        down, up = 0.3 * torch.randn(4, weight.shape[1]), 0.3 * torch.randn(weight.shape[0], 4)
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}."
        adapter |= {place + "lora_A.weight": down, place + "lora_B.weight": up, place + "alpha": torch.tensor(4.0)}
        products.append((weight, up @ down))
save_file(adapter, "adapter.safetensors")
lora = genai.Adapter("adapter.safetensors")


def right(prompt, alpha):
    for weight, product in products:
        weight.add_(product, alpha=alpha)
    tokens = torch.from_numpy(prompt)
    answer = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, pad_token_id=2)
    for weight, product in products:
        weight.sub_(product, alpha=alpha)
    return answer[0, prompt.shape[1]:].tolist()


for caching, length in ((None, 31), (None, 100), (False, 100)):
    options = dict(INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32")
    if caching is not None:
        options["scheduler_config"] = genai.SchedulerConfig()
        options["scheduler_config"].enable_prefix_caching = caching
        options["scheduler_config"].cache_size = 1
    pipe = genai.LLMPipeline("openvino", "CPU", adapters=genai.AdapterConfig(lora), **options)
    prompt = np.random.default_rng(1).integers(3, 300, (1, length))
    counts = {}
    for name, alpha in ("with", 1.0), ("without", 0.0), ("with again", 1.0), ("half", 0.5):
        chosen = genai.AdapterConfig(lora, alpha) if alpha else genai.AdapterConfig()
        answer = pipe.generate(
            ov.Tensor(prompt), adapters=chosen, max_new_tokens=NEW, ignore_eos=True, apply_chat_template=False)
        counts[name] = sum(one == other for one, other in zip(answer.tokens[0], right(prompt, alpha)))
    title = "prefix caching (default)," if caching is None else "no prefix caching,"
    shown = ", ".join(f"{name.removesuffix(' again')} {count}" for name, count in counts.items())
    print(f"{title:25} prompt of {length:3} tokens: {shown} of {NEW} tokens right")
    if caching is None and length > 32:
        assert counts["with"] == NEW and counts["without"] < 5 and counts["half"] < 5, "the behaviour has changed"
    else:
        assert set(counts.values()) == {NEW}, "the behaviour has changed"
PY
venv/bin/python run.py 2> log || { tail -n 5 log; exit 1; }
