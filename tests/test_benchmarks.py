"""Benchmarks on small models: their Caches restore the right tokens, and their rows have the right contents."""

import argparse
import itertools
import json
import random
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import load, write_model

from benchmarks import both_ends, claims, outside, peers, ranks, real_storage, tiered, variants
from common import estimates
from common.cuda_link import Link
from common.llama import LlamaConfig
from common.timeline import Clock
from shell import checkpoint, machine
from shell.modelled_link import Bandwidth
from shell.ranks import Ranks
from tests.support import engines, forked, streams
from tests.support.engines import BANDWIDTH, ORACLE, ask_and_evict, check_pools, draw, make
from tools import gpu_report

# 1. Variants -----------------------------------------------------------------------------------

HISTORY = 128  # tokens
PROMPT = draw(random.Random(3), HISTORY + 40)


@pytest.mark.parametrize("kind", [variants.EachLayer, variants.Direct])
def test_what_is_saved_in_another_way_comes_back(kind):
    engine, rng = make(cache := kind(128, BANDWIDTH), 64), random.Random(4)
    for prompt in PROMPT, *(PROMPT[:HISTORY] + draw(rng, 20) for _ in range(2)):
        last = ask_and_evict(engine, prompt)
        assert ORACLE.judge(last) != "wrong"
    check_pools(engine)
    engine.close()
    assert last.found == {"cpu": HISTORY}
    assert cache.counts["drops"] == 0 and cache.counts["bytes_out"] > 0


def test_direct_saving_copies_each_run_and_layer_and_writes_it_where_the_block_is():
    engine = make(cache := variants.Direct(32, BANDWIDTH), 64)
    ask_and_evict(engine, PROMPT[:14], 3)  # 2 more tokens are decoded, one per step
    assert cache.counts["copies_out"] == 3 * len(cache.store.parts)
    (full,) = cache.store.pool.block_of.values()
    assert all(kept[full].any() for kept in cache.store.arrays)
    engine.close()


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
    for row, times in zip(variants.planned_bench.at_once(wider, argparse.Namespace(rounds=2)), (1, 2), strict=True):
        kv = times * 192 * wider.config.kv_numbers_per_token * wider.dtype.itemsize
        assert row["at_once"] == 2 * times and row["bytes"]["03"] == kv >= row["bytes"]["05"] > 0
        rates = [each["samples"] for each in row["rounds_per_second"].values()]
        assert row["over_03"]["samples"] == pytest.approx([ours / theirs for theirs, ours in zip(*rates)])


def test_computing_a_history_is_asked_in_turn_with_what_restores_it(wider):
    (row, *_) = variants.planned_bench.behind_histories(wider, argparse.Namespace(histories=[128], rounds=2, name="wider"))
    assert row["restored"] == {"02": 0, "03": 128, "04": 128, "05": 128} and row["bytes"]["02"] == 0
    times = {name: figure["samples"] for name, figure in row["ttft_ms"].items()}
    for base, name in (("02", "05"), ("03", "04"), ("04", "05")):
        over = [theirs / ours for theirs, ours in zip(times[base], times[name], strict=True)]
        assert row[f"over_{base}"][name]["samples"] == pytest.approx(over)


# 2. Against other systems ----------------------------------------------------------------------


def test_rounds_of_sessions_that_servers_answer_over_http_are_all_accounted_for(monkeypatch, tmp_path):
    """The rate at which a system diverges is its last one, and the others go on."""
    def started(command, **_):
        process = forked.start(tmp_path, *command[1:])
        process.poll, process.wait = lambda: process.exitcode, process.join
        return process

    monkeypatch.setattr(outside.subprocess, "Popen", started)
    for name, value in dict(SESSIONS=2, RUNS=2, ROUNDS=4, BEGINS=400, RATES=[16.0, 32.0], DIVERGED=0.0).items():
        monkeypatch.setattr(outside, name, value)
    model, *_ = checkpoint.load("classroom", "float32", "cpu")
    rows = {row["system"]: row for row in outside.sessions(model, argparse.Namespace(name="classroom"))}
    assert {(row["rate"], row["diverged"]) for row in rows.values()} == {(16.0, True)} and len(rows) == 4
    for name, row in rows.items():
        assert row["requests"] == len(row["ttft_ms"]["samples"]) == len(row["tbt_ms"]["samples"]) == 2 * 4
        assert (row["restored"] > 0) == (name != "02") and len(row["p90_over_03"]["samples"]) == 2
    assert rows["03"]["p50_over_03"]["samples"] == rows["02"]["tbt_over_02"]["samples"] == [1.0, 1.0]


@pytest.mark.parametrize("over, rate", [([1.0, 2.0, 8.0], 8 * 2**-0.5), ([1.0, 2.0, 3.0], 8.0), ([5.0], 2.0)])
def test_the_rate_that_is_sustained_lies_between_two_that_were_measured(over, rate):
    rows = [dict(system="05", rate=2.0 * 2**step, over_lowest_rate=times) for step, times in enumerate(over)]
    assert outside.sustained(rows) == {"05": pytest.approx(rate)}


# 3. Both ends ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400)).model


def test_a_cell_of_the_grid_says_what_was_loaded_and_how_far_the_bound_is(wider):
    row = next(both_ends.grid(wider, argparse.Namespace(histories=[192], rounds=2, r=[1.0], share=[])))
    assert row["loaded_chunks"] + row["computed_chunks"] == 3
    times = {way: figure["samples"] for way, figure in row["ttft_ms"].items()}
    assert row["over_better"]["samples"] == [both / min(one, other) for both, one, other in zip(*map(times.get, ("both", "compute", "load")))]
    assert row["over_bound_ms"]["samples"] == pytest.approx([both - row["bound_ms"] for both in times["both"]])
    load, compute = (max(1.0, row["ttft_ms"][way]["median"] - row["hit_ms"]) for way in ("load", "compute"))
    assert row["bound_ms"] == pytest.approx(row["hit_ms"] + both_ends.time_to_meet(wider.config, 192, load, max(1.0, row["slowed"]) * compute))


def test_both_ends_meet_later_in_the_text_than_where_every_token_costs_the_same(wider):
    """Early tokens see less, so computing gets further than its share, and both meet sooner."""
    assert both_ends.time_to_meet(wider.config, 192, 9.0, 1e9) == pytest.approx(9.0) and both_ends.time_to_meet(wider.config, 192, 1e9, 9.0) == pytest.approx(9.0)
    assert 4.0 < both_ends.time_to_meet(wider.config, 192, 9.0, 9.0) < 4.5


CELL = dict(history_tokens=1024, r=1, share=1.0, loaded_chunks=8, computed_chunks=8, ttft_ms=dict(load=90.0))
GUARD = dict(r=2.0, guard=True, from_storage=dict(both_ends=0.3), both_ends_over=dict(timeout=1.0))


@pytest.mark.parametrize("part, read, row, counts", [
    ("grid", claims.grid(lambda row: 1.0), dict(CELL, hit_ms=18.0), True),
    ("grid", claims.grid(lambda row: 1.0), dict(CELL, hit_ms=104.0), False),  # loading took no longer than a device hit
    ("policies", claims.policies("timeout"), dict(GUARD, measured_r=1.8), True),
    ("policies", claims.policies("timeout"), dict(GUARD, measured_r=2.8), False)])  # storage was not as slow as it says
def test_a_row_without_evidence_that_its_mechanism_ran_says_nothing(part, read, row, counts):
    assert bool(read([dict(claim=part, model="m", rows=[row])])) == counts


def test_a_hit_in_host_memory_is_found_whole_also_after_a_slow_link(wider, monkeypatch):
    """A link that is 50 times slower is declined. After that the engine no longer believes that the link is slow."""
    monkeypatch.setattr(tiered.hardware, "bandwidth", lambda model: Bandwidth(1e7))
    monkeypatch.setattr(estimates.Estimates, "seconds_to_compute", lambda own, start, end: 2e-3 * (end - start))
    rows = tiered.admission(wider, argparse.Namespace(rounds=3), histories=(128,))
    found = {row["way"]: row["found"] for row in rows}
    assert found["host"] == dict(gpu=0, cpu=128, storage=0)
    assert found[tiered.SLOWER] == found["computed"] == dict(gpu=0, cpu=0, storage=0)


def test_a_history_comes_back_from_files_on_the_disk_and_from_redis(wider, monkeypatch):
    monkeypatch.setattr(real_storage, "READ", 1 << 20)
    few = argparse.Namespace(histories=[192], rounds=2)
    try:
        before = real_storage.fetched()
        disk = list(real_storage.disk(wider, few))
    except (OSError, ValueError) as reason:
        pytest.skip(f"no disk: {reason}")
    counted = real_storage.fetched() > before  # by direct reads; not on each file system
    assert len(disk) == 4 and all(row[speed]["min"] > 0 for row in disk for speed in ("direct_gbps", "files_gbps"))
    rows = [row for row in real_storage.restored(wider, few) if "skipped" not in row]
    back = {(row["system"], row["place"]): row for row in rows if row["system"] in ("04", "05", "07, wait_complete")}
    assert {system for system, place in back if place in ("dropped", "page cache", "modelled")} == {"04", "05", "07, wait_complete"}
    whole = 192 * wider.config.kv_numbers_per_token * wider.dtype.itemsize
    for (system, place), row in back.items():
        assert row["found"] == {"storage" if "07" in system else "disk": 192} and row["restored"] == 192
        assert not counted or (row["fetched"] >= row["bytes"]) == (place == "dropped")
        assert 0 < row["bytes"] == (whole if "07" in system else row["bytes"]) <= whole
        computed, ttft, modelled = (each["samples"] for each in (row["computed_ms"], row["ttft_ms"], back[system, "modelled"]["ttft_ms"]))
        assert row["over_computing"]["samples"] == pytest.approx([ours / theirs for ours, theirs in zip(ttft, computed)])
        assert row["over_modelled"]["samples"] == pytest.approx([ours / theirs for ours, theirs in zip(ttft, modelled)])
        hit = row["hit_ms"]["median"]
        assert row["bound_ms"] == pytest.approx(max(hit, row["bytes"] / row["speed_gbps"] / 1e6 + hit / len(wider.layers)))
    assert all(real_storage.report([dict(claim="restored", model="m", rows=rows)]).count(row["system"]) for row in rows)


@pytest.fixture
def peer(monkeypatch, tmp_path):
    """Replace all servers of `peers` by one that answers as llama.cpp's server and ours do. Yields the list of what was started and
    posted."""
    def post(server, path, **fields):
        calls.append((server.command, path, fields))
        new, cached = fields.get("max_tokens") or fields.get("n_predict"), 7
        return dict(tokens=[5] * (new or 0), usage=dict(cached_tokens=cached), tokens_predicted=new, timings=dict(cache_n=cached + 1, prompt_n=9))

    calls, clock = [], itertools.count(step=0.5)
    for name, folder in ((peers.PEER, tmp_path), (peers.WEIGHTS, tmp_path)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin=str(folder / "__init__.py"))
        module.binary_path, module.launch_environment = lambda: "llama-server", dict
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "weights.gguf").touch()
    for name, value in dict(__init__=lambda own, command, environment=None: setattr(own, "command", command), post=post, close=lambda own: None,
                            seconds=lambda own: next(clock), peak=lambda own: 2e9 if own.command[0] == sys.executable else 1e9).items():  # fmt: skip
        monkeypatch.setattr(peers.Server, name, value)
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: None)
    return calls


def test_a_peer_is_asked_the_same_in_turn_and_its_tables_have_all_that_was_measured(peer):
    model, arguments = SimpleNamespace(config=LlamaConfig(*range(1, 8))), argparse.Namespace(name="classroom", tokens=[40, 60], rounds=2)
    found = [dict(claim=name, model="m", rows=list(part(model, arguments))) for name, (part, _) in peers.PARTS.items()]
    rows = [row for entry in found for row in entry["rows"]]
    timed = [row for row in rows if "wall_ms" in row]
    assert all(len(row["processor_over"]["samples"]) == 2 and row["processor_ms"]["min"] > 0 for row in timed)
    assert {(row["what"], row["system"]) for row in timed if row.get("tokens") == 60} == {
        *(("computed", system) for system in (peers.THEIRS, *peers.OPTIONS)), *(("host memory", system) for system in (peers.THEIRS, "03", "04", "07")),
        *(("files", system) for system in (peers.THEIRS, "04", "06", "07"))}  # fmt: skip
    assert {row["cached"] for row in timed if "tokens" in row} == {7, 8} and all(row["processor_ms"]["median"] == 500 for row in timed if "tokens" in row)
    alone, many = ([row["processor_ms"]["median"] for row in timed if row["what"].startswith(words)] for words in ("one", "16"))
    assert alone == [500 / 32] * 2 and many == [500 / 32 / 16] * 2
    assert [row["over"] for row in rows if "bytes" in row] == [1, 2, 2, 2, 2, 1, 2]
    page = peers.report(found)
    assert page.count("| llama.cpp |") == 11 and "| 06 | 2000.0 MB | 2.00 |" in page
    assert "| files, 60 tokens | 06 | 7 | 500 ms | 1.00 (1.00 to 1.00) |" in page
    ours, theirs = ({tuple(fields["prompt"]) for command, _, fields in peer if "prompt" in fields and (command[0] == "llama-server") == is_theirs and len(fields["prompt"]) == 40}
                    for is_theirs in (False, True))  # fmt: skip
    assert ours < theirs, "llama.cpp is also asked what takes its slot"
    actions = [path.partition("=")[2] for _, path, _ in peer if path.startswith("/slots/0")]
    assert actions == ["save", "erase", "restore"] * 6
    evicted = {system: [fields["tier"] for command, path, fields in peer if path == "/evict" and command[1].startswith(system)] for system in peers.OPTIONS}
    assert evicted == {"03": ["device"] * 6, "04": ["device", "device", "host"] * 6, "06": ["device"] * 6, "07": ["device", "device", "host"] * 6}


def test_without_the_peer_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers"])
    monkeypatch.setattr(peers, "PEER", "no_such_package")
    peers.main()
    assert capsys.readouterr().out == f"{peers.INSTALL}\n"


def test_the_processor_time_and_the_peak_memory_of_another_process_are_read():
    server = peers.Server([sys.executable, "-c", "import time; bytearray(1 << 27); time.sleep(600)"])
    try:
        while server.peak() < 1 << 27:
            time.sleep(0.01)
        assert server.seconds() > 0
    finally:
        server.close()


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
