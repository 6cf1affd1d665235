"""Load or recompute: how fast this machine is, and whether a match is worth loading.

Speeds are measured once, before the first request, and learned from what happens afterwards. Noise only slows
a measurement, so the fastest of the last eight samples counts. A refused match yields no sample; therefore
every eighth refusal in a row is loaded all the same."""

import time
from collections import Counter
from itertools import cycle

import torch

from common.cache import Cache, Match
from common.link import Speed
from common.llama import attention
from common.requests import Line, Request
from common.timeline import Clock

WORTH = 0.8  # load what takes at most this share of computing: a load that turns out late costs both
PATIENCE = 60.0  # seconds that a request waits at most for its Cache, and for what --always-restore loads
FULL_SPEED = {"cpu": 128, "cuda": 512}  # rows of a step: from here on prefill runs at full speed, or nearly
TRY = 8  # every eighth refusal in a row is loaded all the same
ROWS = 512  # tokens of a measured layer
OPERATIONS = 5e10  # floating-point operations of a measurement, in 8 to 64 rounds
PAUSE = 5e-3  # seconds before a timed piece of work: a restoration waits before each layer, too

# 1. Of this machine ----------------------------------------------------------------------------

def flops(config, start: int, end: int) -> float:
    """Floating-point operations of all layers for tokens start to end: two for each weight, and in attention
    two for each number of a key and of a value that a query head sees."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    seen = (end - start) * (start + end + 1) / 2  # pairs of a token and one that it sees
    return config.num_hidden_layers * (2 * weights * (end - start) + 4 * heads * seen)


@torch.inference_mode()
def measure(model, *works) -> tuple[float, ...]:
    """Time each of `works`, functions without arguments, in turn with the prefill of a layer.

    The two are timed in the same moments, so their ratio holds on a busy machine, too.
    Returns: operations per second of prefill, and for each of `works` the number of prefill operations that
    take as long as one call."""
    config, device, layers = model.config, model.device, cycle(model.layers)
    rows = min(ROWS, config.max_position_embeddings)
    hidden = torch.randn(rows, config.hidden_size, device=device).to(model.dtype)  # [T, D]
    rotation = model.rotary(torch.arange(rows, device=device))  # [T, 1, hd] each
    operations = flops(config, 0, rows) / config.num_hidden_layers  # of one layer
    clock = Clock(device)
    # This thread's processor time stands still while another process has the core
    mark = clock.mark if device.type == "cuda" else time.thread_time

    def prefill():
        next(layers)(hidden, rotation, lambda q, k, v: attention(q, k, v, None))

    samples = []
    for _ in range(1 + int(min(64, max(8, OPERATIONS / operations)))):
        marks = []
        for work in prefill, *works:
            time.sleep(PAUSE * (work is not prefill))
            marks.append(mark())
            work()
            marks.append(mark())
        times = [*map(clock.seconds, marks)]
        samples.append([end - begin for begin, end in zip(times[::2], times[1::2])])
    # The first round touches memory, and has a GPU choose its kernels. No clock reads 0 for work
    computing, *others = (max(1e-9, min(taken)) for taken in zip(*samples[1:]))
    return operations / computing, *(operations * seconds / computing for seconds in others)


class Machine:
    """How fast this machine runs a model: measured once, and shared by all engines on that model."""

    def __init__(self, model):
        config, layers = model.config, cycle(model.layers)
        rows, device = min(ROWS, config.max_position_embeddings), model.device
        hidden = torch.randn(rows, config.hidden_size, device=device).to(model.dtype)  # [T, D]
        rotation = model.rotary(torch.arange(rows, device=device))  # [T, 1, hd] each
        slots = torch.randperm(rows, device=device)  # [T]
        shape = 2, rows, config.num_key_value_heads, config.head_dim
        memory = torch.empty(shape, dtype=model.dtype, device=device)  # [2, T, KVH, hd]

        def project():
            for side, made in zip(memory, next(layers).project_kv(hidden, rotation)):
                side.index_copy_(0, slots, made)

        self.fastest, operations = measure(model, project)  # operations per second of the fastest prefill
        self.projecting = operations / rows  # prefill operations for the projection of a layer's row


def machine_of(model) -> Machine:
    """Measure a model at its first use."""
    if not hasattr(model, "machine"):
        model.machine = Machine(model)
    return model.machine


# 2. Of an engine -------------------------------------------------------------------------------

class Estimates:
    """How long an engine computes, and what is worth loading."""

    def __init__(self, always: bool = False):
        """`always`: load whatever is offered (--always-restore)."""
        self.always = always
        self.refusals = Counter()  # source -> refused matches in a row

    def attach(self, engine: Line, cache: Cache):
        self.engine, self.cache, self.machine = engine, cache, machine_of(engine.model)
        self.computing = Speed(self.machine.fastest)  # operations per second of prefill

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate the prefill of tokens start to end."""
        return self.computing.seconds(flops(self.engine.model.config, start, end))

    def weigh(self, request: Request, match: Match) -> tuple[float, str]:
        """Load what was offered, or compute it, at its share of each step? -> the seconds that loading may
        take, which are those of computing, or 0: it is computed; and why."""
        start, source = request.computed, " and ".join(match.found)
        compute = self.seconds_to_compute(start, start + match.tokens) / match.share
        chosen = self.cache.agree(self.always or match.seconds <= WORTH * compute)
        self.refusals[source] = 0 if chosen else self.refusals[source] + 1
        match.trial = not chosen and self.refusals[source] % TRY == 0
        most, verdict = (PATIENCE if self.always else compute), "loaded"
        if not chosen:
            most, verdict = (compute / 10, "tried") if match.trial else (0.0, "computed")
        return most, (
            f"{match.tokens} tokens offered ({source}): loading {1e3 * match.seconds:.1f} ms, computing "
            f"{1e3 * compute:.1f} ms: {verdict}"
        )

    def patience(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens waits at most for its Cache."""
        return PATIENCE if self.always else min(self.seconds_to_compute(0, tokens), PATIENCE)

    def learn(self, work: list, seconds: float):
        """Learn from a step. `work`: as after the step; `seconds` that it has computed.

        A step of few rows, or one that also brings something back, is slower than a prefill; so it counts
        only if it was faster than what was believed."""
        spans = [(request.computed - count, request.computed) for request, count in work]
        speed = sum(flops(self.engine.model.config, *span) for span in spans) / max(seconds, 1e-9)
        alone = not any(request.restoration for request, _ in work)
        rows = sum(count for _, count in work)
        if alone and rows >= FULL_SPEED[self.engine.model.device.type] or speed > self.computing.value:
            self.computing.note(speed, 1.0)
        self.machine.fastest = max(self.machine.fastest, speed)
