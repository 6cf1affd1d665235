"""OpenAI's own Python client works: the server understands its requests, and the client parses the replies."""
from contextlib import contextmanager

import pytest

from shell.openai import LABELS, NEUTRAL
from tests.support.serving import INFO, TIMEOUT, serving
from tests.support.stub import Engine

openai = pytest.importorskip("openai", reason="OpenAI's client is missing: see requirements-dev.txt")

HELLO = [dict(role="user", content="Hello")]
GREEDY = dict(model="tiny", max_tokens=8, temperature=0)
USAGE = dict(stream=True, stream_options=dict(include_usage=True))


@contextmanager
def connected(port: int):
    """Context manager: return a client that uses no proxy."""
    with openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), api_key="any", timeout=TIMEOUT,
                       base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def served(frontend):
    """A server that tests share. Tests must leave it as it was."""
    with serving(frontend) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with connected(served.port) as client:
        yield client


def joined(stream, chat: bool) -> tuple[str, str, openai.types.CompletionUsage]:
    """Return (text, finish reason, usage) of a stream."""
    *chunks, last = stream
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    kind = "chat.completion.chunk" if chat else "text_completion"
    assert {chunk.object for chunk in (*chunks, last)} == {kind}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in (*chunks, last)}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    if chat:
        assert choices[0].delta.role == "assistant"
    *others, reason = [choice.finish_reason for choice in choices]
    assert not any(others)
    pieces = [choice.delta.content if chat else choice.text for choice in choices]
    return "".join(filter(None, pieces)), reason, last.usage


# 1. Answers -------------------------------------------------------------------------------------------------

def test_a_chat_and_its_stream_equal_the_engines_answer(client, served):
    said = served.ask("/generate", dict(prompt="Hello", max_tokens=8)).json
    chat = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert isinstance(chat, openai.types.chat.ChatCompletion) and chat.object == "chat.completion"
    assert chat.model == "tiny" and chat.id.startswith("chatcmpl-")
    choice, = chat.choices
    assert (choice.index, choice.message.role, choice.message.content, choice.finish_reason) == (
        0, "assistant", said["text"], said["finish_reason"])
    assert choice.logprobs is None and not choice.message.tool_calls
    used = chat.usage
    assert (used.prompt_tokens, used.completion_tokens) == (said["usage"]["prompt_tokens"], 8)
    assert used.total_tokens == used.prompt_tokens + 8 and used.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(messages=HELLO, **USAGE, **GREEDY)
    assert joined(stream, chat=True) == (said["text"], said["finish_reason"], used)


def test_a_completion_and_its_stream_continue_the_text(client, frontend):
    completion = client.completions.create(prompt="Once upon", **GREEDY)
    assert isinstance(completion, openai.types.Completion) and completion.object == "text_completion"
    choice, = completion.choices
    assert choice.text == "Once upo" and choice.finish_reason == "length"       # without a chat template
    ids = frontend.tokenizer.encode("Once upon")
    assert client.completions.create(prompt=ids, **GREEDY).choices == completion.choices
    stream = client.completions.create(prompt="Once upon", **USAGE, **GREEDY)
    assert joined(stream, chat=False) == (choice.text, choice.finish_reason, completion.usage)


def test_each_chunk_may_have_the_usage_so_far(client):
    options = dict(include_usage=True, continuous_usage_stats=True)
    chunks = [*client.chat.completions.create(messages=HELLO, stream=True, stream_options=options, **GREEDY)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert len(counts) > 2 and counts == sorted(counts) and counts[-1] == 8
    assert {chunk.usage.total_tokens - chunk.usage.completion_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}
    alone = client.chat.completions.create(messages=HELLO, stream=True, stream_options=dict(continuous_usage_stats=True), **GREEDY)
    assert not any(chunk.usage for chunk in alone)


def test_a_stream_without_usage_ends_with_done(served):
    *events, done = served.ask("/v1/chat/completions", dict(GREEDY, messages=HELLO, stream=True)).events
    assert done == "[DONE]" and all(event["choices"] and "usage" not in event for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0].keys() == {"role", "content"} and deltas[0]["content"], "load generators take its time as TTFT"
    assert all(delta.keys() == {"content"} for delta in deltas[1:])
    empty, done = served.ask("/v1/chat/completions", dict(GREEDY, messages=HELLO, stream=True, stop=deltas[0]["content"])).events
    assert empty["choices"][0]["delta"] == dict(role="assistant", content="") and empty["choices"][0]["finish_reason"] == "stop"


# 2. Fields of a request --------------------------------------------------------------------------------------

def test_the_engine_gets_the_fields_of_a_client(client, served):
    client.chat.completions.create(messages=HELLO, model="x", max_completion_tokens=3, seed=7, top_p=0.5, stop=["a"],
                                   extra_body=dict(cache_salt="Anna", top_k=2, ignore_eos=True, min_tokens=3))
    request = served.engine.asked[-1]
    assert (request.max_tokens, request.temperature, request.seed, request.top_p, request.top_k) == (3, 1.0, 7, 0.5, 2)
    assert not request.end_tokens and served.server.frontend.request(prompt="Hi", ignore_eos=False).end_tokens
    assert request.options == dict(cache_salt="Anna") and request.writer.stop == ["a"]


def test_the_server_accepts_neutral_fields_and_labels(client, served):
    neutral = NEUTRAL | dict.fromkeys(LABELS.split(), "any")
    client.chat.completions.create(
        messages=HELLO, seed=-1, tools=[], functions=[], function_call="none", tool_choice="auto", reasoning_effort="none",
        stream=True, stream_options=dict(include_usage=True, include_obfuscation=False), metadata=dict(a="b"),
        extra_body=dict(neutral, top_k=-1, add_special_tokens=False, guided_json=None, stop_token_ids=[]), **GREEDY)
    request = served.engine.asked[-1]
    assert (request.temperature, request.top_k, request.max_tokens) == (0, 0, 8)


@pytest.mark.parametrize("blocks, room, long, words", [
    (64, 256, 300, "shorten the prompt"), (8, 129, 130, "do not fit")])     # the last token needs no slot in a pool
def test_without_max_tokens_a_chat_fills_the_context_and_a_completion_has_16_tokens(frontend, blocks, room, long, words):
    with serving(frontend, Engine(blocks=blocks)) as served, connected(served.port) as client:
        for most in dict(), dict(max_tokens=-1), dict(max_tokens=32000), dict(max_completion_tokens=1 << 20):
            chat = client.chat.completions.create(model="tiny", messages=HELLO, **most)
            assert (chat.usage.total_tokens, chat.choices[0].finish_reason) == (room, "length")
        assert client.completions.create(model="tiny", prompt="Hello").usage.completion_tokens == 16
        assert client.completions.create(model="tiny", prompt="Hello", max_tokens=32000).usage.total_tokens == room
        for create, field, said in ((client.chat.completions.create, "messages", [dict(role="user", content="a" * long)]),
                                    (client.completions.create, "prompt", "a" * long)):
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                create(model="tiny", **{field: said})
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)


@pytest.mark.parametrize("name", ["tiny", "owner/name", "/a/folder"])
def test_the_server_lists_its_model_by_any_name(frontend, name):
    with serving(frontend, info=dict(INFO, model=name)) as again, connected(again.port) as client:
        model, = client.models.list()
        assert (model.id, model.object) == (name, "model") and client.models.retrieve(name) == model
        with pytest.raises(openai.NotFoundError, match=f"The only model here is '{name}'"):
            client.models.retrieve("tiny/other")
