"""Chapter 01: the baseline, which keeps nothing and computes everything again.

The problem. A language model reads a prompt (prefill) and then writes one token at a time (decode). It stores
the keys and values of every token, per layer, in the KV cache. Within one answer, the cache makes each new
token cheap. But the cache is dropped when the answer is complete, so the next turn of the conversation starts
with computing everything again.

The mechanism. Each request gets one contiguous cache. Prefill fills it in chunks, and decode reads it. No
state is kept between the turns of a conversation: each turn sends the whole history, and each turn computes
all of it. With n tokens of history, the time to first token (TTFT) is

    TTFT = n * (2 * weights + attention) / FLOP/s

    weights: number of the model's weights      attention: operations of attention per token

All of this work was done before, in earlier turns. Chapters 02 to 09 avoid it, each in its own way. They must
produce the same tokens as this file. Therefore this file shares no engine with them. Two of the papers
compare with a baseline that recomputes: HCache (EuroSys '25, section 2.4) calls it recomputation, and Cake
(section 5.1) calls it compute-only. Their baselines compute many requests together, as chapter 02 does. This
file answers one request after the other.

    python 01_baseline.py --demo
    python 01_baseline.py --prompt "What is a KV cache?"
    python 01_baseline.py                                  # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

from contextlib import contextmanager

import torch

from common.llama import attention, causal_mask, upload
from common.requests import Request, RequestQueue
from common.timeline import Clock
from shell import charts, checkpoint, cli, lesson
from shell.frontend import Frontend

PREFILL = 512  # tokens per forward pass of prefill

# 1. The loop -----------------------------------------------------------------------------------

def generate(model, request: Request, chunk: int = PREFILL, kv_cache: bool = True):
    """Answer one request. This is a generator that yields after each new token, and between two chunks of
    prefill, so that its caller can end it there.

    `chunk`: tokens per forward pass of prefill. `kv_cache`: False computes all tokens again for each new
    one."""
    # 1. Allocate an empty cache for as many tokens as the request can have
    cache, clock = KVCache(model, len(request.tokens) + request.max_tokens), Clock(model.device)

    # 2. Prefill: compute the prompt in chunks; only its last token's logits are needed
    logits = yield from prefill(model, cache, request, chunk, clock)  # [V]
    while True:
        # 3. Sample the next token
        request.push(request.sample(logits), logits)
        yield
        if request.finish_reason:
            return

        # 4. Decode: compute one token to get the next logits
        if kv_cache:
            with recorded(request, clock, "decode"):
                logits = forward(model, cache, request.tokens[-1:], len(request.tokens) - 1)  # [V]
        else:  # without a cache: compute everything again for each token
            logits = yield from prefill(model, cache, request, chunk, clock)  # [V]


def prefill(model, cache: "KVCache", request: Request, chunk: int, clock: Clock):
    """Compute all tokens of the request, in chunks. This is a generator that yields between two chunks.
    Returns: logits [V] of the last token."""
    for start in range(0, len(request.tokens), chunk):
        if start:
            yield
        tokens = request.tokens[start : start + chunk]
        with recorded(request, clock, f"prefill {len(tokens)}"):
            logits = forward(model, cache, tokens, start)
        request.computed = start + len(tokens)
    return logits


@contextmanager
def recorded(request: Request, clock: Clock, label: str):
    """Context manager: add a span to the request's timeline for the work that is computed inside."""
    began = clock.mark()
    yield
    request.timeline.add("compute", label, clock.seconds(began), clock.seconds(clock.mark()))


@torch.inference_mode()
def forward(model, cache: "KVCache", tokens: list[int], start: int):
    """Compute T tokens at positions start, start + 1, ... Returns: logits [V] of the last token."""
    tokens = upload(tokens, model.device)  # [T]
    positions = torch.arange(start, start + len(tokens), device=model.device)  # [T]
    rotation = model.rotary(positions)  # [T, 1, hd] each
    hidden = model.embed(tokens)  # [T, D]
    for layer, attend in zip(model.layers, cache.layers(start, len(tokens))):
        hidden = layer(hidden, rotation, attend)  # [T, D]
    return model.logits(hidden[-1:])[0]  # [V]


# 2. The cache ----------------------------------------------------------------------------------

class KVCache:
    """The keys and values of one request, in all layers: two contiguous tensors."""

    def __init__(self, model, capacity: int):
        """`capacity`: tokens that the cache can hold."""
        config = model.config
        shape = config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim
        self.k = torch.empty(shape, dtype=model.dtype, device=model.device)  # [L, KVH, capacity, hd]
        self.v = torch.empty_like(self.k)  # [L, KVH, capacity, hd]
        self.same_bits = model.same_bits

    def layers(self, start: int, count: int):
        """Yield one `attend(q, k, v)` per layer, for `count` tokens at positions start, start + 1, ...

        `attend` writes k, v [T, KVH, hd] to the cache, and returns attention over all tokens so far,
        [T, H, hd]."""
        end = start + count
        mask = causal_mask(count, end, self.k.device, self.k.dtype, self.same_bits)  # [T, S]
        for cached_k, cached_v in zip(self.k, self.v):  # [KVH, capacity, hd] each

            def attend(q, k, v, cached_k=cached_k, cached_v=cached_v):
                cached_k[:, start:end] = k.transpose(0, 1)  # [KVH, T, hd]
                cached_v[:, start:end] = v.transpose(0, 1)  # [KVH, T, hd]
                seen_k = cached_k[:, :end].transpose(0, 1)  # [S, KVH, hd]
                seen_v = cached_v[:, :end].transpose(0, 1)  # [S, KVH, hd]
                return attention(q, seen_k, seen_v, mask)

            yield attend


# 3. One request after another ------------------------------------------------------------------

class Engine(RequestQueue):
    """An engine that answers one request after another, in order of arrival."""

    def __init__(self, model, chunk: int = PREFILL, kv_cache: bool = True):
        super().__init__()
        self.model, self.chunk, self.kv_cache = model, chunk, kv_cache

    def step(self):
        """Compute one more token, or one chunk of the prompt, of the oldest request. Sleep until a request
        arrives if there is none."""
        self.take_arrivals()
        if not self.running and self.waiting:
            self.running = [self.waiting.popleft()]
            self.tokens = generate(self.model, self.running[0], self.chunk, self.kv_cache)
        if self.running:
            (request,) = self.running
            self.counts["steps"] += 1
            self.log_event("compute", [request], 1 if request.new else min(self.chunk, request.pending))
            with self.contain(request):
                next(self.tokens)
                if request.finish_reason:
                    self.finish(request)
        else:
            self.wake.wait()
            self.wake.clear()

    def release(self, request: Request):
        """Drop the request's cache."""
        self.running, self.tokens = [], None

    def close(self):
        """Do nothing: there are no threads and no files."""


# 4. The demo -----------------------------------------------------------------------------------

def equal_to_transformers(model, name: str, requests: list[Request]) -> bool:
    """Compare the answers with those of `transformers`. Returns: whether they are equal; in float32, exits if
    they differ."""
    reference, pairs = checkpoint.reference_model(name, model.dtype, model.device.type), []
    for request in requests:
        prompt = torch.tensor([request.tokens[: request.prompt_tokens]], device=model.device)  # [1, T]
        theirs = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_tokens,
            do_sample=False, eos_token_id=list(request.end_tokens), pad_token_id=0)
        pairs.append((theirs[0, prompt.shape[1] :].tolist(), request.new))
    return lesson.equal(pairs, model.dtype, "transformers")


HISTORIES = [64, 128, 256, 512, 1024, 1536, 1900]  # tokens


def demo(model, frontend: Frontend, arguments):
    """Answer four turns of a conversation, compare with `transformers`, then time TTFT for several lengths of
    history."""
    # 1. The conversation: every turn sends the whole history
    engine, messages, requests = make_engine(model, arguments), [], []
    new, context = min(arguments.max_tokens, 32), lesson.context(model, frontend)
    for turn in lesson.TURNS:
        requests.append(lesson.say(engine, frontend, messages, turn, new))
        print(f"user       {turn}\nassistant  {requests[-1].text}\n")

    # 2. Verify the tokens before any time is printed
    verified = equal_to_transformers(model, arguments.model, requests)
    if model.same_bits:  # each decoded token has the bits of a prefill of the same text
        lesson.verify(Engine(model, kv_cache=False), requests)

    # 3. The cost of each turn
    print("TTFT: time to first token. TBT: mean time between later tokens.\n"
          "turn  prompt  history  recomputed      TTFT       TBT")
    rows, history = [], 0
    for number, result in enumerate(requests, 1):
        prompt = result.usage["prompt_tokens"]
        rows.append(dict(turn=number, prompt_tokens=prompt, history_tokens=history, ttft_ms=result.ttft_ms))
        tbt = f"  {result.tbt_ms:5.2f} ms" if result.tbt_ms else ""
        print(f"{number:4}  {prompt:6}  {history:7}  {history / prompt:10.0%}  {result.ttft_ms:5.1f} ms{tbt}")
        history = prompt + result.usage["completion_tokens"]
    print(f"\nThe last turn (p: prefill, d: decode)\n{charts.chart(requests[-1].timeline)}\n")

    # 4. TTFT grows with the history
    filler = frontend.encode(" ".join(lesson.TURNS), None) * (HISTORIES[-1] // 64)
    lengths = [length for length in HISTORIES if length < context]
    ways = {
        f"{length} tokens": lambda length=length: lesson.ask(engine, filler[:length]).ttft_ms
        for length in lengths
    }
    rows += lesson.table("TTFT against history", lesson.in_turn(ways), "ttft_ms", "ms")
    print("\nIn a conversation, all of this history was computed in an earlier turn, and then dropped.\n"
          "What should be kept, and how should it come back? Each of the next chapters has an answer.")
    return dict(link=None, verified=verified, rows=rows), [request.timeline for request in requests]


# 5. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    """Add the options of this chapter."""
    tokens = cli.bounded(int, 1, 1 << 20)
    add = parser.add_argument
    add("--prefill-chunk", type=tokens, default=PREFILL, metavar="N", help="tokens per pass of prefill (512)")
    add("--no-kv-cache", action="store_true", help="compute all tokens again for every new one")


def make_engine(model, arguments) -> Engine:
    """Build the engine from the command line's options. Options that another chapter lacks get their
    defaults."""
    options = vars(arguments)
    engine = Engine(model, options.get("prefill_chunk", PREFILL), not options.get("no_kv_cache", False))
    engine.explain = arguments.explain
    context, token_bytes = model.config.max_position_embeddings, 2 * KVCache(model, 1).k.nbytes
    engine.capacity = cli.blocks_that_fit(None, context, token_bytes, model.device, "--max-tokens")
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "01_baseline", add_arguments, make_engine, demo)
