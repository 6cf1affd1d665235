"""A Redis of one's own, for tests: `with redis_server() as url`."""

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager

import pytest


@contextmanager
def redis_server():
    """-> its URL. Where redis-server or its Python client is missing, tests skip."""
    reason = "the Redis client is not installed: pip install -r requirements-dev.txt"
    pytest.importorskip("redis", reason=reason)
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(folder)
        yield f"redis://127.0.0.1:{port}/0"
        process.kill()
        process.wait()


def start(folder: str, attempts: int = 5) -> tuple[subprocess.Popen, int]:
    """-> a server that answers, and its port. Raises OSError if none does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # which another process may take before the server does
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(1) in (b"+", b"-"):  # an error is an answer too
                    return process, port
        except OSError:
            time.sleep(0.01)
    process.kill()
    process.wait()
    if attempts > 1:
        return start(folder, attempts - 1)
    raise OSError(f"redis-server does not answer on port {port}")
