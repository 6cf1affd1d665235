"""Lanes that are threads: of storage, of sorting, and of the modelled link (shell/modelled_link.py)."""
import math
import os
import queue
import threading
import time
import weakref
from contextlib import suppress

from common.link import Lane, Transfer, TransferError

HANGING = 1.0       # seconds after which a job hangs: its lane is given nothing that somebody waits for


class Worker(Lane):
    """A thread that does one thing after the other. A hung job ends with the process."""

    def __init__(self, name: str, wake=lambda: None, background=False):
        """`wake` is called when something is over. `background`: nobody waits for what this does."""
        super().__init__(name)
        self.wake, self.jobs, self.closed = wake, queue.SimpleQueue(), threading.Event()
        self.began = [math.inf]             # when what it does now did; infinite while it does nothing
        arguments = self.jobs, self.closed, self.began, wake, background   # not the lane: it may be forgotten
        self.thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.close = weakref.finalize(self, end, self.jobs, self.closed, self.thread)

    def submit(self, label: str, size: int, function, *arguments, model=None) -> Transfer:
        """Call function(*arguments) on the thread, and return a Transfer of `size` bytes that gets its value.
        `model`: when it says that what was begun at a time has arrived; until then the thread sleeps."""
        transfer = Transfer(self.name, label, size)
        self.on_their_way.append(transfer)
        self.jobs.put((transfer, model, function, arguments))
        if self.thread.ident is None:
            self.thread.start()
        self.settle()
        return transfer

    @property
    def hangs(self) -> bool:
        return time.perf_counter() - self.began[0] > HANGING


def work(jobs: queue.SimpleQueue, closed: threading.Event, began: list, wake, background: bool):
    """Do what a lane is given: its thread."""
    if background:      # take the processor only from who is idle, where threads have a priority of their own
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    free = 0.0          # when the lane is free, in the model
    while (job := jobs.get()) is not None:
        transfer, model, function, arguments = job
        start, error = max(transfer.issued, free), TransferError("cancelled")
        if not transfer.cancelled:
            transfer.start, began[0] = start, time.perf_counter()
            try:
                transfer.value, error = function(*arguments), None
            except Exception as raised:
                error = raised
            began[0], free = math.inf, time.perf_counter()
            if model and error is None:         # no model is faster than this memory
                free = max(free, model(start))
                closed.wait(max(0.0, free - time.perf_counter()))
        transfer.finish(start, max(start, free), error)
        transfer = function = arguments = model = job = error = None    # and what they hold
        wake()


def end(jobs: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread):
    """End a lane's thread: none may be inside PyTorch when the interpreter goes. What is modelled arrives."""
    closed.set()
    jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(HANGING)
