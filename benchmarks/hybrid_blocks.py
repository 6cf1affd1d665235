"""Chapter 08: what the context of a large batch is kept as, with the weights in host memory; all policies in turn.

    python -m benchmarks.hybrid_blocks                              all; results in benchmarks/results/
    python -m benchmarks.hybrid_blocks --only grid --model random:small --f 1.25 --batch 64 --context 1024

grid        decode steps at full depth behind contexts that were filled in. The modelled link is given as f, all weights
            and all K and V over it, over rebuilding everything and the rest of the layers; a GPU's is as it is. The device
            has room for half of the layers beside two that come and go, or for as many bytes of blocks. `allowed` is what
            the costs of these steps let hybrid win; the bound is the slower lane of its plan with these.
steps       the paper's Table III, of decode steps: activations only; the host's memory in halves, ACT filled first;
            Algorithm 1; its mini-batches. Then ours, and this engine's plan. Contexts are of all lengths, and three times
            what the buffers hold.
whole       a batch from its prompts to its last token, as in the paper's Figure 8, under each policy in turn.

All on one code path, each policy with the device's memory as it serves it best: `kv-only` stands for FlexGen, `naive` for
DeepSpeed-Inference, `act-only` for CAPTURE-Act-Cache, `1:1` for its hybrid before Algorithm 1, `paper` for all of it.
"""

import importlib
import itertools
import random
import time
from collections import Counter
from functools import partial

import torch

from benchmarks import measure, tables
from benchmarks.measure import modelled, ratio, spread
from common.requests import Request
from common.timeline import Clock
from shell import charts, lesson, modelled_link

hybrid = importlib.import_module("08_hybrid_blocks")
FACTORS, BATCHES, CONTEXTS = [1.0, 1.25, 2.0], [16], [128, 384]
OPPONENTS = "kv-only", "act-only", "1:1", "paper", "naive"
GROUPS = 4  # in which `naive` divides a batch; the paper does not say how small DeepSpeed's batches are


def planner_for(f: float, model, contexts: list[int]):
    """-> a Planner for such decode steps, the modelled link's bandwidth, and f: weights and all K and V take `f` times
    as long as computing with ACT blocks alone. With a GPU the link is as it is: no bandwidth, and the f that it has."""
    blocks, costs = sum(context // 16 + 3 for context in contexts), hybrid.Costs(1e9, 0.0, 0.0)
    layers, sizes = len(model.layers), hybrid.sizes_of(model, 16)
    planner = hybrid.Planner("act-only", costs, sizes, layers, blocks, (2 + layers // 2) * sizes.weights)
    planner = hybrid.measure(planner, model, modelled_link.Bandwidth(1e9), contexts)
    even = planner.speed_for(1.0, sum(contexts) / 16)
    bandwidth = modelled(model, 1.0) and modelled_link.Bandwidth(even / f)
    speed = modelled_link.connect("load", Clock(model.device), bandwidth).speed()
    planner = planner._replace(costs=planner.costs._replace(speed=speed))
    for policy in ("act-only", "hybrid", "hybrid"):  # rebuilding some blocks costs more than their share of all
        planner = hybrid.measure(planner._replace(policy=policy), model, bandwidth, contexts)
    return planner, bandwidth, f if bandwidth else even / speed


def one_step(engine) -> dict:
    """Of a decode step: seconds, shares of them that each lane was busy, bytes over the link by kind."""
    seconds, timeline = hybrid.one_step(engine)
    moved = Counter()
    for transfer in engine.runner.transfers:
        moved[transfer.label] += transfer.bytes
    busy = {lane: 1 - charts.bubble(timeline, lane) for lane in ("load", "compute")}
    return dict(seconds=seconds, bytes=dict(moved), busy=busy, cost=engine.runner.cost())


def decode(runners: dict, contexts: list[int], rounds: int) -> tuple[dict, dict, dict]:
    """Decode with all runners in turn -> of each a row, the seconds of its steps, and what they say of the costs."""
    engines = {name: hybrid.ready(runner, contexts) for name, runner in runners.items()}
    taken = lesson.in_turn({name: partial(one_step, engine) for name, engine in engines.items()}, rounds)
    seconds = {name: [step["seconds"] for step in steps] for name, steps in taken.items()}
    rows = {}
    for name, steps in taken.items():
        step = sorted(steps, key=lambda one: one["seconds"])[len(steps) // 2]
        rows[name] = dict(
            tokens_per_second=spread([len(contexts) / each for each in seconds[name]]), plan=runners[name].plan._asdict(),
            mini_batches=len(runners[name].last), bytes=step["bytes"], busy=step["busy"])  # fmt: skip
    return rows, seconds, {name: [step["cost"] for step in steps] for name, steps in taken.items()}


# 1. Opponents -----------------------------------------------------------------------------------------------

class Naive(hybrid.HybridRunner):
    """A part of the batch at a time passes through all layers, and for each part all weights come again."""

    def step(self, work: list) -> tuple:
        size = -(-len(work) // GROUPS)
        steps = [hybrid.HybridRunner.step(self, work[at : at + size]) for at in range(0, len(work), size)]
        return [batch for batches, _ in steps for batch in batches], torch.cat([logits for _, logits in steps])


def in_halves(planner, model, bandwidth):
    """-> a runner whose host has as many bytes of ACT as of KV blocks in use, two for one, the ACT blocks filled first;
    the device's are ACT blocks, as in the paper."""
    on_device = planner.paper_plan().act_device
    acts = round(2 / 3 * max(0.0, planner.fill * planner.blocks - on_device))
    plan = hybrid.Plan(0, planner.blocks - on_device - acts, acts, 0, on_device)
    runner = hybrid.HybridRunner(model, plan, bandwidth)
    first = (runner.deal.kinds % 2 == 0).sort(stable=True).indices  # numbers of ACT blocks, then of KV blocks
    runner.deal.kinds, runner.deal.numbers = runner.deal.kinds[first], runner.deal.numbers[first]
    return runner


def all_runners(planner, model, bandwidth) -> dict:
    made = {policy: hybrid.make_runner(planner._replace(policy=policy), model, bandwidth) for policy in hybrid.POLICIES}
    made["1:1"] = in_halves(planner, model, bandwidth)
    return made | dict(naive=Naive(model, made["kv-only"].plan, bandwidth))


def bounds(planner, runners: dict, costs: dict) -> dict[str, float]:
    """-> the slower lane of each policy's plan in a decode step, with the costs of steps that were formed in one way."""
    planner = planner.after([cost for policy in hybrid.POLICIES[:3] for cost in costs[policy]])
    return {policy: max(planner.lanes(runners[policy].plan)) for policy in hybrid.POLICIES}


# 2. The grid ------------------------------------------------------------------------------------------------

def cell(model, f: float, batch: int, context: int, rounds: int) -> dict:
    contexts = batch * [context]
    planner, bandwidth, f = planner_for(f, model, contexts)
    runners = all_runners(planner, model, bandwidth)
    rows, seconds, costs = decode(runners, contexts, rounds)
    least = bounds(planner, runners, costs)
    for name, row in rows.items():
        row["over"] = ratio(seconds[name], seconds["hybrid"])
    for name, slower in least.items():
        rows[name]["allowed"] = slower / least["hybrid"]
    return dict(
        f=f, batch=batch, context=context, rounds=rounds, policies=rows,
        of_bound=spread([least["hybrid"] / each for each in seconds["hybrid"]]),
        behind=[name for name in OPPONENTS if measure.is_behind(ratio(seconds["hybrid"], seconds[name])["samples"])])  # fmt: skip


def grid(model, arguments):
    factors = arguments.f if modelled(model, 1.0) else [None]
    for one in itertools.product(factors, arguments.batch, arguments.context):
        yield from measure.again_if_behind(partial(cell, model, *one), arguments.rounds)


# 3. Table III -----------------------------------------------------------------------------------------------

def in_order(items: list, rows: int) -> list[list]:
    """Mini-batches as full as the buffers allow, in the order of arrival."""
    formed = [[]]
    for item in items:
        if sum(one.end for one in [*formed[-1], item]) > rows and formed[-1]:
            formed.append([])
        formed[-1].append(item)
    return formed


def steps(model, arguments, batch: int = 32, longest: int = 384, f: float = 1.25):
    rng = random.Random(0)
    contexts = [rng.randrange(longest // 16, longest) for _ in range(batch)]
    planner, bandwidth, f = planner_for(f, model, contexts)
    paper, only = planner._replace(policy="paper").plan(), planner._replace(policy="act-only").plan()
    only = only._replace(resident=0, act_device=paper.act_device, act_host=planner.blocks - paper.act_device)
    theirs = partial(hybrid.form_as_paper, planner, hybrid.Deal(paper, 16))
    ways = {"act-only": (only, in_order), "+ hybrid blocks, 1:1": (None, in_order), "+ Algorithm 1": (paper, in_order),
            "+ mini-batches (paper's)": (paper, theirs), "+ mini-batches (ours)": (paper, hybrid.form),
            "this engine's plan": (planner.plan(), hybrid.form)}  # fmt: skip
    runners = {}
    for name, (plan, form) in ways.items():
        runners[name] = hybrid.HybridRunner(model, plan, bandwidth) if plan else in_halves(planner, model, bandwidth)
        runners[name].form, runners[name].rows = form, sum(contexts) // 3
    rows, seconds, _ = decode(runners, contexts, arguments.rounds)
    for name, row in rows.items():
        yield dict(f=f, batch=batch, contexts=[min(contexts), max(contexts)], step=name, **row,
                   over_act_only=ratio(seconds["act-only"], seconds[name]))  # fmt: skip


# 4. Whole answers --------------------------------------------------------------------------------------

def answer(engine, prompts: list[list[int]], new: int) -> dict:
    """Of a batch: seconds, the share of them until all have their first token, and the answers."""
    began = time.perf_counter()
    requests = engine.generate([Request(prompt, new) for prompt in prompts])
    seconds = time.perf_counter() - began
    first = max(request.times[0] for request in requests) - began
    return dict(seconds=seconds, prefill=first / seconds, new=[request.new for request in requests], cost=engine.runner.cost())


def whole(model, arguments, batch: int = 16, context: int = 128, new: int = 16, f: float = 1.25):
    """`allowed`: with the least prefill of all, since they compute the same in it, and as many steps of the slower lane."""
    planner, bandwidth, f = planner_for(f, model, batch * [context + new // 2])
    runners = all_runners(planner, model, bandwidth)
    engines = {name: hybrid.paged.Engine(runner, None, batch * context, batch) for name, runner in runners.items()}
    rng, ways = random.Random(0), {name: partial(answer, engine, new=new) for name, engine in engines.items()}
    taken = measure.same_question_in_turn(ways, arguments.rounds, lambda: [measure.draw(rng, model, context) for _ in range(batch)])
    measure.check_alike(model, {name: [each["new"] for each in found] for name, found in taken.items()})
    seconds = {name: [each["seconds"] for each in found] for name, found in taken.items()}
    prefill = {name: spread([each["seconds"] * each["prefill"] for each in found]) for name, found in taken.items()}
    least = bounds(planner, runners, {name: [each["cost"] for each in found] for name, found in taken.items()})
    total = {name: min(each["median"] for each in prefill.values()) + (new - 1) * step for name, step in least.items()}
    for name in runners:
        yield dict(
            f=f, batch=batch, context=context, new=new, policy=name, over=ratio(seconds[name], seconds["hybrid"]),
            tokens_per_second=spread([batch * new / each for each in seconds[name]]), prefill_seconds=prefill[name],
            plan=runners[name].plan._asdict(), behind=measure.is_behind(ratio(seconds["hybrid"], seconds[name])["samples"]),
            **({"allowed": total[name] / total["hybrid"]} if name in total else {}))  # fmt: skip


PARTS = {name: (part, ["random:long"]) for name, part in (("grid", grid), ("steps", steps), ("whole", whole))}


# 5. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    steps = tables.rows(found, "steps")
    for row in steps:
        row["lengths"] = tables.between(row["contexts"], "{:,}".format)
        row["moved"] = megabytes(row)
    return tables.paragraphs(
        report_grid(tables.rows(found, "grid")),
        tables.table("**Table III**, of decode steps ({model}, {batch} contexts of {lengths} tokens, f = {f:g}):", {
            "step": "{step}", "mini-batches": "{mini_batches}", "tokens/s": "{tokens_per_second:spread}",
            "over act-only": "{over_act_only:spread}", "busy: link, processor": BUSY, "MB: weights/KV/ACT": "{moved}",
        }, steps),
        tables.table(
            "**Prefill and decode** ({model}, {batch} prompts of {context} tokens, {new} new ones each, f = {f:g}), new tokens over "
            "all of the time:", {
                "policy": "`{policy}`", "tokens/s": "{tokens_per_second:spread}", "prefill, s": "{prefill_seconds:spread}",
                "hybrid's throughput over it": "{over:spread}", "allowed": "{allowed:n}",
            }, tables.rows(found, "whole")))  # fmt: skip


BUSY = "{busy[load]:%}, {busy[compute]:%}"


def megabytes(row: dict) -> str:
    return "/".join(f"{row['bytes'].get(kind, 0) / 1e6:,.0f}" for kind in ("weights", "kv", "act"))


def traffic(row: dict, policy: str, *besides: str) -> float:
    """A policy's bytes of context, and `besides`, over hybrid's, from the host in a decode step."""
    of, least = (sum(row["policies"][name]["bytes"].get(kind, 0) for kind in ("kv", "act", *besides)) for name in (policy, "hybrid"))
    return of / least


def report_grid(rows: list[dict]) -> str:
    if not rows:
        return ""
    for row in rows:
        row["factor"] = row.get("link", f"f = {row['f']:g}")
    behind = [f"{', '.join(row['behind'])} ({row['factor']}, {row['batch']} x {row['context']:,}, {row['rounds']} rounds)"
              for row in rows if row["behind"]]  # fmt: skip
    gains = tables.grouped(rows, ("model", "batch", "context"), "factor")
    middle = [row for row in rows if row["f"] == FACTORS[1]] or rows
    each = [dict(row, policy=name, **one, moved=megabytes(one), context_bytes=traffic(row, name), all_bytes=traffic(row, name, "weights"))
            for row in middle for name, one in row["policies"].items()]  # fmt: skip
    return tables.paragraphs(
        tables.table("**hybrid's throughput over that of other policies**, and what the costs of these steps allow:", {
            "model, batch x context": "{model}, {batch} x {context:,}",
            **tables.across(gains, {
                "`kv-only`": "{policies[kv-only][over]:spread} of {policies[kv-only][allowed]:n}",
                "`act-only`": "{policies[act-only][over]:spread} of {policies[act-only][allowed]:n}"}),
        }, gains),
        f"It is {tables.between(row['of_bound']['median'] for row in rows)} of the bound, and was behind "
        f"{tables.listed(behind) if behind else 'nothing'}.",
        tables.table("**Both lanes**, {factor}; bytes from the host over hybrid's, of the context and with the weights:", {
            "batch x context": "{batch} x {context:,}", "policy": "`{policy}`", "tokens/s": "{tokens_per_second:n}",
            "hybrid's over it": "{over:spread}", "mini-batches": "{mini_batches}", "busy: link, processor": BUSY,
            "MB: weights/KV/ACT": "{moved}", "bytes over hybrid's": "{context_bytes:n}, {all_bytes:n}",
        }, each))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--f", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.set_defaults(dtype=measure.short_dtype())
    measure.run("hybrid_blocks", PARTS, report, parser.parse_args(), hybrid.load)

