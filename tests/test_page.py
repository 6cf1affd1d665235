"""The page of all chapters, in headless Chromium, mostly with a stub engine."""
import os
import re
from contextlib import closing, contextmanager

import pytest

from shell import charts
from tests.conftest import load
from tests.support.engines import make, tiered
from tests.support.serving import ASK, INFO, eventually, serving
from tests.support.stub import Engine

playwright = pytest.importorskip("playwright.sync_api",
                                 reason="playwright is missing: see requirements-dev.txt")
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
DESKTOP, PHONE = dict(width=1280, height=900), dict(width=390, height=844)
LESSON = dict(width=1280, height=720)                       # the size of a projector


@pytest.fixture(scope="module")
def browser():
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"there is no Chromium at {CHROMIUM}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def page_of(browser, client, viewport=DESKTOP):
    """Context manager: open a server's page.

    The page must load nothing from other hosts, and its log may have no errors except refused requests."""
    context = browser.new_context(viewport=viewport)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error"
            and "the server responded with a status" not in said.text and "ERR_" not in said.text else None)
    own = f"http://127.0.0.1:{client.port}/"
    page.on("request", lambda sent: None if sent.url.startswith((own, "data:")) else wrong.append(sent.url))
    page.goto(own)
    try:
        yield page
        assert wrong == []
    finally:
        context.close()


@pytest.fixture()
def client(frontend):
    with serving(frontend, Engine(max_running=1, blocks=40)) as client:
        yield client


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def say(page, words: str):
    page.fill("#prompt", words)
    page.keyboard.press("Enter")


# 1. The conversation ----------------------------------------------------------------------------------------

def test_a_conversation_shows_tokens_as_they_come_and_keeps_its_history(browser, client, frontend):
    with page_of(browser, client) as page:
        answers = page.locator(".turn.assistant")
        page.fill("#max-tokens", "12")
        client.engine.hold_after(4)
        say(page, "Hello")
        playwright.expect(answers).to_contain_text("He")
        assert page.is_disabled("#ask") and page.input_value("#prompt") == ""
        client.engine.let()
        playwright.expect(answers).to_contain_text("0 of")
        first = client.engine.asked[-1]
        say(page, "And why?")
        playwright.expect(answers.nth(1)).to_contain_text("TTFT")
        said = [dict(role="user", content="Hello"), dict(role="assistant", content=first.text), dict(role="user", content="And why?")]
        request = client.engine.asked[-1]
        assert request.tokens[:request.prompt_tokens] == frontend.request(messages=said).tokens and request.max_tokens == 12
        page.click("#new")
        assert texts(page, ".turn") == []
        say(page, "Hello")
        playwright.expect(answers).to_contain_text("TTFT")
        assert client.engine.asked[-1].prompt_tokens == len(frontend.request("Hello").tokens)


def test_stop_cancels_a_request_and_an_error_keeps_the_message(browser, client):
    with page_of(browser, client) as page:
        page.focus("#prompt")
        for key in "Enter", "a", "Shift+Enter", "b":
            page.keyboard.press(key)
        assert page.input_value("#prompt") == "a\nb" and not client.engine.asked, "an empty message is not sent"
        client.engine.hold_after(3)
        page.keyboard.press("Enter")
        eventually(lambda: client.engine.held or page.wait_for_timeout(10))
        page.click("#stop")
        playwright.expect(page.locator(".turn")).to_have_count(0)
        assert page.input_value("#prompt") == "a\nb"
        eventually(lambda: client.engine.arrivals)
        client.engine.let()
        eventually(lambda: charts.counters(client.engine)["cancelled"] == 1)
        say(page, "x" * 400)
        playwright.expect(page.locator("#error")).to_contain_text("shorten the prompt")
        assert page.input_value("#prompt") == "x" * 400 and texts(page, ".turn") == []
        client.engine.error = RuntimeError("a secret")
        say(page, "<b>Hello</b>")
        playwright.expect(page.locator("#error")).to_contain_text("inside the server")
        say(page, "<b>Hello</b>")
        playwright.expect(page.locator(".turn.assistant")).to_contain_text("TTFT")
        assert "<b>Hello</b>" in page.inner_text(".turn.user") and page.inner_text("#error") == ""


# 2. Memory and requests --------------------------------------------------------------------------------------

def test_the_page_shows_pools_requests_decisions_and_a_lost_server(browser, client):
    with page_of(browser, client) as page:
        playwright.expect(page.locator("#title")).to_have_text("stub")
        playwright.expect(page.locator(".pool .note").first).to_have_text("0 of 40 blocks of 1 kB")
        playwright.expect(page.locator(".pool h3").first).to_have_text("Device memory")
        client.ask("/generate", ASK)
        summary = page.locator("#finished summary").first
        playwright.expect(summary).to_contain_text("Request 1 (A): 0 of 11 tokens found, TTFT ")
        numbers, why = page.locator("#finished li").all()
        playwright.expect(numbers).to_contain_text("11 tokens of the prompt computed, 8 new, TBT ")
        playwright.expect(why).to_have_text("nothing was offered: the prompt is computed")
        lane = page.locator("#finished .track")
        said = re.compile(r"^compute: prefill, decode for .* ms of ")
        playwright.expect(lane).to_have_attribute("aria-label", said)
        assert page.locator("#finished .track span").first.get_attribute("title").startswith("prefill 11: ")
        client.engine.completed[-1].timeline.plan = dict(title="By layer", rows=[["layer 0", "KLC"]],
                                                    legend=dict(K="loaded", L="loaded", C="computed"))
        page.locator("#finished summary").click()
        page.locator("#finished summary").click()
        cells = page.locator("#finished .cells")
        playwright.expect(cells).to_have_attribute("aria-label", "layer 0: loaded, loaded, computed")
        grid, label = page.locator(".pool canvas").first, "device memory: free {}, cached {}, reserved {}, in use {}, shared 0, in flight 0"
        playwright.expect(grid).to_have_attribute("aria-label", label.format(38, 2, 0, 0))
        client.engine.hold_after(3)
        with closing(client.send("/generate", dict(ASK, max_tokens=60))):
            playwright.expect(page.locator("#requests li")).to_contain_text("(A), decode: 0 of 11 tokens found")
            playwright.expect(grid).to_have_attribute("aria-label", label.format(35, 0, 4, 1))
            colors = grid.evaluate("""canvas => { const seen = new Set(), context = canvas.getContext('2d');
                for (const x of [.15, .65]) seen.add(context.getImageData(x * canvas.offsetHeight, 7, 1, 1).data.join());
                return seen.size }""")
            assert colors == 2, "blocks in use and reserved blocks look different"
        client.engine.let()
        playwright.expect(page.locator("#requests li")).to_have_count(0)
        playwright.expect(page.locator("#counters")).to_contain_text("cancelled")
        page.get_by_label("Evict the cached blocks in device memory").press("Enter")
        playwright.expect(page.locator("#evicted")).to_contain_text("blocks evicted from device memory.")
        playwright.expect(grid).to_have_attribute("aria-label", label.format(40, 0, 0, 0))
        page.route("**/state", lambda route: route.abort())
        playwright.expect(page.locator("#status")).to_contain_text("cannot be reached")
        page.unroute("**/state")
        playwright.expect(page.locator("#status")).to_have_text("")


def test_the_examples_get_right_answers_in_large_type_without_scrolling(browser):
    classroom = load("classroom")
    engine = make(tiered(256, "wait_complete", "write_through"), 128, model=classroom.model)
    info = dict(INFO, title="Chapter 07: three tiers.")
    with closing(engine), serving(classroom, engine, info) as client, page_of(browser, client, LESSON) as page:
        memories, lines = page.locator(".pool"), page.locator(".turn .from")
        for number in range(3):
            for memory in memories.all()[:number]:
                evict, note = memory.get_by_text("Evict"), memory.locator(".note")
                # A click leaves the blocks that a copy still reads: click until it has completed
                eventually(lambda evict=evict, note=note: evict.click() or page.wait_for_timeout(500)
                           or note.inner_text().strip().startswith("0 of"))  # fmt: skip
            page.locator("#examples button").nth(number).click()
            playwright.expect(lines).to_have_count(number + 1, timeout=60_000)
        answers = ["I have read it.", "Emma lives in Paris.", "The password of the safe is tiger."]
        assert texts(page, ".turn.assistant span") == answers and texts(page, "h1") == ["Chapter 07: three tiers"]
        said, third = [words.partition(", TTFT ")[0] for words in texts(page, ".from")], lines.last.inner_text()
        assert said == ["0 of 1508 tokens found", "1504 of 1526 tokens from host memory",
                        "1520 of 1547 tokens from storage"]
        playwright.expect(memories.nth(2)).to_contain_text(re.compile("storage answers; 9[4-9] of the pages"))
        playwright.expect(page.locator("summary").first).to_have_text(f"Request 3 (A): {third}")
        lanes = page.locator("[open] .track")
        playwright.expect(lanes).to_have_count(4)
        first, *ticks = texts(page, "[open] .axis span")
        assert first == "first token, " + third.partition("TTFT ")[2] and len(ticks) > 2 and ticks[0] == "0"
        sizes = page.locator(".turn span, .from, summary, button, h3, .lane, .axis span").evaluate_all(
            "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))")
        assert min(sizes) >= 18 and max(sizes) >= 26
        for shown in [*memories.locator("canvas").all(), *lanes.all(), lines.last, page.locator("#ask")]:
            assert shown.bounding_box()["y"] + shown.bounding_box()["height"] <= LESSON["height"]
        playwright.expect(page.locator("#counters")).to_contain_text(re.compile(r"bytes in [\d.]+ MB"))
        eventually(lambda: texts(page, ".node") == ["97 pages A\ndevice memory\nhost memory\nstorage"])
        playwright.expect(page.locator("[open] .overlap")).to_have_text(re.compile(r"overlap\d+%"))
        answer = dict(found={}, usage=dict(prompt_tokens=296), ttft_ms=578,
                      decisions=["288 tokens offered (cpu): loading 120.0 ms, computing 99.1 ms: computed"])
        refused = page.evaluate("answer => said(answer)", answer)
        assert refused == "0 of 296 tokens restored; 288 in host memory refused, TTFT 578 ms"
        page.click("#new")                          # another conversation about the same document
        page.locator("#examples button").first.click()
        playwright.expect(lines).to_have_count(1)
        engine.lower_tier.cache.storage.backend.exists = None  # calling it raises an error from now on
        say(page, "What is the job of Ben?")
        playwright.expect(lines.last).to_contain_text("tokens from device memory, TTFT ")
        playwright.expect(page.locator("#legend li").last).to_have_text("this conversation")
        titles = page.locator("#legend li").evaluate_all("all => all.slice(6).map(one => one.title)")
        assert titles == ["of several", "conversation A", "conversation B"]
        playwright.expect(memories.nth(2)).to_contain_text("storage does not answer: requests do not wait for it")


# 3. Small screens and accessibility -------------------------------------------------------------------------

@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=str)
def test_the_page_fits_its_window_and_the_keyboard_reaches_all_controls(browser, frontend, viewport):
    """The device has 8,000 blocks. Each control has a name."""
    with serving(frontend, Engine(blocks=8000)) as client, page_of(browser, client, viewport) as page:
        say(page, "word" * 30)
        playwright.expect(page.locator(".turn.assistant")).to_contain_text("TTFT")
        playwright.expect(page.locator("#finished summary")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        width, height = page.locator(".pool canvas").first.evaluate("one => [one.offsetWidth, one.offsetHeight]")
        assert width <= viewport["width"] and height <= 300
        reached = set()
        for _ in range(25):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(document.activeElement.id || document.activeElement.tagName)"))
        assert {"prompt", "ask", "new", "max-tokens", "SUMMARY", "BUTTON", "conversation"} <= reached
        for control in page.locator("button:visible, input, textarea, [role=region]:visible, [role=img]").all():
            assert control.evaluate(
                "one => one.ariaLabel || one.textContent.trim() || one.labels?.length || "
                "document.getElementById(one.getAttribute('aria-labelledby'))?.textContent")
        assert page.evaluate("document.documentElement.lang") == "en"
