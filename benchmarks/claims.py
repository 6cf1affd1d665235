"""What is claimed of each chapter, beside what the papers report and what `python -m benchmarks` has measured.

    python -m benchmarks.claims                         of benchmarks/results/cpu.json
    python -m benchmarks.claims benchmarks/results/nvidia-h200.json

A claim is measured by one or several parts of the results, which are named KIND-MODEL (`offload-restore-small`), and is read as
numbers from what those parts have found: of every history, cell or batch one. It is met if all numbers keep to what is asked, or,
where that is what is claimed, if the best of them does. Nothing here measures, and PyTorch is not imported.
"""
import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
SMALL, CLASSROOM, LARGE, GQA = "small", "classroom", "tinyllama-mha", "tinyllama"
MISSED, UNKNOWN, MET = "missed", "not measured", "met"                  # in the order in which the table shows them


class Cell(NamedTuple):
    figure: dict | float                # a spread, or a number; True or False where nothing but that was asked
    share: float | None = None          # of what the machine allows
    note: str = ""                      # under which conditions, where they are not those that the claim names


class Claim(NamedTuple):
    kind: str                           # of the parts that measure it
    models: tuple[str, ...]             # on which, when nothing else is asked for
    chapter: str
    text: str
    paper: str
    asked: tuple[str, float]            # such as (">=", 1.4); ("is", 1): the cells say it themselves
    cells: Callable[[dict, dict], Iterable[Cell]]           # (what a part has found, limits) -> cells; none: it does not apply
    unit: str = "x"
    noun: str = "rows"
    best: bool = False                  # asked of the best cell only
    others: bool = True                 # asked of other models, too, when those are measured instead
    real: bool = False                  # of a link that is not modelled; nothing is said where there is none


HOLDS = {">=": float.__ge__, "<=": float.__le__, "<": float.__lt__, ">": float.__gt__, "is": float.__eq__}
WORDS = {">=": "at least", "<=": "at most", "<": "under", ">": "over"}


# 1. Reading what was found ---------------------------------------------------------------------------------------

def median(figure: dict | float) -> float:
    return float(figure["median"] if isinstance(figure, dict) else figure)


def entry(found: dict) -> dict:
    """What a part of one claim on one model has found."""
    return found["found"][0]


def near(rows: list[dict], tokens: int = 2048) -> list[tuple[dict, str]]:
    """The rows of this history, or of the longest that is shorter, or of the shortest; and which it is, if it is another."""
    lengths = {row["history_tokens"] for row in rows}
    best = max((length for length in lengths if length <= tokens), default=min(lengths, default=tokens))
    return [(row, "" if best == tokens else f"{best:,} tokens") for row in rows if row["history_tokens"] == best]


def share(over: dict) -> float | None:
    """Of a bound that took so many times as long; None where nothing was to be restored."""
    return min(1.0, 1 / median(over)) if median(over) else None


def over_bound(figure: dict) -> Cell:
    return Cell(figure, share(figure))


def case(what: str, chapter: str = "01") -> Callable:
    """A ratio of `transformers`' time to ours."""
    def read(found, limits):
        for case in found["cases"]:
            figures = case if chapter == "01" else case.get("paged")
            if figures:
                ratio = figures[f"{what}_ratio"]
                yield Cell(ratio if chapter == "01" else ratio["dynamic"],
                           figures.get("share_of_bandwidth" if what == "tbt" else "share_of_matrix_rate"))
    return read


def within(figure: dict) -> bool:
    """Not slower beyond what the rounds themselves differ by."""
    return figure["max"] >= 1


def grows_less(powers: dict, restoring: str, computing: str) -> Iterable[Cell]:
    """The exponents of a restoration are at most 1.05, and that of computing again is above them, and above 1."""
    if powers:
        power, other = ([found] if isinstance(found, float) else list(found.values())
                        for found in (powers[restoring], powers[computing]))
        yield Cell(max(power) <= 1.05 and min(other) > max(1.0, *power), None,
                   f"power {max(power):.2f}, computing again {min(other):.2f}")


def admission(found: dict, limits: dict) -> Iterable[Cell]:
    for row in entry(found)["rows"]:
        if row["way"] != "computed":
            yield Cell(row["ratio"]["min"] <= 1)


def tiers(name: str) -> Callable:
    """Of the default link."""
    def read(found, limits):
        for row in entry(found)["rows"]:
            if row["platform"] == "a100":
                yield Cell(row[name], min(1.0, median(row["of_bound"])))
    return read


def blocks(read: Callable) -> Callable:
    """Of chapter 08's cells."""
    def cells(found, limits):
        for grid in found["grids"]:
            for cell in grid["cells"]:
                yield Cell(read(cell), share(cell["measured_over_bound"]))
    return cells


def grown(figures: Iterable[dict]) -> float:
    """How much the last of several medians is over the first."""
    first, *_, last = figures
    return median(last) / median(first)


def all_methods(found: dict, limits: dict) -> Iterable[Cell]:
    for row in found["rows"]:
        if row["over_bound"] and "(01)" not in row["method"]:   # computing again is the yardstick, no restoration
            yield over_bound(row["over_bound"])


def sooner_than_computing(found: dict, limits: dict) -> Iterable[Cell]:
    for row in found["rows"]:
        if "(01)" not in row["method"]:
            yield Cell(row["ttft_gain_over_recompute"], share(row["over_bound"]) if row["over_bound"] else None)


def best_against_peer(what: str, quantile: str | None = "p50", least: bool = True) -> Callable:
    """The best chapter against the best peer: the quotient that is over 1 where the chapter is better."""
    def read(found, limits):
        for systems in [each["systems"] for each in found.get("skews", [found])]:
            def figure(system):
                return median(system[what] if quantile is None else system[what][quantile])
            ours, peers = ([system for system in systems if system["kind"] == kind and system.get(what)]
                           for kind in ("ours", "peer"))
            if ours and peers:
                ours, peer = ((min if least else max)(among, key=figure) for among in (ours, peers))
                limit = (ours.get("limit") or {}).get({"ttft_ms": "ttft_share", "tbt_ms": "tbt_share"}.get(what))
                yield Cell(figure(peer) / figure(ours) if least else figure(ours) / figure(peer), limit,
                           f"{ours['system']} against {peer['system']}" + ", one round" * (found.get("rounds") == 1))
    return read


def same_tokens(found: dict, limits: dict) -> Iterable[Cell]:
    if found.get("dtype", "float32") == "float32":
        for systems in [each["systems"] for each in found.get("skews", [found])]:
            for system in systems:
                if system.get("equal_tokens"):
                    same, of = map(int, system["equal_tokens"].split(" of "))
                    yield Cell(same == of)


# 2. The claims ---------------------------------------------------------------------------------------------------

FLOAT32 = ("classroom-float32", "tinyllama-float32")
CASES = (*FLOAT32, "tinyllama-bfloat16")
GRIDS = ("small-a100", "small-4090", "tinyllama-mha-a100")

CLAIMS = [
    # Chapter 01
    Claim("baseline", ("classroom-float32",), "01", "tokens of one answer come faster than from transformers' generate", "-",
          (">=", 1.5), case("tbt"), others=False),
    Claim("baseline", CASES[1:], "01", "tokens of one answer come faster than from transformers' generate", "-",
          (">=", 1.4), case("tbt"), noun="models"),
    Claim("baseline", CASES, "01", "the first token after a prompt of 512 comes no later than transformers'", "-", (">=", 1.0),
          case("ttft"), noun="models"),
    Claim("baseline", FLOAT32, "01", "the tokens are those of transformers", "-", ("is", 1), lambda found, limits: [
        Cell(case["equal_tokens"] == case["new_tokens"]) for case in found["cases"] if case["dtype"] == "float32"],
        noun="models"),
    Claim("baseline", ("classroom-float32",), "all", "import and load before a demo, warm", "-", ("<", 4.0),
          lambda found, limits: [Cell(case["start_seconds"]) for case in found["cases"] if "start_seconds" in case], " s",
          others=False),
    # Chapter 02
    Claim("baseline", ("classroom-float32",), "02", "a lone request's tokens come faster than from transformers' generate", "-",
          (">=", 1.5), case("tbt", "02"), others=False),
    Claim("baseline", CASES[1:], "02", "a lone request's tokens come faster than from transformers' generate", "-",
          (">=", 1.4), case("tbt", "02"), noun="models"),
    Claim("baseline", CASES, "02", "a lone request's first token comes no later than transformers'", "-", (">=", 1.0),
          case("ttft", "02"), noun="models"),
    # Chapter 07
    Claim("tiered-mix", (SMALL,), "07", "conversations go on from three tiers: first token sooner than without, by",
          "up to 80 %", (">=", 0.75), tiers("lower"), "%"),
    Claim("tiered-mix", (SMALL,), "07", "conversations go on from three tiers: throughput against none", "up to 6x", (">=", 3.0),
          tiers("throughput")),
    Claim("tiered-mix", (SMALL, CLASSROOM), "07", "of what the tiers' bounds allow", "-", (">=", 0.9), tiers("of_bound"), "",
          noun="models"),
    Claim("tiered-admission", (CLASSROOM,), "07", "a hit from any tier is never slower than computing (within the spread), also "
          "from 1 MB/s", "-", ("is", 1), admission),
    Claim("tiered-match", ("",), "07", "finding 4,096 tokens in a tree of 100,000 pages takes", "-", ("<", 1.0),
          lambda found, limits: [Cell(row["match_ms"]) for row in entry(found)["rows"]], " ms"),
    Claim("tiered-match", ("",), "07", "with 100 times the conversations that takes, times as long", "-", ("<=", 1.5),
          lambda found, limits: [Cell(grown(row["match_ms"] for row in entry(found)["rows"]))]),
    Claim("tiered-layouts", (SMALL, CLASSROOM), "07", "page_first to storage, of the time of layer_first", "-", ("<", 1.0),
          lambda found, limits: [Cell(row["write_over_layer_first"], None, f"{row['storage_copies']} piece a page")
                                 for row in entry(found)["rows"] if row["layout"] == "page_first"], noun="models"),
    # Chapter 08
    Claim("hybrid_blocks", GRIDS, "08", "throughput, of what the bound allows, every cell of those measured", "-", (">=", 0.9),
          blocks(lambda cell: 1 / median(cell["measured_over_bound"])), "%", noun="cells"),
    Claim("hybrid_blocks", GRIDS, "08", "a decode step over the bound, every cell of those measured", "-", ("<=", 1.12),
          blocks(lambda cell: cell["measured_over_bound"]), noun="cells"),
    Claim("hybrid_blocks", GRIDS, "08", "throughput over keeping K and V only, in the best cell",
          "2.19x, against FlexGen's code", (">=", 1.5), blocks(lambda cell: cell["gain"]["kv-only"]), noun="cells", best=True),
    Claim("hybrid_blocks", GRIDS, "08", "throughput over keeping activations only, in the best cell", "1.35x (for 30B 1.61x)",
          (">=", 1.3), blocks(lambda cell: cell["gain"]["act-only"]), noun="cells", best=True),
    Claim("hybrid_blocks", GRIDS[2:], "08", "throughput over as much of one as of the other, in the best cell",
          "1.16x (30B)", (">=", 1.1), blocks(lambda cell: cell["gain"]["static"]), noun="cells", best=True),
    Claim("hybrid_blocks", GRIDS, "08", "never slower than any single policy (within the spread)", "-", ("is", 1),
          blocks(lambda cell: all(within(cell["gain"][policy]) for policy in ("kv-only", "act-only", "static"))), noun="cells"),
    Claim("hybrid_blocks", GRIDS, "08", "link and processor are both busy, of a step", "35.6 to 78.2 % of the GPU", (">=", 0.85),
          blocks(lambda cell: min(cell["policies"]["hybrid"][f"{lane}_busy"] for lane in ("link", "compute"))), "%",
          noun="cells"),
    # All chapters
    Claim("restoration", (CLASSROOM, SMALL), "all", "one model, one link: restoration over each method's bound", "-",
          ("<=", 1.10), all_methods),
    Claim("restoration", (CLASSROOM, SMALL), "all", "one model, one link: every method's first token comes sooner than computed "
          "again", "-", (">", 1.0), sooner_than_computing),
    Claim("restoration", (CLASSROOM, SMALL), "all", "one model, one link: all methods give the same tokens", "-", ("is", 1),
          lambda found, limits: [Cell(found["equal_tokens"])] if found["dtype"] == "float32" else [], noun="models"),
    Claim("matrix-conversations", (CLASSROOM,), "all", "50 conversations: the best chapter's first tokens (p50) come sooner than "
          "the best peer's", "-", (">=", 1.0), best_against_peer("ttft_ms")),
    Claim("matrix-conversations", (CLASSROOM,), "all", "50 conversations: the best chapter's tokens (p50) follow faster than the "
          "best peer's", "-", (">=", 1.0), best_against_peer("tbt_ms")),
    Claim("matrix-conversations", (CLASSROOM,), "all", "50 conversations: throughput of the best chapter over the best peer's",
          "-", (">=", 1.0), best_against_peer("tokens_per_second", None, False)),
    Claim("matrix-conversations", (CLASSROOM,), "all", "50 conversations: every system's tokens equal chapter 01's", "-",
          ("is", 1), same_tokens, noun="systems"),
    Claim("matrix-documents", (CLASSROOM,), "all", "documents: the best chapter's first tokens (p50) come sooner than the best "
          "peer's, every skewness", "-", (">=", 1.0), best_against_peer("ttft_ms"), noun="workloads"),
]


# 3. The table ----------------------------------------------------------------------------------------------------

def number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
    return (f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}") + unit


def target(value: float, unit: str) -> str:
    return f"{value * 100:g}%" if unit == "%" else f"{value:g}{unit}"


def spread(figure: dict | float, unit: str) -> str:
    """The median, and in brackets the smallest and the largest sample."""
    if not isinstance(figure, dict) or len(figure.get("samples", ())) < 2:
        return number(median(figure), unit)
    low, high = (number(figure[end], "%" if unit == "%" else "") for end in ("min", "max"))
    few = f", {len(figure['samples'])} rounds" if len(figure["samples"]) < 5 else ""
    return f"{number(figure['median'], unit)} ({low} to {high}{few})"


def read(claim: Claim, founds: list[dict], limits: dict) -> dict | None:
    """-> ours, verdict and limit; None if nothing of what was found is what is claimed."""
    cells = [cell for found in founds for cell in claim.cells(found, limits)]
    if not cells:
        return None
    sign, asked = claim.asked
    held = [HOLDS[sign](median(cell.figure), float(asked)) for cell in cells]
    medians = [median(cell.figure) for cell in cells]
    notes = list(dict.fromkeys(cell.note for cell in cells if cell.note))
    shown = cells
    if claim.best:
        shown = [max(cells, key=lambda cell: median(cell.figure))]
        notes = [shown[0].note] * bool(shown[0].note)
        ours = spread(shown[0].figure, claim.unit) + (f" in the best of {len(cells)} {claim.noun}" if len(cells) > 1 else "")
    elif sign == "is":
        ours = f"{sum(held)} of {len(cells)} {claim.noun}" if len(cells) > 1 else "yes" if held[0] else "no"
    elif len(cells) == 1:
        ours = spread(cells[0].figure, claim.unit)
    else:
        low, high = (number(end, claim.unit) for end in (min(medians), max(medians)))
        ours = f"{sum(held)} of {len(cells)} {claim.noun}; {low} to {high}"
    shares = [cell.share for cell in shown if cell.share is not None]
    limit = "-" if not shares else f"{min(shares):.0%}" if f"{min(shares):.0%}" == f"{max(shares):.0%}" else \
        f"{min(shares):.0%} to {max(shares):.0%}"
    met = any(held) if claim.best else all(held)
    return dict(ours=ours + (f" ({'; '.join(notes)})" if notes else ""), verdict=MET if met else MISSED, limit=limit)


def wanted(claim: Claim, results: dict) -> list[str]:
    """The models on which a claim is to be measured: its own; or, where a run was told other models, those that it has."""
    if not results.get("models") and not claim.real:
        return list(claim.models)
    measured = [name.removeprefix(claim.kind).removeprefix("-") for name in results["parts"]
                if name == claim.kind or name.startswith(f"{claim.kind}-")]
    owned = {model for other in CLAIMS if (other.kind, other.chapter, other.text) == (claim.kind, claim.chapter, claim.text)
             and other is not claim for model in other.models}
    return [model for model in measured if model in claim.models or claim.others and model not in owned]


def rows(results: dict) -> list[dict]:
    """-> for each claim: claim, chapter, paper, ours, asked, verdict (met, missed or not measured), limit (the share of it that
    was reached), command (which measures this row alone) and part (the parts it is read from)."""
    table, parts = [], results["parts"]
    limits = (parts.get("limits") or {}).get("found") or {}
    for claim in CLAIMS:
        models = wanted(claim, results)
        names = [f"{claim.kind}-{model}" if model else claim.kind for model in models]
        there = [name for name in names if parts.get(name, {}).get("found")]
        found = read(claim, [parts[name]["found"] for name in there], limits)
        if not names or found is None and there and (results.get("models") or claim.real):
            continue                                            # it does not apply to what was measured
        failed = [name for name in names if parts.get(name, {}).get("error")]
        used = there or names
        sign, asked = claim.asked
        dtypes = {name: (parts.get(name, {}).get("found") or {}).get("dtype", "float32") for name in used}
        on = ", ".join(model + f" in {dtypes[name]}" * (dtypes[name] != "float32")
                       for model, name in zip(models, names) if name in used and model)
        row = dict(claim=claim.text + (f" [{on}]" if on else ""), chapter=claim.chapter, paper=claim.paper,
                   asked=f"{WORDS[sign]} {target(asked, claim.unit)}" if sign in WORDS else "yes",
                   **(found or dict(ours="-", verdict=UNKNOWN, limit="-")))
        if found and failed:
            row["ours"] += f"; failed: {', '.join(failed)}"
        own = [parts[name]["command"] for name in used if name in parts]
        if len(used) == len(own) == 1:
            row["command"] = own[0]
        elif own and results.get("models"):                     # whose parts --only does not know
            row["command"] = " && ".join(own)
        else:
            quick = "--quick " * bool(own and results.get("quick"))
            row["command"] = f"python -m benchmarks {quick}" + " ".join(f"--only {name}" for name in used)
        table.append(dict(row, part=", ".join(used)))
    return table


def losses(results: dict) -> list[str]:
    """Where a peer was faster than one of the chapters, in the matrix."""
    lines = []
    for name, part in results["parts"].items():
        found = part.get("found") or {}
        for each in found.get("skews", [found]):
            on = name + (f", Zipf {each['zipf']:g}" if "zipf" in each else "")
            lines += [f"A peer is faster ({on}): {lost['measure']} of {lost['system']}, {lost['ms']:.1f} ms, against "
                      f"{lost['peer_ms']:.1f} ms of {lost['peer']}." for lost in each.get("peer_faster", ())]
    return lines


def table(rows: list[dict], width: int = 150) -> str:
    """The rows as text, what was missed first; and under them the command of each."""
    order = [(index, row) for verdict in (MISSED, UNKNOWN, MET) for index, row in enumerate(rows, 1) if row["verdict"] == verdict]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (MET, MISSED, UNKNOWN)}
    names = ["", "claim", "paper", "asked", "ours", "of the limit"]
    widths = [4, width - 4 - 20 - 15 - 40 - 12 - 10, 20, 15, 40, 12]
    lines, titles = [], {MISSED: "Missed, where less was reached than is claimed:", UNKNOWN: "Not measured:", MET: "Met:"}

    def line(cells: list[str]):
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, widths)]
        for number in range(max(map(len, wrapped))):
            lines.append("  ".join((cell[number] if number < len(cell) else "").ljust(size)
                                   for cell, size in zip(wrapped, widths)).rstrip())
    for verdict, title in titles.items():
        if counts[verdict]:
            lines += ["", title]
            line(names)
            for index, row in order:
                if row["verdict"] == verdict:
                    line([str(index), f"{row['chapter']}: {row['claim']}", row["paper"], row["asked"], row["ours"], row["limit"]])
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f", of {len(rows)} claims.", "",
              "The commands that measure a row alone:"]
    by_command: dict[str, list[int]] = {}
    for index, row in enumerate(rows, 1):
        by_command.setdefault(row["command"], []).append(index)
    for command, indices in by_command.items():
        lines.append(f"  {', '.join(map(str, indices)):>14}  {command}")
    return "\n".join(lines).lstrip("\n")


def read_results(doc: str) -> tuple[Path, dict]:
    """The file that the command line names, and the results in it. Raises SystemExit with a sentence where there are none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "cpu.json", help="default benchmarks/results/cpu.json")
    path = parser.parse_args().results
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read ({error}); `python -m benchmarks` writes it.")
    if not isinstance(results, dict) or "parts" not in results:
        sys.exit(f"{path} holds no results of all benchmarks; `python -m benchmarks` writes them.")
    return path, results


def main():
    _, results = read_results(__doc__)
    print("\n".join([*losses(results), table(rows(results))]))


if __name__ == "__main__":
    main()
