"""Chapter 05: mix the ways, layer by layer, so that neither the link nor the processor waits for the other (HCache's scheduler).

The problem. Restoring all layers from hidden states (chapter 04) takes as long as the slower of two lanes. Where projecting is
slower, the link idles; where the link is slower, the processor does. Such a gap is a bubble.

The mechanism. A layer may come back in three ways, which use the lanes differently:

    R   recomputed from the tokens       much computing, no transfer, nothing kept
    H   projected from hidden states     little computing, a transfer
    K   loaded as K and V                no computing, twice the transfer (with multi-head attention)

Four costs of a layer are measured, and all divisions of the layers are tried on paper: the first ones R, then H, the last ones K.
The plan is the one whose pipeline ends first, a row of letters like RRHHHHHHHHHHKK. Saving follows it: hidden states, K and V,
or nothing. Recomputing goes first, while hidden states arrive; then these are projected; K and V come last, straight into
their blocks.

Two things go beyond the paper. The last of the recomputed layers needs only its projection; so the first layer's hidden states,
which are the embeddings of the tokens, need not be kept. And a layer may be shared by two ways, some chunks of 64 tokens in one
and the rest in the other: in a model of few layers, a whole layer too many is itself a bubble.

New against chapter 04: Profile, the planner, LayerStore, in which a chunk takes as much memory as its plan says, and a
restoration in three ways at once. If the link's speed changes by a fifth, or the processor's by a twentieth, the next request
is planned anew; what is kept comes back as it was kept, and only how many layers are recomputed can still be chosen.

Source: HCache (Gao et al., EuroSys '25), sections 4.1, 6.2 and 6.3.

Frozen: planner and engine, for benchmarks/matrix.py, and the documents of chapter 06's demo.
"""
import functools
import math
import random
import statistics
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, repeat
from typing import NamedTuple

import numpy
import torch

from legacy import hidden_states, live, offload, paged
from legacy.app import BadRequest
from legacy.link import as_integers
from legacy.timeline import Span, Timeline
from tools import classroom_text

Chunk, PagedBatch, CHUNK = hidden_states.Chunk, paged.PagedBatch, hidden_states.CHUNK
PARTS = 4                          # in which a layer may be shared by two ways, or its transfer be cut
# All divisions of the layers; all layers H; R and K only; all layers K; tokens divided (section 4.1.1), also in whole chunks
MODES = ("auto", "hidden-only", "naive", "kv-only", "token-wise", "token-wise-rounded")
CHANGE, PACE_CHANGE = 0.2, 0.05    # of the link's speed, and of the processor's, after which plans are made anew
LONGEST = 2048                     # tokens, up to which costs are measured
SLOW = 0.02                        # seconds: a modelled transfer that takes longer is not waited for to measure it

# 1. The planner --------------------------------------------------------------------------------------------------

class Costs(NamedTuple):
    """Seconds that one layer takes for all tokens of a history. They depend on how many parts a layer is cut into (hence tables
    of parts -> Costs): more parts fill the pipeline sooner, but a small one may cost more than its share."""
    io_hidden: float               # to transfer its hidden states (IO_H in section 4.1.2)
    io_kv: float                   # to transfer its K and V (IO_KV)
    compute_token: float           # to compute it whole, in chunked prefill (C_Token)
    compute_hidden: float          # to project its hidden states: norm, projection, rotary, write (C_H)


class Plan(NamedTuple):
    """How many layers come back in each way: the first ones recomputed, the last ones loaded as K and V. A `split` divides
    the tokens instead (section 4.1.1): those before it are projected in all layers, the others in none."""
    recompute: float
    hidden: float
    kv: float
    split: int | None = None

    @property
    def layers(self) -> int:
        return round(self.recompute + self.hidden + self.kv)

    def letters(self, chunk: int, first: int, count: int) -> str:
        """How each layer of a history's chunk number `chunk` is kept, if `count` chunks from `first` on are computed together:
        R not at all, H, K, or B both, for a chunk inside which a split lies. In a layer that is shared by two ways, the first
        tokens have the earlier letter: with 2.25 R and 4 chunks RRR, RR, RR and RR."""
        if self.split is not None:
            rest = "K" if self.kv else "R"
            if chunk * CHUNK >= self.split:
                return rest * self.layers
            return ("H" if (chunk + 1) * CHUNK <= self.split or rest == "R" else "B") * self.layers
        before = max(0, min(chunk - first, count - 1)) / max(1, count)          # share of the chunks; later ones are as the last
        recompute, kv = math.ceil(self.recompute - before), math.floor(self.kv + before)
        return "R" * recompute + "H" * (self.layers - recompute - kv) + "K" * kv

    def __str__(self):
        """A letter for each layer, a small one for a layer that is shared: the way of most of its tokens."""
        if self.split is not None:
            return f"{self.split} tokens H, the others {'K' if self.kv else 'R'}"
        shares = [dict(R=min(1.0, max(0.0, self.recompute - layer)), K=min(1.0, max(0.0, self.kv - (self.layers - 1 - layer))))
                  for layer in range(self.layers)]
        most = [max(dict(share, H=1 - sum(share.values())).items(), key=lambda item: item[1]) for share in shares]
        return "".join(letter if share == 1 else letter.lower() for letter, share in most)


def recompute_seconds(costs: Costs, layers, paper: bool = False):
    """To have K and V of the first `layers`: all are computed but the last, which is only projected. As the `paper` counts (for
    --simulate), that one is computed too."""
    if paper:
        return costs.compute_token * layers
    return costs.compute_hidden * numpy.minimum(layers, 1.0) + costs.compute_token * numpy.maximum(layers - 1.0, 0.0)


def pipeline_seconds(costs: Costs, recompute, hidden, kv, parts: int, behind: float = 0.0, paper: bool = False):
    """When the pipeline of a plan ends, if each layer's states come in so many parts, and the link is busy with other things
    for `behind` seconds. Numbers, or arrays of them for many plans at once.

    The end is that of the longest path: computing alone; the link alone; or over the link until some part has arrived, and on
    the processor from there. Parts are alike, so that of those the longest is the one over the first part, or over the last."""
    computing = recompute_seconds(costs, recompute, paper)
    projecting, loading = hidden * costs.compute_hidden, hidden * costs.io_hidden
    first = behind + costs.io_hidden / parts + projecting
    last = behind + loading + costs.compute_hidden / parts
    over_states = numpy.where(hidden > 0, numpy.maximum(first, last), 0.0)
    transfers = numpy.where(hidden + kv > 0, behind + loading + kv * costs.io_kv, 0.0)
    return numpy.maximum(numpy.maximum(computing + projecting, over_states), transfers)


def simulate(costs: Costs, plan: Plan, parts: int, behind: float = 0.0, paper: bool = False) -> Timeline:
    """The pipeline whose end `pipeline_seconds` gives, as a timeline: part after part."""
    timeline, link, processor = Timeline(), behind, float(recompute_seconds(costs, plan.recompute, paper))
    spans = [("compute", "R", 0.0, processor)]
    for _ in range(round(plan.hidden * parts)):
        spans.append(("load", "H", link, link + costs.io_hidden / parts))
        link += costs.io_hidden / parts
        start = max(link, processor)
        processor = start + costs.compute_hidden / parts
        spans.append(("compute", "H", start, processor))
    spans.append(("load", "K", link, link + plan.kv * costs.io_kv))
    timeline.spans = [Span(*span) for span in spans if span[3] > span[2]]
    return timeline


@functools.cache
def divisions(layers: int, parts: int):
    """-> all ways to divide the layers, in steps of a part: three arrays, which add up to `layers`."""
    steps = numpy.arange(layers * parts + 1) / parts
    recompute, kv = (grid.ravel() for grid in numpy.meshgrid(steps, steps, indexing="ij"))
    possible = recompute + kv <= layers
    return recompute[possible], layers - recompute[possible] - kv[possible], kv[possible]


def best_plan(costs: dict[int, Costs], layers: int, mode: str = "auto", paper: bool = False) -> tuple[Plan, float]:
    """The plan that ends first, and when, in seconds; of equals the one that loads least. `costs`: for each number of parts
    in which a layer may be cut. Modes: auto; naive, which knows no hidden states; hidden-only; kv-only."""
    best = None
    for parts, cost in costs.items():
        recompute, hidden, kv = divisions(layers, parts)
        allowed = {"auto": hidden >= 0, "naive": hidden == 0, "hidden-only": hidden == layers, "kv-only": kv == layers}[mode]
        recompute, hidden, kv = recompute[allowed], hidden[allowed], kv[allowed]
        seconds = pipeline_seconds(cost, recompute, hidden, kv, parts, paper=paper)
        loads = hidden * cost.io_hidden + kv * cost.io_kv
        nearly = numpy.flatnonzero(seconds <= seconds.min() * (1 + 1e-9))
        index = nearly[loads[nearly].argmin()]
        if best is None or seconds[index] < best[1]:
            best = Plan(float(recompute[index]), float(hidden[index]), float(kv[index])), float(seconds[index])
    return best


def closed_form(costs: Costs, layers: int) -> Plan:
    """Section 4.1.2, as it stands there: whole layers, two ways."""
    if costs.compute_hidden > costs.io_hidden:
        hidden = layers * costs.io_kv / (costs.io_kv + costs.compute_hidden - costs.io_hidden)
        hidden = min(layers, math.ceil(hidden))                                 # rounding may pass it where both are even
        return Plan(0, hidden, layers - hidden)
    hidden = layers * costs.compute_token / (costs.compute_token + costs.io_hidden - costs.compute_hidden)
    hidden = min(layers, math.ceil(hidden))
    return Plan(layers - hidden, hidden, 0)


def token_wise_seconds(costs: Costs, layers: int, share, rest: str, computing_rest=None):
    """When the pipeline ends if a `share` of the tokens, the first ones, is projected in every layer, and the others are loaded
    (K) or recomputed (R): the processor goes to the next layer when all of that is there. `computing_rest`: seconds to compute
    a layer of the others, if that is not in proportion, since they attend to all before them."""
    loading = costs.io_hidden * share + (costs.io_kv * (1 - share) if rest == "K" else 0.0)
    if computing_rest is None:
        computing_rest = costs.compute_token * (1 - share)
    computing = costs.compute_hidden * share + (computing_rest if rest == "R" else 0.0)
    return numpy.maximum(loading + layers * computing, layers * loading + computing)


def token_wise_plan(costs: Costs, layers: int, tokens: int, step: int = 1, computing_rest=None) -> tuple[Plan, float]:
    """Section 4.1.1's other partition, with as many tokens projected as ends first, in multiples of `step`. `computing_rest`: the
    seconds above, as a function of how many tokens are projected."""
    rest = "K" if costs.compute_hidden > costs.io_hidden else "R"
    splits = numpy.unique([*range(0, tokens, step), tokens])
    computing = computing_rest and numpy.array([computing_rest(int(split)) for split in splits])
    seconds = token_wise_seconds(costs, layers, splits / tokens, rest, computing)
    split = int(splits[seconds.argmin()])
    others = layers * (1 - split / tokens)
    plan = Plan(others if rest == "R" else 0.0, layers * split / tokens, others if rest == "K" else 0.0, split)
    return plan, float(seconds.min())


def bound_seconds(costs: dict[int, Costs], layers: int) -> float:
    """No division of the layers, however fine, ends before this: with both lanes busy from the beginning to the end.

    Put a price on each second of either lane, `price` and 1 - `price`. Whoever ends in t seconds has paid at most t; and has
    paid at least what the cheapest way costs for each layer. The best bound has the price at which two ways cost the same."""
    io_hidden, io_kv, token, hidden = map(min, zip(*costs.values()))

    def paid(price):
        cheapest = min(price * token, price * hidden + (1 - price) * io_hidden, (1 - price) * io_kv)
        return min(price * hidden, cheapest) + (layers - 1) * cheapest          # the first recomputed layer is only projected
    even = [(io_hidden, token - hidden), (io_kv, token), (io_kv - io_hidden, hidden), (io_kv, hidden)]
    return max(paid(io / (io + compute)) for io, compute in even if io >= 0 and io + compute > 0)


# 2. What a layer costs here --------------------------------------------------------------------------------------

class Profile(NamedTuple):
    """Costs of one layer for histories of some lengths, and the link that they were measured with."""
    lengths: list[int]             # tokens, ascending
    io_hidden: list[float]         # seconds, and so on
    io_kv: list[float]
    compute_token: list[float]
    compute_hidden: list[float]
    bytes_per_second: float        # as it was
    link_speed: float              # as the link said of itself, in bytes per second

    def seconds(self, name: str, tokens: float) -> float:
        """One of the costs for so many tokens: linear between lengths, and from zero."""
        lengths, seconds = [0, *self.lengths], [0.0, *getattr(self, name)]
        if tokens <= lengths[-1]:
            return float(numpy.interp(tokens, lengths, seconds))
        rate, growth = seconds[-1] / lengths[-1], 0.0                           # beyond: in proportion, but attention grows
        if name == "compute_token" and len(self.lengths) > 1:
            growth = max(0.0, rate - seconds[-2] / lengths[-2]) / (lengths[-1] - lengths[-2])
        return tokens * (rate + growth * (tokens - lengths[-1]))

    def costs(self, start: int, end: int, bytes_per_second: float, paces: tuple[float, float] = (1.0, 1.0)) -> dict[int, Costs]:
        """For tokens `start` to `end`, over a link that is as fast now, on a processor that takes `paces` times as long to
        recompute and to project, for each number of parts into which a layer is cut. Parts are at least a chunk."""
        tokens, slower = end - start, self.bytes_per_second / bytes_per_second
        before, until, alone = (self.seconds("compute_token", count) for count in (start, end, tokens))
        whole = max(until - before, alone)                                      # short prefills may cost as much as longer ones
        return {parts: Costs(parts * self.seconds("io_hidden", tokens / parts) * slower, self.seconds("io_kv", tokens) * slower,
                             whole * paces[0], parts * self.seconds("compute_hidden", tokens / parts) * paces[1])
                for parts in (1, 2, PARTS) if parts == 1 or tokens >= parts * CHUNK}



def alike(now: float, planned: float, change: float = CHANGE) -> bool:
    """Whether something is still nearly what a plan was made for."""
    return abs(now / planned - 1) <= change


def longest(engine) -> int:
    """Tokens, up to which its profile goes."""
    return min(engine.context, engine.pool.size * engine.pool.block_size, LONGEST)


def profile(engine: "Engine", rounds: int = 5) -> Profile:
    """Measure the four costs in the engine's own memory, before anything is in it: medians over `rounds`."""
    model, pool, clock, link = engine.model, engine.pool, engine.clock, engine.load_link
    most, width = longest(engine), model.config.hidden_size
    lengths = sorted({most, *(1 << power for power in range(6, 20) if 1 << power < most)})
    table = pool.allocate(pool.needed(most))
    slots = torch.tensor(table, device=model.device).repeat_interleave(pool.block_size) * pool.block_size
    slots += torch.arange(pool.block_size, device=model.device).repeat(len(table))                      # [T]
    host = offload.pinned((2, most, *pool.kv.shape[-2:]), model.dtype, model.device, "The profile's buffer")
    states = offload.pinned((most, width), model.dtype, model.device, "The profile's buffer")
    for memory in (host, states, engine.landing.memory[:most]):
        memory.zero_()
    columns = {name: [] for name in Costs._fields}

    def computed(what, tokens: int) -> float:
        """Seconds of `what`, one after the other in layer after layer, whose weights are seldom in a cache, while as many states
        are on their way."""
        busy = rounds if link.seconds(states[:tokens].nbytes) < SLOW else 0     # a slow modelled link takes no processor time
        transfers = [link.copy(engine.landing.memory[:tokens], states[:tokens], "profile") for _ in range(busy)]
        marks = [clock.mark()]
        for number in range(rounds + 1):                                        # the first warms up
            what(number % len(model.layers))
            marks.append(clock.mark())
        marks = [clock.seconds(mark) for mark in marks]
        for transfer in transfers:
            transfer.join()
        return statistics.median(end - start for start, end in zip(marks[1:], marks[2:]))

    def copied(into: list, out_of: list) -> float:
        size = sum(piece.nbytes for piece in into)
        if link.modelled and link.seconds(size) >= SLOW:                        # it will be as slow as it was made
            return link.seconds(size)
        transfers = [link.copy(into, out_of, "profile") for _ in range(rounds)]
        for transfer in transfers:
            transfer.join()
        return statistics.median(end - start for start, end in (transfer.span() for transfer in transfers))

    # 1. Chunks of prefill, each behind those before it
    @functools.cache
    def chunk(start: int, end: int) -> float:
        batch = PagedBatch(pool, [(Part([0] * end, table, start), end - start)])
        inputs = engine.embed(batch.tokens)                                     # [T, D]
        return computed(lambda layer: engine.compute_layer(layer, inputs, slice(None), batch), end - start)
    columns["compute_token"] = [sum(chunk(start, min(start + engine.token_budget, length))
                                    for start in range(0, length, engine.token_budget)) for length in lengths]

    # 2. Projections and transfers of so many rows
    keys, values = pool.kv[0].flatten(1, 2)                                     # [slots, KVH, hd] each
    positions = torch.arange(most, device=model.device)                         # [T]
    for rows in lengths:
        landed = engine.landing.memory[:rows]                                   # [T, D]
        columns["compute_hidden"].append(computed(
            lambda layer, landed=landed: engine.project(layer, landed, positions[:len(landed)], slots[:len(landed)]), rows))
        columns["io_hidden"].append(copied([landed], [states[:rows]]))
        columns["io_kv"].append(copied([keys[:rows], values[:rows]], list(host[:, :rows])))
    pool.release(table)
    columns = {name: list(accumulate(column, max)) for name, column in columns.items()}         # more never takes less
    return Profile(lengths, **columns, bytes_per_second=most * states[0].nbytes / columns["io_hidden"][-1],
                   link_speed=link.speed())


# 3. Data structures ----------------------------------------------------------------------------------------------

class LayerStore(paged.BlockPool):
    """Chunks in host memory, pinned where there is a GPU. A number stands for 64 tokens, in all layers; it is free, cached or
    referenced as in chapter 04. A chunk has as many cells as its letters ask for, most several, some none; a cell holds a
    layer's hidden states, or its K, or its V (see cell_size). `size` is the number of cells, and of numbers."""

    def __init__(self, config, chunks: int, dtype, device):
        """Room for `chunks` that keep K and V of all layers."""
        self.layers, self.kv_shape = config.num_hidden_layers, (CHUNK, config.num_key_value_heads, config.head_dim)
        self.numbers, self.kv_per_cell = cell_size(config)
        super().__init__(config, chunks * self.needs("K" * self.layers), CHUNK, dtype, device)
        self.flat = as_integers(self.kv.view(-1))                               # for NumPy
        self.empty = list(range(self.size))[::-1]
        self.cells: dict[int, list[int]] = {}                                   # of each chunk: hidden states first, then K and V
        self.letters: dict[int, str] = {}                                       # what each chunk keeps of each layer
        self.splits: dict[int, int] = {}                                        # rows before a token-wise split; else 64

    def memory(self, config, cells: int, size: int, dtype, device):
        return offload.pinned((cells, self.numbers), dtype, device, "The chunks")                 # [cells, numbers]

    def needs(self, letters: str) -> int:
        """How many cells a chunk with these letters takes."""
        hidden, kv = (before[-1] for before in kept_before(letters))
        return hidden - (-2 * kv // self.kv_per_cell)

    def room(self, chunks: int) -> int:
        """Room for so many chunks whatever they keep, as a number of chunks with K and V: hidden states may take more."""
        hidden, kv = (self.needs(letter * self.layers) for letter in "HK")
        return chunks * max(1, -(-hidden // kv))

    def new(self, chain: list[paged.Prefix], letters: str, rows: int = CHUNK) -> int | None:
        """A number for a chunk of this chain, with its cells, or None: no chain's beginning goes for its end."""
        if self.needs(letters) > self.size:
            return None
        while len(self.empty) < self.needs(letters) or not self.free:
            victim = next(iter(self.cached), None)
            if victim is None or self.prefixes[victim] in chain:
                return None
            self.evict()
        slot, = self.allocate(1)
        self.cells[slot] = [self.empty.pop() for _ in range(self.needs(letters))]
        self.letters[slot], self.splits[slot] = letters, rows
        return slot

    def release(self, table: list[int]):
        super().release(table)
        self.reclaim(table)

    def forget(self, block: int):
        super().forget(block)
        self.reclaim([block])

    def reclaim(self, slots: list[int]):
        """Chunks that are free keep no cells."""
        for slot in slots:
            if slot in self.free and slot in self.cells:
                self.empty += self.cells.pop(slot)
                del self.letters[slot], self.splits[slot]

    def hidden(self, slot: int, layer: int) -> int:
        """-> which number of the memory is the first of the states [64, D] that entered this layer."""
        return self.numbers * self.cells[slot][kept_before(self.letters[slot])[0][layer]]

    def keys_and_values(self, slot: int, layer: int) -> list[int]:
        """-> the same of this layer's K [64, KVH, hd], and of its V."""
        hidden, kv = kept_before(self.letters[slot])
        return [self.numbers * self.cells[slot][hidden[-1] + number // self.kv_per_cell]
                + number % self.kv_per_cell * math.prod(self.kv_shape) for number in (2 * kv[layer], 2 * kv[layer] + 1)]

    def put(self, slot: int, layer: int, at: int, states):
        """For NumPy: `states` [layers, rows, D], of `layer` and those after it, are the chunk's rows from `at` on."""
        for number, rows in enumerate(states, layer):
            first = self.hidden(slot, number) + at * rows.shape[1]
            self.flat[first:first + rows.size].reshape(rows.shape)[:] = rows

    def check_integrity(self, tables: list[list[int]]):
        super().check_integrity(tables)
        held = [cell for cells in self.cells.values() for cell in cells]
        assert sorted(held + self.empty) == list(range(self.size)), "a cell is lost, or in two chunks"
        assert self.cells.keys() == set(range(self.size)) - set(self.free), "a free chunk has cells, or a taken one has none"


def cell_size(config) -> tuple[int, int]:
    """-> numbers in a cell, and how many layers' K, or V, it holds: one, or several if they are narrow (grouped queries)."""
    kv = CHUNK * config.num_key_value_heads * config.head_dim
    numbers = max(CHUNK * config.hidden_size, kv)
    return numbers, numbers // kv


@functools.cache
def kept_before(letters: str) -> tuple[list[int], list[int]]:
    """For each layer the number of layers before it that keep hidden states, and that keep K and V; and of all, at the end."""
    return tuple(list(accumulate((letter in kinds for letter in letters), initial=0)) for kinds in ("HB", "KB"))


@dataclass
class Part:
    """Stands for a request in a PagedBatch that computes some layers of tokens which are not its next ones."""
    tokens: list[int]
    table: list[int]
    computed: int                  # the tokens before are in the blocks of the table

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Run(NamedTuple):
    """A chunk's tokens, from where the restoration begins: all of them come back alike. A chunk has two runs only where a
    token-wise split lies inside it."""
    row: int                       # the first of them, counted from the restoration's start
    rows: int
    slot: int                      # of their chunk
    at: int                        # the first of them in the chunk
    letters: str                   # R, H or K for each layer

    @property
    def depth(self) -> int:
        """Layers that are recomputed, all of them first."""
        return len(self.letters) - len(self.letters.lstrip("R"))


@dataclass(eq=False)
class Load(hidden_states.Load):
    """One layer's hidden states of some runs, or its K and V, which go straight to their blocks."""
    kind: str = "H"
    runs: list[Run] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.kind} layer {self.layer}"


@dataclass(eq=False)
class Restoration(hidden_states.Restoration):
    runs: list[Run] = field(default_factory=list)
    plan: Plan | None = None       # as it comes back, on average
    seconds: float = 0.0           # as predicted, from when the link is free
    bound: float = 0.0
    costs: Costs | None = None     # of a layer, by the profile alone; None: they say nothing about it
    to_load: deque[Load] = field(default_factory=deque)         # in order, not begun yet
    received: int = 0              # of `loads`, from the first on
    done: int = 0                  # rows projected, or as much computed, since others took a step
    positions: torch.Tensor | None = None                       # [T]
    slots: torch.Tensor | None = None                           # [T], where they are in the pool
    places: dict[int, list] = field(default_factory=dict)       # first row of a run -> (slot, row of the chunk, rows) in pieces

    @property
    def next_load(self) -> Load | None:
        return next(chain(islice(self.loads, self.received, None), self.to_load), None)


@dataclass(eq=False)
class Request(hidden_states.Request):
    plan: Plan | None = None                                    # how its chunks are kept
    planned_from: int = 0                                       # the first chunk of that plan


# 4. The engine ---------------------------------------------------------------------------------------------------

class Engine(hidden_states.Engine):
    """Chapter 04's engine, which keeps of each layer what `mode` (one of MODES) plans, in host memory: room for `cpu_chunks`
    with K and V of all layers. `known` is what a layer costs; without, it is measured. Raises ModelError."""
    Request = Request
    RESTORED = "planned"
    LANDING = 1 << 10              # layers: all states may arrive while the first ones are recomputed, but for BUFFER bytes

    def __init__(self, model, tokenizer, end_tokens, *options, mode: str = "auto", known: Profile | None = None,
                 **named_options):
        super().__init__(model, tokenizer, end_tokens, *options, directories=(), layout="chunked", direct=False, **named_options)
        self.mode, self.profile = mode, known or profile(self)
        self.planned_speed = self.profile.bytes_per_second * self.load_link.speed() / self.profile.link_speed
        self.planned_paces = 1.0, 1.0
        self.paces = deque(maxlen=9), deque(maxlen=9)                           # so much longer recomputing took, and projecting
        self.plans: dict[int, tuple[Plan, float]] = {}                          # by chunks of history
        self.latest: Plan | None = None                                         # that was asked for
        self.unsent: dict[paged.Prefix, Chunk] = {}                             # whole chunks of this step that keep K and V
        self.counts.update(plans=0, layers_recomputed=0)

    def numbers_per_chunk(self, config) -> int:
        """With K and V of all layers."""
        numbers, fit = cell_size(config)
        return numbers * -(-2 * config.num_hidden_layers // fit)

    def make_chunks(self, count: int, layout: str) -> LayerStore:
        return LayerStore(self.model.config, count, self.model.dtype, self.model.device)

    # The plan

    def costs(self, start: int, end: int) -> dict[int, Costs]:
        """Of a layer, for tokens `start` to `end`: as profiled, with link and processor as fast as when last planned."""
        return self.profile.costs(start, end, self.planned_speed, self.planned_paces)

    def plan(self, tokens: int) -> tuple[Plan, float]:
        """For a history of so many tokens -> the plan, and its seconds. When the running medians of the link's speed and the
        processor's have changed by more than CHANGE and PACE_CHANGE, what was planned is planned anew."""
        speed = self.load_link.speed() if self.load_link.speeds else self.planned_speed
        paces = tuple(statistics.median(known or [1.0]) for known in self.paces)
        if not alike(speed, self.planned_speed) or not all(map(alike, paces, self.planned_paces, repeat(PACE_CHANGE))):
            self.planned_speed, self.planned_paces = speed, paces
            self.plans.clear()
        chunks, layers = max(1, tokens // CHUNK), len(self.model.layers)
        planned = self.plans.get(chunks)
        if planned is None:
            costs = self.costs(0, chunks * CHUNK)
            if self.mode.startswith("token-wise"):
                whole, pace = self.profile.seconds("compute_token", chunks * CHUNK), self.planned_paces[0]
                planned = token_wise_plan(
                    costs[1], layers, chunks * CHUNK, CHUNK if self.mode.endswith("rounded") else 1,
                    lambda split: (whole - self.profile.seconds("compute_token", split)) * pace)
            else:
                planned = best_plan(costs, layers, self.mode)
            self.plans[chunks] = planned
            self.counts["plans"] += 1
        self.latest = planned[0]
        return planned

    def wear_out(self):
        super().wear_out()
        for paces in self.paces:
            if paces:
                paces.popleft()

    def worth_keeping(self) -> bool:
        return self.plan(self.context)[0].recompute < len(self.model.layers)

    def choose(self, request: Request, start: int, chunks: list[int]):
        """-> a Restoration of these chunks, and the seconds that it would take, and computing what they hold. What a chunk keeps
        is given; more layers than it lacks may be recomputed."""
        self.plan(len(request.tokens))                                          # with the link as it is now
        first, layers = start // CHUNK, len(self.model.layers)
        end = (first + len(chunks)) * CHUNK
        runs = self.runs(start, chunks)
        costs, behind = self.costs(start, end), self.load_link.backlog() / self.planned_speed
        # 1. How many layers to recompute? All runs about equally deep, so that nobody attends to what is still on its way
        candidates, deepest, rows, by_tokens = [], max(run.depth for run in runs), Counter(), self.mode.startswith("token-wise")
        for run in runs:
            rows[run.letters] += run.rows
        for depth in range(max(0, deepest - 1), layers) if self.mode == "auto" else range(1):
            plan = Plan(*(sum(count * ("R" * depth + letters[depth:]).count(letter) for letters, count in rows.items())
                          / (end - start) for letter in "RHK"))
            candidates += [(float(pipeline_seconds(cost, *plan[:3], parts, behind)), plan, parts, depth)
                        for parts, cost in costs.items()]
        seconds, plan, parts, depth = min(candidates)
        alone = float(pipeline_seconds(costs[parts], *plan[:3], parts))         # from when the link is free
        runs = [run._replace(letters="R" * depth + run.letters[depth:]) for run in runs]
        # 2. Where tokens are divided, there is one way
        if by_tokens:
            share, rest = plan.hidden / layers, "R" if plan.recompute else "K"
            plan = plan._replace(split=start + round(share * (end - start)))
            computing = self.profile.seconds("compute_token", end) - self.profile.seconds("compute_token", plan.split)
            alone = float(token_wise_seconds(costs[1], layers, share, rest, computing * self.planned_paces[0]))
            seconds = behind + alone
        # 3. What is computed is kept anew, as planned now; but not a first chunk whose beginning the device has
        recomputing = layers * costs[1].compute_token
        if alone > recomputing and request.save:
            for slot in chunks[bool(start % CHUNK):]:
                self.chunks.forget(slot)
        # 4. What is to be loaded
        profiled = None if by_tokens else self.profile.costs(start, end, self.planned_speed)[parts]
        return Restoration(
            start, chunks, self.chunk_prefix(request, first), runs=runs, plan=plan, seconds=alone, costs=profiled,
            bound=bound_seconds(costs, layers), to_load=deque(self.transfers(runs, parts, by_tokens))), seconds, recomputing

    def runs(self, start: int, chunks: list[int]) -> list[Run]:
        """The chunks' tokens from `start` on, as they are kept."""
        runs = []
        for index, slot in enumerate(chunks, start // CHUNK):
            kept, split, end = self.chunks.letters[slot], index * CHUNK + self.chunks.splits[slot], (index + 1) * CHUNK
            rest = kept.replace("B", "K") if "B" in kept else "R" * len(kept)
            begin = max(start, index * CHUNK)
            for begins, ends, letters in ((begin, split, kept.replace("B", "H")), (max(begin, split), end, rest)):
                if ends > begins:
                    runs.append(Run(begins - start, ends - begins, slot, begins % CHUNK, letters))
        return runs

    def transfers(self, runs: list[Run], parts: int, by_layer: bool) -> list[Load]:
        """What has to be loaded, in order: all hidden states, then all K and V, so that there is always something to project;
        `by_layer`, if the recomputed rows of a layer attend to others of that layer."""
        loads, part = [], sum(run.rows for run in runs) / parts                 # rows
        for layer in range(len(self.model.layers)):
            for kind, most in (("H", part), ("K", math.inf)):
                groups = [[]]
                for run in (run for run in runs if run.letters[layer] == kind):
                    if sum(other.rows for other in groups[-1]) >= most:
                        groups.append([])
                    groups[-1].append(run)
                loads += [Load(layer, sum(run.rows for run in group), None, kind=kind, runs=group) for group in groups if group]
        return sorted(loads, key=lambda load: (load.layer, load.kind) if by_layer else (load.kind, load.layer))

    # Save: what the plan says

    def begin(self, request: Request, index: int) -> Chunk | None:
        """Chapter 04's: a place for what is kept of the request's chunk number `index`."""
        if self.kept(request, index):
            return None
        if request.plan is None:
            request.plan, request.planned_from = self.plan(len(request.tokens))[0], index
        if request.plan.recompute == request.plan.layers:                       # nothing is worth it
            self.wear_out()
            return None
        letters = request.plan.letters(index, request.planned_from, len(request.tokens) // CHUNK - request.planned_from)
        rows = CHUNK if request.plan.split is None else request.plan.split - index * CHUNK
        self.chain(request, index)
        slot = self.chunks.new(request.chunk_prefixes, letters, rows if 0 < rows < CHUNK else CHUNK)
        if slot is None:
            return Chunk(-1, index, 0, lost=True, dropped=True)
        self.saving.append(Chunk(slot, index, CHUNK * sum(before[-1] for before in kept_before(letters))))
        return self.saving[-1]

    def find_targets(self, work) -> list[hidden_states.Target]:
        targets = super().find_targets(work)
        for chunk in (target.chunk for target in targets if target.at + target.rows == CHUNK and not target.chunk.lost):
            if chunk.prefix in self.unsent:                                     # another request does the same
                chunk.lost = True
            elif not {"K", "B"}.isdisjoint(self.chunks.letters[chunk.slot]):
                self.unsent[chunk.prefix] = chunk
        return targets

    def compute(self, work):
        super().compute(work)
        for chunk in self.unsent.values():                                      # the step has failed
            chunk.lost = True
        self.unsent.clear()

    def wanted(self, layer: int) -> list[hidden_states.Target]:
        """Hidden states are tapped only where a chunk keeps them."""
        letters = self.chunks.letters
        return [target for target in self.targets if target.chunk.slot >= 0 and letters[target.chunk.slot][layer] in "HB"]

    def save(self, request: Request):
        """Chapter 02's; K and V of chunks that have become whole in this step are in blocks, and go to the host from there."""
        super().save(request)
        whole = request.chunk_prefixes[1:request.computed // CHUNK + 1] if self.unsent else []
        chunks = [self.unsent.pop(prefix) for prefix in whole if prefix in self.unsent]
        if not chunks:
            return
        size, layers = self.pool.block_size, len(self.model.layers)
        keeps = [[number for number, chunk in enumerate(chunks) if self.chunks.letters[chunk.slot][layer] in "KB"]
                 for layer in range(layers)]
        into, out_of, transfers = [], [], []
        try:
            positions = [chunk.index * CHUNK + at for chunk in chunks for at in range(CHUNK)]
            slots = torch.tensor([request.table[position // size] * size + position % size for position in positions],
                                 device=self.model.device)                      # [T]
            for layer in (layer for layer in range(layers) if keeps[layer]):
                for number, side in enumerate(self.pool.kv[layer].flatten(1, 2)):               # [slots, KVH, hd]
                    rows = side[slots].view(len(chunks), -1)                    # [chunks, 64 * KVH * hd]: a copy, as blocks go
                    out_of += [rows[chunk] for chunk in keeps[layer]]
                    firsts = [self.chunks.keys_and_values(chunks[chunk].slot, layer)[number] for chunk in keeps[layer]]
                    into += [self.chunks.kv.view(-1)[first:first + rows.shape[1]] for first in firsts]
            transfers.append(self.save_link.copy(into, out_of, "K and V"))
            self.snapshots.append((transfers[0], [request.timeline]))
            self.counts["bytes_out"] += transfers[0].bytes
        except Exception:                                                       # the chunks are dropped
            self.saver.errors += 1
        self.saver.follow(transfers, None, [
            (layer, 1, CHUNK, [hidden_states.Target(0, CHUNK, chunks[number], 0) for number in numbers])
            for layer, numbers in enumerate(keeps) if numbers])

    # Restore: recompute, project and load

    def preempt(self, request: Request):
        """Chapter 02's. Its blocks are free only when what travels into them has arrived, and who preempts needs them now."""
        super().preempt(request)
        for load in (load for restoration in self.restorations if restoration.over for load in restoration.loads):
            load.join()
        self.settle()

    def bring_layers(self, request: Request, restoration: Restoration, positions, slots):
        """A generator: first what is recomputed, then what arrives, in the order of the loads. Returns how many chunks are whole:
        all of them. Raises TransferError, OSError."""
        size, start, end = self.pool.block_size, restoration.start, restoration.start + len(positions)
        restoration.positions, restoration.slots = positions, slots
        on_host = [request.table[position // size] * size + position % size for position in range(start, end)]  # slots, unasked
        restoration.places = {run.row: offload.adjacent(on_host[run.row:run.row + run.rows], range(run.at, run.at + run.rows))
                              for run in restoration.runs}
        restoration.blocks = request.table[start // size:self.pool.needed(end)]
        for block in restoration.blocks:                                        # whatever becomes of the request
            self.pool.share(block)
        self.issue(restoration)
        if not restoration.to_load and request in self.line:                    # the next one may begin
            self.line.remove(request)
        yield from self.recompute(request, restoration)
        while restoration.received < len(restoration.loads) + len(restoration.to_load):
            yield from self.receive(request, restoration)
        return len(restoration.chunks)

    def recompute(self, request: Request, restoration: Restoration):
        """A generator: the first layers, one after the other, in batches of as many tokens as a step may compute; each run as
        deep as its letters say."""
        batches, works = [], {}
        for run in (run for run in restoration.runs if run.depth):
            if not batches or sum(other.rows for other in batches[-1]) + run.rows > self.token_budget:
                batches.append([])
            batches[-1].append(run)
        if not batches:
            return
        device, start, deepest = self.model.device, restoration.start, max(run.depth for run in restoration.runs)
        states = self.embed(torch.tensor(request.tokens[start:start + len(restoration.positions)], device=device))     # [T, D]
        for layer in range(deepest):
            # 1. These rows attend to the others' K and V, which must be there
            while layer + 1 < deepest and (load := restoration.next_load) and load.layer <= layer:
                yield from self.receive(request, restoration)
            # 2. Of a run's last layer only K and V are needed
            if last := [run for run in restoration.runs if run.depth == layer + 1]:
                where = rows_of(last, device)
                with self.timed(restoration, f"R layer {layer}"):
                    self.project(layer, states[where], restoration.positions[where], restoration.slots[where])
                yield from self.make_way(request, restoration, sum(run.rows for run in last))
            # 3. The others go through all of it
            for batch in batches:
                runs = tuple(run for run in batch if run.depth > layer + 1)
                if not runs:
                    continue
                if runs not in works:
                    works[runs] = PagedBatch(self.pool, [(Part(request.tokens, request.table, start + first), count)
                                                         for first, count in stretches(runs)])
                with self.timed(restoration, f"R layer {layer}"):
                    self.compute_layer(layer, states, rows_of(runs, device), works[runs])
                yield from self.make_way(request, restoration, 6 * sum(run.rows for run in runs))
                # 4. Where not all of it has room to land, what has arrived makes some
                self.issue(restoration)
                while restoration.to_load and restoration.next_load.ready:
                    yield from self.receive(request, restoration)

    def receive(self, request: Request, restoration: Restoration):
        """A generator: wait for the next load, others outside; hidden states are projected, K and V are where they belong."""
        self.issue(restoration)
        while restoration.received == len(restoration.loads):                   # others have the room where it lands
            yield
            self.issue(restoration)
        if not restoration.to_load and request in self.line:
            self.line.remove(request)
        load = restoration.loads[restoration.received]
        restoration.received += 1
        while not load.ready and self.others_compute(request):
            yield
        load.wait()
        if load.kind == "H":
            where = rows_of(load.runs, self.model.device)
            with self.timed(restoration, load.label):
                self.project(load.layer, self.landing.memory[load.landing:load.landing + load.rows], restoration.positions[where],
                             restoration.slots[where])
            self.landing.give_back(load.landing)
            load.landing = None
            yield from self.make_way(request, restoration, load.rows)

    def make_way(self, request: Request, restoration: Restoration, rows: int):
        """A generator: others take a step whenever as many rows were projected as a step may compute, which takes a sixth as
        long; a row that goes through a whole layer counts as six."""
        restoration.done += rows
        if restoration.done >= self.token_budget * len(self.model.layers) and self.others_compute(request):
            restoration.done = 0
            yield

    @contextmanager
    def timed(self, restoration: Restoration, label: str):
        began = self.clock.mark()
        yield
        restoration.projections.append((label, began, self.clock.mark()))
        self.counts["layers_projected" if label[0] == "H" else "layers_recomputed"] += 1

    @torch.inference_mode()
    def embed(self, tokens):
        return self.model.embed(tokens)

    @torch.inference_mode()
    def compute_layer(self, layer: int, states, where, batch: PagedBatch):
        """The rows `where` of `states` [T, D] go through a layer; their K and V go to the pool."""
        attend = next(islice(batch.layers(), layer, None))
        states[where] = self.model.layers[layer](states[where], self.model.rotary(batch.positions), attend)

    def issue(self, restoration: Restoration):
        """Begin to load what comes next, as much as has room where it lands."""
        while restoration.to_load and self.send(restoration, restoration.to_load[0]):
            restoration.loads.append(restoration.to_load.popleft())

    def send(self, restoration: Restoration, load: Load) -> bool:
        """Begin to load -> whether there was room."""
        into, out_of = [], []
        if load.kind == "H":
            load.landing = self.landing.take(load.rows)
            if load.landing is None:
                return False
            width, moves, first = self.landing.memory.shape[1], [], load.landing
            for run in load.runs:
                moves.append((first * width, self.chunks.hidden(run.slot, load.layer) + run.at * width, run.rows * width))
                first += run.rows
            together(self.landing.memory, self.chunks.kv, moves, into, out_of)
        else:
            width = math.prod(self.chunks.kv_shape[1:])
            for number, side in enumerate(self.pool.kv[load.layer]):                            # K, and V
                moves = [(place * width, self.chunks.keys_and_values(run.slot, load.layer)[number] + at * width, count * width)
                         for run in load.runs for place, at, count in restoration.places[run.row]]
                together(side, self.chunks.kv, moves, into, out_of)
        load.send(self.load_link, into, out_of)
        return True

    def progress(self) -> tuple:
        return *super().progress(), self.counts["layers_recomputed"]

    def learn(self, restoration: Restoration, spans: list):
        """How much longer it took than profiled to recompute, and to project; the last recomputed layer is projected."""
        if restoration.costs is None:
            return
        recomputed, projected = (sum(end - start for label, start, end in spans if label[0] == kind) for kind in "RH")
        deep, costs = restoration.plan.recompute - 1, restoration.costs
        if projected:
            self.paces[1].append(projected / (restoration.plan.hidden * costs.compute_hidden))
        if deep > 0:
            pace = statistics.median(self.paces[1] or [1.0])
            self.paces[0].append(max(0.1, (recomputed - pace * costs.compute_hidden) / (deep * costs.compute_token)))

    def report(self, request: Request) -> dict | None:
        found, restoration = super().report(request), request.restored
        return found and dict(found, plan=str(restoration.plan), layers={
            what: round(getattr(restoration.plan, what), 2) for what in ("recompute", "hidden", "kv")},
            predicted_ms=round(restoration.seconds * 1e3, 3), bound_ms=round(restoration.bound * 1e3, 3))

    def counters(self) -> dict:
        chunks = self.chunks
        found = dict(super().counters(), chunks=len(chunks.cells), cells=chunks.size, cells_free=len(chunks.empty),
                     plan=str(self.latest) if self.latest else None)
        del found["chunks_free"]                                                # it is cells that run out
        return found

    # What the page shows

    def host_tier(self, in_flight: list[int]) -> live.Tier:
        chunks, free = self.chunks, f"{len(self.chunks.empty)} of {self.chunks.size} cells are free"
        return live.of_pool("host", f"Host memory: of {CHUNK} tokens what the plan keeps; {free}", chunks, in_flight=in_flight,
                            note=lambda slot: f"kept of its layers: {chunks.letters[slot]}" if slot in chunks.letters else None)



def together(dst, src, moves: list[tuple[int, int, int]], into: list, out_of: list):
    """Append to `into` and `out_of` views of the memories for all moves (first number in dst, first in src, how many): one view
    for moves at equal distances, as those of chunks that were kept one after the other. Its shape is [moves, how many], and its
    stride the distance; both memories are contiguous."""
    groups: list[list] = []                                     # [moves, distances, first move]
    for move in moves:
        if groups:
            count, distances, first = groups[-1]
            last = [first[side] + (count - 1) * distances[side] for side in range(2)]
            between = move[0] - last[0], move[1] - last[1]
            if move[2] == first[2] and (count == 1 or between == distances) and min(between) >= move[2]:
                groups[-1] = [count + 1, between, first]
                continue
        groups.append([1, (0, 0), move])
    for count, distances, first in groups:
        for memory, side, views in ((dst, 0, into), (src, 1, out_of)):
            views.append(memory.as_strided((count, first[2]), (distances[side], 1), memory.storage_offset() + first[side]))


def stretches(runs: list[Run]) -> list[tuple[int, int]]:
    """-> (first row, rows) of what follows each other."""
    found = []
    for run in runs:
        if found and sum(found[-1]) == run.row:
            found[-1] = found[-1][0], found[-1][1] + run.rows
        else:
            found.append((run.row, run.rows))
    return found


def rows_of(runs: list[Run], device):
    """An index for the rows of a restoration."""
    found = stretches(runs)
    if len(found) == 1:
        return slice(found[0][0], sum(found[0]))
    return torch.cat([torch.arange(first, first + count, device=device) for first, count in found])


# 5. For benchmarks, and for the demo of chapter 06 --------------------------------------------------------------

SETTINGS = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}     # transfer / projection
WAYS = {"KV offload": "kv-only", "hidden only": "hidden-only", "naive mix": "naive", "planned mix": "auto"}


def documents_and_question(engine, new: int) -> list[dict]:
    """Messages: as many documents as leave room for `new` tokens, and a question about the last one. Raises BadRequest."""
    messages, length = [], 0
    for seed in range(64):
        longer = document_and_question(seed)
        length += sum(len(engine.encode(None, [message])[0]) for message in longer)
        if length + 2 * new > engine.context:
            break
        messages = messages[:-1] + longer
    if not messages:
        raise BadRequest(f"The demo's document and a question do not fit into the context of {engine.context} tokens; choose "
                         "another --model.")
    return messages


def document_and_question(seed: int) -> list[dict]:
    talk, facts = classroom_text.Conversation(random.Random(seed), classroom_text.Level()), []
    while fact := talk.new_fact():
        facts.append(fact)
    return [dict(role="user", content="Read this: " + " ".join(fact.statement for fact in facts)),
            dict(role="assistant", content="I have read it."),
            dict(role="user", content=random.Random(seed).choice(facts).question)]
