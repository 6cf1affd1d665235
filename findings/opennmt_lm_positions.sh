#!/usr/bin/env bash
# OpenNMT-py 3.5.1 (torch 2.13.0 on a CPU; the package asks for torch below 2.3): a language model's greedy
# answer skips a position behind the prompt, reads the prompt with wrong relative positions, and depends on
# the other prompts of the batch.
#
# Expected: the decoder with its cache gives the logits of one pass, so `GeneratorLM` writes the tokens of a
# loop without a cache, and a prompt in a batch gets the answer that it gets alone.
# Seen: behind a prompt of 6 tokens (positions 0 to 5) the first new token goes in at position 7:
# `GeneratorLM._translate_batch_with_strategy` adds the step, which is 1 by then, to the prompt's length. Every
# token behind a prompt is one too far, with RoPE and with sinusoids. With relative positions (`max_relative_
# positions` above 0) `gen_relative_positions` gives one row of distances when there is a cache: those of the
# last token. A prompt is read in one go, so all its tokens use this row. And a batch is padded on the left,
# while sinusoids count the padding. With the buckets of T5, or no positions, all is right.
#
#     prompt of 6 tokens, then the steps: 7 8 9 10
#     no positions: tokens as in a loop without a cache 12 12 12, in a batch as alone 12 12 12 (of 12)
#     T5 buckets:   tokens as in a loop without a cache 12 12 12, in a batch as alone 12 12 12 (of 12)
#     RoPE:         tokens as in a loop without a cache 8 6 6, in a batch as alone 12 12 12 (of 12)
#     sinusoids:    tokens as in a loop without a cache 6 8 4, in a batch as alone 3 4 12 (of 12)
#     relative:     tokens as in a loop without a cache 9 11 12, in a batch as alone 12 12 12 (of 12)
#     relative: the decoder's output for a prompt of 15 tokens with a cache is off by up to 2.60
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile spacy==3.8.18 rapidfuzz==3.14.6 pyahocorasick==2.3.1 \
    pyonmttok==1.37.1 configargparse==1.9.0 pyyaml==6.0.4 six==1.17.0 pybind11==3.1.0 regex==2026.11.19
"$work/venv/bin/pip" install -q --no-compile --no-deps OpenNMT-py==3.5.1 fasttext-wheel==0.9.2
"$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import torch
from onmt.decoders.transformer import TransformerLMDecoder
from onmt.inputters.inputter import dict_to_vocabs
from onmt.models.model import LanguageModel
from onmt.modules import Embeddings
from onmt.translate import GeneratorLM, GNMTGlobalScorer

torch.set_num_threads(1)
words = ["<unk>", "<blank>", "<s>", "</s>"] + [f"w{number}" for number in range(96)]
vocabs = dict_to_vocabs({"src": words, "tgt": words, "data_task": "lm", "decoder_start_token": "<s>"})


def build(sinusoids=False, reach=0, buckets=0):
    torch.manual_seed(0)
    table = Embeddings(64, 100, 1, position_encoding=sinusoids)
    decoder = TransformerLMDecoder(3, 64, 4, 128, False, "scaled-dot", 0., 0., table, reach, buckets, False)
    model = LanguageModel(None, decoder).eval()
    model.generator = torch.nn.Linear(64, 100)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.5 if "emb" in name else 0.15)
        else:
            weight.data.fill_(float("norm" in name and name.endswith("weight")))
    model.generator.bias.data[:2] = -1e4  # neither the unknown word nor the padding
    return model


def generate(model, prompts, many=12):
    longest = max(map(len, prompts))
    padded = torch.tensor([[1] * (longest - len(prompt)) + prompt for prompt in prompts])
    generator = GeneratorLM(
        model, vocabs, max_length=many, min_length=many, beam_size=1, random_sampling_topk=1,
        global_scorer=GNMTGlobalScorer(0, 0, "none", "none"), report_score=False)
    batch = {"src": padded.unsqueeze(-1), "srclen": torch.tensor([len(prompt) for prompt in prompts])}
    return [best[0].tolist() for best in generator.translate_batch(batch, False)["predictions"]]


@torch.no_grad()
def loop(model, prompt):
    tokens = list(prompt)
    for _ in range(12):
        logits = model.generator(model.decoder(torch.tensor([tokens]).unsqueeze(-1))[0])[0, -1]
        logits[3] = -1e9  # no end before 12 tokens
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):]


def same(some, others):
    return [sum(a == b for a, b in zip(one, other)) for one, other in zip(some, others)]


draw = torch.Generator().manual_seed(0)
prompts = [[2] + torch.randint(4, 100, (many,), generator=draw).tolist() for many in (5, 9, 14)]
model, steps = build(reach=-1), []
model.decoder.register_forward_pre_hook(lambda module, given, named: steps.append(named["step"]), with_kwargs=True)
generate(model, prompts[:1], 5)
print("prompt of 6 tokens, then the steps:", *steps[1:])
assert steps == [0, 7, 8, 9, 10], "the behaviour has changed"
kinds = {"no positions": {}, "T5 buckets": dict(reach=32, buckets=8), "RoPE": dict(reach=-1),
         "sinusoids": dict(sinusoids=True), "relative": dict(reach=8)}
for name, options in kinds.items():
    model = build(**options)
    alone = [generate(model, [prompt])[0] for prompt in prompts]
    right = same(alone, [loop(model, prompt) for prompt in prompts])
    batch = same(alone, generate(model, prompts))
    print(f"{name + ':':13} tokens as in a loop without a cache {' '.join(map(str, right))}, in a batch as alone "
          f"{' '.join(map(str, batch))} (of 12)")
    assert (sum(right) == 36) == (name in ("no positions", "T5 buckets")), "the behaviour has changed"
    assert (sum(batch) == 36) == (name != "sinusoids"), "the behaviour has changed"
prompt = torch.tensor([prompts[2]]).unsqueeze(-1)
with torch.no_grad():
    apart = float((model.decoder(prompt, step=0)[0] - model.decoder(prompt)[0]).abs().max())
print(f"relative: the decoder's output for a prompt of 15 tokens with a cache is off by up to {apart:.2f}")
assert apart > 0.5, "the behaviour has changed"
PY
