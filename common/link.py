"""The link: copies between device memory and host memory, beside the computation.

    link = Link("load", clock)                         # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    link.copy(dst, src, "layer 1", Places(to, at))     # blocks: dst[to] = src[at], see places.py

A lane is a stream of a GPU. A copy begins only after everything that was queued to compute when it was
issued (with `Places(apart=True)`, when their first copy was): so a load cannot overwrite what queued work
still reads, and a copy out sees what queued work still writes. That is half of the contract; the other half
is the caller's (`Cache.hold`): no memory of a transfer may be used for anything else before `ready`.

Where there is no GPU, shell/modelled_link.py has a link with the same verbs, and the same contract."""
import math
import sys
import threading
import time
import weakref
from collections import deque

import torch

from common.places import Places, paired, queue_blocks, stream_of_few

LAST = 8            # passes that say how fast something is


class TransferError(Exception):
    """A copy that failed, or that came too late."""


# 1. Transfers -----------------------------------------------------------------------------------------------

class Transfer:
    """Something on its way: a copy over a link, or whatever else ends on another thread by `finish`."""

    def __init__(self, lane: str, label: str, size: int = 0):
        self.lane, self.label, self.bytes = lane, label, size
        self.issued, self.start, self.end, self.error = time.perf_counter(), None, None, None
        self.over, self.cancelled, self.value = threading.Event(), False, None

    def cancel(self):
        """Let it fail, unless it has begun: nobody needs it any more."""
        self.cancelled |= self.start is None

    @property
    def ready(self) -> bool:
        """Whether it is over, well or not: nothing is written any more."""
        return self.over.is_set()

    def finish(self, start: float, end: float, error: Exception | None = None):
        self.start, self.end, self.error = start, end, error
        self.over.set()

    def wait(self, seconds: float | None = None):
        """Make the host wait until it is over. Raises TransferError if it failed, or took longer."""
        if not self.over.wait(seconds):
            raise TransferError(f"{self.label} is late")
        self.check()

    def check(self):
        """Raise TransferError if it failed."""
        if self.error is not None:
            raise TransferError(f"{self.label} failed ({self.error})")

    def queue_wait(self) -> bool:
        """Order it before what is computed from here on, and return True; or False: wait for `ready`."""
        return False

    def span(self) -> tuple[float, float]:
        """Return start and end in seconds of time.perf_counter(), once it is ready."""
        return self.start, self.end


def cancel(transfers):
    """Nobody waits for these any more."""
    for transfer in transfers:
        transfer.cancel()


class CudaTransfer(Transfer):
    """Starts and ends with events on the lane's stream. What is queued ends, so `wait` has no limit."""

    @property
    def ready(self) -> bool:
        return self.end.query()

    def wait(self, seconds: float | None = None):
        self.end.synchronize()
        self.check()

    def queue_wait(self) -> bool:
        self.check()
        torch.cuda.current_stream().wait_event(self.end)
        return True

    def span(self) -> tuple[float, float]:
        return self.clock.seconds(self.start), self.clock.seconds(self.end)


# 2. Lanes ---------------------------------------------------------------------------------------------------

class Speed:
    """The speed of one kind of work, in units per second: that of the fastest of the last passes, since noise
    only slows. `unmeasured`: that before the first pass."""

    def __init__(self, unmeasured: float):
        self.unmeasured, self.passes = unmeasured, deque(maxlen=LAST)

    def note(self, units: float, seconds: float):
        self.passes.append(units / seconds)

    def forget(self):
        self.passes.clear()

    @property
    def value(self) -> float:
        return max(self.passes, default=self.unmeasured)

    def seconds(self, units: float) -> float:
        """Estimate for so much work; infinite if the speed is 0."""
        return units / self.value if self.value else math.inf


class Lane:
    """Does one thing after the other."""

    measured_from = 1           # bytes: smaller transfers do not say how fast the lane is
    latency = 0.0               # seconds of a transfer of no bytes

    def __init__(self, name: str):
        self.name = name
        self.on_their_way: deque[Transfer] = deque()
        self.measured = Speed(math.inf)     # bytes/s, of the last transfers
        self.forgot = -math.inf             # when `measured` was; what was issued before is not noted

    def forget(self):
        """Forget how fast it was: also what is on its way says nothing."""
        self.measured.forget()
        self.forgot = time.perf_counter()

    def settle(self) -> int:
        """Drop what is over, note how fast it was, and return the bytes that are on their way."""
        while self.on_their_way and self.on_their_way[0].ready:
            transfer = self.on_their_way.popleft()
            (start, end), counts = transfer.span(), transfer.bytes >= self.measured_from
            if counts and transfer.error is None and end > start and transfer.issued > self.forgot:
                self.measured.note(transfer.bytes, end - start)
        return sum(transfer.bytes for transfer in self.on_their_way if not transfer.cancelled)

    def speed(self) -> float:
        """-> bytes/s."""
        self.settle()
        return self.measured.value if self.measured.passes else self.measure()

    def seconds(self, size: int, transfers: int = 1) -> float:
        """Estimate the seconds until `size` bytes would be there, behind what is queued now."""
        return transfers * self.latency + (self.settle() + size) / self.speed()


class Link(Lane):
    """One direction of a GPU's link."""

    measured_from = 1 << 16
    modelled, hangs = False, False

    def __init__(self, name: str, clock):
        super().__init__(name)
        self.clock, self.stream = clock, stream_of_few()
        self.close = weakref.finalize(self, self.stream.synchronize)    # nothing is on its way then
        self.backend = None         # "direct" (the copy engine) or "kernel"; None: by the rule of places.py

    def copy(self, dst, src, label: str, places: Places | None = None) -> Transfer:
        """Copy a tensor, or each of a list, to one like it; with `places`, src[at] to dst[to] of each."""
        dst, src = as_lists(dst, src)
        transfer = CudaTransfer(self.name, label, sum(to.nbytes for to in shown(dst, places)))
        transfer.clock = self.clock
        transfer.host = [side for side in (*dst, *src) if not side.is_cuda]     # no kernel keeps it
        before = self.on_their_way[-1] if self.on_their_way else None
        if not (places and places.ordered):
            self.stream.wait_stream(torch.cuda.current_stream())    # behind what is queued to compute now
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark() if before is None or before.ready else before.end
            try:
                for to, out_of in paired(dst, src, places):
                    (to if to.is_cuda else out_of).record_stream(self.stream)
                    if places:
                        queue_blocks(to, out_of, places, self.backend)
                    else:
                        to.copy_(out_of, non_blocking=True)
            except (RuntimeError, ValueError) as refused:
                transfer.error = refused
            transfer.end = self.clock.mark()
        if places:
            places.ordered = places.apart
        self.on_their_way.append(transfer)
        self.settle()
        return transfer

    def landing(self, shape, dtype) -> torch.Tensor:
        """Allocate device memory to copy to. It is the lane's: no copy to it waits for what computes."""
        with torch.cuda.stream(self.stream):
            made = torch.empty(shape, dtype=dtype, device=self.clock.device)
        made.record_stream(torch.cuda.current_stream())     # which will read it
        return made

    def probe(self, size: int) -> Transfer:
        """Copy about so many bytes, enough to be noted and 1 MiB at most, from nowhere to nowhere."""
        size, device = min(max(size, self.measured_from), 1 << 20), self.clock.device
        host, there = host_memory(size, torch.uint8, device, "A probe"), self.landing(size, torch.uint8)
        return self.copy(*((host, there) if self.name == "save" else (there, host)), "probe")

    def measure(self, interrupt=lambda: None) -> float:
        """Forget what was noted, measure again, and return bytes/s. `interrupt` may raise."""
        self.forget()
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        sides = (host, device) if self.name == "save" else (device, host)
        for size in 1, 1, len(host), len(host):     # the first of each is slower
            began = time.perf_counter()
            self.copy(*(side[:size] for side in sides), "measurement").wait()
            self.latency = time.perf_counter() - began if size == 1 else self.latency
        self.settle()
        return self.measured.value

    def __str__(self):
        return f"link, {self.speed() / 1e9:.1f} GB/s"


def as_lists(*sides) -> list[list[torch.Tensor]]:
    return [[side] if isinstance(side, torch.Tensor) else list(side) for side in sides]


def shown(dst: list[torch.Tensor], places: Places | None) -> list[torch.Tensor]:
    """-> as much of each as a copy writes."""
    return [to[: len(places.to)] for to in dst] if places else dst


def host_memory(shape, dtype, device, what: str) -> torch.Tensor:
    """Allocate on the host; for a GPU pinned: from pageable memory the driver copies, and the host waits."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            print(f"{what} cannot be pinned ({why}): copies take 5 to 8 times as long.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype)
