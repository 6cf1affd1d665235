"""The machine's limits, all methods on one history, and the figures: they show what was measured."""
import copy
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from benchmarks import figures, limits, restoration
from benchmarks.baseline import spread
from legacy.tests.conftest import ROOT
from tools import random_models

RESULTS = ROOT / "benchmarks" / "results"


# The machine's limits ---------------------------------------------------------------------------------------------

@pytest.fixture
def small(monkeypatch):
    """Products and copies that take no time."""
    monkeypatch.setattr(limits, "HIDDEN", 64)
    monkeypatch.setattr(limits, "INTERMEDIATE", 32)
    monkeypatch.setattr(limits, "ROWS", {"cpu": 16})
    monkeypatch.setattr(limits, "READ", 1 << 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float32])
def test_a_product_is_counted_as_two_operations_a_weight_and_row(monkeypatch, dtype):
    monkeypatch.setattr(limits, "seconds", lambda what, device, rounds: [4.0, 2.0, 8.0])
    sizes, operations = dict(rows=3, inputs=64, outputs=32), 2 * 3 * 64 * 32
    assert limits.matrix_rates(dtype, "cpu", **sizes) == [operations / 4, operations / 2, operations / 8]
    assert limits.matrix_rate(dtype, "cpu", **sizes) == operations / 2, "the limit is the best"


def test_the_product_is_the_model_s_own(monkeypatch):
    """Through the same operator, with the weight in the order in which the model has it, and each round is one of them."""
    seen = []

    class Spy(limits.Linear):
        def forward(self, x):
            seen.append((self.reordered is not None, self.weight is None, x.dtype, tuple(x.shape)))
            return super().forward(x)
    monkeypatch.setattr(limits, "Linear", Spy)
    sizes = dict(rows=5, inputs=1024, outputs=1024)
    assert len(limits.matrix_rates("float32", "cpu", 3, **sizes)) == 3
    model = limits.Linear(1024, 1024, False, dtype=torch.float32, device="cpu")
    model.reorder()
    assert seen == [(model.reordered is not None, model.weight is None, torch.float32, (5, 1024))] * 4, "three, and a warm-up"


def test_reading_counts_the_bytes_that_a_sum_reads(monkeypatch):
    monkeypatch.setattr(limits, "seconds", lambda what, device, rounds: [2.0, 0.5])
    assert limits.memory_rates("cpu", size=4096) == [2048.0, 8192.0]
    assert limits.memory_bandwidth("cpu", size=4096) == 8192.0


def test_a_round_is_measured_after_a_warm_up():
    calls = []
    taken = limits.seconds(lambda: calls.append(1), torch.device("cpu"), 3)
    assert len(taken) == 3 and len(calls) == 4 and all(each > 0 for each in taken)


def test_without_a_gpu_there_is_no_copy_to_measure():
    with pytest.raises(ValueError, match="no link to copy over on the device 'cpu'"):
        limits.copy_rate("cpu")


def test_the_command_writes_every_limit_with_its_samples(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "limits.json"
    monkeypatch.setattr(sys, "argv", ["limits", "--device", "cpu", "--rounds", "2", "--json", str(path)])
    limits.main()
    found = json.loads(path.read_text())
    assert found["matrix"] == {"rows": 16, "inputs": 64, "outputs": 64} and found["read_bytes"] == 1 << 16
    for rate in (*found["matrix_flops_per_second"].values(), found["memory_bytes_per_second"]):
        assert len(rate["samples"]) == 2 and 0 < rate["min"] <= rate["median"] <= rate["max"] < math.inf
    assert list(found["matrix_flops_per_second"]) == ["float32", "bfloat16"] and "copy_bytes_per_second" not in found
    said = capsys.readouterr().out
    assert "products in bfloat16" in said and "reading memory" in said


# All methods on one history -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def bench():
    return restoration.Bench("random:tiny", "float32", "cpu", 2, (256, 384))


@pytest.fixture(scope="module")
def restored(bench):
    return restoration.measure(bench)


def test_every_method_brings_every_history_back(restored, bench):
    rows = restored["rows"]
    assert [(row["history_tokens"], row["method"]) for row in rows] == [
        (history, method) for history in (256, 384) for method in restoration.METHODS]
    assert restored["equal_tokens"] and restored["equal_rounds"] == restored["compared_rounds"] == 6, "also in the warm-up"
    speeds = [engine.load_link.bytes_per_second / 1e9
              for engine in (bench.offloaded, bench.both, bench.tiers)]
    assert restored["link"]["modelled"] and speeds == [restored["link"]["gbps"]] * 3 and speeds[0] > 0, "one link for all"
    for row in rows:
        if row["method"] in restoration.WHOLE:
            assert row["cached_tokens"] == row["history_tokens"]


def test_what_is_measured_is_finite_and_has_its_samples(restored):
    for row in restored["rows"]:
        figures_of_row = {what: row[what] for what in (*restoration.WHAT, "ttft_gain_over_recompute")}
        empty = {what for what, found in figures_of_row.items() if found is None}
        nothing_moves = {"recompute (01)": {"load_bubble", "compute_bubble"},
                         "blocks on the device (02)": set(restoration.WHAT) - {"ttft_ms"}}
        assert empty == nothing_moves.get(row["method"], set()), row["method"]
        for what, found in figures_of_row.items():
            assert what in empty or len(found["samples"]) == 2 and all(
                0 <= sample < math.inf for sample in found["samples"]), (row["method"], what)
        assert row["ttft_ms"]["min"] > 0
        for lane in ("load_bubble", "compute_bubble"):
            assert row[lane] is None or row[lane]["max"] <= 1


def test_each_method_keeps_what_it_says(bench, restored):
    kept = {row["method"]: row["bytes_per_token"] for row in restored["rows"] if row["history_tokens"] == 384}
    kv = bench.model.config.kv_numbers_per_token * 4
    assert kept["recompute (01)"] == 0
    assert kept["blocks on the device (02)"] == kept["KV offload (03)"] == kept["both ends (06)"] == kv
    assert kv < kept["three tiers (07)"] < 1.1 * kv, "a page has a header"


def test_no_transfer_is_faster_than_the_link(restored):
    for row in restored["rows"]:
        if row["method"] in ("KV offload (03)", "three tiers (07)"):
            assert row["over_bound"]["min"] > 0.999, row["method"]


def test_other_tokens_are_noticed_before_a_time_is_told(bench, monkeypatch, capsys):
    right = bench.methods["KV offload (03)"]
    monkeypatch.setitem(bench.methods, "KV offload (03)", lambda *asked: dict(right(*asked), tokens=[1, 2, 3, 4]))
    with pytest.raises(AssertionError, match="the tokens differ"):
        restoration.measure(bench)
    assert "TTFT" not in capsys.readouterr().out


def test_the_command_takes_histories_of_whole_chunks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["restoration", "--histories", "100"])
    with pytest.raises(SystemExit):
        restoration.main()
    assert "--histories" in capsys.readouterr().err


# Figures --------------------------------------------------------------------------------------------------------------

def of(*samples: float) -> dict:
    return spread(list(samples))


def system(name: str, kind: str, base: float) -> dict:
    return {"system": name, "kind": kind, "ttft_ms": {"p50": base, "p95": 3 * base, "p99": 5 * base, "samples": [base]}}


SYSTEMS = [("01 recompute", "ours", 400), ("02 blocks on the device", "ours", 120), ("07 three tiers", "ours", 65),
           ("transformers, dynamic cache kept", "peer", 110), ("transformers, offloaded cache kept", "peer", 170)]


def synthetic() -> dict:
    """Results with every part that a figure needs."""
    link, rows = {"modelled": True, "gbps": 0.25}, []
    for history in (256, 1024):
        for number, method in enumerate(restoration.METHODS):
            loads = number > 1
            rows.append(dict(
                history_tokens=history, method=method, ttft_ms=of(history / (number + 1), history / (number + 2)),
                restoration_ms=None if number == 1 else of(history / (number + 3), history / (number + 5)), bound_ms=None,
                over_bound=None, load_bubble=of(0.1 * number, 0.3) if loads else None,
                compute_bubble=of(0.08 * number, 0.2) if loads else None, bytes_per_token=1.0, cached_tokens=history))
    policies = {policy: dict(tokens_per_second=60.0 - 10 * number, whole_model_tokens_per_second=10.0 - number)
                for number, policy in enumerate(figures.POLICIES)}
    cells = [dict(batch=batch, context=context, bound_seconds={"hybrid": batch / 70}, gain={"static": of(1.0, 1.1)},
                  policies=copy.deepcopy(policies)) for batch in (32, 64) for context in (128, 1024)]
    found = {
        "restoration-classroom": dict(model="classroom", dtype="float32", link=link, rows=rows),
        "hybrid_blocks-small-a100": dict(grids=[dict(
            model="random:small", dtype="bfloat16", platform="a100", link_bytes_per_second=2.5e8, cells=cells)]),
        "matrix-conversations-classroom": dict(
            model="classroom", dtype="float32", link=link, systems=[system(*each) for each in SYSTEMS] + [
                {"system": "transformers, static cache kept", "kind": "peer", "not_run": "needs a GPU"}]),
        "matrix-documents-classroom": dict(model="classroom", dtype="float32", link=link, skews=[
            dict(zipf=zipf, systems=[system(name, kind, base / (1 + zipf)) for name, kind, base in SYSTEMS])
            for zipf in (0.0, 1.0, 2.0)])}
    return {"parts": {name: dict(command="python", seconds=1.0, error=None, found=each) for name, each in found.items()}}


ALL = ["restoration-classroom", "ttft-classroom", "bubbles-classroom", "throughput-small-a100", "conversations-classroom",
       "documents-classroom"]


def written(path) -> list[str]:
    """What can be read in a picture."""
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    paths = figures.draw(synthetic(), tmp_path_factory.mktemp("figures"))
    return {path.stem: path for path in paths}


def test_every_figure_is_drawn(drawn):
    assert list(drawn) == ALL


@pytest.mark.parametrize("name, words", [
    ("restoration-classroom", ["Restoration time, ms", "History, tokens", "1,024", "KV offload (03)", "recompute (01)",
                               "classroom, float32; modelled link, 0.25 GB/s; median of 2 rounds, bars: least to most"]),
    ("ttft-classroom", ["First token behind 1,024 tokens", "Time to first token, ms", "blocks on the device (02)", "427 ms"]),
    ("bubbles-classroom", ["three tiers (07)", "35 %", "link or storage", "processor"]),
    ("throughput-small-a100", ["Tokens per second", "batch of 64", "kv-only", "bound of hybrid", "1,024"]),
    ("conversations-classroom", ["01 recompute", "transformers, offloaded cache kept", "p99"]),
    ("documents-classroom", ["07 three tiers", "transformers, dynamic cache kept", "Time to first token, ms", "2"])])
def test_a_figure_says_what_it_shows(drawn, name, words):
    assert set(words) <= set(written(drawn[name]))


def test_what_did_not_run_is_not_drawn(drawn):
    assert "transformers, static cache kept" not in written(drawn["conversations-classroom"])
    assert "blocks on the device (02)" not in written(drawn["restoration-classroom"]), "there is nothing to bring back"


@pytest.mark.parametrize("name, path", [
    ("restoration-classroom", ("restoration-classroom", "rows", 7, "restoration_ms")),
    ("ttft-classroom", ("restoration-classroom", "rows", 7, "ttft_ms")),
    ("bubbles-classroom", ("restoration-classroom", "rows", 7, "compute_bubble")),
    ("throughput-small-a100", ("hybrid_blocks-small-a100", "grids", 0, "cells", 3, "bound_seconds", "hybrid")),
    ("conversations-classroom", ("matrix-conversations-classroom", "systems", 1, "ttft_ms", "p95")),
    ("documents-classroom", ("matrix-documents-classroom", "skews", 1, "systems", 2, "ttft_ms", "p50"))])
def test_another_number_gives_another_picture(drawn, tmp_path, name, path):
    results = synthetic()
    part, *keys, last = path
    at = results["parts"][part]["found"]
    for key in keys:
        at = at[key]
    at[last] = of(*(1.3 * sample for sample in at[last]["samples"])) if isinstance(at[last], dict) else 1.3 * at[last]
    now = {each.stem: each for each in figures.draw(results, tmp_path)}
    assert now[name].read_bytes() != drawn[name].read_bytes()
    same = set(ALL) - {name} - (set(ALL[:3]) if name in ALL[:3] else set())     # three figures draw one part
    assert all(now[each].read_bytes() == drawn[each].read_bytes() for each in same), "and no other"


def test_the_same_results_give_the_same_bytes(drawn, tmp_path):
    import matplotlib
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):         # a user's own style
        for path in figures.draw(synthetic(), tmp_path):
            assert path.read_bytes() == drawn[path.stem].read_bytes()
            assert b"<dc:date>" not in path.read_bytes()


def extents(figure) -> list:
    """Every text of a figure, and where it lies, in pixels; without the line from a name to its point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    FigureCanvasAgg(figure).draw()
    return [(text.get_text(), Text.get_window_extent(text)) for text in figure.findobj(Text)
            if text.get_text() and text.get_visible()]


def test_pictures_are_720_pixels_wide_and_hold_all_their_text(drawn):
    import matplotlib
    with matplotlib.rc_context(figures.STYLE):
        for name, begins, function, claim in figures.FIGURES:
            (_, entry), = figures.entries(synthetic(), begins, claim)
            figure = function(entry)
            assert figure.get_figwidth() * 96 == 720
            shown = next(written(path) for stem, path in drawn.items() if stem.startswith(name + "-"))
            (width, height), boxes = figure.get_size_inches() * figure.dpi, extents(figure)
            assert len(boxes) >= len(shown) > 5
            for text, box in (each for each in boxes if each[0] in shown):       # not ticks beyond the axis' end
                assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, (name, text)


def test_names_at_the_ends_of_lines_do_not_lie_on_each_other():
    """Also where all lines end in one point."""
    import matplotlib
    results = synthetic()
    found = results["parts"]["restoration-classroom"]["found"]
    for row in found["rows"]:
        row["restoration_ms"] = row["restoration_ms"] and of(100.0, 100.0)
    with matplotlib.rc_context(figures.STYLE):
        boxes = [box for text, box in extents(figures.restoration(found)) if text in restoration.METHODS]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 4 and all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:]))


@pytest.mark.parametrize("missing, figures_of_it", [
    ("restoration-classroom", ALL[:3]), ("hybrid_blocks-small-a100", ALL[3:4]),
    ("matrix-conversations-classroom", ALL[4:5]), ("matrix-documents-classroom", ALL[5:])])
def test_a_missing_part_leaves_its_figures_out(tmp_path, capsys, missing, figures_of_it):
    results = synthetic()
    del results["parts"][missing]
    assert [path.stem for path in figures.draw(results, tmp_path)] == [name for name in ALL if name not in figures_of_it]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(figures_of_it) and all(re.fullmatch(
        rf"Left out {name.rsplit('-', 2 if 'throughput' in name else 1)[0]}: no part .* was run\.", line)
        for name, line in zip(figures_of_it, said))


def test_a_part_that_failed_or_is_not_whole_is_left_out_and_named(tmp_path, capsys):
    results = synthetic()
    results["parts"]["hybrid_blocks-small-a100"].update(error="it ran out of memory", found=None)
    for row in results["parts"]["restoration-classroom"]["found"]["rows"]:
        row["load_bubble"] = None
    assert {path.stem for path in figures.draw(results, tmp_path)} == set(ALL) - {"throughput-small-a100", "bubbles-classroom"}
    assert capsys.readouterr().out.splitlines() == [
        "Left out bubbles-classroom: no method loaded anything.",
        "Left out throughput: hybrid_blocks-small-a100 failed: it ran out of memory."]


def test_two_parts_on_one_model_are_two_figures(tmp_path):
    results = synthetic()
    other = copy.deepcopy(results["parts"]["restoration-classroom"])
    other["found"]["dtype"] = "bfloat16"
    results["parts"]["restoration-classroom-bfloat16"] = other
    names = [path.stem for path in figures.draw(results, tmp_path)]
    assert names[:2] == ["restoration-classroom", "restoration-classroom-bfloat16"] and len(set(names)) == len(names)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert figures.draw(synthetic(), tmp_path / "figures") == []
    assert capsys.readouterr().out == "Figures need matplotlib: pip install -r requirements-dev.txt.\n"
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(synthetic()))
    monkeypatch.setattr(sys, "argv", ["figures", str(path)])
    with pytest.raises(SystemExit) as stopped:
        figures.main()
    assert stopped.value.code == 1


def test_the_command_draws_beside_the_results(monkeypatch, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["figures", str(path)])
    with pytest.raises(SystemExit, match="cannot be read"):
        figures.main()
    path.write_text(json.dumps(synthetic()))
    figures.main()
    assert sorted(each.stem for each in (tmp_path / "cpu").iterdir()) == sorted(ALL)
    assert capsys.readouterr().out.count("written: ") == len(ALL)


def test_the_standing_results_are_drawn(tmp_path, capsys):
    """What lies in benchmarks/results, whether each benchmark wrote it or all of them together."""
    parts = {}
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        parts.update(found["parts"] if "parts" in found else {path.stem: {"error": None, "found": found}})
    names = {path.stem for path in figures.draw({"parts": parts}, tmp_path)}
    assert {"restoration-classroom", "throughput-small-a100"} <= names
    assert "lacks what is drawn" not in capsys.readouterr().out


def test_the_limits_product_is_that_of_a_model():
    hidden, intermediate, *_ = random_models.GEOMETRIES["tinyllama"]
    assert (limits.HIDDEN, limits.INTERMEDIATE) == (hidden, intermediate)
