"""Chapter 07: the radix tree, write policies, prefetch policies, layouts, and shared storage."""

import itertools
import random
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from common import store
from common.estimates import MAX_WAIT
from common.link import Transfer
from common.requests import BadRequest, Request, RequestError
from shell import backends, cli
from shell.machine import flops
from shell.modelled_link import Bandwidth
from tests.support import engines, traffic
from tests.support.engines import ask, check_pools, draw, evict, make, tiered, until_over, wait_until_idle
from tests.support.faults import Shelf, faulty

paged, tiers, ORACLE = engines.paged, engines.tiers, engines.ORACLE


@contextmanager
def engine_with(cache, blocks=60, size=16):
    """Context manager: return an engine with this Cache, and check its pools at the end."""
    yield (engine := make(cache, blocks, size))
    check_pools(engine)
    engine.close()


@contextmanager
def engine_on(backend, prefetch="wait_complete", write="write_through", blocks=40, host=40, size=16, **options):
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


def test_the_tree_agrees_with_a_dictionary():
    """`known`: page -> [whether the device has it, its host block, whether it is stored]."""
    rng, block_keys, tree, known = random.Random(0), paged.BlockKeys("", 1), tiers.HiRadixTree(), {}
    for number in range(600):
        chain = block_keys.extend([], [rng.randrange(3) for _ in range(rng.randrange(1, 12))])
        length = next((at for at, page in enumerate(chain) if page not in known), len(chain))
        first = rng.randrange(length + 1)  # a run may begin at any known page
        found = [(page, node) for node, part in tree.spans(chain[first:]) for page in node.pages[part]]
        assert [page for page, _ in found] == chain[first:]
        for page, node in found:
            at = node.pages.index(page)
            assert [node.device, node.host_blocks[at : at + 1], node.stored] == known.get(page, [False, [], False])
            assert bool(node.parent) == (page in known)
        if rng.random() < 0.7:
            run, tier, has = chain[rng.randrange(length + 1) :] or chain, rng.randrange(3), rng.random() < 0.6
            state = lambda pages: [has, [number + page.depth for page in pages] * has, has][tier]  # noqa: B023, E731
            for node in tree.change(set(run)):
                setattr(node, ("device", "host_blocks", "stored")[tier], state(node.pages))
            for page in chain:
                known.setdefault(page, [False, [], False])
            for page in run:
                known[page][tier] = state([page])
        if rng.random() < 0.1:  # forget leaves whose pages are neither on the device nor in host memory
            keep = set(rng.sample(sorted(known, key=lambda page: page.digest), len(known) // 2))
            tree.forget(keep)
            left = {page for node in tree.nodes() for page in node.pages}
            assert keep <= left and not any(known[page][0] or known[page][1] for page in known.keys() - left)
            ends = [node for node in tree.nodes() if not node.children]
            assert all(node.is_local or keep & {*node.pages} for node in ends), "a leaf is kept only for a reason"
            known = {page: known[page] for page in left}
        check_tree(tree)
    assert len(tree.nodes()) < tree.size, "consecutive pages share a node"


def test_a_lookup_reads_only_the_nodes_on_its_path():
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
def test_write_through_selective_counts_each_request_once(together):
    shelf, rng = Shelf(), random.Random(0)
    with engine_on(shelf, write="write_through_selective", blocks=40 if together else 14) as engine:
        prompt, engine.token_budget = draw(rng, 100), 512 if together else 3
        alone = [Request(draw(rng, 31), 60), Request(draw(rng, 150), 4)]
        engine.generate([Request([*prompt, number], 2) for number in range(3)] if together else alone)
        wait_until_idle(engine)
        assert len(shelf) == (6 if together else 0) and bool(engine.counts["preemptions"]) != together


@pytest.mark.parametrize("write", tiers.WRITE)
def test_a_crash_loses_the_pages_that_storage_lacks(write):
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
@pytest.mark.parametrize("fault, host", [("none", 30), ("none", 4), ("fails", 30), ("skips one", 30), ("hangs", 8), ("host", 2)])
def test_a_page_that_leaves_all_tiers_is_counted(write, fault, host, monkeypatch):
    """Each page of eight prompts, on tiers that hold at most three, is in storage at the end or is counted."""
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.05 if fault == "hangs" else 60.0)
    shelf, rng = Shelf(), random.Random(0)
    with engine_on(shelf, write=write, blocks=16, host=host) as engine:
        keep, prompts = shelf.set, [draw(rng, 200) for _ in range(8)]
        skip_one = lambda keys, values: keep(keys[1:], values[1:]) or failing(keep)()  # noqa: E731
        hang = lambda *given: shelf.open.wait(60) and keep(*given)  # noqa: E731
        shelf.set = {"fails": failing(keep), "skips one": skip_one, "hangs": hang}.get(fault, keep)
        if fault == "hangs":
            shelf.open.clear()
        for prompt in prompts:
            right(engine, prompt)
            fault == "hangs" or wait_until_idle(engine)
        assert len(engine.block_keys.known) <= 100 or fault != "hangs", "the keys of pages that no tier holds are forgotten"
        shelf.open.set()
        forget(engine)
        wanted = 0 if write == "write_through_selective" else 8 * 12
        assert len(shelf) + engine.counts["pages_lost"] == wanted, engine.counts
        assert engine.counts["pages_lost"] == engine.counts["writes_dropped"]
        assert engine.counts["pages_lost"] == 0 or fault != "none", "no page is lost if storage is fast and nothing fails"
        if write == "write_back" and fault == "none":
            assert {engine.counts[name] for name in ("dirty_evicted", "pages_written", "storage_pages_written")} == {wanted}
            assert host < 30 or right(engine, prompts[0]).found == {"storage": 192}


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_stored_page_is_not_dirty_when_it_is_computed_again(write):
    shelf, prompt = Shelf(), draw(random.Random(0), 300)
    with engine_on(shelf) as engine:
        right(engine, prompt)
    with engine_on(shelf, "best_effort", write, threshold=1 << 20) as engine:  # it asks storage, and reads nothing
        assert right(engine, prompt).found == {}
        evict(engine)
        assert not engine.counts["dirty_evicted"] + engine.counts["storage_pages_written"]


def test_a_failed_save_is_retried_after_the_next_step():
    with engine_on(Shelf()) as engine:
        engine.submit(request := Request(draw(random.Random(0), 100), 6))
        with faulty(random.Random(0), failing=1.0, lanes=["save"]) as faults:
            assert steps(engine, lambda: len(request.new) == 2)
        assert faults.failed and not engine.lower_tier.cache.host.block_of
        until_over(engine, request)
        wait_until_idle(engine)
        assert len(engine.lower_tier.cache.host.find(request.chain)) == 6


def test_an_eviction_waits_for_its_copy_and_loses_the_pages_of_a_late_one(monkeypatch):
    rng = random.Random(0)
    with engine_on(Shelf(), write="write_back", blocks=16, host=32) as engine:
        cache, link, counts = engine.lower_tier.cache, engine.lower_tier.cache.save_link, engine.counts
        saved(engine, draw(rng, 200))
        link.bandwidth, fast = Bandwidth(12 * cache.host.block_bytes / 0.3), link.bandwidth  # 12 pages in 0.3 s
        saved(engine, draw(rng, 200))
        assert counts["pages_written"] > 0 and not counts["pages_lost"]
        link.bandwidth, written = fast, counts["pages_written"]
        monkeypatch.setattr(tiers, "LONGEST_SAVE", 0.05)
        with faulty(rng, failing=0.2, late=0.4, noisy=2, delay=0.2, lanes=["save"]) as faults:
            for prompt in rng.choices([draw(rng, 100) for _ in range(4)], k=20):
                right(engine, prompt)
                late = [transfer for transfer, *_ in faults.copies if not transfer.ready]
                assert not late or any(cache.host.references), "blocks that a late copy still writes stay referenced"
            wait_until_idle(engine)
        assert faults.failed and faults.delayed and counts["pages_lost"] > 0 and counts["pages_written"] > written


@pytest.mark.parametrize("blocks, host, tokens", [(16, 6, 100), (12, 4, 100), (16, 6, 140), (20, 8, 180)])
def test_making_room_on_the_device_keeps_host_pages_that_are_matched_or_loaded_ahead(blocks, host, tokens):
    """The first prompt fits in host memory, and is found there. The others are in storage."""
    shelf, rng, tier = Shelf(), random.Random(1), "cpu" if tokens // 16 == host else "storage"
    with engine_on(shelf) as engine:
        saved(engine, prompt := draw(rng, tokens))
    with engine_on(shelf, "wait_complete", "write_back", blocks=blocks, host=host, threshold=16) as engine:
        if tier == "cpu":
            right(engine, prompt)
            evict(engine)
        right(engine, draw(rng, 16 * blocks - 20))  # its dirty pages fill the device, and need room in host memory
        assert right(engine, prompt).found[tier] >= 64


def test_no_page_is_written_after_a_gap():
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

@pytest.mark.parametrize("other, found", [(200, {"storage": 192}), (20, {}), (0, {})])
def test_best_effort_uses_only_pages_that_arrive_while_another_prompt_fills_the_steps(other, found):
    with only_stored(prefetch="best_effort") as (engine, shelf, prompt):
        forward, cache = engine.runner.forward, engine.lower_tier.cache

        def forward_slowly(*given):
            """Compute a step while storage answers, or reads pages, or these are copied."""
            for transfers, *_ in itertools.chain(*(cache.in_flight.get(lane, ()) for lane in ("ask", "read", "load"))):
                assert all(transfer.completed.wait(60) for transfer in transfers)
            return forward(*given)

        engine.token_budget, engine.runner.forward = 32, forward_slowly
        asked = [Request(draw(random.Random(1), other), 4)] * bool(other) + [Request(prompt, 4)]
        engine.generate(asked)
        assert asked[-1].found == found and ORACLE.judge(asked[-1]) != "wrong"


@pytest.mark.parametrize("policy, then, tokens", [
    ("wait_complete", "evicted", [384]), ("wait_complete", "late", [64]), ("timeout", "late", [64]),
    ("best_effort", "arrive", range(64, 385)),
])  # fmt: skip
def test_pages_are_copied_to_the_device_while_storage_reads_later_ones(policy, then, tokens, monkeypatch):
    monkeypatch.setattr(tiers, "time", clock := SimpleNamespace(perf_counter=lambda: clock.now, now=time.perf_counter()))
    with only_stored(400, policy, timeout=(30.0, 16.0)) as (engine, shelf, prompt):
        get, shelf.asked = shelf.get, []
        shelf.get = lambda keys: (shelf.asked and shelf.open.clear(), get(keys))[1]  # only the first read ends
        engine.max_running = 0 if policy == "best_effort" else 64  # so that it stays queued
        engine.submit(request := Request(prompt, 4))
        clock.now = request.received
        assert steps(engine, lambda: len(engine.pool.block_of) == 4) and not request.table and engine.counts["swap_ins"] == 4
        engine.max_running = 64
        if then == "late":
            for late in -0.01, 0.01:
                clock.now = request.received + late + (30 + 16 * 384 / 1024 if policy == "timeout" else MAX_WAIT)
                steps(engine, lambda: False, 3)
                assert bool(request.table) == (late > 0), "the request waits as long as the policy says"
        elif then == "evicted":
            engine.evict("device")  # the pages are still in host memory
        shelf.get = get
        shelf.open.set()
        until_over(engine, request)
        wait_until_idle(engine)
        assert request.found.keys() == {"storage"} and request.found["storage"] in tokens and ORACLE.judge(request) != "wrong"
        assert shelf.asked == [4, 4] or then != "late", "reads that had not begun at the timeout never begin"


def test_a_request_does_not_wait_for_storage_slower_than_computing():
    with only_stored() as (engine, shelf, prompt):
        estimates, reader = engine.lower_tier.estimates, engine.lower_tier.cache.storage.reader
        reader.reap_completed()
        for speed, seconds in (estimates.computing, 1.0), (reader.measured, 1e9):
            speed.samples.clear()
            speed.record(flops(engine.model.config, 0, 200), seconds)
        estimates.always = False
        shelf.open.clear()  # no read ends before the decision, and tells another speed
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: request.outcome, 500) and request.found == {}
        assert ["storage" in words and "computed" in words for words in request.decisions] == [True]


@contextmanager
def queued(engine, prompt: list[int], **options):
    """Context manager: return a request that stays queued until the end of the block.

    Then it must be answered correctly."""
    engine.max_running = 0
    engines.submit(engine, request := Request(prompt, 4, **options), steps=1)
    yield request
    engine.max_running = 64
    until_over(engine, request)
    assert ORACLE.judge(request) != "wrong"


def test_a_queued_request_finds_pages_that_another_engine_writes(monkeypatch):
    monkeypatch.setattr(tiers, "RETRY_SECONDS", 0.0)
    shelf, prompt = Shelf(), draw(random.Random(0), 200)
    with engine_on(shelf, "best_effort") as engine, engine_on(shelf) as other:
        with queued(engine, prompt) as request:
            assert steps(engine, lambda: request.memo.answered)
            for part in prompt[:100], prompt:  # storage is asked again while the request is queued
                saved(other, part)
                assert steps(engine, lambda part=part: len(engine.lower_tier.cache.host.block_of) == len(part) // 16)
        assert request.found == {"storage": 192}


@pytest.mark.parametrize("threshold, found", [(64, {"storage": 64}), (65, {})])
def test_fewer_tokens_than_the_threshold_are_not_read(threshold, found):
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


@pytest.mark.parametrize("pages, found", [(0, {"storage": 16 * (29 - 6)}), (10, {"cpu": 160, "storage": 16 * (19 - 4)})])
def test_prefill_and_storage_meet_behind_the_host_pages(pages, found):
    """Of 29 pages, six steps compute six and six reads bring the others. Of 19, four steps compute four."""
    shelf, prompt = Shelf(), draw(random.Random(0), 480)
    with engine_on(shelf, "both_ends") as engine:
        right(engine, prompt)
        evict(engine)
        forget_from(engine, prompt, page=pages)
        read_in_steps(engine, shelf)
        copy_in, ahead = engine.lower_tier.cache.copy_in, []
        engine.lower_tier.cache.copy_in = lambda request, start, host_blocks: ahead.append(
            start - request.computed - dict(engine.work).get(request, 0)) or copy_in(request, start, host_blocks)  # fmt: skip
        assert right(engine, prompt).found == found
        assert min(ahead) >= 0, "no step computes tokens that storage is to restore"
        assert not engine.counts["failed_restorations"], "no restoration fails"


def test_storage_brings_all_pages_before_both_ends_begins():
    with only_stored(480, "both_ends", host=64) as (engine, _, prompt):
        cache, offer = engine.lower_tier.cache, engine.lower_tier.cache.offer
        reads = lambda: [read.completed.wait(60) for reads, *_ in cache.in_flight["read"] for read in reads]  # noqa: E731
        cache.offer = lambda request: (reads(), offer(request))[1]
        assert right(engine, prompt).found == {"storage": 464}


def test_both_ends_claims_no_page_before_a_lost_one(monkeypatch):
    with only_stored(480, "both_ends") as (engine, shelf, prompt):
        host, last, poll = engine.lower_tier.cache.host, engine.block_keys.extend([], prompt)[28], engines.offload.Cache.poll
        read_in_steps(engine, shelf)
        lose = lambda: host.evict([place for place in [host.block_of.get(last)] if place in host.cached])  # noqa: E731
        monkeypatch.setattr(engines.offload.Cache, "poll", lambda cache: (poll(cache), lose()))
        assert not right(engine, prompt).found, "pages from storage would get the lost page's block"


@pytest.mark.parametrize("policy, lane, taken, found", [
    ("both_ends", "load", 0, 320), ("both_ends", "write", 20, 0), ("wait_complete", "write", 20, 0), ("wait_complete", "load", 20, 320)])
def test_pages_without_room_in_host_memory_are_not_offered(policy, lane, taken, found):
    shelf, prompt, other = Shelf(), draw(random.Random(0), 480), Transfer(lane, "another's")
    with engine_on(shelf) as engine:
        right(engine, prompt)
    with engine_on(shelf, policy, host=20) as engine:
        if taken:
            engine.lower_tier.cache.hold(lane, [other], given=[(engine.pools["host"], engine.pools["host"].allocate(taken))])
        with queued(engine, prompt) as request:
            steps(engine, lambda: request.memo.ended, 100)
            assert request.memo.ended != (taken and lane == "load"), "a prefetch waits for the room of a copy, and not for that of a write"
            if found:
                other.finish(0.0, 0.0)
        other.finish(0.0, 0.0)
        assert request.found.get("storage", 0) == request.cached_tokens == found
        assert bool(request.decisions) == bool(found), "a decision is written only if something was offered"


def test_the_tree_records_the_restored_pages_of_a_failed_request():
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


def test_a_request_stops_waiting_once_the_device_has_its_pages():
    with only_stored() as (engine, shelf, prompt):
        shelf.asked.clear()
        shelf.open.clear()
        engine.submit(waits := Request(prompt, 4))
        assert steps(engine, lambda: shelf.asked)
        engine.lower_tier.cache.threshold = 1 << 20  # the next request does not ask storage
        engine.generate([Request(prompt, 4)])
        assert steps(engine, lambda: waits.outcome, 20) and waits.found == {"gpu": 192}


def test_prefetches_hold_at_most_half_of_host_memory():
    with only_stored((100, 80), host=10) as (engine, shelf, *prompts):
        shelf.open.clear()
        asked = [Request(prompt, 2) for prompt in prompts]
        engines.submit(engine, *asked, steps=20)
        assert 0 < sum(engine.lower_tier.cache.host.references) <= 5
        shelf.open.set()
        until_over(engine, *asked)
        assert [request.found for request in asked] == [{"storage": 96}, {"storage": 64}]
        assert max(len(request.decisions) for request in asked) <= 2, "to wait and to load are each decided once at most"


@pytest.mark.parametrize("slower, blocks", [(1, 20), (100, 60)])
def test_a_prefetch_waits_for_the_room_of_earlier_requests(slower, blocks, monkeypatch):
    monkeypatch.setattr(engines, "BANDWIDTH", engines.BANDWIDTH / slower)  # over a slow link, copies hold host memory
    with only_stored([100] * 6, host=12, blocks=blocks) as (engine, _, *prompts):
        asked = [Request(prompt, 2) for prompt in prompts]
        engines.submit(engine, *asked)
        until_over(engine, *asked)
        assert all(request.found for request in asked), [request.found for request in asked]


def test_a_prefetch_does_not_wait_for_a_write_that_hangs():
    with only_stored(200, host=12) as (engine, shelf, prompt), shelf.broken("set", "hangs"):
        right(engine, draw(random.Random(1), 100))
        assert steps(engine, lambda: any(engine.pools["host"].references)), "a write holds blocks of host memory"
        with queued(engine, prompt) as request:
            assert steps(engine, lambda: request.memo.ended, 200)


@pytest.mark.parametrize("again", [1.0, 0.0])
def test_prefetched_pages_are_not_evicted_before_their_request_runs(again, monkeypatch):
    monkeypatch.setattr(tiers, "RETRY_SECONDS", again)  # seconds until storage is asked again for a request that has all its pages
    with only_stored((100, 80), host=8) as (engine, _, *prompts):
        with queued(engine, prompts[0]) as first, queued(engine, prompts[1]) as second:
            assert steps(engine, lambda: len(first.memo.pages_read) == 6)
            steps(engine, lambda: False, 20)
            assert not second.memo.ended, "it waits for the room of the first request's pages"
        assert first.found == {"storage": 96}


def test_a_request_that_must_compute_does_not_ask_storage():
    with only_stored() as (engine, shelf, prompt):
        shelf.asked.clear()
        with queued(engine, prompt, must_compute=True) as request:
            steps(engine, lambda: False, 5)
            assert not request.memo and not shelf.asked
        assert request.found == {}


def test_a_late_answer_starts_no_read():
    """The request already computes when storage answers."""
    with only_stored(200, "both_ends") as (engine, shelf, prompt):
        shelf.asked.clear()
        engine.token_budget = 16  # so that the request takes many steps
        with shelf.broken("exists", "hangs"):
            engines.submit(engine, request := Request(prompt, 4), steps=1)
            request.wait_deadline = 0.0
            assert steps(engine, lambda: request.table)
        [transfer.completed.wait(60) for transfers, *_ in engine.lower_tier.cache.in_flight["ask"] for transfer in transfers]
        until_over(engine, request)
        assert request.found == {} and not shelf.asked and ORACLE.judge(request) != "wrong"


def test_pages_that_storage_lacks_are_not_read():
    with only_stored() as (engine, shelf, prompt):
        right(engine, prompt[:50])
        evict(engine)  # host memory has three pages
        for block_key in engine.block_keys.extend([], prompt)[:3]:
            del shelf.pages[block_key.digest.hex()]
        shelf.asked.clear()
        with shelf.broken("exists", "hangs"):
            engine.submit(request := Request(prompt, 2))
            engine.take_arrivals()  # storage is asked while host memory has three pages
            engine.evict("host")
        until_over(engine, request)
        assert not shelf.asked and not engine.counts["storage_errors"] and ORACLE.judge(request) != "wrong"


# 4. Storage ------------------------------------------------------------------------------------

@pytest.mark.parametrize("second", tiers.LAYOUTS)
@pytest.mark.parametrize("first", tiers.LAYOUTS)
def test_layouts_with_equal_pages_share_storage(first, second):
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


def test_an_emptied_storage_gets_its_pages_again_and_lost_ones_are_counted(monkeypatch):
    monkeypatch.setattr(tiers, "RETRY_SECONDS", 60.0)
    with only_stored(470) as (engine, shelf, prompt):
        right(engine, prompt)
        evict(engine)
        forget_from(engine, prompt, page=10)  # host memory has ten pages, storage all 29
        with shelf.broken("get", "loses all"), queued(engine, prompt) as request:
            assert steps(engine, lambda: engine.counts["pages_lost"] == 19, 1000)
        wait_until_idle(engine)
        assert len(shelf) == 29 and engine.counts["pages_lost"] == 19 and request.found == {"cpu": 160}


# 5. Changes at run time -------------------------------------------------------------------------

@pytest.mark.parametrize("policies", [[*tiers.PREFETCH][:3], ["both_ends"]])
def test_storage_and_policies_may_change_during_traffic(policies):
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
    counts = traffic.run("", 80, seed=5, make=make_one, answer=8)
    assert counts["wrong"] == counts["failed"] == 0 and counts["restored"] > 3, counts
    assert len(stored) >= 30 and sum(stored) > 100


def test_another_storage_replaces_one_that_hangs_and_gets_its_pages():
    other, new, closed = Shelf(), draw(random.Random(1), 200), threading.Event()
    with only_stored() as (engine, shelf, prompt):
        cache, shelf.close = engine.lower_tier.cache, closed.set
        shelf.asked.clear()
        shelf.open.clear()
        shelf.set = lambda *_: shelf.open.wait(60)
        right(engine, new)  # its pages are being written
        engine.submit(request := Request(prompt, 4))
        assert steps(engine, lambda: shelf.asked)
        backends.attach_storage(cache, store.Storage(other))
        until_over(engine, request)
        assert request.found == {} and ORACLE.judge(request) != "wrong"
        assert steps(engine, lambda: len(other) == 24)
        assert sum(cache.host.references) and not closed.is_set(), "a read that hangs may still write to its blocks"
        shelf.open.set()
        wait_until_idle(engine)
        assert closed.wait(60)
        forget(engine)
        assert right(engine, prompt).found == right(engine, new).found == {"storage": 192}


def made(*options):
    """Return chapter 07's engine with these options of the command line."""
    tiers.add_arguments(parser := cli.parser_for(""))
    return tiers.make_engine(engines.tiny_model(), parser.parse_args(["--gpu-blocks=40", "--link=2", *options]))


def test_options_configure_storage_and_host_memory(tmp_path):
    (tmp_path / "config").write_text('\ufeff{"secret": "sesame"}', "utf-8")
    (tmp_path / "a.toml").write_text('\ufeffsecret = "sesame" # \u00fc\nprefetch_threshold = 7\nprefetch_timeout = 3', "utf-8")
    for config in '{"secret": "sesame"}', f"@{tmp_path}/config", f"@{tmp_path}/a.toml":
        engine = made("--storage", f"{__name__}:Shelf", "--storage-config", config, "--hicache-ratio=1.5")
        cache = engine.lower_tier.cache
        assert cache.storage.backend.secret == "sesame" and cache.host.size == 60
    assert (cache.threshold, cache.timeout) == (7, (3, 0.25)), "other settings come from the command line"
    assert made("--hicache-size=0.01").lower_tier.cache.host.size == 10**7 // cache.host.block_bytes


@pytest.mark.parametrize("options, words", [
    (["--hicache-size=1", "--cpu-blocks=9"], "not allowed with argument"),
    (["--hicache-size=1", "--hicache-ratio=2"], "not allowed with argument"),
    (["--prefetch=both_ends"], "run python -m examples.both_ends"),
    (["--hicache-io-backend=kernel"], "here is none: leave it out"),
    (["--storage=file:pages", '--storage-config={"sesam": 1}'], "has no setting 'sesam'; it has limit_gb."),
    ([f"--storage={__name__}:Shelf", '--storage-config={"sesam": 1}'], "has no setting 'sesam'; it has secret."),
    (['--storage-config={"prefetch_timeout": "long"}'], "prefetch_timeout in --storage-config must be a number from 0"),
    (["--storage-config=sesame"], "give a JSON object, or"), (['--storage-config=["sesame"]'], "give a JSON object, or"),
    (["--storage-config=@sesame"], "give a JSON object, or @FILE"), (["--storage-config=@list"], "give a JSON object, or @FILE"),
    (["--storage-config=@no.toml"], "give a JSON object, or @FILE"), (["--storage-config=@wrong.toml"], "give a JSON object, or @FILE"),
    (["--storage-config=@latin"], "give a JSON object, or @FILE"),
])  # fmt: skip
def test_wrong_options_are_refused_without_secrets(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in {"wrong.toml": "secret sesame", "list": '["sesame"]', "latin": '{"secret": "s\u00e9same"}'}.items():
        (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises((BadRequest, SystemExit)) as raised:
        made(*options)
    said = f"{raised.value} {capsys.readouterr().err}"
    assert words in said and "sesame" not in said
