#!/usr/bin/env bash
# improving-transformers-world-model 0.0.59 (torch 2.13.0 on a CPU): with a cache, a frame alone is read without its last action.
#
# Expected: frames read one by one, each with its action, its reward and the cache, give the embeddings of one pass over all. The
# package's own agent reads them so when it acts in an environment (with `remove_cache_len_from_time=False`).
# Seen: from the second frame on the embeddings differ, and they are the same for all actions, so the agent's actor and critic
# see a world in which actions have no effect. Nothing is raised. Calls that get all frames so far, with the cache, are
# right.
# Cause: world_model.py, `WorldModel.forward`, shifts the actions by one frame and puts a start token in front. Of a single frame
# only the start token stays, and the cache does not hold the last action. agent.py calls it with `actions[:, -1:]`.
#
#     seed 0, frames so far, with the cache:        0.00 0.00 0.00 0.00 0.00 0.00
#     seed 0, frames alone, with the cache:         0.00 1.49 0.50 0.67 1.28 1.36
#     seed 0, with other actions, in one pass:      0.00 1.62 0.80 0.83 1.17 1.43
#     seed 0, with other actions, frames alone:     0.00 0.00 0.00 0.00 0.00 0.00
# (Two layers with random weights, 6 frames, two seeds. The largest difference of each frame's embedding, in units of their
# standard deviation: the first two lines from one pass, the others between two sets of actions.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps improving-transformers-world-model==0.0.59 accelerate==1.15.0 \
    adam-atan2-pytorch==0.4.1 assoc-scan==0.0.6 beartype==0.23.1 discrete-continuous-embed-readout==0.2.12 einops==0.8.2 einx==0.4.3 \
    ema-pytorch==0.8.3 evolutionary-policy-optimization==0.5.0 frozendict==2.5.1 hl-gauss-pytorch==0.3.0 huggingface_hub==2.4.0 \
    hyper-connections==0.4.11 jaxtyping==0.3.11 loguru==0.7.3 packaging==26.4 psutil==7.2.2 pyyaml==6.0.4 rotary-embedding-torch==0.9.1 \
    safetensors==0.8.0 torch-einops-utils==0.2.0 tqdm==4.70.1 vector-quantize-pytorch==1.32.0 wadler-lindig==0.1.8 \
    x-mlps-pytorch==0.6.9 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from improving_transformers_world_model import WorldModel

torch.set_num_threads(1)
torch.set_grad_enabled(False)
FRAMES = 6

for seed in (0, 1):
    torch.manual_seed(seed)
    model = WorldModel(image_size=8, patch_size=4, channels=3, num_actions=5, reward_num_bins=8,
                       tokenizer={"dim": 48, "distance_threshold": 0.5, "max_codes": 50},
                       transformer={"dim": 32, "depth": 2, "block_size": 4, "heads": 2, "dim_head": 16}).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
    frames, rewards = torch.randint(50, (1, FRAMES, 2, 2)), torch.rand(1, FRAMES)
    actions = torch.randint(5, (1, FRAMES, 1))
    options = {"return_embed": True, "return_loss": False}
    right = model(frames, actions=actions, rewards=rewards, **options)[0]
    other = model(frames, actions=(actions + 1) % 5, rewards=rewards, **options)[0]

    def read(actions: torch.Tensor, alone: bool) -> torch.Tensor:
        cache, parts = None, []
        for last in range(FRAMES):
            first = last if alone else 0
            # alone, a frame comes with the action that led to it, as in the agent
            taken = actions[:, max(last - 1, 0):max(last, 1)] if alone else actions[:, :last + 1]
            part, cache = model(frames[:, first:last + 1], actions=taken, rewards=rewards[:, first:last + 1], cache=cache,
                                remove_cache_len_from_time=not alone, return_cache=True, **options)
            parts.append(part[0, -1])
        return torch.stack(parts)

    def compare(words: str, one: torch.Tensor, two: torch.Tensor) -> list[float]:
        off = ((one - two).abs().amax(1) / right.std()).tolist()
        print(f"seed {seed}, {words + ':':37}", *(f"{step:.2f}" for step in off))
        return off

    growing = compare("frames so far, with the cache", read(actions, False), right)
    wrong = compare("frames alone, with the cache", read(actions, True), right)
    seen = compare("with other actions, in one pass", other, right)
    blind = compare("with other actions, frames alone", read((actions + 1) % 5, True), read(actions, True))
    assert max(growing) < 1e-3 and min(seen[1:]) > 0.1, "the behaviour has changed"
    assert wrong[0] < 1e-3 and min(wrong[1:]) > 0.1 and max(blind) == 0, "the behaviour has changed"
PY
