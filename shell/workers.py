"""Worker threads: lanes that execute jobs in the background, and copies within host memory."""
import math
import os
import queue
import threading
import time
import weakref
from contextlib import suppress

import numpy
import torch

from common.link import INTEGERS, BlockPairs, Lane, Transfer, TransferError, paired

# A job that runs longer than HANG_SECONDS, plus a second for each SLOWEST bytes, is taken to hang, and no
# request may wait for its lane
HANG_SECONDS, SLOWEST = 1.0, 2e6


class Worker(Lane):
    """A thread that executes jobs one after the other. It is a daemon thread, so a job that hangs does not
    keep the process alive."""

    def __init__(self, name: str, wake=lambda: None, background=False):
        """`wake`: called after each job. `background`: run at the lowest priority, because no request waits
        for these jobs."""
        super().__init__(name)
        self.wake, self.jobs, self.closed = wake, queue.SimpleQueue(), threading.Event()
        # Start of the current job plus the seconds that its bytes may take; infinite while there is no job
        self.began = [math.inf]
        # Pass parts of `self`, since a thread that references `self` would keep it from being collected
        arguments = self.jobs, self.closed, self.began, wake, background
        self.thread = threading.Thread(target=run_jobs, args=arguments, daemon=True)
        self.close = weakref.finalize(self, stop_worker, self.jobs, self.closed, self.thread)

    def submit(self, label: str, size: int, function, *arguments, model=None) -> Transfer:
        """Call `function(*arguments)` on the thread.

        `size`: bytes, for the lane's speed. `model(start)`: the time at which modelled hardware would have
        completed a job that started at `start`. The transfer completes no earlier; the thread sleeps until
        then. Returns: a Transfer, whose `value` becomes the function's result."""
        transfer = Transfer(self.name, label, size)
        self.in_flight.append(transfer)
        self.jobs.put((transfer, model, function, arguments))
        if self.thread.ident is None:
            self.thread.start()
        self.reap_completed()
        return transfer

    @property
    def hangs(self) -> bool:
        """Whether the current job has been running for more than HANG_SECONDS, and longer than its bytes may
        take."""
        return time.perf_counter() - self.began[0] > HANG_SECONDS


def run_jobs(jobs: queue.SimpleQueue, closed: threading.Event, began: list, wake, background: bool):
    """The worker's thread: execute jobs until None comes. An exception fails the job's transfer, not the
    thread."""
    if background:      # yield the core to all other threads (Linux has a priority per thread)
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    free = 0.0          # when the modelled lane has completed its last job
    while (job := jobs.get()) is not None:
        transfer, model, function, arguments = job
        start, error = max(transfer.issued, free), TransferError("cancelled")
        if not transfer.cancelled:
            transfer.start, began[0] = start, time.perf_counter() + transfer.bytes / SLOWEST
            try:
                transfer.value, error = function(*arguments), None
            except Exception as raised:
                error = raised
            began[0], free = math.inf, time.perf_counter()
            if model and error is None:         # real copies may be slower than the model
                free = max(free, model(start))
                closed.wait(max(0.0, free - time.perf_counter()))
        transfer.finish(start, max(start, free), error)
        transfer = function = arguments = model = job = error = None    # free the tensors that they reference
        wake()


def stop_worker(jobs: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread):
    """Stop the worker's thread, and join it for at most HANG_SECONDS, because the thread must not be inside
    PyTorch when the interpreter exits."""
    closed.set()
    jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(HANG_SECONDS)


def move(dst: list[torch.Tensor], src: list[torch.Tensor], pairs: BlockPairs | None):
    """Copy in host memory on one core. NumPy copies on one core, while PyTorch would use all of them."""
    for pair in paired(dst, src, pairs):
        to, out_of = map(as_integers, pair)
        for first, at, count in pairs.runs if pairs else [(0, 0, len(to))]:
            numpy.copyto(to[first : first + count], out_of[at : at + count])


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """-> the tensor's memory as a NumPy array of integers, because NumPy has no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()
