"""The engine of chapter 06 behind a real socket: many clients, some of whom hang up, several samples, salts, errors."""
import http.client
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legacy.tests.conftest import chapter
from legacy.tests.test_app import (
    ANYTHING,
    ASK,
    CHAT,
    VALID,
    Serving,
    another,
    error_of,
    events,
    eventually,
)

paged, offload, cake = (chapter(name) for name in ("02_paged_kv", "03_cpu_offload", "06_bidirectional"))
TIMEOUT = 120                      # seconds; no answer here takes more than a few
TEXT = dict(prompt="Hello", max_tokens=8, temperature=0)


class Reply:
    """What came over the socket, in the form in which Flask's test client gives it."""

    def __init__(self, response):
        self.status_code, self.mimetype = response.status, response.getheader("Content-Type").split(";")[0]
        self.data = response.read().decode()

    def get_data(self, as_text: bool):
        return self.data

    @property
    def json(self):
        return json.loads(self.data)


def sent(port: int, body, route: str = "/generate"):
    """-> the connection on which `body` was asked; the answer is still to come. Closing it is to hang up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("POST", route, body if isinstance(body, bytes) else json.dumps(body))
    return connection


def ask(port: int, body, route: str = "/generate") -> Reply:
    with closing(sent(port, body, route)) as connection:
        return Reply(connection.getresponse())


def counters(port: int) -> dict:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())["counters"]


def make(tiny_engine, end_tokens=None, **options):
    """Chapter 02's engine on the model of chapter 01's."""
    return paged.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens if end_tokens is None else end_tokens,
                        **{"blocks": 64, **options})


@contextmanager
def serving(engine):
    """-> the port. Afterwards nobody runs or waits, every block is back, and everybody is counted once."""
    try:
        with Serving(engine) as port:
            yield port
            eventually(lambda: over(engine))
            counts = engine.counters()
            assert counts["running"] == counts["waiting"] == counts["blocks_referenced"] == 0
            assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"] == engine.pool.size
            engine.pool.check_integrity([])
            assert counts["finished"] + counts["failed"] + counts["cancelled"] == counts["requests"]
    finally:
        engine.close()


def over(engine) -> bool:
    """Whether the engine's thread has nothing more to do; it holds `stepping` while it does something."""
    with engine.stepping:
        return not (engine.running or engine.waiting or engine.cancelled)


def hold(engine, until, passes: int = 0):
    """After `passes` forward passes, the engine's next one waits until `until()` -> an event that says that it waits."""
    waits = threading.Event()

    def wait(number):
        if number == passes:
            waits.set()
            eventually(until)
    before_each_pass(engine, wait)
    return waits


def before_each_pass(engine, call):
    """`call(number)` comes before every forward pass, in the engine's thread, which has not changed anything since."""
    forward, numbers = engine.forward, itertools.count()

    def wrapped(batch):
        call(next(numbers))
        return forward(batch)
    engine.forward = wrapped


def tokens_of(engine, body: dict) -> list[int]:
    """What chapter 01 answers to the body of a POST to /generate."""
    return engine.generate(**{name: value for name, value in body.items() if name not in ("n", "stream", "cache_salt")}).tokens


@pytest.fixture(scope="module")
def port(tiny_engine):
    """Of a server that all tests share that leave it as it was."""
    with serving(make(tiny_engine)) as port:
        yield port


def tokens_in(answer: dict) -> list[list[int]]:
    return [result["tokens"] for result in answer.get("results", [answer])]


NS, SALTS = st.integers(1, 4), st.text(max_size=8) | st.just("Anna")
WRONG_NS = st.sampled_from([0, 17, -1, "two", True, 1.0, 10 ** 400, [], {}])
WRONG_SALTS = st.sampled_from(["x" * 257, 5, False, [], "\ud800"])


@st.composite
def bodies(draw):
    """-> whether it is a valid request, and its body: n, a salt, a stream or not, and a wrong value or two among them."""
    body = {**draw(VALID), "max_tokens": draw(st.integers(1, 4)), "stream": draw(st.booleans()),
            "temperature": draw(st.sampled_from([0, 1.5]))}
    body |= draw(st.fixed_dictionaries({}, optional=dict(n=NS, cache_salt=SALTS)))
    wrong = {}
    if draw(st.booleans()):
        wrong = draw(st.fixed_dictionaries({}, optional=dict(n=WRONG_NS | ANYTHING, cache_salt=WRONG_SALTS | ANYTHING)))
        wrong |= draw(st.dictionaries(st.sampled_from(["stream", "seed", "stop", "prompt", "extra"]), ANYTHING, max_size=1))
    return not wrong, {**body, **wrong}


def settled(engine):
    eventually(lambda: over(engine))
    engine.flush()


STORY = "It was a long story, and it began with a letter. " * 4         # 12 chunks of 16 tokens, and a beginning


def forget(engine):
    """The device lost all that it had cached, as if others had needed it."""
    settled(engine)
    offload.empty(engine)


# Chapter 06 ------------------------------------------------------------------------------------------------------

WHOLE = 12                         # chunks of 16 tokens of STORY's prompt, but for its last token
KV = 3 * 2 * 2 * 16 * 4            # bytes of a token's keys and values: layers, both, heads, width, float32
RESTORATION = {"mode", "tokens", "chunks", "computed", "loaded", "on_device", "absent", "meeting", "bytes", "start_ms", "ms",
               "storage_bubble", "compute_bubble"}


def make_cake(tiny_engine, end_tokens=None, **options):
    """Chapter 06's engine on the model of chapter 01's. It restores by loading only, unless it is asked otherwise: what both
    do depends on how busy this machine is."""
    return cake.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens if end_tokens is None else end_tokens,
                       **{"blocks": 256, "block_size": 4, "chunk": 16, "bytes_per_second": 5e8, "mode": "load", **options})


@contextmanager
def serving_cake(engine):
    """-> the port. Afterwards nothing is on its way, every block and every buffer is back, and everybody is counted once."""
    try:
        with Serving(engine) as port:
            yield port
            settled(engine)
            loader, writer = engine.loader, engine.writer
            eventually(lambda: len(writer.buffers.free) == len(writer.buffers.memory))
            eventually(lambda: engine.counters()["read_buffers_free"] == len(loader.buffers.memory))
            engine.check_integrity()
            counts = engine.counters()
            for name in ("running", "waiting", "blocks_referenced", "chunks_leaving", "readers_retired"):
                assert counts[name] == 0, name
            assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"] == engine.pool.size
            assert counts["finished"] + counts["failed"] + counts["cancelled"] == counts["requests"]
            assert not (engine.restorations or engine.leaving)
    finally:
        engine.close()
        engine.release()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", cake.MODES)
def test_a_reply_says_how_the_two_pointers_met(tiny_engine, mode, stream):
    engine = make_cake(tiny_engine)

    def reply(**fields) -> dict:
        body = dict(messages=[dict(role="user", content=STORY)], max_tokens=6, stream=stream)
        got = ask(port, {**body, **fields})
        settled(engine)
        result = events(got)[-1]["result"] if stream else got.json
        assert result["tokens"] == tokens_of(tiny_engine, body) and result["link"] == "modelled link, 0.5 GB/s"
        return result
    with serving_cake(engine) as port:
        first, second = reply(), reply()
        forget(engine)
        third = reply(mode=mode)
        counts = counters(port)
    assert (first["source"], second["source"]) == ("miss", "gpu_hit") and second["restoration"] is None
    shown, loaded = third["restoration"], third["restoration"]["loaded"]
    assert set(shown) == set(first["restoration"]) == RESTORATION
    assert (first["restoration"]["absent"], first["restoration"]["computed"]) == (WHOLE, WHOLE)
    assert (shown["mode"], shown["tokens"], shown["chunks"], shown["absent"]) == (mode, 16 * WHOLE, WHOLE, 0)
    assert shown["computed"] + loaded == WHOLE and loaded == dict(compute=0, load=WHOLE).get(mode, loaded)
    assert third["source"] == ("storage" if loaded else "miss") and third["storage"].startswith("storage, ")
    cached = third["usage"]["cached_tokens"]
    assert shown["bytes"] == loaded * 16 * KV and 16 * (loaded - 1) < cached <= 16 * loaded if loaded else cached == 0
    assert shown["meeting"] == 16 * WHOLE - cached and shown["ms"] > 0 <= shown["start_ms"]
    assert 0 <= shown["storage_bubble"] <= 1 and 0 <= shown["compute_bubble"] <= 1
    lanes = {lane: [span["label"] for span in third["timeline"] if span["lane"] == lane] for lane in ("load", "storage")}
    assert lanes["load"] == lanes["storage"] == [f"chunk {number}" for number in range(WHOLE - loaded, WHOLE)]
    assert counts["restorations"] == 2 and counts["chunks_missed"] == WHOLE
    assert (counts["chunks_loaded"], counts["loaded_tokens"]) == (loaded, cached)
    assert counts["chunks_computed"] == 2 * WHOLE - loaded and counts["chunks_saved"] == WHOLE == counts["file_writes"]


@pytest.fixture(scope="module")
def cake_port(tiny_engine):
    with serving_cake(make_cake(tiny_engine, mode="both")) as port:
        yield port


ROUTES = [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
WRONG = {"save": ("true or false", ["yes", "true", 0, 1, 1.0, [], {}, [True]]),
         "mode": ("one of both, compute, load", ["", "Both", "loads", "both ", 0, True, [], ["both"], {}, "x" * 300]),
         "gpu_share": ("a number from 0.001 to 1", [0, -1, 1.001, 2, 1e-4, "0.5", "", True, False, [], [0.5], {}, 10 ** 400,
                                                    float("nan"), float("inf")])}


@pytest.mark.parametrize("route,body", ROUTES)
@pytest.mark.parametrize("field,value", [(field, value) for field, (_, values) in WRONG.items() for value in values],
                         ids=lambda value: repr(value)[:20])
def test_wrong_fields_of_chapter_06_are_refused_by_name(cake_port, route, body, field, value):
    for stream in (False, True):
        error = error_of(ask(cake_port, {**body, field: value, "stream": stream}, route), 400)
        assert error == dict(message=f"{field} must be {WRONG[field][0]}.", type="invalid_request_error")


@pytest.mark.parametrize("route,body", ROUTES)
@pytest.mark.parametrize("fields", [
    dict(save=True), dict(save=False), dict(save=None), dict(mode="both"), dict(mode="compute"), dict(mode="load"),
    dict(mode=None), dict(gpu_share=1), dict(gpu_share=1.0), dict(gpu_share=0.001), dict(gpu_share=0.3), dict(gpu_share=None),
    dict(save=False, mode="load", gpu_share=0.01, n=2)], ids=str)
def test_right_fields_of_chapter_06_change_no_answer(cake_port, tiny_engine, route, body, fields):
    plain, reply = (ask(cake_port, one, route) for one in (body, {**body, **fields}))
    assert plain.status_code == reply.status_code == 200, reply.data
    if route == "/generate":
        assert tokens_in(reply.json) == [tokens_of(tiny_engine, body)] * fields.get("n", 1)
    else:
        assert [{**choice, "index": 0} for choice in reply.json["choices"]] == plain.json["choices"] * fields.get("n", 1)


def test_fields_of_chapter_06_are_unknown_to_chapter_02_and_those_of_others_to_it(port, cake_port):
    for one, field, value in ((port, "mode", "both"), (port, "gpu_share", 1), (port, "save", True),
                              (cake_port, "offload_after", True), (cake_port, "plan", "auto")):
        assert f"Unknown field '{field}'" in error_of(ask(one, {**ASK, field: value}), 400)["message"]


@pytest.mark.parametrize("route,body", ROUTES)
@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": "Hello", "mode": }', b'"mode"',
                                    b'{"prompt": "Hello", "gpu_share": 0.5', b"[" * 100000], ids=lambda broken: repr(broken)[:30])
def test_broken_json_is_refused_by_chapter_06(cake_port, route, body, broken):
    assert error_of(ask(cake_port, broken, route), 400)["type"] == "invalid_request_error"
    assert ask(cake_port, body, route).status_code == 200


def test_gpu_share_bounds_what_a_step_computes_of_a_prompt(tiny_engine):
    engine, prefills = make_cake(tiny_engine, token_budget=40), []
    forward = engine.forward

    def watched(batch):
        prefills.append(len(batch.tokens))
        return forward(batch)
    engine.forward = watched
    body = dict(prompt=STORY, max_tokens=2, mode="compute", save=False)
    expected, prompt = tiny_engine.generate(STORY, max_tokens=2).tokens, len(tiny_engine.encode(STORY, None)[0])
    with serving_cake(engine) as port:
        for number, (share, most) in enumerate(((1, 40), (0.5, 20), (0.25, 10), (0.001, 1))):
            prefills.clear()
            reply = ask(port, dict(body, gpu_share=share, cache_salt=str(number))).json
            assert reply["tokens"] == expected
            assert max(prefills) == most and sum(prefills) == prompt + len(expected) - 1


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_save_says_whether_chunks_are_kept(tiny_engine, route):
    engine, texts, kept = make_cake(tiny_engine), [], []
    question = dict(messages=[dict(role="user", content=STORY)]) if "chat" in route else dict(prompt=STORY)
    with serving_cake(engine) as port:
        for number, asked in enumerate((dict(save=False), dict(save=True), dict(), dict(save=None), dict(save=False, n=2))):
            before = counters(port)
            reply = ask(port, dict(question, max_tokens=6, temperature=0, cache_salt=str(number), **asked), route)
            assert reply.status_code == 200
            answers = reply.json.get("choices") or reply.json.get("results") or [reply.json]
            texts.append([answer["message"]["content"] if "chat" in route else answer["text"] for answer in answers])
            settled(engine)
            after = counters(port)
            kept.append(after["chunks_saved"] - before["chunks_saved"])
            assert after["file_writes"] - before["file_writes"] == kept[-1]
    assert kept == [0, WHOLE, WHOLE, WHOLE, 0] and texts == [texts[0]] * 4 + [texts[0] * 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openais_routes_say_the_same_after_both_pointers_met(tiny_engine, route, stream):
    body = dict(messages=[dict(role="user", content=STORY)]) if "chat" in route else dict(prompt=STORY)
    body |= dict(max_tokens=9, temperature=0)
    engine, content = make_cake(tiny_engine), lambda choice: choice["message"]["content"] if "chat" in route else choice["text"]
    with serving_cake(engine) as port:
        first = ask(port, body, route).json
        forget(engine)
        if stream:
            *chunks, last, done = events(ask(port, dict(body, stream=True, stream_options=dict(include_usage=True)), route))
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            said = "".join(choice["delta"].get("content", "") if "chat" in route else choice["text"] for choice in choices)
            usage = last["usage"]
            assert done == "[DONE]" and choices[-1]["finish_reason"] == first["choices"][0]["finish_reason"]
        else:
            again = ask(port, body, route).json
            said, usage = content(again["choices"][0]), again["usage"]
            assert again["choices"] == first["choices"] and set(again) == set(first)
    whole = (first["usage"]["prompt_tokens"] - 1) // 16
    assert said == content(first["choices"][0]) and first["usage"]["prompt_tokens_details"] == dict(cached_tokens=0)
    assert usage["prompt_tokens_details"] == dict(cached_tokens=16 * whole)
    assert usage["total_tokens"] == first["usage"]["total_tokens"]
    assert engine.counts["restorations"] == 2 and engine.counts["chunks_loaded"] == whole


@pytest.mark.parametrize("options,bits", [(dict(), 32), (dict(kv_bits=8), 8), (dict(directories="ab"), 32)], ids=str)
def test_health_of_chapter_06_shows_all_counters(tiny_engine, tmp_path, options, bits):
    if "directories" in options:
        options = dict(directories=(tmp_path / "a", tmp_path / "b"))
    engine = make_cake(tiny_engine, **options)
    zero = set("restorations chunks_computed chunks_loaded chunks_missed loaded_tokens chunks_saved chunks_dropped "
               "transfer_errors storage_stalls file_reads file_read_bytes file_writes file_write_bytes file_evictions "
               "file_errors file_bytes load_errors readers readers_retired chunks_leaving requests steps".split())
    with serving_cake(engine) as port:
        before = counters(port)
        assert all(before[name] == 0 for name in zero) and before["storage"] == "storage, nothing read yet"
        assert before["link"] == "modelled link, 0.5 GB/s"
        assert before["read_buffers"] == before["read_buffers_free"] > 0
        assert before["write_buffers"] == before["write_buffers_free"] > 0
        for _ in range(2):
            assert ask(port, dict(prompt=STORY, max_tokens=2)).status_code == 200
            forget(engine)
        after = counters(port)
    assert set(after) == set(before) and after["chunks_saved"] == after["file_writes"] == WHOLE == after["chunks_loaded"]
    assert after["loaded_tokens"] == 16 * WHOLE and after["storage"].startswith("storage, ") and "GB/s" in after["storage"]
    assert after["file_bytes"] == after["file_write_bytes"] == WHOLE * (4096 + engine.loader.chunk_bytes)
    per_token = KV if bits == 32 else KV // 4 + KV // 4 // 16 * 2                   # a float16 for each head of 16 numbers
    assert engine.loader.chunk_bytes == 16 * per_token and after["file_read_bytes"] == WHOLE * 16 * per_token
    assert after["readers"] == len(engine.files.directories)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["load", "both"])
def test_a_client_that_hangs_up_while_both_pointers_move_frees_everything(tiny_engine, stream, mode):
    """Storage, which is slow, has not brought a chunk when he leaves; somebody else goes on to decode meanwhile."""
    engine, released = make_cake(tiny_engine, frozenset(), mode=mode), threading.Event()
    read_one, reading = engine.files.read_one, threading.Event()
    other = dict(prompt="Meanwhile", max_tokens=60, save=False)

    def slow(*arguments):
        reading.set()
        eventually(released.is_set)
        return read_one(*arguments)
    with serving_cake(engine) as port, ThreadPoolExecutor() as pool:
        assert ask(port, dict(prompt=STORY, max_tokens=2)).status_code == 200
        forget(engine)
        engine.files.read_one, opened = slow, threading.Event()
        before_each_pass(engine, lambda number: eventually(opened.is_set if number == 1 else lambda: engine.cancelled)
                         if number in (1, 2) else None)
        goes_on = pool.submit(ask, port, other)
        eventually(lambda: engine.counters()["running"] == 1)
        with closing(sent(port, dict(prompt=STORY, max_tokens=100, stream=stream, gpu_share=0.001))):
            eventually(lambda: engine.counters()["requests"] == 3)
            opened.set()
            assert reading.wait(TIMEOUT)
            assert engine.restorations and engine.counts["restorations"] == 2
        assert goes_on.result().json["tokens"] == tiny_engine_without_end(tiny_engine, other)
        eventually(lambda: engine.counters()["cancelled"] == 1)
        assert engine.counters()["running"] == 0
        released.set()
        settled(engine)
        counts = counters(port)
        assert (counts["cancelled"], counts["finished"], counts["blocks_referenced"]) == (1, 2, 0)
        assert counts["chunks_loaded"] == 0
        engine.files.read_one = read_one
        again = ask(port, dict(prompt=STORY, max_tokens=4, mode="load")).json
        assert again["source"] == "storage" and again["tokens"] == tiny_engine_without_end(
            tiny_engine, dict(prompt=STORY, max_tokens=4))


def tiny_engine_without_end(tiny_engine, body: dict) -> list[int]:
    """What chapter 01 answers if no token ends an answer."""
    return another(tiny_engine, end_tokens=frozenset()).generate(body["prompt"], max_tokens=body["max_tokens"]).tokens


@pytest.mark.parametrize("mode", cake.MODES)
@pytest.mark.parametrize("same", [True, False], ids=["the same prompt", "other prompts"])
def test_two_clients_at_once_get_the_tokens_of_chapter_01(tiny_engine, mode, same):
    engine = make_cake(tiny_engine, frozenset(), mode=mode)
    prompts = [STORY, STORY if same else "2: " + STORY[:180]]
    asked = [dict(prompt=prompt, max_tokens=12, stream=number == 1) for number, prompt in enumerate(prompts)]
    expected = [tiny_engine_without_end(tiny_engine, body) for body in asked]
    with serving_cake(engine) as port, ThreadPoolExecutor() as pool:
        for prompt in prompts:
            assert ask(port, dict(prompt=prompt, max_tokens=2)).status_code == 200
        forget(engine)
        hold(engine, until=lambda: engine.counters()["requests"] == 4)
        first, second = pool.map(lambda body: ask(port, body), asked)
        results = [first.json, events(second)[-1]["result"]]
        settled(engine)
        counts = counters(port)
    assert [result["tokens"] for result in results] == expected
    assert counts["failed"] == counts["transfer_errors"] == 0 and counts["finished"] == 4
    if mode == "load":
        assert {result["source"] for result in results} <= {"storage", "gpu_hit", "mixed"}
    elif mode == "compute":
        assert {result["source"] for result in results} <= {"miss", "gpu_hit"} and counts["chunks_loaded"] == 0


@pytest.mark.parametrize("options", [dict(), dict(mode="both"), dict(kv_bits=8, mode="compute"), dict(blocks=150, cpu_chunks=6),
                                     dict(mode="both", token_budget=40), dict(mode="both", gpu_share=0.1)], ids=str)
def test_16_clients_at_once_from_both_ends_get_the_tokens_of_chapter_01(tiny_engine, options):
    engine = make_cake(tiny_engine, frozenset(), max_running=8, **options)
    beginnings = [f"{number}: {STORY}"[:150] for number in range(4)]
    asked = [dict(prompt=beginnings[number % 4] + "and so on, " * (number % 3), max_tokens=4 + number, stream=number % 2 == 1,
                  save=number % 5 > 0) for number in range(16)]
    with serving_cake(engine) as port, ThreadPoolExecutor(16) as pool:
        for beginning in beginnings:
            assert ask(port, dict(prompt=beginning, max_tokens=2)).status_code == 200
        forget(engine)
        hold(engine, until=lambda: engine.counters()["requests"] == 4 + 16)
        replies = list(pool.map(lambda body: ask(port, body), asked))
        results = [events(reply)[-1]["result"] if body["stream"] else reply.json for body, reply in zip(asked, replies)]
        settled(engine)
        counts = counters(port)
    for body, result in zip(asked, results):
        assert result["tokens"] == tiny_engine_without_end(tiny_engine, body)
    assert counts["finished"] == 20 and counts["failed"] == counts["transfer_errors"] == counts["load_errors"] == 0
    assert counts["restorations"] >= 8 and (counts["chunks_loaded"] > 0 or "mode" in options)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(bodies(), st.fixed_dictionaries({}, optional=dict(
    save=st.booleans(), mode=st.sampled_from(cake.MODES), gpu_share=st.floats(0.001, 1)))), min_size=1, max_size=3))
def test_nothing_that_is_asked_of_chapter_06_is_a_500(cake_port, asked):
    asked = [(valid, {**body, **fields}) for (valid, body), fields in asked]
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda one: ask(cake_port, one[1]), asked))
    for (valid, body), reply in zip(asked, replies):
        if reply.mimetype == "text/event-stream":
            assert all("result" in event for event in events(reply) if "text" not in event)
        elif reply.status_code != 200:
            message = error_of(reply, 400)["message"]
            assert not valid or any(word in message for word in ("context", "not be empty"))
    assert counters(cake_port)["failed"] == 0


def test_who_asks_a_server_of_chapter_06_that_was_started_again_finds_the_files_of_the_first(tiny_engine, tmp_path):
    body = dict(prompt=STORY + "And then?", max_tokens=6)
    with serving_cake(make_cake(tiny_engine, directories=(tmp_path,))) as port:
        assert ask(port, dict(prompt=STORY, max_tokens=6)).json["source"] == "miss"
    with serving_cake(make_cake(tiny_engine, directories=(tmp_path,))) as port:
        reply = ask(port, body)

    def refuse(constant):
        raise AssertionError(f"{constant} in a reply, which a browser does not read")
    result = json.loads(reply.data, parse_constant=refuse)
    assert (result["source"], result["usage"]["cached_tokens"]) == ("storage", 16 * WHOLE)
    assert result["tokens"] == tokens_of(tiny_engine, body)
