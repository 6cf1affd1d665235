"""What benchmarks/outside.py says of the chapters, on a small model: what is found, and whose answers."""

import math

import pytest
from support.engines import draw, plain_model, tiny_model

from benchmarks import outside
from common import restoring
from shell.reference import as_transformers

SHORT = dict(QUESTION=16, ANSWER=4, TALKS=4, TURNS=5, SAID=(20, 150), DOCUMENTS=8, LENGTH=80, ASKS=12)


@pytest.fixture
def bench(monkeypatch):
    """Short, and whatever is offered is restored, however fast this machine computes."""
    for name, value in SHORT.items():
        monkeypatch.setattr(outside, name, value)
    monkeypatch.setattr(outside, "draw", lambda rng, model, tokens: draw(rng, tokens))
    monkeypatch.setattr(restoring, "WORTH", math.inf)
    monkeypatch.setattr(restoring, "GRACE", 60.0)
    return outside.Bench(tiny_model(kv_heads=4), as_transformers(plain_model(kv_heads=4)))


def test_in_conversations_almost_all_that_was_there_is_found(bench):
    for row in outside.conversations(bench, 1):
        systems = row["systems"]
        assert {found["equal"] for found in systems.values()} == {row["requests"]}
        assert systems["no cache"]["found"] == 0 < systems["02"]["found"] < systems["03"]["found"]
        assert 0 < systems["transformers"]["found"] < systems["03"]["found"]
        for name in ("04", "05", "06", "07"):
            assert systems[name]["restored"] and systems[name]["found"] > systems["02"]["found"]
        for name in ("03", "04", "05"):
            assert systems[name]["found"] > 0.9 * row["could_be_found"], "all full blocks"


def test_requests_that_arrive_are_all_accounted_for(bench, monkeypatch):
    monkeypatch.setattr(outside, "RATES", {0.5: 0.2, 1.0: 0.1})
    rows = list(outside.arrivals(bench, 1))
    assert len(rows) == 2 * 5 and len({row["requests"] for row in rows}) <= 2
    for row in rows:
        assert len(row["ttft_ms"]["samples"]) == row["requests"] and not row["unanswered"]
        assert (row["found"] > 0.5) == (row["system"] in ("03", "04", "05")) or row["system"] == "02"


def test_beside_others_the_history_comes_back(bench, monkeypatch):
    monkeypatch.setattr(outside, "WINDOW", 0.3)
    monkeypatch.setattr(outside, "EVERY", 0.1)
    rows = {row["system"]: row for row in outside.beside(bench, 1)}
    for name, row in rows.items():
        assert row["came_back"] >= 1 and (row["bytes_in"] > 0) == (name in ("03", "04", "05"))
        assert row["restored"] == row["came_back"] * (name in ("03", "04", "05"))
