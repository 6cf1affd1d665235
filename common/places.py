"""Blocks that are copied: which ones, and how, between ordinary memories and between a GPU and its host.

On a GPU two things can copy. The copy engine takes nothing from what computes, and one piece a call, which
takes some 8 us. A kernel takes multiprocessors, and reads and writes pinned memory where it lies, in any
order. So the engine copies blocks that are adjacent on the host, a kernel scattered ones, and no thread of
the host puts them together (HiCache's `direct` and `kernel`)."""
from contextlib import suppress
from functools import cached_property
from itertools import pairwise

import numpy
import torch

from common.llama import upload

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # by their bytes


class Places:
    """Which blocks of two memories belong together: block to[i] of one is copied from block at[i]."""

    def __init__(self, to, at, apart=False):
        """`apart`: what is queued to compute after the first copy touches no block until that block's own
        copy has arrived; so it is enough, on one lane, that the first copy waits for what computes."""
        self.to, self.at, self.apart, self.ordered = to, at, apart, False
        self.runs = runs(to, at)

    @cached_property
    def sides(self) -> "tuple[Side, Side]":
        return Side(self.to), Side(self.at)


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


def runs(to, at) -> list[tuple[int, int, int]]:
    """-> (to, at, count) of the blocks that are adjacent on both sides. Raises ValueError."""
    to, at = numpy.asarray(to), numpy.asarray(at)
    breaks = numpy.flatnonzero((numpy.diff(to) != 1) | (numpy.diff(at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    return [(int(to[first]), int(at[first]), end - first) for first, end in pairwise(edges) if end > first]


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


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """Return the same memory for NumPy, which knows no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()


# On a GPU ---------------------------------------------------------------------------------------------------

def queue_blocks(to: torch.Tensor, out_of: torch.Tensor, places: Places, backend: str | None):
    """Queue a copy of blocks on the current stream; if they are not adjacent on the device, by way of a
    temporary there. `backend`: direct or kernel; None: see `by_kernel`."""
    inward = to.is_cuda
    device, host = alike(to, out_of) if inward else alike(out_of, to)
    mine, theirs = places.sides if inward else places.sides[::-1]
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


def stream_of_few(processors: int = 8):
    """-> a stream whose kernels leave a GPU's other processors to what computes, where PyTorch can divide one
    (2.11 cannot); any stream elsewhere."""
    with suppress(AttributeError, RuntimeError, TypeError):
        context = torch.cuda.green_contexts.GreenContext.create(num_sms=processors)
        stream = context.Stream()
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")
        stream.synchronize()
        stream.context = context        # as long as the stream
        return stream
    return torch.cuda.Stream()
