"""The server of all chapters, mostly with a stub engine, and a real socket: answers, errors, hang-ups, closing, and load."""
import importlib
import io
import json
import logging
import math
import os
import random
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest

from common.requests import Request
from shell import backends, charts, guards, openai, page, to_json
from shell import server as servers
from shell.frontend import Frontend
from shell.random_models import byte_tokenizer
from shell.workers import Worker
from tests.conftest import ROOT
from tests.support.engines import ORACLE, check_pools, draw, make, tiny_model
from tests.support.faults import faulty
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
    before = charts.counters(client.engine)["requests"]
    replies = [threads.submit(client.ask, *each) for each in asked]
    eventually(lambda: charts.counters(client.engine)["requests"] == before + len(asked))
    return replies


# 1. Valid requests -----------------------------------------------------------------------------------------

def test_generate_returns_the_engines_result(client, frontend):
    answer = client.ask("/generate", ASK).json
    prompt = frontend.request("Hello").tokens
    said = [token for token in prompt if token not in frontend.end_tokens]
    assert answer["tokens"] == (said * 8)[:8] and answer["finish_reason"] == "length"
    assert answer["text"] == frontend.tokenizer.backend_tokenizer.decode(answer["tokens"], skip_special_tokens=True)
    assert answer["usage"] == dict(prompt_tokens=len(prompt), cached_tokens=0, completion_tokens=8)
    assert answer["source"] == "miss" and answer["found"] == {}
    assert answer["decisions"] == ["nothing was offered: the prompt is computed"]
    assert answer["ttft_ms"] > 0 and answer["timeline"][0]["label"].startswith("prefill")
    assert set(answer) == {"id", "text", "tokens", "finish_reason", "usage", "source", "found", "decisions",
                           "ttft_ms", "tbt_ms", "timeline"}


@pytest.mark.parametrize("body", [
    ASK, dict(ASK, stop=["lo"]), dict(ASK, max_tokens=1, temperature=None), dict(CHAT, cache_salt="Anna")])
def test_a_stream_equals_the_plain_answer(client, body):
    plain = client.ask("/generate", body).json
    *pieces, last = client.ask("/generate", dict(body, stream=True)).events
    assert all(set(piece) == {"text"} and piece["text"] for piece in pieces) and set(last) == {"result"}
    assert "".join(piece["text"] for piece in pieces) == last["result"]["text"] == plain["text"]
    for name in ("tokens", "finish_reason", "usage", "source"):
        assert last["result"][name] == plain[name]


def test_sixteen_clients_get_their_own_answers_and_health_counts_them(frontend):
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


# 2. Refused requests ----------------------------------------------------------------------------------------

GENERATE, CHATS, TEXTS = "POST /generate", "POST /v1/chat/completions", "POST /v1/completions"
HUGE, NAN = 10**400, float("nan")
user = partial(dict, role="user")


def each(name: str, *values) -> list[dict]:
    """Return a body for each value of one field."""
    return [{**ASK, name: value} for value in values]


def said(*messages) -> list[dict]:
    """Return a body for each message."""
    return [dict(messages=[message]) for message in messages]


REFUSED = [  # (route, status, words of the error, bodies); a body in bytes is sent as it is
    (GENERATE, 400, "not JSON in UTF-8", [
        b"", b"\xff\xfe{}", b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}", b'{"\\ud800": 1}', b'{"n": ["\\ud83d"]}',
        b"x" * guards.MAX_BODY]),
    (GENERATE, 413, f"larger than {guards.MAX_BODY} bytes", [b"x" * (guards.MAX_BODY + 1), b"x" * (20 << 20)]),
    (GENERATE, 400, "must be a JSON object", [b"[]", b"5", *said("Hello", None)]),
    (CHATS, 400, "not JSON", [b"{"]), (TEXTS, 400, "not JSON", [b"{"]), ("POST /evict", 400, "not JSON", [b"{"]),
    ("GET /nothing", 404, "GET /", [None]), ("GET /timelines/99", 404, "GET /state", [None]),
    ("GET /storage", 404, "GET /", [None]), ("POST /v1/embeddings", 404, "GET /", [None]),
    ("POST /", 405, "GET /", [None]), ("GET /generate", 405, "GET /", [None]), ("DELETE /health", 405, "GET /", [None]),
    ("POST /evict", 400, "one of device, host", [dict(tier="moon"), dict(tier=[1])]), ("POST /evict", 400, "needs tier", [{}]),
    # Sampling
    (GENERATE, 400, "Unknown field 'temprature'", [dict(temprature=1, stream=True)]),
    (GENERATE, 400, "Unknown field 'functions'", each("functions", False, 0, "", [None])),
    (GENERATE, 400, "stream must be", each("stream", 0, "yes")),
    (GENERATE, 400, "max_tokens must be", each("max_tokens", 0, -2, HUGE, (1 << 20) + 1, 1.5, "8", True, [8])),
    (GENERATE, 400, "temperature must be", each("temperature", -1, 101, HUGE, -HUGE, NAN, "hot", True)),
    (GENERATE, 400, "top_p must be", each("top_p", -0.5, 1.5, HUGE, "1", False)),
    (GENERATE, 400, "top_k must be", each("top_k", -2, 1.5, (1 << 20) + 1, "5", True)),
    (GENERATE, 400, "seed must be", each("seed", -2, 1 << 63, 0.5, "1", True, float("inf"))),
    (GENERATE, 400, "stop must be", each("stop", 5, [5], [""], "", ["a"] * 17, "x" * 257, {"a": 1}, True)),
    # Prompts and messages; the model has 300 tokens and a context of 256
    (GENERATE, 400, "prompt must be", each("prompt", 5, {"a": 1}, True)),
    (GENERATE, 400, "messages must be", each("messages", "Hello", {"a": 1}, 5, True)),
    (GENERATE, 400, "prompt or messages", [{}, dict(prompt=[]), dict(messages=[]), dict(ASK, **CHAT)]),
    (GENERATE, 400, "must not be empty", [
        dict(prompt=""), *said(user(), user(content=[]), user(content=""), dict(role="assistant"))]),
    (TEXTS, 400, "must not be empty", [dict(prompt="")]),
    (GENERATE, 400, "one prompt", each("prompt", ["a", "b"], [[5], 5])),
    (GENERATE, 400, "Token ids must be from 0 to 299", each("prompt", [[]], [300], [-1], [True], [1.5])),
    (GENERATE, 400, "256 tokens, answer included; shorten", each("prompt", [5] * 256)),
    (CHATS, 400, "needs role", said({}, dict(content="Hello"))),
    (CHATS, 400, "role must be system, developer, user or assistant", said(dict(role="tool"), dict(role=["user"]))),
    (CHATS, 400, "content must be", said(user(content=5), user(content=[dict(type="image_url", image_url="x")]))),
    (CHATS, 400, "name must be", said(user(content="Hello", name=5))),
    (CHATS, 400, "Unknown field 'tool_calls'", said(dict(role="assistant", content="", tool_calls=[dict(id="1")]))),
    (CHATS, 400, "reasoning_content must be", said(dict(role="assistant", reasoning_content="Hm"))),
    # OpenAI's fields
    (CHATS, 400, "Unknown field 'tools'", [dict(CHAT, tools=[dict(type="function", function=dict(name="f"))])]),
    (CHATS, 400, "tool_choice must be", [dict(CHAT, tool_choice="required")]),
    (CHATS, 400, "service_tier must be", [dict(CHAT, service_tier="flex")]), (CHATS, 400, "user must be", [dict(CHAT, user=5)]),
    (CHATS, 400, "stream_options must be", [dict(CHAT, stream=True, stream_options="yes")]),
    (CHATS, 400, "include_usage must be", [dict(CHAT, stream_options=dict(include_usage="yes"))]),
    (CHATS, 400, "include_obfuscation must be", [dict(CHAT, stream_options=dict(include_obfuscation=True))]),
    (CHATS, 400, "max_completion_tokens must be", [dict(CHAT, max_completion_tokens=0)]),
    (CHATS, 400, "min_tokens is supported only with ignore_eos", [
        dict(CHAT, min_tokens=5), dict(CHAT, min_tokens=5, ignore_eos=False), dict(CHAT, min_tokens=9, max_tokens=8, ignore_eos=True)]),
    (CHATS, 400, "min_tokens must be", [dict(CHAT, min_tokens=-1, ignore_eos=True)]), (GENERATE, 400, "ignore_eos must be", each("ignore_eos", 1)),
    (TEXTS, 400, "add_special_tokens must be true:", [dict(TEXT, add_special_tokens=False)]),
    *((CHATS, 400, f"{name} must be {json.dumps(value)}:", [{**CHAT, name: ["other"]}]) for name, value in openai.NEUTRAL.items()),
]


@pytest.mark.parametrize("route, status, words, bodies", REFUSED, ids=[f"{row[0]} {row[2]}" for row in REFUSED])
def test_a_refused_request_gets_its_status_and_one_sentence(client, route, status, words, bodies):
    """A body in bytes is also sent in chunks."""
    method, path = route.split()
    for body in bodies:
        for given in [body, io.BytesIO(body)] if isinstance(body, bytes) else [body]:
            reply = client.ask(path, given, method=method)
            assert words in reply.error(status), repr(body)[:80]
            assert ("Allow" in reply.headers) == (status == 405)
    assert client.ask("/generate", ASK).status == 200


def test_a_silent_connection_is_closed_and_a_waiting_stream_is_not(frontend, monkeypatch):
    assert 1 < servers.Handler.timeout <= 60
    monkeypatch.setattr(servers.Handler, "timeout", 1.0)  # the stream's request must arrive within it
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        stream, = waiting(client, threads, ("/generate", dict(ASK, stream=True)))     # as during a long step
        with socket.create_connection(("127.0.0.1", client.port), timeout=TIMEOUT) as half, suppress(ConnectionError):
            half.sendall(b"POST /generate HTTP/1.1\r\n")
            assert half.recv(1) == b""
        client.engine.let()
        assert "result" in stream.result().events[-1]


# 3. A full queue, hang-ups, defects, closing ----------------------------------------------------------------

def test_the_server_encodes_one_prompt_at_a_time_and_refuses_too_many(frontend, monkeypatch):
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


@pytest.mark.parametrize("route, body, stream, more", [
    ("/generate", ASK, False, b""), ("/generate", ASK, True, b""), ("/v1/chat/completions", CHAT, True, b"\r\n"),
    ("/generate", ASK, False, b"\r\n"), ("/v1/completions", TEXT, False, b"GET /health HTTP/1.1\r\n\r\n")])
def test_a_hang_up_cancels_its_request(frontend, caplog, route, body, stream, more):
    with serving(frontend) as client:
        client.engine.hold_after(3 * stream)
        with closing(client.send(route, dict(body, max_tokens=200, stream=stream))) as connection:
            eventually(lambda: client.engine.held)
            connection.sock.sendall(more)
            assert not stream or connection.getresponse().readline().startswith(b"data: {"), "the client hangs up in the middle of a stream"
        eventually(lambda: client.engine.arrivals)             # the hang-up is noticed even while there are no tokens
        client.engine.let()
        eventually(lambda: charts.counters(client.engine)["cancelled"] == 1)
        assert not client.engine.running and charts.counters(client.engine)["finished"] == 0
        assert client.ask("/generate", ASK).status == 200 and not caplog.records


def test_a_hang_up_cancels_a_request_whose_tokens_come_fast(frontend):
    with serving(frontend, Engine(pause=0.005)) as client:
        with closing(client.send("/generate", dict(ASK, max_tokens=200))):
            eventually(lambda: client.engine.running)
        eventually(lambda: charts.counters(client.engine)["cancelled"] == 1)
        assert charts.counters(client.engine)["finished"] == 0


def test_a_hang_up_before_submission_costs_no_step(frontend, monkeypatch):
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


def test_a_server_that_loads_its_model_answers_503():
    listener = servers.listen("127.0.0.1", 0)
    for asked in (("/health",), ("/generate", ASK), ("/",)):
        reply = Client(listener.port).ask(*asked)
        assert "loading its model" in reply.error(503, "server_error") and int(reply.headers["Retry-After"]) > 0
    listener.shutdown()


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_step_answers_500_and_the_next_request_works(frontend, caplog, lost):
    """`lost`: the engine has also lost the requests, as with a Cache whose `finished` raises."""
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        replies = waiting(client, threads, ("/generate", ASK), ("/generate", dict(ASK, stream=True)))
        client.engine.hold_after(3)
        eventually(lambda: len(client.engine.running) == 2)
        client.engine.error = RuntimeError("a secret of the inside")
        if lost:
            client.engine.running.clear()
            client.engine.finish = lambda *_: 1 / 0
        with caplog.at_level(logging.ERROR):
            client.engine.let()
            plain, stream = (reply.result() for reply in replies)
        words = plain.error(500, "server_error")
        assert "secret" not in words and "log" in words
        assert sentence(stream.events[-1]["error"], "server_error") == words
        assert "a secret of the inside" in caplog.text
        vars(client.engine).pop("finish", None)
        client.server.between_steps(int)  # after this, a failed step has told its requests
        assert client.ask("/generate", ASK).status == 200
        assert lost or client.counters()["failed"] == 2


HERE = "127.0.0.1"


@pytest.mark.parametrize("bound,host,asking,changes,reads", [  # status codes of /evict, and of other routes
    (HERE, "LocalHost", {}, 200, 200), ("::1", "[::1]:5000", dict(REMOTE_ADDR="::1"), 200, 200),
    (HERE, "localhost.example:5000", {}, 403, 403), ("::1", "192.0.2.7", {}, 403, 403), (HERE, "", {}, 403, 403),
    ("0.0.0.0", "elsewhere.example", {}, 403, 200),  # another site's name that resolves to this machine
    ("0.0.0.0", "localhost", dict(REMOTE_ADDR="192.0.2.7"), 403, 200),
    (HERE, "localhost", dict(HTTP_ORIGIN="http://localhost"), 200, 200),
    (HERE, "localhost", dict(HTTP_ORIGIN="http://elsewhere.example"), 403, 403),
    (HERE, "localhost", dict(HTTP_ORIGIN="http://["), 403, 403)])
def test_guards_refuse_other_hosts_and_other_sites(client, bound, host, asking, changes, reads):
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


def test_closing_answers_503_during_a_step(frontend):
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        client.engine.hold_after(2)
        stream = threads.submit(client.ask, "/generate", dict(ASK, stream=True))
        eventually(lambda: client.engine.held)
        replies = [threads.submit(client.ask, *asked) for asked in (("/generate", ASK), ("/evict", dict(tier="host")))]
        eventually(lambda: charts.counters(client.engine)["requests"] == 2 and client.server.jobs.qsize())
        client.server.close()
        assert "shutting down" in sentence(stream.result(TIMEOUT).events[-1]["error"], "server_error")
        for late in CHAT, dict(CHAT, stream=True):
            replies.append(threads.submit(client.ask, "/v1/chat/completions", late))
        assert all("shutting down" in reply.result(TIMEOUT).error(503, "server_error") for reply in replies)


def test_an_idle_server_makes_no_steps_but_runs_jobs(client):
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

def test_state_shows_requests_pools_and_finished_answers(frontend):
    with serving(frontend, Engine(max_running=1, blocks=40)) as client:
        client.ask("/generate", dict(ASK, max_tokens=20))
        client.engine.hold_after(3)
        with closing(client.send("/generate", dict(ASK, max_tokens=60))):
            eventually(lambda: client.engine.held)
            with closing(client.send("/generate", ASK)):
                eventually(lambda: len(client.ask("/state").json["requests"]) == 2)
                state = client.ask("/state").json
    assert state["info"]["chapter"] == "stub" and state["info"]["context"] == frontend.context
    (running, waiting), (finished,), pools = state["requests"], state["finished"], state["pools"]
    prompt = len(frontend.request("Hello").tokens)
    assert (running["id"], running["state"], running["computed"]) == (2, "decode", prompt)
    assert (waiting["id"], waiting["state"], waiting["new_tokens"]) == (3, "waiting", 0)
    blocks = -(-(prompt + 60) // 16)
    assert pools["device"]["states"] == "u" * 1 + "r" * (blocks - 1) + "." * (40 - blocks) and pools["host"]["states"] == "." * 40
    assert pools["device"]["blocks"] == 40 and pools["device"]["block_bytes"] == 1024
    assert finished["id"] == 1 and finished["decisions"] == ["nothing was offered: the prompt is computed"]
    assert finished["found"] == {} and finished["version"] == 20 == finished["usage"]["completion_tokens"]
    assert state["counters"]["requests"] == 3


def test_a_conversation_continues_its_last_prompt_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(page, "MAX_CONVERSATIONS", 2)
    prompts = [1, 2, 3], [1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 5], [6]
    asked, numbers, last = [Request(prompt, 1) for prompt in prompts], {}, {}
    page.owners(asked, numbers, last)
    assert [*numbers.values()] == [1, 1, 2, 1, 3, 4] and set(last) == {3, 4}


def test_a_letter_shows_the_state_of_a_block():
    pool = Engine(blocks=8).pools["device"]
    pool.references = [0, 0, 1, 2, 1, 1, 1, 1]
    pool.key_of = [None, "a", "b", "c", None, None, None, "d"]
    assert page.block_states(pool, [([3, 2, 4], 20), ([3, 5], 10)]) == ".-usrrff"
    assert page.block_states(pool, []) == ".-ffffff"


def test_a_timeline_equals_the_answers_and_unmeasured_numbers_become_null(frontend):
    measured = importlib.import_module("05_bubble_free").LayerCosts(math.inf, 0.5, 0.25, math.inf)
    plan = charts.describe_layers("RK", measured, 9, math.inf)
    with serving(frontend) as client, ThreadPoolExecutor() as threads:
        replies = waiting(client, threads, *[("/generate", dict(ASK, stream=stream)) for stream in (False, True)])
        for request in client.engine.asked:
            request.found["gpu"], request.timeline.plan = math.nan, plan
        client.engine.let()
        plain, stream = replies[0].result().json, replies[1].result().events[-1]["result"]
        assert plain["usage"]["cached_tokens"] is stream["found"]["gpu"] is None
        shown = client.ask(f"/timelines/{plain['id']}").json
        assert shown["spans"] == plain["timeline"] and shown["plan"]["rows"] == json.loads(json.dumps(plan["rows"]))
        assert shown["plan"]["costs_ms"] == dict(recompute=None, project=500, load_states=250, load_kv=None, question=0)
        assert client.ask("/state").json["finished"][0]["found"] == dict(gpu=None)
    assert json.loads(to_json([math.nan, -math.inf, {"a": 1.5}], indent=1)) == [None, None, {"a": 1.5}]


def test_evict_drops_the_cached_blocks(client):
    client.ask("/generate", ASK)
    cached = len(client.engine.pools["device"].cached)
    assert client.ask("/evict", dict(tier="device")).json == dict(evicted=cached) and cached > 0
    assert client.ask("/evict", dict(tier="device")).json == dict(evicted=0)


def test_this_machine_attaches_and_detaches_storage(frontend, tmp_path):
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(client, stream):
    body = json.dumps(dict(ASK, stream=stream))
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(f"POST /generate HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        head, _, said = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and b"chunked" not in head
    assert said.startswith(b"data: {" if stream else b"{")


# 5. Under load ----------------------------------------------------------------------------------------------

MINUTES = float(os.environ.get("SOAK_MINUTES", 0.03))       # of each server
NEW = 12                # tokens of an answer


def ask_until(client: Client, talks: list, seen: Counter, end: float):
    """Run one client until time `end`: it reads each answer, or hangs up while queued, in the prefill or in the answer.

    `seen`: counts of events, shared by all clients. `end`: a time of time.monotonic()."""
    while time.monotonic() < end:
        prompt = random.choice(talks)
        connection = client.send("/generate", dict(prompt=prompt, max_tokens=NEW))
        if random.random() < 1 / 3:
            time.sleep(random.choice((0.0, 0.02, 0.2)))
            seen["hung up"] += 1
        else:
            result = json.load(connection.getresponse())
            seen["refused" if "error" in result else "answered"] += 1
            answer = SimpleNamespace(tokens=prompt, prompt_tokens=len(prompt), max_tokens=NEW, new=result.get("tokens"))
            seen["wrong"] += "error" not in result and ORACLE.judge(answer) == "wrong"
            seen["restored"] += result.get("source") not in ("miss", "gpu_hit", None)
        connection.close()


@pytest.mark.parametrize("cache", ["files", "tiered"])
def test_a_server_under_load_gives_right_answers_and_leaves_nothing(cache):
    """Copies and reads of storage fail or are late. `SOAK_MINUTES=10` in the environment makes this last for minutes."""
    rng, seen, engine = random.Random(0), Counter(), make(cache, 80)
    talks = [draw(rng, rng.randrange(30, 480)) for _ in range(20)]
    for talk in talks:
        ORACLE.answer(talk, NEW)
    with faulty(rng, failing=0.02, late=0.1, noisy=3), serving(Frontend(tiny_model(), byte_tokenizer(300), ()), engine) as client:
        told = client, talks, seen, time.monotonic() + 60 * MINUTES
        clients = [threading.Thread(target=ask_until, args=told) for _ in range(8)]
        for step in (threading.Thread.start, threading.Thread.join):
            list(map(step, clients))
    check_pools(engine)
    engine.close()
    assert seen["answered"] and seen["restored"] and seen["hung up"] and not seen["wrong"] + seen["refused"], seen


def test_the_page_may_load_nothing_from_other_sites(client):
    reply = client.ask("/")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', reply.raw.decode())[1]
    assert reply.kind == "text/html" and {"default-src 'none'", "connect-src 'self'"} <= {*policy.split("; ")}
