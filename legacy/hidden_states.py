"""Chapter 04: keep the input of each layer, and project it to K and V again (HCache).

The problem. Computing a lost KV cache again keeps the processor busy and leaves the link idle; copying it from the host
(chapter 03) keeps the link busy and leaves the processor idle.

The mechanism. A layer's K and V are projected from its input, the hidden states, after a norm; K is then rotated. With
multi-head attention that input is half as large as K and V together, and projecting it costs a sixth of computing the layer,
with the usual sizes of a Llama, and less behind a long context. So the hidden states are kept. When a conversation comes back,
the states of layer l+1 travel while those of layer l are projected, with the same `keys_values` that the forward pass calls:
link and processor work side by side.

Saving must not delay the next token. Stage one copies a step's states, all requests together, into a snapshot buffer in
host memory; stage two, threads on the host, sorts the rows into chunks of 64 tokens, in which the rows of a layer lie together:
restoration reads one layer of many tokens, where decoding writes all layers of one. Chunks stay in host memory, or go to
files that survive the process.

New against chapter 03: ChunkPool and Saver, the tap on the forward pass that sees the states, RowBuffer (legacy/link.py),
ChunkFiles (legacy/store.py), and restoration as a phase of its own: others decode between its layers. It stands on chapter
02: KV blocks are not copied anywhere, `save` registers them as before, and the tap keeps the states. A device hit that
ends inside a chunk is cut back to the chunk's beginning, unless the store has the chunk or is about to: a chunk is filled by
computing all of its tokens. With blocks of 16 that costs at most 48 tokens, and makes no gap in what is kept.

Source: HCache (Gao et al., EuroSys '25), sections 3, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

Frozen: the engine alone, on which legacy/bubble_free.py and benchmarks stand. The chapter of today is 04_hidden_state_cache.py.
"""
import queue
import statistics
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from legacy import baseline, live, offload, paged
from legacy import link as links
from legacy.link import Link, RowBuffer, Transfer, TransferError, as_integers
from legacy.store import ChunkFiles

CHUNK = 64                         # tokens (section 4.2.1)
SNAPSHOT = 1 << 20                 # bytes: less than this waits for the next layer, or step, unless it makes a chunk whole
BUFFER = 1 << 30                   # bytes: more than this no buffer takes, unless one layer does
LAYOUTS = ("chunked", "token-major")

# 1. Data structures ----------------------------------------------------------------------------------------------

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

    def put(self, chunk: int, layer: int, at: int, states):
        """For NumPy: `states` [layers, rows, D], of `layer` and those after it, are the chunk's rows from `at` on."""
        as_integers(self.states)[layer:layer + len(states), chunk, at:at + states.shape[1]] = states

    def new(self, chain: list[paged.Prefix]) -> int | None:
        """A number for a chunk of this chain, or None: no chain's beginning goes for its end."""
        victim = next(iter(self.cached), None)
        if not self.free and (victim is None or self.prefixes[victim] in chain):
            return None
        return self.allocate(1)[0]


@dataclass(eq=False)
class Chunk:
    """64 tokens whose states are on their way into the store, in the ChunkPool under number `slot`.

    Its life: the engine begins it when the first of its tokens is computed. Each step's rows are a job of the Saver's
    threads, which count `missing` down; a chunk of which nothing is missing is whole, and is written to its file if there are
    files. If its request ends before, or rows cannot be taken or written, it is `lost`. The engine's `settle` alone ends it,
    when it is whole or lost and no job touches it any more: it is registered in the pool, or its slot is free again."""
    slot: int
    index: int                     # in its chain
    missing: int                   # rows, of all layers, that have not been sorted in
    prefix: paged.Prefix | None = None          # when all of its tokens are known
    jobs: int = 0                  # under way
    lost: bool = False             # it will not be whole
    dropped: bool = False          # and that is because saving fell behind or failed

    def drop(self):
        self.lost = self.dropped = True


class Target(NamedTuple):
    """Where a run of rows of a step's batch goes."""
    row: int                       # the first of them in the batch
    rows: int
    chunk: Chunk
    at: int                        # the first of them in the chunk


# Of a step: a layer's number, the inputs [T, D] of it and of the layers after it, and where their rows go
Piece = tuple[int, list[torch.Tensor], list[Target]]


class Saver:
    """Two-stage saving (section 4.2.2). The engine's thread calls `snapshot`; others sort and write. It must not know the
    engine, which ends the threads when it goes. The snapshot buffer holds `rows` of `width`, of two steps or so."""

    def __init__(self, pool: ChunkPool, files: ChunkFiles | None, link: Link, rows: int, width: int, threads: int, direct: bool):
        self.pool, self.files, self.link, self.threads, self.direct = pool, files, link, threads, direct
        memory = offload.pinned((0 if direct else rows, width), pool.kv.dtype, link.clock.device, "The snapshot buffer")
        self.buffer = RowBuffer(memory)                                         # [rows, D]
        self.taken_rows = as_integers(memory)                                   # for NumPy
        self.jobs, self.changed = queue.SimpleQueue(), threading.Condition()
        self.under_way = 0                                                      # snapshots to sort, and chunks to write
        self.to_write: deque[Chunk] = deque()
        self.started: list[threading.Thread] = []
        self.writing = self.errors = 0                                          # threads that write; copies that failed

    def snapshot(self, pieces: list[Piece]) -> list[Transfer]:
        """Stage one: all pieces go out in one transfer -> the transfers; none where there was no room, and then their chunks
        are dropped: nobody waits. What is computed next may begin at once, because it writes to other memory, and the
        transfer keeps the states alive."""
        pieces = [(layer, states, [target for target in targets if not target.chunk.lost]) for layer, states, targets in pieces]
        pieces = [piece for piece in pieces if piece[2]]
        if not pieces:
            return []
        states = [hidden for _, states, _ in pieces for hidden in states]                               # [T, D] each
        transfers, first, sizes = [], None, [len(hidden) for hidden in states]
        try:
            if self.direct:
                transfers = self.write_through(pieces)
            elif (first := self.buffer.take(sum(sizes))) is not None:
                into = self.buffer.memory[first:first + sum(sizes)].split(sizes)                        # [T, D] each
                transfers = [self.link.copy(into, states, "states" if states[1:] else f"layer {pieces[0][0]}")]
        except Exception:                                                       # the link does not take it
            self.errors += 1
            if first is not None:
                self.buffer.give_back(first)
        self.follow(transfers, first, [(layer, len(states), len(states[0]), targets) for layer, states, targets in pieces])
        return transfers

    def follow(self, transfers: list[Transfer], first: int | None, pieces: list[tuple[int, int, int, list[Target]]]):
        """Stage two begins when these transfers have arrived, in the snapshot buffer from row `first` on, or in their chunks.
        pieces: (first layer, layers, tokens, targets). Without transfers the chunks are dropped."""
        with self.changed:
            self.under_way += bool(transfers)
            for target in (target for *_, targets in pieces for target in targets):
                if transfers:
                    target.chunk.jobs += 1
                else:
                    target.chunk.drop()
        if transfers:
            self.start()
            self.jobs.put((transfers, first, pieces))

    def write_through(self, pieces: list[Piece]) -> list[Transfer]:
        """Without stage one: each request's rows of each layer go straight to their chunk, a copy for each, and the next
        layer waits for all of them (the variant of Figure 14)."""
        transfers = []
        try:
            for layer, states, targets in pieces:
                for number, hidden in enumerate(states, layer):
                    for row, rows, chunk, at in targets:
                        into = self.pool.states[number, chunk.slot, at:at + rows]
                        transfers.append(self.link.copy(into, hidden[row:row + rows], f"layer {number}"))
        finally:
            for transfer in transfers:
                transfer.join()
        return transfers

    def start(self):
        """The threads, when the first rows come."""
        while len(self.started) < self.threads:
            thread = threading.Thread(target=self.work, daemon=True)
            thread.start()
            self.started.append(thread)

    def work(self):
        """A thread of stage two."""
        while (job := self.jobs.get()) is not None:
            if job:                                                             # else only to write
                self.sort(*job)
            del job                                                             # and what it held
            while (chunk := self.next_to_write()) is not None:
                self.write(chunk)
                del chunk

    def sort(self, transfers: list[Transfer], first: int | None, pieces: list[tuple[int, int, int, list[Target]]]):
        """The rows go to their chunks; with `first` None they are there."""
        for transfer in transfers:
            transfer.join()
            transfer.src = []                                                   # the device may use that memory again
        well, start = all(transfer.error is None for transfer in transfers), first
        for layer, count, tokens, targets in pieces if first is not None else ():
            taken = self.taken_rows[start:start + count * tokens].reshape(count, tokens, -1)            # [count, T, D]
            for row, rows, chunk, at in targets:
                if well and not chunk.lost:
                    self.pool.put(chunk.slot, layer, at, taken[:, row:row + rows])
            start += count * tokens
        if first is not None:
            self.buffer.give_back(first)
        with self.changed:
            self.under_way -= 1
            self.errors += not well
            for count, target in [(count, target) for _, count, _, targets in pieces for target in targets]:
                chunk = target.chunk
                chunk.missing -= count * target.rows
                if not well:
                    chunk.drop()
                if self.files and not chunk.missing and not chunk.lost:
                    self.to_write.append(chunk)                                 # its job is over when it is written
                    self.under_way += 1
                    self.jobs.put(())                                           # any thread may write it
                else:
                    chunk.jobs -= 1
            self.changed.notify_all()

    def next_to_write(self) -> Chunk | None:
        """A chunk to write, if another thread is left to sort: a slow directory must not hold the snapshot buffer."""
        with self.changed:
            if not self.to_write or self.writing >= max(1, self.threads - 1):
                return None
            self.writing += 1
            return self.to_write.popleft()

    def write(self, chunk: Chunk):
        """The end of stage two: a whole chunk goes to its file, or is dropped."""
        try:
            self.files.write(chunk.prefix, chunk.index, as_integers(self.pool.states)[:, chunk.slot])
        except Exception:                                                       # the directory is full, or gone, or ...
            self.files.count(file_errors=1)
            chunk.drop()
        with self.changed:
            self.writing -= 1
            self.under_way -= 1
            chunk.jobs -= 1
            self.changed.notify_all()

    def flush(self, seconds: float | None = None):
        """Wait until all that was taken is sorted and written."""
        with self.changed:
            self.changed.wait_for(lambda: self.under_way == 0, seconds)

    def close(self):
        """Let the threads end, at the latest when the process does."""
        for _ in self.started:
            self.jobs.put(None)
        deadline = time.monotonic() + 5
        for thread in self.started:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


@dataclass(eq=False)
class Load:
    """One layer's states on their way to the device, where they land in the rows from `landing` on."""
    layer: int
    rows: int
    landing: int | None            # None when they have been given back
    buffer: int | None = None      # rows of host memory that a file is read into
    readable: int | None = None    # chunks, from the first on, of those in files
    storage: tuple[float, float] | None = None                 # (start, end) of reading them, seconds of time.perf_counter()
    transfer: Transfer | None = None
    issued: threading.Event = field(default_factory=threading.Event)            # the transfer is there, or never will be

    @property
    def label(self) -> str:
        return f"layer {self.layer}"

    @property
    def ready(self) -> bool:
        return self.issued.is_set() and (self.transfer is None or self.transfer.ready)

    def send(self, link: Link, dst: list, src: list, after=None):
        try:
            self.transfer = link.copy(dst, src, self.label, after)
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
            raise OSError(f"{self.label} was not sent")
        self.transfer.wait()


@dataclass(eq=False)
class Restoration:
    """What brings one request's states back, layer by layer. It holds a reference to each chunk that it reads from the
    ChunkPool, and to each of `blocks`, into which transfers write."""
    start: int                     # the first token that is brought
    chunks: list                   # numbers in the ChunkPool, or StoredChunks; the first holds token `start`
    prefix: paged.Prefix           # of the first chunk
    loads: list[Load] = field(default_factory=list)
    projections: list = field(default_factory=list)            # label, and two marks of the clock
    blocks: list[int] = field(default_factory=list)
    over: bool = False             # nothing more is projected
    timed: bool = False            # what it took is known


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
    restoration: dict | None       # tokens, bytes, start_ms (since received), ms, tokens_per_second, and two bubbles; or None
    link: str                      # what the states came over, and how fast it is


# 2. The engine ---------------------------------------------------------------------------------------------------

class Engine(offload.MeasuringEngine):
    """Chapter 02's engine, which keeps hidden states: `cpu_chunks` in host memory, or `disk_limit` bytes in files if there are
    `directories`. `save_threads` sort them; `direct` is without stage one; `layout` is one of LAYOUTS; `bytes_per_second` is the
    modelled link's, without a GPU. Raises ModelError for what does not fit."""
    Request = Request
    fields = {**paged.Engine.fields, "save": (lambda v: isinstance(v, bool), "true or false")}
    RESTORED = "hidden"            # the source of what came back
    LANDING = 4                    # layers of a full context for which the device has room when they arrive

    def __init__(self, model, tokenizer, end_tokens, *options, cpu_chunks: int | None = None, directories: tuple[Path, ...] = (),
                 disk_limit: float = 16e9, save_threads: int = 8, direct: bool = False, layout: str = "chunked",
                 bytes_per_second: float | None = None, **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        config, dtype, device, layers = model.config, model.dtype, model.device, len(model.layers)
        # 1. What is kept, and where. With files, host memory holds what is being filled (one for each who runs) or written
        width, size = config.hidden_size, self.numbers_per_chunk(config) * dtype.itemsize
        self.chunk_prefixes = paged.Prefixes(f"{model.digest.hex()} {dtype} {CHUNK} hidden {layout}")
        self.files = ChunkFiles(directories, (layers, CHUNK, width), dtype, disk_limit, layout) if directories else None
        useful = 2 * self.max_running + 64 if self.files else -(-4 * self.pool.size * self.pool.block_size // CHUNK)
        cpu_chunks = offload.host_pool_size(self.pool, cpu_chunks, useful, size, f"chunks of {CHUNK} tokens", "--cpu-chunks")
        self.chunks = self.make_chunks(cpu_chunks, layout)
        self.in_files: set[bytes] = set()                                       # keys that were found or written there
        self.stored = live.Keys()                                               # the same, for the page
        # 2. The link, and the memory at its ends
        bytes_per_second = bytes_per_second or links.bandwidth(model)
        self.load_link, self.save_link = (Link(lane, self.clock, bytes_per_second) for lane in ("load", "save"))
        tokens, most = self.pool.size * self.pool.block_size, BUFFER // (width * dtype.itemsize)
        longest, step = min(self.context, tokens + CHUNK), min(self.token_budget, tokens)
        landing = max(longest, min(min(self.LANDING, layers) * longest, most))
        snapshot = max(step, min(2 * layers * step, most), 2 * SNAPSHOT // (width * dtype.itemsize))
        self.landing = RowBuffer(torch.empty(landing, width, dtype=dtype, device=device))                       # [rows, D]
        reading = offload.pinned((landing if self.files else 0, width), dtype, device, "The read buffer")
        self.reading = RowBuffer(reading)                                                                       # [rows, D]
        self.saver = Saver(self.chunks, self.files, self.save_link, snapshot, width, save_threads, direct)
        weakref.finalize(self, self.saver.close)
        # 3. What is under way
        self.saving: list[Chunk] = []                                           # oldest first
        self.targets: list[Target] = []                                         # of this step's rows
        self.tapped = self.held = 0                                             # layers seen in this step; bytes of the pieces
        self.pieces: list[Piece] = []                                           # that wait for more
        self.snapshots: deque[tuple[Transfer, list]] = deque()                  # and the timelines that show them
        self.restorations: list[Restoration] = []
        self.line: deque[Request] = deque()                                     # the first may load
        # 4. What is known of this machine
        self.counts.update(restorations=0, layers_projected=0, restored_tokens=0, bytes_in=0, bytes_out=0, chunks_saved=0,
                           chunks_dropped=0, chunks_missed=0, recomputed_hits=0, transfer_errors=0)
        self.load_link.speed()                                                  # measured once; then a running median
        self.row_seconds: deque[float] = deque([self.measure_projection()], maxlen=9)          # per row and layer

    def numbers_per_chunk(self, config) -> int:
        """That a chunk keeps, all layers together."""
        return CHUNK * config.num_hidden_layers * config.hidden_size

    def make_chunks(self, count: int, layout: str) -> ChunkPool:
        return ChunkPool(self.model.config, count, layout, self.model.dtype, self.model.device)

    def step(self) -> bool:
        """Chapter 02's, around what has arrived meanwhile."""
        with self.stepping:
            self.settle()
            before, more = self.progress(), super().step()
            # Nobody can go on before something arrives
            if more and before == self.progress():
                next((load.join() for load in self.loads if not load.ready), None)
            return more

    def progress(self) -> tuple:
        return self.counts["steps"], self.counts["layers_projected"]

    @property
    def loads(self) -> list[Load]:
        return [load for restoration in self.restorations for load in restoration.loads]

    # Save: a tap, and two stages

    def compute(self, work):
        """Chapter 02's; before it, where each row's states will go."""
        self.targets, self.tapped = self.find_targets(work), 0
        super().compute(work)
        if self.tapped < len(self.model.layers):                                # it failed on the way
            for target in self.targets:
                target.chunk.lost = True
        self.targets = []

    def find_targets(self, work) -> list[Target]:
        """Where the rows of this step's batch go."""
        targets, row = [], 0
        for request, count in work:
            start, end = request.computed, request.computed + count
            while start < end and request.save:
                index, at = divmod(start, CHUNK)
                length = min(end - start, CHUNK - at)
                shared = (index + 1) * CHUNK <= len(request.tokens)             # by all samples: all its tokens are known
                for sample in (request,) if shared else (request, *request.forks):
                    if at == 0:
                        sample.filling = self.begin(request, index)
                    chunk = sample.filling
                    if chunk and not chunk.lost:
                        targets.append(Target(row + start - request.computed, length, chunk, at))
                    if at + length == CHUNK and chunk:
                        sample.filling = None
                        if chunk.dropped:
                            self.counts["chunks_dropped"] += 1
                        else:
                            chunk.prefix = self.chunk_prefix(request, index)
                start += length
            row += count
        return targets

    def begin(self, request: Request, index: int) -> Chunk | None:
        """A place for the states of the request's chunk number `index`, unless they are kept already or not worth it."""
        if self.kept(request, index):
            return None
        if not self.worth_keeping():
            self.wear_out()
            return None
        self.chain(request, index)
        slot = self.chunks.new(request.chunk_prefixes)
        if slot is None:
            return Chunk(-1, index, 0, lost=True, dropped=True)
        self.saving.append(Chunk(slot, index, len(self.model.layers) * CHUNK))
        return self.saving[-1]

    def tap(self, index: int, hidden, batch):
        """Chapter 02's tap: what enters layer `index`. In decode that is little, and goes out with what follows."""
        self.tapped, last = index + 1, index + 1 == len(self.model.layers)
        if targets := self.wanted(index):
            layer, states, same = self.pieces[-1] if self.pieces else (0, [], None)
            if layer + len(states) == index and same == targets:
                states.append(hidden)
            else:
                self.pieces.append((index, [hidden], targets))
            self.held += hidden.nbytes
        enough = min(SNAPSHOT, self.saver.buffer.memory.nbytes // 2)            # 0 without stage one
        whole = last and any(target.at + target.rows == CHUNK for target in self.targets)
        if self.pieces and (whole or self.held >= enough):
            timelines = [request.timeline for request, _ in batch.work if request.save]
            for transfer in self.saver.snapshot(self.pieces):
                self.snapshots.append((transfer, timelines))
                self.counts["bytes_out"] += transfer.bytes
            self.pieces, self.held = [], 0

    def wanted(self, layer: int) -> list[Target]:
        """Where this step's rows of a layer's states go: here, those of every layer alike."""
        return self.targets

    def free(self, request: Request):
        for sample in (request, *request.forks):
            self.lose(sample)
        super().free(request)

    def finish(self, request: Request, outcome, counted: str):
        self.lose(request)
        if request.outcome is None and (count := request.computed // CHUNK):
            self.touch(self.chunk_prefix(request, count - 1), count - 1)
        super().finish(request, outcome, counted)

    def lose(self, request: Request):
        """The last chunk will not be whole: the next turn computes its tokens."""
        if request.filling:
            request.filling.lost, request.filling = True, None

    def touch(self, prefix: paged.Prefix, index: int):
        """All chunks up to this prefix, number `index` of its chain, were used now."""
        if not self.files:
            return self.chunks.touch(prefix)
        with suppress(RuntimeError):                                            # the process ends
            self.files.readers.submit(self.files.touch, prefix, index)

    # Restore: load and project

    def match(self, request: Request) -> list[int]:
        return self.without_gap(request, super().match(request))

    def without_gap(self, request: Request, hits: list[int]) -> list[int]:
        """Where a device hit ends inside a chunk that nobody keeps, it is cut back to the chunk's beginning: the chunk
        is filled by computing all of it, and what comes after it could not be restored without it."""
        if not request.save or not self.worth_keeping():
            return hits
        while hits:
            index, inside = divmod(len(hits) * self.pool.block_size, CHUNK)
            if not inside or self.kept(request, index):
                break
            hits = hits[:index * CHUNK // self.pool.block_size]
        return hits

    def chunk_prefix(self, request: Request, index: int) -> paged.Prefix:
        return self.chunk_prefixes.nth(index, request.chunk_prefixes, request.cache_salt, request.tokens, CHUNK)

    def chain(self, request: Request, index: int):
        """Look up all chunks before this one: they must not go for it."""
        if index:
            self.chunk_prefix(request, index - 1)

    def kept(self, request: Request, index: int) -> bool:
        """Whether the request's chunk number `index` is in the store, as far as is known here, or on its way."""
        if (index + 1) * CHUNK > len(request.tokens):
            return False
        prefix = self.chunk_prefix(request, index)
        if any(chunk.prefix is prefix and not chunk.lost for chunk in self.saving):
            return True
        return prefix.key in self.in_files if self.files else self.chunks.find(prefix) is not None

    def find_chunks(self, request: Request, first: int):
        """A generator, which returns the chunks that are kept from number `first` on, up to the first gap. All but the last
        token may be restored. Directories are asked in another thread."""
        prefixes = [self.chunk_prefix(request, index) for index in range(first, (len(request.tokens) - 1) // CHUNK)]

        if not self.files:
            return list(takewhile(lambda chunk: chunk is not None, map(self.chunks.find, prefixes)))

        def found():
            chunks = list(takewhile(bool, map(self.files.find, prefixes, range(first, first + len(prefixes)))))
            if chunks:
                self.files.touch(prefixes[len(chunks) - 1], first + len(chunks) - 1)
            return chunks
        asked = self.files.readers.submit(found)
        while not asked.done() and self.others_compute(request):
            yield
        chunks = asked.result()
        self.in_files.difference_update(prefix.key for prefix in prefixes)
        self.in_files.update(prefix.key for prefix in prefixes[:len(chunks)])
        return chunks

    def restore(self, request: Request):
        """Chapter 02's verb: bring what the device lacks of the longest saved prefix, if that is faster than to compute it."""
        # 1. One at a time loads, first come, first served; what others brought meanwhile is found on the device
        first = request.saved * self.pool.block_size // CHUNK
        prefix = self.chunk_prefix(request, first) if first < (len(request.tokens) - 1) // CHUNK else None
        self.line.append(request)
        try:
            if self.must_wait(request, prefix):
                while self.must_wait(request, prefix):
                    yield
                self.adopt(request)

            # 2. Which chunks follow?
            start = request.saved * self.pool.block_size
            found = yield from self.find_chunks(request, start // CHUNK)
            end = (start // CHUNK + len(found)) * CHUNK

            # 3. Restore or compute, whichever is estimated to be faster
            request.computed, choice = start, None
            if end > start:
                restoration, restore, compute = self.choose(request, start, found)
                if restore <= compute:
                    yield from self.bring(request, restoration)
                else:
                    self.counts["recomputed_hits"] += len(found) if request.source is None else 0       # chunks
                    self.wear_out()
                choice = dict(chosen="restore" if request.computed > start else "recompute", restore_ms=round(restore * 1e3, 3),
                              recompute_ms=round(compute * 1e3, 3) if self.prefills else None)      # None: not measured yet
        finally:
            if request in self.line:
                self.line.remove(request)

        # 4. What was found
        self.save(request)
        if request.source is None:
            restored = "mixed" if start else self.RESTORED
            request.source = restored if request.computed > start else "gpu_hit" if start else "miss"
            request.choice, request.cached_tokens = choice, request.computed

    def choose(self, request: Request, start: int, chunks: list):
        """-> a Restoration of these chunks, and the seconds that it would take, and computing what they hold."""
        end = (start // CHUNK + len(chunks)) * CHUNK
        restoration = Restoration(start, chunks, self.chunk_prefix(request, start // CHUNK))
        return restoration, self.seconds_to_restore(end - start), self.seconds_to_compute(start, end)

    def must_wait(self, request: Request, prefix: paged.Prefix | None) -> bool:
        """Whether others load before the request, or what it would load, from the chunk of `prefix` on."""
        return self.line[0] is not request or any(
            not restoration.over and restoration.prefix is prefix for restoration in self.restorations)

    def bring(self, request: Request, restoration: Restoration):
        """Bring the chunks' tokens into the request's blocks."""
        start, chunks, first = restoration.start, restoration.chunks, restoration.start // CHUNK
        size, device, whole = self.pool.block_size, self.model.device, 0        # whole: chunks, from the first on
        positions = torch.arange(start, (first + len(chunks)) * CHUNK, device=device)           # [T]
        slots = torch.tensor(request.table, device=device)[positions // size] * size + positions % size         # [T]
        if not self.files:
            self.chunks.touch(self.chunk_prefix(request, first + len(chunks) - 1))
            for chunk in chunks:
                self.chunks.share(chunk)
        self.restorations.append(restoration)
        self.counts["restorations"] += 1
        try:
            whole = yield from self.bring_layers(request, restoration, positions, slots)
        except (TransferError, OSError):
            self.counts["transfer_errors"] += 1
        finally:
            restoration.over = True
        self.counts["chunks_missed"] += len(chunks) - whole
        for index in range(first + whole, first + len(chunks)):
            self.in_files.discard(self.chunk_prefix(request, index).key)
        request.computed = max(start, (first + whole) * CHUNK)
        self.counts.update(restored_tokens=request.computed - start, bytes_in=sum(
            load.transfer.bytes for load in restoration.loads if load.transfer))
        if request.source is None and request.computed > start:
            request.restored = restoration

    def bring_layers(self, request: Request, restoration: Restoration, positions, slots):
        """A generator: load all layers in order, and project each into `slots` [T] when it has arrived, while the next ones are
        on their way. Returns how many chunks, from the first on, were whole. Raises TransferError, OSError."""
        layers, whole, rows = self.model.layers, len(restoration.chunks), 0
        for index in range(len(layers)):
            # 1. Issue as many loads as have room where they land; when all are issued, the next in line may begin
            self.issue(restoration)
            while len(restoration.loads) <= index:                              # others have that room
                yield
                self.issue(restoration)
            if len(restoration.loads) == len(layers) and request in self.line:
                self.line.remove(request)

            # 2. Wait for this layer's states; while there are others, outside, so that they can go on
            load = restoration.loads[index]
            while not load.ready and self.others_compute(request):
                yield
            load.wait()
            whole = whole if load.readable is None else min(whole, load.readable)
            if not whole:
                break

            # 3. Project them into the request's blocks
            began = self.clock.mark()
            self.project(index, self.landing.memory[load.landing:load.landing + load.rows], positions, slots)
            restoration.projections.append((f"layer {index}", began, self.clock.mark()))
            self.landing.give_back(load.landing)
            load.landing = None
            self.counts["layers_projected"] += 1

            # 4. Whenever as many rows were projected as a step may compute, which takes a sixth as long, others take a step
            rows += load.rows
            if rows >= self.token_budget * len(layers) and self.others_compute(request):
                rows = 0
                yield
        return whole

    @torch.inference_mode()
    def project(self, index: int, hidden, positions, slots):
        """The hidden states [T, D] that entered layer `index` -> their K and V, in `slots` [T] of the pool."""
        keys, values = self.pool.kv[index].flatten(1, 2)                                        # [slots, KVH, hd] each
        k, v = self.model.layers[index].project_kv(hidden, positions)                           # [T, KVH, hd] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

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
        rows = len(chunks) * CHUNK - skipped
        landing = self.landing.take(rows)
        if landing is None:
            return None
        load, into = Load(layer, rows, landing), self.landing.memory[landing:landing + rows]    # [T, D]
        if self.files is None:
            pieces = self.chunks.rows(layer, chunks)
            pieces[0] = pieces[0][skipped:]
            load.send(self.load_link, into.split([len(piece) for piece in pieces]), pieces)
            return load
        load.buffer = self.reading.take(rows + skipped)
        if load.buffer is None:
            self.landing.give_back(landing)
            return None
        out_of = self.reading.memory[load.buffer:load.buffer + rows + skipped]                  # [T + skipped, D]
        link, free = self.load_link, self.clock.mark()                          # nothing that is queued later reads these rows

        def send(readable: int, *storage: float):
            load.readable, load.storage = readable, storage
            load.send(link, [into], [out_of[skipped:]], free)
        try:
            self.files.read(chunks, layer, out_of, send)
        except RuntimeError:                                                    # no thread: who waits for it learns that
            load.issued.set()
        return load

    def let_go(self, load: Load):
        """Give back the host memory that a file was read into, once its rows have arrived."""
        if load.buffer is not None and load.ready:
            self.reading.give_back(load.buffer)
            load.buffer = None

    # What is on its way

    def settle(self):
        """Let go of what is over."""
        while self.snapshots and self.snapshots[0][0].ready:
            transfer, timelines = self.snapshots.popleft()
            for timeline in timelines:
                timeline.add("save", transfer.label, *transfer.span())
        over = [chunk for chunk in self.saving if not chunk.jobs and (chunk.lost or chunk.prefix and not chunk.missing)]
        for chunk in over:
            self.saving.remove(chunk)
            if not chunk.lost and self.files:
                self.in_files.add(chunk.prefix.key)
            elif not chunk.lost:
                self.chunks.register(chunk.slot, chunk.prefix)
            self.chunks.release([chunk.slot])
            # What was dropped before its last row was computed, `plan` has counted
            self.counts.update(chunks_saved=not chunk.lost, chunks_dropped=chunk.dropped and chunk.prefix is not None)
        saved = {chunk.prefix: chunk.index for chunk in over if not chunk.lost}
        for prefix in saved.keys() - {prefix.parent for prefix in saved}:       # the ends of chains
            self.touch(prefix, saved[prefix])
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
                self.pool.release(restoration.blocks)
                if not self.files:
                    self.chunks.release(restoration.chunks)

    def flush(self):
        """Wait until nothing is on its way."""
        with self.stepping:
            for load in self.loads:
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

    def wear_out(self):
        """Who decides against restoring learns nothing new about it, and should not believe the old for ever."""
        self.load_link.wear_out()
        if self.files and self.files.speeds:
            self.files.speeds.popleft()
        if len(self.row_seconds) > 1:
            self.row_seconds.popleft()

    def worth_keeping(self) -> bool:
        """Whether a full context would be restored rather than computed."""
        return self.seconds_to_restore(self.context, behind=0) <= self.seconds_to_compute(0, self.context)

    def measure_projection(self, rounds: int = 5) -> float:
        """-> seconds per row of projecting a layer's states. It writes to blocks, before anything is in them."""
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
        spans = [(label, *map(self.clock.seconds, marks)) for label, *marks in restoration.projections]
        for label, *span in spans:
            timeline.add("compute", label, *span)
        loads = [load.transfer.span() for load in restoration.loads]
        for load, span in zip(restoration.loads, loads):
            timeline.add("load", load.transfer.label, *span)
            if load.storage:
                timeline.add("storage", load.transfer.label, *load.storage)
        if not restoration.timed:                                               # its other samples report the same
            restoration.timed = True
            self.learn(restoration, spans)
        starts, ends = zip(*loads, *(load.storage for load in restoration.loads if load.storage), *(span for _, *span in spans))
        start, end = min(starts) - timeline.began, max(ends) - timeline.began
        tokens = request.cached_tokens - restoration.start
        return dict(tokens=tokens, bytes=sum(load.transfer.bytes for load in restoration.loads), start_ms=round(start * 1e3, 3),
                    ms=round((end - start) * 1e3, 3), tokens_per_second=round(tokens / (end - start)),
                    **{f"{lane}_bubble": round(timeline.bubble(lane, start, end), 3) for lane in ("load", "compute")})

    def learn(self, restoration: Restoration, spans: list):
        self.row_seconds.append(statistics.median(end - start for _, start, end in spans) / restoration.loads[0].rows)

    def counters(self) -> dict:
        chunks = self.chunks
        return dict(super().counters(), chunks=chunks.size, chunks_free=len(chunks.free), chunks_cached=len(chunks.cached),
                    chunks_referenced=chunks.size - chunks.available, chunk_evictions=chunks.counts["evictions"],
                    save_errors=self.saver.errors, link=str(self.load_link),
                    **(dict(self.files.counts, file_bytes=self.files.bytes) if self.files else {}))

    def check_integrity(self):
        """Blocks and chunks agree with the tables and with what is on its way. Raises AssertionError."""
        self.pool.check_integrity([request.table for request in self.running] + [
            restoration.blocks for restoration in self.restorations])
        brought = [] if self.files else [restoration.chunks for restoration in self.restorations]
        self.chunks.check_integrity([[chunk.slot] for chunk in self.saving] + brought)
        assert all(request.restoration for request in self.line), "who is not being restored stands in line"
        filling = {id(sample.filling) for request in (*self.running, *self.waiting)
                   for sample in (request, *request.forks) if sample.filling and not sample.filling.lost}
        assert filling <= set(map(id, self.saving)), "a chunk is filled that nobody saves"
        landing = {load.landing for load in self.loads if load.landing is not None}
        assert landing == {first for first, back in self.landing.taken.items() if not back}, "rows are lost where loads land"

    # What the page shows

    def tiers(self) -> list[live.Tier]:
        coming = [block for request in list(self.running) if request.restoration for block in request.table[request.saved:]]
        saving, restorations = list(self.saving), list(self.restorations)
        slots = [chunk.slot for chunk in saving if chunk.slot >= 0]
        tiers = [self.device_tier(coming), self.host_tier(slots + [
            chunk for restoration in restorations if not self.files for chunk in restoration.chunks])]
        if self.files:
            moving = [chunk.prefix.key for chunk in saving if chunk.prefix and not chunk.lost] + [
                bytes.fromhex(chunk.path.stem) for restoration in restorations for chunk in restoration.chunks]
            tiers.append(self.stored.tier("storage", f"Storage: hidden states of {CHUNK} tokens in files", list(self.files.known),
                                          moving, self.files.shape[0] * self.files.part_bytes, self.chunk_prefixes.known))
        return tiers

    def host_tier(self, in_flight: list[int]) -> live.Tier:
        chunks = self.chunks
        return live.of_pool("host", f"Host memory: hidden states of {CHUNK} tokens", chunks, in_flight=in_flight,
                            block_bytes=chunks.states[:, :1].nbytes)


# 3. For benchmarks ------------------------------------------------------------------------------------------------

def load_ms(result) -> float:
    """From the first load's beginning to the last one's arrival, in milliseconds; 0 without any."""
    loads = [span for span in result.timeline.spans if span.lane == "load"]
    return (max(span.end for span in loads) - min(span.start for span in loads)) * 1e3 if loads else 0.0
