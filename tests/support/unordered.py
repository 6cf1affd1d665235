"""Remove one of the guards that order copies and computation on a GPU, and count wrong answers. The GPU is emulated.

    python -m tests.support.unordered

An engine of chapter 03 reads a document. The document is evicted while it is still being copied out, and another
document gets its blocks. Then both are asked about. Each letter is an answer: `.` equals chapter 01's, `x` does not.
"""

import io
import random
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch

from common import cuda_link
from common.requests import Request, RequestError
from common.timeline import Clock
from shell.pieces import Pieces

from . import engines, streams


def hold_nothing(self, lane, transfers, *held, given=(), then=lambda arrived: None):
    """A Cache.hold that references no blocks."""
    for pool, blocks in given:
        pool.release(blocks)
    self.in_flight[lane].append((transfers, (), then))


def reads_padding(pieces, index, rows, *given, run=Pieces.run):
    """A Pieces.run that returns rows shifted by one, so that the last row is padding."""
    run(pieces, index, rows, *given)
    return pieces.inputs[index + 1, rows.start + 1 : rows.stop + 1]


# guard -> (the object that has it, replacements); the comments say what goes wrong without it
GUARDS = {
    # Copies are late: the question reads K and V of a layer before they have arrived
    "wait_event": ("common.cuda_link.CudaTransfer", dict(queue_wait=lambda transfer: True)),
    # (Chapter 04.) Compute is late: hidden states are copied out before the step has computed them
    "wait_stream": ("torch.cuda.Stream", dict(wait_stream=lambda stream, other: None)),
    # Copies are late: the next document overwrites blocks that are still being copied out
    "hold": ("common.cache.Cache", dict(hold=hold_nothing)),
    # Copies are late: blocks in host memory are found before their copy has completed. `span` is replaced, too, since it would wait
    "ready": ("common.cuda_link.CudaTransfer",
              dict(ready=property(lambda transfer: True), span=lambda transfer: (transfer.issued, transfer.issued))),
    # (Copies of temporary tensors.) The next tensor gets memory that a copy still reads
    "record_stream": ("torch.Tensor", dict(record_stream=lambda tensor, stream: None)),
    # (Chapter 04.) The next pass overwrites inputs of layers that are still being copied out
    "copied inputs": (engines.hidden_states.HiddenCache, dict(step_states=lambda cache, batch: cache.inputs)),
    # (Scattered blocks.) Compute is late: a kernel copies blocks out before they are written
    "kernels wait": ("torch.cuda.Stream", dict(wait_stream=lambda stream, other: None)),
    # (Scattered blocks.) Copies are late: a kernel reads host blocks that belong to another document now
    "kernels' memory": ("common.cache.Cache", dict(hold=hold_nothing)),
    # (Graphs.) Padding rows are taken for rows of the pass
    "padding": ("shell.pieces.Pieces", dict(run=reads_padding)),
}  # fmt: skip


def without(guard: str):
    """Context manager: remove a guard."""
    owner, instead = GUARDS[guard]
    return mock.patch.multiple(owner, **instead)


def pageable():
    """Context manager: make the allocation of pinned memory fail."""
    def refuse(*args, pin_memory=False, original=torch.empty, **options):
        if pin_memory:
            raise RuntimeError("no memory\ncan be pinned here")
        return original(*args, **options)

    return mock.patch.object(torch, "empty", refuse)


@contextmanager
def measured_before(speed: float = 1e9):
    """Context manager: links and processors have known speeds, so nothing is measured.

    `speed`: bytes per second of links, FLOP/s of the processor."""
    def measure(link):
        link.reap_completed()
        link.measured.samples.clear()
        link.measured.record(speed, 1.0)
        return speed

    machine = SimpleNamespace(fastest=speed, projecting=speed / 1e6, flops=lambda start, end: 1e6 * (end - start))
    with mock.patch.object(cuda_link.Link, "measure", measure), mock.patch.object(engines, "machine_of", lambda model: machine):
        yield


def scene(cache=None, scattered=False) -> str:
    """Ask about two documents that evict each other from the device. Returns: a letter for each answer.

    `scattered`: no two free blocks are adjacent."""
    rng, oracle, letters = random.Random(1), engines.Oracle(engines.tiny_model(3, 2)), ""
    cache, blocks = cache or engines.offload.HostCache(64), 24 if scattered else 8
    engine = engines.make(cache, blocks, model=engines.tiny_model(3, 2, "cuda"))
    for pool in engine.pools.values() if scattered else ():
        pool.release(pool.allocate(pool.size)[::3])
    engine.runner.pieces.check = lambda size: None  # the check would make the host wait and let copies complete
    documents = [engines.draw(rng, 70) for _ in range(2)]
    for number, settled in (0, False), (1, False), (0, True), (1, True), (0, False), (1, True):
        if settled:
            engines.wait_until_idle(engine)
        engine.evict("device")
        request = Request(documents[number] + engines.draw(rng, 4), 3)
        with suppress(RequestError):  # K and V that have not arrived may be NaN
            engine.generate([request])
        letters += "x" if oracle.judge(request) == "wrong" else "."
    engines.wait_until_idle(engine)
    engine.close()
    return letters


def kernels(rounds: int = 4) -> str:
    """Copy out scattered blocks that are still being computed. Returns: a letter for each round."""
    link, letters = cuda_link.Link("save", Clock("cuda")), ""
    device, host = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64, pin_memory=True)
    for number in range(1, rounds + 1):
        device.fill_(number)
        link.copy(host, device, "out", cuda_link.BlockPairs([6, 1, 3], [0, 2, 7])).wait()
        letters += "." if host[[6, 1, 3]].eq(number).all() else "x"
    return letters


def temporary(rounds: int = 5) -> str:
    """Copy out temporary tensors. Returns: a letter for each tensor."""
    link, hosts = cuda_link.Link("save", Clock("cuda")), [torch.empty(256, pin_memory=True) for _ in range(rounds)]
    for number, host in enumerate(hosts):
        link.copy(host, torch.full((256,), float(number), device="cuda"), "out")
        torch.full((256,), -1.0, device="cuda")  # may reuse the memory of the tensor above
    torch.cuda.synchronize()
    return "".join("." if host.eq(number).all() else "x" for number, host in enumerate(hosts))


SCENES = {
    "record_stream": temporary,
    "wait_stream": lambda: scene(engines.hidden_states.HiddenCache(64)), "kernels wait": kernels,
    "copied inputs": lambda: scene(engines.hidden_states.HiddenCache(64)),
    "kernels' memory": lambda: scene(engines.offload.HostCache(24), scattered=True),
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


if __name__ == "__main__":
    main()
