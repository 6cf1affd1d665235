"""The page in a real browser: Chromium, without a window."""
import json
import re
import shutil
import threading

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from conftest import chapter
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from test_app import INFO, Serving, another, break_after

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "disable-dev-shm-usage", "no-first-run",
                   "disable-background-networking", "disable-component-update", "disable-sync", "window-size=1280,800",
                   f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument("--" + switch)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL", performance="ALL"))
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    browser.set_page_load_timeout(120)
    yield browser
    browser.quit()


class Page:
    """What a user sees and does. Every wait has a generous end."""

    def __init__(self, browser, engine, port):
        self.browser, self.engine, self.url = browser, engine, f"http://127.0.0.1:{port}/"
        for log in ("browser", "performance"):
            browser.get_log(log)                # what came before is not ours
        browser.get(self.url)
        self.wait(lambda: INFO["chapter"] in self.text("#title"))

    def wait(self, what):
        return WebDriverWait(self.browser, 60, poll_frequency=0.02).until(lambda _: what())

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, selector).get_property("textContent")

    def type(self, *keys):
        self.browser.find_element(By.ID, "prompt").send_keys(*keys)

    def click(self, name):
        self.browser.find_element(By.ID, name).click()

    def focused(self) -> str:
        return self.browser.switch_to.active_element.get_property("id")

    def ask(self, prompt: str, rows: int):
        """Type it, press Enter, wait until the numbers of `rows` answers are there."""
        self.type(prompt, Keys.ENTER)
        self.wait(lambda: len(self.all("#numbers tr")) == rows)

    def turns(self) -> list[tuple[str, str]]:
        """[(role, text)]"""
        return [tuple(turn.find_element(By.CSS_SELECTOR, name).get_property("textContent") for name in ("b", "span"))
                for turn in self.all(".turn")]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(browser, tiny_engine):
    engine = another(tiny_engine)
    with Serving(engine) as port:
        yield Page(browser, engine, port)


def test_the_heading_names_chapter_and_model(page):
    assert page.text("#title") == "01_baseline · tiny" == page.browser.title
    assert page.text("#device") == f"{INFO['device']}, {INFO['dtype']}"


def test_enter_asks_and_the_answer_and_its_numbers_appear(page, tiny_engine):
    messages = []
    for turn, prompt in enumerate(["Hello", "And?"], 1):
        messages.append(dict(role="user", content=prompt))
        expected = tiny_engine.generate(messages=messages, max_tokens=20)
        messages.append(dict(role="assistant", content=expected.text))
        if turn == 1:
            page.browser.execute_script("document.getElementById('max-tokens').value = 20")
        page.ask(prompt, turn)
        cells = [cell.text for cell in page.all(f"#numbers tr:nth-child({turn}) td")]
        assert cells[:-2] == [str(value) for value in (turn, expected.usage["prompt_tokens"], expected.history_tokens, 0, "miss",
                                                       len(expected.tokens))]
        assert all(re.fullmatch(r"\d+\.\d", cell) for cell in cells[-2:])
    assert [dict(role=role, content=text) for role, text in page.turns()] == messages
    assert len(page.all("th")) == len(cells) and page.focused() == "prompt"
    assert page.complaints() == []


@pytest.mark.parametrize("name", ["04_hidden_state_cache", "05_bubble_free", "06_bidirectional"])
def test_a_conversation_that_comes_back_shows_where_its_history_came_from(browser, tiny_engine, monkeypatch, name):
    monkeypatch.setitem(INFO, "chapter", name)
    offload, hidden = chapter("03_cpu_offload"), chapter(name)
    always, source = {"04": ({}, "hidden"), "05": ({}, "planned"), "06": (dict(mode="load", chunk=64), "storage")}[name[:2]]
    if name[1] == "5":
        always = dict(known=hidden.Profile([256], [1e-3], [1e-3], [1e3], [1e-3], 5e7, 5e7))
    engine = hidden.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, 64, cpu_chunks=8, **always)
    engine.seconds_to_restore = lambda *_, **__: 1e-9               # never slower than to compute
    messages, asked = [], [("It was a long story, and so it began." * 4, "miss"), ("And then?", source)]
    with Serving(engine) as port:
        page = Page(browser, engine, port)
        assert page.text("#title") == f"{name} · tiny" == browser.title
        browser.execute_script("document.getElementById('max-tokens').value = 8")
        for turn, (prompt, source) in enumerate(asked, 1):
            messages.append(dict(role="user", content=prompt))
            expected = tiny_engine.generate(messages=messages, max_tokens=8)
            messages.append(dict(role="assistant", content=expected.text))
            page.ask(prompt, turn)
            cells = [cell.text for cell in page.all(f"#numbers tr:nth-child({turn}) td")]
            assert cells[:-2] == [str(value) for value in (turn, expected.usage["prompt_tokens"], expected.history_tokens,
                                                           128 * (turn - 1), source, len(expected.tokens))]
            engine.flush()
            offload.empty(engine)
        assert [dict(role=role, content=text) for role, text in page.turns()] == messages and page.complaints() == []
    engine.close()
    engine.release()
    if name[1] < "6":
        engine.saver.close()


def test_shift_enter_breaks_the_line_and_does_not_send(page):
    page.type("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.browser.find_element(By.ID, "prompt").get_property("value") == "one\ntwo"
    assert page.turns() == [] and page.engine.counters()["requests"] == 0
    page.ask("!", 1)
    assert page.turns()[0] == ("user", "one\ntwo!")


def test_an_empty_message_is_not_sent(page):
    page.type("  ", Keys.ENTER)
    page.click("ask")
    assert page.turns() == [] and page.engine.counters()["requests"] == 0


def test_markup_is_shown_as_text(page):
    markup = "<b>bold</b><img src=x onerror=document.title='broken'>&amp;"
    page.ask(markup, 1)
    assert page.turns()[0] == ("user", markup)
    assert page.all(".turn span *") == [] and "broken" not in page.browser.title


def test_temperature_and_length_are_sent(page):
    for name, value in (("max-tokens", "3"), ("temperature", "50")):
        page.browser.find_element(By.ID, name).send_keys(Keys.CONTROL, "a", Keys.NULL, value)
    drawn = set()
    for row in range(1, 5):
        page.ask("Hello", row)
        drawn.add(page.turns()[-1][1])
        assert int(page.text(f"#numbers tr:nth-child({row}) td:nth-child(6)")) <= 3
        page.click("new")
    assert len(drawn) > 1


def gate(engine, passes: int) -> threading.Event:
    """Let `engine` make some forward passes and wait for the event before the next."""
    forward, left, go_on = engine.forward, iter(range(passes)), threading.Event()

    def gated(*arguments):
        assert next(left, None) is not None or go_on.wait(120)
        return forward(*arguments)
    engine.forward = gated
    return go_on


def test_an_answer_appears_while_it_is_written_and_stop_ends_it(page):
    go_on = gate(page.engine, 12)
    page.type("Hello", Keys.ENTER)
    page.wait(lambda: page.turns()[1:] and page.turns()[1][1])
    assert page.all("#numbers tr") == [] and not page.all("#ask:enabled")
    assert page.all("#conversation[aria-live=polite][aria-busy=true]")
    page.type("More", Keys.ENTER)               # one at a time: it stays in its box
    assert len(page.turns()) == 2
    page.click("stop")
    page.wait(lambda: page.all("#ask:enabled"))
    assert page.text(".turn.assistant i") == " (stopped)" and not page.all("#stop:enabled") and page.focused() == "prompt"
    go_on.set()
    page.wait(lambda: page.engine.counters()["cancelled"] == 1)
    page.ask("", 1)                             # what was left in the box
    assert page.turns()[2] == ("user", "More") and page.text("#numbers td") == "2"
    assert page.text("#error") == ""


def test_new_conversation_forgets(page):
    page.ask("Hello", 1)
    page.click("new")
    assert page.turns() == [] and page.focused() == "prompt"
    page.ask("Hello", 2)
    first, second = ([cell.text for cell in row.find_elements(By.TAG_NAME, "td")][:3] for row in page.all("#numbers tr"))
    assert first == second and second[0] == "1" and second[2] == "0"


def test_an_error_is_told_in_words_and_the_message_is_not_lost(page):
    page.type("x" * 300, Keys.ENTER)
    page.wait(lambda: page.text("#error"))
    assert "shorten the prompt" in page.text("#error") and str(page.engine.context) in page.text("#error")
    assert page.turns() == [] and page.all("#error[role=alert]")
    assert page.browser.find_element(By.ID, "prompt").get_property("value") == "x" * 300
    page.browser.find_element(By.ID, "prompt").clear()
    page.ask("Hello", 1)
    assert page.text("#error") == "" and page.text("#numbers td:nth-child(3)") == "0"


def test_an_error_in_the_middle_of_an_answer_is_told_in_words(page):
    break_after(page.engine, 3)
    page.type("Hello", Keys.ENTER)
    page.wait(lambda: page.text("#error"))
    assert "inside the server" in page.text("#error") and page.turns() == []


def test_a_server_that_does_not_answer_is_told_in_words(page):
    page.browser.set_network_conditions(offline=True, latency=0, throughput=0)
    try:
        page.type("Hello", Keys.ENTER)
        page.wait(lambda: page.text("#error"))
    finally:
        page.browser.delete_network_conditions()
    assert "does not answer" in page.text("#error") and page.turns() == []
    page.ask("", 1)                             # and when it is back, the message is still in its box


def test_nothing_is_asked_from_elsewhere(page):
    page.ask("Hello", 1)
    entries = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    urls = [entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
    ours = [url.removeprefix(page.url) for url in urls if url.startswith(page.url)]
    assert set(ours) == {"", "health", "generate"}
    assert [url for url in urls if not url.startswith((page.url, "data:"))] == []


def test_every_control_is_reached_by_tab_and_shows_its_focus(page):
    reached = []
    for _ in range(6):
        active = page.browser.switch_to.active_element
        assert active.value_of_css_property("outline-style") == "solid", reached
        reached.append(active.get_property("id") or active.get_attribute("role"))
        active.send_keys(Keys.TAB)
    assert reached == ["prompt", "ask", "new", "max-tokens", "temperature", "region"]
    assert len(page.all("textarea, input")) == len(page.all("label"))


def luminance(color: str) -> float:
    """Relative luminance of a CSS rgb() or rgba() color, as in WCAG 2."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(page, selector: str) -> float:
    """Of an element's text on the nearest background."""
    element = page.browser.find_element(By.CSS_SELECTOR, selector)
    front = luminance(element.value_of_css_property("color"))
    while element.value_of_css_property("background-color").endswith(", 0)"):
        element = element.find_element(By.XPATH, "..")
    back = luminance(element.value_of_css_property("background-color"))
    return (max(front, back) + 0.05) / (min(front, back) + 0.05)


@pytest.fixture
def screen(browser):
    """screen(scheme, width, height): another kind of screen, for this test."""
    def change(scheme, width, height):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[dict(name="prefers-color-scheme", value=scheme)]))
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                dict(width=width, height=height, deviceScaleFactor=1, mobile=False))
    yield change
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[]))
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme,width,height", [("light", 1280, 800), ("dark", 1280, 800), ("light", 360, 740)])
def test_it_can_be_read_on_every_screen(page, screen, tmp_path, scheme, width, height):
    screen(scheme, width, height)
    page.ask("Tell me something " + "long" * 20, 1)
    page.type("x" * 300, Keys.ENTER)
    page.wait(lambda: page.text("#error"))
    background = page.browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert (luminance(background) < 0.5) == (scheme == "dark")
    for selector in ("h1", "#device", ".turn.user span", ".turn.user b", ".turn.assistant span", "label", "#prompt", "#ask",
                     "#new", "#error", "th", "td", ".note"):
        assert contrast(page, selector) >= 4.5, selector
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert page.browser.get_screenshot_as_file(str(tmp_path / f"{scheme}-{width}.png"))
