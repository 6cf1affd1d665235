"""The engine of chapter 06 behind a real socket: many clients, some of whom hang up, several samples, salts, errors."""
import http.client
import itertools
import json
from contextlib import closing, contextmanager

import pytest
from hypothesis import strategies as st

from legacy.tests.conftest import chapter
from legacy.tests.test_app import (
    Serving,
    eventually,
)

paged = chapter("02_paged_kv")
TIMEOUT = 120                      # seconds; no answer here takes more than a few


class Reply:
    """What came over the socket, in the form in which Flask's test client gives it."""

    def __init__(self, response):
        self.status_code, self.mimetype = response.status, response.getheader("Content-Type").split(";")[0]
        self.data = response.read().decode()

    def get_data(self, as_text: bool):
        return self.data

    @property
    def json(self):
        return json.loads(self.data)


def sent(port: int, body, route: str = "/generate"):
    """-> the connection on which `body` was asked; the answer is still to come. Closing it is to hang up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("POST", route, body if isinstance(body, bytes) else json.dumps(body))
    return connection


def ask(port: int, body, route: str = "/generate") -> Reply:
    with closing(sent(port, body, route)) as connection:
        return Reply(connection.getresponse())


def counters(port: int) -> dict:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)) as connection:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())["counters"]


def make(tiny_engine, end_tokens=None, **options):
    """Chapter 02's engine on the model of chapter 01's."""
    return paged.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens if end_tokens is None else end_tokens,
                        **{"blocks": 64, **options})


@contextmanager
def serving(engine):
    """-> the port. Afterwards nobody runs or waits, every block is back, and everybody is counted once."""
    try:
        with Serving(engine) as port:
            yield port
            eventually(lambda: over(engine))
            counts = engine.counters()
            assert counts["running"] == counts["waiting"] == counts["blocks_referenced"] == 0
            assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"] == engine.pool.size
            engine.pool.check_integrity([])
            assert counts["finished"] + counts["failed"] + counts["cancelled"] == counts["requests"]
    finally:
        engine.close()


def over(engine) -> bool:
    """Whether the engine's thread has nothing more to do; it holds `stepping` while it does something."""
    with engine.stepping:
        return not (engine.running or engine.waiting or engine.cancelled)


def before_each_pass(engine, call):
    """`call(number)` comes before every forward pass, in the engine's thread, which has not changed anything since."""
    forward, numbers = engine.forward, itertools.count()

    def wrapped(batch):
        call(next(numbers))
        return forward(batch)
    engine.forward = wrapped


@pytest.fixture(scope="module")
def port(tiny_engine):
    """Of a server that all tests share that leave it as it was."""
    with serving(make(tiny_engine)) as port:
        yield port


NS, SALTS = st.integers(1, 4), st.text(max_size=8) | st.just("Anna")


# Chapter 06 ------------------------------------------------------------------------------------------------------


