"""Values under keys, which many engines may share. `Storage` keeps them behind a back end: files, Redis, or a
class of your own. `StoredChunks` keeps a block (04, 05) or 64 tokens (06) under a key, a value a part."""

import hashlib
import zlib
from collections import Counter
from contextlib import suppress
from itertools import cycle
from typing import NamedTuple

import numpy

from common.link import Speed, Transfer, Worker

BACKLOG = 256  # jobs that wait for a storage's writer; further ones are not kept there

# 1. Chunks -------------------------------------------------------------------------------------

class Stored(NamedTuple):
    """Where a block (04, 05) or a chunk (06) is: keys of its parts."""

    storage: "Storage"
    keys: list[bytes]


class StoredChunks:
    """Blocks or chunks in Storages, each of which knows what it has without asking its back end."""

    def __init__(self, *storages: "Storage"):
        self.storages, self.turn = storages, cycle(storages)  # round-robin

    def open(self, wake):
        for storage in self.storages:
            storage.open(wake)

    def keys(self, key: bytes, parts: int) -> list[bytes]:
        return [key[:30] + part.to_bytes(2, "little") for part in range(parts)]

    def find(self, key: bytes, parts: int = 1) -> Stored | None:
        keys = self.keys(key, parts)
        return next((Stored(storage, keys) for storage in self.storages if storage.has(keys)), None)

    def read(self, chunks: list[Stored], into: list[numpy.ndarray], part=0, label="") -> list[Transfer]:
        """Read a part of each, in the background, the storages in parallel -> a Transfer each."""
        reads = {}  # storage -> keys, places
        for chunk, array in zip(chunks, into, strict=True):
            keys, arrays = reads.setdefault(chunk.storage, ([], []))
            keys.append(chunk.keys[part])
            arrays.append(array)
        return [storage.get(*read, label or f"part {part}") for storage, read in reads.items()]

    def write(self, key: bytes, parts: list[numpy.ndarray]) -> Transfer | None:
        """Keep a chunk, in the background -> a Transfer; None if it is there, or all storages fall behind."""
        if not self.find(key, len(parts)):
            free = [storage for storage in (next(self.turn), *self.storages) if not storage.is_backlogged]
            return free[0].set(self.keys(key, len(parts)), parts) if free else None

    def use(self, keys: list[bytes], parts: int = 1):
        """Use a chain, as far as it is there: its end is deleted first."""
        for storage in self.storages:
            storage.use([part for key in keys for part in self.keys(key, parts)])

    def seconds(self, chunks: list[Stored], size: int) -> float:
        """Estimate until all, of `size` bytes each, have been read."""
        counts = Counter(chunk.storage for chunk in chunks)
        return max((storage.seconds(count * size) for storage, count in counts.items()), default=0.0)

    def speed(self) -> float:
        """Bytes per second, of all together."""
        return sum(storage.speed() for storage in self.storages)

    @property
    def errors(self) -> int:
        """Reads, writes and questions that failed, of all together."""
        return sum(storage.errors for storage in self.storages)

    def close(self):
        for storage in self.storages:
            storage.close()

    def __str__(self):
        return ", ".join(map(str, self.storages))


# 2. Storage ------------------------------------------------------------------------------------

class Storage:
    """Values under keys, behind a back end that many engines may share: one thread asks what is there, one
    reads, one writes, and nobody else waits. A back end is any object with three verbs, which may raise
    anything:

        exists(keys) -> list of bool        keys: strings of 64 hexadecimal digits
        get(keys) -> list of bytes or None
        set(keys, values)                   each whole or not at all

    `exists` also uses what is there, the last key first: of a chain the end is to be deleted first. A back
    end need not check what it reads: a value begins with a checksum over key and contents. For `has` it needs
    an `index`, the keys that are there as far as it knows.

    Its answers are believed until a read fails: then that read's missing and damaged keys are doubted until
    they are written again. While it does not answer (`silent`) nobody waits for it."""

    def __init__(self, backend, name: str = "storage", bandwidth=None):
        """`bandwidth`: model reading that is slower than it is (shell/modelled_link.py)."""
        self.backend, self.name, self.bandwidth, self.errors = backend, name, bandwidth, 0
        self.doubted: set[bytes] = set()  # keys whose last read failed: not read again until they are written
        self.failing: set[str] = set()  # verbs that raised the last time

    def open(self, wake):
        self.reader, self.writer = Worker("storage", wake), Worker("save", wake, background=True)
        self.asker = Worker("ask", wake)  # an answer stands behind no long reads

    def exists(self, keys: list[bytes]) -> Transfer:
        """Use values -> a Transfer whose value says of each key whether it is there, and can be read."""
        return self.asker.submit("exists", 0, self.track_errors, self.look_up, keys)

    def use(self, keys: list[bytes]):
        """Use values, behind the writes that are queued."""
        if keys and not self.is_backlogged:
            self.writer.submit("use", 0, self.track_errors, self.look_up, keys)

    def has(self, keys: list[bytes]) -> bool:
        """Whether all are there, as far as is known here, and can be read now."""
        known = self.backend.index
        return not self.reader.hangs and all(key.hex() in known and key not in self.doubted for key in keys)

    def get(self, keys: list[bytes], into: list[numpy.ndarray], label: str = "") -> Transfer:
        """Read values. What is written to `into` is right, or the Transfer has failed."""
        size, model = sum(array.nbytes for array in into), self.bandwidth and self.bandwidth.of(into)
        return self.reader.submit(label, size, self.track_errors, self.read, keys, into, model=model)

    def set(self, keys: list[bytes], values: list[numpy.ndarray]) -> Transfer:
        """Write the values not there yet -> a Transfer whose value is how many; what fails is doubted."""
        size = sum(value.nbytes for value in values)
        return self.writer.submit("write", size, self.track_errors, self.write, keys, values)

    @property
    def silent(self) -> bool:
        """Whether it hangs, or the last answer or read was an error."""
        return bool(self.failing - {"write"}) or self.reader.hangs or self.asker.hangs

    @property
    def is_backlogged(self) -> bool:
        """Whether writing hangs, or too much waits for it."""
        return self.writer.hangs or self.writer.jobs.qsize() >= BACKLOG

    def measure(self, size: int) -> Transfer:
        """Read so many bytes of nobody's, to know how fast that is."""
        key, contents = hashlib.sha256(b"measure %d" % size).digest(), numpy.arange(size).astype(numpy.uint8)
        self.reader.submit("measure", 0, self.track_errors, self.write, [key], [contents])
        self.reader.measured.forget()
        return self.get([key], [contents], "measure")

    @property
    def measured(self) -> Speed:
        """Of the last reads."""
        self.reader.reap_completed()
        return self.reader.measured

    def speed(self) -> float:
        """Bytes per second; until something has been read what the model says, or a guess."""
        if self.measured.samples:
            return self.measured.value
        return self.bandwidth.value if self.bandwidth else 1e9

    def seconds(self, size: int) -> float:
        """Estimate until `size` bytes have been read, behind what is queued; 0 while that is not known."""
        return self.measured.seconds(self.reader.reap_completed() + size)

    # On the threads

    def track_errors(self, function, *arguments):
        """Call the function, and note whether it raises."""
        try:
            value = function(*arguments)
            self.failing.discard(function.__name__)
            return value
        except Exception as error:
            self.errors += 1
            (self.failing.discard if isinstance(error, Damaged) else self.failing.add)(function.__name__)
            raise

    def look_up(self, keys: list[bytes]) -> list[bool]:
        there = self.backend.exists([key.hex() for key in keys])
        return [known and key not in self.doubted for key, known in zip(keys, there, strict=True)]

    def read(self, keys: list[bytes], into: list[numpy.ndarray]):
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

    def write(self, keys: list[bytes], values: list[numpy.ndarray]) -> int:
        absent = {}
        for key, value, there in zip(keys, values, self.look_up(keys), strict=True):
            if not there:
                value = numpy.ascontiguousarray(value)
                absent[key.hex()] = b"".join([checksum(key, value), value])
        failed = set()
        try:
            self.backend.set([*absent], [*absent.values()])
        except Exception:  # of some keys: the others are there
            self.errors += 1
            there = self.backend.exists([*absent])
            failed = {bytes.fromhex(key) for key, known in zip(absent, there) if not known}
        self.doubted.difference_update(keys)
        self.doubted |= failed
        return len(absent) - len(failed)

    def close(self):
        for lane in self.reader, self.writer, self.asker:
            lane.close()
        with suppress(Exception):
            getattr(self.backend, "close", lambda: None)()

    def __str__(self):
        return self.name


class Damaged(Exception):
    """Storage has answered, and a value is missing or not what was written."""


def checksum(key: bytes, contents) -> bytes:
    return zlib.crc32(contents, zlib.crc32(key)).to_bytes(4, "little")
