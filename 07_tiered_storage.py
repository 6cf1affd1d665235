"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than the device's, but it is one machine's, and it is lost with the
process. A service runs many engines, and what one of them has read the others compute again.

The mechanism. Pages of K and V live in three tiers: on the device (L1), in host memory (L2), and in storage
that many engines share (L3). A radix tree says what lies where. A request goes down the tree along its
tokens: it finds a run of pages on the device, then one in host memory, from where it is loaded layer by layer
(chapter 03). Storage is asked what it has as soon as the request stands in line, on a thread of its own, and
what comes after those two is fetched from there:

    tokens   0          320            800                        1792      16 tokens a page
    pages    |== L1 ====|==== L2 ======|:::::: L3 ::::::::::::::::|
             found      | by layers    | prefetched into L2, then by layers

How long does it wait for storage? `best_effort`: not at all, it takes what has come when its turn is there.
`wait_complete`: to the end. `timeout`: a fixed time and some more for each 1,024 tokens, counted from the
request's arrival. And, with chapter 06's idea, `both_ends`: it waits only for storage to say what it has, and
computes from the front while pages arrive from the back. Beside that the engine's guard holds: what would
take more than 0.8 of the time to compute it is computed, and nobody waits longer than computing would take.
`--always-restore` switches it off, and shows what the policies alone do.

When do pages go down? `write_through`: as soon as they are full. `write_through_selective`: when a second
request has them on the device. `write_back`: when they are evicted, one tier down each time, unless a lower
tier has them already. The engine waits for the copy from device to host; what leaves host memory unwritten is
copied aside, and written later. What a crash costs: under write_through what was under way, under
write_through_selective also what only one request has had, under write_back all that storage has not got yet.

The engine's rules hold (common/restoring.py). The device's pool keeps its own index, and the tree asks
it. What a thread or a copy still reads or writes is referenced in its pool, which is what locks a page. And
nothing is found before it has arrived.

Source: HiCache, the hierarchical KV cache of SGLang (design document); its radix tree is RadixAttention's
(Zheng et al., 2024, section 3).

    python 07_tiered_storage.py --demo
    python 07_tiered_storage.py --storage file:pages       # the server, on http://127.0.0.1:5000
"""

import argparse
import importlib
import random
import shell.cli as cli
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

import torch

from common import link as links
from common import store
from common.requests import Request
from common.restoring import LATER, PAUSE, Match
from shell import backends, lesson, modelled_link
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
both_ends = importlib.import_module("06_bidirectional")
AGAIN, NEXT = 1.0, 4  # seconds after which storage is asked again, for so many requests that are next in line
PREFETCH = "best_effort", "wait_complete", "timeout", "both_ends"
WRITE = "write_through", "write_through_selective", "write_back"
# What lies next to what in host memory: the order of [layers, 2, places, page size, KV heads, head size]
LAYOUTS = {
    "layer_first": (0, 1, 2, 3, 4, 5),  # as on the device: K, or V, of a layer in adjacent places
    "page_first": (2, 3, 0, 1, 4, 5),  # all layers of a token
    "page_first_direct": (2, 0, 1, 3, 4, 5),  # all tokens of a layer in a page, as a page in storage
}

# 1. The tree -----------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Page:
    """The last block of what its prefix stands for. The device's pool knows its place there."""

    prefix: object
    host: int | None = None  # its place in host memory
    stored: bool = False  # storage has it
    first_request: int = 0  # that has had it on the device
    shared: bool = False  # another request has had it too
    coming: bool = False  # on its way into host memory
    storing: bool = False  # or from there to storage

    @property
    def near(self) -> bool:
        """Host memory has it, or is about to."""
        return self.host is not None or self.coming


@dataclass(eq=False, slots=True)
class Node:
    """Pages that follow each other; it is split where conversations part, or one of them has ended."""

    parent: "Node | None"
    pages: list[Page]
    children: dict = field(default_factory=dict)  # Prefix of their first page -> Node


class HiRadixTree:
    """All known pages, over their prefixes. Pools know which ones are locked, and which were used last."""

    def __init__(self):
        self.root = Node(None, [])
        self.pages: dict[object, Page] = {}  # by Prefix

    def match(self, chain: list) -> list[Page]:
        """-> the pages of the longest known beginning of `chain`. It may split a node, but moves no data."""
        return self.walk(chain)[1]

    def walk(self, chain: list) -> tuple[Node, list[Page]]:
        """-> the last node along `chain`, split where the chain leaves it, and all pages down to there."""
        node, pages = self.root, []
        while len(pages) < len(chain) and (child := node.children.get(chain[len(pages)])):
            ours, same = chain[len(pages) : len(pages) + len(child.pages)], 1
            while same < len(ours) and child.pages[same].prefix is ours[same]:
                same += 1
            node = child if same == len(child.pages) else self.split(child, same)
            pages += node.pages
        return node, pages

    def split(self, node: Node, at: int) -> Node:
        """The first `at` pages of a node become its parent -> that."""
        upper = Node(node.parent, node.pages[:at])
        upper.parent.children[upper.pages[0].prefix] = upper
        node.parent, node.pages = upper, node.pages[at:]
        upper.children[node.pages[0].prefix] = node
        return upper

    def insert(self, chain: list) -> list[Page]:
        """-> the pages of `chain`, new ones where there are none."""
        node, pages = self.walk(chain)
        if len(pages) < len(chain):
            new = [Page(prefix) for prefix in chain[len(pages) :]]
            self.pages.update((page.prefix, page) for page in new)
            if node is self.root or node.children:
                node.children[chain[len(pages)]] = Node(node, new)
            else:
                node.pages += new  # a conversation goes on
            pages += new
        return pages

    def nodes(self) -> list[Node]:
        """-> all nodes below the root, parents before their children."""
        found = [self.root]
        for node in found:
            found += node.children.values()
        return found[1:]

    def forget(self, near):
        """Drop pages at the ends of branches that are not `near` any more."""
        for node in reversed(self.nodes()):
            first = node.pages[0].prefix
            while node.pages and not node.children and not near(node.pages[-1]):
                del self.pages[node.pages.pop().prefix]
            if not node.pages:
                del node.parent.children[first]


# 2. The Cache ----------------------------------------------------------------------------------

@dataclass(eq=False)
class Prefetch:
    """What storage may have of a request's pages, on its way into host memory."""

    chain: list  # the request's full pages; once storage has answered, up to where it has them
    first: int  # the first page that is asked for
    asked_at: float  # seconds of time.perf_counter()
    until: float  # when `timeout` stops waiting
    timeline: object
    over: bool  # every read is over, there is no place to read into, or nobody waits for it
    answered: bool = False  # storage has said how many pages it has
    reads: list = field(default_factory=list)  # Transfers that it has begun
    unread: int = 0  # pages that no read has begun for
    brought: set = field(default_factory=set)  # Pages that its reads have brought
    worth: bool = False  # it was decided that waiting pays


@dataclass(eq=False)
class Kept:
    """What the Cache remembers of a request."""

    seen: int = 0  # full blocks, when `save` looked last
    sent: int = 0  # leading blocks whose copy to host memory is over or begun
    prefetch: Prefetch | None = None


class TieredCache(offload.HostCache):
    """Chapter 03's host memory and its copies, layer by layer in and in the background out, under a radix
    tree, and storage behind it."""

    fields = {}

    def __init__(
        self, blocks: int, bandwidth=None, storage=None, prefetch="timeout", write="write_through",
        layout="page_first_direct", threshold=256, timeout=(1.0, 0.25),
    ):  # fmt: skip
        """`blocks` in host memory, `bandwidth` of the modelled link to them; `storage`: a store.Storage.
        `prefetch`, `write` and `layout` are policies by name. `threshold`: tokens that a prefetch must bring.
        `timeout`: seconds, of every prefetch and for each 1,024 tokens of it."""
        super().__init__(blocks, bandwidth)
        self.storage, self.prefetch_policy, self.write_policy = storage, prefetch, write
        self.layout, self.threshold, self.timeout = layout, threshold, timeout

    def host_memory(self, shape):
        """[L, 2, places, page size, KVH, hd], of which `layout` says what lies next to what."""
        order = LAYOUTS[self.layout]
        memory = super().host_memory([shape[axis] for axis in order])
        return memory.permute([order.index(axis) for axis in range(6)])

    def attach(self, engine):
        super().attach(engine)
        self.tree, self.host.evicting = HiRadixTree(), self.evicting_host
        self.array = links.as_integers(self.host.memory)  # for NumPy
        self.run = max(1, both_ends.CHUNK // self.pool.block_size)  # pages that are read or written at once
        self.prefetches: dict[Prefetch, None] = {}  # that read, first come, first served
        self.reading = self.writing = 0  # pages on their way from storage, and to it
        self.unwritten: dict[Page, None] = {}  # in host memory, to be written to storage
        self.fresh: set = set()  # prefixes of what was written lately, and of what comes before it
        self.matched: list[Page] = []  # about to be loaded, and so not evicted for that same request
        if self.storage:
            self.storage.open(engine.wake.set)

    def measure_storage(self):
        if self.storage:
            self.hold("measure", [self.storage.measure(self.run * self.host.block_bytes)])

    def idle(self):
        self.measure_storage()
        return super().idle()

    # L3 to L2: prefetch

    def submitted(self, request):
        """Ask storage for all pages of the request, which also makes them the most recently used there. Fetch
        those that come behind the pages on the device and in host memory."""
        before, request.kept = request.kept and request.kept.prefetch, Kept()
        size, on_device = self.pool.block_size, self.pool.block_of
        chain = request.chain[: request.history // size]
        if self.storage is None or not chain:
            return
        if self.storage.silent:
            return self.probe()
        pages = self.tree.match(chain)
        first = len(list(takewhile(lambda page: page.host is not None or page.prefix in on_device, pages)))
        tokens, now = (len(chain) - first) * size, time.perf_counter()
        until = request.received + self.timeout[0] + self.timeout[1] * tokens / 1024
        prefetch = Prefetch(chain, first, now, until, request.timeline, over=tokens < self.threshold)
        if before:
            prefetch.brought = before.brought
            self.end(before)
        answer, request.kept.prefetch = self.storage.exists([prefix.key for prefix in chain]), prefetch
        self.hold("ask", [answer], then=partial(self.answered, prefetch, answer))

    def probe(self):
        """Find out whether storage answers again, unless that is under way."""
        if not any(self.under_way[lane] for lane in ("ask", "read", "measure")):
            self.hold("ask", [self.storage.exists([bytes(32)])])
            self.measure_storage()

    def ask_again(self):
        """For those who are next in line: another engine may have written what storage lacked."""
        size, now = self.pool.block_size, time.perf_counter()
        for request in list(islice(self.engine.waiting, NEXT)) if self.storage else ():
            before, full = request.kept.prefetch, request.history // size
            if before is None or before.over and len(before.chain) < full and now > before.asked_at + AGAIN:
                self.submitted(request)

    def answered(self, prefetch: Prefetch, answer, well: bool):
        """Storage has said which pages it has: believe that."""
        there = answer.value if well else [False] * len(prefetch.chain)
        pages = len(list(takewhile(bool, there[prefetch.first :])))
        if well:
            for page, stored in zip(self.tree.insert(prefetch.chain[: prefetch.first + pages]), there):
                page.stored = stored
            for prefix in prefetch.chain[prefetch.first + pages :]:
                if page := self.tree.pages.get(prefix):
                    page.stored = False  # or behind a gap: write it again when that is filled
        pages = pages if pages * self.pool.block_size >= self.threshold else 0
        prefetch.answered, prefetch.unread = True, pages
        prefetch.chain = prefetch.chain[: prefetch.first + pages]
        if not prefetch.over:
            self.prefetches[prefetch] = None

    def read(self, prefetch: Prefetch):
        """Begin to read what host memory lacks, as far as there are places: reads under way hold at most half
        of them. The last pages come first under both_ends."""
        pages, doubted = self.tree.insert(prefetch.chain), self.storage.doubted
        numbers, on_device = range(len(pages)), self.pool.block_of
        numbers = numbers[::-1] if self.prefetch_policy == "both_ends" else numbers
        sound = takewhile(lambda number: pages[number].prefix.key not in doubted, numbers)
        wanted = [number for number in sound if not (pages[number].near or pages[number].prefix in on_device)]
        most = max(0, self.host.size // 2 - self.reading)
        brought = set().union(*(other.brought for other in self.prefetches))  # they are about to be used
        own = {page.prefix for page in brought.union(pages)}
        places = self.host.allocate(self.host.make_room(min(len(wanted), most), own))
        for at in range(0, len(places), self.run):
            numbers = wanted[at : min(at + self.run, len(places))]
            part = [pages[number] for number in numbers]
            self.read_run(prefetch, part, places[at : at + self.run], f"page {numbers[0]}")
        prefetch.unread = len(wanted) - len(places)
        coming = any(page.coming for page in pages[prefetch.first :])
        prefetch.over = not coming and not (prefetch.unread and self.reading)

    def read_run(self, prefetch: Prefetch, pages: list[Page], places: list[int], label: str):
        into = [self.array[:, :, place] for place in places]
        read = self.storage.get([page.prefix.key for page in pages], into, label)
        prefetch.reads.append(read)
        self.reading += len(pages)
        then = partial(self.arrived, prefetch, pages, places, read)
        self.bring("read", read, pages, places, then=then)

    def arrived(self, prefetch: Prefetch, pages: list[Page], places: list[int], read, well: bool):
        self.reading -= len(pages)
        self.keep(pages, places, well)
        if well:
            prefetch.brought.update(pages)
            prefetch.timeline.add("storage", read.label, *read.span())
            self.counts["storage_pages_read"] += len(pages)
        else:
            self.end(prefetch)  # storage was wrong about this chain, or does not answer
            for page in pages:
                page.stored = page.prefix.key not in self.storage.doubted

    def bring(self, lane: str, transfer, pages: list[Page], places: list[int], *held, then):
        """The pages are on their way into host memory; `then` must `keep` them."""
        for page in pages:
            page.coming = True
        self.hold(lane, [transfer], *held, given=[(self.host, places)], then=then)

    def keep(self, pages: list[Page], places: list[int], well: bool):
        """The pages are found in host memory, if they have arrived."""
        for page, place in zip(pages, places):
            page.coming = False
            if well:
                self.host.register(place, page.prefix)
                page.host = place

    def end(self, prefetch: Prefetch):
        """Nobody waits for it any more: cancel the reads that have not begun. What others bring is found."""
        prefetch.over = True
        for read in prefetch.reads:
            read.cancel()
        self.prefetches.pop(prefetch, None)

    # L2 to L1

    def match(self, request):
        """What host memory has, and under both_ends what storage has behind that."""
        prefetch, size = request.kept.prefetch, self.pool.block_size
        if prefetch and request.computed < len(prefetch.chain) * size and self.waits(request, prefetch):
            return LATER
        first, full = request.computed // size, request.history // size
        pages = self.tree.match(request.chain[:full])[first:]
        self.matched = found = list(takewhile(lambda page: page.host is not None, pages))
        near, places = (first + len(found)) * size - request.computed, [page.host for page in found]
        seconds = self.load_link.seconds(len(found) * self.host.block_bytes)
        if self.prefetch_policy == "both_ends" and prefetch and prefetch.answered:
            start, end = request.computed + near, len(prefetch.chain) * size
            last = self.tree.pages.get(prefetch.chain[-1]) if end > start else None
            if last and (last.host is not None or not prefetch.over):
                load = self.storage.seconds(prefetch.unread * self.host.block_bytes)
                compute = self.engine.estimates.seconds_to_compute(start, end)
                with_both = seconds + both_ends.meeting(load, compute)[0]
                if not found or self.engine.estimates.pays(with_both, request.computed, end):
                    tokens, way = end - request.computed, both_ends.BothEnds
                    return Match(tokens, with_both, places, "storage", store=prefetch, way=way)
        if found:
            stored = min(near, size * sum(page in prefetch.brought for page in found)) if prefetch else 0
            parts = dict(cpu=near - stored, storage=stored)
            parts = {source: tokens for source, tokens in parts.items() if tokens}
            return Match(near, seconds, places, " and ".join(parts), parts=parts)

    def waits(self, request, prefetch: Prefetch) -> bool:
        """Whether the policy has the request wait for storage, if that takes less than 0.8 of computing."""
        now, patience = time.perf_counter(), request.patience
        if self.storage.silent:
            self.end(prefetch)
            return False
        if self.prefetch_policy == "both_ends":
            return not (prefetch.answered or prefetch.over) and now < patience
        until = dict(best_effort=0.0, wait_complete=patience, timeout=min(prefetch.until, patience))
        if prefetch.over or now > until[self.prefetch_policy]:
            self.end(prefetch)
        elif prefetch.answered and not prefetch.worth:
            tokens = len(prefetch.chain) * self.pool.block_size - request.computed
            seconds = self.storage.seconds(prefetch.unread * self.host.block_bytes)
            seconds += self.load_link.seconds(tokens // self.pool.block_size * self.host.block_bytes)
            offer = Match(tokens, seconds, [], "storage")
            prefetch.worth = self.engine.estimates.worth(request, offer)
            if not prefetch.worth:
                self.end(prefetch)
        return not prefetch.over

    # L3 to L1, while prefill computes from the front

    def restore(self, request, restoration, match):
        """Under both_ends as in chapter 06: prefill computes a portion from the front, and what has been read
        comes from the back. A page is claimed first, by lowering `limit`, and then copied to the request's
        block; those that the next step may compute, up to `front`, are not claimed."""
        prefetch, size, depth = match.store, self.pool.block_size, len(self.model.layers)
        if prefetch is None:
            yield from super().restore(request, restoration, match)
            return
        # 1. What host memory has
        if match.blocks:
            yield from self.copy_in(request, restoration.start, match.blocks)
            request.computed = (restoration.start // size + len(match.blocks)) * size
            if not request.readmitted:
                near = request.computed - restoration.start
                request.found["cpu"] = request.found.get("cpu", 0) + near
        # 2. From both ends
        copies = deque()
        try:
            while copies or restoration.limit > request.computed:
                super().poll()  # what has been read meanwhile is in host memory
                front, end = request.computed + restoration.portion, restoration.limit
                chain = prefetch.chain[self.pool.num_blocks(front) : end // size]
                pages = map(self.tree.pages.get, reversed(chain))
                there = takewhile(lambda page: page and page.host is not None, pages)
                if places := [page.host for page in there][::-1]:
                    restoration.limit, restoration.layers = end - len(places) * size, 0
                    copies.extend(self.copy_in(request, restoration.limit, places))
                while copies and copies[0].ready:
                    copies[0].check()
                    restoration.passed.append(copies.popleft())
                if not copies:
                    restoration.layers = depth
                if restoration.limit > request.computed:
                    if not restoration.portion:  # between two steps (see `poll`): how far the next one goes
                        restoration.portion = self.portion(request)
                    if prefetch.over and not copies and restoration.limit > front:
                        return  # there is no more: prefill goes on to the limit
                    yield PAUSE
                elif copies:
                    yield copies.popleft()
            restoration.layers = depth
        finally:
            restoration.portion = restoration.end
            self.end(prefetch)
            request.timeline.plan = both_ends.drawn(restoration)

    def portion(self, request) -> int:
        """How many tokens prefill computes next, up to the end of a page: its share of what is left, at the
        last speeds of both sides (chapter 06)."""
        restoration, size = request.restoration, self.pool.block_size
        tokens = left = restoration.limit - request.computed
        if self.storage.measured.passes and time.perf_counter() < restoration.deadline:
            load = left / size * self.host.block_bytes / self.storage.speed()
            compute = self.engine.estimates.seconds_to_compute(request.computed, restoration.limit)
            tokens = both_ends.portion(left, load, compute)
        end = request.computed + min(tokens, self.engine.token_budget)
        return self.pool.num_blocks(end) * size - request.computed

    # L1 to L2

    def save(self, batch):
        """Put what was computed into the tree, and send down what the write policy says."""
        for request, _ in batch.work:
            seen, kept, request.kept.seen = request.kept.seen, request.kept, request.registered
            if seen == request.registered:
                continue
            pages = self.tree.insert(request.chain[: request.registered])
            for page in pages[seen:]:
                page.first_request = page.first_request or request.id
                page.shared |= page.first_request != request.id
            if self.write_policy != "write_back":
                pairs = list(zip(pages, request.table))[kept.sent :]
                pairs = list(takewhile(lambda pair: self.wanted(pair[0]), pairs))
                lacking = [(page, block) for page, block in pairs if not page.near]
                if self.soon(len(lacking)):
                    self.back_up(lacking, request)
                sent = [page for page, _ in takewhile(lambda pair: pair[0].near, pairs)]
                kept.sent += len(sent)  # retry the others at the next full block, so that no gap is skipped
                self.send_down(sent)
        if len(self.tree.pages) > 2 * (self.pool.size + self.host.size):
            on_device = self.pool.block_of
            self.tree.forget(lambda page: page.near or page.storing or page.prefix in on_device)

    def wanted(self, page: Page) -> bool:
        """Whether the write policy wants a page in the tiers below."""
        return page.shared or self.write_policy != "write_through_selective"

    def back_up(self, pairs: list, request):
        """Copy (Page, device block) pairs of a request to host memory, as far as there are places."""
        before = self.tree.pages.get(pairs[0][0].prefix.parent) if pairs else None
        if fits := self.host.make_room(len(pairs), request.chain):
            places = self.host.allocate(fits, before.host if before else None)
            pages, blocks = zip(*pairs[:fits])
            copy = self.copy_out(blocks, places)
            then = partial(self.copied, pages, places, copy, request.timeline, request.kept)
            self.bring("save", copy, pages, places, (self.pool, blocks), then=then)

    def copied(self, pages: list[Page], places: list[int], copy, timeline, kept: Kept, well: bool):
        self.keep(pages, places, well)
        timeline.add("save", copy.label, *copy.span())
        self.send_down(pages)
        if not well:
            kept.sent = 0  # look at all of them again

    def evicting(self, leaving: list):
        """Under write_back: copy dirty pages to host memory, first the beginnings of chains. Whoever needs
        their blocks waits for that. What no tier below has is lost."""
        pages = [(self.tree.pages.get(prefix), block) for block, prefix in leaving]
        dirty = [pair for pair in pages if pair[0] and self.wanted(pair[0]) and not self.kept_below(pair[0])]
        if self.write_policy == "write_back":
            dirty.sort(key=lambda pair: -pair[0].prefix.used)
            self.counts["dirty_evicted"] += len(dirty)
            own = [page.prefix for page in self.matched]
            own += [] if self.storage else [page.prefix for page, _ in dirty]  # else they go on to storage
            while dirty and not self.save_link.hangs and (fits := self.host.make_room(len(dirty), own)):
                self.copy_and_wait(*zip(*dirty[:fits]), self.host.allocate(fits))
                dirty = dirty[fits:]
        self.counts["pages_lost"] += len(dirty)

    def kept_below(self, page: Page) -> bool:
        """Whether host memory or storage has a page of the device's, or is about to."""
        return page.near or page.stored or page.storing

    def copy_and_wait(self, pages: list[Page], blocks: list[int], places: list[int]):
        copy = self.copy_out(blocks, places)
        try:
            copy.wait(min(offload.LONGEST_SAVE, links.HANGING + self.save_link.seconds(0)))
        except links.TransferError:
            self.hold("save", [copy], (self.host, places))  # a late one still writes there
            self.counts["pages_lost"] += len(pages)
        else:
            self.keep(pages, places, True)
            self.counts["pages_written"] += len(pages)
        self.host.release(places)

    # L2 to L3

    def evicting_host(self, leaving: list):
        """These pages leave host memory. Those that storage is to have are written, from copies; those that
        cannot be written are lost."""
        pages, contents = [self.tree.pages[prefix] for _, prefix in leaving], {}
        dirty = sum(map(self.owed, pages)) if self.write_policy == "write_back" else 0
        self.counts["dirty_evicted"] += dirty
        # Copies may take as much memory as the pools that they come from
        full = self.writing > self.pool.size + self.host.size or self.storage and self.storage.writer.hangs
        for page in sorted(pages, key=lambda page: -page.prefix.used):  # the beginnings of chains first
            if self.owed(page) and not (full or self.behind_gap(page)):
                contents[page], page.storing = self.array[:, :, page.host].copy(), True
            page.host = None
        if contents:
            self.write(list(contents), list(contents.values()))
        self.lose(filter(self.owed, pages))

    def owed(self, page: Page) -> bool:
        """Whether a page is still to be written to storage."""
        return bool(self.storage) and self.wanted(page) and not (page.stored or page.storing)

    def behind_gap(self, page: Page) -> bool:
        """Whether the page before is in no tier, so that nothing would find this one."""
        before, parent = self.tree.pages.get(page.prefix.parent), page.prefix.parent
        if parent.parent is None or parent in self.pool.block_of:
            return False
        return before is None or not self.kept_below(before)

    def lose(self, pages):
        """Count the pages that are in no tier any more."""
        on_device = self.pool.block_of
        self.counts["pages_lost"] += sum(page.host is None and page.prefix not in on_device for page in pages)

    def send_down(self, pages: list[Page]):
        """Have pages written to storage, from where they are in host memory."""
        if self.storage:
            self.unwritten.update((page, None) for page in pages if not page.stored)
            self.write_waiting()

    def write_waiting(self):
        """Write what waits for that, in runs, which are locked meanwhile: about a quarter of host memory."""
        while self.unwritten and not self.storage.writer.hangs and self.writing < max(1, self.host.size // 4):
            pages = list(islice(self.unwritten, self.run))
            for page in pages:
                del self.unwritten[page]
            pages = [page for page in pages if page.host is not None and self.owed(page)]
            pages = [page for page in pages if not self.behind_gap(page)]
            if pages:
                places = [page.host for page in pages]
                self.write(pages, [self.array[:, :, place] for place in places], (self.host, places))

    def write(self, pages: list[Page], contents: list, *held):
        write = self.storage.set([page.prefix.key for page in pages], contents)
        self.writing += len(pages)
        for page in pages:
            page.storing = True
        self.hold("written", [write], *held, then=partial(self.written, pages, write))

    def written(self, pages: list[Page], write, well: bool):
        self.writing -= len(pages)
        for page in pages:
            page.storing, page.stored = False, well or page.stored
        self.counts["storage_pages_written"] += write.value or 0
        self.fresh.update(prefix for page in pages for prefix in page.prefix.lineage())
        if not self.writing or len(self.fresh) > self.host.size:  # the ends of chains are to go first
            used = sorted(self.fresh, key=lambda prefix: -prefix.used)
            self.storage.use([prefix.key for prefix in used])
            self.fresh.clear()
        if not well:
            self.lose(pages)
        elif self.write_policy == "write_back":
            self.counts["pages_written"] += len(pages)

    # In every step, and at the end

    def poll(self):
        super().poll()
        self.matched = []
        for request in self.engine.running:
            if request.restoration and request.restoration.steps:
                request.restoration.portion = 0  # `restore` says how much, when it knows what has arrived
            elif request.kept.prefetch:
                self.end(request.kept.prefetch)  # it computes
        self.ask_again()
        for prefetch in list(self.prefetches):
            self.read(prefetch)
        self.write_waiting()
        self.counts["storage_errors"] = self.storage.errors if self.storage else 0

    def finished(self, request):
        if request.kept.prefetch:
            self.end(request.kept.prefetch)
        request.kept = Kept()

    def close(self):
        """What is on its way down arrives, if that is soon. Under write_back everything goes down,
        as far as there is time."""
        self.poll()
        for pool in self.pool, self.host:
            if self.write_policy == "write_back" and self.storage:
                pool.evict(list(pool.cached))
            self.drain()
        super().close()
        if self.storage:
            self.storage.close()


# 3. The demo -----------------------------------------------------------------------------------

CONVERSATIONS, ON_DEVICE, ON_HOST = 8, 2, 4


def demo(model, frontend: Frontend, arguments):
    """Conversations behind one system prompt, more than L1 and L2 hold, with one, two and three tiers, and
    with an L3 that another engine has filled; then the policies on an L3 that is as slow as computing."""
    with tempfile.TemporaryDirectory() as folder:
        # 1. Ask: each conversation twice, in any order
        rng, new = random.Random(0), max(2, min(arguments.max_tokens, 12))
        system = dict(role="system", content=lesson.document(frontend, rng, frontend.context // 16))
        plain = [lesson.conversation(frontend, rng, frontend.context // 4) for _ in range(CONVERSATIONS)]
        talks = [[system, *messages] for messages in plain]
        longest = max(len(frontend.encode(None, talk)) for talk in talks) + 3 * new + 32
        pages = -(-longest // arguments.block_size)
        url = arguments.storage or f"file:{folder}"
        host, taken = ON_HOST * pages, {}
        ways = {"L1": (1, None), "L1, L2": (host, None), "L1, L2, L3": (host, url)}
        for name, (places, storage) in {**ways, "L1, L2, L3 of another engine": (host, url)}.items():
            tiers = dict(gpu_blocks=ON_DEVICE * pages, cpu_blocks=places, storage=storage)
            engine = make_engine(model, argparse.Namespace(**{**vars(arguments), **tiers}))
            taken[name] = converse(engine, frontend, talks, random.Random(1), new)
            tree, counters = list(tree_lines(engine.cache, engine.cache.tree.root)), engine.counters()
            engine.close()
        # 2. Time: one long history that only storage has, under each policy
        slow = dict(storage=url, prefetch="both_ends", always_restore=True, gpu_blocks=None, cpu_blocks=None)
        engine = make_engine(model, argparse.Namespace(**{**vars(arguments), **slow}))
        text = lesson.document(frontend, rng, min(frontend.context, 2048) * 7 // 8, lesson.SECRET)
        prompt = frontend.request(messages=[dict(role="user", content=text)]).tokens
        engine.generate([Request(prompt, 1)])
        asked = policies(engine, prompt)
        engine.close()
    every = [request for requests in [*taken.values(), *asked.values()] for request in requests]
    verified = lesson.verify(paged.baseline.Engine(model), every)

    # 3. Show
    link = engine.cache.load_link
    print(
        f"{CONVERSATIONS} conversations of up to {longest} tokens, each asked twice; L1 holds {ON_DEVICE} of "
        f"them, L2 {ON_HOST}\n{arguments.write_policy}, {arguments.prefetch}; {link}\n\n"
        f"{'the second time':30}{'L1':>6}{'L2':>6}{'L3':>6}  computed"
    )
    for name, requests in taken.items():
        print(f"  {name:28}" + "".join(f"{share:6.0%}" for share in shares(requests[CONVERSATIONS:])))
    times = {name: [one.outcome.ttft_ms for one in asks[CONVERSATIONS:]] for name, asks in taken.items()}
    rows = lesson.table("\nTTFT, the second time", times, "ttft_ms", "ms")
    for row, requests in zip(rows, taken.values()):
        row.update(zip(("gpu", "cpu", "storage", "computed"), shares(requests[CONVERSATIONS:])))
        row["first_time_from_storage"] = shares(requests[:CONVERSATIONS])[2]
    print(f"  (in the last row the first time, too, {rows[-1]['first_time_from_storage']:.0%} came from L3)")
    print("\nThe top of that engine's tree: tokens, and where they are", *tree[:8], sep="\n", end="\n\n")
    title = f"TTFT, {len(prompt)} tokens, storage as fast as computing, the guard off"
    times = {name: [one.outcome.ttft_ms for one in requests] for name, requests in asked.items()}
    rows += lesson.table(title, times, "ttft_ms", "ms")
    middle = {name: statistics.median(samples) for name, samples in times.items()}
    better, timeline = min(middle["computed"], middle["wait_complete"]), asked["both_ends"][-1].timeline
    print(
        f"  both_ends: {better / middle['both_ends']:.2f}x as soon as the better of computing all and waiting"
        " for all\n\nboth_ends (p: prefill, pages read; digits: layers; s: pages to host memory)\n"
        f"{timeline.chart()}\n\n"
        f"To wait for all of it takes {middle['wait_complete'] / middle['computed']:.2f} times as long as to "
        "compute it: storage that is no\nfaster helps from both ends only. And if not even the weights fit "
        "on the device? Chapter 08."
    )
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), counters=counters)
    return dict(report, verified=verified, rows=rows), [timeline, asked["wait_complete"][-1].timeline]


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
            lesson.settle(engine)  # what goes to storage gets there while people read
    return asked


def shares(requests: list[Request]) -> list[float]:
    """Of the prompts' tokens: found on the device, in host memory, in storage; computed."""
    prompts = sum(request.prompt_tokens for request in requests)
    found = [sum(request.found.get(tier, 0) for request in requests) for tier in ("gpu", "cpu", "storage")]
    return [tokens / prompts for tokens in (*found, prompts - sum(found))]


def tree_lines(cache: TieredCache, node: Node, depth: int = 0):
    """Yield a line for each node below this one: the tiers that have all of it, and its tokens."""
    for child in node.children.values():
        on_device = all(page.prefix in cache.pool.block_of for page in child.pages)
        in_host = all(page.host is not None for page in child.pages)
        stored = all(page.stored for page in child.pages)
        where = f"{'L1' * on_device:3}{'L2' * in_host:3}{'L3' * stored:3}"
        yield f"  {where} {'  ' * depth}{len(child.pages) * cache.pool.block_size:5} tokens"
        yield from tree_lines(cache, child, depth + 1)


def policies(engine, prompt: list[int]) -> dict[str, list[Request]]:
    """The same question, when only an L3 that is as slow as computing has its history, under each policy."""
    cache, storage = engine.cache, engine.cache.storage
    seconds = engine.estimates.seconds_to_compute(0, len(prompt))
    size = len(prompt) // cache.pool.block_size * cache.host.block_bytes
    storage.bandwidth, cache.timeout = links.Bandwidth(size / seconds), (seconds / 3, 0.0)
    cache.measure_storage()

    def ask(policy: str) -> Request:
        lesson.settle(engine)
        for pool in ("device", "host"):
            engine.evict(pool)
        cache.storage, cache.prefetch_policy = None if policy == "computed" else storage, policy
        request = lesson.ask(engine, prompt, 2)
        cache.storage = storage
        return request

    return lesson.in_turn({name: partial(ask, name) for name in ("computed", *PREFETCH)}, 3)


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    add, number, seconds = parser.add_argument, partial(cli.bounded, int, 1), cli.bounded(float, 0, 1e6)
    add("--cpu-blocks", type=number(1 << 26), metavar="N", help="pages in host memory (4 times the device's)")
    add("--layout", choices=LAYOUTS, default="page_first_direct", help="of host memory (page_first_direct)")
    add("--write-policy", choices=WRITE, default="write_through", help="when pages go down (write_through)")
    words = "the shared tier: file:DIR, redis://HOST:PORT/N, or module:Class"
    add("--storage", metavar="URL", help=words)
    words = "model reading from it that is so slow"
    add("--storage-bandwidth", type=both_ends.bandwidth, metavar="GB/S[:GB/S...@SECONDS]", help=words)
    add("--prefetch", choices=PREFETCH, default="timeout", help="how long to wait for storage (timeout)")
    add("--prefetch-timeout", type=seconds, default=1.0, metavar="S", help="with 0.25 for 1,024 tokens (1)")
    add("--always-restore", action="store_true", help="the policies alone decide, and not the engine's guard")
    modelled_link.add_option(parser)


def make_engine(model, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache."""
    size, host = arguments.block_size, torch.device("cpu")
    block_bytes = size * model.config.kv_numbers_per_token * model.dtype.itemsize
    longest = -(-model.config.max_position_embeddings // size)
    useful = 4 * (arguments.gpu_blocks or arguments.max_running * longest)
    blocks = cli.blocks_that_fit(arguments.cpu_blocks, useful, block_bytes, host, "--cpu-blocks")
    storage, name = None, backends.label(arguments.storage or "none")
    if arguments.storage:
        storage = store.Storage(backends.open_backend(arguments.storage), name, arguments.storage_bandwidth)
    cache = TieredCache(
        blocks, modelled_link.bandwidth(model, arguments.link), storage, arguments.prefetch,
        arguments.write_policy, arguments.layout, timeout=(arguments.prefetch_timeout, 0.25),
    )  # fmt: skip
    engine = paged.make_engine(model, arguments, cache)
    words = f"{blocks} pages of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB, over a {cache.load_link}"
    print(f"Host: {words}; storage: {name}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo)
