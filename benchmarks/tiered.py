"""Measure chapter 07: device, host memory and shared storage under one radix tree, in turn.

    python -m benchmarks.tiered                                     all; results in benchmarks/results/
    python -m benchmarks.tiered --only policies --model classroom --rounds 5

mix         conversations go on behind documents of 1,024 tokens, in random order. The device holds a third of
            their tokens, host memory half, and the documents are in files. It is compared with the device
            alone, one request at a time and two at once.
policies    one history that only slow storage has, under each prefetch policy. Reading takes as long as
            computing, with the engine's guard off; then twice as long, with the guard on.
pipeline    the same history in storage that is as fast as the link. The bound is the time of one of both
            transfers (they take equally long), the first read's share of the other one, and the question with
            everything on the device.
admission   TTFT of a hit in host memory, or in storage of 1 MB/s to 1 GB/s, over computing, and the tier of
            each token.
writes      what each write policy finds, writes, and would lose if the process were killed.
sizes       what is found, by the size of host memory and by the size of a page, with the same traffic and
            without storage.
"""

import importlib
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, spread, ttft
from benchmarks.planned import engine_of
from common import store
from common.requests import Request
from examples.both_ends import BothEndsCache
from shell import backends, charts, hardware, lesson, modelled_link

tiers = importlib.import_module("07_tiered_storage")
POLICIES = *tiers.PREFETCH, "both_ends"
TALKS, TURNS, DOCUMENT, QUESTION, ANSWER, PAGE = 4, 2, 1024, 64, 4, 16  # conversations; tokens
TIERS = "gpu", "cpu", "storage"
HOSTS, PAGES = (0.5, 1, 2, 4), (16, 64, 128)  # of the device's size; tokens
ASKED = PAGE - 1  # tokens of a question that fills no page: no tier keeps it for the next policy


class Bench(ExitStack):
    """Engines of one model over one directory. At its end it closes them and removes the directory."""

    def __init__(self, model):
        super().__init__()
        self.folder = self.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        self.model, self.rng, self.bandwidth = model, random.Random(0), hardware.bandwidth(model)
        self.draw = partial(draw, self.rng, model)  # (tokens)

    def engine(self, on_device: int, cache=None, page: int = PAGE, always: bool = False):
        """Return chapter 02's engine with room for `on_device` tokens, in pages of `page` tokens."""
        engine = engine_of(self.model, -(-on_device // page), cache, always, page)
        self.callback(engine.close)
        return engine

    def cache(self, on_host: int, **options):
        """Return chapter 07's Cache with host memory for `on_host` tokens, over the default link and the
        shared files."""
        shared = store.Storage(backends.open_backend(f"file:{self.folder}/pages", {}), "files")
        return kind_of(options.get("prefetch", "timeout"))(-(-on_host // PAGE), self.bandwidth, shared, **options)


def kind_of(policy: str) -> type:
    """Return the Cache class of a prefetch policy."""
    return BothEndsCache if policy == "both_ends" else tiers.TieredCache


def slow_storage(engine, bandwidth: modelled_link.Bandwidth | None):
    """Give storage a modelled bandwidth, and record it as its measured speed. None: the storage's own
    speed."""
    storage = engine.lower_tier.cache.storage
    measure.change_speed(engine, storage, storage.reader, bandwidth)
    if bandwidth:
        storage.measured.record(bandwidth.value, 1.0)


def forget(engine):
    """Evict everything from the device and from host memory."""
    lesson.wait_until_idle(engine)
    for pool in engine.pools:
        engine.evict(pool)
    lesson.wait_until_idle(engine)


# 1. Conversations that fit in no single tier ----------------------------------------------------------------

def go_on(engine, documents: list, asked: list[tuple[int, list[int]]], at_once: int = 1) -> tuple[list, float]:
    """Ask questions, at most `at_once` at the same time, and never two of one conversation.

    `asked`: (number of the conversation, tokens) of each question.
    Returns: the finished requests in the order of `asked`, and the seconds of all."""
    histories, todo, running = [list(document) for document in documents], list(enumerate(asked)), {}
    done, began = {}, time.perf_counter()
    while todo or running:
        for item in list(todo):
            at, (number, question) = item
            if len(running) < at_once and number not in running:
                histories[number] += question
                request = Request(list(histories[number]), ANSWER)
                running[number], done[at] = request, request
                engine.submit(request)
                todo.remove(item)
        engine.step()
        for number, request in list(running.items()):
            if request.outcome is not None:
                if isinstance(request.outcome, Exception):
                    raise request.outcome
                histories[number] += request.new
                del running[number]
    seconds = time.perf_counter() - began
    lesson.wait_until_idle(engine)
    return [done[at] for at in sorted(done)], seconds


def mix(model, arguments):
    """Yield a row for one and for two requests at once."""
    longest = DOCUMENT + TURNS * (QUESTION + ANSWER) + 16
    with Bench(model) as bench:
        documents = [bench.draw(DOCUMENT) for _ in range(TALKS)]
        none = bench.engine(TALKS * longest // 3)
        ours = bench.engine(TALKS * longest // 3, bench.cache(TALKS * longest // 2))
        for document in documents:  # leave them in the files, and measure the speed of prefill
            lesson.ask(ours, document + bench.draw(1), 1)

        def turns() -> list[tuple[int, list[int]]]:
            order = [number for _ in range(TURNS) for number in bench.rng.sample(range(TALKS), TALKS)]
            return [(number, bench.draw(QUESTION)) for number in order]

        def play(engine, at_once: int, asked: list) -> tuple[list, float]:
            forget(engine)
            return go_on(engine, documents, asked, at_once)

        for at_once in (1, 2):
            ways = {name: partial(play, engine, at_once) for name, engine in dict(none=none, ours=ours).items()}
            taken = measure.same_question_in_turn(ways, arguments.rounds, turns)
            samples = [mixed(model, dict(zip(ways, each))) for each in zip(*taken.values())]
            yield dict(at_once=at_once, **{what: spread([sample[what] for sample in samples]) for what in samples[0]})


def mixed(model, taken: dict) -> dict:
    """Return the figures of one round: TTFT, throughput, and found tokens.

    `taken`: none or ours -> (requests, seconds)."""
    measure.check_alike(model, {name: [request.new for request in requests] for name, (requests, _) in taken.items()})
    means = {name: statistics.mean(ttft(each)) for name, (each, _) in taken.items()}
    return dict(
        ttft_ms=means["ours"], device_alone_ms=means["none"], lower=1 - means["ours"] / means["none"],
        throughput=taken["none"][1] / taken["ours"][1], **tiers.shares(taken["ours"][0]))  # fmt: skip


# 2. One history, only in storage -----------------------------------------------------------------------

def ask_under(policy: str, engine, prompt: list[int]) -> Request:
    """Ask under a prefetch policy while only storage has the history; for "computed" no tier has it, for
    "device" the device."""
    cache, storage = engine.lower_tier.cache, engine.lower_tier.cache.storage
    (lesson.wait_until_idle if policy == "device" else forget)(engine)
    time.sleep(0.02)
    cache.prefetch_policy, cache.storage = policy, None if policy == "computed" else storage
    request, cache.storage = lesson.ask(engine, prompt, 1), storage
    return request


def policies(model, arguments, tokens: int = 1024):
    """Yield a row for r = 1 with the guard off, and for r = 2 with the guard on."""
    with Bench(model) as bench:
        engine, both = (bench.engine(2 * tokens, bench.cache(2 * tokens, prefetch=policy)) for policy in ("timeout", "both_ends"))
        history, size = bench.draw(tokens), tokens // PAGE * engine.lower_tier.cache.host.block_bytes
        lesson.ask(engine, history + bench.draw(1), 1)

        def once(policy: str, question: list[int]) -> Request:
            return ask_under(policy, both if policy == "both_ends" else engine, history + question)

        alone = statistics.median(once("computed", bench.draw(ASKED)).ttft_ms for _ in range(4))
        for r, always in ((1.0, True), (2.0, False)):
            for each in engine, both:
                slow_storage(each, modelled_link.Bandwidth(size / (1e-3 * r * alone)))
                each.lower_tier.estimates.always, each.lower_tier.cache.timeout = always, (1e-3 * alone / 3, 0.0)  # a third of computing
            row, before = policy_cell(bench, once, arguments.rounds), alone
            alone = row["ttft_ms"]["computed"]["median"]  # measured in this row; it sets the storage of the next one
            yield dict(r=r, guard=not always, measured_r=r * before / alone, **row)


def policy_cell(bench: Bench, once, rounds: int) -> dict:
    """Measure all policies in turn. Returns: the row. Raises AssertionError if they answer differently."""
    ways = ("computed", *POLICIES)
    taken = measure.same_question_in_turn({way: partial(once, way) for way in ways}, rounds, partial(bench.draw, ASKED))
    measure.check_alike(bench.model, {way: [request.new for request in each] for way, each in taken.items()})
    times = {way: ttft(requests) for way, requests in taken.items()}
    found = {way: tiers.shares(requests)["storage"] for way, requests in taken.items()}
    lanes = {way: dict(ttft_ms=times[way][-1], spans=charts.spans(taken[way][-1].timeline)) for way in ("wait_complete", "both_ends")}
    return dict(ttft_ms={way: spread(samples) for way, samples in times.items()}, from_storage=found, lanes=lanes,
                both_ends_over={way: ratio(times["both_ends"], times[way]) for way in ways})  # fmt: skip


def pipeline(model, arguments, tokens: int = 1024):
    """Yield a row for `timeout` and for `wait_complete`: TTFT beside the bound of the pipeline."""
    with Bench(model) as bench:
        engine = bench.engine(2 * tokens, bench.cache(2 * tokens, timeout=(60.0, 0.0)))
        host, link, history = engine.lower_tier.cache.host, engine.lower_tier.cache.load_link, bench.draw(tokens)
        lesson.ask(engine, history + bench.draw(1), 1)
        engine.lower_tier.estimates.always = True
        slow_storage(engine, modelled_link.Bandwidth(link.speed()))
        ways = {way: lambda question, way=way: ask_under(way, engine, history + question) for way in ("device", "timeout", "wait_complete")}
        taken = measure.same_question_in_turn(ways, arguments.rounds, partial(bench.draw, ASKED))
        measure.check_alike(model, {way: [request.new for request in each] for way, each in taken.items()})
        alone = 1e3 * (tokens // PAGE) * host.block_bytes / link.speed()  # ms, of reading and of loading
        bounds = [alone * (1 + tiers.READ / tokens) + least for least in ttft(taken.pop("device"))]
        for policy, each in taken.items():
            yield dict(policy=policy, alone_ms=alone, ttft_ms=spread(ttft(each)), bound_ms=spread(bounds),
                       of_bound=ratio(bounds, ttft(each)), **tiers.shares(each))  # fmt: skip


# 3. Every tier beside computing -----------------------------------------------------------------------------

SPEEDS = {"1 MB/s": 1e6, "0.1 GB/s": 1e8, "1 GB/s": 1e9}  # bytes/s
SLOWER = "host, link 50 times slower"


def admission(model, arguments, histories=(512, 1900)):
    """Yield a row for each length of history and each place in which it lies."""
    longest = max(histories) + QUESTION + 16
    with Bench(model) as bench:
        engine = bench.engine(2 * longest, bench.cache(2 * longest))
        ways = "computed", "host", SLOWER, *(f"storage, {speed}" for speed in SPEEDS)
        for tokens in histories:
            history = bench.draw(tokens)
            lesson.ask(engine, history + bench.draw(1), 1)
            asks = {way: partial(ask_from, bench, engine, way, history) for way in ways}
            taken = lesson.in_turn(asks, arguments.rounds)
            alone = ttft(taken["computed"])
            for way, requests in taken.items():
                yield dict(
                    history_tokens=tokens, way=way, over_computing=ratio(ttft(requests), alone),
                    found={tier: sum(one.found.get(tier, 0) for one in requests) / len(requests) for tier in TIERS})


def ask_from(bench, engine, way: str, history: list[int]) -> Request:
    """Ask a new question while only the tier `way` has the history, or no tier for "computed"."""
    storage, link = engine.lower_tier.cache.storage, engine.lower_tier.cache.load_link
    lesson.wait_until_idle(engine, "device")
    if not way.startswith("host"):
        forget(engine)
    if way == "computed":
        engine.lower_tier.cache.storage = None
    elif way == SLOWER:
        as_it_is = link.bandwidth
        measure.change_speed(engine, link, link, modelled_link.Bandwidth(as_it_is.value / 50))
    elif way != "host":
        slow_storage(engine, modelled_link.Bandwidth(SPEEDS[way.removeprefix("storage, ")]))
    request = lesson.ask(engine, history + bench.draw(QUESTION), 1)
    engine.lower_tier.cache.storage = storage
    if way == SLOWER:
        measure.change_speed(engine, link, link, as_it_is)
    elif way != "host":
        slow_storage(engine, None)
    if way == "computed":  # save the history again for the ways that follow
        lesson.ask(engine, history + bench.draw(1), 1)
        lesson.wait_until_idle(engine)
    return request


# 4. Trade-offs ----------------------------------------------------------------------------------------------

def ask_by_zipf(bench: Bench, engine) -> list[Request]:
    """Ask 60 questions about 12 documents, drawn by Zipf's law. Returns: the finished requests."""
    documents = [bench.draw(256) for _ in range(12)]
    order = random.Random(1).choices(range(12), [1 / (rank + 1) for rank in range(12)], k=60)
    return go_on(engine, documents, [(number, bench.draw(24)) for number in order])[0]


def sizes(model, arguments, on_device: int = 1408):
    """Yield a row for each size of host memory, and for each size of a page."""
    for of_device, page in [*((of_device, PAGE) for of_device in HOSTS), *((1, page) for page in PAGES[1:])]:
        with Bench(model) as bench:
            cache = tiers.TieredCache(int(of_device * on_device) // page, bench.bandwidth)
            engine = bench.engine(on_device, cache, page, always=True)
            requests = ask_by_zipf(bench, engine)
            yield dict(of_device=of_device, page=page, bytes=engine.counts["bytes_in"], ttft_ms=spread(ttft(requests)), **tiers.shares(requests))


def writes(model, arguments):
    """Yield a row for each write policy: 60 questions about 12 documents, drawn by Zipf's law, to an engine
    with empty tiers."""
    for policy in tiers.WRITE:
        with Bench(model) as bench:
            engine = bench.engine(1400, bench.cache(1400, threshold=2 * PAGE, write=policy))
            requests = ask_by_zipf(bench, engine)
            cache, counts = engine.lower_tier.cache, engine.lower_tier.cache.counts
            stored = [node.stored for node in cache.tree.nodes() for _ in node.pages]
            yield dict(
                policy=policy, **tiers.shares(requests), ttft_ms=spread(ttft(requests)), saved_bytes=counts["bytes_out"],
                storage_bytes=counts["storage_pages_written"] * cache.host.block_bytes,
                dirty_evicted=counts["dirty_evicted"], pages_written=counts["pages_written"],
                pages=len(stored), lost_by_a_kill=stored.count(False))  # fmt: skip


PARTS = {part.__name__: (part, ["random:long"]) for part in (mix, policies, pipeline)}
PARTS |= {part.__name__: (part, ["classroom"]) for part in (admission, writes, sizes)}


# 5. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    shares = "{gpu:%}, {cpu:%}, {storage:%}"
    mix, policies, hits = (tables.rows(found, part) for part in ("mix", "policies", "admission"))
    for row in mix:
        row |= {tier: row[tier]["median"] for tier in TIERS}
    for row in policies:
        row["guard"] = f"guard {'on' if row['guard'] else 'off'}"
    for row in hits:
        row["length"] = f"{row['history_tokens']:,} tokens"
        row["where"] = ", ".join(f"{tokens:.0f} {tier}" for tier, tokens in row["found"].items() if tokens) or "none"
    hits = tables.grouped([row for row in hits if row["way"] != "computed"], ("way",), "length")
    return tables.paragraphs(
        tables.table("**Conversations behind documents that fit in no single tier:**", {
            "model, at once": "{model}, {at_once}", "TTFT, device alone": "{device_alone_ms:ms}",
            "three tiers": "{ttft_ms:ms}", "lower by": "{lower:%}", "throughput": "{throughput:x}", "found in L1, L2, L3": shares,
        }, mix),
        tables.table(
            "**One history of 1,024 tokens, only in slow storage.** TTFT, and the share of the prompt that came from storage:", {
                "model, reading / computing": "{model}, {r:g}, {guard}", "as measured": "{measured_r:.2f}",
                **{way: f"{{ttft_ms[{way}]:ms}}, {{from_storage[{way}]:%}}" for way in ("computed", *POLICIES)},
            }, policies),
        tables.table("**The same history in storage as fast as the link**: reading and loading overlap, and the question follows:", {
            "model, policy": "{model}, {policy}", "reading, as long as loading": "{alone_ms:.0f} ms", "TTFT": "{ttft_ms:ms}",
            "bound": "{bound_ms:ms}", "bound / measured": "{of_bound:spread}",
        }, tables.rows(found, "pipeline")),
        tables.table("**A hit in each tier** (classroom): TTFT over that of computing, and the tokens found there:", {
            "found in": "{way}", **tables.across(hits, {"": "{over_computing:spread}; {where}"}),
        }, hits),
        tables.table("**Write policies** (classroom), 60 questions about 12 documents (Zipf):", {
            "policy": "{policy}", "found in L1, L2, L3": shares, "TTFT": "{ttft_ms:ms}", "to L2": "{saved_bytes:MB}",
            "to L3": "{storage_bytes:MB}", "dirty evicted": "{dirty_evicted}", "pages written": "{pages_written}",
            "lost by a kill, of pages": "{lost_by_a_kill} of {pages}",
        }, tables.rows(found, "writes")),
        tables.table("**Hit rate by size** (classroom), the same questions, without storage: host memory over device memory, and tokens of a page:", {
            "host / device": "{of_device:g}", "page": "{page}", "found in L1, L2": "{gpu:%}, {cpu:%}", "computed": "{computed:%}",
            "copied back": "{bytes:MB}", "TTFT": "{ttft_ms:ms}",
        }, tables.rows(found, "sizes")))  # fmt: skip


if __name__ == "__main__":
    measure.run("tiered", PARTS, report, measure.parser(__doc__, PARTS, rounds=5).parse_args())
