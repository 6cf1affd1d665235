"""Compare other ways to save hidden states with that of chapter 04, in turn.

    python -m benchmarks.variants                                  results in benchmarks/results/

saving       TBT of 1 and 16 requests that decode behind 512 shared tokens, over TBT with nothing kept. Hidden
             states are saved in two stages (chapter 04); each layer while it is computed (the paper's
             snapshot); or directly, with a copy for each run of rows and each layer (HCache, Figure 14).
"""

import random
import statistics
from functools import partial

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, spread
from benchmarks.planned import engines_of, hidden_states
from common.cache import Cache
from common.link import runs as runs_of
from common.requests import Request
from shell import hardware, lesson

# 1. Other ways to save -------------------------------------------------------------------------

class EachStep(hidden_states.HiddenCache):
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
    kinds = {"two stages": hidden_states.HiddenCache, "each layer": EachLayer, "direct": Direct}
    document = draw(rng, model, tokens)
    for running in (1, 16):
        blocks = tokens // 16 + 16 * running
        caches = {name: kind(blocks + 32, link) for name, kind in kinds.items()}
        with engines_of(model, {"nothing": Cache(), **caches}, 8 * blocks) as engines:
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


# 2. The table and main ------------------------------------------------------------------------

PARTS = {"saving": (saving, ["classroom", "random:long"])}


def report(found: list[dict]) -> str:
    saved = tables.grouped(tables.rows(found, "saving"), ("running",), "model")
    return tables.table(
        "**Other ways to save** (Figure 14, behind 512 tokens; in the paper two stages cost nothing, and saving directly to SSDs "
        "makes TBT of a 7B up to 1.34 times as long with 16 decoding; here all ways save to host memory). TBT over that with nothing kept:", {
            "running": "{running}",
            **tables.across(saved, {
                "nothing kept": "{ways[nothing][tbt_ms]:ms}",
                **{way: f"{{ways[{way}][tbt_over_nothing]:spread}}" for way in ("two stages", "each layer", "direct")}}),
        }, saved)  # fmt: skip


if __name__ == "__main__":
    measure.run("variants", PARTS, report, measure.parser(__doc__, PARTS, rounds=5).parse_args())
