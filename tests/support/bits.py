"""Compare all K, V and logits of an engine's requests with chapter 01's, to the last bit.

    python -m tests.support.bits --model classroom --dtype bfloat16 --threads 1 --requests 200 --cache host
    python -m tests.support.bits --ranks 2 --cache states         # chapter 09, compared with chapter 01 on two ranks
"""

import argparse
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from common.llama import Llama
from common.requests import Request
from shell import checkpoint, lesson
from shell.linear import speed_up
from tests.support import engines, ranks, traffic
from tests.support.engines import baseline


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


def run(cache, requests: int, model: Llama, seed: int = 3, joined=None, **more) -> tuple[Counter, Counter]:
    """Compare all numbers of generated traffic (see traffic.run). `joined`: the ranks of chapter 09, which keeps what
    `cache` names.

    Returns: counts of events, and of compared numbers."""
    counts, hybrid, depth = Counter(), cache in engines.RUNNERS, len(model.layers)

    def watched(name, blocks, size, tier, **options):
        runner = engines.hybrid_runner(blocks, size, model=model) if hybrid else None
        if joined:
            name = ranks.cache_of(name, joined, model, tier)
        elif name == "planned":  # the named Cache has a plan for three layers
            name = engines.planned.PlannedCache(16 * tier, engines.BANDWIDTH, plan=("R" + "H" * (depth // 2) + "K" * depth)[:depth])
        return watch(engines.make(None if hybrid else name, blocks, size, model, runner=runner, tier=tier, **options), counts)

    share = 0 if hybrid else 0.05  # in chapter 08 a failed copy fails the whole step
    return traffic.run(cache, requests, seed, share, watched, joined.rank if joined else 0, model, **more), counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="classroom")
    parser.add_argument("--dtype", default="float32", choices=checkpoint.DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--cache", default="host", choices=[*engines.CACHES, *engines.RUNNERS, "kv", "states"])
    parser.add_argument("--ranks", type=int, default=0, help="chapter 09 on so many ranks, which keeps what --cache names")
    asked = parser.parse_args()
    load, joined = partial(checkpoint.load, on_host=asked.cache in engines.RUNNERS), None
    if asked.ranks:
        load = partial(ranks.ranked.load, joined := ranks.processes.join(asked.ranks))
    torch.set_num_threads(asked.threads)
    model, *_ = load(asked.model, asked.dtype, "cpu", same_bits=True)
    if asked.cache in engines.RUNNERS:
        engines.hybrid.layers_on_host(model, "cpu")
    engines.CONTEXT, counts = model.config.max_position_embeddings, Counter()
    with kept_logits():
        for longest, requests in (700, -(-9 * asked.requests // 10)), (2100, -(-asked.requests // 10)):
            longest = min(longest, engines.CONTEXT - 120)
            for each in run(asked.cache, requests, model, requests, joined, longest=longest, answer=12):
                counts.update(each)
    print(asked.model, asked.dtype, f"{asked.threads} threads, {asked.cache}:", ", ".join(f"{counts[name]:,} {name}" for name in (
        "requests", "restored_tokens", "compared", "different")), flush=True)  # fmt: skip
    return bool(counts["different"] or counts["wrong"])


if __name__ == "__main__":
    sys.exit(main())
