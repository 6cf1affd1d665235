"""Chapter 08: even the weights live in host memory, and some of the context is kept as activations.

The problem. A model that is larger than the device, and a large batch that nobody waits for, one answer at a
time. In every decode step each layer's weights and all of its K and V come over the link. The link is the
bottleneck, and the processor idles.

The mechanism. Part of the context is kept as activations, the inputs of the layers (ACT blocks), the rest as
K and V (KV blocks). With multi-head attention an ACT block has half the bytes of a KV block, and K and V are
rebuilt from it while the link brings the next weights and blocks. With the right share of ACT blocks both
lanes take equally long:

    link          weights + KV blocks + ACT blocks of the host
    processor     K and V rebuilt from ACT blocks + attention + the rest of the layer, for the new tokens

    one layer, a the share of ACT:  link  W + K - aK/2 - M      processor  B + aR      M: the device's memory

Layer by layer the batch passes in mini-batches (zig-zag), so that one fetch of the weights serves all of
them; while one is computed, the next one's context arrives. A step whose copies fail has not happened, and is
run again.

The engine of chapter 02 knows nothing of this. Its pool has numbers only; which kind of block a number stands
for, and where it is, was dealt before, evenly, so that any run of numbers has about the plan's ratio:
prompts, appended blocks and shared prefixes alike. The plan (section 1) spends the device's memory on whole
layers of weights, on KV blocks or on ACT blocks. A resident byte saves a byte of link, whatever it holds.

Source: CAPTURE ("Throughput-Oriented LLM Inference via KV-Activation Hybrid Caching with a Single GPU", Lee
et al.), sections III-C and IV. The zig-zag order is FlexGen's (Sheng et al., ICML '23).

    python 08_hybrid_blocks.py --demo
    python 08_hybrid_blocks.py --input requests.jsonl --output replies.jsonl
    python 08_hybrid_blocks.py --policy kv-only            # the server, on http://127.0.0.1:5000
"""

import argparse
import copy
import functools
import importlib
import math
import random
import statistics
import sys
import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common import checkpoint, cli, lesson
from common import link as links
from common.llama import Layer, Llama, LlamaConfig
from common.requests import Frontend, Request
from common.timeline import Clock, Timeline
from tools import random_models

paged = importlib.import_module("02_paged_kv")
KV_HOST, ACT_HOST, KV_DEVICE, ACT_DEVICE = KINDS = range(4)
POLICIES = "hybrid", "kv-only", "act-only", "paper"
ROWS = 1024  # tokens that are projected at once: what is temporary stays small
SPARE = 32  # tokens by which a request's part of the attention buffer grows
PROBE = 2048  # tokens of context with which costs are measured before the first step
GAIN = 0.97  # blocks are dealt anew for a step that takes at most this share of the time

# 1. How much of what ---------------------------------------------------------------------------

class Costs(NamedTuple):
    """Seconds in one layer of a decode step; the last three for a block."""

    load_weights: float  # T_load_w
    forward: float  # the new tokens: products, attention, what each mini-batch costs, a share of the head
    rebuild: float  # T_kv_gen
    load_act: float
    load_kv: float  # T_load_kv


class Sizes(NamedTuple):
    """Bytes of a layer's weights, and of a block in all layers."""

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


def algorithm_1(load_w, kv_gen, load_kv, act_gpu, host, weights, act, kv) -> tuple[float, float]:
    """CAPTURE's Algorithm 1, as it is printed -> ACT and KV blocks of host memory. `load_w`: seconds for a
    layer's weights; `kv_gen`, `load_kv`: seconds a block to rebuild and to load; `act_gpu`: ACT blocks on the
    device; `host`, `weights`, `act`, `kv`: bytes of host memory, of all weights, of a block."""
    # Lines 11 to 18: fill the lane that is idle while weights come and the device's blocks are rebuilt
    act_init = kv_init = 0.0
    budget = load_w - kv_gen * act_gpu
    if budget >= 0:
        act_init = budget / kv_gen
    else:
        kv_init = -budget / load_kv
    # Lines 20 to 26: divide the remaining memory so that kv_gen * #ACT = load_kv * #KV
    remaining = host - weights - (act * act_init + kv * kv_init)
    kv_per_act = kv_gen / load_kv
    act_remain = remaining / (act + kv * kv_per_act)
    return act_init + act_remain, kv_init + kv_per_act * act_remain


class Planner(NamedTuple):
    """How to divide a pool of `blocks`, of which a share `fill` is in use, and `device` bytes."""

    policy: str
    costs: Costs
    sizes: Sizes
    layers: int
    blocks: int
    device: int
    block_size: int = 16
    fill: float = 1.0

    def lanes(self, plan: Plan) -> tuple[float, float]:
        """Seconds of a decode step on the link and on the processor; the larger one is the bound."""
        costs, fill = self.costs, self.fill
        link = (self.layers - plan.resident) * costs.load_weights
        link += self.layers * fill * (costs.load_kv * plan.kv_host + costs.load_act * plan.act_host)
        acts = plan.act_host + plan.act_device
        return link, self.layers * (costs.forward + costs.rebuild * fill * acts)

    def paper_plan(self) -> Plan:
        """As the paper has it: no resident weights, the device full of ACT blocks, and the others in the
        ratio of Algorithm 1 (equation 5). Host memory is what weights and blocks take."""
        costs, sizes = self.costs, self.sizes
        act_device = min(self.blocks, max(0, self.device - 2 * sizes.weights) // sizes.act)
        rest, weights = self.blocks - act_device, self.layers * sizes.weights
        times = costs.load_weights, costs.rebuild, costs.load_kv
        shares = algorithm_1(*times, act_device, weights + rest * sizes.kv, weights, sizes.act, sizes.kv)
        act, kv = (max(0.0, share) for share in shares)  # to fill a lane may take more than there is
        act_host = round(rest * act / (act + kv))
        return Plan(0, rest - act_host, act_host, 0, act_device)

    def plan(self) -> Plan:
        """The division with which the slower lane ends first: any number of resident layers, KV or ACT blocks
        in what is left of the device, and the best division of the others.

        What differs from the paper's:
        - Equations 2 and 3 leave out the transfer of ACT blocks, attention, the new tokens' own products, and
          what each mini-batch costs. Here they count, so that the lanes do end together.
        - The device may hold weights or KV blocks too. Fair shares are nearly ties, for a resident byte saves
          a byte of link; so hybrid's lead is over policies that use the same memory.
        - The batch is divided, not the memory: Algorithm 1's ratio is that of a host memory that is full.
        With grouped queries an ACT block is larger than a KV block and has to be rebuilt besides: the best
        division has none, and hybrid is `kv-only`."""
        if self.policy == "paper":
            return self.paper_plan()
        costs, sizes, found = self.costs, self.sizes, []
        for resident in range(self.layers + 1):
            places = 2 if resident < self.layers else 0  # to stream to
            left = self.device - sizes.weights * (resident + places)
            for kind, size in ("kv-only", sizes.kv), ("act-only", sizes.act):
                if left < 0 or self.policy not in ("hybrid", kind):
                    continue
                device = min(self.blocks, left // size)
                rest, on_device = self.blocks - device, (device, 0) if kind == "kv-only" else (0, device)
                # ACT instead of KV: load_kv - load_act of a block off the link, rebuild on the processor
                link, compute = self.lanes(Plan(resident, rest, 0, *on_device))
                per_block = self.layers * self.fill * (costs.load_kv - costs.load_act + costs.rebuild)
                even = (link - compute) / per_block if per_block > 0 else 0
                all_kinds = [0, rest, int(even), int(even) + 1]
                acts = {"kv-only": [0], "act-only": [rest]}.get(self.policy, all_kinds)
                for act_host in acts:
                    act_host = min(max(0, act_host), rest)
                    plan = Plan(resident, rest - act_host, act_host, *on_device)
                    found.append((max(self.lanes(plan)), self.lanes(plan)[1], plan))
        if not found:
            raise checkpoint.ModelError(
                f"Two layers of weights, one to compute with and one to fill, take "
                f"{2 * sizes.weights / 1e6:.1f} MB of the device, and there are {self.device / 1e6:.1f}; "
                "choose a larger --device-memory."
            )
        return min(found)[2]

    def after(self, samples: list[tuple]) -> "Planner":
        """With what decode steps took: (blocks, seconds to rebuild one in a layer or 0, seconds of the rest).
        The cost of rebuilding scatters, and while the processor is late the link has nothing to do: what
        counts is its upper quartile, which keeps more as K and V."""
        if not samples:
            return self
        blocks, rebuilds, forwards = zip(*samples)
        costs = self.costs._replace(forward=statistics.median(forwards))
        if rebuilds := sorted(filter(None, rebuilds)):
            costs = costs._replace(rebuild=rebuilds[3 * len(rebuilds) // 4])
        return self._replace(costs=costs, fill=min(1.0, statistics.median(blocks) / self.blocks))


# 2. Weights ------------------------------------------------------------------------------------

class Weights:
    """Each layer's weights in one flat tensor of host memory. `resident` layers are on the device, spread
    evenly; the others come into two places in turn, in portions, so that blocks pass between them."""

    def __init__(self, model: Llama, resident: int, link: links.Link):
        self.link, self.count, device = link, len(model.layers), model.device
        self.issued = []  # of the step
        self.host = [flat_weights(layer, model, device) for layer in model.layers]
        kept = {number * self.count // resident for number in range(resident)}
        self.layers = {index: self.place(model, self.host[index].to(device)) for index in kept}
        self.streamed = [index for index in range(self.count) if index not in kept]
        self.places = []  # the first is computed with, the second is filled
        for _ in range(2 if self.streamed else 0):
            flat = torch.empty_like(self.host[0], device=device)
            self.places.append((flat, self.place(model, flat)))
        self.begin()

    @staticmethod
    def place(model: Llama, flat) -> Layer:
        layer = Layer(model.config, model.rotary, dtype=model.dtype, device="meta")
        bind(layer, flat)
        return layer

    def begin(self):
        """At first, and after a failure: the first streamed layer is expected, at once."""
        self.expect(self.streamed[0] if self.streamed else None, 1)

    def expect(self, index: int | None, layers_left: int):
        """From now on the weights of layer `index` come, during `layers_left` layers."""
        self.coming, self.layers_left, self.sent, self.transfers = index, layers_left, 0, []

    def fetch(self, share: float):
        """Issue so large a share of the weights that are coming, or what is left of them."""
        if self.coming is None:
            return
        source = self.host[self.coming]
        end = min(len(source), self.sent + math.ceil(share * len(source)))
        if end > self.sent:
            part = slice(self.sent, end)
            self.transfers.append(self.link.copy(self.places[1][0][part], source[part], "weights"))
            self.issued.append(self.transfers[-1])
            self.sent = end

    def layer(self, index: int) -> Layer:
        """Layer `index`, when it is there. From now on the next one comes, in its predecessor's place."""
        if index in self.layers:
            return self.layers[index]
        self.fetch(1.0)
        for transfer in self.transfers:
            arrive(transfer)
        self.places.reverse()
        following = self.streamed[(self.streamed.index(index) + 1) % len(self.streamed)]
        self.expect(following, (following - index - 1) % self.count + 1)
        return self.places[0][1]


def arrive(transfer):
    """Order a transfer before what is computed next; the host waits only where it must."""
    if not transfer.queue_wait():
        transfer.wait()


def flat_weights(layer: Layer, model: Llama, device):
    """The layer's weights in one tensor of host memory, of which its parameters are views from now on."""
    if not hasattr(layer, "flat"):
        parameters = [parameter.detach().flatten() for parameter in layer.parameters()]
        size = sum(map(len, parameters))
        layer.flat = links.host_memory((size,), model.dtype, device, "A layer's weights")
        torch.cat(parameters, out=layer.flat)
        bind(layer, layer.flat)
    return layer.flat


def bind(layer: Layer, flat):
    first = 0
    for name, parameter in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        view = flat[first : first + parameter.numel()].view(parameter.shape)
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
        first += parameter.numel()


# 3. Mini-batches -------------------------------------------------------------------------------

class Item(NamedTuple):
    """What one request does in a step."""

    request: Request
    table: list[int]
    start: int  # tokens of context
    count: int  # new tokens


def padded(tokens: int) -> int:
    return -(-tokens // SPARE) * SPARE


def buffer_rows(items: list[Item]) -> int:
    """Rows of the attention buffer: those that decode are padded to the longest of them."""
    decoding = [item.start + 1 for item in items if item.count == 1]
    alone = sum(item.start + item.count for item in items if item.count > 1)
    return len(decoding) * padded(max(decoding, default=0)) + alone


def form(items: list[Item], rows: int) -> list[list[Item]]:
    """As few mini-batches as buffers of `rows` allow, about equally long; similar lengths together.

    The paper (section IV-C-3) adds a request where that lessens the mini-batch's imbalance, equations 6 and
    7: the larger one of T_kv_gen and T_load_kv over the other. That leaves out the time of the weights, which
    Algorithm 1 has filled with rebuilding, so its own plan looks unbalanced; it divides by zero where a
    mini-batch has blocks of one kind only; and since equal requests do not lessen it, sixteen of them make
    sixteen mini-batches. Here every request has the plan's ratio, and there is nothing left to balance."""
    left = sorted(items, key=lambda item: -item.start - item.count)
    sizes = [item.start + item.count for item in left]
    even = sum(sizes) / math.ceil(buffer_rows(left) / rows)
    formed, held = [], math.inf
    for item, size in zip(left, sizes):
        if held + size / 2 > even or buffer_rows([*formed[-1], item]) > rows:
            formed.append([])
            held = 0
        formed[-1].append(item)
        held += size
    return formed


class Deal:
    """Which kind of block each number of the pool stands for, and which one of that kind. Kinds are spread
    evenly over the numbers, so that any run of them has about the plan's ratio (equation 5)."""

    def __init__(self, plan: Plan, block_size: int):
        self.plan, self.block_size, counts = plan, block_size, plan[1:]
        places = [(torch.arange(count) + 0.5) / max(1, count) for count in counts]
        order = torch.cat(places).argsort(stable=True)
        self.kinds = torch.arange(len(KINDS)).repeat_interleave(torch.tensor(counts))[order]  # [blocks]
        self.numbers = torch.cat([torch.arange(count) for count in counts])[order]  # [blocks]
        self.of_block = list(zip(self.kinds.tolist(), self.numbers.tolist()))

    def slots(self, table: list[int], tokens: int):
        """-> kinds [tokens], and slots [tokens] in the memory of their kind."""
        blocks = torch.tensor(table[: -(-tokens // self.block_size)], dtype=torch.long)
        slots = self.numbers[blocks][:, None] * self.block_size + torch.arange(self.block_size)
        return self.kinds[blocks].repeat_interleave(self.block_size)[:tokens], slots.flatten()[:tokens]

    def slot(self, table: list[int], position: int) -> tuple[int, int]:
        kind, number = self.of_block[table[position // self.block_size]]
        return kind, number * self.block_size + position % self.block_size


class Tokens(NamedTuple):
    """Tokens of one kind, [n] each."""

    slots: torch.Tensor  # in the memory of their kind
    rows: torch.Tensor  # of the attention buffer
    positions: torch.Tensor


class MiniBatch:
    """Some requests of a step. Each has a part of the attention buffer: its context, in the order of kinds,
    then its new tokens. (Positions are in the keys: the order of what is read makes no difference.)

        runs[kind]    end row -> (slot, row, count): what is adjacent on both sides, a copy each"""

    def __init__(self, items: list[Item], deal: Deal, model: Llama):
        self.items, self.device = sorted(items, key=lambda item: item.count > 1), model.device
        self.decoding = sum(item.count == 1 for item in items)
        self.stride = padded(max((item.start + 1 for item in items if item.count == 1), default=0))
        parts, self.first_rows, row = [], [], 0
        for number, (_, table, start, count) in enumerate(self.items):
            kinds, slots = deal.slots(table, start)
            order = kinds.argsort(stable=True)
            parts.append(torch.stack((kinds[order], slots[order], torch.arange(row, row + start), order)))
            self.first_rows.append(row)
            row += self.stride if number < self.decoding else start + count
        context = torch.cat(parts, 1)  # [4, tokens]: kind, slot, row, position
        context = [context[1:, context[0] == kind] for kind in KINDS]
        self.runs = [runs_of(slots, rows) for slots, rows, _ in context[:KV_DEVICE]]
        self.context = [Tokens(*tokens.to(self.device)) for tokens in context]
        self.rows_used = row
        starts = torch.tensor([item.start for item in self.items[: self.decoding]])
        unseen = torch.arange(self.stride) >= starts[:, None]  # [B, S]
        scores = torch.zeros(unseen.shape, dtype=model.dtype).masked_fill_(unseen, -math.inf)
        self.scores = scores.to(self.device)[:, None, None]  # [B, 1, 1, S]

    def add_new(self, deal: Deal):
        """The new tokens have their blocks now."""
        flat, self.placed = [], []  # placed: (kind, slot, row of the buffer, row of the mini-batch)
        for (request, table, start, count), row in zip(self.items, self.first_rows):
            for position in range(start, start + count):
                self.placed.append((*deal.slot(table, position), row + position, len(flat)))
                flat.append((request.tokens[position], position, row + position))
        flat = torch.tensor(flat, device=self.device).T.contiguous()  # [3, T]
        self.tokens, self.positions, self.rows = flat
        self.scores[torch.arange(self.decoding), 0, 0, self.positions[: self.decoding]] = 0
        self.new = []  # for each kind: rows of the mini-batch [n], their slots [n], and those as runs
        for kind in KINDS:
            mine = [(number, slot) for of, slot, _, number in self.placed if of == kind]
            numbers, slots = torch.tensor(mine, dtype=torch.long).view(-1, 2).T
            runs = runs_of(slots, torch.arange(len(slots))) if kind < KV_DEVICE else {}
            self.new.append((numbers.to(self.device), slots.to(self.device), runs))

    def can_advance(self, items: list[Item]) -> bool:
        """Whether these are its requests a token later, and there is room for it."""
        return all(
            item is not None and item.table is old.table and item.start == old.start + 1 <= self.stride - 1
            and item.count == old.count == 1 for item, old in zip(items, self.items, strict=True)
        )  # fmt: skip

    def advance(self, items: list[Item]) -> "MiniBatch":
        """The mini-batch of the next step: its new tokens are context, and nothing else has changed."""
        following = copy.copy(self)
        following.items, following.context, following.scores = items, [], self.scores.clone()
        following.runs = [dict(runs) for runs in self.runs]
        for tokens, (numbers, slots, _) in zip(self.context, self.new):
            added = slots, self.rows[numbers], self.positions[numbers]
            following.context.append(Tokens(*map(torch.cat, zip(tokens, added))) if len(slots) else tokens)
        for kind, slot, row, _ in self.placed:
            if kind < KV_DEVICE:
                first, start, count = following.runs[kind].pop(row, (slot, row, 0))
                if first + count != slot:
                    following.runs[kind][row] = first, start, count
                    first, start, count = slot, row, 0
                following.runs[kind][row + 1] = first, start, count + 1
        return following

    def attend(self, kv, q, k, v):
        """kv [2, rows, KVH, hd] has the context; the new K and V [T, KVH, hd] go there too -> [T, H, hd]."""
        kv[0].index_copy_(0, self.rows, k)
        kv[1].index_copy_(0, self.rows, v)
        out, at = [], self.decoding
        if at:
            keys, values = (
                side[: at * self.stride].unflatten(0, (at, self.stride)).transpose(1, 2) for side in kv
            )  # [B, KVH, S, hd] each
            grouped = q[:at].unflatten(1, (keys.shape[1], -1))  # [B, KVH, H/KVH, hd]
            heads = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.scores)
            out.append(heads.flatten(1, 2))  # [B, H, hd]
        for (_, _, start, count), row in zip(self.items[at:], self.first_rows[at:]):
            scores = None
            if start:
                later = torch.ones(count, start + count, dtype=torch.bool, device=self.device).triu(start + 1)
                scores = torch.zeros_like(later, dtype=q.dtype).masked_fill_(later, -math.inf)  # [T, S]
            out.append(paged.attention(q[at : at + count], *kv, slice(row, row + start + count), scores))
            at += count
        return torch.cat(out)


def runs_of(slots, rows) -> dict[int, tuple[int, int, int]]:
    if not len(slots):
        return {}
    breaks = (slots.diff() != 1) | (rows.diff() != 1)
    edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(slots)]
    slots, rows = slots.tolist(), rows.tolist()
    pairs = zip(edges, edges[1:])
    return {rows[end - 1] + 1: (slots[first], rows[first], end - first) for first, end in pairs}


# 4. The runner ---------------------------------------------------------------------------------

class HybridRunner:
    """Runs the forward pass in mini-batches, over blocks of four kinds behind one pool of numbers."""

    def __init__(self, model: Llama, plan: Plan, bandwidth, block_size=16, rows=8192, planner=None):
        """`bandwidth`: of a modelled link, None on a GPU. `rows`: tokens of context that are on the device at
        once. `planner` makes another plan when nothing runs."""
        config = model.config
        self.model, self.planner = model, planner
        self.rows = max(rows, padded(config.max_position_embeddings))
        self.pool = paged.BlockPool(sum(plan[1:]), block_size)
        self.clock = Clock(model.device)
        self.load_link = links.Link("load", self.clock, bandwidth)
        self.save_link = links.Link("save", self.clock, bandwidth)
        tensor = functools.partial(torch.zeros, dtype=model.dtype, device=model.device)
        kv = config.num_key_value_heads, config.head_dim
        self.buffers = [[tensor(2, self.rows, *kv), tensor(0, config.hidden_size)] for _ in range(2)]
        # Of the last step: (label, start, end), all copies, what was issued for it in the step before
        self.marks, self.transfers, self.work, self.earlier = [], [], [], []
        self.samples = deque(maxlen=64)
        self.deal_blocks(plan)

    def deal_blocks(self, plan: Plan):
        """Divide the memory by `plan`. No block may hold anything."""
        config, size, model = self.model.config, self.pool.block_size, self.model
        self.deal, self.last, self.ahead, self.memory, self.weights = Deal(plan, size), [], None, [], None
        self.weights = Weights(model, plan.resident, self.load_link)
        kv, layers = (config.num_key_value_heads, config.head_dim), config.num_hidden_layers
        for kind, count in enumerate(plan[1:]):
            slots = count * size
            as_kv = kind in (KV_HOST, KV_DEVICE)
            shape = (layers, 2, slots, *kv) if as_kv else (layers, slots, config.hidden_size)
            if kind in (KV_HOST, ACT_HOST):
                memory = links.host_memory(shape, model.dtype, model.device, "The host's blocks")
            else:
                memory = torch.empty(shape, dtype=model.dtype, device=model.device)
            self.memory.append(memory)  # [L, 2, slots, KVH, hd] or [L, slots, D]
        self.pool.block_bytes = sum(memory.nbytes for memory in self.memory) // max(1, self.pool.size)
        if plan.act_host and not len(self.buffers[0][1]):
            for pair in self.buffers:
                pair[1] = torch.zeros(self.rows, config.hidden_size, dtype=model.dtype, device=model.device)

    def idle(self):
        """Nothing runs: if by the last steps another plan is faster, drop what is cached and deal anew."""
        self.learn()
        if not self.planner or not self.samples or any(self.pool.references):
            return
        planner, plan = self.planner.after(self.samples), self.deal.plan
        other = planner.plan()
        if max(planner.lanes(other)) < GAIN * max(planner.lanes(plan)):
            self.forget()
            for block in list(self.pool.cached):
                self.pool.evict(block)
            self.deal_blocks(other)

    @torch.inference_mode()
    def forward(self, work: list, before_layer=None):
        """All mini-batches through layer after layer -> a batch with `work` in it, and logits [R, V]."""
        self.learn()
        self.marks, self.transfers, self.work = [], [], []
        self.weights.issued = self.transfers
        try:
            items = [Item(request, request.table, request.computed, count) for request, count in work]
            logits = self.step(items, work)
        except Exception:
            self.forget()
            raise
        self.work = work
        return SimpleNamespace(work=work), logits

    def step(self, items: list[Item], work: list):
        # 1. Mini-batches: those of the last step, if the same requests decode on. The first one's context may
        #    be on its way, and what comes after the last one is the next step's
        groups = self.group(items)
        arrival = self.take_ahead(groups[0])
        first = arrival[0] if arrival else self.make(groups[0], 0)
        batches = [first, *(self.make(group, number) for number, group in enumerate(groups[1:], 1))]
        for batch in batches:
            batch.add_new(self.deal)
        self.last = batches
        following = self.look_ahead(work)
        hidden = [self.model.embed(batch.tokens) for batch in batches]  # [T, D] each
        rotations = [self.model.rotary(batch.positions) for batch in batches]
        arrival = arrival[1] if arrival else self.bring(0, first)
        self.saves, total = [], sum(batch.rows_used for batch in batches)

        # 2. Layer by layer, mini-batch by mini-batch: while one computes, the next one's context arrives, and
        #    a portion of the next layer's weights
        order = [(index, at) for index in range(self.weights.count) for at in range(len(batches))]
        for number, (index, at) in enumerate(order):
            batch, coming = batches[at], None
            if at == 0:
                layer = self.weights.layer(index)
            self.weights.fetch(batch.rows_used / total / self.weights.layers_left)
            if number + 1 < len(order):
                index_then, at_then = order[number + 1]
                coming = self.bring(index_then, batches[at_then])
            elif following:
                for transfer, _, of in self.saves:
                    if of == 0:  # the next step reads what this one has stored in the first layer
                        arrive(transfer)
                self.ahead = following, self.bring(0, following)
            kv = self.rebuild(index, layer, batch, arrival)
            hidden[at] = self.compute(index, layer, batch, kv, hidden[at], rotations[at])
            arrival = coming

        # 3. The last tokens' logits, in the order of the work. What was computed is in its blocks
        began, last, row = self.clock.mark(), {}, 0
        for item in (item for batch in batches for item in batch.items):
            row += item.count
            last[item.request] = row - 1
        rows = [last[request] for request, count in work if count == request.pending]
        logits = self.model.logits(torch.cat(hidden)[rows])  # [R, V]
        self.marks.append(("head", began, self.clock.mark()))
        for transfer, *_ in self.saves:
            transfer.wait()
        return logits

    # Which mini-batches

    def group(self, items: list[Item]) -> list[list[Item]]:
        now = {item.request: item for item in items}
        groups = [[now.get(old.request) for old in batch.items] for batch in self.last]
        same = len(items) == sum(map(len, groups)) > 0
        if same and all(batch.can_advance(group) for batch, group in zip(self.last, groups)):
            return groups
        return form(items, self.rows)

    def make(self, group: list[Item], number: int) -> MiniBatch:
        last = self.last[number] if number < len(self.last) else None
        if last and len(last.items) == len(group) and last.can_advance(group):
            return last.advance(group)
        return MiniBatch(group, self.deal, self.model)

    def look_ahead(self, work: list) -> MiniBatch | None:
        """The first mini-batch of the next step, if all decode then who are not known to end now."""
        if len(self.model.layers) == 1 or any(count < request.pending for request, count in work):
            return None
        items = [
            Item(request, request.table, request.computed + count, 1) for request, count in work
            if len(request.new) + 1 < request.max_tokens
        ]  # fmt: skip
        if not items:
            return None
        return self.make(self.group(items)[0], 0)

    def take_ahead(self, group: list[Item]) -> tuple | None:
        """What came ahead, if this step begins with it; else it may be overwritten when it is there."""
        ahead, self.ahead = self.ahead, None
        self.earlier = list(filter(None, ahead[1][2])) if ahead else []
        if ahead and ahead[0].items == group:
            return ahead
        if not over(self.earlier):
            self.clear_buffers()
        return None

    # The link and the processor

    def bring(self, index: int, batch: MiniBatch) -> tuple:
        """Issue the transfers of a mini-batch's context in one layer, to the rows where it is needed -> the
        buffers [2, rows, KVH, hd] and [rows, D], and the transfers of ACT and KV blocks or None."""
        kv, act = self.buffers[0]
        self.buffers.reverse()
        transfers = []
        for kind, label in (ACT_HOST, "act"), (KV_HOST, "kv"):
            transfers.append(None)
            if runs := batch.runs[kind].values():
                into, memory = kv if kind == KV_HOST else act, self.memory[kind][index]
                dst = [part(into, kind, row, count) for _, row, count in runs]
                src = [part(memory, kind, slot, count) for slot, _, count in runs]
                transfers[-1] = self.load_link.copy(dst, src, label)
                self.transfers.append(transfers[-1])
        return kv, act, transfers

    def rebuild(self, index: int, layer: Layer, batch: MiniBatch, arrival: tuple):
        """-> the attention buffer [2, rows, KVH, hd] with the K and V of the whole context."""
        kv, act, (acts, kvs) = arrival
        here, device, host = (batch.context[kind] for kind in (KV_DEVICE, ACT_DEVICE, ACT_HOST))
        if len(here.slots):
            kv.index_copy_(1, here.rows, self.memory[KV_DEVICE][index].index_select(1, here.slots))
        self.project(layer, self.memory[ACT_DEVICE][index], device.slots, device, kv)
        if acts:
            arrive(acts)
            self.project(layer, act, host.rows, host, kv)
        if kvs:
            arrive(kvs)
        return kv

    def project(self, layer: Layer, states, where, tokens: Tokens, kv):
        """K and V [n, KVH, hd] of `states` [., D] in places `where` [n], into the buffer's rows."""
        if not len(where):
            return
        began = self.clock.mark()
        portions = (each.split(ROWS) for each in (where, tokens.rows, tokens.positions))
        for places, rows, positions in zip(*portions):
            for side, values in zip(kv, layer.project_kv(states.index_select(0, places), positions)):
                side.index_copy_(0, rows, values)
        self.marks.append(("rebuild", began, self.clock.mark()))

    def compute(self, index: int, layer: Layer, batch: MiniBatch, kv, hidden, rotation):
        """The layer, for the new tokens [T, D] -> [T, D]; their state goes to their blocks."""
        began, new = self.clock.mark(), {}

        def attend(q, k, v):
            new["kv"] = k, v
            return batch.attend(kv, q, k, v)

        out = layer(hidden, rotation, attend)
        for kind, (numbers, slots, runs) in enumerate(batch.new):
            if not len(numbers):
                continue
            memory = self.memory[kind][index]
            if kind in (KV_HOST, KV_DEVICE):
                state = torch.stack([side.index_select(0, numbers) for side in new["kv"]])  # [2, n, KVH, hd]
            else:
                state = hidden.index_select(0, numbers)  # [n, D]
            if kind in (KV_DEVICE, ACT_DEVICE):
                memory.index_copy_(state.ndim // 4, slots, state)
                continue
            dst = [part(memory, kind, slot, count) for slot, _, count in runs.values()]
            src = [part(state, kind, row, count) for _, row, count in runs.values()]
            self.saves.append((self.save_link.copy(dst, src, "store"), state, index))
            self.transfers.append(self.saves[-1][0])
        self.marks.append(("forward", began, self.clock.mark()))
        return out

    # After a step

    def forget(self):
        """Begin anew: wait until nothing that was issued is written any more. Nothing of it is used, and what
        a failed copy may have left where masked rows are read is cleared: 0 times NaN is NaN."""
        over([*self.earlier, *self.transfers, *self.weights.transfers])
        self.clear_buffers()
        self.weights.begin()
        self.ahead, self.last, self.marks, self.work = None, [], [], []

    def clear_buffers(self):
        for kv, _ in self.buffers:
            kv.zero_()

    def learn(self):
        """Note what the last step took, if all of it decoded: see Planner.after."""
        work, self.work = self.work, []
        if not work or any(count > 1 for _, count in work):
            return
        seconds = self.busy()
        tokens = [sum(len(batch.context[kind].slots) for batch in self.last) for kind in KINDS]
        acts = self.weights.count * (tokens[ACT_HOST] + tokens[ACT_DEVICE]) / self.pool.block_size
        forward = (seconds["forward"] + seconds["head"]) / self.weights.count
        rebuild = seconds["rebuild"] / acts if acts else 0.0
        self.samples.append((sum(tokens) / self.pool.block_size, rebuild, forward))

    def busy(self) -> Counter:
        """What the processor did in the last step -> seconds."""
        seconds = Counter()
        for label, began, ended in self.marks:
            seconds[label] += self.clock.seconds(ended) - self.clock.seconds(began)
        return seconds


def part(tensor, kind: int, first: int, count: int):
    """Rows or slots of [2, n, KVH, hd] or [n, D]."""
    return tensor[:, first : first + count] if kind in (KV_HOST, KV_DEVICE) else tensor[first : first + count]


def over(transfers) -> bool:
    """Wait until none is under way any more -> whether all have arrived."""
    errors = []
    for transfer in transfers:
        try:
            transfer.wait()
        except links.TransferError as error:
            errors.append(error)
    return not errors


# 5. The engine, and what it is measured with ---------------------------------------------------

def sizes_of(model: Llama, block_size: int) -> Sizes:
    config, numbers = model.config, sum(parameter.numel() for parameter in model.layers[0].parameters())
    act, kv = config.num_hidden_layers * config.hidden_size, config.kv_numbers_per_token
    return Sizes(*(count * model.dtype.itemsize for count in (numbers, block_size * act, block_size * kv)))


def ready(planner: Planner, model: Llama, bandwidth, contexts: list[int], plan=None) -> paged.Engine:
    """An engine whose requests are about to decode, behind contexts of numbers that nobody has computed."""
    runner = HybridRunner(model, plan or planner.plan(), bandwidth, planner.block_size)
    engine = paged.Engine(runner, max_running=len(contexts))
    for memory in runner.memory:
        memory.fill_(0.1)
    for number, context in enumerate(contexts):
        request = Request([(number + 7 * at) % 251 for at in range(context + 1)], 1 << 20)
        engine.waiting.append(request)
        assert engine.admit(request), "there are too few blocks"
        request.computed = context
    return engine


def measure(planner: Planner, model: Llama, speed: float, bandwidth, contexts: list[int]) -> Planner:
    """`planner` with the costs of decode steps with ACT blocks alone, over a link of `speed` bytes/s."""
    sizes, layers = planner.sizes, planner.layers
    loads = dict(load_weights=sizes.weights, load_act=sizes.act / layers, load_kv=sizes.kv / layers)
    loads = {name: size / speed for name, size in loads.items()}
    planner = planner._replace(costs=Costs(**loads, forward=0, rebuild=0))
    return observe(planner, model, bandwidth, contexts, "act-only")


def observe(planner: Planner, model: Llama, bandwidth, contexts: list[int], policy: str) -> Planner:
    """`planner` with the costs of a few decode steps under another policy."""
    engine = ready(planner._replace(policy=policy), model, bandwidth, contexts)
    for _ in range(5):
        engine.step()
    engine.runner.learn()
    return planner.after(list(engine.runner.samples)[1:])


def make_planner(model: Llama, arguments) -> tuple[Planner, object]:
    """What the options ask for, in numbers -> the planner, and the modelled link's bandwidth, None on a GPU.
    Costs are those of steps with at most PROBE tokens of context, until others are known."""
    size, layers, sizes = arguments.block_size, len(model.layers), sizes_of(model, arguments.block_size)
    useful = arguments.max_running * -(-model.config.max_position_embeddings // size)
    host = torch.device("cpu")
    blocks = cli.blocks_that_fit(arguments.blocks, useful, max(sizes.kv, sizes.act), host, "--blocks")
    device = 1e9 * arguments.device_memory if arguments.device_memory else (layers // 2 + 2) * sizes.weights
    if model.device.type == "cuda" and not arguments.device_memory:
        buffers = 2 * arguments.mini_batch // size * (sizes.kv + sizes.act) // layers
        device = 0.8 * torch.cuda.mem_get_info()[0] - buffers
    bandwidth = links.bandwidth(model, arguments.link, arguments.platform)
    speed = links.Link("load", Clock(model.device), bandwidth).speed()
    planner = Planner(arguments.policy, None, sizes, layers, blocks, int(device), size)
    requests = min(arguments.max_running, blocks, PROBE // size)
    tokens = min(PROBE, blocks * size) // requests - 2
    probe = planner._replace(blocks=requests * (2 + -(-tokens // size)), device=2 * sizes.weights)
    probe = measure(probe, model, speed, bandwidth and links.Bandwidth(math.inf), requests * [max(1, tokens)])
    return planner._replace(costs=probe.costs), bandwidth


def make_engine(model: Llama, arguments) -> paged.Engine:
    """Chapter 02's engine with this chapter's Runner. The model's layers are in host memory."""
    planner, bandwidth = make_planner(model, arguments)
    plan, sizes = planner.plan(), planner.sizes
    runner = HybridRunner(model, plan, bandwidth, arguments.block_size, arguments.mini_batch, planner)
    engine = paged.Engine(runner, None, arguments.token_budget, arguments.max_running)
    engine.explain = arguments.explain
    print(
        f"Device: {plan.resident} of {planner.layers} layers of {sizes.weights / 1e6:.1f} MB, "
        f"{plan.kv_device} KV and {plan.act_device} ACT blocks. Host: {plan.kv_host} "
        f"KV and {plan.act_host} ACT\nblocks of {sizes.kv / 1e6:.3f} and "
        f"{sizes.act / 1e6:.3f} MB; {runner.load_link}",
        file=sys.stderr,
    )
    return engine


# 6. The demo -----------------------------------------------------------------------------------

BATCH, CONTEXT = 16, 128  # of the decode steps that are timed
FACTORS = 1.25, 2.5  # weights and context over the link, over computing with ACT blocks alone
GEOMETRY = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=512,
)  # fmt: skip


def planner_for(f: float | None, model: Llama, contexts: list[int], device: int):
    """-> a Planner for such decode steps, and the link's bandwidth: weights and all K and V take `f` times as
    long as computing with ACT blocks alone. None: a GPU, whose link is what it is."""
    sizes, layers = sizes_of(model, 16), len(model.layers)
    blocks = sum(context // 16 + 3 for context in contexts)
    used, speed = sum(contexts) / 16, links.Link("load", Clock(model.device)).speed() if f is None else 1e9
    planner = Planner("hybrid", None, sizes, layers, blocks, device)
    planner = measure(planner, model, speed, f and links.Bandwidth(speed), contexts)
    costs, bandwidth = planner.costs, None
    if f:
        bytes_moved = sizes.weights + used * sizes.kv / layers
        bandwidth = links.Bandwidth(bytes_moved / f / (costs.forward + used * costs.rebuild))
        planner = measure(planner, model, bandwidth.value, bandwidth, contexts)
    for _ in range(2):  # rebuilding some blocks costs more than their share of rebuilding all
        planner = observe(planner, model, bandwidth, contexts, "hybrid")
    return planner, bandwidth


def one_step(engine: paged.Engine) -> dict:
    """Of a decode step: seconds, those that the processor was busy, bytes over the link by kind. The step
    before it, whose copies began while others computed, does not count."""
    engine.step()
    began = time.perf_counter()
    engine.step()
    taken, moved = dict(began=began, seconds=time.perf_counter() - began), Counter()
    for transfer in engine.runner.transfers:
        moved[transfer.label] += transfer.bytes
    return dict(taken, compute=sum(engine.runner.busy().values()), bytes=dict(moved))


def demo(model: Llama, frontend: Frontend, arguments):
    """A batch answered under each policy, and decode steps of a larger geometry over two links."""
    # 1. Ask: eight conversations at once
    rng, new, asked = random.Random(0), max(8, min(arguments.max_tokens, 16)), []
    talks = [lesson.conversation(frontend, rng, frontend.context // 16) for _ in range(8)]
    for policy in POLICIES:
        options = dict(policy=policy, max_running=8, blocks=8 * 32, mini_batch=1024)
        engine = make_engine(model, argparse.Namespace(**{**vars(arguments), **options}))
        asked += engine.generate([frontend.request(messages=messages, max_tokens=new) for messages in talks])
    verified = lesson.equal_to_baseline(copy.deepcopy(model).to(model.device), asked)

    # 2. Time
    timed, rows, layers = Llama(GEOMETRY, model.dtype, "cpu"), [], GEOMETRY.num_hidden_layers
    random_models.fill_at_random(timed, 0, GEOMETRY)
    checkpoint.layers_on_host(timed, model.device)
    size = sizes_of(timed, 16).weights
    print(
        f"Decode steps of {BATCH} requests behind {CONTEXT} tokens each, through {layers} layers of "
        f"{GEOMETRY.hidden_size} with random weights,\nsince the answers' model is too small to keep two "
        f"lanes busy. The device has room for {layers // 2} layers of {size / 1e6:.1f} MB\nbeside two that "
        "come and go, or for as many bytes of blocks."
    )
    for f in FACTORS if model.device.type == "cpu" else (None,):
        planner, bandwidth = planner_for(f, timed, BATCH * [CONTEXT], (2 + layers // 2) * size)
        engines, ways = {}, {}
        for policy in POLICIES:
            engines[policy] = ready(planner._replace(policy=policy), timed, bandwidth, BATCH * [CONTEXT])
            ways[policy] = functools.partial(one_step, engines[policy])
        taken, link = lesson.in_turn(ways), engines["hybrid"].runner.load_link
        speeds = {policy: [BATCH / step["seconds"] for step in steps] for policy, steps in taken.items()}
        print()
        title = f"Decode, f = {f or 'as it is'}, {link}"
        rows += lesson.table(title, speeds, "tokens_per_second", "tokens/s")
        for row in rows[-len(POLICIES) :]:
            policy, plan = row["case"], engines[row["case"]].runner.deal.plan
            step = sorted(taken[policy], key=lambda step: step["seconds"])[lesson.ROUNDS // 2]
            busy = sum(step["bytes"].values()) / link.speed() / step["seconds"]
            busy = busy, step["compute"] / step["seconds"]
            row.update(f=f, plan=plan._asdict(), bytes=step["bytes"], link_busy=busy[0], compute_busy=busy[1])
            labels = "weights", "kv", "act"
            moved = ", ".join(f"{label} {step['bytes'].get(label, 0) / 1e6:5.1f}" for label in labels)
            print(f"  {policy:8} MB: {moved}; busy: link {busy[0]:4.0%}, processor {busy[1]:4.0%}; "
                  f"{plan.resident} layers and {sum(plan[3:])} blocks on the device")  # fmt: skip
        print(sentence(rows[-len(POLICIES) :], planner, engines))
    timeline = chart(engines["hybrid"], taken["hybrid"][-1])
    print("\nThe last step of hybrid (a, k, w: ACT, KV blocks, weights arrive; r: rebuilt, f: the layers)")
    print(
        f"{timeline.chart()}\n\nThe lane that is late alone counts. And where one device does not compute "
        "fast enough, or has too\nlittle link? Several may divide what each chapter keeps: chapter 09."
    )
    report = dict(link=dict(modelled=link.modelled, gbps=link.speed() / 1e9), verified=verified, rows=rows)
    return report, [timeline, asked[0].timeline]


def sentence(rows: list[dict], planner: Planner, engines: dict) -> str:
    """What hybrid wins over both single kinds, what these costs allow, and why it is not more."""
    rates, words = {row["case"]: row["tokens_per_second"] for row in rows}, []
    planner = planner.after(list(engines["hybrid"].runner.samples))
    lanes = {policy: planner.lanes(engine.runner.deal.plan) for policy, engine in engines.items()}
    for policy in POLICIES[1:3]:
        allowed = max(lanes[policy]) / max(lanes["hybrid"])
        words.append(f"{rates['hybrid'] / rates[policy]:.2f}x {policy} (these costs allow {allowed:.2f}x)")
    link, compute = lanes["hybrid"]
    if min(rates["hybrid"] / rates[policy] for policy in POLICIES[1:3]) > 1.03:
        why = "both lanes are busy"
    elif link > compute:
        why = "the link is late even where nearly all is kept as activations, so that there is little to mix"
    else:
        why = "rebuilding takes longer here than loading, so that there is little to mix"
    return f"  hybrid: {' and '.join(words)}: {why}\n  (link {link:.3f} s, processor {compute:.3f} s a step)"


def chart(engine: paged.Engine, step: dict) -> Timeline:
    """Who was busy in the last step."""
    timeline, runner = Timeline(), engine.runner
    timeline.began = step["began"]
    for label, began, ended in runner.marks:
        timeline.add("compute", label, *map(runner.clock.seconds, (began, ended)))
    for transfer in runner.transfers:
        if transfer.ready:
            timeline.add(transfer.lane, transfer.label, *transfer.span())
    return timeline


# 7. Main ---------------------------------------------------------------------------------------

def add_arguments(parser):
    number, gigabytes = functools.partial(cli.bounded, int, 1), cli.bounded(float, 1e-6, 1e6)
    add, words = parser.add_argument, "what the context is kept as (hybrid); paper: as CAPTURE divides memory"
    add("--policy", choices=POLICIES, default="hybrid", help=words)
    words = "of the device, for weights and blocks (on a GPU most of what is free, else half of the layers)"
    add("--device-memory", type=gigabytes, metavar="GB", help=words)
    add("--blocks", type=number(1 << 24), metavar="N", help="blocks of all kinds (as useful)")
    words = "tokens of context that are on the device at once (8192)"
    add("--mini-batch", type=number(1 << 20), metavar="TOKENS", default=8192, help=words)
    add("--block-size", type=number(1 << 16), metavar="N", default=16, help="tokens per block (16)")
    add("--token-budget", type=number(1 << 20), metavar="N", default=8192, help="tokens per step (8192)")
    add("--max-running", type=number(1 << 12), metavar="N", default=64, help="requests that run at once (64)")
    links.add_arguments(parser)


if __name__ == "__main__":
    load = functools.partial(checkpoint.load, on_host=True)
    cli.main(__doc__, "08_hybrid_blocks", add_arguments, make_engine, demo, load=load)
