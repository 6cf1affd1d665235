"""Storage that several engines share, that is slow, or that forgets: what is found again, and what is counted."""

import importlib
import os
import random
import time

import pytest

from common import store
from common.requests import Request
from shell import backends
from shell.ranks import Ranks
from tests.support.engines import ORACLE, ask, draw, evict, wait_until_idle
from tests.test_tiered import FILES, KEYS, cache_on, engine_with

ranked = importlib.import_module("09_tensor_parallel")


def found_below(request) -> int:
    """Return how many of the prompt's tokens came from a tier below the device."""
    assert ORACLE.judge(request) != "wrong"
    return sum(tokens for tier, tokens in request.found.items() if tier != "gpu")


# 1. Several engines ----------------------------------------------------------------------------

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


def test_a_file_that_is_written_during_a_scan_stays_in_the_index(tmp_path, monkeypatch):
    backend, scan = backends.Directory(f"file:{tmp_path}"), os.scandir

    def scan_and_write(folder):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scan)
            found = list(scan(folder))
            backend.set(KEYS[1:2], [b"new"])  # as by the writer's thread
        return found

    backend.set(KEYS[:1], [b"old"])
    (tmp_path / f"{KEYS[0]}.page").unlink()
    monkeypatch.setattr(os, "scandir", scan_and_write)
    backend.files()
    assert [key in backend.index for key in KEYS[:3]] == [False, True, False]


# 2. Slow storage -------------------------------------------------------------------------------

def cache_of(kind: str, folder, host: int):
    """Return a Cache with `host` host blocks and files as its lower tier. Kind "ranked" is chapter 09's."""
    if kind != "ranked":
        return cache_on(kind, folder, 1.0, host)
    cache = ranked.PageHeadCache(Ranks(), host, 2e9, store.Storage(backends.Directory(f"{folder}")), range(2))
    cache.threshold = 1
    return cache


@pytest.mark.parametrize("kind, host", [("hidden", 400), ("planned", 400), ("both", 400), ("ranked", 400), ("ranked", 40)])
def test_slow_storage_gets_each_block_or_the_block_is_counted(kind, host, tmp_path, monkeypatch):
    """Sixteen prompts at once, and then one more turn of each. In chapters 04 and 05, only eight jobs may wait for the
    writer."""
    rng, write = random.Random(0), backends.Directory.write
    monkeypatch.setattr(store, "BACKLOG", 256 if kind == "both" else 8)
    with monkeypatch.context() as slow, engine_with(cache_of(kind, tmp_path, host), 400) as engine:
        slow.setattr(backends.Directory, "write", lambda *given: time.sleep(1e-3) or write(*given))
        talks = [Request(draw(rng, 8 * 16 + 1), 8) for _ in range(16)]
        engine.generate(talks)
        talks = [engine.generate([Request(talk.tokens + draw(rng, 40), 8)])[0] for talk in talks]
        wait_until_idle(engine)
    missing, size = 0, 64 if kind == "both" else 16
    with engine_with(cache_of(kind, tmp_path, 400), 400) as later:
        for talk in talks:
            full = (len(talk.tokens) - 1) // size
            missing += full - found_below(ask(later, talk.tokens[: full * size] + [3], 1)) // size
            evict(later)
    assert missing <= engine.counts["writes_dropped"]
    assert missing == 0 or kind == "both" or host == 40, "a write that finds no place waits while memory has its block"
