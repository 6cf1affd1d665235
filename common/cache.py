"""The Cache: the contract that chapters 03 to 07 and 09 implement.

A Cache says which tokens it can restore (`match`), restores them (`restore`, a generator that yields each
copy it waits for), and keeps what a step has computed (`save`). The driver in restoring.py does the rest: it
decides whether restoring pays, resumes the generator, tells the engine which requests can compute now,
and requeues the request if a copy fails, so that the engine recomputes its tokens."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from common.link import Transfer
from common.requests import Request, RequestQueue


@dataclass(eq=False)
class Match:
    """One answer of `Cache.match`: how many tokens after `request.computed` a restoration would cover."""

    tokens: int  # never includes the request's last token, whose logits are needed
    # Estimated time until all are restored, including the wait for transfers that are already queued
    seconds: float
    blocks: list  # where the tokens are; only the Cache itself reads this
    found: dict[str, int]  # tier (a key of Request.found) -> tokens that come from it
    rows: int = 0  # tokens per layer for which `restore` computes K and V; 0: it only copies
    # If its tokens were computed: the part of each step's time that this request would get (1.0: all)
    share: float = 1.0


@dataclass(eq=False)
class Restoration:
    """The restoration of tokens [start, end) of one request.

    The Cache restores layer by layer: so far the K and V of the first `layers` layers are in the blocks. The
    next step computes the tokens from `end` on. Before each layer, its forward pass waits until that layer's
    K and V have arrived.

    A Cache that restores in another order has a class of its own (`Cache.restoration_class`). It gives
    `computes`, `keeps_part` and `restored` other values."""

    request: Request
    match: Match
    start: int
    end: int
    deadline: float  # time.perf_counter() after which an incomplete copy is late
    generator: Generator | None = None  # of Cache.restore; None: it has ended
    layers: int = 0  # layers whose K and V are restored
    awaited: Transfer | None = None  # what the generator yielded last, until it is complete
    completed: list[Transfer] = field(default_factory=list)  # transfers that it awaited earlier

    computes = False  # True: steps compute some of [start, end) while the Cache restores the others
    keeps_part = False  # whether the leading tokens that have arrived are kept if the rest fails

    @property
    def restored(self) -> int:
        """Number of tokens that the Cache, and not the engine, has brought back. Valid once it has ended."""
        return self.end - self.start


class Cache:
    """A store of KV cache outside device memory, and the way to restore it to the device. This base class
    stores nothing.

    A chapter implements five methods: `attach`, `match`, `restore`, `save` and `close`. The driver calls
    `poll` in every step; a chapter may extend it. All other methods are helpers for these, or optional. The
    docstring of an optional method says what to use it for."""

    # The five required methods, in the order of their use
    def attach(self, engine: RequestQueue):
        """Prepare the Cache. The engine's constructor calls this once, before the first request.

        A chapter's own `attach` calls super().attach first. Then it opens its links. If it measures their
        speed here, no request waits for the measurement."""
        self.engine, self.model, self.pool = engine, engine.model, engine.pool
        self.in_flight = defaultdict(deque)  # lane -> what `hold` has added
        self.counts = engine.counts  # counters for /health
        self.estimates = engine.lower_tier.estimates  # speeds of this machine

    def match(self, request: Request):
        """Find the tokens that can be restored. Called after admission, and again after each complete
        restoration of the request. The blocks of `request.chain` from number `request.computed // block size`
        up to `request.history // block size` are missing.

        Returns: a Match of tokens that follow `request.computed` (which may lie inside a block), or None. All
        tokens that `restore` would load must be available now: their copies or writes into this tier must
        have completed. They need no reference yet, because the engine evicts nothing between this call and
        the first `yield` of `restore`. Only `restore` itself could evict them, by allocating blocks.
        So it must add a reference before it allocates."""

    def restore(self, request: Request, restoration: Restoration, match: Match):
        """Bring tokens [restoration.start, restoration.end) into the blocks of `request.table`.

        This is a generator. It starts copies and yields each Transfer that must complete before it continues.
        It yields None after a portion of work, so that other requests can run. It adds 1 to
        `restoration.layers` when a layer's K and V are written, and returns when all layers are restored.

        The driver resumes the generator, and may close it at any yield. The blocks of a copy must stay
        referenced until the copy completes, even if the generator is closed first. Therefore, call `hold`
        after starting a copy and before the next yield. If the generator itself has allocated blocks
        (in host memory, for example), it has a reference to them already. It must give this one to `hold`
        (`given=`), in a `finally` clause, because the driver may close it at a yield."""
        yield from ()

    def save(self, batch: "Batch"):  # noqa: F821
        """Keep what the step has computed. Called after each forward pass; must not block.

        `batch`: the engine's Batch of this step (02_paged_kv.py); `batch.work` has (request, tokens)
        pairs."""

    def close(self):
        """End threads, and release files and connections. Called once, when the engine closes."""

    # Helpers
    def hold(self, lane: str, transfers: list, *held, given: tuple = (), then: object = lambda arrived: None):
        """Keep blocks referenced until all `transfers` are complete, even if the request ends first.

        `lane`: any name. In one lane, blocks are released in the order of these calls. `held`: (pool,
        blocks) pairs that get one more reference. `given`: pairs whose reference the caller hands over.
        `then(arrived)`: called by `poll` when all transfers are complete; `arrived` is False if one of them
        failed."""
        for pool, blocks in held:
            pool.share(blocks)
        self.in_flight[lane].append((transfers, (*held, *given), then))

    def poll(self):
        """Release the blocks of completed transfers. Called once at the start of each step; must not block.

        Each lane is released in order. A lane that hangs does not delay the others."""
        lanes = {name: lane for name, lane in self.in_flight.items() if lane}
        self.in_flight = defaultdict(deque, lanes)  # drop empty lanes
        for lane in lanes.values():
            while lane and all(transfer.ready for transfer in lane[0][0]):
                transfers, held, then = lane.popleft()
                try:
                    then(all(transfer.error is None for transfer in transfers))
                except Exception as error:  # release the blocks all the same, and continue
                    logging.getLogger("kv").exception("work after a copy failed")
                    self.engine.on_error(error)
                for pool, blocks in held:
                    pool.release(blocks)

    def close_each(self, *parts):
        """Close each of `parts` that is not None, in this order, even if one of them raises."""
        with ExitStack() as each:
            for part in reversed([*filter(None, parts)]):
                each.callback(part.close)

    def drain(self):
        """Wait up to 5 s for the transfers that are still in flight. Used by `close`."""
        until = time.perf_counter() + 5.0
        while any(self.in_flight.values()) and self.agree(time.perf_counter() < until):
            self.poll()
            time.sleep(1e-3)

    # Optional
    fields: dict = {}  # request options that this chapter adds: name -> (test, words for a valid value)
    pools: dict = {}  # name -> BlockPool: for the web page, and for marking blocks as used
    restoration_class = Restoration
    agree = bool  # agree(fact) -> whether it is true on all ranks; in a single process, bool(fact)

    def submitted(self, request: Request):
        """Start a prefetch, or look up what storage has. Called when a request is queued or re-queued. By
        then, `request.chain` has the keys of all full blocks of its tokens."""

    def waits(self, request: Request) -> bool:
        """Return True to keep the request queued, for example while its tokens are prefetched. Called at
        admission, before the request gets blocks.

        By default, request 7 waits while the lane "ask 7" has transfers."""
        return bool(self.in_flight.get(f"ask {request.id}"))

    def save_layer(self, layer: int, hidden: torch.Tensor, batch: "Batch"):  # noqa: F821
        """Keep a layer's input `hidden` [T, D]. Called in the forward pass, before the layer runs.

        On a GPU the next pass overwrites `hidden`, so keep a copy."""

    def on_evict(self, lost: list):
        """Read device blocks before they lose their contents. `lost`: (block, block key) pairs.

        The device pool calls this before it evicts; afterwards the blocks are free."""

    def finished(self, request: Request):
        """Forget a request. Called when it finishes, fails, is cancelled or is preempted."""
