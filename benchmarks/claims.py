"""Judge every claim: the paper's number, the bound by arithmetic at the paper's sizes, and the measurement.

    python -m benchmarks.claims                             judge benchmarks/results, which is committed
    python -m benchmarks.claims benchmarks/results/last     judge the last `python -m benchmarks`; a second argument
                                                            names the device as file names do (default: cpu)

Each claim reads cells from the rows of one benchmark. A row whose mechanism did nothing (no tokens restored,
no chunks loaded, no blocks rebuilt) makes no cell. A claim holds if all of its cells hold. "not 3 % slower"
fails where the median of the paired ratios exceeds 1.03 and their lower quartile exceeds 1. tools/on_paper.py
does the arithmetic, and tools/report.py adds it to the table.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import RESULTS, is_slower, spread
from benchmarks.outside import RECOMPUTING
from benchmarks.planned import LINKS
from benchmarks.tables import grouped, median, number, rows

ABSENT = "not run"


class Cell(NamedTuple):
    """One measured figure of a claim."""

    label: str
    value: float
    samples: tuple[float, ...] = ()  # paired ratios, for "not ... slower"; empty where the figure has none


class Claim(NamedTuple):
    """A statement about one benchmark's figures, and the limit that they must keep."""

    chapter: str
    text: str  # the figure and its regime
    paper: str  # the paper's section or figure, and the number that it prints
    asked: tuple[str, float]  # (">=", 1.4), ("<=", 0.5), or ("slower", 0.03): at most 3 % slower
    benchmark: str
    cells: Callable[[list], list[Cell]]  # ("found" of the benchmark's file) -> cells
    allowed: Callable | None = None  # (module tools.on_paper) -> numbers by arithmetic for the paper's hardware
    gpu: tuple[str, ...] = ()  # ways of tools.gpu_report: two give the ratio of their times, one gives the TBT of other requests


# 1. Reading each benchmark ----------------------------------------------------------------------------------

def cells(part: str, label: str, figure: Callable, exercised: Callable = lambda row: 1, **wanted) -> Callable:
    """Return a reader: (found) -> one cell for each row of `part` that is as wanted and was exercised.

    `label`: a template for the row. `figure`: (row) -> a number, or the spread of paired ratios. `exercised`:
    (row) -> true if the mechanism moved or computed something. `wanted`: values of the row's keys, `model`
    among them. A row without a key that is read, such as a row of older code, makes no cell."""
    def read(found: list) -> list[Cell]:
        every = []
        for row in rows(found, part, **wanted):
            with suppress(KeyError):
                every += [cell(label.format_map(row), figure(row))] if exercised(row) else []
        return every
    return read


def cell(label: str, figure) -> Cell:
    return Cell(label, median(figure), tuple(figure["samples"]) if isinstance(figure, dict) else ())


def each(*readers: Callable) -> Callable:
    """Return a reader of the cells of all `readers`, in their order."""
    return lambda found: [cell for read in readers for cell in read(found)]


def against_transformers(chapter: str) -> Callable:
    return cells("lone", f"{{model}}, {chapter}", lambda row: row["times_as_fast"][chapter]["dynamic"]["tbt"], model="classroom")


def planned(over: str, chapter: str, least: int = 1024, **wanted) -> Callable:
    """Return a reader: TTFT of chapter `over` divided by TTFT of `chapter`, behind at least `least` tokens.

    Rows in which 03, 04 or 05 restored nothing make no cell."""
    def restored(row: dict) -> int:
        return row["history_tokens"] >= least and min(row["restored"][way] for way in ("03", "04", "05"))
    return cells("ttft", f"{over}, {{model}} {{history_tokens}}, {{link}}", lambda row: row[f"over_{over}"][chapter], restored, **wanted)


def halves(over: str, chapter: str, **wanted) -> Callable:
    """Return the reader of `planned` for models whose hidden states are half as large as K and V."""
    return planned(over, chapter, states_over_kv=0.5, **wanted)


def inverse(read: Callable) -> Callable:
    """Return a reader of the same cells, each figure and sample replaced by its reciprocal."""
    return lambda found: [Cell(label, 1 / value, tuple(1 / sample for sample in samples)) for label, value, samples in read(found)]


def sessions(key: str, base: str, *systems: str) -> Callable:
    """Return a reader: for each system the ratios `key` of all runs of random:long, at the rates that both it
    and `base` sustain."""
    def read(found: list) -> list[Cell]:
        every = rows(found, "sessions", model="random:long")
        diverged = {(row["system"], row["rate"]) for row in every if row["diverged"]}
        taken = {system: [sample for row in every if row["system"] == system and row["restored"] and key in row
                          and not {(system, row["rate"]), (base, row["rate"])} & diverged for sample in row[key]["samples"]]
                 for system in systems}  # fmt: skip
        return [cell(f"{system}, {key}", spread(samples)) for system, samples in taken.items() if samples]
    return read


def grid(figure: Callable, **wanted) -> Callable:
    return cells("grid", "{model} {history_tokens}, r {r:g}, share {share:g}", figure,
                 lambda row: min(row["loaded_chunks"], row["computed_chunks"]) * (median(row["ttft_ms"]["load"]) > row["hit_ms"]), **wanted)


def mix(key: str, **wanted) -> Callable:
    return cells("mix", "{model}, {at_once} at once", lambda row: row[key], lambda row: median(row["storage"]), **wanted)


def policies(policy: str) -> Callable:
    """Return a reader: TTFT of `both_ends` over TTFT of `policy`, in rows whose measured r is near the
    intended one."""
    return cells("policies", f"{policy}, {{model}}, r {{r:g}}, guard {{guard}}", lambda row: row["both_ends_over"][policy],
                 lambda row: row["from_storage"]["both_ends"] * (0.75 < row["measured_r"] / row["r"] < 1.33))


def decode(figure: Callable, **wanted) -> Callable:
    def on_the_host(row: dict) -> int:
        plan = row["policies"]["hybrid"]["plan"]
        return plan["act_host"] + plan["act_device"] + plan["kv_host"]
    return cells("grid", "{model}, f {f:g}, {batch} x {context}", figure, on_the_host, **wanted)


def behind_in_decode(policy: str) -> Callable:
    """Return a reader: seconds of a decode step of hybrid over those of `policy`, in the same round."""
    over = decode(lambda row: row["policies"][policy]["over"])
    return lambda found: [Cell(f"{policy}, {label}", value, samples) for label, value, samples in inverse(over)(found)]


def whole(figure: Callable, *policies: str) -> Callable:
    return each(*(cells("whole", "{policy}, whole answers", figure, policy=policy) for policy in policies))


def from_storage(other: str, system: str, slower: bool = False) -> Callable:
    """Return a reader: TTFT of `other` from storage over that of `system` from the same storage. `slower`:
    only behind 1,024 tokens and more, from storage that is slower than projecting."""
    def exercised(row: dict) -> bool:
        return row["restored"] >= row["history_tokens"] and (not slower or row["is_slower"] and row["history_tokens"] > 1000)
    return cells("restored", f"{other} over {system}, {{history_tokens}}, {{place}}", lambda row: row["sooner_than"][other], exercised, system=system)


def beside_llama(what: str, *systems: str, **wanted) -> Callable:
    return each(*(cells("hits", "{system}, {what}, {tokens}", lambda row: row["processor_over"], lambda row: row["cached"] or what == "computed",
                        what=what, system=system, **wanted) for system in systems))  # fmt: skip


# 2. The claims ----------------------------------------------------------------------------------------------

LINK, EVEN, SLOW = LINKS
OPPONENTS = "kv-only", "act-only", "naive"
CLAIMS = [
    Claim("01, 02", "TBT of `generate` in `transformers` (not compiled, dynamic cache) over ours; classroom, a prompt of 512 tokens, one request", "-",
          (">=", 1.25), "baseline", each(against_transformers("01"), against_transformers("02"))),
    Claim("02, 03", "thirty questions at once about one document of 1,024 tokens, which 02 computes and 03 restores once: their mean TTFT over the "
          "sum of their TTFT with the document on the device and the TTFT of one question alone; classroom", "-", ("<=", 1.1), "engine",
          cells("burst", "{model}, {chapter}", lambda row: row["ratio"], lambda row: row["bytes_restored"] or row["chapter"] == "02")),
    Claim("02 to 05", "share of logits that have the bits of chapter 01 under `--same-bits`; four conversations at once, restored for "
          "their second turn; classroom, float32", "-", (">=", 1.0), "engine",
          cells("same", "{model}, {chapter}", lambda row: row["equal"] / row["compared"],
                lambda row: row["bytes_restored"] or row["chapter"] == "02")),
    Claim("03", "TTFT of a hit in host memory over TTFT of computing; 1,024 and 1,984 tokens, default link, one request",
          "KV Cache CPU Offloading, benchmarks: 0.02 to 0.1, a copy over computing 4,096 tokens of a 70B; H100, 64 GB/s", ("<=", 0.5), "engine",
          cells("host", "{model} {history}", lambda row: row["over_computing"], lambda row: row["bytes_restored"]),
          lambda paper: [paper.copy_over_computing()], ("03", "02")),
    Claim("04, 05", "TTFT of K and V (03) over TTFT of hidden states (04), and of the plan (05); 1,024 to 1,984 tokens, the link is the bottleneck, one request",
          "HCache, 3.2: 2, of the transfer; it prints no TTFT of states alone", (">=", 1.7), "planned",
          each(halves("03", "04", link=LINK), halves("03", "05", link=LINK))),
    Claim("04, 05", "TTFT of K and V (07) over TTFT of hidden states (04), and of the plan (05), from the same storage, which is slower than projecting: modelled, "
          "and this machine's disk if it is that slow; 1,024 and 1,984 tokens, one request",
          "HCache, 6.2.2 (figure 11 d-f): 2.09 to 2.66 for its plan, speed of restoring; A100s, one SSD for each", (">=", 1.7), "real_storage",
          each(*(from_storage("07", system, slower=True) for system in ("04", "05"))), lambda paper: paper.ttft_gains("KV", [1024], 0, 1)),
    Claim("05", "the plan (05) is not 3 % slower than K and V (07) or hidden states (04) from the same storage; three modelled speeds, "
          "files in the page cache and not; 512 to 1,984 tokens", "-", ("slower", 0.03), "real_storage",
          each(*(inverse(from_storage(other, "05")) for other in ("04", "07")))),
    Claim("04", "TBT of 1 and 16 requests behind 512 tokens while their hidden states are saved in two stages: not 6 % slower than with nothing kept",
          "HCache, 6.3.3 (figure 14): 1, behind 512 tokens; 7B and 13B, A100, SSD", ("slower", 0.06), "variants",
          cells("saving", "{model}, {running} running", lambda row: row["ways"]["two stages"]["tbt_over_nothing"],
                lambda row: row["ways"]["two stages"]["bytes_out"] * row["behind_tokens"])),
    Claim("05", "TTFT of K and V (03) over TTFT of the plan (05), over a link on which projecting takes as long as the transfer; 1,024 to 1,984 tokens",
          "HCache, 6.1.2 (figure 10): 1.62 to 1.93, TTFT behind 4K to 16K; A100s, 4 SSDs; balanced at 7B only",
          (">=", 1.15), "planned", halves("03", "05", link=EVEN), lambda paper: paper.ttft_gains("KV", [4096, 16384], 92), ("03", "05")),
    Claim("05", "TTFT of computing (02) over TTFT of the plan (05); the same link and lengths",
          "HCache, 6.1.2 (figure 10): 2.66 to 5.73, over DeepSpeed-MII; A100s, 4 SSDs", (">=", 2.66), "planned", halves("02", "05", link=EVEN),
          lambda paper: paper.ttft_gains("recomputing", [4096, 16384], 92), ("02", "05")),
    Claim("05", "the plan (05) is not 3 % slower than K and V (03) or hidden states (04); 512 to 1,984 tokens, three links, and grouped queries, "
          "whose hidden states are larger than K and V", "-", ("slower", 0.03), "planned",
          each(*(inverse(planned(over, "05", least=512)) for over in ("03", "04")))),
    Claim("05", "requests a second of the plan (05) over those of K and V (03); sixteen at once, behind 128 to 768 tokens, the same link",
          "HCache, 6.1.1 (figure 9): up to 1.11, requests a second of sessions; 7B and 30B, A100s", (">=", 1.11), "planned",
          cells("at_once", "{model}, {at_once}", lambda row: row["over_03"], lambda row: row["bytes"]["05"] * row["at_once"])),
    Claim("05", "sixteen sessions over HTTP, behind 800 tokens, at the rates that both sustain: p50 and p90 of TTFT of the plan (05) over those of K and V (03); random:long",
          "HCache, 6.1.1 (figure 9 a-c): 0.53 to 0.79, over all rates; 7B to 30B, A100s, 4 SSDs", ("<=", 0.9), "outside",
          each(*(sessions(f"p{share}_over_03", "03", "05") for share in (50, 90))), lambda paper: [1 / gain for gain in paper.ttft_gains("KV", [2500], 67)]),
    Claim("05", "the same sessions, at the rates that both sustain: p50 of TTFT of the plan (05) over that of recomputing",
          "HCache, 6.1.1 (figure 9 a-c): 0.28 to 0.45, over all rates; 7B to 30B, A100s, 4 SSDs", ("<=", 0.45), "outside",
          sessions(f"p50_over_{RECOMPUTING}", RECOMPUTING, "05"), lambda paper: [1 / gain for gain in paper.ttft_gains("recomputing", [2500], 67)]),
    Claim("03 to 05", "the same sessions, at the rates that both sustain: mean TBT is not 4 % above that of 02, which keeps everything on the device",
          "HCache, 6.1.1 (figure 9 d-f): at most 1.04, of its plan (05) only; A100s, 4 SSDs", ("slower", 0.04), "outside",
          sessions("tbt_over_02", "02", "03", "04", "05"), None, ("05",)),
    Claim("06", "TTFT of the faster of computing and loading over TTFT of both ends; 1,024 and 1,984 tokens, storage as fast as computing",
          "by l c / (l + c) at most 2; Cake names no r", (">=", 1.4), "both_ends", grid(lambda row: row["better_over_both"], r=1, share=1.0)),
    Claim("06", "both ends are not 3 % slower than the faster one; loading takes 0.25 to 4 times as long as computing, with 10 % of a step or more",
          "Cake, 5.3, appendix C: the fastest everywhere; 7B, 10 to 90 % of a GPU, 2 to 10 Gbit/s", ("slower", 0.03), "both_ends",
          grid(lambda row: row["over_better"]), None, ("06, r = 1, both", "06, r = 1, load")),
    Claim("06", "TBT of four requests that decode while both ends bring 1,984 tokens back: not 6 % above that while these are computed; storage as fast as computing",
          "Cake, 5.5 (figure 7): steps take as long with a loader as without; A100, H100", ("slower", 0.06), "both_ends",
          cells("others", "{model}", lambda row: row["tbt_over_computing"]["both"], lambda row: min(row["loaded_chunks"], row["computed_chunks"]))),
    Claim("07", "pages pass from storage through host memory to the device in one pipeline, under timeout and wait_complete: its bound over TTFT; "
          "1,024 tokens, storage as fast as the link, one request", "-", (">=", 0.85), "tiered",
          cells("pipeline", "{model}, {policy}", lambda row: row["of_bound"], lambda row: row["storage"])),
    Claim("07", "throughput over that of the device alone; conversations behind documents of 1,024 tokens, two at once",
          "HiCache's announcement (LMSYS, 2025): up to 6", (">=", 2.5), "tiered", mix("throughput", at_once=2)),
    Claim("07", "`both_ends` is not 3 % slower than computing or another policy; 1,024 tokens, storage as fast as computing, and half as fast "
          "with the engine's guard on", "-", ("slower", 0.03), "tiered", each(*map(policies, ("computed", "best_effort", "wait_complete", "timeout")))),
    Claim("07", "no request is 3 % slower than computing, whichever tier has its prefix; 512 and 1,900 tokens, storage of 1 MB/s to 1 GB/s", "-",
          ("slower", 0.03), "tiered",
          cells("admission", "{history_tokens}, {way}", lambda row: row["over_computing"], lambda row: row["way"] != "computed")),
    Claim("08", "hybrid is not 3 % slower than K and V only, activations only, or no mini-batches; decode steps, and whole answers",
          "CAPTURE, V-B, figure 8: the fastest, 2.19 over FlexGen, 1.35 over activations only", ("slower", 0.03), "hybrid_blocks",
          each(*map(behind_in_decode, OPPONENTS[:2]), inverse(whole(lambda row: row["over"], *OPPONENTS))),
          lambda paper: paper.capture_mean(0) + paper.capture_mean(1), ("08, kv-only", "08, hybrid")),
    Claim("08", "share of the time in which the processor is busy under hybrid, over that under K and V only; decode steps, f = 1.25",
          "CAPTURE, V-D, figure 10: 0.36 over 0.08 (32 at once) to 0.78 over 0.13 (128), FlexGen; it prints 7.39 on average; OPT-30B on a 4090", (">=", 2.0), "hybrid_blocks",
          decode(lambda row: row["policies"]["hybrid"]["busy"]["compute"] / row["policies"]["kv-only"]["busy"]["compute"], f=1.25)),
    Claim("09", "TTFT on two ranks over the time in which each link transfers half of the bytes; 1,024 tokens, K and V or hidden states, a slow link",
          "HCache, section 5: each rank reads a disjoint share", ("<=", 1.25), "ranks",
          cells("ranks", "{model}, {keep}", lambda row: median(row["ttft_ms"]) / row["link_ms"], lambda row: row["bytes_over_link"], ranks=2)),
    Claim("04 to 07", "TTFT of a history on this machine's own disk, page cache dropped, over TTFT of computing; 1,024 and 1,984 tokens, one request",
          "HCache, 6.1.2 (figure 10): 0.17 to 0.38 of recomputing, behind 4K to 16K; A100s, 4 SSDs", ("<=", 0.5), "real_storage",
          cells("restored", "{system}, {history_tokens}", lambda row: row["over_computing"],
                lambda row: row["fetched"] and row["restored"] and row["history_tokens"] > 1000, place="dropped")),
    Claim("03 to 07", "processor time of computing a prompt of 500 to 1,900 tokens over that of llama.cpp (AVX2, 4-bit weights); SmolLM2, float32", "-",
          ("<=", 1.0), "peers", beside_llama("computed", "03", "04", "06", "07")),
    Claim("07", "processor time of TTFT of 1,900 tokens from files in the page cache over that of llama.cpp; SmolLM2, float32", "-",
          ("<=", 1.2), "peers", beside_llama("files", "07", tokens=1900)),
]  # fmt: skip


# 3. The table -----------------------------------------------------------------------------------------------

HEADER = ["chapter", "claim", "paper", "by arithmetic", "asked", "measured", "on a GPU", "verdict"]


def holds(cell: Cell, asked: tuple[str, float]) -> bool:
    word, least = asked
    if word == "slower":
        return not is_slower(list(cell.samples), least)
    return cell.value >= least if word == ">=" else cell.value <= least


def read(folder: Path = RESULTS) -> dict:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def table(results: dict, device: str = "cpu", paper=None) -> list[list[str]]:
    """Return the table's rows, one for each claim, with the columns of HEADER.

    `device`: as in file names; results of `ranks` are taken from the CPU where this device has none. `paper`:
    the module tools.on_paper, or None to leave the column of arithmetic empty."""
    def found(benchmark: str) -> list:
        file = results.get(f"{benchmark}-{device}") or results.get(f"{benchmark}-cpu" if benchmark == "ranks" else "", {})
        return file.get("found", [])
    return [[claim.chapter, claim.text, claim.paper, shown(claim.allowed(paper)) if paper and claim.allowed else "", wanted(claim.asked),
             said, on_gpu(results, claim.gpu), verdict]
            for claim in CLAIMS for said, verdict in [judged(claim, found(claim.benchmark))]]  # fmt: skip


def wanted(asked: tuple[str, float]) -> str:
    return f"not {asked[1]:.0%} slower" if asked[0] == "slower" else f"{asked[0]} {asked[1]:g}"


def shown(values: list[float]) -> str:
    """Return the values' range as text, or the value if all are equal."""
    return " to ".join(f"{value:.3g}" for value in sorted({min(values), max(values)}))


def judged(claim: Claim, found: list) -> tuple[str, str]:
    """Judge a claim by its cells. Returns: the range of the figures, and the verdict."""
    if not (cells := claim.cells(found)):
        return "", "not measured"
    measured = shown([cell.value for cell in cells]) + f" in {len(cells)} cells" * (len(cells) > 1)
    if not (missed := [cell for cell in cells if not holds(cell, claim.asked)]):
        return measured, "met"
    least = ", ".join(f"{cell.label}: {cell.value:.3g}" for cell in missed[:3])
    return measured, f"**missed** in {len(missed)} ({least}{', ...' * (len(missed) > 3)})"


def on_gpu(results: dict, ways: tuple[str, ...]) -> str:
    """Return the figures of all GPUs as text, one for each file gpu-DEVICE.json; ABSENT without any.

    Each figure is that of a 7B, else of a model whose hidden states are half as large as K and V, with the
    longest history. Two `ways` give the first one's time over the second one's, and the ratio that arithmetic
    allows, if the rows have it. One way gives the TBT of eight requests while its history comes back, over
    that beside a short prompt."""
    made = []
    for file in (file for name, file in results.items() if name.startswith("gpu-")):
        each = [row for job in file.values() for row in job["rows"] if row.get("way") in ways and "," not in row["model"]]
        found = [(row, number(median(row["over_alone"]))) for row in each if len(ways) == 1 and "over_alone" in row]
        for row in grouped([row for row in each if {"ttft_ms", "answers_ms"} & row.keys()], ("model", "history"), "way"):
            if len(ways) == 2 and set(ways) == row["at"].keys():
                found.append((row, times(*map(row["at"].get, ways))))
        for row, said in sorted(found, key=lambda each: ("7b" in each[0]["model"], "mha" in each[0]["model"], each[0]["history"]))[-1:]:
            made.append(f"{said} ({row['model']}, {row['history']:,})")
    return "; ".join(made) or ABSENT


def times(over: dict, under: dict) -> str:
    """Return one way's time over another's as text, and the ratio that arithmetic allows, if both rows have
    it."""
    ratio, allowed = (number(median(one) / median(other)) if one and other else "" for one, other in (
        (over.get("ttft_ms") or over["answers_ms"], under.get("ttft_ms") or under["answers_ms"]),
        (over.get("allowed_ms"), under.get("allowed_ms"))))  # fmt: skip
    return ratio + f" of {allowed}" * bool(allowed)


if __name__ == "__main__":
    for chapter, text, source, _, target, said, _, verdict in table(read(Path(*sys.argv[1:2] or [RESULTS])), *sys.argv[2:]):
        print(f"{chapter}  {text}\n    asked {target or 'nothing'}; {said}: {verdict}" + f"   [{source}]" * (source != "-"))
