"""Chapter 05's engine: layers that are kept and come back in three ways, with the tokens and the keys and values of chapter 01
as the yardstick."""
import math
import random
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from legacy import link as links
from legacy.app import HungUp
from legacy.tests import test_hidden as of_04
from legacy.tests.conftest import chapter
from legacy.tests.test_hidden import (
    CHUNK,
    OTHER,
    PROMPT,
    StepLink,
    Traffic,
    answered,
    ask,
    asked,
    device_kv,
    difference,
    end,
    find,
    kept,
    nothing_is_lost,
    on_its_way,
    one_layer_at_a_time,
    steps,
    true_kv,
    truth,
    until_preempted,
)
from legacy.tests.test_paged import NAN, happened, ids

paged, offload, hidden, bubble = (chapter(name) for name in (
    "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free"))
Plan, Profile, Run, LayerStore = bubble.Plan, bubble.Profile, bubble.Run, bubble.LayerStore
right, models, nothing_is_late = of_04.right, of_04.models, of_04.nothing_is_late                                      # fixtures
LONG = ids(1, 460)                 # seven chunks, and twelve tokens
of_04.FAMILIES.update({
    "one KV head": dict(num_key_value_heads=1), "wide heads": dict(num_key_value_heads=4, head_dim=32),
    "six": dict(num_hidden_layers=6, max_position_embeddings=1024),
    "six, one KV head": dict(num_hidden_layers=6, max_position_embeddings=1024, num_key_value_heads=1)})


# An engine that plans what the test says --------------------------------------------------------------------------

def costing(io_hidden=1.0, io_kv=2.0, compute_token=1e4, compute_hidden=1.0, bytes_per_second=1e9) -> Profile:
    """Seconds for 1024 tokens in one layer, in proportion; as it stands, nothing is slower than to compute."""
    return Profile([1024], [io_hidden], [io_kv], [compute_token], [compute_hidden], bytes_per_second, bytes_per_second)


class NotedLink(StepLink):
    """What it says of its speed, it has noted."""
    speeds = True


def keep_as(engine, plan: Plan):
    """Whatever it costs."""
    engine.plan = lambda tokens: (plan, 1.0)


def build(base, plan=None, link=NotedLink, known=None, **options):
    """An engine over two links of this kind. Memory that nobody wrote holds NaN. With a plan, what is kept comes back as it is
    kept, unless the mode is auto: then more of it may be recomputed."""
    mode = "auto" if plan is None else "naive" if plan.split is None else "token-wise"
    options = {"mode": mode, "blocks": 64, "block_size": 16, "cpu_chunks": 32, "save_threads": 2, "bytes_per_second": 1e9,
               **options}
    with mock.patch.object(hidden, "Link", link):
        engine = bubble.Engine(base.model, base.tokenizer, base.end_tokens, known=known or costing(), **options)
    engine.learn = lambda *_: None                                             # real seconds say nothing about these costs
    engine.counters = lambda plain=engine.counters: dict(                      # with what the helpers of chapter 04 ask for
        plain(), chunks=engine.chunks.size, chunks_free=len(engine.chunks.free))
    if plan:
        keep_as(engine, plan)
    rows = torch.empty(4096, engine.landing.memory.shape[1], dtype=base.model.dtype)
    engine.saver.buffer, engine.saver.taken_rows = links.RowBuffer(rows), links.as_integers(rows)
    for memory in (engine.pool.kv, engine.chunks.kv, engine.landing.memory, rows):
        memory.fill_(NAN)
    return engine


@pytest.fixture
def make(tiny_engine):
    """make(plan, link, blocks=..., ...) -> an engine on the tiny model; its threads end with the test."""
    engines = []

    def engine(*arguments, base=tiny_engine, **options):
        engines.append(build(base, *arguments, **options))
        return engines[-1]
    yield engine
    for engine in engines:
        end(engine)


def letters(engine, tokens) -> list[str]:
    """Of the chunks of these tokens, all of which are kept."""
    return [engine.chunks.letters[slot] for slot in find(engine, tokens)]


def size_of(engine, letter: str, rows: int = CHUNK) -> int:
    """Bytes of a layer of so many tokens that come back in this way."""
    config = engine.model.config
    numbers = dict(R=0, H=config.hidden_size, K=2 * config.num_key_value_heads * config.head_dim)[letter]
    return rows * numbers * engine.model.dtype.itemsize


def forget_device(engine):
    offload.empty(engine)
    engine.pool.kv.fill_(NAN)


def contents(engine, slot: int, layer: int) -> list[torch.Tensor]:
    """What a chunk keeps of a layer: its states [64, D], if any; then K and V [64, KVH, hd], if any."""
    store, kept, flat = engine.chunks, engine.chunks.letters[slot][layer], engine.chunks.kv.view(-1)
    places = [(store.hidden(slot, layer), (CHUNK, engine.model.config.hidden_size))] if kept in "HB" else []
    places += [(first, store.kv_shape) for first in store.keys_and_values(slot, layer)] if kept in "KB" else []
    return [flat[first:first + math.prod(shape)].view(shape) for first, shape in places]


def kept_right(engine, base, tokens, salt: str = "") -> bool:
    """Whether every chunk of these tokens that is kept holds what was computed."""
    inputs, kv = truth(base, tokens), true_kv(base, tokens)
    for index, slot in enumerate(find(engine, tokens, salt)):
        rows = slice(index * CHUNK, (index + 1) * CHUNK)
        for layer in range(len(inputs)) if slot is not None else ():
            letter = engine.chunks.letters[slot][layer]
            true = [inputs[layer, rows]] * (letter in "HB") + list(kv[layer, :, rows]) * (letter in "KB")
            if not all(difference(is_, was) < 1e-4 for is_, was in zip(contents(engine, slot, layer), true, strict=True)):
                return False
    return True


def comes_back(engine, base, right, prompt=PROMPT, exactly: str = "HK"):
    """`prompt` is answered, lost, and asked again -> the second request. Its K and V are those of the forward pass: bit for bit
    in layers with these letters."""
    first, size = asked(engine, prompt), engine.pool.block_size
    count = (len(prompt) - 1) // CHUNK
    assert first.source == "miss" and kept(engine, prompt) == "x" * count
    before = device_kv(engine, prompt)
    forget_device(engine)
    again = asked(engine, prompt)
    after = device_kv(engine, prompt)
    assert again.outcome.tokens == first.outcome.tokens == right(prompt, base=base)
    assert (again.source, again.cached_tokens) == ("planned", count * CHUNK)
    assert again.outcome.choice["chosen"] == "restore" and again.outcome.restoration["tokens"] == count * CHUNK
    for run in again.restored.runs:
        rows = slice(run.row, min(run.row + run.rows, before.shape[2]))
        for layer in (layer for layer, letter in enumerate(run.letters) if letter in exactly):
            assert torch.equal(after[layer, :, rows], before[layer, :, rows])
    assert difference(after, before) < 1e-5
    assert difference(before, true_kv(base, prompt)[:, :, :len(prompt) // size * size]) < 1e-5
    return again


# 1. Restoration is exact ------------------------------------------------------------------------------------------

WHOLE = [Plan(recompute, 3 - recompute - kv, kv) for recompute in range(3) for kv in range(4 - recompute)]
SHARED = [Plan(*numbers) for numbers in (
    (0.25, 5.5, 0.25), (1.5, 3.25, 1.25), (2.75, 0, 3.25), (0, 4.75, 1.25), (4.25, 1.75, 0), (3.5, 0.75, 1.75), (0.75, 0, 5.25),
    (5.75, 0.25, 0), (5.25, 0, 0.75), (0, 0.25, 5.75), (5.0, 0.75, 0.25))]


def by_tokens(split: int, rest: str, layers: int = 3, tokens: int = 192) -> Plan:
    others = layers * (1 - split / tokens)
    return Plan(others if rest == "R" else 0.0, layers - others, others if rest == "K" else 0.0, split)


@pytest.mark.parametrize("family", ["multi-head", "grouped", "one KV head", "wide heads", "biases"])
@pytest.mark.parametrize("plan", WHOLE, ids=str)
def test_every_division_into_whole_layers_brings_the_keys_and_values_of_the_forward_pass(make, right, models, plan, family):
    base = models(family)
    engine = make(plan, base=base)
    again = comes_back(engine, base, right)
    assert letters(engine, PROMPT) == [str(plan)] * 3
    bytes_in = 3 * sum(size_of(engine, letter) for letter in str(plan))
    assert again.outcome.restoration["bytes"] == engine.counts["bytes_in"] == bytes_in
    assert sum(size for _, size in engine.load_link.sent) == bytes_in
    assert again.outcome.restoration["plan"] == str(plan) and [run.letters for run in again.restored.runs] == [str(plan)] * 3
    assert again.outcome.restoration["layers"] == dict(recompute=plan.recompute, hidden=plan.hidden, kv=plan.kv)


@pytest.mark.parametrize("family", ["six", "six, one KV head"])
@pytest.mark.parametrize("plan", SHARED, ids=str)
def test_layers_that_are_shared_by_two_ways_come_back_too(make, right, models, plan, family):
    base = models(family)
    engine = make(plan, base=base)
    comes_back(engine, base, right, LONG)
    assert letters(engine, LONG) == [plan.letters(index, 0, 7) for index in range(7)]
    assert len(set(letters(engine, LONG))) > 1


def test_states_of_a_layer_travel_in_parts_of_whole_chunks_and_keys_and_values_in_one(make, right, models):
    base = models("six")
    engine = make(Plan(0, 5, 1), base=base, known=costing(compute_hidden=2.0))
    comes_back(engine, base, right, LONG)
    sent = engine.load_link.sent
    assert [size for label, size in sent if label == "H layer 0"] == [size_of(engine, "H", rows) for rows in (128, 128, 128, 64)]
    assert len(sent) == 5 * 4 + 1 and sent[-1] == ("K layer 5", size_of(engine, "K", 448))


@pytest.mark.parametrize("budget", [16, 64, 100, 512])
@pytest.mark.parametrize("plan", [Plan(1, 1, 1), Plan(2, 0.5, 0.5), Plan(1.5, 0.75, 0.75), by_tokens(100, "R")], ids=str)
def test_any_budget_of_a_step_gives_the_same_tokens(make, right, tiny_engine, plan, budget):
    """What is kept of a chunk may be computed in pieces; what is projected is projected in others."""
    comes_back(make(plan, token_budget=budget), tiny_engine, right, exactly="K")


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 128])
@pytest.mark.parametrize("plan", [Plan(1, 1, 1), Plan(0, 0, 3), Plan(0.75, 1.5, 0.75), by_tokens(100, "K"), by_tokens(70, "R")],
                         ids=str)
def test_any_size_of_a_block_gives_the_same_tokens(make, right, models, plan, block_size):
    base = models("grouped")
    comes_back(make(plan, base=base, block_size=block_size, blocks=-(-400 // block_size)), base, right)


@pytest.mark.parametrize("rest", "KR")
@pytest.mark.parametrize("split", [1, 63, 64, 65, 100, 127, 128, 191])
@pytest.mark.parametrize("family", ["multi-head", "one KV head"])
def test_some_tokens_of_all_layers_may_be_projected_and_the_others_not(make, right, models, split, rest, family):
    base = models(family)
    engine = make(by_tokens(split, rest), base=base)
    again = comes_back(engine, base, right, exactly="HK" if split > 1 else "K")                 # one row alone is another product
    assert again.outcome.restoration["bytes"] == 3 * (size_of(engine, "H", split) + size_of(engine, rest, 192 - split))
    assert again.outcome.restoration["plan"] == str(by_tokens(split, rest))


@pytest.mark.parametrize("mode", ["token-wise", "token-wise-rounded"])
@pytest.mark.parametrize("costs", [dict(io_kv=3.0, compute_hidden=2.0), dict(io_hidden=9.0, io_kv=18.0, compute_token=6.0)],
                         ids=["rest loaded", "rest recomputed"])
def test_the_planner_divides_tokens_and_they_come_back(make, right, tiny_engine, mode, costs):
    engine = make(known=costing(**costs), mode=mode)
    plan, _ = engine.plan(200)
    assert 0 < plan.split < 192 and (plan.kv > 0) == ("compute_hidden" in costs) and bool(plan.split % CHUNK) == (mode[-1] == "e")
    comes_back(engine, tiny_engine, right)


@pytest.mark.parametrize("plan", [Plan(0, 3, 0), Plan(0, 0, 3), Plan(1, 1, 1), Plan(0.5, 2, 0.5), by_tokens(70, "K")], ids=str)
def test_in_16_bit_what_was_loaded_is_equal_and_the_rest_is_close(make, models, plan):
    base = models("multi-head", "bfloat16")
    engine = make(plan, base=base)
    asked(engine, PROMPT)
    before, held = device_kv(engine, PROMPT), letters(engine, PROMPT)
    forget_device(engine)
    again = asked(engine, PROMPT)
    after = device_kv(engine, PROMPT)
    assert again.source == "planned" and again.cached_tokens == 192
    assert difference(after[:, :, :192], before[:, :, :192]) <= 0.02 * float(before.float().abs().max())
    for index, row in enumerate(held):
        for layer in (layer for layer in range(3) if row[layer] == "K"):
            part = layer, slice(None), slice(index * CHUNK, index * CHUNK + CHUNK)
            assert torch.equal(after[part], before[part])


@pytest.mark.parametrize("plan", [Plan(1, 1, 1), Plan(0.75, 1.5, 0.75), by_tokens(100, "R")], ids=str)
def test_over_the_modelled_link_and_with_reordered_weights_it_comes_back_too(make, right, tiny_engine, plan):
    again = comes_back(make(plan, links.Link), tiny_engine, right, exactly="K")
    spans = again.outcome.timeline.spans
    for load in (span for span in spans if span.lane == "load" and span.label[0] == "H"):
        assert any(load.end <= span.start for span in spans if span.lane == "compute" and span.label == load.label)


@pytest.mark.parametrize("plan, changes", [(Plan(0, 3, 0), "HHH"), (Plan(0, 0, 3), "KKK"), (Plan(2, 1, 0), "RRH")], ids=str)
def test_what_comes_back_is_what_the_store_has_and_nothing_else(make, models, plan, changes):
    """The last layer is set to zero in the store, and so it is on the device, and only there."""
    base = models("grouped")
    engine = make(plan, base=base)
    ask(engine, PROMPT)
    before = device_kv(engine, PROMPT)
    for slot in find(engine, PROMPT):
        for memory in contents(engine, slot, 2):
            memory.zero_()
    forget_device(engine)
    ask(engine, PROMPT, max_tokens=1)
    after = device_kv(engine, PROMPT)[:, :, :192]
    assert [difference(after[layer], before[layer, :, :192]) < 1e-5 for layer in range(3)] == [True, True, False]


# 2. Saving follows the plan ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, cells", [("multi-head", "HHKKKKKK"), ("grouped", "HHKKK"), ("one KV head", "HHKK")])
def test_a_chunk_takes_the_cells_that_its_letters_need_and_holds_nothing_else(make, right, models, family, cells):
    """Two states and three times K and V; four, two or one of which go into a cell."""
    base = models(family)
    engine = make(WHOLE[0], base=base)
    needs = engine.chunks.needs
    assert needs("RRHHRKKK") == len(cells) and needs("RRR") == 0 and needs("B") == needs("HK")
    for plan in WHOLE:
        keep_as(engine, plan)
        for slot in list(engine.chunks.cached):
            engine.chunks.forget(slot)
        forget_device(engine)
        assert ask(engine, PROMPT) == right(PROMPT, base=base)
        assert engine.chunks.size - len(engine.chunks.empty) == 3 * needs(str(plan))
        counters = bubble.Engine.counters(engine)
        assert counters["chunks"] == counters["chunks_cached"] == 3 and counters["chunks_referenced"] == 0
        assert counters["cells"] - counters["cells_free"] == 3 * needs(str(plan))
        assert kept_right(engine, base, PROMPT)


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(2, 0, 1), Plan(1, 0.5, 1.5)], ids=str)
def test_only_keys_and_values_that_are_kept_leave_and_no_states_of_layers_that_keep_none(make, plan):
    engine = make(plan)
    ask(engine, PROMPT, max_tokens=1)
    per_layer = [{row[layer] for row in letters(engine, PROMPT)} for layer in range(3)]
    states = 200 * 64 * 4 * sum("H" in kinds for kinds in per_layer)           # of a step, all rows go
    chunks = sum(row.count("K") for row in letters(engine, PROMPT)) * size_of(engine, "K")
    assert engine.counts["bytes_out"] == sum(size for _, size in engine.save_link.sent) == states + chunks


def test_a_plan_that_recomputes_everything_keeps_nothing_and_restores_nothing(make, right):
    engine = make(Plan(3, 0, 0))
    for _ in range(2):
        request = asked(engine, PROMPT)
        assert request.outcome.tokens == right(PROMPT) and request.source == "miss"
        forget_device(engine)
    counters = engine.counters()
    assert counters["bytes_out"] == counters["bytes_in"] == counters["chunks_saved"] == counters["restorations"] == 0
    assert counters["chunks_free"] == counters["chunks"] and counters["cells_free"] == counters["cells"] > 0


def test_all_counters_are_there_from_the_beginning(make):
    engine = make()
    before = engine.counters().keys()
    ask(engine, PROMPT)
    forget_device(engine)
    ask(engine, PROMPT)
    assert engine.counts["layers_recomputed"] > 0 and engine.counters().keys() == before


@pytest.mark.parametrize("known, plan", [
    (costing(io_hidden=9.0, compute_hidden=9.0, io_kv=1.0), "KKK"), (costing(compute_hidden=0.01, io_kv=4.0), "RHH"),
    (costing(io_hidden=90.0, io_kv=90.0, compute_token=1.0), "RRR")], ids=["K", "H", "R"])
def test_the_planner_decides_what_is_kept(make, right, known, plan):
    engine = make(known=known)
    assert ask(engine, PROMPT) == right(PROMPT) and str(engine.plan(200)[0]) == plan
    assert kept(engine, PROMPT) == ("---" if plan == "RRR" else "xxx")
    assert plan == "RRR" or {row[1:] for row in letters(engine, PROMPT)} == {plan[1:]}


@pytest.mark.parametrize("plan", [*WHOLE, Plan(0.5, 1, 1.5), by_tokens(100, "K"), by_tokens(100, "R")], ids=str)
@pytest.mark.parametrize("budget", [30, 512])
def test_a_chunk_that_the_answer_completes_is_kept_like_the_last_of_the_prompt(make, right, tiny_engine, plan, budget):
    """The second chunk is begun by the prompt, the third by the answer."""
    engine, prompt = make(plan, token_budget=budget), ids(2, 110)
    tokens = ask(engine, prompt, max_tokens=90)
    assert tokens == right(prompt, 90) and len(tokens) == 90
    history = prompt + tokens
    assert kept(engine, history) == "xxx" and kept_right(engine, tiny_engine, history[:199])
    for row in letters(engine, history) if plan.split is None else ():
        assert len(row) == 3 and abs(row.count("R") - plan.recompute) < 1 and abs(row.count("K") - plan.kv) < 1
    forget_device(engine)
    again = asked(engine, history)
    assert again.outcome.tokens == right(history) and (again.source, again.cached_tokens) == ("planned", 192)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.data(), st.integers(1, 12), st.integers(0, 9), st.integers(0, 9), st.integers(0, 30))
def test_every_chunk_of_a_plan_has_one_letter_for_each_layer_and_few_deviate_from_it(data, layers, first, count, chunk):
    """First tokens have the earlier letter, and all chunks together have the plan's numbers but for one."""
    recompute = data.draw(st.integers(0, 4 * layers)) / 4
    kv = data.draw(st.integers(0, int(4 * (layers - recompute)))) / 4
    plan = Plan(recompute, layers - recompute - kv, kv)
    row = plan.letters(chunk, first, count)
    assert len(row) == layers and row == "".join(sorted(row, key="RHK".index))
    for letter, number in zip("RHK", plan):
        assert abs(row.count(letter) - number) < (2 if letter == "H" else 1)
    together = [plan.letters(index, first, count) for index in range(first, first + count)]
    for number, letter in enumerate("RK"):
        total = sum(row.count(letter) for row in together)
        assert abs(total - (plan.recompute, plan.kv)[number] * count) < 1


# 3. Chunks that were kept under different plans -------------------------------------------------------------------

MIXED = [Plan(0, 6, 0), Plan(0, 0, 6), Plan(3, 2, 1), Plan(1.5, 3.25, 1.25), Plan(5, 0, 1), Plan(4.25, 1.75, 0)]


@pytest.mark.parametrize("then", MIXED, ids=str)
@pytest.mark.parametrize("now", MIXED, ids=str)
def test_a_conversation_that_was_kept_under_two_plans_comes_back_as_one(make, right, models, then, now):
    base = models("six")
    engine, history = make(then, base=base, mode="auto"), LONG[:150]
    history = history + ask(engine, history) + ids(2, 20)
    keep_as(engine, now)
    second = asked(engine, history + LONG[200:360])
    assert second.source == "gpu_hit"
    history = second.tokens
    kept_then, kept_now = letters(engine, history)[:2], letters(engine, history)[2:]
    assert len(kept_now) == 3 and {len(row) for row in kept_then + kept_now} == {6}
    before = device_kv(engine, history)
    forget_device(engine)
    third = asked(engine, history + [5])
    assert third.outcome.tokens == right(history + [5], base=base) and (third.source, third.cached_tokens) == ("planned", 320)
    assert difference(device_kv(engine, history)[:, :, :320], before[:, :, :320]) < 1e-5
    depths = {run.depth for run in third.restored.runs}
    deepest = max(len(row) - len(row.lstrip("R")) for row in kept_then + kept_now)
    assert max(depths) <= max(deepest, 1) and min(depths) >= deepest - 1       # computing is slow here: no more than need be


def test_one_layer_of_different_chunks_may_be_loaded_projected_and_recomputed(make, right, models):
    base = models("six")
    engine, history = make(MIXED[0], base=base), []
    for number, plan in enumerate((Plan(1, 5, 0), Plan(0, 0, 6), Plan(0, 6, 0))):
        keep_as(engine, plan)
        history = history + ids(number, 64)
        ask(engine, history + [2], max_tokens=1)
    assert letters(engine, history) == ["RHHHHH", "KKKKKK", "HHHHHH"]
    before = device_kv(engine, history)
    forget_device(engine)
    request = asked(engine, history + [2])
    assert request.outcome.tokens == right(history + [2], base=base) and request.source == "planned"
    assert torch.equal(device_kv(engine, history)[:, :, 64:128], before[:, :, 64:128])
    assert [run.letters for run in request.restored.runs] == ["RHHHHH", "KKKKKK", "HHHHHH"]
    assert request.outcome.restoration["layers"] == dict(recompute=0.33, hidden=3.67, kv=2.0)


@pytest.mark.parametrize("first, second", [((30, "R"), (191, "R")), ((100, "K"), (150, "R")), ((30, "R"), (150, "K")), (
    (1, "R"), (129, "R"))])
def test_tokens_that_were_divided_differently_come_back_as_one(make, right, first, second):
    """A stretch of recomputed tokens may be one token long."""
    engine = make(by_tokens(*first, tokens=64))
    ask(engine, PROMPT[:70], max_tokens=1)
    keep_as(engine, by_tokens(*second))
    ask(engine, PROMPT, max_tokens=1)
    assert kept(engine, PROMPT) == "xxx"
    before = device_kv(engine, PROMPT)
    forget_device(engine)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and (request.source, request.cached_tokens) == ("planned", 192)
    assert difference(device_kv(engine, PROMPT), before) < 1e-5


def test_without_the_rows_that_it_attends_to_a_recomputed_token_would_be_wrong(make, monkeypatch):
    """The guard of `recompute`: what is loaded of a layer is waited for, before other rows attend to it."""
    for guarded in (True, False):
        engine = make(by_tokens(100, "R"))
        ask(engine, PROMPT, max_tokens=1)
        before = device_kv(engine, PROMPT)
        forget_device(engine)
        if not guarded:
            monkeypatch.setattr(bubble.Restoration, "next_load", None)
        ask(engine, PROMPT, max_tokens=1)
        assert (difference(device_kv(engine, PROMPT)[:, :, :192], before[:, :, :192]) < 1e-5) == guarded


# 4. The device has the beginning ----------------------------------------------------------------------------------

def leave(engine, blocks: int):
    """The device keeps the first blocks of the only conversation that it has."""
    while len(engine.pool.cached) > blocks:
        engine.pool.evict()


@pytest.mark.parametrize("plan", [*WHOLE, Plan(0.75, 1.5, 0.75), by_tokens(100, "K"), by_tokens(100, "R"), by_tokens(70, "R")],
                         ids=str)
@pytest.mark.parametrize("block_size, blocks", [(16, 5), (48, 2), (20, 4), (1, 127)])
def test_restoration_begins_inside_a_chunk(make, right, tiny_engine, plan, block_size, blocks):
    engine = make(plan, block_size=block_size, blocks=-(-400 // block_size))
    ask(engine, PROMPT)
    before = device_kv(engine, PROMPT)
    leave(engine, blocks)
    request, tokens = asked(engine, PROMPT), 192 - blocks * block_size
    assert request.outcome.tokens == right(PROMPT) and (request.source, request.cached_tokens) == ("mixed", 192)
    assert request.outcome.restoration["tokens"] == tokens and difference(device_kv(engine, PROMPT), before) < 1e-5
    size = sum(size_of(engine, letter, run.rows) for run in request.restored.runs for letter in run.letters)
    assert request.outcome.restoration["bytes"] == size and sum(run.rows for run in request.restored.runs) == tokens


# 5. Restore or recompute ------------------------------------------------------------------------------------------

def test_if_recomputing_is_faster_nothing_is_loaded_and_it_is_kept_as_planned_now(make, right):
    engine = make(Plan(0, 0, 3))
    ask(engine, PROMPT)
    forget_device(engine)
    keep_as(engine, Plan(1, 2, 0))
    engine.profile = costing(compute_token=0.1)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.source == "miss" and request.outcome.restoration is None
    choice = request.outcome.choice
    assert choice["chosen"] == "recompute" and choice["restore_ms"] > choice["recompute_ms"] > 0
    assert choice["recompute_ms"] == pytest.approx(3 * 0.1 * 192 / 1024 * 1e3, abs=1e-3)
    assert not engine.load_link.sent and engine.counts["recomputed_hits"] == 3 and engine.load_link.worn_out > 0
    assert letters(engine, PROMPT) == ["RHH"] * 3
    engine.profile = costing()
    forget_device(engine)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.source == "planned"


def estimate(engine, prompt, start: int = 0):
    """What restoring and computing the prompt's kept chunks would take."""
    request = engine.submit(prompt, max_tokens=1)[0]
    restoration, restore, compute = engine.choose(request, start, find(engine, prompt)[start // CHUNK:])
    engine.cancel(request)
    answered(engine)
    return restoration, restore, compute


@pytest.mark.parametrize("plan", [*WHOLE, by_tokens(100, "K"), by_tokens(100, "R")], ids=str)
def test_the_estimate_is_that_of_the_planner_and_what_is_queued_comes_first(make, plan):
    known = costing(1.0, 1.5, 7.0, 2.0)
    engine = make(plan, known=known)
    ask(engine, PROMPT)
    cost = known.costs(0, 192, 1e9)
    if plan.split is None:
        expected = min(float(bubble.pipeline_seconds(cost[parts], *plan[:3], parts)) for parts in cost)
    else:
        expected = float(bubble.token_wise_seconds(cost[1], 3, plan.split / 192, "K" if plan.kv else "R"))
    restoration, restore, compute = estimate(engine, PROMPT)
    assert restore == pytest.approx(expected) == restoration.seconds and compute == pytest.approx(3 * 7.0 * 192 / 1024)
    assert restoration.plan[3] == plan.split and restoration.plan[:3] == pytest.approx(plan[:3])
    engine.load_link.backlog = lambda: 10 ** 10
    restoration, later, compute = estimate(engine, PROMPT)
    assert later == pytest.approx(10 + expected if plan.split else min(float(bubble.pipeline_seconds(
        cost[parts], *plan[:3], parts, 10.0)) for parts in cost)) and later > 10


@pytest.mark.parametrize("plan", [Plan(2.75, 0.25, 0), Plan(2.75, 0, 0.25), Plan(2.25, 0.75, 0), Plan(2.5, 0.25, 0.25)], ids=str)
def test_where_some_chunks_are_recomputed_in_all_layers_the_estimate_is_that_of_the_planner_too(make, plan):
    """No tokens are divided here: the last layer is shared by two ways."""
    known = costing(1.0, 1.5, 7.0, 2.0)
    engine = make(plan, known=known)
    ask(engine, PROMPT, max_tokens=1)
    shares = Counter("".join(letters(engine, PROMPT)))
    restoration, restore, _ = estimate(engine, PROMPT)
    numbers = [shares[letter] / 3 for letter in "RHK"]
    cost = known.costs(0, 192, 1e9)
    expected = min(float(bubble.pipeline_seconds(cost[parts], *numbers, parts)) for parts in cost)
    assert shares["R"] > 6 and restoration.plan[:3] == pytest.approx(numbers)
    assert restore == pytest.approx(expected, rel=0.1) and restoration.plan.split is None


@pytest.mark.parametrize("blocks", [0, 5])
def test_who_recomputes_leaves_no_gap_in_what_is_kept(make, right, blocks):
    """A chunk that begins on the device cannot be kept anew, since not all of its tokens are computed."""
    engine = make(Plan(0, 0, 3))
    ask(engine, PROMPT)
    leave(engine, blocks)
    engine.profile = costing(compute_token=0.1)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.outcome.choice["chosen"] == "recompute"
    assert kept(engine, PROMPT) == "xxx"


def test_who_recomputes_and_keeps_nothing_takes_nothing_from_others(make, right):
    engine = make(Plan(0, 0, 3))
    ask(engine, PROMPT)
    forget_device(engine)
    engine.profile = costing(compute_token=0.1)
    request = asked(engine, PROMPT, save=False)
    assert request.outcome.tokens == right(PROMPT) and request.outcome.choice["chosen"] == "recompute"
    assert kept(engine, PROMPT) == "xxx"


def test_what_is_queued_on_the_link_may_make_recomputing_faster(make, right):
    engine = make(Plan(0, 3, 0), known=costing(compute_token=3.0))
    ask(engine, PROMPT)
    forget_device(engine)
    slots = find(engine, PROMPT)
    with mock.patch.object(engine.load_link, "backlog", lambda: 10 ** 10):
        request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.outcome.choice["chosen"] == "recompute"
    assert find(engine, PROMPT) == slots, "that passes, and what is kept is good for the next time"
    forget_device(engine)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.source == "planned"


def test_more_layers_than_a_chunk_lacks_are_recomputed_when_that_is_faster(make, right):
    engine = make(Plan(0, 3, 0), mode="auto")
    ask(engine, PROMPT)
    before = device_kv(engine, PROMPT)
    forget_device(engine)
    engine.profile = costing(io_hidden=10.0, io_kv=20.0, compute_token=6.0)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT) and request.source == "planned"
    assert [run.letters for run in request.restored.runs] == ["RRH"] * 3
    assert request.outcome.restoration["bytes"] == 3 * size_of(engine, "H")
    assert difference(device_kv(engine, PROMPT), before) < 1e-5


# 6. The link gets slow --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("factor, anew", [(0.85, False), (1.15, False), (0.75, True), (1.25, True), (0.1, True), (10.0, True)])
def test_a_link_that_is_a_fifth_slower_or_faster_is_planned_for_anew_and_no_other(make, factor, anew):
    engine = make(known=costing(compute_token=4.0))
    plans = [engine.plan(tokens) for tokens in (200, 130, 200)]
    assert plans[0] == plans[2] and (count := engine.counts["plans"]) == 2
    engine.load_link.bytes_per_second *= factor
    assert (engine.plan(200) == plans[0]) != anew and engine.counts["plans"] == count + anew
    assert (engine.planned_speed == 1e9) != anew


@pytest.mark.parametrize("kind", [0, 1], ids=["recomputing", "projecting"])
@pytest.mark.parametrize("change, anew", [(1.04, False), (0.96, False), (1.06, True), (0.9, True)])
def test_a_processor_that_is_a_twentieth_slower_or_faster_is_planned_for_anew_and_no_other(make, change, anew, kind):
    engine = make(known=costing(compute_token=4.0))
    assert engine.plan(200) and (count := engine.counts["plans"]) == 1
    engine.paces[kind].extend([change, 50.0, change])                          # their median counts
    assert engine.plan(200) and engine.counts["plans"] == count + anew
    assert engine.planned_paces[kind] == (change if anew else 1.0) and engine.planned_paces[1 - kind] == 1.0


@pytest.mark.parametrize("plan", [Plan(1, 2, 0), Plan(2, 1, 0)], ids=str)
def test_paces_are_what_recomputing_and_projecting_took_against_what_was_profiled(make, plan):
    engine = make(plan, known=costing(compute_token=8.0, compute_hidden=1e-6))
    del engine.learn
    ask(engine, PROMPT)
    forget_device(engine)
    request = asked(engine, PROMPT)
    spans = [span for span in request.outcome.timeline.spans if span.lane == "compute" and span.label[:2] in ("R ", "H ")]
    recomputed, projected = (sum(span.end - span.start for span in spans if span.label[0] == kind) for kind in "RH")
    share = 192 / 1024
    assert list(engine.paces[1]) == [pytest.approx(projected / (plan.hidden * 1e-6 * share))]
    expected = max(0.1, (recomputed - engine.paces[1][0] * 1e-6 * share) / (8.0 * share))
    assert list(engine.paces[0]) == ([pytest.approx(expected)] if plan.recompute > 1 else [])


def test_a_link_that_slows_tenfold_in_the_middle_of_a_restoration_changes_the_next_plan(make, right):
    engine = make(known=costing(compute_token=4.0))
    other, late = on_its_way(engine)
    before, count = engine.plan(200)[0], engine.counts["plans"]
    engine.load_link.bytes_per_second /= 10
    engine.load_link.arrive(1)
    steps(engine, 1)
    assert answered(engine, other, late) == [right(OTHER, 40), right(PROMPT)] and late.source == "planned"
    assert engine.plan(200)[0] != before and engine.counts["plans"] > count
    assert ask(engine, ids(2, 200)) == right(ids(2, 200))
    assert engine.plan(200)[0].recompute > before.recompute


def test_a_modelled_link_that_slows_tenfold_is_noticed_by_what_it_carries(make, right, models):
    base, known = models("six"), costing(0.02, 0.04, 0.1, 0.02, 1e8)
    engine = make(None, links.Link, known, base=base, bytes_per_second=1e8)
    before, slow = engine.plan(460)[0], engine.load_link.bytes_per_second / 10
    ask(engine, LONG)
    forget_device(engine)

    def send(restoration, load, plain=engine.send):
        if restoration.loads:                                                  # from the second transfer on
            engine.load_link.bytes_per_second = slow
        return plain(restoration, load)
    with mock.patch.object(engine, "send", send):
        for _ in range(2):
            assert ask(engine, LONG) == right(LONG, base=base)
            forget_device(engine)
    count = engine.counts["plans"]
    assert engine.plan(460)[0] != before and engine.counts["plans"] > count - 1 and engine.planned_speed < 0.2e8
    assert ask(engine, LONG) == right(LONG, base=base)


# 7. What fails, and who leaves ------------------------------------------------------------------------------------

FAILING = [(Plan(0, 3, 0), "H", 0), (Plan(0, 3, 0), "H", 1), (Plan(0, 3, 0), "H", 2), (Plan(0, 0, 3), "K", 0),
           (Plan(0, 0, 3), "K", 1), (Plan(0, 0, 3), "K", 2), (Plan(1, 1, 1), "H", 1), (Plan(1, 1, 1), "K", 2),
           (Plan(0, 1.5, 1.5), "H", 1), (Plan(0, 1.5, 1.5), "K", 1), (Plan(2, 1, 0), "H", 2), (by_tokens(100, "R"), "H", 1),
           (by_tokens(100, "K"), "K", 0)]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("how", ["fails", "is refused"])
@pytest.mark.parametrize("plan, kind, layer", FAILING)
def test_a_layer_that_does_not_arrive_is_computed_with_all_others(make, right, plan, kind, layer, how, alone):
    engine = make(plan, token_budget=100)
    ask(engine, PROMPT)
    forget_device(engine)
    others = [] if alone else engine.submit(OTHER, max_tokens=30, save=False)
    steps(engine, len(others))
    link, label = engine.load_link, f"{kind} layer {layer}"
    link.doomed, link.refuses = (label, False) if how == "fails" else (None, label)
    late, = engine.submit(PROMPT, max_tokens=8)
    assert answered(engine, late, *others) == [right(PROMPT), *(right(OTHER, 30) for _ in others)]
    assert (late.source, late.cached_tokens, late.outcome.restoration) == ("miss", 0, None)
    counters = engine.counters()
    assert counters["transfer_errors"] == 1 and counters["chunks_missed"] == 3 and counters["restored_tokens"] == 0
    assert link.failures >= (how == "fails") and engine.landing.take(len(engine.landing.memory)) == 0
    engine.landing.give_back(0)
    link.doomed, link.refuses = None, False
    forget_device(engine)
    again = asked(engine, PROMPT)
    assert again.outcome.tokens == right(PROMPT) and (again.source, again.cached_tokens) == ("planned", 192)


def test_keys_and_values_that_arrive_after_another_layer_failed_change_nothing(make, right):
    """Meanwhile the request computes into the same blocks; what arrives is the same."""
    engine = make(Plan(0, 2, 1))
    other, late = on_its_way(engine)
    next(parcel for parcel in engine.load_link.under_way() if parcel.label == "H layer 0").doomed = True
    for parcel in [parcel for parcel in engine.load_link.under_way() if parcel.label[0] == "H"]:
        parcel.arrive()
    while not late.answer.tokens:
        steps(engine, 1)
    assert late.source == "miss" and [parcel.label for parcel in engine.load_link.under_way()] == ["K layer 2"]
    assert answered(engine, other, late) == [right(OTHER, 40), right(PROMPT)]


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 1, 2), Plan(1, 1, 1), Plan(2, 1, 0), by_tokens(100, "R")], ids=str)
@pytest.mark.parametrize("arrived", [0, 1, 2])
@pytest.mark.parametrize("how", ["hangs up", "is preempted"])
def test_who_leaves_in_the_middle_of_a_restoration_leaves_nothing_behind(make, right, plan, arrived, how):
    """Blocks are held until all has arrived; who preempts needs them, and waits."""
    engine = make(plan)
    other, late = on_its_way(engine)
    engine.load_link.arrive(min(arrived, len(engine.load_link.under_way()) - 1))
    steps(engine, 2)
    restoration, = engine.restorations
    held = list(restoration.blocks)
    assert held == late.table[:12]
    if how == "hangs up":
        engine.cancel(late)
        steps(engine, 1)
        assert restoration in engine.restorations and all(engine.pool.references[block] == 1 for block in held)
        assert isinstance(late.outcome, HungUp) and not late.table
        engine.load_link.arrive()
        assert answered(engine, other) == [right(OTHER, 40)]
        assert asked(engine, PROMPT).outcome.tokens == right(PROMPT)
    else:
        engine.preempt(late)
        assert not engine.restorations and not any(engine.pool.references[block] for block in held)
        assert answered(engine, other, late) == [right(OTHER, 40), right(PROMPT)]
    assert engine.counters()["transfer_errors"] == 0 and engine.counters()["restorations"] == 2


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_that_somebody_left_are_not_given_to_others_before_all_loads_have_arrived(make, right, tiny_engine, guarded):
    """Without the restoration's own references, what arrives late goes over another request's keys and values."""
    engine, text = make(Plan(0, 1, 2), blocks=20), ids(7, 200)
    if not guarded:
        def left_alone(request, restoration, *arguments, plain=engine.bring_layers):
            layers = plain(request, restoration, *arguments)
            next(layers)
            engine.pool.release(restoration.blocks)
            restoration.blocks = []
            yield
            return (yield from layers)
        engine.bring_layers = left_alone
    other, late = on_its_way(engine, decode=60)
    engine.cancel(late)
    follower, = engine.submit(text, max_tokens=1, save=False)
    for _ in range(4):
        engine.step()
    assert (follower.outcome is None) == guarded                               # it waits for the blocks, or has them
    engine.load_link.arrive()
    steps(engine)
    engine.flush()
    nothing_is_lost(engine)
    assert other.outcome.tokens == right(OTHER, 60)
    assert (difference(device_kv(engine, text), true_kv(tiny_engine, text)[:, :, :192]) < 1e-5) == guarded


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(1, 1, 1), Plan(0, 3, 0)], ids=str)
def test_who_is_preempted_in_the_middle_of_a_restoration_is_restored_again(make, right, plan):
    engine = make(plan, blocks=16)
    other, late = on_its_way(engine, decode=60)                                # 13 blocks, and then more than the three others
    until_preempted(engine)
    assert late in engine.waiting and late.table == [] and not engine.line
    assert answered(engine, other, late) == [right(OTHER, 60), right(PROMPT)]
    assert (late.source, late.cached_tokens) == ("planned", 192) and engine.counters()["restorations"] >= 2


@pytest.mark.parametrize("layer", [0, 1, 2, "logits"])
@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(1, 1, 1), Plan(0, 3, 0), Plan(0, 1, 2)], ids=str)
def test_a_forward_pass_that_fails_leaves_no_chunk_that_is_not_whole(make, right, tiny_engine, plan, layer):
    """When the last layer fails, all states were seen already, but K and V were not all computed."""
    engine = make(plan)
    what = (tiny_engine.model, "logits") if layer == "logits" else (tiny_engine.model.layers[layer], "forward")
    with mock.patch.object(*what, side_effect=RuntimeError("injected")):
        request, = engine.submit(PROMPT, max_tokens=8)
        with pytest.raises(RuntimeError, match="injected"):
            answered(engine, request)
    nothing_is_lost(engine)
    assert kept_right(engine, tiny_engine, PROMPT)
    assert ask(engine, PROMPT) == right(PROMPT) and kept(engine, PROMPT) == "xxx"
    assert kept_right(engine, tiny_engine, PROMPT)


# 8. Others go on --------------------------------------------------------------------------------------------------

def test_while_layers_are_recomputed_projected_and_loaded_others_decode(make, right, models):
    base = models("six")
    engine = make(Plan(3, 2, 1), base=base, token_budget=64)
    other, late = on_its_way(engine, LONG)
    seen = []
    for _ in range(200):
        if late.answer.tokens:
            break
        counts, written = engine.counters(), len(other.answer.tokens)
        seen.append((written, counts["layers_recomputed"], counts["layers_projected"]))
        if counts["layers_recomputed"] > 14:                                   # all of them: now it is the link's turn
            engine.load_link.arrive(1)
        steps(engine, 1)
    written, recomputed, projected = zip(*seen)
    assert all(b - a == 1 for a, b in zip(written, written[1:])) and not engine.load_link.log
    assert len(set(recomputed)) > 4 and recomputed[-1] == 2 * 7 + 1 and projected[-1] > projected[0] == 0
    assert projected[recomputed.index(15)] == 0
    assert answered(engine, other, late) == [right(OTHER, 40, base=base), right(LONG, base=base)]


@pytest.mark.parametrize("plan, expected", [(Plan(0, 6, 0), [(0, 8), (0, 16), (0, 24)]), (Plan(0, 2, 4), [(0, 2)]),
                                            (Plan(2, 4, 0), [(2, 0), (4, 0), (5, 1), (5, 3), (5, 4)])], ids=str)
def test_after_as_many_rows_as_a_step_may_compute_others_take_one(make, right, models, nothing_is_late, plan, expected):
    """Here two layers of 448 rows, in one part or in four. Two batches of 128 rows that go through all of it count more."""
    base = models("six")
    engine = make(plan, base=base, token_budget=448 * 2 // 6)
    ask(engine, LONG, max_tokens=1)
    forget_device(engine)
    other, = engine.submit(OTHER, max_tokens=40, save=False)
    steps(engine, 1)
    late, = engine.submit(LONG, max_tokens=8)
    seen = []
    while not late.answer.tokens:
        steps(engine, 1)
        counts = engine.counters()
        seen.append((counts["layers_recomputed"], counts["layers_projected"]))
    assert list(dict.fromkeys(seen)) == expected
    assert answered(engine, other, late) == [right(OTHER, 40, base=base), right(LONG, base=base)]


@pytest.mark.parametrize("plan", [Plan(0, 3, 0), Plan(1, 1, 1), Plan(0.5, 1.5, 1), Plan(0, 0, 3), by_tokens(100, "R")], ids=str)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("rows", [192, 1000])
def test_two_restorations_share_the_room_where_states_land(make, right, plan, alone, rows):
    engine, texts = make(plan), [PROMPT, ids(2, 150)]
    for text in texts:
        ask(engine, text, max_tokens=1)
    forget_device(engine)
    one_layer_at_a_time(engine, min(rows, len(engine.landing.memory)))
    others = [] if alone else engine.submit(OTHER, max_tokens=40, save=False)
    steps(engine, len(others))
    engine.load_link.held = True
    requests = [engine.submit(text, max_tokens=8)[0] for text in texts]
    for _ in range(60):
        if not engine.step():
            break
        of_04.check(engine)
        if not alone:
            engine.load_link.arrive(1)
    assert answered(engine, *others, *requests) == [right(OTHER, 40) for _ in others] + [right(text) for text in texts]
    assert [request.source for request in requests] == ["planned"] * 2 and engine.counters()["restorations"] == 2


@pytest.mark.parametrize("plan", [Plan(0, 3, 0), Plan(0, 0, 3), Plan(1, 1, 1)], ids=str)
def test_when_only_restorations_are_left_nobody_spins(make, right, plan):
    """Nothing arrives by itself here: a step that waits for nothing would be taken again and again."""
    engine, texts = make(plan), [PROMPT, ids(2, 150)]
    for text in texts:
        ask(engine, text, max_tokens=1)
    forget_device(engine)
    engine.load_link.held = True
    requests, count = [engine.submit(text, max_tokens=2)[0] for text in texts], engine.counters()["steps"]
    more, taken = True, 0
    while more:
        more, taken = engine.step(), taken + 1
        assert taken < 80
    assert taken <= engine.counters()["steps"] - count + 2 * 12 + 2            # no more than what was waited for
    assert answered(engine, *requests) == [right(text, 2) for text in texts]


@pytest.mark.parametrize("guarded", [True, False])
def test_rows_where_a_layer_lands_are_not_taken_before_it_was_projected(make, guarded):
    engine = make(Plan(0, 3, 0))
    ask(engine, PROMPT, max_tokens=1)
    before = device_kv(engine, PROMPT)
    forget_device(engine)
    if not guarded:
        engine.send = lambda restoration, load, plain=engine.send: plain(restoration, load) and (
            engine.landing.give_back(load.landing) or True)
    request, = engine.submit(PROMPT, max_tokens=1)
    while engine.step():
        pass
    assert request.source == "planned" and (difference(device_kv(engine, PROMPT), before) < 1e-5) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_a_chunk_that_is_being_read_is_not_evicted(make, right, monkeypatch, guarded):
    engine, text = make(Plan(0, 0, 3), cpu_chunks=3), ids(2, 200)
    if not guarded:
        monkeypatch.setattr(engine.chunks, "share", lambda slot: None)
        monkeypatch.setattr(engine.chunks, "release", lambda table, plain=engine.chunks.release: plain(
            [slot for slot in table if engine.chunks.references[slot]]))
    ask(engine, PROMPT, max_tokens=1)
    before = device_kv(engine, PROMPT)
    forget_device(engine)
    other, = engine.submit(OTHER, max_tokens=40, save=False)
    engine.step()
    engine.load_link.held = True
    late, = engine.submit(PROMPT, max_tokens=1)
    engine.step()
    follower, = engine.submit(text, max_tokens=1)                              # takes three chunks, if it can have them
    for _ in range(3):
        engine.step()
    engine.saver.flush()
    engine.load_link.held = False
    engine.load_link.arrive()
    while engine.step():
        pass
    engine.flush()
    assert follower.outcome.tokens == right(text, 1) and (kept(engine, text) == "---") == guarded
    assert (difference(device_kv(engine, PROMPT), before) < 1e-5) == guarded


# 9. What is kept --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("guarded", [True, False])
def test_keys_and_values_leave_from_a_copy_and_blocks_may_be_taken_meanwhile(make, right, tiny_engine, guarded):
    """Without the copy, what is kept is what came into the blocks afterwards."""
    engine, text = make(Plan(0, 0, 3), blocks=13), ids(7, 200)
    if not guarded:
        def from_blocks(into, out_of, label, plain=engine.save_link.copy):
            """The blocks of the only request follow each other."""
            slots = engine.pool.kv.flatten(2, 3)
            live = [slots[layer, side, chunk * CHUNK:(chunk + 1) * CHUNK].flatten()
                    for layer in range(3) for side in range(2) for chunk in range(3)]
            assert all(torch.equal(view, copy) for view, copy in zip(live, out_of, strict=True))
            return plain(into, live, label)
        engine.save_link.copy = from_blocks
    engine.save_link.held = True
    first, = engine.submit(PROMPT, max_tokens=1)
    steps(engine)
    assert engine.save_link.under_way() and kept(engine, PROMPT) == "---"
    second, = engine.submit(text, max_tokens=1, save=False)                    # takes all blocks
    steps(engine)
    assert [first.outcome.tokens, second.outcome.tokens] == [right(PROMPT, 1), right(text, 1)]
    engine.save_link.held = False
    engine.save_link.arrive()
    answered(engine)
    assert kept(engine, PROMPT) == "xxx" and kept_right(engine, tiny_engine, PROMPT) == guarded
    forget_device(engine)
    request = asked(engine, PROMPT, max_tokens=1)
    assert request.source == "planned"
    assert (difference(device_kv(engine, PROMPT), true_kv(tiny_engine, PROMPT)[:, :, :192]) < 1e-5) == guarded


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 3, 0), Plan(1, 1, 1), by_tokens(100, "K")], ids=str)
@pytest.mark.parametrize("what", ["all fail", "all are refused", "K and V fail", "K and V are refused"])
def test_what_does_not_leave_is_not_kept_and_no_token_is_missing(make, right, tiny_engine, plan, what):
    engine, link = make(plan), None
    link, loses = engine.save_link, what[:3] == "all" or plan.kv > 0
    link.broken, link.refuses = what == "all fail", {"all are refused": True, "K and V are refused": "K and V"}.get(what, False)
    link.doomed = "K and V" if what == "K and V fail" else None
    assert ask(engine, PROMPT) == right(PROMPT)
    row = "---" if loses else "xxx"
    if plan.split and what[:3] != "all":
        row = "x--"                                                            # its first chunk keeps no K and V
    dropped = row.count("-")
    assert kept(engine, PROMPT) == row and engine.counters()["chunks_dropped"] == dropped
    assert kept_right(engine, tiny_engine, PROMPT)
    link.broken, link.refuses, link.doomed = False, False, None
    assert ask(engine, ids(2, 200)) == right(ids(2, 200)) and kept(engine, ids(2, 200)) == "xxx"
    forget_device(engine)
    assert ask(engine, PROMPT) == right(PROMPT) and kept(engine, PROMPT) == "xxx"


@pytest.mark.parametrize("how", ["broken", "refuses"])
@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 3, 0)], ids=str)
def test_a_copy_that_does_not_leave_is_counted_as_an_error_of_saving(make, right, plan, how):
    engine = make(plan)
    setattr(engine.save_link, how, True)
    assert ask(engine, PROMPT) == right(PROMPT)
    assert engine.counters()["save_errors"] > 0 and engine.counters()["chunks_dropped"] == 3


@pytest.mark.parametrize("rows", [0, 3, 50])
def test_a_snapshot_buffer_that_is_too_small_drops_chunks_with_their_keys_and_values(make, right, rows):
    engine = make(Plan(0, 1, 2))
    engine.saver.buffer = links.RowBuffer(engine.saver.buffer.memory[:rows])
    assert ask(engine, PROMPT) == right(PROMPT)
    counters = engine.counters()
    assert kept(engine, PROMPT) == "---" and (counters["chunks_saved"], counters["chunks_dropped"]) == (0, 3)
    assert counters["chunks_free"] == counters["chunks"] and counters["cells_free"] == counters["cells"]


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 3, 0), Plan(1, 1, 1)], ids=str)
@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("budget", [64, 512])
def test_of_a_chain_that_does_not_fit_the_beginning_is_kept(make, right, tiny_engine, plan, chunks, budget):
    engine, prompt = make(plan, cpu_chunks=chunks, token_budget=budget), ids(5, 240)
    fit = min(3, engine.chunks.size // engine.chunks.needs(str(plan)))
    for _ in range(2):
        assert ask(engine, prompt) == right(prompt) and kept(engine, prompt) == "x" * fit + "-" * (3 - fit)
        assert kept_right(engine, tiny_engine, prompt)
        forget_device(engine)
    assert ask(engine, PROMPT) == right(PROMPT)                                # takes the place of the other, its end first
    assert kept(engine, PROMPT) == "x" * fit + "-" * (3 - fit) and kept(engine, prompt) == "-" * 3 or fit == 3


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 3, 0), None], ids=["KKK", "HHH", "chapter 04"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_chunk_that_is_begun_behind_a_device_hit_does_not_take_the_place_of_the_chain_before_it(make, tiny_engine, plan, n):
    """There is room for three chunks, and the fourth begins."""
    engine, prompt = make(plan, cpu_chunks=3) if plan else of_04.build(tiny_engine, cpu_chunks=3), PROMPT[:196]
    for fields in (dict(max_tokens=1), dict(max_tokens=4, n=n)):
        answered(engine, *engine.submit(prompt, **fields))
        assert kept(engine, prompt) == "xxx"
    end(engine)


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(1, 1, 1), Plan(0, 1.5, 1.5)], ids=str)
@pytest.mark.parametrize("budget", [33, 512])
def test_samples_share_the_chunks_of_their_prompt_and_fill_each_its_own_last_one(make, right, tiny_engine, plan, budget):
    engine, prompt = make(plan, token_budget=budget), PROMPT[:150]
    requests = engine.submit(prompt, n=3, max_tokens=60, temperature=1.0, seed=7)
    answers = answered(engine, *requests)
    assert answers == [right(prompt, 60, temperature=1.0, seed=7 + number) for number in range(3)]
    histories = {tuple((prompt + answer)[:192]) for answer in answers if len(prompt + answer) > 192}
    assert len(histories) > 1 and engine.counters()["chunks_saved"] == 2 + len(histories)
    for history in map(list, histories):
        assert kept(engine, history) == "xxx" and kept_right(engine, tiny_engine, history)
    forget_device(engine)
    back = engine.submit(prompt, n=3, max_tokens=60, temperature=1.0, seed=7)
    assert answered(engine, *back) == answers and [request.source for request in back] == ["planned"] * 3
    assert engine.counters()["restorations"] == 1


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(0, 1, 2), Plan(0, 3, 0)], ids=str)
@pytest.mark.parametrize("how", ["two samples", "two requests", "two requests, in pieces"])
def test_two_who_complete_the_same_chunk_in_the_same_step_leave_nothing_behind(make, right, tiny_engine, plan, how):
    pieces = how.endswith("pieces")
    engine, prompt, new = make(plan, token_budget=60 if pieces else 512), PROMPT[:130 if pieces else 60], 10
    fields = dict(max_tokens=new, temperature=0.0)
    requests = engine.submit(prompt, n=2, **fields) if how == "two samples" else [
        engine.submit(prompt, **fields)[0] for _ in range(2)]
    assert answered(engine, *requests) == [right(prompt, new)] * 2
    history = requests[0].tokens[:-1]
    assert set(kept(engine, history)) == {"x"} and kept_right(engine, tiny_engine, history)
    forget_device(engine)
    again = asked(engine, history)
    assert again.source == "planned" and again.outcome.tokens == right(history)


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(1, 1, 1)], ids=str)
def test_salts_share_nothing(make, right, plan):
    engine = make(plan)
    ask(engine, PROMPT, cache_salt="a")
    forget_device(engine)
    for salt, source in (("", "miss"), ("b", "miss"), ("a", "planned"), ("b", "planned")):
        request = asked(engine, PROMPT, cache_salt=salt)
        assert request.outcome.tokens == right(PROMPT) and request.source == source
        forget_device(engine)
    assert [kept(engine, PROMPT, salt) for salt in ("", "a", "b", "ab")] == ["xxx", "xxx", "xxx", "---"]


@pytest.mark.parametrize("plan", [Plan(0, 0, 3), Plan(1, 1, 1)], ids=str)
def test_without_save_nothing_is_kept_but_what_is_kept_is_used(make, right, plan):
    engine = make(plan)
    assert ask(engine, PROMPT, save=False) == right(PROMPT)
    assert kept(engine, PROMPT) == "---" and engine.counters()["bytes_out"] == engine.counters()["chunks_saved"] == 0
    forget_device(engine)
    ask(engine, PROMPT)
    out, longer = engine.counters()["bytes_out"], PROMPT + ids(2, 50)
    forget_device(engine)
    request = asked(engine, longer, save=False, max_tokens=4)
    assert request.outcome.tokens == right(longer, 4) and (request.source, request.cached_tokens) == ("planned", 192)
    assert engine.counters()["bytes_out"] == out and kept(engine, longer[:249]) == "xxx"


def test_chunks_of_requests_side_by_side_keep_each_their_own(make, right, tiny_engine):
    """And each as it was planned when its request began."""
    engine, plans = make(token_budget=48), [Plan(0, 0, 3), Plan(0, 3, 0), Plan(1, 1, 1), Plan(0, 1.5, 1.5)]
    prompts = [ids(number, length) for number, length in enumerate((130, 150, 70, 200))]
    of_length = dict(zip(map(len, prompts), plans))
    engine.plan = lambda tokens: (of_length.get(tokens, plans[0]), 1.0)
    requests = [engine.submit(prompt, max_tokens=8)[0] for prompt in prompts]
    assert answered(engine, *requests) == [right(prompt) for prompt in prompts]
    for prompt, plan in zip(prompts, plans):
        count = len(prompt) // CHUNK
        assert letters(engine, prompt) == [plan.letters(index, 0, count) for index in range(count)]
        assert kept_right(engine, tiny_engine, prompt)


# 10. The store, in any order --------------------------------------------------------------------------------------

class Store(RuleBasedStateMachine):
    """Chunks with random letters come and go; what was put into one stays in it."""

    @initialize(heads=st.sampled_from([1, 2, 4]), layers=st.integers(1, 5), chunks=st.sampled_from([0, 1, 3, 5, 8]),
                head_dim=st.sampled_from([2, 6]), seed=st.integers(0, 1 << 30))
    def open(self, heads, layers, chunks, head_dim, seed):
        config = mock.Mock(num_hidden_layers=layers, hidden_size=8, num_key_value_heads=heads, head_dim=head_dim)
        self.store, self.layers = LayerStore(config, chunks, torch.float32, torch.device("cpu")), layers
        self.store.kv.fill_(NAN)
        self.prefixes, self.number, self.rng = paged.Prefixes("test"), 0, torch.Generator().manual_seed(seed)
        self.tables, self.contents, self.chains = [], {}, [[] for _ in range(3)]         # contents: slot -> its numbers

    def prefix(self, chain: int, index: int):
        return self.prefixes.nth(index, self.chains[chain], str(chain), list(range(64 * (index + 1))), CHUNK)

    @rule(data=st.data(), chain=st.integers(0, 2), index=st.integers(0, 3), rows=st.sampled_from([CHUNK, 5]))
    def new(self, data, chain, index, rows):
        store, row = self.store, data.draw(st.text("RHKB", min_size=self.layers, max_size=self.layers))
        prefix = self.prefix(chain, index)
        before, room = set(store.cached), len(store.empty)
        slot = store.new(self.chains[chain], row, rows)
        happened["new" if slot is not None else "no room"] += 1
        own = {slot for slot in before if store.prefixes[slot] in self.chains[chain]}
        assert own <= set(store.cached), "a chain's beginning went for its end"
        self.contents = {old: numbers for old, numbers in self.contents.items() if old in store.cells}
        if slot is None:
            assert room < store.needs(row) or not store.free
            return
        assert store.references[slot] == 1 and store.letters[slot] == row and store.splits[slot] == rows
        assert len(store.cells[slot]) == store.needs(row)
        self.fill(slot, row)
        self.tables.append([slot])
        if data.draw(st.sampled_from([True, True, False])):
            store.register(slot, prefix)
        if data.draw(st.booleans()):
            self.release(-1)

    def random(self, *shape):
        return torch.rand(*shape, generator=self.rng)

    def views(self, slot: int, row: str):
        """K and V of each layer, and states; as they lie in the memory."""
        store, flat = self.store, self.store.kv.view(-1)
        for layer, letter in enumerate(row):
            if letter in "HB":
                first = store.hidden(slot, layer)
                yield "H", layer, flat[first:first + 64 * 8].view(64, 8)
            if letter in "KB":
                size = math.prod(store.kv_shape)
                for number, first in enumerate(store.keys_and_values(slot, layer)):
                    yield "KV"[number], layer, flat[first:first + size].view(store.kv_shape)

    def fill(self, slot: int, row: str):
        """States as the Saver puts them: layers that keep them, one after the other, in two pieces."""
        self.contents[slot] = {}
        for what, layer, view in self.views(slot, row):
            numbers = self.contents[slot][what, layer] = self.random(*view.shape)
            if what != "H":
                view.copy_(numbers)
        layer = 0
        while layer < len(row):
            last = layer
            while last < len(row) and row[last] in "HB":
                last += 1
            if last > layer:
                states = torch.stack([self.contents[slot]["H", number] for number in range(layer, last)])
                for rows in (slice(0, 20), slice(20, 64)):
                    self.store.put(slot, layer, rows.start, links.as_integers(states[:, rows].contiguous()))
            layer = last + 1

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def release(self, number):
        self.store.release(self.tables.pop(number % len(self.tables)))
        self.contents = {slot: numbers for slot, numbers in self.contents.items() if slot in self.store.cells}

    @precondition(lambda self: self.store.blocks)
    @rule(number=st.integers(0, 99))
    def share(self, number):
        slot = list(self.store.blocks.values())[number % len(self.store.blocks)]
        self.store.share(slot)
        self.tables.append([slot])
        happened["shared"] += 1

    @precondition(lambda self: self.store.blocks)
    @rule(number=st.integers(0, 99))
    def forget(self, number):
        slot = list(self.store.blocks.values())[number % len(self.store.blocks)]
        self.store.forget(slot)
        self.contents = {slot: numbers for slot, numbers in self.contents.items() if slot in self.store.cells}
        happened["forgotten, referenced" if self.store.references[slot] else "forgotten"] += 1

    @precondition(lambda self: self.store.cached)
    @rule()
    def evict(self):
        self.store.evict()
        self.contents = {slot: numbers for slot, numbers in self.contents.items() if slot in self.store.cells}

    @precondition(lambda self: self.store.cached)
    @rule(chain=st.integers(0, 2), index=st.integers(0, 3))
    def touch(self, chain, index):
        self.store.touch(self.prefix(chain, index))

    @invariant()
    def whole(self):
        store = self.store
        store.check_integrity(self.tables)
        assert self.contents.keys() == store.cells.keys() == store.letters.keys() == store.splits.keys()
        assert len(store.empty) == store.size - sum(map(store.needs, store.letters.values()))
        store.kv[store.empty] = NAN
        for slot, numbers in self.contents.items():
            views = {(what, layer): view for what, layer, view in self.views(slot, store.letters[slot])}
            assert views.keys() == numbers.keys() and all(torch.equal(views[key], numbers[key]) for key in views)


def test_in_any_order_a_chunk_of_the_store_keeps_what_was_put_into_it_and_no_cell_is_lost():
    happened.clear()
    run_state_machine_as_test(Store, settings=settings(
        max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))
    assert all(happened[name] > 20 for name in ("new", "no room", "shared", "forgotten", "forgotten, referenced")), happened


@pytest.mark.parametrize("damage", ["reclaim", "needs", "hidden"])
def test_a_store_that_loses_cells_or_lets_chunks_overlap_is_noticed(monkeypatch, damage):
    plain = LayerStore.needs
    monkeypatch.setattr(LayerStore, *{
        "reclaim": ("reclaim", lambda store, slots: None),
        "needs": ("needs", lambda store, row: plain(store, row) - ("K" in row and "H" in row)),
        "hidden": ("hidden", lambda store, slot, layer: store.numbers * store.cells[slot][-1])}[damage])
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(Store, settings=settings(
            max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
            report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))


# 11. Small things, against the same done slowly -------------------------------------------------------------------

property_test = settings(max_examples=300, deadline=None, database=None, derandomize=True)


@property_test
@given(st.text("RHKB", max_size=12))
def test_places_count_what_is_kept_before_each_layer(row):
    hidden_before, kv_before = bubble.kept_before(row)
    for layer in range(len(row) + 1):
        assert hidden_before[layer] == len([letter for letter in row[:layer] if letter == "H" or letter == "B"])
        assert kv_before[layer] == len([letter for letter in row[:layer] if letter == "K" or letter == "B"])
    assert len(hidden_before) == len(kv_before) == len(row) + 1


@property_test
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_stretches_and_rows_are_those_of_the_runs(gaps):
    """(rows left out before a run, rows of it)"""
    runs, rows, row = [], [], 0
    for gap, count in gaps:
        runs.append(Run(row + gap, count, 0, 0, "R"))
        row += gap + count
        rows += range(row - count, row)
    found = bubble.stretches(runs)
    assert [number for first, count in found for number in range(first, first + count)] == rows
    assert all(first + count < later for (first, count), (later, _) in zip(found, found[1:])), "two follow each other"
    index = bubble.rows_of(runs, "cpu")
    assert torch.arange(row)[index].tolist() == rows and isinstance(index, slice) == (len(found) == 1)


@property_test
@given(st.data(), st.booleans())
def test_views_that_are_put_together_move_what_each_move_alone_would(data, strided):
    """As many chunks in a row, or as they come; both sides may begin anywhere in larger memories, and go up or down."""
    size, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    if strided:
        steps_, starts = data.draw(st.tuples(*[st.integers(size, 12)] * 2)), data.draw(st.tuples(*[st.integers(0, 9)] * 2))
        moves = [(starts[0] + number * steps_[0], starts[1] + number * steps_[1], size) for number in range(count)]
    else:
        places = st.lists(st.integers(0, 15), min_size=count, max_size=count, unique=True)
        sizes = st.lists(st.sampled_from([size, size, 1]), min_size=count, max_size=count)
        moves = [(6 * to, 6 * out, number) for to, out, number in zip(data.draw(places), data.draw(places), data.draw(sizes))]
    dst, src = torch.full((3, 120), -1.0)[1:], torch.arange(360.0).view(3, 120)[1:]             # memories inside larger ones
    expected = dst.flatten().clone()
    for to, out, number in moves:
        for place in range(number):
            expected[to + place] = src.flatten()[out + place]
    into, out_of = [], []
    bubble.together(dst, src, moves, into, out_of)
    assert [view.shape for view in into] == [view.shape for view in out_of] and sum(map(torch.numel, into)) == sum(
        number for *_, number in moves)
    for view, other in zip(into, out_of):
        view.copy_(other)
    assert torch.equal(dst.flatten(), expected)
    assert not strided or len(into) == 1


@property_test
@given(st.data())
def test_runs_are_the_tokens_of_the_chunks_each_once_and_as_they_are_kept(data):
    layers, count = 3, data.draw(st.integers(1, 4))
    rows = [data.draw(st.text(kind, min_size=layers, max_size=layers)) for kind in
            (data.draw(st.sampled_from(["RHK", "H", "B", "R", "K"])) for _ in range(count))]
    used = [data.draw(st.integers(1, 63)) if set(row) in ({"H"}, {"B"}) else CHUNK for row in rows]
    assume(all("B" not in row or used_ < CHUNK for row, used_ in zip(rows, used)))
    start = data.draw(st.integers(0, CHUNK - 1)) + CHUNK * data.draw(st.integers(0, 2))
    engine = mock.Mock(chunks=mock.Mock(letters=dict(enumerate(rows)), splits=dict(enumerate(used))))
    runs = bubble.Engine.runs(engine, start, list(range(count)))
    seen = {}
    for run in runs:
        for number in range(run.rows):
            assert run.row + number not in seen
            seen[run.row + number] = run.slot, run.at + number, run.letters
    naive = {}
    for slot, (row, number) in enumerate(zip(rows, used)):
        for at in range(CHUNK):
            position = (start // CHUNK + slot) * CHUNK + at
            if position >= start:
                way = row.replace("B", "H") if at < number else "KKK" if "B" in row else "RRR"
                naive[position - start] = slot, at, way
    assert seen == naive


# Any order --------------------------------------------------------------------------------------------------------

PLANS = [Plan(0, 3, 0), Plan(0, 0, 3), Plan(1, 1, 1), Plan(2, 1, 0), Plan(1.5, 0.75, 0.75), Plan(0, 1.25, 1.75),
         Plan(2.75, 0, 0.25), Plan(3, 0, 0)]
BY_TOKENS = [by_tokens(split, rest) for split in (30, 64, 100, 129, 192) for rest in "KR"] + [Plan(3, 0, 0)]


class Mixed(Traffic):
    """Chapter 04's traffic, while plans change as the link does."""

    @initialize(seed=st.uuids())
    def open(self, seed):
        self.requests, self.cancelled, self.seed, self.number = [], [], seed, 0
        rng = random.Random(str(seed))
        self.plans = rng.choice([PLANS, PLANS, BY_TOKENS])
        mode = "auto" if self.plans is PLANS else "token-wise"
        self.engine = build(self.base, rng.choice(self.plans[:-1]), mode=mode, **self.pool(rng),
                            token_budget=rng.choice([3, 16, 64, 512]), max_running=rng.choice([4, 64]),
                            cpu_chunks=rng.choice([32, 32, 32, 5, 2, 0]), save_threads=rng.choice([1, 4]))
        if rng.random() < 0.3:
            one_layer_at_a_time(self.engine, 256)
        self.engine.load_link.held, self.engine.save_link.held = rng.random() < 0.7, rng.random() < 0.3

    def change(self, rng):
        super().change(rng)
        keep_as(self.engine, rng.choice(self.plans))
        self.engine.profile = costing(compute_token=rng.choice([1e4, 1e4, 1e4, 5.0, 0.1]), io_hidden=rng.choice([1.0, 9.0]))

    def race(self, rng):
        self.engine.profile = costing()
        super().race(rng)

    @invariant()
    def whole(self):
        of_04.check(self.engine)
        self.engine.chunks.kv[self.engine.chunks.empty] = NAN
        self.engine.pool.kv[:, :, list(self.engine.pool.free)] = NAN
        of_salt = {}
        for request, prompt, salt in self.requests:
            assert all(of_salt.setdefault(block, salt) == salt for block in request.table)
            if request.outcome is not None:
                self.right(request, prompt)
        self.requests = [entry for entry in self.requests if entry[0].outcome is None]

    def teardown(self):
        engine = self.engine
        self.flush(None)
        for _ in range(2000):
            if not engine.step():
                break
            self.whole()
        else:
            raise AssertionError("there is always more to do")
        self.whole()
        self.flush(None)
        assert not self.requests
        nothing_is_lost(engine)
        counters = engine.counters()
        assert counters["requests"] == counters["finished"] + counters["cancelled"] and counters["failed"] == 0
        for prefix in engine.chunks.prefixes:
            tokens = []
            while prefix is not None and not isinstance(prefix.tokens, str):
                tokens, prefix = prefix.tokens + tokens, prefix.parent
            if tokens:
                happened["chunks compared"] += 1
                assert all(kept_right(engine, self.base, tokens, salt) for salt in ("", "a"))
        end(engine)
        happened.update({name: counters.get(name, 0) for name in (
            "restorations", "chunks_saved", "chunks_dropped", "chunk_evictions", "recomputed_hits", "transfer_errors",
            "layers_recomputed", "layers_projected", "preemptions")})


def any_order(base, examples: int):
    """As it comes: making a failure smaller would take minutes. Add Phase.shrink to look into one."""
    Mixed.base, Mixed.folder = base, None
    run_state_machine_as_test(Mixed, settings=settings(
        max_examples=examples, stateful_step_count=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))


def test_in_any_order_nothing_is_lost_and_the_tokens_are_those_of_chapter_01(tiny_engine):
    happened.clear()
    any_order(tiny_engine, 20)
    often = ("answered", "miss", "gpu_hit", "planned", "cancelled", "restorations", "chunks_saved", "chunks_dropped",
             "layers_recomputed", "layers_projected", "chunks compared")
    assert all(happened[name] >= 5 for name in often), happened
    assert happened["ties"] <= 5, happened


GUARDS = {
    "a layer is not waited for": lambda patch: patch.setattr(bubble.Load, "wait", lambda load: None),
    "chunks of requests that fail or leave are whole": lambda patch: patch.setattr(hidden.Engine, "lose", lambda *_: None),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_in_some_order_a_missing_guard_is_noticed(tiny_engine, monkeypatch, guard):
    GUARDS[guard](monkeypatch)
    with pytest.raises((AssertionError, KeyError, TypeError)):
        any_order(tiny_engine, 40)
