"""Chapter 03's engine: two tiers, what is on its way between them, and the choice between loading and computing, with the
tokens and the keys and values of chapter 01 as the yardstick."""
import random
import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from common import checkpoint
from legacy import link as links
from legacy.app import BadRequest, Closing, HungUp
from legacy.tests.conftest import chapter
from legacy.tests.test_paged import (
    COLLISIONS,
    NAN,
    NEW,
    TEXTS,
    Crowd,
    happened,
    ids,
    in_threads,
    received,
    shuffle,
    trust_the_key,
    until,
)

baseline, paged, offload = (chapter(name) for name in ("01_baseline", "02_paged_kv", "03_cpu_offload"))
INF = float("inf")
OTHER = ids(99, 5)                 # who decodes while somebody else is restored
LATE = ids(1, 25)                  # six full blocks of four, and one token


# A link that does what the test says ------------------------------------------------------------------------------

class Parcel:
    """A transfer that copies at the last moment: when the test says so, or when somebody waits for it. Until then nobody
    may read its other side, which holds NaN."""

    def __init__(self, link, label, dst, src):
        self.link, self.lane, self.label, self.dst, self.src = link, link.lane, label, dst, src
        self.bytes = sum(piece.nbytes for piece in dst)
        self.issued, self.start, self.end, self.error, self.doomed = time.perf_counter(), None, None, None, False
        for piece in dst:
            piece.fill_(NAN)

    @property
    def ready(self) -> bool:
        return self.end is not None

    def arrive(self):
        if not self.ready:
            self.start = max([self.issued, *(parcel.end for parcel in self.link.parcels if parcel.ready)])
            if self.doomed or self.link.broken:
                self.error, self.link.failures = OSError("injected"), self.link.failures + 1
            else:
                for dst, src in zip(self.dst, self.src, strict=True):
                    dst.copy_(src)
            self.end = time.perf_counter()

    def join(self):
        if not self.ready:
            self.link.log.append((self.lane, self.label))
        self.arrive()

    def wait(self):
        self.join()
        if self.error is not None:
            raise links.TransferError(self)

    def span(self):
        return self.start, self.end


class HeldLink:
    """legacy.link.Link's interface. What is copied arrives at once, or if `held` when the test or somebody who waits wants
    it; if `broken` it fails then; if it `refuses` to copy it raises."""
    modelled = True

    def __init__(self, lane, clock, bytes_per_second):
        self.lane, self.bytes_per_second, self.parcels, self.log = lane, bytes_per_second, [], []
        self.held = self.broken = self.refuses = False
        self.noted = self.worn_out = self.failures = 0

    def copy(self, dst, src, label):
        if self.refuses is True or self.refuses == label:
            raise RuntimeError("injected")
        dst, src = ([pieces] if isinstance(pieces, torch.Tensor) else list(pieces) for pieces in (dst, src))
        assert [piece.shape for piece in dst] == [piece.shape for piece in src]
        self.parcels = [*self.under_way(), Parcel(self, label, dst, src)]
        parcel = self.parcels[-1]
        if not self.held:
            parcel.arrive()
        return parcel

    def under_way(self):
        return [parcel for parcel in self.parcels if not parcel.ready]

    def arrive(self, count: int = 1000):
        for parcel in self.under_way()[:count]:
            parcel.arrive()

    def speed(self):
        return self.bytes_per_second

    def backlog(self):
        return sum(parcel.bytes for parcel in self.under_way())

    def note(self, transfers):
        assert all(transfer.ready and transfer.error is None for transfer in transfers)
        self.noted += sum(transfer.bytes for transfer in transfers)

    def wear_out(self):
        self.worn_out += 1

    def __str__(self):
        return "held link"


def build(base, link=HeldLink, loads=True, **options):
    """An engine over two links of this kind, which thinks that loading is faster than computing, or slower; with
    loads=None it measures."""
    options = {"blocks": 64, "block_size": 4, "cpu_blocks": 64, "bytes_per_second": 1e8, **options}
    with mock.patch.object(offload, "Link", link):
        engine = offload.Engine(base.model, base.tokenizer, base.end_tokens, **options)
    if loads is not None:
        engine.cost = 0.5 if loads else 2.0
        engine.seconds_to_load = lambda blocks, behind=None: engine.cost if blocks else 0.0
        engine.seconds_to_compute = lambda start, end: 1.0
    engine.pool.kv.fill_(NAN)
    engine.host.kv.fill_(NAN)
    return engine


@pytest.fixture
def make(tiny_engine):
    """make(link, loads, blocks=..., ...) -> an engine on the tiny model; its thread ends with the test."""
    engines = []

    def engine(*arguments, base=tiny_engine, **options):
        engines.append(build(base, *arguments, **options))
        return engines[-1]
    yield engine
    for engine in engines:
        engine.close()


@pytest.fixture
def right(tiny_engine):
    """right(prompt, max_tokens=8, ...) -> the tokens of chapter 01."""
    alone = baseline.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens)

    def tokens(prompt, max_tokens=8, **sampling):
        return alone.generate(prompt=list(prompt), max_tokens=max_tokens, **sampling).tokens
    return tokens


def steps(engine, count: int = 2000, whole: bool = True):
    """So many steps, or all that there are; a run that does not end fails."""
    for number in range(count):
        more = engine.step()
        if whole:
            engine.check_integrity()
        if not more:
            return
    assert count < 2000, "there is always more to do"


def answered(engine, *requests) -> list[list[int]]:
    """Step until nothing is left, and everything has arrived -> the tokens of each request."""
    steps(engine)
    engine.flush()
    engine.check_integrity()
    assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size and not engine.swaps
    for request in requests:
        if isinstance(request.outcome, Exception):
            raise request.outcome
    return [request.outcome.tokens for request in requests]


def asked(engine, prompt, **fields):
    """One request with nobody else around, answered -> the request."""
    request, = engine.submit(prompt, **{"max_tokens": 8, **fields})
    answered(engine, request)
    return request


def ask(engine, prompt, **fields) -> list[int]:
    return asked(engine, prompt, **fields).outcome.tokens


def lose(engine, count: int = 1000):
    """The device evicts so many blocks, or all that are cached."""
    for _ in range(min(count, len(engine.pool.cached))):
        engine.pool.evict()


def chain(engine, tokens, salt: str = "") -> list:
    """The prefixes of the full blocks of these tokens."""
    prefixes, size = [engine.prefixes.salted(salt)], engine.pool.block_size
    for start in range(0, len(tokens) // size * size, size):
        prefixes.append(engine.prefixes.extend(prefixes[-1], tokens[start:start + size]))
    return prefixes[1:]


def holds(pool, prefixes) -> list[bool]:
    return [pool.find(prefix) is not None for prefix in prefixes]


def found(engine, tokens, salt: str = "") -> str:
    """One letter a full block: d on the device, h on the host, b on both, - nowhere."""
    prefixes = chain(engine, tokens, salt)
    return "".join("-dhb"[device + 2 * host] for device, host in zip(holds(engine.pool, prefixes), holds(engine.host, prefixes)))


def device_kv(engine, tokens):
    """[L, 2, blocks, block_size, KVH, hd] of the full blocks of these tokens."""
    return engine.pool.kv[:, :, [engine.pool.find(prefix) for prefix in chain(engine, tokens)]].clone()


def host_kv(engine, tokens):
    """[L, 2, blocks, block_size, KVH, hd], too."""
    return engine.host.kv[[engine.host.find(prefix) for prefix in chain(engine, tokens)]].movedim(0, 2).clone()


def history(prefix) -> list[int]:
    """All tokens that a prefix stands for."""
    tokens = []
    while not isinstance(prefix.tokens, str):
        tokens, prefix = prefix.tokens + tokens, prefix.parent
    return tokens


def damage(engine, base) -> float:
    """The largest difference between what the blocks of both tiers hold and what chapter 01 computes for their tokens."""
    blocks, known, worst = [], [], 0.0
    for block, prefix in enumerate(engine.pool.prefixes):
        if prefix is not None and block not in engine.arriving:
            blocks.append((history(prefix), engine.pool.kv[:, :, block]))                       # [L, 2, block_size, KVH, hd]
    for block, prefix in enumerate(engine.host.prefixes):
        if prefix is not None:
            blocks.append((history(prefix), engine.host.kv[block]))
    for tokens, kv in sorted(blocks, key=lambda entry: -len(entry[0])):
        reference = next((numbers for longer, numbers in known if longer[:len(tokens)] == tokens), None)
        if reference is None:
            cache = baseline.KVCache(base.model.config, len(tokens), base.model.dtype, base.model.device)
            base.forward(cache, tokens, 0)
            reference = torch.stack((cache.k, cache.v), 1).transpose(2, 3)                      # [L, 2, T, KVH, hd]
            known.append((tokens, reference))
        difference = float((kv - reference[:, :, len(tokens) - kv.shape[2]:len(tokens)]).abs().max())
        worst = INF if difference != difference else max(worst, difference)
    return worst


def on_its_way(engine, decode: int = 30, hold: bool = True):
    """LATE was answered before, the device lost it, and it is on its way in while another one decodes -> the two."""
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    other, = engine.submit(OTHER, max_tokens=decode, offload_after=False)
    steps(engine, 1)
    engine.load_link.held = hold
    late, = engine.submit(LATE, max_tokens=8)
    steps(engine, 1)
    assert not hold or (late.restoration and len(engine.load_link.under_way()) == 3)
    return other, late


# Where a prefix comes from ----------------------------------------------------------------------------------------

PROMPT = ids(1, 26)                # six full blocks, and two tokens; with its answer eight


def forget(pool, engine, *indices):
    for index in indices:
        pool.forget(pool.find(chain(engine, PROMPT)[index]))


WHERE = {                          # what is lost -> the source; blocks found on the device, on the host, missed; copied out again
    "nothing": (lambda engine: None, "gpu_hit", 6, 0, 1, 0),
    "the device's": (lambda engine: lose(engine), "cpu_hit", 0, 6, 1, 0),
    "the device's end": (lambda engine: lose(engine, 4), "mixed", 4, 2, 1, 0),
    "the device's beginning": (lambda engine: forget(engine.pool, engine, 0, 1), "mixed", 4, 2, 1, 0),
    "the device's middle": (lambda engine: forget(engine.pool, engine, 1, 3), "mixed", 4, 2, 1, 0),
    "a block of both": (lambda engine: (forget(engine.pool, engine, 3), forget(engine.host, engine, 3)), "gpu_hit", 3, 0, 4, 1),
    "the device's and the host's end": (lambda engine: (forget(engine.host, engine, 4, 5), lose(engine)), "cpu_hit", 0, 4, 3, 2),
    "the host's": (lambda engine: [engine.host.evict() for _ in range(8)], "gpu_hit", 6, 0, 1, 8),
    "all": (lambda engine: ([engine.host.evict() for _ in range(8)], lose(engine)), "miss", 0, 0, 7, 8),
}


@pytest.mark.parametrize("lost", WHERE)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("link", [HeldLink, links.Link])
def test_a_prefix_comes_from_where_it_is_and_says_so(make, right, lost, scattered, link):
    lose_it, source, gpu_hits, cpu_hits, misses, copied = WHERE[lost]
    engine = make(link)
    if scattered:
        shuffle(engine.pool)
        shuffle(engine.host, 1)
    first = asked(engine, PROMPT)
    assert (first.outcome.tokens, first.source, first.outcome.blocks) == (
        right(PROMPT), "miss", dict(gpu_hits=0, cpu_hits=0, misses=7))
    before, kept, counted = device_kv(engine, PROMPT), host_kv(engine, PROMPT), Counter(engine.counts)
    assert torch.equal(before, kept) and counted["swap_outs"] == 8
    lose_it(engine)
    evictions = engine.counters()["evictions"]
    again = asked(engine, PROMPT)
    result, size, counted = again.outcome, engine.pool.kv[:, :, 0].nbytes, Counter(engine.counts) - counted
    assert result.tokens == right(PROMPT) and result.source == source
    assert result.blocks == dict(gpu_hits=gpu_hits, cpu_hits=cpu_hits, misses=misses)
    assert result.usage["cached_tokens"] == again.cached_tokens == 4 * (gpu_hits + cpu_hits)
    assert (counted["gpu_hits"], counted["cpu_hits"], counted["misses"]) == (gpu_hits, cpu_hits, misses)
    assert (counted["swap_ins"], counted["bytes_in"]) == (cpu_hits, cpu_hits * size)
    assert (counted["swap_outs"], counted["bytes_out"]) == (copied, copied * size)
    assert engine.counters()["evictions"] == evictions and counted["transfer_errors"] == 0
    assert (result.choice is None) == (cpu_hits == 0) and (not result.choice or result.choice["chosen"] == "load")
    assert link is not HeldLink or engine.load_link.noted == cpu_hits * size
    restored = gpu_hits + cpu_hits
    assert torch.equal(device_kv(engine, PROMPT)[:, :, :restored], before[:, :, :restored])
    assert found(engine, PROMPT) == "bbbbbb"


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prompts_around_the_edge_of_a_block_come_back_with_the_right_tokens(make, right, block_size):
    engine = make(block_size=block_size, blocks=80, cpu_blocks=400)
    for length in {1, 2, *range(2 * block_size - 1, 2 * block_size + 2)}:
        for expected in (0, (length - 1) // block_size):
            request = asked(engine, ids(length, length))
            assert request.outcome.tokens == right(ids(length, length)) and request.blocks["cpu_hits"] == expected
            lose(engine)


def test_the_next_turn_finds_the_answer_too(make, right):
    engine = make()
    follow_up = PROMPT + ask(engine, PROMPT, max_tokens=20) + ids(2, 10)
    lose(engine)
    request = asked(engine, follow_up)
    assert request.outcome.tokens == right(follow_up)
    assert (request.blocks, request.source) == (dict(gpu_hits=0, cpu_hits=11, misses=3), "cpu_hit")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 512])
def test_any_budget_gives_the_same_tokens_with_and_without_overlap(make, right, tiny_engine, overlap, budget):
    engine, prompts = make(token_budget=budget, overlap=overlap), [PROMPT, ids(1, 12) + ids(2, 11), ids(3, 9)]
    for prompt in prompts:
        ask(engine, prompt)
    engine.load_link.held = engine.save_link.held = True
    for _ in range(2):
        lose(engine)
        requests = [engine.submit(prompt, max_tokens=8)[0] for prompt in prompts]
        assert answered(engine, *requests) == [right(prompt) for prompt in prompts]
        assert {request.source for request in requests} <= {"cpu_hit", "mixed"}
    assert damage(engine, tiny_engine) < 1e-4


# What a tier keeps ------------------------------------------------------------------------------------------------

def leave_among_the_cached(pool, block):
    """`BlockPool.share` as in the naive design: a block that is used again stays in the list of those to be evicted."""
    pool.references[block] += 1


@pytest.mark.parametrize("guarded", [True, False])
def test_a_block_that_a_running_request_uses_is_not_evicted(make, right, tiny_engine, monkeypatch, guarded):
    engine, prompts = make(blocks=16), [ids(seed, 21) for seed in range(2, 5)]
    ask(engine, LATE, max_tokens=1)
    if not guarded:
        monkeypatch.setattr(paged.BlockPool, "share", leave_among_the_cached)
    user, = engine.submit(LATE, max_tokens=12)
    steps(engine, 1, guarded)
    used = user.table[:6]
    others = [engine.submit(prompt, max_tokens=1)[0] for prompt in prompts]
    for _ in range(8):
        engine.step()
    assert all(other.outcome for other in others) and user.outcome is None
    assert (found(engine, LATE)[:6] == "bbbbbb" and user.table[:6] == used) == guarded
    if guarded:
        assert answered(engine, user) == [right(LATE, 12)] and damage(engine, tiny_engine) < 1e-4


def test_blocks_that_are_registered_on_the_device_are_saved_at_the_end(make, right):
    engine = make()
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 5)
    assert found(engine, PROMPT) == "dddddd" and engine.counters()["swap_outs"] == 0
    assert answered(engine, request) == [right(PROMPT)]
    whole = PROMPT + request.outcome.tokens
    assert found(engine, whole) == "bbbbbbbb" and engine.counters()["swap_outs"] == 8
    assert torch.equal(host_kv(engine, whole), device_kv(engine, whole))


def test_what_a_cancelled_request_has_computed_is_saved_too(make, right):
    engine = make(token_budget=8)
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 2)
    engine.cancel(request)
    steps(engine)
    engine.flush()
    assert isinstance(request.outcome, HungUp) and found(engine, PROMPT) == "bbbb--"
    lose(engine)
    again = asked(engine, PROMPT)
    assert again.outcome.tokens == right(PROMPT) and again.blocks["cpu_hits"] == 4


def test_the_same_computed_twice_is_saved_once(make, right):
    engine = make()
    twins = [engine.submit(PROMPT, max_tokens=8)[0] for _ in range(2)]
    assert answered(engine, *twins) == [right(PROMPT)] * 2
    assert engine.counters()["swap_outs"] == 8 == engine.counters()["cpu_blocks_cached"]


def test_a_full_host_evicts_its_least_recently_used_conversation(make, right):
    engine, (a, b, c, d) = make(cpu_blocks=12), [ids(seed, 17) for seed in range(4)]
    for prompt in (a, b, c):
        ask(engine, prompt, max_tokens=1)
    assert engine.counters()["cpu_blocks_free"] == 0 and engine.counters()["cpu_evictions"] == 0
    lose(engine)
    assert asked(engine, a, max_tokens=1).source == "cpu_hit"                  # and so b is the oldest
    ask(engine, d, max_tokens=1)
    lose(engine)
    assert [found(engine, prompt) for prompt in (a, b, c, d)] == ["hhhh", "----", "hhhh", "hhhh"]
    assert engine.counters()["cpu_evictions"] == 4
    for prompt in (d, c, b, a):
        assert ask(engine, prompt, max_tokens=1) == right(prompt, 1)


@pytest.mark.parametrize("order", ["at once", "one by one", "backwards"])
def test_the_end_of_a_chain_is_evicted_before_its_beginning_on_both_tiers(make, order):
    engine = make(blocks=12, cpu_blocks=8)
    engine.save_link.held = order != "at once"
    request, = engine.submit(LATE, max_tokens=1)
    steps(engine)
    parcels = engine.save_link.under_way()
    for parcel in parcels if order == "one by one" else reversed(parcels):
        parcel.arrive()
        engine.counters()                                                      # sees it
    answered(engine, request)
    assert found(engine, LATE) == "bbbbbb"
    lose(engine, 2)
    assert found(engine, LATE) == "bbbbhh"
    for _ in range(3):
        engine.host.evict()
    assert found(engine, LATE) == "bbbd--"


def test_a_chain_that_goes_on_keeps_its_beginning_longest(make, right):
    """The blocks that were on the host before and those that are copied now are one chain."""
    engine = make(cpu_blocks=8)
    ask(engine, LATE[:13], max_tokens=1)
    ask(engine, LATE, max_tokens=1)
    ask(engine, ids(2, 17), max_tokens=1)                                      # four blocks, and two are free
    lose(engine)
    assert found(engine, LATE) == "hhhh--" and found(engine, ids(2, 17)) == "hhhh"
    again = asked(engine, LATE)
    assert again.outcome.tokens == right(LATE) and again.blocks == dict(gpu_hits=0, cpu_hits=4, misses=3)


@pytest.mark.parametrize("cpu_blocks", [8, 6])
def test_a_chain_that_goes_on_does_not_evict_its_own_beginning(make, right, cpu_blocks):
    """What was saved longest ago is its beginning, which the device had all the time. Others go, or else its end is left out."""
    engine, longer, other = make(cpu_blocks=cpu_blocks), LATE + ids(3, 8), ids(2, 9)
    ask(engine, LATE[:17], max_tokens=1)
    requests = [engine.submit(prompt, max_tokens=new)[0] for prompt, new in ((longer, 4), (other, 1))]
    steps(engine, 2)
    assert found(engine, other) == "bb"                                        # the newest on the host
    assert answered(engine, *requests) == [right(longer, 4), right(other, 1)]
    lose(engine)
    assert (found(engine, longer), found(engine, other)) == ("hhhhhhhh"[:cpu_blocks] + "--"[cpu_blocks - 6:], "--")
    assert ask(engine, longer) == right(longer)


def test_of_a_chain_that_is_evicted_and_does_not_fit_the_host_the_beginning_is_kept(make, right):
    engine = make(blocks=8, cpu_blocks=3)
    ask(engine, LATE, max_tokens=1, offload_after=False)
    ask(engine, ids(2, 29), max_tokens=1, offload_after=False)                 # takes all eight
    assert found(engine, LATE) == "hhh---"
    lose(engine)
    again = asked(engine, LATE)
    assert again.outcome.tokens == right(LATE) and again.blocks == dict(gpu_hits=0, cpu_hits=3, misses=4)


def test_what_leaves_for_a_request_does_not_evict_what_the_request_is_about_to_load(make, right):
    engine, y, x = make(blocks=8, cpu_blocks=12), ids(2, 25), ids(3, 29)
    ask(engine, LATE, max_tokens=1)
    ask(engine, y, max_tokens=1)                                               # the host is full: six blocks each
    ask(engine, x, max_tokens=1, offload_after=False)                          # seven blocks, on the device only
    assert [found(engine, prompt) for prompt in (LATE, y, x)] == ["hhhhhh", "hhhhhh", "ddddddd"]
    back = asked(engine, LATE, max_tokens=1)
    assert back.outcome.tokens == right(LATE, 1)
    assert (back.source, found(engine, LATE)) == ("cpu_hit", "bbbbbb")         # and the host has lost the end of y


def test_the_end_of_a_chain_that_leaves_does_not_evict_its_beginning(make, right):
    engine, prompt = make(blocks=12, cpu_blocks=6), ids(8, 41)
    ask(engine, prompt[:25], max_tokens=1)                                     # the host is full: six blocks
    ask(engine, prompt, max_tokens=1, offload_after=False)                     # ten blocks on the device
    ask(engine, ids(9, 17), max_tokens=1, offload_after=False)                 # takes the last ones of them
    assert engine.pool.counts["evictions"] > 0
    offload.empty(engine)
    back = asked(engine, prompt, max_tokens=1)
    assert back.outcome.tokens == right(prompt, 1) and back.blocks == dict(gpu_hits=0, cpu_hits=6, misses=5)


# offload_after ----------------------------------------------------------------------------------------------------

def test_without_offloading_after_it_the_blocks_stay_on_the_device_and_leave_when_they_are_about_to_be_evicted(make, right):
    engine, other = make(blocks=8), ids(2, 29)
    first = asked(engine, LATE, max_tokens=1, offload_after=False)
    before = device_kv(engine, LATE)
    assert found(engine, LATE) == "dddddd" and engine.counters()["swap_outs"] == engine.counters()["bytes_out"] == 0
    assert asked(engine, LATE, max_tokens=1, offload_after=False).source == "gpu_hit"
    engine.save_link.held = True
    second, = engine.submit(other, max_tokens=4, offload_after=False)          # takes all eight
    steps(engine, 1)
    assert second in engine.waiting and engine.counters()["swap_outs"] == 6 and engine.counters()["evictions"] == 0
    assert answered(engine, first, second) == [right(LATE, 1), right(other, 4)]
    assert found(engine, LATE) == "hhhhhh" and engine.counters()["evictions"] == 6
    assert torch.equal(host_kv(engine, LATE), before)
    engine.save_link.held = False
    back = asked(engine, LATE)
    assert back.outcome.tokens == right(LATE)
    assert (back.source, back.blocks) == ("cpu_hit", dict(gpu_hits=0, cpu_hits=6, misses=1))


def test_only_what_is_about_to_be_evicted_leaves_and_what_the_host_has_is_not_copied_again(make, right):
    engine = make(blocks=12)
    ask(engine, LATE, max_tokens=1, offload_after=False)                       # six blocks stay cached, six are free
    ask(engine, ids(2, 29), max_tokens=1, offload_after=False)                 # takes eight
    assert found(engine, LATE) == "ddddhh" and engine.counters()["swap_outs"] == 2
    ask(engine, LATE, max_tokens=1)
    assert engine.counters()["swap_outs"] == 2 + 4 + 2                         # its beginning; and what it evicted
    engine.pool.check_integrity([])
    assert found(engine, LATE) == "bbbbbb"


def test_blocks_that_a_growing_answer_evicts_leave_first(make, right):
    engine = make(blocks=12)
    ask(engine, LATE, max_tokens=1, offload_after=False)
    growing, = engine.submit(ids(2, 9), max_tokens=36, offload_after=False)    # eleven blocks in the end
    assert answered(engine, growing) == [right(ids(2, 9), 36)]
    assert len(growing.outcome.tokens) == 36 and "-" not in found(engine, LATE) and engine.counters()["evictions"] == 5
    again = asked(engine, LATE)
    assert again.outcome.tokens == right(LATE) and again.blocks["misses"] == 1


def test_a_block_that_leaves_does_not_cost_another_request_its_blocks(make, right):
    """Who needs a block waits for one that is on its way out, before somebody is preempted."""
    engine = make(blocks=10)
    other, = engine.submit(OTHER, max_tokens=30, offload_after=False)
    first, = engine.submit(LATE, max_tokens=1)
    engine.save_link.held = True
    steps(engine, 1)
    assert first.outcome and engine.pool.available == 2
    assert answered(engine, other, first) == [right(OTHER, 30), right(LATE, 1)]
    assert engine.counters()["preemptions"] == 0 and len(other.outcome.tokens) == 30


@pytest.mark.parametrize("value", [1, 0, "yes", [], 0.0], ids=str)
def test_offload_after_of_a_wrong_type_is_refused_by_name(make, value):
    engine = make()
    with pytest.raises(BadRequest, match="offload_after.*true or false"):
        engine.submit(LATE, offload_after=value)
    assert engine.counters()["refused"] == 1 and not engine.waiting


def test_offload_after_is_true_unless_it_is_said(make):
    engine = make()
    for number, (value, saved) in enumerate(((None, 6), (True, 6), (False, 0))):
        outs = engine.counters()["swap_outs"]
        ask(engine, ids(number, 25), max_tokens=1, offload_after=value)
        assert engine.counters()["swap_outs"] - outs == saved


# Small hosts ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cpu_blocks", [0, 1, 3])
@pytest.mark.parametrize("offload_after", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_a_host_that_is_smaller_than_a_conversation_helps_a_little_or_not_at_all(make, right, cpu_blocks, offload_after, held):
    engine, prompts = make(blocks=9, cpu_blocks=cpu_blocks), [PROMPT, ids(2, 26), ids(3, 6)]
    engine.load_link.held = engine.save_link.held = held
    for _ in range(2):
        for prompt in prompts:
            assert ask(engine, prompt, offload_after=offload_after) == right(prompt)
    requests = [engine.submit(prompt, max_tokens=8, offload_after=offload_after)[0] for prompt in prompts]
    assert answered(engine, *requests) == [right(prompt) for prompt in prompts]
    lose(engine)
    last, counters = asked(engine, PROMPT, offload_after=True), engine.counters()
    assert last.outcome.tokens == right(PROMPT)
    assert counters["cpu_blocks"] == cpu_blocks == counters["cpu_blocks_cached"] + counters["cpu_blocks_free"]
    assert (counters["swap_outs"] > 0) == (counters["bytes_out"] > 0) == (cpu_blocks > 0)
    if cpu_blocks == 0:
        assert counters["swap_ins"] == counters["cpu_hits"] == counters["cpu_evictions"] == 0
    lose(engine)
    assert asked(engine, PROMPT).blocks == dict(gpu_hits=0, cpu_hits=cpu_blocks, misses=7 - cpu_blocks)     # the beginning


def test_more_host_blocks_than_memory_are_refused_with_a_number_that_fits(make, monkeypatch):
    size = 3 * 2 * 4 * 2 * 16 * 4                                              # layers, K and V, tokens, heads, numbers, bytes
    monkeypatch.setattr(checkpoint, "free_host_memory", lambda: (64 + 100) * size + 5)
    with pytest.raises(checkpoint.ModelError, match=r"101 host blocks of 4 tokens .*--cpu-blocks 100\."):
        make(cpu_blocks=101)
    assert make(cpu_blocks=100).host.size == 100
    assert make(cpu_blocks=None).host.size == 25                               # a quarter of what is free
    assert make(cpu_blocks=0).host.size == 0
    monkeypatch.setattr(checkpoint, "free_host_memory", lambda: 1e12)
    assert make(cpu_blocks=None).host.size == 256                              # four times as many as the device
    monkeypatch.setattr(checkpoint, "free_host_memory", lambda: 64 * size)
    assert make(cpu_blocks=None).host.size == 0


# Hazard: what is on its way in ------------------------------------------------------------------------------------

def free_at_once(engine, request, plain=offload.Engine.free):
    """The guard removed: who goes takes the blocks with him that are still being written."""
    for swap in request.swap_ins:
        if swap in engine.swaps:
            for block in swap.device_blocks:
                engine.arriving.pop(block, None)
                engine.pool.forget(block)
            engine.pool.release(swap.device_blocks)
            swap.device_blocks = []
    plain(engine, request)


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_on_their_way_in_go_to_nobody_else_when_their_request_is_cancelled(make, right, tiny_engine, monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(offload.Engine, "free", free_at_once)
    engine, prompt = make(blocks=12), ids(2, 17)
    other, late = on_its_way(engine, decode=12)
    coming = set(late.table[:6])
    engine.cancel(late)
    steps(engine, 1)
    follower, = engine.submit(prompt, max_tokens=4)                            # five blocks, and four are free
    steps(engine, 2)
    assert isinstance(late.outcome, HungUp)
    assert bool(coming & set(follower.table)) != guarded and (follower in engine.waiting) == guarded
    engine.load_link.arrive()
    tokens = answered(engine, other, follower)
    assert (tokens == [right(OTHER, 12), right(prompt, 4)]) == guarded
    assert (damage(engine, tiny_engine) < 1e-4) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_on_their_way_in_go_to_nobody_else_when_their_request_is_put_out(make, right, tiny_engine, monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(offload.Engine, "free", free_at_once)
    engine = make(blocks=12)
    other, late = on_its_way(engine, decode=43)                                # twelve blocks in the end
    while not engine.counters()["preemptions"]:
        steps(engine, 1)
    assert engine.waiting[0] is late
    steps(engine, 12)
    engine.load_link.arrive()
    answered(engine, other, late)
    assert (other.outcome.tokens == right(OTHER, 43)) == guarded
    assert (damage(engine, tiny_engine) < 1e-4) == guarded
    if guarded:
        assert late.outcome.tokens == right(LATE)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_layer_is_not_computed_before_its_blocks_have_arrived(make, right, tiny_engine, monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(offload.Engine, "tap", paged.Engine.tap)
    engine = make()
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    engine.load_link.held = True
    late, = engine.submit(LATE, max_tokens=8, offload_after=False)
    while len(late.answer.tokens) < 8 and late.outcome is None:
        steps(engine, 1)
    assert (late.answer.tokens == right(LATE)) == guarded
    engine.load_link.arrive()
    steps(engine)
    engine.flush()
    assert (damage(engine, tiny_engine) < 1e-4) == guarded                     # what is computed from what is wrong is wrong too


def test_who_joins_a_swap_in_waits_for_it_too(make, right, monkeypatch):
    engine = make()
    other, late = on_its_way(engine, decode=12)
    second, = engine.submit(LATE + [5], max_tokens=8)
    steps(engine, 2)
    assert second.restoration and not second.answer.tokens and second.swap_ins == late.swap_ins
    engine.load_link.arrive()
    assert answered(engine, other, late, second) == [right(OTHER, 12), right(LATE), right(LATE + [5])]


def test_who_is_cancelled_leaves_the_swap_in_to_who_joined_it(make, right, tiny_engine):
    engine = make()
    other, late = on_its_way(engine, decode=12)
    second, = engine.submit(LATE, max_tokens=8)
    steps(engine, 1)
    engine.cancel(late)
    steps(engine, 2)
    assert late.table == [] and second.restoration
    engine.load_link.arrive()
    assert answered(engine, other, second) == [right(OTHER, 12), right(LATE)]
    assert engine.counters()["swap_ins"] == 6 and damage(engine, tiny_engine) < 1e-4


# Hazard: what is on its way out -----------------------------------------------------------------------------------

def send_without_holding(engine, *arguments, plain=offload.Engine.swap_out, **named):
    """The guard removed: what is being saved is not held meanwhile."""
    sent = plain(engine, *arguments, **named)
    for swap in engine.swaps:
        if not swap.inward:
            engine.pool.release(swap.device_blocks)
            swap.device_blocks, swap.before_eviction = [], False
    return sent


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("offload_after", [True, False], ids=["at the end", "on eviction"])
def test_a_block_is_not_used_again_before_it_has_left(make, right, tiny_engine, monkeypatch, guarded, offload_after):
    if not guarded:
        monkeypatch.setattr(offload.Engine, "swap_out", send_without_holding)
    engine, prompt = make(blocks=8), ids(2, 29)
    engine.save_link.held = True
    first, = engine.submit(LATE, max_tokens=1, offload_after=offload_after)
    steps(engine)
    before = device_kv(engine, LATE)
    assert len(engine.save_link.under_way()) == 6 * offload_after
    second, = engine.submit(prompt, max_tokens=4, offload_after=False)
    steps(engine, 1)
    waited = guarded or not offload_after                                      # then nobody could go on, and one has arrived
    assert bool(second.table) != waited and len(engine.save_link.under_way()) == 6 - waited
    assert answered(engine, first, second) == [right(LATE, 1), right(prompt, 4)]
    assert torch.equal(host_kv(engine, LATE), before) == guarded
    assert (damage(engine, tiny_engine) < 1e-4) == guarded
    engine.save_link.held = False
    lose(engine)
    back = asked(engine, LATE)
    assert back.source == "cpu_hit" and (back.outcome.tokens == right(LATE)) == guarded


def load_without_holding(engine, *arguments, plain=offload.Engine.swap_in):
    """The guard removed: the host blocks that are being read are not held."""
    taken = plain(engine, *arguments)
    engine.host.release(engine.swaps[-1].host_blocks)
    engine.swaps[-1].host_blocks = []
    return taken


@pytest.mark.parametrize("guarded", [True, False])
def test_a_host_block_that_is_being_read_is_not_evicted(make, right, tiny_engine, monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(offload.Engine, "swap_in", load_without_holding)
    engine, prompt = make(cpu_blocks=6), ids(3, 9)
    other, late = on_its_way(engine, decode=20)
    third, = engine.submit(prompt, max_tokens=1)                               # has two blocks to save
    steps(engine, 2)
    assert third.outcome.tokens == right(prompt, 1)
    engine.check_integrity()
    assert found(engine, LATE) == ("bbbbbb" if guarded else "bbbbdd") and found(engine, prompt) == ("dd" if guarded else "bb")
    engine.load_link.arrive()
    answered(engine, other, late)
    assert other.outcome.tokens == right(OTHER, 20)
    assert (late.outcome.tokens == right(LATE)) == guarded and (damage(engine, tiny_engine) < 1e-4) == guarded


# Hazards, over the real link --------------------------------------------------------------------------------------

def delayed(monkeypatch, seconds: float = 0.003):
    plain = links.move

    def move(dst, src):
        time.sleep(seconds)
        plain(dst, src)
    monkeypatch.setattr(links, "move", move)


def gate(monkeypatch, copies: int = 0) -> threading.Semaphore:
    """Let so many pieces be copied; the next waits until the semaphore is released."""
    plain, semaphore = links.move, threading.Semaphore(copies)

    def move(dst, src):
        assert semaphore.acquire(timeout=30)
        plain(dst, src)
    monkeypatch.setattr(links, "move", move)
    return semaphore


def test_with_slow_copies_over_the_link_both_ways_the_tokens_and_blocks_are_right(make, right, tiny_engine, monkeypatch):
    engine, prompts = make(links.Link, blocks=14, cpu_blocks=24), [ids(seed, 25) for seed in range(3)]
    delayed(monkeypatch)
    for _ in range(2):
        requests = [engine.submit(prompt, max_tokens=6)[0] for prompt in prompts]
        steps(engine, 2)
        engine.cancel(engine.submit(LATE, max_tokens=4)[0])
        assert answered(engine, *requests) == [right(prompt, 6) for prompt in prompts]
        assert damage(engine, tiny_engine) < 1e-4
    assert engine.counters()["swap_ins"] > 0 and engine.counters()["evictions"] > 0


def test_over_the_link_a_block_that_is_used_again_before_it_has_left_is_damaged(make, right, tiny_engine, monkeypatch):
    monkeypatch.setattr(offload.Engine, "swap_out", send_without_holding)
    engine = make(links.Link, blocks=8)
    closed = gate(monkeypatch)
    for prompt in (LATE, ids(2, 25)):
        request, = engine.submit(prompt, max_tokens=1)
        steps(engine)
        assert request.outcome.tokens == right(prompt, 1)
    closed.release(100)
    engine.flush()
    assert damage(engine, tiny_engine) > 1e-2


def test_over_the_link_a_layer_that_is_read_before_it_has_arrived_gives_wrong_tokens(make, right, monkeypatch):
    monkeypatch.setattr(offload.Engine, "tap", paged.Engine.tap)
    engine = make(links.Link)
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    engine.pool.kv.fill_(NAN)
    closed = gate(monkeypatch)
    late, = engine.submit(LATE, max_tokens=8, offload_after=False)
    while late.outcome is None and len(late.answer.tokens) < 8:
        engine.step()
    assert late.answer.tokens != right(LATE)
    closed.release(100)
    engine.flush()


# Load or recompute? -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cost, chosen", [(0.5, "load"), (1.0, "load"), (2.0, "recompute")])
@pytest.mark.parametrize("lost", ["the device's", "the device's end", "the device's beginning"])
def test_what_would_arrive_later_than_it_is_computed_is_computed(make, right, cost, chosen, lost):
    engine = make()
    ask(engine, PROMPT)
    WHERE[lost][0](engine)
    engine.cost = cost
    request, hits = asked(engine, PROMPT), WHERE[lost][3]
    assert request.outcome.tokens == right(PROMPT)
    assert request.outcome.choice == dict(chosen=chosen, load_ms=cost * 1e3, recompute_ms=1e3)
    counters, recomputes = engine.counters(), chosen == "recompute"
    assert counters["recomputed_hits"] == (hits if recomputes else 0) and counters["swap_ins"] == (0 if recomputes else hits)
    if recomputes:
        first = 4 if lost == "the device's end" else 0
        assert request.blocks == dict(gpu_hits=first, cpu_hits=0, misses=7 - first)
        assert (request.source, request.cached_tokens) == ("gpu_hit" if first else "miss", 4 * first)
    assert engine.load_link.worn_out == recomputes


def test_who_computes_instead_of_loading_writes_into_no_block_that_others_find(make, right):
    engine = make()
    ask(engine, PROMPT)
    forget(engine.pool, engine, 0, 1)
    known = {engine.pool.find(prefix) for prefix in chain(engine, PROMPT)[2:]}
    engine.cost = 2.0
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 1)
    assert request.source == "miss" and len(known) == 4 and not known & set(request.table)
    assert answered(engine, request) == [right(PROMPT)]


def test_where_the_host_holds_nothing_more_there_is_no_choice(make):
    engine = make(loads=False)
    assert asked(engine, PROMPT).outcome.choice is None
    assert asked(engine, PROMPT).outcome.choice is None
    assert "Chosen" not in asked(engine, PROMPT).outcome.summary()


def test_the_summary_says_what_was_found_and_chosen_and_over_what(make):
    engine = make()
    ask(engine, PROMPT)
    lose(engine)
    summary = asked(engine, PROMPT).outcome.summary()
    assert all(part in summary for part in ("cpu_hits 6", "misses 1", "chosen load", "500.0", "1000.0", "held link")), summary


def test_what_would_never_be_loaded_is_not_saved(make, right):
    engine = make(blocks=8, loads=False)
    for prompt in (LATE, ids(2, 29), LATE):
        assert ask(engine, prompt, max_tokens=1) == right(prompt, 1)
    assert ask(engine, ids(3, 29), max_tokens=1, offload_after=False) == right(ids(3, 29), 1)
    counters = engine.counters()
    assert counters["swap_outs"] == counters["cpu_blocks_cached"] == 0 and counters["evictions"] > 12


def test_over_a_link_of_a_kilobyte_a_second_everything_is_computed_and_nothing_waits(make, right):
    engine = make(links.Link, None, blocks=16)
    engine.worth_keeping = lambda blocks: True
    ask(engine, PROMPT)
    del engine.worth_keeping
    lose(engine)
    engine.load_link, engine.save_link = (links.Link(lane, engine.clock, 1000) for lane in ("load", "save"))
    for prompt in (PROMPT, ids(2, 26), ids(3, 40), PROMPT):                    # 18 seconds would pass over the link for each
        request, = engine.submit(prompt, max_tokens=8)
        steps(engine)
        assert request.outcome.tokens == right(prompt) and request.blocks["cpu_hits"] == 0
        assert not engine.swaps
    assert request.choice["chosen"] == "recompute" and request.choice["load_ms"] > 10_000 > request.choice["recompute_ms"]
    counters = engine.counters()
    assert (counters["swap_ins"], counters["bytes_in"], counters["swap_outs"]) == (0, 0, 8)
    assert counters["recomputed_hits"] == 12 and counters["link"] == "modelled link, 1e-06 GB/s"


def test_a_link_that_was_slow_for_a_while_is_tried_again(make, right):
    engine = make(links.Link, None)
    engine.seconds_to_compute = lambda start, end: 1.0
    ask(engine, PROMPT)
    engine.load_link.speeds.extend([1.0] * 9)                                  # bytes a second
    sources = []
    for _ in range(10):
        lose(engine)
        request = asked(engine, PROMPT)
        assert request.outcome.tokens == right(PROMPT)
        sources.append(request.source)
    assert sources == ["miss"] * 9 + ["cpu_hit"]


def test_what_is_on_its_way_delays_what_comes_after_it(make):
    engine = make(loads=None, bytes_per_second=1000.0)
    size = engine.pool.kv[:, :, 0].nbytes
    assert engine.seconds_to_load(2) == 2 * size / 1000
    engine.load_link.held = True
    engine.load_link.copy(engine.pool.kv[:, :, :3], torch.zeros_like(engine.pool.kv[:, :, :3]), "three blocks")
    assert engine.seconds_to_load(2) == 5 * size / 1000 and engine.seconds_to_load(2, behind=0) == 2 * size / 1000


def test_the_operations_of_a_prefill_are_those_of_its_parts_and_of_every_product(make, tiny_engine):
    engine, config = make(), tiny_engine.model.config
    for end in (1, 7, 100):
        weights = sum(parameter.numel() for layer in range(3) for parameter in (
            torch.empty(64, 64), torch.empty(64, 32), torch.empty(64, 32), torch.empty(64, 64),     # q, k, v, o
            *[torch.empty(64, 128)] * 3))                                                            # gate, up, down
        seen = sum(position + 1 for position in range(end))
        assert config.num_hidden_layers == 3
        assert engine.flops(0, end) == 2 * weights * end + 3 * 2 * 2 * (4 * 16) * seen
        for part in range(end + 1):
            assert engine.flops(0, part) + engine.flops(part, end) == engine.flops(0, end)


def test_computing_is_estimated_from_the_last_prefills(make):
    engine = make(loads=None)
    assert engine.seconds_to_compute(0, 4) == INF
    engine.prefills.extend([(10, engine.flops(0, 10), 1.0), (20, engine.flops(10, 30), 2.0)])
    assert engine.seconds_to_compute(0, 30) == pytest.approx(3.0)
    assert engine.seconds_to_compute(30, 60) == pytest.approx(3.0 * engine.flops(30, 60) / engine.flops(0, 30))


def test_a_prefill_that_waited_for_the_link_or_was_short_does_not_count(make):
    engine = make()
    ask(engine, PROMPT)
    assert [tokens for tokens, _, _ in engine.prefills] == [26]
    ask(engine, ids(2, 9))
    assert len(engine.prefills) == 1                                           # shorter than the longest
    lose(engine)
    engine.load_link.held = True
    longer = PROMPT[:24] + ids(4, 60)
    assert asked(engine, longer).source == "cpu_hit" and len(engine.prefills) == 1
    lose(engine)
    engine.load_link.held = False
    assert asked(engine, longer + ids(5, 30)).source == "cpu_hit"
    assert [(tokens, flops) for tokens, flops, _ in engine.prefills][1:] == [(30, engine.flops(84, 114))]


# Copies that fail -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("when", ["at once", "when it is waited for"])
def test_who_does_not_get_what_was_saved_computes_it(make, right, tiny_engine, overlap, layer, when):
    engine = make(overlap=overlap)
    ask(engine, PROMPT)
    lose(engine)
    engine.load_link.held = True
    plain = engine.load_link.copy

    def copy(dst, src, label):
        parcel = plain(dst, src, label)
        parcel.doomed = label == f"layer {layer}"
        if when == "at once":
            parcel.arrive()
        return parcel
    engine.load_link.copy = copy
    request = asked(engine, PROMPT)
    result, counters = request.outcome, engine.counters()
    assert result.tokens == right(PROMPT) and (result.source, result.usage["cached_tokens"]) == ("miss", 0)
    assert result.blocks == dict(gpu_hits=0, cpu_hits=0, misses=7)
    assert (counters["transfer_errors"], counters["failed"], counters["swap_outs"]) == (1, 0, 8 + 6)    # saved again
    assert (counters["gpu_hits"], counters["cpu_hits"], counters["misses"]) == (0, 0, 14)
    assert damage(engine, tiny_engine) < 1e-4 and found(engine, PROMPT) == "bbbbbb"


def test_others_in_the_batch_of_one_whose_load_fails_are_unharmed(make, right, tiny_engine):
    engine, prompts = make(), [ids(2, 9), ids(3, 18)]
    ask(engine, PROMPT)
    lose(engine)
    engine.load_link.held = engine.load_link.broken = True
    late, *others = [engine.submit(prompt, max_tokens=8)[0] for prompt in (PROMPT, *prompts)]
    late.offload_after = False
    steps(engine, 3)
    assert found(engine, PROMPT)[-1] != "h"
    assert answered(engine, late, *others) == [right(prompt) for prompt in (PROMPT, *prompts)]
    assert engine.counters()["transfer_errors"] == 1 and engine.counters()["failed"] == 0
    assert {request.source for request in (late, *others)} == {"miss"}
    assert damage(engine, tiny_engine) < 1e-4


def test_who_finds_a_layer_missing_begins_anew_before_the_others_have_arrived(make, right):
    engine = make()
    ask(engine, PROMPT)
    lose(engine)
    engine.load_link.held = True
    late, = engine.submit(PROMPT, max_tokens=8)
    engine.load_link.copy = lambda *arguments, plain=engine.load_link.copy: doomed(plain(*arguments))
    engine.step()
    assert late in engine.waiting and found(engine, PROMPT) == "------" and len(engine.swaps) == 1
    engine.check_integrity()
    assert answered(engine, late) == [right(PROMPT)] and late.source == "miss"


def doomed(parcel):
    parcel.doomed = True
    return parcel


@pytest.mark.parametrize("joined", [False, True])
def test_a_load_that_fails_while_others_decode_is_noticed_and_computed(make, right, tiny_engine, joined):
    engine = make()
    other, late = on_its_way(engine)
    second = engine.submit(LATE + [5], max_tokens=8) if joined else []
    steps(engine, 2)
    engine.load_link.broken = True
    engine.load_link.arrive(1)
    steps(engine, 2)
    assert not late.answer.tokens
    engine.load_link.arrive()
    steps(engine, 1)
    expected = [right(OTHER, 30), right(LATE), *[right(LATE + [5])] * joined]
    assert answered(engine, other, late, *second) == expected
    assert late.source == "miss" and engine.counters()["transfer_errors"] == 1 and damage(engine, tiny_engine) < 1e-4


def test_of_a_prefix_that_never_arrives_a_repeat_is_a_miss_and_not_an_endless_loop(make, right):
    engine = make()
    ask(engine, PROMPT)
    engine.load_link.broken = engine.save_link.broken = True
    for errors in (1 + 6, 1 + 6 + 6, 1 + 6 + 6 + 6):                           # one load, and each time the saves
        lose(engine)
        request = asked(engine, PROMPT)
        assert request.outcome.tokens == right(PROMPT) and request.source == "miss"
        assert engine.counters()["transfer_errors"] == errors
    assert engine.counters()["swap_ins"] == 6
    engine.load_link.broken = engine.save_link.broken = False
    ask(engine, PROMPT)
    lose(engine)
    assert asked(engine, PROMPT).source == "cpu_hit"


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_save_that_fails_loses_nothing_but_the_copy(make, right, tiny_engine, when):
    engine = make()
    engine.save_link.held, engine.save_link.broken = when == "later", True
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and engine.counters()["transfer_errors"] == 8
    assert found(engine, PROMPT) == "dddddd" and engine.counters()["cpu_blocks_free"] == 64
    assert asked(engine, PROMPT).source == "gpu_hit" and damage(engine, tiny_engine) < 1e-4
    lose(engine)
    assert asked(engine, PROMPT).source == "miss"


def test_one_save_of_a_chain_that_fails_shortens_what_comes_back(make, right, tiny_engine):
    engine = make()
    engine.save_link.held = True
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine)
    engine.save_link.under_way()[2].doomed = True
    answered(engine, request)
    lose(engine)
    assert found(engine, PROMPT) == "hh-hhh"
    again = asked(engine, PROMPT)
    assert again.outcome.tokens == right(PROMPT) and again.blocks == dict(gpu_hits=0, cpu_hits=2, misses=5)
    assert found(engine, PROMPT) == "bbbbbb" and damage(engine, tiny_engine) < 1e-4


@pytest.mark.parametrize("direction", ["load", "save"])
def test_over_the_link_a_copy_that_raises_costs_only_what_it_copied(make, right, tiny_engine, monkeypatch, direction):
    engine = make(links.Link)
    if direction == "load":
        ask(engine, PROMPT)
        lose(engine)
    with monkeypatch.context() as patch:
        def fail(dst, src):
            raise OSError("injected")
        patch.setattr(links, "move", fail)
        requests = [engine.submit(prompt, max_tokens=8)[0] for prompt in (PROMPT, ids(2, 9))]
        assert answered(engine, *requests) == [right(PROMPT), right(ids(2, 9))]
    counters = engine.counters()
    assert requests[0].source == "miss" and counters["failed"] == 0 and counters["transfer_errors"] > 0
    assert "b" not in found(engine, PROMPT)
    ask(engine, PROMPT)
    lose(engine)
    again = asked(engine, PROMPT)
    assert again.source == "cpu_hit" and again.outcome.tokens == right(PROMPT) and damage(engine, tiny_engine) < 1e-4


@pytest.mark.parametrize("refused", ["layer 0", "layer 2"])
@pytest.mark.parametrize("held", [False, True])
def test_who_is_refused_by_the_link_computes(make, right, tiny_engine, refused, held):
    engine, others = make(), [ids(2, 9), ids(3, 18)]
    ask(engine, PROMPT)
    lose(engine)
    engine.load_link.refuses, engine.load_link.held = refused, held
    requests = [engine.submit(prompt, max_tokens=8)[0] for prompt in (PROMPT, *others, PROMPT)]
    steps(engine, 1)
    assert not engine.load_link.under_way() and requests[0].answer.tokens      # nothing comes later into what is computed
    assert answered(engine, *requests) == [right(prompt) for prompt in (PROMPT, *others, PROMPT)]
    counters = engine.counters()
    assert requests[0].choice["chosen"] == "recompute" and counters["transfer_errors"] == 1 and counters["failed"] == 0
    assert {request.source for request in requests} <= {"miss", "gpu_hit"} and counters["swap_ins"] == 0
    assert damage(engine, tiny_engine) < 1e-4
    engine.load_link.refuses = False
    ask(engine, PROMPT)
    lose(engine)
    again = asked(engine, PROMPT)
    assert again.source == "cpu_hit" and again.outcome.tokens == right(PROMPT) and damage(engine, tiny_engine) < 1e-4


@pytest.mark.parametrize("offload_after", [True, False], ids=["at the end", "on eviction"])
def test_a_link_that_refuses_to_save_loses_only_the_copies(make, right, tiny_engine, offload_after):
    engine = make(blocks=8)
    engine.save_link.refuses = True
    for prompt in (PROMPT, ids(2, 29), PROMPT):
        request = asked(engine, prompt, max_tokens=4, offload_after=offload_after)
        assert request.outcome.tokens == right(prompt, 4) and request.source == "miss"
    counters = engine.counters()
    assert counters["transfer_errors"] > 0 and counters["failed"] == 0 and counters["cpu_blocks_free"] == 64
    engine.save_link.refuses = False
    ask(engine, PROMPT, max_tokens=4)
    assert found(engine, PROMPT) == "bbbbbb" and damage(engine, tiny_engine) < 1e-4


# Who waits for the link, and who does not -------------------------------------------------------------------------

@pytest.mark.parametrize("together", [True, False])
def test_requests_with_one_prefix_share_the_copy_that_is_on_its_way(make, right, together):
    engine = make()
    other, late = on_its_way(engine, hold=not together) if not together else (None, None)
    if together:
        ask(engine, LATE, max_tokens=1)
        lose(engine)
        engine.load_link.held = True
        other, late = engine.submit(OTHER, max_tokens=30)[0], engine.submit(LATE, max_tokens=8)[0]
    second, = engine.submit(LATE + [5], max_tokens=8)
    steps(engine, 3)
    assert len(engine.swaps) == 1 and second.table[:6] == late.table[:6]
    engine.load_link.arrive()
    assert answered(engine, other, late, second) == [right(OTHER, 30), right(LATE), right(LATE + [5])]
    counters = engine.counters()
    assert counters["swap_ins"] == 6 and counters["bytes_in"] == 6 * engine.pool.kv[:, :, 0].nbytes
    assert late.source == second.source == "cpu_hit" and late.blocks["cpu_hits"] == second.blocks["cpu_hits"] == 6


def test_who_decodes_goes_on_while_another_is_restored(make, right):
    engine = make()
    other, late = on_its_way(engine, decode=20)
    written = len(other.answer.tokens)
    while len(other.answer.tokens) < 19:
        steps(engine, 1)
        written += 1
        assert len(other.answer.tokens) == written and not late.answer.tokens and late.restoration
        assert len(engine.load_link.under_way()) == 3 and engine.load_link.log == []            # nobody waited
    assert answered(engine, other, late) == [right(OTHER, 20), right(LATE)]


def test_who_is_restored_while_others_decode_begins_when_all_layers_have_arrived(make, right):
    engine = make()
    other, late = on_its_way(engine)
    for arrived in range(3):
        steps(engine, 2)
        assert not late.answer.tokens
        engine.load_link.arrive(1)
    steps(engine, 1)
    assert late.answer.tokens == right(LATE)[:1]
    assert answered(engine, other, late) == [right(OTHER, 30), right(LATE)]


def log_layers(engine, monkeypatch) -> list:
    """-> the log of the link, in which from now on stands, too, when each layer is computed."""
    log = engine.load_link.log
    for index, layer in enumerate(engine.model.layers):
        def forward(*arguments, index=index, plain=layer.forward):
            log.append(("compute", f"layer {index}"))
            return plain(*arguments)
        monkeypatch.setattr(layer, "forward", forward)
    return log


@pytest.mark.parametrize("overlap", [True, False])
def test_alone_a_layer_is_computed_while_the_next_is_on_its_way_if_they_may_overlap(make, right, monkeypatch, overlap):
    engine = make(overlap=overlap)
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    engine.load_link.held = True
    log = log_layers(engine, monkeypatch)
    late, = engine.submit(LATE, max_tokens=1, offload_after=False)
    assert answered(engine, late)[0]
    monkeypatch.undo()
    assert late.outcome.tokens == right(LATE, 1)
    lanes = ["load", "compute"] * 3 if overlap else ["load"] * 3 + ["compute"] * 3
    layers = [0, 0, 1, 1, 2, 2] if overlap else [0, 1, 2, 0, 1, 2]
    assert log == [(lane, f"layer {layer}") for lane, layer in zip(lanes, layers)]


@pytest.mark.parametrize("overlap", [True, False])
def test_over_the_link_the_first_layer_is_computed_before_the_second_arrives_if_they_may_overlap(
        make, right, monkeypatch, overlap):
    engine, began = make(links.Link, overlap=overlap), []
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    for index, layer in enumerate(engine.model.layers):
        def forward(*arguments, index=index, plain=layer.forward):
            began.append(index)
            return plain(*arguments)
        monkeypatch.setattr(layer, "forward", forward)
    closed, answers = gate(monkeypatch), []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(LATE, max_tokens=1).tokens), daemon=True)
    thread.start()
    until(lambda: engine.swaps and len(engine.swaps[0].transfers) == 3)
    transfers = list(engine.swaps[0].transfers)
    for layer in range(3):
        assert began == (list(range(layer)) if overlap else []) and not transfers[layer].ready
        closed.release(len(transfers[layer].dst))
        until(lambda layer=layer: layer in began if overlap else transfers[layer].ready)
    closed.release(1000)
    until(lambda: answers)
    monkeypatch.undo()
    assert answers == [right(LATE, 1)] and began == [0, 1, 2]


# Samples, salts and collisions ------------------------------------------------------------------------------------

def test_samples_of_a_prompt_come_back_once_for_all(make, right):
    engine, sampling = make(), dict(max_tokens=12, temperature=1.0)
    for source, swap_ins in (("miss", 0), ("cpu_hit", 6)):
        samples = engine.submit(PROMPT, n=3, seed=1, **sampling)
        assert answered(engine, *samples) == [right(PROMPT, seed=seed, **sampling) for seed in (1, 2, 3)]
        assert {sample.outcome.source for sample in samples} == {source} and engine.counters()["swap_ins"] == swap_ins
        assert [sample.outcome.blocks for sample in samples] == [samples[0].outcome.blocks] * 3
        assert [sample.outcome.choice for sample in samples] == [samples[0].outcome.choice] * 3
        lose(engine)
    assert samples[0].outcome.blocks == dict(gpu_hits=0, cpu_hits=6, misses=1)


@pytest.mark.parametrize("arrives", [True, False])
def test_who_inherits_a_prompt_says_where_it_came_from(make, right, arrives):
    engine = make()
    ask(engine, LATE, max_tokens=1)
    lose(engine)
    other, = engine.submit(OTHER, max_tokens=30)
    steps(engine, 1)
    engine.load_link.held = True
    leader, heir = engine.submit(LATE, n=2, max_tokens=8)
    steps(engine, 1)
    engine.cancel(leader)
    steps(engine, 1)
    engine.load_link.broken = not arrives
    engine.load_link.arrive()
    assert answered(engine, other, heir) == [right(OTHER, 30), right(LATE)]
    assert heir.outcome.source == ("cpu_hit" if arrives else "miss")
    assert heir.outcome.blocks == dict(gpu_hits=0, cpu_hits=6 * arrives, misses=7 - 6 * arrives)


def test_a_salt_parts_the_host_too(make, right):
    engine = make()
    ask(engine, PROMPT, cache_salt="a")
    lose(engine)
    for salt, source in (("b", "miss"), ("", "miss"), ("a", "cpu_hit"), ("b", "gpu_hit")):
        request = asked(engine, PROMPT, cache_salt=salt)
        assert (request.outcome.tokens, request.source) == (right(PROMPT), source)
    assert engine.counters()["swap_outs"] == 24 and engine.counters()["swap_ins"] == 6


@pytest.mark.parametrize("collision", COLLISIONS)
def test_keys_that_collide_change_no_token(make, right, tiny_engine, monkeypatch, collision):
    monkeypatch.setattr(paged, "block_key", COLLISIONS[collision])
    engine, prompts = make(blocks=16, cpu_blocks=8), [[*ids(seed, 11), 9] for seed in range(5)]
    for prompt in (*prompts, *prompts, prompts[0][:8], [*prompts[1][:4], *prompts[2][4:]]):
        assert ask(engine, prompt) == right(prompt)
        lose(engine)
    together = [engine.submit(prompt, max_tokens=8)[0] for prompt in prompts]
    assert answered(engine, *together) == [right(prompt) for prompt in prompts]
    assert damage(engine, tiny_engine) < 1e-4


def test_without_the_comparison_of_tokens_a_collision_brings_wrong_blocks_from_the_host(make, right, monkeypatch):
    monkeypatch.setattr(paged, "block_key", COLLISIONS["the last token"])
    monkeypatch.setattr(paged.Prefixes, "intern", trust_the_key)
    engine, first, second = make(), ids(1, 11) + [9], ids(2, 11) + [9]
    second[3], second[7] = first[3], first[7]
    ask(engine, first)
    lose(engine)
    request, = engine.submit(second, max_tokens=8)
    assert answered(engine, request)[0] != right(second) and request.source == "cpu_hit"


# Preemption, closing, threads, counters ---------------------------------------------------------------------------

@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("sampling", [{}, dict(temperature=1.0, seed=3)], ids=str)
def test_who_is_put_out_returns_with_the_same_tokens(make, right, tiny_engine, held, sampling):
    engine, prompts = make(blocks=12), [ids(seed, 10) for seed in range(4)]
    engine.load_link.held = engine.save_link.held = held
    for expected in ({"miss"}, {"cpu_hit", "mixed", "gpu_hit"}):
        requests = [engine.submit(prompt, max_tokens=20, offload_after=False, **sampling)[0] for prompt in prompts]
        put_out = engine.counters()["preemptions"]
        assert answered(engine, *requests) == [right(prompt, 20, **sampling) for prompt in prompts]
        assert engine.counters()["preemptions"] > put_out and {request.source for request in requests} <= expected
    assert engine.counters()["swap_ins"] > 0 and damage(engine, tiny_engine) < 1e-4


@pytest.mark.parametrize("broken", [False, True])
def test_what_the_device_lost_of_who_was_put_out_comes_back_from_the_host_and_is_no_hit(make, right, broken):
    engine = make()
    request, = engine.submit(PROMPT, max_tokens=20)
    steps(engine, 8)
    engine.preempt(request)
    full = [(block, engine.pool.prefixes[block]) for block in engine.pool.cached]
    engine.swap_out(full[::-1])
    engine.flush()
    lose(engine)
    engine.load_link.held, engine.load_link.broken = True, broken
    assert answered(engine, request) == [right(PROMPT, 20)]
    assert (request.source, request.cached_tokens) == ("miss", 0)
    counters = engine.counters()
    assert (counters["swap_ins"], counters["transfer_errors"]) == (8, broken)
    assert (counters["gpu_hits"], counters["cpu_hits"], counters["misses"]) == (0, 0, 7)


def test_a_closed_engine_finishes_who_is_being_restored_and_what_is_under_way(make, right, tiny_engine):
    engine = make(max_running=2)
    other, late = on_its_way(engine)
    waiting, = engine.submit(ids(3, 9))
    engine.save_link.held = True
    engine.close()
    assert answered(engine, other, late) == [right(OTHER, 30), right(LATE)]
    assert isinstance(waiting.outcome, Closing) and received(waiting) == [waiting.outcome]
    assert late.source == "cpu_hit" and damage(engine, tiny_engine) < 1e-4


def test_an_engine_that_is_closed_while_blocks_leave_ends_and_the_blocks_arrive(make, right, tiny_engine, monkeypatch):
    engine = make(links.Link)
    closed = gate(monkeypatch)
    tokens, = in_threads(lambda: engine.generate(PROMPT, max_tokens=8).tokens)
    until(lambda: not engine.running)
    assert tokens == right(PROMPT) and engine.counters()["swaps_under_way"] == 8
    engine.close()
    until(lambda: not engine.thread.is_alive())
    assert found(engine, PROMPT) == "dddddd"
    closed.release(100)
    engine.flush()
    engine.check_integrity()
    assert found(engine, PROMPT) == "bbbbbb" and damage(engine, tiny_engine) < 1e-4


def test_who_asks_for_the_counters_sees_what_has_arrived(make):
    engine = make()
    engine.save_link.held = True
    engine.submit(PROMPT, max_tokens=8)
    steps(engine)
    counters = engine.counters()
    assert (counters["swaps_under_way"], counters["cpu_blocks_referenced"], counters["blocks_referenced"]) == (8, 8, 8)
    engine.save_link.arrive()
    counters = engine.counters()
    assert (counters["swaps_under_way"], counters["cpu_blocks_cached"], counters["blocks_cached"]) == (0, 8, 8)
    assert counters["link"] == "held link"


def test_flush_waits_until_nothing_is_on_its_way(make, tiny_engine):
    engine = make()
    engine.flush()
    other, late = on_its_way(engine)
    engine.save_link.held = True
    engine.submit(ids(4, 9), max_tokens=1)
    steps(engine, 2)
    assert {swap.inward for swap in engine.swaps} == {True, False}
    engine.flush()
    engine.check_integrity()
    assert not engine.swaps and not engine.arriving and not engine.leaving
    assert found(engine, LATE) == "bbbbbb" and found(engine, ids(4, 9)) == "bb" and damage(engine, tiny_engine) < 1e-4


def test_several_threads_get_their_own_answers_over_two_tiers(make, right, tiny_engine):
    engine = make(links.Link, blocks=20, cpu_blocks=30, token_budget=16)
    prompts = [ids(1, 12) + ids(seed, 2 * seed) for seed in range(1, 9)]
    expected = [right(prompt, 20) for prompt in prompts]
    for _ in range(2):
        calls = [lambda prompt=prompt: engine.generate(prompt, max_tokens=20).tokens for prompt in prompts]
        assert in_threads(*calls, engine.counters, engine.flush)[:8] == expected
    until(lambda: not engine.running)
    engine.flush()
    engine.check_integrity()
    counters = engine.counters()
    assert counters["finished"] == 16 and counters["swap_outs"] > 0 and damage(engine, tiny_engine) < 1e-4


def test_counters_add_up(make, right):
    engine, size = make(blocks=24, cpu_blocks=30), 3072
    lengths = (0, 9), (0, 26), (1, 30), (1, 17), (2, 25), (0, 26), (3, 31), (1, 30), (1, 8), (2, 40)        # by seed
    prompts = [ids(*prompt) for prompt in lengths]
    requests = []
    for number, prompt in enumerate(prompts):
        requests += engine.submit(prompt, max_tokens=6, n=2 if number == 4 else 1)
        steps(engine)
        engine.flush()
        lose(engine, (0, 0, 1000, 3)[number % 4])
    counters, leaders = engine.counters(), [request for request in requests if request.number == 0]
    assert counters["preemptions"] == 0 and counters["finished"] == 11
    for name in ("gpu_hits", "cpu_hits", "misses"):
        assert counters[name] == sum(request.blocks[name] for request in leaders) > 0
    assert counters["gpu_hits"] + counters["cpu_hits"] + counters["misses"] == sum(-(-len(prompt) // 4) for prompt in prompts)
    assert counters["swap_ins"] == counters["cpu_hits"]
    assert (counters["bytes_in"], counters["bytes_out"]) == (counters["swap_ins"] * size, counters["swap_outs"] * size)
    assert counters["swap_outs"] == counters["cpu_blocks_cached"] + counters["cpu_evictions"]
    assert counters["cached_tokens"] == sum(request.outcome.usage["cached_tokens"] for request in requests)
    assert (counters["cpu_blocks_referenced"], counters["blocks_referenced"], counters["swaps_under_way"]) == (0, 0, 0)
    assert counters["cpu_blocks_free"] + counters["cpu_blocks_cached"] == counters["cpu_blocks"] == 30


def test_the_timeline_of_a_cpu_hit_shows_each_layer_on_its_way_and_no_computing_meanwhile(make, monkeypatch):
    engine, stalls, compute = make(), [], offload.Engine.compute

    def noted(self, work):
        compute(self, work)
        stalls.extend(zip(self.stalls[::2], self.stalls[1::2]))
    monkeypatch.setattr(offload.Engine, "compute", noted)
    ask(engine, PROMPT)
    lose(engine)
    engine.load_link.held = engine.save_link.held = True
    longer = PROMPT + ids(2, 10)
    request, = engine.submit(longer, max_tokens=8)
    steps(engine)
    timeline = request.outcome.timeline
    spans = {lane: [span for span in timeline.spans if span.lane == lane] for lane in ("load", "compute", "save")}
    assert [span.label for span in spans["load"]] == ["layer 0", "layer 1", "layer 2"] and not spans["save"]
    assert all(before.end <= after.start for before, after in zip(spans["load"], spans["load"][1:]))
    assert [span.label for span in spans["compute"]] == ["prefill 12"] * 4 + ["decode"] * 7     # in four parts, and three stalls
    assert len(stalls) == 3
    for (start, end), before, after in zip(stalls, spans["compute"], spans["compute"][1:]):
        assert start <= end and before.end == start - timeline.began and after.start == end - timeline.began
    assert all(span.start <= span.end for lane in spans.values() for span in lane)
    engine.flush()
    saved = [span.label for span in timeline.spans if span.lane == "save"]
    assert len(saved) == engine.counters()["swap_outs"] - 8 == 10 - 6 and all(label.startswith("block ") for label in saved)


def test_over_the_link_the_spans_of_a_cpu_hit_are_in_order(make):
    engine = make(links.Link, bytes_per_second=2e6)
    ask(engine, PROMPT)
    lose(engine)
    timeline = asked(engine, PROMPT + ids(2, 10)).outcome.timeline
    loads = [span for span in timeline.spans if span.lane == "load"]
    assert [span.label for span in loads] == ["layer 0", "layer 1", "layer 2"]
    assert all(before.start < after.start and before.end < after.end for before, after in zip(loads, loads[1:]))
    assert all(span.end - span.start >= 6 * 1024 / 2e6 - 1e-6 for span in loads)               # no faster than the model
    assert any(span.lane == "save" for span in timeline.spans)


# Any order --------------------------------------------------------------------------------------------------------

ACTIONS = ["ask"] * 2 + ["go_on"] * 12 + ["arrive"] * 4 + ["lose"] * 6 + ["hang_up"] * 2 + ["race", "change"] * 2 + ["flush"]


class Traffic(Crowd):
    """The crowd of chapter 02 over two tiers: transfers arrive in any order or fail, and the link gets slow and fast."""
    submit = step = cancel = evict = None                                      # one rule for all, so that no example lacks one

    @initialize(seed=st.uuids())
    def open(self, seed):
        self.requests, self.cancelled, self.seed, self.number = [], [], seed, 0
        rng = random.Random(str(seed))
        self.engine = build(
            self.base, blocks=rng.choice([8, 16, 24, 40]), block_size=rng.choice([1, 2, 4, 4, 4, 16]),
            token_budget=rng.choice([3, 16, 64, 512]), max_running=rng.choice([4, 64]),
            cpu_blocks=rng.choice([64, 64, 64, 24, 5, 1, 0]), overlap=rng.random() < 0.7)
        self.lanes = self.engine.load_link, self.engine.save_link
        for link in self.lanes:
            link.held = rng.random() < 0.7

    @rule(seed=st.uuids())
    def act(self, seed):
        self.number += 1
        rng = random.Random(f"{self.seed} {self.number} {seed}")
        getattr(self, rng.choice(ACTIONS))(rng)

    def ask(self, rng):
        submit, after = self.engine.submit, rng.random() < 0.8
        with mock.patch.object(self.engine, "submit", lambda *prompt, **fields: submit(*prompt, offload_after=after, **fields)):
            Crowd.submit(
                self, text=rng.choice(TEXTS), length=rng.randint(1, rng.choice([16, 24, 70])), new=rng.choice([1, 5, NEW, NEW]),
                n=rng.choice([1, 1, 1, 1, 2, 4]), salt=rng.choice(["", "", "", "a"]), seed=rng.choice([None, None, 0, 1]))

    def go_on(self, rng):
        for _ in range(rng.choice([1, 2, 3, 6])):
            more = self.engine.step()
            self.whole()
            if not more or (self.engine.load_link.under_way() and rng.random() < 0.7):      # let something happen meanwhile
                break

    def hang_up(self, rng):
        alive = [entry for entry in self.requests if entry[0].outcome is None]
        waiting = [entry for entry in alive if entry[0].restoration]
        if alive:                                                              # rather one that waits for the link
            with mock.patch.object(self, "requests", waiting or alive):
                Crowd.cancel(self, rng.randrange(1 << 16), rng.random() < 0.5)

    def arrive(self, rng):
        """Some arrive, in any order; one may fail, now or when somebody waits for it."""
        parcels = [parcel for link in self.lanes for parcel in link.under_way()]
        for parcel in rng.sample(parcels, rng.randint(0, min(6, len(parcels)))):
            parcel.doomed |= rng.random() < 0.3
            if rng.random() < 0.8:
                parcel.arrive()
                happened[f"{parcel.lane} arrived"] += 1

    def lose(self, rng):
        """The device loses some or all that is cached, also from the middle of a chain; the host its oldest."""
        if rng.random() < 0.6:
            self.engine.save_link.arrive()
            self.engine.counters()                                             # sees what has arrived
        cached = list(self.engine.pool.cached)
        if cached and rng.random() < 0.5:
            first = rng.randrange(len(cached))
            cached = cached[first:first + rng.randint(1, 4)]
        for block in cached:
            self.engine.pool.forget(block)
        if self.engine.host.cached and rng.random() < 0.2:
            self.engine.host.evict()
        for _ in range(rng.randint(0, 3)):
            self.ask(rng)
            self.engine.step()
            self.whole()

    def race(self, rng):
        """If there is room for both, one is on its way in while another decodes, and then something happens."""
        link = self.engine.load_link
        self.engine.cost, link.held, link.broken, link.refuses = 0.5, True, False, False
        self.engine.flush()
        for block in list(self.engine.pool.cached):
            self.engine.pool.forget(block)
        Crowd.submit(self, text=rng.choice(TEXTS), length=3, new=NEW, n=1, salt="", seed=None)
        self.engine.step()
        for _ in range(2):
            self.ask(rng)
            self.engine.step()
            self.whole()
        getattr(self, rng.choice(["arrive", "hang_up", "go_on"]))(rng)

    def change(self, rng):
        self.engine.cost = rng.choice([0.5, 2.0])
        for link in self.lanes:
            link.held, link.broken, link.refuses = (rng.random() < share for share in (0.7, 0.15, 0.1))

    def flush(self, rng):
        self.engine.flush()

    @invariant()
    def whole(self):
        self.engine.check_integrity()
        for pool in (self.engine.pool.kv[0, 0], self.engine.host.kv):          # [blocks, ...] each
            free = self.engine.pool.free if pool is not self.engine.host.kv else self.engine.host.free
            if free:
                pool[list(free)] = NAN                                         # nobody may read it
        of_salt = {}
        for request, prompt, salt in self.requests:
            assert all(of_salt.setdefault(block, salt) == salt for block in request.table)
            if request.outcome is not None:
                self.right(request, prompt)
        self.requests = [entry for entry in self.requests if entry[0].outcome is None]

    def right(self, request, prompt):
        super().right(request, prompt)
        if isinstance(request.outcome, baseline.Result):
            happened[request.outcome.source] += 1

    def teardown(self):
        engine = self.engine
        for _ in range(1000):
            if not engine.step():
                break
            self.whole()
        else:
            raise AssertionError("there is always more to do")
        engine.flush()
        super().teardown()
        counters = engine.counters()
        assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size and not engine.swaps
        assert not (counters["swaps_under_way"] or counters["cpu_blocks_referenced"] or engine.arriving or engine.leaving)
        assert damage(engine, self.base) < 1e-4
        happened.update({f"{link.lane} failed": link.failures for link in self.lanes})
        happened.update({name: counters[name] for name in (
            "swap_ins", "swap_outs", "cpu_evictions", "recomputed_hits", "transfer_errors")})


def any_order(base, examples: int):
    """As it comes: making a failure smaller would take minutes. Add Phase.shrink to look into one."""
    Traffic.base = base
    run_state_machine_as_test(Traffic, settings=settings(
        max_examples=examples, stateful_step_count=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))


def test_in_any_order_both_pools_are_whole_and_the_tokens_are_those_of_chapter_01(tiny_engine):
    happened.clear()
    any_order(tiny_engine, 25)
    often = ("answered", "gpu_hit", "cpu_hit", "miss", "preemptions", "evictions", "cpu_evictions", "swap_ins", "swap_outs",
             "transfer_errors", "cancelled")
    assert all(happened[name] >= 5 for name in often), happened
    assert happened["ties"] <= 5, happened


@pytest.mark.parametrize("collision", COLLISIONS)
def test_in_any_order_keys_that_collide_change_no_token(tiny_engine, monkeypatch, collision):
    monkeypatch.setattr(paged, "block_key", COLLISIONS[collision])
    any_order(tiny_engine, 6)


def abandon_and_still_find(engine, swap, plain=offload.Engine.abandon):
    """Not found to be lost: its blocks stay registered."""
    with mock.patch.object(engine.pool, "forget", lambda block: None):
        plain(engine, swap)


def trusted_key(patch):
    patch.setattr(paged, "block_key", COLLISIONS["the last token"])
    patch.setattr(paged.Prefixes, "intern", trust_the_key)


GUARDS = {
    "who goes frees what is on its way in": lambda patch: patch.setattr(offload.Engine, "free", free_at_once),
    "what is on its way out is not held": lambda patch: patch.setattr(offload.Engine, "swap_out", send_without_holding),
    "what is read on the host is not held": lambda patch: patch.setattr(offload.Engine, "swap_in", load_without_holding),
    "a layer is not waited for": lambda patch: patch.setattr(offload.Engine, "tap", paged.Engine.tap),
    "what failed to arrive is still found": lambda patch: patch.setattr(offload.Engine, "abandon", abandon_and_still_find),
    "a key is trusted alone": trusted_key,
}


@pytest.mark.parametrize("guard", GUARDS)
def test_in_some_order_a_missing_guard_is_noticed(tiny_engine, monkeypatch, guard):
    GUARDS[guard](monkeypatch)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        any_order(tiny_engine, 60)
