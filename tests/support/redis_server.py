"""A Redis server for tests: `with redis_server() as url`."""

import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager, suppress

import pytest

from .serving import eventually


@contextmanager
def redis_server():
    """Context manager: start a Redis server and return its URL.

    Skip the test if redis-server or its Python client is missing."""
    redis = pytest.importorskip("redis", reason="the Redis client is not installed: pip install -r requirements-dev.txt")
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def answers() -> bool:
        with suppress(redis.ConnectionError):
            return redis.Redis(port=port).ping()

    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            eventually(answers)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()
