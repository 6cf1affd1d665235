#!/usr/bin/env bash
# mlx-vlm 0.7.10, mlx 0.32.4 (CPU): GLM-4.1V, PaddleOCR-VL and ERNIE 4.5 VL answer a short text wrongly beside a longer one.
#
# Expected: a prompt in a batch gets the greedy answer that it gets alone.
# Seen: in the first batch of a model, the shorter of two texts gets another answer for almost every prompt. The batch is
# padded on the left. These families count the positions of a prompt from the first padding token, but the positions of the
# answer from the first real token. So a new token stands before the end of its own prompt. There are no images. In GLM-4.1V
# and ERNIE, the same batch is right the second time, since the model keeps a value from the first batch and then takes
# another path. PaddleOCR-VL drops that value, so it is wrong each time. Beside a prompt of the same length all answers are
# exact, and so are those of Qwen2.5-VL, which passes its positions with the prompt. Nothing is raised.
#
#     seed 0, GLM-4.1V, of 10 tokens right: beside a longer prompt [0, 0, 1, 0, 0, 1, 0, 0, 1, 3, 0, 0, 1, 0, 0, 3],
#         once more [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], beside an equal one at least 10
#     seed 0, PaddleOCR-VL, of 10 tokens right: beside a longer prompt
#         [2, 1, 1, 0, 3, 2, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0],
#         once more [2, 1, 1, 0, 3, 2, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0], beside an equal one at least 10
#     seed 0, ERNIE 4.5 VL, of 10 tokens right: beside a longer prompt
#         [2, 1, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
#         once more [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], beside an equal one at least 10
#     seed 0, Qwen2.5-VL, of 10 tokens right: beside a longer prompt
#         [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10],
#         once more [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], beside an equal one at least 10
# (Four layers with random weights, two seeds, 16 prompts of 2 to 17 tokens, each beside a prompt of 50 tokens, with a new
# model for each prompt.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 requests==2.34.2 pillow==13.0.0 \
    opencv-python-headless==5.0.0.93 sentencepiece==0.2.3 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-vlm==0.7.10 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import ernie4_5_moe_vl, glm4v, paddleocr_vl, qwen2_5_vl

mx.set_default_device(mx.cpu)
never = type("Never", (), {"add_eos_token_ids": lambda *_: None, "__call__": lambda *_: False})()
words = SimpleNamespace(stopping_criteria=never, decode=lambda tokens: "")
SIZES = dict(hidden_size=128, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=128, rms_norm_eps=1e-5, rope_theta=1e4)
ROPE = dict(type="default", rope_type="default", mrope_section=[4, 6, 6])
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=14, out_hidden_size=128)
FAMILIES = {
    "GLM-4.1V": (glm4v, dict(model_type="glm4v_text", rope_scaling=ROPE | dict(mrope_section=[2, 3, 3])),
                 dict(model_type="glm4v", **TOWER)),
    "PaddleOCR-VL": (paddleocr_vl, dict(rope_scaling=ROPE, head_dim=32, use_bias=False),
                     dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)),
    "ERNIE 4.5 VL": (ernie4_5_moe_vl, dict(freq_allocation=4, mrope_section=[6, 6, 4], moe_num_experts=[4, 4],
                                           moe_intermediate_size=[32, 32], moe_layer_start_index=1, moe_layer_end_index=3),
                     dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2)),
    "Qwen2.5-VL": (qwen2_5_vl, dict(model_type="qwen2_5_vl", rope_scaling=ROPE), TOWER),
}


def random_model(family, text, tower, seed):
    mx.random.seed(seed)
    model = family.Model(family.ModelConfig(text_config=family.TextConfig(**SIZES | text), model_type="any",
                                            vision_config=family.VisionConfig(**tower), eos_token_id=[1]))
    model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
    return model.eval()


def alone(model, prompt):
    tokens, language = list(prompt), model.language_model
    for _ in range(10):
        language._position_ids = language._rope_deltas = None
        tokens.append(int(language(mx.array([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt):]


def features(model, prompt):
    embedded = model.get_input_embeddings(mx.array([prompt]), None, mask=mx.ones((1, len(prompt)), mx.int32))
    return {name: value for name, value in embedded.to_dict().items() if value is not None}


def served(model, prompts, right):
    generator, answers = BatchGenerator(model.language_model, words, max_tokens=10), {}
    generator.insert(prompts, 10, [features(model, prompt) for prompt in prompts])
    while generator.has_work:
        for response in generator.next()[1]:
            answers.setdefault(response.uid, []).append(int(response.token))
    generator.close()
    return [sum(map(int.__eq__, answers[uid], right[uid])) for uid in range(len(prompts))]


for seed in (0, 1):
    for name, (family, text, tower) in FAMILIES.items():
        reference, random = random_model(family, text, tower, seed), np.random.default_rng(seed + 5)
        first, second, equal = [], [], []
        for length in range(2, 18):
            prompt, long, other = (random.integers(3, 118, n).tolist() for n in (length, 50, length))
            right, model = [alone(reference, p) for p in (prompt, long, other)], random_model(family, text, tower, seed)
            first.append(served(model, [prompt, long], right)[0])
            second.append(served(model, [prompt, long], right)[0])
            equal += served(random_model(family, text, tower, seed), [prompt, other], right[::2])
        print(f"seed {seed}, {name}, of 10 tokens right: beside a longer prompt {first},")
        print(f"    once more {second}, beside an equal one at least {min(equal)}")
        assert min(equal) == 10, "the behaviour has changed"
        assert min(first) == 10 if name == "Qwen2.5-VL" else sum(n < 10 for n in first) > 8, "the behaviour has changed"
        assert sum(n < 10 for n in second) > 8 if name == "PaddleOCR-VL" else min(second) == 10, "the behaviour has changed"
PY
