"""CacheFlow's variant (benchmarks/flow.py): the contract's essentials, where pointers meet, and who comes first."""
import math
import random

import pytest
import torch
from conftest import load, write_model
from support import engines
from support.engines import ask, ask_and_evict, check_pools, draw, evict, make
from test_cache_contract import (  # noqa: F401
    test_a_request_that_is_cancelled_leaves_nothing,
    test_copies_that_fail_or_are_late_cost_time_only,
    test_what_a_copy_uses_is_referenced_and_found_only_when_it_is_there,
)

from benchmarks import flow
from common.requests import Request

PROMPT = draw(random.Random(0), 150)
MEETINGS = {(2e9, math.inf): (1, [2, 1]), (2e9, 1e-9): (2, [2]), (1e5, 1e-9): (3, [2])}  # -> computed, ordered


@pytest.fixture
def cache(monkeypatch) -> str:
    monkeypatch.setitem(engines.CACHES, "flow", engines.own_cache("benchmarks.flow:FlowCache"))
    return "flow"


@pytest.mark.parametrize("bandwidth, seconds", MEETINGS)
def test_layers_are_computed_from_the_front_until_they_meet_those_that_load(bandwidth, seconds):
    engine, ordered, (computed, loaded) = make(flow.FlowCache(64, bandwidth)), [], MEETINGS[bandwidth, seconds]
    engine.behind.estimates.seconds_to_compute = lambda start, end: seconds
    ask_and_evict(engine, PROMPT)
    host, copy = engine.behind.cache.host, engine.behind.cache.load_link.copy
    engine.behind.cache.load_link.copy = lambda *what: ordered.append(what[2]) or copy(*what)
    again = ask(engine, PROMPT + [3], 1)
    labels = [span.label for span in again.timeline.spans if span.lane == "compute" and "layer" in span.label]
    assert labels == [f"layer {layer}" for layer in range(computed)]
    assert ordered == [f"layer {layer}" for layer in loaded] and again.found == {"cpu": 144}
    assert engines.ORACLE.judge(again) == "equal"
    for prefix in again.chain[:9]:
        back, kept = engine.pool.memory[:, :, engine.pool.block_of[prefix]], host.memory[:, host.block_of[prefix]]
        assert torch.equal(back[computed:], kept[computed:]) and torch.allclose(back, kept, atol=1e-5)
    decoding, back = Request(draw(random.Random(3), 10), 40), Request(PROMPT + [4], 2)
    evict(engine)
    engine.generate([decoding, back])
    assert sum(at < back.times[0] for at in decoding.times) >= computed, "others decode between two layers"
    check_pools(engine)


@pytest.mark.parametrize("order, first", [("oldest", 72), ("shortest", 40), ("most saved", 136)])
def test_link_and_processor_serve_first_whom_the_order_says(order, first):
    engine = make(flow.FlowCache(64, 1e6))
    engine.behind.estimates.seconds_to_compute = lambda start, end: float(end - start) ** 2  # long ones are the dearest
    prompts = [draw(random.Random(length), length) for length in (72, 40, 136)]
    for prompt in prompts:
        ask_and_evict(engine, prompt, 1)
    engine.behind.cache.order = flow.ORDERS[order]
    asked = engine.generate([Request(prompt + [3], 1) for prompt in prompts])
    assert min(asked, key=lambda request: request.times[0]).prompt_tokens == first + 1


def test_rows_say_what_was_loaded_and_computed(monkeypatch, tmp_path):
    for name, value in dict(TOKENS=128, LENGTHS=[64, 128], CELLS=[("balanced", 1.0, 1)]).items():
        monkeypatch.setattr(flow, name, value)
    model, options = load(write_model(tmp_path / "wider", vocab_size=400)).model, type("", (), dict(rounds=1))
    rows, size = {row["way"]: row for row in flow.layers(model, options)}, 128 * 2 * 32 * 4  # of a layer
    assert rows["03"]["bytes"] == rows["layers"]["bytes"] + rows["layers"]["projected"] * size == 3 * size
    rows = {row["way"]: row for row in flow.batch(model, options)}
    assert list(rows) == ["03", "05", *flow.ORDERS] and {row["tokens"] for row in rows.values()} == {192}
