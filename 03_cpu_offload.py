"""Chapter 03: KV blocks in host memory, and the link between host and device.

The problem. Device memory holds the KV blocks of a few conversations. When the pool of chapter 02 is full, it
evicts cached blocks. A conversation that comes back is computed again, although host memory is many times
larger and idle.

The mechanism. This chapter adds a second block pool, in pinned host memory. Each device block is copied to it
in the background as soon as it is full, so that a later eviction need not wait for a copy. When a request
arrives whose prefix is no longer on the device, the blocks of the prefix are copied back layer by layer. The
copy replaces the forward pass over the prefix.

If other requests can compute while the blocks are copied, they do, and this request joins them when all of
its layers have arrived. If none can, the forward pass of the new question starts at once and follows the
copies: layer l is computed while layer l + 1 is copied. The time to first token (TTFT) is then nearly the
longer of the two times, copying or computing. One layer of the shorter one is added, which
overlaps with nothing. If copying takes longer, this is computing the last layer. If computing takes longer,
it is copying the first one. Without the overlap the TTFT would be the sum of both times:

    TTFT = max(link, compute) + min(link, compute) / layers

    link: the bytes of the history / the bandwidth      compute: the forward pass of the question

Loading pays if the link delivers a token's K and V faster than the processor computes them. Both speeds are
measured. A prefix is loaded if loading is estimated to take at most 0.8 of the time to compute it. With
`--always-restore` every prefix is loaded.

`HostCache` is a Cache (common/cache.py): five required methods, and their helpers. The shortest Cache is
examples/my_cache.py. Two rules hold for every Cache. First, it must keep a reference to all blocks that a
copy reads or writes (`hold`) until the copy completes, even if the request ends first. Second, `match` must
not find a block before its copy has completed.

Sources: two tiers as in "KV Cache CPU Offloading" (part 12 of a series that rebuilds vLLM), which also uses
the words gpu_hit, cpu_hit and miss; layer-by-layer loading as in CachedAttention (Gao et al., USENIX ATC '24,
section 3.2).

    python 03_cpu_offload.py --demo
    python 03_cpu_offload.py --prompt "What is a KV cache?"
    python 03_cpu_offload.py                               # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (sets environment variables and signal handlers before PyTorch starts)

import importlib
import itertools
import random
import statistics
import sys
from functools import partial

from common import link as links
from common.cache import Cache, Match
from common.estimates import Estimates
from common.requests import Request
from common.restoring import Restorer
from shell import charts, cli, hardware, lesson, modelled_link
from shell.frontend import Frontend
from shell.machine import machine_of

paged = importlib.import_module("02_paged_kv")

# 1. The cache ----------------------------------------------------------------------------------

class HostCache(Cache):
    """A Cache of KV blocks in host memory. Full device blocks are copied to it, and come back layer by
    layer."""

    # A request may ask that its blocks are not copied to host memory
    fields = {"offload_after": (lambda value: isinstance(value, bool), "true or false")}

    def __init__(self, blocks: int, bandwidth: modelled_link.Bandwidth | float | None = None):
        """`blocks`: blocks of host memory. `bandwidth`: in bytes per second. Without a GPU, the link is a
        model: its copies take as long as this bandwidth says. With a GPU: None."""
        self.blocks, self.bandwidth = blocks, bandwidth
        self.saving: dict = {}  # block key whose copy is in flight -> host block
        self.saved: dict = {}  # request -> how many of its blocks are saved, or being saved

    # The five required methods of a Cache

    def attach(self, engine):
        super().attach(engine)
        memory, bandwidth, wake = self.pool.memory, self.bandwidth, engine.wake.set
        # Without a GPU, threads copy. `beside`: the model that uses one core less while a thread copies.
        # `background`: these copies have a low priority
        self.load_link = hardware.connect("load", engine.clock, bandwidth, wake, beside=self.model)
        self.save_link = hardware.connect("save", engine.clock, bandwidth, wake, background=True)
        shape = len(memory), self.blocks, 2, *memory.shape[3:]  # [L, blocks, 2, block_size, KVH, hd]
        self.host = paged.BlockPool(self.blocks, self.pool.block_size, self.host_memory(shape))
        self.pools = {"host": self.host}
        for link in self.load_link, self.save_link:
            link.speed()  # measure a GPU's link now, so that no request waits for it

    def match(self, request):
        size, first = self.pool.block_size, request.computed // self.pool.block_size
        if found := self.host.find(request.chain[first : request.history // size]):
            tokens = (first + len(found)) * size - request.computed
            seconds = self.load_link.seconds(len(found) * self.host.block_bytes, len(self.model.layers))
            return Match(tokens, seconds, found, {"cpu": tokens})

    def restore(self, request, restoration, match):
        transfers = self.copy_in(request, restoration.start, match.blocks)
        try:
            for transfer in transfers:
                yield transfer
                restoration.layers += 1
        finally:
            for transfer in transfers[restoration.layers :]:
                transfer.cancel()

    def save(self, batch):
        """Start to copy each request's full blocks that host memory lacks. If this would evict other
        host blocks of the request, try again after its next step."""
        for request, _ in batch.work:
            full = request.registered
            if self.saved.get(request) != full and request.options.get("offload_after", True):
                own = zip(request.chain[:full], request.table)
                unsaved = {block_key: block for block_key, block in own if not self.has_block(block_key)}
                if self.save_blocks(request, unsaved) == len(unsaved):
                    self.saved[request] = full

    def close(self):
        self.close_each(self.load_link, self.save_link)

    # Helpers

    def host_memory(self, shape):
        """-> a tensor of `shape` in host memory, pinned if the device is a GPU."""
        return links.host_memory(shape, self.pool.memory.dtype, self.pool.memory.device, "The host pool")

    def copy_in(self, request, start: int, host_blocks: list[int]) -> list[links.Transfer]:
        """Start to copy `host_blocks` into the request's device blocks, beginning with the block of token
        `start`.

        Returns: one Transfer per layer. The blocks of both pools are held until all have completed."""
        table = request.table[start // self.pool.block_size :][: len(host_blocks)]
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

    def save_blocks(self, request, blocks: dict) -> int:
        """Start to copy device blocks to host memory, as many as fit without evicting the request's own.

        `blocks`: block key -> device block, in the order of the chain. Returns: how many were started."""
        fits = self.host.make_room(len(blocks), self.kept_for(request))
        if fits:
            block_keys, blocks = [*blocks][:fits], [*blocks.values()][:fits]
            # The best place is right after the parent's host block; the next best is a free run that is long
            # enough for the whole request
            parent = block_keys[0].parent
            after = self.host.block_of.get(parent, self.saving.get(parent))
            room = self.host.num_blocks(request.prompt_tokens + request.max_tokens)
            host_blocks = self.host.allocate(fits, after, room)
            transfer = self.copy_out(blocks, host_blocks)
            self.saving.update(zip(block_keys, host_blocks))
            then = partial(self.on_saved, request, transfer, block_keys)
            self.hold("save", [transfer], (self.pool, blocks), given=[(self.host, host_blocks)], then=then)
        return fits

    def kept_for(self, request):
        """-> the keys whose host blocks stay when room is made for this request: its own."""
        return request.chain

    def copy_out(self, blocks: list[int], host_blocks: list[int]) -> links.Transfer:
        """Start to copy device `blocks` to `host_blocks`. Returns: one Transfer for all layers."""
        host, device = self.host.memory.movedim(1, 0), self.pool.memory.movedim(2, 0)  # [blocks, L, 2, ...]
        pairs = links.BlockPairs(host_blocks, blocks)
        transfer = self.save_link.copy(host, device, f"save {len(blocks)}", pairs)
        self.counts["swap_outs"] += len(blocks)
        self.counts["bytes_out"] += transfer.bytes
        return transfer

    def on_saved(self, request, transfer, block_keys, arrived: bool):
        """Register the host blocks of a completed copy, so that `match` finds them. Called by `poll`;
        `arrived` is False if the copy failed."""
        for block_key in block_keys:
            host_block = self.saving.pop(block_key)
            if arrived:
                self.host.register(host_block, block_key)
        if not arrived:
            self.saved.pop(request, None)  # the next `save` looks at all of its blocks again
        self.host.use(request.chain)
        request.timeline.add("save", transfer.label, *transfer.span())

    def finished(self, request):
        self.saved.pop(request, None)


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
    taken = {case: [one.ttft_ms for one in requests] for case, requests in again.items()}
    verified = lesson.verify(paged.baseline.Engine(model), [*asked, back, *last.values()])

    report = dict(link=lesson.describe_link(link), verified=verified)
    print(f"{blocks} device blocks, and documents of {len(asked[0].chain)} blocks each:")
    rows = [lesson.describe("document", request) for request in asked]
    rows.append(lesson.describe("the first goes on", back))
    print(f"  {lesson.QUESTION} - {back.text}\n\nTimeline (digits: layers; p: prefill, d: decode)")
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
    return dict(report, rows=rows, counters=charts.counters(engine)), [back.timeline]


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
        ways["slow link"] = lambda: ask(slow, evict="device")
    return lesson.in_turn(ways)


# 3. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    """Add the options of chapter 02 and of this chapter."""
    paged.add_arguments(parser)
    hardware.add_options(parser)


def make_engine(model, arguments) -> paged.Engine:
    """Build chapter 02's engine with a HostCache as its lower tier."""
    block_bytes = arguments.block_size * model.config.kv_numbers_per_token * model.dtype.itemsize
    blocks = hardware.host_blocks(model, arguments, block_bytes)
    bandwidth = hardware.bandwidth(model, arguments.link)
    cache, megabytes = HostCache(blocks, bandwidth), blocks * block_bytes / 1e6
    estimates = Estimates(machine_of(model), arguments.always_restore)
    engine = paged.make_engine(model, arguments, Restorer(cache, estimates))
    print(f"Host: {blocks} KV blocks, {megabytes:.1f} MB, over a {cache.load_link}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "03_cpu_offload", add_arguments, make_engine, demo)
