"""Chapter 08: what the context of a large batch is kept as, with the weights in host memory; all policies in turn.

    python -m benchmarks.hybrid_blocks                              all; results in benchmarks/results/
    python -m benchmarks.hybrid_blocks --only grid --f 1.25 --batch 16 --context 1024

grid        decode steps at full depth behind contexts that were filled in. The link is given as f, all weights and
            all K and V over it, over rebuilding everything and the rest of the layers. The device has room for half
            of the layers beside two that come and go, or for as many bytes of blocks. `allowed` is what the costs
            of these steps let hybrid win; the bound is the slower lane of its plan with these costs. hybrid is
            behind where `benchmarks.both_ends` says so; such a cell is measured again with twice the rounds.
steps       the paper's Table III: activations only; as many blocks of each kind; Algorithm 1; its mini-batches. Then
            ours, and this engine's plan. Contexts are of all lengths, and more than the buffers hold.
end         a real prefill and 16 tokens; they are compared with chapter 01's.
"""

import argparse
import importlib
import itertools
import random
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.both_ends import is_behind  # noqa: E402
from benchmarks.limits import matrix_rate  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint, cli, lesson  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import Request  # noqa: E402

paged, hybrid = importlib.import_module("02_paged_kv"), importlib.import_module("08_hybrid_blocks")
FACTORS, BATCHES, CONTEXTS = [1.0, 1.25, 2.0], [16, 64], [128, 512, 1024]
OTHERS = [("random:tinyllama-mha", 1.25, 16, 512), ("random:tinyllama", 1.25, 16, 512)]  # the second: grouped queries
PAPER = {"over kv-only": 2.19, "over act-only": 1.35}  # Figure 8; the first against FlexGen's own code


def half_of_the_layers(model) -> int:
    """Bytes of the device."""
    return (2 + len(model.layers) // 2) * hybrid.sizes_of(model, 16).weights


def planner_for(f: float, model, contexts: list[int], device: int):
    """-> a Planner for such decode steps, and the bandwidth of the modelled link: weights and all K and V take `f`
    times as long as computing with ACT blocks alone."""
    blocks, costs = sum(context // 16 + 3 for context in contexts), hybrid.Costs(1e9, 0.0, 0.0)
    planner = hybrid.Planner("act-only", costs, hybrid.sizes_of(model, 16), len(model.layers), blocks, device)
    planner = hybrid.measure(planner, model, links.Bandwidth(1e9), contexts)
    bandwidth = links.Bandwidth(planner.speed_for(f, sum(contexts) / 16))
    planner = planner._replace(costs=planner.costs._replace(speed=bandwidth.value))
    for policy in ("act-only", "hybrid", "hybrid"):  # rebuilding some blocks costs more than their share of all
        planner = hybrid.measure(planner._replace(policy=policy), model, bandwidth, contexts)
    return planner, bandwidth


def one_step(engine) -> dict:
    """Of a decode step: seconds, those that the processor was busy, bytes over the link by kind."""
    seconds, timeline = hybrid.one_step(engine)
    moved = Counter()
    for transfer in engine.runner.transfers:
        moved[transfer.label] += transfer.bytes
    return dict(seconds=seconds, compute=seconds * (1 - timeline.bubble("compute", 0.0, seconds)), bytes=dict(moved))


# 1. The grid ------------------------------------------------------------------------------------------------


def cell(model, f: float, batch: int, context: int, rounds: int, rate: float) -> dict:
    contexts = batch * [context]
    planner, bandwidth = planner_for(f, model, contexts, half_of_the_layers(model))
    engines = {policy: hybrid.ready(planner._replace(policy=policy).plan(), model, bandwidth, contexts)
               for policy in hybrid.POLICIES}  # fmt: skip
    taken = lesson.in_turn({policy: partial(one_step, each) for policy, each in engines.items()}, rounds)
    seconds = {policy: [step["seconds"] for step in steps] for policy, steps in taken.items()}
    planner = planner.after([sample for each in engines.values() for sample in list(each.runner.samples)[1:]])
    lanes = {policy: planner.lanes(each.runner.deal.plan) for policy, each in engines.items()}
    link, rows = engines["hybrid"].runner.load_link.speed(), {}
    for policy, steps in taken.items():
        plan, step = engines[policy].runner.deal.plan, sorted(steps, key=lambda one: one["seconds"])[len(steps) // 2]
        flops = multiplications(model, plan, batch, context)
        rows[policy] = dict(
            tokens_per_second=spread([batch / each for each in seconds[policy]]), plan=plan._asdict(),
            bytes=step["bytes"], link_busy=sum(step["bytes"].values()) / link / step["seconds"],
            compute_busy=step["compute"] / step["seconds"], of_matrix_rate=flops / step["compute"] / rate,
            over=spread([theirs / ours for theirs, ours in zip(seconds[policy], seconds["hybrid"])]),
            allowed=max(lanes[policy]) / max(lanes["hybrid"]))  # fmt: skip
    bound, (speed, forward, rebuild), layers = max(lanes["hybrid"]), planner.costs, len(model.layers)
    costs = dict(load_weights=planner.sizes.weights / speed, forward=forward, rebuild=rebuild,
                 load_act=planner.sizes.act / layers / speed, load_kv=planner.sizes.kv / layers / speed)  # fmt: skip
    over = {policy: [ours / theirs for ours, theirs in zip(seconds["hybrid"], seconds[policy])] for policy in engines}
    return dict(
        f=f, batch=batch, context=context, rounds=rounds, gbps=link / 1e9, costs=costs, policies=rows,
        of_bound=spread([bound / each for each in seconds["hybrid"]]), lanes_seconds=lanes["hybrid"],
        behind=[policy for policy in hybrid.POLICIES[1:] if is_behind(over[policy])])  # fmt: skip


def multiplications(model, plan, batch: int, context: int) -> float:
    """FLOP of a decode step: K and V rebuilt, the layers and attention for the new tokens, and the head."""
    config, layers = model.config, len(model.layers)
    blocks = sum(plan[1:])
    rebuilt = batch * context * (plan.act_host + plan.act_device) / blocks
    kv = config.num_key_value_heads * config.head_dim
    weights = sum(parameter.numel() for parameter in model.layers[0].parameters())
    attention = 4 * batch * context * config.num_attention_heads * config.head_dim
    head = 2 * batch * config.hidden_size * config.vocab_size
    return layers * (4 * rebuilt * config.hidden_size * kv + 2 * batch * weights + attention) + head


def grid(model, cells: list[tuple], rounds: int) -> list[dict]:
    rows, rate = [], matrix_rate(model.dtype, model.device)
    for f, batch, context in cells:
        for times in (1, 2):
            rows.append(cell(model, f, batch, context, times * rounds, rate))
            show_cell(rows[-1])
            if not rows[-1]["behind"]:
                break
    return rows


def show_cell(row: dict):
    print(f" f {row['f']}, {row['batch']} x {row['context']}: {row['of_bound']['median']:.2f} of the bound; "
          f"link {row['gbps']:.2f} GB/s" + f"; BEHIND {row['behind']}" * bool(row["behind"]))  # fmt: skip
    for policy, each in row["policies"].items():
        plan = each["plan"]
        moved = ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in sorted(each["bytes"].items()))
        acts = plan["act_host"] + plan["act_device"]
        print(f"   {policy:9} {each['tokens_per_second']['median']:8.2f} tokens/s; hybrid {each['over']['median']:.2f}x "
              f"(allowed {each['allowed']:.2f}); MB: {moved}; busy: link {each['link_busy']:.0%}, processor "
              f"{each['compute_busy']:.0%} at {each['of_matrix_rate']:.0%}; {plan['resident']} layers, ACT "
              f"{acts} of {sum(plan.values()) - plan['resident']}", flush=True)  # fmt: skip


# 2. Table III -----------------------------------------------------------------------------------------------


def in_order(items: list, rows: int) -> list[list]:
    """Mini-batches as full as the buffers allow, in the order of arrival."""
    formed = [[]]
    for item in items:
        if sum(one.end for one in [*formed[-1], item]) > rows and formed[-1]:
            formed.append([])
        formed[-1].append(item)
    return formed


def balanced(planner, deal, items: list, rows: int) -> list[list]:
    """The paper's (section IV-C-3): a request joins where that lessens the imbalance of rebuilding and loading,
    equations 6 and 7, and begins a mini-batch of its own where it lessens none."""

    def blocks(item) -> tuple[int, int]:
        kinds, _ = deal.slots(item.table, torch.arange(item.start))
        acts = int(((kinds == hybrid.ACT_HOST) | (kinds == hybrid.ACT_DEVICE)).sum())
        return acts / planner.block_size, int((kinds == hybrid.KV_HOST).sum()) / planner.block_size

    def imbalance(group: list) -> float:
        acts, kvs = map(sum, zip(*map(blocks, group)))
        rebuild, load = acts * planner.costs.rebuild, kvs * planner.sizes.kv / planner.layers / planner.costs.speed
        return max(rebuild, load) / max(1e-9, min(rebuild, load))

    formed = []
    for item in items:
        found = [(imbalance([*group, item]) - imbalance(group), number) for number, group in enumerate(formed)
                 if sum(one.end for one in [*group, item]) <= rows]  # fmt: skip
        if found and min(found)[0] < 0:
            formed[min(found)[1]].append(item)
        else:
            formed.append([item])
    return formed


def steps(model, rounds: int, batch: int = 32, longest: int = 1024, f: float = 1.25) -> list[dict]:
    rng = random.Random(0)
    contexts = [rng.randrange(longest // 16, longest) for _ in range(batch)]
    planner, bandwidth = planner_for(f, model, contexts, half_of_the_layers(model))
    paper, only = planner._replace(policy="paper").plan(), planner._replace(policy="act-only").plan()
    only = only._replace(resident=0, act_device=paper.act_device, act_host=planner.blocks - paper.act_device)
    half = only._replace(kv_host=only.act_host // 2, act_host=only.act_host - only.act_host // 2)
    ours = hybrid.form
    joined = partial(balanced, planner, hybrid.Deal(paper, 16))
    ways = {"act-only": (only, in_order), "+ hybrid blocks, 1:1": (half, in_order),
            "+ Algorithm 1": (paper, in_order), "+ mini-batches (paper's)": (paper, joined),
            "+ mini-batches (ours)": (paper, ours), "this engine's plan": (planner.plan(), ours)}  # fmt: skip
    engines = {name: hybrid.ready(plan, model, bandwidth, contexts) for name, (plan, _) in ways.items()}

    def once(name: str) -> dict:
        hybrid.form = ways[name][1]
        try:
            return dict(one_step(engines[name]), batches=len(engines[name].runner.last))
        finally:
            hybrid.form = ours

    taken, rows = lesson.in_turn({name: partial(once, name) for name in ways}, rounds), []
    for name, found in taken.items():
        first = taken["act-only"]
        rows.append(dict(
            f=f, batch=batch, contexts=[min(contexts), max(contexts)], step=name, plan=ways[name][0]._asdict(),
            mini_batches=found[-1]["batches"], tokens_per_second=spread([batch / one["seconds"] for one in found]),
            over_act_only=spread([a["seconds"] / b["seconds"] for a, b in zip(first, found)])))  # fmt: skip
        speed, over = rows[-1]["tokens_per_second"]["median"], rows[-1]["over_act_only"]["median"]
        print(f"   {name:26} {speed:8.2f} tokens/s, {over:.2f}x; {rows[-1]['mini_batches']} mini-batches", flush=True)
    return rows


# 3. From the prompt to the last token -----------------------------------------------------------------------


def end_to_end(name: str, device: str, batch: int = 8, context: int = 256, new: int = 16, f: float = 1.25) -> list[dict]:
    model, rng, rows = checkpoint.load(name, "float32", device, on_host=True)[0], random.Random(0), []
    planner, bandwidth = planner_for(f, model, batch * [context], half_of_the_layers(model))
    prompts, answers = [[rng.randrange(300, 1000) for _ in range(context)] for _ in range(batch)], {}
    for policy in hybrid.POLICIES:
        runner = hybrid.HybridRunner(model, planner._replace(policy=policy).plan(), bandwidth)
        engine = paged.Engine(runner, token_budget=8192, max_running=batch)
        requests = engine.generate([Request(prompt, new) for prompt in prompts])
        answers[policy] = [request.new for request in requests]
        ttft = statistics.mean(request.outcome.ttft_ms for request in requests)
        tbt = statistics.mean(request.outcome.tbt_ms for request in requests)
        rows.append(dict(policy=policy, batch=batch, context=context, new_tokens=new, ttft_ms=ttft, tbt_ms=tbt))
    single = importlib.import_module("01_baseline").Engine(checkpoint.load(name, "float32", device)[0])
    expected = [single.generate([Request(prompt, new)])[0].new for prompt in prompts]
    for row in rows:
        row["tokens_equal"] = answers[row["policy"]] == expected
        print(f"   {row}", flush=True)
    return rows


# 4. The command line ----------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["grid", "steps", "end"])
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--f", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="tokens")
    parser.add_argument("--dtype", default="bfloat16", help="of grid and steps (bfloat16)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found, name, device = [], arguments.model or "random:small", "cpu"
    load = partial(checkpoint.load, dtype=arguments.dtype, device=arguments.device, on_host=True)
    set_imports_aside()
    if arguments.only in (None, "grid"):
        model = load(name)[0]
        device, cells = model.device.type, list(itertools.product(arguments.f, arguments.batch, arguments.context))
        found.append(dict(claim="grid", model=name, dtype=arguments.dtype, paper=PAPER,
                          rows=grid(model, cells, arguments.rounds)))  # fmt: skip
        for other, *one in OTHERS if not arguments.model else ():
            rows = grid(load(other)[0], [one], min(3, arguments.rounds))
            found.append(dict(claim="grid", model=other, dtype=arguments.dtype, paper=PAPER, rows=rows))
    if arguments.only in (None, "steps"):
        rows = steps(load(name)[0], arguments.rounds)
        found.append(dict(claim="steps", model=name, dtype=arguments.dtype, rows=rows))
    if arguments.only in (None, "end"):
        found.append(dict(claim="end", model=name, dtype="float32", rows=end_to_end(name, arguments.device)))
    write("hybrid_blocks", device, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
