"""The demos as a user runs them: tokens are verified before any time is printed, and the times show the mechanism."""

import json
import re
import runpy
import signal
import sys

import pytest
from conftest import ROOT, write_model

from shell import lesson, random_models
from tests.support import forked
from tests.support.pasted import first_difference
from tools import check_docs

EXAMPLE = "examples.both_ends"  # a demo without a lesson
SLOW, EVEN = "link is the bottleneck", "as fast as computing"  # words of tables
AHEAD = {  # demo -> (words of a table, slower case, faster case, least ratio of their TTFT)
    "01_baseline": [("", "1900 tokens", "256 tokens", 2)],
    "02_paged_kv": [("", "miss (not cached)", "gpu_hit", 2)],
    "03_cpu_offload": [("", "miss", "cpu_hit", 1.5), ("", "slow link", "cpu_hit", 1.5), ("", "miss", "gpu_hit", 1.5)],
    "04_hidden_state_cache": [(SLOW, "K and V (03)", "hidden states (04)", 1.2)],
    "05_bubble_free": [(SLOW, "K and V (03)", "planned (05)", 1.2)],
    "06_bidirectional": [(EVEN, "only computing", "both", 1.15), (EVEN, "only loading", "both", 1.15),
                         ("twenty times faster", "only computing", "only loading", 2)],
    "07_tiered_storage": [], "08_hybrid_blocks": [],
    "09_tensor_parallel": [("", "nothing, 2 ranks", "K and V, 2 ranks", 1)],
    EXAMPLE: [("", "best_effort", "both_ends", 1), ("", "wait_complete", "both_ends", 1)],
}  # fmt: skip


@pytest.mark.parametrize("chapter", AHEAD)
def test_a_demo_verifies_its_tokens_and_then_shows_its_mechanism_ahead(chapter, tmp_path):
    """All checks of a demo are in one test, because parallel test processes would otherwise each run the demo.

    If the mechanism is not ahead, the demo runs once more, since other tests may have used the cores."""
    try:
        is_ahead(chapter, demo(chapter, tmp_path, rounds=1))
    except AssertionError:
        is_ahead(chapter, demo(chapter, tmp_path, rounds=3))


def demo(chapter: str, tmp_path, rounds: int) -> dict:
    """Run a demo, and compare its output with its lesson. Returns: its report."""
    words = ["-m", chapter] if chapter == EXAMPLE else [ROOT / f"{chapter}.py"]
    files = "--json", tmp_path / "report.json", "--trace", tmp_path / "trace.json"
    done = forked.run(tmp_path, *words, "--demo", "--device", "cpu", "--rounds", rounds, *files, HF_HUB_OFFLINE="1")  # also for other ranks
    assert done.returncode == 0 and "Loading" not in done.stderr, done.stdout + done.stderr     # a progress bar of `transformers`
    report, trace = (json.loads((tmp_path / name).read_text()) for name in ("report.json", "trace.json"))
    assert report["verified"] is True
    if chapter != EXAMPLE:
        check_output(chapter, done.stdout, report, trace)
        said = done.stdout.replace(f"(median of {rounds})", "(median of 3)")
        assert first_difference(check_docs.pasted()[chapter], said) is None, "the lesson shows another output"
    return report


def is_ahead(chapter: str, report: dict):
    """Check that the mechanism of a demo is ahead, by the shortest TTFT: other tests only make times longer."""
    rows = report["rows"]
    for words, slower, faster, least in AHEAD[chapter]:
        shown = [row for row in rows if words in row.get("table", "-") and "ttft_ms" in row]
        times = {row["case"]: row["min"] for row in shown if "case" in row}
        assert times[slower] > least * times[faster], (words, slower, faster)
    more = globals().get(f"check_{chapter[:2]}")
    assert more is None or more(rows, report)


def check_output(chapter: str, said: str, report: dict, trace: dict):
    before, verified, after = said.partition("verified: all ")
    assert verified and " ms" not in before and " tokens/s" not in before
    assert " ms" in after and "|" in after, "the demo prints a table and a timeline"
    assert {"chapter", "model", "device", "dtype", "link", "verified", "rows"} <= set(report)
    assert report["chapter"] == chapter
    names = {event["name"] for event in trace["traceEvents"]}
    assert "decode" in names and any(name.startswith("prefill") for name in names)
    if chapter >= "03":
        assert report["link"]["modelled"] is True


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
def test_a_demo_asks_a_model_without_roles_and_a_slow_model_about_less(chapter, plain_folder, monkeypatch, capsys):
    monkeypatch.setattr(lesson, "SECONDS", 1e-6)
    run_until_compared(chapter, monkeypatch, "--model", str(plain_folder))
    assert ("Of 2048 tokens of context, 512 are used" in capsys.readouterr().out) == (chapter[:2] != "08"), "every demo except 08's shortens the context"


@pytest.mark.parametrize("chapter", ["03_cpu_offload", "04_hidden_state_cache", "06_bidirectional", "07_tiered_storage"])
def test_a_demo_uses_small_pools_and_names_a_pool_that_is_too_small(chapter, monkeypatch, capsys):
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
    for shown in check_docs.pasted().values():
        shown = shown.replace("\n...\n", "\n")  # as printed
        wrong = re.sub(r"all (\d+ tokens)|tiger", r"all 1\1", shown)
        assert first_difference(shown, re.sub(r"(\d) ms", r"\g<1>5 ms", shown)) is None
        assert first_difference(shown, wrong) and first_difference(wrong, shown)


def check_02(rows: list, report: dict) -> bool:
    rates = {row["case"]: row["max"] for row in rows if "tokens_per_second" in row}
    reserved, own, shared = (row["tokens_per_slot"] for row in rows if "memory" in row)
    return rates["16 at once"] > 2 * rates["1 at once"] and reserved < 0.5 < 0.95 < own < 1 < shared


def check_03(rows: list, report: dict) -> bool:
    return any(row.get("bytes_in") for row in rows)


def check_04(rows: list, report: dict) -> bool:
    slow, fast, *_ = (row["min"] for row in rows if row.get("case") == "K and V (03)")
    return slow > 1.5 * fast and report["counters"]["bytes_in"] > 0


def check_06(rows: list, report: dict) -> bool:
    both = [row for row in rows if "loaded" in row]
    return min(row["loaded"] for row in both) > 32 < both[0]["computed"]


def check_07(rows: list, report: dict) -> bool:
    """Each tier adds hits."""
    first, two, three, last = (row for row in rows if "first_time_from_storage" in row)
    assert {row["case"] for row in rows if EVEN in row.get("table", "")} == {"best_effort", "wait_complete", "timeout"}
    assert first["computed"] > two["computed"] > three["computed"] + 0.2 and first["computed"] > 0.5 > 0.3 > last["computed"]
    return last["ttft_ms"] < first["ttft_ms"] and last["first_time_from_storage"] > 0.7


def check_08(rows: list, report: dict) -> bool:
    rates = {(row["f"], row["case"]): row["max"] for row in rows}
    is_ahead = all(rates[f, "hybrid"] > rates[f, way] for f, way in ((1.25, "act-only"), (2.5, "kv-only")))
    return is_ahead and all(row["load"] > 0 and row["compute"] > 0 for row in rows)


def check_09(rows: list, report: dict) -> bool:
    """A page that one rank has lost counts as lost on all ranks."""
    carried, (everything, less) = {row["case"]: row["bytes_over_link"] for row in rows}, report["found"]
    halves = [carried[f"{kept}, 2 ranks"] * 2 == carried[f"{kept}, 1 rank"] > 0 for kept in ("K and V", "hidden states")]
    return all(halves) and 0 < less < everything
