"""Who was busy when.

Spans (lane, label, start, end) become a chart in the demos, lanes on the page, and a trace file that opens in
Perfetto or chrome://tracing. On a GPU a point in time is a CUDA event.
"""
import json
import time
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

LANES = ("compute", "load", "save", "storage")


class Clock:
    """Mark points in time where a device computes or copies, in seconds of time.perf_counter()."""

    def __init__(self, device):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.base = self.mark()
            self.base.synchronize()
            self.base_seconds = time.perf_counter()

    def mark(self):
        """Now, on the host; on a GPU when the current stream gets here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark) -> float:
        """Wait on the host until the point has passed; return its seconds."""
        if self.device.type != "cuda":
            return mark
        mark.synchronize()
        seconds = self.base_seconds + self.base.elapsed_time(mark) / 1e3
        if seconds - self.base_seconds > 10:    # CUDA gives float32 milliseconds: exact while they are few
            self.base, self.base_seconds = mark, seconds
        return seconds


class Span(NamedTuple):
    lane: str
    label: str
    start: float                   # seconds since the timeline began
    end: float


class Timeline:
    def __init__(self):
        self.began = time.perf_counter()
        self.spans: list[Span] = []
        self.plan: dict | None = None       # {"title", "rows": [[label, letters]], "legend": {letter: words}}

    @contextmanager
    def span(self, lane: str, label: str):
        """Add what the host does inside. (On a GPU: until the work is queued, not until it is done.)"""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, label, start, time.perf_counter())

    def add(self, lane: str, label: str, start: float, end: float, idle=()):
        """Add a span of time.perf_counter(), without the (start, end) in `idle` and what came before."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def lanes(self) -> dict[str, list[Span]]:
        ordered = sorted(self.spans, key=lambda span: (LANES.index(span.lane), span.start))
        return {lane: list(spans) for lane, spans in groupby(ordered, key=lambda span: span.lane)}

    def bubble(self, lane: str) -> float:
        """Share of the time in which `lane` was idle."""
        busy = reached = 0.0
        for span in self.lanes()[lane]:
            busy += max(0.0, span.end - max(span.start, reached))               # spans may overlap
            reached = max(reached, span.end)
        return 1 - busy / self.end if self.end else 0.0

    def as_json(self) -> list[dict]:
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3),
                     end_ms=round(span.end * 1e3, 3)) for span in list(self.spans)]

    def chart(self, width: int = 64) -> str:
        """The lanes as lines of text: first letters of labels, last digits of layers and chunks."""
        lines = []
        for lane, spans in self.lanes().items():
            row = "." * width
            for span in spans:
                first = min(int(span.start / self.end * width), width - 1)
                last = max(int(span.end / self.end * width), first + 1)
                letter = span.label[-1 if span.label.startswith(("layer ", "chunk ")) else 0]
                row = row[:first] + letter * (last - first) + row[last:]
            lines.append(f"{lane:>8} |{row}| idle {self.bubble(lane):.0%}")
        lines.append(f"{'':>8} 0{f'{self.end * 1e3:.0f} ms':>{width + 1}}")
        return "\n".join(lines)


def write_trace(timelines: list[Timeline], path: Path):
    """All timelines in one Chrome-trace file, on the clock that they share."""
    events = []
    for number, lane in enumerate(LANES, 1):
        events.append(dict(ph="M", name="thread_name", pid=1, tid=number, args=dict(name=lane)))
    for timeline in timelines:
        for span in timeline.spans:
            events.append(dict(ph="X", name=span.label, pid=1, tid=LANES.index(span.lane) + 1,
                               ts=(timeline.began + span.start) * 1e6, dur=(span.end - span.start) * 1e6))
    path.write_text(json.dumps(dict(traceEvents=events)))
