"""Chapter 06: both ends beside only computing and only loading, on one model, one storage and one clock, in turn.

    python -m benchmarks.both_ends                                     all; results in benchmarks/results/
    python -m benchmarks.both_ends --only grid --model classroom --histories 1024 --r 1

grid      TTFT of a question of 16 tokens behind a history that only storage has. Loading takes r times as long as
          computing does alone, and the prefill has a share of each step: others' prompts take the rest. The bound
          is h + s l c / (l + s c): h a device hit; l and c loading and computing alone as measured, less h; s what
          computing is slowed by the loader beside it. Both is behind the better one where the median of the paired
          ratios is above 1.03 and their lower quartile above 1, or the median above 1.06; a cell that is, is
          measured again with twice the rounds, and both rows stand.
overhead  Figure 7: step by step, with the loader beside it over without. Nothing that it reads is taken.
trace     storage that is four times slower and faster than computing by turns.
files     chunks in a real directory, as fast as it is.
lengths   Figure 5b: the share that is computed, on one bandwidth for all histories.
bits      16 and 8 bits in a 16-bit model: TTFT, tokens that agree, and the largest error of K and V.
"""

import argparse
import importlib
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint, cli, lesson  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import HungUp, Request  # noqa: E402
from common.store import CHUNK, ModelledStorage, StoredChunks, in_directories  # noqa: E402

paged, both_ends = importlib.import_module("02_paged_kv"), importlib.import_module("06_bidirectional")
HISTORIES = {"classroom": [1024, 1984], "random:small": [1024, 1984], "random:long": [4096]}
RATIOS, SHARES, SHARED = [16, 8, 4, 2, 1, 0.5, 0.25], [0.9, 0.5, 0.1], [8, 2]  # SHARED: r of the cells with shares
QUESTION = 16  # tokens
PAPER = dict(compute=0.367, load=0.6055)  # TTFT less than with either alone, on average


class Cache(both_ends.BidirectionalCache):
    """`take` False: what is read is dropped, and the limit stays: the loader only runs beside."""

    take = True

    def restore(self, request, restoration, match):
        if self.take:
            return super().restore(request, restoration, match)
        return self.beside(restoration, match)

    def beside(self, restoration, match):
        restoration.layers, restoration.limit = len(self.model.layers), restoration.end
        (place,) = self.places.allocate(1)
        into = [self.arrays[place]]
        reads = [self.storage.read([found], into, label=f"chunk {number}")[0] for number, found in match.blocks]
        try:
            yield reads[-1]
        finally:
            for read in reads:
                read.cancel()
            self.hold("beside", reads, (self.places, [place]))
            self.places.release([place])


class Silent(ModelledStorage):
    """Brings nothing: what it is asked for is over when it is called off."""

    def get(self, keys, into, label=""):
        transfer = links.Transfer("storage", label)
        transfer.cancel = lambda: transfer.finish(transfer.issued, transfer.issued, links.TransferError("cancelled"))
        return transfer


class Bench:
    def __init__(self, model, tokens: int, storage=None, budget: int = 512, bits: int | None = None):
        self.model, self.rng, self.tokens = model, random.Random(0), tokens
        self.history, self.crowd = self.draw(tokens), []  # the same one for so many tokens
        self.storage = storage or StoredChunks(ModelledStorage(1e11, 1e9))
        self.cache = Cache(self.storage, bits=bits, memory=1e9)
        blocks = -(-(tokens + 2 * QUESTION) // 16) + 8 * -(-budget // 16)
        runner = paged.Runner(model, blocks)
        self.engine = paged.Engine(runner, self.cache, budget, always_restore=True)
        (self.inner,) = self.storage.storages
        silent = Silent(0, 1.0)
        self.silent = StoredChunks(silent)
        self.silent.open(self.engine.wake.set)
        self.once("compute")  # and kept
        lesson.settle(self.engine)
        self.cache.save = lambda batch: None
        silent.index = getattr(self.inner, "index", {})
        self.bytes = tokens // CHUNK * self.cache.chunk_bytes

    def draw(self, tokens: int) -> list[int]:
        return [self.rng.randrange(300, self.model.config.vocab_size) for _ in range(tokens)]

    def once(self, way: str, share: float = 1.0, question: list[int] | None = None) -> Request:
        """Ask behind the history: way hit, compute, load, both, or beside."""
        engine, cache = self.engine, self.cache
        lesson.settle(engine)
        if way != "hit":
            engine.evict("device")
        time.sleep(0.02)
        cache.share = 0.0 if way == "load" else share
        cache.take = way != "beside"
        if way == "compute" and share < 1:
            cache.storage = self.silent
        request = Request(self.history + (question or self.draw(QUESTION)), 1)
        request.declined = way == "compute" and share == 1
        bandwidth = self.inner.bandwidth
        for _ in range(4 if share < 1 else 0):  # others are there before
            self.fill(share)
            engine.step()
        if isinstance(bandwidth, links.Trace):
            bandwidth.began = time.perf_counter()
        request.received = time.perf_counter()
        engine.submit(request)
        while request.outcome is None:
            self.fill(share)
            engine.step()
        for other in self.crowd:
            engine.cancel(other, HungUp("it was there to take its share"))
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

    def ttft(self, way: str, share: float = 1.0, rounds: int = 3) -> list[float]:
        return [self.once(way, share).outcome.ttft_ms for _ in range(rounds)]

    def as_slow(self, ratio: float, compute: float) -> float:
        """Let loading take `ratio` times `compute` ms -> bytes/s."""
        self.use(links.Bandwidth(self.bytes / (1e-3 * ratio * compute)))
        return self.inner.bandwidth.value

    def use(self, bandwidth: links.Bandwidth):
        """Let storage be so fast from now on."""
        self.inner.bandwidth = bandwidth
        self.inner.speeds.clear()

    def bound(self, hit: float, load: float, compute: float, slowed: float = 1.0) -> float:
        """h + s l c / (l + s c), in ms."""
        load, compute = load - hit, slowed * (compute - hit)
        return hit + load * compute / (load + compute)


def is_behind(ratios: list[float]) -> bool:
    """Whether both took longer than the better one, by the rule above."""
    middle, low = statistics.median(ratios), statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    return middle > 1.03 and low > 1 or middle > 1.06


def cell(bench: Bench, ratio: float, share: float, rounds: int, alone: float, hit: float) -> dict:
    speed, taken = bench.as_slow(ratio, alone), dict(compute=[], both=[])
    load = statistics.median(bench.ttft("load", share, 1 if rounds < 5 else 2))
    slowed = statistics.median(bench.ttft("beside")) / statistics.median(bench.ttft("compute"))
    bench.once("both", share)
    for _ in range(rounds):
        question = bench.draw(QUESTION)
        asked = {way: bench.once(way, share, question) for way in taken}
        assert len({tuple(request.new) for request in asked.values()}) == 1 or bench.model.dtype != torch.float32
        for way, request in asked.items():
            taken[way].append(request)
    times = {way: [request.outcome.ttft_ms for request in requests] for way, requests in taken.items()}
    loaded = [request.found.get("storage", 0) / CHUNK for request in taken["both"]]
    bound = bench.bound(hit, load, statistics.median(times["compute"]), max(1.0, slowed))
    paired = [ours / min(theirs, load) for ours, theirs in zip(times["both"], times["compute"])]
    return dict(
        history_tokens=bench.tokens, r=ratio, share=share, rounds=rounds, gbps=speed / 1e9,
        ttft_ms=dict(compute=spread(times["compute"]), load=load, both=spread(times["both"])),
        load_arithmetic_ms=hit + 1e3 * bench.bytes / speed, hit_ms=hit, slowed=slowed, bound_ms=bound,
        over_bound=spread([ours / bound for ours in times["both"]]),
        better_over_both=spread([1 / ratio for ratio in paired]), behind=is_behind(paired),
        less_than_compute=1 - statistics.median(times["both"]) / statistics.median(times["compute"]),
        less_than_load=1 - statistics.median(times["both"]) / load,
        loaded_chunks=statistics.median(loaded), computed_chunks=bench.tokens / CHUNK - statistics.median(loaded),
    )  # fmt: skip


def grid(model, histories: list[int], rounds: int, ratios: list[float], shares: list[float]) -> dict:
    rows = []
    for tokens in histories:
        bench = Bench(model, tokens)
        hit = statistics.median(bench.ttft("hit", rounds=5))
        for ratio in ratios:
            alone = statistics.median(bench.ttft("compute")) - hit
            for share in [1.0, *(shares if ratio in SHARED else [])]:
                rows.append(cell(bench, ratio, share, rounds, alone, hit))
                show(rows[-1])
                if rows[-1]["behind"]:
                    rows.append(cell(bench, ratio, share, 2 * rounds, alone, hit))
                    show(rows[-1])
        bench.engine.close()
    # A cell that computes no chunk, or loads none, says nothing about doing both
    telling = [row for row in rows if row["loaded_chunks"] >= 1 and row["computed_chunks"] >= 1]
    less = {way: statistics.mean(row[f"less_than_{way}"] for row in telling or rows) for way in PAPER}
    return dict(rows=rows, telling=len(telling), less_on_average=less, paper=PAPER)


def show(row: dict):
    taken = row["ttft_ms"]
    print(f"{row['history_tokens']:5} tokens, r {row['r']:5}, share {row['share']:.1f}: compute "
          f"{taken['compute']['median']:7.1f} ms, load {taken['load']:7.1f} (on paper "
          f"{row['load_arithmetic_ms']:7.1f}), both {taken['both']['median']:7.1f}: "
          f"{row['better_over_both']['median']:.2f}x as soon as the better, {row['over_bound']['median']:.2f} times the "
          f"bound (h {row['hit_ms']:.1f}, s {row['slowed']:.2f}); {row['computed_chunks']:.1f} chunks computed, "
          f"{row['loaded_chunks']:.1f} loaded" + ", BEHIND" * row["behind"], flush=True)  # fmt: skip


def divide(bench: Bench, rows):
    for request in bench.cache.unmet():
        request.restoration.portion = rows(request.restoration.limit - request.computed)


def overhead(model, tokens: int, rounds: int, ratios: list[float], budget: int = 128) -> dict:
    bench, rows = Bench(model, tokens, budget=budget), []
    alone = statistics.median(bench.ttft("compute")) - statistics.median(bench.ttft("hit"))

    def steps(way: str) -> list[float]:
        spans = [span for span in bench.once(way).timeline.spans if span.label == f"prefill {budget}"]
        return [1e3 * (span.end - span.start) for span in spans]

    for ratio in ratios:
        speed = bench.as_slow(ratio, alone)
        bench.cache.divide = partial(divide, bench, lambda left: budget)  # steps of one size
        taken = lesson.in_turn({way: partial(steps, way) for way in ("compute", "beside")}, rounds)
        del bench.cache.divide
        by_step = {way: [statistics.median(step) for step in zip(*found)] for way, found in taken.items()}
        over = [beside / compute for compute, beside in zip(*by_step.values())]
        rows.append(dict(history_tokens=tokens, step_tokens=budget, r=ratio, gbps=speed / 1e9, steps_ms=by_step,
                         over_without=spread(over)))  # fmt: skip
    bench.engine.close()
    return dict(rows=rows)


def ways(bench: Bench, rounds: int) -> dict:
    """TTFT of each way in turn, and what was loaded."""
    names, hit = ("compute", "load", "both"), statistics.median(bench.ttft("hit"))
    asked = lesson.in_turn({way: partial(bench.once, way) for way in names}, rounds)
    taken = {way: [request.outcome.ttft_ms for request in requests] for way, requests in asked.items()}
    middle = {way: statistics.median(samples) for way, samples in taken.items()}
    bound = bench.bound(hit, middle["load"], middle["compute"])
    loaded = [request.found.get("storage", 0) / CHUNK for request in asked["both"]]
    return dict(
        history_tokens=bench.tokens, ttft_ms={way: spread(samples) for way, samples in taken.items()}, hit_ms=hit,
        better_over_both=spread([min(*found[:2]) / found[2] for found in zip(*taken.values())]), bound_ms=bound,
        over_bound=middle["both"] / bound, chunks=bench.tokens // CHUNK, loaded_chunks=statistics.median(loaded),
    )  # fmt: skip


def trace(model, tokens: int, rounds: int) -> dict:
    bench = Bench(model, tokens)
    seconds = 1e-3 * statistics.median(bench.ttft("compute"))
    even = bench.bytes / seconds
    bench.use(links.Trace([even / 4, 4 * even], seconds / 5))
    found = ways(bench, rounds)
    bench.engine.close()
    return dict(rows=[dict(found, storage=str(bench.storage))])


def files(model, tokens: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        bench = Bench(model, tokens, in_directories([Path(folder)], 100))
        found = ways(bench, rounds)
        bench.engine.close()
        what = "files, as the operating system holds them in memory"
        return dict(rows=[dict(found, gbps=bench.storage.speed() / 1e9, what=what)])


def lengths(model, histories: list[int], rounds: int) -> dict:
    rows, speed = [], None
    for tokens in sorted(histories, reverse=True):
        bench = Bench(model, tokens)
        speed = speed or bench.as_slow(1.0, statistics.median(bench.ttft("compute")))
        bench.use(links.Bandwidth(speed))
        found = ways(bench, rounds)
        rows.insert(0, dict(found, gbps=speed / 1e9, computed_share=1 - found["loaded_chunks"] / found["chunks"]))
        bench.engine.close()
    return dict(rows=rows)


def bits(name: str, device: str, tokens: int, rounds: int) -> dict:
    model, *_ = checkpoint.load(name, "bfloat16", device)
    exact, small, rows = Bench(model, tokens), Bench(model, tokens, bits=8), []

    def contents(bench: Bench):
        request = bench.once("load")
        return bench.engine.pool.memory[:, :, bench.engine.pool.find(request.chain)[: tokens // 16]].float()

    error = (contents(small) - (kv := contents(exact))).abs()
    compute = statistics.median(exact.ttft("compute"))
    for ratio in (4, 1):
        speed = exact.as_slow(ratio, compute)
        small.use(links.Bandwidth(speed))
        row = dict(history_tokens=tokens, r=ratio, gbps=speed / 1e9)
        for way in ("load", "both"):
            questions = [exact.draw(QUESTION) for _ in range(rounds)]
            pairs = [(exact.once(way, 1.0, each), small.once(way, 1.0, each)) for each in questions]
            faster = [theirs.outcome.ttft_ms / ours.outcome.ttft_ms for theirs, ours in pairs]
            agree = sum(theirs.new == ours.new for theirs, ours in pairs)
            row.update({f"{way}_faster": spread(faster), f"{way}_tokens_agree": f"{agree} of {rounds}"})
        rows.append(dict(row, chunk_bytes=[exact.cache.chunk_bytes, small.cache.chunk_bytes],
                         largest_error=error.max().item(), largest=kv.abs().max().item()))  # fmt: skip
    for bench in (exact, small):
        bench.engine.close()
    return dict(dtype="bfloat16", rows=rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["grid", "overhead", "trace", "files", "lengths", "bits"])
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    parser.add_argument("--r", type=float, nargs="+", default=RATIOS, help="loading over computing")
    parser.add_argument("--share", type=float, nargs="*", default=SHARES, help="of a step, besides 1")
    parser.add_argument("--dtype", default="auto", help="of all but bits, which takes bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found, rounds, device = [], arguments.rounds, "cpu"
    for name in [arguments.model] if arguments.model else HISTORIES:
        histories = arguments.histories or HISTORIES.get(name, [1024])
        longest = max(histories)
        model, *_ = checkpoint.load(name, arguments.dtype, arguments.device)
        device = model.device.type
        set_imports_aside()
        measures = {
            "grid": partial(grid, model, histories, rounds, arguments.r, arguments.share),
            "overhead": partial(overhead, model, longest, rounds, arguments.r),
            "trace": partial(trace, model, longest, rounds),
            "files": partial(files, model, longest, rounds),
            "lengths": partial(lengths, model, [longest // 4, longest // 2, longest], rounds),
            "bits": partial(bits, name, arguments.device, min(longest, 1024), rounds),
        }
        for claim, measure in measures.items():
            if arguments.only in (None, claim):
                found.append(dict(claim=claim, model=name, **measure()))
                rest = {key: value for key, value in found[-1].items() if claim != "grid" or key != "rows"}
                print(f"{rest}\n", flush=True)
    write("both_ends", device, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
