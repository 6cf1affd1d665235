"""The link: copies between device memory and host memory, beside the computation.

    link = Link("load", clock, 2e9)                    # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    transfer.ready                                     # over, well or not: nothing is written any more
    transfer.error                                     # None, or why it failed
    transfer.span()                                    # start and end in seconds, once it is ready

With CUDA a lane is a stream. A copy begins only after everything that was queued to compute when it was
issued: so a load cannot overwrite what queued work still reads, and a copy out sees what queued work still
writes. That is the first half of the contract; the second is the caller's: no memory of a transfer may be
used for anything else before `ready`.

Without CUDA both memories are ordinary memory, and the link is a model: a thread copies at once, and then
sleeps until the modelled bandwidth says that the copy has arrived. Sleeping takes no processor time, so what
is computed meanwhile really overlaps. Everything printed about it says `modelled link`."""
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

import numpy
import torch

from common.speed import Speed

LATENCY = 10e-6     # seconds, of a modelled transfer
HANGING = 1.0       # seconds after which a job hangs: its lane is given nothing that somebody waits for


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
        self.cancelled = True

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


class CudaTransfer(Transfer):
    """`start` and `end` are events on the lane's stream; an error is one of issuing the copy."""

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

    def __init__(self, name: str, wake=lambda: None, background=False):
        """`wake` is called when something is over. `background`: nobody waits for what this does."""
        self.name, self.wake = name, wake
        self.on_their_way: deque[Transfer] = deque()
        self.measured = Speed(math.inf)     # bytes/s, of the last transfers
        self.jobs, self.closed = queue.SimpleQueue(), threading.Event()
        self.began = [math.inf]             # when what it does now did; infinite while it does nothing
        arguments = self.jobs, self.closed, self.began, wake, background   # not the lane: it may be forgotten
        self.thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.close = weakref.finalize(self, end, self.jobs, self.closed, self.thread)

    def submit(self, label: str, size: int, function, *arguments, bandwidth=None) -> Transfer:
        """Call function(*arguments) on the thread, and return a Transfer that gets its value. With a
        `bandwidth` it takes as long as `size` bytes would."""
        transfer = Transfer(self.name, label, size)
        self.on_their_way.append(transfer)
        self.jobs.put((transfer, bandwidth, function, arguments))
        if self.thread.ident is None:
            self.thread.start()
        self.settle()
        return transfer

    @property
    def hangs(self) -> bool:
        return time.perf_counter() - self.began[0] > HANGING

    def settle(self) -> int:
        """Forget what is over, note how fast it was, and return the bytes that are on their way."""
        while self.on_their_way and self.on_their_way[0].ready:
            transfer = self.on_their_way.popleft()
            start, end = transfer.span()
            if transfer.error is None and transfer.bytes >= self.measured_from and end > start:
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
            began[0] = time.perf_counter()
            try:
                transfer.value, error = function(*arguments), None
            except Exception as raised:
                error = raised
            began[0], free = math.inf, time.perf_counter()
            if bandwidth and error is None:     # no model is faster than this memory
                free = max(free, bandwidth.arrival(start, transfer.bytes))
                closed.wait(max(0.0, free - time.perf_counter()))
        transfer.finish(start, max(start, free), error)
        transfer = function = arguments = job = error = None    # and what they hold
        wake()


def end(jobs: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread):
    """End the thread of a lane; what the model has on its way arrives at once. No thread may be inside
    PyTorch when the interpreter goes."""
    closed.set()
    jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(HANGING)


class Link(Lane):
    """One direction of the link. `bandwidth`, in bytes/s or a Bandwidth, is the model's without a GPU."""

    measured_from = 1 << 16

    def __init__(self, name: str, clock, bandwidth=None, wake=lambda: None, background=False):
        super().__init__(name, wake, background)
        self.clock, self.modelled = clock, clock.device.type != "cuda"
        self.bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
        self.stream = None if self.modelled else torch.cuda.Stream()

    def copy(self, dst, src, label: str) -> Transfer:
        """Copy tensor `src` to `dst`, or a list of tensors to a list of the same shapes."""
        dst = [dst] if isinstance(dst, torch.Tensor) else list(dst)
        src = [src] if isinstance(src, torch.Tensor) else list(src)
        size = sum(piece.nbytes for piece in dst)
        if self.modelled:
            return self.submit(label, size, move, dst, src, bandwidth=self.bandwidth)
        transfer = CudaTransfer(self.name, label, size)
        transfer.clock = self.clock
        self.stream.wait_stream(torch.cuda.current_stream())   # behind what is queued to compute now
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark()
            try:
                for to, out_of in paired(dst, src):
                    host_side = to if out_of.is_cuda else out_of
                    for piece, source in contiguous_on_host(to, out_of, host_side):
                        piece.copy_(source, non_blocking=True)
            except (RuntimeError, ValueError) as refused:
                transfer.error = refused
            transfer.end = self.clock.mark()
        self.on_their_way.append(transfer)
        self.settle()
        return transfer

    def speed(self) -> float:
        """Return bytes/s: of the last transfers, or else of the model, or of a measurement."""
        self.settle()
        if self.measured.passes:
            return self.measured.value
        return self.bandwidth.value if self.modelled else self.measure()

    def seconds(self, size: int) -> float:
        """Estimate the seconds until `size` bytes would be there, behind what is queued now."""
        return LATENCY + (self.settle() + size) / self.speed()

    def measure(self, interrupt=lambda: None) -> float:
        """Forget what was noted, measure again, and return bytes/s. `interrupt` may raise."""
        self.settle()
        self.measured.forget()
        if self.modelled:
            return self.bandwidth.measure(interrupt)
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        for _ in range(3):
            self.copy(*((host, device) if self.name == "save" else (device, host)), "measurement").wait()
        return self.speed()

    def __str__(self):
        return str(self.bandwidth) if self.modelled else f"link, {self.speed() / 1e9:.1f} GB/s"


def paired(dst: list[torch.Tensor], src: list[torch.Tensor]):
    """Pair tensors of the same shape and dtype. Raises ValueError."""
    if [(piece.shape, piece.dtype) for piece in dst] != [(piece.shape, piece.dtype) for piece in src]:
        raise ValueError("the two sides differ in shape or dtype")
    return zip(dst, src)


def move(dst: list[torch.Tensor], src: list[torch.Tensor]):
    """Copy in ordinary memory with one core: NumPy takes no other, where torch would take all of them."""
    for to, out_of in paired(dst, src):
        numpy.copyto(as_integers(to), as_integers(out_of))


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """Return the same memory for NumPy, which knows no bfloat16."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.itemsize]).numpy()


def contiguous_on_host(dst: torch.Tensor, src: torch.Tensor, host_side: torch.Tensor):
    """Yield the largest pairs that are contiguous on the host's side. The device gathers strided memory by
    itself, but on the host that would be done first, and in pageable memory."""
    if host_side.is_contiguous():
        yield dst, src
    else:
        for triple in zip(dst, src, host_side, strict=True):
            yield from contiguous_on_host(*triple)


def host_memory(shape, dtype, device, what: str) -> torch.Tensor:
    """Allocate on the host; pinned where `device` is a GPU, so that it copies beside the computation."""
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

    def arrival(self, start: float, size: int) -> float:
        """Return when so many bytes have arrived that were on their way from `start` on."""
        return start + LATENCY + size / self.value

    def measure(self, interrupt=lambda: None) -> float:
        return self.value

    def __str__(self):
        return f"modelled link, {self.value / 1e9:.3g} GB/s"


