"""Chapters 02 to 07 as a user sees them: from outside, in conversations, beside others, and under load.

    python -m benchmarks.outside                                   all; results in benchmarks/results/
    python -m benchmarks.outside --only servers --model classroom --rounds 3

servers         a server each of 03, 04 and 05 with default options, started one after the other, and of 01,
                which computes: TTFT of a question behind a history that has left the device, as the client
                of a stream sees it, and as the server does. All but the one that is asked are stopped.
conversations   conversations of several turns that do not fit into the device together, in shuffled order,
                and questions about documents, popular (Zipf) or all alike: what is found, and TTFT. Chapter 06
                has storage as fast as the link, 07 half the host memory of 03 and files; `transformers` keeps
                the cache of each text that the device has room for, the least recently used dropped first.
beside          TBT of eight that decode while a history comes back every two seconds, or as soon after as
                it can. Bound: TBT with all on the device, over the share of the processor that is left to
                them.
arrivals        TTFT of questions about documents that do not fit into the device, which arrive at random,
                at 0.25 to 2 times the rate at which no cache is saturated. One run: --rounds does not
                count.

All but `servers` are in this process, over one link. "no cache" is chapter 02 where nothing is ever found.
"""

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import generate, spread, write  # noqa: E402
from benchmarks.both_ends import both_ends  # noqa: E402
from benchmarks.planned import QUESTION, bubble_free, draw, hidden_states, offload, paged  # noqa: E402
from benchmarks.reference import one_sentence, reference_model, set_imports_aside  # noqa: E402
from benchmarks.tiered import tiered  # noqa: E402
from common import checkpoint, cli, lesson, store  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import HungUp, Request  # noqa: E402
from common.restoring import Cache  # noqa: E402
from common.server import Server  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PARTS = {  # on which models
    "servers": ["classroom", "random:small"],
    "conversations": ["classroom"],
    "beside": ["classroom", "random:small"],
    "arrivals": ["classroom"],
}
CHAPTERS = "01_baseline", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free"
# model -> (GB/s of the link, tokens of history, 05's TTFT over 03's at most)
ASKED = {
    "classroom": [("auto", 1000, 1.03), ("auto", 1600, 1.03)],
    "random:small": [("auto", 1024, 0.85), ("0.1", 1024, 0.67)],
}
AT_REST, BETWEEN = 30.0, 3.0  # seconds to wait for idle measurements at most: at first, before a question
TALKS, TURNS, SAID, ANSWER = 8, 12, (100, 1100), 24  # conversations, turns, tokens at first, of an answer
DOCUMENTS, LENGTH, ASKS = 12, 800, 48  # documents, tokens of one, questions about all
DECODING, EVERY, WINDOW = 8, 2.0, 8.0  # requests, seconds, seconds of one measurement
RATES = {0.25: 14.0, 0.5: 10.0, 1.0: 8.0, 2.0: 6.0}  # share of saturation -> seconds of arrivals
DRAIN = 3.0  # seconds behind the last arrival


# 1. From outside -------------------------------------------------------------------------------


def post(port: int, path: str, body: dict) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


class Process:
    """A chapter's server, as a user starts it."""

    def __init__(self, chapter: str, *options: str):
        command = [sys.executable, f"{chapter}.py", "--port", "0", *options]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.process = subprocess.Popen(command, cwd=ROOT, **pipes)
        said = self.process.stdout.readline()  # serves MODEL on http://HOST:PORT
        self.port = int(re.search(r"http://[^:]+:(\d+)", said)[1])

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=600) as reply:
            return json.loads(reply.read())

    @property
    def at_rest(self) -> bool:
        return not self.get("/health")["counters"].get("doubtful")

    def ask(self, tokens: list[int], evict: bool = True) -> dict:
        """Ask for one token -> what the server says of it, its plan, and `client_ms`."""
        if evict:
            post(self.port, "/evict", dict(tier="device"))
        body = json.dumps(dict(prompt=tokens, max_tokens=1, temperature=0, stream=True)).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body)
        began = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=600) as reply:
            events = (line for line in reply if line.startswith(b"data: "))
            next(events)  # the role; nothing is computed yet
            next(events)
            client_ms = 1e3 * (time.perf_counter() - began)
            reply.read()
        own = self.get("/state")["finished"][-1]
        return dict(own, client_ms=client_ms, plan=self.get(f"/timelines/{own['id']}")["plan"])

    @contextmanager
    def alone(self, seconds: float):
        """Let it go on; the others are stopped -> whether it has agreed with itself on what it measures while
        idle, for which it has so many seconds."""
        self.process.send_signal(signal.SIGCONT)
        until = time.monotonic() + seconds
        while not (agreed := self.at_rest) and time.monotonic() < until:
            time.sleep(0.2)
        yield agreed
        time.sleep(0.5)  # what was asked is kept meanwhile
        self.process.send_signal(signal.SIGSTOP)

    def close(self):
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        self.process.wait()


def servers(model, name: str, device: str, rounds: int) -> list[dict]:
    rng, rows = random.Random(0), []
    for link, tokens, at_most in ASKED.get(name, [("auto", 1024, 1.03)]):
        if link != "auto" and device == "cuda":
            continue  # there it is real
        with ExitStack() as stack:
            started = {}
            for chapter in CHAPTERS:
                options = ["--link", link] if chapter > "02" else []
                process = Process(chapter, "--model", name, "--device", device, *options)
                stack.callback(process.close)
                with process.alone(AT_REST):
                    started[chapter[:2]] = process
            taken, agreed = ask_in_turn(started, partial(draw, rng, model), tokens, rounds)
        client = {number: [reply["client_ms"] for reply in replies] for number, replies in taken.items()}
        own = {number: [reply["ttft_ms"] for reply in replies] for number, replies in taken.items()}
        ratios = {number: [a / b for a, b in zip(client[number], client["03"])] for number in ("04", "05")}
        found = {number: min(map(found_by, replies)) for number, replies in taken.items()}
        rows.append(dict(
            history_tokens=tokens, link=link, at_rest=agreed, at_most=at_most,
            client_ms={number: spread(samples) for number, samples in client.items()},
            own_ms={number: spread(samples) for number, samples in own.items()},
            of_03={number: spread(samples) for number, samples in ratios.items()},
            found=found,
            decisions={number: replies[-1]["decisions"] for number, replies in taken.items()},
            **of_plans(len(model.layers), [reply for reply in taken["05"] if reply["plan"]])))  # fmt: skip
    return rows


def ask_in_turn(started: dict, words, tokens: int, rounds: int) -> tuple[dict, float]:
    """-> what each server said, each time to another question, and how often all were at rest."""
    agreed, history = [], words(tokens)
    for number in ("03", "04", "05"):
        with started[number].alone(0):
            started[number].ask(history, evict=False)

    def once(number: str) -> dict:
        with started[number].alone(BETWEEN) as at_rest:
            agreed.append(at_rest)
            return started[number].ask(history + words(QUESTION), evict=number != "01")

    taken = lesson.in_turn({number: partial(once, number) for number in ("03", "04", "05")}, rounds)
    return {**taken, **lesson.in_turn({"01": partial(once, "01")}, 1)}, statistics.mean(agreed)


def found_by(reply: dict) -> int:
    return sum(reply["found"].values())


def of_plans(layers: int, replies: list[dict]) -> dict:
    """What chapter 05 had planned for each answer, and the bound of all plans at the costs that it knew."""
    plans = [reply["plan"] for reply in replies]
    if not plans:
        return dict(plans=[])  # all was computed
    bounds = []
    for plan in plans:
        costs = {name: ms / 1e3 for name, ms in plan["costs_ms"].items()}
        bounds.append(1e3 * bubble_free.bound_seconds(layers, bubble_free.Costs(**costs)))
    over = {"predicted": [plan["predicted_ms"] for plan in plans], "bound": bounds}
    taken = [reply["client_ms"] for reply in replies]
    figures = dict(plans=sorted({plan["rows"][0][1] for plan in plans}), costs_ms=plans[-1]["costs_ms"])
    for name, samples in over.items():
        figures[f"{name}_ms"] = spread(samples)
        figures[f"over_{name}"] = spread([a / b for a, b in zip(taken, samples)])
    return figures


# 2. In this process ----------------------------------------------------------------------------


class Bench:
    """A model, and one link for all engines on it."""

    def __init__(self, model, reference=None):
        """`reference`: the same model in `transformers`, for `conversations`."""
        self.model, self.reference, self.rng, self.salts = model, reference, random.Random(0), count()
        link = links.bandwidth(model)
        self.bandwidth = link and statistics.median(link.measure() for _ in range(5))

    def prompt(self, tokens: int) -> list[int]:
        return draw(self.rng, self.model, tokens)

    def engines(self, device: int, kept: int, folder: str | None = None) -> dict:
        """Engines with room for so many tokens on the device, and for `kept` behind it; 06 and 07 too, with a
        `folder` for the files of 07."""
        blocks, chunks = -(-device // 16), -(-kept // 64)
        caches = {"no cache": Cache(), "02": Cache(), "03": offload.HostCache(4 * chunks, self.bandwidth),
                  "04": hidden_states.HiddenCache(chunks, self.bandwidth),
                  "05": bubble_free.PlannedCache(3 * chunks, self.bandwidth)}  # fmt: skip
        if folder is not None:
            files = store.Storage(store.open_backend(f"file:{folder}", {}), "files")
            config = self.model.config
            size = 64 * chunks * config.kv_numbers_per_token * self.model.dtype.itemsize
            caches["06"] = both_ends.BidirectionalCache(
                store.StoredChunks(store.ModelledStorage(size, self.bandwidth or 1e10)))
            caches["07"] = tiered.TieredCache(2 * chunks, self.bandwidth, files)
        make = lambda cache: paged.Engine(paged.Runner(self.model, blocks), cache)  # noqa: E731
        return {name: make(cache) for name, cache in caches.items()}

    def request(self, system: str, prompt: list[int], new: int) -> Request:
        """Where there is no cache, nothing is shared."""
        options = dict(cache_salt=str(next(self.salts))) if system == "no cache" else {}
        return Request(prompt, new, options=options)

    def answer(self, engine, system: str, prompt: list[int], new: int) -> Request:
        """Ask when nothing is under way."""
        lesson.settle(engine)
        return engine.generate([self.request(system, prompt, new)])[0]


@contextmanager
def serving(engine, patience: float = 1.0):
    """The server's thread steps an engine, at rest; at the end, those that are not answered are cancelled."""
    server = Server(engine, None, {})
    until = time.monotonic() + patience
    while engine.restorer.doubtful and time.monotonic() < until:
        time.sleep(0.05)
    try:
        yield server
    finally:
        for request in [*engine.running, *engine.waiting]:
            engine.cancel(request, HungUp("The measurement is over."))
        server.close()
        server.thread.join()


def percentiles(samples: list[float], *shares: int) -> dict:
    values = numpy.percentile(samples, shares)
    return {f"p{share}": float(value) for share, value in zip(shares, values)} | dict(samples=samples)


def zipf(rng, exponent: float, asks: int) -> list[int]:
    """Which document is asked about; the first is the most popular."""
    return rng.choices(range(DOCUMENTS), [(rank + 1) ** -exponent for rank in range(DOCUMENTS)], k=asks)


def read(bench: Bench, engines: dict, documents: list[list[int]]):
    """Every engine has read them all, the most popular last."""
    for document in reversed(documents):
        for name, engine in engines.items():
            bench.answer(engine, name, document, 1)


class Answer(NamedTuple):
    ttft_ms: float
    found: int  # tokens of the prompt
    restored: int  # of them, in host memory or in storage
    tokens: list[int]


class Transformers:
    """`transformers` with a DynamicCache for each text, cut to what the next prompt shares with it."""

    def __init__(self, model, device: int):
        self.model, self.device = model, device
        model.generation_config.eos_token_id = None  # all answers are as long
        self.caches: OrderedDict[int, tuple] = OrderedDict()  # text -> (cache, tokens in it), least recently used first

    def ask(self, text: int, prompt: list[int], new: int) -> Answer:
        cache, known = self.caches.pop(text, (None, []))
        found = next((at for at, (a, b) in enumerate(zip(known, prompt[:-1])) if a != b), min(len(known), len(prompt) - 1))
        if not found:
            cache = DynamicCache(config=self.model.config)
        elif found < len(known):
            cache.crop(found - len(known))
        began = time.perf_counter()
        times, tokens = generate(self.model, prompt, new, past_key_values=cache)
        self.caches[text] = cache, (prompt + tokens)[:-1]
        while sum(len(tokens) for _, tokens in self.caches.values()) > self.device and len(self.caches) > 1:
            self.caches.popitem(last=False)
        return Answer(1e3 * (times[0] - began), found, 0, tokens)


def conversations(bench: Bench, rounds: int) -> list[dict]:
    """Each round has other texts, and engines of its own."""
    rng, rows = bench.rng, []
    for what, exponent in {
        f"{TALKS} conversations of {TURNS} turns": None,
        f"{DOCUMENTS} documents, Zipf 1": 1.0,
        f"{DOCUMENTS} documents, all alike": 0.0,
    }.items():
        asked, could, tokens, device = {}, 0, [], []
        for _ in range(rounds):
            if exponent is None:
                texts = [bench.prompt(rng.randint(*SAID)) for _ in range(TALKS)]
                order = [talk for talk in range(TALKS) for _ in range(TURNS)]
                rng.shuffle(order)
                tokens.append(sum(map(len, texts)) + len(order) * (QUESTION // 2 + ANSWER))
            else:
                texts, order = [bench.prompt(LENGTH) for _ in range(DOCUMENTS)], zipf(rng, exponent, ASKS)
                tokens.append(DOCUMENTS * LENGTH)
            device.append(max(tokens[-1] // 4, max(map(len, texts)) + TURNS * (QUESTION + ANSWER)))
            could += asked_in_turn(bench, texts, order, (device[-1], tokens[-1]), exponent is None, asked)
        rows.append(dict(what=what, rounds=rounds, **summary(asked, could, tokens, device)))
    return rows


def summary(asked: dict[str, list], could: int, tokens: list[int], device: list[int]) -> dict:
    """`asked`: system -> its answer and the length of the prompt, each time."""
    prompts = sum(length for _, length in asked["02"])
    times = {name: [answer.ttft_ms for answer, _ in each] for name, each in asked.items()}
    expected = [answer.tokens for answer, _ in asked["no cache"]]
    systems = {}
    for name, each in asked.items():
        systems[name] = dict(
            found=sum(answer.found for answer, _ in each) / prompts,
            restored=sum(answer.restored for answer, _ in each),
            equal=sum(answer.tokens == tokens for (answer, _), tokens in zip(each, expected)),
            ttft_ms=percentiles(times[name], 50, 99))  # fmt: skip
    over = {name: spread([a / b for a, b in zip(times[name], times["03"])]) for name in times}
    return dict(tokens=round(statistics.mean(tokens)), device_tokens=round(statistics.mean(device)),
                requests=len(expected), could_be_found=could / prompts, systems=systems, of_03=over)  # fmt: skip


def asked_in_turn(bench: Bench, texts: list, order: list[int], room: tuple[int, int], grows: bool, asked: dict) -> int:
    """Ask about the texts in this order, every system in turn, and add what was answered to `asked`; a
    conversation `grows` with each answer -> the tokens of all prompts that were there before, in whatever memory."""
    device, tokens = room
    could, begun, texts = 0, set(), [list(text) for text in texts]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        engines = bench.engines(device, tokens + len(order) * (QUESTION + ANSWER + 64), folder)
        theirs = Transformers(bench.reference, device)
        if not grows:
            read(bench, engines, texts)
            for number in reversed(range(len(texts))):
                theirs.ask(number, texts[number], 1)
        for engine in engines.values():
            with serving(engine):
                pass  # it measures what it measures while idle
        for number in order:
            before = len(texts[number])
            if number in begun or not grows:
                could += before - grows  # the last token of an answer has not been computed
                texts[number] += bench.prompt(QUESTION // 2)
            begun.add(number)
            prompt, new = list(texts[number]), ANSWER if grows else 2
            for name, engine in engines.items():
                request = bench.answer(engine, name, prompt, new)
                restored = sum(request.found.get(tier, 0) for tier in ("cpu", "storage"))
                answer = Answer(request.outcome.ttft_ms, request.cached_tokens, restored, request.new)
                asked.setdefault(name, []).append((answer, len(prompt)))
            asked.setdefault("transformers", []).append((theirs.ask(number, prompt, new), len(prompt)))
            texts[number] = prompt + asked["no cache"][-1][0].tokens if grows else prompt[:before]
        for engine in engines.values():
            engine.close()
    return could


def beside(bench: Bench, rounds: int) -> list[dict]:
    context, most = bench.model.config.max_position_embeddings, DECODING * 512
    history = bench.prompt(min(1900, context - 2 * QUESTION))
    engines = bench.engines(2 * context + most, 4 * context + 4 * most)
    read(bench, engines, [history])
    ways = {name: partial(window, bench, name, engine, history) for name, engine in engines.items()}
    taken, rows = lesson.in_turn(ways, rounds), []
    means = {name: [each["mean"] for each in found] for name, found in taken.items()}
    for name, found in taken.items():
        busy = statistics.median(each["processor"] for each in found)
        over = {f"over_{of}": spread([a / b for a, b in zip(means[name], means[of])]) for of in ("02", "03")}
        rows.append(dict(
            system=name, history_tokens=len(history), tbt_mean_ms=spread(means[name]), **over,
            tbt_p99_ms=spread([each["p99"] for each in found]), processor=busy,
            bound_ms=statistics.median(means["02"]) / (1 - busy) if busy < 1 else None,
            ttft_ms=spread([ms for each in found for ms in each["ttft_ms"]]),
            came_back=sum(len(each["ttft_ms"]) for each in found),
            restored=sum(each["restored"] for each in found),
            bytes_in=sum(each["bytes_in"] for each in found)))  # fmt: skip
        engines[name].close()
    return rows


def window(bench: Bench, name: str, engine, history: list[int]) -> dict:
    """Eight decode for a while; the history comes back meanwhile."""
    decoding, over, back, bytes_before = {}, [], [], engine.counts["bytes_in"]
    with serving(engine) as server:

        def submit(prompt: list[int], new: int) -> Request:
            request = bench.request(name, prompt, new)
            engine.submit(request)
            return request

        def decode():
            for place in range(DECODING):
                if place not in decoding or decoding[place].outcome is not None:
                    new = submit(bench.prompt(QUESTION), 300 + 20 * place)  # they do not end together
                    over.append(new)
                    decoding[place] = new

        decode()
        while not all(request.new for request in decoding.values()):
            time.sleep(0.01)
        began = due = time.perf_counter()
        while (now := time.perf_counter()) < began + WINDOW or not any(request.new for request in back):
            decode()
            if now >= due and (not back or back[-1].outcome is not None):
                if name != "02":
                    server.between_steps(partial(engine.evict, "device"))
                back.append(submit(history + bench.prompt(QUESTION), 1))
                due += EVERY * (1 + (now - due) // EVERY)
            time.sleep(0.01)
        ended = time.perf_counter()
    spans = [[at for at in request.times if began <= at <= ended] for request in over]
    gaps = [1e3 * (b - a) for times in spans for a, b in zip(times, times[1:])]
    answered = [request for request in back if request.new and request.times[0] <= ended]
    busy = processor_seconds(engine, name, len(history)) * len(answered) / (ended - began)
    return dict(
        mean=statistics.mean(gaps), p99=float(numpy.percentile(gaps, 99)), processor=busy,
        ttft_ms=[1e3 * (request.times[0] - request.received) for request in answered],
        restored=sum(request.found.get("cpu", 0) > 0 for request in answered),
        bytes_in=engine.counts["bytes_in"] - bytes_before)  # fmt: skip


def processor_seconds(engine, name: str, tokens: int) -> float:
    """Estimate what bringing back a history takes of the processor."""
    if name == "no cache":
        return engine.restorer.seconds_to_compute(0, tokens)
    if name in ("02", "03"):
        return 0.0
    letters = engine.cache.store.letters if name == "05" else "R" + "H" * (len(engine.model.layers) - 1)
    recomputed, projecting = letters.count("R"), engine.cache.seconds_to_project(tokens)
    recompute = engine.restorer.seconds_to_compute(0, tokens) / len(letters) if recomputed > 1 else 0.0
    return max(0, recomputed - 1) * recompute + (letters.count("H") + (recomputed > 0)) * projecting


def arrivals(bench: Bench, rounds: int) -> list[dict]:
    rng, rows, new = bench.rng, [], 8
    engines = bench.engines(DOCUMENTS * LENGTH // 4, 4 * DOCUMENTS * LENGTH)
    documents = [bench.prompt(LENGTH) for _ in range(DOCUMENTS)]
    read(bench, engines, documents)

    def at_once() -> float:
        requests = [bench.request("no cache", document, new) for document in documents[:8]]
        began = time.perf_counter()
        engines["no cache"].generate(requests)
        return (time.perf_counter() - began) / len(requests)

    service = statistics.median(at_once() for _ in range(3))
    for rate, seconds in RATES.items():
        times = [rng.expovariate(rate / service)]
        while times[-1] < seconds:
            times.append(times[-1] + rng.expovariate(rate / service))
        about = zipf(rng, 1.0, len(times))
        prompts = [documents[one] + bench.prompt(QUESTION // 2) for one in about]
        for name, engine in engines.items():
            waits, requests = arrive(bench, name, engine, times, prompts, new)
            found = sum(request.cached_tokens for request in requests) / sum(map(len, prompts))
            decisions = [words for request in requests for words in request.decisions]
            rows.append(dict(
                system=name, of_saturation=rate, requests_per_second=rate / service, requests=len(times),
                unanswered=sum(not request.new for request in requests), ttft_ms=percentiles(waits, 50, 90),
                found=found, restored=sum(request.found.get("cpu", 0) for request in requests),
                computed=[words for words in decisions if words.endswith("computed")][:5]))  # fmt: skip
    for engine in engines.values():
        engine.close()
    return rows


def arrive(bench: Bench, name: str, engine, times: list[float], prompts: list, new: int):
    """Submit each prompt at its time -> ms to its first token, or to the end; the requests."""
    with serving(engine) as server:
        began, requests = time.perf_counter(), []
        for at, prompt in zip(times, prompts):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            requests.append(bench.request(name, prompt, new))
            server.engine.submit(requests[-1])
        end = began + times[-1] + DRAIN
        while time.perf_counter() < end and any(request.outcome is None for request in requests):
            time.sleep(0.01)
        ended = time.perf_counter()
        firsts = [request.times[0] if request.new else ended for request in requests]
    return [1e3 * (first - began - at) for first, at in zip(firsts, times)], requests


# 3. Main ---------------------------------------------------------------------------------------


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    device, found = checkpoint.pick_device(arguments.device), []
    set_imports_aside()
    for part, models in PARTS.items():
        for name in [arguments.model] if arguments.model else models:
            if arguments.only not in (None, part):
                continue
            model, *_ = checkpoint.load(name, arguments.dtype, device)
            if part == "servers":
                rows = servers(model, name, device, arguments.rounds)
            else:
                reference = reference_model(name, model.dtype, device) if part == "conversations" else None
                rows = globals()[part](Bench(model, reference), arguments.rounds)
            found.append(dict(claim=part, model=name, rows=rows))
            for row in rows:
                print(part, name, row, flush=True)
            write("outside", device, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
