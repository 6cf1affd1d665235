"""Requests, their results, and the queue that every engine is built on.

A client submits a Request to an engine and reads the request's `pieces`: pieces of text while the answer is
written, then the outcome, which is a Result or an exception. Only the engine calls the request's `push` and
`finish`."""
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

ATTEMPTS = 3                       # how often a step is run if it raises each time

# 1. Errors --------------------------------------------------------------------------------------------------

class RequestError(Exception):
    """Why a request is not answered. The message is one sentence for the user, and says what to change."""
    status = 500                   # HTTP status code

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status or self.status


class BadRequest(RequestError):
    """The request itself is wrong, or it can never fit into memory."""
    status = 400


class ClientDisconnected(RequestError):
    """The client closed its connection."""
    status = 499


class Unavailable(RequestError):
    """The server is closing, or a step failed several times."""
    status = 503


class Interrupted(Exception):
    """The forward pass stops early, because a request arrived or the step's work changed. The step is run
    again."""


def in_words(error: Exception) -> str:
    """-> type and message of an exception, in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# 2. Request and result --------------------------------------------------------------------------------------

class Result:
    """A finished answer. Times are in milliseconds."""

    def __init__(self, request: "Request"):
        first, last, later = request.times[0], request.times[-1], len(request.times) - 1
        self.id = request.id
        self.text = request.writer.text if request.writer else ""
        self.tokens = request.new                       # of the answer only
        self.finish_reason = request.finish_reason      # "stop" (end token, stop string) or "length"
        self.usage = dict(prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens,
                          completion_tokens=len(request.new))
        hits = [f"{tier}_hit" for tier, tokens in request.found.items() if tokens]
        self.source = "mixed" if len(hits) > 1 else (hits or ["miss"])[0]
        self.found = request.found                      # tier -> prompt tokens; all others were computed
        self.decisions = request.decisions              # why matches were loaded or not
        self.ttft_ms = (first - request.received) * 1e3                 # request received to first token
        self.tbt_ms = (last - first) / later * 1e3 if later else None   # mean time between later tokens
        self.timeline = request.timeline

    def as_json(self) -> dict:
        """-> all attributes, with the timeline as a list of spans."""
        return {**vars(self), "timeline": self.timeline.as_json()}


@dataclass(eq=False)
class Request:
    """One request: its prompt and options, its answer so far, and the state that the engine keeps for it."""
    # The request
    tokens: list[int]              # the prompt, then the answer's tokens so far
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    options: dict = field(default_factory=dict)                 # fields of the chapter, such as cache_salt
    end_tokens: frozenset = frozenset()
    writer: "Writer | None" = None  # noqa: F821  # turns tokens into text (shell/frontend.py)
    received: float = field(default_factory=time.perf_counter)
    # The answer
    id: int = 0                    # set by engine.submit: 1, 2, ...
    prompt_tokens: int = field(init=False)
    new: list[int] = field(default_factory=list)                # the answer's tokens so far
    times: list[float] = field(default_factory=list)            # perf_counter() of each of `new`
    finish_reason: str | None = None
    outcome: Result | Exception | None = None
    pieces: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    timeline: Timeline = field(default_factory=Timeline)
    found: dict[str, int] = field(default_factory=dict)         # tier -> prompt tokens found in it
    decisions: list[str] = field(default_factory=list)          # one sentence each
    # State of chapter 02's engine
    table: list[int] = field(default_factory=list)              # its blocks, in token order
    chain: list = field(default_factory=list)                   # the BlockKeys of its full blocks
    computed: int = 0              # number of leading tokens whose K and V are in its blocks
    registered: int = 0            # number of leading blocks whose keys are in the pool's index
    restoration: "Restoration | None" = None  # noqa: F821  # the restoration that is under way
    readmitted: bool = False       # it was preempted, or its restoration failed
    must_compute: bool = False     # compute all tokens, because a restoration has failed
    wait_deadline: float = 0.0     # time.perf_counter() until which a prefetch may delay it
    memo: object = None            # state that the Cache keeps for this request; the engine does not read it

    def __post_init__(self):
        self.tokens = list(self.tokens)                         # a copy, because it grows
        self.prompt_tokens = len(self.tokens)
        self.timeline.began = self.received
        self.generator = torch.Generator()
        self.generator.manual_seed(secrets.randbits(64) if self.seed is None else self.seed)

    @property
    def history(self) -> int:
        """Number of tokens that may come from a cache: all but the last, which is computed for its logits."""
        return len(self.tokens) - 1

    @property
    def next(self) -> int:
        """Position of the first token that the next step computes."""
        return self.restoration.next if self.restoration else self.computed

    @property
    def compute_end(self) -> int:
        """Position before which the next step must stop."""
        return self.restoration.compute_end if self.restoration else len(self.tokens)

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.tokens) - self.next

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in a cache, in all tiers together."""
        return sum(self.found.values())

    def sample(self, logits: torch.Tensor) -> int:
        """Sample the next token from `logits` [V]."""
        return sampling.sample([self], logits[None], sampling.likeliest(logits[None]))[0]

    def push(self, token: int):
        """Append a sampled token, put finished text into `pieces`, and set `finish_reason` if the answer is
        complete.

        Called by the engine. Raises RequestError if `token` is -1, which means that the logits were not
        finite."""
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
        """Set the outcome, a Result or `error`, and put it into `pieces`. Called once, by the engine."""
        self.outcome = error or Result(self)
        self.pieces.put(self.outcome)


# 3. The queue of an engine ----------------------------------------------------------------------------------

class RequestQueue:
    """The base class of all engines: the requests that wait, run, or have finished.

    Any thread may call `submit` and `cancel`. Only one thread may call `step`. A subclass has a `model`,
    implements `step` (which calls `take_arrivals` first, and `finish` for each request that ends) and
    `release` (which frees a running request's memory)."""

    fields, pools = {}, {}         # options that the chapter adds; and name -> BlockPool
    explain = False                # --explain: print each event of a step

    def __init__(self, capacity: int | None = None):
        """`capacity`: the most tokens that one request may take, answer included; None: no limit."""
        self.capacity = capacity   # tokens
        self.arrivals: deque[tuple[Request, Exception | None]] = deque()    # an error: cancel; None: add
        self.wake = threading.Event()                           # set by an arrival or a completed transfer
        self.waiting: deque[Request] = deque()                  # first come, first served
        self.running: list[Request] = []                        # oldest first
        self.completed: deque[Request] = deque(maxlen=8)        # the latest, for the page
        self.counts = Counter(requests=0, finished=0, cancelled=0, failed=0, gpu_hits=0, misses=0)
        self.failures = 0                                       # failed steps in a row
        # Called with each exception that is contained. If it raises, the exception is not contained
        self.on_error = lambda error: None

    def check(self, request: Request):
        """Raise BadRequest if the request can never fit into memory."""
        if self.capacity and len(request.tokens) + request.max_tokens - 1 > self.capacity:
            raise BadRequest(
                f"{len(request.tokens)} prompt tokens and up to {request.max_tokens} new ones do not fit "
                f"into a pool of {self.capacity} tokens; ask for less, or start with more blocks.")

    def submit(self, request: Request):
        """Add a request; the next step enqueues it. Raises BadRequest if it can never fit into memory."""
        self.check(request)
        self.counts["requests"] += 1
        request.id = self.counts["requests"]
        self.arrivals.append((request, None))
        self.wake.set()

    def cancel(self, request: Request, error: Exception):
        """End a request at the start of the next step, with `error` as its outcome."""
        self.arrivals.append((request, error))
        self.wake.set()

    def take_arrivals(self):
        """End the cancelled requests, and enqueue the submitted ones. Called at the start of each step."""
        while self.arrivals:
            request, error = self.arrivals.popleft()
            if error is not None:
                self.finish(request, error)
            elif request.outcome is None:                       # it was not cancelled
                with self.contain(request):
                    self.enqueue(request)

    def enqueue(self, request: Request):
        """Append a request to the queue."""
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether there are requests that a step can work on."""
        return bool(self.arrivals or self.waiting or self.running)

    def sleep(self, seconds: float = math.inf):
        """Sleep until a request arrives or a transfer completes, for at most `seconds`.

        Without a GPU, a completed transfer sets `wake`, and a sleep lasts at most 20 ms. Copies of a GPU do
        not set it, so there a sleep lasts at most 0.2 ms."""
        most = 2e-4 if self.model.device.type == "cuda" else 2e-2
        self.wake.wait(max(0.0, min(seconds, most)))
        self.wake.clear()

    def interrupt(self):
        """Raise Interrupted if a request has arrived or was cancelled."""
        if self.arrivals:
            raise Interrupted

    def step_failed(self, work: list[tuple[Request, int]], error: Exception):
        """Count a step that raised; the engine then runs it again. After ATTEMPTS failures in a row, end the
        step's requests with Unavailable."""
        self.on_error(error)
        self.failures += 1
        if self.failures == ATTEMPTS:
            self.failures = 0
            logging.getLogger("kv").error("a step failed %s times", ATTEMPTS, exc_info=error)
            for request, _ in work:
                words = f"A step failed {ATTEMPTS} times ({in_words(error)}); ask again."
                self.finish(request, Unavailable(words))

    @contextmanager
    def contain(self, request: Request | None = None):
        """Context manager: an exception inside fails only this request. Without a request, the exception is
        only logged."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RequestError):
                logging.getLogger("kv").error("work for one request failed", exc_info=error)
                self.on_error(error)
                error = RequestError(f"This request failed ({in_words(error)}); ask again.")
            if request:
                self.finish(request, error)

    def answer(self, requests: list[Request], tokens: list[int]):
        """Give each request its next token, and finish the requests that are complete or have no valid
        token."""
        for request, token in zip(requests, tokens):
            with self.contain(request):
                if isinstance(token, Exception):                # sampling failed
                    raise token
                request.push(token)
                if request.finish_reason:
                    self.finish(request)

    def finish(self, request: Request, error: Exception | None = None):
        """End a request with its Result, or with `error`: release its memory, count it, and send the outcome
        to the client.

        The request may be waiting, running, or not enqueued yet. A second call has no effect."""
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
        """Print one line about an event of this step, if --explain was given."""
        if self.explain:
            who = " ".join(f"#{request.id}" for request in requests)
            words = f"{verb:8} {who:16} {rows:5} rows {blocks:5} blocks  {words}"
            print(f"step {self.counts['steps']:4}  {words}", file=sys.stderr)

    def generate(self, requests: list[Request]) -> list[Request]:
        """Submit requests and run steps until all have finished.

        Returns: the requests. Raises the error of the first request that failed."""
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
        """Evict all cached blocks of the pool `name`. Returns: how many."""
        cached = list(self.pools[name].cached)
        self.pools[name].evict(cached)
        return len(cached)

    def counters(self) -> dict:
        """-> the numbers that /health and the page show."""
        counts = dict(self.counts, waiting=len(self.waiting), running=len(self.running))
        for name, pool in self.pools.items():
            counts |= {f"{name}_blocks": pool.size, f"{name}_free": pool.free.count(1),
                       f"{name}_cached": len(pool.cached), f"{name}_evictions": pool.evictions}
        return counts
