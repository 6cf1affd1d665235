"""Chapter 09: what 1, 2 and 4 ranks load, how long it takes, and what they say to each other.

    python -m benchmarks.ranks                                         all; results in benchmarks/results/
    python -m benchmarks.ranks --model classroom --ranks 1 2

A history comes back to a device that has lost it, for a question of 16 tokens, over a link that each rank has of its
own: so slow that one rank takes half a second for all K and V. On a CPU the ranks share the cores, a thread each:
with more ranks than cores computing gets slower, and only what the link does is as on so many devices. The bound
is what the link has to carry, bytes over speed. Agreements are counted a request, and timed alone.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.baseline import spread, write  # noqa: E402
from benchmarks.reference import one_sentence  # noqa: E402
from common import cli, lesson  # noqa: E402
from common import ranks as processes  # noqa: E402
from common.requests import Request  # noqa: E402

nine = importlib.import_module("09_tensor_parallel")
QUESTION, SECONDS = 16, 0.5  # tokens; what one rank's link takes for all K and V
HISTORIES = {"classroom": 1024, "random:small": 1024}


def rank(ranks, arguments) -> list[dict]:
    """What each rank does -> rows, on rank 0."""
    torch.set_num_threads(1)
    model, *_ = nine.load(ranks, arguments.model, "auto", "cpu")
    config, tokens = model.config, HISTORIES[arguments.model]
    whole = tokens * config.kv_numbers_per_token // config.num_key_value_heads * model.division.kv_heads
    gbps = whole * model.dtype.itemsize / SECONDS / 1e9
    options = argparse.Namespace(
        max_running=4, block_size=16, gpu_blocks=None, cpu_blocks=None, token_budget=512, link=gbps, platform="a100",
        always_restore=True, storage=None, explain=False)  # fmt: skip
    rng, rows = random.Random(0), []
    history = [rng.randrange(300, config.vocab_size) for _ in range(tokens)]
    for keep in nine.KEEPS:
        engine, counts = nine.make_engine(model, options, keep), []
        lesson.ask(engine, history + [1], 1)

        def ask() -> float:
            lesson.settle(engine)  # noqa: B023
            engine.evict("device")  # noqa: B023
            before = ranks.agreements, engine.counts["bytes_in"], engine.counts["steps"]  # noqa: B023
            question = [rng.randrange(300, config.vocab_size) for _ in range(QUESTION)]
            (request,) = engine.generate([Request(history + question, 1)])  # noqa: B023
            after = ranks.agreements, engine.counts["bytes_in"], engine.counts["steps"]  # noqa: B023
            counts.append([now - then for now, then in zip(after, before)] + [request.cached_tokens])  # noqa: B023
            return request.outcome.ttft_ms

        samples = lesson.in_turn({keep: ask}, arguments.rounds)[keep]
        agreements, size, steps, found = map(statistics.median, zip(*counts[1:]))
        rows.append(dict(
            keep=keep, ranks=ranks.count, history_tokens=tokens, gbps=gbps, bytes_over_link=size, link_ms=size / gbps / 1e6,
            ttft_ms=spread(samples), agreements=agreements, steps=steps, restored_tokens=found))  # fmt: skip
        engine.close()
    began = time.perf_counter()
    for _ in range(200):
        ranks.least([0] * nine.FACTS)
    for row in rows:
        row["agreement_us"] = (time.perf_counter() - began) / 200 * 1e6
    ranks.meet()
    return rows


def run(model: str, counts: list[int], rounds: int) -> list[dict]:
    """Start the ranks, for each number of them -> rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / f"{count}.json"
            words = "--model", model, "--rounds", str(rounds), "--rows", str(path)
            command = [sys.executable, __file__, *words, "--ranks", str(count)]
            if code := subprocess.run(command).returncode:
                raise SystemExit(f"{count} ranks have ended with {code}.")
            rows += json.loads(path.read_text())
    one = {row["keep"]: row for row in rows if row["ranks"] == 1}
    for row in rows:
        share = row["bytes_over_link"] / one[row["keep"]]["bytes_over_link"] if row["keep"] != "nothing" else None
        row["share_of_one_rank"] = share
        print(
            f" {row['keep']:8} {row['ranks']} ranks: {row['bytes_over_link'] / 1e6:6.2f} MB over a rank's link, "
            f"{row['link_ms']:6.1f} ms; TTFT {row['ttft_ms']['median']:7.1f} ms; {row['agreements']:.0f} agreements in "
            f"{row['steps']:.0f} steps, of {row['agreement_us']:.0f} us", flush=True)  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = cli.bounded(int, 1, 64)
    parser.add_argument("--model", nargs="+", choices=HISTORIES, default=list(HISTORIES))
    parser.add_argument("--ranks", type=number, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=number, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one of the ranks
    arguments = parser.parse_args()
    if arguments.rows:
        (arguments.model,), ranks = arguments.model, processes.join(*arguments.ranks)
        rows = rank(ranks, arguments)
        if ranks.rank == 0:
            arguments.rows.write_text(json.dumps(rows))
        return
    found = []
    for model in arguments.model:
        print(f"{model}:", flush=True)
        found.append(dict(claim="ranks", model=model, rows=run(model, arguments.ranks, arguments.rounds)))
    write("ranks", "cpu", arguments.json, cores=len(os.sched_getaffinity(0)), found=found)


if __name__ == "__main__":
    with one_sentence():
        main()
