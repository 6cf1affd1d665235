"""Chapter 07's engine: three tiers under one radix tree, with a dictionary of prefixes as the tree's yardstick, and the tokens,
keys and values of chapter 01 as the engine's. Storage is a dictionary here, whose every call the test can hold, fail or delay."""
import dataclasses
import errno
import gc
import itertools
import json
import os
import random
import signal
import struct
import subprocess
import threading
import time
import types
import weakref
import zlib
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from legacy import backends
from legacy import link as links
from legacy.app import BadRequest, HungUp
from legacy.tests.conftest import ROOT, chapter, make_engine, write_model
from legacy.tests.test_cli import run
from legacy.tests.test_offload import HeldLink, log_layers
from legacy.tests.test_paged import ids, in_threads, until

baseline, paged, offload, tiered = (chapter(name) for name in (
    "01_baseline", "02_paged_kv", "03_cpu_offload", "07_tiered_storage"))
NAN, INF = float("nan"), float("inf")
PROMPT = ids(1, 26)                # six whole pages of four, and two tokens
LONG = PROMPT + ids(2, 20)         # eleven whole pages, and two tokens
LAYOUTS, POLICIES = tiered.LAYOUTS, tiered.WRITE_POLICIES


# Helpers ----------------------------------------------------------------------------------------------------------

class Shelf:
    """A back end in a dictionary that does what the test says: holds calls of a kind, allows some of them, has them fail."""

    def __init__(self, pages: dict | None = None):
        self.pages = {} if pages is None else pages
        self.allowed, self.fails, self.calls, self.waiting, self.closed = {}, set(), [], Counter(), 0
        self.changed = threading.Condition()

    def enter(self, kind: str, key: str):
        with self.changed:
            self.calls.append((kind, key))
            self.waiting[kind] += 1
            self.changed.wait_for(lambda: self.allowed.get(kind, 1) > 0)
            self.waiting[kind] -= 1
            if kind in self.allowed:
                self.allowed[kind] -= 1
            if kind in self.fails:
                raise OSError("injected")

    def get(self, key):
        self.enter("get", key)
        return self.pages.get(key)

    def exists(self, key):
        self.enter("exists", key)
        return key in self.pages

    def set(self, key, value):
        self.enter("set", key)
        self.pages[key] = bytes(value)

    def close(self):
        self.closed += 1

    def hold(self, *kinds):
        with self.changed:
            self.allowed.update(dict.fromkeys(kinds, 0))

    def allow(self, kind: str, count: float = INF):
        with self.changed:
            self.allowed[kind] += count
            self.changed.notify_all()

    def asked(self, kind: str) -> list[str]:
        return [key for called, key in list(self.calls) if called == kind]


def build(base, link=HeldLink, worth: bool = True, storage=None, **options):
    """An engine on which loading is always faster than computing, unless not `worth`, and which waits for storage to the end."""
    options = {"blocks": 64, "block_size": 4, "cpu_blocks": 64, "bytes_per_second": 1e12, "prefetch_threshold": 4,
               "prefetch_policy": "wait_complete", **options}
    with mock.patch.object(offload, "Link", link):
        engine = tiered.Engine(base.model, base.tokenizer, base.end_tokens, **options)
    if worth:
        engine.seconds_to_load = lambda pages, behind=None: 1e-6 * pages
        engine.seconds_to_compute = lambda start, end: 1e6 * (end - start)
    if storage is not None:
        engine.attach(storage, "shelf")
    for pool in (engine.pool, engine.host):
        pool.kv.fill_(NAN)
    return engine


@pytest.fixture
def shelf():
    """shelf(pages) -> a Shelf; what it holds goes on when the test is over."""
    shelves = []

    def new(*arguments):
        shelves.append(Shelf(*arguments))
        return shelves[-1]
    yield new
    for one in shelves:
        one.fails.clear()
        for kind in one.allowed:
            one.allow(kind)


@pytest.fixture
def make(tiny_engine, shelf):
    """make(link, worth, storage, blocks=..., ...) -> an engine on the tiny model; its threads end with the test."""
    engines = []

    def engine(*arguments, base=tiny_engine, **options):
        engines.append(build(base, *arguments, **options))
        return engines[-1]
    yield engine
    for one in engines:
        one.close()
        if one.storage and isinstance(one.storage.backend, Shelf):
            one.storage.backend.fails.clear()
            for kind in one.storage.backend.allowed:
                one.storage.backend.allow(kind)
        if one.storage:
            one.finalizer()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Storage is not taken for silent because this machine is busy; tests in which it is say so."""
    monkeypatch.setattr(tiered, "PATIENCE", 1e9)


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def right(tiny_engine, known):
    """right(prompt, max_tokens=8) -> the tokens of chapter 01."""
    alone = baseline.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens)

    def tokens(prompt, max_tokens=8):
        if len(known.get(tuple(prompt), (0, []))[1]) < max_tokens and known.get(tuple(prompt), (0,))[0] < max_tokens:
            known[tuple(prompt)] = max_tokens, alone.generate(prompt=list(prompt), max_tokens=max_tokens).tokens
        return known[tuple(prompt)][1][:max_tokens]                             # greedy: fewer are the beginning of more
    return tokens


def check(engine):
    with engine.stepping:
        engine.check_integrity()


def steps(engine, count: int = 0):
    """So many steps, or until all is answered; one that never is fails."""
    deadline = time.monotonic() + 30
    for number in itertools.count(1):
        more = engine.step()
        check(engine)
        if not more or number == count:
            return
        assert time.monotonic() < deadline, "there is always more to do"


def stepped_until(engine, condition):
    """Steps until this is so."""
    deadline = time.monotonic() + 30
    while not condition():
        engine.step()
        check(engine)
        assert time.monotonic() < deadline


def accounted(engine):
    """Nothing is on its way, and nobody holds a slot."""
    engine.flush(60)
    check(engine)
    for pool in (engine.pool, engine.host):
        assert not any(pool.references) and pool.available == pool.size
    assert not (engine.swaps or engine.prefetches or engine.writes or engine.arriving)


def answered(engine, *requests) -> list[list[int]]:
    steps(engine)
    accounted(engine)
    for request in requests:
        if isinstance(request.outcome, Exception):
            raise request.outcome
    return [request.outcome.tokens for request in requests]


def asked(engine, prompt, **fields):
    """One request with nobody else around, answered, and all written that is to be -> the request."""
    request, = engine.submit(prompt, **{"max_tokens": 8, **fields})
    answered(engine, request)
    return request


def lose(engine, *pools):
    """These tiers evict all that they have; by default both."""
    with engine.stepping:
        for pool in pools or (engine.pool, engine.host):
            while (leaf := next(pool.leaves(), None)) is not None:
                pool.evict_node(leaf)


def find(engine, tokens, salt: str = "") -> list:
    """-> for each whole page of these tokens its node and its number in it; None: nowhere. Splits nothing."""
    data, size, found = tiered.as_bytes(tokens[:len(tokens) // 4 * 4]), engine.tree.id_bytes, []
    node = engine.tree.root(salt)
    while node and (child := node.children.get(data[len(found) * size:][:size])):
        for index in range(len(child.tokens) // size):
            if data[len(found) * size:][:size] != child.tokens[index * size:][:size]:
                node = None
                break
            found.append((child, index))
        node = node and child
    return found + [None] * (len(data) // size - len(found))


def where(engine, tokens, salt: str = "") -> str:
    """One letter a page: d on the device, h in host memory, b in both, - nowhere."""
    return "".join("-" if not page else "-dhb"[(page[0].device is not None) + 2 * (page[0].host is not None)]
                   for page in find(engine, tokens, salt))


def page_keys(engine, tokens, salt: str = "") -> list[str]:
    """The keys of these tokens' whole pages: chapter 02's chain."""
    return [key.hex() for key in engine.tree.chain(
        engine.tree.root(salt).keys[-1], tiered.as_bytes(tokens[:len(tokens) // 4 * 4]))]


def device_kv(engine, tokens):
    """[L, 2, pages, page_size, KVH, hd] of the whole pages of these tokens."""
    return engine.pool.kv[:, :, [node.device[index] for node, index in find(engine, tokens)]].clone()


def host_kv(engine, tokens):
    return engine.host.kv[[node.host[index] for node, index in find(engine, tokens)]].movedim(0, 2).clone()


def damage(engine, base) -> float:
    """The largest difference between what both tiers hold and what chapter 01 computes for the same tokens."""
    worst, known = 0.0, []
    nodes = [(b"".join(above.tokens for above in engine.tree.path(node)), node) for node in engine.tree.nodes()]
    for data, node in sorted(nodes, key=lambda entry: -len(entry[0])):
        reference = next((numbers for longer, numbers in known if longer.startswith(data)), None)
        if reference is None:
            tokens = list(struct.unpack(f"<{len(data) // 4}i", data))
            cache = baseline.KVCache(base.model.config, len(tokens), base.model.dtype, base.model.device)
            base.forward(cache, tokens, 0)
            reference = torch.stack((cache.k, cache.v), 1).transpose(2, 3)      # [L, 2, T, KVH, hd]
            known.append((data, reference))
        own = reference[:, :, (len(data) - len(node.tokens)) // 4:len(data) // 4]
        pages = engine.tree.pages(node)
        for kv in ([engine.pool.kv[:, :, node.device]] if node.device and node.device[0] not in engine.arriving else []) + (
                [engine.host.kv[node.host].movedim(0, 2)] if node.host else []):
            difference = float((kv - own.unflatten(2, (pages, -1))).abs().max())
            worst = INF if difference != difference else max(worst, difference)
    return worst


def filled(engine, shelf_, *prompts):
    """Another engine has answered these, and storage has them -> storage's pages."""
    other = build(engine, storage=shelf_, write_policy="write_through", layout=engine.host.layout,
                  block_size=engine.pool.block_size, blocks=200, cpu_blocks=200)
    for prompt in prompts:
        asked(other, prompt, max_tokens=1)
    other.finalizer()
    return dict(shelf_.pages)


# 1. The tree ------------------------------------------------------------------------------------------------------

CONTENTS = ((5, 5), (5, 6), (6, 5))                             # of pages of two tokens
RUNS = st.one_of(st.integers(1, 6).map(lambda end: [0] * end), st.integers(1, 6).map(lambda end: [0, 0, 0, 1, 2, 0][:end]),
                 st.lists(st.integers(0, 2), min_size=1, max_size=6))
SALTS = st.sampled_from(["", "", "", "a"])


def lies(pages, node):
    """The places of the node in this tier, or None."""
    return node.device if isinstance(pages, tiered.DevicePages) else node.host


class Tree(RuleBasedStateMachine):
    """What is inserted, found, split, copied, evicted and removed, against two dictionaries of prefixes."""
    base, happened = None, Counter()

    @initialize(device=st.integers(6, 30), host=st.integers(4, 30))
    def plant(self, device, host):
        model = self.base.model
        self.pool = tiered.DevicePages(model.config, device, 2, model.dtype, model.device)
        self.host = tiered.HostPages(model.config, host, 2, model.dtype, model.device, "page_first_direct")
        self.tree = tiered.HiRadixTree(self.pool, self.host, "namespace")
        self.lies = {self.pool: {}, self.host: {}}              # (salt, contents of all pages up to it) -> page
        self.used, self.now = {self.pool: {}, self.host: {}}, 0 # page -> when it was last released or touched
        self.tables, self.jobs = [], []                         # pages that somebody holds; (kind, job, its pages as they were)

    def nth(self, number) -> list:
        nodes = list(self.tree.nodes())
        return [nodes[number % len(nodes)]] if nodes else []

    def tokens(self, run) -> bytes:
        return tiered.as_bytes([token for content in run for token in CONTENTS[content]])

    def use(self, pages, places):
        for place in reversed(places):
            self.now += 1
            self.used[pages][place] = self.now

    def keys(self, salt, run):
        return [(salt, tuple(run[:end])) for end in range(1, len(run) + 1)]

    def known(self, key) -> bool:
        return key in self.lies[self.pool] or key in self.lies[self.host]

    def run_of(self, node) -> tuple:
        data = b"".join(above.tokens for above in self.tree.path(node))
        pairs = struct.iter_unpack("<2i", data)
        return tuple(CONTENTS.index(pair) for pair in pairs)

    def salt_of(self, node) -> str:
        while node.parent is not None:
            node = node.parent
        return next(salt for salt in ("", "a") if self.tree.root(salt) is node)

    def own_keys(self, node):
        return self.keys(self.salt_of(node), self.run_of(node))[-self.tree.pages(node):]

    def is_leaf(self, pages, node) -> bool:
        return lies(pages, node) is not None and all(lies(pages, child) is None for child in node.children.values())

    def leaf_behind(self, pages, node):
        while not self.is_leaf(pages, node):
            node = next(child for child in node.children.values() if lies(pages, child) is not None)
        return node

    def drop(self, salt, run):
        for lie in self.lies.values():
            for key in [key for key in lie if key[0] == salt and key[1][:len(run)] == run]:
                del lie[key]

    @rule(salt=SALTS, run=RUNS, keep=st.booleans())
    def insert(self, salt, run, keep):
        pool, lie = self.pool, self.lies[self.pool]
        if len(pool.free) < len(run):
            return
        own, keys = pool.allocate(len(run)), self.keys(salt, run)
        new_pages = sum(not self.known(key) for key in keys)
        found, new = self.tree.insert(salt, self.tokens(run), own)
        assert found == [lie.get(key, page) for key, page in zip(keys, own)]
        assert sum(map(self.tree.pages, new)) == new_pages
        lie.update(zip(keys, found))
        for page in found:
            pool.share(page)
        pool.release(own)
        self.use(pool, own)
        if keep:
            self.tables.append((pool, found))
        else:
            pool.release(found)
            self.use(pool, found)

    @rule(salt=SALTS, run=RUNS, start=st.integers(0, 5))
    def insert_host(self, salt, run, start):
        host, lie, keys = self.host, self.lies[self.host], self.keys(salt, run)
        if len(host.free) < len(run) - start or start >= len(run):
            return
        places = host.allocate(len(run) - start)
        whole = all(map(self.known, keys[:start]))
        leaving = {key for kind, job, _ in self.jobs if kind == "leaving" for node in job.nodes if node.parent
                   for key in self.own_keys(node)}
        expected = {key: place for key, place in zip(keys[start:], places) if whole and key not in lie and key not in leaving}
        taken = self.tree.insert_host(salt, self.tokens(run), start, places)
        assert [key for node in taken for key in self.own_keys(node)] == list(expected)
        lie.update(expected)
        host.release(places)
        self.use(host, places)
        self.happened["gap"] += not whole

    @rule(salt=SALTS, run=RUNS, more=st.sampled_from([b"", b"\5\0\0\0", b"\5\0"]), touch=st.booleans())
    def find(self, salt, run, more, touch):
        self.match(salt, run, more, touch)

    def match(self, salt, run, more, touch):
        before = self.tree.size
        path, keys = self.tree.match(salt, self.tokens(run) + more), self.keys(salt, run)
        common = next((number for number, key in enumerate(keys) if not self.known(key)), len(keys))
        assert sum(map(self.tree.pages, path)) == common
        tiers = ["d" if node.device is not None else "h" for node in path]
        assert tiers == sorted(tiers)                           # the device's part, then the host's
        at = 0
        for node in path:
            for pages, lie in ((self.pool, node.device), (self.host, node.host)):
                own = [self.lies[pages].get(key) for key in keys[at:at + self.tree.pages(node)]]
                assert own == (lie or [None] * len(own))
            at += self.tree.pages(node)
        assert not path or self.tree.path(path[-1]) == path
        self.happened["split"] += self.tree.size > before
        self.happened["split under way"] += self.tree.size > before and bool(path[-1].leaving or path[-1].writing)
        if touch:
            self.tree.touch(path)
            for node in reversed(path):
                for pages, lie in ((self.pool, node.device), (self.host, node.host)):
                    self.use(pages, lie or [])

    @rule(number=st.integers(0, 30), cut=st.integers(0, 5), touch=st.booleans())
    def match_a_part(self, number, cut, touch):
        """What ends inside of a node."""
        if nodes := self.nth(number):
            run = self.run_of(nodes[0])
            self.match(self.salt_of(nodes[0]), run[:max(1, len(run) - cut)], b"", touch)

    @rule(on_device=st.booleans())
    def evict(self, on_device):
        pages = self.pool if on_device else self.host
        lie = self.lies[pages]
        leaves = [node for node in self.tree.nodes() if self.is_leaf(pages, node)
                  and all(pages.references[lie[key]] == 0 for key in self.own_keys(node))]
        assert set(pages.leaves()) == set(leaves)               # leaves, and never what somebody holds
        if not leaves:
            return
        victim = next(pages.leaves())
        order = sorted((place for place in lie.values() if not pages.references[place]), key=self.used[pages].get)
        behind = (self.leaf_behind(pages, pages.prefixes[place]) for place in order)
        assert victim is next(leaf for leaf in behind if leaf in leaves)        # behind the least recently used of all
        salt, run, keys, free = self.salt_of(victim), self.run_of(victim), self.own_keys(victim), len(pages.free)
        pages.evict()
        assert len(pages.free) == free + len(keys)
        for key in keys:
            del lie[key]
        if not any(map(self.known, keys)):
            self.drop(salt, run[:len(run) - len(keys) + 1])
            self.happened["evicted from the last tier"] += 1

    @rule(number=st.integers(0, 60))
    def remove(self, number):
        if number < 20 and (nodes := self.nth(number)):
            salt, run, count = self.salt_of(nodes[0]), self.run_of(nodes[0]), self.tree.pages(nodes[0])
            self.tree.remove(nodes[0])
            self.drop(salt, run[:len(run) - count + 1])

    @rule(number=st.integers(0, 30), hits=st.integers(1, 9), kind=st.sampled_from(["leaving", "writing"]))
    def begin(self, number, hits, kind):
        """A node is copied down."""
        node, = self.nth(number) or [None]
        if node is None or getattr(node, kind) or kind == "writing" and node.host is None or kind == "leaving" and (
                node.device is None or node.host is not None):
            return
        node.hits, node.stored = hits, hits + 10
        pages = self.pool if kind == "leaving" else self.host
        places = [page for above in self.tree.path(node) for page in above.device] if kind == "leaving" else list(node.host)
        job = types.SimpleNamespace(nodes=[node], holds=places)
        setattr(node, kind, job)
        for place in places:
            pages.share(place)
        self.tables.append((pages, places))
        self.jobs.append((kind, job, (node.tokens, list(node.device if kind == "leaving" else node.host), hits)))

    @rule(seed=st.integers(0, 1 << 32))
    def many(self, seed):
        """Much of everything: by itself Hypothesis does little of each."""
        rng = random.Random(seed)
        for _ in range(20):
            salt, run = rng.choice(("", "", "", "a")), rng.choices(range(3), (6, 1, 1), k=rng.randint(1, 6))
            number, touch = rng.randrange(30), rng.random() < 0.6
            match rng.randrange(9):
                case 0:
                    self.insert(salt, run, keep=rng.random() < 0.3)
                case 1:
                    self.insert_host(salt, run, rng.randrange(3))
                case 2:
                    self.match(salt, run, b"", touch)
                case 3:
                    self.match_a_part(number, rng.randrange(6), touch)
                case 4:
                    self.evict(rng.random() < 0.5)
                case 5:
                    self.begin(number, rng.randint(1, 9), rng.choice(("leaving", "writing")))
                case 6 if self.jobs and touch:
                    self.end()
                case 7 if len(self.tables) > len(self.jobs) + 1:
                    self.let_go()
                case 8:
                    self.name(number)
            self.whole()

    @precondition(lambda self: self.jobs)
    @rule()
    def end(self):
        kind, job, (tokens, places, hits) = self.jobs.pop(0)
        assert b"".join(node.tokens for node in job.nodes) == tokens            # it and its parts, in order
        if all(node.parent for node in job.nodes):
            own = [place for node in job.nodes for place in (node.device if kind == "leaving" else node.host)]
            assert own == places
            assert all(getattr(node, kind) is job and node.hits == hits for node in job.nodes) or len(job.nodes) == 1
        for node in job.nodes:
            setattr(node, kind, None)

    @precondition(lambda self: len(self.tables) > len(self.jobs) + 1)
    @rule()
    def let_go(self):
        """Of what nobody copies: that stays held until it is done."""
        copied = [id(job.holds) for _, job, _ in self.jobs]
        oldest = next(index for index, (_, table) in enumerate(self.tables) if id(table) not in copied)
        pages, table = self.tables.pop(oldest)
        pages.release(table)
        self.use(pages, table)

    @rule(number=st.integers(0, 30))
    def name(self, number):
        """The keys of a node's pages are those of chapter 02's chain."""
        if nodes := self.nth(number):
            prefixes = paged.Prefixes("namespace")
            chain = [prefixes.salted(self.salt_of(nodes[0]))]
            for content in self.run_of(nodes[0]):
                chain.append(prefixes.extend(chain[-1], list(CONTENTS[content])))
            assert self.tree.keys(nodes[0]) == [prefix.key for prefix in chain[-self.tree.pages(nodes[0]):]]

    @invariant()
    def whole(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        for pages in (self.pool, self.host):
            pages.check_integrity([table for held, table in self.tables if held is pages])
            lie = {key: place for node in self.tree.nodes()
                   for key, place in zip(self.own_keys(node), (node.device if pages is self.pool else node.host) or ())}
            assert lie == self.lies[pages]


def any_tree(base, examples: int):
    Tree.base = base
    run_state_machine_as_test(Tree, settings=settings(
        max_examples=examples, stateful_step_count=50, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))


def test_the_tree_does_what_two_dictionaries_of_prefixes_do(tiny_engine):
    Tree.happened.clear()
    any_tree(tiny_engine, 60)
    expected = ("split", "split under way", "gap", "evicted from the last tier")
    assert all(Tree.happened[what] >= 3 for what in expected), Tree.happened


def forgetting(*names):
    """Split, and leave these with the back half alone."""
    def split(tree, node, at, plain=tiered.HiRadixTree.split):
        kept = {name: getattr(node, name) for name in names}
        front = plain(tree, node, at)
        for name in names:
            if name in ("leaving", "writing"):
                setattr(front, name, None)
                if kept[name]:
                    kept[name].nodes.remove(front)
            else:
                setattr(node, name, kept[name])
        return front
    return split


BROKEN = {
    "a split does not divide what is on the device": ("split", forgetting("device")),
    "a split does not divide what is in host memory": ("split", forgetting("host")),
    "a split does not divide the keys": ("split", forgetting("keys")),
    "a split forgets a copy that is under way": ("split", forgetting("leaving")),
    "a split forgets a write that is under way": ("split", forgetting("writing")),
    "a node is taken for the whole of what it has a part of": ("common", lambda tree, node, tokens, at: len(node.tokens)),
    "salts are ignored": ("root", lambda tree, salt, plain=tiered.HiRadixTree.root: plain(tree, "")),
    "what is touched stays where it is": ("touch", lambda tree, path: None),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_tree_is_noticed(tiny_engine, monkeypatch, broken):
    monkeypatch.setattr(tiered.HiRadixTree, *BROKEN[broken])
    with pytest.raises((AssertionError, AttributeError, IndexError, KeyError, ValueError, StopIteration)):
        any_tree(tiny_engine, 60)


def test_evicting_what_has_others_behind_it_is_noticed(tiny_engine, monkeypatch):
    monkeypatch.setattr(tiered.PagePool, "leaves", lambda tier: iter(dict.fromkeys(tier.prefixes[page] for page in tier.cached)))
    with pytest.raises((AssertionError, KeyError)):
        any_tree(tiny_engine, 60)


def test_a_split_gives_both_halves_hits_storage_keys_and_the_copies_under_way(make):
    engine = make()
    asked(engine, PROMPT, max_tokens=1)
    node, = engine.tree.nodes()
    keys, device, host = list(engine.tree.keys(node)), list(node.device), list(node.host)
    node.hits, node.stored, node.tried = 5, 77, True
    node.leaving, node.writing = leaving, writing = types.SimpleNamespace(nodes=[node]), types.SimpleNamespace(nodes=[node])
    front, = engine.tree.match("", tiered.as_bytes(PROMPT[:10]))                # ends inside of the third page
    assert (engine.tree.pages(front), engine.tree.pages(node), engine.tree.size) == (2, 4, 2)
    assert (front.keys, front.device, front.host) == (keys[:2], device[:2], host[:2])
    assert (node.keys, node.device, node.host) == (keys[2:], device[2:], host[2:])
    for half in (front, node):
        assert (half.hits, half.stored, half.tried, half.leaving, half.writing) == (5, 77, True, leaving, writing)
    assert leaving.nodes == writing.nodes == [front, node]
    middle, = engine.tree.match("", tiered.as_bytes(PROMPT[:4]))
    assert leaving.nodes == writing.nodes == [middle, front, node]
    for half in leaving.nodes:
        half.leaving = half.writing = None
    engine.tree.check_integrity()


def forget_the_copy(engine):
    engine.swaps[0].nodes[0].leaving = None


def forget_the_write(engine):
    engine.writes[0].nodes[0].writing = None


def forget_whom_it_concerns(engine):
    engine.swaps[0].nodes.clear()


def forget_what_arrives(engine):
    engine.arriving.clear()


@pytest.mark.parametrize("way,broken", [("out", forget_the_copy), ("out", forget_whom_it_concerns), ("down", forget_the_write),
                                        ("in", forget_what_arrives)])
def test_a_copy_under_way_that_the_engine_has_lost_sight_of_is_noticed(make, shelf, way, broken):
    storage = shelf()
    engine = make(storage=storage)
    if way == "down":
        storage.hold("set")
        engine.submit(PROMPT, max_tokens=1)
        stepped_until(engine, lambda: engine.writes and storage.waiting["set"])
    elif way == "out":
        engine.save_link.held = True
        engine.submit(PROMPT, max_tokens=1)
        stepped_until(engine, lambda: engine.swaps)
    else:
        asked(engine, PROMPT)
        lose(engine, engine.pool)
        engine.load_link.held = True
        engine.submit(ids(9, 2), max_tokens=40)                 # with somebody else around, the request waits outside
        engine.submit(PROMPT, max_tokens=1)
        stepped_until(engine, lambda: engine.swaps)
    broken(engine)
    with pytest.raises(AssertionError, match=None if way == "in" else "a copy is not what the node says"):
        engine.check_integrity()


@pytest.mark.parametrize("salt", ["", "tenant", "größe"])
def test_pages_are_named_by_chapter_02s_chain(make, shelf, salt):
    storage = shelf()
    engine = make(storage=storage)
    asked(engine, PROMPT, cache_salt=salt, max_tokens=1)
    key, expected = None, []
    namespace = f"{engine.model.digest.hex()} {engine.model.dtype} 4 kv page_first_direct"
    key = paged.Prefixes(namespace).salted(salt).key
    for at in range(0, 24, 4):
        key = paged.block_key(key, PROMPT[at:at + 4])
        expected.append(key.hex())
    assert sorted(storage.pages) == sorted(expected) == sorted(page_keys(engine, PROMPT, salt))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_leaves_go_first_and_of_them_the_least_recently_used_and_what_is_held_never(make, tier):
    engine = make()
    pool = engine.pool if tier == "device" else engine.host
    stem, branches = ids(1, 8), [ids(10 + number, 9) for number in range(3)]
    for branch in branches:
        asked(engine, stem + branch, max_tokens=1)
    leaves = [find(engine, stem + branch)[-1][0] for branch in branches]
    engine.tree.touch(engine.tree.match("", tiered.as_bytes(stem + branches[0])))
    for place in getattr(leaves[1], tier) + getattr(leaves[1].parent, tier) * (tier == "device"):
        pool.share(place)                                                       # somebody needs the second
    order = []
    while (node := next(pool.leaves(), None)) is not None:
        order.append(node)
        pool.evict()
    assert order == [leaves[2], leaves[0]]                                      # the stem is before the second, and stays
    assert getattr(leaves[1], tier) and getattr(leaves[1].parent, tier)


def test_salts_and_engines_of_other_tokens_share_nothing(make, right):
    engine = make()
    for salt in ("", "a", "b"):
        assert asked(engine, PROMPT, cache_salt=salt).source == "miss"
    assert asked(engine, PROMPT, cache_salt="a").source == "gpu_hit"
    lose(engine)
    assert not engine.tree.roots and engine.tree.size == 0


# 2. Host memory ---------------------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def host_pages(base, layout, dtype="float32", heads=2, pages=5):
    config = dataclasses.replace(base.model.config, num_key_value_heads=heads)
    host = tiered.HostPages(config, pages, 4, DTYPES[dtype], torch.device("cpu"), layout)
    generator = torch.Generator().manual_seed(3)
    host.kv.copy_(torch.randn(host.kv.shape, generator=generator))
    return host


def integers(kv):
    return kv.view({2: torch.int16, 4: torch.int32}[kv.itemsize])


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_becomes_a_value_and_the_same_page_again(tiny_engine, layout, dtype, heads):
    host, tokens = host_pages(tiny_engine, layout, dtype, heads), tiered.as_bytes([1, 256, 2**31 - 1, 7])
    config = tiny_engine.model.config
    assert host.kv.shape == (5, 3, 2, 4, heads, config.head_dim) and host.kv.dtype == DTYPES[dtype]
    before = integers(host.kv).clone()
    value = bytes(host.value(2, tokens))
    body = 4 * 3 * 2 * heads * config.head_dim * host.kv.itemsize
    assert host.header_bytes == 64 and len(value) == host.page_bytes == 64 + body
    # The header: what it is, a checksum of the tokens and what follows, the tokens, and zeros
    assert value[:8] == b"KV page1" and value[12:28] == tokens and value[28:64] == bytes(36)
    assert value[8:12] == zlib.crc32(tokens + value[64:]).to_bytes(4, "little")
    # What follows is K and V, as the layout has them
    page = host.kv[2].transpose(0, 2).transpose(1, 2) if layout == "page_first" else host.kv[2]
    assert value[64:] == integers(page.contiguous()).numpy().tobytes()
    assert torch.equal(integers(host.kv), before)                               # and nothing else has changed
    for given in (value, bytearray(value), memoryview(value)):
        host.kv[3] = NAN
        assert host.fill(3, tokens, given)
        assert torch.equal(integers(host.kv[3]), before[2])
    before[3] = before[2]
    assert torch.equal(integers(host.kv), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_value_is_refused_and_the_place_is_as_it_was(tiny_engine, layout, dtype):
    host, tokens = host_pages(tiny_engine, layout, dtype), tiered.as_bytes([3, 1, 4, 1])
    value = bytes(host.value(1, tokens))
    host.kv[4] = 7.0
    memory = host.kv.clone() if layout == "layer_first" else host.rows.clone()
    rng = random.Random(5)
    damaged = [b"", value[:-1], value + b"\0", value[:64], b"KV page2" + value[8:], bytes(len(value))]
    for at in {*range(28), *range(64, 70), len(value) - 1, *(rng.randrange(64, len(value)) for _ in range(150))}:
        flipped = bytearray(value)
        flipped[at] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for one in damaged:
        assert not host.fill(4, tokens, one)
    assert not host.fill(4, tiered.as_bytes([3, 1, 4, 2]), value)
    assert torch.equal(integers(host.kv if layout == "layer_first" else host.rows), integers(memory))
    padding = bytearray(value)
    padding[40] ^= 1                                                            # says nothing; then it must not change K and V
    assert not host.fill(4, tokens, padding) or torch.equal(integers(host.kv[4]), integers(host.kv[1]))
    assert host.fill(4, tokens, value) and torch.equal(integers(host.kv[4]), integers(host.kv[1]))


def test_without_the_checksum_a_flipped_bit_is_used(tiny_engine, monkeypatch):
    host, tokens = host_pages(tiny_engine, "page_first"), tiered.as_bytes([3, 1, 4, 1])
    monkeypatch.setattr(tiered, "zlib", types.SimpleNamespace(crc32=lambda data, start=0: 1))
    value = bytearray(host.value(1, tokens))
    value[100] ^= 1
    assert host.fill(4, tokens, value) and not torch.equal(integers(host.kv[4]), integers(host.kv[1]))


@pytest.mark.parametrize("layout, copies", [
    ("layer_first", dict(layer_copies=2, layer_copy_bytes=5 * 4 * 128, storage_copies=6, storage_copy_bytes=4 * 128)),
    ("page_first", dict(layer_copies=2 * 5 * 4, layer_copy_bytes=128, storage_copies=1, storage_copy_bytes=64 + 6 * 4 * 128)),
    ("page_first_direct", dict(layer_copies=2 * 5, layer_copy_bytes=4 * 128, storage_copies=1,
                               storage_copy_bytes=64 + 6 * 4 * 128))])
def test_the_copies_that_a_layout_causes_are_counted(tiny_engine, layout, copies):
    assert host_pages(tiny_engine, layout, pages=10).copies(5) == copies


@pytest.fixture(scope="module")
def bases(tmp_path_factory, tiny_engine):
    """(dtype, KV heads) -> chapter 01's engine on such a model, made once."""
    folders, made = tmp_path_factory.mktemp("heads"), {("float32", 2): tiny_engine}

    def base(dtype="float32", heads=2):
        folder = folders / str(heads)
        if not folder.exists():
            write_model(folder, num_key_value_heads=heads)
        if (dtype, heads) not in made:
            made[dtype, heads] = make_engine(folder, dtype)
        return made[dtype, heads]
    return base


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_goes_down_comes_back_bit_by_bit(make, shelf, bases, layout, dtype, heads):
    base, storage = bases(dtype, heads), shelf()
    engine = make(links.Link, storage=storage, base=base, layout=layout)
    first = asked(engine, PROMPT)
    computed = device_kv(engine, PROMPT)
    assert torch.equal(computed, host_kv(engine, PROMPT)) and len(storage.pages) >= 6
    lose(engine, engine.pool)
    engine.pool.kv.fill_(NAN)
    again = asked(engine, PROMPT)
    assert again.source == "cpu_hit" and torch.equal(device_kv(engine, PROMPT), computed)
    lose(engine)
    for pool in (engine.pool, engine.host):
        pool.kv.fill_(NAN)
    third = asked(engine, PROMPT)
    assert third.source == "storage_hit" and torch.equal(device_kv(engine, PROMPT), computed)
    assert torch.equal(host_kv(engine, PROMPT), computed)
    assert first.outcome.tokens == again.outcome.tokens == third.outcome.tokens == (
        base.generate(prompt=PROMPT, max_tokens=8).tokens)


# 3. Where a prefix comes from -------------------------------------------------------------------------------------

def evicted(engine, pool, count):
    """The tree is split behind `count` pages, and what follows leaves this tier."""
    engine.tree.match("", tiered.as_bytes(PROMPT[:4 * count]))
    node = find(engine, PROMPT)[count][0]
    if lies(pool, node):
        for child in list(node.children.values()):
            if lies(pool, child):
                engine.tree.evict(child, pool)
        engine.tree.evict(node, pool)


WHERE = {                          # what is lost -> the source; pages of the prompt on the device, in host memory, in storage
    "nothing": (lambda engine: None, "gpu_hit", 6, 0, 0),
    "the device": (lambda engine: lose(engine, engine.pool), "cpu_hit", 0, 6, 0),
    "the host": (lambda engine: lose(engine, engine.host), "gpu_hit", 6, 0, 0),
    "both": (lambda engine: lose(engine), "storage_hit", 0, 0, 6),
    "the device's end": (lambda engine: evicted(engine, engine.pool, 4), "mixed", 4, 2, 0),
    "both ends": (lambda engine: (evicted(engine, engine.pool, 2), evicted(engine, engine.host, 4)), "mixed", 2, 2, 2),
    "the device, the host's end": (lambda engine: (lose(engine, engine.pool), evicted(engine, engine.host, 1)), "mixed", 0, 1, 5),
    "the end everywhere": (lambda engine: [evicted(engine, pool, 3) for pool in (engine.pool, engine.host)] + [
        engine.storage.backend.pages.pop(key, None) for key in page_keys(engine, PROMPT)[3:]], "gpu_hit", 3, 0, 0),
    "all": (lambda engine: (lose(engine), engine.storage.backend.pages.clear()), "miss", 0, 0, 0),
}


@pytest.mark.parametrize("lost", WHERE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_comes_from_where_it_is_and_says_so(make, shelf, right, lost, layout):
    lose_it, source, *found = WHERE[lost]
    engine = make(storage=shelf(), layout=layout)
    first = asked(engine, PROMPT)
    assert first.source == "miss" and first.outcome.pages == dict(gpu_hits=0, cpu_hits=0, storage_hits=0, misses=7)
    computed, counted = device_kv(engine, PROMPT), Counter(engine.counts)
    lose_it(engine)
    engine.check_integrity()
    request = asked(engine, PROMPT)
    result, counted = request.outcome, Counter(engine.counts) - counted
    assert result.tokens == first.outcome.tokens == right(PROMPT) and result.source == source
    expected = dict(zip(("gpu_hits", "cpu_hits", "storage_hits"), found), misses=7 - sum(found))
    assert result.pages == expected and sum(result.pages.values()) == 7
    assert {what: counted[what] for what in expected} == expected
    assert result.usage["cached_tokens"] == request.cached_tokens == 4 * sum(found)
    assert (result.choice is None) == (found[1] + found[2] == 0)
    assert result.prefetch is None or result.prefetch["fetched_tokens"] == 4 * found[2]
    assert torch.equal(device_kv(engine, PROMPT)[:, :, :sum(found)], computed[:, :, :sum(found)])
    assert where(engine, PROMPT) == "bbbbbb" or lost == "the host"
    assert all(key in engine.storage.backend.pages for key in page_keys(engine, PROMPT))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prompts_around_the_edge_of_a_page_come_back_with_the_right_tokens(make, shelf, right, page_size):
    engine = make(storage=shelf(), block_size=page_size, blocks=80, cpu_blocks=200, prefetch_threshold=1)
    for length in {1, 2, *range(2 * page_size - 1, 2 * page_size + 2)}:
        prompt = ids(length, length)
        for lost, what in ((), "misses"), ((engine.pool,), "cpu_hits"), ((engine.pool, engine.host), "storage_hits"):
            if lost:
                lose(engine, *lost)
            request = asked(engine, prompt)
            pages = (length - 1) // page_size if what != "misses" else -(-length // page_size)
            assert request.outcome.tokens == right(prompt) and request.outcome.pages[what] == pages


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tier", ["host", "storage"])
def test_a_layer_is_computed_while_the_next_is_on_its_way_if_they_may_overlap(make, shelf, right, monkeypatch, overlap, tier):
    engine = make(storage=shelf(), overlap=overlap)
    asked(engine, PROMPT, max_tokens=1)
    lose(engine, engine.pool, *([engine.host] if tier == "storage" else []))
    engine.load_link.held = True                                # a layer comes when somebody waits for it
    log = log_layers(engine, monkeypatch)
    request, = engine.submit(PROMPT, max_tokens=1)
    while not request.outcome:
        engine.step()
    monkeypatch.undo()
    assert request.outcome.tokens == right(PROMPT, 1) and request.source == {"host": "cpu_hit", "storage": "storage_hit"}[tier]
    by_layer = [event for layer in range(3) for event in (("load", f"layer {layer}"), ("compute", f"layer {layer}"))]
    assert list(dict.fromkeys(log)) == by_layer if overlap else [lane for lane, _ in log][-3:] == ["compute"] * 3
    answered(engine)


def test_the_next_turn_finds_the_answer_too(make, shelf, right):
    engine = make(storage=shelf())
    follow_up = PROMPT + asked(engine, PROMPT, max_tokens=15).outcome.tokens + ids(2, 5)
    lose(engine)
    request = asked(engine, follow_up)
    assert request.outcome.tokens == right(follow_up) and request.outcome.pages["storage_hits"] == (26 + 14) // 4


def test_requests_that_run_together_find_what_is_on_its_way_to_another(make, shelf, right):
    engine = make(storage=shelf())
    asked(engine, PROMPT)
    for lost, pages in ((engine.pool,), 6), ((engine.pool, engine.host), 11):
        lose(engine, *lost)
        together = [engine.submit(PROMPT, max_tokens=8)[0] for _ in range(3)] + [engine.submit(LONG, max_tokens=8)[0]]
        swapped = engine.counts["swap_ins"]
        assert answered(engine, *together) == [right(PROMPT)] * 3 + [right(LONG)]
        assert engine.counts["swap_ins"] - swapped == pages                     # each page once
        assert [request.cached_tokens for request in together] == [24, 24, 24, 4 * pages]


# 4. Prefetch ------------------------------------------------------------------------------------------------------

@pytest.fixture
def stored(make, shelf):
    """stored(*prompts, ...) -> an engine on storage that has these prompts' pages, and that storage."""
    def engine(*prompts, **options):
        storage = shelf()
        own = make(**options)
        filled(own, storage, *prompts or (LONG,))
        storage.calls.clear()
        own.attach(storage, "shelf")
        return own, storage
    return engine


def test_best_effort_does_not_wait(stored, right):
    engine, storage = stored(prefetch_policy="best_effort")
    storage.hold("exists")
    request, = engine.submit(LONG, max_tokens=8)
    steps(engine)
    assert request.outcome.tokens == right(LONG) and request.source == "miss"
    assert request.outcome.prefetch["ended"] == "the device was free" and engine.counts["prefetches_cut"] == 1
    storage.allow("exists")
    accounted(engine)


def test_the_line_may_grow_while_storage_is_asked_for_those_in_it(make, shelf, right):
    engine, others = make(storage=shelf()), []
    begin = engine.begin_prefetch

    def while_another_comes(request):
        if len(others) < 3 and request in engine.waiting:
            others.extend(engine.submit(ids(9, 5 + len(others)), max_tokens=1))
        return begin(request)
    engine.begin_prefetch, engine.max_running = while_another_comes, 2
    requests = [engine.submit(ids(seed, 26), max_tokens=4)[0] for seed in range(1, 6)]
    assert answered(engine, *requests) == [right(ids(seed, 26), 4) for seed in range(1, 6)] and len(others) == 3
    answered(engine, *others)


def test_best_effort_uses_what_came_while_it_was_in_line(stored, right):
    engine, storage = stored(prefetch_policy="best_effort", max_running=1)
    other, = engine.submit(ids(9, 3), max_tokens=20)
    steps(engine, 1)
    late, = engine.submit(LONG, max_tokens=8)
    steps(engine, 1)
    assert engine.prefetches and not late.table                                 # it is in line, and storage is asked
    until(lambda: engine.prefetches[0].hit is not None)
    stepped_until(engine, lambda: not engine.prefetches)
    assert not late.table and where(engine, LONG) == "h" * 11                   # all of it has come meanwhile
    assert answered(engine, other, late) == [right(ids(9, 3), 20), right(LONG)] and late.source == "storage_hit"


def test_wait_complete_waits_to_the_end(stored, right):
    engine, storage = stored(prefetch_policy="wait_complete")
    storage.hold("exists", "get")
    request, = engine.submit(LONG, max_tokens=8)
    other, = engine.submit(ids(9, 3), max_tokens=10)
    stepped_until(engine, lambda: other.outcome)
    assert other.outcome.tokens == right(ids(9, 3), 10) and not request.answer.tokens           # and delays nobody
    storage.allow("exists")
    for number in range(11):
        stepped_until(engine, lambda number=number: len(storage.asked("get")) > number and storage.waiting["get"] == 1)
        steps(engine, 3)
        assert not request.answer.tokens and len(storage.asked("get")) == number + 1
        storage.allow("get", 1)
    assert answered(engine, request) == [right(LONG)] and request.source == "storage_hit"
    assert request.outcome.prefetch["ended"] == "complete" and request.cached_tokens == 44
    assert storage.asked("get") == page_keys(engine, LONG)                      # each once, in order


def test_pages_go_on_to_the_device_while_the_rest_is_read(stored, right):
    engine, storage = stored()
    storage.hold("get")
    request, = engine.submit(LONG, max_tokens=8)
    storage.allow("get", 1)
    stepped_until(engine, lambda: storage.waiting["get"] == 1 and "b" in where(engine, LONG))
    assert request.saved >= 1 and not request.answer.tokens
    storage.allow("get")
    assert answered(engine, request) == [right(LONG)] and request.outcome.pages["storage_hits"] == 11


@pytest.fixture
def clock(monkeypatch):
    """The clock of chapter 07: it stands at clock.now."""
    clock = types.SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(tiered, "time", clock)
    return clock


def held_prefetch(engine, storage, pages, hit=None, **state):
    """A prefetch of so many pages that no thread is at."""
    prefetch = tiered.Prefetch(storage, "", tiered.as_bytes(ids(1, pages * 4)), 0, ["key"] * pages, pages, 1, hit=hit,
                               began=100.0, moved=100.0)
    for name, value in state.items():
        setattr(prefetch, name, value)
    return prefetch


def test_nobody_waits_for_pages_of_anothers_prefetch_that_are_not_of_the_own_prompt(make, shelf):
    engine = make(storage=shelf(), prefetch_policy="wait_complete")
    prefetch = held_prefetch(engine, engine.storage, 8, hit=8, taken=5, arrived=5, places=[0] * 8)
    began = time.perf_counter() + 100                           # so that nothing is silent yet
    assert engine.enough(prefetch, 5, began) == "complete" and engine.enough(prefetch, 6, began) is None


def test_storage_that_is_silent_is_blamed_once_however_many_have_waited(make, shelf):
    engine = make(storage=shelf())
    for request in engine.submit(PROMPT, max_tokens=1, n=3):
        request.prefetch = held_prefetch(engine, engine.storage, 6)
        engine.report(request, 100.0, "silent")
        request.prefetch = None
    assert engine.storage.counts["storage_errors"] == 1 and engine.storage.reading.seconds == tiered.Backoff.FIRST


def test_what_storage_has_is_believed_for_a_while(make, shelf):
    engine = make(storage=shelf())
    asked(engine, PROMPT)
    engine.flush()
    node = next(engine.tree.nodes())
    assert engine.is_stored(node)
    node.checked -= tiered.RECHECK
    assert not engine.is_stored(node) and engine.is_stored(node, INF)


@pytest.mark.parametrize("policy", POLICIES)
def test_under_write_back_a_cached_page_is_not_given_up_for_a_next_token_while_others_go_down(make, policy):
    engine = make(write_policy=policy)
    asked(engine, PROMPT)
    spare = len(engine.pool.free) + (policy != "write_back") * len(engine.pool.cached)
    assert engine.pool.cached and engine.spare_blocks() == spare


def test_the_engines_thread_is_busy_while_something_is_on_its_way(make, shelf):
    engine = make(storage=shelf())
    assert not engine.busy()
    for jobs in (engine.swaps, engine.prefetches, engine.writes):
        jobs.append(None)
        assert engine.busy()
        jobs.clear()
    assert not engine.busy()


@pytest.mark.parametrize("base, per_1k, cap", [
    (1.0, 0.25, 5.0), (0.0, 2.0, 100.0), (0.5, 0.0, 9.0), (3.0, 1.0, 2.0), (1.0, 40.0, 3.0)])
@pytest.mark.parametrize("pages, hit", [(10, None), (600, None), (600, 100), (600, 600)])
def test_the_timeout_grows_with_the_tokens_up_to_a_cap(make, shelf, monkeypatch, clock, base, per_1k, cap, pages, hit):
    engine = make(storage=shelf(), prefetch_policy="timeout", timeout=(base, per_1k, cap))
    monkeypatch.setattr(tiered, "PATIENCE", INF)
    prefetch = held_prefetch(engine, engine.storage, pages, hit)
    seconds = min(cap, base + per_1k * 4 * (pages if hit is None else hit) / 1024)
    for after, ended in ((0.0, None), (seconds * 0.999, None), (seconds * 1.001 + 1e-6, "timeout")):
        clock.now = 100.0 + after
        assert engine.enough(prefetch, 1 << 30, 100.0) == ended
    for policy, ended in (("wait_complete", None), ("best_effort", "the device was free")):
        engine.prefetch_policy = policy
        assert engine.enough(prefetch, 1 << 30, 100.0) == ended


def test_why_nobody_waits_any_longer(make, shelf, monkeypatch, clock):
    engine = make(storage=shelf())
    monkeypatch.setattr(tiered, "PATIENCE", 5.0)
    storage = engine.storage
    for state, ended in (
            (dict(queued=False, hit=0), "not there"), (dict(queued=False, hit=1, least=2), "below the threshold"),
            (dict(queued=False, hit=2, places=[0, 1], arrived=2, taken=2), "complete"),
            (dict(queued=False, hit=2, places=[0, 1], arrived=2, taken=1), None),               # what has arrived is taken first
            (dict(queued=False, hit=0, failed=True), "failed"), (dict(hit=8), None)):
        assert engine.enough(held_prefetch(engine, storage, 8, **state), 1 << 30, 100.0) == ended
    waiting = held_prefetch(engine, storage, 8, 8, at_work=True)
    for moved, began, now, ended in ((100, 100, 104.9, None), (100, 100, 105.1, "silent"), (100, 103, 105.1, None),
                                     (104, 100, 105.1, None), (104, 100, 109.1, "silent")):
        waiting.moved, clock.now = moved, now
        assert engine.enough(waiting, 1 << 30, began) == ended
    storage.times.append((20, 6.0))                                             # a batch takes so long; twice that may pass
    storage.batch, waiting.moved = 20, 100.0
    for now, ended in ((111.9, None), (112.1, "silent")):
        clock.now = now
        assert engine.enough(waiting, 1 << 30, 100.0) == ended
    engine.seconds_to_compute = lambda start, end: (end - start) / 4 * 0.2
    clock.now = 100.0
    assert engine.enough(waiting, 1 << 30, 100.0) == "slower than computing"
    storage.times.clear()
    storage.times.append((20, 2.0))
    assert engine.enough(waiting, 1 << 30, 100.0) is None
    engine.seconds_to_load = lambda pages, behind=None: 0.25 * pages            # the link may be what is slow
    assert engine.enough(waiting, 1 << 30, 100.0) == "slower than computing"


@pytest.mark.parametrize("threshold, ended, pages", [(1, "complete", 6), (24, "complete", 6), (25, "below the threshold", 0),
                                                     (44, "below the threshold", 0), (45, None, 0)])
def test_little_is_not_fetched(stored, right, threshold, ended, pages):
    engine, storage = stored(PROMPT, prefetch_threshold=threshold)
    request = asked(engine, LONG)                                               # eleven whole pages; storage has six of them
    assert request.outcome.tokens == right(LONG) and request.outcome.pages["storage_hits"] == pages
    assert len(storage.asked("get")) == pages
    if ended is None:
        assert request.outcome.prefetch is None and engine.counts["prefetches"] == 0
    else:
        assert request.outcome.prefetch["ended"] == ended and request.outcome.prefetch["hit_tokens"] == 24


@pytest.mark.parametrize("gap, batches", [(6, [4, 4]), (0, [4]), (4, [4, 4]), (3, [4]), (11, [4, 4, 3])])
def test_hits_are_asked_for_in_batches_and_stop_at_the_first_gap(stored, right, monkeypatch, gap, batches):
    monkeypatch.setattr(tiered.Storage, "ASKED", 4)
    engine, storage = stored(LONG)
    seen = []
    storage.batch_exists = lambda keys: seen.append(list(keys)) or [key in storage.pages for key in keys]
    keys = page_keys(engine, LONG)
    if gap < 11:
        del storage.pages[keys[gap]]
    engine.write_policy = "write_back"                                          # which writes, and so asks, nothing now
    request = asked(engine, LONG)
    assert list(map(len, seen)) == batches and [key for batch in seen for key in batch] == keys[:sum(batches)]
    assert request.outcome.tokens == right(LONG) and request.outcome.pages["storage_hits"] == gap
    assert storage.asked("get") == keys[:gap] and engine.storage.counts["storage_looked_for"] == sum(batches)


@pytest.mark.parametrize("damage_it", [
    lambda pages, key: pages.pop(key), lambda pages, key: pages.update({key: pages[key][:-1]}),
    lambda pages, key: pages.update({key: bytes(len(pages[key]))}), lambda pages, key: pages.update({key: b""}),
    lambda pages, key: pages.update({key: 5}), lambda pages, key: pages.update({key: "text"}),
    lambda pages, key: pages.update({key: next(value for other, value in pages.items() if other != key)}),
    lambda pages, key: pages.update({key: pages[key][:200] + b"?" + pages[key][201:]})],
    ids=["gone", "short", "zeros", "empty", "a number", "text", "another page", "a byte"])
@pytest.mark.parametrize("number", [0, 5])
def test_a_partial_hit_is_used_up_to_the_last_page_that_is_right(stored, right, monkeypatch, damage_it, number):
    engine, storage = stored(LONG)
    key, there = page_keys(engine, LONG)[number], set(storage.pages)
    damage_it(storage.pages, key)
    monkeypatch.setattr(storage, "exists", lambda key: key in there)
    reads, next_pages = [], engine.storage.next_pages
    monkeypatch.setattr(engine.storage, "next_pages", lambda prefetch: reads.append(next_pages(prefetch)) or reads[-1])
    request = asked(engine, LONG)
    assert request.outcome.tokens == right(LONG) and request.outcome.prefetch["ended"] == "failed"
    # What came before it in the same read is used; with a value that is no bytes, the reads before (how long they are, time says)
    read, = (read for read in reads if number in read)
    no_bytes = isinstance(storage.pages.get(key), int | str)
    assert request.outcome.pages["storage_hits"] == (read.start if no_bytes else number)
    assert sum(request.outcome.pages.values()) == 12


class Checks:
    """Lets the test say in which order threads are done with checking pages: `fill` of a page waits until it may."""

    def __init__(self, monkeypatch, *first_pages):
        self.changed, self.held, self.waiting, fill = threading.Condition(), set(first_pages), set(), tiered.HostPages.fill

        def held(host, place, tokens, *more):
            with self.changed:
                if tokens in self.held:
                    self.waiting.add(tokens)
                    self.changed.wait_for(lambda: tokens not in self.held)
            return fill(host, place, tokens, *more)
        monkeypatch.setattr(tiered.HostPages, "fill", held)

    def allow(self, tokens):
        with self.changed:
            self.held.discard(tokens)
            self.changed.notify_all()


def page_tokens(prompt) -> list[bytes]:
    tokens = tiered.as_bytes(prompt)
    return [tokens[at:at + 16] for at in range(0, len(tokens) // 16 * 16, 16)]                  # of pages of 4


def test_the_next_pages_are_read_while_the_last_ones_are_checked_and_come_after_them(stored, right, monkeypatch):
    engine, storage = stored(LONG)
    first = page_tokens(LONG)[0]
    checks = Checks(monkeypatch, first)
    request, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: checks.waiting and engine.prefetches[0].asked == 11)
    prefetch, = engine.prefetches
    until(lambda: sum(count for _, count, _ in list(prefetch.checked.values())) == 10)          # all others are checked
    steps(engine, 5)
    assert prefetch.arrived == 0 and engine.counts["prefetched_pages"] == 0
    assert where(engine, LONG) == "-" * 11 and request.outcome is None
    checks.allow(first)
    steps(engine)
    assert request.outcome.tokens == right(LONG) and request.outcome.pages["storage_hits"] == 11
    assert storage.asked("get") == page_keys(engine, LONG)      # each page once, in order
    spans = sorted((span.start, span.end) for span in request.timeline.spans if span.lane == "storage")
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


@pytest.mark.parametrize("late", [False, True])
def test_behind_a_page_that_is_wrong_nothing_is_used_whoever_is_done_first(stored, right, monkeypatch, late):
    """The page after it is right, and has been read and checked before (late) or after it."""
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    engine, storage = stored(LONG)
    keys, (first, second, *_) = page_keys(engine, LONG), page_tokens(LONG)
    good = storage.pages[keys[0]]
    storage.pages[keys[0]] = good[:-1] + bytes([good[-1] ^ 1])
    checks = Checks(monkeypatch, first, second)
    request, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: len(checks.waiting) == 2)
    prefetch, = engine.prefetches
    checks.allow(second if late else first)
    until(lambda: prefetch.checked if late else prefetch.failed)
    checks.allow(first if late else second)
    steps(engine)
    assert request.outcome.tokens == right(LONG) and request.outcome.pages["storage_hits"] == 0
    assert request.outcome.prefetch["ended"] == "failed" and not engine.storage.reading.ready
    assert engine.storage.counts["storage_pages_refused"] == engine.storage.counts["storage_errors"] == 1
    assert engine.storage.counts["storage_pages_read"] == 0
    accounted(engine)


def test_an_error_behind_pages_that_are_still_checked_does_not_lose_them(stored, right, monkeypatch):
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    engine, storage = stored(LONG)
    first, *_ = page_tokens(LONG)
    checks, gets = Checks(monkeypatch, first), []
    get = storage.get

    def fails(key):
        gets.append(key)
        if len(gets) > 1:
            raise OSError("injected")
        return get(key)
    monkeypatch.setattr(storage, "get", fails)
    request, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: checks.waiting and engine.storage.error)
    checks.allow(first)
    steps(engine)
    assert request.outcome.tokens == right(LONG) and request.outcome.pages["storage_hits"] == 1
    assert engine.storage.counts["storage_errors"] == 1 and not engine.storage.reading.ready
    accounted(engine)


def test_a_prefetch_that_is_given_up_while_it_reads_is_stopped_and_has_not_failed(stored):
    engine, storage = stored(LONG)
    storage.hold("get")
    request, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: storage.waiting["get"] == 1)
    prefetch, = engine.prefetches
    engine.storage.give_up(prefetch)
    storage.allow("get")
    until(lambda: prefetch.over)
    assert prefetch.stopped and not prefetch.failed and prefetch.arrived == 1 and len(storage.asked("get")) == 1
    steps(engine)
    accounted(engine)


def test_a_prefetch_that_has_failed_is_over_though_all_threads_are_busy(stored, monkeypatch):
    """Its next pages stand in line when the check of the first ones fails, and no thread comes for them."""
    engine, storage = stored(LONG)
    first = page_tokens(LONG)[0]
    good = storage.pages[page_keys(engine, LONG)[0]]
    storage.pages[page_keys(engine, LONG)[0]] = good[:-1] + bytes([good[-1] ^ 1])
    checks, reading = Checks(monkeypatch, first), engine.storage
    request, = engine.submit(LONG, max_tokens=8)
    get, second = storage.get, []

    def held(key):
        if storage.asked("get"):
            second.append(key)
            until(lambda: checks.held == set() and done)
        return get(key)
    done = []
    monkeypatch.setattr(storage, "get", held)
    stepped_until(engine, lambda: checks.waiting and second)
    prefetch, = engine.prefetches
    with reading.changed:                                       # as if more were to be read after these
        prefetch.queued = True
        reading.reads.append(prefetch)
        checks.allow(first)
        reading.changed.wait_for(lambda: prefetch.failed and prefetch.at_work == 1, timeout=30)
        assert prefetch.failed and not prefetch.queued and prefetch not in reading.reads
    done.append(True)
    until(lambda: prefetch.over)
    steps(engine)
    accounted(engine)


@pytest.mark.parametrize("kind, after", [("writing", 0.0), ("reading", tiered.Backoff.FIRST)])
def test_an_answer_that_was_under_way_ends_the_backoff_of_writing_only(make, shelf, kind, after):
    """There is one writer: it has just come on. Of the readers, another one has not."""
    engine = make(storage=shelf())
    storage, backoff = engine.storage, getattr(engine.storage, kind)

    def answers(backend):
        storage.blame(backoff)
        return "an answer"
    assert storage.ask(backoff, answers) == "an answer" and backoff.seconds == after
    backoff.until = 0.0                                         # time passes
    assert storage.ask(backoff, lambda backend: "an answer") == "an answer" and backoff.seconds == 0.0


def test_the_last_reads_of_a_prefetch_are_small(make, shelf):
    """Nothing more is read while they go over the link."""
    engine = make(storage=shelf())
    storage = engine.storage
    storage.batch = 16
    prefetch, sizes = held_prefetch(engine, storage, 60, 60, places=list(range(60))), []
    while prefetch.asked < 60:
        numbers = storage.next_pages(prefetch)
        assert numbers.start == sum(sizes) and numbers.stop == prefetch.asked
        sizes.append(len(numbers))
    assert sizes == [4, 16, 16, 12, 6, 4, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damaged", [False, True])
def test_files_are_read_into_the_pages_place_where_the_layout_has_one(make, right, monkeypatch, tmp_path, layout, damaged):
    def engine():
        return make(storage=backends.open_backend(f"file:{tmp_path}"), layout=layout)
    first = engine()
    asked(first, LONG)
    first.flush()
    if damaged:
        path = tmp_path / f"{page_keys(first, LONG)[5]}.page"
        value = bytearray(path.read_bytes())
        value[-3] ^= 4
        path.write_bytes(value)
    there, fill = [], tiered.HostPages.fill
    monkeypatch.setattr(tiered.HostPages, "fill", lambda host, place, tokens, value, read_there: (
        there.append(read_there) or fill(host, place, tokens, value, read_there)))
    second = engine()
    request = asked(second, LONG)
    assert request.outcome.tokens == right(LONG) and set(there) == {layout != "layer_first"}
    assert request.outcome.pages["storage_hits"] == (5 if damaged else 11)
    second.flush()
    accounted(second)


def test_a_page_that_was_damaged_in_storage_does_not_stay_so(stored, right):
    engine, storage = stored(LONG)
    keys = page_keys(engine, LONG)
    good = storage.pages[keys[3]]
    storage.pages[keys[3]] = good[:200] + bytes([good[200] ^ 1]) + good[201:]
    assert asked(engine, LONG).outcome.tokens == right(LONG) and engine.storage.counts["storage_pages_refused"] == 1
    lose(engine)
    assert asked(engine, LONG).outcome.tokens == right(LONG)
    assert storage.pages[keys[3]][:64] == good[:64] and storage.pages[keys[3]][200] == good[200]


def test_pages_that_come_late_are_kept_for_the_next_request(stored, right):
    engine, storage = stored(LONG)
    storage.hold("get")
    request, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: storage.waiting["get"] == 1)
    engine.cancel(request)
    steps(engine)
    assert isinstance(request.outcome, HungUp) and where(engine, LONG) == "-" * 11
    assert any(engine.host.references)                                          # the thread's, until it returns
    storage.allow("get")
    accounted(engine)
    assert where(engine, LONG) == "h" + "-" * 10 and len(storage.asked("get")) == 1             # more was not asked for
    assert engine.counts["late_pages"] == 1
    again = asked(engine, LONG)
    assert again.outcome.tokens == right(LONG) and again.source == "mixed"
    assert again.outcome.pages == dict(gpu_hits=0, cpu_hits=1, storage_hits=10, misses=1)


def test_tokens_on_their_way_from_storage_are_bounded(stored, right):
    prompts = [ids(20 + number, 26) for number in range(5)]
    engine, storage = stored(*prompts, prefetch_limit=9 * 4, blocks=100)
    storage.hold("get")
    requests = [engine.submit(prompt, max_tokens=4)[0] for prompt in prompts]
    stepped_until(engine, lambda: sum(1 for request in requests if request.outcome) == 3)
    assert sum(prefetch.most for prefetch in engine.prefetches) == 9            # six pages, and three
    assert sum(len(prefetch.places) for prefetch in engine.prefetches) <= 9
    storage.allow("get")
    assert answered(engine, *requests) == [right(prompt, 4) for prompt in prompts]
    assert [request.outcome.pages["storage_hits"] for request in requests] == [6, 3, 0, 0, 0]


def test_two_requests_share_a_prefetch_and_the_longer_goes_on_with_what_it_lacks(stored, right):
    engine, storage = stored(LONG)
    storage.hold("get")
    short, = engine.submit(PROMPT, max_tokens=8)
    long, = engine.submit(LONG, max_tokens=8)
    stepped_until(engine, lambda: storage.waiting["get"] == 1)
    assert len(engine.prefetches) == 1 and engine.prefetches[0].users == 2
    storage.allow("get")
    assert answered(engine, short, long) == [right(PROMPT), right(LONG)]
    assert storage.asked("get") == page_keys(engine, LONG)                      # each page once
    assert engine.counts["prefetches"] == 2 and short.cached_tokens == 24 and long.cached_tokens == 44
    assert (short.source, set(long.source.split())) == ("storage_hit", {long.source})
    assert long.outcome.pages["misses"] == 1


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_who_has_waited_enough_for_a_prefetch_of_others_does_not_join_it_again(stored, right, policy):
    """Three who ask the same stand in line; two of them come in. The second must not take up what it has just left."""
    engine, storage = stored(LONG, prefetch_policy=policy, timeout=(0.0, 0.0, 0.0), max_running=3)
    others = [engine.submit(ids(30 + number, 3), max_tokens=new)[0] for number, new in enumerate((3, 3, 30))]
    steps(engine, 1)
    storage.hold("exists")
    same = [engine.submit(LONG, max_tokens=4)[0] for _ in range(3)]
    steps(engine, 1)
    assert engine.prefetches[0].users == 3
    done = []
    threading.Thread(target=lambda: (steps(engine), done.append(True)), daemon=True).start()
    try:
        deadline = time.monotonic() + 10                        # a few milliseconds are enough
        while not done and time.monotonic() < deadline:
            time.sleep(0.001)
        assert done, "one of them joins and leaves the prefetch for ever"
    finally:
        storage.allow("exists")
        for prefetch in () if done else engine.prefetches:      # let it end, for the tests that follow
            prefetch.failed = prefetch.stopped = True
        until(lambda: done)
    assert answered(engine, *others, *same) == [right(ids(30, 3), 3), right(ids(31, 3), 3), right(ids(32, 3), 30)] + 3 * [
        right(LONG, 4)]


def slow_storage(engine, seconds_a_page: float, compute: float):
    """Reading was so slow, and computing a page takes so long."""
    engine.storage.times.extend([(4, 4 * seconds_a_page)] * 8)
    engine.seconds_to_compute = lambda start, end: (end - start) / 4 * compute


def test_storage_that_is_slower_than_computing_is_only_probed_until_it_has_become_fast(stored, right, monkeypatch):
    monkeypatch.setattr(tiered.Storage, "PROBE", 2)
    prompts = [ids(40 + number, 26) for number in range(8)]
    engine, storage = stored(*prompts)
    slow_storage(engine, 100.0, 50.0)
    storage.hold("get")
    first, = engine.submit(prompts[0], max_tokens=8)
    steps(engine)                                                               # nobody waits for it
    assert first.outcome.tokens == right(prompts[0]) and first.source == "miss" and first.outcome.prefetch is None
    assert engine.counts["prefetches_not_worth"] == 1
    assert [prefetch.most for prefetch in engine.prefetches] == [2]
    storage.allow("get")
    accounted(engine)
    assert len(storage.asked("get")) == 2                       # it was fast this time, and is a few times more
    sources = []
    for number, prompt in enumerate(prompts[1:]):
        asked_before = len(storage.asked("get"))
        request = asked(engine, prompt)
        sources.append(request.source)
        assert request.outcome.tokens == right(prompt)
        assert len(storage.asked("get")) - asked_before == (2 if request.source == "miss" else 6)
    assert sources[-1] == "storage_hit" and sources == sorted(sources)          # probed, until it is believed


@pytest.mark.parametrize("where_it_hangs", ["exists", "get"])
def test_storage_that_is_silent_delays_one_request_and_then_nobody(stored, right, monkeypatch, where_it_hangs):
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    prompts = [ids(50 + number, 26) for number in range(4)]
    engine, storage = stored(*prompts, write_policy="write_back")
    monkeypatch.setattr(tiered, "PATIENCE", 0.05)
    storage.hold(where_it_hangs)
    request, = engine.submit(prompts[0], max_tokens=8)
    steps(engine)
    assert request.outcome.tokens == right(prompts[0]) and request.outcome.prefetch["ended"] == "silent"
    assert engine.storage.counts["storage_errors"] == 1 and engine.storage_state()["last_error"] == "no answer in time"
    asked_for = len(storage.calls)
    for prompt in prompts[1:]:
        request, = engine.submit(prompt, max_tokens=8)
        steps(engine)
        assert request.outcome.tokens == right(prompt) and request.outcome.prefetch is None
    assert len([call for call in storage.calls[asked_for:] if call[0] == "get"]) == 0 and engine.counts["prefetches"] == 1
    assert any(engine.host.references) == (where_it_hangs == "get")             # the thread may still write there
    storage.allow(where_it_hangs)
    accounted(engine)
    engine.storage.reading.until = 0.0                                          # time passes
    lose(engine)
    assert asked(engine, prompts[3]).source == "storage_hit"


@pytest.mark.parametrize("kind", ["exists", "get"])
def test_storage_that_fails_is_counted_left_alone_for_a_while_and_tried_again(stored, right, monkeypatch, kind):
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    engine, storage = stored(LONG, PROMPT, write_policy="write_back")
    storage.fails.add(kind)
    request = asked(engine, LONG)
    assert request.outcome.tokens == right(LONG) and request.source == "miss" and request.outcome.prefetch["ended"] == "failed"
    state = engine.storage_state()
    assert state["storage_errors"] == 1 and state["last_error"] == "OSError: injected" and state["reading"] is False
    calls = len(storage.calls)
    lose(engine)
    assert asked(engine, LONG).outcome.prefetch is None and len(storage.calls) == calls
    storage.fails.clear()
    engine.storage.reading.until = 0.0
    lose(engine)
    assert asked(engine, LONG).source == "storage_hit"


# 5. What goes down, and when --------------------------------------------------------------------------------------

def in_storage(engine, tokens, salt: str = "") -> list[bool]:
    return [key in engine.storage.backend.pages for key in page_keys(engine, tokens, salt)]


def test_write_through_writes_at_once(make, shelf):
    engine = make(storage=shelf())
    tokens = PROMPT + asked(engine, PROMPT, max_tokens=7).outcome.tokens         # what decode fills follows
    assert where(engine, tokens[:-1]) == "b" * 8 and all(in_storage(engine, tokens[:-1]))
    assert engine.counters()["storage_pages_written"] == 8 and len(engine.storage.backend.pages) == 8


def test_write_through_selective_writes_what_is_found_for_the_second_time(make, shelf):
    engine = make(storage=shelf(), write_policy="write_through_selective")
    for expected in ("d", "d", "b", "b"):
        asked(engine, PROMPT, max_tokens=1)
        assert where(engine, PROMPT) == expected * 6 and in_storage(engine, PROMPT) == [expected == "b"] * 6
    engine = make(storage=shelf(), write_policy="write_through_selective")
    for number in range(3):
        asked(engine, PROMPT[:13] + ids(60 + number, 9), max_tokens=1)
    assert where(engine, PROMPT[:13] + ids(62, 9)) == "bbbdd"                   # what they share was found twice
    assert sum(map(len, (engine.storage.backend.pages,))) == 3


def test_write_back_writes_what_has_to_leave(make, shelf, right):
    engine = make(storage=shelf(), write_policy="write_back", blocks=16, cpu_blocks=16)
    asked(engine, PROMPT, max_tokens=3)
    asked(engine, PROMPT, max_tokens=3)
    assert where(engine, PROMPT) == "d" * 6 and not engine.storage.backend.asked("set") and engine.counts["swap_outs"] == 0
    others = [ids(70 + number, 30) for number in range(4)]
    asked(engine, others[0], max_tokens=3)
    asked(engine, others[1], max_tokens=3)
    assert where(engine, PROMPT) == "h" * 6 and not engine.storage.backend.pages
    for other in [*others[2:], *(ids(80 + number, 30) for number in range(20))]:                 # until host memory is full, too
        if where(engine, PROMPT) != "-" * 6:
            asked(engine, other, max_tokens=3)
    assert where(engine, PROMPT) == "-" * 6 and all(in_storage(engine, PROMPT))
    assert asked(engine, PROMPT).outcome.tokens == right(PROMPT) and engine.tree.lost == 0
    assert engine.counters()["storage_hits"] >= 1                               # as many as there is room for


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cpu_blocks", [64, 16, 9, 4, 1])
def test_on_release_write_back_leaves_nothing_dirty(make, shelf, capsys, policy, cpu_blocks):
    """Also where host memory is smaller than the device, and than one node."""
    storage = shelf()
    engine = make(storage=storage, write_policy=policy, blocks=40, cpu_blocks=cpu_blocks)
    prompts = [PROMPT, ids(80, 22), PROMPT[:12] + ids(81, 10)]
    for prompt in prompts:
        asked(engine, prompt, max_tokens=1)
    written = len(storage.pages)
    engine.release()
    assert engine.storage is None and storage.closed == 1 and "could not be written" not in capsys.readouterr().err
    if policy == "write_back":
        expected = {key for prompt in prompts for key in page_keys(engine, prompt)}
        assert written == 0 and set(storage.pages) == expected
    check(engine)


def test_on_release_what_is_on_the_device_alone_finds_room_in_a_host_memory_full_of_dirty_pages(make, shelf, capsys):
    storage = shelf()
    engine = make(storage=storage, write_policy="write_back", blocks=16, cpu_blocks=14)
    prompts = [ids(85 + number, 29) for number in range(4)]                     # seven pages each: two in each tier
    for prompt in prompts:
        asked(engine, prompt, max_tokens=1)
    tiers = "".join(where(engine, prompt)[0] for prompt in prompts)
    assert sorted(tiers) == ["d", "d", "h", "h"] and not storage.pages
    engine.release()
    assert set(storage.pages) == {key for prompt in prompts for key in page_keys(engine, prompt)}
    assert "could not be written" not in capsys.readouterr().err


def test_on_release_what_cannot_be_written_is_said(make, shelf, capsys):
    storage = shelf()
    engine = make(storage=storage, write_policy="write_back")
    asked(engine, PROMPT, max_tokens=1)
    storage.fails.add("set")
    engine.release()
    assert "6 pages could not be written to shelf (OSError: injected)." in capsys.readouterr().err


def test_release_holds_the_engine_while_it_looks_through_the_tree(make, shelf):
    """Requests may still run in the engine's thread when the server ends."""
    storage = shelf()
    engine = make(storage=storage, write_policy="write_back")
    asked(engine, PROMPT, max_tokens=1)
    plain, number = engine.tree.nodes, itertools.count(90)

    def another():
        if engine.stepping.acquire(blocking=False):
            try:
                request, = engine.submit(ids(next(number), 9), max_tokens=1)
                while not request.outcome:
                    engine.step()
            finally:
                engine.stepping.release()

    def nodes():
        for node in plain():
            in_threads(another)
            yield node
    engine.tree.nodes = nodes
    engine.release()
    engine.tree.nodes = plain
    assert all(key in storage.pages for key in page_keys(engine, PROMPT))


def test_release_does_not_wait_for_silent_storage_once_for_every_node(make, shelf, monkeypatch, capsys):
    storage = shelf()
    engine = make(storage=storage, write_policy="write_back")
    for number in range(12):
        asked(engine, ids(100 + number, 9), max_tokens=1)
    storage.hold("set")
    plain, waits = engine.flush, []

    def flush(patience=None):
        before = [len(engine.writes), dict(engine.storage.counts) if engine.storage else {}]
        plain(0.02)
        if engine.writes and engine.storage and before == [len(engine.writes), dict(engine.storage.counts)]:
            waits.append(1)
    monkeypatch.setattr(engine, "flush", flush)
    engine.release()
    assert len(waits) <= 4, "each of these is five seconds"


def decoding_while_it_leaves(make, policy):
    """PROMPT is on its way down, copied at the last moment; somebody decodes, and others need the pages."""
    engine = make(write_policy=policy, blocks=24)
    other, = engine.submit(ids(9, 2), max_tokens=40)
    steps(engine, 1)
    engine.save_link.held = True
    first, = engine.submit(PROMPT, max_tokens=1)
    stepped_until(engine, lambda: first.outcome)
    late = [engine.submit(ids(120 + number, 40), max_tokens=2)[0] for number in range(3)]
    return engine, [other, first, *late]


def unguarded(monkeypatch):
    """What is on its way out is not held on the device."""
    def hold(engine, swap, plain=tiered.Engine.hold):
        if swap.inward:
            return plain(engine, swap)
        engine.swaps.append(swap)

    def let_go(engine, swap, plain=tiered.Engine.let_go):
        if swap.inward:
            return plain(engine, swap)
        engine.host.release(swap.host_blocks)
    monkeypatch.setattr(tiered.Engine, "hold", hold)
    monkeypatch.setattr(tiered.Engine, "let_go", let_go)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_nothing_is_evicted_while_its_copy_is_under_way(make, right, tiny_engine, policy):
    engine, requests = decoding_while_it_leaves(make, policy)
    assert answered(engine, *requests) == [right(ids(9, 2), 40), right(PROMPT, 1)] + [
        right(ids(120 + number, 40), 2) for number in range(3)]
    assert damage(engine, tiny_engine) < 1e-4 and engine.counts["swap_outs"] >= 6 and engine.tree.lost == 0
    lose(engine, engine.pool)
    assert asked(engine, PROMPT).outcome.tokens == right(PROMPT)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_without_the_hold_on_what_leaves_it_is_overwritten_before_it_is_copied(make, monkeypatch, policy):
    unguarded(monkeypatch)
    with pytest.raises(AssertionError, match="references and"):
        engine, requests = decoding_while_it_leaves(make, policy)
        steps(engine)
    monkeypatch.setattr(tiered.Engine, "check_integrity", lambda engine: None)
    engine, requests = decoding_while_it_leaves(make, policy)
    for request in requests:
        while not request.outcome:
            engine.step()
    engine.flush()
    assert engine.tree.lost >= 6 and where(engine, PROMPT) == "-" * 6           # and it was not even found out


def test_without_the_hold_on_what_comes_others_write_there(make, shelf, right, tiny_engine, monkeypatch):
    """The same for what is on its way in: its places in host memory."""
    engine = make(cpu_blocks=16)
    asked(engine, PROMPT)
    lose(engine, engine.pool)
    monkeypatch.setattr(tiered.Engine, "hold", lambda engine, swap: (engine.swaps.append(swap), [
        engine.pool.share(page) for page in (*swap.device_path, *swap.device_blocks)]))
    monkeypatch.setattr(tiered.Engine, "let_go", lambda engine, swap: engine.pool.release(swap.device_path + swap.device_blocks)
                        if swap.inward else None)
    engine.load_link.held = True
    request, = engine.submit(PROMPT, max_tokens=8)
    engine.submit(ids(9, 2), max_tokens=3)
    engine.step()
    with pytest.raises(AssertionError):
        check(engine)
    assert request.restoration


def test_what_nobody_would_load_is_not_kept_and_what_nobody_would_ask_for_is_not_stored(make, shelf):
    engine = make(storage=shelf(), cpu_blocks=8, blocks=40)
    engine.seconds_to_load = lambda pages, behind=None: 2.0
    engine.seconds_to_compute = lambda start, end: 1.0
    asked(engine, PROMPT, max_tokens=1)
    assert where(engine, PROMPT) == "d" * 6 and not engine.storage.backend.asked("set")
    engine.seconds_to_load = lambda pages, behind=None: 0.5
    asked(engine, PROMPT, max_tokens=1)
    assert where(engine, PROMPT) == "b" * 6 and all(in_storage(engine, PROMPT))
    engine.storage.times.extend([(1, 1.0)] * 3)                                 # six pages: six seconds
    assert not engine.worth_storing(find(engine, PROMPT)[0][0])
    engine.storage.times.clear()
    engine.storage.times.append((1, 0.1))
    assert engine.worth_storing(find(engine, PROMPT)[0][0])
    engine.storage.times.clear()
    assert engine.worth_storing(find(engine, PROMPT)[0][0])                     # nothing is known: try


def test_what_the_host_has_is_computed_where_that_is_sooner_and_loaded_again_when_it_no_longer_is(make, right):
    engine = make()
    asked(engine, PROMPT)
    for load, compute, source, loaded in ((2.0, 1.0, "miss", 0), (1.0, 1.0, "cpu_hit", 6), (1.1, 1.0, "miss", 0)):
        lose(engine, engine.pool)
        engine.seconds_to_load = lambda pages, behind=None, load=load: load
        engine.seconds_to_compute = lambda start, end, compute=compute: compute
        before, worn_out = engine.counters(), engine.load_link.worn_out
        request = asked(engine, PROMPT)
        after = engine.counters()
        assert (request.outcome.tokens, request.source, request.cached_tokens) == (right(PROMPT), source, 4 * loaded)
        assert request.outcome.choice["chosen"] == ("load" if loaded else "recompute")
        assert request.outcome.choice["load_ms"] == 1e3 * load
        assert after["recomputed_hits"] - before["recomputed_hits"] == 6 - loaded
        assert engine.load_link.worn_out - worn_out == (loaded == 0), "a slow link is not slow for ever"


def test_write_back_stores_nothing_that_is_sooner_computed(make, shelf):
    engine = make(storage=shelf(), write_policy="write_back", blocks=16, cpu_blocks=8)
    slow_storage(engine, 100.0, 50.0)
    for number in range(5):
        asked(engine, ids(130 + number, 30), max_tokens=1)
    assert not engine.storage.backend.asked("set")
    assert engine.tree.lost > 0


def test_write_back_keeps_a_node_that_has_come_back_up_again(make, right):
    """Down to host memory, up again, forgotten there, and down once more."""
    engine = make(write_policy="write_back", blocks=16)
    asked(engine, PROMPT, max_tokens=1)
    for number in range(2):
        asked(engine, ids(140 + number, 62), max_tokens=1)      # takes all of the device
        assert where(engine, PROMPT) == "h" * 6
        assert asked(engine, PROMPT, max_tokens=1).source == "cpu_hit"
        lose(engine, engine.host)                                               # others needed the room
        assert where(engine, PROMPT) == "d" * 6


def test_slow_storage_does_not_lock_all_of_host_memory(make, shelf, right):
    storage = shelf()
    engine = make(storage=storage, cpu_blocks=24)
    storage.hold("set")
    for number in range(6):
        request, = engine.submit(ids(150 + number, 26), max_tokens=2)
        stepped_until(engine, lambda request=request: request.outcome)
        assert request.outcome.tokens == right(ids(150 + number, 26), 2)
    assert sum(reference > 0 for reference in engine.host.references) <= 12 and engine.counts["writes_skipped"] > 0
    storage.allow("set")
    accounted(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_storage_that_never_ends_writing_keeps_no_request_waiting(make, shelf, right, monkeypatch, policy):
    monkeypatch.setattr(tiered, "PATIENCE", 0.05)
    storage = shelf()
    engine = make(storage=storage, write_policy=policy, blocks=16, cpu_blocks=12)
    storage.hold("set")
    answers = []

    def go_on():
        for number in range(6):
            request, = engine.submit(ids(160 + number, 30), max_tokens=2)
            while request.outcome is None and not stop:
                engine.step()
            answers.append(request.outcome and request.outcome.tokens)
    stop = []
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(10)                                             # it takes a few milliseconds
    hangs = thread.is_alive()
    stop.append(True)
    storage.allow("set")
    thread.join(10)
    assert not hangs, "a request waits for storage to end a write"
    assert answers == [right(ids(160 + number, 30), 2) for number in range(6)]
    steps(engine)
    accounted(engine)


# 6. Traffic -------------------------------------------------------------------------------------------------------

class Flaky:
    """A back end in a dictionary that is late now and then, fails now and then, and gives wrong bytes now and then."""

    def __init__(self, seed: int, fail: float, late: float):
        self.pages, self.seed, self.fail, self.late = {}, seed, fail, late
        self.local, self.threads, self.happened = threading.local(), itertools.count(), Counter()

    def before(self) -> random.Random:
        if not hasattr(self.local, "rng"):
            self.local.rng = random.Random(self.seed * 1000 + next(self.threads))               # each thread its own
        rng = self.local.rng
        if rng.random() < self.late:
            time.sleep(rng.random() * 3e-3)
        if rng.random() < self.fail:
            self.happened["failed"] += 1
            raise OSError("flaky")
        return rng

    def get(self, key):
        rng, value = self.before(), self.pages.get(key)
        if value and rng.random() < self.fail:
            self.happened["damaged"] += 1
            at = rng.randrange(len(value))
            return rng.choice((b"", value[:at], bytes(len(value)), value[:at] + bytes([value[at] ^ 1]) + value[at + 1:]))
        return value

    def exists(self, key):
        self.before()
        return key in self.pages

    def set(self, key, value):
        self.before()
        self.pages[key] = bytes(value)


CONVERSATIONS, TURNS = 32, 4
TRAFFIC = [                        # seed, write policy, prefetch policy, layout, blocks, cpu_blocks, failures, overlap
    (1, "write_through", "timeout", "page_first_direct", 24, 40, 0.05, True),
    (2, "write_through", "best_effort", "layer_first", 24, 12, 0.3, True),
    (3, "write_through", "wait_complete", "page_first", 18, 30, 0.05, False),
    (4, "write_through_selective", "timeout", "page_first", 24, 60, 0.05, True),
    (5, "write_through_selective", "wait_complete", "page_first_direct", 40, 24, 0.3, True),
    (6, "write_back", "timeout", "layer_first", 24, 30, 0.05, True),
    (7, "write_back", "wait_complete", "page_first_direct", 18, 24, 0.0, True),
    (8, "write_back", "best_effort", "page_first", 24, 8, 0.3, False),
]


@pytest.fixture(scope="module")
def conversations(tiny_engine):
    """For each conversation and turn the prompt, and the eight tokens that chapter 01 answers."""
    alone, turns = baseline.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens), []
    for number in range(CONVERSATIONS):
        prompt, turns_of_one = ids(300 + number // 4, 8) + ids(200 + number, 6), []             # every four begin alike
        for turn in range(TURNS):
            tokens = alone.generate(prompt=prompt, max_tokens=8).tokens
            turns_of_one.append((prompt, tokens))
            prompt = prompt + tokens[:-1] + ids(number * 10 + turn, 5)
        turns.append(turns_of_one)
    return turns


@pytest.mark.parametrize("case", TRAFFIC, ids=lambda case: "-".join(map(str, case[:4])))
def test_every_answer_is_chapter_01s_while_storage_fails_and_everything_is_evicted(tiny_engine, monkeypatch, conversations, case,
                                                                                capsys):
    seed, write_policy, prefetch_policy, layout, blocks, cpu_blocks, fail, overlap = case
    monkeypatch.setattr(tiered.Backoff, "FIRST", 0.002)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 0.01)
    rng, storage = random.Random(seed), Flaky(seed, fail, 0.2)
    engine = build(tiny_engine, links.Link, blocks=blocks, cpu_blocks=cpu_blocks, layout=layout, write_policy=write_policy,
                   prefetch_policy=prefetch_policy, token_budget=rng.choice([16, 64, 512]), bytes_per_second=1e9,
                   prefetch_threshold=rng.choice([1, 8]), overlap=overlap)
    engine.attach(storage, "flaky")
    live, done, number, deadline = [], 0, 0, time.monotonic() + 60
    def all_has_happened() -> bool:
        counts = engine.counters()
        return bool(counts["evictions"] and counts["preemptions"] and counts["gpu_hits"] and counts["misses"] and
                    counts["cpu_evictions"] and counts["cpu_hits"] + counts["storage_hits"] and
                    (counts["storage_errors"] or not fail))
    while done < 250 or not all_has_happened():
        while len(live) < 5:
            conversation = conversations[rng.randrange(CONVERSATIONS)]
            prompt, tokens = conversation[rng.randrange(TURNS)]
            new = rng.randint(1, 8)
            fields = dict(cache_salt=rng.choice(["", "", "", "a"]), n=rng.choice([1, 1, 1, 1, 2]))
            live += [(request, tokens[:new]) for request in engine.submit(prompt=list(prompt), max_tokens=new, **fields)]
        engine.step()
        with engine.stepping:
            if rng.random() < 0.03:
                engine.cancel(rng.choice(live)[0])
            if rng.random() < 0.02 and engine.running:
                engine.preempt(rng.choice(engine.running))
            if rng.random() < 0.01:
                lose(engine, rng.choice([engine.pool, engine.host]))
            number += 1
            if number % 2 == 0:
                engine.check_integrity()
        for request, tokens in [one for one in live if one[0].outcome is not None]:
            live.remove((request, tokens))
            done += 1
            if isinstance(request.outcome, Exception):
                if not isinstance(request.outcome, HungUp):
                    raise request.outcome
            else:
                assert request.outcome.tokens == tokens, (request.outcome.pages, request.outcome.prefetch)
                assert sum(request.outcome.pages.values()) == -(-request.outcome.usage["prompt_tokens"] // 4)
        assert time.monotonic() < deadline
    steps(engine)
    accounted(engine)
    assert damage(engine, tiny_engine) < 1e-3
    engine.release()
    check(engine)


def test_in_that_traffic_pages_come_from_storage(tiny_engine, conversations, monkeypatch):
    """So that the test above is one of storage at all; and without the check of what it gives, answers are wrong."""
    def answers():
        engine = build(tiny_engine, blocks=24, cpu_blocks=24, storage=storage)
        request = asked(engine, conversations[0][3][0])
        engine.finalizer()
        return request
    storage = Flaky(1, 0.0, 0.0)
    assert answers().source == "miss" and answers().outcome.tokens == conversations[0][3][1]
    assert answers().source == "storage_hit"
    monkeypatch.setattr(tiered.HostPages, "fill", lambda host, place, *_: not host.kv[place].copy_(
        torch.full_like(host.kv[place], 0.5)).isnan().any())
    assert answers().outcome.tokens != conversations[0][3][1]


# 7. A link that fails ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["refuses", "refuses one layer", "broken"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_link_that_fails_outward_costs_a_copy(make, shelf, right, how, policy):
    engine = make(storage=shelf(), write_policy=policy, blocks=16, cpu_blocks=40)
    engine.save_link.broken, engine.save_link.refuses = how == "broken", how != "broken"
    for _ in range(3):
        assert asked(engine, PROMPT).outcome.tokens == right(PROMPT)
        assert asked(engine, ids(3, 30)).outcome.tokens == right(ids(3, 30))
    assert not any(engine.host.prefixes) and len(engine.host.free) == 40 and not engine.storage.backend.pages
    assert engine.counts["transfer_errors"] > 0
    engine.save_link.broken = engine.save_link.refuses = False
    for number in range(4):
        for _ in range(3):
            assert asked(engine, ids(500 + number, 30)).outcome.tokens == right(ids(500 + number, 30))
    assert any(engine.host.prefixes)


@pytest.mark.parametrize("how", ["refuses", "layer 1", "broken"])
@pytest.mark.parametrize("from_storage", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_a_link_that_fails_inward_has_the_request_computed(make, shelf, right, tiny_engine, how, from_storage, others):
    engine = make(storage=shelf())
    asked(engine, PROMPT)
    lose(engine, *([] if from_storage else [engine.pool]))
    engine.load_link.broken, engine.load_link.refuses = how == "broken", how != "broken" and (how == "refuses" or how)
    requests = engine.submit(PROMPT, max_tokens=8, n=2) + engine.submit(LONG, max_tokens=8)
    if others:
        requests += engine.submit(ids(9, 3), max_tokens=20)
    expected = [right(PROMPT)] * 2 + [right(LONG)] + [right(ids(9, 3), 20)] * others
    assert answered(engine, *requests) == expected and engine.counts["transfer_errors"] > 0
    assert damage(engine, tiny_engine) < 1e-4
    engine.load_link.broken = engine.load_link.refuses = False
    lose(engine)
    assert asked(engine, PROMPT).source == "storage_hit"


@pytest.mark.parametrize("how", [True, "layer 1"])
def test_what_the_link_has_refused_holds_nothing_any_more(make, right, how):
    engine = make()
    asked(engine, PROMPT)
    lose(engine, engine.pool)
    engine.load_link.refuses = how
    request, = engine.submit(LONG, max_tokens=8)
    steps(engine, 1)                                            # refused, computed and found by others, all in one step
    assert request.outcome is None and where(engine, LONG)[0] in "db"
    assert answered(engine, request) == [right(LONG)]


def test_a_link_that_breaks_while_pages_are_on_their_way_has_everybody_who_counted_on_them_computed(make, right, tiny_engine):
    engine = make()
    asked(engine, LONG)
    lose(engine, engine.pool)
    other, = engine.submit(ids(9, 3), max_tokens=30)
    steps(engine, 1)
    engine.load_link.held = True
    first, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 1)
    second, = engine.submit(LONG, max_tokens=8)
    steps(engine, 2)
    assert first.restoration and second.restoration and len(engine.swaps) == 2
    engine.load_link.parcels[0].doomed = True
    engine.load_link.arrive()
    assert answered(engine, other, first, second) == [right(ids(9, 3), 30), right(PROMPT), right(LONG)]
    assert damage(engine, tiny_engine) < 1e-4 and engine.counts["transfer_errors"] >= 1


# 8. Attached and detached while it runs ---------------------------------------------------------------------------

def test_attach_and_detach_say_what_is_wrong(make, shelf):
    engine = make()
    with pytest.raises(BadRequest, match="No storage is attached."):
        engine.detach()
    engine.attach(shelf(), "one")
    with pytest.raises(BadRequest, match="one is attached already; detach it first, with DELETE /storage."):
        engine.attach(shelf(), "two")
    assert engine.detach() == dict(storage=None, detached="one", drained=True)
    engine.attach(shelf(), "two")
    assert engine.storage_state()["storage"] == "two"
    with pytest.raises(BadRequest, match="there is none; start with a larger --cpu-blocks."):
        make(cpu_blocks=0).attach(shelf(), "three")


def test_detach_keeps_all_three_tiers(make, shelf, right):
    storage = shelf()
    engine = make(storage=storage)
    asked(engine, PROMPT, max_tokens=1)
    pages, calls = dict(storage.pages), len(storage.calls)
    assert engine.detach()["drained"] and storage.closed == 1
    assert where(engine, PROMPT) == "b" * 6 and storage.pages == pages
    assert asked(engine, PROMPT).source == "gpu_hit"
    lose(engine, engine.pool)
    assert asked(engine, PROMPT).source == "cpu_hit" and len(storage.calls) == calls
    lose(engine)
    assert asked(engine, PROMPT).source == "miss"
    lose(engine)
    engine.attach(storage, "again")
    request = asked(engine, PROMPT)
    assert request.source == "storage_hit" and request.outcome.tokens == right(PROMPT)


def test_what_is_cached_already_goes_to_storage_that_is_attached_later_when_it_is_found(make, shelf):
    engine = make()
    asked(engine, PROMPT, max_tokens=1)
    engine.attach(shelf(), "late")
    asked(engine, LONG, max_tokens=1)
    assert all(in_storage(engine, LONG))
    one = engine.storage.backend
    engine.detach()
    engine.attach(shelf(), "another")                           # which does not have what the first one has
    asked(engine, LONG, max_tokens=1)
    assert all(in_storage(engine, LONG)) and engine.storage.backend.pages == one.pages


def test_back_ends_that_cannot_be_closed_can_be_detached(make, shelf):
    storage = shelf()
    engine = make(storage=storage)
    asked(engine, PROMPT, max_tokens=1)
    storage.close = lambda: 1 / 0                               # "each may raise anything"
    assert engine.detach()["drained"] and engine.storage is None


@pytest.mark.parametrize("kind", ["exists", "get", "set"])
def test_detach_does_not_wait_for_ever_for_storage_that_hangs(stored, shelf, right, monkeypatch, kind):
    monkeypatch.setattr(tiered, "PATIENCE", 0.05)
    engine, storage = stored(PROMPT)
    storage.hold(kind)
    request, = engine.submit(PROMPT if kind != "set" else LONG, max_tokens=8)
    steps(engine)
    expected = right(PROMPT if kind != "set" else LONG)
    assert request.outcome.tokens == expected
    engine.flush(0.01)
    assert engine.detach(0.05) == dict(storage=None, detached="shelf", drained=False) and not storage.closed
    check(engine)
    assert engine.prefetches or engine.writes                   # the thread's, until it returns
    other = shelf()
    engine.attach(other, "another")
    request, = engine.submit(ids(4, 26), max_tokens=8)
    steps(engine)
    assert request.outcome.tokens == right(ids(4, 26))
    storage.allow(kind)
    until(lambda: engine.flush(0.01) is not engine and not engine.prefetches and not engine.writes)
    accounted(engine)
    assert all(in_storage(engine, ids(4, 26)))


def test_storage_comes_and_goes_under_load(make, shelf, right):
    """Threads ask, another one attaches and detaches; nothing is lost."""
    storage = shelf()
    engine = make(links.Link, blocks=40, cpu_blocks=24, bytes_per_second=1e9)
    prompts = [ids(170 + number % 6, 12) + ids(number, 10) for number in range(12)]
    expected = [right(prompt) for prompt in prompts]
    busy = threading.Event()

    def ask(seed):
        rng = random.Random(seed)
        for _ in range(20):
            number = rng.randrange(len(prompts))
            assert engine.generate(prompt=prompts[number], max_tokens=8).tokens == expected[number]
        return "right"

    def come_and_go():
        rounds = 0
        while not busy.is_set() or rounds < 3:
            engine.attach(storage, "shelf")
            time.sleep(0.005)
            there = set(storage.pages)
            assert engine.detach(20)["drained"] and there <= set(storage.pages)
            rounds += 1
        return rounds

    def load():
        outcomes = in_threads(*(lambda seed=seed: ask(seed) for seed in range(4)))
        busy.set()
        return outcomes
    outcomes, rounds = in_threads(load, come_and_go)
    assert outcomes == ["right"] * 4 and rounds >= 3 and storage.closed == rounds
    until(lambda: not engine.running)
    accounted(engine)
    assert storage.pages and engine.counts["requests"] == 80
    fresh = make(storage=storage)
    for prompt, tokens in zip(prompts, expected):
        assert asked(fresh, prompt).outcome.tokens == tokens
    assert fresh.counts["storage_hits"] > 0


def test_the_threads_of_storage_end_with_the_engine(tiny_engine, shelf):
    storage = shelf()
    engine = build(tiny_engine, storage=storage)
    asked(engine, PROMPT, max_tokens=1)
    threads, gone = engine.storage.threads, weakref.ref(engine)
    assert all(thread.is_alive() for thread in threads)
    del engine
    gc.collect()
    assert gone() is None
    until(lambda: not any(thread.is_alive() for thread in threads))


# 9. Namespaces ----------------------------------------------------------------------------------------------------

def test_engines_of_other_weights_dtype_layout_or_page_size_never_read_each_others(make, bases, shelf, tmp_path, tiny_folder):
    storage = shelf()
    others = [dict(), dict(base=make_engine(write_model(tmp_path / "other", seed=1))), dict(base=bases("bfloat16", 2)),
              dict(base=make_engine(tiny_folder, "float16")), dict(layout="page_first"), dict(layout="layer_first"),
              dict(block_size=8), dict(base=bases("float32", 4))]
    seen = set()
    for _ in range(2):
        for number, options in enumerate(others):
            engine = make(storage=storage, **options)
            for salt in ("", "a"):
                request = asked(engine, PROMPT, cache_salt=salt, max_tokens=4)
                alone = options.get("base") or bases()
                assert request.outcome.tokens == alone.generate(prompt=PROMPT, max_tokens=4).tokens
                assert request.source == ("storage_hit" if (number, salt) in seen else "miss")
                seen.add((number, salt))
            engine.detach()
    assert len(storage.pages) == 2 * (7 * 7 + 3)


def test_pages_under_a_key_that_is_not_theirs_are_refused(make, shelf, right, monkeypatch):
    """Keys of SHA-256 do not collide; the token ids are compared all the same."""
    storage, other = shelf(), ids(7, 26)
    asked(make(storage=storage), PROMPT)
    engine = make()
    for key, wrong in zip(page_keys(engine, PROMPT), page_keys(engine, other)):
        storage.pages[wrong] = storage.pages[key]
    engine.attach(storage, "shelf")
    request = asked(engine, other)
    assert request.outcome.tokens == right(other) and request.source == "miss"
    assert engine.storage.counts["storage_pages_refused"] == 1


# 10. Files: kill -9, damage, a full disk --------------------------------------------------------------------------

KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from legacy.tests import test_tiered as tests
from legacy import backends, store
base, writes = tests.make_engine({folder!r}), []

class Half:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, rest):
        self.file.write(rest[:len(rest) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

def opened(path, mode="r", *rest, plain=open, **options):
    file = plain(path, mode, *rest, **options)
    writes.extend([path] if "x" in mode else [])
    return Half(file) if "x" in mode and len(writes) == after else file

store.open = opened                                             # of all that this module opens
for policy, after in {cases!r}.items():
    if process := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
        continue
    engine = tests.build(base, storage=backends.open_backend("file:{folders}/" + policy), write_policy=policy, blocks=16,
                         cpu_blocks=12)
    for number in range(12):
        tests.asked(engine, tests.ids(400 + number, 30), max_tokens=2)
    engine.release()
    os._exit(0)
"""


def test_after_kill_9_while_it_writes_a_fresh_engine_reads_what_is_whole(make, right, tmp_path, tiny_folder):
    cases = dict(write_through=17, write_back=9)                # in which write
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(root=str(ROOT), folder=str(tiny_folder), cases=cases, folders=tmp_path))
    ended = run(script=script, OMP_NUM_THREADS="1")
    assert ended.stdout.split() == [str(-signal.SIGKILL)] * 2, ended.stderr
    for policy, after in cases.items():
        names = os.listdir(tmp_path / policy)
        assert sorted(name.rpartition(".")[2] for name in names) == ["page"] * (after - 1) + ["tmp"]
        engine = make(storage=backends.open_backend(f"file:{tmp_path}/{policy}"))
        for number in range(12):
            assert asked(engine, ids(400 + number, 30)).outcome.tokens == right(ids(400 + number, 30))
        counts = engine.counters()
        assert counts["storage_hits"] > 0 and counts["storage_pages_refused"] == counts["storage_errors"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_were_cut_or_changed_are_never_used(make, right, tmp_path, layout):
    url, prompts = f"file:{tmp_path}", [ids(420 + number, 30) for number in range(6)]
    engine = make(storage=backends.open_backend(url), layout=layout)
    for prompt in prompts:
        asked(engine, prompt)
    engine.release()
    rng, damaged = random.Random(1), 0
    for path in sorted(tmp_path.glob("*.page")):
        if rng.random() < 0.4:
            value = bytearray(path.read_bytes())
            at, damaged = rng.randrange(64, len(value)), damaged + 1
            value[at] ^= 1 << rng.randrange(8)
            path.write_bytes(rng.choice((value, value[:at], b"", value + b"more")))
    engine = make(storage=backends.open_backend(url), layout=layout)
    for prompt in prompts:
        assert asked(engine, prompt).outcome.tokens == right(prompt)
    assert damaged > 5 and engine.counters()["storage_pages_refused"] > 0


def test_a_disk_that_is_full_is_an_error_and_left_alone_for_a_while(make, right, monkeypatch, tmp_path):
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    backend = backends.open_backend(f"file:{tmp_path}")
    engine, puts, plain, full = make(storage=backend), [], backend.files.put, [True]

    def put(path, pieces):
        puts.append(path)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(path, pieces)
    monkeypatch.setattr(backend.files, "put", put)
    for number in range(4):
        assert asked(engine, ids(430 + number, 30)).outcome.tokens == right(ids(430 + number, 30))
    state = engine.storage_state()
    assert len(puts) == 1 == state["storage_errors"] and "No space left" in state["last_error"] and state["writing"] is False
    assert state["reading"] is True and state["storage_pages_written"] == 0
    full.clear()
    engine.storage.writing.until = 0.0                          # time passes
    for number in range(4):                                     # found, and so written
        assert asked(engine, ids(430 + number, 30)).source == "gpu_hit"
    assert engine.storage_state()["writing"] is True and len(list(tmp_path.glob("*.page"))) >= 4 * 7
    lose(engine)
    assert asked(engine, ids(430, 30)).source == "storage_hit"


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_small_disk_keeps_what_fits(make, right, tmp_path, policy, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        engine = make(storage=backends.open_backend(f"file:{disk}"), write_policy=policy, blocks=24, cpu_blocks=24)
        for number in range(12):
            assert asked(engine, ids(440 + number, 30)).outcome.tokens == right(ids(440 + number, 30))
        assert engine.counters()["storage_errors"] > 0 and "No space" in engine.storage_state()["last_error"]
        kept = list(disk.glob("*.page"))
        assert kept and len(kept) * engine.host.page_bytes <= 64 << 10 and not list(disk.glob("*.tmp"))
        engine.release()
        for path in kept[:4]:
            path.unlink()
        fresh = make(storage=backends.open_backend(f"file:{disk}"))
        for number in range(12):
            assert asked(fresh, ids(440 + number, 30)).outcome.tokens == right(ids(440 + number, 30))
        assert fresh.counters()["storage_hits"] > 0
        fresh.release()
    finally:
        subprocess.run(["umount", disk], check=True)


# 11. Small host memories ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cpu_blocks,policy,layout", [
    (size, policy, LAYOUTS[(row + column) % 3]) for row, size in enumerate([0, 1, 3, 8])
    for column, policy in enumerate(POLICIES)])
def test_host_memory_may_be_as_small_as_one_likes(make, shelf, right, cpu_blocks, policy, layout):
    engine = make(storage=shelf() if cpu_blocks else None, cpu_blocks=cpu_blocks, blocks=24, write_policy=policy, layout=layout)
    for _ in range(2):
        for number in range(4):
            prompt = ids(450 + number, 30)
            assert asked(engine, prompt[:9]).outcome.tokens == right(prompt[:9])
            assert asked(engine, prompt).outcome.tokens == right(prompt)
    if not cpu_blocks:
        assert engine.host.size == 0 and engine.counts["swap_outs"] == 0
    engine.release()
    check(engine)


def test_what_does_not_fit_into_host_memory_drives_nothing_out_of_it(make):
    engine = make(cpu_blocks=8)
    asked(engine, PROMPT, max_tokens=1)
    assert where(engine, PROMPT) == "b" * 6
    asked(engine, ids(5, 42), max_tokens=1)                     # ten pages
    assert where(engine, PROMPT) == "b" * 6


def test_what_a_request_has_found_may_be_driven_out_by_its_own_beginning(make, shelf, right, monkeypatch):
    """The beginning is on the device alone, and what follows in a host memory that is full of it: if the beginning is copied
    down, what follows has to go."""
    monkeypatch.setattr(tiered.Storage, "MOST", 1)              # so that it comes in several nodes
    storage = shelf()
    engine = make(cpu_blocks=5, prefetch_limit=64)
    filled(engine, storage, PROMPT)
    engine.attach(storage, "shelf")
    engine.prefetch_threshold, engine.worth_keeping = 1000, lambda pages: False
    asked(engine, PROMPT[:5], max_tokens=1)                     # one page, computed: on the device alone
    engine.prefetch_threshold = 4
    storage.hold("get")
    request, = engine.submit(PROMPT, max_tokens=1)              # five more, from storage, one by one
    for number in range(5):
        stepped_until(engine, lambda: storage.waiting["get"] == 1)
        stepped_until(engine, lambda number=number: where(engine, PROMPT)[:1 + number] == "d" + "b" * number)
        storage.allow("get", 1)
    answered(engine, request)
    storage.allow("get")
    del engine.worth_keeping
    assert where(engine, PROMPT) == "dbbbbb" and engine.tree.size > 2
    for node in list(dict.fromkeys(node for node, _ in find(engine, PROMPT)[1:]))[::-1]:
        engine.tree.evict(node, engine.pool)                    # the device needed their place
    assert where(engine, PROMPT) == "dhhhhh"
    assert asked(engine, PROMPT).outcome.tokens == right(PROMPT)


# 12. Errors -------------------------------------------------------------------------------------------------------

def test_backoff_doubles_up_to_its_longest_and_ends_when_something_works(clock):
    backoff, waits = tiered.Backoff(), []
    assert backoff.ready
    for _ in range(10):
        backoff.note(False)
        waits.append(backoff.until - clock.now)
        assert not backoff.ready
        clock.now = backoff.until - 1e-6
        assert not backoff.ready
        clock.now = backoff.until
        assert backoff.ready
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0])
    backoff.note(True)
    assert backoff.ready and backoff.seconds == 0.0
    backoff.note(False)
    assert backoff.until - clock.now == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["exists", "get", "set"])
def test_the_longer_storage_fails_the_longer_it_is_left_alone(stored, monkeypatch, kind):
    """Also where it still says what it has: a disk that is full, a Redis that is out of memory."""
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1000.0)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    engine, storage = stored(PROMPT, prefetch_threshold=4 if kind != "set" else 1000,
                             write_policy="write_through" if kind == "set" else "write_back")
    backoff, waits = engine.storage.writing if kind == "set" else engine.storage.reading, []
    storage.fails.add(kind)
    for number in range(4):
        backoff.until = 0.0                                     # time passes
        asked(engine, PROMPT if kind != "set" else ids(510 + number, 26), max_tokens=1)
        waits.append(backoff.seconds)
        lose(engine)
    assert waits == [1000.0, 2000.0, 4000.0, 8000.0]


@pytest.mark.parametrize("kind", ["exists", "set"])
def test_a_write_that_fails_is_counted_and_written_later(make, shelf, monkeypatch, kind):
    monkeypatch.setattr(tiered.Backoff, "FIRST", 1e6)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 1e6)
    storage = shelf()
    engine = make(storage=storage, prefetch_threshold=1000)     # nothing is read, so that the errors are those of writing
    storage.fails.add(kind)
    asked(engine, PROMPT, max_tokens=1)
    asked(engine, PROMPT, max_tokens=1)
    assert engine.storage.counts["storage_errors"] == 1 == len(storage.asked(kind)) and not storage.pages
    assert where(engine, PROMPT) == "b" * 6
    storage.fails.clear()
    engine.storage.writing.until = 0.0
    asked(engine, PROMPT, max_tokens=1)
    assert all(in_storage(engine, PROMPT)) and engine.storage.counts["storage_errors"] == 1


def test_after_an_error_storage_is_not_believed_to_have_what_it_had(make, shelf):
    """A Redis that was restarted is empty."""
    storage = shelf()
    engine = make(storage=storage, prefetch_threshold=4)
    asked(engine, PROMPT, max_tokens=1)
    storage.fails.add("exists")
    asked(engine, ids(6, 26), max_tokens=1)
    storage.pages.clear()
    storage.fails.clear()
    for backoff in (engine.storage.reading, engine.storage.writing):
        backoff.until = 0.0
    asked(engine, PROMPT, max_tokens=1)
    assert all(in_storage(engine, PROMPT))


def test_the_counters_are_what_happened_and_json(make, shelf):
    engine = make(storage=shelf())
    asked(engine, PROMPT, max_tokens=1)
    lose(engine)
    request = asked(engine, PROMPT, max_tokens=1)
    counts, size = engine.counters(), engine.host.page_bytes
    expected = dict(gpu_hits=0, cpu_hits=0, storage_hits=6, misses=8, prefetches=2, prefetched_pages=6, prefetches_cut=0,
                    late_pages=0, storage_pages_read=6, storage_bytes_read=6 * size, storage_pages_written=6,
                    storage_bytes_written=6 * size, storage_pages_refused=0, storage_errors=0, prefetches_under_way=0,
                    writes_under_way=0, pages_lost=0, storage="shelf", swap_outs=6, swap_ins=6, transfer_errors=0)
    assert {name: counts[name] for name in expected} == expected
    json.dumps(counts)
    json.dumps(engine.storage_state())
    assert request.outcome.prefetch == dict(policy="wait_complete", hit_tokens=24, ended="complete", fetched_tokens=24,
                                            waited_ms=request.outcome.prefetch["waited_ms"])
    assert "shelf" in request.outcome.link and "storage_hits 6" in request.outcome.summary()
    assert {span.lane for span in request.timeline.spans} >= {"storage", "load", "compute"}
