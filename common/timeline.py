"""What the lanes did when: spans of a request. On a GPU a point in time is a CUDA event."""
import time
from typing import NamedTuple

import torch


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

    def add(self, lane: str, label: str, start: float, end: float, idle=()):
        """Add a span of time.perf_counter(), without the (start, end) in `idle` and what came before."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume

    @property
    def end(self) -> float:
        """Seconds from its beginning to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def as_json(self) -> list[dict]:
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3),
                     end_ms=round(span.end * 1e3, 3)) for span in list(self.spans)]
