"""Draw timelines as text, and write them to a trace file for Perfetto or chrome://tracing."""
from itertools import groupby
from pathlib import Path

from common.timeline import Span, Timeline
from shell import read_words, to_json

LANES = ("compute", "load", "save", "storage")
# GET /health has all counters from the start, while an engine adds one at its first event
ZERO_COUNTS = dict.fromkeys(sum(read_words("counters.txt"), []), 0)


def lanes(timeline: Timeline) -> dict[str, list[Span]]:
    """Return the spans of each lane, in order of start time."""
    ordered = sorted(timeline.spans, key=lambda span: (LANES.index(span.lane), span.start))
    return {lane: list(spans) for lane, spans in groupby(ordered, key=lambda span: span.lane)}


def duration(timeline: Timeline) -> float:
    """Return the seconds from the timeline's beginning to the end of its last span."""
    return max((span.end for span in timeline.spans), default=0.0)


def bubble(timeline: Timeline, lane: str) -> float:
    """Return the share of `duration` in which `lane` was idle, from 0 to 1."""
    busy = reached = 0.0
    for span in lanes(timeline)[lane]:
        busy += max(0.0, span.end - max(span.start, reached))               # count overlapping spans once
        reached = max(reached, span.end)
    return 1 - busy / duration(timeline) if duration(timeline) else 0.0


def chart(timeline: Timeline, width: int = 64) -> str:
    """Draw each lane as a line of text.

    A span shows the first letter of its label, or the last digit of the number of its layer or chunk."""
    lines, scale = [], width / max(duration(timeline), 1e-9)
    for lane, spans in lanes(timeline).items():
        row = "." * width
        for span in spans:
            first = min(int(span.start * scale + 1e-9), width - 1)
            last = max(int(span.end * scale + 1e-9), first + 1)
            letter = span.label[-1 if span.label.startswith(("layer ", "chunk ")) else 0]
            row = row[:first] + letter * (last - first) + row[last:]
        lines.append(f"{lane:>8} |{row}| idle {bubble(timeline, lane):.0%}")
    lines.append(f"{'':>8} 0{f'{duration(timeline) * 1e3:.0f} ms':>{width + 1}}")
    return "\n".join(lines)


def describe_layers(letters: str, costs, tokens: int, seconds: float) -> dict:
    """Return a plan of chapter 05 as the page shows it, with its predicted time and costs in ms.

    `letters`: one for each layer. `costs`: a NamedTuple of seconds for one layer. `seconds`: predicted for
    all layers and the question."""
    title = f"{tokens} tokens: {1e3 * seconds:.1f} ms predicted, with the question"
    legend = dict(R="recomputed", H="projected from hidden states", K="loaded as K and V")
    costs_ms = {name: 1e3 * each for name, each in costs._asdict().items()}  # of one layer
    plan = dict(title=title, rows=[["layers", letters]], legend=legend)
    return dict(plan, predicted_ms=1e3 * seconds, costs_ms=costs_ms)


def describe_chunks(restoration, size: int) -> dict:
    """Return how each chunk was restored, as the page shows it: one letter for each `size` tokens.

    `restoration`: from both ends; tokens before its `limit` were computed, and the others loaded."""
    start, met, end, letters = restoration.start, restoration.limit, restoration.end, ""
    for first in range(start - start % size, end, size):
        letters += "L" if first >= met else "C" if first + size <= met else "B"
    title = f"Tokens {start} to {met} computed, up to {end} loaded"
    return dict(title=title, rows=[["chunks", letters]], legend=dict(C="computed", B="both", L="loaded"))


def write_trace(timelines: list[Timeline], path: Path):
    """Write all timelines to one Chrome trace file. They share a clock, so requests line up."""
    events = [dict(ph="M", name="thread_name", pid=1, tid=number, args=dict(name=lane))
              for number, lane in enumerate(LANES, 1)]
    events += [dict(ph="X", name=span.label, pid=1, tid=LANES.index(span.lane) + 1,
                    ts=(timeline.began + span.start) * 1e6, dur=(span.end - span.start) * 1e6)
               for timeline in timelines for span in timeline.spans]
    path.write_text(to_json(dict(traceEvents=events)))


def counters(engine) -> dict:
    """-> the numbers of an engine that /health, the page and the demos show."""
    counts = dict(engine.counts, waiting=len(engine.waiting), running=len(engine.running))
    for name, pool in engine.pools.items():
        free = pool.free.count(1)
        counts |= {f"{name}_blocks": pool.size, f"{name}_free": free,
                   f"{name}_cached": pool.available - free, f"{name}_evictions": pool.evictions}
    return counts


def spans(timeline) -> list[dict]:
    """-> one dict per span of a timeline, with times in milliseconds."""
    return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3),
                 end_ms=round(span.end * 1e3, 3)) for span in list(timeline.spans)]
