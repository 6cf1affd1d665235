"""Chapter 01's engine: sampling, stopping, streaming, limits, and the line of requests."""
import json
import threading
import time

import pytest
import torch

from legacy.app import BadRequest, Busy, Closing
from legacy.tests.conftest import chapter, make_engine

baseline = chapter("01_baseline")
PROMPT = [70, 80, 90, 100]
VOCABULARY = 300


@pytest.fixture
def engine(tiny_engine):
    """An engine of its own on the shared weights."""
    return baseline.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens)


@pytest.fixture
def writes(engine, monkeypatch):
    """writes("text") -> an engine whose model writes that text, one byte a token, and then ends."""
    def prepare(text):
        script = text if isinstance(text, list) else engine.tokenizer.encode(text)
        script = [*script, *engine.end_tokens]

        def forward(cache, tokens, start):
            logits = torch.zeros(VOCABULARY)
            logits[script[start + len(tokens) - len(PROMPT)]] = 1.0
            return logits
        monkeypatch.setattr(engine, "forward", forward)
        return engine
    return prepare


def streamed(engine, **options):
    """-> the pieces of text, and the Result."""
    *pieces, result = engine.stream(PROMPT, **options)
    return pieces, result


def until(condition):
    """Wait for other threads; a test that waits in vain fails."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Sampling --------------------------------------------------------------------------------------------------------

def test_the_same_seed_gives_the_same_tokens(engine):
    first, again, other = (engine.generate(PROMPT, max_tokens=32, temperature=1.0, seed=seed).tokens for seed in (7, 7, 8))
    assert first == again != other


def test_without_a_seed_answers_differ(engine):
    first, other = (engine.generate(PROMPT, max_tokens=32, temperature=1.0).tokens for _ in range(2))
    assert first != other


def test_a_seed_does_not_touch_the_generator_of_others(engine):
    before = torch.get_rng_state()
    engine.generate(PROMPT, max_tokens=4, temperature=1.0, seed=7)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("narrow", [
    dict(top_k=1), dict(top_p=1e-6), dict(top_k=1, top_p=0.5, temperature=100.0), dict(temperature=1e-6),
    dict(temperature=1e-40), dict(temperature=5e-324)], ids=str)
def test_the_narrowest_sampling_is_greedy(engine, narrow):
    greedy = engine.generate(PROMPT, max_tokens=32).tokens
    assert engine.generate(PROMPT, max_tokens=32, **{"temperature": 1.0, "seed": 1, **narrow}).tokens == greedy


@pytest.mark.parametrize("options, kept", [
    (dict(temperature=1.0), [0, 1, 2, 3, 4]),
    (dict(temperature=0.5), [0, 1, 2, 3, 4]),
    (dict(temperature=1.0, top_k=2), [1, 3]),
    (dict(temperature=1.0, top_k=50), [0, 1, 2, 3, 4]),
    (dict(temperature=1.0, top_p=0.7), [1, 3]),                    # 0.5 is not enough, 0.5 + 0.25 is
    (dict(temperature=1.0, top_p=0.4), [1]),
    (dict(temperature=1.0, top_k=3, top_p=0.8), [1, 3]),           # 0.5 + 0.25 of 0.875 is enough
], ids=str)
def test_tokens_are_drawn_with_their_probabilities(options, kept):
    probabilities = torch.tensor([0.0625, 0.5, 0.125, 0.25, 0.0625], dtype=torch.float64)
    request = baseline.Request(PROMPT, 1, **{"top_p": 1.0, "top_k": 0, **options}, seed=None, stop=[])
    generator, draws = torch.Generator().manual_seed(0), 4000
    drawn = [baseline.sample(probabilities.log().float(), request, generator) for _ in range(draws)]
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept] ** (1 / options["temperature"])
    expected /= expected.sum()
    measured = torch.bincount(torch.tensor(drawn), minlength=5) / draws
    assert set(drawn) == set(kept)
    assert (measured - expected).abs().max() < 4 * (0.25 / draws) ** 0.5


def test_temperature_zero_takes_the_likeliest():
    request = baseline.Request(PROMPT, 1, 0.0, 1.0, 0, None, [])
    assert baseline.sample(torch.tensor([0.1, 0.3, 0.2]), request, None) == 1


# Stopping --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, stop, expected", [
    ("one two three", ["two"], "one "),                            # spans three tokens
    ("one two three", "two", "one "),
    ("one two three", ["e"], "on"),
    ("one two three", ["one"], ""),
    ("one two three", ["three"], "one two "),
    ("xaby", ["by", "ab"], "x"),                                   # the earlier one wins, in whatever order they are given
    ("xaby", ["by", "aby"], "x"),                                  # both end with the same token
    ("xaby", ["aby", "b"], "xa"),
    ("aaab", ["ab"], "aa"),
    ("ababac", ["abac"], "ab"),
    ("line one\n\nline two", ["\n\n"], "line one"),
    ("say 🙂 now", ["🙂"], "say "),
    ("schön, größer", ["ön, g"], "sch"),
], ids=str)
def test_the_answer_ends_before_a_stop_string(writes, text, stop, expected):
    pieces, result = streamed(writes(text), stop=stop)
    assert result.text == "".join(pieces) == expected
    assert result.finish_reason == "stop"
    assert len(result.tokens) < len(text.encode()) + 1


@pytest.mark.parametrize("text, stop", [("twin two", ["twos"]), ("a tw", ["two"]), ("aaaa", ["aab"]), ("plain", ["x", "yz"])])
def test_text_that_is_no_stop_string_after_all_is_released(writes, text, stop):
    pieces, result = streamed(writes(text), stop=stop)
    assert result.text == "".join(pieces) == text
    assert result.finish_reason == "stop"                          # by end of text


def test_only_what_may_begin_a_stop_string_is_held_back(writes):
    engine = writes("twin two")
    pieces = [piece for piece in engine.stream(PROMPT, stop=["two"]) if isinstance(piece, str) and piece]
    assert pieces == ["twi", "n", " "]


def test_held_back_text_is_released_at_the_length_limit(writes):
    pieces, result = streamed(writes("abtwo"), stop=["two"], max_tokens=4)
    assert result.text == "".join(pieces) == "abtw"
    assert result.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_is_the_length_of_the_answer(engine, max_tokens):
    result = engine.generate(PROMPT, max_tokens=max_tokens)
    assert len(result.tokens) == result.usage["completion_tokens"] == max_tokens
    assert result.finish_reason == "length"
    assert (result.tbt_ms is None) == (max_tokens == 1)


def test_end_of_text_ends_the_answer(writes):
    engine = writes("done")
    result = engine.generate(PROMPT, max_tokens=50)
    assert result.text == "done" and result.finish_reason == "stop"
    assert result.tokens[-1] in engine.end_tokens and result.usage["completion_tokens"] == 5


def test_an_answer_may_be_empty(writes):
    pieces, result = streamed(writes(""))
    assert result.text == "".join(pieces) == "" and result.finish_reason == "stop" and result.tbt_ms is None


# Streaming -------------------------------------------------------------------------------------------------------

def test_characters_of_several_bytes_come_whole(writes):
    text = "Grüße 🙂 日本語, naïve"
    pieces, result = streamed(writes(text))
    assert result.text == "".join(pieces) == text
    assert "🙂" in pieces and not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) == len(text)  # nothing waits longer than its own bytes


def test_half_a_character_at_the_end_is_not_shown(writes):
    pieces, result = streamed(writes("é🙂"), max_tokens=4)
    assert result.text == "".join(pieces) == "é"


def test_special_tokens_are_not_text(writes, engine):
    script = [*engine.tokenizer.encode("a"), engine.tokenizer.convert_tokens_to_ids("<|user|>"), *engine.tokenizer.encode("b")]
    assert writes(script).generate(PROMPT).text == "ab"


@pytest.mark.parametrize("seed", range(6))
def test_the_pieces_make_the_text_of_the_tokens(engine, seed):
    engine.end_tokens = frozenset()
    pieces, result = streamed(engine, temperature=1.0, seed=seed, max_tokens=64)
    decoded = engine.tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert "".join(pieces) == result.text
    assert decoded.startswith(result.text) and not decoded[len(result.text):].strip("\ufffd")
    assert len(result.text) > 20


def test_the_first_piece_comes_before_the_last_token_is_computed(writes):
    engine = writes("abc")
    stream = engine.stream(PROMPT)
    assert next(stream) == "a"
    assert engine.counters()["running"] == 1 and engine.counters()["finished"] == 0
    assert [*stream][-1].text == "abc"


# Prefill, decode, no cache ---------------------------------------------------------------------------------------

def test_life_without_a_cache_gives_the_same_tokens(engine):
    bare = baseline.Engine(engine.model, engine.tokenizer, engine.end_tokens, kv_cache=False, prefill_chunk=8)
    result = bare.generate(PROMPT, max_tokens=32)
    assert result.tokens == engine.generate(PROMPT, max_tokens=32).tokens
    assert not [span for span in result.timeline.spans if span.label == "decode"]
    assert len([span for span in result.timeline.spans if span.label.startswith("prefill")]) > 32


def test_a_result_says_what_it_cost(engine):
    result = engine.generate(PROMPT, max_tokens=9)
    assert result.usage == dict(prompt_tokens=4, cached_tokens=0, completion_tokens=9) and result.source == "miss"
    assert result.ttft_ms > 0 and result.tbt_ms > 0
    assert [span.label for span in result.timeline.spans] == ["prefill 4"] + ["decode"] * 8
    assert json.loads(json.dumps(result.as_json()))["tokens"] == result.tokens
    assert "4 prompt tokens" in result.summary()


# Limits ----------------------------------------------------------------------------------------------------------

def test_the_context_holds_prompt_and_answer(engine):
    result = engine.generate([9] * 255, max_tokens=5)
    assert len(result.tokens) == 1 and result.finish_reason == "length"
    assert len(engine.generate([9] * 246, max_tokens=1000).tokens) == 10


@pytest.mark.parametrize("length", [256, 301])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(engine, length):
    with pytest.raises(BadRequest, match=rf"{length} tokens.* 256"):
        engine.stream([9] * length)
    assert engine.counters()["refused"] == 1 and engine.counters()["requests"] == 0


@pytest.mark.parametrize("prompt", [[], [-1], [5, VOCABULARY], [5, 10**12]], ids=str)
def test_token_ids_out_of_range_are_refused(engine, prompt):
    with pytest.raises(BadRequest, match="0 to 299"):
        engine.stream(prompt)


@pytest.mark.parametrize("asked", [
    {}, dict(prompt="a", messages=[dict(role="user", content="b")]), dict(prompt=""), dict(messages=[])], ids=str)
def test_nothing_or_too_much_to_answer_is_refused(engine, asked):
    with pytest.raises(BadRequest):
        engine.stream(**asked)
    assert {name for name, count in engine.counters().items() if count} == {"refused"}


class Tokenizer:
    """The engine's tokenizer with something changed."""
    def __init__(self, plain, **changes):
        self.__dict__.update(changes, plain=plain)

    def __getattr__(self, name):
        return getattr(self.plain, name)


def test_a_model_without_chat_template_continues_the_text(engine):
    plain = engine.generate([*map(int, engine.tokenizer.encode("hello"))], max_tokens=8)
    engine.tokenizer = Tokenizer(engine.tokenizer, chat_template=None)
    assert engine.generate("hello", max_tokens=8).tokens == plain.tokens
    with pytest.raises(BadRequest, match="chat template"):
        engine.stream(messages=[dict(role="user", content="hello")])


def test_a_prompt_that_is_no_token_at_all_is_refused(engine):
    engine.tokenizer = Tokenizer(engine.tokenizer, chat_template=None, encode=lambda text: [])
    with pytest.raises(BadRequest):
        engine.stream(" ")


def test_a_token_that_the_model_does_not_have_is_refused(engine):
    """As with a tokenizer to which a token was added and a model that was not told."""
    engine.tokenizer = Tokenizer(engine.tokenizer, chat_template=None, encode=lambda text: [5, VOCABULARY])
    with pytest.raises(BadRequest):
        engine.stream("added")


# Conversations ---------------------------------------------------------------------------------------------------

def conversation(*contents: str) -> list[dict]:
    return [dict(role=("user", "assistant")[number % 2], content=content) for number, content in enumerate(contents)]


def test_a_prompt_is_a_conversation_of_one_message(engine):
    alone = engine.generate("hello", max_tokens=8)
    assert alone.tokens == engine.generate(messages=conversation("hello"), max_tokens=8).tokens
    assert alone.history_tokens == 0
    assert alone.usage["prompt_tokens"] == len(engine.tokenizer.encode("<|user|>\nhello</s>\n<|assistant|>\n"))


@pytest.mark.parametrize("contents", [["My cat is Pip.", "Noted.", "Who?"], ["a", "b", "c", "d", "e"]], ids=str)
def test_history_is_all_but_the_last_message(engine, contents):
    result = engine.generate(messages=conversation(*contents), max_tokens=4)
    earlier = "".join(f"<|{m['role']}|>\n{m['content']}</s>\n" for m in conversation(*contents[:-1]))
    assert result.history_tokens == len(engine.tokenizer.encode(earlier))
    assert result.usage["prompt_tokens"] == result.history_tokens + len(
        engine.tokenizer.encode(f"<|user|>\n{contents[-1]}</s>\n<|assistant|>\n"))


def test_history_ends_where_the_template_writes_it_anew(engine):
    """A template that opens with the number of messages shares nothing with the turn before."""
    template = "{{ messages | length }}" + engine.tokenizer.chat_template
    plain = engine.tokenizer

    def apply_chat_template(messages, **options):
        return plain.apply_chat_template(messages, chat_template=template, **options)
    engine.tokenizer = Tokenizer(plain, apply_chat_template=apply_chat_template)
    assert engine.generate(messages=conversation("a", "b", "c"), max_tokens=2).history_tokens == 0


def test_a_template_that_raises_is_a_bad_request(engine):
    def apply_chat_template(*_, **__):
        raise ValueError("Roles must alternate")
    engine.tokenizer = Tokenizer(engine.tokenizer, apply_chat_template=apply_chat_template)
    with pytest.raises(BadRequest, match="Roles must alternate"):
        engine.stream(messages=conversation("a"))


# The line --------------------------------------------------------------------------------------------------------

def test_requests_are_served_in_order_and_one_at_a_time(engine, monkeypatch):
    served, inside, run = [], [], engine.run

    def watched(request):
        served.append(request.tokens[0])
        inside.append(request)
        assert len(inside) == 1
        yield from run(request)
        inside.remove(request)
    monkeypatch.setattr(engine, "run", watched)
    first = engine.stream([10], max_tokens=3)
    results, threads = {}, []
    for number in range(11, 17):
        def ask(number=number):
            results[number] = engine.generate([number], max_tokens=6)
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        until(lambda number=number: engine.counters()["waiting"] == number - 10)
    assert served == [] and engine.counters()["running"] == 1
    assert len([*first][-1].tokens) == 3
    for thread in threads:
        thread.join(30)
    assert served == [10, 11, 12, 13, 14, 15, 16]
    monkeypatch.undo()
    for number, result in results.items():
        assert result.tokens == engine.generate([number], max_tokens=6).tokens
    assert engine.counters()["waiting"] == engine.counters()["running"] == 0


def test_a_full_line_refuses(engine):
    engine.max_waiting = 2
    line = [engine.stream(PROMPT) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(Busy, match="2 requests are waiting"):
            engine.stream(PROMPT)
    counters = engine.counters()
    assert (counters["refused"], counters["running"], counters["waiting"]) == (2, 1, 2)
    for request in line:
        request.close()
    assert len(engine.generate(PROMPT, max_tokens=3).tokens) == 3


def test_a_closed_engine_refuses_and_tells_those_who_wait(engine):
    answers = []
    running = engine.stream(PROMPT, max_tokens=5)
    next(running)

    def ask():
        try:
            answers.append(engine.generate(PROMPT))
        except Closing as error:
            answers.append(error)
    waiting = threading.Thread(target=ask)
    waiting.start()
    until(lambda: engine.counters()["waiting"] == 1)
    engine.close()
    waiting.join(30)
    assert isinstance(answers[0], Closing)
    with pytest.raises(Closing):
        engine.stream(PROMPT)
    assert len([*running][-1].tokens) == 5                         # who was being answered is answered
    assert engine.counters()["running"] == engine.counters()["waiting"] == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_hanging_up_frees_the_line(engine, steps):
    request = engine.stream(PROMPT, max_tokens=20)
    for _ in range(steps):
        next(request)
    request.close()
    counters = engine.counters()
    assert (counters["cancelled"], counters["finished"], counters["running"], counters["waiting"]) == (1, 0, 0, 0)
    assert len(engine.generate(PROMPT, max_tokens=3).tokens) == 3
    assert engine.counters()["finished"] == 1


def test_a_request_that_nobody_keeps_leaves_the_line(engine):
    engine.stream(PROMPT)
    assert engine.counters()["running"] == 0


def test_who_hangs_up_while_waiting_does_not_hold_up_the_rest(engine):
    first, second, third = (engine.stream(PROMPT, max_tokens=2) for _ in range(3))
    second.close()
    assert len([*first][-1].tokens) == 2
    assert len([*third][-1].tokens) == 2


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_an_error_in_the_model_leaves_the_engine_usable(engine, monkeypatch, when):
    expected = engine.generate(PROMPT, max_tokens=8).tokens
    layer = engine.model.layers[1]

    def fail(hidden, rotation, attend):
        if when == "prefill" or len(hidden) == 1:
            raise RuntimeError("injected")
        return type(layer).forward(layer, hidden, rotation, attend)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(RuntimeError, match="injected"):
            engine.generate(PROMPT, max_tokens=8)
    counters = engine.counters()
    assert (counters["running"], counters["waiting"], counters["finished"]) == (0, 0, 1)
    assert engine.generate(PROMPT, max_tokens=8).tokens == expected


def test_counters_add_up(engine):
    results = [engine.generate(PROMPT, max_tokens=count) for count in (2, 3)]
    counters = engine.counters()
    assert counters["requests"] == counters["finished"] == 2
    assert counters["prompt_tokens"] == 8 and counters["completion_tokens"] == sum(len(r.tokens) for r in results) == 5


def test_an_engine_made_as_the_command_line_makes_it_answers_alike(tiny_folder, engine):
    assert make_engine(tiny_folder, prefill_chunk=3).generate("hello", max_tokens=16).tokens == engine.generate(
        "hello", max_tokens=16).tokens
