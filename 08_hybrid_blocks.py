"""Chapter 08: even the weights live in host memory, and some of the context is kept as activations.

The problem. A model that is larger than the device, and a large batch that nobody waits for, one answer at a time. In every
decode step each layer's weights and all of its K and V come over the link. The link is the bottleneck, and the processor idles.

The mechanism. Part of the context is kept as activations, the inputs of the layers (ACT blocks), and the rest as K and V (KV
blocks). With multi-head attention an ACT block has half the bytes of a KV block, and K and V are rebuilt from it while the link
brings the next weights and blocks. So many ACT blocks are kept that both lanes take equally long:

    link          weights + KV blocks + ACT blocks of the host
    processor     K and V rebuilt from ACT blocks + attention + the rest of the layer, for the new tokens

The device itself holds ACT blocks only: they cost no link at all, and rebuilding them fills the time in which weights come.
Layer by layer the batch passes in mini-batches (zig-zag), so that one fetch of the weights serves all. Everything that travels
has two places on the device, one that is computed with and one that the link fills.

New against chapter 02: OffloadedModel, HybridPool with blocks of both kinds in one block table, Algorithm 1, the ratio that each
request keeps, mini-batches that are balanced too, and a forward pass in which the context arrives while it is read. Chapter 02's
`restore` only takes note of what is cached here: bringing it back is part of every step.

Source: CAPTURE (Lee et al.), sections III-C and IV; its Algorithm 1 and equations 5 to 7. The zig-zag order is FlexGen's (Sheng
et al., ICML '23). Three things differ from CAPTURE. Its equations 2 and 3 leave out the transfer of ACT blocks, attention, and
what the new tokens compute; here they count, so that the lanes end together in fact. Its KV buffer and its attention buffer are
one here: the link writes where attention reads. And where the batch needs less memory than there is, the batch is divided, not
the memory.

    python 08_hybrid_blocks.py --demo
    python 08_hybrid_blocks.py --batch requests.jsonl --out replies.jsonl      # in OpenAI's batch format
    python 08_hybrid_blocks.py --prompt "What is a KV cache?" --policy act-only
    python 08_hybrid_blocks.py                                                 # the server, on http://127.0.0.1:5000
"""
import copy
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from common import checkpoint
from common.llama import Layer, Llama
from legacy import app, baseline, batch, figure, live, offload, paged
from legacy import link as links
from legacy.app import BadRequest
from legacy.link import Link, Transfer, TransferError
from legacy.timeline import Timeline

POLICIES = ("hybrid", "kv-only", "act-only", "static")
ROWS = 512                         # tokens that are projected, or go through a layer, at once: what is temporary stays small
RETRIES = 3                        # steps in a row that may fail because of a transfer

# 1. How much of what: Algorithm 1 --------------------------------------------------------------------------------

class Costs(NamedTuple):
    """What a layer takes in one decode step, in seconds; the last four for each block of tokens."""
    load_weights: float            # T_load_w in the paper, on average over all layers
    forward: float                 # the new tokens' own: all products of the layer but attention, and a share of the head
    attend: float                  # attention over a block
    rebuild: float                 # T_kv_gen: K and V of a block from its activations
    load_act: float                # an ACT block over the link
    load_kv: float                 # T_load_kv

    def link(self, blocks: "Allocation") -> float:
        """Equation 2, and the ACT blocks that come from the host."""
        return self.load_weights + self.load_kv * blocks.kv_host + self.load_act * blocks.act_host

    def compute(self, blocks: "Allocation") -> float:
        """Equation 3, and what is not rebuilding."""
        return self.forward + self.attend * sum(blocks) + self.rebuild * (blocks.act_device + blocks.act_host)

    def layer(self, blocks: "Allocation") -> float:
        """A layer takes as long as the slower lane."""
        return max(self.link(blocks), self.compute(blocks))


class Allocation(NamedTuple):
    """Blocks of each kind, and where they are."""
    act_device: int
    act_host: int
    kv_host: int


class Room(NamedTuple):
    """What there is to divide. A block's bytes are those of all layers."""
    host: int                      # bytes: M_Host - S_weight
    act_bytes: int                 # S_ACT
    kv_bytes: int                  # S_KV
    device: int                    # ACT blocks that the device can hold
    useful: int                    # blocks that the batch can use

    def fits(self, blocks: Allocation) -> bool:
        return (self.act_bytes * blocks.act_host + self.kv_bytes * blocks.kv_host <= self.host
                and blocks.act_device <= self.device and sum(blocks) <= self.useful)


def allocate(policy: str, costs: Costs, room: Room) -> Allocation:
    """How many blocks of each kind. All policies use the device for ACT blocks, but for kv-only, and for hybrid where these are
    not smaller than KV blocks."""
    act_device = min(room.device, room.useful)
    rest = room.useful - act_device
    if policy == "kv-only":                                             # FlexGen's
        return Allocation(0, 0, min(room.useful, room.host // room.kv_bytes))
    if policy == "act-only":
        return Allocation(act_device, min(rest, room.host // room.act_bytes), 0)
    if policy == "static":                                              # as many bytes of one kind as of the other
        memory = min(room.host // 2, rest * room.act_bytes * room.kv_bytes // (room.act_bytes + room.kv_bytes))
        act_host = min(rest, math.ceil(memory / room.act_bytes), room.host // 2 // room.act_bytes)
        return Allocation(act_device, act_host, min(rest - act_host, room.host // 2 // room.kv_bytes))
    return algorithm_1(costs, room)


def algorithm_1(costs: Costs, room: Room) -> Allocation:
    """The paper's, in its two steps, over the times of Costs."""
    if room.act_bytes >= room.kv_bytes:                                 # grouped queries: activations are the larger ones
        return Allocation(0, 0, min(room.useful, room.host // room.kv_bytes))
    act_device = device_blocks(costs, room)
    act_init, kv_init = initial_allocation(costs, room, act_device)
    act_remain, kv_remain = remaining_allocation(costs, room, act_device, act_init, kv_init)
    return whole(costs, room, act_device, act_init + act_remain, kv_init + kv_remain)


def device_blocks(costs: Costs, room: Room) -> int:
    """Before step 1. The paper fills the device; but if even with K and V for all others the processor were the slower lane, a
    block less is rebuilt and one more is loaded, as long as the host has room for it."""
    idle = costs.load_weights - costs.forward + room.useful * (costs.load_kv - costs.attend)
    balanced, needed = int(idle / (costs.rebuild + costs.load_kv)), room.useful - room.host // room.kv_bytes
    return min(room.device, room.useful, max(0, balanced, needed))


def initial_allocation(costs: Costs, room: Room, act_device: int) -> tuple[float, float]:
    """Step 1: while the weights come, the device's own ACT blocks are rebuilt. What time is left on either lane is filled:
    on the processor by ACT blocks of the host, on the link by KV blocks."""
    budget = costs.load_weights - costs.compute(Allocation(act_device, 0, 0))
    act_cost, kv_cost = net_costs(costs)
    most = room.useful - act_device
    # A kind of less than no cost fills the lane that the other kind fills: step 2 has no ratio then, and all is divided here
    all_act = max(0.0, budget + kv_cost * most) / (act_cost + kv_cost)
    all_kv = max(0.0, act_cost * most - budget) / (act_cost + kv_cost)
    if budget >= 0:
        act_init = all_act if kv_cost < 0 else budget / act_cost if act_cost > 0 else math.inf
        return min(act_init, most, room.host / room.act_bytes), 0.0
    kv_init = all_kv if act_cost < 0 else -budget / kv_cost if kv_cost > 0 else math.inf
    return 0.0, min(kv_init, most, room.host / room.kv_bytes)


def remaining_allocation(costs: Costs, room: Room, act_device: int, act_init: float, kv_init: float) -> tuple[float, float]:
    """Step 2: what is left of memory, or of the batch, in the ratio in which rebuilding and loading take equally long."""
    act_cost, kv_cost = net_costs(costs)
    # act_cost * act = kv_cost * kv; where one costs nothing, there is only that
    act, kv = (1.0, 0.0) if act_cost <= 0 else (0.0, 1.0) if kv_cost <= 0 else (kv_cost, act_cost)
    memory = room.host - room.act_bytes * act_init - room.kv_bytes * kv_init
    blocks = room.useful - act_device - act_init - kv_init
    scale = max(0.0, min(memory / (room.act_bytes * act + room.kv_bytes * kv), blocks / (act + kv)))
    return scale * act, scale * kv


def net_costs(costs: Costs) -> tuple[float, float]:
    """By how much a host's ACT block keeps the processor busy longer than the link, and a KV block the link longer than the
    processor. The paper has T_kv_gen and T_load_kv here."""
    return costs.rebuild + costs.attend - costs.load_act, costs.load_kv - costs.attend


def whole(costs: Costs, room: Room, act_device: int, act: float, kv: float) -> Allocation:
    """Whole blocks; what rounding leaves goes to the lane that would end first."""
    blocks = Allocation(act_device, int(act), int(kv))
    while True:
        more = [blocks._replace(act_host=blocks.act_host + 1), blocks._replace(kv_host=blocks.kv_host + 1)]
        more = [candidate for candidate in more if room.fits(candidate)]
        if not more:
            return blocks
        blocks = min(more, key=costs.layer)


def bound(costs: Costs, blocks: float, device: int, policy: str = "hybrid") -> float:
    """The least that a layer can take, in seconds, for so many blocks of context (full ones and parts) of which the device may
    hold `device`: every division is tried. `static` has no choice, and is not bounded here."""
    on_device = 0 if policy == "kv-only" else min(device, blocks)
    if policy == "kv-only" or policy == "hybrid" and costs.load_act >= costs.load_kv:
        choices = [Allocation(0, 0, blocks)]
    elif policy == "act-only":
        choices = [Allocation(on_device, blocks - on_device, 0)]
    else:
        choices = [Allocation(on_device, act, blocks - on_device - act) for act in range(int(blocks - on_device) + 1)]
        choices += [Allocation(act, 0, blocks - act) for act in range(int(on_device))]
    return min(map(costs.layer, choices))


# 2. Data structures ----------------------------------------------------------------------------------------------

class OffloadedModel(Llama):
    """A model whose layers lie in host memory, each in one piece, and come to the device one after the other, into one of two
    places: the weights of the next are fetched while one computes. Embedding, head, and `resident` layers, spread
    evenly, stay on the device. `model` is on the host; its parameters move into those pieces and stay usable."""

    def __init__(self, model: Llama, device: torch.device, resident: int = 0):
        layers = model.config.num_hidden_layers
        if resident > layers:
            raise checkpoint.ModelError(f"The model has {layers} layers; choose --resident-layers {layers} or less.")
        super().__init__(replace(model.config, num_hidden_layers=0), model.dtype, "meta")
        self.config, self.device, self.digest = model.config, device, model.digest
        self.embedding, self.rotary.table = on(device, model.embedding), model.rotary.table.to(device)
        self.norm.weight = on(device, model.norm.weight)
        self.head.weight = self.embedding if model.config.tie_word_embeddings else on(device, model.head.weight)

        resident = {number * layers // resident for number in range(resident)}
        self.streamed = [index for index in range(layers) if index not in resident]
        self.resident, self.host = {}, {}
        for index, layer in enumerate(model.layers):
            if not hasattr(layer, "piece"):                             # else another engine has put it into one
                layer.piece = offload.pinned((piece_size(layer),), model.dtype, device, f"Layer {index}")
                bind(layer, layer.piece, fill=True)
            if index in resident:
                self.resident[index] = self.layer_on(layer.piece.to(device))
            else:
                self.host[index] = layer.piece
        self.pieces = [torch.zeros(piece_size(model.layers[0]), dtype=model.dtype, device=device)
                       for _ in range(2 if self.streamed else 0)]
        self.places = [self.layer_on(piece) for piece in self.pieces]
        self.link, self.coming, self.layers_left, self.sent, self.transfers = None, None, 1, 0, []

    def layer_on(self, piece) -> Layer:
        layer = Layer(self.config, self.rotary, dtype=self.dtype, device="meta")
        bind(layer, piece)
        return layer

    @property
    def device_bytes(self) -> int:
        """What of the weights is on the device, the two places included."""
        own = [self.embedding, self.rotary.table, self.norm.weight]
        own += [] if self.config.tie_word_embeddings else [self.head.weight]
        layers = [parameter for layer in self.resident.values() for parameter in layer.parameters()]
        return sum(tensor.nbytes for tensor in (*own, *layers, *self.pieces))

    @property
    def host_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.host.values())

    def following(self, index: int) -> tuple[int, int]:
        """The layer that is fetched while layer `index` computes, and for how many layers that goes on."""
        at = self.streamed.index(index) + 1
        return (self.streamed[at], self.streamed[at] - index) if at < len(self.streamed) else (
            self.streamed[0], self.streamed[0] + self.config.num_hidden_layers - index)

    def begin(self, index: int) -> Layer:
        """Layer `index`, when its weights are there: what is computed from here on sees them. From now on the next one's may be
        fetched, into the place of the one before. Raises TransferError."""
        if index in self.resident:
            return self.resident[index]
        if self.coming != index:                                        # at first, and after a failure
            self.forget()
            self.coming, self.layers_left = index, 1
        self.fetch(1.0)
        for transfer in self.transfers:
            transfer.wait()
        place = self.places.pop(0)
        self.places.append(place)
        self.pieces.reverse()
        (self.coming, self.layers_left), self.sent, self.transfers = self.following(index), 0, []
        return place

    def fetch(self, share: float) -> Transfer | None:
        """So large a share of the weights that are coming, or what is left of them."""
        size = len(self.pieces[0]) if self.coming is not None else 0
        end = size if share >= 1.0 else min(size, self.sent + math.ceil(share * size))
        if end <= self.sent:
            return None
        self.transfers.append(self.link.copy(self.pieces[0][self.sent:end], self.host[self.coming][self.sent:end], "weights"))
        self.sent = end
        return self.transfers[-1]

    def forget(self):
        """After a failure: nothing is coming any more."""
        for transfer in self.transfers:
            transfer.join()
        self.coming, self.sent, self.transfers = None, 0, []


def on(device, parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device), requires_grad=False)


def places_in(layer: Layer):
    """name, first and last + 1 number of each parameter of a layer in one piece of memory, on addresses divisible by 64."""
    end = 0
    for name, parameter in layer.named_parameters():
        first, step = end, 64 // parameter.itemsize
        end = first + parameter.numel()
        yield name, parameter, first, end
        end += -end % step


def piece_size(layer: Layer) -> int:
    """Numbers."""
    return max(end for _, _, _, end in places_in(layer))


def bind(layer: Layer, piece, fill: bool = False):
    """Let all parameters of the layer lie in `piece` [numbers]; with `fill`, with the values that they have."""
    for name, parameter, first, end in list(places_in(layer)):
        view = piece[first:end].view(parameter.shape)
        if fill:
            view.copy_(parameter.detach())
        module, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(module), leaf, nn.Parameter(view, requires_grad=False))


class Entry(NamedTuple):
    """Of a block table: what a block holds, where it is, and its number there."""
    kind: str                      # "act" or "kv"
    place: str                     # "device" or "host"
    number: int


class HybridPool(paged.BlockPool):
    """Blocks of both kinds, numbered through: first the device's ACT blocks, then the host's, then the host's KV blocks. For all
    that chapter 02 does with blocks they are alike; only who takes some asks for the right mix."""
    KINDS = ("act", "device"), ("act", "host"), ("kv", "host")

    def __init__(self, config, allocation: Allocation, block_size: int, dtype, device, in_order: bool = False):
        self.allocation, self.in_order = allocation, in_order           # in_order: ACT blocks first, as long as there are any
        self.firsts = 0, allocation.act_device, allocation.act_device + allocation.act_host
        super().__init__(config, sum(allocation), block_size, dtype, device)

    def memory(self, config, blocks: int, block_size: int, dtype, device):
        """Layer-first, in slots of one token: what a mini-batch reads of a layer lies in long runs."""
        act_device, act_host, kv_host = (blocks * block_size for blocks in self.allocation)
        layers, hidden, kv = config.num_hidden_layers, config.hidden_size, (config.num_key_value_heads, config.head_dim)
        self.act_device = torch.empty(layers, act_device, hidden, dtype=dtype, device=device)       # [L, slots, D]
        self.act_host = offload.pinned((layers, act_host, hidden), dtype, device, "The ACT pool")   # [L, slots, D]
        return offload.pinned((layers, 2, kv_host, *kv), dtype, device, "The KV pool")              # [L, 2, slots, KVH, hd]

    def kind(self, block: int) -> int:
        """Index into KINDS."""
        return (block >= self.firsts[1]) + (block >= self.firsts[2])

    def entry(self, block: int) -> Entry:
        kind = self.kind(block)
        return Entry(*self.KINDS[kind], block - self.firsts[kind])

    def allocate(self, count: int, table: list[int] = ()) -> list[int]:
        """Equation 5: each block is of a kind of which `table` has less than its share, and of these the one of which most is
        left in the pool: a kind with a small share is not forgotten where all requests are short. Where all such kinds have run
        out, another one does."""
        room = Counter(map(self.kind, (*self.free, *self.cached)))
        held, kinds = Counter(map(self.kind, table)), []
        for length in range(len(table) + 1, len(table) + count + 1):
            left = [kind for kind in range(3) if room[kind]]
            short = [kind for kind in left if held[kind] < length * self.allocation[kind] / self.size] or left
            kind = left[0] if self.in_order else max(short, key=lambda kind: room[kind] / self.allocation[kind])
            kinds.append(kind)
            held[kind] += 1
            room[kind] -= 1
        after = {self.kind(block): block for block in table}
        taken = {kind: iter(self.take(kind, wanted, after.get(kind))) for kind, wanted in Counter(kinds).items()}
        return [next(taken[kind]) for kind in kinds]

    def take(self, kind: int, count: int, after: int | None) -> list[int]:
        """`count` blocks of a kind, adjacent ones and behind `after` as far as possible; a run of them is one copy."""
        mine = [block for block in self.cached if self.kind(block) == kind]
        free = sorted(block for block in self.free if self.kind(block) == kind)
        for block in mine[:max(0, count - len(free))]:
            self.forget(block)
            self.counts["evictions"] += 1
            free.append(block)
        free.sort(key=lambda block: (after is None or block <= after, block))
        for block in free[:count]:
            del self.free[block]
            self.references[block] = 1
        return free[:count]

    def copy_on_write(self, block: int) -> int:
        raise NotImplementedError("here a block that is written has one owner: see Engine.fork")

    def runs(self, table: list[int], tokens: int) -> list[tuple[list[slice], list[int]]]:
        """Where the first `tokens` tokens of a table are -> for each of KINDS, its slots and its positions."""
        slots, positions = ([], [], []), ([], [], [])
        for index in range(self.needed(tokens)):
            kind, position = self.kind(table[index]), index * self.block_size
            first, count = (table[index] - self.firsts[kind]) * self.block_size, min(self.block_size, tokens - position)
            if slots[kind] and slots[kind][-1].stop == first:
                slots[kind][-1] = slice(slots[kind][-1].start, first + count)
            else:
                slots[kind].append(slice(first, first + count))
            positions[kind].extend(range(position, position + count))
        return list(zip(slots, positions))

    def check_integrity(self, tables: list[list[int]]):
        super().check_integrity(tables)
        slots = self.act_device.shape[1], self.act_host.shape[1], self.kv.shape[2]
        assert slots == tuple(blocks * self.block_size for blocks in self.allocation), "a pool has not as many slots as blocks"


@dataclass(eq=False)
class Buffer:
    """One of a pair: what the link has brought for a mini-batch, and where attention reads."""
    act: torch.Tensor              # [rows, D]
    kv: torch.Tensor               # [2, rows, KVH, hd]


class Context:
    """What a mini-batch has read before: where a layer's share of it lies, and where it lands. In the attention buffer the rows
    of a request follow each other: what comes as K and V, what is rebuilt, and at last its new tokens. The order of what
    was read makes no difference to attention: positions are in the keys."""

    def __init__(self, pool: HybridPool, items: list[tuple[paged.Request, int, int]]):
        """`items`: request, tokens of context, new tokens."""
        self.new: dict[paged.Request, tuple[int, int, int]] = {}        # first row, row of the first new token, context
        self.kv, self.act = ([], []), ([], [])                          # the host's slots, rows of the buffer: as many slices
        self.device_slots: list[int] = []
        rebuilt, self.rows, self.act_rows = (([], []), ([], [])), 0, 0          # (rows, positions) of the device's and the host's
        for request, start, count in items:
            first, (on_device, from_host, kv) = self.rows, pool.runs(request.table, start)
            for slots in kv[0]:
                self.land(self.kv, slots)
            for (rows, at), (_, positions) in zip(rebuilt, (on_device, from_host)):
                rows += range(self.rows, self.rows + len(positions))
                at += positions
                self.rows += len(positions)
            for slots in from_host[0]:
                self.act[0].append(slots)
                self.act[1].append(slice(self.act_rows, self.act_rows + slots.stop - slots.start))
                self.act_rows = self.act[1][-1].stop
            self.device_slots += [slot for slots in on_device[0] for slot in range(slots.start, slots.stop)]
            self.new[request] = first, self.rows, start
            self.rows += count
        device = pool.act_device.device
        self.device_slots = torch.tensor(self.device_slots, dtype=torch.int64, device=device)
        self.rebuilt = [torch.tensor(rows_and_positions, dtype=torch.int64, device=device) for rows_and_positions in rebuilt]

    def land(self, pieces: tuple[list, list], slots: slice):
        pieces[0].append(slots)
        pieces[1].append(slice(self.rows, self.rows + slots.stop - slots.start))
        self.rows = pieces[1][-1].stop


class Item(NamedTuple):
    """What one request does in a step."""
    request: paged.Request
    start: int                     # tokens of context
    count: int                     # new tokens
    blocks: Allocation             # of the context

    @property
    def tokens(self) -> int:
        return self.start + self.count

    def lanes(self, costs: Costs, share: float) -> tuple[float, float]:
        """Seconds on the link and on the processor, where `share` of the weights travels meanwhile, and so much of the step's new
        tokens is computed."""
        costs = costs._replace(load_weights=costs.load_weights * share, forward=costs.forward * share)
        return costs.link(self.blocks), costs.compute(self.blocks)


def imbalance(link: float, compute: float) -> float:
    """Equations 6 and 7: by how much one lane takes longer than the other, at least 1."""
    return max(compute, link) / max(min(compute, link), 1e-9)


def form_mini_batches(items: list[Item], costs: Costs, rows: int, act_rows: int, block_size: int):
    """Section IV-C-3, greedily -> an iterator over lists of Items: as few as the buffers allow, `rows` tokens in that of
    attention and `act_rows` in that of ACT blocks from the host, all about equally long. Each begins with the longest request
    that is left, and takes those with which it is balanced best."""
    total = sum(item.tokens for item in items)
    left = [(item, item.tokens, item.blocks.act_host * block_size, *item.lanes(costs, item.tokens / total)) for item in items]
    left.sort(key=lambda each: -each[1])
    while left:
        tokens, act = sum(each[1] for each in left), sum(each[2] for each in left)
        even = tokens / max(math.ceil(tokens / rows), math.ceil(act / act_rows) if act else 0)
        first, tokens, act, link, compute = left.pop(0)
        mini_batch = [first]
        while fitting := [each for each in left if tokens + each[1] <= rows and tokens + each[1] / 2 <= even
                          and act + each[2] <= act_rows]:
            best = min(fitting, key=lambda each: imbalance(link + each[3], compute + each[4]))
            left.remove(best)
            mini_batch.append(best[0])
            tokens, act, link, compute = tokens + best[1], act + best[2], link + best[3], compute + best[4]
        yield mini_batch


class Rows:
    """New tokens of a mini-batch that go through the layer together, at most ROWS: where their keys and values are written,
    what each may read, and which blocks keep their state."""

    def __init__(self, pool: HybridPool, parts: list[tuple[paged.Request, int, int]], context: Context, first: int):
        """`parts`: request, position of the first token, tokens; `first` is their row in the step's hidden states."""
        self.rows, self.blocks = slice(first, first + sum(count for _, _, count in parts)), set()
        self.reads: list[tuple[slice, slice]] = []                      # rows of the queries, rows of the buffer that they see
        keeps, positions, targets, row = ([], [], []), [], [], 0
        for request, position, count in parts:
            begin, new, start = context.new[request]
            end = new + position - start + count
            self.reads.append((slice(row, row + count), slice(begin, end)))
            positions += range(position, position + count)
            targets += range(end - count, end)
            for at in range(position, position + count):
                block = request.table[at // pool.block_size]
                kind = pool.kind(block)
                keeps[kind].append((row + at - position, (block - pool.firsts[kind]) * pool.block_size + at % pool.block_size))
                self.blocks.add(block)
            row += count

        def tensor(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=pool.act_device.device)
        self.positions, self.targets = tensor(positions), tensor(targets)                           # [T] each
        self.kept = [tensor([row for row, _ in pairs]) for pairs in keeps]                          # [n] for each of KINDS
        self.device_slots = tensor([slot for _, slot in keeps[0]])                                  # [n]
        self.act, self.kv = ([slots for slots in adjacent([slot for _, slot in pairs])] for pairs in keeps[1:])


def adjacent(slots: list[int]) -> list[tuple[slice, slice]]:
    """Numbers 0, 1, ... go to `slots` -> (those that follow each other, their slots) as pairs of slices."""
    pieces = []
    for number, slot in enumerate(slots):
        if pieces and pieces[-1][1].stop == slot:
            pieces[-1] = slice(pieces[-1][0].start, number + 1), slice(pieces[-1][1].start, slot + 1)
        else:
            pieces.append((slice(number, number + 1), slice(slot, slot + 1)))
    return pieces


def split(mini_batch: list[Item]):
    """Its new tokens in groups of at most ROWS -> an iterator over lists of (request, position of the first token, tokens)."""
    parts, room = [], ROWS
    for request, position, count, _ in mini_batch:
        while count:
            taken = min(count, room)
            parts.append((request, position, taken))
            position, count, room = position + taken, count - taken, room - taken
            if not room:
                yield parts
                parts, room = [], ROWS
    if parts:
        yield parts


class Step:
    """One step's tokens in mini-batches, in the order in which they go through each layer."""

    def __init__(self, pool: HybridPool, work: list[tuple[paged.Request, int]], mini_batches: list[list[Item]],
                 first: Context | None = None):
        """`first`: the context of the first mini-batch, where it is on its way already."""
        self.work, self.mini_batches, flat, last = work, [], [], {}
        total = sum(item.tokens for mini_batch in mini_batches for item in mini_batch)
        for mini_batch in mini_batches:
            context, first = first or Context(pool, [item[:3] for item in mini_batch]), None
            rows, share = [], sum(item.tokens for item in mini_batch) / total
            for parts in split(mini_batch):
                rows.append(Rows(pool, parts, context, len(flat)))
                for request, position, count in parts:
                    flat += request.tokens[position:position + count]
                    last[request] = len(flat) - 1
            self.mini_batches.append((context, rows, share))
        device = pool.act_device.device
        self.tokens = torch.tensor(flat, dtype=torch.int64, device=device)                          # [T]
        last = [last[request] for request, count in work if count == request.pending]
        self.last_rows = torch.tensor(last, dtype=torch.int64, device=device)                       # [R], as in chapter 02


@dataclass(eq=False)
class Arrival:
    """The context of a mini-batch in one layer, on its way into one of the buffers."""
    context: Context
    buffer: Buffer
    act: Transfer | None = None
    kv: Transfer | None = None


@dataclass(eq=False)
class Staging:
    """What is on its way to the host's blocks."""
    act: torch.Tensor              # [ROWS, D]
    kv: torch.Tensor               # [2, ROWS, KVH, hd]
    transfers: list[Transfer] = field(default_factory=list)


class Stored(NamedTuple):
    """A transfer that keeps the state of new tokens in `blocks` of the host."""
    step: int
    transfer: Transfer
    blocks: set[int]


@dataclass
class Record:
    """What a step did; times in seconds since the engine's timeline began."""
    start: float
    end: float
    tokens: int                    # that were computed
    context: int                   # that they read
    decoding: bool                 # one token for each request
    moved: Counter                 # bytes over the link: weights, act, kv (with what is for the next step), and back: stored


# 3. The engine ---------------------------------------------------------------------------------------------------

class Engine(paged.Engine):
    """Chapter 02's engine on an OffloadedModel. `model` is in host memory, as checkpoint.load(..., on_host=True) leaves it, and
    `device` computes. `lengths` are the tokens of the requests that are expected, prompt and answer; by default as many requests
    as may run, each as long as the context."""
    KEPT_STEPS = 4                 # whose spans the timeline keeps
    compared = "TBT"               # on the page: weights and context come back in every decode step
    LARGER = "a larger --host-memory"

    def __init__(self, model, tokenizer, end_tokens, block_size: int = 16, token_budget: int = 8192, max_running: int = 128,
                 max_waiting: int = 256, *, device=None, policy: str = "hybrid", device_memory: float | None = None,
                 host_memory: float | None = None, resident_layers: int = 0, mini_batch: int = 8192,
                 bytes_per_second: float | None = None, lengths: list[int] | None = None, costs: Costs | None = None):
        """Memory in bytes; `costs`, if they were measured before. Raises ModelError if memory is too small, with the sizes."""
        self.options = dict(block_size=block_size, token_budget=token_budget, max_running=max_running, max_waiting=max_waiting,
                            device=device, policy=policy, device_memory=device_memory, host_memory=host_memory,
                            resident_layers=resident_layers, mini_batch=mini_batch, bytes_per_second=bytes_per_second)
        self.on_host, device = model, torch.device(device or model.device)
        self.policy, self.memory, self.costs = policy, (device_memory, host_memory), costs
        self.bytes_per_second = bytes_per_second or links.bandwidth(model, device=device)
        context = model.config.max_position_embeddings
        self.lengths = sorted(lengths or [context] * max_running, reverse=True)[:max_running]       # of those at once, at worst
        self.rows = max(min(mini_batch, sum(self.lengths)), self.lengths[0])
        offloaded = OffloadedModel(model, device, resident_layers)
        super().__init__(offloaded, tokenizer, end_tokens, None, block_size, token_budget, max_running, max_waiting)
        self.ahead: Arrival | None = None                               # the next step's first context, on its way
        self.stored: list[deque[Stored]] = [deque() for _ in range(model.config.num_hidden_layers)]
        self.damaged: set[int] = set()                                  # blocks whose state was lost on its way to the host
        self.formed: list[list[Item]] = []                              # the mini-batches of the last step
        self.failures, self.kept = 0, False                             # steps that failed since a state was last seen to be kept
        self.timeline, self.records = Timeline(), deque(maxlen=256)
        self.marks, self.travelling, self.moved = [], deque(), Counter()
        self.counts.update(weights_bytes=0, act_bytes=0, kv_bytes=0, stored_bytes=0, transfer_errors=0)

    def request(self, *prompt, **sampling):
        """Chapter 01's, if its context fits into a buffer."""
        request = super().request(*prompt, **sampling)
        most = len(request.tokens) + request.max_tokens - 1             # the last token is never read
        if most > self.rows:
            raise BadRequest(f"{len(request.tokens)} prompt tokens and up to {request.max_tokens} new ones are more than the "
                             f"{self.rows} that the buffers hold; ask for less, or start with --mini-batch {most}.")
        return request

    # Memory

    def make_pool(self, _, block_size: int) -> HybridPool:
        """Buffers first; with them the costs are measured, and with the costs memory is divided."""
        model, config = self.model, self.model.config
        self.load_link, self.save_link = (Link(lane, self.clock, self.bytes_per_second) for lane in ("load", "save"))
        model.link = self.load_link
        tensor = partial(torch.zeros, dtype=model.dtype, device=model.device)
        hidden, kv = config.hidden_size, (config.num_key_value_heads, config.head_dim)
        self.act_rows = 0 if self.policy == "kv-only" else self.rows
        self.buffers = [Buffer(tensor(self.act_rows, hidden), tensor(2, self.rows, *kv)) for _ in range(2)]
        self.staging = [Staging(tensor(ROWS, hidden), tensor(2, ROWS, *kv)) for _ in range(2)]
        self.hidden = tensor(self.token_budget, hidden)                 # [T, D], between the layers
        self.act_bytes = config.num_hidden_layers * block_size * hidden * model.dtype.itemsize
        self.kv_bytes = block_size * config.kv_numbers_per_token * model.dtype.itemsize
        self.limits = self.measure_limits(block_size)
        self.room = self.measure_room(block_size)
        self.costs = self.costs or self.measure(block_size)
        self.allocation = allocate(self.policy, self.costs, self.room)
        least = -(-self.lengths[-1] // block_size)
        if sum(self.allocation) < least:
            raise checkpoint.ModelError(
                f"A request of {self.lengths[-1]} tokens takes {least} blocks and there is room for {sum(self.allocation)}: of "
                f"{self.limits[1] / 1e6:.1f} MB of host memory the weights take {model.host_bytes / 1e6:.1f} MB, and a block of "
                f"{block_size} tokens takes {self.kv_bytes / 1e6:.3f} MB as K and V; choose a larger --host-memory.")
        return HybridPool(config, self.allocation, block_size, model.dtype, model.device, in_order=self.policy == "static")

    @property
    def tensor_bytes(self) -> int:
        """Of weights and buffers on the device."""
        buffers = [tensor for pair in (*self.buffers, *self.staging) for tensor in (pair.act, pair.kv)] + [self.hidden]
        return self.model.device_bytes + sum(tensor.nbytes for tensor in buffers)

    @property
    def device_bytes(self) -> int:
        """Device memory that is taken beside ACT blocks: weights, buffers, and what products need for a moment."""
        config, size = self.model.config, self.model.dtype.itemsize
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        row = 6 * config.hidden_size + 4 * heads + 6 * kv_heads + 4 * config.intermediate_size + 2 * self.rows      # numbers
        head = self.max_running * (config.vocab_size + 2 * config.hidden_size)
        return self.tensor_bytes + (ROWS * row + head) * size

    def measure_limits(self, block_size: int) -> tuple[float, float]:
        """-> bytes of device and host memory: as asked for, or on a GPU most of what is free, and elsewhere room for half of the
        weights as ACT blocks; and in the host what the batch can use, within half of what is free."""
        device, host = self.memory
        if device is None and self.model.device.type == "cuda":
            device = 0.9 * torch.cuda.mem_get_info()[0] + self.tensor_bytes
        elif device is None:
            device = self.device_bytes + self.model.host_bytes / 2
        if host is None:
            host = self.model.host_bytes + min(self.useful(block_size) * max(self.kv_bytes, self.act_bytes),
                                               checkpoint.free_host_memory() / 2)
        return device, host

    def useful(self, block_size: int) -> int:
        """Blocks that the expected requests can use; one more each, which must be free when another one comes in."""
        return sum(-(-length // block_size) + 1 for length in self.lengths)

    def measure_room(self, block_size: int) -> Room:
        (device, host), model = self.limits, self.model
        if device < self.device_bytes:
            raise checkpoint.ModelError(
                f"Weights of {len(model.resident) + len(model.pieces)} layers, embedding, head and buffers for {self.rows} "
                f"tokens take {self.device_bytes / 1e6:.1f} MB of device memory, and there are {device / 1e6:.1f} MB; choose a "
                "larger --device-memory, a smaller --mini-batch or fewer --resident-layers.")
        if host < model.host_bytes:
            raise checkpoint.ModelError(
                f"The weights of {len(model.streamed)} layers take {model.host_bytes / 1e6:.1f} MB of host memory, and there are "
                f"{host / 1e6:.1f} MB; choose a larger --host-memory.")
        if host - model.host_bytes > checkpoint.free_host_memory():
            raise checkpoint.ModelError(
                f"{(host - model.host_bytes) / 1e9:.1f} GB for blocks in host memory are more than the "
                f"{checkpoint.free_host_memory() / 1e9:.1f} GB that are free; choose a smaller --host-memory.")
        on_device = int((device - self.device_bytes) // self.act_bytes)
        return Room(int(host - model.host_bytes), self.act_bytes, self.kv_bytes, on_device, self.useful(block_size))

    @torch.inference_mode()
    def measure(self, block_size: int, rounds: int = 4) -> Costs:
        """What a layer costs on this machine, with as many requests and as long contexts as are expected; medians. The processor
        works in one buffer while the link fills the other, as in a step."""
        model, layers = self.model, self.model.config.num_hidden_layers
        layer = model.begin(model.streamed[0] if model.streamed else 0)
        length, requests = max(1, int(statistics.mean(self.lengths))), min(len(self.lengths), self.token_budget)
        together = max(1, min(requests, self.rows // length))           # requests in a mini-batch
        rows = min(self.rows, together * length)
        states = torch.randn(rows, model.config.hidden_size).to(model.dtype).to(model.device)       # [rows, D]
        targets = torch.arange(rows, device=model.device)
        positions = targets % self.context
        hidden = states[:1].expand(requests, -1).contiguous()           # [R, D]
        first_position = model.rotary(positions[:1])                    # [1, 1, hd] each
        queries = layer.queries(hidden[:together], first_position)      # [together, H, hd]
        reads = [(slice(row, row + 1), slice(row * length, (row + 1) * length)) for row in range(together)]

        def forward(buffer):
            for first in range(0, together, ROWS):
                layer(hidden[:together][first:first + ROWS], first_position, lambda q, k, v: q)

        def rebuild(buffer):
            for first in range(0, rows, ROWS):
                part = slice(first, first + ROWS)
                self.rebuild(layer, states[part], buffer, targets[part], positions[part])
        work = dict(attend=lambda buffer: self.attend(queries, buffer, reads), forward=forward, rebuild=rebuild,
                    head=lambda buffer: model.logits(hidden))
        taken = {name: [] for name in work}
        on_host = offload.pinned((2, rows, *self.buffers[0].kv.shape[2:]), model.dtype, model.device, "A buffer").normal_()
        for _ in range(rounds + 1):
            self.buffers.reverse()
            transfer = self.load_link.copy(self.buffers[1].kv[:, :rows], on_host, "measurement")
            for name, function in work.items():
                began = self.clock.mark()
                function(self.buffers[0])
                taken[name].append((began, self.clock.mark()))
            transfer.join()
        attend, forward, rebuild, head = (
            statistics.median(self.clock.seconds(end) - self.clock.seconds(began) for began, end in marks[1:])
            for marks in taken.values())
        speed = self.load_link.speed()
        return Costs(load_weights=model.host_bytes / layers / speed, forward=forward * requests / together + head / layers,
                     attend=attend / (together * length) * block_size, rebuild=rebuild / rows * block_size,
                     load_act=self.act_bytes / layers / speed, load_kv=self.kv_bytes / layers / speed)

    # One step

    def batch(self, work) -> Step:
        """The step's mini-batches. What is on its way already comes first, if it is still wanted."""
        items = {request: Item(request, request.computed, count, self.blocks_of(request, request.computed))
                 for request, count in work}
        first = []
        if self.ahead:
            first = [items.pop(request) for request, (_, _, start) in self.ahead.context.new.items()
                     if request in items and items[request][1:3] == (start, 1)]
            if not first:
                self.discard()
        self.formed = mini_batches = ([first] if first else []) + list(self.form(list(items.values())))
        return Step(self.pool, work, mini_batches, self.ahead.context if first else None)

    def discard(self):
        """Nobody waits for what is on its way for the next step, and nothing else may come into its buffer before it is there."""
        for transfer in (self.ahead.act, self.ahead.kv) if self.ahead else ():
            if transfer:
                transfer.join()
        self.ahead = None

    def blocks_of(self, request, tokens: int) -> Allocation:
        held = Counter(map(self.pool.kind, request.table[:self.pool.needed(tokens)]))
        return Allocation(held[0], held[1], held[2])

    def form(self, items: list[Item]):
        """-> an iterator over mini-batches."""
        if self.policy != "static":
            return form_mini_batches(items, self.costs, self.rows, self.act_rows, self.pool.block_size)
        formed, room = [], 0                                            # in the order of arrival
        for item in items:
            if item.tokens > room:
                formed.append([])
                room = self.rows
            formed[-1].append(item)
            room -= item.tokens
        return iter(formed)

    @torch.inference_mode()
    def forward(self, step: Step):
        """All mini-batches through layer after layer; while one computes, the context of the next one arrives, and a part of the
        next layer's weights."""
        model, hidden = self.model, self.hidden[:len(step.tokens)]      # [T, D]
        self.moved, self.marks, number = Counter(), [], self.counts["steps"]
        hidden.copy_(model.embed(step.tokens))
        arrival, self.ahead = self.ahead or self.bring(0, step.mini_batches[0][0], number), None
        layers, ahead = model.config.num_hidden_layers, self.look_ahead(step)
        for index in range(layers):
            layer = model.begin(index)
            for at, (_, rows, share) in enumerate(step.mini_batches):
                # 1. What comes next: a part of the next weights, and the next context
                self.travel("weights", model.fetch(share / model.layers_left))
                if at + 1 < len(step.mini_batches):
                    following = self.bring(index, step.mini_batches[at + 1][0], number)
                elif index + 1 < layers:
                    following = self.bring(index + 1, step.mini_batches[0][0], number)
                elif ahead and layers > 1:
                    following = self.ahead = self.bring(0, ahead, number + 1)
                else:                                                   # of one layer, this step's own states are not there yet
                    following = None

                # 2. K and V of what was kept as activations
                self.rebuild_all(index, layer, arrival)

                # 3. The layer, for the new tokens
                if arrival.kv:
                    arrival.kv.wait()
                began = self.clock.mark()
                for part in rows:
                    self.compute_rows(index, layer, part, arrival.buffer, hidden, number)
                self.marks.append(("forward", began, self.clock.mark()))
                arrival = following
        return model.logits(hidden[step.last_rows])                     # [R, V]

    def bring(self, index: int, context: Context, number: int) -> Arrival:
        """Issue the transfers of a context in one layer. What earlier steps stored in that layer must be there."""
        self.settle(index, number)
        arrival = Arrival(context, self.buffers[0])
        self.buffers.reverse()
        pool, buffer = self.pool, arrival.buffer
        if context.act[0]:
            arrival.act = self.load_link.copy([buffer.act[rows] for rows in context.act[1]],
                                              [pool.act_host[index, slots] for slots in context.act[0]], "act")
            self.travel("act", arrival.act)
        if context.kv[0]:
            arrival.kv = self.load_link.copy([buffer.kv[:, rows] for rows in context.kv[1]],
                                             [pool.kv[index, :, slots] for slots in context.kv[0]], "kv")
            self.travel("kv", arrival.kv)
        return arrival

    def look_ahead(self, step: Step) -> Context | None:
        """The first context of the next step, which is to arrive while this one is in its last layer. Which answers end here is
        not known yet; but a request that goes on reads what it reads now, and one token more."""
        items = [Item(request, request.computed + count, 1, self.blocks_of(request, request.computed + count))
                 for request, count in step.work
                 if count == request.pending and len(request.answer.tokens) + 1 < request.max_tokens]
        return Context(self.pool, [item[:3] for item in next(self.form(items))]) if items else None

    def rebuild_all(self, index: int, layer, arrival: Arrival):
        context, buffer = arrival.context, arrival.buffer
        for (targets, positions), on_device in zip(context.rebuilt, (True, False)):
            if not on_device and arrival.act:
                arrival.act.wait()
            began = self.clock.mark()
            for first in range(0, len(targets), ROWS):
                part = slice(first, first + ROWS)
                states = self.pool.act_device[index].index_select(0, context.device_slots[part]) if on_device else (
                    buffer.act[part][:len(targets) - first])            # [T, D]
                self.rebuild(layer, states, buffer, targets[part], positions[part])
            if len(targets):
                self.marks.append(("rebuild", began, self.clock.mark()))

    def rebuild(self, layer, states, buffer: Buffer, targets, positions):
        """K and V of activations [T, D] at `positions` [T], into rows `targets` [T] of the attention buffer."""
        for rows, values in zip(buffer.kv, layer.project_kv(states, positions)):                    # [T, KVH, hd] each
            rows.index_copy_(0, targets, values)

    def compute_rows(self, index: int, layer, part: Rows, buffer: Buffer, hidden, number: int):
        """At most ROWS new tokens through a layer, and their state into their blocks."""
        states = hidden[part.rows]                                      # [T, D]
        staging = self.staging[0]
        self.staging.reverse()
        for transfer in staging.transfers:                              # an error is seen in `settle`
            with suppress(TransferError):
                transfer.wait()
        if len(part.device_slots):
            self.pool.act_device[index].index_copy_(0, part.device_slots, states.index_select(0, part.kept[0]))
        staging.act[:len(part.kept[1])] = states.index_select(0, part.kept[1])

        def attend(q, k, v):
            for rows, values, staged in zip(buffer.kv, (k, v), staging.kv):
                rows.index_copy_(0, part.targets, values)
                staged[:len(part.kept[2])] = values.index_select(0, part.kept[2])
            return self.attend(q, buffer, part.reads)
        hidden[part.rows] = layer(states, self.model.rotary(part.positions), attend)
        staging.transfers = self.store(index, part, staging, number)

    def attend(self, q, buffer: Buffer, reads):
        """q [T, H, hd] -> [T, H, hd]: each request's rows over its rows of the buffer."""
        out, (keys, values) = torch.empty_like(q), buffer.kv            # [rows, KVH, hd] each
        for rows, seen in reads:
            (count, _, _), k, v, mask = q[rows].shape, keys[seen].transpose(0, 1), values[seen].transpose(0, 1), None
            if 1 < count < k.shape[1]:                                  # row i sees what was before these rows, and i + 1 of them
                mask = torch.ones(count, k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - count)    # [T, S]
            out[rows] = baseline.attention(q[rows], k, v, mask)
        return out

    def store(self, index: int, part: Rows, staging: Staging, number: int) -> list[Transfer]:
        """What belongs to the host's blocks goes there."""
        pool, transfers = self.pool, []
        if part.act:
            transfers.append(self.save_link.copy([pool.act_host[index, slots] for _, slots in part.act],
                                                 [staging.act[rows] for rows, _ in part.act], "store act"))
        if part.kv:
            transfers.append(self.save_link.copy([pool.kv[index, :, slots] for _, slots in part.kv],
                                                 [staging.kv[:, rows] for rows, _ in part.kv], "store kv"))
        for transfer in transfers:
            self.travel("stored", transfer)
            self.stored[index].append(Stored(number, transfer, part.blocks))
        return transfers

    def settle(self, index: int, number: int):
        """Wait until what steps before `number` stored in layer `index` is there; the host waits, but that was layers ago.
        Raises TransferError."""
        stored = self.stored[index]
        while stored and stored[0].step < number:
            _, transfer, blocks = stored.popleft()
            transfer.join()
            if transfer.error is not None:
                self.damaged |= blocks
                raise TransferError(transfer)
            self.kept = True

    def travel(self, kind: str, transfer: Transfer | None):
        if transfer is not None:
            self.travelling.append(transfer)
            self.moved[kind] += transfer.bytes
            self.counts[f"{kind}_bytes"] += transfer.bytes

    def compute(self, work):
        """Chapter 02's, and the books of the step."""
        steps, began = self.counts["steps"], self.clock.mark()
        read, tokens = sum(request.computed for request, _ in work), sum(count for _, count in work)
        decoding = all(count == 1 for _, count in work)
        super().compute(work)
        began, ended = (self.clock.seconds(mark) - self.timeline.began for mark in (began, self.clock.mark()))
        self.note_spans()
        if self.counts["steps"] > steps:
            if self.kept or not self.moved["stored"]:                   # what this step stored is not known to be there yet
                self.failures, self.kept = 0, False
            self.records.append(Record(began, ended, tokens, read, decoding, self.moved))

    def note_spans(self):
        """What is over goes into the timeline, and what was before the last steps goes out of it."""
        for label, began, ended in self.marks:
            self.timeline.add("compute", label, self.clock.seconds(began), self.clock.seconds(ended))
        for transfer in [transfer for transfer in self.travelling if transfer.ready]:
            self.travelling.remove(transfer)
            self.timeline.add(transfer.lane, transfer.label, *transfer.span())
        self.marks, oldest = [], self.records[-self.KEPT_STEPS].start if len(self.records) >= self.KEPT_STEPS else 0.0
        self.timeline.spans = [span for span in self.timeline.spans if span.end > oldest]

    def fail(self, work, error: Exception):
        """After a failed transfer nobody has lost anything but a step; whose state was lost on its way to the host is computed
        again. After RETRIES steps in a row, all of the step's requests fail."""
        self.discard()
        self.model.forget()
        for transfer in self.travelling:
            transfer.join()
        for stored in self.stored:                                      # what else was lost shows now, not in the retries
            self.damaged.update(*(blocks for _, transfer, blocks in stored if transfer.error is not None))
            stored.clear()
        for block in self.damaged:
            self.pool.forget(block)
        for request in [request for request in self.running if not self.damaged.isdisjoint(request.table)]:
            self.preempt(request)
        self.damaged, self.kept = set(), False
        if isinstance(error, TransferError):
            self.counts["transfer_errors"] += 1
            self.failures += 1
            if self.failures < RETRIES:
                return
        self.failures = 0
        super().fail(work, error)

    def restore(self, request):
        """Chapter 02's: what is cached is in the table already. It is brought in every step."""
        first_time = request.source is None
        yield from super().restore(request)
        if first_time and any(self.pool.entry(block).place == "host" for block in request.table[:request.saved]):
            request.source = "cpu_hit"

    def fork(self, request) -> list:
        """The other samples come in next, and find the prompt's full blocks; a block that is written has one owner."""
        forks, request.forks = request.forks, []
        for fork in forks:
            fork.inherit(request)
        self.waiting.extendleft(reversed(forks))
        return []

    def counters(self) -> dict:
        pool = self.pool
        return dict(super().counters(), **self.allocation._asdict(), policy=self.policy,
                    device_bytes=self.device_bytes + pool.act_device.nbytes,
                    host_bytes=self.model.host_bytes + pool.act_host.nbytes + pool.kv.nbytes)

    # What the page shows

    admin = {}                     # noqa: RUF012   no /evict: what is cached is in host memory, and nobody else has it

    def tiers(self) -> list[live.Tier]:
        pool, tiers = live.of_pool("", "", self.pool, list(self.running)), []
        for kind, (what, place) in enumerate(HybridPool.KINDS):
            where, start = "Device" if place == "device" else "Host memory", self.pool.firsts[kind]
            tiers.append(live.part(
                f"{what}-{place}", f"{where}: {what.upper()} blocks of {self.pool.block_size} tokens", pool, start,
                start + self.allocation[kind], self.kv_bytes if what == "kv" else self.act_bytes))
        return tiers

    def result(self, request):
        """Chapter 02's; drawn are the mini-batches of its last step, and the lanes of the last steps."""
        result, costs, batches = super().result(request), self.costs, []
        total = sum(item.tokens for items in self.formed for item in items)
        for items in self.formed:
            blocks = Allocation(*map(sum, zip(*(item.blocks for item in items))))
            share = sum(item.tokens for item in items) / total
            part = costs._replace(load_weights=costs.load_weights * share, forward=costs.forward * share)
            batches.append((len(items), *blocks, part.link(blocks), part.compute(blocks)))
        request.timeline.plan = partial(figure.MiniBatches, "The mini-batches of its last step, as planned", batches)
        if self.records:
            start = self.records[max(0, len(self.records) - 2)].start
            result.timeline.detail = self.timeline.window(start, time.perf_counter() - self.timeline.began)
        return result

    def drawn(self, request):
        return request.timeline.plan()

    def ways(self, prompt: list[int], new: int, stack) -> dict:
        """TOGETHER requests with this prompt, under each policy."""
        alone = baseline.Engine(whole_model(self), *self.parts[1:])
        options = dict(self.options, lengths=[len(prompt) + new] * TOGETHER, max_running=TOGETHER, device_memory=None,
                       host_memory=None)
        engines, costs = {}, None
        for policy in POLICIES:
            engines[policy] = Engine(self.on_host, *self.parts[1:], **dict(options, policy=policy, costs=costs))
            costs = engines[policy].costs
        salts = map(str, itertools.count())

        def way(engine: Engine):
            asked = [dict(prompt=prompt, max_tokens=new, cache_salt=next(salts)) for _ in range(TOGETHER)]
            return paged.run_together(engine, asked).requests[0].outcome
        return {"one request, all on the device (01)": lambda: alone.generate(prompt=prompt, max_tokens=new),
                **{f"{policy}, {TOGETHER} at once": partial(way, engine) for policy, engine in engines.items()}}


# 4. The demo -----------------------------------------------------------------------------------------------------

TOGETHER = 4                       # answers at once in the page's comparison
REQUESTS, NEW, TURN = 32, 16, 4    # answers at once, tokens of each, steps that a policy takes before it is another one's turn


class Run:
    """A batch under one policy, in turns of some steps. The first step of a turn is not counted, for its transfers began in
    another one's time, nor are those in which not all requests decode."""

    def __init__(self, engine: Engine, prompts: list[list[int]], new: int):
        for memory in (engine.pool.kv, engine.pool.act_host, engine.pool.act_device):
            memory.zero_()                                              # the first touch is slow, and not what is measured
        self.engine, self.requests = engine, [engine.submit(prompt=prompt, max_tokens=new)[0] for prompt in prompts]
        self.seconds: list[float] = []
        self.busy: dict[str, list[float]] = dict(compute=[], load=[])
        self.record: Record | None = None                               # of the last step that counted
        self.blocks = 0.0                                               # of context, in that step
        self.chart = Timeline()                                         # two layers of it

    def turn(self, steps: int = TURN) -> bool:
        """-> whether there is more to do."""
        engine, more = self.engine, True
        for number in range(steps):
            blocks = sum(request.computed for request in engine.running) / engine.pool.block_size
            began = time.perf_counter()
            more = engine.step()
            seconds, records = time.perf_counter() - began, engine.records
            if self.record is not None:                                 # by now all of the step before is in the timeline
                self.look_at(self.record)
            self.record = None
            if number and more and records[-1].decoding and records[-1].tokens == len(self.requests):
                self.seconds.append(seconds)
                self.record, self.blocks = records[-1], blocks
            if not more:
                break
        return more

    def look_at(self, record: Record):
        timeline, layers = self.engine.timeline, self.engine.model.config.num_hidden_layers
        for lane, busy in self.busy.items():
            busy.append(1 - timeline.bubble(lane, record.start, record.end))
        middle, two = (record.start + record.end) / 2, (record.end - record.start) * 2 / layers
        self.chart, self.moved = timeline.window(middle - two / 2, middle + two / 2), record.moved
        self.chart.plan = lambda: self.engine.drawn(self.requests[0])

    def bound(self, costs: Costs) -> float | None:
        """Seconds of a step in which neither lane could have been faster."""
        layers, room = self.engine.model.config.num_hidden_layers, self.engine.room
        return None if self.engine.policy == "static" else layers * bound(costs, self.blocks, room.device, self.engine.policy)

    def row(self, costs: Costs) -> dict:
        tokens, seconds, least = len(self.requests), statistics.median(self.seconds), self.bound(costs)
        return dict(policy=self.engine.policy, **self.engine.allocation._asdict(), tokens_per_second=tokens / seconds,
                    min=tokens / max(self.seconds), max=tokens / min(self.seconds), samples=len(self.seconds),
                    bytes_per_step=dict(self.moved), compute_busy=statistics.median(self.busy["compute"]),
                    link_busy=statistics.median(self.busy["load"]), measured_over_bound=seconds / least if least else None)


def demo(engine: Engine, arguments):
    """A batch under the four policies, in turn, on one model, one link and one clock."""
    # 1. The batch, and an engine for each policy
    rng, new = random.Random(0), max(8, min(arguments.max_tokens, NEW))
    talks = [paged.conversation(engine, rng, engine.context // (12, 10, 8, 7)[number % 4]) for number in range(REQUESTS)]
    prompts = [engine.encode(None, messages)[0][:engine.context - new] for messages in talks]
    lengths = [len(prompt) + new for prompt in prompts]
    options = dict(engine.options, mini_batch=min(arguments.mini_batch, max(sum(lengths) // 4, *lengths)), lengths=lengths,
                   max_running=max(REQUESTS, engine.max_running), token_budget=max(sum(lengths), engine.token_budget))
    costs, runs = None, []
    for policy in POLICIES:
        one = Engine(engine.on_host, engine.tokenizer, frozenset(), **dict(options, policy=policy, costs=costs))
        costs, runs = one.costs, [*runs, Run(one, prompts, new)]

    # 2. They take turns, and are compared with chapter 01 before anything is printed
    while any([run.turn() for run in runs]):
        pass
    for failed in [request.outcome for run in runs for request in run.requests if isinstance(request.outcome, Exception)]:
        raise failed
    if not all(run.seconds for run in runs):
        raise checkpoint.ModelError(f"There is not memory for {REQUESTS} requests at once under every policy; choose a larger "
                                    "--host-memory or leave it out.")
    alone = baseline.Engine(whole_model(engine), engine.tokenizer, frozenset())
    verified = paged.verify(alone, [paged.Run(run.requests) for run in runs])

    # 3. What they did
    hybrid = runs[0].engine
    print(f"{REQUESTS} prompts, {sum(map(len, prompts))} tokens; {hybrid.load_link}; the weights of {len(hybrid.model.streamed)} "
          f"layers take {hybrid.model.host_bytes / 1e6:.1f} MB,\nand the device has room for "
          f"{hybrid.room.device * hybrid.act_bytes / 1e6:.1f} MB of blocks\n")
    rows = [run.row(costs) for run in runs]
    print(" " * 13 + "blocks there is room for" + " " * 28 + "MB over the link" + " " * 6 + "busy share of" + " " * 5 + "time\n"
          "  policy   ACT, device  ACT, host  KV, host   tokens/s, steps        weights   KV  ACT   compute  link  / bound")
    for row in rows:
        moved = [row["bytes_per_step"].get(kind, 0) / 1e6 for kind in ("weights", "kv", "act")]
        over = f"{row['measured_over_bound']:9.2f}" if row["measured_over_bound"] else ""
        line = ("  {policy:8} {act_device:11} {act_host:10} {kv_host:9} {tokens_per_second:7.1f} "
                "({min:.1f} to {max:.1f})").format(**row)
        print(f"{line:65}{moved[0]:6.1f}{moved[1]:6.1f}{moved[2]:5.1f}{row['compute_busy']:10.0%}{row['link_busy']:6.0%}{over}")
    for run in runs[:3]:
        print(f"\nTwo layers of a decode step, {run.engine.policy} (w: weights, k: KV blocks, a: ACT blocks arrive; r: K and V\n"
              f"are rebuilt, f: the rest of the layer; s: new states leave)\n{run.chart.chart(width=96, bubbles=True)}")
    return dict(link=dict(modelled=hybrid.load_link.modelled, gbps=hybrid.load_link.speed() / 1e9), verified=verified, rows=rows,
                costs=costs._asdict(), counters=hybrid.counters()), [run.chart for run in reversed(runs)]


def whole_model(engine: Engine) -> Llama:
    """For chapter 01: all of the model where it computes."""
    if engine.model.device.type == "cpu":
        return engine.on_host
    model = copy.deepcopy(engine.on_host).to(engine.model.device)
    model.device = engine.model.device
    return model


# 5. Main ---------------------------------------------------------------------------------------------------------

def add_arguments(parser):
    parser.add_argument("--policy", choices=POLICIES, default="hybrid", help="what the context is kept as (default hybrid)")
    parser.add_argument("--device-memory", type=app.bounded(float, 0, 1e6), metavar="GB",
                        help="device memory for weights, buffers and ACT blocks (default: most of what is free on a GPU; else "
                             "enough to hold half of the layers as ACT blocks)")
    parser.add_argument("--host-memory", type=app.bounded(float, 0, 1e6), metavar="GB",
                        help="host memory for weights and blocks (default: all that can be used, within half of what is free)")
    parser.add_argument("--resident-layers", type=app.bounded(int, 0, 1024), default=0, metavar="N",
                        help="layers whose weights stay on the device (default 0)")
    parser.add_argument("--mini-batch", type=app.bounded(int, 1, 1 << 20), default=8192, metavar="TOKENS",
                        help="tokens of context that are on the device at once (default 8192)")
    parser.add_argument("--block-size", type=app.bounded(int, 1, 1 << 16), default=16, metavar="TOKENS",
                        help="tokens per block (default 16)")
    parser.add_argument("--token-budget", type=app.bounded(int, 1, 1 << 20), default=8192, metavar="TOKENS",
                        help="tokens per step, decode and prefill together (default 8192)")
    parser.add_argument("--max-running", type=app.bounded(int, 1, 1 << 12), default=128, metavar="N",
                        help="answers that may be written at once (default 128)")
    links.add_arguments(parser)
    batch.add_arguments(parser)


def make_engine(model, tokenizer, end_tokens, arguments) -> Engine:
    device, lengths = torch.device(checkpoint.pick_device(arguments.device)), None
    if arguments.batch:                                                 # they are known: memory is divided for them
        frontend = baseline.Frontend(model, tokenizer, end_tokens)
        lengths = [prompt + most for prompt, most in batch.requests_in(arguments.batch, frontend, Engine.fields)]
    engine = Engine(model, tokenizer, end_tokens, arguments.block_size, arguments.token_budget, arguments.max_running,
                    device=device, policy=arguments.policy, lengths=lengths,
                    device_memory=arguments.device_memory and arguments.device_memory * 1e9,
                    host_memory=arguments.host_memory and arguments.host_memory * 1e9,
                    resident_layers=arguments.resident_layers, mini_batch=arguments.mini_batch,
                    bytes_per_second=links.bandwidth(model, arguments.link, arguments.platform, device))
    blocks, offloaded = engine.allocation, engine.model
    print(f"Weights: {len(offloaded.streamed)} layers, {offloaded.host_bytes / 1e6:.1f} MB, in host memory, "
          f"{len(offloaded.resident)} on the device\n"
          f"Blocks of {arguments.block_size} tokens: {blocks.act_device} ACT on the device, {blocks.act_host} ACT and "
          f"{blocks.kv_host} KV in host memory; an ACT block takes {engine.act_bytes / 1e6:.3f} MB, a KV block "
          f"{engine.kv_bytes / 1e6:.3f} MB\nThe host is reached over a {engine.load_link}", file=sys.stderr)
    return engine


if __name__ == "__main__":
    app.main(__doc__, "08_hybrid_blocks", add_arguments, make_engine, demo, load=partial(checkpoint.load, on_host=True),
             check=batch.check, batch=batch.answer)
