"""A fourth prefetch policy for chapter 07: compute from the front while storage is read from the back.

    python 07_tiered_storage.py --storage file:pages --prefetch both_ends
"""

import importlib
from itertools import takewhile

from common import link as links

offload, both_ends = importlib.import_module("03_cpu_offload"), importlib.import_module("06_bidirectional")


class BothEnds:
    """A mixin for chapter 07's Cache, to be named before it among the bases.

    A request stays queued until storage has answered which pages it holds. Then the engine computes the
    request's pages from the front, while storage reads them from the back, the last page first."""

    direction = -1  # storage reads the last page first

    def waits(self, request):
        """Return True to keep the request queued: storage has not answered, and may in time."""
        return not (request.memo and request.memo.answered) and super().waits(request)

    def offer(self, request):
        """Return a Match of what follows the computed tokens, up to the last page that storage holds.

        Its seconds assume that the engine computes from the front at the same time."""
        match = super().offer(request)
        compute = self.estimates.seconds_to_compute(request.computed, request.computed + match.tokens)
        match.seconds, _ = both_ends.time_to_meet(match.seconds, compute)
        return match

    def match(self, request):
        """Return a Match of the next pages in host memory or, if there are none, of the pages in storage.

        Match.blocks is a list of host blocks in the first case, and the Prefetch in the second."""
        match = super().match(request)
        return self.offer(request) if not match and self.offers(request, request.computed) else match

    def offers(self, request, start: int) -> bool:
        """Return True if storage has delivered, or may still deliver, pages after token `start`."""
        prefetch = request.memo
        if not prefetch or not prefetch.answered or len(prefetch.chain) * self.pool.block_size <= start:
            return False
        return not prefetch.ended or prefetch.chain[-1] in self.host.block_of

    def restore(self, request, restoration, match):
        """Load pages from host memory, or compute from the front while pages arrive from the back."""
        if match.blocks is request.memo:
            return (yield from self.restore_from_back(request, restoration, match.blocks))
        if self.offers(request, restoration.end):
            restoration.limit = restoration.end  # steps stop here: `match` offers the rest from storage
        yield from super().restore(request, restoration, match)
        restoration.limit = restoration.start

    def restore_from_back(self, request, restoration, prefetch):
        """Copy pages to the request's blocks as they arrive in host memory, until both ends have met.

        It ends early if storage delivers no more pages; the engine computes the rest. Lowering
        `restoration.limit` below a page claims the page, and no step computes a claimed page."""
        size, copies, restoration.limit = self.pool.block_size, [], restoration.end
        try:
            while not restoration.ends_met:
                offload.HostCache.poll(self)  # handles completed reads, and starts none
                front = request.computed + dict(self.engine.work).get(request, 0)  # the end of the step
                unclaimed = prefetch.chain[self.pool.num_blocks(front) : restoration.limit // size]
                come = [*takewhile(self.host.block_of.__contains__, reversed(unclaimed))]
                if come:
                    restoration.limit -= len(come) * size
                    places = [self.host.block_of[page] for page in reversed(come)]
                    copies += self.copy_in(request, restoration.limit, places)
                elif prefetch.ended:
                    break  # storage delivers no more pages
                else:  # the next step computes its share (chapter 06), in whole pages
                    left = restoration.limit - request.computed
                    load = left / size * self.host.block_bytes / self.storage.speed()
                    compute = self.estimates.seconds_to_compute(request.computed, restoration.limit)
                    end = request.computed + both_ends.portion(left, load, compute)
                    restoration.portion = self.pool.num_blocks(end) * size - request.computed
                    yield
            restoration.portion = restoration.end  # more than is left: prefill computes up to the limit
            yield from copies
            restoration.layers = len(self.model.layers)
        finally:
            links.cancel(copies)
            self.end_prefetch(prefetch)
            request.timeline.plan = both_ends.describe_plan(restoration)

    def poll(self):
        """Called in each step: continue reads for running requests until their restorations end."""
        super().poll()
        for request in self.engine.running:
            prefetch, restoration = request.memo, request.restoration
            if prefetch and not (restoration and restoration.generator):
                self.end_prefetch(prefetch)
            elif prefetch and prefetch.answered and not prefetch.ended:
                self.read_l3(prefetch)


def added_to(cache: type) -> type:
    """Return a subclass of chapter 07's Cache with this policy."""
    return type("BothEndsCache", (BothEnds, cache), {})
