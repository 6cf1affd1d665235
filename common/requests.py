"""Requests, and the queue that every engine is built on.

A client submits a Request to an engine and reads the request's `pieces`: pieces of text while the answer is
written, then END or an exception. The Request itself then holds the result. Only the engine calls the
request's `push` and `finish`."""
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

END = object()                     # the last of a request's pieces

# 1. Errors --------------------------------------------------------------------------------------------------

class RequestError(Exception):
    """Why a request is not answered. The message is one sentence for the user, and says what to change."""
    status = 500                   # HTTP status code
    code = None                    # OpenAI's code, if a client can do something about the error


class BadRequest(RequestError):
    """The request itself is wrong, or it can never fit into memory."""
    status = 400


class TooLong(BadRequest):
    """The prompt does not fit into the model's context or into memory."""
    code = "context_length_exceeded"


class ClientDisconnected(RequestError):
    """The client closed its connection."""
    status = 499


class Unavailable(RequestError):
    """The server is closing, or a step has failed."""
    status = 503


class Interrupted(Exception):
    """The forward pass stops early, because a request arrived or the step's work changed. The step is run
    again."""


def in_words(error: Exception) -> str:
    """-> type and message of an exception, in one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# 2. Request -------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Request:
    """One request: its prompt and options, its answer so far, and the state that the engine keeps for it.
    Once it has finished, it is also the result."""
    # The request
    tokens: list[int]              # the prompt, then the answer's tokens so far
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    options: dict = field(default_factory=dict)                 # a chapter's own fields, such as cache_salt
    end_tokens: frozenset = frozenset()
    writer: "Writer | None" = None  # noqa: F821  # turns tokens into text (shell/frontend.py)
    received: float = field(default_factory=time.perf_counter)
    # The answer
    id: int = 0                    # set by engine.submit: 1, 2, ...
    prompt_tokens: int = field(init=False)
    new: list[int] = field(default_factory=list)                # the answer's tokens so far
    times: list[float] = field(default_factory=list)            # perf_counter() of each of `new`
    finish_reason: str | None = None                            # "stop" (end token, stop string) or "length"
    outcome: str | Exception | None = None                      # its finish_reason, or why it failed
    pieces: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    timeline: Timeline = field(default_factory=Timeline)
    found: dict[str, int] = field(default_factory=dict)         # tier -> number of prompt tokens from it
    decisions: list[str] = field(default_factory=list)          # why matches were loaded or not
    # State of chapter 02's engine
    table: list[int] = field(default_factory=list)              # its blocks, in token order
    chain: list = field(default_factory=list)                   # the BlockKeys of its full blocks
    computed: int = 0              # number of leading tokens whose K and V are in its blocks
    next: int = field(init=False)  # index of the first token that the next step computes: `computed`, or
                                   # during a restoration the token after the restored ones
    portion: float = math.inf      # most tokens for the next step, if its restoration limits them
    registered: int = 0            # number of leading blocks whose keys are in the pool's index
    restoration: "Restoration | None" = None  # noqa: F821  # the restoration that is under way
    readmitted: bool = False       # it was preempted, or its restoration failed
    must_compute: bool = False     # compute all tokens, because a restoration has failed
    wait_deadline: float = 0.0     # time.perf_counter() until which a prefetch may delay it
    memo: object = None            # state that the Cache keeps for this request; the engine does not read it

    observe = None                 # class attribute: called with each token's logits [V]

    def __post_init__(self):
        self.tokens = list(self.tokens)                         # a copy, because it grows
        self.prompt_tokens, self.next = len(self.tokens), self.computed
        self.timeline.began = self.received
        self.generator = torch.Generator()
        self.generator.manual_seed(secrets.randbits(64) if self.seed is None else self.seed)

    @property
    def history(self) -> int:
        """Number of tokens that may come from a cache: all but the last, which is computed for its logits."""
        return len(self.tokens) - 1

    @property
    def salt(self) -> str:
        """Requests with different salts share no blocks."""
        return self.options.get("cache_salt", "")

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.tokens) - self.next

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in a cache, in all tiers together."""
        return sum(self.found.values())

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return self.writer.text if self.writer else ""

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        return dict(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens,
                    completion_tokens=len(self.new))

    @property
    def source(self) -> str:
        """Where the prompt was found: "miss", "mixed", or a tier as in "cpu_hit"."""
        hits = [f"{tier}_hit" for tier, tokens in self.found.items() if tokens]
        return "mixed" if len(hits) > 1 else (hits or ["miss"])[0]

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from receiving the request to its first token."""
        return (self.times[0] - self.received) * 1e3

    @property
    def tbt_ms(self) -> float | None:
        """Mean milliseconds between consecutive tokens; None if there is only one token."""
        later = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / later * 1e3 if later else None

    def sample(self, logits: torch.Tensor, best: int | None = None) -> int:
        """-> the next token, from `logits` [V]; -1 if they are not finite numbers. `best`: the likeliest
        token, as `sampling.likeliest` gives it, if it is known."""
        (token,) = sampling.likeliest(logits[None]) if best is None else (best,)
        if self.temperature and token >= 0:
            return sampling.draw(logits, self.temperature, self.top_k, self.top_p, self.generator)
        return token

    def push(self, token: int, logits: torch.Tensor | None = None):
        """Append a sampled token, put finished text into `pieces`, and set `finish_reason` if the answer is
        complete.

        Called by the engine. Raises RequestError if `token` is -1, which means that the logits were not
        finite."""
        if token < 0:
            raise RequestError("The logits of this answer are not finite numbers; choose another --dtype.")
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        self.new.append(token)
        if self.observe:
            self.observe(logits)
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
        """Set the outcome, and put END or `error` into `pieces`. Called once, by the engine."""
        self.outcome = error or self.finish_reason
        self.pieces.put(error or END)


# 3. The queue of an engine ----------------------------------------------------------------------------------

class RequestQueue:
    """The base class of all engines: the requests that wait, run, or have finished.

    Any thread may call `submit` and `cancel`. Only one thread may call `step`. A subclass has a `model`,
    implements `step` (which calls `take_arrivals` first, and `finish` for each request that ends) and
    `release` (which frees the memory of a request that was in `waiting` or `running`)."""

    fields, pools = {}, {}         # options that the chapter adds; and name -> BlockPool
    explain = False                # --explain: print each event of a step

    def __init__(self, capacity: int | None = None):
        """`capacity`: the most tokens that one request may take, answer included; None: no limit."""
        self.capacity = capacity   # tokens
        # (request, None): add; (request, error): cancel; (None, None): only interrupts the pass
        self.arrivals: deque[tuple[Request | None, Exception | None]] = deque()
        self.wake = threading.Event()                           # set by an arrival or a completed transfer
        self.waiting: deque[Request] = deque()                  # first come, first served
        self.running: list[Request] = []                        # oldest first
        self.completed: deque[Request] = deque(maxlen=8)        # the latest, for the page
        self.counts = Counter(requests=0, finished=0, cancelled=0, failed=0, gpu_hits=0, misses=0)
        # Called with each exception that `contain` catches. It may raise the exception again
        self.on_error = lambda error: None

    def fit(self, request: Request):
        """Reduce `max_tokens` to what fits into memory. Raises TooLong if the prompt leaves no room for a
        token."""
        # The last token's K and V are not needed
        room = (self.capacity or math.inf) - request.prompt_tokens + 1
        if room < 1:
            raise TooLong(f"{request.prompt_tokens} prompt tokens do not fit into a pool of {self.capacity} "
                          "tokens; shorten the prompt, or start with a larger pool.")
        request.max_tokens = min(request.max_tokens, room)

    def submit(self, request: Request):
        """Add a request; the next step enqueues it. Its answer may get fewer than `max_tokens`; see `fit`."""
        self.fit(request)
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
            elif request and request.outcome is None:           # it was not cancelled
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

    def finish(self, request: Request, error: Exception | None = None):
        """End a request, or fail it with `error`: release its memory, count it, and send the outcome to the
        client.

        The request may be waiting, running, or not enqueued yet. A second call has no effect."""
        if request.outcome is not None:
            return
        for requests in self.running, self.waiting:
            if request in requests:
                requests.remove(request)
                self.release(request)
        self.log_event("finish", [request])
        request.finish(error)
        if error is None:
            self.completed.append(request)
            self.counts.update(request.usage, finished=1)
            for tier, tokens in request.found.items():
                self.counts.update({f"{tier}_hits": int(tokens > 0), f"{tier}_hit_tokens": tokens})
            self.counts["misses"] += not request.cached_tokens
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
