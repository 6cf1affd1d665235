"""Blocks (chapters 04, 05) or chunks (06) in storage: how they are spread over directories, and read."""
import math
from collections import Counter, deque
from functools import partial
from itertools import cycle, pairwise

from common.link import Transfer, host_memory
from common.store import Parts, Storage, Stored
from shell.workers import as_integers

READ = 1 << 19      # bytes of a block in one read from slow storage, at most; one layer may have more
# Shorter reads do not pay: each has a fixed cost, and it is more than an earlier start of the work saves
READ_SECONDS = 3e-4


class StoredChunks:
    """Blocks or chunks that are spread over several Storages. The back end of each must have an `index` of
    its keys, so that `find` need not ask the back end."""

    def __init__(self, *storages: "Storage"):
        self.storages, self.turn = storages, cycle(storages)  # round-robin

    def open(self, lane, engine):
        """Prepare all storages; `lane`: see Storage.open. A finished lookup interrupts a pass that waits for
        a copy, because a queued request may need its answer (`ask`)."""
        arrivals, wake = engine.arrivals, engine.wake  # the threads must not reference the engine
        for storage in self.storages:
            storage.open(lane, engine.counts, lambda: (arrivals.append((None, None)), wake.set()))

    def find(self, key: bytes) -> Stored | None:
        """-> where the chunk `key` is stored, or None."""
        return next((Stored(storage, key) for storage in self.storages if storage.has([key])), None)

    def read(self, chunks: list[Stored], into: list, label: str) -> list[Transfer]:
        """Read chunks in the background, from all storages in parallel.

        `into`: see Storage.get. Returns: one Transfer per storage."""
        reads = {}  # storage -> keys, places
        for chunk, place in zip(chunks, into, strict=True):
            keys, places = reads.setdefault(chunk.storage, ([], []))
            keys.append(chunk.key)
            places.append(place)
        return [storage.get(*read, label) for storage, read in reads.items()]

    def ask(self, keys: list[bytes]) -> list[Transfer]:
        """Look up the chunks that no `index` has, because another process may have stored them since. After
        that, `find` finds them."""
        unknown = [key for key in keys if not self.find(key)]
        shared = [storage for storage in self.storages if storage.backend and not storage.silent]
        return [storage.exists(unknown) for storage in shared if unknown]

    def write(self, key: bytes, value) -> Transfer | None:
        """Write a chunk in the background. `value`: an array or Parts.

        Returns: a Transfer, or None if all storages are backlogged."""
        free = [storage for storage in (next(self.turn), *self.storages) if not storage.is_backlogged]
        return free[0].set([key], [value]) if free else None

    def use(self, keys: list[bytes]):
        """Mark the stored keys of a chain as used. Its last block will be deleted first."""
        for storage in self.storages:
            storage.use(keys)

    def seconds(self, chunks: list[Stored], size: int) -> float:
        """-> estimated seconds to read these chunks, of `size` bytes each."""
        counts = Counter(chunk.storage for chunk in chunks)
        return max((storage.seconds(count * size) for storage, count in counts.items()), default=0.0)

    def speed(self) -> float:
        """-> bytes per second, of all storages together."""
        return sum(storage.speed() for storage in self.storages)

    def close(self):
        for storage in self.storages:
            storage.close()

    def __str__(self):
        return ", ".join(map(str, self.storages))


class BlockReads:
    """The rows of one restoration of chapter 04 or 05 in host memory, and the reads that bring them there.

    A read brings a run of adjacent layers of a block. Stored blocks are read into free host blocks, and stay
    there. If there is no room for all of them, the restoration streams: two runs at a time pass through
    memory of its own, and `blocks` are places in this memory."""

    def __init__(self, store, block_keys: list, locations: list):
        """`store`: a BlockStore. `locations`: for each block its number in host memory, or its Stored place.
        The caller must release one reference to each of the host blocks `held`."""
        self.store, self.copying, self.latest = store, [], 0
        self.reads = {}     # layer -> Transfers that bring its rows; once they have begun
        self.parts = {}     # part -> its rows, [blocks, block size, width]; from its read until it is taken
        self.stored = {at: found for at, found in enumerate(locations) if isinstance(found, Stored)}
        self.local = {at: found for at, found in enumerate(locations) if at not in self.stored}
        store.pool.share(self.local.values())
        self.streams = len(self.stored) > store.pool.available
        if self.streams:
            self.blocks, self.held = list(range(len(locations))), [*self.local.values()]
        else:
            fresh = dict(zip(self.stored, store.pool.allocate(len(self.stored))))
            self.blocks = self.held = [(self.local | fresh)[at] for at in range(len(locations))]
        self.unread = deque(self.runs(len(locations)))
        self.read_ahead(0)
        if self.stored and not self.streams:
            new = [(block, block_keys[at]) for at, block in fresh.items()]
            held = store.pool, list(fresh.values())
            then = partial(store.on_fetched, new, block_keys)
            store.cache.hold(f"read {new[0][0]}", sum(self.reads.values(), []), held, then=then)

    def runs(self, blocks: int) -> list[range]:
        """Divide the parts of a block into runs of adjacent layers, whose parts have the same width.

        Long runs need fewer reads. But nothing is projected before the first run has arrived. So a run has a
        quarter of the layers, or fewer if a read would bring more than READ bytes. If storage is known to
        read more layers than that in READ_SECONDS, a run has as many as it reads. Two runs of `blocks` blocks
        take no more memory than all host blocks, because they may stream (two layers at least)."""
        layers = [*dict.fromkeys(self.store.layers)]
        count, room, size = len(layers), self.store.pool.size, self.store.offsets[-1]
        speed = min((found.storage.measured.value for found in self.stored.values()), default=math.inf)
        fast = int(count * speed * READ_SECONDS / size) if speed < math.inf else 0      # unmeasured: infinite
        slow = min(-(-count // 4), count * READ // size)
        count = max(1, min(max(slow, fast), count * room // (2 * blocks)))
        sides = enumerate(pairwise(part.shape for part in self.store.parts), 1)
        edges = {at for at, (one, other) in sides if one != other} | {len(self.store.layers)}
        edges |= {*map(self.store.layers.index, layers[::count])}
        return [range(*edge) for edge in pairwise(sorted(edges))]

    def read_ahead(self, layer: int):
        """Start to read all runs; if they stream, up to the run after the one of `layer`."""
        while self.unread and (layer >= self.latest or not self.streams):
            run, layers = self.unread.popleft(), self.store.layers
            self.latest = layers[run.start]
            first, start = self.store.parts[run.start], self.store.offsets[run.start]
            # Parts are adjacent in memory -> [parts, blocks, block size, width]
            rows = first.as_strided((len(run), *first.shape), (first.numel(), *first.stride()))
            rows = self.staging(rows) if self.streams else rows
            self.parts |= zip(run, rows)
            array = as_integers(rows)
            into = [Parts(array[:, self.blocks[at]], start) for at in self.stored]
            found, label = [*self.stored.values()], f"part {run.start}"
            reads = self.store.storage.read(found, into, label) if found else []
            self.reads |= dict.fromkeys(layers[run.start:run.stop], reads)

    def staging(self, rows):
        """Return memory for parts of all blocks, with the rows that are in host memory.

        `rows`: the parts there, [parts, blocks, block size, width]."""
        device, shape = self.store.cache.model.device, (len(rows), len(self.blocks), *rows.shape[2:])
        memory = host_memory(shape, rows.dtype, device, "The memory for a restoration")
        memory[:, list(self.local)] = rows[:, list(self.local.values())]
        return memory

    def take(self, layer: int) -> list:
        """Return the layer's parts, for the only copy of them."""
        return [self.parts.pop(part) for part, each in enumerate(self.store.layers) if each == layer]

    def keep(self, transfer: Transfer, memory: list):
        """Keep `memory` until `transfer`, which reads it, has completed."""
        self.copying = [pair for pair in self.copying if not pair[0].ready] + [(transfer, memory)]

    def release(self, arrived: bool):
        """Called when all copies have completed. Until then, this method keeps their memory."""
