"""tools/on_paper.py: the numbers that are taken from the papers, and the verdicts that are computed from them."""

import json

import pytest

from benchmarks import claims, measure
from tools import on_paper


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return on_paper.main()["rows"]


def row(rows: list[dict], table: str, name: str) -> dict:
    (found,) = (row for row in rows if row["table"].startswith(table) and row["name"].startswith(name))
    return found


def test_verdicts_agree_with_table_3_but_not_with_equation_1(rows, monkeypatch):
    verdicts = [row(rows, "Table 3", f"{model.name}, closed form")["verdict"] for model in on_paper.MODELS]
    assert verdicts == ["yes", "yes", "no: 6.00 above"]
    assert row(rows, "Table 3", "30B, bytes: K and V over the printed")["verdict"] == "yes"
    equation, kv = (row(rows, "Equation 1", f"70B, MB a token, {what}") for what in ("by", "K and V"))
    assert equation["ours"] == 2 * kv["ours"] and equation["verdict"] != "yes" == kv["verdict"]
    monkeypatch.setitem(on_paper.PAPER, "30B schedule", (2, 46, 0))
    assert row(on_paper.main()["rows"], "Table 3", "30B, closed form")["verdict"] == "yes"


def test_sentences_of_the_papers_are_computed_from_sizes_and_speeds(rows):
    each = {row["name"]: (row["verdict"], row["ours"]) for row in rows if row["table"].startswith("HCache 2.4")}
    assert each["70B, seconds to load 25 GB at 20 Gbit/s"] == ("yes", 10.0)
    assert each["70B, contexts of 4,096 tokens beside 35 GB in 80 GB"] == ("yes", pytest.approx(45e9 / 1.342e9, rel=1e-3))
    computing, _ = each["70B, seconds to compute 72K tokens on an A100"]
    assert computing.endswith("above"), "a 70B takes minutes on one A100"


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
