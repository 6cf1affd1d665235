"""Chapters 01 to 03, 06 and 07 bring the same history back: one model, one link, one clock. (04 and 05: benchmarks/planned.py.)

    python -m benchmarks.restoration                                    results in benchmarks/results/
    python -m benchmarks.restoration --model random:small --histories 256,1024 --rounds 3

A question of 16 tokens follows a history that was computed before. In each round every chapter in turn answers the same question,
and what it has kept has to come back:
    recompute (01)               nothing is kept
    blocks on the device (02)    K and V are where they are needed: no method can be faster
    KV offload (03)              K and V in host memory, over the link
    both ends (06)               K and V in storage; the history is computed from the front while it is loaded from the back
    three tiers (07)             K and V in storage, which is the lowest tier: prefetched into host memory, and over the link
All have the same link, by default as fast against this processor as an A100's is, and storage as fast as the link: files that the
operating system holds in memory, and then a wait. So 06 and 07 are not slower because a disk is. Every engine brings back what it
has, even where computing it would be faster, since the method is to be seen. No time is told before the tokens of all chapters
were compared, and in float32 they must be equal.

For each history and method: TTFT; the restoration alone, from the first byte that moves until all is in place (recomputing: TTFT
less that of 02); the bound below which it cannot go; the shares of the restoration in which link or storage, and the processor,
were idle; bytes kept per token. The bounds: recomputing, its FLOP at the measured matrix rate; 03, the bytes over the link; 06,
where two opposite pointers over the measured costs of whole chunks meet; 07, the bytes out of storage and the last page over the
link.
Histories are whole chunks of every chapter, multiples of 128 tokens, so that all methods bring back the same.
"""
import argparse
import importlib
import math
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import limits  # noqa: E402
from benchmarks import offload as offload_benchmark  # noqa: E402
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint  # noqa: E402
from legacy import app, backends, bidirectional, offload, paged  # noqa: E402
from legacy import link as links  # noqa: E402

tiered = importlib.import_module("07_tiered_storage")

METHODS = ("recompute (01)", "blocks on the device (02)", "KV offload (03)", "both ends (06)", "three tiers (07)")
WHOLE = tuple(method for method in METHODS if method[-3:-1] not in ("01", "06"))          # that compute nothing of a history
HISTORIES = (256, 512, 1024, 1920)                              # tokens
QUESTION, NEW, BLOCK = 16, 4, 16
CHUNK = 128
SPARE = 64                                                      # blocks besides the history's
WHAT = ("ttft_ms", "restoration_ms", "bound_ms", "over_bound", "load_bubble", "compute_bubble")


class Bench(offload_benchmark.Bench):
    """All engines on one model, on memory that was touched before, and always restoring. `methods`: name -> a function of a
    prompt and of the length of its history, which asks that engine and returns what it took."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] = HISTORIES):
        super().__init__(name, dtype, device, rounds, histories, 2 * CHUNK)
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self.matrix_rate = limits.matrix_rate(self.model.dtype, device)
        self.speed = links.bandwidth(self.model)                # bytes/s; None until a real link has been measured
        blocks, every = histories[-1] // BLOCK + SPARE, sum(histories) // BLOCK + SPARE * len(histories)
        lone, link = dict(blocks=blocks, block_size=BLOCK), dict(bytes_per_second=self.speed)
        parts = self.model, self.tokenizer, frozenset()

        # 1. Chapters 02 and 03
        self.cached = paged.Engine(*parts, **lone)
        self.offloaded = offload.Engine(*parts, **lone, **link, cpu_blocks=every)

        # 2. Chapters 06 and 07, whose storage is as fast as the link
        self.speed = self.speed or self.offloaded.load_link.speed()
        mbps = (self.speed * 8 / 1e6,)
        folder = Path(self.folder.name)
        self.both = bidirectional.Engine(*parts, **lone, **link, chunk=CHUNK, directories=(folder / "chunks",),
                                         bandwidth=bidirectional.Bandwidth(mbps))
        self.tiers = tiered.Engine(*parts, **lone, **link, cpu_blocks=2 * blocks, prefetch_policy="wait_complete",
                                   prefetch_threshold=BLOCK)
        for memory in (self.cached.pool.kv, self.offloaded.pool.kv, self.offloaded.host.kv, self.both.pool.kv,
                       self.both.loader.buffers.memory, self.both.writer.buffers.memory, self.tiers.pool.kv, self.tiers.host.kv):
            memory.zero_()
        self.tiers.attach(backends.open_backend(f"file:{folder / 'pages'}"), "files", bidirectional.Bandwidth(mbps))

        # 3. What pays is to be seen
        for engine in (self.offloaded, self.tiers):
            engine.seconds_to_compute = lambda start, end: math.inf
        self.methods = dict(zip(METHODS, (
            self.recompute, self.on_device, self.kv_offload, self.both_ends, self.three_tiers), strict=True))

    def keep(self, history: list[int]):
        """Every engine computes the history and keeps what it keeps."""
        asked = history + self.prompt(QUESTION)
        offload.empty(self.cached)
        paged.answer(self.cached, prompt=asked, max_tokens=1)
        offload.empty(self.offloaded)
        paged.answer(self.offloaded, prompt=asked, max_tokens=1)
        self.offloaded.flush()
        bidirectional.ask(self.both, prompt=asked, max_tokens=1)
        tiered.forget(self.tiers)
        tiered.answer(self.tiers, prompt=asked, max_tokens=1)
        self.tiers.flush()

    # One question

    def recompute(self, prompt: list[int], tokens: int) -> dict:
        result = self.alone.generate(prompt=prompt, max_tokens=NEW)
        return dict(tokens=result.tokens, ttft_ms=result.ttft_ms, cached_tokens=0, bytes_per_token=0.0,
                    bound_ms=self.offloaded.flops(0, tokens) / self.matrix_rate * 1e3)

    def on_device(self, prompt: list[int], tokens: int) -> dict:
        request, = paged.run_together(self.cached, [dict(prompt=prompt, max_tokens=NEW)]).requests
        return self.found(request, self.cached.pool.kv[:, :, 0].nbytes / BLOCK)

    def kv_offload(self, prompt: list[int], tokens: int) -> dict:
        engine = self.offloaded
        offload.empty(engine)
        request, = paged.run_together(engine, [dict(prompt=prompt, max_tokens=NEW, offload_after=False)]).requests
        engine.flush()
        size = engine.pool.kv[:, :, 0].nbytes
        return self.found(request, size / BLOCK, lanes=("load",), bound_ms=tokens // BLOCK * size / self.speed * 1e3)

    def both_ends(self, prompt: list[int], tokens: int) -> dict:
        engine = self.both
        requests = {mode: bidirectional.ask(engine, prompt=prompt, max_tokens=NEW, mode=mode, save=False)
                    for mode in ("both", "compute", "load")}
        computed, loaded = (measure(request.restored) for measure, request in (
            (lambda restoration: bidirectional.seconds_computed(engine, restoration), requests["compute"]),
            (bidirectional.seconds_loaded, requests["load"])))
        assert len(computed) == len(loaded) == tokens // CHUNK + 1, "a chunk was not in storage"
        report = requests["both"].outcome.restoration
        return dict(self.found(requests["both"], engine.loader.chunk_bytes / CHUNK, dict(
            report, load_bubble=report["storage_bubble"]), bound_ms=bidirectional.meet(computed, loaded)[0] * 1e3),
            computed_share=report["computed"] / report["chunks"])

    def three_tiers(self, prompt: list[int], tokens: int) -> dict:
        engine = self.tiers
        tiered.forget(engine)
        engine.storage.bandwidth.restart()
        request = tiered.answer(engine, prompt=prompt, max_tokens=NEW)
        engine.flush()
        assert request.pages["storage_hits"] == tokens // BLOCK, (request.pages, request.fetched)
        size, last = engine.host.page_bytes, engine.pool.kv[:, :, 0].nbytes
        bound = (tokens // BLOCK * size + last) / self.speed
        return self.found(request, size / BLOCK, lanes=("storage", "load"), bound_ms=bound * 1e3)

    def found(self, request, bytes_per_token: float, report: dict | None = None, lanes: tuple[str, ...] = (), **more) -> dict:
        """What a request took: `report` says how the restoration went, or it is what the timeline has on these `lanes`, of which
        the first is the one that the history comes over. What goes out (the question, to storage) is no part of it."""
        result = request.outcome
        if lanes:
            timeline = result.timeline
            moved = [span for span in timeline.spans if span.lane in lanes and not span.label.startswith("write")]
            start, end = min(span.start for span in moved), max(span.end for span in moved)
            report = dict(ms=(end - start) * 1e3, load_bubble=timeline.bubble(lanes[0], start, end),
                          compute_bubble=timeline.bubble("compute", start, end))
        if report:
            more.update(restoration_ms=report["ms"], load_bubble=report["load_bubble"], compute_bubble=report["compute_bubble"])
        return dict(tokens=result.tokens, ttft_ms=result.ttft_ms, cached_tokens=request.cached_tokens,
                    bytes_per_token=float(bytes_per_token), **more)


def measure(bench: Bench) -> dict:
    """-> one row for each history and method, and whether all methods gave the same tokens."""
    rows, equal, compared = [], 0, 0
    for length in bench.histories:
        history = bench.prompt(length)
        bench.keep(history)
        taken = {method: [] for method in bench.methods}
        for number in tqdm(range(bench.rounds + 1), desc=f"restoration {bench.name} {length}", unit="round"):
            prompt = history + bench.prompt(QUESTION)
            found = {method: ask(prompt, length) for method, ask in bench.methods.items()}
            for method in WHOLE:
                assert found[method]["cached_tokens"] == length, (method, found[method])
            same = len({tuple(each["tokens"]) for each in found.values()}) == 1
            assert same or bench.model.dtype != torch.float32, "the tokens differ"
            recompute, on_device = (found[method] for method in METHODS[:2])
            recompute["restoration_ms"] = max(0.0, recompute["ttft_ms"] - on_device["ttft_ms"])
            equal, compared = equal + same, compared + 1
            for method, each in found.items() if number else ():                # the first round is the warm-up
                if "bound_ms" in each:
                    each["over_bound"] = each["restoration_ms"] / each["bound_ms"]
                taken[method].append(dict(each, gain=recompute["ttft_ms"] / each["ttft_ms"]))
        for method, samples in taken.items():
            rows.append(dict(history_tokens=length, method=method, cached_tokens=samples[-1]["cached_tokens"],
                             bytes_per_token=samples[-1]["bytes_per_token"],
                             **{what: spread([sample[what] for sample in samples]) if what in samples[0] else None
                                for what in WHAT}, ttft_gain_over_recompute=spread([sample["gain"] for sample in samples]),
                             **{what: samples[-1][what] for what in ("plan", "computed_share") if what in samples[-1]}))
            show(rows[-1])
    link = bench.offloaded.load_link
    return dict(model=bench.name, dtype=str(bench.model.dtype)[6:], link={
        "modelled": link.modelled, "gbps": bench.speed / 1e9}, storage={"modelled": True, "gbps": bench.speed / 1e9},
        question_tokens=QUESTION, new_tokens=NEW, chunk_tokens=CHUNK, matrix_flops_per_second=bench.matrix_rate,
        rows=rows, equal_tokens=equal == compared, equal_rounds=equal, compared_rounds=compared)


def show(row: dict):
    def text(figures, scale="{:8.1f}"):
        return scale.format(figures["median"]) if figures else " " * 8
    if row["method"] == METHODS[0]:
        title = f"history of {row['history_tokens']} tokens"
        print(f"\n{title:30}TTFT, ms restored, ms of the bound   idle: link compute   bytes a token")
    print(f"  {row['method']:28}{text(row['ttft_ms'])}{text(row['restoration_ms']):>13}{text(row['over_bound'], '{:8.2f}'):>13}"
          f"{text(row['load_bubble'], '{:8.0%}'):>13}{text(row['compute_bubble'], '{:8.0%}')}{row['bytes_per_token']:16,.0f}",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="classroom")
    parser.add_argument("--histories", type=paged_benchmark.lengths, default=HISTORIES, metavar="TOKENS,...",
                        help=f"default {','.join(map(str, HISTORIES))}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=5)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/restoration-DEVICE.json)")
    arguments = parser.parse_args()
    device = checkpoint.pick_device(arguments.device)
    set_imports_aside()
    bench = Bench(arguments.model, arguments.dtype, device, arguments.rounds, arguments.histories)
    found = measure(bench)
    print(f"\n{found['model']}, {bench.offloaded.load_link}; {bench.both.storage}; tokens equal in {found['equal_rounds']} of "
          f"{found['compared_rounds']} rounds")
    write("restoration", device, arguments.json, rounds=arguments.rounds, **found)


if __name__ == "__main__":
    with one_sentence():
        main()
