"""Copies between device memory and host memory, beside the computation; and threads that do one thing after
the other.

    link = Link("load", clock)                         # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    link.copy(dst, src, "layer 1", BlockPairs(to, at)) # blocks: dst[to] = src[at]

A copy begins only after everything that was queued to compute when it was issued (with
`BlockPairs(apart=True)`, when their first copy was): so a load cannot overwrite what queued work still reads,
and a copy out sees what queued work still writes. That is half of the contract; the other half is the
caller's (`Cache.hold`): no memory of a transfer may be used for anything else before `ready`.

A GPU's link is in cuda_link.py. Where there is no GPU, shell/modelled_link.py has a link with the same verbs,
and the same contract."""
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from itertools import pairwise

import numpy
import torch

NUM_SAMPLES = 8     # samples that say how fast something is
HANG_SECONDS = 1.0  # seconds after which a job hangs: its lane is given nothing that somebody waits for
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # by their bytes

# 1. Transfers -----------------------------------------------------------------------------------------------

class TransferError(Exception):
    """A copy that failed, or that came too late."""


# 1. Transfers -----------------------------------------------------------------------------------------------

class Transfer:
    """Something on its way: a copy over a link, or whatever else ends on another thread by `finish`."""

    def __init__(self, lane: str, label: str, size: int = 0):
        self.lane, self.label, self.bytes = lane, label, size
        self.issued, self.start, self.end, self.error = time.perf_counter(), None, None, None
        self.completed, self.cancelled, self.value = threading.Event(), False, None

    def cancel(self):
        """Let it fail, unless it has begun: nobody needs it any more."""
        self.cancelled |= self.start is None

    @property
    def ready(self) -> bool:
        """Whether it is over, well or not: nothing is written any more."""
        return self.completed.is_set()

    def finish(self, start: float, end: float, error: Exception | None = None):
        self.start, self.end, self.error = start, end, error
        self.completed.set()

    def wait(self, seconds: float | None = None):
        """Make the host wait until it is over. Raises TransferError if it failed, or took longer."""
        if not self.completed.wait(seconds):
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


# 2. Lanes ---------------------------------------------------------------------------------------------------

class Speed:
    """The speed of one kind of work, in units per second: that of the fastest of the last passes, since noise
    only slows. `unmeasured`: that before the first pass."""

    def __init__(self, unmeasured: float):
        self.unmeasured, self.samples = unmeasured, deque(maxlen=NUM_SAMPLES)

    def record(self, units: float, seconds: float):
        self.samples.append(units / seconds)

    def forget(self):
        self.samples.clear()

    @property
    def value(self) -> float:
        return max(self.samples, default=self.unmeasured)

    def seconds(self, units: float) -> float:
        """Estimate for so much work; infinite if the speed is 0."""
        return units / self.value if self.value else math.inf


class Lane:
    """Does one thing after the other."""

    measured_from = 1           # bytes: smaller transfers do not say how fast the lane is
    latency = 0.0               # seconds of a transfer of no bytes

    def __init__(self, name: str):
        self.name = name
        self.in_flight: deque[Transfer] = deque()
        self.measured = Speed(math.inf)     # bytes/s, of the last transfers

    def reap_completed(self) -> int:
        """Drop what is over, note how fast it was, and return the bytes that are on their way."""
        while self.in_flight and self.in_flight[0].ready:
            transfer = self.in_flight.popleft()
            (start, end), counts = transfer.span(), transfer.bytes >= self.measured_from
            if counts and transfer.error is None and end > start:
                self.measured.record(transfer.bytes, end - start)
        return sum(transfer.bytes for transfer in self.in_flight if not transfer.cancelled)

    def speed(self) -> float:
        """-> bytes/s."""
        self.reap_completed()
        return self.measured.value if self.measured.samples else self.measure()

    def seconds(self, size: int, transfers: int = 1) -> float:
        """Estimate the seconds until `size` bytes would be there, behind what is queued now."""
        return transfers * self.latency + (self.reap_completed() + size) / self.speed()


class Worker(Lane):
    """A thread that does one thing after the other. A hung job ends with the process."""

    def __init__(self, name: str, wake=lambda: None, background=False):
        """`wake` is called when something is over. `background`: nobody waits for what this does."""
        super().__init__(name)
        self.wake, self.jobs, self.closed = wake, queue.SimpleQueue(), threading.Event()
        self.began = [math.inf]             # when what it does now did; infinite while it does nothing
        arguments = self.jobs, self.closed, self.began, wake, background   # not the lane: it may be forgotten
        self.thread = threading.Thread(target=run_jobs, args=arguments, daemon=True)
        self.close = weakref.finalize(self, stop_worker, self.jobs, self.closed, self.thread)

    def submit(self, label: str, size: int, function, *arguments, model=None) -> Transfer:
        """Call function(*arguments) on the thread, and return a Transfer of `size` bytes that gets its value.
        `model`: when it says that what was begun at a time has arrived; until then the thread sleeps."""
        transfer = Transfer(self.name, label, size)
        self.in_flight.append(transfer)
        self.jobs.put((transfer, model, function, arguments))
        if self.thread.ident is None:
            self.thread.start()
        self.reap_completed()
        return transfer

    @property
    def hangs(self) -> bool:
        return time.perf_counter() - self.began[0] > HANG_SECONDS


def run_jobs(jobs: queue.SimpleQueue, closed: threading.Event, began: list, wake, background: bool):
    """Do what a lane is given: its thread."""
    if background:      # take the processor only from who is idle, where threads have a priority of their own
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    free = 0.0          # when the lane is free, in the model
    while (job := jobs.get()) is not None:
        transfer, model, function, arguments = job
        start, error = max(transfer.issued, free), TransferError("cancelled")
        if not transfer.cancelled:
            transfer.start, began[0] = start, time.perf_counter()
            try:
                transfer.value, error = function(*arguments), None
            except Exception as raised:
                error = raised
            began[0], free = math.inf, time.perf_counter()
            if model and error is None:         # no model is faster than this memory
                free = max(free, model(start))
                closed.wait(max(0.0, free - time.perf_counter()))
        transfer.finish(start, max(start, free), error)
        transfer = function = arguments = model = job = error = None    # and what they hold
        wake()


def stop_worker(jobs: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread):
    """End a lane's thread: none may be inside PyTorch when the interpreter goes. What is modelled arrives."""
    closed.set()
    jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(HANG_SECONDS)


# 3. Blocks --------------------------------------------------------------------------------------------------

class BlockPairs:
    """Which blocks of two memories belong together: block to[i] of one is copied from block at[i]."""

    def __init__(self, to, at, apart=False):
        """`apart`: what is queued to compute after the first copy touches no block until that block's own
        copy has arrived; so it is enough, on one lane, that the first copy waits for what computes."""
        self.to, self.at, self.apart, self.ordered = to, at, apart, False
        self.runs, self.sides = runs(to, at), None  # `sides`: for a GPU (cuda_link.py)


def runs(to, at) -> list[tuple[int, int, int]]:
    """-> (to, at, count) of the blocks that are adjacent on both sides. Raises ValueError."""
    to, at = numpy.asarray(to), numpy.asarray(at)
    breaks = numpy.flatnonzero((numpy.diff(to) != 1) | (numpy.diff(at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    return [(int(to[first]), int(at[first]), end - first) for first, end in pairwise(edges) if end > first]


def paired(dst: list[torch.Tensor], src: list[torch.Tensor], pairs: BlockPairs | None):
    """Pair tensors of the same dtype and shape; with `pairs`, of any number of blocks. Raises ValueError."""
    first = 1 if pairs else 0
    sides = [[(piece.shape[first:], piece.dtype) for piece in side] for side in (dst, src)]
    if sides[0] != sides[1]:
        raise ValueError("the two sides differ in shape or dtype")
    return zip(dst, src)


def move(dst: list[torch.Tensor], src: list[torch.Tensor], pairs: BlockPairs | None):
    """Copy in ordinary memory with one core: NumPy takes no other, where torch would take all of them."""
    for pair in paired(dst, src, pairs):
        to, out_of = map(as_integers, pair)
        for first, at, count in pairs.runs if pairs else [(0, 0, len(to))]:
            numpy.copyto(to[first : first + count], out_of[at : at + count])


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """Return the same memory for NumPy, which knows no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()


def as_lists(*sides) -> list[list[torch.Tensor]]:
    return [[side] if isinstance(side, torch.Tensor) else list(side) for side in sides]


def written_part(dst: list[torch.Tensor], pairs: BlockPairs | None) -> list[torch.Tensor]:
    """-> as much of each as a copy writes."""
    return [to[: len(pairs.to)] for to in dst] if pairs else dst


def host_memory(shape, dtype, device, what: str) -> torch.Tensor:
    """Allocate on the host; for a GPU pinned: from pageable memory the driver copies, and the host waits."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            print(f"{what} cannot be pinned ({why}): copies take 5 to 8 times as long.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype)
