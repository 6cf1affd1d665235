"""The link: copies between device memory and host memory, beside the computation.

    link = Link("load", clock, 2e9)                    # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    link.copy(dst, src, "layer 1", Places(to, at))     # blocks: dst[to] = src[at]

With CUDA a lane is a stream. A copy begins only after everything that was queued to compute when it was
issued: so a load cannot overwrite what queued work still reads, and a copy out sees what queued work still
writes. That is the first half of the contract; the second is the caller's (`Cache.hold`): no memory of a
transfer may be used for anything else before `ready`. Two things can copy. The copy engine takes nothing from
what computes, and one piece a call, of some 8 us. A kernel takes some of the processors, and reads and writes
pinned memory where it lies, in any order. So the engine copies blocks that are adjacent on the host, a kernel
scattered ones, and no thread of the host puts them together (HiCache's `direct` and `kernel`).

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
from functools import cached_property
from itertools import pairwise

import numpy
import torch

from common.llama import upload
from common.speed import Speed

LATENCY = 10e-6     # seconds, of a modelled transfer
PIECE = 1e-6        # of each of its pieces; batched, 4 to 8 KiB take 0.6 to 1.6 us (H100; vLLM, PR 42212)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # by their bytes
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


class Places:
    """Which blocks of two memories belong together: block to[i] of one is copied from block at[i]."""

    def __init__(self, to, at, apart=False):
        """`apart`: nothing that is queued to compute after the first copy touches these blocks, so that what
        orders the first copy orders them all."""
        self.to, self.at, self.apart, self.ordered = to, at, apart, False
        self.runs = runs(to, at)

    @cached_property
    def sides(self) -> "tuple[Side, Side]":
        return Side(self.to), Side(self.at)


class Side:
    """The blocks of one memory, for a GPU: computed once for all layers."""

    def __init__(self, blocks):
        self.blocks, self.runs, self.uploaded = blocks, runs(blocks, blocks), None
        first, _, count = self.runs[0]
        self.slice = slice(first, first + count) if len(self.runs) == 1 else None   # if they are adjacent

    def index(self, device) -> torch.Tensor:
        """-> the blocks' numbers on the device, uploaded by the lane's stream."""
        if self.uploaded is None:
            self.uploaded = upload(self.blocks, device)
        return self.uploaded


def runs(to, at) -> list[tuple[int, int, int]]:
    """-> (to, at, count) of the blocks that are adjacent on both sides. Raises ValueError."""
    to, at = numpy.asarray(to), numpy.asarray(at)
    breaks = numpy.flatnonzero((numpy.diff(to) != 1) | (numpy.diff(at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    return [(int(to[first]), int(at[first]), end - first) for first, end in pairwise(edges) if end > first]


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
        shown, runs = ([to[: len(places.to)] for to in dst], len(places.runs)) if places else (dst, 1)
        size = sum(to.nbytes for to in shown)
        if not self.modelled:
            return self.queue(dst, src, label, size, places)
        pieces = sum(count_pieces(to.shape, to.stride(), at.stride(), runs) for to, at in zip(shown, src))
        return self.submit(label, size, move, dst, src, places, pieces=pieces, bandwidth=self.bandwidth)

    def landing(self, shape, dtype) -> torch.Tensor:
        """Allocate device memory to copy to. On a GPU in the order of the lane: no copy waits to get it."""
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
        transfer.host = [side for side in (*dst, *src) if not side.is_cuda]     # a kernel's use keeps nothing
        before = self.on_their_way[-1] if self.on_their_way else None
        if not (places and places.ordered):
            self.stream.wait_stream(torch.cuda.current_stream())    # behind what is queued to compute now
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark() if before is None or before.ready else before.end
            try:
                for pair in paired(dst, src, places):
                    self.queue_pair(*pair, places)
            except (RuntimeError, ValueError) as refused:
                transfer.error = refused
            transfer.end = self.clock.mark()
        if places:
            places.ordered = places.apart
        self.on_their_way.append(transfer)
        self.settle()
        return transfer

    def queue_pair(self, to: torch.Tensor, out_of: torch.Tensor, places: Places | None):
        """Queue a tensor; of blocks those that are adjacent on the device, or else a copy beside them."""
        inward = to.is_cuda
        device, host = alike(to, out_of) if inward else alike(out_of, to)
        device.record_stream(self.stream)
        if places is None:
            return to.copy_(out_of, non_blocking=True)
        mine, theirs = places.sides if inward else places.sides[::-1]
        piece = device[mine.slice] if mine.slice else None
        if piece is None and inward:
            piece = device.new_empty((len(mine.blocks), *device.shape[1:]))
        elif piece is None:
            piece = device.index_select(0, mine.index(device.device))
        if not self.by_kernel(host, theirs):
            for there, here in adjacent(host, piece, theirs):       # the host waits for what is not pinned
                here.copy_(there, non_blocking=True) if inward else there.copy_(here, non_blocking=True)
        elif inward:
            torch.index_select(on_device(host), 0, theirs.index(device.device), out=piece)
        else:
            on_device(host).index_copy_(0, theirs.index(device.device), piece)
        if inward and not mine.slice:
            device.index_copy_(0, mine.index(device.device), piece)

    def by_kernel(self, host: torch.Tensor, side: Side) -> bool:
        if self.backend == "direct" or not host.is_pinned():
            return False
        return self.backend == "kernel" or not (side.slice and host[side.slice].is_contiguous())

    def speed(self) -> float:
        """Return bytes/s: of the last transfers, or else of the model, or of a measurement."""
        self.settle()
        if self.measured.passes:
            return self.measured.value
        return self.bandwidth.value if self.modelled else self.measure()

    def seconds(self, size: int, transfers: int = 1) -> float:
        """Estimate the seconds until `size` bytes would be there, behind what is queued now."""
        return transfers * self.latency + (self.settle() + size) / self.speed()

    def measure(self, interrupt=lambda: None) -> float:
        """Forget what was noted, measure again, and return bytes/s. `interrupt` may raise."""
        self.settle()
        self.measured.forget()
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


def paired(dst: list[torch.Tensor], src: list[torch.Tensor], places: Places | None):
    """Pair tensors of the same dtype and shape; with `places`, of any number of blocks. Raises ValueError."""
    first = 1 if places else 0
    sides = [[(piece.shape[first:], piece.dtype) for piece in side] for side in (dst, src)]
    if sides[0] != sides[1]:
        raise ValueError("the two sides differ in shape or dtype")
    return zip(dst, src)


def move(dst: list[torch.Tensor], src: list[torch.Tensor], places: Places | None):
    """Copy in ordinary memory with one core: NumPy takes no other, where torch would take all of them."""
    for pair in paired(dst, src, places):
        to, out_of = map(as_integers, pair)
        for first, at, count in places.runs if places else [(0, 0, len(to))]:
            numpy.copyto(to[first : first + count], out_of[at : at + count])


def adjacent(host: torch.Tensor, device: torch.Tensor, side: Side):
    """Yield pairs of views, of blocks of the host and of what belongs to them one after the other on the device,
    such that each view of the host is one piece."""
    def split(piece, there):
        if piece.is_contiguous():
            yield piece, there
        else:
            for pair in zip(piece, there):
                yield from split(*pair)

    done = 0
    for first, _, count in side.runs:
        yield from split(host[first : first + count], device[done : done + count])
        done += count


class OnDevice:
    """Shows pinned memory to PyTorch as the device's own: it has the same address there."""

    def __init__(self, host: torch.Tensor):
        self.host, size = host, host.itemsize           # as long as PyTorch has the view
        strides = tuple(size * step for step in host.stride())
        described = dict(shape=tuple(host.shape), strides=strides, typestr=f"<i{size}", version=3)
        self.__cuda_array_interface__ = dict(described, data=(host.data_ptr(), False))


def on_device(host: torch.Tensor) -> torch.Tensor:
    """-> pinned memory of integers, as a tensor of the device; kernels go over the link for it."""
    return torch.as_tensor(OnDevice(host), device="cuda")


def alike(device: torch.Tensor, host: torch.Tensor) -> list[torch.Tensor]:
    """View both as integers, of 8 bytes if their shapes allow that: kernels move these faster."""
    with suppress(RuntimeError):
        return [side.view(torch.int64) for side in (device, host)]
    return [side.view(INTEGERS[side.itemsize]) for side in (device, host)]


def stream_of_few(processors: int = 8):
    """-> a stream whose kernels leave the other processors of a GPU to who computes, where PyTorch can divide
    one (2.11 cannot); any stream elsewhere."""
    with suppress(AttributeError, RuntimeError, TypeError):
        context = torch.cuda.green_contexts.GreenContext.create(num_sms=processors)
        stream = context.Stream()
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")
        stream.synchronize()
        stream.context = context        # lives as long
        return stream
    return torch.cuda.Stream()


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """Return the same memory for NumPy, which knows no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()


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


