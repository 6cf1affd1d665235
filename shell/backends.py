"""Back ends of storage, and what opens them: a directory of files, Redis, a class of one's own."""
import argparse
import importlib
import inspect
import json
import os
import re
import tempfile
import time
import uuid
import warnings
from contextlib import suppress
from pathlib import Path

from common.requests import BadRequest
from common.store import Storage, StoredChunks

PREFETCHING = "prefetch_threshold", "prefetch_timeout", "prefetch_timeout_per_1k"
OWN_FILE = re.compile(r"[0-9a-f]{64}\.page(\.[0-9a-f]{32}\.tmp)?")


class Directory:
    """A file for each value. Processes may share it: a file appears by being renamed. Beyond `limit_gb` the
    least recently used go. A file's time says when that was, but later than all that were set here or found:
    clocks err. Files with other names than those that are written here are left alone."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        self.folder, self.limit = Path(url.removeprefix("file:")).expanduser(), 1e9 * limit_gb
        self.now, self.step, self.written = 0, 1, self.limit  # latest time, in ns; bytes since room was made
        os.makedirs(self.folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file, suppress(OSError):  # raises if read-only
            os.utime(file.name, ns=(0, 10**18 + 1_999_999_999))
            self.step = max(1, 10**18 + 2 * 10**9 - os.stat(file.name).st_mtime_ns)  # what it tells apart
        self.look()

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.page"

    def look(self) -> list[tuple]:
        """-> (time, bytes, path) of each file, the least recently used first; also of those half written."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # others delete here; a link may lead nowhere
                if OWN_FILE.fullmatch(entry.name) and entry.is_file():
                    found.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry)))
        self.index = {path.stem for _, _, path in found}
        self.now = max([self.now, *(used for used, _, _ in found)])
        return sorted(found)

    def exists(self, keys: list[str]) -> list[bool]:
        latest = self.now = max(time.time_ns(), self.now + len(keys) * self.step)
        for number, key in enumerate(keys):
            with suppress(OSError):  # gone, or another user's
                os.utime(self.path(key), ns=(latest, latest - number * self.step))
        return [os.path.isfile(self.path(key)) for key in keys]

    def get(self, keys: list[str]) -> list[bytes | None]:
        values = [None] * len(keys)
        for number, key in enumerate(keys):
            with suppress(OSError):  # what cannot be read is not there
                values[number] = self.path(key).read_bytes()
        return values

    def set(self, keys: list[str], values: list[bytes]):
        """Write all that can be written. Raises the last OSError."""
        failed = None
        self.make_room(sum(map(len, values)))
        for key, value in zip(keys, values, strict=True):
            temporary = self.folder / f"{key}.page.{uuid.uuid4().hex}.tmp"
            try:
                temporary.write_bytes(value)
                if self.path(key).is_dir():
                    self.path(key).rmdir()  # raises OSError if there is anything in it
                os.replace(temporary, self.path(key))
                self.index.add(key)
            except OSError as error:
                failed = error
                temporary.unlink(missing_ok=True)
        self.exists(keys)
        if failed:
            raise failed

    def make_room(self, size: int):
        """After each tenth of the limit that was written, look, and delete what is beyond nine tenths."""
        if self.written + size > self.limit / 10:
            found, self.written = self.look(), 0
            full = size + sum(size for _, size, _ in found)
            while found and full > 0.9 * self.limit:
                _, freed, path = found.pop(0)
                try:
                    path.unlink(missing_ok=True)
                    self.index.discard(path.stem)
                    full -= freed
                except OSError as error:  # others go in its place
                    warnings.warn(f"Cannot delete a file in {self.folder}: {error.strerror}.", stacklevel=1)
        self.written += size


class RedisBackend:
    """Redis, or what speaks its protocol. `timeout` in seconds, of connecting and of every answer."""

    def __init__(self, url: str, timeout: float = 1.0):
        import redis
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)     # what comes late is worth nothing
        limits = dict(socket_timeout=timeout, socket_connect_timeout=timeout)
        self.client = redis.Redis.from_url(url, retry=retry, **limits)
        self.close = self.client.close

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
        kind = known.get(module) or getattr(importlib.import_module(module), name)
        takes = inspect.signature(kind).parameters if config else {}
        wrong = [key for key in config or () if key not in takes or key == "url" and module in known]
        if wrong and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            names = ", ".join(key for key in takes if key != "url" or module not in known) or "nothing"
            raise BadRequest(f"The storage '{label(url)}' has no setting {wrong[0]!r:.40}; it has {names}.")
        backend = kind(*[url] * (module in known), **config or {})
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


def configuration(text: str) -> dict:
    """An argparse type: a JSON object, or @FILE.toml, or @FILE with JSON. No error quotes it."""
    toml, advice = text.startswith("@") and text.endswith(".toml"), "give a JSON object, or @FILE with one"
    try:
        if text.startswith("@"):
            advice = "no such file can be read: correct the path behind @"
            text = Path(text[1:]).expanduser().read_text()
            wrong = "the file is not TOML: write lines such as limit_gb = 4", "give a JSON object in the file"
            advice = wrong[0 if toml else 1]
        if toml:
            import tomllib
        return dict(**(tomllib if toml else json).loads(text))
    except ImportError:
        advice = "TOML needs Python 3.11 or newer: give a JSON object, or @FILE with one"
    except (OSError, TypeError, ValueError, RuntimeError):
        pass
    raise argparse.ArgumentTypeError(advice)


def settings(config: dict | None, arguments) -> tuple[dict, list[float]]:
    """-> a configuration without what it says of prefetching, and the threshold, the time, and the time for
    each 1,024 tokens, from there or from the command line. Raises BadRequest."""
    config, found = dict(config or {}), []
    for name in PREFETCHING:
        found.append(value := config.pop(name, getattr(arguments, name)))
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1e8:
            raise BadRequest(f"{name} in --storage-config must be a number from 0 to 1e8.")
    return config, found


def label(url: str) -> str:
    """Return the URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Return chunks in files of at most so much together. Raises BadRequest."""
    paths = dict.fromkeys(os.path.realpath(os.path.expanduser(directory)) for directory in directories)
    try:
        return StoredChunks(*(Storage(Directory(path, limit_gb / len(paths)), path) for path in paths))
    except OSError as error:
        raise BadRequest(f"--disk needs a folder to write in: {error.filename}: {error.strerror}.") from None
