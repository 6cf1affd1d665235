"""The page of chapters 07 and 08 in a real browser: ask, watch answer and blocks, lose the cache and ask again, compare."""
import re

import pytest

from legacy import live
from legacy.tests.test_app import INFO, Serving
from legacy.tests.test_live import NAMES, SOURCES, STORY, WAYS, make

page_tests = pytest.importorskip("legacy.tests.test_page")
Page, chromium, browser = page_tests.Page, page_tests.chromium, page_tests.browser
pytestmark = page_tests.pytestmark


def blocks(page, tier: int = 0) -> dict[str, int]:
    """What the page says in words of a tier: how many of its blocks are in each state."""
    words = page.tab.locator("#tiers .tier").nth(tier).locator(".legend").inner_text()
    return {state: int(count.replace(",", "")) for count, state in re.findall(r"([\d,]+) ([a-z ]+)", words)}


@pytest.mark.parametrize("number", list(NAMES)[3:])
def test_a_lesson_on_the_page(number, browser, tiny_engine, plain_engine, tmp_path, monkeypatch):
    name = NAMES[number]
    monkeypatch.setitem(INFO, "chapter", name)
    monkeypatch.setattr(live, "ROUNDS", 1)
    engine = make(number, plain_engine if number == "08" else tiny_engine, tmp_path)
    for estimate in ("seconds_to_load", "seconds_to_restore"):
        if hasattr(engine, estimate):
            monkeypatch.setattr(engine, estimate, lambda *_, **__: 1e-12)
    device = 2 if number == "08" else 0                             # where its blocks are
    with Serving(engine) as port:
        # 1. The answer appears while it is written, and blocks change their state
        go_on = page_tests.gate(engine, 4)
        page = Page(browser, port, name)
        assert len(page.all("#examples button")) == len(engine.examples())
        page.tab.fill("#max-tokens", "12")
        page.type(STORY[:150], "Enter")
        page.wait(lambda: page.turns()[1:] and page.turns()[1][1])
        page.wait(lambda: blocks(page, device).get("in use", 0) + blocks(page, 0).get("in use", 0))
        assert page.texts("#requests td")[1] == "decode" and page.all("#timelines img") == []
        go_on.set()
        page.wait(lambda: len(page.all("#numbers tr")) == 1)
        page.wait(lambda: blocks(page, device).get("cached", 0) + blocks(page, 0).get("cached", 0))
        assert not blocks(page, 0).get("in use")

        # 2. A timeline appears
        page.wait(lambda: page.run("[...document.querySelectorAll('#timelines img')].some(image => image.naturalWidth > 0)"))
        assert "idle" in page.tab.get_attribute("#timelines img", "alt")

        # 3. The device loses it, and it comes back
        if number in SOURCES:
            if hasattr(engine, "flush"):
                engine.flush()
            page.tab.click("#tiers .tier button")
            page.wait(lambda: "evicted" in page.text("#tiers .tier"))
            page.wait(lambda: not blocks(page, 0).get("cached"))
            page.click("new")
            page.ask(STORY[:150], 2)
            assert page.numbers(2)[5] == SOURCES[number] and page.turns()[0] == ("user", STORY[:150])
            page.wait(lambda: len(page.all("#timelines img")) == 2)

        # 4. One click compares the ways
        page.type(STORY[:150])
        page.click("compare")
        page.wait(lambda: len(page.all("#bars li")) == len(WAYS[number]) or page.text("#compare-error"))
        assert page.text("#compare-error") == "" and all("chapter 01: yes" in words for words in page.texts("#bars li p"))
        assert all(re.fullmatch(r"\d+\.\d ms", words) for words in page.texts("#bars b"))
        assert page.complaints == [], page.complaints
        page.tab.close()
    engine.close()
    engine.release()
