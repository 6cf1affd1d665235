"""Who was busy when.

A timeline is a list of spans (lane, label, start, end). It is drawn as a text chart in the demos, as a picture by
legacy/figure.py, and written as a trace file that opens in Perfetto or chrome://tracing. On a GPU a point in time is a
CUDA event, which Clock turns into seconds of the host's clock when it has passed.
"""
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

LANES = ("compute", "load", "save", "storage")


class Clock:
    """Marks points in time where a device computes or copies; in seconds of time.perf_counter() once they have passed."""
    REBASE = 10.0                  # seconds: CUDA gives float32 milliseconds between two events, exact only while they are few

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
        """The host waits until the point has passed."""
        if self.device.type != "cuda":
            return mark
        mark.synchronize()
        seconds = self.base_seconds + self.base.elapsed_time(mark) / 1e3
        if seconds - self.base_seconds > self.REBASE:
            self.base, self.base_seconds = mark, seconds
        return seconds


@dataclass(frozen=True)
class Span:
    lane: str
    label: str
    start: float                   # seconds since the timeline began
    end: float


class Timeline:
    def __init__(self):
        self.began = time.perf_counter()
        self.spans: list[Span] = []
        self.plan = None           # what is drawn above the lanes: a function that returns a plan of legacy/figure.py, or None
        self.detail: Timeline | None = None                     # drawn in its place, where there is a closer look

    @contextmanager
    def span(self, lane: str, label: str):
        """What the host does inside it. (Chapter 01 on a GPU: until the work is queued, not until it is done.)"""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, label, start, time.perf_counter())

    def add(self, lane: str, label: str, start: float, end: float, idle=()):
        """A span that was measured elsewhere, in seconds of time.perf_counter(), but for the (start, end) in `idle`, in order,
        and for what lies before the timeline began."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def bubble(self, lane: str, start: float = 0.0, end: float | None = None) -> float:
        """The share of the time from `start` to `end` (seconds since the timeline began; by default all of it) in which
        `lane` was idle."""
        end, busy, reached = self.end if end is None else end, 0.0, start
        for span in sorted((span for span in self.spans if span.lane == lane), key=lambda span: span.start):
            busy += max(0.0, min(span.end, end) - max(span.start, reached))     # spans may overlap
            reached = max(reached, span.end)
        return 1 - busy / (end - start) if end > start else 0.0

    def as_json(self) -> list[dict]:
        """[{lane, label, start_ms, end_ms}], for an HTTP reply."""
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3), end_ms=round(span.end * 1e3, 3))
                for span in self.spans]

    def window(self, start: float, end: float) -> "Timeline":
        """What happened from `start` to `end`, in seconds since the timeline began, as a timeline of its own."""
        part = Timeline()
        part.began = self.began + start
        part.spans = [Span(span.lane, span.label, max(span.start, start) - start, min(span.end, end) - start)
                      for span in self.spans if span.start < end and span.end > start]
        return part

    def chart(self, width: int = 64, bubbles: bool = False) -> str:
        """The lanes as lines of text: one column is 1/width of the time, a letter is the first of the span's label, a digit
        the last of a layer's or a chunk's number. With `bubbles`, a column is a dot where the lane was idle for most of it, and
        beside each is the share of the time in which it was idle."""
        if not self.spans:
            return "(nothing happened)"
        lines = []
        for lane in (lane for lane in LANES if any(span.lane == lane for span in self.spans)):
            row, busy, reached = ["."] * width, [0.0] * width, 0.0              # busy: share of the column
            spans = [span for span in self.spans if span.lane == lane]
            for span in sorted(spans, key=lambda span: span.start) if bubbles else spans:
                first, last = int(span.start / self.end * width), int(span.end / self.end * width)
                letter = span.label[-1 if span.label.startswith(("layer ", "chunk ")) else 0]
                for column in range(first, max(first + 1, min(last + bubbles, width))):
                    column = min(column, width - 1)
                    edges = self.end * column / width, self.end * (column + 1) / width
                    busy[column] += max(0.0, min(span.end, edges[1]) - max(span.start, edges[0], reached)) / (edges[1] - edges[0])
                    if not bubbles or busy[column] >= 0.5:
                        row[column] = letter
                reached = max(reached, span.end)
            lines.append(f"{lane:>8} |{''.join(row)}|" + (f" idle {self.bubble(lane):.0%}" if bubbles else ""))
        lines.append(f"{'':>8} 0{f'{self.end * 1e3:.0f} ms':>{width + 1}}")
        return "\n".join(lines)


def write_trace(timelines: list[Timeline], path: Path):
    """All timelines in one Chrome-trace file, on the clock that they share."""
    events = []
    for timeline in timelines:
        for span in timeline.spans:
            events.append(dict(name=span.label, cat=span.lane, ph="X", pid=1, tid=LANES.index(span.lane) + 1,
                               ts=(timeline.began + span.start) * 1e6, dur=(span.end - span.start) * 1e6))
    for number, lane in enumerate(LANES, 1):
        events.append(dict(name="thread_name", ph="M", pid=1, tid=number, args=dict(name=lane)))
    path.write_text(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")))
