#!/usr/bin/env bash
# OpenNMT-py 3.5.1 (torch 2.13.0 on a CPU; the package asks for torch below 2.3): with ALiBi, a translation
# changes once the model has scored a text, and stays changed.
#
# Expected: a reference (`-tgt`) gives scores besides the translations and does not change them, and a
# translation does not depend on what the model read before.
# Seen: `AlibiPositionalBias` keeps its last table, and reuses it for all texts that are not longer. For a
# score of a text at once the table has a row for each token. A step of the decoder asks for one row, for
# its last token, and gets the first row, which is that of the first token: it prefers the oldest tokens
# instead of the newest. The steps are right again when they pass the length of the scored text. Other kinds
# of positions keep no table.
#
#     ALiBi:     12 12 12 of 12 tokens as without a cache; with a reference of 14 tokens 8 4 8, afterwards 8 4 8
#     RoPE:      12 12 12 of 12 tokens as without a cache; with a reference of 14 tokens 12 12 12, afterwards 12 12 12
#     relative:  12 12 12 of 12 tokens as without a cache; with a reference of 14 tokens 12 12 12, afterwards 12 12 12
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile spacy==3.8.18 rapidfuzz==3.14.6 pyahocorasick==2.3.1 \
    pyonmttok==1.37.1 configargparse==1.9.0 pyyaml==6.0.4 six==1.17.0 pybind11==3.1.0 regex==2026.11.19
"$work/venv/bin/pip" install -q --no-compile --no-deps OpenNMT-py==3.5.1 fasttext-wheel==0.9.2
"$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import copy
import torch
from onmt.decoders.transformer import TransformerDecoder
from onmt.encoders.transformer import TransformerEncoder
from onmt.inputters.inputter import dict_to_vocabs
from onmt.models.model import NMTModel
from onmt.modules import Embeddings
from onmt.translate import GNMTGlobalScorer, Translator

torch.set_num_threads(1)
words = ["<unk>", "<blank>", "<s>", "</s>"] + [f"w{number}" for number in range(96)]
vocabs = dict_to_vocabs({"src": words, "tgt": words, "data_task": "seq2seq", "decoder_start_token": "<s>"})


def build(reach):
    torch.manual_seed(0)
    options = dict(max_relative_positions=reach, relative_positions_buckets=0)
    encoder = TransformerEncoder(2, 64, 4, 128, 0., 0., Embeddings(64, 100, 1), **options)
    decoder = TransformerDecoder(
        3, 64, 4, 128, False, "scaled-dot", 0., 0., Embeddings(64, 100, 1), aan_useffn=False,
        full_context_alignment=False, alignment_layer=0, alignment_heads=0, **options)
    model = NMTModel(encoder, decoder).eval()
    model.generator = torch.nn.Linear(64, 100)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.5 if "emb" in name else 0.15)
        else:
            weight.data.fill_(float("norm" in name and name.endswith("weight")))
    model.generator.bias.data[:2] = -1e4  # neither the unknown word nor the padding
    return model


def translate(model, text, **reference):
    translator = Translator(
        model, vocabs, max_length=12, min_length=12, max_length_ratio=0, beam_size=1, report_score=False,
        global_scorer=GNMTGlobalScorer(0, 0, "none", "none"))
    batch = {"src": torch.tensor([text]).unsqueeze(-1), "srclen": torch.tensor([len(text)]), **reference}
    return translator.translate_batch(batch, False)["predictions"][0][0].tolist()[:12]


@torch.no_grad()
def loop(model, text):
    source, length, tokens = torch.tensor([text]).unsqueeze(-1), torch.tensor([len(text)]), [2]
    encoded = model.encoder(source, length)[0]
    model.decoder.init_state(source, encoded, None)
    for _ in range(12):
        logits = model.generator(model.decoder(torch.tensor([tokens]).unsqueeze(-1), encoded, src_len=length)[0])
        logits[0, -1, 3] = -1e9  # no end before 12 tokens
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[1:]


draw = torch.Generator().manual_seed(0)
texts = [torch.randint(4, 100, (many,), generator=draw).tolist() for many in (5, 9, 14)]
reference = torch.tensor([[2] + torch.randint(4, 100, (13,), generator=draw).tolist() + [3]]).unsqueeze(-1)
for name, reach in (("ALiBi", -2), ("RoPE", -1), ("relative", 8)):
    model = build(reach)
    right = [loop(copy.deepcopy(model), text) for text in texts]
    made = [[translate(model, text) for text in texts], [translate(model, text, tgt=reference) for text in texts],
            [translate(model, text) for text in texts]]
    same = [[sum(a == b for a, b in zip(*pair)) for pair in zip(right, some)] for some in made]
    fresh, scored, after = (" ".join(map(str, some)) for some in same)
    print(f"{name + ':':10} {fresh} of 12 tokens as without a cache; with a reference of 14 tokens {scored}, "
          f"afterwards {after}")
    assert sum(same[0]) == 36, "the behaviour has changed"
    assert all((sum(some) < 30) == (name == "ALiBi") for some in same[1:]), "the behaviour has changed"
PY
