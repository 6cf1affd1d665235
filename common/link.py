"""Copies between device memory and host memory, which overlap with computation.

    link = Link("load", clock)                         # in cuda_link.py; one per direction; copies in order
    transfer = link.copy(dst, src, "layer 0")          # returns at once, and never raises
    link.copy(dst, src, "layer 1", BlockPairs(to, at)) # copy blocks: dst[to] = src[at]

A copy starts only after the device has completed all work that was queued before the copy. Therefore a load
cannot overwrite blocks that earlier work still reads, and a save copies the values that earlier work writes.
If several copies use one `BlockPairs` object with `apart=True`, only the first waits for this work, and the
others come after it.

The caller must not reuse the memory that a transfer reads or writes before the transfer is `ready`.
`Cache.hold` keeps the blocks referenced until then.

`Link`, in cuda_link.py, is for a GPU. Without a GPU, use `ModelledLink` in shell/modelled_link.py. It has the
same methods and the same contract."""
import math
import sys
import threading
import time
from collections import deque
from itertools import pairwise

import numpy
import torch

NUM_SAMPLES = 8     # the latest samples of a speed
FRESH_SECONDS = 60.0    # older samples do not count
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}     # bytes -> dtype

# 1. Transfers -----------------------------------------------------------------------------------------------

class TransferError(Exception):
    """A copy failed, or did not complete in time."""


class Transfer:
    """A copy over a link, or a job of a worker thread, that completes later. The worker thread calls
    `finish`; a CudaTransfer has CUDA events instead."""

    def __init__(self, lane: str, label: str, size: int = 0):
        """`lane`: name of its link or worker. `label`: for the timeline and messages. `size`: bytes."""
        self.lane, self.label, self.bytes = lane, label, size
        self.issued, self.start, self.end, self.error = time.perf_counter(), None, None, None
        self.completed, self.cancelled, self.value = threading.Event(), False, None

    def cancel(self):
        """Make the transfer fail, unless it has started. Call this only if its result is no longer needed."""
        self.cancelled |= self.start is None

    @property
    def ready(self) -> bool:
        """Whether the transfer has completed or failed. A ready transfer writes nothing any more."""
        return self.completed.is_set()

    def finish(self, start: float, end: float, error: Exception | None = None):
        """Complete the transfer, or fail it with `error`. Times are time.perf_counter()."""
        self.start, self.end, self.error = start, end, error
        self.completed.set()

    def wait(self, seconds: float | None = None):
        """Block until it is complete. Raises TransferError if it fails, or is not complete after
        `seconds`."""
        if not self.completed.wait(seconds):
            raise TransferError(f"{self.label} is late")
        self.check()

    def check(self):
        """Raise TransferError if it has failed."""
        if self.error is not None:
            raise TransferError(f"{self.label} failed ({self.error})")

    def queue_wait(self) -> bool:
        """Make the device's next work wait for this transfer, if the device can (a GPU).

        Returns: True if so. False: the caller must wait until the transfer is `ready`."""
        return False

    def span(self) -> tuple[float, float]:
        """-> start and end, in seconds of time.perf_counter(). Call it only if the transfer is ready."""
        return self.start, self.end


# 2. Lanes ---------------------------------------------------------------------------------------------------

class Speed:
    """The speed of one kind of work, in units per second.

    It is the fastest of the last NUM_SAMPLES samples that are younger than FRESH_SECONDS, because noise only
    ever makes a sample slower. `unmeasured` is the speed if there is no such sample."""

    def __init__(self, unmeasured: float):
        self.unmeasured, self.samples = unmeasured, deque(maxlen=NUM_SAMPLES)   # (time, units per second)

    def record(self, units: float, seconds: float):
        """Add a sample: `units` of work took `seconds`."""
        self.samples.append((time.perf_counter(), units / seconds))

    @property
    def value(self) -> float:
        """The speed, in units per second."""
        while self.samples and self.samples[0][0] < time.perf_counter() - FRESH_SECONDS:
            self.samples.popleft()
        return max((speed for _, speed in self.samples), default=self.unmeasured)


class Lane:
    """A queue of transfers that are executed one after the other. Links and worker threads are lanes."""

    measured_from = 1           # bytes; smaller transfers are too short to measure a speed
    latency = 0.0               # seconds of a transfer of 0 bytes

    def __init__(self, name: str):
        self.name = name
        self.in_flight: deque[Transfer] = deque()
        self.measured = Speed(math.inf)     # bytes per second of the latest transfers

    def reap_completed(self) -> int:
        """Forget completed transfers, and record their speed. Returns: the bytes of the transfers still in
        flight."""
        while self.in_flight and self.in_flight[0].ready:
            transfer = self.in_flight.popleft()
            (start, end), counts = transfer.span(), transfer.bytes >= self.measured_from
            if counts and transfer.error is None and end > start:
                self.measured.record(transfer.bytes, end - start)
        return sum(transfer.bytes for transfer in self.in_flight if not transfer.cancelled)

    def speed(self) -> float:
        """-> bytes per second. Measures the lane if there is no sample."""
        self.reap_completed()
        return self.measured.value if self.measured.value < math.inf else self.measure()

    def seconds(self, size: int, transfers: int = 1) -> float:
        """-> estimated seconds until `size` more bytes would arrive, after all transfers in flight."""
        return transfers * self.latency + (self.reap_completed() + size) / self.speed()


# 3. Blocks --------------------------------------------------------------------------------------------------

class BlockPairs:
    """Which blocks to copy: block at[i] of the source goes to block to[i] of the destination."""

    def __init__(self, to, at, apart=False):
        """`to`, `at`: block numbers. `apart`: the caller promises to make one copy per layer, and to use
        no layer's blocks until that layer's copy is complete. So work that is queued after the
        first copy does not touch the blocks of the later ones, and these need not wait for it."""
        self.to, self.at, self.apart, self.ordered = to, at, apart, False
        self.runs, self.sides = runs(to, at), None  # `sides`: set by shell/copy_kernels.py


def runs(to, at) -> list[tuple[int, int, int]]:
    """Group pairs whose blocks are adjacent on both sides.

    `to` and `at` must have the same length. Returns: (to, at, count) of each group."""
    to, at = numpy.asarray(to), numpy.asarray(at)
    breaks = numpy.flatnonzero((numpy.diff(to) != 1) | (numpy.diff(at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    return [(int(to[first]), int(at[first]), end - first) for first, end in pairwise(edges) if end > first]


def paired(dst: list[torch.Tensor], src: list[torch.Tensor], pairs: BlockPairs | None):
    """Zip `dst` and `src`. If `pairs` is given, the first dimensions of their tensors may differ.

    Raises ValueError if other dimensions, dtypes or the numbers of tensors differ."""
    first = 1 if pairs else 0
    sides = [[(piece.shape[first:], piece.dtype) for piece in side] for side in (dst, src)]
    if sides[0] != sides[1]:
        raise ValueError("the two sides differ in shape or dtype")
    return zip(dst, src)


def as_lists(*sides) -> list[list[torch.Tensor]]:
    """-> each side as a list of tensors."""
    return [[side] if isinstance(side, torch.Tensor) else list(side) for side in sides]


def host_memory(shape, dtype, device, what: str) -> torch.Tensor:
    """Allocate host memory. If `device` is a GPU, the memory is pinned: copies from memory that is not pinned
    go through a buffer of the driver, and block the host.

    `what`: names the memory in the message that is printed if pinning fails. Returns: a tensor."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            print(f"{what} cannot be pinned ({why}): copies take 5 to 8 times as long.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype)
