#!/usr/bin/env bash
# vllm-mlx 0.6.0, mlx-lm 0.31.3, mlx 0.32.4 (CPU): the paged cache finds a block by the block's own tokens, whatever came
# before them.
#
# Expected: a block of keys and values is reused only behind the same tokens, so greedy answers with the paged cache are
# those without a cache. The package describes hashes that include the hash of the block before.
# Seen: one prompt is a beginning and a document, of one block (64 tokens) each. Then the document alone reuses the block
# that was computed after the beginning. Its keys have other positions, and they saw the beginning. The document after a
# second beginning is right the first time, since the lookup stops at the new beginning. But its block is not stored,
# because there is one with its hash. So the same prompt gets the new beginning and the old block the second time, and
# another answer. The default cache and a prompt without a common document are exact. Nothing is raised.
#
#     seed 0, paged: document alone  0 of 12 tokens right; second beginning 12, the same again  0; other document 12
#     seed 0, default cache: document alone 12 of 12 tokens right; second beginning 12, the same again 12; other document 12
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
    first, second, document, other, question = (random.integers(1, 128, n).tolist() for n in (64, 64, 64, 64, 10))
    for name, options in (("paged", {"use_paged_cache": True}), ("default cache", {})):
        alone = right(model, [first + document + question, document + question], **options)[1]
        before, again = right(model, [first + document + question] + 2 * [second + document + question], **options)[1:]
        control = min(right(model, [first + document + question] + 2 * [second + other + question], **options))
        print(f"seed {seed}, {name}: document alone {alone:2} of 12 tokens right; second beginning {before:2},",
              f"the same again {again:2}; other document {control:2}")
        assert before == control == 12, "the behaviour has changed"
        assert max(alone, again) < 9 if name == "paged" else alone == again == 12, "the behaviour has changed"
PY
