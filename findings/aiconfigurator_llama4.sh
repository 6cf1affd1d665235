#!/usr/bin/env bash
# aiconfigurator-core 0.12.0 (beside transformers 5.24.0): its models of Llama 4 have no shared expert and twice
# as many layers with full attention, and its dense models count tied embeddings twice.
#
# Expected: the operations, from which it computes memory and the time of a step, are those of the model that
# the configuration describes. The configurations come from the package itself.
# Seen: the weights of Llama 3.1 8B and Qwen3 8B agree with transformers. In Llama 4 each layer with experts
# has one more expert that every token passes. The package builds these layers without it, for prefill and for
# decoding. In Scout that is 6 of the 17 billion weights that a token uses. Every fourth layer of Llama 4 has
# full attention, and here it is every second one. A small Llama 4, read from a folder, lacks the same. No
# model reads `tie_word_embeddings`, so Qwen3 0.6B and 1.7B get a second matrix for the vocabulary.
# Cause: HybridMoEModel._moe_ops (sdk/models/hybrid_moe.py) passes num_shared_experts=0, the parser of Llama 4
# (sdk/utils.py) alternates the kinds of attention, and LLAMAModel (sdk/models/llama.py) adds an embedding and
# an output matrix in all cases.
#
#     Meta-Llama-3.1-8B               8.030 billion, aiconfigurator   8.030, missing  0.000
#     Qwen3-8B                        8.191 billion, aiconfigurator   8.190, missing  0.000
#     Llama-4-Scout-17B-16E         107.770 billion, aiconfigurator 101.730, missing  6.040, shared experts 6.040
#     Llama-4-Maverick-17B-128E     400.712 billion, aiconfigurator 397.691, missing  3.020, shared experts 3.020
#     Qwen3-0.6B                      0.596 billion, aiconfigurator   0.752, missing -0.156, embeddings 0.156
#     Qwen3-1.7B                      1.721 billion, aiconfigurator   2.032, missing -0.311, embeddings 0.311
#     Scout uses 17.17 billion for a token; of its 48 layers 12 have full attention, in aiconfigurator 24
#     operations for a shared expert: Scout 0, DeepSeek-V3 3
#     a small Llama 4: missing 3150080, shared experts 3145728, norms 4352
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 aiconfigurator-core==0.12.0 pandas==2.3.3 \
    pyarrow==26.0.1 scipy==1.17.1 pyyaml==6.0.4
cd "$work"
"$work/venv/bin/python" - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import json
import pathlib
import torch
import aiconfigurator_core
from aiconfigurator_core.sdk import common, config, models
from transformers import AutoConfig, AutoModelForCausalLM

folder = pathlib.Path(aiconfigurator_core.__file__).parent / "model_configs"
bits = dict(gemm_quant_mode=common.GEMMQuantMode.bfloat16, moe_quant_mode=common.MoEQuantMode.bfloat16,
            kvcache_quant_mode=common.KVCacheQuantMode.bfloat16)


def estimated(name):
    model = models.get_model(name, config.ModelConfig(moe_tp_size=1, moe_ep_size=1, **bits), "vllm")
    return model, round(sum(operation.get_weights() for operation in model.context_ops) / 2)


def real(text):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    parts = {name: weight.numel() for name, weight in model.named_parameters()}
    layers = getattr(model.config, "layer_types", []) or []
    sizes = {part: sum(size for name, size in parts.items() if part in name)
             for part in ("", "shared_expert", "feed_forward.experts", "norm", "embed_tokens")}
    return sizes | dict(full=layers.count("full_attention"))


for name in ("meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-8B", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
             "meta-llama/Llama-4-Maverick-17B-128E-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"):
    text = json.loads((folder / (name.replace("/", "--") + "_config.json")).read_text())
    text = text.get("text_config", text)
    sizes, (model, weights) = real(text), estimated(name)
    missing, part = sizes[""] - weights, ""
    if "Llama-4" in name:
        part, expected = "shared experts", sizes["shared_expert"]
    elif text["tie_word_embeddings"]:
        part, expected = "embeddings", sizes["embed_tokens"]
    print(f"{name.split('/')[1].removesuffix('-Instruct'):27} {sizes[''] / 1e9:9.3f} billion, aiconfigurator "
          f"{weights / 1e9:7.3f}, missing {missing / 1e9:6.3f}"
          + (f", {part} {expected / 1e9:.3f}" if part else ""))
    error = abs(abs(missing) - expected) / expected if part else abs(missing) / weights
    assert error < 0.002, "the behaviour has changed"
    if "Scout" in name:
        used, full = sizes[""] - sizes["feed_forward.experts"] * 15 // 16, sizes["full"]
        scout, pattern = model, model._hybrid_config.attn_layer_pattern
print(f"Scout uses {used / 1e9:.2f} billion for a token; of its {len(pattern)} layers {full} have full "
      f"attention, in aiconfigurator {sum(pattern)}")
assert full == 12 and sum(pattern) == 24, "the behaviour has changed"
counts = [sum("shared" in operation._name for operation in model.context_ops + model.generation_ops)
          for model in (scout, estimated("deepseek-ai/DeepSeek-V3")[0])]
print("operations for a shared expert: Scout {}, DeepSeek-V3 {}".format(*counts))
assert counts[0] == 0 < counts[1], "the behaviour has changed"
text = dict(
    model_type="llama4_text", vocab_size=3200, hidden_size=256, intermediate_size=512,
    intermediate_size_mlp=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, num_local_experts=4,
    num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=64,
    max_position_embeddings=4096)
small = pathlib.Path("small")
small.mkdir()
(small / "config.json").write_text(json.dumps(dict(
    architectures=["Llama4ForConditionalGeneration"], model_type="llama4", torch_dtype="bfloat16",
    text_config=text)))
sizes, (_, weights) = real(text), estimated(str(small))
missing = sizes[""] - weights
print(f"a small Llama 4: missing {missing}, shared experts {sizes['shared_expert']}, norms {sizes['norm']}")
assert missing == sizes["shared_expert"] + sizes["norm"], "the behaviour has changed"
PY
