#!/usr/bin/env bash
# langchain-huggingface 1.2.3, langchain-core 1.8.3 (transformers 5.24.0, torch 2.13.0 on a CPU): two models
# in pipelines of their own share one cache of answers.
#
# Expected: with `set_llm_cache(InMemoryCache())` a second model computes its own answer.
# Seen: the cache's key holds `model_id`, `model_kwargs` and `pipeline_kwargs` of the wrapper.
# `HuggingFacePipeline(pipeline=...)` leaves `model_id` empty and does not look into the pipeline. The second
# model therefore gives the first one's answer, and a longer `max_new_tokens` changes nothing. A `model_id`
# for each pipeline keeps the models apart.
#
#     cached: the second model gives 6 of 6 tokens of the first
#     cached, 12 tokens wanted: 6 tokens
#     cached, model_id given: the second model gives 0 of 6 tokens of the first
#     not cached: the second model gives 0 of 6 tokens of the first
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 langchain-huggingface==1.2.3 \
    langchain-core==1.8.3
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_huggingface import HuggingFacePipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w299")


def wrapped(seed, count=6, **options):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
    made = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=count,
                    do_sample=False, return_full_text=False)
    return HuggingFacePipeline(pipeline=made, **options)


def ask(model):
    return model.invoke("w1 w2 w3").split()


def same(first, second):
    return sum(a == b for a, b in zip(ask(first), ask(second)))


set_llm_cache(InMemoryCache())
cached = same(wrapped(0), wrapped(1))
long = len(ask(wrapped(0, 12)))
named = same(wrapped(0, model_id="first"), wrapped(1, model_id="second"))
set_llm_cache(None)
alone = same(wrapped(0), wrapped(1))
print(f"cached: the second model gives {cached} of 6 tokens of the first")
print(f"cached, 12 tokens wanted: {long} tokens")
print(f"cached, model_id given: the second model gives {named} of 6 tokens of the first")
print(f"not cached: the second model gives {alone} of 6 tokens of the first")
assert cached == long == 6 and named == alone < 6, "the behaviour has changed"
PY
