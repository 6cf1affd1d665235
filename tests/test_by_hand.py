"""Numbers by hand: what lessons show is what the tool prints, and that agrees with the chapters and their formulas."""

import xml.etree.ElementTree as xml

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import by_hand, check_docs

costs = st.integers(1, 12).map(float)
LESSONS = {page.name[:2]: page for page in sorted(check_docs.LESSONS.glob("0[3-6]*.md"))}


@pytest.mark.parametrize("chapter, command, right, wrong", [
    ("03", "03 --layers 4 --kv 2 --question 3", "= 14 ms", "= 15 ms"), ("04", "04", "|rrq.11q.", "|rrq11.q."),
    ("05", "05 --layers 6 --recompute 12 --project 3 --states 2", "RHHKKK       17", "RHHKKK       18"),
    ("06", "06 --chunks 8", "storage |8888", "storage |7777"),
])  # fmt: skip
def test_a_lesson_shows_word_for_word_what_its_commands_print(chapter, command, right, wrong):
    page = LESSONS[chapter]
    text = page.read_text(encoding="utf-8")
    assert f"$ python -m tools.by_hand {command}" in text and right in text
    assert not list(check_docs.numbers_by_hand(page, text))
    assert list(check_docs.numbers_by_hand(page, text.replace(right, wrong)))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 7), st.lists(costs, min_size=5, max_size=5), st.data())
def test_lanes_end_with_the_plan_and_do_one_thing_at_a_time(layers, times, data):
    costs = by_hand.planned.LayerCosts(*times)
    plan = data.draw(st.sampled_from(by_hand.planned.divisions(layers)))
    through, spans = by_hand.restored(plan, costs)
    assert through[-1] == pytest.approx(by_hand.planned.plan_seconds(plan, costs))
    assert max(span[3] for span in spans) == pytest.approx(through[-1])
    for lane in "load", "compute":
        busy = sorted(span[2:] for span in spans if span[0] == lane)
        assert all(0 <= start < end for start, end in busy)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in zip(busy, busy[1:]))


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), costs, costs)
def test_the_formulas_are_what_the_chapters_count(layers, one, other):
    made, _, _ = by_hand.chapter_03(layers, one, other)
    assert made["ttft"] == pytest.approx(max(layers * one, layers * other) + min(one, other))
    made, *_ = by_hand.chapter_06(layers, one, other, more=0.0)
    assert made["alike"] == pytest.approx(layers * one * other / (one + other))
    made, *_ = by_hand.chapter_08(weights=one, rebuild=other, device=0, room=400)
    assert made["link"] == pytest.approx(made["processor"]) and made["act"] + 2 * made["kvs"] == pytest.approx(400)
    assert by_hand.chapter_04(T=512 * layers, D=128 * layers)[0]["ratio"] == pytest.approx(7)


@pytest.mark.parametrize("words", [
    "", "02", "05 --layers 0", "05 --kv -1", "05 --kv nan", "05 --states many", "05 --plan KH", "05 --plan RHK", "05 --pages 2",
    "08 --room 3", "03 --draw /nowhere/lanes.svg",
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(words):
    with pytest.raises(SystemExit, match=r"^by_hand: .{9,}$"):
        by_hand.printed(words.split())


@pytest.mark.parametrize("chapter", ["03", "04", "05", "06", "07", "08"])
def test_a_slide_has_all_that_is_printed(chapter, tmp_path):
    said = by_hand.printed([chapter, "--draw", str(tmp_path / "lanes.svg")])
    drawn = xml.parse(tmp_path / "lanes.svg").getroot()
    words = [element.text or "" for element in drawn if element.tag.endswith("text")]
    assert [line.replace(".", " ") for line in words] == [line.replace(".", " ") for line in said.splitlines()]
    idle = [element for element in drawn if element.get("fill") == "url(#idle)"]
    assert len(idle) == sum(line.rpartition("|")[0].count(".") for line in said.splitlines())
