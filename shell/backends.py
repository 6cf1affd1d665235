"""Storage back ends (a directory of files, Redis, or a class of the user), and functions that open them."""
import argparse
import errno
import hashlib
import inspect
import json
import os
import re
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import compress
from pathlib import Path
from threading import Thread

import numpy

from common.link import Transfer
from common.requests import BadRequest
from common.store import Storage
from shell import warn_once
from shell.chunks import StoredChunks
from shell.frontend import number
from shell.workers import Worker

OWN_FILE = re.compile(r"[0-9a-f]{64}\.(page|kv|parts)(\.[0-9a-f]{32}\.tmp)?")  # older: .page, .kv
AHEAD, MOST = 1 << 17, 1 << 10  # bytes of a WILLNEED call; buffers of a preadv (IOV_MAX)
SPARE = 64  # bytes; Redis adds fewer to a value
TEST_READS = 4  # of `measure`
PAUSE = 60.0  # seconds before a full file system is cleaned up again, if that did not help


class Directory:
    """A folder with one file per value.

    Several processes may share a folder: a file is written under a temporary name and then renamed. When the
    files exceed `limit_gb`, the least recently used are deleted. The modification time of a file is the time
    of its last use. It is always later than every time set or found before, because clocks may go backwards.
    Files whose names do not match OWN_FILE are never touched. Files of older versions are not read; they are
    deleted like other files.

    If the folder has been deleted, the next write creates it again. On a full file system a write makes room
    as if the limit had been reached.

    `index`: the keys of all files that this process knows of."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        """Open or create a folder. Raises BadRequest if that fails, or if `limit_gb` is not a valid size."""
        if not number(1e-9, 1e9, (int, float))(limit_gb):
            raise BadRequest("limit_gb, the size of all files together, must be a number from 1e-9 to 1e9.")
        self.folder = Path(os.path.realpath(os.path.expanduser(url.removeprefix("file:"))))
        self.limit = self.written = 1e9 * limit_gb  # `written`: bytes since the last cleanup
        self.now, self.step, self.paused = 0, 1, 0.0  # latest time, in ns; no cleanup before `paused`
        self.index: set[str] = set()
        try:
            os.makedirs(self.folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file, suppress(OSError):
                os.utime(file.name, ns=(0, 10**18 + 1_999_999_999))
                self.step = max(1, 10**18 + 2 * 10**9 - os.stat(file.name).st_mtime_ns)  # resolution, in ns
            old = sum(path.suffix in (".page", ".kv") for _, _, path in self.files())
        except OSError as error:
            words = f"A cache needs a folder to write in: {self.folder}: {error.strerror}."
            raise BadRequest(words) from None
        if old:
            warn_once(f"{old} files in {self.folder} have an older format, so the cache starts without them.")

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.parts"

    def files(self) -> list[tuple]:
        """Scan the folder and bring `index` up to date. A folder that does not exist has no files.

        Returns: (time in ns, bytes, path) of each file, the least recently used first, including files that
        are half written. Raises OSError."""
        found, known = [], set(self.index)
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            with suppress(OSError):  # another process may delete it; a link may be broken
                if OWN_FILE.fullmatch(entry.name) and entry.is_file():
                    found.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry)))
        self.update_index(known, {path.stem for _, _, path in found if path.suffix == ".parts"})
        self.now = max([self.now, *(used for used, _, _ in found)])
        return sorted(found)

    def update_index(self, known: set[str], found: set[str]):
        """Add the keys that were `found` to `index`, and remove the other ones of `known`, which were in it
        before the search. Keys that another thread has added since then stay."""
        self.index |= found
        self.index -= known - found

    def exists(self, keys: list[str]) -> list[bool]:
        latest = self.now = max(time.time_ns(), self.now + len(keys) * self.step)
        known = self.index.intersection(keys)
        paths = [f"{self.folder}/{key}.parts" for key in keys]
        there = [os.path.isfile(path) for path in paths]
        for at, path in compress(enumerate(paths), there):
            with suppress(OSError):     # deleted just now, or owned by another user
                os.utime(path, ns=(latest, latest - at * self.step))
        self.update_index(known, set(compress(keys, there)))
        return there

    def get_into(self, keys: list[str], buffers: list[list], starts: list[int]):
        """Read files from `starts` on, each with one call, straight into its buffers. From the first file on
        that the page cache lacks, ask the kernel for all of them, so that the disk reads several at once.

        Yields: for each file, whether its buffers are filled."""
        reads, missing = list(zip(keys, buffers, starts, strict=True)), False
        flags = getattr(os, "RWF_NOWAIT", 0)    # read only what the page cache has
        for at, each in enumerate(reads):
            found = self.read(*each, flags)
            if not found and flags:
                flags = 0
                for one in reads[at:]:
                    self.read_ahead(*one)
                found = self.read(*each)
            missing |= not found
            yield found
        with suppress(OSError):
            missing and self.files()    # other files may have been deleted too

    def read(self, key: str, buffers: list, start: int, flags: int = 0) -> bool:
        """Fill buffers from a file, from byte `start` on. Returns: False if it is unreadable or too short."""
        with suppress(OSError):
            file = os.open(f"{self.folder}/{key}.parts", os.O_RDONLY)
            try:
                filled = 0
                for at in range(0, len(buffers), MOST):
                    filled += os.preadv(file, buffers[at:at + MOST], start + filled, flags)
                return filled == sum(map(len, buffers))
            finally:
                os.close(file)
        return False

    def read_ahead(self, key: str, buffers: list, start: int):
        """Ask the kernel to read a file's bytes soon. One call reads ahead only as far as the device's
        setting says, which is 128 KiB or more."""
        with suppress(OSError), open(self.path(key), "rb") as file:
            end = start + sum(map(len, buffers))
            for begin in range(start, end, AHEAD):
                os.posix_fadvise(file.fileno(), begin, min(AHEAD, end - begin), os.POSIX_FADV_WILLNEED)

    def uncache(self, keys: list[str]):
        """Make the kernel drop files from its page cache, so that the next read comes from the disk."""
        for key in keys if hasattr(os, "posix_fadvise") else ():
            with suppress(OSError), open(self.path(key), "rb") as file:
                os.fsync(file.fileno())     # the kernel drops clean pages only
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def set(self, keys: list[str], values: list[bytes]):
        """Write every value that can be written, then raise the last OSError, if any."""
        failed = None
        self.make_room(sum(map(len, values)))
        for key, value in zip(keys, values, strict=True):
            try:
                self.write(key, value)
            except OSError as error:
                failed = error
        self.exists(keys)
        if failed:
            warn_once(f"A write to {self.folder} failed, and its contents are dropped: {failed.strerror}.")
            raise failed

    def write(self, key: str, value: bytes):
        """Write a value. On a full file system, make room and try once more. Raises OSError."""
        temporary = self.folder / f"{key}.parts.{os.urandom(16).hex()}.tmp"
        if not self.folder.is_dir():
            os.makedirs(self.folder, exist_ok=True)
            self.index.clear()
            warn_once(f"{self.folder} had vanished; it has been created again and is empty.")
        try:
            temporary.write_bytes(value)
            if self.path(key).is_dir():
                self.path(key).rmdir()  # raises OSError if it is not empty
            os.replace(temporary, self.path(key))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() < self.paused:
                raise
            self.paused = time.monotonic() + PAUSE
            self.make_room(len(value), full=True)
            self.write(key, value)      # once only: `paused` is set
            self.paused = 0.0

    def make_room(self, size: int, full: bool = False):
        """Delete the least recently used files before `size` more bytes are written.

        Scan the folder only after each tenth of the limit that was written, and delete down to nine tenths of
        it. If the file system is `full`, scan now, and delete down to nine tenths of the files' own size."""
        if full or self.written + size > self.limit / 10:
            found, self.written = self.files(), 0
            there = sum(size for _, size, _ in found)
            most, there = 0.9 * min(self.limit, there if full else self.limit), there + size
            while found and there > most:
                _, freed, path = found.pop(0)
                try:
                    path.unlink(missing_ok=True)
                    self.index.discard(path.name.removesuffix(".parts"))
                    there -= freed
                except OSError as error:  # the next file is deleted instead
                    warn_once(f"Cannot delete a file in {self.folder}: {error.strerror}.")
        self.written += size


class RedisBackend:
    """A Redis server, or one that speaks its protocol.

    Each value expires `keep_days` after its last use. The values of a chain expire one after the other, the
    last one first. So a server whose policy is `volatile-ttl` evicts the least recently used chains, and the
    tail of a chain before its head. The LRU policies evict random parts of a chain, because their clock has a
    resolution of 1 s.

    Redis would store a value of 2 MiB and 4 bytes in 2.5 MiB. So the end of a value that is a little larger
    than a power of two is stored apart, under the key with a "+".

    `timeout`: seconds for connecting. A read or write of the socket may take ten times as long, because a
    large value takes long over a slow network. Requests do not wait so long: see `Worker.hangs`
    (shell/workers.py)."""

    def __init__(self, url: str, timeout: float = 1.0, keep_days: float = 7.0):
        import redis
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)     # no retry: a late answer is useless
        limits = dict(socket_connect_timeout=timeout, socket_timeout=10 * timeout)
        self.client = redis.Redis.from_url(url, retry=retry, **limits)
        self.now, self.life = 0, int(864e5 * keep_days)     # ms: latest use, and from there to expiry
        self.full = redis.exceptions.OutOfMemoryError

    def exists(self, keys: list[str]) -> list[bool]:
        latest = self.now = max(time.time_ns() // 10**6, self.now + len(keys))
        with self.client.pipeline(transaction=False) as pipeline:
            for at, key in enumerate(keys):
                pipeline.pexpireat("kv:" + key, latest + self.life - at)    # reports whether the key exists
                pipeline.pexpireat(f"kv:{key}+", latest + self.life - at)
            return [found == 1 for found in pipeline.execute()[::2]]

    def get(self, keys: list[str]) -> list[bytes | None]:
        found = self.client.mget([name for key in keys for name in (f"kv:{key}", f"kv:{key}+")])
        return [value and value + (end or b"") for value, end in zip(found[::2], found[1::2])]

    def set(self, keys: list[str], values: list[bytes]):
        stored = {}
        for key, value in zip(keys, values, strict=True):
            below = (1 << (len(value) + SPARE).bit_length() - 1) - SPARE
            end = below if len(value) - below < below // 8 else len(value)
            stored |= {f"kv:{key}": value[:end]} | ({f"kv:{key}+": value[end:]} if value[end:] else {})
        try:
            if stored:
                self.client.mset(stored)
        except self.full:
            warn_once("Redis is full; set its maxmemory-policy to volatile-ttl.")
            raise
        self.exists(keys)       # so that they expire


def open_backend(url: str, config: dict | None = None):
    """Open a back end and ask it once, so that a wrong address fails here.

    `url`: file:DIR, redis://HOST:PORT/N, or module:Class. `config`: its keyword arguments. Raises
    BadRequest."""
    module, _, name = url.partition(":")
    if re.match(r"file:(\s*$|//(?!/))", url):
        raise BadRequest(f"'{label(url)}' names no folder; write file:pages (here), or file:/srv/pages.")
    try:
        known = dict(file=Directory, redis=RedisBackend, rediss=RedisBackend, unix=RedisBackend)
        kind = partial(known[module], url) if module in known else getattr(import_module(module), name)
        takes = inspect.signature(kind).parameters if config else {}
        wrong = [key for key in config or () if key not in takes]
        if wrong and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            words = f"has no setting {wrong[0]!r:.40}; it has {', '.join(takes) or 'nothing'}."
            raise BadRequest(f"The storage '{label(url)}' {words}")
        backend = kind(**config or {})
        backend.exists(["0" * 64])
        return backend
    except BadRequest:
        raise
    except Exception as error:
        # The error could quote a secret if the URL has a user or password, or if there is a configuration.
        words = "" if config or "@" in url else f": {' '.join(str(error).split()).replace('. ', ', ')[:200]}"
        failed = f"Cannot use the storage '{label(url)}' ({type(error).__name__}{words})"
        raise BadRequest(f"{failed}; start it, install its package or correct its configuration, or write "
                         "file:DIR, redis://HOST:PORT/N, or module:Class.") from None


def open_storage(url: str, config: dict | None = None, bandwidth=None) -> Storage:
    """Open a back end and return a Storage that uses it. Raises BadRequest."""
    return Storage(open_backend(url, config), label(url), bandwidth)


def measure(storage: Storage, size: int, count: int = 1) -> Transfer:
    """Measure the read bandwidth of a storage: write `count` test values of `size` bytes, and read them
    several times, because other reads and writes only make a read slower. If the back end has a method
    `uncache(keys)`, call it before each read, so that memory does not answer for the disk. Returns: the
    Transfer of the last read."""
    keys = [hashlib.sha256(b"measure %d %d" % (size, number)).digest() for number in range(count)]
    contents = [numpy.arange(size).astype(numpy.uint8) for _ in keys]
    storage.reader.submit("measure", 0, storage.track_errors, storage.write, keys, contents)
    uncache = getattr(storage.backend, "uncache", lambda keys: None)
    storage.reader.measured.samples.clear()
    for _ in range(TEST_READS):
        storage.reader.submit("measure", 0, uncache, [key.hex() for key in keys])
        read = storage.get(keys, contents, "measure")
    return read


def attach_storage(cache, storage: Storage | None):
    """Replace the storage of chapter 07's cache, or detach it (None). Call it between two steps.

    A thread closes the old storage once its transfers have completed. Pages that are being read from it do
    not arrive, and pages that are being written to it may be lost."""
    engine, before, writing = cache.engine, cache.storage, set(cache.writing)
    for request in (*engine.waiting, *engine.running):
        cache.finished(request)         # forget its transfers from the old storage
    for known in cache.reading, cache.writing, cache.unwritten:
        known.clear()
    if before:
        before.counts = Counter()       # its errors and reads do not count any more
        for lane in "ask", "read", "measure", "write":
            for transfers, held, _ in cache.in_flight.pop(lane, ()):
                cache.hold(before, transfers, given=held)       # in a separate lane, without callbacks
        cache.hold(before, [], then=lambda arrived: Thread(target=before.close, daemon=True).start())
    cache.storage = storage
    if storage:
        storage.open(partial(Worker, wake=engine.wake.set), engine.counts)
        cache.measure_storage()
    cache.doubt([page for one in cache.tree.nodes() if one.host_blocks or one.stored for page in one.pages])
    cache.count_lost(writing)


def configuration(text: str) -> dict:
    """An argparse type: a JSON object, @FILE.toml, or @FILE with JSON, in UTF-8.

    Errors never quote the text, which may hold secrets."""
    try:
        if not text.startswith("@"):
            return dict(**json.loads(text))
        file = Path(text[1:]).expanduser()
        parse = import_module("tomllib").loads if file.suffix == ".toml" else json.loads
        return dict(**parse(file.read_text("utf-8-sig")))
    except (ImportError, OSError, TypeError, ValueError, RuntimeError):
        words = "give a JSON object, or @FILE with one in UTF-8; TOML (@FILE.toml) needs Python 3.11 or newer"
        raise argparse.ArgumentTypeError(words) from None


def settings(config: dict | None, arguments) -> tuple[dict, list[float]]:
    """Split the prefetch settings off a storage configuration. Raises BadRequest.

    Returns: (the configuration without them, [threshold in tokens, timeout in seconds, seconds more for each
    1,024 tokens]). Settings that the configuration lacks come from the command line."""
    config, found = dict(config or {}), []
    for name in "prefetch_threshold", "prefetch_timeout", "prefetch_timeout_per_1k":
        found.append(config.pop(name, getattr(arguments, name)))
        if not number(0, 1e8, (int, float))(found[-1]):
            raise BadRequest(f"{name} in --storage-config must be a number from 0 to 1e8.")
    return config, found


def label(url: str) -> str:
    """Return the URL without user, password and options, for printing."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Return chunks stored in files, at most `limit_gb` in all directories together. Raises BadRequest."""
    paths = dict.fromkeys(os.path.realpath(os.path.expanduser(directory)) for directory in directories)
    return StoredChunks(*(Storage(Directory(path, limit_gb / len(paths)), path) for path in paths))
