"""The modelled link of a machine without a GPU, and its default speed.

Device memory and host memory are both ordinary memory here. A thread copies the data at once, and then sleeps
until the modelled bandwidth says that the copy has arrived. Computation really overlaps with that sleep. A
transfer's time depends on its bytes and on its number of contiguous pieces. All output about this link says
`modelled link`."""
import math
import time
from functools import partial
from weakref import WeakSet

import torch

from common.link import Transfer, as_lists
from shell import cli
from shell.machine import flops, projected_rows
from shell.workers import Worker, move

# Llama-2-7B on an A100: seconds to project hidden states, over seconds to transfer them. The two are equal at
# 24 GB/s (HCache, EuroSys '25, section 6.1), and the link has 32 GB/s.
A100 = 32 / 24
LATENCY = 10e-6     # seconds per transfer
# Seconds per contiguous piece; in a batch, 4 to 8 KiB take 0.6 to 1.6 us (H100; vLLM, PR 42212)
PIECE = 1e-6
FEW = 1e9           # operations; a pass of so few, which runs beside copies, waits for them anyway


class ModelledLink(Worker):
    """One direction of a modelled link, with the methods of `Link`."""

    measured_from, modelled, latency = 1 << 16, True, LATENCY
    backend = None              # there is only one way to copy

    def __init__(self, name: str, clock, bandwidth, wake=lambda: None, background=False):
        """`bandwidth`: bytes per second, or a Bandwidth. The rest: see Worker."""
        super().__init__(name, wake, background)
        self.clock = clock
        self.bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth

    def copy(self, dst, src, label: str, pairs=None) -> Transfer:
        dst, src = as_lists(dst, src)
        written = [to[: len(pairs.to)] for to in dst] if pairs else dst
        runs = len(pairs.runs) if pairs else 1
        pieces = sum(count_pieces(to.shape, to.stride(), at.stride(), runs) for to, at in zip(written, src))
        size = sum(to.nbytes for to in written)
        model = partial(self.bandwidth.arrival, size=size, pieces=pieces)
        return self.submit(label, size, move, dst, src, pairs, model=model)

    def landing(self, shape, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def speed(self) -> float:
        """-> bytes per second. This is hardware: its speed is not learned, and does not change."""
        return self.bandwidth.value

    def __str__(self):
        return str(self.bandwidth)


def leave_a_core(link: ModelledLink, model):
    """While `link` copies, let each forward pass of at most FEW operations use one thread less.

    After each matrix product, PyTorch's threads spin for a while. If there were one for each core, one of
    them would share its core with the copying thread, and every product would wait for this slow thread."""
    def leave(free: int):
        if free != model.cores_left:
            torch.set_num_threads(max(1, torch.get_num_threads() + model.cores_left - free))
            model.cores_left = free

    def before_first_layer(layer, given):
        copying = any(not transfer.ready for each in model.links for transfer in each.in_flight)
        leave(int(copying and flops(model.config, 0, len(given[0])) <= FEW))

    if not hasattr(model, "links"):     # one hook for all engines of this model
        model.links, model.cores_left = WeakSet(), 0
        model.layers[0].register_forward_pre_hook(before_first_layer)
        model.layers[-1].register_forward_hook(lambda *_: leave(0))  # what is measured next has all threads
    model.links.add(link)


class Bandwidth:
    """The speed of a modelled link, in bytes per second.

    Several values take turns, each for `seconds`, from time `began` (of time.perf_counter()) on."""

    def __init__(self, *values: float, seconds: float = 0.1):
        self.values, self.seconds, self.began = values, seconds, time.perf_counter()

    @property
    def value(self) -> float:
        """The bandwidth at this moment, in bytes per second."""
        return self.values[int((time.perf_counter() - self.began) // self.seconds) % len(self.values)]

    def arrival(self, start: float, size: int, pieces: int = 0) -> float:
        """Return when a transfer of `size` bytes in `pieces` arrives that begins at `start`."""
        at = start + LATENCY + pieces * PIECE
        slot = int((at - self.began) // self.seconds)
        while True:
            rate, end = self.values[slot % len(self.values)], self.began + (slot + 1) * self.seconds
            if len(self.values) == 1 or size <= rate * (end - at):
                return at + size / rate
            size, at, slot = size - rate * max(0.0, end - at), max(at, end), slot + 1

    def of(self, values):
        """Return a function of the start time: when a read of these arrays arrives.

        Each array is contiguous in storage."""
        pieces = sum(count_pieces(value.shape, value.strides, run=value.itemsize) for value in values)
        return partial(self.arrival, size=sum(value.nbytes for value in values), pieces=pieces)

    def __str__(self):
        each = f", {self.seconds:.3g} s each" if len(self.values) > 1 else ""
        return f"modelled link, {':'.join(f'{value / 1e9:.3g}' for value in self.values)} GB/s{each}"


class LikeA100(Bandwidth):
    """A link that is as slow for this processor as PCIe 4 is for an A100.

    Restoring a layer from its hidden states takes A100 times as long as their transfer, as for Llama-2-7B on
    an A100. The projection's processor time is measured once, on one thread, so that other processes do not
    change the result."""

    def __init__(self, model):
        row_bytes = model.config.hidden_size * model.dtype.itemsize   # hidden states of a token in a layer
        super().__init__(A100 * row_bytes * projected_rows(model))

    def __str__(self):
        return f"{super().__str__()}, as for an A100 (docs/reference.md, The modelled link)"


def speed(string: str) -> Bandwidth | None:
    """An argparse type: auto (None), GB/s, or several GB/s and the seconds of each, as in 0.1:2:0.5@0.1."""
    if string == "auto":
        return None
    number, (speeds, at, seconds) = cli.bounded(float, 1e-6, 1e6), string.partition("@")
    values = [1e9 * number(speed) for speed in speeds.split(":")]
    return Bandwidth(*values, seconds=number(seconds) if at else 0.1)


def count_pieces(shape: tuple, to: tuple, at: tuple = (), runs: int = 1, run: int = 1) -> int:
    """Count the pieces of a copy: runs of bytes that are contiguous on both sides.

    `shape`: of the copied tensor. `to`, `at`: strides of the two sides; without `at` that side is contiguous.
    `runs`: the number of runs of adjacent blocks along axis 0. `run`: the stride of one number."""
    at, count = at or [run * math.prod(shape[axis + 1 :]) for axis in range(len(shape))], 1
    for step, other, axis in sorted(zip(to, at, range(len(shape)))):    # from the innermost axis out
        if shape[axis] > 1 and step == other == run:    # contiguous on both sides
            apart = runs if axis == 0 else 1
            count, run = count * apart, run * shape[axis] if apart == 1 else 0
        else:
            count *= shape[axis]
    return count
