"""The engine factory of all tests: a tiny model with any chapter's Cache, and checks of its answers and pools.

The model's answers depend on tokens far back in the context, so a wrong block changes an answer."""

import functools
import importlib
import random
import tempfile
import time
from pathlib import Path

import torch

from common.estimates import Estimates
from common.llama import Llama, LlamaConfig
from common.requests import Request
from common.restoring import Restorer
from common.store import Storage
from examples import both_ends as three_tiers
from shell import checkpoint
from shell.backends import in_directories, open_backend
from shell.chunks import StoredChunks
from shell.families import FamilyConfig, layer_of
from shell.linear import speed_up
from shell.machine import machine_of
from shell.modelled_link import Bandwidth
from shell.pieces import Pieces

CHAPTERS = (
    "01_baseline", "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free",
    "06_bidirectional", "07_tiered_storage", "08_hybrid_blocks",
)  # fmt: skip
baseline, paged, offload, hidden_states, planned, both_ends, tiers, hybrid = map(importlib.import_module, CHAPTERS)
BANDWIDTH = 2e9  # of the modelled link, in bytes/s
CONTEXT = 512

# name -> function(device blocks) that returns a Cache. With a line here, a Cache takes part in the contract's tests.
CACHES = {
    "none": lambda blocks: None,
    "host": lambda blocks: offload.HostCache(4 * blocks, BANDWIDTH),
    "hidden": lambda blocks: hidden_states.HiddenCache(4 * blocks, BANDWIDTH),
    "planned": lambda blocks: planned.PlannedCache(16 * blocks, BANDWIDTH, plan="RHK"),
    "files": lambda blocks: hidden_states.HiddenCache(blocks, BANDWIDTH, chunk_files()),
    "both": lambda blocks: both_ends.BidirectionalCache(modelled(blocks), share=0.5, memory=5e4),
    "both, files": lambda blocks: both_ends.BidirectionalCache(chunk_files(), share=0.0, memory=2e5),
    "tiered": lambda blocks: tiered(blocks, "wait_complete", "write_through"),
    "tiered, write_back": lambda blocks: tiered(blocks, "timeout", "write_back"),
    "tiered, both ends": lambda blocks: tiered(blocks, "both_ends", "write_through"),
}
# name -> function(blocks, block size) that returns a Runner; its engine has the base Cache
RUNNERS = {"hybrid": lambda blocks, size: hybrid_runner(blocks, size)}
FOLDERS = tempfile.TemporaryDirectory()


def modelled(blocks: int) -> StoredChunks:
    return StoredChunks(both_ends.ModelledStorage(25e3 * blocks, BANDWIDTH / 10))


def chunk_files(folder: Path | None = None) -> StoredChunks:
    """Return chunks stored in `folder`, or in a new temporary folder."""
    return in_directories([folder or Path(tempfile.mkdtemp(dir=FOLDERS.name))], 0.1)


def tiered(blocks: int, prefetch: str, write: str, backend=None, bandwidth=None, **options):
    """Return chapter 07's Cache, with storage in `backend` or in a new folder.

    `prefetch`, `write`: names of policies; with `prefetch` "none" there is no storage. `bandwidth`: of modelled storage,
    in bytes/s."""
    if backend is None:
        backend = open_backend(f"file:{tempfile.mkdtemp(dir=FOLDERS.name)}")
    kind = three_tiers.BothEndsCache if prefetch == "both_ends" else tiers.TieredCache
    storage = Storage(backend, bandwidth=bandwidth and Bandwidth(bandwidth)) if prefetch != "none" else None
    return kind(blocks, BANDWIDTH, storage, prefetch, write, **{"threshold": 32, **options})


# More of chapter 07's Caches, for generated traffic: each write policy, with each prefetch policy and without storage.
# A read takes so long that its pages go on to the device while storage reads later ones.
POLICIES = {
    f"tiered, both ends, {write}" if prefetch == "both_ends" else f"tiered, {write}, {prefetch}":
    functools.partial(tiered, prefetch=prefetch, write=write, bandwidth=BANDWIDTH / 100)
    for write in tiers.WRITE for prefetch in (*tiers.PREFETCH, "both_ends", "none")
}  # fmt: skip


def own_cache(name: str):
    """Return function(blocks) for the user's own Cache, named as `my_cache:MyCache`.

    The class is called as MyCache(4 * blocks, bytes/s)."""
    module, _, kind = name.partition(":")
    made = getattr(importlib.import_module(module), kind)
    return lambda blocks: made(4 * blocks, BANDWIDTH)


@functools.cache
def tiny_model(seed: int = 0, kv_heads: int = 2, device: str = "cpu", on_host=False, depth: int = 3) -> Llama:
    """Return plain_model prepared for a device. `on_host`: its layers stay in host memory (chapter 08)."""
    model = plain_model(seed, kv_heads, depth)
    model.digest = bytes([seed]) * 32
    if on_host:
        hybrid.layers_on_host(model, device)
        return model
    model = model.to(device)
    model.device = torch.device(device)
    speed_up(model, copies=True)
    return model


def plain_model(seed: int = 0, kv_heads: int = 2, depth: int = 3, **more) -> Llama:
    """Return a model with `depth` layers of width 64, 4 heads, a vocabulary of 300, and random weights.

    The weights are so large that early tokens change the answer. `more`: other fields of the config."""
    kind = FamilyConfig if more else LlamaConfig
    config = kind(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=CONTEXT, **more,
    )  # fmt: skip
    model = Llama(config, torch.float32, "cpu", layer_of(config))
    generator = torch.Generator().manual_seed(seed)
    for name, place in checkpoint.weights(model).items():
        place.copy_(torch.randn(place.shape, generator=generator) * 0.25)
        if name.endswith("norm.weight"):
            place.add_(4.0 if "q_norm" in name else 1.0)  # large ones make attention sharp
    return model.eval().requires_grad_(False)


def hybrid_runner(blocks: int, size: int = 16, plan=None, model=None, rows: int = 600, bandwidth=BANDWIDTH):
    """Return chapter 08's Runner.

    The default plan has some blocks of each kind; their shares depend on `blocks`."""
    if plan is None:
        shares = ((1, 1, 1, 1), (1, 0, 1, 1), (0, 3, 1, 0), (2, 1, 0, 1))[blocks % 4]
        counts = [blocks * share // sum(shares) for share in shares]
        counts[3 if shares[3] else 1] += blocks - sum(counts)
        plan = hybrid.Plan(blocks % 3, *counts)
    return hybrid.HybridRunner(model or tiny_model(0, 4, on_host=True), plan, bandwidth, size, rows)


def make(cache="none", blocks=64, block_size=16, model=None, always_restore=True, runner=None, tier=None, **options):
    """Return an engine. `cache`: a name in CACHES, POLICIES or RUNNERS, or a Cache.

    `tier`: the lower tiers of a named Cache get the size for this number of device blocks; default: `blocks`.
    By default every match is restored, so that no measured time decides the result of a test."""
    model = model or tiny_model()
    if cache in RUNNERS:
        cache, runner = None, RUNNERS[cache](blocks, block_size)
    cache = (CACHES | POLICIES)[cache](tier or blocks) if isinstance(cache, str) else cache
    runner = runner or paged.Runner(model, blocks, block_size)
    if model.device.type == "cuda" and isinstance(runner, paged.Runner):
        runner.pieces = Pieces(model)
    estimates = Estimates(machine_of(model), always_restore)
    engine = paged.Engine(runner, cache and Restorer(cache, estimates), **options)
    runner.arrivals = engine.arrivals  # chapter 08 reads them
    return engine


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 300) for _ in range(count)]


def ask(engine, prompt: list[int], new: int = 6, **options) -> Request:
    """Answer one prompt, with no other request, and return its request."""
    return engine.generate([Request(list(prompt), new, options=options)])[0]


def answer(model, prompt: list[int], new: int, chunk: int = baseline.PREFILL, **sampling) -> Request:
    """Answer one prompt with chapter 01's engine, and return its request."""
    return baseline.Engine(model, chunk=chunk).generate([Request(prompt, new, **sampling)])[0]


def submit(engine, *requests: Request, steps: int = 0):
    """Submit requests in this order, then make `steps` steps."""
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()


def step_until(engine, is_over, words: str):
    """Step until `is_over()` is true. Fails with `words` after 300 s."""
    until = time.perf_counter() + 300
    while not is_over():
        assert time.perf_counter() < until, words
        engine.step()


def until_over(engine, *requests: Request):
    """Step until all these requests have an outcome."""
    step_until(engine, lambda: all(request.outcome for request in requests), "a request has no outcome in time")


def ask_and_evict(engine, prompt: list[int], new: int = 6) -> Request:
    """Answer one prompt, then evict the device's pool."""
    request = ask(engine, prompt, new)
    evict(engine)
    return request


def wait_until_idle(engine):
    """Step until the engine is idle."""
    step_until(engine, lambda: not engine.busy, "the engine is not idle in time: something was never released")


def evict(engine):
    """Wait until the engine is idle, evict the device's pool, and wait until that is done."""
    wait_until_idle(engine)
    engine.evict("device")
    wait_until_idle(engine)


def check_pools(engine):
    """Wait until the engine is idle, then check its pools.

    No block may be referenced, and the index, the free blocks and the cached blocks must agree."""
    wait_until_idle(engine)
    for name, pool in engine.pools.items():
        assert not any(pool.references), f"{name}: references are left"
        found = {block_key: block for block, block_key in enumerate(pool.key_of) if block_key is not None}
        assert found == pool.block_of, f"{name}: the index of blocks differs from their keys"
        assert set(found.values()) == set(pool.cached), f"{name}: cached blocks differ from blocks in the index"
        assert all(pool.free[block] == (block not in pool.cached) for block in range(pool.size))
    assert not engine.filling and not engine.running and not engine.waiting


class Oracle:
    """Chapter 01's answers. It also knows which tokens were ties: the two best logits differ by less than CLOSE."""

    CLOSE = 1e-4

    def __init__(self, model=None):
        self.model, self.known = model or tiny_model(), {}

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], list[bool]]:
        """Return (tokens, for each of them whether it was a tie)."""
        tokens, ties = self.known.get(tuple(prompt), ([], []))
        if len(tokens) < new:
            request, ties = Request(list(prompt), new), []
            request.sample = lambda logits: self.record(logits, ties)
            for _ in baseline.generate(self.model, request):
                pass
            assert len(ties) == len(request.new), "the oracle has not seen all logits"
            self.known[tuple(prompt)] = tokens, ties = request.new, ties
        return tokens[:new], ties[:new]

    def record(self, logits, ties: list[bool]) -> int:
        best = logits.topk(2)
        ties.append(bool(best.values[0] - best.values[1] < self.CLOSE))
        return int(best.indices[0])

    def judge(self, request: Request) -> str:
        """Compare a request's answer -> "equal", "wrong", or "tie" if it first differs at a tie."""
        tokens, ties = self.answer(request.tokens[: request.prompt_tokens], request.max_tokens)
        for ours, theirs, tie in zip(request.new, tokens, ties):
            if ours != theirs:
                return "tie" if tie else "wrong"
        return "equal" if len(request.new) == len(tokens) else "wrong"


checkpoint.keep_freed_memory()
ORACLE = Oracle()


def wrong_rows(engine) -> list[tuple]:
    """Return (block, layer, row) of hidden states in host memory that can be found but differ from the model's."""
    wrong, store = [], getattr(getattr(engine.lower_tier, "cache", None), "store", None)
    for block_key, block in store.pool.block_of.items() if store else ():
        tokens = []
        while block_key:
            tokens, block_key = [*block_key.tokens, *tokens], block_key.parent
        runner, inputs = paged.Runner(engine.model, 32), []
        request = Request(tokens, 1, table=runner.pool.allocate(runner.pool.num_blocks(len(tokens))))
        runner.forward([(request, len(tokens))], lambda *given, inputs=inputs: inputs.append(given[1]))
        for part, layer in zip(store.parts, engine.lower_tier.cache.layers):
            rows = inputs[layer][-store.pool.block_size :].unflatten(1, (-1, engine.lower_tier.cache.width))
            far = (part[block][:, None] - rows).abs().amax(-1).amin(-1)  # a rank has only some of the columns
            wrong += [(block, layer, row) for row in (far > 1e-2).nonzero().flatten().tolist()]
    return wrong
