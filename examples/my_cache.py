"""Write your own Cache: the plainest one that the engine takes. Full blocks go to host memory, and come back.

    python -m pytest tests/test_cache_contract.py --cache examples.my_cache:MyCache
"""

import importlib
from functools import partial

from common import link as links
from common.cache import Cache, Match
from shell import hardware

paged = importlib.import_module("02_paged_kv")


class MyCache(Cache):
    def __init__(self, blocks: int, bandwidth: float | None = None):
        """`blocks` in host memory; bytes/s of the modelled link, where there is no GPU."""
        self.blocks, self.bandwidth, self.saving = blocks, bandwidth, set()

    def attach(self, engine):
        super().attach(engine)
        memory, wake = self.pool.memory, engine.wake.set  # [L, 2, blocks, block_size, KVH, hd]
        self.load_link = hardware.connect("load", engine.clock, self.bandwidth, wake)
        self.save_link = hardware.connect("save", engine.clock, self.bandwidth, wake)
        shape = *memory.shape[:2], self.blocks, *memory.shape[3:]
        host = links.host_memory(shape, memory.dtype, memory.device, "My cache")
        self.host = paged.BlockPool(self.blocks, self.pool.block_size, host)
        self.pools = {"host": self.host}

    def match(self, request):
        if found := self.host.find(self.missing(request)):
            seconds = self.load_link.seconds(len(found) * self.host.block_bytes)
            return Match(self.tokens_in(request, found), seconds, found)

    def restore(self, request, restoration, match):
        table, transfers = self.blocks_of(request, restoration.start, len(match.blocks)), []
        blocks = links.BlockPairs(table, match.blocks)
        for layer, sides in enumerate(zip(self.pool.memory, self.host.memory)):
            device, host = (side.transpose(0, 1) for side in sides)  # [blocks, 2, block_size, KVH, hd] each
            transfers.append(self.load_link.copy(device, host, f"layer {layer}", blocks))
        self.hold("load", transfers, (self.pool, table), (self.host, match.blocks))
        for transfer in transfers:
            yield transfer
            restoration.layers += 1

    def save(self, batch):
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
        self.saving.discard(block_key)
        if arrived:
            self.host.register(host_block, block_key)

    def close(self):
        self.load_link.close()
        self.save_link.close()
