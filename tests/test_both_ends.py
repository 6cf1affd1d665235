"""What `python -m benchmarks.both_ends` measures: that its rows are what they say, on a tiny model."""

import argparse
import statistics

import pytest

from benchmarks import both_ends
from tests.conftest import load, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "wider", vocab_size=400)).model


def test_a_cell_of_the_grid_says_what_was_loaded_and_how_far_the_bound_is(model):
    row = next(both_ends.grid(model, argparse.Namespace(histories=[192], rounds=2, r=[1.0], share=[])))
    assert row["loaded_chunks"] + row["computed_chunks"] == 3
    hit, taken = row["hit_ms"], row["ttft_ms"]
    load, compute = taken["load"] - hit, max(1.0, row["slowed"]) * (taken["compute"]["median"] - hit)
    assert row["bound_ms"] == pytest.approx(hit + load * compute / (load + compute))
    over = [both / row["bound_ms"] for both in row["ttft_ms"]["both"]["samples"]]
    assert row["over_bound"]["median"] == pytest.approx(statistics.median(over))
