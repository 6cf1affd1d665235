"""Load or recompute: how fast this machine is, and whether a match is worth loading.

Speeds are measured once, before the first request, and learned from what happens afterwards. Noise only slows
a measurement, so the fastest of the last eight samples counts. A refused match yields no sample; therefore
every eighth refusal in a row is loaded all the same."""

from collections import Counter

from common.cache import Cache, Match
from common.link import Speed
from common.machine import flops, machine_of
from common.requests import Request, RequestQueue

LOAD_THRESHOLD = 0.8  # load what takes at most this share of computing: a load that turns out late costs both
MAX_WAIT = 60.0  # seconds that a request waits at most for its Cache, and for what --always-restore loads
FULL_SPEED = {"cpu": 128, "cuda": 512}  # rows of a step: from here on prefill runs at full speed, or nearly
TRIAL_INTERVAL = 8  # every eighth refusal in a row is loaded all the same

class Estimates:
    """How long an engine computes, and what is worth loading."""

    def __init__(self, always: bool = False):
        """`always`: load whatever is offered (--always-restore)."""
        self.always = always
        self.refusals = Counter()  # source -> refused matches in a row

    def attach(self, engine: RequestQueue, cache: Cache):
        self.engine, self.cache, self.machine = engine, cache, machine_of(engine.model)
        self.computing = Speed(self.machine.fastest)  # operations per second of prefill

    def seconds_to_compute(self, start: int, end: int) -> float:
        """Estimate the prefill of tokens start to end."""
        return self.computing.seconds(flops(self.engine.model.config, start, end))

    def load_or_compute(self, request: Request, match: Match) -> tuple[float, str]:
        """Load what was offered, or compute it, at its share of each step? -> the seconds that loading may
        take, which are those of computing, or 0: it is computed; and why."""
        start, source = request.computed, " and ".join(match.found)
        compute = self.seconds_to_compute(start, start + match.tokens) / match.share
        chosen = self.cache.agree(self.always or match.seconds <= LOAD_THRESHOLD * compute)
        self.refusals[source] = 0 if chosen else self.refusals[source] + 1
        match.trial = not chosen and self.refusals[source] % TRIAL_INTERVAL == 0
        most, verdict = (MAX_WAIT if self.always else compute), "loaded"
        if not chosen:
            most, verdict = (compute / 10, "tried") if match.trial else (0.0, "computed")
        return most, (
            f"{match.tokens} tokens offered ({source}): loading {1e3 * match.seconds:.1f} ms, computing "
            f"{1e3 * compute:.1f} ms: {verdict}"
        )

    def max_wait(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens waits at most for its Cache."""
        return MAX_WAIT if self.always else min(self.seconds_to_compute(0, tokens), MAX_WAIT)

    def learn(self, work: list, seconds: float):
        """Learn from a step. `work`: as after the step; `seconds` that it has computed.

        A step of few rows, or one that also brings something back, is slower than a prefill; so it counts
        only if it was faster than what was believed."""
        spans = [(request.computed - count, request.computed) for request, count in work]
        speed = sum(flops(self.engine.model.config, *span) for span in spans) / max(seconds, 1e-9)
        alone = not any(request.restoration for request, _ in work)
        rows = sum(count for _, count in work)
        if alone and rows >= FULL_SPEED[self.engine.model.device.type] or speed > self.computing.value:
            self.computing.record(speed, 1.0)
        self.machine.fastest = max(self.machine.fastest, speed)
