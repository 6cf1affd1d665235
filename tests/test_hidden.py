"""Chapter 04: which hidden states are saved, how rows get into blocks, and how they are projected."""

import random
import threading
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import DEFAULT, Mock

import numpy
import pytest
import torch

from common import link as links
from common.link import Transfer
from common.requests import ClientDisconnected, Request
from common.store import Storage
from shell import chunks, cli
from shell.backends import in_directories
from shell.chunks import StoredChunks
from tests.support import engines
from tests.support.bits import exact_model, kept_logits, watch
from tests.support.engines import ORACLE, ask, ask_and_evict, check_pools, draw, evict, wait_until_idle
from tests.support.faults import Shelf, faulty
from tests.support.serving import eventually

hidden_states = engines.hidden_states
PROMPT = draw(random.Random(0), 150)  # nine blocks and 6 tokens


def engine_for(host: int = 256, storage=None, bandwidth=2e9, **options):
    engine = engines.make(cache := hidden_states.HiddenCache(host, bandwidth, storage), 64, **options)
    return engine, cache


def found(engine, tokens) -> int:
    """Return how many of these tokens could be restored."""
    wait_until_idle(engine)
    match = engine.lower_tier.cache.match(asked(engine, list(tokens) + [1]))
    return match.tokens if match else 0


def asked(engine, tokens) -> Request:
    """Return a queued request."""
    request = Request(list(tokens), 1)
    engine.block_keys.extend(request.chain, request.tokens, request.salt)
    return request


# 1. Keeping ------------------------------------------------------------------------------------

def test_rows_of_full_blocks_are_saved_once():
    engine, cache = engine_for(always_restore=False)
    ask_and_evict(engine, PROMPT, 1)
    moved = engine.counts["bytes_out"]
    assert len(cache.store.pool.cached) == 9, "rows after the last full block are not kept"
    engine.lower_tier.estimates.computing.record(1e18, 1.0)
    assert ask(engine, PROMPT + [3], 1).source == "miss"
    check_pools(engine)
    assert engine.counts["bytes_out"] == moved > 0, "rows that are computed again are not saved again"


def test_a_full_snapshot_buffer_drops_rows_and_no_step_waits_for_a_save(monkeypatch):
    engine, cache = engine_for(token_budget=64)  # so the buffer has 256 rows
    prompt, may_sort, waited = draw(random.Random(4), 400), threading.Event(), []
    wait, scatter = Transfer.wait, cache.scatter

    def record_wait(transfer, *given):
        if threading.current_thread() is threading.main_thread():
            waited.append(transfer.label)
            may_sort.set()
            copies.arrive()
        return wait(transfer, *given)

    monkeypatch.setattr(Transfer, "wait", record_wait)
    cache.scatter = lambda *given: may_sort.wait() and scatter(*given)
    with faulty(random.Random(1), late=1.0, delay=3600.0, lanes=("save",)) as copies:
        engines.submit(engine, request := Request(prompt, 4), steps=5)
        late, drops = list(waited), engine.counts["drops"]
        copies.arrive()
        cache.poll()
        early, held = dict(cache.store.pool.block_of), sum(map(bool, cache.store.pool.references))
        may_sort.set()  # release the thread before any assertion
        engines.until_over(engine, request)
    assert not late, "a step does not wait for a save"
    assert held == 16 and not early, "blocks are referenced, and not found, until the thread has written their rows"
    assert drops == 1, "the buffer's rows are reused only after the thread has written them to blocks"
    assert ORACLE.judge(request) == "equal" and found(engine, prompt) == 256, "rows after the dropped ones are not found, either"
    evict(engine)
    assert ask(engine, prompt, 1).found == {"cpu": 256}
    for each in prompt, *(draw(random.Random(seed), 100) for seed in range(5, 9)):
        ask(engine, each, 1)
        assert found(engine, each) == len(each) // 16 * 16, "dropped rows are saved later, and the buffer is a ring"
    assert not engines.wrong_rows(engine), "each row is in its slot, in each layer"
    check_pools(engine)


def test_a_full_host_evicts_other_prompts_and_keeps_the_head_of_this_one():
    engine, cache = engine_for(host=16, token_budget=64)
    first, second = draw(random.Random(1), 190), draw(random.Random(2), 400)
    ask_and_evict(engine, first, 1)
    ask(engine, second, 1)
    assert found(engine, second) == 256 and found(engine, first) == 0
    evict(engine)
    assert ask(engine, second, 1).found == {"cpu": 256}
    check_pools(engine)


# 2. Bringing back ------------------------------------------------------------------------------

ORDER = ["layer 1", "layer 2", "project 0", "project 1", "project 2"]


@pytest.mark.parametrize("depth, expected", [(8, ORDER), (1, [ORDER[0], *ORDER[2:4], ORDER[1], ORDER[4]])])
def test_copies_run_at_most_depth_layers_ahead(depth, expected, monkeypatch):
    monkeypatch.setattr(hidden_states, "DEPTH", depth)
    engine, cache = engine_for()
    ask_and_evict(engine, PROMPT, 1)
    order, copy, project = [], cache.load_link.copy, cache.project
    cache.load_link.copy = lambda *what: order.append(what[2]) or copy(*what)
    cache.project = lambda layer, *rest: order.append(f"project {layer}") or project(layer, *rest)
    assert ORACLE.judge(ask(engine, PROMPT + [3], 1)) == "equal"
    assert order == expected


@pytest.mark.parametrize("cache", ["host", "hidden"])
def test_a_cancelled_restoration_cancels_its_copies_and_references_their_blocks(cache):
    engine = engines.make(cache, 64)
    chain = ask_and_evict(engine, PROMPT, 1).chain
    engines.submit(engine, Request(draw(random.Random(5), 20), 40), steps=1)
    with faulty(random.Random(1), late=1.0, delay=3600.0, lanes=("load",)) as copies:
        engines.submit(engine, back := Request(PROMPT + [3], 1), steps=1)
        engine.cancel(back, ClientDisconnected("gone"))
        engine.step()
        host, cancelled = engine.pools["host"], [transfer.cancelled for transfer, *_ in copies.copies]
        references = [host.references[block] for block in host.find(chain)]
        copies.arrive()  # before any assertion
    assert copies.delayed and all(cancelled) and len(references) == 9 and all(references)
    check_pools(engine)


def test_an_estimate_is_the_slower_of_link_and_processor_and_is_learned():
    engine, cache = engine_for(bandwidth=1e8, always_restore=False)
    ask(engine, PROMPT, 1)
    wait_until_idle(engine)
    cache.projecting.samples.clear()
    cache.projecting.record(1e18, 1.0)  # rows per second
    match = cache.match(asked(engine, PROMPT + [3]))
    assert match.seconds == pytest.approx(9 * cache.store.pool.block_bytes / 1e8, rel=0.1)
    cache.projecting.samples.clear()
    cache.projecting.record(1.0, 1.0)
    assert cache.match(asked(engine, PROMPT + [3])).seconds >= 3 * 144
    cache.spans += [(Request(PROMPT, 1), rows, "layer 1", 1.0, 41.0) for rows in (200, 10)]
    assert cache.seconds_to_project(10) == 2.0 and len(cache.projecting.samples) == 2, "the speed is that of the fastest projection of many rows"


@pytest.mark.parametrize("heads", [1, 4])
def test_a_model_with_grouped_queries_is_warned_about(heads, capsys):
    parser = cli.parser_for("")
    hidden_states.add_arguments(parser)
    hidden_states.make_engine(engines.tiny_model(0, heads), parser.parse_args(["--link=1", "--gpu-blocks=8"])).close()
    assert ("chapter 03 is the better choice" in capsys.readouterr().err) == (heads == 1)


# 3. Files --------------------------------------------------------------------------------------

def restart(storage: StoredChunks, host: int = 256, **options):
    """Return a new engine with the same directories, like one in another process."""
    folders = [each.backend.folder for each in storage.storages]
    return engine_for(host, storage=in_directories(folders, 0.1), **options)[0]


def saved(prompt=PROMPT, storage=None) -> StoredChunks:
    """Return storage that holds the full blocks of a prompt."""
    engine, cache = engine_for(storage=storage or engines.chunk_files())
    ask_and_evict(engine, prompt, 1)
    engine.close()
    return cache.storage


@pytest.mark.parametrize("kind", [hidden_states.HiddenCache, engines.planned.PlannedCache])
def test_each_tier_counts_its_own_tokens_and_a_read_puts_blocks_in_host_memory(kind, tmp_path):
    make = lambda: engines.make(kind(256, 2e9, engines.chunk_files(tmp_path)), 64)  # noqa: E731
    engine = make()
    cache, chain = engine.lower_tier.cache, ask_and_evict(engine, PROMPT, 1).chain
    pool = cache.store.pool
    pool.evict([pool.block_of[block_key] for block_key in chain[2:4]])
    partly = asked(engine, PROMPT + [3])
    partly.computed = 37  # inside a block that is in files
    assert cache.match(partly).found == {"cpu": 80, "disk": 27}
    request = ask(engine, PROMPT + [3])
    assert request.found == {"cpu": 112, "disk": 32} and request.source == "mixed"
    engine.close()
    engine = make()  # as after a restart
    for tier in "disk", "cpu":
        request = ask_and_evict(engine, PROMPT + [3])
        assert request.found == {tier: 144} and ORACLE.judge(request) == "equal"
    assert engine.counts["restored_tokens"] == 2 * 144
    check_pools(engine)


def test_a_block_is_referenced_while_it_is_written():
    engine, written = engine_for(storage=engines.chunk_files())[0], []
    engine.lower_tier.cache.storage.write = lambda *_: written.append(Transfer("save", "chunk", 1)) or written[-1]
    ask(engine, PROMPT, 1)
    eventually(lambda: len(written) == 9 or engine.lower_tier.cache.poll())
    assert sum(engine.lower_tier.cache.store.pool.references) >= 9
    for transfer in written:
        transfer.finish(0.0, 0.1)
    check_pools(engine)
    engine.lower_tier.cache.poll()
    assert not engine.lower_tier.cache.in_flight, "empty lanes are removed"


@pytest.mark.parametrize("kind", [hidden_states.HiddenCache, partial(engines.planned.PlannedCache, plan="RRHHHKKKK")])
@pytest.mark.parametrize("blocks, budget", [(6, 512), (6, 64), (4, 64), (0, 64)])
def test_a_text_longer_than_host_memory_comes_back_with_the_same_bits(kind, blocks, budget, tmp_path, monkeypatch):
    """The text has 28 blocks. Host memory has at most a quarter of them, and so has the memory of a restoration."""
    model, counts, prompt, live = exact_model(torch.float32, depth=9), Counter(), draw(random.Random(1), 455), [0]

    def allocate(*given):
        memory = links.host_memory(*given)
        live.append(live[-1] + memory.nbytes)
        weakref.finalize(memory.untyped_storage(), lambda size=memory.nbytes: live.append(live[-1] - size))
        return memory

    monkeypatch.setattr(chunks, "host_memory", allocate)
    for restarted in False, True:
        engine = watch(engines.make(cache := kind(blocks, 2e9, engines.chunk_files(tmp_path)), 64, model=model, token_budget=budget), counts)
        pool = cache.store.pool
        assert pool.size <= 7
        for again in False, True:
            in_host = 16 * len(pool.block_of)
            with kept_logits():
                request = ask(engine, prompt, 8)
            found = dict(cpu=in_host, disk=448 - in_host) if pool.size and (again or restarted) else {}
            assert request.found == {tier: tokens for tier, tokens in found.items() if tokens}
            evict(engine)
        assert engine.counts["drops"] == 2 * (not pool.size)
        engine.close()
        assert not engine.counts["writes_dropped"]
    assert counts["compared"] > 10_000 and not counts["different"]
    assert max(live) <= max(pool.size * pool.block_bytes, 4 * 28 * 16 * 64 * 4) and live[-1] == 0, "two layers at least"


@pytest.mark.parametrize("speeds, read, runs", [
    ([], 1 << 19, 4), ([1e6], 1 << 19, 4), ([1e6], 4200, 8), ([6e7], 4200, 2), ([1e12], 4200, 1), ([1e12, 6e7], 4200, 2)])  # fmt: skip
def test_a_block_is_read_in_fewer_runs_from_faster_storage(speeds, read, runs, tmp_path, monkeypatch):
    """`speeds`: bytes a second of the latest reads of each directory. `read`: bytes that one may bring if storage is slow. The rows of
    a block have 33 KB."""
    monkeypatch.setattr(chunks, "READ", read)
    model = engines.plain_model(depth=9)  # layers 1 to 8 have rows
    for _ in range(2):  # saved, then read after a restart
        storage = in_directories([tmp_path / str(at) for at in range(max(1, len(speeds)))], 0.1)
        engine = engines.make(hidden_states.HiddenCache(64, 2e9, storage), 64, model=model)
        for each, speed in zip(storage.storages, speeds):
            each.measured.record(speed, 1.0)
        request = ask_and_evict(engine, PROMPT + [3])
        reads = engine.counts["storage_reads"]
        engine.close()
    assert request.found == {"disk": 144} and reads == 9 * runs and engines.Oracle(model).judge(request) == "equal"


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_text_longer_than_host_memory_does_not_wait_for_storage_that_fails(fault, monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.05)
    storage, prompt = StoredChunks(Storage(shelf := Shelf())), draw(random.Random(1), 400)
    engine, cache = engine_for(6, storage)
    with shelf.broken("set", fault):
        assert ORACLE.judge(ask(engine, prompt)) == "equal" and engine.counts["drops"] == 1
    check_pools(engine)
    assert ORACLE.judge(ask_and_evict(engine, prompt)) == "equal"


def test_blocks_are_spread_over_directories_except_a_backlogged_one(tmp_path, monkeypatch):
    paths, prompt = [tmp_path / name for name in "abc"], draw(random.Random(3), 400)
    engine = restart(saved(prompt, in_directories(paths, 0.1)))
    assert [len(list(path.iterdir())) for path in paths] == [9, 8, 8], "25 blocks"
    assert ask(engine, prompt, 1).found == {"disk": 384}
    storage, value = engine.lower_tier.cache.storage, numpy.zeros(8, "u1")
    first, *_ = storage.storages
    monkeypatch.setattr(Storage, "is_backlogged", property(lambda storage: storage is first))
    assert all(storage.write(bytes([number]) * 32, value) for number in range(4))
    monkeypatch.undo()
    monkeypatch.setattr("common.store.BACKLOG", 0)
    assert not storage.write(bytes([9]) * 32, value), "a write is refused if all directories are backlogged"


@pytest.mark.parametrize("copying", ["rows_to_keep", "step_states"])
def test_a_step_that_cannot_be_snapshotted_is_dropped_with_all_later_ones(monkeypatch, copying):
    engine, cache = engine_for(token_budget=32)
    does = getattr(cache, copying)
    monkeypatch.setattr(cache, copying, Mock(wraps=does, side_effect=[DEFAULT, DEFAULT, RuntimeError("out of memory"), *[DEFAULT] * 99]))
    monkeypatch.setattr(hidden_states, "SNAPSHOT", 1)  # copy out after each step
    request = ask(engine, PROMPT)
    check_pools(engine)
    assert ORACLE.judge(request) == "equal" and engine.counts["drops"] == 1
    assert 0 < len(cache.store.pool.block_of) <= 64 // 16 and not engines.wrong_rows(engine)
    again = ask(engine, PROMPT + draw(random.Random(1), 60))  # this fills blocks after the gap
    wait_until_idle(engine)
    assert len(cache.store.pool.block_of) <= 64 // 16 and ORACLE.judge(again) == "equal"


@pytest.mark.parametrize("budget, computed", [(16, 16), (5, 5)])
def test_a_block_begun_between_two_restorations_is_released(budget, computed):
    """If only some blocks find room, a part of the prompt is computed, and then more blocks are restored."""
    engine = restart(saved(PROMPT * 2), token_budget=budget)
    match, offered = engine.lower_tier.cache.match, []

    def first_blocks_first(request):
        offered.append(match(request))
        if len(offered) == 1:
            offered[0] = replace(offered[0], tokens=64, blocks=offered[0].blocks[:4], found={"disk": 64})
        return offered[-1]

    engine.lower_tier.cache.match = first_blocks_first
    request = ask(engine, PROMPT * 2 + [3], 8)
    assert request.found == {"disk": 288 - computed} and ORACLE.judge(request) == "equal"
    engine.lower_tier.cache.match = match
    assert found(engine, request.tokens[:-1]) == 304
    check_pools(engine)
    evict(engine)
    assert ORACLE.judge(ask(engine, request.tokens, 8)) == "equal"


def test_a_block_whose_first_half_failed_is_not_found():
    engine, cache = engine_for(token_budget=8)
    with faulty(random.Random(1), late=1.0, delay=0.1, lanes=("save",)) as faults:
        faults.broken["save"] = 1  # the copy of the first block's first half fails
        ask(engine, PROMPT[:40], 1)
        wait_until_idle(engine)
    assert found(engine, PROMPT[:40]) == 0 and engine.counts["drops"] == 1
    assert not cache.store.pool.block_of, "later blocks are not found, either"
    evict(engine)
    again = ask(engine, PROMPT[:40], 8)
    assert ORACLE.judge(again) == "equal" and again.source == "miss"
    assert found(engine, PROMPT[:40]) == 32, "blocks are saved when they are computed again"
    check_pools(engine)
