"""The spans of a request: when the processor, each link and each worker was busy for it.

On a GPU, a point in time is a CUDA event."""
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Seconds after which the host's and the device's clock are read together again. The clocks drift, and CUDA
# returns times as float32 milliseconds, which are coarse if they are large
FRESH = 10.0


class Clock:
    """A clock that marks points in the work of a device, and converts them to seconds of
    time.perf_counter()."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(priority=-1)    # its own stream, in which nothing else is queued
            self.pair()

    def pair(self):
        """Read the device's clock and the host's clock at the same moment."""
        self.base = torch.cuda.Event(enable_timing=True)
        self.base.record(self.stream)
        self.base.synchronize()
        self.base_seconds = time.perf_counter()

    def mark(self):
        """Mark the current point in time. On a GPU: the point at which all work queued so far is done.

        Returns: a number, or a CUDA event on a GPU. Pass it to `seconds`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: float | torch.cuda.Event) -> float:
        """Wait on the host until the device has reached a mark. Returns: its time in seconds of
        time.perf_counter()."""
        if self.device.type != "cuda":
            return mark
        mark.synchronize()
        if time.perf_counter() - self.base_seconds > FRESH:
            self.pair()
        return self.base_seconds + self.base.elapsed_time(mark) / 1e3   # negative for an earlier mark


class Span(NamedTuple):
    """One piece of work on a lane."""
    lane: str
    label: str
    start: float                   # seconds since the timeline began
    end: float


@dataclass
class Timeline:
    """The spans of one request."""
    began: float = field(default_factory=time.perf_counter)
    spans: list[Span] = field(default_factory=list)
    # A picture of how a chapter restored the tokens. Each row has a letter per layer or token:
    # {"title", "rows": [[label, letters]], "legend": {letter: words}}
    plan: dict | None = None

    def add(self, lane: str, label: str, start: float, end: float, idle: tuple = ()):
        """Add a span. Times are time.perf_counter().

        `idle`: (start, end) pairs that are cut out of the span. The part before the timeline began is cut
        off."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume
