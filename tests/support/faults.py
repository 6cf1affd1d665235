"""Inject faults into links and storage: copies that fail, are late, or write noise before they fail, and a back end
whose methods fail.

All Caches copy over a Link, so the faults work for every chapter."""

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from common.cuda_link import Link
from common.link import Transfer
from common.store import Storage
from shell.hardware import CheckedLink
from shell.modelled_link import ModelledLink

from .engines import both_ends

LANES = "load", "save", "storage"


class Faults:
    """The faults to inject, and counts of those injected.

    `failing`: share of copies that fail and copy nothing. `late`: share of copies that complete up to `delay` seconds
    late. `noisy`: after a failed copy, up to `noisy` copies of the same lane write NaN, late, and then fail, too.
    `lanes`: where faults are injected."""

    def __init__(self, rng: random.Random, failing=0.0, late=0.0, noisy=0, delay=0.02, lanes=LANES):
        self.rng, self.failing, self.late, self.noisy = rng, failing, late, noisy
        self.delay, self.lanes = delay, lanes
        self.broken = dict.fromkeys(lanes, 0)  # how many of the lane's next copies write noise
        self.failed = self.delayed = 0
        self.pending: list[threading.Timer] = []
        self.due = threading.Event()
        self.copies: list[tuple[Transfer, list, list]] = []  # (transfer, destinations, sources)

    def copy(self, link: Link, *what) -> Transfer:
        dst, src, label, pairs = *what, *[None] * (4 - len(what))
        dst = [dst] if isinstance(dst, torch.Tensor) else list(dst)
        src = [src] if isinstance(src, torch.Tensor) else list(src)
        if pairs:
            dst = [side[int(block)] for side in dst for block in pairs.to]
            src = [side[int(block)] for side in src for block in pairs.at]
        transfer = self.injected(link, dst, src, label) or COPY[type(link)](link, *what)
        self.copies = [copy for copy in self.copies if not copy[0].ready] + [(transfer, dst, src)]
        return transfer

    def injected(self, link: Link, dst: list, src: list, label: str) -> Transfer | None:
        if link.name not in self.lanes:
            return None
        if self.broken[link.name]:
            self.broken[link.name] -= 1
            return self.later(link, dst, None, label)
        draw = self.rng.random()
        if draw < self.failing:
            self.failed += 1
            self.broken[link.name] = self.rng.randrange(self.noisy + 1)
            transfer = Transfer(link.name, label, sum(piece.nbytes for piece in dst))
            transfer.finish(transfer.issued, transfer.issued, OSError("injected"))
            getattr(link, "wake", bool)()
            return transfer
        if draw < self.failing + self.late:
            self.delayed += 1
            return self.later(link, dst, src, label)
        return None

    def later(self, link: Link, dst: list, src: list | None, label: str) -> Transfer:
        """Write `src` to `dst` after a random delay; if `src` is None, write NaN and then fail."""
        transfer = Transfer(link.name, label, sum(piece.nbytes for piece in dst))

        @torch.inference_mode()
        def write():
            for index, piece in enumerate(dst):
                if src is None:
                    piece.fill_(float("nan") if piece.is_floating_point() else -1)  # with all bits set, as a float this is NaN too
                else:
                    piece.copy_(src[index])
            error = None if src is not None else OSError("injected, after noise")
            transfer.finish(transfer.issued, time.perf_counter(), error)
            getattr(link, "wake", bool)()  # a GPU's link has no `wake`

        timer = threading.Timer(self.delay * self.rng.random(), write)
        timer.daemon = True
        timer.start()
        self.pending = [*(other for other in self.pending if other.is_alive()), timer]
        return transfer

    def arrive(self):
        """Complete all late copies now, and make no more copies late."""
        self.late = 0.0
        self.due.set()
        for timer in self.pending:
            if not timer.finished.is_set():
                timer.cancel()
                timer.function()

    def read(self, storage: Storage, keys, into):
        draw = self.rng.random()
        if draw < self.failing:
            self.failed += 1
            for page in into:
                page.fill(-1)
            raise OSError("injected")
        if draw < self.failing + self.late:
            self.delayed += 1
            self.due.wait(self.delay * self.rng.random())
        READ[type(storage)](storage, keys, into)


COPY = {kind: kind.copy for kind in (CheckedLink, ModelledLink)}
READ = {kind: kind.read for kind in (Storage, both_ends.ModelledStorage)}


@contextmanager
def faulty(*args, **shares):
    """Context manager: inject faults into all links, and into reads of storage, and return the Faults."""
    faults = Faults(*args, **shares)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for kind in COPY:
                patch.setattr(kind, "copy", lambda link, *what: faults.copy(link, *what))
            for kind in READ if "storage" in faults.lanes else ():
                patch.setattr(kind, "read", lambda storage, keys, into: faults.read(storage, keys, into))
            yield faults
    finally:
        for timer in faults.pending:
            timer.join()


class Shelf:
    """A back end in memory.

    `open`: while it is not set, reads wait. `asked`: the number of keys of each read."""

    def __init__(self, secret=""):
        self.pages, self.asked, self.open, self.secret = {}, [], threading.Event(), secret
        self.index = self.pages
        self.open.set()

    def exists(self, keys):
        return [key in self.pages for key in keys]

    def get(self, keys):
        self.asked.append(len(keys))
        assert self.open.wait(60)
        return [self.pages.get(key) for key in keys]

    def set(self, keys, values):
        self.pages.update(zip(keys, values))

    def __len__(self):
        """The number of pages, except pages written by a measurement of speed."""
        return sum(bytes(range(64)) not in value for value in self.pages.values())

    @contextmanager
    def broken(self, method: str, fault: str):
        """Context manager: let one of the three methods fail; at the end, repair it.

        `fault`: a key of FAULTS; "hangs": until the end; "times out": each thread's first call raises, later calls hang."""
        does, repaired, seen = getattr(self, method), threading.Event(), set()

        def fails(*given):
            if fault == "hangs" or fault == "times out" and threading.get_ident() in seen:
                assert repaired.wait(60)
            seen.add(threading.get_ident())
            return does(*given) if fault == "hangs" else FAULTS[fault](does, *given)

        setattr(self, method, fails)
        yield
        setattr(self, method, does)
        repaired.set()


def changing(change):
    """Return a fault that applies `change` to each value that is written or read."""
    def fault(does, keys, *values):
        changed = [value and change(value) for value in (values[0] if values else does(keys))]
        return does(keys, changed) if values else changed

    return fault


# fault -> function(method, its arguments), called in place of the method
FAULTS = {
    "raises": lambda does, *given: 1 / 0,
    "times out": lambda does, *given: 1 / 0,
    "raises halfway": lambda does, *given: does(*(part[::2] for part in given)) or 1 / 0,
    "answers nothing": lambda does, *given: None,
    "loses all": lambda does, *given: does.__self__.pages.clear() or does(*given),
    "forgets": lambda does, keys, *values: [None] * len(keys),
    "swaps": lambda does, keys, *values: does(keys[::-1], *values),
    "cuts": changing(lambda value: value[: len(value) // 2]),
    "flips a bit": changing(lambda value: value[:-1] + bytes([value[-1] ^ 1])),
}
