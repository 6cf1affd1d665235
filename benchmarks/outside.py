"""Chapters 02 to 07 as a user sees them: in conversations, beside others, and under load.

    python -m benchmarks.outside                                   all; results in benchmarks/results/
    python -m benchmarks.outside --only beside --rounds 2

conversations   conversations of several turns that do not fit into the device together, in shuffled order,
                and questions about documents, popular (Zipf) or all alike: what is found, and TTFT. Once.
beside          TBT of eight that decode while a history comes back every two seconds, or as soon after as it can,
                over that with the history on the device; and the share of the time in which layers are projected
                or recomputed: nobody decodes then.
sessions        TTFT and TBT of later rounds, once: sessions begin at random and think between their rounds, which
                come at 0.5 and 2 times the rate that saturates no cache (HCache, Figure 9).

All are in one process, over one link. "no cache" is chapter 02 where nothing is ever found.
"""

import random
import statistics
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

import numpy
from transformers import DynamicCache

from benchmarks import measure, tables
from benchmarks.baseline import ask_theirs
from benchmarks.both_ends import both_ends
from benchmarks.measure import draw, ratio, spread
from benchmarks.planned import QUESTION, hidden_states, offload, paged, planned
from benchmarks.tiered import tiers
from common import store
from common.estimates import Estimates
from common.requests import HungUp, Request
from common.restoring import Restorer
from shell import backends, lesson, modelled_link
from shell.reference import reference_model

TALKS, TURNS, SAID, ANSWER = 8, 5, (100, 1100), 8  # conversations, turns, tokens at first, of an answer
DOCUMENTS, LENGTH, ASKS = 8, 800, 32  # documents, tokens of one, questions about all
DECODING, EVERY, WINDOW = 8, 2.0, 3.0  # requests, seconds, seconds of one measurement
RATES = {0.5: 4, 2.0: 12}  # share of saturation -> sessions
ROUNDS, THINK, DRAIN = 3, 1.0, 3.0  # of a session; seconds between two (in the paper 30), and behind the last one


# 1. Engines, and asking them --------------------------------------------------------------------------------

class Bench:
    """A model, and one link for all engines on it."""

    def __init__(self, model, reference=None):
        """`reference`: the same model in `transformers`, for `conversations`."""
        self.model, self.reference, self.rng, self.salts = model, reference, random.Random(0), count()
        self.prompt = partial(draw, self.rng, model)  # (tokens)
        link = modelled_link.bandwidth(model)
        self.bandwidth = link and link.value

    def engines(self, device: int, kept: int, folder: str | None = None) -> dict:
        """Engines with room for so many tokens on the device, and for `kept` behind it; 06 and 07 too, with a
        `folder` for the files of 07."""
        blocks, behind = -(-device // 16), -(-kept // 16)
        caches = {"no cache": None, "02": None, "03": offload.HostCache(behind, self.bandwidth),
                  "04": hidden_states.HiddenCache(behind, self.bandwidth),
                  "05": planned.PlannedCache(3 * behind, self.bandwidth)}  # fmt: skip
        if folder is not None:
            files = store.Storage(backends.open_backend(f"file:{folder}", {}), "files")
            config = self.model.config
            size = 16 * behind * config.kv_numbers_per_token * self.model.dtype.itemsize
            caches["06"] = both_ends.BidirectionalCache(
                store.StoredChunks(both_ends.ModelledStorage(size, self.bandwidth or 1e10)))
            caches["07"] = tiers.TieredCache(behind // 2, self.bandwidth, files)
        return {name: paged.Engine(paged.Runner(self.model, blocks), cache and Restorer(cache, Estimates()))
                for name, cache in caches.items()}

    def request(self, system: str, prompt: list[int], new: int) -> Request:
        """Where there is no cache, nothing is shared."""
        options = dict(cache_salt=str(next(self.salts))) if system == "no cache" else {}
        return Request(prompt, new, options=options)

    def submit(self, server, system: str, prompt: list[int], new: int, evict: bool = False) -> Request:
        """Ask an engine that is served, or first `evict` all from its device; 02, the ideal, keeps it there."""
        if evict and system != "02":
            server.between_steps(partial(server.engine.evict, "device"))
        request = self.request(system, prompt, new)
        server.engine.submit(request)
        return request

    def answer(self, engine, system: str, prompt: list[int], new: int) -> Request:
        """Ask when nothing is under way."""
        lesson.settle(engine)
        return engine.generate([self.request(system, prompt, new)])[0]


@contextmanager
def serving(engine):
    """A thread steps an engine, at rest; at the end, those that are not answered are cancelled. (Chapters step
    on the main thread, where here the measurement waits and asks.)"""
    from shell.server import Server  # here, since only this needs Flask

    server = Server(engine, None, {})
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until, estimates = time.monotonic() + 1.0, getattr(engine.behind, "estimates", None)
    while estimates and estimates.doubtful and time.monotonic() < until:
        time.sleep(0.05)
    try:
        yield server
    finally:
        for request in [*engine.running, *engine.waiting]:
            engine.cancel(request, HungUp("The measurement is over."))
        server.close()
        thread.join()


def percentiles(samples: list[float], *shares: int) -> dict:
    values = numpy.percentile(samples, shares)
    return {f"p{share}": float(value) for share, value in zip(shares, values)} | dict(samples=samples)


def read(bench: Bench, engines: dict, documents: list[list[int]]):
    """Every engine has read them all, the most popular last."""
    for document in reversed(documents):
        for name, engine in engines.items():
            bench.answer(engine, name, document, 1)


# 2. In conversations ----------------------------------------------------------------------------------------

class Answer(NamedTuple):
    ttft_ms: float
    length: int  # tokens of the prompt
    found: int  # of them
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
        ttft_ms, _, tokens = ask_theirs(self.model, prompt, new, past_key_values=cache)
        self.caches[text] = cache, (prompt + tokens)[:-1]
        while sum(len(tokens) for _, tokens in self.caches.values()) > self.device and len(self.caches) > 1:
            self.caches.popitem(last=False)
        return Answer(ttft_ms, len(prompt), found, 0, tokens)


def conversations(bench: Bench, rounds: int):
    for what, exponent in {
        f"{TALKS} conversations of {TURNS} turns": None,
        f"{DOCUMENTS} documents, Zipf 2": 2.0,
        f"{DOCUMENTS} documents, Zipf 1": 1.0,
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


def summary(asked: dict[str, list[Answer]], could: int) -> dict:
    """`asked`: system -> its answers."""
    prompts, expected = sum(answer.length for answer in asked["02"]), [answer.tokens for answer in asked["no cache"]]
    times = {name: [answer.ttft_ms for answer in each] for name, each in asked.items()}
    systems = {name: dict(
        found=sum(answer.found for answer in each) / prompts, restored=sum(answer.restored for answer in each),
        equal=sum(answer.tokens == tokens for answer, tokens in zip(each, expected)),
        ttft_ms=percentiles(times[name], 50, 99)) for name, each in asked.items()}  # fmt: skip
    return dict(requests=len(expected), could_be_found=could / prompts, systems=systems,
                of_03={name: ratio(times[name], times["03"]) for name in times})  # fmt: skip


def asked_in_turn(bench: Bench, texts: list, order: list[int], room: tuple[int, int], grows: bool) -> tuple[dict, int]:
    """Ask about the texts in this order, every system in turn; a conversation `grows` with each answer -> what each system
    answered, and the tokens of all prompts that were there before, in whatever memory."""
    device, tokens = room
    asked, could, begun, texts = {}, 0, set(), [list(text) for text in texts]
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
                answer = Answer(request.outcome.ttft_ms, len(prompt), request.cached_tokens, restored, request.new)
                asked.setdefault(name, []).append(answer)
            asked.setdefault("transformers", []).append(theirs.ask(number, prompt, new))
            texts[number] = prompt + asked["no cache"][-1].tokens if grows else prompt[:before]
        for engine in engines.values():
            engine.close()
    return asked, could


# 3. Beside others -------------------------------------------------------------------------------------------

def beside(bench: Bench, rounds: int):
    context, most = min(2048, bench.model.config.max_position_embeddings), DECODING * 512
    history = bench.prompt(min(1900, context - 2 * QUESTION))
    engines = bench.engines(2 * context + most, 4 * context + 4 * most)
    del engines["no cache"]  # it computes the history each time
    read(bench, engines, [history])
    ways = {name: partial(window, bench, name, engine, history) for name, engine in engines.items()}
    taken = lesson.in_turn(ways, rounds)
    means = {name: [each["mean"] for each in found] for name, found in taken.items()}
    for name, found in taken.items():
        yield dict(
            system=name, history_tokens=len(history), tbt_mean_ms=spread(means[name]),
            over_02=ratio(means[name], means["02"]), tbt_p99_ms=spread([each["p99"] for each in found]),
            ttft_ms=spread([ms for each in found for ms in each["ttft_ms"]]),
            came_back=sum(len(each["ttft_ms"]) for each in found),
            restored=sum(each["restored"] for each in found),
            projecting=statistics.median(each["projecting"] for each in found),
            bytes_in=sum(each["bytes_in"] for each in found))  # fmt: skip
        engines[name].close()


def window(bench: Bench, name: str, engine, history: list[int]) -> dict:
    """Eight decode for a while; the history comes back meanwhile."""
    over, back, bytes_before = [], [], engine.counts["bytes_in"]
    with serving(engine) as server:

        def decode():
            for _ in range(DECODING - sum(request.outcome is None for request in over)):
                new = 300 + 20 * (len(over) % DECODING)  # they do not end together
                over.append(bench.submit(server, name, bench.prompt(QUESTION), new))

        decode()
        while not all(request.new for request in over):
            time.sleep(0.01)
        began = due = time.perf_counter()
        while (now := time.perf_counter()) < began + WINDOW or not any(request.new for request in back):
            decode()
            if now >= due and (not back or back[-1].outcome is not None):
                back.append(bench.submit(server, name, history + bench.prompt(QUESTION), 1, evict=True))
                due += EVERY * (1 + (now - due) // EVERY)
            time.sleep(0.01)
        ended = time.perf_counter()
    spans = [[at for at in request.times if began <= at <= ended] for request in over]
    gaps = [1e3 * (b - a) for times in spans for a, b in zip(times, times[1:])]
    answered = [request for request in back if request.new and request.times[0] <= ended]
    return dict(
        mean=statistics.mean(gaps), p99=float(numpy.percentile(gaps, 99)),
        ttft_ms=[1e3 * (request.times[0] - request.received) for request in answered],
        restored=sum(request.found.get("cpu", 0) > 0 for request in answered),
        projecting=sum(span.end - span.start for request in answered for span in request.timeline.spans
                       if span.lane == "compute" and span.label.startswith(("layer", "recompute"))) / (ended - began),
        bytes_in=engine.counts["bytes_in"] - bytes_before)  # fmt: skip


# 4. Under load ----------------------------------------------------------------------------------------------

def sessions(bench: Bench, rounds: int):
    rng, room = bench.rng, 4 * DOCUMENTS * LENGTH
    engines = bench.engines(room, room)
    requests, began = [bench.request("no cache", bench.prompt(LENGTH), ANSWER) for _ in range(24)], time.perf_counter()
    engines["no cache"].generate(requests)
    service = (time.perf_counter() - began) / len(requests)  # seconds of a round that is computed
    for share, number in RATES.items():
        rate = share / service / ROUNDS  # sessions a second
        starts = [*accumulate(rng.expovariate(rate) for _ in range(number))]
        said = [[bench.prompt(QUESTION // 2 if later else LENGTH) for later in range(ROUNDS)] for _ in starts]
        for name, engine in engines.items():
            asked, ended = talk(bench, name, engine, starts, said)
            later = [request for requests in asked for request in requests[1:]]
            tbt = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) for one in later if len(one.times) > 1]
            yield dict(
                system=name, of_saturation=share, sessions_per_second=rate, requests=number * (ROUNDS - 1),
                unanswered=number * (ROUNDS - 1) - sum(bool(one.new) for one in later),
                ttft_ms=percentiles([1e3 * ([*one.times, ended][0] - one.received) for one in later], 50, 90),
                tbt_ms=percentiles([1e3 * seconds for seconds in tbt], 50, 90),
                restored=sum(one.found.get("cpu", 0) for one in later))  # fmt: skip
    for engine in engines.values():
        engine.close()


def talk(bench: Bench, name: str, engine, starts: list[float], said: list[list]) -> tuple[list[list[Request]], float]:
    """Begin each session at its time, and go on THINK seconds after each answer -> the requests of each, and the end."""
    asked = [[] for _ in starts]
    with serving(engine) as server:
        began = time.perf_counter()
        until = began + starts[-1] + (ROUNDS - 1) * THINK + DRAIN
        while (now := time.perf_counter()) < until and not all(len(one) == ROUNDS and one[-1].outcome for one in asked):
            for start, texts, requests in zip(starts, said, asked):
                last = requests[-1] if requests else None
                due = began + start if last is None else last.times[-1] + THINK if last.outcome else until
                if due <= now and len(requests) < ROUNDS:
                    prompt = (last.tokens if last else []) + texts[len(requests)]
                    requests.append(bench.submit(server, name, prompt, ANSWER, evict=True))
            time.sleep(0.002)
    return asked, now


# 5. The tables and main --------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    asked, sessions, beside = (tables.rows(found, part) for part in PARTS)
    systems = []
    for row in asked:
        header = f"{row['what']}: {row['device_tokens']:,} of {row['tokens']:,} tokens, {row['could_be_found']:.0%}"
        for system, own in row["systems"].items():
            differ = row["requests"] - own["equal"]
            systems.append(dict(own, system=system, over=row["of_03"][system], header=header,
                                differ=f"; {differ} answers differ" if differ else ""))  # fmt: skip
    systems = tables.grouped(systems, ("system",), "header")
    sessions = tables.grouped(sessions, ("of_saturation",), "system")
    beside = tables.grouped(beside, ("system",), "model")
    return tables.paragraphs(
        tables.table(
            "**Asked in turn** (classroom): how many tokens of all the device holds, and what could be found; below: what was "
            "found, TTFT p50 and p99, and TTFT over 03's. An answer that differs from the one without a cache is named.", {
                "system": "{system}",
                **tables.across(systems, {"": "{found:%}; {ttft_ms[p50]:ms}, {ttft_ms[p99]:ms}; {over:n}{differ}"}),
            }, systems),
        tables.table(
            "**Sessions under load** (HCache, Figure 9; classroom), their later rounds: TTFT p50 and p90, TBT p50, and how many "
            "are not answered in the end.", {
                "sessions a second (of saturation)": "{sessions_per_second:n} ({of_saturation:g})", "later rounds": "{requests}",
                **tables.across(sessions, {"": "{ttft_ms[p50]:ms}, {ttft_ms[p90]:ms}; {tbt_ms[p50]:ms}; {unanswered}"}),
            }, sessions),
        tables.table("**Beside eight that decode**, and TTFT of a history that comes back:", {
            "system": "{system}",
            **tables.across(beside, {
                "TBT": "{tbt_mean_ms:ms}", "over that of 02": "{over_02:spread}", "projecting": "{projecting:%}",
                "p99": "{tbt_p99_ms:ms}", "TTFT": "{ttft_ms:ms}"}),
        }, beside))  # fmt: skip


def on_a_bench(part):
    def measured(model, arguments):
        theirs = reference_model(arguments.name, model.dtype, model.device.type) if part is conversations else None
        yield from part(Bench(model, theirs), arguments.rounds if part is beside else 1)
    return measured


PARTS = {
    "conversations": (on_a_bench(conversations), ["classroom"]),
    "sessions": (on_a_bench(sessions), ["classroom"]),
    "beside": (on_a_bench(beside), ["random:long"]),
}


if __name__ == "__main__":
    measure.run("outside", PARTS, report, measure.parser(__doc__, PARTS, rounds=5).parse_args())
