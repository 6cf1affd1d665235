"""Chunks of saved state: in host memory, found by their tokens, and behind that in files. Pages by key, in
storage that many engines share.

`ChunkStore` keeps 64 tokens a chunk, in parts: the rows of a layer lie together, so that one layer of many
tokens is read at once. A chunk is found as far as its rows have arrived and its tokens are those that are
asked for. So the unfinished chunk at the end of a conversation is found too, and the next turn fills it.

`ChunkFiles` keeps full chunks in directories: whole or not at all, with a checksum for each part, under keys
that cover model, dtype, salt and tokens. In each directory one thread reads and one writes, so storage that
hangs holds up nobody else.

`Storage` keeps values under keys behind a back end: a directory, Redis, what fsspec knows, or your own.
"""

import hashlib
import importlib
import json
import os
import queue
import re
import statistics
import tempfile
import threading
import time
import uuid
import weakref
import zlib
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, takewhile
from operator import eq
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from common.checkpoint import ModelError
from common.link import Bandwidth, Link, Transfer, TransferError, as_integers, in_background
from common.timeline import Clock

CHUNK = 64  # tokens
PAGE = 4096  # bytes: a file's header is filled up to a multiple
HANGING = 1.0  # seconds: a directory in which something takes longer is not asked any more
BACKLOG = 64  # chunks that wait to be written in a directory; more are not kept there
ABANDONED = 600  # seconds after which nobody writes to a temporary file any more

# 1. Chunks in host memory ----------------------------------------------------------------------

@dataclass(eq=False)
class Chunk:
    """Tokens behind `parent` whose rows are in the store, or on their way.

    A request begins it, fills it step by step (`tokens` grow, and `filled` follows), and closes it when it is
    full or the request is over: nobody else fills it before. If rows are lost, it stays as it is: what is
    filled can be found, and nobody fills it any more."""

    number: int  # in the pool
    parent: object  # Prefix of all that is before
    tokens: list[int]  # at most 64
    filled: int = 0  # rows that have arrived: so far it can be found
    open: bool = True  # somebody fills it
    lost: bool = False  # some of its rows were dropped


class Move(NamedTuple):
    """Rows that go to a chunk, from the steps that computed them or from another chunk."""

    request: object
    chunk: Chunk
    at: int  # the first of them in the chunk
    rows: int
    places: list[int] = []  # of each, in the steps
    source: int | None = None  # or the other chunk's number


@dataclass(eq=False)
class Filling:
    """What a store knows of a request."""

    chain: list = field(default_factory=list)  # a Prefix for each full chunk
    end: int = -1  # the position behind the last row that it has computed
    index: int = -1  # of the chunk that this row belongs to
    chunk: Chunk | None = None  # the same, while the request fills it; None: full, there already, or no room
    dropped: bool = False  # rows were dropped: no more are kept


class ChunkStore:
    """`pool`: the chunks' numbers. `parts`: their rows, [chunks, 64, width] each. `prefixes`: their names.
    What is under way is held by `cache`."""

    def __init__(self, cache, pool, parts: list[torch.Tensor], prefixes, files=None):
        self.cache, self.pool, self.parts, self.prefixes, self.files = cache, pool, parts, prefixes, files
        self.arrays = [as_integers(part) for part in parts]  # for NumPy
        self.chunk_bytes = sum(part.nbytes for part in parts) // max(1, pool.size)
        self.requests: dict[object, Filling] = defaultdict(Filling)  # those that are not over
        self.chunks: dict[int, Chunk] = {}  # those that can be found, by number
        self.behind: dict[object, list[Chunk]] = defaultdict(list)  # and by parent
        self.speeds = deque(maxlen=8)  # bytes/s, of the last files that were read
        pool.evicting = lambda number, prefix: self.forget(number)
        if files:
            files.attach(parts, cache.engine)

    # Finding

    def find(self, request) -> tuple[list, int]:
        """-> the chunks (numbers and Files) that hold what follows, and the token up to which they do."""
        places, reached, last = [], request.computed, len(request.tokens) - 1  # the last one is computed
        while reached < last:
            index = reached // CHUNK
            place, rows = self.find_piece(*self.piece(request, index))
            end = min(index * CHUNK + rows, last)
            if end <= reached or not self.has_room(place, places):
                break
            places, reached = [*places, place], end
        return places, reached

    def piece(self, request, index: int):
        """-> parent, prefix (None if it is not full yet) and tokens of chunk `index` of a request."""
        chain, salt = self.requests[request].chain, request.options.get("cache_salt", "")
        self.prefixes.extend(chain, request.tokens, salt)
        parent = chain[index - 1] if index else self.prefixes.root(salt)
        tokens = request.tokens[index * CHUNK : (index + 1) * CHUNK]
        return parent, chain[index] if index < len(chain) else None, tokens

    def find_piece(self, parent, prefix, tokens: list[int]):
        """What holds the next `tokens` behind `parent`; `prefix` names them if they are 64. -> its number, or
        its File, or None; and how many rows of it."""
        if prefix in self.pool.block_of:
            return self.pool.block_of[prefix], CHUNK
        if prefix is not None and self.files and (file := self.files.find(prefix)):
            return file, CHUNK
        ways = self.behind.get(parent, ())
        rows, number = max(((common(chunk.tokens[: chunk.filled], tokens), chunk.number) for chunk in ways),
                           default=(0, None))  # fmt: skip
        return number, rows

    # Filling

    def fill(self, rows: dict) -> tuple[list[Move], list[Chunk]]:
        """Say where rows go. `rows`: request -> the position of its first one, and the place of each among
        what the steps have computed. -> Moves, and the chunks that nobody fills behind them; both hold chunks
        until they are `released`."""
        moves, over = [], []
        for request, (first, places) in rows.items():
            filling, position, end = self.requests[request], first, first + len(places)
            if filling.end != first:  # what is between has come back
                over += [filling.chunk] if filling.chunk else []
                filling.index, filling.chunk = -1, None
            filling.end = end
            while position < end and not filling.dropped:
                index, at = position // CHUNK, position % CHUNK
                count = min(CHUNK - at, end - position)
                if filling.index != index:
                    filling.index = index
                    parent, _, tokens = self.piece(request, index)
                    filling.chunk, source = self.begin(parent, tokens, at, filling.chain)
                    if source is not None:
                        moves.append(Move(request, filling.chunk, 0, at, source=source))
                if (chunk := filling.chunk) and chunk.lost:  # rows of another request, in the turn before
                    filling.dropped = True
                elif chunk:
                    # The device still had blocks of the turn before up to row 48, say, and the chunk has 54
                    # rows: rows 48 to 53 have been computed again, and are there already
                    there = min(count, len(chunk.tokens) - at)
                    if there < count:
                        new = places[position + there - first : position + count - first]
                        moves.append(Move(request, chunk, at + there, count - there, new))
                        chunk.tokens += request.tokens[position + there : position + count]
                    if len(chunk.tokens) == CHUNK:
                        over.append(chunk)
                        filling.chunk = None
                position += count
        return moves, over

    def begin(self, parent, tokens: list[int], at: int, own: list) -> tuple[Chunk | None, int | None]:
        """Somebody computes `tokens` behind `parent`, from row `at` on -> the chunk to fill, and the number
        of another one whose first `at` rows are to be copied to it: somebody else fills that, or it goes on
        with other tokens. (None, None) if all is there already, if rows before `at` are not, or if only
        chunks of `own` prefixes could be evicted for it. The other one is referenced: nobody may evict and
        fill it before it is copied."""
        source = None
        for chunk in self.behind.get(parent, ()):
            same = common(chunk.tokens, tokens)
            if same == CHUNK and not chunk.lost:
                return None, None
            if at <= same == len(chunk.tokens) < CHUNK and not chunk.open:  # unfinished, and nobody's
                chunk.open = True
                self.pool.share([chunk.number])
                return chunk, None
            if 0 < at <= min(same, chunk.filled):
                source = chunk.number
        if at and source is None:
            return None, None
        sources = [source] if at else []
        self.pool.share(sources)
        victim = next(iter(self.pool.cached), None)
        if self.pool.free.count(1) or victim is not None and self.pool.prefix_of[victim] not in own:
            return Chunk(*self.pool.allocate(1), parent, list(tokens[:at])), source
        self.pool.release(sources)
        return None, None

    def released(self, moves: list[Move], over: list[Chunk]):
        """Whoever carries out the moves holds what they touch; or they are dropped."""
        self.pool.release([move.source for move in moves if move.source is not None])
        for chunk in over:
            self.close_chunk(chunk)

    def put(self, moves: list[Move], taken: list[numpy.ndarray], index: numpy.ndarray):
        """Sort rows into chunks, on any thread. `index`: where in `taken` [rows, width] each place is."""
        for part in self.arrays:
            for move in moves:
                if move.source is not None:
                    part[move.chunk.number, : move.rows] = part[move.source, : move.rows]
        moves = [move for move in moves if move.source is None]
        if moves:
            out_of = index[numpy.concatenate([move.places for move in moves])]  # [rows]
            first = [(CHUNK * move.chunk.number + move.at, move.rows) for move in moves]
            into = numpy.concatenate([numpy.arange(at, at + rows) for at, rows in first])  # [rows]
            for part, snapshot in zip(self.arrays, taken):
                part.reshape(-1, part.shape[-1])[into] = snapshot[out_of]

    def saved(self, moves: list[Move], arrived: bool):
        """What has arrived can be found."""
        for move in moves:
            if not arrived or move.chunk.lost:
                self.drop([move])
            else:
                self.arrived(move.chunk, move.at + move.rows)

    def arrived(self, chunk: Chunk, rows: int):
        """The chunk's first `rows` rows are there: it can be found so far. A full one is written to its file,
        until which its memory must stay as it is."""
        self.forget(chunk.number)
        chunk.filled = rows
        prefix = self.prefixes.after(chunk.parent, tuple(chunk.tokens[:rows]))
        if self.pool.block_of.get(prefix) is None:  # else another one holds the same
            self.pool.register(chunk.number, prefix)
            self.chunks[chunk.number] = chunk
            self.behind[chunk.parent].append(chunk)
        if rows == CHUNK and self.files:
            if written := self.files.write(prefix, [part[chunk.number] for part in self.arrays]):
                self.cache.hold("disk", [written], (self.pool, [chunk.number]))

    def drop(self, moves: list[Move]):
        """These rows are not kept, and none behind them, until they are computed again."""
        for move in moves:
            move.chunk.lost = True
            filling = self.requests.get(move.request)
            if filling and not filling.dropped:
                filling.dropped = True
                self.cache.counts["dropped_chunks"] += 1

    def close_chunk(self, chunk: Chunk):
        """Nobody fills it any more."""
        chunk.open = chunk.lost
        self.pool.release([chunk.number])

    def finished(self, request):
        """Hold nothing of a request; its chunks are the most recently used, their end evicted first."""
        if filling := self.requests.pop(request, None):
            if filling.chunk:
                self.close_chunk(filling.chunk)
            held = [self.pool.block_of[prefix] for prefix in filling.chain if prefix in self.pool.block_of]
            self.pool.share(held)
            self.pool.release(held)

    def forget(self, number: int):
        """The chunk cannot be found any more."""
        if (chunk := self.chunks.pop(number, None)) is None:
            return
        self.behind[chunk.parent].remove(chunk)
        if not self.behind[chunk.parent]:
            del self.behind[chunk.parent]
        prefix, self.pool.prefix_of[number] = self.pool.prefix_of[number], None
        self.pool.block_of.pop(prefix, None)

    # What is in files comes to host memory first

    def in_files(self, places: list) -> int:
        return sum(isinstance(place, File) for place in places)

    def has_room(self, place, others: list) -> bool:
        """Whether `place` can be brought beside others. What is in a file needs a chunk in host memory, which
        what is there already must not lose for it."""
        return len(others) < self.pool.available or not self.in_files([*others, place])

    def seconds_to_read(self, places: list) -> float:
        size = self.in_files(places) * self.chunk_bytes
        return size / statistics.median(self.speeds) if self.speeds else 0.0

    def bring(self, request, start: int, places: list) -> tuple[list[int], list[list[Transfer]]]:
        """Reference what `find` has found from token `start` on, and read what is in files, part by part. ->
        the chunks' numbers, and for each part the reads that must be over before."""
        self.pool.share([place for place in places if not isinstance(place, File)])
        files = [place for place in places if isinstance(place, File)]
        fresh = self.pool.allocate(len(files)) if files else []
        unused, reads = iter(fresh), [[] for _ in self.parts]
        numbers = [next(unused) if isinstance(place, File) else place for place in places]
        if files:
            for part, memory in enumerate(self.arrays):
                reads[part] = self.files.read(files, [memory[number] for number in fresh], part)
            chunks = []
            for index, (number, place) in enumerate(zip(numbers, places), start // CHUNK):
                if isinstance(place, File):
                    parent, _, tokens = self.piece(request, index)
                    chunks.append(Chunk(number, parent, tokens, open=False))
            every = sum(reads, [])
            self.cache.hold("storage", every, (self.pool, fresh), then=partial(self.brought, chunks, every))
        return numbers, reads

    def brought(self, chunks: list[Chunk], reads: list[Transfer], arrived: bool):
        """Chunks have been read: the next request finds them in host memory."""
        if arrived:
            for chunk in chunks:
                self.arrived(chunk, CHUNK)
            spent = max(read.end for read in reads) - min(read.start for read in reads)
            self.speeds.append(sum(read.bytes for read in reads) / spent)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning of both are the same."""
    return len(one) if one == other[: len(one)] else sum(1 for _ in takewhile(bool, map(eq, one, other)))


# 2. Files --------------------------------------------------------------------------------------

class Lane:
    """A thread that does one thing after the other. What hangs ends with the process."""

    def __init__(self, name: str, wake=lambda: None):
        self.name, self.wake = name, wake
        self.jobs, self.began = queue.SimpleQueue(), None
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        self.close = weakref.finalize(self, end, self.jobs, thread)  # at the latest when the process ends

    @property
    def hangs(self) -> bool:
        began = self.began
        return began is not None and time.perf_counter() - began > HANGING

    def submit(self, label: str, size: int, function, *arguments) -> Transfer:
        transfer = Transfer(self.name, label, size)
        self.jobs.put((transfer, function, arguments))
        return transfer

    def run(self):
        if self.name == "save":
            in_background()
        while (job := self.jobs.get()) is not None:
            transfer, function, arguments = job
            self.began, error = time.perf_counter(), None
            try:
                if transfer.cancelled:
                    raise TransferError("cancelled")
                transfer.value = function(*arguments)
            except Exception as raised:
                error = raised
            transfer.finish(self.began, time.perf_counter(), error)
            self.began = transfer = function = arguments = job = None
            self.wake()


def end(jobs: queue.SimpleQueue, thread: threading.Thread):
    """End the thread of a lane. No thread may be inside PyTorch when the interpreter goes."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(HANGING)


@dataclass(eq=False)
class File:
    key: str
    path: Path
    size: int  # bytes
    header: bytes = b""  # what it must begin with


class ChunkFiles:
    """Full chunks in directories, a file each, at most `limit` bytes. Processes may share the directories: a
    file appears by being renamed, with all that is in it, and what somebody deletes is computed again. Raises
    ModelError."""

    speed = 1e9  # bytes/s, until something has been read

    def __init__(self, directories: list[Path], limit: float):
        self.directories = list(dict.fromkeys(Path(directory).resolve() for directory in directories))
        self.limit = limit
        self.turn = cycle(self.directories)  # round-robin
        self.lock, self.index = threading.Lock(), OrderedDict()  # key -> File, least recently used first
        for directory in self.directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for path in directory.glob("*.tmp"):  # of processes that were killed
                    if time.time() - path.stat().st_mtime > ABANDONED:
                        path.unlink(missing_ok=True)
                with tempfile.TemporaryFile(dir=directory):
                    pass
            except OSError as error:
                words = f"Cannot keep chunks in '{directory}' ({error.strerror}); choose another --disk."
                raise ModelError(words) from None
        self.scan()

    def attach(self, parts: list[torch.Tensor], engine):
        """Keep chunks of these parts [chunks, 64, width]; count with the engine, and wake it."""
        self.counts, wake = engine.counts, engine.wake.set
        self.what = [f"{part.shape[1]} x {part.shape[2]} {part.dtype}" for part in parts]
        self.sizes = [part.shape[1] * part.shape[2] * part.itemsize for part in parts]
        if PAGE + sum(self.sizes) > self.limit:
            raise ModelError(
                f"A chunk takes {(PAGE + sum(self.sizes)) / 1e6:.2f} MB, and all of them may take "
                f"{self.limit / 1e6:.2f} MB; choose a larger --disk-limit."
            )
        self.readers = {directory: Lane("storage", wake) for directory in self.directories}
        self.writers = {directory: Lane("save", wake) for directory in self.directories}

    def find(self, prefix) -> File | None:
        """The file of a full chunk, from memory: no directory is asked."""
        file = self.index.get(prefix.key.hex())
        if file is None or self.readers[file.path.parent].hangs:
            return None
        file.header = file.header or self.header(prefix)
        return file

    def header(self, prefix) -> bytes:
        """What the file of this prefix begins with: what it holds, in words. Then come the checksums."""
        said = dict(format="chunk 2", parts=self.what, key=prefix.key.hex(), tokens=prefix.tokens)
        text, checksums = json.dumps(said).encode() + b"\n", 4 * len(self.sizes)
        return text.ljust(-(-(len(text) + checksums) // PAGE) * PAGE - checksums)

    def read(self, files: list[File], into: list[numpy.ndarray], part: int, label="") -> list[Transfer]:
        """Read one part of some files, in the background, the directories in parallel -> a Transfer each."""
        by_directory = defaultdict(list)
        for file, place in zip(files, into, strict=True):
            by_directory[file.path.parent].append((file, place))
        transfers = []
        for directory, pairs in by_directory.items():
            size = len(pairs) * self.sizes[part]
            label = label or f"part {part}"
            transfers.append(self.readers[directory].submit(label, size, self.read_all, pairs, part))
        return transfers

    def read_all(self, pairs: list[tuple[File, numpy.ndarray]], part: int):
        for file, into in pairs:
            try:
                self.read_one(file, into, part)
            except (OSError, ValueError):
                self.reject(file)
                raise

    def read_one(self, file: File, into: numpy.ndarray, part: int):
        """Raises OSError, or ValueError if the file is not what was written."""
        opened = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that lies there does not wait
        try:
            if part == 0:
                os.utime(opened)  # least recently used files go first
            size = len(file.header) + 4 * len(self.sizes)
            head = os.pread(opened, size, 0)
            read = os.preadv(opened, [memoryview(into).cast("B")], size + sum(self.sizes[:part]))
        finally:
            os.close(opened)
        checksum = int.from_bytes(head[len(file.header) + 4 * part :][:4], "little")
        whole = head.startswith(file.header) and read == self.sizes[part]
        if not whole or zlib.crc32(into) != checksum:
            raise ValueError(f"'{file.path.name}' is damaged")
        self.counts["file_reads"] += 1

    def write(self, prefix, parts: list[numpy.ndarray]) -> Transfer | None:
        """Keep a full chunk, in the background -> a Transfer; None if it is kept already, or the directory
        whose turn it is falls behind."""
        if prefix.key.hex() in self.index:
            return None
        directory = next(self.turn)
        writer = self.writers[directory]
        if writer.hangs or writer.jobs.qsize() >= BACKLOG:
            self.counts["file_drops"] += 1
            return None
        return writer.submit("chunk", sum(self.sizes), self.write_one, directory, prefix, parts)

    def write_one(self, directory: Path, prefix, parts: list[numpy.ndarray]):
        """The file appears with all that is in it. Raises OSError."""
        path, header = directory / f"{prefix.key.hex()}.chunk", self.header(prefix)
        checksums = b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)
        file = File(path.stem, path, len(header) + len(checksums) + sum(self.sizes))
        self.make_room(file.size)
        temporary = directory / f"{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as opened:
                opened.writelines([header, checksums, *parts])
            os.replace(temporary, path)
        except OSError:
            self.counts["file_errors"] += 1
            temporary.unlink(missing_ok=True)
            raise
        with self.lock:
            self.index[file.key] = file
            self.counts["file_writes"] += 1

    def make_room(self, size: int):
        """Delete the least recently used files, if the limit would be passed. Other processes write there
        too, so look again before. Raises OSError."""
        if sum(file.size for file in list(self.index.values())) + size > self.limit:
            self.scan()
        with self.lock:
            total = sum(file.size for file in self.index.values())
            while self.index and total + size > self.limit:
                _, file = self.index.popitem(last=False)
                file.path.unlink(missing_ok=True)
                total -= file.size
                self.counts["file_evictions"] += 1

    def scan(self):
        """Look what is in the directories."""
        found = []
        for directory in self.directories:
            with suppress(OSError):  # it is gone
                for entry in os.scandir(directory):
                    with suppress(OSError):  # the file is, meanwhile
                        if re.fullmatch(r"[0-9a-f]{64}\.chunk", entry.name) and entry.is_file():
                            file = File(entry.name[:64], Path(entry.path), entry.stat().st_size)
                            found.append((entry.stat().st_mtime_ns, file))
        found.sort(key=lambda item: item[0])
        with self.lock:
            self.index = OrderedDict((file.key, file) for _, file in found)

    def reject(self, file: File):
        """What is there is not what it should be, or cannot be read: it is not offered again."""
        with self.lock:
            self.counts["file_errors"] += 1
            self.index.pop(file.key, None)
        with suppress(OSError):
            file.path.unlink(missing_ok=True)

    def close(self):
        for lane in (*self.readers.values(), *self.writers.values()):
            lane.close()

    def __str__(self):
        return ", ".join(map(str, self.directories))


# 3. Modelled -----------------------------------------------------------------------------------


class ModelledStorage:
    """What ChunkFiles is, in ordinary memory, behind a modelled bandwidth: at most `limit` bytes, chunks of
    one part. Writing is not slowed down."""

    def __init__(self, limit: float, bandwidth: Bandwidth | float):
        self.limit, self.bandwidth = limit, bandwidth
        self.lock, self.index = threading.Lock(), OrderedDict()  # key -> contents, least recently used first

    def attach(self, parts: list[torch.Tensor], engine):
        self.link = Link("storage", Clock("cpu"), self.bandwidth, engine.wake.set)
        self.use(self.link.bandwidth)
        self.writer = Lane("save", engine.wake.set)

    def use(self, bandwidth: Bandwidth):
        """Be so fast from now on."""
        self.bandwidth = self.link.bandwidth = bandwidth

    @property
    def speed(self) -> float:
        """Bytes/s, until something has been read."""
        return self.bandwidth.value

    def find(self, prefix) -> numpy.ndarray | None:
        with self.lock:
            if prefix.key in self.index:
                self.index.move_to_end(prefix.key)
            return self.index.get(prefix.key)

    def read(self, found: list[numpy.ndarray], into: list[numpy.ndarray], part: int, label="") -> list:
        """Copy what was found -> one Transfer, on the lane "storage"."""
        into, out_of = (list(map(torch.from_numpy, arrays)) for arrays in (into, found))
        return [self.link.copy(into, out_of, label)]

    def write(self, prefix, parts: list[numpy.ndarray]) -> Transfer:
        return self.writer.submit("chunk", parts[0].nbytes, self.write_one, prefix.key, parts[0])

    def write_one(self, key: bytes, contents: numpy.ndarray):
        contents = contents.copy()
        with self.lock:
            self.index[key] = contents
            while len(self.index) * contents.nbytes > self.limit:
                self.index.popitem(last=False)

    def close(self):
        self.link.close()
        self.writer.close()

    def __str__(self):
        return str(self.bandwidth).replace("link", "storage")


# 4. Shared storage -----------------------------------------------------------------------------


class Storage:
    """Pages under keys, behind a back end that many engines may share: one thread reads, one writes, and
    nobody else waits. A back end is any object with three verbs, which may raise anything:

        exists(keys) -> list of bool        keys: strings of 64 hexadecimal digits
        get(keys) -> list of bytes or None  which are used before it is asked again
        set(keys, values)                   each whole or not at all

    It need not check what it reads: a value begins with a checksum over key and contents."""

    def __init__(self, backend, name: str = "storage", bandwidth: Bandwidth | None = None):
        """`bandwidth`: model reading that is slower than it is."""
        self.backend, self.name, self.bandwidth = backend, name, bandwidth
        self.doubted: set[bytes] = set()  # keys under which something wrong was, or nothing, or it failed
        self.speeds = deque(maxlen=8)  # bytes/s, of the last reads
        self.reads: deque[Transfer] = deque()
        self.errors, self.error = 0, ""  # how many, and the last one

    def open(self, wake):
        self.reader, self.writer = Lane("storage", wake), Lane("save", wake)

    def exists(self, keys: list[bytes]) -> Transfer:
        """-> a Transfer whose value is how many of the first keys are there."""
        return self.reader.submit("exists", 0, self.noting, self.count, keys)

    def get(self, keys: list[bytes], into: list[numpy.ndarray], label: str = "") -> Transfer:
        """Read pages. What is written to `into` is right, or the Transfer has failed."""
        size = sum(map(size_of, into))
        self.reads.append(self.reader.submit(label, size, self.noting, self.read, keys, into))
        return self.reads[-1]

    def set(self, keys: list[bytes], pages: list[numpy.ndarray]) -> Transfer:
        """Write the pages that are not there -> a Transfer whose value is how many."""
        return self.writer.submit("write", sum(map(size_of, pages)), self.noting, self.write, keys, pages)

    def measure(self, size: int) -> Transfer:
        """Read so many bytes of nobody's, to know how fast that is."""
        key, contents = hashlib.sha256(b"measure %d" % size).digest(), numpy.arange(size).astype(numpy.uint8)
        return self.reader.submit("measure", size, self.noting, self.probe, [key], [contents])

    def seconds(self, size: int) -> float:
        """Estimate until `size` bytes have been read, behind what is queued; 0 if none were ever read."""
        while self.reads and self.reads[0].ready:
            self.reads.popleft()
        queued = sum(read.bytes for read in self.reads if not read.cancelled)
        return (queued + size) / statistics.median(self.speeds) if self.speeds else 0.0

    # On the threads

    def noting(self, function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:
            self.errors, self.error = self.errors + 1, type(error).__name__
            raise

    def count(self, keys: list[bytes]) -> int:
        for first in range(0, len(keys), 64):
            asked = keys[first : first + 64]
            there = self.backend.exists([key.hex() for key in asked])
            for index, key in enumerate(asked):
                if not there[index] or key in self.doubted:
                    return first + index
        return len(keys)

    def read(self, keys: list[bytes], into: list[numpy.ndarray]):
        began, wrong = time.perf_counter(), set(keys)
        try:
            values = self.backend.get([key.hex() for key in keys])
            for key, value, page in zip(keys, values, into, strict=True):
                contents = numpy.frombuffer(value, page.dtype, offset=4) if value else None
                if contents is None or checksum(key, contents) != bytes(value[:4]):
                    wrong = {key}
                    raise ValueError("a page is missing or damaged")
                numpy.copyto(page, contents.reshape(page.shape))
            wrong = set()
        finally:
            self.doubted |= wrong
        size = sum(map(size_of, into))
        if self.bandwidth:
            time.sleep(max(0.0, self.bandwidth.arrival(began, size) - time.perf_counter()))
        self.speeds.append(size / (time.perf_counter() - began))

    def write(self, keys: list[bytes], pages: list[numpy.ndarray]) -> int:
        there = self.backend.exists([key.hex() for key in keys])
        lacking = []
        for key, page, known in zip(keys, pages, there, strict=True):
            if not known or key in self.doubted:
                lacking.append((key, numpy.ascontiguousarray(page)))
        values = [b"".join([checksum(key, page), page]) for key, page in lacking]
        self.backend.set([key.hex() for key, _ in lacking], values)
        self.doubted.difference_update(keys)
        return len(lacking)

    def probe(self, keys: list[bytes], contents: list[numpy.ndarray]):
        self.write(keys, contents)
        self.speeds.clear()
        self.read(keys, contents)

    def close(self):
        self.reader.close()
        self.writer.close()
        with suppress(Exception):
            getattr(self.backend, "close", lambda: None)()


def checksum(key: bytes, contents: numpy.ndarray) -> bytes:
    return zlib.crc32(contents, zlib.crc32(key)).to_bytes(4, "little")


def size_of(page: numpy.ndarray) -> int:
    return page.size * page.itemsize


class Directory:
    """A file for each value. Processes may share it: a file appears by being renamed. Beyond `limit_gb` the
    least recently used go."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        self.folder, self.limit, self.size = Path(url.removeprefix("file:")), 1e9 * limit_gb, 0
        self.buffers: dict[int, bytearray] = {}  # fresh memory costs ten times what reading into it does
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.tmp"):  # of processes that were killed
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)

    def exists(self, keys: list[str]) -> list[bool]:
        return [(self.folder / f"{key}.page").is_file() for key in keys]

    def get(self, keys: list[str]) -> list[memoryview | None]:
        values = []
        for index, key in enumerate(keys):
            try:
                with open(self.folder / f"{key}.page", "rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size
                    if len(self.buffers.get(index, b"")) < size:
                        self.buffers[index] = bytearray(size)
                    values.append(memoryview(self.buffers[index])[:size])
                    file.readinto(values[-1])
                    os.utime(file.fileno())
            except FileNotFoundError:
                values.append(None)
        return values

    def set(self, keys: list[str], values: list[bytes]):
        for key, value in zip(keys, values, strict=True):
            self.make_room(len(value))
            temporary = self.folder / f"{key}.{uuid.uuid4().hex}.tmp"
            try:
                temporary.write_bytes(value)
                os.replace(temporary, self.folder / f"{key}.page")
            finally:
                temporary.unlink(missing_ok=True)

    def make_room(self, size: int):
        """Look what is there when this process has written as much as fits, and delete a tenth."""
        self.size += size
        if self.size <= self.limit:
            return
        files = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in self.folder.glob("*.page")]
        self.size = size + sum(taken for _, taken, _ in files)
        for _, taken, path in sorted(files):
            if self.size > 0.9 * self.limit:
                path.unlink(missing_ok=True)
                self.size -= taken


class RedisBackend:
    """Redis, or what speaks its protocol. `timeout` in seconds, of connecting and of every answer."""

    def __init__(self, url: str, timeout: float = 1.0, prefix: str = "kv:"):
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Without retries, of which redis-py has some by default: what comes late is worth nothing
        options = dict(socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))
        self.client, self.prefix = Redis.from_url(url, **options), prefix

    def exists(self, keys: list[str]) -> list[bool]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(self.prefix + key)
            return [found == 1 for found in pipeline.execute()]

    def get(self, keys: list[str]) -> list[bytes | None]:
        return self.client.mget([self.prefix + key for key in keys])

    def set(self, keys: list[str], values: list[bytes]):
        if keys:
            self.client.mset({self.prefix + key: value for key, value in zip(keys, values, strict=True)})

    def close(self):
        self.client.close()


class FsspecBackend:
    """What fsspec has a file system for; the configuration is that file system's."""

    def __init__(self, url: str, **config):
        import fsspec  # it comes with torch

        self.fs, root = fsspec.core.url_to_fs(url, **config)
        self.root = root.rstrip("/")
        self.fs.makedirs(self.root, exist_ok=True)

    def paths(self, keys: list[str]) -> list[str]:
        self.fs.invalidate_cache()  # a listing from before another process wrote
        return [f"{self.root}/{key}.page" for key in keys]

    def exists(self, keys: list[str]) -> list[bool]:
        return [self.fs.exists(path) for path in self.paths(keys)]

    def get(self, keys: list[str]) -> list[bytes | None]:
        found = self.fs.cat(self.paths(keys), on_error="omit")
        return [found.get(path) for path in self.paths(keys)]

    def set(self, keys: list[str], values: list[bytes]):
        self.fs.pipe(dict(zip(self.paths(keys), values, strict=True)))


def open_backend(url: str, config: dict | None = None):
    """-> a back end that has answered: file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or
    module:Class. Raises ModelError."""
    config = config or {}
    try:
        if url.startswith("file:"):
            backend = Directory(url, **config)
        elif "://" in url:
            redis = url.startswith(("redis://", "rediss://", "unix://"))
            backend = (RedisBackend if redis else FsspecBackend)(url, **config)
        else:
            module, _, name = url.partition(":")
            backend = getattr(importlib.import_module(module), name)(**config)
        backend.exists(["0" * 64])
        return backend
    except Exception as error:
        # With a user, a password or a configuration the error may quote what is secret
        words = "" if config or "@" in url else f": {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"Cannot use the storage '{label(url)}' ({type(error).__name__}{words}); start it or install its "
            "package, or write file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or module:Class."
        ) from None


def label(url: str) -> str:
    """The URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]
