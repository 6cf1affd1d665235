"""Soak two servers over HTTP: eight clients each, of which a third hang up. What is wrong, and what is left at the end?

    python -m tools.soak --minutes 10

Chapter 05 has files beyond its limit, chapter 07 a storage that lies and hangs; both at once, in a process each. Answers are compared with
chapter 01's. Exits with 1 where one is wrong, a client is refused, a reference, request or copy is left, or memory at the end is more than 5 %
above (`--grow`) that after half of the time.
"""
import argparse
import http.client
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

from common.requests import Request
from shell import checkpoint, cli, lesson, server
from shell.frontend import Frontend

CLIENTS, ANSWER = 8, 12  # tokens of an answer
COLUMNS = "answered", "restored", "hung up", "wrong", "refused", "left", "MB at half", "MB at the end"
OPTIONS = {"05_bubble_free": "--disk {} --disk-limit 0.02", "07_tiered_storage": "--storage tools.soak:Unreliable --prefetch-threshold 64"}


class Unreliable(dict):
    """A back end that has not, or damaged, what it said that it has, and that hangs now and then."""

    def hang(self):
        time.sleep(2.5 * (random.random() < 0.002))

    def exists(self, keys):
        self.hang()
        return [key in self or random.random() < 0.05 for key in keys]

    def get(self, keys):
        self.hang()
        return [bytes(9) if random.random() < 0.02 else dict.get(self, key) for key in keys]

    def set(self, keys, values):
        self.hang()
        self.update(zip(keys, values))
        while len(self) > 600:
            del self[next(iter(self))]


def ask(port: int, answers: dict, seen: Counter, until: float, seed: int):
    """Be one client: ask prompts until it is time; read the answer, or hang up in line, in the prefill or in the answer."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        prompt = rng.choice(list(answers))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/generate", json.dumps(dict(prompt=prompt, max_tokens=ANSWER, temperature=0)))
        if rng.random() < 1 / 3:
            time.sleep(rng.choice((0.0, 0.02, 0.2)))
            seen["hung up"] += 1
        else:
            result = json.load(connection.getresponse())
            seen["refused" if "error" in result else "answered"] += 1
            seen["wrong"] += result.get("tokens", answers[prompt]) != answers[prompt]
            seen["restored"] += result.get("source") not in ("miss", "gpu_hit", None)
        connection.close()


def left(engine) -> int:
    """-> how many requests, copies and references there are."""
    counts = [sum(pool.references) for pool in engine.pools.values()] + [len(lane) for lane in engine.cache.under_way.values()]
    return sum(counts) + len(engine.running) + len(engine.waiting) + len(engine.filling)


def watch(serving: server.Server, port: int, answers: dict, seconds: float, seen: Counter):
    """Run the clients, measure memory, and end the server."""
    until, memory = time.monotonic() + seconds, []
    clients = [threading.Thread(target=ask, args=(port, answers, seen, until, seed)) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    while time.monotonic() < until:
        time.sleep(seconds / 200)
        with open("/proc/self/statm") as statm:
            memory.append(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
    for client in clients:
        client.join()
    while serving.engine.busy and time.monotonic() < until + 60:
        time.sleep(0.1)
    seen["left"] = serving.between_steps(lambda: left(serving.engine))
    seen["MB at half"], seen["MB at the end"] = (round(statistics.median(memory[at:][:20])) for at in (len(memory) // 2, -20))
    print(json.dumps([memory[at] for at in range(0, len(memory), 10)]), file=sys.stderr)
    serving.close()


def soak(chapter: str, minutes: float, prompts: int):
    """Run one server in this process, and print what was seen."""
    module, seen, rng = importlib.import_module(chapter), Counter(dict.fromkeys(COLUMNS, 0)), random.Random(0)
    model, tokenizer, end_tokens = checkpoint.load("classroom", "float32")
    frontend, parser = Frontend(model, tokenizer, end_tokens), cli.parser_for("")
    module.add_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        arguments = parser.parse_args(f"--gpu-blocks 320 --cpu-blocks 160 {OPTIONS[chapter]}".format(folder).split())
        talks = [lesson.conversation(frontend, rng, rng.randrange(30, 1200)) for _ in range(prompts // 2)]
        asked = [frontend.encode(None, talk[:end]) for talk in talks for end in (len(talk), len(talk) // 4 * 2 + 1)]
        requests = [Request(prompt, ANSWER, end_tokens=end_tokens) for prompt in asked]
        importlib.import_module("01_baseline").Engine(model).generate(requests)
        answers = {tuple(request.tokens[: request.prompt_tokens]): request.new for request in requests}
        engine, listener = module.make_engine(model, arguments), server.listen("127.0.0.1", 0)
        serving = server.Server(engine, frontend, dict(chapter=chapter, model="classroom", device="cpu", dtype="float32"))
        threading.Thread(target=watch, args=(serving, listener.port, answers, 60 * minutes, seen)).start()
        server.serve(listener, serving)
        engine.close()
    print(json.dumps(seen))


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--prompts", type=int, default=120, help="that chapter 01 answers first (120)")
    parser.add_argument("--grow", type=float, default=0.05, help="share by which memory may be above that at half (0.05)")
    parser.add_argument("--only", choices=OPTIONS, help="this chapter, in this process, whose counts it prints as JSON")
    arguments = parser.parse_args()
    if arguments.only:
        return soak(arguments.only, arguments.minutes, arguments.prompts)
    command = [sys.executable, "-m", "tools.soak", "--minutes", str(arguments.minutes), "--prompts", str(arguments.prompts), "--only"]
    running = [subprocess.Popen([*command, chapter], stdout=subprocess.PIPE, text=True) for chapter in OPTIONS]
    failed = False
    print(f"{'':18}" + "".join(f"{name:>15}" for name in COLUMNS))
    for chapter, process in zip(OPTIONS, running):
        seen = Counter(json.loads(process.communicate()[0].splitlines()[-1]))
        print(f"{chapter:18}" + "".join(f"{seen[name]:15}" for name in COLUMNS))
        grown = seen["MB at the end"] > (1 + arguments.grow) * seen["MB at half"]
        failed |= bool(seen["wrong"] or seen["refused"] or seen["left"] or grown or not seen["restored"])
    return failed


if __name__ == "__main__":
    sys.exit(main())
