#!/usr/bin/env bash
# vllm-mlx 0.6.0, mlx-lm 0.31.3, mlx 0.32.4 (CPU): with PrefixCacheManager, only the first text after a stored prefix gets right logits.
#
# Expected: each of several texts behind the same stored prefix gets the logits of one pass without a cache.
# Seen: the first one does. `fetch_cache` returns the stored entry itself, and mlx-lm's cache grows in place when the model
# reads the rest, which is the use that the class describes. So the entry of 100 tokens then has 110, and the second text
# attends to the first one. With a copy of what is fetched, both are exact. Nothing is raised.
#
#     seed 0, as fetched: 100 tokens fetched, first text 0.00 off; 110 tokens fetched, second text 4.08 off
#     seed 0, with a copy: 100 tokens fetched, first text 0.00 off; 100 tokens fetched, second text 0.00 off
# (A Llama with two layers and random weights, two seeds. The largest difference of a logit, in units of their standard
# deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 sentencepiece==0.2.3 \
    protobuf==7.36.2 psutil==7.2.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-lm==0.31.3 vllm-mlx==0.6.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import copy

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from vllm_mlx.prefix_cache import PrefixCacheManager

mx.set_default_device(mx.cpu)


def random_llama(seed):
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96,
                                        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=128))
    model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
    return model.eval()


for seed in (0, 1):
    model, random = random_llama(seed), np.random.default_rng(seed + 10)
    prefix, *texts = (random.integers(1, 128, n).tolist() for n in (100, 10, 10))
    for name, own in (("as fetched", lambda cache: cache), ("with a copy", copy.deepcopy)):
        prefixes, cache, off, found = PrefixCacheManager(model), make_prompt_cache(model), [], []
        mx.eval(model(mx.array([prefix]), cache=cache))
        prefixes.store_cache(prefix, cache)
        for text in texts:
            cache, rest = prefixes.fetch_cache(prefix + text)
            assert rest == text  # a hit
            found.append(cache[0].offset)
            logits, right = model(mx.array([rest]), cache=own(cache)), model(mx.array([prefix + text]))[:, -10:]
            off.append(float(mx.abs(logits - right).max() / mx.std(right)))
        print(f"seed {seed}, {name}: {found[0]} tokens fetched, first text {off[0]:.2f} off;",
              f"{found[1]} tokens fetched, second text {off[1]:.2f} off")
        assert off[0] < 1e-3 and (off[1] < 1e-3) == (name == "with a copy"), "the behaviour has changed"
        assert off[1] < 1e-3 or off[1] > 0.5, "the behaviour has changed"
PY
