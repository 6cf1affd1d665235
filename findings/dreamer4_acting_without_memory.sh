#!/usr/bin/env bash
# dreamer4 0.20.2 (torch 2.13.0 on a CPU): while acting, an agent without the time cache sees no past, and `encode_temporal_diff`
# sees no motion.
#
# Expected: interact_with_env(use_time_cache=True) and (use_time_cache=False) differ in speed. The values that are stored while
# acting are those of a pass over the whole episode, and the latents are those of the whole video, as in training.
# Seen: with the cache and the default tokenizer both hold. Without the cache `DynamicsWorldModel.interact_with_env` still hands the
# newest frame alone to the model, although it holds all latents. So the agent acts, and its values and log probabilities are stored,
# as if each frame were the first. A tokenizer with encode_temporal_diff=True adds the difference to the frame before. But the frames
# come one by one, its time cache does not hold the last frame, and a first frame gets zeros. So the agent acts on other latents than
# those that it was trained on. Nothing warns. (dreamer4.py: `interact_with_env`, `SpaceTimeTokenizer.forward`.)
#
#     seed 0: latents while acting, beside those of the video: 0.00 off, with encode_temporal_diff 2.91 off
#         values while acting, beside a pass over the episode / beside a pass over each frame alone:
#             use_time_cache=True 0.00 / 1.19 off; use_time_cache=False 0.82 / 0.00 off
#     seed 1: latents while acting, beside those of the video: 0.00 off, with encode_temporal_diff 2.76 off
#         values while acting, beside a pass over the episode / beside a pass over each frame alone:
#             use_time_cache=True 0.00 / 2.06 off; use_time_cache=False 1.76 / 0.00 off
# (Random weights, an environment that shows six random frames whatever the action is. The largest difference, in units of the
# standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps dreamer4==0.20.2 accelerate==1.15.0 adam-atan2-pytorch==0.4.1 assoc-scan==0.0.6 beartype==0.23.1 \
    discrete-continuous-embed-readout==0.2.12 einops==0.8.2 einx==0.4.3 ema-pytorch==0.8.3 env-ssl-wrapper==0.6.3 \
    frozendict==2.5.1 h-net-dynamic-chunking==0.5.19 hl-gauss-pytorch==0.3.0 huggingface_hub==1.33.0 imageio==2.38.1 \
    loguru==0.7.3 memmap-replay-buffer==0.2.3 opencv-python==5.0.0.93 packaging==26.4 pillow==13.0.0 PoPE-pytorch==0.2.1 \
    psutil==7.2.2 pyyaml==6.0.4 safetensors==0.8.0 torch-einops-utils==0.2.0 tqdm==4.70.1 \
    vector-quantize-pytorch==1.32.0 vit-pytorch==1.26.14 x-mlps-pytorch==0.6.9 x-transformers==2.31.10 httpx==0.28.1 \
    httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 certifi==2026.10.19.post1 idna==3.20 click==8.5.1 filelock==3.32.7 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
from unittest import mock

import torch

for name in ("torchvision", "torchvision.models", "torchvision.transforms"):
    sys.modules[name] = mock.MagicMock()  # only a loss and saving of images need it
from dreamer4 import DynamicsWorldModel, VideoTokenizer

torch.set_num_threads(1)
torch.set_grad_enabled(False)


class Film:
    """Shows frames, whatever the action is."""

    def __init__(self, frames):
        self.frames = frames

    def reset(self, seed=None):
        self.at = 0
        return self.frames[0], {}

    def step(self, action):
        self.at += 1
        return self.frames[self.at], torch.tensor(0.5), torch.tensor(False), torch.tensor(False), {}


def build(seed, **options):
    torch.manual_seed(seed)
    sizes = dict(dim=32, dim_latent=8, num_latent_tokens=4, attn_dim_head=16, attn_heads=2, time_block_every=2)
    tokenizer = VideoTokenizer(patch_size=8, image_height=16, image_width=16, encoder_depth=4, decoder_depth=2, lpips_loss_weight=0.0,
                               **sizes, **options)
    model = DynamicsWorldModel(video_tokenizer=tokenizer, max_steps=4, num_spatial_tokens=4, depth=4, num_discrete_actions=2, **sizes)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.normal_(0, 0.2)
    return model.eval()


def values(model, seen, first, last):
    """Of these steps of an experience, in one pass, which is what learning from it uses."""
    steps = slice(first, last)
    _, (embeds, _) = model(latents=seen.latents[:, steps], rewards=seen.rewards[:, steps], discrete_actions=seen.actions[0][:, steps],
                           signal_levels=model.max_steps - 1, step_sizes=1, latent_is_noised=True, latent_has_view_dim=True,
                           return_pred_only=True, return_intermediates=True)
    return model.value_encoder.bins_to_scalar_value(model.value_head(embeds.agent[..., 0, :]))


def off(a, b):
    return float((a - b).abs().max() / b.std())


for seed in (0, 1):
    film = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    error = {}
    for diff in (False, True):
        model = build(seed, encode_temporal_diff=diff)
        seen = model.interact_with_env(Film(film), max_timesteps=5, num_steps=4)
        error[diff] = off(seen.latents[:, :, 0], model.video_tokenizer.tokenize(seen.video))
    print(f"seed {seed}: latents while acting, beside those of the video: {error[False]:.2f} off, with encode_temporal_diff {error[True]:.2f} off")
    model, found = build(seed), {}
    for use in (True, False):
        seen = model.interact_with_env(Film(film), max_timesteps=5, num_steps=4, use_time_cache=use)
        steps = seen.latents.shape[1]
        alone = torch.cat([values(model, seen, step, step + 1) for step in range(steps)], 1)
        found[use] = off(seen.values, values(model, seen, 0, steps)), off(seen.values, alone)
    print("    values while acting, beside a pass over the episode / beside a pass over each frame alone:",
          "; ".join(f"use_time_cache={use} {whole:.2f} / {alone:.2f} off" for use, (whole, alone) in found.items()))
    assert error[False] < 1e-3 and error[True] > 0.3, "the behaviour has changed"
    assert found[True][0] < 2e-3 and found[False][0] > 0.3 and found[False][1] < 2e-3, "the behaviour has changed"
PY
