"""What a chapter keeps, and how it comes back: the Cache that every chapter from 03 on implements.

A Cache says what it has (`match`) and brings it back (`restore`, a generator that yields each copy it must
wait for). restoring.py decides whether that is worth it, when the generator goes on, what is computed
meanwhile, and what happens if a copy fails."""

import logging
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from common.requests import Request, RequestQueue


@dataclass(eq=False)
class Match:
    """What a Cache holds behind `request.computed`."""

    tokens: int  # never a request's last one
    seconds: float  # until all are there, on an undisturbed machine
    blocks: object  # where they are: the Cache's own
    found: dict | None = None  # source, as Request.found calls it -> tokens; by default all from "cpu"
    rows: int = 0  # that it projects or computes in each layer (04, 05); 0: it only copies
    share: float = 1.0  # of each step, that computing them would get (06)
    trial: bool = False  # refused, and loaded all the same, to learn how fast that is

    def __post_init__(self):
        self.found = self.found or {"cpu": self.tokens}


class Cache:
    """What a chapter keeps, and how it comes back; this one keeps nothing. A cache needs five verbs (attach,
    match, restore, save, close); the docstring of each other verb says what it buys."""

    # The five verbs that every cache needs, in the order of their use
    def attach(self, engine: RequestQueue):
        """Begin, before the first request: measure how fast it loads."""
        self.engine, self.model, self.pool = engine, engine.model, engine.pool
        self.in_flight = defaultdict(deque)  # lane -> (transfers, what they read and write, what to do then)
        self.counts = engine.counts  # for /health
        self.estimates = engine.lower_tier.estimates  # of how fast this machine is

    def match(self, request: Request):
        """-> a Match of what follows `request.computed` (maybe inside a block), or None."""

    def restore(self, request: Request, restoration: object, match: Match):
        """Bring tokens start to end into `request.table`. A generator: issue copies, yield each Transfer that
        must be over before it goes on (or nothing: resume me later, others may go on), count
        `restoration.layers` up, end by returning. `hold` what a copy reads and writes before the next yield.
        It may be closed at any yield."""
        yield from ()

    def save(self, batch: object):
        """Keep what the step has computed. Must not wait."""

    def close(self):
        """End threads, and what lies outside of this process."""

    # What the five are written with
    def missing(self, request: Request) -> list:
        """-> the prefixes of the full blocks behind `request.computed` that could come back."""
        size = self.pool.block_size
        return request.chain[request.computed // size : request.history // size]

    def tokens_in(self, request: Request, blocks: list) -> int:
        """-> how many tokens of these blocks, the next ones, lie behind `request.computed`."""
        size = self.pool.block_size
        return (request.computed // size + len(blocks)) * size - request.computed

    def blocks_of(self, request: Request, start: int, count: int) -> list[int]:
        """-> `count` of the request's blocks, from the one of token `start` on."""
        return request.table[start // self.pool.block_size :][:count]

    def hold(self, lane: str, transfers: list, *held, given: tuple = (), then: object = lambda arrived: None):
        """Keep (pool, blocks) pairs referenced until all transfers are over, whatever becomes of the request;
        then call `then(whether all have arrived)`. `held` get a reference more, `given` hand theirs over."""
        for pool, blocks in held:
            pool.share(blocks)
        self.in_flight[lane].append((transfers, (*held, *given), then))

    def poll(self):
        """Each step: release what is over, in order within each lane; a lane that hangs holds up no other."""
        if self.storage:
            self.counts["storage_errors"] = self.storage.errors
        lanes = {name: lane for name, lane in self.in_flight.items() if lane}
        self.in_flight = defaultdict(deque, lanes)  # without those that are empty
        for lane in lanes.values():
            while lane and all(transfer.ready for transfer in lane[0][0]):
                transfers, held, then = lane.popleft()
                try:
                    then(all(transfer.error is None for transfer in transfers))
                except Exception:  # of this one: the others go on, and its blocks are free
                    logging.getLogger("kv").exception("what follows a copy has failed")
                for pool, blocks in held:
                    pool.release(blocks)

    def close_each(self, *parts):
        """Close those that there are, in this order, also past one that raises."""
        with ExitStack() as each:
            for part in reversed([*filter(None, parts)]):
                each.callback(part.close)

    def drain(self):
        """At the end: let what is on its way arrive, if that takes at most 5 s."""
        until = time.perf_counter() + 5.0
        while any(self.in_flight.values()) and time.perf_counter() < until:
            self.poll()
            time.sleep(1e-3)

    # Optional: what each buys stands in its docstring
    fields: dict = {}  # options of a request, this chapter's own: name -> (test, words)
    pools: dict = {}  # name -> BlockPool, for the page
    storage = None  # a Storage or StoredChunks, whose errors are counted

    def submitted(self, request: Request):
        """The request stands in line, its chain is made: begin to bring something nearer (07)."""

    def waits(self, request: Request) -> bool:
        """-> whether it stays in line: what it lacks comes nearer, and that is worth waiting for (07)."""
        return False

    def save_layer(self, layer: int, hidden: torch.Tensor, batch: object):
        """See the input [T, D] of each layer (04)."""

    def on_evict(self, lost: list):
        """The blocks of these (block, prefix) pairs are about to lose their contents: read them now (07)."""

    def finished(self, request: Request):
        """The request is over, cancelled or preempted: forget it."""

    def agree(self, fact: bool) -> bool:
        """-> whether a fact that this process alone knows holds on all ranks (09)."""
        return fact
