"""Chapter 05: the planned mix beside KV offload, hidden states only, and the naive mix, where the link is the bottleneck, where
computing is, and between.

    python -m benchmarks.bubble_free                                    all; results in benchmarks/results/
    python -m benchmarks.bubble_free --only mix --model random:small

Claims, each with its own function below:
    mix          a question of 16 tokens behind a history of 1,024 and 2,048. A transfer of hidden states takes twice as long as
                 their projection, as long, and half as long. The planned mix at least 2.0, 1.7 and 1.35 times faster than KV
                 offload; 1.25 times faster than hidden states only where computing is the bottleneck; 1.28 times faster than the
                 naive mix of K and V with recomputing; never slower than the best single method. Measured at most 1.08 times the
                 prediction and 1.10 times the bound, which no division of the layers can pass; both lanes idle for less
                 than 8 %. K and V are compared with those of the forward pass.
    partition    layers against tokens divided (section 6.3.2), 1,024 tokens, where the link is the bottleneck and where
                 computing is; and what a projection costs by its rows.
    planner      how long it takes to try all divisions of 8 to 80 layers: at most 5 ms.

Each history is computed once, and all of it kept: hidden states, K and V. Every way then loads what its plan says. So all ways
have the same history, and take turns in one engine. Without a GPU the link is modelled.
"""
import math
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import hcache  # noqa: E402
from benchmarks import offload as offload_benchmark  # noqa: E402
from benchmarks import paged as paged_benchmark  # noqa: E402
from benchmarks.baseline import spread  # noqa: E402
from legacy import bubble_free  # noqa: E402

CHUNK, QUESTION = bubble_free.CHUNK, 16
MODELS = {"planner": ["random:tiny"], "partition": ["random:small", "classroom"],
          "mix": ["classroom", "random:small", "random:tinyllama", "random:tinyllama-mha"]}
BOTH = (1024, 2048)
HISTORIES = {"random:tinyllama": (1024,)}       # grouped queries; the others: BOTH
GAINS = {"the link is the bottleneck": 2.0, "balanced": 1.7, "computing is the bottleneck": 1.35}       # over KV offload


class Everything(bubble_free.Plan):
    def letters(self, chunk: int, first: int, count: int) -> str:
        return "B" * self.layers


class Engine(bubble_free.Engine):
    """Keeps everything, and brings of it what the plan of the moment says."""

    def begin(self, request, index: int):
        request.plan = Everything(0, 0, len(self.model.layers))
        return super().begin(request, index)

    def choose(self, request, start: int, chunks: list[int]):
        restoration, seconds, _ = super().choose(request, start, chunks)
        return restoration, seconds, math.inf                   # what pays is to be seen

    def runs(self, start: int, chunks: list[int]):
        first, found = start // CHUNK, []
        plan = self.plan((first + len(chunks)) * CHUNK)[0]
        for index, slot in enumerate(chunks, first):
            kept, rows = self.chunks.letters[slot], CHUNK if plan.split is None else plan.split - index * CHUNK
            self.chunks.letters[slot] = plan.letters(index, first, len(chunks))
            self.chunks.splits[slot] = rows if 0 < rows < CHUNK else CHUNK
            found += [run._replace(row=run.row + (index - first) * CHUNK) for run in super().runs(index * CHUNK, [slot])]
            self.chunks.letters[slot], self.chunks.splits[slot] = kept, CHUNK
        return found


class Bench(offload_benchmark.Bench):
    """The engine, on memory that was touched before, and always restoring."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None):
        super().__init__(name, dtype, device, rounds, histories or HISTORIES.get(name, BOTH), 2 * CHUNK)

    def engine(self):
        config, blocks = self.model.config, 2 * (self.histories[-1] // 16 + CHUNK)
        all_kept = 1.5 + config.hidden_size / (2 * config.num_key_value_heads * config.head_dim)       # against K and V alone
        chunks = int(all_kept * (sum(self.histories) // CHUNK + 2))
        engine = Engine(self.model, self.tokenizer, frozenset(), blocks=blocks, block_size=16, cpu_chunks=chunks,
                        known=bubble_free.Profile([1], [1.0], [1.0], [1.0], [1.0], 1.0, 1.0))
        for memory in (engine.pool.kv, engine.chunks.kv, engine.landing.memory, engine.saver.buffer.memory):
            memory.zero_()
        engine.profile = bubble_free.profile(engine)            # on memory that was touched
        return engine


def turn(engine: Engine, mode: str, speed: float | None):
    """The engine, in another mode, over another link."""
    if engine.mode != mode or (speed and engine.load_link.bytes_per_second != speed):
        engine.mode = mode
        hcache.set_speed(engine, speed)
        engine.planned_speed = engine.load_link.speed()
        engine.plans.clear()


def speeds(engine: Engine, tokens: int) -> dict:
    """Setting -> bytes per second, as fast as this processor projects; a real link is as fast as it is."""
    if not engine.load_link.modelled:
        return {"the link as it is": None}
    costs = engine.costs(0, tokens)[1]
    size = tokens * engine.model.config.hidden_size * engine.model.dtype.itemsize
    return {setting: size / (ratio * costs.compute_hidden) for setting, ratio in bubble_free.SETTINGS.items()}


def restored(bench: Bench, engine: Engine, history: list[int], ways: dict) -> dict:
    """-> {setting: (bytes per second, {way: its restorations})}; every way in every setting in turn."""
    settings = speeds(engine, len(history))
    taken = {setting: {way: [] for way in ways} for setting in settings}
    for number in tqdm(range(bench.rounds + 1), desc=f"{bench.name} {len(history)}", unit="round"):
        prompt, tokens = history + bench.prompt(QUESTION), set()
        for setting, speed in settings.items():
            for way, mode in ways.items():
                turn(engine, mode, speed)
                request = hcache.ask(engine, prompt, save=False)
                tokens.add(tuple(request.outcome.tokens))
                assert request.cached_tokens == len(history) and request.outcome.restoration, request.outcome.choice
                if number:
                    taken[setting][way].append(request.outcome.restoration)
        if not number:                                          # the warm-up has taught the engine its pace
            engine.plan(len(history))
            settings = speeds(engine, len(history))
        hit = hcache.ask(engine, prompt, evict=False, save=False)
        assert hit.source == "gpu_hit"
        assert tokens == {tuple(hit.outcome.tokens)} or bench.model.dtype != torch.float32, "the tokens differ"
    return {setting: (settings[setting], taken[setting]) for setting in settings}


def kept_history(bench: Bench, engine: Engine, tokens: int):
    """Compute and keep a history -> it, and its K and V."""
    history = bench.prompt(tokens)
    engine.mode = "auto"
    request = hcache.ask(engine, history)
    return history, hcache.kv_of(engine, history), request.outcome.ttft_ms


def mix(bench: Bench) -> dict:
    engine, rows, layers = bench.engine(), [], len(bench.model.layers)
    for tokens in bench.histories:
        history, computed, recompute_ms = kept_history(bench, engine, tokens)
        for setting, (speed, ways) in restored(bench, engine, history, bubble_free.WAYS).items():
            turn(engine, "auto", speed)
            plan, predicted = engine.plan(tokens)
            hcache.ask(engine, history + bench.prompt(QUESTION), save=False)
            difference = (hcache.kv_of(engine, history) - computed).abs().amax((1, 2, 3, 4, 5)).tolist()         # of each layer
            depth = math.ceil(plan.recompute)
            costs = engine.costs(0, tokens)
            paper = bubble_free.closed_form(costs[1], layers)
            best_single = [min(a["ms"], b["ms"]) for a, b in zip(ways["KV offload"], ways["hidden only"])]
            rows.append(dict(
                history_tokens=tokens, setting=setting, gbps=engine.load_link.speed() / 1e9, paces=engine.planned_paces,
                costs_ms={name: seconds * 1e3 for name, seconds in costs[1]._asdict().items()}, plan=str(plan),
                layers=dict(recompute=plan.recompute, hidden=plan.hidden, kv=plan.kv), closed_form=str(paper),
                closed_form_ms=min(float(bubble_free.pipeline_seconds(cost, *paper[:3], parts)) for parts, cost in
                                   costs.items()) * 1e3, planned_ms=predicted * 1e3, recompute_once_ms=recompute_ms,
                bound_ms=bubble_free.bound_seconds(costs, layers) * 1e3,
                ways={way: dict(plan=reports[-1]["plan"], bytes_per_token=reports[-1]["bytes"] / tokens,
                                **{what: spread([report[what] for report in reports]) for what in (
                                    "ms", "predicted_ms", "load_bubble", "compute_bubble")},
                                over_predicted=spread([report["ms"] / report["predicted_ms"] for report in reports]),
                                over_bound=spread([report["ms"] / report["bound_ms"] for report in reports]))
                      for way, reports in ways.items()},
                gains={way: spread([a["ms"] / b["ms"] for a, b in zip(ways[way], ways["planned mix"])])
                       for way in ways if way != "planned mix"},
                over_best_single=spread([a / b["ms"] for a, b in zip(best_single, ways["planned mix"])]),
                equal_from_layer=next((layer for layer in range(layers, 0, -1) if difference[layer - 1]), 0),
                recomputed_layers=depth, largest_difference=max(difference)))
        del computed
    return dict(link=str(engine.load_link), modelled=engine.load_link.modelled, question_tokens=QUESTION, rows=rows,
                profile=engine.profile._asdict())


def partition(bench: Bench, tokens: int = 1024) -> dict:
    tokens, engine, rows = min(tokens, bench.histories[-1]), bench.engine(), []
    history, _, _ = kept_history(bench, engine, tokens)
    ways = {"layers": "auto", "tokens": "token-wise", "tokens, rounded": "token-wise-rounded"}
    for setting, (_, found) in restored(bench, engine, history, ways).items():
        rows.append(dict(setting=setting, history_tokens=tokens, **{way: spread([report["ms"] for report in reports])
                                                                    for way, reports in found.items()},
                         plans={way: reports[-1]["plan"] for way, reports in found.items()},
                         **{f"{way}_over_layers": spread([a["ms"] / b["ms"] for a, b in zip(found[way], found["layers"])])
                            for way in ways if way != "layers"}))
    counts = sorted({*range(64, tokens + 1, 64), 794, 683} & set(range(tokens + 1)))
    positions, projections = torch.arange(tokens, device=engine.model.device), {count: [] for count in counts}
    for number in tqdm(range(bench.rounds + 1), desc=f"projections {bench.name}", unit="round"):
        for count in counts:
            began = engine.clock.mark()
            engine.project(number % len(engine.model.layers), engine.landing.memory[:count], positions[:count], positions[:count])
            began, ended = engine.clock.seconds(began), engine.clock.seconds(engine.clock.mark())
            if number:
                projections[count].append((ended - began) * 1e3)
    return dict(link=str(engine.load_link), modelled=engine.load_link.modelled, rows=rows,
                projection_ms={count: spread(taken) for count, taken in projections.items()})


def planner(bench: Bench) -> dict:
    rows, costs = [], bubble_free.Costs(2.0, 4.0, 6.5, 1.0)
    for layers in (8, 12, 22, 32, 48, 80):
        taken, costs_by_parts = [], {parts: costs for parts in (1, 2, bubble_free.PARTS)}
        for _ in range(10 * bench.rounds + 1):
            began = time.perf_counter()
            plan, _ = bubble_free.best_plan(costs_by_parts, layers)
            taken.append((time.perf_counter() - began) * 1e3)
        tried = sum(len(bubble_free.divisions(layers, parts)[0]) for parts in costs_by_parts)
        rows.append(dict(layers=layers, plans_tried=tried, first_ms=taken[0], ms=spread(taken[1:]), plan=str(plan)))
    return dict(link="no link", rows=rows, at_most_ms=5.0)


def show(what: str, model: str, found: dict):
    def text(figures):
        return f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"
    print(f"\n{what}, {model} ({found['link'].split(',')[0]})")
    for row in found["rows"]:
        if what == "planner":
            print(f"  {row['layers']:3} layers, {row['plans_tried']:6} plans: {text(row['ms'])} ms, the first time "
                  f"{row['first_ms']:.2f} ms; at most {found['at_most_ms']}")
            continue
        print(f"  {row['history_tokens']} tokens, {row['setting']}")
        if what == "partition":
            for way, plan in row["plans"].items():
                print(f"    {way:16} {plan:32} {text(row[way])} ms" + (f", {text(row[f'{way}_over_layers'])} of layers"
                                                                       if way != "layers" else ""))
            continue
        for way, figures in row["ways"].items():
            gain, idle = row["gains"].get(way), [figures[f"{lane}_bubble"]["median"] for lane in ("load", "compute")]
            print(f"    {way:12} {figures['plan']:24} {figures['bytes_per_token']:8.0f} B {text(figures['ms']):>32} ms, "
                  f"idle {idle[0]:4.0%}{idle[1]:5.0%}, "
                  f"{figures['over_predicted']['median']:.2f} of predicted, {figures['over_bound']['median']:.2f} of the bound"
                  + (f"; the planned mix is {text(gain)} times as fast" if gain else ""))
        print(f"    planned mix over the best single method: {text(row['over_best_single'])} times as fast; claimed: over KV "
              f"offload {GAINS.get(row['setting'])}, over the naive mix 1.28, of predicted 1.08, of the bound 1.10, idle 8 %")
        print(f"    all plans tried: {row['planned_ms']:.1f} ms; the paper's formula: {row['closed_form']}, "
              f"{row['closed_form_ms']:.1f} ms; bound {row['bound_ms']:.1f} ms; recomputing all of it, once: "
              f"{row['recompute_once_ms']:.0f} ms")
        print(f"    K and V bit-equal from layer {row['equal_from_layer']} on, {row['recomputed_layers']} recomputed; largest "
              f"difference {row['largest_difference']:.2g}")
    if "projection_ms" in found:
        print("    a projection, ms by rows: " + ", ".join(
            f"{count} {figures['median']:.2f}" for count, figures in found["projection_ms"].items()))
    sys.stdout.flush()


if __name__ == "__main__":
    paged_benchmark.run("bubble_free", __doc__, MODELS, globals(), Bench, show)
