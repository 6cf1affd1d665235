"""What drives a Cache: when a restoration begins, goes on, waits, fails and ends; for all chapters, once.

`Restorer` stands in the place of chapter 02's `NoLowerTier`. The rule for each restoration that fails or is
late: what was to come back is computed. (What raises before it has begun ends its request:
`RequestQueue.contain`.)"""

import time
from dataclasses import dataclass, field

import torch

from common.cache import Cache, Match
from common.link import TransferError
from common.requests import Interrupted, Request, RequestQueue

GRACE = 0.05  # seconds that a restoration may be late in any case: a busy host is no failure


@dataclass(eq=False)
class Restoration:
    """Tokens `start` to `end` of a request come back. Those from `limit` on are in its blocks, for the first
    `layers` layers; those before are computed meanwhile, in ordinary steps of up to `portion` tokens.

    In chapters 03 to 05 `limit` is `start`: it has `met`, `portion` says nothing, and the rows behind `end`
    are next at once, while a pass waits before each layer for that layer's history. Chapter 06 begins with
    `limit` at `end`, and lowers it until both ends meet."""

    request: Request
    match: Match
    deadline: float  # in seconds of time.perf_counter(): nobody waits longer
    grace: float = GRACE  # seconds that each copy may take, also after the deadline
    generator: object = None  # the Cache's generator, until it has ended
    layers: int = 0  # whose history is there
    awaited: object = None  # the Transfer that the generator yielded last, until that is over
    completed: list = field(default_factory=list)  # the Transfers before
    portion: int = 0  # tokens before `limit` that the next step may compute

    def __post_init__(self):
        self.limit = self.start = self.request.computed
        self.end = self.start + self.match.tokens

    @property
    def ends_met(self) -> bool:
        """Whether all before `limit` is computed."""
        return self.request.computed >= self.limit

    @property
    def computes(self) -> bool:
        """Whether its request computes some of these tokens: no step waits for it then."""
        return not self.ends_met and self.portion > 0

    @property
    def next(self) -> int:
        """The first token that the next step computes."""
        return max(self.end, self.request.computed) if self.ends_met else self.request.computed

    @property
    def compute_end(self) -> int:
        """The token up to which the next step may compute."""
        return len(self.request.tokens) if self.ends_met else min(self.limit, self.next + self.portion)

    def has_layers(self, layers: int) -> bool:
        """Whether the next rows have all the history that they need in so many layers."""
        return self.ends_met and self.layers >= layers

    @property
    def is_complete(self) -> bool:
        """Whether all tokens up to `end` are in the blocks."""
        return self.request.computed >= self.end


class Restorer:
    """A Cache behind the device. It calls the engine's register, requeue, contain, interrupt, sleep, tell."""

    def __init__(self, cache: Cache, estimates: object):
        """`estimates`: of what pays (common/estimates.py)."""
        self.cache, self.estimates = cache, estimates
        self.waited = []  # (start, end) marks of what the pass under way has waited for
        self.threads = torch.get_num_threads()

    # What the engine calls, in the order of a step

    def attach(self, engine: RequestQueue):
        self.engine, self.depth = engine, len(engine.model.layers)
        self.estimates.attach(engine, self.cache)
        self.cache.attach(engine)
        engine.fields = {**engine.fields, **self.cache.fields}
        engine.pools = {**engine.pools, **self.cache.pools}
        engine.pool.on_evict = self.cache.on_evict

    @property
    def busy(self) -> bool:
        return any(self.cache.in_flight.values())

    def submitted(self, request: Request):
        """The request stands in line, maybe again: have the Cache bring nearer what it needs."""
        if not request.readmitted:
            request.wait_deadline = request.received + self.estimates.max_wait(len(request.tokens))
        if not request.must_compute:
            with self.engine.contain(request):
                self.cache.submitted(request)

    def poll(self):
        self.cache.poll()

    def waits(self, request: Request) -> bool:
        """-> whether something comes nearer that it waits for, while it is patient."""
        waits = not request.must_compute and self.cache.waits(request)
        return waits and time.perf_counter() < request.wait_deadline

    def start_restoration(self, request: Request):
        """Begin to bring back what the Cache has, if that pays: the first copies are issued here."""
        match = None if request.must_compute else self.cache.match(request)
        if match and (most := self.decide(request, match)):
            grace = 0.0 if match.trial else GRACE
            deadline = time.perf_counter() + (most if match.trial else max(most, match.seconds + GRACE))
            request.restoration = restoration = Restoration(request, match, deadline, grace)
            restoration.generator = self.cache.restore(request, restoration, match)  # which runs nothing yet
            self.advance(request, 1, wait=False)

    def resume_restorations(self, running: list) -> list:
        """Between two steps: go on with all restorations, oldest first; together they compute no more rows
        than a step. -> the requests that the step may compute: those that need not wait. If all must, the
        oldest computes behind its history, layer by layer."""
        left = self.engine.token_budget * self.depth  # rows of a layer
        for request in list(running):
            with self.engine.contain(request):
                if request.restoration:
                    left -= self.resume_restoration(request, left)
        return [one for one in running if self.ready(one.restoration)] or running[:1]

    def ready(self, restoration: Restoration | None) -> bool:
        """-> whether a step can compute the next rows without waiting."""
        return restoration is None or restoration.has_layers(self.depth) or restoration.computes

    def resume_restoration(self, request: Request, left: int) -> int:
        """Go on with a restoration as far as `left` rows allow -> rows that it has computed."""
        restoration, layers = request.restoration, self.depth
        before, rows = restoration.layers, restoration.match.rows
        if rows:  # it projects (04) or computes (05); a copy takes no processor
            oldest = left == self.engine.token_budget * self.depth  # which always makes progress
            layers = min(layers, before + max(left // rows, int(oldest)))
        self.advance(request, layers, wait=False)
        if request.restoration and restoration.is_complete:
            self.end_restoration(request)
            self.engine.register(request)
            self.start_restoration(request)  # what follows may be elsewhere, or saved since
        return (restoration.layers - before) * rows

    def before_layer(self, index: int, hidden: torch.Tensor, batch: object):
        """In the pass: wait for this layer's history, and show the Cache the layer's input [T, D]. Raises
        Interrupted if other rows are next by now, or if a request has come that can compute meanwhile."""
        if index == 0:
            self.waited = []
            torch.set_num_threads(max(1, self.threads - self.leaves_a_core(batch)))
        try:
            for request, _ in batch.work:
                if request.restoration:
                    before = request.next
                    self.advance(request, index + 1, wait=True)
                    if request.next != before or request not in self.engine.running:
                        raise Interrupted
        except Interrupted:
            torch.set_num_threads(self.threads)
            raise
        self.cache.save_layer(index, hidden, batch)

    def leaves_a_core(self, batch: object) -> bool:
        """-> whether a core is left to the thread that copies: in a pass that waits for copies alone, and has
        few rows beside the tokens that come back. PyTorch's threads spin after each product, and a product of
        all cores would wait until the copying thread leaves one."""
        matches = [request.restoration.match for request, _ in batch.work if request.restoration]
        rows = sum(count for _, count in batch.work)
        return any(not match.rows and 8 * rows <= match.tokens for match in matches)

    def after_pass(self, batch: object, began: float, ended: float) -> list[tuple[float, float]]:
        """Let the Cache keep what a pass has computed -> the spans in which it waited."""
        torch.set_num_threads(self.threads)
        waited = [tuple(map(self.engine.clock.seconds, marks)) for marks in self.waited]
        self.estimates.learn(batch.work, ended - began - sum(end - start for start, end in waited))
        with self.engine.contain():  # what could not be kept is computed again
            self.cache.save(batch)
        return waited

    def finished(self, request: Request):
        if request.restoration:
            self.end_restoration(request)
        self.cache.finished(request)

    def close(self):
        self.cache.close()

    # What these are written with

    def decide(self, request: Request, match: Match) -> float:
        """Decide whether to load what was offered, and have the request say why -> the seconds that it may
        take, or 0."""
        most, words = self.estimates.load_or_compute(request, match)
        request.decisions.append(words)
        self.engine.log_event("restore", [request], match.tokens, words=words)
        self.engine.counts["declined"] += not most
        return most

    def advance(self, request: Request, layers: int, wait: bool):
        """Run the Cache's generator until so many layers are there, or until it awaits a copy that has not
        arrived. In a pass (`wait`) wait for that copy, unless the request computes meanwhile.

        If anything raises (a copy that failed or is late, a Cache that ends early), the rest is computed.
        Raises Interrupted, in a pass, if a request comes."""
        restoration = request.restoration
        try:
            while restoration.generator and not restoration.has_layers(layers):
                if restoration.awaited and not self.arrived(restoration, wait):
                    break
                restoration.awaited = next(restoration.generator, restoration)
                if restoration.awaited is restoration:  # the generator has ended
                    restoration.generator = restoration.awaited = None
                    if restoration.layers < self.depth:
                        raise TransferError("the cache gave up")
                elif restoration.awaited is None:  # it has computed a portion: others may be next
                    if not wait or restoration.computes:
                        break
                    self.engine.interrupt()
        except Interrupted:
            raise
        except Exception as error:
            self.give_up(restoration, error)
        finally:
            if restoration.has_layers(self.depth):  # over what has arrived
                request.computed = restoration.next

    def arrived(self, restoration: Restoration, wait: bool) -> bool:
        """-> whether the awaited copy is over; in a pass (`wait`) order it before what is computed next (on a
        GPU), or wait on the host until it is. Raises TransferError if it has failed or is late."""
        engine, transfer, began = self.engine, restoration.awaited, self.engine.clock.mark()
        if not transfer.ready:
            if restoration.computes:
                return False
            while not (wait and transfer.queue_wait() or transfer.ready):
                left = max(restoration.deadline, transfer.issued + restoration.grace) - time.perf_counter()
                if left < 0:
                    raise TransferError(f"{transfer.label} is late")
                if not wait:
                    return False
                engine.interrupt()
                engine.sleep(left)
            self.waited.append((began, engine.clock.mark()))
        transfer.check()
        restoration.completed.append(transfer)
        return True

    def give_up(self, restoration: Restoration, error: Exception):
        """Requeue the request, to be computed in other blocks: a copy that failed or is late may still write
        to these, which are free when it is over. What has come stays if all its layers are there (06)."""
        request = restoration.request
        self.stop(restoration)
        request.decisions.append(f"{error}: computed")
        self.engine.counts["failed_restorations"] += 1
        if restoration.layers < self.depth:
            request.must_compute = True
            self.engine.requeue(request)

    def end_restoration(self, request: Request):
        """Take the restoration from the request, however it ended. The Cache holds what is under way."""
        restoration, request.restoration = request.restoration, None
        self.stop(restoration)
        restored = restoration.end - restoration.limit  # of these tokens those that were not computed
        if restoration.is_complete and restored:
            self.engine.counts["restored_tokens"] += restored
            if not request.readmitted:  # which had some of it itself
                for source, tokens in restoration.match.found.items():
                    request.found[source] = request.found.get(source, 0) + min(tokens, restored)
        for transfer in restoration.completed:
            request.timeline.add(transfer.lane, transfer.label, *transfer.span())

    def stop(self, restoration: Restoration):
        """End the generator."""
        if restoration.generator:
            restoration.generator.close()
            restoration.generator = None
