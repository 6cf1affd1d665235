"""The storage back ends: one set of tests that every one of them must pass, and what is special to each.

Your own back end, or your own server, goes through the same set if the environment names it (as chapter 07's --storage and
--storage-config would); it is given values of random names and up to 3 MB, and they stay there:

    KV_STORAGE=mine:Backend KV_STORAGE_CONFIG='{"host": "..."}' python -m pytest tests/test_backends.py -k conformance
"""
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager

import numpy
import pytest
import torch

from common.checkpoint import ModelError
from legacy import backends, store
from legacy.backends import exist_all, get_all, label, open_backend, read_config, set_all
from legacy.tests.test_paged import in_threads
from tests.support.redis_server import RedisServer

KINDS = ["file", "redis", "memory", "local", "module"] + (["KV_STORAGE"] if os.environ.get("KV_STORAGE") else [])


class Shelf:
    """The least that a back end can be: the three methods, and nothing else."""
    shelves: dict[str, dict] = {}

    def __init__(self, name: str = "shelf"):
        self.values = self.shelves.setdefault(name, {})

    def get(self, key):
        return self.values.get(key)

    def exists(self, key):
        return key in self.values

    def set(self, key, value):
        self.values[key] = bytes(value)


class BatchShelf(Shelf):
    """All of the contract; notes which of its methods were called."""

    def __init__(self, **config):
        super().__init__(**config)
        self.calls = []

    def batch_get(self, keys):
        self.calls.append("batch_get")
        return [self.values.get(key) for key in keys]

    def batch_exists(self, keys):
        self.calls.append("batch_exists")
        return [key in self.values for key in keys]

    def batch_set(self, keys, values):
        self.calls.append("batch_set")
        self.values.update((key, bytes(value)) for key, value in zip(keys, values))


@pytest.fixture(scope="module")
def redis():
    with RedisServer() as server:
        yield server


@pytest.fixture
def opened():
    """opened(url, **config) -> a back end, which is closed after the test."""
    backends_ = []

    def open_one(url, **config):
        backends_.append(open_backend(str(url), config))
        return backends_[-1]
    yield open_one
    for backend in backends_:
        if hasattr(backend, "close"):
            backend.close()


@pytest.fixture(params=KINDS)
def again(request, opened, tmp_path, monkeypatch):
    """again() -> one more back end on the same storage, as another process would open it."""
    monkeypatch.setitem(sys.modules, "shelf_for_tests", types.SimpleNamespace(Shelf=Shelf))
    name = tmp_path.name
    make = {"file": lambda: opened(f"file:{tmp_path}/pages"), "memory": lambda: opened(f"memory://{name}"),
            "local": lambda: opened(f"local://{tmp_path}/pages"),
            "redis": lambda: opened(request.getfixturevalue("redis").url, prefix=f"{name}:", timeout=30),
            "module": lambda: opened("shelf_for_tests:Shelf", name=name),
            "KV_STORAGE": lambda: opened(os.environ["KV_STORAGE"], **read_config(os.environ.get("KV_STORAGE_CONFIG", "{}")))}
    return make[request.param]


def keys(count: int = 1) -> list[str]:
    """Keys that nobody has used."""
    return [os.urandom(32).hex() for _ in range(count)]


def value_of(key: str, size: int = 1000) -> bytes:
    return random.Random(key).randbytes(size)


# 1. What every back end must do --------------------------------------------------------------------------------------

def test_conformance_what_was_never_set_is_not_there(again):
    backend, (key, *more) = again(), keys(3)
    assert backend.get(key) is None and backend.exists(key) is False
    assert get_all(backend, more) == [None, None] and exist_all(backend, more) == [False, False]
    assert get_all(backend, []) == exist_all(backend, []) == []
    set_all(backend, [], [])


@pytest.mark.parametrize("size", [0, 1, 4096, 3 << 20])
def test_conformance_what_is_set_comes_back_bit_by_bit(again, size):
    backend, (key,) = again(), keys()
    value = (bytes(range(256)) + value_of(key, 3 << 20))[:size]
    backend.set(key, value)
    assert backend.exists(key) is True and backend.get(key) == value
    assert len(memoryview(backend.get(key)).cast("B") if size else b"") == size


@pytest.mark.parametrize("kind", ["memoryview", "a part of one", "bytearray", "NumPy", "torch, 16 bit"])
def test_conformance_values_may_be_any_memory_and_are_kept_when_it_changes(again, kind):
    backend, (key, other) = again(), keys(2)
    buffer = bytearray(value_of(key, 8192))
    value, expected = memoryview(buffer), bytes(buffer)
    if kind == "a part of one":
        value, expected = value[1000:5000], expected[1000:5000]
    elif kind == "bytearray":
        value = buffer
    elif kind == "NumPy":
        value = memoryview(numpy.frombuffer(buffer, "<f4").reshape(64, 32))
    elif kind == "torch, 16 bit":
        value = memoryview(torch.frombuffer(buffer, dtype=torch.bfloat16).view(torch.int16).reshape(2, 2048).numpy())
    backend.set(key, value)
    set_all(backend, [other], [value])
    buffer[:] = bytes(len(buffer))
    assert backend.get(key) == expected == backend.get(other)


def test_conformance_what_one_sets_another_sees_also_after_a_miss(again):
    one, other, (key, second) = again(), again(), keys(2)
    assert not other.exists(key) and other.get(second) is None
    one.set(key, value_of(key))
    set_all(one, [second], [value_of(second)])
    assert exist_all(other, [key, second]) == [True, True]
    assert other.get(key) == value_of(key) and other.get(second) == value_of(second) and again().exists(key)


def test_conformance_setting_twice_changes_nothing(again):
    backend, (key,) = again(), keys()
    for _ in range(2):
        backend.set(key, value_of(key))
        assert backend.get(key) == value_of(key)
    set_all(backend, [key], [value_of(key)])
    assert backend.get(key) == value_of(key)


def test_conformance_keys_are_independent(again):
    backend, key = again(), keys()[0]
    near = key[:-1] + ("0" if key[-1] != "0" else "1")
    backend.set(key, b"one")
    assert backend.get(near) is None and not backend.exists(near)
    backend.set(near, b"the other")
    assert backend.get(key) == b"one" and backend.get(near) == b"the other"


def test_conformance_lists_are_answered_in_their_order(again):
    backend, all_keys = again(), keys(40)
    there = all_keys[:30:2] + all_keys[30:]
    set_all(backend, there[::-1], [value_of(key, 100 + number) for number, key in enumerate(there)][::-1])
    expected = [value_of(key, 100 + there.index(key)) if key in there else None for key in all_keys]
    assert get_all(backend, all_keys) == expected == [backend.get(key) for key in all_keys]
    assert get_all(backend, all_keys[::-1]) == expected[::-1]
    assert [backend.exists(key) for key in all_keys] == [key in there for key in all_keys]
    for first in (0, 1, 29, 31):
        assert (exist_all(backend, all_keys[first:]) + [False]).index(False) == (
            [key in there for key in all_keys[first:]] + [False]).index(False)
    assert exist_all(backend, all_keys[30:]) == [True] * 10


def test_conformance_threads_at_once_see_nothing_or_all_of_a_value(again):
    backend, shared, seen = again(), keys(6), []

    def work(number):
        rng = random.Random(number)
        for _ in range(30):
            some = rng.sample(shared, 3)
            if rng.random() < 0.4:
                set_all(backend, some, [value_of(key, 50_000) for key in some])
                assert get_all(backend, some) == [value_of(key, 50_000) for key in some]
            else:
                backend.set(some[0], value_of(some[0], 50_000))
                values = get_all(backend, some) + [backend.get(some[1])]
                assert all(value is None or value == value_of(key, 50_000) for key, value in zip([*some, some[1]], values))
                seen.extend(values)
                exist_all(backend, some)
        return True
    assert in_threads(*(lambda number=number: work(number) for number in range(8))) == [True] * 8
    assert any(seen) and all(exist_all(backend, shared))


def test_values_are_read_into_buffers_that_they_fit(again):
    """Where the back end can; else, and where the buffer is missing or of another size, they are given as they are."""
    backend, names = again(), keys(5)
    for name, size in zip(names[:4], (100, 100, 99, 0)):
        backend.set(name, value_of(name, size))
    buffers = [memoryview(bytearray(size)) if size is not None else None for size in (100, None, 100, 0, 100)]
    values = get_all(backend, names, buffers)
    assert [value if value is None else bytes(value) for value in values] == [
        *(value_of(name, size) for name, size in zip(names, (100, 100, 99, 0))), None]
    if hasattr(backend, "read_into"):
        assert values[0] is buffers[0] and values[2] is not buffers[2]
    assert bytes(buffers[4]) == bytes(100)


# 2. Lists ------------------------------------------------------------------------------------------------------------

def test_the_batch_forms_are_used_where_there_are_any():
    backend, names = BatchShelf(name="batch"), keys(3)
    set_all(backend, names, [b"1", b"2", b"3"])
    assert get_all(backend, names) == [b"1", b"2", b"3"] and exist_all(backend, names) == [True] * 3
    assert backend.calls == ["batch_set", "batch_get", "batch_exists"]


def test_one_by_one_nothing_is_asked_behind_the_first_gap(monkeypatch):
    backend, names, asked = Shelf("gap"), keys(5), []
    set_all(backend, [names[0], names[2], names[4]], [b"1", b"2", b"3"])
    monkeypatch.setattr(backend, "exists", lambda key: asked.append(key) or key in backend.values)
    assert exist_all(backend, names) == [True] + [False] * 4 and asked == names[:2]


@pytest.mark.parametrize("ask, method", [(get_all, "batch_get"), (exist_all, "batch_exists")])
def test_an_answer_for_too_few_keys_is_an_error(ask, method):
    backend, names = BatchShelf(name="short"), keys(3)
    backend.batch_get = backend.batch_exists = lambda keys: [None]
    with pytest.raises(ValueError, match="1 answers for 3 keys"):
        ask(backend, names)


def test_lists_of_different_lengths_are_an_error(opened):
    for backend in (Shelf("lengths"), opened("memory://lengths")):
        with pytest.raises(ValueError):
            set_all(backend, keys(2), [b"1"])


# 3. Files ------------------------------------------------------------------------------------------------------------

def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("slashes", ["", "//"])
def test_a_value_is_a_file_of_its_own(opened, tmp_path, slashes):
    backend, (key,) = opened(f"file:{slashes}{tmp_path}/deep/pages"), keys()
    backend.set(key, b"value")
    assert (tmp_path / "deep" / "pages" / f"{key}.page").read_bytes() == b"value"
    assert backend.files.counts["file_writes"] == 1 and backend.files.counts["file_write_bytes"] == 5


def test_a_directory_may_be_given_relative_to_where_one_is(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend, (key,) = opened("file:pages"), keys()
    monkeypatch.chdir("/")
    backend.set(key, b"value")
    assert names(tmp_path / "pages") == [f"{key}.page"]


def test_what_was_read_last_stays_under_the_limit(opened, tmp_path):
    backend, pages = opened(f"file:{tmp_path}", limit_gb=10_000 / 1e9), keys(10)
    for number, key in enumerate(pages):
        backend.set(key, value_of(key, 1000))
        os.utime(tmp_path / f"{key}.page", (1e9 + number, 1e9 + number))
    assert all(backend.exists(key) for key in pages)
    assert backend.get(pages[0]) == value_of(pages[0], 1000) and backend.exists(pages[1])      # to ask is not to use
    newest, = keys()
    backend.set(newest, value_of(newest, 1000))
    assert [backend.exists(key) for key in pages] == [True, False, False] + [True] * 7 and backend.exists(newest)
    assert backend.files.counts["file_evictions"] == 2
    with pytest.raises(OSError, match="a page of 20000 bytes does not fit"):
        backend.set(*keys(), bytes(20_000))


def test_what_is_there_is_not_written_again(opened, tmp_path):
    backend, (key,) = opened(f"file:{tmp_path}"), keys()
    backend.set(key, b"value")
    before = (tmp_path / f"{key}.page").stat().st_ino
    backend.set(key, memoryview(b"value"))
    assert (tmp_path / f"{key}.page").stat().st_ino == before and backend.files.counts["file_writes"] == 1


@pytest.mark.parametrize("damage", [b"", b"valu", b"velue", b"values"])
def test_who_sets_what_was_damaged_mends_it(opened, tmp_path, damage):
    backend, (key,) = opened(f"file:{tmp_path}"), keys()
    backend.set(key, b"value")
    (tmp_path / f"{key}.page").write_bytes(damage)              # in place
    assert backend.get(key) == damage                           # the caller checks what it gets
    backend.set(key, b"value")
    assert backend.get(key) == b"value"


def test_a_file_that_is_cut_while_it_is_read_is_a_miss(opened, tmp_path, monkeypatch):
    backend, (key,), fstat = opened(f"file:{tmp_path}"), keys(), os.fstat
    backend.set(key, bytes(5000))
    path = tmp_path / f"{key}.page"

    def cut(file):
        status = fstat(file)
        os.truncate(path, 4000)
        return status
    assert backend.get(key) == bytes(5000)
    monkeypatch.setattr(backends.os, "fstat", cut)
    assert backend.get(key) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_a_miss_and_nobody_waits_for_it(opened, tmp_path, kind):
    backend, (key, other) = opened(f"file:{tmp_path}"), keys(2)
    path = tmp_path / f"{key}.page"
    (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    assert in_threads(lambda: backend.get(key), lambda: backend.exists(key)) == [None, False]
    if kind == "pipe":                                          # the right one takes its place
        backend.set(key, b"value")
        assert backend.get(key) == b"value"
    else:
        with pytest.raises(OSError):
            backend.set(key, b"value")
        assert names(tmp_path) == [path.name] and backend.get(key) is None
    backend.set(other, b"other")
    assert backend.get(other) == b"other"


@pytest.mark.parametrize("url", ["file:{}", "local://{}"])
def test_a_full_disk_is_an_error_and_leaves_nothing_behind(opened, tmp_path, url):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        backend, pages = opened(url.format(disk)), keys(8)
        with pytest.raises(OSError, match="No space"):
            for key in pages:
                backend.set(key, value_of(key, 200_000))
        kept = [key for key in pages if backend.exists(key)]
        assert 1 <= len(kept) < 8 and names(disk) == sorted(f"{key}.page" for key in kept)
        assert all(backend.get(key) == value_of(key, 200_000) for key in kept)
        (disk / f"{kept[0]}.page").unlink()
        backend.set(pages[-1], value_of(pages[-1], 200_000))
        assert backend.get(pages[-1]) == value_of(pages[-1], 200_000)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("url", ["file:{}", "local://{}"])
def test_a_page_appears_only_when_it_is_whole(opened, tmp_path, monkeypatch, url):
    backend, (key,), seen = opened(url.format(tmp_path)), keys(), []
    module, name = (store.os, "replace") if url.startswith("file") else (shutil, "move")
    move = getattr(module, name)

    def look(*paths):
        seen.append((backend.get(key), [path.stat().st_size for path in tmp_path.glob("*.tmp")]))
        return move(*paths)
    monkeypatch.setattr(module, name, look)
    backend.set(key, value_of(key, 5000))
    assert seen == [(None, [5000])] and names(tmp_path) == [f"{key}.page"]


# 4. Redis ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def own_redis():
    with RedisServer() as server:
        yield server


CALLS = {"get": lambda backend, key: backend.get(key), "exists": lambda backend, key: backend.exists(key),
         "set": lambda backend, key: backend.set(key, b"value"), "batch_get": lambda backend, key: get_all(backend, [key] * 3),
         "batch_exists": lambda backend, key: exist_all(backend, [key] * 3),
         "batch_set": lambda backend, key: set_all(backend, [key] * 3, [b"value"] * 3)}


def test_a_prefix_keeps_things_apart(opened, redis):
    one, other, plain, (key,) = opened(redis.url, prefix="one:"), opened(redis.url, prefix=""), opened(redis.url), keys()
    one.set(key, b"value")
    assert one.exists(key) and not other.exists(key) and not plain.exists(key)
    assert other.client.get(f"one:{key}") == b"value"
    plain.set(key, b"plain")
    assert other.client.get(f"kv:{key}") == b"plain" and one.get(key) == b"value"


def test_redis_that_stops_is_an_error_and_one_that_comes_back_works(opened, own_redis):
    backend, (key,) = opened(own_redis.url), keys()
    backend.set(key, b"value")
    own_redis.stop()
    for call in CALLS.values():
        with pytest.raises(Exception, match="onnect"):
            call(backend, key)
    own_redis.start()
    assert backend.get(key) is None and not backend.exists(key)                # it is empty
    backend.set(key, b"value")
    assert backend.get(key) == b"value"


def test_redis_that_says_nothing_is_an_error_within_the_timeout_and_late_answers_are_nobodys(opened, own_redis):
    backend, all_keys = opened(own_redis.url, timeout=0.2), keys(40)
    set_all(backend, all_keys, [value_of(key) for key in all_keys])
    own_redis.pause()
    try:
        for call in CALLS.values():
            began = time.monotonic()
            with pytest.raises(Exception, match="(?i)time"):
                call(backend, all_keys[0])
            assert time.monotonic() - began < 10                # a client that tries again and again takes its timeout as often
    finally:
        own_redis.resume()
    for key in all_keys[1:]:                                    # not what was asked for before
        assert backend.get(key) == value_of(key)
    assert backend.get(all_keys[0]) in (value_of(all_keys[0]), b"value")       # the late set came through, or did not


@contextmanager
def liar(port: int, answer: bytes):
    """A server that says the same to whatever it is asked -> what came, a list for each connection."""
    asked = []
    with socket.create_server(("127.0.0.1", port)) as server:
        def serve():
            with_open = []
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    break
                with_open.append(connection)
                asked.append([])
                threading.Thread(target=say, args=(connection, asked[-1]), daemon=True).start()
            for connection in with_open:
                connection.close()

        def say(connection, requests):
            try:
                while request := connection.recv(65536):
                    requests.append(request)
                    connection.sendall(answer)
            except OSError:
                pass
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield asked
        server.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\xff\x17\r\n", b"$100\r\nhalf", b"*3\r\n$5\r\nhal"],
                         ids=["HTTP", "bytes", "half a value", "half a list"])
def test_what_another_server_answers_is_an_error_and_is_forgotten(opened, own_redis, answer):
    backend, all_keys = opened(own_redis.url, timeout=0.2), keys(3)
    own_redis.stop()
    with liar(own_redis.port, answer) as asked:
        for call in CALLS.values():
            with pytest.raises(Exception) as raised:
                call(backend, all_keys[0])
            assert not isinstance(raised.value, AssertionError)
        assert asked and all(asked)
    own_redis.start()
    assert get_all(backend, all_keys) == [None] * 3
    set_all(backend, all_keys, [value_of(key) for key in all_keys])
    assert [backend.get(key) for key in all_keys] == [value_of(key) for key in all_keys]


def test_each_call_asks_once_however_often_the_client_would_by_itself(opened, own_redis):
    backend, (key,) = opened(own_redis.url, timeout=0.2), keys()
    own_redis.stop()
    with liar(own_redis.port, b"") as asked:
        for number, call in enumerate(CALLS.values(), 1):
            with pytest.raises(Exception, match="(?i)time"):
                call(backend, key)
            assert len(asked) == number


def test_after_an_error_no_connection_is_used_again(opened, redis):
    backend, (key,) = opened(redis.url), keys()
    pool = backend.client.connection_pool
    idle = [pool.get_connection("_") for _ in range(3)]
    for connection in idle:
        pool.release(connection)
    backend.client.lpush(f"kv:{key}", "a list")
    assert all(connection._sock for connection in idle)
    with pytest.raises(Exception, match="WRONGTYPE"):
        backend.get(key)
    assert not any(connection._sock for connection in idle) and not backend.exists(keys()[0])


def test_a_redis_that_is_full_says_so_and_gives_what_it_has(opened):
    with RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        backend, all_keys, kept = opened(server.url, timeout=30), keys(40), []
        with pytest.raises(Exception, match="maxmemory"):
            for key in all_keys:
                backend.set(key, value_of(key, 200_000))
                kept.append(key)
        assert 1 <= len(kept) < 40 and backend.get(all_keys[-1]) is None
        with pytest.raises(Exception, match="maxmemory"):
            set_all(backend, all_keys[-2:], [b"value" * 100_000] * 2)
        assert all(backend.get(key) == value_of(key, 200_000) for key in kept)
        assert exist_all(backend, kept) == [True] * len(kept)


def test_redis_answers_over_a_unix_socket(opened, tmp_path):
    with RedisServer("--unixsocket", str(tmp_path / "redis.sock")):
        backend, (key,) = opened(f"unix://{tmp_path}/redis.sock"), keys()
        backend.set(key, b"value")
        assert backend.get(key) == b"value"


def test_a_password_opens_redis_and_is_in_no_message(opened, tmp_path):
    with RedisServer("--requirepass", "p@ss/w0rd?") as server:
        address, (key,) = f"127.0.0.1:{server.port}/0", keys()
        backend = opened(f"redis://:p%40ss%2Fw0rd%3F@{address}")
        backend.set(key, b"value")
        assert opened(f"redis://{address}", password="p@ss/w0rd?").get(key) == b"value"
        for url, config in ((f"redis://{address}", {}), (f"redis://:wr0ng@{address}", {}), (f"redis://u:wr0ng@{address}", {}),
                            (f"redis://{address}", dict(password="wr0ng")), (f"redis://:p@ss/w0rd?@{address}", {}),
                            (f"redis://{address}?password=wr0ng&foo=wr0ng", {})):
            with pytest.raises(ModelError, match=f"redis://{re.escape(address)}") as refused:
                open_backend(url, config)
            assert "w0rd" not in str(refused.value) and "wr0ng" not in str(refused.value)
    for call in CALLS.values():
        with pytest.raises(Exception) as raised:
            call(backend, key)
        assert "w0rd" not in str(raised.value)


# 5. fsspec -----------------------------------------------------------------------------------------------------------

def test_what_a_listing_remembers_is_not_believed(opened):
    """An object store's file system that has listed a directory answers from the listing."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Listed(MemoryFileSystem):
        protocol, store, pseudo_dirs = "listed", {}, [""]

        def info(self, path, **options):
            parent = self._parent(self._strip_protocol(path))
            if parent not in self.dircache:
                self.dircache[parent] = list(self.store)
            if self._strip_protocol(path) not in self.dircache[parent]:
                raise FileNotFoundError(path)
            return super().info(path, **options)

        def invalidate_cache(self, path=None):
            self.dircache.clear()
    fsspec.register_implementation("listed", Listed, clobber=True)
    backend, (key,) = opened("listed://pages"), keys()
    assert not backend.exists(key)
    Listed.store[f"{backend.root}/{key}.page"] = MemoryFileSystem().open(f"/{key}", "wb")      # another process does
    with pytest.raises(FileNotFoundError):
        backend.fs.info(f"{backend.root}/{key}.page")
    assert backend.exists(key)


def test_an_error_of_the_storage_is_not_taken_for_a_miss(opened, monkeypatch):
    backend, (key,) = opened("memory://errors"), keys()

    def refuse(*_, **__):
        raise PermissionError("injected")
    for method in ("info", "cat_file", "pipe_file"):
        monkeypatch.setattr(backend.fs, method, refuse)
    for call in CALLS.values():
        with pytest.raises(PermissionError, match="injected"):
            call(backend, key)


def test_after_an_error_nobody_reads_the_callers_buffers(opened, monkeypatch):
    backend, slow, running = opened("memory://buffers"), threading.Event(), []

    def pipe_file(path, value, **_):
        if path.endswith("0.page"):
            slow.wait(60)
            raise OSError("injected")
        slow.set()
        time.sleep(0.05)
        running.append(path)
    monkeypatch.setattr(backend.fs, "pipe_file", pipe_file)
    with pytest.raises(OSError, match="injected"):
        set_all(backend, ["0" * 64, "1" * 64], [b"0", b"1"])
    assert len(running) == 1


# 6. What a user can get wrong ----------------------------------------------------------------------------------------

class Moody(Shelf):
    def __init__(self, mood="raise", secret_word=None):
        if mood == "raise":
            raise RuntimeError(f"not today, {secret_word}")
        super().__init__("moody")

    def exists(self, key):
        raise ConnectionError("not now.\nReally")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "shelf_for_tests", types.SimpleNamespace(
        Shelf=Shelf, Moody=Moody, NUMBER=5, Half=type("Half", (), dict(get=print, exists=print))))
    (tmp_path / "raises_for_tests.py").write_text("raise RuntimeError('broken inside')")
    (tmp_path / "imports_for_tests.py").write_text("import a_package_that_is_not_there")


WRONG = {
    ("foo", ""): "There is no storage 'foo'; write file:DIR, redis://HOST:PORT/N, .* or module:Class",
    ("", ""): "There is no storage ''; write file:DIR",
    ("foo://bar", ""): "There is no storage 'foo://bar'; write file:DIR",
    ("localhost:6379", ""): "There is no storage 'localhost:6379'; write file:DIR",
    ("file:", ""): "names no directory; write file:DIR",
    ("file://", ""): "names no directory; write file:DIR",
    ("file:/proc/pages", ""): "Cannot keep pages in '/proc/pages' .*; choose another directory with --storage",
    ("file:x", '{"limit_gb": 0}'): "limit_gb in --storage-config must be a positive number, not 0",
    ("file:x", '{"limit_gb": "16"}'): "limit_gb in --storage-config must be a positive number, not '16'",
    ("file:x", '{"limit_gb": true}'): "limit_gb in --storage-config must be a positive number, not True",
    ("file:x", '{"limit_gb": NaN}'): "limit_gb in --storage-config must be a positive number, not nan",
    ("file:x", '{"limit": 1}'): "The storage file:x cannot be set up .*'limit'.*; change --storage or --storage-config",
    ("redis://127.0.0.1:1/0", '{"timeout": -1}'): "timeout in --storage-config must be a positive number",
    ("redis://127.0.0.1:1/0", '{"prefix": 5}'): "prefix in --storage-config must be a string",
    ("redis://127.0.0.1:1/0", '{"time": 1}'): "redis://127.0.0.1:1/0 cannot be set up .*'time'.*; change",
    ("redis://127.0.0.1:port/0", ""): "'redis://127.0.0.1:port/0' is no address of a Redis; write redis://",
    ("redis://127.0.0.1:1/0", ""): "Cannot reach the storage redis://127.0.0.1:1/0: .*refused.*; start it, or choose another",
    ("unix:///nowhere.sock", ""): "Cannot reach the storage unix:///nowhere.sock: .*; start it, or choose another --storage",
    ("shelf_for_tests:Shelf", '{"nam": "x"}'): "shelf_for_tests:Shelf cannot be set up .*'nam'.*; change",
    ("shelf_for_tests:Nobody", ""): "The module 'shelf_for_tests' has no class 'Nobody'; write module:Class",
    ("shelf_for_tests:NUMBER", ""): "The module 'shelf_for_tests' has no class 'NUMBER'; write module:Class",
    ("shelf_for_tests:Half", ""): "has no method set\\(\\); a back end needs get, exists and set",
    ("shelf_for_tests:Moody", ""): "The storage shelf_for_tests:Moody cannot be set up \\(not today, None\\); change",
    ("shelf_for_tests:Moody", '{"secret_word": "hush"}'): "cannot be set up \\(not today, \\*\\*\\*\\); change",
    ("shelf_for_tests:Moody", '{"mood": "good"}'): "Cannot reach the storage shelf_for_tests:Moody: not now. Really; start it",
    ("no_such_module:Shelf", ""): "Cannot import 'no_such_module' .*; put it where Python finds modules",
    ("common.no_such:Shelf", ""): "Cannot import 'common.no_such' .*; put it where Python finds modules",
    ("raises_for_tests:Shelf", ""): "Cannot import 'raises_for_tests' .*\\(broken inside\\); put it",
    ("imports_for_tests:Shelf", ""): "Cannot import 'imports_for_tests' .*a_package_that_is_not_there.*; put it",
}


@pytest.mark.parametrize("url, config", list(WRONG), ids=str)
def test_a_wrong_storage_is_one_sentence_that_says_what_to_do(modules, tmp_path, monkeypatch, url, config):
    if url.startswith(("redis", "unix")):
        pytest.importorskip("redis")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=WRONG[url, config]) as refused:
        open_backend(url, read_config(config or "{}"))
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value) and not refused.value.__cause__


def test_a_file_system_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ModelError, match="The storage s3://b/p needs a package that is not installed .*s3fs.*; install it"):
        open_backend("s3://key:hush@b/p")


def test_a_redis_client_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ModelError, match="The storage redis://h/0 needs the Redis client; install it with pip install redis"):
        open_backend("redis://:hush@h/0")


def test_a_back_end_that_does_not_answer_is_closed(modules, monkeypatch):
    closed = []
    monkeypatch.setattr(Moody, "close", lambda self: closed.append(self), raising=False)
    with pytest.raises(ModelError, match="Cannot reach"):
        open_backend("shelf_for_tests:Moody", {"mood": "good"})
    assert len(closed) == 1


@pytest.mark.parametrize("url, shown", [
    ("redis://h:1/0", "redis://h:1/0"), ("redis://:pw@h:1/0", "redis://h:1/0"), ("rediss://u:pw@h/0?password=pw", "rediss://h/0"),
    ("redis://:p/w@p:w@h/0", "redis://h/0"), ("redis://:p?w@h/0", "redis://h/0"), ("redis://pw@h/0", "redis://h/0"),
    ("unix://:pw@/redis.sock?db=1", "unix:///redis.sock"), ("s3://key:pw@b/p", "s3://b/p"), ("s3://b/a@c", "s3://b/a@c"),
    ("local:///a@b:c/d@e", "local:///a@b:c/d@e"), ("file:a:b@c?d", "file:a:b@c?d"), ("module:Class", "module:Class"),
    ("simplecache::s3://key:pw@b/p", "simplecache::s3://b/p"), ("redis:pw@h", "redis:h"), ("foo", "foo"), ("", "")])
def test_a_label_has_neither_user_nor_password(url, shown):
    assert label(url) == shown


# 7. Configurations ---------------------------------------------------------------------------------------------------

def test_a_configuration_is_json_or_a_file_of_json_or_toml(tmp_path):
    expected = {"limit_gb": 1.5, "name": "größer", "deep": {"list": [1, 2]}}
    (tmp_path / "a.json").write_text(json.dumps(expected))
    assert read_config(json.dumps(expected)) == read_config(f" {json.dumps(expected)}\n") == expected
    assert read_config(f"@{tmp_path}/a.json") == expected and read_config("{}") == {}
    pytest.importorskip("tomllib", reason="Python 3.10 does not read TOML")
    (tmp_path / "a.toml").write_text('limit_gb = 1.5\nname = "größer"\n[deep]\nlist = [1, 2]\n', encoding="utf-8")
    assert read_config(f"@{tmp_path}/a.toml") == expected


FILES = {"list.json": b"[1]", "bad.json": b'{"a": }', "bad.toml": b"a = ", "latin.json": b'{"a": "\xe9"}', "a.yaml": b"a: 1"}


@pytest.mark.parametrize("text, sentence", [
    ("", "Cannot understand '--storage-config' .*; write a JSON object, or @FILE"),
    ("foo", "Cannot understand '--storage-config' .*; write a JSON object, or @FILE"),
    ('{"a": 1', "Cannot understand '--storage-config' .*line 1.*; write a JSON object"),
    ("[" * 100_000, "Cannot understand '--storage-config' .*; write a JSON object"),
    ("[1]", "'--storage-config' is not an object; write it as"), ("5", "is not an object"), ("null", "is not an object"),
    ("@list.json", "'list.json' is not an object"), ("@bad.json", "Cannot understand 'bad.json' .*line 1"),
    ("@bad.toml", "Cannot understand 'bad.toml' .*; write a JSON object|needs Python 3.11"),
    ("@latin.json", "Cannot understand 'latin.json' .*; write"),
    ("@a.yaml", "'a.yaml' is neither a .json nor a .toml file; give"), ("@a\0.json", "Cannot understand .*; write"),
    ("@no.json", "Cannot read 'no.json' \\(No such file or directory\\); give"), ("@", "Cannot read '' \\(Is a directory\\)"),
    ("@folder.json", "Cannot read 'folder.json' \\(Is a directory\\); give")])
def test_a_wrong_configuration_is_one_sentence_that_says_what_to_do(tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence) as refused:
        read_config(text)
    assert str(refused.value).endswith(".") and not refused.value.__cause__


def test_without_a_reader_of_toml_json_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text("a = 1")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(ModelError, match="a.toml' needs Python 3.11, which reads TOML; write the configuration as a .json file"):
        read_config(f"@{tmp_path}/a.toml")
