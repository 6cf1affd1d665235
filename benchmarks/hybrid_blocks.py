"""Chapter 08: what the context of a large batch is kept as, with the weights in host memory; all policies in turn.

    python -m benchmarks.hybrid_blocks                              all; results in benchmarks/results/
    python -m benchmarks.hybrid_blocks --only grid --model random:small --f 1.25 --batch 64 --context 1024

grid        decode steps at full depth behind contexts that were filled in. The modelled link is given as f, all weights
            and all K and V over it, over rebuilding everything and the rest of the layers; a GPU's is as it is. The device
            has room for half of the layers beside two that come and go, or for as many bytes of blocks. `allowed` is what
            the costs of these steps let hybrid win; the bound is the slower lane of its plan with these.
steps       the paper's Table III: activations only; as many blocks of each kind (the paper's 1:1 is
            as much memory, and ACT first); Algorithm 1; its mini-batches. Then
            ours, and this engine's plan. Contexts are of all lengths, and more than the buffers hold.
whole       a batch from its prompts to its last token under each policy in turn, in a third of the rounds.
room        tokens of context that a GB of host memory holds: as K and V, as activations, as hybrid's plan divides it.
"""

import importlib
import itertools
import random
import time
from collections import Counter
from functools import partial

from benchmarks import measure, tables
from benchmarks.measure import modelled, ratio, spread
from common.requests import Request
from common.timeline import Clock
from shell import charts, lesson, modelled_link

hybrid = importlib.import_module("08_hybrid_blocks")
FACTORS, BATCHES, CONTEXTS = [1.0, 1.25, 2.0], [16], [128, 384]


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
    """Of a decode step: seconds, those that the processor was busy, bytes over the link by kind."""
    seconds, timeline = hybrid.one_step(engine)
    moved = Counter()
    for transfer in engine.runner.transfers:
        moved[transfer.label] += transfer.bytes
    compute = sum(span.end - span.start for span in charts.lanes(timeline).get("compute", ()))
    return dict(seconds=seconds, compute=compute, bytes=dict(moved), cost=engine.runner.cost())


# 1. The grid ------------------------------------------------------------------------------------------------

def cell(model, f: float, batch: int, context: int, rounds: int) -> dict:
    contexts = batch * [context]
    planner, bandwidth, f = planner_for(f, model, contexts)
    runners = {policy: hybrid.make_runner(planner._replace(policy=policy), model, bandwidth) for policy in hybrid.POLICIES}
    engines = {policy: hybrid.ready(runner, contexts) for policy, runner in runners.items()}
    taken = lesson.in_turn({policy: partial(one_step, each) for policy, each in engines.items()}, rounds)
    seconds = {policy: [step["seconds"] for step in steps] for policy, steps in taken.items()}
    planner = planner.after([step["cost"] for policy in hybrid.POLICIES[:3] for step in taken[policy]])  # one way to form
    lanes = {policy: planner.lanes(each.runner.plan) for policy, each in engines.items()}
    link, rows = engines["hybrid"].runner.load_link.speed(), {}
    for policy, steps in taken.items():
        plan, step = engines[policy].runner.plan, sorted(steps, key=lambda one: one["seconds"])[len(steps) // 2]
        rows[policy] = dict(
            tokens_per_second=spread([batch / each for each in seconds[policy]]), plan=plan._asdict(),
            bytes=step["bytes"], link_busy=sum(step["bytes"].values()) / link / step["seconds"],
            compute_busy=step["compute"] / step["seconds"], over=ratio(seconds[policy], seconds["hybrid"]),
            allowed=max(lanes[policy]) / max(lanes["hybrid"]))  # fmt: skip
    return dict(
        f=f, batch=batch, context=context, rounds=rounds, policies=rows,
        of_bound=spread([max(lanes["hybrid"]) / each for each in seconds["hybrid"]]),
        behind=[policy for policy in hybrid.POLICIES[1:] if measure.is_behind(ratio(seconds["hybrid"], seconds[policy])["samples"])])  # fmt: skip


def grid(model, arguments):
    factors = arguments.f if modelled(model, 1.0) else [None]
    for one in itertools.product(factors, arguments.batch, arguments.context):
        yield from measure.again_if_behind(partial(cell, model, *one), arguments.rounds)


# 2. Table III -----------------------------------------------------------------------------------------------

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
    half = only._replace(kv_host=only.act_host // 2, act_host=only.act_host - only.act_host // 2)
    theirs = partial(hybrid.form_as_paper, planner, hybrid.Deal(paper, 16))
    ways = {"act-only": (only, in_order), "+ hybrid blocks, 1:1": (half, in_order),
            "+ Algorithm 1": (paper, in_order), "+ mini-batches (paper's)": (paper, theirs),
            "+ mini-batches (ours)": (paper, hybrid.form), "this engine's plan": (planner.plan(), hybrid.form)}  # fmt: skip
    engines = {name: hybrid.ready(hybrid.HybridRunner(model, plan, bandwidth), contexts) for name, (plan, _) in ways.items()}
    for name, engine in engines.items():
        engine.runner.form = ways[name][1]
    taken = lesson.in_turn({name: partial(one_step, engine) for name, engine in engines.items()}, arguments.rounds)
    seconds = {name: [step["seconds"] for step in found] for name, found in taken.items()}
    for name, found in taken.items():
        yield dict(
            f=f, batch=batch, contexts=[min(contexts), max(contexts)], step=name,
            mini_batches=len(engines[name].runner.last), tokens_per_second=spread([batch / one for one in seconds[name]]),
            over_act_only=ratio(seconds["act-only"], seconds[name]))  # fmt: skip


# 3. Whole answers, and room ---------------------------------------------------------------------------------

def answer(engine, prompts: list[list[int]], new: int) -> dict:
    """Of a batch: seconds, the share of them until all have their first token, and the answers."""
    began = time.perf_counter()
    requests = engine.generate([Request(prompt, new) for prompt in prompts])
    seconds = time.perf_counter() - began
    first = max(request.times[0] for request in requests) - began
    return dict(seconds=seconds, prefill=first / seconds, new=[request.new for request in requests])


def whole(model, arguments, batch: int = 16, context: int = 256, new: int = 16, f: float = 1.25):
    planner, bandwidth, f = planner_for(f, model, batch * [context + new])  # measured just now: no warm-up
    runners = {policy: hybrid.make_runner(planner._replace(policy=policy), model, bandwidth) for policy in hybrid.POLICIES}
    engines = {policy: hybrid.paged.Engine(runner, None, batch * context, batch) for policy, runner in runners.items()}
    rng, taken = random.Random(0), {policy: [] for policy in engines}
    for _ in range(max(1, arguments.rounds // 3)):
        prompts = [measure.draw(rng, model, context) for _ in range(batch)]
        for policy, engine in engines.items():
            taken[policy].append(answer(engine, prompts, new))
    measure.check_alike(model, {policy: [each["new"] for each in found] for policy, found in taken.items()})
    seconds = {policy: [each["seconds"] for each in found] for policy, found in taken.items()}
    for policy, found in taken.items():
        yield dict(
            f=f, batch=batch, context=context, new=new, policy=policy, over=ratio(seconds[policy], seconds["hybrid"]),
            tokens_per_second=spread([batch * new / each for each in seconds[policy]]),
            prefill=spread([each["prefill"] for each in found]))  # fmt: skip


def room(model, arguments, f: float = 1.25):
    planner, _, f = planner_for(f, model, 16 * [128])
    config, (_, act, kv), plan = model.config, planner.sizes, planner._replace(policy="hybrid").plan()
    share = (plan.act_host + plan.act_device) / planner.blocks
    yield dict(f=f, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, kv=kv / 16, act=act / 16,
               kv_only=16e9 / kv, act_only=16e9 / act, share=share, hybrid=16e9 / (share * act + (1 - share) * kv))  # fmt: skip


PARTS = {"grid": (grid, ["random:long"]), "steps": (steps, ["random:long"]), "whole": (whole, ["random:long"]),
         "room": (room, ["random:long"])}  # fmt: skip


# 4. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    steps = tables.rows(found, "steps")
    for row in steps:
        row["lengths"] = tables.between(row["contexts"], "{:,}".format)
    return tables.paragraphs(
        report_grid(tables.rows(found, "grid")),
        tables.table("**Table III** ({model}, {batch} contexts of {lengths} tokens, f = {f:g}):", {
            "step": "{step}", "mini-batches": "{mini_batches}", "tokens/s": "{tokens_per_second:spread}",
            "over act-only": "{over_act_only:spread}",
        }, steps),
        tables.table(
            "**Prefill and decode** ({model}, {batch} prompts of {context} tokens, {new} new ones each, f = {f:g}), new tokens over "
            "all of the time:", {
                "policy": "`{policy}`", "tokens/s": "{tokens_per_second:spread}", "of it prefill": "{prefill:%}",
                "hybrid's throughput over it": "{over:spread}",
            }, tables.rows(found, "whole")),
        tables.table("**Tokens of context that a GB of host memory holds**, beside the weights:", {
            "model": "{model}", "heads: queries, KV": "{heads}, {kv_heads}", "bytes of a token: KV, ACT": "{kv:,.0f}, {act:,.0f}",
            "`kv-only`": "{kv_only:,.0f}", "`act-only`": "{act_only:,.0f}",
            "`hybrid`, 16 x 128, f = 1.25": "{hybrid:,.0f}, {share:%} of the blocks ACT",
        }, tables.rows(found, "room")))  # fmt: skip


def report_grid(rows: list[dict]) -> str:
    if not rows:
        return ""
    for row in rows:
        moved, row["factor"] = row["policies"]["hybrid"]["bytes"], row.get("link", f"f = {row['f']:g}")
        row["moved"] = "/".join(f"{moved.get(kind, 0) / 1e6:,.0f}" for kind in ("weights", "kv", "act"))
    behind = [f"{', '.join(row['behind'])} ({row['factor']}, {row['batch']} x {row['context']:,}, {row['rounds']} rounds)"
              for row in rows if row["behind"]]  # fmt: skip
    gains = tables.grouped(rows, ("model", "batch", "context"), "factor")
    middle = [row for row in rows if row["f"] == FACTORS[1]] or rows
    where = {"model, batch x context": "{model}, {batch} x {context:,}"}
    return tables.paragraphs(
        tables.table("**hybrid's throughput over that of other policies**, and what the costs of these steps allow:", {
            **where,
            **tables.across(gains, {
                "`kv-only`": "{policies[kv-only][over]:spread} of {policies[kv-only][allowed]:n}",
                "`act-only`": "{policies[act-only][over]:spread} of {policies[act-only][allowed]:n}"}),
        }, gains),
        f"It is {tables.between(row['of_bound']['median'] for row in rows)} of the bound, and was behind "
        f"{tables.listed(behind) if behind else 'nothing'}.",
        tables.table("**Both lanes**, {factor}:", {
            **where, "tokens/s": "{policies[hybrid][tokens_per_second]:n}", "of the bound": "{of_bound:spread}",
            "over `paper`": "{policies[paper][over]:spread}",
            "busy: link, processor": "{policies[hybrid][link_busy]:%}, {policies[hybrid][compute_busy]:%}",
            "MB: weights/KV/ACT": "{moved}",
        }, middle))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--f", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.set_defaults(dtype=measure.short_dtype())
    measure.run("hybrid_blocks", PARTS, report, parser.parse_args(), hybrid.load)

