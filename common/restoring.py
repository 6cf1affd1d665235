"""The driver of a Cache: it starts, resumes and ends restorations, and handles their failures, for all
chapters.

A `Restorer` takes the place of chapter 02's `NoLowerTier`. If a restoration fails or is late, the missing
tokens are recomputed. An exception in `match`, before a restoration starts, fails its request alone
(`RequestQueue.contain`)."""

import time
from collections.abc import Generator
from dataclasses import dataclass, field

import torch

from common.cache import Cache, Match
from common.link import Transfer, TransferError
from common.requests import Interrupted, Request, RequestQueue

# Seconds that a restoration may be late before it fails, because a busy host can delay a healthy copy
GRACE = 0.05


@dataclass(eq=False)
class Restoration:
    """The restoration of tokens [start, end) of one request.

    The Cache restores tokens [limit, end): their K and V are in the request's blocks for the first `layers`
    layers. The engine computes tokens [start, limit) in ordinary steps of up to `portion` tokens.

    In all chapters except 06, `limit` stays at `start`. Then `ends_met` is True from the start, `portion` is
    unused, and the next step computes the tokens after `end`. Before each layer, its forward pass waits until
    the layer's K and V of the restored tokens have arrived.

    Chapter 06 (and `both_ends` in 07) first sets `limit` to `end`. The Cache lowers it as chunks arrive from
    the back, until it meets the tokens that are computed from the front."""

    request: Request
    match: Match
    deadline: float  # time.perf_counter() after which an incomplete copy is late
    grace: float = GRACE  # seconds that each copy gets after it was issued, even if the deadline has passed
    generator: Generator | None = None  # of Cache.restore; None: it has ended
    layers: int = 0  # layers whose K and V are restored
    awaited: Transfer | None = None  # what the generator yielded last, until it is complete
    completed: list[Transfer] = field(default_factory=list)  # transfers that it awaited earlier
    portion: int = 0  # tokens before `limit` that the next step may compute

    def __post_init__(self):
        self.limit = self.start = self.request.computed
        self.end = self.start + self.match.tokens

    @property
    def ends_met(self) -> bool:
        """Whether all tokens before `limit` are computed."""
        return self.request.computed >= self.limit

    @property
    def computes(self) -> bool:
        """Whether the next step may compute tokens before `limit`. Then no step waits for the copies."""
        return not self.ends_met and self.portion > 0

    @property
    def next(self) -> int:
        """Position of the first token that the next step computes."""
        return max(self.end, self.request.computed) if self.ends_met else self.request.computed

    @property
    def compute_end(self) -> int:
        """Position before which the next step must stop."""
        return len(self.request.tokens) if self.ends_met else min(self.limit, self.next + self.portion)

    def has_layers(self, layers: int) -> bool:
        """Whether the next tokens can pass the first `layers` layers. They can if the K and V of all tokens
        before them are in the request's blocks in these layers."""
        return self.ends_met and self.layers >= layers

    @property
    def is_complete(self) -> bool:
        """Whether the K and V of all tokens before `end` are in the blocks, in all layers."""
        return self.request.computed >= self.end


class Restorer:
    """The engine's lower tier: a Cache, and the rules for its restorations.

    The engine calls the methods below in the order of a step. The Restorer calls the engine's `register`,
    `requeue`, `contain`, `interrupt`, `sleep` and `log_event`."""

    def __init__(self, cache: Cache, estimates: "Estimates"):  # noqa: F821
        """`estimates`: predicts the seconds of loading and of computing (common/estimates.py)."""
        self.cache, self.estimates = cache, estimates
        self.waited = []  # (start, end) clock marks of the current pass's waits
        self.threads = torch.get_num_threads()

    # What the engine calls, in the order of a step

    def attach(self, engine: RequestQueue):
        """Attach the Cache to the engine. Called once, by the engine's constructor."""
        self.engine, self.depth = engine, len(engine.model.layers)
        self.estimates.attach(engine, self.cache)
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
        """Return True to keep the request queued while its tokens are prefetched.

        Called at admission. After the request's `wait_deadline` the answer is always False."""
        waits = not request.must_compute and self.cache.waits(request)
        return waits and time.perf_counter() < request.wait_deadline

    def start_restoration(self, request: Request):
        """Start to restore the tokens that the Cache offers, if `decide` chooses to load them. The Cache
        issues its first copies here.

        Called after admission, once the request has its blocks, and again after each complete restoration."""
        match = None if request.must_compute else self.cache.match(request)
        if match and (most := self.decide(request, match)):
            grace = 0.0 if match.trial else GRACE
            deadline = time.perf_counter() + (most if match.trial else max(most, match.seconds + GRACE))
            request.restoration = restoration = Restoration(request, match, deadline, grace)
            restoration.generator = self.cache.restore(request, restoration, match)  # it runs in `advance`
            self.advance(request, 1, wait=False)

    def resume_restorations(self, running: list[Request]) -> list[Request]:
        """Resume all restorations, oldest first. Called between two forward passes.

        Restorations that project or compute (04, 05) may together use as much work as one step's token
        budget.

        Returns: the requests that can compute in the next step without waiting for a copy. If there is none,
        return the oldest request; its forward pass then waits before each layer."""
        left = self.engine.token_budget * self.depth  # layer rows: one token in one layer each
        for request in list(running):
            with self.engine.contain(request):
                if request.restoration:
                    left -= self.resume_restoration(request, left)
        return [one for one in running if self.ready(one.restoration)] or running[:1]

    def ready(self, restoration: Restoration | None) -> bool:
        """-> whether a step can compute the request's next tokens without waiting for a copy."""
        return restoration is None or restoration.has_layers(self.depth) or restoration.computes

    def resume_restoration(self, request: Request, left: int) -> int:
        """Resume one restoration, as far as `left` layer rows allow. Complete it if all its tokens are
        restored.

        A layer row is one token in one layer. Returns: the layer rows of the layers that it has completed
        now, or 0 if it only copies. Rows of an incomplete layer (in 05, recomputing takes several portions)
        count once that layer is complete."""
        restoration, layers = request.restoration, self.depth
        before, rows = restoration.layers, restoration.match.rows
        if rows:  # it projects (04) or computes (05); copies alone (03) cost no rows
            oldest = left == self.engine.token_budget * self.depth  # the oldest always gets at least a layer
            layers = min(layers, before + max(left // rows, int(oldest)))
        self.advance(request, layers, wait=False)
        if request.restoration and restoration.is_complete:
            self.end_restoration(request)
            self.engine.register(request)
            # Ask the Cache again: later tokens may be in another tier, or may have been saved since the last
            # match
            self.start_restoration(request)
        return (restoration.layers - before) * rows

    def before_layer(self, index: int, hidden: torch.Tensor, batch: "Batch"):  # noqa: F821
        """Wait until the K and V that layer `index` reads are restored, then pass the layer's input `hidden`
        [T, D] to the Cache. Called in the forward pass, before each layer.

        Raises Interrupted if the step is out of date: `next` of one of its requests has changed, one of them
        no longer runs, or, during a wait, a request has arrived or was cancelled. The engine then runs the
        step again."""
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

    def leaves_a_core(self, batch: "Batch") -> bool:  # noqa: F821
        """Return whether the pass must leave one core to the thread that copies.

        True if one of the restorations only copies, and restores at least 8 times as many tokens as the pass
        computes.

        After each matrix product, PyTorch's threads spin for a while. If there were one for each core, one of
        them would share its core with the copying thread, and every product would wait for this slow
        thread."""
        matches = [request.restoration.match for request, _ in batch.work if request.restoration]
        rows = sum(count for _, count in batch.work)
        return any(not match.rows and 8 * rows <= match.tokens for match in matches)

    def after_pass(self, batch: "Batch", began: float, ended: float) -> list[tuple]:  # noqa: F821
        """Let the Cache keep what the forward pass has computed, and learn from its duration. Called after
        each pass, with its begin and end in seconds.

        Returns: (start, end) of each span in which the pass waited."""
        torch.set_num_threads(self.threads)
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

    def decide(self, request: Request, match: Match) -> float:
        """Decide whether to load the match, and append the reason to `request.decisions`.

        Returns: the seconds that loading may take, or 0.0 to compute the tokens."""
        most, words = self.estimates.load_or_compute(request, match)
        request.decisions.append(words)
        self.engine.log_event("restore", [request], match.tokens, words=words)
        self.engine.counts["declined"] += not most
        return most

    def advance(self, request: Request, layers: int, wait: bool):
        """Run the Cache's generator until `layers` layers are restored, or until it yields a copy that has
        not arrived.

        `wait`: True in a forward pass: block until that copy has arrived. If `wait` is False, or if the
        request computes some of these tokens itself (06), return at once; a later call resumes the generator.

        If the generator raises, or a copy fails or is late, the restoration ends and its tokens are
        recomputed. Raises Interrupted in a forward pass if a request arrives or is cancelled."""
        restoration = request.restoration
        try:
            while restoration.generator and not restoration.has_layers(layers):
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
                    self.engine.interrupt()
        except Interrupted:
            raise
        except Exception as error:
            if not isinstance(error, TransferError):
                self.engine.on_error(error)
            self.give_up(restoration, error)
        finally:
            if restoration.has_layers(self.depth):  # skip the restored tokens
                request.computed = restoration.next

    def arrived(self, restoration: Restoration, wait: bool) -> bool:
        """Return whether the generator can continue. It can if the awaited copy is complete. On a GPU it also
        can if the compute stream waits for the copy, because work that is queued later runs after the copy.

        `wait`: True in a forward pass. Then the GPU's compute stream waits for the copy; without a GPU, the
        host waits. Raises TransferError if the copy has failed or is late."""
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
        """End a restoration that failed. The engine recomputes its missing tokens.

        The request returns to the queue and gets other blocks, because a late copy may still write to its old
        ones. The old blocks become free when their copies complete. In 06, each loaded token has its K and V
        in all layers; there the request keeps its blocks, and prefill computes the tokens before `limit`."""
        request = restoration.request
        self.stop(restoration)
        request.decisions.append(f"{error}: computed")
        self.engine.counts["failed_restorations"] += 1
        if restoration.layers < self.depth:
            request.must_compute = True
            self.engine.requeue(request)

    def end_restoration(self, request: Request):
        """Remove the restoration from its request, and count the restored tokens. Blocks stay referenced
        until their copies complete (`Cache.hold`)."""
        restoration, request.restoration = request.restoration, None
        self.stop(restoration)
        restored = restoration.end - restoration.limit  # those before `limit` were computed
        if restoration.is_complete and restored:
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
