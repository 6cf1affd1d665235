"""A fourth prefetch policy for chapter 07: the two pointers of chapter 06 over three tiers.

    python 07_tiered_storage.py --storage file:pages --prefetch both_ends
"""

import importlib
from itertools import takewhile

from common import link as links

offload, both_ends = importlib.import_module("03_cpu_offload"), importlib.import_module("06_bidirectional")


class BothEnds:
    """Put before chapter 07's Cache among the bases, this class computes from the front while pages come from
    storage, the last one first (chapter 06). A request waits until storage has said which pages it has."""

    direction = -1

    def waits(self, request):
        return not (request.memo and request.memo.answered) and super().waits(request)

    def offer(self, request):
        """What storage has said it has, while the engine computes from the front."""
        match = super().offer(request)
        compute = self.estimates.seconds_to_compute(request.computed, request.computed + match.tokens)
        match.seconds, _ = both_ends.time_to_meet(match.seconds, compute)
        return match

    def match(self, request):
        """Offer the next run in host memory (`blocks`: its places); if there is none, what storage has
        (`blocks`: the Prefetch)."""
        match = super().match(request)
        return self.offer(request) if not match and self.offers(request, request.computed) else match

    def offers(self, request, start: int) -> bool:
        """Whether storage has brought, or may bring, what is behind token `start`."""
        prefetch = request.memo
        if not prefetch or not prefetch.answered or len(prefetch.chain) * self.pool.block_size <= start:
            return False
        return not prefetch.ended or prefetch.chain[-1] in self.host.block_of

    def restore(self, request, restoration, match):
        """Load what host memory has; or compute from the front, and load from the back."""
        if match.blocks is request.memo:
            return (yield from self.restore_from_back(request, restoration, match.blocks))
        if self.offers(request, restoration.end):
            restoration.limit = restoration.end  # no step goes on behind it: storage offers what follows
        yield from super().restore(request, restoration, match)
        restoration.limit = restoration.start

    def restore_from_back(self, request, restoration, prefetch):
        """Claim pages that have come into host memory, by lowering `limit`, and copy them to the request's
        blocks, until both ends have met or no more pages come. No step computes what is claimed."""
        size, copies, restoration.limit = self.pool.block_size, [], restoration.end
        try:
            while not restoration.ends_met:
                offload.HostCache.poll(self)  # takes in what has been read meanwhile, and begins no reads
                front = request.computed + dict(self.engine.work).get(request, 0)  # where the step ends
                unclaimed = prefetch.chain[self.pool.num_blocks(front) : restoration.limit // size]
                come = [*takewhile(self.host.block_of.__contains__, reversed(unclaimed))]
                if come:
                    restoration.limit -= len(come) * size
                    places = [self.host.block_of[page] for page in reversed(come)]
                    copies += self.copy_in(request, restoration.limit, places)
                elif prefetch.ended:
                    break  # storage brings no more
                else:  # the next step computes its share of the rest (chapter 06), to the end of a page
                    left = restoration.limit - request.computed
                    load = left / size * self.host.block_bytes / self.storage.speed()
                    compute = self.estimates.seconds_to_compute(request.computed, restoration.limit)
                    end = request.computed + both_ends.portion(left, load, compute)
                    restoration.portion = self.pool.num_blocks(end) * size - request.computed
                    yield
            restoration.portion = restoration.end  # more than is left: prefill goes on to the limit
            yield from copies
            restoration.layers = len(self.model.layers)
        finally:
            links.cancel(copies)
            self.end_prefetch(prefetch)
            request.timeline.plan = both_ends.describe_plan(restoration)

    def poll(self):
        """Go on reading for requests that compute meanwhile, as long as their restoration lasts."""
        super().poll()
        for request in self.engine.running:
            prefetch, restoration = request.memo, request.restoration
            if prefetch and not (restoration and restoration.generator):
                self.end_prefetch(prefetch)
            elif prefetch and prefetch.answered and not prefetch.ended:
                self.read_l3(prefetch)


def added_to(cache: type) -> type:
    """-> chapter 07's Cache with this policy."""
    return type("BothEndsCache", (BothEnds, cache), {})
