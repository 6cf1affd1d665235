"""How something comes back: the Cache that every chapter implements, and what the engine does with it.

A Cache says what it has (`match`) and brings it back (`restore`, a generator that yields each copy it must
wait for). The engine decides whether that is worth it, when the generator goes on, what is computed
meanwhile, and what happens if a copy fails: here, once, for all chapters. The rule for every failure,
lateness included: what was to come back is computed.
"""

import logging
import math
import statistics
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from common.link import TransferError
from common.requests import Interrupted, Request
from common.speed import ROWS, Speed, fastest_layer, flops

LATER = "later"  # an answer of Cache.match: ask again in the next step, others pass meanwhile
PAUSE = "pause"  # yielded by Cache.restore where it has computed for a while: resume it in the next step
WORTH = 0.8  # load what takes at most this share of computing: a load that turns out late costs both
GRACE = 0.05  # seconds that a restoration may be late in any case: a busy host is no failure
PATIENCE = 60.0  # seconds that a request waits at most for its Cache, and for what --always-restore loads
STEADY = 0.05  # two measurements that differ by less than this share agree
INTERVALS = 1.0, 32.0  # seconds between two measurements of an idle engine: at first, and at most
SOON = 5.0  # seconds that `drain` waits for what is on its way
FULL_SPEED = 128  # tokens: prefill from here on runs at its full speed, or nearly, on a CPU
SHORT = 64  # tokens: a prompt that says what launches take on a GPU
PACES = 1.0, 1.0  # believed at first, so that one bad restoration decides nothing
DOUBT = 0.1  # a restoration that takes longer than estimated by more than this share: measure again


# 1. What comes back ----------------------------------------------------------------------------

@dataclass(eq=False)
class Restoration:
    """Tokens start to end of a request come back layer by layer. The rows behind them follow: a pass waits
    before each layer for that layer's history. Chapter 06 has another kind, which gives the same answers."""

    request: Request
    match: "Match"
    depth: int  # layers of the model
    deadline: float  # in seconds of time.perf_counter(): nobody waits longer (but GRACE at least)
    steps: object = None  # the Cache's generator, until it has ended
    layers: int = 0  # whose history is there
    awaited: object = None  # the Transfer that the generator yielded last, until that is over
    passed: list = field(default_factory=list)  # the Transfers before
    spent: float = 0.0  # seconds of work at it, and of waiting for it
    computes = False  # whether its request computes some of these tokens meanwhile: no step waits then

    def __post_init__(self):
        self.start = self.request.computed
        self.end = self.start + self.match.tokens

    @property
    def next(self) -> int:
        """The first token that the next step computes."""
        return max(self.end, self.request.computed)

    @property
    def reach(self) -> int:
        """The token up to which the next step may compute."""
        return len(self.request.tokens)

    @property
    def ready(self) -> bool:
        """Whether a step can compute the next rows without waiting."""
        return self.layers == self.depth

    def has(self, layers: int) -> bool:
        """Whether the next rows have all the history that they need in so many layers."""
        return self.layers >= layers

    def settle(self):
        """Raise `request.computed` over what has arrived."""
        if self.layers == self.depth:
            self.request.computed = self.next

    @property
    def whole(self) -> bool:
        """Whether all tokens up to `end` are in the blocks."""
        return self.request.computed >= self.end

    @property
    def found(self) -> int:
        """Of these tokens, those that were not computed."""
        return self.match.tokens


@dataclass(eq=False)
class Match:
    """What a Cache holds behind `request.computed`: so many tokens, never a request's last one. `seconds`:
    until all are there, on an undisturbed machine; `pace` corrects it, `learn_pace` the pace, `idle` both."""

    tokens: int
    seconds: float
    blocks: list  # the Cache's own
    source: str = "cpu"  # what Request.found calls it
    rows: int = 0  # that it projects or computes in each layer (04, 05); 0: it only copies
    store: object = None  # where the blocks are, in a Cache that has several
    parts: dict | None = None  # source -> tokens, where they are from several (chapter 07)
    share: float = 1.0  # of each step, that computing them would get (chapter 06)
    way: type = Restoration  # how it comes back


class Cache:
    """What a chapter keeps, and how it comes back; this one keeps nothing (chapter 02). A cache needs five
    verbs (attach, match, restore, save, close); the docstring of each other verb says what it buys."""

    # The five verbs that every cache needs, in the order of their use
    def attach(self, engine):
        """Begin. A runner that keeps no K and V on the device (chapter 08) has a pool without memory."""
        self.engine, self.model, self.pool = engine, engine.model, engine.pool
        self.under_way = defaultdict(deque)  # lane -> (transfers, what they read and write, what to do then)
        self.counts = engine.counts  # for /health

    def match(self, request):
        """-> a Match of what follows `request.computed` (maybe inside a block), None, or LATER (to ask again
        in the next step, until `request.patience`)."""

    def restore(self, request, restoration: Restoration, match: Match):
        """Bring tokens start to end into `request.table`. A generator: issue copies, yield each Transfer that
        must be over before it goes on (or PAUSE), count `restoration.layers` up, end by returning. `hold`
        what a copy reads and writes before the next yield. It may be closed at any yield."""
        yield from ()

    def save(self, batch):
        """Keep what the step has computed. Must not wait."""

    def close(self):
        """End threads, and what lies outside of this process."""

    # What the five are written with
    def missing(self, request) -> list:
        """-> the prefixes of the full blocks behind `request.computed` that could come back."""
        size = self.pool.block_size
        return request.chain[request.computed // size : request.history // size]

    def hold(self, lane: str, transfers: list, *held, given=(), then=lambda arrived: None):
        """Keep (pool, blocks) pairs referenced until all transfers are over, whatever becomes of the request;
        then call `then(whether all have arrived)`. `held` get a reference more, `given` hand theirs over."""
        for pool, blocks in held:
            pool.share(blocks)
        self.under_way[lane].append((transfers, (*held, *given), then))

    def poll(self):
        """Each step: release what is over, in order within each lane; a lane that hangs holds up no other."""
        lanes = {name: lane for name, lane in self.under_way.items() if lane}
        self.under_way = defaultdict(deque, lanes)  # without those that are empty
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
        """At the end: let what is on its way arrive, if that is soon."""
        until = time.perf_counter() + SOON
        while any(self.under_way.values()) and time.perf_counter() < until:
            self.poll()
            time.sleep(1e-3)

    # Optional: what each buys stands in its docstring
    fields: dict = {}  # options of a request, this chapter's own: name -> (test, words)
    pools: dict = {}  # name -> BlockPool, for the page

    def submitted(self, request):
        """The request stands in line, its chain is made: begin to bring something nearer (07)."""

    def save_layer(self, layer: int, hidden, batch):
        """See the input [T, D] of each layer (04)."""

    def evicting(self, lost: list):
        """The blocks of these (block, prefix) pairs are about to lose their contents: read them now (07)."""

    def finished(self, request):
        """The request is over, cancelled or preempted: forget it."""

    def probe(self, request, match: Match) -> list:
        """A match is refused, and so shows no speed: begin to load a little of it to nowhere -> Transfers."""
        return []

    def idle(self) -> float | None:
        """Nothing runs: measure again how fast it loads -> a speed in any unit; None if it never loads."""


# 2. Load or compute ----------------------------------------------------------------------------

class Estimates:
    """How long computing takes, on an undisturbed machine and now; and what is worth loading."""

    def __init__(self, engine, cache: Cache, always: bool = False):
        self.engine, self.cache, self.always = engine, cache, always
        self.computing = Speed(0.0)  # FLOP/s of long prefills
        self.launches = 0.0  # seconds that a pass takes besides, on a GPU
        self.paces = deque(PACES, maxlen=8)  # of the last restorations, measured over estimated seconds
        self.agree = bool  # agree(mine) -> what holds on all ranks (chapter 09); alone: mine
        self.doubtful = True  # what was measured may be wrong: measure again when idle
        self.speeds: list[float] = []  # measured last by `idle`
        self.interval = self.due = 0.0  # seconds between two measurements; when the next one is due

    def worth(self, request, match: Match) -> bool:
        """Decide whether to load what was matched, and have the request say why."""
        end = request.computed + match.tokens
        compute = self.seconds_to_compute(request.computed, end) / match.share
        chosen = self.agree(self.always or self.pace * match.seconds <= WORTH * compute)
        words = (
            f"{match.tokens} tokens offered ({match.source}): loading {1e3 * self.pace * match.seconds:.1f} "
            f"ms, computing {1e3 * compute:.1f} ms: " + ("loaded" if chosen else "computed")
        )
        request.decisions.append(words)
        self.engine.tell("restore", [request], match.tokens, len(match.blocks), words)
        if not chosen:
            self.doubtful = True  # a bad measurement may have refused it
            self.engine.counts["declined"] += 1
            if not self.cache.under_way[lane := f"probe {match.source}"]:
                self.cache.hold(lane, self.cache.probe(request, match))
                self.paces.append(1.0)  # else nothing would: one that is refused adds none
        return chosen

    @property
    def pace(self) -> float:
        """What corrects estimates for what goes on now."""
        return statistics.median(self.paces)

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate for the prefill of tokens start to end; infinite until measured: restoring is tried."""
        passes = -(-(end - start) // self.engine.token_budget)
        return passes * self.launches + self.computing.seconds(flops(self.engine.model.config, start, end))

    def patience(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens waits at most for its Cache."""
        return PATIENCE if self.always else min(self.seconds_to_compute(0, tokens), PATIENCE)

    def learn(self, work: list, seconds: float):
        """Note how fast a step was that did not wait. `work`: as before the step. (A GPU's say nothing new:
        launches are a part of each, and nobody else disturbs it.)"""
        if self.launches or sum(count for _, count in work) < FULL_SPEED:
            return
        if not any(one.restoration for one, _ in work):
            spans = [(request.computed, request.computed + count) for request, count in work]
            self.computing.note(sum(flops(self.engine.model.config, *span) for span in spans), seconds)

    def learn_pace(self, restoration: Restoration):
        """Note how long a restoration took that was whole, and alone in the engine."""
        match = restoration.match
        all_came = restoration.whole and restoration.found == match.tokens >= FULL_SPEED
        if all_came and match.seconds and len(self.engine.running) == 1:
            self.paces.append(max(1.0, self.seconds_taken(restoration) / match.seconds))
            self.doubtful |= self.paces[-1] > 1 + DOUBT

    def seconds_taken(self, restoration: Restoration) -> float:
        """Of work at it and of waiting for it. A GPU's host does not wait: there, from the first copy's start
        to the last one's end."""
        spans = [transfer.span() for transfer in restoration.passed]
        if self.engine.model.device.type != "cuda" or not spans:
            return restoration.spent
        return max(end for _, end in spans) - min(start for start, _ in spans)

    # Measuring while nothing runs

    def idle(self) -> float | None:
        """Nothing runs -> seconds until this is to be called again, or None. In doubt (at the start, after a
        refusal, a failure, a slow restoration) measure at once and after 1, 2, 4 to 32 s, until two agree."""
        if not self.doubtful:
            return None
        if (left := self.due - time.perf_counter()) > 0:
            return left
        try:
            speeds = self.measure()
        except Interrupted:
            return 0.0
        steady = [abs(new - old) <= STEADY * old for new, old in zip(speeds, self.speeds)]
        self.doubtful = bool(speeds) and not (steady and all(steady))
        self.speeds = speeds
        self.interval = min(max(INTERVALS[0], 2 * self.interval), INTERVALS[1]) if self.doubtful else 0.0
        self.due = time.perf_counter() + self.interval
        return self.interval if self.doubtful else None

    def measure(self) -> list[float]:
        """Measure the Cache's speed and that of prefill -> both; [] if nothing depends on them."""
        speed = self.cache.idle()
        if speed is None:
            return []
        self.measure_computing()
        self.paces = deque(PACES, maxlen=8)
        return [speed, self.computing.value or 1.0]

    def measure_computing(self):
        """Compute a dummy prompt, if enough blocks are free; on a GPU also a short one, which takes little
        longer than its launches. Raises Interrupted when a request comes."""
        model, pool, on_gpu = self.engine.model, self.engine.pool, self.engine.model.device.type == "cuda"
        most = model.config.max_position_embeddings, pool.free.count(1) * pool.block_size
        tokens = min(max(FULL_SPEED, self.engine.token_budget), *most, math.inf if on_gpu else ROWS)
        if tokens < FULL_SPEED:
            return
        depth, rows = len(model.layers), SHORT if on_gpu else 0
        few, short = flops(model.config, 0, rows), depth * self.fastest_layer(rows) if rows else 0.0
        many, long = flops(model.config, 0, tokens), depth * self.fastest_layer(tokens)
        self.computing.forget()
        self.computing.note(many - few, max(long - short, long / 10))
        self.launches = max(0.0, short - self.computing.seconds(few))

    def fastest_layer(self, rows: int, history: int = 0) -> float | None:
        """Compute `rows` tokens behind a `history` -> seconds of a layer; None where too few blocks are free:
        measuring evicts nothing. Raises Interrupted when a request comes."""
        engine, pool, blocks = self.engine, self.engine.pool, self.engine.pool.num_blocks(history + rows)
        if pool.free.count(1) < blocks:
            return None
        table = pool.allocate(blocks)
        work = [(Request([0] * (history + rows), 1, table=table, computed=history), rows)]
        try:
            run = partial(engine.runner.forward, work)
            return fastest_layer(run, engine.model.device, engine.interrupt, self.agree)
        finally:
            pool.release(table)


# 3. What the engine does with it ---------------------------------------------------------------

class Restorer:
    """Begins, resumes and gives up restorations, for the engine; they fail in one place, `advance`."""

    def __init__(self, engine, cache: Cache):
        self.engine, self.cache, self.estimates = engine, cache, engine.estimates
        self.depth = len(engine.model.layers)
        self.waits = []  # (start, end) marks of what the step under way has waited for

    def ask(self, request):
        """Ask the Cache what follows -> Match, None or LATER."""
        return None if request.must_compute else self.cache.match(request)

    def begin(self, request, match):
        """Start to bring back what was matched, if that is worth it."""
        if match in (None, LATER) or not self.estimates.worth(request, match):
            return
        compute = self.estimates.seconds_to_compute(request.computed, request.computed + match.tokens)
        measured = compute < math.inf and not self.estimates.always
        wait = max(compute / match.share, match.seconds + GRACE) if measured else PATIENCE
        restoration = match.way(request, match, self.depth, time.perf_counter() + wait)
        request.restoration, restoration.steps = restoration, self.cache.restore(request, restoration, match)
        self.advance(request, 1, wait=False)

    def resume(self):
        """Resume all between two steps, oldest first; together they compute no more rows than a step."""
        budget, first = self.engine.token_budget * self.depth, True
        for request in list(self.engine.running):
            if restoration := request.restoration:
                before, rows, layers = restoration.layers, restoration.match.rows, self.depth
                if rows:
                    least = 1 if first else 0  # the oldest always makes progress
                    layers = min(self.depth, before + max(budget // rows, least))
                self.advance(request, layers, wait=False)
                budget, first = budget - (restoration.layers - before) * rows, False
            if request.restoration and request.restoration.whole:
                self.end(request)
                self.engine.register(request)
                self.begin(request, self.ask(request))  # what follows may be elsewhere, or saved since

    def wait(self, request, layers: int):
        """In the forward pass: go on when the history of so many layers is there. Raises Interrupted if other
        rows are next by now, or if a request has come, which can compute while this one waits."""
        before = request.next
        self.advance(request, layers, wait=True)
        if request.next != before or request not in self.engine.running:
            raise Interrupted

    def advance(self, request, layers: int, wait: bool):
        """Resume the generator until so many layers are there, or what it waits for has not arrived. If
        anything raises (a copy that failed or is late, a generator that ends early), the rest is computed."""
        restoration, began = request.restoration, time.perf_counter()
        try:
            while restoration.steps and not restoration.has(layers) and self.arrived(restoration, wait):
                restoration.awaited = next(restoration.steps, None)
                if restoration.awaited is None:
                    restoration.steps = None
                    if restoration.layers < self.depth:
                        raise TransferError("the cache gave up")
                elif restoration.awaited is PAUSE:
                    restoration.awaited = None
                    if not wait or restoration.computes:
                        break
                    self.engine.interrupt()
        except Interrupted:
            raise
        except Exception as error:
            self.give_up(restoration, error)
        restoration.spent += time.perf_counter() - began
        restoration.settle()

    def arrived(self, restoration: Restoration, wait: bool) -> bool:
        """Whether what it awaits is over; in the pass, wait. Raises TransferError if failed or late."""
        if (transfer := restoration.awaited) is None:
            return True
        if not transfer.ready:
            if restoration.computes:
                return False
            if not wait:
                self.check_in_time(restoration)
                return False
            self.wait_for(restoration)
        transfer.check()
        restoration.passed.append(transfer)
        return True

    def wait_for(self, restoration: Restoration):
        """Order the awaited transfer before what is computed next (on a GPU), or wait on the host until it is
        over. Raises TransferError if it is late, and Interrupted if a request comes meanwhile."""
        engine, transfer, began = self.engine, restoration.awaited, self.engine.clock.mark()
        while not (transfer.queue_wait() or transfer.ready):
            left = self.check_in_time(restoration)
            engine.interrupt()
            engine.sleep(left)
        self.waits.append((began, engine.clock.mark()))

    def check_in_time(self, restoration: Restoration) -> float:
        """-> seconds that are left for the awaited transfer. Raises TransferError if it is late."""
        transfer = restoration.awaited
        left = max(restoration.deadline, transfer.issued + GRACE) - time.perf_counter()
        if left < 0:
            raise TransferError(f"{transfer.label} is late")
        return left

    def give_up(self, restoration: Restoration, error: Exception):
        """Requeue the request, to be computed in other blocks: a copy that failed or is late may still write
        to these, which are free when it is over. What has come stays if all its layers are there (06)."""
        request = restoration.request
        self.close(restoration)
        request.decisions.append(f"{error}: computed")
        self.engine.counts["failed_restorations"] += 1
        self.estimates.doubtful = True
        if restoration.layers < self.depth:
            request.must_compute = True
            self.engine.requeue(request)

    def end(self, request):
        """Take the restoration from the request, however it ended. The Cache holds what is under way."""
        restoration, request.restoration = request.restoration, None
        self.close(restoration)
        self.estimates.learn_pace(restoration)
        if restoration.whole and restoration.found:
            self.engine.counts["restored_tokens"] += restoration.found
            parts = restoration.match.parts or {restoration.match.source: restoration.found}
            for source, tokens in parts.items() if not request.readmitted else ():  # else it had that itself
                request.found[source] = request.found.get(source, 0) + tokens
        for transfer in restoration.passed:
            request.timeline.add(transfer.lane, transfer.label, *transfer.span())

    def close(self, restoration: Restoration):
        """End the generator."""
        if restoration.steps:
            restoration.steps.close()
            restoration.steps = None
