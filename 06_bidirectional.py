"""Chapter 06: compute from the front while loading from the back (Cake).

The problem. A disk or a network holds far more K and V than host memory. But loading a history from it may
take as long as computing it. An engine that only loads leaves the processor idle, and one that only computes
leaves storage idle.

The mechanism. Two pointers move over one history. The engine prefills from the front, in ordinary steps.
Storage reads chunks of 32 tokens from the back. Each chunk that arrives lowers the limit up to which the
engine computes. When the two pointers meet, the history is complete:

    computed                  they meet here             loaded
    |#########################|==========================|

Suppose that loading all tokens takes l seconds and computing all of them c seconds, that all tokens cost the
same, and that neither side waits. Then both ends meet after l c / (l + c) seconds.

Neither side reserves a chunk in advance. So prefill need not wait for storage, except with `--share 0`: then
it starts when loading has ended or is late. The engine's own thread moves both pointers, so no lock is
needed.

Both sides may work on the same chunk. If storage brings all tokens of a step while the step is being
computed, the engine gives up the step, unless the step also computes other requests. If prefill has computed
a chunk before it is read, the read is cancelled. If a chunk is missing or damaged, the chunks that have
arrived stay, and prefill computes the rest.

Tokens near the end of the history cost the most to compute, because each token attends to all tokens before
it. Therefore the last tokens are loaded, and the first ones are computed.

A step should be neither too long nor too short. A long step computes tokens that storage could have brought
in the same time; in a short step each token costs more. So a step computes all tokens that prefill is
expected to compute before the pointers meet. If `left` tokens remain, these are left * l / (l + c) tokens,
where l and c are the seconds to load and to compute the remaining tokens. (In the paper a step has its full
token budget, and a chunk is as long as a step. Here a chunk is short, because the tokens after the last full
chunk are always computed.)

While other requests run, a request that is being restored computes at most the part `--share` of a step's
token budget. The estimate of the time to compute assumes the same limit. With `--compute leftover`, it
computes only the part of the budget that other requests leave (section 6 of the paper).

With `--bits 8` K and V are stored in 8 bits. Then restored K and V are not exact, and neither are K and V
that are computed after them. Therefore all chunks that are saved with `--bits 8` have other keys than exact
chunks.

Source: Cake ("Compute or Load KV Cache? Why Not Both?", Jin et al., ICML '25), sections 4 to 6, appendices A
and B of its first version (arXiv 2410.03065v1).

    python 06_bidirectional.py --demo
    python 06_bidirectional.py --prompt "What is a KV cache?" --disk chunks
    python 06_bidirectional.py --storage 0.1               # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import importlib
import math
import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common import link as links
from common.cache import Cache, Match, Restoration
from common.llama import upload
from common.requests import Request
from shell import charts, cli, hardware, lesson
from shell.backends import in_directories
from shell.chunks import StoredChunks
from shell.frontend import Frontend
from shell.lower_tier import restorer
from shell.modelled_link import Bandwidth, speed
from shell.modelled_storage import ModelledStorage
from shell.workers import Worker, as_integers

paged = importlib.import_module("02_paged_kv")
CHUNK = 32  # tokens

# 1. Two pointers -------------------------------------------------------------------------------

def time_to_meet(load: float, compute: float) -> tuple[float, float]:
    """Estimate when both ends meet. `load`, `compute`: seconds to load or to compute all tokens.

    Returns: the seconds until they meet, l c / (l + c), and the share of the tokens that is computed by then.
    The share is smaller for a longer history: `load` grows in proportion to the length, but `compute` grows
    faster, because each token attends to all tokens before it."""
    seconds = load / (1 + load / compute)
    return seconds, seconds / compute


def portion(left: int, load: float, compute: float) -> int:
    """Return how many of the `left` tokens the next step should compute: as many as prefill will compute
    before both ends meet, but at least a chunk. `load`, `compute`: seconds to load or to compute all `left`
    tokens.

    If less than a chunk would remain, return `left`, because storage could not bring another chunk."""
    tokens = max(CHUNK, int(left * time_to_meet(load, compute)[1]))
    return tokens if left - tokens >= CHUNK else left


@dataclass(eq=False)
class TwoPointers(Restoration):
    """The restoration of tokens [start, end) from both ends: at all times tokens [start, request.computed)
    are computed, and tokens [limit, end) are loaded, in all layers."""

    keeps_part = True  # a loaded chunk has all layers
    is_loading: bool = True  # more chunks may arrive

    def __post_init__(self):
        self.limit = self.end

    @property
    def computes(self) -> bool:
        """Whether the next step may compute tokens before `limit`."""
        return self.request.computed < self.limit and self.request.portion > 0

    @property
    def restored(self) -> int:
        return self.end - self.limit

    def meet(self):
        """Complete the restoration if both ends have met: the next step computes the tokens from `end` on."""
        if self.request.computed >= self.limit:
            self.request.computed = self.request.next = self.end


# 2. The cache ----------------------------------------------------------------------------------

class BidirectionalCache(Cache):
    """A Cache that keeps chunks of K and V in storage. It loads them from the back, while the engine computes
    from the front.

    `request.memo` holds the keys of the request's full chunks. Each block of the `staging` pool has room for
    one chunk in transit."""

    restoration_class = TwoPointers

    def __init__(self, storage: StoredChunks, share=1.0, leftover=False, bits=None, memory=256e6):
        """`share`: largest part of a step, from 0 to 1, that a request being restored may compute beside
        others; 0: only load. `leftover`: ignore `share`; it may compute what other requests leave of a step.
        `bits`: 8, or None for the model's own dtype. `memory`: bytes of host memory for chunks in transit."""
        self.storage, self.bits, self.memory = storage, bits, memory
        self.share, self.leftover = share, leftover

    def attach(self, engine):
        super().attach(engine)
        config, dtype, device = self.model.config, self.model.dtype, self.model.device
        self.kv = self.pool.memory.flatten(2, 3)  # [L, 2, slots, KVH, hd]
        self.shape = *self.kv.shape[:2], CHUNK, *self.kv.shape[3:]  # of a chunk, [L, 2, CHUNK, KVH, hd]
        width = config.kv_numbers_per_token
        if self.bits == 8:  # one byte for each number, two bytes for the scale of each head
            dtype, width = torch.uint8, width + 2 * width // config.head_dim
        self.chunk_bytes = CHUNK * width * dtype.itemsize
        # The staging memory for chunks in transit is on the host; a GPU has a second one, on the device
        useful = 2 * (config.max_position_embeddings // CHUNK + 1)  # enough for two requests of full length
        shape = max(2, min(useful, int(self.memory // self.chunk_bytes))), CHUNK, width
        host = self.landed = links.host_memory(shape, dtype, device, "The memory for chunks in transit")
        self.arrays, self.load_link = as_integers(host), None  # the same memory as a NumPy array
        if device.type == "cuda":
            self.landed, self.load_link = host.to(device), hardware.connect("load", engine.clock)
        wake = engine.wake.set
        self.save_link = hardware.connect("save", engine.clock, math.inf, wake, background=True)
        self.staging = paged.BlockPool(shape[0], CHUNK, host)
        self.pools = {"host": self.staging}
        kind = f"kv {self.bits or 'exact'}"
        self.block_keys = paged.BlockKeys(f"{self.model.digest.hex()} {self.model.dtype} {kind}", CHUNK)
        self.saving: set = set()  # keys of chunks that are being copied or written to storage
        self.sent: Counter = Counter()  # request -> number of leading chunks that `save` has handled
        self.storage.open(partial(Worker, wake=wake), engine)

    # Finding

    def chain(self, request) -> list:
        """Return a key for each full chunk of the request's tokens."""
        request.memo = request.memo or []
        return self.block_keys.extend(request.memo, request.tokens, request.salt)

    def submitted(self, request):
        self.hold(f"ask {request.id}", self.storage.ask([one.digest for one in self.chain(request)]))

    def match(self, request):
        """Offer the longest run of adjacent chunks that storage has. Prefill computes the tokens between
        `request.computed` and the run, and all tokens after the run."""
        run, start, estimates = self.longest_run(request), request.computed, self.estimates
        end = min((run[-1][0] + 1) * CHUNK, request.history) if run else 0
        if end > start:
            queued = sum(other.restoration.limit - other.computed for other in self.restoring_requests())
            load, share = self.seconds_to_load(queued + end - start), 1.0
            if len({request, *self.engine.running}) > 1 and not self.leftover:
                share = self.share or 1e-9  # with --share 0 prefill gets nothing
            first = max(start, run[0][0] * CHUNK)  # the tokens before it must be computed
            gap = estimates.seconds_to_compute(start, first)
            seconds, _ = time_to_meet(load, estimates.seconds_to_compute(start, end) / share)
            if self.share or self.leftover:
                seconds = max(seconds, gap / share)
            else:
                seconds = self.seconds_to_load(queued + end - first) + gap  # prefill starts after loading
            return Match(end - start, seconds, run, {"storage": end - start}, share=share)

    def longest_run(self, request) -> list[tuple]:
        """Return the longest run of adjacent chunks that storage has, as (number, Stored) pairs. Skip the
        chunks that are already computed."""
        chain, longest, run = self.chain(request), [], []
        for number in range(request.computed // CHUNK, len(chain)):
            found = self.storage.find(chain[number].digest)
            run = [] if found is None else [*run, (number, found)]
            longest = max(longest, run, key=len)
        return longest

    def seconds_to_load(self, tokens: int) -> float:
        return tokens * self.chunk_bytes / CHUNK / self.storage.speed()

    # Loading, from the back

    def restore(self, request, restoration, match):
        """Load chunks from the back. Each chunk that arrives lowers `restoration.limit` to the chunk's first
        token, or to the token that prefill has reached. The driver resumes this generator between steps and
        before each layer."""
        request.next = request.computed  # the next step computes from the front
        slots = self.slots(request, 0, restoration.end)
        unread = list(match.blocks)  # the last one is read next
        reading = deque()  # [number of the chunk, its staging block, the transfer that uses this block]
        self.set_portions()
        try:
            while restoration.limit > self.front(request):
                self.read_ahead(unread, reading)
                if reading:
                    yield from self.load_chunk(reading[0], request, slots)  # if it fails, `finally` runs
                    self.staging.release([reading.popleft()[1]])
                elif unread:
                    yield  # other requests use all staging blocks
                else:
                    break  # no chunk is left
            restoration.is_loading = False
            while request.computed < restoration.end:
                yield  # prefill computes the tokens before the limit
            restoration.layers = len(self.model.layers)
        finally:
            restoration.is_loading = False
            for _, block, transfer in reading:  # cancel the reads that have not begun
                transfer.cancel()
                self.hold(f"place {block}", [transfer], given=[(self.staging, [block])])
            request.timeline.plan = charts.describe_chunks(restoration, CHUNK)

    def read_ahead(self, unread: list, reading: deque):
        """Start to read chunks, the last one first, until no staging block is free. Move each of them from
        `unread` to `reading`."""
        while unread and self.staging.available:
            number, found = unread.pop()
            (block,) = self.staging.allocate(1)
            (read,) = self.storage.read([found], [self.arrays[block]], label=f"chunk {number}")
            reading.append([number, block, read])

    def load_chunk(self, chunk: list, request, slots):
        """Wait for a chunk of `reading`, copy the part that prefill has not computed into the request's
        `slots`, and lower the limit."""
        number, block, read = chunk
        yield read
        self.counts["bytes_in"] += read.bytes
        if self.load_link:
            chunk[2] = self.load_link.copy(self.landed[block], self.staging.memory[block], read.label)
            yield chunk[2]
        first, limit = number * CHUNK, request.restoration.limit
        front = max(first, self.front(request))
        if front < limit:
            kv = self.unpack(self.landed[block])[:, :, front - first : limit - first]
            self.kv.index_copy_(2, slots[front:limit], kv)
            request.restoration.limit = front
            request.restoration.meet()

    def front(self, request) -> int:
        """Return the lowest position that loading may still write to.

        If a step computes only this request, the engine gives up the step once all of the step's tokens have
        been loaded. So loading may go down to the first token of such a step. The engine does not give up a
        step of several requests, so the tokens that such a step computes must not be loaded."""
        work = dict(self.engine.work)
        return request.computed + (work.get(request, 0) if len(work) > 1 else 0)

    def slots(self, request, start: int, end: int):
        """Return the device slots of the tokens `start` to `end`, [end - start]."""
        return upload(self.pool.slots(torch.tensor(request.table))[start:end], self.model.device)

    # Computing, from the front

    def restoring_requests(self) -> list:
        """Return the running requests whose two pointers have not met."""
        running = [one for one in self.engine.running if one.restoration]
        return [one for one in running if one.computed < one.restoration.limit]

    def poll(self):
        super().poll()
        for request in self.engine.running:
            if request.restoration:
                request.restoration.meet()
        self.set_portions()

    def set_portions(self):
        """Set `portion` of each restored request: how many tokens the next step may compute for it."""
        restoring, budget = self.restoring_requests(), self.engine.token_budget
        others = sum(request.pending for request in self.engine.running if request not in restoring)
        for request in restoring:
            restoration, most = request.restoration, budget
            left = restoration.limit - request.computed
            if restoration.is_loading and time.perf_counter() < restoration.deadline:
                compute = self.estimates.seconds_to_compute(request.computed, restoration.limit)
                most = min(budget, portion(left, self.seconds_to_load(left), compute))
                if self.leftover:
                    most = min(most, max(0, budget - others))
                elif not self.share:
                    most = 0
            if self.share and not self.leftover and len(self.engine.running) > 1:
                most = min(most, math.ceil(self.share * budget))
            request.portion = min(most, left)
            others += most

    # Saving

    def save(self, batch):
        """Send the chunks that have become full to storage, unless storage has them. If no staging block is
        free, try again after the request's next step. Chunks that are left after its last step are
        dropped."""
        for request, _ in batch.work:
            chain = self.chain(request)
            for number in range(self.sent[request], request.computed // CHUNK):
                if self.is_unsaved(chain[number]):
                    if not self.staging.available:
                        break
                    self.save_chunk(request, chain[: number + 1])
                self.sent[request] = number + 1

    def is_unsaved(self, block_key) -> bool:
        """Return True if the chunk is neither in storage nor being saved."""
        return block_key not in self.saving and self.storage.find(block_key.digest) is None

    def save_chunk(self, request, chain: list):
        """Start to copy the last chunk of `chain` to a staging block. Once it has arrived there, `write`
        sends it to storage."""
        number, (block,) = len(chain) - 1, self.staging.allocate(1)
        kv = self.kv.index_select(2, self.slots(request, number * CHUNK, (number + 1) * CHUNK))
        transfer = self.save_link.copy(self.staging.memory[block], self.pack(kv), f"chunk {number}")
        then = partial(self.write, request, chain, block, transfer)
        self.hold("save", [transfer], given=[(self.staging, [block])], then=then)
        self.saving.add(chain[-1])
        self.counts["bytes_out"] += transfer.bytes

    def write(self, request, chain: list, block: int, transfer, arrived: bool):
        """Called when the copy of the last chunk of `chain` has completed: write the chunk to storage."""
        request.timeline.add("save", transfer.label, *transfer.span())
        written = self.storage.write(chain[-1].digest, self.arrays[block]) if arrived else None
        if written is None:
            self.counts["writes_dropped"] += self.storage.find(chain[-1].digest) is None
            return self.saving.discard(chain[-1])
        self.storage.use([block_key.digest for block_key in chain])
        then = lambda arrived: self.saving.discard(chain[-1])  # noqa: E731
        self.hold(f"place {block}", [written], (self.staging, [block]), then=then)

    def finished(self, request):
        chain, sent = request.memo or [], self.sent.pop(request, 0)
        left = sum(map(self.is_unsaved, chain[sent : request.computed // CHUNK]))
        self.counts.update(drops=left, writes_dropped=left)
        self.storage.use([block_key.digest for block_key in chain])
        request.memo = None

    def close(self):
        self.drain()
        self.close_each(self.save_link, self.load_link, self.storage)
        self.counts["writes_dropped"] += sum(not self.storage.find(one.digest) for one in self.saving)

    # K and V as bytes

    def pack(self, kv):
        """Turn K and V [L, 2, CHUNK, KVH, hd] into a chunk [CHUNK, width]. With 8 bits, all numbers come
        first, then all scales."""
        if self.bits == 8:
            kv = torch.cat([part.flatten().view(torch.uint8) for part in quantize(kv)])
        return kv.view(CHUNK, -1)

    def unpack(self, chunk):
        """Turn a chunk [CHUNK, width] into K and V [L, 2, CHUNK, KVH, hd]."""
        if self.bits != 8:
            return chunk.view(self.shape)
        chunk, count = chunk.flatten(), math.prod(self.shape)
        numbers = chunk[:count].view(torch.int8).view(self.shape)
        scales = chunk[count:].view(torch.float16).view(*self.shape[:-1], 1)
        return (numbers.float() * scales.float()).to(self.model.dtype)


def quantize(kv):
    """Quantize K and V [..., hd] symmetrically, with one scale for each token and head.
    Returns: int8 numbers from -127 to 127, [..., hd], and float16 scales, [..., 1]."""
    scales = (kv.float().abs().amax(-1, keepdim=True) / 127).clamp(2e-7, 65504.0).half()
    return (kv.float() / scales.float()).round().clamp(-127, 127).to(torch.int8), scales


# 3. The demo -----------------------------------------------------------------------------------

WAYS = "only computing", "only loading", "both"


def demo(model, frontend: Frontend, arguments):
    """Restore a conversation from storage. Compare TTFT of both ends with TTFT of only loading and of only
    computing.

    If storage is modelled and --storage is not given, repeat the comparison with three speeds of storage."""
    # 1. Ask about a document, and ask again when only storage has it
    new, turns = max(2, min(arguments.max_tokens, 16)), [lesson.SECRET, lesson.QUESTION]
    options = dict(max_running=2, always_restore=True, bits=None, compute="share")
    engine = make_engine(model, argparse.Namespace(**{**vars(arguments), **options}))
    cache, length = engine.lower_tier.cache, min(lesson.context(model, frontend), 2048) * 7 // 8
    asked = lesson.converse(engine, frontend, length, turns, new)
    prompt = asked[1].tokens[: asked[1].prompt_tokens]

    # 2. Time the question, with storage of several speeds
    last, taken, storage = {}, {}, cache.storage.storages[0]
    ways = {way: partial(ask_again, engine, prompt, way, last) for way in WAYS}
    speeds = {"asked for": storage.bandwidth}
    if storage.bandwidth and arguments.storage is None:
        seconds = statistics.median(ways["only computing"]() for _ in range(lesson.ROUNDS)) / 1e3
        even = cache.chunk_bytes * len(prompt) / CHUNK / seconds  # bytes/s
        speeds = {"as fast as computing": Bandwidth(even)}
        speeds["four times slower or faster"] = Bandwidth(even / 4, 4 * even, seconds=seconds / 5)
        speeds["twenty times faster"] = Bandwidth(20 * even)
    for words, storage.bandwidth in speeds.items():
        taken[words] = lesson.in_turn(ways), str(cache.storage), last["both"]
    verified = lesson.verify(paged.baseline.Engine(model), [*asked, *last.values()])

    # 3. Show
    print(f"{len(prompt)} tokens, chunks of {CHUNK}: {cache.chunk_bytes / 1e6:.2f} MB each in storage")
    print(f"  {turns[1]} - {asked[1].text}\n")
    rows = show(taken)
    engine.close()
    link = dict(modelled=bool(storage.bandwidth), gbps=cache.storage.speed() / 1e9)
    report = dict(link=link, verified=verified, rows=rows, counters=charts.counters(engine))
    return report, [last["both"].timeline]


def ask_again(engine, prompt: list[int], way: str, last: dict) -> float:
    """Ask when only storage has the history. `way`: one of WAYS. Returns: TTFT in ms."""
    lesson.wait_until_idle(engine, evict="device")
    engine.lower_tier.cache.share = 0.0 if way == "only loading" else 1.0
    last[way] = request = Request(prompt, 2, must_compute=way == "only computing")
    if bandwidth := engine.lower_tier.cache.storage.storages[0].bandwidth:
        bandwidth.began = time.perf_counter()  # a changing bandwidth starts again at its first value
    engine.generate([request])
    return request.ttft_ms


def show(taken: dict) -> list[dict]:
    """Print a table, a plan and a chart for each storage. Returns: the rows for --json."""
    rows = []
    for words, (samples, storage, both) in taken.items():
        rows += lesson.table(f"TTFT, storage {words} ({storage})", samples, "ttft_ms", "ms")
        compute, load, ours = (statistics.median(samples[way]) for way in WAYS)
        found, bound = both.found.get("storage", 0), load * compute / (load + compute)
        rows.append(dict(table=words, computed=both.prompt_tokens - found, loaded=found, bound_ms=bound))
        plan = both.timeline.plan["rows"][0][1] if found else ""
        print(f"  both |{plan}| (C: computed, B: partly, L: loaded)\n{charts.chart(both.timeline)}")
        gain, excess = min(compute, load) / ours, ours / bound
        print(f"  {found} tokens came from storage. The faster way takes {gain:.2f} times as long as both.")
        print(f"  Both take {excess:.2f} times l c / (l + c) = {bound:.0f} ms (l: load, c: compute).\n")
    if len(taken) > 1:
        print("If the speed of storage changes, both meet at another token. If loading takes a twentieth")
        print("of the time, both can save a twentieth at most, and the short steps may cost more than that.")
    print("What if a history is spread over three tiers, and only the last one is slow? Chapter 07.")
    return rows


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    where, add = parser.add_mutually_exclusive_group().add_argument, parser.add_argument
    where("--storage", type=speed, metavar="GB/S", help="speed of modelled storage (auto)")
    where("--disk", type=Path, action="append", metavar="DIR", help="keep chunks in files; may be repeated")
    size, share = cli.bounded(float, 1e-6, 1e6), cli.bounded(float, 0, 1)
    add("--disk-limit", type=size, default=10, metavar="GB", help="size of all chunks in storage (10)")
    add("--share", type=share, default=1.0, help="most of a step for prefill beside others; 0: only load")
    words = "tokens of a step for a prefill: its --share (default), or the ones that other requests leave"
    add("--compute", choices=["share", "leftover"], default="share", help=words)
    add("--bits", type=int, choices=[8], help="store K and V in 8 bits: fewer bytes, but not exact")
    add("--always-restore", action="store_true", help="load even if that saves little or no time")


def make_engine(model, arguments) -> paged.Engine:
    """Make chapter 02's engine with this chapter's Cache, and print its chunk size and storage to stderr."""
    limit, asked = arguments.disk_limit, arguments.storage
    modelled = ModelledStorage(1e9 * limit, asked or 1e9)
    storage = in_directories(arguments.disk, limit) if arguments.disk else StoredChunks(modelled)
    cache = BidirectionalCache(storage, arguments.share, arguments.compute == "leftover", arguments.bits)
    engine = paged.make_engine(model, arguments, restorer(model, cache, arguments.always_restore))
    tokens = model.config.max_position_embeddings // 2
    seconds = cache.estimates.seconds_to_compute(0, tokens)
    if not (arguments.disk or asked) and math.isfinite(seconds):
        size = tokens * model.config.kv_numbers_per_token * model.dtype.itemsize
        modelled.bandwidth = Bandwidth(size / seconds)
    print(f"Chunks of {CHUNK} tokens, {cache.chunk_bytes / 1e6:.2f} MB, in {storage}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "06_bidirectional", add_arguments, make_engine, demo)
