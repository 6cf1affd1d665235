"""The link of a machine without a GPU, and how fast it is by default.

Both memories are ordinary memory, and the link is a model, of one that takes each piece by itself: a thread
copies at once, and then sleeps until bandwidth and pieces say that the copy has arrived, so what is computed
meanwhile really overlaps. Everything printed about it says `modelled link`."""
import math
import time
from functools import partial

import torch

from common.link import Transfer, Worker, as_lists, move, written_part
from common.machine import machine_of
from shell import cli

# Seconds to project hidden states of Llama-2-7B on an A100, over seconds to move them: even at 24 GB/s
# (HCache, EuroSys '25, section 6.1), and the link has 32
A100 = 32 / 24
LATENCY = 10e-6     # seconds, of a transfer
PIECE = 1e-6        # of each of its pieces; batched, 4 to 8 KiB take 0.6 to 1.6 us (H100; vLLM, PR 42212)


class ModelledLink(Worker):
    """One direction of a link, with the verbs of `Link`."""

    measured_from, modelled, latency = 1 << 16, True, LATENCY
    backend = None              # there is one way to copy

    def __init__(self, name: str, clock, bandwidth, wake=lambda: None, background=False):
        """`bandwidth` in bytes/s, or a Bandwidth."""
        super().__init__(name, wake, background)
        self.clock = clock
        self.bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth

    def copy(self, dst, src, label: str, pairs=None) -> Transfer:
        dst, src = as_lists(dst, src)
        sides, runs = zip(written := written_part(dst, pairs), src), len(pairs.runs) if pairs else 1
        pieces = sum(count_pieces(to.shape, to.stride(), at.stride(), runs) for to, at in sides)
        size = sum(to.nbytes for to in written)
        model = partial(self.bandwidth.arrival, size=size, pieces=pieces)
        return self.submit(label, size, move, dst, src, pairs, model=model)

    def landing(self, shape, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def measure(self) -> float:
        return self.bandwidth.value

    def __str__(self):
        return str(self.bandwidth)


class Bandwidth:
    """The speed of a modelled link in bytes/s: one value, or one after the other, each for `seconds`, from
    time `began` on, again and again."""

    def __init__(self, *values: float, seconds: float = 0.1):
        self.values, self.seconds, self.began = values, seconds, time.perf_counter()

    @property
    def value(self) -> float:
        """The bandwidth of now."""
        return self.values[int((time.perf_counter() - self.began) // self.seconds) % len(self.values)]

    def arrival(self, start: float, size: int, pieces: int = 0) -> float:
        """Return when so many bytes and pieces have arrived that were on their way from `start` on."""
        at = start + LATENCY + pieces * PIECE
        slot = int((at - self.began) // self.seconds)
        while True:
            rate, end = self.values[slot % len(self.values)], self.began + (slot + 1) * self.seconds
            if len(self.values) == 1 or size <= rate * (end - at):
                return at + size / rate
            size, at, slot = size - rate * max(0.0, end - at), max(at, end), slot + 1

    def of(self, values):
        """-> a lane's model of reading so many arrays. Each is one piece in storage."""
        pieces = sum(count_pieces(value.shape, value.strides, run=value.itemsize) for value in values)
        return partial(self.arrival, size=sum(value.nbytes for value in values), pieces=pieces)

    def __str__(self):
        each = f", {self.seconds:.3g} s each" if len(self.values) > 1 else ""
        return f"modelled link, {':'.join(f'{value / 1e9:.3g}' for value in self.values)} GB/s{each}"


class LikeA100(Bandwidth):
    """As slow for this processor as PCIe 4 is for an A100: restoring a layer from hidden states takes,
    against their transfer, what it takes for Llama-2-7B there. That is measured once, beside prefill; and a
    prefill that is faster than all before raises the bandwidth with it."""

    began, seconds = 0.0, 1.0

    def __init__(self, model):
        self.machine = machine_of(model)
        self.row_bytes = model.config.hidden_size * model.dtype.itemsize    # of a layer's hidden states

    @property
    def values(self) -> list[float]:
        return [A100 * self.row_bytes * self.machine.fastest / self.machine.projecting]

    def __str__(self):
        return f"{super().__str__()}, as for an A100: restoring a layer takes {A100:.2f} times its transfer"


def speed(string: str) -> Bandwidth | None:
    """An argparse type: auto, GB/s, or several and how long each lasts: 0.1:2:0.5@0.1."""
    if string == "auto":
        return None
    number, (speeds, at, seconds) = cli.bounded(float, 1e-6, 1e6), string.partition("@")
    values = [1e9 * number(speed) for speed in speeds.split(":")]
    return Bandwidth(*values, seconds=number(seconds) if at else 0.1)


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
