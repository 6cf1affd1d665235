"""What holds a cache together on a GPU: chapter 03 on the emulated device, with one guard of order taken away.

    python -m tests.support.unordered

A document is read, the device forgets it while it is still being copied out, another one takes its blocks, and
questions about both follow. Each letter is an answer: `.` is chapter 01's, `x` is not.
"""

import random
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

from common import speed
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
        "The question's rows read K and V of a layer before its copy has brought them."),
    "wait_stream": (
        streams.Stream, "wait_stream", lambda stream, other: None,
        "A copy out reads blocks before the step has written them: what comes back was never computed."),
    "hold": (
        Cache, "hold", hold_nothing,
        "The next document is written to blocks that a copy out has still to read."),
    "ready": (
        CudaTransfer, "ready", property(lambda transfer: True),  # and nobody waits for its span
        "Blocks are found in host memory, and free on the device, before the copy has run."),
    "record_stream": (
        torch.Tensor, "record_stream", lambda tensor, stream: None,
        "Memory that a copy reads or fills is given to the next tensor as soon as its name is gone."),
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
    with mock.patch.object(Link, "measure", measure), mock.patch.object(Estimates, "measure_computing", compute):
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
    """-> (guard that is missing, letters by schedule, waits of the host in the questions)."""
    cases = {"": nullcontext, **{guard: lambda guard=guard: without(guard) for guard in GUARDS}, "pinned memory": pageable}
    rows = []
    for case, context in cases.items():
        answers = []
        for schedule in streams.SCHEDULES:
            with streams.emulate(schedule) as gpu, context():
                answers.append(SCENES.get(case, scene)())
        rows.append((case, answers, sum("pageable" in wait for wait in gpu.waits)))
    return rows


def main():
    torch.set_num_threads(1)
    speed.BEFORE_LAYER = speed.SPREAD = 0.0
    with measured_before():
        rows = table()
    print(f"{'without':15}" + "".join(f"{schedule:>13}" for schedule in streams.SCHEDULES) + "   host waits for copies")
    for case, answers, waits in rows:
        print(f"{case or '(nothing)':15}" + "".join(f"{letters:>13}" for letters in answers) + f"{waits:8}")
    print()
    for guard, (*_, why) in GUARDS.items():
        print(f"{guard}: {why}")
    print("pinned memory: the driver stages each copy, and the host waits for it. Nothing is wrong, and nothing overlaps.")


if __name__ == "__main__":
    main()
