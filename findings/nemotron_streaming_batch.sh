#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): Nemotron ASR Streaming loses and repeats words if several recordings are streamed
# together, and a shorter recording in a batch gets words from its padding.
#
# Expected: `generate` takes a generator of chunks. A chunk may have several rows: the code waits until all rows have read
# their frames before it takes the next chunk. So each row should get the tokens that it gets alone. The same holds for
# whole recordings in a batch, with a mask. Alone, the streamed words are those of the whole recording.
# Seen: a row that has read its frames does not wait. Its pointer moves on beyond them, it writes words about the last frame
# again, and when the next chunk comes it skips the frames that the pointer has passed. Only the slowest row is right. With
# whole recordings, the pointer of a shorter row moves on into the padding, and the words from there are added to its text.
# The stopping criterion knows that a row is at its end, but tokens behind the end are replaced by padding only
# if there is an `eos_token_id`, and these models have none. Nothing warns. Parakeet's transducers (RNN-T and TDT) have the
# second fault too. With trained weights, silence often gives blanks, which hides it.
# (models/nemotron_asr_streaming/generation_nemotron_asr_streaming.py: `_update_model_kwargs_for_generation`;
# models/parakeet/generation_parakeet.py: the same function and `EncoderExhaustedCriteria`.)
#
#     seed 1: as the whole recording: streamed alone 4 of 4, streamed together 1; words: 7 11 8 35 and together 0 0 3 35
#         whole recordings of four lengths: words alone 7 11 8 24 and in a batch 7 11 11 24
#     seed 2: as the whole recording: streamed alone 4 of 4, streamed together 1; words: 34 23 41 44 and together 19 7 37 44
#         whole recordings of four lengths: words alone 34 20 30 19 and in a batch 34 32 41 42
# (A small model with random weights, four recordings of noise in 12 chunks, three seeds.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import NemotronAsrStreamingConfig, NemotronAsrStreamingEncoderConfig, NemotronAsrStreamingForRNNT

torch.set_num_threads(1)
torch.set_grad_enabled(False)
BLANK, PAD, AHEAD, CHUNKS, ROWS = 32, 0, 1, 12, 4
FIRST, NEXT = 1 + 8 * AHEAD, 8 * (AHEAD + 1)  # the lengths that the model demands
FRAMES = FIRST + NEXT * (CHUNKS - 1)


def words(tokens):
    return [token for token in tokens.tolist() if token not in (BLANK, PAD)]


def stream(sound):
    yield sound[:, :FIRST]
    for start in range(FIRST, FRAMES, NEXT):
        yield sound[:, start:start + NEXT]


extra = 0
for seed in (0, 1, 2):
    torch.manual_seed(seed)
    encoder = NemotronAsrStreamingEncoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_kernel_size=5,
        subsampling_conv_channels=8, num_mel_bins=16, sliding_window=9, default_num_lookahead_tokens=AHEAD, dropout=0.0,
        layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0)
    model = NemotronAsrStreamingForRNNT(NemotronAsrStreamingConfig(
        vocab_size=BLANK + 1, decoder_hidden_size=32, num_decoder_layers=1, max_symbols_per_step=3, pad_token_id=PAD,
        blank_token_id=BLANK, encoder_config=encoder.to_dict())).eval()
    model.generation_config.decoder_start_token_id = BLANK
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    sound = 2 * torch.randn(ROWS, FRAMES, 16)
    # random weights: let the frames differ, and let blanks win now and then
    frames = model.get_audio_features(sound, num_lookahead_tokens=AHEAD).pooler_output.flatten(0, 1)
    model.encoder_projector.bias.sub_(frames.mean(0))
    for weight in model.encoder_projector.parameters():
        weight.div_(frames.std(0).mean())
    model.joint.head.weight[BLANK].mul_(1.5)
    model.joint.head.bias[BLANK] += 2

    def read(features, **options):
        tokens = model.generate(input_features=features, num_lookahead_tokens=AHEAD, **options).sequences
        return [words(row) for row in tokens]

    whole = [read(row[None])[0] for row in sound]
    streamed = [read(stream(row[None]))[0] for row in sound]
    together = read(stream(sound))
    same = [sum(a == b for a, b in zip(whole, other)) for other in (streamed, together)]
    print(f"seed {seed}: as the whole recording: streamed alone {same[0]} of {ROWS}, streamed together {same[1]}; words:",
          *map(len, whole), "and together", *map(len, together))

    lengths = [FRAMES, FRAMES - 30, FRAMES - 70, FRAMES - 110]
    mask = torch.arange(FRAMES)[None] < torch.tensor(lengths)[:, None]
    batch = read(sound * mask[..., None], attention_mask=mask)
    alone = [read(sound[row:row + 1, :length], attention_mask=mask[row:row + 1, :length])[0]
             for row, length in enumerate(lengths)]
    print("    whole recordings of four lengths: words alone", *map(len, alone), "and in a batch", *map(len, batch))
    assert same[0] == ROWS and same[1] < ROWS, "the behaviour has changed"
    assert all(one == row[:len(one)] for one, row in zip(alone, batch)), "the behaviour has changed"
    extra += sum(map(len, batch)) - sum(map(len, alone))
assert extra > 20, "the behaviour has changed"
PY
