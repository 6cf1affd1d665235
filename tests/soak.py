"""Run servers under load for minutes: `python -m tests.soak --minutes 10`.

Eight clients ask over HTTP, and hang up on a third of their requests. Copies and reads of storage fail or are late.

The exit code is 1 if a token differs from chapter 01's, if a request is refused, or if a reference, request or copy is
left at the end. In runs of a minute or more it is also 1 if the memory in use grows by more than 5 % in the second half."""
import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

from shell.frontend import Frontend
from shell.random_models import byte_tokenizer
from tests.support.engines import ORACLE, check_pools, draw, make, tiny_model
from tests.support.faults import faulty
from tests.support.serving import Client, serving

CACHES, BLOCKS, NEW = ("files", "tiered"), 80, 12  # device blocks; tokens of an answer


def ask(client: Client, talks: list, seen: Counter, half: float, end: float):
    """Run one client until time `end`: it reads each answer, or hangs up while queued, in the prefill or in the answer.

    `seen`: counts of events, shared by all clients. `half`, `end`: times of time.monotonic()."""
    while time.monotonic() < end:
        prompt = random.choice(talks)
        connection = client.send("/generate", dict(prompt=prompt, max_tokens=NEW))
        if random.random() < 1 / 3:
            time.sleep(random.choice((0.0, 0.02, 0.2)))
            seen["hung up"] += 1
        else:
            result = json.load(connection.getresponse())
            seen["refused" if "error" in result else "answered"] += 1
            answer = SimpleNamespace(tokens=prompt, prompt_tokens=len(prompt), max_tokens=NEW, new=result.get("tokens"))
            seen["wrong"] += "error" not in result and ORACLE.judge(answer) == "wrong"
            seen["restored"] += result.get("source") not in ("miss", "gpu_hit", None)
        connection.close()
        with open("/proc/self/statm") as statm:
            seen["MB at half" if time.monotonic() < half else "MB at the end"] = int(statm.read().split()[1]) // 256


def soak(cache: str, minutes: float) -> Counter:
    """Run a server with a Cache of support/engines.py. Returns: counts of events. Fails if anything is left."""
    rng, seen, engine = random.Random(0), Counter(), make(cache, BLOCKS)
    talks = [draw(rng, rng.randrange(30, 480)) for _ in range(20)]
    for talk in talks:
        ORACLE.answer(talk, NEW)
    with faulty(rng, failing=0.02, late=0.1, noisy=3), serving(Frontend(tiny_model(), byte_tokenizer(300), ()), engine) as client:
        now = time.monotonic()
        told = client, talks, seen, now + 30 * minutes, now + 60 * minutes
        clients = [threading.Thread(target=ask, args=told) for _ in range(8)]
        for step in (threading.Thread.start, threading.Thread.join):
            list(map(step, clients))
    check_pools(engine)
    engine.close()
    return seen


def main():
    parser, failed = argparse.ArgumentParser(description=__doc__), False
    parser.add_argument("--minutes", type=float, default=10.0, help="for each Cache (10)")
    minutes = parser.parse_args().minutes
    for cache in CACHES:
        seen = soak(cache, minutes)
        print(f"{cache}: " + ", ".join(f"{count} {name}" for name, count in sorted(seen.items())))
        failed |= seen["wrong"] + seen["refused"] > 0 or minutes >= 1 and seen["MB at the end"] > 1.05 * seen["MB at half"]
    sys.exit(failed)


if __name__ == "__main__":
    main()
