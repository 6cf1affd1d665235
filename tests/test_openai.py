"""OpenAI's own Python client against the server: what it sends is understood, and what it makes of the answers is right."""
import asyncio
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from conftest import chapter
from test_app import Serving, another, eventually
from test_server import TIMEOUT, hold, make, make_hidden, over, serving, serving_hidden, settled

from common import backends

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -r requirements-dev.txt")

tiered = chapter("07_tiered_storage")
HELLO = [dict(role="user", content="Hello")]
STORY = "It was a long story, and it began with a letter. " * 2        # 98 tokens, six blocks of 16 and a bit
GREEDY = dict(model="tiny", max_tokens=8, temperature=0)
USAGE = dict(stream=True, stream_options=dict(include_usage=True))


def options(port: int, **more) -> dict:
    return dict(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=TIMEOUT, **{"max_retries": 0, **more})


@contextmanager
def connected(port: int, **more):
    """A client that asks once, and asks no proxy."""
    with openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), **options(port, **more)) as client:
        yield client


@pytest.fixture(scope="module")
def client(tiny_engine):
    """Of a server of chapter 02 that all tests share that leave it as it was."""
    with serving(make(tiny_engine)) as port, connected(port) as client:
        yield client


def joined(stream, chat: bool) -> tuple[str, str, object]:
    """-> the text of a stream, why it ended, and its usage."""
    *chunks, last = stream
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    assert {chunk.object for chunk in (*chunks, last)} == {"chat.completion.chunk" if chat else "text_completion"}
    choices = [choice for chunk in chunks for choice in chunk.choices]
    if chat:
        assert choices[0].delta.role == "assistant"
    *others, reason = [choice.finish_reason for choice in choices]
    assert not any(others)
    return "".join((choice.delta.content if chat else choice.text) or "" for choice in choices), reason, last.usage


# 1. Answers, in chapters 01, 02 and 07 ---------------------------------------------------------------------------

@contextmanager
def alone(engine):
    with Serving(engine) as port:
        yield port


@contextmanager
def stored(tiny_engine):
    """Chapter 07's engine on storage. It always estimates to load faster than to compute."""
    engine = tiered.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, blocks=64, cpu_blocks=64,
                           bytes_per_second=5e8, prefetch_policy="wait_complete", prefetch_threshold=16)
    engine.seconds_to_load, engine.seconds_to_compute = lambda *_, **__: 1e-9, lambda *_: 1e3
    engine.attach(backends.open_backend(f"memory://{uuid.uuid4().hex}"), "memory")          # which a process has only once
    try:
        with serving(engine) as port:
            yield engine, port
            engine.flush()
    finally:
        engine.release()


@contextmanager
def stored_port(tiny_engine):
    with stored(tiny_engine) as (_, port):
        yield port


CHAPTERS = {"01": lambda tiny_engine: alone(another(tiny_engine)), "02": lambda tiny_engine: serving(make(tiny_engine)),
            "07": stored_port}


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_chat_and_a_completion_are_the_engines_own_answers_also_as_streams(tiny_engine, number):
    said = tiny_engine.generate(messages=HELLO, max_tokens=8)
    prompt = tiny_engine.tokenizer.encode("Once upon")                          # a completion has no chat template
    continued = tiny_engine.generate(prompt=prompt, max_tokens=8)
    with CHAPTERS[number](tiny_engine) as port, connected(port) as client:
        chat = client.chat.completions.create(messages=HELLO, **GREEDY)
        assert isinstance(chat, openai.types.chat.ChatCompletion) and chat.object == "chat.completion" and chat.model == "tiny"
        (choice,), usage = chat.choices, chat.usage
        assert (choice.index, choice.message.role, choice.message.content, choice.finish_reason) == (
            0, "assistant", said.text, said.finish_reason)
        assert choice.logprobs is None and not choice.message.tool_calls and not choice.message.refusal
        assert (usage.prompt_tokens, usage.completion_tokens) == (said.usage["prompt_tokens"], len(said.tokens))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

        completion = client.completions.create(prompt="Once upon", **GREEDY)
        assert isinstance(completion, openai.types.Completion) and completion.object == "text_completion"
        assert [(choice.text, choice.finish_reason) for choice in completion.choices] == [
            (continued.text, continued.finish_reason)]
        assert client.completions.create(prompt=prompt, **GREEDY).choices == completion.choices, "token ids"

        for plain, stream in (
                (chat, client.chat.completions.create(messages=HELLO, **USAGE, **GREEDY)),
                (completion, client.completions.create(prompt="Once upon", **USAGE, **GREEDY))):
            is_chat, choice = plain is chat, plain.choices[0]
            text, reason, used = joined(stream, is_chat)
            assert (text, reason) == (choice.message.content if is_chat else choice.text, choice.finish_reason)
            assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (
                plain.usage.prompt_tokens, plain.usage.completion_tokens, plain.usage.total_tokens)


def test_chapter_07_counts_what_comes_from_storage_as_cached(tiny_engine):
    with stored(tiny_engine) as (engine, port), connected(port) as client:
        first = client.completions.create(prompt=STORY, **GREEDY)
        engine.flush()
        tiered.forget(engine)
        again = client.completions.create(prompt=STORY, **GREEDY)
    assert again.choices == first.choices and first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.cached_tokens == 96


# 2. What a request may say ---------------------------------------------------------------------------------------

def test_a_chunk_without_usage_has_none(client):
    assert all(chunk.choices and chunk.usage is None
               for chunk in client.chat.completions.create(messages=HELLO, stream=True, **GREEDY))


def test_the_clients_own_helper_for_streams_puts_the_answer_together(client, tiny_engine):
    text, kinds = tiny_engine.generate(messages=HELLO, max_tokens=8).text, set()
    with client.chat.completions.stream(messages=HELLO, stop=text[-2:], **GREEDY) as stream:        # which takes no cut answers
        for event in stream:
            kinds.add(event.type)
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text.split(text[-2:])[0] and whole.choices[0].finish_reason == "stop"
    assert kinds >= {"chunk", "content.delta", "content.done"}


def test_an_answer_ends_before_a_stop_string(client, tiny_engine):
    text = tiny_engine.generate(messages=HELLO, max_tokens=40).text
    stop = text[4:6]
    for given in (stop, ["never said", stop]):
        choice, = client.chat.completions.create(messages=HELLO, stop=given, **{**GREEDY, "max_tokens": 40}).choices
        assert (choice.message.content, choice.finish_reason) == (text.split(stop)[0], "stop")
    text = tiny_engine.generate(prompt=tiny_engine.tokenizer.encode("Once"), max_tokens=40).text
    streamed, reason, _ = joined(client.completions.create(prompt="Once", stop=text[4:6], **USAGE,
                                                           **{**GREEDY, "max_tokens": 40}), chat=False)
    assert (streamed, reason) == (text.split(text[4:6])[0], "stop")


def test_the_same_seed_gives_the_same_text_and_n_gives_the_seeds_that_follow(client, tiny_engine):
    def texts(**fields):
        reply = client.chat.completions.create(messages=HELLO, model="tiny", max_tokens=12, temperature=2, **fields)
        assert [choice.index for choice in reply.choices] == list(range(fields.get("n", 1)))
        assert reply.usage.completion_tokens <= 12 * fields.get("n", 1)
        return [choice.message.content for choice in reply.choices]
    expected = [tiny_engine.generate(messages=HELLO, max_tokens=12, temperature=2, seed=seed).text for seed in (3, 4, 5)]
    assert texts(seed=3) == texts(seed=3) == expected[:1] and texts(seed=4) == expected[1:2]
    assert texts(seed=3, n=3) == expected and len(set(expected)) == 3

    written = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=tiny_engine.encode(None, HELLO)[0], n=2, seed=3, model="tiny", max_tokens=12,
                                           temperature=2, stream=True):
        for choice in chunk.choices:
            written[choice.index] += choice.text
    assert list(written.values()) == expected[:2]


def test_max_completion_tokens_is_taken_for_max_tokens(client):
    reply = client.chat.completions.create(messages=HELLO, model="tiny", max_completion_tokens=3, temperature=0)
    assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"


def test_the_parts_of_a_message_are_its_text(client):
    parts = [dict(role="system", content="Say it."),
             dict(role="user", content=[dict(type="text", text="Hel"), dict(type="text", text="lo")])]
    whole = [parts[0], *HELLO]
    assert (client.chat.completions.create(messages=parts, **GREEDY).choices
            == client.chat.completions.create(messages=whole, **GREEDY).choices
            != client.chat.completions.create(messages=HELLO, **GREEDY).choices)


def test_usage_says_what_was_cached_and_a_salt_keeps_it_apart(tiny_engine):
    with serving(make(tiny_engine)) as port, connected(port) as client:
        def cached(**fields):
            first = client.completions.create(prompt=STORY, extra_body=fields, **GREEDY)
            again = client.completions.create(prompt=STORY, extra_body=fields, **USAGE, **GREEDY)
            text, _, usage = joined(again, chat=False)
            assert text == first.choices[0].text and first.usage.prompt_tokens == usage.prompt_tokens == len(STORY)
            return [used.prompt_tokens_details.cached_tokens for used in (first.usage, usage)]
        assert cached() == [0, 96] and cached() == [96, 96]
        assert cached(cache_salt="Anna") == [0, 96] and cached(cache_salt="Ben") == [0, 96]


def test_save_is_taken_from_the_extra_body(tiny_engine):
    engine, kept = make_hidden(tiny_engine), []
    with serving_hidden(engine) as port, connected(port) as client:
        for number, save in enumerate((False, True)):
            before = engine.counters()["chunks_saved"]
            client.completions.create(prompt=STORY, extra_body=dict(save=save, cache_salt=str(number)), **GREEDY)
            settled(engine)
            kept.append(engine.counters()["chunks_saved"] - before)
    assert kept == [0, len(STORY) // 64]


def test_the_models_are_the_one_that_is_served(client):
    model, = client.models.list()
    assert (model.id, model.object) == ("tiny", "model")


def test_the_model_is_found_by_its_name_and_others_are_not(client):
    assert client.models.retrieve("tiny") == next(iter(client.models.list()))
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.models.retrieve("another")


# 3. Errors are the client's own exceptions -----------------------------------------------------------------------

@pytest.mark.parametrize("words,fields", [
    ("temperature must be", dict(temperature=-1)), ("n must be", dict(n=0)), ("stop must be", dict(stop="")),
    ("shorten the prompt", dict(messages=[dict(role="user", content="x" * 300)])),
    ("Unknown field 'nonsense'", dict(extra_body=dict(nonsense=1))),
    ("role must be", dict(messages=[dict(role="tool", content="x", tool_call_id="1")])),
    ("content must be", dict(messages=[dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])])),
    ("tools must be", dict(tools=[dict(type="function", function=dict(name="f"))])),
    ("cache_salt must be", dict(extra_body=dict(cache_salt=5))),
])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_asked_wrongly_is_a_bad_request_that_says_what_to_change(client, words, fields, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": HELLO, "stream": stream, **fields})
    error = caught.value
    assert error.status_code == 400 and error.type == "invalid_request_error" and words in error.body["message"]
    assert error.body["message"] in str(error)


def test_what_the_server_does_not_have_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is nothing here"):
        client.embeddings.create(model="tiny", input="Hello")


def test_a_body_that_is_too_large_is_refused_with_413(client):
    with pytest.raises(openai.APIStatusError, match="larger than") as caught:
        client.completions.create(prompt="x" * (1 << 20), **GREEDY)
    assert caught.value.status_code == 413


def test_a_full_line_is_a_rate_limit_and_who_tries_again_is_answered(tiny_engine):
    engine, opened = make(tiny_engine, max_running=1, max_waiting=1), threading.Event()
    hold(engine, until=opened.is_set)
    with (serving(engine) as port, connected(port) as client, connected(port, max_retries=20) as patient,
          ThreadPoolExecutor() as pool):
        served = [pool.submit(client.chat.completions.create, messages=HELLO, **GREEDY)]
        eventually(lambda: engine.counters()["running"] == 1)
        served.append(pool.submit(client.chat.completions.create, messages=HELLO, **GREEDY))
        eventually(lambda: engine.counters()["waiting"] == 1)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="1 requests are waiting") as caught:
                client.chat.completions.create(messages=HELLO, stream=stream, **GREEDY)
            assert caught.value.status_code == 429 and caught.value.type == "rate_limit_error"
        served.append(pool.submit(patient.chat.completions.create, messages=HELLO, **GREEDY))
        eventually(lambda: engine.counters()["refused"] >= 3)
        opened.set()
        said = tiny_engine.generate(messages=HELLO, max_tokens=8).text
        assert [reply.result().choices[0].message.content for reply in served] == [said] * 3


def test_a_server_that_closes_answers_503_also_in_the_middle_of_a_stream(tiny_engine):
    engine = make(tiny_engine, max_running=1)
    waits = hold(engine, until=lambda: engine.closing)
    with serving(engine) as port, connected(port) as client, ThreadPoolExecutor() as pool:
        running = pool.submit(client.chat.completions.create, messages=HELLO, **GREEDY)
        assert waits.wait(TIMEOUT)
        plain = pool.submit(client.chat.completions.create, messages=HELLO, **GREEDY)
        stream = pool.submit(lambda: list(client.chat.completions.create(messages=HELLO, stream=True, **GREEDY)))
        eventually(lambda: engine.counters()["waiting"] == 2)
        engine.close()
        for refused in (plain.exception(TIMEOUT), pytest.raises(
                openai.InternalServerError, client.completions.create, prompt="Hello", **GREEDY).value):
            assert isinstance(refused, openai.APIStatusError) and refused.status_code == 503
            assert refused.type == "unavailable_error" and "shutting down" in str(refused)
        refused = stream.exception(TIMEOUT)                     # the status was out already, so the error is an event
        assert isinstance(refused, openai.APIError) and "shutting down" in refused.message
        assert running.result().choices[0].message.content == tiny_engine.generate(messages=HELLO, max_tokens=8).text


def test_an_error_inside_is_raised_and_the_next_request_is_answered(tiny_engine):
    engine, forward = make(tiny_engine), None

    def broken(batch):
        raise RuntimeError("injected")
    with serving(engine) as port, connected(port) as client:
        engine.forward, forward = broken, engine.forward
        with pytest.raises(openai.InternalServerError, match="An error inside the server") as caught:
            client.chat.completions.create(messages=HELLO, **GREEDY)
        assert caught.value.status_code == 500
        with pytest.raises(openai.APIError, match="An error inside the server"):
            list(client.chat.completions.create(messages=HELLO, stream=True, **GREEDY))
        engine.forward = forward
        assert client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].finish_reason


# 4. Streams that are left, and many at once ----------------------------------------------------------------------

@pytest.mark.parametrize("chat", [True, False])
def test_who_closes_a_stream_early_frees_its_blocks(tiny_engine, chat):
    engine = make(tiny_engine, frozenset())
    hold(engine, until=lambda: engine.cancelled, passes=20)
    with serving(engine) as port, connected(port) as client:
        create = client.chat.completions.create if chat else client.completions.create
        fields = dict(messages=HELLO) if chat else dict(prompt="Hello")
        with create(stream=True, **fields, **{**GREEDY, "max_tokens": 200}) as stream:
            next(iter(stream))
            assert engine.counters()["blocks_referenced"] > 0
        eventually(lambda: engine.counters()["cancelled"] == 1)
        eventually(lambda: over(engine))
        counts = engine.counters()
        assert counts["running"] == counts["blocks_referenced"] == counts["finished"] == 0 and counts["steps"] < 200


def test_many_at_once_from_one_loop_run_together_and_get_their_own_answers(tiny_engine):
    engine, everybody = make(tiny_engine), threading.Event()
    hold(engine, until=everybody.is_set)
    asked = [[dict(role="user", content=f"Number {number}")] for number in range(8)]

    async def one(client, number):
        fields = dict(messages=asked[number], **GREEDY)
        if number % 2:
            return (await client.chat.completions.create(**fields)).choices[0].message.content
        stream = await client.chat.completions.create(stream=True, **fields)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them(port):
        async with openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(trust_env=False), **options(port)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))
    with serving(engine) as port, ThreadPoolExecutor() as pool:
        answers = pool.submit(asyncio.run, all_of_them(port))
        eventually(lambda: sum(engine.counters()[name] for name in ("running", "waiting")) == 8 or answers.done())
        everybody.set()
        assert answers.result() == [tiny_engine.generate(messages=messages, max_tokens=8).text for messages in asked]
    assert engine.counters()["steps"] < 8 * 8, "one after the other"
