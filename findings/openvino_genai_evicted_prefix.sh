#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 (CPU, float32): with cache eviction and prefix caching together, the second answer to a
# long prompt is another one from its first token on.
#
# Expected: the second answer equals the first one. Eviction starts after the prompt has been read, so the first
# token is the model's own.
# Seen: it holds without prefix caching. With it the blocks that a request has left once some were evicted are
# found again as the beginning of the same prompt, without a word, and the tokens are wrong from the first one on.
# Prompts below the size that starts eviction stay right. When the pipeline ends, it logs leaked blocks.
#
#     no caching,     prompt of 100 tokens: second answer 30 of 30 tokens as the first; first tokens right, right
#     no caching,     prompt of 200 tokens: second answer 30 of 30 tokens as the first; first tokens right, right
#     no caching,     prompt of 300 tokens: second answer 30 of 30 tokens as the first; first tokens right, right
#     prefix caching, prompt of 100 tokens: second answer 30 of 30 tokens as the first; first tokens right, right
#     prefix caching, prompt of 200 tokens: second answer  0 of 30 tokens as the first; first tokens right, wrong
#     prefix caching, prompt of 300 tokens: second answer  2 of 30 tokens as the first; first tokens right, wrong
# (Eviction keeps 160 tokens: the first 32, the last 64 and 64 between them. Right: transformers 5.5.4.)
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
import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
from optimum.intel import OVModelForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM

NEW = 30
torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_grad_enabled(False)
config = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.15, eos_token_id=1)
model = LlamaForCausalLM(config).eval()
model.save_pretrained("llama")
OVModelForCausalLM.from_pretrained("llama", export=True, load_in_8bit=False).save_pretrained("openvino")


def first_token(prompt):
    return int(model(torch.from_numpy(prompt)).logits[0, -1].argmax())


for caching in (False, True):
    for length in (100, 200, 300):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = caching
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(32, 64, 160, genai.AggregationMode.NORM_SUM)
        pipe = genai.ContinuousBatchingPipeline(
            "openvino", scheduler, "CPU", dict(INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"))
        request = genai.GenerationConfig(max_new_tokens=NEW, ignore_eos=True, apply_chat_template=False)
        prompt = np.random.default_rng(length).integers(3, 300, (1, length))
        answers = [pipe.generate([ov.Tensor(prompt)], [request])[0].m_generation_ids[0] for _ in range(2)]
        same = sum(one == other for one, other in zip(*answers))
        right = ["right" if answer[0] == first_token(prompt) else "wrong" for answer in answers]
        name = "prefix caching," if caching else "no caching,"
        print(f"{name:15} prompt of {length} tokens: second answer {same:2} of {NEW} tokens as the first; "
              f"first tokens {right[0]}, {right[1]}")
        assert right[0] == "right" and (same < 5) == (caching and length > 160), "the behaviour has changed"
PY
venv/bin/python run.py > out 2> log || { cat out; tail -n 5 log; exit 1; }
grep -v BlockAllocator out
