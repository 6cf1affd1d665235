"""Chapter 06: both ends beside only computing and only loading, on one model, one storage and one clock, in turn.

    python -m benchmarks.both_ends                                     all; results in benchmarks/results/
    python -m benchmarks.both_ends --only grid --model classroom --histories 1024 --r 1

grid      TTFT of a question of 16 tokens behind a history that only storage has. Loading takes r times as long as
          computing does alone, and the prefill has a share of each step: others' prompts take the rest. The bound
          is h + s l c / (l + s c): h a device hit; l and c loading and computing alone as measured, less h; s what
          computing is slowed by the loader beside it, of which nothing is taken (Figure 7).
steps     What each step of 256 tokens takes, computing alone (Figure 3), and K and V a second that this makes, beside
          reading them from a file and copying them in memory (Figure 2).
bits      16 and 8 bits in a 16-bit model: TTFT, tokens that agree, and the largest error of K and V.

Shares are the paper's (appendix C), 10, 50 and 90 %, at three r: 2, 5 and 10 Gbit/s make r = 16, 6.6 and 3.3 on an A100 (14K tokens).
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
from common.store import StoredChunks
from shell import checkpoint, lesson, modelled_link

CHUNK = both_ends.CHUNK
RATIOS, FEW, SHARES, SHARED = [16, 8, 4, 2, 1, 0.5, 0.25], [2, 1, 0.5], [0.9, 0.5, 0.1], [16, 8, 4]  # SHARED: r of all shares
HISTORIES = {"classroom": {1024: RATIOS, 1984: FEW}, "random:long": {1024: FEW}}  # tokens -> r
QUESTION, STEP = 16, 256  # tokens


class Cache(both_ends.BidirectionalCache):
    """`take` False: what is read is dropped, and the limit stays: the loader only runs beside."""

    take = True

    def restore(self, request, restoration, match):
        if self.take:
            return (yield from super().restore(request, restoration, match))
        restoration.layers, restoration.limit = len(self.model.layers), restoration.end
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
    """Brings nothing: what it is asked for is over when it is called off."""

    def get(self, keys, into, label=""):
        transfer = links.Transfer("storage", label)
        transfer.cancel = lambda: transfer.finish(transfer.issued, transfer.issued, links.TransferError("cancelled"))
        return transfer


class Bench:
    def __init__(self, model, tokens: int, bits: int | None = None):
        self.model, self.tokens, self.draw = model, tokens, partial(draw, random.Random(0), model)
        self.history, self.crowd = self.draw(tokens), []  # the same one for so many tokens
        self.modelled, silent = both_ends.ModelledStorage(1e11, 1e9), Silent(0, 1.0)
        self.storage, self.silent = StoredChunks(self.modelled), StoredChunks(silent)
        self.cache = Cache(self.storage, bits=bits, memory=1e9)
        blocks = -(-(tokens + 2 * QUESTION) // 16) + 256  # others' prompts, of 8 steps
        self.engine = engine_of(model, blocks, self.cache, always=True)
        self.silent.open(self.engine.wake.set)
        self.once("compute")  # and kept
        lesson.wait_until_idle(self.engine)
        self.cache.save = lambda batch: None
        silent.index = self.modelled.index
        self.bytes = tokens // CHUNK * self.cache.chunk_bytes

    def once(self, way: str, share: float = 1.0, question: list[int] | None = None) -> Request:
        """Ask behind the history: way hit, compute, load, both, or beside."""
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
        for _ in range(4 if share < 1 else 0):  # others are there before
            self.fill(share)
            engine.step()
        request.received = time.perf_counter()
        engine.submit(request)
        while request.outcome is None:
            self.fill(share)
            engine.step()
        for other in self.crowd:
            engine.cancel(other, ClientDisconnected("it was there to take its share"))
        self.crowd, cache.storage = [], self.storage
        if isinstance(request.outcome, Exception):
            raise request.outcome
        return request

    def fill(self, share: float):
        """Others' prompts take what the prefill leaves of the next step."""
        self.crowd = [other for other in self.crowd if other.outcome is None]
        budget = self.engine.token_budget
        missing = int((1 - share) * budget) - sum(other.pending for other in self.crowd)
        if missing > 0:
            self.crowd.append(Request(self.draw(missing), 8))
            self.engine.submit(self.crowd[-1])

    def typical(self, way: str, share: float = 1.0, rounds: int = 3) -> float:
        """TTFT in ms, the median."""
        return statistics.median(ttft([self.once(way, share) for _ in range(rounds)]))

    def use(self, speed: float):
        """Let storage be so fast from now on, in bytes/s."""
        measure.change_speed(self.engine, self.modelled, self.modelled.reader, modelled_link.Bandwidth(speed))


# 1. The grid ------------------------------------------------------------------------------------------------

def grid(model, arguments):
    for tokens in arguments.histories or HISTORIES.get(arguments.name, [1024]):
        bench = Bench(model, tokens)
        for r in arguments.r or HISTORIES.get(arguments.name, {}).get(tokens, RATIOS):
            hit = min(ttft([bench.once("hit") for _ in range(5)]))  # noise only slows
            alone = max(1.0, bench.typical("compute") - hit)
            for share in [1.0, *(arguments.share if r in SHARED else [])]:
                rounds = arguments.rounds if share == 1 else min(3, arguments.rounds)
                yield from measure.again_if_slower(partial(cell, bench, r, share, alone, hit), rounds)
        bench.engine.close()


def cell(bench: Bench, r: float, share: float, alone: float, hit: float, rounds: int) -> dict:
    bench.use(bench.bytes / (1e-3 * r * alone))
    load = bench.typical("load", share, 1 if rounds < 5 else 2)
    slowed = bench.typical("beside") / bench.typical("compute")
    ways = {way: partial(bench.once, way, share) for way in ("compute", "both")}
    asked = measure.same_question_in_turn(ways, rounds, partial(bench.draw, QUESTION))
    measure.check_alike(bench.model, {way: [request.new for request in each] for way, each in asked.items()})
    times = {way: ttft(requests) for way, requests in asked.items()}
    loaded = statistics.median(request.found.get("storage", 0) / CHUNK for request in asked["both"])
    only_load, only_compute = load - hit, max(1.0, slowed) * (statistics.median(times["compute"]) - hit)
    bound = hit + only_load * only_compute / (only_load + only_compute)
    better = [min(one, load) for one in times["compute"]]
    return dict(
        history_tokens=bench.tokens, bytes=bench.bytes, r=r, share=share, rounds=rounds, hit_ms=hit, slowed=slowed, bound_ms=bound,
        ttft_ms=dict(compute=spread(times["compute"]), load=load, both=spread(times["both"])),
        over_bound=spread([ours / bound for ours in times["both"]]), better_over_both=ratio(better, times["both"]),
        behind=measure.is_slower([ours / other for ours, other in zip(times["both"], better)]),
        loaded_chunks=loaded, computed_chunks=bench.tokens / CHUNK - loaded)  # fmt: skip


# 2. Steps, and 8 bits ---------------------------------------------------------------------------------------

def steps(model, arguments):
    bench = Bench(model, min(7, (model.config.max_position_embeddings - 2 * QUESTION) // STEP) * STEP)
    bench.engine.token_budget = STEP
    asked = [bench.once("compute") for _ in range(1 + arguments.rounds)][1:]
    spans = [[span for span in request.timeline.spans if span.lane == "compute"][: bench.tokens // STEP] for request in asked]
    seconds = {"computing": [each[-1].end - each[0].start for each in spans]}
    content, into = torch.ones(2, int(bench.bytes), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "content").write_bytes(content.numpy())
        reads = {"a file, read before": file.read_bytes, "host memory": partial(into.copy_, content)}
        seconds |= {name: timeit.repeat(read, number=1, repeat=arguments.rounds) for name, read in reads.items()}
    yield dict(history_tokens=bench.tokens, bytes=bench.bytes,
               steps_ms=[spread([1e3 * (span.end - span.start) for span in each]) for each in zip(*spans)],
               mbps={name: spread([bench.bytes / 1e6 / each for each in taken]) for name, taken in seconds.items()})
    bench.engine.close()


def bits(model, arguments):
    model, *_ = checkpoint.load(arguments.name, "bfloat16", arguments.device)
    tokens, rounds = min(1024, max(arguments.histories or [1024])), arguments.rounds
    exact, small = Bench(model, tokens), Bench(model, tokens, bits=8)

    def contents(bench: Bench):
        request = bench.once("load")
        return bench.engine.pool.memory[:, :, bench.engine.pool.find(request.chain)[: tokens // 16]].float()

    error = (contents(small) - (kv := contents(exact))).abs()
    for r in (4, 1):
        speed = exact.bytes / (1e-3 * r * exact.typical("compute"))
        for bench in (exact, small):
            bench.use(speed)
        row = dict(r=r)
        for way in ("load", "both"):
            ways = {bench.cache.bits: partial(bench.once, way, 1.0) for bench in (exact, small)}
            taken = measure.same_question_in_turn(ways, rounds, partial(exact.draw, QUESTION)).values()
            row[f"{way}_faster"] = ratio(*map(ttft, taken))
        agree = sum(theirs.new == ours.new for theirs, ours in zip(*taken))  # of both
        yield dict(row, both_tokens_agree=f"{agree} of {rounds}", largest_error=error.max().item(), largest=kv.abs().max().item())
    for bench in (exact, small):
        bench.engine.close()


PARTS = {"grid": (grid, list(HISTORIES)), "steps": (steps, list(HISTORIES)), "bits": (bits, ["classroom"])}


# 3. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    rows = tables.rows(found, "grid")
    for row in rows:
        row["column"] = f"{row['model']}, {row['history_tokens']:,}"
    grid = tables.grouped(rows, ("r", "share"), "column")
    return tables.paragraphs(
        tables.table(
            "**How many times as soon as by the better of only computing and only loading** the first token comes by both; "
            "behind it the chunks that were computed and loaded:", {
                "r": "{r:g}", "share": "{share:g}",
                **tables.across(grid, {"": "{better_over_both:spread}; {computed_chunks:.0f} + {loaded_chunks:.0f}"}),
            }, grid),
        report_all_cells(tables.grouped(rows, ("model", "history_tokens", "r", "share"), "model")) if rows else "",  # the last run of each
        tables.table(
            "**Computing as a bandwidth** (Figures 2 and 3): K and V a second behind {history_tokens:,} tokens, in MB/s, beside what "
            "holds them; a step of 256 tokens at the beginning, and at the end:", {
                "model": "{model}", **{name: f"{{mbps[{name}]:spread}}" for name in ("computing", "a file, read before", "host memory")},
                "first step": "{first:ms}", "last step": "{last:ms}",
            }, [dict(row, first=row["steps_ms"][0], last=row["steps_ms"][-1]) for row in tables.rows(found, "steps")]),
        tables.table("**16 bits over 8** (Figure 8), TTFT in bfloat16:", {
            "model, r": "{model}, {r:g}", "only loading": "{load_faster:spread}", "both": "{both_faster:spread}",
            "tokens agree": "{both_tokens_agree}", "largest error of K and V": "{largest_error:.2g} of {largest:.0f}",
        }, tables.rows(found, "bits")))  # fmt: skip


def report_all_cells(rows: list[dict]) -> str:
    """A cell that computes no chunk, or loads none, says nothing about doing both."""
    over, telling = [row["over_bound"]["median"] for row in rows], [min(row["loaded_chunks"], row["computed_chunks"]) >= 1 for row in rows]
    return (f"TTFT is {tables.between(over)} of the bound, {tables.number(statistics.median(over))} in the median. The loader beside "
            f"it makes computing take {tables.number(statistics.median(row['slowed'] for row in rows))} times as long, in the median "
            f"(Figure 7). {sum(telling)} of {len(rows)} cells had chunks of both.")  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    parser.add_argument("--r", type=float, nargs="+", help="loading over computing")
    parser.add_argument("--share", type=float, nargs="*", default=SHARES, help="of a step, besides 1")
    measure.run("both_ends", PARTS, report, parser.parse_args())
