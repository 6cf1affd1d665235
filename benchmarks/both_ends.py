"""Compare chapter 06's both ends with computing alone and with loading alone, in turn.

    python -m benchmarks.both_ends                                     all; results in benchmarks/results/
    python -m benchmarks.both_ends --only grid --model classroom --histories 1024 --r 1

grid      TTFT of a question of 16 tokens behind a history that only storage has. Loading the history takes r
          times as long as computing it. The prefill gets a share of each step, and prompts of other requests
          take the rest. With a share of 1, loading alone is asked in turn with computing alone and both. The
          bound is the TTFT of a device hit plus the time until both ends meet. That time follows from loading
          alone and computing alone as measured, less the hit. Early tokens cost less to compute than late
          ones. The loader slows computing by the factor that is measured while the loader runs and none of
          its chunks is used (Figure 7).
lengths   the same for several lengths at one bandwidth (Figure 5b): the share of tokens that is computed.
steps     the time of each step of 256 tokens, computing alone (Figure 3) and beside a loader whose chunks are
          dropped (Figure 7); and the bytes of K and V that it makes a second, beside reading them from a file
          and copying them in memory (Figure 2).
others    TBT of four requests that decode while the history is computed, loaded, or brought back from both
          ends (Cake, 5.5: its overhead is negligible), in steps of 256 tokens.
bits      chunks of 8 bits beside chunks in the model's dtype, which has 16 bits if the processor multiplies
          them: TTFT, answers that agree, and the largest error of K and V; with a whole step, and with half
          of one.

The paper's shares (appendix C) are 10, 50 and 90 %. Its 2, 5 and 10 Gbit/s are r = 16, 6.6 and 3.3 on an A100
(14K tokens).
"""

import random
import statistics
import tempfile
import time
import timeit
from functools import partial
from pathlib import Path

import torch

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, spread, ttft
from benchmarks.planned import both_ends, engine_of
from common import link as links
from common.requests import ClientDisconnected, Request
from shell import checkpoint, lesson, modelled_link
from shell.chunks import StoredChunks
from shell.machine import flops
from shell.workers import Worker

CHUNK = both_ends.CHUNK
RATIOS, FEW, SHARES, SHARED = [4, 2, 1, 0.5, 0.25], [2, 1, 0.5], [0.9, 0.5, 0.1], [4]  # SHARED: the r that is measured with all shares
HISTORIES = {"classroom": {1024: RATIOS, 1984: FEW}, "random:long": {1024: [1]}}  # tokens -> r
LENGTHS = 512, 1024, 1984  # tokens
QUESTION, STEP, OTHERS = 16, 256, 4  # tokens, tokens, requests


class Cache(both_ends.BidirectionalCache):
    """Chapter 06's Cache. With `take` False the loader runs beside prefill, and its chunks are dropped."""

    take = True

    def restore(self, request, restoration, match):
        if self.take:
            return (yield from super().restore(request, restoration, match))
        request.next = request.computed  # prefill computes everything
        (block,) = self.staging.allocate(1)
        into = [self.arrays[block]]
        reads = [self.storage.read([found], into, label=f"chunk {number}")[0] for number, found in match.blocks]
        try:
            yield reads[-1]
        finally:
            for read in reads:
                read.cancel()
            self.hold("beside", reads, (self.staging, [block]))
            self.staging.release([block])


class Silent(both_ends.ModelledStorage):
    """A storage whose reads never complete: each ends when it is cancelled."""

    def get(self, keys, into, label=""):
        transfer = links.Transfer("storage", label)
        transfer.cancel = lambda: transfer.finish(transfer.issued, transfer.issued, links.TransferError("cancelled"))
        return transfer


class Bench:
    """One engine, its storage, and a history of `tokens` tokens that storage has."""

    def __init__(self, model, tokens: int, bits: int | None = None):
        self.model, self.tokens, self.draw = model, tokens, partial(draw, random.Random(0), model)
        self.history, self.crowd = self.draw(tokens), []  # of one length always the same history
        self.modelled, silent = both_ends.ModelledStorage(1e11, 1e9), Silent(0, 1.0)
        self.storage, self.silent = StoredChunks(self.modelled), StoredChunks(silent)
        self.cache = Cache(self.storage, bits=bits, memory=1e9)
        blocks = -(-(tokens + 2 * QUESTION) // 16) + 256  # and room for prompts of other requests, 8 steps of them
        self.engine = engine_of(model, blocks, self.cache, always=True)
        self.silent.open(partial(Worker, wake=self.engine.wake.set), self.engine)
        self.once("compute")  # compute the history and save it
        lesson.wait_until_idle(self.engine)
        self.cache.save = lambda batch: None
        silent.index = self.modelled.index
        self.bytes = tokens // CHUNK * self.cache.chunk_bytes

    def once(self, way: str, share: float = 1.0, question: list[int] | None = None, others: int = 0) -> Request:
        """Ask a question behind the history. `way`: hit (on the device), compute, load, both, or beside
        (compute while the loader runs); `share`: of each step, for this request; `others`: requests that
        decode at the same time, with `others_ms` between their tokens. Returns: the finished request."""
        engine, cache = self.engine, self.cache
        lesson.wait_until_idle(engine)
        if way != "hit":
            engine.evict("device")
        time.sleep(0.02)
        cache.share = 0.0 if way == "load" else share
        cache.take = way != "beside"
        if way == "compute" and share < 1:
            cache.storage = self.silent
        request = Request(self.history + (question or self.draw(QUESTION)), 1)
        request.must_compute = way == "compute" and share == 1
        for _ in range(4 if share < 1 else 0):  # other requests already run when this one arrives
            self.fill(share)
            engine.step()
        decoding = [Request(self.draw(QUESTION), self.model.config.max_position_embeddings // 2) for _ in range(others)]
        for other in decoding:
            engine.submit(other)
        while not all(other.new for other in decoding):
            engine.step()
        before, request.received = sum(len(other.new) for other in decoding), time.perf_counter()
        engine.submit(request)
        while request.outcome is None:
            self.fill(share)
            engine.step()
        seconds, made = time.perf_counter() - request.received, sum(len(other.new) for other in decoding) - before
        request.others_ms = 1e3 * seconds * others / max(1, made)
        for other in self.crowd + decoding:
            engine.cancel(other, ClientDisconnected("it only took its share of each step"))
        self.crowd, cache.storage = [], self.storage
        if isinstance(request.outcome, Exception):
            raise request.outcome
        return request

    def fill(self, share: float):
        """Submit prompts of other requests that fill 1 - share of the next step's token budget."""
        self.crowd = [other for other in self.crowd if other.outcome is None]
        budget = self.engine.token_budget
        missing = int((1 - share) * budget) - sum(other.pending for other in self.crowd)
        if missing > 0:
            self.crowd.append(Request(self.draw(missing), 8))
            self.engine.submit(self.crowd[-1])

    def typical(self, way: str, share: float = 1.0, rounds: int = 3) -> float:
        """Return the median TTFT in ms."""
        return statistics.median(ttft([self.once(way, share) for _ in range(rounds)]))

    def use(self, speed: float):
        """Give the modelled storage a bandwidth of `speed` bytes/s."""
        measure.change_speed(self.engine, self.modelled, self.modelled.reader, modelled_link.Bandwidth(speed))


# 1. The grid ------------------------------------------------------------------------------------------------

def grid(model, arguments):
    """Yield a row for each history, r and share."""
    for tokens in arguments.histories or HISTORIES.get(arguments.name, [1024]):
        bench = Bench(model, tokens)
        for r in arguments.r or HISTORIES.get(arguments.name, {}).get(tokens, RATIOS):
            alone = bench.typical("compute")
            for share in [1.0, *(arguments.share if r in SHARED and tokens < 1984 else [])]:
                yield dict(r=r, **cell(bench, bench.bytes / (1e-3 * r * alone), share, arguments.rounds))
        bench.engine.close()


def cell(bench: Bench, speed: float, share: float, rounds: int) -> dict:
    """Measure all ways in turn over storage of `speed` bytes/s. Returns: the row.

    With a share below 1, prompts of other requests take long, so there are at most three rounds, and loading
    alone is asked once."""
    bench.use(speed)
    whole = share == 1
    slowed = bench.typical("beside") / bench.typical("compute")
    asked = measure.same_question_in_turn(
        {way: partial(bench.once, way, share) for way in ("compute", "both", "load")[: 2 + whole]},
        rounds if whole else min(3, rounds), partial(bench.draw, QUESTION))  # fmt: skip
    measure.check_alike(bench.model, {way: [request.new for request in each] for way, each in asked.items()})
    times = {way: ttft(requests) for way, requests in asked.items()}
    times.setdefault("load", [bench.typical("load", share, 1)] * len(times["both"]))
    hit = min(ttft([bench.once("hit") for _ in range(5)]))  # noise only slows
    loaded = statistics.median(request.found.get("storage", 0) / CHUNK for request in asked["both"])
    load, compute = (max(1.0, statistics.median(times[way]) - hit) for way in ("load", "compute"))
    bound = hit + time_to_meet(bench.model.config, bench.tokens, load, max(1.0, slowed) * compute)
    better = list(map(min, times["compute"], times["load"]))
    return dict(
        history_tokens=bench.tokens, bytes=bench.bytes, share=share, hit_ms=hit, slowed=slowed, bound_ms=bound, mbps=speed / 1e6,
        ttft_ms={way: spread(each) for way, each in times.items()}, over_bound_ms=spread([ours - bound for ours in times["both"]]),
        better_over_both=ratio(better, times["both"]), over_better=ratio(times["both"], better),
        loaded_chunks=loaded, computed_chunks=bench.tokens / CHUNK - loaded)  # fmt: skip


def time_to_meet(config, tokens: int, load: float, compute: float) -> float:
    """Return the time until both ends meet. `compute`, `load`: the time to compute, and to load, all tokens."""
    whole = flops(config, 0, tokens)
    return min(max(compute * flops(config, 0, front) / whole, load * (1 - front / tokens)) for front in range(tokens + 1))


def lengths(model, arguments):
    """Yield a row for each length. Storage loads the longest history in the time in which it is computed."""
    benches = [Bench(model, tokens) for tokens in arguments.histories or LENGTHS]
    speed = benches[-1].bytes / (1e-3 * benches[-1].typical("compute"))
    for bench in benches:
        yield cell(bench, speed, 1.0, arguments.rounds)
        bench.engine.close()


# 2. Steps, and 8 bits ---------------------------------------------------------------------------------------

def steps(model, arguments):
    """Yield one row: the time of each prefill step, alone and beside the loader; MB/s of computing, of a file
    and of host memory."""
    bench = Bench(model, min(7, (model.config.max_position_embeddings - 2 * QUESTION) // STEP) * STEP)
    bench.engine.token_budget = STEP
    bench.use(bench.bytes / (1e-3 * bench.typical("compute")))
    asked = lesson.in_turn({way: partial(bench.once, way) for way in ("compute", "beside")}, arguments.rounds)
    spans, beside = ([[span for span in request.timeline.spans if span.lane == "compute"][: bench.tokens // STEP] for request in each]
                     for each in asked.values())  # fmt: skip
    seconds, steps_ms, beside_ms = {"computing": [each[-1].end - each[0].start for each in spans]}, *(
        [[1e3 * (span.end - span.start) for span in each] for each in zip(*rounds)] for rounds in (spans, beside))
    content, into = torch.ones(2, int(bench.bytes), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "content").write_bytes(content.numpy())
        reads = {"a file, read before": file.read_bytes, "host memory": partial(into.copy_, content)}
        seconds |= {name: timeit.repeat(read, number=1, repeat=arguments.rounds) for name, read in reads.items()}
    yield dict(history_tokens=bench.tokens, bytes=bench.bytes,
               steps_ms=list(map(spread, steps_ms)),
               beside_over_alone=spread([statistics.median(b) / statistics.median(a) for a, b in zip(steps_ms, beside_ms)]),
               mbps={name: spread([bench.bytes / 1e6 / each for each in taken]) for name, taken in seconds.items()})
    bench.engine.close()


def others(model, arguments):
    """Yield one row: TBT of OTHERS requests while the history comes back in each way."""
    bench = Bench(model, max(LENGTHS))
    bench.engine.token_budget = STEP
    bench.use(bench.bytes / (1e-3 * bench.typical("compute")))
    ways = {way: partial(bench.once, way, 1.0, others=OTHERS) for way in ("compute", "both", "load")}
    taken = measure.same_question_in_turn(ways, arguments.rounds, partial(bench.draw, QUESTION))
    tbt = {way: [request.others_ms for request in each] for way, each in taken.items()}
    loaded = statistics.median(request.found.get("storage", 0) / CHUNK for request in taken["both"])
    yield dict(others=OTHERS, history_tokens=bench.tokens, loaded_chunks=loaded, computed_chunks=bench.tokens / CHUNK - loaded,
               ttft_ms={way: spread(ttft(each)) for way, each in taken.items()}, tbt_ms={way: spread(each) for way, each in tbt.items()},
               tbt_over_computing={way: ratio(tbt[way], tbt["compute"]) for way in ("both", "load")})  # fmt: skip
    bench.engine.close()


def bits(model, arguments):
    """Yield a row for a whole step and for half of one: 8-bit chunks beside exact ones."""
    model, *_ = checkpoint.load(arguments.name, measure.short_dtype(), arguments.device)
    tokens, rounds = min(1024, max(arguments.histories or [1024])), arguments.rounds
    exact, small = Bench(model, tokens), Bench(model, tokens, bits=8)

    def contents(bench: Bench):
        request = bench.once("load")
        return bench.engine.pool.memory[:, :, bench.engine.pool.find(request.chain)[: tokens // 16]].float()

    error = (contents(small) - (kv := contents(exact))).abs()
    speed = exact.bytes / (4e-3 * exact.typical("compute"))
    for bench in (exact, small):
        bench.use(speed)
    for share in (1.0, 0.5):
        row = dict(r=4, share=share, bits=8 * model.dtype.itemsize)
        for way in ("load", "both"):
            ways = {bench.cache.bits: partial(bench.once, way, share) for bench in (exact, small)}
            taken = measure.same_question_in_turn(ways, rounds, partial(exact.draw, QUESTION)).values()
            row[f"{way}_faster"] = ratio(*map(ttft, taken))
        agree = sum(theirs.new == ours.new for theirs, ours in zip(*taken))  # of way "both"
        yield dict(row, both_tokens_agree=f"{agree} of {rounds}", largest_error=error.max().item(), largest=kv.abs().max().item())
    for bench in (exact, small):
        bench.engine.close()


PARTS = {"grid": (grid, list(HISTORIES))} | {part.__name__: (part, ["classroom"]) for part in (lengths, steps, others, bits)}


# 3. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    rows = tables.rows(found, "grid")
    few, most = ([tables.median(row["ttft_ms"]["compute"]) for row in rows if row["share"] == share] for share in (0.1, 0.9))
    slower = [f"Computing takes {tables.number(few[0] / most[0])} times as long with a tenth of each step as with nine tenths (Cake, "
              "5.3: 8.22)."] if few and most else []  # fmt: skip
    columns = {
        **{way: f"{{ttft_ms[{way}]:ms}}" for way in ("compute", "load", "both")}, "faster / both": "{better_over_both:spread}",
        "both - bound, ms": "{over_bound_ms:spread}", "slowed": "{slowed:n}",
        "chunks computed, loaded": "{computed_chunks:.0f}, {loaded_chunks:.0f}",
    }  # fmt: skip
    shares = [dict(row, computed=row["computed_chunks"] / (row["computed_chunks"] + row["loaded_chunks"])) for row in tables.rows(found, "lengths")]
    return tables.paragraphs(
        tables.table(
            "**TTFT of computing, of loading and of both ends**; the faster of the first two over both, within each round; both minus the "
            "bound; and computing beside a loader over computing alone (`slowed`, Figure 7):",
            {"model, history": "{model}, {history_tokens:,}", "r": "{r:g}", "share": "{share:g}"} | columns, rows),
        *slower,
        tables.table(
            "**At one bandwidth** (Figure 5b: from 2K to 32K tokens the computed share falls by a tenth), {mbps:.0f} MB/s, {model}:",
            {"history": "{history_tokens:,}", "computed": "{computed:%}"} | columns, shares),
        tables.table(
            "**Computing as a bandwidth** (Figures 2 and 3): MB/s at which K and V of {history_tokens:,} tokens are computed, read from "
            "a file, and copied in host memory; the time of the first and of the last step of 256 tokens; and steps beside a loader over "
            "steps without one (Figure 7: no difference):", {
                "model": "{model}", **{name: f"{{mbps[{name}]:spread}}" for name in ("computing", "a file, read before", "host memory")},
                "first step": "{first:ms}", "last step": "{last:ms}", "beside a loader": "{beside_over_alone:spread}",
            }, [dict(row, first=row["steps_ms"][0], last=row["steps_ms"][-1]) for row in tables.rows(found, "steps")]),
        tables.table(
            "**Four other requests decode** while {history_tokens:,} tokens come back, in steps of 256 tokens; storage is as fast as "
            "computing: TBT of the others, and TTFT:", {
                "model": "{model}", **{way: f"{{tbt_ms[{way}]:ms}}, {{ttft_ms[{way}]:ms}}" for way in ("compute", "both", "load")},
                "TBT, both / compute": "{tbt_over_computing[both]:spread}", "load / compute": "{tbt_over_computing[load]:spread}",
            }, tables.rows(found, "others")),
        tables.table("**{bits} bits over 8 bits** (Figure 8): ratio of TTFT:", {
            "model, r, share": "{model}, {r:g}, {share:g}", "only loading": "{load_faster:spread}", "both": "{both_faster:spread}",
            "tokens agree": "{both_tokens_agree}", "largest error of K and V": "{largest_error:.2g} of {largest:.0f}",
        }, tables.rows(found, "bits")))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    parser.add_argument("--r", type=float, nargs="+", help="time of loading over time of computing")
    parser.add_argument("--share", type=float, nargs="*", default=SHARES, help="shares of a step that prefill gets, besides 1")
    measure.run("both_ends", PARTS, report, parser.parse_args())
