"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than the device's, but it is one machine's, and it is lost with the
process. A service runs many engines, and what one of them has read the others compute again.

The mechanism. Pages of K and V live in three tiers: on the device (L1), in host memory (L2), and in storage
that many engines share (L3). One radix tree knows all pages; along a request's tokens there is a run of pages
on the device, then one in host memory, from where it is loaded layer by layer (chapter 03). As soon as the
request stands in line, storage is asked for all of its pages, and those after the two runs are fetched:

    tokens   0          320            800                        1792      16 tokens a page
    pages    |== L1 ====|==== L2 ======|:::::: L3 ::::::::::::::::|
             found      | by layers    | prefetched into L2, then by layers

How long does a request wait for storage? `best_effort`: not at all, it takes what has come when its turn is
there. `wait_complete`: to the end. `timeout`: so many seconds from its arrival on, and some for each 1,024
tokens. `both_ends`: until storage has said what it has; then it computes from the front while pages arrive
from the back (chapter 06). But no policy waits longer than computing the prompt would take, or for a load
that takes more than 0.8 of it (`--always-restore`: for any load, up to a minute).

When does a page go down? `write_through`: as soon as it is full. `write_through_selective`: when a second
request has it on the device. `write_back`: copied one tier down on eviction, unless a lower tier has it;
evictions from the device block the engine, those from host memory do not.

Source: HiCache of SGLang (design document); its tree is RadixAttention's (Zheng et al., 2024, section 3).

    python 07_tiered_storage.py --demo
    python 07_tiered_storage.py --storage file:pages       # the server, on http://127.0.0.1:5000
"""

import argparse
import importlib
import random
import shell.cli as cli
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from threading import Thread

from common import lanes, store
from common import link as links
from common.cache import Match
from common.estimates import Estimates
from common.places import as_integers
from common.requests import BadRequest, Request
from common.restoring import Restorer
from shell import backends, charts, lesson, modelled_link
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
both_ends = importlib.import_module("06_bidirectional")
AGAIN, NEXT = 1.0, 4  # seconds, after which storage is asked again for the NEXT first requests in line
PREFETCH = "best_effort", "wait_complete", "timeout", "both_ends"
WRITE = "write_through", "write_through_selective", "write_back"
# The order of [layers, places, 2, page size, KV heads, head size] in host memory
LAYOUTS = {
    "layer_first": (0, 2, 1, 3, 4, 5),  # as on the device: K, or V, of a layer in adjacent places
    "page_first": (1, 3, 0, 2, 4, 5),  # all layers of a token: a piece for each K and each V of it
    "page_first_direct": (1, 0, 2, 3, 4, 5),  # all tokens of a layer in a page, as a page in storage
}

# 1. The tree -----------------------------------------------------------------------------------

# Which tier has a page, and what is on its way between two of them:
#
#     node.device              node.places                 node.stored
#        HostCache.saving, down ->      Writer.going, down ->
#                                    <- Prefetcher.coming, up

@dataclass(eq=False, slots=True)
class Node:
    """A span: pages that follow each other, all of which are in the same tiers. The device's and host
    memory's pools say, page by page, what they take and drop; nodes are split, and joined, as they do."""

    parent: "Node | None"
    pages: list  # their prefixes
    children: dict = field(default_factory=dict)  # first page of a child -> the child
    device: bool = False
    places: list[int] = field(default_factory=list)  # in host memory, one a page, or none
    stored: bool = False
    wanted: bool = False  # the write policy wants it in the tiers below the device
    first_request: int = 0  # until it is wanted: id of the first request that had it on the device

    @property
    def near(self) -> bool:
        """Whether the device or host memory has it."""
        return self.device or bool(self.places)

    @property
    def state(self) -> tuple:
        return self.device, bool(self.places), self.stored, self.wanted, self.first_request


class HiRadixTree:
    """All known pages, in spans, and which tiers have them."""

    def __init__(self):
        self.root, self.size = Node(None, []), 0  # size: pages

    def spans(self, run: list) -> list[tuple[Node, slice]]:
        """-> where the known beginning of `run` is (pages that follow each other, from anywhere in a chain):
        nodes, upper ones first, and which of a node's pages are the run's."""
        chain = before(run) + run
        node, at, first, spans = self.root, 0, len(chain) - len(run), []
        while at < len(chain) and (node := node.children.get(chain[at])):
            ours = chain[at : at + len(node.pages)]
            same = len(ours)
            if ours != node.pages[:same]:  # the chain leaves it
                same = next(n for n, page in enumerate(ours) if page is not node.pages[n])
            if at + same > first:
                spans.append((node, slice(max(0, first - at), same)))
            at += same
            if same < len(node.pages):
                break
        return spans

    def take(self, run: list) -> list[Node]:
        """-> nodes that have the pages of `run` and no others: known ones, split at its ends, or new."""
        taken = [self.split(*span) for span in self.spans(run)]
        if new := run[sum(len(node.pages) for node in taken) :]:
            upper = (taken or self.take(before(run)) or [self.root])[-1]
            upper.children[new[0]] = Node(upper, new)
            taken.append(upper.children[new[0]])
            self.size += len(new)
        return taken

    def split(self, node: Node, part: slice) -> Node:
        """Split a node at both ends of a part of it -> the part. All are in the same tiers; K and V stay."""
        for at in part.stop, part.start:
            if 0 < at < len(node.pages):
                upper = replace(node, pages=node.pages[:at], places=node.places[:at], children={})
                upper.parent.children[upper.pages[0]] = upper
                node.parent, node.pages, node.places = upper, node.pages[at:], node.places[at:]
                upper.children[node.pages[0]] = node
                node = upper if at == part.stop else node
        return node

    def join(self, nodes: list[Node]):
        """Join each of these, and what follows the last, with what comes before it, where both are in the
        same tiers, and no other conversation parts from it there."""
        for node in (*nodes, *nodes[-1].children.values()) if nodes else ():
            upper = node.parent
            if upper.pages and len(upper.children) == 1 and upper.state == node.state:
                node.pages, node.places = upper.pages + node.pages, upper.places + node.places
                node.parent = upper.parent
                node.parent.children[node.pages[0]] = node

    def change(self, pages):
        """Yield nodes that have these pages, of any chains, and no others; beginnings first, since they were
        used later than ends. The caller changes each, then it is joined with its neighbours."""
        runs = []
        for page in sorted(pages, key=lambda page: -page.used):
            if runs and runs[-1][-1] is page.parent:
                runs[-1].append(page)
            else:
                runs.append([page])
        for run in runs:
            yield from (nodes := self.take(run))
            self.join(nodes)

    def nodes(self) -> list[Node]:
        """-> all nodes below the root, parents before their children."""
        found = [self.root]
        for node in found:
            found += node.children.values()
        return found[1:]

    def forget(self, keep: set):
        """Drop spans at the ends of branches that are near no more, and of which `keep` has no page."""
        for node in reversed(self.nodes()):
            if not node.children and not node.near and keep.isdisjoint(node.pages):
                del node.parent.children[node.pages[0]]
                self.size -= len(node.pages)
        self.join(self.nodes())


def before(run: list) -> list:
    """-> all pages that come before a run, the first one first. (A chain's first parent is its salt.)"""
    pages, page = [], run[0].parent if run else None
    while page and page.parent:
        pages.append(page)
        page = page.parent
    return pages[::-1]


# 2. From storage to host memory ----------------------------------------------------------------

@dataclass(eq=False)
class Prefetch:
    """What storage may have of a request, on its way into host memory."""

    request: Request
    chain: list  # prefixes of the request's full pages; when storage has answered, up to the last to read
    first: int  # the first page that neither the device nor host memory has
    until: float  # seconds of time.perf_counter(): the policy waits no longer
    ended: bool  # nothing more will come: all is read, it was too little, no place is left, or nobody waits
    asked_at: float = field(default_factory=time.perf_counter)
    answered: bool = False  # storage has said how many pages it has
    reads: list = field(default_factory=list)  # Transfers of the reads that were begun
    unread: int = 0  # pages to read, for which no read has begun
    pages_read: set = field(default_factory=set)  # their prefixes
    wait_pays: bool = False  # the engine has decided that it is worth waiting for


class Prefetcher:
    """Reads the pages of requests in line from storage into host memory. `request.kept` is a Prefetch."""

    def __init__(self, cache: "TieredCache", policy: str, threshold: int, timeout: tuple[float, float]):
        self.cache, self.policy, self.threshold, self.timeout = cache, policy, threshold, timeout
        self.prefetches: dict[Prefetch, None] = {}  # that storage has answered, first come, first served
        self.coming: set = set()  # prefixes of pages that are being read
        self.probed = 0.0  # when it was last tried whether a silent storage answers again

    def ask_l3(self, request):
        """Ask storage which pages of the request it has, and mark them as used; `poll` then reads those that
        neither pool has. Where storage is silent, only find out whether it answers again."""
        cache, storage, now = self.cache, self.cache.storage, time.perf_counter()
        size = cache.pool.block_size
        chain, earlier = request.chain[: request.history // size], request.kept
        if storage is None or not chain:
            return
        if storage.silent:
            if now > self.probed + AGAIN and not any(map(cache.under_way.get, ("ask", "read", "measure"))):
                self.probed = now
                cache.hold("ask", [storage.exists([bytes(32)])])
                cache.measure_storage()
            return
        first = sum(part.stop for _, part in takewhile(lambda span: span[0].near, cache.tree.spans(chain)))
        tokens = (len(chain) - first) * size
        timeout = request.received + self.timeout[0] + self.timeout[1] * tokens / 1024
        until = dict(best_effort=0.0, timeout=timeout).get(self.policy, request.patience)  # 0: no wait
        request.kept = prefetch = Prefetch(request, chain, first, until, ended=tokens < self.threshold)
        if earlier:
            prefetch.pages_read = earlier.pages_read
            self.end_prefetch(earlier)
        answer = storage.exists([prefix.key for prefix in chain])
        cache.hold("ask", [answer], then=partial(self.answered, prefetch, answer))

    def answered(self, prefetch: Prefetch, answer, arrived: bool):
        """Storage has said which pages it has: note that in the tree, and let the reads begin."""
        tree, chain, first = self.cache.tree, prefetch.chain, prefetch.first
        stored = answer.value if arrived else []
        end = first + len(list(takewhile(bool, stored[first:])))
        known = max(end, sum(part.stop for _, part in tree.spans(chain)))
        there = {page for page, has in zip(chain[:end], stored) if has}  # past a gap: no
        for pages in (there, set(chain[:known]) - there) if arrived else ():
            for node in tree.change(pages):
                node.stored = pages is there
        if (end - first) * self.cache.pool.block_size < self.threshold:
            end = first  # too few to be worth it
        prefetch.answered, prefetch.unread, prefetch.chain = True, end - first, chain[:end]
        if not prefetch.ended:
            self.prefetches[prefetch] = None

    def lacking(self, prefetch: Prefetch) -> list:
        """-> the pages to read: those in storage that are not near, nor on their way, up to the first that is
        nowhere; under both_ends from the last page back."""
        step, lacking = -1 if self.policy == "both_ends" else 1, []
        here = self.coming | self.cache.saving.keys()
        for node, part in self.cache.tree.spans(prefetch.chain)[::step]:
            away = [] if node.near else [page for page in node.pages[part] if page not in here]
            if away and not node.stored:
                break
            lacking += away[::step]
        return lacking

    def read_l3(self, prefetch: Prefetch, lately: set):
        """Begin to read what is lacking, as far as there are places: reads under way hold at most half of
        host memory. `lately`: what all prefetches have read."""
        cache, host, lacking = self.cache, self.cache.host, self.lacking(prefetch)
        fits = min(len(lacking), max(0, host.size // 2 - len(self.coming)))
        fits = host.make_room(fits, lately.union(prefetch.chain)) if fits else 0
        lacking, prefetch.unread = lacking[:fits], len(lacking) - fits
        for at in range(0, fits, cache.pages_at_once):
            run = lacking[at : at + cache.pages_at_once]
            places = host.allocate(len(run))
            keys, into = [page.key for page in run], [cache.array[:, place] for place in places]
            read = cache.storage.get(keys, into, f"page {prefetch.chain.index(run[0])}")
            prefetch.reads.append(read)
            self.coming.update(run)
            then = partial(self.run_read, prefetch, run, places, read)
            cache.hold("read", [read], given=[(host, places)], then=then)
        none_comes = self.coming.isdisjoint(prefetch.chain[prefetch.first :])
        prefetch.ended = none_comes and not (prefetch.unread and self.coming)

    def run_read(self, prefetch: Prefetch, pages: list, places: list[int], read, arrived: bool):
        """A read is over: its pages are in host memory, or storage is doubted."""
        cache = self.cache
        self.coming.difference_update(pages)
        if arrived:
            cache.in_l2(pages, places)
            prefetch.pages_read.update(pages)
            prefetch.request.timeline.add("storage", read.label, *read.span())
            cache.counts["storage_pages_read"] += len(pages)
        else:
            for node in cache.tree.change(page for page in pages if page.key in cache.storage.doubted):
                node.stored = False
            self.end_prefetch(prefetch)  # cancelled, or storage was wrong about this chain, or hangs
            cache.looked_at.pop(prefetch.request, None)  # `save` took its pages for coming: look again

    def end_prefetch(self, prefetch: Prefetch):
        """Nobody waits for this prefetch any more: cancel its reads that have not begun."""
        prefetch.ended = True
        links.cancel(prefetch.reads)
        self.prefetches.pop(prefetch, None)

    def waits(self, request) -> bool:
        """Whether storage may bring more of what the request lacks, and the policy lets it wait for that."""
        prefetch = request.kept
        if not prefetch or prefetch.ended or self.cache.storage.silent:
            return False
        lacks = request.computed < len(prefetch.chain) * self.cache.pool.block_size
        both = prefetch.answered and self.policy == "both_ends"  # it computes meanwhile
        return lacks and not both and time.perf_counter() < min(prefetch.until, request.patience)

    def pays(self, request) -> bool:
        """Decide, once storage has answered, whether waiting for it takes less time than computing."""
        prefetch = request.kept
        if prefetch.answered and not prefetch.wait_pays:
            prefetch.wait_pays = self.cache.engine.behind.decide(request, self.offer(request))
        return prefetch.wait_pays or not prefetch.answered

    def offer(self, request) -> Match:
        """What storage has said it has: read first and then loaded, or under both_ends computed meanwhile."""
        cache, start, prefetch = self.cache, request.computed, request.kept
        end = len(prefetch.chain) * cache.pool.block_size
        seconds = cache.storage.seconds(prefetch.unread * cache.host.block_bytes)
        if self.policy == "both_ends":
            seconds, _ = both_ends.meeting(seconds, cache.estimates.seconds_to_compute(start, end))
        else:
            pages = (end - start) // cache.pool.block_size
            seconds += cache.load_link.seconds(pages * cache.host.block_bytes)
        return Match(end - start, seconds, prefetch, {"storage": end - start})

    def poll(self):
        """Each step: end what nobody waits for, ask again, as another engine may have written, and read."""
        size, now = self.cache.pool.block_size, time.perf_counter()
        for request in self.cache.engine.running:
            if request.kept and not (request.restoration and request.restoration.steps):
                self.end_prefetch(request.kept)  # the request computes
        for request in islice(self.cache.engine.waiting, NEXT):
            asked, full = request.kept, request.history // size
            if not asked or asked.ended and len(asked.chain) < full and now > asked.asked_at + AGAIN:
                self.ask_l3(request)
        lately = set().union(*(prefetch.pages_read for prefetch in self.prefetches))  # about to be used
        for prefetch in list(self.prefetches):
            self.read_l3(prefetch, lately)


# 3. From host memory to storage ----------------------------------------------------------------

class Writer:
    """Writes pages to storage: from where they lie in host memory, or, when they leave it, from copies."""

    def __init__(self, cache: "TieredCache"):
        self.cache = cache
        self.unwritten: dict = {}  # pages that may have to be written, once they are in host memory
        self.going: set = set()  # pages that are being written
        self.fresh: set = set()  # what was written, and what comes before: to be marked as used in storage

    def owed(self, node: Node) -> list:
        """-> the pages of a span that storage is owed. (The Cache's `owed` is what host memory is.)"""
        owed = node.wanted and not node.stored and self.cache.storage
        return [page for page in node.pages if page not in self.going] if owed else []

    def behind_gap(self, node: Node) -> bool:
        """Whether the page before is in no tier, so that no lookup would reach this span."""
        return not node.parent.device and self.cache.behind_gap(node.pages[0])

    def send_l3(self, pages=()):
        """Write pages from where they lie in host memory, about a quarter of it at once; the others wait."""
        cache, host = self.cache, self.cache.host
        self.unwritten.update(dict.fromkeys(pages if cache.storage else ()))
        while self.unwritten and not cache.storage.writer.hangs and len(self.going) < max(1, host.size // 4):
            some, owed = list(islice(self.unwritten, cache.pages_at_once)), []
            for page in some:
                del self.unwritten[page]
            for node in cache.tree.change(some):
                owed += self.owed(node) if node.places and not self.behind_gap(node) else []
            if owed:
                places = [host.block_of[page] for page in owed]
                self.write_l3(owed, [cache.array[:, place] for place in places], (host, places))

    def evicting_l2(self, leaving: list):
        """Write copies of owed pages that leave host memory. Count those that cannot be written as lost."""
        cache, contents = self.cache, {}
        place_of = {page: place for place, page in leaving}
        full = len(self.going) > cache.pool.size + cache.host.size  # copies take no more than these pools
        for node in cache.tree.change(place_of):
            node.places, owed = [], self.owed(node)
            if cache.write_policy == "write_back":
                cache.counts["dirty_evicted"] += len(owed)
            if owed and (full or cache.storage.writer.hangs or self.behind_gap(node)):
                cache.counts["pages_lost"] += 0 if node.device else len(owed)
            else:
                contents.update((page, cache.array[:, place_of[page]].copy()) for page in owed)
                self.going.update(owed)
        if contents:
            self.write_l3(list(contents), list(contents.values()))

    def write_l3(self, pages: list, contents: list, *held):
        write = self.cache.storage.set([page.key for page in pages], contents)
        self.going.update(pages)
        self.cache.hold("write", [write], *held, then=partial(self.written_l3, pages, write))

    def written_l3(self, pages: list, write, arrived: bool):
        """A write is over: note what storage has; mark it as used there, so that ends are deleted first."""
        cache = self.cache
        self.going.difference_update(pages)
        cache.counts["storage_pages_written"] += write.value or 0
        there = [page for page in pages if arrived and page.key not in cache.storage.doubted]
        for node in cache.tree.change(there):
            node.stored = True
        for page in pages:
            while page.parent is not None and page not in self.fresh:
                self.fresh.add(page)
                page = page.parent
        if not self.going or len(self.fresh) > cache.host.size:
            cache.storage.use([page.key for page in sorted(self.fresh, key=lambda page: -page.used)])
            self.fresh.clear()
        if cache.write_policy == "write_back":
            cache.counts["pages_written"] += len(there)
        self.count_lost(set(pages).difference(there))

    def count_lost(self, pages):
        """Count those of these pages that no tier has any more."""
        for node in self.cache.tree.change(pages):
            self.cache.counts["pages_lost"] += 0 if node.near or node.stored else len(node.pages)


# 4. The Cache ----------------------------------------------------------------------------------

class TieredCache(offload.HostCache):
    """Chapter 03's host memory under a radix tree; a Prefetcher and a Writer connect it with storage."""

    fields = {}

    def __init__(
        self, blocks: int, bandwidth=None, storage=None, prefetch="timeout", write="write_through",
        layout="page_first_direct", threshold=256, timeout=(1.0, 0.25), io_backend=None,
    ):  # fmt: skip
        """`blocks` in host memory, `bandwidth` of the modelled link to them; `storage`: a store.Storage.
        `threshold`: tokens that a prefetch must bring. `timeout`: seconds, and more for each 1,024 tokens.
        `io_backend`: what copies on a GPU, direct (the copy engine) or kernel; by default the link's rule."""
        super().__init__(blocks, bandwidth)
        self.storage, self.write_policy, self.layout = storage, write, layout
        self.prefetcher, self.writer = Prefetcher(self, prefetch, threshold, timeout), Writer(self)
        self.io_backend = io_backend

    def attach(self, engine):
        super().attach(engine)
        self.load_link.backend = self.save_link.backend = self.io_backend
        self.tree, self.host.evicting = HiRadixTree(), self.writer.evicting_l2
        self.array = as_integers(self.host.memory)  # for NumPy
        self.pages_at_once = max(1, both_ends.CHUNK // self.pool.block_size)  # in a read or write of storage
        self.step_began = 0  # of all uses: what was used since does not leave host memory for another page
        if self.storage:
            self.storage.open(engine.wake.set)

    def host_memory(self, shape):
        """[L, places, 2, page size, KVH, hd], of which `layout` says what lies next to what."""
        order = LAYOUTS[self.layout]
        memory = super().host_memory([shape[axis] for axis in order])
        return memory.permute([order.index(axis) for axis in range(6)])

    # What is where

    def keeps(self, prefix) -> bool:
        """Whether host memory has a page, or is about to."""
        return super().keeps(prefix) or prefix in self.prefetcher.coming and not self.storage.reader.hangs

    def is_below(self, prefix) -> bool:
        """Whether a tier below the device has a page, or is about to."""
        spans = self.tree.spans([prefix])
        return self.keeps(prefix) or prefix in self.writer.going or any(node.stored for node, _ in spans)

    def behind_gap(self, prefix) -> bool:
        return super().behind_gap(prefix) and not self.is_below(prefix.parent)

    def in_l2(self, prefixes, places: list[int]):
        """These pages have arrived in host memory. (If another copy had, its places stay.)"""
        for prefix, place in zip(prefixes, places):
            self.host.register(place, prefix)
        for node in self.tree.change(prefixes):
            node.places = [self.host.block_of[prefix] for prefix in node.pages]

    @property
    def last_tier(self) -> bool:
        return not self.storage or self.storage.behind

    def in_storage(self) -> tuple[list, int, int]:  # for GET /state
        stored = [prefix for node in self.tree.nodes() if node.stored for prefix in node.pages]
        return stored, len(self.prefetcher.coming), len(self.writer.going)

    # Coming up

    def submitted(self, request):
        self.prefetcher.ask_l3(request)

    def waits(self, request):
        if self.prefetcher.waits(request) and self.prefetcher.pays(request):
            return True
        if request.kept and (self.storage.silent or self.prefetcher.policy != "both_ends"):
            self.prefetcher.end_prefetch(request.kept)
        return False

    def match(self, request):
        """Offer the next run in host memory; if there is none, under both_ends what storage has: `blocks`
        of the Match are places, or the Prefetch."""
        pages, places = [], []
        for node, part in takewhile(lambda span: span[0].places, self.tree.spans(self.missing(request))):
            pages += node.pages[part]
            places += node.places[part]
        if places:
            tokens, prefetch = self.tokens_in(request, places), request.kept
            read = self.pool.block_size * len(prefetch.pages_read.intersection(pages)) if prefetch else 0
            found = {"cpu": max(0, tokens - read), "storage": min(tokens, read)}
            found = {source: count for source, count in found.items() if count}
            seconds = self.load_link.seconds(len(places) * self.host.block_bytes)
            return Match(tokens, seconds, places, found)
        prefetch = self.behind_in_storage(request, request.computed)
        come = prefetch and any(node.places for node, _ in self.tree.spans(prefetch.chain[-1:]))
        if prefetch and (come or not prefetch.ended):
            return self.prefetcher.offer(request)

    def behind_in_storage(self, request, end: int) -> Prefetch | None:
        """-> under both_ends, the Prefetch of what storage has behind token `end`."""
        prefetch = request.kept if self.prefetcher.policy == "both_ends" else None
        if prefetch and prefetch.answered and len(prefetch.chain) * self.pool.block_size > end:
            return prefetch

    def restore(self, request, restoration, match):
        """Load what host memory has; or compute from the front, and load from the back (chapter 06)."""
        if not isinstance(match.blocks, Prefetch):
            if self.behind_in_storage(request, restoration.end):
                restoration.limit = restoration.end  # no step goes on behind it: storage offers what follows
            yield from super().restore(request, restoration, match)
            restoration.limit = restoration.start
            return
        restoration.limit = restoration.end
        copies = deque()  # to the request's blocks: until they are over, no page after the limit is used
        try:
            yield from self.restore_from_back(request, restoration, match.blocks, copies)
        finally:
            links.cancel(copies)
            restoration.portion = restoration.end  # enough: prefill goes on to the limit
            self.prefetcher.end_prefetch(match.blocks)
            request.timeline.plan = both_ends.drawn(restoration)

    def restore_from_back(self, request, restoration, prefetch: Prefetch, copies: deque):
        """Claim pages that have come into host memory, by lowering `limit`, and copy them to the request's
        blocks, until both ends have met or no more pages come. No step computes what is claimed."""
        size = self.pool.block_size
        while copies or not restoration.met:
            super().poll()  # takes in what has been read meanwhile
            front = request.computed + dict(self.engine.work).get(request, 0)  # where the step under way ends
            unclaimed = prefetch.chain[self.pool.num_blocks(front) : restoration.limit // size]
            spans = self.tree.spans(unclaimed)
            if sum(len(node.pages[part]) for node, part in spans) < len(unclaimed):
                spans = []  # the tree has forgotten the last page: nothing comes from the back
            come = list(takewhile(lambda span: span[0].places, reversed(spans)))
            if places := [place for node, part in reversed(come) for place in node.places[part]]:
                restoration.limit -= len(places) * size
                restoration.layers = 0  # of what is claimed, until it has been copied
                copies.extend(self.copy_in(request, restoration.limit, places))
            while copies and copies[0].ready:
                copies[0].check()
                restoration.passed.append(copies.popleft())
            restoration.layers = 0 if copies else len(self.model.layers)
            if restoration.met and copies:
                yield copies[0]
                copies.popleft()
            elif not restoration.met:
                if prefetch.ended and not copies and restoration.limit > front:
                    return  # storage brings no more
                if not self.engine.work:  # between two steps: the next one computes so much
                    restoration.portion = self.portion(request)
                yield
        restoration.layers = len(self.model.layers)

    def portion(self, request) -> int:
        """-> tokens that prefill computes next, to the end of a page: its share of the rest (chapter 06)."""
        restoration, size = request.restoration, self.pool.block_size
        tokens = left = restoration.limit - request.computed
        if self.storage and self.storage.measured.passes and time.perf_counter() < restoration.deadline:
            load = left / size * self.host.block_bytes / self.storage.speed()
            compute = self.estimates.seconds_to_compute(request.computed, restoration.limit)
            tokens = both_ends.portion(left, load, compute)
        end = request.computed + min(tokens, self.engine.token_budget)
        return self.pool.num_blocks(end) * size - request.computed

    # Going down

    def save(self, batch):
        """Put what was computed into the tree, and send down what the write policy wants there."""
        for request, _ in batch.work:
            self.note(request)
        self.save_owed()
        if self.tree.size > 2 * (self.pool.size + self.host.size):
            chains = [one.kept.chain for one in (*self.engine.waiting, *self.engine.running) if one.kept]
            self.tree.forget(set().union(self.saving, self.prefetcher.coming, self.writer.going, *chains))

    def note(self, request):
        """Note which pages the request has on the device, and which of them the write policy wants below."""
        first, full = self.looked_at.get(request, 0), request.registered
        if first == full:
            return
        self.looked_at[request], wanted = full, []
        for node in self.tree.change(filter(self.pool.block_of.__contains__, request.chain[first:full])):
            node.device, second = True, node.first_request not in (0, request.id)
            node.wanted |= second or self.write_policy != "write_through_selective"
            node.first_request = 0 if node.wanted else request.id
            wanted += node.pages if node.wanted else []
        owed = self.owed.pop(request, []) if first else []
        if self.write_policy != "write_back":
            self.owed[request] = owed + wanted
            self.writer.send_l3(wanted)

    def saved(self, request, transfer, prefixes, places, arrived: bool):
        super().saved(request, transfer, prefixes, places, arrived)
        if arrived:
            self.in_l2(prefixes, places)
            self.writer.send_l3(prefixes)
        else:
            self.looked_at.pop(request, None)  # look at all of them again

    def evicting(self, leaving: list):
        """Under write_back: copy dirty pages to host memory, beginnings first, while the engine waits. Count
        pages that no tier below has as lost."""
        block_of, dirty = {prefix: block for block, prefix in leaving}, []
        for node in self.tree.change(block_of):
            node.device = False
            if node.wanted and not node.stored:
                dirty += [page for page in node.pages if not (self.keeps(page) or page in self.writer.going)]
        if self.write_policy == "write_back":
            self.counts["dirty_evicted"] += len(dirty)
            own = () if self.storage else dirty
            while dirty and not self.save_link.hangs:
                if not (fits := self.host.make_room(len(dirty), own, self.step_began)):
                    break
                self.copy_to_l2(dirty[:fits], [block_of[prefix] for prefix in dirty[:fits]])
                dirty = dirty[fits:]
        self.counts["pages_lost"] += len(dirty)

    def copy_to_l2(self, prefixes: list, blocks: list[int]):
        """Copy pages to host memory, and wait for that."""
        copy = self.copy_out(blocks, places := self.host.allocate(len(blocks)))
        try:
            copy.wait(min(offload.LONGEST_SAVE, lanes.HANGING + self.save_link.seconds(0)))
            self.in_l2(prefixes, places)
            self.counts["pages_written"] += len(prefixes)
        except links.TransferError:
            copy.cancel()
            self.hold("save", [copy], (self.host, places))  # a late one still writes there
            self.counts["pages_lost"] += len(prefixes)
        self.host.release(places)

    # In every step, when idle, and at the end

    def poll(self):
        super().poll()
        self.step_began = next(self.engine.prefixes.uses)
        self.prefetcher.poll()
        self.writer.send_l3()
        self.counts["storage_errors"] = self.storage.errors if self.storage else 0

    def finished(self, request):
        self.note(request)
        super().finished(request)
        if request.kept:
            self.prefetcher.end_prefetch(request.kept)
        request.kept = None

    def probe(self, request, match):
        if not isinstance(match.blocks, Prefetch):
            return super().probe(request, match)
        keys = [prefix.key for prefix in request.kept.chain[request.kept.first :][: self.pages_at_once]]
        return [self.storage.get(keys, [self.array[:, 0].copy() for _ in keys], "probe")]

    def idle(self):
        self.measure_storage()
        super().idle()

    def measure_storage(self):
        if self.storage:
            self.hold("measure", [self.storage.measure(self.pages_at_once * self.host.block_bytes)])

    open_storage = staticmethod(backends.open_storage)  # on any thread, for `attach_storage`

    def attach_storage(self, storage: store.Storage | None):
        """Between two steps: go on with another storage, or with none; close the one before on a thread, when
        nothing of it is under way. What is being read does not come; what is being written and not near is
        lost."""
        before, writer = self.storage, self.writer
        for request in (*self.engine.waiting, *self.engine.running):
            self.finished(request)  # it goes on, without what was noted for the storage before
        self.storage = storage
        writer.count_lost(writer.going)
        for known in self.prefetcher.coming, writer.going, writer.unwritten, writer.fresh:
            known.clear()
        for node in self.tree.nodes():
            node.stored = False
        self.tree.join(self.tree.nodes())
        if before:
            for lane in ("ask", "read", "measure", "write"):
                for transfers, held, _ in self.under_way.pop(lane, ()):
                    self.hold(before, transfers, given=held)  # on a lane of its own, and nothing is noted
            self.hold(before, [], then=lambda arrived: Thread(target=before.close, daemon=True).start())
        if storage:
            storage.open(self.engine.wake.set)
            self.measure_storage()
            if self.write_policy != "write_back":
                writer.send_l3([page for node in self.tree.nodes() if node.places for page in node.pages])

    def close(self):
        """Let what is on its way arrive, and under write_back send down all that there is time for."""
        self.poll()
        for pool in self.pool, self.host:
            if self.write_policy == "write_back" and self.storage:
                pool.evict(list(pool.cached))
            self.drain()
        self.close_each(super(), self.storage)


# 5. The demo -----------------------------------------------------------------------------------

TALKS, ON_DEVICE, ON_HOST = 8, 2, 4


def demo(model, frontend: Frontend, arguments):
    """Conversations behind one system prompt, more than L1 and L2 hold, with one, two and three tiers, and
    with an L3 that another engine has filled; then the policies on an L3 that is as slow as computing."""
    rng, taken, most = random.Random(0), {}, lesson.context(model, frontend)
    new = max(4, min(arguments.max_tokens, 12) * most // frontend.context)
    size, device, host = arguments.block_size, arguments.gpu_blocks, arguments.cpu_blocks
    context = min([most, *(size * blocks for blocks in (device, host) if blocks)])
    system = dict(role="system", content=lesson.document(frontend, rng, context // 16))
    talks = [[system, *lesson.conversation(frontend, rng, context // 4)] for _ in range(TALKS)]
    longest = max(len(frontend.encode(None, talk)) for talk in talks) + 3 * new + 32
    pages = -(-longest // size)
    device, host = device or ON_DEVICE * pages, host or ON_HOST * pages
    lesson.check_room(dict(device=device, host=host), pages, size)

    def engine_with(**options):
        options = {"cpu_blocks": None, "hicache_ratio": None, "hicache_size": None, **options}
        return make_engine(model, argparse.Namespace(**{**vars(arguments), **options}))

    with tempfile.TemporaryDirectory() as folder:
        # 1. Ask each conversation twice, in any order
        url = arguments.storage or f"file:{folder}"
        ways = {"L1": (1, None), "L1, L2": (host, None), "L1, L2, L3": (host, url)}
        for name, (places, storage) in {**ways, "L1, L2, L3 of another engine": (host, url)}.items():
            engine = engine_with(gpu_blocks=device, cpu_blocks=places, storage=storage)
            taken[name] = converse(engine, frontend, talks, new)
            counters = engine.counters()
            engine.close()
        # 2. Time one long history that only storage has, under each policy
        engine = engine_with(storage=url, prefetch="both_ends", always_restore=True)
        length = min(most, 2048) * 7 // 8
        text = lesson.document_for(engine, frontend, rng, length, [lesson.SECRET], 2)
        asked = policies(engine, frontend.request(messages=[dict(role="user", content=text)]).tokens)
        engine.close()
    last = [requests[-1] for requests in asked.values()]
    verified = lesson.verify(paged.baseline.Engine(model), sum(taken.values(), last))

    report = dict(link=lesson.described(engine.behind.cache.load_link), verified=verified, counters=counters)
    print(
        f"{TALKS} conversations of up to {pages} pages, each asked twice; L1 has {device} pages, L2 {host}\n"
        f"{arguments.write_policy}, {arguments.prefetch}\n"
    )
    rows = show_tiers(taken) + show_policies(asked)
    timelines = [asked[policy][-1].timeline for policy in ("both_ends", "wait_complete")]
    return dict(report, rows=rows), timelines


def converse(engine, frontend: Frontend, talks: list, new: int) -> list[Request]:
    """Ask all conversations, in any order, then each again with one more question -> the requests."""
    rng, talks = random.Random(1), [list(talk) for talk in talks]
    order = [*rng.sample(talks, len(talks)), *rng.sample(talks, len(talks))]
    texts = [talk.pop()["content"] for talk in order[: len(talks)]] + [lesson.TURNS[2]] * len(talks)
    return [lesson.say(engine, frontend, talk, text, new) for talk, text in zip(order, texts)]


def policies(engine, prompt: list[int]) -> dict[str, list[Request]]:
    """Ask the same, when only an L3 that is as slow as computing has it, under each policy."""
    engine.generate([Request(prompt, 1)])
    cache, seconds = engine.behind.cache, engine.behind.estimates.seconds_to_compute(0, len(prompt))
    size = len(prompt) // cache.pool.block_size * cache.host.block_bytes
    cache.storage.bandwidth = modelled_link.Bandwidth(size / seconds)
    cache.prefetcher.timeout = seconds / 3, 0.0
    cache.measure_storage()

    def ask(policy: str) -> Request:
        lesson.settle(engine)
        engine.evict("device")
        engine.evict("host")
        cache.prefetcher.policy = policy
        return engine.generate([Request(prompt, 2, must_compute=policy == "computed")])[0]

    return lesson.in_turn({name: partial(ask, name) for name in ("computed", *PREFETCH)})


def show_tiers(taken: dict[str, list[Request]]) -> list[dict]:
    """Print TTFT, and where the prompts' tokens were found -> rows."""
    times = {name: [one.outcome.ttft_ms for one in asked[TALKS:]] for name, asked in taken.items()}
    rows = lesson.table("TTFT, the second time", times, "ttft_ms", "ms")
    print(f"\n{'the second time':30}{'L1':>6}{'L2':>6}{'L3':>6}  computed")
    for row, asked in zip(rows, taken.values()):
        row |= (found := shares(asked[TALKS:]))
        row["first_time_from_storage"] = first = shares(asked[:TALKS])["storage"]
        print(f"  {row['case']:28}" + "".join(f"{share:6.0%}" for share in found.values()))
    print(f"  (in the last row the first time, too, {first:.0%} came from L3)\n")
    return rows


def shares(requests: list[Request]) -> dict[str, float]:
    """-> of the prompts' tokens, what each tier had, and what was computed."""
    tiers, prompts = ("gpu", "cpu", "storage"), sum(request.prompt_tokens for request in requests)
    found = {tier: sum(request.found.get(tier, 0) for request in requests) / prompts for tier in tiers}
    return {**found, "computed": 1 - sum(found.values())}


def show_policies(asked: dict[str, list[Request]]) -> list[dict]:
    """Print what each policy took -> rows."""
    last = asked["both_ends"][-1]
    title = f"TTFT, {last.prompt_tokens} tokens, storage as fast as computing, the guard off"
    times = {policy: [one.outcome.ttft_ms for one in requests] for policy, requests in asked.items()}
    rows = lesson.table(title, times, "ttft_ms", "ms")
    middle = {row["case"]: row["ttft_ms"] for row in rows}
    better = min(middle["computed"], middle["wait_complete"]) / middle["both_ends"]
    print(
        f"  both_ends: {better:.2f}x as soon as the better of computing all and waiting for all\n\n"
        "both_ends (p: prefill, pages read; digits: layers; s: pages to host memory)\n"
        f"{charts.chart(last.timeline)}\n\nAnd if not even the weights fit on the device? Chapter 08."
    )
    return rows


# 6. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    offload.add_arguments(parser)
    add, number, whole = parser.add_argument, cli.bounded(float, 0, 1e6), cli.bounded(int, 0, 1 << 26)
    add("--hicache-ratio", type=cli.bounded(float, 1, 1e6), metavar="R", help="host memory: R times L1")
    add("--hicache-size", type=cli.bounded(float, 1e-3, 1e6), metavar="GB", help="of host memory")
    add("--layout", choices=LAYOUTS, default="page_first_direct", help="of host memory (page_first_direct)")
    add("--write-policy", choices=WRITE, default="write_through", help="when pages go down (write_through)")
    add("--hicache-io-backend", choices=("direct", "kernel"), help="what copies on a GPU (by a rule)")
    add("--storage", metavar="URL", help="shared tier: file:DIR, redis://HOST:PORT/N, or module:Class")
    add("--storage-config", type=backends.configuration, metavar="JSON or @FILE", help="its settings")
    add("--storage-bandwidth", type=modelled_link.speed, metavar="GB/S[:GB/S...@SECONDS]", help="modelled")
    add("--prefetch", choices=PREFETCH, default="timeout", help="how long to wait for storage (timeout)")
    add("--prefetch-threshold", type=whole, default=256, metavar="TOKENS", help="at least to read (256)")
    add("--prefetch-timeout", type=number, default=1.0, metavar="S", help="of every prefetch (1)")
    add("--prefetch-timeout-per-1k", type=number, default=0.25, metavar="S", help="each 1,024 tokens (0.25)")


def host_pages(model, arguments, page_bytes: int) -> int:
    """-> how many pages host memory gets, as the one option says that is given. Raises BadRequest."""
    useful = arguments.max_running * -(-model.config.max_position_embeddings // arguments.block_size)
    device = cli.blocks_that_fit(arguments.gpu_blocks, useful, page_bytes, model.device, "--gpu-blocks")
    ratio, size = arguments.hicache_ratio, arguments.hicache_size
    asked = arguments.cpu_blocks, ratio and int(ratio * device), size and int(1e9 * size / page_bytes)
    given = [pages for pages in asked if pages is not None]
    if len(given) > 1 or ratio == 1:
        raise BadRequest("Give one of --cpu-blocks, --hicache-size and --hicache-ratio, the last above 1.")
    options = argparse.Namespace(**{**vars(arguments), "cpu_blocks": given[0] if given else None})
    return offload.host_blocks(model, options, page_bytes)


def make_engine(model, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache."""
    size, url = arguments.block_size, arguments.storage or None
    block_bytes = size * model.config.kv_numbers_per_token * model.dtype.itemsize
    blocks = host_pages(model, arguments, block_bytes)
    config, (threshold, *timeout) = backends.settings(arguments.storage_config, arguments)
    storage = url and backends.open_storage(url, config, arguments.storage_bandwidth)
    if arguments.hicache_io_backend and model.device.type != "cuda":
        raise BadRequest("--hicache-io-backend chooses what copies on a GPU, and here is none: leave it out.")
    cache = TieredCache(
        blocks, modelled_link.bandwidth(model, arguments.link), storage, arguments.prefetch,
        arguments.write_policy, arguments.layout, threshold, tuple(timeout), arguments.hicache_io_backend,
    )  # fmt: skip
    engine = paged.make_engine(model, arguments, Restorer(cache, Estimates(arguments.always_restore)))
    words = f"{blocks} pages of {size} tokens, {blocks * block_bytes / 1e6:.1f} MB, over a {cache.load_link}"
    print(f"Host: {words}; storage: {storage or 'none'}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo)
