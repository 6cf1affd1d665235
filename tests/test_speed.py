"""Estimated speeds: measured once, learned from prefills and copies, and tried again after refusals."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common.cache import Match
from common.estimates import MAX_WAIT, Estimates
from common.link import NUM_SAMPLES, Speed, Transfer
from common.requests import Request
from shell import machine as module
from shell import modelled_link
from shell.machine import flops, measure
from shell.modelled_link import LikeA100
from tests.support import engines
from tests.support.engines import ask, check_pools, draw, evict, make, offload, tiny_model


def test_a_speed_is_the_fastest_of_eight_samples_of_the_last_minute(monkeypatch):
    now, measured = [0.0], Speed(9.0)
    monkeypatch.setattr("common.link.time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert measured.value == 9.0, "an unmeasured speed"
    for units in (8.0, 4.0, 2.0):
        measured.record(units, 2.0)
    assert measured.value == 4.0
    for _ in range(NUM_SAMPLES):
        measured.record(1.0, 1.0)
    assert measured.value == 1.0, "all recent samples are slower"
    now[0] = 61.0
    assert measured.value == 9.0


@pytest.mark.parametrize("slowness", [
    lambda call: 1.0, lambda call: 1.0 if call % 5 == 0 else 3.0, lambda call: 9.0 if call < 8 else 1.0,
    lambda call: 0.1 if call < 2 else 1.0,
], ids=["alone", "beside a busy process", "at first", "the first ones touch memory"])  # fmt: skip
def test_one_undisturbed_call_suffices_to_measure(monkeypatch, slowness):
    """A layer takes 6 ms and the other work 2 ms, times `slowness` of the call."""
    now, calls, model = [0.0], [], tiny_model(5)

    def take(seconds):
        now[0] += seconds * slowness(len(calls))
        calls.append(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: now[0], sleep=lambda seconds: None))
    monkeypatch.setattr(model.layers[0].__class__, "forward", lambda *given: take(0.006))
    speed, work = measure(model, lambda: take(0.002))
    rows = min(module.ROWS, model.config.max_position_embeddings)
    operations = flops(model.config, 0, rows) / len(model.layers)
    assert speed == pytest.approx(operations / 0.006) and work == pytest.approx(operations / 3)


# Load or compute, on a machine that changes ------------------------------------------------------


class Changing:
    """Estimates whose first values for 192 tokens are `computing` and `loading` seconds."""

    def __init__(self, loading: float, computing: float = 1.0):
        self.flops = partial(flops, tiny_model().config)
        self.match = Match(192, loading, [], {"cpu": 192})
        self.estimates = Estimates(SimpleNamespace(fastest=self.flops(0, 192) / computing, flops=self.flops))
        self.estimates.engine = make()

    def prefill(self, seconds: float, rows: int = 192):
        self.estimates.learn([(Request([0] * 192, 1, computed=192), rows)], seconds)

    def limit(self) -> float:
        """Return the seconds that loading may take, or 0.0 if computing is faster."""
        return self.estimates.load_or_compute(Request([0] * 193, 1), self.match)


def test_a_faster_prefill_replaces_the_measured_speed():
    machine = Changing(loading=1.5, computing=3.0)
    assert machine.limit()
    machine.prefill(1.0)
    assert not machine.limit()
    for _ in range(NUM_SAMPLES):
        machine.prefill(3.0)
    assert machine.limit() and machine.estimates.engine.counts["declined"] == 1


def test_a_prefill_of_few_rows_counts_only_if_it_is_faster():
    """Thus an engine also learns of a faster machine if every request is a hit and computes few rows."""
    machine = Changing(loading=0.5)
    few = machine.flops(176, 192) / machine.flops(0, 192)  # share of the seconds of 192 tokens
    for _ in range(NUM_SAMPLES):
        machine.prefill(9.0 * few, rows=16)
    assert machine.limit() == pytest.approx(1.0), "a load may take as long as computing"
    machine.prefill(few / 4, rows=16)
    assert not machine.limit()
    machine.estimates.always = True
    assert machine.limit() == MAX_WAIT, "with --always-restore, a load may take a minute"


def test_a_pass_of_few_operations_leaves_a_core_to_copies(monkeypatch):
    model, set_to = tiny_model(7), []
    monkeypatch.setattr(modelled_link, "FEW", flops(model.config, 0, 64))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: (set_to or [4])[-1])
    engine = make(cache := offload.HostCache(64, 1e9), model=model)
    run = lambda rows: engine.runner.compute(engines.paged.Batch(engine.pool, [(Request([5] * rows, 1, table=[*range(8)]), rows)]), len(model.layers))  # noqa: E731
    with torch.inference_mode():
        run(8)
        assert not set_to, "nothing is copied"
        cache.load_link.in_flight.append(copy := Transfer("load", "a copy"))
        run(8)
        assert set_to == [3, 4], "while a copy is in flight, a pass of few operations uses one thread less, and gives it back"
        run(100)
        copy.finish(0.0, 0.0)
        run(8)
    assert set_to == [3, 4]


@pytest.mark.parametrize("busy", [1.0, 5.0])
def test_the_default_link_has_one_speed_beside_busy_processes(monkeypatch, busy):
    """Only the processor time of one thread counts; `busy` changes the wall time.

    Projecting takes 32 / 24 of a transfer, as for Llama-2-7B on an A100: it is as fast as a link of 24 GB/s, and the
    link has 32 GB/s."""
    now, model = [0.0], tiny_model(5)
    clock = SimpleNamespace(thread_time=lambda: now[0], perf_counter=lambda: busy * now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(model.layers[0].__class__, "project_kv", lambda *given: now.__setitem__(0, now[0] + 0.002) or (torch.zeros(512, 2, 16),) * 2)
    rows, link = min(module.ROWS, model.config.max_position_embeddings), LikeA100(model)
    assert link.value == pytest.approx(32 / 24 * 64 * 4 * rows * torch.get_num_threads() / 0.002)


# Speeds that refuse ------------------------------------------------------------------------------

LANES = {  # Cache -> function(engine) that returns the slow lane's measured speed
    "hidden": lambda engine: engine.lower_tier.cache.projecting,
    "files": lambda engine: engine.lower_tier.cache.storage.storages[0].measured,
    "tiered": lambda engine: engine.lower_tier.cache.storage.measured,
}


@pytest.mark.parametrize("name", LANES)
def test_a_wrong_speed_is_measured_again_after_its_samples_expire(name, monkeypatch):
    engine, prompt = make(name, always_restore=False), draw(random.Random(1), 450)
    engine.lower_tier.estimates.learn = lambda *work: None
    engine.lower_tier.estimates.computing = Speed(flops(engine.model.config, 0, 450) / 1e3)  # computing takes 1,000 s
    ask(engine, prompt, 1)
    for _ in range(8):
        LANES[name](engine).record(1.0, 1e3)
    tiers = []
    for _ in range(2):
        evict(engine)
        if name != "hidden" and "host" in engine.pools:
            engine.evict("host")
        tiers.append(set(ask(engine, prompt, 1).found) - {"gpu"})
        monkeypatch.setattr("common.link.FRESH_SECONDS", 0.0)
    check_pools(engine)
    assert tiers[1], "the last request is restored"
    assert not tiers[0] or name == "tiered", "the first one is computed; with read-ahead, pages may arrive before"
    engine.close()
