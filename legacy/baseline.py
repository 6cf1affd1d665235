"""Chapter 01: the yardstick. Keep nothing, compute everything again.

The problem. A language model reads a prompt (prefill) and then writes one token at a time (decode). What
it has read lies in the KV cache: per layer, the keys and values of every token so far. Within one answer
the cache makes each new token cheap. But when the answer is done the cache is dropped, and the next turn
of the conversation begins with reading everything again.

The mechanism. One contiguous cache for one request, filled by prefill in chunks and read by decode. A
conversation is stateless: each turn sends its whole history, and each turn computes all of it.

What it costs is what chapters 02 to 08 win back, each in its own way, with the same tokens. The papers
behind them call this method recomputation: HCache (EuroSys '25, section 2.3), Cake (section 2), HiCache.
"""
import math
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy
import torch
import torch.nn.functional as F
from tokenizers.decoders import DecodeStream

from legacy import app, live
from legacy.app import BadRequest, Busy, Closing
from legacy.timeline import Timeline

BLOCK, TIER = 16, "Device: one contiguous KV cache, in pieces of 16 tokens"              # for the page
RECOMPUTE = "recompute (01)"       # in comparisons

# 1. Data structures ----------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Request:
    """What was asked, as tokens. `history_tokens` of the prompt belong to earlier turns."""
    tokens: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    stop: str | list[str] = ()
    history_tokens: int = 0
    received: float = 0.0          # seconds, host clock
    id: int = 0                    # which of the engine's requests it is, from 1 on
    timeline: Timeline = field(default_factory=Timeline)


@dataclass
class Result:
    """What came back. Times in milliseconds."""
    id: int                        # of the request
    text: str
    tokens: list[int]
    finish_reason: str             # "stop": end of text or a stop string; "length": max_tokens or context reached
    usage: dict                    # prompt_tokens, cached_tokens, completion_tokens
    source: str                    # where the prefix came from; here always "miss": it was computed
    history_tokens: int            # prompt tokens that an earlier turn had already computed
    ttft_ms: float                 # request received to first token
    tbt_ms: float | None           # mean time between later tokens; None if there was one token
    timeline: Timeline

    def as_json(self) -> dict:
        return {**{name: value for name, value in vars(self).items() if name != "timeline"},
                "timeline": self.timeline.as_json()}

    def summary(self) -> str:
        tbt = "" if self.tbt_ms is None else f", TBT {self.tbt_ms:.1f} ms"
        return (f"{self.usage['prompt_tokens']} prompt tokens, {self.usage['cached_tokens']} of them cached ({self.source}); "
                f"{self.usage['completion_tokens']} new; TTFT {self.ttft_ms:.1f} ms{tbt}")


class KVCache:
    """The keys and values of one request, all layers, in one contiguous piece of memory each."""

    def __init__(self, config, capacity: int, dtype, device):
        shape = (config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)                     # [L, KVH, capacity, hd]
        self.v = torch.empty(shape, dtype=dtype, device=device)                     # [L, KVH, capacity, hd]
        self.capacity, self.length = capacity, 0                                    # tokens; written

    def layers(self, start: int, count: int):
        """One `attend(q, k, v)` per layer, for `count` tokens at positions start, start + 1, ..."""
        self.length = end = start + count
        mask = None
        if start and count > 1:    # row i may see the `start` tokens before this chunk, and i + 1 of its own
            mask = score_mask(torch.ones(count, end, dtype=torch.bool, device=self.k.device).tril(start), self.k.dtype)   # [T, S]
        for cached_k, cached_v in zip(self.k, self.v):                              # [KVH, capacity, hd] each
            def attend(q, k, v, cached_k=cached_k, cached_v=cached_v):
                cached_k[:, start:end] = k.transpose(0, 1)                          # [KVH, T, hd]
                cached_v[:, start:end] = v.transpose(0, 1)                          # [KVH, T, hd]
                return attention(q, cached_k[:, :end], cached_v[:, :end], mask)
            yield attend


def score_mask(seen, dtype):
    """seen [.., S]: True where a token may look -> what is added to its scores: 0 there, minus infinity elsewhere. Of `seen`
    itself PyTorch would make this in every layer again."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


def attention(q, k, v, mask):
    """q [T, H, hd] over k, v [KVH, S, hd] -> [T, H, hd]. mask [T, S], or None: the T tokens are the last of
    the S (one token), or all of them (causal). Query heads that share a KV head are never given copies of it."""
    tokens, heads, head_dim = q.shape
    if tokens == 1:                # decode: the heads of a group are as many queries to one KV head
        q = q.view(k.shape[0], heads // k.shape[0], head_dim)                       # [KVH, H/KVH, hd]
        return F.scaled_dot_product_attention(q[None], k[None], v[None]).reshape(1, heads, head_dim)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask,
                                         is_causal=mask is None, enable_gqa=k.shape[0] != heads)   # [1, H, T, hd]
    return out[0].transpose(0, 1)                                                   # [T, H, hd]


def sample(logits, request: Request, generator) -> int:
    """logits [V] -> the next token: the likeliest at temperature 0, else drawn from the top_k likeliest, and
    of these from the fewest that hold top_p of the probability."""
    if request.temperature == 0:
        return int(logits.argmax())
    logits, order = logits.double().cpu(), None                                     # [V]
    if request.top_k:
        logits, order = logits.topk(min(request.top_k, len(logits)))                # [top_k] each, likeliest first
    elif request.top_p < 1:
        logits, order = logits.sort(descending=True)                                # [V] each
    probabilities = ((logits - logits.max()) / request.temperature).softmax(0)      # at most 0: no temperature is too small
    if request.top_p < 1:
        before = probabilities.cumsum(0) - probabilities                            # probability of all that is likelier
        probabilities[before >= request.top_p] = 0
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return int(choice if order is None else order[choice])


class Writer:
    """Turns tokens into text as they come, and holds back what may be the beginning of a stop string."""

    def __init__(self, tokenizer, stop: str | list[str]):
        self.tokenizer, self.stop = tokenizer.backend_tokenizer, [stop] if isinstance(stop, str) else stop
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.text, self.sent = "", 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after this token; "" while a character or a stop string is incomplete."""
        self.text += self.decoder.step(self.tokenizer, token) or ""
        ends = [at for at in (self.text.find(stop, max(0, self.sent - len(stop))) for stop in self.stop) if at >= 0]
        if ends:
            self.text, self.stopped = self.text[:min(ends)], True
        held = 0 if self.stopped else max(
            (size for stop in self.stop for size in range(1, min(len(stop), len(self.text) + 1))
             if self.text.endswith(stop[:size])), default=0)
        return self.release(len(self.text) - held)

    def release(self, end: int | None = None) -> str:
        """The text up to `end` (all of it by default) that was not released before."""
        end = max(self.sent, len(self.text) if end is None else end)
        piece, self.sent = self.text[self.sent:end], end
        return piece


class Answer:
    """What has been written to one request so far, and when."""

    def __init__(self, request: Request, tokenizer, end_tokens):
        self.end_tokens, self.prompt_tokens, self.max_tokens = end_tokens, len(request.tokens), request.max_tokens
        self.writer, self.generator = Writer(tokenizer, request.stop), torch.Generator()
        if request.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.seed)
        self.tokens: list[int] = []
        self.times: list[float] = []       # when each token was there: seconds, host clock
        self.finish_reason = None          # until it is over

    def push(self, token: int) -> str:
        """One more token -> the text that is certain after it; all that is left if it is the last."""
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        piece = "" if token in self.end_tokens else self.writer.push(token)
        if token in self.end_tokens or self.writer.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finish_reason = "length"
        return piece + self.writer.release() if self.finish_reason else piece

    def result(self, request: Request, source: str = "miss", cached_tokens: int = 0) -> Result:
        first, last = self.times[0], self.times[-1]
        return Result(
            id=request.id, text=self.writer.text, tokens=self.tokens, finish_reason=self.finish_reason, source=source,
            usage=dict(prompt_tokens=self.prompt_tokens, cached_tokens=cached_tokens, completion_tokens=len(self.tokens)),
            history_tokens=request.history_tokens, ttft_ms=(first - request.received) * 1e3,
            tbt_ms=(last - first) / (len(self.times) - 1) * 1e3 if self.times[1:] else None, timeline=request.timeline)


# 2. The engine ---------------------------------------------------------------------------------------------------

class Frontend:
    """Checks what is asked and turns it into tokens; the same for the engines of all chapters."""
    fields = {}                # what a request may say beyond app.SAMPLING
    admin, admin_token = {}, None                              # what the server does beside answering; see legacy/app.py
    compared = "TTFT"          # what the page's comparison shows; see legacy/live.py

    def __init__(self, model, tokenizer, end_tokens):
        self.model, self.tokenizer, self.end_tokens = self.parts = model, tokenizer, end_tokens
        self.context = model.config.max_position_embeddings
        self.closing = False
        self.over: deque[tuple[Result, Request]] = deque(maxlen=8)      # the last ones, for the page
        self.counts = Counter(requests=0, refused=0, finished=0, cancelled=0, failed=0, prompt_tokens=0, completion_tokens=0)

    def generate(self, prompt=None, messages=None, **sampling) -> Result:
        """Answer and wait for it. Arguments and errors are those of `stream`."""
        for piece in self.stream(prompt, messages, **sampling):
            pass
        return piece

    def release(self):
        """What the engine keeps outside of this process goes, if nobody asked for it to stay. Here there is nothing."""

    def samples(self, **asked):
        """`stream` for the server -> an iterator of (number of the sample, piece); one sample, until a chapter has more."""
        pieces = self.stream(**asked)
        return ((0, piece) for piece in pieces)

    def request(self, prompt=None, messages=None, max_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0,
                top_k: int = 0, seed: int | None = None, stop: list[str] | str = ()) -> Request:
        """Check what is asked, and encode it. `prompt` is one user's message as a string, or a list of token
        ids taken as they are; `messages` is a conversation [{role, content}]. Raises BadRequest."""
        received = time.perf_counter()
        sampling = app.check_fields(dict(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
                                         seed=seed, stop=stop or None), app.SAMPLING)
        tokens, history = self.encode(prompt, messages)
        if len(tokens) >= self.context:
            raise BadRequest(f"The prompt is {len(tokens)} tokens and the context of this model is "
                             f"{self.context}, answer included; shorten the prompt.")
        sampling["max_tokens"] = min(max_tokens, self.context - len(tokens))
        return Request(tokens, history_tokens=history, received=received, **sampling)

    def encode(self, prompt, messages) -> tuple[list[int], int]:
        """-> the prompt's tokens, and how many of them belong to earlier turns."""
        if (prompt is None) == (messages is None):
            raise BadRequest("Give either prompt or messages.")
        if prompt == "" or messages == []:
            raise BadRequest("The prompt is empty; write something.")
        earlier = []
        if isinstance(prompt, list):
            tokens = prompt
        elif self.tokenizer.chat_template is None:
            if messages is not None:
                raise BadRequest("This model has no chat template; send a prompt instead of messages.")
            tokens = self.tokenizer.encode(prompt)
        else:
            messages = messages or [dict(role="user", content=prompt)]
            try:
                tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                earlier = self.tokenizer.apply_chat_template(messages[:-1], return_dict=False) if messages[1:] else []
            except Exception as error:                                  # a template may refuse an order of roles
                raise BadRequest(f"The model's chat template does not take these messages ({error}).") from None
        if not tokens or not all(app.whole(token, 0, self.model.config.vocab_size - 1) for token in tokens):
            raise BadRequest(f"Token ids must be from 0 to {self.model.config.vocab_size - 1}, one at least.")
        same = (index for index, pair in enumerate(zip(tokens, earlier)) if pair[0] != pair[1])
        return tokens, next(same, min(len(tokens), len(earlier)))


class Engine(Frontend):
    """Answers one request at a time; the others stand in line, at most `max_waiting` of them."""

    def __init__(self, model, tokenizer, end_tokens, prefill_chunk: int = 512, kv_cache: bool = True, max_waiting: int = 16):
        super().__init__(model, tokenizer, end_tokens)
        self.prefill_chunk, self.kv_cache, self.max_waiting = prefill_chunk, kv_cache, max_waiting
        self.line: deque[Request] = deque()                             # the first is being answered
        self.cache: KVCache | None = None                               # its keys and values
        self.turn = threading.Condition()

    def stream(self, prompt=None, messages=None, **sampling):
        """-> an iterator over pieces of text and, last, the Result. Closing it early ends the request.

        Arguments are those of `request`. Raises BadRequest, Busy (the line is full) or Closing."""
        try:
            request = self.request(prompt, messages, **sampling)
            with self.turn:
                if self.closing:
                    raise Closing("The server is shutting down; ask again when it is back.")
                if len(self.line) > self.max_waiting:
                    raise Busy(f"{self.max_waiting} requests are waiting already; try again later.")
                self.line.append(request)
                self.counts["requests"] += 1
                request.id = self.counts["requests"]
        except app.RequestError:
            self.counts["refused"] += 1
            raise
        answer = self.answer(request)
        next(answer)               # from here on, closing the iterator takes the request out of the line
        return answer

    def answer(self, request: Request):
        """The life of a request: wait, prefill, decode, leave. Yields text; the first yield is empty and
        comes before anything is done; the last is the Result."""
        outcome = "failed"
        try:
            yield ""
            with self.turn:
                self.turn.wait_for(lambda: self.line[0] is request or self.closing)
                if self.closing:
                    raise Closing("The server is shutting down; ask again when it is back.")
            for piece in self.run(request):
                outcome = "finished" if isinstance(piece, Result) else outcome
                yield piece
        except GeneratorExit:
            outcome = "cancelled" if outcome == "failed" else outcome
            raise
        finally:
            with self.turn:
                self.counts[outcome] += 1
                if self.line[0] is request:
                    self.cache = None                                   # kept: nothing
                self.line.remove(request)
                self.turn.notify_all()

    def run(self, request: Request):
        """Prefill and decode, the loop of the lecture."""
        # 1. An empty cache, as large as this request can become
        cache = KVCache(self.model.config, len(request.tokens) + request.max_tokens, self.model.dtype, self.model.device)
        self.cache = cache
        answer = Answer(request, self.tokenizer, self.end_tokens)

        # 2. Prefill: all of the prompt, and one logit vector at its end
        logits = self.prefill(cache, request.tokens, request.timeline)              # [V]
        while True:
            # 3. One token from the logits, and its text
            yield answer.push(sample(logits, request, answer.generator))
            if answer.finish_reason:
                break

            # 4. Decode: one token in, the next logits out
            tokens = request.tokens + answer.tokens
            if self.kv_cache:
                with request.timeline.span("compute", "decode"):
                    logits = self.forward(cache, tokens[-1:], len(tokens) - 1)      # [V]
            else:                                                                   # life without a cache
                logits = self.prefill(cache, tokens, request.timeline)              # [V]

        self.counts.update(prompt_tokens=len(request.tokens), completion_tokens=len(answer.tokens))
        result = answer.result(request)
        self.over.append((result, request))
        yield result

    def prefill(self, cache: KVCache, tokens: list[int], timeline: Timeline):
        """Run all tokens through the model, chunk by chunk -> logits [V] after the last."""
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start:start + self.prefill_chunk]
            with timeline.span("compute", f"prefill {len(chunk)}"):
                logits = self.forward(cache, chunk, start)
        return logits

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: list[int], start: int):
        """T tokens at positions start, start + 1, ... -> logits [V] after the last of them."""
        model = self.model
        tokens = torch.tensor(tokens, device=model.device)                          # [T]
        positions = torch.arange(start, start + len(tokens), device=model.device)   # [T]
        rotation = model.rotary(positions)                                          # [T, 1, hd] each
        hidden = model.embed(tokens)                                                # [T, D]
        for layer, attend in zip(model.layers, cache.layers(start, len(tokens))):
            hidden = layer(hidden, rotation, attend)                                # [T, D]
        return model.logits(hidden[-1:])[0]                                         # [V]

    def counters(self) -> dict:
        return dict(self.counts, waiting=max(0, len(self.line) - 1), running=min(1, len(self.line)))

    def close(self):
        """Finish nothing more: who waits is told so, and who comes too."""
        with self.turn:
            self.closing = True
            self.turn.notify_all()

    # What the page shows

    def tiers(self) -> list[live.Tier]:
        """The cache of who is being answered, in blocks of BLOCK tokens: all are taken at once, and written as it goes on."""
        cache, line = self.cache, list(self.line)
        if cache is None or not line:
            return [live.Tier("device", TIER, numpy.empty(0, numpy.int64))]
        blocks, tokens, request = -(-cache.capacity // BLOCK), list(line[0].tokens), line[0].id
        states = numpy.where(numpy.arange(blocks) * BLOCK < cache.length, live.IN_USE, live.RESERVED)
        return [live.Tier("device", TIER, states, {block: [request] for block in range(blocks)}, cache.k.nbytes * 2 // blocks,
                          lambda block: (None, tokens[block * BLOCK:(block + 1) * BLOCK], None))]

    def who(self) -> list[dict]:
        """The line; only its first is being answered."""
        cache = self.cache
        computed = cache.length if cache else 0
        return [dict(id=request.id, state="waiting" if number else "decode" if computed > len(request.tokens) else "prefill",
                     prompt_tokens=len(request.tokens), computed=0 if number else min(computed, len(request.tokens)),
                     new_tokens=0 if number else max(0, computed - len(request.tokens)), cached_tokens=0, source=None)
                for number, request in enumerate(list(self.line))]

    def drawn(self, request: Request):
        """What is drawn above the lanes of a request that is over: one of legacy/figure.py's plans, or None."""

    def examples(self) -> dict[str, str]:
        return {"Facts": TURNS[0], "A question about them": TURNS[1], "Another one": TURNS[3]}

    def ways(self, prompt: list[int], new: int, stack) -> dict:
        """All of them compute the prompt: nothing is kept."""
        again, without = Engine(*self.parts), Engine(*self.parts, kv_cache=False)
        return {RECOMPUTE: lambda: again.generate(prompt=prompt, max_tokens=new),
                "the same, asked again": lambda: again.generate(prompt=prompt, max_tokens=new),
                "without a KV cache": lambda: without.generate(prompt=prompt, max_tokens=new)}


# 3. Examples -----------------------------------------------------------------------------------------------------

TURNS = [
    "Read this: The lamp is in the attic. Anna lives in Rome. The password of the safe is tiger. My cat is called Pip. "
    "The meeting is on Friday. Ben works as a baker. The color of the ball is green. My favorite food is honey.",
    "Where is the lamp?",
    "What is my cat called?",
    "What is the password of the safe?",
]
