"""The page in a real browser: Chromium, without a window."""
import shutil
import threading
import time

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium):
    """A browser that has seen nothing yet."""
    context = chromium.new_context(viewport=dict(width=1280, height=800), color_scheme="light")
    yield context
    context.close()


class Page:
    """What a user sees and does. Every wait has a generous end."""

    def __init__(self, browser, port, heading=""):
        self.tab, self.url, self.complaints, self.requests = browser.new_page(), f"http://127.0.0.1:{port}/", [], []
        self.tab.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(self.url)
        self.wait(lambda: heading in self.text("#title") and self.text("#title") != "KV cache")

    def wait(self, what):
        deadline = time.monotonic() + 60
        while not (value := what()):
            assert time.monotonic() < deadline, "it never came true"
            self.tab.wait_for_timeout(10)       # milliseconds, in which the browser's messages come in
        return value

    def all(self, selector) -> list:
        return self.tab.query_selector_all(selector)

    def text(self, selector) -> str:
        return self.tab.text_content(selector)

    def texts(self, selector) -> list[str]:
        return [place.text_content() for place in self.all(selector)]

    def run(self, script, argument=None):
        return self.tab.evaluate(script, argument)

    def type(self, text, *keys):
        """Into the prompt box."""
        self.tab.focus("#prompt")
        self.tab.keyboard.insert_text(text)
        for key in keys:
            self.tab.keyboard.press(key)

    def click(self, name):
        self.tab.click("#" + name)

    def focused(self) -> str:
        return self.run("document.activeElement.id")

    def ask(self, prompt: str, rows: int):
        """Type it, press Enter, wait until the numbers of `rows` answers are there."""
        self.type(prompt, "Enter")
        self.wait(lambda: len(self.all("#numbers tr")) == rows)

    def turns(self) -> list[tuple[str, str]]:
        """[(role, text)]"""
        return list(zip(self.texts(".turn b"), self.texts(".turn span")))

    def numbers(self, turn: int) -> list[str]:
        return self.texts(f"#numbers tr:nth-child({turn}) td")


def gate(engine, passes: int) -> threading.Event:
    """Let `engine` make some forward passes and wait for the event before the next."""
    forward, left, go_on = engine.forward, iter(range(passes)), threading.Event()

    def gated(*arguments):
        assert next(left, None) is not None or go_on.wait(120)
        return forward(*arguments)
    engine.forward = gated
    return go_on
