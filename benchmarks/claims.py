"""What is claimed, where it was published, what is asked of it here, and what was measured.

    python -m benchmarks.claims                             of benchmarks/results, which is committed
    python -m benchmarks.claims benchmarks/results/last     of the last `python -m benchmarks`

Each claim reads cells from the results of one benchmark: a ratio, with its spread where there is one, and what the row
has exercised (tokens restored, chunks loaded, blocks rebuilt). A cell that exercised nothing says nothing, and does not
count. A claim holds if all its cells do.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.both_ends import is_behind  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"


class Cell(NamedTuple):
    label: str
    value: float
    exercised: float = 1  # of whatever the mechanism moves; 0: the row says nothing
    behind: bool = False  # by the rule of `benchmarks.both_ends`


class Claim(NamedTuple):
    chapter: str
    text: str
    paper: str  # section or figure, and the number that is printed there
    asked: tuple[str, float]  # such as (">=", 1.4)
    benchmark: str
    cells: Callable[[list], Iterable[Cell]]  # (what it has found) -> cells


def median(figure) -> float:
    return float(figure["median"] if isinstance(figure, dict) else figure)


def rows(found: list, claim: str, *models: str) -> Iterable[tuple[str, dict]]:
    """-> (model, row) of this part, in these models or in all."""
    for each in found:
        if each["claim"] == claim and (not models or each["model"] in models):
            yield from ((each["model"], row) for row in each["rows"])


def last(cells: Iterable[Cell]) -> list[Cell]:
    """A cell that was measured again counts once, as it was then."""
    return list({cell.label: cell for cell in cells}.values())


# 1. Reading each benchmark ----------------------------------------------------------------------------------


def against_transformers(what: str, chapter: str) -> Callable:
    def read(cases: list) -> Iterable[Cell]:
        for case in cases:
            ratio = case["peers"]["dynamic"]["ours_over"][chapter][what]
            yield Cell(f"{case['model']} {case['dtype']}", median(ratio), case["new_tokens"])
    return read


def engine(part: str, key: str, **wanted) -> Callable:
    def read(found: dict) -> Iterable[Cell]:
        for name, each in found.items():
            for row in each if name.startswith(part) else ():
                if all(row.get(what) == value for what, value in wanted.items()):
                    label = f"{name.removeprefix(part).strip()} {row.get('history', '')}".strip()
                    yield Cell(label, median(row[key]), row.get("bytes_restored", 1))
    return read


def planned(chapter: str, link: str, least: int = 0) -> Callable:
    def read(found: list) -> Iterable[Cell]:
        for model, row in rows(found, "ttft"):
            if row["link"] == link and row["history_tokens"] >= least:
                restored = min(row["restored"].values())
                yield Cell(f"{model} {row['history_tokens']}", median(row["over_03"][chapter]), restored)
    return read


def grid(key: str, **wanted) -> Callable:
    def read(found: list) -> Iterable[Cell]:
        for model, row in rows(found, "grid"):
            if all(row[what] == value for what, value in wanted.items()):
                moved = min(row["loaded_chunks"], row["computed_chunks"])
                label = f"{model} {row['history_tokens']}, r {row['r']:g}, share {row['share']:g}"
                value = 1 / median(row[key]) if key == "better_over_both" and not wanted else median(row[key])
                yield Cell(label, value, moved, row["behind"])
    return read


def in_conversations(chapter: str) -> Callable:
    def read(found: list) -> Iterable[Cell]:
        for model, row in rows(found, "conversations"):
            over = row["of_03"][chapter]
            restored = row["systems"][chapter]["restored"]
            yield Cell(f"{model}, {row['what']}", median(over), restored, is_behind(over["samples"]))
    return read


def mix(key: str, *models: str) -> Callable:
    return lambda found: [
        Cell(f"{model}, {row['at_once']} at once", median(row[key]), median(row["storage"]))
        for model, row in rows(found, "mix", *models)
    ]


def policies(found: list) -> Iterable[Cell]:
    return last(
        Cell(f"{model}, r {row['r']:g}, guard {row['guard']}", 1 / min(map(median, row["over_both_ends"].values())),
             row["from_storage"]["both_ends"], bool(row["behind"]))
        for model, row in rows(found, "policies")
    )  # fmt: skip


def policy_gain(way: str, ratio: float) -> Callable:
    return lambda found: last(
        Cell(f"{model}, guard {row['guard']}", median(row["over_both_ends"][row["best"] if way == "best" else way]),
             row["from_storage"]["both_ends"])
        for model, row in rows(found, "policies") if row["r"] == ratio
    )  # fmt: skip


def admission(found: list) -> Iterable[Cell]:
    for _, row in rows(found, "admission"):
        if row["way"] != "computed":
            label = f"{row['history_tokens']}, {row['way']}"
            yield Cell(label, median(row["over_computing"]), 1, row["slower"])


def blocks(key: str, policy: str = "", f: float | None = None, context: int | None = None) -> Callable:
    def read(found: list) -> Iterable[Cell]:
        for model, row in rows(found, "grid"):
            if f in (None, row["f"]) and context in (None, row["context"]):
                plan = row["policies"]["hybrid"]["plan"]
                value = median(row[key]) if not policy else median(row["policies"][policy]["over"])
                if key == "of allowed":
                    value /= row["policies"][policy]["allowed"]
                label = f"{model}, f {row['f']:g}, {row['batch']} x {row['context']}"
                yield Cell(label, value, plan["act_host"] + plan["act_device"] + plan["kv_host"], bool(row["behind"]))
    return lambda found: last(read(found))


def table_iii(found: list) -> Iterable[Cell]:
    speeds = [(row["step"], median(row["tokens_per_second"])) for _, row in rows(found, "steps")]
    return [Cell(name, speed / before) for (_, before), (name, speed) in zip(speeds, speeds[1:])]


def ranks(keep: str) -> Callable:
    return lambda found: [
        Cell(f"{model}, {row['ranks']} ranks", row["share_of_one_rank"] * row["ranks"], row["bytes_over_link"])
        for model, row in rows(found, "ranks") if row["keep"] == keep and row["ranks"] > 1
    ]  # fmt: skip


# 2. The claims ----------------------------------------------------------------------------------------------

LINK, EVEN, SLOW = "the link is the bottleneck", "balanced", "computing is the bottleneck"
CLAIMS = [
    Claim("01", "tokens follow faster than from transformers' generate", "-", (">=", 1.4), "baseline",
          against_transformers("tbt", "01")),
    Claim("02", "so do a lone request's", "-", (">=", 1.4), "baseline", against_transformers("tbt", "02")),
    Claim("02", "16 requests at once, tokens a second over one after the other", "-", (">=", 3.0), "engine",
          engine("throughput", "ratio")),
    Claim("03", "a host hit's TTFT over its bound behind 1,984 tokens", "-", ("<=", 1.1), "engine",
          engine("host random:small", "ttft_over_bound", history=1984)),
    Claim("03", "thirty questions about one document restore it once: TTFT over a device hit's and one restoration", "-",
          ("<=", 1.05), "engine", engine("burst", "ratio", chapter="03")),
    Claim("04", "TTFT of K and V over that of hidden states where the link is the bottleneck",
          "HCache, figure 11 a-c: 1.33 to 1.81", (">=", 1.8), "planned", planned("04", LINK)),
    Claim("05", "TTFT of K and V over that of the plan, the link is the bottleneck", "HCache, 6.3.1: 1.45 to 2.66",
          (">=", 1.6), "planned", planned("05", LINK)),
    Claim("05", "the same where both take as long", "-", (">=", 1.1), "planned", planned("05", EVEN)),
    Claim("05", "the same where computing is the bottleneck", "-", (">=", 1.0), "planned", planned("05", SLOW)),
    Claim("05", "asked in turn, in conversations and of documents, no later than K and V: TTFT over that of 03",
          "HCache, figure 15: 0.6", ("behind", 0), "outside", in_conversations("05")),
    Claim("06", "TTFT of the better of computing and loading over that of both, r = 1", "Cake, 6.1: at most 2",
          (">=", 1.3), "both_ends", grid("better_over_both", r=1, share=1.0)),
    Claim("06", "both is in no cell behind the better one", "-", ("behind", 0), "both_ends", grid("better_over_both")),
    Claim("07", "conversations over three tiers: TTFT less than with the device alone, one at a time",
          "HiCache: up to 0.8", (">=", 0.78), "tiered",
          lambda found: [cell for cell in mix("lower", "random:small")(found) if ", 1 at" in cell.label]),
    Claim("07", "throughput over the device alone, four at once", "HiCache: up to 6", (">=", 2.7), "tiered",
          lambda found: [cell for cell in mix("throughput", "random:small")(found) if ", 4 at" in cell.label]),
    Claim("07", "of what the tiers' bounds allow", "-", (">=", 0.85), "tiered", mix("of_bound", "random:small")),
    Claim("07", "of what the tiers' bounds allow, where a question costs as much as its history", "-", (">=", 0.7),
          "tiered", mix("of_bound", "classroom")),
    Claim("07", "both_ends is behind no policy and not behind computing", "-", ("behind", 0), "tiered", policies),
    Claim("07", "the best other policy over both_ends, storage as fast as computing", "-", (">=", 1.5), "tiered",
          policy_gain("best", 1.0)),
    Claim("07", "computing over both_ends, storage half as fast", "-", (">=", 1.15), "tiered",
          policy_gain("computed", 2.0)),
    Claim("07", "no hit is slower than computing, from 1 MB/s on", "-", ("behind", 0), "tiered", admission),
    Claim("07", "ms to find 4,096 tokens among 100,000 pages", "-", ("<", 1.0), "tiered",
          lambda found: [Cell(f"{row['conversations']} conversations", median(row["match_ms"]), row["pages"])
                         for _, row in rows(found, "match")]),
    Claim("07", "write_back without a fault: pages written over dirty pages evicted", "-", ("=", 1.0), "tiered",
          lambda found: [Cell(row["policy"], row["pages_written"] / max(1, row["dirty_evicted"]), row["dirty_evicted"])
                         for _, row in rows(found, "writes")]),
    Claim("08", "throughput over the bound", "-", (">=", 0.9), "hybrid_blocks", blocks("of_bound")),
    Claim("08", "hybrid is behind no other policy", "-", ("behind", 0), "hybrid_blocks", blocks("of_bound")),
    Claim("08", "hybrid over K and V only, of what the costs allow, f = 1.25", "CAPTURE, figure 8: 2.19 over FlexGen",
          (">=", 0.93), "hybrid_blocks", blocks("of allowed", "kv-only", 1.25, 1024)),
    Claim("08", "hybrid over activations only, of what the costs allow, f = 1.25", "CAPTURE, figure 8: 1.35",
          (">=", 0.93), "hybrid_blocks", blocks("of allowed", "act-only", 1.25, 1024)),
    Claim("08", "each step of table III over the one before", "CAPTURE, table III", (">=", 1.0), "hybrid_blocks", table_iii),
    Claim("09", "bytes over a rank's link times ranks, over one rank's: hidden states", "HCache, section 5: 1", ("=", 1.0),
          "ranks", ranks("states")),
    Claim("09", "the same of K and V", "-", ("=", 1.0), "ranks", ranks("kv")),
]  # fmt: skip


# 3. The table -----------------------------------------------------------------------------------------------


def holds(cell: Cell, asked: tuple[str, float]) -> bool:
    word, least = asked
    if word == "behind":
        return not cell.behind
    return {">=": cell.value >= least, "<=": cell.value <= least, "<": cell.value < least,
            "=": abs(cell.value - least) < 5e-3}[word]  # fmt: skip


def judged(claim: Claim, results: dict) -> dict | None:
    """-> cells, how many hold, and which do not; None where nothing was measured."""
    file = results.get(f"{claim.benchmark}-cpu")
    if not file:
        return None
    cells = [cell for cell in claim.cells(file.get("found", file.get("cases"))) if cell.exercised]
    if not cells:
        return None
    missed = [cell for cell in cells if not holds(cell, claim.asked)]
    return dict(cells=cells, missed=missed, met=not missed)


def read(folder: Path = RESULTS) -> dict:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def table(results: dict) -> list[list[str]]:
    """Rows: chapter, claim, paper, asked, measured, verdict."""
    found = []
    for claim in CLAIMS:
        verdict = judged(claim, results)
        asked = "behind in none" if claim.asked[0] == "behind" else f"{claim.asked[0]} {claim.asked[1]:g}"
        if verdict is None:
            found.append([claim.chapter, claim.text, claim.paper, asked, "", "says nothing"])
            continue
        values = sorted(cell.value for cell in verdict["cells"])
        measured = f"{values[0]:.3g}" if len(values) == 1 else f"{values[0]:.3g} to {values[-1]:.3g} in {len(values)} cells"
        words = "met"
        if verdict["missed"]:
            least = ", ".join(f"{cell.label}: {cell.value:.3g}" for cell in verdict["missed"][:3])
            words = f"**missed** in {len(verdict['missed'])} ({least}{', ...' * (len(verdict['missed']) > 3)})"
        found.append([claim.chapter, claim.text, claim.paper, asked, measured, words])
    return found


if __name__ == "__main__":
    for chapter, text, paper, asked, measured, verdict in table(read(Path(sys.argv[1]) if sys.argv[1:] else RESULTS)):
        print(f"{chapter}  {text}\n    asked {asked}; {measured}: {verdict}" + f"   [{paper}]" * (paper != "-"))
