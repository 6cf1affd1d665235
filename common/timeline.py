"""Who was busy when.

A timeline is a list of spans (lane, label, start, end). It is drawn as a text chart in the demos and
written as a trace file that opens in Perfetto or chrome://tracing. Times are host times: on a GPU a span
must end after the host has seen the result (every forward pass here ends by reading a token).
"""
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LANES = ("compute", "load", "save", "storage")


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

    @contextmanager
    def span(self, lane: str, label: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, label, start, time.perf_counter())

    def add(self, lane: str, label: str, start: float, end: float):
        """A span that was measured elsewhere, in seconds of time.perf_counter()."""
        self.spans.append(Span(lane, label, start - self.began, end - self.began))

    def as_json(self) -> list[dict]:
        """[{lane, label, start_ms, end_ms}], for an HTTP reply."""
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3), end_ms=round(span.end * 1e3, 3))
                for span in self.spans]

    def chart(self, width: int = 64) -> str:
        """The lanes as lines of text: one column is 1/width of the time, a letter the span's label's first."""
        if not self.spans:
            return "(nothing happened)"
        total = max(span.end for span in self.spans)
        lines = []
        for lane in (lane for lane in LANES if any(span.lane == lane for span in self.spans)):
            row = ["."] * width
            for span in (span for span in self.spans if span.lane == lane):
                first, last = int(span.start / total * width), int(span.end / total * width)
                for column in range(first, max(first + 1, min(last, width))):
                    row[min(column, width - 1)] = span.label[0]
            lines.append(f"{lane:>8} |{''.join(row)}|")
        lines.append(f"{'':>8} 0{f'{total * 1e3:.0f} ms':>{width + 1}}")
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
