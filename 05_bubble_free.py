"""Chapter 05: a way for each layer, so that neither link nor processor waits (HCache's scheduler).

The problem. Restoring all layers from hidden states (chapter 04) takes as long as the slower of two lanes.
Where projecting is slower, the link idles; where the link is slower, the processor does: a bubble.

The mechanism. A layer's K and V can come back in three ways, which use the lanes differently:

    R   recomputed from the tokens      much computing (the last R only a projection), nothing kept
    H   projected from hidden states    little computing, one transfer
    K   loaded as K and V               no computing, two transfers (with multi-head attention)

The costs of a layer are measured, and every division of the layers is tried on paper: first R, then H, last
K, as in RRHHHHHHHHKK. The link brings all H and then all K; the processor recomputes R meanwhile, projects
each H when it has arrived, and takes the question's rows through each layer as soon as its history is there.
The plan is the one with which the question is through first. That is what a user waits for, so the question
counts: where it costs as much as the history (classroom), the best plan may be K in all layers, chapter 03.
One plan serves all lengths: it is made for 1,024 tokens, and 512 must not come later than by chapter 03.
Layers are divided and not tokens, since half of a layer's tokens cost more than half of its products.

What is kept is what the plan says, so each plan is a namespace of its own. A new plan is taken only while
nothing runs and where two measurements find it 10 % better; what the plan before has kept is still found.

The paper divides in closed form, for a history alone. With C the seconds to project (H) or recompute (token)
a layer and IO those to move it, L layers: where projecting is slower, L_H = L IO_KV / (IO_KV + C_H - IO_H)
and the others are K; else L_H = L C_token / (C_token + IO_H - C_H) and the others are R; rounded up, so that
the slower lane is never short of work. That of the last R layer only K and V are needed is beyond the paper;
so a single R costs what an H costs, and chapter 04 is the plan RHHH...

Source: HCache (Gao et al., EuroSys '25), sections 4.1, 6.2 and 6.3.

    python 05_bubble_free.py --demo
    python 05_bubble_free.py --prompt "What is a KV cache?" --plan paper
    python 05_bubble_free.py                               # the server, on http://127.0.0.1:5000
"""

import argparse
import hashlib
import importlib
import math
import random
import re
import shell.cli as cli
import statistics
import sys
from functools import partial
from typing import NamedTuple

import numpy
import torch

from common.requests import BadRequest, Request
from common.restoring import PAUSE, Match
from common.store import StoredChunks
from shell import charts, checkpoint, lesson
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
PLANNED, QUESTION = 1024, 32  # tokens: of the history that is planned for, and of the question behind it
SHORTER = 512  # tokens: a history that must not come later than by chapter 03
MIX = 1e-3  # seconds that a mix takes besides, at most
BETTER = 0.9  # a new plan takes at most this share of the old one's time

# 1. The planner --------------------------------------------------------------------------------

class Costs(NamedTuple):
    """Seconds of one layer, for all tokens of a history."""

    recompute: float  # C_token
    project: float  # C_H
    load_states: float  # IO_H
    load_kv: float  # IO_KV
    question: float = 0.0  # to take the question's rows through it


def plan_seconds(letters: str, costs: Costs) -> float:
    """Seconds until the question has passed all layers."""
    # 1. When each layer arrives: first all H, then all K
    arrival, link = [0.0] * len(letters), 0.0
    for kind, seconds in ("H", costs.load_states), ("K", costs.load_kv):
        for layer, letter in enumerate(letters):
            if letter == kind:
                arrival[layer] = link = link + seconds
    # 2. What the processor does: R, of whose last layer only K and V are needed, then layer by layer
    recomputed = letters.count("R")
    now = costs.project if recomputed else 0.0
    if recomputed > 1:  # (until it is measured, recomputing is infinite, and 0 times that is no number)
        now += (recomputed - 1) * costs.recompute
    for letter, arrived in zip(letters, arrival):
        now = max(now, arrived) + (costs.project if letter == "H" else 0.0) + costs.question
    return now


def divisions(layers: int) -> list[str]:
    """All plans of layers that are recomputed, then restored from hidden states, then loaded."""
    return [
        "R" * recompute + "H" * hidden + "K" * (layers - recompute - hidden)
        for recompute in range(layers)  # not all: that would be no cache
        for hidden in range(layers - recompute + 1)
    ]


def best_plan(layers: int, costs: Costs, shorter: Costs | None = None) -> str:
    """The best of all divisions; of equals the one that keeps less. With the costs of a `shorter` history: of
    those that are no slower than K everywhere for that one too."""
    plans = divisions(layers)
    if shorter:
        most = plan_seconds("K" * layers, shorter)
        plans = [plan for plan in plans if plan == "K" * layers or plan_seconds(plan, shorter) + MIX <= most]
    return min(plans, key=lambda plan: (plan_seconds(plan, costs), plan.count("K"), plan.count("H")))


def closed_form(layers: int, costs: Costs) -> str:
    """Section 4.1.2, as it stands there: whole layers, two ways, and the history alone."""
    if costs.project > costs.load_states:
        share = costs.load_kv / (costs.load_kv + costs.project - costs.load_states)
        hidden = min(layers, math.ceil(layers * share))
        return "H" * hidden + "K" * (layers - hidden)
    share = costs.recompute / max(1e-12, costs.recompute + costs.load_states - costs.project)
    hidden = min(layers, math.ceil(layers * share))
    return "R" * (layers - hidden) + "H" * hidden


def bound_seconds(layers: int, costs: Costs) -> float:
    """No division ends before: both lanes busy all the time, and layers divided however finely. The best
    bound over all prices that a second of the link may have against one of the processor."""
    # (processor, link)
    ways = (costs.recompute, 0.0), (costs.project, costs.load_states), (0.0, costs.load_kv)

    def paid(price: float) -> float:
        cheapest = min(price * busy + (1 - price) * link for busy, link in ways)
        return price * layers * costs.question + (layers - 1) * cheapest

    return max(paid(step / 200) for step in range(201))


# 2. The cache ----------------------------------------------------------------------------------

class PlannedCache(hidden_states.HiddenCache):
    """Chapter 04's cache with a way for each layer. `store` is that of the plan; `stores` are the plan's and
    the one before's."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None, plan: str = "best"):
        """`blocks`: as much host memory as so many of chapter 04's take, for each of two plans. `plan`:
        best, paper, or a letter for each layer."""
        super().__init__(blocks, bandwidth, storage)
        self.asked, self.question, self.proposed = plan, 0.0, None

    def attach(self, engine):
        blocks, self.blocks = self.blocks, 0
        super().attach(engine)  # which keeps nothing yet
        self.budget = blocks * self.pool.block_size * hidden_states.bytes_per_token(self.model)  # bytes
        self.kv = self.pool.memory.flatten(4)  # [L, 2, blocks, block size, KVH * hd]
        chapter_04 = "R" + "H" * (len(self.model.layers) - 1)  # its plan, until costs are measured
        self.adopt(self.asked if set(self.asked) <= set("RHK") else chapter_04)

    def adopt(self, letters: str):
        """Keep by this plan from now on. Only while nothing is under way."""
        kinds = {kind: [layer for layer, letter in enumerate(letters) if letter == kind] for kind in "RHK"}
        of_blocks = [(layer, side) for layer in kinds["K"] for side in (0, 1)]
        config = self.model.config
        numbers = len(kinds["H"]) * config.hidden_size
        numbers += len(of_blocks) * config.num_key_value_heads * config.head_dim
        self.blocks = self.budget // (self.pool.block_size * numbers * self.model.dtype.itemsize)
        before = [store for store in self.stores if store.pool.block_of or self.has_files(store.name)]
        known = next((store for store in before if store.letters == letters), None)
        if known is None:
            before = self.stores = before[:1]  # the memory of a third one goes first
        self.keep(kinds["H"], letters, of_blocks, known)
        self.store.letters = letters
        self.store.parts_of = {layer: [part] for part, layer in enumerate(kinds["H"])}
        for number, layer in enumerate(kinds["K"]):
            self.store.parts_of[layer] = [len(kinds["H"]) + 2 * number + side for side in (0, 1)]
        self.stores = [self.store, *(store for store in before if store is not self.store)][:2]

    # Plans that have files: a value without contents says so

    def has_files(self, letters: str) -> bool:
        return self.storage is not None and self.storage.find(self.plan_key(letters)) is not None

    def plan_key(self, letters: str) -> bytes:
        of_size = f" {self.pool.block_size} {letters}".encode()
        return hashlib.sha256(self.engine.prefixes.namespace + of_size).digest()

    def finished(self, request):
        super().finished(request)
        if self.storage:
            self.storage.write(self.plan_key(self.store.name), [numpy.zeros(0, numpy.uint8)])
            self.storage.use([self.plan_key(self.store.name)])

    # Estimating

    def costs(self, start: int, end: int, stored: float = 0.0) -> Costs:
        """Of a layer of tokens start to end, of which a share, `stored`, is read from storage first."""
        config, layers, tokens = self.model.config, len(self.model.layers), end - start
        states = tokens * config.hidden_size * self.model.dtype.itemsize
        kv = tokens * config.kv_numbers_per_token * self.model.dtype.itemsize // layers
        compute = self.engine.estimates.seconds_to_compute(start, end) / layers
        speed = self.load_link.speed()
        if stored:
            speed = min(speed, self.storage.speed() / stored)
        return Costs(compute, self.seconds_to_project(tokens), states / speed, kv / speed, self.question)

    def match(self, request):
        found = [(*store.find(request), store) for store in self.stores]
        blocks, reached, store = max(found, key=lambda item: item[1])  # of equals the first
        if not blocks:
            return None
        start, tokens = request.computed, reached - request.computed
        stored = store.stored(blocks)
        costs = self.costs(start, reached, len(stored) / len(blocks))
        costs = costs._replace(question=0.0)  # it follows in either case
        seconds = plan_seconds(store.letters, costs) + self.load_link.seconds(0)
        if stored:
            seconds += self.storage.seconds(stored, 0)  # what is queued there
        source = "disk" if stored else "cpu"
        return Match(tokens, seconds, blocks, source, tokens, store)

    # Bringing back

    def restore(self, request, restoration, match):
        store, letters = match.store, match.store.letters
        start, end, recomputed = restoration.start, restoration.end, letters.count("R")
        costs = self.costs(start, end, len(store.stored(match.blocks)) / len(match.blocks))
        predicted = plan_seconds(letters, costs)
        if letters.strip("K"):
            positions = torch.arange(start, end, device=self.model.device)  # [T]
            slots = self.slots(request, positions)  # [T]
        numbers, reads = store.bring(request, start, match.blocks)
        table = request.table[start // self.pool.block_size : end // self.pool.block_size]
        self.pool.share(table)
        runs = offload.adjacent(table, numbers)
        landing, transfers = {}, {}  # layer -> where its rows land, its Transfer
        ordered = recomputed  # the next layer to order
        try:
            if request in self.rows:
                self.flush()  # what it has noted ends here
            while (layer := restoration.layers) < len(letters):
                # 1. Order the next layers, as far as they have been read; of H some ahead
                while ordered < len(letters):
                    parts, label = store.parts_of[ordered], f"layer {ordered}"
                    pending = not all(read.ready for part in parts for read in reads[part])
                    if pending and (layer < ordered or layer < recomputed):
                        break
                    if letters[ordered] == "H" and len(landing) == hidden_states.DEPTH:
                        break
                    for part in parts:
                        yield from reads[part]
                    if letters[ordered] == "H":
                        part = store.parts[parts[0]]
                        landing[ordered], transfers[ordered] = self.fetch(part, numbers, label)
                    else:
                        transfers[ordered] = self.fetch_kv(ordered, store, runs, label)
                    ordered += 1
                # 2. Bring the next layer back, in its way
                if layer < recomputed:
                    yield from self.recompute(request, recomputed, positions, slots)
                    restoration.layers = recomputed
                else:
                    yield transfers[layer]
                    if letters[layer] == "H":
                        mark = self.engine.clock.mark()
                        hidden = landing.pop(layer)[start - end :]  # [T, D]
                        self.project(layer, hidden, positions, slots)
                        span = request, end - start, f"layer {layer}", mark, self.engine.clock.mark()
                        self.spans.append(span)
                    restoration.layers += 1
        finally:
            held = (store.pool, numbers), (self.pool, table)
            self.hold("load", list(transfers.values()), *held, then=lambda arrived, to=landing: None)
            for pool, blocks in held:
                pool.release(blocks)
        title = f"{end - start} tokens: {1e3 * predicted:.1f} ms predicted, the question included"
        legend = dict(R="recomputed", H="from hidden states", K="loaded as K and V")
        costs_ms = {name: 1e3 * seconds for name, seconds in costs._asdict().items()}  # of a layer
        plan = dict(title=title, rows=[["layers", letters]], legend=legend)
        request.timeline.plan = dict(plan, predicted_ms=1e3 * predicted, costs_ms=costs_ms)

    def recompute(self, request, layers: int, positions, slots):
        """The forward pass of the first layers, in portions: others may decode between them. Of the last
        layer only K and V are needed: of a first one that is alone, the projected embedding."""
        start, count, portion = request.restoration.start, len(positions), self.engine.token_budget
        for at in range(0, count, portion):
            rows, began = slice(at, min(at + portion, count)), self.engine.clock.mark()
            tokens = request.tokens[start + at : start + rows.stop]
            with torch.inference_mode():
                hidden = self.model.embed(torch.tensor(tokens, device=self.model.device))  # [T, D]
                if layers > 1:
                    part = Request(request.tokens[: start + rows.stop], 1, table=request.table)
                    part.computed = start + at
                    batch = paged.Batch(self.pool, [(part, len(tokens))])
                    rotation = self.model.rotary(batch.positions)  # [T, 1, hd] each
                for layer in range(layers - 1):
                    hidden = self.model.layers[layer](hidden, rotation, batch.attend(layer))  # [T, D]
                self.project(layers - 1, hidden, positions[rows], slots[rows])
            self.spans.append((request, 0, "recompute", began, self.engine.clock.mark()))
            if rows.stop < count:
                yield PAUSE

    def fetch_kv(self, layer: int, store, runs: list, label: str):
        """Order a layer's K and V, straight into the device's blocks -> the Transfer."""
        into, out_of = [], []
        for kv, part in zip(self.kv[layer], store.parts_of[layer]):  # [blocks, block size, KVH * hd]
            into += [kv[to : to + count] for to, _, count in runs]
            out_of += [store.parts[part][at : at + count] for _, at, count in runs]
        transfer = self.load_link.copy(into, out_of, label)
        self.counts["bytes_in"] += transfer.bytes
        return transfer

    # Planning

    def idle(self):
        super().idle()
        layers, stored = len(self.model.layers), float(self.storage is not None)
        if not self.engine.estimates.computing.passes:
            self.engine.estimates.measure_computing()
        self.measure_question()
        tokens = min(PLANNED, self.model.config.max_position_embeddings // 2)
        costs, shorter = (self.costs(0, end, stored) for end in (tokens, min(SHORTER, tokens)))
        if self.asked in ("best", "paper") and math.isfinite(costs.recompute):
            best = self.asked == "best"
            letters = best_plan(layers, costs, shorter) if best else closed_form(layers, costs)
            seconds = partial(plan_seconds, costs=costs)
            if not self.store.pool.block_of:  # nothing is kept here: the best of the plans that have files
                first = min(filter(self.has_files, divisions(layers)), key=seconds, default=letters)
                if first != self.store.letters:
                    self.adopt(first)
            better = seconds(letters) <= BETTER * seconds(self.store.letters)
            if better and letters == self.proposed and letters != self.store.letters:
                self.adopt(letters)
            self.proposed = letters  # by this measurement; one alone may be of a bad moment
        return 1 / plan_seconds(self.store.letters, costs)

    def measure_question(self):
        """Seconds a layer for the question's rows behind a history."""
        tokens = min(PLANNED, self.model.config.max_position_embeddings // 2)
        estimates = self.engine.estimates
        if request := estimates.dummy_request(tokens + QUESTION, tokens):
            self.question = estimates.fastest_layer(request, QUESTION)


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Answers on the model, then plans and times on a larger one, over three links."""
    # 1. Are the tokens right, with all three ways in one plan?
    rng, third = random.Random(0), len(model.layers) // 3
    letters = "R" * third + "H" * third + "K" * (len(model.layers) - 2 * third)
    options = argparse.Namespace(**{**vars(arguments), "plan": letters, "always_restore": True})
    engine = make_engine(model, options)
    asked = hidden_states.converse(engine, frontend, rng, max(2, min(arguments.max_tokens, 16)))
    verified = lesson.verify(paged.baseline.Engine(model), asked)
    link, rows = engine.cache.load_link, [offload.describe(letters, request) for request in asked]
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), counters=engine.counters())
    print(f"\nThe last turn (digits: layers)\n{charts.chart(asked[-1].timeline)}\n")
    engine.close()

    # 2. Time: on a model whose question costs less than its history
    larger, *_ = checkpoint.load(hidden_states.LARGER, arguments.dtype, arguments.device)
    prompt = [rng.randrange(300, larger.config.vocab_size) for _ in range(PLANNED)]
    blocks = -(-(PLANNED + 2 * QUESTION) // 16)
    states_kept = hidden_states.HiddenCache(2 * blocks, 1e9)
    caches = {"K and V (03)": offload.HostCache(2 * blocks, 1e9), "hidden states (04)": states_kept}
    make = lambda cache: paged.Engine(paged.Runner(larger, blocks), cache, always_restore=True)  # noqa: E731
    once = partial(partial, hidden_states.once, prompt=prompt, rng=rng)
    ways = {name: once(make(cache)) for name, cache in caches.items()}
    computed = min(way() for way in ways.values())  # and kept
    projecting = states_kept.seconds_to_project(PLANNED)
    states = PLANNED * larger.config.hidden_size * larger.dtype.itemsize  # bytes of a layer
    cases = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}
    for words, share in cases.items():
        bandwidth = states / projecting / share if link.modelled else None
        for cache in caches.values() if link.modelled else ():
            cache.load_link.bandwidth.value = bandwidth
        cache = PlannedCache(4 * blocks, bandwidth)
        ways["planned (05)"] = once(engine := make(cache))
        ways["planned (05)"]()  # it keeps what its plan says
        costs, letters = cache.costs(0, PLANNED), cache.store.letters
        named = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in costs._asdict().items())
        title = f"{hidden_states.LARGER}, TTFT behind {PLANNED} tokens" + link.modelled * f", {words}"
        predicted, bound = plan_seconds(letters, costs), bound_seconds(len(letters), costs)
        print(f"A layer, ms: {named}\nPlan {letters}: {1e3 * predicted:.0f} ms predicted, none below "
              f"{1e3 * bound:.0f}; the paper's closed form: {closed_form(len(letters), costs)}")  # fmt: skip
        taken = lesson.in_turn(ways, 3)
        rows += lesson.table(title, taken, "ttft_ms", "ms")
        theirs, _, ours = (statistics.median(samples) for samples in taken.values())
        print(f"  {theirs / ours:.2f}x sooner than chapter 03, {computed / ours:.1f}x than computing it\n")
        engine.close()
        if not link.modelled:
            break
    print(
        "The slower the link, the more is recomputed and projected; the faster, the more is loaded as is.\n"
        "All of this had to be in host memory. What if it is in storage, slower by far? Chapter 06."
    )
    return dict(report, verified=verified, rows=rows), [asked[-1].timeline]


# 4. Main ---------------------------------------------------------------------------------------

def plan(string: str) -> str:
    """An argparse type: best, paper, or letters, first R, then H, last K."""
    if string in ("best", "paper") or (re.fullmatch("R*H*K*", string) and set(string) & set("HK")):
        return string
    words = "is not best, paper, or letters like RRHHHK, R before H before K"
    raise argparse.ArgumentTypeError(f"{string!r} {words}")


def add_arguments(parser):
    hidden_states.add_arguments(parser)
    words = "best (default), paper (the closed form), or a letter for each layer, like RRHHHK"
    parser.add_argument("--plan", type=plan, default="best", metavar="PLAN", help=words)


def make_engine(model, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Cache."""
    if arguments.plan not in ("best", "paper") and len(arguments.plan) != len(model.layers):
        words = f"--plan has {len(arguments.plan)} letters, and this model {len(model.layers)} layers"
        raise BadRequest(f"{words}; give it one for each.")
    engine = hidden_states.make_engine(model, arguments, partial(PlannedCache, plan=arguments.plan))
    print(f"Plan: {engine.cache.store.letters}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "05_bubble_free", add_arguments, make_engine, demo)
