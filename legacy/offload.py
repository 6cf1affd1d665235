"""Chapter 03: a second tier in host memory, and the link between the two.

The problem. Device memory holds the KV blocks of a few conversations. When the pool of chapter 02 is full, cached
blocks are dropped, and a conversation that comes back is computed again, although host memory is many times larger
and stands idle.

The mechanism. A second pool in pinned host memory. When a request finishes, its full blocks are copied out in the
background (swap out); when a request comes whose prefix the device has lost, they are copied back in (swap in): a
copy instead of a forward pass. All layers' copies are issued at once, and the prefill of the new tokens waits at each
layer only for that layer, so that one layer is computed while the next is on its way. Both tiers find blocks by the
same prefixes. The engine measures its link and its prefill, and loads only what arrives sooner than it is computed.

New against chapter 02: HostPool, Swap, the link (legacy/link.py), and the choice between loading and computing. `save`
registers blocks as before, `finish` swaps them out, and `restore` swaps them in. Two rules keep the tokens right, and
the tests break each of them to see the damage: what is on its way in must not be overwritten or read before it is
there, and what is on its way out must not be reused before it is gone. Here a Swap holds a reference to every block
that it touches, in both pools, until all of it has arrived.

Sources: two tiers as in "KV Cache CPU Offloading" (part 12 of a series that rebuilds vLLM), from which the words gpu_hit,
cpu_hit and miss come; layer-by-layer loading as in CachedAttention (Gao et al., USENIX ATC '24, section 3.2).
"""
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakSet

import torch

from common import checkpoint
from legacy import baseline, figure, live, paged
from legacy import link as links
from legacy.link import Link, Transfer, TransferError
from legacy.timeline import Timeline

LONG_PREFILL = 128                 # tokens in a step from which prefill runs at its full speed, or nearly

# 1. Data structures ----------------------------------------------------------------------------------------------

class HostPool(paged.BlockPool):
    """KV blocks in host memory, pinned where there is a GPU. They are free, cached or referenced as on the device; who
    references them is a Swap."""

    def memory(self, config, blocks: int, block_size: int, dtype, device):
        """Page-first: all layers of a block lie together, so that it goes out in one copy."""
        shape = (blocks, config.num_hidden_layers, 2, block_size, config.num_key_value_heads, config.head_dim)
        return pinned(shape, dtype, device, "The host pool")                    # [blocks, L, 2, block_size, KVH, hd]


def pinned(shape, dtype, device, what: str):
    """Host memory that `device` can copy from and to beside the computation, where it is a GPU."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            print(f"{what} cannot be pinned ({str(error).splitlines()[0]}). Every copy now goes through a buffer of "
                  "the driver's: about half as fast, and the host waits for it.", file=sys.stderr)
    return torch.empty(shape, dtype=dtype)


@dataclass(eq=False)
class Swap:
    """Blocks on their way between the tiers: inward all that a request lacks, one transfer a layer; outward one block, one
    transfer. It holds a reference to each of them, in both pools, until it is over."""
    inward: bool
    device_blocks: list[int]
    host_blocks: list[int]
    prefix: paged.Prefix | None                                                 # of the last block
    timeline: Timeline | None = None                                            # of who asked for it
    before_eviction: bool = False                                               # outward, because it is the next to be evicted
    transfers: list[Transfer] = field(default_factory=list)
    refused: bool = False                                                       # the link did not take all of it
    abandoned: bool = False                                                     # what it was to bring must be computed

    @property
    def ready(self) -> bool:
        return all(transfer.ready for transfer in self.transfers)

    @property
    def failed(self) -> bool:
        return self.refused or any(transfer.error is not None for transfer in self.transfers)


@dataclass(eq=False)
class Request(paged.Request):
    offload_after: bool = True                                                  # swap its blocks out when it is over
    blocks: dict = field(default_factory=dict)                                  # of its prompt: gpu_hits, cpu_hits, misses
    choice: dict | None = None                                                  # load or recompute, and the two estimates
    swap_ins: list[Swap] = field(default_factory=list)                          # that bring blocks of its table

    def inherit(self, other: "Request"):
        super().inherit(other)
        self.blocks, self.choice, self.swap_ins = other.blocks, other.choice, list(other.swap_ins)


@dataclass
class Result(baseline.Result):
    blocks: dict                   # of the prompt: gpu_hits, cpu_hits, misses
    choice: dict | None            # chosen ("load" or "recompute"), load_ms, recompute_ms; None if the host held nothing more
    link: str                      # what the blocks came over, and how fast it is

    def summary(self) -> str:
        found, chosen = ", ".join(f"{what} {count}" for what, count in self.blocks.items()), ""
        if self.choice:
            chosen = "\nChosen: " + ", ".join(f"{what} {value}" for what, value in self.choice.items()) + f" ({self.link})"
        return f"{super().summary()}\nBlocks: {found}{chosen}"


# 2. The engine ---------------------------------------------------------------------------------------------------

def host_pool_size(pool: paged.BlockPool, wanted: int | None, useful: int, size: int, what: str, option: str) -> int:
    """-> `wanted` pieces of `size` bytes in host memory, or by default `useful` ones, but no more than a quarter of free memory
    takes. Raises ModelError if they do not fit beside the device's `pool`."""
    free, on_gpu = checkpoint.free_host_memory(), pool.kv.device.type == "cuda"
    if not on_gpu:
        free = max(0, free - pool.kv.nbytes)                                    # which is not touched yet, and so looks free
    if wanted is None:
        wanted = int(min(useful, free * 0.25 // size))
    total = wanted * size
    if (1 << (total - 1).bit_length() if on_gpu and total else total) > free:   # PyTorch pins powers of two
        most = (1 << max(0, int(free).bit_length() - 1) if on_gpu else int(free)) // size
        raise checkpoint.ModelError(f"{wanted} {what} take {total / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; choose at most "
                                    f"{option} {most}.")
    return wanted


class MeasuringEngine(paged.Engine):
    """Chapter 02's engine, which also learns how fast its prefill is: what brings state back must be faster."""

    def __init__(self, *options, **named_options):
        super().__init__(*options, **named_options)
        self.prefills: deque[tuple[int, float, float]] = deque(maxlen=16)       # tokens, FLOPs and seconds of the last ones

    def compute(self, work):
        """Chapter 02's; its longest chunks of prefill are measured, because short ones are slower."""
        flops = sum(self.flops(request.computed, request.computed + count) for request, count in work)
        tokens = sum(count for request, count in work if not request.answer.tokens)
        representative = tokens >= min(LONG_PREFILL, max((known for known, _, _ in self.prefills), default=1))
        steps, began = self.counts["steps"], time.perf_counter()
        super().compute(work)
        if representative and not self.stalls and self.counts["steps"] > steps:          # it waited for nothing
            self.prefills.append((tokens, flops, time.perf_counter() - began))

    def settle(self):
        """Let go of what has arrived. Here nothing travels."""

    def counters(self) -> dict:
        if self.stepping.acquire(blocking=False):                               # who asks may see what has arrived
            try:
                self.settle()
            finally:
                self.stepping.release()
        return super().counters()

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate for the prefill of tokens `start` to `end`, as fast as the last prefills were; without any, inf."""
        _, flops, seconds = map(sum, zip(*self.prefills)) if self.prefills else (0, 1.0, float("inf"))
        return self.flops(start, end) * seconds / flops

    def flops(self, start: int, end: int) -> float:
        """Floating-point operations of all layers for tokens `start` to `end`: two for each weight, and in attention two for
        each number of a key and of a value that a head of a query sees."""
        config, tokens = self.model.config, end - start
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        seen = tokens * (start + end + 1) / 2                                   # pairs of a token and one that it sees
        return config.num_hidden_layers * (2 * weights * tokens + 4 * heads * seen)


class SwappingEngine(MeasuringEngine):
    """An engine over two tiers: how swaps are sent, waited for layer by layer, and let go of. What is swapped, and how it is
    found again, is for the engine below and for chapter 07's. `bytes_per_second` is the modelled link's, without a GPU; without
    `overlap` a request waits for all of its blocks before it computes."""

    def __init__(self, model, tokenizer, end_tokens, *options, bytes_per_second: float | None = None, overlap: bool = True,
                 **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        self.overlap = overlap
        bytes_per_second = bytes_per_second or links.bandwidth(model)
        self.load_link, self.save_link = (Link(lane, self.clock, bytes_per_second) for lane in ("load", "save"))
        self.swaps: list[Swap] = []                                             # under way, oldest first
        self.arriving: dict[int, Swap] = {}                                     # device block -> the swap that brings it
        self.awaited: list[Swap] = []                                           # that the forward pass of this step waits for
        self.counts.update(swap_ins=0, swap_outs=0, bytes_in=0, bytes_out=0, transfer_errors=0)
        self.load_link.speed()                                                  # measured once; then a running median

    def step(self) -> bool:
        """Chapter 02's, around what the link has done meanwhile."""
        with self.stepping:
            self.settle()
            self.write_back(len(self.running) - len(self.pool.free))            # each who runs may need a block
            steps, more = self.counts["steps"], super().step()
            if more and self.counts["steps"] == steps:
                self.idle()
            return more

    def idle(self):
        """Nobody can go on before something arrives."""
        next((transfer.join() for swap in self.swaps for transfer in swap.transfers if not transfer.ready), None)

    def write_back(self, count: int, hits: set[int] = frozenset()) -> bool:
        """Copy out what would be lost of the next `count` blocks to be evicted -> whether to wait for it. Here nothing is."""
        return False

    def load(self, swap: Swap) -> bool:
        """Issue the copies of all layers -> whether the link took them."""
        runs = adjacent(swap.device_blocks, swap.host_blocks)
        for index in range(len(self.model.layers)):
            into = [self.pool.kv[index, :, first:first + count] for first, _, count in runs]            # [2, count, ...] each
            out_of = [self.host.kv[first:first + count, index].transpose(0, 1) for _, first, count in runs]     # [2, count, ...]
            self.send(swap, self.load_link, into, out_of, f"layer {index}")
        if swap.refused:
            for transfer in swap.transfers:                                     # nothing may come into these blocks any more
                transfer.join()
            self.settle_swap(swap)
            return False
        self.counts.update(swap_ins=len(swap.device_blocks), bytes_in=sum(transfer.bytes for transfer in swap.transfers))
        return True

    def send(self, swap: Swap, link: Link, dst, src, label: str):
        try:
            swap.transfers += [] if swap.refused else [link.copy(dst, src, label)]
        except Exception:
            swap.refused = True

    def arrival(self, request: Request):
        """Wait for what is on its way to the request: while others compute, outside, where it delays nobody (a generator, as
        `restore` is); alone, it begins and waits layer by layer."""
        while not all(swap.ready for swap in request.swap_ins):
            if self.others_compute(request):
                yield
            elif self.overlap:
                return
            else:
                for transfer in (transfer for swap in request.swap_ins for transfer in swap.transfers):
                    transfer.join()

    def compute(self, work):
        self.awaited = list(dict.fromkeys(swap for request, _ in work for swap in request.swap_ins if swap in self.swaps))
        super().compute(work)

    def tap(self, index: int, hidden, batch):
        """Before a layer is computed, its blocks must have arrived."""
        for swap in self.awaited:
            transfer = swap.transfers[index]
            if transfer.ready:
                transfer.wait()                                                 # raises if it failed
            else:
                began = self.clock.mark()
                transfer.wait()
                self.stalls += began, self.clock.mark()

    def make_room(self, request: Request):
        """Chapter 02's; but before somebody is preempted, wait for a block that is on its way out."""
        while self.lacks_slot(request) and not self.spare_blocks() and (
                swap := next((swap for swap in self.swaps if not swap.inward), None)):
            for transfer in swap.transfers:
                transfer.join()
            self.settle()
        super().make_room(request)

    def spare_blocks(self) -> int:
        """Blocks that may be taken for a next token without waiting."""
        return self.pool.available

    # What is on its way

    def settle(self) -> list[Swap]:
        """Let go of the blocks of all swaps that are over -> these swaps."""
        over = [swap for swap in self.swaps if swap.ready]
        for swap in over:
            self.settle_swap(swap)
        return over

    def settle_swap(self, swap: Swap):
        self.swaps.remove(swap)
        if swap.inward:
            for block in swap.device_blocks:
                del self.arriving[block]
            if swap.failed:
                self.abandon(swap)
            else:
                self.load_link.note(swap.transfers)
        else:
            self.counts["transfer_errors"] += swap.failed
            self.kept(swap)
            for transfer in swap.transfers if swap.timeline else ():
                swap.timeline.add("save", transfer.label, *transfer.span())
        self.let_go(swap)

    def kept(self, swap: Swap):
        """A swap out is over, well or not."""

    def let_go(self, swap: Swap):
        """Give back the references that the swap holds."""
        self.host.release(swap.host_blocks)
        self.pool.release(swap.device_blocks)

    def abandon(self, swap: Swap):
        """What a swap in was to bring is lost; whoever counted on it computes it."""
        if swap.abandoned:
            return
        swap.abandoned = True
        self.counts["transfer_errors"] += 1
        self.lose(swap)
        for request in reversed(self.running):
            if swap in request.swap_ins:
                if not request.answer.tokens:                                   # nothing was found after all
                    request.source, request.choice = None, None
                    self.counts.subtract(request.blocks)
                self.preempt(request)

    def lose(self, swap: Swap):
        """Nobody may find what a swap in was to bring, on either side."""

    def fail(self, work, error: Exception):
        if not isinstance(error, TransferError):
            return super().fail(work, error)
        for swap in self.awaited:
            if error.transfer in swap.transfers:
                self.abandon(swap)

    def free(self, request: Request):
        super().free(request)
        if not request.answer.finish_reason:                                    # else its result has them already
            self.draw_loads(request)
        request.swap_ins = []

    def flush(self):
        """Wait until nothing is on its way."""
        with self.stepping:
            for transfer in (transfer for swap in self.swaps for transfer in swap.transfers):
                transfer.join()
            self.settle()

    def seconds_to_load(self, blocks: int, behind: int | None = None) -> float:
        """Estimate for so many blocks, with `behind` bytes queued before them; by default those on their way in."""
        behind = self.load_link.backlog() if behind is None else behind
        return (behind + blocks * self.pool.kv[:, :, 0].nbytes) / self.load_link.speed()

    def worth_keeping(self, blocks: int) -> bool:
        """Whether so many blocks would be loaded if they were asked for again."""
        return self.seconds_to_load(blocks, behind=0) <= self.seconds_to_compute(0, blocks * self.pool.block_size)

    def draw_loads(self, request: Request):
        for transfer in (transfer for swap in request.swap_ins for transfer in swap.transfers if transfer.ready):
            request.timeline.add("load", transfer.label, *transfer.span())

    def counters(self) -> dict:
        counters, host = super().counters(), self.host
        return dict(counters, cpu_evictions=host.counts["evictions"], cpu_blocks=host.size,
                    cpu_blocks_free=len(host.free), cpu_blocks_cached=len(host.cached),
                    cpu_blocks_referenced=host.size - host.available, swaps_under_way=len(self.swaps), link=str(self.load_link))

    # What the page shows, and does

    def tiers(self) -> list[live.Tier]:
        swaps = list(self.swaps)
        return [self.device_tier([block for swap in swaps for block in swap.device_blocks]),
                self.host_tier([block for swap in swaps for block in swap.host_blocks])]

    def host_tier(self, in_flight) -> live.Tier:
        return live.of_pool("host", f"Host memory: KV blocks of {self.host.block_size} tokens", self.host, in_flight=in_flight,
                            block_bytes=self.host.kv[:1].nbytes)

    def drawn(self, request: Request):
        names, count = dict(gpu_hits="g", cpu_hits="c", storage_hits="s", misses="m"), Counter(request.blocks)
        legend = dict(g="found on the device", c="came from host memory", s="came from storage", m="computed")
        cells = [(letter, legend[letter]) for what, letter in names.items() for _ in range(count[what])]
        return figure.Cells("The blocks of the prompt", [("", cells)],
                            {letter: words for letter, words in legend.items() if (letter, words) in cells})

    def evict_cached(self) -> int:
        """Chapter 02's; what would be lost is copied out first."""
        with self.stepping:
            cached = len(self.pool.cached)
            self.write_back(cached)
            self.flush()
            super().evict_cached()
            return cached


class Engine(SwappingEngine):
    """Chapter 02's engine over two tiers, which find blocks by the same prefixes."""
    Request = Request
    fields = {**paged.Engine.fields, "offload_after": (lambda v: isinstance(v, bool), "true or false")}

    def __init__(self, model, tokenizer, end_tokens, *options, cpu_blocks: int | None = None, **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        pool = self.pool
        cpu_blocks = host_pool_size(pool, cpu_blocks, 4 * pool.size, pool.kv[:, :, 0].nbytes,
                                    f"host blocks of {pool.block_size} tokens", "--cpu-blocks")
        self.host = HostPool(model.config, cpu_blocks, pool.block_size, model.dtype, model.device)
        self.leaving: set[paged.Prefix] = set()                                 # prefixes on their way out
        self.written_back = WeakSet()                                           # prefixes that went out before an eviction
        self.counts.update(gpu_hits=0, cpu_hits=0, misses=0, recomputed_hits=0)

    # Restore: swap in

    def restore(self, request: Request):
        """Chapter 02's verb: find the prefix block by block, on the device or else in host memory, and swap in what the
        device lacks, if that is faster than to compute it."""
        pool, host, size, table = self.pool, self.host, self.pool.block_size, request.table

        # 1. Where is each block? The table begins with `saved` blocks that the device holds
        first = end = request.saved
        on_device, on_host = [], []                                             # (index in the table, block)
        while end < (len(request.tokens) - 1) // size:
            prefix = self.prefix(request, end)
            if (block := pool.find(prefix)) is not None:                        # behind a gap
                on_device.append((end, block))
            elif (block := host.find(prefix)) is not None:
                on_host.append((end, block))
            else:
                break
            end += 1

        # 2. Load or compute? All or nothing: a token costs more to compute the later it stands, and to load it does not, so if
        # loading some of them pays, loading all of them pays more
        choice = None
        if on_host:
            load, compute = self.seconds_to_load(len(on_host)), self.seconds_to_compute(first * size, end * size)
            chosen = "load" if load <= compute and self.swap_in(request, on_host) else "recompute"
            choice = dict(chosen=chosen, load_ms=round(load * 1e3, 3),
                          recompute_ms=round(compute * 1e3, 3) if self.prefills else None)      # None: not measured yet
            if chosen == "recompute":
                self.counts["recomputed_hits"] += len(on_host) if request.source is None else 0
                self.load_link.wear_out()                                       # the link may be faster the next time
                end, on_device = first, []
        for index, block in on_device:                                          # takes the place of an empty one
            self.replace(request, index, block)

        # 3. What was found
        request.saved, request.computed = end, end * size
        request.swap_ins = list(dict.fromkeys(self.arriving[block] for block in table[:end] if block in self.arriving))
        if request.source is None:
            cpu_hits = sum(block in self.arriving for block in table[:end])     # also those that another waits for
            request.blocks, request.choice = dict(gpu_hits=end - cpu_hits, cpu_hits=cpu_hits, misses=len(table) - end), choice
            request.source = ("cpu_hit" if cpu_hits == end else "mixed") if cpu_hits else "gpu_hit" if end else "miss"
            request.cached_tokens = request.computed
            self.counts.update(request.blocks)

        # 4. Wait for it, or begin
        yield from self.arrival(request)

    def swap_in(self, request: Request, blocks: list[tuple[int, int]]) -> bool:
        """Issue the copies of all layers of (index in the request's table, host block) -> whether the link took them. Others
        find the blocks on the device from now on, and wait for them too."""
        swap = Swap(True, [request.table[index] for index, _ in blocks], [block for _, block in blocks],
                    self.prefix(request, blocks[-1][0]), request.timeline)
        self.swaps.append(swap)
        for (index, host_block), device_block in zip(blocks, swap.device_blocks):
            self.pool.share(device_block)
            self.host.share(host_block)
            self.pool.register(device_block, self.prefix(request, index))
            self.arriving[device_block] = swap
            self.written_back.discard(self.prefix(request, index))
        return self.load(swap)

    # Save: swap out

    def finish(self, request: Request, outcome, counted: str):
        if request.outcome is None and request in self.running and request.offload_after:
            try:
                full = [(request.table[index], self.prefix(request, index)) for index in range(request.saved)]
                if full and self.worth_keeping(len(full)):
                    self.swap_out(full, request.timeline)
            except Exception:                                                   # the request is answered all the same
                self.counts["transfer_errors"] += 1
        super().finish(request, outcome, counted)

    def swap_out(self, blocks: list[tuple[int, paged.Prefix]], timeline: Timeline | None = None, before_eviction=False) -> bool:
        """Copy (device block, prefix), in the order of their chain, to host memory, unless they are there or on their way ->
        whether there was anything to copy. What finds no room is left out, the end of the chain first."""
        pool, host = self.pool, self.host
        chains = set()                                                          # that these blocks belong to, from their roots on
        for _, prefix in reversed(blocks):
            if prefix not in chains:
                host.touch(prefix)
            while prefix is not None and prefix not in chains:
                chains.add(prefix)
                prefix = prefix.parent
        already = [block for prefix in chains if (block := host.find(prefix)) is not None]      # not to go for their own ends
        room = host.available - sum(host.references[block] == 0 for block in already)
        lacking = [(block, prefix) for block, prefix in blocks
                   if host.find(prefix) is None and prefix not in self.leaving and block not in self.arriving]
        after = [block for _, prefix in blocks if (block := host.find(prefix)) is not None][-1:]
        for (device_block, prefix), host_block in zip(lacking, host.allocate(min(len(lacking), room), after)):
            swap = Swap(False, [device_block], [host_block], prefix, timeline, before_eviction)
            self.swaps.append(swap)
            pool.share(device_block)
            self.leaving.add(prefix)
            self.send(swap, self.save_link, host.kv[host_block], pool.kv[:, :, device_block], f"block {device_block}")
            if not swap.refused:
                self.counts.update(swap_outs=1, bytes_out=host.kv[host_block].nbytes)
        return bool(lacking) and room > 0

    def find_room(self, request: Request, hits: list[int], empty: int) -> bool:
        """Blocks that the device would evict for this request leave for the host first, if the host lacks them."""
        if not super().find_room(request, hits, empty):
            return False
        if full := (len(request.tokens) - 1) // self.pool.block_size:
            self.host.touch(self.prefix(request, full - 1))                     # what it is about to load is not the next to go
        for swap in self.swaps:
            if not set(hits).isdisjoint(swap.device_blocks):                    # in use again, so not the next to be evicted
                swap.before_eviction = False
        return not self.write_back(empty - len(self.pool.free), set(hits))

    def write_back(self, count: int, hits: set[int] = frozenset()) -> bool:
        """Swap out those of the next `count` blocks to be evicted that the host lacks -> whether there were any. Once each,
        even if the copy fails: a broken link or a tiny host must not keep a request waiting for ever."""
        victims = islice((block for block in self.pool.cached if block not in hits), max(0, count))
        lacking = [(block, prefix) for block in victims if (prefix := self.pool.prefixes[block]) not in self.written_back
                   and self.host.find(prefix) is None]
        if not lacking or not self.worth_keeping(max(blocks_until(prefix) for _, prefix in lacking)):
            return False
        self.written_back.update(prefix for _, prefix in lacking)
        return self.swap_out(lacking[::-1], before_eviction=True)                        # the last of a chain is evicted first

    # What is over

    def kept(self, swap: Swap):
        self.leaving.remove(swap.prefix)
        if not swap.failed:
            self.host.register(swap.host_blocks[0], swap.prefix)

    def settle(self) -> list[Swap]:
        over = super().settle()
        for prefix in {swap.timeline or swap: swap.prefix for swap in over if not swap.before_eviction}.values():
            self.host.touch(prefix)                                             # of each request the last, and so all before it
            self.pool.touch(prefix)
        for swap in over:
            if swap.before_eviction and swap.device_blocks[0] in self.pool.cached:       # it was next to be evicted, and is again
                self.pool.cached.move_to_end(swap.device_blocks[0], last=False)
        return over

    def lose(self, swap: Swap):
        for block in swap.host_blocks:
            self.host.forget(block)
        for block in swap.device_blocks:
            self.pool.forget(block)

    def result(self, request: Request) -> Result:
        self.draw_loads(request)
        return Result(**vars(super().result(request)), blocks=request.blocks, choice=request.choice, link=str(self.load_link))

    def ways(self, prompt: list[int], new: int, stack) -> dict:
        blocks = self.pool.needed(len(prompt) + new)
        small = self.small(blocks, cpu_blocks=blocks, bytes_per_second=self.load_link.bytes_per_second)

        def from_host(overlap: bool) -> Result:
            empty(small)
            small.overlap = overlap
            return ask()

        def ask() -> Result:
            result = paged.answer(small, prompt=prompt, max_tokens=new)
            small.flush()
            return result
        return {baseline.RECOMPUTE: paged.chapter_01(self, prompt, new), "from host memory": lambda: from_host(True),
                "the same, all layers first": lambda: from_host(False), "on the device": ask}

    def check_integrity(self):
        """Both pools agree with the tables and with what is on its way. Raises AssertionError."""
        tables = [request.table for request in self.running]
        self.pool.check_integrity(tables + [swap.device_blocks for swap in self.swaps])
        self.host.check_integrity([swap.host_blocks for swap in self.swaps])
        assert self.arriving == {block: swap for swap in self.swaps if swap.inward for block in swap.device_blocks}
        assert self.leaving == {swap.prefix for swap in self.swaps if not swap.inward}


def blocks_until(prefix: paged.Prefix) -> int:
    """How many blocks a chain has up to this prefix."""
    count = -1                                                                  # the salt's root is none
    while prefix.parent is not None:
        count, prefix = count + 1, prefix.parent
    return count


def adjacent(device_blocks: list[int], host_blocks: list[int]) -> list[tuple[int, int, int]]:
    """-> (first device block, first host block, count) of runs that are adjacent in both pools."""
    runs = []
    for device_block, host_block in zip(device_blocks, host_blocks, strict=True):
        if runs and (device_block, host_block) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((device_block, host_block, 1))
    return runs


# 3. What demos and benchmarks share ------------------------------------------------------------------------------

def empty(engine: Engine):
    """The device evicts all that it has cached, and nothing of it is copied out first."""
    paged.Engine.evict_cached(engine)
