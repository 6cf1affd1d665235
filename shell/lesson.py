"""Helpers of demos and benchmarks: prompts, the comparison with chapter 01, timing in turn, tables."""
import random
import statistics
import time

import torch

from common.requests import BadRequest, Request
from models.classroom import facts
from shell import checkpoint
from shell.frontend import Frontend
from shell.machine import flops, machine_of

document, conversation = facts.document, facts.conversation
TURNS, SECRET, QUESTION = facts.TURNS, facts.SECRET, facts.QUESTION
LONGEST_FACT = 16  # tokens; a document may exceed its size by one fact
ROUNDS = 3  # timed repetitions in a demo, after a warm-up; --rounds sets it
SECONDS = 2.0  # the longest prefill of a demo
BITS = dict(equal=True, compared=0)  # with --same-bits: how many logits were compared, all of them equal

# For TTFT: a model, and the tokens of a history and of a question
LARGER, HISTORY, ASKED = "random:long", 1024, 32
# Title of a table -> seconds of a layer's transfer, over seconds of its projection
LINKS = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}


def prepare(arguments):
    """Note the options of a demo. With --same-bits, requests keep the logits of their tokens for `verify`."""
    global ROUNDS
    ROUNDS = arguments.rounds
    if arguments.same_bits:
        Request.observe = keep_logits


def keep_logits(request: Request, logits: torch.Tensor):
    """Append a new token's logits [V] to `request.logits`."""
    request.logits = [*getattr(request, "logits", ()), logits.clone()]


def context(model, frontend: Frontend) -> int:
    """Return how many tokens of the model's context a demo uses, and print a line if that is not all of them.

    It is 512, doubled while a prefill takes at most SECONDS at the measured speed of this machine."""
    tokens, most = min(512, frontend.context), SECONDS * machine_of(model).fastest
    while tokens < frontend.context and flops(model.config, 0, 2 * tokens) <= most:
        tokens = min(2 * tokens, frontend.context)
    if tokens < frontend.context:
        print(f"Of {frontend.context} tokens of context, {tokens} are used: as measured now, this machine "
              f"computes them in {SECONDS:g} s at most.\n")
    return tokens


def document_for(engine, frontend: Frontend, rng, tokens: int, turns: list[str], new: int) -> str:
    """Return a document of `tokens` tokens that contains the fact turns[0], or a shorter one.

    A conversation of the document, the questions turns[1:] and answers of `new` tokens each fits in every
    pool of `engine`. Raises BadRequest if even a short document does not fit."""
    messages = [[dict(role="user", content=text), dict(role="assistant", content="")] for text in turns]
    rest = len(frontend.encode(None, sum(messages, [])[:-1])) + len(turns) * new + LONGEST_FACT
    size = engine.pool.block_size
    rooms = {name: pool.size * pool.block_size // size for name, pool in engine.pools.items()}
    check_room(rooms, -(-rest // size), size)
    return document(frontend, rng, min(tokens, size * min(rooms.values()) - rest), turns[0])


def describe_link(link) -> dict:
    """Print a line about a link, and return the same as a dict for the demo's report."""
    print(f"{link}\n")
    return dict(modelled=link.modelled, gbps=link.speed() / 1e9)


def check_room(pools: dict[str, int], needed: int, size: int):
    """Raise BadRequest if a pool has fewer than `needed` blocks.

    `pools`: name -> number of blocks of `size` tokens."""
    name = min(pools, key=pools.get)
    if pools[name] < needed:
        words = f"The demo needs at least {needed} blocks of {size} tokens, and pool '{name}'"
        raise BadRequest(f"{words} has {pools[name]}; give it more (--gpu-blocks or --cpu-blocks).")


def verify(oracle, requests: list[Request]) -> bool:
    """Compare the answers of `requests` with those of `oracle`, an engine of chapter 01.

    Returns: True if all tokens are equal. Ends the process if float32 tokens differ."""
    asked = [(*request.tokens[: request.prompt_tokens], request.max_tokens) for request in requests]
    again = {each: Request(each[:-1], each[-1], end_tokens=request.end_tokens)
             for each, request in zip(asked, requests)}
    oracle.generate(list(again.values()))
    pairs = [(again[each], request) for each, request in zip(asked, requests)]
    if oracle.model.same_bits:
        compare_bits(pairs)
    return equal([(theirs.new, ours.new) for theirs, ours in pairs], oracle.model.dtype, "chapter 01")


def compare_bits(pairs: list[tuple[Request, Request]]):
    """Compare the logits of requests, and count them in BITS. Ends the process if one bit differs."""
    rows = [both for theirs, ours in pairs for both in zip(theirs.logits, ours.logits)]
    BITS["compared"] += sum(len(theirs) for theirs, _ in rows)
    if not all(torch.equal(*both) for both in rows):
        raise SystemExit("NOT verified: the bits of some logits differ from those of chapter 01.")
    print(f"verified: all {BITS['compared']:,} logits have the bits of chapter 01")


def equal(pairs: list[tuple[list[int], list[int]]], dtype, whose: str) -> bool:
    """Print how many tokens of the pairs (theirs, ours) are equal.

    `whose`: the other engine's name. Returns: True if all are equal. Ends the process if float32 tokens
    differ."""
    same = sum(a == b for theirs, ours in pairs for a, b in zip(theirs, ours))
    total = sum(max(len(theirs), len(ours)) for theirs, ours in pairs)
    if same < total and dtype == torch.float32:
        raise SystemExit(f"NOT verified: {total - same} of {total} tokens differ from those of {whose}.")
    said = "verified: all" if same == total else f"16-bit rounding may differ: {same} of"
    print(f"{said} {total} tokens equal those of {whose}\n")
    return same == total


def wait_until_idle(engine, evict: str = ""):
    """Step the engine until it is idle, for at most a minute; then evict the pool `evict`, if any."""
    until = time.perf_counter() + 60
    while engine.busy and time.perf_counter() < until:
        engine.step()
    if evict:
        engine.evict(evict)


def ask(engine, tokens: list[int], max_tokens: int = 1, evict: str = "", **options) -> Request:
    """Wait until the engine is idle, evict the pool `evict`, if any, and answer one prompt."""
    wait_until_idle(engine, evict)
    return engine.generate([Request(list(tokens), max_tokens, options=options)])[0]


def say(engine, frontend: Frontend, messages: list[dict], text: str, max_tokens: int, evict="") -> Request:
    """Send `text` as the user of a conversation, and append it and the answer to `messages`.

    Before that, wait until the engine is idle, and evict the pool `evict`, if any."""
    wait_until_idle(engine, evict)
    messages.append(dict(role="user", content=text))
    (request,) = engine.generate([frontend.request(messages=messages, max_tokens=max_tokens)])
    messages.append(dict(role="assistant", content=request.text))
    return request


def converse(engine, frontend: Frontend, tokens: int, turns: list[str], new: int) -> list[Request]:
    """Hold a conversation about a document of `tokens` tokens.

    The first message is the document, which contains the fact turns[0]. The questions turns[1:] follow. Each
    answer has at most `new` tokens. The device pool is evicted before each turn.

    Returns: the requests."""
    text, talk = document_for(engine, frontend, random.Random(0), tokens, turns, new), []
    return [say(engine, frontend, talk, words, new, "device") for words in (text, *turns[1:])]


def in_turn(ways: dict, rounds: int = 0, warm_up: int = 1) -> dict[str, list]:
    """Call each of `ways` in turn, `warm_up` and then `rounds` times (0: as often as a demo does).

    Returns: name -> what the calls returned, without the warm-up."""
    taken = [{name: way() for name, way in ways.items()} for _ in range(warm_up + (rounds or ROUNDS))]
    return {name: [each[name] for each in taken[warm_up:]] for name in ways}


class Larger:
    """A model of random weights and a long history, for measuring TTFT with different caches over one link.

    The history is long, so restoring it takes more time than computing the question."""

    def __init__(self, arguments, rng, make):
        """`make(model, blocks, cache)` must return an engine."""
        how = arguments.dtype, arguments.device
        self.model, *_ = checkpoint.load(LARGER, *how, same_bits=arguments.same_bits)
        self.draw = lambda count: rng.choices(range(300, self.model.config.vocab_size), k=count)
        self.history, self.make, self.blocks = self.draw(HISTORY), make, -(-(HISTORY + 2 * ASKED) // 16)

    def way(self, cache):
        """Return a function that asks a question after the history, with `cache`, and returns the TTFT in ms.

        Each call evicts the device pool first, so that the history must be restored."""
        engine = self.make(self.model, self.blocks, cache)
        return lambda: ask(engine, self.history + self.draw(ASKED), 1, "device").ttft_ms

    def over_links(self, caches: list, project: float):
        """Set the modelled link of `caches` to one speed of LINKS after the other.

        A GPU's link stays as it is. `project`: seconds to project the hidden states of one layer. Yields:
        (title of a table, bytes/s)."""
        states = HISTORY * self.model.config.hidden_size * self.model.dtype.itemsize  # bytes per layer
        modelled = caches[0].load_link.modelled
        for words, share in LINKS.items() if modelled else [("the link as it is", 1.0)]:
            speed = states / project / share if modelled else None
            for cache in caches if modelled else ():
                cache.load_link.bandwidth.values = [speed]
            yield f"{LARGER}, TTFT behind {HISTORY} tokens, {words}", speed


def table(title: str, taken: dict[str, list[float]], name: str, unit: str) -> list[dict]:
    """Print a bar, the median and the spread of each case.

    `taken`: case -> samples, in `unit`. Returns: a row {table, case, `name`: median, min, max} per case."""
    longest, width, rows = max(map(statistics.median, taken.values())), max(map(len, taken)), []
    print(f"{title} (median of {max(map(len, taken.values()))})")
    for case, samples in taken.items():
        middle, least, most = statistics.median(samples), min(samples), max(samples)
        bar = "#" * max(1, round(36 * middle / longest))
        print(f"  {case:{width}} |{bar:36}| {middle:9.1f} {unit}   {least:.1f} to {most:.1f}")
        rows.append({"table": title, "case": case, name: middle, "min": least, "max": most})
    return rows


def describe(label: str, request: Request) -> dict:
    """Print one line about a finished request, and return it as a row of the demo's table."""
    row = dict(phase=label, source=request.source, found=request.found, ttft_ms=request.ttft_ms)
    found = f"{request.cached_tokens:5} of {request.prompt_tokens} tokens found"
    print(f"  {label:17} {request.source:8} {found}, TTFT {request.ttft_ms:.1f} ms")
    return row
