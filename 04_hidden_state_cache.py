"""Chapter 04: keep the input of each layer, and project it to K and V again (HCache).

The problem. Recomputing a lost KV cache leaves the link idle. Copying it from host memory (chapter 03) leaves
the processor idle.

The mechanism. The input of a layer is called its hidden states. The layer norms them and projects them to K
and V; RoPE then rotates each K by its token's position. With multi-head attention, a layer's input is half as
large as its K and V together. (With grouped-query attention it is usually as large or larger. Then chapter
03 is the better choice.) So this chapter saves the hidden states. To restore K and V, layer l is projected
while layer l + 1 is copied. Projecting a layer takes fewer operations than computing it. For T tokens of D
numbers each:

    projecting    4 T D^2
    computing     24 T D^2 + T^2 D,    which is 6 + T / (4 D) times as much

These are the paper's counts, for an MLP of width 4 D. The new question is computed one layer behind the
copies, as in chapter 03. The time to first token (TTFT) is therefore about max(link, projecting + question)
plus one layer of the other.

Saving must not delay the next token, so it has two stages. Stage one: one transfer copies the states of one
or several steps to a snapshot buffer in host memory. Stage two: a thread sorts the rows of the buffer into
blocks, where all rows of a layer are adjacent. Sorting is needed because a restoration reads one layer of
many tokens, but a decode step writes all layers of one token. If the buffer is full, the rows are dropped,
and no later rows of that request are saved.

Departures from the paper:
- The paper copies the states out layer by layer, during the step. Here they are copied after the step
  (benchmarks/variants.py measures both).
- The paper's chunks have 64 tokens. Here a block has as many tokens as a block of the device (16; see
  `--block-size`), and the same key.
- The paper projects a history in mini-batches (4.1.1). This chapter projects it in one product per layer.
- The paper restores the history, then computes the question (section 5). Here the question follows one layer
  behind the restoration.
- The paper keeps the input of layer 0. Here it is not kept, since it is the embedding of the tokens.

With `--disk`, full blocks are written to files as well. Then a text may be longer than host memory. Blocks
that have been written may leave host memory while the text goes on. If they do not all fit when the text
comes back, a restoration reads a few layers at a time.

Source: HCache (Gao et al., EuroSys '25), sections 3, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

    python 04_hidden_state_cache.py --demo
    python 04_hidden_state_cache.py --prompt "What is a KV cache?" --disk states
    python 04_hidden_state_cache.py                        # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import hashlib
import importlib
import math
import random
import sys
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, filterfalse, islice, takewhile
from pathlib import Path

import numpy
import torch

from common import link as links
from common.cache import Cache, Match
from common.estimates import FULL_SPEED
from common.link import Speed
from common.llama import upload
from common.requests import Request
from common.store import Parts, Stored, checksum_bytes
from shell import charts, cli, hardware, lesson
from shell.backends import in_directories
from shell.chunks import BlockReads, StoredChunks
from shell.frontend import Frontend
from shell.lower_tier import restorer
from shell.workers import Worker, as_integers

paged = importlib.import_module("02_paged_kv")
SNAPSHOT = 1 << 21  # bytes of unsent states after which `flush` is called
DEPTH = 8  # layers of a restoration that may be copied ahead of the projection
THREADS = 8  # threads of stage two

# 1. Blocks in host memory ----------------------------------------------------------------------

@dataclass(eq=False)
class Filling:
    """The host block that a request is filling at the moment."""

    request: Request
    block: int | None = None  # holds a reference; None: the rows of this block are not kept
    dropped: bool = False  # some rows were not sent, so no later rows are kept
    lost: bool = False  # some rows were sent and did not arrive, so no later block is registered


@dataclass(eq=False)
class Piece:
    """Some rows of one request that go into one host block."""

    filling: Filling
    block: int
    block_key: paged.BlockKey | None  # the block's key if these rows complete it; None: it is not full
    rows: list[int]  # indices of the rows in the snapshot
    slots: range  # slots of the rows in the store


class BlockStore:
    """Host memory for saved rows, in blocks of the device's block size, found by the same block keys.

    A block keeps each layer's rows together, so a layer of 1,024 tokens is copied in 64 pieces instead of
    1,024. If there is `storage`, full blocks are also written to it, and read back. There, a block is one
    value, which has the rows of each layer as a part."""

    def __init__(self, cache: "HiddenCache", name: str, blocks: int, rows: list[tuple[int, int]]):
        """`name`: the kind of rows; it is a part of each key in storage. `blocks`: blocks of host memory.
        `rows`: (layer, numbers per row) of each part of a block."""
        model, size = cache.model, cache.pool.block_size
        self.cache, self.name, self.storage = cache, name, cache.storage
        self.pool = paged.BlockPool(blocks, size)
        self.pool.on_evict = self.on_evict
        self.layers, numbers = [layer for layer, _ in rows], blocks * size * sum(width for _, width in rows)
        memory = links.host_memory([numbers], model.dtype, model.device, "The host pool")
        parts = memory.split([blocks * size * width for _, width in rows])
        self.parts = [part.view(blocks, size, width) for part, (_, width) in zip(parts, rows)]
        self.arrays = [as_integers(part) for part in self.parts]  # NumPy views
        self.row_bytes = sum(width for _, width in rows) * model.dtype.itemsize
        self.pool.block_bytes = size * self.row_bytes
        sizes = (size * width * model.dtype.itemsize for _, width in rows)
        # Where the checksums in front of each part begin in storage
        self.offsets = [*accumulate((part + checksum_bytes(part) for part in sizes), initial=0)]
        self.fillings: dict[Request, Filling] = {}
        self.unwritten: dict = {}  # keys of blocks in host memory that storage may lack, oldest first
        self.writing: set = set()  # keys of blocks that are being written to storage

    def find(self, block_keys: list) -> list:
        """Find the beginning of a chain, up to the first block that is in neither host memory nor storage.

        Returns: for each block its number in host memory, or its Stored place."""
        there = self.pool.block_of
        found = (there[one] if one in there else self.find_stored(one) for one in block_keys)
        return list(takewhile(lambda location: location is not None, found))

    # Filling

    def fill(self, rows: dict) -> list[Piece]:
        """Assign slots in host blocks to the rows of one snapshot.

        `rows`: request -> (position of its first row, index of each of its rows in the snapshot). Returns:
        the pieces that are kept. The caller must release one reference to each piece's block."""
        pieces, size = [], self.pool.block_size
        for request, (first, indices) in rows.items():
            filling, end = self.fillings.setdefault(request, Filling(request)), first + len(indices)
            fillable = (request.prompt_tokens + request.max_tokens - 1) // size  # blocks
            for index in range(first // size, min(fillable, self.pool.num_blocks(end))):
                start, stop = max(first, index * size), min(end, (index + 1) * size)
                if start % size == 0:
                    self.begin_block(filling, index, fillable)
                if filling.block is not None:
                    block_key = request.chain[index] if stop % size == 0 else None
                    slot, own = filling.block * size + start % size, indices[start - first : stop - first]
                    pieces.append(Piece(filling, filling.block, block_key, own, range(slot, slot + len(own))))
                    self.pool.share([filling.block])
        return pieces

    def begin_block(self, filling: Filling, index: int, fillable: int):
        """Allocate a host block for block `index` of the request, unless host memory already has its
        contents.

        `fillable`: how many blocks the request can fill. Keep no more rows of the request if its previous
        block is missing, or if there is no room."""
        pool, chain, last = self.pool, filling.request.chain, filling.block
        self.close_block(filling)
        if filling.dropped or index < len(chain) and chain[index] in pool.block_of:
            return
        before = chain[index - 1] if index else None
        gap = before and last is None and before not in pool.block_of and not self.find_stored(before)
        if gap or not self.make_room(chain):
            return self.drop([filling])
        (filling.block,) = pool.allocate(1, pool.block_of.get(before, last), fillable - index)

    def make_room(self, chain: list) -> bool:
        """Evict a block, unless one is free: the least recently used one, or the last block of `chain` that
        storage has. The other blocks of `chain` stay.

        Returns: whether a block is free now."""
        pool = self.pool
        if not pool.make_room(1, chain):
            stored = filter(self.find_stored, filter(pool.block_of.__contains__, reversed(chain)))
            blocks = filterfalse(pool.references.__getitem__, map(pool.block_of.get, stored))
            pool.evict([*islice(blocks, 1)])
        return pool.make_room(1, chain) > 0

    def close_block(self, filling: Filling):
        """Release the request's reference to the block that it was filling."""
        if filling.block is not None:
            self.pool.release([filling.block])
        filling.block = None

    def on_saved(self, pieces: list[Piece], arrived: bool):
        """Register full blocks, unless one of their rows did not arrive. Called in the order of the
        snapshots."""
        if not arrived:
            self.drop(piece.filling for piece in pieces)
        for piece in pieces:
            piece.filling.lost |= not arrived
            if piece.block_key and not piece.filling.lost:
                self.pool.register(piece.block, piece.block_key)
        for request in dict.fromkeys(piece.filling.request for piece in pieces if piece.block_key):
            self.pool.use(request.chain)
            self.store_chain(request)

    def drop(self, fillings):
        """Keep no more rows of these fillings. A request that is admitted again gets a new Filling."""
        for filling in fillings:
            self.cache.counts["drops"] += not filling.dropped
            filling.dropped = True
            self.close_block(filling)

    def finished(self, request):
        """Forget a request."""
        if filling := self.fillings.pop(request, None):
            self.close_block(filling)
        self.store_chain(request)

    # Storage

    def digest(self, block_key) -> bytes:
        """-> the block's key in storage."""
        return hashlib.sha256(block_key.digest + self.name.encode()).digest()

    def find_stored(self, block_key) -> Stored | None:
        """-> where storage has the block, or None."""
        return self.storage and self.storage.find(self.digest(block_key))

    def stored(self, locations: list) -> list[Stored]:
        """-> only the locations that are in storage."""
        return [location for location in locations if isinstance(location, Stored)]

    def store_chain(self, request):
        """Queue the request's blocks in host memory for storage, and mark its chain as used there."""
        if self.storage:
            there = filter(self.pool.block_of.__contains__, request.chain)
            self.unwritten |= dict.fromkeys(filterfalse(self.has, there))
            self.write_queued()
            self.storage.use([self.digest(block_key) for block_key in request.chain])

    def has(self, block_key) -> bool:
        """-> whether storage has the block, or is writing it."""
        return block_key in self.writing or self.find_stored(block_key) is not None

    def write_queued(self):
        """Write the queued blocks that storage lacks, oldest first, as long as storage accepts them. Each is
        held until it is written; such blocks take at most a quarter of host memory. The others stay queued
        until host memory evicts them.

        A block whose parent is neither in storage nor being written is not written, because `find` would end
        before it."""
        for block_key in [*self.unwritten]:
            before, block = block_key.parent, self.pool.block_of[block_key]
            if not self.has(block_key) and (before is None or self.has(before)):
                contents, most = Parts([part[block] for part in self.arrays]), max(1, self.pool.size // 4)
                written = len(self.writing) < most and self.storage.write(self.digest(block_key), contents)
                if not written:
                    return
                self.writing.add(block_key)
                then = lambda arrived, one=block_key: self.writing.discard(one)  # noqa: E731
                self.cache.hold(f"write {block}", [written], (self.pool, [block]), then=then)
            del self.unwritten[block_key]

    def on_evict(self, lost: list):
        """Count the lost blocks: evicted blocks that storage does not have. They are not written any more."""
        if self.storage:
            count = sum(not self.find_stored(block_key) for _, block_key in lost)
            self.cache.counts.update(blocks_lost=count, writes_dropped=count)
            self.unwritten = {one: None for one in self.unwritten if one in self.pool.block_of}

    def on_fetched(self, new: list, block_keys: list, arrived: bool):
        """Register the (block, block key) pairs `new`, whose reads have completed."""
        for pair in new if arrived else ():
            self.pool.register(*pair)
        self.pool.use(block_keys)


# 2. The cache ----------------------------------------------------------------------------------

class Loading:
    """The state of one restoration: the slots of its tokens, its rows in host memory, and its copies."""

    def __init__(self, cache: "HiddenCache", request, restoration, match):
        self.request, self.start = request, restoration.start
        pool, end, device = cache.pool, restoration.end, cache.model.device
        self.tokens = end - self.start
        self.rotation = cache.model.rotary(torch.arange(self.start, end, device=device))  # for all layers
        self.slots = pool.slots(upload(request.table, device))[self.start : end]  # [T]
        block_keys = request.chain[self.start // pool.block_size :]
        self.rows = BlockReads(cache.store, block_keys, match.blocks)
        self.pairs = links.BlockPairs(range(len(match.blocks)), self.rows.blocks, apart=True)
        self.landing = {}  # layer -> its rows on the device, [n * block size, width]
        self.transfers = {}  # layer -> its Transfer


class HiddenCache(Cache):
    """A Cache of hidden states: it saves each layer's input to host memory, and projects it to K and V to
    restore it."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None):
        """`blocks`: blocks of host memory. `bandwidth`: of the modelled link, in bytes per second; None with
        a GPU. `storage`: a tier below host memory, or None."""
        self.blocks, self.bandwidth, self.storage = blocks, bandwidth, storage

    def attach(self, engine):
        super().attach(engine)
        wake = engine.wake.set
        self.load_link = hardware.connect("load", engine.clock, self.bandwidth, wake)
        self.save_link = hardware.connect("save", engine.clock, self.bandwidth, wake)
        self.lanes = deque(Worker("scatter", wake) for _ in range(THREADS))
        if self.storage:
            self.storage.open(partial(Worker, wake=wake), engine)
        self.load_link.speed()  # measure a GPU's link now, so that no request waits for it
        self.projecting = Speed(math.inf)  # rows per second, in one layer
        self.spans = deque()  # projections: (request, rows, label, start mark, end mark)
        self.clear_unsent()
        self.init_store()

    @property
    def width(self) -> int:
        """Numbers that are saved per token and layer."""
        return self.model.config.hidden_size

    def init_store(self):
        """Create the block store. It has every layer's input except the first one's, which is the embedding
        of the tokens."""
        layers = range(1, len(self.model.layers))
        rows = [(layer, self.width) for layer in layers]
        self.use_store(layers, BlockStore(self, "hidden states", self.blocks, rows))

    def use_store(self, layers, store: BlockStore):
        """Save the inputs of `layers` in `store`, and allocate the snapshot buffer."""
        self.layers, self.store, self.pools = layers, store, {"host": store.pool}
        memory = partial(links.host_memory, device=self.model.device, what="The snapshot buffer")
        rows = 4 * self.engine.token_budget  # rows of the snapshot buffer, for each part
        self.snapshot = [memory((rows, part.shape[-1]), part.dtype) for part in store.parts]
        self.ring, self.head, self.free = rows, 0, rows  # the buffer's length, next row, free rows
        self.budget = self.engine.token_budget  # `poll` may lower the engine's

    def submitted(self, request):
        if self.storage:
            blocks = request.history // self.pool.block_size
            keys = [self.store.digest(block_key) for block_key in request.chain[:blocks]]
            self.hold(f"ask {request.id}", self.storage.ask(keys))

    def match(self, request):
        size, first = self.pool.block_size, request.computed // self.pool.block_size
        if locations := self.store.find(request.chain[first : request.history // size]):
            tokens = (first + len(locations)) * size - request.computed
            inside = request.computed % size if isinstance(locations[0], Stored) else 0  # computed already
            disk = size * len(self.store.stored(locations)) - inside
            found = {tier: count for tier, count in (("cpu", tokens - disk), ("disk", disk)) if count > 0}
            seconds = self.seconds(request.computed, request.computed + tokens, locations)
            return Match(tokens, seconds, locations, found, rows=tokens)

    def seconds(self, start: int, end: int, locations: list) -> float:
        """Estimate the seconds to restore tokens [start, end).

        Returns: the slower of loading and projecting, plus one layer of the other."""
        depth, size, store = len(self.model.layers), self.store.pool.block_bytes, self.store
        project = depth * self.seconds_to_project(end - start)
        load = self.load_link.seconds(len(locations) * size, len(store.parts))
        if self.storage:
            load = max(load, self.storage.seconds(store.stored(locations), size))
        return max(load, project) + min(load, project) / depth

    def seconds_to_project(self, tokens: int) -> float:
        """Estimate the seconds to project `tokens` tokens in one layer.

        Before the first projection, the estimate is a share of the prefill time (`Machine.projecting`)."""
        self.record_spans()
        if math.isfinite(speed := self.projecting.value):
            return tokens / speed
        return tokens * self.estimates.machine.projecting / self.estimates.computing.value

    # Restoring

    def restore(self, request, restoration, match):
        loading = Loading(self, request, restoration, match)
        rows, ahead = loading.rows, deque(dict.fromkeys(self.store.layers))  # layers that are not issued yet
        try:
            while (layer := restoration.layers) < len(self.model.layers):
                # 1. Issue copies of later layers, up to a layer that storage is still reading. Wait for its
                #    reads only if it is the next layer to project
                rows.read_ahead(layer)
                while ahead and len(loading.landing) < DEPTH and ahead[0] in rows.reads:
                    reads = rows.reads[ahead[0]]
                    if layer < ahead[0] and not all(read.ready for read in reads):
                        break
                    yield from reads
                    self.issue_layer(loading, ahead.popleft())
                # 2. Wait for the next layer, and project it
                yield from self.restore_layer(loading, layer)
                restoration.layers += 1
        finally:
            for transfer in (*loading.transfers.values(), *sum(rows.reads.values(), [])):
                transfer.cancel()
            given = [(self.store.pool, rows.held)]
            self.hold("load", list(loading.transfers.values()), given=given, then=rows.release)

    def issue_layer(self, loading: Loading, layer: int):
        """Start to copy a layer's rows to a temporary buffer on the device."""
        shape = len(loading.rows.blocks), self.pool.block_size, self.width  # [n, block size, width]
        landed = self.load_link.landing(shape, self.model.dtype)
        loading.landing[layer] = landed.flatten(0, 1)
        self.copy_layer(loading, layer, [landed], loading.pairs)

    def copy_layer(self, loading: Loading, layer: int, into: list, pairs):
        """Start the copy of a layer's parts, one into each tensor of `into`, and count its bytes."""
        out_of = loading.rows.take(layer)  # [blocks, block size, width] each
        loading.transfers[layer] = transfer = self.load_link.copy(into, out_of, f"layer {layer}", pairs)
        loading.rows.keep(transfer, out_of)
        self.counts["bytes_in"] += transfer.bytes

    def restore_layer(self, loading: Loading, layer: int):
        """Yield the transfer of a layer's rows, then project them. For layer 0, embed the tokens instead."""
        request, start, tokens = loading.request, loading.start, loading.tokens
        if layer in loading.transfers:
            yield loading.transfers[layer]
            hidden = loading.landing.pop(layer)[-tokens:]  # [T, width]
        else:
            ids = request.tokens[start : start + tokens]
            hidden = self.model.embed(upload(ids, self.model.device))  # [T, D]
        began = self.engine.clock.mark()
        self.project(layer, hidden, loading.rotation, loading.slots)
        self.spans.append((request, tokens, f"layer {layer}", began, self.engine.clock.mark()))

    @torch.inference_mode()
    def project(self, layer: int, hidden, rotation, slots):
        """Project a layer's input `hidden` [T, D] to K and V, and write them to `slots`.

        RoPE follows the K projection, so it cannot be folded into the saved input."""
        keys, values = self.pool.memory[layer].flatten(1, 2)  # [slots, KVH, hd] each
        k, v = self.model.layers[layer].project_kv(hidden, rotation)  # [T, KVH, hd] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def record_spans(self):
        """Add finished projections to the timelines, and record how long they took."""
        while self.spans:
            request, rows, label, *marks = self.spans.popleft()
            start, end = map(self.engine.clock.seconds, marks)
            request.timeline.add("compute", label, start, end)
            if rows >= FULL_SPEED[self.model.device.type]:  # smaller projections reach fewer rows per second
                self.projecting.record(rows, end - start)

    # Saving

    def poll(self):
        """Also write queued blocks, and let the next step compute only as many rows as host memory has room
        for. So a text may be longer than host memory: it goes on when some of its blocks have been written.

        If host memory is full, wait for writes. If none is under way or one hangs, compute and drop rows."""
        super().poll()
        self.store.write_queued()
        if not self.storage:
            return
        pool, writers = self.store.pool, [*self.lanes, *(each.writer for each in self.storage.storages)]
        room = pool.available - len(self.store.unwritten) - pool.num_blocks(self.count)
        rows = pool.block_size * (room - len(self.engine.running))  # each may begin one more block
        waits = (self.store.writing or self.in_flight.get("save")) and not any(one.hangs for one in writers)
        self.engine.token_budget = self.budget if rows <= 0 and not waits else min(self.budget, max(0, rows))

    def save_layer(self, layer, hidden, batch):
        if layer == 0:
            self.inputs = []  # an interrupted step starts again
        if layer in self.layers:
            self.inputs.append(hidden)

    def clear_unsent(self):
        """Forget the unsent steps and rows."""
        self.unsent, self.rows, self.count = [], {}, 0

    def save(self, batch):
        """Collect a step's states, [T, D] per layer. `flush` sends them once there are many rows, or when a
        request ends."""
        for request, count in batch.work:
            _, indices = self.rows.setdefault(request, (request.computed - count, []))
            indices += range(self.count, self.count + count)
            self.count += count
        self.unsent.append(None)
        try:
            self.unsent[-1] = self.step_states(batch)
        except RuntimeError as error:  # device memory is full: `flush` drops the rows
            self.engine.on_error(error)
        if self.count * self.store.row_bytes >= SNAPSHOT or self.count >= self.engine.token_budget:
            self.flush()

    def step_states(self, batch) -> list:
        """Return the step's states, [T, D] per layer.

        On a GPU these are copies, because the next pass overwrites the layers' inputs."""
        on_gpu = self.model.device.type == "cuda"
        return list(torch.stack(self.inputs)) if on_gpu and self.inputs else self.inputs

    def flush(self):
        """Send all unsent rows to host memory, in two stages. If the snapshot buffer or device memory is
        full, drop them.

        Stage one copies the rows to the snapshot buffer, in one transfer. In stage two, a thread waits for
        the transfer and sorts the rows into blocks."""
        rows, unsent, count = self.rows, self.unsent, self.count
        self.clear_unsent()
        pieces, states = self.store.fill(rows), None
        touched = [piece.block for piece in pieces]
        if pieces and count <= self.free and None not in unsent:
            try:
                states = self.rows_to_keep(unsent)
            except RuntimeError as error:  # device memory is full
                self.engine.on_error(error)
        if states is None:
            self.store.drop(piece.filling for piece in pieces)
            return self.store.pool.release(touched)
        transfer = self.take_snapshot(states)
        out_of = (self.head + numpy.concatenate([piece.rows for piece in pieces])) % self.ring
        into = numpy.concatenate([piece.slots for piece in pieces])
        self.lanes.rotate()
        job = self.lanes[0].submit("scatter", 0, self.scatter, transfer, out_of, into)
        then = partial(self.on_saved, transfer, pieces, count)
        self.hold("save", [job], given=[(self.store.pool, touched)], then=then)
        self.head, self.free = (self.head + count) % self.ring, self.free - count

    def rows_to_keep(self, unsent: list) -> list:
        """Concatenate the steps' states -> [rows, width] for each part of the store."""
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*unsent)]

    def take_snapshot(self, states: list):
        """Start to copy rows to the snapshot buffer, which is a ring. Returns: the Transfer."""
        left, into, out_of = self.ring - self.head, [], []
        for snapshot, rows in zip(self.snapshot, states, strict=True):
            for piece, row in (rows[:left], self.head), (rows[left:], 0):
                if len(piece):
                    into.append(snapshot[row : row + len(piece)])
                    out_of.append(piece)
        transfer = self.save_link.copy(into, out_of, "states")
        self.counts["bytes_out"] += transfer.bytes
        return transfer

    def scatter(self, transfer, out_of, into):
        """Stage two, on a thread: copy rows of the snapshot buffer to slots of the blocks.

        `out_of` [n]: rows of the buffer. `into` [n]: slots, counted in tokens."""
        transfer.wait()
        for part, snapshot in zip(self.store.arrays, self.snapshot):  # [blocks, block size, D] and [rows, D]
            part.reshape(-1, part.shape[-1])[into] = as_integers(snapshot)[out_of]

    def on_saved(self, transfer, pieces: list[Piece], count: int, arrived: bool):
        """Free `count` rows of the snapshot buffer, and register full blocks. Called by `poll` after stage
        two."""
        self.free += count
        self.store.on_saved(pieces, arrived)
        for request in {piece.filling.request for piece in pieces}:
            request.timeline.add("save", "states", *transfer.span())

    def finished(self, request):
        self.record_spans()
        if request in self.rows:
            self.flush()
        self.store.finished(request)

    def close(self):
        if self.storage:
            self.drain()
        self.close_each(self.load_link, self.save_link, *self.lanes, self.storage)
        self.store.on_evict([(block, block_key) for block_key, block in self.store.pool.block_of.items()])


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Restore a conversation from hidden states before each of its turns, then compare TTFT with chapter
    03."""
    # 1. Answer: all blocks of the device are evicted before each turn
    arguments.always_restore = True
    engine, new = make_engine(model, arguments), max(2, min(arguments.max_tokens, 16))
    length, turns = lesson.context(model, frontend) // 2, [lesson.SECRET, *lesson.TURNS[1:]]
    asked = lesson.converse(engine, frontend, length, turns, new)
    verified = lesson.verify(paged.baseline.Engine(model), asked)

    # 2. Show
    report = dict(link=lesson.describe_link(engine.lower_tier.cache.load_link), verified=verified)
    states, kv = bytes_per_token(model), model.config.kv_numbers_per_token * model.dtype.itemsize
    print(f"A token takes {states} bytes as hidden states and {kv} as K and V.")
    if states >= kv:
        print("Query heads share KV heads: hidden states take more bytes, and a projection. On this model")
        print("chapter 03 is the better choice. The times below are of a model whose heads are not shared.")
    print("All device blocks are evicted before each turn:")
    rows = [lesson.describe(f"turn {number}", request) for number, request in enumerate(asked, 1)]
    print(f"  {lesson.TURNS[-1]} - {asked[-1].text}\n\nThe last turn (load: layer numbers, copied;")
    print(f"compute: layer numbers, projected; p: prefill; d: decode)\n{charts.chart(asked[-1].timeline)}\n")
    report["counters"] = charts.counters(engine)
    engine.close()

    # 3. Time: on a model whose question takes less time than its history
    offload = importlib.import_module(name="03_cpu_offload")  # only to compare with it
    larger = lesson.Larger(arguments, random.Random(0), engine_of)
    caches = HiddenCache(2 * larger.blocks, 1e9), offload.HostCache(2 * larger.blocks, 1e9)
    ways = dict(zip(("hidden states (04)", "K and V (03)"), map(larger.way, caches)))
    computed = min(way() for way in ways.values())  # this also saves the blocks
    for title, _ in larger.over_links(caches, caches[0].seconds_to_project(lesson.HISTORY)):
        rows += lesson.table(title, lesson.in_turn(ways), "ttft_ms", "ms")
        ours, theirs = (row["ttft_ms"] for row in rows[-2:])
        print(f"  {ours / theirs:.2f} of chapter 03's TTFT, {ours / computed:.2f} of computing again\n")
    print(
        "Half of the bytes help if the link is the bottleneck. If it is not, the projection limits TTFT,\n"
        "and chapter 03 needs none. Could each layer use the faster way? See chapter 05."
    )
    return dict(report, rows=rows), [asked[-1].timeline]


def engine_of(model, blocks: int, cache) -> paged.Engine:
    """-> an engine of `blocks` device blocks that always restores what `cache` offers."""
    return paged.Engine(paged.Runner(model, blocks), restorer(model, cache, always=True))


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    """Add the options of chapter 02 and of this chapter."""
    paged.add_arguments(parser)
    hardware.add_options(parser)
    add, limit = parser.add_argument, cli.bounded(float, 1e-6, 1e6)
    add("--disk", type=Path, action="append", metavar="DIR", help="keep blocks in files too; may be repeated")
    add("--disk-limit", type=limit, default=10, metavar="GB", help="size of all files together (10)")


def bytes_per_token(model) -> int:
    """-> bytes of hidden states per token. The first layer's input is the embedding, which is not saved."""
    return (model.config.num_hidden_layers - 1) * model.config.hidden_size * model.dtype.itemsize


def make_engine(model, arguments, kind=HiddenCache) -> paged.Engine:
    """Build chapter 02's engine with a HiddenCache, or another `kind` of it, as its lower tier."""
    config, size = model.config, arguments.block_size
    block_bytes = size * bytes_per_token(model)
    blocks = hardware.host_blocks(model, arguments, block_bytes)
    storage = in_directories(arguments.disk, arguments.disk_limit) if arguments.disk else None
    cache = kind(blocks, hardware.bandwidth(model, arguments.link), storage)
    engine = paged.make_engine(model, arguments, restorer(model, cache, arguments.always_restore))
    words = f"{blocks} blocks of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB"
    print(f"Host: {words}, over a {cache.load_link}", file=sys.stderr)
    if config.hidden_size * config.num_hidden_layers >= config.kv_numbers_per_token:
        times = block_bytes / (size * config.kv_numbers_per_token * model.dtype.itemsize)
        words = f"Query heads share KV heads here: hidden states are {times:.1f} times as large as K and V,"
        print(f"{words} and chapter 03 is the better choice.", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "04_hidden_state_cache", add_arguments, make_engine, demo)
