"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than the device's, but it is one machine's, and it is lost with the
process. A service runs many engines, and what one of them has read the others compute again.

The mechanism. Pages of K and V live on the device (L1), in host memory (L2), and in storage that many engines
share (L3). One radix tree says which tiers have a page. While a request is queued, the cache asks storage for
its pages, and prefetches those that neither L1 nor L2 has:

    tokens   0          320            800                        1792      16 tokens a page
    pages    |== L1 ====|==== L2 ======|:::::: L3 ::::::::::::::::|
             found      | by layers    | prefetched into L2, and from there on to L1

The two copies are a pipeline: the link loads pages that are in L2 while storage reads later ones. Pages that
are not in L1 when the request is admitted are loaded layer by layer (chapter 03).

How long does a request wait for storage? `best_effort`: not at all, it uses the pages that are there at its
turn. `timeout`: a number of seconds, and more for each 1,024 tokens. `wait_complete`: until all pages are
there. `both_ends`: until storage has answered which pages it has; then the engine computes from the front
while pages arrive from the back (chapter 06; examples/both_ends.py). No request waits longer than computing
would take, nor for a load that takes more than 0.8 of that.

When does a page go down? `write_through`: when it is full. `write_through_selective`: when a second request
has it on the device. `write_back`: when a tier evicts it and none below has it (for L1's the engine waits).

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
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile

from common import link as links
from common.cache import Match
from common.estimates import Estimates
from common.link import as_integers
from common.requests import BadRequest, Request
from common.restoring import Restorer
from shell import backends, charts, hardware, lesson, modelled_link
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
READ = 64  # tokens, whose pages one read or write of storage moves
RETRY_SECONDS, RETRY_REQUESTS = 1.0, 4  # ask storage again after so long, for so many of the queue
WRITE = "write_through", "write_through_selective", "write_back"
TALKS = 6  # conversations of the demo
# The order of [layers, places, 2, page size, KV heads, head size] in host memory, and of a page in storage
LAYOUTS = {
    "layer_first": (0, 2, 1, 3, 4, 5),  # as on the device: K, or V, of a layer in adjacent places
    "page_first": (1, 3, 0, 2, 4, 5),  # a page is contiguous, and in it all layers of a token
    "page_first_direct": (1, 0, 2, 3, 4, 5),  # a page is contiguous, and in it all tokens of a layer
}

# 1. The tree -----------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Node:
    """A span: pages that follow each other, all of which are in the same tiers. The device's and host
    memory's pools say, page by page, what they take and drop; nodes are split, and joined, as they do."""

    parent: "Node | None"
    pages: list  # their prefixes
    children: dict = field(default_factory=dict)  # first page of a child -> the child
    device: bool = False
    host_blocks: list[int] = field(default_factory=list)  # in host memory, one a page, or none
    stored: bool = False
    wanted: bool = False  # the write policy wants it in the tiers below the device
    first_request: int = 0  # id (from 1 on) of the first that had it on the device; 0: nobody, or wanted

    @property
    def is_local(self) -> bool:
        """Whether the device or host memory has it."""
        return self.device or bool(self.host_blocks)

    @property
    def state(self) -> tuple:
        return self.device, bool(self.host_blocks), self.stored, self.wanted, self.first_request


class HiRadixTree:
    """All known pages, in spans, and which tiers have them."""

    def __init__(self):
        self.root, self.size = Node(None, []), 0  # size: pages

    def spans(self, run: list) -> list[tuple[Node, slice]]:
        """-> where a run of pages, that follow each other from anywhere in a chain, is: nodes, upper first,
        and which of a node's pages are the run's. What is not known is in a last node, outside the tree."""
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
        if unknown := chain[max(at, first) :]:
            spans.append((Node(None, unknown), slice(0, len(unknown))))
        return spans

    def take(self, run: list) -> list[Node]:
        """-> nodes of the tree that have these pages and no others: known ones, split at the ends, or new."""
        taken = [self.split(*span) for span in self.spans(run)]
        if taken and not (new := taken[-1]).parent:  # outside the tree yet; what comes before may be, too
            new.parent = (taken[:-1] or self.take(before(run)) or [self.root])[-1]
            new.parent.children[new.pages[0]] = new
            self.size += len(new.pages)
        return taken

    def split(self, node: Node, part: slice) -> Node:
        """Split a node at both ends of a part of it -> the part. The pieces are in the node's tiers still."""
        for at in part.stop, part.start:
            if 0 < at < len(node.pages):
                upper = replace(node, pages=node.pages[:at], host_blocks=node.host_blocks[:at], children={})
                upper.parent.children[upper.pages[0]] = upper
                node.parent, node.pages, node.host_blocks = upper, node.pages[at:], node.host_blocks[at:]
                upper.children[node.pages[0]] = node
                node = upper if at == part.stop else node
        return node

    def join(self, nodes: list[Node]):
        """Join each of these, and what follows the last, with what comes before it, where both are in the
        same tiers, and no other conversation parts from it there."""
        for node in (*nodes, *nodes[-1].children.values()) if nodes else ():
            upper = node.parent
            if upper.pages and len(upper.children) == 1 and upper.state == node.state:
                node.pages, node.host_blocks = upper.pages + node.pages, upper.host_blocks + node.host_blocks
                node.parent = upper.parent
                node.parent.children[node.pages[0]] = node

    def change(self, pages):
        """Yield nodes that have these pages, of any chains, and no others; beginnings first, since they were
        used later than ends. The caller changes each, then it is joined with its neighbours."""
        runs = []
        for page in sorted(pages, key=lambda page: -page.used):
            if not runs or runs[-1][-1] is not page.parent:
                runs.append([])
            runs[-1].append(page)
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
            if not node.children and not node.is_local and keep.isdisjoint(node.pages):
                del node.parent.children[node.pages[0]]
                self.size -= len(node.pages)
        self.join(self.nodes())


def before(run: list) -> list:
    """-> all pages that come before a run, the first one first."""
    pages, page = [], run[0].parent if run else None
    while page:
        pages.append(page)
        page = page.parent
    return pages[::-1]


# 2. The Cache ----------------------------------------------------------------------------------

@dataclass(eq=False)
class Prefetch:
    """What storage may have of a request, on its way into host memory."""

    request: Request
    chain: list  # prefixes of the request's full pages; when storage has answered, up to the last to read
    until: float  # seconds of time.perf_counter(): the policy waits no longer
    ended: bool  # no read is begun any more: all have come, too few, no place is left, or nobody waits
    pages_read: set  # their prefixes
    loaded: set  # prefixes of pages that were copied to the device while others were being read
    pays: bool  # loading it is worth its time: the engine has decided so, or no request waits (best_effort)
    asked_at: float = field(default_factory=time.perf_counter)
    answered: bool = False  # storage has said how many pages it has
    reads: list = field(default_factory=list)  # Transfers of the reads that were begun
    load: object = None  # Transfer of pages that are being copied to the device


class TieredCache(offload.HostCache):
    """Chapter 03's host memory under a radix tree, and storage behind it, in the order of a page's life:

        node.device -- saving --> node.places -- writing --> node.stored        (evicting, evicting_l2: lost)
                    <- restore --             <-- coming --                     (submitted, waits)"""

    fields = {}
    direction = 1  # pages are read from the first one on
    # For the server: shell/ says how a storage is opened, attached and shown
    open_storage, attach_storage = staticmethod(backends.open_storage), backends.attach_storage
    pages_in_storage = backends.pages_in_storage

    def __init__(
        self, blocks: int, bandwidth=None, storage=None, prefetch="timeout", write="write_through",
        layout="page_first_direct", threshold=256, timeout=(1.0, 0.25), io_backend=None,
    ):  # fmt: skip
        """`blocks` in host memory, `bandwidth` of the modelled link to them; `storage`: a store.Storage.
        `threshold`: tokens that a prefetch must bring. `timeout`: seconds, and more for each 1,024 tokens.
        `io_backend`: what copies on a GPU, direct (the copy engine) or kernel; by default the link's rule."""
        super().__init__(blocks, bandwidth)
        self.storage, self.write_policy, self.layout, self.io_backend = storage, write, layout, io_backend
        self.prefetch_policy, self.threshold, self.timeout = prefetch, threshold, timeout
        self.unwritten: dict = {}  # pages that may have to be written, once they are in host memory
        self.writing, self.reading = set(), set()  # pages that are being written, and read

    def attach(self, engine):
        super().attach(engine)
        for link in self.load_link, self.save_link:
            link.backend = link.backend or self.io_backend  # a link whose kernels copy wrongly has its own
        self.tree, self.host.on_evict = HiRadixTree(), self.on_evict_l2
        if self.layout == "page_first":  # other bytes than those of the other layouts: under other keys
            namespace = f"{self.model.digest.hex()} {self.model.dtype} kv page_first"
            engine.block_keys = paged.BlockKeys(namespace, self.pool.block_size)
        self.pages_at_once = max(1, READ // self.pool.block_size)
        self.step_began = 0  # of all uses: what was used since does not leave host memory for another page
        if self.storage:
            self.storage.open(engine.wake.set)
            self.measure_storage()

    def host_memory(self, shape):
        """[L, places, 2, page size, KVH, hd], of which `layout` says what lies next to what."""
        order = LAYOUTS[self.layout]
        memory = super().host_memory([shape[axis] for axis in order])
        self.array = as_integers(memory.movedim(order.index(1), 0))  # for NumPy: pages as in storage
        return memory.permute([order.index(axis) for axis in range(6)])

    # It is computed, and goes to host memory (chapter 03) and on to storage, when the write policy wants that

    def save(self, batch):
        """Put what was computed into the tree, and send down what the write policy wants there."""
        for request, _ in batch.work:
            self.record_pages(request)
        self.save_pending()
        if self.tree.size > 2 * (self.pool.size + self.host.size):
            chains = [one.memo.chain for one in (*self.engine.waiting, *self.engine.running) if one.memo]
            self.tree.forget(set().union(self.saving, self.reading, self.writing, *chains))

    def record_pages(self, request):
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
        unsaved = self.pending_saves.pop(request, []) if first else []
        if self.write_policy != "write_back":
            self.pending_saves[request] = unsaved + wanted
            self.send_l3(wanted)

    def after_gap(self, block_key) -> bool:
        """Whether no tier below the device has what comes before, or is about to."""
        gap = super().after_gap(block_key) and block_key.parent not in self.writing
        return gap and not any(node.stored for node, _ in self.tree.spans([block_key.parent]))

    def on_saved(self, request, transfer, block_keys, host_blocks, arrived: bool):
        super().on_saved(request, transfer, block_keys, host_blocks, arrived)
        if arrived:
            self.add_to_l2(block_keys, host_blocks)
            self.send_l3(block_keys)
        else:
            self.looked_at.pop(request, None)  # look at all of them again

    def add_to_l2(self, block_keys, host_blocks: list[int]):
        """These pages have arrived in host memory. (If another copy had, its places stay.)"""
        for block_key, host_block in zip(block_keys, host_blocks):
            self.host.register(host_block, block_key)
        for node in self.tree.change(block_keys):
            node.host_blocks = [self.host.block_of[block_key] for block_key in node.pages]

    def send_l3(self, pages=()):
        """Write pages from where they lie in host memory, at once about a quarter of that; the others wait,
        and what is not there yet comes again by `on_saved`."""
        if self.storage and self.write_policy != "write_back":
            self.unwritten.update((page, page) for page in pages)
        most, there = max(1, self.host.size // 4), self.host.block_of
        while self.unwritten and len(self.writing) < most and not self.storage.writer.hangs:
            some = map(self.unwritten.pop, list(islice(self.unwritten, self.pages_at_once)))
            self.write_l3({page: there[page] for page in some if page in there})

    def write_l3(self, host_block_of: dict, leaving: bool = False):
        """Write those of these pages that storage is owed, and that a lookup would reach: from their places,
        which are held until that is over, or copies if they are `leaving`."""
        to_write = []
        for node in self.tree.change(host_block_of):
            if node.parent.device or not self.after_gap(node.pages[0]):
                to_write += self.to_write(node)
                self.writing.update(to_write)
        if to_write:
            host_blocks = [host_block_of[page] for page in to_write]
            contents = [self.array[at].copy() if leaving else self.array[at] for at in host_blocks]
            write = self.storage.set([page.digest for page in to_write], contents)
            held = [] if leaving else [(self.host, host_blocks)]
            self.hold("write", [write], *held, then=partial(self.on_written, to_write, write))

    def to_write(self, node: Node) -> list:
        """-> the pages of a span that storage is owed."""
        to_write = node.wanted and not node.stored
        return [page for page in node.pages if page not in self.writing] if to_write else []

    def on_written(self, pages: list, write, arrived: bool):
        """A write is over: note what storage has."""
        self.writing.difference_update(pages)
        self.counts["storage_pages_written"] += write.value or 0
        there = [page for page in pages if arrived and page.digest not in self.storage.doubted]
        for node in self.tree.change(there):
            node.stored = True
        self.count_lost(pages)

    # It leaves the device, and later host memory

    def on_evict(self, leaving: list):
        """Note what leaves the device. Under write_back first copy dirty pages to host memory, beginnings
        first, while the engine waits."""
        block_of, dirty = {block_key: block for block, block_key in leaving}, []
        for node in self.tree.change(block_of):
            node.device = False
            dirty += [page for page in self.to_write(node) if not self.has_block(page)]
        if self.write_policy == "write_back":
            self.counts["dirty_evicted"] += len(dirty)
            room = partial(self.host.make_room, own=() if self.storage else dirty, used=self.step_began)
            while not self.save_link.hangs and (fits := room(len(dirty))):
                pages, dirty, host_blocks = dirty[:fits], dirty[fits:], self.host.allocate(fits)
                copy = self.copy_out([block_of[page] for page in pages], host_blocks)
                try:
                    copy.wait(min(self.longest_save, links.HANG_SECONDS + self.save_link.seconds(0)))
                    self.add_to_l2(pages, host_blocks)
                    self.counts["pages_written"] += fits
                except links.TransferError:
                    copy.cancel()
                    self.hold("save", [copy], (self.host, host_blocks))  # a late one still writes there
                self.host.release(host_blocks)
        self.count_lost(block_of)

    def on_evict_l2(self, leaving: list):
        """Write copies of owed pages that leave host memory, as far as that can be."""
        host_block_of = {page: host_block for host_block, page in leaving}
        full = len(self.writing) > self.pool.size + self.host.size  # copies take no more than these pools
        if self.storage and not (full or self.storage.writer.hangs):
            self.write_l3(host_block_of, leaving=True)
        for node in self.tree.change(host_block_of):
            node.host_blocks = []
        self.count_lost(host_block_of if self.storage else ())

    def count_lost(self, pages):
        """Count those of these pages that were wanted below, and are in no tier, nor on their way to one."""
        lost = [page for node in self.tree.change(pages) if not node.is_local for page in self.to_write(node)]
        self.counts["pages_lost"] += len(lost)
        for node in self.tree.change(lost):
            node.wanted = False  # each is counted once

    # A request stands in line that needs it: it is read into host memory, and the policy says who waits

    def submitted(self, request):
        """Ask storage which pages of the request it has, and mark them as used; `poll` then reads those that
        neither pool has. Where storage is silent, only find out whether it answers again."""
        size, chain = self.pool.block_size, request.chain[: request.history // self.pool.block_size]
        if not self.storage or not chain:
            return
        if self.storage.silent:
            if time.perf_counter() > self.measured_at + RETRY_SECONDS and not self.in_flight["measure"]:
                self.measure_storage()
            return
        tokens = (len(chain) - self.num_local(chain)) * size
        timeout = request.received + self.timeout[0] + self.timeout[1] * tokens / 1024
        most = request.wait_deadline
        until = dict(best_effort=0.0, timeout=min(timeout, most)).get(self.prefetch_policy, most)
        moved = (request.memo.pages_read, request.memo.loaded) if request.memo else (set(), set())
        request.memo = Prefetch(request, chain, until, tokens < max(1, self.threshold), *moved, not until)
        self.ask_l3(request.memo)

    def num_local(self, chain: list) -> int:
        """-> how many of its first pages the device or host memory has."""
        return sum(part.stop for _, part in takewhile(lambda span: span[0].is_local, self.tree.spans(chain)))

    def measure_storage(self):
        """Find out how fast storage is, and whether it answers."""
        self.measured_at, size = time.perf_counter(), self.pages_at_once * self.host.block_bytes
        reads = [self.storage.measure(size) for _ in range(2)]  # the first one is slower
        self.hold("measure", [self.storage.exists([bytes(32)]), *reads])

    def ask_l3(self, prefetch: Prefetch):
        answer = self.storage.exists([page.digest for page in prefetch.chain])
        self.hold("ask", [answer], then=partial(self.on_answer, prefetch, answer))

    def on_answer(self, prefetch: Prefetch, answer, arrived: bool):
        """Storage has said which pages it has: note that, and let those behind the near ones be read. What it
        was to have and lacks is written again, or lost."""
        chain, local, has = prefetch.chain, self.num_local(prefetch.chain), answer.value if arrived else []
        count = len(list(takewhile(bool, has[local:])))  # up to the first gap
        if arrived:
            there = {page for page, known in zip(chain[: local + count], has) if known}
            known = (node.pages[part] for node, part in self.tree.spans(chain) if node.stored or node.wanted)
            self.doubt(gone := set().union(*known) - there)
            self.count_lost(gone)
            for node in self.tree.change(there):
                node.stored = True
        enough = count * self.pool.block_size >= self.threshold
        prefetch.answered, prefetch.chain = True, chain[: local + count if enough else local]

    def doubt(self, pages):
        """Believe no more that storage has these: what is in host memory is written again."""
        for node in self.tree.change(pages):
            node.stored = False
        self.send_l3(pages)

    def read_l3(self, prefetch: Prefetch):
        """Begin to read what is lacking, as far as there are places: reads under way hold at most half of
        host memory. What other prefetches have read stays there, since it is about to be used."""
        to_read = self.to_read(prefetch)
        if fits := max(0, min(len(to_read), self.host.size // 2 - len(self.reading))):
            kept = (one.memo.pages_read for one in self.engine.waiting if one.memo)
            fits = self.host.make_room(fits, set(prefetch.chain).union(*kept))
        for at in range(0, fits, self.pages_at_once):
            run = to_read[at:fits][: self.pages_at_once]
            host_blocks = self.host.allocate(len(run))
            keys, into = [page.digest for page in run], [self.array[host_block] for host_block in host_blocks]
            read = self.storage.get(keys, into, f"page {prefetch.chain.index(run[0])}")
            prefetch.reads.append(read)
            self.reading.update(run)
            then = partial(self.on_read, prefetch, run, host_blocks, read)
            self.hold("read", [read], given=[(self.host, host_blocks)], then=then)
        waits = len(to_read) > fits and self.reading  # for the places of other reads
        prefetch.ended = self.reading.isdisjoint(prefetch.chain) and not waits

    def to_read(self, prefetch: Prefetch) -> list:
        """-> the pages to read: those in storage that are not near, nor on their way, up to the first that is
        nowhere."""
        to_read = []
        for node, part in self.tree.spans(prefetch.chain)[:: self.direction]:
            if not (node.is_local or node.stored):
                break
            to_read += [] if node.is_local else node.pages[part][:: self.direction]
        return [page for page in to_read if page not in self.reading]

    def on_read(self, prefetch: Prefetch, pages: list, host_blocks: list[int], read, arrived: bool):
        """A read is over: its pages are in host memory, or what storage has said of the chain is doubted."""
        self.reading.difference_update(pages)
        if arrived:
            self.add_to_l2(pages, host_blocks)
            prefetch.pages_read.update(pages)
            prefetch.request.timeline.add("storage", read.label, *read.span())
            self.counts["storage_pages_read"] += len(pages)
        else:
            self.end_prefetch(prefetch)
            if not read.cancelled:
                self.ask_l3(replace(prefetch))  # doubt what it has said of this chain

    def waits(self, request):
        """Whether storage may bring more of what the request lacks, and the policy lets it wait for that, and
        the engine, once storage has answered. Else it goes on with what has come."""
        prefetch, silent = request.memo, self.storage and self.storage.silent
        if not prefetch:
            return False
        is_missing = request.computed < len(prefetch.chain) * self.pool.block_size
        waits = is_missing and not (prefetch.ended or silent) and time.perf_counter() < prefetch.until
        if waits and prefetch.answered and not prefetch.pays:
            prefetch.pays = waits = self.engine.lower_tier.decide(request, self.offer(request)) > 0
        if not waits:
            self.end_prefetch(prefetch)
        return waits or prefetch.load is not None  # pages on their way to the device arrive before any others

    def offer(self, request) -> Match:
        """Offer what storage has. The link loads pages while storage reads later ones, except the last."""
        prefetch, block = request.memo, self.host.block_bytes
        tokens = len(prefetch.chain) * self.pool.block_size - request.computed
        pages = self.pool.num_blocks(tokens)
        read = self.storage.seconds(len(self.to_read(prefetch)) * block)
        load, last = self.load_link.seconds(pages * block), min(1, self.pages_at_once / pages)
        return Match(tokens, max(read, load) + last * min(read, load), prefetch, {"storage": tokens})

    def end_prefetch(self, prefetch: Prefetch):
        """Nobody waits for this prefetch any more: cancel its reads that have not begun."""
        prefetch.ended = True
        links.cancel(prefetch.reads)

    # It comes back to the device

    def load_ahead(self, prefetch: Prefetch):
        """Copy pages in host memory that follow those on the device, all layers at once, while later ones are
        being read. Admission finds them there. `match` offers the pages that have not been copied by then."""
        chain, pool, on_device = prefetch.chain, self.pool, self.pool.find(prefetch.chain)
        first, host_blocks = len(on_device), self.host.find(chain[len(on_device) :])
        room = pool.available - len(self.engine.running)  # each running request may need one more block
        needed = set().union(*(one.memo.chain for one in self.engine.waiting if one.memo))
        if fits := pool.make_room(max(0, min(len(host_blocks), room)), needed):
            pages, host_blocks = chain[first : first + fits], host_blocks[:fits]
            blocks = pool.allocate(fits, on_device[-1] if on_device else None, len(chain) - first)
            device, host = pool.memory.movedim(2, 0), self.host.memory.movedim(1, 0)  # [blocks, L, 2, ...]
            copy = self.load_link.copy(device, host, f"page {first}", links.BlockPairs(blocks, host_blocks))
            prefetch.load, then = copy, partial(self.loaded_ahead, prefetch, pages, blocks, copy)
            self.hold("load", [copy], (self.host, host_blocks), given=[(pool, blocks)], then=then)

    def loaded_ahead(self, prefetch: Prefetch, pages: list, blocks: list[int], copy, arrived: bool):
        """A copy is over. If it has not failed, its pages are on the device."""
        prefetch.load = None
        for block, page in zip(blocks, pages := pages if arrived else []):
            self.pool.register(block, page)
        for node in self.tree.change(pages):
            node.device = True
        prefetch.loaded.update(pages)
        prefetch.request.timeline.add("load", copy.label, *copy.span())
        self.counts.update(swap_ins=len(pages), bytes_in=copy.bytes)

    def credit(self, request, prefetch: Prefetch):
        """Count pages that were loaded ahead where they came from: admission has found them on the device."""
        size, found = self.pool.block_size, Counter(request.found)
        ahead = prefetch.loaded.intersection(request.chain[: found["gpu"] // size])
        read = len(ahead & prefetch.pages_read)
        came = Counter(cpu=size * (len(ahead) - read), storage=size * read)
        request.found = dict(found - Counter(gpu=size * len(ahead)) + came)
        self.counts["restored_tokens"] += size * len(ahead)
        prefetch.loaded.clear()

    def match(self, request):
        """Offer the next run in host memory."""
        missing, prefetch = self.missing(request), request.memo
        if prefetch and prefetch.loaded and not request.readmitted:
            self.credit(request, prefetch)
        there = takewhile(lambda span: span[0].host_blocks, self.tree.spans(missing))
        if host_blocks := [host_block for node, part in there for host_block in node.host_blocks[part]]:
            tokens, read = self.tokens_in(request, host_blocks), prefetch.pages_read if prefetch else set()
            read = self.pool.block_size * len(read.intersection(missing[: len(host_blocks)]))
            found = dict(cpu=tokens - read, storage=min(tokens, read))
            seconds = self.load_link.seconds(len(host_blocks) * self.host.block_bytes)
            return Match(tokens, seconds, host_blocks, {tier: n for tier, n in found.items() if n > 0})

    # In every step, and at the end

    def poll(self):
        self.last_tier = not self.storage or self.storage.is_backlogged
        super().poll()
        self.step_began, now = next(self.engine.block_keys.uses), time.perf_counter()
        for request in islice(self.engine.waiting, RETRY_REQUESTS):  # another engine may have written
            asked = request.memo
            late = not asked or asked.ended and asked.answered and now > asked.asked_at + RETRY_SECONDS
            if late and not request.must_compute:
                self.submitted(request)
        for prefetch in [request.memo for request in self.engine.waiting if request.memo]:
            if prefetch.answered and not prefetch.ended:
                self.read_l3(prefetch)
                if prefetch.pays and not (prefetch.ended or prefetch.load):
                    self.load_ahead(prefetch)
        self.send_l3()

    def finished(self, request):
        self.record_pages(request)
        super().finished(request)
        if self.storage:  # of a chain the end is deleted first
            self.storage.use([page.digest for page in request.chain])
        if request.memo:
            self.end_prefetch(request.memo)
        request.memo = None

    def close(self):
        """Let what is on its way arrive, and under write_back send down all that there is time for."""
        self.poll()
        for pool in self.pool, self.host:
            if self.write_policy == "write_back" and self.storage:
                pool.evict(list(pool.cached))
            self.drain()
        self.close_each(super(), self.storage)


# 3. The prefetch policies -----------------------------------------------------------------------

PREFETCH = "best_effort", "wait_complete", "timeout", "both_ends"


def cache_of(policy: str) -> type[TieredCache]:
    """-> the Cache of a prefetch policy. What `both_ends` adds is in examples/both_ends.py."""
    if policy == "both_ends":
        return importlib.import_module("examples.both_ends").added_to(TieredCache)
    return TieredCache


# 4. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Conversations behind one system prompt, more than L1 and L2 hold, with one, two and three tiers, and
    with an L3 that another engine has filled; then the policies on an L3 that is as slow as computing."""
    rng, most = random.Random(0), lesson.context(model, frontend)
    new = max(4, min(arguments.max_tokens, 12) * most // frontend.context)
    size, device, host = arguments.block_size, arguments.gpu_blocks, arguments.cpu_blocks
    context = min([most, *(size * blocks for blocks in (device, host) if blocks)])
    system = dict(role="system", content=lesson.document(frontend, rng, context // 16))
    talks = [[system, *lesson.conversation(frontend, rng, context // 4)] for _ in range(TALKS)]
    pages = -(-(max(len(frontend.encode(None, talk)) for talk in talks) + 3 * new + 32) // size)
    device, host = device or 2 * pages, host or 10 * pages // 3
    lesson.check_room(dict(device=device, host=host), pages, size)
    options, engines = vars(arguments) | dict(gpu_blocks=device, hicache_ratio=None, hicache_size=None), {}
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.storage or f"file:{folder}"
        ways = {"L1": (1, None), "L1, L2": (host, None), "L1, L2, L3": (host, url)}
        for name, (host_blocks, storage) in {**ways, "L1, L2, L3 of another engine": (host, url)}.items():
            given = argparse.Namespace(**options | dict(cpu_blocks=host_blocks, storage=storage))
            engine = engines[name] = make_engine(model, given)
        # 1. Ask each conversation twice, in any order
        taken = {name: converse(engine, frontend, talks, new) for name, engine in engines.items()}
        # 2. Time one long history that only storage has, under each policy
        text = lesson.document_for(engine, frontend, rng, min(most, 2048) // 2, [lesson.SECRET], 2)
        given.prefetch, given.link = "both_ends", engine.lower_tier.cache.bandwidth
        both = engines["both_ends"] = make_engine(model, given)
        asked = policies(engine, both, frontend.request(messages=[dict(role="user", content=text)]).tokens)
        for engine in engines.values():
            engine.close()
    answers = sum(taken.values(), [requests[-1] for requests in asked.values()])
    verified = lesson.verify(paged.baseline.Engine(model), answers)

    report = dict(link=lesson.describe_link(engine.lower_tier.cache.load_link), verified=verified)
    sizes = f"L1 has {device} pages, L2 {host}; they go down by {arguments.write_policy}"
    print(f"{TALKS} conversations of up to {pages} pages, each asked twice; {sizes}\n")
    report |= dict(rows=show_tiers(taken) + show_policies(asked), counters=engine.counters())
    return report, [asked[policy][-1].timeline for policy in ("both_ends", "wait_complete")]


def converse(engine, frontend: Frontend, talks: list, new: int) -> list[Request]:
    """Ask all conversations, in any order, then each again with one more question -> the requests."""
    rng, talks, asked = random.Random(1), [list(talk) for talk in talks], []
    for question in None, lesson.TURNS[2]:
        for talk in rng.sample(talks, len(talks)):
            text = question or talk.pop()["content"]
            asked.append(lesson.say(engine, frontend, talk, text, new))
    return asked


def policies(engine, both, prompt: list[int]) -> dict[str, list[Request]]:
    """Ask the same, when only an L3 that is as slow as computing has it, under each policy: `both_ends` of
    `both`, the others of `engine`."""
    seconds = lesson.ask(engine, prompt).outcome.ttft_ms / 1e3  # it computes all
    size = len(prompt) / engine.pool.block_size * engine.lower_tier.cache.host.block_bytes
    for each in engine, both:
        each.lower_tier.estimates.always, cache = True, each.lower_tier.cache
        cache.storage.bandwidth, cache.timeout = modelled_link.Bandwidth(size / seconds), (seconds / 3, 0.0)
        cache.measure_storage()

    def ask(policy: str) -> Request:
        asked = both if policy == "both_ends" else engine
        lesson.wait_until_idle(asked)
        asked.evict("host")
        asked.lower_tier.cache.prefetch_policy = policy
        return lesson.ask(asked, prompt, 2, "device")

    return lesson.in_turn({policy: partial(ask, policy) for policy in PREFETCH})


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
    computed, waited, _, both = (row["ttft_ms"] for row in rows)
    print(
        f"  both_ends: {min(computed, waited) / both:.2f}x as soon as the better of computing and waiting\n\n"
        "both_ends (p: prefill, pages read; digits: layers; s: pages to host memory)\n"
        f"{charts.chart(last.timeline)}\n\nAnd if not even the weights fit on the device? Chapter 08."
    )
    return rows


# 5. Main ---------------------------------------------------------------------------------------

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


def make_engine(model, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache. Raises BadRequest."""
    size, url = arguments.block_size, arguments.storage or None
    # 1. Host memory gets as many pages as the one option says that is given
    page_bytes = size * model.config.kv_numbers_per_token * model.dtype.itemsize
    useful = arguments.max_running * -(-model.config.max_position_embeddings // size)
    device = cli.blocks_that_fit(arguments.gpu_blocks, useful, page_bytes, model.device, "--gpu-blocks")
    ratio, giga = arguments.hicache_ratio, arguments.hicache_size
    asked = arguments.cpu_blocks, ratio and int(ratio * device), giga and int(1e9 * giga / page_bytes)
    given = [pages for pages in asked if pages is not None] or [None]
    if len(given) > 1 or ratio == 1:
        raise BadRequest("Give one of --cpu-blocks, --hicache-size and --hicache-ratio, the last above 1.")
    options = argparse.Namespace(**vars(arguments) | dict(cpu_blocks=given[0]))
    pages = offload.host_blocks(model, options, page_bytes)
    # 2. Storage, and the engine
    config, (threshold, *timeout) = backends.settings(arguments.storage_config, arguments)
    storage = url and backends.open_storage(url, config, arguments.storage_bandwidth)
    if arguments.hicache_io_backend and model.device.type != "cuda":
        raise BadRequest("--hicache-io-backend chooses what copies on a GPU, and here is none: leave it out.")
    cache = cache_of(arguments.prefetch)(
        pages, hardware.bandwidth(model, arguments.link), storage, arguments.prefetch,
        arguments.write_policy, arguments.layout, threshold, tuple(timeout), arguments.hicache_io_backend,
    )  # fmt: skip
    engine = paged.make_engine(model, arguments, Restorer(cache, Estimates(arguments.always_restore)))
    words = f"{pages} pages of {size} tokens, {pages * page_bytes / 1e6:.1f} MB, over a {cache.load_link}"
    print(f"Host: {words}; storage: {storage or 'none'}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo)
