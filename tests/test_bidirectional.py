"""Chapter 06: where the two pointers meet, which steps and reads are cancelled, and which chunks are kept."""

import random
import time

import numpy
import pytest
import torch

from common.link import Transfer, TransferError
from common.requests import ClientDisconnected, Request
from common.store import StoredChunks
from shell.modelled_link import LATENCY, PIECE, Bandwidth
from shell.workers import Worker
from tests.support import engines
from tests.support.engines import ORACLE, ask, both_ends, check_pools, draw, evict, make, wait_until_idle

CHUNK = both_ends.CHUNK
PROMPT = draw(random.Random(0), 400)  # 6 chunks of 64 tokens, and 16 tokens more
BYTES = 64 * 3 * 2 * 2 * 16 * 4  # bytes of a chunk


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


def engine_for(storage=None, budget: int = 64, memory=1e6, **options):
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

def test_a_chunk_a_step_and_a_chunk_from_storage_meet_in_the_middle():
    engine, cache, storage = engine_for()
    request = submit(engine)
    for computed in (64, 128, 192):
        engine.step()
        assert request.computed == computed and request.restoration.limit == 384 - computed + 64
        storage.deliver()
    engine.step()
    assert [transfer.cancelled for transfer in storage.log] == [False] * 3 + [True] * 3, "reads of chunks that prefill has computed are cancelled"
    finish(engine, storage, request)
    assert request.found == {"storage": 192}
    assert [transfer.label for transfer in storage.log] == [f"chunk {number}" for number in range(5, -1, -1)]
    assert request.timeline.plan["rows"] == [["chunks", "CCCLLL"]]
    assert engine.counts["restored_tokens"] == 192


def test_they_meet_inside_a_chunk_and_inside_a_block():
    engine, cache, storage = engine_for(budget=40)
    request = submit(engine, steps=1)
    storage.deliver(6)
    finish(engine, storage, request)
    assert request.found == {"storage": 344} and request.timeline.plan["rows"] == [["chunks", "BLLLLL"]]


def test_what_arrives_during_a_step_is_taken_at_its_next_layer_and_a_step_that_is_overtaken_is_given_up():
    engine, cache, storage = engine_for()
    request, seen = submit(engine, steps=1), []

    def save_layer(layer, hidden, batch):
        seen.append((layer, request.restoration.limit if request.restoration else None))
        if len(seen) == 1:
            storage.deliver(2)
        if len(seen) == 2:
            storage.deliver(4)

    cache.save_layer, steps = save_layer, engine.counts["steps"]
    engine.step()
    assert seen == [(0, 384), (1, 256)], "the third layer is not computed"
    assert engine.counts["steps"] == steps and request.computed == 384
    finish(engine, storage, request)
    assert request.found == {"storage": 320}


def test_a_step_of_two_requests_is_not_given_up():
    engine, cache, storage = engine_for(budget=96)
    request, other = submit(engine), submit(engine, draw(random.Random(1), 200), steps=1)
    computed = request.computed
    cache.save_layer = lambda *_: storage.deliver(6)
    engine.step()
    assert computed < request.restoration.limit
    assert request.computed == request.restoration.limit
    finish(engine, storage, request, other)
    assert request.found == {"storage": 384 - computed - 64}


def test_what_has_come_stays_when_storage_fails():
    engine, cache, storage = engine_for()
    request = submit(engine, steps=1)
    storage.deliver(2)
    engine.step()
    storage.deliver(1, OSError("missing"))
    finish(engine, storage, request)
    assert request.found == {"storage": 128} and "missing" in request.decisions[-1]
    assert engine.counts["failed_restorations"] == 1


def test_storage_that_hangs_holds_up_nobody_and_its_memory_is_held():
    engine, cache, storage = engine_for()
    engines.until_over(engine, request := submit(engine))
    assert ORACLE.judge(request) == "equal" and not request.found
    engine.step()
    assert engine.busy and sum(cache.staging.references) == 6
    finish(engine, storage, request)


def test_read_ahead_is_bounded_in_bytes():
    storage = engine_for()[2]
    engine, cache, _ = engine_for(storage, memory=2 * BYTES)
    request, storage.log = submit(engine), []
    for read in (2, 3, 4):
        engine.step()
        assert len(storage.log) == read <= 2 + (384 - request.restoration.limit) // CHUNK
        storage.deliver()
    finish(engine, storage, request)
    assert request.found == {"storage": 192}


def test_what_a_late_read_writes_is_read_by_nobody():
    storage = engine_for()[2]
    engine, cache, _ = engine_for(storage, memory=2 * BYTES)
    gone = submit(engine, steps=1)
    late, storage.reads = storage.reads, []
    engine.cancel(gone, ClientDisconnected("gone"))
    engine.step()
    assert late and all(transfer.cancelled for transfer, *_ in late)
    request = submit(engine, steps=1)
    storage.deliver(2)
    for transfer, _, into in late:
        into.fill(-1)  # all bits set: NaN
        transfer.finish(0.0, 0.0)
    finish(engine, storage, request)


# 2. How much of a step -------------------------------------------------------------------------

def slow_prefill(engine, storage, ratio: float):
    """Set speeds so that loading PROMPT takes `ratio` times as long as computing it."""
    engine.lower_tier.estimates.computing.samples.clear()
    engine.lower_tier.estimates.computing.record(1.0, 1.0)
    storage.bandwidth = Bandwidth(6 * BYTES / engine.lower_tier.estimates.seconds_to_compute(0, 384) / ratio)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0, 100.0])
def test_a_step_takes_what_prefill_will_get_if_both_go_on(ratio):
    engine, cache, storage = engine_for(budget=512)
    slow_prefill(engine, storage, ratio)
    request = submit(engine, steps=1)
    share = max(CHUNK, 384 * ratio / (1 + ratio))
    assert request.computed == pytest.approx(384 if share > 320 else share, abs=1)
    finish(engine, storage, request)


def keys_of(cache) -> list[bytes]:
    """Return the storage keys of PROMPT's chunks, in order."""
    return [cache.storage.keys(block_key.digest, 1)[0] for block_key in cache.block_keys.extend([], PROMPT)]


def test_an_estimate_is_that_of_both_ends_and_no_longer_than_computing():
    engine, cache, storage = engine_for()
    alone = None
    for ratio in (0.1, 1.0, 10.0, 1e9):
        slow_prefill(engine, storage, ratio)
        match, alone = cache.match(Request(PROMPT + [7], 1)), engine.lower_tier.estimates.seconds_to_compute(0, 384)
        assert match.tokens == 384
        assert match.seconds == pytest.approx(alone * ratio / (1 + ratio)) and match.seconds <= alone
    del storage.index[keys_of(cache)[0]]  # now the first chunk must be computed, however fast storage is
    slow_prefill(engine, storage, 1e-9)
    match = cache.match(Request(PROMPT + [7], 1))
    assert match.tokens == 384 and match.seconds == engine.lower_tier.estimates.seconds_to_compute(0, 64)


def test_what_is_computed_with_a_share_of_each_step_is_priced_at_that_share():
    engine, cache, storage = engine_for(share=0.1)
    slow_prefill(engine, storage, 8.0)  # loading takes 8 times as long as computing
    engine.lower_tier.estimates.always = False
    request = Request(PROMPT + [7], 1)
    assert not engine.lower_tier.estimates.load_or_compute(request, cache.match(request)), "without other requests it gets the whole step"
    engine.running.append(Request([0], 1))
    match, alone = cache.match(request), engine.lower_tier.estimates.seconds_to_compute(0, 384)
    assert match.seconds == pytest.approx(alone * 8 * 10 / (8 + 10)) and engine.lower_tier.estimates.load_or_compute(request, match)
    cache.share = 0.0  # loading only
    assert cache.match(request).seconds == pytest.approx(8 * alone)
    cache.share, cache.leftover = 0.1, True
    assert cache.match(request).share == 1.0
    engine.running.clear()


def test_a_request_that_only_loads_is_priced_at_the_load_alone():
    engine, cache, storage = engine_for(share=0.0)
    engine.lower_tier.estimates.always, request = False, Request(PROMPT + [7], 1)
    for ratio, loads in (1.8, False), (0.5, True):
        slow_prefill(engine, storage, ratio)
        match, alone = cache.match(request), engine.lower_tier.estimates.seconds_to_compute(0, 384)
        assert match.seconds == pytest.approx(ratio * alone) and bool(engine.lower_tier.estimates.load_or_compute(request, match)) == loads
    del storage.index[keys_of(cache)[0]]  # prefill computes this chunk after loading
    gap = engine.lower_tier.estimates.seconds_to_compute(0, 64)
    for request.computed in 0, 10:
        computed = engine.lower_tier.estimates.seconds_to_compute(0, request.computed)
        assert cache.match(request).seconds == pytest.approx(0.5 * alone * 5 / 6 + gap - computed)


@pytest.mark.parametrize("late", [False, True])
def test_beside_others_prefill_takes_its_share_and_alone_all_also_when_storage_is_late(late):
    engine, cache, storage = engine_for(budget=100, share=0.25)
    storage.bandwidth = Bandwidth(1e-9)  # nothing arrives from storage: prefill takes all that it may
    request = submit(engine, steps=1)
    assert request.computed == 100
    other = submit(engine, draw(random.Random(1), 150), 9, steps=1)
    if late:
        request.restoration.deadline = 0.0
    engine.step()
    assert request.computed == 225 and other.computed == 75
    finish(engine, storage, request, other)


def test_leftover_takes_only_what_others_leave():
    engine, cache, storage = engine_for(budget=64, leftover=True)
    other = submit(engine, draw(random.Random(1), 180), 30, steps=1)
    request = submit(engine, steps=1)
    assert other.computed == 128 and request.computed == 0, "the other request's prefill comes first"
    engine.step()
    assert other.new and request.computed == 64 - 53
    before = request.computed
    engine.step()
    assert request.computed - before == 63, "a request that decodes leaves the rest of the step"
    storage.deliver(3)
    finish(engine, storage, request, other)
    assert request.found["storage"] >= 192


def test_a_share_of_nothing_only_loads_unless_storage_is_late():
    engine, cache, storage = engine_for(share=0.0)
    for late in False, True:
        request = submit(engine, steps=3)
        assert request.computed == 0
        request.restoration.deadline *= not late
        storage.deliver(6 * (not late))
        engine.step()
        assert request.computed > 0
        finish(engine, storage, request)
        assert late or request.found == {"storage": 384} and request.timeline.plan["rows"] == [["chunks", "LLLLLL"]]
        evict(engine)


# 3. Saving -------------------------------------------------------------------------------------

def found(engine, tokens, wait=True, **options) -> int:
    if wait:
        wait_until_idle(engine)
    match = engine.lower_tier.cache.match(Request(list(tokens), 1, options=options))
    return match.tokens if match else 0


def test_full_chunks_are_kept_once_and_the_last_token_is_computed():
    engine, cache, storage = engine_for()
    assert len(storage.index) == 6 and found(engine, PROMPT) == 384
    request = submit(engine, PROMPT, 60)  # 400 + 60 tokens: one more chunk
    finish(engine, storage, request)
    assert found(engine, request.tokens) == 448
    assert len(storage.index) == 7
    assert found(engine, PROMPT[:384]) == 383 and found(engine, PROMPT[:383]) == 320
    assert found(engine, PROMPT, cache_salt="b") == 0


def test_what_storage_lacks_in_front_is_computed_and_the_longest_run_is_loaded():
    engine, cache, storage = engine_for()
    keys = keys_of(cache)
    cases = ([0, 1], 384, 256), ([2], 384, 192), ([4], 256, 256), ([0, 2, 5], 320, 128)
    for lacking, tokens, loaded in cases:
        kept = dict(storage.index)
        for number in lacking:
            del storage.index[keys[number]]
        assert found(engine, PROMPT) == tokens
        request = submit(engine, steps=1)
        storage.deliver(6)
        finish(engine, storage, request)
        assert request.found["storage"] in (loaded, loaded - 64 * (0 not in lacking))
        evict(engine)
        storage.index = kept


def test_without_a_place_saving_waits_for_the_next_step_and_chunks_that_never_find_one_are_counted():
    engine, cache, storage = engine_for()
    places, other = cache.staging.allocate(cache.staging.available), draw(random.Random(5), 150)
    before = engine.counts["drops"]
    request = submit(engine, other, 20, steps=4)
    assert found(engine, other, wait=False) == 0 and request.new
    cache.staging.release(places)
    finish(engine, storage, request)
    assert found(engine, other) == 128
    cache.staging.allocate(cache.staging.available)
    ask(engine, draw(random.Random(6), 150), 1)
    assert engine.counts["drops"] - before == 2
    del storage.index[next(iter(storage.index))]
    ask(engine, [*PROMPT, 7], 1)
    assert engine.counts["drops"] - before == 3, "storage still has the other five chunks"


def test_a_chunk_on_its_way_to_storage_is_not_sent_again():
    engine, cache, storage = engine_for()
    written, before = Transfer("save", "chunk"), engine.counts["bytes_out"]
    storage.set = lambda keys, values: written
    for _ in range(2):  # the second request finds the chunks on the device
        ask(engine, draw(random.Random(5), 150), 1)
    assert engine.counts["bytes_out"] - before == 2 * BYTES
    written.finish(0.0, 0.0)
    wait_until_idle(engine)
    assert not cache.saving


def test_modelled_storage_forgets_the_least_recently_used():
    storage, value = both_ends.ModelledStorage(3 * 8, 1e12), numpy.zeros(8, "u1")
    storage.write([b"1", b"2", b"3"], [value] * 3)
    storage.read([b"1"], [value])
    storage.write([b"4"], [value])
    assert [storage.has([key]) for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    with pytest.raises(KeyError):
        storage.read([b"2"], [value])


# 4. Eight bits ---------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bits_are_within_half_a_step_of_what_was(dtype):
    kv = torch.randn(3, 2, 64, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    kv[0, 0, 0] = 0
    kv[0, 1, 0, 0, 0] = 3e4
    numbers, scales = both_ends.quantize(kv)
    error = (numbers.float() * scales.float() - kv.float()).abs()
    assert numbers.dtype == torch.int8 and scales.dtype == torch.float16
    assert (error <= 0.51 * scales.float() + 127 * scales.float() * 2**-11).all()
    assert not error[0, 0, 0].any()


def test_8_bit_chunks_are_smaller_close_to_what_was_computed_and_not_found_by_the_exact_name():
    storage = Storage()
    engine, cache, _ = engine_for(storage, bits=8, share=0.0)
    assert cache.chunk_bytes == BYTES // 4 * 18 // 16
    request = submit(engine, PROMPT, 80, steps=1)
    storage.deliver(6)
    engines.until_over(engine, request)
    assert request.found == {"storage": 384} and found(engine, request.tokens) == 448
    exact = make(both_ends.BidirectionalCache(StoredChunks(storage)), 96)
    assert found(exact, request.tokens) == 0
    ask(exact, PROMPT, 1)
    assert found(exact, request.tokens) == 384 and found(engine, request.tokens) == 448
    ours, theirs = (each.pool.memory[:, :, each.pool.find(each.block_keys.extend([], PROMPT))[:24]] for each in (engine, exact))
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
    trace.began = time.perf_counter() - 0.5e-3
    trace.seconds = 60.0
    assert trace.value == 100.0
    trace.began -= 60.0
    assert trace.value == 10.0


def test_reads_are_charged_back_to_back_and_those_that_were_called_off_neither_charged_nor_done():
    storage, value = both_ends.ModelledStorage(1e9, 1.0), numpy.ones(8000, "u1")  # 1 byte/s: a read takes hours
    storage.open(Worker, {})
    storage.write([b"1"], [value])
    places = [numpy.zeros_like(value) for _ in range(4)]
    reads = [storage.get([b"1"], [place]) for place in places]
    reads[2].cancel()
    storage.close()  # pending reads complete now
    assert [place.any() for place in places] == [True, True, False, True] and "cancelled" in str(reads[2].error)
    spans, each = [read.span() for read in reads], LATENCY + PIECE + 8000
    for (start, end), seconds in zip(spans, [each, each, 0, each]):
        assert end - start == pytest.approx(seconds, abs=1e-6)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
