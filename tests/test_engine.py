"""The engine's side of the contract in common/cache.py, tested with small Caches and Runners."""

import importlib
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from common.cache import Cache, Match
from common.link import Transfer
from common.requests import Request, RequestError, Unavailable
from shell.cli import summary
from shell.frontend import result_json
from tests.support import engines, races, traffic
from tests.support.engines import ORACLE, ask, ask_and_evict, check_pools, draw, make, submit, tiny_model


class RowCache(Cache):
    """A Cache that keeps the K and V rows of every finished prompt, and restores any number of them, layer by layer.

    `deliver(transfer)` completes a Transfer. `later`: how often `waits` returns True. `computes`: restoring counts as
    computing rows. `broken`: is called after the first layer instead of the other layers."""

    def __init__(self, deliver=lambda transfer: transfer.finish(0.0, 0.0), seconds=0.0, computes=False, broken=None):
        self.deliver, self.seconds, self.computes, self.broken = deliver, seconds, computes, broken
        self.known, self.later = [], 0

    def finished(self, request):
        if request.computed >= request.prompt_tokens:
            tokens = request.tokens[: request.prompt_tokens]
            rows = self.pool.memory.flatten(2, 3)[:, :, slots_of(request, 0, len(tokens))]
            self.known.append((tokens, rows.clone()))  # [L, 2, T, KVH, hd]

    def match(self, request):
        shared = [(len(os.path.commonprefix([tokens, request.tokens[:-1]])), rows) for tokens, rows in self.known]
        same, rows = max(shared, key=lambda each: each[0], default=(0, None))
        if (tokens := same - request.computed) > 0:
            return Match(tokens, self.seconds, [rows], {"rows": tokens}, rows=tokens * self.computes)

    def waits(self, request):
        waits = self.later > 0 and self.match(request) is not None
        self.later -= waits
        return waits

    def transfer(self, label: str) -> Transfer:
        transfer = Transfer("load", label)
        self.deliver(transfer)
        return transfer

    def restore(self, request, restoration, match):
        for layer in range(len(self.model.layers)):
            yield self.transfer(f"layer {layer}")
            rows = match.blocks[0][layer, :, restoration.start : restoration.end]  # [2, T, KVH, hd]
            slots = slots_of(request, restoration.start, restoration.end)
            self.pool.memory[layer].flatten(1, 2)[:, slots] = rows
            restoration.layers += 1
            if self.broken:
                return self.broken()


def slots_of(request, start: int, end: int) -> torch.Tensor:
    return torch.tensor([request.table[at // 16] * 16 + at % 16 for at in range(start, end)])


def again(engine, prompt, new=6):
    """Ask, evict the device's pool, and ask with a longer prompt. Returns: the second request."""
    ask_and_evict(engine, prompt)
    request = ask(engine, prompt + [5, 6, 7], new)
    assert ORACLE.judge(request) == "equal"
    check_pools(engine)
    return request


PROMPT = draw(random.Random(0), 205)  # 12 blocks and 13 tokens


def test_a_match_may_end_and_begin_inside_a_block():
    engine = make(RowCache())
    assert again(engine, PROMPT).found == {"rows": 205}
    tail = ask(engine, PROMPT + [5, 6, 7, 8, 9], 4)  # 12 or 13 blocks are on the device, the rest is restored as rows
    assert tail.found["gpu"] % 16 == 0 and ORACLE.judge(tail) == "equal"


# 1. Waiting for the Cache ----------------------------------------------------------------------

@pytest.mark.parametrize("times, patience", [(5, 1e6), (1 << 60, -1e6)])
def test_a_request_that_waits_for_its_cache_lets_others_pass(times, patience):
    engine = make(cache := RowCache())
    ask_and_evict(engine, PROMPT)
    cache.later = times
    back, other = Request(PROMPT + [5, 6, 7], 4), Request([9, 8, 7], 4)
    back.received += patience
    engine.generate([back, other])
    assert back.found == {"rows": 205} and (cache.later == 0) == (patience > 0)
    assert other.times[0] < back.times[0] or patience < 0, "other requests pass the one that waits"
    assert ORACLE.judge(back) == ORACLE.judge(other) == "equal"


# 2. Rows of a step -----------------------------------------------------------------------------

def test_a_restoration_computes_at_most_the_budget_of_a_step():
    engine, layers = make(RowCache(computes=True), token_budget=64), []
    ask_and_evict(engine, PROMPT)
    submit(engine, Request([9, 8, 7], 12), steps=1)
    engine.submit(back := Request(PROMPT + [5, 6, 7], 4))
    while back.outcome is None:
        engine.step()
        layers.append(back.restoration.layers if back.restoration else 3)
    assert max(new - old for old, new in zip(layers, layers[1:])) == 1, "205 rows per layer and 64 * 3 per step: one layer a step"
    assert back.found == {"rows": 205} and ORACLE.judge(back) == "equal"
    check_pools(engine)


# 3. Failures -----------------------------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    (dict(broken=lambda: None), "ended early: computed"), (dict(broken=lambda: 1 / 0), "by zero: computed"),
    (dict(deliver=lambda transfer: None), "layer 0 is late: computed")])  # fmt: skip
def test_a_failed_restoration_is_recomputed(options, words):
    request = again(make(RowCache(**options), always_restore=False), PROMPT)
    assert not request.found and request.decisions[-1].endswith(words)


def test_a_copy_that_fails_between_two_steps_causes_no_pause():
    engine, woken = make(RowCache(deliver=lambda transfer: transfer.finish(0.0, 0.0, RuntimeError("no")))), []
    ask_and_evict(engine, PROMPT)
    engine.submit(request := Request(PROMPT + [5, 6, 7], 4))
    engine.wake.clear()  # no other request arrives
    engine.wake.wait = lambda seconds=None: woken.append(engine.wake.is_set())
    engines.until_over(engine, request)
    assert "failed (no): computed" in request.decisions[-1] and woken and all(woken)


def test_a_failed_step_ends_its_requests_with_503():
    engine = make("host")

    def fail_late(*step):  # after all layers are computed
        engines.paged.Runner.forward(engine.runner, *step)
        del engine.runner.forward
        raise RuntimeError("out of luck")

    asked = [Request(PROMPT[::-1], 4), Request([3, 4, 5], 4)]
    submit(engine, *asked)
    engine.runner.forward = fail_late
    engines.until_over(engine, *asked)
    assert all(isinstance(request.outcome, Unavailable) and "out of luck" in str(request.outcome) for request in asked)
    assert Unavailable.status == 503
    assert ORACLE.judge(ask(engine, PROMPT)) == "equal"
    check_pools(engine)


ranked = importlib.import_module("09_tensor_parallel")
SICK = 299  # a token whose embedding is not finite


@pytest.mark.parametrize("chapter", ["01", *engines.CACHES, *engines.RUNNERS, "09"])
def test_logits_that_are_not_finite_end_their_request_and_no_other(chapter, monkeypatch):
    model = tiny_model(0, 4, on_host=True) if chapter in engines.RUNNERS else tiny_model()
    monkeypatch.setattr(model.embedding, "data", model.embedding.data.clone())
    model.embedding.data[SICK] = float("nan")
    together = ranked.KVCache(ranked.Ranks(), 64, engines.BANDWIDTH)
    engine = engines.baseline.Engine(model) if chapter == "01" else make(together if chapter == "09" else chapter)
    prompts = [[token % SICK for token in draw(random.Random(seed), 40)] for seed in range(4)]
    ways = [dict(), dict(temperature=1.0, seed=3), dict(), dict(temperature=0.5, top_k=9, seed=4)]
    asked, alone = ([Request(prompt, 6, **way) for prompt, way in zip(prompts, ways)] for _ in range(2))
    sick = [Request(prompt[:20] + [SICK], 6, **way) for prompt, way in zip(prompts, ways)]  # NaN in their first or second block
    submit(engine, *(request for pair in zip(asked, sick) for request in pair))
    engines.until_over(engine, *asked, *sick)
    for request in sick:
        assert isinstance(request.outcome, RequestError) and not request.new, "no token is sampled from NaN"
        assert "not finite numbers; choose another --dtype." in str(request.outcome)
    engines.baseline.Engine(model).generate(alone)
    assert [request.new for request in asked] == [request.new for request in alone]


@pytest.mark.parametrize("broken", ["submitted", "match", "draw", "push", "finished", "save"])
def test_an_error_in_work_for_one_request_ends_that_one_at_most(broken):
    engine, request, other = make(cache := RowCache()), Request(PROMPT, 6), Request(PROMPT[::-1], 6)
    if broken == "push":
        request.writer = SimpleNamespace(push=lambda *_: 1 / 0)
    elif broken == "draw":
        request.temperature, request.generator = 1.0, property(lambda: 1 / 0)
    else:  # fails for this request, or in each step
        plain = getattr(cache, broken)
        setattr(cache, broken, lambda one: 1 / 0 if one is request or broken == "save" else plain(one))
    submit(engine, request, other)
    engines.until_over(engine, request, other)
    assert ORACLE.judge(other) == "equal" and engine.counts["failed"] == (broken != "save")
    words = "This request failed (" + ("TypeError: " if broken == "draw" else "ZeroDivisionError: division by zero); ask again.")
    assert str(request.outcome).startswith(words) or broken == "save" and ORACLE.judge(request) == "equal"
    check_pools(engine)


# 4. Load or compute ----------------------------------------------------------------------------

def test_a_load_slower_than_computing_is_declined_with_a_reason():
    engine = make(RowCache(seconds=1e3), always_restore=False)
    request = again(engine, PROMPT)
    (words,) = request.decisions
    assert words.startswith("205 tokens offered (rows): loading 1000000.0 ms, computing ")
    assert words.endswith(": computed")
    assert result_json(request)["decisions"] == [words] and words in summary(request)
    assert engine.counts["declined"] == 1 and not request.found
    always = make(RowCache(seconds=1e3))
    assert again(always, PROMPT).found == {"rows": 205}


# 5. Sleeping -----------------------------------------------------------------------------------

def sleeps(engine, during) -> list:
    """Call `during(count)` before each sleep of an engine. Returns: the list of its timeouts, which grows."""
    slept, wait = [], engine.wake.wait

    def sleep(seconds=None):
        slept.append(seconds)
        during(len(slept))
        return wait(seconds)

    engine.wake.wait = sleep
    return slept


@pytest.mark.parametrize("made", [make, lambda: engines.baseline.Engine(tiny_model())], ids=["02", "01"])
def test_an_idle_engine_sleeps_until_a_request_comes(made):
    engine, request = made(), Request(PROMPT, 1)
    slept = sleeps(engine, lambda count: threading.Timer(0.05, engine.submit, (request,)).start())
    engines.until_over(engine, request)
    assert slept == [None], "the engine sleeps once, without a timeout"


def test_an_engine_that_waits_for_a_copy_sleeps():
    """Each copy arrives when the engine has slept three times."""
    engine = make(RowCache(lambda transfer: issued.append(transfer)))
    ask_and_evict(engine, PROMPT)
    issued = []
    slept = sleeps(engine, lambda count: issued and count % 3 == 0 and issued.pop(0).finish(0.0, 0.0))
    request = ask(engine, PROMPT + [5])
    assert request.found == {"rows": 205} and slept == [0.02] * 9, "the engine sleeps between its checks"


def test_explain_prints_a_line_for_each_event(capsys):
    engine = make(engines.offload.HostCache(64, 2e9))
    engine.explain = True
    again(engine, PROMPT)
    said = capsys.readouterr().err
    assert all(f" {verb} " in said for verb in ("admit", "compute", "finish", "restore"))
    assert "12 blocks" in said or "13 blocks" in said


# 6. Without a guard, answers are wrong, or something is left behind ----------------------------

def test_traffic_fails_without_a_wait_for_copies(monkeypatch):
    races.without(monkeypatch, engines.hybrid.HybridRunner, "forget", "transfer.wait()", "pass")
    try:
        counts = traffic.run("hybrid", 6000, 0, 0.01, until_wrong=True)  # most races show at once
    except Exception:  # an error of the engine counts, too
        return
    assert counts["wrong"] or counts["failed"]


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_gives_a_wrong_answer_only_without_its_guard(race, capsys):
    races.show(race, rounds=20)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
