"""The link: copies between device memory and host memory, beside the computation.

    link = Link("load", clock, bytes_per_second)       # one direction is one lane: first in, first out
    transfer = link.copy(dst, src, "layer 0")          # at once; the copying begins when the lane is free
    transfer.ready                                     # whether it has arrived; never waits
    transfer.wait()                                    # what is computed from here on sees the copy
    transfer.join()                                    # the host waits

With CUDA a lane is a stream, and `wait` makes the stream that computes wait, never the host. A copy begins only after
everything that was queued to compute when it was issued: so a load cannot overwrite what queued work still reads, and
a copy out sees what queued work still writes. That is the first half of the contract; the second is the caller's: no
buffer of a transfer may be used for anything else before `ready`.

Without CUDA both memories are ordinary memory, and the link is a model: a thread copies at once, and then sleeps until
bandwidth and latency say that the copy has arrived. Sleeping takes no processor time, so what is computed meanwhile
really overlaps. Everything printed about such a link calls it modelled.
"""
import queue
import statistics
import threading
import time
import weakref
from collections import OrderedDict, deque

import numpy
import torch

from common.checkpoint import ModelError
from legacy.app import bounded

# HCache (EuroSys '25), Table 2: peak 16-bit FLOP/s of a GPU, bytes/s of its PCIe link
PLATFORMS = {"a100": (312e12, 32e9), "a30": (165e12, 32e9), "4090": (330e12, 32e9), "l20": (120e12, 32e9), "h800": (990e12, 64e9)}
LLAMA_2_7B_HIDDEN = 4096
# Its section 6.1: on an A100, projection and transfer are even at 24 GB/s, so products run at this share of the peak.
SHARE_OF_PEAK = 4 * LLAMA_2_7B_HIDDEN ** 2 / (2 * LLAMA_2_7B_HIDDEN / 24e9) / 312e12            # 0.63
LATENCY = 10e-6                    # seconds, of a modelled transfer


class TransferError(Exception):
    """A copy that failed; `transfer` says which."""

    def __init__(self, transfer):
        super().__init__(f"The copy of {transfer.label} failed ({transfer.error}).")
        self.transfer = transfer


class Transfer:
    """One copy, of one or many pieces, on its way. A modelled one: `start` and `end` are seconds, set by the lane."""

    def __init__(self, lane: str, label: str, dst: list, src: list):
        self.lane, self.label, self.dst, self.src = lane, label, dst, src
        self.bytes = sum(piece.nbytes for piece in dst)
        self.issued, self.start, self.end, self.error = time.perf_counter(), None, None, None
        self.seconds = 0.0                                      # that a modelled one takes
        self.arrived = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether it is over, well or not."""
        return self.arrived.is_set()

    def wait(self):
        """What is computed from here on sees the copy. Raises TransferError."""
        self.join()
        if self.error is not None:
            raise TransferError(self)

    def join(self):
        """The host waits until it is over, well or not."""
        self.arrived.wait()

    def span(self) -> tuple[float, float]:
        """From when the lane was at it until it had arrived, in seconds of time.perf_counter(), once it is ready."""
        return self.start, self.end


class CudaTransfer(Transfer):
    """`start` and `end` are events on the lane's stream. An error is one of issuing the copy."""
    clock = None

    @property
    def ready(self) -> bool:
        return self.end.query()

    def wait(self):
        if self.error is not None:
            raise TransferError(self)
        torch.cuda.current_stream().wait_event(self.end)

    def join(self):
        self.end.synchronize()

    def span(self) -> tuple[float, float]:
        return self.clock.seconds(self.start), self.clock.seconds(self.end)


class Link:
    """One lane of the link. Without CUDA it is modelled, with `bytes_per_second` in this direction."""

    def __init__(self, lane: str, clock, bytes_per_second: float | None = None, latency: float = LATENCY):
        self.lane, self.clock, self.bytes_per_second, self.latency = lane, clock, bytes_per_second, latency
        self.modelled = clock.device.type != "cuda"
        self.on_their_way: deque[Transfer] = deque()
        self.lock = threading.Lock()                            # any thread may copy
        self.first_speed = bytes_per_second                     # of a real one, measured when it is asked for
        self.speeds: deque[float] = deque(maxlen=9)             # bytes/s, as noted
        if self.modelled:
            self.queue, closed = queue.SimpleQueue(), threading.Event()
            thread = threading.Thread(target=carry, args=(self.queue, closed), daemon=True)
            thread.start()
            weakref.finalize(self, close, self.queue, closed, thread)             # the thread ends with the link
        else:
            self.stream = torch.cuda.Stream()

    def copy(self, dst, src, label: str, after=None) -> Transfer:
        """Copy tensor `src` to `dst`, or a list of tensors to as many of the same shapes -> the Transfer, at once. A thread that
        does not compute passes `after`, a mark taken by the one that does: a real transfer waits for what was queued to compute
        up to there, not up to now. Raises ValueError if shapes or dtypes differ."""
        dst, src = ([pieces] if isinstance(pieces, torch.Tensor) else list(pieces) for pieces in (dst, src))
        if [(piece.shape, piece.dtype) for piece in dst] != [(piece.shape, piece.dtype) for piece in src]:
            raise ValueError(f"{label}: the two sides differ in shape or dtype")
        transfer = (Transfer if self.modelled else CudaTransfer)(self.lane, label, dst, src)
        if self.modelled:
            transfer.seconds = self.seconds(transfer.bytes)
            self.queue.put(transfer)
        else:
            with self.lock:
                self.issue(transfer, after)
        with self.lock:
            self.settle()
            self.on_their_way.append(transfer)
        return transfer

    def seconds(self, size: int) -> float:
        """That so many bytes take, as far as is known: exactly, if it is modelled, and memory is no slower."""
        return self.latency + size / (self.bytes_per_second if self.modelled else self.speed())

    def issue(self, transfer: CudaTransfer, after=None):
        transfer.clock = self.clock
        if after is None:
            self.wait_for_compute()
        else:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            transfer.start = self.clock.mark()
            try:
                for dst, src in zip(transfer.dst, transfer.src, strict=True):
                    for piece, source in pieces(dst, src, host_side=dst if src.is_cuda else src):
                        piece.copy_(source, non_blocking=True)
            except RuntimeError as error:
                transfer.error = error
            transfer.end = self.clock.mark()

    def wait_for_compute(self):
        """The lane begins when what is queued to compute is done: that may still read or write either side."""
        self.stream.wait_stream(torch.cuda.current_stream())

    def speed(self) -> float:
        """Bytes per second: the median of what was noted last, or else the model's, or what was measured once."""
        if self.first_speed is None:
            self.first_speed = self.measure()
        return statistics.median(self.speeds) if self.speeds else self.first_speed

    def note(self, transfers: list[Transfer]):
        """Transfers that were issued one after the other are over: so fast was the lane."""
        size, start, end = sum(transfer.bytes for transfer in transfers), transfers[0].span()[0], transfers[-1].span()[1]
        if size >= 1 << 16 and end > start:                     # a few bytes say nothing
            self.speeds.append(size / (end - start))

    def wear_out(self):
        """The oldest note goes. Who decides against the link learns nothing about it, and should not believe for ever."""
        if self.speeds:
            self.speeds.popleft()

    def backlog(self) -> int:
        """Bytes that were issued before and have not arrived."""
        with self.lock:
            self.settle()
            return sum(transfer.bytes for transfer in self.on_their_way)

    def settle(self):
        """Forget what has arrived. For who holds the lock."""
        while self.on_their_way and self.on_their_way[0].ready:
            self.on_their_way.popleft()

    def measure(self) -> float:
        """Copy more and more until it takes 2 ms, three times each -> bytes per second of the largest."""
        size, seconds = 16, 0.0
        while seconds < 2e-3 and size < 1 << 28:
            size, spans = size * 4, []
            device = torch.zeros(size, dtype=torch.uint8, device=self.clock.device)
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=not self.modelled)
            for _ in range(3):
                transfer = self.copy(*((host, device) if self.lane == "save" else (device, host)), "measurement")
                transfer.join()
                start, end = transfer.span()
                spans.append(end - start)
            seconds = statistics.median(spans)
        return size / seconds

    def __str__(self):
        if self.modelled:
            return f"modelled link, {self.bytes_per_second / 1e9:.3g} GB/s"
        return f"link, {self.speed() / 1e9:.1f} GB/s"


class RowBuffer:
    """Rows [rows, D] that are taken in runs, in a ring, and given back in any order. Threads may share it."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.next, self.lock = memory, 0, threading.Lock()
        self.taken: OrderedDict[int, bool] = OrderedDict()      # first row of a run -> whether it was given back; oldest first

    def take(self, count: int) -> int | None:
        """-> the first of `count` rows that follow each other, or None while there is no room for them."""
        with self.lock:
            oldest = next(iter(self.taken), None)
            if oldest is None:
                first, end = 0, len(self.memory)
            elif self.next <= oldest:                           # equal: full
                first, end = self.next, oldest
            elif self.next + count <= len(self.memory):
                first, end = self.next, len(self.memory)
            else:
                first, end = 0, oldest
            if first + count > end:
                return None
            self.taken[first], self.next = False, first + count
            return first

    def give_back(self, first: int):
        """The run that begins at row `first`."""
        with self.lock:
            self.taken[first] = True
            while self.taken and next(iter(self.taken.values())):
                self.taken.popitem(last=False)


def carry(lane: queue.SimpleQueue, closed: threading.Event):
    """The thread of a modelled lane: copies each transfer, then sleeps until the model says that it has arrived."""
    free = 0.0                                                  # when the lane is free, in the model
    while (transfer := lane.get()) is not None:
        transfer.start = max(transfer.issued, free)
        try:
            for dst, src in zip(transfer.dst, transfer.src, strict=True):
                move(dst, src)
        except Exception as error:
            transfer.error = error
        free = max(transfer.start + transfer.seconds, time.perf_counter())      # no model is faster than this memory
        closed.wait(max(0.0, free - time.perf_counter()))
        transfer.end = free
        transfer.arrived.set()
        transfer = dst = src = None                             # and what it held


def close(lane: queue.SimpleQueue, closed: threading.Event, thread: threading.Thread):
    """Let the thread of a lane end, at the latest when the process does; what is still on its way arrives at once."""
    closed.set()
    lane.put(None)
    if thread is not threading.current_thread():
        thread.join(5)


def move(dst: torch.Tensor, src: torch.Tensor):
    """Copy in ordinary memory with one processor core: NumPy takes no other, where torch would take all of them."""
    numpy.copyto(as_integers(dst), as_integers(src))


def as_integers(tensor: torch.Tensor) -> numpy.ndarray:
    """The same memory for NumPy, which knows no bfloat16."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).numpy()


def pieces(dst: torch.Tensor, src: torch.Tensor, host_side: torch.Tensor):
    """The largest pieces that are contiguous on the host's side. The device puts strided memory together by itself, but
    on the host that would be done first, and in pageable memory."""
    if host_side.is_contiguous():
        yield dst, src
    else:
        for triple in zip(dst, src, host_side, strict=True):
            yield from pieces(*triple)


# How fast the modelled link is -----------------------------------------------------------------------------------

def add_arguments(parser):
    parser.add_argument("--link", type=speed, default="auto", metavar="GB/S",
                        help="without a GPU, the modelled link's speed; auto (default): as fast for this model on this "
                             "processor as PCIe is for Llama-2-7B on --platform")
    parser.add_argument("--platform", choices=PLATFORMS, default="a100", help="the GPU that --link auto resembles (default a100)")


def speed(string: str) -> float | str:
    """An argparse type: auto, or GB/s."""
    return string if string == "auto" else bounded(float, 1e-9, 1e6)(string)


def bandwidth(model, asked: float | str = "auto", platform: str = "a100", device=None) -> float | None:
    """-> bytes per second of the modelled link; None with CUDA, where the link is real. `device`, if the model is not on
    it: the one that computes. Raises ModelError."""
    if (device or model.device).type == "cuda":
        if asked != "auto":
            raise ModelError("--link models a link on machines without a GPU, and here is one; leave it out.")
        return None
    return asked * 1e9 if asked != "auto" else like(platform, model)


def projection_over_transfer(platform: str) -> float:
    """How much longer Llama-2-7B takes on `platform` to project a layer's hidden states than to transfer them."""
    peak, pcie = PLATFORMS[platform]
    return (4 * LLAMA_2_7B_HIDDEN ** 2 / (SHARE_OF_PEAK * peak)) / (2 * LLAMA_2_7B_HIDDEN / pcie)


def like(platform: str, model, tokens: int = 512, rounds: int = 7) -> float:
    """-> the bytes per second at which a layer's hidden states take, against their projection to K and V on this
    processor, what they take for Llama-2-7B on `platform`."""
    tokens = min(tokens, model.config.max_position_embeddings)
    hidden = torch.randn(tokens, model.config.hidden_size).to(model.dtype)                       # [T, D]
    positions, seconds = torch.arange(tokens), []
    with torch.inference_mode():
        for _ in range(rounds):
            for layer in model.layers[:4]:
                began = time.perf_counter()
                layer.project_kv(hidden, positions)
                seconds.append(time.perf_counter() - began)
    projection = min(seconds)                                   # what else this machine does, it did least then
    return projection_over_transfer(platform) * hidden.nbytes / projection
