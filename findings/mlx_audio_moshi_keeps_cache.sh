#!/usr/bin/env bash
# mlx-audio 0.6.2, mlx 0.32.4 (CPU): Moshi's second `generate` goes on from the cache of the first.
#
# Expected: `generate` makes a new generator at its first step, so the same weights, the same input and the same seed give
# the same words in each call, and one conversation does not see another.
# Seen: the keys and values of the last call stay in the model. Only the warm-up after loading resets them. The second call
# starts with its start token and its empty delays behind all tokens of the first conversation, and says other words. If the
# caller resets each cache of `model.transformer_cache`, the words are those of a new model. Nothing warns.
# (sts/models/moshi/moshi.py: `MoshiSTSModel.generate`; lm.py: `Lm.transformer_cache`; generate.py: `LmGen`.)
#
#     seed 1: of 30 words as in the first call: a new model 30, the second call 0, after a reset of the cache 30
#          id fa None bj jb ih ei dh | ia fe jf aj bf hf jb di
# (A small model with random weights, three seeds. The words are numbers of tokens, written in letters.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6 sentencepiece==0.2.3 \
    huggingface-hub==2.4.0 scipy==1.17.1 tokenizers==0.23.3 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-audio==0.6.2 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_audio.codec.models.mimi.mimi import Mimi, mimi_202407
from mlx_audio.sts.models.moshi import lm, moshi
from mlx_audio.sts.models.moshi.mimi_streamer import StreamTokenizer

mx.set_default_device(mx.cpu)
full = lm.config_v0_1()
narrow = dict(d_model=64, num_heads=4, num_layers=2, dim_feedforward=256)
small = replace(full, transformer=replace(full.transformer, **narrow), text_in_vocab_size=101, text_out_vocab_size=100,
                depformer=replace(full.depformer, transformer=replace(full.depformer.transformer, **narrow)))
moshi.moshi_lm.config_v0_1 = lambda: small


class Words:
    """In the place of the text tokenizer: a word of letters for each number."""

    def id_to_piece(self, number):
        return "abcdefghij"[number // 10] + "abcdefghij"[number % 10]


def random_weights(model, scale):
    model.update(tree_map(lambda w: (scale * mx.random.normal(w.shape)).astype(w.dtype) if w.ndim > 1 else w,
                          model.parameters()))


def new_model():
    """A model with random weights, put together as `load_weights` does it."""
    mx.random.seed(0)
    model = moshi.MoshiSTSModel(moshi.MoshiConfig())
    random_weights(model.model, 0.3)
    model.model.warmup()
    model.text_tokenizer = Words()
    plan = mimi_202407(32)
    codec = Mimi(replace(plan, seanet=replace(plan.seanet, dimension=32, nfilters=4),
                         transformer=replace(plan.transformer, d_model=32, num_heads=2, num_layers=1, dim_feedforward=64),
                         quantizer_dim=16))
    model.audio_tokenizer = StreamTokenizer(codec)
    return model


def words(model, seed, steps=30):
    mx.random.seed(seed)
    return [word for word, _ in model.generate(steps=steps)]


for seed in (1, 2, 3):
    model = new_model()
    first, second = words(model, seed), words(model, seed)
    for cache in model.model.transformer_cache:
        cache.reset()
    third = words(model, seed)
    same = [sum(map(str.__eq__, map(str, first), map(str, other))) for other in (words(new_model(), seed), second, third)]
    print(f"seed {seed}: of 30 words as in the first call: a new model {same[0]}, the second call {same[1]}, "
          f"after a reset of the cache {same[2]}")
    print("    ", " ".join(map(str, first[:8])), "|", " ".join(map(str, second[:8])))
    assert same[0] == same[2] == 30 and same[1] < 20, "the behaviour has changed"
PY
