"""CacheFlow (arXiv 2604.25080, 2026), as a variant: two pointers over layers, and an order of what comes back at once.

    python -m benchmarks.flow                                      all; results in benchmarks/results/

layers    TTFT of a question of 32 tokens behind 1,024: layers are computed from the first one up while others load from
          the last one down, until both meet; only loading (03), chapter 05's plan, two pointers over tokens (06). Over
          three links, and over one that is four times slower than the one that chapter 05 has planned for.
batch     Eight histories come back at once over one link: mean and 90th percentile of TTFT. First comes the oldest one,
          the one that saves most seconds of computing for each second that it takes, or the shortest one. And the rounds
          a second that 03 and 05 answer so, where the next one always waits.

Each row says what was restored and computed; all ways must answer alike. All links are modelled, so all is on the CPU.
"""

import importlib
import math
import random
import statistics
import time
from functools import partial

import torch

from benchmarks import measure, tables
from benchmarks import planned as behind
from benchmarks.measure import draw, ratio, spread
from benchmarks.planned import LINKS, QUESTION, hidden_states, offload, paged, planned
from common.llama import upload
from common.requests import Request
from common.store import StoredChunks
from shell import lesson

both_ends = importlib.import_module("06_bidirectional")
CELLS = [(words, share, 1) for words, share in LINKS.items()] + [("four times slower than planned for", 1.0, 4)]
TOKENS, LENGTHS = 1024, [128, 128, 256, 256, 384, 512, 512, 768]  # of the one history, and of those of a batch
ORDERS = {"oldest": None, "most saved": lambda flow: -flow.layer / flow.match.seconds, "shortest": lambda flow: flow.match.seconds}


class Flow:
    """A history on its way back: what its layers are computed with, and where they land."""

    @torch.inference_mode()
    def __init__(self, cache, request, restoration, match):
        start, end, device = restoration.start, restoration.end, cache.model.device
        part = Request(request.tokens[:end], 1, table=request.table, computed=start)
        self.batch = paged.Batch(cache.pool, [(part, end - start)])
        self.rotation = cache.model.rotary(self.batch.positions)
        self.hidden = cache.model.embed(self.batch.tokens)  # [T, D], the input of the first layer that is not there
        table = request.table[start // cache.pool.block_size :][: len(match.blocks)]
        self.table, self.blocks = upload(table, device), match.blocks  # on the device, and on the host
        self.places = offload.links.Places(range(len(table)), match.blocks)
        self.match, self.restoration = match, restoration
        self.next, self.back = 1, cache.depth  # the layer behind the one that is computed next; the first one that loads
        self.transfers, self.landing, self.due = {}, {}, {}  # layer -> Transfer, [n, 2, block size, KVH, hd], seconds
        self.layer = cache.estimates.seconds_to_compute(start, end) / cache.depth  # seconds to compute one
        self.copying = cache.load_link.latency + cache.host.block_bytes * len(table) / cache.depth / cache.load_link.speed()


class FlowCache(offload.HostCache):
    """K and V in host memory, as in chapter 03. What is loaded lands beside its blocks, so the processor may take a
    layer whose copy is still under way. `order`: a sort key of Flows; None: the oldest first."""

    order = None
    project = hidden_states.HiddenCache.project

    def attach(self, engine):
        super().attach(engine)
        self.depth, self.flows, self.free = len(self.model.layers), {}, 0.0  # `free`: when the link will be

    def match(self, request):
        if match := super().match(request):
            end = request.computed + match.tokens
            compute = self.estimates.seconds_to_compute(request.computed, end)
            match.seconds, match.rows = both_ends.meeting(match.seconds, compute)[0], match.tokens
            return match

    def restore(self, request, restoration, match):
        self.flows[request] = flow = Flow(self, request, restoration, match)
        self.host.share(flow.blocks)
        if order := self.order:  # whom the engine resumes and waits for first
            self.engine.running.sort(key=lambda one: order(self.flows[one]) if one in self.flows else -math.inf)
        try:
            for _ in range(2):  # it begins, and is resumed, before the next one begins
                yield  # until all that have come with it are in line
            while not self.meet(flow):
                if self.unmet()[0] is flow:
                    self.compute(flow)
                yield
            del self.flows[request]
            self.compute(flow, last=True)
            for layer in range(restoration.layers, self.depth):
                if layer in flow.landing:
                    yield flow.transfers[layer]
                    self.put(flow, layer)
                restoration.layers += 1
        finally:
            self.flows.pop(request, None)
            for transfer in flow.transfers.values():
                transfer.cancel()
            self.hold("load", list(flow.transfers.values()), given=[(self.host, flow.blocks)])

    def unmet(self) -> list[Flow]:
        """-> those whose pointers have not met, in the order in which link and processor serve them."""
        return [self.flows[request] for request in self.engine.running if request in self.flows]

    def meet(self, flow: Flow) -> bool:
        """Whether the next layer comes sooner over the link than by computing the one before it."""
        for layer in [layer for layer in flow.landing if layer >= flow.next and flow.transfers[layer].ready]:
            self.put(flow, layer)
        self.load_ahead()
        if flow.next < flow.back:
            return False
        return flow.next == self.depth or flow.due[flow.next] - time.perf_counter() <= flow.layer

    def load_ahead(self):
        """Order layers, the last one first, so that the link stays busy while a layer is computed, and no more."""
        unmet, now = self.unmet(), time.perf_counter()
        self.free = max(now, self.free) if self.load_link.settle() else now
        for flow in unmet:
            while flow.next < flow.back and self.free - now <= unmet[0].layer:
                self.load_layer(flow)

    def load_layer(self, flow: Flow):
        """Order the layer before the last one that was ordered; it lands beside its blocks."""
        flow.back, self.free = flow.back - 1, self.free + flow.copying
        layer, memory = flow.back, self.host.memory[flow.back]  # [blocks, 2, block size, KVH, hd]
        landed = torch.empty(len(flow.blocks), *memory.shape[1:], dtype=memory.dtype, device=self.model.device)
        flow.landing[layer], flow.due[layer] = landed, self.free
        flow.transfers[layer] = self.load_link.copy(landed, memory, f"layer {layer}", flow.places)

    @torch.inference_mode()
    def put(self, flow: Flow, layer: int):
        """Put a layer that has landed into its blocks. Raises TransferError."""
        flow.transfers[layer].check()
        self.pool.memory[layer].index_copy_(1, flow.table, flow.landing.pop(layer).transpose(0, 1))
        self.counts["bytes_in"] += flow.transfers[layer].bytes

    @torch.inference_mode()
    def compute(self, flow: Flow, last=False):
        """Compute a layer for all rows; of the `last` one only K and V. What was ordered of the next one is computed too:
        call that off."""
        layer, clock = flow.next - 1, self.engine.clock
        if not last and flow.next >= flow.back:
            flow.transfers[flow.next].cancel()
        began = clock.mark()
        if last:
            self.project(layer, flow.hidden, flow.rotation, flow.batch.slots)
        else:
            flow.hidden = self.model.layers[layer](flow.hidden, flow.rotation, flow.batch.attend(layer))  # [T, D]
        span = clock.seconds(began), clock.seconds(clock.mark())
        flow.restoration.request.timeline.add("compute", f"layer {layer}", *span)
        flow.restoration.layers, flow.next = flow.next, flow.next + 1


def layers(model, arguments):
    rng = random.Random(0)
    for words, share, slower in CELLS:
        engine, _ = behind.planned_engine(model, TOKENS, share)
        plan, speed = engine.behind.cache.store.letters, engine.behind.cache.bandwidth / slower
        engine.close()
        storage = StoredChunks(both_ends.ModelledStorage(1e11, speed))
        caches = {"03": offload.HostCache(TOKENS // 8, speed), "layers": FlowCache(TOKENS // 8, speed),
                  "05": planned.PlannedCache(TOKENS // 8 + 64, speed, plan=plan),
                  "06": both_ends.BidirectionalCache(storage, memory=1e9)}  # fmt: skip
        with behind.engines_of(model, caches, TOKENS) as engines:
            ways = behind.compare(engines, draw(rng, model, TOKENS), arguments.rounds, rng, "05")
        for name, way in ways.items():
            computed = {"05": tables.plan(plan), "06": f"{TOKENS - way['tokens']} tokens"}.get(name, f"{way['projected']} layers")
            yield dict(way, way=name, link=words, computed=computed)


def at_once(engine, order, histories: list, drawn: list[tuple]) -> dict:
    """Ask about all histories at once, in the order of `drawn`: (which one, question) -> figures."""
    lesson.settle(engine, "device")
    engine.behind.cache.order, before = order, engine.counts["bytes_in"]
    once = dict(offload_after=False)  # no question is found again
    asked = engine.generate([Request(histories[index] + question, 1, options=once) for index, question in drawn])
    ttft, labels = measure.ttft(asked), [span.label for one in asked for span in one.timeline.spans if span.lane == "compute"]
    return dict(mean=statistics.mean(ttft), all=max(ttft), p90=statistics.quantiles(ttft, n=10, method="inclusive")[-1],
                new=[one.new for one in asked], tokens=sum(one.found.get("cpu", 0) for one in asked),
                bytes=engine.counts["bytes_in"] - before, computed=sum(label.startswith("layer") for label in labels))


def batch(model, arguments):
    rng, total = random.Random(0), sum(LENGTHS)
    histories, speed = [draw(rng, model, tokens) for tokens in LENGTHS], behind.even_speed(model, max(LENGTHS))
    caches = {"03": offload.HostCache(total // 16 + 64, speed), "layers": FlowCache(total // 16 + 64, speed),
              "05": planned.PlannedCache(total // 8 + 128, speed)}  # fmt: skip
    with behind.engines_of(model, caches, total // 2 + 512) as engines:
        for engine in engines.values():
            for history in histories:
                behind.keep(engine, history)
        asks = {name: partial(at_once, engines[name if name in engines else "layers"], ORDERS.get(name), histories)
                for name in ("03", "05", *ORDERS)}  # fmt: skip
        taken = measure.same_question_in_turn(asks, arguments.rounds, lambda: [
            (index, draw(rng, model, QUESTION)) for index in rng.sample(range(len(LENGTHS)), len(LENGTHS))])  # fmt: skip
    measure.check_alike(model, {name: [found["new"] for found in each] for name, each in taken.items()})
    for name, each in taken.items():
        row = {what: min(found[what] for found in each) for what in ("tokens", "bytes", "computed")}
        row["rounds_per_second"] = spread([1e3 * len(LENGTHS) / found["all"] for found in each])
        row["rate_over_03"] = ratio([found["all"] for found in taken["03"]], [found["all"] for found in each])
        for what in "mean", "p90":
            samples, oldest = ([found[what] for found in taken[way]] for way in (name, "oldest"))
            row |= {f"{what}_ms": spread(samples), f"{what}_over": ratio(samples, oldest)}
        yield dict(row, way=name)


PARTS = {"layers": (layers, ["random:long"]), "batch": (batch, ["random:long"])}


def report(found: list[dict]) -> str:
    alone = tables.grouped(tables.rows(found, "layers"), ("model", "way"), "link")
    return tables.paragraphs(
        tables.table("**One history**: what is computed, what is loaded, TTFT, and that over chapter 05's:", {
            "model, way": "{model}, {way}",
            **tables.across(alone, {"": "{computed}, {bytes:MB}: {ttft_ms:ms}, {ttft_over_05:spread}"}),
        }, alone),
        tables.table("**Eight at once**: layers that are computed, what is loaded, TTFT, and that over the oldest first:", {
            "model, first": "{model}, {way}", "computed": "{computed}", "loaded": "{bytes:MB}",
            "rounds a second, over 03's": "{rounds_per_second:n}, {rate_over_03:spread}",
            "mean": "{mean_ms:ms}, {mean_over:spread}", "90th percentile": "{p90_ms:ms}, {p90_over:spread}",
        }, tables.rows(found, "batch")))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.set_defaults(device="cpu")
    measure.run("flow", PARTS, report, parser.parse_args())

