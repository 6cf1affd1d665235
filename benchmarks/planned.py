"""Chapters 03, 04 and 05 on one model, one link and one clock, in turn.

    python -m benchmarks.planned                                   all; results in benchmarks/results/
    python -m benchmarks.planned --model random:small --histories 1024

TTFT of a question of 32 tokens behind a history that has left the device, over three modelled links: a layer's states take
twice as long to transfer as to project, as long, and half as long; with a GPU, over its own. The row has what was restored,
the plan and its bound.
"""

import gc
import importlib
import random
import time
from functools import partial

from benchmarks import measure, tables
from benchmarks.measure import AS_IT_IS, draw, modelled, ratio, spread, ttft
from common.requests import Request
from shell import lesson

CHAPTERS = "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free"
paged, offload, hidden_states, planned = map(importlib.import_module, CHAPTERS)
HISTORIES = {"classroom": [512, 1024, 1900]}
LINKS = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}
QUESTION = 32  # tokens


def links_of(model) -> dict[str, float]:
    """-> the links to measure over: words -> how many projections a transfer takes there, if the link is modelled."""
    return LINKS if modelled(model, 1.0) else {AS_IT_IS: 1.0}


def behind_histories(model, arguments):
    rng = random.Random(0)
    for tokens in arguments.histories or HISTORIES.get(arguments.name, [512, 1024, 1984]):
        blocks = -(-(tokens + 2 * QUESTION) // 16) + 32

        def engine_of(cache, blocks=blocks):
            engine = paged.Engine(paged.Runner(model, blocks), cache, always_restore=True)
            cache.save_link.bandwidth, offload.LONGEST_SAVE = offload.links.Bandwidth(1e15), 1e9  # so all of it is saved
            return engine

        seconds = engine_of(hidden_states.HiddenCache(1, 1e9)).cache.seconds_to_project(tokens)
        even = tokens * model.config.hidden_size * model.dtype.itemsize / seconds
        for words, share in links_of(model).items():
            bandwidth, history = modelled(model, even / share), draw(rng, model, tokens)
            engines = {"03": engine_of(offload.HostCache(2 * blocks, bandwidth)),
                       "04": engine_of(hidden_states.HiddenCache(2 * blocks, bandwidth)),
                       "05": engine_of(planned.PlannedCache(4 * blocks, bandwidth))}  # fmt: skip
            row = one_link(model, engines, history, partial(draw, rng, model, QUESTION), arguments.rounds)
            gbps = engines["03"].cache.load_link.speed() / 1e9
            yield dict(history_tokens=tokens, link=words, gbps=gbps, **row)
            while engines:
                engines.popitem()[1].close()
            gc.collect()  # they refer to themselves, and those of the next link take as much memory


def one_link(model, engines: dict, history: list[int], question, rounds: int) -> dict:
    def once(name: str) -> Request:
        time.sleep(0.02)  # as a request that comes after a pause
        return lesson.ask(engines[name], history + question(), 1, "device")

    computed = min(once(name).outcome.ttft_ms for name in engines)
    cache = engines["05"].cache
    plan, costs = cache.store.letters, cache.costs(0, len(history))
    asked = lesson.in_turn({name: partial(once, name) for name in engines}, rounds)
    taken = {name: ttft(requests) for name, requests in asked.items()}
    return dict(
        computed_ms=computed, ttft_ms={name: spread(samples) for name, samples in taken.items()},
        restored={name: min(request.found.get("cpu", 0) for request in each) for name, each in asked.items()},
        over_03={name: ratio(taken["03"], taken[name]) for name in ("04", "05")}, plan=plan,
        costs_ms={name: 1e3 * cost for name, cost in costs._asdict().items()},
        predicted_ms=1e3 * planned.plan_seconds(plan, costs),
        bound_ms=1e3 * planned.bound_seconds(len(model.layers), costs))  # fmt: skip


PARTS = {"ttft": (behind_histories, ["classroom", "random:small", "random:tinyllama-mha"])}


def report(found: list[dict]) -> str:
    rows = tables.rows(found, "ttft")
    for row in rows:
        row |= {f"over_{of}": row["ttft_ms"]["05"]["median"] / row[f"{of}_ms"] for of in ("predicted", "bound")}
    rows = tables.grouped(rows, ("model", "history_tokens"), "link")
    longest = list({row["model"]: row for row in rows}.values())
    history = {"model, history": "{model}, {history_tokens:,}"}
    return tables.paragraphs(
        tables.table(
            "**TTFT with K and V (03), and how many times as soon it comes** with hidden states (04) and by a plan (05):", {
                **history, "computed": "{computed_ms:ms}",
                **tables.across(rows, {
                    "03": "{ttft_ms[03]:ms}", "04": "{over_03[04]:spread}", "05": "{over_03[05]:spread}"}),
            }, rows),
        tables.table(
            "**The plans** for the longest history, in layers that are recomputed (R), projected (H) and loaded (K); TTFT over "
            "what was predicted, and over the bound of all plans:", {
                **history, **tables.across(longest, {"": "{plan:plan}; {over_predicted:n}, {over_bound:n}"}),
            }, longest))  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=7)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    measure.run("planned", PARTS, report, parser.parse_args())
