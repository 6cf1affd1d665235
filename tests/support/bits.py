"""Compare all K, V and logits of an engine's requests with chapter 01's, to the last bit.

    python -m tests.support.bits --ranks 2 --cache states --dtype bfloat16     # chapter 09, compared with chapter 01 on two ranks
"""

import argparse
import random
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from common.llama import Llama
from common.requests import Request
from shell import checkpoint, lesson
from shell.linear import speed_up
from tests.support import engines, ranks
from tests.support.engines import baseline, draw


def exact_model(dtype: torch.dtype, on_host=False, copies=True, **more) -> Llama:
    """Return plain_model with the bits of `--same-bits`. `on_host`: for chapter 08. `more`: see plain_model."""
    model = engines.plain_model(**more).to(dtype)
    model.dtype, model.same_bits, model.digest = dtype, True, b"bits"
    if on_host:
        engines.hybrid.layers_on_host(model, "cpu")
    return speed_up(model, copies and not on_host, same_bits=True)


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
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--cache", default="kv", choices=["kv", "states"])
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    joined = ranks.processes.join(asked.ranks)
    torch.set_num_threads(1)
    model, *_ = ranks.ranked.load(joined, asked.model, asked.dtype, "cpu", same_bits=True)
    context, rng, counts = model.config.max_position_embeddings, random.Random(0), Counter()
    engine = watch(engines.make(ranks.cache_of(asked.cache, joined, model, 300), 300, model=model), counts)
    with kept_logits():
        while counts["requests"] < asked.requests:
            texts = [draw(rng, min(rng.choice([2100, *[rng.randrange(16, 700)] * 9]), context - 100)) for _ in range(4)]
            for _ in range(3):  # the second and third time, the texts come back
                requests = [Request(text + draw(rng, rng.randrange(1, 20)), rng.randrange(1, 12)) for text in texts]
                engine.generate(requests)
                counts.update(requests=len(requests), restored=sum(sum(one.found.values()) for one in requests))
                engines.evict(engine)
    engine.close()
    said = ", ".join(f"{counts[name]:,} {name}" for name in ("requests", "restored", "compared", "different"))
    print(f"{asked.model} {asked.dtype}, {asked.cache}: {said}", flush=True)
    return bool(counts["different"])


if __name__ == "__main__":
    sys.exit(main())
