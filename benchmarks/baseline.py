"""Compare chapters 01 and 02 with `transformers` on the same weights, in turn.

    python -m benchmarks.baseline                       all models; results in benchmarks/results/
    python -m benchmarks.baseline --model random:tinyllama --dtype bfloat16 --new-tokens 33

One request of 512 tokens, of which nothing is cached. `transformers` is not compiled, and runs with its
default cache, which is called dynamic. TBT is the mean time between the tokens of one answer.
"""
import importlib
import time
from functools import partial
from types import SimpleNamespace

import torch

from benchmarks import measure, tables
from benchmarks.measure import ratio, spread
from common.requests import Request
from shell import cli, lesson
from shell.checkpoint import reference_model

baseline, paged = importlib.import_module("01_baseline"), importlib.import_module("02_paged_kv")
PEER = "dynamic"


def ask_theirs(model, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """Ask `generate` of transformers, greedy and not compiled: compiling takes longer than it saves here, and
    needs a compiler. Returns: TTFT in ms, TBT in ms, and the new tokens."""
    times, ids = [time.perf_counter()], torch.tensor([prompt], device=model.device)  # [1, T]
    streamer = SimpleNamespace(put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                         streamer=streamer, pad_token_id=0, disable_compile=True)
    begin, _, first, *later = times  # the streamer first receives the prompt
    return (first - begin) * 1e3, ([first, *later][-1] - first) / max(1, new - 1) * 1e3, out[0, len(prompt):].tolist()


def ask_ours(engine, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """Ask one of our engines with an empty cache. Returns: TTFT in ms, TBT in ms, and the new tokens."""
    if engine.pools:
        engine.evict("device")
    result = engine.generate([Request(prompt, new)])[0]
    return result.ttft_ms, result.tbt_ms, result.new


def lone(model, arguments):
    """Yield one row: TTFT and TBT of all engines and caches for the same prompt."""
    # 1. All engines on the same weights
    device, new = model.device.type, arguments.new_tokens
    reference = reference_model(arguments.name, model.dtype, device)
    reference.generation_config.eos_token_id = None
    length = min(512, model.config.max_position_embeddings - new)
    prompt = torch.randint(5, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    ways = {"01": partial(ask_ours, baseline.Engine(model), prompt, new),
            "02": partial(ask_ours, paged.Engine(paged.Runner(model, (length + new) // 8)), prompt, new)}
    ways[PEER] = partial(ask_theirs, reference, prompt, new)

    # 2. They take turns
    taken = {way: dict(zip(("ttft", "tbt", "tokens"), zip(*answers)))
             for way, answers in lesson.in_turn(ways, arguments.rounds).items()}  # fmt: skip

    engines = {way: dict(ttft_ms=spread(own["ttft"]), tbt_ms=spread(own["tbt"])) for way, own in taken.items()}
    for way, figures in engines.items():
        yardstick = taken["01" if way == "02" else PEER]["tokens"][-1]
        figures["equal_tokens"] = sum(a == b for a, b in zip(taken[way]["tokens"][-1], yardstick))
    faster = {ours: {PEER: {what: ratio(taken[PEER][what], taken[ours][what]) for what in ("ttft", "tbt")}} for ours in ("01", "02")}
    yield dict(dtype=str(model.dtype).removeprefix("torch."), new_tokens=new, engines=engines, times_as_fast=faster)


PARTS = {"lone": (lone, ["classroom", measure.TRAINED])}


def report(found: list[dict]) -> str:
    rows = tables.rows(found, "lone")
    lines = [dict(row, chapter=chapter, own=row["engines"][chapter], faster=row["times_as_fast"][chapter])
             for row in rows for chapter in ("01", "02")]  # fmt: skip
    columns = {"model, chapter": "{model}, {dtype}, {chapter}", "TTFT": "{own[ttft_ms]:ms}", "TBT": "{own[tbt_ms]:ms}"}
    for what in ("ttft", "tbt"):
        columns[f"{what.upper()}, times as fast as {PEER}"] = f"{{faster[{PEER}][{what}]:spread}}"
    return tables.table("", {**columns, "tokens equal": "{own[equal_tokens]} of {new_tokens}"}, lines)


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--new-tokens", type=cli.bounded(int, 2, 1024), default=17)
    parser.set_defaults(dtype="float32")
    measure.run("baseline", PARTS, report, parser.parse_args())
