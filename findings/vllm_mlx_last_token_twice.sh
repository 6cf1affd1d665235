#!/usr/bin/env bash
# vllm-mlx 0.6.0, mlx-lm 0.31.3, mlx 0.32.4 (CPU): a prompt that is cached whole is answered as if its last token stood
# there twice.
#
# Expected: a prompt gets the same greedy answer when it comes a second time.
# Seen: with the paged cache, a prompt of exactly two blocks gets another answer the second time. With the entry cache
# (the memory-aware one switched off), every prompt does. It is the answer to the prompt with its last token written
# twice: the cache has the keys of all tokens, and the scheduler gives the last token to the model once more. For the
# memory-aware cache, which is the default, it computes the prompt again. With the paged cache, a prompt of two blocks and
# two tokens is exact. Nothing is raised.
#
#     seed 0, paged, prompt of 128: first answer right, second that of the doubled last token
#     seed 0, paged, prompt of 130: first answer right, second right
#     seed 0, by entries, prompt of 130: first answer right, second that of the doubled last token
#     seed 0, default, prompt of 128: first answer right, second right
# (A Llama with two layers and random weights, two seeds.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile mlx==0.32.4 mlx-cpu==0.32.4 transformers==5.24.0 sentencepiece==0.2.3 \
    protobuf==7.36.2 psutil==7.2.2 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mlx-lm==0.31.3 vllm-mlx==0.6.0 2> "$work/log"
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm_mlx.request import Request, SamplingParams
from vllm_mlx.scheduler import Scheduler, SchedulerConfig

mx.set_default_device(mx.cpu)
words = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"w{n}": n for n in range(128)}, unk_token="w0")))


def random_llama(seed):
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96,
                                        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=128))
    model.update(tree_map(lambda w: 0.15 * mx.random.normal(w.shape) if w.ndim > 1 else w, model.parameters()))
    return model.eval()


def without_cache(model, prompt):
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(model(mx.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt):]


def served(model, prompts, **options):
    scheduler, answers = Scheduler(model, words, SchedulerConfig(**options)), []
    for number, prompt in enumerate(prompts):
        scheduler.add_request(Request(str(number), list(prompt), SamplingParams(max_tokens=12, temperature=0.0)))
        answers.append([])
        while scheduler.has_requests():
            for output in scheduler.step().outputs:
                answers[-1] += output.new_token_ids
    return answers


def right(model, prompts, **options):
    answers = served(model, prompts, **options)
    return [sum(map(int.__eq__, answer, without_cache(model, prompt))) for answer, prompt in zip(answers, prompts)]


for seed in (0, 1):
    model, random = random_llama(seed), np.random.default_rng(seed + 10)
    for name, options, length in (("paged", {"use_paged_cache": True}, 128), ("paged", {"use_paged_cache": True}, 130),
                                  ("by entries", {"use_memory_aware_cache": False}, 130), ("default", {}, 128)):
        right = doubled = None
        while right == doubled:  # a prompt whose answer shows a doubled token
            prompt = random.integers(1, 128, length).tolist()
            right, doubled = without_cache(model, prompt), without_cache(model, prompt + prompt[-1:])
        answers = served(model, [prompt, prompt], **options)
        print(f"seed {seed}, {name}, prompt of {length}:", ", ".join(
            f"{time} right" if answer == right else
            f"{time} that of the doubled last token" if answer == doubled else f"{time} another"
            for time, answer in zip(("first answer", "second"), answers)))
        fault = (name, length) in (("paged", 128), ("by entries", 130))
        assert answers == [right, doubled if fault else right], "the behaviour has changed"
PY
