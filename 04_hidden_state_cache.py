"""Chapter 04: keep the input of each layer, and project it to K and V again (HCache).

The problem. Computing a lost KV cache again leaves the link idle; copying it from the host (chapter 03)
leaves the processor idle.

The mechanism. A layer's K and V are projections of its input, the hidden states, after a norm; K is then
rotated by its position. With multi-head attention that input is half as large as K and V together. (With
grouped-query attention it is as large or larger, and chapter 03 the better choice.) So the hidden states are
kept, T tokens of D numbers a layer. When a conversation comes back, layer l + 1 travels while layer l is
projected:

    projecting costs 4 T D^2 operations a layer, computing it 24 T D^2 + T^2 D:  6 + T / (4 D) times as much

These are the paper's counts, for an MLP that is 4 D wide. The question's rows follow through the layers as in
chapter 03, so TTFT is about max(link, projecting + question) and one layer of the other.

Saving must not delay the next token. Stage one: the states of one or several steps leave in one transfer for
a snapshot buffer in host memory. (A departure: the paper's leave layer by layer, beside the step. Measured in
benchmarks/variants.py.) Stage two: threads sort its rows into blocks, in which the rows of a layer lie
together: restoring reads one layer of many tokens, where decoding writes all layers of one. If the buffer is
full, the rows are dropped, and nothing more of that request is kept. Blocks are as long as the device's, and
found by the same prefix (the paper's have 64 tokens: `--block-size 64`); `--disk` keeps them in files, too.

Source: HCache (Gao et al., EuroSys '25), sections 3.1, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

    python 04_hidden_state_cache.py --demo
    python 04_hidden_state_cache.py --prompt "What is a KV cache?" --disk states
    python 04_hidden_state_cache.py                        # the server, on http://127.0.0.1:5000
"""

import hashlib
import importlib
import math
import random
import shell.cli as cli
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch

from common import link as links
from common.cache import Cache, Match
from common.estimates import FULL_SPEED, Estimates
from common.link import Speed, as_integers
from common.llama import upload
from common.requests import Request
from common.restoring import Restorer
from common.store import Stored, StoredChunks
from shell import charts, hardware, lesson
from shell.backends import in_directories
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
SNAPSHOT = 1 << 21  # bytes of states that are noted before they leave for the snapshot buffer
DEPTH = 8  # layers of a restoration that are on their way to the device, or there and not yet projected
THREADS = 8  # of stage two

# 1. Blocks in host memory ----------------------------------------------------------------------

@dataclass(eq=False)
class Filling:
    """Which block a request fills."""

    request: Request
    block: int | None = None  # referenced; None: its rows are not kept
    dropped: bool = False  # rows were not sent: no later ones are kept
    lost: bool = False  # rows that were sent did not arrive: no later ones are found


@dataclass(eq=False)
class Piece:
    """Rows that fill a part of a block."""

    filling: Filling
    block: int
    block_key: object  # that these rows complete; None: the block is not full yet
    rows: list[int]  # which of all noted rows they are
    slots: range  # where they go, in rows of the store


class BlockStore:
    """Rows of saved state in host memory, in blocks of the device's length, found by the same prefixes. A
    block keeps a layer's rows together: 1,024 tokens of a layer come back in 64 pieces, not in 1,024."""

    def __init__(self, cache: "HiddenCache", name: str, blocks: int, rows: list[tuple[int, int]]):
        """`name` of what is kept, where storage is shared; `rows`: (layer, numbers of a row) of each part."""
        model, size = cache.model, cache.pool.block_size
        self.cache, self.name, self.storage = cache, name, cache.storage
        self.pool = paged.BlockPool(blocks, size)
        self.pool.on_evict = self.on_evict
        self.layers, numbers = [layer for layer, _ in rows], blocks * size * sum(width for _, width in rows)
        memory = links.host_memory([numbers], model.dtype, model.device, "The host pool")
        parts = memory.split([blocks * size * width for _, width in rows])
        self.parts = [part.view(blocks, size, width) for part, (_, width) in zip(parts, rows)]
        self.arrays = [as_integers(part) for part in self.parts]  # for NumPy
        self.row_bytes = sum(width for _, width in rows) * model.dtype.itemsize
        self.pool.block_bytes = size * self.row_bytes
        self.fillings: dict[Request, Filling] = {}
        self.writing: set = set()  # prefixes on their way to storage

    def find(self, block_keys: list) -> list:
        """-> the blocks that hold these prefixes up to the first gap: numbers, or where they are Stored."""
        locations, stored = [], False
        for block_key in block_keys:
            location = self.pool.block_of.get(block_key)
            if location is None and self.storage:
                location, stored = self.find_stored(block_key), True
            # Reading a stored block takes a free host block; do not evict one found above to get it
            if location is None or stored and len(locations) >= self.pool.available:
                break
            locations.append(location)
        return locations

    # Filling

    def fill(self, rows: dict) -> list[Piece]:
        """Say where noted rows go. `rows`: request -> the position of its first one, and the index of each
        among all noted rows. -> the rows that are kept, with a reference to each block for the caller to
        release."""
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
        """Reference a block for block `index` of `fillable`, unless another one has its contents. Keep no
        more of the request if the block before is not kept, or if only its own chain could make room."""
        pool, chain, last = self.pool, filling.request.chain, filling.block
        self.close_block(filling)
        if filling.dropped or index < len(chain) and chain[index] in pool.block_of:
            return
        before = chain[index - 1] if index else None
        gap = before and last is None and before not in pool.block_of and not self.find_stored(before)
        if gap or not pool.make_room(1, chain):
            return self.drop([filling])
        (filling.block,) = pool.allocate(1, pool.block_of.get(before, last), fillable - index)

    def close_block(self, filling: Filling):
        if filling.block is not None:
            self.pool.release([filling.block])
        filling.block = None

    def on_saved(self, pieces: list[Piece], arrived: bool):
        """In the order of flushes: register complete blocks, unless an earlier row of theirs was lost."""
        if not arrived:
            self.drop(piece.filling for piece in pieces)
        for piece in pieces:
            piece.filling.lost |= not arrived
            if piece.block_key and not piece.filling.lost:
                self.register(piece.block, piece.block_key)
        for request in {piece.filling.request for piece in pieces if piece.block_key}:
            self.use_stored(request)

    def drop(self, fillings):
        """Keep no more rows of these, until they are computed again."""
        for filling in fillings:
            self.cache.counts["drops"] += not filling.dropped
            filling.dropped = True
            self.close_block(filling)

    def finished(self, request):
        """Forget a request."""
        if filling := self.fillings.pop(request, None):
            self.close_block(filling)
        self.use_stored(request)

    # Storage

    def digest(self, block_key) -> bytes:
        return hashlib.sha256(block_key.digest + self.name.encode()).digest()

    def find_stored(self, block_key) -> Stored | None:
        return self.storage and self.storage.find(self.digest(block_key), len(self.parts))

    def stored(self, locations: list) -> list[Stored]:
        return [location for location in locations if isinstance(location, Stored)]

    def register(self, block: int, block_key):
        """Let the block be found, and write it to storage; hold its memory until it is written. A block whose
        parent is not stored is not written: nothing would find it."""
        self.pool.register(block, block_key)
        before = block_key.parent
        if self.storage and (before is None or before in self.writing or self.find_stored(before)):
            if written := self.storage.write(self.digest(block_key), [part[block] for part in self.arrays]):
                self.writing.add(block_key)
                then = lambda arrived: self.writing.discard(block_key)  # noqa: E731
                self.cache.hold(f"write {block}", [written], (self.pool, [block]), then=then)

    def use_stored(self, request):
        """Mark the chain as recently used in storage, too."""
        if self.storage:
            self.storage.use([self.digest(block_key) for block_key in request.chain], len(self.parts))

    def on_evict(self, lost: list):
        """Count blocks that leave host memory and are not in storage."""
        if self.storage:
            self.cache.counts["blocks_lost"] += sum(not self.find_stored(block_key) for _, block_key in lost)

    def fetch(self, block_keys: list, locations: list) -> tuple[list[int], dict]:
        """Reference what `find` has found, and read what is stored into host memory, part by part. -> the
        blocks' numbers, and layer -> the reads that must be over before it is copied."""
        stored, reads = self.stored(locations), {layer: [] for layer in self.layers}
        self.pool.share([location for location in locations if isinstance(location, int)])
        fresh = self.pool.allocate(len(stored))
        free = iter(fresh)
        blocks = [next(free) if isinstance(location, Stored) else location for location in locations]
        if stored:
            for part, (layer, memory) in enumerate(zip(self.layers, self.arrays)):
                reads[layer] += self.storage.read(stored, [memory[block] for block in fresh], part)
            new = zip(fresh, [key for key, found in zip(block_keys, locations) if isinstance(found, Stored)])
            then = lambda arrived: [self.register(*pair) for pair in new if arrived]  # noqa: E731
            self.cache.hold(f"read {fresh[0]}", sum(reads.values(), []), (self.pool, fresh), then=then)
        return blocks, reads


# 2. The cache ----------------------------------------------------------------------------------

class Loading:
    """A restoration: its tokens' slots, the host blocks, and the copies under way."""

    def __init__(self, cache: "HiddenCache", request, restoration, match):
        self.request, self.start = request, restoration.start
        pool, end, device = cache.pool, restoration.end, cache.model.device
        self.tokens = end - self.start
        self.rotation = cache.model.rotary(torch.arange(self.start, end, device=device))  # of all layers
        self.slots = pool.slots(upload(request.table, device))[self.start : end]  # [T]
        block_keys = request.chain[self.start // pool.block_size :]
        self.blocks, self.reads = cache.store.fetch(block_keys, match.blocks)  # in host memory
        self.pairs = links.BlockPairs(range(len(self.blocks)), self.blocks, apart=True)
        self.landing = {}  # layer -> where its rows land, [n * block size, width]
        self.transfers = {}  # layer -> the Transfer


class HiddenCache(Cache):
    """Each layer's input is kept in host memory, in blocks, and projected to K and V again."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None):
        """`blocks` in host memory, `storage` behind them; `bandwidth` of the link, where it is modelled."""
        self.blocks, self.bandwidth, self.storage = blocks, bandwidth, storage

    def attach(self, engine):
        super().attach(engine)
        wake = engine.wake.set
        self.load_link = hardware.connect("load", engine.clock, self.bandwidth, wake)
        self.save_link = hardware.connect("save", engine.clock, self.bandwidth, wake)
        self.lanes = deque(links.Worker("scatter", wake) for _ in range(THREADS))
        if self.storage:
            self.storage.open(wake)
        self.load_link.speed()  # a GPU's is measured now
        self.projecting = Speed(math.inf)  # rows of a layer a second
        self.spans = deque()  # (request, rows projected, label, mark, mark): what was computed lately
        self.clear_unsent()
        self.init_store()

    @property
    def width(self) -> int:
        """Numbers that are kept of a token's input to a layer."""
        return self.model.config.hidden_size

    def init_store(self):
        """Measured is all: keep the input of every layer but the first, which is the embedding."""
        layers = range(1, len(self.model.layers))
        rows = [(layer, self.width) for layer in layers]
        self.use_store(layers, BlockStore(self, "hidden states", self.blocks, rows))

    def use_store(self, layers, store: BlockStore):
        """Keep the input of `layers` in `store`."""
        self.layers, self.store, self.pools = layers, store, {"host": store.pool}
        memory = partial(links.host_memory, device=self.model.device, what="The snapshot buffer")
        rows = 4 * self.engine.token_budget  # the buffer is a ring of so many, for each part
        self.snapshot = [memory((rows, part.shape[-1]), part.dtype) for part in store.parts]
        self.ring, self.head, self.free = rows, 0, rows  # its length, the next row's place, unused rows

    def match(self, request):
        if locations := self.store.find(self.missing(request)):
            tokens = self.tokens_in(request, locations)
            source = "disk" if self.store.stored(locations) else "cpu"
            seconds = self.seconds(request.computed, request.computed + tokens, locations)
            return Match(tokens, seconds, locations, {source: tokens}, rows=tokens)

    def seconds(self, start: int, end: int, locations: list) -> float:
        """Estimate for a restoration: the slower of loading and projecting, and one layer of the other."""
        depth, size, store = len(self.model.layers), self.store.pool.block_bytes, self.store
        project = depth * self.seconds_to_project(end - start)
        load = self.load_link.seconds(len(locations) * size, len(store.parts))
        if self.storage:
            load = max(load, self.storage.seconds(store.stored(locations), size))
        return max(load, project) + min(load, project) / depth

    def seconds_to_project(self, tokens: int) -> float:
        """Estimate for a layer; before the first projection by its share of prefill."""
        self.record_spans()
        if self.projecting.samples:
            return self.projecting.seconds(tokens)
        return self.estimates.computing.seconds(tokens * self.estimates.machine.projecting)

    # Bringing back

    def restore(self, request, restoration, match):
        loading = Loading(self, request, restoration, match)
        ahead = deque(loading.reads)  # layers whose copies are not ordered yet
        try:
            while (layer := restoration.layers) < len(self.model.layers):
                # 1. Order the next layers; stop at one that is not read yet, unless it is the next to project
                while ahead and len(loading.landing) < DEPTH:
                    reads = loading.reads[ahead[0]]
                    if layer < ahead[0] and not all(read.ready for read in reads):
                        break
                    yield from reads
                    self.issue_layer(loading, ahead.popleft())
                # 2. Bring the next one back, when it is there
                yield from self.restore_layer(loading, layer)
                restoration.layers += 1
        finally:
            links.cancel([*loading.transfers.values(), *sum(loading.reads.values(), [])])
            given = [(self.store.pool, loading.blocks)]
            self.hold("load", list(loading.transfers.values()), given=given)

    def issue_layer(self, loading: Loading, layer: int):
        """Order a layer's rows, which land on the device."""
        rows = self.store.parts[self.store.layers.index(layer)]  # [blocks, block size, width]
        shape = len(loading.blocks), *rows.shape[1:]  # [n, block size, width]
        landed = self.load_link.landing(shape, rows.dtype)
        loading.landing[layer] = landed.flatten(0, 1)
        self.copy_layer(loading, layer, landed, rows, loading.pairs)

    def copy_layer(self, loading: Loading, layer: int, into, out_of, pairs=None):
        loading.transfers[layer] = transfer = self.load_link.copy(into, out_of, f"layer {layer}", pairs)
        self.counts["bytes_in"] += transfer.bytes

    def restore_layer(self, loading: Loading, layer: int):
        """Yield the transfer of a layer's rows, then project them. Layer 0's are the embedding."""
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
        """A layer's input [T, D] -> its K and V. K turns behind its matrix: no turn of the input would do."""
        keys, values = self.pool.memory[layer].flatten(1, 2)  # [slots, KVH, hd] each
        k, v = self.model.layers[layer].project_kv(hidden, rotation)  # [T, KVH, hd] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def record_spans(self):
        """Draw what was computed, and note how long projections took."""
        while self.spans:
            request, rows, label, *marks = self.spans.popleft()
            start, end = map(self.engine.clock.seconds, marks)
            request.timeline.add("compute", label, start, end)
            if rows >= FULL_SPEED[self.model.device.type]:  # a few take as long as many
                self.projecting.record(rows, end - start)

    # Keeping

    def save_layer(self, layer, hidden, batch):
        if layer == 0:
            self.inputs = []  # a step that was interrupted is computed again
        if layer in self.layers:
            self.inputs.append(hidden)

    def clear_unsent(self):
        self.unsent, self.rows, self.count = [], {}, 0

    def save(self, batch):
        """Note a step's states, [T, D] a layer. `flush` sends them when they are many, or a request ends."""
        for request, count in batch.work:
            _, indices = self.rows.setdefault(request, (request.computed - count, []))
            indices += range(self.count, self.count + count)
            self.count += count
        self.unsent.append(None)
        with suppress(RuntimeError):  # no device memory is left for a copy: see `flush`
            self.unsent[-1] = self.step_states(batch)
        if self.count * self.store.row_bytes >= SNAPSHOT or self.count >= self.engine.token_budget:
            self.flush()

    def step_states(self, batch) -> list:
        """-> the step's states, [T, D] a layer; on a GPU copies: the next pass overwrites the inputs."""
        on_gpu = self.model.device.type == "cuda"
        return list(torch.stack(self.inputs)) if on_gpu and self.inputs else self.inputs

    def flush(self):
        """Stage one: the noted rows leave in one transfer. Stage two: a thread waits for it."""
        rows, unsent, count = self.rows, self.unsent, self.count
        self.clear_unsent()
        pieces, states = self.store.fill(rows), None
        touched = [piece.block for piece in pieces]
        if pieces and count <= self.free and None not in unsent:
            with suppress(RuntimeError):  # no device memory is left to put steps together
                states = self.rows_to_keep(unsent)
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
        """-> what is kept of these steps, [rows, width] for each part."""
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*unsent)]

    def take_snapshot(self, states: list):
        """Begin to copy rows to the snapshot buffer."""
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
        """Stage two, on a thread: sort rows `out_of` the snapshot buffer `into` slots of blocks."""
        transfer.wait()
        for part, snapshot in zip(self.store.arrays, self.snapshot):  # [blocks, block size, D] and [rows, D]
            part.reshape(-1, part.shape[-1])[into] = as_integers(snapshot)[out_of]

    def on_saved(self, transfer, pieces: list[Piece], count: int, arrived: bool):
        """Stage two is over, for `count` rows of the snapshot buffer."""
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


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """A conversation that comes back from hidden states in each turn, then TTFT beside chapter 03's."""
    # 1. Ask: the device loses everything between two turns
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
        print("Query heads share KV heads: more bytes, and a projection besides. On this model chapter 03 is")
        print("the better choice, and the times below are of a model whose heads share nothing.")
    print("The device is evicted before each turn:")
    rows = [offload.describe(f"turn {number}", request) for number, request in enumerate(asked, 1)]
    print(f"  {lesson.TURNS[-1]} - {asked[-1].outcome.text}\n")
    print(f"The last turn (digits: layers; p: prefill, d: decode)\n{charts.chart(asked[-1].timeline)}\n")
    report["counters"] = engine.counters()
    engine.close()

    # 3. Time: on a model whose question costs less than its history
    larger = lesson.Larger(arguments, random.Random(0), engine_of)
    caches = HiddenCache(2 * larger.blocks, 1e9), offload.HostCache(2 * larger.blocks, 1e9)
    ways = dict(zip(("hidden states (04)", "K and V (03)"), map(larger.way, caches)))
    computed = min(way() for way in ways.values())  # and kept
    for title, _ in larger.over_links(caches, caches[0].seconds_to_project(lesson.HISTORY)):
        rows += lesson.table(title, lesson.in_turn(ways), "ttft_ms", "ms")
        ours, theirs = (row["ttft_ms"] for row in rows[-2:])
        print(f"  {ours / theirs:.2f} of chapter 03's, {ours / computed:.2f} of computing it again\n")
    print(
        "Half of the bytes help where the link is the slower one. Where it is not, projecting takes the\n"
        "time, and chapter 03 needs none. Both ways, each for some of the layers? Chapter 05."
    )
    return dict(report, rows=rows), [asked[-1].timeline]


def engine_of(model, blocks: int, cache) -> paged.Engine:
    """-> an engine with so many device blocks that restores whatever `cache` offers."""
    return paged.Engine(paged.Runner(model, blocks), Restorer(cache, Estimates(always=True)))


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    offload.add_arguments(parser)
    add, limit = parser.add_argument, cli.bounded(float, 1e-6, 1e6)
    add("--disk", type=Path, action="append", metavar="DIR", help="keep blocks in files too; may be repeated")
    add("--disk-limit", type=limit, default=10, metavar="GB", help="of all files (10)")


def bytes_per_token(model) -> int:
    """Of hidden states: the first layer's input is the embedding, and not kept."""
    return (model.config.num_hidden_layers - 1) * model.config.hidden_size * model.dtype.itemsize


def make_engine(model, arguments, kind=HiddenCache) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache, or another `kind`."""
    config, size = model.config, arguments.block_size
    block_bytes = size * bytes_per_token(model)
    blocks = offload.host_blocks(model, arguments, block_bytes)
    storage = in_directories(arguments.disk, arguments.disk_limit) if arguments.disk else None
    cache = kind(blocks, hardware.bandwidth(model, arguments.link), storage)
    engine = paged.make_engine(model, arguments, Restorer(cache, Estimates(arguments.always_restore)))
    words = f"{blocks} blocks of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB"
    print(f"Host: {words}, over a {cache.load_link}", file=sys.stderr)
    times = config.hidden_size * config.num_hidden_layers / config.kv_numbers_per_token
    if times >= 1:
        words = f"Query heads share KV heads here: hidden states are {times:.1f} times as large as K and V,"
        print(f"{words} and chapter 03 is the better choice.", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "04_hidden_state_cache", add_arguments, make_engine, demo)
