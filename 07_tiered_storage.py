"""Chapter 07: three tiers under one radix tree (HiCache).

The problem. Host memory is larger than the device's, but it is one machine's, and it is lost with the process. A service runs
many engines, and what one of them has read the others read again.

The mechanism. Pages of K and V live in three tiers: on the device (L1), in host memory (L2), and in storage that many engines
share (L3): files, Redis, an object store, whatever can get, look for and set bytes under a key. One radix tree says what lies
where. A node is a run of whole pages behind its parent's, and knows their exact places in L1 and L2; L3 is asked. A request goes
down the tree along its tokens: what it passes is on the device first, and then in host memory, from where it is loaded layer by
layer while the layers before are computed (chapter 03). What the tree does not have, storage is asked for, beside the
computation, and what comes is sent on to the device while the rest is read. How long a request waits for that is a policy: not at
all, to the end, or up to a time that grows with its length; and never longer than computing the rest would take. The other way, a
policy says when pages go down: at once, when they are found for the second time, or when they have to leave.

New against chapter 03: HiRadixTree instead of block keys, three layouts of the host pool, Storage and its threads, the prefetch
and write policies, and storage that is attached and detached while the engine runs. `save` inserts into the tree, `free` too;
`restore` brings what the tree has, and waits for storage as long as the policy says.

Source: HiCache, the hierarchical KV cache of SGLang (design document); its radix tree is RadixAttention's (Zheng et al., 2024).

    python 07_tiered_storage.py --demo
    python 07_tiered_storage.py --storage file:pages               # the server, on http://127.0.0.1:5000
    python 07_tiered_storage.py --storage redis://127.0.0.1:6379/0 --write-policy write_back
"""
import hashlib
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

from common import checkpoint
from legacy import app, backends, baseline, bidirectional, figure, live, offload, paged
from legacy import link as links
from legacy.app import BadRequest
from legacy.link import as_integers
from legacy.timeline import Timeline
from tools import classroom_text

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
HOT = 2                            # hits from which write_through_selective writes
EPOCHS = itertools.count(1)
RECHECK = 10.0                     # seconds after which storage is asked again whether it still has what it had
NEARLY_IDLE = 3e-3                 # seconds of transfers left in the link's queue: send the next pages
PATIENCE = 5.0                     # seconds without a page after which nobody waits for storage any more
SHOWN = 4096                       # pages of storage that the page of the server shows

# 1. The tree and the two pools -----------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Node:
    """A run of whole pages, behind all those of its parents. It is on the device, in host memory, or both: where it is on the
    device, its parents are too. Its locks are the references that its pages have in the two pools, equally many along a node:
    on the device of all who need it or what is behind it, in host memory of what is under way from or to it. A page of the device
    and a place in host memory are ints, numbers in their pools."""
    parent: "Node | None"          # None: the root of a cache_salt, or a node that was removed
    tokens: bytes                  # token ids, little-endian int32; so a comparison is one of memory
    device: list[int] | None = None                             # its pages in L1
    host: list[int] | None = None                               # in L2
    keys: list[bytes] | None = None                             # of its pages, once somebody asked (HiRadixTree.keys)
    children: dict[bytes, "Node"] = field(default_factory=dict)                 # by the tokens of their first pages
    hits: int = 0                  # requests that found it
    stored: int = 0                # the epoch of storage (Storage.epoch) in which it was seen to have it
    checked: float = 0.0           # when that was seen, seconds of time.perf_counter()
    leaving: "Swap | None" = None                               # that copies it to host memory
    writing: "Write | None" = None                              # that writes it to storage
    tried: bool = False            # it was to be copied before its eviction, and that need not be tried again


class HiRadixTree:
    """What is cached, as a tree over tokens in pages; in which tier a node lies, and what is to be evicted next."""

    def __init__(self, pool: "DevicePages", host: "HostPages", namespace: str):
        self.pool, self.host, self.id_bytes = pool, host, 4 * pool.block_size           # id_bytes: of a page's token ids
        self.namespace = hashlib.sha256(namespace.encode()).digest()            # what the numbers depend on besides tokens
        self.roots: dict[bytes, Node] = {}                                      # by their keys
        self.size = self.lost = 0                                               # nodes; pages that went, and storage never had
        for tier in (pool, host):
            tier.tree = weakref.proxy(self)

    def root(self, cache_salt: str) -> Node:
        """The root for requests with this cache_salt; they share nothing with others. Not in `roots` before it has a child."""
        key = hashlib.sha256(self.namespace + cache_salt.encode()).digest()
        return self.roots.get(key) or Node(None, b"", keys=[key])

    def match(self, cache_salt: str, tokens: bytes) -> list[Node]:
        """-> the nodes, from the top, that hold the longest cached prefix of `tokens` in whole pages: on the device first, then
        in host memory. Where it ends inside of a node, the node is split. Copies nothing."""
        node, at, path = self.root(cache_salt), 0, []
        while (child := node.children.get(tokens[at:at + self.id_bytes])):
            common = self.common(child, tokens, at)
            node = child if common == len(child.tokens) else self.split(child, common)
            path.append(node)
            at += common
            if node is not child:
                break
        return path

    def common(self, node: Node, tokens: bytes, at: int) -> int:
        """How many bytes of whole pages the node has in common with tokens[at:]; one page at least."""
        if tokens[at:at + len(node.tokens)] == node.tokens:
            return len(node.tokens)
        common, page = self.id_bytes, self.id_bytes
        while node.tokens[common:common + page] == tokens[at + common:at + common + page]:
            common += page
        return common

    def split(self, node: Node, at: int) -> Node:
        """-> a new parent of the node, which takes its first `at` bytes, and shares with it what is under way."""
        count = at // self.id_bytes
        front = Node(node.parent, node.tokens[:at], children={node.tokens[at:at + self.id_bytes]: node})
        for name in ("hits", "stored", "checked", "leaving", "writing", "tried"):
            setattr(front, name, getattr(node, name))
        node.parent.children[node.tokens[:self.id_bytes]] = front
        self.size += 1
        node.parent, node.tokens = front, node.tokens[at:]
        for name in ("device", "host", "keys"):
            if (pages := getattr(node, name)) is not None:
                setattr(front, name, pages[:count])
                setattr(node, name, pages[count:])
        for tier, places in ((self.pool, front.device), (self.host, front.host)):
            for place in places or ():
                tier.register(place, front)
        for job in (node.leaving, node.writing):
            if job:
                job.nodes.insert(job.nodes.index(node), front)
        return front

    def pages(self, node: Node) -> int:
        return len(node.tokens) // self.id_bytes

    def path(self, node: Node) -> list[Node]:
        """-> the nodes from the top to this one."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def keys(self, node: Node) -> list[bytes]:
        """The keys of the node's pages in storage: chapter 02's chain of SHA-256, computed when they are first asked for."""
        unknown, above = [], node
        while above.keys is None:
            unknown.append(above)
            above = above.parent
        for below in reversed(unknown):
            below.keys = self.chain(above.keys[-1], below.tokens)
            above = below
        return node.keys

    def chain(self, key: bytes, tokens: bytes) -> list[bytes]:
        """The keys of the pages of `tokens`, behind a page with this key: SHA-256 over the parent's key and the token ids."""
        keys = []
        for at in range(0, len(tokens), self.id_bytes):
            key = hashlib.sha256(key + tokens[at:at + self.id_bytes]).digest()
            keys.append(key)
        return keys

    def insert(self, cache_salt: str, tokens: bytes, pages: list[int]) -> tuple[list[int], list[Node]]:
        """What these device pages hold is to be found from now on -> the pages that hold it (others', where there are any), and
        the new nodes."""
        node = self.root(cache_salt)
        at, found, new = 0, [], []
        while at < len(tokens):
            child, own = node.children.get(tokens[at:at + self.id_bytes]), pages[len(found):]
            if child is None:
                child = self.add(node, tokens[at:])
                new.append(child)
            elif (common := self.common(child, tokens, at)) < len(child.tokens):
                child = self.split(child, common)
            if child.device is None:                                            # new, or in host memory only
                child.device, child.tried = own[:self.pages(child)], False
                for page in child.device:
                    self.pool.register(page, child)
            found += child.device
            node, at = child, at + len(child.tokens)
        return found, new

    def insert_host(self, cache_salt: str, tokens: bytes, start: int, places: list[int]) -> list[Node]:
        """Pages `start` and following of `tokens` are in these places of host memory -> the nodes that lie there now: none of
        them if what is before has gone, and not those that are there already or on their way."""
        node = self.root(cache_salt)
        at, taken = 0, []
        while at < len(tokens):
            child, number = node.children.get(tokens[at:at + self.id_bytes]), at // self.id_bytes
            if child is None:
                if number < start:
                    break
                child = self.add(node, tokens[at:])
            else:
                common, before = self.common(child, tokens, at), start * self.id_bytes - at
                common = min(common, before) if before > 0 else common
                if common < len(child.tokens):
                    child = self.split(child, common)
            if number >= start and child.host is None and not child.leaving:
                child.host = places[number - start:][:self.pages(child)]
                for place in child.host:
                    self.host.register(place, child)
                taken.append(child)
            node, at = child, at + len(child.tokens)
        return taken

    def add(self, parent: Node, tokens: bytes) -> Node:
        if parent.parent is None:
            self.roots[parent.keys[0]] = parent
        node = parent.children[tokens[:self.id_bytes]] = Node(parent, tokens)
        self.size += 1
        return node

    def touch(self, path: list[Node]):
        """What these nodes stand for is the most recently used, its beginning most of all."""
        for node in reversed(path):
            self.pool.touch(node.device)
            self.host.touch(node.host)

    def evict(self, node: Node, tier: "PagePool"):
        """The node leaves this tier; if it was its last, the tree, with all that lies behind it in host memory: nobody could find
        that any more."""
        on_device = tier is self.pool
        for place in (node.device if on_device else node.host):
            tier.forget(place)
        if on_device:
            node.device = None
        else:
            node.host, node.tried = None, False
        if node.device is None and node.host is None:
            self.remove(node)

    def remove(self, node: Node):
        """The node and all below it leave the tree, and with it all tiers that this engine knows."""
        parent = node.parent
        del parent.children[node.tokens[:self.id_bytes]]
        below = [node]
        while below:
            node = below.pop()
            below += node.children.values()
            for tier, places in ((self.pool, node.device), (self.host, node.host)):
                for place in places or ():
                    tier.forget(place)
            self.lost += 0 if node.stored else self.pages(node)
            node.parent, node.device, node.host, node.children = None, None, None, {}
            self.size -= 1
        if parent.parent is None and not parent.children:
            del self.roots[parent.keys[0]]

    def nodes(self):
        """All of them, parents before children; without the roots."""
        below = [child for root in self.roots.values() for child in root.children.values()]
        while below:
            node = below.pop()
            yield node
            below += node.children.values()

    def check_integrity(self):
        """The tree agrees with itself and with both pools. Raises AssertionError."""
        places = {self.pool: {}, self.host: {}}
        assert self.size == sum(1 for _ in self.nodes()) and all(root.children for root in self.roots.values())
        for node in self.nodes():
            count = self.pages(node)
            assert count and count * self.id_bytes == len(node.tokens), "a node is not made of whole pages"
            assert node.parent.children[node.tokens[:self.id_bytes]] is node, "a node is not its parent's child"
            assert node.device is not None or node.host is not None, "a node lies nowhere"
            assert node.device is None or node.parent.device is not None or not node.parent.tokens, "a gap on the device"
            assert node.keys is None or node.keys == self.chain(self.keys(node.parent)[-1], node.tokens), "wrong keys"
            for tier, lie in ((self.pool, node.device), (self.host, node.host)):
                assert lie is None or len(lie) == count, "a node has not as many places as pages"
                assert len({tier.references[place] for place in lie or ()}) <= 1, "a node is locked in part"
                above = node.parent.device if tier is self.pool and node.parent.device else ()
                assert not lie or all(tier.references[place] >= tier.references[lie[0]] for place in above), (
                    "a page is locked, and one before it is not")
                places[tier].update((place, node) for place in lie or ())
        for tier, owned in places.items():
            assert owned == {place: node for place, node in enumerate(tier.prefixes) if node}, "the tree and a pool differ"


class PagePool(paged.BlockPool):
    """One tier. Chapter 02's pool, but it is the tree that finds what a page holds: `prefixes[page]` is the page's node, and what
    is evicted is the least recently used leaf, all of it."""
    tree: HiRadixTree = None

    def register(self, page: int, node: Node):
        self.prefixes[page] = node

    def forget(self, page: int):
        self.prefixes[page] = None
        if page in self.cached:
            del self.cached[page]
            self.free[page] = None

    def touch(self, pages: list[int] | None):
        for page in reversed(pages or ()):
            if page in self.cached:
                self.cached.move_to_end(page)

    def leaves(self):
        """The nodes that nobody needs, and without others behind them in this tier: those behind the least recently used first.
        Nothing must be evicted while this goes on."""
        seen = set()
        for page in self.cached:
            node = self.prefixes[page]
            while below := next(filter(self.places, node.children.values()), None):
                node = below
            if node not in seen and not self.references[self.places(node)[0]]:
                seen.add(node)
                yield node

    def evict(self):
        self.evict_node(next(self.leaves()))

    def evict_node(self, node: Node):
        self.counts["evictions"] += self.tree.pages(node)
        self.tree.evict(node, self)

    def check_index(self):
        assert not self.blocks                                                  # the tree's check_integrity sees to the rest


class DevicePages(PagePool):
    """L1, layer-first as in chapter 02."""

    def places(self, node: Node) -> list[int] | None:
        return node.device


class HostPages(PagePool):
    """L2, pinned where there is a GPU. `kv` is [pages, L, 2, page_size, KVH, hd] whatever the layout:

    layer_first          memory [L, 2, pages, page_size, KVH, hd]: adjacent pages come to a layer in one piece each of K and V;
                         for storage a page is gathered from 2 L pieces
    page_first           memory [pages, page_size, L, 2, KVH, hd]: a page is one piece, which storage reads and writes in place;
                         to a layer it goes token by token
    page_first_direct    memory [pages, L, 2, page_size, KVH, hd]: one piece for storage, and all tokens of a layer are together

    In storage a page is preceded by a header, with the token ids and a checksum; in the page-first layouts there is room for it
    in front of each page."""
    MAGIC = b"KV page1"

    def __init__(self, config, pages: int, page_size: int, dtype, device, layout: str):
        self.layout = layout
        self.header_bytes = -(-(len(self.MAGIC) + 4 + 4 * page_size) // 64) * 64
        super().__init__(config, pages, page_size, dtype, device)
        self.page_bytes = self.header_bytes + page_size * config.kv_numbers_per_token * dtype.itemsize          # in storage

    def places(self, node: Node) -> list[int] | None:
        return node.host

    def memory(self, config, pages: int, page_size: int, dtype, device):
        layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        if self.layout == "layer_first":
            memory = offload.pinned((layers, 2, pages, page_size, heads, head_dim), dtype, device, "The host pool")
            return memory.permute(2, 0, 1, 3, 4, 5)                             # [pages, L, 2, page_size, KVH, hd]
        header = self.header_bytes // dtype.itemsize
        self.rows = offload.pinned((pages, header + page_size * config.kv_numbers_per_token), dtype, device, "The host pool")
        if self.layout == "page_first":
            kv = self.rows[:, header:].unflatten(1, (page_size, layers, 2, heads, head_dim))
            return kv.permute(0, 2, 3, 1, 4, 5)                                 # [pages, L, 2, page_size, KVH, hd]
        return self.rows[:, header:].unflatten(1, (layers, 2, page_size, heads, head_dim))

    def buffer(self, place: int) -> memoryview | None:
        """Where a page may be read to as storage keeps it; None for layer_first."""
        return None if self.layout == "layer_first" else memoryview(self.rows[place].view(torch.uint8).numpy())

    def value(self, place: int, tokens: bytes) -> memoryview:
        """A page as storage keeps it: its memory, with the header filled in; for layer_first gathered first."""
        value = self.buffer(place)
        if value is None:
            gathered = numpy.empty(self.page_bytes, numpy.uint8)
            self.gathered(gathered)[...] = as_integers(self.kv[place])
            value = memoryview(gathered)
        header = self.MAGIC + zlib.crc32(value[self.header_bytes:], zlib.crc32(tokens)).to_bytes(4, "little") + tokens
        value[:self.header_bytes] = header.ljust(self.header_bytes, b"\0")
        return value

    def fill(self, place: int, tokens: bytes, value, read_there: bool = False) -> bool:
        """-> whether a value from storage is the page that it must be; then it lies in its place. `read_there`: it was read right
        there; then what lies there must not be used if it is wrong."""
        value, known = memoryview(value).cast("B"), len(self.MAGIC) + 4
        if len(value) != self.page_bytes or value[:len(self.MAGIC)] != self.MAGIC or value[known:known + len(tokens)] != tokens:
            return False
        checksum = zlib.crc32(value[self.header_bytes:], zlib.crc32(tokens))
        if value[len(self.MAGIC):known] != checksum.to_bytes(4, "little"):
            return False
        if self.layout == "layer_first":
            numpy.copyto(as_integers(self.kv[place]), self.gathered(numpy.frombuffer(value, numpy.uint8)))
        elif not read_there:
            self.buffer(place)[:] = value
        return True

    def gathered(self, value: numpy.ndarray) -> numpy.ndarray:
        """The K and V of a value, as as_integers(kv[place]) has them."""
        page = as_integers(self.kv[:1])[0]
        return value[self.header_bytes:].view(page.dtype).reshape(page.shape)

    def copies(self, pages: int) -> dict:
        """Of so many adjacent pages: contiguous pieces for one layer on the device, and of a page for storage, with their
        bytes."""
        into = self.kv[:pages, 0].transpose(0, 1)
        to_layer = [piece.nbytes for piece, _ in links.pieces(into, into, into)]
        to_storage = ([piece.nbytes for piece, _ in links.pieces(self.kv[0], self.kv[0], self.kv[0])]
                      if self.layout == "layer_first" else [self.page_bytes])
        return dict(layer_copies=len(to_layer), layer_copy_bytes=to_layer[0], storage_copies=len(to_storage),
                    storage_copy_bytes=to_storage[0])


# 2. Storage: threads that do not know the engine ------------------------------------------------------------------

@dataclass(eq=False)
class Prefetch:
    """What storage may have of one prompt behind what the tree had, on its way into host memory. A thread sets `hit`; the engine
    gives it places then, takes what has arrived, and may stop it. When a thread has read some pages, another goes on with the
    next ones, so that storage is busy while these are checked and put into their places."""
    storage: "Storage"
    cache_salt: str
    tokens: bytes                  # of the prompt's whole pages
    first: int                     # number of the first page that is asked for
    keys: list[str]
    most: int                      # pages to bring, at most
    least: int = 1                 # if it is fewer, none
    began: float = field(default_factory=time.perf_counter)
    moved: float = 0.0             # when it last came on
    hit: int | None = None         # pages in a row that storage has; None: it has not said yet
    places: list[int] = field(default_factory=list)             # in host memory, for the first pages of the hit
    asked: int = 0                 # of them a thread reads, or has read
    checked: dict[int, tuple[int, int, bool]] = field(default_factory=dict)     # reads that were checked before an earlier one
    #                                was: first page -> pages that are right, pages read, whether the next one is wrong
    arrived: int = 0               # of them are there, and all before them
    taken: int = 0                 # of them are in the tree
    users: int = 0                 # requests that wait for it
    queued: bool = True            # a thread will be at it
    at_work: int = 0               # threads that are at it
    stopped: bool = False          # nothing more is asked for
    failed: bool = False           # storage raised, or what it gave is not what it must be
    epoch: int = 0                 # Storage.epoch when it was looked for
    spans: list[tuple[float, float, int]] = field(default_factory=list)         # began, ended, pages

    @property
    def idle(self) -> bool:
        return not self.queued and not self.at_work

    @property
    def over(self) -> bool:
        return self.idle and (self.stopped or self.failed or self.hit is not None and (
            self.hit < self.least or bool(self.places) and self.arrived == len(self.places)))

    def page(self, number: int) -> bytes:
        """The tokens of the page that is asked for as this number."""
        size = len(self.tokens) // (self.first + len(self.keys))
        return self.tokens[(self.first + number) * size:][:size]


@dataclass(eq=False)
class Write:
    """A node's pages on their way from host memory to storage. It holds a reference to each place until the engine has seen that
    it is over."""
    storage: "Storage"
    nodes: list[Node]              # one, or what it was split into
    tokens: bytes
    keys: list[str]
    places: list[int]
    timeline: Timeline | None
    over: bool = False
    failed: bool = False
    epoch: int = 0                 # Storage.epoch when it was written
    spans: list[tuple[float, float, int]] = field(default_factory=list)


class Backoff:
    """After an error nobody asks for a while: twice as long each time, until something works."""
    FIRST, LONGEST = 0.1, 10.0     # seconds

    def __init__(self):
        self.seconds = self.until = 0.0                         # how long; until when, on the host's clock

    @property
    def ready(self) -> bool:
        return time.perf_counter() >= self.until

    def note(self, worked: bool):
        self.seconds = 0.0 if worked else min(self.LONGEST, 2 * self.seconds or self.FIRST)
        self.until = time.perf_counter() + self.seconds


class Storage:
    """A back end (legacy/backends.py) and the threads that ask it: some read, one writes. What it raises is counted, and not
    passed on. A thread sets `at_work` or `over` of a job last, under `changed`; what it set before may be read when that is
    seen. A place in host memory is the threads' until its Prefetch is idle, and then the engine's; a Write changes nothing
    there but the header in front of the page."""
    READERS = 2
    ASKED = 128                    # keys that are looked for at a time
    MOST, SLOW = 32, 5e-3          # pages read or written at a time; fewer, if reading takes so many seconds
    PROBE = 8                      # pages that are read where reading is not worth it, to see whether that has changed

    def __init__(self, backend, name: str, host: HostPages, bandwidth: bidirectional.Bandwidth | None = None, say=str):
        self.backend, self.name, self.host, self.bandwidth, self.say = backend, name, host, bandwidth, say
        self.changed = threading.Condition()
        self.reads: deque[Prefetch] = deque()
        self.writes: deque[Write] = deque()
        self.reading, self.writing = Backoff(), Backoff()
        self.batch = 1                                          # pages to read at a time
        self.times: deque[tuple[int, float]] = deque(maxlen=8)  # pages and seconds of the last reads
        self.damaged: set[str] = set()                          # keys under which something wrong was
        self.heard = self.wrote = time.perf_counter()           # when something was read; when writing last came on
        self.counts = Counter(storage_looked_for=0, storage_pages_read=0, storage_bytes_read=0, storage_pages_written=0,
                              storage_bytes_written=0, storage_pages_refused=0, storage_errors=0)
        self.error: str | None = None                           # the last one
        self.seen: deque[bytes] = deque(maxlen=SHOWN)           # keys of the last pages that were read or written, for the page
        self.epoch = next(EPOCHS)                               # another after each error: storage may have lost what it had
        self.closed = threading.Event()
        self.threads = [threading.Thread(target=work, args=(self, kind), name=f"storage {kind}", daemon=True)
                        for kind in ["read"] * self.READERS + ["write"]]
        for thread in self.threads:
            thread.start()

    def put(self, job: Prefetch | Write):
        with self.changed:
            (self.reads if isinstance(job, Prefetch) else self.writes).append(job)
            self.changed.notify_all()

    def give_up(self, prefetch: Prefetch):
        """Nobody wants it any more. If no thread is at it yet, none will be."""
        with self.changed:
            prefetch.stopped = True
            if prefetch in self.reads:
                self.reads.remove(prefetch)
                prefetch.queued = False

    def blame(self, backoff: Backoff):
        """It has not answered in time; a thread may hang there."""
        with self.changed:
            self.complain("no answer in time", backoff)

    def abandon(self):
        """What no thread is at will not be done."""
        with self.changed:
            for prefetch in self.reads:
                prefetch.stopped, prefetch.queued = True, False
            for write in self.writes:
                write.failed = write.over = True
            self.reads.clear()
            self.writes.clear()

    def close(self):
        """The threads end when they have done what is queued; nobody waits long for one that hangs."""
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(0.5)

    def costs(self) -> tuple[float, float]:
        """-> seconds for each read, however small, and for each page of it, by the last ones. For who holds `changed`."""
        pages, seconds = zip(*self.times)
        if len(set(pages)) == 1:
            return 0.0, statistics.mean(seconds) / pages[0]
        slope, start = statistics.linear_regression(pages, seconds)
        if slope <= 0 or start <= 0:                            # the times vary by more than the sizes
            return (0.0, sum(seconds) / sum(pages)) if slope > 0 else (statistics.mean(seconds), 0.0)
        return start, slope

    def seconds(self, pages: int) -> float | None:
        """Estimate for reading so many pages, while others are read too; None before any was read."""
        with self.changed:
            if not self.times:
                return None
            start, slope = self.costs()
            crowd = max(1.0, (len(self.reads) + 1) / self.READERS)
            return (-(-pages // self.batch) * start + pages * slope) * crowd

    def note(self, pages: int, seconds: float):
        """A read took so long: how many pages to read next. As many as take SLOW, or twice the fixed cost of a read: then
        that weighs little. For who holds `changed`."""
        self.times.append((pages, seconds))
        start, slope = self.costs()
        if len({count for count, _ in self.times}) == 1:        # nothing to compare with
            most = 2 * self.batch
        else:
            most = (max(self.SLOW, 2 * start) - start) / slope if slope else self.MOST
        self.batch = int(max(1, min(self.MOST, 2 * self.batch, most)))

    def ask(self, backoff: Backoff, function, *arguments):
        """-> what the back end says, or None if it raised."""
        errors, ready = self.counts["storage_errors"], backoff.ready
        try:
            answer = function(self.backend, *arguments)
        except Exception as error:
            with self.changed:
                self.complain(f"{type(error).__name__}: {self.say(error)}", backoff)
                self.epoch = next(EPOCHS)
            return None
        with self.changed:
            # Of several readers, one that was under way says nothing about what has just gone wrong for another
            worked = backoff is self.writing or ready and errors == self.counts["storage_errors"]
            if worked and function is not backends.exist_all:   # who only says what it has may still not take or give it
                backoff.note(True)
        return answer

    def complain(self, error: str, backoff: Backoff):
        """Count an error, and ask for nothing for a while. For who holds `changed`."""
        self.counts["storage_errors"] += 1
        self.error = error[:300]
        backoff.note(False)

    # In a thread

    def look(self, prefetch: Prefetch):
        """How many pages in a row are there?"""
        hit, prefetch.epoch = 0, self.epoch
        while hit < prefetch.most and not prefetch.stopped:
            keys = prefetch.keys[hit:min(hit + self.ASKED, prefetch.most)]
            there = self.ask(self.reading, backends.exist_all, keys)
            with self.changed:
                self.counts["storage_looked_for"] += len(keys)
                prefetch.failed = there is None
                prefetch.moved = self.heard = time.perf_counter()
            found = next((number for number, one in enumerate(there or [False]) if not one), len(keys))
            hit += found
            if found < len(keys):
                break
        with self.changed:
            prefetch.hit = hit

    def next_pages(self, prefetch: Prefetch) -> range:
        """Those that a thread is to read now. A quarter of a batch first, because the link has nothing to do yet; and fewer and
        fewer in the end, so that little is left to copy to the device when the last are there. For who holds `changed`."""
        rest = len(prefetch.places) - prefetch.asked
        count = min(rest, self.batch, max(-(-self.batch // 4), -(-rest // 2) if prefetch.asked else 0))
        prefetch.asked += count
        return range(prefetch.asked - count, prefetch.asked)

    def fetch(self, prefetch: Prefetch, numbers: range):
        """Read these pages, let another thread read the next ones, and meanwhile check these and put them into their places."""
        began = time.perf_counter()
        buffers = [self.host.buffer(prefetch.places[number]) for number in numbers]
        values = self.ask(self.reading, backends.get_all, [prefetch.keys[number] for number in numbers], buffers)
        if values and self.bandwidth:
            size = sum(self.host.page_bytes for value in values if value is not None)
            self.closed.wait(max(0.0, self.bandwidth.arrival(size, began) - time.perf_counter()))
        with self.changed:
            wanted = not prefetch.failed and not prefetch.stopped and prefetch.asked < len(prefetch.places)
            if wanted and values and all(value is not None for value in values):
                prefetch.queued = True
                self.put(prefetch)
        right = 0
        for number, value, buffer in zip(numbers, values or (), buffers):
            if value is None or not self.host.fill(prefetch.places[number], prefetch.page(number), value, value is buffer):
                break
            right += 1
        wrong = values is not None and right < len(numbers) and values[right] is not None
        with self.changed:
            prefetch.moved = self.heard = time.perf_counter()
            prefetch.checked[numbers.start] = right, len(numbers), wrong
            self.arrive(prefetch, began)

    def arrive(self, prefetch: Prefetch, began: float):
        """Count what is there without a gap, now that what a thread began to read at `began` is checked. For who holds
        `changed`."""
        before = prefetch.arrived
        while prefetch.arrived in prefetch.checked:
            right, count, wrong = prefetch.checked.pop(prefetch.arrived)
            prefetch.arrived += right
            prefetch.failed = prefetch.failed or right < count
            if wrong:
                self.counts["storage_pages_refused"] += 1
                self.damaged.add(prefetch.keys[prefetch.arrived])
                self.complain("a page was not what it must be", self.reading)
        count = prefetch.arrived - before
        if count:
            self.counts.update(storage_pages_read=count, storage_bytes_read=count * self.host.page_bytes)
            self.seen += [bytes.fromhex(key) for key in prefetch.keys[before:prefetch.arrived]]
            if prefetch.spans:                                  # what is read at the same time takes its time only once
                began = max(began, prefetch.spans[-1][1])
            prefetch.spans.append((began, prefetch.moved, count))
            self.note(count, prefetch.moved - began)

    def write(self, write: Write):
        """Write what storage lacks of a node, or has in another form."""
        size, write.epoch = len(write.tokens) // len(write.keys), self.epoch
        for first in range(0, len(write.keys), self.MOST):
            numbers, began = range(first, min(first + self.MOST, len(write.keys))), time.perf_counter()
            there = self.ask(self.writing, backends.exist_all, [write.keys[number] for number in numbers])
            lacking = [number for number, one in zip(numbers, there or ()) if not one or write.keys[number] in self.damaged]
            values = [self.host.value(write.places[number], write.tokens[number * size:][:size]) for number in lacking]
            keys = [write.keys[number] for number in lacking]
            if there is None or lacking and self.ask(self.writing, set_all, keys, values) is None:
                write.failed = True
                return
            ended = time.perf_counter()
            with self.changed:
                self.wrote = ended
                self.damaged.difference_update(keys)
                self.seen += [bytes.fromhex(write.keys[number]) for number in numbers]
                self.counts.update(storage_pages_written=len(lacking),
                                   storage_bytes_written=len(lacking) * self.host.page_bytes)
            if lacking:
                write.spans.append((began, ended, len(lacking)))


def close_backend(backend):
    with suppress(Exception):
        getattr(backend, "close", lambda: None)()


def set_all(backend, keys: list[str], values: list) -> bool:
    """-> True, because `Storage.ask` says None of an error."""
    backends.set_all(backend, keys, values)
    return True


def work(storage: Storage, kind: str):
    """A thread of a storage."""
    jobs = storage.reads if kind == "read" else storage.writes
    while True:
        with storage.changed:
            storage.changed.wait_for(lambda: jobs or storage.closed.is_set())
            if not jobs:
                return
            job = jobs.popleft()
            if kind == "write":
                storage.wrote = time.perf_counter()
            else:
                job.queued, job.at_work, job.moved = False, job.at_work + 1, time.perf_counter()
                wanted = not job.failed and not job.stopped and storage.reading.ready
                numbers = storage.next_pages(job) if wanted and job.places else range(0)
        try:
            if kind == "write":
                if storage.writing.ready:
                    storage.write(job)
                else:
                    job.failed = True
            elif not wanted:
                job.failed = True
            elif job.hit is None:
                storage.look(job)
            else:
                storage.fetch(job, numbers)
        except Exception as error:                              # a defect, or a back end that gives what it must not
            job.failed = True
            with storage.changed:
                storage.complain(f"{type(error).__name__}: {storage.say(error)}",
                                 storage.writing if kind == "write" else storage.reading)
        with storage.changed:
            if kind == "write":
                job.over, storage.wrote = True, time.perf_counter()
            else:
                job.at_work -= 1
                if job.failed and job.queued:                   # whoever waits need not wait until a thread finds that out
                    jobs.remove(job)
                    job.queued = False
            storage.changed.notify_all()
        job = None                                              # which a thread that waits should not keep alive


# 3. The engine ---------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Swap(offload.Swap):
    """Chapter 03's, of nodes. On the device it also holds all pages before them."""
    nodes: list[Node] = field(default_factory=list)                             # outward: the node, or what it was split into
    device_path: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Request(paged.Request):
    pages: dict = field(default_factory=dict)                   # of its prompt: gpu_hits, cpu_hits, storage_hits, misses
    choice: dict | None = None                                  # load or recompute, and the two estimates
    origins: list[str] = field(default_factory=list)            # of the pages that it has not computed
    prefetch: Prefetch | None = None                            # that it waits for
    shared: int = 0                                             # pages of that which are of its prompt too
    asked: bool = False                                         # storage was asked, or need not be
    fetched: dict | None = None                                 # what came of it, for the reply
    swap_ins: list[Swap] = field(default_factory=list)

    @property
    def blocks(self) -> dict:
        """Chapter 03's name for it."""
        return self.pages

    def inherit(self, other: "Request"):
        super().inherit(other)
        self.pages, self.choice, self.fetched, self.swap_ins = other.pages, other.choice, other.fetched, list(other.swap_ins)


@dataclass
class Result(baseline.Result):
    pages: dict                    # of the prompt: gpu_hits, cpu_hits, storage_hits, misses
    choice: dict | None            # chosen ("load" or "recompute"), load_ms, recompute_ms; None if the host had nothing more
    prefetch: dict | None          # policy, hit_tokens, fetched_tokens, waited_ms, ended; None if it did not wait for storage
    link: str                      # what the pages came over, and how fast it is

    def summary(self) -> str:
        found, more = ", ".join(f"{what} {count}" for what, count in self.pages.items()), ""
        for what, report in (("Chosen", self.choice), ("Prefetch", self.prefetch)):
            if report:
                more += f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in report.items())
        return f"{super().summary()}\nPages: {found}{more}\n({self.link})"


def as_bytes(tokens: list[int]) -> bytes:
    """Token ids as little-endian int32."""
    return numpy.array(tokens, "<i4").tobytes()


class Engine(offload.SwappingEngine):
    """Chapter 03's engine with a tree over its two tiers, and storage below them. `timeout` is (base, per_1k_tokens, cap) in
    seconds; at most `prefetch_limit` tokens are on their way from storage.

    The way of a request: in line, storage is asked for what the tree lacks (`begin_prefetch`). It comes in with the device's
    pages (`match`, `find_room`). `restore` sends for those of host memory (`bring`), and while it is not `enough`, for those
    that arrive there from storage (`take`). Prefill puts its pages into the tree (`save`, `insert`), from where they go down:
    `write_down`, `back_up` to host memory, `kept` when they are there, `store` in storage. `settle` lets go of whatever is
    over."""
    Request, Pool = Request, DevicePages

    def __init__(self, model, tokenizer, end_tokens, *options, cpu_blocks: int | None = None, layout: str = "page_first_direct",
                 write_policy: str = "write_through", prefetch_policy: str = "timeout", prefetch_threshold: int = 256,
                 timeout: tuple[float, float, float] = (1.0, 0.25, 5.0), prefetch_limit: int | None = None,
                 admin_token: str | None = None, **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, **named_options)
        pool, size = self.pool, self.pool.block_size
        cpu_blocks = offload.host_pool_size(pool, cpu_blocks, 4 * pool.size, pool.kv[:, :, 0].nbytes + 64 + 4 * size,
                                            f"host pages of {size} tokens", "--cpu-blocks")
        self.host = HostPages(model.config, cpu_blocks, size, model.dtype, model.device, layout)
        self.tree = HiRadixTree(pool, self.host, f"{model.digest.hex()} {model.dtype} {size} kv {layout}")
        self.write_policy, self.prefetch_policy, self.timeout = write_policy, prefetch_policy, timeout
        self.prefetch_threshold = prefetch_threshold
        self.prefetch_limit = cpu_blocks * size // 2 if prefetch_limit is None else prefetch_limit
        self.storage: Storage | None = None
        self.stored = live.Keys()                                               # what storage has, for the page
        self.attaching = threading.Lock()                                       # one at a time attaches or detaches
        self.prefetches: list[Prefetch] = []                                    # not over, or not let go of
        self.writes: list[Write] = []
        self.admin_token = admin_token
        self.counts.update(gpu_hits=0, cpu_hits=0, storage_hits=0, misses=0, recomputed_hits=0, prefetches=0, prefetched_pages=0,
                           prefetches_cut=0, prefetches_not_worth=0, late_pages=0, writes_skipped=0)

    def busy(self) -> bool:
        return super().busy() or bool(self.swaps or self.prefetches or self.writes)

    def rest(self):
        with self.stepping:
            self.idle()

    @property
    def admin(self) -> dict:
        return {**super().admin, "/storage": dict(GET=lambda body, with_token: self.storage_state(), POST=self.post_storage,
                                 DELETE=lambda body, with_token: self.detach())}

    # One step

    def step(self) -> bool:
        """Chapter 03's; then those who are still in line have storage asked, so that their pages come while others compute."""
        with self.stepping:
            more = super().step()
            for request in list(itertools.islice(self.waiting, self.max_running)):      # a copy: the line may grow meanwhile
                if request.prefetch is None:
                    self.begin_prefetch(request)
            return more

    def idle(self):
        if jobs := [*self.prefetches, *self.writes]:
            with jobs[0].storage.changed:
                jobs[0].storage.changed.wait(2e-3 if self.running or self.waiting else 20e-3)
        else:
            super().idle()

    def match(self, request: Request) -> list[int]:
        """The pages on the device that hold the longest cached prefix, but for the last token."""
        return [page for node in self.cached_nodes(request) for page in node.device or ()]

    def cached_nodes(self, request: Request) -> list[Node]:
        """The nodes that hold the longest prefix of the request's tokens that the tree has."""
        return self.tree.match(request.cache_salt, self.whole_pages(request))

    def whole_pages(self, request: Request) -> bytes:
        """The tokens of the pages that may be restored: all whole ones, without the last token."""
        size = self.pool.block_size
        return as_bytes(request.tokens[:(len(request.tokens) - 1) // size * size])

    def find_room(self, request: Request, hits: list[int], empty: int) -> bool:
        if not super().find_room(request, hits, empty):
            return False
        self.tree.touch(self.cached_nodes(request))                             # what it will use is not the next to go
        return not self.write_back(empty - len(self.pool.free), set(hits))

    # Restore: what the tree has, and then what storage has

    def restore(self, request: Request):
        """The verb: bring the longest prefix that any tier has, in whole pages, as far as that is sooner than to compute it."""
        first_time, size, began = request.source is None, self.pool.block_size, time.perf_counter()
        request.origins = ["cpu_hits" if page in self.arriving else "gpu_hits" for page in request.table[:request.saved]]
        # 1. The device's pages are in the table. Those of host memory are sent for
        path = self.cached_nodes(request)
        self.tree.touch(path)
        for node in path if first_time else ():
            node.hits += 1
            self.write_down(node, request.timeline)
        worth = self.bring(request)

        # 2. What storage has comes into the tree (`settle`), and goes on to the device while the rest is read
        while worth and (prefetch := request.prefetch or self.begin_prefetch(request)):
            while worth and not (ended := self.enough(prefetch, request.shared, began)):
                yield
                if self.seconds_to_load(0) < NEARLY_IDLE:                       # few swaps: within one, layers overlap
                    worth = self.bring(request)
            self.take(prefetch)
            worth = worth and self.bring(request)
            self.report(request, began, ended or "slower than computing")
            self.leave(request)
            request.asked = request.asked or ended != "complete"                # who has waited for another's asks for the rest
        self.leave(request)

        # 3. What was found
        request.computed = request.saved * size
        if first_time:
            found = Counter(request.origins)
            request.pages = {what: found[what] for what in ("gpu_hits", "cpu_hits", "storage_hits")}
            request.pages["misses"] = len(request.table) - len(request.origins)
            names = [what.removesuffix("s") for what in found]
            request.source = names[0] if len(names) == 1 else "mixed" if names else "miss"
            request.cached_tokens = request.computed
            self.counts.update(request.pages)
        yield from self.arrival(request)

    def bring(self, request: Request) -> bool:
        """Put into the request's table all that the tree has of its prefix by now: what lies in host memory is sent for, if that
        takes no longer than to compute it -> False if it is sooner computed, or the link did not take it."""
        at, on_host, size = 0, [], self.pool.block_size
        for node in self.cached_nodes(request):
            pages = self.tree.pages(node)
            if at >= request.saved and node.device is not None:                 # others have brought or computed it
                for index, page in enumerate(node.device, at):
                    self.replace(request, index, page)
                request.origins += ["cpu_hits" if node.device[0] in self.arriving else "gpu_hits"] * pages
                request.saved = at + pages
            elif at >= request.saved:
                on_host.append(node)
            at += pages
        worth = True
        if on_host:
            waits = any(not swap.ready for swap in request.swap_ins)            # in any case, for what is before these
            load = self.seconds_to_load(at - request.saved, behind=0 if waits else None)
            compute = self.seconds_to_compute(request.saved * size, at * size)
            worth = load <= compute and self.swap_in(request, on_host, at)
            if request.source is None:                                          # a preempted request has said it already
                before = request.choice or dict(load_ms=0.0, recompute_ms=0.0)
                compute_ms = round((before["recompute_ms"] or 0.0) + compute * 1e3, 3) if self.prefills else None
                request.choice = dict(chosen="load" if worth else "recompute", load_ms=round(before["load_ms"] + load * 1e3, 3),
                                      recompute_ms=compute_ms)
                self.counts["recomputed_hits"] += 0 if worth else at - request.saved
            if not worth:
                self.load_link.wear_out()                                       # the link may be faster the next time
        request.swap_ins = list(dict.fromkeys([*request.swap_ins, *(
            self.arriving[page] for page in request.table[:request.saved] if page in self.arriving)]))
        return worth

    def swap_in(self, request: Request, nodes: list[Node], end: int) -> bool:
        """Issue the copies of these nodes into the request's pages up to number `end` -> whether the link took them. Others find
        them on the device from now on, and wait for them too."""
        start, prefetch = request.saved, request.prefetch
        swap = Swap(True, request.table[start:end], [place for node in nodes for place in node.host], None, request.timeline,
                    device_path=request.table[:start])
        self.hold(swap)
        at = start
        for node in nodes:
            node.device, node.tried = request.table[at:at + self.tree.pages(node)], False
            at += self.tree.pages(node)
            for page in node.device:
                self.pool.register(page, node)
                self.arriving[page] = swap
        if not self.load(swap):
            return False
        fetched = range(prefetch.first, prefetch.first + min(prefetch.taken, request.shared)) if prefetch else ()
        request.origins += ["storage_hits" if number in fetched else "cpu_hits" for number in range(start, end)]
        request.saved = end
        return True

    def hold(self, swap: Swap):
        """The swap is under way, and needs these pages."""
        for page in (*swap.device_path, *swap.device_blocks):
            self.pool.share(page)
        for place in swap.host_blocks if swap.inward else ():                   # outward, they have just been allocated
            self.host.share(place)
        self.swaps.append(swap)

    # Prefetch: from storage into host memory

    def begin_prefetch(self, request: Request) -> Prefetch | None:
        """Have storage asked for what the tree lacks of the request's prefix, if that may be enough, once. Where somebody waits
        for the beginning of it, wait for that first. Where it is known to be sooner computed, only a few pages are asked for,
        and nobody waits: to see whether that has changed."""
        storage, size, least = self.storage, self.pool.block_size, max(1, -(-self.prefetch_threshold // self.pool.block_size))
        if storage is None or request.asked:
            return None
        room = self.prefetch_limit // size - sum(prefetch.most for prefetch in self.prefetches
                                                 if prefetch.storage is storage and not prefetch.stopped)
        if not storage.reading.ready or min(room, self.host.available) < min(least, len(request.tokens) // size + 1):
            return None                                                         # another time, if it is still in line then
        request.asked = True
        path, tokens = self.cached_nodes(request), self.whole_pages(request)
        first = sum(map(self.tree.pages, path))
        pages = len(tokens) // self.tree.id_bytes - first
        if pages < least:
            return None
        self.tree.touch(path)                                                   # so that what comes does not take its place
        key = self.tree.keys(path[-1] if path else self.tree.root(request.cache_salt))[-1]
        keys = [key.hex() for key in self.tree.chain(key, tokens[first * self.tree.id_bytes:])]
        seconds, most = storage.seconds(pages), min(pages, room)
        worth = seconds is None or seconds <= self.seconds_to_compute(first * size, (first + pages) * size)
        for prefetch in self.prefetches if worth else ():                       # another waits for the same
            if (prefetch.storage is storage and prefetch.users and not prefetch.over
                    and prefetch.keys[prefetch.taken:prefetch.taken + 1] == keys[:1]):
                request.asked = False
                break
        else:
            if not worth:
                least, most = 1, min(most, storage.PROBE)
            prefetch = Prefetch(storage, request.cache_salt, tokens, first, keys, most, least)
            prefetch.moved = prefetch.began
            self.prefetches.append(prefetch)
            self.counts.update(prefetches=1, prefetches_not_worth=not worth)
            storage.put(prefetch)
        if not worth:
            return None
        same = (a == b for a, b in zip(prefetch.keys[prefetch.taken:], keys))   # in a chain of keys, those before are too
        request.prefetch, request.shared = prefetch, prefetch.taken + sum(itertools.takewhile(bool, same))
        prefetch.users += 1
        return prefetch

    def enough(self, prefetch: Prefetch, shared: int, began: float) -> str | None:
        """Why a request that came out of the line at `began` should wait no longer for the first `shared` pages of this, or
        None."""
        storage, size, now = prefetch.storage, self.pool.block_size, time.perf_counter()
        with storage.changed:
            hit, over, left = prefetch.hit, prefetch.over, prefetch.arrived - prefetch.taken
            # While a thread is at it, it must come on; else storage is busy with others, and they must
            moved = max(began, prefetch.moved, 0.0 if prefetch.at_work else storage.heard)
        if over:
            if left:                                                            # what has arrived is taken first
                return None
            if prefetch.failed or prefetch.stopped:                             # detached, or host memory has no room
                return "failed" if prefetch.failed else "stopped"
            return "complete" if prefetch.places else "below the threshold" if hit else "not there"
        if prefetch.taken >= shared:
            return "complete"
        if self.prefetch_policy == "best_effort":
            return "the device was free"
        first, pages = prefetch.first + prefetch.taken, min(shared, prefetch.most if hit is None else hit)
        base, per_1k, cap = self.timeout
        if self.prefetch_policy == "timeout" and now - prefetch.began > min(cap, base + per_1k * pages * size / 1024):
            return "timeout"
        rest = pages - prefetch.taken
        read, compute = storage.seconds(rest), self.seconds_to_compute(first * size, (first + rest) * size)
        if read is not None and max(read, self.seconds_to_load(rest, behind=0)) > compute:
            return "slower than computing"
        if now - moved > max(20e-3, min(PATIENCE, compute / 4), 2 * (storage.seconds(storage.batch) or 0.0)):
            return "silent"
        return None

    def take(self, prefetch: Prefetch):
        """Put what has arrived into the tree."""
        with prefetch.storage.changed:
            arrived = prefetch.arrived
        places = prefetch.places[prefetch.taken:arrived]
        if places:
            tokens = prefetch.tokens[:(prefetch.first + arrived) * self.tree.id_bytes]
            for node in self.tree.insert_host(prefetch.cache_salt, tokens, prefetch.first + prefetch.taken, places):
                node.stored, node.checked = prefetch.epoch, time.perf_counter()
            self.host.release(places)                                           # those that the tree did not want are free
            self.counts.update(prefetched_pages=len(places), late_pages=0 if prefetch.users else len(places))
            prefetch.taken = arrived

    def leave(self, request: Request):
        """The request waits for its prefetch no longer. What is under way comes for the next one; more is not asked for, unless
        somebody else waits."""
        prefetch, request.prefetch = request.prefetch, None
        if prefetch:
            prefetch.users -= 1
            if not prefetch.users:
                prefetch.storage.give_up(prefetch)

    def report(self, request: Request, began: float, ended: str):
        prefetch, size = request.prefetch, self.pool.block_size
        hit, fetched = min(prefetch.hit or 0, request.shared), min(prefetch.taken, request.shared)
        request.fetched = dict(policy=self.prefetch_policy, hit_tokens=hit * size, fetched_tokens=fetched * size, ended=ended,
                               waited_ms=round((time.perf_counter() - began) * 1e3, 3))
        self.counts["prefetches_cut"] += not prefetch.over
        if ended == "silent" and prefetch.storage.reading.ready:                # once, however many have waited
            prefetch.storage.blame(prefetch.storage.reading)
        for start, end, pages in prefetch.spans:
            request.timeline.add("storage", f"fetch {pages} pages", start, end)

    # Save: into the tree, and down as the policy says

    def save(self, request: Request):
        """The verb: what prefill has filled can be found by others. What decode fills follows when the request leaves."""
        if not request.answer.tokens:
            self.insert(request)

    def insert(self, request: Request):
        end = request.computed // self.pool.block_size
        if end <= request.saved:
            return
        tokens = as_bytes(request.tokens[:end * self.pool.block_size])
        found, new = self.tree.insert(request.cache_salt, tokens, request.table[:end])
        for index, page in enumerate(found):
            if page != request.table[index]:                                    # others were first; all hold the same pages then
                self.replace(request, index, page)
                if (swap := self.arriving.get(page)) and swap not in request.swap_ins:
                    request.swap_ins.append(swap)
        request.saved = end
        for node in new:
            self.write_down(node, request.timeline)

    def free(self, request: Request):
        try:
            self.insert(request)
        finally:
            super().free(request)
            self.leave(request)

    def finish(self, request: Request, outcome, counted: str):
        super().finish(request, outcome, counted)
        self.leave(request)                                                     # who was still in line

    def write_down(self, node: Node, timeline: Timeline | None):
        """A node was inserted or found: what the policy says should lie further down is sent there."""
        if self.write_policy == "write_back" or self.write_policy == "write_through_selective" and node.hits < HOT:
            return
        if node.host is None:
            self.back_up(node, timeline)
        else:
            self.store(node, timeline)

    def back_up(self, node: Node, timeline: Timeline | None = None, before_eviction: bool = False, anyway: bool = False) -> bool:
        """Send a node to host memory -> whether it is on its way. Not if nobody would load it from there, unless `anyway`."""
        depth = sum(map(self.tree.pages, self.tree.path(node)))
        if node.device is None or node.leaving or not anyway and not self.worth_keeping(depth):
            return False
        places = self.take_host(self.tree.pages(node), self.tree.pages(node))
        if not places:
            self.counts["writes_skipped"] += 1
            return False
        swap = Swap(False, node.device, places, None, timeline, before_eviction, nodes=[node],
                    device_path=[page for above in self.tree.path(node)[:-1] for page in above.device])
        self.hold(swap)
        node.leaving = swap
        runs = offload.adjacent(swap.device_blocks, places)
        self.send(swap, self.save_link, [self.host.kv[first:first + count] for _, first, count in runs],
                  [self.pool.kv[:, :, first:first + count].permute(2, 0, 1, 3, 4, 5) for first, _, count in runs],
                  f"{len(places)} pages")
        self.counts.update(swap_outs=len(places), bytes_out=sum(transfer.bytes for transfer in swap.transfers))
        return True

    def store(self, node: Node, timeline: Timeline | None = None) -> bool:
        """Send a node from host memory to storage -> whether it is on its way."""
        storage = self.storage
        if storage is None or node.host is None or node.writing or self.is_stored(node) or not storage.writing.ready:
            return False
        waiting = sum(len(write.places) for write in self.writes)
        if self.write_policy != "write_back" and waiting and waiting + len(node.host) > self.host.size // 2:
            self.counts["writes_skipped"] += 1                                  # else slow storage would lock all of host memory
            return False
        write = Write(storage, [node], node.tokens, [key.hex() for key in self.tree.keys(node)], list(node.host), timeline)
        for place in write.places:
            self.host.share(place)
        node.writing = write
        self.writes.append(write)
        storage.put(write)
        return True

    def take_host(self, count: int, least: int) -> list[int]:
        """-> so many places in host memory, or at least `least`, or none. What must be stored before it goes is sent off."""
        host, dirty = self.host, self.write_policy == "write_back"
        if host.available < least:
            return []
        while len(host.free) < count and (leaf := next(host.leaves(), None)) and not (
                dirty and len(host.free) + self.storage_writes() >= count):
            if not (dirty and self.worth_storing(leaf) and self.store(leaf)):
                host.evict_node(leaf)
        return host.allocate(min(count, len(host.free))) if len(host.free) >= least else []

    def is_stored(self, node: Node, for_seconds: float = RECHECK) -> bool:
        """Whether the storage that is attached has it, as was seen not too long ago: it may lose what it has."""
        storage = self.storage
        return (storage is not None and node.stored == storage.epoch
                and time.perf_counter() - node.checked < for_seconds)

    def storage_writes(self) -> int:
        """Pages on their way to storage; none if it does not come on with them any more."""
        moving = [write for write in self.writes if time.perf_counter() - write.storage.wrote < PATIENCE]
        if self.writes and not moving and self.writes[0].storage.writing.ready:
            self.writes[0].storage.blame(self.writes[0].storage.writing)
        return sum(len(write.places) for write in moving)

    def worth_storing(self, node: Node) -> bool:
        """Whether storage would be asked for it, as far as is known."""
        seconds = self.storage and self.storage.seconds(self.tree.pages(node))
        end = sum(map(self.tree.pages, self.tree.path(node))) * self.pool.block_size
        return seconds is None or seconds <= self.seconds_to_compute(end - len(node.tokens) // 4, end)

    def write_back(self, count: int, hits: set[int] = frozenset()) -> bool:
        """Under write_back: send to host memory what will be evicted for `count` pages -> whether to wait for that."""
        if self.write_policy != "write_back":
            return False
        victims, wait = {}, False
        for page in self.pool.cached if count > 0 else ():
            if page not in hits:
                victims[self.pool.prefixes[page]] = None
                if (count := count - 1) <= 0:
                    break
        for node in victims:
            if node.host is None and not node.tried:
                sent = self.back_up(node, before_eviction=True)
                coming = not sent and self.storage_writes() > 0                 # there will be room when these are written
                node.tried = not coming
                wait = wait or sent or coming
        return wait

    def spare_blocks(self) -> int:
        """Chapter 03's; under write_back only free ones, because what has to go down first is not given up."""
        return len(self.pool.free) if self.write_policy == "write_back" else super().spare_blocks()

    # What is over

    def settle(self) -> list[Swap]:
        over = super().settle()
        for swap in over:                                                       # what made room may go now
            for node in reversed(swap.nodes) if swap.before_eviction else ():
                if node.host and node.device and not self.pool.references[node.device[0]] and not any(
                        map(self.pool.places, node.children.values())):
                    self.pool.evict_node(node)
        for prefetch in list(self.prefetches):
            self.settle_prefetch(prefetch)
        for write in [write for write in self.writes if write.over]:
            self.writes.remove(write)
            for node in write.nodes:
                node.writing = None
                if not write.failed:
                    node.stored, node.checked = write.epoch, time.perf_counter()
            self.host.release(write.places)
            for start, end, pages in write.spans if write.timeline else ():
                write.timeline.add("storage", f"write {pages} pages", start, end)
        return over

    def settle_prefetch(self, prefetch: Prefetch):
        """Take what has come; give places to one that has found something; let go of one that is over."""
        with prefetch.storage.changed:
            has_looked = prefetch.idle and not prefetch.over and not prefetch.places
        if has_looked:
            prefetch.places = self.take_host(prefetch.hit, 1)
            prefetch.stopped = not prefetch.places and not self.storage_writes()        # else there will be room
            if prefetch.places:
                prefetch.queued, prefetch.moved = True, time.perf_counter()
                prefetch.storage.put(prefetch)
        with prefetch.storage.changed:
            over = prefetch.over                                                # before, because more may arrive until it is
        self.take(prefetch)
        if over:
            self.host.release(prefetch.places[prefetch.taken:])
            self.prefetches.remove(prefetch)

    def kept(self, swap: Swap):
        at = 0
        for node in swap.nodes:
            node.leaving, places = None, swap.host_blocks[at:at + self.tree.pages(node)]
            at += len(places)
            if node.parent is not None and not swap.failed:                     # else it was removed meanwhile
                node.host = places
                for place in places:
                    self.host.register(place, node)
                if self.write_policy != "write_back":
                    self.store(node, swap.timeline)

    def let_go(self, swap: Swap):
        self.host.release(swap.host_blocks)
        self.pool.release(swap.device_path + swap.device_blocks)

    def lose(self, swap: Swap):
        for request in self.running:
            if swap in request.swap_ins:
                request.computed = 0                                            # from what never came
        node = self.pool.prefixes[swap.device_blocks[0]]
        if node is not None:
            self.tree.remove(node)

    def flush(self, patience: float = PATIENCE) -> bool:
        """Wait until nothing is on its way, or storage has done nothing for so many seconds -> whether nothing is."""
        super().flush()
        moved, done = time.perf_counter(), None
        while jobs := [job for job in (*self.prefetches, *self.writes) if not job.storage.closed.is_set()]:
            with jobs[0].storage.changed:
                jobs[0].storage.changed.wait(0.05)
                counts = len(jobs), dict(jobs[0].storage.counts)
            super().flush()
            if counts != done:
                moved, done = time.perf_counter(), counts
            elif time.perf_counter() - moved > patience:
                return False
        return True

    # Storage is attached and detached while the engine runs

    def attach(self, backend, name: str, bandwidth: bidirectional.Bandwidth | None = None, say=str):
        """Use this back end from now on. What is cached already goes there when it is found, or evicted. `say` puts an error into
        words, without passwords."""
        with self.attaching:
            if self.storage or not self.host.size:
                close_backend(backend)
                raise BadRequest(
                    f"{self.storage.name} is attached already; detach it first, with DELETE /storage." if self.storage else
                    "Storage is read into host memory, and there is none; start with a larger --cpu-blocks.")
            with self.stepping:
                if not self.prefills:                                           # else the first request could not decide
                    self.measure_prefill()
            self.storage = Storage(backend, name, self.host, bandwidth, say)
            self.finalizer = weakref.finalize(self, self.storage.close)

    def measure_prefill(self):
        """How fast is prefill? In pages that are free, and stay so."""
        count = min(2 * offload.LONG_PREFILL, self.context, len(self.pool.free) * self.pool.block_size)
        request = self.Request([0] * count, 1, 0.0, 1.0, 0)
        request.table = self.pool.allocate(self.pool.needed(count))
        for _ in range(2 if count else 0):                                      # the first one warms up
            began = self.clock.mark()
            self.forward(paged.PagedBatch(self.pool, [(request, count)]))
            began, ended = map(self.clock.seconds, (began, self.clock.mark()))
            self.prefills.clear()
            self.prefills.append((count, self.flops(0, count), ended - began))
        self.pool.release(request.table)

    def detach(self, patience: float = PATIENCE) -> dict:
        """Ask nothing more of storage, wait for what is under way, and let go of it. All three tiers keep what they have."""
        with self.attaching:
            storage = self.storage
            if storage is None:
                raise BadRequest("No storage is attached.")
            with self.stepping:
                self.storage = None
                for prefetch in self.prefetches:
                    storage.give_up(prefetch)
            drained = self.flush(patience)
            storage.abandon()
            self.finalizer()
            with self.stepping:
                self.settle()
            if drained:
                close_backend(storage.backend)
            return dict(storage=None, detached=storage.name, drained=drained)

    def post_storage(self, body: dict, with_token: bool) -> dict:
        """POST /storage {"storage": URL, "config": {...}}"""
        fields = app.check_fields(body, {"storage": (app.text, "a URL"), "config": (lambda v: isinstance(v, dict), "an object")})
        if "storage" not in fields:
            raise BadRequest('The body must say which: {"storage": URL, "config": {...}}.')
        if not re.match(r"file:|[\w+.:-]+://", fields["storage"]) and not with_token:             # it runs code
            raise BadRequest("module:Class is loaded only for who has the token of --admin-token; or give it with --storage.")
        if self.storage:                                                        # `attach` looks again, when it is opened
            raise BadRequest(f"{self.storage.name} is attached already; detach it first, with DELETE /storage.")
        url, config = fields["storage"], fields.get("config", {})
        try:
            backend = backends.open_backend(url, config)
            self.attach(backend, backends.label(url), say=partial(backends.said, url=url, config=config))
        except checkpoint.ModelError as error:
            raise BadRequest(str(error)) from None
        return self.storage_state()

    def storage_state(self) -> dict:
        storage = self.storage
        state = dict(storage=storage and storage.name, write_policy=self.write_policy, prefetch_policy=self.prefetch_policy,
                     prefetch_threshold=self.prefetch_threshold, layout=self.host.layout, page_size=self.pool.block_size,
                     page_bytes=self.host.page_bytes)
        if storage:
            with storage.changed:
                state.update(storage.counts, last_error=storage.error, reading=storage.reading.ready,
                             writing=storage.writing.ready)
        return state

    def release(self):
        """A clean end: what is on its way to storage arrives there, and under write_back all that it lacks; unless storage does
        not come on with it."""
        storage = self.storage
        if storage is None:
            return
        with self.stepping:
            for prefetch in self.prefetches:
                storage.give_up(prefetch)
        alive = self.flush()
        if self.write_policy == "write_back":
            with self.stepping:                                                 # first what lies in host memory already
                for node in self.tree.nodes():
                    self.store(node)
            alive = alive and self.flush()
            while alive and (node := self.next_unsaved()):
                alive = self.save_now(node)
            with self.stepping:
                lost = sum(self.tree.pages(node) for node in self.tree.nodes() if not self.is_stored(node, math.inf))
            if lost:
                print(f"{lost} pages could not be written to {storage.name} ({storage.error}).", file=sys.stderr)
        with suppress(BadRequest):                                              # somebody else has just done it
            self.detach(patience=0.0)

    def next_unsaved(self) -> Node | None:
        """A node on the device that neither host memory nor storage has, and that fits into host memory."""
        with self.stepping:
            for node in self.tree.nodes():
                if node.host is None and not self.is_stored(node, math.inf):
                    most = self.host.size * self.tree.id_bytes
                    return node if len(node.tokens) <= most else self.tree.split(node, most)
            return None

    def save_now(self, node: Node) -> bool:
        """Send it to host memory and on to storage -> whether that has it. At first there may be no room in host memory, until
        storage has what is there."""
        for _ in range(3):
            with self.stepping:
                self.back_up(node, anyway=True)
            if not self.flush():
                return False
            if node.host is not None:
                break
        with self.stepping:
            self.store(node)
        return self.flush() and self.is_stored(node, math.inf)

    # What came of it

    def result(self, request: Request) -> Result:
        self.draw_loads(request)
        return Result(**vars(super().result(request)), pages=request.pages, choice=request.choice, prefetch=request.fetched,
                      link=f"{self.load_link}" + (f"; {self.storage.name}" if self.storage else ""))

    def counters(self) -> dict:
        counters, storage = super().counters(), self.storage
        if storage:
            with storage.changed:
                counters.update(storage.counts)
        return dict(counters, nodes=self.tree.size, prefetches_under_way=len(self.prefetches),
                    writes_under_way=len(self.writes), pages_lost=self.tree.lost, storage=storage and storage.name)

    def check_integrity(self):
        """The tree, both pools, and all that is on its way agree. Raises AssertionError."""
        self.pool.check_integrity([request.table for request in self.running]
                                  + [swap.device_path + swap.device_blocks for swap in self.swaps])
        self.host.check_integrity([swap.host_blocks for swap in self.swaps]
                                  + [prefetch.places[prefetch.taken:] for prefetch in self.prefetches]
                                  + [write.places for write in self.writes])
        self.tree.check_integrity()
        assert self.arriving == {page: swap for swap in self.swaps if swap.inward for page in swap.device_blocks}
        leaving = {node: swap for swap in self.swaps if not swap.inward for node in swap.nodes}
        writing = {node: write for write in self.writes for node in write.nodes}
        for node in self.tree.nodes():
            assert node.leaving is leaving.get(node) and node.writing is writing.get(node), "a copy is not what the node says"

    # What the page shows

    def tiers(self) -> list[live.Tier]:
        swaps, prefetches, writes, storage = list(self.swaps), list(self.prefetches), list(self.writes), self.storage
        tiers = [self.device_tier([page for swap in swaps for page in swap.device_blocks]), self.host_tier(
            [place for swap in swaps for place in swap.host_blocks] + [place for write in writes for place in write.places]
            + [place for prefetch in prefetches for place in prefetch.places[prefetch.arrived:]])]
        if storage:
            moving = [key for prefetch in prefetches for key in prefetch.keys[prefetch.arrived:len(prefetch.places)]]
            moving += [key for write in writes for key in write.keys]
            tiers.append(self.stored.tier(
                "storage", f"Storage: the last {SHOWN} pages read or written of {storage.name}", list(storage.seen),
                map(bytes.fromhex, moving), self.host.page_bytes, {}))
        for tier, pool in zip(tiers, (self.pool, self.host)):
            tier.title = tier.title.replace("KV blocks", "pages")
            tier.describe = partial(self.page_content, pool, tier.describe)
        return tiers

    def page_content(self, pool: PagePool, describe, page: int):
        """The key and the tokens of a page, which the tree knows."""
        with self.stepping:
            node = pool.prefixes[page]
            places = node and pool.places(node)
            if not places or page not in places:
                return describe(page) if node is None else (None, None, "on its way")
            index = places.index(page)
            tokens = numpy.frombuffer(node.tokens, "<i4")[index * pool.block_size:(index + 1) * pool.block_size].tolist()
            return self.tree.keys(node)[index], tokens, f"hits: {node.hits}"

    def drawn(self, request: Request):
        """The tree as it is now, and the request's path."""
        with self.stepping:
            path, node, at, tokens = set(), self.tree.root(request.cache_salt), 0, self.whole_pages(request)
            while (node := node.children.get(tokens[at:at + self.tree.id_bytes])) and self.tree.common(node, tokens, at):
                path.add(node)
                at += len(node.tokens)
            nodes, storage = [], self.storage

            def below(node: Node, depth: int):
                for child in node.children.values():
                    tiers = dict(L1=child.device is not None, L2=child.host is not None,
                                 L3=bool(storage) and child.stored == storage.epoch)
                    nodes.append((depth, self.tree.pages(child), child.hits, tuple(tier for tier in tiers if tiers[tier]),
                                  child in path))
                    below(child, depth + 1)
            for root in self.tree.roots.values():
                below(root, 0)
        return figure.Tree("The radix tree, and the path of this request", nodes, dict(
            L1="on the device", L2="in host memory", L3="in storage, when it was last seen"))

    def ways(self, prompt: list[int], new: int, stack) -> dict:
        folder, blocks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))), self.pool.needed(
            len(prompt) + new)
        small = self.small(blocks, cpu_blocks=2 * blocks, layout=self.host.layout, prefetch_policy="wait_complete",
                           prefetch_threshold=1, bytes_per_second=self.load_link.bytes_per_second)
        stack.callback(small.release)
        small.attach(backends.open_backend(f"file:{folder}"), "files")

        def way(lose) -> Result:
            lose(small)
            result = paged.answer(small, prompt=prompt, max_tokens=new)
            small.flush()
            return result
        return {baseline.RECOMPUTE: paged.chapter_01(self, prompt, new), "from L3, storage": lambda: way(forget),
                "from L2, host memory": lambda: way(offload.empty), "from L1, the device": lambda: way(lambda _: None)}


# 4. The demo -----------------------------------------------------------------------------------------------------

CONVERSATIONS, ROUNDS = 12, 5
ON_DEVICE, ON_HOST = 2, 5          # conversations that fit there
FACTS = 48                         # in a conversation's document
TIERS = dict(gpu_hits="L1", cpu_hits="L2", storage_hits="L3", misses="computed")


def demo(engine: Engine, arguments):
    """Many conversations, on a device that holds two of them: with one, two and three tiers, and with an L3 that another process
    has filled."""
    # 1. What is asked: the conversations, with the answers of chapter 01, and in which order they go on
    model, tokenizer, end_tokens, size = engine.model, engine.tokenizer, engine.end_tokens, engine.pool.block_size
    new, rng = max(2, min(arguments.max_tokens, 12)), random.Random(0)
    alone = baseline.Engine(model, tokenizer, end_tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        answers = 5 * CONVERSATIONS * ROUNDS                                    # chapter 01's, and those of four settings
        bar = stack.enter_context(tqdm(total=answers, unit="answer", leave=False, disable=None))
        turns = conversations(engine, alone, new, bar)                          # [conversation][round]: (messages, tokens)
        longest = max(len(engine.encode(None, messages)[0]) for turn in turns for messages, _ in turn) + new
        pages = -(-longest // size)
        order = [rng.sample(range(CONVERSATIONS), CONVERSATIONS) for _ in range(ROUNDS)]

        # 2. Another process computes the conversations and fills an L3
        other, asked = folder / "other", folder / "conversations.json"
        asked.write_text(json.dumps([turn[-1][0] for turn in turns]))
        subprocess.run([
            sys.executable, __file__, "--fill", asked, "--storage", f"file:{other}", "--model", arguments.model, "--device",
            arguments.device, "--dtype", arguments.dtype, "--page-size", str(size), "--layout", engine.host.layout,
            *(["--plain-weights"] if arguments.plain_weights else [])], check=True, capture_output=True)

        # 3. Every setting answers the same; all is compared with chapter 01 before anything is printed
        ways = {"L1 only": (0, None), "L1 + L2": (ON_HOST, None), "L1 + L2 + L3": (ON_HOST, folder / "own"),
                "the same, L3 filled by another process": (ON_HOST, other)}
        taken, engines = {}, {}
        for name, (host, directory) in ways.items():
            way = engines[name] = Engine(
                model, tokenizer, end_tokens, ON_DEVICE * pages, size, engine.token_budget, cpu_blocks=host * pages,
                layout=engine.host.layout, write_policy=engine.write_policy, prefetch_policy=engine.prefetch_policy,
                prefetch_threshold=engine.prefetch_threshold, timeout=engine.timeout,
                bytes_per_second=engine.load_link.bytes_per_second)
            stack.callback(way.release)
            for memory in (way.pool.kv, way.host.kv):
                memory.zero_()                                                  # touched before anything is measured
            if directory:
                url = f"file:{directory}"
                way.attach(backends.open_backend(url), "L3 in files")
            answer(way, prompt=[0] * min(512, longest - new), max_tokens=2, cache_salt="warm up")
            taken[name] = [[answer(way, bar, messages=turns[number][turn][0], max_tokens=new) for number in order[turn]]
                           for turn in range(ROUNDS)]
            way.flush()
            way.check_integrity()
        filled, last = taken[name], engines[name]                               # of the last setting
        shown = max(filled[0], key=lambda request: len(request.timeline.spans))
        tree = last.drawn(shown)
        shown.timeline.plan = lambda: tree
        slow = policies(last, turns[0][-1][0], new)
        bar.close()
        pairs = [(turns[number][turn][1], request.outcome.tokens) for rounds in taken.values() for turn in range(ROUNDS)
                 for number, request in zip(order[turn], rounds[turn])]
        pairs += [(turns[0][-1][1], request.outcome.tokens) for requests in slow.values() for request in requests]
        verified = paged.equal(pairs, model.dtype)

        # 4. What came of it
        link = last.load_link
        print(f"{CONVERSATIONS} conversations of up to {longest} tokens go on for {ROUNDS} rounds, in any order; pages of {size} "
              f"tokens, {engine.host.page_bytes} bytes\nL1 holds {ON_DEVICE} of them, L2 {ON_HOST}; {link}; "
              f"{engine.write_policy}, {engine.prefetch_policy}")
        rows = []
        for name, rounds in taken.items():
            rows += show(name, rounds, size)
        print("\nThe tree after L1 + L2 + L3, and where each node lies\n" + draw(engines["L1 + L2 + L3"]))
        rows += show_policies(slow, link)
        rows += show_layouts(engine, 32)
        print(f"\nOne answer out of the other process's L3 (f: from storage to L2; digits: layers from L2 to L1; {link})\n"
              f"{shown.timeline.chart()}")
        return dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), verified=verified, rows=rows,
                    counters=last.counters()), [shown.timeline]


def conversations(engine: Engine, alone: baseline.Engine, new: int, bar) -> list[list[tuple[list[dict], list[int]]]]:
    """-> for each conversation and round the messages, and the tokens that chapter 01 answers. Raises BadRequest."""
    system = dict(role="system", content=paged.document(engine, random.Random(1), 64))
    turns = []
    for number in range(CONVERSATIONS):
        talk, messages, rounds = classroom_text.Conversation(random.Random(number), classroom_text.Level()), [system], []
        for turn in range(ROUNDS):
            told = [talk.document(FACTS).user] if not turn else []
            messages = messages + [dict(role="user", content=" ".join([*told, talk.ask().user]))]
            if len(engine.encode(None, messages)[0]) + new > engine.context:
                raise BadRequest(f"The demo's conversations do not fit into the context of {engine.context} tokens; choose "
                                 "another --model.")
            result = alone.generate(messages=messages, max_tokens=new)
            rounds.append((messages, result.tokens))
            messages = messages + [dict(role="assistant", content=result.text or ".")]
            bar.update()
        turns.append(rounds)
    return turns


def answer(engine: Engine, bar=None, **asked) -> Request:
    request, = paged.run_together(engine, [asked]).requests
    if bar is not None:
        bar.update()
    return request


def forget(engine: Engine):
    """Empty L1 and L2."""
    engine.flush()
    with engine.stepping:
        for pages in (engine.pool, engine.host):
            while pages.cached:
                pages.evict()


def policies(engine: Engine, messages: list[dict], new: int) -> dict[str, list[Request]]:
    """The same question, with an empty L1 and L2, under each prefetch policy: where reading L3 takes two thirds of the time that
    computing does, with a timeout of a third of it; and where L3 gives 1 MB/s."""
    asked, size, attached = dict(messages=messages, max_tokens=new), engine.pool.block_size, engine.storage
    kept = engine.prefetch_policy, engine.timeout
    pages = (len(engine.encode(None, messages)[0]) - 1) // size
    compute, mbits = engine.seconds_to_compute(0, pages * size), pages * engine.host.page_bytes * 8 / 1e6
    slow = {name: Storage(attached.backend, "modelled", engine.host, bidirectional.Bandwidth((mbps,))) for name, mbps in (
        *((policy, mbits / compute * 1.5) for policy in PREFETCH_POLICIES), ("wait_complete, 1 MB/s", 8.0))}
    taken = {"computed": [], **{name: [] for name in slow}}
    for _ in range(ROUNDS + 1):                                                 # the first is a warm-up, which is not shown
        for name, requests in taken.items():
            forget(engine)
            engine.storage, engine.prefetch_policy = slow.get(name), name.split(",")[0]
            engine.timeout = compute / 3, 0.0, compute
            if engine.storage:
                engine.storage.bandwidth.restart()
            requests.append(answer(engine, **asked))
    engine.flush()
    for storage in slow.values():
        storage.close()
    engine.storage, (engine.prefetch_policy, engine.timeout) = attached, kept
    return taken


def show(name: str, rounds: list[list[Request]], size: int) -> list[dict]:
    """One setting: for each round, what share of the prompts' tokens came from where, and the mean TTFT."""
    print(f"\n{name[0].upper()}{name[1:]}\n  round" + "".join(f"{tier:>10}" for tier in TIERS.values()) + "   mean TTFT")
    rows = []
    for number, requests in enumerate(rounds, 1):
        prompts = sum(request.answer.prompt_tokens for request in requests)
        share = {tier: sum(request.pages[what] for request in requests) * size / prompts for what, tier in TIERS.items()}
        share["computed"] += 1 - sum(share.values())                            # the last page of a prompt is not full
        ttft = statistics.mean(request.outcome.ttft_ms for request in requests)
        rows.append(dict(setting=name, round=number, mean_ttft_ms=ttft, **share))
        print(f"  {number:5}" + "".join(f"{value:10.0%}" for value in share.values()) + f"{ttft:9.1f} ms")
    return rows


def show_policies(slow: dict[str, list[Request]], link) -> list[dict]:
    print(f"\nA slow L3: reading takes two thirds of the time of computing, the timeout is one third (median of {ROUNDS}; "
          f"modelled storage; {link})")
    rows = []
    for name, requests in slow.items():
        requests, fetched = requests[1:], [request.outcome.prefetch or {} for request in requests[1:]]
        ends = Counter(report["ended"] for report in fetched if report).most_common(1)
        share = statistics.median(request.pages["storage_hits"] / sum(request.pages.values()) for request in requests)
        waited = statistics.median(report.get("waited_ms", 0.0) for report in fetched)
        times = paged.measured("ttft_ms", [request.outcome.ttft_ms for request in requests],
                               f"{name:22}{share:5.0%} L3, waited {waited:5.1f} ms; TTFT", "ms")
        rows.append(dict(policy=name, from_storage=share, waited_ms=waited, ended=ends[0][0] if ends else None, **times))
    return rows


def show_layouts(engine: Engine, pages: int) -> list[dict]:
    print(f"\nWhat the layouts of L2 cost, {pages} adjacent pages")
    rows = []
    for layout in LAYOUTS:
        host = HostPages(engine.model.config, 2 * pages, engine.pool.block_size, engine.model.dtype, engine.model.device, layout)
        copies = host.copies(pages)
        rows.append(dict(layout=layout, pages=pages, **copies))
        print(f"  {layout:18} to a layer on the device {copies['layer_copies']:5} x {copies['layer_copy_bytes']:7} bytes; "
              f"a page to storage {copies['storage_copies']:3} x {copies['storage_copy_bytes']:7} bytes")
    return rows


def draw(engine: Engine, most: int = 24) -> str:
    """The tree as text: pages, tiers, hits, and how the node's text begins. L3 is asked."""
    lines, tokens_of = [], engine.tokenizer.decode

    def below(node: Node, depth: int):
        for child in node.children.values():
            tiers = [tier if there else "  " for tier, there in (
                ("L1", child.device is not None), ("L2", child.host is not None), ("L3", in_storage(engine, child)))]
            text = tokens_of(numpy.frombuffer(child.tokens, "<i4").tolist()[:24]).replace("\n", " ")[:40]
            lines.append(f"  {' '.join(tiers)}  {engine.tree.pages(child):4} pages {child.hits:3} hits  {'  ' * depth}{text}")
            below(child, depth + 1)
    for root in engine.tree.roots.values():
        below(root, 0)
    return "\n".join(lines[:most] + ([f"  ... and {len(lines) - most} more nodes"] if len(lines) > most else []))


def in_storage(engine: Engine, node: Node) -> bool:
    keys = [key.hex() for key in engine.tree.keys(node)]
    return engine.storage is not None and all(backends.exist_all(engine.storage.backend, keys))


# 5. Main ---------------------------------------------------------------------------------------------------------

def fill(engine: Engine, arguments):
    """--fill FILE: compute conversations, so that their pages are in storage, and end."""
    if engine.storage is None:
        raise BadRequest("--fill needs --storage, where the pages go.")
    try:
        asked = json.loads(arguments.fill.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"Cannot read conversations from '{arguments.fill}' ({error}); give a JSON file.") from None
    if not isinstance(asked, list) or not asked:
        raise BadRequest(f"'{arguments.fill}' must hold a JSON list of conversations, each a list of messages.")
    tokens = 0
    for messages in tqdm(asked, unit="conversation", disable=None):
        fields = app.check_fields(dict(messages=messages or []), app.PROMPT, "Each conversation")
        request = answer(engine, **fields, max_tokens=1)
        tokens += request.answer.prompt_tokens
    engine.flush()
    counts = engine.counters()
    print(f"{len(asked)} conversations, {tokens} tokens; {counts['storage_pages_written']} pages written to "
          f"{engine.storage.name}")
    return dict(conversations=len(asked), tokens=tokens, counters=counts), [request.timeline]


def add_arguments(parser):
    paged.add_arguments(parser, "--page-size")
    seconds = app.bounded(float, 0, 1e6)
    parser.add_argument("--cpu-blocks", type=app.bounded(int, 0, 1 << 26), metavar="N",
                        help="KV pages in host memory (default: four times the device's, within a quarter of what is free)")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[-1], help="of host memory (default page_first_direct)")
    parser.add_argument("--write-policy", choices=WRITE_POLICIES, default="write_through",
                        help="when pages go down a tier: at once (default), at their second hit, or on eviction")
    parser.add_argument("--storage", type=app.readable, metavar="URL",
                        help="the shared tier: file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or module:Class")
    parser.add_argument("--storage-config", type=app.readable, default="{}", metavar="JSON",
                        help="what the back end takes beside its URL: '{...}' or @FILE.toml or @FILE.json")
    parser.add_argument("--storage-mbps", type=bidirectional.trace, metavar="M[:M...][@S]",
                        help="model reading from storage at so many megabits a second; several: one after the other, each for S "
                             "seconds (default 0.1)")
    parser.add_argument("--prefetch-policy", choices=PREFETCH_POLICIES, default="timeout",
                        help="how long a request waits for storage (default timeout); never longer than computing would take")
    parser.add_argument("--prefetch-threshold", type=app.bounded(int, 1, 1 << 24), default=256, metavar="TOKENS",
                        help="read from storage only what has at least so many tokens (default 256)")
    parser.add_argument("--prefetch-timeout", type=seconds, default=1.0, metavar="S", help="of every prefetch (default 1)")
    parser.add_argument("--prefetch-timeout-per-1k", type=seconds, default=0.25, metavar="S",
                        help="and for each 1,024 tokens of it (default 0.25)")
    parser.add_argument("--prefetch-timeout-cap", type=seconds, default=5.0, metavar="S", help="but never more (default 5)")
    parser.add_argument("--prefetch-limit", type=app.bounded(int, 1, 1 << 30), metavar="TOKENS",
                        help="on their way from storage, at most (default: half of host memory's)")
    parser.add_argument("--admin-token", type=app.readable, metavar="TOKEN",
                        help="who is not on this machine must send it to use /storage and /evict (Authorization: Bearer TOKEN)")
    parser.add_argument("--fill", type=Path, metavar="FILE",
                        help="compute the conversations in FILE, a JSON list of lists of messages, for --storage, and end")
    links.add_arguments(parser)


def make_engine(model, tokenizer, end_tokens, arguments) -> Engine:
    config = backends.read_config(arguments.storage_config)
    backend = backends.open_backend(arguments.storage, config) if arguments.storage else None
    engine = Engine(
        model, tokenizer, end_tokens, arguments.gpu_blocks, arguments.block_size, arguments.token_budget, arguments.max_running,
        cpu_blocks=arguments.cpu_blocks, layout=arguments.layout, write_policy=arguments.write_policy,
        prefetch_policy=arguments.prefetch_policy, prefetch_threshold=arguments.prefetch_threshold,
        timeout=(arguments.prefetch_timeout, arguments.prefetch_timeout_per_1k, arguments.prefetch_timeout_cap),
        prefetch_limit=arguments.prefetch_limit, admin_token=arguments.admin_token,
        bytes_per_second=links.bandwidth(model, arguments.link, arguments.platform))
    for name, pool in (("L1, the device", engine.pool), ("L2, the host", engine.host)):
        print(f"{name}: {pool.size} pages of {pool.block_size} tokens, {pool.size * pool.block_size} tokens, "
              f"{pool.kv.nbytes / 1e6:.1f} MB", file=sys.stderr)
    if backend:
        engine.attach(backend, backends.label(arguments.storage), arguments.storage_mbps,
                      partial(backends.said, url=arguments.storage, config=config))
    print(f"L3, storage: {engine.storage.name if backend else 'none'}; L2 is reached over a {engine.load_link}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    app.main(__doc__, "07_tiered_storage", add_arguments, make_engine, demo, fill=fill)
