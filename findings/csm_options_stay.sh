#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): CSM's options for its depth decoder stay for later calls, and without a cache it
# forgets the text.
#
# Expected: options of `generate` hold for one call, also those that begin with `depth_decoder_`. And greedy frames are equal
# with and without a cache.
# Seen: the options are written into the generation config of the depth decoder and stay there. After one greedy call, each
# later call is greedy in 3 of 4 codebooks (31 of 32 in the published model), though it asks for nothing. The main options do
# not stay. With `use_cache=False`, the first frame replaces the text as the input, so from the second frame on the model has
# only its own frames. The depth decoder without a cache loses the backbone's state after its first step. Nothing warns.
# (models/csm/generation_csm.py: `_prepare_generation_config` and `_sample`; modeling_csm.py:
# `CsmDepthDecoderForCausalLM.prepare_inputs_for_generation`.)
#
#     seed 0: frames equal to the first call: again 100%, after a call with depth_decoder_do_sample=False 0%,
#         and 100% are as in that one
#     greedy, frames equal without a cache: the first 100%, the others 1%
#     greedy, the first frame without a cache in the depth decoder: 30% equal
# (A small model with random weights, 20 texts, frames of 4 codes, two seeds.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import CsmConfig, CsmForConditionalGeneration

torch.set_num_threads(1)
torch.set_grad_enabled(False)
BOOKS, TEXTS, FRAMES = 4, 20, 8
codec = dict(model_type="mimi", hidden_size=16, num_filters=4, codebook_size=32, codebook_dim=8, num_quantizers=BOOKS,
             vector_quantization_hidden_dimension=8, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
             num_key_value_heads=2, head_dim=8, upsample_groups=16)
depth = dict(num_codebooks=BOOKS, backbone_hidden_size=32, vocab_size=35, hidden_size=16, intermediate_size=32,
             num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)

for seed in (0, 1):
    torch.manual_seed(seed)
    model = CsmForConditionalGeneration(CsmConfig(
        num_codebooks=BOOKS, vocab_size=35, text_vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, codebook_pad_token_id=34,
        codebook_eos_token_id=33, bos_token_id=1, audio_token_id=58, audio_eos_token_id=59, depth_decoder_config=depth,
        codec_config=codec)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    model.generation_config.do_sample = model.depth_decoder.generation_config.do_sample = True  # as in the published model
    texts = torch.randint(2, 58, (TEXTS, 10))

    def speak(**options):
        torch.manual_seed(7)
        return model.generate(input_ids=texts, attention_mask=torch.ones_like(texts), max_new_tokens=FRAMES, **options)

    def equal(one, other):
        return f"{100 * (one == other).all(-1).float().mean():.0f}%"

    first, again = speak(), speak()
    greedy = speak(depth_decoder_do_sample=False)
    later = speak()
    print(f"seed {seed}: frames equal to the first call: again {equal(again, first)}, after a call with "
          f"depth_decoder_do_sample=False {equal(later, first)}, and {equal(later, greedy)} are as in that one")
    assert torch.equal(first, again) and torch.equal(later, greedy) and not torch.equal(later, first), "the behaviour has changed"

    kept, bare = speak(do_sample=False), speak(do_sample=False, use_cache=False)
    same = (kept == bare).all(-1).float().mean(0)
    print(f"    greedy, frames equal without a cache: the first {100 * same[0]:.0f}%, the others {100 * same[1:].mean():.0f}%")
    assert same[0] == 1 and same[1:].mean() < 0.3, "the behaviour has changed"

    parts = speak(do_sample=False, depth_decoder_do_sample=False, depth_decoder_use_cache=False)
    whole = speak(do_sample=False, depth_decoder_use_cache=True)
    print(f"    greedy, the first frame without a cache in the depth decoder: {equal(parts[:, 0], whole[:, 0])} equal")
    assert (parts[:, 0] == whole[:, 0]).all(-1).float().mean() < 0.5, "the behaviour has changed"
PY
