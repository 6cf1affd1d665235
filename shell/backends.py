"""Back ends of storage: what `--storage` and `--disk` open."""

import importlib
import re
from pathlib import Path

from common.store import Directory, Storage, StoredChunks
from shell.checkpoint import ModelError


class RedisBackend:
    """Redis, or what speaks its protocol. `timeout` in seconds, of connecting and of every answer."""

    def __init__(self, url: str, timeout: float = 1.0, prefix: str = "kv:"):
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Without retries, of which redis-py has some by default: what comes late is worth nothing
        options = dict(socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))
        self.client, self.prefix = Redis.from_url(url, **options), prefix

    def exists(self, keys: list[str]) -> list[bool]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.touch(self.prefix + key)  # which says whether it is there, and uses it
            return [found == 1 for found in pipeline.execute()]

    def get(self, keys: list[str]) -> list[bytes | None]:
        return self.client.mget([self.prefix + key for key in keys])

    def set(self, keys: list[str], values: list[bytes]):
        if keys:
            self.client.mset({self.prefix + key: value for key, value in zip(keys, values, strict=True)})

    def close(self):
        self.client.close()


class FsspecBackend:
    """What fsspec has a file system for; the configuration is that file system's."""

    def __init__(self, url: str, **config):
        import fsspec  # it comes with torch

        self.fs, root = fsspec.core.url_to_fs(url, **config)
        self.root = root.rstrip("/")
        self.fs.makedirs(self.root, exist_ok=True)

    def paths(self, keys: list[str]) -> list[str]:
        self.fs.invalidate_cache()  # a listing from before another process wrote
        return [f"{self.root}/{key}.page" for key in keys]

    def exists(self, keys: list[str]) -> list[bool]:
        return [self.fs.exists(path) for path in self.paths(keys)]

    def get(self, keys: list[str]) -> list[bytes | None]:
        found = self.fs.cat(self.paths(keys), on_error="omit")
        return [found.get(path) for path in self.paths(keys)]

    def set(self, keys: list[str], values: list[bytes]):
        self.fs.pipe(dict(zip(self.paths(keys), values, strict=True)))


def open_backend(url: str, config: dict | None = None):
    """-> a back end that has answered: file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or
    module:Class. Raises ModelError."""
    config = config or {}
    try:
        if url.startswith("file:"):
            backend = Directory(url, **config)
        elif "://" in url:
            redis = url.startswith(("redis://", "rediss://", "unix://"))
            backend = (RedisBackend if redis else FsspecBackend)(url, **config)
        else:
            module, _, name = url.partition(":")
            backend = getattr(importlib.import_module(module), name)(**config)
        backend.exists(["0" * 64])
        return backend
    except Exception as error:
        # With a user, a password or a configuration the error may quote what is secret
        words = "" if config or "@" in url else f": {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"Cannot use the storage '{label(url)}' ({type(error).__name__}{words}); start it or install its "
            "package, or write file:DIR, redis://HOST:PORT/N, another URL that fsspec knows, or module:Class."
        ) from None


def label(url: str) -> str:
    """The URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Chunks in files of at most so much together. Raises ModelError."""
    storages, paths = [], dict.fromkeys(Path(directory).resolve() for directory in directories)
    for path in paths:
        try:
            storages.append(Storage(Directory(str(path), limit_gb / len(paths)), str(path)))
        except OSError as error:
            words = f"Cannot keep chunks in '{path}' ({error.strerror}); choose another --disk."
            raise ModelError(words) from None
    return StoredChunks(*storages)
