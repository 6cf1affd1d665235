"""Both ends over three tiers: chapter 07's storage with chapter 06's two pointers.

A request stays queued until storage has answered which pages it holds. Then the engine computes the request's
pages from the front, while storage reads them from the back, the last page first.

    python -m examples.both_ends --demo
    python -m examples.both_ends --storage file:pages      # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import importlib
import random
import tempfile
from functools import partial
from itertools import takewhile

from common.cache import Cache
from shell import charts, cli, lesson

both_ends, tiers = importlib.import_module("06_bidirectional"), importlib.import_module("07_tiered_storage")


class TwoPointers(both_ends.TwoPointers):
    """A page below `limit` is claimed before its copy has arrived, so nothing stays if a copy fails."""

    keeps_part = False


class BothEndsCache(tiers.TieredCache):
    """Chapter 07's Cache with another prefetch policy."""

    direction = -1  # storage reads the last page first
    restoration_class = TwoPointers

    def waits(self, request):
        """Return True to keep the request queued: storage has not answered, and may in time."""
        return not (request.memo and request.memo.answered) and super().waits(request)

    def offer(self, request):
        """Return a Match of the tokens after the computed ones, up to the last page that storage holds.

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
        restoration.limit = restoration.start  # all of it is loaded
        if self.offers(request, restoration.end):
            request.portion = 0  # compute nothing yet: `match` offers the rest from storage
        yield from super().restore(request, restoration, match)

    def restore_from_back(self, request, restoration, prefetch):
        """Copy pages to the request's blocks as they arrive in host memory, until both ends have met.

        It ends early if storage delivers no more pages; the engine computes the rest. Lowering
        `restoration.limit` below a page claims the page, and no step computes a claimed page."""
        size, copies, request.next = self.pool.block_size, [], request.computed
        try:
            while request.computed < restoration.limit:
                Cache.poll(self)  # handles completed reads, and starts none
                front = request.computed + dict(self.engine.work).get(request, 0)  # the end of the step
                unclaimed = prefetch.chain[self.pool.num_blocks(front) : restoration.limit // size]
                come = [*takewhile(self.host.block_of.__contains__, reversed(unclaimed))]
                left = restoration.limit - len(come) * size - request.computed
                if come:
                    restoration.limit -= len(come) * size
                    host_blocks = [self.host.block_of[page] for page in reversed(come)]
                    copies += self.copy_in(request, restoration.limit, host_blocks)
                    request.portion = min(request.portion, left)
                elif prefetch.ended:  # storage delivers no more pages: compute up to the limit
                    request.portion = left
                    yield
                else:  # the next step computes its share (chapter 06), in whole pages
                    load = left / size * self.host.block_bytes / self.storage.speed()
                    compute = self.estimates.seconds_to_compute(request.computed, restoration.limit)
                    end = request.computed + both_ends.portion(left, load, compute)
                    request.portion = min(left, self.pool.num_blocks(end) * size - request.computed)
                    yield
            request.portion = 0
            yield from copies
            restoration.layers = len(self.model.layers)
        finally:
            for copy in copies:
                copy.cancel()
            self.end_prefetch(prefetch)
            request.timeline.plan = charts.describe_chunks(restoration, both_ends.CHUNK)

    def poll(self):
        """Called in each step: continue reads for running requests until their restorations end."""
        super().poll()
        for request in self.engine.running:
            prefetch, restoration = request.memo, request.restoration
            if prefetch and not (restoration and restoration.generator):
                self.end_prefetch(prefetch)
            elif prefetch and prefetch.answered and not prefetch.ended:
                self.read_l3(prefetch, self.kept_for(request))


# The demo ---------------------------------------------------------------------------------------

WAYS = "best_effort", "wait_complete", "both_ends"


def demo(model, frontend, arguments):
    """Ask for a long history that only storage holds, where reading it takes as long as computing it."""
    most = min(lesson.context(model, frontend), 2048)
    with tempfile.TemporaryDirectory() as folder:
        options = {**vars(arguments), "storage": arguments.storage or f"file:{folder}"}
        plain = tiers.make_engine(model, argparse.Namespace(**options))
        options["link"] = plain.lower_tier.cache.bandwidth
        both = make_engine(model, argparse.Namespace(**options))
        text = lesson.document_for(both, frontend, random.Random(0), most // 2, [lesson.SECRET], 2)
        prompt = frontend.request(messages=[dict(role="user", content=text)]).tokens
        seconds = lesson.ask(plain, prompt).ttft_ms / 1e3  # the engine computes the whole prompt
        for engine in plain, both:
            tiers.slow_storage(engine, prompt, seconds)
        engines = {way: both if way == "both_ends" else plain for way in WAYS}
        ways = {way: partial(tiers.ask_under, way, engine, prompt) for way, engine in engines.items()}
        asked = lesson.in_turn(ways)
        for engine in plain, both:
            engine.close()
    answers = [requests[-1] for requests in asked.values()]
    verified = lesson.verify(tiers.paged.baseline.Engine(model), answers)
    report = dict(link=lesson.describe_link(both.lower_tier.cache.load_link), verified=verified)
    times = {way: [one.ttft_ms for one in requests] for way, requests in asked.items()}
    title = f"TTFT, {answers[-1].prompt_tokens} tokens, storage as fast as computing, the guard off"
    rows = lesson.table(title, times, "ttft_ms", "ms")
    computed, waited, ours = (row["ttft_ms"] for row in rows)
    print(
        f"  both_ends: {min(computed, waited) / ours:.2f}x as fast as the better of computing and waiting\n\n"
        "Timeline of both_ends (p: prefill, or pages read; digits: layers loaded; s: pages saved)\n"
        f"{charts.chart(answers[-1].timeline)}"
    )
    return dict(report, rows=rows, counters=charts.counters(both)), [one.timeline for one in answers[:0:-1]]


def make_engine(model, arguments):
    """-> chapter 02's engine with a BothEndsCache. Raises BadRequest."""
    return tiers.make_engine(model, arguments, BothEndsCache)


if __name__ == "__main__":
    cli.main(__doc__, "both_ends", tiers.add_arguments, make_engine, demo)
