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
The plan is the one with which the question is through first. Where the question costs as much as the history
(classroom), that may be K in all layers, chapter 03. One plan serves all lengths and loads: it is made for
1,024 tokens, and 512 must not come later than by chapter 03; of plans within 10 % of the best it is the one
whose busier lane has the least to do for 512, since where many come back at once each lane serves them all.
Layers are divided and not tokens, since half of a layer's tokens cost more than half of its products.

Each plan keeps other rows, so each is a namespace of its own. It is made once, before the first request, and
kept. A directory (`--disk`) remembers it, and the next start takes it again, unless `--plan` names another.

The paper divides in closed form, for a history alone. With C the seconds to project (H) or recompute (token)
a layer and IO those to move it, L layers: where projecting is slower, L_H = L IO_KV / (IO_KV + C_H - IO_H)
and the others are K; else L_H = L C_token / (C_token + IO_H - C_H) and the others are R; rounded up. That of
the last R layer only K and V are needed is beyond the paper; so a single R costs what an H costs, and chapter
04 is the plan RHHH...

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
import sys
from functools import partial
from typing import NamedTuple

import numpy
import torch

from common import link as links
from common.llama import upload
from common.machine import measure
from common.requests import BadRequest, Request
from common.store import StoredChunks
from shell import charts, lesson
from shell.frontend import Frontend

paged, offload = importlib.import_module("02_paged_kv"), importlib.import_module("03_cpu_offload")
hidden_states = importlib.import_module("04_hidden_state_cache")
PLANNED, QUESTION = 1024, 32  # tokens: of the history that is planned for, and of the question behind it
SHORTER = 512  # tokens: a history that must not come later than by chapter 03
MIX = 1e-3  # seconds that a mix takes besides, at most
BETTER = 0.9  # a plan is nearly the best if the best one takes at least this share of its time

# 1. The planner --------------------------------------------------------------------------------

class LayerCosts(NamedTuple):
    """Seconds of one layer, for all tokens of a history."""

    recompute: float  # C_token
    project: float  # C_H
    load_states: float  # IO_H
    load_kv: float  # IO_KV
    question: float = 0.0  # to take the question's rows through it


def recomputing_seconds(layers: int, costs: LayerCosts) -> float:
    """Of the last of these layers only K and V are needed: it is projected."""
    return (layers - 1) * costs.recompute + costs.project if layers else 0.0


def plan_seconds(letters: str, costs: LayerCosts) -> float:
    """Seconds until the question has passed all layers."""
    # 1. When each layer arrives: first all H, then all K
    arrival, link = [0.0] * len(letters), 0.0
    for kind, seconds in ("H", costs.load_states), ("K", costs.load_kv):
        for layer, letter in enumerate(letters):
            if letter == kind:
                arrival[layer] = link = link + seconds
    # 2. What the processor does: R, then layer by layer
    now = recomputing_seconds(letters.count("R"), costs)
    for letter, arrived in zip(letters, arrival):
        now = max(now, arrived) + (costs.project if letter == "H" else 0.0) + costs.question
    return now


def busier_lane(letters: str, costs: LayerCosts) -> float:
    """Seconds for which the busier lane is busy: the time of one among many that come back at once."""
    recomputed, hidden, loaded = map(letters.count, "RHK")
    restoring = recomputing_seconds(recomputed, costs) + hidden * costs.project
    link = hidden * costs.load_states + loaded * costs.load_kv
    return max(link, restoring + len(letters) * costs.question)


def divisions(layers: int) -> list[str]:
    """All plans of layers that are recomputed, then restored from hidden states, then loaded."""
    return [
        "R" * recompute + "H" * hidden + "K" * (layers - recompute - hidden)
        for recompute in range(layers)  # not all: that would be no cache
        for hidden in range(layers - recompute + 1)
    ]


def best_plan(layers: int, costs: LayerCosts, shorter: LayerCosts | None = None) -> str:
    """-> the best division, of equals what keeps less. With the costs of a `shorter` history: of those no
    slower than K there, nearly the best, and no slower than chapter 04, the one whose busier lane has least
    to do there. With grouped queries H costs more than K on both lanes: only R and K are left."""
    plans, seconds = divisions(layers), partial(plan_seconds, costs=costs)
    order = lambda plan: (seconds(plan), plan.count("K"), plan.count("H"))  # noqa: E731
    if not shorter:
        return min(plans, key=order)
    most = plan_seconds("K" * layers, shorter)
    plans = [plan for plan in plans if plan == "K" * layers or plan_seconds(plan, shorter) + MIX <= most]
    best, states = min(map(seconds, plans)), seconds("R" + "H" * (layers - 1))  # of chapter 04
    plans = [plan for plan in plans if seconds(plan) <= max(best, min(best / BETTER, states))]
    return min(plans, key=lambda plan: (busier_lane(plan, shorter), *order(plan)))


def closed_form(layers: int, costs: LayerCosts) -> str:
    """Section 4.1.2, as it stands there: whole layers, two ways, and the history alone."""
    if costs.project > costs.load_states:
        share = costs.load_kv / (costs.load_kv + costs.project - costs.load_states)
        hidden = min(layers, math.ceil(layers * share))
        return "H" * hidden + "K" * (layers - hidden)
    share = costs.recompute / max(1e-12, costs.recompute + costs.load_states - costs.project)
    hidden = min(layers, math.ceil(layers * share))
    return "R" * (layers - hidden) + "H" * hidden


def bound_seconds(layers: int, costs: LayerCosts) -> float:
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
    """Chapter 04's cache with a way for each layer: `letters`, made once, before the first request."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None, plan: str = "best"):
        """`blocks`: as much host memory as so many of chapter 04's take. `plan`: best, paper, or a letter for
        each layer."""
        super().__init__(blocks, bandwidth, storage)
        self.asked = plan

    def init_store(self):
        """Plan, and keep the states of H, then K and V of K."""
        self.kv = self.pool.memory.flatten(4)  # [L, 2, blocks, block size, KVH * hd]
        self.letters = letters = self.choose_plan()
        rows, side = [], self.kv.shape[-1]
        for layer, letter in enumerate(letters):
            rows += {"H": [(layer, self.width)], "K": [(layer, side)] * 2, "R": []}[letter]
        numbers = sum(width for _, width in rows) * self.model.dtype.itemsize  # bytes of a token
        blocks = self.blocks * hidden_states.bytes_per_token(self.model) // numbers
        store = hidden_states.BlockStore(self, letters, blocks, rows)
        self.use_store([layer for layer, letter in enumerate(letters) if letter == "H"], store)

    # Planning

    def choose_plan(self) -> str:
        """-> the plan that was asked for; else the one whose blocks a directory holds; else a new one."""
        layers, tokens = len(self.model.layers), min(PLANNED, self.model.config.max_position_embeddings // 2)
        self.question = self.measure_question(tokens)
        if self.asked not in ("best", "paper"):
            return self.asked
        stored = 1.0 if self.storage else 0.0
        costs, shorter = (self.costs(0, end, stored) for end in (tokens, min(SHORTER, tokens)))
        if kept := [letters for letters in divisions(layers) if self.has_files(letters)]:
            return min(kept, key=partial(plan_seconds, costs=costs))
        return best_plan(layers, costs, shorter) if self.asked == "best" else closed_form(layers, costs)

    def measure_question(self, history: int) -> float:
        """-> prefill operations that take as long as a question's rows in a layer, behind a history."""
        blocks = self.pool.num_blocks(history + QUESTION)
        if blocks > self.pool.available:
            return 0.0
        table = self.pool.allocate(blocks)
        asked = Request([0] * (history + QUESTION), 1, table=table, computed=history)
        batch = paged.Batch(self.pool, [(asked, QUESTION)])
        _, operations = measure(self.model, partial(self.engine.runner.compute, batch, 1))
        self.pool.release(table)
        return operations

    def has_files(self, letters: str) -> bool:
        return bool(self.storage and self.storage.find(self.plan_key(letters)))

    def plan_key(self, letters: str) -> bytes:
        """-> the key of a value without contents: a directory has blocks by this plan."""
        name = f" {self.pool.block_size} {letters}"
        return hashlib.sha256(self.engine.block_keys.namespace + name.encode()).digest()

    def finished(self, request):
        super().finished(request)
        if self.storage:
            self.storage.write(self.plan_key(self.letters), [numpy.zeros(0, numpy.uint8)])
            self.storage.use([self.plan_key(self.letters)])

    def seconds(self, start, end, locations):
        stored = self.store.stored(locations)
        # Without the question, which follows in either case
        costs = self.costs(start, end, len(stored) / len(locations))._replace(question=0.0)
        queued = self.load_link.seconds(0) + (self.storage.seconds(stored, 0) if stored else 0.0)
        return plan_seconds(self.letters, costs) + queued

    def costs(self, start: int, end: int, stored: float = 0.0) -> LayerCosts:
        """Of tokens start to end, of which a share, `stored`, is read from storage first."""
        config, layers, tokens = self.model.config, len(self.model.layers), end - start
        states = tokens * config.hidden_size * self.model.dtype.itemsize
        kv = tokens * config.kv_numbers_per_token * self.model.dtype.itemsize // layers
        compute = self.estimates.seconds_to_compute(start, end) / layers
        question = self.estimates.computing.seconds(self.question)
        speed = self.load_link.speed()
        if stored:
            speed = min(speed, self.storage.speed() / stored)
        return LayerCosts(compute, self.seconds_to_project(tokens), states / speed, kv / speed, question)

    # Bringing back

    def restore(self, request, restoration, match):
        stored = len(self.store.stored(match.blocks)) / len(match.blocks)
        costs = self.costs(restoration.start, restoration.end, stored)
        yield from super().restore(request, restoration, match)
        request.timeline.plan = describe_plan(self.letters, costs, match.tokens)

    def issue_layer(self, loading, layer):
        """Order K and V straight into the device's blocks, or states as chapter 04 does."""
        if self.letters[layer] == "H":
            return super().issue_layer(loading, layer)
        table = self.blocks_of(loading.request, loading.start, len(loading.blocks))
        first = self.store.layers.index(layer)
        device, host = list(self.kv[layer]), self.store.parts[first : first + 2]  # [blocks, size, width] each
        self.copy_layer(loading, layer, device, host, links.BlockPairs(table, loading.blocks, apart=True))
        self.hold("load", [loading.transfers[layer]], (self.pool, table))

    def restore_layer(self, loading, layer):
        """Bring a layer back in its way; with the first R come all."""
        letters = self.letters
        if letters[layer] == "H":
            yield from super().restore_layer(loading, layer)
        elif letters[layer] == "K":
            yield loading.transfers[layer]
        elif layer == 0:
            yield from self.recompute(loading, letters.count("R"))

    def recompute(self, loading, layers: int):
        """Compute the first layers in portions, between which others may decode. Of the last of these layers
        only K and V are needed."""
        count, portion = loading.tokens, self.engine.token_budget
        for at in range(0, count, portion):
            rows, began = slice(at, min(at + portion, count)), self.engine.clock.mark()
            hidden = self.compute_portion(loading, layers - 1, rows)  # [T, D]
            rotation = [side[rows] for side in loading.rotation]  # [T, 1, hd] each
            self.project(layers - 1, hidden, rotation, loading.slots[rows])
            self.spans.append((loading.request, 0, "recompute", began, self.engine.clock.mark()))
            if rows.stop < count:
                yield

    @torch.inference_mode()
    def compute_portion(self, loading, layers: int, rows: slice):
        """Compute the first layers for `rows` of the tokens -> the input of the next layer, [T, D]."""
        request, start, end = loading.request, loading.start + rows.start, loading.start + rows.stop
        if not layers:
            return self.model.embed(upload(request.tokens[start:end], self.model.device))  # [T, D]
        part = Request(request.tokens[:end], 1, table=request.table, computed=start)
        batch = paged.Batch(self.pool, [(part, end - start)])
        return self.engine.runner.compute(batch, layers)

    def step_states(self, batch):
        return [*super().step_states(batch), batch.slots]  # where K and V of the step's rows are

    def rows_to_keep(self, unsent):
        *rows, slots = super().rows_to_keep(unsent)
        for layer in self.store.layers[len(rows) :: 2]:
            rows += self.kv[layer].flatten(1, 2)[:, slots]  # K and V, [rows, KVH * hd] each
        return rows


def describe_plan(letters: str, costs: LayerCosts, tokens: int) -> dict:
    """-> a plan for the page, above the lanes."""
    predicted_ms = 1e3 * plan_seconds(letters, costs)
    title = f"{tokens} tokens: {predicted_ms:.1f} ms predicted, the question included"
    legend = dict(R="recomputed", H="from hidden states", K="loaded as K and V")
    costs_ms = {name: 1e3 * seconds for name, seconds in costs._asdict().items()}  # of a layer
    plan = dict(title=title, rows=[["layers", letters]], legend=legend)
    return dict(plan, predicted_ms=predicted_ms, costs_ms=costs_ms)


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Answers on the model, then plans and times on a larger one, over three links."""
    # 1. Are the tokens right, with all three ways in one plan?
    new, third = max(2, min(arguments.max_tokens, 16)), len(model.layers) // 3
    letters = "R" * third + "H" * third + "K" * (len(model.layers) - 2 * third)
    options = argparse.Namespace(**{**vars(arguments), "plan": letters, "always_restore": True})
    engine = make_engine(model, options)
    length, turns = lesson.context(model, frontend) // 2, [lesson.SECRET, *lesson.TURNS[1:]]
    asked, cache = lesson.converse(engine, frontend, length, turns, new), engine.lower_tier.cache
    verified = lesson.verify(paged.baseline.Engine(model), asked)
    report = dict(link=lesson.describe_link(cache.load_link), verified=verified, counters=engine.counters())
    rows = [offload.describe(letters, request) for request in asked]
    print(f"\nThe last turn (digits: layers)\n{charts.chart(asked[-1].timeline)}\n")
    if hidden_states.bytes_per_token(model) >= model.config.kv_numbers_per_token * model.dtype.itemsize:
        best = best_plan(len(letters), cache.costs(0, length))
        print(f"Query heads share KV heads: the best plan on this model is {best}\n")
    engine.close()

    # 2. Time: on a model whose question costs less than its history
    larger, length = lesson.Larger(arguments, random.Random(0), hidden_states.engine_of), lesson.HISTORY
    caches = offload.HostCache(2 * larger.blocks, 1e9), hidden_states.HiddenCache(2 * larger.blocks, 1e9)
    ways = dict(zip(("K and V (03)", "hidden states (04)"), map(larger.way, caches)))
    computed = min(way() for way in ways.values())  # and kept
    machine, now = caches[1].estimates.machine, caches[1].estimates.computing.value
    for title, speed in larger.over_links(caches, caches[1].seconds_to_project(length)):
        machine.fastest = now  # plan with the speed from which the link was made, on a busy machine too
        cache = PlannedCache(4 * larger.blocks, speed)
        ways["planned (05)"] = larger.way(cache)
        ways["planned (05)"]()  # it keeps what its plan says
        costs, letters = cache.costs(0, length), cache.letters
        named = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in costs._asdict().items())
        predicted, bound = plan_seconds(letters, costs), bound_seconds(len(letters), costs)
        print(f"A layer, ms: {named}\nPlan {letters}: {1e3 * predicted:.0f} ms predicted, none below "
              f"{1e3 * bound:.0f}; the paper's closed form: {closed_form(len(letters), costs)}")  # fmt: skip
        rows += lesson.table(title, lesson.in_turn(ways), "ttft_ms", "ms")
        kv, states, ours = (row["ttft_ms"] for row in rows[-3:])
        taken = f"Chapter 03 takes {kv / ours:.2f} times as long, chapter 04 {states / ours:.2f} times"
        print(f"  {taken}, computing {computed / ours:.1f} times\n")
        cache.close()
    print("A slower link shifts the plan towards R and H, a faster link towards K.\n"
          "All of it was in host memory. What if it is in much slower storage? Chapter 06.")  # fmt: skip
    return dict(report, rows=rows), [asked[-1].timeline]


# 4. Main ---------------------------------------------------------------------------------------

def plan(string: str) -> str:
    """An argparse type: best, paper, or letters, first R, then H, last K."""
    if string in ("best", "paper") or (re.fullmatch("R*H*K*", string) and set(string) & set("HK")):
        return string
    raise argparse.ArgumentTypeError(f"{string!r} is not best, paper, or letters: R, H, K in this order")


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
    print(f"Plan: {engine.lower_tier.cache.letters}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "05_bubble_free", add_arguments, make_engine, demo)
