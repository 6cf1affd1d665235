"""Chapter 09: state that is divided over ranks.

The problem. A model that is divided over several GPUs divides its KV cache with it. What the chapters before
keep on one device lies in pieces on all of them, and one question joins theirs: do all ranks agree on what is
there? A rank that restores while another computes takes part in other sums than that one: both hang, or both
write nonsense.

The mechanism. The model is divided as Megatron does: a rank has an n-th of the heads and of the MLP's
columns, and sums over ranks follow attention and MLP. Its device has the blocks of its own KV heads.

    keeps             a rank loads                    between ranks         then
    K and V (03)      its own heads' blocks           nothing
    states (04)       its columns of all rows, D/n    all-gather a layer    projects its own KV heads

Hidden states are the same on all ranks, so each keeps another n-th of them, and an all-gather puts a layer
together while the next one travels. They are divided by columns, so that any number of rows divides evenly.
The norm and the projection see whole rows: not even the order of a sum changes.

    bytes over a rank's link, of one rank's:    states 1/n      K and V max(1/n, 1/KV heads)

Agreement. Every rank runs the same engine on the same requests, and nothing that it decides is sent. Equal
engines decide alike as long as they believe the same. What one rank alone can know is a few numbers, and of
each the minimum over ranks is what all may believe:

    a transfer        0 on its way    1 failed    2 arrived                         once a step
    a restoration     0 too late      1 in time                                     once a step
    a match           0 computing is sooner    1 loading is                         once an admission
    the last layer    0 something is missing here    1 all is here                  once a restoration

The last one is for a forward pass that waits for a restoration, layer by layer. A rank whose copy does not
come in time goes on with zeros, since the others wait for its part of the sums; behind the last layer all
learn of it, and the step has not happened. "Too late" stays: what arrives later is not used. What is asked
comes in on rank 0, and reaches the others with the agreement of a step (common/ranks.py).

Where there are fewer KV heads than ranks, ranks share them. With `--storage` pages of K and V are written
to storage too, an object for each page and KV head, so that any number of ranks reads what any other has
written. To divide chapter 05 ranks would agree on the plan, which rests on measured speeds; to divide chapter
06, on where each chunk's arrival moves the limit: once a layer, instead of once a step.

Sources: Megatron-LM (Shoeybi et al., 2019, section 3); HCache (EuroSys '25), section 5; HiCache (the design
document of SGLang) on several ranks and `page_head`.

    python 09_tensor_parallel.py --demo --ranks 2
    python 09_tensor_parallel.py --keep states             # the server, on http://127.0.0.1:5000
    torchrun --nproc-per-node 2 09_tensor_parallel.py --demo
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch

from common import checkpoint, cli, lesson, store
from common import link as links
from common.link import TransferError
from common.llama import Linear
from common.ranks import Everywhere, Ranks, join, launch
from common.requests import Frontend, Request, RequestError
from common.restoring import LATER, PAUSE, Cache

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
ON_ITS_WAY, FAILED, ARRIVED = range(3)
FACTS = 256  # numbers of an agreement; what does not fit in is asked in the next step
LIMIT = 2.0  # seconds that nobody waits longer for a copy: well below those of a collective

# 1. The model, divided -------------------------------------------------------------------------

class Division:
    """What a rank has of a model."""

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
        self.kv_heads = heads
        return replace(
            whole,
            num_attention_heads=whole.num_attention_heads // n,
            num_key_value_heads=max(1, heads // n),
            intermediate_size=whole.intermediate_size // n,
            tie_word_embeddings=False,
        )

    def divide(self, model):
        """Join what the parts compute: sums over ranks, and logits of all tokens, the same bits on each."""
        config, where = model.config, dict(dtype=model.dtype, device=model.embedding.device)
        model.head = Linear(config.hidden_size, config.vocab_size // self.ranks.count, False, **where)
        model.head.register_forward_hook(lambda head, inputs, logits: self.ranks.gather(logits))
        for layer in model.layers:
            for linear in layer.o_proj, layer.down_proj:
                linear.register_forward_hook(lambda linear, inputs, out: self.ranks.total(out))

    @property
    def own_kv_heads(self) -> range:
        """Of the whole model's; ranks share one where there are fewer than ranks."""
        first = self.ranks.rank * self.kv_heads // self.ranks.count
        return range(first, first + max(1, self.kv_heads // self.ranks.count))

    def fill(self, place, name: str, shape, whole):
        """Copy this rank's part of a weight to its `place`. `whole`, a tensor or one in a file, is sliced."""
        rank, n = self.ranks.rank, self.ranks.count
        if "o_proj" in name or "down_proj" in name:  # some of the inputs; what is added once is rank 0's
            if len(shape) == 2:
                place.copy_(whole[:, rank * shape[1] // n : (rank + 1) * shape[1] // n])
            elif rank == 0:
                place.copy_(whole[:])
            else:
                place.zero_()
        elif "k_proj" in name or "v_proj" in name:
            head, own = shape[0] // self.kv_heads, self.own_kv_heads
            place.copy_(whole[own.start * head : own.stop * head])
        elif any(part in name for part in ("q_proj", "gate_proj", "up_proj", "lm_head")):  # of the outputs
            place.copy_(whole[rank * shape[0] // n : (rank + 1) * shape[0] // n])
        else:
            place.copy_(whole[:])

    def sums(self, tensor: int) -> bool:
        """Whether this rank reads all of a file's tensor, for the model's digest."""
        return tensor % self.ranks.count == self.ranks.rank

    def merge(self, sums: list[bytes]) -> list[bytes]:
        """Digests of tensors, each of one rank, on all."""
        joined = self.ranks.gather_bytes(b"".join(sums))
        return [joined[at % self.ranks.count][32 * at : 32 * at + 32] for at in range(len(sums))]


# 2. Agreement ----------------------------------------------------------------------------------

class Shared:
    """A transfer as all ranks see it: over when it is over everywhere, failed if it failed anywhere."""

    def __init__(self, own, cache: "Together", landed=()):
        """`own`: this rank's. `landed`: the tensors that it writes."""
        self.own, self.cache, self.landed, self.state = own, cache, landed, ON_ITS_WAY
        self.lane, self.label, self.bytes, self.cancel = own.lane, own.label, own.bytes, own.cancel
        self.restoration, self.last = None, False  # whose it is, and whether it brings the last layer

    def seen_here(self) -> int:
        if not self.own.ready:
            return ON_ITS_WAY
        return ARRIVED if self.own.error is None else FAILED

    @property
    def ready(self) -> bool:
        """Whether it is over on all ranks. A restoration's last one is not, where ranks have gone on without
        knowing of each other: they agree first, see queue_wait."""
        return self.state != ON_ITS_WAY and not (self.last and self.restoration in self.cache.unsure)

    @property
    def error(self) -> Exception | None:
        return TransferError("it failed on a rank") if self.state == FAILED else None

    def check(self):
        """Raise TransferError if it failed."""
        if self.error:
            raise TransferError(f"{self.label} failed on a rank")

    def queue_wait(self) -> bool:
        """In the forward pass: wait for this rank's own copy, or go on with zeros. With the last layer all
        agree whether everybody has everything. Raises TransferError if not."""
        cache, restoration = self.cache, self.restoration
        cache.unsure.add(restoration)
        while not self.own.ready and restoration not in cache.missing and cache.in_time(restoration):
            time.sleep(1e-4)
        if self.seen_here() != ARRIVED:
            cache.missing.add(restoration)
            for piece in self.landed:
                piece.zero_()
        if self.last:
            cache.unsure.discard(restoration)
            if not cache.ranks.all(restoration not in cache.missing):
                cache.given_up.add(restoration)
                raise TransferError(f"{self.label} is late on a rank")
        return True

    def span(self) -> tuple[float, float]:
        return self.own.span() if self.own.ready else (self.own.issued, self.own.issued)


class SharedLink:
    """A lane whose transfers are over when they are over on all ranks."""

    def __init__(self, link: links.Link, cache: "Together"):
        self.link, self.cache, self.modelled = link, cache, link.modelled
        self.speed, self.seconds, self.measure = link.speed, link.seconds, link.measure
        self.close = link.close

    def copy(self, dst, src, label: str) -> Shared:
        landed = [dst] if isinstance(dst, torch.Tensor) else list(dst)
        shared = Shared(self.link.copy(dst, src, label), self.cache, landed)
        self.cache.loading.append(shared)
        return shared

    def __str__(self):
        return str(self.link)


class Together(Cache):
    """A Cache of another chapter, the same on all ranks. Collective are `poll`, `idle`, the restorer's
    decision whether a match is worth it, and the wait for a restoration's last layer in a forward pass."""

    def __init__(self, inner: Cache, ranks: Ranks):
        self.inner, self.ranks, self.fields = inner, ranks, inner.fields
        self.commands: deque = deque()  # of rank 0: what all are to `command`, as JSON
        self.command = lambda words: None
        self.loading: deque[Shared] = deque()  # copies to the device that may be under way
        self.missing, self.given_up = WeakSet(), WeakSet()  # restorations: something is late here; on a rank
        self.unsure = WeakSet()  # restorations of which some layers were used before all ranks had them
        self.until = WeakKeyDictionary()  # when a restoration is late here: seconds of time.perf_counter()
        self.patience = WeakKeyDictionary()  # the same of requests that stand in line
        self.done = 0  # a sum over all that was computed
        self.match, self.save_layer, self.evicting = inner.match, inner.save_layer, inner.evicting
        self.finished, self.close = inner.finished, inner.close

    def attach(self, engine):
        super().attach(engine)
        self.inner.attach(engine)
        self.under_way, self.pools = self.inner.under_way, self.inner.pools
        if hasattr(self.inner, "load_link"):
            self.inner.load_link = SharedLink(self.inner.load_link, self)
            self.inner.save_link.seconds = lambda size: 0.0  # no clock decides what is saved

    def poll(self):
        """Agree on all that is under way, and hear what rank 0 has to say."""
        # 1. What this rank knows, in an order that is the same on all
        transfers = self.on_their_way()
        waiting = [one for one in self.engine.waiting if one in self.patience][:32]
        restorations = [one.restoration for one in self.engine.running if one.restoration in self.until]
        commands = [self.commands.popleft() for _ in range(len(self.commands))]
        message = json.dumps(commands).encode() if commands else b""
        own = [len(message) if self.ranks.rank == 0 else sys.maxsize, self.done, -self.done]
        own += [self.in_time(one) and one not in self.missing for one in restorations]
        own += [time.perf_counter() < self.patience[one] for one in waiting]
        own += [one.seen_here() for one in transfers]
        # 2. What all may believe
        size, done, other, *facts = self.ranks.least([*map(int, own), *[0] * FACTS][:FACTS])
        if done != -other:
            self.ranks.end("the ranks have not computed the same; they differ in what nobody agreed upon")
        facts = iter(facts)
        for restoration, in_time in zip(restorations, facts):
            if not in_time:
                restoration.deadline = 0.0
                self.given_up.add(restoration)
        for request, in_time in zip(waiting, facts):
            request.patience = math.inf if in_time else 0.0
        for transfer, transfer.state in zip(transfers, facts):
            pass
        # 3. What follows from it
        self.inner.poll()
        for words in json.loads(self.ranks.tell(message, size)) if size else ():
            self.command(words)

    def on_their_way(self) -> list[Shared]:
        """All transfers that are not over on all ranks, oldest first."""
        while self.loading and self.loading[0].ready:
            self.loading.popleft()
        found = list(self.loading)
        for lane in self.under_way.values():
            for at, (transfers, held, then) in enumerate(lane):
                shared = [one if isinstance(one, Shared) else Shared(one, self) for one in transfers]
                lane[at] = shared, held, then
                found += shared
        return [one for one in dict.fromkeys(found) if not one.ready]

    def in_time(self, restoration) -> bool:
        return time.perf_counter() < self.until.get(restoration, math.inf)

    def submitted(self, request):
        if request.patience < math.inf:
            self.patience[request] = min(request.patience, time.perf_counter() + LIMIT)
            request.patience = math.inf  # until all agree that it is over: see poll
        self.inner.submitted(request)

    def restore(self, request, restoration, match):
        self.until[restoration] = min(restoration.deadline, time.perf_counter() + LIMIT)
        restoration.deadline = math.inf  # the same
        try:
            with closing(self.inner.restore(request, restoration, match)) as steps:
                for transfer in steps:
                    if transfer is not PAUSE:
                        transfer.restoration = restoration
                        transfer.last = restoration.layers == len(self.model.layers) - 1
                    yield transfer
                    if restoration in self.given_up:
                        raise TransferError("a copy is late on a rank")
        finally:
            self.unsure.discard(restoration)

    def save(self, batch):
        self.inner.save(batch)
        for request, count in batch.work:
            did = request.id, count, request.computed, request.tokens[-1], request.table
            self.done = zlib.crc32(repr(did).encode(), self.done)

    def idle(self):
        """Measure once, all together: a rank that measures alone is alone."""
        restorer = self.engine.restorer
        if not restorer.rates:
            restorer.agree = self.ranks.all
            self.inner.idle()
            if rate := restorer.measure_prefill():
                restorer.rates.append(rate)


# 3. Pages in storage ---------------------------------------------------------------------------

class PageHeadCache(offload.HostCache):
    """Chapter 03's, and behind it storage for any number of ranks: an object for each page and KV head."""

    def __init__(self, blocks: int, bandwidth, storage: store.Storage, heads: range):
        """`heads`: of the whole model's KV heads those that this rank has."""
        super().__init__(blocks, bandwidth)
        self.storage, self.heads = storage, heads
        self.coming: set = set()  # prefixes on their way from storage
        self.unwritten: dict = {}  # prefixes that storage may lack

    def attach(self, engine):
        super().attach(engine)
        self.array = links.as_integers(self.host.memory)  # [L, 2, places, page size, KVH, hd], for NumPy
        self.storage.open(engine.wake.set)

    def page(self, prefix, place: int):
        """-> a key for each of this rank's heads, and the memory [L, 2, page size, hd] of each."""
        keys = [hashlib.sha256(prefix.key + b"head %d" % head).digest() for head in self.heads]
        return keys, [self.array[:, :, place, :, head] for head in range(len(self.heads))]

    def submitted(self, request):
        """Ask storage for the pages that are not near, until one is not there."""
        full, ahead = (len(request.tokens) - 1) // self.pool.block_size, []
        for number, prefix in enumerate(request.chain[:full]):
            near = prefix in self.host.block_of or prefix in self.pool.block_of or prefix in self.coming
            if near or not self.host.available or len(self.coming) >= self.host.size // 2:
                continue
            (place,) = self.host.allocate(1)
            work = self.read, ahead, *self.page(prefix, place)
            read = self.storage.reader.submit(f"page {number}", self.host.block_bytes, *work)
            self.coming.add(prefix)
            self.hold("storage", [read], (self.host, [place]), then=partial(self.brought, prefix, place))
            self.host.release([place])

    def read(self, ahead: list, keys, heads):
        """On storage's thread. `ahead` says that an earlier page was not there."""
        if ahead or self.storage.count(keys) < len(keys):
            ahead.append(True)
            raise TransferError("it is not in storage")
        self.storage.read(keys, heads)

    def brought(self, prefix, place: int, arrived: bool):
        self.coming.discard(prefix)
        if arrived:
            self.host.register(place, prefix)

    def match(self, request):
        full = (len(request.tokens) - 1) // self.pool.block_size
        if request.patience > 0 and any(prefix in self.coming for prefix in request.chain[:full]):
            return LATER
        return super().match(request)

    def save(self, batch):
        before = {request: request.kept or 0 for request, _ in batch.work}
        super().save(batch)
        for request, looked_at in before.items():
            self.unwritten.update(dict.fromkeys(request.chain[looked_at : request.registered]))

    def poll(self):
        """Write the pages that have arrived in host memory; at most a quarter of it is locked for that."""
        super().poll()
        for prefix in list(self.unwritten):
            place = self.host.block_of.get(prefix)
            if place is not None and len(self.under_way["written"]) < max(1, self.host.size // 4):
                self.hold("written", [self.storage.set(*self.page(prefix, place))], (self.host, [place]))
            if place is not None or prefix not in self.saving:
                del self.unwritten[prefix]

    def close(self):
        super().close()
        self.storage.close()


# 4. The demo -----------------------------------------------------------------------------------

KEEPS = {"nothing": "nothing", "kv": "K and V", "states": "hidden states"}


def demo(ranks: Ranks, model, frontend: Frontend, arguments):
    """A conversation that comes back on all ranks, beside one rank alone; and a rank that has lost a page."""
    rng, new = random.Random(0), max(2, min(arguments.max_tokens, 16))
    arguments.always_restore = True
    text = lesson.document(frontend, rng, frontend.context // 2, lesson.SECRET)
    talk = [dict(role="user", content=text)]
    # 1. Ask on all ranks: each keeps its part, the device loses everything, and it comes back
    engines = {keep: make_engine(ranks, model, arguments, keep) for keep in KEEPS}
    asked = []
    for engine in engines.values():
        asked += engine.generate([frontend.request(messages=talk[:1], max_tokens=new)])
        answer = dict(role="assistant", content=asked[-1].outcome.text)
        talk[1:] = answer, dict(role="user", content=lesson.QUESTION)
        asked.append(once(engine, frontend.request(messages=talk, max_tokens=new)))
    last = asked[-1]
    # 2. Ask again when one rank has lost a page in storage
    lost = lose_a_page(ranks, model, frontend, arguments, talk, new)
    # 3. Compare with chapter 01, and time beside one rank that has it all
    single, verified = {}, True
    if ranks.rank == 0:
        whole, *_ = checkpoint.load(arguments.model, arguments.dtype, arguments.device)
        verified = lesson.equal_to_baseline(whole, asked + lost)
        single = {keep: make_engine(Ranks(), whole, arguments, keep) for keep in KEEPS}
    ranks.meet()
    prompt, taken, carried = last.tokens[: last.prompt_tokens], {}, {}
    for count, ways in (1, single), (ranks.count, engines):
        for keep, engine in ways.items():
            once(engine, Request(prompt, 2))  # keeps what was asked
            before, way = engine.counts["bytes_in"], partial(once, engine)
            samples = [way(Request(prompt, 2)).outcome.ttft_ms for _ in range(lesson.ROUNDS)]
            taken[f"{KEEPS[keep]}, {count} rank{'s' * (count > 1)}"] = samples
            carried[keep, count] = (engine.counts["bytes_in"] - before) / lesson.ROUNDS
        ranks.meet()
    began, agreements = time.perf_counter(), 100
    for _ in range(agreements):
        ranks.least([0] * FACTS)
    agreement = (time.perf_counter() - began) / agreements

    # 4. Show
    for engine in [*engines.values(), *single.values()]:
        engine.close()
    if ranks.rank:
        return {}, []
    rows = lesson.table(f"TTFT behind {len(prompt)} tokens", taken, "ttft_ms", "ms")
    for row, size in zip(rows, carried.values()):
        row["bytes_over_link"] = size
    for keep in ("kv", "states"):
        one, each = carried[keep, 1] / 1e6, carried[keep, ranks.count] / 1e6
        print(f"  {KEEPS[keep]}: {one:.2f} MB over one rank's link, {each:.2f} over each of {ranks.count}")
    link = engines["states"].cache.inner.load_link
    print(f"  {link}, for each rank; an agreement takes {1e6 * agreement:.0f} us\n")
    found = [request.cached_tokens for request in lost]
    print(
        f"Of {last.prompt_tokens} tokens {found[0]} come from storage. When rank {ranks.count - 1} has lost "
        f"a page of one head there,\n{found[1]} do, on all ranks alike, and the rest is computed.\n"
    )
    print(f"The last turn from hidden states, on rank 0\n{last.timeline.chart()}\n")
    print(
        "Ranks divide what is kept, what travels and what is projected, and agree on a few numbers. Where\n"
        "they share one processor, as here without GPUs, only the bytes are those of as many devices."
    )
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), verified=verified, rows=rows)
    return dict(report, ranks=ranks.count, agreement_us=1e6 * agreement, found=found), [last.timeline]


def once(engine, request: Request) -> Request:
    """Ask, when the device has lost everything."""
    lesson.settle(engine)
    engine.evict("device")
    return engine.generate([request])[0]


def lose_a_page(ranks: Ranks, model, frontend: Frontend, arguments, talk: list, new: int) -> list[Request]:
    """-> two requests whose history only storage has: before and after the last rank has lost a page."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(ranks.tell(str(folder).encode().ljust(256), 256).decode().strip())  # rank 0's
        options = argparse.Namespace(**{**vars(arguments), "storage": f"file:{folder}"})
        engine, answered = make_engine(ranks, model, options, "kv"), []
        engine.generate([frontend.request(messages=talk, max_tokens=1)])
        for lost in (False, True):
            lesson.settle(engine)
            for pool in engine.pools:
                engine.evict(pool)
            if lost and ranks.rank == ranks.count - 1:
                chain = answered[0].chain
                keys, _ = engine.cache.inner.page(chain[len(chain) // 2], 0)
                (folder / f"{keys[-1].hex()}.page").unlink()
            answered += engine.generate([frontend.request(messages=talk, max_tokens=new)])
        lesson.settle(engine)
        engine.close()
        ranks.meet()  # before the folder is deleted
    return answered


# 5. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    add, number = parser.add_argument, partial(cli.bounded, int, 1)
    add("--ranks", type=number(64), default=2, metavar="N", help="processes that divide the model (2)")
    add("--keep", choices=KEEPS, default="states", help="what comes back: kv, or hidden states (default)")
    words = "KV blocks, or states of as many tokens, in host memory (four times the device's)"
    add("--cpu-blocks", type=number(1 << 24), metavar="N", help=words)
    words = "with --keep kv: where pages go too: file:DIR, redis://HOST:PORT/N, or see chapter 07"
    add("--storage", metavar="URL", help=words)
    add("--always-restore", action="store_true", help="restore even what is computed sooner")
    links.add_arguments(parser)


def make_engine(ranks: Ranks, model, arguments, keep: str | None = None) -> paged.Engine:
    """Chapter 02's engine with a Cache that is the same on all ranks. Collective."""
    config, size, host = model.config, arguments.block_size, torch.device("cpu")
    whole = getattr(model, "division", None)
    keep = keep or arguments.keep
    if arguments.storage and keep != "kv":
        raise checkpoint.ModelError("--storage has pages of K and V; add --keep kv, or leave it out.")
    # 1. As many blocks as fit on every rank
    useful = arguments.max_running * -(-config.max_position_embeddings // size)
    block_bytes = size * config.kv_numbers_per_token * model.dtype.itemsize
    on_device = cli.blocks_that_fit(arguments.gpu_blocks, useful, block_bytes, model.device, "--gpu-blocks")
    on_host = cli.blocks_that_fit(arguments.cpu_blocks, 4 * on_device, block_bytes, host, "--cpu-blocks")
    blocks = ranks.least([on_device, on_host])
    # 2. A link each, as fast as for a model that is not divided
    bandwidth = links.bandwidth(model, arguments.link, arguments.platform)
    if whole and arguments.link == "auto" and bandwidth:
        bandwidth = links.Bandwidth(bandwidth.value * config.num_key_value_heads / whole.kv_heads)
    # 3. The Cache
    if keep == "states":
        cache = hidden_states.HiddenCache(max(2, blocks[1] * size // 64), bandwidth)
        width = config.hidden_size // ranks.count
        cache.columns, cache.whole = slice(ranks.rank * width, (ranks.rank + 1) * width), ranks.gather
    elif arguments.storage:
        backend = store.open_backend(arguments.storage)
        cache = PageHeadCache(blocks[1], bandwidth, store.Storage(backend), whole.own_kv_heads)
    else:
        cache = offload.HostCache(blocks[1], bandwidth) if keep == "kv" else Cache()
    options = argparse.Namespace(**{**vars(arguments), "gpu_blocks": blocks[0]})
    return paged.make_engine(model, options, Together(cache, ranks))


def load(ranks: Ranks, *arguments, **named):
    """checkpoint.load of a rank's part. Collective."""
    division = Division(ranks)
    model, *rest = checkpoint.load(*arguments, **named, division=division)
    model.division = division
    ranks.meet()
    return model, *rest


def main():
    parser = cli.parser_for(__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    if "RANK" not in os.environ and arguments.ranks > 1:
        sys.exit(launch(arguments.ranks, [sys.executable, *sys.argv]))
    ranks = join()
    if ranks.rank == 0:
        make = lambda model, arguments: Everywhere(make_engine(ranks, model, arguments), ranks)  # noqa: E731
        functions = add_arguments, make, partial(demo, ranks)
        return cli.main(__doc__, "09_tensor_parallel", *functions, load=partial(load, ranks))
    # The other ranks: do the same, and say nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = open(os.devnull, "w")
    try:
        names = arguments.model, arguments.dtype, arguments.device, not arguments.plain_weights
        model, tokenizer, end_tokens = load(ranks, *names)
        if arguments.demo:
            demo(ranks, model, Frontend(model, tokenizer, end_tokens), arguments)
        else:
            Everywhere(make_engine(ranks, model, arguments), ranks, tokenizer).follow()
    except (checkpoint.ModelError, RequestError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
