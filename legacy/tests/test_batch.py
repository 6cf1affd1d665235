"""A file of requests answered: each line of it, what is wrong with lines and files, and what happens after any end."""
import gc
import io
import itertools
import json
import re
import signal
import sys
import threading
import time
import weakref

import pytest

from legacy import app, batch
from legacy.app import BadRequest, Closing
from legacy.tests.conftest import ROOT, chapter
from legacy.tests.test_cli import Process, needs_signals, run

baseline, paged = chapter("01_baseline"), chapter("02_paged_kv")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = dict(max_tokens=3, temperature=0)


def asked(custom_id, url=TEXT, **body) -> dict:
    body = {**GREEDY, **({} if url == CHAT else dict(prompt=f"Hello {custom_id}")), **body}
    return dict(custom_id=custom_id, method="POST", url=url, body=body)


def chat(custom_id, content: str = "Hello", **body) -> dict:
    return asked(custom_id, CHAT, messages=[dict(role="user", content=content)], **body)


def write(path, *lines):
    """Lines are objects, or bytes as they are."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def parsed(requests, out, *more):
    parser = app.parser_for("")
    batch.add_arguments(parser)
    return parser.parse_args(["--model", "tiny", "--batch", str(requests), "--out", str(out), *more])


def answer(engine, requests, out) -> dict:
    """-> the row of the report."""
    report, timelines = batch.answer(engine, parsed(requests, out))
    assert len(timelines) == 1 and report["counters"] == engine.counters()
    assert not engine.running and not engine.waiting and engine.pool.available == engine.pool.size
    row, = report["rows"]
    return row


def replies(out) -> list[dict]:
    """The file of replies, after a look at its form."""
    raw = out.read_bytes()
    assert raw.endswith(b"\n") or not raw
    lines = [json.loads(line) for line in raw.splitlines()]
    for line in lines:
        assert list(line) == ["id", "custom_id", "response", "error"] and line["error"] is None
        assert re.fullmatch("batch_req_[0-9a-f]{32}", line["id"])
        response = line["response"]
        assert list(response) == ["status_code", "request_id", "body"] and re.fullmatch("[0-9a-f]{32}", response["request_id"])
        if response["status_code"] != 200:
            error = response["body"]["error"]
            assert set(response["body"]) == {"error"} and set(error) == {"message", "type"}
            assert re.match(r"Line \d+: ", error["message"]) and error["message"].endswith(".") and "\n" not in error["message"]
    assert len({line["id"] for line in lines}) == len(lines), "a reply twice"
    assert len({line["response"]["request_id"] for line in lines}) == len(lines)
    return lines


def by_name(out) -> dict:
    """custom_id -> its response."""
    return {line["custom_id"]: line["response"] for line in replies(out)}


def texts(response) -> list[str]:
    assert response["status_code"] == 200, response
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in response["body"]["choices"]]


@pytest.fixture
def make(tiny_engine):
    """make(...) -> chapter 02's engine on the tiny model; it closes with the test."""
    engines = []

    def engine(kind=paged.Engine, **options):
        options = {"blocks": 64, "block_size": 4, **options}
        engines.append(kind(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, **options))
        return engines[-1]
    yield engine
    for engine in engines:
        engine.close()
        assert engine.thread is None, "the batch runs in the thread that asks for it"


@pytest.fixture
def right(tiny_engine):
    """right(line) -> the Result of chapter 01 for that body."""
    def result(line):
        body = dict(line["body"])
        if isinstance(body.get("prompt"), str):
            body["prompt"] = tiny_engine.tokenizer.encode(body["prompt"])
        return tiny_engine.generate(**body)
    return result


# 1. What is asked rightly ----------------------------------------------------------------------------------------

def test_every_reply_has_the_answer_of_chapter_01(make, right, tmp_path):
    lines = [asked("a"), chat("b", max_tokens=20), asked("c", prompt=[5, 6, 7], max_tokens=12),
             chat("d", "What is it?", stop=["e"]), asked("e", prompt="Hello again", max_tokens=30), chat("f", max_tokens=9)]
    requests, out = write(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    row = answer(make(), requests, out)
    answers = by_name(out)
    assert set(answers) == {line["custom_id"] for line in lines} and out.read_bytes().count(b"\n") == len(lines)
    for line in lines:
        response, expected = answers[line["custom_id"]], right(line)
        body, choice = response["body"], response["body"]["choices"][0]
        assert texts(response) == [expected.text] and choice["finish_reason"] == expected.finish_reason
        assert body["usage"]["completion_tokens"] == len(expected.tokens)
        assert body["usage"]["prompt_tokens"] == expected.usage["prompt_tokens"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert row[name] == sum(response["body"]["usage"][name] for response in answers.values())
    assert (row["replies"], row["errors"], row["before"]) == (6, 0, 0)
    assert row["tokens_per_second"] == pytest.approx(row["completion_tokens"] / row["seconds"])


@pytest.mark.parametrize("line", [
    chat("a"), asked("a"), chat("a", n=2, seed=5, temperature=2), asked("a", n=3, seed=5, temperature=2),
    chat("a", temperature=None, max_tokens=None, seed=3), asked("a", temperature=None, seed=3),
    chat("a", max_tokens=None, max_completion_tokens=5)], ids=lambda line: str(line["body"])[:40])
def test_a_reply_is_the_servers(make, tmp_path, line):
    out = tmp_path / "replies.jsonl"
    answer(make(), write(tmp_path / "requests.jsonl", line), out)
    got, = replies(out)
    engine = paged.Engine(*(getattr(make(), name) for name in ("model", "tokenizer", "end_tokens")), blocks=64, block_size=4)
    served = app.make_app(engine, dict(model="tiny")).test_client().post(line["url"], json=line["body"])
    engine.close()
    theirs, ours = served.json, got["response"]["body"]
    assert served.status_code == got["response"]["status_code"] == 200
    assert set(theirs) == set(ours) and theirs["id"].split("-")[0] == ours["id"].split("-")[0]
    assert {**theirs, "id": "", "created": 0} == {**ours, "id": "", "created": 0}


def test_the_samples_of_a_prompt_are_one_reply(make, right, tmp_path):
    alone = [chat("two", seed=seed, temperature=3, max_tokens=20) for seed in (7, 8)]
    stop = next(letter for letter in right(alone[0]).text if letter.isascii() and letter not in right(alone[1]).text)
    for line in alone:
        line["body"]["stop"] = stop
    expected = [right(line) for line in alone]
    assert len(expected[0].tokens) < len(expected[1].tokens), "one is over before the other"

    lines = [chat("two", n=2, **{name: value for name, value in alone[0]["body"].items() if name != "messages"}),
             asked("three", n=3, max_tokens=4), asked("one")]
    out = tmp_path / "replies.jsonl"
    row = answer(make(max_running=3), write(tmp_path / "requests.jsonl", *lines), out)
    two, three = by_name(out)["two"], by_name(out)["three"]
    assert texts(two) == [result.text for result in expected]
    assert [choice["index"] for choice in two["body"]["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in two["body"]["choices"]] == [result.finish_reason for result in expected]
    assert texts(three) == [right(asked("three", max_tokens=4)).text] * 3
    assert row["replies"] == 3 and two["body"]["usage"]["completion_tokens"] == sum(len(result.tokens) for result in expected)


def test_replies_are_written_as_they_are_complete(make, tmp_path, monkeypatch):
    lines = [asked("long", max_tokens=30), asked("short", max_tokens=2), asked("pair", n=2, max_tokens=10), b"{", asked("last")]
    out = tmp_path / "replies.jsonl"
    seen, append = [], batch.Replies.append

    def watched(self, line, *reply):
        append(self, line, *reply)
        seen.append(replies(out)[-1]["custom_id"])              # it is in the file at once, whole
    monkeypatch.setattr(batch.Replies, "append", watched)
    answer(make(max_running=4), write(tmp_path / "requests.jsonl", *lines), out)
    assert seen == [None, "short", "last", "pair", "long"]


def test_lines_may_be_empty_end_as_windows_ends_them_or_begin_with_a_mark(make, tmp_path):
    lines = [b"\xef\xbb\xbf" + json.dumps(asked("a")).encode() + b"\r", b"", b" \t\r", json.dumps(asked("b")).encode() + b"  "]
    requests, out = write(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    requests.write_bytes(requests.read_bytes() + json.dumps(chat("c")).encode())                # no end of line at its end
    assert answer(make(), requests, out)["replies"] == 3
    assert {name: response["status_code"] for name, response in by_name(out).items()} == dict(a=200, b=200, c=200)


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_a_file_without_requests_has_no_replies(make, tmp_path, capsys, content):
    (tmp_path / "requests.jsonl").write_bytes(content)
    assert answer(make(), tmp_path / "requests.jsonl", tmp_path / "replies.jsonl")["replies"] == 0
    assert capsys.readouterr().out.startswith("0 replies in ") and replies(tmp_path / "replies.jsonl") == []


def test_a_custom_id_and_a_text_come_back_as_they_are(make, tmp_path):
    names, out = ["", "ü \u2028 \"x\"\n", "\ud800", "a" * 5000], tmp_path / "replies.jsonl"
    answer(make(), write(tmp_path / "requests.jsonl", *(asked(name, prompt="ü \u2028") for name in names)), out)
    assert set(by_name(out)) == set(names)


# 2. Lines that are no requests -----------------------------------------------------------------------------------

def without(name: str) -> dict:
    return {key: value for key, value in asked("w").items() if key != name}


WRONG = {                          # what -> (line, custom_id of the reply, words of the message)
    "torn": (b'{"custom_id": "w", "method": "PO', None, "not JSON"),
    "text": (b"hello", None, "not JSON"),
    "not UTF-8": (b'{"custom_id": "\xff\xfe"}', None, "not UTF-8"),
    "UTF-16": (json.dumps(asked("w")).encode("utf-16-le"), None, "not JSON"),
    "deep": (b"[" * 100_000, None, "not JSON"),
    "two objects": (json.dumps(asked("w")).encode() * 2, None, "not JSON"),
    "a list": ([asked("w")], None, "a JSON object"),
    "a number": (b"7", None, "a JSON object"),
    "null": (b"null", None, "a JSON object"),
    "an empty object": ({}, None, "no custom_id"),
    "custom_id missing": (without("custom_id"), None, "no custom_id"),
    "custom_id null": (dict(asked("w"), custom_id=None), None, "no custom_id"),
    "custom_id a number": (dict(asked("w"), custom_id=7), None, "custom_id must be a string"),
    "custom_id a list": (dict(asked("w"), custom_id=["w"]), None, "custom_id must be a string"),
    "method missing": (dict(without("method"), custom_id="w1"), "w1", "no method"),
    "method wrong": (dict(asked("w2"), method="GET"), "w2", "method must be POST"),
    "url missing": (dict(without("url"), custom_id="w3"), "w3", "no url"),
    "url wrong": (dict(asked("w4"), url="/v1/embeddings"), "w4", "url must be /v1/chat/completions or /v1/completions"),
    "url a list": (dict(asked("w5"), url=[TEXT]), "w5", "url must be"),
    "body missing": (dict(without("body"), custom_id="w6"), "w6", "no body"),
    "body a string": (dict(asked("w7"), body="Hello"), "w7", "body must be a JSON object"),
    "unknown beside the body": (dict(asked("w8"), metadata={}), "w8", "Unknown field 'metadata'"),
    "a bad field": (asked("w9", max_tokens=0), "w9", "max_tokens must be"),
    "an unknown field": (asked("w10", flash=True), "w10", "Unknown field 'flash'"),
    "not a number": (asked("w11", temperature=float("nan")), "w11", "temperature must be"),
    "messages of a completion": (dict(chat("w12"), url=TEXT), "w12", "Unknown field 'messages'"),
    "a prompt of a chat": (dict(asked("w13"), url=CHAT), "w13", "Unknown field 'prompt'"),
    "no prompt": (asked("w14", prompt=None), "w14", "prompt"),
    "no messages": (asked("w15", CHAT), "w15", "prompt or messages"),
    "an empty prompt": (asked("w16", prompt=""), "w16", "one at least"),
    "an unknown token": (asked("w17", prompt=[300]), "w17", "299"),
    "a stream": (asked("w18", stream=True), "w18", "stream must be false"),
    "a stream of a chat": (chat("w19", stream=True), "w19", "stream must be false"),
    "longer than the context": (asked("w20", prompt=[5] * 256), "w20", "context of this model is 256"),
    "longer than the pool": (asked("w21", prompt=[5] * 250, max_tokens=6), "w21", "the pool has 40"),
    "n too large": (asked("w22", n=17), "w22", "n must be"),
    "more samples than may run": (asked("w23", n=9), "w23", "at most 8 may run"),
    "a custom_id again": (asked("good 0"), "good 0", "custom_id 'good 0' is that of line 1"),
    "the custom_id of a wrong line": (asked("w2"), "w2", "custom_id 'w2' is that of line "),
}


@pytest.fixture(scope="module")
def among_good_ones(tiny_engine, tmp_path_factory):
    """All wrong lines, each after a good one and an empty one -> their replies by line number, and the good ones'."""
    folder = tmp_path_factory.mktemp("wrong")
    lines = list(itertools.chain(*((asked(f"good {number}"), b"", line) for number, (line, _, _) in enumerate(WRONG.values()))))
    engine = paged.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, 40, block_size=4, max_running=8)
    row = answer(engine, write(folder / "requests.jsonl", *lines), folder / "replies.jsonl")
    engine.close()
    assert row["replies"] == 2 * len(WRONG) and row["errors"] == len(WRONG)
    errors, good = {}, []
    for line in replies(folder / "replies.jsonl"):
        response = line["response"]
        if response["status_code"] == 200:
            good.append(line)
        else:
            errors[int(re.match(r"Line (\d+)", response["body"]["error"]["message"])[1])] = line
    return errors, good


@pytest.mark.parametrize("what", WRONG)
def test_a_line_that_is_no_request_gets_an_error_of_its_own(among_good_ones, what):
    _, custom_id, words = WRONG[what]
    line = among_good_ones[0][3 * list(WRONG).index(what) + 3]
    assert line["custom_id"] == custom_id and line["response"]["status_code"] == 400
    error = line["response"]["body"]["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"


def test_the_good_lines_among_wrong_ones_are_answered(among_good_ones, right):
    good = among_good_ones[1]
    assert {line["custom_id"] for line in good} == {f"good {number}" for number in range(len(WRONG))}
    for line in good[:5]:
        assert texts(line["response"]) == [right(asked(line["custom_id"])).text]


# 3. What fails inside --------------------------------------------------------------------------------------------

class Failing(paged.Engine):
    """Whoever has seed 13 fails when the answer is written."""

    def result(self, request):
        if request.seed == 13:
            raise ValueError("a defect\nin two lines")
        return super().result(request)


def test_a_request_that_fails_is_a_500_and_the_rest_goes_on(make, tmp_path):
    lines = [asked("a"), asked("b", seed=13), asked("c", n=2, seed=12, temperature=1), chat("d", seed=13), asked("e")]
    out = tmp_path / "replies.jsonl"
    row = answer(make(Failing, max_running=2), write(tmp_path / "requests.jsonl", *lines), out)
    statuses = {name: response["status_code"] for name, response in by_name(out).items()}
    assert statuses == dict(a=200, b=500, c=500, d=500, e=200) and (row["replies"], row["errors"]) == (5, 3)
    assert by_name(out)["b"]["body"]["error"] == dict(type="server_error", message=(
        "Line 2: An error inside the engine (ValueError: a defect in two lines); the other requests go on."))


def test_a_forward_pass_that_fails_takes_only_those_in_it(make, tmp_path):
    class Engine(paged.Engine):
        def forward(self, work):
            if self.counts["finished"] == 4 and not self.counts["failed"]:
                raise RuntimeError("out of memory")
            return super().forward(work)
    out = tmp_path / "replies.jsonl"
    answer(make(Engine, max_running=2), write(tmp_path / "requests.jsonl", *(asked(str(number)) for number in range(8))), out)
    statuses = {name: response["status_code"] for name, response in by_name(out).items()}
    assert statuses == {str(number): 500 if number in (4, 5) else 200 for number in range(8)}


def test_a_step_that_fails_takes_those_in_line_and_the_rest_goes_on(make, tmp_path):
    class Engine(paged.Engine):
        def step(self):
            if self.counts["finished"] == 2 and not self.counts["failed"]:
                raise RuntimeError("a defect")
            return super().step()
    out = tmp_path / "replies.jsonl"
    lines = [asked("a"), asked("b"), asked("c", n=2), *map(asked, "defgh")]
    answer(make(Engine, max_running=2), write(tmp_path / "requests.jsonl", *lines), out)
    statuses = {name: response["status_code"] for name, response in by_name(out).items()}
    assert statuses == dict(a=200, b=200, c=500, d=500, e=200, f=200, g=200, h=200)
    assert "RuntimeError: a defect" in by_name(out)["c"]["body"]["error"]["message"]


def test_an_engine_that_loses_requests_does_not_hold_the_batch(make, tmp_path):
    class Engine(paged.Engine):
        taken = 0

        def step(self):
            self.taken += 1
            if self.taken == 100:
                pytest.fail("nobody sees that there is nothing to do")
            for request in [request for request in self.waiting if request.seed == 13]:
                self.waiting.remove(request)
            return super().step()
    lines, out = [asked("lost", seed=13), asked("pair", seed=13, n=2), asked("good")], tmp_path / "replies.jsonl"
    answer(make(Engine), write(tmp_path / "requests.jsonl", *lines), out)
    lost, good = by_name(out)["lost"], by_name(out)["good"]
    assert lost["status_code"] == by_name(out)["pair"]["status_code"] == 500 and good["status_code"] == 200
    assert "nothing left to do and has not answered" in lost["body"]["error"]["message"]


def test_a_submit_that_fails_is_a_500(make, tmp_path):
    class Engine(paged.Engine):
        def submit(self, *prompt, seed=None, **fields):
            if seed == 13:
                raise KeyError("a defect")
            return super().submit(*prompt, **fields)
    out = tmp_path / "replies.jsonl"
    answer(make(Engine), write(tmp_path / "requests.jsonl", asked("a", seed=13), asked("b")), out)
    assert {name: response["status_code"] for name, response in by_name(out).items()} == dict(a=500, b=200)


def test_an_engine_that_closes_answers_nobody_wrongly(make, tmp_path):
    class Engine(paged.Engine):
        def step(self):
            if self.counts["finished"] == 3:
                self.close()
            return super().step()
    requests, out = write(tmp_path / "requests.jsonl", *(asked(str(number)) for number in range(9))), tmp_path / "replies.jsonl"
    with pytest.raises(Closing):
        answer(make(Engine, max_running=1), requests, out)
    assert 3 <= len(replies(out)) < 9
    assert answer(make(), requests, out)["errors"] == 0 and len(replies(out)) == 9


# 4. How much is read ahead ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [dict(max_running=4), dict(max_running=4, max_waiting=2), dict(max_running=1),
                                     dict(max_running=8, blocks=12)], ids=str)
def test_the_engine_is_kept_full_and_its_line_short(make, tmp_path, monkeypatch, options):
    lines = [asked(str(number), max_tokens=1 + 2 * (number % 7)) for number in range(60)]
    requests, out, read = write(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl", batch.read
    ahead, few_blocks = min(options["max_running"], options.get("max_waiting", 256)), "blocks" in options
    most, alive, taken = options["max_running"] + ahead + 2, weakref.WeakSet(), []

    class Engine(paged.Engine):
        def submit(self, **fields):
            samples = super().submit(**fields)
            assert len(self.waiting) <= ahead
            alive.update(samples)
            return samples

        def schedule(self):
            if not few_blocks and ahead == self.max_running:
                unfinished = 60 - self.counts["finished"]
                assert len(self.running) == min(self.max_running, unfinished), "there is room, and others are left"
            return super().schedule()

    def watched(path):
        for line in read(path):
            taken.append(weakref.ref(line))
            yield line
            assert sum(ref() is not None for ref in taken) <= most, "a line is let go when its reply is written"
            assert len(alive) <= most + engine.over.maxlen, "a request is let go when its reply is written, but for the last few"
    monkeypatch.setattr(batch, "read", watched)
    engine = make(Engine, **options)
    row = answer(engine, requests, out)
    assert row["replies"] == len(taken) == 60 and row["errors"] == engine.counts["refused"] == 0
    assert len(engine.over) == engine.over.maxlen
    engine.over.clear()                                             # the last ones, which the page shows
    gc.collect()
    assert not alive and not any(ref() for ref in taken), "nothing is left of the requests"
    assert bool(engine.counts["preemptions"]) == few_blocks


def test_the_lengths_of_requests_are_told_one_by_one(tiny_engine, make, right, tmp_path, monkeypatch):
    lines = [asked("a", max_tokens=5), b"{", chat("b", max_tokens=7), asked("a"), asked("c", max_tokens=None),
             asked("d", prompt=[5] * 250, max_tokens=100), asked("e", prompt=[5] * 256), asked("f", stream=True),
             asked("g", n=2, cache_salt="x", max_tokens=2), asked("h", n=0)]
    requests, engine = write(tmp_path / "requests.jsonl", *lines), make()
    expected = [(len(tiny_engine.tokenizer.encode("Hello a")), 5), (right(lines[2]).usage["prompt_tokens"], 7),
                (len(tiny_engine.tokenizer.encode("Hello c")), 128), (250, 6),
                *[(len(tiny_engine.tokenizer.encode("Hello g")), 2)] * 2]                   # two samples of one prompt
    assert list(batch.requests_in(requests, engine)) == expected
    frontend = baseline.Frontend(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens)
    assert list(batch.requests_in(requests, frontend, paged.Engine.fields)) == expected
    assert list(batch.requests_in(requests, frontend)) == expected[:4], "an engine that gives one answer refuses two"
    assert engine.counts["requests"] == 0 and not (tmp_path / "replies.jsonl").exists()

    parse, read = batch.Line.parse, []
    monkeypatch.setattr(batch.Line, "parse", lambda self, *what: (read.append(self.number), parse(self, *what)))
    lengths = batch.requests_in(requests, engine)
    assert (next(lengths), next(lengths)) == tuple(expected[:2]) and read == [1, 2, 3]


# 5. Going on -----------------------------------------------------------------------------------------------------

LINES = [asked("a"), chat("b", "ü"), b"{", asked("c", n=2), asked("a"), chat("d", stream=True), asked("e", max_tokens=1)]


@pytest.fixture(scope="module")
def whole(tiny_engine, tmp_path_factory):
    """-> the request file, and the bytes of all its replies."""
    folder = tmp_path_factory.mktemp("whole")
    engine = paged.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, blocks=64, block_size=4)
    requests = write(folder / "requests.jsonl", *LINES)
    assert answer(engine, requests, folder / "replies.jsonl")["replies"] == len(LINES)
    engine.close()
    return requests, (folder / "replies.jsonl").read_bytes()


def lines_before(raw: bytes, cut: int) -> bytes:
    return raw[:raw[:cut].rfind(b"\n") + 1]


def test_wherever_the_out_file_is_cut_it_is_seen_for_what_it_is(whole, tmp_path):
    requests, raw = whole
    out = tmp_path / "replies.jsonl"
    ends = [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    for cut in sorted({*range(0, len(raw), 3), *ends, *(end - 1 for end in ends), *range(1, 80)}):
        out.write_bytes(raw[:cut])
        seen = batch.Replies(requests, out)
        seen.close()
        kept = lines_before(raw, cut)
        assert out.read_bytes() == kept, cut
        lines = [json.loads(line) for line in kept.splitlines()]
        assert seen.done == {line["id"] for line in lines}
        assert seen.errors == sum(line["response"]["status_code"] != 200 for line in lines)


def test_after_every_cut_the_rest_is_answered_and_what_was_there_is_kept(whole, make, tmp_path, capsys):
    requests, raw = whole
    engine, ends = make(), [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    expected = {line["id"]: (line["custom_id"], line["response"]["status_code"], choices(line)) for line in map(
        json.loads, raw.splitlines())}
    for cut in sorted({*range(0, len(raw), 83), *ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1])}):
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(raw[:cut])
        row, kept = answer(engine, requests, out), lines_before(raw, cut)
        assert out.read_bytes().startswith(kept), cut
        assert expected == {
            line["id"]: (line["custom_id"], line["response"]["status_code"], choices(line)) for line in replies(out)}
        assert (row["replies"], row["errors"], row["before"]) == (7, 3, kept.count(b"\n"))
        said = capsys.readouterr().out
        assert said.startswith(f"7 replies in '{out}', 3 of them errors, {kept.count(bytes([10]))} of them there before; ")
        assert said.count("\n") == 1 and said.endswith(" tokens/s\n") and f" {row['completion_tokens']} new tokens, " in said


def choices(line):
    return line["response"]["body"].get("choices")


def test_what_is_complete_stays_as_it_is(whole, make, tmp_path):
    requests, raw = whole
    out, engine = tmp_path / "replies.jsonl", make()
    out.write_bytes(raw)
    assert answer(engine, requests, out)["completion_tokens"] == 0
    assert out.read_bytes() == raw and engine.counts["requests"] == engine.counts["steps"] == 0


def test_the_same_content_in_another_order_is_kept_too(whole, make, tmp_path):
    requests, raw = whole
    out = tmp_path / "replies.jsonl"
    kept = b"".join(reversed(raw.splitlines(keepends=True)[2:6]))
    out.write_bytes(kept)
    answer(make(), requests, out)
    assert out.read_bytes().startswith(kept) and len(replies(out)) == len(LINES)


def test_requests_that_are_added_at_the_end_are_answered(whole, make, tmp_path):
    raw = whole[1]
    requests, out = write(tmp_path / "requests.jsonl", *LINES, asked("f"), asked("b")), tmp_path / "replies.jsonl"
    out.write_bytes(raw)
    answer(make(), requests, out)
    *_, duplicate, new = replies(out)
    assert out.read_bytes().startswith(raw) and texts(new["response"]) and new["custom_id"] == "f"
    assert "'b' is that of line 2" in duplicate["response"]["body"]["error"]["message"], "those that had their reply count"


def test_a_reply_that_was_deleted_is_given_again(whole, make, tmp_path):
    requests, raw = whole
    out, lines = tmp_path / "replies.jsonl", raw.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert answer(make(), requests, out)["before"] == 6
    assert {line["id"] for line in replies(out)} == {json.loads(line)["id"] for line in lines}


def test_a_last_line_that_is_not_json_is_torn_too(whole, make, tmp_path):
    requests, raw = whole
    out, *lines = tmp_path / "replies.jsonl", *raw.splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1][:90] + b"\n")
    assert answer(make(), requests, out)["before"] == 1
    assert out.read_bytes().startswith(lines[0]) and len(replies(out)) == len(LINES)


def spoiled(raw: bytes) -> dict[str, bytes]:
    """Files that are no replies to LINES, or not only."""
    first, second, third = raw.splitlines(keepends=True)[:3]
    foreign = re.sub(b"batch_req_.", b"batch_req_x", first)
    return {"a foreign reply": foreign, "a foreign reply at the end": first + foreign,
            "a foreign reply in between": foreign + first, "a foreign reply, torn": first + foreign[:60],
            "a text": b"Dear diary,\nit rained.\n", "a line of text": b"Dear diary\n", "a text without an end": b"Dear diary",
            "JSON": b'{"id": 7}\n', "a list": b"[]\n", "a number": b"7\n",
            "an id that is a list": b'{"id": [], "response": {"status_code": 200}}\n',
            "a torn line in between": first + second[:90] + b"\n" + third, "an empty line": first + b"\n" + second,
            "not UTF-8": b"\xff\xfe\n", "requests": b"".join(json.dumps(asked(name)).encode() + b"\n" for name in "ab"),
            "deep": b"[" * 100_000 + b"\n"}


@pytest.mark.parametrize("what", spoiled(b"batch_req_0\n" * 3))
def test_an_out_file_that_holds_something_else_is_refused_and_unchanged(whole, make, tmp_path, what):
    requests, raw = whole
    out, content, engine, refusals = tmp_path / "replies.jsonl", spoiled(raw)[what], make(), []
    out.write_bytes(content)
    for refuse in (batch.check, lambda arguments: batch.answer(engine, arguments)):
        with pytest.raises(BadRequest, match=r"^Line \d of .*replies.jsonl. is no reply to a line of .*requests.jsonl.") as told:
            refuse(parsed(requests, out))
        refusals.append(told.value)                             # nothing that was opened is still open because of it
        assert out.read_bytes() == content
    assert engine.counts["requests"] == 0


@pytest.mark.parametrize("change", ["edited", "moved"])
def test_replies_to_lines_that_have_changed_are_refused(whole, tmp_path, change):
    lines = [asked("a", max_tokens=4), *LINES[1:]] if change == "edited" else [b"", *LINES]
    requests, out = write(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    out.write_bytes(whole[1])
    with pytest.raises(BadRequest, match="is no reply to a line of"):
        batch.check(parsed(requests, out))
    assert out.read_bytes() == whole[1]


@needs_signals
def test_nobody_else_may_write_the_out_file_meanwhile(whole, make, tmp_path, monkeypatch):
    requests, raw = whole
    out = tmp_path / "replies.jsonl"
    out.write_bytes(raw[:-5])
    first = batch.Replies(requests, out)
    held = out.read_bytes() + b"torn"
    out.write_bytes(held)
    for refuse in (batch.check, lambda arguments: batch.answer(make(), arguments)):
        with pytest.raises(OSError, match=r"^Another process is writing '.*replies.jsonl'; wait for its end, or "):
            refuse(parsed(requests, out))
        assert out.read_bytes() == held
    out.write_bytes(held[:-4])
    first.close()
    batch.check(parsed(requests, out))

    def no_locks(*_):
        raise OSError(37, "No locks available")
    for lock in (None, type("fcntl", (), dict(flock=no_locks, LOCK_EX=0, LOCK_NB=0))):          # a system, a disk without locks
        monkeypatch.setattr(batch, "fcntl", lock)
        first = batch.Replies(requests, out)
        batch.Replies(requests, out).close()
        first.close()


def test_a_disk_that_is_full_is_told_and_the_same_command_goes_on(make, tmp_path, monkeypatch):
    requests, out = write(tmp_path / "requests.jsonl", *map(asked, "abcd")), tmp_path / "replies.jsonl"
    opened = batch.Replies.__init__

    class Full:
        """Room for so many bytes more."""
        def __init__(self, file, room):
            self.file, self.room = file, room

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, raw):
            if not self.room:
                raise OSError(28, "No space left on device")
            written = self.file.write(raw[:self.room])
            self.room -= written
            return written

    def full(self, *paths):
        opened(self, *paths)
        self.file = Full(self.file, 1300)
    monkeypatch.setattr(batch.Replies, "__init__", full)
    with pytest.raises(OSError, match=r"^Cannot write .* \(No space left on device\); 2 of 4 replies are written, and the same "):
        answer(make(), requests, out)
    assert len(out.read_bytes()) == 1300 and out.read_bytes().count(b"\n") == 2
    kept = lines_before(out.read_bytes(), 1300)
    monkeypatch.undo()
    assert answer(make(), requests, out)["before"] == 2 and out.read_bytes().startswith(kept) and len(replies(out)) == 4


def test_a_reply_is_one_write(make, tmp_path, monkeypatch):
    requests, out, writes = write(tmp_path / "requests.jsonl", *map(asked, "abc")), tmp_path / "replies.jsonl", []
    opened = batch.Replies.__init__

    class Counting:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, raw):
            writes.append(raw)
            return self.file.write(raw)

    def counted(self, *paths):
        opened(self, *paths)
        assert isinstance(self.file, io.RawIOBase)              # which keeps nothing back
        self.file = Counting(self.file)
    monkeypatch.setattr(batch.Replies, "__init__", counted)
    answer(make(), requests, out)
    assert writes == out.read_bytes().splitlines(keepends=True) and len(writes) == 3


# 6. The command line ---------------------------------------------------------------------------------------------

def main(monkeypatch, *arguments):
    """As a chapter's `__main__`, with an engine that must not be needed."""
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    def add_arguments(parser):
        paged.add_arguments(parser)
        batch.add_arguments(parser)
    monkeypatch.setattr(sys, "argv", ["chapter.py", *map(str, arguments)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            app.main("", "chapter", add_arguments, paged.make_engine, None, load=load, check=batch.check,
                     batch=batch.answer)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return end.value.code


FILES = {                          # words -> arguments
    "--batch FILE and --out FILE go together": ["--batch", "requests"],
    "--batch FILE and --out FILE go": ["--out", "out"],
    "leave --demo and --prompt out": ["--batch", "requests", "--out", "out", "--demo"],
    "leave --demo and --prompt": ["--batch", "requests", "--out", "out", "--prompt", "Hello"],
    "--batch and --out are the same file": ["--batch", "requests", "--out", "requests"],
    "--batch and --out are the same": ["--batch", "requests", "--out", "folder/../requests"],
    "--batch and --out are the": ["--batch", "requests", "--out", "link"],
    "--batch and --json are the same file": ["--batch", "requests", "--out", "out", "--json", "requests"],
    "--out and --trace are the same file": ["--batch", "requests", "--out", "out", "--trace", "out"],
    "'{}/folder' is no file; give --out": ["--batch", "requests", "--out", "folder"],
    "'{}/folder' is no file; give --batch": ["--batch", "folder", "--out", "out"],
    "Cannot read '{}/nothing' (No such file or directory); give --batch a file": ["--batch", "nothing", "--out", "out"],
    "Cannot write '{}/no/out' (No such file or directory); choose another --out": ["--batch", "requests", "--out", "no/out"],
    "Cannot write '{}/requests/out' (Not a directory); choose another --out": ["--batch", "requests", "--out", "requests/out"],
    "Line 1 of '{}/text' is no reply": ["--batch", "requests", "--out", "text"],
}


@needs_signals
@pytest.mark.parametrize("words", FILES)
def test_wrong_files_are_told_in_one_line_before_the_model_is_loaded(monkeypatch, tmp_path, words):
    requests = write(tmp_path / "requests", asked("a"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(requests)
    (tmp_path / "text").write_text("Dear diary\n")
    before = {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    complaint = main(monkeypatch, *(
        word if word.startswith("--") or word == "Hello" else tmp_path / word for word in FILES[words]))
    assert complaint.startswith("chapter: ") and "\n" not in complaint and words.format(tmp_path) in complaint
    assert {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_batch_nothing_is_checked(monkeypatch):
    with pytest.raises(AssertionError, match="a model was loaded"):
        main(monkeypatch, "--prompt", "Hello")


def test_options_are_refused_even_where_a_chapter_does_not_check(make, tmp_path):
    requests = write(tmp_path / "requests.jsonl", asked("a"))
    arguments = parsed(requests, "out")
    arguments.out = None
    with pytest.raises(BadRequest, match="go together"):
        batch.answer(make(), arguments)


def test_a_bar_on_stderr_counts_those_that_were_there(whole, make, tmp_path, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    requests, raw = whole
    out, terminal = tmp_path / "replies.jsonl", Terminal()
    out.write_bytes(b"".join(raw.splitlines(keepends=True)[:3]))
    monkeypatch.setattr(sys, "stderr", terminal)
    answer(make(), requests, out)
    said = capsys.readouterr().out
    assert "| 3/7 [" in terminal.getvalue() and "| 7/7 [" in terminal.getvalue() and said.startswith("7 replies in ")


# A chapter of its own, to be run as a process. It stops for ever, or kills itself within a line, after so many replies
SCRIPT = f"""
import importlib, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from legacy import app, batch
from legacy import paged
stop, cut = int(os.environ.get("STOP", 0)), int(os.environ.get("CUT", 0))

class Engine(paged.Engine):
    def step(self):
        while stop and replies and len(replies[-1].done) >= stop:
            time.sleep(60)
        return super().step()

class Replies(batch.Replies):
    def __init__(self, *paths):
        super().__init__(*paths)
        replies.append(self)

    def append(self, *reply):
        if cut and len(self.done) == cut:
            write, self.file = self.file.write, type("Cut", (), dict(write=self.cut))
        super().append(*reply)

    def cut(self, raw):
        with self.path.open("ab") as file:
            file.write(raw[:len(raw) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

replies, batch.Replies = [], Replies

def add_arguments(parser):
    paged.add_arguments(parser)
    batch.add_arguments(parser)

def make_engine(*model_and_more):
    paged.Engine = Engine
    return paged.make_engine(*model_and_more)

app.main("", "chapter", add_arguments, make_engine, None, check=batch.check, batch=batch.answer)
"""


@pytest.fixture
def chapter_script(tmp_path, tiny_folder):
    """-> the script, and the arguments of a batch of 12, of which 4 run at once."""
    (tmp_path / "chapter.py").write_text(SCRIPT)
    write(tmp_path / "requests.jsonl", *(asked(str(number), max_tokens=1 + number) for number in range(11)), b"{")
    arguments = ["--model", str(tiny_folder), "--gpu-blocks", "64", "--max-running", "4",
                 "--batch", str(tmp_path / "requests.jsonl"), "--out", str(tmp_path / "replies.jsonl")]
    return tmp_path / "chapter.py", arguments


def complete(out, right):
    answers = by_name(out)
    assert answers.pop(None)["status_code"] == 400
    assert {name: texts(response) for name, response in answers.items()} == {
        str(number): [right(asked(str(number), max_tokens=1 + number)).text] for number in range(11)}


@needs_signals
def test_killed_within_a_line_it_goes_on_from_there(chapter_script, right, tmp_path):
    script, arguments = chapter_script
    out, report = tmp_path / "replies.jsonl", tmp_path / "report.json"
    for cut in (3, 7):
        done = run(*arguments, script=script, CUT=str(cut))
        assert done.returncode == -signal.SIGKILL and done.stdout == ""
        raw = out.read_bytes()
        assert raw.count(b"\n") == cut and not raw.endswith(b"\n")
    done = run(*arguments, "--json", str(report), "--trace", str(tmp_path / "trace.json"), script=script)
    assert done.returncode == 0 and done.stderr.startswith("KV pool: ") and done.stderr.count("\n") == 1, done
    assert done.stdout.startswith(f"12 replies in '{out}', 1 of them errors, 7 of them there before; ")
    assert out.read_bytes().startswith(lines_before(raw, len(raw)))
    complete(out, right)
    written = json.loads(report.read_text())
    row, = written["rows"]
    assert written["chapter"] == "chapter" and (row["replies"], row["errors"], row["before"]) == (12, 1, 7)
    assert written["counters"]["finished"] == 5 and written["counters"]["completion_tokens"] == row["completion_tokens"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_it_what_is_written_stays(chapter_script, right, tmp_path, number):
    script, arguments = chapter_script
    out = tmp_path / "replies.jsonl"
    with Process(*arguments, script=script, STOP="5") as process:
        while not out.exists() or out.read_bytes().count(b"\n") < 5:
            time.sleep(0.01)
        raw = out.read_bytes()
        second = run(*arguments, script=script)
        assert second.returncode == 1 and second.stdout == ""
        assert second.stderr.startswith("chapter: Another process is writing ") and second.stderr.count("\n") == 1
        if number == signal.SIGKILL:
            process.process.kill()
            process.process.communicate()
        else:
            process.interrupt(number)
            count = raw.count(b"\n")
            assert b"\n%d of 12 replies are written, and the same command goes on from there.\n" % count in process.output
    assert out.read_bytes() == raw and b"batch_req" in raw
    done = run(*arguments, script=script)
    assert done.returncode == 0 and "5 of them there before" in done.stdout, done
    assert out.read_bytes().startswith(raw)
    complete(out, right)


def test_no_thread_is_left(make, tmp_path):
    before = threading.enumerate()
    answer(make(), write(tmp_path / "requests.jsonl", *map(asked, "abc")), tmp_path / "replies.jsonl")
    assert threading.enumerate() == before
