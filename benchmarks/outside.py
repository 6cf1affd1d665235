"""Chapters 02 to 07 as a user sees them: in conversations, beside others, and under load.

    python -m benchmarks.outside                                   all; results in benchmarks/results/
    python -m benchmarks.outside --only beside --rounds 2

conversations   conversations of several turns that do not fit into the device together, in shuffled order,
                and questions about documents, popular (Zipf) or all alike: what is found, and TTFT. Once.
beside          TBT of eight that decode while a history comes back every two seconds, or as soon after as it can,
                over that with the history on the device; and the share of the time in which layers are projected
                or recomputed: nobody decodes then.
sessions        TTFT and TBT of later rounds, in three runs: sessions begin at random and think between their rounds, which
                come at 0.25, 0.5 and 1 times the rate that saturates no cache (HCache, Figure 9).

All are in one process, over one link; engines step on the thread that loaded the weights, and clients ask from another.
"no cache" is chapter 02 where nothing is ever found.
"""

import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, count

import numpy

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, spread, ttft
from benchmarks.planned import QUESTION, both_ends, engine_of, hidden_states, offload, planned
from benchmarks.tiered import tiers
from common import store
from common.requests import Request
from shell import backends, hardware, lesson

TALKS, TURNS, SAID, ANSWER = 8, 5, (100, 1100), 8  # conversations, turns, tokens at first, of an answer
DOCUMENTS, LENGTH, ASKS = 8, 800, 32  # documents, tokens of one, questions about all
DECODING, EVERY, WINDOW = 8, 2.0, 3.0  # requests, seconds, seconds of one measurement
SESSIONS, RUNS = {0.25: 2, 0.5: 3, 1.0: 4}, 3  # share of saturation -> in a run
BEGINS, ROUNDS = 800, 6  # tokens of the first round; rounds
THINK = 0.25  # seconds between two rounds (in the paper 30)
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

    def submit(self, server, system: str, prompt: list[int], new: int, evict: bool = False) -> Request:
        """Ask an engine that is served. If so asked, it loses all on its device before; 02, the ideal, keeps it there."""
        if evict and system != "02":
            server.between_steps(partial(server.engine.evict, "device"))
        request = self.request(system, prompt, new)
        server.engine.submit(request)
        server.open.append(request)  # its end cancels it
        return request

    def answer(self, engine, system: str, prompt: list[int], new: int) -> Request:
        """Ask when nothing is under way."""
        lesson.wait_until_idle(engine)
        return engine.generate([self.request(system, prompt, new)])[0]


def served(engine, client):
    """Step an engine here, on the thread that has loaded the weights, as the product does; `client` asks from a thread of
    its own -> what it returns. Those that are not answered then are cancelled."""
    from shell.server import Server  # here, since only this needs Flask

    server = Server(engine, None, {})

    def ask():
        try:
            return client(server)
        finally:
            server.close()

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(ask)
        server.run()
        return told.result()


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

    def decode(server):
        for _ in range(DECODING - sum(request.outcome is None for request in over)):
            new = 300 + 20 * (len(over) % DECODING)  # they do not end together
            over.append(bench.submit(server, name, bench.prompt(QUESTION), new))

    def client(server) -> tuple[float, float]:
        decode(server)
        while not all(request.new for request in over):
            time.sleep(0.01)
        began = due = time.perf_counter()
        while (now := time.perf_counter()) < began + WINDOW or not any(request.new for request in back):
            decode(server)
            if now >= due and (not back or back[-1].outcome is not None):
                back.append(bench.submit(server, name, history + bench.prompt(QUESTION), 1, evict=True))
                due += EVERY * (1 + (now - due) // EVERY)
            time.sleep(0.01)
        return began, time.perf_counter()

    began, ended = served(engine, client)
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

def sessions(bench: Bench, runs: int):
    requests = [bench.request("no cache", bench.prompt(BEGINS), ANSWER) for _ in range(8)]
    room = len(requests) * (BEGINS + ROUNDS * QUESTION)
    engines, began = bench.engines(room, 2 * room), time.perf_counter()
    engines.pop("no cache").generate(requests)
    service = (time.perf_counter() - began) / len(requests)  # seconds of a round that is computed
    for share, number in SESSIONS.items():
        asked = {name: [] for name in engines}  # the later rounds of all runs
        for _ in range(runs):
            gaps = [bench.rng.expovariate(share / service / ROUNDS) for _ in range(number - 1)]
            starts = [*accumulate(gaps, initial=0.0)]
            said = [[bench.prompt(QUESTION // 2 if later else BEGINS) for later in range(ROUNDS)] for _ in starts]
            for name, engine in engines.items():
                asked[name] += served(engine, partial(talk, bench, name, starts, said))
        for name, later in asked.items():
            yield dict(
                system=name, of_saturation=share, rounds_per_second=share / service, requests=len(later),
                ttft_ms=percentiles(ttft(later), 50, 90), tbt_ms=percentiles([one.outcome.tbt_ms for one in later], 50, 90),
                over_03=ratio(ttft(later), ttft(asked["03"])), restored=sum(one.found.get("cpu", 0) for one in later))  # fmt: skip
    for engine in engines.values():
        engine.close()


def talk(bench: Bench, name: str, starts: list[float], said: list[list], server) -> list[Request]:
    """Begin each session at its time, on a thread of its own -> the later rounds, session by session."""
    def session(start: float, texts: list) -> list[Request]:
        time.sleep(start)
        asked, told = [], []
        for text in texts:
            asked.append(bench.submit(server, name, told + text, ANSWER, evict=True))
            asked[-1].pieces.get(timeout=60)  # nobody reads its text: the outcome
            told = asked[-1].tokens
            time.sleep(THINK)
        return asked[1:]

    with ThreadPoolExecutor(len(starts)) as clients:
        return sum(clients.map(session, starts, said), [])


# 5. The tables and main --------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    asked, sessions, beside = (tables.rows(found, part) for part in PARTS)
    systems = []
    for row in asked:
        header = f"{row['what']}: {row['device_tokens']:,} of {row['tokens']:,} tokens, {row['could_be_found']:.0%}"
        for system in SYSTEMS:
            own, differ = row["systems"][system], row["requests"] - row["systems"][system]["equal"]
            systems.append(dict(own, system=system, over=row["of_03"][system], header=header,
                                differ=f"; {differ} answers differ" if differ else ""))  # fmt: skip
    systems = tables.grouped(systems, ("system",), "header")
    sessions = tables.grouped(sessions, ("model", "of_saturation"), "system")
    beside = tables.grouped(beside, ("system",), "model")
    return tables.paragraphs(
        tables.table(
            "**Asked in turn** (classroom): how many tokens of all the device holds, and what could be found; below: what was "
            "found, TTFT p50 and p99, and TTFT over 03's. An answer that differs from the one without a cache is named.", {
                "system": "{system}",
                **tables.across(systems, {"": "{found:%}; {ttft_ms[p50]:ms}, {ttft_ms[p99]:ms}; {over:n}{differ}"}),
            }, systems),
        tables.table(
            "**Sessions under load** (HCache, Figure 9), their later rounds: TTFT p50 and p90, that over 03's in the same round, and "
            "TBT p50.", {
                "model, of saturation": "{model}, {of_saturation:g}", "rounds a second": "{rounds_per_second:n}", "rounds": "{requests}",
                **tables.across(sessions, {"": "{ttft_ms[p50]:ms}, {ttft_ms[p90]:ms}; {over_03:n}; {tbt_ms[p50]:ms}"}),
            }, sessions),
        tables.table("**Beside eight that decode**, and TTFT of a history that comes back:", {
            "system": "{system}",
            **tables.across(beside, {
                "TBT": "{tbt_mean_ms:ms}", "over that of 02": "{over_02:spread}", "projecting": "{projecting:%}",
                "p99": "{tbt_p99_ms:ms}", "TTFT": "{ttft_ms:ms}"}),
        }, beside))  # fmt: skip


def on_a_bench(part):
    def measured(model, arguments):
        yield from part(Bench(model), arguments.rounds if part is beside else RUNS)
    return measured


PARTS = {
    "conversations": (on_a_bench(conversations), ["classroom"]),
    "sessions": (on_a_bench(sessions), ["classroom", "random:long"]),
    "beside": (on_a_bench(beside), ["random:long"]),
}


if __name__ == "__main__":
    measure.run("outside", PARTS, report, measure.parser(__doc__, PARTS, rounds=5).parse_args())
