"""The link of a GPU: one stream per direction, pinned memory, events."""
import time
import weakref

import torch

from common.link import BlockPairs, Lane, Transfer, as_lists, host_memory, paired


class CudaTransfer(Transfer):
    """A transfer that starts and ends with events on the lane's stream. Queued GPU work always completes, so
    `wait` ignores its timeout."""

    @property
    def ready(self) -> bool:
        return self.end.query()

    def wait(self, seconds: float | None = None):
        self.end.synchronize()
        self.check()

    def queue_wait(self) -> bool:
        self.check()
        torch.cuda.current_stream().wait_event(self.end)
        return True

    def span(self) -> tuple[float, float]:
        return self.clock.seconds(self.start), self.clock.seconds(self.end)


class Link(Lane):
    """One direction of the link between a GPU and host memory."""

    measured_from = 1 << 16     # bytes
    modelled, hangs = False, False

    def __init__(self, name: str, clock, stream=None):
        super().__init__(name)
        self.clock, self.stream = clock, stream or torch.cuda.Stream()
        self.close = weakref.finalize(self, self.stream.synchronize)    # no copy is in flight afterwards

    def copy(self, dst, src, label: str, pairs: BlockPairs | None = None) -> Transfer:
        """Copy a tensor, or each tensor of a list, to one of the same shape. With `pairs`, copy src[at] to
        dst[to] of each."""
        dst, src = as_lists(dst, src)
        size = sum((to[: len(pairs.to)] if pairs else to).nbytes for to in dst)
        transfer = CudaTransfer(self.name, label, size)
        transfer.clock = self.clock
        transfer.host = [side for side in (*dst, *src) if not side.is_cuda]     # keep it until the copy ends
        before = self.in_flight[-1] if self.in_flight else None
        if not (pairs and pairs.ordered):
            self.stream.wait_stream(torch.cuda.current_stream())    # after all work that is queued now
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark() if before is None or before.ready else before.end
            try:
                for to, out_of in paired(dst, src, pairs):
                    (to if to.is_cuda else out_of).record_stream(self.stream)
                    if pairs:
                        self.copy_blocks(to, out_of, pairs)
                    else:
                        to.copy_(out_of, non_blocking=True)
            except Exception as refused:
                transfer.error = refused
            transfer.end = self.clock.mark()
        if pairs:
            pairs.ordered = pairs.apart
        self.in_flight.append(transfer)
        self.reap_completed()
        return transfer

    def copy_blocks(self, to: torch.Tensor, out_of: torch.Tensor, pairs: BlockPairs):
        """Queue a copy of blocks on the link's stream: one call for each run of blocks that are adjacent on
        both sides. (shell/copy_kernels.py has a faster way for scattered blocks.)"""
        for first, at, count in pairs.runs:
            to[first : first + count].copy_(out_of[at : at + count], non_blocking=True)

    def landing(self, shape, dtype) -> torch.Tensor:
        """Allocate device memory for a copy to write to. It belongs to the lane's stream, so that the copy
        need not wait for the computation."""
        with torch.cuda.stream(self.stream):
            made = torch.empty(shape, dtype=dtype, device=self.clock.device)
        made.record_stream(torch.cuda.current_stream())     # this stream will read it
        return made

    def measure(self) -> float:
        """Measure bandwidth and latency. Returns: bytes per second."""
        device = torch.zeros(1 << 26, dtype=torch.uint8, device=self.clock.device)
        host = host_memory(device.shape, torch.uint8, self.clock.device, "The buffer of a measurement")
        sides = (host, device) if self.name == "save" else (device, host)
        for size in 1, 1, len(host), len(host):     # the first copy of each size is slower
            began = time.perf_counter()
            self.copy(*(side[:size] for side in sides), "measurement").wait()
            self.latency = time.perf_counter() - began if size == 1 else self.latency
        self.reap_completed()
        return self.measured.value

    def __str__(self):
        return f"link, {self.speed() / 1e9:.1f} GB/s"
