"""Benchmarks on small models: their Caches restore the right tokens, and their rows have the right contents."""

import argparse
import json
import math
import random
import statistics
import threading

import pytest
import torch
from conftest import load, write_model

from benchmarks import both_ends, claims, outside, ranks, tiered, variants
from common import estimates, machine, restoring
from common.cuda_link import Link
from common.requests import Unavailable
from common.timeline import Clock
from shell import checkpoint
from shell.modelled_link import Bandwidth
from shell.ranks import Ranks
from tests.support import engines, forked, streams
from tests.support.engines import (
    BANDWIDTH,
    ORACLE,
    ask,
    check_pools,
    draw,
    evict,
    make,
    tiny_model,
    wait_until_idle,
)
from tools import gpu_report

# 1. Variants -----------------------------------------------------------------------------------

HISTORY = 128  # tokens
PROMPT = draw(random.Random(3), HISTORY + 40)


def goes_on(cache, pools=("device",)):
    """Ask, then twice evict `pools` and ask again after the same history. Every answer must equal chapter 01's.

    Returns: the last request."""
    engine = make(cache, 64)
    first, rng = ask(engine, PROMPT), random.Random(4)
    assert ORACLE.judge(first) == "equal"
    for _ in range(2):
        wait_until_idle(engine)
        for pool in pools:
            engine.evict(pool)
        last = ask(engine, PROMPT[:HISTORY] + draw(rng, 20))
        assert ORACLE.judge(last) in ("equal", "tie")
    evict(engine)
    check_pools(engine)
    engine.close()
    return last


@pytest.mark.parametrize("kind", [variants.EachLayer, variants.Direct])
def test_what_is_saved_in_another_way_comes_back(kind):
    cache = kind(128, BANDWIDTH)
    assert goes_on(cache).found == {"cpu": HISTORY}
    assert cache.counts["drops"] == 0 and cache.counts["bytes_out"] > 0


def test_direct_saving_copies_each_run_and_layer_and_writes_it_where_the_block_is():
    engine = make(cache := variants.Direct(32, BANDWIDTH), 64)
    ask(engine, PROMPT[:14], 3)  # 2 more tokens are decoded, one per step
    wait_until_idle(engine)
    assert cache.counts["copies_out"] == 3 * len(cache.store.parts)
    (full,) = cache.store.pool.block_of.values()
    assert all(kept[full].any() for kept in cache.store.arrays)
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
    assert cache.counts["bytes_in"] == 2 * 2 * (kv + states), "the bytes of two layers, restored twice"


def test_the_naive_plan_is_the_best_without_hidden_states():
    rng = random.Random(5)
    for _ in range(100):
        costs = variants.planned.LayerCosts(*(10 ** rng.uniform(-3, 0) for _ in range(5)))
        plan = variants.naive_plan(6, costs)
        every = ["R" * count + "K" * (6 - count) for count in range(6)]
        seconds = [variants.planned.plan_seconds(other, costs) for other in every]
        assert plan in every and variants.planned.plan_seconds(plan, costs) == min(seconds)


def test_of_histories_that_come_back_at_once_each_chapter_brings_all(wider, monkeypatch):
    monkeypatch.setattr(variants.planned_bench, "LENGTHS", [64, 128])
    (row,) = variants.planned_bench.at_once(wider, argparse.Namespace(rounds=2))
    kv = 192 * wider.config.kv_numbers_per_token * wider.dtype.itemsize
    assert row["bytes"]["03"] == kv >= row["bytes"]["05"] > 0
    rates = [each["samples"] for each in row["rounds_per_second"].values()]
    assert row["over_03"]["samples"] == pytest.approx([ours / theirs for theirs, ours in zip(*rates)])


# 2. Against other systems ----------------------------------------------------------------------

SHORT = dict(QUESTION=16, ANSWER=4, TALKS=4, TURNS=5, SAID=(20, 150), DOCUMENTS=8, LENGTH=80, ASKS=12, BEGINS=80,
             SESSIONS={1.0: 2}, ROUNDS=3, THINK=0.3, WINDOW=0.3, EVERY=0.1)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Check that engines step on the thread that loads the weights, as a server's do.

    Else PyTorch starts a second set of threads."""
    plain, stepped = engines.paged.Engine.step, set()
    monkeypatch.setattr(engines.paged.Engine, "step", lambda own: stepped.add(threading.current_thread()) or plain(own))
    yield stepped
    assert stepped <= {threading.main_thread()}


@pytest.fixture
def bench(monkeypatch):
    """A short benchmark in which every match is restored, however fast this machine computes."""
    for name, value in SHORT.items():
        monkeypatch.setattr(outside, name, value)
    monkeypatch.setattr(outside, "draw", lambda rng, model, tokens: draw(rng, tokens))
    monkeypatch.setattr(estimates, "LOAD_THRESHOLD", math.inf)
    monkeypatch.setattr(restoring, "GRACE", 60.0)
    return outside.Bench(tiny_model(kv_heads=4))


def test_in_conversations_almost_all_that_was_there_is_found(bench):
    for row in outside.conversations(bench, 1):
        systems = row["systems"]
        assert {found["equal"] for found in systems.values()} == {row["requests"]}
        assert systems["no cache"]["found"] == 0 < systems["02"]["found"] < systems["03"]["found"]
        for name in ("04", "05", "06", "07"):
            assert systems[name]["restored"] and systems[name]["found"] > systems["02"]["found"]
        for name in ("03", "04", "05"):
            assert systems[name]["found"] > 0.9 * row["could_be_found"], "all full blocks are found"


def test_later_rounds_of_sessions_are_all_accounted_for(bench):
    bench.bandwidth = BANDWIDTH  # a fast link: saves complete before the next round
    rows = {row["system"]: row for row in outside.sessions(bench, 2)}
    for name, row in rows.items():
        samples = [row[what]["samples"] for what in ("ttft_ms", "tbt_ms", "over_03")]
        assert [*map(len, samples)] == 3 * [row["requests"]] == 3 * [2 * 2 * 2]
        assert (row["restored"] > 0) == (name in ("03", "04", "05"))
    expected = [ours / theirs for ours, theirs in zip(*(rows[name]["ttft_ms"]["samples"] for name in ("05", "03")))]
    assert rows["05"]["over_03"]["samples"] == pytest.approx(expected) and set(rows["03"]["over_03"]["samples"]) == {1.0}


def test_what_a_client_raises_is_raised_and_its_requests_are_cancelled(bench):
    asked, engine = [], bench.engines(600, 600)["02"]
    with pytest.raises(IndexError):
        outside.served(engine, lambda server: asked.append(bench.submit(server, "02", bench.prompt(40), 400)) or asked[1])
    assert isinstance(asked[0].outcome, Unavailable)


def test_beside_others_the_history_comes_back(bench):
    rows = {row["system"]: row for row in outside.beside(bench, 1)}
    for name, row in rows.items():
        assert row["came_back"] >= 1 and (row["bytes_in"] > 0) == (name in ("03", "04", "05"))
        assert row["restored"] == row["came_back"] * (name in ("03", "04", "05"))
        assert (row["projecting"] > 0) == (name == "04") or name == "05"


# 3. Both ends ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400)).model


def test_a_cell_of_the_grid_says_what_was_loaded_and_how_far_the_bound_is(wider):
    row = next(both_ends.grid(wider, argparse.Namespace(histories=[192], rounds=2, r=[1.0], share=[])))
    assert row["loaded_chunks"] + row["computed_chunks"] == 3
    hit, taken = row["hit_ms"], row["ttft_ms"]
    load, compute = taken["load"] - hit, max(1.0, row["slowed"]) * (taken["compute"]["median"] - hit)
    assert row["bound_ms"] == pytest.approx(hit + load * compute / (load + compute))
    over = [both / row["bound_ms"] for both in row["ttft_ms"]["both"]["samples"]]
    assert row["over_bound"]["median"] == pytest.approx(statistics.median(over))


def counted(part: str, read, **row) -> bool:
    """Return True if a claim accepts a row as evidence that its mechanism ran."""
    return bool(read("", lambda row: 1.0)([dict(claim=part, model="m", rows=[row])]))


@pytest.mark.parametrize("hit, counts", [(18.0, True), (104.0, False)])
def test_a_cell_whose_loading_took_no_longer_than_a_device_hit_says_nothing(hit, counts):
    row = dict(history_tokens=1024, r=1, share=1.0, loaded_chunks=8, computed_chunks=8, hit_ms=hit, ttft_ms=dict(load=90.0))
    assert counted("grid", lambda label, value: claims.grid(value), **row) == counts


@pytest.mark.parametrize("measured, counts", [(1.8, True), (2.6, False)])
def test_a_row_whose_storage_was_not_as_slow_as_it_says_says_nothing(measured, counts):
    assert counted("policies", claims.policies, r=2.0, measured_r=measured, from_storage=dict(both_ends=0.3)) == counts


def test_a_hit_in_host_memory_is_found_whole_also_after_a_slow_link(wider, monkeypatch):
    """A link that is 50 times slower is declined. After that the engine no longer believes that the link is slow."""
    monkeypatch.setattr(tiered.hardware, "bandwidth", lambda model: Bandwidth(1e7))
    monkeypatch.setattr(estimates.Estimates, "seconds_to_compute", lambda own, start, end: 2e-3 * (end - start))
    rows = tiered.admission(wider, argparse.Namespace(rounds=3), histories=(128,))
    found = {row["way"]: row["found"] for row in rows}
    assert found["host"] == dict(gpu=0, cpu=128, storage=0)
    assert found[tiered.SLOWER] == found["computed"] == dict(gpu=0, cpu=0, storage=0)


def test_a_rank_has_a_link_of_the_speed_that_its_rows_say(monkeypatch):
    plain, speeds = ranks.ranked.make_engine, []
    monkeypatch.setattr(ranks.ranked, "make_engine", lambda model, options, keep:
                        speeds.append(options.link.value) or plain(model, options, keep))
    monkeypatch.setattr(ranks, "HISTORY", 64)
    monkeypatch.setattr(ranks, "SECONDS", 0.05)
    rows = ranks.rank(Ranks(), argparse.Namespace(model=["random:tiny"], dtype="float32", device="cpu", rounds=1))
    assert [row["bytes_over_link"] for row in rows] == [pytest.approx(speed * row["link_ms"] / 1e3) for speed, row in zip(speeds, rows)]
    assert all(row["bytes_over_link"] for row in rows) and len(speeds) == 2


def test_steps_of_a_computed_history_are_timed_one_by_one_beside_what_brings_its_bytes(wider, monkeypatch):
    monkeypatch.setattr(both_ends, "STEP", 32)
    (row,) = both_ends.steps(wider, argparse.Namespace(rounds=2))
    assert row["history_tokens"] == 224 and len(row["steps_ms"]) == 7 and len(row["mbps"]) == 3
    for step, total in zip(zip(*(step["samples"] for step in row["steps_ms"])), row["mbps"]["computing"]["samples"]):
        assert sum(step) <= row["bytes"] / 1e3 / total * 1.001, "the total covers all steps and the time between them"


# 4. A GPU --------------------------------------------------------------------------------------

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_every_part_of_the_report_of_a_gpu_runs_on_the_emulated_one(monkeypatch, tmp_path):
    """One row fails (07, direct), and the others are complete; chapter 07 has two ways of copying."""
    eager, file, tiered, forward = set(), tmp_path / "gpu-emulated.json", engines.tiers.TieredCache, engines.paged.Runner.forward
    for owner, name, value in ((machine, "PAUSE", 0.0), *((gpu_report, *pair) for pair in dict(OTHERS=2, BATCH=4, NEW=2).items())):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(engines.tiers, "TieredCache", lambda blocks, io_backend=None: tiered(blocks if io_backend == "kernel" else "x"))
    monkeypatch.setattr(engines.paged.Runner, "forward", lambda own, *given: eager.add(own.pieces is None) or forward(own, *given))
    for part in ("--part papers --eager", "--part slower", "--part cake", "--part hybrid", "--only copies"):
        monkeypatch.setattr("sys.argv", f"_ --emulated --rounds 1 {part} --json {file}".split())
        gpu_report.main()
    found = {part: job["rows"] for part, job in json.loads(file.read_text()).items()}
    assert json.loads(file.read_text())["copies"]["code"] == 0 and len(found["copies"]) == 4
    back = {row["way"]: row["found"] for row in found["papers"] if "ttft_ms" in row}
    ways = {"hit": "gpu", **{way: "cpu" for way in ("03", "04", "05", "07, kernel")}, "06": "storage"}
    assert all(back[way] == back[f"{way}, eager"] == {tier: 192} for way, tier in ways.items()) and back["02"] == {}
    assert eager == {True, False} and [row["way"] for row in found["papers"] if "failed" in row] == ["07, direct"]
    assert {row["way"] for row in found["papers"] if "tbt_ms" in row} == {*ways, "02"} - {"hit"}
    shown = file.with_suffix(".md").read_text()
    assert all(claim.text in shown for claim in claims.CLAIMS if claim.gpu[1:] and "07" not in claim.gpu[0])
    with streams.emulate("early") as gpu, gpu_report.slowed(3):
        transfer = Link("load", Clock("cuda")).copy(torch.zeros(9, device="cuda"), torch.ones(9, pin_memory=True), "nine")
        assert transfer.queue_wait() and gpu.copies == 3 * [("to the device", 36)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real one has other numbers, and counts no copies")
@pytest.mark.parametrize("on_host", [False, True])
def test_a_gpu_makes_random_weights_itself_and_they_are_other_weights(on_host):
    model, *_ = checkpoint.load("random:tiny:64", "float32", "cpu")
    with streams.emulate("early") as gpu:
        there, *_ = checkpoint.load("random:tiny:64", "float32", "cuda", on_host)
        assert all(size < 1 << 14 for way, size in gpu.copies if way == "to the device") and there.digest != model.digest
        assert all(torch.equal(tensor.cpu(), checkpoint.weights(model)[name]) for name, tensor in checkpoint.weights(there).items())
    assert there.config.max_position_embeddings == 64


# 5. The soak -----------------------------------------------------------------------------------


def test_a_short_soak_counts_its_answers_and_finds_nothing_wrong_or_left(tmp_path):
    done = forked.run(tmp_path, "-m", "tests.soak", "--minutes", 0.05)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[-2:]:
        _, answered, _, _, wrong, refused, left, *_ = line.split()
        assert int(answered) and wrong == refused == left == "0"
