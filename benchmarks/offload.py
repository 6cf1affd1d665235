"""What the benchmarks on the frozen copies in legacy/ share beyond benchmarks/paged.py: contexts as long as the longest history, and
how time grows. (Chapter 03 itself: benchmarks/engine.py and benchmarks/planned.py.)"""
import dataclasses
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import paged as paged_benchmark  # noqa: E402
from common.llama import Rotary  # noqa: E402
from legacy import offload  # noqa: E402

HISTORIES, QUESTION = (256, 512, 1024, 2048, 4096), 16          # tokens


class Bench(paged_benchmark.Bench):
    """With a context long enough for the longest history: positions beyond the model's own are as good for timing."""

    def __init__(self, name: str, dtype: str, device: str, rounds: int, histories: tuple[int, ...] | None = None,
                 more: int = 2 * QUESTION):
        """`more`: tokens of context beyond the longest history."""
        histories = histories or HISTORIES
        super().__init__(name, dtype, device, rounds, histories)
        model, context = self.model, histories[-1] + more
        self.own_context = model.config.max_position_embeddings
        model.config = dataclasses.replace(model.config, max_position_embeddings=context)
        model.rotary.table = Rotary(model.config, dtype=model.dtype, device=model.device).table

    def engine(self, **options):
        """Both pools touched: pinned memory and a GPU's are there from the beginning, and a first touch takes its time."""
        engine = offload.Engine(self.model, self.tokenizer, frozenset(), **options)
        engine.pool.kv.zero_()
        engine.host.kv.zero_()
        return engine


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through the logarithms."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points))
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)
