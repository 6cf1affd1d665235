"""A Redis of one's own, for tests:

    with RedisServer("--maxmemory", "1mb") as server:
        server.url                                 # redis://127.0.0.1:PORT/0
        server.stop(), server.start()              # the same port, and nothing in it
        server.pause(), server.resume()            # it accepts connections, and says nothing
"""
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    def __init__(self, *options: str):
        """`options` are more of redis-server's. Where that or its Python client is missing, tests skip."""
        reason = "the Redis client is not installed: pip install -r requirements-dev.txt"
        pytest.importorskip("redis", reason=reason)
        if not shutil.which("redis-server"):
            pytest.skip("redis-server is not installed")
        self.options, self.process, self.port = options, None, 0

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        for attempt in range(5):
            self.port = free_port()  # which another process may take before the server does
            self.url = f"redis://127.0.0.1:{self.port}/0"
            try:
                self.start()
                return self
            except OSError:
                if attempt == 4:
                    self.folder.cleanup()
                    raise

    def __exit__(self, *_):
        self.stop()
        self.folder.cleanup()

    def start(self):
        """Start it, and wait until it answers. Raises OSError if it ends instead."""
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly",
             "no", "--dir", self.folder.name, *self.options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        until = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(1) in (b"+", b"-"):  # an error is an answer too
                        return
            except OSError:
                time.sleep(0.01)
        self.stop()
        raise OSError(f"redis-server does not answer on port {self.port}")

    def stop(self):
        if self.process:
            self.process.kill()                                 # which ends it when it is paused too
            self.process.wait()
            self.process = None

    def pause(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self):
        os.kill(self.process.pid, signal.SIGCONT)
