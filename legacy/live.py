"""What the page shows of an engine while it runs. Of an engine this file knows:

    engine.tiers()                   what each of its memories holds now: [Tier]
    engine.who()                     who waits and who runs, as JSON objects
    engine.over                      the last requests: [(Result, Request)], oldest first
    engine.drawn(request)            what is drawn above the lanes of one of them: one of legacy/figure.py's plans, or None
    engine.counters()                numbers
    engine.examples()                prepared prompts: {name: prompt}
    engine.ways(prompt, new, stack)  what a comparison compares: {name: function() -> Result}, chapter 01 first
    engine.compared                  what the comparison shows: "TTFT" or "TBT"

All of it is read beside the engine's thread, which waits for nobody: a picture may mix two moments of a step. A page that was
closed costs nothing, because whatever is sent is looked up for who asks, when it is sent.
"""
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy

from legacy import figure

LOOK, IDLE_LOOK = 0.1, 0.5         # seconds between two looks at an engine that computes, and at one that does not
NOTICE = 0.02                      # seconds in which it is noticed that an engine begins to compute
SHARE = 0.1                        # of the time, at most, in which somebody looks: the more blocks, the longer a look takes
SILENCE = 10.0                     # seconds after which a page is told that the server is still there
PAGES = 64                         # that may be open at once
ROUNDS, PATIENCE = 5, 10.0         # of a comparison, after a warm-up; seconds after which it is content with fewer
STATES = FREE, CACHED, RESERVED, IN_USE, SHARED, IN_FLIGHT = range(6)
WORDS = "free", "cached", "reserved", "in use", "shared", "in flight"


# 1. Memory -------------------------------------------------------------------------------------------------------

@dataclass
class Tier:
    """A memory in blocks: cached means that nobody holds a block and its prefix finds it; reserved that a request holds it, and
    nothing is in it yet; shared that several requests hold it; in flight that it is on its way from or to another tier."""
    name: str
    title: str
    states: numpy.ndarray          # [blocks], of STATES
    holders: dict[int, list[int]] = field(default_factory=dict)         # block -> ids of the requests that hold it
    block_bytes: int | None = None
    describe: Callable | None = None                            # block -> (key or None, tokens or None, note or None)

    def as_json(self) -> dict:
        """With runs of equal blocks: [state, how many, ids of who holds them]."""
        groups = {(): 0}           # who holds a block -> a number
        held = numpy.zeros(len(self.states), numpy.int64)
        for block, ids in self.holders.items():
            held[block] = groups.setdefault(tuple(ids), len(groups))
        codes, names = held * len(STATES) + self.states, list(groups)
        edges = [0, *(numpy.flatnonzero(numpy.diff(codes)) + 1).tolist(), len(codes)] if len(codes) else [0]
        runs = [(int(codes[start]), end - start) for start, end in pairwise(edges)]
        return dict(name=self.name, title=self.title, blocks=len(self.states), block_bytes=self.block_bytes,
                    runs=[[WORDS[code % len(STATES)], count, names[code // len(STATES)]] for code, count in runs])


def of_pool(name: str, title: str, pool, requests=(), in_flight=(), arrived=(), block_bytes=None, note=None) -> Tier:
    """A Tier of chapter 02's BlockPool. `requests` have tables in it; blocks `in_flight` are on their way, those `arrived` were
    written ahead of what their request has computed; note(block) -> words or None."""
    references, found = numpy.array(pool.references, numpy.int64), [prefix is not None for prefix in pool.prefixes]
    states = numpy.where(references > 0, IN_USE, numpy.where(found, CACHED, FREE))
    holders, owners, unwritten, arrived = defaultdict(list), {}, [], set(arrived)
    for request in requests:
        for index, block in enumerate(list(request.table)):
            holders[block].append(request.id)
            owners[block] = request, index
            if index * pool.block_size >= request.computed and block not in arrived:
                unwritten.append(block)
    states[unwritten] = RESERVED
    states[[block for block, ids in holders.items() if len(ids) > 1]] = SHARED
    states[list(in_flight)] = IN_FLIGHT

    def describe(block: int):
        prefix, said = pool.prefixes[block], note and note(block)
        if prefix is not None:
            return prefix.key, prefix.tokens, said
        request, index = owners.get(block, (None, 0))
        start = index * pool.block_size
        return None, request and request.tokens[start:start + pool.block_size][:max(0, request.computed - start)], said
    return Tier(name, title, states, dict(holders), block_bytes, describe)


def part(name: str, title: str, tier: Tier, start: int, end: int, block_bytes: int | None) -> Tier:
    """The blocks `start` to `end` of a tier, as one of its own."""
    holders = {block - start: ids for block, ids in tier.holders.items() if start <= block < end}
    return Tier(name, title, tier.states[start:end], holders, block_bytes, lambda block: tier.describe(start + block))


class Keys:
    """What lies under keys, as a tier: each key keeps the place that it got when it was first seen, until it is gone."""

    def __init__(self):
        self.places: dict[bytes, int] = {}
        self.free: list[int] = []
        self.size = 0

    def tier(self, name: str, title: str, there, in_flight, block_bytes: int | None, known) -> Tier:
        """`there` and `in_flight` are keys; `known`: key -> a Prefix whose tokens are remembered."""
        found = {**dict.fromkeys(there, CACHED), **dict.fromkeys(in_flight, IN_FLIGHT)}
        self.free += [self.places.pop(key) for key in list(self.places) if key not in found]
        for key in found:
            if key not in self.places:
                self.places[key] = self.free.pop() if self.free else self.size
                self.size = max(self.size, self.places[key] + 1)
        states = numpy.full(self.size, FREE)
        for key, state in found.items():
            states[self.places[key]] = state
        keys = {place: key for key, place in self.places.items()}

        def describe(block: int):
            key = keys.get(block)
            prefix = known.get(key)
            return key, prefix and prefix.tokens, "its tokens are in storage only" if key and not prefix else None
        return Tier(name, title, states, {}, block_bytes, describe)


# 2. Events -------------------------------------------------------------------------------------------------------

class Feed:
    """What the open pages are sent. They share one look at the engine."""

    def __init__(self, engine):
        self.engine, self.lock, self.seen, self.due, self.pages = engine, threading.Lock(), {}, 0.0, 0

    def look(self) -> dict[str, str]:
        """-> what of the engine may have changed, as JSON, at most LOOK seconds old, or what SHARE makes of that."""
        with self.lock:
            if (began := time.perf_counter()) >= self.due:
                engine = self.engine
                self.seen = dict(requests=json.dumps(engine.who()), counters=json.dumps(engine.counters(), default=str),
                                 memory=json.dumps([tier.as_json() for tier in engine.tiers()]))
                self.due = began + max(LOOK, (time.perf_counter() - began) / SHARE)
            return self.seen

    def block(self, tier: str, number: int, with_text: bool) -> dict | None:
        """What is known of one block; None if there is no such block. Its tokens as text only `with_text`."""
        with self.lock:
            found = next((known for known in self.engine.tiers() if known.name == tier), None)
        if found is None or number >= len(found.states):
            return None
        key, tokens, note = found.describe(number)
        text = self.engine.tokenizer.decode(tokens) if tokens and with_text else None
        if tokens and not with_text:
            note = "; ".join(filter(None, (note, "its text is told on the server's own machine only")))
        return dict(tier=tier, block=number, state=WORDS[found.states[number]], requests=found.holders.get(number, []),
                    tokens=len(tokens or ()), key=key and key.hex(), text=text, note=note)

    def events(self, hello: dict, gone):
        """Yields lines for a page until it is gone: a function that says so."""
        engine, sent, versions, spoke = self.engine, {}, {}, time.perf_counter()
        self.pages += 1
        try:
            yield f"retry: 1000\n\n{event(hello=hello)}"
            while not engine.closing and not gone():
                seen = self.look()
                news, sent = [f'data: {{"{kind}": {now}}}\n\n' for kind, now in seen.items() if sent.get(kind) != now], seen
                over = [(result, len(result.timeline.spans)) for result, _ in list(engine.over)]
                news += [event(finished=finished(*one)) for one in over if versions.get(one[0].id) != one[1]]
                versions = {result.id: version for result, version in over}
                if news or time.perf_counter() - spoke > SILENCE:
                    spoke = time.perf_counter()
                    yield "".join(news) or ": still here\n\n"
                if engine.who():
                    time.sleep(LOOK)
                else:              # whoever comes now may be gone soon
                    until = time.perf_counter() + IDLE_LOOK
                    while time.perf_counter() < until and not engine.who():
                        time.sleep(NOTICE)
        finally:
            self.pages -= 1


def event(**what) -> str:
    return f"data: {json.dumps(what, default=str)}\n\n"


def finished(result, version: int) -> dict:
    return dict(id=result.id, version=version, source=result.source, finish_reason=result.finish_reason, usage=result.usage,
                ttft_ms=result.ttft_ms, tbt_ms=result.tbt_ms, words=in_words(result))


def in_words(result) -> str:
    """What the picture of a request's lanes shows."""
    timeline = result.timeline.detail or result.timeline
    until, decodes = figure.before_first_token(timeline)
    when = "in the last steps" if result.timeline.detail else "until the first token" if decodes else "in all"
    lanes = dict.fromkeys(span.lane for span in timeline.spans if span.lane != "save")
    idle = ", ".join(f"{lane} idle {timeline.bubble(lane, 0, until):.0%}" for lane in lanes)
    return f"{when}: {idle or 'nothing was drawn'}"


# 3. Comparing ----------------------------------------------------------------------------------------------------

def compare(engine, prompt: list[int], new: int, stack):
    """Answer one prompt in all of the chapter's ways, in turn, in engines of their own, which go with `stack`. Yields how far it
    is, and last the table: medians in milliseconds, with the fastest and the slowest."""
    asked, busy, ways = engine.counts["requests"], bool(engine.who()), engine.ways(prompt, new, stack)
    taken, began, rounds, done = {way: [] for way in ways}, time.perf_counter(), ROUNDS, 0
    while done <= rounds * len(ways):
        for way, answer in ways.items():
            yield dict(progress=dict(done=done, of=(1 + rounds) * len(ways), way=way))
            taken[way].append(answer())
            done += 1
        per_round = (time.perf_counter() - began) / (done // len(ways))         # the first one is the warm-up
        rounds = max(1, min(ROUNDS, int(PATIENCE / per_round)))
    first, rows = next(iter(taken.values()))[0], []
    for way, results in taken.items():
        times = [result.tbt_ms if engine.compared == "TBT" else result.ttft_ms for result in results[1:]]
        times, last = [milliseconds for milliseconds in times if milliseconds is not None], results[-1]
        tbt = [result.tbt_ms for result in results[1:] if result.tbt_ms is not None]
        rows.append(dict(way=way, ttft_ms=statistics.median(result.ttft_ms for result in results[1:]),
                         tbt_ms=statistics.median(tbt) if tbt else None, min_ms=min(times, default=None),
                         max_ms=max(times, default=None), source=last.source, cached_tokens=last.usage["cached_tokens"],
                         samples=len(times), equal=all(result.tokens == first.tokens for result in results)))
    link = next((result.link for results in taken.values() for result in results if hasattr(result, "link")), None)
    if link is None and hasattr(engine, "load_link"):           # chapter 08's results do not name it
        link = str(engine.load_link)
    yield dict(rows=rows, measure=engine.compared, link=link,
               disturbed=busy or engine.counts["requests"] != asked)
