"""Chapter 08: even the weights live in host memory, and some of the context is kept as activations.

The problem. The model is larger than device memory, and the batch is large. The measure is throughput, not
the time to first token. In every decode step each layer's weights and all of its K and V are copied over the
link. The link is the bottleneck, and the processor is idle.

The mechanism. Keep part of the context as activations, the inputs of the layers (ACT blocks), and the rest as
K and V (KV blocks). With multi-head attention an ACT block has half the bytes of a KV block. (With
grouped-query attention it is usually as large or larger. Then the best plan has KV blocks only.) The
processor rebuilds K and V from ACT blocks while the link copies the next weights and blocks. With the right
share of ACT blocks both lanes take equally long:

    seconds for one layer           link                processor
    the paper's equations 2, 3      W + (1 - a) K       aR
    with all costs                  W + K - aK/2 - M    B + aR

    a   the share of the context that is kept in ACT blocks
    W   seconds to load the weights
    K   seconds to load all of the context as K and V
    M   seconds of loading that are saved because weights or blocks stay on the device
    B   seconds to compute the layer for the new tokens
    R   seconds to rebuild K and V of all of the context

A step is computed in mini-batches, each of which has some of the requests. In each layer all mini-batches are
computed, one after the other, before the next layer begins (zig-zag order). So one copy of the weights serves
all of them. While one mini-batch is computed, the context of the next one is copied. If a copy fails, the
engine runs the step again.

The engine of chapter 02 does not know about kinds of blocks, because its pool only hands out block numbers.
`KindMap` assigns a kind to each number, spread evenly, so that any run of numbers has about the plan's ratio
of kinds. The plan (section 1) uses device memory for whole layers of weights, then for blocks of one kind.

Source: CAPTURE ("Throughput-Oriented LLM Inference via KV-Activation Hybrid Caching with a Single GPU", Lee
et al.), sections III-C and IV. The zig-zag order is FlexGen's (Sheng et al., ICML '23).

    python 08_hybrid_blocks.py --demo
    python 08_hybrid_blocks.py --policy kv-only            # the server, on http://127.0.0.1:5000
"""

if __name__ == "__main__":
    import shell.start  # noqa: F401  (before PyTorch: its settings, and signals)

import argparse
import copy
import importlib
import math
import random
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
from common.requests import Interrupted, Request
from common.timeline import Clock, Timeline
from shell import charts, checkpoint, cli, hardware, lesson, modelled_link
from shell.frontend import Frontend
from shell.linear import speed_up

paged = importlib.import_module("02_paged_kv")
KV_HOST, ACT_HOST, KV_DEVICE, ACT_DEVICE = KINDS = range(4)  # the odd ones are ACT
POLICIES = "hybrid", "kv-only", "act-only", "paper"
ATTEMPTS = 3  # how often a step is run if a copy fails
ROWS = 1024  # tokens that are projected at once, so that temporary tensors stay small
PROBE = 2048  # tokens of context in the steps that measure costs at the start

# 1. How much of what ---------------------------------------------------------------------------

class Costs(NamedTuple):
    """Costs of a decode step: the speed of the link, and the seconds of two kinds of work in one layer."""

    speed: float  # bytes per second
    forward: float  # seconds for all new tokens, including attention and a share of the output head
    rebuild: float  # seconds to project the activations of one block to K and V


class Sizes(NamedTuple):
    """Bytes of one layer's weights, and bytes of an ACT block and of a KV block in all layers."""

    weights: int
    act: int
    kv: int


class Plan(NamedTuple):
    """How memory is used: the number of layers whose weights stay on the device, and of blocks of each
    kind."""

    resident: int
    kv_host: int
    act_host: int
    kv_device: int
    act_device: int

    def with_acts(self, count: int) -> "Plan":
        """Return a plan with `count` of the host's KV blocks replaced by ACT blocks."""
        return self._replace(kv_host=self.kv_host - count, act_host=self.act_host + count)


def algorithm_1(load_w, kv_gen, load_kv, act_gpu, host, weights, act, kv) -> tuple[float, float]:
    """Divide host memory by CAPTURE's Algorithm 1, as printed in the paper.

    `load_w`: seconds to load a layer's weights; `kv_gen`: to rebuild a block; `load_kv`: to load a KV block.
    `act_gpu`: number of ACT blocks on the device. `host`, `weights`, `act`, `kv`: bytes of host memory, of
    all weights, of an ACT block, of a KV block.

    Returns: the numbers of ACT blocks and of KV blocks in host memory, as floats."""
    # Lines 11 to 18: the link loads the weights while the processor rebuilds the device's ACT blocks. Give
    # blocks of the host to the lane that finishes first, until both finish together
    budget = load_w - kv_gen * act_gpu
    act_init = max(0.0, budget / kv_gen)
    kv_init = max(0.0, -budget / load_kv)
    # Lines 20 to 26: fill the remaining memory. Both lanes stay equal: kv_gen * #ACT = load_kv * #KV
    remaining = host - weights - (act * act_init + kv * kv_init)
    kv_per_act = kv_gen / load_kv
    act_remain = remaining / (act + kv * kv_per_act)
    return act_init + act_remain, kv_init + kv_per_act * act_remain


class Planner(NamedTuple):
    """Finds a Plan for `device` bytes of device memory and a pool of `blocks` blocks.

    `layers`: number of the model's layers. `block_size`: tokens per block. `fill`: the share of the blocks
    that is in use (0 to 1)."""

    policy: str
    costs: Costs
    sizes: Sizes
    layers: int
    blocks: int
    device: int
    block_size: int = 16
    fill: float = 1.0

    def lane_seconds(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of a decode step on the link and on the processor, each without waits."""
        costs, sizes = self.costs, self.sizes
        size = (self.layers - plan.resident) * sizes.weights
        size += self.fill * (sizes.kv * plan.kv_host + sizes.act * plan.act_host)
        acts = self.fill * (plan.act_host + plan.act_device)
        return size / costs.speed, self.layers * (costs.forward + costs.rebuild * acts)

    def seconds(self, plan: Plan) -> float:
        """Estimate the seconds of a decode step, layer by layer, with the waits of the lanes for each other.

        While a layer is computed, the link copies a share of the next streamed layer's weights (`stream`) and
        then the next layer's context, ACT blocks first. Uneven shares make a lane wait."""
        load, compute = (lane / self.layers for lane in self.lane_seconds(plan))
        weights = self.sizes.weights / self.costs.speed
        context = link = load - weights * (1 - plan.resident / self.layers)  # link: the time when it is free
        kv, now = self.fill * self.sizes.kv * plan.kv_host / self.layers / self.costs.speed, 0.0
        for share in stream(self.layers, plan.resident)[1]:
            arrived, link = link, max(link, now) + weights * share + context
            now = max(max(now, arrived - kv) + compute - self.costs.forward, arrived) + self.costs.forward
        return max(now, link - context)

    def speed_for(self, f: float, blocks: float) -> float:
        """Return the link speed, in bytes per second, at which loading takes `f` times as long as computing.

        Loading means all weights, and `blocks` blocks as KV blocks. Computing means a decode step in which
        `blocks` blocks are rebuilt from ACT blocks."""
        size = self.layers * self.sizes.weights + blocks * self.sizes.kv
        return size / f / (self.layers * (self.costs.forward + blocks * self.costs.rebuild))

    def paper_plan(self) -> Plan:
        """Plan as the paper does. Fill the device with ACT blocks, which are rebuilt while weights are
        copied. Divide the other blocks by the ratio (equation 5) that Algorithm 1 finds for host memory that
        just holds the weights and these blocks as KV blocks."""
        costs, sizes = self.costs, self.sizes
        act_device = min(self.blocks, max(0, self.device - 2 * sizes.weights) // sizes.act)
        rest, weights = self.blocks - act_device, self.layers * sizes.weights
        times = sizes.weights / costs.speed, costs.rebuild, sizes.kv / self.layers / costs.speed
        shares = algorithm_1(*times, act_device, weights + rest * sizes.kv, weights, sizes.act, sizes.kv)
        act, kv = (max(0.0, share) for share in shares)  # lines 11 to 18 may need more memory than there is
        act_host = round(rest * act / (act + kv))
        return Plan(0, rest - act_host, act_host, 0, act_device)

    def plan(self) -> Plan:
        """Find the plan with the shortest decode step; among ties, the one that computes least. Raises
        ModelError if the device has no room for two layers of weights.

        Differences from the paper:

        - Equations 2 and 3 leave out the copies of ACT blocks, attention, the matrix products of the new
          tokens, and the cost of each mini-batch. Here all of these count.
        - The device may also hold weights or KV blocks, because each byte that stays there need not be copied
          over the link.
        - The estimate includes the waits of the lanes for each other in each layer (`seconds`). The paper
          compares only the sums of their work.
        - The number of blocks is given. Algorithm 1 fills all of the host's memory with blocks.

        If ACT blocks are no smaller than KV blocks, as usual with grouped-query attention, `hybrid` finds the
        same plan as `kv-only`."""
        least = min(2, self.layers) * self.sizes.weights
        if self.device < least:
            raise checkpoint.ModelError(f"Two layers take {least / 1e6:.1f} MB; enlarge --device-memory.")
        if self.policy == "paper":
            return self.paper_plan()
        acts = {"kv-only": [0], "act-only": [self.blocks]}.get(self.policy, range(self.blocks + 1))
        plans = [plan for plan in self.divisions() if plan.act_host + plan.act_device in acts]
        return min(plans, key=lambda plan: (self.seconds(plan), self.lane_seconds(plan)[1], plan))

    def divisions(self):
        """Yield candidate plans. For each number of resident layers, fill the rest of the device with KV or
        with ACT blocks. For each of these, yield the best mix of host blocks and both plans without a mix."""
        for resident in range(self.layers + 1):
            # Weights that are not resident need buffers for two layers
            left = self.device - self.sizes.weights * (resident + 2 * (resident < self.layers))
            for on_device in ((left // self.sizes.kv, 0), (0, left // self.sizes.act)) if left >= 0 else ():
                kv, act = (min(self.blocks, count) for count in on_device)
                plan = Plan(resident, self.blocks - kv - act, 0, kv, act)
                # With more ACT blocks the time first falls, then rises. Find the first block that saves
                # nothing
                best = bisect_left(range(plan.kv_host), -1e-12, key=partial(self.another_act, plan))
                yield from map(plan.with_acts, (0, best, plan.kv_host))

    def another_act(self, plan: Plan, count: int) -> float:
        """Return by how many seconds a decode step becomes longer if one more KV block of the host becomes an
        ACT block. The result is negative if that saves time."""
        return self.seconds(plan.with_acts(count + 1)) - self.seconds(plan.with_acts(count))

    def with_samples(self, samples: list[tuple]) -> "Planner":
        """Return a planner with costs learned from decode steps: the medians of `samples`. Each is (blocks in
        use, seconds to rebuild one block in a layer or 0, seconds of the rest of a layer)."""
        blocks, rebuilds, forwards = zip(*samples)
        rebuild = statistics.median([*filter(None, rebuilds)] or [self.costs.rebuild])
        costs = self.costs._replace(forward=statistics.median(forwards), rebuild=rebuild)
        return self._replace(costs=costs, fill=min(1.0, statistics.median(blocks) / self.blocks))


# 2. Weights ------------------------------------------------------------------------------------

def stream(layers: int, resident: int) -> tuple[list[int], list[float]]:
    """Spread the `resident` layers evenly over all `layers`.

    Returns: the streamed layers, whose weights are copied over the link in each step; and for each layer the
    share of the next streamed layer's weights that is copied while this layer is computed."""
    kept, shares = {number * layers // resident for number in range(resident)}, layers * [0.0]
    streamed = sorted({*range(layers)} - kept)
    for previous, index in zip([at - layers for at in streamed[-1:]] + streamed, streamed):
        for at in range(previous, index):  # a negative `at` is a layer of the previous step
            shares[at] = 1 / (index - previous)
    return streamed, shares


class Weights:
    """The weights of all layers in host memory, and copies of `resident` of them on the device.

    The other layers are streamed: their weights are copied in portions into one of two device buffers while
    earlier layers are computed. Portions let the context be copied in between."""

    def __init__(self, model: Llama, resident: int, link):
        self.link, self.host, self.issued = link, model.layers, []  # issued: transfers of this step
        for parameter in model.layers.parameters():
            if model.device.type == "cuda" and not parameter.is_pinned():
                memory = links.host_memory(parameter.shape, model.dtype, model.device, "A weight")
                parameter.data = memory.copy_(parameter)
        self.streamed, self.shares = stream(len(self.host), resident)
        self.resident = {at: self.new_layer(model) for at in {*range(len(self.host))} - {*self.streamed}}
        for index, layer in self.resident.items():
            for parameter, weight in zip(layer.parameters(), self.host[index].parameters()):
                parameter.data = weight.data.to(model.device)
        self.buffers = [self.new_layer(model) for _ in range(2 if self.streamed else 0)]  # in use, filling
        self.fetch_next(-1)

    @staticmethod
    def new_layer(model: Llama) -> Layer:
        """Allocate a layer on the device."""
        kind = type(model.layers[0])
        layer = kind(model.config, dtype=model.dtype, device=model.device).requires_grad_(False)
        group = getattr(model.head, "group", 0)  # the products of the host's layers
        return speed_up(layer, copies=False, same_bits=model.same_bits, group=group)

    def fetch_next(self, after: int):
        """Prepare to fetch the first streamed layer after layer `after`. At the start and after a failure,
        `after` is -1, which selects the first streamed layer of all."""
        later = [index for index in self.streamed if index > after]
        self.next_streamed, self.sent, self.transfers = (later + self.streamed + [0])[0], 0.0, []

    def fetch(self, share: float):
        """Issue the copy of a share (0 to 1) of the next streamed layer, which is this share of the rows of
        each of its weights. If fewer rows are left, copy all that are left."""
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
        """Wait for the copy of layer `index`, if it is streamed, and return the layer. The next copy
        goes to the buffer of the streamed layer before this one."""
        if index in self.resident:
            return self.resident[index]
        self.fetch(1.0)
        await_transfers(self.transfers)
        self.buffers.reverse()
        self.fetch_next(index)
        return self.buffers[0]


def await_transfers(transfers: list):
    """Make the work that is queued next wait for transfers. If that is not possible (without a GPU), block
    the host until they are complete."""
    for transfer in transfers:
        if not transfer.queue_wait():
            transfer.wait()


# 3. Mini-batches -------------------------------------------------------------------------------

class Item(NamedTuple):
    """The tokens of one request that a step computes: `start` to `end`."""

    request: Request
    start: int  # number of tokens of context, which are computed already
    end: int  # number of tokens, the new ones included


def form_batches(items: list[Item], rows: int) -> list[list[Item]]:
    """Pack requests into few mini-batches of similar length. A mini-batch has at most `rows` tokens, or only
    one request. Each request has about the plan's ratio of kinds, so in each mini-batch rebuilding and
    loading take about equally long."""
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
    """Maps each block number of the pool to a kind of block and to a number within that kind. The kinds are
    spread evenly: any run of block numbers has the plan's ratio (equation 5), within about one block."""

    def __init__(self, plan: Plan, block_size: int):
        self.block_size, counts = block_size, plan[1:]
        positions = [(torch.arange(count) + 0.5) / max(1, count) for count in counts]
        order = torch.cat(positions).argsort(stable=True)
        self.kinds = torch.arange(len(KINDS)).repeat_interleave(torch.tensor(counts))[order]  # [blocks]
        self.numbers = torch.cat([torch.arange(count) for count in counts])[order]  # [blocks]

    def slots(self, table: list[int], positions):
        """Look up the tokens at `positions` [n] of a block table.
        Returns: their kinds [n], and their slots [n] in the memory of their kind."""
        blocks = torch.tensor(table, dtype=torch.long)[positions // self.block_size]
        return self.kinds[blocks], self.numbers[blocks] * self.block_size + positions % self.block_size


def form_paper_batches(planner: Planner, kind_map: KindMap, items: list[Item], rows: int) -> list[list[Item]]:
    """Form the paper's mini-batches (section IV-C-3).

    Add to the current mini-batch the first request that fits and does not increase the imbalance of its
    lanes. A request that leaves the imbalance as it is may be added, because equation 5 makes this the usual
    case, and the paper wants few mini-batches. If no request can be added, the first request that is left
    begins the next mini-batch, whether it fits or not.

    The paper limits the numbers of ACT blocks and of KV blocks separately. Here their sum is limited, because
    both kinds share the rows of one attention buffer."""
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
    """Tokens whose blocks are of one kind. All tensors are [n]."""

    slots: torch.Tensor  # in the memory of their kind
    rows: torch.Tensor  # of the attention buffer; for new tokens, of the mini-batch
    positions: torch.Tensor
    pairs: links.BlockPairs  # copies slots to rows; for new tokens, copies the n computed rows to slots


def by_kind(kinds, slots, rows, positions, device, new=False):
    """Split n tokens by the kinds of their blocks, and yield one Tokens for each kind. `kinds`, `slots`,
    `rows`, `positions`: [n]. `new`: the tokens are computed in this step, and are copied to their slots."""
    for kind in KINDS:
        mine = kinds == kind
        tokens = slots[mine], rows[mine], positions[mine]
        sides = (tokens[0], torch.arange(len(tokens[0]))) if new else (tokens[1], tokens[0])
        yield Tokens(*(upload(each, device) for each in tokens), links.BlockPairs(*sides))


class MiniBatch:
    """Some of a step's requests, which are computed together. Each request has a range of rows in the
    attention buffer, in the order of its tokens. (Attention adds in the order of keys, so another order would
    give other bits.)"""

    def __init__(self, items: list[Item], kind_map: KindMap, model: Llama):
        self.items, self.device, self.rows_used = items, model.device, 0
        tokens, context, new = [], [], []
        for request, start, end in items:
            positions = torch.arange(end)
            rows = self.rows_used + positions  # rows of the attention buffer
            where = torch.stack((*kind_map.slots(request.table, positions), rows, positions))  # [4, end]
            context.append(where[:, :start])
            new.append(where[:, start:])
            tokens += request.tokens[start:end]
            self.rows_used += end
        self.context = [*by_kind(*torch.cat(context, 1), self.device)]
        kinds, slots, rows, positions = torch.cat(new, 1)  # [T] each
        self.new = [*by_kind(kinds, slots, torch.arange(len(tokens)), positions, self.device, new=True)]
        self.rows = upload(rows, self.device)
        self.same_bits, self.hidden = model.same_bits, model.embed(upload(tokens, self.device))  # [T, D]
        self.rotation = model.rotary(upload(positions, self.device))

    def attend(self, kv, q, new_kv):
        """Write the new K and V, `new_kv` [T, 2, KVH, hd], into the attention buffer `kv` [rows, 2, KVH, hd]
        and attend with q [T, H, hd]. Returns: [T, H, hd]."""
        kv.index_copy_(0, self.rows, new_kv)
        out, at, row = [], 0, 0
        for _, start, end in self.items:
            count, mask = end - start, causal_mask(end - start, end, self.device, q.dtype, self.same_bits)
            keys, values = kv[row : row + end].unbind(1)  # [S, KVH, hd] each
            out.append(attention(q[at : at + count], keys, values, mask))
            at, row = at + count, row + end
        return torch.cat(out)


# 4. The runner ---------------------------------------------------------------------------------

class HybridRunner:
    """A Runner of chapter 02's engine that computes in mini-batches. Its pool has block numbers only; the
    numbers stand for blocks of four kinds (KINDS), and each kind has a memory of its own."""
    pieces = None  # no CUDA graphs, because streamed weights change their device address

    def __init__(self, model: Llama, plan: Plan, bandwidth, block_size=16, rows=8192):
        """`bandwidth`: of a modelled link, in bytes per second; None on a GPU. `rows`: how many tokens
        the attention buffer holds, new ones included (at least the model's context)."""
        self.model, self.plan, self.form_batches = model, plan, form_batches
        self.kind_map = KindMap(plan, block_size)
        self.rows = max(rows, model.config.max_position_embeddings)
        self.pool = paged.BlockPool(sum(plan[1:]), block_size)
        self.arrivals = ()  # the engine's, so that a pass sees which requests were cancelled
        self.clock = Clock(model.device)
        self.load_link = hardware.connect("load", self.clock, bandwidth)
        self.save_link = hardware.connect("save", self.clock, bandwidth)
        empty = partial(torch.empty, dtype=model.dtype, device=model.device)
        on_host = partial(links.host_memory, dtype=model.dtype, device=model.device, what="The host's blocks")
        # Shapes of one token's KV and of its ACT
        shapes = (2, model.config.num_key_value_heads, model.config.head_dim), (model.config.hidden_size,)
        self.buffers = [[empty((self.rows, *shape)) for shape in shapes] for _ in range(2)]  # in use, filling
        # Of the last step: its mini-batches, (label, start, end) of its work, and its transfers. Then the
        # transfers of the step before it
        self.last, self.marks, self.transfers, self.earlier = [], [], [], []
        self.weights, self.memory = Weights(model, plan.resident, self.load_link), []
        for kind, count in enumerate(plan[1:]):
            shape = len(model.layers), count * block_size, *shapes[kind % 2]
            allocate = on_host if kind in (KV_HOST, ACT_HOST) else empty
            self.memory.append(allocate(shape))  # [L, slots, 2, KVH, hd] or [L, slots, D]
        self.pool.block_bytes = sum(memory.nbytes for memory in self.memory) // max(1, self.pool.size)

    @torch.inference_mode()
    def forward(self, work: list, before_layer=None):
        """Called by the engine for each step. `work`: (request, count) pairs: compute the next `count` tokens
        of each request.

        Returns: a batch whose `work` is in the order of mini-batches, and logits [R, V]. If a copy fails, run
        the step again, because its writes are idempotent; after ATTEMPTS failures, raise TransferError."""
        for attempt in range(ATTEMPTS):
            self.marks, self.transfers, self.earlier = [], [], self.transfers
            self.weights.issued = self.transfers
            try:
                self.last, logits = self.step(work)
                break
            except Exception as error:
                self.forget()
                if attempt + 1 == ATTEMPTS or not isinstance(error, links.TransferError):
                    raise
        items = [item for batch in self.last for item in batch.items]
        return SimpleNamespace(work=[(item.request, item.end - item.start) for item in items]), logits

    def step(self, work: list) -> tuple:
        """Compute a step. Returns: its mini-batches, and logits [R, V]."""
        # 1. Form mini-batches
        items = [Item(one, one.computed, one.computed + count) for one, count in work]
        batches = [MiniBatch(some, self.kind_map, self.model) for some in self.form_batches(items, self.rows)]
        arrival, total, self.saves = self.copy_in(0, batches[0]), sum(one.rows_used for one in batches), []

        # 2. Go through the layers, and in each layer through the mini-batches. While one mini-batch is
        #    computed, copy the context of the next one and a portion of the next streamed layer's weights.
        #    After the last streamed layer, begin to copy the first one for the next step
        order = [(index, batch) for index in range(len(self.model.layers)) for batch in batches]
        for (index, batch), following in zip(order, [*order[1:], None]):
            # End the step if most of its tokens are those of cancelled requests. The next step has less than
            # half of the tokens, so all steps that end early cost the others less than this step
            cancelled = [request for request, error in list(self.arrivals) if error]
            if sum(count if request in cancelled else -count for request, count in work) > 0:
                raise Interrupted
            if batch is batches[0]:
                layer = self.weights.layer(index)
                layer.index = index
            self.weights.fetch(batch.rows_used / total * self.weights.shares[index])
            next_arrival = self.copy_in(*following) if following else None
            kv = self.rebuild(index, layer, *arrival)
            self.compute(index, layer, batch, kv)
            arrival = next_arrival

        # 3. Compute the logits of each request's last token, and wait until new tokens are in their blocks
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
        """Issue the copies of a mini-batch's host context in layer `index`, to its rows of the buffers.

        Returns: the arguments of `rebuild`: the mini-batch, the buffers [rows, 2, KVH, hd] and [rows, D], and
        lists of the transfers of ACT and of KV."""
        # Fill the pair that was filled longer ago: all work that reads it is queued already, and the copies
        # wait for queued work
        kv, act = self.buffers[0]
        self.buffers.reverse()
        copies = []
        for kind, into, label in (ACT_HOST, act, "act"), (KV_HOST, kv, "kv"):
            memory, tokens = self.memory[kind][index], batch.context[kind]
            is_empty = not len(tokens.slots)
            copies.append([] if is_empty else [self.load_link.copy(into, memory, label, tokens.pairs)])
            self.transfers += copies[-1]
        return batch, kv, act, *copies

    def rebuild(self, index: int, layer: Layer, batch: MiniBatch, kv, act, act_copies, kv_copies):
        """Complete the K and V of a mini-batch's context: copy the device's KV blocks, project its ACT
        blocks, then wait for the host's blocks. Returns: the attention buffer `kv`, [rows, 2, KVH, hd]."""
        kvs, acts, host = (batch.context[kind] for kind in (KV_DEVICE, ACT_DEVICE, ACT_HOST))
        kv.index_copy_(0, kvs.rows, self.memory[KV_DEVICE][index].index_select(0, kvs.slots))
        if len(acts.slots):
            self.project(layer, self.memory[ACT_DEVICE][index], acts.slots, acts, kv)
        await_transfers(act_copies)
        if len(host.slots):
            self.project(layer, act, host.rows, host, kv)
        await_transfers(kv_copies)
        return kv

    def project(self, layer: Layer, states, where, tokens: Tokens, kv):
        """Project the rows `where` [n] of `states` [., D] to K and V. Write them to the rows of `tokens` in
        `kv`, [rows, 2, KVH, hd]."""
        began = self.clock.mark()
        portions = (each.split(ROWS) for each in (where, tokens.rows, tokens.positions))
        for slots, rows, positions in zip(*portions):
            new_kv = layer.project_kv(states.index_select(0, slots), self.model.rotary(positions))
            for side, values in zip(kv.unbind(1), new_kv):
                side.index_copy_(0, rows, values)
        self.marks.append(("rebuild", began, self.clock.mark()))

    def compute(self, index: int, layer: Layer, batch: MiniBatch, kv):
        """Compute layer `index` for the new tokens of a mini-batch. Store their K and V in KV blocks, or the
        layer's input in ACT blocks."""
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
        """Wait until all transfers have completed or failed, and discard them. The next step fetches
        everything again."""
        for transfer in [*self.earlier, *self.transfers]:
            with suppress(links.TransferError):
                transfer.wait()
        self.weights.fetch_next(-1)
        self.marks, self.transfers, self.earlier = [], [], []

    def step_costs(self) -> tuple:
        """Return a sample for `Planner.with_samples` from the last step, in which all requests decoded."""
        layers, size, seconds = len(self.model.layers), self.pool.block_size, dict(rebuild=0.0, forward=0.0)
        for label, began, ended in self.marks:
            seconds[label] += self.clock.seconds(ended) - self.clock.seconds(began)
        blocks = [sum(len(batch.context[kind].slots) for batch in self.last) / size for kind in KINDS]
        acts = layers * (blocks[ACT_HOST] + blocks[ACT_DEVICE])
        return sum(blocks), seconds["rebuild"] / acts if acts else 0.0, seconds["forward"] / layers


# 5. The engine, and measuring its costs --------------------------------------------------------

def sizes_of(model: Llama, block_size: int) -> Sizes:
    """Return the bytes of the model's layers and blocks."""
    config, numbers = model.config, sum(parameter.numel() for parameter in model.layers[0].parameters())
    act, kv = config.num_hidden_layers * config.hidden_size, config.kv_numbers_per_token
    return Sizes(*(count * model.dtype.itemsize for count in (numbers, block_size * act, block_size * kv)))


def make_runner(planner: Planner, model: Llama, bandwidth, rows=8192) -> HybridRunner:
    """Make a runner with the planner's plan. Policy `paper` also uses the paper's mini-batches."""
    runner = HybridRunner(model, planner.plan(), bandwidth, planner.block_size, rows)
    if planner.policy == "paper":
        runner.form_batches = partial(form_paper_batches, planner, runner.kind_map)
    return runner


def decode_engine(runner: HybridRunner, contexts: list[int]) -> paged.Engine:
    """Make an engine for timing decode steps: one running request for each of `contexts` (tokens), whose
    blocks are filled with a constant."""
    engine = paged.Engine(runner, max_running=len(contexts))
    for memory in runner.memory:
        memory.fill_(0.1)
    for number, context in enumerate(contexts):
        request = Request([(number + 7 * at) % 251 for at in range(context + 1)], 1 << 20)
        engine.waiting.append(request)
        engine.admit(request)
        request.computed = request.next = context
    return engine


def measure(planner: Planner, model: Llama, bandwidth, contexts: list[int], rows=8192) -> Planner:
    """Run a few decode steps. Returns: `planner` with their costs. Raises ModelError if a step fails."""
    engine, samples = decode_engine(make_runner(planner, model, bandwidth, rows), contexts), []
    for _ in range(8):
        engine.step()
        if not engine.running:
            words = "A measured decode step has failed; choose fewer --blocks or a smaller --mini-batch."
            raise checkpoint.ModelError(words)
        samples.append(engine.runner.step_costs())
    engine.runner.forget()
    engine.runner = None  # free its memory now; the engine itself waits for the garbage collector
    return planner.with_samples(samples[1:])


def make_planner(model: Llama, arguments) -> tuple[Planner, modelled_link.Bandwidth | None]:
    """Make a planner from the command line's options. Its costs are measured in decode steps with ACT blocks
    only. Returns: the planner, and the modelled link's bandwidth (None on a GPU). Raises ModelError."""
    size, layers, sizes = arguments.block_size, len(model.layers), sizes_of(model, arguments.block_size)
    useful = arguments.max_running * -(-model.config.max_position_embeddings // size)
    largest = max(sizes.kv, sizes.act) if arguments.policy in ("act-only", "paper") else sizes.kv
    blocks = cli.blocks_that_fit(arguments.blocks, useful, largest, torch.device("cpu"), "--blocks")
    device = 1e9 * arguments.device_memory if arguments.device_memory else (layers // 2 + 2) * sizes.weights
    if sizes.act >= sizes.kv:
        print("Query heads share KV heads: ACT blocks are the larger ones; keep KV blocks.", file=sys.stderr)
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
    held = requests * (1 + -(-(tokens + 8) // size))  # 8 steps are measured, with one more token in each
    probe = planner._replace(policy="act-only", device=2 * sizes.weights, blocks=held)
    unlimited = bandwidth and modelled_link.Bandwidth(math.inf)
    probe = measure(probe, model, unlimited, requests * [tokens], arguments.mini_batch)
    return planner._replace(costs=probe.costs), bandwidth


def make_engine(model: Llama, arguments) -> paged.Engine:
    """Make chapter 02's engine with this chapter's Runner, and print its plan to stderr. The model's layers
    must be in host memory."""
    planner, bandwidth = make_planner(model, arguments)
    runner = make_runner(planner, model, bandwidth, arguments.mini_batch)
    plan = runner.plan
    engine = paged.Engine(runner, None, arguments.token_budget, arguments.max_running)
    engine.explain, runner.arrivals = arguments.explain, engine.arrivals
    weights, act, kv = (size / 1e6 for size in planner.sizes)
    print(
        f"Device: {plan.resident} of {planner.layers} layers of {weights:.1f} MB, {plan.kv_device} KV and "
        f"{plan.act_device} ACT blocks. Host: {plan.kv_host} KV and {plan.act_host} ACT\n"
        f"blocks of {kv:.3f} and {act:.3f} MB; {runner.load_link}",
        file=sys.stderr,
    )
    return engine


# 6. The demo -----------------------------------------------------------------------------------

GEOMETRY, CONTEXTS = "random:long", 16 * [128]  # timed decode steps: the model, and each request's tokens
FACTORS = 1.25, 2.5  # values of f, see `Planner.speed_for`


def one_step(engine: paged.Engine) -> tuple[float, Timeline]:
    """Time a decode step. Returns: its seconds, and a timeline of its lanes."""
    engine.step()  # not timed: its first copies began while another engine computed
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
    """Answer a batch under each policy. Then time decode steps of a larger model over two links."""
    # 1. Ask in six conversations at once
    rng, new, asked = random.Random(0), max(4, min(arguments.max_tokens, 8)), []
    talks = [lesson.conversation(frontend, rng, min(128, frontend.context // 16)) for _ in range(6)]
    options = vars(arguments) | dict(policy="hybrid", max_running=6, blocks=6 * 32, mini_batch=1024)
    # On a GPU, limit device memory, because everything would fit there. One more byte allows for rounding
    if (real := model.device.type == "cuda"):
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
    print(f"Decode steps of {batch} requests behind {CONTEXTS[0]} tokens each, on {GEOMETRY} (the other is "
          f"too small).\n{'As above, the' if real else 'The'} device has room for {layers // 2} of {layers} "
          f"layers of {planner.sizes.weights / 1e6:.1f} MB and two streamed ones, or for blocks.")
    print("f: time to load all weights and all context as KV blocks, over time to compute with ACT blocks")
    for f in FACTORS if model.device.type == "cpu" else (None,):
        if f:
            bandwidth = modelled_link.Bandwidth(planner.speed_for(f, blocks))
            planner = planner._replace(costs=planner.costs._replace(speed=bandwidth.value))
        found, link, timeline = time_policies(measure(planner, big, bandwidth, CONTEXTS), big, bandwidth, f)
        rows += found
    print("(w: weights, k: KV, a: ACT blocks; s: new tokens; r: rebuild, f: forward)\n")
    print("Only the slower lane counts; a plan may lose if other programs take the cores. What if one\n"
          "device or its link is too slow? Chapter 09 divides over several devices what a chapter keeps.")
    return dict(link=link, verified=verified, rows=rows), [timeline, asked[0].timeline]


def time_policies(planner: Planner, model: Llama, bandwidth, f: float | None) -> tuple:
    """Time decode steps under each policy in turn, and print a table.
    Returns: the rows, the link, and a timeline of `hybrid`."""
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
        busy = f"link {row['load']:4.0%}, processor {row['compute']:4.0%}"
        kept = f"{row['act']:4.0%} ACT; on the device {plan.resident} layers and {sum(plan[3:])} blocks"
        print(f"  {row['case']:8} busy: {busy}; {kept}")
    hybrid, kv, act, _ = (row["tokens_per_second"] for row in rows)
    why = "one kind alone leaves a lane idle" if 0.1 < rows[0]["act"] < 0.9 else "there is little to mix"
    gains = f"{hybrid / kv:.2f}x kv-only and {hybrid / act:.2f}x act-only"
    print(f"  hybrid: {gains}. Planned with {rows[0]['act']:.0%} ACT blocks: by the measured costs {why}")
    print(charts.chart(timeline := taken["hybrid"][-1][1]))
    return rows, link, timeline


# 7. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    number, gigabytes = partial(cli.bounded, int, 1), cli.bounded(float, 1e-6, 1e6)
    add, words = parser.add_argument, "how to keep the context (hybrid); paper: by CAPTURE's algorithm"
    add("--policy", choices=POLICIES, default="hybrid", help=words)
    words = "device memory for weights and blocks (a GPU's free memory; without a GPU half of the layers)"
    add("--device-memory", type=gigabytes, metavar="GB", help=words)
    add("--blocks", type=number(1 << 24), metavar="N", help="blocks of all kinds (as many as are useful)")
    words = "tokens of a mini-batch, context included (8192)"
    add("--mini-batch", type=number(1 << 20), metavar="TOKENS", default=8192, help=words)
    add("--block-size", type=number(1 << 16), metavar="N", default=16, help="tokens per block (16)")
    add("--token-budget", type=number(1 << 20), metavar="N", default=8192, help="tokens per step (8192)")
    add("--max-running", type=number(1 << 12), metavar="N", default=64, help="requests that run at once (64)")
    hardware.add_link(parser)


def load(name: str, dtype: str = "auto", device: str = "auto", same_bits: bool = False):
    """Load a model as `checkpoint.load` does, but leave the weights of its layers in host memory."""
    loaded = checkpoint.load(name, dtype, device, on_host=True, same_bits=same_bits)
    layers_on_host(loaded[0], checkpoint.pick_device(device))
    return loaded


def layers_on_host(model: Llama, device: str):
    """Prepare a model in host memory to compute on `device`: move everything there but its layers."""
    model.device = torch.device(device)
    for part in model.rotary, model.norm, model.head:
        part.to(device)
    model.embedding = torch.nn.Parameter(model.embedding.to(device), requires_grad=False)
    if model.config.tie_word_embeddings:
        model.head.weight = model.embedding


if __name__ == "__main__":
    cli.main(__doc__, "08_hybrid_blocks", add_arguments, make_engine, demo, load=load)
