"""Chapters 02 and 03, each comparison interleaved in one run.

python -m benchmarks.engine                                   all; results in benchmarks/results/
python -m benchmarks.engine --only burst --model classroom

throughput   16 requests of 32 tokens in and 64 out, at once, against chapter 01 one after another: at least 5
             times the tokens per second.
host         TTFT behind a history in host memory: restoration within 1.05 of its bound (bytes over the link),
             TTFT within 1.05 of max(link, the question's own compute). The compute is a device hit of the
             same question.
burst        30 questions about one document of 1,024 tokens at once, the device evicted before: it comes back
             once (03) or is computed once (02), and mean TTFT is at most 1.1 of the same burst with the
             document on the device, and one restoration.
overhead     a step besides the model, per request, with 64 running: at most 50 microseconds. Admission, which must
             not grow with the number of cached blocks.
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint, cli, lesson  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import Request  # noqa: E402

baseline, paged, offload = (
    importlib.import_module(name) for name in ("01_baseline", "02_paged_kv", "03_cpu_offload")
)
MODELS = {
    "throughput": ["classroom"],
    "host": ["random:small", "classroom"],
    "burst": ["classroom", "random:small"],
    "overhead": ["random:tiny"],
}
QUESTION, DOCUMENT, CROWD = 32, 1024, 30  # tokens, tokens, requests


class Bench:
    """A model, and prompts of random tokens."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int):
        self.model, *_ = checkpoint.load(name, dtype, device)
        self.rounds, self.rng = rounds, random.Random(0)

    def engine(self, tokens: int, restoring: bool = True):
        """With room for `tokens`, and twice as much on the host."""
        blocks = -(-tokens // 16)
        cache = offload.HostCache(2 * blocks, links.bandwidth(self.model)) if restoring else None
        return paged.Engine(paged.Runner(self.model, blocks), cache)

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(300, self.model.config.vocab_size) for _ in range(tokens)]

    def ask(self, engine, prompts: list[list[int]], new: int = 1) -> list[Request]:
        lesson.settle(engine)
        return engine.generate([Request(prompt, new) for prompt in prompts])


def throughput(bench: Bench) -> list[dict]:
    engines = {"01": baseline.Engine(bench.model), "02": bench.engine(16 * 128, restoring=False)}

    def rate(which: str) -> float:
        prompts, engine = [bench.prompt(32) for _ in range(16)], engines[which]
        began = time.perf_counter()
        for group in [prompts] if which == "02" else [[prompt] for prompt in prompts]:
            bench.ask(engine, group, 64)
        return 16 * 64 / (time.perf_counter() - began)

    taken = lesson.in_turn({which: partial(rate, which) for which in engines}, bench.rounds)
    ratio = [ours / alone for ours, alone in zip(taken["02"], taken["01"])]
    return [
        dict(
            tokens_per_second={which: spread(samples) for which, samples in taken.items()},
            ratio=spread(ratio),
        )
    ]


def host(bench: Bench) -> list[dict]:
    context, rows = bench.model.config.max_position_embeddings, []
    for length in (length for length in (512, 1024, 1984) if length + QUESTION <= context):
        engine, history = bench.engine(3 * context), bench.prompt(length)
        size = length // 16 * engine.pool.block_bytes
        bench.ask(engine, [history])

        def hit(evict: bool, engine=engine, history=history) -> Request:
            lesson.settle(engine)
            if evict:
                engine.evict()
            time.sleep(0.2)  # as a request that comes after a pause
            return bench.ask(engine, [history + bench.prompt(QUESTION)])[0]

        taken = lesson.in_turn({"host": partial(hit, True), "device": partial(hit, False)}, bench.rounds)
        loads = [
            [span for span in request.timeline.spans if span.lane == "load"] for request in taken["host"]
        ]
        restored = [1e3 * (spans[-1].end - spans[0].start) for spans in loads]
        speed = (
            engine.cache.load_link.speed()
            if not engine.cache.load_link.modelled
            else engine.cache.load_link.bandwidth.value
        )
        link = 1e3 * size / speed
        ttft = [request.outcome.ttft_ms for request in taken["host"]]
        compute = [request.outcome.ttft_ms for request in taken["device"]]
        rows.append(dict(
            history=length, bytes_restored=size, tokens_found=taken["host"][-1].found, link_gbps=speed / 1e9,
            link_ms=link, restoration_ms=spread(restored), restoration_over_bound=spread([ms / link for ms in restored]),
            ttft_ms=spread(ttft), device_hit_ms=spread(compute),
            ttft_over_bound=spread([ms / max(link, other) for ms, other in zip(ttft, compute)]),
        ))  # fmt: skip
        engine.close()
    return rows


def burst(bench: Bench) -> list[dict]:
    rows, room = [], 2 * (DOCUMENT + CROWD * 2 * QUESTION)
    for chapter in ("02", "03"):
        engine, document = bench.engine(room, restoring=chapter == "03"), bench.prompt(DOCUMENT)
        bench.ask(engine, [document])

        def crowd(evict: bool, engine=engine, document=document) -> tuple[float, int, int]:
            lesson.settle(engine)
            if evict:
                engine.evict()
            before = engine.counts["bytes_in"]
            asked = bench.ask(engine, [document + bench.prompt(QUESTION) for _ in range(CROWD)])
            computed = sum(request.prompt_tokens - request.cached_tokens for request in asked)
            mean = statistics.mean(request.outcome.ttft_ms for request in asked)
            return mean, engine.counts["bytes_in"] - before, computed

        def alone(engine=engine, document=document) -> float:
            lesson.settle(engine)
            engine.evict()
            return bench.ask(engine, [document + bench.prompt(1)])[0].outcome.ttft_ms

        ways = {"evicted": partial(crowd, True), "device": partial(crowd, False), "one": alone}
        taken = lesson.in_turn(ways, bench.rounds)
        evicted, device = ([mean for mean, *_ in taken[case]] for case in ("evicted", "device"))
        ratio = [one / (two + three) for one, two, three in zip(evicted, device, taken["one"])]
        rows.append(dict(
            chapter=chapter, evicted_ms=spread(evicted), device_ms=spread(device), one_restoration_ms=spread(taken["one"]),
            bytes_restored=taken["evicted"][-1][1], rows_computed=taken["evicted"][-1][2],
            document_bytes=DOCUMENT // 16 * engine.pool.block_bytes, ratio=spread(ratio),
        ))  # fmt: skip
        engine.close()
    return rows


class NoModel(paged.Runner):
    """Builds the batch, and computes nothing."""

    def forward(self, work, before_layer):
        batch = paged.Batch(self.pool, work)
        return batch, torch.zeros(len(batch.last_rows), self.model.config.vocab_size)


def overhead(bench: Bench, running: int = 64, steps: int = 100) -> list[dict]:
    rows = []
    for context in (32, 384):
        engine = paged.Engine(NoModel(bench.model, running * (context + steps) // 16 + running))
        requests = [Request(bench.prompt(context), steps) for _ in range(running)]
        for request in requests:
            engine.submit(request)
        while not all(request.new for request in requests):
            engine.step()
        rows.append(dict(what="a step, per request", context=context, running=running,
                         us=spread([1e6 * seconds(engine.step) / running for _ in range(steps // 2)])))  # fmt: skip
    for cached in (1 << 10, 1 << 13, 1 << 16):
        engine = paged.Engine(NoModel(bench.model, cached + 64))
        for block in engine.pool.allocate(cached):
            engine.pool.register(block, engine.prefixes.extend([], [block] * 16)[0])
            engine.pool.release([block])
        samples = []
        for _ in range(200):
            engine.submit(Request(bench.prompt(40), 1))
            samples.append(1e6 * seconds(engine.step))
        rows.append(dict(what="admission", cached_blocks=cached, us=spread(samples)))
    return rows


def seconds(what) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def show(part: str, name: str, rows: list[dict]):
    for row in rows:
        words = []
        for what, value in row.items():
            if isinstance(value, dict) and "median" in value:
                words.append(f"{what} {value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})")
            else:
                words.append(f"{what} {value:.4g}" if isinstance(value, float) else f"{what} {value}")
        print(f"{part} {name}: " + ", ".join(words), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    device = checkpoint.pick_device(arguments.device)
    set_imports_aside()
    found = {}
    for part, models in MODELS.items():
        if arguments.only in (None, part):
            for name in [arguments.model] if arguments.model else models:
                bench = Bench(name, arguments.dtype, device, arguments.rounds)
                rows = globals()[part](bench)
                found[f"{part} {name}"] = rows
                show(part, name, rows)
    write("engine", device, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
