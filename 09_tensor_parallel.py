"""Chapter 09: state that is divided over ranks.

The problem. A model that is divided over several GPUs divides its KV cache with it, and a question is new: do
all ranks agree on what is there? If one restores while another computes, they take part in different sums:
both hang, or both write nonsense.

The mechanism. The model is divided as Megatron does: a rank has an n-th of the heads and of the MLP's
columns, and sums over ranks follow attention and MLP. Its device has the blocks of its own KV heads.

    keeps           a rank loads               of one rank's bytes     between ranks
    K and V (03)    its own heads' blocks      max(1/n, 1/KV heads)    nothing
    states (04)     its columns of all rows    1/n                     all-gather a layer, then it projects

Hidden states are the same on all ranks: each keeps an n-th of the columns, and an all-gather puts the whole
rows of a layer together while the next layer travels. Projecting them sums in the order of one rank. (In
HCache ranks divide rows; why columns, and what chapter 05 would have to agree on: docs/lessons.)

Agreement. Every rank runs the same engine on the same requests, and sends no decision: equal engines decide
alike if they believe the same. Each rank alone knows a few numbers; all believe the minimum over ranks:

    a transfer        0 on its way    1 failed    2 arrived                         once a step
    storage's answer  0 on its way    1 failed    2 + pages, up to the first gap    once a step
    a restoration, and a request in line    0 too late    1 in time                 once a step
    a match           0 computing is sooner    1 loading is                         once an admission
    the last layer    0 something is missing here    1 all is here                  once a restoration

The last one is for a pass that waits for a restoration (`AgreedTransfer.queue_wait`). "Too late" stays: what
arrives later is not used. Rank 0 hears what is asked, and tells it with the agreement of a step
(shell/ranks.py).

With `--storage` K and V go to storage too, an object for each page and KV head: any number of ranks reads
what any other has written, and all read the pages that every rank finds: the least hit count. With fewer KV
heads than ranks, ranks share a head, and its objects are the same on each: the first writes, all read.

Sources: Megatron-LM (Shoeybi et al., 2019, section 3); HCache (EuroSys '25), section 5; HiCache (the design
document of SGLang) on several ranks and `page_head`.

    python 09_tensor_parallel.py --demo --ranks 2
    python 09_tensor_parallel.py --keep states             # the server, on http://127.0.0.1:5000
    torchrun --nproc-per-node 2 09_tensor_parallel.py --demo
"""

import argparse
import importlib
import json
import math
import shell.cli as cli
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
from common.estimates import Estimates
from common.link import as_integers
from common.llama import Linear
from common.requests import Request, RequestError
from common.restoring import Restorer
from shell import backends, charts, checkpoint, hardware, lesson, modelled_link
from shell.frontend import Frontend
from shell.ranks import BroadcastEngine, Ranks, join, of_environment

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
ON_ITS_WAY, FAILED, ARRIVED = range(3)

# 1. The model, divided -------------------------------------------------------------------------

class Sharding:
    """Gives a rank its part of a model."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def config(self, whole):
        """-> the config of this rank's part. Raises ModelError."""
        n, heads = self.ranks.count, whole.num_key_value_heads
        sizes = whole.num_attention_heads, whole.intermediate_size, whole.vocab_size, whole.hidden_size
        if any(size % n for size in sizes) or max(heads, n) % min(heads, n):
            raise checkpoint.ModelError(
                f"{n} ranks cannot divide {sizes[0]} heads, {heads} KV heads, {sizes[1]} columns of the MLP "
                f"and {sizes[2]} tokens evenly; choose another --ranks."
            )
        self.kv_heads, first = heads, self.ranks.rank * heads // n
        self.own_kv_heads = range(first, first + max(1, heads // n))  # of the whole model's
        self.writes = self.ranks.rank * heads % n == 0  # the first of those that share them
        return replace(
            whole, num_attention_heads=sizes[0] // n, num_key_value_heads=len(self.own_kv_heads),
            intermediate_size=sizes[1] // n, tie_word_embeddings=False,
        )  # fmt: skip

    def divide(self, model):
        """Join what the parts compute: sums over ranks, and logits of all tokens, the same bits on each."""
        config, where = model.config, dict(dtype=model.dtype, device=model.embedding.device)
        model.sharding = self
        model.head = Linear(config.hidden_size, config.vocab_size // self.ranks.count, False, **where)
        model.head.register_forward_hook(lambda head, inputs, logits: self.ranks.all_gather(logits))
        for layer in model.layers:
            for linear in layer.o_proj, layer.down_proj:
                linear.register_forward_hook(lambda linear, inputs, out: self.ranks.all_sum(out))

    def fill(self, target, name: str, whole):
        """Copy this rank's part of a weight to its `target`."""
        rank, n = self.ranks.rank, self.ranks.count
        if "o_proj" in name or "down_proj" in name:  # some of the inputs; what is added once is rank 0's
            whole = whole.chunk(n, 1)[rank] if whole.ndim == 2 else whole * (rank == 0)
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")):
            pieces = min(n, self.kv_heads) if "k_proj" in name or "v_proj" in name else n
            whole = whole.chunk(pieces)[rank * pieces // n]
        target.copy_(whole)


# 2. Agreement ----------------------------------------------------------------------------------

class AgreedTransfer(links.Transfer):
    """A transfer as all ranks see it: over when it is over on all of them, failed if it has failed on any."""

    issued = 0.0  # only the restoration's deadline counts: the ranks agree on that

    def __init__(self, own: links.Transfer, cache: "SyncedCache", number):
        self.own, self.cache, self.number, self.state = own, cache, number, ON_ITS_WAY
        self.lane, self.label = own.lane, own.label
        self.restoration, self.last = None, False  # whose it is, and whether it brings the last layer

    def local_state(self) -> int:
        if not self.own.ready:
            return ON_ITS_WAY
        return FAILED if self.own.error is not None else ARRIVED + self.number(self.own.value)

    @property
    def ready(self) -> bool:
        """Whether it is over on all ranks; the last layer's also waits for earlier ones that were skipped."""
        passed = self.restoration.completed if self.last else ()
        return self.state != ON_ITS_WAY and all(one.state != ON_ITS_WAY for one in passed)

    @property
    def error(self) -> Exception | None:
        return links.TransferError("on a rank") if self.state == FAILED else None

    def queue_wait(self) -> bool:
        """In the forward pass: wait for this rank's own copy (a GPU's stream does), or go on with whatever is
        there. In the last layer agree whether all ranks have all. Raises TransferError if not."""
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
    """Put before a chapter's Cache among the bases, this has it do the same on all ranks. Three calls are
    collective: `poll`, `agree` after a `match`, and `agree` in the `queue_wait` of a last layer."""

    longest_save = math.inf  # no clock decides what is saved

    def __init__(self, ranks: Ranks, *what):
        super().__init__(*what)
        self.ranks = ranks
        self.commands: deque = deque()  # of rank 0, for all; a Request goes as its id()
        self.received: deque = deque()  # those that all ranks are to do now
        self.agreed: list[AgreedTransfer] = []  # those that may be under way, oldest first
        self.until = WeakKeyDictionary()  # restoration, or request in line -> its deadline here; 0: failed

    def agree(self, fact):
        return self.ranks.all_true(fact)

    def poll(self):
        """Agree on all that is under way, and hear what rank 0 has to say."""
        # 1. What this rank knows, in an order that is the same on all
        awaited = [(one.restoration, "deadline") for one in self.engine.running if one.restoration]
        awaited += [(one, "wait_deadline") for one in self.engine.waiting if one in self.until]
        self.agreed = [one for one in self.agreed if not one.ready]
        facts = [time.perf_counter() < self.until[one] for one, _ in awaited]
        facts += [one.local_state() for one in self.agreed]
        commands = [self.commands.popleft() for _ in range(len(self.commands))]
        message = json.dumps(commands, default=id).encode() if commands else b""
        size = len(message) if self.ranks.rank == 0 else sys.maxsize  # the minimum is rank 0's
        # 2. What all may believe
        size, *facts = self.ranks.all_min([size, *map(int, facts)])
        for (one, limit), in_time in zip(awaited, facts):
            setattr(one, limit, math.inf if in_time else 0.0)
        for transfer, state in zip(self.agreed, facts[len(awaited) :]):
            transfer.state = state
        # 3. What follows from it
        super().poll()
        self.received += json.loads(self.ranks.broadcast(message, size)) if size else ()

    def agree_on(self, transfer: links.Transfer, number=lambda value: 0) -> AgreedTransfer:
        """Agree on a transfer from now on, and on a `number` that its value says here."""
        if not hasattr(transfer, "agreed"):
            transfer.agreed = AgreedTransfer(transfer, self, number)
            self.agreed.append(transfer.agreed)
        return transfer.agreed

    def hold(self, lane, transfers, *held, **options):
        """Release on all ranks in the same step."""
        super().hold(lane, [self.agree_on(transfer) for transfer in transfers], *held, **options)

    def submitted(self, request):
        if request.wait_deadline < math.inf:
            self.until[request] = request.wait_deadline
            request.wait_deadline = math.inf  # until poll says that it is over on a rank
        super().submitted(request)

    def restore(self, request, restoration, match):
        self.until[restoration] = restoration.deadline
        restoration.deadline = math.inf  # until poll says that it is over on a rank
        with closing(super().restore(request, restoration, match)) as generator:
            for transfer in map(self.agree_on, generator):
                transfer.restoration = restoration
                transfer.last = restoration.layers == len(self.model.layers) - 1
                yield transfer
                if not restoration.deadline:  # a pass may have gone on without a copy that was late here
                    raise links.TransferError("a copy is late on a rank")


# 3. What a rank keeps --------------------------------------------------------------------------

class KVCache(SyncedCache, offload.HostCache):
    """Chapter 03's Cache: the K and V of a rank's heads."""


class ColumnsCache(SyncedCache, hidden_states.HiddenCache):
    """Chapter 04's Cache, which keeps a rank's columns of each layer's input."""

    @property
    def width(self) -> int:
        return super().width // self.ranks.count

    def save_layer(self, layer, hidden, batch):
        super().save_layer(layer, hidden.chunk(self.ranks.count, 1)[self.ranks.rank], batch)  # [T, D / n]

    def copy_layer(self, loading, layer, *what):
        super().copy_layer(loading, layer, *what)
        self.agree_on(loading.transfers[layer])  # also before it is this layer's turn

    def project(self, layer, hidden, rotation, slots):
        """Gather the columns [T, D / n] of all ranks first. Layer 0's input, the embedding, is whole."""
        super().project(layer, self.ranks.all_gather(hidden) if layer else hidden, rotation, slots)  # [T, D]


class PageHeadCache(KVCache):
    """Chapter 03's Cache, and storage for any number of ranks: an object for each page and KV head."""

    threshold = 256  # tokens: fewer are not worth a prefetch (07)
    run = 64  # tokens that a read brings at once (07)

    def __init__(self, ranks, blocks: int, bandwidth, storage: store.Storage, heads: range, writes=True):
        """`heads`: this rank's, of the whole model's KV heads. `writes`: no other rank writes these."""
        super().__init__(ranks, blocks, bandwidth)
        self.storage, self.heads, self.writes = storage, heads, writes
        self.reading: set = set()  # prefixes on their way from storage
        self.late = False  # a request has waited for it in vain, and nothing has come since

    def attach(self, engine):
        super().attach(engine)
        self.storage.open(engine.wake.set)

    def keys(self, block_keys) -> list[bytes]:
        """-> of each page a key for each of this rank's heads."""
        return [sha256(one.digest + b"head %d" % head).digest() for one in block_keys for head in self.heads]

    def memory(self, host_blocks) -> list:
        """-> the memory [L, 2, page size, hd] of each."""
        array, heads = as_integers(self.host.memory), range(len(self.heads))  # [L, places, 2, ...]
        return [array[:, host_block, :, :, head] for host_block in host_blocks for head in heads]

    def is_local(self, block_key) -> bool:
        return block_key in self.pool.block_of or self.has_block(block_key)

    def submitted(self, request):
        """Ask storage for all pages behind those that are near; while it is late, for one request."""
        pages = list(dropwhile(self.is_local, self.missing(request)))
        if len(pages) * self.pool.block_size >= self.threshold and not (self.late and self.in_flight["ask"]):
            count = lambda there: len(list(takewhile(bool, there))) // len(self.heads)  # noqa: E731
            answer = self.storage.exists(self.keys(pages))
            request.memo = self.agree_on(answer, count)
            self.hold("ask", [answer], then=partial(self.on_answer, request, pages, request.memo))

    def on_answer(self, request, pages: list, answer: AgreedTransfer, arrived: bool):
        """Read those pages that all ranks can read and that are not near, as far as there are places."""
        pages, count = pages[: max(0, answer.state - ARRIVED)], max(1, self.run // self.pool.block_size)
        if len(pages) * self.pool.block_size < self.threshold:
            return
        to_read = [one for one in pages if not (self.is_local(one) or one in self.reading)]
        to_read = to_read or pages[: count * self.late]  # does storage read again?
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

    def waits(self, request):
        asking = request.memo and not request.memo.ready
        waits = asking or not self.reading.isdisjoint(self.missing(request))
        self.late |= waits and request.wait_deadline <= 0
        return waits and not self.late

    def finished(self, request):
        super().finished(request)
        self.storage.use(self.keys(request.chain))

    def on_saved(self, request, transfer, block_keys, host_blocks, arrived: bool):
        """Write the pages that have arrived in host memory; at most a quarter of it is locked for that."""
        super().on_saved(request, transfer, block_keys, host_blocks, arrived)
        for block_key, host_block in zip(block_keys, host_blocks):
            if arrived and len(self.in_flight["written"]) < max(1, self.host.size // 4):
                keys, values = self.keys([block_key]), self.memory([host_block])
                if not self.writes:  # another rank does, and doubts them itself until it has
                    self.storage.doubted.difference_update(keys)
                    keys = values = []
                self.hold("written", [self.storage.set(keys, values)], (self.host, [host_block]))

    def close(self):
        self.close_each(super(), self.storage)


# 4. The demo -----------------------------------------------------------------------------------

KEEPS = {"nothing": "nothing", "kv": "K and V", "states": "hidden states"}


def demo(model, frontend: Frontend, arguments):
    """A conversation that comes back on all ranks, beside one rank alone; and a rank that has lost a page."""
    ranks, new = model.sharding.ranks, max(2, min(arguments.max_tokens, 8))
    arguments.always_restore, arguments.storage = True, None
    # 1. Ask on all ranks: each keeps its part, the device loses everything, and it comes back
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
    # 3. Compare with chapter 01, and time beside one rank that has it all
    single, verified, taken, carried = {}, True, {}, {}
    if ranks.rank == 0:
        verified = lesson.verify(paged.baseline.Engine(whole), asked + lost)
        single = {keep: make_engine(whole, arguments, keep) for keep in KEEPS}
    for count, ways in (1, single), (ranks.count, engines):
        ranks.barrier()
        for keep, engine in ways.items():
            lesson.ask(engine, prompt, 2, "device")  # which keeps what was asked
            before, case = engine.counts["bytes_in"], f"{KEEPS[keep]}, {count} rank{'s' * (count > 1)}"
            answered = [lesson.ask(engine, prompt, 2, "device") for _ in range(lesson.ROUNDS)]
            taken[case] = [request.outcome.ttft_ms for request in answered]
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
    if carried["states", 1] > carried["kv", 1]:
        print("  Query heads share KV heads: K and V are fewer bytes than hidden states, and better here")
    found = [request.cached_tokens for request in lost]
    print(
        f"\nOf {len(prompt)} tokens {found[0]} come from storage. When rank {ranks.count - 1} has lost "
        f"a page of one head there,\n{found[1]} do, on all ranks alike, and the rest is computed.\n\n"
        f"The last turn from hidden states, on rank 0\n{charts.chart(timeline)}\n\n"
        "Ranks divide what is kept, what travels and what is projected, and agree on a few numbers. Where\n"
        "they share one processor, as here without GPUs, only the bytes are those of as many devices."
    )
    return dict(link=link, verified=verified, rows=rows, found=found), [timeline]


def lose_a_page(model, arguments, prompt: list[int], new: int) -> list[Request]:
    """Ask where only storage has the history, before and after the last rank has lost a page of it."""
    ranks, answered = model.sharding.ranks, []
    with tempfile.TemporaryDirectory() as own:
        folder = ranks.broadcast(own.encode(), len(own)).decode()  # rank 0's
        options = argparse.Namespace(**{**vars(arguments), "storage": f"file:{folder}"})
        engine = make_engine(model, options, "kv")
        chain = lesson.ask(engine, prompt).chain
        for lost in [], chain[len(chain) // 2 :][:1]:
            lesson.wait_until_idle(engine)
            engine.evict("host")
            if lost and ranks.rank == ranks.count - 1:
                Path(f"{folder}/{engine.lower_tier.cache.keys(lost)[-1].hex()}.page").unlink(missing_ok=True)
            answered.append(lesson.ask(engine, prompt, new, "device"))
        lesson.wait_until_idle(engine)
        engine.close()
    return answered


# 5. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    offload.add_arguments(parser)
    add = parser.add_argument
    add("--ranks", type=cli.bounded(int, 1, 64), metavar="N", help="parts of the model (2, or torchrun's)")
    add("--keep", choices=KEEPS, default="states", help="what comes back: kv, or hidden states (default)")
    add("--storage", metavar="URL", help="with --keep kv: where pages go too, a URL as in chapter 07")


def make_engine(model, arguments, keep: str | None = None) -> paged.Engine:
    """Chapter 02's engine with a Cache that is the same on all ranks. Collective."""
    config, size = model.config, arguments.block_size
    whole, keep = getattr(model, "sharding", None), keep or arguments.keep
    ranks = whole.ranks if whole else Ranks()
    if arguments.storage and keep != "kv":
        raise checkpoint.ModelError("--storage has pages of K and V; add --keep kv, or leave it out.")
    # 1. As many blocks as fit on every rank
    useful = arguments.max_running * -(-config.max_position_embeddings // size)
    block_bytes = size * config.kv_numbers_per_token * model.dtype.itemsize
    kept = size * hidden_states.bytes_per_token(model) // ranks.count if keep == "states" else block_bytes
    on_device = cli.blocks_that_fit(arguments.gpu_blocks, useful, block_bytes, model.device, "--gpu-blocks")
    options = argparse.Namespace(**{**vars(arguments), "gpu_blocks": on_device})
    on_host = offload.host_blocks(model, options, kept)
    options.gpu_blocks, on_host = ranks.all_min([on_device, on_host])
    # 2. A link each, as fast as for a model that is not divided
    bandwidth = hardware.bandwidth(model, arguments.link)
    if whole and arguments.link is None and bandwidth:
        bandwidth = modelled_link.Bandwidth(bandwidth.value * config.num_key_value_heads / whole.kv_heads)
    # 3. The Cache
    if keep == "states":
        cache = ColumnsCache(ranks, on_host, bandwidth)
    elif arguments.storage:
        storage = store.Storage(backends.open_backend(arguments.storage))
        cache = PageHeadCache(ranks, on_host, bandwidth, storage, whole.own_kv_heads, whole.writes)
    else:
        cache = KVCache(ranks, on_host, bandwidth) if keep == "kv" else SyncedCache(ranks)
    lower_tier = Restorer(cache, Estimates(arguments.always_restore))
    engine = paged.make_engine(model, options, lower_tier)
    return engine


def load(ranks: Ranks, name: str, dtype: str, device: str):
    """Load a rank's part as checkpoint.load does. Collective."""
    n, gpus = ranks.count, torch.cuda.device_count()
    if checkpoint.pick_device(device) == "cuda" and gpus < n:
        raise checkpoint.ModelError(f"{n} ranks need as many GPUs, and here are {gpus}; add --device cpu.")
    loaded = checkpoint.load(name, dtype, device, sharding=Sharding(ranks))
    ranks.barrier()
    return loaded


def main():
    parser = cli.parser_for(__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    begin = lambda *names: load(join(arguments.ranks), *names)  # noqa: E731
    try:
        if of_environment(arguments.ranks)[0] == 0:
            make = lambda *what: BroadcastEngine(make_engine(*what))  # noqa: E731
            return cli.main(__doc__, "09_tensor_parallel", add_arguments, make, demo, load=begin)
        # The other ranks do the same
        model, tokenizer, end_tokens = begin(arguments.model, arguments.dtype, arguments.device)
        if arguments.demo:
            lesson.ROUNDS = arguments.rounds
            demo(model, Frontend(model, tokenizer, end_tokens), arguments)
        else:
            BroadcastEngine(make_engine(model, arguments), tokenizer).follow()
    except (checkpoint.ModelError, RequestError, OSError) as error:
        sys.exit(f"09_tensor_parallel: {error}")


if __name__ == "__main__":
    main()
