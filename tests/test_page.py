"""The page in a real browser: Chromium, without a window. First with engines, then with a server that plays what is hard to
provoke: thousands of blocks, markup in every field, an end and a new beginning."""
import json
import queue
import re
import shutil
import statistics
import threading
import time
import urllib.parse
from itertools import combinations
from pathlib import Path

import flask
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from conftest import chapter
from test_app import INFO, Serving, another, break_after, eventually

CHROMIUM = shutil.which("chromium")
SOURCE = (Path(__file__).resolve().parent.parent / "common" / "page.html").read_text(encoding="utf-8")
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


@pytest.fixture
def engine(tiny_engine):
    return another(tiny_engine)


@pytest.fixture
def page(browser, engine):
    with Serving(engine) as port:
        yield Page(browser, port, INFO["chapter"])
        browser.close()


# 1. Asking an engine ---------------------------------------------------------------------------------------------

def test_the_heading_names_chapter_and_model(page):
    assert page.text("#title") == "01_baseline · tiny" == page.tab.title()
    assert page.text("#device") == f"{INFO['device']}, {INFO['dtype']}"


def test_enter_asks_and_the_answer_and_its_numbers_appear(page, tiny_engine):
    messages = []
    page.tab.fill("#max-tokens", "20")
    for turn, prompt in enumerate(["Hello", "And?"], 1):
        messages.append(dict(role="user", content=prompt))
        expected = tiny_engine.generate(messages=messages, max_tokens=20)
        messages.append(dict(role="assistant", content=expected.text))
        page.ask(prompt, turn)
        cells = page.numbers(turn)
        assert [cells[0], *cells[2:-2]] == [str(value) for value in (
            turn, expected.usage["prompt_tokens"], expected.history_tokens, 0, "miss", len(expected.tokens))]
        assert all(re.fullmatch(r"\d+\.\d", cell) for cell in cells[-2:])
    assert [dict(role=role, content=text) for role, text in page.turns()] == messages
    assert len(page.all("#numbers")) == 1 and len(page.all("table:has(#numbers) th")) == len(cells)
    assert page.focused() == "prompt" and page.complaints == []


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
        page = Page(browser, port, name)
        assert page.text("#title") == f"{name} · tiny" == page.tab.title()
        page.tab.fill("#max-tokens", "8")
        for turn, (prompt, source) in enumerate(asked, 1):
            messages.append(dict(role="user", content=prompt))
            expected = tiny_engine.generate(messages=messages, max_tokens=8)
            messages.append(dict(role="assistant", content=expected.text))
            page.ask(prompt, turn)
            cells = page.numbers(turn)
            assert [cells[0], *cells[2:-2]] == [str(value) for value in (
                turn, expected.usage["prompt_tokens"], expected.history_tokens, 128 * (turn - 1), source, len(expected.tokens))]
            engine.flush()
            offload.empty(engine)
        assert [dict(role=role, content=text) for role, text in page.turns()] == messages and page.complaints == []
        page.tab.close()
    engine.close()
    engine.release()
    if name[1] < "6":
        engine.saver.close()


def test_shift_enter_breaks_the_line_and_does_not_send(page, engine):
    page.type("one", "Shift+Enter")
    page.type("two")
    assert page.tab.input_value("#prompt") == "one\ntwo"
    assert page.turns() == [] and engine.counters()["requests"] == 0
    page.ask("!", 1)
    assert page.turns()[0] == ("user", "one\ntwo!")


def test_an_empty_message_is_not_sent(page, engine):
    page.type("  ", "Enter")
    page.click("ask")
    assert page.turns() == [] and engine.counters()["requests"] == 0


def test_markup_is_shown_as_text(page):
    markup = "<b>bold</b><img src=x onerror=document.title='broken'><script>document.title='broken'</script>&amp;"
    page.ask(markup, 1)
    assert page.turns()[0] == ("user", markup)
    assert page.all(".turn span *") == [] and "broken" not in page.tab.title()


def test_temperature_and_length_are_sent(page):
    page.tab.fill("#max-tokens", "3")
    page.tab.fill("#temperature", "50")
    drawn = set()
    for row in range(1, 5):
        page.ask("Hello", row)
        drawn.add(page.turns()[-1][1])
        assert int(page.numbers(row)[6]) <= 3
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


def test_an_answer_appears_while_it_is_written_and_stop_ends_it(page, engine):
    go_on = gate(engine, 12)
    page.type("Hello", "Enter")
    page.wait(lambda: page.turns()[1:] and page.turns()[1][1])
    assert page.all("#numbers tr") == [] and not page.all("#ask:enabled")
    assert page.all("#conversation[aria-live=polite][aria-busy=true]")
    page.wait(lambda: "decode" in page.texts("#requests td"))       # and it is told who runs
    page.type("More", "Enter")                  # one at a time: it stays in its box
    assert len(page.turns()) == 2
    page.click("stop")
    page.wait(lambda: page.all("#ask:enabled"))
    assert page.text(".turn.assistant i") == " (stopped)" and not page.all("#stop:enabled") and page.focused() == "prompt"
    go_on.set()
    page.wait(lambda: engine.counters()["cancelled"] == 1)
    page.ask("", 1)                             # what was left in the box
    assert page.turns()[2] == ("user", "More") and page.text("#numbers td") == "2"
    assert page.text("#error") == ""


def test_new_conversation_forgets(page):
    page.ask("Hello", 1)
    page.click("new")
    assert page.turns() == [] and page.focused() == "prompt"
    page.ask("Hello", 2)
    first, second = page.numbers(1), page.numbers(2)
    assert first[0] == second[0] == "1" and first[2:4] == second[2:4] and second[3] == "0"


def test_an_error_is_told_in_words_and_the_message_is_not_lost(page, engine):
    page.type("x" * 300, "Enter")
    page.wait(lambda: page.text("#error"))
    assert "shorten the prompt" in page.text("#error") and str(engine.context) in page.text("#error")
    assert page.turns() == [] and page.all("#error[role=alert]")
    assert page.tab.input_value("#prompt") == "x" * 300
    page.tab.fill("#prompt", "")
    page.ask("Hello", 1)
    assert page.text("#error") == "" and page.numbers(1)[3] == "0"


def test_an_error_in_the_middle_of_an_answer_is_told_in_words(page, engine):
    break_after(engine, 3)
    page.type("Hello", "Enter")
    page.wait(lambda: page.text("#error"))
    assert "inside the server" in page.text("#error") and page.turns() == []


def test_a_server_that_does_not_answer_is_told_in_words(page, browser):
    browser.set_offline(True)
    page.type("Hello", "Enter")
    page.wait(lambda: page.text("#error"))
    browser.set_offline(False)
    assert "does not answer" in page.text("#error") and page.turns() == []
    page.ask("", 1)                             # and when it is back, the message is still in its box


def test_nothing_is_asked_from_elsewhere(page):
    page.ask("Hello", 1)
    page.wait(lambda: page.all("#timelines img"))
    page.wait(lambda: any("timelines/" in url for url in page.requests))
    ours = {re.sub(r"\d+", "N", url.removeprefix(page.url)) for url in page.requests if url.startswith(page.url)}
    assert ours == {"", "events", "generate", "timelines/N.svg?version=N"}
    assert [url for url in page.requests if not url.startswith((page.url, "data:"))] == []


def test_an_engines_blocks_are_seen_and_named_while_a_request_runs(page, engine):
    go_on = gate(engine, 4)
    page.type("Hello", "Enter")
    page.wait(lambda: any(re.search(r"[1-9]\d* in use", item) for item in page.texts("[data-tier=device] li")))
    page.tab.focus("[data-tier=device] .blocks canvas")
    page.wait(lambda: "Block 0: in use, held by request" in page.text("[data-tier=device] .words"))
    page.wait(lambda: "token" in page.text("[data-tier=device] .words"))
    go_on.set()
    page.wait(lambda: page.numbers(1))
    assert page.wait(lambda: page.texts("#timelines h3")) == [f"Request {page.numbers(1)[1]}"]
    assert "finished" in page.texts("#counters dt")


# 2. A server that plays a script ---------------------------------------------------------------------------------

HELLO = dict(chapter="03_cpu_offload", model="scripted", device="cpu", dtype="float32", evict=True,
             examples=[dict(name="Facts", prompt="The lamp is in the attic."), dict(name="A question", prompt="Where is it?")],
             compare=dict(ways=["recompute", "KV from the host"], measure="TTFT"))
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="60"><title>lanes</title><rect width="9" height="9"/></svg>'
RESULT = dict(id=17, text="Yes.", source="cpu_hit", history_tokens=3, ttft_ms=20.14, tbt_ms=None, finish_reason="stop",
              usage=dict(prompt_tokens=834, cached_tokens=512, completion_tokens=1))


class Scripted:
    """It says what a test tells it and remembers what it was asked: (path with its query, the body)."""

    class Quiet(WSGIRequestHandler):
        def log(self, *_):
            pass

    def __init__(self):
        self.hello, self.known, self.pages, self.asked, self.status = HELLO, [], [], [], 200
        self.answer = [dict(text="Yes."), dict(result=RESULT)]
        self.comparison, self.hung_up, self.evicted = [], threading.Event(), (dict(evicted=53), 200)
        self.block = dict(state="in use", requests=[17], tokens=16, key="0f" * 32, text="the lamp", note=None)
        self.app = flask.Flask("scripted")
        self.app.before_request(lambda: self.asked.append((flask.request.full_path.rstrip("?"), flask.request.get_json(
            force=True, silent=True))))
        for rule, view in {
                "/": lambda: SOURCE,
                "/events": lambda: self.stream(self.events()) if self.status == 200 else ({}, self.status),
                "/timelines/<name>": lambda name: flask.Response(PICTURE, mimetype="image/svg+xml"),
                "/blocks/<path:tier>/<int:number>": lambda tier, number: dict(self.block, tier=tier, block=number),
                "/evict": lambda: self.evicted,
                "/generate": lambda: self.stream(iter(self.answer)),
                "/compare": lambda: self.stream(self.compare())}.items():
            self.app.add_url_rule(rule, rule, view, methods=["GET", "POST"])
        self.port = 0
        self.begin()

    def begin(self):
        self.server = make_server("127.0.0.1", self.port, self.app, threaded=True, request_handler=self.Quiet)
        self.port = self.server.port
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True)
        self.thread.start()

    def end(self):
        """As if it were killed: it listens no more, and its streams break off."""
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for page in list(self.pages):
            page.put(None)
        eventually(lambda: not self.pages)

    def stream(self, events):
        def lines():
            yield "retry: 50\n\n"              # milliseconds
            for event in events:
                yield f"data: {json.dumps(event)}\n\n" if event else ": still here\n\n"
        return flask.Response(lines(), mimetype="text/event-stream")

    def events(self):
        page = queue.SimpleQueue()
        self.pages.append(page)
        try:
            yield from (dict(hello=self.hello), *self.known)
            while True:
                try:
                    event = page.get(timeout=0.02)
                except queue.Empty:
                    event = {}                  # and so it is seen that a page is gone
                if event is None:
                    return
                yield event
        finally:
            self.pages.remove(page)

    def tell(self, **event):
        for page in self.pages:
            page.put(event)

    def compare(self):
        try:
            for event in self.comparison:
                if isinstance(event, threading.Event):
                    while not event.wait(0.02):
                        yield {}
                else:
                    yield event
        except GeneratorExit:
            self.hung_up.set()
            raise

    def paths(self, begin: str) -> list[str]:
        return [path for path, _ in list(self.asked) if path.startswith(begin)]


@pytest.fixture
def server():
    server = Scripted()
    yield server
    server.end()


@pytest.fixture
def scripted(browser, server):
    """A page of `server`."""
    page = Page(browser, server.port, "scripted")
    yield page
    browser.close()


def tier(*runs, name="device", title="Device: KV blocks of 16 tokens", block_bytes=262144) -> dict:
    return dict(name=name, title=title, blocks=sum(run[1] for run in runs), block_bytes=block_bytes,
                runs=[[state, count, list(holders[0]) if holders else []] for state, count, *holders in runs])


EVERY_STATE = tier(("in use", 1, [17]), ("shared", 1, [17, 18]), ("reserved", 1, [17]), ("in flight", 1, [17]), ("cached", 1),
                   ("free", 1), ("in use", 1, [20]), ("free", 93))


def finished(number: int, **changes) -> dict:
    result = {name: RESULT[name] for name in ("source", "finish_reason", "usage", "ttft_ms", "tbt_ms")}
    return {**result, "id": number, "version": 1, "words": f"compute idle {number} % until the first token", **changes}


def show(page, server, *tiers):
    """Tell the memory and wait until it is drawn."""
    server.tell(memory=list(tiers))
    wanted = [[tier["name"], tier["title"], tier["runs"]] for tier in tiers]
    page.wait(lambda: page.run("[...tiers.values()].map(({name, title, runs}) => [name, title, runs])") == wanted)
    page.wait(lambda: page.run("frame === null"))


def legend(page, name="device") -> str:
    return " ".join(item.inner_text().strip() for item in page.all(f"[data-tier={name}] li") if item.is_visible())


def words(page, name="device") -> str:
    return page.text(f"[data-tier={name}] .words")


# 3. Memory -------------------------------------------------------------------------------------------------------

def test_a_tier_is_summed_up_in_words_and_shown_as_far_as_it_was_ever_used(scripted, server):
    show(scripted, server, tier(("in use", 30, [17]), ("shared", 4, [17, 18]), ("free", 8158)),
         tier(("cached", 1), ("free", 511), name="host", title="Host", block_bytes=None))
    assert scripted.texts(".tier h3") == ["Device: KV blocks of 16 tokens", "Host"]
    assert legend(scripted) == "8,192 blocks of 256 KiB: 30 in use 4 shared 8,158 free"
    assert legend(scripted, "host") == "512 blocks: 1 cached 511 free"
    columns, shown, cell = scripted.run("({columns, shown, cell} = tiers.get('device'), [columns, shown, cell])")
    assert 34 <= shown < 34 + columns and shown % columns == 0
    assert scripted.text(".tier .note:not(.row *)") == f"and {8192 - shown:,} more are free"
    assert scripted.run("document.querySelector('.blocks').clientHeight") == shown // columns * cell
    show(scripted, server, tier(("cached", 2), ("free", 8190)))         # less is used: what was seen once stays in view
    assert legend(scripted) == "8,192 blocks of 256 KiB: 0 in use 0 shared 2 cached 8,190 free"
    assert scripted.run("tiers.get('device').shown") == shown and scripted.texts(".tier h3")[1:] == []
    show(scripted, server, tier(("free", 3), name="host", title="Host"), tier(name="act-device", title="Nothing"))
    assert scripted.texts(".tier h3") == ["Host", "Nothing"] and legend(scripted, "act-device") == "0 blocks of 256 KiB:"
    assert [part.inner_text() for part in scripted.all("[data-tier=act-device] p") if part.is_visible()] == ["nothing is here"]
    assert scripted.complaints == []


def luminance(color) -> float:
    """Relative luminance of a color [red, green, blue, ...] from 0 to 255 or of a CSS rgb(), as in WCAG 2."""
    channels = [int(part) / 255 for part in (re.findall(r"\d+", color) if isinstance(color, str) else color)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def shape(page, number: int, name="device") -> tuple[bool, ...]:
    """Of a drawn block: which of its pixels stand out from the card by a contrast of 3 or more."""
    pixels, size, card = page.run("""([name, number]) => {
        const {columns, pixels, canvas} = tiers.get(name), card = getComputedStyle(document.querySelector("section"));
        const x = number % columns * pixels, y = Math.floor(number / columns) * pixels;
        return [[...canvas.getContext("2d").getImageData(x, y, pixels, pixels).data], pixels, card.backgroundColor];
    }""", [name, number])
    return tuple(pixels[at + 3] == 255 and contrast(pixels[at:at + 3], card) >= 3 for at in range(0, 4 * size * size, 4))


def gap(page) -> list[int]:
    """The color between the blocks."""
    return page.run("[tiers.get('device')].flatMap(({canvas, pixels}) => "
                    "[...canvas.getContext('2d').getImageData(pixels - 1, 0, 1, 1).data])")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("more", [0, 9000], ids=["large", "small"])
def test_every_state_has_a_shape_of_its_own(scripted, server, scheme, more):
    show(scripted, server, tier(*[(state, count, ids) for state, count, ids in EVERY_STATE["runs"]], ("cached", more + 1)))
    scripted.tab.emulate_media(color_scheme=scheme)                     # it may change while the page is open
    scripted.wait(lambda: (luminance(gap(scripted)) < 0.5) == (scheme == "dark") and scripted.run("frame === null"))
    assert scripted.run("tiers.get('device').pixels") == (6 if more else 18)
    shapes = [shape(scripted, number) for number in range(6)]
    assert not any(shape(scripted, scripted.run("tiers.get('device').blocks")))         # beyond the last block: nothing
    assert all(any(one) for one in shapes)
    assert all(sum(a != b for a, b in zip(one, other)) >= 1 for one, other in combinations(shapes, 2))
    assert shape(scripted, 6) == shapes[0]      # of another request: the same shape in another color
    hues = scripted.run("""[0, 1, 2, 3, 4, 5, 6, 7].map(hue => {
        document.getElementById("title").style.color = `var(--hue-${hue})`;
        return getComputedStyle(document.getElementById("title")).color; })""")
    card = scripted.run("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert len(set(hues)) == 8 and min(contrast(hue, card) for hue in hues) >= 4.5


def test_the_states_are_explained_in_words(scripted):
    scripted.tab.click("summary")
    assert [item.split(":")[0] for item in scripted.texts("#meanings li")] == [
        "in use", "shared", "reserved", "in flight", "cached", "free"]
    assert scripted.tab.is_visible("#meanings")


def test_only_what_changed_is_drawn_again(scripted, server):
    scripted.run("""() => {
        const {drawImage} = CanvasRenderingContext2D.prototype;
        window.drawn = 0;
        CanvasRenderingContext2D.prototype.drawImage = function (...all) { window.drawn++; drawImage.apply(this, all); };
    }""")
    show(scripted, server, tier(("in use", 4096, [17])))
    scripted.run("drawn = 0")
    show(scripted, server, tier(("in use", 100, [17]), ("shared", 3, [17, 18]), ("in use", 3993, [17])))
    assert scripted.run("drawn") == 3
    scripted.run("for (let times = 0; times < 5; times++) { drawSoon(); }")
    scripted.wait(lambda: scripted.run("frame === null"))
    assert scripted.run("drawn") == 3


WATCH_FRAMES = """() => {
    performance.clearMeasures("draw memory");
    window.gaps = [];
    let last = null;
    const step = now => { if (last !== null) gaps.push(now - last); last = now; window.watch = requestAnimationFrame(step); };
    window.watch = requestAnimationFrame(step);
}"""
FRAMES = "(cancelAnimationFrame(watch), [performance.getEntriesByName('draw memory').map(entry => entry.duration), gaps])"
FRAME = 1000 / 60                  # milliseconds


@pytest.mark.parametrize("blocks,updates", [(4096, 50), (20000, 20)])
def test_thousands_of_blocks_do_not_freeze_the_page(scripted, server, blocks, updates):
    scripted.run(WATCH_FRAMES)
    for update in range(updates):                    # all blocks change from one to the next, in runs of every length
        runs = [(("in use", "cached", "shared", "in flight")[(number + update) % 4], 1 + number % 7, [number % 50 + update])
                for number in range(blocks // 4)]
        server.tell(memory=[tier(*runs, ("free", blocks - sum(run[1] for run in runs)), title=f"update {update}")])
        scripted.wait(lambda now=[f"update {update}", True]: scripted.run("[tiers.get('device')?.title, frame === null]") == now)
    draws, gaps = scripted.run(FRAMES)
    assert scripted.run("[tiers.get('device')].every(({drawn, codes, shown}) => "
                        "drawn.every((code, number) => code === codes[number] || number >= shown))")
    assert len(draws) >= updates and statistics.median(draws) <= 2 * FRAME, statistics.median(draws)
    assert statistics.median(gaps) <= 3 * FRAME and max(gaps) <= 40 * FRAME, max(gaps)


def test_however_much_is_told_it_is_drawn_once_in_a_frame(scripted, server):
    show(scripted, server, tier(("in use", 4096, [0])))
    scripted.run(WATCH_FRAMES)
    for update in range(300):
        server.tell(memory=[tier(("in use", 4096, [update]), title=f"update {update}")])
    scripted.wait(lambda: scripted.text(".tier h3") == "update 299" and scripted.run("frame === null"))
    draws, gaps = scripted.run(FRAMES)
    assert 1 <= len(draws) <= len(gaps) + 2


def point(page, number: int, name="device"):
    """Move the mouse to the middle of a block."""
    x, y = page.run("""([name, number]) => {
        const {columns, cell, canvas} = tiers.get(name), {x, y} = canvas.getBoundingClientRect();
        return [x + (number % columns + 0.5) * cell, y + (Math.floor(number / columns) + 0.5) * cell];
    }""", [name, number])
    page.tab.mouse.move(x, y)


def test_pointing_at_a_block_tells_it_in_words(scripted, server):
    show(scripted, server, EVERY_STATE)
    assert words(scripted) == "Point at a block, or go through them with the arrow keys."
    told = ["in use, held by request 17", "shared, held by requests 17, 18", "reserved, held by request 17",
            "in flight, held by request 17", "cached", "free", "in use, held by request 20"]
    for number, what in enumerate(told):
        point(scripted, number)
        scripted.wait(lambda begin=f"Block {number}: ": words(scripted).startswith(begin))
        if not server.paths(f"/blocks/device/{number}"):
            assert words(scripted) == f"Block {number}: {what}."
    number = len(told) - 1
    scripted.wait(lambda: "key" in words(scripted))
    assert words(scripted) == f"Block {number}: in use, held by request 17. 16 tokens, key {'0f' * 32}.\nText: “the lamp”"
    server.block.update(text=None, key=None, tokens=1, requests=[], state="free", note="its text is told on this machine only")
    point(scripted, 5)
    scripted.wait(lambda: "no key" in words(scripted))
    assert words(scripted) == "Block 5: free. 1 token, no key.\nits text is told on this machine only"
    scripted.tab.mouse.move(1, 1)
    scripted.wait(lambda: words(scripted).startswith("Point"))
    assert scripted.complaints == []


def test_the_keyboard_goes_through_the_blocks(scripted, server):
    show(scripted, server, tier(("in use", 12000, [17]), ("free", 96)))
    columns, shown = scripted.run("[tiers.get('device').columns, tiers.get('device').shown]")
    scripted.tab.focus(".blocks canvas")
    last = shown - 1
    for key, to in (("ArrowLeft", 0), ("ArrowRight", 1), ("ArrowDown", 1 + columns), ("ArrowUp", 1), ("ArrowUp", 1),
                    ("PageDown", 1 + 10 * columns), ("PageUp", 1), ("ArrowDown", 1 + columns), ("PageUp", 1), ("PageUp", 1),
                    ("End", last), ("ArrowRight", last), ("ArrowDown", last), ("PageDown", last), ("ArrowUp", last - columns),
                    ("PageDown", last), ("Home", 0)):
        scripted.tab.keyboard.press(key)
        assert re.match(rf"Block {to}\D", words(scripted)), (key, words(scripted))
        ring, box = (scripted.run("name => document.querySelector(name).getBoundingClientRect().toJSON()", name)
                     for name in (".ring", ".scroll"))
        assert all(ring[side] >= box[side] for side in ("left", "top")), key    # it is in view
        assert all(ring[side] <= box[side] for side in ("right", "bottom")), key
    assert scripted.run("getComputedStyle(document.querySelector('.scroll')).outlineStyle") == "solid"
    assert scripted.all(".words[role=status]") and scripted.all(".blocks canvas[aria-label*='arrow keys']")
    scripted.tab.focus("#prompt")
    assert words(scripted).startswith("Point") and not scripted.tab.is_visible(".ring")


def test_the_server_is_asked_for_the_block_where_one_stays(scripted, server):
    name = "a?b#c <i>"
    show(scripted, server, tier(("in use", 40, [17]), name=name, title="odd"))
    scripted.run("""name => {
        const {setTimeout} = window, {canvas} = tiers.get(name);
        window.delays = [];
        window.setTimeout = (call, delay, ...all) => { delays.push(delay); return setTimeout(call, delay, ...all); };
        canvas.focus();
        for (let times = 0; times < 10; times++) canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    }""", name)
    scripted.wait(lambda: "key" in scripted.text(".words"))
    assert [urllib.parse.unquote(path) for path in server.paths("/blocks/")] == [f"/blocks/{name}/10"]
    assert min(scripted.run("delays")) >= 100   # milliseconds


def test_what_is_told_of_a_block_follows_its_state(scripted, server):
    show(scripted, server, tier(("in use", 4, [17]), ("free", 4)))
    scripted.tab.focus(".blocks canvas")
    scripted.wait(lambda: "key" in words(scripted))
    server.block.update(state="cached", requests=[])
    show(scripted, server, tier(("cached", 4), ("free", 4)))
    assert words(scripted).startswith("Block 0: cached.")
    scripted.wait(lambda: "key" in words(scripted))
    assert words(scripted).startswith("Block 0: cached. 16 tokens")
    show(scripted, server, tier())              # all are gone
    assert words(scripted).startswith("Point") and not scripted.tab.is_visible(".scroll")
    show(scripted, server, tier(("free", 2)))
    assert scripted.tab.is_visible(".scroll") and shape(scripted, 1) and scripted.complaints == []


def test_evict_empties_the_device_and_tells_how_much(scripted, server):
    show(scripted, server, EVERY_STATE, dict(EVERY_STATE, name="host", title="Host"))
    (button,) = scripted.all(".tier button")
    assert scripted.all("[data-tier=device] button")
    button.click()
    scripted.wait(lambda: scripted.text("[data-tier=device] [role=status]") == "53 blocks evicted.")
    assert ("/evict", dict(tier="device")) in server.asked
    server.evicted = dict(error=dict(message="Not from here.")), 403
    button.click()
    scripted.wait(lambda: scripted.text("[data-tier=device] [role=status]") == "Not from here.")
    server.end()
    server.hello = dict(HELLO, evict=False)
    server.known = [dict(memory=[EVERY_STATE])]
    server.begin()
    scripted.wait(lambda: scripted.all(".tier") and not scripted.all(".tier button"))


# 4. Time ---------------------------------------------------------------------------------------------------------

def test_who_waits_and_who_runs_is_told(scripted, server):
    assert scripted.tab.is_visible("#nobody") and not scripted.tab.is_visible("#somebody")
    request = dict(id=17, state="prefill", prompt_tokens=834, computed=512, new_tokens=0, cached_tokens=256, source=None)
    server.tell(requests=[request, dict(request, id=18, state="decode", new_tokens=3, source="cpu_hit")])
    scripted.wait(lambda: scripted.all("#requests tr")[1:])
    assert [row.inner_text().split("\t") for row in scripted.all("#requests tr")] == [
        ["17", "prefill", "834", "512", "256", "0", "–"], ["18", "decode", "834", "512", "256", "3", "cpu_hit"]]
    assert scripted.tab.is_visible("#somebody") and not scripted.tab.is_visible("#nobody")
    server.tell(requests=[dict(request, id=number, state="waiting") for number in range(100)])
    scripted.wait(lambda: scripted.text("#crowd") == "and 80 more")
    assert len(scripted.all("#requests tr")) == 20
    server.tell(requests=[])
    scripted.wait(lambda: scripted.tab.is_visible("#nobody"))
    assert not scripted.tab.is_visible("#somebody")


def test_the_last_eight_requests_have_pictures_and_words(scripted, server, browser):
    for number in range(1, 11):
        server.tell(finished=finished(number, tbt_ms=5.06))
    scripted.wait(lambda: scripted.texts("#timelines h3")[:1] == ["Request 10"])
    assert scripted.texts("#timelines h3") == [f"Request {number}" for number in range(10, 2, -1)]
    assert scripted.text("#timelines .note") == (
        "Source cpu_hit; 834 prompt tokens, 512 of them cached; 1 new token, ended by stop; TTFT 20.1 ms, TBT 5.1 ms; "
        "compute idle 10 % until the first token.")
    picture, link = scripted.all("#timelines img")[0], scripted.all("#timelines a")[0]
    assert picture.get_attribute("alt") == "compute idle 10 % until the first token"
    assert picture.get_attribute("src") == link.get_attribute("href") == "timelines/10.svg?version=1"
    scripted.wait(lambda: picture.evaluate("picture => picture.complete && picture.naturalWidth") == 800)
    with browser.expect_page() as opened:
        link.click()
    opened.value.wait_for_load_state()
    assert opened.value.url == scripted.url + "timelines/10.svg?version=1" and opened.value.title() == "lanes"
    opened.value.close()
    server.tell(finished=finished(7, version=2, words="it has grown"))          # it keeps its place
    scripted.wait(lambda: "/timelines/7.svg?version=2" in server.paths("/timelines/7"))
    assert scripted.texts("#timelines h3") == [f"Request {number}" for number in range(10, 2, -1)]
    assert scripted.all("#timelines img")[3].get_attribute("alt") == "it has grown"
    assert "TBT – ms; it has grown." in scripted.texts("#timelines figure > .note")[6]
    assert scripted.complaints == []


def test_counters_are_told_as_they_are(scripted, server):
    server.tell(counters=dict(requests=1234, link="modelled link, 0.8 GB/s", hits=dict(host=2, storage=0.5), at=None))
    scripted.wait(lambda: scripted.texts("#counters dt")[3:])
    assert list(zip(scripted.texts("#counters dt"), scripted.texts("#counters dd"))) == [
        ("requests", "1,234"), ("link", "modelled link, 0.8 GB/s"), ("hits: host", "2"), ("hits: storage", "0.5"), ("at", "–")]
    server.tell(counters=dict(requests=1235))
    scripted.wait(lambda: scripted.texts("#counters dd") == ["1,235"])


# 5. Asking and comparing -----------------------------------------------------------------------------------------

def test_prepared_prompts_go_into_the_box(scripted, server):
    assert scripted.texts("#examples button") == ["Facts", "A question"]
    scripted.type("something else")
    scripted.tab.click("#examples button >> nth=0")
    assert scripted.tab.input_value("#prompt") == "The lamp is in the attic." and scripted.focused() == "prompt"
    assert server.paths("/generate") == []
    scripted.ask("", 1)
    assert scripted.turns() == [("user", "The lamp is in the attic."), ("assistant", "Yes.")]
    assert scripted.numbers(1) == ["1", "17", "834", "3", "512", "cpu_hit", "1", "20.1", "–"]


def test_an_answer_that_breaks_off_is_told_and_the_message_is_not_lost(scripted, server):
    server.answer = [dict(text="Ye")]
    scripted.type("Is it?", "Enter")
    scripted.wait(lambda: scripted.text("#error"))
    assert "broke off" in scripted.text("#error") and scripted.tab.input_value("#prompt") == "Is it?"


def test_a_long_conversation_stays_in_its_box_and_its_end_in_view(scripted, server):
    server.answer = [*[dict(text=f"line {number}\n") for number in range(200)], dict(result=RESULT)]
    scripted.ask("Tell me", 1)
    height, end = scripted.run("(box => [box.clientHeight, box.scrollHeight - box.scrollTop - box.clientHeight])"
                               "(document.getElementById('conversation'))")
    assert 100 < height <= 400 and abs(end) <= 1
    assert "line 199" in scripted.turns()[1][1]


ROWS = [dict(way="recompute", ttft_ms=80.04, min_ms=75, max_ms=90.5, tbt_ms=None, source="miss", cached_tokens=0, samples=5,
             equal=True),
        dict(way="KV from the host", ttft_ms=20.01, min_ms=19, max_ms=22, tbt_ms=4, source="cpu_hit", cached_tokens=1024,
             samples=1, equal=False)]
TABLE = dict(rows=ROWS, measure="TTFT", link="modelled link, 0.8 GB/s", disturbed=False)


def bars(page) -> list[float]:
    return page.run("[...document.querySelectorAll('.bar i')].map(bar => bar.getBoundingClientRect().width)")


def test_compare_shows_its_progress_and_then_bars(scripted, server):
    go_on = threading.Event()
    server.comparison = [dict(progress=dict(done=3, of=12, way="KV from the host")), go_on, TABLE]
    assert "recompute, KV from the host" in scripted.text("#ways") and "TTFT" in scripted.text("#ways")
    scripted.type("Where is the lamp?")
    scripted.click("compare")
    scripted.wait(lambda: "3 of 12" in scripted.text("#compare-words"))
    assert "KV from the host" in scripted.text("#compare-words") and "the text in the box" in scripted.text("#compare-words")
    assert scripted.run("[progress.value, progress.max]") == [3, 12] and scripted.tab.is_visible("#progress")
    assert not scripted.all("#compare:enabled") and scripted.all("#compare-stop:enabled")
    go_on.set()
    scripted.wait(lambda: scripted.all("#bars li"))
    scripted.wait(lambda: scripted.all("#compare:enabled"))
    assert server.asked[-1] == ("/compare", dict(messages=[dict(role="user", content="Where is the lamp?")]))
    assert not scripted.tab.is_visible("#progress") and not scripted.all("#compare-stop:enabled")
    assert scripted.texts("#bars h3") == ["recompute", "KV from the host"] and scripted.texts(".bar b") == ["80.0 ms", "20.0 ms"]
    assert scripted.texts("#bars p") == [
        "75.0 to 90.5 ms in 5 samples; source miss; 0 cached tokens; same tokens as chapter 01: yes",
        "19.0 to 22.0 ms in 1 sample; source cpu_hit; 1,024 cached tokens; same tokens as chapter 01: no"]
    long, short = bars(scripted)
    assert short / long == pytest.approx(20.01 / 80.04, rel=0.02) and long > 100
    assert scripted.text("#compare-note") == "Bars: median TTFT. Over the modelled link, 0.8 GB/s."
    assert scripted.tab.input_value("#prompt") == "Where is the lamp?" and scripted.complaints == []


def test_compare_can_show_the_time_between_tokens_and_says_if_it_was_disturbed(scripted, server):
    server.comparison = [dict(TABLE, measure="TBT", link=None, disturbed=True)]
    scripted.type("x")
    scripted.click("compare")
    scripted.wait(lambda: scripted.all("#bars li"))
    assert scripted.texts(".bar b") == ["– ms", "4.0 ms"] and bars(scripted)[0] == 0 < bars(scripted)[1]
    assert scripted.text("#compare-note").startswith("Bars: median TBT. Others asked meanwhile")


def test_compare_takes_the_box_then_the_conversation_then_the_first_example(scripted, server):
    server.comparison = [TABLE]

    def compared():
        before = len(server.paths("/compare"))
        scripted.click("compare")
        scripted.wait(lambda: len(server.paths("/compare")) > before and scripted.text("#compare-words").startswith("Compared"))
        return server.asked[-1][1]["messages"], scripted.text("#compare-words")
    facts, question = (dict(role="user", content=text) for text in ("The lamp is in the attic.", "And?"))
    assert compared() == ([facts], "Compared: the prepared prompt “Facts”.")
    scripted.ask(facts["content"], 1)
    assert compared() == ([facts], "Compared: the conversation.")
    scripted.ask(question["content"], 2)
    assert compared() == ([facts, dict(role="assistant", content="Yes."), question], "Compared: the conversation.")
    scripted.type("  box ")
    assert compared() == ([dict(role="user", content="  box ")], "Compared: the text in the box.")
    assert len(scripted.all("#bars li")) == 2   # the last comparison only


def test_stop_ends_a_comparison(scripted, server):
    server.comparison = [dict(progress=dict(done=1, of=12, way="recompute")), threading.Event()]
    scripted.click("compare")
    scripted.wait(lambda: "1 of 12" in scripted.text("#compare-words"))
    scripted.click("compare-stop")
    scripted.wait(lambda: scripted.text("#compare-words") == "Stopped.")
    assert scripted.all("#compare:enabled") and scripted.focused() == "compare" and scripted.text("#compare-error") == ""
    scripted.wait(server.hung_up.is_set)


@pytest.mark.parametrize("events,words", [
    ([dict(progress=dict(done=1, of=12, way="a")), dict(error=dict(message="It is too long."))], "It is too long."),
    ([dict(progress=dict(done=1, of=12, way="a"))], "broke off"), ([], "broke off")])
def test_a_comparison_that_fails_says_why(scripted, server, events, words):
    server.comparison = events
    scripted.click("compare")
    scripted.wait(lambda: scripted.text("#compare-error"))
    assert words in scripted.text("#compare-error") and scripted.all("#compare-error[role=alert]")
    assert scripted.all("#compare:enabled") and not scripted.tab.is_visible("#progress")


def test_a_chapter_without_a_comparison_shows_none(browser, server):
    server.hello = dict(HELLO, compare=None, examples=[])
    page = Page(browser, server.port, "scripted")
    assert not page.tab.is_visible("#comparison") and not page.tab.is_visible("#examples") and page.complaints == []


def test_without_anything_to_compare_it_says_so(browser, server):
    server.hello = dict(HELLO, examples=[])
    page = Page(browser, server.port, "scripted")
    page.click("compare")
    assert "Write a text" in page.text("#compare-error") and server.paths("/compare") == []


# 6. Live values --------------------------------------------------------------------------------------------------

LOST = "The server does not answer; trying again."
LIFE = [dict(memory=[EVERY_STATE]), dict(finished=finished(1)), dict(counters=dict(requests=1)),
        dict(requests=[dict(id=2, state="decode", prompt_tokens=1, computed=1, new_tokens=1, cached_tokens=0, source="miss")])]


def test_a_server_that_ends_and_begins_again_is_told_and_what_was_its_is_cleared(scripted, server):
    for event in LIFE:
        server.tell(**event)
    scripted.wait(lambda: scripted.all(".tier") and scripted.all("#timelines img") and scripted.all("#counters dt")
                  and scripted.all("#requests tr"))
    scripted.ask("Hello", 1)
    assert scripted.text("#status") == "" and scripted.all("#status[role=status]")
    server.end()
    scripted.wait(lambda: scripted.text("#status") == LOST)
    assert scripted.all(".tier")                # the last that is known can still be read
    server.begin()
    scripted.wait(lambda: scripted.text("#status") == "")
    scripted.wait(lambda: not scripted.all(".tier"))
    assert not scripted.all("#timelines img") and not scripted.all("#counters dt") and not scripted.all("#requests tr")
    assert len(scripted.turns()) == 2 and scripted.numbers(1)           # the conversation is the user's
    server.tell(finished=finished(1, version=1))                        # it counts from 1 again: another picture, so asked again
    asked = "/timelines/1.svg?version=1"
    scripted.wait(lambda: len(server.paths(asked)) == 2)
    server.end()
    server.hello = dict(HELLO, chapter="04_hidden_state_cache", examples=[dict(name="Other", prompt="other")])
    server.known = LIFE
    server.begin()
    scripted.wait(lambda: scripted.text("#title") == "04_hidden_state_cache · scripted" == scripted.tab.title())
    scripted.wait(lambda: scripted.all(".tier"))
    assert scripted.texts("#examples button") == ["Other"] and not scripted.all("#numbers tr")


def test_a_stream_that_is_refused_is_asked_for_again(scripted, server):
    server.end()
    server.status = 503
    server.begin()
    scripted.wait(lambda: scripted.run("source.readyState === EventSource.CLOSED"))
    assert scripted.text("#status") == LOST
    server.status = 200
    scripted.wait(lambda: scripted.text("#status") == "")
    eventually(lambda: len(server.pages) == 1)


def see(page, state: str):
    """Make the browser say that the page is "visible" or "hidden"."""
    page.run("""state => {
        Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }""", state)


def test_a_page_that_nobody_looks_at_asks_nothing(scripted, server):
    eventually(lambda: len(server.pages) == 1)
    see(scripted, "hidden")
    eventually(lambda: not server.pages)
    before = len(server.asked)
    server.end()
    server.begin()
    server.known = LIFE
    scripted.tab.wait_for_timeout(500)          # milliseconds, in which it would have come back
    assert len(server.asked) == before and scripted.text("#status") == ""
    see(scripted, "visible")
    scripted.wait(lambda: scripted.all(".tier"))
    assert len(server.pages) == 1


def test_a_page_that_is_closed_ends_its_stream(browser, server):
    page = Page(browser, server.port, "scripted")
    eventually(lambda: len(server.pages) == 1)
    page.tab.close()
    eventually(lambda: not server.pages)


def test_events_of_a_later_version_are_passed_over_and_an_error_is_told(scripted, server):
    server.tell(weather="rain")
    server.tell(error=dict(message="An error inside the server."))
    scripted.wait(lambda: scripted.text("#status") == "An error inside the server.")
    assert scripted.complaints == []


BAD = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">&amp;"


def test_markup_in_any_field_is_shown_as_text(browser, server):
    server.hello = dict(chapter="scripted" + BAD, model=BAD, device=BAD, dtype=BAD, examples=[dict(name=BAD, prompt=BAD)],
                        compare=dict(ways=[BAD], measure=BAD), evict=True)
    server.block = dict(state=BAD, requests=[BAD], tokens=16, key=BAD, text=BAD, note=BAD)
    server.evicted = dict(error=dict(message=BAD)), 400
    result = dict(RESULT, id=BAD, source=BAD, finish_reason=BAD)
    server.answer = [dict(text=BAD), dict(result=result)]
    server.comparison = [dict(progress=dict(done=1, of=2, way=BAD)),
                         dict(rows=[dict(ROWS[0], way=BAD, source=BAD)], measure=BAD, link=BAD, disturbed=True)]
    server.known = [dict(memory=[tier(("in use", 3, [BAD]), (BAD, 1, [BAD]), ("shared", 1, [BAD, BAD]), title=BAD),
                                 tier(("free", 2), name=BAD, title=BAD)]),
                    dict(requests=[{**dict.fromkeys(("prompt_tokens", "computed", "new_tokens", "cached_tokens"), BAD),
                                    "id": BAD, "state": BAD, "source": BAD}]),
                    dict(finished=finished(BAD, words=BAD, source=BAD, finish_reason=BAD, version=BAD)),
                    dict(counters={BAD: BAD, "more": {BAD: [BAD]}})]
    page = Page(browser, server.port, "scripted")
    page.wait(lambda: page.all("#counters dt")[1:])
    page.tab.focus(".blocks canvas")
    page.wait(lambda: words(page).startswith(f"Block 0: {BAD}"))
    page.tab.click(".tier button")
    page.ask(BAD, 1)
    page.click("compare")
    page.wait(lambda: page.all("#bars li"))
    page.wait(lambda: page.text("[data-tier=device] [role=status]"))
    shown = page.run("document.body.textContent.split(document.querySelector('body > script').textContent).join('')")
    assert shown.count(BAD) >= 33, shown.count(BAD)
    assert page.all("#timelines img")[0].get_attribute("alt") == BAD
    assert len(page.all("script")) == 1 and page.all("img[onerror]") == [] and page.tab.title().count("<script>") == 2
    assert all("Failed to load" in complaint for complaint in page.complaints)         # what is nothing here, and what it refused
    server.tell(error=dict(message=BAD))
    page.wait(lambda: page.text("#status") == BAD)


def test_the_page_has_no_way_to_insert_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\b|"
                         r"Function\(|setHTML", SOURCE)


# 7. Everybody can use it -----------------------------------------------------------------------------------------

def fill(page, server):
    """Something in every part of the page."""
    server.comparison = [dict(TABLE, disturbed=True)]
    host = tier(("in use", 90, [3]), ("cached", 900), ("free", 4000), name="host", title="Host")
    for event in (*LIFE[1:], dict(finished=finished(2)), dict(memory=[EVERY_STATE, host])):
        server.tell(**event)
    page.wait(lambda: len(page.all(".tier")) == 2)
    page.ask("Tell me something " + "long" * 20, 1)
    page.click("compare")
    page.wait(lambda: page.all("#bars li"))
    page.tab.focus(".blocks canvas")
    page.wait(lambda: "key" in words(page))


def test_every_control_is_reached_by_tab_and_shows_its_focus(scripted, server):
    fill(scripted, server)
    scripted.tab.keyboard.press("Tab")
    scripted.tab.focus("#conversation")
    reached = []
    while len(reached) < 30:
        name, outline = scripted.run("""() => {
            const active = document.activeElement, place = active.tagName === "CANVAS" ? active.closest(".scroll") : active;
            const [label, by] = [active.getAttribute("aria-label"), active.getAttribute("aria-labelledby")];
            return [active === document.body ? "BODY" : active.id || label || by || active.innerText,
                    getComputedStyle(place).outlineStyle];
        }""")
        if name == "BODY" or reached and name == "conversation":
            break
        assert outline == "solid", (name, reached)
        reached.append(" ".join(name.split())[:20].strip())
        scripted.tab.keyboard.press("Tab")
    assert reached == ["conversation", "Facts", "A question", "prompt", "ask", "new", "max-tokens", "temperature",
                       "What the blocks look", "Evict", "Device: KV blocks of", "Host. The arrow keys", "somebody",
                       "Open the picture of", "Open the picture of", "compare", "measured"]
    assert scripted.run("[...document.querySelectorAll('textarea, input')].every(field => field.labels.length === 1)")


TEXTS = """() => {
    const seen = [];
    for (const element of document.body.querySelectorAll("*")) {
        const text = [...element.childNodes].map(node => node.nodeType === Node.TEXT_NODE ? node.data : "").join("").trim();
        if (text === "" || !element.checkVisibility() || element.matches("script, :disabled")) continue;
        let behind = element;
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        seen.push([text, getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]);
    }
    return seen;
}"""


@pytest.mark.parametrize("scheme,width,height", [("light", 1280, 800), ("dark", 1280, 800), ("light", 360, 740),
                                                 ("dark", 1920, 1080)])
def test_it_can_be_read_on_every_screen(scripted, server, tmp_path, scheme, width, height):
    scripted.tab.emulate_media(color_scheme=scheme)
    scripted.tab.set_viewport_size(dict(width=width, height=height))
    fill(scripted, server)
    server.answer = [dict(error=dict(message="Too long."))]
    scripted.type("x" * 300, "Enter")
    scripted.wait(lambda: scripted.text("#error"))
    server.tell(error=dict(message="Something is told."))
    scripted.wait(lambda: scripted.text("#status"))
    scripted.run("scrollTo(0, 300)")
    assert 0 <= scripted.run("document.getElementById('status').getBoundingClientRect().top") < 20     # it stays in view
    texts = scripted.run(TEXTS)
    assert len(texts) > 80
    assert [(text, contrast(front, behind)) for text, front, behind in texts if contrast(front, behind) < 4.5] == []
    background = scripted.run("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.5) == (scheme == "dark")
    assert scripted.run("document.documentElement.scrollWidth") <= width
    assert scripted.run("getComputedStyle(document.documentElement).fontSize") == ("18px" if width == 1920 else "16px")
    sections = scripted.run("[...document.querySelectorAll('section')].map(part => part.getBoundingClientRect().x)")
    assert len(set(sections)) == (1 if width < 1000 else 2 if width < 1600 else 3)
    assert scripted.tab.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)


def test_nothing_moves_by_itself(scripted, server):
    scripted.tab.emulate_media(reduced_motion="reduce")
    scripted.run("document.addEventListener('transitionrun', () => { window.moved = true; })")
    fill(scripted, server)
    assert scripted.run("document.getAnimations().length") == 0 and not scripted.run("window.moved")


def test_another_size_of_the_window_gives_another_grid(scripted, server):
    show(scripted, server, tier(("in use", 300, [17])))
    before = scripted.run("tiers.get('device').columns")
    scripted.tab.set_viewport_size(dict(width=360, height=740))
    scripted.wait(lambda: scripted.run("tiers.get('device').columns") < before)
    scripted.wait(lambda: scripted.run("frame === null"))
    assert any(shape(scripted, 299))


def test_a_tier_that_fills_up_comes_into_view(scripted, server):
    for used in (5000, 7000, 20000):            # the cells keep their size, and the rows become more
        show(scripted, server, tier(("in use", used, [17]), ("free", 20000 - used)))
        assert scripted.run("tiers.get('device').pixels") == 6
        assert any(shape(scripted, used - 1)) and scripted.run("tiers.get('device').shown") >= used
