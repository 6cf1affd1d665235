"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than device memory, but it belongs to one machine, and it is lost when the
process ends. A service runs many engines, and each of them computes again what another one has computed.

The mechanism. A page is a block of K and V. Pages live on the device (L1), in host memory (L2), and in
storage that many engines share (L3). One radix tree records which tiers hold each page. While a request is
queued, the cache asks storage which of the request's pages storage holds, and prefetches the pages that L1
and L2 lack:

    tokens   0          320            800                        1792      16 tokens a page
    pages    |== L1 ====|==== L2 ======|:::::: L3 ::::::::::::::::|
             found      | to L1        | prefetched into L2, and from there to L1

The two copies form a pipeline: while storage reads later pages, the link already loads pages that are in L2.
Each of these loads copies all layers of its pages at once. The pages that are still not in L1 when the
request is admitted are loaded layer by layer (chapter 03).

The prefetch policy says how long a request waits for storage.

    best_effort      not at all: it is queued only while memory or the next step is full with other requests.
                     It uses the pages that have arrived by then, and none if it is admitted at once
    timeout          a fixed number of seconds, and more for each 1,024 missing tokens
    wait_complete    until all pages have arrived

No request waits for storage longer than computing its prompt would take (60 s with `--always-restore`). A
request waits only if the load is estimated to take at most 0.8 of the time to compute the same tokens, or
with `--always-restore`.

The write policy says when a page is copied to a lower tier.

    write_through              as soon as the page is full
    write_through_selective    as soon as a second request has the page on the device
    write_back                 when a tier evicts the page and no lower tier holds it; if the tier is L1, the
                               engine waits for the copy to L2

Source: HiCache of SGLang (design document); its tree is RadixAttention's (Zheng et al., 2024, section 3).

    python 07_tiered_storage.py --demo
    python 07_tiered_storage.py --storage file:pages       # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile

from common import link as links
from common.cache import Match
from common.requests import BadRequest, Request
from shell import backends, charts, cli, hardware, lesson, modelled_link
from shell.frontend import Frontend
from shell.lower_tier import restorer
from shell.workers import HANG_SECONDS, Worker, as_integers

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
LONGEST_SAVE = 5.0  # seconds that the engine waits at most for a copy of dirty pages
READ = 64  # tokens per read or write of storage, which moves at least one page
# Ask storage again after this many seconds, for this many requests at the head of the queue
RETRY_SECONDS, RETRY_REQUESTS = 1.0, 4
PREFETCH = "best_effort", "wait_complete", "timeout"
WRITE = "write_through", "write_through_selective", "write_back"
TALKS = 6  # conversations in the demo
# The order of the axes in host memory and, apart from the page axis, in a stored page. The axes are
# 0: layers, 1: pages, 2: K and V, 3: tokens of a page, 4: KV heads, 5: head size
LAYOUTS = {
    # The device's order: for each layer, K of all pages, then V of all pages
    "layer_first": (0, 2, 1, 3, 4, 5),
    "page_first": (1, 3, 0, 2, 4, 5),  # a page is contiguous; within it, all layers of a token
    "page_first_direct": (1, 0, 2, 3, 4, 5),  # a page is contiguous; within it, all tokens of a layer
}

# 1. The tree -----------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Node:
    """A node of the tree is a span: consecutive pages of a chain that are all in the same tiers.

    When a tier takes or drops some pages of a span, the node is split. Neighbours in the same state are
    joined again."""

    parent: "Node | None"
    pages: list  # their BlockKeys
    children: dict = field(default_factory=dict)  # first page of a child -> the child
    device: bool = False
    host_blocks: list[int] = field(default_factory=list)  # one per page, or empty: not in host memory
    stored: bool = False
    wanted: bool = False  # the write policy wants it in the tiers below the device
    # Id of the first request that had the span on the device; 0 before that request, or if `wanted` is True
    first_request: int = 0

    @property
    def is_local(self) -> bool:
        """True if the device or host memory holds the span."""
        return self.device or bool(self.host_blocks)

    @property
    def state(self) -> tuple:
        """The values that must be equal in two neighbours for them to be joined."""
        return self.device, bool(self.host_blocks), self.stored, self.wanted, self.first_request


class HiRadixTree:
    """All known pages, in spans, and the tiers that hold each span."""

    def __init__(self):
        self.root, self.size = Node(None, []), 0  # size: number of pages

    def spans(self, run: list[paged.BlockKey]) -> list[tuple[Node, slice]]:
        """Find the nodes that hold a run, which is any number of consecutive pages of a chain.

        Returns: (node, slice of its pages) pairs, parents before children, that together cover the run. If
        the tree lacks the end of the run, the last pair has a new node for it, which is not in the tree."""
        chain = before(run) + run
        node, at, first, spans = self.root, 0, len(chain) - len(run), []
        while at < len(chain) and (node := node.children.get(chain[at])):
            ours = chain[at : at + len(node.pages)]
            # The chain may leave the node before its end
            same = next((n for n, page in enumerate(ours) if page is not node.pages[n]), len(ours))
            if at + same > first:
                spans.append((node, slice(max(0, first - at), same)))
            at += same
            if same < len(node.pages):
                break
        if unknown := chain[max(at, first) :]:
            spans.append((Node(None, unknown), slice(0, len(unknown))))
        return spans

    def take(self, run: list[paged.BlockKey]) -> list[Node]:
        """Return nodes of the tree that hold exactly these consecutive pages.

        Nodes that the run covers in part are split. Pages that the tree lacks are added as a new node."""
        taken = [self.split(*span) for span in self.spans(run)]
        if taken and not (new := taken[-1]).parent:  # not in the tree yet; its parent may be missing too
            new.parent = (taken[:-1] or self.take(before(run)) or [self.root])[-1]
            new.parent.children[new.pages[0]] = new
            self.size += len(new.pages)
        return taken

    def split(self, node: Node, part: slice) -> Node:
        """Split a node at both ends of `part`, a slice of its pages.

        Only the lists of pages and of host blocks are cut: no K or V is copied. The pieces are in the same
        tiers as the node was. Returns: the piece that holds the part."""
        for at in part.stop, part.start:
            if 0 < at < len(node.pages):
                upper = replace(node, pages=node.pages[:at], host_blocks=node.host_blocks[:at], children={})
                upper.parent.children[upper.pages[0]] = upper
                node.parent, node.pages, node.host_blocks = upper, node.pages[at:], node.host_blocks[at:]
                upper.children[node.pages[0]] = node
                node = upper if at == part.stop else node
        return node

    def join(self, nodes: list[Node]):
        """Join each of these nodes, and each child of the last one, with its parent.

        Two nodes are joined if they are in the same state and the parent has no other child."""
        for node in (*nodes, *nodes[-1].children.values()) if nodes else ():
            upper = node.parent
            if upper.pages and len(upper.children) == 1 and upper.state == node.state:
                node.pages, node.host_blocks = upper.pages + node.pages, upper.host_blocks + node.host_blocks
                node.parent = upper.parent
                node.parent.children[node.pages[0]] = node

    def change(self, pages):
        """Yield nodes that together hold exactly these pages, which may be of any chains.

        The caller changes each node's state as it is yielded. It must run the loop to its end, because nodes
        are joined with their neighbours only after the last node of their run.

        Pages are sorted by their depth in their chain, so that each run is found from its head on."""
        runs = {}  # last page of a run -> the run
        for page in sorted(pages, key=lambda page: page.depth):
            runs[page] = [*runs.pop(page.parent, ()), page]
        for run in runs.values():
            yield from (nodes := self.take(run))
            self.join(nodes)

    def nodes(self) -> list[Node]:
        """Return all nodes below the root, parents before their children."""
        found = [self.root]
        for node in found:
            found += node.children.values()
        return found[1:]

    def forget(self, keep: set):
        """Remove leaves that are in neither pool, unless `keep` has one of their pages."""
        for node in reversed(self.nodes()):
            if not node.children and not node.is_local and keep.isdisjoint(node.pages):
                del node.parent.children[node.pages[0]]
                self.size -= len(node.pages)
        self.join(self.nodes())


def before(run: list[paged.BlockKey]) -> list[paged.BlockKey]:
    """Return the pages that precede a run in its chain, in the chain's order."""
    pages, page = [], run[0].parent if run else None
    while page:
        pages.append(page)
        page = page.parent
    return pages[::-1]


# 2. The Cache ----------------------------------------------------------------------------------

@dataclass(eq=False)
class Prefetch:
    """The transfer of one queued request's pages from storage to host memory, and on to the device."""

    request: Request
    chain: list  # BlockKeys of the request's full pages; after storage's answer, up to the last page to read
    until: float  # time.perf_counter() until which the policy waits
    # True: no more reads are started. Too few tokens are missing, too few pages are stored, all pages have
    # arrived, host memory has no room and none is expected, a read has failed, or the wait is over
    ended: bool
    pages_read: set  # BlockKeys of pages that have arrived from storage
    loaded: set  # BlockKeys of pages that were copied to the device before admission
    # True: pages may be copied to the device before admission. The engine has decided that loading pays, or
    # the policy is best_effort, under which no request waits for storage
    pays: bool
    asked_at: float = field(default_factory=time.perf_counter)
    answered: bool = False  # storage has answered which pages it holds
    reads: list = field(default_factory=list)  # Transfers of the reads that were started
    load: object = None  # Transfer of the pages that are being copied to the device


class TieredCache(offload.HostCache):
    """Chapter 03's host memory under a radix tree, with storage as the tier below it.

    The drawing shows the three tiers, as fields of Node, and the methods that copy a page between them:

        device -- save --> host_blocks -- write_l3 --> stored
               <- restore,             <-- read_l3 ---
                  load_ahead

    `on_evict` and `on_evict_l2` are called when a page leaves a tier. `submitted` and `waits` prefetch while
    the request is queued.

    `request.memo` is the request's Prefetch, or None."""

    fields = {}
    direction = 1  # 1: storage reads the first page first; -1: the last page first
    # The server opens and attaches storage with these
    open_storage, attach_storage = staticmethod(backends.open_storage), backends.attach_storage

    def __init__(self, blocks: int, bandwidth=None, storage=None, prefetch="timeout", write="write_through",
                 layout="page_first_direct", threshold=256, timeout=(1.0, 0.25), io_backend=None):
        """Keep the settings; `attach` allocates host memory and opens storage.

        blocks: number of pages in host memory.
        bandwidth: of the modelled link between device and host, in bytes per second; None on a GPU.
        storage: a store.Storage, or None: two tiers only.
        prefetch, write: names of the policies (PREFETCH, WRITE).
        layout: order of the axes in host memory (LAYOUTS).
        threshold: fewest tokens that a prefetch reads.
        timeout: seconds that the policy `timeout` waits, and further seconds for each 1,024 missing tokens.
        io_backend: what copies on a GPU: "direct" (the copy engine) or "kernel"; with None, the link
        chooses."""
        super().__init__(blocks, bandwidth)
        self.storage, self.write_policy, self.layout, self.io_backend = storage, write, layout, io_backend
        self.prefetch_policy, self.threshold, self.timeout = prefetch, threshold, timeout
        # request -> number of leading pages that are recorded in the tree; request (may be finished) -> its
        # pages to copy out, oldest first
        self.recorded, self.pending_saves = {}, {}
        # Pages to write to storage (see `send_l3`), pages that it is writing, and pages that it is reading
        self.unwritten, self.writing, self.reading = {}, set(), set()

    def attach(self, engine):
        super().attach(engine)
        for link in self.load_link, self.save_link:
            # If the link's copy kernels have failed their test, it has set a backend already: keep that one
            link.backend = link.backend or self.io_backend
        self.tree, self.host.on_evict = HiRadixTree(), self.on_evict_l2
        if self.layout == "page_first":  # a page has its numbers in another order, so it needs another key
            namespace = f"{self.model.digest.hex()} {self.model.dtype} kv page_first"
            engine.block_keys = paged.BlockKeys(namespace, self.pool.block_size)
        self.pages_at_once = max(1, READ // self.pool.block_size)
        if self.storage:
            self.storage.open(partial(Worker, wake=engine.wake.set), self.counts)
            self.measure_storage()

    def host_memory(self, shape):
        """Return host memory [L, pages, 2, page size, KVH, hd], a view of memory in the order of `layout`."""
        order = LAYOUTS[self.layout]
        memory = super().host_memory([shape[axis] for axis in order])
        self.array = as_integers(memory.movedim(order.index(1), 0))  # by page, as NumPy
        return memory.permute([order.index(axis) for axis in range(6)])

    # Saving: from the device to host memory (chapter 03), and on to storage, as the write policy says

    def save(self, batch):
        """Record the step's pages in the tree, and start the copies that the write policy wants."""
        for request, _ in batch.work:
            self.record_pages(request)
        self.save_pending()
        if self.tree.size > 2 * (self.pool.size + self.host.size):
            chains = [one.memo.chain for one in (*self.engine.waiting, *self.engine.running) if one.memo]
            self.tree.forget(set().union(self.saving, self.reading, self.writing, *chains))

    def record_pages(self, request):
        """Record the request's new full pages in the tree, and queue the pages that must be saved."""
        first, full = self.recorded.get(request, 0), request.registered
        if first == full:
            return
        self.recorded[request], wanted = full, []
        for node in self.tree.change(filter(self.pool.block_of.__contains__, request.chain[first:full])):
            node.device, second = True, node.first_request not in (0, request.id)
            node.wanted |= second or self.write_policy != "write_through_selective"
            node.first_request = 0 if node.wanted else request.id
            wanted += node.pages if node.wanted else []
        unsaved = self.pending_saves.pop(request, []) if first else []
        if self.write_policy != "write_back":
            self.pending_saves[request] = unsaved + wanted
            self.send_l3(wanted)

    def save_pending(self):
        """Copy out pending pages, those of the latest request first, until host memory is full.

        A page that does not fit stays pending, even after its request has finished, until the device evicts
        it. Then the later pages of its chain are dropped as well, because no lookup would reach them."""
        there, room = self.pool.block_of, True
        for request, unsaved in reversed([*self.pending_saves.items()]):
            if unsaved and unsaved[0] in there and (self.after_gap(unsaved[0]) or not room):
                continue
            present = takewhile(there.__contains__, unsaved)
            blocks = {page: there[page] for page in present if not self.has_block(page)}
            fits = self.save_blocks(request, blocks)
            room = room and fits == len(blocks)
            self.pending_saves[request] = [*blocks][fits:]
            if fits == len(blocks):
                del self.pending_saves[request]

    def kept_for(self, request) -> set:
        """Also keep the pages that prefetches have read for queued requests, which will use them soon. A save
        for a finished request may evict its own pages, because storage has them. `request`: None for a
        prefetch."""
        read = (one.memo.pages_read for one in self.engine.waiting if one.memo)
        is_last = not self.storage or self.storage.is_backlogged
        own = request.chain if request and (is_last or request in self.engine.running) else ()
        return set(own).union(*read)

    def after_gap(self, block_key) -> bool:
        """Return True if the parent page is missing from every lower tier and not on its way to one."""
        parent = block_key.parent
        below = parent is None or self.has_block(parent) or parent in self.writing
        return not (below or any(node.stored for node, _ in self.tree.spans([parent])))

    def on_saved(self, request, transfer, block_keys, arrived: bool):
        super().on_saved(request, transfer, block_keys, arrived)
        if arrived:
            self.add_to_l2(block_keys)
            self.send_l3(block_keys)
        else:
            self.recorded.pop(request, None)  # the next `save` looks at all of its pages again

    def add_to_l2(self, block_keys, host_blocks=()):
        """Record pages that have arrived in host memory, and register their `host_blocks`, if this is not
        done yet. A page that was there already keeps its block."""
        for block_key, host_block in zip(block_keys, host_blocks):
            self.host.register(host_block, block_key)
        self.host.use(sorted(block_keys, key=lambda page: page.depth))
        for node in self.tree.change(block_keys):
            node.host_blocks = [self.host.block_of[block_key] for block_key in node.pages]

    def send_l3(self, pages=()):
        """Queue those of `pages` that are in host memory for storage, and start writes until a quarter of
        host memory is being written.

        `on_saved` queues the others once they have arrived there. A page stays queued until its write begins
        or host memory evicts it. Under write_back, no pages are queued here."""
        most, there = max(1, self.host.size // 4), self.host.block_of
        if self.storage and self.write_policy != "write_back":
            self.unwritten.update((page, page) for page in pages if page in there)
        while self.unwritten and len(self.writing) < most and not self.storage.writer.hangs:
            some = map(self.unwritten.pop, list(islice(self.unwritten, self.pages_at_once)))
            self.write_l3({page: there[page] for page in some})

    def write_l3(self, host_block_of: dict, leaving: bool = False):
        """Start to write pages to storage, if the write policy wants them there and storage lacks them.

        A page is not written if its parent is in no tier and not on its way to one, because no lookup would
        reach it.

        host_block_of: page -> its block in host memory. Blocks are referenced until the write completes.
        leaving: True if these blocks are being evicted: then copies of their contents are written."""
        to_write = []
        for node in self.tree.change(host_block_of):
            if node.parent.device or not self.after_gap(node.pages[0]):
                to_write += self.to_write(node)
                self.writing.update(to_write)
        if to_write:
            host_blocks = [host_block_of[page] for page in to_write]
            contents = [self.array[at].copy() if leaving else self.array[at] for at in host_blocks]
            write = self.storage.set([page.digest for page in to_write], contents)
            # The pages before these were written earlier, but must be deleted later
            for last in set(to_write).difference(page.parent for page in to_write):
                self.storage.use([page.digest for page in (*before([last]), last)])
            held = [] if leaving else [(self.host, host_blocks)]
            self.hold("write", [write], *held, then=partial(self.on_written, to_write, write))

    def to_write(self, node: Node) -> list:
        """Return the pages of a span that must still be written to storage.

        The write policy wants them there, storage lacks them, and no write of them is under way."""
        return [page for page in node.pages if node.wanted and not node.stored and page not in self.writing]

    def on_written(self, pages: list, write, arrived: bool):
        """Called when a write has completed: record which pages storage holds."""
        self.writing.difference_update(pages)
        there = [page for page in pages if arrived and page.digest in write.value]
        self.counts["storage_pages_written"] += len(there)
        for node in self.tree.change(there):
            node.stored = True
        self.count_lost(pages)

    # Eviction: from the device, and later from host memory

    def on_evict(self, leaving: list):
        """Called before device blocks lose their contents: record that these pages leave the device.

        Under write_back, first copy the dirty pages (no lower tier holds them) to host memory while the
        engine waits. A chain's head is copied before its tail.

        leaving: (device block, page) pairs."""
        block_of = {page: block for block, page in leaving}
        if self.write_policy == "write_back":
            dirty = [page for node in self.tree.change(block_of) for page in self.to_write(node)]
            dirty = [page for page in dirty if not self.has_block(page)]
            self.counts["dirty_evicted"] += len(dirty)
            # The first requests in the queue, which may be the cause of this eviction, need their host pages
            needed = set().union(*(one.chain for one in islice(self.engine.waiting, RETRY_REQUESTS)))
            room = partial(self.host.make_room, keep=needed.union(() if self.storage else dirty))
            while not self.save_link.hangs and (fits := room(len(dirty))):
                pages, dirty, host_blocks = dirty[:fits], dirty[fits:], self.host.allocate(fits)
                copy = self.copy_out([block_of[page] for page in pages], host_blocks)
                try:
                    copy.wait(min(LONGEST_SAVE, HANG_SECONDS + self.save_link.seconds(0)))
                    self.add_to_l2(pages, host_blocks)
                    self.counts["pages_written"] += fits
                except links.TransferError:
                    copy.cancel()
                    self.hold("save", [copy], (self.host, host_blocks))  # a late copy still writes to them
                self.host.release(host_blocks)
        # Only now: host memory may have evicted pages since, and these must not count as after a gap
        for node in self.tree.change(block_of):
            node.device = False
        self.count_lost(block_of)

    def on_evict_l2(self, leaving: list):
        """Called before host blocks lose their contents: start to write pages that storage must still get.

        Copies of the pages are written. Nothing is written if the writer hangs, or if more pages are being
        written already than both pools together have.

        leaving: (host block, page) pairs."""
        host_block_of = {page: host_block for host_block, page in leaving}
        full = len(self.writing) > self.pool.size + self.host.size  # limit the memory that copies take
        if self.storage and not (full or self.storage.writer.hangs):
            self.write_l3(host_block_of, leaving=True)
        for node in self.tree.change(host_block_of):
            node.host_blocks = []
        self.unwritten = {page: page for page in self.unwritten if page not in host_block_of}
        self.count_lost(host_block_of if self.storage else ())

    def count_lost(self, pages):
        """Count those of `pages` that are lost.

        A page is lost if the write policy wanted it in a lower tier, and it is now in no tier and not on its
        way to storage. If there is storage, its write is dropped."""
        lost = [page for node in self.tree.change(pages) if not node.is_local for page in self.to_write(node)]
        self.counts.update(pages_lost=len(lost), writes_dropped=len(lost) if self.storage else 0)
        for node in self.tree.change(lost):
            node.wanted = False  # count each page once

    # Prefetching: from storage to host memory while the request is queued

    def submitted(self, request):
        """Called when a request is queued: ask storage which of the request's pages storage holds.

        Asking also marks these pages as recently used in storage. `poll` reads the pages that neither pool
        has. While storage is silent (it hangs or fails), only test whether it answers again, at most once per
        RETRY_SECONDS."""
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
        """Return how many pages at the start of the chain are on the device or in host memory."""
        return sum(part.stop for _, part in takewhile(lambda span: span[0].is_local, self.tree.spans(chain)))

    def measure_storage(self):
        """Start to measure the read speed of storage, and to test whether it answers."""
        self.measured_at, size = time.perf_counter(), self.pages_at_once * self.host.block_bytes
        self.hold("measure", [self.storage.exists([bytes(32)]), backends.measure(self.storage, size)])

    def ask_l3(self, prefetch: Prefetch):
        """Ask storage which pages of the chain it holds; `on_answer` takes the answer."""
        answer = self.storage.exists([page.digest for page in prefetch.chain])
        self.hold("ask", [answer], then=partial(self.on_answer, prefetch, answer))

    def on_answer(self, prefetch: Prefetch, answer, arrived: bool):
        """Called when storage has answered which pages it holds: record them in the tree.

        Cut the prefetch's chain after the last page to read. If fewer than `threshold` tokens would be read,
        cut it after its first pages that the device or host memory holds.

        `doubt` each page that the tree records as stored or wanted, if storage lacks it or if it follows the
        first missing page. Count the doubted pages that neither pool holds as lost."""
        chain, local, has = prefetch.chain, self.num_local(prefetch.chain), answer.value if arrived else []
        count = len(list(takewhile(bool, has[local:])))  # pages to read, up to the first gap
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
        """Mark these pages as not stored. Except under write_back, queue those in host memory for writing."""
        for node in self.tree.change(pages):
            node.stored = False
        self.send_l3(pages)

    def read_l3(self, prefetch: Prefetch, kept: set, held: bool = False):
        """Start to read the missing pages, as far as host memory has room.

        Reads under way hold at most half of host memory. If some pages do not fit, the prefetch waits for
        room while copies or reads are under way, or while `held`. It does not wait for writes, because they
        may hang. Otherwise it ends after its reads.

        `kept`: pages that must not be evicted. `held`: True if some of these were read for earlier requests
        in the queue."""
        to_read = self.to_read(prefetch)
        if fits := max(0, min(len(to_read), self.host.size // 2 - len(self.reading))):
            fits = self.host.make_room(fits, kept.union(prefetch.chain))
        for at in range(0, fits, self.pages_at_once):
            run = to_read[at:fits][: self.pages_at_once]
            host_blocks = self.host.allocate(len(run))
            keys, into = [page.digest for page in run], [self.array[host_block] for host_block in host_blocks]
            read = self.storage.get(keys, into, f"page {prefetch.chain.index(run[0])}")
            prefetch.reads.append(read)
            self.reading.update(run)
            then = partial(self.on_read, prefetch, run, host_blocks, read)
            self.hold("read", [read], given=[(self.host, host_blocks)], then=then)
        waits = len(to_read) > fits and (held or any(map(self.in_flight.get, ("save", "load", "read"))))
        prefetch.ended = self.reading.isdisjoint(prefetch.chain) and not waits

    def to_read(self, prefetch: Prefetch) -> list:
        """Return the pages to read, in reading order.

        Storage holds them, both pools lack them, and no read of them is under way. The list ends before the
        first page that no tier holds."""
        to_read = []
        for node, part in self.tree.spans(prefetch.chain)[:: self.direction]:
            if not (node.is_local or node.stored):
                break
            to_read += [] if node.is_local else node.pages[part][:: self.direction]
        return [page for page in to_read if page not in self.reading]

    def on_read(self, prefetch: Prefetch, pages: list, host_blocks: list[int], read, arrived: bool):
        """Called when a read has completed: register its pages in host memory.

        If it has failed, end the prefetch, and ask storage again which pages it holds."""
        self.reading.difference_update(pages)
        if arrived:
            self.add_to_l2(pages, host_blocks)
            prefetch.pages_read.update(pages)
            prefetch.request.timeline.add("storage", read.label, *read.span())
            self.counts["storage_pages_read"] += len(pages)
        else:
            self.end_prefetch(prefetch)
            if not read.cancelled:
                self.ask_l3(replace(prefetch))  # its earlier answer about this chain may be wrong

    def waits(self, request):
        """Return True to keep the request queued while its pages are prefetched.

        The request waits while storage may deliver missing pages and the policy's time is not over. Under
        best_effort it waits only while the tokens of running requests fill the next step. Once storage has
        answered, it waits only if the engine decides that loading pays. When it no longer waits for storage,
        the prefetch ends. A copy of `load_ahead` that is in flight must still complete before the request is
        admitted with the pages that have arrived."""
        prefetch, silent = request.memo, self.storage and self.storage.silent
        if not prefetch:
            return False
        is_missing = request.computed < len(prefetch.chain) * self.pool.block_size
        in_time = time.perf_counter() < prefetch.until
        if not prefetch.until:  # best_effort
            in_time = sum(one.pending for one in self.engine.running) >= self.engine.token_budget
        waits = is_missing and not (prefetch.ended or silent) and in_time
        if waits and prefetch.answered and not prefetch.pays:
            most = self.estimates.load_or_compute(request, self.offer(request), self.agree)
            prefetch.pays = waits = most > 0
            prefetch.until = min(prefetch.until, time.perf_counter() + most)
        if not waits:
            self.end_prefetch(prefetch)
        return waits or prefetch.load is not None  # admit it after this copy

    def offer(self, request) -> Match:
        """Return a Match of all tokens from `request.computed` to the end of the prefetch's chain.

        Some of their pages may be in host memory already; storage holds the others. Reading and loading
        overlap. The estimate is the longer of the two times, plus the shorter time's share for the pages of
        one read."""
        prefetch, block = request.memo, self.host.block_bytes
        tokens = len(prefetch.chain) * self.pool.block_size - request.computed
        pages = self.pool.num_blocks(tokens)
        read = self.storage.seconds(len(self.to_read(prefetch)) * block)
        load, last = self.load_link.seconds(pages * block), min(1, self.pages_at_once / pages)
        return Match(tokens, max(read, load) + last * min(read, load), prefetch, {"storage": tokens})

    def end_prefetch(self, prefetch: Prefetch):
        """End a prefetch: start no more reads, and cancel the reads that have not begun."""
        prefetch.ended = True
        for read in prefetch.reads:
            read.cancel()

    # Restoring: from host memory to the device

    def load_ahead(self, prefetch: Prefetch):
        """Start to copy the chain's next pages to the device, while storage reads later pages.

        One copy moves all layers of the pages from host memory. Admission finds them on the device. `match`
        offers the pages that have not been copied by then."""
        chain, pool, on_device = prefetch.chain, self.pool, self.pool.find(prefetch.chain)
        room = max(0, pool.available - len(self.engine.running))  # leave each running request one more block
        first, found = len(on_device), self.host.find(chain[len(on_device) :])[:room]
        needed = set().union(*(one.memo.chain for one in self.engine.waiting if one.memo))
        self.host.share(found)  # under write_back, making room on the device evicts pages from host memory
        if fits := pool.make_room(len(found), needed):
            pages, host_blocks = chain[first : first + fits], found[:fits]
            blocks = pool.allocate(fits, on_device[-1] if on_device else None, len(chain) - first)
            device, host = pool.memory.movedim(2, 0), self.host.memory.movedim(1, 0)  # [blocks, L, 2, ...]
            copy = self.load_link.copy(device, host, f"page {first}", links.BlockPairs(blocks, host_blocks))
            prefetch.load, then = copy, partial(self.loaded_ahead, prefetch, pages, blocks, copy)
            self.hold("load", [copy], (self.host, host_blocks), given=[(pool, blocks)], then=then)
        self.host.release(found)

    def loaded_ahead(self, prefetch: Prefetch, pages: list, blocks: list[int], copy, arrived: bool):
        """Called when a copy of `load_ahead` has completed: register its pages, unless it has failed."""
        prefetch.load = None
        for block, page in zip(blocks, pages := pages if arrived else []):
            self.pool.register(block, page)
        self.pool.use(prefetch.chain)
        for node in self.tree.change(pages):
            node.device = True
        prefetch.loaded.update(pages)
        prefetch.request.timeline.add("load", copy.label, *copy.span())
        self.counts.update(swap_ins=len(pages), bytes_in=copy.bytes)

    def credit(self, request, prefetch: Prefetch):
        """In `request.found`, move the tokens of pages that were loaded ahead from "gpu" to the tier from
        which the pages came, "cpu" or "storage".

        Admission has found these pages on the device, and has counted them there."""
        size, found = self.pool.block_size, Counter(request.found)
        ahead = prefetch.loaded.intersection(request.chain[: found["gpu"] // size])
        read = len(ahead & prefetch.pages_read)
        came = Counter(cpu=size * (len(ahead) - read), storage=size * read)
        request.found = dict(found - Counter(gpu=size * len(ahead)) + came)
        self.counts["restored_tokens"] += size * len(ahead)
        prefetch.loaded.clear()

    def match(self, request):
        """Return a Match of the request's next pages, as far as host memory holds them, or None."""
        size, first, prefetch = self.pool.block_size, request.computed // self.pool.block_size, request.memo
        missing = request.chain[first : request.history // size]
        if prefetch and prefetch.loaded and not request.readmitted:
            self.credit(request, prefetch)
        there = takewhile(lambda span: span[0].host_blocks, self.tree.spans(missing))
        if host_blocks := [host_block for node, part in there for host_block in node.host_blocks[part]]:
            tokens = (first + len(host_blocks)) * size - request.computed
            read = prefetch.pages_read if prefetch else set()
            read = size * len(read.intersection(missing[: len(host_blocks)]))
            found = dict(cpu=tokens - read, storage=min(tokens, read))
            seconds = self.load_link.seconds(len(host_blocks) * self.host.block_bytes, len(self.model.layers))
            return Match(tokens, seconds, host_blocks, {tier: n for tier, n in found.items() if n > 0})

    # In every step, and at the end

    def poll(self):
        """Called in each step: handle completed transfers, and continue prefetches and writes."""
        super().poll()
        self.save_pending()
        for request in islice(self.engine.waiting, RETRY_REQUESTS):  # another engine may have stored pages
            asked = request.memo
            over = asked and asked.ended and asked.answered and not asked.load
            late = not asked or over and time.perf_counter() > asked.asked_at + RETRY_SECONDS
            if late and not request.must_compute:
                self.submitted(request)
        kept, held = self.kept_for(None), False
        for prefetch in [request.memo for request in self.engine.waiting if request.memo]:
            if prefetch.answered and not prefetch.ended:
                self.read_l3(prefetch, kept, held)
                if prefetch.pays and not (prefetch.ended or prefetch.load):
                    self.load_ahead(prefetch)
            held |= bool(prefetch.pages_read)  # host memory keeps them until the request is admitted
        self.send_l3()

    def finished(self, request):
        """Called when a request ends or is preempted: record its last pages, and end its prefetch."""
        self.record_pages(request)
        self.recorded.pop(request, None)
        self.save_pending()  # its own pages may now make room in host memory for its later ones
        if self.storage:  # mark the chain as used, its head last, so that its tail is deleted first
            self.storage.use([page.digest for page in request.chain])
        if request.memo:
            self.end_prefetch(request.memo)
        request.memo = None

    def close(self):
        """Wait until transfers have completed, for at most 5 s per pool. Then drop the writes that are left,
        and count them.

        Under write_back, first evict all pages, so that dirty pages are written to storage."""
        self.poll()
        for pool in self.pool, self.host:
            if self.write_policy == "write_back" and self.storage:
                pool.evict(pool.cached)
            self.drain()
        left = (node.pages for node in self.tree.nodes() if self.storage and node.wanted and not node.stored)
        self.counts["writes_dropped"] += sum(map(len, left))
        self.close_each(super(), self.storage)


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Compare numbers of tiers, then prefetch policies.

    The first part asks more conversations than L1 and L2 hold, all with the same system prompt. It asks them
    of engines with one, two and three tiers, and of an engine whose L3 another engine has filled. The second
    part times each prefetch policy where reading from L3 takes as long as computing."""
    rng, most, new = random.Random(0), lesson.context(model, frontend), max(4, min(arguments.max_tokens, 12))
    size, device, host = arguments.block_size, arguments.gpu_blocks, arguments.cpu_blocks
    context = min([most, *(size * blocks for blocks in (device, host) if blocks)])
    system = dict(role="system", content=lesson.document(frontend, rng, context // 16))
    talks = [[system, *lesson.conversation(frontend, rng, context // 4)] for _ in range(TALKS)]
    pages = -(-(max(len(frontend.encode(None, talk)) for talk in talks) + 3 * new + 32) // size)
    device, host = device or 2 * pages, host or 10 * pages // 3
    lesson.check_room(dict(device=device, host=host), pages, size)
    fixed, engines = dict(gpu_blocks=device, hicache_ratio=0, hicache_size=0), {}
    options = argparse.Namespace(**vars(arguments) | fixed)
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.storage or f"file:{folder}"
        ways = {"L1": (1, None), "L1, L2": (host, None), "L1, L2, L3": (host, url)}
        ways["L1, L2, L3 of another engine"] = host, url
        for name, (options.cpu_blocks, options.storage) in ways.items():
            engine = engines[name] = make_engine(model, options)
        # 1. Ask each conversation twice, in random order
        taken = {name: converse(engine, frontend, talks, new) for name, engine in engines.items()}
        # 2. Time a long history that only storage holds, under each policy
        text = lesson.document_for(engine, frontend, rng, min(most, 2048) // 2, [lesson.SECRET], 2)
        prompt = frontend.request(messages=[dict(role="user", content=text)]).tokens
        slow_storage(engine, prompt, lesson.ask(engine, prompt).ttft_ms / 1e3)
        asked = lesson.in_turn({policy: partial(ask_under, policy, engine, prompt) for policy in PREFETCH})
        for engine in engines.values():
            engine.close()
    answers = sum(taken.values(), [requests[-1] for requests in asked.values()])
    verified = lesson.verify(paged.baseline.Engine(model), answers)

    print(f"{TALKS} conversations of up to {pages} pages, asked twice; L1 has {device} pages, L2 {host}")
    link, rows = lesson.describe_link(engine.lower_tier.cache.load_link), show(taken, asked)
    report = dict(link=link, rows=rows, verified=verified, counters=charts.counters(engine))
    return report, [asked["wait_complete"][-1].timeline]


def converse(engine, frontend: Frontend, talks: list, new: int) -> list[Request]:
    """Ask all conversations in random order, then each again with one more question.

    Returns: the requests, in the order in which they were asked."""
    rng, talks, asked = random.Random(1), [list(talk) for talk in talks], []
    for question in None, lesson.TURNS[2]:
        for talk in rng.sample(talks, len(talks)):
            asked.append(lesson.say(engine, frontend, talk, question or talk.pop()["content"], new))
    return asked


def slow_storage(engine, prompt: list[int], seconds: float):
    """Make storage so slow that it reads the prompt's pages in `seconds`, and switch the guard off."""
    cache, engine.lower_tier.estimates.always = engine.lower_tier.cache, True
    size = len(prompt) / engine.pool.block_size * cache.host.block_bytes
    cache.storage.bandwidth, cache.timeout = modelled_link.Bandwidth(size / seconds), (seconds / 3, 0.0)
    cache.measure_storage()


def ask_under(policy: str, engine, prompt: list[int]) -> Request:
    """Ask under a prefetch policy, when only storage has the prompt's pages."""
    lesson.wait_until_idle(engine, evict="host")
    engine.lower_tier.cache.prefetch_policy = policy
    return lesson.ask(engine, prompt, 2, evict="device")


def show(taken: dict[str, list[Request]], asked: dict[str, list[Request]]) -> list[dict]:
    """Print the TTFT of all engines, and the share of the prompts' tokens that each tier held. Then print the
    TTFT under each policy, and a timeline.

    `taken`: engine -> its requests. `asked`: policy -> its requests. Returns: rows for --json."""
    times = {name: [one.ttft_ms for one in requests[TALKS:]] for name, requests in taken.items()}
    rows = lesson.table("TTFT, the second time", times, "ttft_ms", "ms")
    print(f"\n{'the second time':30}{'L1':>6}{'L2':>6}{'L3':>6}  computed")
    for row, requests in zip(rows, taken.values()):
        row |= (found := shares(requests[TALKS:]))
        row["first_time_from_storage"] = shares(requests[:TALKS])["storage"]
        print(f"  {row['case']:28}" + "".join(f"{share:6.0%}" for share in found.values()))
    last = asked["wait_complete"][-1]
    title = f"TTFT, {last.prompt_tokens} tokens, storage as fast as computing, the guard off"
    times = {policy: [one.ttft_ms for one in requests] for policy, requests in asked.items()}
    rows += lesson.table(title, times, "ttft_ms", "ms")
    print("  Waiting takes as long as computing here. Doing both at once takes less: examples/both_ends.py\n")
    print("Timeline of wait_complete (p: prefill, or pages read; digits: layers loaded; s: pages saved)")
    print(f"{charts.chart(last.timeline)}\n\nAnd if not even the weights fit on the device? Chapter 08.")
    return rows


def shares(requests: list[Request]) -> dict[str, float]:
    """Return the shares (0 to 1) of the prompts' tokens that each tier held and that were computed."""
    tiers, prompts = ("gpu", "cpu", "storage"), sum(request.prompt_tokens for request in requests)
    found = {tier: sum(request.found.get(tier, 0) for request in requests) / prompts for tier in tiers}
    return {**found, "computed": 1 - sum(found.values())}


# 4. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    paged.add_arguments(parser)
    size = hardware.add_options(parser).add_argument  # of --cpu-blocks and these two, only one may be given
    size("--hicache-ratio", type=cli.bounded(float, 1, 1e6), default=0, metavar="R", help="host: R times L1")
    size("--hicache-size", type=cli.bounded(float, 1e-3, 1e6), default=0, metavar="GB", help="size of host")
    add, number, whole = parser.add_argument, cli.bounded(float, 0, 1e6), cli.bounded(int, 0, 1 << 26)
    add("--layout", choices=LAYOUTS, default="page_first_direct", help="of host memory (page_first_direct)")
    add("--write-policy", choices=WRITE, default="write_through", help="when pages are saved (write_through)")
    add("--hicache-io-backend", choices=("direct", "kernel"), help="what copies on a GPU (link's rule)")
    add("--storage", metavar="URL", help="shared tier: file:DIR, redis://HOST:PORT/N, or module:Class")
    add("--storage-config", type=backends.configuration, metavar="JSON or @FILE", help="settings of storage")
    add("--storage-bandwidth", type=modelled_link.speed, metavar="GB/S[:GB/S...@SECONDS]", help="modelled")
    moved = cli.moved("both_ends", "python -m examples.both_ends")
    add("--prefetch", choices=PREFETCH, default="timeout", type=moved, help="waits for storage (timeout)")
    add("--prefetch-threshold", type=whole, default=256, metavar="TOKENS", help="fewest to read (256)")
    add("--prefetch-timeout", type=number, default=1.0, metavar="S", help="of each prefetch (1)")
    add("--prefetch-timeout-per-1k", type=number, default=0.25, metavar="S", help="per 1,024 tokens (0.25)")


def make_engine(model, arguments, kind=TieredCache) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache, or another `kind` of it. Raises BadRequest."""
    size, url = arguments.block_size, arguments.storage or None
    # 1. The size of host memory: one of three options, or a default
    page_bytes = size * model.config.kv_numbers_per_token * model.dtype.itemsize
    useful = arguments.max_running * -(-model.config.max_position_embeddings // size)
    device = cli.blocks_that_fit(arguments.gpu_blocks, useful, page_bytes, model.device, "--gpu-blocks")
    if asked := arguments.hicache_ratio * device or 1e9 * arguments.hicache_size / page_bytes:
        arguments.cpu_blocks = int(asked)
    pages = hardware.host_blocks(model, arguments, page_bytes)
    # 2. Storage, and the engine
    config, (threshold, *timeout) = backends.settings(arguments.storage_config, arguments)
    storage = url and backends.open_storage(url, config, arguments.storage_bandwidth)
    if arguments.hicache_io_backend and model.device.type != "cuda":
        raise BadRequest("--hicache-io-backend says what copies on a GPU, and here is none: leave it out.")
    policies = arguments.prefetch, arguments.write_policy, arguments.layout, threshold, tuple(timeout)
    link = hardware.bandwidth(model, arguments.link)
    cache = kind(pages, link, storage, *policies, arguments.hicache_io_backend)
    engine = paged.make_engine(model, arguments, restorer(model, cache, arguments.always_restore))
    words = f"{pages} pages of {size} tokens, {pages * page_bytes / 1e6:.1f} MB, over a {cache.load_link}"
    print(f"Host: {words}; storage: {storage or 'none'}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo)
