"""How something comes back: the Cache that every chapter implements, and what the engine does with it.

A Cache says what it has (`match`) and brings it back (`restore`, a generator that yields each copy it must
wait for). The engine decides whether that is worth it, when it goes on, who waits, and what happens if it
fails: here, once, for all chapters. The rule for every failure, lateness included: what was to come back is
computed.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

from common.link import TransferError
from common.requests import Request
from common.speed import ROWS, Speed, fastest_layer, flops

LATER = "later"  # an answer of Cache.match: ask again in the next step, others pass meanwhile
PAUSE = "pause"  # yielded by Cache.restore where it has computed for a while: resume it in the next step
WORTH = 0.8  # load what takes at most this share of computing: one that turns out late costs both
GRACE = 0.05  # seconds that a restoration may be late in any case: a host that is busy is no failure
PATIENCE = 60.0  # seconds that a request waits at most for its Cache, and for what --always-restore loads
STEADY = 0.05  # two measurements that differ by less than this share agree
PAUSES = 1.0, 32.0  # seconds between two measurements of an idle engine: at first, and at most
SOON = 5.0  # seconds that an end waits for what is on its way
LONG = 128  # tokens: prefill from here on runs at its full speed, or nearly
PACES = 1.0, 1.0  # believed at first, so that one bad restoration decides nothing
DOUBT = 0.1  # a restoration that takes longer than estimated by more than this share: measure again


# 1. What a chapter implements ------------------------------------------------------------------


@dataclass(eq=False)
class Match:
    """What a Cache holds behind `request.computed`: so many tokens, never a request's last one, which is
    computed for its logits. `seconds`: until all are there, queueing included, on an undisturbed machine.
    `blocks` are the Cache's own."""

    tokens: int
    seconds: float
    blocks: list
    source: str = "cpu"  # what Request.found calls it
    rows: int = 0  # that it projects or computes in each layer (04, 05); 0: it only copies
    store: object = None  # where the blocks are, in a Cache that has several
    parts: dict | None = None  # source -> tokens, where they are from several (chapter 07)
    share: float = 1.0  # of each step, that computing them would get (chapter 06)


@dataclass(eq=False)
class Restoration:
    """Tokens start to end come back:

        start          computed ->        <- limit                end
        |== computed ==|== nobody's yet ==|== in the blocks, =====|  the question
                                             for the first `layers` layers

    Chapter 06 begins with limit = end and lowers it with each chunk that arrives, while ordinary steps of at
    most `portion` tokens raise `request.computed`. Where they meet, `computed` jumps to the end. Everywhere
    else limit = start, so that happens at once: the question's rows are next while their history travels, and
    the engine keeps each layer of them behind it."""

    match: Match
    start: int
    end: int
    limit: int
    deadline: float  # in seconds of time.perf_counter(): nobody waits longer (but GRACE at least)
    steps: object  # the Cache's generator, until it has ended
    layers: int = 0
    spent: float = 0.0  # seconds that the engine's thread has worked at it, or waited for it
    found: int = 0  # tokens that need not be computed
    awaited: object = None  # the Transfer that it yielded last, until that has arrived
    passed: list = field(default_factory=list)  # the Transfers before
    portion: int = 1 << 30
    taken: int = 0  # chapter 06: the step under way computes up to here, and the limit stays above


class Cache:
    """What a chapter keeps, and how it comes back. This one keeps nothing beyond the device's blocks (chapter
    02). docs/production.md has each verb beside its name in vLLM, SGLang and LMCache."""

    fields: dict = {}  # of a request, this chapter's own: name -> (test, words)
    pools: dict = {}  # name -> BlockPool, for the page

    def attach(self, engine):
        """Begin. A runner that keeps no K and V on the device (chapter 08) has a pool without memory."""
        self.engine, self.model, self.pool = engine, engine.model, engine.pool
        self.under_way = defaultdict(deque)  # lane -> (transfers, what they read and write, what to do then)
        self.counts = engine.counts  # for /health

    def submitted(self, request):
        """The request stands in line, its chain is made: something may begin to come nearer."""

    def match(self, request):
        """-> a Match of what could come back behind `request.computed` (which may lie inside a block), None,
        or LATER: ask again in the next step, until `request.patience`."""

    def restore(self, request, restoration: Restoration, match: Match):
        """Bring tokens start to end into `request.table`. A generator: issue copies, yield each Transfer that
        must be over before it goes on (or PAUSE), count `restoration.layers` up, end by returning. `hold`
        what a copy reads and writes before the next yield. It may be closed at any yield."""
        yield from ()

    def save_layer(self, layer: int, hidden, batch):
        """See the input [T, D] of each layer."""

    def save(self, batch):
        """Keep what the step has computed. Must not wait."""

    def evicting(self, lost: list):
        """The blocks of these (block, prefix) pairs are about to lose their contents: read them now."""

    def finished(self, request):
        """The request is over, cancelled or preempted: hold nothing of it any more."""

    def hold(self, lane: str, transfers: list, *held, then=lambda arrived: None):
        """Reference (pool, blocks) pairs until all transfers are over, whatever becomes of the request; then
        call `then(whether all have arrived)`."""
        for pool, blocks in held:
            pool.share(blocks)
        self.under_way[lane].append((transfers, held, then))

    def poll(self):
        """Release what is over, in order within each lane: what hangs in one holds up no other."""
        lanes = {name: lane for name, lane in self.under_way.items() if lane}
        self.under_way = defaultdict(deque, lanes)  # without those that are empty
        for lane in lanes.values():
            while lane and all(transfer.ready for transfer in lane[0][0]):
                transfers, held, then = lane.popleft()
                then(all(transfer.error is None for transfer in transfers))
                for pool, blocks in held:
                    pool.release(blocks)

    def idle(self) -> float | None:
        """Nothing runs: measure again how fast it loads -> a speed in any unit; None if it never loads."""

    def drain(self):
        """At the end: what is on its way arrives, if that is soon."""
        until = time.perf_counter() + SOON
        while any(self.under_way.values()) and time.perf_counter() < until:
            self.poll()
            time.sleep(1e-3)

    def close(self):
        """End threads, and what lies outside of this process."""


# 2. What the engine does with it ---------------------------------------------------------------


class Interrupted(Exception):
    """The step under way is given up: it would not be what is needed now. Run it again."""


class Restorer:
    """Begins, resumes and gives up restorations, for the engine. The one place where they fail is
    `advance`."""

    def __init__(self, engine, cache: Cache, always: bool = False):
        self.engine, self.cache, self.always = engine, cache, always
        self.depth = len(engine.model.layers)
        self.computing = Speed(0.0)  # FLOP/s of long prefills
        self.paces = deque(PACES, maxlen=8)  # of the last restorations, measured over estimated seconds
        self.doubtful = True  # what was measured may be wrong: measure again when idle
        self.speeds: list[float] = []  # measured last by `idle`
        self.pause = self.due = 0.0  # seconds between two measurements; when the next one is due
        self.waits = []  # (start, end) marks of what the step under way has waited for
        self.agree = bool  # agree(mine) -> what holds on all ranks (chapter 09); alone: mine

    # Load or compute

    def ask(self, request):
        """Ask the Cache what follows -> Match, None or LATER."""
        return None if request.must_compute else self.cache.match(request)

    def worth(self, request, match: Match) -> bool:
        """Decide whether to load what was matched; the request says why."""
        end = request.computed + match.tokens
        compute = self.seconds_to_compute(request.computed, end) / match.share
        load = self.pace * match.seconds
        chosen = self.agree(self.pays(match.seconds, request.computed, end, match.share))
        words = (
            f"{match.tokens} tokens offered ({match.source}): loading {1e3 * load:.1f} ms, "
            f"computing {1e3 * compute:.1f} ms: " + ("loaded" if chosen else "computed")
        )
        request.decisions.append(words)
        self.engine.tell("restore", [request], match.tokens, len(match.blocks), words)
        if not chosen:
            self.doubtful = True  # it may have been decided on a bad measurement
            self.engine.counts["declined"] += 1
        return chosen

    def pays(self, seconds: float, start: int, end: int, share: float = 1.0) -> bool:
        """Whether to load tokens start to end in `seconds`, as estimated for an undisturbed machine, rather
        than compute them with a `share` of each step."""
        return self.always or self.pace * seconds <= WORTH * self.seconds_to_compute(start, end) / share

    @property
    def pace(self) -> float:
        """What corrects estimates for what goes on now."""
        return statistics.median(self.paces)

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate for the prefill of tokens start to end; infinite until measured: restoring is tried."""
        return self.computing.seconds(flops(self.engine.model.config, start, end))

    def learn(self, work: list, seconds: float):
        """Note how fast a step was; one that may have waited says nothing. `work`: as before the step."""
        if sum(count for _, count in work) >= LONG and not any(request.restoration for request, _ in work):
            spans = [(request.computed, request.computed + count) for request, count in work]
            self.computing.note(sum(flops(self.engine.model.config, *span) for span in spans), seconds)

    # Beginning, resuming, ending

    def begin(self, request, match: Match | None):
        """Start to bring back what was matched, if that is worth it."""
        if match is None or not self.worth(request, match):
            return
        start, end = request.computed, request.computed + match.tokens
        compute = self.seconds_to_compute(start, end)
        measured = compute < math.inf and not self.always
        wait = max(compute / match.share, match.seconds + GRACE) if measured else PATIENCE
        restoration = Restoration(match, start, end, start, time.perf_counter() + wait, steps=None)
        request.restoration, restoration.steps = restoration, self.cache.restore(request, restoration, match)
        self.advance(request, 1, wait=False)

    def reach(self, request) -> int:
        """The token up to which the next step may compute."""
        restoration = request.restoration
        if restoration and request.computed < restoration.limit:
            return min(restoration.limit, request.computed + restoration.portion)
        return len(request.tokens)

    def can_compute(self, request) -> bool:
        """Whether the next rows of a request have all the history that they need."""
        restoration = request.restoration
        if restoration and request.computed < restoration.limit:
            return restoration.portion > 0
        return not restoration or restoration.layers == self.depth

    def resume(self):
        """Resume all restorations between two steps, oldest first. Together they compute no more than a step:
        `token_budget` rows in each layer."""
        budget, first = self.engine.token_budget * self.depth, True
        for request in list(self.engine.running):
            if restoration := request.restoration:
                before, rows, layers = restoration.layers, restoration.match.rows, self.depth
                if rows:
                    least = 1 if first else 0  # the oldest gets on, however long it is
                    layers = min(self.depth, before + max(budget // rows, least))
                self.advance(request, layers, wait=False)
                budget, first = budget - (restoration.layers - before) * rows, False
            if request.restoration:
                self.end_if_there(request)

    def wait(self, request, layers: int):
        """In the forward pass: go on when the history of so many layers is there. Raises Interrupted if the
        request was given up, if chapter 06's loading has overtaken what the step computes, or if another one
        has come, which can compute while this one waits."""
        computed = request.computed
        self.advance(request, layers, wait=True)
        if request.computed != computed or request not in self.engine.running:
            raise Interrupted

    def advance(self, request, layers: int, wait: bool):
        """Resume the generator until `layers` are there, or until what it waits for has not arrived. Whatever
        raises, a copy that failed or is late, or a generator that ends too early: what is not there is
        computed."""
        restoration, began = request.restoration, time.perf_counter()
        while restoration.steps and (restoration.layers < layers or request.computed < restoration.limit):
            try:
                if not self.arrived(request, restoration, wait):
                    break
                restoration.awaited = next(restoration.steps, None)
                if restoration.awaited is None:
                    restoration.steps = None
                    if restoration.layers < self.depth:
                        raise TransferError("the cache gave up")
                elif restoration.awaited is PAUSE:
                    restoration.awaited = None
                    if not wait or request.computed < restoration.limit:
                        break
                    self.interrupt()
            except Interrupted:
                raise
            except Exception as error:
                self.close(restoration)
                request.decisions.append(f"{error}: computed")
                self.engine.counts["failed_restorations"] += 1
                self.doubtful = True
                if restoration.layers < self.depth:
                    self.give_up(request)
                    return
        restoration.spent += time.perf_counter() - began
        if restoration.limit <= request.computed < restoration.end:
            # They have met. Where the limit is the start, that is at once: `computed` runs ahead of what has
            # arrived, and `can_compute` and `wait` keep every pass behind it.
            restoration.found = restoration.end - request.computed
            request.computed = restoration.end

    def arrived(self, request, restoration: Restoration, wait: bool) -> bool:
        """Whether to resume: what the generator waits for is over, or, on a GPU in the pass, is ordered
        before what is computed next, and the host need not wait. Raises TransferError if it failed or is
        late, and Interrupted if somebody came while the pass waited."""
        transfer = restoration.awaited
        if transfer is None:
            return True
        engine, began = self.engine, None
        late = max(restoration.deadline, transfer.issued + GRACE)
        while not transfer.ready:
            if request.computed < restoration.limit and restoration.portion:
                return False  # it computes: nobody waits
            if wait and transfer.queue_wait():
                break
            if time.perf_counter() > late:
                raise TransferError(f"{transfer.label} is late")
            if not wait:
                return False
            self.interrupt()
            began = began or engine.clock.mark()
            engine.sleep(late - time.perf_counter())
        if began:
            self.waits.append((began, engine.clock.mark()))
        transfer.check()
        restoration.passed.append(transfer)
        return True

    def give_up(self, request):
        """Have the request computed, in other blocks: a copy that has failed or is late may still write to
        these. They are free when their transfers are over."""
        request.must_compute = True
        self.engine.requeue(request)

    def end_if_there(self, request):
        """Register what has come back, and ask what follows: it may be in another tier, or saved since."""
        restoration = request.restoration
        if restoration.layers == self.depth and request.computed >= restoration.end:
            self.end(request)
            self.engine.register(request)
            match = self.ask(request)
            self.begin(request, None if match is LATER else match)

    def end(self, request):
        """The request has no restoration any more, however that ended. What is under way, the Cache holds."""
        restoration, request.restoration = request.restoration, None
        self.close(restoration)
        self.learn_pace(restoration)
        if restoration.layers == self.depth and restoration.found:
            self.engine.counts["restored_tokens"] += restoration.found
            parts = restoration.match.parts or {restoration.match.source: restoration.found}
            for source, tokens in parts.items() if not request.readmitted else ():  # else it had that itself
                request.found[source] = request.found.get(source, 0) + tokens
        for transfer in restoration.passed:
            request.timeline.add(transfer.lane, transfer.label, *transfer.span())

    def close(self, restoration: Restoration):
        if restoration.steps:
            restoration.steps.close()
            restoration.steps = None

    def learn_pace(self, restoration: Restoration):
        """Note how long a restoration took that brought all it had promised, while nobody else was there."""
        whole = restoration.layers == self.depth and restoration.found == restoration.match.tokens >= LONG
        if whole and len(self.engine.running) == 1 and restoration.match.seconds:
            self.paces.append(max(1.0, restoration.spent / restoration.match.seconds))
            self.doubtful |= self.paces[-1] > 1 + DOUBT

    # Measuring while nothing runs

    def interrupt(self, *_):
        """Raise Interrupted if somebody has come."""
        if self.engine.arrivals:
            raise Interrupted

    def idle(self) -> float | None:
        """Nothing runs -> seconds until this wants to be called again; None: nothing is left to measure.
        While in doubt (at the start, after a refusal, a failure, a slow restoration) measure now, and then
        after 1, 2, 4 to 32 s, until two measurements agree."""
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
        self.pause = min(max(PAUSES[0], 2 * self.pause), PAUSES[1]) if self.doubtful else 0.0
        self.due = time.perf_counter() + self.pause
        return self.pause if self.doubtful else None

    def measure(self) -> list[float]:
        """Measure the Cache's speed and that of prefill -> both; [] if nothing depends on them."""
        speed = self.cache.idle()
        if speed is None:
            return []
        self.measure_computing()
        self.paces = deque(PACES, maxlen=8)
        return [speed, self.computing.value or 1.0]

    def nobodys_request(self, tokens: int, computed: int = 0) -> Request | None:
        """-> a request to measure with, in free blocks, whose caller releases them; None if too few are free:
        measuring evicts nothing."""
        pool, blocks = self.engine.pool, self.engine.pool.num_blocks(tokens)
        if pool.free.count(1) >= blocks:
            return Request([0] * tokens, 1, table=pool.allocate(blocks), computed=computed)

    def measure_computing(self):
        """Compute a prompt of nobody's, if there are free blocks for it. Raises Interrupted when somebody
        comes."""
        engine, config = self.engine, self.engine.model.config
        tokens = min(max(LONG, engine.token_budget), ROWS, config.max_position_embeddings)
        if tokens < LONG or not (request := self.nobodys_request(tokens) or self.nobodys_request(LONG)):
            return
        try:
            run = partial(engine.runner.forward, [(request, len(request.tokens))])
            layer = fastest_layer(run, engine.model.device, self.interrupt, self.agree)
        finally:
            engine.pool.release(request.table)
        self.computing.forget()
        self.computing.note(flops(config, 0, len(request.tokens)), self.depth * layer)
