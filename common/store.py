"""Blocks of saved state in host memory, and chunks in storage behind that. Storage: values under keys, which
many engines may share.

`BlockStore` keeps the rows of a layer together (a part for each), so that one layer of many tokens is read at
once. A block is found when all of its rows have arrived.

`StoredChunks` keeps a block (04, 05) or 64 tokens (06) under a key in one or several Storages, a value for
each part. `Storage` keeps values behind a back end: a directory, Redis, or your own. One
thread asks, one reads and one writes, so storage that hangs holds up nobody else.
"""

import hashlib
import os
import re
import tempfile
import time
import uuid
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from common.link import Bandwidth, Lane, Transfer, as_integers
from common.speed import Speed

BACKLOG = 256  # chunks that wait to be written to a storage; more are not kept there
ABANDONED = 600  # seconds after which nobody writes to a temporary file any more
OWN_FILE = re.compile(r"([0-9a-f]{64})\.page(\.[0-9a-f]{32}\.tmp)?")

# 1. Blocks in host memory ----------------------------------------------------------------------

@dataclass(eq=False)
class Filling:
    """What a store knows of a request."""

    request: object
    block: int | None = None  # that it fills, and references; None: its rows are not kept
    last: int | None = None  # the one that it filled before
    dropped: bool = False  # rows were dropped: none behind them is kept
    lost: bool = False  # rows on their way were lost: none behind them is found


class Move(NamedTuple):
    """Rows that go to a block from the steps that computed them."""

    filling: Filling
    block: int
    at: int  # the first of them in the block
    noted: list[int]  # of each, its place in the steps
    prefix: object  # what the block holds when they fill it; else None


class BlockStore:
    """Rows of saved state in host memory, in blocks as long as the device's, which the same prefixes find.
    `pool`: the blocks' numbers. `parts`: their rows, [blocks, block size, width] each. `name`: of what is
    saved, where storage is shared. What is under way is held by `cache`."""

    def __init__(self, cache, pool, parts: list[torch.Tensor], name: str, storage=None):
        self.cache, self.pool, self.parts, self.name, self.storage = cache, pool, parts, name, storage
        self.writing: set = set()  # prefixes on their way to storage
        pool.evicting = self.evicting
        self.arrays = [as_integers(part) for part in parts]  # for NumPy
        pool.block_bytes = sum(part.nbytes for part in parts) // max(1, pool.size)
        self.requests: dict[object, Filling] = {}  # those that are not over

    # Finding

    def find(self, request) -> tuple[list, int]:
        """-> the blocks (numbers, or where they are Stored) that hold what follows, and the token up to which
        they do."""
        size, places, stored = self.pool.block_size, [], False
        first, full = request.computed // size, request.history // size
        for prefix in request.chain[first:full]:
            place = self.pool.block_of.get(prefix)
            if place is None and self.storage:
                place, stored = self.storage.find(self.key(prefix), len(self.parts)), True
            # What is stored needs a place in host memory, which what is there already must not lose for it
            if place is None or stored and len(places) >= self.pool.available:
                break
            places.append(place)
        return places, (first + len(places)) * size

    def key(self, prefix) -> bytes:
        return hashlib.sha256(prefix.key + self.name.encode()).digest()

    # Filling

    def fill(self, rows: dict) -> list[Move]:
        """Say where rows go. `rows`: request -> the position of its first one, and the place of each among
        what the steps have computed. -> Moves. Whoever carries them out, or drops them, releases the block of
        each."""
        moves, size = [], self.pool.block_size
        for request, (first, noted) in rows.items():
            filling, done = self.requests.setdefault(request, Filling(request)), 0
            full = (request.prompt_tokens + request.max_tokens - 1) // size  # so many blocks can become full
            noted = noted[: max(0, full * size - first)]
            while done < len(noted) and not filling.dropped:
                index, at = divmod(first + done, size)
                here = noted[done : done + size - at]
                if at == 0:
                    self.begin(filling, index, room=full - index)
                if filling.block is not None:
                    prefix = request.chain[index] if at + len(here) == size else None
                    moves.append(Move(filling, filling.block, at, here, prefix))
                    self.pool.share([filling.block])
                done += len(here)
        return moves

    def begin(self, filling: Filling, index: int, room: int):
        """Reference a block for block `index` of a request, behind which `room` for so many is of use. None
        if its contents are in another one. If there is no block but by evicting what is before it in its own
        chain, nothing more is kept."""
        pool, chain = self.pool, filling.request.chain
        self.close_block(filling)
        if index < len(chain) and chain[index] in pool.block_of:
            return
        if pool.make_room(1, chain):
            before = pool.block_of.get(chain[index - 1], filling.last) if index else None
            (filling.block,) = pool.allocate(1, before, room)
        else:
            filling.dropped = True

    def close_block(self, filling: Filling):
        """The request fills its block no more."""
        if filling.block is not None:
            self.pool.release([filling.block])
            filling.block, filling.last = None, filling.block

    def saved(self, moves: list[Move], arrived: bool):
        """Moves are over, in their order: a block can be found when its last row has arrived, and no row
        before was lost."""
        if not arrived:
            self.drop(moves)
        for move in moves:
            move.filling.lost |= not arrived
            if move.prefix and not move.filling.lost:
                self.register(move.block, move.prefix)
        for request in {move.filling.request for move in moves if move.prefix}:
            self.use_stored(request)

    def register(self, block: int, prefix):
        """The block can be found, and is written to storage, until which its memory must stay as it is; not
        behind a gap, where nothing would find it."""
        self.pool.register(block, prefix)
        before = prefix.parent
        if self.storage and (before.parent is None or before in self.writing or self.is_stored(before)):
            if written := self.storage.write(self.key(prefix), [part[block] for part in self.arrays]):
                self.writing.add(prefix)
                then = lambda arrived: self.writing.discard(prefix)  # noqa: E731
                self.cache.hold(f"write {block}", [written], (self.pool, [block]), then=then)

    def is_stored(self, prefix) -> bool:
        return self.storage.find(self.key(prefix), len(self.parts)) is not None

    def use_stored(self, request):
        """A chain that is used in host memory, or on the device, is used in storage."""
        if self.storage:
            self.storage.use([self.key(prefix) for prefix in request.chain], len(self.parts))

    def evicting(self, lost: list):
        """What leaves host memory and is not in storage is lost."""
        if self.storage:
            self.cache.counts["blocks_lost"] += sum(not self.is_stored(prefix) for _, prefix in lost)

    def drop(self, moves: list[Move]):
        """These rows are not kept, and none behind them, until they are computed again."""
        for filling in {move.filling for move in moves if not move.filling.dropped}:
            filling.dropped = True
            self.cache.counts["drops"] += 1

    def finished(self, request):
        """Hold nothing of a request."""
        if filling := self.requests.pop(request, None):
            self.close_block(filling)
        self.use_stored(request)

    # What is stored comes to host memory first

    def stored(self, places: list) -> list["Stored"]:
        return [place for place in places if isinstance(place, Stored)]

    def seconds_to_read(self, places: list) -> float:
        return self.storage.seconds(self.stored(places), self.pool.block_bytes) if self.storage else 0.0

    def bring(self, request, start: int, places: list) -> tuple[list[int], list[list[Transfer]]]:
        """Reference what `find` has found from token `start` on, and read what is stored, part by part. ->
        the blocks' numbers, and for each part the reads that must be over before."""
        stored, chain = self.stored(places), request.chain[start // self.pool.block_size :]
        self.pool.share([place for place in places if isinstance(place, int)])
        into = self.pool.allocate(len(stored))
        fresh, reads = iter(into), [[] for _ in self.parts]
        numbers = [next(fresh) if isinstance(place, Stored) else place for place in places]
        if stored:
            for part, memory in enumerate(self.arrays):
                reads[part] = self.storage.read(stored, [memory[number] for number in into], part)
            prefix_of = {block: prefix for block, prefix in zip(numbers, chain) if block in into}
            then = partial(self.brought, prefix_of)
            self.cache.hold(f"read {into[0]}", sum(reads, []), (self.pool, into), then=then)
        return numbers, reads

    def brought(self, prefix_of: dict, arrived: bool):
        """Blocks have been read: the next request finds them in host memory."""
        for block, prefix in prefix_of.items() if arrived else ():
            self.register(block, prefix)


# 2. Chunks in storage --------------------------------------------------------------------------

class Stored(NamedTuple):
    """Where a chunk is: keys of its parts."""

    storage: "Storage"
    keys: list[bytes]


class StoredChunks:
    """Chunks in one or several Storages, a value for each part. Which has which, each of them knows without
    asking its back end. What is damaged or gone, is computed."""

    def __init__(self, *storages: "Storage"):
        self.storages, self.turn = storages, cycle(storages)  # round-robin

    def open(self, wake):
        for storage in self.storages:
            storage.open(wake)

    def keys(self, key: bytes, parts: int) -> list[bytes]:
        return [key[:30] + part.to_bytes(2, "little") for part in range(parts)]

    def find(self, key: bytes, parts: int = 1) -> Stored | None:
        keys = self.keys(key, parts)
        for storage in self.storages:
            if storage.has(keys):
                return Stored(storage, keys)

    def read(self, chunks: list[Stored], into: list[numpy.ndarray], part=0, label="") -> list[Transfer]:
        """Read a part of some chunks, in the background, the storages in parallel -> a Transfer each."""
        keys, places = defaultdict(list), defaultdict(list)
        for (storage, parts), place in zip(chunks, into, strict=True):
            keys[storage].append(parts[part])
            places[storage].append(place)
        label = label or f"part {part}"
        return [storage.get(keys[storage], places[storage], label) for storage in keys]

    def write(self, key: bytes, parts: list[numpy.ndarray]) -> Transfer | None:
        """Keep a chunk, in the background -> a Transfer; None if it is kept already, or the storage
        whose turn it is falls behind."""
        if self.find(key, len(parts)):
            return None
        storage = next(self.turn)
        if storage.writer.hangs or storage.writer.jobs.qsize() >= BACKLOG:
            return None
        return storage.set(self.keys(key, len(parts)), parts)

    def use(self, keys: list[bytes], parts: int = 1):
        """Use the chunks of a chain, as far as they are there: its end is deleted first."""
        for storage in self.storages:
            storage.use([part for key in keys for part in self.keys(key, parts)])

    def seconds(self, chunks: list[Stored], size: int) -> float:
        """Estimate until so many chunks of `size` bytes have been read."""
        counts = Counter(chunk.storage for chunk in chunks)
        return max((storage.seconds(count * size) for storage, count in counts.items()), default=0.0)

    def speed(self) -> float:
        """Bytes per second, of all together."""
        return sum(storage.speed() for storage in self.storages)

    def close(self):
        for storage in self.storages:
            storage.close()

    def __str__(self):
        return ", ".join(map(str, self.storages))


# 3. Storage ------------------------------------------------------------------------------------

class Storage:
    """Values under keys, behind a back end that many engines may share: one thread asks what is there, one
    reads, one writes, and nobody else waits. A back end is any object with three verbs, which may raise
    anything:

        exists(keys) -> list of bool        keys: strings of 64 hexadecimal digits
        get(keys) -> list of bytes or None  which are used before it is asked again
        set(keys, values)                   each whole or not at all

    `exists` also uses what is there, the last key first: of a chain the end is to be deleted first. A back
    end need not check what it reads: a value begins with a checksum over key and contents. For `has` it needs
    an `index`, the keys that are there as far as it knows, and `look()`, which makes it anew.

    What storage says is believed until a read fails: then that read's missing and damaged keys are doubted
    until they are written again. Where it does not answer (`silent`) nobody waits for it until it has."""

    def __init__(self, backend, name: str = "storage", bandwidth: Bandwidth | None = None):
        """`bandwidth`: model reading that is slower than it is."""
        self.backend, self.name, self.bandwidth = backend, name, bandwidth
        self.doubted: set[bytes] = set()  # keys whose last read failed: not read again until they are written
        self.failing: set[str] = set()  # verbs that raised the last time
        self.errors = 0

    def open(self, wake):
        self.reader, self.writer = Lane("storage", wake), Lane("save", wake, background=True)
        self.asker = Lane("ask", wake)  # an answer stands behind no long reads

    def exists(self, keys: list[bytes]) -> Transfer:
        """Use values -> a Transfer whose value says of each key whether it is there, and can be read."""
        return self.asker.submit("exists", 0, self.noting, self.look_up, keys)

    def use(self, keys: list[bytes]):
        """Use values, behind the writes that are queued."""
        if keys and not self.writer.hangs and self.writer.jobs.qsize() < BACKLOG:
            self.writer.submit("use", 0, self.noting, self.look_up, keys)

    @property
    def silent(self) -> bool:
        """Whether it hangs, or the last answer or read was an error."""
        return bool(self.failing - {"write"}) or self.reader.hangs or self.asker.hangs

    def has(self, keys: list[bytes]) -> bool:
        """Whether all are there, as far as is known here, and can be read now."""
        known = self.backend.index
        return not self.reader.hangs and all(key.hex() in known and key not in self.doubted for key in keys)

    def get(self, keys: list[bytes], into: list[numpy.ndarray], label: str = "") -> Transfer:
        """Read values. What is written to `into` is right, or the Transfer has failed."""
        size = sum(place.nbytes for place in into)
        work = self.noting, self.read, keys, into
        return self.reader.submit(label, size, *work, bandwidth=self.bandwidth)

    def set(self, keys: list[bytes], values: list[numpy.ndarray]) -> Transfer:
        """Write the values that are not there -> a Transfer whose value is how many."""
        size = sum(value.nbytes for value in values)
        return self.writer.submit("write", size, self.noting, self.write, keys, values)

    def measure(self, size: int) -> Transfer:
        """Read so many bytes of nobody's, to know how fast that is."""
        key, contents = hashlib.sha256(b"measure %d" % size).digest(), numpy.arange(size).astype(numpy.uint8)
        self.reader.submit("measure", 0, self.noting, self.write, [key], [contents])
        self.measured.forget()
        return self.get([key], [contents], "measure")

    @property
    def measured(self) -> Speed:
        """Of the last reads."""
        self.reader.settle()
        return self.reader.measured

    def speed(self) -> float:
        """Bytes per second; until something has been read what the model says, or a guess."""
        guess = self.bandwidth.value if self.bandwidth else 1e9
        return self.measured.value if self.measured.passes else guess

    def seconds(self, size: int) -> float:
        """Estimate until `size` bytes have been read, behind what is queued; 0 while that is not known."""
        return self.measured.seconds(self.reader.settle() + size)

    # On the threads

    def noting(self, function, *arguments):
        try:
            value = function(*arguments)
        except Exception as error:
            self.errors += 1
            if not isinstance(error, Damaged):  # which is an answer
                self.failing.add(function.__name__)
            raise
        self.failing.discard(function.__name__)
        return value

    def look_up(self, keys: list[bytes]) -> list[bool]:
        there = self.backend.exists([key.hex() for key in keys])
        return [known and key not in self.doubted for key, known in zip(keys, there, strict=True)]

    def read(self, keys: list[bytes], into: list[numpy.ndarray]):
        wrong, gone = set(keys), False
        try:
            values = self.backend.get([key.hex() for key in keys])
            for key, value, place in zip(keys, values, into, strict=True):
                contents = memoryview(value or b"")[4:]
                if len(contents) != place.nbytes or checksum(key, contents) != bytes(value[:4]):
                    gone |= value is None
                else:
                    numpy.copyto(place, numpy.frombuffer(contents, place.dtype).reshape(place.shape))
                    wrong.discard(key)
            if wrong:
                raise Damaged(f"{len(wrong)} of {len(keys)} values are missing or damaged")
        finally:
            self.doubted |= wrong
            if gone and hasattr(self.backend, "look"):  # others may be gone with it
                self.backend.look()

    def write(self, keys: list[bytes], values: list[numpy.ndarray]) -> int:
        there = self.backend.exists([key.hex() for key in keys])
        lacking = []
        for key, value, known in zip(keys, values, there, strict=True):
            if not known or key in self.doubted:
                value = numpy.ascontiguousarray(value)
                lacking.append((key.hex(), b"".join([checksum(key, value), value])))
        self.backend.set(*map(list, zip(*lacking)) if lacking else ([], []))
        self.doubted.difference_update(keys)
        return len(lacking)

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


class Directory:
    """A file for each value. Processes may share it: a file appears by being renamed. Beyond `limit_gb` the
    least recently used go. Files with other names than those that are written here are left alone."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        self.folder, self.limit = url.removeprefix("file:"), 1e9 * limit_gb
        self.buffers: dict[int, bytearray] = {}  # fresh memory costs ten times what reading into it does
        self.now = 0  # nanoseconds: the latest time that a file has, here or in another process
        os.makedirs(self.folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass  # raises OSError if nobody may write here
        self.look()

    def path(self, key: str) -> str:
        return f"{self.folder}/{key}.page"

    def look(self) -> list[tuple]:
        """-> (time, bytes, key) of each file, the least recently used first. Others write and delete here."""
        found = []
        for entry in os.scandir(self.folder):
            name = OWN_FILE.fullmatch(entry.name)
            with suppress(OSError):
                if name is None or not entry.is_file(follow_symlinks=False):
                    continue
                status, (key, temporary) = entry.stat(), name.groups()
                if temporary is None:
                    found.append((status.st_mtime_ns, status.st_size, key))
                elif time.time() - status.st_mtime > ABANDONED:
                    os.unlink(entry.path)  # of a process that was killed
        self.index, self.size = {key for _, _, key in found}, sum(size for _, size, _ in found)
        self.unseen = 0  # bytes written here since: others may have written as much
        self.now = max([self.now, *(when for when, _, _ in found)])
        return sorted(found)

    def tick(self) -> int:
        """The time of a use: this machine's clock, but always later than any earlier use, though that clock
        was put back, or another machine's is ahead."""
        self.now = max(time.time_ns(), self.now + 1)
        return self.now

    def exists(self, keys: list[str]) -> list[bool]:
        return [self.use(key) for key in reversed(keys)][::-1]

    def use(self, key: str) -> bool:
        with suppress(OSError):  # gone, or another user's
            os.utime(self.path(key), ns=(self.tick(),) * 2)
        return os.path.isfile(self.path(key))

    def get(self, keys: list[str]) -> list[bytearray | None]:
        values = []
        for index, key in enumerate(keys):
            try:
                with open(self.path(key), "rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    if len(self.buffers.setdefault(index, bytearray())) != size:
                        self.buffers[index] = bytearray(size)
                    values.append(self.buffers[index])
                    file.readinto(values[-1])
            except (FileNotFoundError, IsADirectoryError):
                values.append(None)
        self.exists(keys)
        return values

    def set(self, keys: list[str], values: list[bytes]):
        """Write all that can be written. Raises the first OSError."""
        errors = []
        for key, value in zip(keys, values, strict=True):
            try:
                self.write(key, value)
            except OSError as error:
                errors.append(error)
        for error in errors:
            raise error

    def write(self, key: str, value: bytes):
        self.make_room(len(value))
        temporary = self.path(key) + f".{uuid.uuid4().hex}.tmp"
        try:
            Path(temporary).write_bytes(value)
            os.utime(temporary, ns=(self.tick(),) * 2)
            if os.path.isdir(self.path(key)):
                os.rmdir(self.path(key))  # raises OSError if there is anything in it
            os.replace(temporary, self.path(key))
        finally:
            Path(temporary).unlink(missing_ok=True)
        self.index.add(key)
        self.size += len(value)
        self.unseen += len(value)

    def make_room(self, size: int):
        """Delete a tenth when the limit is reached. Look what is there then, and after each tenth that this
        process has written."""
        if self.size + size <= self.limit and self.unseen <= self.limit / 10:
            return
        found = self.look()
        for _, taken, key in found if self.size + size > self.limit else ():
            if self.size + size > 0.9 * self.limit:
                Path(self.path(key)).unlink(missing_ok=True)
                self.index.discard(key)
                self.size -= taken
