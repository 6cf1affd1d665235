"""Chapter 06: compute from the front while loading from the back (Cake).

The problem. A disk or a network holds far more saved K and V than host memory, but it is slow: loading a long history from it
may take longer than computing the history again. Which of the two is faster changes with the device, the length, and what
else the processor does; and whoever picks one of them leaves the other idle.

The mechanism. Two pointers over chunks: runs of so many tokens, whole KV blocks, named by all tokens up to their end. The
engine prefills the prompt's chunks from the first one on; at the same time a loader fetches saved chunks from the last one
backwards, in two hops: from storage into host memory, and while the next is read, over the link into the request's blocks. K
and V can be put in place before those that their tokens attended to. After every step the engine looks whether its next chunk
is there; where the two meet, the history is whole. It is the late chunks that should be loaded: a token costs more to compute
the later it stands, since it attends to all before it, and to load it costs the same.

Nothing is profiled beforehand and no ratio is set: a faster device or a busier processor moves the meeting point. Only who gets
the last chunk, half loaded when the engine reaches it, and how many chunks one step takes depend on how fast both sides have
just been. What storage lacks or does not deliver is computed. In 8 bit fewer bytes travel, and the meeting point moves
towards the front, at the price of exactness. The prompt's new tokens are prefilled afterwards, as always. Only loading and
only computing are special cases. Requests are loaded one after the other; others go on in the same steps.

New against chapter 03: a storage tier below the host (the files of chapter 04, with K and V in them), the Loader and its two
hops, storage to host and host to device; Bandwidth, a slower device, modelled; K and V in 8 bit. The engine is chapter 02's, with
the measuring of chapter 03: `save` sends each chunk to its file when it is whole, by a Writer; `restore` is the two pointers,
and what it computes is part of the engine's ordinary steps, beside other requests.

Source: Cake ("Compute or Load KV Cache? Why Not Both?", Jin et al., ICML '25), section 4, appendices A and B.

Frozen: engine, bandwidth and bound, for chapter 07 and benchmarks.
"""
import math
import queue
import random
import statistics
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy
import torch

from common import checkpoint
from legacy import app, baseline, live, offload, paged
from legacy import link as links
from legacy.link import Link, Transfer, as_integers
from legacy.store import ChunkFiles

CHUNK = 512                        # tokens, at most by default (appendix A)
PIECES, PIECE = 8, 5e-3            # a chunk is read in 8 pieces, so that its pace is known early; in fewer, if one took < 5 ms
PATIENCE = 5.0                     # seconds without a piece after which nobody waits for storage any more
MODES = ("both", "compute", "load")

# 1. Data structures ----------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Chunk:
    """A chunk of a request's prompt that is to be restored, and who brings it.

    Its life: `side` is None while both may be at work on it, and then set once: to "compute" at the beginning of a step that is
    to complete it, or to "load" when it has been read and is sent on to the device. ("device", from the beginning: another
    request has left it there.) Only a copy that fails sets it back, with `absent`; then the engine takes it. `at` only grows
    until there is a side: rows before it are the engine's, computed or promised, and the loader sends the others. The buffer
    is the loader's until the transfer is ready. Loader.changed guards all of that."""
    restoration: "Restoration" = field(repr=False)
    index: int                     # in its chain
    prefix: paged.Prefix
    block_prefixes: list[paged.Prefix]
    blocks: list[int] = field(default_factory=list)            # of the device, that it fills
    at: int = 0                    # rows that are computed, or will be by the end of this step
    side: str | None = None
    absent: bool = False           # it cannot be loaded: storage has nothing right, or the link has lost it
    began: float | None = None     # when the loader began, seconds of time.perf_counter()
    bytes: int = 0                 # read so far
    buffer: int | None = None      # where it waits in host memory
    storage: tuple[float, float] | None = None                 # (start, end) of the first hop
    transfer: Transfer | None = None                           # the second hop
    settled: bool = False          # it has arrived there, or is lost, and the engine knows


@dataclass(eq=False)
class Restoration:
    """One request's chunks between the two pointers. It holds a reference to each of their blocks, whatever becomes of the
    request, until it is over and all that was sent to them has arrived (`Engine.settle`)."""
    first: int                     # number of the first chunk in the chain
    start: int                     # the first token
    end: int                       # one after the last
    mode: str                      # of MODES
    share: float                   # of each step's token budget
    began: float
    moved: float                   # when its last byte came, or the loader turned to it; seconds of time.perf_counter()
    chunks: list[Chunk] = field(default_factory=list)
    to_load: list[Chunk] = field(default_factory=list)          # the next one last
    asked: float = 0.0             # since when the device could have been reading the next one
    mark: object = None            # of the clock: what was queued to compute before may read these blocks
    steps: list[tuple[int, int, float, float]] = field(default_factory=list)    # first token, tokens, began, ended
    given_up: bool = False         # storage hangs, and nobody waits for it
    over: bool = False             # nothing more is loaded

    @property
    def blocks(self) -> list[int]:
        return [block for chunk in self.chunks for block in chunk.blocks]

    @property
    def transfers(self) -> list[Transfer]:
        return [chunk.transfer for chunk in self.chunks if chunk.transfer]


@dataclass(eq=False)
class Leaving:
    """A chunk on its way from the device to its file. It holds a reference to each of its blocks until they are copied; its
    buffer is the Writer's until the file is written."""
    prefix: paged.Prefix
    index: int
    blocks: list[int]
    timeline: object
    mark: object                   # of the clock: what was queued to compute before has written these blocks
    buffer: int | None = None
    transfer: Transfer | None = None
    written: bool | None = None    # None: not yet; False: it could not be


class Buffers:
    """Places for a chunk each in host memory, pinned where there is a GPU: one tensor, and a list of those that are free."""

    def __init__(self, config, count: int, tokens: int, dtype, device):
        shape = count, config.num_hidden_layers, 2, tokens, config.num_key_value_heads, config.head_dim
        self.memory = offload.pinned(shape, dtype, device, "Memory for chunks")         # [count, L, 2, tokens, KVH, hd]
        self.free = deque(range(count))

    def take(self) -> int | None:
        try:
            return self.free.popleft()                          # a deque may be shared by threads
        except IndexError:
            return None


class Bandwidth:
    """A device of so many megabits a second; or of one speed after the other, each for `seconds`, then from the beginning."""

    def __init__(self, mbps: tuple[float, ...], seconds: float = 0.1):
        self.mbps, self.seconds, self.lock = mbps, seconds, threading.Lock()
        self.began = self.free = 0.0                            # when the first speed began; when the device is free

    def restart(self):
        """Whatever it was reading, nobody waits for it any more; the first speed begins now."""
        with self.lock:
            self.began = self.free = time.perf_counter()

    def arrival(self, size: int, asked: float) -> float:
        """-> when so many bytes have been read, which were asked for at this time. The next ones follow behind them."""
        with self.lock:
            at = max(asked, self.free, self.began)
            slot, all_speeds = int((at - self.began) / self.seconds), sum(self.mbps) * 1e6 / 8 * self.seconds      # bytes
            if len(self.mbps) > 1 and size > all_speeds:        # once through all of them, or several times
                times, size = divmod(size, all_speeds)
                at, slot = at + times * len(self.mbps) * self.seconds, slot + int(times) * len(self.mbps)
            while True:
                rate, end = self.mbps[slot % len(self.mbps)] * 1e6 / 8, self.began + (slot + 1) * self.seconds
                if len(self.mbps) == 1 or size <= rate * (end - at):
                    self.free = at + size / rate
                    return self.free
                size, at, slot = size - rate * max(0.0, end - at), max(at, end), slot + 1

    def __str__(self):
        speeds = ":".join(f"{mbps:.4g}" for mbps in self.mbps)
        return f"modelled storage, {speeds} Mbit/s" + (f", {self.seconds:g} s each" if len(self.mbps) > 1 else "")


# 2. K and V as bytes ---------------------------------------------------------------------------------------------

def bytes_per_token(config, bits: int) -> int:
    """That K and V of all layers take: in 8 bit a byte for each number, and a float16 scale for each head."""
    numbers = config.kv_numbers_per_token
    return numbers * bits // 8 + (2 * numbers // config.head_dim if bits == 8 else 0)


def quantize(kv):
    """Symmetric, per head and token: kv [N, hd] -> whole numbers from -127 to 127 (int8) and scales [N, 1] (float16)."""
    scales = (kv.abs().amax(-1, keepdim=True).float() / 127).clamp(max=65504.0).half()                  # [N, 1]
    steps = torch.where(scales > 0, scales.float(), 1.0)                        # nothing but zeros, or nearly
    return (kv.float() / steps).round().clamp(-127, 127).to(torch.int8), scales


def pack(kv, bits: int):
    """K and V [L, 2, tokens, KVH, hd] -> what a file holds of them, for NumPy: the numbers in this order, as integers; in 8 bit
    bytes, all numbers and then all scales."""
    if bits != 8:
        return as_integers(kv).reshape(-1)
    rows = kv.flatten(0, -2)                                                    # [N, hd]
    numbers, scales = zip(*(quantize(piece) for piece in rows.split(rows_at_once(kv))))
    return torch.cat([part.view(-1).view(torch.uint8) for part in numbers + scales]).numpy()


def unpack(packed, into):
    """Bytes of 8-bit K and V -> `into` [L, 2, tokens, KVH, hd]."""
    rows, count, most = into.flatten(0, -2), rows_at_once(into), torch.finfo(into.dtype).max           # [N, hd]
    numbers = packed[:rows.numel()].view(torch.int8).view_as(rows)
    scales = packed[rows.numel():].view(torch.float16)[:, None]                 # [N, 1]
    for piece, number, scale in zip(rows.split(count), numbers.split(count), scales.split(count)):
        piece.copy_((number.float() * scale.float()).clamp(-most, most))


def rows_at_once(kv) -> int:
    """So few that torch does not take a second core, which computes."""
    return max(1, 32768 // kv.shape[-1])


def rows_of(blocks: list[int], size: int, at: int = 0) -> list[tuple[int, int, int]]:
    """Where a chunk's rows from row `at` on lie in the device's pool, blocks of `size`: (first slot, first row, rows), in as few
    pieces as they lie in."""
    found = []
    for block, number, count in offload.adjacent(blocks, range(len(blocks))):
        first = max(number * size, at)
        if first < (number + count) * size:
            found.append((block * size + first - number * size, first, (number + count) * size - first))
    return found


def both_sides(slots, kv, blocks: list[int], size: int, at: int = 0) -> tuple[list, list]:
    """The rows of a chunk from row `at` on, in the device's slots [L, 2, slots, KVH, hd] and in its buffer `kv` [L, 2, tokens,
    KVH, hd]: two lists of views [L, 2, count, KVH, hd]."""
    rows = rows_of(blocks, size, at)
    return [slots[:, :, slot:slot + count] for slot, _, count in rows], [kv[:, :, row:row + count] for _, row, count in rows]


# 3. The loader and the writer: threads that do not know the engine, which ends them when it goes ------------------

@dataclass(eq=False)
class Reader:
    """A thread of the loader, and what it is at."""
    chunk: Chunk | None = None
    retired: bool = False          # it ends when it comes back


class Loader:
    """Reads chunks in the background, each request's last one first, the requests in the order in which they came; and sends them
    on to the device (B.1). There are as many threads as directories. One that is still at a finished request's chunk when
    the next request comes is retired, for it may hang: another takes its place, it keeps its buffer, and ends when it
    returns."""
    MOST_RETIRED = 8

    def __init__(self, files: ChunkFiles, bits: int, buffers: Buffers, link: Link, pool: paged.BlockPool,
                 bandwidth: Bandwidth | None):
        self.files, self.bits, self.buffers, self.link, self.bandwidth = files, bits, buffers, link, bandwidth
        self.slots, self.block_size = pool.kv.flatten(2, 3), pool.block_size                    # [L, 2, slots, KVH, hd]
        self.chunk_bytes = files.shape[0] * files.part_bytes
        # Guards all that follows, what Chunk says, and of a Restoration `to_load`, `asked`, `moved` and `over`
        self.changed = threading.Condition()
        self.line: list[Restoration] = []                       # oldest first; the first is waited for
        self.readers: list[Reader] = []
        self.retired: list[Reader] = []                         # that have not come back
        self.sent: deque[Chunk] = deque()                       # whose buffers are free when they have arrived
        self.pace: float | None = None                          # seconds that the last chunk took
        self.reads = 0                                          # that are over, well or not
        self.closed, self.errors = False, 0
        self.speeds: deque[float] = deque(maxlen=9)             # bytes/s of the last chunks

    # Called by the engine

    def begin(self, restoration: Restoration):
        with self.changed:
            most = min(self.MOST_RETIRED, len(self.buffers.memory) - len(self.files.directories))       # each has a buffer
            late = [reader for reader in self.readers if reader.chunk and reader.chunk.restoration.over]
            for reader in late[:max(0, most - len(self.retired))]:
                reader.retired = True                           # it may hang: another takes its place
                self.readers.remove(reader)
                self.retired.append(reader)
            while len(self.readers) < len(self.files.directories):
                reader = Reader()
                threading.Thread(target=self.work, args=(reader,), daemon=True).start()         # waits for this lock
                self.readers.append(reader)
            if self.bandwidth and not self.line:
                self.bandwidth.restart()
            self.line.append(restoration)
            self.changed.notify_all()

    def drop(self, restoration: Restoration):
        """Nothing more of it is loaded; what is on its way to the device arrives."""
        with self.changed:
            restoration.over, restoration.to_load = True, []
            self.next_in_line()
            self.changed.notify_all()

    def next_in_line(self):
        """Who has nothing left to load leaves the line. For who holds the lock."""
        first, being_read = self.line[:1], [reader.chunk.restoration for reader in self.readers if reader.chunk]
        self.line = [other for other in self.line if not other.over and (other.to_load or other in being_read)]
        if self.line and self.line[:1] != first:
            self.line[0].moved = time.perf_counter()

    def stalled(self, restoration: Restoration) -> bool:
        """Whether there is no use in waiting for what it still lacks. For who holds the lock."""
        able = [reader for reader in self.readers if not (reader.chunk and reader.chunk.restoration.over)]
        if not able or restoration not in self.line:
            return True
        return self.line[0] is restoration and time.perf_counter() - restoration.moved > PATIENCE

    def wait(self, seen: int, seconds: float = 5e-3):
        """Until something is over that was not when `reads` was `seen`, or for so long."""
        with self.changed:
            self.changed.wait_for(lambda: self.reads != seen, seconds)

    def estimate(self, restoration: Restoration) -> tuple[float, float]:
        """-> seconds until what is being read has been read, and those for each chunk after it; infinite if nobody knows. For who
        holds the lock."""
        now, pace = time.perf_counter(), self.pace
        if self.line[:1] != [restoration] or not self.readers:
            return math.inf, math.inf
        rests = [0.0]
        for chunk in (reader.chunk for reader in self.readers if reader.chunk and reader.chunk.restoration is restoration):
            elapsed, share = now - chunk.began, chunk.bytes / self.chunk_bytes
            if share:                                           # as fast as it has come so far
                rests.append(elapsed * (1 - share) / share)
                pace = elapsed / share
            else:                                               # what the last one took, and no less than it has taken already
                rests.append(max(elapsed, math.inf if pace is None else pace - elapsed))
        return max(rests), math.inf if pace is None else pace / len(self.readers)

    def reap(self):
        """Give back the buffers of what has arrived. For who holds the lock."""
        while self.sent and self.sent[0].transfer.ready:
            self.give_back(self.sent.popleft())

    def give_back(self, chunk: Chunk):
        self.buffers.free.append(chunk.buffer)
        chunk.buffer = None

    # The threads

    def work(self, reader: Reader):
        while self.take(reader):
            try:
                self.load(reader.chunk)
            except Exception:                                   # whatever it is, the chunk is computed
                self.fail(reader.chunk, 1)
            with self.changed:
                reader.chunk = None
                self.reads += 1
                self.changed.notify_all()
        with self.changed:
            if reader in self.retired:
                self.retired.remove(reader)

    def take(self, reader: Reader) -> bool:
        """The next chunk, and a buffer for it -> False when the thread is to end."""
        with self.changed:
            while not (self.closed or reader.retired):
                self.reap()
                chunk = next((restoration.to_load[-1] for restoration in self.line if restoration.to_load), None)
                if chunk and chunk.side is not None:            # somebody has it
                    chunk.restoration.to_load.pop()
                elif chunk and (buffer := self.buffers.take()) is not None:
                    chunk.restoration.to_load.pop()
                    chunk.buffer, chunk.began, reader.chunk = buffer, time.perf_counter(), chunk
                    return True
                else:
                    self.next_in_line()
                    self.changed.wait(5e-3 if chunk else None)
            return False

    def load(self, chunk: Chunk):
        """Both hops of one chunk: read it, and send it on."""
        # 1. The first hop
        stored = self.files.find(chunk.prefix, chunk.index)
        if stored is None or not self.read(chunk, stored):      # ChunkFiles counts what was wrong
            return self.fail(chunk)
        with self.changed:
            chunk.storage = chunk.began, time.perf_counter()
            self.pace = chunk.storage[1] - chunk.storage[0]
            self.speeds.append(self.chunk_bytes / self.pace)
            before = [other.transfer for other in self.sent][:-1]
        # 2. One travels and one waits: more could as well be computed, while they wait here
        if before and not before[-1].ready:
            before[-1].join()
            with self.changed:
                chunk.restoration.asked = chunk.restoration.moved = time.perf_counter()         # the device had to wait for us
        # 3. The second hop. A pinned copy is only queued under the lock; an unpinned one would hold up the engine
        with self.changed:
            self.reap()
            if self.wanted(chunk):
                self.send(chunk)
                chunk.side = "load"
                self.sent.append(chunk)
            else:
                self.give_back(chunk)

    def fail(self, chunk: Chunk, errors: int = 0):
        with self.changed:
            chunk.absent = self.wanted(chunk)
            self.errors += errors
            self.give_back(chunk)

    def wanted(self, chunk: Chunk) -> bool:
        """Whether it is still open. For who holds the lock."""
        return chunk.side is None and not chunk.restoration.over

    def read(self, chunk: Chunk, stored) -> bool:
        """The first hop: a file into the chunk's buffer -> whether it is what was written. It ends early when the chunk is no
        longer wanted."""
        kv, restoration = self.buffers.memory[chunk.buffer], chunk.restoration                  # [L, 2, tokens, KVH, hd]
        packed = torch.empty(self.chunk_bytes, dtype=torch.uint8) if self.bits == 8 else kv.view(-1).view(torch.uint8)
        pieces = PIECES if self.pace is None else min(PIECES, max(1, int(self.pace / PIECE)))
        sizes = deque(len(piece) for piece in packed.tensor_split(pieces))

        def due() -> float:
            """When the next piece will have arrived."""
            return self.bandwidth.arrival(sizes.popleft(), restoration.asked) if self.bandwidth and sizes else 0.0
        arrival = due()

        def progress(size: int) -> bool:
            nonlocal arrival
            with self.changed:
                self.changed.wait_for(lambda: not self.wanted(chunk), max(0.0, arrival - time.perf_counter()))
                chunk.bytes += size
                restoration.moved = time.perf_counter()
                if wanted := self.wanted(chunk):
                    arrival = due()
                return wanted
        if not self.files.read_one(stored, 0, packed.numpy(), progress, pieces):
            return False
        if self.bits == 8:
            unpack(packed, kv)
        return True

    def send(self, chunk: Chunk):
        """The second hop: from host memory into the request's blocks, all layers in one transfer. For who holds the lock."""
        into, out_of = both_sides(self.slots, self.buffers.memory[chunk.buffer], chunk.blocks, self.block_size, chunk.at)
        chunk.transfer = self.link.copy(into, out_of, f"chunk {chunk.index}", chunk.restoration.mark)

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Writer:
    """Copies chunks out of the device's blocks as soon as there are buffers for them, and writes them to their files."""

    def __init__(self, files: ChunkFiles, bits: int, buffers: Buffers, link: Link, pool: paged.BlockPool):
        self.files, self.bits, self.buffers, self.link = files, bits, buffers, link
        self.slots, self.block_size = pool.kv.flatten(2, 3), pool.block_size                    # [L, 2, slots, KVH, hd]
        self.jobs, self.threads, self.lock = queue.SimpleQueue(), [], threading.Lock()
        self.waiting: deque[Leaving] = deque()                  # for a buffer
        self.stopped = False                                    # nothing more is written

    def put(self, leaving: Leaving):
        with self.lock:
            self.waiting.append(leaving)
        self.send()

    def take_back(self, leaving: Leaving) -> bool:
        """Whether it was still waiting, and now is not."""
        with self.lock:
            if leaving in self.waiting:
                self.waiting.remove(leaving)
                return True
        return False

    def send(self):
        """The first hop of those that wait, as far as there are buffers: from the device's blocks to host memory."""
        with self.lock:
            while self.waiting and (buffer := self.buffers.take()) is not None:
                leaving = self.waiting.popleft()
                leaving.buffer = buffer
                out_of, into = both_sides(self.slots, self.buffers.memory[buffer], leaving.blocks, self.block_size)
                try:
                    self.start()
                    leaving.transfer = self.link.copy(into, out_of, f"chunk {leaving.index}", leaving.mark)
                except Exception:                                               # the link does not take it
                    self.buffers.free.append(buffer)
                    leaving.written = False
                else:
                    self.jobs.put(partial(self.write, leaving))

    def later(self, job):
        """Call it in one of the threads."""
        with self.lock:
            self.start()
            self.jobs.put(job)

    def start(self):
        """The threads, when there is something to do. For who holds the lock."""
        while len(self.threads) < len(self.files.directories):
            thread = threading.Thread(target=self.work, daemon=True)
            thread.start()
            self.threads.append(thread)

    def work(self):
        while (job := self.jobs.get()) is not None:
            job()
            del job                                             # and what it held

    def write(self, leaving: Leaving):
        """The second hop: to its file."""
        written = False
        try:
            leaving.transfer.join()
            if leaving.transfer.error is None and not self.stopped:
                payload = pack(self.buffers.memory[leaving.buffer], self.bits)
                self.files.write(leaving.prefix, leaving.index, payload.reshape(self.files.shape))
                written = True
        except Exception:                                       # a full disk, a directory that is gone; it is counted
            pass
        with self.lock:
            self.buffers.free.append(leaving.buffer)
            leaving.written = written
        self.send()

    def close(self):
        for _ in self.threads:
            self.jobs.put(None)

    def stop(self):
        """Write nothing more; what is being written is waited for, unless it takes long."""
        self.stopped = True
        self.close()
        for thread in self.threads:
            thread.join(2.0)


# 4. The engine ---------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Request(paged.Request):
    save: bool = True                                           # keep its chunks
    mode: str | None = None                                     # of MODES; None: the engine's
    gpu_share: float | None = None                              # of each step's token budget that its prefill may take; or None
    chunk_prefixes: list[paged.Prefix] = field(default_factory=list)            # the root, then of chunks, as far as looked up
    in_flight: Restoration | None = None                        # until all of it has arrived
    restored: Restoration | None = None                         # what its Result reports
    scheduled: int = 0                                          # tokens to compute in this step, while it is being restored
    kept: int = 0                                               # chunks that were looked at by `save`

    def inherit(self, other: "Request"):
        super().inherit(other)
        self.restored, self.chunk_prefixes, self.kept = other.restored, list(other.chunk_prefixes), other.kept


@dataclass
class Result(baseline.Result):
    restoration: dict | None       # how the two pointers met; None without a whole chunk to restore
    storage: str                   # where chunks came from, and how fast it is
    link: str

    def summary(self) -> str:
        said = super().summary()
        if self.restoration:
            said += f"\nRestoration ({self.storage}; {self.link}): " + ", ".join(
                f"{what} {value}" for what, value in self.restoration.items())
        return said


class Engine(offload.MeasuringEngine):
    """Chapter 02's engine, which keeps K and V in files, in chunks of `chunk` tokens, at most `disk_limit` bytes of them, in
    `kv_bits` a number (8, or as many as the model's). Without `directories` the files go with the engine. `cpu_chunks` of them
    have room in host memory on their way. `bandwidth` models slower storage, `bytes_per_second` a link, without a GPU. Raises
    ModelError for what does not fit."""
    Request = Request
    fields = {**paged.Engine.fields, "save": (lambda v: isinstance(v, bool), "true or false"),
              "mode": (lambda v: v in MODES, f"one of {', '.join(MODES)}"),
              "gpu_share": (lambda v: app.real(v, 1e-3, 1), "a number from 0.001 to 1")}

    def __init__(self, model, tokenizer, end_tokens, *options, directories: tuple[Path, ...] = (), disk_limit: float = 16e9,
                 chunk: int | None = None, cpu_chunks: int | None = None, kv_bits: int | None = None, mode: str = "both",
                 gpu_share: float = 1.0, bandwidth: Bandwidth | None = None, bytes_per_second: float | None = None,
                 **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        config, dtype, device, block_size = model.config, model.dtype, model.device, self.pool.block_size
        self.mode, self.gpu_share = mode, gpu_share
        # 1. What a chunk is. A context has 32, unless they would be very long
        self.chunk = chunk or max(1, min(CHUNK, self.context // 32) // block_size) * block_size
        model_bits = 8 * dtype.itemsize
        self.kv_bits = kv_bits or model_bits
        if self.kv_bits not in (8, model_bits):
            raise checkpoint.ModelError(f"K and V of this model have {model_bits} bit; choose --kv-bits {model_bits} or 8.")
        if self.chunk % block_size:
            raise checkpoint.ModelError(f"A chunk of {self.chunk} tokens is not whole blocks of {block_size}; choose --chunk "
                                        f"{max(1, self.chunk // block_size) * block_size}.")
        # 2. The link, and the memory on the way
        bytes_per_second = bytes_per_second or links.bandwidth(model)
        self.load_link, self.save_link = (Link(lane, self.clock, bytes_per_second) for lane in ("load", "save"))
        self.load_link.speed()                                                  # measured once; then a running median
        # Of each directory a chunk is read and another has been; two are on the link
        least, size = 2 * max(1, len(directories)) + 2, self.pool.kv[:, :, 0].nbytes * self.chunk // block_size
        cpu_chunks = offload.host_pool_size(self.pool, cpu_chunks, 2 * least + self.context // self.chunk, size,
                                            f"chunks of {self.chunk} tokens", "--cpu-chunks")
        if cpu_chunks <= least:
            raise checkpoint.ModelError(f"There is room for {cpu_chunks} chunks of {self.chunk} tokens in host memory, and at "
                                        f"least {least + 1} are needed; choose a smaller --chunk, or a larger --cpu-chunks.")
        reading = Buffers(config, min(2 * least, cpu_chunks - 1), self.chunk, dtype, device)
        writing = Buffers(config, cpu_chunks - len(reading.free), self.chunk, dtype, device)
        # 3. Where chunks are kept
        self.folder = None if directories else tempfile.TemporaryDirectory(prefix="kv-chunks-", ignore_cleanup_errors=True)
        width = bytes_per_token(config, self.kv_bits)
        content = f"K and V, {self.kv_bits} bit" + (", a float16 scale for each head and token" if self.kv_bits == 8 else "")
        self.chunk_prefixes = paged.Prefixes(f"{model.digest.hex()} {dtype} {self.chunk} {content}")
        dtype_of_files, width = (torch.uint8, width) if self.kv_bits == 8 else (dtype, width // dtype.itemsize)
        # One part, whose size is that of [tokens, width]; in it the numbers lie as `pack` says
        self.files = ChunkFiles(directories or (Path(self.folder.name),), (1, self.chunk, width), dtype_of_files, disk_limit,
                                content=content)
        self.loader = Loader(self.files, self.kv_bits, reading, self.load_link, self.pool, bandwidth)
        self.writer = Writer(self.files, self.kv_bits, writing, self.save_link, self.pool)
        weakref.finalize(self, self.loader.close)
        weakref.finalize(self, self.writer.close)
        # 4. What is under way; the engine's thread alone, which holds `stepping`, touches it, and the pool
        self.restorations: list[Restoration] = []
        self.leaving: dict[paged.Prefix, Leaving] = {}                          # oldest first
        self.stored = live.Keys()                                               # what lies in files, for the page
        self.awaited: list[Transfer] = []                                       # that this step's forward pass reads
        self.counts.update(restorations=0, chunks_computed=0, chunks_loaded=0, chunks_missed=0, loaded_tokens=0, chunks_saved=0,
                           chunks_dropped=0, transfer_errors=0, storage_stalls=0)

    def step(self) -> bool:
        """Chapter 02's, around what has arrived meanwhile."""
        with self.stepping:
            seen = self.loader.reads
            self.settle()
            steps, more = self.counts["steps"], super().step()
            if more and self.counts["steps"] == steps:                          # all wait for what is on its way
                self.loader.wait(seen)
            return more

    # Restore: two pointers

    def chunk_prefix(self, request: Request, index: int) -> paged.Prefix:
        return self.chunk_prefixes.nth(index, request.chunk_prefixes, request.cache_salt, request.tokens, self.chunk)

    def restore(self, request: Request):
        """Chapter 02's verb: fill the blocks of all whole chunks of the request's prompt, from both ends."""
        # 1. What another request is restoring is waited for, and then found on the device
        while self.brought_by_another(request):
            request.scheduled = 0
            yield
            self.adopt(request)
        start = request.computed = request.saved * self.pool.block_size
        end = (len(request.tokens) - 1) // self.chunk * self.chunk              # the last token is computed in any case
        restoration = self.set_out(request, start, end) if start < end else None

        # 2. In every step the next tokens from the front are computed, until the rest is there
        try:
            if restoration and restoration.mode != "compute":
                self.loader.begin(restoration)
            while request.computed < end:
                request.scheduled = self.advance(request, restoration)
                if request.computed < end:
                    yield
            # 3. Where the two met, the last chunks may still be on the link; alone, the request waits in `compute`
            while restoration and not all(transfer.ready for transfer in restoration.transfers) and self.others_compute(request):
                request.scheduled = 0
                yield
        finally:
            if restoration:
                self.loader.drop(restoration)

        # 4. What was found
        loaded, on_device = self.count(restoration) if restoration else (0, 0)
        if request.source is None:
            on_device += start
            request.restored, request.cached_tokens = restoration, on_device + loaded
            request.source = ("mixed" if on_device else "storage") if loaded else "gpu_hit" if on_device else "miss"

    def set_out(self, request: Request, start: int, end: int) -> Restoration:
        """The chunks, and a reference to each of their blocks. What is on the device behind a gap need not be brought."""
        pool, size, mode = self.pool, self.chunk, request.mode or self.mode
        now, blocks = time.perf_counter(), size // pool.block_size
        restoration = Restoration(start // size, start, end, mode, self.share(request), began=now, moved=now, asked=now,
                                  mark=self.clock.mark())
        for index in range(start // size, end // size):
            numbers = range(index * blocks, (index + 1) * blocks)
            chunk = Chunk(restoration, index, self.chunk_prefix(request, index), [
                self.prefix(request, number) for number in numbers])
            restoration.chunks.append(chunk)
            on_device = [pool.find(prefix) for prefix in chunk.block_prefixes]
            if None not in on_device:
                chunk.side = "device"
                for number, block in zip(numbers, on_device):
                    if request.table[number] != block:
                        self.replace(request, number, block)
            chunk.blocks = request.table[index * blocks:(index + 1) * blocks]
        restoration.chunks[0].at, request.in_flight = start % size, restoration
        for block in restoration.blocks:
            pool.share(block)
        self.restorations.append(restoration)
        self.counts["restorations"] += 1
        if mode != "compute":
            restoration.to_load = list(restoration.chunks)
        return restoration

    def brought_by_another(self, request: Request) -> bool:
        """Whether another request's restoration is about to bring this one's next chunk, and is no slower about it."""
        index = request.saved * self.pool.block_size // self.chunk
        if (index + 1) * self.chunk >= len(request.tokens):
            return False
        prefix, mode, share = self.chunk_prefix(request, index), request.mode or self.mode, self.share(request)
        return any(chunk.prefix is prefix for restoration in self.restorations for chunk in restoration.chunks
                   if restoration.share >= share and restoration.mode in ("both", mode))

    def advance(self, request: Request, restoration: Restoration) -> int:
        """Move past what is there (B.2) -> how many tokens to compute in this step: none if the loader will be done first."""
        size = self.chunk
        with self.loader.changed:
            while request.computed < restoration.end:
                chunk = restoration.chunks[request.computed // size - restoration.first]
                at = request.computed % size
                if chunk.side == "load" and chunk.transfer.ready and chunk.transfer.error is not None:
                    chunk.side, chunk.absent = None, True                       # it was lost on the second hop
                    self.counts["transfer_errors"] += 1
                if chunk.side not in ("load", "device"):
                    earlier = [other for other in restoration.chunks if other.transfer and other.index < chunk.index]
                    if not all(other.transfer.ready for other in earlier) and self.others_compute(request):
                        return 0                                                # what it attends to must be there
                    return 0 if self.waits(request, chunk) else self.claim(request, chunk)
                if at < chunk.at and chunk.side == "load":                      # promised, but the step's budget ended before
                    return min(chunk.at - at, self.prefill_limit(request))
                request.computed += size - at
        return 0

    def waits(self, request: Request, chunk: Chunk) -> bool:
        """Whether the loader is expected to bring the engine's next chunk, for it the last one, before it would be computed."""
        restoration, loader, size = chunk.restoration, self.loader, self.chunk
        if chunk.side == "compute" or chunk.absent or restoration.mode == "compute" or restoration.given_up:
            return False
        if loader.stalled(restoration):
            restoration.given_up = True
            self.counts["storage_stalls"] += 1
            return False
        if restoration.mode == "load":
            return True
        rest, pace = loader.estimate(restoration)
        queued = sum(other.index >= chunk.index for other in restoration.to_load if other.side is None)
        hop = loader.link.seconds(loader.link.backlog() + self.pool.kv[:, :, 0].nbytes * size // self.pool.block_size)
        start = chunk.index * size + max(chunk.at, request.computed % size)
        computing = self.seconds_per_token(request, start) * ((chunk.index + 1) * size - start)
        return rest + (queued * pace if queued else 0.0) + hop <= computing < math.inf          # 0 * inf is nan

    def claim(self, request: Request, chunk: Chunk) -> int:
        """This chunk is the engine's, and while the loader is far away those after it -> how many tokens to compute in this
        step. A chunk that the step will not complete stays open."""
        restoration, size, most = chunk.restoration, self.chunk, self.prefill_limit(request)
        at, count, ahead = request.computed % size, 0, self.ahead(request, restoration)
        for number, each in enumerate(restoration.chunks[chunk.index - restoration.first:]):
            free = each.side is None and each.buffer is None and (each.absent or number < ahead)
            if number and not free and each.side != "compute":                  # claimed, when a step's budget ended before
                break
            if size - at > most - count:
                each.at = max(each.at, at + most - count)
                return most
            each.side, count, at = "compute", count + size - at, 0
        return count

    def ahead(self, request: Request, restoration: Restoration) -> float:
        """How many chunks one step may take, because long steps cost less a token: those that the engine will have computed at
        the meeting point, if both sides go on as they do; of four or more only three quarters, since they may not; at least
        one."""
        if restoration.mode == "compute" or restoration.given_up:
            return math.inf
        rest, pace = self.loader.estimate(restoration)
        left = sum(chunk.side is None and not chunk.absent for chunk in restoration.to_load)
        computing = self.seconds_per_token(request, request.computed) * self.chunk
        if not left or math.inf in (rest, pace, computing):
            return 1
        chunks = (rest + left * pace) / (computing + pace)
        return max(1, math.floor(chunks if chunks < 4 else chunks * 3 / 4))

    def prefill_limit(self, request: Request) -> int:
        """Tokens of the request's prefill that a step may compute."""
        return max(1, int(self.share(request) * self.token_budget))

    def share(self, request: Request) -> float:
        return self.gpu_share if request.gpu_share is None else request.gpu_share

    def seconds_per_token(self, request: Request, start: int) -> float:
        """As fast as the request's last step was, in which others may have had their share; before it, as prefill was, with what
        the others will have of the first step."""
        if request.in_flight.steps:
            _, count, began, ended = request.in_flight.steps[-1]
            return (ended - began) / count
        tokens = min(self.chunk, self.prefill_limit(request))
        others = sum(self.turn(other) for other in self.running if other is not request)
        return self.seconds_to_compute(start, start + min(tokens + others, self.token_budget)) / tokens

    def turn(self, request: Request) -> int:
        return request.scheduled if request.restoration else min(request.pending, self.prefill_limit(request))

    def compute(self, work):
        """Chapter 02's, for those whose chunks have arrived."""
        self.awaited = []
        work = [(request, count) for request, count in work if self.has_arrived(request)]
        if not work:
            return
        restoring = [(request.in_flight, request.computed, count) for request, count in work if request.restoration]
        steps, began = self.counts["steps"], time.perf_counter()
        super().compute(work)
        if self.counts["steps"] > steps:
            for restoration, start, count in restoring:
                restoration.steps.append((start, count, began, time.perf_counter()))

    def has_arrived(self, request: Request) -> bool:
        """What the forward pass reads of loaded chunks must be there. If some of it was lost, the request starts over."""
        restoration, size = request.in_flight, self.chunk
        for chunk in restoration.chunks if restoration else ():
            if chunk.side == "load" and (chunk.index + 1) * size <= request.computed:
                if self.load_link.modelled:
                    chunk.transfer.join()
                if chunk.transfer.error is not None:
                    self.counts["transfer_errors"] += 1
                    if not request.answer.tokens:                               # nothing was found after all
                        request.source = None
                    request.mode = "compute"
                    self.preempt(request)
                    return False
                self.awaited.append(chunk.transfer)
        if not request.restoration:
            request.in_flight = None
        return True

    def tap(self, index: int, hidden, batch):
        """Before the first layer reads them; a GPU waits for its own link, while the host goes on."""
        for transfer in self.awaited if index == 0 else ():
            late, began = not transfer.ready, self.clock.mark()
            transfer.wait()
            if late:
                self.stalls += began, self.clock.mark()

    def preempt(self, request: Request):
        """Chapter 02's. Its blocks are free only when what travels into them has arrived, and who preempts needs them now."""
        super().preempt(request)
        for transfer in (transfer for restoration in self.restorations if restoration.over for transfer in restoration.transfers):
            transfer.join()
        self.settle()

    def free(self, request: Request):
        request.in_flight, request.scheduled, request.kept = None, 0, 0
        super().free(request)

    # Save: each chunk goes to its file when it is whole

    def save(self, request: Request):
        """Chapter 02's verb; chunks that are not in files are sent there. They wait until there is room in host memory."""
        super().save(request)
        blocks = self.chunk // self.pool.block_size
        for index in range(request.kept, request.computed // self.chunk if request.save else 0):
            request.kept, prefix = index + 1, self.chunk_prefix(request, index)
            if prefix.key not in self.files.known and prefix not in self.leaving:
                leaving = Leaving(prefix, index, request.table[index * blocks:(index + 1) * blocks], request.timeline,
                                  self.clock.mark())
                for block in leaving.blocks:
                    self.pool.share(block)
                self.leaving[prefix] = leaving
                self.writer.put(leaving)

    def forget_one(self, hits: list[int] = ()) -> bool:
        """The oldest chunk that waits for room in host memory, and would leave a block free, is not saved -> whether there was
        one. It will be when somebody computes it again."""
        for leaving in self.leaving.values():
            if self.held_alone(leaving, hits) and self.writer.take_back(leaving):
                self.pool.release(leaving.blocks)
                del self.leaving[leaving.prefix]
                self.counts["chunks_dropped"] += 1
                return True
        return False

    def held_alone(self, leaving: Leaving, hits: list[int] = ()) -> int:
        """Blocks that nobody else holds, nor is about to."""
        return sum(self.pool.references[block] == 1 and block not in hits for block in leaving.blocks)

    def find_room(self, request: Request, hits: list[int], empty: int) -> bool:
        """Chapter 02's; who wants to come in is worth more than chunks that wait for room in host memory."""
        if super().find_room(request, hits, empty):
            return True
        waiting = sum(self.held_alone(leaving, hits) for leaving in self.leaving.values() if leaving.transfer is None)
        if super().find_room(request, hits, empty - waiting):
            while self.forget_one(hits) and not super().find_room(request, hits, empty):
                pass
        return super().find_room(request, hits, empty)

    def make_room(self, request: Request):
        """Chapter 02's; and so is who runs. Before somebody is preempted, blocks that are being copied out are waited for."""
        while self.lacks_slot(request) and not self.pool.available and self.forget_one():
            pass
        if self.lacks_slot(request) and not self.pool.available:
            for leaving in self.leaving.values():
                if leaving.transfer:
                    leaving.transfer.join()
            self.settle()
        super().make_room(request)

    def finish(self, request: Request, outcome, counted: str):
        if request.outcome is None and (count := request.computed // self.chunk):
            with suppress(RuntimeError):                                        # no thread can be started
                self.writer.later(partial(self.files.touch, self.chunk_prefix(request, count - 1), count - 1))
        super().finish(request, outcome, counted)

    # What is on its way

    def settle(self):
        """Let go of what has arrived; what was loaded can be found by others from now on."""
        with self.loader.changed:
            self.loader.reap()
        for restoration in list(self.restorations):
            for chunk in restoration.chunks:
                if chunk.transfer and not chunk.settled and chunk.transfer.ready:
                    chunk.settled = True
                    if chunk.transfer.error is None:
                        self.load_link.note([chunk.transfer])
                        for block, prefix in zip(chunk.blocks, chunk.block_prefixes) if not chunk.at else ():
                            self.pool.register(block, prefix)
            if restoration.over and all(chunk.settled for chunk in restoration.chunks if chunk.transfer):
                self.restorations.remove(restoration)
                self.pool.release(restoration.blocks)
        for leaving in list(self.leaving.values()):
            if leaving.blocks and (leaving.transfer.ready if leaving.transfer else leaving.written is False):
                self.pool.release(leaving.blocks)
                leaving.blocks = []
                if leaving.transfer:
                    leaving.timeline.add("save", leaving.transfer.label, *leaving.transfer.span())
            if leaving.written is not None and not leaving.blocks:
                del self.leaving[leaving.prefix]
                self.counts["transfer_errors"] += leaving.transfer is None or leaving.transfer.error is not None
                self.counts.update(chunks_saved=leaving.written, chunks_dropped=not leaving.written)

    def flush(self, seconds: float = math.inf):
        """Wait until nothing is on its way, or for so long; the engine's thread goes on."""
        end = time.perf_counter() + seconds
        while True:
            with self.stepping:
                self.settle()
                if not (self.leaving or self.restorations) or time.perf_counter() > end:
                    return
            time.sleep(5e-4)

    def close(self):
        super().close()
        self.flush(10.0)                                                        # what was computed reaches its file

    def release(self):
        self.writer.stop()
        if self.folder:
            self.folder.cleanup()

    # What came of it

    def count(self, restoration: Restoration) -> tuple[int, int]:
        """-> tokens that were loaded, and that were on the device behind a gap."""
        sides, absent = [chunk.side for chunk in restoration.chunks], sum(chunk.absent for chunk in restoration.chunks)
        loaded = sum(self.chunk - chunk.at for chunk in restoration.chunks if chunk.side == "load")
        self.counts.update(chunks_computed=sides.count("compute"), chunks_loaded=sides.count("load"), loaded_tokens=loaded,
                           chunks_missed=absent)
        if absent:                                                              # those before may be gone too: the next one looks
            self.files.known.difference_update(chunk.prefix.key for chunk in restoration.chunks if chunk.side == "compute"
                                               and not chunk.absent)
        return loaded, sides.count("device") * self.chunk

    def result(self, request: Request) -> Result:
        return Result(**vars(super().result(request)), restoration=self.report(request), storage=self.storage,
                      link=str(self.load_link))

    @property
    def storage(self) -> str:
        loader = self.loader
        if loader.bandwidth:
            return str(loader.bandwidth)
        return f"storage, {statistics.median(loader.speeds) / 1e9:.2g} GB/s" if loader.speeds else "storage, nothing read yet"

    def report(self, request: Request) -> dict | None:
        """Draw the request's restoration, and say how it went."""
        restoration, timeline = request.restored, request.timeline
        if restoration is None:
            return None
        loaded = [chunk for chunk in restoration.chunks if chunk.side == "load"]
        for chunk in loaded:
            timeline.add("storage", f"chunk {chunk.index}", *chunk.storage)
            timeline.add("load", f"chunk {chunk.index}", *chunk.transfer.span())
        ends = [ended for *_, ended in restoration.steps] + [chunk.transfer.span()[1] for chunk in loaded]
        start, end = restoration.began - timeline.began, max(ends, default=restoration.began) - timeline.began
        sides = [chunk.side for chunk in restoration.chunks]
        return dict(
            mode=restoration.mode, tokens=restoration.end - restoration.start, chunks=len(sides), computed=sides.count("compute"),
            loaded=len(loaded), on_device=sides.count("device"), absent=sum(chunk.absent for chunk in restoration.chunks),
            meeting=min((chunk.index * self.chunk + chunk.at for chunk in loaded), default=restoration.end),
            bytes=len(loaded) * self.loader.chunk_bytes, start_ms=round(start * 1e3, 3), ms=round((end - start) * 1e3, 3),
            **{f"{lane}_bubble": round(timeline.bubble(lane, start, end), 3) for lane in ("storage", "compute")})

    def counters(self) -> dict:
        loader, writer = self.loader, self.writer
        return dict(super().counters(), **self.files.counts, file_bytes=self.files.bytes, load_errors=loader.errors,
                    readers=len(loader.readers), readers_retired=len(loader.retired), chunks_leaving=len(self.leaving),
                    read_buffers=len(loader.buffers.memory), read_buffers_free=len(loader.buffers.free),
                    write_buffers=len(writer.buffers.memory), write_buffers_free=len(writer.buffers.free),
                    link=str(self.load_link), storage=self.storage)

    def check_integrity(self):
        """Blocks and buffers agree with the tables and with what is on its way. Raises AssertionError."""
        self.pool.check_integrity([request.table for request in self.running] + [
            holder.blocks for holder in (*self.restorations, *self.leaving.values())])
        with self.loader.changed:
            readers = [reader.chunk for reader in (*self.loader.readers, *self.loader.retired) if reader.chunk]
            held = sorted(chunk.buffer for chunk in {*readers, *self.loader.sent} if chunk.buffer is not None)
            assert sorted((*held, *self.loader.buffers.free)) == list(range(len(self.loader.buffers.memory))), "a buffer is lost"
        with self.writer.lock:
            held = [leaving.buffer for leaving in self.leaving.values() if leaving.transfer and leaving.written is None]
            free = self.writer.buffers.free
            assert sorted((*held, *free)) == list(range(len(self.writer.buffers.memory))), "a buffer is lost"

    # What the page shows

    def tiers(self) -> list[live.Tier]:
        leaving, loader, size = list(self.leaving.values()), self.loader, self.loader.chunk_bytes
        chunks = [chunk for restoration in list(self.restorations) for chunk in restoration.chunks]
        coming = [chunk for chunk in chunks if chunk.transfer and not chunk.settled]
        device = self.device_tier([block for holder in (*leaving, *coming) for block in holder.blocks],
                                  [block for chunk in chunks if chunk.settled for block in chunk.blocks])
        taken = [number not in buffers.free for buffers in (loader.buffers, self.writer.buffers)
                 for number in range(len(buffers.memory))]
        host = live.Tier("host", f"Host memory: chunks of {self.chunk} tokens on their way",
                         numpy.where(taken, live.IN_FLIGHT, live.FREE), block_bytes=size, describe=lambda _: (None, None, None))
        moving = [holder.prefix.key for holder in (*leaving, *(chunk for chunk in chunks if chunk.began and chunk.side is None))]
        storage = self.stored.tier("storage", f"Storage: K and V of {self.chunk} tokens in files", list(self.files.known), moving,
                                   size, self.chunk_prefixes.known)
        return [device, host, storage]


# 5. The bound ----------------------------------------------------------------------------------------------------

def meet(computed: list[float], loaded: list[float]) -> tuple[float, int]:
    """Two opposite pointers over n chunks, on paper: seconds until the first 0 to n are computed, and until the last 0 to n are
    loaded -> the least seconds in which the two meet, and how many chunks are computed then. What is measured may be a little
    less, since both sides were measured in other runs, and a chunk may be shared."""
    chunks = len(computed) - 1
    return min((max(computed[count], loaded[chunks - count]), count) for count in range(chunks + 1))


def seconds_computed(engine: Engine, restoration: Restoration) -> list[float]:
    """From a restoration by computing only: seconds until the first 0 to n chunks were computed. Within a step they are divided
    by their operations."""
    ends = [0.0]
    for start, count, began, ended in restoration.steps:
        while len(ends) <= len(restoration.chunks):
            end = (restoration.first + len(ends)) * engine.chunk
            if end > start + count:
                break
            share = engine.flops(start, end) / engine.flops(start, start + count)
            ends.append(began + share * (ended - began) - restoration.began)
    return ends


def seconds_loaded(restoration: Restoration) -> list[float]:
    """From a restoration by loading only: seconds until the last 0 to n chunks were on the device."""
    return [0.0, *sorted(transfer.span()[1] - restoration.began for transfer in restoration.transfers)]


# 6. Asking, and a trace ------------------------------------------------------------------------------------------

class Crowd:
    """Real requests of other users, who take what is left of each step's token budget: prompts of random tokens, and answers."""

    def __init__(self, engine: Engine, share: float):
        self.engine, self.tokens, self.requests, self.rng = engine, int((1 - share) * engine.token_budget), [], random.Random(0)

    def fill(self):
        """Before a step: whoever is missing comes in."""
        self.requests = [request for request in self.requests if request.outcome is None]
        missing = self.tokens - sum(request.pending for request in self.requests)
        missing = min(missing, self.engine.context - 8)
        if missing > 0:
            prompt = [self.rng.randrange(self.engine.model.config.vocab_size) for _ in range(missing)]
            self.requests += self.engine.submit(prompt=prompt, max_tokens=8, save=False, mode="compute", gpu_share=1.0)

    def leave(self):
        for request in self.requests:
            self.engine.cancel(request)
        self.engine.step()


def ask(engine: Engine, share: float = 1.0, **asked) -> Request:
    """-> the finished request; what the device had cached was dropped first. Others use the rest of the token budget."""
    offload.empty(engine)
    crowd = Crowd(engine, share)
    for _ in range(8 if share < 1 else 0):                      # until as many decode as will
        crowd.fill()
        engine.step()
    request, = engine.submit(gpu_share=share, **asked)
    while request.outcome is None:
        crowd.fill()
        engine.step()
    crowd.leave()
    engine.flush()
    if isinstance(request.outcome, Exception):
        raise request.outcome
    return request


def trace(string: str) -> Bandwidth:
    """An argparse type: megabits a second, several with colons between them, and after @ the seconds that each holds."""
    speeds, at, seconds = string.partition("@")
    number = app.bounded(float, 1e-3, 1e9)
    return Bandwidth(tuple(map(number, speeds.split(":"))), app.bounded(float, 1e-3, 1e6)(seconds) if at else 0.1)
