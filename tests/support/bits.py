"""Compare all K, V and logits of an engine's requests with chapter 01's, to the last bit.

    python -m tests.support.bits --model classroom --dtype bfloat16 --threads 1 --requests 200 --cache host
    python -m tests.support.bits --ranks 2 --cache states         # chapter 09, compared with chapter 01 on two ranks
"""

import argparse
import random
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from common.llama import Llama
from common.requests import Request
from shell import bits, checkpoint, lesson
from shell.linear import speed_up
from tests.support import engines, ranks
from tests.support.engines import baseline, draw, paged


def exact_model(dtype: torch.dtype, on_host=False, copies=True, group=0, **more) -> Llama:
    """Return plain_model with the bits of `--same-bits`. `on_host`: for chapter 08. `group`: see FastLinear. `more`: see plain_model."""
    model = engines.plain_model(**more).to(dtype)
    model.dtype, model.same_bits, model.digest = dtype, True, b"bits"
    if on_host:
        engines.hybrid.layers_on_host(model, "cpu")
    bits.check(speed_up(model, copies and not on_host, same_bits=True))
    for part in model.modules():
        part.group = group or getattr(part, "group", 0)
    return model


@contextmanager
def kept_logits():
    """Context manager: requests keep the logits of their tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "observe", lesson.keep_logits)
        yield


def watch(engine, counts: Counter):
    """Compare each request of an engine when its blocks are released, and count numbers in `counts`. Returns: the engine."""
    release = engine.release

    def compare_and_release(request):
        if request.computed:
            compare(engine, request, counts)
        release(request)

    engine.release = compare_and_release
    return engine


def compare(engine, request: Request, counts: Counter):
    model, tokens, prompt, logits = engine.model, request.tokens, request.prompt_tokens, []
    cache = baseline.KVCache(model, len(tokens))
    for start in [*range(0, prompt, baseline.PREFILL), *range(prompt, len(tokens))]:
        end = min(prompt, start + baseline.PREFILL) if start < prompt else start + 1
        row = baseline.forward(model, cache, tokens[start:end], start)  # [V]
        logits += [row] * (end >= prompt)
    pairs = list(zip(getattr(request, "logits", ()), logits[: len(request.new)], strict=True))
    if engine.pool.memory is not None:
        slots = engine.pool.slots(torch.tensor(request.table))[: request.computed]
        sides = torch.stack((cache.k, cache.v), 1).transpose(2, 3)[:, :, : request.computed]  # [L, 2, T, KVH, hd]
        pairs.append((engine.pool.memory.flatten(2, 3)[:, :, slots], sides))
    for ours, theirs in pairs:
        counts.update(compared=ours.numel(), different=int((ours != theirs).sum()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="classroom")
    parser.add_argument("--dtype", default="float32", choices=checkpoint.DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--cache", default="host", choices=[*engines.CACHES, *engines.RUNNERS, "kv", "states"])
    parser.add_argument("--ranks", type=int, default=0, help="chapter 09 on so many ranks, which keeps what --cache names")
    asked = parser.parse_args()
    hybrid, load = asked.cache in engines.RUNNERS, partial(checkpoint.load, on_host=asked.cache in engines.RUNNERS)
    if asked.ranks:
        load = partial(ranks.ranked.load, joined := ranks.processes.join(asked.ranks))
    torch.set_num_threads(asked.threads)
    model, *_ = load(asked.model, asked.dtype, "cpu", same_bits=True)
    context, rng, counts = model.config.max_position_embeddings, random.Random(0), Counter()
    if hybrid:
        engines.hybrid.layers_on_host(model, "cpu")
        engine = paged.Engine(engines.hybrid_runner(600, model=model, rows=context))
    else:
        cache = ranks.cache_of(asked.cache, joined, model, 300) if asked.ranks else asked.cache
        if cache == "planned":  # the named Cache has a plan for three layers
            depth = len(model.layers)
            cache = engines.planned.PlannedCache(4800, engines.BANDWIDTH, plan=("R" + "H" * (depth // 2) + "K" * depth)[:depth])
        engine = engines.make(cache, 300, model=model)
    engine = watch(engine, counts)
    with kept_logits():
        while counts["requests"] < asked.requests:
            texts = [draw(rng, min(rng.choice([2100, *[rng.randrange(16, 700)] * 9]), context - 100)) for _ in range(4)]
            for _ in range(3):  # the second and third time, the texts come back
                requests = [Request(text + draw(rng, rng.randrange(1, 20)), rng.randrange(1, 12)) for text in texts]
                engine.generate(requests)
                counts.update(requests=len(requests), restored=sum(sum(one.found.values()) for one in requests))
                engines.wait_until_idle(engine)
                hybrid or engines.evict(engine)
    engine.close()
    print(asked.model, asked.dtype, f"{asked.threads} threads, {asked.cache}:", ", ".join(f"{counts[name]:,} {name}" for name in (
        "requests", "restored", "compared", "different")), flush=True)  # fmt: skip
    return bool(counts["different"])


if __name__ == "__main__":
    sys.exit(main())
