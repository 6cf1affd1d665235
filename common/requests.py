"""Request and Result, and the line of an engine. An engine calls a Request's `push` and
`finish`; the client reads its `pieces`: text, and last the outcome, a `Result` or an exception."""
import logging
import math
import queue
import secrets
import sys
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from common import sampling
from common.timeline import Timeline

ATTEMPTS = 3                       # of a step that raises

# 1. Errors --------------------------------------------------------------------------------------------------

class RequestError(Exception):
    """A request that is not answered; its message is one sentence for the user, and says what to change."""
    status = 500                   # of HTTP

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status or self.status


class BadRequest(RequestError):
    status = 400


class ClientDisconnected(RequestError):
    status = 499


class Unavailable(RequestError):
    """The server is closing, or a step failed several times."""
    status = 503


class Interrupted(Exception):
    """The step under way is given up: something else is more urgent. It is run again."""


def in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# 2. Request and result --------------------------------------------------------------------------------------

class Result:
    """A finished answer. Times in milliseconds."""

    def __init__(self, request: "Request"):
        first, last, later = request.times[0], request.times[-1], len(request.times) - 1
        self.id = request.id
        self.text = request.writer.text if request.writer else ""
        self.tokens = request.new                       # without those of the prompt
        self.finish_reason = request.finish_reason      # "stop": end token or stop string; "length": no room
        self.usage = dict(prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens,
                          completion_tokens=len(request.new))
        hits = [f"{tier}_hit" for tier, tokens in request.found.items() if tokens]
        self.source = "mixed" if len(hits) > 1 else (hits or ["miss"])[0]
        self.found = request.found                      # where the prompt came from; the rest was computed
        self.decisions = request.decisions              # what was offered and what was decided
        self.ttft_ms = (first - request.received) * 1e3                 # request received to first token
        self.tbt_ms = (last - first) / later * 1e3 if later else None   # mean time between later tokens
        self.timeline = request.timeline

    def as_json(self) -> dict:
        return {**vars(self), "timeline": self.timeline.as_json()}


@dataclass(eq=False)
class Request:
    """What was asked, what has been answered so far, and what the engine notes of it."""
    # asked
    tokens: list[int]              # the prompt, then the answer
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    options: dict = field(default_factory=dict)                 # the chapter's own fields
    end_tokens: frozenset = frozenset()
    writer: object = None          # of text (shell/frontend.py); None: nobody reads it
    received: float = field(default_factory=time.perf_counter)
    # answered
    id: int = 0                    # set by engine.submit: 1, 2, ...
    prompt_tokens: int = field(init=False)
    new: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)            # of each of `new`: seconds, host clock
    finish_reason: str | None = None
    outcome: Result | Exception | None = None
    pieces: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    timeline: Timeline = field(default_factory=Timeline)
    found: dict[str, int] = field(default_factory=dict)         # tier -> tokens of the prompt from there
    decisions: list[str] = field(default_factory=list)          # a sentence each
    # noted by the engine of chapter 02
    table: list[int] = field(default_factory=list)              # its blocks, in the order of its tokens
    chain: list = field(default_factory=list)                   # its prefixes
    computed: int = 0              # tokens whose K and V are in the blocks of `table`
    registered: int = 0            # leading blocks whose prefixes are in the index, held by these or others
    restoration: object = None     # what is on its way
    readmitted: bool = False       # preempted, or its restoration has failed: it had blocks before
    must_compute: bool = False     # a restoration has failed: nothing is asked for again
    wait_deadline: float = 0.0     # until when it may wait for its Cache: seconds of time.perf_counter()
    memo: object = None            # whatever the Cache remembers of it

    def __post_init__(self):
        self.tokens = list(self.tokens)                         # it grows, and is nobody else's
        self.prompt_tokens = len(self.tokens)
        self.timeline.began = self.received
        self.generator = torch.Generator()
        self.generator.manual_seed(secrets.randbits(64) if self.seed is None else self.seed)

    @property
    def history(self) -> int:
        """Tokens that may come from a cache: all but the last, which is computed for its logits."""
        return len(self.tokens) - 1

    @property
    def next(self) -> int:
        """The first token that the next step computes."""
        return self.restoration.next if self.restoration else self.computed

    @property
    def compute_end(self) -> int:
        """The token up to which the next step may compute."""
        return self.restoration.compute_end if self.restoration else len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.next

    @property
    def cached_tokens(self) -> int:
        return sum(self.found.values())

    def sample(self, logits: torch.Tensor) -> int:
        """Draw the next token from logits [V], as `sampling.sample` does for many."""
        return sampling.sample([self], logits[None], sampling.likeliest(logits[None]))[0]

    def push(self, token: int):
        """Append a token; put text that is certain to `pieces`; set finish_reason if it is the last. Raises
        RequestError at -1, where the model gives none."""
        if token < 0:
            raise RequestError("The logits of this answer are not finite numbers; choose another --dtype.")
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        self.new.append(token)
        ends = token in self.end_tokens
        piece = self.writer.push(token, ends) if self.writer else ""
        if ends or (self.writer and self.writer.stopped):
            self.finish_reason = "stop"
        elif len(self.new) == self.max_tokens:
            self.finish_reason = "length"
        if self.writer and self.finish_reason:
            piece += self.writer.release(len(self.writer.held))
        if piece:
            self.pieces.put(piece)

    def finish(self, error: Exception | None = None):
        """Set the outcome, a Result or `error`, and put it to `pieces`."""
        self.outcome = error or Result(self)
        self.pieces.put(self.outcome)


# 3. The line of an engine ----------------------------------------------------------------------------------

class RequestQueue:
    """The requests of an engine: those that wait, run and are over. Any thread may submit and cancel; one
    thread calls `step`, which takes arrivals in and ends a request with `finish`. An engine has a `model`,
    and says how to `step` and to `release` a running request."""

    fields, pools = {}, {}         # of a request, the chapter's own; memories in blocks, for the page
    explain = False                # whether to print what happens

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity   # tokens that one request may take, answer included
        self.arrivals: deque[tuple[Request, Exception | None]] = deque()    # submitted (None) or cancelled
        self.wake = threading.Event()                           # something has arrived
        self.waiting: deque[Request] = deque()                  # first come, first served
        self.running: list[Request] = []                        # oldest first
        self.completed: deque[Request] = deque(maxlen=8)        # the last ones, for the page
        self.counts = Counter(requests=0, finished=0, cancelled=0, failed=0, gpu_hits=0, misses=0)
        self.failures = 0                                       # steps in a row that raised

    def check(self, request: Request):
        """Raise BadRequest if it can never fit."""
        if self.capacity and len(request.tokens) + request.max_tokens - 1 > self.capacity:
            raise BadRequest(
                f"{len(request.tokens)} prompt tokens and up to {request.max_tokens} new ones do not fit "
                f"into a pool of {self.capacity} tokens; ask for less, or start with more blocks.")

    def submit(self, request: Request):
        """Let a request stand in line. Raises BadRequest if it can never fit."""
        self.check(request)
        self.counts["requests"] += 1
        request.id = self.counts["requests"]
        self.arrivals.append((request, None))
        self.wake.set()

    def cancel(self, request: Request, error: Exception):
        """End a request at the top of the next step, with `error` as its outcome."""
        self.arrivals.append((request, error))
        self.wake.set()

    def take_arrivals(self):
        """At the top of a step: end what was cancelled, enqueue what was submitted."""
        while self.arrivals:
            request, error = self.arrivals.popleft()
            if error is not None:
                self.finish(request, error)
            elif request.outcome is None:                       # and was not cancelled before
                with self.contain(request):
                    self.enqueue(request)

    def enqueue(self, request: Request):
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.arrivals or self.waiting or self.running)

    def sleep(self, seconds: float = math.inf):
        """Sleep until something arrives, `seconds` at most. A GPU's copies wake nobody: look again soon."""
        most = 2e-4 if self.model.device.type == "cuda" else 2e-2
        self.wake.wait(max(0.0, min(seconds, most)))
        self.wake.clear()

    def interrupt(self):
        """Raise Interrupted if a request has come, or was cancelled."""
        if self.arrivals:
            raise Interrupted

    def step_failed(self, work: list[tuple[Request, int]], error: Exception):
        """Let the step be run again; after ATTEMPTS in a row end its requests."""
        self.failures += 1
        if self.failures == ATTEMPTS:
            self.failures = 0
            logging.getLogger("kv").error("a step failed %s times", ATTEMPTS, exc_info=error)
            for request, _ in work:
                words = f"A step failed {ATTEMPTS} times ({in_words(error)}); ask again."
                self.finish(request, Unavailable(words))

    @contextmanager
    def contain(self, request: Request | None = None):
        """Around work for one request: what raises inside is the outcome of that one, if any, alone."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RequestError):
                logging.getLogger("kv").error("work for one request failed", exc_info=error)
                error = RequestError(f"This answer could not go on ({in_words(error)}); ask again.")
            if request:
                self.finish(request, error)

    def answer(self, requests: list[Request], tokens: list[int]):
        """Give each request its next token; end those that are complete, or get none."""
        for request, token in zip(requests, tokens):
            with self.contain(request):
                if isinstance(token, Exception):                # none could be drawn
                    raise token
                request.push(token)
                if request.finish_reason:
                    self.finish(request)

    def finish(self, request: Request, error: Exception | None = None):
        """End a request, wherever it is: `release` what it has, count it, and answer the client."""
        if request.outcome is not None:
            return
        if request in self.running:
            self.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.log_event("finish", [request])
        request.finish(error)
        if error is None:
            self.completed.append(request)
            self.counts.update(request.outcome.usage, finished=1)
            hits = {f"{tier}_hits": 1 for tier, tokens in request.found.items() if tokens}
            self.counts.update(hits or ["misses"])
            self.counts.update({f"{tier}_hit_tokens": tokens for tier, tokens in request.found.items()})
        else:
            self.counts["cancelled" if isinstance(error, ClientDisconnected) else "failed"] += 1

    def log_event(self, verb: str, requests: list[Request], rows: int = 0, blocks: int = 0, words: str = ""):
        """--explain: print a line for what happens in a step."""
        if self.explain:
            who = " ".join(f"#{request.id}" for request in requests)
            words = f"{verb:8} {who:16} {rows:5} rows {blocks:5} blocks  {words}"
            print(f"step {self.counts['steps']:4}  {words}", file=sys.stderr)

    def generate(self, requests: list[Request]) -> list[Request]:
        """Submit, and step until all are answered. Raises what one of them ended with."""
        for request in requests:
            self.submit(request)
        for request in requests:
            while request.outcome is None:
                self.step()
        for request in requests:
            if isinstance(request.outcome, Exception):
                raise request.outcome
        return requests

    def evict(self, name: str = "device") -> int:
        """Evict all cached blocks of a pool -> how many."""
        cached = list(self.pools[name].cached)
        self.pools[name].evict(cached)
        return len(cached)

    def counters(self) -> dict:
        """Numbers for /health and the page."""
        counts = dict(self.counts, waiting=len(self.waiting), running=len(self.running))
        for name, pool in self.pools.items():
            counts |= {f"{name}_blocks": pool.size, f"{name}_free": pool.free.count(1),
                       f"{name}_cached": len(pool.cached), f"{name}_evictions": pool.evictions}
        return counts
