"""What is asked and what is answered: checked fields, tokens, sampling, text with stop strings, results.

An engine takes a `Request` and calls its `sample`, `push` and `finish`. Whoever asked reads `pieces`: text
as it becomes certain, and last the outcome, a `Result` or an exception.
"""
import json
import queue
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from tokenizers.decoders import DecodeStream

from common.timeline import Timeline

# 1. Errors --------------------------------------------------------------------------------------------------

class RequestError(Exception):
    """A request that is not answered; its message is one sentence for the user, and says what to change."""
    status = 500                   # of HTTP

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status or self.status

    def as_json(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return dict(error=dict(message=str(self), type=kind))


class BadRequest(RequestError):
    status = 400


class HungUp(RequestError):
    status = 499


class Unavailable(RequestError):
    """The server is closing, or a step failed several times in a row."""
    status = 503


# 2. Fields --------------------------------------------------------------------------------------------------

def number(value, low: float, high: float, kinds=int) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def text(value, low: int = 0, high: float = float("inf")) -> bool:
    """A string of `low` to `high` characters, without lone surrogates."""
    return (isinstance(value, str) and low <= len(value) <= high
            and value == value.encode("utf-8", "ignore").decode())


def stop_strings(value) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= 16 and all(text(stop, 1, 256) for stop in stops)


def text_part(value) -> bool:
    return isinstance(value, dict) and value.get("type") == "text" and text(value.get("text"))


# name -> (test, what it must be)
SAMPLING = {
    "max_tokens": (lambda v: number(v, 1, 1 << 20), "a whole number from 1 up"),
    "temperature": (lambda v: number(v, 0, 100, (int, float)), "a number from 0 (greedy) to 100"),
    "top_p": (lambda v: number(v, 0, 1, (int, float)), "a number from 0 (the likeliest token only) to 1"),
    "top_k": (lambda v: number(v, 0, 1 << 20), "a whole number, 0 for no limit"),
    "seed": (lambda v: number(v, 0, (1 << 63) - 1), "a whole number from 0 up"),
    "stop": (stop_strings, "a string of 1 to 256 characters or a list of at most 16 of them"),
}
CACHE_SALT = {"cache_salt": (lambda v: text(v, 0, 256), "a string of at most 256 characters")}
PROMPT = {
    "prompt": (lambda v: text(v) or isinstance(v, list), "a string or a list of token ids"),
    "messages": (lambda v: isinstance(v, list), "a list of messages"),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE = {
    "role": (lambda v: isinstance(v, str) and v in ROLES, "system, developer, user or assistant"),
    "content": (lambda v: text(v) or (isinstance(v, list) and all(map(text_part, v))), "text in UTF-8"),
    "name": (text, "a string"),
}


def parse_json(raw: bytes):
    """Raises BadRequest at what is not JSON in UTF-8."""
    try:
        body = json.loads(raw.decode("utf-8-sig"))
        json.dumps(body, ensure_ascii=False).encode()
        return body
    except UnicodeEncodeError:
        raise BadRequest("A string has half of a surrogate pair; send whole characters.") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON in UTF-8 ({str(error)[:80]}).") from None


def check_fields(body, fields: dict, what: str = "The body") -> dict:
    """Return the fields of a JSON object that are set; null, [] and {} ask for nothing, whatever the name.
    Raises BadRequest at one that is unknown or wrong."""
    if not isinstance(body, dict):
        raise BadRequest(f"{what} must be a JSON object.")
    asked = {name: value for name, value in body.items() if value not in (None, [], {})}
    for name, value in asked.items():
        if name not in fields:
            raise BadRequest(f"Unknown field {name[:40]!r}; the fields are {', '.join(fields)}.")
        test, wanted = fields[name]
        if not test(value):
            raise BadRequest(f"{name} must be {wanted}.")
    return asked


def check_messages(messages) -> list[dict]:
    """Turn OpenAI's messages into [{role, content}] with strings as contents. Raises BadRequest."""
    checked = []
    for message in messages:
        message = check_fields(message, MESSAGE, "Each message")
        role = message.get("role")
        content = message.get("content", "" if role == "assistant" else None)
        if role is None or content is None:
            raise BadRequest("Each message needs a role and a content.")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        checked.append(dict(role=ROLES[role], content=content))
    if not checked or not checked[-1]["content"]:
        raise BadRequest("The prompt, or the last of the messages, must not be empty.")
    return checked


# 3. Text ----------------------------------------------------------------------------------------------------

class Writer:
    """Turn tokens into text one by one; hold back what may be the beginning of a stop string.

    before: the tokens that this text continues. A decoder that begins anew drops the first space."""

    def __init__(self, tokenizer, stop: str | list[str] = (), before: list[int] = ()):
        self.tokenizer = tokenizer.backend_tokenizer
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.before = list(before[-16:])
        if self.tokenizer.decode(self.before).endswith("\ufffd"):   # an open character would be said again
            self.before = []
        self.decoder = DecodeStream(ids=self.before, skip_special_tokens=True)
        self.text, self.sent = "", 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that is certain after this token; "" while a character or stop string is open."""
        try:
            piece = self.decoder.step(self.tokenizer, token)
        except Exception:          # bytes that are no text change the text before them: begin anew
            self.decoder = DecodeStream(skip_special_tokens=True)
            piece = self.decoder.step(self.tokenizer, token)
        self.text += piece or ""
        ends = [end for stop in self.stop if (end := self.text.find(stop, self.sent)) >= 0]
        if ends:
            self.text, self.stopped = self.text[:min(ends)], True
            return self.release(len(self.text))
        beginnings = (stop[:size] for stop in self.stop for size in range(1, len(stop)))
        held = max((len(start) for start in beginnings if self.text.endswith(start)), default=0)
        return self.release(len(self.text) - held)

    def release(self, end: int) -> str:
        """Return the text up to `end` that was not released before."""
        piece, self.sent = self.text[self.sent:end], max(self.sent, end)
        return piece


# 4. Request and result --------------------------------------------------------------------------------------

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
        self.source = request.source                    # "miss", "gpu_hit", "cpu_hit", ... or "mixed"
        self.found = request.found                      # where the prompt came from; the rest was computed
        self.decisions = request.decisions              # what was offered and what was decided
        self.ttft_ms = (first - request.received) * 1e3                 # request received to first token
        self.tbt_ms = (last - first) / later * 1e3 if later else None   # mean time between later tokens
        self.timeline = request.timeline

    def as_json(self) -> dict:
        return {**vars(self), "timeline": self.timeline.as_json()}

    def summary(self) -> str:
        prompt, cached, new = self.usage.values()
        tbt = "" if self.tbt_ms is None else f", TBT {self.tbt_ms:.1f} ms"
        return "\n".join([f"{prompt} prompt tokens, {cached} of them cached ({self.source}); {new} new; "
                          f"TTFT {self.ttft_ms:.1f} ms{tbt}", *self.decisions])


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
    writer: Writer | None = None   # None: nobody reads text
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
    computed: int = 0              # tokens whose K and V are in, or on their way into, the blocks of `table`
    registered: int = 0            # blocks that are full for sure: their prefix finds them
    restoration: object = None     # what is on its way
    readmitted: bool = False       # preempted, or its restoration has failed: it had blocks before
    must_compute: bool = False     # a restoration has failed: nothing is asked for again
    patience: float = 0.0          # until when it waits for its Cache: seconds of time.perf_counter()
    kept: object = None            # whatever the Cache remembers of it

    def __post_init__(self):
        self.tokens = list(self.tokens)                         # it grows, and is nobody else's
        self.prompt_tokens = len(self.tokens)
        self.generator = torch.Generator()
        self.generator.manual_seed(random.getrandbits(63) if self.seed is None else self.seed)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def cached_tokens(self) -> int:
        return sum(self.found.values())

    @property
    def source(self) -> str:
        tiers = [f"{tier}_hit" for tier, tokens in self.found.items() if tokens]
        return "mixed" if len(tiers) > 1 else (tiers or ["miss"])[0]

    def sample(self, logits) -> int:
        """Draw the next token from logits [V]: the likeliest at temperature 0, else one of the top_k
        likeliest, and of these one of the smallest set whose probabilities reach top_p."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits, order = logits.topk(min(self.top_k or len(logits), len(logits)))    # [top_k], likeliest first
        logits = logits.double().cpu()
        # minus the maximum: no temperature is too small
        probabilities = ((logits - logits[0]) / self.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities                    # that of all likelier ones
        probabilities[1:][before[1:] >= self.top_p] = 0                     # the likeliest is always kept
        return int(order[torch.multinomial(probabilities, 1, generator=self.generator)])

    def push(self, token: int):
        """Append a token; put text that is certain to `pieces`; set finish_reason if it is the last."""
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        self.new.append(token)
        ends = token in self.end_tokens
        piece = self.writer.push(token) if self.writer and not ends else ""
        if ends or (self.writer and self.writer.stopped):
            self.finish_reason = "stop"
        elif len(self.new) == self.max_tokens:
            self.finish_reason = "length"
        if self.writer and self.finish_reason:
            piece += self.writer.release(len(self.writer.text))
        if piece:
            self.pieces.put(piece)

    def finish(self, error: Exception | None = None):
        """Set the outcome, a Result or `error`, and put it to `pieces`."""
        self.outcome = error or Result(self)
        self.pieces.put(self.outcome)


# 5. From what is asked to a Request -------------------------------------------------------------------------

class Frontend:
    """Make requests of what is asked. `fields`: the chapter's own, as in SAMPLING."""

    def __init__(self, model, tokenizer, end_tokens, fields: dict | None = None):
        self.model, self.tokenizer, self.end_tokens = model, tokenizer, frozenset(end_tokens)
        self.fields = fields or {}
        self.context = model.config.max_position_embeddings     # tokens, answer included
        self.longest = max(map(len, tokenizer.backend_tokenizer.get_vocab()))   # characters of a token

    def request(self, prompt=None, messages=None, raw: bool = False, received=None, **asked) -> Request:
        """Make a Request. `prompt`: one user's message as a string, or a list of token ids taken as they are,
        or one of these in a list. `messages`: a conversation [{role, content}]. `raw`: the answer continues
        the string. `received`: when, in seconds of time.perf_counter(). `asked`: SAMPLING and own fields,
        checked by `check_fields`. Raises BadRequest."""
        received = received or time.perf_counter()
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise BadRequest("prompt must be one prompt; send a request for each.")
            prompt, = prompt
        raw = raw or isinstance(prompt, list) or self.tokenizer.chat_template is None
        tokens = self.encode(prompt, messages, raw)
        if len(tokens) >= self.context:
            raise BadRequest(f"The prompt is {len(tokens)} tokens and the context of this model is "
                             f"{self.context}, answer included; shorten the prompt.")
        max_tokens = min(asked.pop("max_tokens", 128), self.context - len(tokens))
        writer = Writer(self.tokenizer, asked.pop("stop", ()), tokens if raw else ())
        options = {name: asked.pop(name) for name in self.fields if name in asked}
        return Request(tokens, max_tokens, options=options, end_tokens=self.end_tokens, writer=writer,
                       received=received, **asked)

    def encode(self, prompt, messages, raw: bool = False) -> list[int]:
        """Return the prompt's tokens; `raw`: without the chat template. Raises BadRequest."""
        if (prompt is None) == (messages is None):
            raise BadRequest("Give either prompt or messages, not both and not empty.")
        raw = raw or self.tokenizer.chat_template is None
        if raw and messages is not None:
            raise BadRequest("This model has no chat template; send a prompt instead of messages.")
        if isinstance(prompt, list):
            tokens = prompt
        else:
            messages = check_messages(messages or [dict(role="user", content=prompt)])
            # Some tokenizers take hundreds of bytes for a character: what cannot fit is not encoded
            characters = sum(len(message["content"]) for message in messages)
            if characters > self.context * self.longest:
                raise BadRequest(f"The prompt is {characters} characters, more than the {self.context} "
                                 "tokens of this model's context can hold; shorten the prompt.")
            try:
                tokens = self.tokenizer.encode(prompt) if raw else self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:                          # a template may refuse an order of roles
                raise BadRequest(f"The model's chat template refuses these messages ({error}).") from None
        top = self.model.config.vocab_size - 1
        if not tokens or not all(number(token, 0, top) for token in tokens):
            raise BadRequest(f"Token ids must be from 0 to {top}, one at least.")
        return tokens


# 6. Who waits and who runs ----------------------------------------------------------------------------------

class Line:
    """What is the same for every engine around its `step`: who waits, runs and is over. Any thread may submit
    and cancel; one thread calls `step`, which takes `arrivals` in and ends a request with its `finish`."""

    fields, pools = {}, {}         # of a request, the chapter's own; memories in blocks, for the page
    explain = False                # whether to print what happens

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity   # tokens that one request may take, answer included
        self.arrivals: deque[tuple[Request, Exception | None]] = deque()    # submitted (None) or cancelled
        self.wake = threading.Event()                           # something has arrived
        self.waiting: deque[Request] = deque()                  # first come, first served
        self.running: list[Request] = []                        # oldest first
        self.over: deque[Request] = deque(maxlen=8)             # the last ones, for the page
        self.counts = Counter(requests=0, finished=0, cancelled=0, failed=0)

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

    def leave(self, request: Request, error: Exception | None):
        """The request is over and holds nothing any more: count it, and tell who asked."""
        request.finish(error)
        if error is None:
            self.over.append(request)
            self.counts.update(request.outcome.usage, finished=1)
        else:
            self.counts["cancelled" if isinstance(error, HungUp) else "failed"] += 1

    def tell(self, verb: str, requests: list[Request], rows: int = 0, blocks: int = 0, words: str = ""):
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

    def stream(self, request: Request):
        """Submit, and step on this thread; yield pieces of text, last the Result. Raises its error."""
        self.submit(request)
        piece = ""
        while not isinstance(piece, Result):
            while request.pieces.empty():
                self.step()
            piece = request.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece

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
