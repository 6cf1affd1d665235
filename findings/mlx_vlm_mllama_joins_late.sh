#!/usr/bin/env bash
# mlx-vlm 0.7.10, mlx 0.32.4 (CPU): a request of Llama 3.2 Vision (mllama) that joins a running batch gets a wrong answer.
#
# Expected: a text request that comes while another one is answered gets the greedy answer that it gets alone.
# Seen: with mllama, only its first token or a few are right. When the two caches are joined, the shorter text moves to the
# right. Its keys keep their positions, but mllama rotates the next keys of all rows with one position, that of the longest
# text. So the new tokens are too far from the text of the late request. The same two requests in one batch from the
# beginning are exact, and so is a Llama that joins late. Nothing is raised.
#
#     seed 0, mllama, of 10 tokens right: late request [2, 1, 2, 1, 1, 1], the first one [10, 10, 10, 10, 10, 10],
#         both together [10, 10, 10, 10, 10, 10]
#     seed 0, Llama, of 10 tokens right: late request [10, 10, 10, 10, 10, 10], the first one [10, 10, 10, 10, 10, 10],
#         both together [10, 10, 10, 10, 10, 10]
# (Three layers with self-attention and one with cross-attention, random weights, two seeds. The first request has 50
# tokens; six late ones follow in turn.)
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
from mlx_vlm.models.llama import config as llama_config, language as llama
from mlx_vlm.models.mllama import config as mllama_config, language as mllama

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


def served(model, prompts, steps_between):
    generator, answers = BatchGenerator(model, words, max_tokens=10), {}

    def step():
        for response in generator.next()[1]:
            answers.setdefault(response.uid, []).append(int(response.token))

    for prompt in prompts:
        generator.insert([prompt], 10, [{"inputs_embeds": model.model.embed_tokens(mx.array([prompt]))}])
        for _ in range(steps_between):
            step()
    while generator.has_work:
        step()
    generator.close()
    return [sum(map(int.__eq__, answers[uid], alone(model, prompt))) for uid, prompt in enumerate(prompts)]


for seed in (0, 1):
    for name, model in (("mllama", mllama.LanguageModel(mllama_config.TextConfig(
                            model_type="mllama", cross_attention_layers=[3], **SIZES))),
                        ("Llama", llama.LanguageModel(llama_config.ModelConfig(model_type="llama", **SIZES)))):
        model, random = random_weights(model, seed), np.random.default_rng(seed + 5)
        late, together = [], []
        for length in (2, 5, 8, 13, 20, 40):
            first, second = (random.integers(3, 118, n).tolist() for n in (50, length))
            late.append(served(model, [first, second], 4))
            together.append(served(model, [first, second], 0))
        print(f"seed {seed}, {name}, of 10 tokens right: late request {[right for _, right in late]},",
              f"the first one {[right for right, _ in late]}, both together {[min(rights) for rights in together]}")
        assert all(rights == [10, 10] for rights in together) and all(right == 10 for right, _ in late), \
            "the behaviour has changed"
        assert max(right for _, right in late) < 5 if name == "mllama" else late == 6 * [[10, 10]], "the behaviour has changed"
PY
