"""Chapter 02: paged memory, prefix sharing, and continuous batching.

The problem. Chapter 01 reserves one contiguous piece of memory per request, large enough for the longest
answer, and answers one request at a time. Most of that memory is never written. If two requests have the same
prefix, its K and V are stored twice. And a decode step reads all weights to compute one token, although the
same read could serve sixteen requests.

The mechanism. Device memory is cut into blocks of 16 tokens. A request has a block table: a list of block
numbers. It gets another block when its last one is full:

    token at position p -> slot table[p // 16] * 16 + p % 16       table [12, 5, 3]: token 20 is in slot 84

A full block is identified by its tokens and by all tokens that come before them. If a new request begins with
the same tokens, its block table points at the existing blocks. When no block table refers to a full block any
more, the block stays cached until the pool needs it. Each step runs one forward pass for all running
requests: one token for each request that decodes, and portions of prefill for the rest of the token budget.

The later chapters use this engine and replace `NoLowerTier`, the tier below device memory.

Sources: PagedAttention (Kwon et al., SOSP '23, section 4); Orca (Yu et al., OSDI '22, section 3) for batching
by the step; Sarathi-Serve (Agrawal et al., OSDI '24, section 4) for prefill under a token budget.

    python 02_paged_kv.py --demo
    python 02_paged_kv.py --prompt "What is prefill?" --explain
    python 02_paged_kv.py                                  # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (sets environment variables and signal handlers before PyTorch starts)

import functools
import importlib
import logging
import math
import random
import sys
import time
from collections import OrderedDict
from itertools import chain, takewhile

import torch

from common.llama import ROWS, attention, causal_mask, upload, whole_blocks
from common.prefixes import BlockKey, BlockKeys
from common.requests import Interrupted, Request, RequestQueue, Unavailable, in_words
from common.sampling import likeliest
from common.timeline import Clock
from shell import charts, cli, lesson, limits
from shell.frontend import Frontend

baseline = importlib.import_module("01_baseline")

# 1. Blocks -------------------------------------------------------------------------------------

class BlockPool:
    """The blocks of one memory, and the state of each: free, referenced or cached.

        free --allocate--> referenced --release--> cached if it was registered, else free
                           referenced <---share--- cached
        free <-----------------------------evict-- cached

    A block is an int; `memory`, if any, has its contents. Block tables reference blocks, and so does a
    copy to or from another memory until it is complete. Cached blocks are evicted in the order in which their
    keys were last used. `block_of` has this order: the least recently used key comes first."""

    def __init__(self, blocks: int, block_size: int, memory: torch.Tensor | None = None):
        """`blocks`: number of blocks, of `block_size` tokens each. `memory`: their contents, or None."""
        self.size, self.block_size, self.memory = blocks, block_size, memory
        self.block_bytes = 0 if memory is None else memory.nbytes // max(1, blocks)
        self.references = [0] * blocks
        self.free = bytearray(b"\1" * blocks)  # 1: free. bytearray.find finds runs fast
        self.key_of: list[BlockKey | None] = [None] * blocks
        self.block_of: OrderedDict[BlockKey, int] = OrderedDict()
        self.on_evict = lambda lost: None  # `evict` calls it with a list of (block, block key)
        self.search_start = 0  # block from which to search for a run of free blocks
        self.evictions = 0

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached ones."""
        return self.references.count(0)

    @property
    def cached(self) -> list[int]:
        """The cached blocks, the least recently used first."""
        return [block for block in self.block_of.values() if not self.references[block]]

    def num_blocks(self, tokens: int) -> int:
        """-> how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def slots(self, table: torch.Tensor) -> torch.Tensor:
        """Return the slots of all tokens of one or several block tables.

        `table` [..., blocks]. Returns: [..., blocks * block_size]."""
        offsets = torch.arange(self.block_size, device=table.device)
        return (table[..., None] * self.block_size + offsets).flatten(-2)

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Reference `count` free blocks. Evict the least recently used cached blocks if too few are free.

        The caller must check that `count` blocks are `available`. `after`: the block that precedes the new
        ones in the block table. `room`: blocks that the request may still need, including these.

        Adjacent blocks are read and copied in one piece. Therefore, first try the blocks that follow `after`
        in memory. Then try a free run of `room` blocks, so that the request's later blocks can be adjacent;
        then a free run of `count` blocks; then any free blocks. Returns: the blocks' numbers."""
        self.make_room(count)
        blocks = self.find_free(count, after, max(count, room))
        for block in blocks:
            self.free[block], self.references[block] = 0, 1
        return blocks

    def make_room(self, count: int, keep=()) -> int:
        """Evict the least recently used cached blocks until `count` blocks are free. Stop at the first cached
        block whose key is in `keep`. Returns: how many blocks are free now, at most `count`."""
        victims, shortfall = [], count - self.free.count(1)
        if shortfall > 0:
            for block_key, block in self.block_of.items():
                if len(victims) == shortfall or block_key in keep and not self.references[block]:
                    break
                if not self.references[block]:
                    victims.append(block)
            self.evict(victims)
        return min(count, self.free.count(1))

    def find_free(self, count: int, after: int | None, room: int) -> list[int]:
        """Find `count` free blocks: right after block `after`, else in a run of `room` blocks, else in a run
        of `count`, else anywhere. Returns: the blocks' numbers."""
        if after is not None and self.free.startswith(b"\1" * count, after + 1):
            return list(range(after + 1, after + 1 + count))
        for length, start in (room, self.search_start), (room, 0), (count, 0):
            if (at := self.free.find(b"\1" * length, start)) >= 0:
                self.search_start = at + length  # keep the rest of the run for this request to grow
                return list(range(at, at + count))
        return [block for block, free in enumerate(self.free) if free][:count]

    def share(self, blocks: list[int]):
        """Add a reference to each block."""
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: list[int]):
        """Remove a reference from each block. A block without references becomes cached if it is registered,
        else free."""
        for block in blocks:
            self.references[block] -= 1
            self.free[block] = self.references[block] == 0 and self.key_of[block] is None

    def register(self, block: int, block_key: BlockKey):
        """Record that `block` holds the tokens of `block_key`, unless another block already does."""
        if self.block_of.setdefault(block_key, block) == block:
            self.key_of[block] = block_key

    def find(self, chain: list[BlockKey]) -> list[int]:
        """-> the blocks that hold the beginning of `chain`, up to the first key that no block holds."""
        return [self.block_of[block_key] for block_key in takewhile(self.block_of.__contains__, chain)]

    def use(self, chain: list[BlockKey]):
        """Mark the blocks of a chain as used now, from its end to its start: the end is evicted first."""
        for block_key in filter(self.block_of.__contains__, reversed(chain)):
            self.block_of.move_to_end(block_key)

    def evict(self, blocks: list[int]):
        """Make cached blocks free: remove them from the index, call `on_evict`, and then mark them as free.

        When `on_evict` is called, the blocks still have their contents."""
        lost = [(block, self.key_of[block]) for block in blocks]
        for block, block_key in lost:
            del self.block_of[block_key]
            self.key_of[block] = None
        self.evictions += len(lost)
        self.on_evict(lost)
        for block in blocks:
            self.free[block] = 1


# 2. Batches ------------------------------------------------------------------------------------

class Batch:
    """The tokens of one step as a flat batch, the slots to write their K and V to, and the slots to read.

    The contexts of requests that compute one token each are read in groups: those of a group are gathered,
    and padded to the same length. Long contexts, and those of prefill portions, are read one by one. If the
    blocks of a context that is read alone are adjacent, it is read in place, without a copy. Slots that were
    never written must not be read: they may hold NaN, and 0 * NaN is NaN."""

    def __init__(self, pool: BlockPool, work: list[tuple[Request, int]], same_bits: bool = False):
        """`work`: (request, count) pairs: each request computes its next `count` tokens. `same_bits`: a
        token's numbers must have the same bits, whether it is computed alone or in a batch."""
        self.pool, self.same_bits, device = pool, same_bits, pool.memory.device
        self.work = sorted(work, key=lambda item: (item[1] > 1, item[0].next))  # requests of one token first
        scale = len(pool.memory) * pool.block_size / pool.block_bytes  # tokens per byte of a layer
        long, most = (limit * scale for limit in limits.pad_limits(device))  # tokens
        size, tokens, positions, slots, last, groups = pool.block_size, [], [], [], [], []
        for number, (request, count) in enumerate(self.work):
            own = range(request.next, request.next + count)
            tokens += request.tokens[own.start : own.stop]
            positions += own
            slots += [request.table[at // size] * size + at % size for at in own]
            if count == request.pending:
                last.append(len(positions) - 1)
            keys = whole_blocks(own.stop) if same_bits else own.stop  # of the group, if it joins one
            joins = groups and count == 1 and keys < long and (number + 1 - groups[-1][0]) * keys <= most
            first = groups.pop()[0] if joins else number
            groups.append((first, number + 1, keys if joins else own.stop))
        tables = [request.table[: pool.num_blocks(request.next + count)] for request, count in self.work]
        for first, end, keys in groups:
            for table in tables[first:end]:
                table += table[:1] * (pool.num_blocks(keys) - len(table))
        # On a CPU, pad the rows here, or each product pads them (shell/linear.py). Padding has no slots
        pads = device.type == "cpu" and (same_bits or len(slots) > 1)
        tokens, positions = (each + each[:1] * (-len(slots) % ROWS * pads) for each in (tokens, positions))
        lists = [tokens, positions, slots, last, *tables]  # upload once: each upload to a GPU takes 10 us
        numbers = upload([*chain(*lists)], device).split_with_sizes([*map(len, lists)])
        # [T] each, but `slots` lacks padding; `last_rows` [R]: the rows to sample from
        self.tokens, self.positions, self.slots, self.last_rows = numbers[:4]
        self.reads = self.plan_reads(groups, tables, numbers[4:])

    def plan_reads(self, groups: list[tuple[int, int, int]], tables: list[list[int]], uploaded: tuple):
        """Plan which slots each row reads. `groups`: (first, end, keys): requests [first, end) share one
        read, padded to `keys` tokens. A group of one request is read alone.

        `tables` and `uploaded`: the block tables on the host and on the device. Padding reads the request's
        first slot again, which was written. Returns: a list of (rows, slots, mask). Of one request, `slots`
        is a slice if its blocks are adjacent, else [S], as wide as the mask if it has one. Of several they
        are [B, S], and their mask is [B, 1, 1, S]."""
        pool, memory, row, reads = self.pool, self.pool.memory, 0, []
        for first, end, keys in groups:
            # A row for each request, or for each token of a single one
            table, rows = tables[first], slice(row, row + self.work[first][1] + end - first - 1)
            if end - first > 1:
                slots = pool.slots(torch.stack(uploaded[first:end]))[:, :keys]  # [B, S]
                is_future = torch.arange(keys, device=slots.device) > self.positions[rows, None]
                mask = torch.zeros_like(is_future, dtype=memory.dtype).masked_fill_(is_future, -math.inf)
                slots, mask = slots.where(mask == 0, slots[:, :1]), mask[:, None, None]
            else:
                start, run = table[0] * pool.block_size, [*range(table[0], table[0] + len(table))]
                mask = causal_mask(rows.stop - row, keys, memory.device, memory.dtype, self.same_bits)
                slots = slice(start, start + keys) if table == run else pool.slots(uploaded[first])[:keys]
                if table != run and mask is not None:  # else `attention` would copy K and V again
                    slots = torch.nn.functional.pad(slots, (0, mask.shape[-1] - keys), value=start)
            reads.append((rows, slots, mask))
            row = rows.stop
        return reads

    def attend(self, layer: int):
        """Return the function attend(q, k, v) of one layer.

        It writes k, v [T, KVH, hd] to their slots, and returns attention [T, H, hd]. Nothing reads the
        output of padding."""
        keys, values = self.pool.memory[layer].flatten(1, 2)  # [slots, KVH, hd] each

        def attend(q, k, v):
            count = len(self.slots)
            keys.index_copy_(0, self.slots, k[:count])
            values.index_copy_(0, self.slots, v[:count])
            outs = [attention(q[rows], read(keys, slots), read(values, slots), mask, self.same_bits)
                    for rows, slots, mask in self.reads]  # fmt: skip
            alone = len(outs) == 1 and len(q) == count
            return outs[0] if alone else torch.cat([*outs, q[count:]])  # [T, H, hd]

        return attend


def read(side, slots):
    """Read K or V of the given slots from `side` [slots, KVH, hd].

    Returns: [S, KVH, hd] for a slice or slots [S]; [B, S, KVH, hd] for slots [B, S]."""
    if isinstance(slots, slice):
        return side[slots]
    return side.index_select(0, slots.flatten()).unflatten(0, slots.shape)


# 3. The forward pass ---------------------------------------------------------------------------

class Runner:
    """The forward pass, and the block memory of all layers that it reads and writes."""

    def __init__(self, model, blocks: int, block_size: int = 16):
        config = model.config
        # [L, 2, blocks, block_size, KVH, hd]
        shape = config.num_hidden_layers, 2, blocks, block_size, config.num_key_value_heads, config.head_dim
        memory = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.model, self.pool = model, BlockPool(blocks, block_size, memory)
        self.pieces = model.pieces  # GPU only: CUDA graphs of the layers (shell/pieces.py)

    @torch.inference_mode()
    def forward(self, work: list[tuple[Request, int]], before_layer):
        """Compute the next tokens of each request in `work`, a list of (request, tokens) pairs.

        `before_layer(index, hidden, batch)` is called before each layer. Returns: the Batch, and logits
        [R, V]. A request has a row if this pass computes the last of its tokens."""
        batch = Batch(self.pool, work, self.model.same_bits)
        hidden = self.compute(batch, len(self.model.layers), before_layer)
        return batch, self.model.logits(hidden[batch.last_rows])  # [R, V]

    def compute(self, batch: Batch, depth: int, before_layer=lambda *_: None) -> torch.Tensor:
        """Pass the batch through the first `depth` layers.

        Returns: hidden states [T, D], which the next pass may overwrite."""
        hidden, rotation = self.model.embed(batch.tokens), self.model.rotary(batch.positions)
        layers = self.pieces.layers(len(hidden)) if self.pieces else self.model.layers
        for index, layer in zip(range(depth), layers):
            before_layer(index, hidden[: len(batch.slots)], batch)
            hidden = layer(hidden, rotation, batch.attend(index))  # [T, D], with padding
        return hidden[: len(batch.slots)]


# 4. The lower tier -----------------------------------------------------------------------------

class NoLowerTier:
    """An empty tier below device memory: this chapter has no lower tier. Chapter 03 uses a Restorer instead.
    The engine calls these methods in the order of a step."""

    busy = False  # whether transfers are in flight, even if no request waits for them

    # Called once by the engine's constructor: measure speeds, add to engine.fields and engine.pools
    def attach(self, engine): ...
    # A request is queued or re-queued: start a prefetch
    def submitted(self, request): ...
    # A step begins: release the blocks of completed transfers
    def poll(self): ...
    # Before admission. Return True to keep the request queued while its prefix is prefetched
    def waits(self, request): ...
    # After admission: start to restore the tokens that the device lacks
    def start_restoration(self, request): ...
    # Before the forward pass: resume all restorations, and return the requests that can compute
    def resume_restorations(self, running): return running
    # Before each layer: wait for the K and V that it will read. `hidden` [T, D] is the layer's input
    def before_layer(self, index, hidden, batch): ...
    # After the pass: save its K and V. Return (start, end) of each span in which the pass waited
    def after_pass(self, batch, began, ended): return ()
    # A request finished, failed, was cancelled or preempted: forget it
    def finished(self, request): ...
    # The engine closes
    def close(self): ...


# 5. The engine ---------------------------------------------------------------------------------

class Engine(RequestQueue):
    """An engine that answers many requests at once: continuous batching over one pool of blocks."""

    def __init__(self, runner, lower_tier=None, token_budget=512, max_running=64):
        """`lower_tier`: an object with the methods of `NoLowerTier`. `token_budget`: tokens per step.
        `max_running`: requests that run at the same time."""
        self.runner, self.lower_tier = runner, lower_tier or NoLowerTier()
        self.model, self.pool = runner.model, runner.pool
        super().__init__(capacity=self.pool.size * self.pool.block_size)
        self.token_budget, self.max_running = token_budget, max_running
        self.clock = Clock(self.model.device)
        self.block_keys = BlockKeys(f"{self.model.digest.hex()} {self.model.dtype} kv", self.pool.block_size)
        self.filling: dict[BlockKey, Request] = {}  # block key -> the running request that will fill it
        self.work: list[tuple[Request, int]] = []  # (request, tokens) of the current step
        salt = (lambda v: isinstance(v, str) and len(v) <= 256), "a string of at most 256 characters"
        self.fields, self.pools = {"cache_salt": salt}, {"device": self.pool}
        self.lower_tier.attach(self)

    def step(self):
        """Run one step for all requests: poll, admit, restore, schedule, compute, save."""
        if not self.busy:
            if self.runner.pieces:
                self.runner.pieces.idle(lambda: self.arrivals)
            self.wake.wait()  # until a request arrives
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
        """Whether there are requests, or transfers in flight."""
        return bool(self.arrivals or self.waiting or self.running or self.lower_tier.busy)

    def enqueue(self, request: Request):
        """Append a request to the queue, and mark the blocks of its prompt as used, in all tiers."""
        self.block_keys.extend(request.chain, request.tokens, request.salt)
        for pool in self.pools.values():
            pool.use(request.chain)
        self.waiting.append(request)
        self.lower_tier.submitted(request)

    # Admission

    def admit(self, request: Request) -> bool:
        """Admit a request: reuse the blocks of its cached prefix, allocate the rest, and move it to
        `running`. It stays queued if there is no room, if another request is computing its prefix, or if its
        prefix is being prefetched.

        Returns: whether the requests behind it in the queue may be admitted in this step."""
        if len(self.running) == self.max_running:
            return False
        # 1. Which blocks does the device hold, and which is another request about to fill?
        pool, chain = self.pool, request.chain
        cacheable = chain[: request.history // pool.block_size]
        hits = pool.find(cacheable)
        missing = cacheable[len(hits) :]
        soon = len(list(takewhile(self.filling.__contains__, missing)))
        if soon and 2 * soon >= len(missing):  # another request fills at least half of them: wait
            return True

        # 2. Is there room? Each running request may need one more block in this step
        empty = pool.num_blocks(len(request.tokens)) - len(hits)
        unreferenced = sum(pool.references[block] == 0 for block in hits)
        if empty + len(self.running) > pool.available - unreferenced:
            return False

        # 3. Is the rest being prefetched? (`start_restoration` decides later whether to load it)
        request.computed = request.next = len(hits) * pool.block_size
        if self.lower_tier.waits(request):
            return True

        # 4. Admit it
        pool.share(hits)
        pool.use(chain)
        room = pool.num_blocks(request.prompt_tokens + request.max_tokens) - len(hits)
        blocks = pool.allocate(empty, hits[-1] if hits else None, room)
        request.table, request.registered = hits + blocks, len(hits)
        if not request.readmitted:  # a readmitted request may find its own blocks: not a hit
            request.found = {"gpu": request.computed} if hits else {}
        for block_key in chain[len(hits) :]:
            self.filling.setdefault(block_key, request)
        self.waiting.remove(request)
        self.running.append(request)
        words = f"{len(hits)} blocks found"
        self.log_event("admit", [request], len(request.tokens), len(request.table), words)
        return True

    # Scheduling

    def schedule(self, ready: list[Request]) -> list[tuple[Request, int]]:
        """Choose the tokens of the next step: one for each request that decodes, then prefill, oldest request
        first, until the token budget is used up.

        Returns: (request, tokens) pairs."""
        work, budget, short = [], self.token_budget, False  # short: the pool has no block left
        for request in sorted(ready, key=lambda request: request.pending > 1):
            if request not in self.running:  # `append_block` has preempted it
                continue
            if not budget:
                break
            full = request.next == len(request.table) * self.pool.block_size
            if full and (short or not self.append_block(request)):
                short = True
                continue
            if count := min(request.pending, request.portion, budget):
                work.append((request, count))
                budget -= count
        return work

    def append_block(self, request: Request) -> bool:
        """Give the request one more block. If none is available, preempt the newest running request first.

        Returns: False if there is still no block. Either this request was the newest and is preempted, or
        the newest is preempted, but copies still reference its blocks."""
        if not self.pool.available:
            newest = self.running[-1]
            self.counts["preemptions"] += 1
            self.requeue(newest)
            if newest is request or not self.pool.available:
                return False
        request.table += self.pool.allocate(1, request.table[-1])
        return True

    def requeue(self, request: Request):
        """Preempt: free the request's blocks and put it at the head of the queue. Registered blocks stay
        cached until they are evicted. When the request is admitted again, it reuses those blocks of its
        prefix that are still cached."""
        self.log_event("requeue", [request], 0, len(request.table))
        self.running.remove(request)
        self.release(request)
        request.readmitted = True
        self.waiting.appendleft(request)
        self.wake.set()  # so that this step does not sleep, and the next one can admit the request
        self.lower_tier.submitted(request)

    # Forward pass

    def compute(self):
        """Run the forward pass of a step, and sample. If the pass raises, its requests fail."""
        began = self.clock.mark()
        try:
            batch, logits = self.runner.forward(self.work, self.lower_tier.before_layer)
            requests = [request for request, count in batch.work if count == request.pending]  # one row each
            tokens = likeliest(logits)  # [R]
        except Interrupted:
            return
        except Exception as error:
            self.on_error(error)
            logging.getLogger("kv").error("a step failed", exc_info=error)
            for request, _ in self.work:
                self.finish(request, Unavailable(f"A step failed ({in_words(error)}); ask again."))
            return
        finally:
            self.work = []
        if -1 not in tokens:
            self.counts["steps"] += 1
            self.record_step(batch, self.clock.seconds(began), self.clock.seconds(self.clock.mark()))
        for request, token, row in zip(requests, tokens, logits):
            # A request with a NaN fails here. The step is not recorded, so the others repeat it
            if -1 not in tokens or token == -1:
                with self.contain(request):
                    self.answer(request, token, row)

    def answer(self, request: Request, token: int, logits: torch.Tensor):
        """Give a request its next token: the likeliest one, `token`, or a draw from its `logits` [V]. Finish
        it if it is complete."""
        request.push(request.sample(logits, token), logits)
        if request.finish_reason:
            self.finish(request)

    def record_step(self, batch: Batch, began: float, ended: float):
        """Record what a step has computed: register full blocks, let the lower tier save them, add spans to
        the timelines."""
        self.log_event("compute", [one for one, _ in batch.work], sum(count for _, count in batch.work))
        for request, count in batch.work:
            request.computed = request.next = request.next + count
            self.register(request)
        waits = self.lower_tier.after_pass(batch, began, ended)
        for request, count in batch.work:
            decoded = request.new and count == 1 and request.computed == len(request.tokens)
            request.timeline.add("compute", "decode" if decoded else f"prefill {count}", began, ended, waits)

    def register(self, request: Request):
        """Put the blocks that the request has filled into the pool's index, so that other requests find
        them."""
        full, chain = request.computed // self.pool.block_size, request.chain
        if full > request.registered:
            self.block_keys.extend(chain, request.tokens, request.salt)
            for index in range(request.registered, full):
                self.pool.register(request.table[index], chain[index])
                if self.filling.get(chain[index]) is request:
                    del self.filling[chain[index]]
            request.registered = full
            for pool in self.pools.values():
                pool.use(chain)

    # Ending

    def release(self, request: Request):
        """Forget a request that no longer waits or runs, and release its blocks. Registered blocks stay
        cached. Copies in flight keep their own references."""
        try:
            self.lower_tier.finished(request)
        finally:  # even if the lower tier raises
            for block_key in request.chain[request.registered :]:
                if self.filling.get(block_key) is request:
                    del self.filling[block_key]
            self.pool.release(request.table)
            request.table, request.computed, request.next = [], 0, 0

    def close(self):
        """Close the lower tier."""
        self.lower_tier.close()


# 6. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Answer conversations that share a system prompt, then compare memory and throughput with chapter 01."""
    # 1. Answer: the first conversation computes the system prompt, the others find its blocks
    rng, many, context = random.Random(0), 16, lesson.context(model, frontend)  # many: conversations
    new = max(4, min(arguments.max_tokens, 12) * context // frontend.context)
    engine, size = make_engine(model, arguments), arguments.block_size
    context = min(context, engine.capacity)
    system = dict(role="system", content=lesson.document(frontend, rng, context // 4))
    talks = [lesson.conversation(frontend, rng, context // (4 + n)) for n in range(many)]
    asked = [frontend.request(messages=[system, *messages], max_tokens=new) for messages in talks]
    engine.generate(asked[:1])
    engine.generate(asked[1:])
    verified = lesson.verify(baseline.Engine(model), asked)

    # 2. Memory: a block is held once, even if many block tables point at it
    tokens = sum(request.history for request in asked)
    own = sum(engine.pool.num_blocks(request.history) for request in asked)
    found = sum(request.cached_tokens for request in asked) // size
    slots = {
        f"{context} tokens reserved for each": many * context,
        f"blocks of {size}, not shared": own * size,
        f"blocks of {size}, shared": (own - found) * size,
    }
    print(f"Memory of {many} conversations, {tokens} tokens:")
    megabytes, rows = model.config.kv_numbers_per_token * model.dtype.itemsize / 1e6, []  # per token
    for way, count in slots.items():
        rows.append(dict(memory=way, mb=count * megabytes, tokens_per_slot=tokens / count))
        print(f"  {way:32}{count * megabytes:8.1f} MB, {tokens / count:5.2f} tokens per slot")

    # 3. Time: a cached prefix is not computed again; one read of the weights serves all requests that decode
    prompt = asked[0].tokens[: asked[0].prompt_tokens]
    ways = {
        "miss (not cached)": lambda: lesson.ask(engine, prompt, cache_salt=str(rng.random())).ttft_ms,
        "gpu_hit": lambda: lesson.ask(engine, prompt).ttft_ms,
    }
    rows += lesson.table(f"\nTTFT of a prompt of {len(prompt)} tokens", lesson.in_turn(ways), "ttft_ms", "ms")
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
    title = f"\nThroughput of 4 to {many} questions, {new} tokens per answer"
    rows += lesson.table(title, lesson.in_turn(ways), "tokens_per_second", "tokens/s")
    print(f"\nThe last of the {many} requests (p: prefill, d: decode)\n{charts.chart(asked[-1].timeline)}\n")
    print("Blocks alone save only memory. Shared prefixes and batches also save time. A prefix that the\n"
          "pool has evicted must be computed again. Where else could it have been kept? See chapter 03.")
    report = dict(link=None, verified=verified, rows=rows, counters=charts.counters(engine))
    return report, [asked[-1].timeline]


# 7. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    """Add the options of this chapter. All later chapters have them as well."""
    number, add = functools.partial(cli.bounded, int, 1), parser.add_argument
    add("--gpu-blocks", type=number(1 << 24), metavar="N", help="blocks in device memory (as many as useful)")
    add("--block-size", type=number(1 << 16), metavar="N", default=16, help="tokens per block (16)")
    add("--token-budget", type=number(1 << 20), metavar="N", default=512, help="tokens per step (512)")
    add("--max-running", type=number(1 << 12), metavar="N", default=64, help="requests that run at once (64)")


def make_engine(model, arguments, lower_tier=None) -> Engine:
    """Build the engine from the command line's options. `lower_tier`: a later chapter's Restorer."""
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
