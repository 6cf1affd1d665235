#!/usr/bin/env bash
# ai2-olmo-core 3.0.0 (torch 2.13.0 on a CPU): without a cache, prompts in a batch see their padding.
#
# Expected: generate_batch documents attention_mask as the mask of left padding. With it, greedy answers of prompts of unequal
# lengths are the same in a batch and alone. Without a GPU use_cache=False is the only way, as the attention of PyTorch has no cache.
# Seen: only the longest prompt gets its answer. `TransformerGenerationModule.generate_batch` uses the mask only to tell a cache of
# its padding. With use_cache=False it drops the mask, and the model reads the padding as a part of the prompt: another padding token
# gives other answers, and without the mask they are the same. Nothing is raised. (generation_module.py.)
#
#     seed 0: tokens as alone, of 12, for prompts of 9, 7, 5 and 3 tokens in a batch: [12, 2, 2, 0]; if another token
#         pads: [12, 4, 0, 0]; without the mask the same answers: True
#     seed 1: tokens as alone, of 12, for prompts of 9, 7, 5 and 3 tokens in a batch: [12, 6, 2, 2]; if another token
#         pads: [12, 1, 2, 0]; without the mask the same answers: True
# (Two layers with random weights, answers of 12 tokens.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps ai2-olmo-core==3.0.0 bettermap==1.3.1 boto3==1.44.8 botocore==1.44.8 cached-path==1.8.10 certifi==2026.10.19.post1 \
    charset-normalizer==3.5.3 dataclass-extensions==0.5.0 dill==0.4.1 cffi==2.1.1 cryptography==50.0.2 pyasn1==0.6.5 \
    pyasn1-modules==0.4.2 filelock==3.32.7 google-api-core==2.44.0 google-auth==2.63.0 google-cloud-core==2.8.0 \
    google-cloud-storage==3.17.1 google-crc32c==1.9.0 google-resumable-media==2.11.0 googleapis-common-protos==1.76.0 \
    httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 sniffio==1.3.1 click==8.5.1 hf-xet==1.8.0 \
    huggingface_hub==1.33.0 idna==3.20 importlib_resources==7.1.0 jmespath==1.1.0 markdown-it-py==4.3.0 mdurl==0.1.2 \
    packaging==26.4 pandas==3.1.1 protobuf==7.36.2 pygments==2.21.0 python-dateutil==2.9.0.post0 pyyaml==6.0.4 \
    requests==2.34.2 rich==13.9.4 s3transfer==0.19.3 safetensors==0.8.0 six==1.17.0 tqdm==4.70.1 urllib3==2.8.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from olmo_core.generate.generation_module import GenerationConfig, TransformerGenerationModule
from olmo_core.nn.transformer import TransformerConfig

torch.set_num_threads(1)
torch.set_grad_enabled(False)
for seed in (0, 1):
    torch.manual_seed(seed)
    model = TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=2, n_heads=4).build(init_device="cpu")
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
    model.lm_head.w_out.weight[63] = 0  # so that answers do not end early
    config = GenerationConfig(pad_token_id=0, eos_token_id=63, use_cache=False, do_sample=False, max_new_tokens=12)
    module = TransformerGenerationModule(model, config, device=torch.device("cpu"))

    def answers(ids, **mask):
        return module.generate_batch(ids, completions_only=True, log_timing=False, **mask)[0]

    prompts = [torch.randint(1, 63, (length,)) for length in (9, 7, 5, 3)]
    alone = torch.cat([answers(prompt[None]) for prompt in prompts])
    batches = []
    for padding in (0, 5):
        ids, mask = torch.full((4, 9), padding), torch.zeros(4, 9, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, 9 - len(prompt):], mask[row, 9 - len(prompt):] = prompt, True
        batches.append(answers(ids, attention_mask=mask))
    same = [(batch == alone).sum(1).tolist() for batch in batches]
    print(f"seed {seed}: tokens as alone, of 12, for prompts of 9, 7, 5 and 3 tokens in a batch: {same[0]}; if another token pads: {same[1]};",
          f"without the mask the same answers: {torch.equal(answers(ids), batches[1])}")
    assert all(row[0] == 12 and sum(row[1:]) < 24 for row in same) and not torch.equal(*batches), "the behaviour has changed"
    assert torch.equal(answers(ids), batches[1]), "the behaviour has changed"
PY
