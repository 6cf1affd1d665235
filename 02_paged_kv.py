"""Chapter 02: blocks, sharing, and many requests at once.

The problem. Chapter 01 gives a request one contiguous piece of memory, as long as the request may become, and
answers one request at a time. Most of that memory is never written, two requests with the same beginning hold
it twice, and a processor that reads all weights for one token could serve sixteen tokens with the same read.

The mechanism. Device memory is cut into blocks of 16 tokens. A request holds a block table, a list of block
numbers, and takes the next block when the last one is full:

    token at position p -> slot table[p // 16] * 16 + p % 16       table [12, 5, 3]: token 20 is in slot 84

A full block is known by its prefix: its own tokens and all that come before them. A request whose tokens
begin with the same prefixes points at the blocks that hold them. When no table holds a full block any more,
it stays cached until the pool needs it. In every step one forward pass serves all running requests: one token
for each that decodes, and portions of prefill for the rest of the budget.

The later chapters are this engine with something in the place of `NoLowerTier`: what lies behind the device.

Sources: PagedAttention (Kwon et al., SOSP '23, section 4); Orca (Yu et al., OSDI '22, section 3) for batching
by the step; Sarathi-Serve (Agrawal et al., OSDI '24, section 4) for prefill under a token budget.

    python 02_paged_kv.py --demo
    python 02_paged_kv.py --prompt "What is prefill?" --explain
    python 02_paged_kv.py                                  # the server, on http://127.0.0.1:5000
"""

import functools
import heapq
import importlib
import itertools
import math
import random
import shell.cli as cli
import sys
import time
from itertools import takewhile

import torch

from common.llama import attention, causal_mask, upload
from common.prefixes import BlockKey, BlockKeys
from common.requests import Interrupted, Request, RequestQueue
from common.sampling import likeliest, sample
from common.timeline import Clock
from shell import charts, lesson
from shell.frontend import Frontend

baseline = importlib.import_module("01_baseline")
# Longer contexts (bytes of a layer's K and V) get their own attention call; padding others to them costs more
PAD_LIMIT = {"cpu": 1 << 20, "cuda": 1 << 24}

# 1. Blocks -------------------------------------------------------------------------------------

class BlockPool:
    """Which block holds what. A block is known by its number; `memory`, if set, has the contents.

        free --allocate--> referenced --release--> cached if it was registered, else free
                           referenced <---share--- cached
        free <-----------------------------evict-- cached

    Referenced by block tables, and by whatever still copies from or to it. Cached blocks are evicted in the
    order in which their prefixes were used."""

    def __init__(self, blocks: int, block_size: int, memory: torch.Tensor | None = None):
        self.size, self.block_size, self.memory = blocks, block_size, memory
        self.block_bytes = 0 if memory is None else memory.nbytes // max(1, blocks)
        self.references = [0] * blocks
        self.free = bytearray(b"\1" * blocks)  # 1: free. As bytes, so that a run is found fast
        self.cached: dict[int, None] = {}
        self.eviction_heap: list[tuple[int, int]] = []  # a heap of (use, block), checked when popped
        self.key_of: list[BlockKey | None] = [None] * blocks
        self.block_of: dict[BlockKey, int] = {}
        self.on_evict = lambda lost: None  # called with a list of (block, prefix), about to be lost
        self.search_start = 0  # where the search for a run begins
        self.evictions = 0

    @property
    def available(self) -> int:
        """Free and cached blocks."""
        return self.free.count(1) + len(self.cached)

    def num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def slot(self, table: list[int], position: int) -> int:
        """Where the token at `position` is in memory, counted in tokens."""
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def slots(self, table: torch.Tensor) -> torch.Tensor:
        """The same for all tokens of a block table, or of several: [..., blocks] -> [..., tokens]."""
        offsets = torch.arange(self.block_size, device=table.device)
        return (table[..., None] * self.block_size + offsets).flatten(-2)

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Reference `count` blocks, which must be `available`; evict the least recently used for it. Adjacent
        ones are read and copied in one piece: look behind `after`, or for a run that may grow to `room`."""
        self.make_room(count)
        blocks = self.find_free(count, after, max(count, room))
        for block in blocks:
            self.free[block], self.references[block] = 0, 1
        return blocks

    def make_room(self, count: int, own=(), used: int = 0) -> int:
        """Evict the least recently used blocks until `count` are free; stop at the first in `own` (a chain
        never evicts its own end), or that was used later than `used` -> how many of `count` are free."""
        victims, shortfall = {}, count - self.free.count(1)
        while len(victims) < shortfall and self.eviction_heap:
            use, block = heapq.heappop(self.eviction_heap)
            if block not in self.cached or block in victims:
                continue
            block_key = self.key_of[block]
            if block_key.used > use:  # later than it was queued
                self.queue_eviction(block)
            elif block_key in own or use > used > 0:
                self.queue_eviction(block)
                break
            else:
                victims[block] = None
        self.evict(list(victims))
        return min(count, self.free.count(1))

    def queue_eviction(self, block: int):
        """Queue a cached block for eviction, by the last use of its prefix."""
        heapq.heappush(self.eviction_heap, (self.key_of[block].used, block))
        if len(self.eviction_heap) > 4 * self.size:  # most entries are duplicates
            self.eviction_heap = sorted((self.key_of[cached].used, cached) for cached in self.cached)

    def find_free(self, count: int, after: int | None, room: int) -> list[int]:
        """`count` free blocks, in one run if there is one: after `after`, or where the run has `room`."""
        if after is not None and self.free.startswith(b"\1" * count, after + 1):
            return list(range(after + 1, after + 1 + count))
        for length, start in (room, self.search_start), (room, 0), (count, 0):
            if (at := self.free.find(b"\1" * length, start)) >= 0:
                self.search_start = at + length  # what is left of the run is for this one to grow
                return list(range(at, at + count))
        return [block for block, free in enumerate(self.free) if free][:count]

    def share(self, blocks: list[int]):
        """Add a reference to each."""
        for block in blocks:
            self.cached.pop(block, None)
            self.references[block] += 1

    def release(self, blocks: list[int]):
        """Take a reference from each."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                if self.key_of[block] is None:
                    self.free[block] = 1
                else:
                    self.cached[block] = None
                    self.queue_eviction(block)

    def register(self, block: int, block_key: BlockKey):
        """`block` holds `block_key` from now on, unless another block does already."""
        if self.block_of.setdefault(block_key, block) == block:
            self.key_of[block] = block_key

    def find(self, chain: list[BlockKey]) -> list[int]:
        """The blocks that hold the beginning of `chain`, up to the first gap."""
        return [self.block_of[block_key] for block_key in takewhile(self.block_of.__contains__, chain)]

    def evict(self, blocks: list[int]):
        """Make cached blocks free."""
        lost = [(block, self.key_of[block]) for block in blocks]
        for block, block_key in lost:
            del self.cached[block], self.block_of[block_key]
            self.key_of[block] = None
        self.evictions += len(lost)
        self.on_evict(lost)
        for block in blocks:
            self.free[block] = 1


# 2. Batches ------------------------------------------------------------------------------------

class Batch:
    """One step's tokens, flat: where their K and V are written, and what each may read. Contexts of requests
    that compute one token are gathered in one padded read; long ones and portions of prefill are read alone,
    in place where blocks are adjacent. Slots that were not written are never read: 0 times NaN is NaN."""

    def __init__(self, pool: BlockPool, work: list[tuple[Request, int]]):
        """`work`: requests, and how many of their next tokens to compute."""
        self.pool, device = pool, pool.memory.device
        self.work = sorted(work, key=lambda item: (item[1] > 1, item[0].next))  # first those of one token
        most = PAD_LIMIT[device.type] * len(pool.memory) * pool.block_size // pool.block_bytes  # tokens
        short = sum(count == 1 and request.next < most for request, count in self.work)
        num_padded = short if short > 1 else 0  # requests whose contexts are read together
        tokens, positions, slots, last = [], [], [], []
        for request, count in self.work:
            own = range(request.next, request.next + count)
            tokens += request.tokens[own.start : own.stop]
            positions += own
            slots += [pool.slot(request.table, position) for position in own]
            if count == request.pending:
                last.append(len(positions) - 1)
        tables = [request.table[: pool.num_blocks(request.next + count)] for request, count in self.work]
        longest = max(map(len, tables[:num_padded]), default=0)
        for table in tables[:num_padded]:
            table += table[:1] * (longest - len(table))
        lists = [tokens, positions, slots, last, *tables]  # in one upload: on a GPU each costs the host 10 us
        flat = list(itertools.chain.from_iterable(lists))
        numbers = upload(flat, device).split_with_sizes([*map(len, lists)])
        self.tokens, self.positions, self.slots, self.last_rows = numbers[:4]  # [T], and [R] to draw from
        self.reads = self.plan_reads(num_padded, tables, numbers[4:])

    def plan_reads(self, num_padded: int, tables: list[list[int]], uploaded: tuple[torch.Tensor, ...]):
        """-> (rows, slots, mask) of each read: one for the first `num_padded` requests, one for each other.
        `tables`: of each request, on the host and on the device. Slots are a slice if blocks are adjacent."""
        pool, row, reads = self.pool, num_padded, []
        if num_padded:
            reads.append((slice(0, row), *self.read_padded(torch.stack(uploaded[:row]))))
        for (request, count), table, there in list(zip(self.work, tables, uploaded))[num_padded:]:
            first, end = table[0] * pool.block_size, request.next + count
            adjacent = table == list(range(table[0], table[0] + len(table)))
            slots = slice(first, first + end) if adjacent else pool.slots(there)[:end]  # else [S]
            mask = causal_mask(count, end, there.device, pool.memory.dtype)  # [T, S]
            reads.append((slice(row, row + count), slots, mask))
            row += count
        return reads

    def read_padded(self, tables: torch.Tensor):
        """Block tables [B, blocks] of requests that compute a token each -> slots [B, S] and mask
        [B, 1, 1, S]. Padding points at a written slot: a masked NaN would still poison the sum."""
        slots = self.pool.slots(tables)[:, : self.work[len(tables) - 1][0].next + 1]  # [B, S]
        is_future = torch.arange(slots.shape[1], device=slots.device) > self.positions[: len(tables), None]
        mask = torch.zeros_like(is_future, dtype=self.pool.memory.dtype).masked_fill_(is_future, -math.inf)
        return slots.where(mask == 0, slots[:, :1]), mask[:, None, None]

    def attend(self, layer: int):
        """-> attend(q, k, v) of one layer: write K and V to their slots, and read what each row may see."""
        keys, values = self.pool.memory[layer].flatten(1, 2)  # [slots, KVH, hd] each

        def attend(q, k, v):
            keys.index_copy_(0, self.slots, k)
            values.index_copy_(0, self.slots, v)
            outs = []
            for rows, slots, mask in self.reads:
                outs.append(attention(q[rows], read(keys, slots), read(values, slots), mask))
            return outs[0] if len(outs) == 1 else torch.cat(outs)  # [T, H, hd]

        return attend


def read(side, slots):
    """K or V [slots, KVH, hd] in some slots -> [S, KVH, hd], or [B, S, KVH, hd]."""
    if isinstance(slots, slice):
        return side[slots]
    return side.index_select(0, slots.flatten()).unflatten(0, slots.shape)


# 3. The forward pass ---------------------------------------------------------------------------

class Runner:
    """Runs the forward pass, and owns the memory that it reads and writes: the blocks of all layers."""

    def __init__(self, model, blocks: int, block_size: int = 16):
        config = model.config
        heads = config.num_key_value_heads, config.head_dim
        shape = config.num_hidden_layers, 2, blocks, block_size, *heads  # [L, 2, blocks, block_size, KVH, hd]
        memory = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.model, self.pool = model, BlockPool(blocks, block_size, memory)
        self.pieces = model.pieces  # on a GPU a layer in one launch (shell/pieces.py)

    @torch.inference_mode()
    def forward(self, work: list[tuple[Request, int]], before_layer):
        """Compute the next `count` tokens of each request in `work` -> the batch, and logits [R, V], a row
        per request of `batch.work` whose last pending token is in this step."""
        batch = Batch(self.pool, work)
        hidden = self.compute(batch, len(self.model.layers), before_layer)
        return batch, self.model.logits(hidden[batch.last_rows])  # [R, V]

    def compute(self, batch: Batch, depth: int, before_layer=lambda *_: None) -> torch.Tensor:
        """Take the batch's tokens through the first `depth` layers -> [T, D], until the next pass."""
        hidden, rotation = self.model.embed(batch.tokens), self.model.rotary(batch.positions)
        layers = self.pieces.layers(len(hidden)) if self.pieces else self.model.layers
        for index, layer in zip(range(depth), layers):
            before_layer(index, hidden, batch)
            hidden = layer(hidden, rotation, batch.attend(index))  # [T, D]
        return hidden


# 4. What lies behind the device ----------------------------------------------------------------

class NoLowerTier:
    """What lies behind the device: here, nothing. Chapter 03 puts a Restorer in its place. The engine calls
    these verbs in the order of a step."""

    busy = False  # whether anything is on its way, though no request waits for it

    def attach(self, engine): ...  # begin, and measure; add to the engine's fields and pools
    def submitted(self, request): ...  # it stands in line, maybe again: bring nearer what it needs
    def poll(self): ...  # a step begins: release what is over
    def waits(self, request): ...  # -> whether it stays in line: what it lacks is on its way nearer
    def start_restoration(self, request): ...  # it has got blocks: begin to bring back what they lack
    def resume_restorations(self, running): return running  # go on with that -> those to compute in this step
    def before_layer(self, index, hidden, batch): ...  # in the pass: wait for what it reads; see its input
    def after_pass(self, batch, began, ended): return ()  # keep what it has computed -> when it waited
    def finished(self, request): ...  # it is over, cancelled or preempted: forget it
    def close(self): ...


# 5. The engine ---------------------------------------------------------------------------------

class Engine(RequestQueue):
    """Answers many requests at once."""

    def __init__(self, runner, lower_tier=None, token_budget=512, max_running=64):
        """`lower_tier`: what lies behind the device, with the verbs of `NoLowerTier`."""
        self.runner, self.lower_tier = runner, lower_tier or NoLowerTier()
        self.model, self.pool = runner.model, runner.pool
        super().__init__(capacity=self.pool.size * self.pool.block_size)
        self.token_budget, self.max_running = token_budget, max_running
        self.clock = Clock(self.model.device)
        self.block_keys = BlockKeys(f"{self.model.digest.hex()} {self.model.dtype} kv", self.pool.block_size)
        self.filling: dict[BlockKey, Request] = {}  # contents that a running request is about to have
        self.work: list[tuple[Request, int]] = []  # of the step under way: requests, and how many tokens
        salt = (lambda v: isinstance(v, str) and len(v) <= 256), "a string of at most 256 characters"
        self.fields, self.pools = {"cache_salt": salt}, {"device": self.pool}
        self.lower_tier.attach(self)

    def step(self):
        """One step for all requests: poll, admit, restore, schedule, compute, save."""
        if not self.busy:
            if self.runner.pieces:
                self.runner.pieces.idle(lambda: self.arrivals)
            self.wake.wait()  # until a request comes
            self.wake.clear()
        self.take_arrivals()
        self.lower_tier.poll()
        before = len(self.running)
        for request in list(self.waiting):
            with self.contain(request):
                if not self.admit(request):
                    break
        for request in self.running[before:]:
            with self.contain(request):
                self.lower_tier.start_restoration(request)
        self.work = self.schedule(self.lower_tier.resume_restorations(self.running))
        if self.work:
            self.compute()
        elif self.busy:
            self.sleep()

    @property
    def busy(self) -> bool:
        return super().busy or self.lower_tier.busy

    def enqueue(self, request: Request):
        self.block_keys.use(self.extend(request))
        super().enqueue(request)
        self.lower_tier.submitted(request)

    # Admitting

    def admit(self, request: Request) -> bool:
        """Give the request blocks for all of its tokens, those that hold its prefix and empty ones, and let
        it run; or let it wait -> whether those behind it in line may be admitted."""
        if len(self.running) == self.max_running:
            return False
        # 1. What does the device hold, and what is another request about to have?
        pool, chain = self.pool, request.chain
        cacheable = chain[: request.history // pool.block_size]
        hits = pool.find(cacheable)
        missing = cacheable[len(hits) :]
        soon = len(list(takewhile(self.filling.__contains__, missing)))
        if soon and 2 * soon >= len(missing):  # to share only a template's first block is no reason to wait
            return True

        # 2. Is there room? Each running request may need one more block
        empty = pool.num_blocks(len(request.tokens)) - len(hits)
        unreferenced = sum(pool.references[block] == 0 for block in hits)
        if empty + len(self.running) > pool.available - unreferenced:
            return False

        # 3. Is what it lacks on its way nearer? (`start_restoration` decides whether to load it)
        request.computed = len(hits) * pool.block_size
        if self.lower_tier.waits(request):
            return True

        # 4. Let it run
        self.block_keys.use(chain)
        pool.share(hits)
        room = pool.num_blocks(request.prompt_tokens + request.max_tokens) - len(hits)
        blocks = pool.allocate(empty, hits[-1] if hits else None, room)
        request.table, request.registered = hits + blocks, len(hits)
        if not request.readmitted:  # which would count its own work as a hit
            request.found = {"gpu": request.computed} if hits else {}
        for block_key in chain[len(hits) :]:
            self.filling.setdefault(block_key, request)
        self.waiting.remove(request)
        self.running.append(request)
        words = f"{len(hits)} blocks found"
        self.log_event("admit", [request], len(request.tokens), len(request.table), words)
        return True

    def extend(self, request: Request) -> list[BlockKey]:
        return self.block_keys.extend(request.chain, request.tokens, request.options.get("cache_salt", ""))

    # Scheduling

    def schedule(self, ready: list[Request]) -> list[tuple[Request, int]]:
        """Pick tokens: one for each request that decodes, then prefill, oldest first, within the budget."""
        work, budget, short = [], self.token_budget, False  # short: no block could be had in this step
        for request in sorted(ready, key=lambda request: request.pending > 1):
            if request not in self.running:  # preempted in this loop
                continue
            if not budget:
                break
            full = request.next == len(request.table) * self.pool.block_size
            if full and (short or not self.append_block(request)):
                short = True
                continue
            if count := min(request.compute_end - request.next, budget):
                work.append((request, count))
                budget -= count
        return work

    def append_block(self, request: Request) -> bool:
        """Add a block for the next token; where none is left, preempt the newest request. (Copies may still
        hold the blocks of that one: then `request` waits.)"""
        if not self.pool.available:
            newest = self.running[-1]
            self.counts["preemptions"] += 1
            self.requeue(newest)
            if newest is request or not self.pool.available:
                return False
        request.table += self.pool.allocate(1, request.table[-1])
        return True

    def requeue(self, request: Request):
        """Back to the head of the line, without blocks; those that it has registered are found again."""
        self.log_event("requeue", [request], 0, len(request.table))
        self.release(request)
        request.readmitted = True
        self.waiting.appendleft(request)
        self.wake.set()  # if nobody can compute, this one is admitted at once
        self.lower_tier.submitted(request)

    # Computing

    def compute(self):
        """Run the forward pass of a step. If it raises, no request has moved on: it is run again."""
        began = self.clock.mark()
        try:
            batch, logits = self.runner.forward(self.work, self.lower_tier.before_layer)
            requests = [request for request, count in batch.work if count == request.pending]  # a row each
            tokens = likeliest(logits)  # [R]
        except Interrupted:
            return
        except Exception as error:
            return self.step_failed(self.work, error)
        finally:
            self.work = []
        self.failures = 0
        if -1 in tokens:  # end these; nothing of this step is registered, the others compute it again
            ended = [request for request, token in zip(requests, tokens) if token == -1]
            return self.answer(ended, [-1] * len(ended))
        self.counts["steps"] += 1
        self.record_step(batch, self.clock.seconds(began), self.clock.seconds(self.clock.mark()))
        self.answer(requests, sample(requests, logits, tokens))

    def record_step(self, batch: Batch, began: float, ended: float):
        """Note what a step has computed: in the index of prefixes, behind the device, in the timelines."""
        self.log_event("compute", [one for one, _ in batch.work], sum(count for _, count in batch.work))
        for request, count in batch.work:
            request.computed = request.next + count
            self.register(request)
        waits = self.lower_tier.after_pass(batch, began, ended)
        for request, count in batch.work:
            decoded = request.new and count == 1 and request.computed == len(request.tokens)
            request.timeline.add("compute", "decode" if decoded else f"prefill {count}", began, ended, waits)

    def register(self, request: Request):
        """Let others find the blocks that the request has filled."""
        full = request.computed // self.pool.block_size
        chain = self.extend(request)
        if full > request.registered:
            self.block_keys.use(chain)
        for index in range(request.registered, full):
            self.pool.register(request.table[index], chain[index])
            if self.filling.get(chain[index]) is request:
                del self.filling[chain[index]]
        request.registered = max(full, request.registered)

    # Ending

    def finish(self, request: Request, error: Exception | None = None):
        if request in self.waiting:
            self.lower_tier.finished(request)
        super().finish(request, error)

    def release(self, request: Request):
        """Take its blocks back. Registered ones stay cached; copies under way keep their own references."""
        self.running.remove(request)
        try:
            self.lower_tier.finished(request)
        finally:  # even if that raises
            for block_key in request.chain[request.registered :]:
                if self.filling.get(block_key) is request:
                    del self.filling[block_key]
            self.pool.release(request.table)
            request.table, request.computed = [], 0

    def close(self):
        self.lower_tier.close()


# 6. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Conversations behind one system prompt, in blocks, and how fast many requests are answered at once."""
    # 1. Ask: the first computes the system prompt, the others find it
    rng, many, context = random.Random(0), 16, lesson.context(model, frontend)  # conversations; tokens
    new = max(4, min(arguments.max_tokens, 12) * context // frontend.context)
    engine, size = make_engine(model, arguments), arguments.block_size
    context = min(context, engine.capacity)
    system = dict(role="system", content=lesson.document(frontend, rng, context // 4))
    talks = [lesson.conversation(frontend, rng, context // (4 + n)) for n in range(many)]
    asked = [frontend.request(messages=[system, *messages], max_tokens=new) for messages in talks]
    engine.generate(asked[:1])
    engine.generate(asked[1:])
    verified = lesson.verify(baseline.Engine(model), asked)

    # 2. Memory: a block is held once, however many tables it is in
    tokens = sum(request.history for request in asked)
    own = sum(engine.pool.num_blocks(request.history) for request in asked)
    found = sum(request.cached_tokens for request in asked) // size
    slots = {
        f"{context} tokens reserved for each": many * context,
        f"blocks of {size}, each its own": own * size,
        f"blocks of {size}, shared": (own - found) * size,
    }
    print(f"Memory of {many} conversations, {tokens} tokens:")
    megabytes, rows = model.config.kv_numbers_per_token * model.dtype.itemsize / 1e6, []  # of one token
    for way, count in slots.items():
        rows.append(dict(memory=way, mb=count * megabytes, tokens_per_slot=tokens / count))
        print(f"  {way:32}{count * megabytes:8.1f} MB, {tokens / count:5.2f} tokens a slot")

    # 3. Time: a prefix that is found is not computed, and the weights are read once for all that decode
    prompt = asked[0].tokens[: asked[0].prompt_tokens]
    ways = {
        "miss (other salt)": lambda: lesson.ask(engine, prompt, cache_salt=str(rng.random())).outcome.ttft_ms,
        "gpu_hit": lambda: lesson.ask(engine, prompt).outcome.ttft_ms,
    }
    rows += lesson.table(f"\nTTFT behind {len(prompt)} tokens", lesson.in_turn(ways), "ttft_ms", "ms")
    questions = [frontend.encode(None, messages[-1:]) for messages in talks]

    def rate(engine, concurrent: int) -> float:
        began, salt = time.perf_counter(), dict(cache_salt=str(rng.random()))
        asked = questions[: 4 * concurrent]
        for at in range(0, len(asked), concurrent):
            some = asked[at : at + concurrent]
            engine.generate([Request(question, new, options=salt) for question in some])
        return len(asked) * new / (time.perf_counter() - began)

    ways = {"chapter 01, one by one": lambda: rate(baseline.Engine(model), 1)}
    ways.update({f"{number} at once": functools.partial(rate, engine, number) for number in (1, 4, 16)})
    title = f"\n4 to {many} questions, {new} tokens an answer"
    rows += lesson.table(title, lesson.in_turn(ways), "tokens_per_second", "tokens/s")
    print(
        f"\nOne of the {many} (p: prefill, d: decode)\n{charts.chart(asked[-1].timeline)}\n\n"
        "One at a time, blocks save memory and not time. And a prefix that the pool has dropped is computed\n"
        "again. Where else could it have been kept? Chapter 03."
    )
    return dict(link=None, verified=verified, rows=rows, counters=engine.counters()), [asked[-1].timeline]


# 7. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    number, add = functools.partial(cli.bounded, int, 1), parser.add_argument
    add("--gpu-blocks", type=number(1 << 24), metavar="N", help="KV blocks in device memory (as useful)")
    add("--block-size", type=number(1 << 16), metavar="N", default=16, help="tokens per block (16)")
    add("--token-budget", type=number(1 << 20), metavar="N", default=512, help="tokens per step (512)")
    add("--max-running", type=number(1 << 12), metavar="N", default=64, help="requests that run at once (64)")


def make_engine(model, arguments, lower_tier=None) -> Engine:
    """The engine that the options ask for, with a later chapter's Restorer as `lower_tier`."""
    config, size = model.config, arguments.block_size
    useful = arguments.max_running * -(-config.max_position_embeddings // size)
    block_bytes = size * config.kv_numbers_per_token * model.dtype.itemsize
    blocks = cli.blocks_that_fit(arguments.gpu_blocks, useful, block_bytes, model.device, "--gpu-blocks")
    print(f"Device: {blocks} blocks of {size} tokens, {block_bytes * blocks / 1e6:.1f} MB", file=sys.stderr)
    engine = Engine(Runner(model, blocks, size), lower_tier, arguments.token_budget, arguments.max_running)
    engine.explain = arguments.explain
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "02_paged_kv", add_arguments, make_engine, demo)
