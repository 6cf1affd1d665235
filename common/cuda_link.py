"""The link of a GPU: one stream per direction, pinned memory, events.

There are two ways to copy. The copy engine takes no multiprocessors from the computation, but each call
copies only one contiguous piece and takes some 8 us. A kernel occupies multiprocessors, but reads and writes
pinned memory in place, in any order. Therefore the copy engine copies blocks that are adjacent on the host,
and a kernel copies scattered blocks. No host thread gathers them first. (HiCache calls the two `direct` and
`kernel`.)"""
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
    """A transfer that starts and ends with events on the lane's stream. Queued GPU work always completes, so
    `wait` ignores its timeout."""

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
    """One direction of the link between a GPU and host memory."""

    measured_from = 1 << 16     # bytes
    modelled, hangs = False, False

    def __init__(self, name: str, clock):
        super().__init__(name)
        self.clock, self.stream = clock, limited_stream()
        self.close = weakref.finalize(self, self.stream.synchronize)    # no copy is in flight afterwards
        self.backend = None         # "direct" (the copy engine) or "kernel"; None: see `by_kernel`

    def copy(self, dst, src, label: str, pairs: BlockPairs | None = None) -> Transfer:
        """Copy a tensor, or each tensor of a list, to one of the same shape. With `pairs`, copy src[at] to
        dst[to] of each."""
        dst, src = as_lists(dst, src)
        transfer = CudaTransfer(self.name, label, sum(to.nbytes for to in written_part(dst, pairs)))
        transfer.clock = self.clock
        transfer.host = [side for side in (*dst, *src) if not side.is_cuda]     # keep it alive for kernels
        before = self.in_flight[-1] if self.in_flight else None
        if not (pairs and pairs.ordered):
            self.stream.wait_stream(torch.cuda.current_stream())    # after all work that is queued now
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
        """Allocate device memory for a copy to write to. It belongs to the lane's stream, so that the copy
        need not wait for the computation."""
        with torch.cuda.stream(self.stream):
            made = torch.empty(shape, dtype=dtype, device=self.clock.device)
        made.record_stream(torch.cuda.current_stream())     # this stream will read it
        return made

    def measure(self) -> float:
        """Measure bandwidth and latency. Returns: bytes per second."""
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        sides = (host, device) if self.name == "save" else (device, host)
        for size in 1, 1, len(host), len(host):     # the first copy of each size is slower
            began = time.perf_counter()
            self.copy(*(side[:size] for side in sides), "measurement").wait()
            self.latency = time.perf_counter() - began if size == 1 else self.latency
        self.reap_completed()
        return self.measured.value

    def __str__(self):
        return f"link, {self.speed() / 1e9:.1f} GB/s"


# 2. Blocks --------------------------------------------------------------------------------------------------

class Side:
    """The blocks of one memory, prepared once for the copies of all layers."""

    def __init__(self, blocks):
        self.blocks, self.runs, self.uploaded = blocks, runs(blocks, blocks), None
        first, _, count = self.runs[0] if self.runs else (0, 0, 0)
        self.slice = slice(first, first + count) if len(self.runs) == 1 else None   # if they are adjacent

    def index(self, device) -> torch.Tensor:
        """-> the blocks' numbers on the device."""
        if self.uploaded is None:
            self.uploaded = upload(self.blocks, device)
        return self.uploaded


def queue_blocks(to: torch.Tensor, out_of: torch.Tensor, pairs: BlockPairs, backend: str | None):
    """Queue a copy of blocks on the current stream.

    Blocks that are not adjacent on the device go through a temporary tensor there. `backend`: "direct",
    "kernel", or None to let `by_kernel` choose."""
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
        for there, here in adjacent(host, piece, theirs):     # if it is not pinned, the host waits
            here.copy_(there, non_blocking=True) if inward else there.copy_(here, non_blocking=True)
    elif inward:
        torch.index_select(on_device(host), 0, theirs.index(device.device), out=piece)
    else:
        on_device(host).index_copy_(0, theirs.index(device.device), piece)
    if inward and not mine.slice:
        device.index_copy_(0, mine.index(device.device), piece)


def by_kernel(host: torch.Tensor, side: Side, backend: str | None) -> bool:
    """-> whether a kernel copies the blocks. It can only if the host memory is pinned. Without a `backend`,
    it does so if the blocks are not one contiguous run."""
    if backend == "direct" or not host.is_pinned():
        return False
    return backend == "kernel" or not (side.slice and host[side.slice].is_contiguous())


def adjacent(host: torch.Tensor, device: torch.Tensor, side: Side):
    """Yield (host view, device view) pairs; each pair is one copy.

    A run that is not pinned is yielded as a whole, because PyTorch copies it through pinned memory anyway."""
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
    """Pinned host memory that PyTorch accepts as device memory; it has the same address there."""

    def __init__(self, host: torch.Tensor):
        self.host = host        # keeps the memory alive for the view; `Link.copy` does so for a queued kernel
        self.__cuda_array_interface__ = host.numpy().__array_interface__


def on_device(host: torch.Tensor) -> torch.Tensor:
    """Return pinned memory of integers as a tensor of the device.

    A kernel that uses this tensor reads or writes over the link."""
    return torch.as_tensor(OnDevice(host), device="cuda")


def alike(*sides: torch.Tensor) -> list[torch.Tensor]:
    """-> each side as integers, of 8 bytes if the shapes allow it, because kernels move these faster."""
    with suppress(RuntimeError):
        return [side.view(torch.int64) for side in sides]
    return [side.view(INTEGERS[side.itemsize]) for side in sides]


def limited_stream(processors: int = 8):
    """Create a stream whose kernels use at most `processors` multiprocessors. The computation keeps the
    others.

    PyTorch can divide a GPU like this only in some versions (2.11 cannot). Elsewhere, return an ordinary
    stream."""
    with suppress(Exception):
        context = torch.cuda.green_contexts.GreenContext.create(num_sms=processors)
        stream = context.Stream()
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")
        stream.synchronize()
        stream.context = context        # keep it alive as long as the stream
        return stream
    return torch.cuda.Stream()
