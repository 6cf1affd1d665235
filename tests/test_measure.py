"""What the benchmarks share: the test for being slower, rounds, and tables.

All committed results can be shown as tables."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measure, planned, tables
from tests.conftest import ROOT
from tools import gpu_report, report


@pytest.mark.parametrize("ratios, by, behind", [
    ([1.0, 1.02, 1.02], 0.03, False), ([1.01, 1.04, 1.05], 0.03, True), ([1.01, 1.04, 1.05], 0.04, False),
    ([0.9, 1.04, 1.05], 0.03, False), ([0.9, 1.07, 1.08], 0.03, False), ([1.07], 0.03, True),
])  # fmt: skip
def test_behind_is_a_median_above_what_is_allowed_whose_lower_quartile_is_above_one(ratios, by, behind):
    assert measure.is_slower(ratios, by) == behind


def test_all_ways_are_asked_the_same_in_each_round():
    questions, asked = iter("abc"), []
    ways = {name: lambda question, name=name: asked.append(name + question) or question for name in "12"}
    taken = measure.same_question_in_turn(ways, 2, lambda: next(questions))
    assert asked == ["1a", "2a", "1b", "2b", "1c", "2c"] and taken == {"1": ["b", "c"], "2": ["b", "c"]}


def test_a_template_shows_figures_by_their_names_and_what_a_row_lacks_is_empty():
    row = {"tokens": 1984, "ms": measure.spread([2.0, 1.0, 3.0]), "at": {"03": {"plan": "RHHKK"}}}
    columns = {"tokens": "{tokens:,}", "TTFT": "{ms:ms}, {ms:spread}", "plan": "{at[03][plan]:plan}", "05": "{at[05][plan]}"}
    assert tables.table("Caption", columns, [row]) == "\n".join([
        "Caption", "", "| tokens | TTFT | plan | 05 |", "| --- | --- | --- | --- |",
        "| 1,984 | 2.0 ms, 2.00 (1.00 to 3.00) | 1 R, 2 H, 2 K |  |"])  # fmt: skip
    assert tables.table("Caption", columns, []) == ""


def test_rows_that_differ_in_one_key_become_one():
    rows = [dict(model=model, link=link) for model in "ab" for link in (1, 2)]
    assert [(row["model"], list(row["at"])) for row in tables.grouped(rows, ("model",), "link")] == [("a", [1, 2]), ("b", [1, 2])]


def test_a_run_measures_the_wanted_parts_and_loses_no_rows_of_a_part_that_fails(tmp_path, capsys):
    def part(model, arguments):
        yield dict(name=arguments.name, rounds=arguments.rounds, ms=measure.spread([1.0, 2.0, 3.0]))

    def fails(model, arguments):
        yield from part(model, arguments)
        raise ValueError("no more")

    parser = measure.parser("", parts := {"a": (fails, ["x", "y"]), "b": (part, ["y"]), "c": (part, ["z"])})
    arguments = parser.parse_args(["--only", "a", "b", "--json", str(tmp_path / "found.json")])
    arguments.rounds = 7
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    show = lambda found: tables.table("Found", {"model": "{model}", "ms": "{ms:spread}"}, tables.rows(found, "b"))  # noqa: E731
    with pytest.raises(SystemExit, match="a of x, a of y[.]"):
        measure.run("some", parts, show, arguments, load=lambda *_: (model,))
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert [(entry["claim"], entry["model"]) for entry in found] == [("a", "x"), ("a", "y"), ("b", "y")]
    assert [entry["rows"][0]["name"] for entry in found] == ["x", "y", "y"]
    said = capsys.readouterr().out
    assert all(entry["rows"][0]["modelled"] for entry in found), "each row says whether its link is modelled"
    assert "b, y: modelled True, name y, rounds 7, ms 2\n" in said and "| y | 2.00 (1.00 to 3.00) |" in said


def test_results_of_two_commits_are_not_of_one_run():
    file = report.read()["engine-cpu"]
    one, two = ({f"{name}-cpu": dict(file, commit=commit) for name, commit in zip("ab", commits)} for commits in ("11", "12"))
    assert "commit 2" in report.mixed(two) and not report.mixed(one) and report.conditions(one).count("Measured") == 1


def test_with_a_gpu_results_bear_its_name_and_there_is_one_link(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    measure.write("some", "cuda", tmp_path / "last", [])
    measure.write("some", "cpu", tmp_path / "last", [])
    names = {path.name: json.loads(path.read_text())["processor"] for path in (tmp_path / "last").iterdir()}
    assert names.pop("some-nvidia-h100-80gb-hbm3.json") == "NVIDIA H100 80GB HBM3"
    assert list(names) == ["some-cpu.json"] and "H100" not in names["some-cpu.json"]
    there, here = (SimpleNamespace(device=torch.device(device)) for device in ("cuda", "cpu"))
    assert list(planned.links_of(there)) == [measure.AS_IT_IS] and measure.modelled(there, 1e9) is None
    assert len(planned.links_of(here)) == 3 and measure.modelled(here, 1e9) == 1e9


def test_the_report_of_a_gpu_names_what_failed_and_says_without_one_what_it_would_run(monkeypatch, capsys):
    same = dict(model="7b", history=4096, kernels=5)
    rows = [dict(same, way="03", ttft_ms=measure.spread([40.0, 41.0, 52.0]), allowed_ms=30.0),
            dict(same, way="05", ttft_ms=measure.spread([20.5]), allowed_ms=20.0), dict(model="7b", history=1, way="04", failed="no room")]  # fmt: skip
    found = dict(papers=dict(code=124, said="it hung", seconds=3.0, rows=rows), tests=dict(code=0, said="9 passed", seconds=1.0, rows=[]))
    shown = gpu_report.page("gpu-H100", found)
    assert "| 03 | 41 ms of 30 ms; 5 |" in shown and "not run" not in shown
    assert re.search(r"^.* 1.62 to 1.93, .* \| 2.00 of 1.50 \(7b, 4,096\) \|$", shown, re.M), "the row has the paper's, the measured and the allowed number"
    assert "9 passed" in shown and shown.endswith("- papers (124): it hung\n- papers, 7b, 04 behind 1: no room\n")
    assert sum(limit for _, limit, *_ in gpu_report.PARTS.values()) < 14 * 60
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_report.main()
    said = capsys.readouterr().out
    assert all(words.split(" {file}")[0] in said for words, _ in gpu_report.JOBS.values())


def test_requirements_and_readme_name_the_same_oldest_pytorch_and_this_one_is_in_the_range():
    ends = re.search(r"^torch>=([\d.]+),<([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M).groups()
    assert f"PyTorch {ends[0]} is the oldest" in (ROOT / "README.md").read_text()
    oldest, this, newer = (tuple(map(int, version.split(".")[:2])) for version in (ends[0], torch.__version__, ends[1]))
    assert oldest <= this < newer


@pytest.mark.parametrize("part", report.PARTS)
def test_every_part_of_a_page_is_made_of_the_results_and_a_benchmarks_shows_what_it_has_found_and_no_more(part):
    results = report.read()
    assert report.PARTS[part](results)
    if file := results.get(f"{part.replace('-', '_')}-cpu"):
        file["found"] = file["found"][:1]
        assert report.PARTS[part](results)
        file["found"] = []
        assert report.PARTS[part](results) == ""
