"""Load or recompute: predict both times, and decide whether a match is worth loading.

Speeds are measured once, before the first request. Afterwards they are learned from what the engine does.
Noise only ever makes a sample slower, so the fastest of the last eight samples counts. A sample expires after
a minute, so a speed that no longer holds does not stay. Without samples a link is measured again, and prefill
has its speed of the start again."""

from common.cache import Match
from common.link import Speed
from common.requests import Request

# Load if the estimate is at most this share of the time to compute. The margin: a late load costs both times,
# because its tokens are then computed, too
LOAD_THRESHOLD = 0.8
MAX_WAIT = 60.0  # seconds: the limit for waiting for a prefetch, and for a load under --always-restore
FULL_SPEED = {"cpu": 128, "cuda": 512}  # rows per step from which prefill runs at nearly full speed


class Estimates:
    """The predicted times of one engine, and the decision whether to load tokens or to compute them. The
    Restorer sets `engine` when the engine is made."""

    def __init__(self, machine, always: bool = False):
        """`machine`: the measured speed of this machine with the engine's model (shell/machine.py); its
        `flops(start, end)` counts the operations of the prefill of tokens [start, end). `always`: load every
        match (--always-restore)."""
        self.machine, self.always = machine, always
        self.computing = Speed(machine.fastest)  # operations per second of prefill

    def seconds_to_compute(self, start: int, end: int) -> float:
        """-> estimated seconds of the prefill of tokens [start, end)."""
        return self.machine.flops(start, end) / self.computing.value

    def load_or_compute(self, request: Request, match: Match, agree=bool) -> float:
        """Decide whether to load a match or to compute its tokens, and append the reason to
        `request.decisions`.

        `agree(fact)`: `Cache.agree`. Returns: the seconds that loading may take, or 0.0 to compute. A load
        may take as long as computing would, or MAX_WAIT under --always-restore."""
        source, engine = " and ".join(match.found), self.engine
        compute = self.seconds_to_compute(request.computed, request.computed + match.tokens) / match.share
        chosen = agree(self.always or match.seconds <= LOAD_THRESHOLD * compute)
        request.decisions.append(
            f"{match.tokens} tokens offered ({source}): loading {1e3 * match.seconds:.1f} ms, computing "
            f"{1e3 * compute:.1f} ms: {'loaded' if chosen else 'computed'}")
        engine.log_event("restore", [request], match.tokens, words=request.decisions[-1])
        engine.counts["declined"] += not chosen
        return (MAX_WAIT if self.always else compute) if chosen else 0.0

    def max_wait(self, tokens: int) -> float:
        """-> how many seconds a prompt of `tokens` tokens may wait for a prefetch."""
        return MAX_WAIT if self.always else min(self.seconds_to_compute(0, tokens), MAX_WAIT)

    def learn(self, work: list, seconds: float):
        """Learn the prefill speed from a step that took `seconds`, waits excluded.

        `work`: the step's (request, tokens) pairs; each request's `computed` includes these tokens already.
        A step with few rows, or with a request that is being restored, is mostly slower than ordinary
        prefill. It counts only if it was faster than the speed known so far."""
        spans = [(request.computed - count, request.computed) for request, count in work]
        speed = sum(self.machine.flops(*span) for span in spans) / max(seconds, 1e-9)
        alone = not any(request.restoration for request, _ in work)
        rows = sum(count for _, count in work)
        if alone and rows >= FULL_SPEED[self.engine.model.device.type] or speed > self.computing.value:
            self.computing.record(speed, 1.0)
