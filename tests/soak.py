"""Run servers under load for minutes: `python -m tests.soak --minutes 10`.

Eight clients ask over HTTP, and hang up on a third of their requests.

Chapter 05 runs first, with more data than its limit for files allows, then chapter 07 with a storage that lies and
hangs. The exit code is 1 if a token differs from chapter 01's, if a request is refused, or if a reference, request or
copy is left at the end. In runs of a minute or more it is also 1 if the memory in use grows by more than 5 % in the
second half."""
import argparse
import importlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter

from common.requests import Request
from shell import checkpoint, cli, lesson
from shell.frontend import Frontend
from tests.support.serving import Client, serving

OPTIONS = {"05_bubble_free": "--disk {} --disk-limit 0.02", "07_tiered_storage": "--storage tests.soak:Unreliable --prefetch-threshold 64"}


class Unreliable(dict):
    """A storage back end that reports keys it does not have, damages or loses values, and sometimes hangs."""

    def exists(self, keys):
        time.sleep(2.5 * (random.random() < 0.002))
        return [key in self or random.random() < 0.05 for key in keys]

    def get(self, keys):
        return [self.pop(key, None) if random.random() < 0.02 else dict.get(self, key) for key, _ in zip(keys, self.exists(keys))]

    def set(self, keys, values):
        self.update(zip(keys, (value[random.random() < 0.01 :] for value in values)))
        for key in list(self)[:-600]:
            del self[key]


def ask(client: Client, answers: dict, seen: Counter, half: float, end: float):
    """Run one client until time `end`: it reads each answer, or hangs up while queued, in the prefill or in the answer.

    `answers`: prompt -> expected tokens. `seen`: counts of events, shared by all clients. `half`, `end`: times of
    time.monotonic()."""
    while time.monotonic() < end:
        prompt = random.choice(list(answers))
        connection = client.send("/generate", dict(prompt=prompt, max_tokens=12, temperature=0))
        if random.random() < 1 / 3:
            time.sleep(random.choice((0.0, 0.02, 0.2)))
            seen["hung up"] += 1
        else:
            result = json.load(connection.getresponse())
            seen["refused" if "error" in result else "answered"] += 1
            seen["wrong"] += result.get("tokens", answers[prompt]) != answers[prompt]
            seen["restored"] += result.get("source") not in ("miss", "gpu_hit", None)
        connection.close()
        with open("/proc/self/statm") as statm:
            seen["MB at half" if time.monotonic() < half else "MB at the end"] = int(statm.read().split()[1]) // 256


def soak(chapter: str, minutes: float, folder: str) -> Counter:
    module, parser, rng, seen = importlib.import_module(chapter), cli.parser_for(""), random.Random(0), Counter()
    module.add_arguments(parser)
    frontend = Frontend(*checkpoint.load("classroom", "float32"))
    talks = [lesson.conversation(frontend, rng, rng.randrange(30, 1200)) for _ in range(int(min(60, 3 + 60 * minutes)))]
    requests = [Request(frontend.encode(None, talk[: rng.randrange(1, len(talk) + 1, 2)]), 12, end_tokens=frontend.end_tokens) for talk in talks * 2]
    importlib.import_module("01_baseline").Engine(frontend.model).generate(requests)
    answers = {tuple(request.tokens[: request.prompt_tokens]): request.new for request in requests}
    arguments = parser.parse_args(f"--gpu-blocks 320 --cpu-blocks 160 {OPTIONS[chapter]}".format(folder).split())
    engine, now = module.make_engine(frontend.model, arguments), time.monotonic()
    with serving(frontend, engine) as client:
        told = client, answers, seen, now + 30 * minutes, now + 60 * minutes
        clients = [threading.Thread(target=ask, args=told) for _ in range(8)]
        for step in (threading.Thread.start, threading.Thread.join):
            list(map(step, clients))
        for _ in range(600):
            time.sleep(0.1 * engine.busy)
        lists = engine.running, engine.waiting, engine.filling, *engine.lower_tier.cache.in_flight.values()
        seen["left"] = sum(map(len, lists)) + sum(sum(pool.references) for pool in engine.pools.values())
    engine.close()
    return seen


def main():
    parser, failed = argparse.ArgumentParser(description=__doc__), False
    parser.add_argument("--minutes", type=float, default=10.0, help="for each chapter (10)")
    minutes = parser.parse_args().minutes
    for chapter in OPTIONS:
        with tempfile.TemporaryDirectory() as folder:
            seen = soak(chapter, minutes, folder)
        print(chapter, ", ".join(f"{count} {name}" for name, count in sorted(seen.items())))
        failed |= seen["answered"] == 0 or seen["wrong"] + seen["refused"] + seen["left"] > 0
        failed |= minutes >= 1 and seen["MB at the end"] > 1.05 * seen["MB at half"]
    sys.exit(failed)


if __name__ == "__main__":
    main()
