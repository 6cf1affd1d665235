"""The link: copies between device memory and host memory, beside the computation.

    link = Link("load", clock, 2e9)                    # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    link.copy(dst, src, "layer 1", Places(to, at))     # blocks: dst[to] = src[at], see places.py

With CUDA a lane is a stream. A copy begins only after everything that was queued to compute when it was
issued (or the first copy of the same `Places`, see there): so a load cannot overwrite what queued work still
reads, and a copy out sees what queued work still writes. That is the first half of the contract; the second
is the caller's (`Cache.hold`): no memory of a transfer may be used for anything else before `ready`.

Without CUDA both memories are ordinary memory, and the link is a model, of one that takes each piece by
itself: a thread copies at once, and then sleeps until bandwidth and pieces say that the copy has arrived, so
what is computed meanwhile really overlaps. Everything printed about it says `modelled link`."""
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

import torch

from common.places import Places, as_integers, move, paired, queue_blocks, stream_of_few  # noqa: F401
from common.speed import Speed

LATENCY = 10e-6     # seconds, of a modelled transfer
PIECE = 1e-6        # of each of its pieces; batched, 4 to 8 KiB take 0.6 to 1.6 us (H100; vLLM, PR 42212)
HANGING = 1.0       # seconds after which a job hangs: its lane is given nothing that somebody waits for


class TransferError(Exception):
    """A copy that failed, or that came too late."""


# 1. Transfers -----------------------------------------------------------------------------------------------

class Transfer:
    """Something on its way: a copy over a link, or whatever else ends on another thread by `finish`."""

    def __init__(self, lane: str, label: str, size: int = 0, pieces: int = 0):
        self.lane, self.label, self.bytes, self.pieces = lane, label, size, pieces
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

class Lane:
    """A thread that does one thing after the other. Where a bandwidth is modelled, it then sleeps until the
    model says that what it has copied has arrived. A hung job ends with the process."""

    measured_from = 1           # bytes: smaller transfers do not say how fast the lane is

    def __init__(self, name: str, wake=lambda: None, background=False, stream=None):
        """`background`: nobody waits for what this does. `stream`: of a GPU, to be empty at the end."""
        self.name, self.wake = name, wake
        self.on_their_way: deque[Transfer] = deque()
        self.measured = Speed(math.inf)     # bytes/s, of the last transfers
        self.forgot = -math.inf             # when `measured` was; what was issued before is not noted
        self.jobs, self.closed = queue.SimpleQueue(), threading.Event()
        self.began = [math.inf]             # when what it does now did; infinite while it does nothing
        arguments = self.jobs, self.closed, self.began, wake, background   # not the lane: it may be forgotten
        self.thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.close = weakref.finalize(self, end, self.jobs, self.closed, self.thread, stream)

    def submit(self, label: str, size: int, function, *arguments, pieces=0, bandwidth=None) -> Transfer:
        """Call function(*arguments) on the thread, and return a Transfer that gets its value. With a
        `bandwidth` it takes as long as `size` bytes in so many pieces would."""
        transfer = Transfer(self.name, label, size, pieces)
        self.on_their_way.append(transfer)
        self.jobs.put((transfer, bandwidth, function, arguments))
        if self.thread.ident is None:
            self.thread.start()
        self.settle()
        return transfer

    @property
    def hangs(self) -> bool:
        return time.perf_counter() - self.began[0] > HANGING

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


def work(jobs: queue.SimpleQueue, closed: threading.Event, began: list, wake, background: bool):
    """Do what a lane is given: its thread."""
    if background:      # take the processor only from who is idle, where threads have a priority of their own
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    free = 0.0          # when the lane is free, in the model
    while (job := jobs.get()) is not None:
        transfer, bandwidth, function, arguments = job
        start, error = max(transfer.issued, free), TransferError("cancelled")
        if not transfer.cancelled:
            transfer.start, began[0] = start, time.perf_counter()
            try:
                transfer.value, error = function(*arguments), None
            except Exception as raised:
                error = raised
            began[0], free = math.inf, time.perf_counter()
            if bandwidth and error is None:     # no model is faster than this memory
                free = max(free, bandwidth.arrival(start, transfer.bytes, transfer.pieces))
                closed.wait(max(0.0, free - time.perf_counter()))
        transfer.finish(start, max(start, free), error)
        transfer = function = arguments = job = error = None    # and what they hold
        wake()


def end(jobs: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread, stream):
    """End a lane's thread: none may be inside PyTorch when the interpreter goes. What is modelled arrives."""
    if stream is not None:
        stream.synchronize()
    closed.set()
    jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(HANGING)


def count_pieces(shape: tuple, to: tuple, at: tuple = (), runs: int = 1, run: int = 1) -> int:
    """-> runs of bytes that are adjacent on both sides of a copy. `to`, `at`: strides of the sides; without
    `at` that side is one piece. `runs`: of adjacent blocks, along axis 0. `run`: the stride of a number."""
    at, count = at or [run * math.prod(shape[axis + 1 :]) for axis in range(len(shape))], 1
    for step, other, axis in sorted(zip(to, at, range(len(shape)))):    # from the innermost axis out
        if shape[axis] > 1 and step == other == run:    # both sides go on where the run ends
            apart = runs if axis == 0 else 1
            count, run = count * apart, run * shape[axis] if apart == 1 else 0
        else:
            count *= shape[axis]
    return count


class Link(Lane):
    """One direction of the link. `bandwidth`, in bytes/s or a Bandwidth, is the model's without a GPU."""

    measured_from = 1 << 16

    def __init__(self, name: str, clock, bandwidth=None, wake=lambda: None, background=False):
        self.clock, self.modelled = clock, clock.device.type != "cuda"
        self.backend = None         # of a GPU: "direct" (the copy engine) or "kernel"; None: by the rule
        self.stream = None if self.modelled else stream_of_few()
        super().__init__(name, wake, background, self.stream)
        self.bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
        self.latency = LATENCY      # seconds of a transfer of no bytes

    def copy(self, dst, src, label: str, places: Places | None = None) -> Transfer:
        """Copy a tensor, or each of a list, to one like it; with `places`, src[at] to dst[to] of each."""
        dst, src = ([side] if isinstance(side, torch.Tensor) else list(side) for side in (dst, src))
        shown, count = ([to[: len(places.to)] for to in dst], len(places.runs)) if places else (dst, 1)
        size = sum(to.nbytes for to in shown)
        if not self.modelled:
            return self.queue(dst, src, label, size, places)
        pieces = sum(count_pieces(to.shape, to.stride(), at.stride(), count) for to, at in zip(shown, src))
        return self.submit(label, size, move, dst, src, places, pieces=pieces, bandwidth=self.bandwidth)

    def landing(self, shape, dtype) -> torch.Tensor:
        """Allocate device memory to copy to. A GPU's is the lane's: no copy to it waits for what computes."""
        if self.modelled:
            return torch.empty(shape, dtype=dtype)
        with torch.cuda.stream(self.stream):
            made = torch.empty(shape, dtype=dtype, device=self.clock.device)
        made.record_stream(torch.cuda.current_stream())     # which will read it
        return made

    def queue(self, dst: list, src: list, label: str, size: int, places: Places | None) -> CudaTransfer:
        """Queue a copy on the lane's stream."""
        transfer = CudaTransfer(self.name, label, size)
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

    def speed(self) -> float:
        """Return bytes/s: of the last transfers, or else of the model, or of a measurement."""
        self.settle()
        if self.measured.passes:
            return self.measured.value
        return self.bandwidth.value if self.modelled else self.measure()

    def seconds(self, size: int, transfers: int = 1) -> float:
        """Estimate the seconds until `size` bytes would be there, behind what is queued now."""
        return transfers * self.latency + (self.settle() + size) / self.speed()

    def probe(self, size: int) -> Transfer:
        """Copy about so many bytes, enough to be noted and 1 MiB at most, from nowhere to nowhere."""
        size = min(max(size, self.measured_from), 1 << 20)
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=not self.modelled)
        device = torch.zeros(size, dtype=torch.uint8, device=self.clock.device)
        return self.copy(*((host, device) if self.name == "save" else (device, host)), "probe")

    def measure(self, interrupt=lambda: None) -> float:
        """Forget what was noted, measure again, and return bytes/s. `interrupt` may raise."""
        self.forget()
        if self.modelled:
            return self.bandwidth.measure(interrupt)
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        sides = (host, device) if self.name == "save" else (device, host)
        for size in 1, 1, len(host), len(host):     # the first of each is slower
            began = time.perf_counter()
            self.copy(*(side[:size] for side in sides), "measurement").wait()
            self.latency = time.perf_counter() - began if size == 1 else self.latency
        return self.speed()

    def __str__(self):
        return str(self.bandwidth) if self.modelled else f"link, {self.speed() / 1e9:.1f} GB/s"


def host_memory(shape, dtype, device, what: str) -> torch.Tensor:
    """Allocate on the host; for a GPU pinned: from pageable memory the driver copies, and the host waits."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            print(f"{what} cannot be pinned ({why}): copies take 5 to 8 times as long.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype)


# 3. How fast the modelled link is ---------------------------------------------------------------------------

class Bandwidth:
    """The speed of a modelled link, in bytes/s: as given."""

    def __init__(self, value: float):
        self.value = float(value)

    def arrival(self, start: float, size: int, pieces: int = 0) -> float:
        """Return when so many bytes and pieces have arrived that were on their way from `start` on."""
        return start + LATENCY + pieces * PIECE + size / self.value

    def measure(self, interrupt=lambda: None) -> float:
        return self.value

    def __str__(self):
        return f"modelled link, {self.value / 1e9:.3g} GB/s"


