"""The planner on paper: what it takes from the paper, and that its verdicts are computed."""
import json

import pytest

from tools import on_paper

planner = on_paper.planner

FIELDS = {"table", "name", "paper", "ours", "difference", "verdict"}


@pytest.fixture(scope="module")
def report() -> dict:
    return on_paper.main()


def row(report: dict, name: str) -> dict:
    found = [row for row in report["rows"] if row["name"].startswith(name)]
    assert len(found) == 1, name
    return found[0]


@pytest.mark.parametrize("number, balance", [(0, 24e9), (1, 21e9), (2, 37e9)])
def test_balance(number, balance):
    """Projecting takes as long as transferring at the bandwidth that the paper names, and not beside it."""
    for bandwidth, shorter in ((balance, False), (balance * 1.01, True)):
        costs = on_paper.layer_costs(on_paper.MODELS[number], 1024, on_paper.PEAK, bandwidth)
        assert (costs.load_states < costs.project * (1 - 1e-9)) == shorter
        assert costs.load_kv == 2 * costs.load_states
        assert shorter or costs.load_states == pytest.approx(costs.project)


def test_formulas_of_the_paper():
    """Section 3.2: recomputing a layer takes 6 + T / 4D times as long as projecting it; Table 3's bytes."""
    costs = on_paper.layer_costs(on_paper.MODELS[0], 2048, on_paper.PEAK, 32e9)
    assert costs.recompute / costs.project == pytest.approx(6 + 2048 / (4 * 4096))
    assert costs.load_kv == 2048 * 16384 / 32e9
    assert on_paper.kept(on_paper.MODELS[0], on_paper.letters(0, 31, 1)) == 31 * 8192 + 16384
    assert on_paper.MODELS[0].efficiency == pytest.approx(on_paper.SHARE_OF_PEAK)


def test_grouped_queries_are_counted():
    """Llama-3-8B has 218,103,808 weights in a layer, norms aside; a quarter of the heads are KV heads."""
    model, tokens = on_paper.OWN[1], 512
    costs = on_paper.layer_costs(model, tokens, 1e12 / model.efficiency, 1e9)
    assert costs.recompute == pytest.approx((2 * 218_103_808 * tokens + 2 * tokens ** 2 * 4096) / 1e12)
    assert costs.project == pytest.approx(2 * 2 * 4096 * 1024 * tokens / 1e12)
    assert (costs.load_states, costs.load_kv) == (tokens * 8192 / 1e9, tokens * 4096 / 1e9)


def test_closed_form(report):
    """At 27.6 GB/s the paper's formula gives 30 + 2 and 35 + 5 layers, each one from Table 3, and 46 for 30B,
    six from it."""
    plans = [planner.closed_form(model.layers, on_paper.on_ssds(model)) for model in on_paper.MODELS]
    assert [tuple(map(plan.count, "RHK")) for plan in plans] == [(0, 30, 2), (0, 35, 5), (2, 46, 0)]
    verdicts = [row(report, f"{model}, closed form")["verdict"] for model in ("7B", "13B", "30B")]
    assert verdicts == ["yes", "yes", "no: 6.00 above"]


def test_every_row_has_the_fields(report):
    json.dumps(report)
    assert all(FIELDS <= set(each) for each in report["rows"])
    assert len({(each["table"], each["name"]) for each in report["rows"]}) == len(report["rows"])
    compared = [each for each in report["rows"] if each["paper"] is not None]
    assert report["compared"] == len(compared) < len(report["rows"])
    assert report["agree"] == sum(each["verdict"] == "yes" for each in compared)
    assert 0 < report["agree"] < report["compared"]


@pytest.mark.parametrize("paper, ours, verdict, difference", [
    ((1.33, 1.81), 1.5, "yes", 0), ((1.33, 1.81), 1.95, "no: 0.14 above", 0.14),
    ((1.33, 1.81), 1.3, "no: 0.03 below", -0.03),
    (2.0, 2.09, "yes", 0.09), (2.0, 2.2, "no: 0.20 above", 0.2), (2.0, 1.8, "no: 0.20 below", -0.2)])
def test_verdict(paper, ours, verdict, difference):
    rows = []
    on_paper.judge(rows, "table", "name", paper, ours)
    assert rows[0]["verdict"] == verdict and rows[0]["difference"] == pytest.approx(difference)


@pytest.mark.parametrize("key, value, name", [
    ("30B schedule", (2, 46, 0), "30B, closed form"), ("7B schedule", (0, 20, 12), "7B, closed form"),
    ("30B bytes", 2.09, "30B, bytes"), ("13B, h800", 1.95, "13B, h800, as"),
    ("GPUs, over KV", (1.0, 1.1), "7B, a100: over KV"),
    ("more SSDs, over recomputing", (5, 12), "30B, 16 SSDs: over r"),
    ("recomputing, 16K over 1K", 0.87, "7B, recomputing: N^2"),
    ("layers recomputed at 16K", 2, "30B, layers recomputed"),
    ("over naive", (1.2, 1.5), "balanced (7B, 4 SSDs): HCache over n"),
    ("token-wise", 1.0, "token-wise: speed"), ("tokens H", 512, "token-wise: 766")])
def test_verdicts_follow_the_paper(report, monkeypatch, key, value, name):
    """Another value in the paper, and the verdict is the other one."""
    monkeypatch.setitem(on_paper.PAPER, key, value)
    before, after = row(report, name), row(on_paper.main(), name)
    assert before["ours"] == after["ours"]
    assert (before["verdict"] == "yes") != (after["verdict"] == "yes")


def test_the_plan_is_never_slower(report):
    timed = [each["seconds"] for each in report["rows"] if "seconds" in each]
    assert len(timed) > 50
    for seconds in timed:
        singles = min(seconds[name] for name in ("KV", "HCache-O", "naive", "recomputing"))
        assert seconds["chapter 05"] <= seconds["HCache"] * (1 + 1e-9) <= singles * (1 + 2e-9)


def test_hidden_states_only_where_they_are_smaller(report):
    own = [each for each in report["rows"] if each["table"] == "Own account"]
    assert len(own) == len(on_paper.LATER) * len(on_paper.OWN) * 2
    for each in own:
        assert ("H" in each["plan"]) == each["name"].startswith("Llama-2-7B")
        assert each["ours"] >= 1


def test_output(capsys):
    on_paper.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 130 and lines[-1].endswith("of its range.")
    assert "rows agree with the paper" in lines[-1]
    for key, paper in on_paper.PAPER.items():
        shown = on_paper.counts(on_paper.letters(*paper)) if "schedule" in key else on_paper.printed(paper)
        assert any(shown in line for line in lines), key


def test_two_pointers_meet_where_both_take_as_long():
    compute, load, both, share = on_paper.cake_seconds(14e3, 4, 0.5)
    assert both == pytest.approx((1 - share) * load)
    assert on_paper.cake_seconds(14e3 * share, 4, 0.5)[0] == pytest.approx(both)
    assert both < min(compute, load) and both > compute * load / (compute + load) * 0.9
    small, large = (on_paper.cake_seconds(14e3, 4, share)[0] for share in (0.1, 0.9))
    assert small - large == pytest.approx(16, rel=0.15)
    assert on_paper.cake_seconds(14e3, 4, 1.0, smaller=2.0)[1] == pytest.approx(load / 2)


def test_cakes_figures_stand_beside_ours(capsys):
    report = on_paper.cake()
    assert report["agree"] == sum(each["verdict"] == "yes" for each in report["rows"])
    assert 0 < report["agree"] < report["compared"]
    equation, kv = report["rows"][:2]
    assert equation["ours"] == pytest.approx(2 * kv["ours"]) and equation["verdict"] != "yes" == kv["verdict"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 130


def test_the_factor_follows_from_its_operations(report):
    """24TD^2 + T^2 D over 4TD^2, where a layer's operations are those of section 3.2."""
    rows = [each for each in report["rows"] if each["table"] == "Section 3.2"]
    assert len(rows) == 12
    for each in rows:
        name, tokens = each["name"].split(", ")
        model = next(model for model in (*on_paper.MODELS, *on_paper.OWN) if model.name == name)
        tokens, width = int(tokens.split()[0].replace(",", "")), model.width
        formula = 6 + tokens / (4 * width)
        assert each["flops"]["project"] == 4 * tokens * width**2
        assert each["ours"] == each["flops"]["whole"] / each["flops"]["project"]
        assert (abs(each["ours"] / formula - 1) < 1e-9) == (model.ffn is None)
        if model.ffn is None:
            assert each["flops"]["whole"] == 24 * tokens * width**2 + tokens**2 * width


def test_tokens_divided():
    """A share s is projected. Link and processor are even where 2s = s + 8 (1 - s), and 4 - 2s = 4s."""
    assert on_paper.token_wise(on_paper.Costs(8.0, 1.0, 2.0, 4.0), 4, 100) == (11, 100)
    assert on_paper.token_wise(on_paper.Costs(8.0, 4.0, 2.0, 4.0), 4, 100) == (0, 66)
    assert on_paper.token_wise(on_paper.Costs(8.0, 1.0, 2.0, 4.0), 4, 128, 32) == (0, 128)


def test_captures_ratio_grows_with_the_width_and_both_lanes_end_together(capsys):
    ratios = {name: on_paper.capture_ratio(name) for name in on_paper.OPT}
    assert ratios["6.7B"][1] < ratios["30B"][1] < ratios["66B"][1], "the printed ones fall"
    report = on_paper.capture()
    assert len(report["rows"]) == 16 and 0 < report["agree"] < 16
    lanes = dict(W=25.0, K=100.0, R=92.0, B=8.0, M=12.5)
    share = (25 + 100 - 12.5 - 8) / (92 + 50)
    least = on_paper.capture_seconds(**lanes, act=share)
    assert least <= min(on_paper.capture_seconds(**lanes, act=share + more) for more in (-0.01, 0.01))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 130


def test_over_ranks_loading_and_projecting_fall_alike(capsys):
    one, two, four, *ssds = on_paper.divided()
    assert len(ssds) == 3 and ssds[-1]["ratio"] > 1.33 > one["ratio"]
    assert one["load"] == pytest.approx(2 * two["load"]) == pytest.approx(4 * four["load"])
    assert four["ratio"] == pytest.approx(one["ratio"]) and four["gather"] < four["load"]
