"""Chapter 02: prefixes, blocks, batches, and the order in which requests are computed."""

import gc
import hashlib
import random
import struct
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from common import prefixes as block_keys_module
from common.cache import Cache
from common.requests import BadRequest, ClientDisconnected, Request
from shell import charts, limits
from tests.support import engines
from tests.support.engines import ask, baseline, check_pools, draw, make, paged, tiny_model, until_over


def assert_equal(requests):
    assert [engines.ORACLE.judge(request) for request in requests] == ["equal"] * len(requests)


# 1. Prefixes -----------------------------------------------------------------------------------

def test_equal_prefixes_have_the_same_keys():
    block_keys = paged.BlockKeys("model", 4)
    once = block_keys.extend([], list(range(18)))
    piecewise = block_keys.extend(block_keys.extend([], list(range(9))), list(range(18)))
    other = block_keys.extend([], [*range(8), 0, 0, 0, 0])
    assert len(once) == 4 and all(one is two for one, two in zip(once, piecewise, strict=True))
    assert other[1] is once[1] and other[2] is not once[2]
    assert block_keys.extend([], [4, 5, 6, 7])[0] is not once[1], "the same tokens after other tokens have another key"
    assert block_keys.extend([], [1, 2, 3]) == []


def test_a_key_hashes_its_parents_key_and_its_tokens():
    sha = lambda content: hashlib.sha256(content).digest()  # noqa: E731
    first, second = paged.BlockKeys("model", 2).extend([], [7, 300, 1, 2], "salt")
    root = sha(sha(b"model") + b"salt")
    assert first.digest == sha(root + struct.pack("<2i", 7, 300))
    assert second.digest == sha(first.digest + b"\1\0\0\0\2\0\0\0") and second.parent is first
    same, again, other = (make(model=tiny_model(seed)).block_keys.extend([], [5] * 16)[0].digest for seed in (0, 0, 1))
    assert same == again != other, "the namespace is the weights"


def test_a_hash_collision_changes_no_token(monkeypatch):
    same = lambda content: SimpleNamespace(digest=lambda: b"\0" * 32)  # noqa: E731
    monkeypatch.setattr(block_keys_module, "hashlib", SimpleNamespace(sha256=same))
    engine, rng = make(), random.Random(0)
    first, other = draw(rng, 50), draw(rng, 50)
    asked = [ask(engine, first), ask(engine, other), ask(engine, first)]
    assert [request.cached_tokens for request in asked] == [0, 0, 48]
    assert len({block_key.digest for request in asked for block_key in request.chain}) == 1
    assert_equal(asked)


def test_unused_keys_are_freed():
    block_keys = paged.BlockKeys("model", 4)
    chain = block_keys.extend([], list(range(40)))
    assert len(block_keys.known) == 10
    del chain[3:]
    gc.collect()
    assert len(block_keys.known) == 3


# 2. Blocks -------------------------------------------------------------------------------------

PREFIXES = paged.BlockKeys("model", 1)


def chain_of(blocks: int, first: int = 0):
    return PREFIXES.extend([], list(range(first, first + blocks)))


def test_a_table_begins_in_a_run_with_room_to_grow():
    pool = paged.BlockPool(16, 1)
    first, second = pool.allocate(2, room=6), pool.allocate(2, room=6)
    assert (first, second) == ([0, 1], [6, 7])
    assert pool.allocate(4, after=1) == [2, 3, 4, 5], "the second table left room for the first to grow"
    assert pool.allocate(3, room=20) == [8, 9, 10], "no run of free blocks has so much room, so any run that is long enough is used"


def test_on_evict_runs_before_a_block_is_reused():
    pool, said, chain = paged.BlockPool(4, 1), [], chain_of(4)
    for block, block_key in zip(blocks := pool.allocate(4), chain):
        pool.register(block, block_key)
    pool.use(chain)
    pool.release(blocks)
    pool.on_evict = lambda lost: said.append((lost, pool.find(chain), pool.free.count(1)))
    assert sorted(pool.allocate(2)) == blocks[2:] and pool.evictions == 2
    assert said == [([(3, chain[3]), (2, chain[2])], blocks[:2], 0)]


@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_each_block_is_free_cached_or_referenced(seed):
    rng, pool, held = random.Random(seed), paged.BlockPool(12, 1), []
    chains = [chain_of(5, 20 * number) for number in range(4)]
    seen = Counter()
    pool.on_evict = lambda lost: seen.update(evicted=len(lost))
    for _ in range(400):
        chain = rng.choice(chains)
        if rng.random() < 0.5 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif (hits := pool.find(chain)) and rng.random() < 0.5:
            pool.share(hits)
            held.append(hits)
            seen["found"] += 1
        elif (count := rng.randrange(1, 5)) <= pool.available:
            blocks = pool.allocate(count, rng.choice([None, *range(12)]), rng.randrange(8))
            for block, block_key in zip(blocks, chain):
                pool.register(block, block_key)
            pool.use(chain)
            held.append(blocks)
        counts = [sum(table.count(block) for table in held) for block in range(12)]
        assert pool.references == counts
        for block in range(12):
            assert [pool.free[block], block in pool.cached, counts[block] > 0].count(True) == 1
        assert all(pool.key_of[block] is block_key for block_key, block in pool.block_of.items())
        assert len(pool.block_of) == 12 - pool.key_of.count(None)
    assert seen["evicted"] and seen["found"]


# 3. The engine ---------------------------------------------------------------------------------

class Watched(paged.Runner):
    """Records the work of each step: (request id, number of tokens) for each request."""

    def forward(self, work, before_layer):
        steps = self.__dict__.setdefault("steps", [])
        steps.append([(request.id, count) for request, count in work])
        return super().forward(work, before_layer)


def watched(blocks: int = 64, size: int = 16, **options):
    return make(runner=Watched(tiny_model(), blocks, size), **options)


def test_a_step_uploads_its_indices_in_one_tensor(monkeypatch):
    engine, rng, made = watched(token_budget=64), random.Random(6), []
    for name in "tensor", "as_tensor":
        made.append(Mock(side_effect=getattr(torch, name)))
        monkeypatch.setattr(torch, name, made[-1])
    engine.generate([Request(draw(rng, length), 9) for length in (5, 40, 90, 130)])
    assert sum(counted.call_count for counted in made) == len(engine.runner.steps) >= 9


@pytest.mark.parametrize("start, count", [(39, 1), (20, 20), (0, 40)])
def test_scattered_blocks_are_read_at_the_width_of_their_mask(start, count):
    engine, request = make(None, 8), Request(draw(random.Random(7), 40), 4)
    request.table, request.next = [5, 1, 3], start
    (_, slots, mask), = paged.Batch(engine.pool, [(request, count)], same_bits=True).reads
    written = [*range(80, 96), *range(16, 32), *range(48, 56)]
    assert slots.tolist() == written + [80] * 24 and mask.shape[-1] == 64, "40 keys are padded to 64, without another copy"


def test_a_last_block_that_must_be_computed_delays_no_request():
    engine = make(None, 64)
    prompt = draw(random.Random(3), 32)  # two full blocks; the second has the last token, so it must be computed
    ask(engine, prompt)
    asked = [Request(prompt, 2) for _ in range(3)]
    engines.submit(engine, *asked, steps=1)
    assert engine.running == asked
    engine.generate([Request(draw(random.Random(4), 16), 2)])
    assert_equal(asked)


def test_decoding_requests_go_first_and_prefill_gets_the_rest_of_the_budget():
    engine, rng = watched(token_budget=16), random.Random(5)
    decoding = [Request(draw(rng, 4), 30) for _ in range(3)]
    engines.submit(engine, *decoding, steps=1)
    late = [Request(draw(rng, 20), 3) for _ in range(2)]
    engines.submit(engine, *late, steps=5)
    counts, ones = engine.runner.steps, [(1, 1), (2, 1), (3, 1)]
    assert counts[1:3] == [[*ones, (4, 13)], [*ones, (4, 7), (5, 6)]], "the oldest first: 13 of its 20 tokens, then 7 and 6 of the next"
    assert counts[3] == [*ones, (4, 1), (5, 12)]
    until_over(engine, *decoding, *late)
    assert_equal(decoding + late)
    engine.generate(newer := [Request(draw(rng, 60), 3), Request([7], 6)])
    assert engine.runner.steps[-6:-2] == [[(7, 1), (6, 15)]] * 4, "a newer request of one token goes before an older one's prefill"
    assert_equal(newer)


@pytest.mark.parametrize("both", [(1 << 20, 4 << 20), (1 << 13, 1 << 14), (0, 0)])  # bytes: one group, several, none
def test_requests_start_in_their_order_and_at_most_max_running_run(both, monkeypatch):
    monkeypatch.setattr(limits, "pad_limits", lambda _: both)
    engine, rng = watched(8, max_running=3, token_budget=64), random.Random(6)
    asked = [Request(draw(rng, rng.randrange(2, 60)), rng.randrange(2, 9)) for _ in range(10)]
    engine.generate(asked)
    assert max(map(len, engine.runner.steps)) <= 3
    first = dict.fromkeys(who for step in engine.runner.steps for who, _ in step)  # ids in the order of their first steps
    assert list(first) == list(range(1, 11))
    assert_equal(asked)


@pytest.mark.parametrize("length, found", [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_a_hit_ends_at_a_block_and_the_last_token_is_computed(length, found):
    engine, prompt = watched(), draw(random.Random(length), length)
    ask(engine, prompt, 1)
    again = ask(engine, prompt, 1)
    assert again.cached_tokens == found and again.found == ({"gpu": found} if found else {})
    assert engine.runner.steps[-1] == [(2, length - found)]
    assert_equal([again])


def test_blocks_of_an_answer_go_after_what_was_used_before():
    engine, rng = make(blocks=6), random.Random(8)
    ask(engine, draw(rng, 33), 1)
    newer = ask(engine, draw(rng, 17), 16)
    assert engine.pool.make_room(4) == 4 and len(engine.pool.find(newer.chain)) == 2
    assert engine.pool.make_room(5) == 5 and len(engine.pool.find(newer.chain)) == 1, "the tail of a chain goes before its head"


@pytest.mark.parametrize("shared, waits", [(3, False), (4, True)])
def test_a_request_waits_for_blocks_that_another_one_computes(shared, waits):
    rng, engine = random.Random(0), make(token_budget=16)
    prompt = draw(rng, 97)
    first, second = (Request(prompt[: 16 * count] + draw(rng, 97 - 16 * count), 2) for count in (6, shared))
    for request in first, second:  # the first block is computed, and `shared` - 1 of the other five are being computed
        engines.submit(engine, request, steps=1)
    assert (second in engine.waiting) == waits
    until_over(engine, second)
    assert_equal([first, second])


def test_preemption_takes_the_newest_request_and_keeps_its_samples():
    engine, rng, came = make(Cache(), blocks=14), random.Random(10), []
    engine.lower_tier.cache.submitted = lambda request: came.append(request.id)
    options = [dict(temperature=1.0, seed=number, top_p=0.9) for number in range(6)]
    prompts = [draw(rng, 40) for _ in options]
    asked = [Request(list(prompt), 50, **one) for prompt, one in zip(prompts, options)]
    engine.generate(asked)
    alone = [Request(list(prompt), 50, **one) for prompt, one in zip(prompts, options)]
    baseline.Engine(tiny_model()).generate(alone)
    assert [request.new for request in asked] == [request.new for request in alone]
    assert engine.counts["preemptions"] == len(came) - 6 > 0 and came.count(1) == 1
    assert not any(request.found for request in asked), "blocks that a request has computed itself are no hit"
    check_pools(engine)
    (again,) = engine.generate([Request(list(prompts[-1]), 50, **options[-1])])
    assert again.new == alone[-1].new and again.found == {"gpu": 32}, "a hit keeps the samples, too"


def test_a_missing_block_preempts_one_request_even_if_a_copy_holds_its_blocks():
    engine, rng = make(blocks=11), random.Random(11)
    asked = [Request(draw(rng, length), 20) for length in (47, 47, 40)]
    engines.submit(engine, *asked, steps=1)
    held, spare = list(asked[2].table), engine.pool.allocate(engine.pool.available)
    engine.pool.share(held)  # as a copy does it
    engine.step()
    engine.step()
    assert engine.counts["preemptions"] == 1 and asked[1] in engine.running and len(asked[0].tokens) == 49
    engine.pool.release(held + spare)
    until_over(engine, *asked)
    assert_equal(asked)


@pytest.mark.parametrize("prompt, most, written", [(100, 30, 29), (100, 29, 29), (128, 10**6, 1), (20, 3, 3)])
def test_an_answer_ends_at_the_end_of_the_pool(prompt, most, written):
    request = ask(make(blocks=8), draw(random.Random(prompt), prompt), most)  # the last token needs no slot
    assert (len(request.new), request.finish_reason) == (written, "length")


def test_an_error_of_one_request_is_raised_and_other_requests_continue():
    engine, rng = make(Cache(), blocks=8), random.Random(12)
    with pytest.raises(BadRequest, match="do not fit into a pool of 128 tokens"):
        engine.generate([Request(draw(rng, 129), 1)])
    kept, lost = Request(draw(rng, 20), 5), Request(draw(rng, 20), 5)
    engine.lower_tier.cache.save = lambda batch: engine.cancel(lost, ClientDisconnected("gone"))  # cancels it in the step that computes it
    with pytest.raises(ClientDisconnected, match="gone"):
        engine.generate([kept, lost])
    assert engines.ORACLE.judge(kept) == "equal" and len(lost.new) == 1
    check_pools(engine)


def test_counters_add_up():
    engine, rng = make(blocks=16, max_running=2), random.Random(13)
    document = draw(rng, 32)
    asked = [Request(document + draw(rng, 4), 3) for _ in range(4)]
    engine.generate(asked)
    ask(engine, draw(rng, 240), 1)
    counts = charts.counters(engine)
    assert counts["prompt_tokens"] == 4 * 36 + 240 and counts["completion_tokens"] == 4 * 3 + 1
    assert counts["cached_tokens"] == counts["gpu_hit_tokens"] == sum(request.cached_tokens for request in asked) >= 64
    assert counts["gpu_hits"] + counts["misses"] == counts["finished"] == 5
    assert counts["device_blocks"] == counts["device_free"] + counts["device_cached"] == 16
    assert counts["device_evictions"] >= 1 and engine.evict("device") == counts["device_cached"]
