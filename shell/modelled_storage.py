"""Modelled speeds: what `--link`, `--storage` of chapter 06 and `--storage-bandwidth` of 07 ask for."""
import time
from collections import OrderedDict
from contextlib import suppress

import numpy

from common import link as links
from common.store import Storage
from shell import cli


def bandwidth(string: str) -> links.Bandwidth | None:
    """An argparse type: auto, GB/s, or several and how long each lasts: 0.1:2:0.5@0.1."""
    if string == "auto":
        return None
    number, (speeds, at, seconds) = cli.bounded(float, 1e-6, 1e6), string.partition("@")
    values = [1e9 * number(speed) for speed in speeds.split(":")]
    if len(values) == 1:
        return links.Bandwidth(values[0])
    return Trace(values, number(seconds) if at else 0.1)


class Trace(links.Bandwidth):
    """One bandwidth after the other, each for `seconds`, from time `began` on, again and again."""

    def __init__(self, values: list[float], seconds: float):
        self.values, self.seconds, self.began = values, seconds, time.perf_counter()

    @property
    def value(self) -> float:
        """The bandwidth of now."""
        return self.values[self.slot(time.perf_counter()) % len(self.values)]

    def slot(self, at: float) -> int:
        return int((at - self.began) // self.seconds)

    def arrival(self, start: float, size: int, pieces: int = 0) -> float:
        at = start + links.LATENCY + pieces * links.PIECE
        slot = self.slot(at)
        while True:
            rate, end = self.values[slot % len(self.values)], self.began + (slot + 1) * self.seconds
            if size <= rate * (end - at):
                return at + size / rate
            size, at, slot = size - rate * max(0.0, end - at), max(at, end), slot + 1

    def __str__(self):
        values = ":".join(f"{value / 1e9:.3g}" for value in self.values)
        return f"modelled link, {values} GB/s, {self.seconds:.3g} s each"


class ModelledStorage(Storage):
    """At most `limit` bytes of values of one size, in ordinary memory. Reading takes as long as `bandwidth`
    says, and no processor."""

    def __init__(self, limit: float, bandwidth: links.Bandwidth | float):
        bandwidth = links.Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
        super().__init__(None, bandwidth=bandwidth)
        self.limit, self.index = limit, OrderedDict()  # key -> value, least recently used first

    def has(self, keys):
        return all(key in self.index for key in keys)

    def look_up(self, keys):
        for key in reversed(keys):
            with suppress(KeyError):  # another thread has deleted it
                self.index.move_to_end(key)

    def read(self, keys, into):
        for key, place in zip(keys, into, strict=True):
            numpy.copyto(place, self.index[key])
        self.look_up(keys)

    def write(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.index[key] = value.copy()
            while len(self.index) * value.nbytes > self.limit:
                self.index.popitem(last=False)

    def __str__(self):
        return str(self.bandwidth).replace("link", "storage")
