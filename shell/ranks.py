"""Ranks: the processes that hold one model together. How they begin, what they tell each other, how they end.

Most methods of Ranks are collective: all ranks call them, at the same point. A rank that is alone with one,
because another has ended or hangs, ends within TIMEOUT; and none outlives the process that has started it by
more than BEAT.
"""
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from datetime import timedelta
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from common import requests
from common.requests import Line, Request
from shell import end
from shell.frontend import Writer

BEAT = 1.0          # seconds between two agreements of an idle server, and between two looks for the parent
TIMEOUT = 5.0       # seconds that a rank waits for the others in a collective
MEETING = 600.0     # and in `meet`: reading a model, or what rank 0 does alone, takes them different times
ALONE = 3           # exit code of a rank that has lost another
AFTER = 1.0         # seconds in which the reason of an end becomes known

# 1. Collectives ---------------------------------------------------------------------------------------------

class Ranks:
    """This process among those that hold one model together."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count, self.agreements = rank, count, 0
        if count > 1:
            dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=MEETING))
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT))

    def least(self, numbers: list[int]) -> list[int]:
        """Agree on the minimum over ranks of each number."""
        self.agreements += 1
        tensor = torch.tensor(numbers)              # on the host: nobody waits for a GPU
        self.together(dist.all_reduce, tensor, dist.ReduceOp.MIN)
        return tensor.tolist()

    def all(self, true: bool) -> bool:
        """Agree whether it is true on all ranks."""
        return bool(self.least([int(true)])[0])

    def tell(self, message: bytes, size: int) -> bytes:
        """Return rank 0's message of `size` bytes."""
        data = torch.frombuffer(bytearray(message or bytes(size)), dtype=torch.uint8)
        self.together(dist.broadcast, data, 0)
        return bytes(data.tolist())

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place: the same bits on each."""
        self.together(dist.all_reduce, partial)
        return partial

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """[T, D / n], the columns of this rank -> [T, D], in the order of ranks."""
        if self.count == 1:
            return columns
        gathered = columns.new_empty(self.count, *columns.shape)
        self.together(dist.all_gather, list(gathered), columns.contiguous())
        return gathered.transpose(0, 1).flatten(1)                                  # [n, T, D/n] -> [T, D]

    def meet(self):
        """Wait for all, up to MEETING."""
        self.together(dist.barrier, group=dist.group.WORLD)

    def together(self, collective, *arguments, group=None):
        """Call a collective; it fails where another rank has ended or hangs, and then end too."""
        if self.count > 1:
            try:
                collective(*arguments, group=group or self.group)
            except RuntimeError as error:
                if "Timed out" not in str(error):   # one has ended, and `run` says how
                    time.sleep(10 * AFTER)
                end(ALONE, "A rank does not answer; all ranks have ended.")


# 2. What rank 0 is asked ------------------------------------------------------------------------------------

class Everywhere:
    """The engine of a rank, as a server sees it: what rank 0 is asked all do, at the same point."""

    generate = Line.generate

    def __init__(self, engine, tokenizer=None):
        self.engine, self.cache, self.tokenizer = engine, engine.behind.cache, tokenizer
        self.ranks, self.closed, self.stepping = self.cache.ranks, False, False
        self.cache.command = self.do
        self.known = WeakValueDictionary()          # id() on rank 0 -> Request

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request: Request):
        self.engine.check(request)
        names = "tokens", "max_tokens", "options", "temperature", "top_p", "top_k"
        fields = {name: getattr(request, name) for name in names}
        fields |= dict(seed=request.generator.initial_seed(), end_tokens=list(request.end_tokens))
        written = request.writer and (request.writer.stop, request.writer.before)
        self.known[id(request)] = request
        self.tell("submit", request, fields, written)

    def cancel(self, request: Request, error: requests.RequestError):
        self.tell("cancel", request, type(error).__name__, str(error))

    def evict(self, name: str = "device") -> int:
        before = self.engine.pools[name].evictions
        self.tell("evict", name)
        self.step()
        return self.engine.pools[name].evictions - before

    def close(self):
        if not self.stepping:       # else Ctrl-C has left a step that others are still in: end at once
            self.tell("close")
            self.follow()

    def tell(self, *words):
        self.cache.commands.append(words)
        self.engine.wake.set()

    def do(self, verb: str, name=None, *more):
        """Do what rank 0 has said, on all ranks."""
        request = self.known.get(name)
        if verb == "submit":
            fields, written = more
            if self.ranks.rank:
                writer = written and Writer(self.tokenizer, *written)
                request = self.known[name] = Request(**fields, writer=writer)
            self.engine.submit(request)
        elif verb == "cancel" and request and request.outcome is None:
            kind, words = more
            self.engine.cancel(request, getattr(requests, kind)(words))
        elif verb == "evict":
            self.engine.evict(name)
        self.closed |= verb == "close"

    def step(self):
        """Step, or, while nobody asks, agree now and then: so all know that all are there."""
        self.stepping = True
        if self.engine.busy:
            self.engine.step()
        else:
            if self.ranks.rank == 0 and not self.cache.commands:
                self.engine.wake.wait(BEAT)
            self.engine.wake.clear()
            self.cache.poll()
        self.stepping = False

    def follow(self):
        """Do what rank 0 says until it says that it is over."""
        while not self.closed:
            self.step()
        self.engine.close()
        self.ranks.meet()


# 3. Beginning and ending ------------------------------------------------------------------------------------

def join(count: int) -> Ranks:
    """Return this process's rank: the one that torchrun or rank 0 has started it as, or rank 0 of `count`."""
    if "RANK" not in os.environ:
        start(count)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        parent = int(os.environ.get("RANK_PARENT", os.getppid()))
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    if (gpu := int(os.environ.get("LOCAL_RANK", rank))) < torch.cuda.device_count():
        torch.cuda.set_device(gpu)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    ranks = Ranks(rank, count)
    if rank:        # an exception ends it without waiting for PyTorch's threads, which may abort
        sys.excepthook = lambda *error: end(1, "".join(traceback.format_exception(*error)).rstrip())
    return ranks


def end_with(parent: int):
    """On a thread of another rank: end when the process is gone that has started this one."""
    while os.getppid() == parent:
        time.sleep(BEAT)
    os._exit(ALONE)


def start(count: int):
    """Make this process rank 0, and start the others by its own command line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE=str(count),
                      RANK_PARENT=str(os.getpid()), OMP_NUM_THREADS=str(torch.get_num_threads()))
    for rank in range(1, count):
        threading.Thread(target=run, args=(rank, {**os.environ, "RANK": str(rank)}), daemon=True).start()


def run(rank: int, environment: dict):
    """On a thread of rank 0: run another rank, and when it has ended badly, say so, and end."""
    output = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    command = [sys.executable, *sys.orig_argv[1:]]
    done = subprocess.run(command, env=environment, start_new_session=True, **output)   # Ctrl-C is rank 0's
    if (code := done.returncode) not in (0, ALONE):
        time.sleep(AFTER)           # rank 0 may have the same to say
        last = done.stderr.strip().rpartition("\n")[2]
        how = f"was killed by signal {-code}" if code < 0 else f"has ended ({last})"
        end(ALONE, f"Rank {rank} {how}; so have all.")
