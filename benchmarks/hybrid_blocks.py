"""Compare chapter 08's policies for the context of a large batch, with the weights in host memory, in turn.

    python -m benchmarks.hybrid_blocks                              all; results in benchmarks/results/
    python -m benchmarks.hybrid_blocks --only grid --model random:small --f 1.25 --context 1024

grid        decode steps; the contexts are filled in without a prefill. f sets the speed of the modelled link:
            the time of all weights and all K and V over the link, divided by the time to rebuild all K and V
            and compute the rest. The device has room for half of the layers, beside two
            places for layers that come and go. `allowed` is the gain of hybrid by the planner's estimate,
            with the costs of these steps. Steps at the middle f have their spans, for a picture (CAPTURE,
            Figure 1).
lengths     the same for contexts of mixed lengths, in about four mini-batches: act-only, 1:1 and paper are
            the columns of Table III (there all prompts have 1,920 tokens).
whole       a batch from its prompts to its last token, as in the paper's Figure 8.

All policies run on one code path: `kv-only` stands for FlexGen, `naive` for DeepSpeed-Inference, `act-only`
for CAPTURE-Act-Cache, `1:1` for CAPTURE's hybrid without Algorithm 1, and `paper` for all of CAPTURE.
`kv-only`, `naive` and `act-only` use the device's memory in the way that serves them best.
"""

import importlib
import itertools
import random
import time
from functools import partial

import torch

from benchmarks import measure, tables
from benchmarks.measure import ratio, spread
from common.requests import Request
from shell import charts, lesson, modelled_link

hybrid = importlib.import_module("08_hybrid_blocks")
FACTORS, BATCH, CONTEXTS = [1.0, 1.25, 2.0], 16, [128, 384]
OTHERS = "1:1", "naive"
GROUPS = 4  # parts into which `naive` divides a batch; the paper does not say how small DeepSpeed's batches are


def planner_for(f: float, model, contexts: list[int]):
    """Measure the costs of decode steps behind `contexts` (tokens of each request).

    Returns: a Planner with these costs; and the bandwidth of a modelled link over which all weights and all K
    and V take `f` times as long as computing with ACT blocks alone."""
    blocks, costs = sum(context // 16 + 3 for context in contexts), hybrid.Costs(1e9, 0.0, 0.0)
    layers, sizes = len(model.layers), hybrid.sizes_of(model, 16)
    planner = hybrid.Planner("act-only", costs, sizes, layers, blocks, (2 + layers // 2) * sizes.weights)
    planner = hybrid.measure(planner, model, modelled_link.Bandwidth(1e9), contexts)
    even = planner.speed_for(1.0, sum(contexts) / 16)
    bandwidth = modelled_link.Bandwidth(even / f)
    planner = planner._replace(costs=planner.costs._replace(speed=bandwidth.value))
    for policy in ("act-only", "hybrid", "hybrid"):  # rebuilding a part of the blocks costs more than its share of rebuilding all
        planner = hybrid.measure(planner._replace(policy=policy), model, bandwidth, contexts)
    return planner, bandwidth


def one_step(engine) -> dict:
    """Run one decode step. Returns: its seconds, bytes over the link by kind, the busy share of each lane,
    its costs, and its spans."""
    seconds, timeline = hybrid.one_step(engine)
    moved = dict(weights=0, kv=0, act=0, store=0)
    for transfer in engine.runner.transfers:
        moved[transfer.label] += transfer.bytes
    busy = {lane: 1 - charts.bubble(timeline, lane) for lane in ("load", "compute")}
    return dict(seconds=seconds, bytes=moved, busy=busy, cost=engine.runner.step_costs(), spans=charts.spans(timeline))


# 1. Opponents -----------------------------------------------------------------------------------------------

class Naive(hybrid.HybridRunner):
    """A runner without mini-batches: each part of the batch passes through all layers alone and fetches all
    weights."""

    def step(self, work: list) -> tuple:
        size = -(-len(work) // GROUPS)
        steps = [super(Naive, self).step(work[at : at + size]) for at in range(0, len(work), size)]
        return [batch for batches, _ in steps for batch in batches], torch.cat([logits for _, logits in steps])


def in_halves(planner, model, bandwidth):
    """Return a runner with as many bytes of ACT as of KV blocks in use on the host: two blocks for one.

    ACT blocks are filled first. The device holds ACT blocks only, as in the paper."""
    on_device = planner.paper_plan().act_device
    acts = round(2 / 3 * max(0.0, planner.fill * planner.blocks - on_device))
    runner = hybrid.HybridRunner(model, hybrid.Plan(0, planner.blocks - on_device - acts, acts, 0, on_device), bandwidth)
    first = (runner.kind_map.kinds % 2 == 0).sort(stable=True).indices  # numbers of ACT blocks, then of KV blocks
    runner.kind_map.kinds, runner.kind_map.numbers = runner.kind_map.kinds[first], runner.kind_map.numbers[first]
    return runner


def runners_of(planner, model, bandwidth, *others: str) -> dict:
    """Return name -> runner, for each policy of chapter 08 and for the named opponents."""
    made = {policy: hybrid.make_runner(planner._replace(policy=policy), model, bandwidth) for policy in hybrid.POLICIES}
    ways = {"1:1": partial(in_halves, planner, model, bandwidth),
            "naive": partial(Naive, model, made["kv-only"].plan, bandwidth)}  # fmt: skip
    return made | {name: ways[name]() for name in others}


def bounds(planner, runners: dict, costs: dict) -> dict[str, float]:
    """Estimate the seconds of a decode step of each policy, with the median costs of the steps of hybrid,
    kv-only and act-only, which form mini-batches alike."""
    planner = planner.with_samples([cost for policy in hybrid.POLICIES[:3] for cost in costs[policy]])
    return {policy: planner.seconds(runners[policy].plan) for policy in hybrid.POLICIES}


# 2. Decode steps --------------------------------------------------------------------------------------------

def cell(model, f: float, contexts: list[int], parts: int, rounds: int) -> dict:
    """Measure decode steps of all policies in turn. Buffers hold one of `parts` parts of the contexts.
    Returns: the row."""
    planner, bandwidth = planner_for(f, model, contexts)
    runners = runners_of(planner, model, bandwidth, *(() if f in FACTORS[::2] else OTHERS))
    engines = {name: hybrid.decode_engine(runner, contexts) for name, runner in runners.items()}
    for runner in runners.values():
        runner.rows = sum(contexts) // parts if parts > 1 else runner.rows
    taken = lesson.in_turn({name: partial(one_step, engine) for name, engine in engines.items()}, rounds)
    seconds = {name: [step["seconds"] for step in steps] for name, steps in taken.items()}
    least = bounds(planner, runners, {name: [step["cost"] for step in steps] for name, steps in taken.items()})
    rows = {}
    for name, steps in taken.items():
        step = sorted(steps, key=lambda one: one["seconds"])[len(steps) // 2]
        rows[name] = dict(
            tokens_per_second=spread([len(contexts) / each for each in seconds[name]]), plan=runners[name].plan._asdict(),
            mini_batches=len(runners[name].last), bytes=step["bytes"], busy=step["busy"],
            over=ratio(seconds[name], seconds["hybrid"]), over_act_only=ratio(seconds["act-only"], seconds[name]),
            spans=step["spans"] if name in hybrid.POLICIES[:3] and "naive" in runners else [])  # fmt: skip
    context = {name: row["bytes"]["kv"] + row["bytes"]["act"] for name, row in rows.items()}  # bytes of context over the link
    for name, row in rows.items():
        row["traffic"] = context[name] / max(1, context["hybrid"])
        row |= {"allowed": least[name] / least["hybrid"]} if name in least else {}
    return dict(
        f=f, batch=len(contexts), context=max(contexts), rounds=rounds, policies=rows,
        of_bound=spread([least["hybrid"] / each for each in seconds["hybrid"]]),
        behind=[name for name in rows if measure.is_slower(ratio(seconds["hybrid"], seconds[name])["samples"])])  # fmt: skip


def grid(model, arguments):
    """Yield a row for each f and context."""
    for f, context in itertools.product(arguments.f, arguments.context):
        yield cell(model, f, BATCH * [context], 1, arguments.rounds)


def lengths(model, arguments, batch: int = 32, longest: int = 384, f: float = 1.25):
    """Yield one row: contexts of random lengths up to `longest` tokens."""
    drawn = partial(random.Random(0).randrange, longest // 16, longest)
    yield cell(model, f, [drawn() for _ in range(batch)], 3, arguments.rounds)


# 3. Whole answers --------------------------------------------------------------------------------------

def answer(engine, prompts: list[list[int]], new: int) -> dict:
    """Answer a batch. Returns: its seconds, the share of them until every request has its first token, the
    answers, and the costs of its last step."""
    began = time.perf_counter()
    requests = engine.generate([Request(prompt, new) for prompt in prompts])
    seconds = time.perf_counter() - began
    first = max(request.times[0] for request in requests) - began
    return dict(seconds=seconds, prefill=first / seconds, new=[request.new for request in requests], cost=engine.runner.step_costs())


def whole(model, arguments, batch: int = 16, context: int = 128, new: int = 12, f: float = 1.25):
    """Yield a row for each policy: throughput over prefill and decode.

    `allowed` adds the estimated decode steps to the shortest prefill of all policies, since all compute the
    same in it."""
    planner, bandwidth = planner_for(f, model, batch * [context + new // 2])
    runners = runners_of(planner, model, bandwidth, "naive")
    engines = {name: hybrid.paged.Engine(runner, None, batch * context, batch) for name, runner in runners.items()}
    rng, ways = random.Random(0), {name: partial(answer, engine, new=new) for name, engine in engines.items()}
    taken = measure.same_question_in_turn(
        ways, arguments.rounds, lambda: [measure.draw(rng, model, context) for _ in range(batch)])  # fmt: skip
    measure.check_alike(model, {name: [each["new"] for each in found] for name, found in taken.items()})
    seconds = {name: [each["seconds"] for each in found] for name, found in taken.items()}
    prefill = {name: spread([each["seconds"] * each["prefill"] for each in found]) for name, found in taken.items()}
    least = bounds(planner, runners, {name: [each["cost"] for each in found] for name, found in taken.items()})
    total = {name: min(each["median"] for each in prefill.values()) + (new - 1) * step for name, step in least.items()}
    for name in runners:
        yield dict(
            f=f, batch=batch, context=context, new=new, policy=name, over=ratio(seconds[name], seconds["hybrid"]),
            tokens_per_second=spread([batch * new / each for each in seconds[name]]), prefill_seconds=prefill[name],
            plan=runners[name].plan._asdict(), behind=measure.is_slower(ratio(seconds["hybrid"], seconds[name])["samples"]),
            **({"allowed": total[name] / total["hybrid"]} if name in total else {}))  # fmt: skip


PARTS = {name: (part, ["random:long"]) for name, part in dict(grid=grid, lengths=lengths, whole=whole).items()}


# 4. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    rows, mixed, each = tables.rows(found, "grid"), tables.rows(found, "lengths"), []
    for row in (every := [*rows, *mixed]):
        row["factor"] = f"f = {row['f']:g}"
        row["cell"] = f"{row['batch']} {'of up to' if row in mixed else 'x'} {row['context']:,}"
    behind = [f"{', '.join(row['behind'])} ({row['factor']}, {row['cell']}, {row['rounds']} rounds)"
              for row in every if row["behind"]]  # fmt: skip
    gains, reached = tables.grouped(rows, ("model", "cell"), "factor"), [row["of_bound"]["median"] for row in every]
    for row in tables.grouped([row for row in every if "naive" in row["policies"]], ("model", "cell"), "factor"):
        each += [dict(row, policy=name, **one) for name, one in row["policies"].items()]
    return tables.paragraphs(
        tables.table("**Throughput of hybrid over that of other policies**, and the gain that the costs of these steps allow:", {
            "model, batch x context": "{model}, {cell}",
            **tables.across(gains, {
                "`kv-only`": "{policies[kv-only][over]:spread} of {policies[kv-only][allowed]:n}",
                "`act-only`": "{policies[act-only][over]:spread} of {policies[act-only][allowed]:n}"}),
        }, gains),
        f"Hybrid reaches {min(reached):.2f} to {max(reached):.2f} of its bound. Policies that were over 3 % faster "
        f"in the median, and faster in three of four rounds: {tables.listed(behind) if behind else 'none'}." if every else "",
        tables.table("**Both lanes**, {factor}. Bytes of context over those of hybrid: CAPTURE, Figure 9, has up to 1.27 for K and V only with 32 "
                     "requests at once, and 1.38 with 64:", {
            "contexts": "{cell}", "policy": "{policy}", "mini-batches": "{mini_batches}", "tokens/s": "{tokens_per_second:n}",
            "over act-only": "{over_act_only:n}", "hybrid over it": "{over:spread}",
            "bytes of weights, KV, ACT": "{bytes[weights]:MB}, {bytes[kv]:MB}, {bytes[act]:MB}",
            "KV and ACT over those of hybrid": "{traffic:n}", "busy: link, processor": "{busy[load]:%}, {busy[compute]:%}",
        }, each),
        tables.table(
            "**Prefill and decode** ({model}, {batch} prompts of {context} tokens, {new} new tokens each, f = {f:g}):", {
                "policy": "{policy}", "tokens/s": "{tokens_per_second:spread}", "prefill, s": "{prefill_seconds:spread}",
                "hybrid over it": "{over:spread}", "allowed": "{allowed:n}",
            }, tables.rows(found, "whole")))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--f", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.set_defaults(dtype=measure.short_dtype(), device="cpu")
    measure.run("hybrid_blocks", PARTS, report, parser.parse_args(), hybrid.load)

