"""Serve the stub engine, or another one, on a real socket, and ask the server as a client does."""
import http.client
import io
import json
import threading
import time
from contextlib import closing, contextmanager

import pytest

from shell import server as servers
from tests.support.stub import Engine

servers.POLL_SECONDS, servers.SILENCE_SECONDS = 0.02, 0.0   # notice hang-ups soon, and send comments often

INFO = dict(chapter="stub", model="tiny", device="cpu", dtype="float32")
TIMEOUT = 300                      # seconds; an answer takes a few at most
ASK = dict(prompt="Hello", max_tokens=8)
CHAT = dict(messages=[dict(role="user", content="Hello")], max_tokens=8, temperature=0)


def strictly(raw):
    """Parse JSON as strictly as browsers do: NaN and Infinity fail the test."""
    return json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class Reply:
    """A complete HTTP reply."""

    def __init__(self, response):
        self.status, self.headers = response.status, response.headers
        self.kind = response.headers.get_content_type()
        self.raw = response.read()

    @property
    def json(self):
        return strictly(self.raw)

    @property
    def events(self) -> list:
        """The events of a stream: JSON objects, and the string [DONE]. Comments are left out."""
        assert self.status == 200 and self.kind == "text/event-stream", self.raw
        *parts, end = self.raw.decode().split("\n\n")
        assert end == "" and all(part.startswith(("data: ", ": ")) for part in parts)
        said = [part[6:] for part in parts if part.startswith("data: ")]
        return [part if part == "[DONE]" else strictly(part) for part in said]

    def error(self, status: int, kind: str = "invalid_request_error") -> str:
        """Check the form of an error reply, and return its sentence."""
        assert self.status == status and self.kind == "application/json", self.raw
        assert set(self.json) == {"error"}
        return sentence(self.json["error"], kind)


def sentence(error: dict, kind: str = "invalid_request_error") -> str:
    """Check that an error's message is one sentence, and return it."""
    message = error["message"]
    assert set(error) - {"code", "param"} == {"message", "type"} and error["type"] == kind, error
    assert message.endswith(".") and "\n" not in message and ". " not in message, message
    return message


class Client:
    """A client of a server under test. `server`, `thread`: the Server and its engine's thread, if in this process."""

    def __init__(self, port: int, server: servers.Server | None = None, thread: threading.Thread | None = None):
        self.port, self.server, self.engine, self.thread = port, server, server and server.engine, thread

    def send(self, route: str, body=None, method: str | None = None, headers: dict | None = None):
        """Send a request, and return the connection without waiting for the answer. To close it means to hang up.

        `body`: JSON, or bytes, or a stream of bytes that is sent in chunks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        raw = body if isinstance(body, bytes | io.BytesIO | None) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), route, raw, headers or {})
        return connection

    def ask(self, route: str, body=None, **options) -> Reply:
        with closing(self.send(route, body, **options)) as connection:
            return Reply(connection.getresponse())

    def counters(self) -> dict:
        return self.ask("/health").json["counters"]


@contextmanager
def serving(frontend, engine=None, info=INFO, **options):
    """Context manager: serve an engine and yield a Client.

    The engine runs on a new thread, since tests send requests from the main thread. At the end, that thread must end,
    and no request may be left."""
    server, listener = servers.Server(engine or Engine(), frontend, info, **options), servers.listen("127.0.0.1", 0)
    listener.app = servers.make_app(server)
    steps = threading.Thread(target=server.run, daemon=True)
    steps.start()
    try:
        yield Client(listener.port, server, steps)
    finally:
        getattr(server.engine, "let", bool)()  # only the stub engine can be held
        server.close()
        listener.shutdown()
        steps.join(TIMEOUT)
    assert not steps.is_alive() and not server.engine.running and not server.engine.waiting


def eventually(what):
    """Wait until `what()` is true, and fail after 300 s."""
    deadline = time.monotonic() + 300
    while not what():
        assert time.monotonic() < deadline, "the condition did not become true in 300 s"
        time.sleep(0.01)
