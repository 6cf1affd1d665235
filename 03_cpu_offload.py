"""Chapter 03: a second tier in host memory, and the link between the two.

The problem. Device memory holds the KV blocks of a few conversations. When the pool of chapter 02 is full, cached
blocks are dropped, and a conversation that comes back is computed again, although host memory is many times larger
and stands idle.

The mechanism. A second pool in pinned host memory. When a request finishes, its full blocks are copied out in the
background (swap out); when a request comes whose prefix the device has lost, they are copied back in (swap in): a
copy instead of a forward pass. All layers' copies are issued at once, and the prefill of the new tokens waits at each
layer only for that layer, so that one layer is computed while the next is on its way. Both tiers find blocks by the
same prefixes. The engine measures its link and its prefill, and loads only what arrives sooner than it is computed.

New against chapter 02: HostPool, Swap, the link (common/link.py), and the choice between loading and computing. `save`
registers blocks as before, `finish` swaps them out, and `restore` swaps them in. Two rules keep the tokens right, and
the tests break each of them to see the damage: what is on its way in must not be overwritten or read before it is
there, and what is on its way out must not be reused before it is gone. Here a Swap holds a reference to every block
that it touches, in both pools, until all of it has arrived.

Sources: two-tier KV offloading as in "KV Cache CPU Offloading" (part 12 of a series on vLLM); layer-by-layer loading as in
CachedAttention (Gao et al., USENIX ATC '24, section 3.2). `source` is a word of the first: gpu_hit, cpu_hit, miss, or mixed.

    python 03_cpu_offload.py --demo
    python 03_cpu_offload.py --prompt "What is swapping?" --gpu-blocks 64 --cpu-blocks 256
    python 03_cpu_offload.py                               # the server, on http://127.0.0.1:5000
"""
import importlib
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import torch

from common import app, checkpoint
from common import link as links
from common.app import BadRequest
from common.link import Link, Transfer, TransferError
from common.timeline import Timeline

baseline, paged = importlib.import_module("01_baseline"), importlib.import_module("02_paged_kv")

# 1. Data structures ----------------------------------------------------------------------------------------------

class HostPool(paged.BlockPool):
    """KV blocks in host memory, pinned where there is a GPU. They are free, cached or referenced as on the device; who
    references them is a Swap."""

    def memory(self, config, blocks: int, block_size: int, dtype, device):
        """Page-first: all layers of a block lie together, so that it goes out in one copy."""
        shape = (blocks, config.num_hidden_layers, 2, block_size, config.num_key_value_heads, config.head_dim)
        if device.type == "cuda":
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)         # [blocks, L, 2, block_size, KVH, hd]
            except RuntimeError as error:
                print(f"The host pool cannot be pinned ({str(error).splitlines()[0]}). Every copy now goes through a buffer of "
                      "the driver's: about half as fast, and the host waits for it.", file=sys.stderr)
        return torch.empty(shape, dtype=dtype)                                  # [blocks, L, 2, block_size, KVH, hd]


@dataclass(eq=False)
class Swap:
    """Blocks on their way between the tiers. It holds a reference to each of them until all have arrived."""
    inward: bool
    timeline: Timeline | None = None                                            # who asked for it
    device_blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)                     # inward one a layer, outward one a block
    leaving: list[tuple[int, paged.Prefix]] = field(default_factory=list)       # outward: host block, and what it will hold
    failed: bool = False

    @property
    def ready(self) -> bool:
        return all(transfer.ready for transfer in self.transfers)


@dataclass(eq=False)
class Request(paged.Request):
    offload_after: bool = True                                                  # swap its blocks out when it is over
    blocks: dict = field(default_factory=dict)                                  # of its prompt: gpu_hits, cpu_hits, misses
    choice: dict | None = None                                                  # load or recompute, and the two estimates
    swap_ins: list[Swap] = field(default_factory=list)                          # that bring blocks of its table
    made_way: bool = False                                                      # blocks have left the device for it


@dataclass
class Result(baseline.Result):
    blocks: dict                   # of the prompt: gpu_hits, cpu_hits, misses
    choice: dict | None            # chosen ("load" or "recompute"), load_ms, recompute_ms; None if the host held nothing more
    link: str                      # what the blocks came over, and how fast it is

    def summary(self) -> str:
        found = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in self.blocks.items())
        chosen = "\nChosen: {chosen}; estimates: {load_ms:.1f} ms to load, {recompute_ms:.1f} ms to recompute ({link})"
        return f"{super().summary()}\nBlocks: {found}{chosen.format(**self.choice, link=self.link) if self.choice else ''}"


# 2. The engine ---------------------------------------------------------------------------------------------------

def host_pool_size(pool: paged.BlockPool, blocks: int | None) -> int:
    """-> `blocks`, or by default four times as many as the device has, but no more than a quarter of free memory. Raises
    ModelError if they do not fit."""
    block_bytes, free = pool.kv[:, :, 0].nbytes, checkpoint.free_host_memory()
    if pool.kv.device.type == "cpu":                                            # it is not touched yet, and so counts as free
        free = max(0, free - pool.kv.nbytes)
    if blocks is None:
        blocks = int(min(4 * pool.size, free * 0.25 // block_bytes))
    if blocks * block_bytes > free:
        raise checkpoint.ModelError(
            f"{blocks} host blocks of {pool.block_size} tokens take {blocks * block_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB "
            f"are free; choose at most --cpu-blocks {int(free // block_bytes)}.")
    return blocks


class Engine(paged.Engine):
    """Chapter 02's engine over two tiers. `bytes_per_second` is the modelled link's, without a GPU; without `overlap` a
    request waits for all of its blocks before it computes."""
    Request = Request
    fields = {**paged.Engine.fields, "offload_after": (lambda v: isinstance(v, bool), "true or false")}

    def __init__(self, model, tokenizer, end_tokens, *options, cpu_blocks: int | None = None,
                 bytes_per_second: float | None = None, overlap: bool = True, **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        pool, self.overlap = self.pool, overlap
        self.host = HostPool(model.config, host_pool_size(pool, cpu_blocks), pool.block_size, model.dtype, model.device)
        bytes_per_second = bytes_per_second or links.bandwidth(model)
        self.load_link, self.save_link = (Link(lane, self.clock, bytes_per_second) for lane in ("load", "save"))
        self.swaps: list[Swap] = []                                             # under way, oldest first
        self.arriving: dict[int, Swap] = {}                                     # device block -> the swap that brings it
        self.leaving: set[paged.Prefix] = set()                                 # what is being saved
        self.prefills: deque[tuple[float, float]] = deque(maxlen=16)            # FLOP and seconds of the last ones
        self.awaited: list[Swap] = []                                           # that the forward pass of this step waits for
        self.counts.update(gpu_hits=0, cpu_hits=0, misses=0, swap_ins=0, swap_outs=0, bytes_in=0, bytes_out=0,
                           recomputed_hits=0, transfer_errors=0)
        self.load_link.speed()                                                  # measured once; from now on a running median

    def step(self) -> bool:
        """Chapter 02's, around what the link has done meanwhile."""
        with self.stepping:
            self.settle()
            self.clean(len(self.running) - len(self.pool.free))                 # each who runs may need a block
            steps, more = self.counts["steps"], super().step()
            if more and self.counts["steps"] == steps:                          # nobody can go on before something arrives
                next((transfer.join() for swap in self.swaps for transfer in swap.transfers if not transfer.ready), None)
            return more

    # Restore: swap in

    def restore(self, request: Request):
        """Chapter 02's verb: find the prefix block by block, on the device or else in host memory, and swap in what the
        device lacks, if that is faster than to compute it."""
        pool, host, size, table = self.pool, self.host, self.pool.block_size, request.table

        # 1. Where is each block? The table begins with `saved` blocks that the device holds
        on_device, on_host, end = [], [], request.saved                         # (index in the table, block)
        while end < (len(request.tokens) - 1) // size:
            prefix = self.prefix(request, end)
            if (block := pool.find(prefix)) is not None:
                on_device.append((end, block))
            elif (block := host.find(prefix)) is not None:
                on_host.append((end, block))
            else:
                break
            end += 1

        # 2. Load or compute? It is all or nothing: loading grows linearly, computing faster, so if any part is worth it all is
        if on_host:
            first, chosen = on_host[0][0], "load"
            load, compute = self.seconds_to_load(len(on_host)), self.seconds_to_compute(first * size, end * size)
            if load > compute:
                self.counts["recomputed_hits"] += len(on_host)
                chosen, end, on_host = "recompute", first, []
                on_device = [(index, block) for index, block in on_device if index < first]
            request.choice = dict(chosen=chosen, load_ms=load * 1e3, recompute_ms=compute * 1e3)

        # 3. Blocks that the device holds behind a gap take the places of empty ones; the others are swapped in
        for index, block in on_device:
            pool.share(block)
            pool.release([table[index]])
            table[index] = block
        if on_host:
            self.swap_in([(table[index], block, self.prefix(request, index)) for index, block in on_host], request)
        request.saved, request.computed = end, end * size
        request.swap_ins = list(dict.fromkeys(self.arriving[block] for block in table[:end] if block in self.arriving))
        if request.source is None:
            found = dict(gpu_hits=end - len(on_host), cpu_hits=len(on_host), misses=len(table) - end)
            request.blocks, request.cached_tokens = found, request.computed
            request.source = ("mixed" if found["gpu_hits"] else "cpu_hit") if on_host else "gpu_hit" if end else "miss"
            self.counts.update(found)

        # 4. While others decode it waits outside, where it delays nobody; alone, it begins and waits layer by layer
        while not all(swap.ready for swap in request.swap_ins):
            if any(other is not request and not other.restoration for other in self.running):
                yield
            elif self.overlap:
                return
            else:
                for transfer in (transfer for swap in request.swap_ins for transfer in swap.transfers):
                    transfer.join()

    def swap_in(self, blocks: list[tuple[int, int, paged.Prefix]], request: Request):
        """Issue the copies of all layers of (device block, host block, prefix). Others find the blocks from now on, and
        wait for them too."""
        swap = Swap(inward=True, timeline=request.timeline)
        self.swaps.append(swap)
        for device_block, host_block, prefix in blocks:
            self.pool.share(device_block)
            self.host.share(host_block)
            self.pool.register(device_block, prefix)
            swap.device_blocks.append(device_block)
            swap.host_blocks.append(host_block)
            self.arriving[device_block] = swap
        runs = adjacent(swap.device_blocks, swap.host_blocks)
        for index in range(len(self.model.layers)):
            into = [self.pool.kv[index, :, first:first + count] for first, _, count in runs]             # [2, count, ...] each
            out_of = [self.host.kv[first:first + count, index].transpose(0, 1) for _, first, count in runs]     # [2, count, ...]
            swap.transfers.append(self.load_link.copy(into, out_of, f"layer {index}"))
        self.counts.update(swap_ins=len(blocks), bytes_in=sum(transfer.bytes for transfer in swap.transfers))

    def compute(self, work):
        """Chapter 02's, which also measures how fast prefill is."""
        self.awaited = list(dict.fromkeys(swap for request, _ in work for swap in request.swap_ins if swap in self.swaps))
        operations = sum(self.operations(request.computed, request.computed + count) for request, count in work)
        prefill = sum(count for _, count in work) > len(work) and all(swap.ready for swap in self.awaited)
        steps, began = self.counts["steps"], time.perf_counter()
        super().compute(work)
        if prefill and self.counts["steps"] > steps:
            self.prefills.append((operations, time.perf_counter() - began))

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

    # Save: swap out

    def finish(self, request: Request, outcome, counted: str):
        if request.outcome is None and request in self.running and request.offload_after:
            try:
                full = [(request.table[index], self.prefix(request, index)) for index in range(request.saved)]
                if self.worth_keeping(len(full)):
                    self.swap_out(full, Swap(inward=False, timeline=request.timeline))
            except Exception:                                                   # the request is answered all the same
                self.counts["transfer_errors"] += 1
        super().finish(request, outcome, counted)

    def swap_out(self, blocks: list[tuple[int, paged.Prefix]], swap: Swap) -> bool:
        """Copy (device block, prefix), in the order of their chain, to host memory, except what is there already or on its way
        -> whether there was anything to copy. What finds no room is left out, the end of the chain first."""
        held = {prefix: block for _, prefix in blocks if (block := self.host.find(prefix)) is not None}
        for block in held.values():                                             # the newest now, and safe from the next lines
            self.host.share(block)
        self.swaps.append(swap)
        for device_block, prefix in blocks:
            if prefix in held:
                swap.host_blocks.append(held[prefix])
            elif prefix not in self.leaving and device_block not in self.arriving and self.host.available:
                host_block, = self.host.allocate(1, swap.host_blocks[-1] if swap.host_blocks else None)
                self.pool.share(device_block)
                self.leaving.add(prefix)
                swap.host_blocks.append(host_block)
                swap.device_blocks.append(device_block)
                swap.leaving.append((host_block, prefix))
                swap.transfers.append(self.save_link.copy(
                    self.host.kv[host_block], self.pool.kv[:, :, device_block], f"block {device_block}"))
        self.counts.update(swap_outs=len(swap.transfers), bytes_out=sum(transfer.bytes for transfer in swap.transfers))
        return bool(swap.transfers)

    def has_room(self, request: Request, hits: list[int], empty: int) -> bool:
        """Blocks that the device would evict for this request leave for the host first, if the host lacks them."""
        if not super().has_room(request, hits, empty):
            return False
        if not request.made_way:                                                # once; a tiny host could take them for ever
            request.made_way = True
            return not self.clean(empty - len(self.pool.free))
        return True

    def clean(self, count: int) -> bool:
        """Swap out those of the next `count` blocks to be evicted that the host lacks -> whether there were any."""
        next_out = [(block, self.pool.prefixes[block]) for block in islice(self.pool.cached, max(0, count))]
        lacking = [(block, prefix) for block, prefix in next_out if self.host.find(prefix) is None]
        return bool(lacking) and self.worth_keeping(1) and self.swap_out(lacking, Swap(inward=False))

    # What is on its way

    def settle(self):
        """Let go of the blocks whose transfers are over."""
        for swap in [swap for swap in self.swaps if swap.ready]:
            self.swaps.remove(swap)
            failed = [transfer.error is not None for transfer in swap.transfers]
            if swap.inward:
                for block in swap.device_blocks:
                    del self.arriving[block]
                if any(failed):
                    self.abandon(swap)
            else:
                for (block, prefix), lost in zip(swap.leaving, failed):
                    self.leaving.remove(prefix)
                    if not lost:
                        self.host.register(block, prefix)
                self.counts["transfer_errors"] += sum(failed)
                for transfer in swap.transfers if swap.timeline else ():
                    swap.timeline.add("save", transfer.label, *transfer.span())
            self.host.release(swap.host_blocks)
            self.pool.release(swap.device_blocks)
            if not swap.inward and swap.timeline is None:                       # they were next to be evicted, and are again
                for block in reversed(swap.device_blocks):
                    if block in self.pool.cached:
                        self.pool.cached.move_to_end(block, last=False)

    def abandon(self, swap: Swap):
        """What a swap in was to bring is lost; whoever counted on it computes it."""
        if swap.failed:
            return
        swap.failed = True
        self.counts["transfer_errors"] += 1
        for block in swap.host_blocks:
            self.host.forget(block)
        for block in swap.device_blocks:
            self.pool.forget(block)
        for request in reversed(self.running):
            if swap in request.swap_ins:
                request.source = None                                           # it begins anew
                self.preempt(request)

    def fail(self, work, error: Exception):
        if not isinstance(error, TransferError):
            return super().fail(work, error)
        for swap in self.awaited:
            if error.transfer in swap.transfers:
                self.abandon(swap)

    def free(self, request: Request):
        super().free(request)
        request.swap_ins, request.made_way = [], False

    def flush(self):
        """Wait until nothing is on its way."""
        with self.stepping:
            for transfer in (transfer for swap in self.swaps for transfer in swap.transfers):
                transfer.join()
            self.settle()

    # Load or compute?

    def seconds_to_load(self, blocks: int, behind: int | None = None) -> float:
        """Estimate for so many blocks, `behind` so many bytes; by default those that are on their way in."""
        behind = self.load_link.backlog() if behind is None else behind
        return (behind + blocks * self.pool.kv[:, :, 0].nbytes) / self.load_link.speed()

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate for the prefill of tokens `start` to `end`, as fast as the last prefills were."""
        operations, seconds = map(sum, zip(*self.prefills)) if self.prefills else (1.0, float("inf"))
        return self.operations(start, end) * seconds / operations

    def worth_keeping(self, blocks: int) -> bool:
        """Whether so many blocks would ever be loaded again."""
        return 0 < self.seconds_to_load(blocks, behind=0) <= self.seconds_to_compute(0, blocks * self.pool.block_size)

    def operations(self, start: int, end: int) -> float:
        """Floating-point operations of all layers for tokens `start` to `end`: two for each weight, and in attention two for
        each number of a key and of a value that a head of a query sees."""
        config, tokens = self.model.config, end - start
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        seen = tokens * (start + end + 1) / 2                                   # pairs of a token and one that it sees
        return config.num_hidden_layers * (2 * weights * tokens + 4 * heads * seen)

    def fork(self, request: Request) -> list[Request]:
        forks = super().fork(request)
        for fork in forks:
            fork.blocks, fork.choice = request.blocks, request.choice
        return forks

    def result(self, request: Request) -> Result:
        for transfer in (transfer for swap in request.swap_ins for transfer in swap.transfers):
            request.timeline.add("load", transfer.label, *transfer.span())
        return Result(**vars(super().result(request)), blocks=request.blocks, choice=request.choice, link=str(self.load_link))

    def counters(self) -> dict:
        if self.stepping.acquire(blocking=False):                               # who asks may see what has arrived
            try:
                self.settle()
            finally:
                self.stepping.release()
        host = self.host
        return dict(super().counters(), cpu_evictions=host.counts["evictions"], cpu_blocks=host.size,
                    cpu_blocks_free=len(host.free), cpu_blocks_cached=len(host.cached),
                    cpu_blocks_referenced=host.size - host.available, swaps_under_way=len(self.swaps), link=str(self.load_link))

    def check_integrity(self):
        """Both pools agree with the tables and with what is on its way. Raises AssertionError."""
        tables = [request.table for request in self.running]
        self.pool.check_integrity(tables + [swap.device_blocks for swap in self.swaps])
        self.host.check_integrity([swap.host_blocks for swap in self.swaps])
        assert self.arriving == {block: swap for swap in self.swaps if swap.inward for block in swap.device_blocks}
        assert self.leaving == {prefix for swap in self.swaps for _, prefix in swap.leaving}


def adjacent(device_blocks: list[int], host_blocks: list[int]) -> list[tuple[int, int, int]]:
    """-> (first device block, first host block, count) of runs that are adjacent in both pools."""
    runs = []
    for device_block, host_block in zip(device_blocks, host_blocks, strict=True):
        if runs and (device_block, host_block) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((device_block, host_block, 1))
    return runs


# 3. The demo -----------------------------------------------------------------------------------------------------

ROUNDS = 5
SECRET, QUESTION = "The password of the safe is tiger.", "What is the password of the safe?"


def demo(engine: Engine, arguments):
    """Cold requests, repeats on the device, and a conversation that is forced out and comes back from host memory."""
    # 1. What is asked: questions behind one system prompt, and two long conversations of which the device holds one
    rng, size, new = random.Random(0), engine.pool.block_size, max(2, min(arguments.max_tokens, 16))
    blocks = arguments.gpu_blocks or engine.pool.needed(engine.context // 2)
    length = min(engine.context // 2, blocks * size) - 2 * new - 64             # of a conversation, its follow-up aside
    if length < 16:
        raise BadRequest(f"The demo's conversations do not fit into {blocks} blocks of {size} tokens; leave --gpu-blocks out or "
                         f"ask for at least {engine.pool.needed(2 * new + 80)}.")
    system = dict(role="system", content=document(engine, rng, min(96, length)))
    questions = [[system, dict(role="user", content=text)] for text in (
        "What is a KV cache?", "Where is the lamp?", "What is prefill?", "Where is the book?", "What is decode?")]
    first, second, third = ([dict(role="user", content=document(engine, rng, length, fact))] for fact in (SECRET, "", ""))
    fields = dict(max_tokens=new)

    # 2. It runs, and is compared with chapter 01, before anything is printed
    def ask(engine, messages, **more):
        run = paged.run_together(engine, [dict(fields, messages=messages, **more)])
        engine.flush()
        return run
    cold = [ask(engine, messages) for messages in questions[:3]]
    after_cold = engine.counters()
    repeats = [ask(engine, messages) for messages in questions[3:]]
    small = Engine(engine.model, engine.tokenizer, engine.end_tokens, blocks, size, engine.token_budget, cpu_blocks=3 * blocks,
                   bytes_per_second=engine.load_link.bytes_per_second)
    pressure = [ask(small, first), ask(small, second), ask(small, third)]
    before_return = small.counters()
    answer = pressure[0].requests[0].outcome.text
    follow_up = [*first, dict(role="assistant", content=answer), dict(role="user", content=QUESTION)]
    pressure.append(ask(small, follow_up))
    after_return = small.counters()
    cases, waited = {"miss": [], "gpu_hit": [], "cpu_hit": []}, []
    for number in range(ROUNDS + 1):
        for source, taken in cases.items():
            if source != "gpu_hit":
                empty(small)
            taken.append(ask(small, follow_up, **dict(cache_salt=str(number)) if source == "miss" else {}))
            if source == "miss":                                                # what the next one finds on the device
                empty(small)
                ask(small, follow_up)
        small.overlap = False
        empty(small)
        waited.append(ask(small, follow_up))
        small.overlap = True
    alone = baseline.Engine(engine.model, engine.tokenizer, engine.end_tokens)
    verified = paged.verify(alone, [*cold, *repeats, *pressure, *waited, *(run for runs in cases.values() for run in runs)])
    cases, waited = {source: runs[1:] for source, runs in cases.items()}, waited[1:]        # the first were the warm-up

    # 3. The three phases
    print(f"{engine.load_link}; {engine.pool.size} device blocks, {engine.host.size} host blocks\n\n"
          "Phase 1: cold requests behind one system prompt")
    rows = [row("cold", run) for run in cold]
    print(f"  then {after_cold['blocks_cached']} blocks cached on the device, {after_cold['cpu_blocks_cached']} on the host, "
          f"{after_cold['swap_outs']} swap-outs\n\nPhase 2: other questions behind the same prompt")
    rows += [row("repeat", run) for run in repeats]
    print(f"\nPhase 3: {blocks} device blocks, and conversations that take {', '.join(str(run.held) for run in pressure[:3])}")
    rows += [row("pressure", run) for run in pressure[:3]]
    print(f"  then {before_return['cpu_blocks_cached']} blocks cached on the host, {before_return['evictions']} evicted from the "
          f"device, and the first conversation goes on")
    rows.append(row("return", pressure[3]))
    print(f"  with {after_return['swap_ins'] - before_return['swap_ins']} swap-ins ({small.load_link})\n"
          f"  {QUESTION} - {pressure[3].requests[0].outcome.text}")

    # 4. What the three ways cost
    prompt = pressure[3].requests[0].answer.prompt_tokens
    print(f"\nTTFT of this follow-up question, {prompt} tokens of prompt (median of {ROUNDS}; {small.load_link})\n"
          "  source     cached    bytes in        TTFT")
    for source, runs in cases.items():
        request, times = runs[-1].requests[0], [run.requests[0].outcome.ttft_ms for run in runs]
        moved = request.blocks["cpu_hits"] * small.pool.kv[:, :, 0].nbytes
        rows.append(dict(source=request.source, cached_tokens=request.cached_tokens, bytes_in=moved, **paged.measured(
            "ttft_ms", times, f"{request.source:8} {request.cached_tokens:8} {moved / 1e6:8.1f} MB", "ms")))
    times = [run.requests[0].outcome.ttft_ms for run in waited]
    rows.append(dict(source=waited[-1].requests[0].source, overlap=False, **paged.measured(
        "ttft_ms", times, "waiting for all layers first", "ms")))
    saved = statistics.median(times) - statistics.median(run.requests[0].outcome.ttft_ms for run in cases["cpu_hit"])
    print(f"  Computing each layer as soon as its blocks are there saves {saved:.1f} ms of it.")
    last = cases["cpu_hit"][-1].requests[0]
    print(f"\nOne return from the host (digits: layers arriving; p: prefill, d: decode, b: blocks going out; {small.load_link})\n"
          f"{last.timeline.chart()}")
    return dict(link=dict(modelled=small.load_link.modelled, gbps=small.load_link.speed() / 1e9), verified=verified, rows=rows,
                counters=small.counters()), [run.requests[0].timeline for run in cases["cpu_hit"]]


def document(engine: Engine, rng, tokens: int, secret: str = "") -> str:
    """About so many tokens of facts; of passwords it says only `secret`."""
    sentences = paged.document(engine, rng, tokens).removeprefix("Read this: ").split(". ")
    return f"Read this: {secret} " + ". ".join(sentence for sentence in sentences if "password" not in sentence)


def empty(engine: Engine):
    """The device evicts all that it has cached, as if others had needed it."""
    with engine.stepping:
        while engine.pool.cached:
            engine.pool.evict()


def row(phase: str, run: paged.Run) -> dict:
    """Print one line, and return it."""
    request, = run.requests
    print(f"  {request.source:8}{request.cached_tokens:6} of {request.answer.prompt_tokens:5} prompt tokens cached   "
          f"TTFT {request.outcome.ttft_ms:6.1f} ms")
    return dict(phase=phase, source=request.source, cached_tokens=request.cached_tokens, text=request.outcome.text,
                prompt_tokens=request.answer.prompt_tokens, ttft_ms=request.outcome.ttft_ms, **request.blocks)


# 4. Main ---------------------------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    parser.add_argument("--cpu-blocks", type=app.bounded(int, 0, 1 << 26), metavar="N",
                        help="KV blocks in host memory (default: four times as many as on the device, within a quarter of it)")
    links.add_arguments(parser)


def make_engine(model, tokenizer, end_tokens, arguments) -> Engine:
    engine = Engine(model, tokenizer, end_tokens, arguments.gpu_blocks, arguments.block_size, arguments.token_budget,
                    arguments.max_running, cpu_blocks=arguments.cpu_blocks,
                    bytes_per_second=links.bandwidth(model, arguments.link, arguments.platform))
    for name, pool in (("KV pool", engine.pool), ("Host pool", engine.host)):
        print(f"{name}: {pool.size} blocks of {pool.block_size} tokens, {pool.size * pool.block_size} tokens, "
              f"{pool.kv.nbytes / 1e6:.1f} MB", file=sys.stderr)
    print(f"The host is reached over a {engine.load_link}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    app.main(__doc__, "03_cpu_offload", add_arguments, make_engine, demo)
