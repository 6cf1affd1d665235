#!/usr/bin/env bash
# speechbrain 1.1.2 (torch 2.13.0 on a CPU): with a window for CTC, a sentence's text depends on the other sentences of its
# batch.
#
# Expected: a beam search with CTC gives a sentence the same text alone and in a batch. With CTC over all frames it does.
# Seen: `ctc_window_size` scores only the frames around the peak of attention. But one window is made for the whole batch: from
# the earliest to the latest peak of all sentences and all hypotheses. Beside other sentences the window is wider or lies
# elsewhere, and the scores and texts change, though all sentences have the same length. With one hypothesis as with four.
# Nothing is raised. (decoders/ctc.py: `CTCPrefixScore.forward_step`.)
#
#     beam 1: texts as alone: all frames 8 of 8, a window of 4 frames 0 of 8, with it beside copies of itself 8 of 8
#         alone    11 14 7 15 12 12 12 12
#         in batch 6 14 7 15 8 14 7 8
# (A GRU decoder with attention and random weights, eight sentences of 20 frames. The first sentence is shown.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile hyperpyyaml==1.2.3 scipy==1.17.1 sentencepiece==0.2.3 huggingface-hub==2.4.0 \
    joblib==1.6.0 tqdm==4.70.1 requests==2.34.2 packaging==26.4 soundfile==0.14.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps speechbrain==1.1.2 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import sys
from unittest import mock

import torch

sys.modules["torchaudio"] = mock.MagicMock(__version__="2.11.0")  # not needed here: no sound is read
from speechbrain.decoders.scorer import CTCScorer, ScorerBuilder
from speechbrain.decoders.seq2seq import S2SRNNBeamSearcher
from speechbrain.nnet.embedding import Embedding
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.RNN import AttentionalRNNDecoder

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
many, frames = 20, 20
decoder = AttentionalRNNDecoder(rnn_type="gru", attn_type="location", hidden_size=24, attn_dim=16, num_layers=1, enc_dim=32,
                                input_size=16, kernel_size=5, channels=4, scaling=1.0)
embedding = Embedding(num_embeddings=many, embedding_dim=16)
output, for_ctc = Linear(input_size=24, n_neurons=many), Linear(input_size=32, n_neurons=many)
for module in (decoder, embedding, output, for_ctc):
    module.eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
encoded = torch.randn(8, frames, 32)

for beam in (1, 4):
    same = []
    for window in (0, 4):
        scorer = ScorerBuilder(full_scorers=[CTCScorer(for_ctc, blank_index=0, eos_index=2, ctc_window_size=window)],
                               weights=dict(ctc=0.4))
        search = S2SRNNBeamSearcher(embedding, decoder, output, scorer=scorer, beam_size=beam, bos_index=1, eos_index=2,
                                    min_decode_ratio=0.0, max_decode_ratio=0.6, using_eos_threshold=False)
        together = [list(map(int, text)) for text in search(encoded, torch.ones(8))[0]]
        alone = [list(map(int, search(encoded[row:row + 1], torch.ones(1))[0][0])) for row in range(8)]
        copies = [list(map(int, search(encoded[row:row + 1].repeat(8, 1, 1), torch.ones(8))[0][0])) for row in range(8)]
        same.append([sum(a == b for a, b in zip(alone, some)) for some in (together, copies)])
    print(f"beam {beam}: texts as alone: all frames {same[0][0]} of 8, a window of 4 frames {same[1][0]} of 8, "
          f"with it beside copies of itself {same[1][1]} of 8")
    print("    alone   ", *alone[0][:8])
    print("    in batch", *together[0][:8])
    assert same[0] == [8, 8] and same[1][0] < 6 and same[1][1] == 8, "the behaviour has changed"
PY
