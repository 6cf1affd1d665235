"""What `python -m benchmarks.both_ends` measures: that its rows are what they say, on a tiny model."""

import statistics

import pytest

from benchmarks import both_ends
from tests.conftest import load, write_model

CELLS = [([1.0, 1.02, 1.02], False), ([1.01, 1.04, 1.05], True), ([0.9, 1.04, 1.05], False)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400)).model


def test_a_cell_of_the_grid_says_what_was_loaded_and_how_far_the_bound_is(model):
    (row,) = both_ends.grid(model, [192], 2, [1.0], [])["rows"][:1]
    assert row["loaded_chunks"] + row["computed_chunks"] == 3
    hit, taken = row["hit_ms"], row["ttft_ms"]
    load, compute = taken["load"] - hit, max(1.0, row["slowed"]) * (taken["compute"]["median"] - hit)
    assert row["bound_ms"] == pytest.approx(hit + load * compute / (load + compute))
    over = [both / row["bound_ms"] for both in row["ttft_ms"]["both"]["samples"]]
    assert row["over_bound"]["median"] == pytest.approx(statistics.median(over))


@pytest.mark.parametrize("ratios, behind", [*CELLS, ([0.9, 1.07, 1.08], True)])
def test_behind_is_a_median_above_three_percent_whose_spread_is_above_one(ratios, behind):
    assert both_ends.is_behind(ratios) == behind
