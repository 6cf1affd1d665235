"""A Redis of one's own, for tests: `with redis_server() as url`."""

import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager, suppress

import pytest

from .serving import eventually


@contextmanager
def redis_server():
    """-> its URL. Where redis-server or its Python client is missing, tests skip."""
    reason = "the Redis client is not installed: pip install -r requirements-dev.txt"
    pytest.importorskip("redis", reason=reason)
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        process, port = next(filter(None, (started(folder) for _ in range(5))))
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def started(folder: str) -> tuple[subprocess.Popen, int] | None:
    """Start a server -> it and its port, when it answers; None if it ends: another process has taken the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: process.poll() is not None or answers(port))
    return (process, port) if process.poll() is None else None


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(1) in (b"+", b"-")  # an error is an answer too
