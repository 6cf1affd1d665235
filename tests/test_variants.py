"""The variants of benchmarks/variants.py: what is measured there brings back what was kept."""

import random

import numpy
import pytest
from support.engines import BANDWIDTH, Oracle, ask, check_pools, draw, evict, make, settle

from benchmarks import variants

ORACLE = Oracle()
HISTORY = 128  # tokens
PROMPT = draw(random.Random(3), HISTORY + 40)


def goes_on(cache, pools=("device",)):
    """Ask, evict, and go on behind the same history, twice -> the last request; all as chapter 01 answers."""
    engine = make(cache, 64)
    first, rng = ask(engine, PROMPT), random.Random(4)
    assert ORACLE.judge(first) == "equal"
    for _ in range(2):
        settle(engine)
        for pool in pools:
            engine.evict(pool)
        last = ask(engine, PROMPT[:HISTORY] + draw(rng, 20))
        assert ORACLE.judge(last) in ("equal", "tie")
    settle(engine)
    evict(engine)
    check_pools(engine)
    engine.close()
    return last


@pytest.mark.parametrize("kind", [variants.Direct, variants.DirectToFile])
def test_what_is_saved_without_a_snapshot_comes_back(kind):
    cache = kind(128, BANDWIDTH)
    assert goes_on(cache).found == {"cpu": HISTORY}
    assert cache.counts["drops"] == 0 and cache.counts["bytes_out"] > 0


def test_direct_saving_copies_each_run_and_layer_and_writes_it_where_the_block_is():
    engine = make(cache := variants.DirectToFile(32, BANDWIDTH), 64)
    ask(engine, PROMPT[:14], 3)  # and 2 tokens that are decoded, each in a step of its own
    settle(engine)
    assert cache.counts["copies_out"] == 3 * len(cache.store.parts)
    cache.file.seek(0)
    written = numpy.frombuffer(cache.file.read().ljust(32 * 16 * cache.store.row_bytes, b"\0"), numpy.int32)
    written = written.reshape(len(cache.store.parts), 32, 16, -1)
    (full,) = cache.store.pool.block_of.values()
    for layer, kept in enumerate(cache.store.arrays):
        assert written[layer, full].any() and numpy.array_equal(written[layer, full], kept[full])
    engine.close()


SPLITS = [(0, 128), (1, 128), (0, 70), (30, 90), (0, 0)]


@pytest.mark.parametrize("first, last", SPLITS)
def test_divided_tokens_come_back(first, last):
    cache = variants.TokenWise(128, BANDWIDTH, 3, first, last)
    request = goes_on(cache)
    assert request.found == {"cpu": HISTORY}
    config, size = cache.model.config, cache.model.dtype.itemsize
    kv = config.kv_numbers_per_token // 3 * size * (HISTORY - last // 16 * 16)  # whole blocks
    states = (last - first) * config.hidden_size * size
    assert cache.counts["bytes_in"] == 2 * 2 * (kv + states), "of two layers, twice"


def test_throttled_directories_bring_back_what_they_hold(tmp_path):
    storage = variants.throttled([tmp_path / "1", tmp_path / "2"], 1e9)
    cache = variants.PlannedCache(128, BANDWIDTH, storage, "RHK")
    assert goes_on(cache, ("device", "host")).found == {"disk": HISTORY}
    assert all(each.measured.passes and each.speed() <= 1e9 for each in storage.storages), "both were read"


def test_the_naive_plan_is_the_best_without_hidden_states():
    rng = random.Random(5)
    for _ in range(100):
        costs = variants.planned.LayerCosts(*(10 ** rng.uniform(-3, 0) for _ in range(5)))
        plan = variants.naive_plan(6, costs)
        every = ["R" * count + "K" * (6 - count) for count in range(6)]
        seconds = [variants.planned.plan_seconds(other, costs) for other in every]
        assert plan in every and variants.planned.plan_seconds(plan, costs) == min(seconds)
