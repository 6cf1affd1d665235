"""Chapter 03: KV blocks in host memory, and the link between host and device.

The problem. Device memory holds the KV blocks of a few conversations. When the pool of chapter 02 is full, it
evicts cached blocks. A conversation that comes back is computed again, although host memory is many times
larger and idle.

The mechanism. This chapter adds a second block pool, in pinned host memory. Each device block is copied to it
in the background as soon as it is full, so that a later eviction need not wait for a copy. When a request
arrives whose prefix is no longer on the device, the blocks of the prefix are copied back layer by layer. The
copy replaces the forward pass over the prefix.

If other requests can compute while the blocks are copied, they do, and this request joins them when all of
its layers have arrived. If none can, the forward pass of the new question starts at once, one layer
behind the copies: layer l is computed while layer l + 1 is copied. The time to first token (TTFT) is then the
slower of copying and computing, plus one layer of the faster one. Without the overlap it would be their sum:

    TTFT = max(link, compute) + one layer of the other

    link: the bytes of the history / the bandwidth      compute: the forward pass of the question

Loading pays if the link delivers a token's K and V faster than the processor computes them. Both speeds are
measured. A prefix is loaded if loading is estimated to take at most 0.8 of the time to compute it. There are
two exceptions. With `--always-restore` every prefix is loaded. And if the estimate is against loading eight
times in a row, the eighth prefix is loaded as a trial, to measure the speed of loading again.

`HostCache` is a Cache (common/cache.py): five required methods, `poll`, and their helpers. The shortest Cache
is examples/my_cache.py. Two rules hold for every Cache. First, it must keep a reference to all blocks that a
copy reads or writes (`hold`) until the copy completes, even if the request ends before. Second, `match` must
not find a block before its copy has completed.

Sources: two tiers as in "KV Cache CPU Offloading" (part 12 of a series that rebuilds vLLM), which also uses
the words gpu_hit, cpu_hit and miss; layer-by-layer loading as in CachedAttention (Gao et al., USENIX ATC '24,
section 3.2).

    python 03_cpu_offload.py --demo
    python 03_cpu_offload.py --prompt "What is a KV cache?"
    python 03_cpu_offload.py                               # the server, on http://127.0.0.1:5000
"""

import importlib
import itertools
import random
import shell.cli as cli
import statistics
import sys
from functools import partial

import torch

from common import link as links
from common.cache import Cache, Match
from common.estimates import Estimates
from common.requests import Request
from common.restoring import Restorer
from shell import charts, hardware, lesson, modelled_link
from shell.frontend import Frontend

paged = importlib.import_module("02_paged_kv")

# 1. The cache ----------------------------------------------------------------------------------

class HostCache(Cache):
    """A Cache of KV blocks in host memory. Full device blocks are copied to it, and come back layer by
    layer."""

    fields = {"offload_after": (lambda value: isinstance(value, bool), "true or false")}
    longest_save = 5.0  # seconds; a longer copy out would keep its device blocks referenced for too long
    # True if host memory is the last tier: a block evicted from it is lost. In that case a save never evicts
    # a host block that was used more recently than the blocks that it saves
    last_tier = True

    def __init__(self, blocks: int, bandwidth: modelled_link.Bandwidth | float | None = None):
        """`blocks`: blocks of host memory. `bandwidth`: of the modelled link, in bytes per second; None with
        a GPU."""
        self.blocks, self.bandwidth = blocks, bandwidth
        self.saving: dict = {}  # block key whose copy is in flight -> host block
        self.looked_at: dict = {}  # request -> number of leading blocks that `save` has looked at
        self.pending_saves: dict = {}  # request (may be finished) -> block keys to copy out, oldest first

    # The five required methods of a Cache, and `poll`

    def attach(self, engine):
        super().attach(engine)
        memory, bandwidth, wake = self.pool.memory, self.bandwidth, engine.wake.set
        self.load_link = hardware.connect("load", engine.clock, bandwidth, wake)
        self.save_link = hardware.connect("save", engine.clock, bandwidth, wake, background=True)
        shape = len(memory), self.blocks, 2, *memory.shape[3:]  # [L, blocks, 2, block_size, KVH, hd]
        self.host = paged.BlockPool(self.blocks, self.pool.block_size, self.host_memory(shape))
        self.pools = {"host": self.host}
        for link in self.load_link, self.save_link:
            link.speed()  # measure a GPU's link now, so that no request waits for it

    def match(self, request):
        if found := self.host.find(self.missing(request)):
            seconds = self.load_link.seconds(len(found) * self.host.block_bytes, len(self.model.layers))
            return Match(self.tokens_in(request, found), seconds, found)

    def restore(self, request, restoration, match):
        transfers = self.copy_in(request, restoration.start, match.blocks)
        try:
            for transfer in transfers:
                yield transfer
                restoration.layers += 1
        finally:
            links.cancel(transfers)

    def save(self, batch):
        """Schedule copies of the blocks that each request has registered since its last `save`, unless host
        memory has them.

        The first `save` of a request also looks at the blocks that the request found on the device or
        restored, because host memory may lack them."""
        for request, _ in batch.work:
            first, end = self.looked_at.get(request, 0), request.registered
            if first < end and request.options.get("offload_after", True):
                unsaved = self.pending_saves.pop(request, []) if first else []
                self.pending_saves[request] = unsaved + request.chain[first:end]
                self.looked_at[request] = end
        self.save_pending()

    def poll(self):
        super().poll()
        self.save_pending()

    def close(self):
        self.close_each(self.load_link, self.save_link)

    # Helpers

    def host_memory(self, shape):
        """-> a tensor of `shape` in host memory, pinned if the device is a GPU."""
        return links.host_memory(shape, self.pool.memory.dtype, self.pool.memory.device, "The host pool")

    def copy_in(self, request, start: int, host_blocks: list[int]) -> list[links.Transfer]:
        """Start to copy `host_blocks` into the request's device blocks, from the block of token `start` on.

        Returns: one Transfer per layer. The blocks of both pools are held until all have completed."""
        table = self.blocks_of(request, start, len(host_blocks))
        blocks, transfers = links.BlockPairs(table, host_blocks, apart=True), []
        for layer, (device, host) in enumerate(zip(self.pool.memory, self.host.memory)):
            device = device.transpose(0, 1)  # like `host`: [blocks, 2, block_size, KVH, hd]
            transfers.append(self.load_link.copy(device, host, f"layer {layer}", blocks))
        self.hold("load", transfers, (self.pool, table), (self.host, host_blocks))
        self.counts["swap_ins"] += len(table)
        self.counts["bytes_in"] += sum(transfer.bytes for transfer in transfers)
        return transfers

    def has_block(self, block_key) -> bool:
        """-> whether host memory holds this block, or is receiving it."""
        return block_key in self.host.block_of or block_key in self.saving

    def save_pending(self):
        """Copy out pending blocks, those of the latest request first, until host memory is full.

        A block that does not fit stays pending, even after its request has finished, until the device evicts
        it. Then the later blocks of its chain are dropped as well, because `match` ends at the first missing
        block."""
        there, room = self.pool.block_of, True
        for request, unsaved in reversed([*self.pending_saves.items()]):
            if unsaved and unsaved[0] in there and (self.after_gap(unsaved[0]) or not room):
                continue
            present = itertools.takewhile(there.__contains__, unsaved)
            unsaved = [one for one in present if not self.has_block(one)]
            fits = self.save_blocks(request, unsaved)
            room = room and fits == len(unsaved)
            self.pending_saves[request] = unsaved[fits:]
            if fits == len(unsaved):
                del self.pending_saves[request]

    def after_gap(self, block_key) -> bool:
        """-> whether the parent block is neither in host memory nor being copied to it."""
        return block_key.parent is not None and not self.has_block(block_key.parent)

    def save_blocks(self, request, block_keys: list) -> int:
        """Start to copy blocks to host memory, as many as fit there.

        If the copies are estimated to take `longest_save` or more, the estimate may be out of date. Then copy
        just enough blocks to measure the link again, or none if a save in flight is already measuring it.

        Returns: how many of `block_keys`, from the first on, were started."""
        size, link = self.host.block_bytes, self.save_link
        if link.seconds(len(block_keys) * size) >= self.longest_save:  # copy a little, to measure the link
            block_keys = [] if self.in_flight["save"] else block_keys[: -(-link.measured_from // size)]
        if not block_keys:
            return 0
        used = block_keys[-1].used if self.last_tier else 0
        if fits := self.host.make_room(len(block_keys), self.not_evicted_for(request), used):
            block_keys = block_keys[:fits]
            blocks = [self.pool.block_of[block_key] for block_key in block_keys]
            # The best place is right after the parent's host block; the next best is a free run that is long
            # enough for the whole request
            parent = block_keys[0].parent
            after = self.host.block_of.get(parent, self.saving.get(parent))
            room = self.host.num_blocks(request.prompt_tokens + request.max_tokens)
            host_blocks = self.host.allocate(fits, after, room)
            transfer = self.copy_out(blocks, host_blocks)
            self.saving.update(zip(block_keys, host_blocks))
            then = partial(self.on_saved, request, transfer, block_keys, host_blocks)
            self.hold("save", [transfer], (self.pool, blocks), given=[(self.host, host_blocks)], then=then)
        return fits

    def not_evicted_for(self, request) -> list:
        """Return block keys that must stay in host memory while blocks of this request are copied to it.

        These are the blocks of its own chain; or none, if the request has ended and there is a lower tier."""
        return request.chain if self.last_tier or request in self.engine.running else []

    def copy_out(self, blocks: list[int], host_blocks: list[int]) -> links.Transfer:
        """Start to copy device `blocks` to `host_blocks`. Returns: one Transfer for all layers."""
        host, device = self.host.memory.movedim(1, 0), self.pool.memory.movedim(2, 0)  # [blocks, L, 2, ...]
        pairs = links.BlockPairs(host_blocks, blocks)
        transfer = self.save_link.copy(host, device, f"save {len(blocks)}", pairs)
        self.counts["swap_outs"] += len(blocks)
        self.counts["bytes_out"] += transfer.bytes
        return transfer

    def on_saved(self, request, transfer, block_keys, host_blocks, arrived: bool):
        """Register the host blocks of a completed copy, so that `match` finds them. Called by `poll`;
        `arrived` is False if the copy failed."""
        for block_key, host_block in zip(block_keys, host_blocks):
            del self.saving[block_key]
            if arrived:
                self.host.register(host_block, block_key)
        if not arrived:
            self.looked_at.pop(request, None)  # the next `save` looks at all of its blocks again
        request.timeline.add("save", transfer.label, *transfer.span())

    def finished(self, request):
        self.looked_at.pop(request, None)


# 2. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Let three conversations evict each other from a small device, and bring the first one back from host
    memory."""
    size, new = arguments.block_size, max(2, min(arguments.max_tokens, 16))
    context = lesson.context(model, frontend)
    blocks = arguments.gpu_blocks = arguments.gpu_blocks or -(-(context * 3 // 4) // size)
    engine = make_engine(model, arguments)
    cache, link = engine.lower_tier.cache, engine.lower_tier.cache.load_link
    rng, talks, length = random.Random(0), ([], [], []), context * 5 // 8
    turns = [[secret, lesson.QUESTION] for secret in (lesson.SECRET, "", "")]
    texts = [lesson.document_for(engine, frontend, rng, length, each, new) for each in turns]
    asked = [lesson.say(engine, frontend, talk, text, new) for talk, text in zip(talks, texts)]
    back = lesson.say(engine, frontend, talks[0], lesson.QUESTION, new)
    slow = make_engine(model, arguments) if link.modelled else None
    again = ask_each_tier(engine, slow, back.tokens[: back.prompt_tokens])
    last = {case: requests[-1] for case, requests in again.items()}
    taken = {case: [one.outcome.ttft_ms for one in requests] for case, requests in again.items()}
    verified = lesson.verify(paged.baseline.Engine(model), [*asked, back, *last.values()])

    report = dict(link=lesson.describe_link(link), verified=verified)
    print(f"{blocks} device blocks, and documents of {len(asked[0].chain)} blocks each:")
    rows = [describe("document", request) for request in asked] + [describe("the first goes on", back)]
    print(f"  {lesson.QUESTION} - {back.outcome.text}\n\nTimeline (digits: layers; p: prefill, d: decode)")
    print(f"{charts.chart(back.timeline)}\n")
    title = f"TTFT of the same {back.prompt_tokens} prompt tokens, asked again"
    rows += lesson.table(title, taken, "ttft_ms", "ms")
    for case, request in last.items():
        print(f"  {case}: {'; '.join(request.decisions) or 'nothing was offered'}")
    moved = last["cpu_hit"].found.get("cpu", 0) * cache.host.block_bytes // size
    rows.append(dict(case="cpu_hit", bytes_in=moved))
    miss, hit, here = (statistics.median(taken[case]) for case in ("miss", "cpu_hit", "gpu_hit"))
    words = f"TTFT is {miss / hit:.1f} times shorter than by computing and {hit / here:.1f} times longer"
    print(f"\n{moved / 1e6:.1f} MB came back from host memory: {words} than from the device.")
    if slow and last["slow link"].decisions:
        print(f"Over a link 100 times slower: {last['slow link'].decisions[-1].split(': ')[-1]}.")
    return dict(report, rows=rows, counters=engine.counters()), [back.timeline]


def ask_each_tier(engine, slow, prompt: list[int]) -> dict[str, list[Request]]:
    """Time the same prompt as a miss, from host memory and from the device; on `slow` also over a slow link.

    Returns: case -> its requests, one per round."""
    ask, salts = partial(lesson.ask, tokens=prompt, max_tokens=2), itertools.count()
    ways = {
        "miss": lambda: ask(engine, evict="device", cache_salt=str(next(salts)), offload_after=False),
        "cpu_hit": lambda: ask(engine, evict="device"),
        "gpu_hit": lambda: ask(engine),
    }
    if slow:
        ask(slow)  # copies the blocks to host memory
        lesson.wait_until_idle(slow)
        link = slow.lower_tier.cache.load_link
        link.bandwidth = modelled_link.Bandwidth(link.bandwidth.value / 100)
        link.measured.forget()
        ways["slow link"] = lambda: ask(slow, evict="device")
    return lesson.in_turn(ways)


def describe(what: str, request: Request) -> dict:
    """Print one line about a finished request, and return it as a row of the demo's table."""
    result = request.outcome
    row = dict(phase=what, source=result.source, found=result.found, ttft_ms=result.ttft_ms)
    found = f"{request.cached_tokens:5} of {request.prompt_tokens} tokens found"
    print(f"  {what:17} {result.source:8} {found}, TTFT {result.ttft_ms:.1f} ms")
    return row


# 3. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    """Add the options of chapter 02 and of this chapter."""
    paged.add_arguments(parser)
    number, words = cli.bounded(int, 0, 1 << 26), "blocks in host memory (four times the device's)"
    parser.add_argument("--cpu-blocks", type=number, metavar="N", help=words)
    parser.add_argument("--always-restore", action="store_true", help="load even if computing is faster")
    hardware.add_option(parser)


def host_blocks(model, arguments, block_bytes: int) -> int:
    """Return the number of blocks in host memory: --cpu-blocks, if that option is given.

    Default: 4 x --gpu-blocks. Without --gpu-blocks: 4 x --max-running x the blocks of the longest context.
    The default is never more than a quarter of free host memory."""
    context = -(-model.config.max_position_embeddings // arguments.block_size)  # blocks
    useful, cpu = 4 * (arguments.gpu_blocks or arguments.max_running * context), torch.device("cpu")
    return cli.blocks_that_fit(arguments.cpu_blocks, useful, block_bytes, cpu, "--cpu-blocks")


def make_engine(model, arguments) -> paged.Engine:
    """Build chapter 02's engine with a HostCache as its lower tier."""
    block_bytes = arguments.block_size * model.config.kv_numbers_per_token * model.dtype.itemsize
    blocks = host_blocks(model, arguments, block_bytes)
    bandwidth = hardware.bandwidth(model, arguments.link)
    cache, megabytes = HostCache(blocks, bandwidth), blocks * block_bytes / 1e6
    engine = paged.make_engine(model, arguments, Restorer(cache, Estimates(arguments.always_restore)))
    print(f"Host: {blocks} KV blocks, {megabytes:.1f} MB, over a {cache.load_link}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "03_cpu_offload", add_arguments, make_engine, demo)
