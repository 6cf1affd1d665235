"""Benchmarks, the report of a GPU and the soak, on small models: each part yields rows whose mechanism ran."""

import argparse
import json

import pytest
import torch
from conftest import load, write_model

from benchmarks import both_ends, claims, outside, planned, ranks, real_storage, tiered, variants
from common import estimates
from common.cuda_link import Link
from common.timeline import Clock
from shell import checkpoint, machine
from shell.modelled_link import Bandwidth
from shell.ranks import Ranks
from tests import soak
from tests.support import engines, forked, streams
from tools import gpu_report

SHORTER = {"saving": dict(new=4, tokens=64)}
WHOLE = "04", "05", "07, wait_complete"  # systems that restore the whole history from real storage


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400, max_position_embeddings=1024)).model


# 1. Parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module, part, is_right", [
    (planned, "ttft", lambda row: row["restored"] == {"02": 0, "03": 192, "04": 192, "05": 192}),
    (planned, "at_once", lambda row: row["bytes"]["03"] >= row["bytes"]["05"] > 0),
    (both_ends, "grid", lambda row: row["loaded_chunks"] + row["computed_chunks"] == 3),
    (both_ends, "steps", lambda row: len(row["steps_ms"]) == 7),
    (variants, "saving", lambda row: all(row["ways"][way]["bytes_out"] > 0 for way in ("two stages", "each layer", "direct"))),
    (real_storage, "disk", lambda row: min(row["direct_gbps"]["min"], row["files_gbps"]["min"]) > 0),
    (real_storage, "restored", lambda row: row["system"] not in WHOLE or row["restored"] == 192 and row["bytes"] > 0),
], ids=["ttft", "at_once", "grid", "steps", "saving", "disk", "restored"])  # fmt: skip
def test_a_part_yields_rows_whose_mechanism_ran_and_a_table(module, part, is_right, wider, monkeypatch):
    monkeypatch.setattr(planned, "LENGTHS", [64, 128])
    monkeypatch.setattr(both_ends, "STEP", 32)
    monkeypatch.setattr(real_storage, "READ", 1 << 20)
    try:
        arguments = argparse.Namespace(name="wider", histories=[192], rounds=2, r=[1.0], share=[])
        rows = [*module.PARTS[part][0](wider, arguments, **SHORTER.get(part, {}))]
    except (OSError, ValueError) as reason:
        pytest.skip(f"no disk: {reason}")
    assert rows and all(is_right(row) for row in rows if "skipped" not in row)
    assert "| --- |" in module.report([dict(claim=part, model="wider", rows=rows)])


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
    for name, value in dict(SESSIONS=2, RUNS=1, ROUNDS=4, BEGINS=300, RATES=[16.0, 32.0], DIVERGED=0.0).items():
        monkeypatch.setattr(outside, name, value)
    model, *_ = checkpoint.load("classroom", "float32", "cpu")
    rows = [*outside.sessions(model, argparse.Namespace(name="classroom"))]
    assert [(row["system"], row["rate"], row["requests"]) for row in rows] == [(name, 16.0, 4) for name in ("02", "03", "04", "05")]
    assert [row["restored"] > 0 for row in rows] == [False, True, True, True]


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
    model, *_ = checkpoint.load("random:tiny:64", "float32", "cpu")
    with streams.emulate("early") as gpu:
        there, *_ = checkpoint.load("random:tiny:64", "float32", "cuda", on_host)
        assert all(size < 1 << 14 for way, size in gpu.copies if way == "to the device") and there.digest != model.digest
        assert all(torch.equal(tensor.cpu(), checkpoint.weights(model)[name]) for name, tensor in checkpoint.weights(there).items())
    assert there.config.max_position_embeddings == 64


# 3. The soak -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", soak.CACHES)
def test_a_short_soak_finds_no_error(cache):
    seen = soak.soak(cache, minutes=0.03)
    assert seen["answered"] and seen["restored"] and seen["hung up"] and not seen["wrong"] + seen["refused"]
