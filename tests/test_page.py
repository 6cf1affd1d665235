"""The page of all chapters, in headless Chromium, on a stub engine."""
import os
import re
from contextlib import closing, contextmanager

import pytest

from tests.support.serving import ASK, eventually, serving
from tests.support.stub import Engine

playwright = pytest.importorskip("playwright.sync_api",
                                 reason="playwright is missing: see requirements-dev.txt")
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
DESKTOP, PHONE = dict(width=1280, height=900), dict(width=390, height=844)


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
    """The page of a server; it must load nothing from elsewhere, and log no error but refused requests."""
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

def test_a_conversation_is_written_as_it_comes_and_goes_on_with_its_history(browser, client, frontend):
    with page_of(browser, client) as page:
        page.fill("#max-tokens", "12")
        client.engine.hold_after(4)
        say(page, "Hello")
        playwright.expect(page.locator(".turn.assistant span")).to_contain_text("He")
        assert page.is_disabled("#ask") and page.input_value("#prompt") == ""
        client.engine.let()
        playwright.expect(page.locator(".turn.assistant")).to_contain_text("miss, 0 of")
        first = client.engine.asked[-1].outcome
        say(page, "And why?")
        playwright.expect(page.locator(".turn.assistant").nth(1)).to_contain_text("TTFT")
        said = [dict(role="user", content="Hello"), dict(role="assistant", content=first.text),
                dict(role="user", content="And why?")]
        request = client.engine.asked[-1]
        assert request.tokens[:request.prompt_tokens] == frontend.request(messages=said).tokens
        assert request.max_tokens == 12
        page.click("#new")
        assert texts(page, ".turn") == []
        say(page, "Hello")
        playwright.expect(page.locator(".turn.assistant")).to_contain_text("TTFT")
        assert client.engine.asked[-1].prompt_tokens == len(frontend.request("Hello").tokens)


def test_shift_and_enter_break_the_line_and_stop_cancels_and_gives_the_message_back(browser, client):
    with page_of(browser, client) as page:
        page.focus("#prompt")
        page.keyboard.press("Enter")
        page.keyboard.type("Tell me")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("all")
        assert page.input_value("#prompt") == "Tell me\nall" and not client.engine.asked, "nothing is not sent"
        client.engine.hold_after(3)
        page.keyboard.press("Enter")
        eventually(lambda: client.engine.held or page.wait_for_timeout(10))
        page.click("#stop")
        playwright.expect(page.locator(".turn")).to_have_count(0)
        assert page.input_value("#prompt") == "Tell me\nall"
        eventually(lambda: client.engine.arrivals)
        client.engine.let()
        eventually(lambda: client.engine.counters()["cancelled"] == 1)


def test_an_error_is_told_and_the_message_can_be_mended(browser, client):
    with page_of(browser, client) as page:
        say(page, "x" * 400)
        playwright.expect(page.locator("#error")).to_contain_text("shorten the prompt")
        assert page.input_value("#prompt") == "x" * 400 and texts(page, ".turn") == []
        client.engine.error = RuntimeError("a secret")
        say(page, "<b>Hello</b>")
        playwright.expect(page.locator("#error")).to_contain_text("inside the server")
        say(page, "<b>Hello</b>")
        playwright.expect(page.locator(".turn.assistant")).to_contain_text("TTFT")
        assert "<b>Hello</b>" in page.inner_text(".turn.user") and page.inner_text("#error") == ""


# 2. What is seen --------------------------------------------------------------------------------------------

def test_the_page_shows_pools_requests_and_why_each_finished_one_was_restored_or_not(browser, client):
    with page_of(browser, client) as page:
        playwright.expect(page.locator("#title")).to_have_text("stub")
        playwright.expect(page.locator(".pool h3").first).to_have_text("Device: 40 blocks of 1 KiB")
        client.ask("/generate", ASK)
        summary = page.locator("#finished summary").first
        playwright.expect(summary).to_contain_text("Request 1: miss. Prompt of 11 tokens, found: 0; 8 new")
        why = page.locator("#finished li")
        playwright.expect(why).to_have_text("nothing was offered: the prompt is computed")
        lane = page.locator("#finished .track")
        said = re.compile(r"^compute: prefill, decode for .* ms of ")
        playwright.expect(lane).to_have_attribute("aria-label", said)
        assert page.locator("#finished .track span").first.get_attribute("title").startswith("prefill 11: ")
        client.engine.over[-1].timeline.plan = dict(title="By layer", rows=[["layer 0", "KKR"]],
                                                    legend=dict(K="loaded", R="computed"))
        page.locator("#finished summary").click()
        page.locator("#finished summary").click()
        cells = page.locator("#finished .cells")
        playwright.expect(cells).to_have_attribute("aria-label", "layer 0: loaded, loaded, computed")
        assert texts(page, "#finished .cells span") == ["K", "K", "R"]
        grid = page.locator(".pool canvas").first
        playwright.expect(grid).to_have_attribute(
            "aria-label", "device: free 38, cached 2, reserved 0, in use 0, shared 0, in flight 0")
        client.engine.hold_after(3)
        with closing(client.send("/generate", dict(ASK, max_tokens=60))):
            playwright.expect(page.locator("#requests tr")).to_contain_text("decode")
            playwright.expect(grid).to_have_attribute(
                "aria-label", "device: free 35, cached 0, reserved 4, in use 1, shared 0, in flight 0")
            colors = grid.evaluate("""canvas => { const seen = new Set(), context = canvas.getContext('2d');
                for (const x of [7, 21]) seen.add(context.getImageData(x, 7, 1, 1).data.join());
                return seen.size }""")
            assert colors == 2, "in use and reserved look alike"
        client.engine.let()
        playwright.expect(page.locator("#requests tr")).to_have_count(0)
        playwright.expect(page.locator("#counters")).to_contain_text("cancelled")


def test_evict_empties_a_pool_and_a_server_that_is_gone_is_told_until_it_is_back(browser, client):
    client.ask("/generate", ASK)
    with page_of(browser, client) as page:
        page.get_by_label("Evict what is cached in device").press("Enter")
        playwright.expect(page.locator("#evicted")).to_have_text("2 blocks evicted from device.")
        playwright.expect(page.locator(".pool canvas").first).to_have_attribute(
            "aria-label", "device: free 40, cached 0, reserved 0, in use 0, shared 0, in flight 0")
        page.route("**/state", lambda route: route.abort())
        playwright.expect(page.locator("#status")).to_contain_text("cannot be reached")
        page.unroute("**/state")
        playwright.expect(page.locator("#status")).to_have_text("")


# 3. Everywhere and for everybody ----------------------------------------------------------------------------

@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=str)
def test_nothing_is_wider_than_the_window_and_8000_blocks_are_shown(browser, frontend, viewport):
    with serving(frontend, Engine(blocks=8000)) as client:
        with page_of(browser, client, viewport) as page:
            say(page, "word" * 30)
            playwright.expect(page.locator(".turn.assistant")).to_contain_text("TTFT")
            assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
            grid = page.locator(".pool canvas").first
            width, height = grid.evaluate("one => [one.offsetWidth, one.offsetHeight]")
            assert width <= viewport["width"] and height <= 300


def test_all_that_can_be_used_is_reached_with_the_keyboard_and_has_a_name(browser, client):
    client.ask("/generate", ASK)
    with page_of(browser, client) as page:
        playwright.expect(page.locator("#finished summary")).to_have_count(1)
        reached = set()
        for _ in range(25):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(document.activeElement.id || document.activeElement.tagName)"))
        assert {"prompt", "ask", "new", "max-tokens", "SUMMARY", "BUTTON", "conversation"} <= reached
        controls = "button:visible, input, textarea, [role=region]:visible, [role=img]"
        for control in page.locator(controls).all():
            assert control.evaluate(
                "one => one.ariaLabel || one.textContent.trim() || one.labels?.length || "
                "document.getElementById(one.getAttribute('aria-labelledby'))?.textContent")
        assert page.evaluate("document.documentElement.lang") == "en"
