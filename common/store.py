"""Key-value storage that several engines may share.

`Storage` stores values in a back end, which is files, Redis, or a class of your own. `StoredChunks` spreads
blocks (04, 05) or chunks of 64 tokens (06) over several Storages. Each block or chunk has a key, and consists
of parts; each part is one value."""

import hashlib
import math
import zlib
from collections import Counter
from contextlib import suppress
from itertools import cycle
from typing import NamedTuple

import numpy

from common.link import Speed, Transfer

BACKLOG = 256  # jobs; a storage's writer gets no further ones while this many wait for it

# 1. Chunks -------------------------------------------------------------------------------------

class Stored(NamedTuple):
    """Where a block (04, 05) or a chunk (06) is stored: the storage, and the keys of its parts."""

    storage: "Storage"
    keys: list[bytes]


class StoredChunks:
    """Blocks or chunks that are spread over several Storages. The back end of each must have an `index` of
    its keys, so that `find` need not ask the back end."""

    def __init__(self, *storages: "Storage"):
        self.storages, self.turn = storages, cycle(storages)  # round-robin

    def open(self, lane, engine):
        """Prepare all storages; `lane`: see Storage.open. A finished lookup interrupts a pass that waits for
        a copy, because a queued request may need its answer (`ask`)."""
        arrivals, wake = engine.arrivals, engine.wake  # the threads must not reference the engine
        for storage in self.storages:
            storage.open(lane, engine.counts, lambda: (arrivals.append((None, None)), wake.set()))

    def keys(self, key: bytes, parts: int) -> list[bytes]:
        """-> a key of 32 bytes for each part of the chunk `key`."""
        return [key[:30] + part.to_bytes(2, "little") for part in range(parts)]

    def find(self, key: bytes, parts: int = 1) -> Stored | None:
        """-> where all parts of the chunk `key` are stored, or None."""
        keys = self.keys(key, parts)
        return next((Stored(storage, keys) for storage in self.storages if storage.has(keys)), None)

    def read(self, chunks: list[Stored], into: list[numpy.ndarray], part=0, label="") -> list[Transfer]:
        """Read one part of each chunk in the background, from all storages in parallel.

        `into`: one array for each chunk. Returns: one Transfer per storage."""
        reads = {}  # storage -> keys, places
        for chunk, array in zip(chunks, into, strict=True):
            keys, arrays = reads.setdefault(chunk.storage, ([], []))
            keys.append(chunk.keys[part])
            arrays.append(array)
        return [storage.get(*read, label or f"part {part}") for storage, read in reads.items()]

    def ask(self, keys: list[bytes], parts: int = 1) -> list[Transfer]:
        """Look up the chunks that no `index` has, because another process may have stored them since. After
        that, `find` finds them."""
        unknown = [part for key in keys if not self.find(key, parts) for part in self.keys(key, parts)]
        shared = [storage for storage in self.storages if storage.backend and not storage.silent]
        return [storage.exists(unknown) for storage in shared if unknown]

    def write(self, key: bytes, parts: list[numpy.ndarray]) -> Transfer | None:
        """Write a chunk in the background.

        Returns: a Transfer, or None if all storages are backlogged."""
        free = [storage for storage in (next(self.turn), *self.storages) if not storage.is_backlogged]
        return free[0].set(self.keys(key, len(parts)), parts) if free else None

    def use(self, keys: list[bytes], parts: int = 1):
        """Mark the stored keys of a chain as used. Its last block will be deleted first."""
        for storage in self.storages:
            storage.use([part for key in keys for part in self.keys(key, parts)])

    def seconds(self, chunks: list[Stored], size: int) -> float:
        """-> estimated seconds to read these chunks, of `size` bytes each."""
        counts = Counter(chunk.storage for chunk in chunks)
        return max((storage.seconds(count * size) for storage, count in counts.items()), default=0.0)

    def speed(self) -> float:
        """-> bytes per second, of all storages together."""
        return sum(storage.speed() for storage in self.storages)

    def close(self):
        for storage in self.storages:
            storage.close()

    def __str__(self):
        return ", ".join(map(str, self.storages))


# 2. Storage ------------------------------------------------------------------------------------

class Storage:
    """Values under keys, in a back end that several engines may share.

    One thread looks up keys, one reads, and one writes, so that the engine's thread does not wait for the
    back end. A back end is any object with three methods, which may raise any exception:

        exists(keys) -> list of bool        keys: strings of 64 hexadecimal digits
        get(keys) -> list of bytes or None
        set(keys, values)                   stores each value completely or not at all

    `exists` must also mark the keys as used, the last key first, so that the last block of a chain is deleted
    first. A back end need not verify values, because `Storage` puts a checksum of key and contents in front
    of each value. For `has`, a back end also needs `index`: the keys that it stores, as far as this process
    knows. `exists` must update it.

    If a read fails, the keys whose values are missing or damaged are doubted; if the back end raises, all
    keys of the read are. Doubted keys count as not stored until they are written again, or until the back end
    itself says that it lacks them. While the storage is `silent`, no request may wait for it."""

    def __init__(self, backend, name: str = "storage", bandwidth=None):
        """`backend`: see above. `bandwidth`: of modelled storage that is slower than the back end
        (shell/modelled_link.py)."""
        self.backend, self.name, self.bandwidth = backend, name, bandwidth
        self.doubted: set[bytes] = set()  # keys whose latest read failed
        self.failing: set[str] = set()  # names of the methods whose latest call raised

    def open(self, lane, counts: dict, answered=None):
        """Make the threads.

        `lane(name, background, wake)`: makes one (shell/workers.py: Worker). `counts`: the engine's counters;
        "storage_errors" counts failed reads, writes and lookups. `answered`: called after each lookup."""
        self.counts, counts["storage_errors"] = counts, 0
        self.reader, self.writer = lane("storage"), lane("save", background=True)
        self.asker = lane("ask", wake=answered) if answered else lane("ask")  # does not wait for long reads

    def exists(self, keys: list[bytes]) -> Transfer:
        """Look up keys, and mark them as used.

        Returns: a Transfer. Its value has a bool for each key, which is True if the key can be read."""
        return self.asker.submit("exists", 0, self.track_errors, self.look_up, keys)

    def use(self, keys: list[bytes]):
        """Mark keys as used. The writer does this after all queued writes, so those keys are stored first."""
        if keys and not self.is_backlogged:
            self.writer.submit("use", 0, self.track_errors, self.look_up, keys)

    def has(self, keys: list[bytes]) -> bool:
        """-> whether all keys are in the back end's `index`, none of them is doubted, and reading does not
        hang."""
        known = self.backend.index
        return not self.reader.hangs and all(key.hex() in known and key not in self.doubted for key in keys)

    def get(self, keys: list[bytes], into: list[numpy.ndarray], label: str = "") -> Transfer:
        """Read values into arrays. Returns: a Transfer, which fails if any value is missing or damaged."""
        size, model = sum(array.nbytes for array in into), self.bandwidth and self.bandwidth.of(into)
        return self.reader.submit(label, size, self.track_errors, self.read, keys, into, model=model)

    def set(self, keys: list[bytes], values: list[numpy.ndarray]) -> Transfer:
        """Write the values that are not stored yet.

        Returns: a Transfer. Its value: the keys now stored, without those whose write has failed."""
        size = sum(value.nbytes for value in values)
        return self.writer.submit("write", size, self.track_errors, self.write, keys, values)

    @property
    def silent(self) -> bool:
        """Whether a lookup or read hangs, or the latest lookup or read has raised an error."""
        return bool(self.failing - {"write"}) or self.reader.hangs or self.asker.hangs

    @property
    def is_backlogged(self) -> bool:
        """Whether writing hangs, or too many jobs wait for the writer."""
        return self.writer.hangs or self.writer.jobs.qsize() >= BACKLOG

    def measure(self, size: int, count: int = 1) -> Transfer:
        """Measure the read bandwidth: write `count` test values of `size` bytes, and read them. If the back
        end has a method `uncache(keys)`, call it before the read, so that memory
        does not answer for the disk. Returns: the Transfer of the read."""
        keys = [hashlib.sha256(b"measure %d %d" % (size, number)).digest() for number in range(count)]
        contents = [numpy.arange(size).astype(numpy.uint8)] * count
        self.reader.submit("measure", 0, self.track_errors, self.write, keys, contents)
        uncache = getattr(self.backend, "uncache", lambda keys: None)
        self.reader.submit("measure", 0, uncache, [key.hex() for key in keys])
        self.reader.measured.samples.clear()
        return self.get(keys, contents, "measure")

    @property
    def measured(self) -> Speed:
        """The speed of the latest reads."""
        self.reader.reap_completed()
        return self.reader.measured

    def speed(self) -> float:
        """-> bytes per second. Before the first read, the modelled bandwidth or a guess."""
        if math.isfinite(speed := self.measured.value):
            return speed
        return self.bandwidth.value if self.bandwidth else 1e9

    def seconds(self, size: int) -> float:
        """Estimate the seconds until `size` bytes would be read, after all queued reads. Returns: 0.0 before
        the first read."""
        return (self.reader.reap_completed() + size) / self.measured.value

    # On the workers' threads

    def track_errors(self, function, *arguments):
        """Call `function` on a worker's thread, and record whether it raises."""
        try:
            value = function(*arguments)
            self.failing.discard(function.__name__)
            return value
        except Exception as error:
            self.counts["storage_errors"] += 1
            (self.failing.discard if isinstance(error, Damaged) else self.failing.add)(function.__name__)
            raise

    def look_up(self, keys: list[bytes]) -> list[bool]:
        """-> whether each key is stored and not doubted. Marks the keys as used. Drops doubts about keys that
        the back end lacks."""
        there = dict(zip(keys, self.backend.exists([key.hex() for key in keys]), strict=True))
        self.doubted.difference_update(key for key in keys if not there[key])
        return [there[key] and key not in self.doubted for key in keys]

    def read(self, keys: list[bytes], into: list[numpy.ndarray]):
        """Read values into arrays. Raises Damaged if a value is missing or damaged."""
        wrong = set(keys)
        try:
            values = self.backend.get([key.hex() for key in keys])
            for key, value, array in zip(keys, values, into, strict=True):
                contents = memoryview(value or b"")[4:]
                if len(contents) == array.nbytes and checksum(key, contents) == bytes(value[:4]):
                    numpy.copyto(array, numpy.frombuffer(contents, array.dtype).reshape(array.shape))
                    wrong.discard(key)
            if wrong:
                raise Damaged(f"{len(wrong)} of {len(keys)} values are missing or damaged")
        finally:
            self.doubted |= wrong

    def write(self, keys: list[bytes], values: list[numpy.ndarray]) -> list[bytes]:
        """Write the values that are not stored yet. Returns: the keys that are stored now."""
        absent, stored = {}, keys
        for key, value, there in zip(keys, values, self.look_up(keys), strict=True):
            if not there:
                value = numpy.ascontiguousarray(value)
                absent[key.hex()] = b"".join([checksum(key, value), value])
        try:
            self.backend.set([*absent], [*absent.values()])
            self.doubted.difference_update(keys)
        except Exception:  # some keys may be stored all the same
            self.counts["storage_errors"] += 1
            stored = [key for key, there in zip(keys, self.look_up(keys)) if there]
        return stored

    def close(self):
        for lane in self.reader, self.writer, self.asker:
            lane.close()
        with suppress(Exception):
            getattr(self.backend, "close", lambda: None)()

    def __str__(self):
        return self.name


class Damaged(Exception):
    """A stored value is missing or damaged."""


def checksum(key: bytes, contents) -> bytes:
    """-> 4 bytes, CRC-32 of key and contents."""
    return zlib.crc32(contents, zlib.crc32(key)).to_bytes(4, "little")
