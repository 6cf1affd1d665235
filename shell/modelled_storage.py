"""The storage of chapter 06 that this machine does not have."""
from collections import OrderedDict
from contextlib import suppress

import numpy

from common.store import Storage
from shell.modelled_link import Bandwidth


class ModelledStorage(Storage):
    """At most `limit` bytes of values of one size, in ordinary memory. Reading takes as long as `bandwidth`
    says, and no processor."""

    def __init__(self, limit: float, bandwidth: Bandwidth | float):
        bandwidth = Bandwidth(bandwidth) if isinstance(bandwidth, (int, float)) else bandwidth
        super().__init__(None, bandwidth=bandwidth)
        self.limit, self.index = limit, OrderedDict()  # key -> value, least recently used first

    def has(self, keys):
        return all(key in self.index for key in keys)

    def look_up(self, keys):
        for key in reversed(keys):
            with suppress(KeyError):  # another thread has deleted it
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
