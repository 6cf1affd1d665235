"""Run generated traffic on many small engines: shared documents, conversations that go on, evictions, cancels,
preemptions, salts, faulty copies, and lower tiers that are smaller or larger than the device.

    python -m tests.support.traffic --requests 100000 --seed 0 --cache host
    python -m tests.support.traffic --requests 1000 --cache "tiered, write_back"     # with each prefetch policy in turn

Every answer is compared with chapter 01's. The program prints counts; its exit code is 1 if an answer was wrong.
"""

import argparse
import random
import sys
import time
from collections import Counter, deque

import torch

from common.requests import ClientDisconnected, Request, Unavailable
from tests.support import engines
from tests.support.faults import faulty

SALTS = ["", "", "", "b"]


def prompts_of(rng: random.Random, longest: int, documents: int = 4) -> list[list[int]]:
    """Return 30 prompts that begin with parts of the same `documents`."""
    texts = [engines.draw(rng, rng.randrange(20, longest)) for _ in range(documents)]
    prompts = []
    for _ in range(30):
        text = rng.choice(texts)
        shared = rng.randrange(rng.choice((1, len(text) // 2)), len(text) + 1)
        prompts.append(text[:shared] + engines.draw(rng, rng.randrange(1, 60)))
    return prompts


def variants(cache: str) -> list[str]:
    """Return the names in POLICIES that begin with this name and with no longer name in CACHES; or only this name."""
    return [name for name in engines.POLICIES if max(filter(name.startswith, engines.CACHES), key=len) == cache] or [cache]


def run(cache, requests: int, seed: int, share=0.05, make=engines.make, rank=0, model=None,
        until_wrong=False, longest=300, answer=24):
    """Send at least `requests` requests to engines with this Cache, one engine after the other.

    `cache`: what `make` gets; if it is a list, each engine gets the next. `seed`: the same seed gives the same requests.
    `share`: of copies that fail, and of copies that are late; in some of the engines there are none. `rank`: each rank gets
    the same requests, but other failing copies. `model`: the one whose answers are right. `until_wrong`: stop after an
    engine that gave a wrong answer. `longest`, `answer`: the most tokens of a document and of an answer.

    Returns: counts of events."""
    caches = cache if isinstance(cache, list) else [cache]
    model = engines.tiny_model(0, 4) if caches[0] in engines.RUNNERS else model
    oracle, counts, rng, number = engines.Oracle(model), Counter(), random.Random(seed), 0
    while counts["requests"] < requests and not (until_wrong and counts["wrong"] + counts["failed"]):
        if number % 4 == 0:
            prompts, oracle.known = prompts_of(rng, longest), {}
        cache, number = caches[number % len(caches)], number + 1
        size, most = rng.choice((4, 8, 16, 16)), max(len(prompt) for prompt in prompts) + 24
        blocks = -(-most // size) + rng.randrange(1, rng.choice((3, 20)))
        tier = (4, 2 * blocks, 8, rng.randrange(16, 65), 1)[number % 5]  # a few blocks, up to more than the device has
        faulted, talks = rng.choice((0, share)), deque()
        options = dict(token_budget=rng.choice((16, 64, 512)), max_running=rng.randrange(2, 9))
        engine = make(cache, blocks, size, tier=tier, **options)
        faults = random.Random(rng.random() + rank)
        with faulty(faults, failing=faulted, late=faulted, noisy=4, delay=rng.choice((0.002, 0.02))):
            for _ in range(2 if until_wrong else min(12, requests // 16 + 2)):
                burst(engine, rng, prompts, talks, oracle, counts, answer)
        engines.check_pools(engine)
        if engine.model.device.type == "cpu":
            counts["wrong"] += len(engines.wrong_rows(engine))
        for name in ("preemptions", "declined", "failed_restorations", "restored_tokens", "steps"):
            counts[name] += engine.counts[name]
        engine.close()
    return counts


def burst(engine, rng: random.Random, prompts: list, talks: deque, oracle: engines.Oracle, counts: Counter, answer: int):
    """Submit some requests at once, and cancel some of them while they are queued or running.

    Most of them continue the oldest of `talks`, which are finished requests. Add to `counts` what happened to them."""
    if rng.random() < 0.1:
        engine.evict("device")  # even while blocks are being saved
    asked, most = [], min(engine.capacity, engines.CONTEXT) - answer
    for _ in range(rng.randrange(1, rng.choice((3, 3, 14)))):
        prompt, options = rng.choice(prompts), dict(cache_salt=rng.choice(SALTS))
        talk = talks.popleft() if talks and rng.random() < 0.7 else None
        if talk and len(talk.tokens) + 24 < most:
            prompt, options = talk.tokens + engines.draw(rng, rng.randrange(1, 24)), talk.options
        request = Request(prompt, rng.randrange(1, answer), options=options)
        request.steps_to_live = rng.randrange(0, 12) if rng.random() < 0.1 else None
        asked.append(request)
        engine.submit(request)
    while any(request.outcome is None for request in asked):
        for request in asked:
            if request.steps_to_live is not None:
                request.steps_to_live -= 1
                if request.steps_to_live < 0 and request.outcome is None:
                    engine.cancel(request, ClientDisconnected("cancelled"))
                    request.steps_to_live = None
        engine.step()
    for request in asked:
        counts["requests"] += 1
        if isinstance(request.outcome, ClientDisconnected):
            counts["cancelled"] += 1
            continue
        if isinstance(request.outcome, Exception):
            in_steps = isinstance(request.outcome, Unavailable) and engine.pool.memory is None
            counts["given_up" if in_steps else "failed"] += 1  # given up: a step failed three times in a row
            continue
        talks.append(request)
        counts["tokens"] += len(request.new)
        counts["hits"] += bool(request.found)
        counts["restored"] += any(tier != "gpu" for tier in request.found)
        counts[oracle.judge(request)] += 1


def on_gpu(cache, blocks: int, size: int, **options):
    """Call engines.make, with the model on a GPU."""
    model = engines.tiny_model(0, 2, "cuda")
    if cache in engines.RUNNERS:
        model = engines.tiny_model(0, 4, "cuda", on_host=True)
        cache, options["runner"] = None, engines.hybrid_runner(blocks, size, model=model)
    return engines.make(cache, blocks, size, model, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", choices=[*engines.CACHES, *engines.POLICIES, *engines.RUNNERS], default="host")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    share = 0.002 if arguments.cache in engines.RUNNERS else 0.05  # in chapter 08 a failed copy fails the whole step
    counts = run(variants(arguments.cache), arguments.requests, arguments.seed, share)
    print(f"{arguments.cache}, seed {arguments.seed}, {time.perf_counter() - began:.0f} s: "
          + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))  # fmt: skip
    given_up, ties = counts["given_up"] / counts["requests"], counts["tie"] / counts["tokens"]
    return bool(counts["wrong"] or counts["failed"] or given_up > 0.02 or ties > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
