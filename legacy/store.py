"""A durable store: chunks of saved state in files.

    files = ChunkFiles(directories, shape, dtype, limit)       # shape [parts, tokens, width] of every chunk
    files.write(prefix, index, states)                         # whole or not at all
    chunk = files.find(prefix, index)                          # None: not there, or not what its name says
    files.read([chunk, ...], part, into, done)                 # in the background; checks what it read

A chunk is named by the key of its prefix (chapter 02's Prefix: key, parent, tokens), which covers the model, the dtype and the
caller's salt; so nobody finds what is not theirs. Chapter 04 keeps hidden states in it, and a part is a layer; chapter 06
keeps K and V of all layers in one part. What chunks share with the pages of legacy/backends.py is in DurableFiles.
"""
import json
import os
import re
import stat
import tempfile
import threading
import time
import uuid
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from common.checkpoint import ModelError
from legacy.link import as_integers


@dataclass(frozen=True)
class StoredChunk:
    """A file that was there, whole as far as its header and its size say."""
    path: Path
    header_bytes: int


class DurableFiles:
    """Files in directories, each named by a key of 64 hexadecimal digits. Processes may share them: a file appears by being
    renamed, with all that is in it, and what another process deletes is a miss."""
    ABANDONED = 600                # seconds after which nobody writes to a temporary file any more

    def __init__(self, directories: tuple[Path, ...], limit: float, noun: str, least: int, options: tuple[str, str]):
        """All files take at most `limit` bytes, and one `least` bytes or more; while several processes write there, each may
        pass the limit by a twentieth before it looks. `noun` says what is kept, and is the files' suffix; `options` are where
        the user chooses a directory and a limit. Raises ModelError."""
        self.directories = list(dict.fromkeys(Path(directory).resolve() for directory in directories))
        self.limit, self.noun, self.suffix = limit, noun, "." + noun
        self.counts, self.lock = Counter(file_reads=0, file_read_bytes=0, file_writes=0, file_write_bytes=0, file_evictions=0,
                                         file_errors=0), threading.Lock()
        self.known: set[bytes] = set()                          # keys of files that were there when they were last looked for
        for directory in self.directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for path in directory.glob(f"*{self.suffix}.*.tmp"):             # of processes that were killed
                    with suppress(FileNotFoundError):
                        if time.time() - path.stat().st_mtime > self.ABANDONED:
                            path.unlink()
                with tempfile.TemporaryFile(dir=directory):
                    pass
            except OSError as error:
                raise ModelError(f"Cannot keep {noun}s in '{directory}' ({error.strerror}); choose another directory "
                                 f"with {options[0]}.") from None
        if least > limit:
            raise ModelError(f"A {noun} takes {least / 1e6:.2f} MB, and all of them may take {limit / 1e6:.2f} MB; choose a "
                             f"larger {options[1]}.")
        self.bytes, self.unseen = sum(size for _, size, _ in self.scan()), 0    # in the directories; written since a look

    def reject(self, path: Path):
        """What lies there is not what it should be. It goes, so that the right one can take its place."""
        self.known.discard(bytes.fromhex(path.stem))
        self.count(file_errors=1)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def count(self, **what: int):
        with self.lock:
            self.counts.update(what)

    def put(self, path: Path, pieces: list):
        """Write one after the other, as one file that takes the place of any other of this name. Raises OSError."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        with self.lock:
            self.make_room(size)
            self.bytes, self.unseen = self.bytes + size, self.unseen + size
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb", buffering=0) as file:
                for piece in pieces:
                    rest = memoryview(piece).cast("B")
                    while rest:
                        rest = rest[file.write(rest):]
            os.replace(temporary, path)
        except OSError:
            with self.lock:
                self.bytes -= size
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self.known.add(bytes.fromhex(path.stem))
        self.count(file_writes=1, file_write_bytes=size)

    def make_room(self, size: int):
        """Delete the least recently used files until a tenth of the limit is free, if it would be passed. Looks at the
        directories, because other processes write there too. For who holds the lock."""
        if self.bytes + size <= self.limit and self.unseen <= self.limit / 20:
            return
        files = sorted(self.scan())
        self.bytes, self.unseen = sum(taken for _, taken, _ in files), 0
        for _, freed, path in files if self.bytes + size > self.limit else ():
            if self.bytes + size <= 0.9 * self.limit:
                break
            try:
                path.unlink(missing_ok=True)
                self.known.discard(bytes.fromhex(path.stem))
                self.bytes -= freed
                self.counts["file_evictions"] += 1
            except OSError:
                self.counts["file_errors"] += 1
        if self.bytes + size > self.limit:
            raise OSError(f"a {self.noun} of {size} bytes does not fit into the limit of {self.limit:.0f}")

    def scan(self):
        """-> (nanoseconds of last use, bytes, path) of every file."""
        for directory in self.directories:
            with suppress(OSError):                             # the directory is gone
                for entry in os.scandir(directory):
                    with suppress(OSError):                     # the file is, meanwhile
                        if re.fullmatch(r"[0-9a-f]{64}" + re.escape(self.suffix), entry.name):
                            status = entry.stat()
                            yield status.st_mtime_ns, status.st_size, Path(entry.path)


class ChunkFiles(DurableFiles):
    """A file begins with a header: text that says what it holds, padded with spaces, and a CRC-32 for each part. Then come the
    parts, or (layout token-major) for each token its row of each part. Consecutive chunks of a chain lie in
    different directories, which are read in parallel. What a power failure took from a file, its checksums show."""
    PAGE = 4096

    def __init__(self, directories: tuple[Path, ...], shape: tuple[int, int, int], dtype: torch.dtype, limit: float,
                 layout: str = "chunked", content: str = "hidden states"):
        """Every chunk has `shape` [parts, tokens, width], and all of them take at most `limit` bytes. `content` says what the
        numbers are. Raises ModelError."""
        self.shape, self.dtype, self.layout, self.content = shape, dtype, layout, content
        self.part_bytes = shape[1] * shape[2] * dtype.itemsize
        self.verify = True                                      # compare checksums
        self.speeds: deque[float] = deque(maxlen=9)             # bytes/s of the last layers that were read
        super().__init__(directories, limit, "chunk", self.PAGE + shape[0] * self.part_bytes, ("--disk", "--disk-limit"))
        self.readers = ThreadPoolExecutor(len(self.directories), "read")

    def header(self, prefix) -> bytes:
        """What the file of this prefix begins with, up to the checksums."""
        text = json.dumps(dict(format="chunk 1", key=prefix.key.hex(), parent=prefix.parent.key.hex(), shape=self.shape,
                               dtype=str(self.dtype)[6:], layout=self.layout, content=self.content,
                               tokens=prefix.tokens)).encode() + b"\n"
        checksums = 4 * self.shape[0]
        return text.ljust(-(-(len(text) + checksums) // self.PAGE) * self.PAGE - checksums)

    def paths(self, prefix, index: int) -> list[Path]:
        """Where the chunk may be: round-robin by its number in the chain; elsewhere if there were other directories once."""
        first = index % len(self.directories)
        return [directory / (prefix.key.hex() + self.suffix) for directory in
                self.directories[first:] + self.directories[:first]]

    def find(self, prefix, index: int) -> StoredChunk | None:
        """The chunk's file, if it is there and its header says what it must."""
        for path in self.paths(prefix, index):
            try:
                with open(path, "rb", opener=without_waiting) as file:
                    expected, status = self.header(prefix), os.fstat(file.fileno())
                    found, size = file.read(len(expected)) if stat.S_ISREG(status.st_mode) else b"", status.st_size
            except FileNotFoundError:
                continue
            except OSError:
                self.count(file_errors=1)
                continue
            if found == expected and size == len(expected) + self.shape[0] * (4 + self.part_bytes):
                self.known.add(prefix.key)
                return StoredChunk(path, len(expected))
            self.reject(path)
        self.known.discard(prefix.key)
        return None

    def write(self, prefix, index: int, states: numpy.ndarray):
        """Keep `states` [parts, tokens, width], as integers (see as_integers), if they are not there yet. Raises OSError."""
        if self.find(prefix, index):
            return
        path, header = self.paths(prefix, index)[0], self.header(prefix)
        parts = payload = [numpy.ascontiguousarray(part) for part in states]    # copies nothing if it is so
        if self.layout == "token-major":
            payload = [numpy.ascontiguousarray(states.swapaxes(0, 1))]
        checksums = numpy.array([zlib.crc32(part) for part in parts], "<u4").tobytes()
        self.put(path, [header + checksums, *payload])

    def touch(self, prefix, index: int):
        """What this prefix stands for, `index` in its chain, is the most recently used, its beginning most of all."""
        now = time.time_ns()
        for number in range(index, -1, -1):
            for path in self.paths(prefix, number):
                with suppress(OSError):
                    os.utime(path, ns=(now, now - 1000 * number))
            prefix = prefix.parent

    def read(self, chunks: list[StoredChunk], part: int, into: torch.Tensor, done):
        """Read one part of all chunks into `into` [chunks * tokens, width], in the background, the directories in parallel. Then
        `done(whole, start, end)` is called in a thread: so many chunks from the first on are right; the seconds are those
        of time.perf_counter(). Raises RuntimeError if the threads have ended."""
        into = as_integers(into).reshape(len(chunks), *self.shape[1:])
        by_directory: dict[Path, list[int]] = {}
        for number, chunk in enumerate(chunks):
            by_directory.setdefault(chunk.path.parent, []).append(number)
        bad, left, began = [], len(by_directory), []

        def read_directory(numbers):
            nonlocal left
            began.append(time.perf_counter())
            damaged = [number for number in numbers if not self.read_one(chunks[number], part, into[number])]
            with self.lock:
                bad.extend(damaged)
                left -= 1
                last = not left
            if last:
                ended = time.perf_counter()
                if not bad:
                    self.speeds.append(into.nbytes / (ended - min(began)))
                done(min(bad, default=len(chunks)), min(began), ended)
        for numbers in by_directory.values():
            self.readers.submit(read_directory, numbers)

    def read_one(self, chunk: StoredChunk, part: int, into: numpy.ndarray, progress=None, pieces: int = 1) -> bool:
        """Whether the chunk's part [tokens, width] could be read, and is what was written. A part that lies together is read
        in `pieces`; after each, progress(bytes) says whether to go on."""
        parts, tokens, _ = self.shape
        in_order, row_bytes = self.layout == "chunked", self.part_bytes // tokens
        try:
            file = without_waiting(chunk.path, os.O_RDONLY)
            try:
                payload = chunk.header_bytes + 4 * parts
                at = payload + part * (self.part_bytes if in_order else row_bytes)
                for buffer in numpy.array_split(into.reshape(-1), pieces) if in_order else into:
                    read_at(file, buffer, at)
                    if progress and not progress(buffer.nbytes):
                        return False
                    at += buffer.nbytes if in_order else parts * row_bytes
                checksum = numpy.empty(1, "<u4")
                read_at(file, checksum, chunk.header_bytes + 4 * part)
            finally:
                os.close(file)
        except EOFError:
            self.reject(chunk.path)
            return False
        except Exception:                                       # it is gone, or the directory is; too many files are open; ...
            self.known.discard(bytes.fromhex(chunk.path.stem))
            self.count(file_errors=1)
            return False
        self.count(file_reads=pieces if in_order else tokens, file_read_bytes=into.nbytes)
        if self.verify and zlib.crc32(into) != checksum:
            self.reject(chunk.path)
            return False
        return True


def without_waiting(path, flags: int) -> int:
    """Open a file; a pipe that lies there instead is opened too, and does not wait for who would write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_at(file: int, buffer: numpy.ndarray, at: int):
    """Fill the buffer. Raises OSError, or EOFError if the file ends before that."""
    rest = memoryview(buffer).cast("B")
    while rest:
        count = os.preadv(file, [rest], at)
        if not count:
            raise EOFError
        rest, at = rest[count:], at + count
