"""Chapter 09 and shell/ranks.py.

Scenarios with several ranks are in support/ranks.py and run in processes of their own."""

import importlib
import json
import os
import random
import signal
import socket
import subprocess
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import write_model

from common import store
from common.link import Transfer, TransferError
from common.requests import Request
from shell import checkpoint, cli, limits, ranks
from tests.support import engines, forked, serving
from tests.support import ranks as rank_tests

ranked = importlib.import_module("09_tensor_parallel")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="ranks are POSIX processes here")


def passes(folder, count, *arguments):
    """Run a scenario. Each rank is a forked process, with the environment variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        there = dict(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    words, processes = ("-m", "tests.support.ranks", count, *arguments), []
    for rank in range(count):
        (own := folder / f"rank {rank}").mkdir(exist_ok=True)
        processes.append(forked.start(own, *words, RANK=str(rank), **there))
    for process in processes:
        process.join(300)
        process.kill()
    assert all(process.exitcode == 0 for process in processes), [path.read_text() for path in folder.glob("rank */std*")]


# 1. Right tokens -------------------------------------------------------------------------------

def test_all_ranks_find_the_same_stop_strings(frontend):
    submitted, places = [], []
    for rank in range(2):
        cache = SimpleNamespace(ranks=SimpleNamespace(rank=rank), commands=[])
        engine = Mock(lower_tier=Mock(cache=cache), submit=submitted.append)
        places.append(ranks.BroadcastEngine(Mock(return_value=engine), frontend.tokenizer))
    for asked in dict(prompt=[70, 71], stop="ab"), dict(prompt="Hello"):
        places[0].submit(frontend.request(**asked))
    for words in json.loads(json.dumps(places[0].cache.commands, default=id)):
        for place in places:
            place.do(*words)
    for one, other in zip(submitted[::2], submitted[1::2]):
        assert one.tokens == other.tokens and one is not other
        assert (one.writer.stop, one.writer.before) == (other.writer.stop, other.writer.before)
    assert submitted[1].writer.before == [70, 71] and not submitted[3].writer.before


@pytest.mark.parametrize("count, keep, kv_heads, scenarios", [
    (2, "kv", 2, "traffic bytes decline commands fails"), (2, "states", 4, "traffic bytes decline commands fails"),
    (2, "pages", 2, "traffic lack"), (4, "kv", 4, "fails")])  # fmt: skip
def test_ranks_give_right_answers_and_fail_a_step_together(count, keep, kv_heads, scenarios, tmp_path):
    passes(tmp_path, count, *scenarios.split(), "--keep", keep, "--kv-heads", kv_heads, "--requests", 20)


def test_another_number_of_ranks_finds_the_pages(tmp_path):
    asked = "share", "--keep", "pages", "--kv-heads", 1, "--storage", tmp_path / "pages"
    passes(tmp_path, 2, *asked)  # both ranks have the same KV head
    passes(tmp_path, 1, *asked, "--found")


# 2. The model's parts --------------------------------------------------------------------------

def sharding(rank: int, count: int):
    """Return the Sharding of one rank of `count`, without the other ranks."""
    alone = ranks.Ranks()
    alone.rank, alone.count, alone.all_true = rank, count, bool
    return ranked.Sharding(alone)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["classroom", "qwen3"])
def test_the_parts_of_all_ranks_make_up_the_model(name, count, tmp_path):
    name = name if name == "classroom" else str(write_model(tmp_path, name, num_key_value_heads=4, tie_word_embeddings=True))
    load = partial(checkpoint.load, name, device="cpu", on_host=True)  # so the weights stay
    whole, *_ = load()
    parts = [load(sharding=sharding(rank, count))[0] for rank in range(count)]
    assert {part.digest for part in parts} == {whole.digest}
    for name, tensor in checkpoint.weights(whole).items():
        pieces = [checkpoint.weights(part)[name] for part in parts]
        if pieces[0].shape == tensor.shape:
            assert all(torch.equal(piece, tensor) for piece in pieces)
        else:
            along = next(at for at in range(2) if pieces[0].shape[at] != tensor.shape[at])
            assert torch.equal(torch.cat(pieces, along), tensor), name
    heads = torch.cat([part.head.weight for part in parts])
    assert torch.equal(heads, whole.embedding)


def test_a_wrong_number_of_ranks_is_refused_in_a_sentence(monkeypatch):
    with pytest.raises(checkpoint.ModelError, match="3 ranks cannot divide 4 heads"):
        checkpoint.load("classroom", device="cpu", sharding=sharding(0, 3))
    monkeypatch.setattr(checkpoint, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(checkpoint.ModelError, match="2 ranks need as many GPUs, but there are 1"):
        ranked.load(sharding(1, 2).ranks, "classroom", "auto", "auto")


# 3. Agreement ----------------------------------------------------------------------------------

def test_a_slow_link_does_not_decide_which_blocks_are_saved():
    engine = engines.make(ranked.KVCache(ranks.Ranks(), 64, 1000.0))  # bytes/s: a save takes a minute
    engines.ask(engine, engines.draw(random.Random(0), 250), 1)
    assert engine.counts["swap_outs"] == 15
    engine.close()


@pytest.mark.parametrize("pages, left", [(20, 10), (24, 14)])  # 24 pages do not fit in host memory
def test_pages_from_storage_do_not_evict_earlier_pages_of_their_chain(pages, left):
    backend, rng, size = rank_tests.Losing(random.Random(0), 0.0), random.Random(1), 20
    prompt = engines.draw(rng, 16 * pages + 1)
    for host in 5 * size, size:  # the first engine writes all pages to storage
        cache = ranked.PageHeadCache(ranks.Ranks(), host, engines.BANDWIDTH, store.Storage(backend), range(2))
        cache.threshold = 1
        engine = engines.make(cache)
        engines.ask(engine, prompt)
        engines.evict(engine)
    chain = engine.block_keys.extend([], prompt)
    cache.host.evict([cache.host.block_of[block_key] for block_key in chain[left:size]])
    engines.ask(engine, engines.draw(rng, 16 * (size - left) + 1))  # takes the places of the evicted pages
    engines.evict(engine)
    assert engines.ask(engine, prompt).found == {"cpu": 16 * left, "storage": 16 * (size - left)}
    engines.wait_until_idle(engine)
    engine.close()


def test_a_request_asks_storage_once_if_enough_tokens_are_missing():
    backend, rng = rank_tests.Losing(random.Random(0), 0.0), random.Random(1)
    cache = ranked.PageHeadCache(ranks.Ranks(), 128, engines.BANDWIDTH, store.Storage(backend), range(2))
    engine, text = engines.make(cache), engines.draw(rng, 400)
    for known, new, asked in (400, 0, [("exists", 48)]), (240, 200, [("exists", 54)]), (0, 256, []):
        cache.storage.set([], []).wait(60)  # after the engine marked pages as used
        backend.asked.clear()
        engine.submit(request := Request(text[:known] + engines.draw(rng, new), 2))
        serving.eventually(lambda: cache.in_flight["save"] or engine.step())
        assert backend.asked == asked and request.wait_deadline == float("inf"), "only `poll` ends a wait, on all ranks"
        engines.evict(engine)
        engine.evict("host")


def test_a_page_rewritten_by_another_rank_is_not_doubted():
    backend, prompt = rank_tests.Losing(random.Random(0), 0.0), engines.draw(random.Random(1), 400)
    for writes in True, False:
        cache = ranked.PageHeadCache(ranks.Ranks(), 128, engines.BANDWIDTH, store.Storage(backend), range(2), writes)
        engine = engines.make(cache)
        for pages in backend.pages, dict.fromkeys(backend.pages, b"damaged"), backend.pages:
            backend.pages = pages
            found = engines.ask(engine, prompt).found
            engines.evict(engine)
            engine.evict("host")
    assert found == {"storage": 384}


def test_host_memory_is_counted_in_kept_bytes(monkeypatch):
    parser = cli.parser_for("")
    ranked.add_arguments(parser)
    model = engines.tiny_model(kv_heads=1)  # per token 384 bytes of K and V, or 512 of states
    arguments = parser.parse_args(["--gpu-blocks=50", "--cpu-blocks=100", "--link=1"])
    monkeypatch.setattr(limits, "free_host_memory", lambda: 860_000.0)
    assert ranked.make_engine(model, arguments, "kv").lower_tier.cache.host.size == 100
    with pytest.raises(checkpoint.ModelError, match="--cpu-blocks 94"):
        ranked.make_engine(model, arguments, "states")


# 4. Start and end -----------------------------------------------------------------------------

TORCHRUN = dict(RANK=1, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=29500)


@pytest.mark.parametrize("given, asked, expected", [
    ({}, None, (0, 2)), ({}, 3, (0, 3)), (TORCHRUN, None, (1, 2)), ({**TORCHRUN, "LOCAL_RANK": 1}, 2, (1, 2)),
    (TORCHRUN, 3, None), ({"RANK": 0, "WORLD_SIZE": 1}, 2, None), ({"RANK": 0}, None, None), ({"LOCAL_RANK": 0}, None, None),
    *[({**TORCHRUN, **wrong}, None, None) for wrong in (
        dict(RANK="x"), dict(RANK=2), dict(RANK=-1), dict(LOCAL_RANK=2), dict(WORLD_SIZE=""), dict(MASTER_PORT=0), dict(MASTER_ADDR=""))],
    *[({name: TORCHRUN[name] for name in TORCHRUN if name != lacking}, None, None) for lacking in TORCHRUN],
])  # fmt: skip
def test_the_environment_names_the_rank_or_is_refused_in_a_sentence(given, asked, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", {name: str(value) for name, value in given.items()})
    if expected:
        assert ranks.of_environment(asked) == expected
        return
    with pytest.raises(checkpoint.ModelError, match=f"torchrun sets .* or unset {', '.join(given)}.$"):
        ranks.of_environment(asked)


@pytest.mark.parametrize("how, words", [
    ("killed", "Rank 1 was killed by signal 9; all ranks end."),
    ("failed", "Rank 1 has ended (AssertionError: something went wrong here); all ranks end."),
])  # fmt: skip
def test_all_ranks_end_with_a_sentence_after_one_has_ended(how, words, tmp_path):
    done = forked.run(tmp_path, "-m", "tests.support.ranks", 2, how, timeout=300)  # rank 0 starts the other one
    assert done.returncode == 1 and done.stderr.endswith(f"{words}\n"), done.stderr
    assert done.stdout == "ready\n", "output before the failure is not lost"


@pytest.mark.parametrize("words, environment, sentence", [
    (["--model", "/nonexistent"], {}, "No model"),
    (["--ranks", 2], dict(RANK="0", WORLD_SIZE="1"), "Ranks cannot start from RANK=0, WORLD_SIZE=1, --ranks 2: "),
    (["--prompt", "Hi"], dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"), "The ranks could not connect ("),
])
def test_a_wrong_start_is_refused_in_one_sentence(words, environment, sentence, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = dict(MASTER_PORT=str(taken.getsockname()[1])) if "MASTER_ADDR" in environment else {}
        done = forked.run(tmp_path, "09_tensor_parallel.py", *words, timeout=300, **environment, **port)
    assert done.returncode == 1 and done.stderr.startswith(f"09_tensor_parallel: {sentence}") and done.stderr.count("\n") == 1


def test_ctrl_c_ends_all_ranks(tmp_path):
    process = forked.start(tmp_path, "09_tensor_parallel.py", "--port", "0")
    serving.eventually(lambda: "serves" in (tmp_path / "stdout").read_text())
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    assert process.exitcode == 130 and (tmp_path / "stderr").read_text().endswith("\nInterrupted.\n")


def test_no_rank_outlives_the_rank_that_started_it(tmp_path):
    found = lambda *words: subprocess.run(["pgrep", *words], capture_output=True, text=True).stdout.split()  # noqa: E731
    first = forked.start(tmp_path, "-m", "tests.support.ranks", 2, "idle")
    serving.eventually(lambda: (tmp_path / "stdout").read_text() == "ready\n")
    (session,) = found("-P", str(first.pid))  # the other rank leads a session of its own
    first.kill()
    first.join()
    serving.eventually(lambda: not found("-s", session))


def test_all_ranks_learn_of_a_failed_copy_after_the_last_layer():
    engine, copies = engines.make(cache := ranked.KVCache(ranks.Ranks(), 64, 1e9)), []
    for error, *number in (None, lambda value: 7), (OSError(),), (None,):
        copies.append(cache.agree_on(Transfer("load", "layer 2"), *number))
        assert copies[-1].local_state() == ranked.ON_ITS_WAY
        copies[-1].own.finish(0.0, 0.0, error)
        copies[-1].restoration, cache.until[engine] = engine, 1e9  # the engine stands for a restoration
    assert [copy.local_state() for copy in copies] == [ranked.ARRIVED + 7, ranked.FAILED, ranked.ARRIVED], "a failed copy does not count as arrived"
    cache.ranks.all_true = lambda here: False  # as if a copy had failed on another rank
    assert copies[2].queue_wait(), "ranks agree after the last layer only"
    copies[2].last = True
    with pytest.raises(TransferError):
        copies[2].queue_wait()
