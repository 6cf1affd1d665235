"""Back ends of storage: what `--storage` and `--disk` open."""
import importlib
import re
from pathlib import Path

from common.store import Directory, Storage, StoredChunks
from shell.checkpoint import ModelError


class RedisBackend:
    """Redis, or what speaks its protocol. `timeout` in seconds, of connecting and of every answer."""

    def __init__(self, url: str, timeout: float = 1.0, prefix: str = "kv:"):
        import redis
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)     # what comes late is worth nothing
        limits = dict(socket_timeout=timeout, socket_connect_timeout=timeout)
        self.client, self.prefix = redis.Redis.from_url(url, retry=retry, **limits), prefix
        self.close = self.client.close

    def exists(self, keys: list[str]) -> list[bool]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.touch(self.prefix + key)       # which says whether it is there, and uses it
            return [found == 1 for found in pipeline.execute()]

    def get(self, keys: list[str]) -> list[bytes | None]:
        return self.client.mget([self.prefix + key for key in keys])

    def set(self, keys: list[str], values: list[bytes]):
        if keys:
            self.client.mset({self.prefix + key: value for key, value in zip(keys, values, strict=True)})


def open_backend(url: str, config: dict | None = None):
    """Open file:DIR, redis://HOST:PORT/N, or module:Class, with `config` as its keyword arguments, and ask it
    once. Raises ModelError."""
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
        words = "" if config or "@" in url else f": {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"Cannot use the storage '{label(url)}' ({type(error).__name__}{words}); start it or install its "
            "package, or write file:DIR, redis://HOST:PORT/N, or module:Class.") from None


def label(url: str) -> str:
    """Return the URL for printing: without user, password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def in_directories(directories: list[Path], limit_gb: float) -> StoredChunks:
    """Return chunks in files of at most so much together. Raises ModelError."""
    paths, storages = dict.fromkeys(str(Path(directory).resolve()) for directory in directories), []
    for path in paths:
        try:
            storages.append(Storage(Directory(path, limit_gb / len(paths)), path))
        except OSError as error:
            words = f"Cannot keep chunks in '{path}' ({error.strerror}); choose another --disk."
            raise ModelError(words) from None
    return StoredChunks(*storages)
