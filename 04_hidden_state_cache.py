"""Chapter 04: keep the input of each layer, and project it to K and V again (HCache).

The problem. Computing a lost KV cache again keeps the processor busy and leaves the link idle; copying it from the host
(chapter 03) keeps the link busy and leaves the processor idle.

The mechanism. A layer's K and V are its input, the hidden states, after a norm, one projection and the rotary embedding.
With multi-head attention that input is half as large as K and V together, and projecting it costs a sixth of computing the
layer, or less. So the hidden states are kept. When a conversation comes back, the states of layer l+1 travel while those
of layer l are projected, by the same `project_kv` that the forward pass calls: link and processor work side by side.

Saving must not delay the next token. Stage one copies a step's states, all requests together, into a snapshot buffer in
host memory; stage two, threads on the host, sorts the rows into chunks of 64 tokens of one layer. Restoration reads a layer
of many tokens where saving wrote all layers of one token, and the chunks are laid out for restoration. Chunks
stay in host memory, or go to files that survive the process.

New against chapter 03: RowBuffer, ChunkPool, ChunkFiles and Saver, the tap on the forward pass that sees the states, and
restoration as a phase of the scheduler of its own, between layers of which others decode. It stands on chapter 02: KV blocks
are not copied anywhere. A device hit ends where a chunk ends, unless the store has the chunk, because a chunk
is filled by computing all of its tokens: that costs a hit up to 63 tokens, and leaves no gap in what is kept.

Source: HCache (Gao et al., EuroSys '25), sections 3, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

    python 04_hidden_state_cache.py --demo
    python 04_hidden_state_cache.py --prompt "What is a KV cache?" --disk /tmp/chunks
    python 04_hidden_state_cache.py --ingest notes.txt --disk /tmp/chunks
    python 04_hidden_state_cache.py                        # the server, on http://127.0.0.1:5000
"""
import importlib
import json
import os
import queue
import statistics
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from common import app, checkpoint
from common import link as links
from common.link import Link, Transfer, TransferError

baseline, paged = importlib.import_module("01_baseline"), importlib.import_module("02_paged_kv")
offload = importlib.import_module("03_cpu_offload")
CHUNK = 64                         # tokens (section 4.2.1)
SNAPSHOT = 1 << 20                 # bytes: less than this of a step waits for the next layer, and goes out with it
LANDING = 4                        # layers of a full context for which the device has room when they arrive
LAYOUTS = ("chunked", "token-major")

# 1. Data structures ----------------------------------------------------------------------------------------------

class RowBuffer:
    """Rows [rows, D] that are taken in runs, in a ring, and given back in any order. Threads may share it."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.next, self.lock = memory, 0, threading.Lock()
        self.taken: OrderedDict[int, bool] = OrderedDict()      # first row of a run -> whether it was given back; oldest first

    def take(self, count: int) -> int | None:
        """-> the first of `count` rows that follow each other, or None while there is no room for them."""
        with self.lock:
            oldest = next(iter(self.taken), None)
            if oldest is None:
                first, end = 0, len(self.memory)
            elif self.next <= oldest:                           # equal: full
                first, end = self.next, oldest
            elif self.next + count <= len(self.memory):
                first, end = self.next, len(self.memory)
            else:
                first, end = 0, oldest
            if first + count > end:
                return None
            self.taken[first], self.next = False, first + count
            return first

    def give_back(self, first: int):
        with self.lock:
            self.taken[first] = True
            while self.taken and next(iter(self.taken.values())):
                self.taken.popitem(last=False)


class ChunkPool(paged.BlockPool):
    """Hidden states in host memory, pinned where there is a GPU: a number stands for 64 tokens, in all layers. They are
    free, cached or referenced as blocks are; who references them is a Chunk or a Restoration."""

    def __init__(self, config, chunks: int, layout: str, dtype, device):
        self.layout = layout
        super().__init__(config, chunks, CHUNK, dtype, device)
        self.states = self.kv                                                   # [L, chunks, 64, D], in any layout

    def memory(self, config, chunks: int, size: int, dtype, device):
        """Chunked: the 64 rows of a layer lie together, and so do those of chunks with adjacent numbers. Token-major: the
        layers of a token lie together, as they are computed; a layer must then be gathered row by row."""
        layers, width = config.num_hidden_layers, config.hidden_size
        if self.layout == "token-major":
            return offload.pinned((chunks, size, layers, width), dtype, device, "The chunks").permute(2, 0, 1, 3)
        return offload.pinned((layers, chunks, size, width), dtype, device, "The chunks")

    def rows(self, layer: int, chunks: list[int]) -> list[torch.Tensor]:
        """-> the states [rows, D] of these chunks in one layer, in as few pieces as they lie in."""
        if self.layout == "token-major":
            return [self.states[layer, chunk] for chunk in chunks]
        runs = offload.adjacent(chunks, chunks)
        return [self.states[layer, first:first + count].flatten(0, 1) for first, _, count in runs]


@dataclass(eq=False)
class Chunk:
    """64 tokens whose states are on their way into the store, in the ChunkPool under number `slot`."""
    slot: int
    index: int                     # in its chain
    missing: int                   # rows, of all layers, that have not been sorted in
    prefix: paged.Prefix | None = None          # when all of its tokens are known
    jobs: int = 0                  # snapshots and writes under way
    lost: bool = False             # it will not be whole
    dropped: bool = False          # and that is because saving fell behind or failed


@dataclass(frozen=True)
class StoredChunk:
    """A file that was there, whole as far as its header says."""
    path: Path
    checksums: tuple[int, ...]     # of each layer


class ChunkFiles:
    """The durable store: 64 tokens, all layers, in a file named by the key of their prefix. A file consists of a header, which
    is text that says what it holds, padded with spaces, and ends with a CRC-32 for each part (layer); then the
    parts. Consecutive chunks of a chain lie in different directories, which are read in parallel. Any number of
    processes may share them: a file appears by being renamed, whole, and what others delete is a miss."""
    SUFFIX, PAGE = ".chunk", 4096

    def __init__(self, directories: list[Path], shape: tuple[int, ...], dtype: torch.dtype, limit: float, layout: str = "chunked"):
        """`shape` [parts, tokens, width] is that of all chunks; together they take at most `limit` bytes. Raises ModelError."""
        self.directories, self.shape, self.dtype, self.limit, self.layout = directories, shape, dtype, limit, layout
        self.part_bytes = shape[1] * shape[2] * dtype.itemsize
        self.counts, self.lock = Counter(file_reads=0, file_read_bytes=0, file_writes=0, file_write_bytes=0, file_evictions=0,
                                         file_errors=0), threading.Lock()
        self.verify = True                                      # compare checksums
        self.speeds: deque[float] = deque(maxlen=9)             # bytes/s of the last layers that were read
        self.temporaries = 0
        for directory in directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for path in directory.glob(f"*{self.SUFFIX}.*.tmp"):             # of processes that were killed
                    if not alive(path.name.split(".")[-2]):
                        path.unlink(missing_ok=True)
                (directory / f".{os.getpid()}.tmp").touch()
                (directory / f".{os.getpid()}.tmp").unlink()
            except OSError as error:
                raise checkpoint.ModelError(f"Cannot keep chunks in '{directory}' ({error.strerror}); choose another "
                                            "directory with --disk.") from None
        self.readers = ThreadPoolExecutor(len(directories), "read")
        self.bytes = sum(size for _, size, _ in self.scan())

    def header(self, prefix: paged.Prefix) -> bytes:
        """What the file of this prefix begins with, up to the checksums."""
        text = json.dumps(dict(format="hidden states 1", key=prefix.key.hex(), parent=prefix.parent.key.hex(), shape=self.shape,
                               dtype=str(self.dtype)[6:], layout=self.layout, tokens=prefix.tokens)).encode() + b"\n"
        checksums = 4 * self.shape[0]
        return text.ljust(-(-(len(text) + checksums) // self.PAGE) * self.PAGE - checksums)

    def paths(self, prefix: paged.Prefix, index: int) -> list[Path]:
        """Where the chunk may be: round-robin by its number in the chain; elsewhere if there were other directories once."""
        first = index % len(self.directories)
        return [directory / (prefix.key.hex() + self.SUFFIX) for directory in
                self.directories[first:] + self.directories[:first]]

    def find(self, prefix: paged.Prefix, index: int) -> StoredChunk | None:
        """The chunk's file, if it is there and its header says what it must."""
        for path in self.paths(prefix, index):
            try:
                with open(path, "rb", buffering=0) as file:
                    expected, size = self.header(prefix), os.fstat(file.fileno()).st_size
                    found = file.read(len(expected) + 4 * self.shape[0])
            except FileNotFoundError:
                continue
            except OSError:
                self.count(file_errors=1)
                continue
            if found[:len(expected)] == expected and size == len(found) + self.shape[0] * self.part_bytes:
                return StoredChunk(path, tuple(numpy.frombuffer(found, "<u4", offset=len(expected)).tolist()))
            self.reject(path)
        return None

    def reject(self, path: Path):
        """What lies there is not what its name says. It goes, so that the right one can take its place."""
        self.count(file_errors=1)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass

    def count(self, **what: int):
        with self.lock:
            self.counts.update(what)

    def write(self, prefix: paged.Prefix, index: int, states: numpy.ndarray):
        """Keep states [parts, tokens, width], of any integer type as wide as the dtype. Raises OSError."""
        path, size = self.paths(prefix, index)[0], self.shape[0] * self.part_bytes + self.PAGE
        if self.layout == "token-major":
            parts, payload = [numpy.ascontiguousarray(part) for part in states], [numpy.ascontiguousarray(states.swapaxes(0, 1))]
        else:
            parts = payload = [numpy.ascontiguousarray(part) for part in states]        # copies nothing if it is so
        checksums = numpy.array([zlib.crc32(part) for part in parts], "<u4").tobytes()
        with self.lock:
            self.make_room(size)
            self.bytes += size
            self.temporaries += 1
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{self.temporaries}.{os.getpid()}.tmp")
        try:
            with open(temporary, "xb", buffering=0) as file:
                for piece in (self.header(prefix) + checksums, *payload):
                    rest = memoryview(piece).cast("B")
                    while rest:
                        rest = rest[file.write(rest):]
            os.replace(temporary, path)
        except OSError:
            with self.lock:
                self.bytes -= size
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                pass
            raise
        self.count(file_writes=1, file_write_bytes=size)

    def make_room(self, size: int):
        """Delete the least recently used files until a tenth of the limit is free, if it would be passed. Looks at the
        directories, because other processes write there too. For who holds the lock."""
        if self.bytes + size <= self.limit:
            return
        files = sorted(self.scan())
        self.bytes = sum(size for _, size, _ in files)
        for _, freed, path in files:
            if self.bytes + size <= 0.9 * self.limit:
                break
            try:
                path.unlink(missing_ok=True)
                self.bytes -= freed
                self.counts["file_evictions"] += 1
            except OSError:
                self.counts["file_errors"] += 1
        if self.bytes + size > self.limit:
            raise OSError(f"a chunk of {size} bytes does not fit into the limit of {self.limit:.0f}")

    def scan(self):
        """-> (nanoseconds of last use, bytes, path) of every chunk."""
        for directory in self.directories:
            try:
                for entry in os.scandir(directory):
                    if entry.name.endswith(self.SUFFIX):
                        status = entry.stat()
                        yield status.st_mtime_ns, status.st_size, Path(entry.path)
            except OSError:                                     # gone, or a file in it
                continue

    def touch(self, paths: list[Path]):
        """These, in the order of their chain, are the most recently used, its beginning most of all."""
        now = time.time_ns()
        for number, path in enumerate(paths):
            try:
                os.utime(path, ns=(now, now - 1000 * number))
            except OSError:
                pass

    def read(self, chunks: list[StoredChunk], part: int, into: torch.Tensor, done):
        """Read one part of all chunks into `into` [chunks * tokens, width], in the background, the directories in parallel. Then
        `done(whole, start, end)` is called in a thread: so many chunks from the first on are right; the seconds are those
        of time.perf_counter()."""
        into = as_integers(into).reshape(len(chunks), *self.shape[1:])
        by_directory: dict[Path, list[int]] = {}
        for number, chunk in enumerate(chunks):
            by_directory.setdefault(chunk.path.parent, []).append(number)
        found, left, began = [], len(by_directory), []

        def some(numbers):
            nonlocal left
            began.append(time.perf_counter())
            whole = next((number for number in numbers if not self.read_one(chunks[number], part, into[number])), len(chunks))
            with self.lock:
                found.append(whole)
                left -= 1
                last = not left
            if last:
                ended = time.perf_counter()
                self.speeds.append(into.nbytes / (ended - min(began)))
                done(min(found), min(began), ended)
        for numbers in by_directory.values():
            self.readers.submit(some, numbers)

    def read_one(self, chunk: StoredChunk, part: int, into: numpy.ndarray) -> bool:
        """Whether the chunk's part [tokens, width] could be read, and is what was written."""
        parts, tokens, _ = self.shape
        buffers = [into] if self.layout == "chunked" else list(into)
        row_bytes, reads = self.part_bytes // tokens, 0
        try:
            file = os.open(chunk.path, os.O_RDONLY)
            try:
                payload = os.fstat(file).st_size - parts * self.part_bytes
                for number, buffer in enumerate(buffers):
                    at = payload + (part * self.part_bytes if self.layout == "chunked" else (number * parts + part) * row_bytes)
                    if os.preadv(file, [buffer], at) < buffer.nbytes:
                        raise OSError("the file is shorter than its header says")
                    reads += 1
            finally:
                os.close(file)
        except FileNotFoundError:                               # evicted meanwhile
            self.count(file_errors=1)
            return False
        except (OSError, ValueError):
            self.reject(chunk.path)
            return False
        self.count(file_reads=reads, file_read_bytes=into.nbytes)
        if self.verify and zlib.crc32(into) != chunk.checksums[part]:
            self.reject(chunk.path)
            return False
        return True


def alive(process: str) -> bool:
    """Whether a process with this number runs on this machine."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """The same memory for NumPy, which has no bfloat16, and whose copies and checksums take one core and no GIL."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()


# A run of rows of a step's batch: first row, rows, their chunk, and which of its tokens the first row is
Target = tuple[int, int, Chunk, int]


class Saver:
    """Two-stage saving (section 4.2.2). The engine's thread calls `snapshot`; others sort. It must not know the engine,
    which ends the threads when it goes."""

    def __init__(self, pool: ChunkPool, files: ChunkFiles | None, link: Link, rows: int, threads: int, direct: bool):
        self.pool, self.files, self.link, self.direct = pool, files, link, direct
        width, self.threads = pool.states.shape[-1], threads
        memory = offload.pinned((0 if direct else rows, width), pool.states.dtype, link.clock.device, "The snapshot buffer")
        self.buffer = RowBuffer(memory)                                         # [rows, D]
        self.rows, self.states = as_integers(memory), as_integers(pool.states)
        self.jobs, self.changed, self.under_way = queue.SimpleQueue(), threading.Condition(), 0
        self.started, self.errors = False, 0

    def snapshot(self, layer: int, states: list[torch.Tensor], targets: list[Target]) -> list[Transfer]:
        """Stage one: the inputs [T, D] of `layer` and those after it go out in one transfer. Where there is no room for
        them, their chunks are dropped: nobody waits. What is computed next may begin at once, because it writes to other memory,
        and the transfer keeps this alive."""
        targets = [target for target in targets if not target[2].lost]
        if not targets:
            return []
        if self.direct:
            return self.write_through(layer, states, targets)
        tokens, count = len(states[0]), len(states)
        first = self.buffer.take(tokens * count)
        if first is not None:
            into = self.buffer.memory[first:first + tokens * count].unflatten(0, (count, tokens))       # [count, T, D]
            try:
                transfer = self.link.copy(list(into), states, f"layer {layer}" if count == 1 else "states")
            except Exception:
                self.buffer.give_back(first)
                first, self.errors = None, self.errors + 1
        if first is None:
            for *_, chunk, _ in targets:
                chunk.lost = chunk.dropped = True
            return []
        with self.changed:
            self.under_way += 1
            for *_, chunk, _ in targets:
                chunk.jobs += 1
        if not self.started:
            self.started = True
            for _ in range(self.threads):
                threading.Thread(target=self.work, daemon=True).start()
        self.jobs.put((transfer, first, layer, count, tokens, targets))
        return [transfer]

    def work(self):
        """A thread of stage two."""
        while (job := self.jobs.get()) is not None:
            transfer, first, layer, count, tokens, targets = job
            transfer.join()
            rows = self.rows[first:first + tokens * count].reshape(count, tokens, -1)                   # [count, T, D]
            for start, length, chunk, at in targets:
                if transfer.error is None and not chunk.lost:
                    self.states[layer:layer + count, chunk.slot, at:at + length] = rows[:, start:start + length]
            self.buffer.give_back(first)
            self.arrived(count, targets, transfer.error is None)
            job = transfer = targets = chunk = None                             # and what they held

    def write_through(self, layer: int, states: list[torch.Tensor], targets: list[Target]) -> list[Transfer]:
        """Without stage one: each request's rows of each layer go straight to their chunk, a copy for each, and the next
        layer waits for all of them (the variant of Figure 14)."""
        transfers = []
        with self.changed:
            self.under_way += 1
            for *_, chunk, _ in targets:
                chunk.jobs += 1
        for number, hidden in enumerate(states):
            for start, length, chunk, at in targets:
                into = self.pool.states[layer + number, chunk.slot, at:at + length]
                transfers.append(self.link.copy(into, hidden[start:start + length], f"layer {layer + number}"))
        for transfer in transfers:
            transfer.join()
        self.arrived(len(states), targets, all(transfer.error is None for transfer in transfers))
        return transfers

    def arrived(self, layers: int, targets: list[Target], well: bool):
        """The rows of so many layers lie in their chunks. A chunk that is whole now is written out."""
        with self.changed:
            for _, length, chunk, _ in targets:
                chunk.missing -= layers * length
                if not well:
                    chunk.lost = chunk.dropped = True
                    self.errors += 1
            whole = [chunk for *_, chunk, _ in targets if chunk.missing == 0 and not chunk.lost]
        for chunk in whole if self.files else ():
            try:
                self.files.write(chunk.prefix, chunk.index, self.states[:, chunk.slot])
            except OSError:
                self.files.count(file_errors=1)
                chunk.lost = chunk.dropped = True
        with self.changed:
            self.under_way -= 1
            for *_, chunk, _ in targets:
                chunk.jobs -= 1
            self.changed.notify_all()

    def flush(self, seconds: float | None = None):
        """Wait until all that was taken is sorted and written."""
        with self.changed:
            self.changed.wait_for(lambda: self.under_way == 0, seconds)

    def close(self):
        for _ in range(self.threads):
            self.jobs.put(None)


@dataclass(eq=False)
class Load:
    """One layer's states on their way to the device, where they land in the rows from `landing` on."""
    layer: int
    rows: int
    landing: int | None            # None when they have been given back
    buffer: int | None = None      # rows of host memory that a file is read into
    whole: int | None = None       # chunks, from the first on, that could be read
    storage: tuple[float, float] | None = None                 # seconds in which that was done
    transfer: Transfer | None = None
    issued: threading.Event = field(default_factory=threading.Event)            # the transfer is there, or never will be

    @property
    def ready(self) -> bool:
        return self.issued.is_set() and (self.transfer is None or self.transfer.ready)

    def send(self, link: Link, dst: list, src: list, label: str):
        try:
            self.transfer = link.copy(dst, src, label)
        except Exception:                                       # who waits for it learns that
            pass
        self.issued.set()

    def join(self):
        self.issued.wait()
        if self.transfer is not None:
            self.transfer.join()

    def wait(self):
        """What is computed from here on sees the states. Raises TransferError, or OSError if they could not be sent at all."""
        self.issued.wait()
        if self.transfer is None:
            raise OSError(f"layer {self.layer} was not sent")
        self.transfer.wait()


@dataclass(eq=False)
class Restoration:
    """What brings one request's states back. It holds a reference to every chunk of the ChunkPool that it reads."""
    start: int                     # the first token that is brought
    chunks: list                   # numbers in the ChunkPool, or StoredChunks; the first holds token `start`
    loads: list[Load] = field(default_factory=list)
    projections: list = field(default_factory=list)            # layer, and two marks of the clock
    over: bool = False             # nothing more is projected


@dataclass(eq=False)
class Request(paged.Request):
    save: bool = True                                           # keep its hidden states
    chunk_prefixes: list[paged.Prefix] = field(default_factory=list)            # the root, then of chunks, as far as looked up
    filling: Chunk | None = None                                # whose states are being computed
    choice: dict | None = None                                  # restore or recompute, and the two estimates
    restored: Restoration | None = None

    def inherit(self, other: "Request"):
        super().inherit(other)
        self.choice, self.restored, self.chunk_prefixes = other.choice, other.restored, list(other.chunk_prefixes)


@dataclass
class Result(baseline.Result):
    choice: dict | None            # chosen ("restore" or "recompute"), restore_ms, recompute_ms; None if nothing more was kept
    restoration: dict | None       # tokens, bytes, ms, tokens_per_second, load_bubble, compute_bubble; None if there was none
    link: str                      # what the states came over, and how fast it is

    def summary(self) -> str:
        said = super().summary()
        if self.choice:
            said += "\nChosen: " + ", ".join(f"{what} {value}" for what, value in self.choice.items()) + f" ({self.link})"
        if self.restoration:
            said += "\nRestoration: " + ", ".join(f"{what} {value}" for what, value in self.restoration.items())
        return said


# 2. The engine ---------------------------------------------------------------------------------------------------

def chunk_pool_size(engine: "Engine", chunks: int | None) -> int:
    """-> `chunks`, or by default enough for four times the device's tokens (with files: for two chunks of each who
    runs, and some that are being written), but no more than a quarter of free memory. Raises ModelError."""
    config, pool = engine.model.config, engine.pool
    chunk_bytes = config.num_hidden_layers * CHUNK * config.hidden_size * engine.model.dtype.itemsize
    free = max(0, checkpoint.free_host_memory() - (0 if pool.kv.is_cuda else pool.kv.nbytes))
    if chunks is None:
        useful = 2 * engine.max_running + 64 if engine.files else -(-4 * pool.size * pool.block_size // CHUNK)
        chunks = int(min(useful, free * 0.25 // chunk_bytes))
    if chunks * chunk_bytes > free:
        raise checkpoint.ModelError(f"{chunks} chunks of {CHUNK} tokens take {chunks * chunk_bytes / 1e9:.1f} GB and "
                                    f"{free / 1e9:.1f} GB are free; choose at most --cpu-chunks {int(free // chunk_bytes)}.")
    return chunks


class Engine(offload.MeasuringEngine):
    """Chapter 02's engine, which keeps hidden states: in host memory, or in files if there are `directories` for them.
    `bytes_per_second` is the modelled link's, without a GPU."""
    Request = Request
    fields = {**paged.Engine.fields, "save": (lambda v: isinstance(v, bool), "true or false")}

    def __init__(self, model, tokenizer, end_tokens, *options, cpu_chunks: int | None = None, directories: list[Path] = (),
                 disk_limit: float = 16e9, save_threads: int = 8, direct: bool = False, layout: str = "chunked",
                 bytes_per_second: float | None = None, **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        config, dtype, device, layers = model.config, model.dtype, model.device, len(model.layers)
        # 1. What is kept, and where
        self.chunk_prefixes = paged.Prefixes(f"{model.digest.hex()} {dtype} {CHUNK} hidden {layout}")
        self.files = ChunkFiles(list(directories), (layers, CHUNK, config.hidden_size), dtype, disk_limit, layout) \
            if directories else None
        self.chunks = ChunkPool(config, chunk_pool_size(self, cpu_chunks), layout, dtype, device)
        # 2. The link, and the memory at its ends
        bytes_per_second = bytes_per_second or links.bandwidth(model)
        self.load_link, self.save_link = (Link(lane, self.clock, bytes_per_second) for lane in ("load", "save"))
        rows = LANDING * min(self.context, self.pool.size * self.pool.block_size + CHUNK)
        self.landing = RowBuffer(torch.empty(rows, config.hidden_size, dtype=dtype, device=device))             # [rows, D]
        self.reading = RowBuffer(offload.pinned((rows if self.files else 0, config.hidden_size), dtype, device, "The read buffer"))
        self.saver = Saver(self.chunks, self.files, self.save_link, layers * min(self.token_budget, self.context),
                           save_threads, direct)
        weakref.finalize(self, self.saver.close)
        # 3. What is under way
        self.saving: list[Chunk] = []                                           # oldest first
        self.targets: list[Target] = []                                         # of this step's rows
        self.tapped, self.states = 0, []                                        # layers seen in this step; not yet gone out
        self.snapshots: deque[tuple[Transfer, list]] = deque()                  # and the timelines that show them
        self.restorations: list[Restoration] = []
        self.line: deque[Request] = deque()                                     # the first may load
        # 4. What is known of this machine
        self.counts.update(restorations=0, layers_projected=0, restored_tokens=0, bytes_in=0, bytes_out=0, chunks_saved=0,
                           chunks_dropped=0, chunks_missed=0, recomputed_hits=0, transfer_errors=0)
        self.load_link.speed()                                                  # measured once; then a running median
        self.row_seconds: deque[float] = deque([self.measure_projection()], maxlen=9)          # per row and layer

    def step(self) -> bool:
        """Chapter 02's, around what has arrived meanwhile."""
        with self.stepping:
            self.settle()
            before = self.counts["steps"], self.counts["layers_projected"]
            more = super().step()
            if more and before == (self.counts["steps"], self.counts["layers_projected"]):      # nobody can go on before
                loads = (load for restoration in self.restorations for load in restoration.loads)       # something arrives
                if load := next((load for load in loads if not load.ready), None):
                    load.join()
            return more

    # Restore: load and project

    def match(self, request: Request) -> list[int]:
        return self.without_gap(request, super().match(request))

    def without_gap(self, request: Request, hits: list[int]) -> list[int]:
        """Where a device hit ends inside a chunk that nobody keeps, it is cut back to the chunk's beginning: the chunk
        is filled by computing all of it, and what comes after it could not be restored without it."""
        index, inside = divmod(len(hits) * self.pool.block_size, CHUNK)
        if not inside or not request.save or self.kept(request, index) or not self.worth_keeping():
            return hits
        return hits[:index * CHUNK // self.pool.block_size]

    def chunk_prefix(self, request: Request, index: int) -> paged.Prefix:
        return self.chunk_prefixes.nth(index, request.chunk_prefixes, request.cache_salt, request.tokens, CHUNK)

    def find_chunk(self, request: Request, index: int) -> int | StoredChunk | None:
        prefix = self.chunk_prefix(request, index)
        return self.files.find(prefix, index) if self.files else self.chunks.find(prefix)

    def kept(self, request: Request, index: int) -> bool:
        """Whether the request's chunk number `index` is in the store, or on its way."""
        if (index + 1) * CHUNK > len(request.tokens):
            return False
        prefix = self.chunk_prefix(request, index)
        return any(chunk.prefix is prefix for chunk in self.saving) or self.find_chunk(request, index) is not None

    def restore(self, request: Request):
        """Chapter 02's verb: bring what the device lacks of the longest saved prefix, if that is faster than to compute it."""
        # 1. One at a time loads, first come, first served; what others brought meanwhile is found on the device
        self.line.append(request)
        try:
            if self.line[0] is not request:
                while self.line[0] is not request:
                    yield
                self.adopt(request)

            # 2. Which chunks follow? All but the last token may be restored
            start, found = request.saved * self.pool.block_size, []
            for index in range(start // CHUNK, (len(request.tokens) - 1) // CHUNK):
                chunk = self.find_chunk(request, index)
                if chunk is None:
                    break
                found.append(chunk)
            end = (start // CHUNK + len(found)) * CHUNK

            # 3. Restore or compute? And then so
            request.computed, choice = start, None
            if end > start:
                restore, compute = self.seconds_to_restore(end - start), self.seconds_to_compute(start, end)
                choice = dict(chosen="restore" if restore <= compute else "recompute", restore_ms=round(restore * 1e3, 3),
                              recompute_ms=round(compute * 1e3, 3) if self.prefills else None)      # None: not measured yet
                if restore <= compute:
                    yield from self.bring(request, Restoration(start, found))
                else:
                    self.counts["recomputed_hits"] += request.source is None
                    self.load_link.wear_out()                                   # the link may be faster the next time
        finally:
            if request in self.line:
                self.line.remove(request)

        # 4. What was found
        self.save(request)
        if request.source is None:
            request.source = ("gpu_hit" if start else "miss") if request.computed == start else "mixed" if start else "hidden"
            request.choice, request.cached_tokens = choice, request.computed

    def adopt(self, request: Request):
        """Blocks that hold what follows in the request's tokens take the place of empty ones."""
        pool, found = self.pool, request.table[:request.saved]
        while len(found) < (len(request.tokens) - 1) // pool.block_size:
            block = pool.find(self.prefix(request, len(found)))
            if block is None:
                break
            found.append(block)
        for index in range(request.saved, len(self.without_gap(request, found))):
            pool.share(found[index])
            pool.release([request.table[index]])
            request.table[index] = found[index]
            request.saved = index + 1

    def bring(self, request: Request, restoration: Restoration):
        """Load all layers in order, and project each when it has arrived, while the next ones are on their way."""
        start, chunks, layers = restoration.start, restoration.chunks, self.model.layers
        end, size, rows = (start // CHUNK + len(chunks)) * CHUNK, self.pool.block_size, 0
        positions = torch.arange(start, end, device=self.model.device)                          # [T]
        slots = torch.tensor([request.table[position // size] * size + position % size for position in range(start, end)],
                             device=self.model.device)                                          # [T]
        if self.files:
            self.files.touch([chunk.path for chunk in chunks])
        else:
            self.chunks.touch(self.chunk_prefix(request, start // CHUNK + len(chunks) - 1))
            for chunk in chunks:
                self.chunks.share(chunk)
        self.restorations.append(restoration)
        self.counts["restorations"] += 1
        try:
            for index in range(len(layers)):
                # 1. Issue as many loads as have room where they land; when all are issued, the next in line may begin
                self.issue(restoration)
                while len(restoration.loads) <= index:                                          # others have that room
                    yield
                    self.issue(restoration)
                if len(restoration.loads) == len(layers) and request in self.line:
                    self.line.remove(request)

                # 2. Wait for this layer's states; while there are others, outside, so that they can go on
                load = restoration.loads[index]
                while not load.ready and self.others_compute(request):
                    yield
                load.wait()

                # 3. Project them into the request's blocks
                began = self.clock.mark()
                self.project(index, self.landing.memory[load.landing:load.landing + load.rows], positions, slots)
                restoration.projections.append((index, began, self.clock.mark()))
                self.landing.give_back(load.landing)
                load.landing = None
                self.counts["layers_projected"] += 1

                # 4. After as much as a sixth of a step's work, which is what projecting costs of computing, others take a step
                rows += load.rows
                if rows * 6 >= self.token_budget * len(layers) and self.others_compute(request):
                    rows = 0
                    yield
            whole = min((load.whole for load in restoration.loads if load.whole is not None), default=len(chunks))
        except (TransferError, OSError):
            self.counts["transfer_errors"] += 1
            whole = 0
        finally:
            restoration.over = True
        self.counts["chunks_missed"] += len(chunks) - whole
        request.computed = max(start, (start // CHUNK + whole) * CHUNK) if whole else start
        self.counts.update(restored_tokens=request.computed - start, bytes_in=sum(
            load.transfer.bytes for load in restoration.loads if load.transfer))
        if request.source is None and request.computed > start:
            request.restored = restoration

    def others_compute(self, request: Request) -> bool:
        return bool(self.waiting) or any(other is not request and not other.restoration for other in self.running)

    def issue(self, restoration: Restoration):
        """Begin to load the next layers, as many as have room where they land."""
        for load in restoration.loads:
            self.let_go(load)
        while len(restoration.loads) < len(self.model.layers):
            load = self.load(len(restoration.loads), restoration.chunks, restoration.start % CHUNK)
            if load is None:
                return
            restoration.loads.append(load)

    def load(self, layer: int, chunks: list, skipped: int) -> Load | None:
        """Begin to load a layer of all chunks, but for the first `skipped` rows; None while there is no room for it."""
        rows, link, label = len(chunks) * CHUNK - skipped, self.load_link, f"layer {layer}"
        landing = self.landing.take(rows)
        if landing is None:
            return None
        load, into = Load(layer, rows, landing), self.landing.memory[landing:landing + rows]    # [T, D]
        if self.files is None:
            pieces = self.chunks.rows(layer, chunks)
            pieces[0] = pieces[0][skipped:]
            load.send(link, into.split([len(piece) for piece in pieces]), pieces, label)
            return load
        load.buffer = self.reading.take(rows + skipped)
        if load.buffer is None:
            self.landing.give_back(landing)
            return None
        out_of = self.reading.memory[load.buffer:load.buffer + rows + skipped]

        def send(whole: int, *storage: float):
            load.whole, load.storage = whole, storage
            load.send(link, [into], [out_of[skipped:]], label)
        self.files.read(chunks, layer, out_of, send)
        return load

    def let_go(self, load: Load):
        """A file's rows are read into memory that others wait for."""
        if load.buffer is not None and load.ready:
            self.reading.give_back(load.buffer)
            load.buffer = None

    @torch.inference_mode()
    def project(self, index: int, hidden, positions, slots):
        """The hidden states [T, D] that entered layer `index` -> their K and V, in `slots` [T] of the pool."""
        keys, values = self.pool.kv[index].flatten(1, 2)                                        # [slots, KVH, hd] each
        k, v = self.model.layers[index].project_kv(hidden, positions)                           # [T, KVH, hd] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    # Save: a tap, and two stages

    def compute(self, work):
        """Chapter 02's; before it, where each row's states will go."""
        self.targets, self.tapped, self.states = self.plan(work), 0, []
        super().compute(work)
        if self.tapped < len(self.model.layers):                                # it failed on the way
            for *_, chunk, _ in self.targets:
                chunk.lost = True
        self.targets, self.states = [], []

    def plan(self, work) -> list[Target]:
        """Where the rows of this step's batch go."""
        targets, row = [], 0
        for request, count in work:
            start, end = request.computed, request.computed + count
            while start < end and request.save:
                index, at = divmod(start, CHUNK)
                length = min(end - start, CHUNK - at)
                of_the_prompt = (index + 1) * CHUNK <= len(request.tokens)      # all of its tokens, so samples share the chunk
                for sample in (request,) if of_the_prompt else (request, *request.forks):
                    if at == 0:
                        sample.filling = self.begin(request, index)
                    chunk = sample.filling
                    if chunk and not chunk.lost:
                        targets.append((row + count - (end - start), length, chunk, at))
                    if at + length == CHUNK and chunk:
                        chunk.prefix, sample.filling = self.chunk_prefix(request, index), None
                start += length
            row += count
        return targets

    def begin(self, request: Request, index: int) -> Chunk | None:
        """A place for the states of the request's chunk number `index`, unless they are kept already or not worth it."""
        if self.kept(request, index) or not self.worth_keeping():
            return None
        if not self.chunks.available:
            self.counts["chunks_dropped"] += 1
            return None
        chunk = Chunk(*self.chunks.allocate(1), index, len(self.model.layers) * CHUNK)
        self.saving.append(chunk)
        return chunk

    def tap(self, index: int, hidden, batch):
        """Chapter 02's tap: what enters layer `index`. In decode that is little, and all layers go out together."""
        self.tapped = index + 1
        if not self.targets:
            return
        self.states.append(hidden)
        if len(self.states) * hidden.nbytes >= SNAPSHOT or self.tapped == len(self.model.layers) or self.saver.direct:
            timelines = list({id(request): request.timeline for request, _ in batch.work if request.save}.values())
            for transfer in self.saver.snapshot(index + 1 - len(self.states), self.states, self.targets):
                self.snapshots.append((transfer, timelines))
                self.counts["bytes_out"] += transfer.bytes
            self.states = []

    def free(self, request: Request):
        for sample in (request, *request.forks):
            self.lose(sample)
        super().free(request)

    def finish(self, request: Request, outcome, counted: str):
        self.lose(request)
        if request.outcome is None and request.save and request.computed:
            self.use(request)
        super().finish(request, outcome, counted)

    def lose(self, request: Request):
        """The last chunk will not be whole: the next turn computes its tokens."""
        if request.filling:
            request.filling.lost, request.filling = True, None

    def use(self, request: Request):
        """All chunks of a request were used now."""
        count = request.computed // CHUNK
        if count and self.files:
            prefixes = [self.chunk_prefix(request, index) for index in range(count)]
            self.files.readers.submit(self.files.touch, [self.files.paths(prefix, index)[0] for index, prefix in enumerate(prefixes)])
        elif count:
            self.chunks.touch(self.chunk_prefix(request, count - 1))

    # What is on its way

    def settle(self):
        """Let go of what is over."""
        while self.snapshots and self.snapshots[0][0].ready:
            transfer, timelines = self.snapshots.popleft()
            for timeline in timelines:
                timeline.add("save", transfer.label, *transfer.span())
        for chunk in [chunk for chunk in self.saving if not chunk.jobs and (chunk.lost or not chunk.missing)]:
            self.saving.remove(chunk)
            if not chunk.lost and not self.files:
                self.chunks.register(chunk.slot, chunk.prefix)
            self.chunks.release([chunk.slot])
            self.chunks.touch(chunk.prefix)
            self.counts.update(chunks_saved=not chunk.lost, chunks_dropped=chunk.dropped)
        for restoration in [restoration for restoration in self.restorations if restoration.over]:
            for load in [load for load in restoration.loads if load.ready]:
                self.let_go(load)
                if load.landing is not None:                                    # nobody projected it
                    self.landing.give_back(load.landing)
                    load.landing = None
            if all(load.ready for load in restoration.loads):
                self.restorations.remove(restoration)
                for load in restoration.loads:
                    if load.transfer and load.transfer.error is None:
                        self.load_link.note([load.transfer])
                if not self.files:
                    self.chunks.release(restoration.chunks)

    def flush(self):
        """Wait until nothing is on its way."""
        with self.stepping:
            for load in (load for restoration in self.restorations for load in restoration.loads):
                load.join()
            self.saver.flush()
            self.settle()

    def close(self):
        super().close()
        self.saver.flush(10.0)                                                  # what was computed reaches its file

    # Restore or compute?

    def seconds_to_restore(self, tokens: int, behind: int | None = None) -> float:
        """Estimate, with `behind` bytes queued on the link before them; by default those on their way. The stages overlap: the
        slowest sets the pace, and the first layer passes all of them."""
        speed, layers = self.load_link.speed(), len(self.model.layers)
        size = tokens * self.model.config.hidden_size * self.model.dtype.itemsize
        stages = [size / speed, tokens * statistics.median(self.row_seconds)]
        if self.files and self.files.speeds:
            stages.append(size / statistics.median(self.files.speeds))
        behind = self.load_link.backlog() if behind is None else behind
        return behind / speed + sum(stages) + (layers - 1) * max(stages)

    def worth_keeping(self) -> bool:
        """Whether a full context would be restored rather than computed."""
        return self.seconds_to_restore(self.context, behind=0) <= self.seconds_to_compute(0, self.context)

    def measure_projection(self, rounds: int = 5) -> float:
        """-> seconds per row of projecting a layer's states. Before anything is in the blocks."""
        rows, seconds = min(256, self.context, self.pool.size * self.pool.block_size), []
        positions = torch.arange(rows, device=self.model.device)
        for _ in range(rounds):
            began = self.clock.mark()
            self.project(0, self.landing.memory[:rows].zero_(), positions, positions)
            began, ended = self.clock.seconds(began), self.clock.seconds(self.clock.mark())
            seconds.append((ended - began) / rows)
        return statistics.median(seconds)

    def result(self, request: Request) -> Result:
        return Result(**vars(super().result(request)), choice=request.choice, restoration=self.report(request),
                      link=str(self.load_link))

    def report(self, request: Request) -> dict | None:
        """Draw the request's restoration, and say how it went."""
        restoration, timeline = request.restored, request.timeline
        if restoration is None:
            return None
        spans = [(f"layer {layer}", *map(self.clock.seconds, marks)) for layer, *marks in restoration.projections]
        for label, *span in spans:
            timeline.add("compute", label, *span)
        loads = [load.transfer.span() for load in restoration.loads]
        for load, span in zip(restoration.loads, loads):
            timeline.add("load", load.transfer.label, *span)
            if load.storage:
                timeline.add("storage", load.transfer.label, *load.storage)
        self.row_seconds.append(statistics.median(end - start for _, start, end in spans) / restoration.loads[0].rows)
        start = min(start for start, _ in [load.storage or span for load, span in zip(restoration.loads, loads)])
        start, end = start - timeline.began, spans[-1][2] - timeline.began
        tokens = request.cached_tokens - restoration.start
        return dict(tokens=tokens, bytes=sum(load.transfer.bytes for load in restoration.loads), start_ms=round(start * 1e3, 3),
                    ms=round((end - start) * 1e3, 3), tokens_per_second=round(tokens / (end - start)),
                    **{f"{lane}_bubble": round(timeline.bubble(lane, start, end), 3) for lane in ("load", "compute")})

    def counters(self) -> dict:
        if self.stepping.acquire(blocking=False):                               # who asks may see what has arrived
            try:
                self.settle()
            finally:
                self.stepping.release()
        chunks = self.chunks
        return dict(super().counters(), chunks=chunks.size, chunks_free=len(chunks.free), chunks_cached=len(chunks.cached),
                    chunks_referenced=chunks.size - chunks.available, chunk_evictions=chunks.counts["evictions"],
                    save_errors=self.saver.errors, link=str(self.load_link),
                    **(dict(self.files.counts, file_bytes=self.files.bytes) if self.files else {}))

    def check_integrity(self):
        """Blocks and chunks agree with the tables and with what is on its way. Raises AssertionError."""
        self.pool.check_integrity([request.table for request in self.running])
        brought = [] if self.files else [restoration.chunks for restoration in self.restorations]
        self.chunks.check_integrity([[chunk.slot] for chunk in self.saving] + brought)
        assert all(request.restoration for request in self.line), "who is not being restored stands in line"
        filling = {id(sample.filling) for request in (*self.running, *self.waiting)
                   for sample in (request, *request.forks) if sample.filling}
        assert filling <= set(map(id, self.saving)), "a chunk is filled that nobody saves"
        landing = {load.landing for restoration in self.restorations for load in restoration.loads if load.landing is not None}
        assert landing == {first for first, back in self.landing.taken.items() if not back}, "rows are lost where loads land"
