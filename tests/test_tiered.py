"""Chapter 07: the radix tree, write policies, prefetch policies, layouts, and shared storage."""

import errno
import hashlib
import importlib
import math
import os
import random
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from unittest.mock import DEFAULT, Mock

import numpy
import pytest
import torch

from common import store
from common.estimates import MAX_WAIT
from common.link import Transfer, TransferError
from common.requests import BadRequest, Request, RequestError
from shell import backends, cli
from shell.machine import flops
from shell.modelled_link import Bandwidth
from shell.ranks import Ranks
from shell.workers import Worker
from tests.support import engines, traffic
from tests.support.engines import ask, check_pools, draw, evict, make, tiered, until_over, wait_until_idle
from tests.support.faults import faulty
from tests.support.redis_server import redis_server

ranked = importlib.import_module("09_tensor_parallel")
paged, tiers, ORACLE = engines.paged, engines.tiers, engines.ORACLE


class Shelf:
    """A back end in memory. Reads wait until `open` is set. `asked`: the number of keys of each read."""

    def __init__(self, secret=""):
        self.pages, self.asked, self.open, self.secret = {}, [], threading.Event(), secret
        self.open.set()

    def exists(self, keys):
        return [key in self.pages for key in keys]

    def get(self, keys):
        self.asked.append(len(keys))
        assert self.open.wait(60)
        return [self.pages.get(key) for key in keys]

    def set(self, keys, values):
        self.pages.update(zip(keys, values))

    def __len__(self):
        """The number of pages, except pages written by a measurement of speed."""
        return sum(value[4:12] != bytes(range(8)) for value in self.pages.values())


@contextmanager
def engine_with(cache, blocks=60, size=16):
    """Context manager: return an engine with this Cache, and check its pools at the end."""
    yield (engine := make(cache, blocks, size))
    check_pools(engine)
    engine.close()


@contextmanager
def engine_on(
    backend, prefetch="wait_complete", write="write_through", blocks=40, host=40, size=16, **options
):
    """Context manager: return an engine of chapter 07, and check its pools and its tree at the end."""
    cache = tiered(host, prefetch, write, backend, **{"threshold": 1, **options})
    with engine_with(cache, blocks, size) as engine:
        yield engine
        wait_until_idle(engine)
        check_tree(cache.tree, cache)


def right(engine, prompt: list[int], new: int = 4) -> Request:
    """Answer a prompt, and check that the answer equals chapter 01's. Returns: the request."""
    request = ask(engine, prompt, new)
    assert ORACLE.judge(request) != "wrong"
    return request


def saved(engine, *prompts: list[int]):
    """Ask prompts one by one, check each answer, and wait until its copies and writes have completed."""
    for prompt in prompts:
        right(engine, prompt)
        wait_until_idle(engine)


def failing(function):
    """Return a function that raises OSError in every third call."""
    return Mock(wraps=function, side_effect=cycle([DEFAULT, OSError, DEFAULT]))


def steps(engine, until, most=5000) -> bool:
    """Step until `until()` is true, at most `most` times. Returns: True if it became true."""
    return any(until() or engine.step() for _ in range(most))


def forget(engine):
    """Evict the device and host pools, so that only storage has pages."""
    evict(engine)
    engine.evict("host")
    wait_until_idle(engine)


@contextmanager
def only_stored(tokens=200, prefetch="wait_complete", write="write_through", **options):
    """Context manager: return (an engine, its shelf, a prompt whose pages are in storage only).

    `tokens`: the prompt's length; with several lengths, several prompts are returned. The shelf is opened at the
    end."""
    shelf, rng = Shelf(), random.Random(0)
    prompts = [draw(rng, count) for count in ([tokens] if isinstance(tokens, int) else tokens)]
    with engine_on(shelf, prefetch, write, **options) as engine:
        saved(engine, *prompts)
        forget(engine)
        yield engine, shelf, *prompts
        shelf.open.set()


def forget_from(engine, prompt: list[int], page: int):
    """Evict a prompt's pages from number `page` on from host memory."""
    host = engine.lower_tier.cache.host
    host.evict([host.block_of[block_key] for block_key in engine.block_keys.extend([], prompt)[page:]])


def slow_storage(engine, tokens: int):
    """Set the engine's estimates: computing `tokens` tokens takes 1 s, and reading a page takes much longer."""
    estimates, reader = engine.lower_tier.estimates, engine.lower_tier.cache.storage.reader
    estimates.always, estimates.doubtful = False, False
    estimates.computing.samples.clear()
    estimates.computing.record(flops(engine.model.config, 0, tokens), 1.0)
    reader.reap_completed()
    reader.measured.samples.clear()
    reader.measured.record(1e3, 1.0)


# 1. The tree -----------------------------------------------------------------------------------

def check_tree(tree, cache=None):
    """Check that the tree is consistent, and that it agrees with the pools of `cache`."""
    for node in (tree.root, *tree.nodes()):
        for first, child in node.children.items():
            assert child.parent is node and child.pages and child.pages[0] is first
            assert all(later.parent is earlier for earlier, later in zip(child.pages, child.pages[1:])), "each page of a node follows the page before it"
            assert node is tree.root or first.parent is node.pages[-1], "a node's first page follows its parent's last page"
            assert len(child.host_blocks) in (0, len(child.pages)), "a node has a host block for each page, or none"
            assert len(node.children) > 1 or child.state != node.state or node is tree.root, "a node and its only child have different states, else they are one node"
    assert sum(len(node.pages) for node in tree.nodes()) == tree.size, "every page of the tree is found"
    if cache:
        near = {page for node in tree.nodes() if node.device for page in node.pages}
        assert near == set(cache.pool.block_of), "the tree knows which pages the device has"
        places = {page: place for node in tree.nodes() for page, place in zip(node.pages, node.host_blocks)}
        assert places == cache.host.block_of, "the tree knows which pages host memory has, and in which blocks"


def test_the_tree_says_of_each_page_what_a_dictionary_says():
    rng, block_keys, tree, known = random.Random(0), paged.BlockKeys("", 1), tiers.HiRadixTree(), {}
    for number in range(600):
        chain = block_keys.extend([], [rng.randrange(3) for _ in range(rng.randrange(1, 12))])
        expected = 0
        while expected < len(chain) and chain[expected] in known:
            expected += 1
        first = rng.randrange(expected + 1)  # a run may begin at any known page
        found = [(node, page, place) for node, part in tree.spans(chain[first:])
                 for page, place in zip(node.pages[part], (node.host_blocks or [None] * len(node.pages))[part])]  # fmt: skip
        assert [(page, bool(node.parent)) for node, page, _ in found] == [(page, page in known) for page in chain[first:]]
        states = [known.get(page, dict(device=False, host_blocks=None, stored=False)) for page in chain[first:]]
        assert [dict(device=node.device, host_blocks=place, stored=node.stored) for node, _, place in found] == states
        run, tier = chain[rng.randrange(expected + 1) :] or chain, rng.choice(["device", "host_blocks", "stored"])
        if rng.random() < 0.7:
            has = rng.random() < 0.6
            state = {page: number + at if tier == "host_blocks" else True for at, page in enumerate(run) if has}
            for node in tree.change(set(run)):
                setattr(node, tier, [state[page] for page in node.pages if has] if tier == "host_blocks" else has)
            for page in chain:
                known.setdefault(page, dict(device=False, host_blocks=None, stored=False))
                if page in run:
                    known[page][tier] = state.get(page, None if tier == "host_blocks" else False)
        if rng.random() < 0.1:  # forget leaves whose pages are neither on the device nor in host memory
            keep = set(rng.sample(sorted(known, key=lambda page: page.digest), len(known) // 2))
            tree.forget(keep)
            left = {page for node in tree.nodes() for page in node.pages}
            gone = [state for page, state in known.items() if page not in left]
            assert not keep - left and not any(state["device"] or state["host_blocks"] is not None for state in gone)
            ends = [node for node in tree.nodes() if not node.children]
            assert all(node.is_local or keep & {*node.pages} for node in ends), "a leaf is kept only for a reason"
            known = {page: known[page] for page in left}
        check_tree(tree)
    assert len(tree.nodes()) < tree.size, "consecutive pages share a node"


def test_a_match_looks_at_the_nodes_on_its_path_only():
    block_keys, tree = paged.BlockKeys("", 1), tiers.HiRadixTree()
    for number in range(400):
        tree.take(block_keys.extend([], [7, 7, number, *range(number, number + 47)]))
    assert tree.size > 18_000
    for node in (nodes := [tree.root, *tree.nodes()]):
        node.children = Mock(wraps=node.children)
    found = tree.spans(block_keys.extend([], [7, 7, 5, *range(5, 52)]))
    assert sum(len(node.pages[part]) for node, part in found) == 50
    assert sum(node.children.get.call_count for node in nodes) == 2


# 2. Saving -------------------------------------------------------------------------------------

@pytest.mark.parametrize("together", [True, False])
def test_write_through_selective_counts_requests_that_come_together_and_a_preempted_one_once(together):
    shelf, rng = Shelf(), random.Random(0)
    with engine_on(shelf, write="write_through_selective", blocks=40 if together else 14) as engine:
        prompt, engine.token_budget = draw(rng, 100), 512 if together else 3
        alone = [Request(draw(rng, 31), 60), Request(draw(rng, 150), 4)]
        engine.generate([Request([*prompt, number], 2) for number in range(3)] if together else alone)
        wait_until_idle(engine)
        assert len(shelf) == (6 if together else 0) and bool(engine.counts["preemptions"]) != together


@pytest.mark.parametrize("write", tiers.WRITE)
def test_what_a_crash_costs(write):
    """After a crash without close(), as by kill -9, only the pages in storage are left."""
    shelf, rng = Shelf(), random.Random(0)
    twice, once = draw(rng, 100), draw(rng, 100)
    with engine_on(shelf, write=write) as engine:
        saved(engine, twice, once, twice)
        left = len(shelf)
        assert bool(engine.counts["swap_outs"]) == (write != "write_back")
    assert left == dict(write_through=12, write_through_selective=6, write_back=0)[write]
    assert len(shelf) >= 12 or write != "write_back", "close() writes the remaining pages"


@pytest.mark.parametrize("write", tiers.WRITE)
@pytest.mark.parametrize("fault, host", [("none", 30), ("none", 16), ("none", 4), ("set", 30), ("one", 30), ("host", 2)])
def test_what_leaves_all_tiers_is_counted(write, fault, host, monkeypatch):
    """Fourteen prompts on tiers that hold three, or less.

    A page that should be in storage at the end and is not was lost, and is counted."""
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 60.0)  # long, since the machine may be busy
    shelf, rng = Shelf(), random.Random(0)
    with engine_on(shelf, write=write, blocks=24, host=host) as engine:
        keep = shelf.set
        all_but_one = lambda keys, values: keep(keys[1:], values[1:]) or failing(keep)()  # noqa: E731
        shelf.set = dict(set=failing(keep), one=all_but_one).get(fault, keep)
        prompts = [draw(rng, 300) for _ in range(14)]
        saved(engine, *prompts)
        forget(engine)
        wanted = 0 if write == "write_through_selective" else 14 * 18
        assert len(shelf) + engine.counts["pages_lost"] == wanted, engine.counts
        assert engine.counts["pages_lost"] == 0 or fault != "none", "no page is lost if storage is fast and nothing fails"
        assert len(shelf) >= 18 or fault == "host" or not wanted
        if write == "write_back" and fault == "none":
            assert {engine.counts[name] for name in ("dirty_evicted", "pages_written", "storage_pages_written")} == {wanted}
            assert host < 30 or right(engine, prompts[0]).found == {"storage": 288}
        keys = [[block_key.digest.hex() for block_key in engine.block_keys.extend([], prompt)] for prompt in prompts]
        gaps = [key for chain in keys for before, key in zip(chain, chain[1:])
                if key in shelf.pages and before not in shelf.pages]  # fmt: skip
        assert not gaps or engine.counts["pages_lost"], "no page is written after a gap in its chain"


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_page_that_storage_has_is_not_dirty_when_it_was_computed_again(write):
    shelf, prompt = Shelf(), draw(random.Random(0), 300)
    with engine_on(shelf) as engine:
        right(engine, prompt)
    with engine_on(shelf, "best_effort", write, threshold=1 << 20) as engine:  # it asks storage, and reads nothing
        assert right(engine, prompt).found == {}
        evict(engine)
        assert not engine.counts["dirty_evicted"] + engine.counts["storage_pages_written"]


@pytest.mark.parametrize("cache", ["host", "tiered"])
def test_a_copy_out_that_failed_is_begun_later_and_leaves_no_gap(cache):
    with engine_with(engines.CACHES[cache](40), 40) as engine:
        engine.submit(request := Request(draw(random.Random(0), 100), 40))
        with faulty(random.Random(0), failing=1.0, lanes=["save"]) as faults:
            assert steps(engine, lambda: len(request.new) == 2)
        assert faults.failed and not engine.lower_tier.cache.host.block_of
        until_over(engine, request)
        wait_until_idle(engine)
        assert len(engine.lower_tier.cache.host.find(request.chain)) == 8


@pytest.mark.parametrize("device, host, pages, held", [(54, 34, 20, 0), (54, 6, 6, 6), (54, 6, 20, 0)])
def test_what_found_no_room_is_sent_down_when_there_is_though_its_request_is_over(device, host, pages, held):
    """Five prompts at once.

    Storage has room for all of them. In host memory, newer pages that are stored make room for older ones."""
    shelf, rng, other = Shelf(), random.Random(0), Transfer("load", "another's")
    with engine_on(shelf, blocks=device, host=host) as engine:
        cache = engine.lower_tier.cache
        cache.hold("load", [other], given=[(cache.host, cache.host.allocate(held))])
        engine.generate([Request(draw(rng, 16 * pages), 1) for _ in range(5)])
        other.finish(0.0, 0.0)
        wait_until_idle(engine)
        below = (node.pages for node in cache.tree.nodes() if node.host_blocks or node.stored)
        assert not set(engine.pool.block_of).difference(*below) and not cache.pending_saves
        assert len(shelf) + engine.counts["pages_lost"] == 5 * pages


def test_where_storage_hangs_what_is_evicted_from_host_memory_is_lost_and_counted(monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.05)
    shelf, rng = Shelf(), random.Random(0)
    with engine_on(shelf, write="write_back", blocks=16, host=4) as engine:
        shelf.set = lambda keys, values: shelf.open.wait(60)
        shelf.open.clear()
        cache, asked = engine.lower_tier.cache, []
        while not cache.storage.writer.hangs:
            asked.append(right(engine, draw(rng, 100)))
        asked += [right(engine, draw(rng, 100)) for _ in range(2)]
        engine.evict("device")  # more pages than host memory has room for
        pages = {page for request in asked for page in request.chain[: request.registered]}
        left = [page for page in pages if page in cache.host.block_of or page in cache.writing]
        assert engine.counts["pages_lost"] == len(pages) - len(left) > 0, "each lost page is counted once"
        shelf.open.set()


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_pages_that_storage_does_not_take_are_forgotten_and_their_writes_counted(fault, monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.05)
    shelf, rng, keys = Shelf(), random.Random(0), []
    with engine_on(shelf, blocks=8, host=8) as engine:
        shelf.open.clear()
        keep, shelf.set = shelf.set, lambda *given: 1 / 0 if fault == "fails" else shelf.open.wait(60) and keep(*given)
        for _ in range(40):
            right(engine, draw(rng, 100), 1)
            keys.append(len(engine.block_keys.known))
        shelf.open.set()
    assert max(keys) <= 120, "the keys of pages that no tier holds are forgotten"
    assert len(shelf) + engine.counters()["writes_dropped"] == 240


def test_an_eviction_waits_as_long_as_its_copy_takes_and_one_that_fails_or_is_late_is_lost_and_never_found(monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.25)
    rng = random.Random(0)
    with engine_on(Shelf(), write="write_back", blocks=16, host=32) as engine:
        link, counts = engine.lower_tier.cache.save_link, engine.counts
        saved(engine, draw(rng, 200))
        link.bandwidth, fast = Bandwidth(12 * engine.lower_tier.cache.host.block_bytes / 1.0), link.bandwidth
        right(engine, draw(rng, 200))
        assert counts["pages_written"] > 0 and not counts["pages_lost"]
        wait_until_idle(engine)
        link.bandwidth, written = fast, counts["pages_written"]
        with faulty(rng, failing=0.3, late=0.3, noisy=2, delay=0.6, lanes=["save"]) as faults:
            for prompt in rng.choices([draw(rng, 100) for _ in range(4)], k=24):
                right(engine, prompt)
                late = [transfer for transfer, *_ in faults.copies if not transfer.ready]
                assert not late or any(engine.lower_tier.cache.host.references), "blocks that a late copy still writes stay referenced"
            wait_until_idle(engine)
        assert faults.failed and faults.delayed and counts["pages_lost"] > 0 and counts["pages_written"] > written


def test_what_is_matched_does_not_go_for_its_own_requests_blocks():
    rng = random.Random(0)
    with engine_on(Shelf(), "best_effort", "write_back", blocks=16, host=6, threshold=512) as engine:
        prompt = draw(rng, 100)
        right(engine, prompt)
        evict(engine)  # its six pages fill host memory
        right(engine, draw(rng, 200))  # its dirty pages need room in host memory
        assert right(engine, prompt).found == {"cpu": 96}
        assert engine.counts["pages_lost"] > 0


@pytest.mark.parametrize("blocks, host, tokens", [(12, 4, 100), (16, 6, 140), (20, 8, 180)])
def test_room_on_the_device_is_not_made_of_the_host_pages_that_are_about_to_be_loaded(blocks, host, tokens):
    shelf, rng = Shelf(), random.Random(1)
    with engine_on(shelf) as engine:
        saved(engine, prompt := draw(rng, tokens))
    with engine_on(shelf, "wait_complete", "write_back", blocks=blocks, host=host, threshold=16) as engine:
        right(engine, draw(rng, 16 * blocks - 20))  # its dirty pages fill the device, and need room in host memory
        assert right(engine, prompt).found["storage"] >= 64


def test_a_match_ends_at_a_gap_in_host_memory_though_the_device_has_that_page():
    with engine_on(Shelf(), "best_effort", threshold=512) as engine:
        saved(engine, prompt := draw(random.Random(0), 100))
        first, second, *_ = engine.block_keys.extend([], prompt)
        engine.pool.evict([engine.pool.block_of[first]])
        engine.lower_tier.cache.host.evict([engine.lower_tier.cache.host.block_of[second]])
        assert right(engine, prompt).found == {"cpu": 16}


def test_nothing_is_written_behind_a_page_that_no_tier_has():
    with engine_on(shelf := Shelf()) as engine:
        saved(engine, prompt := draw(random.Random(0), 70))
        cache, (_, *later) = engine.lower_tier.cache, engine.block_keys.extend([], prompt)
        engine.pool.evict([engine.pool.block_of[page] for page in later])
        forget_from(engine, prompt, page=1)  # only storage has them; then it loses them
        for page in later:
            del shelf.pages[page.digest.hex()]
        cache.add_to_l2(later[1:], places := cache.host.allocate(2))
        cache.host.release(places)
        cache.doubt(later)
        wait_until_idle(engine)
        cache.host.evict(places)
        assert len(shelf) == 1 and engine.counts["pages_lost"] == 2


# 3. Restoring ----------------------------------------------------------------------------------

def test_best_effort_waits_for_nothing():
    with only_stored(prefetch="best_effort") as (engine, shelf, prompt):
        shelf.open.clear()
        assert right(engine, prompt).found == {}


@pytest.mark.parametrize("other, found", [(200, {"storage": 192}), (20, {})])
def test_best_effort_uses_the_pages_that_arrive_while_another_prompt_fills_the_steps(other, found):
    with only_stored(prefetch="best_effort") as (engine, shelf, prompt):
        forward, lanes = engine.runner.forward, engine.lower_tier.cache.in_flight

        def forward_slowly(*given):
            """Compute a step while storage answers, or reads pages."""
            for transfers, *_ in [*lanes["ask"], *lanes["read"]]:
                assert all(transfer.completed.wait(60) for transfer in transfers)
            return forward(*given)

        engine.token_budget, engine.runner.forward = 32, forward_slowly
        asked = Request(draw(random.Random(1), other), 4), Request(prompt, 4)
        engine.generate(asked)
        assert [request.found for request in asked] == [{}, found] and ORACLE.judge(asked[1]) != "wrong"


@pytest.mark.parametrize("then", ["", "lost", "timeout"])
@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_pages_go_on_to_the_device_while_storage_reads_later_ones(policy, then):
    with only_stored(400, policy, timeout=(30.0, 16.0)) as (engine, shelf, prompt):
        get, shelf.asked = shelf.get, []
        shelf.get = lambda keys: (shelf.asked and shelf.open.clear(), get(keys))[1]  # only the first read ends
        engine.max_running = 0 if policy == "best_effort" else 64  # so that it stays queued
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: len(engine.pool.block_of) == 4) and not request.table
        assert engine.lower_tier.cache.reading and engine.counts["swap_ins"] == 4
        seconds = dict(best_effort=-request.received, timeout=30 + 16 * 384 / 1024).get(policy, MAX_WAIT)
        assert request.memo.until == request.received + seconds
        engine.max_running = 64
        if then == "timeout":
            request.memo.until = 0.0
            until_over(engine, request)
        elif then == "lost":
            engine.evict("device")  # they are still in host memory
        shelf.get = get
        shelf.open.set()
        until_over(engine, request)
        wait_until_idle(engine)
        least = 64 if then == "timeout" or policy == "best_effort" else 384
        assert least <= request.found["storage"] <= (64 if then == "timeout" else 384)
        assert shelf.asked == [4, 4] or then != "timeout", "reads that had not begun at the timeout never begin"
        assert request.found.keys() == {"storage"} and ORACLE.judge(request) != "wrong"


def test_the_guard_does_not_wait_for_storage_slower_than_computing():
    with only_stored() as (engine, shelf, prompt):
        slow_storage(engine, 200)
        shelf.open.clear()  # no read ends before the decision, and tells another speed
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: request.decisions) and request.memo.until <= time.perf_counter()
        until_over(engine, request)
        assert request.found == {} and [("storage" in words, "computed" in words) for words in request.decisions] == [(True, True)]


@contextmanager
def in_line(engine, prompt: list[int], **options):
    """Context manager: return a request that stays queued until the end of the block.

    Then it must be answered correctly."""
    engine.max_running = 0
    engines.submit(engine, request := Request(prompt, 4, **options), steps=1)
    yield request
    engine.max_running = 64
    until_over(engine, request)
    assert ORACLE.judge(request) != "wrong"


def test_who_stands_in_line_finds_what_another_engine_has_written_meanwhile(monkeypatch):
    monkeypatch.setattr(tiers, "RETRY_SECONDS", 0.0)
    shelf, prompt = Shelf(), draw(random.Random(0), 200)
    with engine_on(shelf, "best_effort") as engine, engine_on(shelf) as other:
        with in_line(engine, prompt) as request:
            assert steps(engine, lambda: request.memo.answered)
            for part in prompt[:100], prompt:  # storage is asked again while the request is queued
                saved(other, part)
                assert steps(engine, lambda part=part: len(engine.lower_tier.cache.host.block_of) == len(part) // 16)
        assert request.found == {"storage": 192}


@pytest.mark.parametrize("threshold, found", [(64, {"storage": 64}), (65, {})])
def test_what_is_less_than_the_threshold_is_not_read(threshold, found):
    with only_stored(200, threshold=threshold) as (engine, shelf, prompt):
        shelf.pages.pop(engine.block_keys.extend([], prompt)[4].digest.hex())  # the page after the first four
        assert right(engine, prompt).found == found


def read_in_steps(engine, shelf):
    """Let each step compute at most 16 tokens, and complete one read, of up to four pages, before it."""
    allowed, get, forward = threading.Semaphore(0), shelf.get, engine.runner.forward

    def read_and_forward(*given):
        reads = [read for reads, *_ in engine.lower_tier.cache.in_flight["read"] for read in reads if not read.ready]
        for read in reads[:1]:
            allowed.release()
            assert read.completed.wait(60)
        return forward(*given)

    shelf.get = lambda keys: allowed.acquire(timeout=60) and get(keys)
    engine.token_budget, engine.runner.forward = 16, read_and_forward


def test_from_both_ends_prefill_and_storage_meet():
    with only_stored(480, "both_ends") as (engine, shelf, prompt):
        read_in_steps(engine, shelf)
        copy_in, ahead = engine.lower_tier.cache.copy_in, []
        engine.lower_tier.cache.copy_in = lambda request, start, host_blocks: ahead.append(
            start - request.computed - dict(engine.work).get(request, 0)) or copy_in(request, start, host_blocks)  # fmt: skip
        request = right(engine, prompt)
        assert request.found == {"storage": 16 * (29 - 6)}, "six steps compute six pages; six reads bring the others"
        assert min(ahead) >= 0, "no step computes tokens that storage is to restore"
        assert not engine.counts["failed_restorations"], "no restoration fails"


def test_a_claimed_page_whose_copy_fails_at_once_is_computed():
    with only_stored(480, "both_ends") as (engine, shelf, prompt):
        engine.pool.memory.fill_(float("nan"))
        failed, cache = Transfer("load", "layer 0"), engine.lower_tier.cache
        failed.finish(0.0, 0.0, RuntimeError("no"))
        cache.copy_in = Mock(wraps=cache.copy_in, side_effect=[DEFAULT] + 99 * [[failed]])  # the first copy succeeds
        read_in_steps(engine, shelf)
        request = right(engine, prompt)
        assert cache.copy_in.call_count > 1 and engine.counts["failed_restorations"] == 1 and not request.found


@pytest.mark.parametrize("found", [{}, {"storage": 464}])
def test_before_both_ends_has_begun_storage_brings_all_or_fails(found):
    with only_stored(480, "both_ends", host=64) as (engine, shelf, prompt):
        shelf.get, offer = shelf.get if found else Mock(side_effect=OSError), engine.lower_tier.cache.offer
        engine.lower_tier.cache.offer = lambda request: ([read.completed.wait(60) for read in request.memo.reads], offer(request))[1]
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: request.outcome, 500) and request.found == found and ORACLE.judge(request) != "wrong"


def test_before_a_page_that_host_memory_has_lost_both_ends_claims_nothing(monkeypatch):
    with only_stored(480, "both_ends") as (engine, shelf, prompt):
        host, last, poll = engine.lower_tier.cache.host, engine.block_keys.extend([], prompt)[28], engines.offload.Cache.poll
        read_in_steps(engine, shelf)
        lose = lambda: host.evict([place for place in [host.block_of.get(last)] if place in host.cached])  # noqa: E731
        monkeypatch.setattr(engines.offload.Cache, "poll", lambda cache: (poll(cache), lose()))
        assert not right(engine, prompt).found, "pages from storage would get the lost page's block"


def test_both_ends_begins_with_what_host_memory_has_however_slow_storage_is():
    shelf, prompt = Shelf(), draw(random.Random(0), 480)
    with engine_on(shelf, "both_ends") as engine:
        right(engine, prompt)
        evict(engine)
        forget_from(engine, prompt, page=10)
        read_in_steps(engine, shelf)
        request = right(engine, prompt)
        assert request.found == {"cpu": 160, "storage": 16 * (19 - 4)}
        assert not engine.counts["failed_restorations"], "no restoration fails"
        evict(engine)
        forget_from(engine, prompt, page=4)
        slow_storage(engine, 480)
        del shelf.get, engine.runner.forward  # reads no longer wait for steps
        shelf.open.clear()
        assert right(engine, prompt).found == {"cpu": 64}
        shelf.open.set()


@pytest.mark.parametrize("policy, taken, found", [("both_ends", 0, 320), ("both_ends", 20, 0), ("wait_complete", 20, 0)])
def test_what_came_is_used_and_what_host_memory_has_no_place_for_is_not_offered(policy, taken, found):
    shelf, prompt, other = Shelf(), draw(random.Random(0), 480), Transfer("load", "another's")
    with engine_on(shelf) as engine:
        right(engine, prompt)
    with engine_on(shelf, policy, host=20) as engine:
        engine.lower_tier.cache.hold("load", [other], given=[(engine.pools["host"], engine.pools["host"].allocate(taken))])
        with in_line(engine, prompt) as request:
            assert steps(engine, lambda: request.memo.ended)
        other.finish(0.0, 0.0)
        assert request.found.get("storage", 0) == request.cached_tokens == found
        assert bool(request.decisions) == bool(found), "a decision is written only if something was offered"


def test_the_tree_knows_what_came_back_to_a_request_that_ends_before_it_computes():
    with engine_on(Shelf()) as engine:
        right(engine, prompt := draw(random.Random(0), 200))
        evict(engine)
        engine.submit(other := Request(draw(random.Random(1), 20), 200))
        assert steps(engine, lambda: other.new)  # so that `back` is restored between its steps
        engine.submit(back := Request(prompt, 4))
        forward = engine.runner.forward
        engine.runner.forward = lambda work, *given: 1 / 0 if back.registered and back in dict(work) else forward(work, *given)
        assert steps(engine, lambda: isinstance(back.outcome, RequestError))
        engine.runner.forward = forward
        wait_until_idle(engine)


def test_nobody_waits_for_storage_once_the_device_has_it():
    with only_stored() as (engine, shelf, prompt):
        shelf.open.clear()
        engine.submit(waits := Request(prompt, 4))
        assert steps(engine, lambda: waits.memo and waits.memo.reads)
        engine.lower_tier.cache.threshold = 1 << 20  # the next request does not ask storage
        engine.generate([Request(prompt, 4)])
        assert steps(engine, lambda: waits.outcome, 20) and waits.found == {"gpu": 192}


@contextmanager
def opened(backend):
    """Context manager: return (an open storage, three keys, an array for each key)."""
    storage = store.Storage(backend)
    storage.open(Worker, {})
    yield storage, [bytes([number]) * 32 for number in range(3)], [numpy.zeros(8, "u1") for _ in range(3)]
    storage.close()


def test_an_answer_whether_storage_has_it_stands_behind_no_read():
    with opened(shelf := Shelf()) as (storage, keys, places):
        storage.set(keys[1:], places[1:]).wait(60)
        shelf.open.clear()
        read, asked = storage.get(keys[1:], places[1:]), storage.exists(keys)
        asked.wait(60)
        assert asked.value == [False, True, True] and not read.ready
        shelf.open.set()
        read.wait(60)


def test_prefetches_hold_half_of_host_memory_at_most_and_the_second_waits_for_the_places_of_the_first():
    with only_stored((100, 80), host=10) as (engine, shelf, *prompts):
        shelf.open.clear()
        asked = [Request(prompt, 2) for prompt in prompts]
        engines.submit(engine, *asked, steps=20)
        assert 0 < sum(engine.lower_tier.cache.host.references) <= 5
        shelf.open.set()
        until_over(engine, *asked)
        assert [request.found for request in asked] == [{"storage": 96}, {"storage": 64}]
        assert max(len(request.decisions) for request in asked) <= 2, "to wait and to load are each decided once at most"


@pytest.mark.parametrize("again", [1.0, 0.0])
def test_what_was_read_for_a_request_that_waits_does_not_leave_for_another_ones_pages(again, monkeypatch):
    monkeypatch.setattr(tiers, "RETRY_SECONDS", again)  # seconds until storage is asked again for a request that has all its pages
    with only_stored((100, 80), host=8) as (engine, _, *prompts):
        with in_line(engine, prompts[0]) as first, in_line(engine, prompts[1]):
            assert steps(engine, lambda: len(first.memo.pages_read) == 6)
            steps(engine, lambda: False, 20)
        assert first.found == {"storage": 96}


def test_pages_read_for_a_waiting_request_survive_the_saves_of_another():
    with only_stored((100, 40), host=8) as (engine, _, long, short):
        engine.max_running = 1
        engine.submit(other := Request(short, 400))
        assert steps(engine, lambda: other.new)
        engine.submit(request := Request(long, 2))
        assert steps(engine, lambda: request.memo and len(request.memo.pages_read) == 6)
        assert len(other.new) < 200, "most of its pages are still to be saved"
        until_over(engine, other, request)
        assert request.found == {"storage": 96}


def test_storage_is_asked_nothing_for_a_request_that_must_compute():
    with only_stored() as (engine, shelf, prompt):
        shelf.asked.clear()
        with in_line(engine, prompt, must_compute=True) as request:
            steps(engine, lambda: False, 5)
            assert not request.memo and not shelf.asked
        assert request.found == {}


@pytest.mark.parametrize("policy", ["both_ends", "best_effort"])
def test_what_storage_says_too_late_is_not_read(policy):
    """When storage answers, the request already computes (both_ends) or loads from host memory (best_effort)."""
    with only_stored(200, policy) as (engine, shelf, prompt):
        if policy == "best_effort":
            right(engine, prompt[:70])
            evict(engine)
        engine.submit(other := Request(draw(random.Random(1), 20), 99))  # the restoration continues between its steps
        assert steps(engine, lambda: other.new)
        load, cache, exists = Transfer("load", "layer 0"), engine.lower_tier.cache, shelf.exists
        cache.copy_in = lambda *_: [load]
        shelf.exists = lambda keys: shelf.open.wait(60) and exists(keys)
        shelf.asked.clear()
        shelf.open.clear()
        engines.submit(engine, request := Request(prompt, 99), steps=1)
        request.wait_deadline, engine.token_budget = 0.0, 16  # so that the request takes many steps
        assert steps(engine, lambda: request.table) and bool(request.restoration) == (policy == "best_effort")
        shelf.open.set()
        [transfer.completed.wait(60) for transfers, *_ in cache.in_flight["ask"] for transfer in transfers]
        steps(engine, lambda: False, 5)
        assert request.memo.answered and not request.memo.reads
        load.finish(0.0, 0.0, RuntimeError("no"))
        until_over(engine, request, other)
        assert request.found == {} and not shelf.asked and ORACLE.judge(request) != "wrong"


@pytest.mark.parametrize("answer, silent", [(None, True), ([], True), ([5, 5], True), ([None], False)])
def test_an_answer_without_its_page_doubts_that_and_one_that_is_none_is_silence(answer, silent):
    with opened(shelf := Shelf()) as (storage, keys, places):
        storage.set(keys, places).wait(60)
        shelf.get = lambda keys: answer
        with pytest.raises(TransferError, match=None if silent else "missing"):
            storage.get(keys[:1], places[:1]).wait(60)
        assert storage.doubted == set(keys[:1]) and storage.silent == silent


def test_what_storage_lacks_is_not_read_when_it_has_left_host_memory_meanwhile():
    with only_stored() as (engine, shelf, prompt):
        right(engine, prompt[:50])
        evict(engine)  # host memory has three pages
        for block_key in engine.block_keys.extend([], prompt)[:3]:
            del shelf.pages[block_key.digest.hex()]
        shelf.asked.clear()
        exists, shelf.exists = shelf.exists, lambda keys: shelf.open.wait(60) and exists(keys)
        shelf.open.clear()
        engine.submit(request := Request(prompt, 2))
        engine.take_arrivals()  # storage is asked while host memory has three pages
        engine.evict("host")
        shelf.open.set()
        until_over(engine, request)
        assert not shelf.asked and not engine.counts["storage_errors"] and ORACLE.judge(request) != "wrong"


# 4. Storage ------------------------------------------------------------------------------------

@pytest.mark.parametrize("second", tiers.LAYOUTS)
@pytest.mark.parametrize("first", tiers.LAYOUTS)
def test_engines_share_storage_whose_layouts_have_pages_of_the_same_bytes(first, second):
    shelf, prompt = Shelf(), draw(random.Random(0), 200)
    shares, kept = (first == "page_first") == (second == "page_first"), []
    for layout, found in (first, {}), (second, {"storage": 192} if shares else {}):
        with engine_on(shelf, layout=layout) as engine:
            assert right(engine, prompt).found == found
            memory, page = engine.lower_tier.cache.host.memory, engine.lower_tier.cache.array[0]
            assert [memory.stride(axis) for axis in tiers.LAYOUTS[layout]] == sorted(memory.stride(), reverse=True)
            assert page.flags.c_contiguous == (layout != "layer_first"), "a page is contiguous, so it is read and written in one piece"
            table = engine.pool.find(engine.block_keys.extend([], prompt))
            kept.append(engine.pool.memory[:, :, table].clone())
    assert torch.equal(*kept) and len(shelf) == (12 if shares else 24)


@pytest.mark.parametrize("when", ["before it is asked", "behind its answer", "while it fails"])
def test_storage_that_restarts_empty_gets_its_pages_again_and_those_that_nothing_has_are_lost(when):
    with only_stored(470) as (engine, shelf, prompt):
        right(engine, prompt)
        evict(engine)
        forget_from(engine, prompt, page=10)  # host memory has ten pages, storage all 29

        def restart(keys):
            shelf.pages.clear()
            return [None] * len(keys) if when == "behind its answer" else 1 / 0

        if when == "before it is asked":
            shelf.pages.clear()
        get, shelf.get = shelf.get, restart
        with in_line(engine, prompt) as request:
            assert steps(engine, lambda: engine.counts["pages_lost"] == 19)
            shelf.get = get
        wait_until_idle(engine)
        assert len(shelf) == 29 and engine.counts["pages_lost"] == 19 and request.found == {"cpu": 160}


@pytest.mark.parametrize("verb", ["get", "exists"])
def test_storage_that_hangs_delays_one_request_and_then_nobody(monkeypatch, verb):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.05)
    with only_stored(200, "timeout", timeout=(1e9, 0.0)) as (engine, shelf, prompt):
        does = getattr(shelf, verb)
        setattr(shelf, verb, lambda keys: shelf.open.wait(60) and does(keys))
        shelf.open.clear()
        engine.submit(waits := Request(prompt, 4))
        assert steps(engine, lambda: waits.outcome, 500) and waits.found == {} and ORACLE.judge(waits) != "wrong"
        engines.submit(engine, request := Request(draw(random.Random(1), 200), 2), steps=1)
        assert not request.memo, "a storage that hangs is not asked"
        until_over(engine, request)


@pytest.mark.parametrize("policy", ["wait_complete", "both_ends"])
@pytest.mark.parametrize("verb", ["get", "exists"])
def test_nobody_waits_for_storage_that_has_failed_until_it_has_answered_again(verb, policy, monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 1e9)  # the storage fails, and must not count as hanging
    monkeypatch.setattr(tiers, "RETRY_SECONDS", 0.0)
    with only_stored(200, policy) as (engine, shelf, prompt):
        does, broken = getattr(shelf, verb), [True]

        def fails(keys):
            assert shelf.open.wait(60)
            if broken[0]:
                raise TimeoutError
            return does(keys)

        setattr(shelf, verb, fails)
        assert right(engine, prompt).found == {}
        forget(engine)
        shelf.open.clear()  # the next answer is an error again, and does not come before the shelf is opened
        for asked in Request(prompt, 4), Request(draw(random.Random(1), 200), 4):
            engine.submit(asked)
            assert steps(engine, lambda asked=asked: asked.outcome, 500) and asked.found == {}, "no request waits"
        broken[0] = False
        shelf.open.set()
        wait_until_idle(engine)
        right(engine, prompt)  # its lookup finds that storage answers again; doubted pages are written again
        forget(engine)
        assert right(engine, prompt).found == {"storage": 192} or policy == "both_ends"
        assert not engine.lower_tier.cache.storage.silent


@pytest.mark.parametrize("verb", ["exists", "get"])
def test_ranks_wait_once_for_pages_that_do_not_come(verb):
    shelf, rng = Shelf(), random.Random(0)
    answer = getattr(shelf, verb)
    setattr(shelf, verb, lambda keys: shelf.open.wait(60) and answer(keys))
    cache = ranked.PageHeadCache(Ranks(), 80, 2e9, store.Storage(shelf), range(2))
    cache.threshold, prompts = 32, [draw(rng, 200) for _ in range(3)]
    with engine_with(cache, 40) as engine:
        saved(engine, *prompts)
        forget(engine)
        shelf.open.clear()
        for prompt, until in zip(prompts, (0.0, 1e9, 1e9)):  # the later requests have no deadline of their own
            engines.submit(engine, request := Request(prompt, 2), steps=1)
            cache.until[request] = until
            assert steps(engine, lambda: request.outcome, 500), "after one request has waited in vain, no other one waits"
            assert len(cache.in_flight["ask"]) < 2, "no other request asks storage"
        shelf.open.set()
        forget(engine)
        right(engine, prompt)
        forget(engine)
        assert not cache.late and right(engine, prompt).found == {"storage": 192}, "pages from storage were read into host memory"


@pytest.mark.parametrize("kind", ["file", "redis", "own"])
def test_a_back_end_keeps_what_it_is_given(kind, tmp_path):
    def check(url: str, config: dict | None = None):
        backend, (one, two, three, empty) = backends.open_backend(url, config), (digit * 64 for digit in "abcd")
        backend.set([one, two, empty], [b"1" * 100, b"2" * 50, b""])  # a crash may leave an empty file
        assert list(map(bool, backend.exists([one, three, two]))) == [True, False, True]
        assert backend.get([empty, three, one]) == [b"", None, b"1" * 100]
        assert backend.get([two]) == [b"2" * 50]
        with engine_on(backends.open_backend(url, config)) as engine:
            right(engine, prompt := draw(random.Random(0), 200))
            forget(engine)
            assert right(engine, prompt).found == {"storage": 192}

    if kind == "redis":
        with redis_server() as url:
            check(url)
    elif kind == "file":
        check(f"file:{tmp_path}")
    else:
        check("tests.support.ranks:Losing", dict(rng=random.Random(0), share=0.0))
        check("shell.backends:Directory", dict(url=str(tmp_path)))


KEYS = [f"{number:064x}" for number in range(40)]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_directory_stays_below_its_limit_however_many_write_there(processes, tmp_path):
    writers = [backends.Directory(f"file:{tmp_path}", limit_gb=1e-5) for _ in range(processes)]
    peak = 0
    for number in range(400):
        writers[number % processes].set([f"{number:064x}"], [bytes(100)])
        peak = max(peak, sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert 9_000 < peak <= 10_000 + (processes - 1) * 1_100, "each process scans the folder after a tenth of the limit"
    assert (tmp_path / f"{399:064x}.page").exists()


def test_a_write_that_failed_takes_no_room(tmp_path, monkeypatch):
    backend = backends.Directory(f"file:{tmp_path}", limit_gb=1e-6)
    backend.set(KEYS[:5], [bytes(100)] * 5)
    with monkeypatch.context() as patch:
        patch.setattr(backends.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        for _ in range(9):
            with pytest.raises(OSError):
                backend.set(KEYS[5:6], [bytes(100)])
    backend.set(KEYS[5:8], [bytes(100)] * 3)
    assert all(backend.exists(KEYS[:8]))


@pytest.mark.parametrize("limit", [0, -1, 1e-300, math.nan, math.inf, 10**400, True, "4 GB", None], ids=lambda limit: f"{limit}"[:6])
def test_what_is_no_limit_is_one_sentence_and_deletes_nothing(limit, tmp_path):
    backends.Directory(f"file:{tmp_path}").set(KEYS, [bytes(100)] * len(KEYS))
    for opened in backends.open_backend, backends.open_storage:
        with pytest.raises(BadRequest, match="^limit_gb, .* must be a number from 1e-9 to 1e9.$"):
            opened(f"file:{tmp_path}", dict(limit_gb=limit))
    assert len(list(tmp_path.iterdir())) == len(KEYS)
    for chapter in engines.hidden_states, engines.planned, engines.both_ends:
        chapter.add_arguments(parser := cli.parser_for(""))
        with pytest.raises(SystemExit):
            parser.parse_args(["--disk", str(tmp_path), "--disk-limit", str(limit)])


def small_disk(monkeypatch, size: int):
    """Pretend that a folder's file system has `size` bytes. A write that does not fit leaves a part of its file."""
    write = backends.Path.write_bytes

    def write_bytes(path, value):
        room = size - sum(file.stat().st_size for file in path.parent.iterdir())
        write(path, value[: max(0, room)])
        if room < len(value):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backends.Path, "write_bytes", write_bytes)


def test_on_a_full_file_system_the_least_recently_used_go_and_where_that_is_in_vain_few(tmp_path, monkeypatch, capsys):
    small_disk(monkeypatch, 2000)
    backend = backends.Directory(f"file:{tmp_path}", limit_gb=1.0)
    for key in KEYS:
        backend.set([key], [bytes(100)])
    assert backend.exists(KEYS[-10:]) == [True] * 10 and capsys.readouterr().err == ""
    before = len(list(tmp_path.iterdir()))
    for key in 9 * KEYS[:1]:
        with pytest.raises(OSError):
            backend.set([key], [bytes(3000)])
    assert len(list(tmp_path.iterdir())) < before and capsys.readouterr().err.count("No space left") == 1
    backend.set(KEYS[:9], [bytes(100)] * 9)
    monkeypatch.setattr(backends, "PAUSE", 0.0)
    assert all(backend.exists(KEYS[:9]))


def test_a_directory_touches_only_what_it_writes(tmp_path):
    old = time.time() - 10_000
    for name in ("notes.tmp", "book.page", "a" * 64 + ".page.bak", "b" * 63 + ".page"):
        (tmp_path / name).write_bytes(bytes(5_000))
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "folder.tmp").mkdir()
    (tmp_path / ("c" * 64 + ".page")).mkdir()
    own = tmp_path / f"{KEYS[0]}.page.{'0' * 32}.tmp"  # left by a process that was killed
    own.write_bytes(b"half")
    os.utime(own, (old, old))
    others = {path.name for path in tmp_path.iterdir()} - {own.name}
    backend = backends.Directory(f"file:{tmp_path}", limit_gb=1e-6)
    for key in KEYS:
        backend.set([key], [bytes(100)])
    left = {path.name for path in tmp_path.iterdir()}
    assert others <= left and own.name not in left and len(left - others) <= 10


def test_a_file_that_cannot_be_written_read_or_deleted_costs_no_other(tmp_path, monkeypatch, capsys):
    backend = backends.Directory(f"file:{tmp_path}", limit_gb=1e-6)
    for key in KEYS[:2]:
        (tmp_path / f"{key}.page").mkdir()
    (tmp_path / f"{KEYS[0]}.page" / "somebodys").write_bytes(b"1")
    (tmp_path / f"{KEYS[3]}.page").symlink_to(f"{KEYS[3]}.page")
    with pytest.raises(OSError):
        backend.set(KEYS[:3], [bytes(100)] * 3)
    assert backend.get(KEYS[:4]) == [None, bytes(100), bytes(100), None] and len(backend.files()) == 2
    delete, refused = backends.Path.unlink, tmp_path / f"{KEYS[2]}.page"  # the oldest file
    refuse = lambda path, **options: os.rmdir(path) if path == refused else delete(path, **options)  # noqa: E731
    monkeypatch.setattr(backends.Path, "unlink", refuse)
    for key in KEYS[4:]:
        backend.set([key], [bytes(100)])
    assert capsys.readouterr().err.count("Not a directory") == 1, "the message is printed once"
    assert len(backend.files()) <= 10 and all(backend.exists([KEYS[2], *KEYS[-5:]]))


def cache_on(kind: str, folder, limit_gb: float, host: int = 40):
    """Return a Cache with `host` host blocks and files as its lower tier."""
    if kind == "tiered":
        return tiered(host, "wait_complete", "write_through", backends.Directory(f"file:{folder}", limit_gb))
    files = backends.in_directories([folder], limit_gb)
    made = dict(hidden=engines.hidden_states.HiddenCache, planned=partial(engines.planned.PlannedCache, plan="RHK"))
    return engines.both_ends.BidirectionalCache(files, share=0.0) if kind == "both" else made[kind](host, 2e9, files)


FILES = pytest.mark.parametrize("kind", ["hidden", "planned", "both", "tiered"])


@FILES
def test_what_is_used_on_the_device_is_not_the_oldest_in_storage(kind, tmp_path):
    rng = random.Random(0)
    hot, one = draw(rng, 200), draw(rng, 200)
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        ask(engine, hot)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    with engine_with(cache_on(kind, tmp_path, 3.4e-9 * size)) as engine:
        for prompt in (hot, one, *(draw(rng, 200) for _ in range(6))):
            ask(engine, prompt)
            wait_until_idle(engine)
            assert ask(engine, hot).source == "gpu_hit"
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        assert ask(engine, hot, 4).cached_tokens > 100, "the prompt that was used last is still stored"
        assert ask(engine, one).found == {}, "the prompt that was used once is gone"


def test_a_value_that_is_gone_makes_storage_look_what_else_is(tmp_path):
    with opened(backends.Directory(f"file:{tmp_path}")) as (storage, keys, places):
        storage.set(keys, places).wait(60)
        for path in list(tmp_path.glob("*.page"))[1:]:
            path.unlink()
        gone = next(key for key in keys if not (tmp_path / f"{key.hex()}.page").exists())
        with pytest.raises(TransferError):
            storage.get([gone], places[:1]).wait(60)
        assert [storage.has([key]) for key in keys].count(True) == 1 and not storage.silent


@FILES
@pytest.mark.parametrize("fault", ["vanished", "full"])
def test_a_folder_that_vanishes_is_made_again_and_what_does_not_fit_is_counted(kind, fault, tmp_path, monkeypatch, capsys):
    folder, rng = tmp_path / "files", random.Random(0)
    prompts = [draw(rng, 300), draw(rng, 300)]
    with engine_with(cache_on(kind, folder, 1.0)) as engine:
        ask(engine, prompts[0])
        wait_until_idle(engine)
        if fault == "vanished":
            shutil.rmtree(folder)
        else:
            small_disk(monkeypatch, 0)
        for prompt in prompts[::-1] * 2:
            forget(engine)
            assert ORACLE.judge(ask(engine, prompt)) == "equal"
            wait_until_idle(engine)
        full, said = fault == "full", capsys.readouterr().err
        assert engine.counts["failed_restorations"] <= 1 and said.count(str(folder)) == said.count("\n") == 1
        assert ("dropped: No space" if full else "had vanished") in said and (engine.counters()["storage_errors"] > 0) == full
    with engine_with(cache_on(kind, folder, 1.0)) as engine:
        assert [ask(engine, prompt).found == {} for prompt in prompts] == [False, full]


@FILES
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another", "gone", "all gone"])
def test_a_damaged_file_is_never_used_and_all_that_are_gone_are_written_again(kind, damage, tmp_path):
    prompt, rng, whole = draw(random.Random(0), 300), random.Random(f"{kind} {damage}"), 256 if kind == "both" else 288
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        ask(engine, prompt, 1)
    path, other = rng.sample(sorted(tmp_path.glob("*.page")), 2)
    good, at = path.read_bytes(), rng.randrange(path.stat().st_size)
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        request = Request(prompt + [3], 4)
        engine.block_keys.extend(request.chain, request.tokens)
        engine.lower_tier.cache.match(request)  # the match finds the file
        flipped = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        path.write_bytes(dict(flipped=flipped, cut=good[:100], another=other.read_bytes()).get(damage, b""))
        for gone in dict.fromkeys([path] * (damage == "gone") + [*tmp_path.glob("*.page")] * (damage == "all gone")):
            gone.unlink()
        engine.generate([request])
        assert ORACLE.judge(request) != "wrong" and request.cached_tokens < whole
        forget(engine)
        request = ask(engine, prompt + [3], 4)
        assert ORACLE.judge(request) != "wrong" and request.cached_tokens == whole, "the recomputed block replaces the damaged file"
        assert engine.counts["failed_restorations"] <= 1, "the first failure is enough to learn that files are gone"


@pytest.mark.parametrize("back, ahead", [(0, 0), (86_400, 0), (0, 3600)])
@pytest.mark.parametrize("apart", [1, 100, 10**9, 2 * 10**9])
def test_of_a_chain_that_is_used_the_end_is_deleted_first(apart, back, ahead, tmp_path, monkeypatch):
    """It holds although chains are read in parts, file systems have coarse times, and clocks go back or differ."""
    now, utime, new = [time.time_ns()], os.utime, partial(backends.Directory, f"file:{tmp_path}", limit_gb=1e-6)
    monkeypatch.setattr(backends.time, "time_ns", lambda: now[0])
    monkeypatch.setattr(backends.os, "utime", lambda path, ns: utime(path, ns=(0, ns[1] // apart * apart)))
    keys, backend = [hashlib.sha256(bytes([number])).hexdigest() for number in range(9)], new()
    backend.set(keys, [bytes(100)] * 9)
    assert all(backend.exists(keys))
    assert all(backend.get(keys[:3]) + backend.get(keys[3:]))
    for path in tmp_path.iterdir() if ahead else ():
        utime(path, ns=(0, path.stat().st_mtime_ns + 10**9 * ahead))
    backend, now[0] = new() if ahead else backend, now[0] - 10**9 * back
    backend.set(["f" * 64], [bytes(200)])
    assert [(tmp_path / f"{key}.page").exists() for key in keys] == [True] * 7 + [False] * 2
    new().set(["e" * 64], [bytes(100)])
    assert [(tmp_path / f"{key}.page").exists() for key in ["f" * 64, *keys]] == [True] * 7 + [False] * 3


def test_a_file_of_another_user_is_read(tmp_path, monkeypatch):
    backend, key = backends.Directory(f"file:{tmp_path}"), "0" * 64
    backend.set([key], [bytes(100)])
    monkeypatch.setattr(backends.os, "utime", Mock(side_effect=PermissionError))
    assert backend.exists([key]) == [True] and backend.get([key]) == [bytes(100)]


@pytest.mark.parametrize("url, words", [
    ("redis://me:secret@127.0.0.1:1/0", "Cannot use the storage 'redis://127.0.0.1:1/0'"),
    ("nonsense", "Cannot use the storage 'nonsense'"),
    ("nothing://there", "Cannot use the storage"),
    ("json:JSONDecoder", "Cannot use the storage"),
    ("file:", "write file:pages"), ("file: ", "write file:pages"), ("file://pages2", "write file:pages"),
    ("file://me:secret@pages", "'file://pages' names no folder"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_sentence_without_secrets(url, words):
    with pytest.raises(BadRequest, match=words) as raised:
        backends.open_backend(url)
    assert "secret" not in str(raised.value)


def test_folders_begin_at_home_and_what_is_none_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    backends.open_backend("file:~/a"), backends.in_directories(["~/b"], 1.0)
    (tmp_path / "config").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "config", "loop"}
    assert backends.configuration("@~/config") == {}
    for name in "loop", "config":
        with pytest.raises(BadRequest, match=f"^A cache needs a folder to write in: {tmp_path / name}: File exists.$"):
            backends.in_directories([tmp_path / name], 1.0)


# 5. Changes at run time -------------------------------------------------------------------------

@pytest.mark.parametrize("policies", [[*tiers.PREFETCH][:3], ["both_ends"]])
def test_traffic_on_storages_that_fail_come_and_go(policies):
    """The policies change, too."""
    rng, shelves, stored = random.Random(0), [Shelf(), Shelf()], []

    def make_one(name, blocks, size, tier, **options):
        engine = make(tiered(tier, policies[0], "write_through", shelves[0]), blocks, size, **options)
        engine.step = partial(change_and_step, engine.lower_tier.cache, engine.step)
        return engine

    def change_and_step(cache, step):
        if rng.random() < 0.16:
            known = {page.digest.hex() for node in cache.tree.nodes() if node.stored for page in node.pages}
            assert known <= set(cache.storage.backend.pages if cache.storage else ()), "storage has every page that the tree says is stored"
            backends.attach_storage(cache, rng.choice([None, *map(store.Storage, shelves)]))
            cache.prefetch_policy, cache.write_policy = rng.choice(policies), rng.choice(tiers.WRITE)
            stored.append(len(known))
        step()

    for shelf in shelves:
        shelf.set = failing(lambda *given, keep=shelf.set: (time.sleep(0.005), keep(*given)))
    counts = traffic.run("", 60, seed=5, make=make_one, answer=12)
    assert counts["wrong"] == counts["failed"] == 0 and counts["restored"] > 5, counts
    assert len(stored) >= 50 and sum(stored) > 100


def test_a_storage_that_hangs_is_left_for_another_one_which_gets_what_is_owed():
    other, new, closed = Shelf(), draw(random.Random(1), 200), threading.Event()
    with only_stored() as (engine, shelf, prompt):
        shelf.open.clear()
        shelf.close, shelf.set = closed.set, lambda *_: shelf.open.wait(60)
        right(engine, new)  # its pages are being written
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: request.memo and request.memo.reads)
        backends.attach_storage(engine.lower_tier.cache, store.Storage(other))
        until_over(engine, request)
        assert request.found == {} and ORACLE.judge(request) != "wrong"
        assert steps(engine, lambda: len(other) == 24)
        assert sum(engine.lower_tier.cache.host.references) and not closed.is_set(), "a read that hangs may still write to its blocks"
        shelf.open.set()
        wait_until_idle(engine)
        assert closed.wait(60)
        for storage, found in (engine.lower_tier.cache.storage, {"storage": 192}), (None, {}):
            forget(engine)
            engine.lower_tier.cache.storage is storage or backends.attach_storage(engine.lower_tier.cache, storage)
            assert right(engine, prompt).found == right(engine, new).found == found


def test_options_of_storage_and_of_host_memory(tmp_path, capsys):
    tiers.add_arguments(parser := cli.parser_for(""))

    def made(*options):
        return tiers.make_engine(engines.tiny_model(), parser.parse_args(["--gpu-blocks=40", "--link=2", *options]))

    (tmp_path / "latin").write_text('{"secret": "s\u00e9same"}', "latin-1")
    for name, text in {"config": '\ufeff{"secret": "sesame"}', "wrong.toml": "secret sesame", "list": '["sesame"]',
                       "a.toml": '\ufeffsecret = "sesame" # \u00fc\nprefetch_threshold = 7\nprefetch_timeout = 3'}.items():  # fmt: skip
        (tmp_path / name).write_text(text, "utf-8")
    for config in '{"secret": "sesame"}', f"@{tmp_path / 'config'}", f"@{tmp_path / 'a.toml'}":
        engine = made("--storage", f"{__name__}:Shelf", "--storage-config", config, "--hicache-ratio=1.5")
        right(engine, draw(random.Random(0), 200))
        engine.close()
        shelf = engine.lower_tier.cache.storage.backend
        assert shelf.secret == "sesame" and len(shelf) == 12 and engine.lower_tier.cache.host.size == 60
    assert (engine.lower_tier.cache.threshold, engine.lower_tier.cache.timeout) == (7, (3, 0.25)), "other settings come from the command line"
    assert made("--hicache-size=0.01").lower_tier.cache.host.size == 10**7 // engine.lower_tier.cache.host.block_bytes
    for option in "--cpu-blocks=9", "--hicache-ratio=2":
        with pytest.raises(SystemExit):
            made("--hicache-size=1", option)
        assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(BadRequest, match="here is none: leave it out"):
        made("--hicache-io-backend=kernel")
    for config, words in {"file:pages": "limit_gb", f"{__name__}:Shelf": "secret"}.items():
        with pytest.raises(BadRequest, match=f"has no setting 'sesam'; it has {words}.$"):
            made("--storage", config, "--storage-config", '{"sesam": 1}')
    with pytest.raises(BadRequest, match="prefetch_timeout in --storage-config must be a number from 0"):
        made("--storage-config", '{"prefetch_timeout": "long"}')
    for config in "sesame", '["sesame"]', "@sesame", *(f"@{tmp_path}/{name}" for name in ("list", "no.toml", "wrong.toml", "latin", "a.toml")):
        with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
            config.endswith("a.toml") and patch.setitem(sys.modules, "tomllib", None)
            made("--storage-config", config)
        assert "sesame" not in (said := capsys.readouterr().err) and "give a JSON object, or @FILE" in said
