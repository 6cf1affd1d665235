"""Guards of order on a GPU: chapter 03 on the emulated device, with one of them taken away.

    python -m tests.support.unordered

A document is read, the device forgets it while it is still being copied out, another one takes its blocks,
and questions about both follow. Each letter is an answer: `.` is chapter 01's, `x` is not.
"""

import functools
import io
import random
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from unittest import mock

import torch

from common.link import CudaTransfer, Link
from common.restoring import Cache, Estimates

from . import engines, streams


def hold_nothing(self, lane, transfers, *held, given=(), then=lambda arrived: None):
    """Cache.hold, but blocks are free at once."""
    for pool, blocks in given:
        pool.release(blocks)
    self.under_way[lane].append((transfers, (), then))


# guard -> (owner, name, what is there instead, what goes wrong without it)
GUARDS = {
    "wait_event": (
        CudaTransfer, "queue_wait", lambda transfer: True,
        "Late copies: the question's rows read K and V of a layer before they have arrived."),
    "wait_stream": (
        streams.Stream, "wait_stream", lambda stream, other: None,
        "(Chapter 04.) States land in memory before queued steps have done with its former owner."),
    "hold": (
        Cache, "hold", hold_nothing,
        "Late: the next document is written to blocks that a copy out has still to read."),
    "ready": (
        CudaTransfer, "ready", property(lambda transfer: True),  # and nobody waits for its span
        "Late copies: blocks are found in host memory before their copy has written them."),
    "record_stream": (
        torch.Tensor, "record_stream", lambda tensor, stream: None,
        "(Copies of tensors that die.) The next tensor gets memory that a copy has still to read."),
}  # fmt: skip


@contextmanager
def without(guard: str):
    """Take a guard away until the end of the block."""
    owner, name, instead, _ = GUARDS[guard]
    if owner is streams.Stream:
        owner = torch.cuda.Stream  # on a GPU its own
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(owner, name, instead))
        if guard == "ready":
            span = lambda transfer: (transfer.issued, transfer.issued)  # noqa: E731
            stack.enter_context(mock.patch.object(owner, "span", span))
        yield


@contextmanager
def pageable():
    """Memory cannot be pinned."""
    original = torch.empty

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("no memory can be pinned here")
        return original(*args, **kwargs)

    with mock.patch.object(torch, "empty", refuse):
        yield


@contextmanager
def measured_before(speed: float = 1e9):
    """Links and processors know how fast they are, and measure nothing."""
    def measure(link, interrupt=lambda: None):
        link.settle()
        link.measured.forget()
        link.measured.note(speed, 1.0)
        return speed

    compute = lambda estimates: estimates.computing.note(speed, 1.0)  # noqa: E731
    with mock.patch.object(Link, "measure", measure):
        with mock.patch.object(Estimates, "measure_computing", compute):
            yield


def scene(cache=None, length: int = 70) -> str:
    """Ask about two documents that push each other off the device -> a letter for each answer."""
    rng, oracle, letters = random.Random(1), engines.Oracle(engines.tiny_model(3, 2)), ""
    cache = cache or engines.offload.HostCache(64)
    engine = engines.make(cache, 8, model=engines.tiny_model(3, 2, "cuda"))
    documents = [engines.draw(rng, length) for _ in range(2)]
    for number, settled in (0, False), (1, False), (0, True), (1, True), (0, False), (1, True):
        if settled:
            engines.settle(engine)
        engine.evict("device")
        request = engines.ask(engine, documents[number] + engines.draw(rng, 4), 3)
        letters += "x" if oracle.judge(request) == "wrong" else "."
    engines.settle(engine)
    engine.close()
    return letters


def temporary(rounds: int = 5) -> str:
    """Copy out tensors that are forgotten at once -> a letter for each."""
    lane, hosts = torch.cuda.Stream(), [torch.empty(256, pin_memory=True) for _ in range(rounds)]
    for number, host in enumerate(hosts):
        made = torch.full((256,), float(number), device="cuda")
        lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane):
            torch.cuda._sleep(10_000_000)
            host.copy_(made, non_blocking=True)
        made.record_stream(lane)
        del made  # the next one may get its memory
        torch.full((256,), -1.0, device="cuda")
    torch.cuda.synchronize()
    return "".join("." if host.eq(number).all() else "x" for number, host in enumerate(hosts))


SCENES = {"record_stream": temporary, "wait_stream": lambda: scene(engines.hidden_states.HiddenCache(64))}


def table() -> list[tuple]:
    """-> (what is missing, letters by schedule, how often the host waited for pageable memory)."""
    cases = {"": nullcontext, "pinned memory": pageable}
    cases |= {guard: functools.partial(without, guard) for guard in GUARDS}
    rows = []
    for case, context in cases.items():
        answers, waits = [], 0
        for schedule in streams.SCHEDULES:
            with streams.emulate(schedule) as gpu, context():
                answers.append(SCENES.get(case, scene)())
                waits += gpu.waits.count("pageable copy")
        rows.append((case, answers, waits))
    return rows


def main():
    torch.set_num_threads(1)
    with measured_before(), redirect_stderr(io.StringIO()):
        rows = table()
    heads = "".join(f"{schedule:>14}" for schedule in streams.SCHEDULES)
    print(f"{'without':14}{heads}  waits for copies")
    for case, answers, waits in rows:
        print(f"{case or '(nothing)':14}" + "".join(f"{letters:>14}" for letters in answers) + f"{waits:8}")
    print("\npinned memory: the host waits while the driver stages each copy: right, but nothing overlaps.")
    for guard, (*_, why) in GUARDS.items():
        print(f"{guard}: {why}")


if __name__ == "__main__":
    main()
