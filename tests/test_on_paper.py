"""tools/on_paper.py: the numbers that are taken from the papers, and the verdicts that are computed from them."""

import json

import pytest

from benchmarks import claims, measure
from tools import on_paper

planned = on_paper.planned
SEVEN, THIRTEEN, THIRTY = on_paper.MODELS


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return on_paper.main()["rows"]


def row(rows: list[dict], table: str, name: str) -> dict:
    (found,) = (row for row in rows if row["table"].startswith(table) and row["name"].startswith(name))
    return found


@pytest.mark.parametrize("model, balance", [(SEVEN, 24e9), (THIRTEEN, 21e9), (THIRTY, 37e9)])
def test_projecting_takes_as_long_as_the_transfer_at_the_papers_bandwidth(model, balance):
    """By section 3.2, recomputing takes (24TD^2 + T^2 D) / 4TD^2 = 6 + T / 4D times as long as projecting."""
    costs = on_paper.layer_costs(model, 1024, on_paper.PEAK, balance)
    assert costs.load_states == pytest.approx(costs.project) and costs.load_kv == 2 * costs.load_states
    costs = on_paper.layer_costs(SEVEN, 2048, on_paper.PEAK, 32e9)
    assert costs.recompute / costs.project == pytest.approx(6 + 2048 / (4 * 4096))


def test_verdicts_agree_with_table_3_but_not_with_equation_1(rows, monkeypatch):
    verdicts = [row(rows, "Table 3", f"{model.name}, closed form")["verdict"] for model in on_paper.MODELS]
    assert verdicts == ["yes", "yes", "no: 6.00 above"]
    assert row(rows, "Table 3", "30B, bytes: K and V over the printed")["verdict"] == "yes"
    equation, kv = (row(rows, "Equation 1", f"70B, MB a token, {what}") for what in ("by", "K and V"))
    assert equation["ours"] == 2 * kv["ours"] and equation["verdict"] != "yes" == kv["verdict"]
    monkeypatch.setitem(on_paper.PAPER, "30B schedule", (2, 46, 0))
    assert row(on_paper.main()["rows"], "Table 3", "30B, closed form")["verdict"] == "yes"


def test_each_figure_is_judged_once_and_printed(capsys):
    rows = on_paper.main()["rows"]
    json.dumps(rows)
    assert len({(each["table"], each["name"]) for each in rows}) == len(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert {line.split(". ")[0] for line in lines} >= {
        "Table 3", "Section 3.2", "Figure 11 a-c", "Figure 11 d-f", "Figure 11 g-i", "Figure 12", "Figure 13a", "Figure 5a",
        "Figures 3 and 5b", "Figures 6 and 8", "Section V-E", "Figure 8", "Table III"}  # fmt: skip
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


def test_a_claim_on_a_gpu_prefers_the_papers_size():
    times = dict(tinyllama=(40, 50), llama2=(30, 20))
    rows = [dict(model=f"{model}-7b" if model == "llama2" else model, history=4096, way=way, ttft_ms=measure.spread([ms]))
            for model, each in times.items() for way, ms in zip(("03", "05"), each)]  # fmt: skip
    assert claims.on_gpu({"gpu-x": dict(papers=dict(rows=rows[:2]))}, ("03", "05")) == "0.80 (tinyllama, 4,096)"
    both = {"gpu-x": dict(papers=dict(rows=rows)), "gpu-y": dict(papers=dict(rows=[]))}
    assert claims.on_gpu(both, ("03", "05")) == "1.50 (llama2-7b, 4,096)"
