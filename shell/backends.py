"""Back ends of storage, and what opens them: a directory of files, Redis, a class of one's own."""
import argparse
import importlib
import json
import os
import re
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from common.requests import BadRequest
from common.store import Storage, StoredChunks

OWN_FILE = re.compile(r"[0-9a-f]{64}\.page(\.[0-9a-f]{32}\.tmp)?")


class Directory:
    """A file for each value. Processes may share it: a file appears by being renamed. Beyond `limit_gb` the
    least recently used go. Files with other names than those that are written here are left alone."""

    def __init__(self, url: str, limit_gb: float = 16.0):
        self.folder, self.limit = Path(url.removeprefix("file:")), 1e9 * limit_gb
        os.makedirs(self.folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass  # raises OSError if nobody may write here
        self.written = self.limit  # bytes, since room was made
        self.look()

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.page"

    def look(self) -> list[tuple]:
        """-> (time, bytes, path) of each file, the least recently used first; also of those half written."""
        found = []
        for path in self.folder.iterdir():
            if OWN_FILE.fullmatch(path.name):
                with suppress(FileNotFoundError):  # others delete here
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size, path))
        self.index = {path.stem for _, _, path in found}
        return sorted(found)

    def exists(self, keys: list[str]) -> list[bool]:
        now = time.time_ns()
        for number, key in enumerate(reversed(keys)):
            with suppress(OSError):  # gone, or another user's
                os.utime(self.path(key), ns=(now + number, now + number))
        return [self.path(key).is_file() for key in keys]

    def get(self, keys: list[str]) -> list[bytes | None]:
        values = [None] * len(keys)
        for number, key in enumerate(keys):
            with suppress(FileNotFoundError):
                values[number] = self.path(key).read_bytes()
        self.exists(keys)
        return values

    def set(self, keys: list[str], values: list[bytes]):
        for key, value in zip(keys, values, strict=True):
            self.make_room(len(value))
            temporary = self.folder / f"{key}.page.{uuid.uuid4().hex}.tmp"
            try:
                temporary.write_bytes(value)
                os.replace(temporary, self.path(key))
            finally:
                temporary.unlink(missing_ok=True)
            self.exists([key])
            self.index.add(key)

    def make_room(self, size: int):
        """After each tenth of the limit that this process has written, look what is there, and delete what is
        beyond nine tenths."""
        if self.written + size > self.limit / 10:
            found, self.written = self.look(), 0
            full = size + sum(size for _, size, _ in found)
            while found and full > 0.9 * self.limit:
                _, freed, path = found.pop(0)
                path.unlink(missing_ok=True)
                self.index.discard(path.stem)
                full -= freed
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
    try:
        if module == "file":
            backend = Directory(url, **config or {})
        elif url.startswith(("redis://", "rediss://", "unix://")):
            backend = RedisBackend(url, **config or {})
        else:
            backend = getattr(importlib.import_module(module), name)(**config or {})
        backend.exists(["0" * 64])
        return backend
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
    """An argparse type: a JSON object, or @FILE, which holds one. No error quotes it: it may be secret."""
    with suppress(OSError, TypeError, ValueError, RecursionError):
        return dict(**json.loads(Path(text[1:]).read_text() if text.startswith("@") else text))
    raise argparse.ArgumentTypeError("give a JSON object, or @FILE with one that can be read")


def label(url: str) -> str:
    """Return the URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Return chunks in files of at most so much together. Raises OSError."""
    paths = dict.fromkeys(str(Path(directory).resolve()) for directory in directories)
    return StoredChunks(*(Storage(Directory(path, limit_gb / len(paths)), path) for path in paths))
