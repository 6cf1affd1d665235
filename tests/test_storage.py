"""Storage that several engines share, that is slow, or that evicts: what is found again, and what is counted."""

import importlib
import os
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from unittest.mock import Mock

import pytest

from common import store
from common.link import TransferError
from common.requests import Request
from shell import backends
from shell.ranks import Ranks
from shell.workers import Worker
from tests.support.engines import ORACLE, ask, draw, evict, tiered, wait_until_idle
from tests.support.redis_server import redis_server
from tests.test_tiered import FILES, KEYS, Shelf, cache_on, engine_with, opened

ranked = importlib.import_module("09_tensor_parallel")


def found_below(request) -> int:
    """Return how many of the prompt's tokens came from a tier below the device."""
    assert ORACLE.judge(request) != "wrong"
    return sum(tokens for tier, tokens in request.found.items() if tier != "gpu")


# 1. Several engines ----------------------------------------------------------------------------

@FILES
def test_engines_that_share_a_directory_find_the_blocks_of_each_other(kind, tmp_path):
    rng, whole = random.Random(0), 256 if kind == "both" else 288
    first, second, third = (draw(rng, 300) for _ in range(3))
    with engine_with(cache_on(kind, tmp_path, 1.0)) as one, engine_with(cache_on(kind, tmp_path, 1.0)) as other:
        for engine, prompt in (one, first), (other, second), (one, third), (other, third):
            ask(engine, prompt, 1)
            wait_until_idle(engine)
        found = [found_below(ask(engine, prompt + [3], 1)) for engine, prompt in ((other, first), (one, second))]
        assert found == [whole] * 2, "each finds at once what the other one has written"
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        assert [found_below(ask(engine, prompt + [3], 1)) for prompt in (first, second, third)] == [whole] * 3


def test_a_file_that_is_written_during_a_scan_stays_in_the_index(tmp_path, monkeypatch):
    backend, scan = backends.Directory(f"file:{tmp_path}"), os.scandir

    def scan_and_write(folder):
        monkeypatch.setattr(os, "scandir", scan)
        found = list(scan(folder))
        backend.set(KEYS[1:2], [b"new"])  # as by the writer's thread
        return found

    backend.set(KEYS[:1], [b"old"])
    (tmp_path / f"{KEYS[0]}.page").unlink()
    monkeypatch.setattr(os, "scandir", scan_and_write)
    backend.files()
    assert [key in backend.index for key in KEYS[:3]] == [False, True, False]


# 2. Slow storage -------------------------------------------------------------------------------

def cache_of(kind: str, folder, host: int):
    """Return a Cache with `host` host blocks and files as its lower tier. Kind "ranked" is chapter 09's."""
    return ranked_cache(host, backends.open_storage(f"file:{folder}")) if kind == "ranked" else cache_on(kind, folder, 1.0, host)


def ranked_cache(host: int, storage: store.Storage):
    """Return chapter 09's Cache of one rank."""
    cache = ranked.PageHeadCache(Ranks(), host, 2e9, storage, range(2))
    cache.threshold = 1
    return cache


@pytest.mark.parametrize("kind, host", [*((kind, 400) for kind in ("hidden", "planned", "both", "tiered", "ranked")), ("ranked", 40)])
def test_slow_storage_gets_each_block_or_the_block_is_counted(kind, host, tmp_path, monkeypatch):
    """Sixteen prompts at once, and then one more turn of each. In chapters 04 and 05, only eight jobs may wait for the
    writer."""
    rng, write = random.Random(0), backends.Directory.write
    monkeypatch.setattr(store, "BACKLOG", 256 if kind == "both" else 8)
    with monkeypatch.context() as slow, engine_with(cache_of(kind, tmp_path, host), 400) as engine:
        slow.setattr(backends.Directory, "write", lambda *given: time.sleep(1e-3) or write(*given))
        talks = [Request(draw(rng, 8 * 16 + 1), 8) for _ in range(16)]
        engine.generate(talks)
        talks = [engine.generate([Request(talk.tokens + draw(rng, 40), 8)])[0] for talk in talks]
        wait_until_idle(engine)
    missing, size = 0, 64 if kind == "both" else 16
    with engine_with(cache_of(kind, tmp_path, 400), 400) as later:
        for talk in talks:
            full = (len(talk.tokens) - 1) // size
            missing += full - found_below(ask(later, talk.tokens[: full * size] + [3], 1)) // size
            evict(later)
    assert missing <= engine.counts["writes_dropped"]
    assert missing == 0 or kind == "both" or host == 40, "a write that finds no place waits while memory has its block"


def test_a_job_of_many_bytes_may_take_longer_before_it_counts_as_hanging(monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.01)
    for size, hangs in (0, True), (10**9, False):
        worker, begun, release = Worker("storage"), threading.Event(), threading.Event()
        worker.submit("read", size, lambda begun=begun, release=release: (begun.set(), release.wait()))
        begun.wait()
        time.sleep(0.05)
        assert worker.hangs == hangs
        release.set()


def test_only_values_that_storage_has_and_that_are_damaged_stay_doubted():
    with opened(shelf := Shelf()) as (storage, keys, places):
        shelf.set = Mock(side_effect=OSError)
        for number in range(300):
            (write := storage.set([b"%032d" % number], places[:1])).wait()
            with pytest.raises(TransferError):
                storage.get([b"%032d" % -number], places[:1]).wait()
            storage.exists([b"%032d" % -number]).wait()
        assert write.value == [] and not storage.doubted
        shelf.pages[keys[0].hex()] = b"damaged"
        with pytest.raises(TransferError):
            storage.get(keys[:1], places[:1]).wait()
        storage.set(keys[:1], places[:1]).wait()
        (answer := storage.exists(keys[:1])).wait()
        assert answer.value == [False], "after a write that failed, the damaged value is still there"


# 3. Redis --------------------------------------------------------------------------------------

def test_redis_evicts_the_tail_of_a_chain_before_its_head():
    one, other = ([f"{chain}{number:063x}" for number in range(100)] for chain in "ab")
    with redis_server() as url:
        client = (backend := backends.open_backend(url)).client
        client.set(f"kv:{KEYS[0]}", b"written by an older version")
        assert backend.exists(KEYS[:2]) == [True, False] and client.pttl(f"kv:{KEYS[0]}") > 0
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory-samples", 64)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 150 * 10_000)
        for chain in one, other:
            for at in range(0, 100, 4):
                backend.set(chain[at : at + 4], [bytes(9_000)] * 4)
            assert all(backend.exists(chain))
        left = backend.exists(one)
        assert 20 < sum(left) < 80 and left.index(False) > 0.9 * sum(left), "what is left of a chain is its beginning"


@pytest.mark.parametrize("kind", ["tiered", "ranked"])
def test_the_values_of_a_chain_expire_one_after_the_other_the_last_one_first(kind):
    with redis_server() as url:
        storage = backends.open_storage(url)
        cache = ranked_cache(40, storage) if kind == "ranked" else tiered(40, "timeout", "write_through", storage.backend)
        with engine_with(cache) as engine:
            chain = ask(engine, draw(random.Random(0), 300), 4).chain
            wait_until_idle(engine)
            cache.storage.set([], []).wait()  # the writer has also marked the chain as used
            keys = cache.keys(chain) if kind == "ranked" else [page.digest for page in chain]
            times = [storage.backend.client.execute_command("PEXPIRETIME", f"kv:{key.hex()}") for key in keys]
    assert len(times) >= 18 and times == sorted(set(times), reverse=True)


@contextmanager
def slow_redis(size: int, reply: list[bytes], pause: float):
    """Context manager: serve one connection like Redis, and return the URL.

    Before it reads a command of more than `size` bytes, and before each piece of the `reply`, it waits `pause` seconds."""
    def serve():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            while data := connection.recv(1 << 20):
                if b"SETINFO" in data:  # redis-py says which version it is
                    connection.sendall(b"+OK\r\n" * data.count(b"SETINFO"))
                    continue
                time.sleep(pause)
                while len(data) < size or not data.endswith(b"\r\n"):
                    data += connection.recv(1 << 20)
                for piece in reply:
                    time.sleep(pause)
                    connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("parser", ["_RESP2Parser", "_HiredisParser"])
def test_the_timeout_of_redis_is_for_a_whole_answer_and_grows_with_its_bytes(parser, monkeypatch):
    redis = pytest.importorskip("redis")
    monkeypatch.setattr("redis.connection.HIREDIS_AVAILABLE", parser == "_HiredisParser" and pytest.importorskip("hiredis"))

    def opened(url: str):
        backend = backends.RedisBackend(url, timeout=0.5)
        backend.client.connection_pool.connection_kwargs["parser_class"] = getattr(redis._parsers, parser)
        return backend

    value, head = bytes(8_000_000), b"*1\r\n$1000\r\n"
    with slow_redis(0, [head, *[b"x"] * 1000, b"\r\n"], 0.02) as url, pytest.raises(redis.TimeoutError):
        opened(url).get(KEYS[:1])  # 20 s of bytes that come one by one
    with slow_redis(len(value), [b"+OK\r\n"], 0.7) as url:
        assert opened(url).client.mset({"key": value})
    monkeypatch.setattr(backends, "SLOWEST", 10.0)
    with slow_redis(0, [head, *[b"x" * 250] * 4, b"\r\n"], 0.3) as url:
        assert opened(url).get(KEYS[:1]) == [b"x" * 1000]
