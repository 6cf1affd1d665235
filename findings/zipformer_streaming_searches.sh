#!/usr/bin/env bash
# zipformer 0.1.3 (torch 2.13.0 on a CPU): two streaming searches give other texts than the searches over the whole.
#
# Expected: greedy CTC in portions gives the tokens of greedy CTC over the whole, since it needs no more than the last frame.
# Greedy and beam search of a transducer give the same in portions too: their state is the text so far.
# Seen: CTC loses tokens. A portion takes the last token of the text as its previous frame, also if the last frame was a
# blank. So a token that comes twice, with blanks in between and a border there, is written once: "see" becomes "se". The
# shorter the portions, the more is lost. In one portion all is right.
# The transducer starts with another context. The searches over the whole start with "no token" and a blank, as in training,
# the streams with two blanks, whatever the portions. The embedding of a blank is not zero, so the first tokens may differ,
# and then all others. With the start of the searches over the whole all texts are equal. Nothing is raised.
# (zipformer/decode/search.py: streaming_ctc_greedy_search; zipformer/decode/stream.py: `__init__` of DecodeStream. The second
# fault was reported and mended in the older code base from which this package was made.)
#
#     seed 0, CTC: 584 tokens; lost in portions of 40 0, of 16 2, of 8 4, of 4 12; texts changed 0, 2, 4, 11 of 50
#     seed 0, transducer: greedy texts changed 5 of 50, by beam search 19; with the other start 0
#     seed 1, CTC: 664 tokens; lost in portions of 40 0, of 16 2, of 8 4, of 4 12; texts changed 0, 2, 4, 10 of 50
#     seed 1, transducer: greedy texts changed 12 of 50, by beam search 15; with the other start 0
# (Random frames of 50 texts and small models with random weights, two seeds. With real sounds fewer borders meet such a pause.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile kaldialign==0.12.0 kaldifst==1.8.3 packaging==26.4 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps zipformer==0.1.3 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
from unittest import mock

for name in ("atdataset", "tensorboard", "torch.utils.tensorboard", "torchaudio"):  # not needed here: no sound, no training
    sys.modules[name] = mock.MagicMock()
import torch
from zipformer.decode.search import (ctc_greedy_search, greedy_search, modified_beam_search, streaming_ctc_greedy_search,
                                     streaming_greedy_search, streaming_modified_beam_search)
from zipformer.decode.stream import DecodeStream
from zipformer.modules.model import AsrModel
from zipformer.utils import AttributeDict

torch.set_num_threads(1)
torch.set_grad_enabled(False)
N, FRAMES = 50, 40

def streams(method, start=None):
    found = [DecodeStream(AttributeDict(blank_id=0, context_size=2, decoding_method=method), str(i), [], pad_length=0)
             for i in range(N)]
    for stream in found if start is not None else []:
        stream.hyp = list(start)
    return found

def changed(one, other):
    return sum(a != b for a, b in zip(one, other))

for seed in (0, 1):
    torch.manual_seed(seed)
    model = AsrModel(downsampling_factor="1,2", encoder_dim="64,96", num_encoder_layers="1,1", encoder_unmasked_dim="48,64",
                     num_heads="4", query_head_dim="16", pos_head_dim="4", value_head_dim="12", feedforward_dim="96,96",
                     cnn_module_kernel="15", pos_dim=24, use_ctc=True, vocab_size=12, decoder_dim=32, joiner_dim=32,
                     causal=True, chunk_size="16", left_context_frames="64").eval()
    model.device = torch.device("cpu")
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1 / weight[0].numel() ** 0.5)
    frames, lengths = torch.randn(N, FRAMES, 96), torch.full((N,), FRAMES)

    model.ctc_output[1].bias[0] += 2  # more blanks
    right = ctc_greedy_search(model.ctc_output(frames), lengths)
    lost, texts = [], []
    for length in (40, 16, 8, 4):
        found = streams("greedy_search", [])  # as the package itself does for CTC
        for portion in frames.split(length, 1):
            streaming_ctc_greedy_search(model, portion, torch.full((N,), portion.shape[1]), found)
        lost.append(sum(map(len, right)) - sum(len(stream.hyp) for stream in found))
        texts.append(changed([stream.hyp for stream in found], right))
    print(f"seed {seed}, CTC: {sum(map(len, right)):,} tokens; lost in portions of 40 {lost[0]}, of 16 {lost[1]}, of 8 {lost[2]}, "
          f"of 4 {lost[3]}; texts changed {texts[0]}, {texts[1]}, {texts[2]}, {texts[3]} of {N}")
    assert lost[0] == texts[0] == 0 < lost[1] < lost[2] < lost[3], "the behaviour has changed"

    frames = 0.3 * frames
    right, beams = greedy_search(model, frames, lengths), modified_beam_search(model, frames, lengths, beam=4)
    greedy, other, beam = streams("greedy_search"), streams("greedy_search", []), streams("modified_beam_search")
    for portion in model.joiner.encoder_proj(frames).split(8, 1):
        streaming_greedy_search(model, portion, greedy)
        streaming_greedy_search(model, portion, other)  # an empty text starts as in the searches over the whole
        streaming_modified_beam_search(model, portion, beam, num_active_paths=4)
    wrong = [changed([stream.decoding_result() for stream in found], known)
             for found, known in ((greedy, right), (beam, beams), (other, right))]
    print(f"seed {seed}, transducer: greedy texts changed {wrong[0]} of {N}, by beam search {wrong[1]}; with the other start "
          f"{wrong[2]}")
    assert min(wrong[:2]) > 0 == wrong[2], "the behaviour has changed"
PY
