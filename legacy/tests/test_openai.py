"""OpenAI's own Python client against the server of chapter 07."""
import uuid
from contextlib import contextmanager

import pytest

from legacy import backends
from legacy.tests.conftest import chapter
from legacy.tests.test_server import TIMEOUT, serving

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -r requirements-dev.txt")

tiered = chapter("07_tiered_storage")
STORY = "It was a long story, and it began with a letter. " * 2        # 98 tokens, six blocks of 16 and a bit
GREEDY = dict(model="tiny", max_tokens=8, temperature=0)


def options(port: int, **more) -> dict:
    return dict(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=TIMEOUT, **{"max_retries": 0, **more})


@contextmanager
def connected(port: int, **more):
    """A client that asks once, and asks no proxy."""
    with openai.OpenAI(http_client=openai.DefaultHttpxClient(trust_env=False), **options(port, **more)) as client:
        yield client


@contextmanager
def stored(tiny_engine):
    """Chapter 07's engine on storage. It always estimates to load faster than to compute."""
    engine = tiered.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, blocks=64, cpu_blocks=64,
                           bytes_per_second=5e8, prefetch_policy="wait_complete", prefetch_threshold=16)
    engine.seconds_to_load, engine.seconds_to_compute = lambda *_, **__: 1e-9, lambda *_: 1e3
    engine.attach(backends.open_backend(f"memory://{uuid.uuid4().hex}"), "memory")          # which a process has only once
    try:
        with serving(engine) as port:
            yield engine, port
            engine.flush()
    finally:
        engine.release()


def test_chapter_07_counts_what_comes_from_storage_as_cached(tiny_engine):
    with stored(tiny_engine) as (engine, port), connected(port) as client:
        first = client.completions.create(prompt=STORY, **GREEDY)
        engine.flush()
        tiered.forget(engine)
        again = client.completions.create(prompt=STORY, **GREEDY)
    assert again.choices == first.choices and first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.cached_tokens == 96
