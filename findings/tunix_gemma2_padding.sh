#!/usr/bin/env bash
# google-tunix 0.1.7 (jax 0.10.2 and flax 0.12.8 on a CPU): with Gemma 2, padding moves the sliding window off the text.
#
# Expected: the sampler pads a prompt on the left, to `max_prompt_length` or to the next power of two. This changes no
# logits.
# Seen: it changes them for Gemma 2, if the text is longer than the window. The model compares the place of a key, which
# counts the padding, with the position of a query, which does not. So the window lies too far back, by as many tokens as
# there is padding. A token that sees no key attends to all places alike, also to padding. By default a prompt is padded if
# its length is no power of two, or if it stands beside a longer one. Without padding all is exact, and with a window that
# is longer than the text. Nothing is raised. (Gemma 3 and Gemma 4 of this package are exact with padding.)
#
#     seed 0, a window of 8: no padding 0.00 off, 4 places 0.96, by default (8) 1.27, beside a longer prompt (40) 2.06
#     seed 0, a window of 1000: no padding 0.00 off, 4 places 0.00, by default (8) 0.00, beside a longer prompt (40) 0.00
#     seed 1, a window of 8: no padding 0.00 off, 4 places 0.86, by default (8) 1.52, beside a longer prompt (40) 2.69
#     seed 1, a window of 1000: no padding 0.00 off, 4 places 0.00, by default (8) 0.00, beside a longer prompt (40) 0.00
# (Two layers with random weights, two seeds, in float32; a prompt of 24 tokens. The largest difference of the logits of
# the first step, in units of their standard deviation, from a pass without a cache and without padding.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jax==0.10.2 flax==0.12.8 numpy==2.4.6 jaxtyping==0.3.11 qwix==0.1.8 \
    sentencepiece==0.2.3 tqdm==4.70.1 huggingface_hub==2.4.0 jinja2==3.1.6 omegaconf==2.4.0 tenacity==9.2.1 \
    perfetto==0.59.1 numba==0.68.1 python-dotenv==1.2.4 pillow==13.0.0 importlib_resources==7.1.0 orbax-checkpoint==0.12.8 \
    sympy==1.14.0 pylatexenc==2.11 safetensors==0.7.0 kagglehub==1.0.3 clu==0.0.12 tensorboardX==2.6.5 pandas==3.1.1 \
    einops==0.8.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps google-tunix==0.1.7 google-metrax==0.2.4 grain==0.2.18 2> "$work/log"
export JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma.model import AttentionType, Gemma, ModelConfig

LENGTH = 24


class Numbers:
    """Every number is a token."""

    def encode(self, text):
        return [int(number) for number in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def pad_id(self):
        return 0

    def eos_id(self):
        return 1

    def bos_id(self):
        return 2


for seed in (0, 1):
    for window in (8, 1000):
        model = Gemma(ModelConfig(
            num_layers=2, num_embed=128, embed_dim=64, hidden_dim=96, num_heads=4, head_dim=16, num_kv_heads=2,
            final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True, sliding_window_size=window,
            attention_types=(AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL)), rngs=nnx.Rngs(0))
        rng = np.random.default_rng(seed)
        nnx.update(model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32)
                                       if leaf.ndim > 1 else leaf.astype(jnp.float32), nnx.state(model)))
        sampler = Sampler(model, Numbers(), CacheConfig(cache_size=80, num_layers=2, num_kv_heads=2, head_dim=16))
        prompt, longer = rng.integers(10, 128, LENGTH - 1).tolist(), rng.integers(10, 128, 40).tolist()
        tokens = jnp.asarray([[2] + prompt])
        right, _ = model(tokens, jnp.arange(LENGTH)[None], None, jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool)))
        right = np.asarray(right)[0, -1]

        def off(prompts, **options):
            texts = [" ".join(map(str, ids)) for ids in prompts]
            logits = sampler(texts, max_generation_steps=4, return_logits=True, eos_tokens=[-1], **options).logits[0][0]
            return float(abs(logits - right).max() / right.std())

        bare = off([prompt], max_prompt_length=LENGTH)
        padded = [off([prompt], max_prompt_length=LENGTH + 4), off([prompt]), off([prompt, longer])]
        print(f"seed {seed}, a window of {window}: no padding {bare:.2f} off, 4 places {padded[0]:.2f},",
              f"by default (8) {padded[1]:.2f}, beside a longer prompt (40) {padded[2]:.2f}")
        assert bare < 1e-3, "the behaviour has changed"
        assert min(padded) > 0.3 if window == 8 else max(padded) < 1e-3, "the behaviour has changed"
PY
