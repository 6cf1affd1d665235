"""Chapters 03, 04 and 05 on one model, one link and one clock, in turn.

    python -m benchmarks.planned                                   all; results in benchmarks/results/
    python -m benchmarks.planned --only ttft --model random:small --histories 1024

ttft    TTFT of a question of 32 tokens behind a history that has left the device, over three links: a layer's
        states take twice as long to transfer as to project, as long, and half as long. What was restored is
        in the row, and beside it the plan, what it predicted before the run, and the bound of all plans.
tbt     TBT of 1, 4 and 16 that decode while what they compute is kept, over that of nothing kept.
"""

import argparse
import importlib
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence, set_imports_aside  # noqa: E402
from common import checkpoint, cli, lesson  # noqa: E402
from common import link as links  # noqa: E402
from common.requests import Request  # noqa: E402
from common.restoring import Cache  # noqa: E402

CHAPTERS = "02_paged_kv", "03_cpu_offload", "04_hidden_state_cache", "05_bubble_free"
paged, offload, hidden_states, bubble_free = map(importlib.import_module, CHAPTERS)
HISTORIES = {"classroom": [512, 1024, 1900], "random:small": [512, 1024, 1984]}
LINKS = {"the link is the bottleneck": 2.0, "balanced": 1.0, "computing is the bottleneck": 0.5}
QUESTION = 32  # tokens


def draw(rng, model, tokens: int) -> list[int]:
    return [rng.randrange(300, model.config.vocab_size) for _ in range(tokens)]


def ttft(model, histories: list[int], rounds: int) -> list[dict]:
    rng, rows, layers = random.Random(0), [], len(model.layers)
    for tokens in histories:
        blocks = -(-(tokens + 2 * QUESTION) // 16) + 32

        def engine_of(cache, blocks=blocks):
            return paged.Engine(paged.Runner(model, blocks), cache, always_restore=True)

        probe = engine_of(hidden_states.HiddenCache(1, 1e9))
        projecting = probe.cache.seconds_to_project(tokens)
        for words, share in LINKS.items():
            states = tokens * model.config.hidden_size * model.dtype.itemsize  # bytes of a layer
            bandwidth, history = states / projecting / share, draw(rng, model, tokens)
            caches = {"03": offload.HostCache(2 * blocks, bandwidth),
                      "04": hidden_states.HiddenCache(blocks, bandwidth),
                      "05": bubble_free.PlannedCache(blocks, bandwidth)}  # fmt: skip
            engines = {name: engine_of(cache) for name, cache in caches.items()}

            def once(name, evict="device", engines=engines, history=history) -> Request:
                time.sleep(hidden_states.PAUSE_BEFORE)
                return lesson.ask(engines[name], history + draw(rng, model, QUESTION), 1, evict)

            computed = min(once(name).outcome.ttft_ms for name in engines)
            store, costs = caches["05"].store, caches["05"].costs(0, tokens)
            predicted, bound = (1e3 * seconds for seconds in (
                bubble_free.plan_seconds(store.letters, costs), bubble_free.bound_seconds(layers, costs)))  # fmt: skip
            asked = lesson.in_turn({name: partial(once, name) for name in engines}, rounds)
            taken = {name: [request.outcome.ttft_ms for request in requests] for name, requests in asked.items()}
            rows.append(dict(
                history_tokens=tokens, link=words, gbps=bandwidth / 1e9, projecting_over_transfer=1 / share,
                computed_ms=computed, ttft_ms={name: spread(samples) for name, samples in taken.items()},
                restored={name: min(request.found.get("cpu", 0) for request in each) for name, each in asked.items()},
                over_03={name: spread([a / b for a, b in zip(taken["03"], taken[name])]) for name in ("04", "05")},
                plan=store.letters, costs_ms={name: 1e3 * cost for name, cost in costs._asdict().items()},
                predicted_ms=predicted, bound_ms=bound))  # fmt: skip
            for engine in engines.values():
                engine.close()
        probe.close()
    return rows


def tbt(model, rounds: int, new: int = 100) -> list[dict]:
    rng, bandwidth = random.Random(0), links.bandwidth(model)
    caches = {"nothing": Cache(), "03": offload.HostCache(400, bandwidth),
              "04": hidden_states.HiddenCache(100, bandwidth)}  # fmt: skip
    engines, rows = {name: paged.Engine(paged.Runner(model, 200), cache) for name, cache in caches.items()}, []
    for running in (1, 4, 16):

        def once(name, running=running) -> float:
            lesson.settle(engines[name])
            engines[name].evict("device")
            requests = engines[name].generate([Request(draw(rng, model, 32), new) for _ in range(running)])
            return statistics.mean(request.outcome.tbt_ms for request in requests)

        taken = lesson.in_turn({name: partial(once, name) for name in engines}, rounds)
        over = {name: spread([a / b for a, b in zip(taken[name], taken["nothing"])]) for name in ("03", "04")}
        rows.append(dict(running=running, tbt_ms={name: spread(samples) for name, samples in taken.items()},
                         over_nothing=over, dropped=engines["04"].counts["dropped_chunks"],
                         kept_bytes=engines["04"].counts["bytes_out"]))  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ttft", "tbt"])
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found, shown = [], 0
    for name in [arguments.model] if arguments.model else HISTORIES:
        model, *_ = checkpoint.load(name, arguments.dtype, arguments.device)
        set_imports_aside()
        if arguments.only != "tbt":
            histories = arguments.histories or HISTORIES.get(name, [1024])
            found.append(dict(claim="ttft", model=name, rows=ttft(model, histories, arguments.rounds)))
        if arguments.only != "ttft" and name == "classroom":
            found.append(dict(claim="tbt", model=name, rows=tbt(model, 2 * arguments.rounds)))
        for row in found[shown:]:
            print(row, flush=True)
        shown = len(found)
    write("planned", model.device.type, arguments.json, found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
