#!/usr/bin/env bash
# titans-pytorch 0.5.5 and infini-transformer-pytorch 0.2.1 (torch 2.13.0 on a CPU): a prompt longer than one segment
# is forgotten, wholly or in part.
#
# Expected: Titans' greedy `sample` gives the same tokens with `use_cache=True` and without. Infini-Transformer's
# `generate` reads the segments of a prompt one after the other into its memories, as its loss does.
# Seen: Titans' sample without a cache is right, and so is a short prompt that grows over many segments. But after a
# prompt of more than one segment the cache is empty: it takes the newest keys of the whole prompt, a full segment,
# and a full segment is dropped as finished. So the next tokens do not see the segment that they stand in.
# `generate` of Infini-Transformer passes the last segment alone to the model, with no memories. Prompts with other
# beginnings get the very same logits.
#
#     Titans, attention alone, a prompt of  8: 30, 30, 30 of 30 tokens as without a cache
#     Titans, attention alone, a prompt of 15: 30, 30, 30 of 30 tokens as without a cache
#     Titans, attention alone, a prompt of 20: 16, 13, 21 of 30 tokens as without a cache
#     Titans, attention alone, a prompt of 40: 11, 9, 21 of 30 tokens as without a cache
#     Titans, with a neural memory, a prompt of  8: 30, 30, 30 of 30 tokens as without a cache
#     Titans, with a neural memory, a prompt of 15: 30, 30, 30 of 30 tokens as without a cache
#     Titans, with a neural memory, a prompt of 20: 24, 18, 17 of 30 tokens as without a cache
#     Titans, with a neural memory, a prompt of 40: 29, 20, 12 of 30 tokens as without a cache
#     Infini-Transformer, another beginning of a prompt of 10: the logits change by 3.95, 3.52, 3.47 (segment by
#         segment: 3.95, 3.52, 3.47)
#     Infini-Transformer, another beginning of a prompt of 20: the logits change by 0.00, 0.00, 0.00 (segment by
#         segment: 2.35, 1.68, 1.73)
#     Infini-Transformer, another beginning of a prompt of 40: the logits change by 0.00, 0.00, 0.00 (segment by
#         segment: 0.75, 1.26, 1.58)
# (Small models with random weights and segments of 16 tokens, three seeds. The memories' gates are set to one half.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps titans-pytorch==0.5.5 infini-transformer-pytorch==0.2.1 \
    assoc-scan==0.0.6 axial_positional_embedding==0.3.12 einops==0.8.2 einx==0.4.3 hyper-connections==0.4.11 \
    rotary-embedding-torch==0.9.1 tensordict==0.15.3 tqdm==4.70.1 x-transformers==2.31.10 frozendict==2.5.1 \
    loguru==0.7.3 torch-einops-utils==0.2.0 accelerated-scan==0.3.1 cloudpickle==3.1.3 pyvers==0.2.3 \
    orjson==3.13.0 importlib_metadata==10.2.0 zipp==4.1.2 packaging==26.4 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper
from titans_pytorch import MemoryAsContextTransformer

NEW, SEGMENT = 30, 16
torch.set_num_threads(1)
torch.set_grad_enabled(False)


def fill(model):
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.15)
        if "head_gates" in name:
            weight.zero_()
    return model.eval()


def sample(model, prompt, cached):
    return model.sample(prompt, prompt.shape[1] + NEW, temperature=0.0, filter_fn=lambda logits: logits,
                        filter_kwargs={}, use_cache=cached, show_progress=False)[0]


for name, options in (("attention alone", dict(neural_memory_layers=())), ("with a neural memory", {})):
    for length in (8, 15, 20, 40):
        same = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = fill(MemoryAsContextTransformer(
                num_tokens=200, dim=64, depth=2, segment_len=SEGMENT, num_longterm_mem_tokens=2,
                num_persist_mem_tokens=2, heads=4, dim_head=16, num_residual_streams=1, **options))
            prompt = torch.randint(0, 200, (1, length))
            same.append(int((sample(model, prompt, True) == sample(model, prompt, False)).sum()))
        print(f"Titans, {name}, a prompt of {length:2}: {', '.join(map(str, same))} of {NEW} tokens as without a cache")
        assert min(same) == NEW if length < SEGMENT else max(same) < NEW, "the behaviour has changed"

for length in (10, 20, 40):
    moved, right = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = fill(InfiniTransformer(num_tokens=200, dim=64, depth=2, dim_head=16, heads=4))
        wrapper = InfiniTransformerWrapper(model, segment_length=SEGMENT)
        prompt = torch.randint(0, 200, (1, length))
        other = prompt.clone()
        other[:, :8] = (other[:, :8] + 100) % 200
        seen, read = [], []
        for tokens in (prompt, other):
            rows = []
            wrapper.generate(prompt=tokens, seq_len=length + 1, filter_fn=lambda row: rows.append(row) or row,
                             filter_kwargs={})
            seen.append(rows[0])
            memories = None
            *before, last = tokens.split(SEGMENT, -1)
            for segment in before:
                memories = model(segment, past_memories=memories, return_new_memories=True)[2]
            read.append(model(last, past_memories=memories)[0][:, -1])
        moved.append(float((seen[0] - seen[1]).abs().max() / seen[0].std()))
        right.append(float((read[0] - read[1]).abs().max() / read[0].std()))
    print(f"Infini-Transformer, another beginning of a prompt of {length}: the logits change by",
          ", ".join(f"{change:.2f}" for change in moved), "(segment by segment:",
          ", ".join(f"{change:.2f}" for change in right) + ")")
    assert min(right) > 0.1 and (max(moved) == 0) == (length > SEGMENT), "the behaviour has changed"
PY
