"""Compute the examples of chapters 03 to 08 with your own numbers: formulas (by_hand.txt), tables, plans and lanes.

    python -m tools.by_hand 05 --recompute 12 --project 3 --states 2 --kv 4 --question 1 --layers 6
    python -m tools.by_hand 06 --draw slide.svg            the lesson's numbers as a picture; --help lists options

Times are in ms: of the history in one layer (03 to 05), of a chunk (06), of a page (07), of a block in one layer (08).
In lanes a digit is the number of a layer or chunk, r means recomputing, q the question's rows. A dot is a bubble: the
lane is idle.
"""

import argparse
import importlib
import inspect
import sys
from itertools import accumulate
from pathlib import Path

from common.estimates import LOAD_THRESHOLD
from shell import cli
from tools import on_paper, paper

planned, hybrid = on_paper.planned, on_paper.hybrid
both_ends, tiered = map(importlib.import_module, ("06_bidirectional", "07_tiered_storage"))


def restored(plan: str, costs) -> tuple[list, list]:
    """Compute the times of a restoration with chapter 05's planner.

    Returns: (time at which the question has passed each layer, spans (lane, label, start, end))."""
    through, spans = [], []
    for layer, way in enumerate(plan):
        done, later = plan[: layer + 1], max(0, plan.count("R") - layer - 1)  # R layers after this one; their share is subtracted below
        through.append(planned.plan_seconds(done + later * "R", costs) - later * costs.question)
        arrived = done.count("H") * costs.load_states + done.count("K") * costs.load_kv
        began = arrived - dict(H=costs.load_states, K=costs.load_kv).get(way, 0.0)
        history, name = through[-1] - costs.question, f"layer {layer}"
        worked = dict(H=costs.project, R=history * (layer == 0)).get(way, 0.0)
        spans.append(("load", name, began, arrived))
        spans.append(("compute", "r" if way == "R" else name, history - worked, history))
        spans.append(("compute", name if plan == "K" * len(plan) else "q", history, through[-1]))
    return through, [span for span in spans if span[2] < span[3]]


def chapter_03(layers=4, kv=4.0, question=3.0):
    """Compute a chapter's example. The arguments of each of these functions are its options, with the lesson's numbers.

    layers: number of layers
    kv: ms to copy K and V of the history, for one layer
    question: ms to compute the question's rows in one layer

    Returns: (numbers for the formulas, tables, lanes as (title, spans))."""
    through, spans = restored("K" * layers, planned.LayerCosts(1.0, 1.0, 1.0, kv, question))
    return dict(ttft=through[-1], apart=layers * (kv + question)), [], [("", spans)]


def chapter_04(T=1024, D=2048, heads=32, head=64, bytes=2, layers=8, states=4.0, project=2.0, question=1.0, running=16):
    """Compute chapter 04's example.

    T: tokens of the history (in the formula, not in the lanes)
    D: numbers of a hidden state, the model's width (in the formulas, not in the lanes)
    heads: number of KV heads
    head: numbers of a head
    bytes: bytes of a number
    layers: number of layers
    states: ms to copy the hidden states of the history, for one layer; K and V take as much longer as they have more bytes
    project: ms to project the hidden states of one layer to K and V
    question: ms to compute the question's rows in one layer
    running: number of requests that decode at once
    """
    kv, hidden, rows, noted = 2 * heads * head * bytes, D * bytes, running * (layers - 1), planned.hidden_states.SNAPSHOT
    made = dict(kv=kv, hidden=hidden, share=hidden / kv, rows=rows, parts=layers - 1, noted=f"{noted >> 20} MiB")
    made["ratio"] = on_paper.layer_flops(on_paper.Model("", layers, D, 1.0), T) / (4 * T * D**2)
    made["steps"] = -(-noted // max(1, rows * hidden))
    costs = planned.LayerCosts(1.0, project, states, states * kv / hidden, question)
    plans = {"hidden states (04)": "R" + "H" * (layers - 1), "K and V (03)": "K" * layers}
    return made, [], [(name, restored(plan, costs)[1]) for name, plan in plans.items()]


def chapter_05(layers=6, recompute=12.0, project=3.0, states=2.0, kv=4.0, question=1.0, plan="best"):
    """Compute chapter 05's example.

    layers: number of layers
    recompute: ms to recompute one layer for the whole history
    project: ms to project the hidden states of one layer to K and V
    states: ms to copy the hidden states of one layer
    kv: ms to copy K and V of one layer
    question: ms to compute the question's rows in one layer
    plan: the plan that is drawn: best, paper, or a letter (R, H, K) for each layer
    """
    costs = planned.LayerCosts(recompute, project, states, kv, question)
    best, closed = planned.best_plan(layers, costs), planned.closed_form(layers, costs)
    plan, hidden = dict(best=best, paper=closed).get(plan, plan), "R" + "H" * (layers - 1)
    if len(plan) != layers:
        raise ValueError(f"--plan has {len(plan)} letters for {layers} layers; give one letter per layer.")
    names = {"K" * layers: "chapter 03", hidden: "chapter 04", closed: "the paper's"}
    rows, lanes = [("plan", "through", "link idle", "processor idle", "")], {}
    for letters in dict.fromkeys([*names, ("RR" + hidden[2:])[:layers], plan, best]):
        (*_, end), lanes[letters] = restored(letters, costs)
        busy = (sum(span[3] - span[2] for span in lanes[letters] if span[0] == lane) for lane in ("load", "compute"))
        said = names.get(letters), letters == best and f"the best of {len(planned.divisions(layers))}"
        rows.append((letters, end, *(end - each for each in busy), ", ".join(filter(None, said))))
    arrives = plan.count("R") * [""] + [end for lane, _, _, end in lanes[plan] if lane == "load"]
    table = (plan, *range(layers)), ("arrives", *arrives), ("through", *restored(plan, costs)[0])
    slower, dear = ("slow_projecting", kv) if project > states else ("slow_link", recompute)
    made = {slower: layers * dear / (dear + abs(project - states)), "closed": closed, "bound": planned.bound_seconds(layers, costs)}
    return made, [table, rows], [(letters, lanes[letters]) for letters in dict.fromkeys([hidden, plan])]


def chapter_06(chunks=8, load=4.0, compute=2.0, more=1.0, gbps=10.0):
    """Compute chapter 06's example.

    chunks: number of chunks of the history
    load: ms to read a chunk from storage
    compute: ms to compute the first chunk
    more: ms that each chunk takes to compute beyond the chunk before it
    gbps: Gbit/s of storage in the table of a 7B on an A100
    """
    costs = dict(compute=[compute + more * number for number in range(chunks)], storage=[load] * chunks)
    order = dict(compute=range(1, chunks + 1), storage=range(chunks, 0, -1))
    events = sorted((end, lane, f"chunk {number}", end - took) for lane in costs
                    for end, number, took in zip(accumulate(costs[lane]), order[lane], costs[lane]))  # fmt: skip
    met, c, l = events[chunks - 1][0], *map(sum, costs.values())  # noqa: E741
    rows = [(end, *(chunk * (lane == one) for one in costs)) for end, lane, chunk, _ in events[:chunks]]
    lengths = [("tokens", "l, s", "c, s", "l / c", "both, s", "computed")]
    for tokens in 2048, 8192, 32768:
        compute, load, both, share = on_paper.cake_seconds(tokens, gbps)
        lengths.append((tokens, *(round(number, 2) for number in (load, compute, load / compute, both)), f"{share:.0%}"))
    spans = [(lane, chunk, start, min(end, met)) for end, lane, chunk, start in events if start < met]
    alike, share = both_ends.time_to_meet(l, c)
    return dict(l=l, c=c, alike=alike, share=f"{share:.0%}"), [[("ms", *costs), *rows], lengths], [("", spans)]


def chapter_07(pages=64, read=4.0, link=0.25, compute=4.0, question=10.0, timeout=85.0):
    """Compute chapter 07's example.

    pages: number of pages of 16 tokens that only storage has
    read: ms until storage has delivered one more page
    link: ms to copy a page to the device
    compute: ms to compute a page
    question: ms to compute the question
    timeout: ms that the policy timeout waits
    """
    per_read, arrived = min(pages, tiered.READ // 16), min(pages, int(timeout / read))  # pages
    waited, last = min(timeout, pages * read), min(per_read, arrived)
    l, c = pages * max(read, link), pages * compute  # noqa: E741
    loaded = l + per_read * min(read, link)  # the slower lane, and the faster one for the pages of one read
    in_time = max(waited, last * read + arrived * link) if link > read else waited + last * link
    base, more = inspect.signature(tiered.TieredCache).parameters["timeout"].default
    made = dict(base=1e3 * base, more=1e3 * more, tokens=16 * pages, default=1e3 * (base + more * pages / 64))
    made |= dict(slow_link="the link") if link > read else dict(slow_storage="storage")
    made |= dict(l=l, c=c, pages_per_read=per_read, arrived=arrived, in_last_read=last, all_loaded=loaded, arrived_loaded=in_time)
    made |= dict(computed=c + question, complete=loaded + question, met=both_ends.time_to_meet(l, c)[0] + question)
    guard = "load" if loaded <= LOAD_THRESHOLD * c else "compute"
    return dict(made, bounded=in_time + (pages - arrived) * compute + question, worth=LOAD_THRESHOLD, guard=guard), [], []


def chapter_08(weights=12.0, kv=1.5, rebuild=1.0, new=5.0, device=3, room=37):
    """Compute chapter 08's example, for one layer.

    weights: ms to load the weights
    kv: ms to load a KV block; an ACT block takes half of it
    rebuild: ms to rebuild K and V from an ACT block
    new: ms to compute the new tokens
    device: number of ACT blocks on the device
    room: room of host memory, in half blocks: a KV block takes two, an ACT block one
    """
    act, kvs = hybrid.algorithm_1(weights, rebuild, kv, device, room, 0, 1, 2)
    if min(act, kvs) < 0:
        raise ValueError(f"--room {room} is too little to balance both lanes; give more half blocks.")
    first = max(0.0, weights / rebuild - device), max(0.0, rebuild * device - weights) / kv
    steps = [("", "ACT", "KV", "processor", "link", "half blocks"), ("begin", 0, 0, rebuild * device, weights, room)]
    for name, acts, more in ("make both even", *first), ("keep both even", act - first[0], kvs - first[1]):
        steps.append((name, acts, more, rebuild * acts, kv * more, -acts - 2 * more))
    steps.append(("together", *map(sum, list(zip(*steps[1:]))[1:])))
    blocks, costs, sizes = round(act + kvs), hybrid.Costs(1.0, new, rebuild), hybrid.Sizes(weights, kv / 2, kv)
    planner = hybrid.Planner("hybrid", costs, sizes, 1, blocks, 0)
    made = dict(act=act, kvs=kvs, link=weights + kv * kvs, processor=rebuild * (act + device), blocks=blocks)
    lanes = {a: planner.lane_seconds(hybrid.Plan(0, blocks - a, a, 0, device)) for a in range(blocks + 1)}
    chosen = sorted({0, round(act), min(lanes, key=lambda a: max(lanes[a])), blocks})
    rows = ((a, *lanes[a], max(lanes[a]), 2 * blocks - a) for a in chosen)
    return made, [steps, [("a", "link", "processor", "the step", "half blocks"), *rows]], []


def printed(words: list[str]) -> str:
    """Return what a command prints. Wrong options end the process with one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chapters = parser.add_subparsers(dest="chapter", required=True)
    for function in chapter_03, chapter_04, chapter_05, chapter_06, chapter_07, chapter_08:
        one = chapters.add_parser(function.__name__[-2:], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for name, option in inspect.signature(function).parameters.items():
            most = 80 if name in ("layers", "chunks") else 10**6  # these are drawn one by one
            kinds = {int: cli.bounded(int, 1, most), float: cli.bounded(float, 0.001, most), str: planned.plan}
            meaning = inspect.getdoc(function).partition(f"\n{name}: ")[2].partition("\n")[0]
            one.add_argument(f"--{name}", type=kinds[type(option.default)], default=option.default, help=meaning)
        one.add_argument("--draw", type=Path, metavar="FILE.svg", help="also write the output as a picture")
    for one in parser, *chapters.choices.values():
        one.error = lambda message: sys.exit(f"by_hand: {message}; --help lists the options")
    arguments = vars(parser.parse_args(words))
    chapter, draw = arguments.pop("chapter"), arguments.pop("draw")
    try:
        made, tables, lanes = globals()[f"chapter_{chapter}"](**arguments)
        drawn = (f"{title}\n{paper.chart(spans)}".strip("\n") for title, spans in lanes)
        text = "\n\n".join(["\n".join(paper.formulas(chapter, arguments | made)), *map(paper.aligned, tables), *drawn])
        if draw:
            draw.write_text(paper.picture(text), encoding="utf-8")
        return text
    except (ValueError, OSError) as error:
        sys.exit(f"by_hand: {error}")


if __name__ == "__main__":
    print(printed(sys.argv[1:]))
