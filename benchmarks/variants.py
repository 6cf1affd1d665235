"""Compare other ways to save and to divide layers with those of chapters 04 and 05, in turn.

    python -m benchmarks.variants                                  all; results in benchmarks/results/
    python -m benchmarks.variants --only divisions --model random:long --histories 1024

saving       TBT of 1 and 16 requests that decode behind 512 shared tokens, over TBT with nothing kept. Hidden
             states are saved in two stages (chapter 04); each layer while it is computed (the paper's
             snapshot); or directly, with a copy for each run of rows and each layer (Figure 14).
divisions    TTFT over three links with chapter 05's plan; the paper's closed form; the naive hybrid, without
             hidden states; hidden states alone (04); and K and V alone (03). All plans are made from the same
             costs.

The figures are those of HCache (EuroSys '25). Each row counts the restored tokens; all ways must answer
alike.
"""

import random
import statistics
from functools import partial
from itertools import product

from benchmarks import measure, tables
from benchmarks import planned as planned_bench
from benchmarks.measure import draw, ratio, spread
from benchmarks.planned import hidden_states, links_of, offload, planned
from common.cache import Cache
from common.link import runs as runs_of
from common.requests import Request
from shell import cli, hardware, lesson

HiddenCache, PlannedCache = hidden_states.HiddenCache, planned.PlannedCache

# 1. Other ways to save -------------------------------------------------------------------------

class EachStep(HiddenCache):
    """Chapter 04's Cache that sends the rows of each step at once, not of several steps together."""

    def save(self, batch):
        super().save(batch)
        if self.rows:
            self.flush()


class EachLayer(EachStep):
    """The paper's first stage (sections 4.2.2 and 5): each layer's rows are copied to the snapshot buffer
    while that layer is computed. The second stage follows when the step is over."""

    def save_layer(self, layer, hidden, batch):
        super().save_layer(layer, hidden, batch)
        if layer in self.layers and len(hidden) <= self.free:
            snapshot, left = self.snapshot[self.layers.index(layer)], self.ring - self.head
            into = snapshot[self.head :][: len(hidden)], snapshot[: max(0, len(hidden) - left)]  # the buffer is a ring
            self.left = self.save_link.copy(into, (hidden[:left], hidden[left:]), "states")
            self.counts["bytes_out"] += self.left.bytes

    def take_snapshot(self, states):
        """Return the last layer's Transfer; when it is complete, all are."""
        return self.left


class Direct(EachStep):
    """A Cache without snapshots: after each step each run of rows of each layer is copied straight to its
    block."""

    def flush(self):
        noted, states = self.rows, self.inputs  # of one step, [T, D] a layer
        self.clear_unsent()
        pieces = self.store.fill(noted)
        kept, slots = ([row for piece in pieces for row in getattr(piece, name)] for name in ("rows", "slots"))
        runs = runs_of(kept, slots)
        slots_of = [part.flatten(0, 1) for part in self.store.parts]  # [slots, D] a layer
        transfers = [self.save_link.copy(slots_of[part][slot : slot + count], rows[at : at + count], "states")
                     for part, rows in enumerate(states) for at, slot, count in runs]  # fmt: skip
        if pieces:
            given = [(self.store.pool, [piece.block for piece in pieces])]
            self.hold("save", transfers, given=given, then=partial(self.on_saved, transfers[-1], pieces, 0))
        self.counts["copies_out"] += len(transfers)
        self.counts["bytes_out"] += sum(transfer.bytes for transfer in transfers)


def saving(model, arguments, new: int = 32, tokens: int = 512):
    """Yield a row for 1 and for 16 running requests. Their document stays on the device, so mostly decoded
    tokens are saved."""
    rng, link = random.Random(0), hardware.bandwidth(model)
    kinds = {"two stages": HiddenCache, "each layer": EachLayer, "direct": Direct}
    document = draw(rng, model, tokens)
    for running in (1, 16):
        blocks = tokens // 16 + 16 * running
        caches = {name: kind(blocks + 32, link) for name, kind in kinds.items()}
        with planned_bench.engines_of(model, {"nothing": Cache(), **caches}, 8 * blocks) as engines:
            for engine in engines.values():
                lesson.ask(engine, document)

            def tbt(engine, running=running) -> float:
                lesson.wait_until_idle(engine)
                requests = engine.generate([Request(document + draw(rng, model, 16), new) for _ in range(running)])
                return statistics.mean(request.tbt_ms for request in requests)

            taken = lesson.in_turn({name: partial(tbt, engine) for name, engine in engines.items()}, arguments.rounds)
            ways = {name: dict(tbt_ms=spread(samples), tbt_over_nothing=ratio(samples, taken["nothing"]),
                               bytes_out=engines[name].counts["bytes_out"]) for name, samples in taken.items()}  # fmt: skip
        yield dict(running=running, behind_tokens=tokens, ways=ways)


# 2. Other divisions ----------------------------------------------------------------------------

def naive_plan(layers: int, costs) -> str:
    """Return the best plan of recomputed and loaded layers, without hidden states (section 6.3.1)."""
    plans = ["R" * recompute + "K" * (layers - recompute) for recompute in range(layers)]
    return min(plans, key=lambda plan: planned.plan_seconds(plan, costs))


def divisions(model, arguments):
    """Yield a row for each length of history and each link: plans and TTFT of all ways."""
    rng, layers = random.Random(0), len(model.layers)
    for tokens, (words, share) in product([tokens // 16 * 16 for tokens in arguments.histories], links_of(model).items()):
        ours, costs = planned_bench.planned_engine(model, tokens, share)
        blocks, speed = ours.lower_tier.cache.blocks, ours.lower_tier.cache.bandwidth
        others = {"closed form": planned.closed_form(layers, costs), "naive": naive_plan(layers, costs)}
        plans = {"05": ours.lower_tier.cache.letters, **others, "04": "R" + "H" * (layers - 1), "03": "K" * layers}
        caches = {name: PlannedCache(blocks, speed, plan=letters) for name, letters in others.items()}
        caches |= {"04": HiddenCache(blocks, speed), "03": offload.HostCache(tokens // 8, speed)}
        with planned_bench.engines_of(model, caches, tokens) as engines:
            engines |= {"05": ours}
            ways = planned_bench.compare({"05": ours, **engines}, draw(rng, model, tokens), arguments.rounds, rng, "05")
        for name, letters in plans.items():
            ways[name]["plan"] = letters
        yield dict(history_tokens=tokens, link=words, ways=ways, transfer_over_projecting=costs.load_states / costs.project)


# 3. The tables and main ------------------------------------------------------------------------

PARTS = {"saving": (saving, ["classroom", "random:long"]), "divisions": (divisions, ["random:long"])}


def report(found: list[dict]) -> str:
    saved = tables.grouped(tables.rows(found, "saving"), ("running",), "model")
    divided = []
    for row in tables.rows(found, "divisions"):
        column = f"{row['model']}, {row['history_tokens']:,}, {row['link']} ({row['transfer_over_projecting']:.2f})"
        divided += [dict(way, way=name, column=column) for name, way in row["ways"].items()]
    divided = tables.grouped(divided, ("way",), "column")
    return tables.paragraphs(
        tables.table(
            "**Other ways to save** (Figure 14, behind 512 tokens; in the paper two stages cost nothing, and saving directly to SSDs "
            "makes TBT of a 7B up to 1.34 times as long with 16 decoding; here all ways save to host memory). TBT over that with nothing kept:", {
                "running": "{running}",
                **tables.across(saved, {
                    "nothing kept": "{ways[nothing][tbt_ms]:ms}",
                    **{way: f"{{ways[{way}][tbt_over_nothing]:spread}}" for way in ("two stages", "each layer", "direct")}}),
            }, saved),
        tables.table(
            "**Other divisions** (Figure 12; beside each link: transfer time of hidden states over projection time): plan, TTFT, "
            "and TTFT over that of chapter 05:", {
            "way": "{way}", **tables.across(divided, {"": "{plan:plan}: {ttft_ms:ms}, {ttft_over_05:spread}"}),
        }, divided))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=cli.bounded(int, 256, 1 << 20), nargs="+", default=[1024], help="tokens")
    measure.run("variants", PARTS, report, parser.parse_args())
