"""The demos as a user runs them: tokens are verified before any time is printed, and the times show the mechanism."""

import json
import runpy
import signal
import sys

import pytest
from conftest import ROOT, write_model

from shell import lesson, random_models
from tests.support import forked
from tests.support.pasted import first_difference
from tools import check_docs


@pytest.mark.parametrize("chapter", check_docs.CHAPTERS)
def test_a_demo_verifies_its_tokens_and_then_shows_numbers(chapter, tmp_path):
    """All checks of a demo are in one test, because parallel test processes would otherwise each run the demo.

    If the mechanism is not ahead, the demo runs once more, since other tests may have used the cores."""
    ahead = globals()[f"chapter_{chapter[:2]}_is_ahead"]
    try:
        ahead(*demo(chapter, tmp_path, rounds=1))
    except AssertionError:
        ahead(*demo(chapter, tmp_path, rounds=3))


def demo(chapter: str, tmp_path, rounds: int) -> tuple[str, dict]:
    """Run a demo and compare its output with its lesson. Returns: (output, report)."""
    files = ["--json", tmp_path / "report.json", "--trace", tmp_path / "trace.json"]
    words = ROOT / f"{chapter}.py", "--demo", "--device", "cpu", "--rounds", rounds, *files
    done = forked.run(tmp_path, *words, HF_HUB_OFFLINE="1")  # rank 0 passes it to the other ranks
    assert done.returncode == 0 and "Loading" not in done.stderr, done.stdout + done.stderr     # a progress bar of `transformers`
    report, trace = (json.loads((tmp_path / name).read_text()) for name in ("report.json", "trace.json"))
    what_a_demo_says(chapter, done.stdout, report, trace)
    said = done.stdout.replace(f"(median of {rounds})", "(median of 3)")
    assert first_difference(check_docs.pasted()[chapter], said) is None, "the lesson shows another output"
    return done.stdout, report


def times(report, table: str = "") -> dict[str, float]:
    """Return each case's shortest TTFT, because other tests on the machine only make times longer."""
    rows = [row for row in report["rows"] if table in row.get("table", "-")]
    return {row["case"]: row["min"] for row in rows if "ttft_ms" in row and "case" in row}


def what_a_demo_says(chapter: str, said: str, report: dict, trace: dict):
    before, verified, after = said.partition("verified: all ")
    assert verified and " ms" not in before and " tokens/s" not in before
    assert " ms" in after and "|" in after, "the demo prints a table and a timeline"
    assert {"chapter", "model", "device", "dtype", "link", "verified", "rows"} <= set(report)
    assert report["chapter"] == chapter and report["verified"] is True
    names = {event["name"] for event in trace["traceEvents"]}
    assert "decode" in names and any(name.startswith("prefill") for name in names)
    if chapter >= "03":
        assert report["link"]["modelled"] is True
        what = {"06_bidirectional": "chunk 20", "07_tiered_storage": "page 0", "08_hybrid_blocks": "weights"}
        assert what.get(chapter, "layer 2") in names


@pytest.fixture(scope="module")
def plain_folder(request, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("plain"), max_position_embeddings=2048)
    (folder / "chat_template.jinja").unlink()
    tokenizer = random_models.byte_tokenizer(300)
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template if request.param == "no system role" else None
    return tokenizer.save_pretrained(folder) and folder


@pytest.mark.parametrize("plain_folder, chapter", [
    *(("no chat template", chapter) for chapter in check_docs.CHAPTERS[:-1]),
    ("no system role", "02_paged_kv"), ("no system role", "07_tiered_storage"),  # their demos have a system message
], indirect=["plain_folder"])  # fmt: skip
def test_a_demo_asks_a_model_that_knows_no_roles_and_a_slow_one_about_less(chapter, plain_folder, monkeypatch, capsys):
    monkeypatch.setattr(lesson, "SECONDS", 1e-6)
    run_until_compared(chapter, monkeypatch, "--model", str(plain_folder))
    assert ("Of 2048 tokens of context, 512 are used" in capsys.readouterr().out) == (chapter[:2] != "08"), "every demo except 08's shortens the context"


@pytest.mark.parametrize("chapter", ["03_cpu_offload", "04_hidden_state_cache", "06_bidirectional", "07_tiered_storage"])
def test_a_demo_takes_small_pools_as_they_are_and_says_which_one_is_too_small(chapter, monkeypatch, capsys):
    pools = ["--gpu-blocks", "--cpu-blocks"][: 1 + (chapter[:2] != "06")]
    for small in pools:
        with pytest.raises(SystemExit) as ended:
            run_until_compared(chapter, monkeypatch, *[f"{pool}={2 if pool == small else 64}" for pool in pools])
        assert "needs" in str(ended.value) and f"'{dict(zip(pools, ('device', 'host')))[small]}' has 2" in str(ended.value)
    run_until_compared(chapter, monkeypatch, *[f"{pool}=12" for pool in pools])


def run_until_compared(chapter: str, monkeypatch, *options):
    """Run a demo as far as the comparison with chapter 01. The rest only repeats its requests to time them."""
    def equal(pairs, *_):
        assert len(pairs) > 1 and all(theirs == ours for theirs, ours in pairs)
        raise RuntimeError("compared")

    monkeypatch.setattr(lesson, "equal", equal)
    monkeypatch.setattr(lesson, "in_turn", lambda ways, *_: {name: [way()] for name, way in ways.items()})
    monkeypatch.setattr(sys, "argv", [chapter, "--demo", "--device=cpu", "--max-tokens=4", *options])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(RuntimeError, match="^compared$"):
        runpy.run_path(str(ROOT / f"{chapter}.py"), run_name="__main__")


def test_a_wrong_count_in_a_lesson_is_noticed():
    """Other times are not differences."""
    for chapter, (right, wrong) in {
        "01_baseline": ("all 30 tokens", "all 31 tokens"), "03_cpu_offload": ("1296 of 1312", "1295 of 1312"),
        "06_bidirectional": ("is tiger", "is lion"), "07_tiered_storage": ("1034 tokens", "1035 tokens"),
        "08_hybrid_blocks": ("164 tokens", "165 tokens"), "09_tensor_parallel": ("512 tokens do", "513 do"),
    }.items():  # fmt: skip
        shown = check_docs.pasted()[chapter]
        assert first_difference(shown, shown.replace(" ms", "5 ms")) is None and right in shown
        assert first_difference(shown, shown.replace(right, wrong))
        assert first_difference(shown.replace(right, wrong), shown)


def chapter_01_is_ahead(said: str, report: dict):
    taken = times(report)
    assert taken["1900 tokens"] > 2 * taken["256 tokens"]


def chapter_02_is_ahead(said: str, report: dict):
    taken, rows = times(report), report["rows"]
    rates = {row["case"]: row["max"] for row in rows if "tokens_per_second" in row}
    assert taken["miss (not cached)"] > 2 * taken["gpu_hit"]
    assert rates["16 at once"] > 2 * rates["1 at once"]
    reserved, own, shared = (row["tokens_per_slot"] for row in rows if "memory" in row)
    assert reserved < 0.5 < 0.95 < own < 1 < shared


def chapter_03_is_ahead(said: str, report: dict):
    taken = times(report)
    assert min(taken["miss"], taken["slow link"]) > 1.5 * taken["cpu_hit"] > taken["gpu_hit"]
    assert any(row.get("bytes_in") for row in report["rows"])


def chapter_04_is_ahead(said: str, report: dict):
    slow, fast = times(report, "link is the bottleneck"), times(report, "computing is the bottleneck")
    assert 1.2 * slow["hidden states (04)"] < slow["K and V (03)"], "hidden states are half the bytes"
    assert 1.5 * fast["K and V (03)"] < slow["K and V (03)"]
    assert report["counters"]["bytes_in"] > 0


def chapter_05_is_ahead(said: str, report: dict):
    slow = times(report, "link is the bottleneck")
    assert 1.2 * slow["planned (05)"] < slow["K and V (03)"]


def chapter_06_is_ahead(said: str, report: dict):
    even, fast = times(report, "as fast as computing"), times(report, "twenty times faster")
    assert 1.15 * even["both"] < min(even["only computing"], even["only loading"])
    assert 2 * fast["only loading"] < fast["only computing"], "with fast storage, loading alone is faster than computing"
    for row in report["rows"]:
        assert "loaded" not in row or row["loaded"] > 64
    assert next(row for row in report["rows"] if "loaded" in row)["computed"] > 64


def chapter_07_is_ahead(said: str, report: dict):
    assert times(report, "as fast as computing").keys() == {"best_effort", "wait_complete", "timeout"}
    first, two, three, last = (row for row in report["rows"] if "first_time_from_storage" in row)
    assert first["computed"] > two["computed"] > three["computed"] + 0.2, "each tier adds hits"
    assert last["ttft_ms"] < first["ttft_ms"] and last["first_time_from_storage"] > 0.7
    assert first["computed"] > 0.5 > 0.3 > last["computed"]


def test_the_example_of_both_ends_is_ahead_of_computing_and_of_waiting(tmp_path):
    def taken(rounds: int) -> dict[str, float]:
        words = "-m", "examples.both_ends", "--demo", "--device", "cpu", "--rounds", rounds, "--json", tmp_path / "report.json"
        done = forked.run(tmp_path, *words, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["verified"] is True
        return times(report)

    for rounds in 1, 3:  # other tests may have used the cores
        ways = taken(rounds)
        if ways["both_ends"] < min(ways["best_effort"], ways["wait_complete"]):
            return
    pytest.fail(f"both ends are not ahead: {ways}")


def chapter_08_is_ahead(said: str, report: dict):
    rates = {}
    for row in report["rows"]:
        rates.setdefault(row["f"], {})[row["case"]] = row["max"]
    for f, way in (1.25, "act-only"), (2.5, "kv-only"):
        assert rates[f]["hybrid"] > rates[f][way]
    assert all(row["load"] > 0 and row["compute"] > 0 for row in report["rows"])
    assert "x kv-only and" in said


def chapter_09_is_ahead(said: str, report: dict):
    carried = {row["case"]: row["bytes_over_link"] for row in report["rows"]}
    for what in ("K and V", "hidden states"):
        assert carried[f"{what}, 2 ranks"] * 2 == carried[f"{what}, 1 rank"] > 0
    everything, less = report["found"]
    assert 0 < less < everything, "a page that one rank has lost counts as lost on all ranks"
    assert times(report)["K and V, 2 ranks"] < times(report)["nothing, 2 ranks"]
