"""Benchmarks and the report of a GPU, on small models: each part yields rows whose mechanism ran."""

import argparse
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import load, write_model

from benchmarks import __main__ as everything
from benchmarks import both_ends, claims, outside, peers, planned, ranks, real_storage, tiered, variants
from benchmarks import engine as engine_bench
from common import estimates
from common.cuda_link import Link
from common.llama import LlamaConfig
from common.timeline import Clock
from shell import checkpoint, machine
from shell.modelled_link import Bandwidth
from shell.ranks import Ranks
from tests.support import engines, forked, streams
from tools import gpu_report

SHORTER = {"saving": dict(new=4, tokens=64)}
WHOLE = "04", "05", "07"  # systems that restore the whole history from storage


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400, max_position_embeddings=1024)).model


# 1. Parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module, part, is_right", [
    (planned, "ttft", lambda row: row["restored"] == {"02": 0, "03": 192, "04": 192, "05": 192}),
    (planned, "at_once", lambda row: row["bytes"]["03"] >= row["bytes"]["05"] > 0),
    (both_ends, "grid", lambda row: row["loaded_chunks"] + row["computed_chunks"] == 6),
    (both_ends, "steps", lambda row: len(row["steps_ms"]) == 7 and row["beside_over_alone"]["min"] > 0),
    (both_ends, "others", lambda row: row["loaded_chunks"] + row["computed_chunks"] == 6 and row["tbt_ms"]["both"]["min"] > 0),
    (tiered, "sizes", lambda row: 0 < row["gpu"] < 1 and row["gpu"] + row["cpu"] + row["computed"] == pytest.approx(1)),
    (variants, "saving", lambda row: all(row["ways"][way]["bytes_out"] > 0 for way in ("two stages", "each layer", "direct"))),
    (real_storage, "disk", lambda row: row["direct_gbps"]["min"] > 0),
    (real_storage, "restored", lambda row: row["system"] not in WHOLE or row["restored"] == 192 and min(row["bytes"], row["reads"], row["bound_ms"]) > 0),
], ids=["ttft", "at_once", "grid", "steps", "others", "sizes", "saving", "disk", "restored"])  # fmt: skip
def test_a_part_yields_rows_whose_mechanism_ran_and_a_table(module, part, is_right, wider, monkeypatch):
    monkeypatch.setattr(planned, "LENGTHS", [64, 128])
    monkeypatch.setattr(both_ends, "STEP", 32)
    monkeypatch.setattr(both_ends, "LENGTHS", [192])
    monkeypatch.setattr(real_storage, "READ", 1 << 20)
    try:
        arguments = argparse.Namespace(name="wider", histories=[192], rounds=2, r=[1.0], share=[])
        rows = [*module.PARTS[part][0](wider, arguments, **SHORTER.get(part, {}))]
    except (OSError, ValueError) as reason:
        pytest.skip(f"no disk: {reason}")
    assert rows and all(is_right(row) for row in rows if "skipped" not in row)
    assert "| --- |" in module.report([dict(claim=part, model="wider", rows=rows)])


def test_the_tiers_below_hold_as_many_blocks_as_the_larger_one(wider):
    """Chapter 03 copies each block of the device, so that the sizes of both do not add up."""
    (row,) = engine_bench.capacity(wider, argparse.Namespace(), on_device=32, on_host=96)
    assert row["on_host"] <= row["different"] < row["on_device"] + row["on_host"]


def test_logits_of_restored_conversations_are_compared_with_chapter_01():
    rows = [*engine_bench.same(SimpleNamespace(dtype=torch.float32), argparse.Namespace(name="classroom", device="cpu"))]
    assert [row["bytes_restored"] > 0 for row in rows] == [False, True, True, True]
    assert all(row["compared"] == row["equal"] > 0 for row in rows)
    report = engine_bench.report([dict(claim="same", model="classroom", rows=rows)])
    assert f"| 05 | {rows[-1]['bytes_restored'] / 1e6:.1f} MB | {rows[-1]['equal']:,} of" in report


def test_all_parts_together_take_at_most_forty_minutes():
    assert sum(minutes for minutes, _ in everything.PARTS.values()) <= 40
    assert {benchmark for benchmark in everything.PARTS} >= {claim.benchmark for claim in claims.CLAIMS}
    assert 24 <= len(claims.CLAIMS) <= 28


def test_a_slow_link_is_declined_and_a_later_host_hit_is_whole(wider, monkeypatch):
    monkeypatch.setattr(tiered.hardware, "bandwidth", lambda model: Bandwidth(1e7))
    monkeypatch.setattr(estimates.Estimates, "seconds_to_compute", lambda own, start, end: 2e-3 * (end - start))
    rows = tiered.admission(wider, argparse.Namespace(rounds=3), histories=(128,))
    found = {row["way"]: row["found"] for row in rows}
    assert found["host"] == dict(gpu=0, cpu=128, storage=0)
    assert found[tiered.SLOWER] == found["computed"] == dict(gpu=0, cpu=0, storage=0)


def test_servers_answer_all_rounds_of_sessions(monkeypatch, tmp_path):
    """The rate at which a system diverges is its last one."""
    def started(command, **_):
        process = forked.start(tmp_path, *command[1:])
        process.poll, process.wait = lambda: process.exitcode, process.join
        return process

    monkeypatch.setattr(outside.subprocess, "Popen", started)
    for name, value in dict(SESSIONS=2, RUNS=1, ROUNDS=4, BEGINS=300, RATES={"classroom": [16.0, 32.0]}, DIVERGED=0.0).items():
        monkeypatch.setattr(outside, name, value)
    model, *_ = checkpoint.load("classroom", "float32", "cpu")
    rows = [*outside.sessions(model, argparse.Namespace(name="classroom"))]
    assert [(row["system"], row["rate"], row["requests"]) for row in rows] == [(name, 16.0, 4) for name in outside.SYSTEMS]
    assert [row["restored"] > 0 for row in rows] == [False, False, True, True, True]
    assert rows[-1]["p50_over_02 recomputing"]["samples"] and "| 05 |" in outside.report([dict(claim="sessions", model="classroom", rows=rows)])


@pytest.fixture
def peer(monkeypatch):
    """Replace all servers of `peers` by one that answers as llama.cpp's server and ours do. Yields a list of all started
    commands and posted fields."""
    def post(server, path, **fields):
        calls.append((server.command, path, fields))
        new, cached = fields.get("max_tokens") or fields.get("n_predict"), 7
        return dict(tokens=[5] * (new or 0), usage=dict(cached_tokens=cached), tokens_predicted=new, timings=dict(cache_n=cached + 1, prompt_n=9))

    calls, clock = [], itertools.count(step=0.5)
    monkeypatch.setattr(peers.Theirs, "__init__", lambda own, *given: setattr(own, "command", ["llama-server"]))
    for name, value in dict(__init__=lambda own, command, environment=None: setattr(own, "command", command), post=post, close=lambda own: None,
                            seconds=lambda own: next(clock), peak=lambda own: 2e9 if own.command[0] == sys.executable else 1e9).items():  # fmt: skip
        monkeypatch.setattr(peers.Server, name, value)
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: None)
    return calls


def test_a_peer_is_asked_the_same_in_turn_and_its_tables_have_all_that_was_measured(peer):
    model, arguments = SimpleNamespace(config=LlamaConfig(1000, *range(2, 8))), argparse.Namespace(name="classroom", tokens=[40, 60], rounds=2)
    found = [dict(claim=name, model="m", rows=list(part(model, arguments))) for name, (part, _) in peers.PARTS.items()]
    rows = [row for entry in found for row in entry["rows"]]
    timed = [row for row in rows if "wall_ms" in row]
    assert all(len(row["processor_over"]["samples"]) == 2 and row["processor_ms"]["min"] > 0 for row in timed)
    assert {(row["what"], row["system"]) for row in timed if row.get("tokens") == 60} == {
        *(("computed", system) for system in (peers.THEIRS, *peers.OPTIONS)), *(("host memory", system) for system in (peers.THEIRS, "03", "04", "07")),
        *(("files", system) for system in (peers.THEIRS, "04", "06", "07"))}  # fmt: skip
    page = peers.report(found)
    assert page.count("| llama.cpp |") == 10 and "| 06 | 2000.0 MB | 2.00 |" in page
    ours, theirs = ({tuple(fields["prompt"]) for command, _, fields in peer if "prompt" in fields and (command[0] == "llama-server") == is_theirs and len(fields["prompt"]) == 40}
                    for is_theirs in (False, True))  # fmt: skip
    assert ours < theirs, "llama.cpp is also asked what takes its slot"
    evicted = {system: [fields["tier"] for command, path, fields in peer if path == "/evict" and command[1].startswith(system)] for system in peers.OPTIONS}
    assert evicted == {"03": ["device"] * 6, "04": ["device", "device", "host"] * 6, "06": ["device"] * 6, "07": ["device", "device", "host"] * 6}


def test_without_the_peer_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers"])
    monkeypatch.setattr(peers, "PEER", "no_such_package")
    peers.main()
    assert capsys.readouterr().out == f"{peers.INSTALL}\n"


def test_a_rank_sends_its_bytes_over_its_link(monkeypatch):
    monkeypatch.setattr(ranks, "HISTORY", 64)
    monkeypatch.setattr(ranks, "SECONDS", 0.05)
    kv, states = ranks.rank(Ranks(), argparse.Namespace(model=["random:tiny"], dtype="float32", device="cpu", rounds=1))
    assert kv["bytes_over_link"] > states["bytes_over_link"] > 0 and kv["link_ms"] == pytest.approx(50, rel=0.01)


# 2. A GPU --------------------------------------------------------------------------------------

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_each_part_of_the_gpu_report_runs_on_the_emulated_gpu(monkeypatch, tmp_path):
    """One row fails (07, direct), and the others are complete; chapter 07 has two ways of copying."""
    file, tiered_cache = tmp_path / "gpu-emulated.json", engines.tiers.TieredCache
    for owner, name, value in ((machine, "PAUSE", 0.0), (gpu_report, "OTHERS", 2), (gpu_report, "BATCH", 4), (gpu_report, "NEW", 2)):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(engines.tiers, "TieredCache", lambda blocks, io_backend: tiered_cache(blocks if io_backend == "kernel" else "x"))
    monkeypatch.setattr(gpu_report.subprocess, "run", lambda command, **_: forked.run(tmp_path, *command[3:]))
    for part in ("--part papers", "--part slower --eager", "--part cake", "--part hybrid", "--only copies"):
        monkeypatch.setattr("sys.argv", f"_ --emulated --rounds 1 {part} --json {file}".split())
        gpu_report.main()
    found = json.loads(file.read_text())
    back, slow = ({row["way"]: row.get("found", "failed") for row in found[part]["rows"] if "tbt_ms" not in row} for part in ("papers", "slower"))
    tiers = dict.fromkeys(("03", "04", "05", "07, kernel"), {"cpu": 192}) | {"hit": {"gpu": 192}, "06": {"storage": 192}}
    assert back == {**tiers, "02": {}, "07, direct": "failed"} and len(found["copies"]["rows"]) == 4
    assert all(slow[way] == slow[f"{way}, eager"] == back[way] for way in ("03", "04", "05"))
    shown = file.with_suffix(".md").read_text()
    assert "07, direct behind 192" in shown
    assert all(claim.text in shown for claim in claims.CLAIMS if claim.gpu[1:] and "07" not in claim.gpu[0])
    with streams.emulate("early") as gpu, gpu_report.slowed(3):
        transfer = Link("load", Clock("cuda")).copy(torch.zeros(9, device="cuda"), torch.ones(9, pin_memory=True), "nine")
        assert transfer.queue_wait() and gpu.copies == 3 * [("to the device", 36)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real one has other numbers, and counts no copies")
@pytest.mark.parametrize("on_host", [False, True])
def test_a_gpu_makes_random_weights_itself_and_they_have_another_digest(on_host):
    model, *_ = checkpoint.load("random:tiny:64", "float32", "cpu", on_host=True)  # so the weights stay
    with streams.emulate("early") as gpu:
        there, *_ = checkpoint.load("random:tiny:64", "float32", "cuda", on_host)
        assert all(size < 1 << 14 for way, size in gpu.copies if way == "to the device") and there.digest != model.digest
        assert all(torch.equal(tensor.cpu(), checkpoint.weights(model)[name]) for name, tensor in checkpoint.weights(there).items())
    assert there.config.max_position_embeddings == 64
