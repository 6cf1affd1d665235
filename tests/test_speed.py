"""What is believed about the machine: from the fastest passes, whatever else runs beside them."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from support.engines import ask, ask_and_evict, check_pools, draw, evict, make, offload, settle, tiny_model

from common import estimates as module
from common.cache import Match, Restoration
from common.estimates import fastest_layer, flops
from common.link import LAST, Speed
from common.requests import HungUp, Request
from shell.modelled_link import Bandwidth

LAYER = 0.01  # seconds, undisturbed


class Machine:
    """A processor and its clock: a layer takes LAYER seconds, and longer where the test says so."""

    def __init__(self, monkeypatch, slowness=lambda layer: 1.0):
        self.now, self.layers, self.slowness = 0.0, 0, slowness
        clock = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(module, "time", clock)

    def sleep(self, seconds):
        self.now += seconds

    def forward(self, lap, depth=3):
        for _ in range(depth):
            lap()
            self.layers += 1
            self.now += LAYER * self.slowness(self.layers)


def test_the_fastest_of_the_last_passes_counts():
    measured = Speed(math.inf)
    assert measured.value == math.inf and measured.seconds(5.0) == 0.0
    assert Speed(0.0).seconds(5.0) == math.inf, "not measured"
    for units in (8.0, 4.0, 2.0):
        measured.note(units, 2.0)
    assert measured.value == 4.0 and measured.seconds(8.0) == 2.0
    for _ in range(LAST):
        measured.note(1.0, 1.0)
    assert measured.value == 1.0, "it has been slower for long"
    measured.forget()
    assert measured.value == math.inf


@pytest.mark.parametrize("slowness", [
    lambda layer: 1.0, lambda layer: 1.0 if layer % 5 == 0 else 3.0, lambda layer: 9.0 if layer < 4 else 1.0,
    lambda layer: 0.1 if layer == 1 else 1.0,
], ids=["alone", "beside a busy process", "at first", "the first one touches memory"])  # fmt: skip
def test_one_undisturbed_layer_is_enough(monkeypatch, slowness):
    machine = Machine(monkeypatch, slowness)
    assert fastest_layer(machine.forward, "cpu") == pytest.approx(LAYER)
    assert machine.layers <= 12, "and it ends soon"


def test_passes_are_spread_over_a_while_and_somebody_who_comes_ends_them(monkeypatch):
    machine = Machine(monkeypatch)
    monkeypatch.setattr(module, "SPREAD", 0.5)
    fastest_layer(lambda lap: machine.forward(lap, 1), "cpu")
    assert machine.now >= 0.5, "also those of a model of one layer"
    with pytest.raises(ZeroDivisionError):
        fastest_layer(machine.forward, "cpu", lambda: 1 / 0)


# Load or compute, on a machine that changes ------------------------------------------------------


class Changing:
    """An engine of chapter 03 whose processor and link are as slow as the test says. Computing its 192 tokens
    takes `computing` undisturbed seconds, and its clock runs only while it is idle."""

    computing = 1.0

    def __init__(self, monkeypatch, loading: float):
        self.now, self.busy = 100.0, 1.0  # how many times as long the processor takes
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, sleep=None))
        monkeypatch.setattr(module, "fastest_layer", lambda *given: self.busy * self.layer)
        model = tiny_model()
        self.layer = self.computing * flops(model.config, 0, 200) / flops(model.config, 0, 192) / 3
        monkeypatch.setattr(module, "ROWS", 200)
        self.engine = make(cache := offload.HostCache(64, 1e9), always_restore=False)
        self.estimates, self.link = self.engine.behind.estimates, cache.load_link
        self.bytes = 12 * cache.host.block_bytes
        self.link_takes(loading)
        self.estimates.idle()

    def link_takes(self, seconds: float):
        self.link.bandwidth = Bandwidth(self.bytes / seconds)

    def load(self, seconds: float):
        """A restoration took so long, its three layers over the link as well."""
        for _ in range(3):
            self.link.measured.note(self.bytes / 3, seconds / 3)

    def prefill(self, seconds: float):
        self.estimates.learn([(Request([0] * 192, 1, computed=192), 192)], seconds)

    def loads(self) -> bool:
        return self.engine.behind.decide(Request([0] * 193, 1), Match(192, self.link.seconds(self.bytes), []))

    def rest(self):
        """Five idle seconds."""
        for _ in range(6):
            self.estimates.idle()
            self.now += 1.0


def test_one_bad_sample_decides_nothing(monkeypatch):
    machine = Changing(monkeypatch, loading=0.5)
    machine.prefill(0.01 + machine.computing)
    machine.prefill(10.0)
    machine.load(0.5)
    machine.link.measured.note(1.0, 10.0)
    machine.estimates.paces.append(9.0)
    assert machine.loads()


def test_a_machine_that_was_busy_from_the_start_is_quiet_and_is_busy_again(monkeypatch):
    monkeypatch.setattr(Changing, "computing", 3.0)  # as it is measured, and believed
    machine = Changing(monkeypatch, loading=1.5)
    machine.rest()
    assert machine.loads() and not machine.estimates.doubtful
    machine.busy = 1 / 3
    machine.prefill(1.0)
    machine.rest()
    assert not machine.loads(), "one prompt has said how fast it is"
    machine.rest()
    machine.busy = 1.0
    assert not machine.loads(), "as believed until now"
    machine.rest()
    assert machine.loads()


def test_a_link_that_is_throttled_for_a_while(monkeypatch):
    machine = Changing(monkeypatch, loading=0.1)
    machine.rest()
    machine.link_takes(2.0)
    for _ in range(3):
        machine.load(2.0)
    assert not machine.loads()
    machine.rest()
    assert not machine.loads(), "it still is"
    machine.link_takes(0.1)
    machine.rest()
    assert machine.loads()


def test_the_pace_corrects_every_estimate_until_the_engine_has_measured_again(monkeypatch):
    machine = Changing(monkeypatch, loading=0.5)
    machine.rest()
    for number in range(3):  # twice as long as estimated, alone
        restoration = Restoration(Request([0] * 193, 1), Match(192, 0.5, []), 0.0, layers=3, spent=1.0)
        restoration.request.computed = 192
        machine.engine.running = [restoration.request][number % 2 :]  # none: it ends with its first token
        machine.estimates.learn_pace(restoration)
    machine.engine.running = []
    assert not machine.loads() and machine.estimates.doubtful
    machine.rest()
    assert machine.loads()


@pytest.mark.parametrize("layers, limit, alone", [(2, 0, True), (3, 128, True), (3, 0, False)])
def test_a_restoration_that_was_not_whole_or_not_alone_says_nothing_about_the_pace(monkeypatch, layers, limit, alone):
    machine = Changing(monkeypatch, loading=0.5)
    request, other = Request([0] * 193, 1), Request([0], 1)
    machine.engine.running = [request] if alone else [other]  # as when it ends with its first token
    restoration = Restoration(request, Match(192, 0.5, []), 0.0, layers=layers, spent=9.0)
    restoration.limit, request.computed = limit, 192 if layers == 3 else limit
    for _ in range(8):  # one alone would decide nothing
        machine.estimates.learn_pace(restoration)
    machine.engine.running = []
    assert machine.loads()


def test_on_a_gpu_a_pass_takes_its_launches_and_its_operations(monkeypatch):
    engine, rate = make(offload.HostCache(64, 1e9), token_budget=256), 1e9
    config, estimates = engine.model.config, engine.behind.estimates

    def seconds(tokens):
        return 0.01 + flops(config, 0, tokens) / rate

    def layer(run, *_):
        ((request, rows),) = run.args[0]
        return seconds(rows) / 3

    monkeypatch.setattr(module, "fastest_layer", layer)
    monkeypatch.setattr(engine.model, "device", torch.device("cuda"))
    estimates.measure_computing()
    assert estimates.seconds_to_compute(0, 200) == pytest.approx(seconds(200))
    assert estimates.seconds_to_compute(0, 400) == pytest.approx(0.01 + seconds(400)), "two passes"
    estimates.learn([(Request([0] * 150, 1, computed=150), 150)], seconds(150) / 2)
    assert estimates.seconds_to_compute(0, 200) == pytest.approx(seconds(200))
    monkeypatch.setattr(module, "fastest_layer", lambda *_: 0.01)  # nothing but launches
    estimates.measure_computing()
    assert 0.03 <= estimates.seconds_to_compute(0, 256) <= 0.035
    assert engine.pool.free.count(1) == 64


def test_a_real_restoration_is_noted():
    engine = make(offload.HostCache(64, 1e7), always_restore=False)
    engine.behind.estimates.learn = lambda *work: None
    engine.behind.estimates.computing.forget()  # so it is tried
    prompt = draw(random.Random(0), 200)
    ask_and_evict(engine, prompt)
    engine.behind.estimates.paces.extend(8 * [0.0])
    assert ask(engine, prompt).found == {"cpu": 192}
    settle(engine)
    assert engine.behind.estimates.paces[-1] >= 1.0


# Beliefs that refuse -----------------------------------------------------------------------------

BELIEFS = {  # what was slow for two restorations -> of an engine, where that is noted
    "link": lambda engine: engine.behind.cache.load_link.measured,
    "projecting": lambda engine: engine.behind.cache.projecting,
    "reading": lambda engine: getattr(engine.behind.cache.storage, "storages", [engine.behind.cache.storage])[0].measured,
    "pace": lambda engine: SimpleNamespace(note=lambda *slow: engine.behind.estimates.paces.append(1e9)),
}


@pytest.mark.parametrize("name, belief", [
    ("host", "link"), ("hidden", "link"), ("planned", "link"), ("tiered", "link"), ("hidden", "projecting"), ("files", "reading"),
    ("both", "reading"), ("tiered", "reading"), ("host", "pace"), ("both", "pace")])  # fmt: skip
def test_what_was_slow_is_loaded_again_within_ten_asks_though_the_engine_is_never_idle(name, belief):
    engine, prompt = make(name, always_restore=False), draw(random.Random(1), 450)
    engine.behind.estimates.learn = engine.behind.estimates.idle = lambda *work: None  # as it is under load
    engine.behind.estimates.computing.forget()
    engine.behind.estimates.computing.note(flops(engine.model.config, 0, 450), 10.0)
    ask(engine, prompt, 1)
    settle(engine)
    for _ in range(8):
        BELIEFS[belief](engine).note(1.0, 1e3)
    tiers = []
    for _ in range(10):
        evict(engine)
        if belief == "reading" and "host" in engine.pools:
            engine.evict("host")
        tiers.append(set(ask(engine, prompt, 1).found) - {"gpu"})
    check_pools(engine)
    read_ahead = (name, belief) == ("tiered", "reading")  # may have come before it could be refused
    assert tiers[-1] and (read_ahead or not tiers[0]), "refused at first"
    engine.close()


@pytest.mark.parametrize("name", ["host", "hidden", "planned", "tiered"])
def test_copies_that_nobody_waits_for_any_more_are_in_no_estimate(name):
    engine, prompt = make(name), draw(random.Random(1), 450)
    ask_and_evict(engine, prompt, 1)
    link = engine.behind.cache.load_link
    link.bandwidth = Bandwidth(1e5)  # a copy takes a second
    engine.submit(request := Request(prompt, 1))
    engine.take_arrivals()
    engine.admit(request)
    engine.behind.begin(request)
    every = link.settle()
    engine.finish(request, HungUp("gone"))
    assert link.settle() <= every / 2 > 0, "the one that has begun"
    link.close()
    check_pools(engine)
    engine.close()
