"""Measure chapter 09 on 1 and 2 ranks: bytes over each link, TTFT, and agreements between the ranks.

    python -m benchmarks.ranks                                         all; results in benchmarks/results/
    python -m benchmarks.ranks --model classroom --ranks 1 2

The device has evicted a history, and a question of 16 tokens restores it. Each rank has a link of its own.
Without GPUs the links are modelled, and so slow that one rank takes half a second for all K and V. On a CPU
the ranks share the cores, one thread each: with more ranks than cores computing gets slower, and only the
links behave as on as many devices. The bound is the time of the link, its bytes over its bandwidth.
Agreements are counted for each request, and timed alone.
"""

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import time

import torch

from benchmarks import measure, tables
from benchmarks.measure import draw, modelled, spread
from shell import lesson
from shell import ranks as processes
from shell.modelled_link import Bandwidth

ranked = importlib.import_module("09_tensor_parallel")
HISTORY, QUESTION, SECONDS = 1024, 16, 0.5  # tokens, tokens; seconds of one rank's link for all K and V


def rank(ranks, arguments) -> list[dict]:
    """Measure on this rank, in step with the others. Returns: the rows; rank 0 prints them."""
    torch.set_num_threads(1)
    model, *_ = ranked.load(ranks, arguments.model[0], arguments.dtype, arguments.device)
    config = model.config
    whole = HISTORY * config.kv_numbers_per_token // config.num_key_value_heads * model.sharding.kv_heads
    gbps = modelled(model, whole * model.dtype.itemsize / SECONDS / 1e9)
    options = argparse.Namespace(
        max_running=4, block_size=16, gpu_blocks=None, cpu_blocks=None, token_budget=512, link=gbps and Bandwidth(1e9 * gbps),
        always_restore=True, storage=None, explain=False)  # fmt: skip
    link = measure.link_of(model.device)
    gbps, rng, rows = gbps or link["link_gbps"], random.Random(0), []
    history = draw(rng, model, HISTORY)
    for keep in ("kv", "states"):
        engine = ranked.make_engine(model, options, keep)
        lesson.ask(engine, history + [1])

        def ask(engine=engine) -> list[float]:
            lesson.wait_until_idle(engine, "device")
            before, agreements = engine.counts.copy(), ranks.agreements
            ttft = lesson.ask(engine, history + draw(rng, model, QUESTION)).ttft_ms
            return [ttft, ranks.agreements - agreements, *(engine.counts[what] - before[what] for what in ("bytes_in", "steps"))]

        samples, *counts = zip(*lesson.in_turn({keep: ask}, arguments.rounds)[keep])
        agreements, size, steps = map(statistics.median, counts)
        rows.append(dict(
            **link, keep=keep, ranks=ranks.count, history_tokens=HISTORY, bytes_over_link=size, link_ms=size / gbps / 1e6,
            ttft_ms=spread(samples), agreements=agreements, steps=steps))  # fmt: skip
        engine.close()
    began = time.perf_counter()
    for _ in range(200):
        ranks.all_min([0] * 256)
    agreement = (time.perf_counter() - began) / 200 * 1e6
    ranks.barrier()
    return [dict(row, agreement_us=agreement) for row in rows]


def started(model, arguments):
    """Start the processes of the ranks, for each number of ranks, and yield their rows. Each rank loads the
    model itself."""
    rows = []
    for count in map(str, arguments.ranks):
        words = ["--model", arguments.name, "--dtype", arguments.dtype, "--device", arguments.device]
        words += ["--rounds", str(arguments.rounds), "--ranks", count, "--joined"]
        done = subprocess.run([sys.executable, "-m", "benchmarks.ranks", *words], stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{count} ranks have ended with {done.returncode}.")
        rows += json.loads(done.stdout.splitlines()[-1])
    one = {row["keep"]: row["bytes_over_link"] for row in rows if row["ranks"] == 1}
    for row in rows:
        yield dict(row, share_of_one_rank=row["bytes_over_link"] / one[row["keep"]] if one.get(row["keep"]) else None)


PARTS = {"ranks": (started, ["classroom"])}


def report(found: list[dict]) -> str:
    rows = tables.rows(found, "ranks")
    apart = [f"{row['agreement_us']:,.0f} us on {row['ranks']} ranks ({row['model']})"
             for row in rows if row["keep"] == "kv" and row["ranks"] > 1]  # fmt: skip
    kept = tables.grouped(rows, ("keep", "ranks"), "model")
    return tables.paragraphs(
        tables.table("**Behind 1,024 tokens:** bytes over a rank's link, their time, and TTFT:", {
            "kept": "{keep}", "ranks": "{ranks}", "of one rank's bytes": "{share_of_one_rank:.2f}",
            "agreements, in steps": "{agreements:.0f} in {steps:.0f}",
            **tables.across(kept, {"link": "{bytes_over_link:MB}, {link_ms:ms}", "TTFT, ms": "{ttft_ms:spread}"}),
        }, kept),
        f"An agreement takes {tables.listed(apart)}." if apart else "")  # fmt: skip


def main():
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.set_defaults(device="cpu")
    parser.add_argument("--ranks", type=measure.count(64), nargs="+", default=[1, 2])
    # --joined: this process is one of the ranks
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.joined:
        ranks = processes.join(*arguments.ranks)
        rows = rank(ranks, arguments)
        return ranks.rank or print(json.dumps(rows))
    measure.run("ranks", PARTS, report, arguments)


if __name__ == "__main__":
    with measure.one_sentence():
        main()
