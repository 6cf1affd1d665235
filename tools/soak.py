"""Soak servers over HTTP, with eight clients of which a third hang up: what is wrong, and what is left at the end?

    python -m tools.soak --minutes 10

First chapter 05 with files beyond its limit, then 07 with a storage that lies and hangs. Exits with 1 where a token is not chapter 01's, a
client is refused, a reference, request or copy is left, or (from a minute on) memory at the end is 5 % above that after half of the time.
"""
import argparse
import http.client
import importlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from common.requests import Request
from shell import checkpoint, cli, lesson, server
from shell.frontend import Frontend

COLUMNS = "answered", "restored", "hung up", "wrong", "refused", "left", "MB at half", "MB at the end"
OPTIONS = {"05_bubble_free": "--disk {} --disk-limit 0.02", "07_tiered_storage": "--storage tools.soak:Unreliable --prefetch-threshold 64"}


class Unreliable(dict):
    """A back end that lacks, or has damaged, what it said that it has, and that hangs now and then."""

    def exists(self, keys):
        time.sleep(2.5 * (random.random() < 0.002))
        return [key in self or random.random() < 0.05 for key in keys]

    def get(self, keys):
        return [self.pop(key, None) if random.random() < 0.02 else dict.get(self, key) for key, _ in zip(keys, self.exists(keys))]

    def set(self, keys, values):
        self.exists(keys)
        self.update(zip(keys, (value[random.random() < 0.01 :] for value in values)))
        for key in list(self)[:-600]:
            del self[key]


def ask(port: int, answers: dict, seen: Counter, memory: list, until: float):
    """Be one client until it is time: read an answer, or hang up in line, in the prefill or in the answer."""
    while time.monotonic() < until:
        prompt, connection = random.choice(list(answers)), http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/generate", json.dumps(dict(prompt=prompt, max_tokens=12, temperature=0)))
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
            memory.append(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)


def soak(chapter: str, minutes: float) -> Counter:
    module, parser, rng, seen, memory = importlib.import_module(chapter), cli.parser_for(""), random.Random(0), Counter(), []
    module.add_arguments(parser)
    model, tokenizer, end_tokens = checkpoint.load("classroom", "float32")
    frontend = Frontend(model, tokenizer, end_tokens)
    talks = [lesson.conversation(frontend, rng, rng.randrange(30, 1200)) for _ in range(int(min(60, 6 + 60 * minutes)))]
    requests = [Request(frontend.encode(None, talk[: rng.randrange(1, len(talk) + 1, 2)]), 12, end_tokens=end_tokens) for talk in talks * 2]
    importlib.import_module("01_baseline").Engine(model).generate(requests)
    answers = {tuple(request.tokens[: request.prompt_tokens]): request.new for request in requests}
    with tempfile.TemporaryDirectory() as folder:
        arguments = parser.parse_args(f"--gpu-blocks 320 --cpu-blocks 160 {OPTIONS[chapter]}".format(folder).split())
        engine, listener = module.make_engine(model, arguments), server.listen("127.0.0.1", 0)
        serving = server.Server(engine, frontend, dict(chapter=chapter, model="classroom", device="cpu", dtype="float32"))

        def watch():
            with ThreadPoolExecutor(8) as clients:
                asking = [clients.submit(ask, listener.port, answers, seen, memory, time.monotonic() + 60 * minutes) for _ in range(8)]
            until = time.monotonic() + 60
            while engine.busy and time.monotonic() < until:
                time.sleep(0.1)
            lists = engine.running, engine.waiting, engine.filling, *engine.cache.under_way.values()
            seen["left"] = sum(map(len, lists)) + sum(sum(pool.references) for pool in engine.pools.values())
            serving.close(next((client.exception() for client in asking if client.exception()), None))

        threading.Thread(target=watch).start()
        server.serve(listener, serving)
        engine.close()
    seen["MB at half"], seen["MB at the end"] = (sorted(part)[len(part) // 2] for part in (memory[len(memory) // 2 :][:20], memory[-20:]))
    return seen


def main() -> bool:
    parser, failed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter), False
    parser.add_argument("--minutes", type=float, default=10.0, help="of each chapter (10)")
    minutes = parser.parse_args().minutes
    seen = {chapter: soak(chapter, minutes) for chapter in OPTIONS}
    print("\n" + " " * 18 + "".join(f"{name:>15}" for name in COLUMNS))
    for chapter, counts in seen.items():
        print(f"{chapter:18}" + "".join(f"{counts[name]:15.0f}" for name in COLUMNS))
        grown = minutes >= 1 and counts["MB at the end"] > 1.05 * counts["MB at half"]
        failed |= bool(counts["wrong"] or counts["refused"] or counts["left"] or grown)
    return failed


if __name__ == "__main__":
    sys.exit(main())
