#!/usr/bin/env bash
# mlx-embeddings 0.1.0, mlx 0.32.4 (CPU): with Qwen3 and padding on the left, every shorter text of a batch gets numbers that
# are not numbers.
#
# Expected: the vector of a text in a padded batch is the one that it gets alone. This package's pooling has a branch
# for padding on the left, and the one that Qwen published for its embedding models has it too.
# Seen: the texts shorter than the longest one get only NaN, without an error. The mask adds minus infinity for padding and
# minus infinity for later tokens. A padded place on the left sees nothing, so its softmax divides zero by zero. In the next
# layer its value is NaN, and zero times NaN is NaN, so it reaches every token of the row. With padding on the right, each
# place sees at least itself, and the vectors are exact.
# (models/qwen3.py: `Qwen3Model.__call__` and `_create_causal_mask`.)
#
#     padding on the right: vectors of 20, 7, 13 tokens: largest difference 0.000, 0.000, 0.000
#     padding on the left:  vectors of 20, 7, 13 tokens: largest difference 0.000, nan, nan
# (A model of three layers with random weights.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 mlx-vlm==0.7.10 \
    transformers==5.24.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-embeddings==0.1.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import math

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_embeddings.models import qwen3
from mlx_embeddings.utils import generate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

mx.set_default_device(mx.cpu)
mx.random.seed(0)
model = qwen3.Model(qwen3.ModelArgs(hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4,
                                    num_key_value_heads=2, head_dim=16, vocab_size=128))
model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
model.eval()
core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(128)}, unk_token="w0"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
random = np.random.default_rng(0)
texts = [" ".join(f"w{n}" for n in random.integers(1, 128, length)) for length in (20, 7, 13)]
for side in ("right", "left"):
    words = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side=side,
                                    model_input_names=["input_ids", "attention_mask"])
    alone = [np.array(generate(model, words, [text]).text_embeds)[0] for text in texts]
    batch = np.array(generate(model, words, texts).text_embeds)
    off = [float(np.abs(one - row).max()) for one, row in zip(alone, batch)]
    print(f"{'padding on the ' + side + ':':21} vectors of 20, 7, 13 tokens: largest difference",
          ", ".join(f"{number:.3f}" for number in off))
    assert off[0] < 1e-4, "the behaviour has changed"
    assert max(off) < 1e-4 if side == "right" else all(map(math.isnan, off[1:])), "the behaviour has changed"
PY
