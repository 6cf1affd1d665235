"""Key-value storage that several engines may share.

`Storage` stores values in a back end, which is files, Redis, or a class of your own. A value is a block, a
page, or a chunk of tokens.

A value consists of one or several parts, one after the other. Each part has its own checksums in front of it,
so any run of adjacent parts can be read alone:

    | checksums | part 0 | checksums | part 1 | ...

There is a checksum of 8 bytes for each 4 KiB of a part. The checksums of a part are padded to a multiple of
64 bytes. So the parts of a file begin at multiples of 64 bytes, and a processor copies them twice as fast."""

import math
from contextlib import suppress
from io import BytesIO
from itertools import chain
from typing import NamedTuple

import numpy

from common.link import Speed, Transfer

BACKLOG = 256  # jobs; a storage's writer gets no further ones while this many wait for it
ROW = 4096  # bytes that a checksum covers

# 1. Values -------------------------------------------------------------------------------------

class Stored(NamedTuple):
    """Where a value is stored."""

    storage: "Storage"
    key: bytes


class Parts(NamedTuple):
    """Adjacent parts of one value, to be read or written together."""

    arrays: numpy.ndarray  # [parts, ...]; to write parts of several sizes, a list of arrays
    start: int = 0  # where the first of them begins in the value, in bytes


# 2. Storage ------------------------------------------------------------------------------------

class Storage:
    """Values under keys, in a back end that several engines may share.

    One thread looks up keys, one reads, and one writes, so that the engine's thread does not wait for the
    back end. A back end is any object with three methods, which may raise any exception:

        exists(keys) -> list of bool        keys: strings of 64 hexadecimal digits
        get(keys) -> list of bytes or None
        set(keys, values)                   stores each value completely or not at all

    `exists` must also mark the keys as used, the last key first, so that the last block of a chain is deleted
    first. A back end need not verify values, because `Storage` puts checksums of key and contents in front
    of each part. For `has`, a back end also needs `index`: the keys that it stores, as far as this process
    knows. `exists` must update it. A back end may have a faster way to read than `get`, which brings whole
    values in memory of their own:

        get_into(keys, buffers, starts) -> iterable of bool

    It fills the list `buffers[i]` of NumPy arrays of bytes with the bytes of value `keys[i]` from `starts[i]`
    on, and says whether all of these bytes are there. If it is a generator, each value is verified right
    after its read, while the processor's cache has it.

    If a read fails, the keys whose values are missing or damaged are doubted; if the back end raises, all
    keys that are not verified are. Doubted keys count as not stored until they are written again, or until
    the back end itself says that it lacks them. While the storage is `silent`, no request may wait for it."""

    def __init__(self, backend, name: str = "storage", bandwidth=None):
        """`backend`: see above. `bandwidth`: of modelled storage that is slower than the back end
        (shell/modelled_link.py)."""
        self.backend, self.name, self.bandwidth = backend, name, bandwidth
        self.doubted: set[bytes] = set()  # keys whose latest read failed
        self.failing: set[str] = set()  # names of the methods whose latest call raised

    def open(self, lane, counts: dict, answered=None):
        """Make the threads.

        `lane(name, background, wake)`: makes one (shell/workers.py: Worker). `counts`: the engine's counters:
        failed reads, writes and lookups; values or runs of parts that were read, and their bytes. `answered`:
        called after each lookup."""
        self.counts = counts
        dict.update(counts, storage_errors=0, storage_reads=0, storage_bytes_read=0)
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

    def get(self, keys: list[bytes], into: list, label: str = "") -> Transfer:
        """Read values. `into`: for each value an array, or Parts for some of its parts.

        Returns: a Transfer, which fails if anything is missing or damaged. Then the arrays have any
        contents."""
        arrays = [parts_of(place).arrays for place in into]
        model = self.bandwidth and self.bandwidth.of([*chain(*arrays)])
        size = sum(array.nbytes for array in arrays)
        return self.reader.submit(label, size, self.track_errors, self.read, keys, into, model=model)

    def set(self, keys: list[bytes], values: list) -> Transfer:
        """Write the values that are not stored yet, each of which is an array or Parts.

        Returns: a Transfer. Its value: the keys now stored, without those whose write has failed."""
        size = sum(array.nbytes for value in values for array in parts_of(value).arrays)
        return self.writer.submit("write", size, self.track_errors, self.write, keys, values)

    @property
    def silent(self) -> bool:
        """Whether a lookup or read hangs, or the latest lookup or read has raised an error."""
        return bool(self.failing - {"write"}) or self.reader.hangs or self.asker.hangs

    @property
    def is_backlogged(self) -> bool:
        """Whether writing hangs, or too many jobs wait for the writer."""
        return self.writer.hangs or self.writer.jobs.qsize() >= BACKLOG

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

    def read(self, keys: list[bytes], into: list):
        """Read values. Raises Damaged if anything is missing or damaged."""
        wrong = set(keys)
        try:
            # Read straight into the arrays; into other memory only where a part is not contiguous
            arrays = [parts_of(place).arrays for place in into]  # [parts, ...]
            places = [each if each[0].flags.c_contiguous else each.copy() for each in arrays]
            rows = [place.reshape(len(place), -1).view(numpy.uint8) for place in places]  # [parts, bytes]
            sums = [numpy.empty((len(each), checksum_bytes(each.shape[1])), numpy.uint8) for each in rows]
            buffers = [[*chain(*zip(*each))] for each in zip(sums, rows)]
            fill = getattr(self.backend, "get_into", self.get_into)
            there = fill([key.hex() for key in keys], buffers, [parts_of(place).start for place in into])
            values = zip(keys, there, sums, rows, arrays, places, strict=True)
            for key, hit, known, own, array, place in values:
                if hit and checksums(key, own).tobytes() == known.tobytes():
                    wrong.discard(key)
                if array is not place:
                    numpy.copyto(array, place)
            self.counts["storage_reads"] += len(keys)
            self.counts["storage_bytes_read"] += sum(array.nbytes for array in arrays)
            if wrong:
                raise Damaged(f"{len(wrong)} of {len(keys)} values are missing or damaged")
        finally:
            self.doubted |= wrong

    def get_into(self, keys: list[str], buffers: list[list], starts: list[int]) -> list[bool]:
        """Fill buffers from whole values: for a back end that has no `get_into` of its own."""
        there = []
        for value, pieces, start in zip(self.backend.get(keys), buffers, starts, strict=True):
            stream = BytesIO(value or b"")
            stream.seek(start)
            there.append(all(stream.readinto(piece) == len(piece) for piece in pieces))
        return there

    def write(self, keys: list[bytes], values: list) -> list[bytes]:
        """Write the values that are not stored yet. Returns: the keys that are stored now."""
        absent, stored = {}, keys
        for key, value, there in zip(keys, values, self.look_up(keys), strict=True):
            if not there:
                parts = [numpy.ascontiguousarray(part).reshape(1, -1) for part in parts_of(value).arrays]
                absent[key.hex()] = b"".join(chain(*((checksums(key, part), part) for part in parts)))
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


def parts_of(value) -> Parts:
    """-> the value as Parts: an array is the only part of its value."""
    return value if isinstance(value, Parts) else Parts(value[None])


def checksum_bytes(size: int) -> int:
    """-> how many bytes the checksums of a part of `size` bytes take: a multiple of 64."""
    return 64 * math.ceil(size / (8 * ROW))


def checksums(key: bytes, parts: numpy.ndarray) -> numpy.ndarray:
    """-> the checksums of each part as 64-bit integers, [parts, n]. `parts`: [parts, numbers].

    CRC-32 of all bytes would take longer than to read them. So each row of 4 KiB is added up as 64-bit
    integers, together with the first 8 bytes of the key. A changed bit changes its row's sum. So does a
    sector that was not written. Rows in a wrong order change the order of the sums. This finds neither words
    in a wrong order within a row, nor a forgery. If a part is no multiple of 8 bytes, its bytes are added up,
    not 64-bit integers. One call adds up all parts of a value that a read brings, because a call for each
    part would take longer."""
    size = parts[0].nbytes
    words = parts.view(numpy.uint8 if size % 8 else numpy.uint64)
    starts = numpy.arange(0, words.shape[1], ROW // words.itemsize)
    sums = numpy.zeros((len(parts), checksum_bytes(size) // 8), numpy.uint64)
    numpy.add.reduceat(words, starts, axis=1, dtype=numpy.uint64, out=sums[:, : len(starts)])
    sums += int.from_bytes(key[:8], "little")
    return sums
