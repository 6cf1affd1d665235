"""The parts that all benchmarks share, and the pages that show their results."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measure, tables
from tests.conftest import ROOT
from tools import report


@pytest.mark.parametrize("ratios, by, is_slower", [
    ([1.0, 1.02, 1.02], 0.03, False), ([1.01, 1.04, 1.05], 0.03, True), ([1.01, 1.04, 1.05], 0.04, False),
    ([0.9, 1.04, 1.05], 0.03, False), ([0.9, 1.07, 1.08], 0.03, False), ([1.07], 0.03, True),
])  # fmt: skip
def test_a_slower_way_has_a_median_above_the_limit_and_a_lower_quartile_above_one(ratios, by, is_slower):
    assert measure.is_slower(ratios, by) == is_slower


def test_each_round_asks_all_ways_the_same_question():
    questions, asked = iter("abc"), []
    ways = {name: lambda question, name=name: asked.append(name + question) or question for name in "12"}
    taken = measure.same_question_in_turn(ways, 2, lambda: next(questions))
    assert asked == ["1a", "2a", "1b", "2b", "1c", "2c"] and taken == {"1": ["b", "c"], "2": ["b", "c"]}


def test_a_run_measures_the_chosen_parts_and_keeps_the_rows_of_a_part_that_fails(tmp_path, capsys):
    def part(model, arguments):
        yield dict(name=arguments.name, ms=measure.spread([1.0, 2.0, 3.0]))

    def fails(model, arguments):
        yield from part(model, arguments)
        raise ValueError("no more")

    parser = measure.parser("", parts := {"a": (fails, ["x", "y"]), "b": (part, ["y"]), "c": (part, ["z"])})
    arguments = parser.parse_args(["--only", "a", "b", "--json", str(tmp_path / "found.json")])
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    show = lambda found: tables.table("Found", {"model": "{model}", "ms": "{ms:spread}"}, tables.rows(found, "b"))  # noqa: E731
    with pytest.raises(SystemExit, match="a of x, a of y[.]"):
        measure.run("some", parts, show, arguments, load=lambda *_: (model,))
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert [(entry["claim"], entry["rows"][0]["name"]) for entry in found] == [("a", "x"), ("a", "y"), ("b", "y")]
    said = capsys.readouterr().out
    assert "b, y: modelled True, name y, ms 2\n" in said and "| y | 2.00 (1.00 to 3.00) |" in said


def test_results_of_two_commits_are_not_of_one_run():
    file = report.read()["engine-cpu"]
    one, two = ({f"{name}-cpu": dict(file, commit=commit) for name, commit in zip("ab", commits)} for commits in ("11", "12"))
    assert "commit 2" in report.mixed(two) and not report.mixed(one) and report.conditions(one).count("Measured") == 1


def test_requirements_and_readme_name_the_same_oldest_pytorch():
    ends = re.search(r"^torch>=([\d.]+),<([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M).groups()
    assert f"PyTorch {ends[0]} is the oldest" in (ROOT / "README.md").read_text()
    oldest, this, newer = (tuple(map(int, version.split(".")[:2])) for version in (ends[0], torch.__version__, ends[1]))
    assert oldest <= this < newer


@pytest.mark.parametrize("part", report.PARTS)
def test_a_part_of_a_page_shows_its_results(part):
    """Without results, the part of a benchmark is empty."""
    results = report.read()
    assert report.PARTS[part](results)
    if file := results.get(f"{part.replace('-', '_')}-cpu"):
        file["found"] = file["found"][:1]
        assert report.PARTS[part](results)
        file["found"] = []
        assert report.PARTS[part](results) == ""
