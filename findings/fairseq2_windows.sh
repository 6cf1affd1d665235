#!/usr/bin/env bash
# fairseq2 0.8.1 (torch 2.13.0 on a CPU; torch 2.9.1, which the package asks for, gives the same): models with a sliding
# window answer otherwise if the prompt is read in portions (Mistral, OLMo 3), or as soon as it is longer than the window
# (Gemma 3n).
#
# Expected: the portions of a prompt (prefill_chunk_size of the generators, 512 unless told) change no answer, and the
# steps of a generator give the tokens of a loop without a state.
# Seen: only portions within the window and single tokens are exact for Mistral and OLMo 3. Their state keeps the last
# keys of the window. A portion is written before its tokens attend, so its first tokens lose keys, and the mask of a
# portion shorter than the window has no window. If a portion crosses the end of the buffer before it is full, the state
# turns places that were never written into the window: with 5 + 6 tokens and a window of 8, two of 8 keys
# (LocalAttentionState in models/transformer/multihead_attention.py). Gemma 3n keeps all keys instead, and a step of one
# token has no mask at all. So its layers with a window see the whole text. Nothing is raised.
#
#     Mistral, a window of 16: portions of 512 48, portions of 16 5, portions of 8 2, portions of 1 48 of 48 tokens as
#         without a state
#     OLMo 3, a window of 16: portions of 512 48, portions of 16 5, portions of 8 26, portions of 1 48 of 48 tokens as
#         without a state
#     Gemma 3n, a window of 16: portions of 512 1, portions of 16 2, portions of 8 2, portions of 1 2 of 48 tokens as
#         without a state
#     (a window of 99: 48 of 48 everywhere)
#     keys behind 5 + 6 tokens with a window of 8: none none 5 6 7 8 9 10
# (Random weights, a window of 16, two prompts of 49 tokens, 24 tokens each. The compiled part of the package, which reads
# data, is left out.)
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
from fairseq2.data.tokenizers import VocabularyInfo
from fairseq2.generation.beam_search import BeamSearchSequenceGenerator
from fairseq2.models.gemma3n.config import Gemma3nConfig
from fairseq2.models.gemma3n.factory import create_gemma3n_model
from fairseq2.models.mistral import MistralConfig, create_mistral_model
from fairseq2.models.olmo import OLMOConfig
from fairseq2.models.olmo.factory import create_olmo_model
from fairseq2.models.transformer import LocalAttentionState
from fairseq2.nn import BatchLayout

torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(model_dim=32, max_seq_len=128, vocab_size=60, num_attn_heads=4, num_key_value_heads=2, ffn_inner_dim=64)
words = VocabularyInfo(size=60, unk_idx=None, bos_idx=1, eos_idx=3, pad_idx=0)


def loop(model, prompts):
    for _ in range(24):
        logits = model(prompts, BatchLayout.of(prompts))[:, -1]
        logits[:, [0, 3]] = -1e9
        prompts = torch.cat([prompts, logits.argmax(1, keepdim=True)], 1)
    return prompts[:, -24:]


def generate(model, prompts, portion):
    generator = BeamSearchSequenceGenerator(model, words, beam_size=1, min_gen_len=26, max_gen_len=26,
                                            prefill_chunk_size=portion)
    found = generator(prompts, BatchLayout.of(prompts)).hypotheses
    return torch.stack([row[0].seq[:24] for row in found])


for name, window in (("Mistral", 16), ("OLMo 3", 16), ("Gemma 3n", 16), ("Mistral", 99), ("OLMo 3", 99), ("Gemma 3n", 99)):
    if name == "Mistral":
        model = create_mistral_model(MistralConfig(**sizes, num_layers=4, attn_window_len=window))
    elif name == "OLMo 3":
        model = create_olmo_model(OLMOConfig(**sizes, num_layers=4, sliding_window=window, pad_idx=0, eos_token_id=3))
    else:
        model = create_gemma3n_model(Gemma3nConfig(
            **sizes, num_layers=10, head_dim=8, altup_hidden_dim=64, sliding_window=window, num_kv_shared_layers=5,
            laurel_rank=8, vocab_size_per_layer_input=60, hidden_size_per_layer_input=8))
    torch.manual_seed(0)
    model.eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    prompts = torch.randint(5, 60, (2, 49))
    right = loop(model, prompts)
    same = {portion: int((generate(model, prompts, portion) == right).sum()) for portion in (512, 16, 8, 1)}
    print(f"{name}, a window of {window}:", ", ".join(f"portions of {portion} {some}" for portion, some in same.items()),
          "of 48 tokens as without a state")
    if window == 99:
        assert min(same.values()) == 48, "the behaviour has changed"
    elif name == "Gemma 3n":
        assert max(same.values()) < 40, "the behaviour has changed"
    else:
        assert same[512] == same[1] == 48 and max(same[16], same[8]) < 40, "the behaviour has changed"

torch.use_deterministic_algorithms(True)  # torch marks places that were never written
first, second = torch.arange(11.).reshape(1, 11, 1, 1).split([5, 6], 1)
state = LocalAttentionState(first, first, max_seq_len=32, attn_window_len=8, capacity_increment=None)
state.append(second, second)
kept = state.get()[0].flatten()
print("keys behind 5 + 6 tokens with a window of 8:", *["none" if key != key else int(key) for key in kept.tolist()])
assert kept.isnan().sum() == 2, "the behaviour has changed"
PY
