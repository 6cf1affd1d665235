"""Guards of order on a GPU: chapter 03 on the emulated device, with one of them taken away.

    python -m tests.support.unordered

A document is read, the device forgets it while it is still being copied out, another one takes its blocks,
and questions about both follow. Each letter is an answer: `.` is chapter 01's, `x` is not.
"""

import io
import random
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch

from common import cuda_link, estimates
from common.requests import Request, RequestError
from common.timeline import Clock
from shell.pieces import Pieces

from . import engines, streams


def hold_nothing(self, lane, transfers, *held, given=(), then=lambda arrived: None):
    """Cache.hold, but blocks are free at once."""
    for pool, blocks in given:
        pool.release(blocks)
    self.in_flight[lane].append((transfers, (), then))


def reads_padding(pieces, index, rows, *given, run=Pieces.run):
    """A pass whose last layer's rows are read one row too late: the last one is nobody's."""
    run(pieces, index, rows, *given)
    return pieces.inputs[index + 1, rows.start + 1 : rows.stop + 1]


# guard -> (whose it is, what is there instead, what goes wrong without it)
GUARDS = {
    "wait_event": (
        "common.cuda_link.CudaTransfer", dict(queue_wait=lambda transfer: True),
        "Copies are late: the question's rows read K and V of a layer before they have arrived."),
    "wait_stream": (
        "torch.cuda.Stream", dict(wait_stream=lambda stream, other: None),
        "(Chapter 04.) Compute is late: states are copied out before the step has made them."),
    "hold": (
        "common.cache.Cache", dict(hold=hold_nothing),
        "Copies are late: the next document is written to blocks that a copy out has still to read."),
    "ready": (
        "common.cuda_link.CudaTransfer",  # and nobody waits for its span
        dict(ready=property(lambda transfer: True), span=lambda transfer: (transfer.issued, transfer.issued)),
        "Copies are late: blocks are found in host memory before their copy has written them."),
    "record_stream": (
        "torch.Tensor", dict(record_stream=lambda tensor, stream: None),
        "(Copies of tensors that die.) The next tensor gets memory that a copy has still to read."),
    "copied inputs": (
        engines.hidden_states.HiddenCache, dict(step_states=lambda cache, batch: cache.inputs),
        "(Chapter 04.) The next pass overwrites the inputs of layers that are still to leave."),
    "kernels wait": (
        "torch.cuda.Stream", dict(wait_stream=lambda stream, other: None),
        "(Scattered blocks.) Compute is late: a kernel copies out what is not written yet."),
    "kernels' memory": (
        "common.cache.Cache", dict(hold=hold_nothing),
        "(Scattered blocks.) Copies are late: a kernel reads host blocks that are another document's by now."),
    "padding": (
        "shell.pieces.Pieces", dict(run=reads_padding),
        "(Graphs.) Rows that nobody has computed in this pass are taken for its own."),
}  # fmt: skip


def without(guard: str):
    """-> a context in which a guard is missing."""
    owner, instead, _ = GUARDS[guard]
    return mock.patch.multiple(owner, **instead)


def pageable():
    """-> a context in which memory cannot be pinned."""
    def refuse(*args, pin_memory=False, original=torch.empty, **options):
        if pin_memory:
            raise RuntimeError("no memory\ncan be pinned here")
        return original(*args, **options)

    return mock.patch.object(torch, "empty", refuse)


@contextmanager
def measured_before(speed: float = 1e9):
    """Links and processors know how fast they are, and measure nothing."""
    def measure(link):
        link.reap_completed()
        link.measured.forget()
        link.measured.record(speed, 1.0)
        return speed

    machine = SimpleNamespace(fastest=speed, projecting=speed / 1e6)
    with mock.patch.object(cuda_link.Link, "measure", measure), mock.patch.object(estimates, "machine_of", lambda model: machine):
        yield


def scene(cache=None, length: int = 70) -> str:
    """Ask about two documents that push each other off the device -> a letter for each answer."""
    rng, oracle, letters = random.Random(1), engines.Oracle(engines.tiny_model(3, 2)), ""
    engine = engines.make(cache or engines.offload.HostCache(64), 8, model=engines.tiny_model(3, 2, "cuda"))
    engine.runner.pieces.check = lambda size: None  # it waits, and hurries copies
    documents = [engines.draw(rng, length) for _ in range(2)]
    for number, settled in (0, False), (1, False), (0, True), (1, True), (0, False), (1, True):
        if settled:
            engines.wait_until_idle(engine)
        engine.evict("device")
        request = Request(documents[number] + engines.draw(rng, 4), 3)
        with suppress(RequestError):  # what is not there yet may be NaN
            engine.generate([request])
        letters += "x" if oracle.judge(request) == "wrong" else "."
    engines.wait_until_idle(engine)
    engine.close()
    return letters


def scattered(cache) -> str:
    """The scene, on a device and a host of which no free block is beside another."""
    with mock.patch.object(engines.paged.BlockPool, "find_free", every_other):
        return scene(cache)


def every_other(pool, count: int, after, room) -> list[int]:
    free = [block for block, is_free in enumerate(pool.free) if is_free]
    return (free[::2] + free[1::2])[:count]


def kernels(rounds: int = 4) -> str:
    """Copy scattered blocks out that are still being computed -> a letter for each time."""
    link, letters = cuda_link.Link("save", Clock("cuda")), ""
    device, host = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64, pin_memory=True)
    for number in range(1, rounds + 1):
        device.fill_(number)
        link.copy(host, device, "out", cuda_link.BlockPairs([6, 1, 3], [0, 2, 7])).wait()
        letters += "." if host[[6, 1, 3]].eq(number).all() else "x"
    return letters


def temporary(rounds: int = 5) -> str:
    """Copy out tensors that are forgotten at once -> a letter for each."""
    link, hosts = cuda_link.Link("save", Clock("cuda")), [torch.empty(256, pin_memory=True) for _ in range(rounds)]
    for number, host in enumerate(hosts):
        link.copy(host, torch.full((256,), float(number), device="cuda"), "out")
        torch.full((256,), -1.0, device="cuda")  # may get the memory of the one before
    torch.cuda.synchronize()
    return "".join("." if host.eq(number).all() else "x" for number, host in enumerate(hosts))


SCENES = {
    "record_stream": temporary,
    "wait_stream": lambda: scene(engines.hidden_states.HiddenCache(64)), "kernels wait": kernels,
    "copied inputs": lambda: scene(engines.hidden_states.HiddenCache(64)),
    "kernels' memory": lambda: scattered(engines.offload.HostCache(8)),
}  # fmt: skip


def main():
    torch.set_num_threads(1)
    cases = {"(nothing)": nullcontext, "pinned memory": pageable}
    cases |= {guard: partial(without, guard) for guard in GUARDS}
    print(f"{'without':14}" + "".join(f"{schedule:>14}" for schedule in streams.SCHEDULES) + "  waits for copies")
    for case, context in cases.items():
        letters, waits = "", 0
        for schedule in streams.SCHEDULES:
            with measured_before(), redirect_stderr(io.StringIO()), streams.emulate(schedule) as gpu, context():
                letters += f"{SCENES.get(case, scene)():>14}"
            waits += gpu.waits.count("pageable copy")
        print(f"{case:14}{letters}{waits:8}")
    print("\npinned memory: the host waits while the driver stages each copy: right, but nothing overlaps.")
    for guard, (*_, why) in GUARDS.items():
        print(f"{guard}: {why}")


if __name__ == "__main__":
    main()
