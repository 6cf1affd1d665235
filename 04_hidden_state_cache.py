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
for a snapshot buffer in host memory. Stage two: threads on the host sort its rows into chunks of 64 tokens,
in which the rows of a layer lie together, because restoring reads one layer of many tokens where decoding
writes all layers of one. Where the snapshot buffer has no room, the rows are dropped and nobody waits; what
comes behind them in that conversation is not kept either. The unfinished chunk is kept in host memory, and
the next turn fills it. With `--disk` full chunks also go to files, which survive the process.

K is rotated after it is projected and not before it is saved: states are kept as the norm reads them, once
for K and V, and rotating costs little. With grouped-query attention (TinyLlama) hidden states are larger than
K and V, and this chapter loses to chapter 03; it says so when it starts.

Source: HCache (Gao et al., EuroSys '25), sections 3.1, 4.2 and 5. Its scheduler, section 4.1, is chapter 05.

    python 04_hidden_state_cache.py --demo
    python 04_hidden_state_cache.py --prompt "What is a KV cache?" --disk chunks
    python 04_hidden_state_cache.py --ingest notes.txt --disk chunks
    python 04_hidden_state_cache.py                        # the server, on http://127.0.0.1:5000
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from collections import deque
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy
import torch

from common import checkpoint, cli, lesson
from common import link as links
from common.requests import BadRequest, Frontend, Request
from common.restoring import LONG, PAUSE, Cache, Match
from common.store import CHUNK, ChunkFiles, ChunkStore, Lane, Move

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
SNAPSHOT = 1 << 21  # bytes of states that wait, at most, before they leave for the snapshot buffer
STEPS = 4  # of a whole token budget that the snapshot buffer holds
DEPTH = 8  # layers of a whole context that land on the device before they are projected
THREADS = 8  # of stage two
LONGEST_CLOSE = 5.0  # seconds to wait for files at the end
PAUSE_BEFORE = 0.02  # seconds, of a measurement: a loop without is up to twice as fast as a restoration

# 1. The cache ----------------------------------------------------------------------------------

class HiddenCache(Cache):
    """Each layer's input is kept in chunks of 64 tokens, and projected to K and V again."""

    columns = slice(None)  # of the states: chapter 09 divides them over ranks

    def __init__(self, chunks: int, bandwidth=None, files: ChunkFiles | None = None):
        """`chunks` in host memory, and `files` behind them; `bandwidth` of the modelled link, in bytes/s or a
        Bandwidth, where there is no GPU."""
        self.chunks, self.bandwidth, self.files, self.pools = chunks, bandwidth, files, {}

    def attach(self, engine):
        super().attach(engine)
        config, device, wake = self.model.config, self.model.device, engine.wake.set
        self.load_link = links.Link("load", engine.clock, self.bandwidth, wake)
        self.save_link = links.Link("save", engine.clock, self.bandwidth, wake)

        self.lanes = [Lane("scatter", wake) for _ in range(THREADS)]
        self.turn = cycle(self.lanes)
        self.forget_steps()

        # The landing memory, on the device
        self.most = config.max_position_embeddings // CHUNK + 2  # chunks that a restoration touches
        self.landing = paged.BlockPool(min(DEPTH, config.num_hidden_layers) * self.most, CHUNK)
        shape = self.landing.size, CHUNK, len(range(config.hidden_size)[self.columns])
        self.landed = torch.empty(shape, dtype=self.model.dtype, device=device)  # [places, 64, D]

        self.keep(range(1, len(self.model.layers)), "hidden states")
        self.rates = deque(maxlen=64)  # seconds to project a row of a layer, the last times
        self.spans = deque()  # (request, its rows, label, mark, mark) of projections not in `rates` yet

    def keep(self, layers, name: str, of_blocks=(), store: ChunkStore | None = None):
        """From now on keep the input of `layers`, and the (layer, side) of the device's blocks in `of_blocks`
        (chapter 05): a part each. `name` is that of all this; `store` where it has been kept before."""
        self.layers, self.of_blocks, config = layers, of_blocks, self.model.config
        widths = [len(range(config.hidden_size)[self.columns])] * len(layers)
        widths += [config.num_key_value_heads * config.head_dim] * len(of_blocks)
        memory = partial(links.host_memory, dtype=self.model.dtype, device=self.model.device)
        # 1. The chunks, in host memory
        if store is None:
            parts = [memory((self.chunks, CHUNK, width), what="The chunk memory") for width in widths]
            prefixes = paged.Prefixes(f"{self.model.digest.hex()} {self.model.dtype} {name}", CHUNK)
            pool = paged.BlockPool(self.chunks, CHUNK)
            store = ChunkStore(self, pool, parts, prefixes, self.files)
            pool.block_bytes = store.chunk_bytes
        self.store, self.stores, self.pools["host"] = store, [store], store.pool
        self.engine.pools = {**self.engine.pools, **self.pools}

        # 2. The snapshot buffer, in host memory
        blocks = STEPS * -(-max(self.engine.token_budget, CHUNK) // 16)
        self.snapshots = paged.BlockPool(blocks, 16)  # of 16 rows each: numbers of runs of the rows below
        self.snapshot = [memory((16 * blocks, width), what="The snapshot buffer") for width in widths]
        self.taken = [links.as_integers(rows) for rows in self.snapshot]  # for NumPy
        self.row_bytes = sum(widths) * self.model.dtype.itemsize

    # Finding

    def match(self, request):
        chunks, reached = self.store.find(request)
        if chunks:
            tokens, source = reached - request.computed, "disk" if self.store.in_files(chunks) else "cpu"
            return Match(tokens, self.seconds(tokens, chunks), chunks, CHUNK, source, tokens, self.store)

    def seconds(self, tokens: int, chunks: list) -> float:
        """Estimate for a restoration: the slower of loading and projecting, and one layer of the other."""
        depth = len(self.layers) + 1
        project = depth * self.seconds_to_project(tokens)
        load = self.load_link.seconds(len(chunks) * self.store.chunk_bytes)
        load = max(load, self.store.seconds_to_read(chunks))
        return max(load, project) + min(load, project) / depth

    def seconds_to_project(self, tokens: int) -> float:
        """Estimate for a layer."""
        self.learn()
        return tokens * statistics.median(self.rates) if self.rates else 0.0

    def learn(self):
        """Note how long projections took, and draw them."""
        while self.spans:
            request, rows, label, *marks = self.spans.popleft()
            start, end = map(self.engine.clock.seconds, marks)
            request.timeline.add("compute", label, start, end)
            if rows >= LONG:  # a few take as long as many
                self.rates.append((end - start) / rows)

    # Bringing back

    def restore(self, request, restoration, match):
        start, end, depth = restoration.start, restoration.end, len(self.layers) + 1
        positions = torch.arange(start, end, device=self.model.device)  # [T]
        slots = self.slots(request, positions)  # [T]
        numbers, reads = self.store.bring(request, start, match.blocks)
        if request in self.rows:
            self.flush()  # what it has noted ends here
        waiting, transfers = deque(), []  # waiting: landing places of layers on their way
        try:
            while restoration.layers < depth:
                # 1. Order the next layers, as far as they have been read and there is room for them to land
                while self.room(request, len(numbers)):
                    part = max(0, restoration.layers - 1) + len(waiting)  # layer 1 is part 0
                    busy = waiting or restoration.layers == 0
                    if part == len(self.layers) or busy and not all(read.ready for read in reads[part]):
                        break
                    yield from reads[part]
                    waiting.append(places := self.landing.allocate(len(numbers)))
                    label = f"layer {self.layers[part]}"
                    transfers.append(self.fetch(self.store.parts[part], numbers, places, label))
                # 2. Project the next one, when it is there
                if restoration.layers == 0:
                    tokens = torch.tensor(request.tokens[start:end], device=self.model.device)
                    hidden = self.model.embed(tokens)  # [T, D]
                elif waiting:
                    yield transfers[restoration.layers - 1]
                    hidden = self.whole(self.landed_rows(waiting[0], start, end - start))  # [T, D]
                else:
                    yield self.no_room(restoration)
                    continue
                began = self.engine.clock.mark()
                self.project(restoration.layers, hidden, positions, slots)
                self.note(request, end - start, f"layer {restoration.layers}", began)
                if restoration.layers > 0:
                    self.landing.release(waiting.popleft())
                restoration.layers += 1
        finally:
            on_their_way = sum(waiting, [])
            self.hold("load", transfers, (self.landing, on_their_way), (self.store.pool, numbers))
            self.landing.release(on_their_way)
            self.store.pool.release(numbers)

    def note(self, request, rows: int, label: str, began):
        """Something has been computed since mark `began`; `rows`, if it was a projection of so many."""
        self.spans.append((request, rows, label, began, self.engine.clock.mark()))

    def room(self, request, chunks: int) -> bool:
        """Whether a layer may land. Others leave two layers of the longest context to the oldest restoration:
        one that travels while one is projected. So it always gets on."""
        oldest = next(other for other in self.engine.running if other.restoration)
        return chunks <= self.landing.available - (0 if request is oldest else 2 * self.most)

    def no_room(self, restoration):
        """Others have the landing memory: older ones, or what is still on its way for one that was given up.
        Raises TransferError when it is too late for this one."""
        if time.perf_counter() > restoration.deadline:
            raise links.TransferError("landing memory is late")
        self.poll()
        return PAUSE

    def fetch(self, part, numbers: list[int], places: list[int], label: str):
        """Order one part [chunks, 64, D] of some chunks, to `places` of the landing memory."""
        runs = offload.adjacent(places, numbers)
        into = [self.landed[to : to + count] for to, _, count in runs]  # [count, 64, D] each
        out_of = [part[at : at + count] for _, at, count in runs]
        transfer = self.load_link.copy(into, out_of, label)
        self.counts["bytes_in"] += transfer.bytes
        return transfer

    def landed_rows(self, places: list[int], start: int, count: int):
        """The rows [count, D] that have landed, those before token `start` of the first chunk left out."""
        here = slice(places[0], places[-1] + 1) if places[-1] - places[0] == len(places) - 1 else places
        return self.landed[here].flatten(0, 1)[start % CHUNK :][:count]

    def whole(self, hidden):
        """All columns of rows of which `columns` have landed, [T, D]."""
        return hidden

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
            self.step.append(hidden[:, self.columns])

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
        moves, over = self.store.fill(noted)
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
            what = self.store, transfer, moves, index, out_of
            job = next(self.turn).submit("scatter", 0, self.scatter, *what)
            touched = {move.chunk.number for move in moves} | {move.source for move in moves} - {None}
            held = (self.snapshots, places), (self.store.pool, list(touched))
            self.hold("save", [job], *held, then=partial(self.on_saved, transfer, moves))
            self.snapshots.release(places)
            self.counts["bytes_out"] += transfer.bytes
        else:
            self.store.drop(moves)
        self.store.released(moves, over)

    def scatter(self, store, transfer, moves: list[Move], index, states):
        """Stage two, on a thread. `states` are an argument so that they live until they are copied."""
        transfer.wait()
        store.put(moves, self.taken, index)

    def on_saved(self, transfer, moves: list[Move], arrived: bool):
        """Stage two is over."""
        self.store.saved(moves, arrived)
        for request in {move.request for move in moves}:
            request.timeline.add("save", "states", *transfer.span())

    def finished(self, request):
        self.learn()
        if request in self.rows:
            self.flush()
        for store in self.stores:
            store.finished(request)

    # Measuring

    def idle(self):
        self.load_link.measure(self.engine.restorer.interrupt)
        self.measure_projection()
        return 1 / self.seconds(CHUNK, [0])

    def measure_projection(self):
        """Project as in a restoration, all layers in order, each time after a pause, into free blocks. Raises
        Interrupted when somebody comes."""
        tokens = min(8 * CHUNK, self.model.config.max_position_embeddings)
        blocks, clock, taken = self.pool.num_blocks(tokens), self.engine.clock, []
        if self.pool.free.count(1) < blocks:
            return
        request, device = Request([0] * tokens, 1, table=self.pool.allocate(blocks)), self.model.device
        shape = tokens, self.model.config.hidden_size
        hidden = torch.randn(shape, device=device).to(self.model.dtype)  # [T, D]
        positions = torch.arange(tokens, device=device)  # [T]
        slots = self.slots(request, positions)
        try:
            for _ in range(4):
                self.engine.sleep(PAUSE_BEFORE)
                began = clock.mark()
                for layer in range(len(self.model.layers)):
                    self.engine.restorer.interrupt()
                    self.project(layer, hidden, positions, slots)
                taken.append((began, clock.mark()))
        finally:
            self.pool.release(request.table)
        rows = tokens * len(self.model.layers)
        self.rates.clear()
        for began, ended in taken[1:]:  # the first one touches memory
            self.rates.append((clock.seconds(ended) - clock.seconds(began)) / rows)

    def close(self):
        until = time.perf_counter() + LONGEST_CLOSE
        while self.files and any(self.under_way.values()) and time.perf_counter() < until:
            self.poll()  # what is on its way to a file is still wanted
            time.sleep(1e-3)
        self.load_link.close()
        self.save_link.close()
        for lane in self.lanes:
            lane.close()
        if self.files:
            self.files.close()


# 2. The demo -----------------------------------------------------------------------------------

LARGER, HISTORY, ASKED = "random:small", 1024, 32  # for times: model, tokens, tokens


def demo(model, frontend: Frontend, arguments):
    """A conversation that comes back from hidden states in each turn, then TTFT beside chapter 03's."""
    if isinstance(arguments.demo, Path):
        return ingest(frontend, arguments, partial(make_engine, model, arguments))
    if (arguments.corrupt or 0) >= len(model.layers):
        raise BadRequest(f"--corrupt must be below {len(model.layers)}, the number of layers.")
    # 1. Ask: the device loses everything between two turns
    options = argparse.Namespace(**{**vars(arguments), "always_restore": True})
    engine, rng = make_engine(model, options), random.Random(0)
    asked = converse(engine, frontend, rng, max(2, min(arguments.max_tokens, 16)))
    verified = lesson.equal_to_baseline(model, asked)

    # 2. Show
    link, config, rows = engine.cache.load_link, model.config, []
    states, kv = bytes_per_token(model), config.kv_numbers_per_token * model.dtype.itemsize
    print(f"{link}\n\nA token takes {states} bytes as hidden states and {kv} as K and V.")
    print("The device is evicted before each turn:")
    for number, request in enumerate(asked, 1):
        rows.append(offload.describe(f"turn {number}", request))
    print(f"  {lesson.TURNS[-1]} - {asked[-1].outcome.text}\n")
    print(f"The last turn (digits: layers; p: prefill, d: decode)\n{asked[-1].timeline.chart()}\n")
    if arguments.corrupt is not None:
        corrupt(engine, asked[-1], arguments.corrupt)
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), counters=engine.counters())
    engine.close()

    # 3. Time: on a model whose question costs less than its history
    larger, *_ = checkpoint.load(LARGER, arguments.dtype, arguments.device)
    prompt = [rng.randrange(300, larger.config.vocab_size) for _ in range(HISTORY)]
    blocks = -(-(HISTORY + 2 * ASKED) // 16)
    caches = HiddenCache(blocks, 1e9), offload.HostCache(2 * blocks, 1e9)
    engines = [paged.Engine(paged.Runner(larger, blocks), cache, always_restore=True) for cache in caches]
    transfer = HISTORY * bytes_per_token(larger) / (len(larger.layers) - 1)  # bytes of a layer's states
    projecting = caches[0].seconds_to_project(HISTORY)
    hidden, kv = (partial(once, engine, prompt, rng) for engine in engines)
    ways = {"hidden states (04)": hidden, "K and V (03)": kv}
    computed = min(way() for way in ways.values())  # and kept
    for words, share in (("the link is the bottleneck", 2.0), ("computing is the bottleneck", 0.5)):
        for cache in caches if link.modelled else ():
            cache.load_link.bandwidth.value = transfer / projecting / share
        title = f"{LARGER}, TTFT behind {HISTORY} tokens" + link.modelled * f", {words}"
        taken = lesson.in_turn(ways, 3)
        rows += lesson.table(title, taken, "ttft_ms", "ms")
        ours, theirs = (statistics.median(samples) for samples in taken.values())
        print(f"  {ours / theirs:.2f} of chapter 03's, {ours / computed:.2f} of computing it again\n")
        if not link.modelled:
            break
    for engine in engines:
        engine.close()
    print(
        "Half of the bytes help where the link is the slower one. Where it is not, projecting takes the\n"
        "time, and chapter 03 needs none. Both ways, each for some of the layers? Chapter 05."
    )
    return dict(report, verified=verified, rows=rows), [asked[-1].timeline]


def converse(engine, frontend: Frontend, rng, new: int) -> list[Request]:
    """Ask about a document, turn by turn; the device loses everything before each."""
    document, asked = lesson.document(frontend, rng, frontend.context // 2, lesson.SECRET), []
    messages = [dict(role="user", content=document)]
    for question in lesson.TURNS[1:]:
        lesson.settle(engine)
        engine.evict("device")
        asked += engine.generate([frontend.request(messages=messages, max_tokens=new)])
        messages.append(dict(role="assistant", content=asked[-1].outcome.text))
        messages.append(dict(role="user", content=question))
    lesson.settle(engine)
    engine.evict("device")
    return asked + engine.generate([frontend.request(messages=messages, max_tokens=new)])


def once(engine, prompt: list[int], rng) -> float:
    """-> TTFT of another question behind the same history, in ms."""
    question = [rng.randrange(300, engine.model.config.vocab_size) for _ in range(ASKED)]
    return lesson.ask(engine, prompt + question, 1, "device").outcome.ttft_ms


def corrupt(engine, request: Request, layer: int):
    """Set one layer's states to zero: what is restored really is what is computed with."""
    engine.cache.store.parts[layer - 1].zero_()
    again = lesson.ask(engine, request.tokens[: request.prompt_tokens], request.max_tokens, "device")
    same = sum(one == other for one, other in zip(again.new, request.new))
    print(f"With layer {layer}'s states set to zero, {same} of {len(request.new)} tokens are the same.\n")


def ingest(frontend: Frontend, arguments, make):
    """Compute a text once, and keep its states in files."""
    if not arguments.disk:
        raise BadRequest("--ingest keeps states in files; say where with --disk DIR.")
    try:
        text = arguments.demo.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"Cannot read '{arguments.demo}' as text ({error}).") from None
    request, engine = frontend.request(text, max_tokens=1), make()
    engine.generate([request])
    lesson.settle(engine)
    written = engine.cache.files.counts["file_writes"]
    engine.close()
    where = ", ".join(map(str, arguments.disk))
    print(f"{request.prompt_tokens} tokens: {written} chunks written to {where}.")
    if engine.counts["file_drops"] or engine.counts["dropped_chunks"]:
        print("Storage was too slow for some: run this again, and it writes the others.")
    return dict(chunks=written), [request.timeline]


# 3. Main ---------------------------------------------------------------------------------------

def add_shared_arguments(parser):
    """Chapter 05 has the same."""
    paged.add_arguments(parser)
    add, words = parser.add_argument, "chunks of 64 tokens in host memory (four times the device's)"
    add("--cpu-chunks", type=cli.bounded(int, 0, 1 << 24), metavar="N", help=words)
    add("--disk", type=Path, action="append", metavar="DIR", help="keep chunks in files too; may be repeated")
    gigabytes = cli.bounded(float, 1e-6, 1e6)
    add("--disk-limit", type=gigabytes, default=10, metavar="GB", help="of all files (10)")
    words = "compute a text, keep its states in files, and end"
    add("--ingest", type=Path, dest="demo", metavar="FILE", help=words)
    add("--always-restore", action="store_true", help="restore even what is computed sooner")
    links.add_arguments(parser)
    parser.set_defaults(cpu_blocks=None, corrupt=None)  # of chapter 03, with which the page compares; of 04


def add_arguments(parser):
    add_shared_arguments(parser)
    words = "in the demo, set this layer's states to zero, and see the answer change"
    parser.add_argument("--corrupt", type=cli.bounded(int, 1, 1023), metavar="LAYER", help=words)


def bytes_per_token(model) -> int:
    """Of hidden states: the first layer's input is the embedding, and not kept."""
    return (model.config.num_hidden_layers - 1) * model.config.hidden_size * model.dtype.itemsize


def make_engine(model, arguments, kind=HiddenCache) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache, or another `kind`."""
    config, size = model.config, CHUNK * bytes_per_token(model)
    context = -(-config.max_position_embeddings // CHUNK)  # chunks
    on_device = -(-(arguments.gpu_blocks or 0) * arguments.block_size // CHUNK)
    on_device = on_device or arguments.max_running * context
    cpu = torch.device("cpu")
    chunks = cli.blocks_that_fit(arguments.cpu_chunks, 4 * on_device, size, cpu, "--cpu-chunks")
    files = ChunkFiles(arguments.disk, 1e9 * arguments.disk_limit) if arguments.disk else None
    bandwidth = links.bandwidth(model, arguments.link, arguments.platform)
    engine = paged.make_engine(model, arguments, kind(chunks, bandwidth, files))
    words = f"{chunks} chunks of {CHUNK} tokens, {chunks * size / 1e6:.1f} MB"
    print(f"Host: {words}, over a {engine.cache.load_link}", file=sys.stderr)
    times = config.hidden_size * config.num_hidden_layers / config.kv_numbers_per_token
    if times > 1:
        words = f"Query heads share KV heads here: hidden states are {times:.1f} times as large as K and V,"
        print(f"{words} and chapter 03 is the better choice.", file=sys.stderr)
    return engine


def compare(arguments) -> dict:
    return {**offload.compare(arguments), "hidden states (04)": (make_engine, True)}


if __name__ == "__main__":
    cli.main(__doc__, "04_hidden_state_cache", add_arguments, make_engine, demo, compare)
