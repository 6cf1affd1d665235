"""Chapter 04: what hidden states cost to restore and to save, beside KV offload (chapter 03) and computing again.

    python -m benchmarks.hcache                                    all; results in benchmarks/results/
    python -m benchmarks.hcache --only restore --model random:small

Claims, each with its own function below:
    restore      a question of 16 tokens behind a history of 256 to 8,192 (1,024 on the large models), every way in turn, on two
                 links: one that resembles an A100's, where projecting takes longer than transferring, and one that takes twice as
                 long as projecting. There, restoration at least 1.9 times faster than KV offload; at 2,048 on random:small at
                 least 5.7 times faster than computing again. At most 1.10 times the bound: all layers' transfers and one
                 projection, or one transfer and all projections, whichever is longer. Exponents of growth are fitted. K and V are
                 compared with those of the forward pass, and the first token with the one that was computed.
    heads        4 layers of 2,048 with 32 query heads and 4, 8, 16 or 32 KV heads, on one link: where hidden states begin to pay.
    bandwidth    a history of 1,024 on random:small over links from a 16th of an A100's speed to 16 times it (against this
                 processor's projection): where hidden states pay against KV offload, and where against computing again.
    compute      the same history over one link, as an A100's is to all threads in float32, while the processor is faster or
                 slower: one thread and more, float32 and, where the processor multiplies it, bfloat16. On a GPU the dtypes.
    files        a history of 2,048 from files that the operating system was told to forget, chunked and token-major: number and
                 size of reads.
    saving       1, 4 and 16 requests decode behind 512 tokens each: TBT without saving, with two-stage saving (at most
                 1.04 times) and with direct saving, in windows in turn.
"""
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import offload as offload_benchmark  # noqa: E402
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread  # noqa: E402
from common.llama import cpu_multiplies_bfloat16  # noqa: E402
from legacy import hidden_states, offload, paged  # noqa: E402
from legacy import link as links  # noqa: E402
from tools import random_models  # noqa: E402

MODELS = {"restore": ["random:small", "classroom", "random:tinyllama-mha", "random:tinyllama"], "heads": ["random:tinyllama"],
          "bandwidth": ["random:small"], "compute": ["random:small"], "files": ["random:small"],
          "saving": ["random:small", "classroom"]}
HISTORIES = {"random:small": (256, 512, 1024, 2048, 4096, 8192), "classroom": (256, 512, 1024, 2048)}
LARGE, QUESTION, CHUNK = (1024,), 16, hidden_states.CHUNK
KV_HEADS = (4, 8, 16, 32)
TIMES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)           # an A100's link
WINDOW = {"classroom": 64}         # steps, so that each has its share of what goes out once a chunk; 12 on larger models


class Bench(offload_benchmark.Bench):
    """Both engines, on memory that was touched before, and always restoring: what pays is to be seen."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None):
        super().__init__(name, dtype, device, rounds, histories or HISTORIES.get(name, LARGE), 2 * CHUNK)

    def engine(self, kind, tokens: int, **options):
        blocks = 2 * (tokens // 16 + CHUNK)
        engine = kind(self.model, self.tokenizer, frozenset(), blocks=blocks, block_size=16, **options)
        engine.pool.kv.zero_()
        engine.seconds_to_compute = lambda start, end: math.inf
        return engine


def set_speed(engine, bytes_per_second: float | None):
    if bytes_per_second:
        for link in (engine.load_link, engine.save_link):
            link.bytes_per_second = link.first_speed = bytes_per_second
            link.speeds.clear()


def ask(engine, prompt: list[int], evict: bool = True, **fields):
    """-> the finished request, its first token only."""
    if evict:
        offload.empty(engine)
    request, = paged.run_together(engine, [dict(prompt=prompt, max_tokens=1, **fields)]).requests
    engine.flush()
    return request


def projections(engine, tokens: int) -> float:
    """-> seconds in which all layers of so many tokens are projected when nothing else goes on."""
    positions, seconds = torch.arange(tokens, device=engine.model.device), 0.0
    offload.empty(engine)
    slots = torch.tensor(list(engine.pool.free)[:tokens // 16], device=engine.model.device)
    slots = (slots[:, None] * 16 + torch.arange(16, device=slots.device)).flatten()                     # [T]
    for layer in range(len(engine.model.layers)):
        began = engine.clock.mark()
        engine.project(layer, engine.landing.memory[:tokens], positions, slots)
        seconds += engine.clock.seconds(engine.clock.mark()) - engine.clock.seconds(began)
    return seconds


def kv_of(engine, prompt: list[int]):
    """-> copies of the K and V of the prompt's full blocks, [L, 2, blocks, block_size, KVH, hd]."""
    chain, blocks = [], []
    for index in range(len(prompt) // 16):
        blocks.append(engine.pool.find(engine.prefixes.nth(index, chain, "", prompt, 16)))
    return engine.pool.kv[:, :, blocks].clone()


def speeds(bench: Bench) -> dict:
    """The links: as an A100's is to this model's projection, and so slow that a transfer takes twice as long."""
    alike = links.bandwidth(bench.model)
    if alike is None:
        return {"real": None}
    return {"as an A100's": alike, "the bottleneck": alike / links.projection_over_transfer("a100") / 2}


def least_seconds(layers: int, transfer: float, projecting: float) -> float:
    """All layers' transfers and one projection, or one transfer and all projections, whichever is longer."""
    return max(layers * transfer + projecting / layers, transfer + projecting)


def restore(bench: Bench) -> dict:
    tokens = sum(bench.histories) + CHUNK * len(bench.histories)
    kept = bench.engine(offload.Engine, bench.histories[-1], cpu_blocks=tokens // 16)
    engine = bench.engine(hidden_states.Engine, bench.histories[-1], cpu_chunks=tokens // CHUNK)
    kept.host.kv.zero_()
    engine.chunks.states.zero_()
    layers, itemsize, links_tried = len(bench.model.layers), bench.model.dtype.itemsize, speeds(bench)
    histories, rows, parity = {length: bench.prompt(length) for length in bench.histories}, [], {}
    for length, history in histories.items():                   # every history is kept once, and what was computed noted
        ask(kept, history)
        ask(engine, history)
        computed = kv_of(engine, history)
        ask(engine, history + bench.prompt(QUESTION), save=False)
        restored = kv_of(engine, history)
        parity[length] = dict(equal=torch.equal(computed, restored), error=(computed - restored).abs().max().item())
        del computed, restored
    for length, history in histories.items():
        taken = {name: {} for name in links_tried}
        for number in tqdm(range(bench.rounds + 1), desc=f"restore {bench.name} {length}", unit="round"):
            prompt = history + bench.prompt(QUESTION)
            miss = ask(engine, prompt, cache_salt=f"{number} {length}", save=False)
            hit = ask(engine, prompt, evict=False, cache_salt=f"{number} {length}", save=False)     # the device holds it
            for name, speed in links_tried.items():
                set_speed(kept, speed)
                set_speed(engine, speed)
                loaded, request = ask(kept, prompt, offload_after=False), ask(engine, prompt, save=False)
                assert loaded.cached_tokens == request.cached_tokens == length and miss.source == "miss"
                tokens = {tuple(one.outcome.tokens) for one in (miss, hit, loaded, request)}
                assert len(tokens) == 1 or bench.model.dtype != torch.float32, "the tokens differ"
                transfer = length * bench.model.config.hidden_size * itemsize / engine.load_link.speed()        # of a layer
                projecting, report = projections(engine, length), request.outcome.restoration
                bound = least_seconds(layers, transfer, projecting)
                figures = dict(restoration_ms=report["ms"], kv_offload_ms=hidden_states.load_ms(loaded.outcome),
                               recompute_ms=miss.outcome.ttft_ms - hit.outcome.ttft_ms, ttft_ms=request.outcome.ttft_ms,
                               kv_offload_ttft_ms=loaded.outcome.ttft_ms, recompute_ttft_ms=miss.outcome.ttft_ms,
                               bound_ms=bound * 1e3, transfers_ms=layers * transfer * 1e3, projections_ms=projecting * 1e3,
                               load_bubble=report["load_bubble"], compute_bubble=report["compute_bubble"])
                if number:                                      # the first is the warm-up
                    for what, figure in figures.items():
                        taken[name].setdefault(what, []).append(figure)
        for name, figures in taken.items():
            def ratio(a, b, figures=figures):
                return spread([x / y for x, y in zip(figures[a], figures[b])])
            rows.append(dict(
                history_tokens=length, link=name, gbps=(links_tried[name] or engine.load_link.speed()) / 1e9,
                hidden_bytes_per_token=request.outcome.restoration["bytes"] / length,
                kv_bytes_per_token=sum(transfer.bytes for swap in loaded.swap_ins for transfer in swap.transfers) / length or
                bench.model.config.kv_numbers_per_token * itemsize,
                **{what: spread(samples) for what, samples in figures.items()}, parity=parity[length],
                gain_over_kv_offload=ratio("kv_offload_ms", "restoration_ms"), gain_over_recompute=ratio(
                    "recompute_ms", "restoration_ms"), ttft_gain_over_kv_offload=ratio("kv_offload_ttft_ms", "ttft_ms"),
                ttft_gain_over_recompute=ratio("recompute_ttft_ms", "ttft_ms"), over_bound=ratio("restoration_ms", "bound_ms")))
    exponents = {}
    for what in ("restoration_ms", "kv_offload_ms", "recompute_ms") if len(bench.histories) > 1 else ():
        exponents[what] = {name: offload_benchmark.exponent([(row["history_tokens"], row[what]["median"]) for row in rows
                                                             if row["link"] == name]) for name in links_tried}
    return dict(link=str(engine.load_link), modelled=engine.load_link.modelled, question_tokens=QUESTION, rows=rows,
                exponents=exponents)


def heads(bench: Bench, tokens: int = 1024) -> dict:
    rows, name, rounds, device = [], bench.name, bench.rounds, bench.model.device.type
    dtype, speed = str(bench.model.dtype)[6:], None
    for kv_heads in KV_HEADS[::-1]:                             # the link is that of the first, which has as many as queries
        hidden, intermediate, _, query_heads, _, _, context = random_models.GEOMETRIES[name.removeprefix("random:")]
        random_models.GEOMETRIES["heads"] = (hidden, intermediate, 4, query_heads, kv_heads, 512, context)
        bench = Bench("random:heads", dtype, device, rounds)
        speed = speed or speeds(bench).get("the bottleneck")
        kept = bench.engine(offload.Engine, tokens, cpu_blocks=2 * tokens // 16)
        engine = bench.engine(hidden_states.Engine, tokens, cpu_chunks=2 * tokens // CHUNK)
        kept.host.kv.zero_()
        engine.chunks.states.zero_()
        set_speed(kept, speed)
        set_speed(engine, speed)
        history, figures = bench.prompt(tokens), {"restoration_ms": [], "kv_offload_ms": []}
        ask(kept, history)
        ask(engine, history)
        for number in tqdm(range(rounds + 1), desc=f"{kv_heads} KV heads", unit="round"):
            prompt = history + bench.prompt(QUESTION)
            loaded, request = ask(kept, prompt, offload_after=False), ask(engine, prompt, save=False)
            if number:
                figures["restoration_ms"].append(request.outcome.restoration["ms"])
                figures["kv_offload_ms"].append(hidden_states.load_ms(loaded.outcome))
        gain = [a / b for a, b in zip(figures["kv_offload_ms"], figures["restoration_ms"])]
        rows.append(dict(kv_heads=kv_heads, query_heads=query_heads, bytes_over_kv=query_heads / (2 * kv_heads),
                         gain_over_kv_offload=spread(gain), **{what: spread(samples) for what, samples in figures.items()}))
        link, modelled = str(engine.load_link), engine.load_link.modelled
    return dict(link=link, modelled=modelled, history_tokens=tokens, layers=4, rows=rows)


class Three:
    """A history that KV offload and hidden states each have kept, and that is computed again: three ways to the same tokens."""

    def __init__(self, bench: Bench, tokens: int):
        self.bench, self.tokens, self.history = bench, tokens, bench.prompt(tokens)
        self.kept = bench.engine(offload.Engine, tokens, cpu_blocks=2 * tokens // 16)
        self.engine = bench.engine(hidden_states.Engine, tokens, cpu_chunks=2 * tokens // CHUNK)
        self.kept.host.kv.zero_()
        self.engine.chunks.states.zero_()
        ask(self.kept, self.history)
        ask(self.engine, self.history)

    def again(self, prompt: list[int], salt: str) -> tuple[float, list[int]]:
        """Compute all of it -> milliseconds without the question's, and the tokens."""
        miss = ask(self.engine, prompt, cache_salt=salt, save=False)
        hit = ask(self.engine, prompt, evict=False, cache_salt=salt, save=False)                # the device holds it
        assert miss.source == "miss" and hit.source == "gpu_hit"
        return miss.outcome.ttft_ms - hit.outcome.ttft_ms, miss.outcome.tokens

    def both(self, prompt: list[int], speed: float | None, computed: list[int]) -> dict:
        """Restore it in both ways over a link of so many bytes per second (None: as it is) -> milliseconds; `computed` are the
        tokens that must come out."""
        for engine in (self.kept, self.engine):
            set_speed(engine, speed)
        loaded, request = ask(self.kept, prompt, offload_after=False), ask(self.engine, prompt, save=False)
        assert loaded.cached_tokens == request.cached_tokens == self.tokens
        tokens = [loaded.outcome.tokens, request.outcome.tokens]
        assert tokens == [computed] * 2 or self.bench.model.dtype != torch.float32, "the tokens differ"
        return dict(restoration_ms=request.outcome.restoration["ms"], kv_offload_ms=hidden_states.load_ms(loaded.outcome))

    @property
    def speed(self) -> float:
        """Bytes per second of the link."""
        return self.engine.load_link.bytes_per_second or self.engine.load_link.speed()

    def transfer(self) -> float:
        """Seconds that all layers' states take over the link."""
        config, dtype = self.bench.model.config, self.bench.model.dtype
        return self.tokens * config.hidden_size * config.num_hidden_layers * dtype.itemsize / self.speed


def gains(samples: list[dict]) -> dict:
    """One row's figures: what the ways took, and how much faster hidden states are than the two others."""
    def ratio(way):
        return spread([sample[way] / sample["restoration_ms"] for sample in samples])
    return dict(gain_over_kv_offload=ratio("kv_offload_ms"), gain_over_recompute=ratio("recompute_ms"),
                **{what: spread([sample[what] for sample in samples]) for what in samples[0]})


def crossing(points: list[tuple[float, float]]) -> float | None:
    """Where a line through the points (x, gain), straight between their logarithms, first passes a gain of 1; None if it never
    does."""
    for (before, one), (after, other) in zip(points, points[1:]):
        if (one - 1) * (other - 1) <= 0 and one != other:
            return before * (after / before) ** (math.log(one) / (math.log(one) - math.log(other)))
    return None


def bandwidth(bench: Bench, tokens: int = 1024) -> dict:
    tokens = min(tokens, bench.histories[-1])
    alike, ways = links.bandwidth(bench.model), Three(bench, tokens)
    speeds = {times: times * alike for times in TIMES} if alike else {1: None}          # a real link is as fast as it is
    taken, ratios = {times: [] for times in speeds}, {times: [] for times in speeds}
    for number in tqdm(range(bench.rounds + 1), desc=f"bandwidth {bench.name}", unit="round"):
        prompt = ways.history + bench.prompt(QUESTION)
        recompute, computed = ways.again(prompt, str(number))
        projecting = projections(ways.engine, tokens)
        for times, speed in speeds.items():
            found = ways.both(prompt, speed, computed)
            if number:                                          # the first is the warm-up
                taken[times].append(dict(found, recompute_ms=recompute))
                ratios[times].append(projecting / ways.transfer())
    rows = [dict(gbps=(speeds[times] or ways.speed) / 1e9, times_an_a100s=times,
                 projection_over_transfer=statistics.median(ratios[times]), **gains(samples))
            for times, samples in taken.items()]
    return dict(link=str(ways.engine.load_link), modelled=ways.engine.load_link.modelled, history_tokens=tokens, rows=rows,
                crosses_at_gbps={way: crossing([(row["gbps"], row[f"gain_over_{way}"]["median"]) for row in rows])
                                 for way in ("kv_offload", "recompute")})


def compute(bench: Bench, tokens: int = 1024) -> dict:
    tokens, device, all_threads = min(tokens, bench.histories[-1]), bench.model.device.type, torch.get_num_threads()
    speed, own = links.bandwidth(bench.model), str(bench.model.dtype)[6:]
    threads, dtypes = [all_threads], dict.fromkeys([own, "bfloat16"])
    if device == "cpu":
        threads = sorted({1 << power for power in range(all_threads.bit_length())} | {all_threads})
        dtypes = dtypes if cpu_multiplies_bfloat16() else [own]
    taken, ratios = {}, {}
    try:
        for dtype in dtypes:
            on = bench if dtype == own else Bench(bench.name, dtype, device, bench.rounds, bench.histories)
            ways = Three(on, tokens)
            for number in tqdm(range(bench.rounds + 1), desc=f"compute {bench.name} {dtype}", unit="round"):
                prompt = ways.history + on.prompt(QUESTION)
                for count in threads:
                    torch.set_num_threads(count)
                    recompute, computed = ways.again(prompt, f"{number} {count}")
                    found = ways.both(prompt, speed, computed)
                    if number:
                        taken.setdefault((dtype, count), []).append(dict(found, recompute_ms=recompute))
                        ratios.setdefault((dtype, count), []).append(projections(ways.engine, tokens) / ways.transfer())
            link, modelled = str(ways.engine.load_link), ways.engine.load_link.modelled
            gbps = ways.speed / 1e9
            del on, ways
    finally:
        torch.set_num_threads(all_threads)
    rows = [dict(compute=(f"{count} thread{'s' * (count > 1)}, " if device == "cpu" else "") + dtype, dtype=dtype, threads=count,
                 gbps=gbps, projection_over_transfer=statistics.median(ratios[dtype, count]), **gains(samples))
            for (dtype, count), samples in taken.items()]
    rows.sort(key=lambda row: -row["recompute_ms"]["median"])                   # the slowest first
    return dict(link=link, modelled=modelled, history_tokens=tokens, rows=rows)


def files(bench: Bench) -> dict:
    tokens = min(2048, bench.histories[-1])
    history, figures, rows = bench.prompt(tokens), {}, []
    with tempfile.TemporaryDirectory(prefix="chunks-") as folder:
        engines = {layout: bench.engine(hidden_states.Engine, tokens, directories=[Path(folder) / layout], layout=layout)
                   for layout in hidden_states.LAYOUTS}
        for engine in engines.values():
            ask(engine, history)
            engine.files.counts.clear()
        for number in tqdm(range(bench.rounds + 1), desc=f"files {bench.name}", unit="round"):
            prompt = history + bench.prompt(QUESTION)
            for layout, engine in engines.items():
                forget(engine.files)
                request = ask(engine, prompt, save=False)
                assert request.cached_tokens == tokens
                storage = [load.storage for load in request.restored.loads]
                if number:
                    for what, figure in (("restoration_ms", request.outcome.restoration["ms"]),
                                         ("reading_ms", sum(end - start for start, end in storage) * 1e3)):
                        figures.setdefault((layout, what), []).append(figure)
        for layout, engine in engines.items():
            counts = engine.files.counts
            rows.append(dict(layout=layout, reads=counts["file_reads"] // (bench.rounds + 1),
                             bytes_a_read=counts["file_read_bytes"] / counts["file_reads"],
                             **{what: spread(figures[layout, what]) for what in ("restoration_ms", "reading_ms")}))
    return dict(link=str(engine.load_link), modelled=engine.load_link.modelled, history_tokens=tokens, rows=rows, **{
        f"{what}_ratio": spread([b / a for a, b in zip(figures["chunked", what], figures["token-major", what])])
        for what in ("restoration_ms", "reading_ms")})


def forget(files):
    """Drop the files from the operating system's cache, so that they are read from where they lie."""
    for *_, path in files.scan():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def saving(bench: Bench, context: int = 512) -> dict:
    window = WINDOW.get(bench.name, 12)
    rows, windows = [], 2 * bench.rounds + 1
    for running in (1, 4, 16):
        tokens, modes = context + (windows + 1) * window + 2 * running, {}
        for mode in ("none", "two-stage", "direct"):
            engine = bench.engine(hidden_states.Engine, running * (tokens + 16), cpu_chunks=running * (tokens // CHUNK + 2),
                                  direct=mode == "direct", max_running=running)
            engine.chunks.states.zero_()
            requests = [engine.submit(prompt=bench.prompt(context), max_tokens=tokens - context, save=mode != "none")[0]
                        for _ in range(running)]
            while not all(request.answer.tokens for request in requests):
                assert engine.step(), requests[0].outcome       # or they have failed
            engine.flush()
            modes[mode] = engine, []
        for _ in tqdm(range(windows), desc=f"saving {bench.name} {running}", unit="window"):
            for engine, samples in modes.values():
                seconds = [paged_benchmark.timed(engine.step)[0] * 1e3 for _ in range(window)]
                samples.append(statistics.mean(seconds))
                engine.flush()
                assert len(engine.running) == running
        samples = {mode: samples[1:] for mode, (_, samples) in modes.items()}                   # the first was the warm-up
        counts = modes["two-stage"][0].counts
        rows.append(dict(running=running, chunks_dropped=counts["chunks_dropped"], bytes_out=counts["bytes_out"],
                         **{f"tbt_ms_{mode}": spread(taken) for mode, taken in samples.items()},
                         **{f"ratio_{mode}": spread([b / a for a, b in zip(samples["none"], samples[mode])])
                            for mode in ("two-stage", "direct")}))
    return dict(link=str(engine.save_link), modelled=engine.save_link.modelled, context=context, steps_a_window=window, rows=rows,
                at_most=1.04)


def show(what: str, model: str, found: dict):
    def line(label, figures, unit=""):
        print(f"    {label:36}{figures['median']:10.2f}{unit}   ({figures['min']:.2f} to {figures['max']:.2f})")
    print(f"\n{what}, {model} ({found['link'].split(',')[0]})")
    for row in found["rows"]:
        print("  " + ", ".join(f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else
                               f"{name.replace('_', ' ')} {value}" for name, value in row.items() if not isinstance(value, dict)))
        for label, figures in row.items():
            if isinstance(figures, dict) and "median" in figures:
                line(label.replace("_", " "), figures)
        if "parity" in row:
            parity = row["parity"]
            print("    K and V bit-equal" if parity["equal"] else f"    K and V differ by at most {parity['error']:.2g}")
    for label, figures in found.items():
        if label.endswith("_ratio"):
            line("token-major / chunked, " + label.removesuffix("_ratio").replace("_", " "), figures)
    if what == "restore":
        print(f"    exponents: {found['exponents']}\n    claimed where the link is the bottleneck: over KV offload 1.9; at 2,048 "
              "on random:small over recompute 5.7; over the bound 1.10")
    elif what == "bandwidth":
        print("    a gain of 1: " + ", ".join(f"over {way.replace('_', ' ')} at {f'{gbps:.3g} GB/s' if gbps else 'no such link'}"
                                              for way, gbps in found["crosses_at_gbps"].items()))
    elif what == "saving":
        print(f"    claimed: two-stage at most {found['at_most']}")
    sys.stdout.flush()


if __name__ == "__main__":
    paged_benchmark.run("hcache", __doc__, MODELS, globals(), Bench, show)
