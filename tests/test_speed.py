"""Estimated speeds: measured once, learned from prefills and copies, and tried again after refusals."""

import math
import random
import time
from types import SimpleNamespace

import pytest
import torch

from common.cache import Match
from common.estimates import MAX_WAIT
from common.link import NUM_SAMPLES, Speed
from common.requests import Request
from shell import machine as module
from shell.machine import flops, measure
from shell.modelled_link import Bandwidth, LikeA100
from tests.support.engines import ask, ask_and_evict, check_pools, draw, evict, make, offload, tiny_model


def test_the_fastest_of_the_last_passes_counts():
    measured = Speed(math.inf)
    assert measured.value == math.inf and measured.seconds(5.0) == 0.0
    assert Speed(0.0).seconds(5.0) == math.inf, "an unmeasured speed"
    for units in (8.0, 4.0, 2.0):
        measured.record(units, 2.0)
    assert measured.value == 4.0 and measured.seconds(8.0) == 2.0
    for _ in range(NUM_SAMPLES):
        measured.record(1.0, 1.0)
    assert measured.value == 1.0, "all recent samples are slower"
    measured.samples.clear()
    assert measured.value == math.inf


@pytest.mark.parametrize("slowness", [
    lambda call: 1.0, lambda call: 1.0 if call % 5 == 0 else 3.0, lambda call: 9.0 if call < 8 else 1.0,
    lambda call: 0.1 if call < 2 else 1.0,
], ids=["alone", "beside a busy process", "at first", "the first ones touch memory"])  # fmt: skip
def test_one_undisturbed_call_of_each_is_enough_to_measure(monkeypatch, slowness):
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
    """An engine of chapter 03 whose first estimates for 192 tokens are `computing` and `loading` seconds."""

    def __init__(self, loading: float, computing: float = 1.0):
        model = tiny_model(6)
        model.machine = SimpleNamespace(fastest=flops(model.config, 0, 192) / computing, projecting=1e3)
        self.engine = make(cache := offload.HostCache(64, 1e9), model=model, always_restore=False)
        self.estimates, self.link, self.auto = self.engine.lower_tier.estimates, cache.load_link, LikeA100(model)
        self.bytes = 12 * cache.host.block_bytes
        self.link.bandwidth = Bandwidth(self.bytes / loading)

    def prefill(self, seconds: float, rows: int = 192):
        self.estimates.learn([(Request([0] * 192, 1, computed=192), rows)], seconds)

    def match(self) -> Match:
        return Match(192, self.link.seconds(self.bytes), [])

    def loads(self) -> bool:
        match = self.match()
        return bool(self.engine.lower_tier.decide(Request([0] * 193, 1), match)) and not match.trial


def test_a_prefill_that_is_faster_than_what_was_measured_at_a_busy_start_is_believed_at_once():
    machine = Changing(loading=1.5, computing=3.0)
    assert machine.loads()
    before = machine.auto.value
    machine.prefill(1.0)
    assert not machine.loads() and machine.auto.value == pytest.approx(3 * before), "the default link gets faster, too"
    for _ in range(NUM_SAMPLES):
        machine.prefill(3.0)
    assert machine.loads() and machine.auto.value == pytest.approx(3 * before), "the default link never gets slower"


def test_few_rows_count_only_if_they_were_faster_than_believed():
    """Thus an engine also learns of a faster machine if every request is a hit and computes few rows."""
    machine = Changing(loading=0.5)
    few = flops(machine.engine.model.config, 176, 192) / flops(machine.engine.model.config, 0, 192)  # share of the seconds of 192 tokens
    for _ in range(NUM_SAMPLES):
        machine.prefill(9.0 * few, rows=16)
    assert machine.loads()
    machine.prefill(few / 4, rows=16)
    assert not machine.loads()


def test_of_refusals_in_a_row_each_eighth_is_tried_for_a_tenth_of_computing():
    machine, request = Changing(loading=5.0), Request([0] * 193, 1)
    weighed = []
    for _ in range(17):
        match = machine.match()
        most, words = machine.estimates.load_or_compute(request, match)
        weighed.append((round(most, 6), match.trial, words.split()[-1]))
    refused, tried = (0.0, False, "computed"), (0.1, True, "tried")
    assert weighed == 7 * [refused] + [tried] + 7 * [refused] + [tried, refused]
    assert machine.engine.counts["declined"] == 0
    machine.estimates.always = True
    assert machine.estimates.load_or_compute(request, machine.match())[0] == MAX_WAIT


def test_a_trial_that_is_late_costs_its_tenth_and_no_grace():
    engine = make(cache := offload.HostCache(64, 1e9), always_restore=False)
    prompt = draw(random.Random(2), 300)
    ask_and_evict(engine, prompt, 1)
    cache.load_link.bandwidth = Bandwidth(1e4)  # a restoration takes minutes
    cache.load_link.measured.samples.clear()
    seen, issue = [], cache.restore

    def restore(request, restoration, match):
        tenth = engine.lower_tier.estimates.seconds_to_compute(0, 288) / 10
        seen.append((restoration.grace, restoration.deadline <= time.perf_counter() + tenth))
        return issue(request, restoration, match)

    cache.restore = restore
    for number in range(8):
        request = ask(engine, prompt, 1, cache_salt="", offload_after=False)
        assert request.source == "miss" and len(seen) == (number == 7)
        engine.evict("device")
    assert seen == [(0.0, True)]
    assert any("is late: computed" in words for words in request.decisions)
    cache.close()


def test_a_pass_of_few_rows_that_waits_for_copies_leaves_a_core_to_them(monkeypatch):
    set_to, prompt = [], draw(random.Random(3), 300)
    for name, less in ("host", True), ("hidden", False):
        engine = make(name)
        ask_and_evict(engine, prompt, 1)
        engine.lower_tier.threads, used = 4, []
        monkeypatch.setattr(torch, "set_num_threads", set_to.append)
        forward = engine.runner.forward
        engine.runner.forward = lambda work, before, run=forward, used=used: (run(work, before), used.append(set_to[-1]))[0]
        assert ask(engine, prompt, 3).found and set_to[-1] == 4, "all threads are used again at the end"
        assert (used[0] == 3) == less and used[1:] == [4, 4], "a pass leaves a core free only if it neither projects nor decodes"
        assert set_to[1::2] == len(used) * [4], "all threads are used after each pass, for projections between passes"
        set_to.clear()
        monkeypatch.undo()
        check_pools(engine)


# Speeds that refuse ------------------------------------------------------------------------------

BELIEFS = {  # the slow part of eight restorations -> function(engine) that returns its measured speed
    "link": lambda engine: engine.lower_tier.cache.load_link.measured,
    "projecting": lambda engine: engine.lower_tier.cache.projecting,
    "reading": lambda engine: getattr(engine.lower_tier.cache.storage, "storages", [engine.lower_tier.cache.storage])[0].measured,
}


@pytest.mark.parametrize("name, belief", [
    ("host", "link"), ("hidden", "link"), ("planned", "link"), ("tiered", "link"), ("hidden", "projecting"), ("files", "reading"),
    ("both", "reading"), ("tiered", "reading")])  # fmt: skip
def test_what_was_slow_is_loaded_again_within_ten_asks(name, belief):
    engine, prompt = make(name, always_restore=False), draw(random.Random(1), 450)
    engine.lower_tier.estimates.learn = lambda *work: None
    engine.lower_tier.estimates.computing.record(flops(engine.model.config, 0, 450), 1e3)
    ask(engine, prompt, 1)
    for _ in range(8):
        BELIEFS[belief](engine).record(1.0, 1e3)
    if name == "both":  # otherwise prefill may compute all tokens before the first read completes
        reads, forward = engine.lower_tier.cache.storage.storages[0].reader.in_flight, engine.runner.forward
        engine.runner.forward = lambda *given: ([read.completed.wait(60) for read in [*reads][:1]], forward(*given))[1]
    tiers = []
    for _ in range(10):
        evict(engine)
        if belief == "reading" and "host" in engine.pools:
            engine.evict("host")
        tiers.append(set(ask(engine, prompt, 1).found) - {"gpu"})
    check_pools(engine)
    read_ahead = (name, belief) == ("tiered", "reading")  # pages may arrive before the engine can refuse them
    assert tiers[-1] and (read_ahead or not tiers[0]), "the first requests are refused, and the last one is restored"
    engine.close()
