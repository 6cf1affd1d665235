"""Shared storage for KV pages: one small contract, and what can be had behind it. Chapter 07 keeps its third tier there.

    backend = open_backend("redis://127.0.0.1:6379/0", {"timeout": 0.5})       # or file:DIR, s3://..., module:Class
    set_all(backend, keys, values)
    get_all(backend, keys)                                                     # -> [bytes-like, or None: it is not there]

A back end is any object with these methods. Keys are strings of 64 hexadecimal digits, values are bytes-like (bytes, or a
memoryview of a host buffer, C-contiguous):

    get(key) -> bytes-like or None
    exists(key) -> bool
    set(key, value)            whole or not at all. A key's value never changes, so setting one that is there may do nothing.
                               When it returns or raises, the caller may overwrite its buffer.
    batch_get(keys) -> list, batch_exists(keys) -> list of bool, batch_set(keys, values), close()              optional
    read_into(key, buffer) -> bytes-like or None     optional, and asked before batch_get: as get, but a value as long as the
                               buffer (a memoryview, or None) is read into it, and the buffer is returned. When it returns or
                               raises, nothing of it may write there any more.

They are called from several threads at the same time. Each may raise anything: the caller counts it, goes on without, and does
not ask again for a while. So a back end does not try again by itself, and should not take long to give up. It need not check
what it read either: the caller does.
"""
import importlib
import json
import math
import os
import re
import stat
import uuid
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from common.checkpoint import ModelError
from legacy.store import DurableFiles, without_waiting

KINDS = ("file:DIR, redis://HOST:PORT/N, another URL that fsspec knows (s3://BUCKET/PATH, gs://..., memory://...) or "
         "module:Class")


# All keys of a list --------------------------------------------------------------------------------------------------

def get_all(backend, keys: list[str], buffers=()) -> list:
    """-> for each key its value, or None. `buffers`: for each key where its value may be read to, a memoryview or None."""
    if any(buffer is not None for buffer in buffers) and hasattr(backend, "read_into"):
        return as_many(keys, map(backend.read_into, keys, buffers))
    return as_many(keys, backend.batch_get(keys) if hasattr(backend, "batch_get") else map(backend.get, keys))


def exist_all(backend, keys: list[str]) -> list[bool]:
    """-> for each key whether it is there, right up to the first False. Where keys are asked for one by one, nothing is asked
    behind that, and all of it is False: callers want to know how many of the first keys are there."""
    if hasattr(backend, "batch_exists"):
        return as_many(keys, map(bool, backend.batch_exists(keys)))
    for number, key in enumerate(keys):
        if not backend.exists(key):
            return [True] * number + [False] * (len(keys) - number)
    return [True] * len(keys)


def set_all(backend, keys: list[str], values: list):
    """If it raises, some may have been kept, each of them whole."""
    if hasattr(backend, "batch_set"):
        backend.batch_set(keys, values)
    else:
        for key, value in zip(keys, values, strict=True):
            backend.set(key, value)


def as_many(keys, answers) -> list:
    answers = list(answers)
    if len(answers) != len(keys):
        raise ValueError(f"{len(answers)} answers for {len(keys)} keys")
    return answers


def flat(value) -> memoryview:
    view = memoryview(value)
    return view.cast("B") if view.nbytes else memoryview(b"")


# The back ends -------------------------------------------------------------------------------------------------------

class FileBackend:
    """A directory, which processes may share; beyond the limit the least recently used pages go. A file is a value."""

    def __init__(self, url: str, limit_gb: float = 16):
        directory = url.removeprefix("file:")
        directory = directory[2:] if directory.startswith("//") else directory                 # file:///abs/dir
        if not directory:
            raise ModelError("The storage file: names no directory; write file:DIR.")
        self.files = DurableFiles([Path(directory)], positive("limit_gb", limit_gb) * 1e9, "page", 0,
                                  ("--storage", "limit_gb in --storage-config"))

    def path(self, key: str) -> Path:
        return self.files.directories[0] / f"{key}.page"

    def get(self, key: str) -> bytes | None:
        return self.read_into(key, None)

    def read_into(self, key: str, buffer: memoryview | None) -> bytes | memoryview | None:
        try:
            with open(self.path(key), "rb", buffering=0, opener=without_waiting) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return None
                with suppress(OSError):                         # it may not be ours; then it goes earlier
                    os.utime(file.fileno())
                if buffer is not None and len(buffer) == status.st_size:
                    value = buffer if file.readinto(buffer) == len(buffer) else b""
                else:
                    value = file.read()
        except (FileNotFoundError, IsADirectoryError):
            return None
        self.files.count(file_reads=1, file_read_bytes=len(value))
        return value if len(value) == status.st_size else None  # else somebody has cut it meanwhile

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def set(self, key: str, value):
        """Leaves alone what is there and used now. Compares it, because a file that was damaged must not stay for ever."""
        if not self.exists(key) or self.get(key) != bytes(flat(value)):
            self.files.put(self.path(key), [flat(value)])


class RedisBackend:
    """Redis, or anything that speaks its protocol. `timeout` is in seconds, for connecting and for every answer."""

    def __init__(self, url: str, timeout: float = 1.0, prefix: str = "kv:", username: str | None = None,
                 password: str | None = None):
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ModelError(f"The storage {label(url)} needs the Redis client; install it with pip install redis.") from None
        self.prefix, timeout = prefix, positive("timeout", timeout)
        if not isinstance(prefix, str):
            raise ModelError("The setting prefix in --storage-config must be a string.")
        try:
            # No retries, said outright: redis.Redis(...) has three from redis-py 6 on. A page that comes late is worth nothing.
            self.client = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout, username=username,
                                               password=password, retry=Retry(NoBackoff(), 0))
        except ValueError:                                      # which may quote a part of the password
            raise ModelError(f"'{label(url)}' is no address of a Redis; write redis://:PASSWORD@HOST:PORT/N, with %2F for a / "
                             "in the password.") from None

    @contextmanager
    def connected(self):
        """After any error, no idle connection is used again: on one that was given up, the rest of an answer may still come, and
        would be taken for the next."""
        try:
            yield self.client
        except BaseException:
            self.client.connection_pool.disconnect(inuse_connections=False)
            raise

    def get(self, key: str) -> bytes | None:
        with self.connected() as client:
            return client.get(self.prefix + key)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value):
        self.batch_set([key], [value])

    def batch_get(self, keys: list[str]) -> list:
        with self.connected() as client:
            return client.mget([self.prefix + key for key in keys]) if keys else []

    def batch_exists(self, keys: list[str]) -> list[bool]:
        with self.connected() as client, client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(self.prefix + key)
            return [answer == 1 for answer in pipeline.execute()]

    def batch_set(self, keys: list[str], values: list):
        with self.connected() as client, client.pipeline(transaction=False) as pipeline:
            for key, value in zip(keys, values, strict=True):
                pipeline.set(self.prefix + key, flat(value))
            pipeline.execute()

    def close(self):
        self.client.connection_pool.disconnect()


class FsspecBackend:
    """Whatever fsspec has a file system for. The configuration is that file system's: key, secret, endpoint_url, ..."""

    def __init__(self, url: str, **config):
        import fsspec  # it comes with torch
        self.fs, root = fsspec.core.url_to_fs(url, **config)
        self.root = root.rstrip("/")
        # An object store shows an object when it is whole, and its move is a copy. A file system shows a file as it grows, and
        # has a move of its own, which is at once.
        self.moves = type(self.fs).mv is not fsspec.AbstractFileSystem.mv
        if self.moves:
            self.fs.makedirs(self.root, exist_ok=True)
        self.threads = ThreadPoolExecutor(16, "storage")        # most of the time is spent waiting for answers

    def path(self, key: str) -> str:
        self.fs.invalidate_cache()                              # a listing from before another process wrote
        return f"{self.root}/{key}.page"

    def get(self, key: str) -> bytes | None:
        try:
            return self.fs.cat_file(self.path(key))
        except FileNotFoundError:
            return None

    def exists(self, key: str) -> bool:
        try:
            return self.fs.info(self.path(key))["type"] == "file"              # fs.exists says no to any error
        except FileNotFoundError:
            return False

    def set(self, key: str, value):
        path = self.path(key)
        if not self.moves:
            return self.fs.pipe_file(path, bytes(flat(value)))
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            self.fs.pipe_file(temporary, bytes(flat(value)))
            self.fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self.fs.rm_file(temporary)
            raise

    def batch_get(self, keys: list[str]) -> list:
        return self.at_once(self.get, keys)

    def batch_exists(self, keys: list[str]) -> list[bool]:
        return self.at_once(self.exists, keys)

    def batch_set(self, keys: list[str], values: list):
        self.at_once(self.set, keys, values)

    def at_once(self, call, *lists) -> list:
        futures = [self.threads.submit(call, *arguments) for arguments in zip(*lists, strict=True)]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        wait(futures)                                           # nobody reads the caller's buffers any more
        return [future.result() for future in futures]

    def close(self):
        self.threads.shutdown(wait=False)


# Addresses and configurations ----------------------------------------------------------------------------------------

def open_backend(url: str, config: dict | None = None):
    """-> the back end, which has answered once. Raises ModelError."""
    config, backend = config or {}, None
    try:
        backend = find_kind(url)(**config)
        if missing := [name for name in ("get", "exists", "set") if not callable(getattr(backend, name, None))]:
            raise ModelError(f"The storage {label(url)} has no method {missing[0]}(); a back end needs get, exists and set.")
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"The storage {label(url)} needs a package that is not installed ({said(error, url, config)}); install "
                         "it with pip.") from None
    except Exception as error:
        if "Protocol not known" in str(error):
            raise ModelError(f"There is no storage '{label(url)}'; write {KINDS}.") from None
        raise ModelError(f"The storage {label(url)} cannot be set up ({said(error, url, config)}); change --storage or "
                         "--storage-config.") from None
    try:
        backend.exists("0" * 64)
    except Exception as error:
        with suppress(Exception):
            backend.close()
        raise ModelError(f"Cannot reach the storage {label(url)}: {said(error, url, config)}; start it, or choose another "
                         "--storage.") from None
    return backend


def find_kind(url: str):
    """-> what makes the back end from its configuration."""
    if url.startswith("file:"):
        return partial(FileBackend, url)
    if re.match(r"[a-z][\w+.:-]*://", url):
        return partial(RedisBackend if re.match("(rediss?|unix)://", url) else FsspecBackend, url)
    if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*", url):
        raise ModelError(f"There is no storage '{label(url)}'; write {KINDS}.")
    module, name = url.split(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:                                  # a module may raise anything
        raise ModelError(f"Cannot import '{module}' for the storage {url} ({said(error)}); put it where Python finds modules "
                         f"(PYTHONPATH), or write {KINDS}.") from None
    if not callable(found):
        raise ModelError(f"The module '{module}' has no class '{name}'; write module:Class with a class that it has.")
    return found


def label(url: str) -> str:
    """The URL for printing: without user, password and options."""
    return url if url.startswith("file:") else re.sub(r"\?.*", "", "".join(parts(url)[::2]), flags=re.DOTALL)


def parts(url: str) -> tuple[str, str, str]:
    """-> (kind, user and password, the rest). Both may hold what they should not: a / or an @."""
    kind = re.match(r".*?://|\w*:|", url)[0]
    user = re.match(r"(?!/)(.*:.*@|[^/]*@)|", url[len(kind):])[0]
    return kind, user, url[len(kind) + len(user):]


def said(error: Exception, url: str = "", config: dict | None = None) -> str:
    """What the error says, without what is secret in the URL and the configuration."""
    _, user, rest = parts(url)
    options = parse_qsl(rest.partition("?")[2]) + list((config or {}).items())
    secrets = [user, user[:-1], user[:-1].partition(":")[2]] + [
        str(value) for name, value in options if re.search("pass|secret|token|key|credential", name, re.IGNORECASE)]
    text = " ".join(str(error).split()) or type(error).__name__
    for form in sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True):
        text = text.replace(form, "***")
    return text.rstrip(".")


def positive(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"The setting {name} in --storage-config must be a positive number, not {value!r}.")
    return value


def read_config(text: str) -> dict:
    """A JSON object, or @FILE with one (.json) or with TOML (.toml). Raises ModelError."""
    name, what = text.removeprefix("@"), "'--storage-config'"
    try:
        if text.startswith("@"):
            what = f"'{name}'"
            text = Path(name).read_text(encoding="utf-8")
        if what == "'--storage-config'" or name.endswith(".json"):
            config = json.loads(text)
        elif name.endswith(".toml"):
            import tomllib
            config = tomllib.loads(text)
        else:
            raise ModelError(f"{what} is neither a .json nor a .toml file; give one of these to --storage-config.")
    except ModelError:
        raise
    except ModuleNotFoundError:
        raise ModelError(f"{what} needs Python 3.11, which reads TOML; write the configuration as a .json file.") from None
    except OSError as error:
        raise ModelError(f"Cannot read {what} ({error.strerror}); give --storage-config a file that is there.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Cannot understand {what} ({said(error)}); write a JSON object, or @FILE with FILE ending in .json or "
                         ".toml.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{what} is not an object; write it as {{\"name\": value}}.")
    return config
