"""The HTTP interface: every route, every way to ask it wrongly, and clients that hang up."""
import http.client
import io
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legacy import app

INFO = dict(chapter="01_baseline", model="tiny", device="cpu", dtype="float32")
ASK = dict(prompt="Hello", max_tokens=8)
CHAT = dict(messages=[dict(role="user", content="Hello")], max_tokens=8, temperature=0)


def another(engine, end_tokens=None, **options):
    """A new engine on the model of `engine`, to be closed, filled or broken."""
    return type(engine)(engine.model, engine.tokenizer, engine.end_tokens if end_tokens is None else end_tokens, **options)


def client_of(engine):
    return app.make_app(engine, INFO).test_client()


@pytest.fixture(scope="module")
def client(tiny_engine):
    return client_of(tiny_engine)


class Serving:
    """An engine behind a real socket, for as long as the block lasts."""

    def __init__(self, engine):
        self.server = app.listen("127.0.0.1", 0)
        self.server.app = app.make_app(engine, INFO)
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True)    # seconds to notice its end

    def __enter__(self):
        self.thread.start()
        return self.server.port

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()


def eventually(what):
    """Wait until `what()` is true; a test that must fail does so after a generous deadline."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def events(response) -> list:
    """The events of a stream: JSON objects, and the bare string [DONE]."""
    assert response.status_code == 200 and response.mimetype == "text/event-stream"
    *parts, end = response.get_data(as_text=True).split("\n\n")
    assert end == "" and all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def error_of(response, status: int) -> dict:
    """The error in a response, after a look at its form."""
    assert response.status_code == status, response.get_data(as_text=True)
    assert response.mimetype == "application/json" and set(response.json) == {"error"}
    return check_error(response.json["error"])


def check_error(error: dict) -> dict:
    message = error["message"]
    assert set(error) == {"message", "type"} and error["type"].endswith("_error")
    assert message.endswith(".") and "\n" not in message and ". " not in message, "one sentence"
    return error


# 1. What is asked rightly ----------------------------------------------------------------------------------------

def test_generate_answers_with_the_engines_result(client, tiny_engine):
    expected = tiny_engine.generate(**ASK)
    answer = client.post("/generate", json=ASK).json
    assert answer["text"] == expected.text and answer["tokens"] == expected.tokens
    assert answer["finish_reason"] == expected.finish_reason and answer["source"] == "miss"
    assert answer["usage"] == dict(prompt_tokens=len(tiny_engine.encode("Hello", None)[0]), cached_tokens=0,
                                   completion_tokens=len(expected.tokens))
    assert answer["ttft_ms"] > 0 and answer["tbt_ms"] > 0 and answer["history_tokens"] == 0
    assert answer["timeline"][0]["label"].startswith("prefill")


@pytest.mark.parametrize("body", [ASK, CHAT, dict(ASK, temperature=1.5, top_p=0.9, top_k=50, seed=3),
                                  dict(ASK, max_tokens=40, temperature=2, seed=1, stop=["e", "o "])])
def test_a_stream_says_what_the_plain_answer_says(client, body):
    plain = client.post("/generate", json=body).json
    *pieces, last = events(client.post("/generate", json=dict(body, stream=True)))
    assert all(set(piece) == {"text"} for piece in pieces) and set(last) == {"result"}
    assert "".join(piece["text"] for piece in pieces) == last["result"]["text"] == plain["text"]
    for name in ("tokens", "finish_reason", "usage", "source", "history_tokens"):
        assert last["result"][name] == plain[name]


def test_sampling_fields_reach_the_engine(client):
    def tokens(**fields):
        return client.post("/generate", json=dict(ASK, max_tokens=12, **fields)).json["tokens"]
    greedy = tokens()
    assert tokens(temperature=5, seed=1) == tokens(temperature=5, seed=1) != tokens(temperature=5, seed=2)
    assert tokens(temperature=5, seed=1) != greedy
    assert tokens(temperature=5, seed=1, top_k=1) == tokens(temperature=5, seed=1, top_p=1e-6) == greedy


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e-6, 100])
def test_the_coldest_and_the_hottest_temperatures_answer(client, temperature):
    answer = client.post("/generate", json=dict(ASK, temperature=temperature, seed=0))
    assert answer.status_code == 200
    if temperature < 1:
        assert answer.json["tokens"] == client.post("/generate", json=ASK).json["tokens"]


def test_a_conversation_tells_how_much_of_it_is_history(client):
    first = client.post("/generate", json=CHAT).json
    messages = [*CHAT["messages"], dict(role="assistant", content=first["text"]), dict(role="user", content="And?")]
    second = client.post("/generate", json=dict(CHAT, messages=messages)).json
    assert first["history_tokens"] == 0
    assert first["usage"]["prompt_tokens"] <= second["history_tokens"] < second["usage"]["prompt_tokens"]


def test_null_means_not_given(client):
    fields = dict(messages=None, temperature=None, stop=None, stream=None, seed=None)
    assert client.post("/generate", json=dict(ASK, **fields)).json["tokens"] == client.post("/generate", json=ASK).json["tokens"]


def test_chat_completions_answer_in_openais_format(client, tiny_engine):
    expected = tiny_engine.generate(messages=CHAT["messages"], max_tokens=8)
    answer = client.post("/v1/chat/completions", json=dict(CHAT, model="whatever")).json
    assert answer.pop("id").startswith("chatcmpl-") and isinstance(answer.pop("created"), int)
    prompt, new = expected.usage["prompt_tokens"], expected.usage["completion_tokens"]
    assert answer == dict(
        object="chat.completion", model="tiny",
        choices=[dict(index=0, message=dict(role="assistant", content=expected.text), logprobs=None,
                      finish_reason=expected.finish_reason)],
        usage=dict(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new, cached_tokens=0,
                   prompt_tokens_details=dict(cached_tokens=0)))


def test_the_parts_of_a_message_are_joined(client):
    parts = [dict(type="text", text="Hel"), dict(type="text", text="lo")]
    answer = client.post("/v1/chat/completions", json=dict(CHAT, messages=[dict(role="user", content=parts)])).json
    assert answer["choices"] == client.post("/v1/chat/completions", json=CHAT).json["choices"]


@pytest.mark.parametrize("as_tokens", [False, True])
def test_completions_continue_the_text_as_it_stands(client, tiny_engine, as_tokens):
    tokens = tiny_engine.tokenizer.encode("Once upon")
    expected = tiny_engine.generate(prompt=tokens, max_tokens=8)
    body = dict(prompt=tokens if as_tokens else "Once upon", max_tokens=8, temperature=0)
    answer = client.post("/v1/completions", json=body).json
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [dict(index=0, text=expected.text, logprobs=None, finish_reason=expected.finish_reason)]
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_openais_neutral_fields_and_names_are_taken(client):
    extra = dict(n=1, presence_penalty=0.0, frequency_penalty=0, logit_bias={}, tools=[], response_format=dict(type="text"),
                 user="me", store=False, stream_options={})
    assert (client.post("/v1/chat/completions", json=dict(CHAT, **extra)).json["choices"]
            == client.post("/v1/chat/completions", json=CHAT).json["choices"])
    fewer = client.post("/v1/chat/completions", json=dict(messages=CHAT["messages"], max_completion_tokens=3)).json
    assert fewer["usage"]["completion_tokens"] <= 3


def test_openais_clients_sample_unless_they_say_otherwise(client):
    def text(route, **fields):
        return client.post(route, json=dict(messages=CHAT["messages"], max_tokens=12, seed=5, **fields)).json
    drawn = text("/v1/chat/completions")["choices"][0]["message"]["content"]
    assert drawn == text("/generate", temperature=1)["text"] != text("/generate")["text"]


@pytest.mark.parametrize("route,kind", [("/v1/chat/completions", "chat.completion.chunk"),
                                        ("/v1/completions", "text_completion")])
@pytest.mark.parametrize("with_usage", [False, True])
def test_openais_stream_chunk_by_chunk(client, route, kind, with_usage):
    chat = "chat" in route
    body = CHAT if chat else dict(ASK, temperature=0)
    plain = client.post(route, json=body).json
    options = dict(stream_options=dict(include_usage=True)) if with_usage else {}
    *chunks, done = events(client.post(route, json=dict(body, stream=True, **options)))

    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {kind} and {chunk["model"] for chunk in chunks} == {"tiny"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    if with_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == plain["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks) and all(choice["index"] == 0 for choice in choices)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == plain["choices"][0]["finish_reason"]
    if chat:
        assert choices[0]["delta"] == dict(role="assistant", content="") and choices[-1]["delta"] == {}
        assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == plain["choices"][0]["message"]["content"] != ""
    else:
        assert "".join(choice["text"] for choice in choices) == plain["choices"][0]["text"] != ""


def test_models_lists_the_one_that_runs(client):
    assert client.get("/v1/models").json == dict(
        object="list", data=[dict(id="tiny", object="model", created=0, owned_by="local")])


def test_health_counts(tiny_engine):
    client = client_of(another(tiny_engine))
    before = client.get("/health").json
    assert before == dict(status="ok", **INFO, counters=before["counters"]) and not any(before["counters"].values())
    usage = client.post("/generate", json=ASK).json["usage"]
    client.post("/generate", json=dict(ASK, stream=True)).get_data()
    client.post("/generate", json=dict(prompt=""))
    assert client.get("/health").json["counters"] == dict(
        requests=2, finished=2, refused=1, cancelled=0, failed=0, waiting=0, running=0,
        prompt_tokens=2 * usage["prompt_tokens"], completion_tokens=2 * usage["completion_tokens"])


def test_the_page_is_one_file(client):
    response = client.get("/")
    page = response.get_data(as_text=True)
    assert response.mimetype == "text/html" and "<title>" in page
    assert "http://" not in page and "https://" not in page and " src=" not in page and "innerHTML" not in page


# 2. What is asked wrongly ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("body,word", [
    (b"", "JSON"), (b"{", "JSON"), (b"\xff\xfe{}", "UTF-8"), ("{}".encode("utf-16"), "UTF-8"), (b"[" * 100_000, "JSON"),
    (b'{"prompt": "Hello"} and more', "JSON"), (b'{"seed": 1' + b"0" * 5000 + b"}", "JSON"),
    (b"[]", "object"), (b"null", "object"), (b'"Hello"', "object"), (b"17", "object"),
    (b"{}", "prompt or messages"), (b'{"prompt": null}', "prompt or messages"),
    (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "prompt or messages"),
    (b'{"prompt": "\\ud800"}', "prompt"), (b'{"prompt": "Hello", "\\ud800": 1}', "Unknown field"),
    (b'{"prompt": "Hello", "temperature": NaN}', "temperature"), (b'{"prompt": "Hello", "temperature": 1e400}', "temperature"),
    (b'{"prompt": "Hello", "temperature": -Infinity}', "temperature"), (b'{"prompt": "Hello", "top_p": NaN}', "top_p"),
], ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else "")
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_a_body_that_is_no_request_is_refused(client, route, body, word):
    if route == "/v1/completions" and b"messages" in body:
        word = "messages"
    assert word in error_of(client.post(route, data=body), 400)["message"]


HUGE = 10 ** 400
WRONG = [("prompt", 5), ("prompt", ["Hello"]), ("prompt", {}), ("prompt", ""), ("prompt", True),
         *(("max_tokens", value) for value in (0, -1, HUGE, 1.5, "8", True, [8])),
         *(("temperature", value) for value in (-1, 101, HUGE, -HUGE, "hot", True, {})),
         *(("top_p", value) for value in (0, -0.5, 1.5, HUGE, "1", False)),
         *(("top_k", value) for value in (-1, 1.5, HUGE, "5", True)),
         *(("seed", value) for value in (-1, 1 << 63, 0.5, "1", True)),
         *(("stop", value) for value in (5, [5], [""], "", ["a"] * 17, "x" * 257, ["\ud800"], {"a": 1}, True)),
         *(("stream", value) for value in (1, 0, "true", [])),
         *(("messages", value) for value in ("Hello", {}, 5, True))]


@pytest.mark.parametrize("name,value", WRONG, ids=lambda value: repr(value)[:24])
def test_a_wrong_value_is_refused_by_name(client, name, value):
    body = {**({} if name == "messages" else ASK), name: value}
    assert name in error_of(client.post("/generate", json=body), 400)["message"]


@pytest.mark.parametrize("message,words", [
    ("Hello", "JSON object"), (None, "JSON object"), ({}, "role and a content"), (dict(role="user"), "role and a content"),
    (dict(content="Hello"), "role and a content"), (dict(role="robot", content="Hello"), "role must be"),
    (dict(role=["user"], content="Hello"), "role must be"), (dict(role="user", content=5), "content must be"),
    (dict(role="user", content=[dict(type="image_url", image_url="x")]), "content must be"),
    (dict(role="user", content=["Hello"]), "content must be"), (dict(role="user", content="\udfff"), "content must be"),
    (dict(role="user", content=[dict(type="text", text=5)]), "content must be"), (dict(role="user", content=""), "not be empty"),
    (dict(role="user", content=[]), "not be empty"), (dict(role="user", content="Hello", tool_calls=[]), "'tool_calls'"),
], ids=repr)
@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
def test_a_wrong_message_is_refused(client, route, message, words):
    assert words in error_of(client.post(route, json=dict(messages=[message])), 400)["message"]


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
def test_a_conversation_without_messages_is_refused(client, route):
    assert "at least one message" in error_of(client.post(route, json=dict(messages=[])), 400)["message"]


@pytest.mark.parametrize("route,fields", [
    ("/generate", dict(temprature=1)), ("/generate", dict(model="tiny")), ("/v1/completions", dict(messages=[])),
    ("/v1/chat/completions", dict(prompt="Hello")), ("/v1/chat/completions", dict(functions=[]))], ids=str)
def test_an_unknown_field_is_refused_by_name(client, route, fields):
    body = {**(CHAT if "chat" in route else ASK), **fields}
    assert f"Unknown field {list(fields)[0]!r}" in error_of(client.post(route, json=body), 400)["message"]


@pytest.mark.parametrize("name,value", [
    ("n", 2), ("n", True), ("best_of", 3), ("echo", True), ("suffix", "x"), ("logprobs", True), ("top_logprobs", 5),
    ("logit_bias", {"5": 1}), ("presence_penalty", 0.5), ("tools", [{}]), ("response_format", dict(type="json_object")),
    ("store", True), ("stream_options", dict(include_usage=1)), ("stream_options", dict(chunks=5)), ("stream_options", True),
    ("max_completion_tokens", 0), ("model", 5)], ids=str)
def test_what_openais_clients_may_not_ask_here_is_refused(client, name, value):
    assert name in error_of(client.post("/v1/chat/completions", json=dict(CHAT, **{name: value})), 400)["message"]


@pytest.mark.parametrize("prompt", [[], [300], [-1], [1 << 40], [True], [1.0], ["a"], [[1]]], ids=str)
def test_wrong_token_ids_are_refused(client, prompt):
    error_of(client.post("/v1/completions", json=dict(prompt=prompt)), 400)


LONG = [dict(role="user", content="x" * 1000)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route,body", [
    ("/generate", dict(prompt="x" * 1000)), ("/generate", dict(messages=LONG)), ("/v1/chat/completions", dict(messages=LONG)),
    ("/v1/completions", dict(prompt=[5] * 1000)), ("/v1/completions", dict(prompt="x" * 1000))])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client, tiny_engine, route, body, stream):
    sent = 1000 if route == "/v1/completions" else len(tiny_engine.encode(None, LONG)[0])
    message = error_of(client.post(route, json=dict(body, stream=stream)), 400)["message"]
    assert f"{sent} tokens" in message and str(tiny_engine.context) in message


def test_a_prompt_that_fills_the_context_is_answered(client, tiny_engine):
    body = dict(prompt=[5] * (tiny_engine.context - 1), max_tokens=50, temperature=0)
    answer = client.post("/v1/completions", json=body).json
    assert answer["usage"]["completion_tokens"] == 1
    assert str(tiny_engine.context) in error_of(client.post("/v1/completions", json=dict(body, prompt=[5] * tiny_engine.context)),
                                                400)["message"]


@pytest.mark.parametrize("method,path,status", [
    ("get", "/nothing", 404), ("post", "/", 405), ("get", "/generate", 405), ("delete", "/health", 405),
    ("post", "/v1/models", 405), ("get", "/v1/chat/completions", 405), ("get", "/../etc/passwd", 404),
    ("get", "/" + "x" * 5000, 404)], ids=lambda value: str(value)[:30])
def test_wrong_routes_and_methods_are_told(client, method, path, status):
    assert "GET /health" in error_of(getattr(client, method)(path), status)["message"]


def pieces_of_50_mb(pause: bool):
    first = app.MAX_BODY + io.DEFAULT_BUFFER_SIZE   # what the server has read when it knows enough
    yield b"x" * first
    if pause:
        time.sleep(0.3)             # the answer must still be there for who takes a breath here
    rest = (50 << 20) - first
    yield b"x" * (rest // 2)
    yield b"x" * (rest - rest // 2)


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_50_mb_gets_its_answer_over_a_socket(tiny_engine, chunked, pause):
    with Serving(tiny_engine) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/generate", pieces_of_50_mb(pause), encode_chunked=chunked,
                           headers={"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(50 << 20)})
        response = connection.getresponse()
        assert response.status == 413 and response.getheader("Content-Type") == "application/json"
        assert str(app.MAX_BODY) in check_error(json.loads(response.read())["error"])["message"]
        connection.close()
        assert ask_over_socket(port, ASK)[0] == 200


def ask_over_socket(port: int, body: dict):
    """-> status and JSON of POST /generate"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/generate", json.dumps(body))
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


@pytest.mark.parametrize("sent", [
    b"nonsense\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST /generate HTTP/1.1\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nX: " + b"x" * 65534], ids=lambda sent: repr(sent[:60]))
def test_broken_http_gets_a_json_error(tiny_engine, sent):
    with Serving(tiny_engine) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    check_error(json.loads(reply[reply.index(b"{"):])["error"])
    assert b" 500 " not in reply.split(b"\r\n")[0]
    assert b"Content-Type: application/json" in reply or sent.startswith(b"nonsense")       # HTTP 0.9 has no headers


# 3. A full line, a closed door, a broken engine, a client that hangs up -------------------------------------------

@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_429_and_then_goes_on(tiny_engine, stream):
    engine = another(tiny_engine, max_waiting=1)
    client = client_of(engine)
    running, waiting = engine.stream(prompt="a"), engine.stream(prompt="b")
    assert client.get("/health").json["counters"]["waiting"] == 1
    error = error_of(client.post("/generate", json=dict(ASK, stream=stream)), 429)
    assert error["type"] == "rate_limit_error" and "try again" in error["message"]
    waiting.close()
    running.close()
    assert client.post("/generate", json=ASK).status_code == 200


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT)])
def test_a_closed_engine_answers_503(tiny_engine, route, body):
    engine = another(tiny_engine)
    engine.close()
    assert error_of(client_of(engine).post(route, json=body), 503)["type"] == "unavailable_error"


def test_who_stands_in_line_when_it_closes_is_told(tiny_engine):
    engine = another(tiny_engine)
    running = engine.stream(prompt="a")
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(client_of(engine).post, "/generate", json=ASK)
        stream = pool.submit(lambda: events(client_of(engine).post("/generate", json=dict(ASK, stream=True))))
        eventually(lambda: engine.counters()["waiting"] == 2)
        engine.close()
        assert error_of(plain.result(), 503)["type"] == "unavailable_error"
        assert [check_error(event["error"])["type"] for event in stream.result()] == ["unavailable_error"]
    running.close()


def break_after(engine, passes: int):
    """Make the forward pass of `engine` fail after some more passes; -> what puts it right again."""
    forward, left = engine.forward, iter(range(passes))

    def broken(*arguments):
        if next(left, None) is None:
            raise RuntimeError("a secret of the inside")
        return forward(*arguments)
    engine.forward = broken
    return lambda: vars(engine).pop("forward")


@pytest.mark.parametrize("passes", [0, 3])
@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT)])
def test_an_exception_inside_is_a_500_and_the_next_request_works(tiny_engine, route, body, passes):
    engine = another(tiny_engine)
    client = client_of(engine)
    expected = client.post("/generate", json=ASK).json["tokens"]

    mend = break_after(engine, passes)
    error = error_of(client.post(route, json=body), 500)
    assert error["type"] == "server_error" and "secret" not in error["message"]
    mend()
    assert client.post("/generate", json=ASK).json["tokens"] == expected

    mend = break_after(engine, passes)
    *before, last = events(client.post(route, json=dict(body, stream=True)))
    assert check_error(last["error"]) == error and len(before) == passes + ("chat" in route)
    mend()
    assert client.post("/generate", json=ASK).json["tokens"] == expected
    counters = engine.counters()
    assert (counters["finished"], counters["failed"], counters["cancelled"], counters["running"]) == (3, 2, 0, 0)


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT)])
def test_a_client_that_hangs_up_frees_the_engine(tiny_engine, route, body):
    engine = another(tiny_engine, end_tokens=frozenset())
    forward, passes, gone = engine.forward, iter(range(3)), threading.Event()

    def gated(*arguments):          # after three tokens, wait until the client is gone
        if next(passes, None) is None:
            assert gone.wait(60)
        return forward(*arguments)
    engine.forward = gated
    with Serving(engine) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            payload = json.dumps(dict(body, max_tokens=200, stream=True)).encode()
            connection.sendall(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (route.encode(), len(payload), payload))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        gone.set()
        eventually(lambda: engine.counters()["cancelled"] == 1)
        assert engine.counters()["running"] == 0 and engine.counters()["finished"] == 0
        assert ask_over_socket(port, ASK)[0] == 200
    assert engine.counters()["finished"] == 1


def test_many_clients_at_once_get_the_answers_of_one(tiny_engine):
    with Serving(another(tiny_engine)) as port, ThreadPoolExecutor(8) as pool:
        bodies = [dict(prompt=f"Number {number % 4}", max_tokens=6) for number in range(16)]
        answers = list(pool.map(lambda body: ask_over_socket(port, body), bodies))
    for body, (status, answer) in zip(bodies, answers):
        assert status == 200 and answer["tokens"] == tiny_engine.generate(**body).tokens


# 4. Anything at all ----------------------------------------------------------------------------------------------

SCALARS = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
           | st.sampled_from([10 ** 400, -1, 5e-324, 1e-40, "\ud800", 0, "", "user", "text"]))
ANYTHING = st.recursive(SCALARS, max_leaves=12, extend=lambda inner: (
    st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)))
PART = st.fixed_dictionaries(dict(type=st.just("text"), text=st.text(max_size=9)))
MESSAGE = st.fixed_dictionaries(dict(role=st.sampled_from(["user", "assistant", "system"]),
                                     content=st.text(max_size=30) | st.lists(PART, max_size=2)))
VALID = (st.fixed_dictionaries(dict(prompt=st.text(min_size=1, max_size=60)))
         | st.fixed_dictionaries(dict(messages=st.lists(MESSAGE, min_size=1, max_size=4))))
OPTIONS = st.fixed_dictionaries({}, optional=dict(
    temperature=st.floats(0, 100), top_p=st.floats(1e-6, 1), top_k=st.integers(0, 1000), seed=st.integers(0, (1 << 63) - 1),
    stop=st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=4), stream=st.booleans()))
FIELDS = st.sampled_from(["prompt", "messages", "temperature", "top_p", "top_k", "seed", "stop", "stream", "extra"])


@st.composite
def bodies(draw):
    """A valid request, one with some fields replaced by anything, anything as JSON, or any bytes. Short answers only."""
    kind = draw(st.sampled_from(["valid", "bent", "bent", "json", "bytes"]))
    if kind == "bytes":
        return kind, draw(st.binary(max_size=60))
    if kind == "json":
        return kind, json.dumps(draw(ANYTHING)).encode()
    body = {**draw(VALID), **draw(OPTIONS), "max_tokens": draw(st.integers(1, 4))}
    if kind == "bent":
        body |= draw(st.dictionaries(FIELDS, ANYTHING, min_size=1, max_size=3))
    return kind, json.dumps(body).encode()


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(bodies())
def test_no_body_is_a_500(client, body):
    kind, data = body
    response = client.post("/generate", data=data)
    if response.mimetype == "text/event-stream":
        last = events(response)[-1]
        assert "result" in last, last
    elif response.status_code == 200:
        assert response.json["finish_reason"] in ("stop", "length")
    else:
        error_of(response, 400)
        assert kind != "valid" or any(word in response.json["error"]["message"] for word in ("context", "not be empty"))
