"""Chapters 02 to 07 as a user sees them: in conversations, and as servers under load.

    python -m benchmarks.outside                                   all; results in benchmarks/results/
    python -m benchmarks.outside --only sessions

conversations   conversations of several turns that do not fit into the device together, in shuffled order,
                and questions about documents, popular (Zipf) or all alike: what is found, and TTFT. All engines in one
                process, over one link. "no cache" is chapter 02 where nothing is ever found. Once.
sessions        sixteen sessions at once (HCache, Figure 9), each system a server of its own that clients ask over HTTP.
                The device loses a session's KV cache before each round, except in 02, which keeps it: the ideal. Rounds
                arrive as a Poisson process, whose rate rises until TTFT diverges; each system plays the same rounds in
                turn, in three runs. TTFT counts from the moment when a round was due.
"""

import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count

import numpy

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, ttft
from benchmarks.planned import CHAPTERS, QUESTION, both_ends, engine_of, hidden_states, offload, planned
from benchmarks.tiered import tiers
from common import store
from common.requests import Request
from shell import backends, handle_signals, hardware, lesson

TALKS, TURNS, SAID, ANSWER = 8, 5, (100, 1100), 8  # conversations, turns, tokens at first, of an answer
DOCUMENTS, LENGTH, ASKS = 8, 800, 32  # documents, tokens of one, questions about all
SESSIONS, RUNS, ROUNDS, BEGINS = 16, 3, 24, 800  # at once; rounds of all of them at one rate; tokens of a history
RATES, DIVERGED = [2.0 * 1.6**step for step in range(6)], 4.0  # rounds a second; median TTFT over that at the lowest rate
SYSTEMS = "no cache", "02", "03", "04", "05", "06", "07"


# 1. Engines, and asking them --------------------------------------------------------------------------------

class Bench:
    """A model, and one link for all engines on it."""

    def __init__(self, model):
        self.model, self.rng, self.salts = model, random.Random(0), count()
        self.prompt = partial(draw, self.rng, model)  # (tokens)
        link = hardware.bandwidth(model)
        self.bandwidth = link and link.value

    def engines(self, device: int, kept: int, folder: str | None = None) -> dict:
        """Engines with room for so many tokens on the device, and for `kept` behind it; 06 and 07 too, with a
        `folder` for the files of 07."""
        blocks, host_blocks = -(-device // 16), -(-kept // 16)
        caches = {"no cache": None, "02": None, "03": offload.HostCache(host_blocks, self.bandwidth),
                  "04": hidden_states.HiddenCache(host_blocks, self.bandwidth),
                  "05": planned.PlannedCache(3 * host_blocks, self.bandwidth)}  # fmt: skip
        if folder is not None:
            files = store.Storage(backends.open_backend(f"file:{folder}", {}), "files")
            config = self.model.config
            size = 16 * host_blocks * config.kv_numbers_per_token * self.model.dtype.itemsize
            caches["06"] = both_ends.BidirectionalCache(
                store.StoredChunks(both_ends.ModelledStorage(size, self.bandwidth or 1e10)))
            caches["07"] = tiers.TieredCache(host_blocks // 2, self.bandwidth, files)
        return {name: engine_of(self.model, blocks, cache) for name, cache in caches.items()}

    def request(self, system: str, prompt: list[int], new: int) -> Request:
        """Where there is no cache, nothing is shared."""
        options = dict(cache_salt=str(next(self.salts))) if system == "no cache" else {}
        return Request(prompt, new, options=options)

    def answer(self, engine, system: str, prompt: list[int], new: int) -> Request:
        """Ask when nothing is under way."""
        lesson.wait_until_idle(engine)
        return engine.generate([self.request(system, prompt, new)])[0]


def percentiles(samples: list[float], *shares: int) -> dict:
    values = numpy.percentile(samples, shares)
    return {f"p{share}": float(value) for share, value in zip(shares, values)} | dict(samples=samples)


def read(bench: Bench, engines: dict, documents: list[list[int]]):
    """Every engine has read them all, the most popular last."""
    for document in reversed(documents):
        for name, engine in engines.items():
            bench.answer(engine, name, document, 1)


# 2. In conversations ----------------------------------------------------------------------------------------

def conversations(bench: Bench, _):
    for what, exponent in {
        f"{TALKS} conversations of {TURNS} turns": None,
        f"{DOCUMENTS} documents, Zipf 2": 2.0,
        f"{DOCUMENTS} documents, all alike": 0.0,
    }.items():
        if exponent is None:
            texts = [bench.prompt(bench.rng.randint(*SAID)) for _ in range(TALKS)]
            order = [talk for talk in range(TALKS) for _ in range(TURNS)]
            bench.rng.shuffle(order)
            tokens = sum(map(len, texts)) + len(order) * (QUESTION // 2 + ANSWER)
        else:
            texts, popular = [bench.prompt(LENGTH) for _ in range(DOCUMENTS)], [(at + 1) ** -exponent for at in range(DOCUMENTS)]
            order = bench.rng.choices(range(DOCUMENTS), popular, k=ASKS)
            tokens = DOCUMENTS * LENGTH
        device = max(tokens // 4, max(map(len, texts)) + TURNS * (QUESTION + ANSWER))
        asked, could = asked_in_turn(bench, texts, order, (device, tokens), exponent is None)
        yield dict(what=what, tokens=tokens, device_tokens=device, **summary(asked, could))


def summary(asked: dict[str, list[Request]], could: int) -> dict:
    """`asked`: system -> its requests."""
    systems, over, expected = {}, {}, [one.new for one in asked["no cache"]]
    prompts = sum(one.prompt_tokens for one in asked["03"])
    for name, each in asked.items():
        systems[name] = dict(
            found=sum(one.cached_tokens for one in each) / prompts, ttft_ms=percentiles(ttft(each), 50, 99),
            restored=sum(one.found.get("cpu", 0) + one.found.get("storage", 0) for one in each),
            equal=sum(one.new == tokens for one, tokens in zip(each, expected)))  # fmt: skip
        over[name] = ratio(ttft(each), ttft(asked["03"]))
    return dict(requests=len(expected), could_be_found=could / prompts, systems=systems, of_03=over)


def asked_in_turn(bench: Bench, texts: list, order: list[int], room: tuple[int, int], grows: bool) -> tuple[dict, int]:
    """Ask about the texts in this order, every system in turn; a conversation `grows` with each answer -> what each system
    answered, and the tokens of all prompts that were there before, in whatever memory."""
    device, tokens = room
    asked, could, begun, texts = {}, 0, set(), [list(text) for text in texts]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        engines = bench.engines(device, tokens + len(order) * (QUESTION + ANSWER + 64), folder)
        if not grows:
            read(bench, engines, texts)
        for number in order:
            before = len(texts[number])
            if number in begun or not grows:
                could += before - grows  # the last token of an answer has not been computed
                texts[number] += bench.prompt(QUESTION // 2)
            begun.add(number)
            prompt, new = list(texts[number]), ANSWER if grows else 2
            for name, engine in engines.items():
                asked.setdefault(name, []).append(bench.answer(engine, name, prompt, new))
            texts[number] = prompt + asked["no cache"][-1].new if grows else prompt[:before]
        for engine in engines.values():
            engine.close()
    return asked, could


# 3. Under load, over HTTP -----------------------------------------------------------------------------------

class Service:
    """A chapter's server, in a process of its own, with room for all sessions on the device and in host memory."""

    def __init__(self, system: str, model: str, blocks: int):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        file = next(f"{chapter}.py" for chapter in CHAPTERS if chapter.startswith(system))
        options = ["--model", model, "--port", str(self.port), "--gpu-blocks", str(blocks)]
        options += ["--cpu-blocks", str(2 * blocks)] if system != "02" else []
        self.system = system
        self.process = subprocess.Popen([sys.executable, file, *options], cwd=measure.RESULTS.parent.parent,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self):
        """Wait until it answers."""
        while True:
            try:
                with self.opened("GET", "/health"):
                    return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"The server of {self.system} has ended with {self.process.returncode}.") from None
                time.sleep(0.1)

    def close(self):
        self.process.terminate()
        self.process.wait()

    def opened(self, method: str, path: str, **fields):
        """Return the response to a request. Raises OSError, also where the server refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, json.dumps(fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(response.read().decode())
        return response

    def ask(self, prompt: list[int], due: float) -> dict:
        """Answer one round, which was due at `due` (time.perf_counter())."""
        if self.system != "02":
            self.opened("POST", "/evict", tier="device").read()
        with self.opened("POST", "/generate", prompt=prompt, max_tokens=ANSWER, stream=True) as response:
            first = None
            for line in response:
                event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
                first = first or event and time.perf_counter()
                if "error" in event:
                    raise OSError(event["error"])
                if result := event.get("result"):
                    return dict(ttft_ms=1e3 * (first - due), tbt_ms=result["tbt_ms"] or 0.0, tokens=result["tokens"],
                                restored=result["found"].get("cpu", 0))


def play(service: Service, texts: list[list[int]], rounds: list[tuple[float, int, list[int]]]) -> list[dict]:
    """Ask `rounds` (seconds until it is due, session, what is said), each session on a thread of its own, where a round
    waits for the one before. Returns what `Service.ask` does, in their order."""
    began, answered = time.perf_counter() + 0.05, {}

    def session(number: int):
        told = list(texts[number])
        for at, (after, own, said) in enumerate(rounds):
            if own == number:
                time.sleep(max(0.0, began + after - time.perf_counter()))
                told += said
                answered[at] = service.ask(told, began + after)
                told += answered[at]["tokens"]

    with ThreadPoolExecutor(len(texts)) as clients:
        list(clients.map(session, range(len(texts))))
    return [answered[at] for at in range(len(rounds))]


def arrivals(rng, model, rate: float) -> list[tuple[float, int, list[int]]]:
    """Draw rounds that arrive at random, so many a second; the sessions come one after the other, in any order."""
    order = [number for _ in range(-(-ROUNDS // SESSIONS)) for number in rng.sample(range(SESSIONS), SESSIONS)][:ROUNDS]
    after, rounds = 0.0, []
    for number in order:
        after += rng.expovariate(rate)
        rounds.append((after, number, draw(rng, model, QUESTION)))
    return rounds


def sessions(model, arguments):
    rng, name = random.Random(0), arguments.name
    texts = [draw(rng, model, BEGINS) for _ in range(SESSIONS)]
    blocks = SESSIONS * -(-(BEGINS + 2 * -(-ROUNDS // SESSIONS) * (QUESTION + ANSWER)) // 16)
    with ExitStack() as stack:
        services = {}
        for system in ("02", "03", "04", "05"):
            service = services[system] = Service(system, name, blocks)
            stack.callback(service.close)
            service.wait()
            for text in texts:
                service.ask(text, time.perf_counter())
        base, left = {}, dict.fromkeys(services, True)  # system -> median TTFT of each run at the lowest rate; sustains it
        for rate in RATES:
            taken = {system: [] for system, sustains in left.items() if sustains}
            for _ in range(RUNS):
                rounds = arrivals(rng, model, rate)
                for system, runs in taken.items():
                    runs.append(play(services[system], texts, rounds))
            for system, runs in taken.items():
                times = [[one["ttft_ms"] for one in run] for run in runs]
                base.setdefault(system, statistics.median(sum(times, [])))
                over = [statistics.median(run) / base[system] for run in times]
                left[system] = statistics.median(over) < DIVERGED
                yield dict(
                    system=system, rate=rate, requests=sum(map(len, times)), over_lowest_rate=measure.spread(over),
                    ttft_ms=percentiles(sum(times, []), 50, 90), diverged=not left[system],
                    tbt_ms=percentiles([one["tbt_ms"] for run in runs for one in run], 50, 90),
                    restored=sum(one["restored"] for run in runs for one in run),
                    **against(runs, taken))  # fmt: skip
            if not any(left.values()):
                return


def against(runs: list[list[dict]], taken: dict) -> dict:
    """Compare p50 and p90 of TTFT, and the mean TBT, with those of 03 and 02 in the same run, while these sustain it."""
    def percentile(runs: list, share: int) -> list[float]:
        return [float(numpy.percentile([one["ttft_ms"] for one in run], share)) for run in runs]

    found = {}
    if "03" in taken:
        found |= {f"p{share}_over_03": ratio(percentile(runs, share), percentile(taken["03"][: len(runs)], share)) for share in (50, 90)}
    if "02" in taken:
        means = [[statistics.mean(one["tbt_ms"] for one in run) for run in each] for each in (runs, taken["02"][: len(runs)])]
        found["tbt_over_02"] = ratio(*means)
    return found


# 4. The tables and main --------------------------------------------------------------------------------------

def sustained(rows: list[dict]) -> dict[str, float]:
    """Return the rounds a second at which the median TTFT of each system is DIVERGED times that at the lowest rate, between
    two measured rates on a logarithmic scale; the highest measured rate where it never was."""
    found = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        each = [(row["rate"], tables.median(row["over_lowest_rate"])) for row in rows if row["system"] == system]
        (before, low), (rate, high) = each[-2:] if len(each) > 1 else 2 * each
        share = (numpy.log(DIVERGED / low) / numpy.log(high / low)) if high > max(DIVERGED, low) else 1.0
        found[system] = float(before * (rate / before) ** share)
    return found


def report(found: list[dict]) -> str:
    asked, sessions = (tables.rows(found, part) for part in PARTS)
    systems = []
    for row in asked:
        header = f"{row['what']}: {row['device_tokens']:,} of {row['tokens']:,} tokens, {row['could_be_found']:.0%}"
        for system in SYSTEMS:
            own, differ = row["systems"][system], row["requests"] - row["systems"][system]["equal"]
            systems.append(dict(own, system=system, over=row["of_03"][system], header=header,
                                differ=f"; {differ} answers differ" if differ else ""))  # fmt: skip
    systems = tables.grouped(systems, ("system",), "header")
    rates = [f"{rate:.1f} of {system}" for system, rate in sustained(sessions).items()]
    for row in sessions:
        row["over"] = f"{row['rate']:.1f} a second"
    return tables.paragraphs(
        tables.table(
            "**Asked in turn** (classroom): how many tokens of all the device holds, and what could be found; below: what was "
            "found, TTFT p50 and p99, and TTFT over 03's. An answer that differs from the one without a cache is named.", {
                "system": "{system}",
                **tables.across(systems, {"": "{found:%}; {ttft_ms[p50]:ms}, {ttft_ms[p99]:ms}; {over:n}{differ}"}),
            }, systems),
        tables.table(
            "**Sixteen sessions at once, over HTTP** (HCache, Figure 9; {model}): TTFT p50 and p90, p50 over 03's in the same run, and "
            "TBT p50, by rounds a second.", {
                "system": "{system}",
                **tables.across(tables.grouped(sessions, ("system", "model"), "over"), {
                    "": "{ttft_ms[p50]:ms}, {ttft_ms[p90]:ms}; {p50_over_03:n}; {tbt_ms[p50]:ms}"}),
            }, tables.grouped(sessions, ("system", "model"), "over")),
        f"The median TTFT is {DIVERGED:g} times that at the lowest rate from these rounds a second on: {tables.listed(rates)}." if rates else "")


def on_a_bench(model, arguments):
    yield from conversations(Bench(model), arguments.rounds)


PARTS = {"conversations": (on_a_bench, ["classroom"]), "sessions": (sessions, ["random:long"])}


if __name__ == "__main__":
    handle_signals(signal.SIGTERM)  # the servers end with this process
    measure.run("outside", PARTS, report, measure.parser(__doc__, PARTS).parse_args())
