"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than the device's, but it is one machine's, and it is lost with the
process. A service runs many engines, and what one of them has read the others compute again.

The mechanism. Pages of K and V live in three tiers: on the device (L1), in host memory (L2), and in storage
that many engines share (L3). A radix tree says what lies where. A request goes down the tree along its
tokens: it finds a run of pages on the device, then one in host memory, from where it is loaded layer by layer
(chapter 03). What comes after that, storage is asked for as soon as the request stands in line, on a thread
of its own:

    tokens   0          320            800                        1792      16 tokens a page, with 5 ms for
    pages    |== L1 ====|==== L2 ======|:::::: L3 ::::::::::::::::|         one of L2 and 10 of L3: the first
             found      layer by layer prefetched into L2, then too         token after 62 * 10 + 92 * 5 ms

How long does it wait for storage? `best_effort`: not at all, it takes what has come when its turn is there.
`wait_complete`: to the end. `timeout`: for `base + tokens / 1024 * per_1k` seconds. And, which no paper has,
`both_ends`: it waits for nobody, and computes from the front while pages arrive from the back (chapter 06).
Beside that the engine's own rule holds: what takes more than 0.8 of computing is computed, and nobody waits
longer than computing would take. `--always-restore` switches it off, and shows what the policies alone do.

When do pages go down? `write_through`: as soon as they are full. `write_through_selective`: when they are
asked for a second time. `write_back`: when they would be evicted, one tier down each time; the page that is
written for an eviction is the one that goes, and no other. What a crash costs: under write_through what was
under way, under write_through_selective also what was asked for once, under write_back all that storage has
not got yet.

Three things follow from the engine's rules (common/restoring.py). The device's index stays in its pool, and
the tree is this Cache's own: it learns of the device by `save` and `evicting`. What a thread or a copy still
reads or writes is referenced in its pool, which is what locks a page. And nothing is found before it has
arrived.

Source: HiCache, the hierarchical KV cache of SGLang (design document); its radix tree is RadixAttention's
(Zheng et al., 2024, section 3).

    python 07_tiered_storage.py --demo
    python 07_tiered_storage.py --storage file:pages               # the server, on http://127.0.0.1:5000
    python 07_tiered_storage.py --storage redis://127.0.0.1:6379/0 --write-policy write_back
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from weakref import WeakSet

import torch

from common import cli, lesson, store
from common import link as links
from common.link import Transfer
from common.requests import Frontend, Request
from common.restoring import LATER, PAUSE, Match

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
both = importlib.import_module("06_bidirectional")
PREFETCH = "best_effort", "wait_complete", "timeout", "both_ends"
WRITE = "write_through", "write_through_selective", "write_back"
# What lies next to what in host memory: the order of [layers, 2, places, page size, KV heads, head size]
LAYOUTS = {
    "layer_first": (0, 1, 2, 3, 4, 5),  # as on the device: a layer of adjacent places is one piece
    "page_first": (2, 3, 0, 1, 4, 5),  # all layers of a token
    "page_first_direct": (2, 0, 1, 3, 4, 5),  # all tokens of a layer in a page, as a page in storage
}
LOST_AFTER = 0.1  # seconds without a free place in host memory, after which a page that waits for one is lost
LONGEST_CLOSE = 5.0  # seconds to send down what is on its way at the end
LANDING = 4  # runs of pages that are on their way from host memory to the device at once, under both_ends

# 1. The tree -----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Page:
    """A block of tokens behind all that its prefix stands for. (Its place on the device, that pool knows.)"""

    prefix: object
    host: int | None = None  # its place in host memory
    stored: object = None  # the Storage that has it
    asked: int = 0  # requests that asked for it
    copying: bool = False  # on its way from the device to host memory
    storing: bool = False  # or from there to storage


@dataclass(eq=False, slots=True)
class Node:
    """Pages that follow each other, and between which no other conversation branches off."""

    parent: "Node | None"
    pages: list[Page]
    children: dict = field(default_factory=dict)  # Prefix of their first page -> Node


class HiRadixTree:
    """All pages that are anywhere near, over their prefixes. Which one is locked, its pool knows.

    No node is younger than its parent: whoever uses a node uses those above it. So the oldest is a leaf."""

    def __init__(self):
        self.root = Node(None, [])
        self.nodes: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.pages: dict[object, Page] = {}  # by Prefix: to look at one without using it

    def match(self, chain: list) -> list[Page]:
        """Use the longest known beginning of `chain` -> its pages. Copies nothing."""
        return self.walk(chain)[1]

    def walk(self, chain: list) -> tuple[Node, list[Page]]:
        """-> the last node along `chain`, split where the chain leaves it, and all pages down to there."""
        node, pages, path = self.root, [], []
        while len(pages) < len(chain) and (child := node.children.get(chain[len(pages)])):
            ours, same = chain[len(pages) : len(pages) + len(child.pages)], 1
            while same < len(ours) and child.pages[same].prefix is ours[same]:
                same += 1
            node = child if same == len(child.pages) else self.split(child, same)
            pages += node.pages
            path.append(node)
        for used in reversed(path):
            self.nodes.move_to_end(used)
        return node, pages

    def split(self, node: Node, at: int) -> Node:
        """The first `at` pages of a node become its parent -> that."""
        upper = Node(node.parent, node.pages[:at])
        upper.parent.children[upper.pages[0].prefix] = upper
        node.parent, node.pages = upper, node.pages[at:]
        upper.children[node.pages[0].prefix] = node
        self.nodes[upper] = None
        return upper

    def insert(self, chain: list) -> list[Page]:
        """Use `chain` -> its pages, new ones where there are none."""
        node, pages = self.walk(chain)
        if len(pages) < len(chain):
            new = [Page(prefix) for prefix in chain[len(pages) :]]
            self.pages.update((page.prefix, page) for page in new)
            if node is self.root or node.children:
                node.children[chain[len(pages)]] = leaf = Node(node, new)
                self.nodes[leaf] = None
            else:
                node.pages += new  # a conversation goes on
            pages = self.match(chain)  # nothing above is older
        return pages

    def oldest(self, near):
        """Yield the pages in host memory, least recently used first, the end of a node first. Pages at the
        end of a branch that are not `near` any more are forgotten on the way."""
        gone = []
        try:
            for node in self.nodes:
                yield from (page for page in reversed(node.pages) if page.host is not None)
                while node.pages and not node.children and not near(node.pages[-1]):
                    last = node.pages.pop()
                    del self.pages[last.prefix]
                    if not node.pages:
                        del node.parent.children[last.prefix]
                        gone.append(node)
        finally:
            for node in gone:
                del self.nodes[node]

    def check_integrity(self):
        """Raise AssertionError unless the tree agrees with itself."""
        below, ages = [self.root], {node: age for age, node in enumerate(self.nodes)}
        for node in below:
            for first, child in node.children.items():
                assert child.parent is node and child.pages and child.pages[0].prefix is first
                assert node is self.root or ages[child] < ages[node], "a node is younger than its parent"
                chain = [page.prefix for page in child.pages]
                assert all(later.parent is earlier for earlier, later in zip(chain, chain[1:])), "a gap"
                assert node is self.root or first.parent is node.pages[-1].prefix, "a gap between two nodes"
                assert all(self.pages[page.prefix] is page for page in child.pages)
            below += node.children.values()
        assert len(below) - 1 == len(self.nodes), "nodes that nobody finds"
        assert sum(len(node.pages) for node in below) == len(self.pages), "pages that nobody finds"


# 2. The Cache ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Prefetch:
    """What storage may have of a request's pages, on its way into host memory."""

    chain: list  # of the request, as far as it can come back
    first: int  # the first page that is asked for
    hit: object  # Transfer whose value is how many storage has
    until: float  # when the policy stops waiting, seconds of time.perf_counter()
    timeline: object
    reads: list = field(default_factory=list)  # Transfers that it has begun
    brought: set = field(default_factory=set)  # Pages that they brought
    worth: bool | None = None  # to wait for; None: not decided yet
    over: bool = False  # nothing more is read, or nobody wants it

    def pages_hit(self) -> int:
        """How many pages in a row storage has said that it has."""
        return self.hit.value if self.hit.ready and self.hit.error is None else 0


@dataclass(eq=False)
class Kept:
    """What the Cache remembers of a request."""

    saved: int = 0  # blocks that were looked at
    prefetch: Prefetch | None = None


class TieredCache(offload.HostCache):
    """Chapter 03's host memory under a radix tree, and storage behind it."""

    fields = {}
    divide, slots = both.BidirectionalCache.divide, both.BidirectionalCache.slots
    share, leftover = 1.0, False  # of a step, under both_ends

    def __init__(
        self,
        blocks: int,
        bandwidth=None,
        storage: store.Storage | None = None,
        prefetch: str = "timeout",
        write: str = "write_through",
        layout: str = "page_first_direct",
        write_after: int = 2,
        threshold: int = 256,
        timeout: tuple[float, float] = (1.0, 0.25),
    ):
        """`blocks` in host memory, `bandwidth` of the modelled link to them. `write_after`: requests, for
        write_through_selective. `threshold`: tokens that a prefetch must bring. `timeout`: seconds, of every
        prefetch and for each 1,024 tokens of it."""
        super().__init__(blocks, bandwidth)
        self.prefetch_policy, self.write_policy, self.layout = prefetch, write, layout
        self.write_after, self.threshold, self.timeout = write_after, threshold, timeout
        self.given, self.storage = storage, None

    def host_memory(self, shape):
        """[L, 2, places, page size, KVH, hd], of which `layout` says what lies next to what."""
        order = LAYOUTS[self.layout]
        memory = super().host_memory([shape[axis] for axis in order])
        return memory.permute([order.index(axis) for axis in range(6)])

    def attach(self, engine):
        super().attach(engine)
        self.tree, self.host.evicting = HiRadixTree(), self.evicting_host
        self.array = links.as_integers(self.host.memory)  # for NumPy
        self.prefetches: list[Prefetch] = []
        self.incoming: dict = {}  # Prefix on its way from storage -> (place, Transfer)
        self.outgoing: deque = deque()  # (Page, device block, Transfer that ends when that is free)
        self.progress = 0.0  # when host memory last took one of them
        self.unwritten: deque[Page] = deque()  # in host memory, to be written to storage
        self.writing = 0  # pages on their way to storage
        # Both ends: memory on the device for runs of pages on their way, each 64 tokens or a page
        size = self.pool.block_size
        self.run = max(1, both.CHUNK // size)  # pages
        self.kv = self.pool.memory.flatten(2, 3)  # [L, 2, slots, KVH, hd]
        shape = LANDING, *self.kv.shape[:2], self.run * size, *self.kv.shape[3:]
        self.landed = self.kv.new_empty(shape if self.prefetch_policy == "both_ends" else (LANDING, 0))
        self.landing = paged.BlockPool(LANDING, self.run * size, self.landed)
        self.bringing = WeakSet()  # restorations that begin with pages in host memory
        if self.given:
            self.attach_storage(self.given)

    def kept(self, request) -> Kept:
        request.kept = request.kept or Kept()
        return request.kept

    # Storage comes and goes

    def attach_storage(self, storage: store.Storage):
        """Use this storage from now on. How fast it is, is measured first."""
        self.storage = storage
        storage.open(self.engine.wake.set)
        self.measure_storage()

    def detach_storage(self) -> store.Storage | None:
        """Ask nothing more of the storage -> it, to be closed. What it has, it keeps."""
        for prefetch in list(self.prefetches):
            self.end(prefetch)
        self.drop_writes()
        storage, self.storage = self.storage, None
        return storage

    def storage_state(self) -> dict:
        storage = self.storage
        state = dict(prefetch_policy=self.prefetch_policy, write_policy=self.write_policy)
        if storage is None:
            return dict(storage=None, **state)
        speed = statistics.median(storage.speeds) if storage.speeds else None
        errors = dict(errors=storage.errors, last_error=storage.error or None, hangs=storage.reader.hangs)
        return dict(storage=storage.name, **state, bytes_per_second=speed, **errors)

    def measure_storage(self):
        if self.storage:
            self.hold("storage", [self.storage.measure(self.run * self.host.block_bytes)])

    def idle(self):
        self.measure_storage()
        return super().idle()

    # L3 to L2: prefetch

    def submitted(self, request):
        """Ask storage for what comes behind the pages that are near."""
        size = self.pool.block_size
        chain = request.chain[: (len(request.tokens) - 1) // size]  # the last token is computed anyway
        pages = self.tree.match(chain)
        for page in pages if not request.new else ():
            page.asked += 1
        on_device = self.pool.block_of
        first = len(list(takewhile(lambda page: page.host is not None or page.prefix in on_device, pages)))
        tokens = (len(chain) - first) * size
        if self.storage is None or self.storage.reader.hangs or tokens < self.threshold:
            return
        hit = self.storage.exists([prefix.key for prefix in chain[first:]])
        self.hold("storage", [hit])
        until = time.perf_counter() + self.timeout[0] + self.timeout[1] * tokens / 1024
        prefetch = Prefetch(chain, first, hit, until, request.timeline)
        self.kept(request).prefetch = prefetch
        self.prefetches.append(prefetch)

    def read(self, prefetch: Prefetch):
        """Begin to read what storage has and host memory lacks, as far as there are places. Prefetches hold
        at most half of them. The last pages come first under both_ends."""
        wanted = self.wanted(prefetch)
        most = max(0, self.host.size // 2 - len(self.incoming))
        own = {self.tree.pages.get(prefix) for prefix in prefetch.chain}
        places = deque(self.room(min(len(wanted), most), own))
        while places and wanted:
            numbers = [wanted.pop(0)]
            while wanted and len(numbers) < min(len(places), self.run) and abs(wanted[0] - numbers[-1]) == 1:
                numbers.append(wanted.pop(0))
            self.read_run(prefetch, numbers, [places.popleft() for _ in numbers])
        coming = any(prefix in self.incoming for prefix in prefetch.chain[prefetch.first :])
        if prefetch.hit.ready and not coming and not (wanted and self.host.leaving):
            prefetch.over = True

    def wanted(self, prefetch: Prefetch) -> list[int]:
        """Numbers of the pages to read, in the order in which to read them."""
        hit = prefetch.pages_hit()
        if hit * self.pool.block_size < self.threshold:
            return []
        numbers, wanted = range(prefetch.first, prefetch.first + hit), []
        for number in reversed(numbers) if self.prefetch_policy == "both_ends" else numbers:
            prefix = prefetch.chain[number]
            if prefix.key in self.storage.doubted:  # nothing behind it is of use
                break
            if prefix not in self.incoming and not self.in_host(prefix):
                wanted.append(number)
        return wanted

    def read_run(self, prefetch: Prefetch, numbers: list[int], places: list[int]):
        prefixes = [prefetch.chain[number] for number in numbers]
        into, keys = [self.array[:, :, place] for place in places], [prefix.key for prefix in prefixes]
        read = self.storage.get(keys, into, f"page {numbers[0]}")
        self.incoming.update((prefix, (place, read)) for prefix, place in zip(prefixes, places))
        prefetch.reads.append(read)
        then = partial(self.arrived, prefetch, numbers, places, read, self.storage)
        self.hold("storage", [read], (self.host, places), then=then)
        self.host.release(places)

    def arrived(self, prefetch: Prefetch, numbers, places, read, storage, well: bool):
        """Reading is over: what has come is found in host memory from now on."""
        for number, place in zip(numbers, places):
            del self.incoming[prefetch.chain[number]]
            if well:
                page = self.tree.insert(prefetch.chain[: number + 1])[-1]
                page.stored = storage
                self.keep(page, place)
                prefetch.brought.add(page)
        if well:
            prefetch.timeline.add("storage", read.label, *read.span())
            self.counts["storage_pages_read"] += len(places)

    def end(self, prefetch: Prefetch):
        """Nobody waits for it any more: what has not begun is called off, and what has, others will find."""
        prefetch.over = True
        for read in prefetch.reads:
            read.cancel()
        if prefetch in self.prefetches:
            self.prefetches.remove(prefetch)

    # L2 to L1

    def match(self, request):
        size = self.pool.block_size
        first, full = request.computed // size, (len(request.tokens) - 1) // size
        prefetch = self.kept(request).prefetch
        if prefetch and self.waits(request, prefetch):
            return LATER
        pages = self.tree.match(request.chain[:full])[first:]
        found = list(takewhile(lambda page: page.host is not None, pages))
        if prefetch and self.prefetch_policy == "both_ends" and not prefetch.over:
            return self.match_both_ends(request, prefetch, [page.host for page in found])
        if found:
            tokens = (first + len(found)) * size - request.computed
            brought = prefetch.brought if prefetch else ()
            stored = min(tokens, size * sum(page in brought for page in found))
            parts = dict(cpu=tokens - stored, storage=stored)
            parts = {source: count for source, count in parts.items() if count}
            seconds = self.load_link.seconds(len(found) * self.host.block_bytes)
            places = [page.host for page in found]
            return Match(tokens, seconds, places, size, " and ".join(parts), parts=parts)

    def waits(self, request, prefetch: Prefetch) -> bool:
        """Whether the policy has the request wait for storage; the engine's rule holds for that, too."""
        now, asking = time.perf_counter(), not (prefetch.hit.ready and (prefetch.reads or prefetch.over))
        if self.prefetch_policy == "both_ends":
            return asking and now < request.patience
        patience = request.patience
        until = dict(best_effort=0.0, wait_complete=patience, timeout=min(prefetch.until, patience))
        if prefetch.over or now > until[self.prefetch_policy]:
            self.end(prefetch)
        elif not asking and prefetch.worth is None:
            tokens, unread = self.unread(request, prefetch)
            copied = tokens // self.pool.block_size * self.host.block_bytes
            seconds = self.storage.seconds(unread) + self.load_link.seconds(copied)
            offer = Match(tokens, seconds, prefetch.reads, self.pool.block_size, "storage")
            prefetch.worth = self.engine.restorer.worth(request, offer)
            if not prefetch.worth:
                self.end(prefetch)
        return not prefetch.over

    def unread(self, request, prefetch: Prefetch) -> tuple[int, int]:
        """-> tokens up to where storage has pages, and bytes of these that nobody has begun to read."""
        tokens = (prefetch.first + prefetch.pages_hit()) * self.pool.block_size - request.computed
        return tokens, len(self.wanted(prefetch)) * self.host.block_bytes if self.storage else 0

    def restore(self, request, restoration, match):
        if isinstance(match.store, Prefetch):
            yield from self.restore_both_ends(request, restoration, match.store, match.blocks)
        else:
            yield from super().restore(request, restoration, match)

    # L3 to L1, while prefill computes from the front

    def match_both_ends(self, request, prefetch: Prefetch, places: list[int]):
        """All that storage has; before it what host memory has, in `places`."""
        tokens, unread = self.unread(request, prefetch)
        near = len(places) * self.pool.block_size
        if tokens > near:
            load = self.storage.seconds(unread)
            start = request.computed + near
            compute = self.engine.restorer.seconds_to_compute(start, request.computed + tokens)
            seconds = self.load_link.seconds(len(places) * self.host.block_bytes)
            seconds += load / (1 + load / compute)
            return Match(tokens, seconds, places, self.pool.block_size, "storage", store=prefetch)

    def seconds_to_load(self, tokens: int) -> float:
        """From storage, queued or not. (What chapter 06 divides a step by.)"""
        pages = self.pool.num_blocks(tokens)
        if self.storage is None or not self.storage.speeds:
            return 0.0
        return pages * self.host.block_bytes / statistics.median(self.storage.speeds)

    def unmet(self) -> list:
        """Requests whose two pointers have not met, and whose pages in host memory are there."""
        running = [one for one in self.engine.running if one.restoration not in self.bringing]
        return [one for one in running if one.restoration and one.computed < one.restoration.limit]

    def restore_both_ends(self, request, restoration, prefetch: Prefetch, places: list[int]):
        """First what host memory has. Then from the back: runs of pages that have been read go over the link,
        and move the limit down."""
        size, chain = self.pool.block_size, prefetch.chain
        restoration.limit = restoration.end
        if places:
            self.bringing.add(restoration)
            restoration.portion = 0  # nothing is computed meanwhile
            yield from self.bring(request, restoration, places)
            self.bringing.discard(restoration)
        restoration.layers = len(self.model.layers)
        slots = self.slots(request, restoration.start, restoration.end)  # [T]
        number, on_link = restoration.end // size, deque()  # pages from `number` on are on the link, or there
        self.divide()
        try:
            while restoration.limit > (reached := max(request.computed, restoration.taken)):
                # 1. What is in host memory goes to the device, beside the request's blocks
                while number * size > reached and self.landing.available:
                    if not (places := self.run_before(chain, number)):
                        break
                    number -= len(places)
                    on_link.append((number, *self.land(places, number)))
                # 2. When it is there, put what prefill does not compute meanwhile in the blocks
                if on_link:
                    first, slot, copy = on_link[0]
                    yield copy
                    front = max(first * size, request.computed, restoration.taken)
                    if front < restoration.limit:
                        limit, start = restoration.limit, restoration.start
                        rows = self.landed[slot][:, :, front - first * size : limit - first * size]
                        into = slots[front - start : limit - start]
                        self.kv.index_copy_(2, into, rows)
                        restoration.limit = front
                    self.landing.release([slot])
                    on_link.popleft()
                # 3. Else wait for storage, or for places in host memory
                elif chain[number - 1] in self.incoming and self.landing.available:
                    yield self.incoming[chain[number - 1]][1]
                elif prefetch.over:
                    return  # there is no more: prefill goes on to the limit
                else:
                    yield PAUSE
        finally:
            for _, slot, copy in on_link:
                self.hold("load", [copy], (self.landing, [slot]))  # until nobody writes there
                self.landing.release([slot])
            self.end(prefetch)
            request.timeline.plan = both.drawn(restoration)

    def bring(self, request, restoration, places: list[int]):
        """Copy pages from host memory to where the request would compute next."""
        first = restoration.start // self.pool.block_size
        table = request.table[first : first + len(places)]
        runs = offload.adjacent(table, places)
        into = [self.pool.memory[:, :, to : to + count] for to, _, count in runs]
        out_of = [self.host.memory[:, :, at : at + count] for _, at, count in runs]
        copy = self.load_link.copy(into, out_of, f"{len(places)} pages")
        self.hold("load", [copy], (self.pool, table), (self.host, places))
        self.counts["bytes_in"] += copy.bytes
        yield copy
        request.computed = restoration.start + len(places) * self.pool.block_size
        if not request.new:
            request.found["cpu"] = request.found.get("cpu", 0) + request.computed - restoration.start

    def run_before(self, chain: list, number: int) -> list[int]:
        """Places in host memory of pages that have arrived, up to page `number` and at most a run of them."""
        places = []
        for prefix in reversed(chain[max(0, number - self.run) : number]):
            place, read = self.incoming.get(prefix, (None, None))
            if self.in_host(prefix):
                place = self.tree.pages[prefix].host
            elif read is None or not read.ready or read.error is not None:
                break
            places.append(place)
        return places[::-1]

    def land(self, places: list[int], number: int):
        """Copy pages to memory of their own on the device -> its slot, and the Transfer."""
        (slot,), size = self.landing.allocate(1), self.pool.block_size
        into = [self.landed[slot][:, :, at * size : (at + 1) * size] for at in range(len(places))]
        out_of = [self.host.memory[:, :, place] for place in places]
        copy = self.load_link.copy(into, out_of, f"page {number}")
        self.hold("load", [copy], (self.host, places))
        self.counts["bytes_in"] += copy.bytes
        return slot, copy

    # L1 to L2

    def save(self, batch):
        """Put what was computed into the tree, and send down what the write policy says."""
        for request, _ in batch.work:
            kept = self.kept(request)
            looked_at, kept.saved = kept.saved, request.registered
            if looked_at == request.registered:
                continue
            pages = self.tree.insert(request.chain[: request.registered])
            pairs = list(zip(pages, request.table))[looked_at:]
            for page, _ in pairs:
                page.asked = max(1, page.asked)
            if self.write_policy == "write_back":
                continue
            if self.write_policy == "write_through_selective":
                pairs = [(page, block) for page, block in pairs if page.asked >= self.write_after]
            lacking = [(page, block) for page, block in pairs if page.host is None and not page.copying]
            if self.save_link.seconds(len(lacking) * self.host.block_bytes) < offload.LONGEST_SAVE:
                self.copy_out(lacking, set(pages), request.timeline)
            self.send_down([page for page, _ in pairs if page.host is not None])
        if len(self.tree.pages) > 2 * (self.pool.size + self.host.size):
            deque(self.tree.oldest(self.near), maxlen=0)  # forget what is nowhere

    def copy_out(self, pairs: list, own=(), timeline=None) -> int:
        """Copy pages from their device blocks to host memory, as far as there are places -> how many. Those
        in `own` are not evicted for them: a chain makes no room for its own end."""
        places = self.room(len(pairs), own, after=self.place_before(pairs))
        if not places:
            return 0
        pages, blocks = zip(*pairs[: len(places)])
        runs = offload.adjacent(blocks, places)
        into = [self.host.memory[:, :, to : to + count] for _, to, count in runs]
        out_of = [self.pool.memory[:, :, at : at + count] for at, _, count in runs]
        copy = self.save_link.copy(into, out_of, f"save {len(places)}")
        for page in pages:
            page.copying = True
        then = partial(self.copied, pages, places, copy, timeline)
        self.hold("save", [copy], (self.pool, blocks), (self.host, places), then=then)
        self.host.release(places)
        self.counts["swap_outs"] += len(places)
        self.counts["bytes_out"] += copy.bytes
        return len(places)

    def place_before(self, pairs: list) -> int | None:
        """Where the page before these is: adjacent places are copied at once."""
        before = self.tree.pages.get(pairs[0][0].prefix.parent) if pairs else None
        return before.host if before else None

    def copied(self, pages, places, copy, timeline, well: bool):
        for page, place in zip(pages, places):
            page.copying = False
            if well:
                self.keep(page, place)
        if timeline:
            timeline.add("save", copy.label, *copy.span())
        if self.write_policy != "write_back":
            self.send_down([page for page in pages if page.host is not None])
        else:
            self.counts["pages_written" if well else "pages_lost"] += len(pages)

    def keep(self, page: Page, place: int):
        """The page is in host memory, unless it is there already."""
        self.host.register(place, page.prefix)
        page.host = self.host.block_of[page.prefix]

    def room(self, count: int, own=(), after: int | None = None) -> list[int]:
        """Up to `count` places in host memory. The least recently used pages go for them, each once: those
        that are still being written will be free."""
        host = self.host
        for page in self.tree.oldest(self.near):
            if host.free.count(1) + len(host.leaving) >= count or page in own:
                break
            if page.host in host.cached:  # nobody reads or writes it
                host.evict(page.host)
        return host.allocate(min(count, host.free.count(1)), after) if count else []

    def evicting(self, block: int, prefix):
        """Under write_back a dirty page keeps its device block until host memory has it."""
        page = self.tree.pages.get(prefix)
        if self.write_policy != "write_back" or page is None or page.copying:
            return
        if page.host is None and not self.is_stored(page):
            self.counts["dirty_evicted"] += 1
            self.progress = self.progress if self.outgoing else time.perf_counter()
            page.copying, out = True, Transfer("save", "written back")
            self.hold("evicted", [out], (self.pool, [block]))
            self.outgoing.append((page, block, out))

    def write_back(self):
        """Copy out what is being evicted; what waits too long for a place, in vain, is lost."""
        while self.outgoing:
            copied = self.copy_out([(page, block) for page, block, _ in self.outgoing])
            late = time.perf_counter() - self.progress > LOST_AFTER
            if not copied and not late:
                break
            for page, _, out in [self.outgoing.popleft() for _ in range(max(1, copied))]:
                out.finish(out.issued, time.perf_counter())
                page.copying = bool(copied)
                self.counts["pages_lost"] += not copied
            self.progress = time.perf_counter() if copied else self.progress

    # L2 to L3

    def evicting_host(self, place: int, prefix):
        """Under write_back a dirty page keeps its place until storage has it."""
        page = self.tree.pages[prefix]
        page.host = None
        if self.write_policy == "write_back" and self.storage and not self.is_stored(page):
            self.counts["dirty_evicted"] += 1
            if self.storage.writer.hangs:
                self.counts["pages_lost"] += 1
            else:
                self.write([page], [place])

    def send_down(self, pages: list[Page]):
        """Have pages written to storage, from where they are in host memory."""
        for page in pages:
            if self.storage and not page.storing and not self.is_stored(page):
                page.storing = True
                self.unwritten.append(page)

    def write_through(self):
        """Write what waits for that. What is being written is locked: at most a quarter of host memory."""
        if self.storage and self.storage.writer.hangs:
            self.drop_writes()
        while self.unwritten and self.writing < max(1, self.host.size // 4):
            pages = [self.unwritten.popleft() for _ in range(min(len(self.unwritten), self.run))]
            for page in pages:
                page.storing = False
            pages = [page for page in pages if page.host is not None]  # else it was evicted before
            if pages:
                self.write(pages, [page.host for page in pages])

    def write(self, pages: list[Page], places: list[int]):
        contents = [self.array[:, :, place] for place in places]
        write = self.storage.set([page.prefix.key for page in pages], contents)
        for page in pages:
            page.storing = True
        self.writing += len(pages)
        then = partial(self.written, pages, write, self.storage)
        self.hold("written", [write], (self.host, places), then=then)

    def written(self, pages: list[Page], write, storage, well: bool):
        self.writing -= len(pages)
        for page in pages:
            page.storing, page.stored = False, storage if well else page.stored
        self.counts["storage_pages_written"] += write.value or 0
        if self.write_policy == "write_back":
            self.counts["pages_written" if well else "pages_lost"] += len(pages)

    def drop_writes(self):
        for page in self.unwritten:
            page.storing = False
        self.unwritten.clear()

    # In every step, and at the end

    def poll(self):
        super().poll()
        for prefetch in list(self.prefetches):
            self.read(prefetch)
        self.write_back()
        self.write_through()
        if self.prefetch_policy == "both_ends":
            self.divide()

    def finished(self, request):
        if request.kept and request.kept.prefetch:
            self.end(request.kept.prefetch)
        request.kept = None
        self.tree.match(request.chain)  # what it found was used

    def in_host(self, prefix) -> bool:
        page = self.tree.pages.get(prefix)
        return page is not None and page.host is not None

    def is_stored(self, page: Page) -> bool:
        return self.storage is not None and page.stored is self.storage

    def near(self, page: Page) -> bool:
        on_its_way = page.copying or page.storing
        return page.host is not None or on_its_way or page.prefix in self.pool.block_of

    def close(self):
        """What is on its way down arrives, if that is soon. Under write_back everything goes down."""
        for pool in (self.pool, self.host) if self.write_policy == "write_back" and self.storage else ():
            for block in list(pool.cached):
                pool.evict(block)
            self.flush()
        self.flush()
        super().close()
        if self.storage:
            self.storage.close()

    def flush(self):
        until = time.perf_counter() + LONGEST_CLOSE
        while (any(self.under_way.values()) or self.unwritten) and time.perf_counter() < until:
            self.poll()
            time.sleep(1e-3)


# 3. The demo -----------------------------------------------------------------------------------

CONVERSATIONS, ON_DEVICE, ON_HOST = 8, 2, 4


def demo(model, frontend: Frontend, arguments):
    """Conversations that fit in no single tier, with one, two and three of them, and with an L3 that another
    engine has filled; then the prefetch policies on an L3 that is as slow as computing."""
    with tempfile.TemporaryDirectory() as folder:
        # 1. Ask: each conversation twice, in any order
        rng, new = random.Random(0), max(2, min(arguments.max_tokens, 12))
        talks = [lesson.conversation(frontend, rng, frontend.context // 4) for _ in range(CONVERSATIONS)]
        longest = max(len(frontend.encode(None, talk)) for talk in talks) + 3 * new + 32
        pages = -(-longest // arguments.block_size)
        url, options = f"file:{folder}", {**vars(arguments), "gpu_blocks": ON_DEVICE * pages}
        ways = {
            "L1": dict(cpu_blocks=1, storage=None),
            "L1, L2": dict(cpu_blocks=ON_HOST * pages, storage=None),
            "L1, L2, L3": dict(cpu_blocks=ON_HOST * pages, storage=url),
            "L1, L2, L3 of another engine": dict(cpu_blocks=ON_HOST * pages, storage=url),
        }
        taken = {}
        for name, tiers in ways.items():
            engine = make_engine(model, argparse.Namespace(**{**options, **tiers}))
            taken[name] = converse(engine, frontend, talks, random.Random(1), new)
            tree = drawn_tree(engine.cache)
            last = taken[name][-1]
            counters = engine.counters()
            engine.close()
        # 2. Time: one long history that only storage has, under each policy
        slow = dict(storage=url, prefetch="both_ends", always_restore=True, gpu_blocks=None, cpu_blocks=None)
        engine = make_engine(model, argparse.Namespace(**{**options, **slow}))
        text = lesson.document(frontend, rng, min(frontend.context, 2048) * 7 // 8, lesson.SECRET)
        prompt = frontend.request(messages=[dict(role="user", content=text)]).tokens
        engine.generate([Request(prompt, 1)])
        asked = policies(engine, prompt)
        link = engine.cache.load_link
        engine.close()
    every = [request for requests in [*taken.values(), *asked.values()] for request in requests]
    verified = lesson.equal_to_baseline(model, every)

    # 3. Show
    print(
        f"{CONVERSATIONS} conversations of up to {longest} tokens, each asked twice; L1 holds {ON_DEVICE} of "
        f"them, L2 {ON_HOST}\n{arguments.write_policy}, {arguments.prefetch}; {link}\n\n"
        f"{'the second time':30}{'L1':>6}{'L2':>6}{'L3':>6}  computed"
    )
    for name, requests in taken.items():
        print(f"  {name:28}" + "".join(f"{share:6.0%}" for share in shares(requests[CONVERSATIONS:])))
    second = {name: requests[CONVERSATIONS:] for name, requests in taken.items()}
    times = {name: [one.outcome.ttft_ms for one in requests] for name, requests in second.items()}
    rows = lesson.table("\nTTFT, the second time", times, "ttft_ms", "ms")
    for row, requests in zip(rows, taken.values()):
        row.update(zip(("gpu", "cpu", "storage", "computed"), shares(requests[CONVERSATIONS:])))
        row["first_time_from_storage"] = shares(requests[:CONVERSATIONS])[2]
    print(f"  (in the last row the first time, too, {rows[-1]['first_time_from_storage']:.0%} came from L3)")
    print(f"\nThe tree of that engine: tokens, and where they are\n{tree}\n")
    speed = "storage as fast as computing, the guard off"
    times = {name: [one.outcome.ttft_ms for one in requests] for name, requests in asked.items()}
    rows += lesson.table(f"TTFT, {len(prompt)} tokens, {speed}", times, "ttft_ms", "ms")
    better, both = (statistics.median(times[name]) for name in ("computed", "both_ends"))
    better = min(better, statistics.median(times["wait_complete"]))
    print(f"  both_ends: {better / both:.2f}x as soon as the better of computing all and waiting for all\n")
    timeline = asked["both_ends"][-1].timeline
    print(f"both_ends (p: prefill, pages on their way; s: pages to host memory)\n{timeline.chart()}\n")
    print("What a page's move takes in each layout: pieces that are adjacent in host memory, and their bytes")
    for layout in LAYOUTS:
        row = dict(layout=layout, **pieces(model.config, arguments.block_size, model.dtype, layout))
        rows.append(row)
        words = "  {layout:18} a layer to L1: {to_device:2} x {device_bytes:6}; "
        print((words + "a page to L3: {to_storage:3} x {storage_bytes:6}").format(**row))
    print(
        "\nWhat is in no tier is computed, and what is far away is waited for only as a policy says. And if\n"
        "not even the weights fit on the device? Chapter 08."
    )
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), counters=counters)
    return dict(report, verified=verified, rows=rows), [timeline, last.timeline]


def converse(engine, frontend: Frontend, talks: list, rng, new: int) -> list[Request]:
    """Ask all conversations, then each again with one more question -> the requests."""
    asked, answers = [], {}
    for turn in range(2):
        for number in rng.sample(range(len(talks)), len(talks)):
            messages = list(talks[number])
            if turn:
                messages.append(dict(role="assistant", content=answers[number]))
                messages.append(dict(role="user", content=lesson.TURNS[2]))
            (request,) = engine.generate([frontend.request(messages=messages, max_tokens=new)])
            answers[number] = request.outcome.text or "."
            asked.append(request)
        lesson.settle(engine)
    return asked


def shares(requests: list[Request]) -> list[float]:
    """Of the prompts' tokens: found on the device, in host memory, in storage; computed."""
    prompts = sum(request.prompt_tokens for request in requests)
    found = [sum(request.found.get(tier, 0) for request in requests) for tier in ("gpu", "cpu", "storage")]
    return [tokens / prompts for tokens in (*found, prompts - sum(found))]


def policies(engine, prompt: list[int]) -> dict[str, list[Request]]:
    """The same question, when only an L3 that is as slow as computing has its history, under each policy."""
    cache, storage = engine.cache, engine.cache.storage
    seconds = engine.restorer.seconds_to_compute(0, len(prompt))
    size = len(prompt) // cache.pool.block_size * cache.host.block_bytes
    storage.bandwidth, cache.timeout = links.Bandwidth(size / seconds), (seconds / 3, 0.0)

    def ask(policy: str) -> Request:
        lesson.settle(engine)
        for pool in ("device", "host"):
            engine.evict(pool)
        request = Request(prompt, 2)
        cache.storage = None if policy == "computed" else storage
        cache.prefetch_policy = policy
        engine.generate([request])
        return request

    cache.measure_storage()
    ways = {name: partial(ask, name) for name in ("computed", *PREFETCH)}
    asked = lesson.in_turn(ways, 3)
    cache.storage = storage
    return asked


def pieces(config, block_size: int, dtype, layout: str) -> dict:
    """-> how many adjacent pieces of host memory a layer of a page is on its way to the device, and a whole
    page on its way to storage, and their bytes."""
    order = LAYOUTS[layout]
    shape = config.num_hidden_layers, 2, 4, block_size, config.num_key_value_heads, config.head_dim
    memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device="meta")
    memory = memory.permute([order.index(axis) for axis in range(6)])
    found = {}
    for name, part in ("device", memory[0, :, 0]), ("storage", memory[:, :, 0]):
        strides = sorted(zip(part.stride(), part.shape))  # innermost first
        adjacent = 1
        for stride, count in strides:
            adjacent *= count if stride == adjacent else 1
        found[f"to_{name}"], found[f"{name}_bytes"] = part.numel() // adjacent, adjacent * dtype.itemsize
    return found


def drawn_tree(cache: TieredCache, most: int = 8) -> str:
    """The first nodes as text: tokens, and the tiers that have all of them."""
    lines, todo = [], [(child, 0) for child in cache.tree.root.children.values()]
    while todo:
        node, depth = todo.pop(0)
        tiers = {
            "L1": all(page.prefix in cache.pool.block_of for page in node.pages),
            "L2": all(page.host is not None for page in node.pages),
            "L3": all(cache.is_stored(page) for page in node.pages),
        }
        where = " ".join(tier if there else "  " for tier, there in tiers.items())
        lines.append(f"  {where}  {'  ' * depth}{len(node.pages) * cache.pool.block_size:5} tokens")
        todo = [(child, depth + 1) for child in node.children.values()] + todo
    return "\n".join(lines[:most] + [f"  ... and {len(lines) - most} more nodes"] * (len(lines) > most))


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    add, number, seconds = parser.add_argument, partial(cli.bounded, int, 1), cli.bounded(float, 0, 1e6)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--cpu-blocks", type=number(1 << 26), metavar="N", help="pages in host memory")
    words = "of host memory to the device's, in pages (default 4)"
    size.add_argument("--hicache-ratio", type=cli.bounded(float, 1e-3, 1e6), metavar="R", help=words)
    gigabytes = cli.bounded(float, 1e-6, 1e6)
    size.add_argument("--hicache-size", type=gigabytes, metavar="GB", help="of host memory")
    add("--layout", choices=LAYOUTS, default="page_first_direct", help="of host memory (page_first_direct)")
    words = "when pages go down (write_through)"
    add("--write-policy", choices=WRITE, default="write_through", help=words)
    words = "write_through_selective: with the request that asks for the N-th time (2)"
    add("--write-after", type=number(1 << 20), default=2, metavar="N", help=words)
    words = "the shared tier: file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or module:Class"
    add("--storage", metavar="URL", help=words)
    words = "what its back end takes beside"
    add("--storage-config", type=json_object, default={}, metavar="JSON", help=words)
    words = "model reading from it that is so slow"
    add("--storage-bandwidth", type=both.bandwidth, metavar="GB/S[:GB/S...@SECONDS]", help=words)
    words = "how long a request waits for storage (timeout)"
    add("--prefetch", choices=PREFETCH, default="timeout", help=words)
    words = "that storage must have, or it is not read (256)"
    add("--prefetch-threshold", type=number(1 << 24), default=256, metavar="TOKENS", help=words)
    add("--prefetch-timeout", type=seconds, default=1.0, metavar="S", help="of every prefetch (1)")
    words = "and for each 1,024 tokens of it (0.25)"
    add("--prefetch-timeout-per-1k", type=seconds, default=0.25, metavar="S", help=words)
    add("--always-restore", action="store_true", help="the policies alone decide, and not the engine's guard")
    links.add_arguments(parser)


def json_object(string: str) -> dict:
    """An argparse type."""
    value = json.loads(string)
    if not isinstance(value, dict):
        raise ValueError
    return value


def make_engine(model, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache."""
    size, host = arguments.block_size, torch.device("cpu")
    block_bytes = size * model.config.kv_numbers_per_token * model.dtype.itemsize
    longest = -(-model.config.max_position_embeddings // size)
    on_device = arguments.gpu_blocks or arguments.max_running * longest
    useful, asked = int((arguments.hicache_ratio or 4) * on_device), arguments.cpu_blocks
    if arguments.hicache_size or arguments.hicache_ratio:
        asked = max(1, int(1e9 * (arguments.hicache_size or 0) / block_bytes) or useful)
    blocks = cli.blocks_that_fit(asked, useful, block_bytes, host, "--cpu-blocks")
    storage, name = None, store.label(arguments.storage or "none")
    if arguments.storage:
        backend = store.open_backend(arguments.storage, arguments.storage_config)
        storage = store.Storage(backend, name, arguments.storage_bandwidth)
    cache = TieredCache(
        blocks, links.bandwidth(model, arguments.link, arguments.platform), storage, arguments.prefetch,
        arguments.write_policy, arguments.layout, arguments.write_after, arguments.prefetch_threshold,
        (arguments.prefetch_timeout, arguments.prefetch_timeout_per_1k),
    )  # fmt: skip
    engine = paged.make_engine(model, arguments, cache)
    words = f"{blocks} pages of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB, over a {cache.load_link}"
    print(f"Host: {words}; storage: {name}", file=sys.stderr)
    return engine


def compare(arguments) -> dict:
    return {**paged.compare(arguments), "three tiers (07)": (make_engine, True)}


if __name__ == "__main__":
    cli.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo, compare)
