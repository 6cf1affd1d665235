"""Many clients for a long time, on storage that fails, is slow, hangs and comes back; a third of them hang up.

    python -m tests.support.soak --cache planned --minutes 10

Every answer is chapter 01's, nothing is left referenced, and the process does not grow.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial

import torch

from common import store
from common.requests import HungUp, Request
from shell import backends
from tests.support import engines

MOODS, LASTS = ("well", "fails", "well", "slow", "well", "hangs"), 4.0  # seconds, each of them
CACHES = {
    "planned": lambda backend: engines.planned.PlannedCache(
        40, engines.BANDWIDTH, store.StoredChunks(store.Storage(backend)), plan="RHK"
    ),
    "tiered": lambda backend: engines.tiered(24, "timeout", "write_through", backend),
    "tiered, both ends": lambda backend: engines.tiered(24, "both_ends", "write_back", backend),
}


class Moody:
    """A back end whose mood changes with each `turn`."""

    def __init__(self, backend, rng: random.Random):
        self.backend, self.rng, self.moods, self.mood, self.well = backend, rng, MOODS, 0, threading.Event()
        self.turn()

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def turn(self):
        self.mood += 1
        self.well.clear() if self.now() == "hangs" else self.well.set()

    def now(self) -> str:
        return self.moods[self.mood % len(self.moods)]

    def verb(self, name: str, *arguments):
        mood = self.now()
        self.well.wait(60)
        if mood == "fails" and self.rng.random() < 0.7:
            raise OSError("injected")
        if mood == "slow":
            time.sleep(0.05)
        return getattr(self.backend, name)(*arguments)

    exists, get, set = (lambda self, *given, name=name: self.verb(name, *given) for name in ("exists", "get", "set"))


def megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def client(engine, rng: random.Random, prompts: list, oracle: engines.Oracle, going_on, counts: Counter):
    """Ask until the time is up; hang up now and then, in line or under way."""
    while going_on():
        request = Request(list(rng.choice(prompts)), rng.choice((1, 8, 16)))
        engine.submit(request)
        if rng.random() < 1 / 3:
            time.sleep(0.05 * rng.random())
            engine.cancel(request, HungUp("gone"))
        while not isinstance(request.outcome, Exception) and request.outcome is None:
            time.sleep(1e-3)
        gone = isinstance(request.outcome, HungUp)
        counts[repr(request.outcome) if isinstance(request.outcome, Exception) and not gone else
               "gone" if gone else oracle.judge(request)] += 1  # fmt: skip
        counts.update(restored=any(tier != "gpu" for tier in request.found))


def run(cache: str, minutes: float, seed: int) -> Counter:
    """Eight clients -> what happened, and `grown`: memory at the end over that after the first minute."""
    rng, oracle, counts, samples = random.Random(seed), engines.Oracle(), Counter(), []
    documents = [engines.draw(rng, rng.randrange(60, 300)) for _ in range(12)]
    prompts = [rng.choice(documents)[: rng.randrange(40, 300)] + engines.draw(rng, 5) for _ in range(60)]
    for prompt in prompts:
        for new in (1, 8, 16):
            oracle.answer(prompt, new)
    with tempfile.TemporaryDirectory() as folder:
        backend = Moody(backends.Directory(f"file:{folder}", 2e-3), random.Random(seed))
        engine = engines.make(CACHES[cache](backend), 40, always_restore=cache == "planned")
        for length in range(1, 330):  # PyTorch keeps a product for each number of rows
            for _ in range(2):
                engines.ask(engine, prompts[0][:1] + engines.draw(rng, length), 2)
                engine.evict("device")
        began, turned = time.perf_counter(), time.perf_counter()
        going_on = lambda: time.perf_counter() < began + 60 * minutes  # noqa: E731
        some = [random.Random(seed + number) for number in range(8)]
        threads = [threading.Thread(target=partial(client, engine, one, prompts, oracle, going_on, counts)) for one in some]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or engine.busy:
            engine.step()
            if not going_on():
                backend.moods = ("well",)
                backend.turn()
            elif time.perf_counter() > turned + LASTS:
                turned = time.perf_counter()
                backend.turn()
                samples.append(megabytes())
                if len(samples) % 8 == 0:
                    print(f"{turned - began:5.0f} s {samples[-1]:7.1f} MB {sum(counts.values()):7}", file=sys.stderr)
        engines.settle(engine)
        engines.check_pools(engine)
        early = [size for at, size in enumerate(samples) if 60 <= at * LASTS < 120]
        counts["grown"] = statistics.median(samples[-8:]) / statistics.median(early) if early else 1.0
        counts.update({name: engine.counts[name] for name in ("restored_tokens", "failed_restorations", "declined")})
        engine.close()
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", choices=CACHES, default="tiered")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = run(arguments.cache, arguments.minutes, arguments.seed)
    print(arguments.cache, dict(counts))
    return set(counts) & {"wrong"} or counts["grown"] > 1.05


if __name__ == "__main__":
    sys.exit(bool(main()))
