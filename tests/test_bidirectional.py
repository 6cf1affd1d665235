"""Chapter 06: where the two pointers meet, which steps and reads are cancelled, and which chunks are kept."""

import random
import time

import numpy
import pytest
import torch

from common.link import Transfer, TransferError
from common.requests import Request
from shell.chunks import StoredChunks
from shell.modelled_link import LATENCY, PIECE, Bandwidth
from tests.support import engines
from tests.support.engines import ORACLE, ask, both_ends, check_pools, draw, evict, make, wait_until_idle

CHUNK = both_ends.CHUNK
SIX = 6 * CHUNK
PROMPT = draw(random.Random(0), SIX + 16)  # six chunks, and 16 tokens more
BYTES = CHUNK * 3 * 2 * 2 * 16 * 4  # bytes of a chunk


class Storage(both_ends.ModelledStorage):
    """A storage whose reads complete only when a test calls `deliver`."""

    def __init__(self):
        super().__init__(1e9, 1e15)  # bytes/s: so fast that a step computes only one chunk
        self.reads, self.log = [], []

    def get(self, keys, into, label=""):
        self.reads.append((Transfer("storage", label, into[0].nbytes), self.index[keys[0]], into[0]))
        self.log.append(self.reads[-1][0])
        return self.reads[-1][0]

    def set(self, keys, values):
        self.write(keys, values)
        written = Transfer("save", "chunk")
        written.finish(0.0, 0.0)
        return written

    def deliver(self, count: int = 1, error: Exception | None = None):
        """Complete the `count` oldest reads that are not cancelled, with `error` if it is given."""
        while count and self.reads:
            transfer, found, into = self.reads.pop(0)
            if transfer.cancelled:
                transfer.finish(0.0, 0.0, TransferError("cancelled"))
                continue
            if error is None:
                into[:] = found
            transfer.finish(time.perf_counter(), time.perf_counter(), error)
            count -= 1


def engine_for(storage=None, budget: int = CHUNK, memory=1e6, **options):
    """Return (engine, its cache, its storage).

    The storage holds the chunks of PROMPT; the device holds none of them."""
    storage = storage or Storage()
    cache = both_ends.BidirectionalCache(StoredChunks(storage), memory=memory, **options)
    engine = make(cache, 96, token_budget=budget)
    ask(engine, PROMPT, 1)
    storage.deliver(99)
    evict(engine)
    return engine, cache, storage


def submit(engine, prompt=PROMPT, new: int = 4, steps: int = 0) -> Request:
    engines.submit(engine, request := Request(list(prompt) + [7], new), steps=steps)
    return request


def finish(engine, storage, *requests):
    engines.until_over(engine, *requests)
    assert all(ORACLE.judge(request) == "equal" for request in requests)
    storage.deliver(99)
    check_pools(engine)


# 1. Two pointers -------------------------------------------------------------------------------

def test_prefill_and_storage_meet_in_the_middle():
    engine, cache, storage = engine_for()
    request = submit(engine)
    for computed in (CHUNK, 2 * CHUNK, 3 * CHUNK):
        engine.step()
        assert request.computed == computed
        storage.deliver()
    engine.step()
    assert [transfer.cancelled for transfer in storage.log] == [False] * 3 + [True] * 3, "reads of chunks that prefill has computed are cancelled"
    finish(engine, storage, request)
    assert request.found == {"storage": 3 * CHUNK} and engine.counts["restored_tokens"] == 3 * CHUNK
    assert [transfer.label for transfer in storage.log] == [f"chunk {number}" for number in range(5, -1, -1)]
    assert request.timeline.plan["rows"] == [["chunks", "CCCLLL"]]


def test_prefill_and_storage_meet_inside_a_block():
    engine, cache, storage = engine_for(budget=CHUNK - 12)
    request = submit(engine, steps=1)
    storage.deliver(6)
    finish(engine, storage, request)
    assert request.found == {"storage": SIX - (CHUNK - 12)} and request.timeline.plan["rows"] == [["chunks", "BLLLLL"]]


@pytest.mark.parametrize("beside", [False, True])
def test_chunks_that_arrive_during_a_step_end_it_unless_it_has_another_request(beside):
    engine, cache, storage = engine_for(budget=CHUNK + 32 if beside else CHUNK)
    request, others, layers = submit(engine), [submit(engine, draw(random.Random(1), 200)) for _ in range(beside)], []
    engine.step()
    computed, steps = request.computed, engine.counts["steps"]
    cache.save_layer = lambda layer, *_: (storage.deliver(6), layers.append(layer))
    engine.step()
    assert layers == ([0, 1, 2] if beside else [0]) and engine.counts["steps"] - steps == beside
    assert request.computed == (request.restoration.limit if beside else SIX)
    finish(engine, storage, request, *others)
    assert request.found == {"storage": SIX - computed - CHUNK * beside}


def test_chunks_that_have_arrived_stay_when_storage_fails():
    engine, cache, storage = engine_for()
    request = submit(engine, steps=1)
    storage.deliver(2)
    engine.step()
    storage.deliver(1, OSError("missing"))
    finish(engine, storage, request)
    assert request.found == {"storage": 2 * CHUNK} and "missing" in request.decisions[-1]
    assert engine.counts["failed_restorations"] == 1


def test_read_ahead_is_limited_in_bytes():
    storage = engine_for()[2]
    engine, cache, _ = engine_for(storage, memory=2 * BYTES)
    request, storage.log = submit(engine), []
    for read in (2, 3, 4):
        engine.step()
        assert len(storage.log) == read <= 2 + (SIX - request.restoration.limit) // CHUNK
        storage.deliver()
    finish(engine, storage, request)
    assert request.found == {"storage": 3 * CHUNK}


# 2. How much of a step -------------------------------------------------------------------------

def slow_prefill(engine, storage, ratio: float):
    """Set speeds so that loading PROMPT takes `ratio` times as long as computing it."""
    engine.lower_tier.estimates.computing.samples.clear()
    engine.lower_tier.estimates.computing.record(1.0, 1.0)
    storage.bandwidth = Bandwidth(6 * BYTES / engine.lower_tier.estimates.seconds_to_compute(0, SIX) / ratio)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0, 100.0])
def test_a_step_computes_up_to_the_predicted_meeting_point(ratio):
    engine, cache, storage = engine_for(budget=512)
    slow_prefill(engine, storage, ratio)
    request = submit(engine, steps=1)
    share = max(CHUNK, SIX * ratio / (1 + ratio))
    assert request.computed == pytest.approx(SIX if share > 5 * CHUNK else share, abs=1)
    finish(engine, storage, request)


def keys_of(cache) -> list[bytes]:
    """Return the storage keys of PROMPT's chunks, in order."""
    return [block_key.digest for block_key in cache.block_keys.extend([], PROMPT)]


def test_a_match_is_priced_for_prefill_and_storage_together():
    engine, cache, storage = engine_for()
    estimates, request = engine.lower_tier.estimates, Request(PROMPT + [7], 1)
    estimates.always = False

    def price(ratio: float) -> tuple[float, bool]:
        """Return (seconds as a share of computing, whether loading pays)."""
        slow_prefill(engine, storage, ratio)
        match = cache.match(request)
        return pytest.approx(match.seconds / estimates.seconds_to_compute(0, SIX)), bool(estimates.load_or_compute(request, match))

    assert [price(ratio) for ratio in (0.1, 1.0, 10.0)] == [(1 / 11, True), (1 / 2, True), (10 / 11, False)]
    cache.share = 0.1
    assert price(8.0) == (8 / 9, False), "without other requests prefill gets the whole step"
    engine.running.append(Request([0], 1))
    assert price(8.0) == (8 * 10 / (8 + 10), True), "computing, too, gets only this share"
    cache.leftover = True
    assert cache.match(request).share == 1.0
    engine.running.clear()
    cache.share, cache.leftover = 0.0, False  # loading only
    assert [price(ratio) for ratio in (1.8, 0.5)] == [(1.8, False), (0.5, True)]


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_match_includes_the_seconds_of_a_missing_first_chunk(share):
    engine, cache, storage = engine_for(share=share)
    estimates, request = engine.lower_tier.estimates, Request(PROMPT + [7], 1)
    slow_prefill(engine, storage, 0.5 if share == 0 else 1e-9)
    del storage.index[keys_of(cache)[0]]
    loading = (1 - share) * 0.5 * 5 / 6 * estimates.seconds_to_compute(0, SIX)
    for request.computed in 0, 10 * (share == 0):
        gap = estimates.seconds_to_compute(0, CHUNK) - estimates.seconds_to_compute(0, request.computed)
        assert cache.match(request).seconds == pytest.approx(loading + gap)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.0])
def test_prefill_takes_its_share_beside_others_and_all_of_a_step_alone(share, late):
    engine, cache, storage = engine_for(budget=52, share=share)
    storage.bandwidth = Bandwidth(1e-9)  # nothing arrives from storage: prefill takes all that it may
    request = submit(engine, steps=1)
    assert request.computed == (52 if share else 0)
    other = submit(engine, draw(random.Random(1), 75), 9, steps=1)
    if late:
        request.restoration.deadline = 0.0
    engine.step()
    assert (request.computed, other.computed) == ((117, 39) if share else ((52, 52) if late else (0, 76)))
    storage.deliver(6 * (not share and not late))
    finish(engine, storage, request, other)
    assert share or late or request.found == {"storage": SIX} and request.timeline.plan["rows"] == [["chunks", "LLLLLL"]]


def test_leftover_takes_only_the_rest_of_a_step():
    engine, cache, storage = engine_for(budget=CHUNK, leftover=True)
    other = submit(engine, draw(random.Random(1), 3 * CHUNK - 12), 30, steps=1)
    request = submit(engine, steps=1)
    assert other.computed == 2 * CHUNK and request.computed == 0, "the other request's prefill comes first"
    engine.step()
    assert other.new and request.computed == 11
    before = request.computed
    engine.step()
    assert request.computed - before == CHUNK - 1, "a request that decodes leaves the rest of the step"
    storage.deliver(3)
    finish(engine, storage, request, other)
    assert request.found["storage"] >= 3 * CHUNK


# 3. Saving -------------------------------------------------------------------------------------

def found(engine, tokens, wait=True, **options) -> int:
    if wait:
        wait_until_idle(engine)
    match = engine.lower_tier.cache.match(Request(list(tokens), 1, options=options))
    return match.tokens if match else 0


def test_full_chunks_are_stored_once_and_the_last_token_is_computed():
    engine, cache, storage = engine_for()
    assert len(storage.index) == 6 and found(engine, PROMPT) == SIX
    request = submit(engine, PROMPT, CHUNK - 4)  # one more chunk
    finish(engine, storage, request)
    assert found(engine, request.tokens) == 7 * CHUNK
    assert len(storage.index) == 7
    assert found(engine, PROMPT[:SIX]) == SIX - 1 and found(engine, PROMPT[: SIX - 1]) == 5 * CHUNK
    assert found(engine, PROMPT, cache_salt="b") == 0


def test_the_longest_run_of_stored_chunks_is_loaded():
    engine, cache, storage = engine_for()
    keys = keys_of(cache)
    cases = ([0, 1], 6, 4), ([2], 6, 3), ([4], 4, 4), ([0, 2, 5], 5, 2)
    for lacking, end, loaded in cases:
        kept = dict(storage.index)
        for number in lacking:
            del storage.index[keys[number]]
        assert found(engine, PROMPT) == end * CHUNK
        request = submit(engine, steps=1)
        storage.deliver(6)
        finish(engine, storage, request)
        assert request.found["storage"] / CHUNK in (loaded, loaded - (0 not in lacking))
        evict(engine)
        storage.index = kept


def test_a_chunk_without_a_staging_buffer_is_saved_later_or_counted():
    engine, cache, storage = engine_for()
    places, other = cache.staging.allocate(cache.staging.available), draw(random.Random(5), 2 * CHUNK + 22)
    before = engine.counts["drops"]
    request = submit(engine, other, 8, steps=4)
    assert found(engine, other, wait=False) == 0 and request.new
    cache.staging.release(places)
    finish(engine, storage, request)
    assert found(engine, other) == 2 * CHUNK
    cache.staging.allocate(cache.staging.available)
    ask(engine, draw(random.Random(6), 2 * CHUNK + 22), 1)
    assert engine.counts["drops"] - before == engine.counts["writes_dropped"] == 2
    del storage.index[next(iter(storage.index))]
    ask(engine, [*PROMPT, 7], 1)
    assert engine.counts["drops"] - before == engine.counts["writes_dropped"] == 3, "storage still has the other five chunks"


def test_a_chunk_that_is_being_written_is_not_written_again():
    engine, cache, storage = engine_for()
    written, before = Transfer("save", "chunk"), engine.counts["bytes_out"]
    storage.set = lambda keys, values: written
    for _ in range(2):  # the second request finds the chunks on the device
        ask(engine, draw(random.Random(5), 2 * CHUNK + 22), 1)
    assert engine.counts["bytes_out"] - before == 2 * BYTES
    written.finish(0.0, 0.0)
    wait_until_idle(engine)
    assert not cache.saving


def test_modelled_storage_evicts_the_least_recently_used_value():
    storage, value = both_ends.ModelledStorage(3 * 8, 1e12), numpy.zeros(8, "u1")
    storage.write([b"1", b"2", b"3"], [value] * 3)
    storage.read([b"1"], [value])
    storage.write([b"4"], [value])
    assert [storage.has([key]) for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    with pytest.raises(KeyError):
        storage.read([b"2"], [value])


# 4. Eight bits ---------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bits_are_within_half_a_step_of_the_value(dtype):
    kv = torch.randn(3, 2, CHUNK, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    kv[0, 0, 0] = 0
    kv[0, 1, 0, 0, 0] = 3e4
    numbers, scales = both_ends.quantize(kv)
    error = (numbers.float() * scales.float() - kv.float()).abs()
    assert numbers.dtype == torch.int8 and scales.dtype == torch.float16
    assert (error <= 0.51 * scales.float() + 127 * scales.float() * 2**-11).all()
    assert not error[0, 0, 0].any()


def test_8_bit_chunks_are_smaller_and_have_keys_of_their_own():
    storage = Storage()
    engine, cache, _ = engine_for(storage, bits=8, share=0.0)
    assert cache.chunk_bytes == BYTES // 4 * 18 // 16
    request = submit(engine, PROMPT, CHUNK, steps=1)
    storage.deliver(6)
    engines.until_over(engine, request)
    assert request.found == {"storage": SIX} and found(engine, request.tokens) == 7 * CHUNK
    exact = make(both_ends.BidirectionalCache(StoredChunks(storage)), 96)
    assert found(exact, request.tokens) == 0
    ask(exact, PROMPT, 1)
    assert found(exact, request.tokens) == SIX and found(engine, request.tokens) == 7 * CHUNK
    ours, theirs = (each.pool.memory[:, :, each.pool.find(each.block_keys.extend([], PROMPT))[: SIX // 16]] for each in (engine, exact))
    largest = theirs.abs().amax(-1, keepdim=True)
    assert ((ours - theirs).abs() <= 0.01 * largest + 1e-6).all() and not torch.equal(ours, theirs)


# 5. Modelled speeds ----------------------------------------------------------------------------

def test_a_trace_changes_its_speed_in_the_middle_of_a_read():
    trace = Bandwidth(100.0, 10.0, seconds=1.0)
    trace.began = 0.0
    cases = (0, 50, 0.5), (0, 105, 1.5), (0, 150, 2.4), (1.5, 5, 2.0), (0.9, 10 + 10 + 7, 2.07)
    for start, size, arrival in cases:
        assert trace.arrival(start - LATENCY, size) == pytest.approx(arrival)
    assert trace.arrival(0, 11_000) == pytest.approx(200, rel=1e-3), "100 times through both speeds"
    slow = Bandwidth(10.0)
    assert slow.arrival(1.0, 20) == pytest.approx(3.0, rel=1e-4)
    for model in trace, slow:
        later = model.arrival(0.25, 5, pieces=1000) - model.arrival(0.25, 5)
        assert later == pytest.approx(1000 * PIECE, rel=1e-4), "the time for pieces does not depend on the bandwidth"
