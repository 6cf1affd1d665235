"""Ranks: the processes that hold one model together. How they begin, what they tell each other, how they end.

    ranks = join()                    # in a process that `launch` or torchrun has started
    ranks.total(partial)              # sums over ranks
    ranks.gather(columns)             # puts rows together of which each rank has some columns
    ranks.least(numbers)              # agrees on the minimum of each number
    ranks.tell(message)               # what rank 0 says

Each of these is collective: all ranks call it, at the same point. A rank that is alone with one, because
another has ended or hangs, ends within TIMEOUT; and none outlives the process that has started it.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from common.requests import HungUp, Line, Request, Writer

BEAT = 1.0  # seconds between two agreements of an idle server
TIMEOUT = 5.0  # seconds that a rank waits for the others
LONG = 600.0  # where they do things that take them different times: reading a model, what rank 0 does alone
ALONE = 3  # exit code of a rank that has lost another
AFTER = 1.0  # seconds in which the others end by themselves, when one has ended badly


# 1. Collectives --------------------------------------------------------------------------------

class Ranks:
    """This process among those that hold one model together."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count, self.agreements = rank, count, 0
        if count > 1:
            seconds = timedelta(seconds=TIMEOUT)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=count, timeout=seconds)
            self.patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONG))

    def least(self, numbers: list[int]) -> list[int]:
        """Agree on the minimum over ranks of each number."""
        if self.count == 1:
            return numbers
        self.agreements += 1
        tensor = torch.tensor(numbers)  # on the host: nobody waits for a GPU
        with self.together():
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor.tolist()

    def all(self, true: bool) -> bool:
        """Whether it is true on all ranks."""
        return bool(self.least([int(true)])[0])

    def tell(self, message: bytes, size: int) -> bytes:
        """What rank 0 says: `size` bytes."""
        data = torch.frombuffer(bytearray(message or bytes(size)), dtype=torch.uint8)
        if self.count > 1:
            with self.together():
                dist.broadcast(data, 0)
        return bytes(data.tolist())

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place: the same bits on each."""
        if self.count > 1:
            with self.together():
                dist.all_reduce(partial)
        return partial

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """[T, D / n], the columns of this rank -> [T, D], in the order of ranks."""
        if self.count == 1:
            return columns
        gathered = columns.new_empty(self.count * len(columns), columns.shape[1])
        with self.together():
            # Before PyTorch 2.13 it had another name
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered, columns.contiguous())
        return gathered.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1)  # [n, T, D/n] -> [T, D]

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Equally many of each rank -> those of all."""
        if self.count == 1:
            return [own]
        tensors = [torch.empty(len(own), dtype=torch.uint8) for _ in range(self.count)]
        with self.together():
            dist.all_gather(tensors, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=self.patient)
        return [bytes(tensor.tolist()) for tensor in tensors]

    def meet(self):
        """Wait for all, and long: each has done something that takes its own time."""
        if self.count > 1:
            with self.together():
                dist.barrier(self.patient)

    @contextmanager
    def together(self):
        """What fails inside fails since another rank is gone: end too; the launcher says why."""
        try:
            yield
        except Exception:
            os._exit(ALONE)  # threads may wait for what will not come

    def end(self, words: str):
        """End this process, and so all."""
        print(words, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ALONE)


# 2. What rank 0 is asked ------------------------------------------------------------------------

class Everywhere:
    """The engine of a rank, as a server sees it: what rank 0 is asked all do, at the same point."""

    stream, generate = Line.stream, Line.generate

    def __init__(self, engine, ranks: Ranks, tokenizer=None):
        self.engine, self.cache, self.ranks, self.tokenizer = engine, engine.cache, ranks, tokenizer
        self.cache.command, self.closed = self.do, False
        self.lock, self.asked = threading.Lock(), 0
        self.known: dict[int, Request] = {}  # number -> Request, of those that are not over
        self.errors: dict[int, Exception] = {}  # number -> why it is cancelled

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request: Request):
        self.engine.check(request)
        names = "tokens", "max_tokens", "options", "temperature", "top_p", "top_k"
        fields = {name: getattr(request, name) for name in names}
        fields.update(seed=request.generator.initial_seed(), end_tokens=list(request.end_tokens))
        with self.lock:
            self.asked += 1
            self.known[self.asked] = request
            self.tell("submit", self.asked, fields, request.writer.stop if request.writer else None)

    def cancel(self, request: Request, error: Exception):
        for number, known in list(self.known.items()):
            if known is request:
                self.errors[number] = error
                self.tell("cancel", number)

    def evict(self, name: str = "device") -> int:
        before = self.engine.pools[name].evictions
        self.tell("evict", name)
        self.step()
        return self.engine.pools[name].evictions - before

    def close(self):
        self.tell("close")
        self.step()
        self.engine.close()

    def tell(self, *words):
        self.cache.commands.append(words)
        self.engine.wake.set()

    def do(self, words: list):
        """What rank 0 has said, on all ranks."""
        verb, *what = words
        if verb == "submit":
            number, fields, stop = what
            request = self.known.get(number)
            if request is None:  # on the other ranks
                writer = None if stop is None else Writer(self.tokenizer, stop)
                fields["end_tokens"] = frozenset(fields["end_tokens"])
                request = self.known[number] = Request(**fields, writer=writer)
            self.engine.submit(request)
        elif verb == "cancel" and what[0] in self.known:
            error = self.errors.pop(what[0], None) or HungUp("Rank 0 has cancelled it.")
            self.engine.cancel(self.known[what[0]], error)
        elif verb == "evict":
            self.engine.evict(*what)
        self.closed |= verb == "close"
        for number in [number for number, request in self.known.items() if request.outcome is not None]:
            del self.known[number]

    def step(self):
        """A step, or, while nobody asks, an agreement now and then: so all know that all are there."""
        if self.engine.busy:
            return self.engine.step()
        if self.ranks.rank == 0 and not self.cache.commands:
            self.engine.wake.wait(BEAT)
        self.engine.wake.clear()
        self.cache.poll()

    def follow(self):
        """On the other ranks: do what rank 0 says until it says that it is over."""
        while not self.closed:
            self.step()
        self.engine.close()


# 3. Beginning and ending -----------------------------------------------------------------------

def join() -> Ranks:
    """-> this process's rank, by the variables that `launch` and torchrun set; without, the only one."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        return Ranks()
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Ranks(rank, count)


def follow(parent: int):
    """End when the process is gone that has started this one."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(ALONE)


def launch(count: int, command: list[str]) -> int:
    """Run `command` as so many ranks -> the exit code. If one ends badly all do; a sentence says which."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = dict(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryFile() as words:  # what ranks other than the first have to say
        running = {}
        for rank in range(count):
            environment = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            quiet = dict(stdout=subprocess.DEVNULL, stderr=words) if rank else {}
            running[rank] = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
        try:
            return supervise(running, words)
        except KeyboardInterrupt:
            running[0].send_signal(signal.SIGINT)
            return running[0].wait(15)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def supervise(running: dict[int, subprocess.Popen], words) -> int:
    """Wait until all have ended, or, where one has ended badly, AFTER seconds longer -> the exit code."""
    first, until = None, float("inf")  # first: (exit code, rank) of the first that has ended badly
    while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
        time.sleep(0.05)
        codes = {rank: process.poll() for rank, process in running.items()}
        bad = [(code == ALONE, rank, code) for rank, code in codes.items() if code]  # not alone: the cause
        if bad and first is None:
            until = time.monotonic() + AFTER
        first = min(bad, default=None)
    if first is None:
        return 0
    alone, rank, code = first
    hung = [other for other, process in running.items() if process.poll() is None]
    if alone and hung:
        print(f"Rank {hung[0]} does not answer; all ranks have ended.", file=sys.stderr)
    elif code < 0:
        print(f"Rank {rank} was killed by signal {-code}; all ranks have ended.", file=sys.stderr)
    elif rank:
        words.seek(0)
        last = words.read().decode(errors="replace").strip().rpartition("\n")[2]
        last = re.sub(r"^\[rank\d+\]: ", "", last)  # of PyTorch
        print(f"Rank {rank} has ended ({last or code}); so have all.", file=sys.stderr)
    return code if code > 0 else 1
