"""Ranks: processes that share one model. Start them, communicate between them, and end them together.

Most methods of Ranks are collective: all ranks must call them, in the same order. When a rank has ended, the
next collective of the other ranks fails, and they end too. When a rank hangs, they end after TIMEOUT. When
work on a rank raises an exception, all ranks leave the step, drop their engines and go on with new ones."""
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial, reduce
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from common import requests
from common.requests import in_words
from shell import cli, exit_process, lesson
from shell.checkpoint import ModelError
from shell.frontend import Frontend, Writer

BEAT = 1.0          # seconds between two collectives of an idle server
TIMEOUT = timedelta(seconds=600)    # of a collective: ranks load a model at different speeds
NEEDED = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"     # variables that torchrun sets
AFTER = 1.0         # seconds to wait for the reason of a failure

# 1. Collectives ---------------------------------------------------------------------------------------------

class RankFailed(BaseException):
    """Work on a rank has raised an exception. This is not an Exception, so no engine contains it, and all
    ranks leave the step."""


class Ranks:
    """This process's place among the ranks, and the collectives between them."""

    def __init__(self, rank: int = 0, count: int = 1):
        """Connect to the other ranks. Raises ModelError if that fails.

        `rank`: of this process, from 0. `count`: number of ranks."""
        self.rank, self.count, self.agreements, self.connections = rank, count, 0, 0
        self.group, self.same_bits = None, False
        if count > 1:
            try:
                self.notes, *_ = next(dist.rendezvous("env://", rank, count, timeout=TIMEOUT))
                dist.init_process_group(None, None, TIMEOUT, count, rank, self.notes)
                self.connect()
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                raise ModelError(f"The ranks could not connect ({why}); start all of them with one torchrun.")

    def connect(self):
        """Collective: connect to the other ranks, at the start and again after a failure. Communicate by gloo
        in host memory, and by NCCL between GPUs. End the connection before, so that no rank waits for
        another."""
        if self.group:
            dist.destroy_process_group(self.group)
            self.group = None
            gc.collect()    # a connection closes when nothing refers to it
        self.connections += 1
        self.group = dist.new_group(timeout=TIMEOUT)

    def fail(self, error: Exception):
        """Make all ranks leave this step, since their state may differ after an exception. A single rank
        continues.

        Raises RankFailed on this rank now, and on the others in a collective that this rank does not
        join."""
        if self.count > 1:
            self.notes.set(f"failure {self.connections}", f"Rank {self.rank} failed ({in_words(error)})")
            raise RankFailed(self.failure())

    def failure(self) -> str:
        """-> which rank has failed since `connect`, and why; empty if none has."""
        key = f"failure {self.connections}"
        return self.notes.get(key).decode() if self.notes.check([key]) else ""

    def all_min(self, numbers: list[int]) -> list[int]:
        """Collective: return the minimum over ranks of each number."""
        self.agreements += 1
        tensor = torch.tensor(numbers)              # on the host: no GPU must be synchronized
        self.call_collective(dist.all_reduce, tensor, dist.ReduceOp.MIN)
        return tensor.tolist()

    def all_true(self, true: bool) -> bool:
        """Collective: return True if `true` is True on all ranks."""
        return bool(self.all_min([int(true)])[0])

    def barrier(self):
        """Collective: wait until all ranks have called this."""
        self.all_min([0])

    def broadcast(self, message: bytes, size: int) -> bytes:
        """Collective: return rank 0's message of `size` bytes. Other ranks' `message` is ignored."""
        data = torch.frombuffer(bytearray(message or bytes(size)), dtype=torch.uint8)
        self.call_collective(dist.broadcast, data, 0)
        return bytes(data.tolist())

    def all_sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Collective: sum a tensor [T, D] over ranks. All ranks get the same bits."""
        if self.same_bits and self.count > 2:       # gloo adds three in an order that depends on T
            parts = self.all_gather(partial).unflatten(1, (self.count, -1)).unbind(1)
            return reduce(torch.add, parts)
        self.call_collective(dist.all_reduce, partial)
        return partial

    def all_gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Collective: concatenate the columns of all n ranks, in order: [T, D / n] -> [T, D]."""
        if self.count == 1:
            return columns
        gathered = columns.new_empty(self.count, *columns.shape)
        self.call_collective(dist.all_gather, list(gathered), columns.contiguous())
        return gathered.transpose(0, 1).flatten(1)                                  # [n, T, D/n] -> [T, D]

    def call_collective(self, collective, *arguments):
        """Call a collective of torch.distributed. If another rank has called `fail`, raise RankFailed. If
        another rank has ended or hangs, end, too."""
        if self.count > 1:
            try:
                collective(*arguments, group=self.group)
            except RuntimeError:
                with suppress(RuntimeError):    # rank 0, which has the store, may have ended
                    if words := self.failure():
                        raise RankFailed(words) from None
                time.sleep(10 * AFTER * (self.rank == 0))       # `run` may print the reason
                exit_process(int(self.rank == 0), "A rank does not answer; all ranks end.")


# 2. Requests of rank 0 --------------------------------------------------------------------------------------

class BroadcastEngine:
    """An engine with the methods that a server calls on rank 0; all ranks then carry out the call.

    Rank 0 queues a command, and its Cache sends it to all ranks in the next step. Every rank runs the command
    after that step, in the same order."""

    def __init__(self, make, tokenizer=None):
        """`make()`: returns this rank's engine. It is called again after work on a rank has failed."""
        self.make, self.tokenizer, self.engine = make, tokenizer, make()
        self.cache, self.commands = self.engine.lower_tier.cache, self.engine.lower_tier.cache.commands
        self.ranks, self.closed, self.stepping = self.cache.ranks, False, False
        self.known = WeakValueDictionary()          # id() on rank 0 -> Request

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request: requests.Request):
        self.engine.fit(request)
        names = "tokens", "max_tokens", "options", "temperature", "top_p", "top_k"
        fields = {name: getattr(request, name) for name in names}
        fields |= dict(seed=request.generator.initial_seed(), end_tokens=list(request.end_tokens))
        written = request.writer and (request.writer.stop, request.writer.before)
        self.known[id(request)] = request
        self.send_command("submit", request, fields, written)

    def cancel(self, request: requests.Request, error: requests.RequestError):
        self.send_command("cancel", request, type(error).__name__, str(error))

    def evict(self, name: str = "device") -> int:
        before = self.engine.pools[name].evictions
        self.send_command("evict", name)
        self.step()
        return self.engine.pools[name].evictions - before

    def close(self):
        if not self.stepping:       # if Ctrl-C cut a step short, others are still in it
            self.send_command("close")
            self.follow()

    def send_command(self, *words):
        self.commands.append(words)
        self.engine.wake.set()

    def do(self, verb: str, name=None, *more):
        """Run one command of rank 0. All ranks call this.

        `name`: id() of a Request on rank 0. `more`: the command's other arguments."""
        request = self.known.get(name)
        if verb == "submit":
            fields, written = more
            if self.ranks.rank:
                writer = written and Writer(self.tokenizer, *written)
                request = self.known[name] = requests.Request(**fields, writer=writer)
            self.engine.submit(request)
        elif verb == "cancel" and request and request.outcome is None:
            self.engine.cancel(request, getattr(requests, more[0])(more[1]))
        elif verb == "evict":
            self.engine.evict(name)
        self.closed |= verb == "close"

    def step(self):
        """Step the engine, then run the commands that have arrived. If work on a rank fails, drop the step.
        All ranks call this.

        An idle engine calls a collective every BEAT seconds instead, so that each rank notices if another
        ends."""
        self.stepping = failed = True
        with suppress(RankFailed):
            try:
                self.step_engine()
                failed = False
            except Exception as error:
                self.ranks.fail(error)
                raise               # there is only one rank
        if failed:
            self.restart(self.ranks.failure())
        self.stepping = False

    def step_engine(self):
        """Step the engine, then run the commands that have arrived."""
        if self.engine.busy:
            self.engine.step()
        else:
            if self.ranks.rank == 0 and not self.commands:
                self.engine.wake.wait(BEAT)
            self.engine.wake.clear()
            self.cache.poll()
        while self.cache.received:
            if self.ranks.rank == 0:
                self.commands.popleft()
            self.do(*self.cache.received.popleft())

    def restart(self, reason: str):
        """End all requests, and make a new engine with empty pools. All ranks call this after a failure,
        because their engines may differ. Commands that are not done yet are sent again.

        `reason`: one sentence without a full stop."""
        print(f"{reason}; all ranks end their requests, and begin again.", file=sys.stderr)
        before = self.engine
        # Other threads see an empty engine until there is a new one
        self.engine, self.cache = requests.RequestQueue(before.capacity), None
        self.engine.counts = before.counts
        for request in filter(None, [reference() for reference in self.known.valuerefs()]):
            request.restoration = request.memo = None       # they refer to the old engine
            if request.id and request.outcome is None:      # an engine has received it
                request.finish(requests.Unavailable(f"{reason}; ask again."))
                before.counts["failed"] += 1
        with suppress(Exception):
            before.close()
        del before      # free its memory: the new engine needs as much
        gc.unfreeze()
        self.ranks.connect()
        gc.freeze()
        try:
            engine = self.make()
        except Exception as error:
            exit_process(1, f"Rank {self.ranks.rank} cannot begin again ({in_words(error)}); all ranks end.")
        engine.counts.update(self.engine.counts)
        engine.lower_tier.cache.commands = self.commands
        self.engine, self.cache = engine, engine.lower_tier.cache

    def follow(self):
        """Step until rank 0 has sent the command "close", then close the engine. All ranks call this."""
        while not self.closed:
            self.step()
        self.engine.close()
        self.ranks.barrier()


# 3. Start ---------------------------------------------------------------------------------------------------

def of_environment(asked: int | None) -> tuple[int, int]:
    """Return (this process's rank, number of ranks).

    They come from torchrun's environment variables. Without these it is rank 0 of `asked` ranks (None: 2).
    Raises ModelError if variables are missing or wrong, or if they contradict `asked`."""
    given = {name: os.environ[name] for name in (*NEEDED, "LOCAL_RANK") if name in os.environ}
    if not given:
        return 0, asked or 2
    with suppress(KeyError, ValueError):
        rank, count, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local, right = int(given.get("LOCAL_RANK", rank)), given["MASTER_ADDR"] and 0 < port < 1 << 16
        if right and 0 <= min(rank, local) and max(rank, local) < count and asked in (None, count):
            return rank, count
    words = [f"{name}={value}" for name, value in given.items()] + [f"--ranks {asked}"] * bool(asked)
    raise ModelError(f"Ranks cannot start from {', '.join(words)}: torchrun sets {', '.join(NEEDED)}, in "
                     f"agreement with --ranks; start all ranks with it, or unset {', '.join(given)}.")


def join(asked: int | None) -> Ranks:
    """Join the ranks as this process's rank; without torchrun, become rank 0 and start the others.

    `asked`: the number of ranks that the user asked for, or None. Raises ModelError."""
    rank, count = of_environment(asked)
    if "RANK" not in os.environ:
        start(count)
    if (gpu := int(os.environ.get("LOCAL_RANK", rank))) < torch.cuda.device_count():
        torch.cuda.set_device(gpu)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    ranks = Ranks(rank, count)
    if rank:        # after an exception end at once, since PyTorch's threads may abort
        sys.excepthook = lambda *error: exit_process(1, "".join(traceback.format_exception(*error)).rstrip())
        signal.signal(signal.SIGINT, signal.SIG_IGN)    # rank 0 handles Ctrl-C
    return ranks


def start(count: int):
    """Make this process rank 0, and start the other ranks with the same command line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE=str(count),
                      OMP_NUM_THREADS=str(torch.get_num_threads()))
    for rank in range(1, count):
        threading.Thread(target=run, args=(rank, {**os.environ, "RANK": str(rank)}), daemon=True).start()


def run(rank: int, environment: dict):
    """Run another rank, on a thread of rank 0. If it fails, print how, and end all ranks."""
    output = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    command = [sys.executable, *sys.orig_argv[1:]]
    done = subprocess.run(command, env=environment, start_new_session=True, **output)   # no Ctrl-C
    if code := done.returncode:
        time.sleep(AFTER)           # rank 0 may fail for the same reason and print it
        last = done.stderr.strip().rpartition("\n")[2]
        how = f"was killed by signal {-code}" if code < 0 else f"has ended ({last})"
        exit_process(1, f"Rank {rank} {how}; all ranks end.")


# 4. Main ----------------------------------------------------------------------------------------------------

def run_ranks(doc, chapter: str, add_arguments, make_engine, demo, load):
    """Run a chapter from the command line, on this rank: rank 0 as `cli.main` does. The other ranks run the
    same demo, or execute rank 0's commands.

    `load(ranks, name, dtype, device, same_bits)`: loads this rank's part of the model. The rest: see
    `cli.main`."""
    arguments = cli.parser_for(doc, add_arguments).parse_args()
    begin = lambda *names, **how: load(join(arguments.ranks), *names, **how)  # noqa: E731
    try:
        if of_environment(arguments.ranks)[0] == 0:
            make = lambda *what: BroadcastEngine(partial(make_engine, *what))  # noqa: E731
            return cli.main(doc, chapter, add_arguments, make, demo, load=begin)
        asked = arguments.model, arguments.dtype, arguments.device
        model, tokenizer, end_tokens = begin(*asked, same_bits=arguments.same_bits)
        if arguments.demo:
            lesson.prepare(arguments)
            demo(model, Frontend(model, tokenizer, end_tokens), arguments)
        else:
            BroadcastEngine(partial(make_engine, model, arguments), tokenizer).follow()
    except (ModelError, requests.RequestError, OSError, RankFailed) as error:
        sys.exit(f"{chapter}: {error}")
