"""Write your own Cache: the smallest one that the engine accepts. It saves full blocks of K and V in host
memory and restores them layer by layer. common/cache.py describes each method.

The contract's tests check it:

    python -m pytest tests/test_cache_contract.py --cache examples.my_cache:MyCache
"""

import importlib
from functools import partial

from common import link as links
from common.cache import Cache, Match
from shell import hardware

paged = importlib.import_module("02_paged_kv")


class MyCache(Cache):
    """Keeps full blocks of K and V in host memory. If host memory is full, it saves nothing more."""

    def __init__(self, blocks: int, bandwidth: float | None = None):
        """`blocks`: size of host memory, in blocks. `bandwidth`: of the modelled link, in bytes per second;
        None on a GPU."""
        self.blocks, self.bandwidth, self.saving = blocks, bandwidth, set()  # saving: keys being copied out

    def attach(self, engine):
        """Called once, before the first request: connect the links and allocate host memory."""
        super().attach(engine)
        memory, wake = self.pool.memory, engine.wake.set  # [L, 2, blocks, block_size, KVH, hd]
        self.load_link = hardware.connect("load", engine.clock, self.bandwidth, wake)
        self.save_link = hardware.connect("save", engine.clock, self.bandwidth, wake)
        shape = *memory.shape[:2], self.blocks, *memory.shape[3:]
        host = links.host_memory(shape, memory.dtype, memory.device, "My cache")
        self.host = paged.BlockPool(self.blocks, self.pool.block_size, host)
        self.pools = {"host": self.host}

    def match(self, request):
        """Called when a request is admitted: offer the blocks that host memory has, up to the first gap."""
        size, first = self.pool.block_size, request.computed // self.pool.block_size
        if found := self.host.find(request.chain[first : request.history // size]):
            tokens = (first + len(found)) * size - request.computed
            seconds = self.load_link.seconds(len(found) * self.host.block_bytes)
            return Match(tokens, seconds, found, {"cpu": tokens})

    def restore(self, request, restoration, match):
        """Issue the copies of all layers, then yield each one. The driver resumes this generator when that
        copy has completed. `hold` keeps the blocks referenced until all copies have ended, even if the
        request is cancelled."""
        table = request.table[restoration.start // self.pool.block_size :][: len(match.blocks)]
        transfers = []
        blocks = links.BlockPairs(table, match.blocks)
        for layer, sides in enumerate(zip(self.pool.memory, self.host.memory)):
            device, host = (side.transpose(0, 1) for side in sides)  # [blocks, 2, block_size, KVH, hd] each
            transfers.append(self.load_link.copy(device, host, f"layer {layer}", blocks))
        self.hold("load", transfers, (self.pool, table), (self.host, match.blocks))
        for transfer in transfers:
            yield transfer
            restoration.layers += 1

    def save(self, batch):
        """Called after each step: start to copy full blocks. It must not wait for the copies."""
        for request, _ in batch.work:
            for block_key, block in zip(request.chain[: request.registered], request.table):
                if block_key in self.host.block_of or block_key in self.saving or not self.host.available:
                    continue
                (host_block,) = self.host.allocate(1)
                into, out_of = self.host.memory[:, :, host_block], self.pool.memory[:, :, block]
                copy = self.save_link.copy(into, out_of, "save")
                then = partial(self.on_saved, block_key, host_block)
                self.hold("save", [copy], (self.pool, [block]), given=[(self.host, [host_block])], then=then)
                self.saving.add(block_key)

    def on_saved(self, block_key, host_block, arrived: bool):
        """Called when the copy of a block has ended: if it has arrived, let `match` find it."""
        self.saving.discard(block_key)
        if arrived:
            self.host.register(host_block, block_key)

    def close(self):
        """Called once, at the end: stop the links' threads."""
        self.load_link.close()
        self.save_link.close()
