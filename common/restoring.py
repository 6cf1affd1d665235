"""What drives a Cache: when a restoration begins, goes on, waits, fails and ends; for all chapters, once.

`Restorer` stands in the place of chapter 02's `Nothing`. The rule for each restoration that fails or is late:
what was to come back is computed. (What raises before it has begun ends its request: `Line.contain`.)"""

import time

import torch

from common.cache import Cache, Match, Restoration
from common.link import TransferError
from common.requests import Interrupted, Line, Request

GRACE = 0.05  # seconds that a restoration may be late in any case: a busy host is no failure


class Restorer:
    """A Cache behind the device. It calls the engine's register, requeue, contain, interrupt, sleep, tell."""

    def __init__(self, cache: Cache, estimates: object):
        """`estimates`: of what pays (common/estimates.py)."""
        self.cache, self.estimates = cache, estimates
        self.waited = []  # (start, end) marks of what the pass under way has waited for

    # What the engine calls, in the order of a step

    def attach(self, engine: Line):
        self.engine, self.depth = engine, len(engine.model.layers)
        self.estimates.attach(engine, self.cache)
        self.cache.attach(engine)
        engine.fields = {**engine.fields, **self.cache.fields}
        engine.pools = {**engine.pools, **self.cache.pools}
        engine.pool.evicting = self.cache.evicting

    @property
    def busy(self) -> bool:
        return any(self.cache.under_way.values())

    def idle(self) -> float | None:
        return self.estimates.idle()

    def submitted(self, request: Request):
        """The request stands in line, maybe again: have the Cache bring nearer what it needs."""
        if not request.readmitted:
            request.patience = request.received + self.estimates.patience(len(request.tokens))
        if not request.must_compute:
            with self.engine.contain(request):
                self.cache.submitted(request)

    def poll(self):
        self.cache.poll()

    def waits(self, request: Request) -> bool:
        """-> whether something comes nearer that it waits for, while it is patient."""
        waits = not request.must_compute and self.cache.waits(request)
        return waits and time.perf_counter() < request.patience

    def begin(self, request: Request):
        """Begin to bring back what the Cache has, if that pays: the first copies are issued here."""
        match = None if request.must_compute else self.cache.match(request)
        if match and (most := self.decide(request, match)):
            deadline = time.perf_counter() + max(most, match.seconds + GRACE)
            request.restoration = restoration = Restoration(request, match, deadline)
            restoration.steps = self.cache.restore(request, restoration, match)  # which runs nothing yet
            self.advance(request, 1, wait=False)

    def resume(self, running: list) -> list:
        """Between two steps: go on with all restorations, oldest first; together they compute no more rows
        than a step. -> the requests that the step may compute: those that need not wait. If all must, the
        oldest computes behind its history, layer by layer."""
        left = self.engine.token_budget * self.depth  # rows of a layer
        for request in list(running):
            with self.engine.contain(request):
                if request.restoration:
                    left -= self.resume_one(request, left)
        return [one for one in running if self.ready(one.restoration)] or running[:1]

    def ready(self, restoration: Restoration | None) -> bool:
        """-> whether a step can compute the next rows without waiting."""
        return restoration is None or restoration.has(self.depth) or restoration.computes

    def resume_one(self, request: Request, left: int) -> int:
        """Go on with a restoration as far as `left` rows allow -> rows that it has computed."""
        restoration, layers = request.restoration, self.depth
        before, rows = restoration.layers, restoration.match.rows
        if rows:  # it projects (04) or computes (05); a copy takes no processor
            oldest = left == self.engine.token_budget * self.depth  # which always makes progress
            layers = min(layers, before + max(left // rows, int(oldest)))
        self.advance(request, layers, wait=False)
        if request.restoration and restoration.whole:
            self.end(request)
            self.engine.register(request)
            self.begin(request)  # what follows may be elsewhere, or saved since
        return (restoration.layers - before) * rows

    def before_layer(self, index: int, hidden: torch.Tensor, batch: object):
        """In the pass: wait for this layer's history, and show the Cache the layer's input [T, D]. Raises
        Interrupted if other rows are next by now, or if a request has come that can compute meanwhile."""
        if index == 0:
            self.waited = []
        for request, _ in batch.work:
            if request.restoration:
                before = request.next
                self.advance(request, index + 1, wait=True)
                if request.next != before or request not in self.engine.running:
                    raise Interrupted
        self.cache.save_layer(index, hidden, batch)

    def after_pass(self, batch: object, began: float, ended: float) -> list[tuple[float, float]]:
        """Let the Cache keep what a pass has computed -> the spans in which it waited."""
        self.estimates.learn(batch.work, ended - began)
        with self.engine.contain():  # what could not be kept is computed again
            self.cache.save(batch)
        return [tuple(map(self.engine.clock.seconds, marks)) for marks in self.waited]

    def finished(self, request: Request):
        if request.restoration:
            self.end(request)
        self.cache.finished(request)

    def close(self):
        self.cache.close()

    # What these are written with

    def decide(self, request: Request, match: Match) -> float:
        """Decide whether to load what was offered, and have the request say why -> the seconds that it may
        take, or 0. What is refused shows no speed, so a little of it is loaded to nowhere."""
        most, words = self.estimates.weigh(request, match)
        request.decisions.append(words)
        self.engine.tell("restore", [request], match.tokens, words=words)
        if not most:
            self.engine.counts["declined"] += 1
            if not self.cache.under_way[lane := f"probe {[*match.found]}"]:
                self.cache.hold(lane, self.cache.probe(request, match))
        return most

    def advance(self, request: Request, layers: int, wait: bool):
        """Go on until so many layers are there, or until a copy is awaited that has not arrived. If anything
        raises (a copy that failed or is late, a Cache that ends early), the rest is computed."""
        restoration, began = request.restoration, time.perf_counter()
        try:
            going = True
            while going and restoration.steps and not restoration.has(layers):
                going = self.arrived(restoration, wait) and self.go_on(restoration, wait)
        except Interrupted:
            raise
        except Exception as error:
            self.give_up(restoration, error)
        finally:
            restoration.spent += time.perf_counter() - began
            if restoration.has(self.depth):  # over what has arrived
                request.computed = restoration.next

    def go_on(self, restoration: Restoration, wait: bool) -> bool:
        """Run the Cache's generator to its next yield -> whether to go on at once. A bare yield means that it
        has computed a portion: between two steps let others run; in a pass stop if a request has come."""
        try:
            restoration.awaited = next(restoration.steps)
        except StopIteration:
            restoration.steps = None
            if restoration.layers < self.depth:
                raise TransferError("the cache gave up") from None
            return False
        if restoration.awaited is not None:
            return True
        if not wait or restoration.computes:
            return False
        self.engine.interrupt()
        return True

    def arrived(self, restoration: Restoration, wait: bool) -> bool:
        """-> whether the awaited copy is over. In a pass (`wait`) make that so first, but for a request that
        computes meanwhile. Raises TransferError if it has failed or is late."""
        if (transfer := restoration.awaited) is None:
            return True
        if not transfer.ready:
            if restoration.computes:
                return False
            if not wait:
                self.seconds_left(restoration)
                return False
            self.wait_for(restoration)
        transfer.check()
        restoration.passed.append(transfer)
        restoration.awaited = None
        return True

    def wait_for(self, restoration: Restoration):
        """Order the awaited transfer before what is computed next (on a GPU), or wait on the host until it is
        over. Raises TransferError if it is late, and Interrupted if a request comes meanwhile."""
        engine, transfer, began = self.engine, restoration.awaited, self.engine.clock.mark()
        while not (transfer.queue_wait() or transfer.ready):
            left = self.seconds_left(restoration)
            engine.interrupt()
            engine.sleep(left)
        self.waited.append((began, engine.clock.mark()))

    def seconds_left(self, restoration: Restoration) -> float:
        """-> until the awaited transfer is late. Raises TransferError if it is."""
        transfer = restoration.awaited
        left = max(restoration.deadline, transfer.issued + GRACE) - time.perf_counter()
        if left < 0:
            raise TransferError(f"{transfer.label} is late")
        return left

    def give_up(self, restoration: Restoration, error: Exception):
        """Requeue the request, to be computed in other blocks: a copy that failed or is late may still write
        to these, which are free when it is over. What has come stays if all its layers are there (06)."""
        request = restoration.request
        self.stop(restoration)
        request.decisions.append(f"{error}: computed")
        self.engine.counts["failed_restorations"] += 1
        self.estimates.doubtful = True
        if restoration.layers < self.depth:
            request.must_compute = True
            self.engine.requeue(request)

    def end(self, request: Request):
        """Take the restoration from the request, however it ended. The Cache holds what is under way."""
        restoration, request.restoration = request.restoration, None
        self.stop(restoration)
        self.estimates.learn_pace(restoration)
        restored = restoration.end - restoration.limit  # of these tokens those that were not computed
        if restoration.whole and restored:
            self.engine.counts["restored_tokens"] += restored
            if not request.readmitted:  # which had some of it itself
                for source, tokens in restoration.match.found.items():
                    request.found[source] = request.found.get(source, 0) + min(tokens, restored)
        for transfer in restoration.passed:
            request.timeline.add(transfer.lane, transfer.label, *transfer.span())

    def stop(self, restoration: Restoration):
        """End the generator."""
        if restoration.steps:
            restoration.steps.close()
            restoration.steps = None
