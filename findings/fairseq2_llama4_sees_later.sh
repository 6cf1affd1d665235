#!/usr/bin/env bash
# fairseq2 0.8.1 (torch 2.13.0 on a CPU; torch 2.9.1, which the package asks for, gives the same): its Llama 4 is not
# causal. A token sees those behind it.
#
# Expected: in a decoder, logits do not depend on later tokens, and steps with a state give the logits of the whole
# text. Llama 3 of the same package keeps both.
# Seen: Llama 4 keeps neither, if it has layers with chunks (three of four have them). Their mask (ChunkedAttentionBias
# in models/transformer/attention_bias.py) holds a 1 for a visible key and a 0 for a hidden one, and it is added to the
# scores. So a hidden key stays visible, with a little less weight. A step of one token has no mask, and sees the keys
# of earlier chunks too. So training sees the answers, and a generated text does not fit the scores of the whole text.
# Nothing is raised.
#
#     Llama 3: later tokens change earlier logits by 0.00, steps are 0.00 off
#     Llama 4, chunks of 8: later tokens change earlier logits by 4.37, steps are 4.92 off
#     Llama 4, chunks of 8192: later tokens change earlier logits by 4.11, steps are 4.85 off
#     Llama 4, no chunks: later tokens change earlier logits by 0.00, steps are 0.00 off
# (Four layers with random weights, 24 tokens, two texts. The largest difference of a logit, in units of their standard
# deviation. The compiled part of the package, which reads data, is left out.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile importlib_resources==7.1.0 importlib_metadata==10.2.0 ruamel.yaml==0.19.1 \
    safetensors==0.8.0 huggingface_hub==2.4.0 transformers==5.24.0 tiktoken==0.14.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps fairseq2==0.8.1 clusterscope==0.0.32 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
import types

reader = types.ModuleType("fairseq2n")  # the compiled part, which reads data, asks for another torch: without it
reader.DOC_MODE, reader.__version__ = True, "0.8.1"
sys.modules["fairseq2n"] = reader

import torch
from fairseq2.models.llama import LLaMAConfig, create_llama_model
from fairseq2.models.llama4 import Llama4Config
from fairseq2.models.llama4.config import Llama4ExpertsConfig
from fairseq2.models.llama4.factory import create_llama4_model
from fairseq2.nn import BatchLayout, IncrementalStateBag

torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(model_dim=32, max_seq_len=128, vocab_size=60, num_layers=4, num_attn_heads=4, num_key_value_heads=2,
             ffn_inner_dim=64)


def llama4(chunk):
    config = Llama4Config(**sizes, pad_idx=0, nope_layer_interval=4, attention_chunk_size=chunk,
                          experts=Llama4ExpertsConfig(num_experts=2))
    return create_llama4_model(config)


for name, model in (("Llama 3", create_llama_model(LLaMAConfig(**sizes))), ("Llama 4, chunks of 8", llama4(8)),
                    ("Llama 4, chunks of 8192", llama4(8192)), ("Llama 4, no chunks", llama4(0))):
    torch.manual_seed(0)
    model.eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    text = torch.randint(5, 60, (2, 24))
    other = torch.cat([text[:, :12], torch.randint(5, 60, (2, 12))], 1)
    right = model(text, BatchLayout.of(text))
    change = (model(other, BatchLayout.of(other)) - right)[:, :12].abs().max() / right.std()
    state, steps = IncrementalStateBag(32), []
    for token in text.split(1, 1):
        steps.append(model(token, BatchLayout.of(token), state_bag=state))
        state.increment_step_nr()
    off = (torch.cat(steps, 1) - right).abs().max() / right.std()
    print(f"{name}: later tokens change earlier logits by {change:.2f}, steps are {off:.2f} off")
    assert (min(change, off) > 0.1) if "of" in name else max(change, off) < 1e-3, "the behaviour has changed"
PY
