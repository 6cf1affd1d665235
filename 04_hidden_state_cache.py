"""Chapter 04: keep the input of each layer, and project it to K and V again (HCache).

The problem. Computing a lost KV cache again keeps the processor busy and leaves the link idle. Copying it
from the host (chapter 03) keeps the link busy and leaves the processor idle.

The mechanism. A layer's K and V are projections of its input, the hidden states, after a norm; K is then
rotated by its position. With multi-head attention that input is half as large as K and V together. So the
hidden states are kept, T tokens of D numbers a layer. When a conversation comes back, layer l + 1 travels
while layer l is projected, by the same function that the forward pass calls:

    projecting costs 4 T D^2 operations a layer, computing it 24 T D^2 + T^2 D:  6 + T / (4 D) times as much

These are the paper's counts, for an MLP that is 4 D wide. Layer 0 needs no states, since its input is the
embedding of the tokens. The question's rows follow through the layers as in chapter 03, so TTFT is about
max(link, projecting + question) and one layer of the other.

Saving must not delay the next token. Stage one: the states of one step, or of some, leave in one transfer
for a snapshot buffer in host memory. Stage two: threads on the host sort its rows into blocks, in which the
rows of a layer lie together: restoring reads one layer of many tokens, where decoding writes all layers of
one. If the buffer has no room, rows are dropped and nobody waits; what comes behind them in that conversation
is not kept either. A block is as long as the device's, so the same prefix finds it (the paper's chunks have
64 tokens: `--block-size 64`). With `--disk` blocks also go to files, which survive the process.

States are kept as the norm reads them, once for K and V, so K is rotated on its way back; that costs little.
With grouped-query attention (TinyLlama) they are larger than K and V, and chapter 03 is the better choice.

Source: HCache (Gao et al., EuroSys '25), sections 3.1, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

    python 04_hidden_state_cache.py --demo
    python 04_hidden_state_cache.py --prompt "What is a KV cache?" --disk states
    python 04_hidden_state_cache.py                        # the server, on http://127.0.0.1:5000
"""

import argparse
import importlib
import math
import random
import shell.cli as cli
import statistics
import sys
from collections import deque
from functools import partial
from pathlib import Path

import numpy
import torch

from common import link as links
from common.requests import Request
from common.restoring import FULL_SPEED, Cache, Match
from common.speed import ROWS, Speed, time_projecting
from common.store import BlockStore, Move, StoredChunks
from shell import charts, checkpoint, lesson, modelled_link
from shell.backends import in_directories
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
SNAPSHOT = 1 << 21  # bytes of states that wait, at most, before they leave for the snapshot buffer
STEPS = 4  # of a whole token budget that the snapshot buffer holds
DEPTH = 8  # layers of a restoration that are on their way to the device, or there and not yet projected
THREADS = 8  # of stage two

# 1. The cache ----------------------------------------------------------------------------------

class HiddenCache(Cache):
    """Each layer's input is kept in host memory, in blocks, and projected to K and V again."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None):
        """`blocks` in host memory, and `storage` behind them; `bandwidth` of the modelled link, in bytes/s or
        a Bandwidth, where there is no GPU."""
        self.blocks, self.bandwidth, self.storage, self.pools = blocks, bandwidth, storage, {}

    @property
    def width(self) -> int:
        """Numbers that are kept of a layer's input, for a token."""
        return self.model.config.hidden_size

    def attach(self, engine):
        super().attach(engine)
        wake = engine.wake.set
        self.load_link = links.Link("load", engine.clock, self.bandwidth, wake)
        self.save_link = links.Link("save", engine.clock, self.bandwidth, wake)
        self.lanes = deque(links.Lane("scatter", wake) for _ in range(THREADS))
        if self.storage:
            self.storage.open(wake)
        self.forget_steps()
        self.keep(range(1, len(self.model.layers)), "hidden states")
        self.projecting = Speed(math.inf)  # rows of a layer a second
        self.spans = deque()  # (request, rows projected, label, mark, mark): what was computed lately

    def keep(self, layers, name: str, of_blocks=(), store: BlockStore | None = None):
        """From now on keep the input of `layers`, and the (layer, side) of the device's blocks in `of_blocks`
        (chapter 05): a part each. `name` is that of all this; `store` where it has been kept before."""
        self.layers, self.of_blocks, config = layers, of_blocks, self.model.config
        widths = [self.width] * len(layers)
        widths += [config.num_key_value_heads * config.head_dim] * len(of_blocks)
        memory = partial(links.host_memory, dtype=self.model.dtype, device=self.model.device)
        # 1. The blocks in host memory
        if store is None:
            pool = paged.BlockPool(self.blocks, self.pool.block_size)
            shapes = [(self.blocks, pool.block_size, width) for width in widths]
            parts = [memory(shape, what="The host pool") for shape in shapes]
            store = BlockStore(self, pool, parts, name, self.storage)
        self.store, self.stores, self.pools["host"] = store, [store], store.pool
        self.engine.pools = {**self.engine.pools, **self.pools}

        # 2. The snapshot buffer, in host memory
        blocks = STEPS * -(-self.engine.token_budget // 16)
        self.snapshots = paged.BlockPool(blocks, 16)  # of 16 rows each, however long the engine's blocks are
        self.snapshot = [memory((16 * blocks, width), what="The snapshot buffer") for width in widths]
        self.taken = [links.as_integers(rows) for rows in self.snapshot]  # for NumPy
        self.row_bytes = sum(widths) * self.model.dtype.itemsize

    # Finding

    def match(self, request):
        blocks, reached = self.store.find(request)
        if blocks:
            tokens, source = reached - request.computed, "disk" if self.store.stored(blocks) else "cpu"
            return Match(tokens, self.seconds(tokens, blocks), blocks, source, tokens, self.store)

    def seconds(self, tokens: int, blocks: list) -> float:
        """Estimate for a restoration: the slower of loading and projecting, and one layer of the other."""
        depth = len(self.layers) + 1
        project = depth * self.seconds_to_project(tokens)
        load = self.load_link.seconds(len(blocks) * self.store.pool.block_bytes)
        load = max(load, self.store.seconds_to_read(blocks))
        return max(load, project) + min(load, project) / depth

    def seconds_to_project(self, tokens: int) -> float:
        """Estimate for a layer."""
        self.draw()
        return self.projecting.seconds(tokens)

    def draw(self):
        """Draw what was computed, and note how long projections took."""
        while self.spans:
            request, rows, label, *marks = self.spans.popleft()
            start, end = map(self.engine.clock.seconds, marks)
            request.timeline.add("compute", label, start, end)
            if rows >= FULL_SPEED:  # a few take as long as many
                self.projecting.note(rows, end - start)

    # Bringing back

    def restore(self, request, restoration, match):
        start, end, depth = restoration.start, restoration.end, len(self.layers) + 1
        positions = torch.arange(start, end, device=self.model.device)  # [T]
        slots = self.slots(request, positions)  # [T]
        numbers, reads = self.store.bring(request, start, match.blocks)
        landing, transfers = {}, []  # layer -> where its rows land; of each layer from 1 on
        try:
            if request in self.rows:
                self.flush()  # what it has noted ends here
            while (layer := restoration.layers) < depth:
                # 1. Order the next layers, part 0 first. A read is waited for if nothing can be projected
                while (part := len(transfers)) < len(self.layers) and len(landing) < DEPTH:
                    if (landing or layer == 0) and not all(read.ready for read in reads[part]):
                        break
                    yield from reads[part]
                    label = f"layer {part + 1}"
                    landing[part + 1], transfer = self.fetch(self.store.parts[part], numbers, label)
                    transfers.append(transfer)
                # 2. Project the next one, when it is there
                if layer == 0:
                    tokens = torch.tensor(request.tokens[start:end], device=self.model.device)
                    hidden = self.model.embed(tokens)  # [T, D]
                else:
                    yield transfers[layer - 1]
                    hidden = landing.pop(layer)[start - end :]  # [T, D]
                began = self.engine.clock.mark()
                self.project(layer, hidden, positions, slots)
                self.spans.append((request, end - start, f"layer {layer}", began, self.engine.clock.mark()))
                restoration.layers += 1
        finally:
            # What is still on its way is written to `landing`, which lives as long as this default argument
            self.hold("load", transfers, (self.store.pool, numbers), then=lambda arrived, to=landing: None)
            self.store.pool.release(numbers)

    def fetch(self, part, numbers: list[int], label: str):
        """Order one part [blocks, block size, D] of n blocks -> rows [n * block size, D] on the device, and
        the Transfer."""
        landed = torch.empty(len(numbers), *part.shape[1:], dtype=part.dtype, device=self.model.device)
        runs = offload.adjacent(list(range(len(numbers))), numbers)
        into = [landed[to : to + count] for to, _, count in runs]  # [count, block size, D] each
        out_of = [part[at : at + count] for _, at, count in runs]
        transfer = self.load_link.copy(into, out_of, label)
        self.counts["bytes_in"] += transfer.bytes
        return landed.flatten(0, 1), transfer

    def slots(self, request, positions):
        """Where tokens at `positions` [T] are among the slots of the device's blocks, [T]."""
        table, size = torch.tensor(request.table, device=self.model.device), self.pool.block_size
        return table[positions // size] * size + positions % size

    @torch.inference_mode()
    def project(self, layer: int, hidden, positions, slots):
        """The input [T, D] of a layer -> its K and V, in the device's blocks."""
        keys, values = self.pool.memory[layer].flatten(1, 2)  # [slots, KVH, hd] each
        k, v = self.model.layers[layer].project_kv(hidden, positions)  # [T, KVH, hd] each
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    # Keeping

    def save_layer(self, layer, hidden, batch):
        if layer == 0:
            self.step = []  # a step that was given up is no step
        if layer in self.layers:
            self.step.append(hidden)

    def forget_steps(self):
        self.steps, self.slots_of_steps, self.rows, self.count = [], [], {}, 0

    def save(self, batch):
        """Note a step's states [T, D] a layer; they leave when they are many, or a request is over."""
        for request, count in batch.work:
            first, places = self.rows.setdefault(request, (request.computed - count, []))
            places += range(self.count, self.count + count)
            self.count += count
        self.steps.append(self.step)
        self.slots_of_steps.append(batch.slots)
        if self.count * self.row_bytes >= SNAPSHOT or self.count >= self.engine.token_budget:
            self.flush()

    def flush(self):
        """Stage one: the rows that were noted leave in one transfer. Stage two: a thread waits for it."""
        noted, steps, slots, count = self.rows, self.steps, self.slots_of_steps, self.count
        self.forget_steps()
        moves = self.store.fill(noted)
        touched = [move.block for move in moves]
        blocks = self.snapshots.num_blocks(count)
        if moves and blocks <= self.snapshots.available:
            # 1. Room in the snapshot buffer, and where in it each noted row will be: `index`
            places = self.snapshots.allocate(blocks)
            index = (16 * numpy.array(places)[:, None] + numpy.arange(16)).reshape(-1)[:count]  # [rows]
            runs = offload.adjacent(list(range(blocks)), places)
            join = lambda pieces: pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # noqa: E731
            states = [join(pieces) for pieces in zip(*steps)]  # [rows, D] each
            for layer, side in self.of_blocks:
                states.append(self.pool.memory[layer, side].flatten(0, 1)[join(slots)].flatten(1))
            into, out_of = [], []
            for snapshot, rows in zip(self.snapshot, states, strict=True):
                for at, to, length in runs:
                    out_of.append(rows[16 * at : 16 * (at + length)])
                    into.append(snapshot[16 * to : 16 * to + len(out_of[-1])])
            # 2. The transfer, and the job of a thread behind it, which hold what they read and write
            transfer = self.save_link.copy(into, out_of, "states")
            self.lanes.rotate()
            what = self.store, transfer, moves, index, out_of
            job = self.lanes[0].submit("scatter", 0, self.scatter, *what)
            held = (self.snapshots, places), (self.store.pool, touched)
            self.hold("save", [job], *held, then=partial(self.on_saved, transfer, moves))
            self.snapshots.release(places)
            self.counts["bytes_out"] += transfer.bytes
        else:
            self.store.drop(moves)
        self.store.pool.release(touched)

    def scatter(self, store, transfer, moves: list[Move], index, states):
        """Stage two, on a thread: sort rows into blocks. `index`: where in the snapshot buffer each noted row
        is. `states` are an argument so that they live until they are copied."""
        transfer.wait()
        out_of = index[numpy.concatenate([move.noted for move in moves])]  # [rows]
        size = store.pool.block_size
        first = [(size * move.block + move.at, len(move.noted)) for move in moves]
        into = numpy.concatenate([numpy.arange(at, at + rows) for at, rows in first])  # [rows]
        for part, snapshot in zip(store.arrays, self.taken):  # [blocks, block size, D] and [rows, D]
            part.reshape(-1, part.shape[-1])[into] = snapshot[out_of]

    def on_saved(self, transfer, moves: list[Move], arrived: bool):
        """Stage two is over."""
        self.store.saved(moves, arrived)
        for request in {move.filling.request for move in moves}:
            request.timeline.add("save", "states", *transfer.span())

    def finished(self, request):
        self.draw()
        if request in self.rows:
            self.flush()
        for store in self.stores:
            store.finished(request)

    # Measuring

    def idle(self):
        interrupt = self.engine.interrupt
        self.load_link.measure(interrupt)
        tokens = min(ROWS, self.model.config.max_position_embeddings)
        seconds = time_projecting(self.model, tokens, interrupt)
        self.projecting.forget()
        self.projecting.note(tokens, seconds)
        return 1 / self.seconds(self.pool.block_size, [0])

    def close(self):
        if self.storage:
            self.drain()
        for lane in (self.load_link, self.save_link, *self.lanes):
            lane.close()
        if self.storage:
            self.storage.close()


# 2. The demo -----------------------------------------------------------------------------------

LARGER, HISTORY, ASKED = "random:long", 1024, 32  # for times: model, tokens, tokens
LINKS = {"the link is the bottleneck": 2.0, "computing is the bottleneck": 0.5}  # transfer over projecting


def demo(model, frontend: Frontend, arguments):
    """A conversation that comes back from hidden states in each turn, then TTFT beside chapter 03's."""
    # 1. Ask: the device loses everything between two turns
    options = argparse.Namespace(**{**vars(arguments), "always_restore": True})
    engine, rng = make_engine(model, options), random.Random(0)
    asked = converse(engine, frontend, rng, max(2, min(arguments.max_tokens, 16)))
    verified = lesson.verify(paged.baseline.Engine(model), asked)

    # 2. Show
    link, config = engine.cache.load_link, model.config
    states, kv = bytes_per_token(model), config.kv_numbers_per_token * model.dtype.itemsize
    print(f"{link}\n\nA token takes {states} bytes as hidden states and {kv} as K and V.")
    print("The device is evicted before each turn:")
    rows = [offload.describe(f"turn {number}", request) for number, request in enumerate(asked, 1)]
    print(f"  {lesson.TURNS[-1]} - {asked[-1].outcome.text}\n")
    print(f"The last turn (digits: layers; p: prefill, d: decode)\n{charts.chart(asked[-1].timeline)}\n")
    said = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), counters=engine.counters())
    engine.close()

    # 3. Time: on a model whose question costs less than its history
    larger, *_ = checkpoint.load(LARGER, arguments.dtype, arguments.device)
    prompt = [rng.randrange(300, larger.config.vocab_size) for _ in range(HISTORY)]
    blocks = -(-(HISTORY + 2 * ASKED) // 16)
    caches = HiddenCache(2 * blocks, 1e9), offload.HostCache(2 * blocks, 1e9)
    engines = [paged.Engine(paged.Runner(larger, blocks), cache, always_restore=True) for cache in caches]
    hidden, kv = (partial(once, engine, prompt, rng) for engine in engines)
    ways = {"hidden states (04)": hidden, "K and V (03)": kv}
    computed = min(way() for way in ways.values())  # and kept
    states = HISTORY * larger.config.hidden_size * larger.dtype.itemsize  # bytes of a layer
    even = states / caches[0].seconds_to_project(HISTORY)  # bytes/s
    for words, share in LINKS.items() if link.modelled else [("the link as it is", 1.0)]:
        for cache in caches if link.modelled else ():
            cache.load_link.bandwidth.value = even / share
        taken = lesson.in_turn(ways, 3)
        rows += lesson.table(f"{LARGER}, TTFT behind {HISTORY} tokens, {words}", taken, "ttft_ms", "ms")
        ours, theirs = (statistics.median(samples) for samples in taken.values())
        print(f"  {ours / theirs:.2f} of chapter 03's, {ours / computed:.2f} of computing it again\n")
    print(
        "Half of the bytes help where the link is the slower one. Where it is not, projecting takes the\n"
        "time, and chapter 03 needs none. Both ways, each for some of the layers? Chapter 05."
    )
    return dict(said, verified=verified, rows=rows), [asked[-1].timeline]


def converse(engine, frontend: Frontend, rng, new: int) -> list[Request]:
    """Ask about a document, turn by turn; the device loses everything before each."""
    document, messages, asked = lesson.document(frontend, rng, frontend.context // 2, lesson.SECRET), [], []
    for said in (document, *lesson.TURNS[1:]):
        messages.append(dict(role="user", content=said))
        lesson.settle(engine)
        engine.evict("device")
        asked += engine.generate([frontend.request(messages=messages, max_tokens=new)])
        messages.append(dict(role="assistant", content=asked[-1].outcome.text))
    return asked


def once(engine, prompt: list[int], rng) -> float:
    """-> TTFT of another question behind the same history, in ms."""
    question = [rng.randrange(300, engine.model.config.vocab_size) for _ in range(ASKED)]
    return lesson.ask(engine, prompt + question, 1, "device").outcome.ttft_ms


# 3. Main ---------------------------------------------------------------------------------------

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
    bandwidth = modelled_link.bandwidth(model, arguments.link)
    engine = paged.make_engine(model, arguments, kind(blocks, bandwidth, storage))
    words = f"{blocks} blocks of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB"
    print(f"Host: {words}, over a {engine.cache.load_link}", file=sys.stderr)
    times = config.hidden_size * config.num_hidden_layers / config.kv_numbers_per_token
    if times > 1:
        words = f"Query heads share KV heads here: hidden states are {times:.1f} times as large as K and V,"
        print(f"{words} and chapter 03 is the better choice.", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "04_hidden_state_cache", add_arguments, make_engine, demo)
