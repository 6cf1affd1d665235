"""The driver of a Cache: it starts, resumes and ends restorations, and handles their failures, for all
chapters.

A `Restorer` takes the place of chapter 02's `NoLowerTier`. If a restoration fails or is late, the missing
tokens are recomputed. An exception in `match`, before a restoration starts, fails its request alone
(`RequestQueue.contain`)."""

import math
import time

import torch

from common.cache import Cache, Restoration
from common.estimates import Estimates
from common.link import TransferError
from common.requests import Interrupted, Request, RequestQueue

# Seconds that a restoration may be late before it fails, because a busy host can delay a healthy copy
GRACE = 0.05


class Restorer:
    """The engine's lower tier: a Cache, and the rules for its restorations.

    The engine calls the methods below in the order of a step. The Restorer reads the engine's `arrivals`, and
    calls its `register`, `requeue`, `contain`, `sleep` and `on_error`."""

    def __init__(self, cache: Cache, estimates: Estimates):
        """`estimates`: predicts the seconds of loading and of computing."""
        self.cache, self.estimates = cache, estimates
        self.waited = []  # (start, end) clock marks of the current pass's waits

    # What the engine calls, in the order of a step

    def attach(self, engine: RequestQueue):
        """Attach the Cache to the engine. Called once, by the engine's constructor."""
        self.engine, self.depth = engine, len(engine.model.layers)
        self.estimates.engine = engine
        self.cache.attach(engine)
        engine.fields = {**engine.fields, **self.cache.fields}
        engine.pools = {**engine.pools, **self.cache.pools}
        engine.pool.on_evict = self.cache.on_evict

    @property
    def busy(self) -> bool:
        """Whether a transfer is in flight, even if no request waits for it."""
        return any(self.cache.in_flight.values())

    def submitted(self, request: Request):
        """Let the Cache start a prefetch. Called when a request is queued or re-queued."""
        if not request.readmitted:
            request.wait_deadline = request.received + self.estimates.max_wait(len(request.tokens))
        if not request.must_compute:
            with self.engine.contain(request):
                self.cache.submitted(request)

    def poll(self):
        """Release the blocks of completed transfers. Called at the start of each step."""
        self.cache.poll()

    def waits(self, request: Request) -> bool:
        """Return True to keep the request queued while its tokens are prefetched. Called at admission.

        After the request's `wait_deadline` the answer is always False."""
        waits = not request.must_compute and self.cache.waits(request)
        return waits and time.perf_counter() < request.wait_deadline

    def start_restoration(self, request: Request):
        """Start to restore the tokens that the Cache offers, if loading them pays. The Cache issues its first
        copies here.

        Called after admission, once the request has its blocks, and again after each complete restoration."""
        match = None if request.must_compute else self.cache.match(request)
        if match and (most := self.estimates.load_or_compute(request, match, self.cache.agree)):
            start, end = request.computed, request.computed + match.tokens
            deadline = time.perf_counter() + max(most, match.seconds + GRACE)
            restoration = self.cache.restoration_class(request, match, start, end, deadline)
            request.restoration, request.next = restoration, end
            restoration.generator = self.cache.restore(request, restoration, match)  # it runs in `advance`
            self.advance(request, 1, wait=False)

    def resume_restorations(self, running: list[Request]) -> list[Request]:
        """Resume all restorations, oldest first, and end each complete one. Called between two forward
        passes.

        Some restorations do not only copy: they compute K and V. In one step these together do at most the
        work of a forward pass of `token_budget` tokens. But the oldest always restores at least one layer.

        Returns: the requests that can compute in the next step without waiting for a copy. If there is none,
        return the oldest request, whose pass waits before each layer."""
        left = budget = self.engine.token_budget * self.depth
        for request in list(running):
            if restoration := request.restoration:
                with self.engine.contain(request):
                    rows, before = restoration.match.rows, restoration.layers
                    most = before + max(left // rows, int(left == budget)) if rows else self.depth
                    self.advance(request, min(self.depth, most), wait=False)
                    left -= (restoration.layers - before) * rows
                    if request.restoration and request.computed >= restoration.end:
                        self.end_restoration(request)
                        self.engine.register(request)
                        self.start_restoration(request)  # later tokens may be in another tier
        ready = [one for one in running if one.restoration is None or one.restoration.computes]
        return ready or running[:1]

    def before_layer(self, index: int, hidden: torch.Tensor, batch: "Batch"):  # noqa: F821
        """Wait until the K and V that layer `index` reads are restored, then pass the layer's input `hidden`
        [T, D] to the Cache. Called in the forward pass, before each layer.

        Raises Interrupted if the wait has changed the step's work: a restoration has failed, or a request has
        arrived or was cancelled. The engine then runs the step again."""
        if index == 0:
            self.waited = []
        for request, _ in batch.work:
            if request.restoration:
                before = request.next
                self.advance(request, index + 1, wait=True)
                if request.next != before or request not in self.engine.running:
                    raise Interrupted
        self.cache.save_layer(index, hidden, batch)

    def after_pass(self, batch: "Batch", began: float, ended: float) -> list[tuple]:  # noqa: F821
        """Let the Cache keep what the forward pass has computed, and let the estimates learn from the pass's
        duration. Called after each pass, with its begin and end in seconds.

        Returns: (start, end) of each span in which the pass waited."""
        waited = [tuple(map(self.engine.clock.seconds, marks)) for marks in self.waited]
        self.estimates.learn(batch.work, ended - began - sum(end - start for start, end in waited))
        with self.engine.contain():  # tokens that could not be saved are recomputed later
            self.cache.save(batch)
        return waited

    def finished(self, request: Request):
        """Forget a request. Called when it finishes, fails, is cancelled or is preempted."""
        if request.restoration:
            self.end_restoration(request)
        self.cache.finished(request)

    def close(self):
        """Close the Cache. Called once, when the engine closes."""
        self.cache.close()

    # Helpers

    def advance(self, request: Request, layers: int, wait: bool):
        """Run the Cache's generator until `layers` layers are restored, or until it yields a copy that has
        not arrived.

        `wait`: whether to wait for that copy, as a forward pass must. If False, a later call resumes the
        generator. A restoration that `computes` never waits.

        If the generator raises, or a copy fails or is late, the restoration ends and its tokens are
        recomputed. Raises Interrupted in a forward pass if a request arrives or is cancelled."""
        restoration = request.restoration
        try:
            while restoration.generator and restoration.layers < layers:
                if restoration.awaited and not self.arrived(restoration, wait):
                    break
                restoration.awaited = next(restoration.generator, restoration)
                if restoration.awaited is restoration:  # the generator has returned
                    restoration.generator = restoration.awaited = None
                    if restoration.layers < self.depth:
                        raise TransferError("the cache ended early")
                elif restoration.awaited is None:  # it has done a portion of work; other requests may run
                    if not wait or restoration.computes:
                        break
                    if self.engine.arrivals:
                        raise Interrupted
        except Interrupted:
            raise
        except Exception as error:
            if not isinstance(error, TransferError):
                self.engine.on_error(error)
            self.give_up(restoration, error)
        if restoration.layers == self.depth:
            request.computed = request.next = max(request.computed, restoration.end)

    def arrived(self, restoration: Restoration, wait: bool) -> bool:
        """Return whether the generator can continue. It can if the awaited copy is complete. On a GPU, it is
        enough that the compute stream waits for the copy: later work on that stream then runs after the copy.

        `wait`: True in a forward pass. Then the GPU's compute stream waits for the copy; without a GPU, the
        host waits. Raises TransferError if the copy has failed or is late."""
        engine, transfer, began = self.engine, restoration.awaited, self.engine.clock.mark()
        if not transfer.ready:
            if restoration.computes:
                return False
            while not (wait and transfer.queue_wait() or transfer.ready):
                left = max(restoration.deadline, transfer.issued + GRACE) - time.perf_counter()
                if left < 0:
                    raise TransferError(f"{transfer.label} is late")
                if not wait:
                    return False
                if engine.arrivals:
                    raise Interrupted
                engine.sleep(left)
            self.waited.append((began, engine.clock.mark()))
        transfer.check()
        restoration.completed.append(transfer)
        return True

    def give_up(self, restoration: Restoration, error: Exception):
        """End a restoration that failed. The engine recomputes its missing tokens.

        The request returns to the queue and gets other blocks, because a late copy may still write to its old
        ones. The old blocks become free when their copies complete. If the restoration `keeps_part`, the
        request keeps its blocks instead, and computes only what is missing in them."""
        request = restoration.request
        self.stop(restoration)
        request.decisions.append(f"{error}: computed")
        self.engine.counts["failed_restorations"] += 1
        if restoration.layers < self.depth and not restoration.keeps_part:
            request.must_compute = True
            self.engine.requeue(request)

    def end_restoration(self, request: Request):
        """Remove the restoration from its request, and count the restored tokens. Blocks stay referenced
        until their copies complete (`Cache.hold`).

        If the forward pass waited for the copies, layer by layer, this is called in the step after it, or
        when the request ends."""
        restoration, request.restoration, request.portion = request.restoration, None, math.inf
        self.stop(restoration)
        if request.computed >= restoration.end and (restored := restoration.restored):
            self.engine.counts["restored_tokens"] += restored
            if not request.readmitted:  # a readmitted request may restore its own tokens: not a hit
                for source, tokens in restoration.match.found.items():
                    request.found[source] = request.found.get(source, 0) + min(tokens, restored)
        for transfer in restoration.completed:
            request.timeline.add(transfer.lane, transfer.label, *transfer.span())

    def stop(self, restoration: Restoration):
        """Close the generator, if it has not ended."""
        if restoration.generator:
            restoration.generator.close()
            restoration.generator = None
