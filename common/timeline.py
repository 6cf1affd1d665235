"""What the lanes did when: spans of a request. On a GPU a point in time is a CUDA event."""
import time
from typing import NamedTuple

import torch

FRESH = 10.0    # seconds for which a pair of times holds: clocks drift, and float32 milliseconds are coarse


class Clock:
    """Mark points in time where a device computes or copies, in seconds of time.perf_counter()."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(priority=-1)    # not one of the copies': nothing else is queued
            self.pair()

    def pair(self):
        """Take the time of both clocks."""
        self.base = torch.cuda.Event(enable_timing=True)
        self.base.record(self.stream)
        self.base.synchronize()
        self.base_seconds = time.perf_counter()

    def mark(self):
        """Now, on the host; on a GPU when the current stream gets here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: object) -> float:
        """Wait on the host until the point has passed; return its seconds."""
        if self.device.type != "cuda":
            return mark
        mark.synchronize()
        if time.perf_counter() - self.base_seconds > FRESH:
            self.pair()
        return self.base_seconds + self.base.elapsed_time(mark) / 1e3   # negative for an earlier mark


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

    def add(self, lane: str, label: str, start: float, end: float, idle: tuple = ()):
        """Add a span of time.perf_counter(), without the (start, end) in `idle` and what came before."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume

    def as_json(self) -> list[dict]:
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3),
                     end_ms=round(span.end * 1e3, 3)) for span in list(self.spans)]
