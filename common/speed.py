"""How fast this machine is when nothing disturbs it. A slow pass may be noise, a fast one cannot: so the
fastest of the last passes counts. One pace corrects all estimates for what goes on now (restoring.py)."""

import time
from collections import deque

from common.timeline import Clock

LAST = 8  # passes that count
ROWS = 512  # of a pass: enough for full speed
FEWEST, SPREAD = 8, 0.3  # layers of a measurement, and seconds over which they are spread
BEFORE_LAYER = 5e-3  # seconds of pause, as a restoration waits for each; without it is a third faster


class Speed:
    """The speed of one kind of work, in units per second. `unmeasured`: that before the first pass."""

    def __init__(self, unmeasured: float):
        self.unmeasured, self.passes = unmeasured, deque(maxlen=LAST)

    def note(self, units: float, seconds: float):
        self.passes.append(units / seconds)

    def forget(self):
        self.passes.clear()

    @property
    def value(self) -> float:
        return max(self.passes, default=self.unmeasured)

    def seconds(self, units: float) -> float:
        """Estimate for so much work; infinite if the speed is 0."""
        return units / self.value if self.value else float("inf")


def fastest_layer(run, device, interrupt=lambda: None, agree=bool) -> float:
    """Call run(lap) again and again, which calls lap() before each layer -> seconds of the fastest layer.

    One undisturbed layer says as much as a pass, and is far more likely on a busy machine; so the measurement
    may end in the middle of a pass. `interrupt` may raise. `agree(mine)`: whether all ranks say so."""
    clock, until, seconds, marks = Clock(device), time.perf_counter() + SPREAD, [], []
    # The processor time of this thread, which takes part in all that PyTorch computes, stands still while
    # another process has the core. But ranks wait asleep for each other, and that counts
    alone_on_cpu = agree is bool and clock.device.type == "cpu"
    mark = time.thread_time if alone_on_cpu else clock.mark

    def lap(*_):
        interrupt()
        marks.append(mark())  # the end of a layer
        if agree(len(seconds) + len(marks) // 2 > FEWEST and time.perf_counter() > until):
            raise Enough
        time.sleep(BEFORE_LAYER)
        marks.append(mark())  # the beginning of the next one

    while True:
        try:
            run(lap)
            lap()
        except Enough:
            break
        finally:
            times = list(map(clock.seconds, marks))
            seconds += [end - begin for begin, end in zip(times[1::2], times[2::2])]
            marks.clear()
    return min(seconds[1:])  # the first one touches memory, and has a GPU choose its kernels


class Enough(Exception):
    """A measurement has what it needs."""


def flops(config, start: int, end: int) -> float:
    """Floating-point operations of all layers for tokens start to end: two for each weight, and in attention
    two for each number of a key and of a value that a query head sees."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    seen = (end - start) * (start + end + 1) / 2  # pairs of a token and one that it sees
    return config.num_hidden_layers * (2 * weights * (end - start) + 4 * heads * seen)
