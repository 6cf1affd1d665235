#!/usr/bin/env bash
# tortoise-tts 3.0.0, transformers 4.31.0 (torch 2.13.0 on a CPU): with its cache, each speech code gets the position of the
# next one.
#
# Expected: `kv_cache=True` only saves time. So greedy codes with the cache equal those without it.
# Seen: they part after a few codes. The start token has position 0. A single step then takes the length of the attention mask
# less the length of the prefix, and that is 2 for the first code. So position 1 is never used, and all codes stand one place
# too high. Training, the pass without a cache and the second pass, which makes the states for the sound, use the right places.
# So that second pass would choose few of the codes that were found with the cache. With positions lowered by one, the cached
# codes equal the others. Nothing is raised. (tortoise/models/autoregressive.py: `forward` of GPT2InferenceModel. Programs that
# copied this code note that position 1 is skipped. A later copy in another package has it right.)
#
#     seed 0: equal codes 1 of 30, lowered by one 30 of 30; the second pass agrees with 30 of 30 codes without and with 6 of 30
#         with the cache
#     seed 2: equal codes 3 of 30, lowered by one 30 of 30; the second pass agrees with 30 of 30 codes without and with 9 of 30
#         with the cache
# (A small model with random weights, greedy, three seeds. The parts of the package for sound are not loaded.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==1.26.4 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==4.31.0 einops==0.8.2 scipy==1.15.3 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps tortoise-tts==3.0.0 rotary_embedding_torch==0.9.1 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

sys.modules["torchaudio"] = mock.MagicMock(__spec__=ModuleSpec("torchaudio", None))  # not needed here: no sound is read
import torch
from tortoise.models.autoregressive import UnifiedVoice

torch.set_num_threads(1)
torch.set_grad_enabled(False)

def equal(one, other):
    return sum(a == b for a, b in zip(one, other))

for seed in (0, 2, 4):
    torch.manual_seed(seed)
    model = UnifiedVoice(max_mel_tokens=60, max_text_tokens=40, max_conditioning_inputs=2, layers=2, model_dim=64, heads=4,
                         number_text_tokens=255, start_text_token=255, number_mel_codes=40, start_mel_token=38,
                         stop_mel_token=39, checkpointing=False, train_solo_embeddings=False).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    for table in (model.mel_embedding, model.text_embedding, model.mel_pos_embedding.emb, model.text_pos_embedding.emb):
        table.weight.normal_()
    voice, text = torch.randn(1, 64), torch.randint(1, 255, (1, 9))

    def codes(kv_cache, lower=0):
        model.post_init_gpt2_config(kv_cache=kv_cache)
        if lower:  # only to show the cause
            table = model.mel_pos_embedding
            with mock.patch.object(table, "get_fixed_embedding",
                                   lambda place, device: table.emb.weight[place - lower][None, None]):
                return model.inference_speech(voice, text, max_generate_length=30, do_sample=False)[0].tolist()
        return model.inference_speech(voice, text, max_generate_length=30, do_sample=False)[0].tolist()

    def agreed(found):
        latents = model(voice, text, torch.tensor([text.shape[1]]), torch.tensor([found]), torch.tensor([len(found) * 1024]),
                        return_latent=True, clip_inputs=False)
        return equal(model.mel_head(latents).argmax(-1)[0].tolist(), found)

    right, cached, lowered = codes(False), codes(True), codes(True, 1)
    n = len(right)
    print(f"seed {seed}: equal codes {equal(right, cached)} of {n}, lowered by one {equal(right, lowered)} of {n}; the second "
          f"pass agrees with {agreed(right)} of {n} codes without and with {agreed(cached)} of {len(cached)} with the cache")
    assert lowered == right and agreed(right) == n and equal(right, cached) < n // 2, "the behaviour has changed"
    assert agreed(cached) < len(cached) // 2, "the behaviour has changed"
PY
