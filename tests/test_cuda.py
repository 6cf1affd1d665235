"""The contract on a GPU: streams, pinned memory, and equal tokens while copies run beside the computation."""

import random

import pytest
import torch
from support import engines
from support.engines import Oracle, ask, both_ends, check_pools, draw, evict, make, settle, tiny_model
from support.faults import faulty

from common.link import Link, TransferError
from common.requests import Request
from common.store import StoredChunks
from common.timeline import Clock
from shell import modelled_link

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def model():
    return tiny_model(3, 2, "cuda")


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


CACHES = {
    "host": lambda blocks: engines.offload.HostCache(4 * blocks),
    "hidden": lambda blocks: engines.hidden_states.HiddenCache(4 * blocks),
    "planned": lambda blocks: engines.planned.PlannedCache(4 * blocks, plan="RHK"),
    "both": lambda blocks: both_ends.BidirectionalCache(StoredChunks(both_ends.ModelledStorage(1e8, 1e9))),
    "8 bits": lambda blocks: both_ends.BidirectionalCache(StoredChunks(both_ends.ModelledStorage(1e8, 1e9)), bits=8),
    "storage": lambda blocks: both_ends.BidirectionalCache(StoredChunks(both_ends.ModelledStorage(1e8, 1e9)), share=0.0),
}
EXACT = [cache for cache in CACHES if cache != "8 bits"]
FOUND = {"host": {"cpu": 192}, "hidden": {"cpu": 200}, "planned": {"cpu": 200}, "storage": {"storage": 192}}


def host_engine(model, blocks: int = 64, cache: str = "host", **options):
    return make(CACHES[cache](blocks), blocks, model=model, **options)


def test_the_link_is_real_and_its_host_side_is_pinned(model):
    engine = host_engine(model)
    assert not engine.cache.load_link.modelled and engine.cache.host.memory.is_pinned()
    assert modelled_link.bandwidth(model) is None
    with pytest.raises(ValueError, match="leave it out"):
        modelled_link.bandwidth(model, 1.0)
    assert engine.cache.load_link.measure() > 1e8
    assert str(engine.cache.load_link).startswith("link, ")


@pytest.mark.parametrize("cache", EXACT)
@pytest.mark.parametrize("size", [1, 16])
def test_what_left_the_device_comes_back(model, oracle, size, cache):
    engine = host_engine(model, 1024 // size, cache, block_size=size)
    prompt = draw(random.Random(size), 200)
    for _ in range(3):
        request = ask(engine, prompt + draw(random.Random(2), 5))
        assert oracle.judge(request) != "wrong"
        evict(engine)
    if cache in FOUND:
        assert request.outcome.source == next(iter(FOUND[cache])) + "_hit"
        assert {span.lane for span in request.timeline.spans} >= {"compute", "load"}
    check_pools(engine)


def test_restored_k_and_v_are_bit_equal(model):
    engine, prompt, seen = host_engine(model), draw(random.Random(1), 160), []
    for _ in range(2):
        request = ask(engine, prompt, 1)
        seen.append([engine.pool.memory[:, :, block].clone() for block in engine.pool.find(request.chain)])
        evict(engine)
    assert len(seen[0]) == len(seen[1]) == 10
    assert all(torch.equal(one, other) for one, other in zip(*seen))


def test_a_copy_begins_behind_what_is_queued_and_is_ordered_before_what_follows():
    clock = Clock("cuda")
    load, save = Link("load", clock), Link("save", clock)
    size = 1 << 24
    device, host = torch.zeros(size, device="cuda"), torch.zeros(size, pin_memory=True)
    for value in range(1, 6):
        torch.cuda._sleep(50_000_000)
        device.fill_(value)  # queued, not done
        out = save.copy(host, device, "out")
        device_before = device.clone()
        assert out.queue_wait()
        device.fill_(-1)  # the copy out must not see this
        out.wait()
        assert out.ready and host.eq(value).all() and device_before.eq(value).all()
        back = load.copy(device, host, "in")
        assert back.queue_wait()
        assert device.sum().item() == value * size
        start, end = back.span()
        assert end > start


def test_an_error_is_the_transfers():
    link = Link("load", Clock("cuda"))
    transfer = link.copy(torch.zeros(3, device="cuda"), torch.zeros(4, pin_memory=True), "odd")
    with pytest.raises(TransferError, match="odd"):
        transfer.queue_wait()
    with pytest.raises(TransferError, match="odd"):
        transfer.wait()


@pytest.mark.parametrize("cache", EXACT)
def test_many_at_once_under_pressure(model, oracle, cache):
    rng, engine = random.Random(4), host_engine(model, 40, cache, max_running=8, token_budget=64)
    documents = [draw(rng, rng.randrange(60, 250)) for _ in range(4)]
    for _ in range(20):
        asked = [Request(rng.choice(documents) + draw(rng, rng.randrange(1, 9)), 8) for _ in range(5)]
        engine.generate(asked)
        assert all(oracle.judge(request) != "wrong" for request in asked)
        if rng.random() < 0.5:
            engine.evict("device")
    settle(engine)
    check_pools(engine)


@pytest.mark.parametrize("cache", EXACT)
def test_copies_that_fail_cost_time_only(model, oracle, cache):
    rng, engine = random.Random(5), host_engine(model, 50, cache)
    prompt = draw(rng, 200)
    with faulty(rng, failing=0.2):
        for _ in range(10):
            assert oracle.judge(ask(engine, prompt + draw(rng, 4))) != "wrong"
            settle(engine)
            engine.evict("device")
    check_pools(engine)


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_in_the_layer_loop_makes_the_host_wait(model, monkeypatch, cache):
    engine, prompt = host_engine(model, cache=cache), draw(random.Random(6), 200)
    ask(engine, prompt)
    evict(engine)
    inside, forward = [], engine.runner.forward
    for name in ("item", "cpu", "tolist"):
        method = getattr(torch.Tensor, name)

        def noted(tensor, *args, _name=name, _method=method):
            inside.append(_name)
            return _method(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)

    def watched(work, before_layer):
        inside.clear()
        found = forward(work, before_layer)
        assert not inside
        return found

    engine.runner.forward = watched
    request = ask(engine, prompt + [5])
    assert cache not in FOUND or request.found == FOUND[cache]
