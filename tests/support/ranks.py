"""Scenarios that run on several ranks.

A test starts this file in one process per rank, and all ranks run the same scenario.

    python -m tests.support.ranks 2 traffic --keep kv --requests 10000 --seed 0
"""

import argparse
import importlib
import os
import random
import signal
import threading
import time
import weakref
from functools import partial

import torch

from common import store
from common.cache import Cache
from common.llama import Llama
from common.requests import ClientDisconnected, Request
from shell import backends, checkpoint
from shell import ranks as processes
from shell.families import layer_of
from tests.support import engines, traffic

ranked = importlib.import_module("09_tensor_parallel")


class Losing:
    """A back end in memory that loses values at random, and records the calls of `exists` and `get` in `asked`."""

    def __init__(self, rng: random.Random, share: float):
        self.rng, self.share, self.pages, self.asked = rng, share, {}, []

    def exists(self, keys):
        self.asked.append(("exists", len(keys)))
        return [key in self.pages for key in keys]

    def get(self, keys):
        self.asked.append(("get", len(keys)))
        if self.rng.random() < self.share:
            time.sleep(0.02 * self.rng.random())
        return [self.pages.get(key) for key in keys]

    def set(self, keys, values):
        self.pages.update((key, value) for key, value in zip(keys, values) if self.rng.random() >= self.share)


def divided(ranks: processes.Ranks, kv_heads: int) -> Llama:
    """Return this rank's part of the tiny model."""
    whole, sharding = engines.plain_model(kv_heads=kv_heads), ranked.Sharding(ranks)
    model = Llama(sharding.config(whole.config), whole.dtype, layer=layer_of(whole.config))
    sharding.divide(model)
    tensors = checkpoint.weights(whole)
    for name, place in checkpoint.weights(model).items():
        sharding.fill(place, name, tensors[name])
    model.digest = b"tiny"
    return model.eval().requires_grad_(False)


def cache_of(keep: str, ranks: processes.Ranks, model: Llama, blocks: int, backend=None) -> Cache:
    """Return one of chapter 09's Caches, with small pools.

    `keep`: states, pages, kv or nothing."""
    if keep == "states":
        return ranked.ColumnsCache(ranks, 4 * blocks, engines.BANDWIDTH)
    if keep == "pages":
        heads, writes = model.sharding.own_kv_heads, model.sharding.writes
        cache = ranked.PageHeadCache(ranks, blocks, engines.BANDWIDTH, store.Storage(backend), heads, writes)
        cache.threshold = 32
        return cache
    return ranked.KVCache(ranks, 4 * blocks, engines.BANDWIDTH) if keep == "kv" else ranked.SyncedCache(ranks)


def generated(ranks, arguments):
    """Run generated traffic. Copies fail on one rank and not on another, and storages lose pages."""
    whole = engines.tiny_model(kv_heads=arguments.kv_heads)
    model, rng = divided(ranks, arguments.kv_heads), random.Random(ranks.rank)

    def make(cache, blocks, size, tier, **options):
        own = cache_of(cache, ranks, model, tier, Losing(rng, 0.02))
        return engines.make(own, blocks, size, model=model, **options)

    asked = arguments.keep, arguments.requests, arguments.seed
    counts = traffic.run(*asked, make=make, rank=ranks.rank, model=whole)
    assert not counts["wrong"] and not counts["failed"], counts
    assert counts["restored"] > 0 or arguments.keep == "nothing", counts
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


def engine_of(ranks, arguments, backend=None):
    model = divided(ranks, arguments.kv_heads)
    engine = engines.make(cache_of(arguments.keep, ranks, model, 64, backend), 64, model=model)
    engine.on_error = ranks.fail
    return engine


def again(engine, prompt: list[int], *others: Request) -> Request:
    """Evict the device's pool, then answer a prompt together with `others`, and check the answer against chapter 01's.

    Returns: the prompt's request."""
    engines.evict(engine)
    request = Request(prompt, 6)
    engine.generate([*others, request])
    oracle = engines.Oracle(engines.tiny_model(kv_heads=engine.model.sharding.kv_heads))
    assert oracle.judge(request) != "wrong"
    return request


def bytes_over_the_link(ranks, arguments):
    """Each rank loads only its part."""
    engine, prompt = engine_of(ranks, arguments), engines.draw(random.Random(0), 257)
    config = engines.tiny_model(kv_heads=arguments.kv_heads).config
    engines.ask(engine, prompt)
    assert again(engine, prompt).found == {"cpu": 256}
    if arguments.keep == "states":
        numbers, share = (config.num_hidden_layers - 1) * config.hidden_size, ranks.count
    else:
        numbers, share = config.kv_numbers_per_token, min(ranks.count, arguments.kv_heads)
    assert engine.counts["bytes_in"] * share == 256 * numbers * 4, (engine.counts["bytes_in"], share, numbers)


def declining(ranks, arguments):
    """If one rank believes that its link is slow, no rank loads."""
    engine, prompt = engine_of(ranks, arguments), engines.draw(random.Random(0), 257)
    engines.ask(engine, prompt)
    if ranks.rank == 1:
        engine.lower_tier.estimates.always = False
        engine.lower_tier.cache.load_link.bandwidth.values = [1.0]
    assert again(engine, prompt).found == {} and engine.counts["declined"] == 1


def ending(ranks, arguments):
    """One rank ends while all ranks step; the others must end soon, too."""
    everywhere = processes.BroadcastEngine(partial(engine_of, ranks, arguments))
    everywhere.step()
    if ranks.rank == 1:
        if arguments.scenario == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        assert arguments.scenario != "failed", "something went wrong here"
    print("ready", flush=arguments.scenario == "idle")
    everywhere.follow()


def commands(ranks, arguments):
    """Another thread of rank 0 submits and cancels requests, evicts, and closes the engine; all ranks follow."""
    engine = engine_of(ranks, arguments)
    everywhere, oracle = processes.BroadcastEngine(lambda: engine), engines.Oracle(engines.tiny_model(kv_heads=arguments.kv_heads))
    if ranks.rank:
        everywhere.follow()
        assert engine.lower_tier.cache.save_link.closed.is_set(), "pending copies complete on every rank before it ends"
        return
    rng = random.Random(0)
    asked = [Request(engines.draw(rng, 40), 8, temperature=float(number == 3)) for number in range(12)]
    threading.Thread(target=lambda: [everywhere.submit(request) for request in asked]).start()
    while any(request.outcome is None for request in asked):
        if asked[5].outcome is None and asked[0].new:
            everywhere.cancel(asked[5], ClientDisconnected("enough"))
        everywhere.step()
    assert isinstance(asked[5].outcome, ClientDisconnected)
    assert all(oracle.judge(one) != "wrong" for number, one in enumerate(asked) if number not in (3, 5))
    engines.wait_until_idle(everywhere)
    assert everywhere.evict("device") > 0 and not engine.pool.cached
    everywhere.close()


def failing(ranks, arguments):
    """Work on one rank raises. Each time all open requests end with one sentence, and all ranks go on.

    Each engine but the last has one fault: a method that raises on one rank. A new engine has it no more."""
    names = ("match", "save", "on_saved", "poll", "copy_out", "copy_in", "pass") if ranks.count == 2 else ("pass",)
    if arguments.keep == "states":  # the engine's part is the same, so only methods of this Cache
        names = "on_saved", "step_states", "project"
    faults, before = [(name, rank) for name in names for rank in range(2)], []
    left, oracle = [*faults, ("", -1)], engines.Oracle(engines.tiny_model(kv_heads=arguments.kv_heads))

    def make():
        assert not before or before[0]() is None, "the memory of the last engine is free"
        engine, (name, rank) = engine_of(ranks, arguments), left.pop(0)
        before[:] = [weakref.ref(engine)]
        owner, method = (engine.model.layers[1], "after_attention") if name == "pass" else (engine.lower_tier.cache, name)
        right = getattr(owner, method, None)

        def wrong(*what):
            if name != "poll" or engine.running:  # an idle engine polls too
                raise RuntimeError(name)
            return right(*what)

        if rank == ranks.rank:
            setattr(owner, method, wrong)
        return engine

    everywhere, prompts = processes.BroadcastEngine(make), [engines.draw(random.Random(seed), 100) for seed in range(2)]
    if ranks.rank:
        return everywhere.follow()

    def ask() -> list:
        """Return what the prompts' requests found, or one sentence each."""
        asked = [Request(prompt, 4) for prompt in prompts]
        for request in asked:
            everywhere.submit(request)
        while any(request.outcome is None for request in asked) or everywhere.busy:
            everywhere.step()
        everywhere.evict("device")
        assert all(isinstance(one.outcome, Exception) or oracle.judge(one) != "wrong" for one in asked)
        return [str(one.outcome) if isinstance(one.outcome, Exception) else one.found for one in asked]

    for name, rank in faults:
        count, outcomes = len(left), ask()
        if len(left) == count:  # there is something to restore the second time
            outcomes = ask()
        told = [f"Rank {rank} failed (RuntimeError: {name}); ask again."] * 2
        assert len(left) == count - 1 and (outcomes == told or name == "on_saved"), (name, outcomes)  # blocks may be saved later
    assert ask() == [{}, {}] and ask() == [{"cpu": 96}] * 2
    everywhere.close()


def sharing(ranks, arguments):
    """Read pages that another number of ranks has left in a directory.

    Each head's pages are written by one rank only."""
    backend, written = backends.open_backend(f"file:{arguments.storage}"), []
    put, backend.set = backend.set, lambda keys, values: written.extend(keys) or put(keys, values)
    engine, prompt = engine_of(ranks, arguments, backend), engines.draw(random.Random(0), 257)
    assert (again(engine, prompt).cached_tokens > 0) == arguments.found  # with --found, pages of an earlier run
    engines.wait_until_idle(engine)
    if not arguments.found:
        share = ranks.count // arguments.kv_heads  # ranks per KV head
        assert len(written) == (0 if ranks.rank % share else 16), written
    engine.evict("host")
    assert again(engine, prompt).found == {"storage": 256}, "all ranks find what some of them have written"
    engine.close()


def lacking(ranks, arguments):
    """If one rank's storage has lost a page, no rank reads that page or the pages after it."""
    backend = Losing(random.Random(0), 0.0)
    engine, prompt = engine_of(ranks, arguments, backend), engines.draw(random.Random(0), 257)
    engines.ask_and_evict(engine, prompt)
    engine.evict("host")
    if ranks.rank == 1:
        del backend.pages[list(backend.pages)[9]]
    assert again(engine, prompt).found == {"storage": 144}
    assert [size for verb, size in backend.asked if verb == "get"] == [4, 4, 1], backend.asked


SCENARIOS = dict(traffic=generated, share=sharing, lack=lacking, bytes=bytes_over_the_link, decline=declining, killed=ending, failed=ending,
                 idle=ending, commands=commands, fails=failing)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("--keep", choices=["nothing", "kv", "states", "pages"], default="kv")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--storage", metavar="DIR")
    parser.add_argument("--found", action="store_true", help="in scenario share: the directory has pages of an earlier run")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ranks = processes.join(arguments.count)
    torch.set_num_threads(1)
    # This kind of model has the most parts that sharding could get wrong.
    engines.plain_model = partial(engines.plain_model, qk_norm=True, no_rope_layers=(1,))
    for name in arguments.scenarios:
        arguments.scenario = name
        SCENARIOS[name](ranks, arguments)
        ranks.barrier()  # if another rank has failed, this fails


if __name__ == "__main__":
    main()
