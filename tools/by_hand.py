"""Chapters 03 to 08 by hand: formulas (by_hand.txt), first in symbols, tables, plans, and lanes.

    python -m tools.by_hand 05 --recompute 12 --project 3 --states 2 --kv 4 --question 1 --layers 6
    python -m tools.by_hand 06 --help                      the options; without any, the lesson's numbers
    python -m tools.by_hand 04 --draw lanes.svg            the lanes as a picture, too

Times are in ms: of a history in one layer (03 to 05), a chunk (06), a page (07), a block in one layer (08). In
lanes digits are layers or chunks, r is recomputed, q the question's rows, and a dot a bubble: the lane is idle.
"""

import argparse
import importlib
import inspect
import re
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

from common.estimates import WORTH
from common.timeline import Span, Timeline
from shell import charts, cli
from tools import on_paper

planned, hybrid = on_paper.planned, on_paper.hybrid
both_ends, tiered = map(importlib.import_module, ("06_bidirectional", "07_tiered_storage"))

# 1. Chapters: their options -> numbers for the formulas, tables, and lanes, a title and spans each -------------

def restored(plan: str, costs) -> tuple[list, list]:
    """-> when the question is through each layer, as chapter 05's planner says of a plan's first layers; and what is
    done, as (lane, label, start, end)."""
    through, spans, alone = [], [], set(plan) == {"K"}
    for layer, way in enumerate(plan):
        done, later = plan[: layer + 1], max(0, plan.count("R") - layer - 1)  # R that it passes after this one
        through.append(planned.plan_seconds(done + later * "R", costs) - later * costs.question)
        arrived = done.count("H") * costs.load_states + done.count("K") * costs.load_kv
        began = arrived - dict(H=costs.load_states, K=costs.load_kv).get(way, 0.0)
        history, name = through[-1] - costs.question, f"layer {layer}"
        worked = dict(H=costs.project, R=history * (layer == 0)).get(way, 0.0)
        spans.append(("load", name, began, arrived))
        spans.append(("compute", "r" if way == "R" else name, history - worked, history))
        spans.append(("compute", name if alone else "q", history, through[-1]))
    return through, [span for span in spans if span[2] < span[3]]


def chapter_03(layers=4, kv=4.0, question=3.0):
    through, spans = restored("K" * layers, planned.LayerCosts(1.0, 1.0, 1.0, kv, question))
    return dict(ttft=through[-1], apart=layers * (kv + question)), [], [("", spans)]


def chapter_04(T=1024, D=2048, heads=32, head=64, bytes=2, layers=8, states=4.0, project=2.0, question=1.0, running=16):
    kv, hidden, rows = 2 * heads * head * bytes, D * bytes, running * (layers - 1)
    noted = planned.hidden_states.SNAPSHOT
    made = dict(kv=kv, hidden=hidden, share=hidden / kv, rows=rows, noted=f"{noted >> 20} MiB")
    made["ratio"] = on_paper.layer_flops(SimpleNamespace(width=D), T) / (4 * T * D**2)
    made["steps"] = -(-noted // max(1, rows * hidden))
    costs = planned.LayerCosts(1.0, project, states, states * kv / hidden, question)
    plans = {"hidden states (04)": "R" + "H" * (layers - 1), "K and V (03)": "K" * layers}
    return made, [], [(name, restored(plan, costs)[1]) for name, plan in plans.items()]


def chapter_05(layers=6, recompute=6.0, project=1.0, states=2.0, kv=4.0, question=1.0, plan="best"):
    costs = planned.LayerCosts(recompute, project, states, kv, question)
    best, closed = planned.best_plan(layers, costs), planned.closed_form(layers, costs)
    plan, hidden = dict(best=best, paper=closed).get(plan, plan), "R" + "H" * (layers - 1)
    if len(plan) != layers:
        raise ValueError(f"--plan has {len(plan)} letters, and there are {layers} layers: give one for each.")
    names = {"K" * layers: "chapter 03", hidden: "chapter 04", closed: "the paper's"}
    rows, lanes = [("plan", "through", "link idle", "processor idle", "")], {}
    for letters in dict.fromkeys([*names, ("RR" + hidden[2:])[:layers], plan, best]):
        (*_, end), lanes[letters] = restored(letters, costs)
        busy = (sum(span[3] - span[2] for span in lanes[letters] if span[0] == lane) for lane in ("load", "compute"))
        said = names.get(letters), letters == best and f"the best of {len(planned.divisions(layers))}"
        rows.append((letters, end, *(end - each for each in busy), ", ".join(filter(None, said))))
    arrived = {label: end for lane, label, _, end in lanes[plan] if lane == "load"}
    arrives = [arrived.get(f"layer {layer}", "") for layer in range(layers)]
    table = (plan, *range(layers)), ("arrives", *arrives), ("through", *restored(plan, costs)[0])
    slower, dear = ("slow_projecting", kv) if project > states else ("slow_link", recompute)
    made = {slower: layers * dear / (dear + abs(project - states)), "closed": closed}
    return dict(made, bound=planned.bound_seconds(layers, costs)), [table, rows], [(letters, lanes[letters]) for letters in dict.fromkeys([hidden, plan])]


def chapter_06(chunks=8, load=4.0, compute=2.0, more=1.0, gbps=10.0):
    costs = dict(compute=[compute + more * number for number in range(chunks)], storage=[load] * chunks)
    order = dict(compute=range(1, chunks + 1), storage=range(chunks, 0, -1))
    events = sorted((end, lane, f"chunk {number}", end - took) for lane in costs
                    for end, number, took in zip(accumulate(costs[lane]), order[lane], costs[lane]))  # fmt: skip
    met, c, l = events[chunks - 1][0], *map(sum, costs.values())  # noqa: E741
    rows = [(end, *(chunk * (lane == one) for one in costs)) for end, lane, chunk, _ in events[:chunks]]
    lengths = [("tokens", "l, s", "c, s", "l / c", "both, s", "computed")]
    for tokens in 2048, 8192, 32768:
        compute, load, both, share = on_paper.cake_seconds(tokens, gbps)
        each = (round(number, 2) for number in (load, compute, load / compute, both))
        lengths.append((tokens, *each, f"{share:.0%}"))
    spans = [(lane, chunk, start, min(end, met)) for end, lane, chunk, start in events if start < met]
    alike, share = both_ends.meeting(l, c)
    return dict(l=l, c=c, alike=alike, share=f"{share:.0%}"), [[("ms", *costs), *rows], lengths], [("", spans)]


def chapter_07(pages=64, read=4.0, link=0.25, compute=4.0, question=10.0, timeout=85.0):
    came, l, c = min(pages, int(timeout / read)), pages * read, pages * compute  # noqa: E741
    base, more = inspect.signature(tiered.TieredCache).parameters["timeout"].default
    default = dict(base=1e3 * base, more=1e3 * more, tokens=16 * pages, default=1e3 * (base + more * pages / 64))
    bounded = min(timeout, l) + came * link + (pages - came) * compute + question
    guard = "load" if l + pages * link <= WORTH * c else "compute"
    made = dict(default, came=came, l=l, c=c, worth=WORTH, bounded=bounded, guard=guard, computed=c + question)
    made.update(waited=l + pages * link + question, met=both_ends.meeting(l, c)[0] + question)
    return made, [], []


def chapter_08(weights=12.0, kv=1.5, rebuild=1.0, new=5.0, device=3, room=37):
    act, kvs = hybrid.algorithm_1(weights, rebuild, kv, device, room, 0, 1, 2)
    if min(act, kvs) < 0:
        raise ValueError(f"--room {room} is too little to make both lanes even: give more half blocks.")
    first = max(0.0, weights / rebuild - device), max(0.0, rebuild * device - weights) / kv
    steps = [("", "ACT", "KV", "processor", "link", "half blocks"), ("begin", 0, 0, rebuild * device, weights, room)]
    for name, acts, more in ("make both even", *first), ("keep both even", act - first[0], kvs - first[1]):
        steps.append((name, acts, more, rebuild * acts, kv * more, -acts - 2 * more))
    steps.append(("together", *map(sum, list(zip(*steps[1:]))[1:])))
    made = dict(act=act, kvs=kvs, link=weights + kv * kvs, processor=rebuild * (act + device), blocks=round(act + kvs))
    costs, sizes = hybrid.Costs(1.0, new, rebuild), hybrid.Sizes(weights, kv / 2, kv)
    planner = hybrid.Planner("hybrid", costs, sizes, 1, blocks := made["blocks"], 0)
    lanes = {a: planner.lanes(hybrid.Plan(0, blocks - a, a, 0, device)) for a in range(blocks + 1)}
    chosen = sorted({0, round(act), min(lanes, key=lambda a: max(lanes[a])), blocks})
    rows = [(a, *lanes[a], max(lanes[a]), 2 * blocks - a) for a in chosen]
    return made, [steps, [("a", "link", "processor", "the step", "half blocks"), *rows]], []


# 2. On paper ---------------------------------------------------------------------------------------------------

def say(value) -> str:
    if isinstance(value, str):
        return value
    return f"{round(value, 2 if abs(value) >= 10 else 3):,}".removesuffix(".0")


def formulas(number: str, numbers: dict):
    """Yield the lines of a chapter in by_hand.txt that have all their numbers: what calculates, in symbols first."""
    page = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for line in page.partition(f"{number}\n")[2].partition("\n\n")[0].splitlines():
        if {*re.findall(r"{(\w+)}", line)} <= numbers.keys():
            name, *terms = line.split(" = ")
            symbols = [re.sub("[{}]", "", term) for term in terms[:-1]]
            yield " = ".join([name, *symbols, *terms]).format_map({key: say(each) for key, each in numbers.items()})


def aligned(rows: list[tuple]) -> str:
    """Numbers to the right, words to the left."""
    widths = [max(len(say(cell)) for cell in column) for column in zip(*rows)]
    sides = [str.ljust if isinstance(cell, str) else str.rjust for cell in rows[-1]]
    lines = ("  ".join(side(say(cell), width) for side, cell, width in zip(sides, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def chart(spans: list[tuple]) -> str:
    """A column is 1 ms, where that fits."""
    timeline, last = Timeline(), max(end for *_, end in spans)
    timeline.spans = [Span(lane, label, start / 1e3, end / 1e3) for lane, label, start, end in spans]
    return charts.chart(timeline, round(last) if 12 <= last <= 80 else 64)


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 {}" font-family="monospace" font-size="16.6">
<pattern id="idle" width="8" height="8" patternUnits="userSpaceOnUse"><path d="M0 8L8 0" stroke="#888"/></pattern>
{}</svg>
"""
BOX = '<rect x="{0}" y="{1}" width="10" height="24" fill="{2}"/>'
WORDS = '<text x="{0}" y="{1}" textLength="{2}" xml:space="preserve">{3}</text>\n'


def picture(text: str) -> str:
    """What is printed, as SVG. In lanes, what is busy has a colour, and what is idle is hatched."""
    parts, lines = [], text.splitlines()
    for y, line in enumerate(lines):
        began, _, row = line.rpartition("|")[0].partition("|")
        for x, letter in enumerate(row, len(began) + 1):
            parts.append(BOX.format(10 * x, 26 * y + 2, "url(#idle)" if letter == "." else "#9ecae1"))
        parts.append(WORDS.format(0, 26 * y + 20, 10 * len(line), line.replace(".", " ") if row else line))
    return SVG.format(26 * len(lines), "".join(parts))


def parsed(words: list[str]) -> dict:
    """A chapter's numbers, and which chapter. What cannot be ends in one sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chapters = parser.add_subparsers(dest="chapter", required=True)
    for function in chapter_03, chapter_04, chapter_05, chapter_06, chapter_07, chapter_08:
        one = chapters.add_parser(function.__name__[-2:], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.set_defaults(function=function)
        for name, option in inspect.signature(function).parameters.items():
            most = 80 if name in ("layers", "chunks") else 10**6  # what is drawn one by one
            kinds = {int: cli.bounded(int, 1, most), float: cli.bounded(float, 0.001, most), str: planned.plan}
            one.add_argument(f"--{name}", type=kinds[type(option.default)], default=option.default, help=" ")
        one.add_argument("--draw", type=Path, metavar="FILE.svg", help="the same as a picture")
    for one in parser, *chapters.choices.values():
        one.error = lambda message: sys.exit(f"by_hand: {message}; --help lists the options")
    return vars(parser.parse_args(words))


def printed(words: list[str]) -> str:
    arguments = parsed(words)
    chapter, function, draw = (arguments.pop(name) for name in ("chapter", "function", "draw"))
    try:
        made, tables, lanes = function(**arguments)
        drawn = (f"{title}\n{chart(spans)}".strip("\n") for title, spans in lanes)
        text = "\n\n".join(["\n".join(formulas(chapter, arguments | made)), *map(aligned, tables), *drawn])
        if draw:
            draw.write_text(picture(text), encoding="utf-8")
        return text
    except (ValueError, OSError) as error:
        sys.exit(f"by_hand: {error}")


if __name__ == "__main__":
    print(printed(sys.argv[1:]))
