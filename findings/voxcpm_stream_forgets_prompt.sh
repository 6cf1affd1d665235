#!/usr/bin/env bash
# voxcpm 2.0.3 (torch 2.13.0 on a CPU): with a prompt's sound, a stream of VoxCPM2 decodes its first patches without that
# sound.
#
# Expected: `generate_with_prompt_cache_streaming` gives the sound of `generate_with_prompt_cache` in pieces, for the same
# seed. Without a prompt it does. The features in its results are said to be those up to the current step.
# Seen: to continue a prompt, the plain call decodes the prompt's last patches in front of the new ones, and cuts their
# sound off. A comment says that this context is there for smooth decoding in streaming mode. But a stream decodes only the
# new patches, with a state that starts empty. So its sound begins as if nothing had been before. It is off for as long as
# the decoder remembers. The features of a stream begin with the prompt's last ones, and soon only the last five patches are
# kept. So a prompt cache that is merged from them (merge_prompt_cache) misses what was spoken before. Nothing is raised.
# (voxcpm/model/voxcpm2.py: `_inference` and `_generate_with_prompt_cache`. Authors of another program for this model note
# that such a decoder must be primed with the prompt.)
#
#     seed 0: without a prompt 0.00 off; with one 14.92 off in the patches 0 1 2 3 4 5 6 7; of 8 patches of features the stream
#         returned 5
#     seed 1: without a prompt 0.00 off; with one 2.25 off in the patches 0 1 2 3 4 5 6; of 8 patches of features the stream
#         returned 5
# (A small model with random weights, sounds of eight patches, two seeds. The largest difference of a sound, in units of its
# standard deviation. Patches that are more than 0.02 off are listed.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 pydantic==2.14.4 einops==0.8.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps voxcpm==2.0.3 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import os
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

os.environ["TQDM_DISABLE"] = "1"
from tokenizers import Tokenizer, models
from transformers import LlamaTokenizerFast

for name in ("torchaudio", "librosa"):  # not needed here: no sound is read
    sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))
import torch
from voxcpm.model.voxcpm2 import VoxCPM2Model, VoxCPMConfig
from voxcpm.modules.audiovae import AudioVAEConfigV2, AudioVAEV2

torch.set_num_threads(1)
torch.set_grad_enabled(False)
PATCHES, ONES = 8, [1.0] * 8

def build(seed):
    torch.manual_seed(seed)
    small = dict(hidden_dim=64, ffn_dim=96, num_heads=4, num_layers=1)
    model = VoxCPM2Model(VoxCPMConfig(
        lm_config=dict(bos_token_id=1, eos_token_id=2, hidden_size=64, intermediate_size=96, max_position_embeddings=512,
                       num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=257,
                       rope_scaling=dict(type="longrope", long_factor=ONES, short_factor=ONES,
                                         original_max_position_embeddings=512),
                       use_mup=False, scale_emb=1.0, dim_model_base=64, scale_depth=1.0, rope_theta=10000.0),
        patch_size=2, feat_dim=8, residual_lm_num_layers=1, scalar_quantization_latent_dim=16, encoder_config=small,
        dit_config=dict(small, cfm_config={}), max_length=256, device="cpu", dtype="float32"),
        LlamaTokenizerFast(tokenizer_object=Tokenizer(models.BPE(
            vocab={**{chr(i): i for i in range(256)}, "<unk>": 256}, merges=[], unk_token="<unk>"))),
        AudioVAEV2(AudioVAEConfigV2(encoder_dim=8, encoder_rates=[2, 4], latent_dim=8, decoder_dim=32, decoder_rates=[4, 3, 2],
                                    depthwise=False)), device="cpu").eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.endswith(("weight_g", "alpha")):
            weight.normal_(0, 1 / weight[0].numel() ** 0.5)
    model.stop_head.weight.zero_()  # so it never stops by itself
    return model

def off(one, other):
    errors = (one - other).abs()[0] / other.std()
    return float(errors.max()), " ".join(str(i) for i, e in enumerate(errors.view(PATCHES, -1).amax(1)) if e > 0.02)

for seed in (0, 1):
    model = build(seed)
    prompt = dict(mode="continuation", prompt_text="good ", audio_feat=torch.randn(6, 2, 8))  # as of build_prompt_cache

    def both(cache):
        options = dict(prompt_cache=cache, max_len=PATCHES, inference_timesteps=3)
        torch.manual_seed(7)
        whole, _, features = model.generate_with_prompt_cache("morning", **options)
        torch.manual_seed(7)
        pieces = list(model.generate_with_prompt_cache_streaming("morning", **options))
        return whole, torch.cat([sound for sound, _, _ in pieces], -1), features, torch.cat(pieces[-1][2], 1)[0]

    whole, pieces, _, _ = both(None)
    alone, _ = off(pieces, whole)
    whole, pieces, features, streamed = both(prompt)
    error, patches = off(pieces, whole)
    spoken = sum(any(torch.allclose(patch, known, atol=1e-4) for patch in streamed) for known in features)
    print(f"seed {seed}: without a prompt {alone:.2f} off; with one {error:.2f} off in the patches {patches}; of {len(features)} "
          f"patches of features the stream returned {spoken}")
    assert alone < 1e-3 and error > 0.5 and len(features) == PATCHES and spoken == 5, "the behaviour has changed"
PY
