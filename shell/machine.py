"""Measure how fast this machine runs a model: the prefill of a layer, and the projection of a layer's K and
V.

The two are timed in turn, so that their ratio is right even on a busy machine. Noise only ever makes a sample
slower, so the fastest of several samples counts."""

import time
from functools import partial
from itertools import cycle

import torch

from common.llama import attention
from common.timeline import Clock

ROWS = 512  # tokens in each measured pass
OPERATIONS = 1e10  # floating-point operations of a whole measurement, which has 6 to 16 rounds
# Seconds to sleep before each call of a measured work, because a restoration also waits before each layer
PAUSE = 5e-3


def flops(config, start: int, end: int) -> float:
    """Count the floating-point operations of all layers for tokens [start, end).

    For each token, each weight takes two operations. In attention, each query head reads a key and a value
    for each token that it attends to, and each of their numbers takes two operations."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    seen = (end - start) * (start + end + 1) / 2  # pairs of a token and a token that it attends to
    return config.num_hidden_layers * (2 * weights * (end - start) + 4 * heads * seen)


def inputs(model) -> tuple:
    """-> random inputs of a layer for ROWS rows: hidden states [T, D], and the rotation of their
    positions."""
    rows = min(ROWS, model.config.max_position_embeddings)
    hidden = torch.randn(rows, model.config.hidden_size, device=model.device).to(model.dtype)  # [T, D]
    return hidden, model.rotary(torch.arange(rows, device=model.device))  # [T, 1, hd] each


@torch.inference_mode()
def measure(model, *works) -> tuple[float, ...]:
    """Time each of `works`, which are functions without arguments, in turn with the prefill of one layer.

    Returns: the speed of prefill, in operations per second; and for each of `works` the time of one call, as
    the number of prefill operations that take as long."""
    layers, (hidden, rotation), clock = cycle(model.layers), inputs(model), Clock(model.device)
    operations = flops(model.config, 0, len(hidden)) / len(model.layers)  # of one layer
    # Without a GPU, use the thread's processor time, which does not advance while another process has the
    # core
    mark = clock.mark if model.device.type == "cuda" else time.thread_time

    def prefill():
        next(layers)(hidden, rotation, lambda q, k, v: attention(q, k, v, None))

    samples = []
    for _ in range(1 + int(min(16, max(6, OPERATIONS / operations)))):
        marks = []
        for work in prefill, *works:
            time.sleep(PAUSE * (work is not prefill))
            marks.append(mark())
            work()
            marks.append(mark())
        times = [*map(clock.seconds, marks)]
        samples.append([end - begin for begin, end in zip(times[::2], times[1::2])])
    # Skip the first round, which is slower: it touches new memory, and selects a GPU's kernels. `max` avoids
    # a division by 0
    computing, *others = (max(1e-9, min(taken)) for taken in zip(*samples[1:]))
    return operations / computing, *(operations * seconds / computing for seconds in others)


def projection(model):
    """-> a function that projects ROWS rows in one layer to K and V, and stores them in scattered slots."""
    layers, (hidden, rotation) = cycle(model.layers), inputs(model)
    slots = torch.randperm(len(hidden), device=model.device)  # [T]
    shape = 2, len(hidden), model.config.num_key_value_heads, model.config.head_dim
    memory = hidden.new_empty(shape)  # [2, T, KVH, hd]

    def project():
        for side, made in zip(memory, next(layers).project_kv(hidden, rotation)):
            side.index_copy_(0, slots, made)

    return project


class Machine:
    """The speed of this machine with one model. It is measured once, and shared by all engines of that
    model."""

    def __init__(self, model):
        self.flops = partial(flops, model.config)
        self.fastest, operations = measure(model, projection(model))  # prefill operations per second
        # How many prefill operations take as long as projecting one row in one layer
        self.projecting = operations / min(ROWS, model.config.max_position_embeddings)


def machine_of(model) -> Machine:
    """-> the Machine of a model, measured at the first call."""
    if not hasattr(model, "machine"):
        model.machine = Machine(model)
    return model.machine


@torch.inference_mode()
def projected_rows(model) -> float:
    """Measure how many rows per second all threads together project in one layer.

    The measured work runs on one thread, and its processor time counts. So other processes do not change the
    result, although they change how long the same work takes on several threads."""
    threads, project, times = torch.get_num_threads(), projection(model), []
    torch.set_num_threads(1)
    try:
        for _ in range(12):
            began = time.thread_time()
            project()
            times.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return threads * min(ROWS, model.config.max_position_embeddings) / min(times)
