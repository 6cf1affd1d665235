"""Chapter 03: what a conversation costs when it comes back, computed again, from the device, or from host memory.

    python -m benchmarks.offload                                    all; results in benchmarks/results/
    python -m benchmarks.offload --only restore --model classroom

Claims, each with its own function below:
    restore      a question of 16 tokens behind a history of 256 to 4,096, every way in turn. At 2,048 on random:small:
                 TTFT of a cpu_hit at least 4 times lower than of a miss, and at least 0.9 of what the bound allows; of a
                 gpu_hit at least 20 times. Restoration takes at most 1.10 times the bound: the blocks' bytes over the
                 link's bandwidth and one layer's computation of the question, or one layer's blocks and all layers'
                 computation, whichever is longer. Its time grows at most linearly with the history,
                 a miss's faster: both exponents are fitted. Beside it, `transformers` computes the history again, and on a
                 GPU it also brings it back from its own offloaded cache.
    saving       8 requests run, and whoever is done makes room for the next; with and without swapping out, the steps that
                 only decode differ by at most 3 %. Also the worst case: the save lane never idle.
"""
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread  # noqa: E402
from benchmarks.reference import reference_model  # noqa: E402
from common.llama import Rotary  # noqa: E402
from legacy import offload, paged  # noqa: E402

MODELS = {"restore": ["random:small", "classroom"], "saving": ["random:small", "classroom"]}
HISTORIES, QUESTION, BLOCK = (256, 512, 1024, 2048, 4096), 16, 16                      # tokens


class Bench(paged_benchmark.Bench):
    """With a context long enough for the longest history: positions beyond the model's own are as good for timing."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None,
                 more: int = 2 * QUESTION):
        """`more`: tokens of context beyond the longest history."""
        histories = histories or HISTORIES
        super().__init__(name, dtype, device, rounds, histories)
        model, context = self.model, histories[-1] + more
        self.own_context = model.config.max_position_embeddings
        model.config = dataclasses.replace(model.config, max_position_embeddings=context)
        model.rotary.table = Rotary(model.config, dtype=model.dtype, device=model.device).table

    def engine(self, **options):
        """Both pools touched: pinned memory and a GPU's are there from the beginning, and a first touch takes its time."""
        engine = offload.Engine(self.model, self.tokenizer, frozenset(), **options)
        engine.pool.kv.zero_()
        engine.host.kv.zero_()
        return engine


def restore(bench: Bench) -> dict:
    lengths = bench.histories
    longest = lengths[-1] // BLOCK + 2
    engine = bench.engine(blocks=2 * longest, block_size=BLOCK, cpu_blocks=sum(lengths) // BLOCK + len(lengths) * longest)
    reference = reference_model(bench.name, bench.model.dtype, bench.model.device.type)
    link, layers = engine.load_link, len(bench.model.layers)
    histories = {length: bench.prompt(length) for length in lengths}
    taken = {length: {} for length in lengths}

    def ask(prompt, **fields) -> offload.Request:
        request, = paged.run_together(engine, [dict(prompt=prompt, max_tokens=1, **fields)]).requests
        engine.flush()
        return request

    for history in histories.values():                          # every history goes out once
        ask(history)
        offload.empty(engine)
    same = 0
    for number in tqdm(range(bench.rounds + 1), desc=f"restore {bench.name}", unit="round"):
        for length, history in histories.items():
            prompt, found = history + bench.prompt(QUESTION), {}
            for case in ("miss", "cpu_hit", "gpu_hit", "cpu_hit, all layers first"):
                if case != "gpu_hit":                           # which finds what the cpu_hit before it brought
                    offload.empty(engine)
                engine.overlap = case != "cpu_hit, all layers first"
                salt = dict(cache_salt=f"{number} {length}") if case == "miss" else {}
                request = ask(prompt, offload_after=False, **salt)
                wanted = {"miss": dict(gpu_hits=0, cpu_hits=0), "gpu_hit": dict(gpu_hits=length // BLOCK, cpu_hits=0)}.get(
                    case, dict(gpu_hits=0, cpu_hits=length // BLOCK))
                assert wanted.items() <= request.blocks.items(), (case, request.blocks, request.choice)
                found[case] = request
            seconds, theirs = paged_benchmark.timed(first_token, reference, prompt, bench.model.device)
            figures = {case: request.outcome.ttft_ms for case, request in found.items()}
            figures["transformers, computed again"] = seconds * 1e3
            if bench.model.device.type == "cuda":
                figures["transformers, offloaded cache"] = offloaded_cache(reference, history, prompt, bench.model.device) * 1e3
            spans = found["cpu_hit"].timeline.spans
            last = max(span.end for span in spans if span.lane == "compute")
            restoration = last - min(span.start for span in spans if span.lane == "load")
            computed = sum(span.end - span.start for span in found["gpu_hit"].timeline.spans if span.lane == "compute")
            moved = length // BLOCK * engine.pool.kv[:, :, 0].nbytes
            load, layer = moved / (link.bytes_per_second or link.speed()), computed / layers
            bound = max(load + layer, load / layers + computed)         # the blocks arrive last, or the computing ends last
            loads = [span for span in spans if span.lane == "load"]
            copying = max(span.end for span in loads) - min(span.start for span in loads)
            figures.update(restoration_ms=restoration * 1e3, bound_ms=bound * 1e3, gbps=moved / restoration / 1e9,
                           copy_gbps=moved / copying / 1e9)
            tokens = {tuple(request.outcome.tokens) for request in found.values()}
            assert len(tokens) == 1 or bench.model.dtype != torch.float32, "the tokens differ"
            same += tokens == {(theirs,)}
            if number:                                          # the first is the warm-up
                for what, figure in figures.items():
                    taken[length].setdefault(what, []).append(figure)
    rows = []
    for length, figures in taken.items():
        def ratio(a, b, figures=figures):
            return spread([x / y for x, y in zip(figures[a], figures[b])])
        rows.append(dict(
            history_tokens=length, bytes_in=length // BLOCK * engine.pool.kv[:, :, 0].nbytes,
            **{what: spread(samples) for what, samples in figures.items()}, cpu_hit_gain=ratio("miss", "cpu_hit"),
            gpu_hit_gain=ratio("miss", "gpu_hit"), gain_the_bound_allows=ratio("miss", "bound_ms"),
            overlap_gain=ratio("cpu_hit, all layers first", "cpu_hit"),
            restoration_over_bound=ratio("restoration_ms", "bound_ms"),
            transformers_over_cpu_hit=ratio("transformers, computed again", "cpu_hit"),
            share_of_allowed_gain=spread([bound / hit for bound, hit in zip(figures["bound_ms"], figures["cpu_hit"])])))
    exponents = {what: exponent([(length, statistics.median(figures[what])) for length, figures in taken.items()])
                 for what in ("restoration_ms", "miss")} if len(lengths) > 1 else {}
    return dict(link=str(link), modelled=link.modelled, own_context=bench.own_context, question_tokens=QUESTION, rows=rows,
                exponents=exponents, equal_to_transformers=same, compared=len(lengths) * (bench.rounds + 1))


@torch.inference_mode()
def first_token(reference, prompt: list[int], device) -> int:
    """`transformers` computes the whole prompt -> the likeliest token."""
    ids = torch.tensor([prompt], device=device)                                                 # [1, T]
    return int(reference(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


@torch.inference_mode()
def offloaded_cache(reference, history: list[int], prompt: list[int], device) -> float:
    """-> seconds to the first token after `prompt`, whose `history` lies in the offloaded cache of `transformers`."""
    from transformers import DynamicCache
    cache = DynamicCache(config=reference.config, offloading=True)
    reference(torch.tensor([history], device=device), past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    rest = torch.tensor([prompt[len(history):]], device=device)                                 # [1, T]
    int(reference(rest, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())
    return time.perf_counter() - began


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through the logarithms."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points))
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)


def saving(bench: Bench, running: int = 8) -> dict:
    worst, usual = never_idle(bench, running), as_requests_end(bench, running)
    return dict(running=running, **usual, never_idle=worst, at_most=1.03)


def as_requests_end(bench: Bench, running: int, requests: int = 24, context: int = 128, new: int = 48) -> dict:
    """Requests of different lengths, so that one ends while others decode -> TBT of the steps that only decode."""
    blocks = requests * ((context + 2 * new) // BLOCK + 2)
    engine = bench.engine(blocks=blocks, block_size=BLOCK, max_running=running, cpu_blocks=blocks)
    taken, saved = {True: [], False: []}, []
    for number in range(bench.rounds + 1):
        for out in (True, False):
            for index in range(requests):
                engine.submit(prompt=bench.prompt(context), max_tokens=new + index * new // requests, offload_after=out)
            steps, before, more = [], engine.counts["bytes_out"], True
            while more:
                decoding = len(engine.running) == running and all(request.pending == 1 for request in engine.running)
                seconds, more = paged_benchmark.timed(engine.step)
                if decoding and len(engine.running) == running:         # nobody came or went in this step
                    steps.append(seconds * 1e3)
            engine.flush()
            offload.empty(engine)
            if number:                                          # the first is the warm-up
                taken[out].append(statistics.mean(steps))
                saved += [engine.counts["bytes_out"] - before] * out
    return dict(link=str(engine.save_link), modelled=engine.save_link.modelled, requests=requests, tbt_ms=spread(taken[False]),
                tbt_saving_ms=spread(taken[True]), bytes_out_a_round=saved,
                ratio=spread([b / a for a, b in zip(taken[False], taken[True])]))


def never_idle(bench: Bench, running: int, context: int = 256, window: int = 12) -> dict:
    """Windows of decode steps in turn: the save lane busy from end to end, and idle."""
    windows = 2 * (bench.rounds + 1)
    decoding = running * ((context + (windows + 1) * window) // BLOCK + 2)
    engine = bench.engine(blocks=decoding + 1024, block_size=BLOCK, cpu_blocks=1024)
    engine.worth_keeping = lambda blocks: True
    requests = [engine.submit(prompt=bench.prompt(context), max_tokens=(windows + 1) * window)[0] for _ in range(running)]
    while not all(request.answer.tokens for request in requests):
        assert engine.step(), requests[0].outcome               # or they have failed
    taken, out, root = {True: [], False: []}, 0, engine.prefixes.salted("saving")
    speed = engine.save_link.bytes_per_second or engine.save_link.speed()
    for number in range(windows):
        if number % 2:
            seconds = window * statistics.median(taken[False]) / 1e3
            out = min(1024, math.ceil(4 * seconds * speed / engine.pool.kv[:, :, 0].nbytes))         # steps take longer now
            for block in engine.pool.allocate(out):             # full blocks that nobody holds, and the host has not
                engine.pool.register(block, engine.prefixes.extend(root, [number, block]))
                engine.pool.release([block])
            assert engine.write_back(out)
        steps = []
        for _ in range(window):
            seconds, _ = paged_benchmark.timed(engine.step)
            if not number % 2 or not all(swap.ready for swap in engine.swaps):          # the lane was busy to the end
                steps.append(seconds * 1e3)
        assert len(steps) >= window // 2 and len(engine.running) == running
        engine.flush()
        for _ in range(out if number % 2 else 0):
            engine.pool.evict()
        taken[bool(number % 2)].append(statistics.mean(steps))
    taken = {saving: samples[1:] for saving, samples in taken.items()}          # the first were the warm-up
    return dict(blocks_a_window=out, steps_a_window=window, tbt_ms=spread(taken[False]), tbt_saving_ms=spread(taken[True]),
                ratio=spread([b / a for a, b in zip(taken[False], taken[True])]))


def show(what: str, model: str, found: dict):
    def line(label, figures, unit=""):
        print(f"    {label:36}{figures['median']:10.2f}{unit}   ({figures['min']:.2f} to {figures['max']:.2f})")
    print(f"\n{what}, {model} ({found['link']})")
    if what == "saving":
        for case, figures in (("", found), ("lane never idle, ", found["never_idle"])):
            line(case + "TBT", figures["tbt_ms"], " ms")
            line(case + "TBT while saving", figures["tbt_saving_ms"], " ms")
            line(case + "ratio", figures["ratio"])
        print("    claimed: at most 1.03")
    else:
        for row in found["rows"]:
            print(f"  history of {row['history_tokens']} tokens, {row['bytes_in'] / 1e6:.1f} MB")
            for label, figures in row.items():
                if isinstance(figures, dict):
                    line(label.replace("_", " "), figures)
        print("    exponents: " + ", ".join(f"{what} {power:.2f}" for what, power in found["exponents"].items()) + "\n"
              "    claimed at 2,048 on random:small: cpu_hit gain 4, gpu_hit gain 20, share of allowed gain 0.9, restoration "
              "over bound 1.10")
    sys.stdout.flush()


if __name__ == "__main__":
    paged_benchmark.run("offload", __doc__, MODELS, globals(), Bench, show)
