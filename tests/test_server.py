"""The engines of chapters 02 to 06 behind a real socket: many clients, some of whom hang up, several samples, salts, errors."""
import http.client
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from conftest import chapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_app import ANYTHING, ASK, CHAT, VALID, Serving, another, check_error, client_of, error_of, events, eventually

paged, offload, hidden, bubble, cake = (
    chapter(name) for name in ("02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free", "06_bidirectional"))
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


# 1. Many clients, and those who hang up ---------------------------------------------------------------------------

LEAVE_EARLY, LEAVE_LATE, STAY = "leaves before an answer", "leaves in the middle of a stream", "stays"


def test_64_clients_of_whom_a_third_hangs_up_get_the_tokens_of_chapter_01(tiny_engine):
    one_by_one = another(tiny_engine, end_tokens=frozenset())
    engine = make(tiny_engine, frozenset(), blocks=40, max_running=8, max_waiting=64)
    asked = []
    for number in range(64):
        kind = {0: LEAVE_EARLY, 3: LEAVE_EARLY, 6: LEAVE_LATE}.get(number % 9, STAY)
        prompt = "It was said before: " * (number % 4) + f"Number {number}"
        asked.append((kind, dict(prompt=prompt, max_tokens=90 if kind == LEAVE_LATE else 8 + number % 30,
                                 stream=kind == LEAVE_LATE or number % 2 == 0)))
    kinds = [kind for kind, _ in asked]
    early, late = kinds.count(LEAVE_EARLY), kinds.count(LEAVE_LATE)
    assert early + late == 22 and {body["stream"] for kind, body in asked if kind != LEAVE_LATE} == {False, True}
    all_here, early_gone = threading.Event(), threading.Event()

    def wait():
        """Nothing is computed until all have asked and some have left; and who leaves late has left before token 60."""
        if not early_gone.is_set():
            if len(engine.cancelled) < early:
                return False
            early_gone.set()
        gone = set(map(id, tuple(engine.cancelled)))
        return not any(request.max_tokens == 90 and len(request.answer.tokens) >= 60 and id(request) not in gone
                       for request in engine.running)
    before_each_pass(engine, lambda _: eventually(wait))

    def client(kind, body):
        connection = sent(port, body)
        with closing(connection):
            if kind == LEAVE_EARLY:
                assert all_here.wait(TIMEOUT)
                return None
            response = connection.getresponse()
            if kind == STAY:
                return Reply(response)
            written = ""
            while len(written) < 3:
                line = response.readline()
                assert line, "the stream ended"
                if line.startswith(b"data: "):
                    written += json.loads(line[6:])["text"]
            response.close()
            return written

    with serving(engine) as port, ThreadPoolExecutor(64) as pool:
        replies = [pool.submit(client, *one) for one in asked]
        eventually(lambda: engine.counters()["requests"] == 64)
        all_here.set()
        for (kind, body), reply in zip(asked, replies):
            expected = one_by_one.generate(body["prompt"], max_tokens=body["max_tokens"])
            if kind == LEAVE_LATE:
                assert expected.text.startswith(reply.result())
            elif kind == STAY and body["stream"]:
                *pieces, last = events(reply.result())
                assert last["result"]["tokens"] == expected.tokens
                assert "".join(piece["text"] for piece in pieces) == last["result"]["text"] == expected.text
            elif kind == STAY:
                assert reply.result().status_code == 200 and reply.result().json["tokens"] == expected.tokens
        eventually(lambda: over(engine))
        counts = counters(port)
    assert (counts["cancelled"], counts["finished"], counts["failed"], counts["refused"]) == (early + late, 42, 0, 0)


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/generate", dict(ASK, n=3)), ("/v1/chat/completions", CHAT),
                                        ("/v1/completions", dict(TEXT, n=2))], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_middle_of_a_long_answer_frees_its_blocks(tiny_engine, route, body, stream):
    engine, n = make(tiny_engine, frozenset()), body.get("n", 1)
    waits = hold(engine, until=lambda: len(engine.cancelled) == n, passes=3)
    with serving(engine) as port:
        with closing(sent(port, dict(body, max_tokens=200, stream=stream), route)):
            assert waits.wait(TIMEOUT)
            assert engine.counters()["running"] == n and engine.counters()["blocks_referenced"] > 0
        eventually(lambda: engine.counters()["cancelled"] == n)
        counts = counters(port)
        assert counts["running"] == counts["blocks_referenced"] == counts["finished"] == 0 and counts["steps"] == 4
        del engine.forward
        assert ask(port, ASK).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_hangs_up_in_line_is_never_served(tiny_engine, stream, n):
    engine = make(tiny_engine, frozenset(), max_running=2)
    hold(engine, until=lambda: len(engine.cancelled) == n)
    first = dict(prompt="Who came first", max_tokens=5, n=2)
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        served = pool.submit(ask, port, first)
        eventually(lambda: engine.counters()["running"] == 1)           # its second sample begins behind its prompt
        with closing(sent(port, dict(prompt="Who came too late", max_tokens=200, n=n, stream=stream))):
            eventually(lambda: engine.counters()["waiting"] == 1)
        expected = tokens_of(another(tiny_engine, end_tokens=frozenset()), first)
        assert [result["tokens"] for result in served.result().json["results"]] == [expected] * 2
        eventually(lambda: engine.counters()["cancelled"] == n)
        counts = counters(port)
    prompt = tiny_engine.encode(first["prompt"], None)[0]
    assert (counts["finished"], counts["steps"], counts["prompt_tokens"]) == (2, 5, 2 * len(prompt))
    assert counts["blocks_cached"] == (len(prompt) + 4) // 16, "nothing was computed for who left"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_full_line_answers_429_and_then_goes_on(tiny_engine, route, body, stream):
    engine, opened = make(tiny_engine, max_running=1, max_waiting=1), threading.Event()
    hold(engine, until=opened.is_set)
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        served = [pool.submit(ask, port, ASK)]
        eventually(lambda: engine.counters()["running"] == 1)
        served.append(pool.submit(ask, port, ASK))
        eventually(lambda: engine.counters()["waiting"] == 1)
        error = error_of(ask(port, dict(body, stream=stream), route), 429)
        assert error["type"] == "rate_limit_error" and "1 requests are waiting" in error["message"]
        opened.set()
        assert [reply.result().json["tokens"] for reply in served] == [tokens_of(tiny_engine, ASK)] * 2
        assert ask(port, body, route).status_code == 200
        counts = counters(port)
    assert (counts["requests"], counts["finished"], counts["refused"]) == (3, 3, 1)


# 2. Several samples ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def port(tiny_engine):
    """Of a server that all tests share that leave it as it was."""
    with serving(make(tiny_engine)) as port:
        yield port


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [0, -1, 17, 10 ** 400, "two", "2", True, 1.0, 2.5, [2], {}], ids=lambda n: repr(n)[:20])
def test_a_wrong_n_is_refused_by_name(port, route, body, stream, n):
    message = error_of(ask(port, dict(body, n=n, stream=stream), route), 400)["message"]
    assert message.startswith("n must be") and "from 1 to 16" in message


DRAWN = dict(prompt="Hello", max_tokens=20, temperature=1.0, seed=7)


def three_answers(engine, **fields):
    return [engine.generate(**{**DRAWN, "seed": DRAWN["seed"] + number, **fields}) for number in range(3)]


def test_n_gives_as_many_results_with_the_seeds_that_follow(port, tiny_engine):
    answer = ask(port, dict(DRAWN, n=3))
    expected = three_answers(tiny_engine)
    assert answer.status_code == 200 and set(answer.json) == {"results"}
    assert [result["tokens"] for result in answer.json["results"]] == [result.tokens for result in expected]
    assert [result["text"] for result in answer.json["results"]] == [result.text for result in expected]
    assert len({tuple(result.tokens) for result in expected}) == 3
    assert ask(port, dict(DRAWN, n=1)).json["tokens"] == ask(port, DRAWN).json["tokens"] == expected[0].tokens


def test_without_a_seed_the_samples_differ_and_greedy_ones_do_not(port, tiny_engine):
    drawn = ask(port, dict(prompt="Hello", max_tokens=20, temperature=5, n=16)).json["results"]
    assert len({tuple(result["tokens"]) for result in drawn}) == 16
    greedy = ask(port, dict(ASK, n=16)).json["results"]
    assert [result["tokens"] for result in greedy] == [tokens_of(tiny_engine, ASK)] * 16


@pytest.mark.parametrize("fields", [dict(), dict(stop=["e", "o"]), dict(max_tokens=1)], ids=str)
def test_a_stream_of_three_samples_says_whose_each_piece_is(port, tiny_engine, fields):
    said = events(ask(port, {**DRAWN, "n": 3, "stream": True, **fields}))
    assert {event["index"] for event in said} == {0, 1, 2}
    assert {tuple(sorted(event)) for event in said} == {("index", "text"), ("index", "result")}
    for index, expected in enumerate(three_answers(tiny_engine, **fields)):
        *pieces, last = [event for event in said if event["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == last["result"]["text"] == expected.text
        assert last["result"]["tokens"] == expected.tokens and last["result"]["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_after_the_first_sample_is_done_leaves_its_result_alone(tiny_engine, stream):
    """While nothing comes, the server looks twice a second whether the client is there; nobody shall read that as a piece."""
    expected = three_answers(tiny_engine)
    stop = next(character for character in expected[0].text
                if character.isalnum() and not any(character in result.text for result in expected[1:]))
    expected = three_answers(tiny_engine, stop=stop)
    assert len(expected[0].tokens) < min(len(result.tokens) for result in expected[1:])
    engine, pauses = make(tiny_engine), itertools.repeat(0.7, 1)
    before_each_pass(engine, lambda _: time.sleep(next(pauses, 0) if engine.counters()["finished"] else 0))
    with serving(engine) as port:
        reply = ask(port, dict(DRAWN, n=3, stop=stop, stream=stream))
        if stream:
            said = events(reply)
            first = [event for event in said if event["index"] == 0]
            assert "result" in first[-1], "something came after the result"
            results = [next(event["result"] for event in said if event["index"] == index and "result" in event)
                       for index in range(3)]
        else:
            assert reply.status_code == 200
            results = reply.json["results"]
    assert [result["tokens"] for result in results] == [result.tokens for result in expected]


def openai_bodies(engine):
    """-> (route, body, the two answers that it must bring) for both of OpenAI's routes."""
    options = dict(max_tokens=20, temperature=1.0)
    for route, body, prompt in (
            ("/v1/chat/completions", dict(messages=CHAT["messages"]), dict(messages=CHAT["messages"])),
            ("/v1/completions", dict(prompt="Hello"), dict(prompt=engine.tokenizer.encode("Hello")))):
        yield route, dict(body, **options, seed=3, n=2), [engine.generate(**prompt, **options, seed=seed) for seed in (3, 4)]


@pytest.mark.parametrize("which", [0, 1], ids=["chat", "completions"])
def test_openais_n_gives_as_many_choices_and_sums_their_tokens(port, tiny_engine, which):
    route, body, expected = list(openai_bodies(tiny_engine))[which]
    answer = ask(port, body, route).json
    texts = [choice["message"]["content"] if which == 0 else choice["text"] for choice in answer["choices"]]
    assert texts == [result.text for result in expected] and texts[0] != texts[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [result.finish_reason for result in expected]
    usage, written = answer["usage"], sum(len(result.tokens) for result in expected)
    assert usage["completion_tokens"] == written and usage["prompt_tokens"] == expected[0].usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + written


@pytest.mark.parametrize("which", [0, 1], ids=["chat", "completions"])
@pytest.mark.parametrize("with_usage", [False, True])
def test_openais_stream_of_two_choices(port, tiny_engine, which, with_usage):
    route, body, expected = list(openai_bodies(tiny_engine))[which]
    body |= dict(stream=True, stream_options=dict(include_usage=with_usage))
    *chunks, done = events(ask(port, body, route))
    assert done == "[DONE]"
    if with_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(len(result.tokens) for result in expected)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1}
    for index, result in enumerate(expected):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [result.finish_reason]
        if which == 0:
            assert own[0]["delta"] == dict(role="assistant", content="") and own[-1]["delta"] == {}
        assert "".join(choice["delta"].get("content", "") if which == 0 else choice["text"] for choice in own) == result.text


def test_chapter_01_refuses_several_answers_and_takes_an_n_of_1_from_openais_clients(tiny_engine):
    client = client_of(tiny_engine)
    assert tiny_engine.fields == {}
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert "n must be 1" in error_of(client.post(route, json=dict(body, n=2)), 400)["message"]
        assert client.post(route, json=dict(body, n=1)).json["choices"] == client.post(route, json=body).json["choices"]
    for fields in (dict(n=2), dict(cache_salt="a")):
        message = error_of(client.post("/generate", json=dict(ASK, **fields)), 400)["message"]
        assert f"Unknown field {list(fields)[0]!r}" in message


def test_more_samples_than_may_run_are_refused(tiny_engine):
    with serving(make(tiny_engine, max_running=2)) as port:
        message = error_of(ask(port, dict(ASK, n=3)), 400)["message"]
        assert "n is 3" in message and "at most 2" in message
        assert len(ask(port, dict(ASK, n=2)).json["results"]) == 2


def test_no_more_run_at_once_than_may_also_when_a_prompt_has_several_samples(tiny_engine):
    engine, running = make(tiny_engine, frozenset(), max_running=2), []

    def look(number):
        running.append(len(engine.running))
        if number == 0:
            eventually(lambda: engine.counters()["requests"] == 4)
    before_each_pass(engine, look)
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        replies, asked = [], 0
        for number, n in enumerate((1, 2, 1)):
            replies.append(pool.submit(ask, port, dict(prompt=str(number), max_tokens=6, n=n)))
            asked += n
            eventually(lambda asked=asked: engine.counters()["requests"] == asked)      # in line, one after another
        assert [reply.result().status_code for reply in replies] == [200] * 3
    assert max(running) == 2


# 3. Salts --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("route,extra", [("/generate", {}), ("/v1/completions", {}), ("/v1/chat/completions", {})])
def test_the_second_to_ask_with_the_same_salt_finds_the_blocks_of_the_first(tiny_engine, route, extra):
    words = "A sentence that is long enough to fill some blocks. " * 2
    body = dict(messages=[dict(role="user", content=words)]) if "chat" in route else dict(prompt=words)
    body |= dict(max_tokens=6, temperature=0, **extra)

    def cached(**fields):
        reply = ask(port, dict(body, **fields), route).json
        texts.append(reply.get("text") or reply["choices"][0].get("text") or reply["choices"][0]["message"]["content"])
        assert "source" not in reply or reply["source"] == ("gpu_hit" if reply["usage"]["cached_tokens"] else "miss")
        return reply["usage"]["cached_tokens"]
    texts = []
    with serving(make(tiny_engine)) as port:
        assert cached() == 0 and cached() >= 96
        assert cached(cache_salt="Anna") == 0 and cached(cache_salt="Anna") == cached()
        assert cached(cache_salt="Ben") == 0 and cached(cache_salt="Anna") == cached(cache_salt="Ben") >= 96
        assert cached(cache_salt="") == cached(cache_salt=None) == cached() >= 96
        assert cached(cache_salt="x" * 256) == 0 and cached(cache_salt="Änna \0 🐈") == 0
    assert len(set(texts)) == 1


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("salt", ["x" * 300, "x" * 257, 5, 0, True, False, ["a"], {}, "\ud800"], ids=lambda salt: repr(salt)[:20])
def test_a_wrong_salt_is_refused_by_name(port, route, body, salt):
    message = error_of(ask(port, dict(body, cache_salt=salt), route), 400)["message"]
    assert message.startswith("cache_salt must be") and "256" in message


# 4. What goes wrong ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_what_can_never_fit_into_the_pool_is_refused_with_both_numbers(tiny_engine, stream, n):
    with serving(make(tiny_engine, blocks=4)) as port:
        def asking(prompt_tokens, max_tokens):
            return ask(port, dict(prompt=[5] * prompt_tokens, max_tokens=max_tokens, temperature=0, n=n), "/v1/completions")
        message = error_of(asking(50, 16), 400)["message"]              # 65 tokens are kept, and the last is never read
        assert "take 5 blocks" in message and "the pool has 4" in message and "--gpu-blocks 5" in message
        assert asking(50, 15).json["usage"]["completion_tokens"] == n * len(tokens_of(tiny_engine, dict(prompt=[5] * 50,
                                                                                                        max_tokens=15)))
        error_of(ask(port, dict(prompt="x" * 100, stream=stream)), 400)
        assert ask(port, ASK).json["tokens"] == tokens_of(tiny_engine, ASK)
        assert counters(port)["refused"] == 2


def test_an_exception_inside_is_a_500_for_those_in_the_step_and_for_nobody_else(tiny_engine):
    engine, failed = make(tiny_engine, frozenset(), max_running=3), threading.Event()

    def fail_once(_):
        """When all are here, three of them run, and each has some tokens."""
        eventually(lambda: engine.counters()["requests"] >= 5)
        if not failed.is_set() and len(engine.running) == 3 and all(request.answer.tokens for request in engine.running):
            failed.set()
            raise RuntimeError("a secret of the inside")
    before_each_pass(engine, fail_once)
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        bodies = [dict(prompt=f"Number {number}", max_tokens=6, stream=number % 2 == 1) for number in range(5)]
        replies = []
        for number, body in enumerate(bodies):
            replies.append(pool.submit(ask, port, body))
            eventually(lambda number=number: engine.counters()["requests"] == number + 1)
        for error in (error_of(replies[0].result(), 500), check_error(events(replies[1].result())[-1]["error"]),
                      error_of(replies[2].result(), 500)):
            assert error["type"] == "server_error" and "secret" not in error["message"] and "log" in error["message"]
        one_by_one = another(tiny_engine, end_tokens=frozenset())
        assert events(replies[3].result())[-1]["result"]["tokens"] == tokens_of(one_by_one, bodies[3])
        assert replies[4].result().json["tokens"] == tokens_of(one_by_one, bodies[4])
        assert ask(port, bodies[0]).json["tokens"] == tokens_of(one_by_one, bodies[0])
        counts = counters(port)
    assert (counts["failed"], counts["finished"], counts["cancelled"]) == (3, 3, 0)


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("passes", [0, 2])
def test_an_exception_inside_is_one_error_however_many_samples_were_asked_for(tiny_engine, route, body, n, passes):
    engine = make(tiny_engine, frozenset())

    def fail(number):
        if number >= passes:
            raise RuntimeError("a secret of the inside")
    with serving(engine) as port:
        expected = ask(port, dict(body, n=n), route)
        assert expected.status_code == 200
        for stream in (False, True):
            before_each_pass(engine, fail)
            reply = ask(port, dict(body, n=n, stream=stream), route)
            if stream:
                *pieces, last = events(reply)
                error = check_error(last["error"])
                assert all("error" not in piece for piece in pieces)
            else:
                error = error_of(reply, 500)
            assert error["type"] == "server_error" and "secret" not in error["message"]
            eventually(lambda: over(engine))
            del engine.forward
        again = ask(port, dict(body, n=n), route)
        assert again.status_code == 200
        if route == "/generate":
            assert tokens_in(again.json) == tokens_in(expected.json) == [tokens_of(
                another(tiny_engine, end_tokens=frozenset()), body)] * n
        else:
            assert again.json["choices"] == expected.json["choices"]
        counts = counters(port)
    assert counts["failed"] >= 2 and counts["failed"] + counts["cancelled"] == 2 * n and counts["finished"] == 2 * n


def tokens_in(answer: dict) -> list[list[int]]:
    return [result["tokens"] for result in answer.get("results", [answer])]


@pytest.mark.parametrize("n", [1, 2])
def test_when_it_closes_who_waits_is_told_and_who_runs_is_answered(tiny_engine, n):
    engine = make(tiny_engine, max_running=2)
    hold(engine, until=lambda: engine.closing)
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        running = pool.submit(ask, port, dict(ASK, n=2))
        eventually(lambda: engine.counters()["running"] == 1)
        plain = pool.submit(ask, port, dict(ASK, n=n))
        stream = pool.submit(ask, port, dict(ASK, n=n, stream=True))
        chat = pool.submit(ask, port, dict(CHAT, n=n), "/v1/chat/completions")
        eventually(lambda: engine.counters()["waiting"] == 3)
        engine.close()
        for error in (error_of(plain.result(), 503), error_of(chat.result(), 503),
                      check_error(events(stream.result())[-1]["error"]), error_of(ask(port, ASK), 503)):
            assert error["type"] == "unavailable_error" and "shutting down" in error["message"]
        assert tokens_in(running.result().json) == [tokens_of(tiny_engine, ASK)] * 2
        engine.thread.join(TIMEOUT)
        assert not engine.thread.is_alive()


def test_health_shows_all_counters_also_while_requests_run(tiny_engine):
    engine, opened, waits = make(tiny_engine, frozenset(), max_running=2), threading.Event(), threading.Event()

    def wait(number):
        if number == 0:
            eventually(lambda: engine.counters()["requests"] == 5)
        elif number == 2:
            waits.set()
            eventually(opened.is_set)
    before_each_pass(engine, wait)
    names = set("requests refused finished cancelled failed prompt_tokens completion_tokens cached_tokens steps preemptions "
                "evictions copies waiting running blocks blocks_free blocks_cached blocks_referenced".split())
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        before = counters(port)
        assert set(before) == names and before.pop("blocks") == before.pop("blocks_free") == 64 and not any(before.values())
        replies = [pool.submit(ask, port, dict(prompt=str(number), max_tokens=9, stream=number > 2)) for number in range(5)]
        assert waits.wait(TIMEOUT)
        during = counters(port)
        assert set(during) == names and all(type(value) is int for value in during.values())
        assert (during["requests"], during["running"], during["waiting"], during["finished"]) == (5, 2, 3, 0)
        assert during["blocks_referenced"] > 0 and during["blocks_free"] + during["blocks_referenced"] == 64
        opened.set()
        assert [reply.result().status_code for reply in replies] == [200] * 5
        eventually(lambda: over(engine))
        after = counters(port)
    assert set(after) == names and all(type(value) is int for value in after.values())
    assert (after["finished"], after["completion_tokens"], after["blocks_referenced"]) == (5, 45, 0)


class Hooked(list):
    """Tokens that call `hook` when they are compared, as another thread may be called just then."""

    def __eq__(self, other):
        self.hook()
        return super().__eq__(other)


def test_who_asks_while_another_one_leaves_the_line_disturbs_nobody(tiny_engine):
    engine, hooked = make(tiny_engine, max_running=1), []
    running, first, second = (engine.submit(prompt=str(number), max_tokens=6)[0] for number in range(3))
    first.tokens = Hooked(first.tokens)
    first.tokens.hook = lambda: hooked or hooked.extend(engine.submit(prompt="3", max_tokens=6))
    assert engine.step()
    engine.cancel(second)
    while engine.step():
        pass
    engine.pool.check_integrity([])
    for number, request in enumerate((running, first, second, *hooked)):
        if request is not second:
            assert request.outcome.tokens == tokens_of(tiny_engine, dict(prompt=str(number), max_tokens=6))


# 5. Anything at all ----------------------------------------------------------------------------------------------

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


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(bodies(), min_size=1, max_size=3))
def test_nothing_that_is_asked_is_a_500(port, asked):
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda one: ask(port, one[1]), asked))
    for (valid, body), reply in zip(asked, replies):
        n = body.get("n") or 1
        if reply.mimetype == "text/event-stream":
            results = [event for event in events(reply) if "text" not in event]
            assert len(results) == n and all("result" in event for event in results)
            assert sorted(event.get("index", 0) for event in results) == list(range(n))
        elif reply.status_code == 200:
            assert len(tokens_in(reply.json)) == n and all(1 <= len(tokens) <= 4 for tokens in tokens_in(reply.json))
        else:
            message = error_of(reply, 400)["message"]
            assert not valid or any(word in message for word in ("context", "not be empty"))
    assert counters(port)["failed"] == 0


# 6. Chapter 03 ---------------------------------------------------------------------------------------------------

def make_offload(tiny_engine, end_tokens=None, **options):
    """Chapter 03's engine on the model of chapter 01's. To load is always estimated to be faster than to compute."""
    engine = offload.Engine(tiny_engine.model, tiny_engine.tokenizer,
                            tiny_engine.end_tokens if end_tokens is None else end_tokens,
                            **{"blocks": 64, "block_size": 4, "cpu_blocks": 64, "bytes_per_second": 5e7, **options})
    engine.seconds_to_load = lambda *_, **__: 1e-9
    return engine


@contextmanager
def serving_offload(engine):
    """-> the port. Afterwards nothing is on its way, every block of both tiers is back, and everybody is counted once."""
    try:
        with Serving(engine) as port:
            yield port
            eventually(lambda: over(engine))
            engine.flush()
            engine.check_integrity()
            counts = engine.counters()
            for name in ("running", "waiting", "blocks_referenced", "cpu_blocks_referenced", "swaps_under_way"):
                assert counts[name] == 0, name
            assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"] == engine.pool.size
            assert counts["cpu_blocks_free"] + counts["cpu_blocks_cached"] == counts["cpu_blocks"] == engine.host.size
            assert counts["finished"] + counts["failed"] + counts["cancelled"] == counts["requests"]
    finally:
        engine.close()


def settled(engine):
    eventually(lambda: over(engine))
    engine.flush()


WORDS = "What was said before must not be computed again. "


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_offload_after_says_whether_the_blocks_go_to_the_host(tiny_engine, route):
    engine = make_offload(tiny_engine)
    question = dict(messages=[dict(role="user", content=WORDS)]) if "chat" in route else dict(prompt=WORDS)
    texts, kept = [], []
    with serving_offload(engine) as port:
        for number, asked in enumerate((dict(offload_after=False), dict(offload_after=True), dict(), dict(offload_after=None))):
            before = counters(port)["swap_outs"]
            reply = ask(port, dict(question, max_tokens=6, temperature=0, cache_salt=str(number), **asked), route)
            assert reply.status_code == 200
            texts.append(reply.json.get("text") or reply.json["choices"][0])
            settled(engine)
            kept.append(counters(port)["swap_outs"] - before)
    assert kept[0] == 0 < kept[1] == kept[2] == kept[3] and all(text == texts[0] for text in texts)


@pytest.fixture(scope="module")
def offload_port(tiny_engine):
    with serving_offload(make_offload(tiny_engine)) as port:
        yield port


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["yes", "true", 0, 1, 1.0, [], {}, [True]], ids=repr)
def test_a_wrong_offload_after_is_refused_by_name(offload_port, route, body, stream, value):
    message = error_of(ask(offload_port, dict(body, offload_after=value, stream=stream), route), 400)["message"]
    assert message == "offload_after must be true or false."


def test_chapters_that_have_no_host_tier_do_not_know_offload_after(port, tiny_engine):
    for message in (error_of(ask(port, dict(ASK, offload_after=True)), 400)["message"],
                    error_of(client_of(tiny_engine).post("/generate", json=dict(ASK, offload_after=True)), 400)["message"]):
        assert "Unknown field 'offload_after'" in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_where_its_blocks_came_from_and_health_counts_them(tiny_engine, stream):
    engine, body = make_offload(tiny_engine), dict(prompt=WORDS * 2, max_tokens=6, stream=stream)
    prompt = len(tiny_engine.encode(body["prompt"], None)[0])
    most, full, block_bytes = -(-prompt // 4), (prompt - 1) // 4, engine.pool.kv[:, :, 0].nbytes
    expected = tokens_of(tiny_engine, body)
    saved = (prompt + len(expected) - 1) // 4                       # the last token's keys and values are not computed

    def reply() -> dict:
        got = ask(port, body)
        result = events(got)[-1]["result"] if stream else got.json
        settled(engine)
        assert result["tokens"] == expected and result["link"] == "modelled link, 0.05 GB/s"
        assert result["usage"]["cached_tokens"] == 4 * (result["blocks"]["gpu_hits"] + result["blocks"]["cpu_hits"])
        return result
    with serving_offload(engine) as port:
        first, second = reply(), reply()
        offload.empty(engine)
        third = reply()
        offload.empty(engine)
        engine.seconds_to_load = lambda *_, **__: 1e9
        fourth = reply()
        counts = counters(port)
    assert [result["source"] for result in (first, second, third, fourth)] == ["miss", "gpu_hit", "cpu_hit", "miss"]
    assert first["blocks"] == fourth["blocks"] == dict(gpu_hits=0, cpu_hits=0, misses=most)
    assert second["blocks"] == dict(gpu_hits=full, cpu_hits=0, misses=most - full)
    assert third["blocks"] == dict(gpu_hits=0, cpu_hits=full, misses=most - full)
    assert first["choice"] is second["choice"] is None
    for result, chosen in ((third, "load"), (fourth, "recompute")):
        assert result["choice"]["chosen"] == chosen
        assert result["choice"]["load_ms"] >= 0 <= result["choice"]["recompute_ms"] and len(result["choice"]) == 3
    assert (counts["gpu_hits"], counts["cpu_hits"], counts["misses"]) == (full, full, 4 * most - 2 * full)
    assert (counts["swap_ins"], counts["bytes_in"], counts["recomputed_hits"]) == (full, full * block_bytes, full)
    assert (counts["swap_outs"], counts["bytes_out"]) == (saved, saved * block_bytes)
    assert counts["transfer_errors"] == counts["cpu_evictions"] == 0 and counts["cpu_blocks_cached"] == saved
    assert counts["link"] == "modelled link, 0.05 GB/s"


def test_health_of_chapter_03_shows_all_counters(tiny_engine):
    engine = make_offload(tiny_engine, cpu_blocks=40)
    with serving_offload(engine) as port:
        counts = counters(port)
    for name in "gpu_hits cpu_hits misses swap_ins swap_outs cpu_evictions bytes_in bytes_out transfer_errors".split():
        assert counts[name] == 0, name
    assert counts["cpu_blocks"] == counts["cpu_blocks_free"] == 40 and counts["cpu_blocks_cached"] == 0


def test_replies_are_json_also_where_no_prefill_has_been_measured(tiny_engine):
    """The estimate is infinite then, which JSON cannot say, and a browser does not read."""
    engine, body = make_offload(tiny_engine), dict(prompt="Hello, hello", max_tokens=2)
    with serving_offload(engine) as port:
        assert ask(port, body).status_code == 200
        settled(engine)
        offload.empty(engine)
        engine.prefills.clear()
        reply = ask(port, body)
    assert reply.json["source"] == "cpu_hit" and reply.json["choice"]["chosen"] == "load"

    def refuse(constant):
        raise AssertionError(f"{constant} in a reply")
    json.loads(reply.data, parse_constant=refuse)


def test_a_crowd_over_two_small_tiers_gets_the_tokens_of_chapter_01_while_some_hang_up(tiny_engine):
    one_by_one = another(tiny_engine, end_tokens=frozenset())
    engine = make_offload(tiny_engine, frozenset(), blocks=24, cpu_blocks=40, max_running=6, max_waiting=64)
    beginnings = [f"{number}: {word} was said before, " for number, word in enumerate(("much", "more", "most", "little", "less"))]
    asked = []
    for number in range(48):
        kind = {2: LEAVE_EARLY, 5: LEAVE_LATE}.get(number % 8, STAY)
        prompt = beginnings[number * 3 % 5] + "and more " * (number % 3) + str(number % 7)
        asked.append((kind, dict(prompt=prompt, max_tokens=30 if kind == LEAVE_LATE else 4 + number % 9,
                                 offload_after=number % 6 > 0, stream=kind == LEAVE_LATE or number % 2 == 0)))

    def client(kind, body):
        with closing(sent(port, body)) as connection:
            if kind == LEAVE_EARLY:
                return None
            response = connection.getresponse()
            if kind == LEAVE_LATE:
                response.readline()
                response.close()
                return None
            return Reply(response)

    with serving_offload(engine) as port:
        with ThreadPoolExecutor(12) as pool:
            replies = [pool.submit(client, *one) for one in asked]
        for (kind, body), reply in zip(asked, replies):
            if kind == STAY:
                reply = reply.result()
                result = events(reply)[-1]["result"] if body["stream"] else reply.json
                assert result["tokens"] == one_by_one.generate(body["prompt"], max_tokens=body["max_tokens"]).tokens
        settled(engine)
        counts = counters(port)
        # And in the end both tiers still hold what they say
        last = dict(prompt=asked[0][1]["prompt"], max_tokens=8)
        expected = one_by_one.generate(**last).tokens
        assert ask(port, last).json["tokens"] == expected
        settled(engine)
        offload.empty(engine)
        again = ask(port, last).json
    stayed = sum(kind == STAY for kind, _ in asked)
    assert again["tokens"] == expected and again["source"] == "cpu_hit"
    assert counts["failed"] == counts["transfer_errors"] == 0 and counts["finished"] >= stayed
    assert counts["swap_ins"] > 0 < counts["swap_outs"] and counts["evictions"] > 0 < counts["cpu_evictions"]


# 7. Chapter 04 ---------------------------------------------------------------------------------------------------

STORY = "It was a long story, and it began with a letter. " * 4         # three chunks of 64 tokens, and the fourth begins
STATES = 3 * 64 * 4                # bytes of a token's hidden states: layers, width, float32


def make_hidden(tiny_engine, end_tokens=None, **options):
    """Chapter 04's engine on the model of chapter 01's. To restore is always estimated to be faster than to compute."""
    engine = hidden.Engine(tiny_engine.model, tiny_engine.tokenizer,
                           tiny_engine.end_tokens if end_tokens is None else end_tokens,
                           **{"blocks": 256, "block_size": 4, "cpu_chunks": 32, "bytes_per_second": 5e7, **options})
    engine.seconds_to_restore = lambda *_, **__: 1e-9
    return engine


@contextmanager
def serving_hidden(engine):
    """-> the port. Afterwards nothing is on its way, every block and every chunk is back, and everybody is counted once."""
    try:
        with Serving(engine) as port:
            yield port
            settled(engine)
            engine.check_integrity()
            counts = engine.counters()
            for name in ("running", "waiting", "blocks_referenced", "chunks_referenced"):
                assert counts[name] == 0, name
            assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"] == engine.pool.size
            if "cells" in counts:
                assert counts["chunks_cached"] == counts["chunks"] and counts["cells"] == engine.chunks.size
            else:
                assert counts["chunks_free"] + counts["chunks_cached"] == counts["chunks"] == engine.chunks.size
            assert counts["finished"] + counts["failed"] + counts["cancelled"] == counts["requests"]
            assert not (engine.restorations or engine.line or engine.saving)
            assert not (engine.landing.taken or engine.reading.taken or engine.saver.buffer.taken)
    finally:
        engine.close()
        engine.saver.close()


def forget(engine):
    """The device lost all that it had cached, as if others had needed it."""
    settled(engine)
    offload.empty(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "in files"])
def test_a_reply_says_what_was_restored_and_how_and_health_counts_it(tiny_engine, tmp_path, stream, on_disk):
    engine = make_hidden(tiny_engine, directories=[tmp_path] if on_disk else [])

    def reply(text: str) -> dict:
        body = dict(messages=[dict(role="user", content=text)], max_tokens=6, stream=stream)
        got = ask(port, body)
        result = events(got)[-1]["result"] if stream else got.json
        settled(engine)
        assert result["tokens"] == tokens_of(tiny_engine, body) and result["link"] == "modelled link, 0.05 GB/s"
        return result
    with serving_hidden(engine) as port:
        first, second = reply(STORY), reply(STORY)
        forget(engine)
        third = reply(STORY)
        forget(engine)
        short = reply(STORY[:80])                                   # restores a chunk, and computes what follows
        mixed = reply(STORY)
        forget(engine)
        engine.seconds_to_restore = lambda *_, **__: 1e9
        refused = reply(STORY)
        counts = counters(port)
    results = (first, second, third, short, mixed, refused)
    assert [result["source"] for result in results] == ["miss", "gpu_hit", "hidden", "hidden", "mixed", "miss"]
    # The device holds more than 192 tokens, but the fourth chunk must be computed from its beginning to be kept
    assert [result["usage"]["cached_tokens"] for result in results] == [0, 192, 192, 64, 192, 0]
    assert first["choice"] is second["choice"] is first["restoration"] is second["restoration"] is refused["restoration"] is None
    for result, chosen in ((third, "restore"), (short, "restore"), (mixed, "restore"), (refused, "recompute")):
        assert result["choice"]["chosen"] == chosen and len(result["choice"]) == 3
        assert result["choice"]["restore_ms"] >= 0 <= result["choice"]["recompute_ms"]
    brought = [result["restoration"] for result in (third, short, mixed)]
    tokens = [restoration["tokens"] for restoration in brought]
    assert tokens[:2] == [192, 64] and 64 < 192 - tokens[2] < 128, "the device held what is not restored"
    for restoration, count in zip(brought, tokens):
        assert set(restoration) == {"tokens", "bytes", "start_ms", "ms", "tokens_per_second", "load_bubble", "compute_bubble"}
        assert restoration["bytes"] == count * STATES and restoration["ms"] > 0 < restoration["tokens_per_second"]
        assert 0 <= restoration["load_bubble"] <= 1 and 0 <= restoration["compute_bubble"] <= 1
    for result in (third, short, mixed):
        lanes = {lane: [span["label"] for span in result["timeline"] if span["lane"] == lane] for lane in ("load", "storage")}
        layers = ["layer 0", "layer 1", "layer 2"]
        assert lanes == dict(load=layers, storage=layers if on_disk else [])
    assert (counts["restorations"], counts["layers_projected"], counts["restored_tokens"]) == (3, 9, sum(tokens))
    assert counts["bytes_in"] == sum(tokens) * STATES and counts["recomputed_hits"] == 3 and counts["bytes_out"] > 0
    assert counts["transfer_errors"] == counts["chunks_missed"] == counts["chunks_dropped"] == counts["save_errors"] == 0
    if on_disk:
        assert counts["file_reads"] == 3 * (3 + 1 + 2)                    # layers and chunks
        assert counts["file_writes"] == counts["chunks_saved"] and counts["file_errors"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openais_routes_say_the_same_after_a_restoration(tiny_engine, route, stream):
    body = dict(messages=[dict(role="user", content=STORY)]) if "chat" in route else dict(prompt=STORY)
    body |= dict(max_tokens=9, temperature=0)
    engine = make_hidden(tiny_engine)
    with serving_hidden(engine) as port:
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
            said, usage = (again["choices"][0]["message"]["content"] if "chat" in route else again["choices"][0]["text"],
                           again["usage"])
            assert again["choices"] == first["choices"] and set(again) == set(first)
    assert said == (first["choices"][0]["message"]["content"] if "chat" in route else first["choices"][0]["text"])
    assert first["usage"]["prompt_tokens_details"] == dict(cached_tokens=0)
    assert usage["prompt_tokens_details"] == dict(cached_tokens=192) and usage["total_tokens"] == first["usage"]["total_tokens"]
    assert engine.counts["restorations"] == 1


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_save_says_whether_hidden_states_are_kept(tiny_engine, route):
    engine, texts, kept = make_hidden(tiny_engine), [], []
    question = dict(messages=[dict(role="user", content=STORY)]) if "chat" in route else dict(prompt=STORY)
    with serving_hidden(engine) as port:
        for number, asked in enumerate((dict(save=False), dict(save=True), dict(), dict(save=None), dict(save=False, n=2))):
            before = counters(port)
            reply = ask(port, dict(question, max_tokens=6, temperature=0, cache_salt=str(number), **asked), route)
            assert reply.status_code == 200
            answers = reply.json.get("choices") or reply.json.get("results") or [reply.json]
            texts.append([answer["message"]["content"] if "chat" in route else answer["text"] for answer in answers])
            settled(engine)
            after = counters(port)
            kept.append(after["chunks_saved"] - before["chunks_saved"])
            assert (after["bytes_out"] > before["bytes_out"]) == (kept[-1] > 0)
    assert kept == [0, 3, 3, 3, 0] and texts == [texts[0]] * 4 + [texts[0] * 2]


@pytest.fixture(scope="module")
def hidden_port(tiny_engine):
    with serving_hidden(make_hidden(tiny_engine)) as port:
        yield port


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["yes", "true", 0, 1, 1.0, [], {}, [True]], ids=repr)
def test_a_wrong_save_is_refused_by_name(hidden_port, route, body, stream, value):
    message = error_of(ask(hidden_port, dict(body, save=value, stream=stream), route), 400)["message"]
    assert message == "save must be true or false."


def test_other_chapters_do_not_know_save_and_this_one_no_offload_after(port, offload_port, hidden_port, tiny_engine):
    for one, field in ((port, "save"), (offload_port, "save"), (hidden_port, "offload_after")):
        message = error_of(ask(one, {**ASK, field: True}), 400)["message"]
        assert f"Unknown field '{field}'" in message and "cache_salt" in message
    assert "Unknown field 'save'" in error_of(client_of(tiny_engine).post("/generate", json=dict(ASK, save=True)), 400)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_samples_share_what_was_restored_for_their_prompt(tiny_engine, stream):
    engine, body = make_hidden(tiny_engine), dict(prompt=STORY, max_tokens=12, temperature=1.0, seed=7)
    expected = [tiny_engine.generate(**{**body, "seed": 7 + number}).tokens for number in range(3)]
    with serving_hidden(engine) as port:
        assert tokens_in(ask(port, dict(body, n=3)).json) == expected
        forget(engine)
        reply = ask(port, dict(body, n=3, stream=stream))
        if stream:
            ended = {event["index"]: event["result"] for event in events(reply) if "result" in event}
            results = [ended[number] for number in range(3)]
        else:
            results = reply.json["results"]
    assert [result["tokens"] for result in results] == expected and len(set(map(tuple, expected))) == 3
    for result in results:
        assert (result["source"], result["usage"]["cached_tokens"], result["choice"]["chosen"]) == ("hidden", 192, "restore")
    assert engine.counts["restorations"] == 1 and engine.counts["restored_tokens"] == 192


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "in files"])
def test_a_salt_never_restores_the_states_of_another(tiny_engine, tmp_path, on_disk):
    engine = make_hidden(tiny_engine, directories=[tmp_path] if on_disk else [])
    body = dict(prompt=STORY, max_tokens=6)
    expected = tokens_of(tiny_engine, body)

    def source(**fields) -> str:
        forget(engine)
        result = ask(port, dict(body, **fields)).json
        assert result["tokens"] == expected and result["usage"]["cached_tokens"] == (192 if result["source"] == "hidden" else 0)
        return result["source"]
    with serving_hidden(engine) as port:
        salts = [dict(), dict(cache_salt="Anna"), dict(cache_salt="Ben"), dict(cache_salt="anna"), dict(cache_salt="x" * 256)]
        assert [source(**salt) for salt in salts] == ["miss"] * 5
        assert [source(**salt) for salt in (*salts, dict(cache_salt=""), dict(cache_salt=None))] == ["hidden"] * 7


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "in files"])
def test_health_of_chapter_04_shows_all_counters(tiny_engine, tmp_path, on_disk):
    engine = make_hidden(tiny_engine, directories=[tmp_path / "a", tmp_path / "b"] if on_disk else [])
    zero = set("restorations layers_projected restored_tokens bytes_in bytes_out chunks_saved chunks_dropped chunks_missed "
               "recomputed_hits transfer_errors chunks_cached chunks_referenced chunk_evictions save_errors".split())
    files = {f"file_{name}" for name in "reads read_bytes writes write_bytes evictions errors bytes".split()}
    with serving_hidden(engine) as port:
        before = counters(port)
        assert all(before[name] == 0 for name in zero) and before["chunks"] == before["chunks_free"] == 32
        assert before["link"] == "modelled link, 0.05 GB/s"
        assert {name for name in before if name.startswith("file")} == (files if on_disk else set())
        assert all(before[name] == 0 for name in before if name.startswith("file"))
        assert ask(port, dict(prompt=STORY, max_tokens=2)).status_code == 200
        settled(engine)
        after = counters(port)
    assert after["chunks_saved"] == 3 and after["chunks_cached"] == (0 if on_disk else 3)
    assert set(after) == set(before)
    if on_disk:
        sizes = [file.stat().st_size for folder in ("a", "b") for file in (tmp_path / folder).iterdir()]
        assert (after["file_writes"], after["file_write_bytes"], after["file_bytes"]) == (3, sum(sizes), sum(sizes))


def test_who_asks_a_server_that_was_started_again_finds_the_files_of_the_first(tiny_engine, tmp_path):
    body = dict(prompt=STORY + "And then?", max_tokens=6)
    with serving_hidden(make_hidden(tiny_engine, directories=[tmp_path])) as port:
        assert ask(port, dict(prompt=STORY, max_tokens=6)).json["source"] == "miss"
    with serving_hidden(make_hidden(tiny_engine, directories=[tmp_path])) as port:
        reply = ask(port, body)

    def refuse(constant):
        raise AssertionError(f"{constant} in a reply, which a browser does not read")
    result = json.loads(reply.data, parse_constant=refuse)          # no prefill has been measured there, and its estimate is inf
    assert (result["source"], result["usage"]["cached_tokens"], result["choice"]["recompute_ms"]) == ("hidden", 192, None)
    assert result["tokens"] == tokens_of(tiny_engine, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "in files"])
def test_a_client_that_hangs_up_in_the_middle_of_a_restoration_frees_everything(tiny_engine, tmp_path, stream, on_disk):
    """Somebody else decodes, and between two of his tokens the link, which is slow, has not brought a layer."""
    engine = make_hidden(tiny_engine, frozenset(), bytes_per_second=1e6, directories=[tmp_path] if on_disk else [])
    other, waits, restoring = dict(prompt="Meanwhile", max_tokens=60), threading.Event(), []

    def wait(_):
        if not waits.is_set() and engine.restorations:              # before that, chunks are looked for
            restoring.extend(request for request in engine.running if request.restoration)
            waits.set()
            eventually(lambda: engine.cancelled)
    with serving_hidden(engine) as port, ThreadPoolExecutor() as pool:
        assert ask(port, dict(prompt=STORY, max_tokens=2)).status_code == 200
        forget(engine)
        opened = threading.Event()
        before_each_pass(engine, lambda number: eventually(opened.is_set) if number == 1 else wait(number))
        goes_on = pool.submit(ask, port, other)
        eventually(lambda: engine.counters()["running"] == 1)
        with closing(sent(port, dict(prompt=STORY, max_tokens=100, stream=stream))):
            eventually(lambda: engine.counters()["requests"] == 3)
            opened.set()
            assert waits.wait(TIMEOUT)
            assert len(restoring) == 1 and restoring[0].source is None and engine.counters()["restorations"] == 1
        assert goes_on.result().json["tokens"] == tokens_of(another(tiny_engine, end_tokens=frozenset()), other)
        settled(engine)
        counts = counters(port)
        assert (counts["cancelled"], counts["finished"], counts["blocks_referenced"], counts["chunks_referenced"]) == (1, 2, 0, 0)
        assert counts["layers_projected"] < 3 and not engine.landing.taken and not engine.reading.taken
        again = ask(port, dict(prompt=STORY, max_tokens=4)).json
        assert again["source"] == "hidden" and again["tokens"] == tokens_of(
            another(tiny_engine, end_tokens=frozenset()), dict(prompt=STORY, max_tokens=4))


@pytest.mark.parametrize("options", [dict(), dict(directories=True), dict(direct=True, layout="token-major"),
                                     dict(blocks=150, cpu_chunks=9), dict(token_budget=40, save_threads=1)], ids=str)
def test_16_clients_at_once_with_restorations_get_the_tokens_of_chapter_01(tiny_engine, tmp_path, options):
    if options.get("directories"):
        options = dict(directories=[tmp_path / "a", tmp_path / "b"])
    engine = make_hidden(tiny_engine, frozenset(), max_running=8, **options)
    one_by_one = another(tiny_engine, end_tokens=frozenset())
    beginnings = [f"{number}: {STORY}"[:150] for number in range(4)]
    asked = [dict(prompt=beginnings[number % 4] + "and so on, " * (number % 3), max_tokens=4 + number, stream=number % 2 == 1,
                  save=number % 5 > 0) for number in range(16)]
    with serving_hidden(engine) as port, ThreadPoolExecutor(16) as pool:
        for beginning in beginnings:
            assert ask(port, dict(prompt=beginning, max_tokens=2)).status_code == 200
        forget(engine)
        hold(engine, until=lambda: engine.counters()["requests"] == 4 + 16)
        replies = list(pool.map(lambda body: ask(port, body), asked))
        results = [events(reply)[-1]["result"] if body["stream"] else reply.json for body, reply in zip(asked, replies)]
        settled(engine)
        counts = counters(port)
    for body, result in zip(asked, results):
        assert result["tokens"] == one_by_one.generate(body["prompt"], max_tokens=body["max_tokens"]).tokens
    assert counts["finished"] == 20 and counts["failed"] == counts["transfer_errors"] == counts["save_errors"] == 0
    assert counts["restorations"] >= 2 and {"hidden", "mixed"} & {result["source"] for result in results}
    assert counts["restored_tokens"] >= 2 * 128


# 8. Chapter 05 ---------------------------------------------------------------------------------------------------

# Of a layer, for 64 and 256 tokens. A layer recomputed, one projected and one loaded end first, one of each
KNOWN = bubble.Profile([64, 256], [1e-3, 4e-3], [1.5e-3, 6e-3], [4e-3, 17e-3], [1.3e-3, 5.2e-3], 5e7, 5e7)
MIXES = {"auto": "RHK", "naive": "RKK", "hidden-only": "HHH", "kv-only": "KKK"}


def make_bubble(tiny_engine, end_tokens=None, **options):
    """Chapter 05's engine on the model of chapter 01's, with a profile in which to restore is always faster than to compute.
    It learns nothing of this machine, so that its plans stay."""
    engine = bubble.Engine(tiny_engine.model, tiny_engine.tokenizer,
                           tiny_engine.end_tokens if end_tokens is None else end_tokens,
                           **{"blocks": 256, "block_size": 4, "cpu_chunks": 32, "bytes_per_second": 5e7, "known": KNOWN,
                              **options})
    engine.load_link.note = engine.learn = lambda *_: None
    return engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MIXES)
def test_a_reply_says_what_was_planned_and_how_it_came_back(tiny_engine, mode, stream):
    engine, letters = make_bubble(tiny_engine, mode=mode), MIXES[mode]

    def reply() -> dict:
        body = dict(messages=[dict(role="user", content=STORY)], max_tokens=6, stream=stream)
        got = ask(port, body)
        settled(engine)
        result = events(got)[-1]["result"] if stream else got.json
        assert result["tokens"] == tokens_of(tiny_engine, body)
        return result
    with serving_hidden(engine) as port:
        first = reply()
        forget(engine)
        again, counts = reply(), counters(port)
    restoration, seconds = again["restoration"], engine.plan(192)[1]
    assert (first["source"], first["restoration"], first["choice"]) == ("miss", None, None)
    assert (again["source"], again["usage"]["cached_tokens"], again["choice"]["chosen"]) == ("planned", 192, "restore")
    assert set(restoration) == {"tokens", "bytes", "start_ms", "ms", "tokens_per_second", "load_bubble", "compute_bubble", "plan",
                                "layers", "predicted_ms", "bound_ms"}
    assert restoration["plan"] == letters == str(engine.plan(192)[0])
    assert restoration["layers"] == dict(recompute=letters.count("R"), hidden=letters.count("H"), kv=letters.count("K"))
    assert restoration["bytes"] == 192 * 64 * 4 * (3 - letters.count("R"))         # K and V are as wide as a hidden state here
    assert restoration["predicted_ms"] == pytest.approx(seconds * 1e3, abs=0.001)
    assert restoration["bound_ms"] == pytest.approx(bubble.bound_seconds(engine.costs(0, 192), 3) * 1e3, abs=0.001)
    assert 0 < restoration["bound_ms"] <= restoration["predicted_ms"] <= again["choice"]["restore_ms"] + 0.001
    load = {span["label"] for span in again["timeline"] if span["lane"] == "load"}
    assert load == {f"{letter} layer {layer}" for layer, letter in enumerate(letters) if letter != "R"}
    assert counts.get("layers_recomputed", 0) == letters.count("R") and (counts["layers_projected"] > 0) == ("H" in letters)
    assert counts["transfer_errors"] == counts["chunks_missed"] == counts["chunks_dropped"] == counts["save_errors"] == 0


def test_health_of_chapter_05_shows_the_plan_and_the_cells(tiny_engine):
    engine = make_bubble(tiny_engine)
    with serving_hidden(engine) as port:
        before = counters(port)
        assert ask(port, dict(prompt=STORY, max_tokens=2)).status_code == 200
        settled(engine)
        after = counters(port)
        forget(engine)
        assert ask(port, dict(prompt=STORY, max_tokens=2)).json["source"] == "planned"
        settled(engine)
        restored = counters(port)
    assert set(before) == set(after) == set(restored)
    assert before["cells"] == before["cells_free"] == 32 * 3 and before["chunks_cached"] == before["layers_recomputed"] == 0
    assert after["plan"] == str(engine.plan(256)[0]) and before["plan"] in (None, after["plan"])
    assert (after["chunks_saved"], after["chunks_cached"], after["chunks"]) == (3, 3, 3)
    assert after["cells"] - after["cells_free"] == 3 * 2, "of each chunk one layer's states are kept, and another's K and V"
    assert after["plans"] > before["plans"] and restored["cells_free"] == after["cells_free"]
    assert (restored["layers_recomputed"], restored["restored_tokens"]) == (1, 192)


@pytest.mark.parametrize("mode", MIXES)
def test_a_chunk_that_the_answer_fills_is_kept_as_those_before_it(tiny_engine, mode):
    """The last chunk of a prompt is seldom whole: its other tokens are those of the answer."""
    engine = make_bubble(tiny_engine, frozenset(), mode=mode)
    expected = tokens_of(another(tiny_engine, end_tokens=frozenset()), dict(prompt=STORY[:150], max_tokens=80))
    with serving_hidden(engine) as port:
        assert ask(port, dict(prompt=STORY[:150], max_tokens=80)).json["tokens"] == expected
        settled(engine)
        assert counters(port)["chunks_saved"] == 3 and not engine.saving
        assert list(engine.chunks.letters.values()) == [MIXES[mode]] * 3


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_save_says_in_chapter_05_whether_what_was_planned_is_kept(tiny_engine, route):
    engine, texts, kept = make_bubble(tiny_engine), [], []
    question = dict(messages=[dict(role="user", content=STORY)]) if "chat" in route else dict(prompt=STORY)
    with serving_hidden(engine) as port:
        for number, asked in enumerate((dict(save=False), dict(save=True), dict(), dict(save=None), dict(save=False, n=2))):
            before = counters(port)
            reply = ask(port, dict(question, max_tokens=6, temperature=0, cache_salt=str(number), **asked), route)
            assert reply.status_code == 200
            answers = reply.json.get("choices") or reply.json.get("results") or [reply.json]
            texts.append([answer["message"]["content"] if "chat" in route else answer["text"] for answer in answers])
            settled(engine)
            after = counters(port)
            kept.append((after["chunks_saved"] - before["chunks_saved"], before["cells_free"] - after["cells_free"]))
            assert (after["bytes_out"] > before["bytes_out"]) == (kept[-1][0] > 0)
    assert kept == [(0, 0), (3, 6), (3, 6), (3, 6), (0, 0)] and texts == [texts[0]] * 4 + [texts[0] * 2]


@pytest.fixture(scope="module")
def bubble_port(tiny_engine):
    with serving_hidden(make_bubble(tiny_engine)) as port:
        yield port


@pytest.mark.parametrize("route,body", [("/generate", ASK), ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("value", ["yes", 0, 1.0, [], {}], ids=repr)
def test_a_wrong_save_is_refused_by_name_in_chapter_05_too(bubble_port, route, body, value):
    assert error_of(ask(bubble_port, dict(body, save=value), route), 400)["message"] == "save must be true or false."
    assert "Unknown field 'plan'" in error_of(ask(bubble_port, dict(body, plan="auto"), route), 400)["message"]


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(bodies(), st.booleans()), min_size=1, max_size=3))
def test_nothing_that_is_asked_of_chapter_05_is_a_500(bubble_port, asked):
    asked = [(valid, dict(body, save=save) if isinstance(body, dict) else body) for (valid, body), save in asked]
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda one: ask(bubble_port, one[1]), asked))
    for (valid, body), reply in zip(asked, replies):
        if reply.mimetype == "text/event-stream":
            assert all("result" in event for event in events(reply) if "text" not in event)
        elif reply.status_code != 200:
            message = error_of(reply, 400)["message"]
            assert not valid or any(word in message for word in ("context", "not be empty"))
    assert counters(bubble_port)["failed"] == 0


@pytest.mark.parametrize("mode", [*MIXES, "token-wise", "token-wise-rounded"])
def test_16_clients_at_once_with_mixed_restorations_get_the_tokens_of_chapter_01(tiny_engine, mode):
    engine = make_bubble(tiny_engine, frozenset(), mode=mode, max_running=8)
    one_by_one = another(tiny_engine, end_tokens=frozenset())
    beginnings = [f"{number}: {STORY}"[:150] for number in range(4)]
    asked = [dict(prompt=beginnings[number % 4] + "and so on, " * (number % 3), max_tokens=4 + number, stream=number % 2 == 1,
                  save=number % 5 > 0) for number in range(16)]
    with serving_hidden(engine) as port, ThreadPoolExecutor(16) as pool:
        for beginning in beginnings:
            assert ask(port, dict(prompt=beginning, max_tokens=2)).status_code == 200
        forget(engine)
        hold(engine, until=lambda: engine.counters()["requests"] == 4 + 16)
        replies = list(pool.map(lambda body: ask(port, body), asked))
        results = [events(reply)[-1]["result"] if body["stream"] else reply.json for body, reply in zip(asked, replies)]
        settled(engine)
        counts = counters(port)
    for body, result in zip(asked, results):
        assert result["tokens"] == one_by_one.generate(body["prompt"], max_tokens=body["max_tokens"]).tokens
    assert counts["finished"] == 20 and counts["failed"] == counts["transfer_errors"] == counts["save_errors"] == 0
    assert counts["restorations"] >= 2 and counts["restored_tokens"] >= 2 * 128


# 9. Chapter 06 ---------------------------------------------------------------------------------------------------

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


def test_fields_of_chapter_06_are_unknown_to_the_others_and_theirs_to_it(port, bubble_port, cake_port):
    for one, field, value in ((port, "mode", "both"), (port, "gpu_share", 1), (port, "save", True), (bubble_port, "mode", "both"),
                              (bubble_port, "gpu_share", 1), (cake_port, "offload_after", True), (cake_port, "plan", "auto")):
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
