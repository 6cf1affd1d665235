"""Copies of scattered blocks between a GPU and host memory.

There are two ways to copy. The copy engine takes no multiprocessors from the computation, but each call
copies only one contiguous piece and takes some 8 us. A kernel occupies multiprocessors, but reads and writes
pinned memory in place, in any order. Therefore the copy engine copies blocks that are adjacent on the host,
and a kernel copies scattered blocks. No host thread gathers them first. (HiCache calls the two `direct` and
`kernel`.)"""
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace

import torch

from common.link import INTEGERS, BlockPairs, runs
from common.llama import upload


class Side:
    """The blocks of one memory, prepared once for the copies of all layers."""

    def __init__(self, blocks):
        self.blocks, self.runs = blocks, runs(blocks, blocks)
        self.index = cache(partial(upload, blocks))     # device -> the blocks' numbers there
        first, _, count = self.runs[0] if self.runs else (0, 0, 0)
        self.slice = slice(first, first + count) if len(self.runs) == 1 else None   # if they are adjacent


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


def on_device(host: torch.Tensor) -> torch.Tensor:
    """Return pinned memory of integers as a tensor of the device, where it has the same address.

    A kernel that uses this tensor reads or writes over the link. The tensor keeps the memory alive; for a
    queued kernel, `Link.copy` does so."""
    form = host.numpy().__array_interface__
    return torch.as_tensor(SimpleNamespace(host=host, __cuda_array_interface__=form), device="cuda")


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
