"""Chapter 08: even the weights live in host memory, and some of the context is kept as activations.

The problem. The model is larger than the device, and the batch is large: what counts is how many tokens come
in an hour, and not when the first one comes. In every decode step each layer's weights and all of its K and V
come over the link. The link is the bottleneck, and the processor idles.

The mechanism. Part of the context is kept as activations, the inputs of the layers (ACT blocks), the rest as
K and V (KV blocks). With multi-head attention an ACT block has half the bytes of a KV block, and K and V are
rebuilt from it while the link brings the next weights and blocks. With the right share of ACT blocks both
lanes take equally long:

    one layer                    link                processor
    equations 2 and 3            W + (1 - a) K       aR              a: the share of the context that is ACT
    with all that takes time     W + K - aK/2 - M    B + aR

    seconds to load  W the weights, K all of the context as K and V, M what the device keeps
    seconds to       B compute the layer for the new tokens, R rebuild K and V of all of the context

Layer by layer the batch passes in mini-batches (zig-zag), so that one fetch of the weights serves all of
them; while one is computed, the next one's context arrives. A step whose copies fail is run again.

The engine of chapter 02 knows nothing of this. Its pool has numbers only; `KindMap` has spread the kinds
of blocks over them evenly, so that any run of numbers has about the plan's ratio. The plan (section 1) spends
the device's memory on whole layers of weights, or on blocks of one kind.

Source: CAPTURE ("Throughput-Oriented LLM Inference via KV-Activation Hybrid Caching with a Single GPU", Lee
et al.), sections III-C and IV. The zig-zag order is FlexGen's (Sheng et al., ICML '23).

    python 08_hybrid_blocks.py --demo
    python 08_hybrid_blocks.py --policy kv-only            # the server, on http://127.0.0.1:5000
"""

import argparse
import copy
import importlib
import math
import random
import shell.cli as cli
import statistics
import sys
import time
from bisect import bisect_left
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch

from common import link as links
from common.llama import Layer, Llama, attention, causal_mask, upload
from common.requests import Request
from common.timeline import Clock, Timeline
from shell import charts, checkpoint, hardware, lesson, modelled_link
from shell.frontend import Frontend

paged = importlib.import_module("02_paged_kv")
KV_HOST, ACT_HOST, KV_DEVICE, ACT_DEVICE = KINDS = range(4)  # odd: ACT
POLICIES = "hybrid", "kv-only", "act-only", "paper"
ROWS = 1024  # tokens that are projected at once: what is temporary stays small
PROBE = 2048  # tokens of context with which costs are measured before the first step

# 1. How much of what ---------------------------------------------------------------------------

class Costs(NamedTuple):
    """What a decode step costs: the link's bytes/s, and seconds in a layer."""

    speed: float
    forward: float  # the new tokens: products, attention, what each mini-batch costs, a share of the head
    rebuild: float  # K and V of a block, from its activations


class Sizes(NamedTuple):
    """Bytes: of a layer's weights, and of an ACT and a KV block in all layers."""

    weights: int
    act: int
    kv: int


class Plan(NamedTuple):
    """What the memory holds: layers of weights on the device, and blocks of each kind."""

    resident: int
    kv_host: int
    act_host: int
    kv_device: int
    act_device: int

    def with_acts(self, count: int) -> "Plan":
        """Exchange KV blocks of the host for ACT blocks."""
        return self._replace(kv_host=self.kv_host - count, act_host=self.act_host + count)


def algorithm_1(load_w, kv_gen, load_kv, act_gpu, host, weights, act, kv) -> tuple[float, float]:
    """Divide host memory by CAPTURE's Algorithm 1, as it is printed -> its ACT blocks and its KV blocks.
    `load_w`: seconds to load a layer's weights; `kv_gen`, `load_kv`: to rebuild a block, to load a KV block;
    `act_gpu`: ACT blocks on the device; `host`, `weights`, `act`, `kv`: bytes of the memory, of all weights,
    of a block."""
    # Lines 11 to 18: the link loads the weights, the processor rebuilds the device's blocks. The one that
    # ends first gets blocks until both end together
    budget = load_w - kv_gen * act_gpu
    act_init = max(0.0, budget / kv_gen)
    kv_init = max(0.0, -budget / load_kv)
    # Lines 20 to 26: fill the memory that is left, and keep both together: kv_gen * #ACT = load_kv * #KV
    remaining = host - weights - (act * act_init + kv * kv_init)
    kv_per_act = kv_gen / load_kv
    act_remain = remaining / (act + kv * kv_per_act)
    return act_init + act_remain, kv_init + kv_per_act * act_remain


class Planner(NamedTuple):
    """Divides `device` bytes, and a pool of `blocks` of which a share `fill` is in use."""

    policy: str
    costs: Costs
    sizes: Sizes
    layers: int
    blocks: int
    device: int
    block_size: int = 16
    fill: float = 1.0

    def lane_seconds(self, plan: Plan) -> tuple[float, float]:
        """-> seconds of a decode step on the link and on the processor, each without waits."""
        costs, sizes = self.costs, self.sizes
        size = (self.layers - plan.resident) * sizes.weights
        size += self.fill * (sizes.kv * plan.kv_host + sizes.act * plan.act_host)
        acts = self.fill * (plan.act_host + plan.act_device)
        return size / costs.speed, self.layers * (costs.forward + costs.rebuild * acts)

    def seconds(self, plan: Plan) -> float:
        """Estimate the seconds of a decode step, layer by layer. While a layer is computed, a share of some
        weights arrives and then the next layer's context, ACT blocks first. Uneven shares cost time."""
        load, compute = (lane / self.layers for lane in self.lane_seconds(plan))
        weights = self.sizes.weights / self.costs.speed
        context = link = load - weights * (1 - plan.resident / self.layers)  # link: when it is free
        kv, now = self.fill * self.sizes.kv * plan.kv_host / self.layers / self.costs.speed, 0.0
        for share in stream(self.layers, plan.resident)[1]:
            arrived, link = link, max(link, now) + weights * share + context
            now = max(max(now, arrived - kv) + compute - self.costs.forward, arrived) + self.costs.forward
        return max(now, link - context)

    def speed_for(self, f: float, blocks: float) -> float:
        """-> bytes/s of the link over which all weights and `blocks`, as K and V, take `f` times as long as
        computing with them as ACT blocks."""
        size = self.layers * self.sizes.weights + blocks * self.sizes.kv
        return size / f / (self.layers * (self.costs.forward + blocks * self.costs.rebuild))

    def paper_plan(self) -> Plan:
        """Plan as the paper does: only ACT blocks stay on the device, to be rebuilt while weights come; the
        others have Algorithm 1's ratio (equation 5), for host memory that just holds them and the weights."""
        costs, sizes = self.costs, self.sizes
        act_device = min(self.blocks, max(0, self.device - 2 * sizes.weights) // sizes.act)
        rest, weights = self.blocks - act_device, self.layers * sizes.weights
        times = sizes.weights / costs.speed, costs.rebuild, sizes.kv / self.layers / costs.speed
        shares = algorithm_1(*times, act_device, weights + rest * sizes.kv, weights, sizes.act, sizes.kv)
        act, kv = (max(0.0, share) for share in shares)  # to fill a lane may take more than there is
        act_host = round(rest * act / (act + kv))
        return Plan(0, rest - act_host, act_host, 0, act_device)

    def plan(self) -> Plan:
        """Find the division whose decode step ends first; among ties, compute least. Raises ModelError.

        What differs from the paper's:
        - Equations 2 and 3 leave out the transfer of ACT blocks, attention, the new tokens' own products, and
          what each mini-batch costs. Here they count, so that the lanes do end together.
        - The device may hold weights or KV blocks too: any resident byte saves a byte of link.
        - The lanes wait for each other in each layer (`seconds`). The paper evens the sums.
        - The number of blocks is given. Algorithm 1 fills all of the host's memory with them.
        With grouped queries hybrid finds the plan of `kv-only`: ACT blocks are no smaller than KV blocks."""
        least = min(2, self.layers) * self.sizes.weights
        if self.device < least:
            raise checkpoint.ModelError(f"Two layers take {least / 1e6:.1f} MB; enlarge --device-memory.")
        if self.policy == "paper":
            return self.paper_plan()
        acts = {"kv-only": [0], "act-only": [self.blocks]}.get(self.policy, range(self.blocks + 1))
        plans = [plan for plan in self.divisions() if plan.act_host + plan.act_device in acts]
        return min(plans, key=lambda plan: (self.seconds(plan), self.lane_seconds(plan)[1], plan))

    def divisions(self):
        """Yield plans: for any number of resident layers, and KV or ACT blocks in what is left of the device,
        the best division of the other blocks, and those with one kind alone."""
        for resident in range(self.layers + 1):
            # The others come into room for two layers
            left = self.device - self.sizes.weights * (resident + 2 * (resident < self.layers))
            for on_device in ((left // self.sizes.kv, 0), (0, left // self.sizes.act)) if left >= 0 else ():
                kv, act = (min(self.blocks, count) for count in on_device)
                plan = Plan(resident, self.blocks - kv - act, 0, kv, act)
                # With more ACT blocks the seconds fall, then rise: find the first that saves nothing
                best = bisect_left(range(plan.kv_host), -1e-12, key=partial(self.another_act, plan))
                yield from map(plan.with_acts, (0, best, plan.kv_host))

    def another_act(self, plan: Plan, count: int) -> float:
        """-> the seconds that one more ACT block in place of a KV block adds to a decode step."""
        return self.seconds(plan.with_acts(count + 1)) - self.seconds(plan.with_acts(count))

    def with_samples(self, samples: list[tuple]) -> "Planner":
        """-> a planner with the costs of decode steps, each (blocks, seconds to rebuild one in a layer or 0,
        seconds of the rest of the layer): the medians."""
        blocks, rebuilds, forwards = zip(*samples)
        rebuild = statistics.median([*filter(None, rebuilds)] or [self.costs.rebuild])
        costs = self.costs._replace(forward=statistics.median(forwards), rebuild=rebuild)
        return self._replace(costs=costs, fill=min(1.0, statistics.median(blocks) / self.blocks))


# 2. Weights ------------------------------------------------------------------------------------

def stream(layers: int, resident: int) -> tuple[list[int], list[float]]:
    """Spread the resident layers evenly -> the layers whose weights come over the link, and for each layer of
    all the share of a layer's weights that arrives while it is computed."""
    kept, shares = {number * layers // resident for number in range(resident)}, layers * [0.0]
    streamed = sorted({*range(layers)} - kept)
    for previous, index in zip([at - layers for at in streamed[-1:]] + streamed, streamed):
        for at in range(previous, index):  # below 0: in the step before
            shares[at] = 1 / (index - previous)
    return streamed, shares


class Weights:
    """Holds all layers in host memory, and `resident` of them on the device too, spread evenly. The others
    come into two places in turn, in portions, so that no context has to wait for a whole layer."""

    def __init__(self, model: Llama, resident: int, link):
        self.link, self.host, self.issued = link, model.layers, []  # issued: copies of the step
        for parameter in model.layers.parameters():
            if model.device.type == "cuda" and not parameter.is_pinned():
                memory = links.host_memory(parameter.shape, model.dtype, model.device, "A weight")
                parameter.data = memory.copy_(parameter)
        self.streamed, self.shares = stream(len(self.host), resident)
        self.resident = {at: self.new_layer(model) for at in {*range(len(self.host))} - {*self.streamed}}
        for index, layer in self.resident.items():
            for parameter, weight in zip(layer.parameters(), self.host[index].parameters()):
                parameter.data = weight.data.to(model.device)
        self.buffers = [self.new_layer(model) for _ in range(2 if self.streamed else 0)]  # to use and to fill
        self.fetch_next(-1)

    @staticmethod
    def new_layer(model: Llama) -> Layer:
        """Room for a layer on the device."""
        return Layer(model.config, dtype=model.dtype, device=model.device).requires_grad_(False)

    def fetch_next(self, after: int):
        """Fetch next the weights of the first streamed layer behind layer `after`. -1: at the beginning, and
        after a failure."""
        later = [index for index in self.streamed if index > after]
        self.next_streamed, self.sent, self.transfers = (later + self.streamed + [0])[0], 0.0, []

    def fetch(self, share: float):
        """Issue the copy of a share of the rows of each weight that comes, or of the rows that are left."""
        if not self.streamed:
            return
        first, self.sent, pieces = self.sent, min(1.0, self.sent + share), []
        for pair in zip(self.buffers[1].parameters(), self.host[self.next_streamed].parameters()):
            rows = slice(round(first * len(pair[0])), round(self.sent * len(pair[0])))
            pieces.append([weight[rows] for weight in pair])
        if any(len(to) for to, _ in pieces):
            self.transfers.append(self.link.copy(*zip(*pieces), "weights"))
            self.issued.append(self.transfers[-1])

    def layer(self, index: int) -> Layer:
        """Wait for layer `index` -> the layer. The next one comes in its predecessor's place."""
        if index in self.resident:
            return self.resident[index]
        self.fetch(1.0)
        for transfer in self.transfers:
            await_transfer(transfer)
        self.buffers.reverse()
        self.fetch_next(index)
        return self.buffers[0]


def await_transfer(transfer):
    """Order a transfer before what is computed next; have the host wait only where it must."""
    if not transfer.queue_wait():
        transfer.wait()


# 3. Mini-batches -------------------------------------------------------------------------------

class Item(NamedTuple):
    """The tokens that a step computes of one request."""

    request: Request
    start: int  # tokens of context
    end: int  # those and the new ones


def form_batches(items: list[Item], rows: int) -> list[list[Item]]:
    """Pack requests into few mini-batches of similar length, of at most `rows` tokens or of one request. Each
    has about the plan's ratio, so that in each mini-batch rebuilding and loading are about even."""
    total = sum(item.end for item in items)
    even = total / math.ceil(total / rows)
    formed, held = [], math.inf
    for item in sorted(items, key=lambda item: -item.end):
        if held + item.end / 2 > even or held + item.end > rows:
            formed.append([])
            held = 0
        formed[-1].append(item)
        held += item.end
    return formed


class KindMap:
    """Says which kind of block each number of the pool stands for, and which one of that kind. Spreads the
    kinds evenly: each run of numbers has the plan's ratio (equation 5), within about a block."""

    def __init__(self, plan: Plan, block_size: int):
        self.block_size, counts = block_size, plan[1:]
        positions = [(torch.arange(count) + 0.5) / max(1, count) for count in counts]
        order = torch.cat(positions).argsort(stable=True)
        self.kinds = torch.arange(len(KINDS)).repeat_interleave(torch.tensor(counts))[order]  # [blocks]
        self.numbers = torch.cat([torch.arange(count) for count in counts])[order]  # [blocks]

    def slots(self, table: list[int], positions):
        """-> kinds [n], and slots [n] in the memory of their kind, of tokens at `positions` [n]."""
        blocks = torch.tensor(table, dtype=torch.long)[positions // self.block_size]
        return self.kinds[blocks], self.numbers[blocks] * self.block_size + positions % self.block_size


def form_paper_batches(planner: Planner, kind_map: KindMap, items: list[Item], rows: int) -> list[list[Item]]:
    """Form the paper's mini-batches (section IV-C-3). The first request that has room in the current one and
    does not worsen its imbalance joins it; a tie joins, since equation 5 makes ties the rule, and the paper
    wants few. When none does, the first of all begins the next one, whatever its size. Limits of ACT and of
    KV blocks never count: the attention buffer is as long, and holds both kinds."""
    costs, most = planner.costs, rows // kind_map.block_size
    kv_per_act = costs.rebuild / (planner.sizes.kv / planner.layers / costs.speed)

    def imbalance(blocks):
        balance = blocks[..., 1] / blocks[..., 0] * kv_per_act  # equation 6
        return torch.maximum(balance, 1 / balance)  # equation 7

    tables = [item.request.table[: -(-item.end // kind_map.block_size)] for item in items]
    own = torch.stack([torch.bincount(kind_map.kinds[table] % 2, minlength=2) for table in tables])  # KV, ACT
    formed, left, held = [], list(range(len(items))), torch.tensor((most, most))
    while left:
        both = held + own[left]  # [left, 2]
        joins = (both.sum(1) <= most) & (imbalance(both) <= imbalance(held))
        if not joins.any():
            formed.append([])
            held = 0
        number = left.pop(int(joins.int().argmax()))
        formed[-1].append(items[number])
        held = held + own[number]
    return formed


class Tokens(NamedTuple):
    """Tokens of one kind, [n] each."""

    slots: torch.Tensor  # in the memory of their kind
    rows: torch.Tensor  # of the attention buffer, or of the mini-batch for new tokens
    positions: torch.Tensor
    pairs: links.BlockPairs  # to rows from slots; of new tokens: to slots from those of one kind


def by_kind(kinds, slots, rows, positions, device, new=False):
    """Of tokens [n] yield those of each kind, as Tokens."""
    for kind in KINDS:
        mine = kinds == kind
        tokens = slots[mine], rows[mine], positions[mine]
        sides = (tokens[0], torch.arange(len(tokens[0]))) if new else (tokens[1], tokens[0])
        yield Tokens(*(upload(each, device) for each in tokens), links.BlockPairs(*sides))


class MiniBatch:
    """Some requests of a step. Each has a part of the attention buffer: its context, in the order of kinds,
    then its new tokens. (Positions are in the keys: attention reads them in any order.)"""

    def __init__(self, items: list[Item], kind_map: KindMap, model: Llama):
        self.items, self.device, self.rows_used = items, model.device, 0
        tokens, context, new = [], [], []
        for request, start, end in items:
            positions = torch.arange(end)
            kinds, slots = kind_map.slots(request.table, positions)
            order = kinds[:start].argsort(stable=True)
            rows = self.rows_used + positions  # of the attention buffer
            context.append(torch.stack((kinds[order], slots[order], rows[:start], order)))
            new.append(torch.stack((kinds, slots, rows, positions))[:, start:])
            tokens += request.tokens[start:end]
            self.rows_used += end
        self.context = [*by_kind(*torch.cat(context, 1), self.device)]
        kinds, slots, rows, positions = torch.cat(new, 1)  # [T] each
        self.new = [*by_kind(kinds, slots, torch.arange(len(tokens)), positions, self.device, new=True)]
        self.rows = upload(rows, self.device)
        self.hidden = model.embed(upload(tokens, self.device))  # [T, D]
        self.rotation = model.rotary(upload(positions, self.device))

    def attend(self, kv, q, new_kv):
        """Put new K and V [T, 2, KVH, hd] beside the context in `kv`, and attend to both -> [T, H, hd]."""
        kv.index_copy_(0, self.rows, new_kv)
        out, at, row = [], 0, 0
        for _, start, end in self.items:
            count, mask = end - start, causal_mask(end - start, end, self.device, q.dtype)
            keys, values = kv[row : row + end].unbind(1)  # [S, KVH, hd] each
            out.append(attention(q[at : at + count], keys, values, mask))
            at, row = at + count, row + end
        return torch.cat(out)


# 4. The runner ---------------------------------------------------------------------------------

class HybridRunner:
    """Runs the forward pass in mini-batches, over blocks of four kinds behind one pool of numbers."""
    pieces = None  # no graphs: each pass finds the layers' weights elsewhere

    def __init__(self, model: Llama, plan: Plan, bandwidth, block_size=16, rows=8192):
        """`bandwidth`: of a modelled link, None on a GPU. `rows`: tokens of context on the device at once."""
        self.model, self.plan, self.form_batches = model, plan, form_batches
        self.kind_map = KindMap(plan, block_size)
        self.rows = max(rows, model.config.max_position_embeddings)
        self.pool = paged.BlockPool(sum(plan[1:]), block_size)
        self.clock = Clock(model.device)
        self.load_link = hardware.connect("load", self.clock, bandwidth)
        self.save_link = hardware.connect("save", self.clock, bandwidth)
        empty = partial(torch.empty, dtype=model.dtype, device=model.device)
        on_host = partial(links.host_memory, dtype=model.dtype, device=model.device, what="The host's blocks")
        # A token's KV, and its ACT
        shapes = (2, model.config.num_key_value_heads, model.config.head_dim), (model.config.hidden_size,)
        self.buffers = [[empty((self.rows, *shape)) for shape in shapes] for _ in range(2)]  # to use, to fill
        # Of the last step: mini-batches, (label, start, end), copies; and copies of the step before it
        self.last, self.marks, self.transfers, self.earlier = [], [], [], []
        self.weights, self.memory = Weights(model, plan.resident, self.load_link), []
        for kind, count in enumerate(plan[1:]):
            shape = len(model.layers), count * block_size, *shapes[kind % 2]
            allocate = on_host if kind in (KV_HOST, ACT_HOST) else empty
            self.memory.append(allocate(shape))  # [L, slots, 2, KVH, hd] or [L, slots, D]
        self.pool.block_bytes = sum(memory.nbytes for memory in self.memory) // max(1, self.pool.size)

    @torch.inference_mode()
    def forward(self, work: list, before_layer=None):
        """Compute the next `count` tokens of each request in `work` -> a batch with the work in the order of
        mini-batches, and logits [R, V]."""
        self.marks, self.transfers, self.earlier = [], [], self.transfers
        self.weights.issued = self.transfers
        try:
            self.last, logits = self.step(work)
        except Exception:
            self.forget()
            raise
        items = [item for batch in self.last for item in batch.items]
        return SimpleNamespace(work=[(item.request, item.end - item.start) for item in items]), logits

    def step(self, work: list) -> tuple:
        # 1. Mini-batches
        items = [Item(one, one.computed, one.computed + count) for one, count in work]
        batches = [MiniBatch(some, self.kind_map, self.model) for some in self.form_batches(items, self.rows)]
        arrival, total, self.saves = self.copy_in(0, batches[0]), sum(one.rows_used for one in batches), []

        # 2. Layer by layer, mini-batch by mini-batch: while one computes, the next one's context arrives, and
        #    a portion of the next layer's weights; behind the last layer come those of the next step's first
        order = [(index, batch) for index in range(len(self.model.layers)) for batch in batches]
        for (index, batch), following in zip(order, [*order[1:], None]):
            if batch is batches[0]:
                layer = self.weights.layer(index)
                layer.rotates = self.model.layers[index].rotates
            self.weights.fetch(batch.rows_used / total * self.weights.shares[index])
            next_arrival = self.copy_in(*following) if following else None
            kv = self.rebuild(index, layer, *arrival)
            self.compute(index, layer, batch, kv)
            arrival = next_arrival

        # 3. The logits of each request's last token. What was computed is in its blocks
        began, row, rows = self.clock.mark(), -1, []
        for request, start, end in (item for batch in batches for item in batch.items):
            row += end - start
            if end == len(request.tokens):
                rows.append(row)
        hidden = torch.cat([batch.hidden for batch in batches])  # [T, D]
        logits = self.model.logits(hidden[upload(rows, self.model.device)])  # [R, V]
        self.marks.append(("forward", began, self.clock.mark()))
        for transfer in self.saves:
            transfer.wait()
        return batches, logits

    # The link and the processor

    def copy_in(self, index: int, batch: MiniBatch) -> tuple:
        """Issue the transfers of a mini-batch's context in one layer, to the rows where it is needed -> what
        `rebuild` takes: the buffers [rows, 2, KVH, hd] and [rows, D], and transfers of ACT and KV or None."""
        kv, act = self.buffers[0]  # of two pairs the one used longer ago: what reads it is queued already
        self.buffers.reverse()
        transfers = []
        for kind, into, label in (ACT_HOST, act, "act"), (KV_HOST, kv, "kv"):
            transfers.append(None)
            if len(batch.context[kind].slots):
                memory, pairs = self.memory[kind][index], batch.context[kind].pairs
                transfers[-1] = self.load_link.copy(into, memory, label, pairs)
                self.transfers.append(transfers[-1])
        return batch, kv, act, *transfers

    def rebuild(self, index: int, layer: Layer, batch: MiniBatch, kv, act, act_copy, kv_copy):
        """Complete K and V of the whole context -> the attention buffer `kv`, [rows, 2, KVH, hd]."""
        kvs, acts, host = (batch.context[kind] for kind in (KV_DEVICE, ACT_DEVICE, ACT_HOST))
        kv.index_copy_(0, kvs.rows, self.memory[KV_DEVICE][index].index_select(0, kvs.slots))
        if len(acts.slots):
            self.project(layer, self.memory[ACT_DEVICE][index], acts.slots, acts, kv)
        if act_copy:
            await_transfer(act_copy)
            self.project(layer, act, host.rows, host, kv)
        if kv_copy:
            await_transfer(kv_copy)
        return kv

    def project(self, layer: Layer, states, where, tokens: Tokens, kv):
        """Project the `states` [., D] in places `where` [n] to K and V, into the rows of `kv` of `tokens`."""
        began = self.clock.mark()
        portions = (each.split(ROWS) for each in (where, tokens.rows, tokens.positions))
        for slots, rows, positions in zip(*portions):
            new_kv = layer.project_kv(states.index_select(0, slots), self.model.rotary(positions))
            for side, values in zip(kv.unbind(1), new_kv):
                side.index_copy_(0, rows, values)
        self.marks.append(("rebuild", began, self.clock.mark()))

    def compute(self, index: int, layer: Layer, batch: MiniBatch, kv):
        """Compute the layer for the new tokens, and store their K and V, or its input, in their blocks."""
        began, hidden, new = self.clock.mark(), batch.hidden, []

        def attend(q, k, v):
            new.append(torch.stack((k, v), 1))  # [T, 2, KVH, hd]
            return batch.attend(kv, q, new[0])

        batch.hidden = layer(hidden, batch.rotation, attend)  # [T, D]
        self.marks.append(("forward", began, self.clock.mark()))
        for kind, (slots, rows, _, pairs) in enumerate(batch.new):
            memory, states = self.memory[kind][index], new[0] if kind in (KV_HOST, KV_DEVICE) else hidden
            states = states.index_select(0, rows)  # [n, 2, KVH, hd] or [n, D]
            if kind in (KV_DEVICE, ACT_DEVICE):
                memory.index_copy_(0, slots, states)
            elif len(slots):
                self.saves.append(self.save_link.copy(memory, states, "store", pairs))
                self.transfers.append(self.saves[-1])

    def forget(self):
        """Begin anew: wait until all copies are over, and use nothing of them."""
        for transfer in [*self.earlier, *self.transfers]:
            with suppress(links.TransferError):
                transfer.wait()
        self.weights.fetch_next(-1)
        self.marks, self.transfers, self.earlier = [], [], []

    def step_costs(self) -> tuple:
        """-> a sample for Planner.after, of the last step, in which all requests decoded."""
        layers, size, seconds = len(self.model.layers), self.pool.block_size, dict(rebuild=0.0, forward=0.0)
        for label, began, ended in self.marks:
            seconds[label] += self.clock.seconds(ended) - self.clock.seconds(began)
        blocks = [sum(len(batch.context[kind].slots) for batch in self.last) / size for kind in KINDS]
        acts = layers * (blocks[ACT_HOST] + blocks[ACT_DEVICE])
        return sum(blocks), seconds["rebuild"] / acts if acts else 0.0, seconds["forward"] / layers


# 5. The engine, and what it is measured with ---------------------------------------------------

def sizes_of(model: Llama, block_size: int) -> Sizes:
    config, numbers = model.config, sum(parameter.numel() for parameter in model.layers[0].parameters())
    act, kv = config.num_hidden_layers * config.hidden_size, config.kv_numbers_per_token
    return Sizes(*(count * model.dtype.itemsize for count in (numbers, block_size * act, block_size * kv)))


def make_runner(planner: Planner, model: Llama, bandwidth, rows=8192) -> HybridRunner:
    """-> a runner of the planner's plan; of the paper's, with its mini-batches."""
    runner = HybridRunner(model, planner.plan(), bandwidth, planner.block_size, rows)
    if planner.policy == "paper":
        runner.form_batches = partial(form_paper_batches, planner, runner.kind_map)
    return runner


def decode_engine(runner: HybridRunner, contexts: list[int]) -> paged.Engine:
    """-> an engine whose requests are about to decode, behind contexts that were filled with a number."""
    engine = paged.Engine(runner, max_running=len(contexts))
    for memory in runner.memory:
        memory.fill_(0.1)
    for number, context in enumerate(contexts):
        request = Request([(number + 7 * at) % 251 for at in range(context + 1)], 1 << 20)
        engine.waiting.append(request)
        engine.admit(request)
        request.computed = context
    return engine


def measure(planner: Planner, model: Llama, bandwidth, contexts: list[int], rows=8192) -> Planner:
    """Measure a few decode steps -> `planner` with their costs. Raises ModelError."""
    engine, samples = decode_engine(make_runner(planner, model, bandwidth, rows), contexts), []
    for _ in range(8):
        engine.step()
        if engine.failures:
            words = "A decode step, to measure, has failed; choose fewer --blocks or a smaller --mini-batch."
            raise checkpoint.ModelError(words)
        samples.append(engine.runner.step_costs())
    engine.runner.forget()
    engine.runner = None  # its memory is free now; the engine itself is when the collector finds it
    return planner.with_samples(samples[1:])


def make_planner(model: Llama, arguments) -> tuple[Planner, object]:
    """-> a planner for these options, with the costs of steps that have ACT blocks alone; and the modelled
    link's bandwidth, None on a GPU."""
    size, layers, sizes = arguments.block_size, len(model.layers), sizes_of(model, arguments.block_size)
    useful = arguments.max_running * -(-model.config.max_position_embeddings // size)
    largest = max(sizes.kv, sizes.act) if arguments.policy in ("act-only", "paper") else sizes.kv
    blocks = cli.blocks_that_fit(arguments.blocks, useful, largest, torch.device("cpu"), "--blocks")
    device = 1e9 * arguments.device_memory if arguments.device_memory else (layers // 2 + 2) * sizes.weights
    if model.device.type == "cuda":
        rows = max(arguments.mini_batch, model.config.max_position_embeddings)
        buffers = 2 * rows // size * (sizes.kv + sizes.act) // layers
        free = 0.8 * torch.cuda.mem_get_info()[0] - buffers
        device = min(device, free) if arguments.device_memory else free
    bandwidth = hardware.bandwidth(model, arguments.link)
    speed = hardware.connect("load", Clock(model.device), bandwidth).speed()
    planner = Planner(arguments.policy, Costs(speed, 0.0, 0.0), sizes, layers, blocks, int(device), size)
    requests = max(1, min(arguments.max_running, blocks, PROBE // size))
    tokens = max(1, min(min(PROBE, blocks * size) // requests, model.config.max_position_embeddings) - 8)
    held = requests * (1 + -(-(tokens + 8) // size))  # 8: a few steps follow
    probe = planner._replace(policy="act-only", device=2 * sizes.weights, blocks=held)
    unlimited = bandwidth and modelled_link.Bandwidth(math.inf)
    probe = measure(probe, model, unlimited, requests * [tokens], arguments.mini_batch)
    return planner._replace(costs=probe.costs), bandwidth


def make_engine(model: Llama, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Runner. The model's layers are in host memory."""
    planner, bandwidth = make_planner(model, arguments)
    runner = make_runner(planner, model, bandwidth, arguments.mini_batch)
    plan = runner.plan
    engine = paged.Engine(runner, None, arguments.token_budget, arguments.max_running)
    engine.explain = arguments.explain
    weights, act, kv = (size / 1e6 for size in planner.sizes)
    print(
        f"Device: {plan.resident} of {planner.layers} layers of {weights:.1f} MB, {plan.kv_device} KV and "
        f"{plan.act_device} ACT blocks. Host: {plan.kv_host} KV and {plan.act_host} ACT\n"
        f"blocks of {kv:.3f} and {act:.3f} MB; {runner.load_link}",
        file=sys.stderr,
    )
    return engine


# 6. The demo -----------------------------------------------------------------------------------

GEOMETRY, CONTEXTS = "random:long", 16 * [128]  # of the decode steps that are timed: model, tokens each
FACTORS = 1.25, 2.5  # weights and context over the link, over computing with ACT blocks alone


def one_step(engine: paged.Engine) -> tuple[float, Timeline]:
    """-> seconds of a decode step, and who was busy."""
    engine.step()  # not counted: its copies began while another engine computed
    timeline, runner = Timeline(), engine.runner
    engine.step()
    ended = time.perf_counter()
    for label, *span in runner.marks:
        timeline.add("compute", label, *map(runner.clock.seconds, span))
    for transfer in [*runner.earlier, *runner.transfers]:
        transfer.wait()
        start, end = transfer.span()
        if start < ended:
            timeline.add(transfer.lane, transfer.label, start, min(end, ended))
    return ended - timeline.began, timeline


def demo(model: Llama, frontend: Frontend, arguments):
    """A batch answered under each policy, and decode steps of a larger geometry over two links."""
    # 1. Ask: six conversations at once
    rng, new, asked = random.Random(0), max(4, min(arguments.max_tokens, 8)), []
    talks = [lesson.conversation(frontend, rng, min(128, frontend.context // 16)) for _ in range(6)]
    options = vars(arguments) | dict(policy="hybrid", max_running=6, blocks=6 * 32, mini_batch=1024)
    if (real := model.device.type == "cuda"):  # all would fit, and nothing travel; a byte more: rounding
        options["device_memory"] = ((2 + len(model.layers) // 2) * sizes_of(model, 16).weights + 1) / 1e9
    planner, bandwidth = make_planner(model, argparse.Namespace(**options))
    for policy in POLICIES:
        own = planner._replace(policy=policy)
        engine = paged.Engine(make_runner(own, model, bandwidth, rows=1024), max_running=6)
        asked += engine.generate([frontend.request(messages=messages, max_tokens=new) for messages in talks])
        engine.runner.forget()
        engine.runner = None
    verified = lesson.verify(paged.baseline.Engine(copy.deepcopy(model).to(model.device)), asked)

    # 2. Time
    big, *_ = load(GEOMETRY, str(model.dtype)[6:], model.device.type)
    layers, batch, blocks, rows = len(big.layers), len(CONTEXTS), sum(CONTEXTS) // 16, []
    options |= dict(block_size=16, max_running=batch, blocks=blocks + 3 * batch)
    planner, bandwidth = make_planner(big, argparse.Namespace(**options))
    planner = planner._replace(device=(2 + layers // 2) * planner.sizes.weights)
    print(
        f"Decode steps of {batch} requests behind {CONTEXTS[0]} tokens each, on {GEOMETRY}, since the "
        "answers' model is\ntoo small to keep two lanes busy. "
        f"{'As above, the' if real else 'The'} device has room for {layers // 2} of {layers} layers of "
        f"{planner.sizes.weights / 1e6:.1f} MB\nbeside two that come and go, or for as many bytes of blocks."
    )
    for f in FACTORS if model.device.type == "cpu" else (None,):
        if f:
            bandwidth = modelled_link.Bandwidth(planner.speed_for(f, blocks))
            planner = planner._replace(costs=planner.costs._replace(speed=bandwidth.value))
        found, link, timeline = time_policies(measure(planner, big, bandwidth, CONTEXTS), big, bandwidth, f)
        rows += found
    print(
        "(w, k, a: weights, KV, ACT blocks come; s: stored; r: rebuilt, f: forward)\n\nThe lane that is late "
        "alone counts. And where one device does not compute fast enough, or has too\nlittle link? Several "
        "may divide what each chapter keeps: chapter 09."
    )
    return dict(link=link, verified=verified, rows=rows), [timeline, asked[0].timeline]


def time_policies(planner: Planner, model: Llama, bandwidth, f: float | None) -> tuple:
    """Time decode steps under each policy in turn, and print a table -> rows, the link, hybrid's timeline."""
    runners = {policy: make_runner(planner._replace(policy=policy), model, bandwidth) for policy in POLICIES}
    engines = {policy: decode_engine(runner, CONTEXTS) for policy, runner in runners.items()}
    taken = lesson.in_turn({policy: partial(one_step, each) for policy, each in engines.items()}, warm_up=0)
    rates = {policy: [len(CONTEXTS) / seconds for seconds, _ in steps] for policy, steps in taken.items()}
    print()
    link = lesson.describe_link(runners["hybrid"].load_link)
    rows = lesson.table(f"Decode, f = {f or 'as it is'}", rates, "tokens_per_second", "tokens/s")
    for row in rows:
        plan, steps = runners[row["case"]].plan, sorted(taken[row["case"]], key=lambda step: step[0])
        _, timeline = steps[len(steps) // 2]
        row.update(f=f, plan=plan._asdict(), act=(plan.act_host + plan.act_device) / planner.blocks)
        row.update({lane: 1 - charts.bubble(timeline, lane) for lane in ("load", "compute")})
        print(
            f"  {row['case']:8} busy: link {row['load']:4.0%}, processor {row['compute']:4.0%}; "
            f"{row['act']:4.0%} ACT; on the device {plan.resident} layers and {sum(plan[3:])} blocks"
        )
    hybrid, kv, act, _ = (row["tokens_per_second"] for row in rows)
    why = "each kind alone leaves a lane idle" if 0.1 < rows[0]["act"] < 0.9 else "there is little to mix"
    print(
        f"  hybrid: {hybrid / kv:.2f}x kv-only and {hybrid / act:.2f}x act-only, "
        f"with {rows[0]['act']:.0%} of the blocks ACT: {why}"
    )
    print(charts.chart(timeline := taken["hybrid"][-1][1]))
    return rows, link, timeline


# 7. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    number, gigabytes = partial(cli.bounded, int, 1), cli.bounded(float, 1e-6, 1e6)
    add, words = parser.add_argument, "what the context is kept as (hybrid); paper: as CAPTURE has it"
    add("--policy", choices=POLICIES, default="hybrid", help=words)
    words = "of the device, for weights and blocks (on a GPU what is free, at most; else half of the layers)"
    add("--device-memory", type=gigabytes, metavar="GB", help=words)
    add("--blocks", type=number(1 << 24), metavar="N", help="blocks of all kinds (as useful)")
    words = "tokens of context that are on the device at once (8192)"
    add("--mini-batch", type=number(1 << 20), metavar="TOKENS", default=8192, help=words)
    add("--block-size", type=number(1 << 16), metavar="N", default=16, help="tokens per block (16)")
    add("--token-budget", type=number(1 << 20), metavar="N", default=8192, help="tokens per step (8192)")
    add("--max-running", type=number(1 << 12), metavar="N", default=64, help="requests that run at once (64)")
    hardware.add_option(parser)


def load(name: str, dtype: str = "auto", device: str = "auto"):
    """Load as checkpoint.load does, but leave the layers' weights in host memory."""
    loaded = checkpoint.load(name, dtype, device, on_host=True)
    layers_on_host(loaded[0], checkpoint.pick_device(device))
    return loaded


def layers_on_host(model: Llama, device: str):
    """Move all but the layers of a model in host memory to `device`, which computes."""
    model.device = torch.device(device)
    for part in model.rotary, model.norm, model.head:
        part.to(device)
    model.embedding = torch.nn.Parameter(model.embedding.to(device), requires_grad=False)
    if model.config.tie_word_embeddings:
        model.head.weight = model.embedding


if __name__ == "__main__":
    cli.main(__doc__, "08_hybrid_blocks", add_arguments, make_engine, demo, load=load)
