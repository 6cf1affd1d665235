"""Chapter 07 over a real Redis: processes that share it, and all that may happen to it while an engine reads and writes."""
import json
import os
import re
import runpy
import socket
import threading
from contextlib import ExitStack
from functools import partial

import pytest

from legacy.backends import open_backend
from legacy.tests.conftest import ROOT, chapter, make_engine, write_model
from legacy.tests.test_app import eventually
from legacy.tests.test_cli import Process
from legacy.tests.test_paged import in_threads
from legacy.tests.test_server import ask as ask_server
from legacy.tests.test_server import counters
from tests.support.redis_server import RedisServer

tiered = chapter("07_tiered_storage")
SCRIPT = ROOT / "07_tiered_storage.py"
STORY = "It was a long story, and it began with a letter. " * 4
OTHERS = [f"{number}: another story, which begins in its own way and goes on. " * 3 for number in range(3)]
needs_posix = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


@pytest.fixture
def redis():
    with RedisServer() as server:
        yield server


# 1. Processes that share it --------------------------------------------------------------------------------------

LETTER = "A letter came, and it said that somebody would come who knew the whole story from its beginning to its end. " * 4


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """To compute a page takes this model many times longer than to read it: 6 layers x 256, and one narrow KV head."""
    return write_model(tmp_path_factory.mktemp("models") / "slow", max_position_embeddings=512, hidden_size=256,
                       intermediate_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def slow_engine(slow_model):
    return make_engine(slow_model)


OPTIONS = ("--device", "cpu", "--link", "2", "--prefetch-policy", "wait_complete", "--prefetch-threshold", "16")


class Server(Process):
    """A server of chapter 07 in a process of its own."""

    def __init__(self, model, url, *options, **how):
        super().__init__("--model", model, *OPTIONS, "--storage", url, "--port", "0", *options, script=SCRIPT, **how)

    def wait(self) -> "Server":
        self.read_until(b"(Ctrl-C ends it)\n")
        self.port = int(self.output.split(b"http://127.0.0.1:")[1].split()[0])
        return self

    def ask(self, engine, prompt: str, **fields) -> dict:
        """-> its reply, which must be what chapter 01 says, when all that it caused is over."""
        reply = ask_server(self.port, dict(prompt=prompt, max_tokens=6, **fields))
        assert reply.status_code == 200 and reply.json["tokens"] == engine.generate(prompt, max_tokens=6).tokens
        eventually(lambda: all(not counters(self.port)[f"{what}_under_way"] for what in ("swaps", "prefetches", "writes")))
        return reply.json


def whole_pages(engine, prompt: str, size: int = 16) -> int:
    """Of a prompt, without its last token."""
    return (len(engine.encode(prompt, None)[0]) - 1) // size


def check_from_storage(reply: dict, pages: int):
    assert reply["source"] == "storage_hit" and reply["usage"]["cached_tokens"] == 16 * pages
    assert reply["pages"]["storage_hits"] == pages and reply["pages"]["cpu_hits"] == reply["pages"]["gpu_hits"] == 0
    fetched = reply["prefetch"]
    assert (fetched["ended"], fetched["hit_tokens"], fetched["fetched_tokens"]) == ("complete", 16 * pages, 16 * pages)


def test_what_one_process_has_read_another_answers_from_and_a_third_that_joins_later(redis, slow_model, slow_engine):
    """In both directions; and the first is killed before the third begins."""
    pages, back = whole_pages(slow_engine, LETTER), LETTER[::-1]
    assert pages == whole_pages(slow_engine, back) > 16
    with ExitStack() as stack:
        first, second = (stack.enter_context(Server(slow_model, redis.url, fresh=number == 0)) for number in range(2))
        first.wait()
        assert first.ask(slow_engine, LETTER)["source"] == "miss"
        before = counters(first.port)
        assert before["storage_pages_written"] >= pages and before["storage_pages_read"] == before["storage_errors"] == 0
        assert second.wait().ask(slow_engine, OTHERS[0])["source"] == "miss"
        check_from_storage(second.ask(slow_engine, LETTER), pages)
        assert second.ask(slow_engine, LETTER)["source"] == "gpu_hit"
        second.ask(slow_engine, back)
        check_from_storage(first.ask(slow_engine, back), pages)
        counts = [counters(server.port) for server in (first, second)]
        assert [count["storage_pages_read"] for count in counts] == [pages, pages]
        assert [count["storage_errors"] + count["storage_pages_refused"] for count in counts] == [0, 0]

        first.process.kill()
        third = stack.enter_context(Server(slow_model, redis.url)).wait()
        for prompt in (LETTER, back):
            check_from_storage(third.ask(slow_engine, prompt), pages)
        assert counters(third.port)["storage_pages_written"] <= 1, "it wrote again what was there"


def test_what_another_salt_has_read_is_not_found(redis, slow_model, slow_engine):
    pages = whole_pages(slow_engine, LETTER)
    with Server(slow_model, redis.url) as first, Server(slow_model, redis.url) as second:
        assert first.wait().ask(slow_engine, LETTER, cache_salt="Anna")["source"] == "miss"
        second.wait()
        for fields in (dict(), dict(cache_salt="Berta"), dict(cache_salt="anna")):
            reply = second.ask(slow_engine, LETTER, **fields)
            assert reply["source"] == "miss" and reply["prefetch"]["hit_tokens"] == 0
        check_from_storage(second.ask(slow_engine, LETTER, cache_salt="Anna"), pages)


def answered(monkeypatch, capsys, tmp_path, url, *options) -> dict:
    """Run chapter 07 once in this process -> the numbers of its answer. When it ends, all that it wrote is in the storage."""
    report, offload = tmp_path / "report.json", chapter("03_cpu_offload")
    monkeypatch.setattr(offload.MeasuringEngine, "seconds_to_compute", lambda engine, start, end: float(end - start))
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *OPTIONS, "--storage", url, "--prompt", STORY, "--max-tokens", "2", "--json",
                                     str(report), *map(str, options)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    capsys.readouterr()
    return json.loads(report.read_text())


def test_engines_of_other_layouts_page_sizes_weights_and_dtypes_do_not_find_each_others_pages(
        redis, tiny_folder, tmp_path_factory, tmp_path, monkeypatch, capsys):
    other = write_model(tmp_path_factory.mktemp("models") / "other", seed=1)
    for options in ([tiny_folder], [tiny_folder, "--layout", "layer_first"], [tiny_folder, "--layout", "page_first"],
                    [tiny_folder, "--page-size", 8], [tiny_folder, "--page-size", 32], [tiny_folder, "--dtype", "bfloat16"],
                    [tiny_folder, "--dtype", "float16"], [other]):
        replies = [answered(monkeypatch, capsys, tmp_path, redis.url, "--model", *options) for _ in range(2)]
        assert [reply["source"] for reply in replies] == ["miss", "storage_hit"], options
        assert replies[0]["prefetch"]["hit_tokens"] == 0 and replies[0]["tokens"] == replies[1]["tokens"]


# 2. What may happen to it ----------------------------------------------------------------------------------------

FIRST = 1000.0                     # seconds: who backs off here does so until a test lets the time pass


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(tiered.Backoff, "FIRST", FIRST)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 3 * FIRST)


def time_passes(engine):
    """Nobody backs off any more."""
    with engine.storage.changed:
        engine.storage.reading.until = engine.storage.writing.until = 0.0


def make(tiny_engine, server, timeout: float = 0.3, **options):
    """Chapter 07's engine on the model of chapter 01's, with storage. It always estimates to load faster than to compute."""
    engine = tiered.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, **{
        "blocks": 64, "cpu_blocks": 64, "bytes_per_second": 5e8, "prefetch_policy": "wait_complete", "prefetch_threshold": 16,
        **options})
    engine.seconds_to_load = lambda *_, **__: 1e-9
    engine.seconds_to_compute = lambda *_: 1e3
    engine.attach(open_backend(server.url, dict(timeout=timeout)), "Redis")
    return engine


@pytest.fixture
def engines():
    """A list of engines that are released after the test."""
    made = []
    yield made
    for engine in made:
        if engine.storage:
            engine.detach(0.0)
        engine.close()


known: dict[tuple[str, int], list[int]] = {}                        # what chapter 01 answers with `tiny_engine`


def right(tiny_engine, prompt: str, max_tokens: int) -> list[int]:
    if (prompt, max_tokens) not in known:
        known[prompt, max_tokens] = tiny_engine.generate(prompt, max_tokens=max_tokens).tokens
    return known[prompt, max_tokens]


def answer(engine, tiny_engine, *prompts: str, max_tokens: int = 4) -> list:
    """Ask all at once, with chapter 01's tokens -> the requests. Nothing is on its way afterwards."""
    prompts = prompts or (STORY,)
    requests = [engine.submit(prompt, max_tokens=max_tokens)[0] for prompt in prompts]
    while engine.step():
        engine.check_integrity()
    engine.flush()
    engine.check_integrity()
    for prompt, request in zip(prompts, requests):
        if isinstance(request.outcome, Exception):
            raise request.outcome
        assert request.outcome.tokens == right(tiny_engine, prompt, max_tokens)
    assert not (engine.swaps or engine.prefetches or engine.writes)
    assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size
    return requests


class Garbage:
    """Takes the port of a Redis that was stopped, and answers this to whatever is said."""

    def __init__(self, port: int, said: bytes):
        self.said, self.server = said, socket.create_server(("127.0.0.1", port))
        self.connections = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.speak, args=(connection,), daemon=True).start()

    def speak(self, connection):
        with connection:
            try:
                while connection.recv(1 << 16):
                    connection.sendall(self.said)
            except OSError:
                pass

    def close(self):
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for connection in self.connections:
            with connection:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def command(server, *words: str) -> bytes:
    """Say something to the real Redis, over a connection of its own."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall((" ".join(words) + "\r\n").encode())
        return connection.recv(1 << 16)


class Trouble:
    """What happens to a Redis, and how it ends."""
    KINDS = ["stopped", "restarted empty", "emptied", "paused", "out of memory", "garbage", "an error", "a wrong number",
             "wrong values"]

    def __init__(self, server, kind: str):
        self.server, self.kind, self.garbage = server, kind, None

    def begin(self):
        server, kind = self.server, self.kind
        said = {"garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n", "an error": b"-ERR it is broken\r\n" * 64,
                "a wrong number": b"*64\r\n" + b"$1\r\nx\r\n" * 64}.get(kind)
        if kind == "paused":
            server.pause()
        elif kind == "out of memory":
            assert command(server, "CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
        elif kind == "emptied":
            assert command(server, "FLUSHALL") == b"+OK\r\n"
        elif kind == "wrong values":
            script = "for _, key in ipairs(redis.call('keys', '*')) do redis.call('set', key, 'x') end"
            assert command(server, "EVAL", f'"{script}"', "0") == b"$-1\r\n"
        else:
            server.stop()
            if kind == "restarted empty":
                server.start()
            elif said:
                self.garbage = Garbage(server.port, said)

    def end(self):
        server, kind = self.server, self.kind
        if kind == "paused":
            server.resume()
        elif kind == "out of memory":
            assert command(server, "CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"
        elif kind == "wrong values":
            assert command(server, "FLUSHALL") == b"+OK\r\n"
        elif kind not in ("emptied", "restarted empty"):
            if self.garbage:
                self.garbage.close()
            server.start()

    @property
    def keeps(self) -> bool:
        """Whether what was in it is still there afterwards."""
        return self.kind in ("paused", "out of memory")


class Watched:
    """A back end that notes its calls; `before` comes before each."""

    def __init__(self, backend):
        self.backend, self.calls, self.before, self.armed = backend, [], lambda name: None, False
        self.sizes = []                                             # of the lists that were asked for

    def __getattr__(self, name):
        call = getattr(self.backend, name)

        def watched(*arguments):
            self.before(name)
            self.calls.append(name)
            if name == "batch_get":
                self.sizes.append(len(arguments[0]))
            return call(*arguments)
        return watched

    def when(self, name: str, number: int, call):
        """Once, before call `number` (from 1) of this method from now on."""
        left = iter(range(number - 1))

        def before(called):
            if self.armed and called == name and next(left, None) is None:
                self.armed = False
                call()
        self.before, self.armed = before, True


def watch(engine) -> Watched:
    engine.storage.backend = Watched(engine.storage.backend)
    return engine.storage.backend


def counts_of(engine) -> dict:
    return {name.removeprefix("storage_"): value for name, value in engine.counters().items() if name.startswith("storage_")}


READ_WELL = ("out of memory",)     # reading needs none
NO_ERROR = ("restarted empty", "emptied")                           # it answers that there is nothing


@needs_posix
@pytest.mark.parametrize("kind", Trouble.KINDS)
def test_trouble_while_a_prompt_is_read(redis, tiny_engine, engines, kind):
    """It comes when the first of its pages have been read: the others are computed, and for a while nothing is asked for."""
    engine, pages, trouble = make(tiny_engine, redis), whole_pages(tiny_engine, STORY), Trouble(redis, kind)
    engines.append(engine)
    backend = watch(engine)
    answer(engine, tiny_engine)
    tiered.forget(engine)
    backend.when("batch_get", 3, trouble.begin)
    request, = answer(engine, tiny_engine)
    fetched, counts, storage = request.outcome.prefetch, counts_of(engine), engine.storage
    assert not backend.armed and fetched["hit_tokens"] == 16 * pages, "it did not come in the middle"
    if kind in READ_WELL:
        assert request.source == "storage_hit" and fetched["ended"] == "complete" and counts["errors"] == 0
    else:
        read = sum(backend.sizes[:2])
        assert request.source == "storage_hit" and request.cached_tokens == read * 16 == fetched["fetched_tokens"]
        assert (request.outcome.pages["storage_hits"], request.outcome.pages["cpu_hits"]) == (read, 0)
        assert fetched["ended"] == "failed" and counts["pages_read"] == read
        assert (counts["errors"] > 0) == (kind not in NO_ERROR), engine.storage.error
        assert counts["pages_refused"] == (kind == "wrong values")

    # While it backs off, nobody asks; and all are answered
    if kind not in (*READ_WELL, *NO_ERROR):
        assert storage.reading.seconds >= FIRST and not storage.reading.ready and storage.error
        assert not any(secret in storage.error for secret in ("Traceback", "\n"))
        state = engine.storage_state()
        assert state["reading"] is False and state["last_error"] == storage.error
        del backend.calls[:]
        tiered.forget(engine)
        request, = answer(engine, tiny_engine)
        assert request.source == "miss" and request.outcome.prefetch is None
        assert not [call for call in backend.calls if call == "batch_get"]
        before, storage.reading.until = storage.reading.seconds, 0.0
        tiered.forget(engine)
        answer(engine, tiny_engine)                                 # tries once more, in vain, and for twice as long it does not
        if kind != "wrong values":                                  # where to look for keys works
            assert storage.reading.seconds == min(2 * before, tiered.Backoff.LONGEST)
        assert counts_of(engine)["errors"] > counts["errors"]

    # It recovers
    trouble.end()
    time_passes(engine)
    tiered.forget(engine)
    request, = answer(engine, tiny_engine)
    if trouble.keeps:
        assert request.source == "storage_hit" and request.cached_tokens == 16 * pages
    time_passes(engine)
    tiered.forget(engine)
    answer(engine, tiny_engine)
    tiered.forget(engine)
    request, = answer(engine, tiny_engine)
    assert request.source == "storage_hit" and request.cached_tokens == 16 * pages
    state = engine.storage_state()
    assert storage.reading.seconds == 0.0 and state["reading"] is state["writing"] is True


@needs_posix
@pytest.mark.parametrize("kind", [kind for kind in Trouble.KINDS if kind not in ("wrong values", "a wrong number")])
@pytest.mark.parametrize("policy", tiered.WRITE_POLICIES)
def test_trouble_while_pages_are_written(redis, tiny_engine, engines, policy, kind):
    """It comes between the question what is there and the writing. Under write_back this is when others want the room."""
    engine = make(tiny_engine, redis, write_policy=policy, blocks=20, cpu_blocks=20)
    engines.append(engine)
    backend, trouble, storage = watch(engine), Trouble(redis, kind), engine.storage
    backend.when("batch_set", 1, trouble.begin)
    crowd = [prompt for prompt in (STORY, *OTHERS) for _ in range(4)]           # as often as the policy wants, and some more
    for prompt in crowd:
        answer(engine, tiny_engine, prompt)
    counts = counts_of(engine)
    assert "batch_set" in backend.calls and not backend.armed
    if kind in ("restarted empty", "emptied"):                      # the connection is made anew, and what comes is kept
        assert counts["errors"] in (0, 1)
    else:
        assert counts["errors"] >= 1 and storage.writing.seconds >= FIRST and not storage.writing.ready
        assert counts["pages_written"] == 0 and engine.storage_state()["writing"] is False
        assert backend.calls.count("batch_set") == 1, "it went on to write"
        storage.writing.until = 0.0
        for prompt in crowd:
            answer(engine, tiny_engine, prompt)
        assert storage.writing.seconds >= FIRST and counts_of(engine)["errors"] > counts["errors"]

    # It recovers: what is computed now reaches it, and another engine answers from that
    trouble.end()
    for prompt in (*OTHERS, *[STORY] * 4):
        time_passes(engine)
        answer(engine, tiny_engine, prompt)
    engine.release()
    assert engine.storage is None and counts_of(engine).get("errors", 0) == 0
    other = make(tiny_engine, redis)
    engines.append(other)
    request, = answer(other, tiny_engine)
    assert request.source == "storage_hit" and request.cached_tokens == 16 * whole_pages(tiny_engine, STORY)


@needs_posix
@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_storage_that_hangs_is_left_when_it_has_been_silent_for_long(redis, tiny_engine, engines, monkeypatch, policy):
    """Its own timeout is longer than anybody waits: who waits goes on and computes, and the silence is an error."""
    monkeypatch.setattr(tiered, "PATIENCE", 0.2)
    engine = make(tiny_engine, redis, timeout=30.0, prefetch_policy=policy)
    engine.timeout = 1e3, 0.0, 1e3
    engines.append(engine)
    answer(engine, tiny_engine)
    tiered.forget(engine)
    backend, storage = watch(engine), engine.storage
    backend.when("batch_get", 2, redis.pause)
    request, = engine.submit(STORY, max_tokens=4)
    while engine.step():
        engine.check_integrity()
    assert request.outcome.tokens == tiny_engine.generate(STORY, max_tokens=4).tokens
    assert request.outcome.prefetch["ended"] == "silent" and request.source == "storage_hit" and request.cached_tokens == 16
    assert counts_of(engine)["errors"] == 1 and storage.error == "no answer in time" and storage.reading.seconds == FIRST
    other, = engine.submit(OTHERS[0], max_tokens=4)
    while engine.step():
        engine.check_integrity()
    assert other.outcome.prefetch is None and other.outcome.tokens == tiny_engine.generate(OTHERS[0], max_tokens=4).tokens

    redis.resume()                                                  # and what comes late is kept for the next
    engine.flush()
    engine.check_integrity()
    assert not engine.prefetches and engine.counts["late_pages"] >= 1
    time_passes(engine)
    tiered.forget(engine)
    request, = answer(engine, tiny_engine)
    assert request.source == "storage_hit" and request.cached_tokens == 16 * whole_pages(tiny_engine, STORY)


@needs_posix
def test_an_engine_whose_storage_hangs_ends_and_says_what_was_not_written(redis, tiny_engine, engines, monkeypatch, capsys):
    monkeypatch.setattr(tiered, "PATIENCE", 0.2)
    engine = make(tiny_engine, redis, timeout=0.2, write_policy="write_back")
    engines.append(engine)
    answer(engine, tiny_engine)
    nodes = sum(map(engine.tree.pages, engine.tree.nodes()))
    assert not counts_of(engine)["pages_written"] and nodes >= whole_pages(tiny_engine, STORY)
    redis.pause()
    engine.release()
    said = capsys.readouterr().err
    assert re.fullmatch(rf"{nodes} pages could not be written to Redis \(.+\)\.\n", said) and engine.storage is None


DAMAGES = {9: ("SET", "x"), 7: ("SETRANGE", "0", "x"), 5: ("SETRANGE", "40", "x"), 3: ("SETRANGE", "300", "xyzt"),
           1: ("APPEND", "x")}


def keys_in(engine, tiny_engine, prompt: str = STORY) -> list[str]:
    """Of the prompt's whole pages, in Redis."""
    tokens = tiered.as_bytes(tiny_engine.encode(prompt, None)[0][:16 * whole_pages(tiny_engine, prompt)])
    return [f"kv:{key.hex()}" for key in engine.tree.chain(engine.tree.root("").keys[0], tokens)]


def damage(redis, key: str, name: str, *words: str):
    assert command(redis, name, key, *words)[:1] in b"+:"


def test_pages_that_somebody_has_damaged_are_refused(redis, tiny_engine, engines):
    """Each in another way, the last first. What is before the first of them is used."""
    engine, pages = make(tiny_engine, redis), whole_pages(tiny_engine, STORY)
    engines.append(engine)
    answer(engine, tiny_engine)
    for refused, (number, words) in enumerate(DAMAGES.items()):
        damage(redis, keys_in(engine, tiny_engine)[number], *words)
        time_passes(engine)
        tiered.forget(engine)
        assert counts_of(engine)["pages_refused"] == refused
        request, = answer(engine, tiny_engine)
        assert request.cached_tokens == 16 * number and request.outcome.prefetch["ended"] == "failed"
        assert request.outcome.prefetch["hit_tokens"] == 16 * pages
        assert not engine.storage.reading.ready
    assert counts_of(engine)["pages_refused"] == len(DAMAGES) == counts_of(engine)["errors"]


@pytest.mark.parametrize("number", DAMAGES)
def test_a_page_that_was_refused_is_written_again(redis, tiny_engine, engines, number):
    """Else nobody would ever find what is behind it."""
    engine, pages = make(tiny_engine, redis), whole_pages(tiny_engine, STORY)
    engines.append(engine)
    answer(engine, tiny_engine)
    damage(redis, keys_in(engine, tiny_engine)[number], *DAMAGES[number])
    tiered.forget(engine)
    request, = answer(engine, tiny_engine)
    assert request.cached_tokens == 16 * number
    time_passes(engine)
    answer(engine, tiny_engine)
    tiered.forget(engine)
    request, = answer(engine, tiny_engine)
    assert request.cached_tokens == 16 * pages


def test_a_small_redis_that_is_full_keeps_what_it_has_and_refuses_the_rest(tiny_engine, engines):
    with RedisServer("--maxmemory", "2mb") as server:
        engine = make(tiny_engine, server)
        engines.append(engine)
        number = 0
        while not counts_of(engine)["errors"]:
            assert number < 200, "it was never full"
            answer(engine, tiny_engine, f"{number}: {STORY}"[:200])
            number += 1
        assert "memory" in engine.storage.error and counts_of(engine)["pages_written"] > 0
        assert not engine.storage.writing.ready and engine.storage.reading.ready
        tiered.forget(engine)
        request, = answer(engine, tiny_engine, f"0: {STORY}"[:200])
        assert request.source in ("storage_hit", "miss") and (request.source == "storage_hit") == (number > 1)


def test_backing_off_lasts_longer_each_time_also_where_only_setting_fails(redis, tiny_engine, engines):
    """A Redis that is full says what is there, and takes nothing more."""
    engine = make(tiny_engine, redis)
    engines.append(engine)
    backend, storage = watch(engine), engine.storage
    assert command(redis, "CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    lasted = []
    for number in range(3):
        storage.writing.until = 0.0
        answer(engine, tiny_engine, f"{number}: {STORY}"[:200])
        lasted.append(storage.writing.seconds)
    assert backend.calls.count("batch_set") == 3 and lasted == [FIRST, 2 * FIRST, 3 * FIRST]


@needs_posix
def test_a_redis_that_comes_and_goes_under_a_crowd_changes_no_token(redis, tiny_engine, engines, monkeypatch):
    """Threads ask; meanwhile it is stopped, started, paused and emptied again and again."""
    monkeypatch.setattr(tiered.Backoff, "FIRST", 0.005)
    monkeypatch.setattr(tiered.Backoff, "LONGEST", 0.02)
    prompts = [f"{number}: {STORY}"[:180] for number in range(8)]
    expected = [tiny_engine.generate(prompt, max_tokens=4).tokens for prompt in prompts]
    engine = make(tiny_engine, redis, timeout=0.05, blocks=40, cpu_blocks=40, write_policy="write_back", max_running=4)
    engines.append(engine)
    done, troubles = threading.Event(), []

    def disturb():
        while not done.is_set():
            for kind in ("stopped", "paused", "emptied", "restarted empty", "garbage"):
                trouble = Trouble(redis, kind)
                trouble.begin()
                done.wait(0.08)
                trouble.end()
                done.wait(0.1)
                troubles.append(kind)

    def client(number):
        try:
            for turn in range(12):
                which = (number * 5 + turn) % len(prompts)
                assert engine.generate(prompts[which], max_tokens=4).tokens == expected[which]
        finally:
            finished.append(number)
            if len(finished) == 4:
                done.set()
    finished = []
    outcomes = in_threads(disturb, *(partial(client, number) for number in range(4)))
    assert outcomes == [None] * 5
    with engine.stepping:
        engine.check_integrity()
    counts = engine.counters()
    assert counts["finished"] == 48 and counts["failed"] == 0 and len(troubles) >= 1
    eventually(lambda: not (engine.running or engine.waiting))
    engine.flush()
    engine.check_integrity()
    assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size
    time_passes(engine)
    tiered.forget(engine)                                           # it cannot know that what was there has gone
    answer(engine, tiny_engine, prompts[0])
    engine.release()
    other = make(tiny_engine, redis)
    engines.append(other)
    request, = answer(other, tiny_engine, prompts[0])
    assert request.source == "storage_hit"


# 3. What an engine believes to be there --------------------------------------------------------------------------

def read_by_another(redis, tiny_engine, engines, prompt: str) -> int:
    """How many pages a new engine finds in the storage."""
    other = make(tiny_engine, redis)
    engines.append(other)
    request, = answer(other, tiny_engine, prompt)
    return request.outcome.pages["storage_hits"]


def test_what_was_written_before_storage_lost_it_is_not_taken_for_written_afterwards(redis, tiny_engine, engines):
    """One node is written; storage is emptied, and another write fails; only then does the engine look at both."""
    engine = make(tiny_engine, redis, write_policy="write_back")
    engines.append(engine)
    backend = watch(engine)
    for prompt in (STORY, OTHERS[0]):
        answer(engine, tiny_engine, prompt)
    first, second = (child for root in engine.tree.roots.values() for child in root.children.values())
    with engine.stepping:
        for node in (first, second):
            assert engine.back_up(node, anyway=True)
    engine.flush()
    with engine.stepping:
        assert engine.store(first)
        eventually(lambda: first.writing.over)
        assert not first.writing.failed
        assert command(redis, "FLUSHALL") == b"+OK\r\n"

        def fail():
            raise OSError("it has just restarted")
        backend.when("batch_exists", 1, fail)
        assert engine.store(second)
        eventually(lambda: second.writing.over)
        assert second.writing.failed
    engine.flush()
    time_passes(engine)
    engine.release()
    for prompt in (STORY, OTHERS[0]):
        assert read_by_another(redis, tiny_engine, engines, prompt) == whole_pages(tiny_engine, prompt)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_storage_loses_while_it_is_read_is_written_again(redis, tiny_engine, engines, policy):
    """It said that it had the pages, gave some of them, and then has none: it was restarted, or has evicted them. After a while
    others find them again, beginning with those that were read."""
    engine = make(tiny_engine, redis, write_policy=policy)
    engines.append(engine)
    backend = watch(engine)
    answer(engine, tiny_engine)
    with engine.stepping:
        for node in [node for node in engine.tree.nodes() if node.host is None]:
            engine.back_up(node, anyway=True)
    engine.flush()
    with engine.stepping:
        for node in list(engine.tree.nodes()):
            engine.store(node)
    engine.flush()
    tiered.forget(engine)
    backend.when("batch_get", 3, Trouble(redis, "emptied").begin)
    request, = answer(engine, tiny_engine)
    assert request.outcome.pages["storage_hits"] == sum(backend.sizes[:2]) and not backend.armed
    for node in engine.tree.nodes():
        node.checked = -1e9                                         # a while
    answer(engine, tiny_engine)
    engine.release()
    assert read_by_another(redis, tiny_engine, engines, STORY) == whole_pages(tiny_engine, STORY)


def test_at_a_clean_end_all_that_is_dirty_is_written_however_full_host_memory_is(redis, tiny_engine, engines):
    """L2 holds two prompts that storage lacks, L1 two others; and each end of a prompt needs room in L2 first."""
    prompts = [f"{number} {number} {number}: {STORY}"[:160] for number in range(6)]
    engine = make(tiny_engine, redis, write_policy="write_back", blocks=26, cpu_blocks=24)
    engines.append(engine)
    for prompt in prompts:
        answer(engine, tiny_engine, prompt)
    dirty = [node for node in engine.tree.nodes() if node.stored != engine.storage.epoch]
    assert any(node.host is None for node in dirty) and any(node.device is None for node in dirty)
    engine.release()
    for prompt in prompts:
        assert read_by_another(redis, tiny_engine, engines, prompt) == whole_pages(tiny_engine, prompt)


# 4. What a reply shows of it -------------------------------------------------------------------------------------

def test_the_timeline_shows_every_load_also_those_that_arrived_while_the_rest_was_read(redis, tiny_engine, engines):
    """Storage gives 20 Mbit/s, so most pages are on the device before the last has been read."""
    engine = make(tiny_engine, redis)
    engines.append(engine)
    engine.storage.bandwidth = tiered.bidirectional.Bandwidth((20.0,))
    answer(engine, tiny_engine)
    tiered.forget(engine)
    load, loads = engine.load, []

    def note(swap):
        loads.append(swap)
        return load(swap)
    engine.load = note
    request, = answer(engine, tiny_engine)
    assert request.source == "storage_hit" and len(loads) > 2
    drawn = [span for span in request.timeline.spans if span.lane == "load"]
    assert len(drawn) == len(loads) * len(engine.model.layers)
