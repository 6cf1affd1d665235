"""What is claimed, what a paper says of it, what arithmetic allows at the paper's sizes, and what was measured.

    python -m benchmarks.claims                             of benchmarks/results, which is committed
    python -m benchmarks.claims benchmarks/results/last     of the last `python -m benchmarks`; behind that a device,
                                                            as in the names of its files (cpu)

Each claim reads cells from the results of one benchmark. A row that has exercised nothing (no tokens restored, no chunks loaded,
no blocks rebuilt) is no cell. A claim holds if all its cells do. "not 3 % slower" fails where the median of the paired ratios exceeds
1.03 and their lower quartile exceeds 1. The arithmetic is that of tools/on_paper.py, so tools/report.py prints it.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import RESULTS, is_slower, ratio, spread
from benchmarks.outside import sustained
from benchmarks.planned import LINKS
from benchmarks.tables import grouped, median, number, rows

ABSENT = "not run"


class Cell(NamedTuple):
    label: str
    value: float
    samples: tuple[float, ...] = ()  # paired ratios, for "not ... slower"


class Claim(NamedTuple):
    chapter: str
    text: str  # what, and in which regime
    paper: str  # section or figure, and the number that is printed there
    asked: tuple[str, float]  # (">=", 1.4), or ("slower", 0.03): not so much slower
    benchmark: str
    cells: Callable[[list], list[Cell]]  # (what it has found) -> cells
    allowed: Callable | None = None  # (tools.on_paper) -> the numbers that arithmetic gives for the paper's hardware
    gpu: tuple[str, ...] = ()  # ways of tools.gpu_report: the first one's time over the second one's; of one, TBT of others


# 1. Reading each benchmark ----------------------------------------------------------------------------------

def cells(part: str, label: str, figure: Callable, exercised: Callable = lambda row: 1, **wanted) -> Callable:
    """Return what reads a cell of each row of a part that is as wanted (`model`, or any of its keys) and that has
    `exercised` what the mechanism moves. `figure`: (row) -> a number, or the spread of paired ratios. A row that lacks what
    is read, as one of older code does, is no cell."""
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
    """Return what reads the cells of all of them."""
    return lambda found: [cell for read in readers for cell in read(found)]


def against_transformers(chapter: str) -> Callable:
    return cells("lone", f"{{model}}, {chapter}", lambda row: row["times_as_fast"][chapter]["dynamic"]["tbt"], model="classroom")


def planned(over: str, chapter: str, least: int = 1024, **wanted) -> Callable:
    """TTFT of one chapter over that of another, behind at least so many tokens, where all that restore brought all back."""
    def restored(row: dict) -> int:
        return row["history_tokens"] >= least and min(row["restored"][way] for way in ("03", "04", "05"))
    return cells("ttft", f"{over}, {{model}} {{history_tokens}}, {{link}}", lambda row: row[f"over_{over}"][chapter], restored, **wanted)


def halves(over: str, chapter: str, **wanted) -> Callable:
    """The same of models whose states are half as large as K and V."""
    return planned(over, chapter, states_over_kv=0.5, **wanted)


def inverse(read: Callable) -> Callable:
    """Return what reads the same cells upside down."""
    return lambda found: [Cell(label, 1 / value, tuple(1 / sample for sample in samples)) for label, value, samples in read(found)]


def sessions(key: str, base: str, *systems: str) -> Callable:
    """Of each system, the ratios of all runs at the rates that it and `base` sustain."""
    def read(found: list) -> list[Cell]:
        every = rows(found, "sessions")
        diverged = {(row["system"], row["rate"]) for row in every if row["diverged"]}
        taken = {system: [sample for row in every if row["system"] == system and row["restored"] and key in row
                          and not {(system, row["rate"]), (base, row["rate"])} & diverged for sample in row[key]["samples"]]
                 for system in systems}  # fmt: skip
        return [cell(system, spread(samples)) for system, samples in taken.items() if samples]
    return read


def sustained_over(system: str, base: str) -> Callable:
    def read(found: list) -> list[Cell]:
        rates = sustained(rows(found, "sessions"))
        return [Cell(f"{system} over {base}", rates[system] / rates[base])] if {system, base} <= rates.keys() else []
    return read


def grid(figure: Callable, **wanted) -> Callable:
    return cells("grid", "{model} {history_tokens}, r {r:g}, share {share:g}", figure,
                 lambda row: min(row["loaded_chunks"], row["computed_chunks"]) * (median(row["ttft_ms"]["load"]) > row["hit_ms"]), **wanted)


def mix(key: str, **wanted) -> Callable:
    return cells("mix", "{model}, {at_once} at once", lambda row: row[key], lambda row: median(row["storage"]), **wanted)


def policies(policy: str) -> Callable:
    """Each policy over the one that also computes; of rows whose storage was about as slow as it says."""
    return cells("policies", f"{policy}, {{model}}, r {{r:g}}, guard {{guard}}", lambda row: row["both_ends_over"][policy],
                 lambda row: row["from_storage"]["both_ends"] * (0.75 < row["measured_r"] / row["r"] < 1.33))


def decode(figure: Callable, **wanted) -> Callable:
    def on_the_host(row: dict) -> int:
        plan = row["policies"]["hybrid"]["plan"]
        return plan["act_host"] + plan["act_device"] + plan["kv_host"]
    return cells("grid", "{model}, f {f:g}, {batch} x {context}", figure, on_the_host, **wanted)


def behind_in_decode(policy: str) -> Callable:
    """hybrid's seconds over those of another policy, in the same round."""
    over = decode(lambda row: row["policies"][policy]["over"])
    return lambda found: [Cell(f"{policy}, {label}", value, samples) for label, value, samples in inverse(over)(found)]


def whole(figure: Callable, *policies: str) -> Callable:
    return each(*(cells("whole", "{policy}, whole answers", figure, policy=policy) for policy in policies))


def step_of_table_iii(before: str, after: str) -> Callable:
    """One policy's throughput over that of another, in the same rounds."""
    def read(found: list) -> list[Cell]:
        each = [[row["policies"][name]["over"]["samples"] for name in (before, after)] for row in rows(found, "lengths")]
        return [cell(f"{after} over {before}", ratio(*samples)) for samples in each]
    return read


def from_disk(key: str) -> Callable:
    return cells("restored", "{system}", lambda row: row[key], lambda row: row.get("fetched") and row["restored"], place="dropped")


# 2. The claims ----------------------------------------------------------------------------------------------

LINK, EVEN, SLOW = LINKS
OPPONENTS = "kv-only", "act-only", "naive"
CLAIMS = [
    Claim("01, 02", "TBT of generate of `transformers` (eager, dynamic cache) over ours; classroom, 512 tokens before, one request", "-",
          (">=", 1.25), "baseline", each(against_transformers("01"), against_transformers("02"))),
    Claim("02, 03", "thirty questions at once about one document of 1,024 tokens compute it (02) or restore it (03) once: TTFT over that "
          "with the document on the device and that of one question; classroom", "-", ("<=", 1.1), "engine",
          cells("burst", "{model}, {chapter}", lambda row: row["ratio"], lambda row: row["bytes_restored"] or row["chapter"] == "02")),
    Claim("03", "TTFT of a host hit over computing; 1,024 and 1,984 tokens, default link, one request",
          "KV Cache CPU Offloading, benchmarks: 0.02 to 0.1, a copy over computing 4,096 tokens of a 70B; H100, 64 GB/s", ("<=", 0.5), "engine",
          cells("host", "{model} {history}", lambda row: row["over_computing"], lambda row: row["bytes_restored"]),
          lambda paper: [paper.copy_over_computing()], ("03", "02")),
    Claim("03", "ms of a host hit's TTFT above its bound, the longer of link and question and a layer of the other; the same hits", "-",
          ("<=", 10.0), "engine",
          cells("host", "{model} {history}", lambda row: row["ttft_over_bound_ms"], lambda row: row["bytes_restored"])),
    Claim("04", "TTFT of K and V over that of hidden states; 1,024 to 1,984 tokens, the link is the bottleneck, one request",
          "HCache, 3.2: 2, of the transfer; it prints no TTFT of states alone", (">=", 1.7), "planned", halves("03", "04", link=LINK)),
    Claim("04", "TBT of 1 and 16 behind 512 tokens while their states are saved in two stages: not 6 % above that of nothing kept",
          "HCache, 6.3.3 (figure 14): 1, behind 512 tokens; 7B and 13B, A100, SSD", ("slower", 0.06), "variants",
          cells("saving", "{model}, {running} running", lambda row: row["ways"]["two stages"]["tbt_over_nothing"],
                lambda row: row["ways"]["two stages"]["bytes_out"] * row["behind_tokens"])),
    Claim("05", "TTFT of K and V over that of the plan; 1,024 to 1,984 tokens, the link is the bottleneck, one request",
          "HCache, 6.2.2 (figure 11 d-f): 2.09 to 2.66, speed of restoring; A100s, one SSD for each", (">=", 1.6), "planned", halves("03", "05", link=LINK)),
    Claim("05", "the same over a link where projecting takes as long as the transfer",
          "HCache, 6.1.2 (figure 10): 1.62 to 1.93, TTFT behind 4K to 16K; A100s, 4 SSDs; even at 7B only",
          (">=", 1.15), "planned", halves("03", "05", link=EVEN), lambda paper: paper.ttft_gains("KV", [4096, 16384], 92), ("03", "05")),
    Claim("05", "TTFT of computing over that of the plan, the same link and lengths",
          "HCache, 6.1.2 (figure 10): 2.66 to 5.73, over DeepSpeed-MII; A100s, 4 SSDs", (">=", 2.66), "planned", halves("02", "05", link=EVEN),
          lambda paper: paper.ttft_gains("recomputing", [4096, 16384], 92), ("02", "05")),
    Claim("05", "the plan is not 3 % slower than K and V (03) or hidden states (04); 512 to 1,984 tokens, three links, and grouped queries, "
          "whose states are larger than K and V", "-", ("slower", 0.03), "planned",
          each(*(inverse(planned(over, "05", least=512)) for over in ("03", "04")))),
    Claim("05", "rounds a second over those of K and V; eight and sixteen histories at once, of 128 to 768 tokens, a link as fast as projecting",
          "HCache, 6.1.1 (figure 9): up to 1.11, requests a second of sessions; 7B and 30B, A100s", (">=", 1.11), "planned",
          cells("at_once", "{model}, {at_once}", lambda row: row["over_03"], lambda row: row["bytes"]["05"] * row["at_once"])),
    Claim("05", "sixteen sessions over HTTP, behind 800 tokens, at the rates that both sustain: p50 of TTFT over that of K and V",
          "HCache, 6.1.1 (figure 9 a-c): 0.53 to 0.79, over all rates; 7B to 30B, A100s, 4 SSDs", ("<=", 0.9), "outside",
          sessions("p50_over_03", "03", "05"), lambda paper: [1 / gain for gain in paper.ttft_gains("KV", [2500], 67)]),
    Claim("05", "the same sessions and rates: p90 of TTFT, not 3 % above that of K and V", "-", ("slower", 0.03), "outside",
          sessions("p90_over_03", "03", "05")),
    Claim("05", "the same sessions: rounds a second at which TTFT diverges, over those of K and V",
          "HCache, 6.1.1 (figure 9): up to 1.11, 7B and 30B; even at 13B, which memory limits; A100s", (">=", 1.0), "outside", sustained_over("05", "03")),
    Claim("03 to 05", "the same sessions, at the rates that both sustain: mean TBT, not 4 % above that of 02, which keeps all on the device",
          "HCache, 6.1.1 (figure 9 d-f): at most 1.04; A100s, 4 SSDs", ("slower", 0.04), "outside", sessions("tbt_over_02", "02", "03", "04", "05"), None, ("05",)),
    Claim("06", "TTFT of the better of computing and loading over that of both; 1,024 and 1,984 tokens, storage as fast as computing",
          "l c / (l + c) allows 2; Cake names no r", (">=", 1.4), "both_ends", grid(lambda row: row["better_over_both"], r=1, share=1.0)),
    Claim("06", "both is not 3 % slower than the better one; loading takes 0.25 to 4 times as long, shares of a step from 10 % on",
          "Cake, 5.3, appendix C: the fastest everywhere; 7B, 10 to 90 % of a GPU, 2 to 10 Gbit/s", ("slower", 0.03), "both_ends",
          grid(lambda row: row["over_better"]), None, ("06, r = 1, both", "06, r = 1, load")),
    Claim("07", "storage to host to device in one pipeline, under timeout and wait_complete: its bound over TTFT; 1,024 tokens, "
          "storage as fast as the link, one request", "-", (">=", 0.85), "tiered",
          cells("pipeline", "{model}, {policy}", lambda row: row["of_bound"], lambda row: row["storage"])),
    Claim("07", "throughput over the device alone, two at once, the same conversations", "HiCache's announcement: up to 6", (">=", 2.5), "tiered",
          mix("throughput", at_once=2)),
    Claim("07", "`both_ends` is not 3 % slower than computing or another policy; 1,024 tokens, storage as fast as computing, and half as fast "
          "behind the guard", "-", ("slower", 0.03), "tiered", each(*map(policies, ("computed", "best_effort", "wait_complete", "timeout")))),
    Claim("07", "no request is 3 % slower than computing, whatever tier has its prefix; 512 and 1,900 tokens, storage of 1 MB/s to 1 GB/s", "-",
          ("slower", 0.03), "tiered",
          cells("admission", "{history_tokens}, {way}", lambda row: row["over_computing"], lambda row: row["way"] != "computed")),
    Claim("08", "hybrid is not 3 % slower than K and V only, activations only, or no mini-batches; decode, and whole answers",
          "CAPTURE, V-B, figure 8: the fastest, 2.19 over FlexGen, 1.35 over activations only", ("slower", 0.03), "hybrid_blocks",
          each(*map(behind_in_decode, OPPONENTS[:2]), inverse(whole(lambda row: row["over"], *OPPONENTS))),
          lambda paper: paper.capture_mean(0) + paper.capture_mean(1), ("08, kv-only", "08, hybrid")),
    Claim("08", "hybrid's gain over K and V only and over activations only, of what its costs allow; whole answers, f = 1.25", "-", (">=", 0.93),
          "hybrid_blocks", whole(lambda row: median(row["over"]) / row["allowed"], *OPPONENTS[:2])),
    Claim("08", "share of the time in which hybrid's processor is busy, over that of K and V only; decode, f = 1.25",
          "CAPTURE, V-D, figure 10: 0.36 over 0.08 (32 at once) to 0.78 over 0.13 (128), FlexGen; it prints 7.39 on average; OPT-30B on a 4090", (">=", 2.0), "hybrid_blocks",
          decode(lambda row: row["policies"]["hybrid"]["busy"]["compute"] / row["policies"]["kv-only"]["busy"]["compute"], f=1.25)),
    Claim("08", "as many bytes of ACT as of KV blocks, over activations only; decode, contexts of all lengths, f = 1.25",
          "CAPTURE, V-E, table III: 1.26 to 1.39; prompts all of 1,920, prefill counted, OPT, 4090", (">=", 1.1), "hybrid_blocks",
          step_of_table_iii("act-only", "1:1"), lambda paper: [paper.capture_gains(name, 1920, [667])[1] for name in paper.OPT]),
    Claim("08", "Algorithm 1 and the paper's mini-batches over that", "CAPTURE, V-E, table III: 1.00 to 1.16", (">=", 1.0), "hybrid_blocks",
          step_of_table_iii("1:1", "paper"),
          lambda paper: [paper.capture_gains(name, 1920)[1] / paper.capture_gains(name, 1920, [667])[1] for name in paper.OPT]),
    Claim("09", "TTFT on two ranks over what a rank's link takes for half of the bytes; 1,024 tokens, K and V or states, a slow link",
          "HCache, section 5: each rank reads its share", ("<=", 1.25), "ranks",
          cells("ranks", "{model}, {keep}", lambda row: median(row["ttft_ms"]) / row["link_ms"], lambda row: row["bytes_over_link"], ranks=2)),
    Claim("04 to 07", "TTFT from this machine's own disk, page cache dropped, over computing; 1,024 tokens, one request",
          "HCache, 6.1.2 (figure 10): 0.17 to 0.38 of recomputing, behind 4K to 16K; A100s, 4 SSDs", ("<=", 0.8), "real_storage", from_disk("over_computing")),
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
    """`device`: as in the files' names. Ranks are measured on the CPU where there are fewer GPUs. `paper`: tools.on_paper."""
    def found(benchmark: str) -> list:
        file = results.get(f"{benchmark}-{device}") or results.get(f"{benchmark}-cpu" if benchmark == "ranks" else "", {})
        return file.get("found", [])
    return [[claim.chapter, claim.text, claim.paper, shown(claim.allowed(paper)) if paper and claim.allowed else "", wanted(claim.asked),
             said, on_gpu(results, claim.gpu), verdict]
            for claim in CLAIMS for said, verdict in [judged(claim, found(claim.benchmark))]]  # fmt: skip


def wanted(asked: tuple[str, float]) -> str:
    return f"not {asked[1]:.0%} slower" if asked[0] == "slower" else f"{asked[0]} {asked[1]:g}"


def shown(values: list[float]) -> str:
    """Their range."""
    return " to ".join(f"{value:.3g}" for value in sorted({min(values), max(values)}))


def judged(claim: Claim, found: list) -> tuple[str, str]:
    """-> what was measured, and the verdict."""
    if not (cells := claim.cells(found)):
        return "", "says nothing"
    measured = shown([cell.value for cell in cells]) + f" in {len(cells)} cells" * (len(cells) > 1)
    if not (missed := [cell for cell in cells if not holds(cell, claim.asked)]):
        return measured, "met"
    least = ", ".join(f"{cell.label}: {cell.value:.3g}" for cell in missed[:3])
    return measured, f"**missed** in {len(missed)} ({least}{', ...' * (len(missed) > 3)})"


def on_gpu(results: dict, ways: tuple[str, ...]) -> str:
    """In each file of a GPU: of a 7B, else of a model whose states are half of K and V, behind its longest history; what its
    arithmetic allows, where the rows say so. Of one way: TBT of eight while a history comes back, over that beside a short prompt."""
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
    """One way's time over another's, and what is allowed."""
    ratio, allowed = (number(median(one) / median(other)) if one and other else "" for one, other in (
        (over.get("ttft_ms") or over["answers_ms"], under.get("ttft_ms") or under["answers_ms"]),
        (over.get("allowed_ms"), under.get("allowed_ms"))))  # fmt: skip
    return ratio + f" of {allowed}" * bool(allowed)


if __name__ == "__main__":
    for chapter, text, source, _, target, said, _, verdict in table(read(Path(*sys.argv[1:2] or [RESULTS])), *sys.argv[2:]):
        print(f"{chapter}  {text}\n    asked {target or 'nothing'}; {said}: {verdict}" + f"   [{source}]" * (source != "-"))
