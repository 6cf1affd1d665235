"""Compare chapters 03, 04 and 05 on one model and one link, in turn.

    python -m benchmarks.planned                                   all; results in benchmarks/results/
    python -m benchmarks.planned --model random:long --histories 1024

ttft       TTFT of a question of 32 tokens behind a history that the device has evicted, over three modelled
           links: a layer's hidden states take twice as long to transfer as to project, as long, and half as
           long. A GPU has its own link. Chapter 02 computes the history, in turn with the chapters that
           restore it. A row has the restored tokens and bytes, the plan, and its bound. Behind 1,024 tokens
           of random:long two other plans take part, made from the same costs (HCache, Figure 12): the paper's
           closed form, and the naive hybrid, which mixes recomputing with K and V.
at_once    sixteen requests at once, each behind a history of its own.
lanes, saving    for pictures: the spans in which each lane was busy.
"""

import gc
import importlib
import random
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import measure, tables
from benchmarks.measure import AS_IT_IS, draw, modelled, ratio, spread
from common.estimates import Estimates
from common.requests import Request
from common.restoring import Restorer
from shell import charts, lesson, modelled_link
from shell.chunks import StoredChunks
from shell.machine import machine_of

CHAPTERS = "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free", "06_bidirectional"
paged, offload, hidden_states, planned, both_ends = map(importlib.import_module, CHAPTERS)
HISTORIES = {"classroom": [512, 1900], "random:long": [1024, 1984]}  # tokens; of others 1,024
DIVIDED = "random:long", 1024  # model and tokens, with other divisions
LINKS, QUESTION = lesson.LINKS, lesson.ASKED  # LINKS: name -> transfer time of hidden states over projection time; QUESTION: tokens


def links_of(model) -> dict[str, float]:
    """Return the links to measure: name -> transfer time of hidden states over projection time. With a GPU,
    its one link."""
    return LINKS if modelled(model, 1.0) else {AS_IT_IS: 1.0}


# 1. Asking behind one history, and counting restored tokens --------------------------------------------------------

def engine_of(model, blocks: int, cache=None, always: bool = False, block_size: int = 16):
    """Return chapter 02's engine over a Cache. `always`: restore every match, even if computing is faster."""
    return paged.Engine(paged.Runner(model, blocks, block_size), cache and Restorer(cache, Estimates(machine_of(model), always)))


@contextmanager
def engines_of(model, caches: dict, tokens: int):
    """Context manager: yield an engine for each Cache, name -> engine, and close them at the end.

    Each has room for two histories of `tokens` tokens, since one may still be being copied out."""
    engines = {name: engine_of(model, tokens // 8 + 32, cache, always=True) for name, cache in caches.items()}
    yield engines
    for engine in engines.values():
        engine.close()


def keep(engine, history: list[int]) -> float:
    """Compute a history and save all of it, over a link that is fast for this purpose. Returns: TTFT in
    ms."""
    link = engine.lower_tier.cache.save_link
    measure.change_speed(engine, link, link, modelled_link.Bandwidth(1e15))
    return lesson.ask(engine, history).ttft_ms


def once(engine, prompt: list[int]) -> dict:
    """Ask after the device has evicted everything. Returns: TTFT in ms, new tokens, spans, and restored
    tokens and bytes."""
    lesson.wait_until_idle(engine, "device")
    time.sleep(0.02)  # as if the request came after a pause
    before = engine.counts["bytes_in"]
    request = lesson.ask(engine, prompt)
    return dict(ttft_ms=request.ttft_ms, new=request.new, spans=charts.spans(request.timeline),
                tokens=request.cached_tokens - request.found.get("gpu", 0),
                bytes=engine.counts["bytes_in"] - before)


def even_speed(model) -> float:
    """Return the bytes per second at which a layer's hidden states take as long to transfer as to project."""
    machine = machine_of(model)
    return model.config.hidden_size * model.dtype.itemsize * machine.fastest / machine.projecting


def planned_engine(model, tokens: int, share: float):
    """Make chapter 05's engine over a link on which a layer's hidden states take `share` times as long to
    transfer as to project. Returns: the engine, and its LayerCosts behind `tokens` tokens."""
    cache = planned.PlannedCache(tokens // 8 + 64, modelled(model, even_speed(model) / share))
    engine = engine_of(model, tokens // 8 + 32, cache, always=True)
    return engine, cache.costs(0, tokens)


# 2. Over three links ----------------------------------------------------------------------------------------

def behind_histories(model, arguments):
    """Yield a row for each length of history and each link."""
    rng, histories = random.Random(0), arguments.histories or HISTORIES.get(Path(arguments.name).name, [1024])
    links = [*links_of(model).items()]
    if Path(arguments.name).name == measure.TRAINED:
        links = links[-2:-1] or links  # the balanced link alone: its plan is the same over all three
    for tokens, (words, share) in product(histories, links):
        divided = (arguments.name, tokens) == DIVIDED
        yield dict(history_tokens=tokens, link=words, **one_link(model, tokens, share, arguments.rounds, rng, divided))
        gc.collect()  # engines are in reference cycles, and those of the next link need the memory


def naive_plan(layers: int, costs) -> str:
    """Return the best plan of recomputed and loaded layers, without hidden states (HCache, 6.3.1)."""
    plans = ["R" * recompute + "K" * (layers - recompute) for recompute in range(layers)]
    return min(plans, key=lambda plan: planned.plan_seconds(plan, costs))


def one_link(model, tokens: int, share: float, rounds: int, rng, divided: bool = False) -> dict:
    """Measure 02 to 05 in turn over one link, and if `divided` two other plans. Returns: TTFT and its ratios,
    restored tokens and bytes, plans and bounds."""
    ours, costs = planned_engine(model, tokens, share)
    layers, blocks, speed = len(model.layers), tokens // 8 + 64, ours.lower_tier.cache.bandwidth
    others = {"closed form": planned.closed_form(layers, costs), "naive": naive_plan(layers, costs)} if divided else {}
    plans = {"05": ours.lower_tier.cache.letters, **others, "04": "R" + "H" * (layers - 1), "03": "K" * layers}
    caches = {"03": offload.HostCache(tokens // 8, speed), "04": hidden_states.HiddenCache(blocks, speed)}
    caches |= {name: planned.PlannedCache(blocks, speed, plan=letters) for name, letters in others.items()}
    with engines_of(model, caches, tokens) as engines:
        engines |= {"05": ours, "02": engine_of(model, tokens // 8 + 32)}
        history, question = draw(rng, model, tokens), partial(draw, rng, model, QUESTION)
        for name in (*caches, "05"):
            keep(engines[name], history + question())
        asks = {name: lambda question, engine=engine: once(engine, history + question) for name, engine in engines.items()}
        taken = measure.same_question_in_turn(asks, rounds, question)
    measure.check_alike(model, {name: [found["new"] for found in each] for name, each in taken.items()})
    ttft = {name: [found["ttft_ms"] for found in each] for name, each in taken.items()}
    restored, size = ({name: min(found[what] for found in each) for name, each in taken.items()} for what in ("tokens", "bytes"))

    def sooner(name: str, *others: str) -> dict:
        return {other: ratio(ttft[name], ttft[other]) for other in others}
    return dict(
        ttft_ms={name: spread(samples) for name, samples in ttft.items()}, restored=restored, bytes=size, plan=plans["05"], plans=plans,
        states_over_kv=layers * model.config.hidden_size / model.config.kv_numbers_per_token,
        transfer_over_projecting=costs.load_states / costs.project, over_02=sooner("02", "03", "04", "05"),
        over_03=sooner("03", "04", "05"), over_04=sooner("04", "05"), over_05={name: ratio(ttft[name], ttft["05"]) for name in plans},
        predicted_ms=1e3 * planned.plan_seconds(plans["05"], costs), bound_ms=1e3 * planned.bound_seconds(layers, costs))  # fmt: skip


# 3. Many histories at once ------------------------------------------------------------------------------------

LENGTHS = [128, 128, 256, 256, 384, 512, 512, 768]  # tokens


def at_once(model, arguments):
    """Yield a row: one question behind each of many histories (2 of each of LENGTHS) at the same time, so
    that the link always has work. It has bytes, requests per second, and the ratio of 05 over 03."""
    rng, lengths, speed = random.Random(0), 2 * LENGTHS, even_speed(model)
    total, histories = sum(lengths), [draw(rng, model, tokens) for tokens in lengths]
    caches = {"03": offload.HostCache(total // 16 + 64, speed), "05": planned.PlannedCache(total // 8 + 128, speed)}

    def answered(engine, questions: list[list[int]]) -> dict:
        lesson.wait_until_idle(engine, "device")
        before, once = engine.counts["bytes_in"], dict(offload_after=False)  # so that questions do not fill host memory
        asked = engine.generate([Request(history + question, 1, options=once) for history, question in zip(histories, questions)])
        return dict(ms=max(measure.ttft(asked)), new=[one.new for one in asked], bytes=engine.counts["bytes_in"] - before)

    with engines_of(model, caches, total // 2 + 64 * len(lengths)) as engines:
        for engine, history in product(engines.values(), histories):
            keep(engine, history)
        asks = {name: partial(answered, engine) for name, engine in engines.items()}
        taken = measure.same_question_in_turn(asks, arguments.rounds, lambda: [draw(rng, model, QUESTION) for _ in histories])
    measure.check_alike(model, {name: [found["new"] for found in each] for name, each in taken.items()})
    ms = {name: [found["ms"] for found in each] for name, each in taken.items()}
    yield dict(
        histories=lengths, at_once=len(lengths), over_03=ratio(ms["03"], ms["05"]),
        bytes={name: min(found["bytes"] for found in each) for name, each in taken.items()},
        rounds_per_second={name: spread([1e3 * len(lengths) / each for each in samples]) for name, samples in ms.items()})  # fmt: skip


# 4. Spans of the lanes, for pictures -----------------------------------------------------------------------------------------

def lanes(model, arguments, tokens: int = 1024):
    """Yield a row for each of chapters 02 to 06: TTFT of one question, and the spans of its median round.

    A layer's hidden states take 1.2 times as long to transfer as to project. The storage of 06 is as fast as
    computing."""
    ours, _ = planned_engine(model, tokens, 1.2)
    rng, speed, stored = random.Random(0), ours.lower_tier.cache.bandwidth, both_ends.ModelledStorage(1e10, 1e9)
    caches = {"03": offload.HostCache(tokens // 8, speed), "04": hidden_states.HiddenCache(tokens // 8 + 64, speed),
              "06": both_ends.BidirectionalCache(StoredChunks(stored), memory=1e9)}  # fmt: skip
    with engines_of(model, caches, tokens) as engines:
        history, engines["05"] = draw(rng, model, tokens), ours
        computed = min(keep(engine, history) for engine in engines.values()) / 1e3  # seconds
        stored.bandwidth = modelled_link.Bandwidth(tokens * model.config.kv_numbers_per_token * model.dtype.itemsize / computed)
        engines["02"] = engine_of(model, tokens // 8 + 32)
        asks = {name: lambda question, engine=engine: once(engine, history + question) for name, engine in engines.items()}
        taken = measure.same_question_in_turn(asks, arguments.rounds, partial(draw, rng, model, QUESTION))
    for name, found in sorted(taken.items()):
        found.sort(key=lambda one: one["ttft_ms"])
        ttft_ms, plan = spread([one["ttft_ms"] for one in found]), ours.lower_tier.cache.letters * (name == "05")
        yield dict(chapter=name, history_tokens=tokens, plan=plan, ttft_ms=ttft_ms, spans=found[len(found) // 2]["spans"])


class Watched(hidden_states.HiddenCache):
    """Chapter 04's Cache that records when its thread sorts rows into blocks."""

    def scatter(self, transfer, *rows):
        transfer.wait()
        began = time.perf_counter()
        super().scatter(transfer, *rows)
        self.engine.sorted.append((began, time.perf_counter()))


def saving(model, arguments, at_once: int = 16, tokens: int = 64):
    """Yield one row: the spans of one of `at_once` decoding requests whose states are saved, and of the
    thread that sorts."""
    rng = random.Random(0)
    with engines_of(model, {"04": Watched(32 * at_once, modelled(model, even_speed(model)))}, 256 * at_once) as engines:
        engine = engines["04"]
        engine.sorted = []
        one, *_ = engine.generate([Request(draw(rng, model, 64), tokens) for _ in range(at_once)])
        lesson.wait_until_idle(engine)
    for began, ended in engine.sorted:
        one.timeline.add("sort", "rows", began, ended)
    yield dict(at_once=at_once, tbt_ms=one.tbt_ms, spans=charts.spans(one.timeline))


PARTS = {"ttft": (behind_histories, ["classroom", "random:long", measure.TRAINED]),
         "at_once": (at_once, ["random:long"]), "lanes": (lanes, ["random:long"]), "saving": (saving, ["random:long"])}  # fmt: skip


def report(found: list[dict]) -> str:
    rows, divided = tables.rows(found, "ttft"), []
    for row in rows:
        row |= {f"over_{of}": row["ttft_ms"]["05"]["median"] / row[f"{of}_ms"] for of in ("predicted", "bound")}
        if len(plans := row.get("plans", ())) > 3:
            column = f"{row['model']}, {row['history_tokens']:,}, {row['link']} ({row['transfer_over_projecting']:.2f})"
            divided += [dict(way=name, column=column, plan=letters, ttft_ms=row["ttft_ms"][name], over=row["over_05"][name])
                        for name, letters in plans.items()]  # fmt: skip
    divided = tables.grouped(divided, ("way",), "column")
    return tables.paragraphs(
        tables.table(
            "**TTFT over three links**, and ratios within each round. `plan` counts layers that are recomputed (R), projected (H) "
            "and loaded as K and V (K); the last two columns divide TTFT of 05 by its prediction and by the bound of all plans.", {
                "model, history": "{model}, {history_tokens:,}", "states / K and V": "{states_over_kv:n}", "link": "{link}",
                **{name: f"{{ttft_ms[{name}]:ms}}" for name in ("02", "03", "04", "05")}, "02 / 03": "{over_02[03]:spread}",
                "02 / 05": "{over_02[05]:spread}", "03 / 04": "{over_03[04]:spread}", "03 / 05": "{over_03[05]:spread}",
                "04 / 05": "{over_04[05]:spread}", "plan": "{plan:plan}", "/ predicted": "{over_predicted:n}",
                "/ bound": "{over_bound:n}",
            }, rows),
        tables.table(
            "**Other divisions** (Figure 12; beside each link: transfer time of hidden states over projection time): plan, TTFT, "
            "and TTFT over that of chapter 05:", {
                "way": "{way}", **tables.across(divided, {"": "{plan:plan}: {ttft_ms:ms}, {over:spread}"}),
            }, divided),
        tables.table("**Many histories at once**: restored bytes, and requests a second:", {
            "model": "{model}", "at once": "{at_once}", "bytes, 03": "{bytes[03]:MB}", "bytes, 05": "{bytes[05]:MB}",
            "03": "{rounds_per_second[03]:n}", "05": "{rounds_per_second[05]:n}", "05 over 03": "{over_03:spread}",
        }, tables.rows(found, "at_once")))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    measure.run("planned", PARTS, report, parser.parse_args())
