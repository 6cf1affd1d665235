"""Load or compute: how fast this machine is when nothing disturbs it, and what is worth loading.

A slow pass may be noise, a fast one cannot: so the fastest of the last passes counts. One pace, measured over
estimated, corrects all estimates for what goes on now."""

import math
import statistics
import time
from collections import deque
from functools import partial

from common.cache import Cache, Match, Restoration
from common.link import Speed
from common.requests import Interrupted, Line, Request
from common.timeline import Clock

WORTH = 0.8  # load what takes at most this share of computing: a load that turns out late costs both
PATIENCE = 60.0  # seconds that a request waits at most for its Cache, and for what --always-restore loads
FULL_SPEED = 128  # tokens: prefill from here on runs at its full speed, or nearly, on a CPU
SHORT = 64  # tokens: a prompt that says what launches take on a GPU
PACES = 1.0, 1.0  # believed at first, so that one bad restoration decides nothing
DOUBT = 0.1  # a restoration that takes longer than estimated by more than this share: measure again
AGAIN = 1.0  # seconds between two measurements of an idle engine that is still in doubt
ROWS = 512  # of a pass: enough for full speed
FEWEST, SPREAD = 8, 0.3  # layers of a measurement, and seconds over which they are spread
BEFORE_LAYER = 5e-3  # seconds of pause, as a restoration waits for each; without it is a third faster

# 1. Of this machine ----------------------------------------------------------------------------

def flops(config, start: int, end: int) -> float:
    """Floating-point operations of all layers for tokens start to end: two for each weight, and in attention
    two for each number of a key and of a value that a query head sees."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    seen = (end - start) * (start + end + 1) / 2  # pairs of a token and one that it sees
    return config.num_hidden_layers * (2 * weights * (end - start) + 4 * heads * seen)


def fastest_layer(run, device, interrupt=lambda: None, agree=None) -> float:
    """Call run(lap) again and again, which calls lap() before each layer -> seconds of the fastest layer.

    One undisturbed layer says as much as a pass, and is far more likely on a busy machine; so the measurement
    may end in the middle of a pass. `interrupt` may raise. `agree(mine)`: whether all ranks say so."""
    clock, until, seconds, marks = Clock(device), time.perf_counter() + SPREAD, [], []
    # The processor time of this thread, which takes part in all that PyTorch computes, stands still while
    # another process has the core. But ranks wait asleep for each other, and that counts
    mark = clock.mark if agree or clock.device.type == "cuda" else time.thread_time

    def lap(*_):
        interrupt()
        marks.append(mark())  # the end of a layer
        enough = len(seconds) + len(marks) // 2 > FEWEST and time.perf_counter() > until
        if agree(enough) if agree else enough:
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


# 2. Of an engine -------------------------------------------------------------------------------

class Estimates:
    """How long computing takes, on an undisturbed machine and now; and what is worth loading."""

    def __init__(self, always: bool = False):
        """`always`: load whatever is offered (--always-restore)."""
        self.always = always
        self.computing = Speed(0.0)  # FLOP/s of long prefills
        self.launches = 0.0  # seconds that a pass takes besides, on a GPU
        self.paces = deque(PACES, maxlen=8)  # of the last restorations, measured over estimated seconds
        self.agree = None  # agree(mine) -> what holds on all ranks (09)
        self.doubtful = True  # what was measured may be wrong: measure again when idle
        self.cold = True  # nothing was measured yet

    def attach(self, engine: Line, cache: Cache):
        self.engine, self.cache = engine, cache

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate for the prefill of tokens start to end; infinite until measured: restoring is tried."""
        passes = -(-(end - start) // self.engine.token_budget)
        return passes * self.launches + self.computing.seconds(flops(self.engine.model.config, start, end))

    def weigh(self, request: Request, match: Match) -> tuple[float, str]:
        """Load what was offered, or compute it, at its share of each step? -> the seconds that loading may
        take, which are those of computing, or 0: it is computed; and why."""
        load, start = statistics.median(self.paces) * match.seconds, request.computed
        compute = self.seconds_to_compute(start, start + match.tokens) / match.share
        mine = self.always or load <= WORTH * compute
        chosen, source = self.agree(mine) if self.agree else mine, " and ".join(match.found)
        if not chosen:  # a bad measurement or an old pace may be the reason
            self.doubtful = True
            self.paces.append(1.0)
        most = compute if compute < math.inf and not self.always else PATIENCE
        return most if chosen else 0.0, (
            f"{match.tokens} tokens offered ({source}): loading {1e3 * load:.1f} ms, computing "
            f"{1e3 * compute:.1f} ms: " + ("loaded" if chosen else "computed")
        )

    def patience(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens waits at most for its Cache."""
        return PATIENCE if self.always else min(self.seconds_to_compute(0, tokens), PATIENCE)

    # Learning from what happens

    def learn(self, work: list, seconds: float):
        """Note how fast a step was that did not wait. `work`: as after the step. Skipped on
        a GPU, where launch time distorts short steps."""
        waited = any(request.restoration for request, _ in work)
        if not (waited or self.launches) and sum(count for _, count in work) >= FULL_SPEED:
            spans = [(request.computed - count, request.computed) for request, count in work]
            self.computing.note(sum(flops(self.engine.model.config, *span) for span in spans), seconds)

    def learn_pace(self, restoration: Restoration):
        """Note how long a restoration took that was whole, and alone in the engine: work at it, and waiting
        for it. A GPU's host does not wait: there, from the first copy's start to the last one's end."""
        match, seconds = restoration.match, restoration.spent
        all_came = restoration.whole and restoration.limit == restoration.start and match.tokens >= FULL_SPEED
        alone = all(request is restoration.request for request in self.engine.running)
        if all_came and match.seconds and alone:
            if self.engine.model.device.type == "cuda" and restoration.passed:
                starts, ends = zip(*[transfer.span() for transfer in restoration.passed])
                seconds = max(ends) - min(starts)
            self.paces.append(max(1.0, seconds / match.seconds))
            self.doubtful |= self.paces[-1] > 1 + DOUBT

    # Measuring while nothing runs

    def idle(self) -> float | None:
        """Nothing runs: measure, if in doubt (at the start twice; after a refusal, a failure, a slow
        restoration) -> seconds until the next measurement, or None. Ranks measure once, together."""
        if self.doubtful and (self.cold or not self.agree):
            self.doubtful = self.cold
            try:
                self.cache.idle()
                self.measure_computing()
            except Interrupted:
                self.doubtful = True
                return 0.0
            self.cold, self.paces = False, deque(PACES, maxlen=8)
        return AGAIN if self.doubtful and not self.agree else None

    def measure_computing(self):
        """Compute a dummy prompt, if enough blocks are free; on a GPU also a short one, which takes little
        longer than its launches. Raises Interrupted when a request comes."""
        model, pool, on_gpu = self.engine.model, self.engine.pool, self.engine.model.device.type == "cuda"
        most = model.config.max_position_embeddings, pool.free.count(1) * pool.block_size
        tokens = min(max(FULL_SPEED, self.engine.token_budget), *most, math.inf if on_gpu else ROWS)
        if tokens < FULL_SPEED:
            return
        depth, rows = len(model.layers), SHORT if on_gpu else 0
        few, short = flops(model.config, 0, rows), depth * self.fastest_layer(rows) if rows else 0.0
        many, long = flops(model.config, 0, tokens), depth * self.fastest_layer(tokens)
        self.computing.forget()
        self.computing.note(many - few, max(long - short, long / 10))
        self.launches = max(0.0, short - self.computing.seconds(few))

    def fastest_layer(self, rows: int, history: int = 0) -> float | None:
        """Compute `rows` tokens behind a `history` -> seconds of a layer; None where too few blocks are free:
        measuring evicts nothing. Raises Interrupted when a request comes."""
        engine, pool, blocks = self.engine, self.engine.pool, self.engine.pool.num_blocks(history + rows)
        if pool.free.count(1) < blocks:
            return None
        table = pool.allocate(blocks)
        work = [(Request([0] * (history + rows), 1, table=table, computed=history), rows)]
        try:
            run = partial(engine.runner.forward, work)
            return fastest_layer(run, engine.model.device, engine.interrupt, self.agree)
        finally:
            pool.release(table)
