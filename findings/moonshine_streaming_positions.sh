#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): Moonshine Streaming's decoder writes its positions into the encoder's states at each
# step, and the encoder has no windows without a mask.
#
# Expected: tokens are equal with and without a cache. The output of the encoder can be kept and given to several calls
# (`encoder_outputs`). A mask of ones changes nothing. In a batch, padding in a mask changes nothing for a row.
# Seen: three faults. First, the decoder adds a learned position to each state of the encoder, in place, at each call. With a
# cache only the first step reads these states, so that is right. Without a cache, the tenth step reads states with ten
# positions. Kept encoder outputs change with each call. Second, the encoder makes the masks of its windows only if it was
# given a mask. Without one, each frame attends to the whole recording. Third, a frame behind the end counts as sound if one
# of the frames that its convolutions read does. So a shorter row in a batch has three frames more than alone. Nothing warns.
# (models/moonshine_streaming/modeling_moonshine_streaming.py: `MoonshineStreamingDecoder.forward`,
# `MoonshineStreamingEncoder.forward`, `MoonshineStreamingCausalConv1d.forward`.)
#
#     seed 0: of 12 tokens, equal without a cache: 2.8; kept encoder outputs, calls 2 to 4: 0.97 2.09 2.92 off;
#         encoder without a mask of ones: 3.66 off; frames of a shorter row: alone 17, in a batch 20, 0.36 off
# (A small model with random weights, four recordings of noise with 30 frames, windows of 6 frames, three seeds. Differences
# are the largest ones, in units of the standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import (MoonshineStreamingConfig, MoonshineStreamingEncoderConfig,
                          MoonshineStreamingForConditionalGeneration)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
FRAME, STEPS = 4 * 80, 12  # samples in a frame of the encoder


def off(found, right):
    return float((found - right).abs().max() / right.std())


for seed in (0, 1, 2):
    torch.manual_seed(seed)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                 head_dim=8)
    encoder = MoonshineStreamingEncoderConfig(**small, sliding_windows=[[6, 2], [6, 0]])
    model = MoonshineStreamingForConditionalGeneration(MoonshineStreamingConfig(
        **small, encoder_config=encoder, vocab_size=60, decoder_start_token_id=1, bos_token_id=1, eos_token_id=None,
        pad_token_id=0)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    sound = torch.randn(4, 30 * FRAME)
    ones = torch.ones_like(sound, dtype=torch.long)

    def tokens(**options):
        return model.generate(input_values=sound, attention_mask=ones, max_new_tokens=STEPS, do_sample=False, **options)

    same = STEPS * float((tokens() == tokens(use_cache=False))[:, 1:].float().mean())
    kept = model.model.encoder(sound, attention_mask=ones)
    words = torch.randint(3, 60, (4, 6))
    logits = [model(encoder_outputs=kept, decoder_input_ids=words).logits for _ in range(4)]
    again = [off(later, logits[0]) for later in logits[1:]]
    print(f"seed {seed}: of {STEPS} tokens, equal without a cache: {same:.1f}; kept encoder outputs, calls 2 to 4:",
          *(f"{number:.2f}" for number in again), "off;")

    masked, bare = (model.model.encoder(sound, attention_mask=mask).last_hidden_state for mask in (ones, None))
    part = ones.clone()
    part[1, 17 * FRAME:] = 0
    batch, alone = model.model.encoder(sound * part, attention_mask=part), model.model.encoder(
        sound[1:2, :17 * FRAME], attention_mask=ones[1:2, :17 * FRAME])
    counts = [int(states.attention_mask[row].sum()) for states, row in ((alone, 0), (batch, 1))]
    last = off(batch.last_hidden_state[1, :17], alone.last_hidden_state[0])
    print(f"    encoder without a mask of ones: {off(bare, masked):.2f} off; frames of a shorter row: alone {counts[0]}, "
          f"in a batch {counts[1]}, {last:.2f} off")
    assert same < 6 and min(again) > 0.1 and off(bare, masked) > 0.5, "the behaviour has changed"
    assert counts == [17, 20] and last > 0.02, "the behaviour has changed"
PY
