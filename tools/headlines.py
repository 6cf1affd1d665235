"""The papers' headlines in one table: claimed, allowed by arithmetic, measured on a processor, measured on a GPU.

Arithmetic is that of tools/on_paper.py at the paper's sizes; with "here", what the measured rows' own costs allow. A cell
without a number says why. HiCache's numbers are its announcement's; its design document has only that of kernels.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from benchmarks import flow
from benchmarks.planned import LINKS, QUESTION
from benchmarks.tables import between, grouped, markdown, median, number, rows
from tools import on_paper

LINK, EVEN, _ = LINKS
ABSENT, percent = "not run", "{:.0%}".format
READ = Callable[[dict], list[float] | str]  # results -> numbers, or why there are none


class Headline(NamedTuple):
    text: str  # metric, over what, and on what
    where: str  # paper, section or figure
    claimed: str
    allowed: READ
    measured: READ  # on a processor
    gpu: tuple[str, ...] | str = ""  # whose time over whose, of what tools/gpu_report.py asks; one: TBT beside it; or why none
    show: Callable = number


# 1. Reading results -----------------------------------------------------------------------------------------

def found(results: dict, benchmark: str, part: str, **wanted) -> list[dict]:
    return rows(results.get(f"{benchmark}-cpu", {}).get("found", []), part, **wanted)


def cells(benchmark: str, part: str, value: Callable, **wanted) -> READ:
    return lambda results: [value(row) for row in found(results, benchmark, part, **wanted)]


def over_05(benchmark: str, part: str, value: Callable, **wanted) -> READ:
    """The value of 03 over that of 05, of each model, where a row is of one of them."""
    def read(results: dict) -> list[float]:
        by = {(row["model"], row.get("system") or row["way"]): value(row) for row in found(results, benchmark, part, **wanted)}
        return [by[model, "03"] / of_05 for (model, way), of_05 in by.items() if way == "05"]
    return read


def here(read: READ, show=number) -> READ:
    return lambda results: f"{shown(read(results), show)} here"


def shorter(way: str, of: Callable) -> READ:
    """By how much TTFT of both ends is less than that of one, in cells with chunks of both."""
    def read(results: dict) -> list[float]:
        telling = [row["ttft_ms"] for row in found(results, "both_ends", "grid") if min(row["loaded_chunks"], row["computed_chunks"]) >= 1]
        return [of(1 - median(times["both"]) / median(times[way]) for times in telling)] if telling else []
    return read


def kv_only(value: Callable) -> READ:
    """Something of K and V only and of hybrid, in decode steps in which both lanes are nearly even."""
    return cells("hybrid_blocks", "grid", lambda row: value(row["policies"]["kv-only"], row["policies"]["hybrid"]), f=1.25)


# 2. Arithmetic ----------------------------------------------------------------------------------------------

def on_cake(way: int, of: Callable) -> READ:
    """Over 2, 5 and 10 Gbit/s, 10, 50 and 90 % of an A100, 9K and 14K tokens; `way` 0: less than computing; 1: than loading."""
    less = [on_paper.less(*cell)[way] for cell in product((9e3, 14e3), (2, 5, 10), (0.1, 0.5, 0.9))]
    return lambda results: [of(less)]


def on_capture(way: int) -> READ:
    """The geometric mean over models and prompts; `way` 0: over K and V only; 1: over activations only."""
    every = list(product(on_paper.OPT, (512, 1024, 1920)))
    return lambda results: [statistics.geometric_mean(on_paper.capture_gains(*cell)[way] for cell in every)]


def stored(results: dict) -> list[float]:
    """Table 3 by the closed form."""
    plans = [on_paper.planned.closed_form(model.layers, on_paper.on_ssds(model)) for model in on_paper.MODELS]
    return [2 * len(plan) / (plan.count("H") + 2 * plan.count("K")) for plan in plans]


def sustained(results: dict) -> list[float]:
    """What flow.py's batch allows by RHHHHKKK, in times of projecting a layer of all histories, which is that of its states."""
    questions = 6 * QUESTION * len(flow.LENGTHS) / sum(flow.LENGTHS)  # 24 D^2 operations a token, where projecting has 4
    return [max(2.0, questions) / max((4 + 3 * 2) / 8, (1 + 4) / 8 + questions)]


def seventy_b(results: dict) -> list[float]:
    """4,096 tokens: 70B on an H100, over 80 layers of 8 KV heads of 128 in 16 bits."""
    return [2 * 70e9 * 4096 / (on_paper.SHARE_OF_PEAK * on_paper.H100) / (4 * 80 * 8 * 128 * 4096 / 64e9)]


# 3. The headlines -------------------------------------------------------------------------------------------

HEADLINES = [
    Headline("TTFT with K and V over HCache's, later rounds of sessions; 7B and 13B on an A100 with 4 SSDs, 30B on four A100",
             "HCache, 6.1.1, figure 9 a-c", "1.27 to 1.90", lambda results: on_paper.ttft_gains("KV", [2500], 67),
             over_05("outside", "sessions", lambda row: row["ttft_ms"]["p50"], of_saturation=0.5)),
    Headline("the same, long documents, one request at a time", "HCache, 6.1.2, figure 10", "1.62 to 1.93",
             lambda results: on_paper.ttft_gains("KV", [4096, 16384], 92),
             cells("planned", "ttft", lambda row: median(row["over_03"]["05"]), link=EVEN, states_over_kv=0.5), ("03", "05")),
    Headline("the same over computing them (DeepSpeed-MII)", "HCache, 6.1.2, figure 10", "2.66 to 5.73",
             lambda results: on_paper.ttft_gains("recomputing", [4096, 16384], 92),
             cells("planned", "ttft", lambda row: row["computed_ms"] / median(row["ttft_ms"]["05"]), link=EVEN, states_over_kv=0.5),
             ("02", "05")),
    Headline("bytes of a token, K and V over HCache's plan", "HCache, 6.1.3, table 3", "1.92 to 2.40", stored,
             over_05("flow", "layers", lambda row: row["bytes"], link=LINK), "a size: as planned"),
    Headline("TBT in sessions, over a system that restores nothing", "HCache, 6.1.1, figure 9 d-f", "at most 1.04",
             here(cells("outside", "beside", lambda row: 1 / (1 - row["projecting"]), system="05")),
             cells("outside", "beside", lambda row: median(row["over_02"]), system="05"), ("05",)),
    Headline("requests a second that are sustained, over K and V; 7B and 30B", "HCache, 6.1.1, figure 9", "up to 1.11", here(sustained),
             cells("flow", "batch", lambda row: median(row["rate_over_03"]), way="05")),
    Headline("TTFT with K and V over HCache's, documents, beside a cache on the GPU, 7B; uniform, and Zipf 2", "HCache, 6.4, figure 15",
             "1.67 and 1.15", lambda results: "figure 10's, where the GPU has lost the document", lambda results: [
                 1 / median(row["of_03"]["05"]) for row in found(results, "outside", "conversations") if "conversations" not in row.get("what", "")]),
    Headline("TTFT less than by computing alone (vLLM), the mean; 7B, A100 and H100, 2 to 10 Gbit/s, 10 to 100 % of the GPU", "Cake, 1",
             "36.7 %", on_cake(0, statistics.mean), shorter("compute", statistics.mean), ("06, r = 1, compute", "06, r = 1, both"), percent),
    Headline("TTFT less than by loading alone, the mean", "Cake, 1", "60.55 %", on_cake(1, statistics.mean),
             shorter("load", statistics.mean), ("06, r = 1, load", "06, r = 1, both"), percent),
    Headline("the same over computing, at best: 10 % of a GPU, 14K tokens", "Cake, abstract, 5.3", "68.1 %", on_cake(0, max),
             shorter("compute", max), ("06, r = 0.25, compute", "06, r = 0.25, both"), percent),
    Headline("the same over loading, at best: 2 Gbit/s, all of an H100, 32K tokens", "Cake, abstract, 5.2", "94.6 %",
             lambda results: [on_paper.less(32e3, 2, 1.0, on_paper.H100)[1]], shorter("load", max),
             ("06, r = 4, load", "06, r = 4, both"), percent),
    Headline("TTFT less than with the GPU's cache alone; the design names no hardware", "HiCache, announcement", "up to 80 %",
             here(cells("tiered", "mix", lambda row: 1 - (1 - median(row["lower"])) * median(row["of_bound"]), at_once=1), percent),
             cells("tiered", "mix", lambda row: median(row["lower"]), at_once=1), "", percent),
    Headline("throughput over the GPU's cache alone", "HiCache, announcement", "up to 6",
             here(cells("tiered", "mix", lambda row: median(row["throughput"]) / median(row["of_bound"]), at_once=2)),
             cells("tiered", "mix", lambda row: median(row["throughput"]), at_once=2)),
    Headline("copying by kernels, over `cudaMemcpyAsync`", "HiCache, design", "up to 3", lambda results: "depends on the size of a piece",
             lambda results: "a processor has none", ("07, direct", "07, kernel")),
    Headline("tokens a second, prefill counted, over FlexGen; OPT of 6.7B to 66B, 4090", "CAPTURE, V-B, figure 8", "2.19", on_capture(0),
             cells("hybrid_blocks", "whole", lambda row: median(row["over"]), policy="kv-only"), ("08, kv-only", "08, hybrid")),
    Headline("the same over activations only", "CAPTURE, I, V-B", "1.35 (V-B also: 1.61)", on_capture(1),
             cells("hybrid_blocks", "whole", lambda row: median(row["over"]), policy="act-only"), ("08, act-only", "08, hybrid")),
    Headline("bytes of context that a decode step loads, FlexGen's over CAPTURE's; OPT-30B, 32 and 64 requests (on paper: of 1,024 tokens)",
             "CAPTURE, V-C, figure 9", "up to 1.27, 1.38", lambda results: [on_paper.capture_traffic("30B", many) for many in (32, 64)],
             kv_only(lambda theirs, ours: theirs["traffic"])),
    Headline("share of the time that the GPU is busy, over FlexGen's; OPT-30B, 32 to 128 requests", "CAPTURE, V-D, figure 10",
             "7.39 (mean), 13.39 (128)", lambda results: "its own ends, 35.6 / 8.2 and 78.2 / 12.6 %: 4.34, 6.21",
             kv_only(lambda theirs, ours: ours["busy"]["compute"] / theirs["busy"]["compute"])),
    Headline("computing 4,096 tokens of a 70B, over a copy from pinned memory; H100, 64 GB/s", "KV Cache CPU Offloading, benchmarks",
             "10 to 50", seventy_b, cells("engine", "host", lambda row: 1 / median(row["over_computing"])), ("02", "03")),
]  # fmt: skip


# 4. The table -----------------------------------------------------------------------------------------------

def shown(made: list[float] | str, show=number) -> str:
    """Numbers as their range; words as they are."""
    return made if isinstance(made, str) else ABSENT if not made else show(made[0]) if len(made) == 1 else between(made, show)


def gained(headline: Headline, rows: list[dict], key: str) -> str:
    """One way's time over another's, or by how much the second is less."""
    over, under = (median(row.get(key) or row["answers_ms"]) for row in rows)
    return headline.show(1 - under / over if headline.show is percent else over / under)


def asked(rows: list[dict], headline: Headline) -> Iterator[tuple[dict, str]]:
    """Yield (a row with model and history, what a GPU has shown there), over its own link; of what, where both rows say."""
    ways = headline.gpu if isinstance(headline.gpu, tuple) else ()
    if len(ways) == 1:  # TBT of eight, while a history comes back, over that while a short prompt is answered
        yield from ((row, headline.show(median(row["over_alone"]))) for row in rows if row.get("way") in ways and "over_alone" in row)
        return
    timed = [row for row in rows if row.get("way") in ways and {"ttft_ms", "answers_ms"} & row.keys() and "," not in row["model"]]
    for group in grouped(timed, ("model", "history"), "way"):
        if set(ways) == group["at"].keys():
            two = [group["at"][way] for way in ways]
            allowed = f" of {gained(headline, two, 'allowed_ms')}" if all("allowed_ms" in row for row in two) else ""
            yield group, gained(headline, two, "ttft_ms") + allowed


def on_gpu(results: dict, headline: Headline) -> str:
    """In each file of a GPU: of a 7B, else of a model whose states are half of K and V, behind its longest history."""
    made = []
    for file in (file for name, file in results.items() if name.startswith("gpu-")):
        every = list(asked([row for job in file.values() for row in job["rows"]], headline))
        for row, said in sorted(every, key=lambda each: ("7b" in each[0]["model"], "mha" in each[0]["model"], each[0]["history"]))[-1:]:
            made.append(f"{said} ({row['model']}, {row['history']:,})")
    return "; ".join(made)


def table(results: dict) -> str:
    lines = [[one.text, one.where, one.claimed, shown(one.allowed(results), one.show), shown(one.measured(results), one.show),
              on_gpu(results, one) or (isinstance(one.gpu, str) and one.gpu) or ABSENT] for one in HEADLINES]  # fmt: skip
    return markdown(["headline", "where", "claimed", "by arithmetic", "on a processor", "on a GPU"], lines)
