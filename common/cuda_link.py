"""The link of a GPU: a stream for each direction, pinned memory, events.

Two things can copy. The copy engine takes nothing from what computes, and one piece a call, which takes some
8 us. A kernel takes multiprocessors, and reads and writes pinned memory where it lies, in any order. So the
engine copies blocks that are adjacent on the host, a kernel scattered ones, and no thread of the host puts
them together (HiCache's `direct` and `kernel`)."""
import time
import weakref
from contextlib import suppress

import torch

from common.link import (
    INTEGERS,
    BlockPairs,
    Lane,
    Transfer,
    as_lists,
    host_memory,
    paired,
    runs,
    written_part,
)
from common.llama import upload

# 1. Transfers and the link ----------------------------------------------------------------------------------

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


class Link(Lane):
    """One direction of a GPU's link."""

    measured_from = 1 << 16     # bytes
    modelled, hangs = False, False

    def __init__(self, name: str, clock):
        super().__init__(name)
        self.clock, self.stream = clock, limited_stream()
        self.close = weakref.finalize(self, self.stream.synchronize)    # nothing is on its way then
        self.backend = None         # "direct" (the copy engine) or "kernel"; None: by the rule of places.py

    def copy(self, dst, src, label: str, pairs: BlockPairs | None = None) -> Transfer:
        """Copy a tensor, or each of a list, to one like it; with `pairs`, src[at] to dst[to] of each."""
        dst, src = as_lists(dst, src)
        transfer = CudaTransfer(self.name, label, sum(to.nbytes for to in written_part(dst, pairs)))
        transfer.clock = self.clock
        transfer.host = [side for side in (*dst, *src) if not side.is_cuda]     # no kernel keeps it
        before = self.in_flight[-1] if self.in_flight else None
        if not (pairs and pairs.ordered):
            self.stream.wait_stream(torch.cuda.current_stream())    # behind what is queued to compute now
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark() if before is None or before.ready else before.end
            try:
                for to, out_of in paired(dst, src, pairs):
                    (to if to.is_cuda else out_of).record_stream(self.stream)
                    if pairs:
                        queue_blocks(to, out_of, pairs, self.backend)
                    else:
                        to.copy_(out_of, non_blocking=True)
            except Exception as refused:
                transfer.error = refused
            transfer.end = self.clock.mark()
        if pairs:
            pairs.ordered = pairs.apart
        self.in_flight.append(transfer)
        self.reap_completed()
        return transfer

    def landing(self, shape, dtype) -> torch.Tensor:
        """Allocate device memory to copy to. It is the lane's: no copy to it waits for what computes."""
        with torch.cuda.stream(self.stream):
            made = torch.empty(shape, dtype=dtype, device=self.clock.device)
        made.record_stream(torch.cuda.current_stream())     # which will read it
        return made

    def measure(self) -> float:
        """Measure, and return bytes/s."""
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        sides = (host, device) if self.name == "save" else (device, host)
        for size in 1, 1, len(host), len(host):     # the first of each is slower
            began = time.perf_counter()
            self.copy(*(side[:size] for side in sides), "measurement").wait()
            self.latency = time.perf_counter() - began if size == 1 else self.latency
        self.reap_completed()
        return self.measured.value

    def __str__(self):
        return f"link, {self.speed() / 1e9:.1f} GB/s"


# 2. Blocks --------------------------------------------------------------------------------------------------

class Side:
    """The blocks of one memory, for a GPU: computed once for all layers."""

    def __init__(self, blocks):
        self.blocks, self.runs, self.uploaded = blocks, runs(blocks, blocks), None
        first, _, count = self.runs[0] if self.runs else (0, 0, 0)
        self.slice = slice(first, first + count) if len(self.runs) == 1 else None   # if they are adjacent

    def index(self, device) -> torch.Tensor:
        """-> the blocks' numbers on the device, uploaded by the lane's stream."""
        if self.uploaded is None:
            self.uploaded = upload(self.blocks, device)
        return self.uploaded


def queue_blocks(to: torch.Tensor, out_of: torch.Tensor, pairs: BlockPairs, backend: str | None):
    """Queue a copy of blocks on the current stream; if they are not adjacent on the device, by way of a
    temporary there. `backend`: direct or kernel; None: see `by_kernel`."""
    inward = to.is_cuda
    device, host = alike(to, out_of) if inward else alike(out_of, to)
    pairs.sides = pairs.sides or (Side(pairs.to), Side(pairs.at))
    mine, theirs = pairs.sides if inward else pairs.sides[::-1]
    if mine.slice:
        piece = device[mine.slice]
    elif inward:
        piece = device.new_empty((len(mine.blocks), *device.shape[1:]))
    else:
        piece = device.index_select(0, mine.index(device.device))
    if not by_kernel(host, theirs, backend):
        for there, here in adjacent(host, piece, theirs):     # the host waits for what is not pinned
            here.copy_(there, non_blocking=True) if inward else there.copy_(here, non_blocking=True)
    elif inward:
        torch.index_select(on_device(host), 0, theirs.index(device.device), out=piece)
    else:
        on_device(host).index_copy_(0, theirs.index(device.device), piece)
    if inward and not mine.slice:
        device.index_copy_(0, mine.index(device.device), piece)


def by_kernel(host: torch.Tensor, side: Side, backend: str | None) -> bool:
    """Whether a kernel copies: what is pinned, and not one run in contiguous memory."""
    if backend == "direct" or not host.is_pinned():
        return False
    return backend == "kernel" or not (side.slice and host[side.slice].is_contiguous())


def adjacent(host: torch.Tensor, device: torch.Tensor, side: Side):
    """Yield pairs of views, of the host's blocks and of what belongs to them on the device: a copy each. A
    run that is not pinned comes whole, since PyTorch stages it."""
    def split(there, here):
        if there.is_contiguous() or not there.is_pinned():
            yield there, here
        else:
            for pair in zip(there, here):
                yield from split(*pair)

    done = 0
    for first, _, count in side.runs:
        yield from split(host[first : first + count], device[done : done + count])
        done += count


class OnDevice:
    """Shows pinned memory to PyTorch as the device's own: it has the same address there."""

    def __init__(self, host: torch.Tensor):
        self.host = host        # for the view; for a queued kernel `Link.copy` keeps it
        self.__cuda_array_interface__ = host.numpy().__array_interface__


def on_device(host: torch.Tensor) -> torch.Tensor:
    """-> pinned memory of integers, as a tensor of the device; a kernel that uses it goes over the link."""
    return torch.as_tensor(OnDevice(host), device="cuda")


def alike(*sides: torch.Tensor) -> list[torch.Tensor]:
    """View both as integers, of 8 bytes if their shapes allow that: kernels move these faster."""
    with suppress(RuntimeError):
        return [side.view(torch.int64) for side in sides]
    return [side.view(INTEGERS[side.itemsize]) for side in sides]


def limited_stream(processors: int = 8):
    """-> a stream whose kernels leave a GPU's other processors to what computes, where PyTorch can divide one
    (2.11 cannot); any stream elsewhere."""
    with suppress(Exception):
        context = torch.cuda.green_contexts.GreenContext.create(num_sms=processors)
        stream = context.Stream()
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")
        stream.synchronize()
        stream.context = context        # as long as the stream
        return stream
    return torch.cuda.Stream()
