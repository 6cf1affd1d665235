"""Chapter 05: restore each layer in its own way, so that no lane waits (HCache's bubble-free scheduler).

The problem. Chapter 04 restores every layer but the first from saved hidden states. That takes as long as the
slower of two lanes: the link, which copies, or the processor, which projects. The faster lane is idle for
part of the time. The paper calls such an idle stretch a bubble.

The mechanism. There are three ways to restore a layer's K and V. Each gives the two lanes different work:

                                       the processor       the link copies
    R   recompute from the tokens      computes much       nothing
    H   project from hidden states     computes little     the hidden states
    K   load as K and V                computes nothing    twice the bytes of H

With grouped-query attention (query heads share KV heads), K usually has fewer than twice the bytes of H.

The engine measures what each way costs. The planner then computes the time of every plan that has first R
layers, then H layers, then K layers, such as RRHHHHHHHHKK. The link copies all H layers, then all K layers.
The processor first recomputes the R layers. It then goes through the layers in order: it projects an H layer
when its states have arrived, and computes the question's rows once the layer's K and V are restored. A plan's
time is the time until the question's rows have passed the last layer.

The same plan is used for every history length, and for any number of simultaneous requests. It is chosen as
follows:

1. Keep the plan with K in all layers, which is chapter 03, and each plan that is faster than this one by 1 ms
   or more for a history of 512 tokens.
2. Of these, keep the plans that are nearly as fast as the best one, and not slower than chapter 04, for a
   history of 1,024 tokens. A plan is nearly as fast if the best one takes at least 0.9 of its time. If all of
   them are slower than chapter 04, keep only the best one.
3. Of these, keep the plans that take at most 1.05 times as long as chapter 04 for a history of 2,048 tokens.
   If there is none, keep only the one that is fastest for this length.
4. Of these, take the plan whose busier lane has the least work for 512 tokens. When many requests are
   restored at once, the busier lane is the bottleneck, and this work is what each request adds to it.

If the context has fewer than 2,048 tokens, steps 2 and 3 use half of it and all of it.

On a very small model, such as the default one, computing the question takes about as long as restoring the
history. Then the processor has no time to spare, and the plan may be K in all layers. A plan restores all
tokens of a layer in the same way, because half of the tokens take more than half of the time of all tokens.

What a block contains depends on the plan, so a block that was written under one plan cannot be used under
another. Therefore the plan is a part of each block's key in storage. The engine plans once, before the first
request. If there is storage, the engine first measures how fast it reads. A directory (`--disk`) remembers
the plan of its blocks. The next start uses that plan again, unless `--plan` spells out another one in
letters.

The paper has a closed form for a history without a question. C_H and C_token are the seconds to project and
to recompute a layer. IO_H and IO_KV are the seconds to copy its hidden states and its K and V. Of L layers,
L_H are restored from hidden states, rounded up:

    if C_H > IO_H    L_H = L IO_KV / (IO_KV + C_H - IO_H),            the others are K
    otherwise        L_H = L C_token / (C_token + IO_H - C_H),        the others are R

The paper recomputes all R layers in full. Here the last one is only projected, because the history needs only
its K and V. So a single R costs the processor as much as an H, but copies nothing. Chapter 04 is the plan
RHHH...: the input of layer 0 is the embedding of the tokens, which need not be kept.

Source: HCache (Gao et al., EuroSys '25), sections 4.1, 6.2 and 6.3.

    python 05_bubble_free.py --demo
    python 05_bubble_free.py --prompt "What is a KV cache?" --plan paper
    python 05_bubble_free.py                               # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import hashlib
import importlib
import math
import random
import re
import sys
from functools import partial
from typing import NamedTuple

import numpy
import torch

from common import link as links
from common.llama import upload
from common.requests import BadRequest, Request
from shell import backends, charts, chunks, cli, lesson
from shell.chunks import StoredChunks
from shell.frontend import Frontend
from shell.machine import measure

paged = importlib.import_module("02_paged_kv")
hidden_states = importlib.import_module("04_hidden_state_cache")
PLANNED, QUESTION = 1024, 32  # tokens of the history in step 2, and of the question that follows a history
SHORTER = 512  # tokens of the history for which the plan must not be slower than chapter 03 (K in all layers)
# For that shorter history, any other plan must be faster than chapter 03 by at least this many seconds,
# because mixing has costs that `plan_seconds` leaves out
MIX = 1e-3
LOSS = 1.05  # for a history of 2 * PLANNED tokens, a plan may take this many times as long as chapter 04
MEASURE_SECONDS = 5.0  # at most, for measuring a storage; one that hangs keeps its guess
BETTER = 0.9  # a plan is nearly as fast as the best one if best time >= 0.9 * the plan's time

# 1. The planner --------------------------------------------------------------------------------

class LayerCosts(NamedTuple):
    """Seconds that one layer takes, for all tokens of a history."""

    recompute: float  # compute the layer from its input: C_token
    project: float  # project hidden states to K and V: C_H
    load_states: float  # copy the hidden states: IO_H
    load_kv: float  # copy K and V: IO_KV
    question: float = 0.0  # compute the layer for the question's rows


def recomputing_seconds(layers: int, costs: LayerCosts) -> float:
    """Return the seconds to recompute the first `layers` layers. The last of them is only projected, because
    the history needs nothing but its K and V."""
    return (layers - 1) * costs.recompute + costs.project if layers else 0.0


def plan_seconds(letters: str, costs: LayerCosts) -> float:
    """Return the seconds until the question has passed all layers. `letters`: R, H or K for each layer."""
    # 1. Link: when does each layer arrive? First all H, then all K
    arrival, link = [0.0] * len(letters), 0.0
    for kind, seconds in ("H", costs.load_states), ("K", costs.load_kv):
        for layer, letter in enumerate(letters):
            if letter == kind:
                arrival[layer] = link = link + seconds
    # 2. Processor: recompute all R, then go through the layers in order
    now = recomputing_seconds(letters.count("R"), costs)
    for letter, arrived in zip(letters, arrival):
        now = max(now, arrived) + (costs.project if letter == "H" else 0.0) + costs.question
    return now


def busier_lane(letters: str, costs: LayerCosts) -> float:
    """Return the seconds for which the busier lane works, without its waits. If many requests are restored at
    once, this is the time that each of them adds."""
    recomputed, hidden, loaded = map(letters.count, "RHK")
    restoring = recomputing_seconds(recomputed, costs) + hidden * costs.project
    link = hidden * costs.load_states + loaded * costs.load_kv
    return max(link, restoring + len(letters) * costs.question)


def divisions(layers: int) -> list[str]:
    """Return all plans that have first R layers, then H layers, then K layers."""
    return [
        "R" * recompute + "H" * hidden + "K" * (layers - recompute - hidden)
        for recompute in range(layers)  # not R in all layers: that plan keeps nothing
        for hidden in range(layers - recompute + 1)
    ]


def best_plan(layers: int, costs: LayerCosts, shorter: LayerCosts | None = None,
              longer: LayerCosts | None = None) -> str:  # fmt: skip
    """Return the plan with the least `plan_seconds`. Among ties, it is the plan with the fewest K layers,
    then with the fewest H layers.

    `shorter`, `longer`: costs of a shorter and of a longer history. With `shorter`, choose by the four steps
    at the top of this file instead; without `longer`, step 3 drops nothing. Steps 1 and 4 use `shorter`, step
    2 uses `costs`, and step 3 uses `longer`. MIX is the margin of step 1, BETTER of step 2, LOSS of step 3.

    If hidden states are at least as large as K and V (usual with grouped-query attention), an H layer costs
    at least as much as a K layer on both lanes. Then an H layer never makes a plan faster."""
    plans, seconds = divisions(layers), partial(plan_seconds, costs=costs)
    order = lambda plan: (seconds(plan), plan.count("K"), plan.count("H"))  # noqa: E731
    if not shorter:
        return min(plans, key=order)
    loaded = plan_seconds("K" * layers, shorter)
    plans = [plan for plan in plans if plan == "K" * layers or plan_seconds(plan, shorter) + MIX <= loaded]
    best, states = min(map(seconds, plans)), "R" + "H" * (layers - 1)  # states: chapter 04
    plans = [plan for plan in plans if seconds(plan) <= max(best, min(best / BETTER, seconds(states)))]
    late = {plan: plan_seconds(plan, longer or costs) for plan in (*plans, states)}
    most = max(LOSS * late[states], min(late[plan] for plan in plans))
    plans = [plan for plan in plans if late[plan] <= most]
    return min(plans, key=lambda plan: (busier_lane(plan, shorter), *order(plan)))


def closed_form(layers: int, costs: LayerCosts) -> str:
    """Return the plan of the paper's formula (section 4.1.2): whole layers, two ways, without a question."""
    if costs.project > costs.load_states:
        share = costs.load_kv / (costs.load_kv + costs.project - costs.load_states)
        hidden = min(layers, math.ceil(layers * share))
        return "H" * hidden + "K" * (layers - hidden)
    share = costs.recompute / max(1e-12, costs.recompute + costs.load_states - costs.project)
    hidden = min(layers, math.ceil(layers * share))
    return "R" * (layers - hidden) + "H" * hidden


# 2. The cache ----------------------------------------------------------------------------------

class PlannedCache(hidden_states.HiddenCache):
    """Chapter 04's Cache with a plan: `letters` has R, H or K for each layer and never changes."""

    def __init__(self, blocks: int, bandwidth=None, storage: StoredChunks | None = None, plan: str = "best"):
        """`blocks`: the size of host memory, given as the number of chapter 04's blocks that would fill it.
        The plan's blocks have another size, so their number differs. `bandwidth`: of the modelled link, in
        bytes per second; None with a GPU. `plan`: "best", "paper", or a letter for each layer."""
        super().__init__(blocks, bandwidth, storage)
        self.asked = plan

    def init_store(self):
        """Called by `attach`: choose the plan, then allocate host blocks that hold the hidden states of the H
        layers and the K and V of the K layers."""
        self.kv = self.pool.memory.flatten(4)  # [L, 2, blocks, block size, KVH * hd]
        self.letters = letters = self.choose_plan()
        rows, side = [], self.kv.shape[-1]
        for layer, letter in enumerate(letters):
            rows += {"H": [(layer, self.width)], "K": [(layer, side)] * 2, "R": []}[letter]
        numbers = sum(width for _, width in rows) * self.model.dtype.itemsize  # bytes that a token takes
        blocks = self.blocks * hidden_states.bytes_per_token(self.model) // numbers
        store = hidden_states.BlockStore(self, letters, blocks, rows)
        self.use_store([layer for layer, letter in enumerate(letters) if letter == "H"], store)
        if self.storage:  # before all blocks: without the marker, the next start does not find them
            self.storage.write(self.plan_key(letters), numpy.zeros(0, numpy.uint8))

    # Planning

    def choose_plan(self) -> str:
        """Return the plan that `--plan` spells out in letters. If it gives no letters, measure storage, and
        return the plan whose blocks it holds, or the fastest of them if it holds blocks of several plans. If
        it holds none, make a plan."""
        layers, tokens = len(self.model.layers), min(PLANNED, self.model.config.max_position_embeddings // 2)
        self.question = self.measure_question(tokens)
        if self.asked not in ("best", "paper"):
            return self.asked
        for storage in self.storage.storages if self.storage else ():
            size = self.pool.block_size * self.width * self.model.dtype.itemsize  # of a block in a layer
            read = backends.measure(storage, min(chunks.READ, size * -(-layers // 4)), 16)
            read.completed.wait(MEASURE_SECONDS)
        stored, plans = (1.0, divisions(layers)) if self.storage else (0.0, [])
        costs, *others = (self.costs(0, end, stored) for end in (tokens, min(SHORTER, tokens), 2 * tokens))
        if kept := [letters for letters in plans if self.storage.find(self.plan_key(letters))]:
            return min(kept, key=partial(plan_seconds, costs=costs))
        return best_plan(layers, costs, *others) if self.asked == "best" else closed_form(layers, costs)

    def measure_question(self, history: int) -> float:
        """Time one layer for the QUESTION rows that follow a history of `history` tokens, or of as many as
        the pool has room for. If the pool has fewer than QUESTION tokens, fewer rows are measured.

        Returns: the measured time as an equivalent number of arithmetic operations, which
        `estimates.computing` turns into seconds."""
        tokens = min(history + QUESTION, self.pool.available * self.pool.block_size)
        table = self.pool.allocate(self.pool.num_blocks(tokens))
        asked = Request([0] * tokens, 1, table=table, computed=max(0, tokens - QUESTION))
        batch = paged.Batch(self.pool, [(asked, tokens - asked.computed)])
        _, operations = measure(self.model, partial(self.engine.runner.compute, batch, 1))
        self.pool.release(table)
        return operations

    def plan_key(self, letters: str) -> bytes:
        """Return the storage key of a plan's marker: an empty value that is stored along with its blocks."""
        name = f" {self.pool.block_size} {letters}"
        return hashlib.sha256(self.engine.block_keys.namespace + name.encode()).digest()

    def finished(self, request):
        super().finished(request)
        if self.storage:
            self.storage.use([self.plan_key(self.letters)])

    def seconds(self, start, end, locations):
        stored = self.store.stored(locations)
        # Leave the question out: it must be computed whether the history is restored or recomputed
        costs = self.costs(start, end, len(stored) / len(locations))._replace(question=0.0)
        queued = self.load_link.seconds(0) + (self.storage.seconds(stored, 0) if stored else 0.0)
        return plan_seconds(self.letters, costs) + queued

    def costs(self, start: int, end: int, stored: float = 0.0) -> LayerCosts:
        """Return the costs of a layer for tokens `start` to `end`. `stored`: the share of them that must be
        read from storage before the link can copy it."""
        config, layers, tokens = self.model.config, len(self.model.layers), end - start
        states = tokens * config.hidden_size * self.model.dtype.itemsize
        kv = tokens * config.kv_numbers_per_token * self.model.dtype.itemsize // layers
        compute = self.estimates.seconds_to_compute(start, end) / layers
        question = self.question / self.estimates.computing.value
        speed = self.load_link.speed()
        if stored:
            speed = min(speed, self.storage.speed() / stored)
        return LayerCosts(compute, self.seconds_to_project(tokens), states / speed, kv / speed, question)

    # Restoring

    def restore(self, request, restoration, match):
        stored = len(self.store.stored(match.blocks)) / len(match.blocks)
        costs = self.costs(restoration.start, restoration.end, stored)
        yield from super().restore(request, restoration, match)
        seconds = plan_seconds(self.letters, costs)
        request.timeline.plan = charts.describe_layers(self.letters, costs, match.tokens, seconds)

    def issue_layer(self, loading, layer):
        """Issue the copy of a layer. K and V go directly into the request's device blocks; hidden states go
        to a landing buffer, as in chapter 04."""
        if self.letters[layer] == "H":
            return super().issue_layer(loading, layer)
        blocks = loading.rows.blocks
        table = loading.request.table[loading.start // self.pool.block_size :][: len(blocks)]
        device = list(self.kv[layer])  # [blocks, block size, width] each
        self.copy_layer(loading, layer, device, links.BlockPairs(table, blocks, apart=True))
        self.hold("load", [loading.transfers[layer]], (self.pool, table))

    def restore_layer(self, loading, layer):
        """Restore a layer by its letter; yield each transfer that must complete first. Layer 0 recomputes all
        R layers, so a later R layer has nothing left to do."""
        if self.letters[layer] == "H":
            yield from super().restore_layer(loading, layer)
        elif self.letters[layer] == "K":
            yield loading.transfers[layer]
        elif layer == 0:
            yield from self.recompute(loading, self.letters.count("R"))

    def recompute(self, loading, layers: int):
        """Recompute the first `layers` layers for all tokens of the restoration, and store their K and V.
        Work in portions of a step's token budget, and yield between them, so that other requests can
        decode."""
        count, portion = loading.tokens, self.budget
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
        """Compute the first `layers` layers for the tokens `rows` of the restoration, and write their K and V
        to the device blocks. Returns: the input of the next layer, [T, D]."""
        request, start, end = loading.request, loading.start + rows.start, loading.start + rows.stop
        if not layers:
            return self.model.embed(upload(request.tokens[start:end], self.model.device))  # [T, D]
        part = Request(request.tokens[:end], 1, table=request.table, computed=start)
        batch = paged.Batch(self.pool, [(part, end - start)])
        return self.engine.runner.compute(batch, layers)

    def step_states(self, batch):
        return [*super().step_states(batch), batch.slots]  # slots, [T]: `rows_to_keep` reads K and V there

    def rows_to_keep(self, unsent):
        *rows, slots = super().rows_to_keep(unsent)  # the H layers' states [T, D] each, and slots [T]
        for layer in self.store.layers[len(rows) :: 2]:
            rows += self.kv[layer].flatten(1, 2)[:, slots]  # K and V, [T, KVH * hd] each
        return rows


# 3. The demo -----------------------------------------------------------------------------------

def demo(model, frontend: Frontend, arguments):
    """Verify answers with a plan that has all three ways. Then plan for a larger model on three links."""
    # 1. Verify: one plan with all three ways
    new, third = max(2, min(arguments.max_tokens, 16)), len(model.layers) // 3
    letters = "R" * third + "H" * third + "K" * (len(model.layers) - 2 * third)
    options = argparse.Namespace(**{**vars(arguments), "plan": letters, "always_restore": True})
    engine = make_engine(model, options)
    length, turns = lesson.context(model, frontend) // 2, [lesson.SECRET, *lesson.TURNS[1:]]
    asked, cache = lesson.converse(engine, frontend, length, turns, new), engine.lower_tier.cache
    verified = lesson.verify(paged.baseline.Engine(model), asked)
    link, counters = lesson.describe_link(cache.load_link), charts.counters(engine)
    report = dict(link=link, verified=verified, counters=counters)
    rows = [lesson.describe(letters, request) for request in asked]
    print(f"\nThe last turn (digits: layers, r: recompute, p: prefill)\n{charts.chart(asked[-1].timeline)}\n")
    if hidden_states.bytes_per_token(model) >= model.config.kv_numbers_per_token * model.dtype.itemsize:
        best = best_plan(len(letters), cache.costs(0, length))
        print(f"This model's query heads share KV heads, so its best plan is {best}.\n")
    engine.close()

    # 2. Time: use a model whose question costs less than its history
    offload = importlib.import_module(name="03_cpu_offload")  # only to compare with it
    larger, length = lesson.Larger(arguments, random.Random(0), hidden_states.engine_of), lesson.HISTORY
    caches = offload.HostCache(2 * larger.blocks, 1e9), hidden_states.HiddenCache(2 * larger.blocks, 1e9)
    ways = dict(zip(("K and V (03)", "hidden states (04)"), map(larger.way, caches)))
    computed = min(way() for way in ways.values())  # ms without a cache; this also fills both caches
    machine, now = caches[1].estimates.machine, caches[1].estimates.computing.value
    for title, speed in larger.over_links(caches, caches[1].seconds_to_project(length)):
        machine.fastest = now  # the computing speed from which this link's bandwidth was derived
        cache = PlannedCache(4 * larger.blocks, speed)
        ways["planned (05)"] = larger.way(cache)
        ways["planned (05)"]()  # fill the cache with what the plan keeps
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


def bound_seconds(layers: int, costs: LayerCosts) -> float:
    """Return a lower bound of the seconds of every plan, even of plans that divide the tokens of a layer.

    Let a second of the processor cost `price` and a second of the link 1 - `price`. A restoration of t
    seconds uses each lane for at most t seconds, so it costs at most t. So t is at least the sum, over the
    layers, of the cheapest way's cost, plus the question's cost. One layer is left out of the sum, because
    the last R layer is only projected, and so may cost less than any way here. The result is the largest of
    these bounds over all prices."""
    # Seconds of each way on the processor and on the link
    ways = (costs.recompute, 0.0), (costs.project, costs.load_states), (0.0, costs.load_kv)

    def paid(price: float) -> float:
        cheapest = min(price * busy + (1 - price) * link for busy, link in ways)
        return price * layers * costs.question + (layers - 1) * cheapest

    return max(paid(step / 200) for step in range(201))


# 4. Main ---------------------------------------------------------------------------------------

def plan(string: str) -> str:
    """Check the value of --plan: best, paper, or letters, R before H before K. Raises ArgumentTypeError."""
    if string in ("best", "paper") or (re.fullmatch("R*H*K*", string) and set(string) & set("HK")):
        return string
    raise argparse.ArgumentTypeError(f"{string!r} is not best, paper, or letters: R, H, K in this order")


def add_arguments(parser):
    hidden_states.add_arguments(parser)
    words = "how to restore each layer: best (default), paper (its formula), or letters such as RRHHHK"
    parser.add_argument("--plan", type=plan, default="best", metavar="PLAN", help=words)


def make_engine(model, arguments) -> paged.Engine:
    """Make chapter 02's engine with this chapter's Cache. Raises BadRequest if --plan does not fit."""
    if arguments.plan not in ("best", "paper") and len(arguments.plan) != len(model.layers):
        words = f"--plan has {len(arguments.plan)} letters, but this model has {len(model.layers)} layers"
        raise BadRequest(f"{words}; give one letter for each layer.")
    engine = hidden_states.make_engine(model, arguments, partial(PlannedCache, plan=arguments.plan))
    print(f"Plan: {engine.lower_tier.cache.letters}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    cli.main(__doc__, "05_bubble_free", add_arguments, make_engine, demo)
