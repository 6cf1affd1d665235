"""What is claimed, what a paper says of it, what arithmetic allows at the paper's sizes, and what was measured.

    python -m benchmarks.claims                             of benchmarks/results, which is committed
    python -m benchmarks.claims benchmarks/results/last     of the last `python -m benchmarks`; behind that a device,
                                                            as in the names of its files (cpu)

Each claim reads cells from the results of one benchmark: ratios. A row that has exercised nothing (no tokens restored, no
chunks loaded, no blocks rebuilt) is no cell. A claim holds if all its cells do. A claim without a target only compares. The arithmetic is that of tools/on_paper.py,
so tools/report.py prints it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import RESULTS, is_slower
from benchmarks.planned import LINKS
from benchmarks.tables import grouped, median, number, rows

ABSENT = "not run"


class Cell(NamedTuple):
    label: str
    value: float
    behind: bool = False  # by the rule of `measure.is_slower`


class Claim(NamedTuple):
    chapter: str
    text: str
    paper: str  # section or figure, and the number that is printed there
    asked: tuple[str, float] | None  # such as (">=", 1.4)
    benchmark: str
    cells: Callable[[list], list[Cell]]  # (what it has found) -> cells
    allowed: Callable | None = None  # (tools.on_paper) -> the numbers that arithmetic gives for the paper's hardware
    gpu: tuple[str, ...] = ()  # ways of tools.gpu_report: the first one's time over the second one's; of one, TBT of others


# 1. Reading each benchmark ----------------------------------------------------------------------------------

def cells(part: str, label: str, value: Callable, exercised: Callable = lambda row: 1,
          behind: Callable = lambda row: row.get("behind"), **wanted) -> Callable:
    """What to read of each row of a part, if it is as wanted: `model`, or any of its keys. A cell that was measured
    again counts once, as it was then, if that row has `exercised` what the mechanism moves."""
    def read(found: list) -> list[Cell]:
        last = {label.format_map(row): row for row in rows(found, part, **wanted)}
        return [Cell(name, value(row), bool(behind(row))) for name, row in last.items() if exercised(row)]
    return read


def against_transformers(chapter: str) -> Callable:
    return cells("lone", "{model} {dtype}", lambda row: median(row["times_as_fast"][chapter]["dynamic"]["tbt"]))


def planned(chapter: str, label: str = "{model} {history_tokens}", grouped=False, **wanted) -> Callable:
    """TTFT of 03 over that of a chapter, in models whose states are half as large as K and V, or larger (`grouped`)."""
    def restored(row: dict) -> int:
        alike = len(set(row["restored"].values())) == 1 and (row.get("states_over_kv", 0.5) > 0.5) == grouped
        return alike and row["restored"]["03"]
    return cells("ttft", label, lambda row: median(row["over_03"][chapter]), restored,
                 lambda row: is_slower([1 / sample for sample in row["over_03"][chapter]["samples"]]), **wanted)


def beside(share: Callable) -> Callable:
    """TBT over that of 02, of which `share` of a row counts."""
    return cells("beside", "{model}, {system}", lambda row: median(row["over_02"]) * share(row),
                 lambda row: row["bytes_in"] * (row["system"] in ("03", "04", "05")), model="random:long")


def sessions(**wanted) -> Callable:
    """TTFT over 03's in the same later round."""
    return cells("sessions", "{model}, {of_saturation:g} of saturation", lambda row: median(row["over_03"]),
                 lambda row: row["restored"], lambda row: is_slower(row["over_03"]["samples"]), system="05", **wanted)


def grid(value: Callable, **wanted) -> Callable:
    return cells("grid", "{model} {history_tokens}, r {r:g}, share {share:g}", value,
                 lambda row: min(row["loaded_chunks"], row["computed_chunks"]) * (row["ttft_ms"]["load"] > row["hit_ms"]), **wanted)


def mix(key: str, **wanted) -> Callable:
    return cells("mix", "{model}, {at_once} at once", lambda row: median(row[key]), lambda row: median(row["storage"]), **wanted)


def policies(label: str, value: Callable, **wanted) -> Callable:
    return cells("policies", label, value, lambda row: row["from_storage"]["both_ends"] * (0.8 < row["measured_r"] / row["r"] < 1.25), **wanted)


def blocks(value: Callable, part: str = "grid", **wanted) -> Callable:
    def on_the_host(row: dict) -> int:
        plan = row["policies"]["hybrid"]["plan"]
        return plan["act_host"] + plan["act_device"] + plan["kv_host"]
    return cells(part, "{model}, f {f:g}, {batch} x {context}", value, on_the_host, **wanted)


def table_iii(found: list) -> list[Cell]:
    ways = [(name, row["policies"][name]) for row in rows(found, "lengths") for name in ("act-only", "1:1", "paper")]
    speeds = [(name, median(one["tokens_per_second"])) for name, one in ways]
    return [Cell(name, speed / before) for (_, before), (name, speed) in zip(speeds, speeds[1:])]


def against(way: str) -> Callable:
    """TTFT of both ends over that of one of them alone."""
    return grid(lambda row: median(row["ttft_ms"]["both"]) / median(row["ttft_ms"][way]))


def of_allowed(one: dict) -> float:
    return median(one["over"]) / one["allowed"]


def whole(policy: str, value: Callable) -> Callable:
    return cells("whole", "{policy}", value, policy=policy)


def ranks(keep: str) -> Callable:
    return cells("ranks", "{model}, {ranks} ranks", lambda row: row["share_of_one_rank"] * row["ranks"],
                 lambda row: row["ranks"] > 1 and row["share_of_one_rank"], keep=keep)


# 2. The claims ----------------------------------------------------------------------------------------------

LINK, EVEN, SLOW = LINKS
CLAIMS = [
    Claim("01", "tokens follow faster than from transformers' generate", "-", (">=", 1.4), "baseline",
          against_transformers("01")),
    Claim("02", "so do a lone request's", "-", (">=", 1.4), "baseline", against_transformers("02")),
    Claim("02", "16 requests at once, tokens a second over one after the other", "-", (">=", 3.0), "engine",
          cells("throughput", "{model}", lambda row: median(row["ratio"]))),
    Claim("03", "a host hit's TTFT over its bound", "-", ("<=", 1.1), "engine",
          cells("host", "{model} {history}", lambda row: median(row["ttft_over_bound"]), lambda row: row["bytes_restored"])),
    Claim("03", "a host hit's TTFT over that of computing, at each length",
          "KV Cache CPU Offloading, benchmarks: 0.02 to 0.1, a copy over computing 4,096 tokens of a 70B; H100, 64 GB/s", ("<=", 0.8), "engine",
          cells("host", "{model} {history}", lambda row: median(row["over_computing"]),
                lambda row: "over_computing" in row and row["bytes_restored"]),
          lambda paper: [paper.copy_over_computing()], ("03", "02")),
    Claim("03", "its restoration over the link's time", "-", ("<=", 1.05), "engine",
          cells("host", "{model} {history}", lambda row: median(row["restoration_over_bound"]),
                lambda row: row["bytes_restored"])),
    Claim("03", "thirty questions about one document restore it once: TTFT over a device hit's and one restoration", "-",
          ("<=", 1.05), "engine",
          cells("burst", "{model}", lambda row: median(row["ratio"]), lambda row: row["bytes_restored"], chapter="03")),
    Claim("04", "TTFT of K and V over that of hidden states where the link is the bottleneck",
          "HCache, 3.2: 2, of the transfer; it prints no TTFT of states alone", (">=", 1.8), "planned", planned("04", link=LINK)),
    Claim("05", "TTFT of K and V over that of the plan, the link is the bottleneck",
          "HCache, 6.2.2 (figure 11 d-f): 2.09 to 2.66, speed of restoring; A100s, one SSD for each", (">=", 1.6), "planned",
          planned("05", link=LINK)),
    Claim("05", "the same where both take as long", "HCache, 6.1.2 (figure 10): 1.62 to 1.93, TTFT behind 4K to 16K; A100s, 4 SSDs; even at 7B only",
          (">=", 1.1), "planned", planned("05", link=EVEN), lambda paper: paper.ttft_gains("KV", [4096, 16384], 92), ("03", "05")),
    Claim("05", "the same where computing is the bottleneck", "HCache, 6.2.1 (figure 11 a): 1.33, speed of restoring; 7B, A30, DRAM",
          (">=", 1.0), "planned", planned("05", link=SLOW)),
    Claim("05", "the same with grouped queries, whose states are larger than K and V: no later than these", "-", ("behind", 0),
          "planned", planned("05", "{model} {history_tokens}, {link}", grouped=True)),
    Claim("05", "TTFT of computing over that of the plan, both take as long",
          "HCache, 6.1.2 (figure 10): 2.66 to 5.73, over DeepSpeed-MII; A100s, 4 SSDs", (">=", 2.66), "planned",
          cells("ttft", "{model} {history_tokens}", lambda row: row["computed_ms"] / median(row["ttft_ms"]["05"]),
                lambda row: row["restored"]["05"] * (row["states_over_kv"] == 0.5), link=EVEN),
          lambda paper: paper.ttft_gains("recomputing", [4096, 16384], 92), ("02", "05")),
    Claim("05", "bytes of a token that come back as K and V over those by the plan, the link is the bottleneck",
          "HCache, table 3: 1.92 to 2.40, as stored", (">=", 1.92), "planned",
          cells("ttft", "{model} {history_tokens}", lambda row: row["bytes"]["03"] / row["bytes"]["05"],
                lambda row: "bytes" in row and row["states_over_kv"] == 0.5, link=LINK),
          lambda paper: paper.stored()),
    Claim("05", "rounds a second over those of K and V, eight histories at once, where one always waits",
          "HCache, 6.1.1 (figure 9): up to 1.11, requests a second of sessions; 7B and 30B, A100s", (">=", 1.11), "planned",
          cells("at_once", "{model}", lambda row: median(row["over_03"]), lambda row: row["bytes"]["05"])),
    Claim("05", "asked in turn, in conversations and of documents, no later than K and V: TTFT over that of 03",
          "HCache, 6.4 (figure 15): 0.60, and 0.87 by Zipf 2, of documents; 7B, A100, 4 SSDs", ("behind", 0), "outside",
          cells("conversations", "{model}, {what}", lambda row: median(row["of_03"]["05"]),
                lambda row: row["systems"]["05"]["restored"], lambda row: is_slower(row["of_03"]["05"]["samples"]))),
    Claim("05", "sessions at half of saturation, later rounds: TTFT over that of K and V",
          "HCache, 6.1.1 (figure 9 a-c): 0.53 to 0.79, over all rates; 7B to 30B, A100s, 4 SSDs", ("<=", 0.9), "outside", sessions(of_saturation=0.5),
          lambda paper: [1 / gain for gain in paper.ttft_gains("KV", [2500], 67)]),
    Claim("05", "the same at each load", "-", ("behind", 0), "outside", sessions()),
    Claim("04", "TBT of 1, 4 and 16 while their states are saved in two stages, over that of nothing kept",
          "HCache, 6.3.3 (figure 14): 1, behind 512 tokens; 7B and 13B, A100, SSD", ("<=", 1.06), "variants",
          cells("saving", "{model}, {running} running", lambda row: median(row["ways"]["two stages"]["tbt_over_nothing"]),
                lambda row: row["ways"]["two stages"]["bytes_out"])),
    Claim("03 to 05", "TBT of eight that decode while a history comes back every two seconds, over that of 02",
          "HCache, 6.1.1 (figure 9 d-f): at most 1.04, sessions; A100s, 4 SSDs", ("<=", 1.04), "outside", beside(lambda row: 1), None, ("05",)),
    Claim("03 to 05", "the same over what two cores allow, which project meanwhile: 1 / (1 - that share of the time)", "-",
          ("<=", 1.04), "outside", beside(lambda row: 1 - row.get("projecting", 0))),
    Claim("06", "TTFT of the better of computing and loading over that of both, r = 1", "l c / (l + c) allows 2; Cake names no r",
          (">=", 1.3), "both_ends", grid(lambda row: median(row["better_over_both"]), r=1, share=1.0)),
    Claim("06", "TTFT of both over that of computing alone",
          "Cake, 1, 5.3 (figure 6): 0.63 in the mean, 0.32 to 0.95 at 14K; 7B, 10 to 90 % of a GPU, 2 to 10 Gbit/s", None, "both_ends",
          against("compute"), lambda paper: paper.both_over(0), ("06, r = 1, both", "06, r = 1, compute")),
    Claim("06", "TTFT of both over that of loading alone",
          "Cake, 1, 5.2, 5.3 (figure 6): 0.39 in the mean, 0.06 to 0.73 at 14K, 0.05 on an H100 at 32K", None, "both_ends",
          against("load"), lambda paper: paper.both_over(1), ("06, r = 1, both", "06, r = 1, load")),
    Claim("06", "both is in no cell behind the better one", "Cake, 5.3, appendix C: the fastest everywhere; 7B, 10 to 90 % of a GPU, 2 to 10 Gbit/s",
          ("behind", 0), "both_ends", grid(lambda row: 1 / median(row["better_over_both"]))),
    Claim("06", "TTFT of both over what loading and computing, as measured alone, allow", "-", ("<=", 1.15), "both_ends",
          grid(lambda row: median(row["over_bound"]))),
    Claim("07", "conversations over three tiers: TTFT less than with the device alone, one at a time",
          "HiCache's announcement: up to 0.8", (">=", 0.78), "tiered", mix("lower", at_once=1)),
    Claim("07", "throughput over the device alone, two at once", "HiCache's announcement: up to 6", (">=", 2.7), "tiered",
          mix("throughput", at_once=2)),
    Claim("07", "of what the tiers' bounds allow", "-", (">=", 0.85), "tiered", mix("of_bound")),
    Claim("07", "both_ends is behind no policy and not behind computing", "-", ("behind", 0), "tiered",
          policies("{model}, r {r:g}, guard {guard}", lambda row: 1 / median(row["over_both_ends"][row["best"]]))),
    Claim("07", "the best other policy over both_ends, storage as fast as computing", "-", (">=", 1.5), "tiered",
          policies("{model}, guard {guard}", lambda row: median(row["over_both_ends"][row["best"]]), r=1.0)),
    Claim("07", "computing over both_ends, storage half as fast", "-", (">=", 1.15), "tiered",
          policies("{model}, guard {guard}", lambda row: median(row["over_both_ends"]["computed"]), r=2.0)),
    Claim("07", "no hit is slower than computing, from 1 MB/s on", "-", ("behind", 0), "tiered",
          cells("admission", "{history_tokens}, {way}", lambda row: median(row["over_computing"]),
                lambda row: row["way"] != "computed", lambda row: row["slower"])),
    Claim("07", "ms to find 4,096 tokens among 100,000 pages", "-", ("<", 1.0), "tiered",
          cells("match", "{conversations} conversations", lambda row: median(row["match_ms"]))),
    Claim("07", "write_back without a fault: pages written over dirty pages evicted", "-", ("=", 1.0), "tiered",
          cells("writes", "{policy}", lambda row: row["pages_written"] / row["dirty_evicted"],
                lambda row: row["dirty_evicted"])),
    Claim("07", "copying by kernels, over the copy engine", "HiCache, design: up to 3, over `cudaMemcpyAsync`", None, "tiered",
          lambda found: [], None, ("07, direct", "07, kernel")),
    Claim("08", "prefill and decode, f = 1.25: hybrid's throughput over K and V only",
          "CAPTURE, V-B, figure 8: 2.19 over FlexGen's own code, OPT of 6.7B to 66B on a 4090", None, "hybrid_blocks",
          whole("kv-only", lambda row: median(row["over"])), lambda paper: paper.capture_mean(0), ("08, kv-only", "08, hybrid")),
    Claim("08", "prefill and decode, f = 1.25: hybrid's throughput over activations only", "CAPTURE, I, V-B, figure 8: 1.35 in geometric mean (V-B also: 1.61)", None, "hybrid_blocks",
          whole("act-only", lambda row: median(row["over"])), lambda paper: paper.capture_mean(1), ("08, act-only", "08, hybrid")),
    Claim("08", "throughput over K and V only, of what the costs allow", "-", (">=", 0.93), "hybrid_blocks", whole("kv-only", of_allowed)),
    Claim("08", "throughput over activations only, of what the costs allow", "-", (">=", 0.93), "hybrid_blocks", whole("act-only", of_allowed)),
    Claim("08", "prefill and decode: hybrid is behind no other policy", "-", ("behind", 0), "hybrid_blocks",
          cells("whole", "{policy}", lambda row: 1 / median(row["over"]))),
    Claim("08", "decode alone: hybrid is behind no other policy", "-", ("behind", 0), "hybrid_blocks",
          blocks(lambda row: 1 / min(median(each["over"]) for name, each in row["policies"].items() if name != "hybrid"))),
    Claim("08", "decode alone: throughput over the bound", "-", (">=", 0.9), "hybrid_blocks",
          blocks(lambda row: median(row["of_bound"]))),
    Claim("08", "decode alone, f = 1.25, the longest context: bytes of it from the host with K and V only, over hybrid's",
          "CAPTURE, V-C, figure 9: up to 1.27 (32 at once), 1.38 (64), FlexGen, OPT-30B on a 4090", (">=", 1.27), "hybrid_blocks",
          blocks(lambda row: row["policies"]["kv-only"]["traffic"], f=1.25, context=384),
          lambda paper: [paper.capture_traffic("30B", requests) for requests in (32, 64)]),
    Claim("08", "decode alone, f = 1.25: share of the time in which hybrid's processor is busy",
          "CAPTURE, V-D, figure 10: 0.36 (32 at once) to 0.78 (128), of what phase is not said; OPT-30B on a 4090", (">=", 0.78), "hybrid_blocks",
          blocks(lambda row: row["policies"]["hybrid"]["busy"]["compute"], f=1.25)),
    Claim("08", "decode alone, contexts of all lengths: 1:1 over activations only; Algorithm 1 and mini-batches over 1:1",
          "CAPTURE, V-E, table III: 1.26 to 1.39; 1.00 to 1.16; prompts all of 1,920, prefill counted, OPT, 4090", (">=", 1.0), "hybrid_blocks", table_iii),
    Claim("09", "bytes over a rank's link times ranks, over one rank's: hidden states", "HCache, section 5: 1", ("=", 1.0),
          "ranks", ranks("states")),
    Claim("09", "the same of K and V", "-", ("=", 1.0), "ranks", ranks("kv")),
]  # fmt: skip


# 3. The table -----------------------------------------------------------------------------------------------

HEADER = ["chapter", "claim", "paper", "by arithmetic", "asked", "measured", "on a GPU", "verdict"]


def holds(cell: Cell, asked: tuple[str, float]) -> bool:
    word, least = asked
    if word == "behind":
        return not cell.behind
    return {">=": cell.value >= least, "<=": cell.value <= least, "<": cell.value < least,
            "=": abs(cell.value - least) < 5e-3}[word]  # fmt: skip


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


def wanted(asked: tuple[str, float] | None) -> str:
    return "" if asked is None else "behind in none" if asked[0] == "behind" else f"{asked[0]} {asked[1]:g}"


def shown(values: list[float]) -> str:
    """Their range."""
    return " to ".join(f"{value:.3g}" for value in sorted({min(values), max(values)}))


def judged(claim: Claim, found: list) -> tuple[str, str]:
    """-> what was measured, and the verdict."""
    if not (cells := claim.cells(found)):
        return "", "says nothing"
    measured = shown([cell.value for cell in cells]) + f" in {len(cells)} cells" * (len(cells) > 1)
    if claim.asked is None:
        return measured, "no target"
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
