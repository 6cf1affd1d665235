#!/usr/bin/env bash
# espnet 202511 (torch 2.13.0 on a CPU): with a cache, the four decoders with convolutions see only their last token.
#
# Expected: the decoders score a text step by step, with the state of the step before, as they score it at once in training. The
# decoder with attention does.
# Seen: with a cache, a decoder layer gives the convolution two inputs: the last token (query) and all tokens (key, value). The
# convolution reads only the first. So each step behind the first convolves one token with zeros, and the tokens before it are
# lost: the decoder knows only its last token and its place. The search always gives the state, so all its texts are affected.
# Steps without a state are right. Nothing is raised.
# (nets/pytorch_backend/transformer: `DecoderLayer.forward` in decoder_layer.py; `forward` in lightconv.py, lightconv2d.py,
# dynamic_conv.py and dynamic_conv2d.py.)
#
#     Transformer               steps without a state 0.00 off, with it 0.00 off; search 60 of 60 tokens as without a cache
#     LightweightConvolution    steps without a state 0.00 off, with it 4.21 off; search 37 of 60 tokens as without a cache
#     DynamicConvolution        steps without a state 0.00 off, with it 4.66 off; search 6 of 60 tokens as without a cache
# (Three of five lines. Three layers with random weights. The largest difference of a log probability. The search has one
# hypothesis and five inputs: 37 of the 60 tokens are those that it finds without a cache.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile typeguard==4.6.1 editdistance==0.8.1 packaging==26.4 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps espnet==202511 torch-complex==0.4.4 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from espnet2.asr.decoder import transformer_decoder as decoders
from espnet.nets.beam_search import BeamSearch

torch.set_num_threads(1)
torch.set_grad_enabled(False)
many, width, end = 30, 32, 29
draw = torch.Generator().manual_seed(0)
memories = torch.randn(5, 20, width, generator=draw)
memory = memories[0]
text = torch.randint(1, end, (12,), generator=draw)


def build(name):
    torch.manual_seed(0)
    options = {} if name == "Transformer" else dict(conv_kernel_length=[3, 5, 7])
    kind = getattr(decoders, name + ("Decoder" if name == "Transformer" else "TransformerDecoder"))
    model = kind(many, width, attention_heads=4, linear_units=64, num_blocks=3, **options).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3)
    model.output_layer.bias[end] = -1e4  # no end before twelve tokens
    return model


def steps(model, keep):
    state, scores = None, []
    for place in range(len(text)):
        score, new = model.score(text[:place + 1], state, memory)
        state = new if keep else None
        scores.append(score)
    return torch.stack(scores)[:, :end]


def greedy(model, memory):
    tokens = [end]
    for _ in range(12):
        tokens.append(int(model.score(torch.tensor(tokens), None, memory)[0].argmax()))
    return tokens[1:]


def search(model, memory):
    found = BeamSearch(scorers={"decoder": model}, weights={"decoder": 1.0}, beam_size=1, vocab_size=many, sos=end, eos=end)
    return found(memory, maxlenratio=-12.0)[0].yseq.tolist()[1:13]


for name in ("Transformer", "LightweightConvolution", "LightweightConvolution2D", "DynamicConvolution", "DynamicConvolution2D"):
    model = build(name)
    lengths = torch.tensor([len(memory)]), torch.tensor([len(text)])
    right = model(memory[None], lengths[0], text[None], lengths[1])[0][0].log_softmax(-1)[:, :end]
    fresh, kept = (float((steps(model, keep) - right).abs().max()) for keep in (False, True))
    same = sum(a == b for some in memories for a, b in zip(greedy(model, some), search(model, some)))
    print(f"{name:25} steps without a state {fresh:.2f} off, with it {kept:.2f} off; "
          f"search {same} of 60 tokens as without a cache")
    assert fresh < 1e-3, "the behaviour has changed"
    assert (kept > 0.3 and same < 50) if "Conv" in name else (kept < 1e-3 and same == 60), "the behaviour has changed"
PY
