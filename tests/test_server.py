"""The server of all chapters, with a stub engine and a real socket: answers, errors, hang-ups, and closing."""
import http.client
import importlib
import json
import logging
import math
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest

from common.requests import Request
from shell import backends, guards, page, to_json
from shell import server as servers
from shell.workers import Worker
from tests.conftest import ROOT
from tests.support.serving import ASK, CHAT, INFO, TIMEOUT, Client, eventually, sentence, serving
from tests.support.stub import Engine

TEXT = dict(prompt="Hello", max_tokens=8, temperature=0)
ROUTES = [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


@pytest.fixture(scope="module")
def client(frontend):
    """The Client of a server that tests share. Tests must leave it as it was."""
    with serving(frontend) as client:
        yield client


def waiting(client, threads, *asked) -> list:
    """Send requests while the engine is held, and wait until all are queued.

    Returns: futures of the replies, which come after `let()`."""
    client.engine.hold()
    before = client.engine.counters()["requests"]
    replies = [threads.submit(client.ask, *each) for each in asked]
    eventually(lambda: client.engine.counters()["requests"] == before + len(asked))
    return replies


# 1. Valid requests -----------------------------------------------------------------------------------------

def test_generate_answers_with_the_engines_result(client, frontend):
    answer = client.ask("/generate", ASK).json
    prompt = frontend.request("Hello").tokens
    said = [token for token in prompt if token not in frontend.end_tokens]
    assert answer["tokens"] == (said * 8)[:8] and answer["finish_reason"] == "length"
    assert answer["text"] == frontend.tokenizer.decode(answer["tokens"], skip_special_tokens=True)
    assert answer["usage"] == dict(prompt_tokens=len(prompt), cached_tokens=0, completion_tokens=8)
    assert answer["source"] == "miss" and answer["found"] == {}
    assert answer["decisions"] == ["nothing was offered: the prompt is computed"]
    assert answer["ttft_ms"] > 0 and answer["timeline"][0]["label"].startswith("prefill")
    assert set(answer) == {"id", "text", "tokens", "finish_reason", "usage", "source", "found", "decisions",
                           "ttft_ms", "tbt_ms", "timeline"}


@pytest.mark.parametrize("body", [
    ASK, dict(ASK, stop=["lo"]), dict(ASK, max_tokens=1, temperature=None), dict(CHAT, cache_salt="Anna")])
def test_a_stream_says_what_the_plain_answer_says(client, body):
    plain = client.ask("/generate", body).json
    *pieces, last = client.ask("/generate", dict(body, stream=True)).events
    assert all(set(piece) == {"text"} and piece["text"] for piece in pieces) and set(last) == {"result"}
    assert "".join(piece["text"] for piece in pieces) == last["result"]["text"] == plain["text"]
    for name in ("tokens", "finish_reason", "usage", "source"):
        assert last["result"][name] == plain[name]


def test_many_clients_get_answers_of_their_own_and_health_says_what_runs_and_counts(frontend):
    text = (ROOT / "docs" / "reference.md").read_text().partition("**Counters**")[2].partition("\n\n")[0]
    named = {name for name in re.findall(r"`([a-z_]+)`", text) if name not in ("host", "write_back", "steps")}
    with serving(frontend) as client, ThreadPoolExecutor(16) as threads:
        assert len(named) > 20 and {client.counters()[name] for name in named} == {0}, "every documented counter exists from the start"
        bodies = [dict(prompt=f"Number {number}", max_tokens=30, stream=bool(number % 2))
                  for number in range(16)]
        for body, reply in zip(bodies, threads.map(lambda body: client.ask("/generate", body), bodies)):
            answer = reply.events[-1]["result"] if body["stream"] else reply.json
            assert body["prompt"] in answer["text"] and len(answer["tokens"]) == 30
        client.ask("/generate", dict(prompt=""))
        health = client.ask("/health").json
        assert health == dict(status="ok", **INFO, counters=health["counters"])
        assert health["counters"]["requests"] == health["counters"]["finished"] == 16


# 2. Invalid requests ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("body,word", [
    (b"", "JSON"), (b"\xff\xfe{}", "UTF-8"), (b"[]", "object"), (b'{"temperature": NaN}', "temperature"),
    (b'{"\\ud800": 1}', "surrogate"), (b'{"n": 2}', "n"), (b'{"stream": 0}', "stream must be"),
    (b'{"temprature": 1, "stream": true}', "Unknown field 'temprature'"),
    (b"[" * 100_000, "JSON"), (b'{"n": ["\\ud83d"]}', "surrogate"), (b'{"n": 1' + b"0" * 5000 + b"}", "JSON"),
], ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize("route", [route for route, _ in ROUTES])
def test_a_body_that_is_no_request_is_refused(client, route, body, word):
    assert word in client.ask(route, body).error(400)


@pytest.mark.parametrize("method,path,status", [
    ("GET", "/nothing", 404), ("POST", "/", 405), ("GET", "/generate", 405), ("DELETE", "/health", 405),
    ("GET", "/timelines/99", 404), ("GET", "/storage", 404), ("POST", "/v1/embeddings", 404)])
def test_wrong_routes_and_methods_are_told(client, method, path, status):
    reply = client.ask(path, method=method)
    assert "GET /" in reply.error(status)
    allowed = {"/": "GET", "/generate": "POST", "/health": "GET"}.get(path)
    assert (allowed in reply.headers["Allow"]) if status == 405 else "Allow" not in reply.headers


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [guards.MAX_BODY, guards.MAX_BODY + 1, guards.MAX_BODY + 2, 20 << 20])
def test_a_body_that_is_too_large_gets_its_answer(client, size, chunked):
    headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(size)}
    with closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=TIMEOUT)) as connection:
        connection.request("POST", "/generate", iter([b"x" * size]), headers, encode_chunked=chunked)
        response = connection.getresponse()
        status, words = (413, f"larger than {guards.MAX_BODY}") if size > guards.MAX_BODY else (400, "not JSON")
        assert response.status == status and words in sentence(json.loads(response.read())["error"])
    assert client.ask("/generate", ASK).status == 200


def sent(client, raw: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=TIMEOUT)
    connection.sendall(raw)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(client, stream):
    body = json.dumps(dict(ASK, stream=stream))
    with sent(client, f"POST /generate HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()) as connection:
        head, _, said = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and b"chunked" not in head
    assert said.startswith(b"data: {" if stream else b"{")


def test_a_client_that_stops_sending_loses_its_connection_and_cuts_no_stream(frontend, monkeypatch):
    monkeypatch.setattr(servers.Handler, "timeout", 1.0)  # the stream's request must arrive within it
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        stream, = waiting(client, threads, ("/generate", dict(ASK, stream=True)))     # as during a long step
        with sent(client, b"POST /generate HTTP/1.1\r\n") as half, suppress(ConnectionError):
            assert half.recv(1) == b""
        client.engine.let()
        assert "result" in stream.result().events[-1]


# 3. A full queue, hang-ups, defects, closing ----------------------------------------------------------------

def test_one_prompt_is_encoded_at_a_time_and_too_many_are_refused(frontend, monkeypatch):
    inside, most, encode = [], [], frontend.encode

    def slow(*prompt):
        inside.append(prompt)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return encode(*prompt)
    monkeypatch.setattr(frontend, "encode", slow)
    with serving(frontend, most=2) as client, ThreadPoolExecutor() as threads:
        client.engine.hold()
        asked = ("/generate", ASK), ("/v1/completions", TEXT), ("/generate", dict(ASK, stream=True))
        replies = [threads.submit(client.ask, *each) for each in asked]
        eventually(lambda: any(reply.done() for reply in replies))
        refused, = (reply.result() for reply in replies if reply.done())
        assert "2 requests wait or run already; try again later" in refused.error(429)
        client.engine.let()
        assert sorted(reply.result().status for reply in replies) == [200, 200, 429] and set(most) == {1}
        assert client.ask("/generate", ASK).status == 200


@pytest.mark.parametrize("route,body,stream,behind", [
    ("/generate", ASK, False, b""), ("/generate", ASK, True, b""), ("/v1/chat/completions", CHAT, True, b"\r\n"),
    ("/generate", ASK, False, b"\r\n"), ("/v1/completions", TEXT, False, b"GET /health HTTP/1.1\r\n\r\n")])
def test_a_client_that_hangs_up_before_or_in_its_answer_is_cancelled(frontend, caplog, route, body, stream, behind):
    with serving(frontend) as client:
        client.engine.hold_after(3 * stream)
        with closing(client.send(route, dict(body, max_tokens=200, stream=stream))) as connection:
            eventually(lambda: client.engine.held)
            connection.sock.sendall(behind)
            assert not stream or connection.getresponse().readline().startswith(b"data: {"), "the client hangs up in the middle of a stream"
        eventually(lambda: client.engine.arrivals)             # the hang-up is noticed even while there are no tokens
        client.engine.let()
        eventually(lambda: client.engine.counters()["cancelled"] == 1)
        assert not client.engine.running and client.engine.counters()["finished"] == 0
        assert client.ask("/generate", ASK).status == 200 and not caplog.records


def test_a_client_that_hangs_up_while_tokens_come_fast_is_cancelled(frontend):
    with serving(frontend, Engine(pause=0.005)) as client:
        with closing(client.send("/generate", dict(ASK, max_tokens=200))):
            eventually(lambda: client.engine.running)
        eventually(lambda: client.engine.counters()["cancelled"] == 1)
        assert client.engine.counters()["finished"] == 0


def test_a_client_that_leaves_before_its_request_is_submitted_costs_no_step(frontend, monkeypatch):
    encode, begun, left = frontend.encode, threading.Event(), threading.Event()
    monkeypatch.setattr(frontend, "encode", lambda *prompt: begun.set() or left.wait(TIMEOUT) and encode(*prompt))
    with serving(frontend) as client:
        with closing(client.send("/generate", ASK)):
            assert begun.wait(TIMEOUT)
        left.set()
        assert client.ask("/generate", ASK).status == 200 and client.counters()["requests"] == 1


@pytest.mark.parametrize("route,body", ROUTES)
def test_a_queued_stream_sends_its_headers_and_then_comments(frontend, route, body):
    with serving(frontend) as client:
        client.engine.hold()
        with closing(client.send(route, dict(body, stream=True))) as connection:
            reply = connection.getresponse()
            eventually(lambda: reply.readline() == b": waiting\n")
            client.engine.let()
            assert reply.headers.get_content_type() == "text/event-stream" and b"data: " in reply.read()


def test_a_server_without_its_model_yet_says_when_to_ask_again():
    listener = servers.listen("127.0.0.1", 0)
    for asked in (("/health",), ("/generate", ASK), ("/",)):
        reply = Client(listener.port).ask(*asked)
        assert "loading its model" in reply.error(503, "server_error") and int(reply.headers["Retry-After"]) > 0
    listener.shutdown()


def test_an_exception_inside_is_a_500_and_the_next_request_works(frontend, caplog):
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        replies = waiting(client, threads, ("/generate", ASK), ("/generate", dict(ASK, stream=True)))
        client.engine.hold_after(3)
        eventually(lambda: len(client.engine.running) == 2)
        client.engine.error = RuntimeError("a secret of the inside")
        with caplog.at_level(logging.ERROR):
            client.engine.let()
            plain, stream = (reply.result() for reply in replies)
        words = plain.error(500, "server_error")
        assert "secret" not in words and "log" in words
        assert sentence(stream.events[-1]["error"], "server_error") == words
        assert "a secret of the inside" in caplog.text
        assert client.ask("/generate", ASK).status == 200
        assert client.counters()["failed"] == 2


def test_a_request_that_the_engine_has_lost_is_answered_and_the_engine_goes_on(frontend):
    class Careless(Engine):
        """Loses a request and then fails, as with a Cache whose `finished` raises."""

        def finish(self, request, error=None):
            if request in self.running:
                self.running.remove(request)
            raise RuntimeError("half done")

    with serving(frontend, Careless()) as client:
        for _ in range(2):
            assert "log" in client.ask("/generate", ASK).error(500, "server_error")


HERE = "127.0.0.1"


@pytest.mark.parametrize("bound,host,asking,changes,reads", [  # status codes of /evict, and of other routes
    (HERE, "LocalHost", {}, 200, 200), (HERE, "127.9.0.1:80", {}, 200, 200), ("::1", "[::1]:5000", dict(REMOTE_ADDR="::1"), 200, 200),
    (HERE, "elsewhere.example:5000", {}, 403, 403), ("::1", "192.0.2.7", {}, 403, 403), (HERE, "", {}, 403, 403),
    (HERE, "localhost.example", {}, 403, 403), ("0.0.0.0", "[::1]:5000", dict(REMOTE_ADDR="::1"), 200, 200),
    ("0.0.0.0", "elsewhere.example", {}, 403, 200),  # another site's name that resolves to this machine
    ("0.0.0.0", "localhost", dict(REMOTE_ADDR="192.0.2.7"), 403, 200),
    (HERE, "localhost", dict(HTTP_ORIGIN="http://localhost"), 200, 200),
    (HERE, "localhost", dict(HTTP_ORIGIN="http://elsewhere.example"), 403, 403),
    (HERE, "localhost", dict(HTTP_ORIGIN="null"), 403, 403), (HERE, "localhost", dict(HTTP_ORIGIN="http://["), 403, 403)])
def test_who_may_ask_and_who_may_change_something(client, bound, host, asking, changes, reads):
    where = dict(REMOTE_ADDR=HERE, SERVER_NAME=bound) | asking
    options = dict(headers=dict(Host=host), environ_overrides=where)
    app = servers.make_app(client.server).test_client()
    replies = {route: app.get(route, **options) for route in ("/", "/state", "/nothing")}
    expected = {"/": reads, "/state": reads, "/nothing": 404 if reads == 200 else reads, "/evict": changes}
    replies["/evict"] = app.post("/evict", json=dict(tier="host"), **options)
    assert {route: reply.status_code for route, reply in replies.items()} == expected
    assert all(reply.headers["X-Frame-Options"] == "DENY" for reply in replies.values())
    words = "Pages of other sites" if "HTTP_ORIGIN" in asking else "from this machine only" if reads == 200 else "--host"
    assert changes == 200 or words in sentence(replies["/evict"].json["error"])


def test_whoever_waits_is_told_while_a_step_goes_on(frontend):
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        client.engine.hold_after(2)
        stream = threads.submit(client.ask, "/generate", dict(ASK, stream=True))
        eventually(lambda: client.engine.held)
        replies = [threads.submit(client.ask, *asked) for asked in (("/generate", ASK), ("/evict", dict(tier="host")))]
        eventually(lambda: client.engine.counters()["requests"] == 2 and client.server.jobs.qsize())
        client.server.close()
        assert "shutting down" in sentence(stream.result(TIMEOUT).events[-1]["error"], "server_error")
        for late in CHAT, dict(CHAT, stream=True):
            replies.append(threads.submit(client.ask, "/v1/chat/completions", late))
        assert all("shutting down" in reply.result(TIMEOUT).error(503, "server_error") for reply in replies)


def test_an_idle_server_takes_no_steps_and_still_runs_what_comes_between_them(client):
    client.ask("/generate", ASK)
    eventually(lambda: client.engine.asleep)
    before = client.engine.counts["steps"]
    for _ in range(3):
        client.ask("/state")
        client.ask("/health")
    assert client.engine.counts["steps"] == before and client.engine.asleep
    assert client.server.between_steps(threading.current_thread) is client.thread
    with pytest.raises(KeyError):
        client.server.between_steps(lambda: {}["nothing"])


# 4. Routes of the page --------------------------------------------------------------------------------------

def test_state_shows_who_waits_and_runs_what_the_pools_hold_and_what_was_found(frontend):
    with serving(frontend, Engine(max_running=1, blocks=40)) as client:
        client.ask("/generate", dict(ASK, max_tokens=20))
        client.engine.hold_after(3)
        with closing(client.send("/generate", dict(ASK, max_tokens=60))):
            eventually(lambda: client.engine.held)
            with closing(client.send("/generate", ASK)):
                eventually(lambda: len(client.ask("/state").json["requests"]) == 2)
                state = client.ask("/state").json
    assert state["info"]["chapter"] == "stub" and state["info"]["context"] == frontend.context
    running, waiting = state["requests"]
    prompt = len(frontend.request("Hello").tokens)
    assert (running["id"], running["state"], running["computed"]) == (2, "decode", prompt)
    assert (waiting["id"], waiting["state"], waiting["new_tokens"]) == (3, "waiting", 0)
    device, host = state["pools"]["device"], state["pools"]["host"]
    blocks = -(-(prompt + 60) // 16)
    assert device["states"] == "u" * 1 + "r" * (blocks - 1) + "." * (40 - blocks)
    assert device["blocks"] == 40 and device["block_bytes"] == 1024 and host["states"] == "." * 40
    finished, = state["finished"]
    assert finished["id"] == 1 and finished["decisions"] == ["nothing was offered: the prompt is computed"]
    assert finished["found"] == {} and finished["version"] == 20 == finished["usage"]["completion_tokens"]
    assert state["counters"]["requests"] == 3


def test_a_conversation_goes_on_with_its_last_prompt_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(page, "MAX_CONVERSATIONS", 2)
    prompts = [1, 2, 3], [1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 5], [6]
    asked, numbers, last = [Request(prompt, 1) for prompt in prompts], {}, {}
    page.owners(asked, numbers, last)
    assert [*numbers.values()] == [1, 1, 2, 1, 3, 4] and set(last) == {3, 4}


def test_a_letter_says_what_becomes_of_a_block():
    pool = Engine(blocks=8).pools["device"]
    pool.references = [0, 0, 1, 2, 1, 1, 1, 1]
    pool.key_of = [None, "a", "b", "c", None, None, None, "d"]
    assert page.block_states(pool, [([3, 2, 4], 20), ([3, 5], 10)]) == ".-usrrff"
    assert page.block_states(pool, []) == ".-ffffff"


def test_a_timeline_is_that_of_the_answer_with_its_plan_and_what_is_not_measured_yet_is_null_in_json(frontend):
    measured = importlib.import_module("05_bubble_free").LayerCosts(math.inf, 0.5, 0.25, math.inf)
    plan = importlib.import_module("05_bubble_free").describe_plan("RK", measured, 9)
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        replies = waiting(client, threads, *[("/generate", dict(ASK, stream=stream)) for stream in (False, True)])
        for request in client.engine.asked:
            request.found["gpu"], request.timeline.plan = math.nan, plan
        client.engine.let()
        plain, stream = replies[0].result().json, replies[1].result().events[-1]["result"]
        assert plain["usage"]["cached_tokens"] is stream["found"]["gpu"] is None
        costs = dict(recompute=None, project=500, load_states=250, load_kv=None, question=0)
        shown = dict(spans=plain["timeline"], plan=dict(plan, predicted_ms=None, costs_ms=costs))
        assert client.ask(f"/timelines/{plain['id']}").json == shown
        assert client.ask("/state").json["finished"][0]["found"] == dict(gpu=None)
    assert json.loads(to_json([math.nan, -math.inf, {"a": 1.5}], indent=1)) == [None, None, {"a": 1.5}]


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(client):
    reply = client.ask("/")
    page = reply.raw.decode()
    assert reply.kind == "text/html" and "<title>" in page
    assert not re.search(r"https?://| src=|innerHTML|@import|url\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_evicting_drops_what_is_cached(client):
    client.ask("/generate", ASK)
    cached = len(client.engine.pools["device"].cached)
    assert client.ask("/evict", dict(tier="device")).json == dict(evicted=cached) and cached > 0
    assert client.ask("/evict", dict(tier="device")).json == dict(evicted=0)
    for body, words in ((dict(tier="moon"), "one of device, host"), ({}, "needs tier"),
                        (dict(tier=[]), "tier")):
        assert words in client.ask("/evict", body).error(400)


def test_storage_is_shown_attached_and_detached_from_this_machine_only(client, frontend, tmp_path):
    assert "no storage" in client.ask("/storage").error(404)
    engine = Engine()
    cache = SimpleNamespace(tree=None, storage=None, open_storage=backends.open_storage)
    cache.attach_storage = lambda kept: kept and kept.open(Worker, {}) or setattr(cache, "storage", kept)
    engine.lower_tier = SimpleNamespace(cache=cache)
    with serving(frontend, engine) as client:
        put, url = partial(client.ask, "/storage", method="PUT"), f"file:{tmp_path}"
        assert client.ask("/storage").json["storage"] is None
        assert put(dict(url=url, config=dict(limit_gb=1))).json["storage"] == url == str(cache.storage)
        for fields, words in ((dict(url="json:JSONDecoder"), "--storage at the start"), ({}, "needs url"), (dict(url=url, config=[1]), "an object"),
                              (dict(url="redis://me:sesame@127.0.0.1:1"), "Cannot"), (dict(url="file:"), "no folder"), (dict(url=url, config=dict(limit="sesame")), "no setting 'limit'"),
                              (dict(url=url, config=dict(limit_gb=0)), "limit_gb"), (dict(url=url, config=dict(limit_gb=math.nan)), "limit_gb")):
            assert words in (said := put(fields).error(400)) and "sesame" not in said
        assert {"silent", "behind", "gbps"} < set(client.ask("/storage").json) and cache.storage is not None
        assert client.ask("/storage", method="DELETE").json["storage"] is cache.storage is None
        asking = servers.make_app(client.server).test_client()
        assert asking.get("/storage", environ_base=dict(REMOTE_ADDR="192.0.2.7")).status_code == 403
