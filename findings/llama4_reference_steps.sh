#!/usr/bin/env bash
# llama-models 0.3.0 (Meta's own code for Llama 4), fairscale 0.4.13, torch 2.13.0 (on a CPU): a step of `generate` sees
# the tokens of all earlier chunks, so an answer behind the first chunk differs from a pass over the text.
#
# Expected: in three of four layers a token attends only to its own chunk (attention_chunk_size, 8,192 tokens in Llama 4),
# whether the text is read in one pass, or token by token with the cache. A prompt in a batch gets the answer that it gets
# alone.
# Seen: Transformer.forward makes the mask of the chunks only for more than one new token (llama4/model.py, `if seqlen > 1`).
# Llama4.generate reads the prompt in one pass, and then steps with one token. Each step has no mask at all, and attends to the
# whole cache in all layers. From the first token of the second chunk on, all logits of steps are wrong. A batch is worse: the
# pass covers only the shortest prompt, and the others are read on in steps. So the end of a long prompt is read wrongly too,
# and its answer depends on its neighbour.
#
#     chunks of 16, 40 tokens in steps:    24 of 40 wrong, first at position 16, logits off by up to 11.0
#     no chunks, 40 tokens in steps:       0 of 40 wrong, first at position -, logits off by up to 0.0
#     answer to these 40 tokens alone:      41 97 3 0 92 10
#     in a batch with a prompt of 10:       68 63 88 0 92 72
#     by a pass over all before each token: 41 82 88 5 61 37
# (Random weights of 64 bits, four layers, chunks of 16. The model moves its cache to a GPU; here .cuda() leaves it in place.
# The answers follow the loop of Llama4.generate, which itself asks for a GPU: a pass over as many tokens as the shortest
# prompt has, then one token at a time, and tokens of a prompt are kept.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 pydantic==2.13.5 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps --no-build-isolation fairscale==0.4.13 llama-models==0.3.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import contextlib, io
import torch

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.Tensor.cuda = lambda tensor: tensor
from fairscale.nn.model_parallel.initialize import initialize_model_parallel
from llama_models.llama4.args import ModelArgs
from llama_models.llama4.datatypes import TransformerInput
from llama_models.llama4.model import Transformer

with contextlib.redirect_stdout(io.StringIO()):
    initialize_model_parallel(1)


def make(chunk):
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=100, multiple_of=16, use_qk_norm=True,
                                  attention_chunk_size=chunk, nope_layer_interval=4, max_batch_size=2, max_seq_len=64)).eval()
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape) * 0.3 if weight.dim() > 1 else torch.ones(weight.shape)
    return model


def read(model, tokens, at=0):
    return model(TransformerInput(tokens=tokens, tokens_position=at, image_embedding=None)).logits


def answers(model, prompts, count=6):
    """Greedy answers in the way of Llama4.generate."""
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    tokens = torch.full((len(prompts), longest + count), -1)
    for row, prompt in enumerate(prompts):
        tokens[row, :len(prompt)] = torch.tensor(prompt)
    start = 0
    for now in range(shortest, longest + count):
        following = read(model, tokens[:, start:now], start)[:, -1].argmax(-1)
        tokens[:, now] = torch.where(tokens[:, now] >= 0, tokens[:, now], following)
        start = now
    return [row[len(prompt):len(prompt) + count].tolist() for row, prompt in zip(tokens, prompts)]


def whole(model, prompt, count=6):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(read(model, torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt):]


torch.manual_seed(1)
text, short = torch.randint(3, 100, (1, 40)), torch.randint(3, 100, (10,)).tolist()
counts = []
for name, chunk in (("chunks of 16", 16), ("no chunks", None)):
    model = make(chunk)
    once = read(model, text)
    steps = torch.cat([read(model, text[:, at:at + 1], at) for at in range(40)], 1)
    off = (steps - once).abs().amax(-1)[0]
    wrong = (off > 1e-6).nonzero().flatten().tolist()
    counts.append(wrong)
    print(f"{name + ', 40 tokens in steps:':36} {len(wrong)} of 40 wrong, first at position {wrong[0] if wrong else '-'}, "
          f"logits off by up to {off.max():.1f}")
model, prompt = make(16), text[0].tolist()
alone, together, right = answers(model, [prompt])[0], answers(model, [prompt, short])[0], whole(model, prompt)
print("answer to these 40 tokens alone:     ", *alone)
print("in a batch with a prompt of 10:      ", *together)
print("by a pass over all before each token:", *right)
assert counts == [list(range(16, 40)), []], "the behaviour has changed"
assert alone != right and together != right and alone != together and alone[0] == right[0], "the behaviour has changed"
PY
