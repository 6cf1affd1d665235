#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): with windows, Kyutai Speech to Text hears the first window twice, and never the last
# one.
#
# Expected: `audio_window_size` in the generation config says how many frames `generate` encodes at a time. The codec is
# streamed, with a cache for its transformer and one for its convolutions. So the tokens do not depend on the window.
# Seen: the place of the window is moved on after the sound was cut, and it starts as (0, 0). So the second cut begins at 0
# again, and each later one is a window behind. The codec streams the first window twice, one after the other. The recording is
# transcribed a window late, and its last window is never read. The tokens are exactly those of a recording
# with its first window twice and without its last one. In one window (no `audio_window_size`) all is right. The
# published model has windows of one frame (80 ms). There the repeated frame may be meant, since the original program
# feeds the first frame's codes twice, but larger windows repeat all of their frames. Nothing warns.
# (models/kyutai_speech_to_text/modeling_kyutai_speech_to_text.py: `prepare_inputs_for_generation`.)
#
#     seed 0, windows of 1: tokens as of one window 22%, as of a recording with its first window twice 100%; windows begin at
#         the frames 0 0 1 2 3 4 5 6 7 8 9 10 11 12 13
#     seed 0, windows of 4: tokens as of one window 44%, as of a recording with its first window twice 100%; windows begin at
#         the frames 0 0 4 8
#     seed 0, windows of 8: tokens as of one window 62%, as of a recording with its first window twice 100%; windows begin at
#         the frames 0 0
# (A small model with random weights, four recordings of noise with 16 frames, two seeds, greedy.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import KyutaiSpeechToTextConfig, KyutaiSpeechToTextForConditionalGeneration

torch.set_num_threads(1)
torch.set_grad_enabled(False)
FRAMES = 16
codec = dict(model_type="mimi", hidden_size=16, num_filters=4, codebook_size=32, codebook_dim=8, num_quantizers=4,
             vector_quantization_hidden_dimension=8, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2,
             num_key_value_heads=2, head_dim=8, upsample_groups=16, upsampling_ratios=[4, 3], sampling_rate=240)

for seed in (0, 1):
    torch.manual_seed(seed)
    model = KyutaiSpeechToTextForConditionalGeneration(KyutaiSpeechToTextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, sliding_window=64, num_codebooks=4,
        max_position_embeddings=64, codebook_vocab_size=33, audio_bos_token_id=32, audio_pad_token_id=64 + 4 * 33,
        bos_token_id=1, pad_token_id=3, codec_config=codec)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.2 / weight[0].numel() ** 0.5)
    for name, book in model.named_buffers():
        if name.endswith("embed_sum"):
            book.normal_()
    model.codec_model.generation_config.use_cache = True  # as in the published model
    frame = model.config.frame_size
    sound = torch.randn(4, 1, FRAMES * frame)
    encode, parts = model.codec_model.encode, []

    # only to see where the windows begin
    def watched(values, **options):
        parts.append(next(start for start in range(0, sound.shape[-1], frame)
                          if torch.equal(values[..., :frame], heard[..., start:start + frame])) // frame)
        return encode(values, **options)

    model.codec_model.encode = watched

    def tokens(values, window):
        global heard
        heard = values
        parts.clear()
        model.generation_config.audio_window_size = window
        return model.generate(input_values=values, do_sample=False)

    def equal(one, other):
        return f"{100 * (one == other).float().mean():.0f}%"

    whole = tokens(sound, FRAMES)
    for window in (1, 4, 8):
        found = tokens(sound, window)
        begins = " ".join(map(str, parts))
        twice = torch.cat([sound[..., :window * frame], sound[..., :-window * frame]], -1)
        expected = tokens(twice, FRAMES)
        print(f"seed {seed}, windows of {window}: tokens as of one window {equal(found, whole)}, as of a recording with its "
              f"first window twice {equal(found, expected)}; windows begin at the frames {begins}")
        assert torch.equal(found, expected) and (found == whole).float().mean() < 0.8, "the behaviour has changed"
PY
