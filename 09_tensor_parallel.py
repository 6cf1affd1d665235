"""Chapter 09: state that is divided over ranks.

The problem. A model that is divided over several GPUs divides its KV cache with it. What the chapters before
keep on one device lies in pieces on all of them, and one question joins theirs: do all ranks agree on what is
there? A rank that restores while another computes takes part in other sums than that, and both hang, or write
nonsense.

The mechanism. The model is divided as Megatron does: a rank has n-th of the heads and of the MLP's columns, and
sums over ranks follow attention and MLP. Its device has the blocks of its own KV heads.

    keeps             a rank loads                    between ranks         then
    K and V (03)      its own heads' blocks           nothing
    states (04)       its columns of all rows, D/n    all-gather a layer    projects its own KV heads

Hidden states are the same on all ranks, so each keeps another n-th of them, and an all-gather puts a layer
together while the next one travels. They are divided by columns: a chunk of any number of rows divides evenly.
The norm and the projection see whole rows, so that not even the order of a sum changes.

    bytes over a rank's link, of one rank's:    states 1/n      K and V max(1/n, 1/KV heads)

Agreement. Every rank runs the same engine on the same requests, and nothing that it decides is sent. Equal
engines decide alike as long as they believe the same. What one rank alone can know is a few numbers, and of
each the minimum over ranks is what all may believe:

    a transfer        0 on its way    1 failed    2 arrived                         once a step
    a restoration     0 too late      1 in time                                     once a step
    a match           0 computing is sooner    1 loading is                         once an admission
    the last layer    0 something is missing here    1 all is here                  once a restoration

The last one is for a forward pass that waits for a restoration, layer by layer: a rank whose copy does not come
in time goes on with zeros, since the others wait for its part of the sums; behind the last layer all learn of it,
and the step has not happened. "Too late" stays: what arrives later is not used. Arrivals come in on rank 0, and
reach the others with the agreement of a step.

Where there are fewer KV heads than ranks, ranks share them. With `--storage` pages of K and V are written to
storage too, an object for each page and KV head, so that any number of ranks reads what any other has written.
Dividing chapter 05 would take an agreement on the plan, which rests on measured speeds, and chapter 06 one on
where each chunk's arrival moves the limit: a number a layer, instead of one a step.

Sources: Megatron-LM (Shoeybi et al., 2019, section 3); HCache (EuroSys '25), section 5; HiCache (SGLang's design
document) on several ranks and `page_head`.

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
import threading
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
from common.ranks import Ranks, join, launch
from common.requests import SAMPLING, Frontend, HungUp, Line, Request, RequestError, Writer
from common.restoring import LATER, PAUSE, Cache

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
ON_ITS_WAY, FAILED, ARRIVED = range(3)
FACTS = 256  # numbers of an agreement; what does not fit in is asked in the next step
LIMIT = 2.0  # seconds that nobody waits longer for a copy: well below those of a collective
BEAT = 1.0  # seconds between two agreements of an idle server
MANY = 1 << 62
PATH = 256  # bytes of a path that rank 0 tells

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
                f"{n} ranks cannot divide {sizes[0]} heads, {heads} KV heads, {sizes[1]} columns of the MLP and "
                f"{sizes[2]} tokens evenly; choose another --ranks."
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
        where = dict(dtype=model.dtype, device=model.embedding.device)
        model.head = Linear(model.config.hidden_size, model.config.vocab_size // self.ranks.count, False, **where)
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
        """Copy this rank's part of a weight to its `place`. `whole` is read by slices: a tensor, or of a file."""
        rank, n = self.ranks.rank, self.ranks.count
        if "o_proj" in name or "down_proj" in name:  # some of the inputs; what is added once is rank 0's
            if len(shape) == 1:
                place.copy_(whole[:]) if rank == 0 else place.zero_()
            else:
                place.copy_(whole[:, rank * shape[1] // n : (rank + 1) * shape[1] // n])
        elif "k_proj" in name or "v_proj" in name:
            head, own = shape[0] // self.kv_heads, self.own_kv_heads
            place.copy_(whole[own.start * head : own.stop * head])
        elif any(part in name for part in ("q_proj", "gate_proj", "up_proj", "lm_head")):  # some of the outputs
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

    def __init__(self, own, cache: "Together"):
        self.own, self.cache, self.state = own, cache, ON_ITS_WAY
        self.lane, self.label, self.bytes, self.cancel = own.lane, own.label, own.bytes, own.cancel
        self.restoration, self.last = None, False  # whose it is, and whether it brings the last layer

    def seen_here(self) -> int:
        if not self.own.ready:
            return ON_ITS_WAY
        return ARRIVED if self.own.error is None else FAILED

    @property
    def ready(self) -> bool:
        return self.state != ON_ITS_WAY

    @property
    def error(self) -> Exception | None:
        return TransferError("it failed on a rank") if self.state == FAILED else None

    def check(self):
        if self.state == FAILED:
            raise TransferError(f"{self.label} failed on a rank")

    def queue_wait(self) -> bool:
        """In the forward pass: wait for this rank's own copy, or go on with zeros. With the last layer all agree
        whether everybody has everything. Raises TransferError if not."""
        restoration, own = self.restoration, self.own
        while self.cache.in_time(restoration) and not own.ready:
            time.sleep(1e-4)
        if not own.ready or own.error is not None or not own.queue_wait() and own.error is not None:
            self.cache.missing.add(restoration)
            for piece in self.landed:
                piece.zero_()
        if self.last and not self.cache.ranks.all(restoration not in self.cache.missing):
            self.cache.given_up.add(restoration)
            raise TransferError(f"{self.label} is late on a rank")
        return True

    def span(self) -> tuple[float, float]:
        return self.own.span() if self.own.ready else (self.own.issued, self.own.issued)


class SharedLink:
    """A lane whose transfers are over when they are over on all ranks."""

    def __init__(self, link: links.Link, cache: "Together"):
        self.link, self.cache, self.close = link, cache, link.close
        self.speed, self.seconds, self.measure, self.modelled = link.speed, link.seconds, link.measure, link.modelled

    def copy(self, dst, src, label: str) -> Shared:
        shared = Shared(self.link.copy(dst, src, label), self.cache)
        shared.landed = [dst] if isinstance(dst, torch.Tensor) else list(dst)
        self.cache.loading.append(shared)
        return shared

    def __str__(self):
        return str(self.link)


class Together(Cache):
    """A Cache of another chapter, the same on all ranks. Two of its verbs are collective, `poll` and `idle`; so are the
    restorer's decision whether a match is worth it, and the last layer of a restoration in a forward pass."""

    def __init__(self, inner: Cache, ranks: Ranks, command=lambda words: None):
        """`command` does what rank 0 has put to `commands`, on all ranks at the same point."""
        self.inner, self.ranks, self.command, self.fields = inner, ranks, command, inner.fields
        self.commands: deque = deque()  # of rank 0: what all do next, as JSON
        self.loading: deque[Shared] = deque()  # copies to the device that may be under way
        self.missing, self.given_up = WeakSet(), WeakSet()  # restorations: something is late here; on a rank
        self.until, self.patience = WeakKeyDictionary(), WeakKeyDictionary()  # when a restoration is late here,
        # and when a request has waited for storage long enough: seconds of time.perf_counter()
        self.done = 0  # a sum over all batches: who has computed something else, is not one of us
        self.match, self.save_layer, self.evicting = inner.match, inner.save_layer, inner.evicting
        self.finished, self.close = inner.finished, inner.close

    def attach(self, engine):
        super().attach(engine)
        self.inner.attach(engine)
        self.under_way, self.pools = self.inner.under_way, self.inner.pools
        if hasattr(self.inner, "load_link"):
            self.inner.load_link = SharedLink(self.inner.load_link, self)
            self.inner.save_link.seconds = lambda size: 0.0  # what is saved, no clock decides

    def poll(self):
        """Agree on all that is under way, and on what rank 0 has to say."""
        # 1. What this rank knows, in an order that is the same on all
        while self.loading and self.loading[0].ready:
            self.loading.popleft()
        for lane in self.under_way.values():
            for at, (transfers, held, then) in enumerate(lane):
                shared = [one if isinstance(one, Shared) else Shared(one, self) for one in transfers]
                lane[at] = shared, held, then
        held = [one for lane in self.under_way.values() for transfers, _, _ in lane for one in transfers]
        asked = [one for one in dict.fromkeys([*self.loading, *held]) if not one.ready]
        restorations = [one.restoration for one in self.engine.running if one.restoration in self.until]
        waiting = [one for one in self.engine.waiting if one in self.patience]
        commands = [self.commands.popleft() for _ in range(len(self.commands))]
        message = json.dumps(commands).encode() if commands else b""
        now = time.perf_counter()
        facts = [len(message) if self.ranks.rank == 0 else MANY, self.done, -self.done]
        facts += [int(self.in_time(one) and one not in self.missing) for one in restorations]
        facts += [int(now < self.patience[one]) for one in waiting]
        facts += [one.seen_here() for one in asked]
        # 2. What all may believe
        facts = self.ranks.least((facts + [0] * FACTS)[:FACTS])
        size, done, other = facts[:3]
        if done != -other:
            self.ranks.end("the ranks have not computed the same: something differs that is not agreed upon")
        facts = deque(facts[3:])
        for restoration in restorations:
            if not facts.popleft():
                restoration.deadline = 0.0
                self.given_up.add(restoration)
        for request in waiting:
            if facts and not facts.popleft():
                request.patience = 0.0
        for transfer, state in zip(asked, facts):
            transfer.state = state
        self.inner.poll()
        if size:
            for words in json.loads(self.ranks.tell(message, size)):
                self.command(words)

    def in_time(self, restoration) -> bool:
        return time.perf_counter() < self.until.get(restoration, math.inf)

    def submitted(self, request):
        if request.patience < math.inf:
            self.patience[request] = min(request.patience, time.perf_counter() + LIMIT)
            request.patience = math.inf  # until all agree that it is over: see poll
        self.inner.submitted(request)

    def restore(self, request, restoration, match):
        self.until[restoration] = min(restoration.deadline, time.perf_counter() + LIMIT)
        restoration.deadline = math.inf
        with closing(self.inner.restore(request, restoration, match)) as steps:
            for transfer in steps:
                if transfer is not PAUSE:
                    transfer.restoration = restoration
                    transfer.last = restoration.layers == len(self.model.layers) - 1
                yield transfer
                if restoration in self.given_up:
                    raise TransferError(f"{getattr(transfer, 'label', 'it')} is late on a rank")

    def save(self, batch):
        self.inner.save(batch)
        did = [(request.id, count, request.computed, request.tokens[-1], request.table) for request, count in batch.work]
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
        """Write the pages that have arrived in host memory; what is being written is locked, at most a quarter."""
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


# 4. What rank 0 is asked -----------------------------------------------------------------------

class Everywhere:
    """The engine of a rank, as a server sees it: what rank 0 is asked all do, at the same point."""

    stream, generate = Line.stream, Line.generate

    def __init__(self, engine: paged.Engine, ranks: Ranks, tokenizer=None):
        self.engine, self.cache, self.ranks, self.tokenizer = engine, engine.cache, ranks, tokenizer
        self.cache.command, self.closed = self.do, False
        self.lock, self.asked = threading.Lock(), 0
        self.known: dict[int, Request] = {}  # number -> Request, of those that are not over
        self.errors: dict[int, Exception] = {}  # number -> why it is cancelled

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request: Request):
        self.engine.check(request)
        fields = {name: getattr(request, name) for name in ("tokens", "max_tokens", "options", *SAMPLING)}
        fields.update(seed=request.generator.initial_seed(), end_tokens=list(request.end_tokens))
        with self.lock:
            self.asked += 1
            self.known[self.asked] = request
            self.tell("submit", self.asked, fields, request.writer.stop if request.writer else None)

    def cancel(self, request: Request, error: Exception):
        for number, known in list(self.known.items()):
            if known is request:
                self.errors[number] = error
                self.tell("cancel", number)

    def evict(self, name: str = "device") -> int:
        before = self.engine.pools[name].evictions
        self.tell("evict", name)
        self.step()
        return self.engine.pools[name].evictions - before

    def close(self):
        self.tell("close")
        self.step()
        self.engine.close()

    def tell(self, *words):
        self.cache.commands.append(words)
        self.engine.wake.set()

    def do(self, words: list):
        """What rank 0 has said, on all ranks."""
        verb, *what = words
        if verb == "submit":
            number, fields, stop = what
            request = self.known.get(number)
            if request is None:  # on the other ranks
                writer = None if stop is None else Writer(self.tokenizer, stop)
                fields["end_tokens"] = frozenset(fields["end_tokens"])
                request = self.known[number] = Request(**fields, writer=writer)
            self.engine.submit(request)
        elif verb == "cancel" and what[0] in self.known:
            error = self.errors.pop(what[0], None) or HungUp("Rank 0 has cancelled it.")
            self.engine.cancel(self.known[what[0]], error)
        elif verb == "evict":
            self.engine.evict(*what)
        self.closed |= verb == "close"
        for number in [number for number, request in self.known.items() if request.outcome is not None]:
            del self.known[number]

    def step(self):
        """A step, or, where nobody is asked anything, an agreement now and then: so all know that all are there."""
        if self.engine.busy:
            return self.engine.step()
        if self.ranks.rank == 0 and not self.cache.commands:
            self.engine.wake.wait(BEAT)
        self.engine.wake.clear()
        self.cache.poll()

    def follow(self):
        """On the other ranks: do what rank 0 says until it says that it is over."""
        while not self.closed:
            self.step()
        self.engine.close()


# 5. The demo -----------------------------------------------------------------------------------

KEEPS = {"nothing": "nothing", "kv": "K and V", "states": "hidden states"}


def demo(ranks: Ranks, model, frontend: Frontend, arguments):
    """A conversation that comes back on all ranks, against one rank alone; then a rank whose page is lost."""
    rng, new = random.Random(0), max(2, min(arguments.max_tokens, 16))
    arguments.always_restore = True
    text = lesson.document(frontend, rng, frontend.context // 2, lesson.SECRET)
    messages = [dict(role="user", content=text)]
    # 1. Ask on all ranks: each keeps its part, the device loses everything, and it comes back
    engines = {keep: make_engine(ranks, model, arguments, keep) for keep in KEEPS}
    asked = []
    for engine in engines.values():
        (first,) = engine.generate([frontend.request(messages=messages, max_tokens=new)])
        talk = [*messages, dict(role="assistant", content=first.outcome.text), dict(role="user", content=lesson.QUESTION)]
        asked += [first, once(engine, frontend.request(messages=talk, max_tokens=new))]
    # 2. Ask again when a page of one rank's is lost
    with tempfile.TemporaryDirectory() as folder:
        folder = ranks.tell(os.fsencode(folder).ljust(PATH), PATH).decode().rstrip()
        lost, pages = lose_a_page(ranks, model, frontend, arguments, folder, talk, new)
        asked += lost
        ranks.meet()
    # 3. Compare, and time, with one rank that has it all
    alone, verified = {}, True
    if ranks.rank == 0:
        whole, *_ = checkpoint.load(arguments.model, arguments.dtype, arguments.device)
        verified = lesson.equal_to_baseline(whole, asked)
        alone = {keep: make_engine(Ranks(), whole, arguments, keep) for keep in KEEPS}
    ranks.meet()
    prompt = asked[1].tokens[: asked[1].prompt_tokens]
    taken, carried = {}, {}
    for count, ways in (1, alone), (ranks.count, engines):
        for keep, engine in ways.items():
            ways = {KEEPS[keep]: lambda: once(engine, Request(prompt, 2)).outcome.ttft_ms}  # noqa: B023
            before = engine.counts["bytes_in"]
            (samples,) = lesson.in_turn(ways).values()
            taken[f"{KEEPS[keep]}, {count} rank{'s' * (count > 1)}"] = samples
            carried[keep, count] = (engine.counts["bytes_in"] - before) // (lesson.ROUNDS + 1)
        ranks.meet()
    rows = lesson.table(f"TTFT behind {len(prompt)} tokens", taken, "ttft_ms", "ms") if ranks.rank == 0 else []
    for row, ((keep, count), size) in zip(rows, carried.items()):
        row["bytes_over_link"] = size
    for keep in ("kv", "states") if ranks.rank == 0 else ():
        one, each = carried[keep, 1], carried[keep, ranks.count]
        print(f"  {KEEPS[keep]}: {one / 1e6:.2f} MB over the link of one rank, {each / 1e6:.2f} over each of {ranks.count}")
    link, agreements = engines["states"].cache.inner.load_link, ranks.agreements
    began = time.perf_counter()
    for _ in range(100):
        ranks.least([0] * FACTS)
    taken_by_one = (time.perf_counter() - began) / 100
    print(f"  {link} for each rank; an agreement of {ranks.count} ranks takes {1e6 * taken_by_one:.0f} us\n")
    found = [request.found for request in lost]
    print(
        f"Storage has {pages} pages of {arguments.block_size} tokens. All there: {found[0]}. When rank {ranks.count - 1} has "
        f"lost page {pages // 2} of its\nheads: {found[1]}, on all ranks alike, and the rest is computed.\n"
    )
    print(f"The last turn from hidden states, on rank 0\n{asked[-3].timeline.chart()}\n")
    print(
        "Ranks divide what is kept, what travels and what is projected, and agree on a few numbers. Where they\n"
        "share one processor, as here without GPUs, they divide that too: only the bytes are as on n devices."
    )
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), ranks=ranks.count, rows=rows)
    for engine in [*engines.values(), *alone.values()]:
        engine.close()
    report.update(verified=verified, agreements=agreements, agreement_us=1e6 * taken_by_one, lost=found)
    return report, [asked[-3].timeline]


def once(engine, request: Request) -> Request:
    """Ask, when the device has lost everything."""
    lesson.settle(engine)
    engine.evict("device")
    return engine.generate([request])[0]


def lose_a_page(ranks, model, frontend, arguments, folder: str, talk: list[dict], new: int):
    """-> two requests, before and after the last rank has lost a page in storage, and how many pages there are."""
    options = argparse.Namespace(**{**vars(arguments), "storage": f"file:{folder}"})
    engine, answered = make_engine(ranks, model, options, "kv"), []
    engine.generate([frontend.request(messages=talk, max_tokens=1)])
    for _ in range(2):
        lesson.settle(engine)
        for pool in engine.pools:
            engine.evict(pool)
        ranks.meet()
        answered += engine.generate([frontend.request(messages=talk, max_tokens=new)])
        pages = answered[0].prompt_tokens // arguments.block_size
        prefix, heads = answered[0].chain[pages // 2], engine.cache.inner.page(answered[0].chain[pages // 2], 0)[0]
        if ranks.rank == ranks.count - 1 and len(answered) == 1:
            (Path(folder) / f"{heads[-1].hex()}.page").unlink()
    lesson.settle(engine)
    engine.close()
    return answered, pages


# 6. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    add, number = parser.add_argument, partial(cli.bounded, int, 1)
    add("--ranks", type=number(64), default=2, metavar="N", help="processes that divide the model (2)")
    add("--keep", choices=KEEPS, default="states", help="what comes back: K and V, or hidden states (default)")
    add("--cpu-blocks", type=number(1 << 24), metavar="N", help="KV blocks, or as many tokens, in host memory")
    add("--storage", metavar="URL", help="with --keep kv: pages too, in file:DIR, redis://HOST:PORT/N or another")
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
        load_part = partial(load, ranks)
        return cli.main(__doc__, "09_tensor_parallel", add_arguments, make, partial(demo, ranks), load=load_part)
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
