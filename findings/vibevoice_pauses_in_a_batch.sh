#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): in a batch, VibeVoice feeds zeros into the codec of a voice that pauses.
#
# Expected: a text in a batch gets the audio that it gets alone. The codec and the encoder of meanings are streamed, each step
# goes on from the states of the step before, and each row has states of its own.
# Seen: if one row makes sound at a step and another one does not (it ends its turn or starts the next one), the codec runs
# for all rows, and the other row gets a latent of zeros. Its audio of that step is thrown away, but it stays in the row's
# states. Alone, nothing is run at such a step. So up to the first pause a row is right, and behind it the audio differs,
# and with it what the language model reads from then on. A row without pauses is right, and so are rows that pause
# together. With guidance, the other branch takes such a step too. Nothing warns.
# (models/vibevoice/generation_vibevoice.py: `_decode_audio_latent` and `_sample`.) `use_cache=False` is no way out: then each
# step reads only its last input.
#
#     seed 0, guidance 1.3: a row that pauses: before 0.00 off, behind 2.14; its
#         neighbour 0.00, one that ends early 0.00, two that pause together 0.00; no cache 1.64
#     seed 1, guidance 1.0: a row that pauses: before 0.00 off, behind 2.84; its
#         neighbour 0.00, one that ends early 0.00, two that pause together 0.00; no cache 2.21
# (A small model with random weights, two seeds. The tokens of the turns are fixed by a logits processor, and the noise by a
# scheduler that forgets it. The largest difference of a sample of audio, in units of the standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
from types import SimpleNamespace

import torch
from transformers import (LogitsProcessor, LogitsProcessorList, Qwen2Config, VibeVoiceAcousticTokenizerConfig,
                          VibeVoiceAcousticTokenizerEncoderConfig, VibeVoiceConfig, VibeVoiceDiffusionHeadConfig,
                          VibeVoiceForConditionalGeneration)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
STOP, BEGIN, END, SOUND = 1, 2, 3, 4
PAUSES = [SOUND] * 3 + [END, BEGIN] + [SOUND] * 4 + [END, STOP]
STEADY = [SOUND] * 9 + [END, STOP]
SHORT = [SOUND] * 4 + [END, STOP]


class NoNoise:
    """A scheduler: its first step forgets the noise, its second one takes the head's output."""
    timesteps = None

    def set_timesteps(self, num_inference_steps):
        self.timesteps = torch.tensor([2.0, 1.0])

    def step(self, output, time, sample):
        return SimpleNamespace(prev_sample=0 * output if time == 2 else sample + output)


class Turns(LogitsProcessor):
    def __init__(self, plans, start):
        self.plans, self.start = plans, start

    def __call__(self, tokens, scores):
        scores = torch.full_like(scores, -float("inf"))
        for row, plan in enumerate(self.plans):
            scores[row, plan[min(tokens.shape[1] - self.start, len(plan) - 1)]] = 0
        return scores


def off(found, right):
    return float((found - right).abs().max() / right.std())


for seed in (0, 1):
    torch.manual_seed(seed)
    codec = dict(hidden_size=8, num_filters=4, downsampling_ratios=[2, 2], depths=[1, 1, 1], layer_scale_init_value=0.5)
    text = Qwen2Config(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    head = VibeVoiceDiffusionHeadConfig(hidden_size=32, latent_size=8, num_hidden_layers=1, intermediate_size=64,
                                        frequency_embedding_size=16)
    model = VibeVoiceForConditionalGeneration(VibeVoiceConfig(
        audio_config=VibeVoiceAcousticTokenizerConfig(**codec).to_dict(),
        semantic_model_config=VibeVoiceAcousticTokenizerEncoderConfig(**codec).to_dict(), text_config=text.to_dict(),
        diffusion_head_config=head.to_dict(), pad_token_id=0, eos_token_id=STOP, audio_bos_token_id=BEGIN,
        audio_eos_token_id=END, audio_token_id=SOUND)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.2 / weight[0].numel() ** 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, STOP
    texts = torch.randint(5, 60, (3, 9))
    texts[:, -1] = BEGIN
    plans = PAUSES, STEADY, SHORT

    def speak(*rows, **options):
        tokens = texts[list(rows)]
        turns = LogitsProcessorList([Turns([plans[row] for row in rows], tokens.shape[1])])
        return model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), noise_scheduler=NoNoise(),
                              logits_processor=turns, max_new_tokens=12, do_sample=False, **options)

    for guidance in (1.0, 1.3):
        alone = [speak(row, guidance_scale=guidance)[0] for row in range(3)]
        pauses, steady = speak(0, 1, guidance_scale=guidance)
        twins, short = speak(0, 0, guidance_scale=guidance)[0], speak(1, 2, guidance_scale=guidance)[1]
        first = 3 * 4  # the samples before the pause
        found = off(pauses[..., first:], alone[0][..., first:])
        right = [off(pauses[..., :first], alone[0][..., :first]), off(steady, alone[1]), off(short, alone[2]),
                 off(twins, alone[0])]
        bare = off(speak(1, guidance_scale=guidance, use_cache=False)[0], alone[1])
        print(f"seed {seed}, guidance {guidance}: a row that pauses: before {right[0]:.2f} off, behind {found:.2f}; its "
              f"neighbour {right[1]:.2f}, one that ends early {right[2]:.2f}, two that pause together {right[3]:.2f}; "
              f"no cache {bare:.2f}")
        assert max(right) < 1e-3 and found > 0.3 and bare > 0.3, "the behaviour has changed"
PY
