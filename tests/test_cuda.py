"""The contract of Caches on a GPU: evicted blocks are restored and tokens equal chapter 01's, in any order of streams.

Without a GPU, the tests run on the emulated device of support/streams.py, in each of its schedules."""

import functools
import gc
import importlib
import os
import random
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from common.cuda_link import Link
from common.link import BlockPairs, TransferError
from common.requests import Interrupted, Request
from common.restoring import Restorer
from common.timeline import Clock
from shell import copy_kernels, hardware
from shell.pieces import Pieces
from shell.ranks import Ranks
from tests.support import engines, streams, traffic, unordered
from tests.support.engines import ask, ask_and_evict, check_pools, draw, evict, tiered, tiny_model
from tests.support.launches import a_layer

ranked = importlib.import_module("09_tensor_parallel")
REAL = torch.cuda.is_available()
NAMES = "host", "hidden", "planned", "files", "both", "both, files", "tiered", "tiered, both ends"
TESTED = {name: engines.CACHES[name] for name in NAMES} | {
    "8 bits": lambda blocks: engines.both_ends.BidirectionalCache(engines.modelled(blocks), bits=8),
    "write_back": lambda blocks: tiered(blocks, "wait_complete", "write_back"),
    "ranked": lambda blocks: ranked.KVCache(Ranks(), 4 * blocks),
    "ranked, hidden": lambda blocks: ranked.ColumnsCache(Ranks(), 4 * blocks, None),
    "hybrid": None,
}
EXACT = [cache for cache in TESTED if cache != "8 bits"]
FOUND = set(TESTED) - {"both", "tiered, both ends", "8 bits", "hybrid"}  # they restore blocks however fast prefill is
REQUESTS = int(os.environ.get("GPU_REQUESTS", 150 if REAL else 480))  # of generated traffic, in all caches and schedules together


@pytest.fixture(params=["real"] if REAL else streams.SCHEDULES)
def gpu(request, monkeypatch):
    """A GPU: the emulated one in one of its schedules, or a real one with random delays on its streams."""
    torch.set_num_threads(1)
    if REAL:
        rng, copy = random.Random(0), Link.copy

        def delayed(link, *args, **options):
            for stream in (link.stream, torch.cuda.current_stream()):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(rng.choice((0, 0, 0, 1_000_000, 5_000_000)))
            return copy(link, *args, **options)

        monkeypatch.setattr(Link, "copy", delayed)
        yield None
    else:
        with streams.emulate(request.param) as emulated, unordered.measured_before():
            yield emulated
        assert not emulated.errors


@pytest.fixture(scope="module")
def oracle():
    """Cache -> an Oracle with chapter 01's answers, computed on the CPU."""
    return {cache: engines.Oracle(tiny_model(0, 4 if cache == "hybrid" else 2)) for cache in TESTED}


def make(cache: str, blocks: int = 40, size: int = 16, tier=None, **options):
    return traffic.on_gpu(cache if cache == "hybrid" else TESTED[cache](tier or blocks), blocks, size, **options)


# 1. The link -----------------------------------------------------------------------------------


def test_the_link_is_real_and_its_host_side_is_pinned(gpu):
    engine = make("host")
    assert not engine.lower_tier.cache.load_link.modelled and engine.lower_tier.cache.host.memory.is_pinned()
    assert hardware.bandwidth(engine.model) is None
    with pytest.raises(ValueError, match="leave --link out"):
        hardware.bandwidth(engine.model, 1.0)
    assert engine.lower_tier.cache.load_link.measure() > 1e8
    assert str(engine.lower_tier.cache.load_link).startswith("link, ")


def test_a_copy_begins_behind_what_is_queued_is_ordered_before_what_follows_and_has_its_error(gpu):
    clock = Clock("cuda")
    load, save = Link("load", clock), Link("save", clock)
    size = 1 << 20
    device, host = torch.zeros(size, device="cuda"), torch.zeros(size, pin_memory=True)
    for value in range(1, 6):
        torch.cuda._sleep(50_000_000)
        device.fill_(value)  # queued, not done yet
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
    odd = load.copy(torch.zeros(3, device="cuda"), torch.zeros(4, pin_memory=True), "odd")
    for waits in (odd.queue_wait, odd.wait):
        with pytest.raises(TransferError, match="odd"):
            waits()


# 2. Right answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["real" if REAL else "late copies"], indirect=True)
@pytest.mark.parametrize("cache", ["host", "hidden", "tiered"])
def test_memory_that_cannot_be_pinned_serves_too(gpu, oracle, cache, capsys):
    with unordered.pageable():
        engine, prompt = make(cache), draw(random.Random(3), 70)
        for _ in range(2):
            request = ask_and_evict(engine, prompt, 3)
            assert oracle[cache].judge(request) != "wrong"
        assert request.found and "cannot be pinned" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", ["real" if REAL else "late copies"], indirect=True)
@pytest.mark.parametrize("cache", EXACT)
def test_an_engine_that_ends_with_copies_under_way_harms_no_other(gpu, oracle, cache):
    rng = random.Random(6)
    prompts = [draw(rng, 90) for _ in range(2)]
    for _ in range(2):
        engine = make(cache)
        ask_and_evict(engine, prompts[0], 2)
        engines.submit(engine, Request(prompts[0] + [5], 4), Request(prompts[1], 4), steps=1)
        engine.close()
        del engine
        gc.collect()  # the next engine may get its memory
        other = make(cache)
        for _ in range(2):
            request = ask_and_evict(other, prompts[1], 3)
            assert oracle[cache].judge(request) != "wrong"
        other.close()


@pytest.mark.parametrize("gpu", ["real" if REAL else "late"], indirect=True)
@pytest.mark.parametrize("what_dies", ["memory", "memory and link"])
def test_pinned_memory_lives_until_kernels_have_read_it(gpu, what_dies):
    links, host = [Link("load", Clock("cuda"))], torch.ones(9, 512, pin_memory=True)
    device = torch.zeros(9, 512, device="cuda")
    links[0].copy(device, host, "in", BlockPairs([4, 2, 7], [1, 3, 8]))  # queued, not done
    del host
    if what_dies != "memory":
        links.clear()
    gc.collect()
    assert torch.empty(9, 512, pin_memory=True).fill_(-1).is_pinned()  # perhaps at the same address
    torch.cuda.synchronize()
    assert device.sum().item() == 3 * 512


@pytest.mark.parametrize("gpu", ["real" if REAL else "random"], indirect=True)
def test_two_engines_take_turns_and_a_pass_ends_between_two_pieces(gpu, oracle, monkeypatch):
    rng, both, passes = random.Random(11), [make("host"), make("hidden")], []
    model = engines.tiny_model(0, 2, "cuda")

    def interrupted(restorer, index, *given, wait=Restorer.before_layer):
        """Interrupt every third pass after its first layer, as if another request had arrived."""
        passes.append(index)
        if index == 1 and passes.count(1) % 3 == 0:
            raise Interrupted
        return wait(restorer, index, *given)

    monkeypatch.setattr(Restorer, "before_layer", interrupted)
    asked = [Request(draw(rng, length), 6) for length in (40, 3, 70, 9)]
    for engine, request in zip(both * 2, asked):
        engine.submit(request)
    while any(request.outcome is None for request in asked):
        for engine in both:
            engine.step()
    assert all(oracle["host"].judge(request) != "wrong" for request in asked)
    assert all(len(engine.runner.pieces.graphs) >= 2 for engine in both) and model is both[0].model


@pytest.mark.parametrize("gpu", ["real" if REAL else "late"], indirect=True)
def test_while_nothing_runs_the_smaller_graphs_are_captured_until_a_request_comes(gpu):
    engine = make("host")
    ask(engine, draw(random.Random(13), 40), 1)
    pieces, seen = engine.runner.pieces, max(engine.runner.pieces.graphs)
    pieces.idle(lambda: len(pieces.graphs) >= 3)
    assert len(pieces.graphs) == 3
    engines.wait_until_idle(engine)
    engine.wake.set()
    engine.step()
    assert sorted(pieces.graphs) == [size for size in pieces.sizes if size <= seen]
    assert pieces.layers(max(pieces.sizes) + 1) is engine.model.layers, "a pass with more rows uses no graphs"


def refuse(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GB")


def later(calls: int, original):
    """Return a method that works for `calls` calls and then raises."""
    left = iter(range(calls))
    return lambda *given, **named: refuse() if next(left, None) is None else original(*given, **named)


def changed(original, factor: float):
    """Return a replay that multiplies q by `factor` afterwards."""
    def replay(graph):
        original(graph)
        replay.pieces.q.mul_(factor)

    return replay


GRAPHS = {  # what is wrong -> (owner, method, function that returns a replacement)
    "no memory": (Pieces, "allocate", lambda _: refuse),
    "cannot be captured": (None, "capture_begin", lambda _: refuse),
    "the second size cannot": (None, "capture_begin", functools.partial(later, 5)),
    "cannot be replayed": (None, "replay", lambda _: refuse),
    "raises in its first pass": (None, "replay", functools.partial(later, 5)),
    "raises later": (None, "replay", functools.partial(later, 31)),
    "does nothing": (None, "replay", lambda _: lambda graph: None),
    "another result": (None, "replay", functools.partial(changed, factor=1.01)),
    "no number": (None, "replay", functools.partial(changed, factor=float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("gpu", ["real" if REAL else "late"], indirect=True)
@pytest.mark.parametrize("cache", ["host", "planned"])
@pytest.mark.parametrize("wrong", GRAPHS)
def test_a_model_whose_graphs_are_wrong_is_computed_without_them(gpu, oracle, capsys, monkeypatch, wrong, cache):
    owner, name, instead = GRAPHS[wrong]
    owner = owner or torch.cuda.CUDAGraph
    instead = instead(getattr(owner, name))
    monkeypatch.setattr(owner, name, instead)
    engine, rng = make(cache), random.Random(12)
    instead.pieces = pieces = engine.runner.pieces
    for prompt in [draw(rng, 40)] * 2 + [draw(rng, 100)]:
        assert oracle[cache].judge(ask_and_evict(engine, prompt, 3)) != "wrong"
    pieces.idle(lambda: False)
    assert not pieces.graphs and pieces.layers(1) is engine.model.layers
    (line,) = filter(None, capsys.readouterr().err.splitlines())
    assert line.startswith("No CUDA graphs are used (") and line.endswith("one by one, and tokens take longer.")


@pytest.mark.parametrize("gpu", ["real" if REAL else "late"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_each_dtype_graphs_give_what_kernels_do_and_may_add_in_another_order(gpu, dtype, monkeypatch):
    model = engines.plain_model().to(dtype).to("cuda")
    model.dtype, model.device = dtype, torch.device("cuda")
    pieces = Pieces(model)
    attend = lambda q, k, v: (q.unflatten(1, (2, 2)) + k[:, :, None] * v[:, :, None]).flatten(1, 2)  # noqa: E731
    with torch.inference_mode():
        for size in 1, 4, 32:
            outs = []
            for layers in pieces.layers(size), model.layers:
                hidden = model.embed(torch.arange(size, device="cuda"))
                rotation = model.rotary(torch.arange(size, device="cuda"))
                for layer in layers:
                    hidden = layer(hidden, rotation, attend)
                outs.append(hidden.cpu())
            error = torch.finfo(dtype).eps ** 0.5 * outs[1].abs().max() if REAL else 0.0
            assert (outs[0] - outs[1]).abs().max() <= error and sorted(pieces.graphs)[-1] == size
        for factor in 1 + 4 * torch.finfo(dtype).eps, 1.5:
            with monkeypatch.context() as patch:
                replay = changed(torch.cuda.CUDAGraph.replay, factor)
                patch.setattr(torch.cuda.CUDAGraph, "replay", replay)
                replay.pieces = Pieces(model)
                assert replay.pieces.capture(2) == (factor < 1.5)


VIEWS = {  # views of host memory with which kernels copy wrongly, or not at all
    "cannot be made": lambda host, view, calls: view(None),
    "of other memory": lambda host, view, calls: view(host.flip(0).pin_memory()),
    "from which nothing leaves": lambda host, view, calls: host.to("cuda"),
    "that cannot be made later": lambda host, view, calls: view(host if calls < 4 else None),  # the checks of two links take 4
}  # fmt: skip


@pytest.mark.parametrize("gpu", ["real" if REAL else "late copies"], indirect=True)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("cache", ["host", "hidden", "tiered", "kernel", "hybrid"])
def test_a_link_whose_kernels_copy_wrongly_leaves_blocks_to_the_copy_engine(gpu, oracle, capsys, monkeypatch, view, cache):
    seen, kept = copy_kernels.on_device, []
    hardware.warn_once.cache_clear()  # it prints a line once in a process, and each case must print it

    def wrong(host):
        kept.append(VIEWS[view](host, seen, len(kept)))
        return kept[-1]

    monkeypatch.setattr(copy_kernels, "on_device", wrong)
    asked = tiered(64, "best_effort", "write_through", io_backend="kernel") if cache == "kernel" else None
    engine, prompt = engines.make(asked, model=tiny_model(0, 2, "cuda")) if asked else make(cache, 64), draw(random.Random(3), 170)
    for pool in engine.pools.values():
        pool.release(pool.allocate(pool.size)[::3])  # no two free blocks are adjacent
    for _ in range(3):
        request = ask_and_evict(engine, prompt, 3)
        assert oracle["hybrid" if cache == "hybrid" else "host"].judge(request) != "wrong"
    assert engine.counts["failed_restorations"] == 0 and (cache == "hybrid" or request.cached_tokens >= 160)
    (line,) = filter(None, capsys.readouterr().err.splitlines())
    assert line.startswith("The kernel cannot copy between host memory and the GPU (") and "one by one" in line
    links = engine.runner if cache == "hybrid" else engine.lower_tier.cache
    assert links.load_link.backend == "direct"
    # Chapter 04 saves contiguous blocks, so no kernel copies them
    assert links.save_link.backend == (None if cache == "hidden" and "later" in view else "direct")


@pytest.mark.parametrize("gpu", ["real" if REAL else "late"], indirect=True)
@pytest.mark.parametrize("error", [AttributeError, AssertionError, OSError])
def test_a_gpu_that_cannot_be_divided_copies_on_any_stream(gpu, monkeypatch, error):
    monkeypatch.setattr(torch.cuda.green_contexts.GreenContext, "create", Mock(side_effect=error))
    link = hardware.connect("load", Clock("cuda"))
    assert isinstance(link.stream, torch.cuda.Stream) and link.backend is None


@pytest.mark.parametrize("gpu", ["real"] if REAL else [name for name in streams.SCHEDULES if name != "early"], indirect=True)
@pytest.mark.parametrize("number, cache", enumerate(EXACT))
def test_generated_traffic(gpu, request, number, cache):
    each = -(-REQUESTS // (len(EXACT) * (1 if REAL else len(streams.SCHEDULES) - 1)))
    seed = 100 * number + len(request.node.name)
    share = 0.002 if cache == "hybrid" else 0.2
    counts = traffic.run(cache, each, seed, share, make=make, longest=100, answer=7)
    assert not counts["wrong"] and not counts["failed"]


# 3. The host does not wait, and guards of the order ----------------------------------------------


@pytest.mark.parametrize("cache", TESTED)
def test_what_left_comes_back_and_nothing_between_the_first_layer_and_the_logits_makes_the_host_wait(gpu, oracle, monkeypatch, cache):
    engine, prompt, seen, since = make(cache), draw(random.Random(7), 90), [], []
    exact = cache not in ("8 bits", "hybrid")  # "hybrid" keeps K and V on the host

    def contents(request):
        """Return the request's first blocks. Attention alone would not notice blocks that were swapped."""
        return [engine.pool.memory[:, :, block].cpu() for block in engine.pool.find(request.chain)[:5]] if exact else []

    before = contents(ask(engine, prompt, 3))
    evict(engine)

    def first(original, index, *args):
        if index == 0:
            since[:] = [0 if REAL else len(gpu.waits)]
            torch.cuda.set_sync_debug_mode("error" if REAL else "default")
        return original(index, *args)

    def end(original, *args):
        """Called before the logits and around each pass: the host may wait again."""
        try:
            torch.cuda.set_sync_debug_mode("default")
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def note(original, *args):
        if since and not REAL:
            seen.extend(gpu.waits[since.pop() :])
        return end(original, *args)

    looped = (engine.runner.weights, "layer") if cache == "hybrid" else (engine.lower_tier, "before_layer")
    logits, forward = (engine.model, "logits"), (engine.runner, "forward")
    for (owner, name), function in (looped, first), (logits, note), (forward, end):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, functools.partial(function, original))
    request = ask(engine, prompt + [5], 3)
    assert not isinstance(request.outcome, Exception) and not seen
    assert cache == "8 bits" or oracle[cache].judge(request) != "wrong"
    error = 1e-5 if cache in ("hidden", "planned", "both") else 0.0  # copied blocks are bit-equal
    assert all(torch.allclose(*pair, rtol=0.0, atol=error) for pair in zip(before, contents(request), strict=True))
    assert cache not in FOUND or sum(request.found.values()) >= 64
    assert {span.lane for span in request.timeline.spans} >= {"compute"}
    check_pools(engine)
    engine.close()


@pytest.mark.skipif(REAL, reason="a real device counts no launches")
@pytest.mark.parametrize("way, most, copied", [
    ("02", 6, 0), ("03", 6, 1), ("04", 12, 1), ("05", 10, 1.5), ("07", 6, 0)])  # fmt: skip
def test_launches_of_a_layer(way, most, copied):
    """Per layer, for a question after its history: kernels, graph replays, and copies by the copy engine.

    The copy engine copies all blocks that are adjacent on the host, which are all except 07's pages."""
    launches, copies, _ = a_layer(way)
    assert 4 <= launches <= most and copies == copied


@pytest.mark.skipif(REAL, reason="a real device counts no copies")
@pytest.mark.parametrize("gpu", ["late"], indirect=True)
@pytest.mark.parametrize("cache", ["host", "hidden", "tiered", "tiered, layer_first", "direct", "ranked", "hybrid"])
def test_the_host_gathers_no_scattered_blocks(gpu, oracle, cache):
    """The copy engine copies each run of adjacent blocks in a layer, or one kernel copies all blocks, in any layout."""
    options = dict(layout="layer_first") if cache == "tiered, layer_first" else dict(io_backend="direct")
    blocks, prompts = 120, [draw(random.Random(seed), 290) for seed in range(2)]
    if cache == "hybrid":  # each step has two mini-batches, of KV and of ACT blocks; the weights are on the device
        model, plan = tiny_model(0, 4, "cuda", on_host=True), engines.hybrid.Plan(3, 60, 60, 0, 0)
        engine = engines.make(runner=engines.hybrid_runner(blocks, 16, plan, model, 512), model=model)
    else:
        made = TESTED[cache](blocks) if cache in TESTED else tiered(blocks, "best_effort", "write_through", **options)
        engine = engines.make(made, blocks, model=tiny_model(0, 2, "cuda"))
    for pool in engine.pools.values():
        pool.release(pool.allocate(pool.size)[::3])  # no two free blocks are adjacent
    for _ in range(2):
        if cache != "hybrid":
            evict(engine)
        gpu.copies.clear()
        gpu.waits.clear()
        requests = engine.generate([Request(prompt, 1) for prompt in prompts])
    assert all(request.cached_tokens == 288 for request in requests)
    judged = oracle["hybrid" if cache == "hybrid" else "host"]
    assert all(judged.judge(request) != "wrong" for request in requests)
    pieces = [size for way, size in gpu.copies if way == "to the device" and size >= 1 << 12]
    assert len(pieces) == (2 * 3 * 18 if cache == "direct" else 0) and "pageable copy" not in gpu.waits


@pytest.mark.skipif(REAL, reason="a real device shows it sometimes")
@pytest.mark.parametrize("guard", unordered.GUARDS)
def test_without_a_guard_of_order_some_answer_is_wrong(guard):
    def goes_wrong(schedule, context):
        with streams.emulate(schedule), unordered.measured_before(), context:
            return "x" in unordered.SCENES.get(guard, unordered.scene)()

    assert any(goes_wrong(schedule, unordered.without(guard)) for schedule in ("late", "late copies", "late compute"))
    assert not goes_wrong("late", nullcontext())


@pytest.mark.skipif(REAL, reason="there is a real one")
def test_the_emulated_host_waits_for_pageable_memory_and_for_numbers():
    with streams.emulate("late") as gpu, torch.inference_mode():
        device, pinned = torch.zeros(4, 4, device="cuda"), torch.ones(4, 4, pin_memory=True)
        device.copy_(pinned, non_blocking=True)
        assert not gpu.waits and gpu.copies == [("to the device", 64)]
        device.copy_(torch.ones(4, 4), non_blocking=True)
        device.copy_(pinned.t(), non_blocking=True)  # not contiguous
        pinned.copy_(device.t(), non_blocking=True)
        assert gpu.waits == ["pageable copy"] * 2 and device.sum().item() == 16
        with pytest.raises(RuntimeError, match="same device"):
            device + torch.ones(4)
        assert torch.Generator | None, "PyTorch's own type annotations use torch.Generator this way"
        device.nonzero()
        assert gpu.waits[-1] == "nonzero"
