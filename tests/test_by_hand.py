"""tools/by_hand.py: lessons show its output, and its numbers equal those of the chapters' code."""

import xml.etree.ElementTree as xml

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import by_hand, check_docs

planned, costs = by_hand.planned, st.integers(1, 12).map(float)


@pytest.mark.parametrize("lesson, right", [
    ("02_paged_kv", "entry 2"), ("03_cpu_offload", "- match -"), ("03_cpu_offload", "= 14 ms"),
    ("04_hidden_state_cache", "|rrq.11q."), ("05_bubble_free", "RHHKKK       17"),
    ("06_bidirectional", "storage |8888"), ("07_tiered_storage", "[p5: L2 L3]")])  # fmt: skip
def test_a_lesson_shows_the_output_of_its_commands(lesson, right):
    page = check_docs.LESSONS / f"{lesson}.md"
    text = page.read_text(encoding="utf-8")
    assert right in text and not list(check_docs.numbers_by_hand(page, text))
    assert list(check_docs.numbers_by_hand(page, text.replace(right, right[:-1] + "9")))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 7), st.lists(costs, min_size=5, max_size=5), st.data())
def test_lanes_end_with_the_plan_and_formulas_hold(layers, times, data):
    plan, (one, other, *_) = data.draw(st.sampled_from(planned.divisions(layers))), times
    through, spans = by_hand.restored(plan, planned.LayerCosts(*times))
    ends = through[-1], max(span[3] for span in spans)
    assert ends == pytest.approx((planned.plan_seconds(plan, planned.LayerCosts(*times)),) * 2)
    for lane in "load", "compute":
        busy = sorted(span[2:] for span in spans if span[0] == lane)
        assert all(0 <= start < end for start, end in busy)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in zip(busy, busy[1:]))
    assert by_hand.chapter_03(layers, one, other)[0]["ttft"] == max(layers * one, layers * other) + min(one, other)
    alike = by_hand.chapter_06(layers, one, other, more=0.0)[0]["alike"]
    assert alike == pytest.approx(layers * one * other / (one + other))


@pytest.mark.parametrize("words", [
    "", "02", "05 --layers 0", "05 --kv -1", "05 --kv nan", "05 --states many", "05 --plan KH", "05 --plan RHK",
    "05 --pages 2", "08 --room 3", "03 --draw /nowhere/lanes.svg"])  # fmt: skip
def test_impossible_arguments_get_one_sentence(words):
    with pytest.raises(SystemExit, match=r"^by_hand: .{9,}$"):
        by_hand.printed(words.split())


@pytest.mark.parametrize("chapter", ["03", "04", "05", "06", "07", "08"])
def test_a_slide_has_the_printed_text_and_hatches_idle_time(chapter, tmp_path):
    said = by_hand.printed([chapter, "--draw", str(tmp_path / "lanes.svg")])
    drawn = list(xml.parse(tmp_path / "lanes.svg").getroot())
    words = "\n".join(element.text or "" for element in drawn if element.tag.endswith("text"))
    assert words.replace(".", " ") == said.replace(".", " ")
    dots = sum(line.rpartition("|")[0].count(".") for line in said.splitlines())
    assert dots == sum(element.get("fill") == "url(#idle)" for element in drawn)
