"""Modelled storage, for speeds that this machine's storage does not have (chapter 06)."""
from collections import OrderedDict
from contextlib import suppress

import numpy

from common.store import Storage
from shell.modelled_link import Bandwidth


class ModelledStorage(Storage):
    """A storage in ordinary memory that holds values of one size, at most `limit` bytes.

    A read takes as long as `bandwidth` says, and its thread sleeps for most of that time."""

    def __init__(self, limit: float, bandwidth: Bandwidth | float):
        bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
        super().__init__(None, bandwidth=bandwidth)
        self.limit, self.index = limit, OrderedDict()  # key -> value, the least recently used first

    def has(self, keys):
        return all(key in self.index for key in keys)

    def look_up(self, keys):
        for key in reversed(keys):
            with suppress(KeyError):  # another thread may have deleted it
                self.index.move_to_end(key)

    def read(self, keys, into):
        for key, array in zip(keys, into, strict=True):
            numpy.copyto(array, self.index[key])
        self.look_up(keys)

    def write(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.index[key] = value.copy()
            while len(self.index) * value.nbytes > self.limit:
                self.index.popitem(last=False)

    def __str__(self):
        return str(self.bandwidth).replace("link", "storage")
