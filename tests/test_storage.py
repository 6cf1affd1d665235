"""Storage: back ends that fail, are slow, evict, or are shared by several engines; a directory of files; Redis."""

import errno
import importlib
import math
import os
import random
import shutil
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import Mock

import numpy
import pytest

from common import estimates, store
from common.link import TransferError
from common.requests import BadRequest, Request
from common.store import Parts
from shell import backends, charts, cli
from shell.chunks import StoredChunks
from shell.ranks import Ranks
from shell.workers import Worker
from tests.support import engines
from tests.support.engines import ORACLE, ask, draw, evict, tiered, wait_until_idle
from tests.support.faults import Shelf
from tests.support.redis_server import redis_server
from tests.test_tiered import engine_on, engine_with, forget, right, steps

ranked = importlib.import_module("09_tensor_parallel")
KEYS = [f"{number:064x}" for number in range(40)]
KINDS = "hidden", "planned", "both", "tiered", "ranked"
FILES = pytest.mark.parametrize("kind", ["hidden", "planned", "both", "tiered"])


def cache_over(kind: str, backend, host: int = 40):
    """Return a Cache with `host` host blocks over a back end; kind "ranked" is chapter 09's."""
    storage = store.Storage(backend)
    if kind == "ranked":
        cache = ranked.PageHeadCache(Ranks(), host, 2e9, storage, range(2))
        cache.threshold = 1
        return cache
    if kind.startswith("tiered"):
        return tiered(host, "both_ends" if "both" in kind else "wait_complete", "write_through", backend)
    chunks = StoredChunks(storage)
    if kind == "both":
        return engines.both_ends.BidirectionalCache(chunks, share=0.0)
    made = dict(hidden=engines.hidden_states.HiddenCache, planned=partial(engines.planned.PlannedCache, plan="RHK"))
    return made[kind](host, 2e9, chunks)


def directory(folder, limit_gb: float = 1.0) -> backends.Directory:
    return backends.Directory(f"file:{folder}", limit_gb)


def found_below(request) -> int:
    """Return how many of the prompt's tokens came from a tier below the device."""
    assert ORACLE.judge(request) != "wrong"
    return sum(tokens for tier, tokens in request.found.items() if tier != "gpu")


@contextmanager
def opened(backend):
    """Context manager: return (an open storage, three keys, an array for each key)."""
    storage = store.Storage(backend)
    storage.open(Worker, {})
    yield storage, [bytes([number]) * 32 for number in range(3)], [numpy.zeros(8, "u1") for _ in range(3)]
    storage.close()


def read(backend, keys, size: int, start: int = 0) -> list[bytes | None]:
    """Return `size` bytes of each value from byte `start` on, or None if they are not there."""
    buffers, fill = [[bytearray(size // 3), bytearray(size - size // 3)] for _ in keys], store.Storage(backend).get_into
    there = list(getattr(backend, "get_into", fill)(keys, buffers, [start] * len(keys)))
    return [b"".join(pieces) if found else None for pieces, found in zip(buffers, there)]


# 1. Back ends that fail ------------------------------------------------------------------------

BROKEN = [(method, fault) for method, faults in dict(
    get=("times out", "hangs", "answers nothing", "loses all", "forgets", "swaps", "cuts", "flips a bit"),
    set=("raises", "hangs", "raises halfway", "forgets", "cuts"),
    exists=("times out", "hangs", "answers nothing", "loses all", "forgets")).items() for fault in faults]  # fmt: skip


@pytest.mark.parametrize("kind, method, fault", [
    *((kind, *fault) for fault in BROKEN for kind in ("hidden", "both", "tiered", "ranked")),
    *(("tiered, both ends", *fault) for fault in BROKEN if fault[0] == "get")])  # it asks and writes as "tiered" does
def test_a_broken_back_end_costs_time_only(kind, method, fault, monkeypatch):
    """One method of the back end breaks while it stores two of three prompts, and is repaired later."""
    monkeypatch.setattr(engines.tiers, "RETRY_SECONDS", 0.0)
    shelf, rng = Shelf(), random.Random(f"{method} {fault}")
    prompts = [draw(rng, 130) for _ in range(3)]
    with engine_with(cache_over(kind, shelf)) as engine:
        for prompt in prompts[:2]:
            ask(engine, prompt, 1)
            forget(engine)
        with monkeypatch.context() as patch, shelf.broken(method, fault):
            patch.setattr("shell.workers.HANG_SECONDS", 0.05 if fault == "hangs" else 60.0)
            for number, prompt in enumerate([prompts[2], *prompts]):
                once = fault != "times out" or kind.startswith("tiered")  # other Caches wait for each read, until its deadline
                patch.setattr(estimates, "MAX_WAIT", 1e9 if number > 1 and once else 0.2)  # seconds
                engine.submit(request := Request(prompt + [3], 2))
                assert steps(engine, lambda: request.outcome, 1000), "after a request has waited in vain, no other one waits"
                found_below(request)
                engine.evict("device")
                engine.evict("host")
            asked = [copies for lane, copies in engine.lower_tier.cache.in_flight.items() if str(lane).startswith("ask")]
            assert fault not in ("hangs", "times out") or sum(map(len, asked)) <= 1, "a storage that hangs is not asked again"
            fault in ("hangs", "times out") or wait_until_idle(engine)
            dropped = engine.counts["writes_dropped"]
        found = []
        for prompt in 3 * prompts:  # one request finds that storage answers, and damaged values are written again
            found.append(found_below(ask(engine, prompt, 2)))
            forget(engine)
        assert found[-3:] == [128] * 3 or kind == "tiered, both ends", "storage is used again, and has all pages"
        assert charts.counters(engine)["storage_errors"] or fault in ("hangs", "loses all", "forgets", "swaps")
        assert dropped >= 8 or (kind, method, fault) != ("hidden", "set", "raises"), "a block that storage refuses is counted"


def test_only_damaged_values_stay_doubted():
    with opened(shelf := Shelf()) as (storage, keys, places):
        shelf.set = Mock(side_effect=OSError)
        for number in range(300):
            (write := storage.set([b"%032d" % number], places[:1])).wait()
            with pytest.raises(TransferError, match="missing"):
                storage.get([b"%032d" % -number], places[:1]).wait()
            storage.exists([b"%032d" % -number]).wait()
        assert write.value == [] and not storage.doubted
        shelf.pages[keys[0].hex()] = b"damaged"
        with pytest.raises(TransferError, match="missing or damaged"):
            storage.get(keys[:1], places[:1]).wait()
        storage.set(keys[:1], places[:1]).wait()
        (answer := storage.exists(keys[:1])).wait()
        assert answer.value == [False], "after a write that failed, the damaged value is still there"
        assert not storage.silent, "a damaged value does not make other requests stop waiting"


def test_a_lookup_does_not_wait_for_a_read():
    with opened(shelf := Shelf()) as (storage, keys, places):
        storage.set(keys[1:], places[1:]).wait(60)
        shelf.open.clear()
        read, asked = storage.get(keys[1:], places[1:]), storage.exists(keys)
        asked.wait(60)
        assert asked.value == [False, True, True] and not read.ready
        shelf.open.set()
        read.wait(60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_slow_storage_waits_or_is_counted(kind, tmp_path, monkeypatch):
    """Only eight jobs may wait for the writer, while sixteen prompts are asked. Chapter 06 drops the other chunks."""
    rng, write = random.Random(0), backends.Directory.write
    monkeypatch.setattr(store, "BACKLOG", 8)
    with monkeypatch.context() as slow, engine_with(cache_over(kind, directory(tmp_path), 400), 400) as engine:
        slow.setattr(backends.Directory, "write", lambda *given: time.sleep(1e-3) or write(*given))
        talks = [Request(draw(rng, 8 * 16 + 1), 8) for _ in range(16)]
        engine.generate(talks)
        talks = [engine.generate([Request(talk.tokens + draw(rng, 40), 8)])[0] for talk in talks]
        wait_until_idle(engine)
    size, stored, full, found = engines.both_ends.CHUNK if kind == "both" else 16, len([*tmp_path.iterdir()]), 0, 0
    with engine_with(cache_over(kind, directory(tmp_path), 400), 400) as later:
        for talk in talks:
            whole = (len(talk.tokens) - 1) // size
            full, found = full + whole, found + found_below(ask(later, talk.tokens[: whole * size] + [3], 1)) // size
            evict(later)
    missing = full - (stored if kind == "both" else found)  # a hit brings only the longest run of chunks
    assert missing <= engine.counts["writes_dropped"]
    assert (kind == "both") == (engine.counts["writes_dropped"] > 0), "in other chapters a write waits while memory has its block"


# 2. Several engines ----------------------------------------------------------------------------

@FILES
def test_two_engines_find_the_blocks_of_each_other_in_a_directory(kind, tmp_path):
    rng, whole = random.Random(0), 288
    first, second, third = (draw(rng, 300) for _ in range(3))
    with engine_with(cache_over(kind, directory(tmp_path))) as one, engine_with(cache_over(kind, directory(tmp_path))) as other:
        for engine, prompt in (one, first), (other, second), (one, third), (other, third):
            ask(engine, prompt, 1)
            wait_until_idle(engine)
        found = [found_below(ask(engine, prompt + [3], 1)) for engine, prompt in ((other, first), (one, second))]
        assert found == [whole] * 2, "each finds at once what the other one has written"
    with engine_with(cache_over(kind, directory(tmp_path))) as engine:
        assert [found_below(ask(engine, prompt + [3], 1)) for prompt in (first, second, third)] == [whole] * 3


@FILES
def test_a_hit_on_the_device_counts_as_use_of_the_stored_blocks(kind, tmp_path):
    rng = random.Random(0)
    hot, one = draw(rng, 200), draw(rng, 200)
    with engine_with(cache_over(kind, directory(tmp_path))) as engine:
        ask(engine, hot)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    with engine_with(cache_over(kind, directory(tmp_path, 3.4e-9 * size))) as engine:
        for prompt in (hot, one, *(draw(rng, 200) for _ in range(6))):
            ask(engine, prompt)
            wait_until_idle(engine)
            assert ask(engine, hot).source == "gpu_hit"
    with engine_with(cache_over(kind, directory(tmp_path))) as engine:
        assert ask(engine, hot, 4).cached_tokens > 100, "the prompt that was used last is still stored"
        assert ask(engine, one).found == {}, "the prompt that was used once is gone"


@pytest.mark.parametrize("url, config", [
    ("file:", {}), ("redis:", {}), ("tests.support.ranks:Losing", dict(rng=random.Random(0), share=0.0)), ("shell.backends:Directory", {}),
])  # fmt: skip
def test_a_back_end_returns_the_values_that_it_has_stored(url, config, tmp_path):
    with redis_server() if url == "redis:" else nullcontext(f"file:{tmp_path}" if url == "file:" else url) as url:
        config = dict(url=str(tmp_path)) if url.endswith(":Directory") else config
        backend, (one, two, three, empty) = backends.open_backend(url, config), (digit * 64 for digit in "abcd")
        backend.set([one, two, empty], [b"1" * 100, b"2" * 50, b""])  # a crash may leave an empty file
        assert list(map(bool, backend.exists([one, three, two]))) == [True, False, True]
        assert read(backend, [empty, three, one], 100) == [None, None, b"1" * 100] and read(backend, [two], 20, 30) == [b"2" * 20]
        assert read(backend, [one, two], 80) == [b"1" * 80, None] and read(backend, [one, two], 20, 50) == [b"1" * 20, None]
        with engine_on(backends.open_backend(url, config)) as engine:
            right(engine, prompt := draw(random.Random(0), 200))
            forget(engine)
            assert right(engine, prompt).found == {"storage": 192}


@pytest.mark.parametrize("in_files", [False, True])
def test_a_run_of_parts_is_read_alone_and_checked_alone(in_files, tmp_path):
    arrays = [numpy.ones((3, size), "i4") for size in (1500, 2048, 2048)]
    first, together = numpy.zeros((1, 3, 1500), "i4"), numpy.zeros((2, 3, 2048), "i4")
    with opened(directory(tmp_path) if in_files else Shelf()) as (storage, keys, _):
        storage.set(keys[:1], [Parts(arrays)]).wait(60)
        if in_files:
            with open(storage.backend.path(keys[0].hex()), "r+b") as file:
                file.seek(1000), file.write(b"damaged")
        else:
            storage.backend.pages[keys[0].hex()] = storage.backend.pages[keys[0].hex()].replace(b"\1", b"\2", 1)
        sizes = [array.nbytes + store.checksum_bytes(array.nbytes) for array in arrays]
        storage.get(keys[:1], [Parts(together, sizes[0])]).wait(60)
        assert together.all()
        turned = numpy.zeros((2048, 3), "i4").T  # not contiguous
        storage.get(keys[:1], [Parts(turned[None], sizes[0] + sizes[1])]).wait(60)
        assert turned.all() and storage.counts["storage_reads"] == 2
        assert storage.counts["storage_bytes_read"] == 3 * 4 * 3 * 2048
        with pytest.raises(TransferError, match="1 of 1 values are missing or damaged"):
            storage.get(keys[:1], [Parts(first)]).wait(60)
        many = numpy.arange(3000, dtype="i4").reshape(1500, 2)  # more buffers than the kernel takes in one call
        storage.set(keys[1:2], [Parts(many)]).wait(60)
        storage.get(keys[1:2], [Parts(into := numpy.zeros_like(many))]).wait(60)
        assert (into == many).all()


@pytest.mark.parametrize("rest", [0, 104, 100])  # bytes after the last whole row
def test_a_checksum_finds_every_changed_bit_and_misplaced_row(rest):
    rng, contents = random.Random(0), numpy.random.default_rng(0).integers(0, 256, 3 * 4096 + rest, "u1")
    checksum = lambda key, part: store.checksums(key, part[None]).tobytes()  # noqa: E731
    known, words = checksum(b"key", contents), contents[: 3 * 4096].reshape(3, 4096)
    assert known == checksum(b"key", contents.copy()) != checksum(b"other", contents)
    for at in rng.sample(range(len(contents)), 500):
        contents[at] ^= 1 << at % 8
        assert checksum(b"key", contents) != known
        contents[at] ^= 1 << at % 8
    for rows in [1, 0, 2], [0, 2, 1], [0, 0, 2], [0, 1, 1]:
        assert checksum(b"key", numpy.concatenate([words[rows].ravel(), contents[3 * 4096 :]])) != known
    words[1] = 0  # a sector that was never written
    assert checksum(b"key", contents) != known
    assert checksum(b"key", contents[:-1]) != checksum(b"key", contents)


# 3. A directory --------------------------------------------------------------------------------

class Folder:
    """A folder that some processes write to, and a dictionary that says which files it must have.

    `files`: name -> contents, the least recently used first. `foreign`: names that no process may touch. `locked`: the
    file of another user, which can only be read. `resolution`: of the file system's times, in ns."""

    LIMIT = 2000  # bytes

    def __init__(self, path, processes: int, resolution: int, monkeypatch):
        self.path, self.resolution, self.rng, self.patch = path, resolution, random.Random(resolution), monkeypatch
        self.now, self.locked, self.utime, unlink = time.time_ns(), "", os.utime, backends.Path.unlink
        (path / f"{KEYS[0]}.parts" / "another").mkdir(parents=True)
        (path / f"{KEYS[1]}.parts").symlink_to(f"{KEYS[1]}.parts")
        (path / f"{KEYS[2]}.parts").mkdir()
        for name in "notes.tmp", "book.parts", "a" * 64 + ".page.bak", "b" * 63 + ".parts":
            (path / name).write_bytes(bytes(5000))
        self.foreign, self.files = set(os.listdir(path)), {f"{KEYS[3]}.parts.{'0' * 32}.tmp": b"half"}
        for name, half in self.files.items():  # left by a process that was killed
            (path / name).write_bytes(half)
            os.utime(path / name, (0, 0))
        monkeypatch.setattr(backends.time, "time_ns", lambda: self.now)
        monkeypatch.setattr(backends.os, "utime", lambda path, ns: self.utime(self.own(path), ns=(0, ns[1] // resolution * resolution)))
        monkeypatch.setattr(backends.Path, "unlink", lambda path, **options: unlink(self.own(path), **options))
        self.processes = [directory(path, 1e-9 * self.LIMIT) for _ in range(processes)]

    def own(self, path):
        """Return the path of a file, if it belongs to this user."""
        if os.path.basename(path) == self.locked:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return path

    def write(self, process, disk_fails=False) -> list[str]:
        """Let a process write up to four values; then check which files it has deleted. Returns: the keys."""
        keys = [key for key in self.rng.sample(KEYS, self.rng.randrange(1, 5)) if f"{key}.parts" != self.locked]
        values = [self.rng.randbytes(self.rng.randrange(50, 150)) for _ in keys]
        failing = [key for key in keys if disk_fails or (self.path / f"{key}.parts" / "another").exists()]
        with pytest.raises(OSError) if failing else nullcontext(), self.patch.context() as patch:
            patch.setattr(os, "replace", Mock(side_effect=OSError(errno.EIO, "broken")) if disk_fails else os.replace)
            process.set(keys, values)
        written = {f"{key}.parts": value for key, value in zip(keys, values) if key not in failing}
        old = [name for name in self.files if name not in (self.locked, *written)]
        gone = [name for name in old if not (self.path / name).exists()]
        assert gone == old[: len(gone)], "the least recently used files are deleted, a chain's tail before its head"
        self.files = {name: value for name, value in self.files.items() if name not in gone} | written
        self.foreign -= written.keys() | ({f"{KEYS[2]}.parts"} if KEYS[2] in keys else set())  # an empty folder
        self.use(keys)
        size, most = sum(map(len, self.files.values())), self.LIMIT * (1 + 0.1 * (len(self.processes) - 1))
        assert size <= most, "each process looks for files of others after it has written a tenth of the limit"
        assert not gone or size > 0.9 * self.LIMIT - 5 * 150, "no more files are deleted than necessary"
        return keys

    def use(self, keys):
        """Move the files of these keys to the end of `files`, the first key last."""
        for name in [f"{key}.parts" for key in reversed(keys)]:
            if name in self.files and name != self.locked:
                self.files[name] = self.files.pop(name)

    def step(self):
        """Do one random operation, then compare the folder with `files`."""
        rng, at = self.rng, self.rng.randrange(len(self.processes))
        process, keys, name, kind = self.processes[at], rng.sample(KEYS, 6), rng.choice([*self.files, ""]), rng.randrange(18)
        self.now += rng.choice([-(10**14), 0, 10**9]) if len(self.processes) == 1 else 40 * max(self.resolution, 10**9)
        if kind < 5 or not self.path.exists():
            self.write(process)
        elif kind < 8:
            start, size = rng.randrange(50), rng.randrange(1, 80)
            values, found = read(process, keys, size, start), [self.files.get(f"{key}.parts", b"") for key in keys]
            assert values == [value[start : start + size] if len(value) >= start + size else None for value in found]
            stale = [key for key in process.index.intersection(KEYS) if f"{key}.parts" not in self.files]
            assert not stale or None not in values, "a read that finds a file gone looks which others are"
        elif kind < 11:
            there = [f"{key}.parts" in self.files for key in keys]
            assert process.exists(keys) == there == [key in process.index for key in keys]
            self.use(keys)
        elif kind == 11:
            self.processes[at] = directory(self.path, 1e-9 * self.LIMIT)
        elif kind == 12:  # another thread writes during a scan
            scan, known, written = os.scandir, set(process.index), []
            with self.patch.context() as patch:
                write = lambda: (patch.undo(), written.extend(self.write(process)))  # noqa: E731
                patch.setattr(os, "scandir", lambda folder: ([*scan(folder)], write())[0])
                process.files()
            assert {key for key in written if f"{key}.parts" in self.files} <= process.index | known
        elif kind == 13:
            self.write(process, disk_fails=True)
        elif kind == 14:
            self.locked = name
        elif kind == 15 and name and name != self.locked:
            used = (self.path / name).stat().st_mtime_ns
            self.files[name] = self.files[name][:3]
            os.truncate(self.path / name, 3)
            self.utime(self.path / name, ns=(0, used))
        elif kind == 16 and name:
            os.unlink(self.path / name)
            del self.files[name]
        elif kind == 17 and rng.random() < 0.1:
            shutil.rmtree(self.path)
            self.files, self.foreign, self.locked = {}, set(), ""
        found = os.listdir(self.path) if self.path.exists() else []
        assert {*found} == {*self.files, *self.foreign}, "nothing else is left"
        assert all((self.path / name).read_bytes() == value for name, value in self.files.items())


@pytest.mark.parametrize("processes, resolution", [(1, 1), (1, 10**9), (3, 100), (3, 2 * 10**9)])
def test_a_directory_agrees_with_a_dictionary(processes, resolution, tmp_path, monkeypatch):
    """The clock of one process may go back; times of files may be coarse."""
    folder = Folder(tmp_path / "files", processes, resolution, monkeypatch)
    for _ in range(400):
        folder.step()


def test_a_full_file_system_evicts_files_once_a_minute(tmp_path, monkeypatch, capsys):
    write, size, backend = backends.Path.write_bytes, [2000], directory(tmp_path)

    def write_bytes(path, value):
        write(path, value)
        if sum(file.stat().st_size for file in tmp_path.iterdir()) > size[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backends.Path, "write_bytes", write_bytes)
    for key in KEYS:
        backend.set([key], [bytes(100)])
    assert backend.exists(KEYS[-10:]) == [True] * 10 and capsys.readouterr().err == ""
    size[0], before = 0, len(backend.files())
    for _ in range(9):
        with pytest.raises(OSError):
            backend.set(KEYS[:1], [bytes(100)])
    assert before - 3 <= len(backend.files()) < before and capsys.readouterr().err.count("No space left") == 1


def test_files_of_an_older_version_are_named_once_and_make_room(tmp_path, capsys):
    for key, suffix in zip(KEYS, 20 * ("page", "kv")):
        (tmp_path / f"{key}.{suffix}").write_bytes(bytes(100))
        os.utime(tmp_path / f"{key}.{suffix}", (0, 0))
    backend = directory(tmp_path, 3e-6)
    assert f"40 files in {tmp_path} have an older format, so the cache starts without them.\n" == capsys.readouterr().err
    assert not backend.index and not any(backend.exists(KEYS))
    for key in KEYS[:20]:
        backend.set([key], [bytes(100)])
    assert all(backend.exists(KEYS[:20])) and len(list(tmp_path.iterdir())) <= 30, "the old files are deleted first"


@pytest.mark.parametrize("limit", [0, -1, 1e-300, math.nan, math.inf, 10**400, True, "4 GB", None], ids=lambda limit: f"{limit}"[:6])
def test_an_invalid_limit_is_refused_and_deletes_nothing(limit, tmp_path):
    backends.Directory(f"file:{tmp_path}").set(KEYS, [bytes(100)] * len(KEYS))
    for opened in backends.open_backend, backends.open_storage:
        with pytest.raises(BadRequest, match="^limit_gb, .* must be a number from 1e-9 to 1e9.$"):
            opened(f"file:{tmp_path}", dict(limit_gb=limit))
    assert len(list(tmp_path.iterdir())) == len(KEYS)
    for chapter in engines.hidden_states, engines.planned, engines.both_ends:
        chapter.add_arguments(parser := cli.parser_for(""))
        with pytest.raises(SystemExit):
            parser.parse_args(["--disk", str(tmp_path), "--disk-limit", str(limit)])


@pytest.mark.parametrize("url, words", [
    ("redis://me:secret@127.0.0.1:1/0", "Cannot use the storage 'redis://127.0.0.1:1/0'"),
    ("nonsense", "Cannot use the storage 'nonsense'"),
    ("nothing://there", "Cannot use the storage"),
    ("json:JSONDecoder", "Cannot use the storage"),
    ("file:", "write file:pages"), ("file: ", "write file:pages"), ("file://pages2", "write file:pages"),
    ("file://me:secret@pages", "'file://pages' names no folder"),
])  # fmt: skip
def test_an_invalid_url_is_refused_in_one_sentence_without_secrets(url, words):
    with pytest.raises(BadRequest, match=words) as raised:
        backends.open_backend(url)
    assert "secret" not in str(raised.value)


def test_a_folder_may_begin_with_a_tilde_and_a_file_in_its_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    backends.open_backend("file:~/a"), backends.in_directories(["~/b"], 1.0)
    (tmp_path / "config").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "config", "loop"}
    assert backends.configuration("@~/config") == {}
    for name in "loop", "config":
        with pytest.raises(BadRequest, match=f"^A cache needs a folder to write in: {tmp_path / name}: File exists.$"):
            backends.in_directories([tmp_path / name], 1.0)


# 4. Redis --------------------------------------------------------------------------------------

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


def test_a_value_above_a_power_of_two_takes_no_quarter_more():
    values = [bytes(size) for size in (1 << 20, (1 << 21) + 4, (1 << 21) - 3, (1 << 21) - 64, (3 << 19) - 64, 100)]
    with redis_server() as url:
        client = (backend := backends.open_backend(url)).client
        backend.set(KEYS[: len(values)], values)
        assert backend.get(KEYS[: len(values)]) == values
        client.client_pause(500)  # ms; then it answers
        assert backends.RedisBackend(url, timeout=0.2).get(KEYS[:1]) == values[:1], "an answer may take longer than to connect"
        for key, value in zip(KEYS, values):
            used = sum(client.memory_usage(name) or 0 for name in (f"kv:{key}", f"kv:{key}+"))
            assert used < 1.02 * len(value) + 300
            whole, end = (client.execute_command("PEXPIRETIME", name) for name in (f"kv:{key}", f"kv:{key}+"))
            assert end in (whole, -2), "both parts expire at the same time"


@pytest.mark.parametrize("kind", ["tiered", "ranked"])
def test_the_tail_of_a_chain_expires_before_its_head(kind):
    with redis_server() as url:
        with engine_with(cache := cache_over(kind, backends.open_backend(url))) as engine:
            chain = ask(engine, draw(random.Random(0), 300), 4).chain
            wait_until_idle(engine)
            cache.storage.set([], []).wait()  # the writer has also marked the chain as used
            keys = cache.keys(chain) if kind == "ranked" else [page.digest for page in chain]
            times = [cache.storage.backend.client.execute_command("PEXPIRETIME", f"kv:{key.hex()}") for key in keys]
    assert len(times) >= 18 and times == sorted(set(times), reverse=True)
