"""Chapter 02: blocks, sharing, and many requests at once.

The problem. Chapter 01 gives a request one contiguous piece of memory, as long as the request may become, and
answers one request at a time. Most of that memory is never written, two requests with the same beginning hold
it twice, and a processor that reads all weights for one token could have read them for sixteen.

The mechanism. Device memory is cut into blocks of 16 tokens. A request holds a block table, a list of block
numbers, and takes the next block when the last one is full. The key of a full block is a hash of the tokens in it
and all before it, so a request that begins with the same tokens points at it instead of computing it; a block
that no table holds any more stays cached until the pool needs it. In every step, one forward pass serves all who
run: one token for each who decodes, and chunks of prefill for the rest of the budget.

New against chapter 01: BlockPool, block tables and attention over them, prefix sharing, copy-on-write,
continuous batching with preemption, and the two verbs that all later chapters override, `restore` and `save`.
Here `save` registers filled blocks under their keys, and `restore` finds all that was saved in the block table already.

Sources: PagedAttention (Kwon et al., SOSP '23, section 4) for blocks, sharing and preemption; Orca (Yu et al.,
OSDI '22, section 3) for batching by the step; Sarathi-Serve (Agrawal et al., OSDI '24, section 4) for decode first
and prefill in chunks under a token budget.
"""
import hashlib
import queue
import random
import statistics
import struct
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from contextlib import closing
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from common import checkpoint
from legacy import app, baseline, figure, live
from legacy.app import BadRequest, Busy, Closing, HungUp
from legacy.timeline import Clock, Timeline
from tools import classroom_text

Result = baseline.Result

# 1. Data structures ----------------------------------------------------------------------------------------------

def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """The key of a full block: SHA-256 over its parent's key and its token ids as little-endian int32."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}i", *tokens)).digest()


@dataclass(eq=False)
class Prefix:
    """What a full block stands for: its `tokens`, after all that `parent` stands for. The root of a chain is its
    namespace: a string with what the numbers depend on besides tokens."""
    key: bytes
    parent: "Prefix | None" = field(repr=False)
    tokens: list[int] | str


class Prefixes:
    """One Prefix object for each content, so that two blocks hold the same if and only if their prefixes are one
    object. A key is trusted only together with the token ids: of two contents that collide in a key, the second
    gets an object that nobody finds."""

    def __init__(self, namespace: str):
        self.root = Prefix(hashlib.sha256(namespace.encode()).digest(), None, namespace)
        self.known: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()

    def salted(self, cache_salt: str) -> Prefix:
        """The root for requests with this cache_salt; they share no block with others."""
        return self.intern(hashlib.sha256(self.root.key + cache_salt.encode()).digest(), self.root, cache_salt)

    def extend(self, parent: Prefix, tokens: list[int]) -> Prefix:
        return self.intern(block_key(parent.key, tokens), parent, tokens)

    def nth(self, index: int, chain: list[Prefix], cache_salt: str, tokens: list[int], size: int) -> Prefix:
        """Number `index` of the prefixes of `tokens`, each `size` tokens longer than the one before it. `chain` remembers
        the root and all that were looked up before."""
        if not chain:
            chain.append(self.salted(cache_salt))
        while len(chain) <= index + 1:
            end = len(chain) * size
            chain.append(self.extend(chain[-1], tokens[end - size:end]))
        return chain[index + 1]

    def intern(self, key: bytes, parent: Prefix, tokens) -> Prefix:
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = Prefix(key, parent, tokens)
        return known if known.parent is parent and known.tokens == tokens else Prefix(key, parent, tokens)


class BlockPool:
    """All KV blocks of all layers in one tensor. A block is an int, and it is in one of three places: free; cached
    (no table holds it, but its prefix still finds it); or referenced, by `references[block]` block tables."""

    def __init__(self, config, blocks: int, block_size: int, dtype, device):
        self.kv = self.memory(config, blocks, block_size, dtype, device)
        self.size, self.block_size = blocks, block_size
        self.references = [0] * blocks
        self.free = OrderedDict.fromkeys(range(blocks))                         # an ordered set; free for longest first
        self.cached: OrderedDict[int, None] = OrderedDict()                     # least recently used first
        self.prefixes: list[Prefix | None] = [None] * blocks                    # of the registered blocks
        self.blocks: dict[bytes, int] = {}                                      # key -> registered block
        self.counts = Counter(evictions=0, copies=0)

    def memory(self, config, blocks: int, block_size: int, dtype, device):
        """Layer-first: a layer's keys lie together, and so do its values."""
        return torch.empty(config.num_hidden_layers, 2, blocks, block_size, config.num_key_value_heads,
                           config.head_dim, dtype=dtype, device=device)         # [L, 2, blocks, block_size, KVH, hd]

    @property
    def available(self) -> int:
        """Blocks that can be had without taking one from a table."""
        return len(self.free) + len(self.cached)

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, table: list[int] = ()) -> list[int]:
        """Take `count` blocks for the end of `table`, at most `available`: free ones, then the least recently used of the
        cached. They follow its last one where that is possible: a table of adjacent blocks is read without a copy."""
        while len(self.free) < count:
            self.evict()
        taken, following = [], table[-1] + 1 if table else None
        while len(taken) < count and following in self.free:
            del self.free[following]
            taken.append(following)
            following += 1
        taken += sorted(self.free.popitem(last=False)[0] for _ in range(count - len(taken)))
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, block: int):
        """One more table holds `block`."""
        self.cached.pop(block, None)
        self.references[block] += 1

    def release(self, table: list[int]):
        """A table is given back, its last block first, so that a chain is evicted from its end."""
        for block in reversed(table):
            self.references[block] -= 1
            if self.references[block] == 0:
                (self.free if self.prefixes[block] is None else self.cached)[block] = None

    def copy_on_write(self, block: int) -> int:
        """-> a block of the caller's own, with the same content, in place of one that other tables hold too."""
        copy, = self.allocate(1)
        self.kv[:, :, copy] = self.kv[:, :, block]                              # [L, 2, block_size, KVH, hd]
        self.release([block])
        self.counts["copies"] += 1
        return copy

    def register(self, block: int, prefix: Prefix):
        """`block` is full and holds `prefix`. Where a block has that key already, it keeps it."""
        if self.blocks.setdefault(prefix.key, block) == block:
            self.prefixes[block] = prefix

    def find(self, prefix: Prefix) -> int | None:
        block = self.blocks.get(prefix.key)
        return block if block is not None and self.prefixes[block] is prefix else None

    def touch(self, prefix: Prefix | None):
        """What this prefix stands for is the most recently used, its beginning most of all."""
        while prefix is not None:
            block = self.find(prefix)
            if block in self.cached:
                self.cached.move_to_end(block)
            prefix = prefix.parent

    def evict(self):
        """The least recently used of the cached blocks becomes free."""
        self.forget(next(iter(self.cached)))
        self.counts["evictions"] += 1

    def forget(self, block: int):
        """Nobody finds `block` any more; if no table holds it, it is free."""
        if self.prefixes[block] is not None:
            del self.blocks[self.prefixes[block].key]
            self.prefixes[block] = None
        if block in self.cached:
            del self.cached[block]
            self.free[block] = None

    def check_index(self):
        """What finds blocks agrees with what they hold. Raises AssertionError."""
        registered = {prefix.key: block for block, prefix in enumerate(self.prefixes) if prefix}
        assert self.blocks == registered, "keys and prefixes differ"

    def check_integrity(self, tables: list[list[int]]):
        """Every block is in one place, and counts, tables and keys agree. Raises AssertionError."""
        held = Counter(block for table in tables for block in set(table))
        assert sum(map(len, tables)) == held.total(), "a table holds a block twice"
        self.check_index()
        for block, references in enumerate(self.references):
            places = (block in self.free) + (block in self.cached) + (references > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert references == held[block], f"block {block} has {references} references and {held[block]} tables hold it"
            found = self.prefixes[block] is not None
            assert found or block not in self.cached, f"block {block} is cached and cannot be found"
            assert not found or block not in self.free, f"block {block} is free and can be found"


@dataclass(eq=False)
class Request(baseline.Request):
    """A sample of a prompt, and where its keys and values lie. `tokens` grows with the answer."""
    cache_salt: str = ""
    number: int = 0                                             # of this sample among those of the prompt
    forks: list["Request"] = field(default_factory=list)        # samples that begin when this one's prompt is computed
    answer: baseline.Answer | None = None
    table: list[int] = field(default_factory=list)              # its blocks, in order
    computed: int = 0                                           # tokens whose keys and values are in them
    saved: int = 0                                              # full blocks that have been saved
    prefixes: list[Prefix] = field(default_factory=list)        # the root, then of full blocks, as far as looked up
    cached_tokens: int = 0
    source: str | None = None                                   # None until the request has run
    restoration: object = None                                  # the generator, while it is being restored
    pieces: queue.SimpleQueue | None = None                     # (number, text or outcome), shared by the samples
    outcome: object = None                                      # Result or exception, when it is over

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 in decode."""
        return len(self.tokens) - self.computed

    def inherit(self, other: "Request"):
        """What was found of the prompt for `other`, another sample of it, was found for this one."""
        self.source, self.cached_tokens = other.source, other.cached_tokens


class PagedBatch:
    """One step's tokens, flat: where their keys and values are written, and what each may read. A request that is
    read alone is read in place if its blocks lie in one run, or in a few (a shared prefix is one, what follows is
    another), and else from a copy. Short contexts that decode are copied into one padded tensor and read in one call,
    which costs less than a call for each."""
    READ_ALONE = {"cpu": 1 << 20, "cuda": 64 << 20}        # bytes of K and V in a layer above which a context is read alone
    READ_TOGETHER = {"cpu": 16 << 20, "cuda": 512 << 20}   # most bytes of one padded copy
    READ_RUN = 1 << 18             # bytes for which a run of adjacent blocks is worth two products of its own

    def __init__(self, pool: BlockPool, work: list[tuple[Request, int]]):
        """`work`: requests and how many of their next tokens to compute; those of one token first, by length."""
        self.pool, self.work, size, flat, last_rows = pool, work, pool.block_size, [], []
        for request, count in work:
            for position in range(request.computed, request.computed + count):
                slot = request.table[position // size] * size + position % size
                flat.append((request.tokens[position], position, slot))
            if count == request.pending:
                last_rows.append(len(flat) - 1)
        self.tokens, self.positions, self.slots = self.tensor(flat).T.contiguous()              # [T] each
        self.token_bytes = pool.kv[0, :, 0, 0].nbytes           # K and V of one token in one layer
        self.last_rows = self.tensor(last_rows)                 # [R]: the rows whose logits a token is drawn from
        self.reads, row = [], 0
        for group in self.groups(work):
            rows = slice(row, row + sum(count for _, count in group))
            self.reads.append((rows, *(self.read_one(*group[0]) if len(group) == 1 else self.read_many(group))))
            row = rows.stop

    def tensor(self, numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=self.pool.kv.device)

    def groups(self, work):
        """Neighbours in `work` that are read in one call."""
        group, device = [], self.pool.kv.device.type
        for request, count in work:
            size = (request.computed + count) * self.token_bytes
            alone = count > 1 or size > self.READ_ALONE[device]
            if group and (alone or group[-1][1] > 1 or (len(group) + 1) * size > self.READ_TOGETHER[device]):
                yield group
                group = []
            group.append((request, count))
        yield group

    def read_one(self, request: Request, count: int):
        """-> what the request's rows read, runs as slices or a tensor of slots [S], and the mask [T, S] between the two."""
        length, size, runs, mask = request.computed + count, self.pool.block_size, [], None
        for block in request.table[:self.pool.needed(length)]:
            if runs and runs[-1][1] == block:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])                 # first block, and the one after the last
        runs = [slice(first * size, end * size) for first, end in runs]
        runs[-1] = slice(runs[-1].start, runs[-1].stop - (-length) % size)
        if count > 1 and request.computed:
            seen = torch.ones(count, length, dtype=torch.bool, device=self.pool.kv.device).tril(request.computed)
            mask = baseline.score_mask(seen, self.pool.kv.dtype)
        in_place = count == 1 and self.pool.kv.dtype == torch.float32 and len(runs) * self.READ_RUN <= length * self.token_bytes
        if len(runs) == 1 or in_place:
            return runs, mask
        return self.tensor([slot for run in runs for slot in range(run.start, run.stop)]), mask

    def read_many(self, group):
        """-> slots [B, S] and mask [B, 1, 1, S] of B requests that decode; row b reads its own first `lengths[b]`."""
        longest = max(len(request.table) for request, _ in group)
        blocks = self.tensor([request.table + request.table[:1] * (longest - len(request.table)) for request, _ in group])
        lengths = self.tensor([[request.computed + 1] for request, _ in group])                 # [B, 1]
        offsets = torch.arange(self.pool.block_size, device=blocks.device)
        slots = (blocks[:, :, None] * self.pool.block_size + offsets).flatten(1)                # [B, longest * block_size]
        slots = slots[:, :max(request.computed + 1 for request, _ in group)]                    # [B, S]
        seen = torch.arange(slots.shape[1], device=slots.device) < lengths                      # [B, S]
        slots = torch.where(seen, slots, slots[:, :1])                                          # padding: a slot of its own
        return slots, baseline.score_mask(seen, self.pool.kv.dtype)[:, None, None]

    def layers(self):
        """One `attend(q, k, v)` per layer."""
        for keys, values in self.pool.kv.flatten(2, 3):                                         # [slots, KVH, hd] each
            def attend(q, k, v, keys=keys, values=values):
                keys.index_copy_(0, self.slots, k)
                values.index_copy_(0, self.slots, v)
                outs = [self.read(q[rows], keys, values, slots, mask) for rows, slots, mask in self.reads]
                return outs[0] if len(outs) == 1 else torch.cat(outs)                           # [T, H, hd]
            yield attend

    def read(self, q, keys, values, slots, mask):
        """Attention of q [T, H, hd] over the keys and values [slots, KVH, hd] in `slots` -> [T, H, hd]."""
        if isinstance(slots, list):
            keys, values = [keys[run] for run in slots], [values[run] for run in slots]         # [S_r, KVH, hd] each
            if len(slots) > 1:
                return attention_over_runs(q, keys, values)
            return baseline.attention(q, keys[0].transpose(0, 1), values[0].transpose(0, 1), mask)
        k, v = (tensor.index_select(0, slots.flatten()) for tensor in (keys, values))           # [S or B*S, KVH, hd] each
        if slots.ndim == 1:
            return baseline.attention(q, k.transpose(0, 1), v.transpose(0, 1), mask)
        k, v = (copy.unflatten(0, slots.shape).transpose(1, 2) for copy in (k, v))              # [B, KVH, S, hd] each
        grouped = q.unflatten(1, (k.shape[1], -1))                                              # [B, KVH, H/KVH, hd]
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)      # [B, H, hd]


def attention_over_runs(q, keys, values):
    """One token's q [1, H, hd] over runs of keys and values [S_r, KVH, hd] -> [1, H, hd], without putting them together.
    Only in float32: in 16 bit the scores would be rounded."""
    grouped = q.unflatten(1, (keys[0].shape[1], -1))[0] * q.shape[-1] ** -0.5                   # [KVH, H/KVH, hd]
    scores = torch.cat([grouped @ k.permute(1, 2, 0) for k in keys], -1)                        # [KVH, H/KVH, S]
    weights = scores.softmax(-1).split([len(k) for k in keys], -1)                              # [KVH, H/KVH, S_r] each
    return sum(w @ v.transpose(0, 1) for w, v in zip(weights, values)).flatten(0, 1)[None]      # [1, H, hd]


# 2. The engine ---------------------------------------------------------------------------------------------------

def pool_size(model, blocks: int | None, block_size: int, max_running: int) -> int:
    """-> `blocks`, or by default as many as `max_running` full contexts take, but no more than 80 % of a GPU's free
    memory or a quarter of the host's. Raises ModelError if they do not fit."""
    on_gpu, block_bytes = model.device.type == "cuda", block_size * model.config.kv_numbers_per_token * model.dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if on_gpu else checkpoint.free_host_memory()
    if blocks is None:
        useful = max_running * -(-model.config.max_position_embeddings // block_size)
        blocks = max(1, int(min(useful, free * (0.8 if on_gpu else 0.25) // block_bytes)))
    if blocks * block_bytes > free:
        raise checkpoint.ModelError(f"{blocks} blocks of {block_size} tokens take {blocks * block_bytes / 1e9:.1f} GB and "
                                    f"{free / 1e9:.1f} GB are free; choose at most --gpu-blocks {int(free // block_bytes)}.")
    return blocks


class Engine(baseline.Frontend):
    """Answers many requests at once in a fixed number of blocks. One thread runs `step`; others submit and wait."""
    Request, Pool = Request, BlockPool
    LARGER = "--gpu-blocks {}"             # what makes room for so many blocks
    fields = {"n": (lambda v: app.whole(v, 1, 16), "a whole number from 1 to 16: answers to the same prompt"),
              "cache_salt": (lambda v: app.text(v) and len(v) <= 256, "a string of at most 256 characters")}

    def __init__(self, model, tokenizer, end_tokens, blocks: int | None = None, block_size: int = 16,
                 token_budget: int = 512, max_running: int = 64, max_waiting: int = 256):
        super().__init__(model, tokenizer, end_tokens)
        self.token_budget, self.max_running, self.max_waiting = token_budget, max_running, max_waiting
        self.thread, self.clock = None, Clock(model.device)
        self.pool = self.make_pool(blocks, block_size)
        self.prefixes = Prefixes(f"{model.digest.hex()} {model.dtype} {block_size} kv")
        self.waiting: deque[Request] = deque()                          # first come, first served
        self.running: list[Request] = []                                # who holds blocks, oldest first
        self.cancelled: deque[Request] = deque()                        # whose clients have hung up
        self.changed, self.stepping = threading.Condition(), threading.RLock()
        self.stalls = []               # points in time, from and to: when the forward pass waited for something (chapter 03)
        self.counts.update(steps=0, preemptions=0, cached_tokens=0)

    def make_pool(self, blocks: int | None, block_size: int) -> BlockPool:
        blocks = pool_size(self.model, blocks, block_size, self.max_running)
        return self.Pool(self.model.config, blocks, block_size, self.model.dtype, self.model.device)

    # One step

    def step(self) -> bool:
        """One step for everybody -> whether there is more to do. Threads take turns."""
        with self.stepping:
            # 1. Who hung up leaves; when the engine closes, so does who has not begun
            while self.cancelled:
                self.finish(self.cancelled.popleft(), HungUp("The client hung up."), "cancelled")
            if self.closing:
                for request in [request for request in self.waiting if request.source is None]:
                    self.finish(request, Closing("The server is shutting down; ask again when it is back."), "cancelled")

            # 2. Who is being restored goes on, and who fits comes in
            for request in [request for request in self.running if request.restoration]:
                self.advance_restoration(request)
            while self.waiting and self.admit(self.waiting[0]):
                pass

            # 3. One forward pass for all of them
            work = self.schedule()
            if work:
                self.compute(work)
            return bool(self.running or self.waiting or self.cancelled)

    def admit(self, request: Request) -> bool:
        """Let the first in line in, if there is budget left in this step, room to run, and blocks for all its tokens
        and one more for each who runs, since who comes in must not be the next to be preempted. The blocks are taken
        at once: cached ones for the prefix that they hold, empty ones for the rest."""
        if (sum(map(self.turn, self.running)) >= self.token_budget or
                sum(1 + len(other.forks) for other in (*self.running, request)) > self.max_running):
            return False
        try:
            pool, hits = self.pool, self.match(request)
            empty = pool.needed(len(request.tokens)) - len(hits)
            if not self.find_room(request, hits, empty):
                return False
            self.waiting.popleft()
            self.running.append(request)
            for block in hits:
                pool.share(block)
            request.table, request.saved = hits + pool.allocate(empty, hits), len(hits)
            request.restoration = self.restore(request)
            self.advance_restoration(request)
        except Exception as error:
            self.finish(request, error, "failed")
        return True

    def find_room(self, request: Request, hits: list[int], empty: int) -> bool:
        """Whether the request can have `hits` and `empty` other blocks, and each who runs one more."""
        cached = sum(self.pool.references[block] == 0 for block in hits)        # available, and about to be held
        return empty + len(self.running) <= self.pool.available - cached

    def match(self, request: Request) -> list[int]:
        """-> the blocks that hold the longest cached prefix of the request's tokens, but for the last token: that is
        computed in any case, because the answer begins with its logits."""
        hits = []
        for index in range((len(request.tokens) - 1) // self.pool.block_size):
            block = self.pool.find(self.prefix(request, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def adopt(self, request: Request):
        """For chapters that bring blocks: those that hold what follows in the request's tokens, and were registered since it came
        in, take the place of empty ones."""
        hits = self.match(request)
        for index in range(request.saved, len(hits)):
            self.replace(request, index, hits[index])
            request.saved = index + 1

    def replace(self, request: Request, index: int, block: int):
        """The registered `block` takes the place of an empty one."""
        self.pool.share(block)
        self.pool.release([request.table[index]])
        request.table[index] = block

    def prefix(self, request: Request, index: int) -> Prefix:
        """The prefix that the request's block number `index` holds when it is full."""
        return self.prefixes.nth(index, request.prefixes, request.cache_salt, request.tokens, self.pool.block_size)

    def restore(self, request: Request):
        """Bring the longest saved prefix of `request.tokens` into the blocks of its table, of which the first `saved`
        hold theirs already, and set `computed`, `cached_tokens` and `source`. A generator: at every yield the others
        take a step. Here there is nothing left to bring."""
        request.computed = request.saved * self.pool.block_size
        if request.source is None:                                      # a preempted request finds blocks of its own
            request.cached_tokens, request.source = request.computed, "gpu_hit" if request.computed else "miss"
        yield from ()

    def advance_restoration(self, request: Request):
        try:
            next(request.restoration)
        except StopIteration:
            request.restoration = None
        except Exception as error:
            self.finish(request, error, "failed")

    def schedule(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step: one for each who decodes, then chunks of prefill, oldest
        first, until the budget is used up."""
        for request in [request for request in self.running if not request.restoration and request.pending == 1]:
            if request in self.running:                                 # and was not preempted for an older one
                self.make_room(request)
        work, budget = [], self.token_budget
        for request in sorted(self.running, key=lambda request: request.pending > 1):
            count = min(self.turn(request), budget)
            if count:
                work.append((request, count))
                budget -= count
        return sorted(work, key=lambda item: (item[1] > 1, item[0].computed))

    def turn(self, request: Request) -> int:
        """How many of its tokens the request would compute in this step: none while it is being restored."""
        return 0 if request.restoration else request.pending

    def others_compute(self, request: Request) -> bool:
        """Whether anybody needs a step: others that compute, that wait, or that hung up."""
        return bool(self.waiting or self.cancelled) or any(self.turn(other) for other in self.running if other is not request)

    def make_room(self, request: Request):
        """A slot of its own for the next token. When blocks run out, the newest request is preempted."""
        pool, table, index = self.pool, request.table, request.computed // self.pool.block_size
        while request in self.running and self.lacks_slot(request):
            if not pool.available:
                self.preempt(self.running[-1])
            elif index == len(table):
                table += pool.allocate(1, table)
            else:                                                       # shared with another sample until now
                table[index] = pool.copy_on_write(table[index])

    def lacks_slot(self, request: Request) -> bool:
        """Whether the next token needs another block: the last one is full, or is shared with another sample."""
        index = request.computed // self.pool.block_size
        return index == len(request.table) or self.pool.references[request.table[index]] > 1

    def compute(self, work: list[tuple[Request, int]]):
        """The forward pass of a step, and what follows from it."""
        began, self.stalls = self.clock.mark(), []
        try:
            logits = self.forward(self.batch(work))                     # [R, V], of those whose last token was computed
            likeliest = logits.argmax(-1).tolist()                      # [R]
        except Exception as error:
            self.fail(work, error)
            return
        ended, row = self.clock.mark(), 0
        began, ended, *stalls = map(self.clock.seconds, (began, ended, *self.stalls))
        stalls = list(zip(stalls[::2], stalls[1::2]))
        self.counts["steps"] += 1
        for request, count in work:
            decoding = request.pending == 1 and request.answer.tokens
            request.timeline.add("compute", "decode" if decoding else f"prefill {count}", began, ended, stalls)
            request.computed += count
            self.save(request)
            if request.pending == 0:
                for sample in (request, *self.fork(request)):
                    self.draw(sample, logits[row], likeliest[row])
                row += 1

    def batch(self, work: list[tuple[Request, int]]) -> PagedBatch:
        """What the forward pass of a step computes."""
        return PagedBatch(self.pool, work)

    @torch.inference_mode()
    def forward(self, batch: PagedBatch):
        rotation = self.model.rotary(batch.positions)                   # [T, 1, hd] each
        hidden = self.model.embed(batch.tokens)                         # [T, D]
        for index, (layer, attend) in enumerate(zip(self.model.layers, batch.layers())):
            self.tap(index, hidden, batch)
            hidden = layer(hidden, rotation, attend)                    # [T, D]
        return self.model.logits(hidden[batch.last_rows])               # [R, V]

    def tap(self, index: int, hidden, batch: PagedBatch):
        """Sees the input [T, D] of layer `index` before the layer does. Here it does nothing."""

    def fail(self, work: list[tuple[Request, int]], error: Exception):
        """The forward pass of this `work` raised."""
        for request, _ in work:
            self.finish(request, error, "failed")

    def save(self, request: Request):
        """Register the blocks that the request has filled, so that others find them. (Who computes the same in the
        same step finds nothing yet.)"""
        for index in range(request.saved, request.computed // self.pool.block_size):
            self.pool.register(request.table[index], self.prefix(request, index))
            request.saved = index + 1

    def fork(self, request: Request) -> list[Request]:
        """The other samples of a prompt that has just been computed begin, with the same blocks."""
        forks, request.forks = request.forks, []
        for fork in forks:
            fork.table, fork.prefixes = list(request.table), list(request.prefixes)
            fork.computed, fork.saved = request.computed, request.saved
            fork.inherit(request)
            fork.timeline.spans += request.timeline.spans
            for block in fork.table:
                self.pool.share(block)
        after = self.running.index(request) + 1
        self.running[after:after] = forks
        return forks

    def draw(self, request: Request, logits, likeliest: int):
        """The next token of one request, and its text."""
        try:
            token = baseline.sample(logits, request, request.answer.generator) if request.temperature else likeliest
            request.pieces.put((request.number, request.answer.push(token)))
            request.tokens.append(token)
            if request.answer.finish_reason:
                self.finish(request, self.result(request), "finished")
        except Exception as error:
            self.finish(request, error, "failed")

    def result(self, request: Request) -> Result:
        return request.answer.result(request, request.source, request.cached_tokens)

    def preempt(self, request: Request):
        """Take the request's blocks; it goes back to the head of the line, to be restored or computed again."""
        self.free(request)
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def finish(self, request: Request, outcome, counted: str):
        """The request is over, wherever it was, with a Result or an exception. Samples that waited for its prompt to
        be computed do it themselves."""
        if request.outcome is not None:
            return
        request.outcome = outcome
        self.counts[counted] += 1
        if isinstance(outcome, Result):
            self.over.append((outcome, request))
            self.counts.update(prompt_tokens=request.answer.prompt_tokens, completion_tokens=len(outcome.tokens),
                               cached_tokens=request.cached_tokens)
        if request in self.waiting:
            self.waiting.remove(request)
        for leader in (*self.running, *self.waiting):
            if request in leader.forks:
                leader.forks.remove(request)
        if request.forks:
            heir, *heir.forks = request.forks
            heir.inherit(request)
            self.waiting.appendleft(heir)
        try:
            if request in self.running:
                self.free(request)
        finally:                                                        # whatever a restoration does when it is closed
            request.pieces.put((request.number, outcome))

    def free(self, request: Request):
        """Give the request's blocks back; those that are registered stay cached."""
        self.running.remove(request)
        self.pool.release(request.table)
        restoration, request.restoration = request.restoration, None
        request.table, request.computed, request.saved = [], 0, 0
        if restoration:
            restoration.close()

    # The engine's thread, and those that ask

    def loop(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.busy() or self.closing)
                if self.closing and not (self.running or self.waiting or self.cancelled):
                    return
            try:
                if not self.step() and self.busy():
                    self.rest()
            except Exception as error:                                  # a defect: nobody waits for ever because of it
                with self.stepping:
                    for request in (*self.running, *self.waiting):
                        self.finish(request, error, "failed")

    def busy(self) -> bool:
        """Whether the engine's thread has something to do."""
        return bool(self.running or self.waiting or self.cancelled)

    def rest(self):
        """For chapters in which something goes on between the steps when nobody asks."""

    def submit(self, prompt=None, messages=None, n: int = 1, **fields) -> list[Request]:
        """Stand in line -> n samples of one prompt, seeded seed, seed + 1, ... if there is a seed.

        Requests with different `cache_salt` share no block. The other arguments are those of `request`.
        Raises BadRequest (also for what can never fit into the pool), Busy or Closing."""
        try:
            own = {name: fields.pop(name) for name in self.fields if name in fields}
            own = app.check_fields(dict(own, n=n), self.fields)         # without those that are None
            n, asked, pieces = own.pop("n", 1), self.request(prompt, messages, **fields), queue.SimpleQueue()
            most = self.pool.needed(len(asked.tokens) + asked.max_tokens - 1)      # the last token is never read
            if most > self.pool.size:
                raise BadRequest(f"{len(asked.tokens)} prompt tokens and up to {asked.max_tokens} new ones take {most} blocks, "
                                 f"and the pool has {self.pool.size}; ask for less, or start with {self.LARGER.format(most)}.")
            if n > self.max_running:
                raise BadRequest(f"n is {n}, and at most {self.max_running} may run at once; ask for fewer.")
            leader, *forks = (self.Request(**{
                **vars(asked), "tokens": list(asked.tokens), "seed": None if asked.seed is None else asked.seed + number,
                "timeline": Timeline()}, **own, number=number, pieces=pieces) for number in range(n))
            leader.forks = forks
            for sample in (leader, *forks):
                sample.answer = baseline.Answer(sample, self.tokenizer, self.end_tokens)
            with self.changed:
                if self.closing:
                    raise Closing("The server is shutting down; ask again when it is back.")
                if len(self.waiting) >= self.max_waiting:
                    raise Busy(f"{self.max_waiting} requests are waiting already; try again later.")
                for sample in (leader, *forks):
                    self.counts["requests"] += 1
                    sample.id = self.counts["requests"]
                self.waiting.append(leader)
                self.changed.notify()
            return [leader, *forks]
        except app.RequestError:
            with self.changed:
                self.counts["refused"] += 1
            raise

    def samples(self, *prompt, **fields):
        """`submit`, and start the engine's thread -> an iterator of (number of the sample, piece): pieces of text, and
        for each sample, last, its Result. Closing it early, or the failure of one, ends all samples."""
        samples = self.submit(*prompt, **fields)
        with self.changed:
            if self.thread is None:
                self.thread = threading.Thread(target=self.loop, daemon=True)
                self.thread.start()
        pieces = self.listen(samples)
        next(pieces)               # from here on, closing the iterator cancels
        return pieces

    def stream(self, prompt=None, messages=None, n: int = 1, **fields):
        """`samples`, of one: an iterator over pieces of text and, last, the Result."""
        if n != 1:
            with self.changed:
                self.counts["refused"] += 1
            raise BadRequest("stream gives one answer; samples gives n of them.")
        samples = self.samples(prompt, messages, **fields)

        def pieces():
            with closing(samples):
                yield ""
                yield from (piece for _, piece in samples)
        answer = pieces()
        next(answer)               # from here on, closing the iterator closes the other
        return answer

    def listen(self, samples: list[Request]):
        """Yields what the engine's thread puts; "" at first, and now and then while there is nothing, so that
        the caller can see whether anybody still listens."""
        try:
            yield 0, ""
            unfinished = [sample.number for sample in samples]
            while unfinished:
                try:
                    number, piece = samples[0].pieces.get(timeout=0.5)
                except queue.Empty:
                    number, piece = unfinished[0], ""
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, Result):
                    unfinished.remove(number)
                yield number, piece
        finally:
            with self.changed:
                self.cancelled.extend(sample for sample in samples if sample.outcome is None)
                self.changed.notify()

    def cancel(self, request: Request):
        """End the request and free its blocks, at the beginning of the next step."""
        with self.changed:
            self.cancelled.append(request)
            self.changed.notify()

    def close(self):
        """Take nothing more; who has not begun is told so, and who has is answered while the process lives."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        if self.thread is not None:
            self.thread.join(0.5)                                       # an idle one ends at once

    def counters(self) -> dict:
        pool = self.pool
        return dict(self.counts, **pool.counts, waiting=len(self.waiting), running=len(self.running), blocks=pool.size,
                    blocks_free=len(pool.free), blocks_cached=len(pool.cached),
                    blocks_referenced=pool.size - pool.available)

    # What the page shows, and does

    def tiers(self) -> list[live.Tier]:
        """What each memory holds now."""
        return [self.device_tier()]

    def device_tier(self, in_flight=(), arrived=()) -> live.Tier:
        return live.of_pool("device", f"Device: KV blocks of {self.pool.block_size} tokens", self.pool, list(self.running),
                            in_flight, arrived, block_bytes=self.pool.kv[:, :, :1].nbytes)

    def who(self) -> list[dict]:
        waiting = list(self.waiting)
        return [dict(id=request.id, state="waiting" if request in waiting else "restoring" if request.restoration else
                     "decode" if request.answer.tokens else "prefill", prompt_tokens=request.answer.prompt_tokens,
                     computed=min(request.computed, request.answer.prompt_tokens), new_tokens=len(request.answer.tokens),
                     cached_tokens=request.cached_tokens, source=request.source) for request in (*self.running, *waiting)]

    def drawn(self, request: Request):
        """Where each block of its prompt came from."""
        hits, blocks = request.cached_tokens // self.pool.block_size, self.pool.needed(request.answer.prompt_tokens)
        cells = [("g", "on the device")] * hits + [("m", "computed")] * (blocks - hits)
        return figure.Cells("The blocks of the prompt", [("", cells)], dict(g="found on the device", m="computed"))

    def evict_cached(self) -> int:
        """The device drops all that it has cached, as if others had needed the room -> how many blocks."""
        with self.stepping:
            cached = len(self.pool.cached)
            while self.pool.cached:
                self.pool.evict()
            return cached

    @property
    def admin(self) -> dict:
        return {"/evict": dict(POST=self.post_evict)}

    def post_evict(self, body: dict, with_token: bool) -> dict:
        """POST /evict {"tier": "device"}"""
        app.check_fields(body, {"tier": (lambda v: v == "device", '"device"')})
        return dict(evicted=self.evict_cached())

    def examples(self) -> dict[str, str]:
        """Two prompts with the same long beginning, and a short one."""
        talk, text, facts = classroom_text.Conversation(random.Random(3), classroom_text.Level()), "Read this:", []
        while len(self.tokenizer.encode(text)) < min(768, self.context // 2) and (fact := talk.new_fact()):
            facts.append(fact)
            text += " " + fact.statement
        return {"A long document and a question": f"{text} {facts[0].question}",
                "The same document, another question": f"{text} {facts[-1].question}", "A short question": "What is a KV cache?"}

    def ways(self, prompt: list[int], new: int, stack) -> dict:
        small = self.small(self.pool.needed(len(prompt) + new))
        return {baseline.RECOMPUTE: chapter_01(self, prompt, new),
                "blocks on the device": lambda: answer(small, prompt=prompt, max_tokens=new)}

    def small(self, blocks: int, **options) -> "Engine":
        """An engine of the same kind for a comparison, with room for one request."""
        return type(self)(*self.parts, blocks + 1, self.pool.block_size, self.token_budget, **options)


# 3. What demos and benchmarks share ------------------------------------------------------------------------------

CONVERSATIONS = 32


@dataclass
class Run:
    """Requests that ran together, and their block tables at the step when these were longest."""
    requests: list[Request]
    seconds: float = 0.0
    tables: list[list[int]] = field(default_factory=list)
    tokens: int = 0                # whose keys and values the tables held

    @property
    def held(self) -> int:
        return sum(map(len, self.tables))


def measured(name: str, samples: list[float], what: str, unit: str) -> dict:
    """Print one line of a table, and return it."""
    middle, least, most = statistics.median(samples), min(samples), max(samples)
    print(f"  {what:32}{middle:8.1f} {unit}   {least:.1f} to {most:.1f}")
    return {name: middle, "min": least, "max": most, "samples": len(samples)}


def document(engine: Engine, rng, tokens: int) -> str:
    text = "Read this:"
    while len(engine.tokenizer.encode(text)) < tokens:
        text += " " + classroom_text.draw_fact(rng, classroom_text.Level()).statement
    return text


def conversation(engine: Engine, rng, tokens: int) -> list[dict]:
    """Messages of at least `tokens` tokens; the last is the user's."""
    talk, messages = classroom_text.Conversation(rng, classroom_text.Level()), []
    while True:
        turn = talk.next_turn()
        messages.append(dict(role="user", content=turn.user))
        if len(engine.encode(None, messages)[0]) >= tokens:
            return messages
        messages.append(dict(role="assistant", content=turn.assistant))


def run_together(engine: Engine, asked: list[dict]) -> Run:
    began = time.perf_counter()
    run, more = Run([engine.submit(**fields)[0] for fields in asked]), True
    while more:
        more = engine.step()
        if sum(len(request.table) for request in engine.running) >= run.held:
            run.tables = [list(request.table) for request in engine.running]
            run.tokens = sum(request.computed for request in engine.running)
    run.seconds = time.perf_counter() - began
    for request in run.requests:
        if isinstance(request.outcome, Exception):
            raise request.outcome
    return run


def answer(engine: Engine, **asked) -> Result:
    """Submit one request, and step until it is answered."""
    return run_together(engine, [asked]).requests[0].outcome


def chapter_01(engine: Engine, prompt: list[int], new: int):
    """The first way of every comparison."""
    alone = baseline.Engine(*engine.parts)
    return lambda: alone.generate(prompt=prompt, max_tokens=new)


def verify(alone: baseline.Engine, runs: list[Run]) -> bool:
    """Compare the tokens of all requests with those of chapter 01."""
    known, pairs = {}, []
    for request in (request for run in runs for request in run.requests):
        prompt = tuple(request.tokens[:request.answer.prompt_tokens])
        if prompt not in known:
            known[prompt] = alone.generate(prompt=list(prompt), max_tokens=request.max_tokens).tokens
        pairs.append((known[prompt], request.outcome.tokens))
    return equal(pairs, alone.model.dtype)


def equal(pairs: list[tuple[list[int], list[int]]], dtype) -> bool:
    """Print how many tokens of the pairs (chapter 01's, ours) are equal. In float32 all of them must be."""
    same = sum(a == b for theirs, ours in pairs for a, b in zip(theirs, ours))
    total = sum(max(len(theirs), len(ours)) for theirs, ours in pairs)
    if same < total and dtype == torch.float32:
        raise SystemExit(f"NOT verified: {total - same} of {total} tokens differ from those of chapter 01.")
    print(f"verified: all {total} tokens equal those of chapter 01\n" if same == total else
          f"{same} of {total} tokens equal those of chapter 01 (16-bit rounding may part them)\n")
    return same == total


# 4. Options ------------------------------------------------------------------------------------------------------

def add_arguments(parser, size_option: str = "--block-size"):
    parser.add_argument("--gpu-blocks", type=app.bounded(int, 1, 1 << 24), metavar="N",
                        help="KV blocks in device memory (default: all that can be used, within most of what is free)")
    parser.add_argument(size_option, dest="block_size", type=app.bounded(int, 1, 1 << 16), default=16, metavar="TOKENS",
                        help="tokens per block (default 16)")
    parser.add_argument("--token-budget", type=app.bounded(int, 1, 1 << 20), default=512, metavar="TOKENS",
                        help="tokens per step, decode and prefill together (default 512)")
    parser.add_argument("--max-running", type=app.bounded(int, 1, 1 << 12), default=64, metavar="N",
                        help="answers that may be written at once (default 64)")


def make_engine(model, tokenizer, end_tokens, arguments) -> Engine:
    engine = Engine(model, tokenizer, end_tokens, arguments.gpu_blocks, arguments.block_size, arguments.token_budget,
                    arguments.max_running)
    print(f"KV pool: {engine.pool.size} blocks of {engine.pool.block_size} tokens, {engine.pool.size * engine.pool.block_size} "
          f"tokens, {engine.pool.kv.nbytes / 1e6:.1f} MB", file=sys.stderr)
    return engine
