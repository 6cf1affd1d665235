"""Back ends of storage, and what opens them: a directory of files, Redis, a class of one's own."""
import argparse
import errno
import inspect
import json
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from threading import Thread

from common.requests import BadRequest
from common.store import Storage, StoredChunks
from shell.frontend import number

OWN_FILE = re.compile(r"[0-9a-f]{64}\.page(\.[0-9a-f]{32}\.tmp)?")
PAUSE = 60.0  # seconds without making room on a full file system, after that has not helped


@cache
def warn_once(words: str):
    """Print a line to stderr, once in the life of the process."""
    print(words, file=sys.stderr, flush=True)


class Directory:
    """A file for each value. Processes may share it: a file appears by being renamed. Beyond `limit_gb` the
    least recently used go. A file's time says when that was, but later than all that were set here or found:
    clocks err. Files with other names than those that are written here are left alone.

    `index`: keys of the files that are there, as far as this process knows. The next write creates a folder
    again that has vanished. On a full file system a write makes room as if the limit were reached."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        """Open a folder, or create it. Raises BadRequest if that fails, or if `limit_gb` is no limit."""
        if not number(1e-9, 1e9, (int, float))(limit_gb):
            raise BadRequest("limit_gb, the size of all files together, must be a number from 1e-9 to 1e9.")
        self.folder = Path(os.path.realpath(os.path.expanduser(url.removeprefix("file:"))))
        self.limit = self.written = 1e9 * limit_gb  # `written`: bytes since room was made
        self.now, self.step, self.paused = 0, 1, 0.0  # latest time, in ns; no room is made until `paused`
        try:
            os.makedirs(self.folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder) as file, suppress(OSError):
                os.utime(file.name, ns=(0, 10**18 + 1_999_999_999))
                self.step = max(1, 10**18 + 2 * 10**9 - os.stat(file.name).st_mtime_ns)  # what it tells apart
            self.files()
        except OSError as error:
            words = f"A cache needs a folder to write in: {self.folder}: {error.strerror}."
            raise BadRequest(words) from None

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.page"

    def files(self) -> list[tuple]:
        """Make `index` anew; a folder that has vanished has no files. Returns: (time, bytes, path) of each
        file, the least recently used first; also of those half written. Raises OSError."""
        found = []
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            with suppress(OSError):  # others delete here; a link may lead nowhere
                if OWN_FILE.fullmatch(entry.name) and entry.is_file():
                    found.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry)))
        self.index = {path.stem for _, _, path in found}
        self.now = max([self.now, *(used for used, _, _ in found)])
        return sorted(found)

    def exists(self, keys: list[str]) -> list[bool]:
        latest = self.now = max(time.time_ns(), self.now + len(keys) * self.step)
        for at, key in enumerate(keys):
            with suppress(OSError):  # gone, or another user's
                os.utime(self.path(key), ns=(latest, latest - at * self.step))
        return [os.path.isfile(self.path(key)) for key in keys]

    def get(self, keys: list[str]) -> list[bytes | None]:
        values = [None] * len(keys)
        for at, key in enumerate(keys):
            with suppress(OSError):  # what cannot be read is not there
                values[at] = self.path(key).read_bytes()
        with suppress(OSError):
            None in values and self.files()  # others may be gone with it
        return values

    def set(self, keys: list[str], values: list[bytes]):
        """Write all that can be written. Raises the last OSError."""
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
        """Write a value; on a full file system make room, and write it again. Raises OSError."""
        temporary = self.folder / f"{key}.page.{os.urandom(16).hex()}.tmp"
        if not self.folder.is_dir():
            os.makedirs(self.folder, exist_ok=True)
            self.index = set()
            warn_once(f"{self.folder} had vanished: it is there again, and empty.")
        try:
            temporary.write_bytes(value)
            if self.path(key).is_dir():
                self.path(key).rmdir()  # raises OSError if there is anything in it
            os.replace(temporary, self.path(key))
            self.index.add(key)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() < self.paused:
                raise
            self.paused = time.monotonic() + PAUSE
            self.make_room(len(value), full=True)
            self.write(key, value)      # while `paused`, so only once again
            self.paused = 0.0

    def make_room(self, size: int, full: bool = False):
        """After each tenth of the limit that was written, look, and delete what is beyond nine tenths; if the
        file system is `full`, what is beyond nine tenths of all files."""
        if full or self.written + size > self.limit / 10:
            found, self.written = self.files(), 0
            there = sum(size for _, size, _ in found)
            most, there = 0.9 * min(self.limit, there if full else self.limit), there + size
            while found and there > most:
                _, freed, path = found.pop(0)
                try:
                    path.unlink(missing_ok=True)
                    self.index.discard(path.stem)
                    there -= freed
                except OSError as error:  # others go in its place
                    warn_once(f"Cannot delete a file in {self.folder}: {error.strerror}.")
        self.written += size


class RedisBackend:
    """Redis, or what speaks its protocol. `timeout` in seconds, of connecting and of every answer."""

    def __init__(self, url: str, timeout: float = 1.0):
        import redis
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)     # what comes late is worth nothing
        self.client = redis.Redis.from_url(url, retry=retry, socket_timeout=timeout)

    def exists(self, keys: list[str]) -> list[bool]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.touch("kv:" + key)       # which says whether it is there, and uses it
            return [found == 1 for found in pipeline.execute()]

    def get(self, keys: list[str]) -> list[bytes | None]:
        return self.client.mget(["kv:" + key for key in keys])

    def set(self, keys: list[str], values: list[bytes]):
        if keys:
            self.client.mset({"kv:" + key: value for key, value in zip(keys, values, strict=True)})


def open_backend(url: str, config: dict | None = None):
    """Open file:DIR, redis://HOST:PORT/N, or module:Class, with `config` as its keyword arguments, and ask it
    once. Raises BadRequest."""
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
        # With a user, a password or a configuration the error may quote what is secret
        words = "" if config or "@" in url else f": {' '.join(str(error).split()).replace('. ', ', ')[:200]}"
        failed = f"Cannot use the storage '{label(url)}' ({type(error).__name__}{words})"
        raise BadRequest(f"{failed}; start it, install its package or correct its configuration, or write "
                         "file:DIR, redis://HOST:PORT/N, or module:Class.") from None


def open_storage(url: str, config: dict | None = None, bandwidth=None) -> Storage:
    """Return the Storage behind a back end that is opened now. Raises BadRequest."""
    return Storage(open_backend(url, config), label(url), bandwidth)


def pages_in_storage(cache) -> list:
    """Return the pages that storage has, as far as chapter 07's cache knows."""
    return [page for node in cache.tree.nodes() if node.stored for page in node.pages]


def attach_storage(cache, storage: Storage | None):
    """Between two steps: have chapter 07's cache go on with another storage, or with none, and close the one
    before on a thread, when nothing of it is under way. What is being read does not come, and what is being
    written may be lost."""
    engine, before, writing = cache.engine, cache.storage, set(cache.writing)
    for request in (*engine.waiting, *engine.running):
        cache.finished(request)         # it goes on, without what was noted for the storage before
    for known in cache.reading, cache.writing, cache.unwritten:
        known.clear()
    if before:
        for lane in "ask", "read", "measure", "write":
            for transfers, held, _ in cache.in_flight.pop(lane, ()):
                cache.hold(before, transfers, given=held)       # on a lane of its own, and nothing is noted
        cache.hold(before, [], then=lambda arrived: Thread(target=before.close, daemon=True).start())
    cache.storage = storage
    if storage:
        storage.open(engine.wake.set)
        cache.measure_storage()
    cache.doubt([page for one in cache.tree.nodes() if one.host_blocks or one.stored for page in one.pages])
    cache.count_lost(writing)


def configuration(text: str) -> dict:
    """An argparse type: a JSON object, or @FILE.toml, or @FILE with JSON, in UTF-8. No error quotes it."""
    words, parse = "give a JSON object, or @FILE with one", json.loads
    try:
        if text.startswith("@"):
            words, file = "no such file in UTF-8 can be read: correct the path behind @", Path(text[1:])
            text, words = file.expanduser().read_text("utf-8-sig"), "give a JSON object in the file"
            if file.suffix == ".toml":
                words = "TOML needs Python 3.11 or newer, and lines such as limit_gb = 4"
                parse = import_module("tomllib").loads
        return dict(**parse(text))
    except (ImportError, OSError, TypeError, ValueError, RuntimeError):
        raise argparse.ArgumentTypeError(words) from None


def settings(config: dict | None, arguments) -> tuple[dict, list[float]]:
    """-> a configuration without what it says of prefetching, and the threshold, the time, and the time for
    each 1,024 tokens, from there or from the command line. Raises BadRequest."""
    config, found = dict(config or {}), []
    for name in "prefetch_threshold", "prefetch_timeout", "prefetch_timeout_per_1k":
        found.append(config.pop(name, getattr(arguments, name)))
        if not number(0, 1e8, (int, float))(found[-1]):
            raise BadRequest(f"{name} in --storage-config must be a number from 0 to 1e8.")
    return config, found


def label(url: str) -> str:
    """Return the URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Return chunks in files of at most so much together. Raises BadRequest."""
    paths = dict.fromkeys(os.path.realpath(os.path.expanduser(directory)) for directory in directories)
    return StoredChunks(*(Storage(Directory(path, limit_gb / len(paths)), path) for path in paths))
