"""Chapter 09: divide the cache over ranks (tensor parallelism).

The problem. If a model is divided over several GPUs, its KV cache is divided as well. A rank is one process
with one device and its part of the model. This raises a new question: do all ranks agree on which data is
there? If one rank restores while another one computes, they call different collectives, such as a sum or an
all-gather. Then both ranks hang, or both write wrong data.

The mechanism. The model is divided as in Megatron-LM. Of n ranks each has 1/n of the attention heads and of
the MLP's columns, and a sum over ranks follows each attention and each MLP. The device of a rank has the
blocks of the rank's own KV heads.

    keeps                  each rank loads           share of all bytes      exchanged between ranks
    K and V (03)           its own heads' blocks     max(1/n, 1/KV heads)    nothing
    hidden states (04)     its columns of all rows   1/n                     an all-gather for each layer

Hidden states are the same on all ranks. So each rank keeps 1/n of their columns. To restore a layer, an
all-gather joins the columns to whole rows while the next layer is copied; then each rank projects them to K
and V of its own heads. A projection of whole rows adds in the same order as the forward pass, so its result
has the same bits. With grouped-query attention hidden states are usually as large as K and V or larger; then
`--keep kv` is the better choice. (In HCache the ranks divide rows. The lesson explains why columns are
divided here and what the ranks would have to agree on in chapters 05 and 06.)

Agreement. Every rank runs the same engine on the same requests. No rank sends its decisions, because engines
decide alike if they work with the same numbers. Some numbers may differ between ranks. For these all ranks
use the minimum over ranks:

    what                      values                                              agreed on
    a transfer                0 under way    1 failed    2 arrived                        each step
    an answer of storage      0 under way    1 failed    2 + pages before the first gap   each step
    a deadline                0 passed    1 not passed                                    each step
    a match                   0 compute    1 load                                         each match
    the last layer's copy     0 some layer is missing    1 all layers are there           each restoration

A restoration has a deadline, and so has a queued request that waits for storage. Once the ranks have agreed
that a deadline has passed, they do not use data that arrives later. The last row is for a forward pass that
waits for a restoration (`AgreedTransfer.queue_wait`).

An exception on one rank, for example because its memory is full, needs no minimum. No step can complete
without every rank. So the rank that fails leaves its collectives, those of the other ranks fail, and all
ranks drop the step. They end their requests and continue with new engines, because blocks and queues may
differ after an exception (`Ranks.fail`, `BroadcastEngine.restart`).

Rank 0 receives the users' requests and sends them to the other ranks with the agreement of a step
(shell/ranks.py). A docstring says "Collective" if all ranks must call the function, in the same order.

With `--storage` K and V are also written to storage: one object for each page and KV head. Any number of
ranks can read what another number of ranks has written. All ranks read as many pages as the rank with the
fewest hits has found. If there are fewer KV heads than ranks, several ranks share a head. Then the first of
them writes its objects, and all of them read these.

Sources: Megatron-LM (Shoeybi et al., 2019, section 3); HCache (EuroSys '25), section 5; HiCache (SGLang's
design document), on several ranks and on storage that engines with other numbers of ranks share. HiCache's
radix tree and its policies are not divided here: they are chapter 07's.

    python 09_tensor_parallel.py --demo --ranks 2
    python 09_tensor_parallel.py --keep states             # the server, on http://127.0.0.1:5000
    torchrun --nproc-per-node 2 09_tensor_parallel.py --demo
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import importlib
import json
import math
import sys
import tempfile
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import dropwhile, takewhile
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from common import link as links
from common import store
from common.cache import Cache
from common.llama import Linear
from common.requests import Request
from shell import backends, charts, checkpoint, cli, hardware, lesson, modelled_link
from shell.frontend import Frontend
from shell.lower_tier import restorer
from shell.ranks import Ranks, run_ranks
from shell.workers import Worker, as_integers

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
ON_ITS_WAY, FAILED, ARRIVED = range(3)

# 1. The model, divided -------------------------------------------------------------------------

class Sharding:
    """The division of a model: which part of each weight belongs to this rank, and how the parts' results are
    joined."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def config(self, whole):
        """Return the config of this rank's part of a model. `whole`: the model's config. Raises ModelError if
        the ranks cannot divide it evenly."""
        n, heads = self.ranks.count, whole.num_key_value_heads
        sizes = whole.num_attention_heads, whole.intermediate_size, whole.vocab_size, whole.hidden_size
        if any(size % n for size in sizes) or max(heads, n) % min(heads, n):
            raise checkpoint.ModelError(
                f"{n} ranks cannot divide {sizes[0]} heads, {heads} KV heads, {sizes[1]} columns of the MLP "
                f"and {sizes[2]} tokens of the vocabulary evenly; choose another --ranks."
            )
        self.kv_heads, first = heads, self.ranks.rank * heads // n
        self.own_kv_heads = range(first, first + max(1, heads // n))  # numbers in the whole model
        self.writes = self.ranks.rank * heads % n == 0  # True on the first of the ranks that share heads
        return replace(
            whole, num_attention_heads=sizes[0] // n, num_key_value_heads=len(self.own_kv_heads),
            intermediate_size=sizes[1] // n, tie_word_embeddings=False,
        )  # fmt: skip

    def divide(self, model):
        """Add collectives to this rank's part of the model: a sum over ranks after each attention and each
        MLP, and an all-gather of the logits. After each of them every rank has the same bits."""
        config, where = model.config, dict(dtype=model.dtype, device=model.embedding.device)
        model.sharding = self
        model.head = Linear(config.hidden_size, config.vocab_size // self.ranks.count, False, **where)
        model.head.register_forward_hook(lambda head, inputs, logits: self.ranks.all_gather(logits))
        for layer in model.layers:
            for linear in layer.o_proj, layer.down_proj:
                linear.register_forward_hook(lambda linear, inputs, out: self.ranks.all_sum(out))

    def fill(self, target, name: str, whole):
        """Copy this rank's part of the weight `whole` to `target`. Called for each weight while loading."""
        rank, n = self.ranks.rank, self.ranks.count
        if "o_proj" in name or "down_proj" in name:  # divide the inputs; only rank 0 adds the bias
            whole = whole.chunk(n, 1)[rank] if whole.ndim == 2 else whole * (rank == 0)
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")):
            pieces = min(n, self.kv_heads) if "k_proj" in name or "v_proj" in name else n
            whole = whole.chunk(pieces)[rank * pieces // n]
        target.copy_(whole)


# 2. Agreement ----------------------------------------------------------------------------------

class AgreedTransfer(links.Transfer):
    """A transfer as all ranks see it. It is complete once it is complete on all ranks, and it has failed if
    it has failed on any. The ranks have agreed on `state`: ON_ITS_WAY, FAILED, or ARRIVED + a number."""

    issued = 0.0  # no grace period, because the ranks agree on the restoration's deadline only

    def __init__(self, own: links.Transfer, cache: "SyncedCache", number):
        """`own`: this rank's transfer. `number(value)`: a number that the transfer's value yields, and on
        whose minimum the ranks agree too."""
        self.own, self.cache, self.number, self.state = own, cache, number, ON_ITS_WAY
        self.lane, self.label = own.lane, own.label
        self.restoration, self.last = None, False  # its restoration, and whether it copies the last layer

    def local_state(self) -> int:
        """Return the state of this rank's own transfer."""
        if not self.own.ready:
            return ON_ITS_WAY
        return FAILED if self.own.error is not None else ARRIVED + self.number(self.own.value)

    @property
    def ready(self) -> bool:
        """True if the transfer has completed or failed on all ranks. The last layer's transfer must also wait
        for the transfers of earlier layers, because a forward pass may have continued without these."""
        passed = self.restoration.completed if self.last else ()
        return self.state != ON_ITS_WAY and all(one.state != ON_ITS_WAY for one in passed)

    @property
    def error(self) -> Exception | None:
        return links.TransferError("on a rank") if self.state == FAILED else None

    def queue_wait(self) -> bool:
        """Called in a forward pass: wait for this rank's own copy (on a GPU the stream waits). If the copy
        has failed or is late, continue without it, because the other ranks wait for this rank's part of each
        sum.

        In the last layer all ranks agree whether every copy has arrived. Raises TransferError if not; then
        every rank discards the step."""
        until, agree = self.cache.until, self.cache.agree
        try:
            if not self.own.queue_wait():
                self.own.wait(max(0.0, until[self.restoration] - time.perf_counter()))
        except links.TransferError:
            until[self.restoration] = 0.0
        if self.last and not agree(until[self.restoration] > 0):
            raise links.TransferError(f"{self.label} is late on a rank")
        return True

    def span(self) -> tuple[float, float]:
        return self.own.span() if self.own.ready else (self.own.issued, self.own.issued)


class SyncedCache(Cache):
    """A mixin that makes a chapter's Cache act alike on all ranks. It must come before that Cache among the
    base classes.

    Three calls are collective, so all ranks must reach them in the same order: `poll`, `agree` after a
    `match`, and `agree` in the `queue_wait` of a last layer."""

    def __init__(self, ranks: Ranks, *what):
        super().__init__(*what)
        self.ranks = ranks
        self.commands: deque = deque()  # on rank 0: what to send to all; a Request is sent as its id()
        self.received: deque = deque()  # commands that all ranks must execute now
        self.agreed: list[AgreedTransfer] = []  # transfers that may still be under way, oldest first
        self.until = WeakKeyDictionary()  # restoration or queued request -> this rank's deadline; 0: failed

    def agree(self, fact):
        """Return True if `fact` holds on all ranks. Collective."""
        return self.ranks.all_true(fact)

    def poll(self):
        """Agree on the state of all transfers and deadlines, and receive rank 0's commands. The engine calls
        this once in each step. Collective."""
        # 1. Collect what this rank knows, in an order that is the same on all ranks
        awaited = [(one.restoration, "deadline") for one in self.engine.running if one.restoration]
        awaited += [(one, "wait_deadline") for one in self.engine.waiting if one in self.until]
        self.agreed = [one for one in self.agreed if not one.ready]
        facts = [time.perf_counter() < self.until[one] for one, _ in awaited]
        facts += [one.local_state() for one in self.agreed]
        commands = [] if self.received else list(self.commands)
        message = json.dumps(commands, default=id).encode() if commands else b""
        size = len(message) if self.ranks.rank == 0 else sys.maxsize  # the minimum is rank 0's
        # 2. Take the minimum over ranks
        size, *facts = self.ranks.all_min([size, *map(int, facts)])
        for (one, limit), in_time in zip(awaited, facts):
            setattr(one, limit, math.inf if in_time else 0.0)
        for transfer, state in zip(self.agreed, facts[len(awaited) :]):
            transfer.state = state
        # 3. Release what has completed, and read the commands
        super().poll()
        self.received += json.loads(self.ranks.broadcast(message, size)) if size else ()

    def agree_on(self, transfer: links.Transfer, number=lambda value: 0) -> AgreedTransfer:
        """Return the AgreedTransfer of this rank's `transfer`, and agree on it in each `poll` from now on.
        `number(value)`: a number in the transfer's value, on whose minimum the ranks agree too."""
        if not hasattr(transfer, "agreed"):
            transfer.agreed = AgreedTransfer(transfer, self, number)
            self.agreed.append(transfer.agreed)
        return transfer.agreed

    def hold(self, lane, transfers, *held, **options):
        """Hold blocks as Cache.hold does, but release them on all ranks in the same step."""
        super().hold(lane, [self.agree_on(transfer) for transfer in transfers], *held, **options)

    def submitted(self, request):
        if request.wait_deadline < math.inf:
            self.until[request] = request.wait_deadline
            request.wait_deadline = math.inf  # `poll` sets it to 0 when it has passed on any rank
        super().submitted(request)

    def restore(self, request, restoration, match):
        self.until[restoration] = restoration.deadline
        restoration.deadline = math.inf  # `poll` sets it to 0 when it has passed on any rank
        with closing(super().restore(request, restoration, match)) as generator:
            for transfer in map(self.agree_on, generator):
                transfer.restoration = restoration
                transfer.last = restoration.layers == len(self.model.layers) - 1
                yield transfer
                if not restoration.deadline:  # a pass may have gone on without a copy that was late
                    raise links.TransferError("a copy is late on a rank")


# 3. What a rank keeps --------------------------------------------------------------------------

class KVCache(SyncedCache, offload.HostCache):
    """Chapter 03's Cache for the K and V of this rank's heads."""


class ColumnsCache(SyncedCache, hidden_states.HiddenCache):
    """Chapter 04's Cache for this rank's columns of each layer's input."""

    @property
    def width(self) -> int:
        """The number of columns that this rank keeps, D / n."""
        return super().width // self.ranks.count

    def save_layer(self, layer, hidden, batch):
        super().save_layer(layer, hidden.chunk(self.ranks.count, 1)[self.ranks.rank], batch)  # [T, D / n]

    def copy_layer(self, loading, layer, *what):
        super().copy_layer(loading, layer, *what)
        self.agree_on(loading.transfers[layer])  # begin to agree before the restoration waits for this layer

    def project(self, layer, hidden, rotation, slots):
        """Gather the columns [T, D / n] of all ranks, then project. Layer 0's input, the embedding, is whole
        on each rank. Collective."""
        super().project(layer, self.ranks.all_gather(hidden) if layer else hidden, rotation, slots)  # [T, D]


class PageHeadCache(KVCache):
    """Chapter 03's Cache with storage as the tier below host memory. A page is stored as one object for each
    KV head, so any number of ranks can read it."""

    threshold = 256  # fewest tokens that a prefetch reads (as in chapter 07)
    run = 64  # tokens in one read (as in chapter 07)

    def __init__(self, ranks, blocks: int, bandwidth, storage: store.Storage, heads: range, writes=True):
        """`heads`: numbers of this rank's KV heads in the whole model. `writes`: True if this rank writes
        their objects, False if another rank does."""
        super().__init__(ranks, blocks, bandwidth)
        self.storage, self.heads, self.writes = storage, heads, writes
        self.reading: set = set()  # keys of pages that are being read from storage
        self.unwritten: dict = {}  # page in host memory that waits to be written -> its request, oldest first
        self.late = False  # True after a request has waited too long for storage, until a read completes

    def attach(self, engine):
        super().attach(engine)
        self.storage.open(partial(Worker, wake=engine.wake.set), self.counts)

    def keys(self, block_keys) -> list[bytes]:
        """Return a storage key for each page and each of this rank's heads, page by page."""
        return [sha256(one.digest + b"head %d" % head).digest() for one in block_keys for head in self.heads]

    def memory(self, host_blocks) -> list:
        """Return the host memory [L, 2, page size, hd] of each block and head, in the order of `keys`."""
        array, heads = as_integers(self.host.memory), range(len(self.heads))  # [L, blocks, 2, ...]
        return [array[:, host_block, :, :, head] for host_block in host_blocks for head in heads]

    def missing(self, request) -> list:
        """Return the keys of the pages that follow the request's computed tokens."""
        size = self.pool.block_size
        return request.chain[request.computed // size : request.history // size]

    def is_local(self, block_key) -> bool:
        """Return True if the page is on the device or in host memory, or is being saved there."""
        return block_key in self.pool.block_of or self.has_block(block_key)

    def submitted(self, request):
        """Called when a request is queued: ask storage which of the missing pages it has. While storage is
        late, ask for one request at a time."""
        super().submitted(request)
        pages = list(dropwhile(self.is_local, self.missing(request)))
        if len(pages) * self.pool.block_size >= self.threshold and not (self.late and self.in_flight["ask"]):
            count = lambda there: len(list(takewhile(bool, there))) // len(self.heads)  # noqa: E731
            answer = self.storage.exists(self.keys(pages))
            request.memo = self.agree_on(answer, count)
            self.hold("ask", [answer], then=partial(self.on_answer, request, pages, request.memo))

    def on_answer(self, request, pages: list, answer: AgreedTransfer, arrived: bool):
        """Called when all ranks have storage's answer: start reading the pages that every rank has found, if
        they are not local and if host memory has room."""
        pages, count = pages[: max(0, answer.state - ARRIVED)], max(1, self.run // self.pool.block_size)
        if len(pages) * self.pool.block_size < self.threshold:
            return
        to_read = [one for one in pages if not (self.is_local(one) or one in self.reading)]
        answer.read = set(to_read)
        to_read = to_read or pages[: count * self.late]  # nothing to read, and late: test storage
        most = max(0, self.host.size // 2 - len(self.reading))
        fits = self.host.make_room(min(len(to_read), most), request.chain)
        to_read, host_blocks = to_read[:fits], self.host.allocate(fits)
        self.reading.update(to_read)
        for at in range(0, fits, count):
            block_keys, into = to_read[at : at + count], host_blocks[at : at + count]
            read = self.storage.get(self.keys(block_keys), self.memory(into))
            then = partial(self.on_read, block_keys, into)
            self.hold("storage", [read], given=[(self.host, into)], then=then)

    def on_read(self, block_keys: list, host_blocks: list[int], arrived: bool):
        self.reading.difference_update(block_keys)
        self.late &= not arrived
        for block_key, host_block in zip(block_keys, host_blocks) if arrived else ():
            self.host.register(host_block, block_key)
        self.host.use(block_keys)

    def waits(self, request):
        asking = request.memo and not request.memo.ready
        waits = asking or not self.reading.isdisjoint(self.missing(request))
        self.late |= waits and request.wait_deadline <= 0
        return waits and not self.late

    def match(self, request):
        """Return a Match of the next pages in host memory. Pages that storage was asked to read for this
        request count as found in storage."""
        if match := super().match(request):
            pages = self.missing(request)[: len(match.blocks)]
            read = self.pool.block_size * len(getattr(request.memo, "read", set()).intersection(pages))
            found = dict(cpu=match.tokens - read, storage=min(match.tokens, read))
            match.found = {tier: tokens for tier, tokens in found.items() if tokens > 0}
        return match

    def finished(self, request):
        super().finished(request)
        self.storage.use(self.keys(request.chain))

    def on_saved(self, request, transfer, block_keys, arrived: bool):
        """Queue the pages that have arrived in host memory for storage."""
        super().on_saved(request, transfer, block_keys, arrived)
        self.unwritten |= dict.fromkeys(block_keys if arrived else (), request)

    def poll(self):
        """Write queued pages that host memory still has. At most a quarter of the host blocks may be held by
        such writes; the other pages stay queued."""
        super().poll()
        there = {one: request for one, request in self.unwritten.items() if one in self.host.block_of}
        self.counts["writes_dropped"] += len(self.unwritten) - len(there)
        self.unwritten, served = there, set()
        while there and len(self.in_flight["written"]) < max(1, self.host.size // 4):
            block_key = next(iter(there))
            served.add(there.pop(block_key))
            host_blocks = self.host.find([block_key])
            keys, values = self.keys([block_key]), self.memory(host_blocks)
            # If another rank writes these objects, this rank stops doubting them. The agreed hits stay right,
            # because the other rank doubts them until it has written them
            if not self.writes:
                self.storage.doubted.difference_update(keys)
                keys = values = []
            self.hold("written", [self.storage.set(keys, values)], (self.host, host_blocks))
        for request in served:  # its earlier pages were written earlier, but must be deleted later
            self.storage.use(self.keys(request.chain))

    def close(self):
        self.drain()
        self.close_each(super(), self.storage)
        self.counts["writes_dropped"] += len(self.unwritten) + len(self.in_flight["written"])


# 4. The demo -----------------------------------------------------------------------------------

KEEPS = {"nothing": "nothing", "kv": "K and V", "states": "hidden states"}


def demo(model, frontend: Frontend, arguments):
    """Restore a conversation on all ranks and on one rank. Then restore it when a rank has lost a page."""
    ranks, new = model.sharding.ranks, max(2, min(arguments.max_tokens, 8))
    arguments.always_restore, arguments.storage = True, None
    # 1. Ask on all ranks; evict the device before each question
    engines, asked, length, turns = {}, [], frontend.context, [lesson.SECRET, lesson.QUESTION]
    if ranks.rank == 0:
        whole, *_ = checkpoint.load(arguments.model, arguments.dtype, arguments.device)
        length = lesson.context(whole, frontend)
    (length,) = ranks.all_min([length // 2])
    for keep in KEEPS:
        engines[keep] = make_engine(model, arguments, keep)
        asked += lesson.converse(engines[keep], frontend, length, turns, new)
    prompt, timeline = asked[-1].tokens[: asked[-1].prompt_tokens], asked[-1].timeline
    # 2. Ask again when one rank has lost a page in storage
    lost = lose_a_page(model, arguments, prompt, new)
    if model.same_bits:  # compare with as many ranks, because sums over ranks have other bits
        lesson.verify(paged.baseline.Engine(model), asked + lost)
    # 3. Compare with chapter 01, and time all ranks and one rank that has the whole model
    single, verified, taken, carried = {}, True, {}, {}
    if ranks.rank == 0:
        verified = lesson.verify(paged.baseline.Engine(whole), asked + lost)
        single = {keep: make_engine(whole, arguments, keep) for keep in KEEPS}
    for count, ways in (1, single), (ranks.count, engines):
        ranks.barrier()
        for keep, engine in ways.items():
            lesson.ask(engine, prompt, 2, "device")  # warm up, and fill the cache
            before, case = engine.counts["bytes_in"], f"{KEEPS[keep]}, {count} rank{'s' * (count > 1)}"
            answered = [lesson.ask(engine, prompt, 2, "device") for _ in range(lesson.ROUNDS)]
            taken[case] = [request.ttft_ms for request in answered]
            carried[keep, count] = (engine.counts["bytes_in"] - before) / lesson.ROUNDS
            engine.close()
    if ranks.rank:
        return
    # 4. Show
    link = lesson.describe_link(engines["states"].lower_tier.cache.load_link)  # of each rank
    rows = lesson.table(f"TTFT behind {len(prompt)} tokens", taken, "ttft_ms", "ms")
    for row, size in zip(rows, carried.values()):
        row["bytes_over_link"] = size
    for keep in ("kv", "states"):
        one, each = carried[keep, 1] / 1e6, carried[keep, ranks.count] / 1e6
        print(f"  {KEEPS[keep]}: {one:.2f} MB over one rank's link, {each:.2f} over each of {ranks.count}")
    found = [request.cached_tokens for request in lost]
    lost_by = f"After rank {ranks.count - 1} has lost a page of one head there,"
    print(f"\nOf {len(prompt)} tokens {found[0]} come from storage. {lost_by}")
    print(f"{found[1]} tokens do on every rank, and all ranks compute the rest.\n")
    print("The last turn from hidden states, on rank 0, until its last token (TTFT above ends at the first)")
    print(f"{charts.chart(timeline)}\n\nRanks divide the cache, the copies and the projections. Without GPUs")
    print("they share one processor: then bytes divide as on several devices, but times do not.")
    return dict(link=link, verified=verified, rows=rows, found=found), [timeline]


def lose_a_page(model, arguments, prompt: list[int], new: int) -> list[Request]:
    """Ask `prompt` when only storage has it, before and after the last rank has lost a page of it.
    Returns: both requests."""
    ranks, answered = model.sharding.ranks, []
    with tempfile.TemporaryDirectory() as own:
        folder = ranks.broadcast(own.encode(), len(own)).decode()  # rank 0's
        options = argparse.Namespace(**{**vars(arguments), "storage": f"file:{folder}"})
        engine = make_engine(model, options, "kv")
        chain = lesson.ask(engine, prompt).chain
        for lost in [], chain[len(chain) // 2 :][:1]:
            lesson.wait_until_idle(engine, evict="host")
            if lost and ranks.rank == ranks.count - 1:
                Path(f"{folder}/{engine.lower_tier.cache.keys(lost)[-1].hex()}.parts").unlink(missing_ok=True)
            answered.append(lesson.ask(engine, prompt, new, "device"))
        lesson.wait_until_idle(engine)
        engine.close()
    return answered


# 5. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    offload.add_arguments(parser)
    add = parser.add_argument
    add("--ranks", type=cli.bounded(int, 1, 64), metavar="N", help="number of ranks (2, or torchrun's)")
    add("--keep", choices=KEEPS, default="states", help="keep kv, hidden states (default) or nothing")
    add("--storage", metavar="URL", help="with --keep kv: also keep pages in storage, a URL as in chapter 07")


def make_engine(model, arguments, keep: str | None = None) -> paged.Engine:
    """Make chapter 02's engine with a Cache that acts alike on all ranks. Collective. Raises ModelError."""
    config, size = model.config, arguments.block_size
    whole, keep = getattr(model, "sharding", None), keep or arguments.keep
    ranks = whole.ranks if whole else Ranks()
    if arguments.storage and keep != "kv":
        raise checkpoint.ModelError("--storage keeps pages of K and V; add --keep kv, or leave it out.")
    # 1. Find how many blocks fit on every rank
    useful = arguments.max_running * -(-config.max_position_embeddings // size)
    block_bytes = size * config.kv_numbers_per_token * model.dtype.itemsize
    kept = size * hidden_states.bytes_per_token(model) // ranks.count if keep == "states" else block_bytes
    on_device = cli.blocks_that_fit(arguments.gpu_blocks, useful, block_bytes, model.device, "--gpu-blocks")
    if whole and not ranks.rank and keep == "states" and kept >= block_bytes:
        print("Query heads share KV heads: hidden states take no fewer bytes; use --keep kv", file=sys.stderr)
    options = argparse.Namespace(**{**vars(arguments), "gpu_blocks": on_device})
    on_host = hardware.host_blocks(model, options, kept)
    options.gpu_blocks, on_host = ranks.all_min([on_device, on_host])
    # 2. Give each rank a link that is as fast as the link of a model that is not divided
    bandwidth = hardware.bandwidth(model, arguments.link)
    if whole and arguments.link is None and bandwidth:
        bandwidth = modelled_link.Bandwidth(bandwidth.value * config.num_key_value_heads / whole.kv_heads)
    # 3. Make the Cache
    if keep == "states":
        cache = ColumnsCache(ranks, on_host, bandwidth)
    elif arguments.storage:
        storage = store.Storage(backends.open_backend(arguments.storage))
        cache = PageHeadCache(ranks, on_host, bandwidth, storage, whole.own_kv_heads, whole.writes)
    else:
        cache = KVCache(ranks, on_host, bandwidth) if keep == "kv" else SyncedCache(ranks)
    engine = paged.make_engine(model, options, restorer(model, cache, arguments.always_restore))
    engine.on_error = ranks.fail
    return engine


def load(ranks: Ranks, name: str, dtype: str, device: str, same_bits: bool = False):
    """Load this rank's part of a model, as `checkpoint.load` does. Collective. Raises ModelError."""
    if checkpoint.pick_device(device) == "cuda" and (gpus := torch.cuda.device_count()) < ranks.count:
        words = f"{ranks.count} ranks need as many GPUs, but there are {gpus}; add --device cpu."
        raise checkpoint.ModelError(words)
    ranks.same_bits = same_bits
    loaded = checkpoint.load(name, dtype, device, sharding=Sharding(ranks), same_bits=same_bits)
    ranks.barrier()
    return loaded


if __name__ == "__main__":
    run_ranks(__doc__, "09_tensor_parallel", add_arguments, make_engine, demo, load)
