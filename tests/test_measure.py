"""The parts that all benchmarks share, the pages that show their results, and tools/on_paper.py: the numbers of the papers."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import claims, measure, tables
from tests.conftest import ROOT
from tools import on_paper, report

# 1. Benchmarks ---------------------------------------------------------------------------------


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


# 2. The papers' numbers, and verdicts that are computed from them ------------------------------


def test_each_figure_is_judged_once_and_printed(capsys):
    rows = on_paper.main()["rows"]
    json.dumps(rows)
    assert len({(each["table"], each["name"]) for each in rows}) == len(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert {line.split(". ")[0] for line in lines} >= {
        "Table 3", "Section 3.2", "Figure 11 a-c", "Figure 11 d-f", "Figure 11 g-i", "Figure 12", "Figure 13a", "Figure 5a",
        "Figures 3 and 5b", "Figures 6 and 8", "Section V-E", "Figure 8", "Table III",
        "HCache 2.4 and 6.3.3; Cake's introduction and 2.3; part 12 of the series behind chapter 03"}  # fmt: skip
    each = {row["name"]: (row["verdict"], row["ours"]) for row in rows if row["table"].startswith("HCache 2.4")}
    assert each["70B, seconds to load 25 GB at 20 Gbit/s"] == ("yes", 10.0)
    computing, _ = each["70B, seconds to compute 72K tokens on an A100"]
    assert computing.endswith("above"), "a 70B takes minutes on one A100"
    agree = sum(each["verdict"] == "yes" for each in rows)
    assert sum(int(words.split()[0]) for words in lines[-1].split(": ")[1].split(", ")) == agree < len(rows)


@pytest.mark.parametrize("paper, ours, verdict, difference", [
    ((1.33, 1.81), 1.5, "yes", 0), ((1.33, 1.81), 1.95, "no: 0.14 above", 0.14),
    ((1.33, 1.81), 1.3, "no: 0.03 below", -0.03), (31, 30, "yes", -1), (31, 29, "no: 2.00 below", -2),
    (2.0, 2.09, "yes", 0.09), (2.0, 2.2, "no: 0.20 above", 0.2), (2.0, 1.8, "no: 0.20 below", -0.2)])
def test_a_verdict_says_how_far_a_number_is_from_the_papers(paper, ours, verdict, difference):
    judged = on_paper.judge("table", "name", paper, ours)
    assert judged["verdict"] == verdict and judged["difference"] == pytest.approx(difference)


def test_a_claim_without_results_shows_its_arithmetic_only():
    table = claims.table({}, paper=on_paper)
    assert {tuple(row[5:]) for row in table} == {("", "not run", "not measured")}
    assert [any(map(str.isdigit, row[3])) for row in table] == [claim.allowed is not None for claim in claims.CLAIMS]


@pytest.mark.parametrize("asked, verdict", [
    ((">=", 1.2), "met"), (("<=", 1.2), "**missed** in 1 (m: 1.3)"), (("slower", 0.03), "**missed** in 1 (m: 1.3)"),
    (("slower", 0.3), "met")])  # fmt: skip
def test_a_claim_is_judged_by_rows_whose_mechanism_ran(asked, verdict):
    claim = claims.Claim("01", "", "-", asked, "engine", claims.cells("part", "{model}", lambda row: row["ratio"], lambda row: row["bytes"]))
    found = [dict(claim="part", model=model, rows=[dict(ratio=measure.spread(ratios), bytes=size)])
             for model, ratios, size in (("m", [1.2, 1.3, 1.4], 1), ("n", [9.0, 9.0], 0))]  # fmt: skip
    assert claims.judged(claim, found) == ("1.3", verdict)


def test_results_of_two_commits_are_not_of_one_run():
    file = report.read()["engine-cpu"]
    one, two = ({f"{name}-cpu": dict(file, commit=commit) for name, commit in zip("ab", commits)} for commits in ("11", "12"))
    assert "commit 2" in report.mixed(two) and not report.mixed(one) and report.conditions(one).count("Measured") == 1
