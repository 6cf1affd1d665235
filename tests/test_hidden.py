"""Chapter 04: what is kept of a conversation, how rows get into chunks, and what is projected."""

import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import write_model
from support.engines import (
    Oracle,
    ask,
    check_pools,
    chunk_files,
    draw,
    evict,
    hidden,
    make,
    settle,
    steps_of,
    tiny_model,
)
from support.faults import faulty

from common.link import Transfer
from common.requests import Request
from common.restoring import Interrupted
from common.store import StoredChunks, in_directories

ORACLE = Oracle()
PROMPT = draw(random.Random(0), 150)  # two chunks and 22 tokens


def engine_for(chunks: int = 64, blocks: int = 64, storage=None, bandwidth=2e9, **options):
    engine = make(cache := hidden.HiddenCache(chunks, bandwidth, storage), blocks, **options)
    return engine, cache


def found(engine, tokens) -> int:
    """How many of these tokens could come back."""
    settle(engine)
    request = Request(list(tokens) + [1], 1)
    match = engine.cache.match(request)
    return match.tokens if match else 0


# 1. Keeping ------------------------------------------------------------------------------------


def test_the_unfinished_chunk_is_found_and_the_next_turn_fills_it():
    engine, cache = engine_for()
    talk, used = list(PROMPT), []
    for turn in range(4):
        request = ask(engine, talk, 7)
        assert ORACLE.judge(request) == "equal"
        assert request.found.get("cpu", 0) == (0 if turn == 0 else len(talk) - 9), "all but what is new"
        talk = request.tokens + draw(random.Random(turn), 8)
        assert found(engine, request.tokens) == len(request.tokens) - 1, "the last token was not computed"
        used.append(cache.store.pool.size - cache.store.pool.free.count(1))
        evict(engine)
    assert used == [3, 3, 3, 4], "what the turn before has begun is not kept twice"


def test_rows_that_are_computed_again_are_kept_once():
    """The device has the first turn up to row 144, the chunk up to 150, and computing is the faster."""
    engine, _ = engine_for(always_restore=False)
    ask(engine, PROMPT, 1)
    settle(engine)
    engine.restorer.rates.extend([1e18] * 8)
    request = ask(engine, PROMPT + draw(random.Random(1), 20), 1)
    engine.restorer.always = True
    assert request.found == {"gpu": 144} and found(engine, request.tokens) == len(request.tokens) - 1
    evict(engine)
    again = ask(engine, request.tokens, 8)
    assert again.found == {"cpu": len(request.tokens) - 1} and ORACLE.judge(again) == "equal"


def test_those_that_go_on_from_one_tail_fill_a_copy_each():
    engine, cache = engine_for()
    ask(engine, PROMPT, 1)
    settle(engine)
    asked = [Request(PROMPT + draw(random.Random(seed), 60), 8) for seed in (1, 2, 3)]
    engine.generate(asked)
    for request in asked:
        assert found(engine, request.tokens) == len(request.tokens) - 1
        evict(engine)
        again = ask(engine, request.tokens + [5], 8)
        assert again.found["cpu"] >= len(request.tokens) - 1 and ORACLE.judge(again) == "equal"
    assert found(engine, PROMPT) == 150
    check_pools(engine)


def test_a_chunk_is_not_evicted_before_it_is_copied():
    """Another thread might fill it sooner than this one has copied it."""
    engine, _ = engine_for(chunks=2)
    ask(engine, PROMPT[:40], 1)
    evict(engine)
    request = ask(engine, PROMPT[:20] + draw(random.Random(1), 60), 4)  # its rows leave at the end
    assert request.found == {"cpu": 20} and found(engine, request.tokens) == 64, "there was no room for more"
    assert found(engine, PROMPT[:40]) == 40
    check_pools(engine)


def test_what_differs_inside_a_chunk_is_found_as_far_as_it_is_equal():
    engine, _ = engine_for()
    ask(engine, PROMPT, 1)
    assert found(engine, PROMPT[:100] + draw(random.Random(4), 50)) == 100
    assert found(engine, PROMPT[:64]) == 64 and found(engine, PROMPT[:63]) == 63
    assert found(engine, draw(random.Random(5), 50)) == 0


def test_without_room_in_the_snapshot_buffer_rows_are_dropped_and_nobody_waits(monkeypatch):
    monkeypatch.setattr(hidden, "STEPS", 8)  # room for all, if nobody has it
    engine, cache = engine_for(token_budget=64)
    held = cache.snapshots.allocate(cache.snapshots.size)
    request = Request(PROMPT + PROMPT, 4)
    engine.submit(request)
    while request.computed < 64:
        engine.step()
    assert engine.counts["dropped_chunks"] == 1
    cache.snapshots.release(held)
    engine.generate([])
    while request.outcome is None:
        engine.step()
    assert ORACLE.judge(request) == "equal" and found(engine, request.tokens) == 0, "nor is what is behind"
    assert engine.counts["dropped_chunks"] == 1
    evict(engine)
    assert ask(engine, PROMPT + PROMPT, 1).outcome.source == "miss"
    assert found(engine, PROMPT + PROMPT) == 300, "until it is computed again"


def test_rows_behind_a_copy_that_failed_are_not_found():
    engine, _ = engine_for(token_budget=64)
    with faulty(random.Random(1), failing=1.0, lanes=("save",)):
        ask(engine, PROMPT, 1)
        settle(engine)
    assert found(engine, PROMPT) == 0
    evict(engine)
    ask(engine, PROMPT, 1)
    assert found(engine, PROMPT) == 150
    check_pools(engine)


def test_a_chunk_that_lost_rows_is_nobodys_to_fill():
    """The turn before has failed to save, and this one has begun to fill its chunk."""
    engine, cache = engine_for(64)
    ask(engine, PROMPT, 1)
    settle(engine)
    with faulty(random.Random(1), late=1.0, delay=0.3, lanes=("save",)) as faults:
        faults.broken["save"] = 1  # fails, later
        ask(engine, PROMPT + draw(random.Random(6), 20), 1)
        other = ask(engine, PROMPT + draw(random.Random(7), 20), 30)
    evict(engine)
    again = ask(engine, other.tokens, 8)
    assert ORACLE.judge(again) == "equal"
    settle(engine)
    check_pools(engine)


@pytest.mark.parametrize("length", [50, 150])
def test_a_chunk_that_lost_rows_is_kept_again_when_they_are_computed_again(length):
    engine, cache = engine_for(token_budget=32)
    request = Request(PROMPT[:length], 1)
    engine.submit(request)
    while request.computed < 32:
        engine.step()
    while any(cache.under_way.values()):
        cache.poll()
    held = cache.snapshots.allocate(cache.snapshots.size)
    while request.outcome is None and request.computed < 64:
        engine.step()
    cache.snapshots.release(held)
    while request.outcome is None:
        engine.step()
    assert found(engine, PROMPT) == 32, "what followed in the chunk was dropped"
    evict(engine)
    ask(engine, PROMPT[:length], 1)
    assert found(engine, PROMPT) == length
    evict(engine)
    assert ORACLE.judge(ask(engine, PROMPT, 8)) == "equal"
    settle(engine)
    check_pools(engine)


def test_rows_that_have_not_arrived_are_not_copied_to_another_chunk():
    """The device has more of a chunk than the host, since the copy of the second turn is late and fails."""
    engine, cache = engine_for()
    ask(engine, PROMPT[:22], 1)
    settle(engine)
    with faulty(random.Random(1), late=1.0, delay=0.3, lanes=("save",)) as faults:
        faults.broken["save"] = 1
        ask(engine, PROMPT[:50], 1)
        other = ask(engine, PROMPT[:48] + draw(random.Random(7), 40), 1)
        assert other.found == {"gpu": 48}
    settle(engine)
    evict(engine)
    assert ORACLE.judge(ask(engine, other.tokens, 8)) == "equal"
    settle(engine)
    check_pools(engine)


def test_nothing_is_kept_behind_rows_that_only_the_device_has():
    engine, _ = engine_for()
    with faulty(random.Random(1), failing=1.0, lanes=("save",)):
        ask(engine, PROMPT[:48], 1)
        settle(engine)
    other = ask(engine, PROMPT[:48] + draw(random.Random(7), 40), 1)
    assert other.found == {"gpu": 48} and found(engine, other.tokens) == 0


def test_a_full_host_evicts_the_end_of_others_and_never_its_own_beginning():
    engine, cache = engine_for(chunks=4, token_budget=64)
    first, second = draw(random.Random(1), 190), draw(random.Random(2), 400)
    ask(engine, first, 1)
    settle(engine)
    evict(engine)
    ask(engine, second, 1)
    assert found(engine, second) == 256 and found(engine, first) == 0
    evict(engine)
    assert ask(engine, second, 1).found == {"cpu": 256}
    settle(engine)
    check_pools(engine)


def test_what_was_used_last_is_evicted_last():
    engine, _ = engine_for(chunks=6)
    other = draw(random.Random(3), 150)
    for prompt in (PROMPT, other, PROMPT, draw(random.Random(4), 150)):  # the third is on the device
        ask(engine, prompt, 1)
        settle(engine)
    assert found(engine, PROMPT) == 150 and found(engine, other) == 0


# 2. Bringing back ------------------------------------------------------------------------------


def test_what_is_projected_is_what_the_forward_pass_computed():
    engine, cache = engine_for(block_size=4)
    first = ask(engine, PROMPT, 1)
    before = [engine.pool.memory[:, :, block].clone() for block in engine.pool.find(first.chain)]
    evict(engine)
    again = ask(engine, PROMPT + [3], 1)
    after = [engine.pool.memory[:, :, block] for block in engine.pool.find(again.chain)]
    assert again.found == {"cpu": 150} and len(before) <= len(after)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after))


def test_the_next_layers_travel_while_one_is_projected():
    engine, cache = engine_for()
    ask(engine, PROMPT, 1)
    evict(engine)
    order, copy, project = [], cache.load_link.copy, cache.project
    cache.load_link.copy = lambda dst, src, label: order.append(label) or copy(dst, src, label)
    cache.project = lambda layer, *rest: order.append(f"project {layer}") or project(layer, *rest)
    ask(engine, PROMPT + [3], 1)
    assert order == ["layer 1", "layer 2", "project 0", "project 1", "project 2"]


def test_only_so_many_layers_are_ordered_ahead(monkeypatch):
    monkeypatch.setattr(hidden, "DEPTH", 1)
    engine, cache = engine_for()
    ask(engine, PROMPT, 1)
    evict(engine)
    order, copy, project = [], cache.load_link.copy, cache.project
    cache.load_link.copy = lambda dst, src, label: order.append(label) or copy(dst, src, label)
    cache.project = lambda layer, *rest: order.append(f"project {layer}") or project(layer, *rest)
    assert ORACLE.judge(ask(engine, PROMPT + [3], 1)) == "equal"
    assert order == ["layer 1", "project 0", "project 1", "layer 2", "project 2"]


def test_what_a_copy_writes_lives_until_the_copy_is_over():
    """As with CUDA, where a copy does not hold it."""
    engine, cache = engine_for()
    ask(engine, PROMPT, 1)
    evict(engine)
    written, transfers = [], []

    def copy(dst, src, label):
        written.append(weakref.ref(dst[0].untyped_storage()))
        transfers.append(Transfer("load", label))
        return transfers[-1]

    cache.load_link.copy, request = copy, Request(PROMPT + [3], 1)
    engine.extend(request)
    request.table, match = engine.pool.allocate(10), cache.match(request)
    restoration = type("", (), dict(start=0, end=match.tokens, layers=0))
    steps = cache.restore(request, restoration, match)
    assert next(steps) is transfers[0] and len(transfers) == 2
    steps.close()  # it was given up
    gc.collect()
    assert all(storage() is not None for storage in written)
    for transfer in transfers:
        transfer.finish(0.0, 0.0)
    cache.poll()
    gc.collect()
    assert not any(storage() for storage in written) and not any(cache.store.pool.references)


def test_estimates_are_the_slower_of_link_and_processor_and_are_learned():
    engine, cache = engine_for(bandwidth=1e8, always_restore=False)
    ask(engine, PROMPT, 1)
    settle(engine)
    cache.rates.clear()
    cache.rates.append(0.0)
    match = cache.match(Request(PROMPT + [3], 1))
    assert match.seconds == pytest.approx(3 * cache.store.chunk_bytes / 1e8, rel=0.1)
    cache.rates[0] = 1.0  # seconds to project a row
    assert cache.match(Request(PROMPT + [3], 1)).seconds >= 3 * 150
    cache.spans += [(Request(PROMPT, 1), rows, "layer 1", 1.0, 41.0) for rows in (200, 10)]
    assert cache.seconds_to_project(10) == 6.0 and list(cache.rates) == [1.0, 0.2], "the median, of many rows"


def test_whoever_comes_ends_a_measurement():
    engine, cache = engine_for()
    before = list(cache.rates)
    engine.submit(Request(PROMPT, 1))
    with pytest.raises(Interrupted):
        cache.idle()
    assert list(cache.rates) == before and engine.pool.available == engine.pool.size


def test_grouped_queries_are_said_at_the_start(tmp_path):
    folder = write_model(tmp_path / "grouped", num_key_value_heads=1)
    command = [sys.executable, "04_hidden_state_cache.py", "--model", str(folder), "--link", "1"]
    command += ["--prompt", "a", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "chapter 03 is the better choice" in done.stderr


# 3. Files --------------------------------------------------------------------------------------


def folders(storage: StoredChunks) -> list[Path]:
    return [Path(each.backend.folder) for each in storage.storages]


def again(storage: StoredChunks) -> StoredChunks:
    """The same directories, as another process finds them."""
    return in_directories(folders(storage), 0.1)


def restart(storage: StoredChunks, chunks: int = 64, model=None, **options):
    return engine_for(chunks, storage=again(storage), model=model or tiny_model(), **options)[0]


def saved(prompt=PROMPT, storage=None) -> StoredChunks:
    """-> storage that holds the full chunks of a prompt."""
    storage = storage or chunk_files()
    engine, _ = engine_for(storage=storage)
    ask(engine, prompt, 1)
    settle(engine)
    engine.close()
    return storage


def test_full_chunks_survive_the_process():
    engine = restart(saved())
    request = ask(engine, PROMPT + [3])
    assert request.found == {"disk": 128} and ORACLE.judge(request) == "equal"
    settle(engine)
    assert engine.counts["restored_tokens"] == 128
    evict(engine)
    assert ask(engine, PROMPT + [3]).found == {"cpu": 150}, "what was read is in host memory now"
    settle(engine)
    check_pools(engine)


def test_a_chunk_is_held_while_it_is_written():
    engine, written = engine_for(storage=chunk_files())[0], []
    engine.cache.storage.write = lambda *_: written.append(Transfer("save", "chunk", 1)) or written[-1]
    ask(engine, PROMPT, 1)
    while len(written) < 2:
        engine.cache.poll()
    assert sum(engine.cache.store.pool.references) >= 2
    for transfer in written:
        transfer.finish(0.0, 0.1)
    settle(engine)
    check_pools(engine)


def test_reading_is_part_of_the_estimate():
    engine = restart(saved())
    engine.cache.storage.storages[0].speeds.append(1e3)  # bytes/s
    match = engine.cache.match(Request(PROMPT + [3], 1))
    assert match.seconds >= 2 * engine.cache.store.chunk_bytes / 1e3


def test_what_is_on_its_way_to_a_file_when_the_engine_is_closed_gets_there():
    engine, cache = engine_for(storage=chunk_files())
    ask(engine, PROMPT, 1)
    engine.close()
    assert found(restart(cache.storage), PROMPT) == 128


def test_a_chunk_that_was_begun_between_two_restorations_is_let_go():
    """As where only some of the chunks find room: part is computed, and then more comes back."""
    engine = restart(saved(PROMPT * 2), token_budget=16)
    match, offered = engine.cache.match, []

    def first_chunk_first(request):
        offered.append(match(request))
        if len(offered) == 1:
            offered[0] = replace(offered[0], tokens=64, blocks=offered[0].blocks[:1])
        return offered[-1]

    engine.cache.match = first_chunk_first
    request = ask(engine, PROMPT * 2 + [3], 8)
    assert request.found == {"disk": 64 + 176} and ORACLE.judge(request) == "equal", "16 were computed"
    engine.cache.match = match
    assert found(engine, request.tokens) == len(request.tokens) - 1
    check_pools(engine)
    evict(engine)
    assert ORACLE.judge(ask(engine, request.tokens, 8)) == "equal"


def test_another_model_dtype_or_salt_never_matches():
    storage = saved()
    assert restart(storage, model=tiny_model(1)).cache.match(Request(PROMPT, 1)) is None
    assert restart(storage).cache.match(Request(PROMPT, 1, options=dict(cache_salt="b"))) is None
    assert restart(storage).cache.match(Request(PROMPT, 1)).tokens == 128


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "renamed", "gone"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_file_is_computed_again_and_not_asked_for_twice(part, damage):
    storage = saved()
    engine = restart(storage)
    stored, other = engine.cache.match(Request(PROMPT, 1)).blocks
    path, wrong = (folders(storage)[0] / f"{each.keys[part].hex()}.page" for each in (stored, other))
    good = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = good[:999] + bytes([good[999] ^ 1]) + good[1000:]
        kinds = dict(truncated=good[:99], flipped=flipped, empty=b"", foreign=b"something" * 9999)
        path.write_bytes(kinds.get(damage, wrong.read_bytes()))
    request = ask(engine, PROMPT + [3])
    assert ORACLE.judge(request) == "equal" and "computed" in request.decisions[-1]
    settle(engine)
    assert path.read_bytes() == good, "what was computed again replaces it"
    check_pools(engine)
    evict(engine)
    engine.evict("host")
    request = ask(engine, PROMPT + [3])
    assert request.found == {"disk": 128} and ORACLE.judge(request) == "equal"


def test_a_chunk_of_which_a_part_is_not_there_is_not_offered():
    storage = saved()
    path = min(folders(storage)[0].iterdir())
    path.unlink()
    assert found(restart(storage), PROMPT) in (0, 64)


def test_what_is_there_is_projected_before_a_later_layer_is_waited_for():
    said = steps_of(restart(saved()), PROMPT + [3])
    assert said == ["project 0", "part 0", "layer 1", "project 1", "part 1", "layer 2", "project 2"]


@pytest.mark.parametrize("chunks, tokens", [(0, 0), (1, 64), (2, 128)])
def test_what_is_stored_needs_a_place_each_in_host_memory(chunks, tokens):
    engine = restart(saved(), chunks)
    assert found(engine, PROMPT) == tokens
    assert ORACLE.judge(ask(engine, PROMPT)) == "equal"


def test_chunks_go_round_the_directories_and_each_is_read_on_its_own(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    storage = saved(draw(random.Random(3), 400), in_directories(paths, 0.1))
    assert [len(list(path.iterdir())) for path in paths] == [2 * 2] * 3, "two chunks of two parts"
    engine = restart(storage)
    reads = engine.cache.store.bring(*[request := Request(draw(random.Random(3), 400), 1), 0,
                                       engine.cache.match(request).blocks])[1]  # fmt: skip
    assert [len(read) for read in reads] == [3, 3], "a transfer for each part and directory"


def test_least_recently_used_chunks_go_when_the_limit_is_reached():
    prompts = [draw(random.Random(seed), 140) for seed in range(4)]
    size = sum(path.stat().st_size for path in folders(saved())[0].iterdir()) / 2  # of a chunk
    storage = chunk_files(limit_gb=5.5 * size / 1e9)
    engine, _ = engine_for(storage=storage)
    for prompt in prompts[:3]:
        ask(engine, prompt, 1)
        settle(engine)
    kept = [found(restart(storage), prompt) for prompt in prompts[:3]]
    assert kept[2] == 128 and sum(kept) <= 5 * 64 and kept[0] < 128
    evict(engine)
    engine.evict("host")
    assert [found(engine, prompt) for prompt in prompts[:3]] == kept, "what was deleted is not offered"
    assert ask(engine, prompts[1] + [3]).found == {"disk": 128}
    settle(engine)
    ask(engine, prompts[3], 1)
    settle(engine)
    assert found(restart(storage), prompts[1]) == 128, "what was read was used"
    assert sum(path.stat().st_size for path in folders(storage)[0].iterdir()) <= 5.5 * size


@pytest.mark.parametrize("fault", ["vanished", "full", "behind", "hanging"])
def test_storage_that_fails_costs_what_it_would_have_kept_and_no_more(fault, monkeypatch):
    storage = saved()
    engine = restart(storage, chunks=64)
    (inner,) = engine.cache.storage.storages
    if fault == "vanished":
        shutil.rmtree(folders(storage)[0])
    elif fault == "full":
        monkeypatch.setattr(os, "replace", lambda *_: os.stat("/no such file"))  # which raises OSError
    elif fault == "behind":
        monkeypatch.setattr("common.store.BACKLOG", 0)
    else:
        release, begun = threading.Event(), threading.Barrier(3)
        for lane in (inner.reader, inner.writer):
            lane.submit("hang", 0, lambda: (begun.wait(), release.wait()))
        begun.wait()
        time.sleep(0.02)
        monkeypatch.setattr("common.link.HANGING", 0.01)
    for prompt in (PROMPT + [3], draw(random.Random(8), 200)):
        request = ask(engine, prompt)
        assert ORACLE.judge(request) == "equal"
    if fault == "hanging":
        settle(engine)  # nothing of ours waits there
        assert not inner.writer.jobs.qsize()
        release.set()
    settle(engine)
    assert not list(folders(storage)[0].glob("*.tmp"))
    check_pools(engine)


def test_two_processes_may_share_a_directory():
    storage = saved()
    one, other = restart(storage), restart(storage)
    for engine in (one, other, one):
        assert ORACLE.judge(ask(engine, PROMPT + [3])) == "equal"
        ask(engine, draw(random.Random(9), 200), 1)
        evict(engine)
    assert found(restart(storage), draw(random.Random(9), 200)) == 192


KILLED = """
import random, sys
sys.path[:0] = [".", "tests"]
from pathlib import Path
from support.engines import ask, chunk_files, draw, hidden, make
engine = make(hidden.HiddenCache(64, 2e9, chunk_files(Path(sys.argv[1]))))
print("ready", flush=True)
rng = random.Random(int(sys.argv[2]))
while True:
    ask(engine, draw(rng, 200), 1)
"""


def test_whoever_is_killed_while_saving_leaves_whole_chunks(tmp_path):
    for round in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(round)], stdout=-1)
        process.stdout.readline()
        time.sleep(0.05 + 0.03 * round)
        process.kill()
        process.wait()
        rng, engine = random.Random(round), engine_for(storage=chunk_files(tmp_path))[0]
        for _ in range(3):
            assert ORACLE.judge(ask(engine, draw(rng, 200), 2)) == "equal"
        settle(engine)
        assert not engine.cache.storage.storages[0].errors
