"""Count what the host launches on a GPU to answer a question after its history. The GPU is emulated.

    python -m tests.support.launches

Models of 3 and of 7 layers give the launches per layer (kernels and replays of graphs), the launches besides, and the
copies by the copy engine. `eager`: without graphs. `scattered`: no two free blocks are adjacent."""

import random

import torch
import torch.nn.attention.bias  # imported before torch.cuda is emulated

from . import engines, streams, unordered

WAYS = {"02": "none", "03": "host", "04": "hidden", "05": "planned", "07": "tiered"}  # chapter -> its Cache
BLOCKS, HISTORY = 100, 320  # device blocks; tokens


def launched(way: str, depth: int, eager=False, scattered=False) -> tuple[int, int]:
    """Return (launches, copies of blocks) for the third question about a document, in a model of `depth` layers."""
    prompt = engines.draw(random.Random(8), HISTORY + 15)
    with streams.emulate("early") as gpu, unordered.measured_before():
        cache = engines.CACHES[WAYS[way]](BLOCKS)
        if way == "05":
            cache.asked = "R" + "H" * (depth // 2) + "K" * (depth // 2)
        engine = engines.make(cache, BLOCKS, model=engines.tiny_model(0, 2, "cuda", depth=depth))
        engine.runner.pieces = None if eager else engine.runner.pieces
        for pool in engine.pools.values() if scattered else ():
            pool.release(pool.allocate(pool.size)[::3])
        for _ in range(3):
            engines.wait_until_idle(engine)
            if way != "02":
                engine.evict("device")
            gpu.launches = 0
            gpu.copies.clear()
            request = engines.ask(engine, prompt, 1)
        assert request.cached_tokens == HISTORY
        return gpu.launches, sum(size >= 1 << 13 for _, size in gpu.copies)


def a_layer(way: str, **how) -> tuple[float, float, float]:
    """Return (launches per layer, copies per layer, launches besides)."""
    (few, copies), (many, more) = (launched(way, depth, **how) for depth in (3, 7))
    return (many - few) / 4, (more - copies) / 4, few - 3 * (many - few) / 4


def main():
    torch.set_num_threads(1)
    print("       launches a layer             launches    copies a layer")
    print("       eager  graphs  scattered     besides     graphs  scattered")
    for way in WAYS:
        hows = dict(eager=True), {}, dict(scattered=True)
        (eager, *_), (graphs, copies, besides), (scattered, others, _) = (a_layer(way, **how) for how in hows)
        print(f"{way:4}{eager:8.1f}{graphs:8.1f}{scattered:11.1f}{besides:12.0f}{copies:11.1f}{others:11.1f}")


if __name__ == "__main__":
    main()
