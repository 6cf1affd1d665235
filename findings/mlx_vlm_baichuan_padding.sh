#!/usr/bin/env bash
# mlx-vlm 0.7.10, mlx 0.32.4 (CPU): Baichuan M1 gives some prompts another answer beside a longer prompt.
#
# Expected: a prompt in a batch gets the greedy answer that it gets alone.
# Seen: the shorter of two prompts gets another answer for about one prompt in three. The batch is padded on the left, and
# Baichuan M1 mixes each key and value with the one before it. No mask removes the padding there. So the first token of the
# shorter prompt is mixed with a padding token. Alone it is mixed with nothing. Beside a prompt of the same length all
# answers are exact, and so are a Llama's. Nothing is raised.
#
#     seed 0, Baichuan M1, of 10 tokens right: beside a longer prompt [10, 1, 1, 5, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10,
#         10, 4], beside an equal one at least 10
#     seed 0, Llama, of 10 tokens right: beside a longer prompt [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10,
#         10, 10], beside an equal one at least 10
# (Four layers with random weights, two seeds, 16 prompts of 2 to 17 tokens, each beside a prompt of 50 tokens.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 requests==2.34.2 pillow==13.0.0 \
    opencv-python-headless==5.0.0.93 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-vlm==0.7.10 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models.baichuan_m1 import config as baichuan_config, language as baichuan
from mlx_vlm.models.llama import config as llama_config, language as llama

mx.set_default_device(mx.cpu)
never = type("Never", (), {"add_eos_token_ids": lambda *_: None, "__call__": lambda *_: False})()
words = SimpleNamespace(stopping_criteria=never, decode=lambda tokens: "")
SIZES = dict(hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=128, rms_norm_eps=1e-5, tie_word_embeddings=False)


def random_weights(model, seed):
    mx.random.seed(seed)
    model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
    return model.eval()


def alone(model, prompt):
    tokens = list(prompt)
    for _ in range(10):
        tokens.append(int(model(mx.array([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt):]


def served(model, prompts):
    generator, answers = BatchGenerator(model, words, max_tokens=10), {}
    generator.insert(prompts, 10, [{"inputs_embeds": model.model.embed_tokens(mx.array([prompt]))} for prompt in prompts])
    while generator.has_work:
        for response in generator.next()[1]:
            answers.setdefault(response.uid, []).append(int(response.token))
    generator.close()
    return [sum(map(int.__eq__, answers[uid], alone(model, prompt))) for uid, prompt in enumerate(prompts)]


for seed in (0, 1):
    for name, model in (("Baichuan M1", baichuan.LanguageModel(baichuan_config.ModelConfig(
                            model_type="baichuan_m1", conv_window=2, sliding_window=32, sliding_window_layers=[0, 2],
                            rope_theta=1e4, **SIZES))),
                        ("Llama", llama.LanguageModel(llama_config.ModelConfig(model_type="llama", **SIZES)))):
        model, random = random_weights(model, seed), np.random.default_rng(seed + 5)
        longer, equal = [], []
        for length in range(2, 18):
            prompt, long, other = (random.integers(3, 118, n).tolist() for n in (length, 50, length))
            longer.append(served(model, [prompt, long])[0])
            equal += served(model, [prompt, other])
        print(f"seed {seed}, {name}, of 10 tokens right: beside a longer prompt {longer}, beside an equal one at least {min(equal)}")
        assert min(equal) == 10, "the behaviour has changed"
        assert sum(right < 10 for right in longer) > 1 if name == "Baichuan M1" else min(longer) == 10, "the behaviour has changed"
PY
