"""Load or recompute: predict both times, and decide whether a match is worth loading.

Speeds are measured once, before the first request. Afterwards they are learned from what the engine does.
Noise only ever makes a sample slower, so the fastest of the last eight samples counts. A refused match yields
no sample of the speed of loading. Therefore every eighth refused match in a row is loaded anyway."""

from collections import Counter

from common.cache import Cache, Match
from common.link import Speed
from common.machine import flops, machine_of
from common.requests import Request, RequestQueue

# Load if that is estimated to take at most this share of the time to compute. The margin is there because a
# late load costs both times: after it, the tokens are computed as well
LOAD_THRESHOLD = 0.8
MAX_WAIT = 60.0  # seconds: the limit for waiting for a prefetch, and for a load under --always-restore
FULL_SPEED = {"cpu": 128, "cuda": 512}  # rows per step from which prefill runs at nearly full speed
TRIAL_INTERVAL = 8  # load every eighth refused match in a row anyway

class Estimates:
    """The predicted times of one engine, and the decision whether to load tokens or to compute them."""

    def __init__(self, always: bool = False):
        """`always`: load every match (--always-restore)."""
        self.always = always
        self.refusals = Counter()  # source -> refused matches in a row

    def attach(self, engine: RequestQueue, cache: Cache):
        """Measure the machine. Called once, before `Cache.attach`."""
        self.engine, self.cache, self.machine = engine, cache, machine_of(engine.model)
        self.computing = Speed(self.machine.fastest)  # operations per second of prefill

    def seconds_to_compute(self, start: int, end: int) -> float:
        """-> estimated seconds of the prefill of tokens [start, end)."""
        return self.computing.seconds(flops(self.engine.model.config, start, end))

    def load_or_compute(self, request: Request, match: Match) -> tuple[float, str]:
        """Decide whether to load a match or to compute its tokens.

        Returns: the seconds that loading may take, or 0.0 to compute; and one sentence that says why. A load
        may take as long as computing would. A trial, which is a refused match that is loaded anyway, may take
        a tenth of that. A load under --always-restore may take MAX_WAIT."""
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
        """-> how many seconds a prompt of `tokens` tokens may wait for a prefetch."""
        return MAX_WAIT if self.always else min(self.seconds_to_compute(0, tokens), MAX_WAIT)

    def learn(self, work: list, seconds: float):
        """Learn the prefill speed from a step that took `seconds`, waits excluded.

        `work`: the step's (request, tokens) pairs; each request's `computed` includes these tokens already.
        A step with few rows, or with a request that is being restored, runs slower than ordinary prefill.
        Such a step counts only if it was faster than the speed known so far."""
        spans = [(request.computed - count, request.computed) for request, count in work]
        speed = sum(flops(self.engine.model.config, *span) for span in spans) / max(seconds, 1e-9)
        alone = not any(request.restoration for request, _ in work)
        rows = sum(count for _, count in work)
        if alone and rows >= FULL_SPEED[self.engine.model.device.type] or speed > self.computing.value:
            self.computing.record(speed, 1.0)
        self.machine.fastest = max(self.machine.fastest, speed)
