"""Storage that several engines share, that is slow, or that forgets: what is found again, and what is counted."""

import random

import pytest

from shell import backends
from tests.support.engines import ORACLE, ask, draw, wait_until_idle
from tests.test_tiered import FILES, cache_on, engine_with


def found_below(request) -> int:
    """Return how many of the prompt's tokens came from a tier below the device."""
    assert ORACLE.judge(request) != "wrong"
    return sum(tokens for tier, tokens in request.found.items() if tier != "gpu")


@FILES
def test_engines_that_share_a_directory_find_the_blocks_of_each_other(kind, tmp_path):
    rng, whole = random.Random(0), 256 if kind == "both" else 288
    first, second, third = (draw(rng, 300) for _ in range(3))
    with engine_with(cache_on(kind, tmp_path, 1.0)) as one, engine_with(cache_on(kind, tmp_path, 1.0)) as other:
        for engine, prompt in (one, first), (other, second), (one, third), (other, third):
            ask(engine, prompt, 1)
            wait_until_idle(engine)
        found = [found_below(ask(engine, prompt + [3], 1)) for engine, prompt in ((other, first), (one, second))]
        assert found == [whole] * 2, "each finds at once what the other one has written"
    with engine_with(cache_on(kind, tmp_path, 1.0)) as engine:
        assert [found_below(ask(engine, prompt + [3], 1)) for prompt in (first, second, third)] == [whole] * 3
