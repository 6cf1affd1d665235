"""Write the results in benchmarks/results/ into README.md and docs/measured.md.

    python -m tools.report              needs results of one run of `python -m benchmarks --json benchmarks/results`
    python -m tools.report --mixed      also takes results of several commits or machines; the page names them

A part of a page stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`. NAME is a key of
PARTS; most parts are the tables that a benchmark prints at its end (`report` in benchmarks/NAME.py). A number
inside a line stands between `<!--NAME-->` and `<!---->`. NAME is a key of `headlines`. tools/check_docs.py
lists parts and numbers that are out of date.
"""
import importlib
import re
import sys
from functools import partial
from pathlib import Path

from benchmarks import tables
from benchmarks.claims import ABSENT, HEADER, read, table
from benchmarks.measure import TRAINED
from benchmarks.planned import LINKS
from benchmarks.tables import across, grouped, markdown, median, number, rows
from tools import on_paper

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "measured.md"]
PART = re.compile(r"^<!-- begin ([\w-]+) -->\n(.*?)^<!-- end \1 -->$", re.M | re.S)
NUMBER = re.compile(r"<!--(\w+)-->([^<]*)<!---->")
BENCHMARKS = "baseline", "engine", "planned", "variants", "outside", "both_ends", "tiered", "hybrid_blocks", "ranks", "real_storage"


# 1. The parts ----------------------------------------------------------------------------------------------------

def headlines(results: dict) -> dict[str, str]:
    """Return the numbers for the prose of the pages, name -> text; ABSENT if these results lack it."""
    def first(file: str, claim: str, model: str, **wanted) -> dict:
        return rows(results[f"{file}-cpu"]["found"], claim, model=model, **wanted)[0]

    def rate(policy: str) -> float:
        return median(whole(policy=policy)["tokens_per_second"])
    link, even, slow = LINKS
    planned = partial(first, "planned", "ttft", "random:long", history_tokens=1984)
    whole = partial(first, "hybrid_blocks", "whole", "random:long")
    ranks = partial(first, "ranks", "ranks", "classroom", ranks=2, keep="states")
    by_paper = [[on_paper.capture_gains(name, prompt)[0] for prompt in on_paper.PROMPTS] for name in ("6.7B", "66B")]
    made = dict(
        writes=lambda: first("baseline", "lone", "classroom")["times_as_fast"]["01"]["dynamic"]["tbt"],
        writes_trained=lambda: first("baseline", "lone", TRAINED)["times_as_fast"]["01"]["dynamic"]["tbt"],
        many=lambda: first("engine", "throughput", "classroom")["ratio"], restored=lambda: planned(link=even)["over_02"]["03"],
        states=lambda: planned(link=link)["over_03"]["04"], states_even=lambda: planned(link=even)["over_03"]["04"],
        plan_least=lambda: min(median(planned(link=each)["over_03"]["05"]) for each in LINKS),
        plan_most=lambda: max(median(planned(link=each)["over_03"]["05"]) for each in LINKS),
        both=lambda: first("both_ends", "grid", "classroom", history_tokens=1984, share=1.0, r=1)["better_over_both"],
        throughput=lambda: first("tiered", "mix", "random:long", at_once=2)["throughput"],
        lower=lambda: f"{median(first('tiered', 'mix', 'random:long', at_once=1)['lower']):.0%}",
        over_kv=lambda: whole(policy="kv-only")["over"], over_act=lambda: whole(policy="act-only")["over"],
        naive_of_kv=lambda: f"{rate('naive') / rate('kv-only'):.0%}", naive_of_hybrid=lambda: f"{rate('naive') / rate('hybrid'):.0%}",
        share=lambda: f"{ranks()['share_of_one_rank']:.0%}", agreements=lambda: f"{ranks()['agreements']:.0f}",
        paper_small=lambda: max(by_paper[0]), paper_large=lambda: max(by_paper[1]))  # fmt: skip

    def shown(figure) -> str:
        try:
            value = figure()
            return value if isinstance(value, str) else number(median(value))
        except (KeyError, IndexError):
            return ABSENT
    return {name: shown(figure) for name, figure in made.items()}


def claims(results: dict) -> str:
    """Return the table of claims, missed claims first."""
    found = sorted(table(results, paper=on_paper), key=lambda row: "missed" not in row[-1])
    return f"{sum(row[-1] == 'met' for row in found)} of {len(found)} claims are met.\n\n" + markdown(HEADER, found)


def runs(results: dict) -> dict[str, dict]:
    """Group results by commit and machine. Returns: their description -> {result file: command}."""
    found: dict[str, dict] = {}
    for name, file in results.items():
        if name.endswith("-cpu"):
            machine = f"{file['threads']} threads of an {file['processor']} ({file['cpu_capability']}), PyTorch {file['torch']}"
            found.setdefault(f"of commit {file.get('commit') or 'unknown'}, on {machine}", {})[name] = file["command"]
    return found


def mixed(results: dict) -> str:
    """Return a sentence that names the runs if the results are of several commits or machines; else empty."""
    apart = [f"{run}: {', '.join(commands)}" for run, commands in runs(results).items()]
    return f"the results are not of one run: {'; '.join(apart)}" if len(apart) > 1 else ""


def conditions(results: dict) -> str:
    """Return a sentence for each run: the command, the commit and the machine."""
    whole = not mixed(results) and all(re.fullmatch(r"python -m benchmarks\.\w+( --json \S+)?", file["command"])
                                       for name, file in results.items() if name.endswith("-cpu"))  # fmt: skip
    by = {run: "python -m benchmarks" if whole else "`, `".join(commands.values()) for run, commands in runs(results).items()}
    return "\n".join(f"Measured{' in one run' * whole} by `{words}`, {run}." for run, words in by.items())


def gpu(results: dict, everything: bool = True) -> str:
    """Return the tables of each GPU's results by `python -m tools.gpu_report`. docs/measured.md has the first
    one alone (`everything` False)."""
    parts, gpus = [], {name: found for name, found in results.items() if name.startswith("gpu-")}
    for name, found in gpus.items():
        every = [dict(row, column=f"{row['model']}, {row['history']:,}") for job in found.values() for row in job["rows"] if "kernels" in row]
        for row in every:
            row["least"] = f" of {tables.milliseconds(row['allowed_ms'])}" if "allowed_ms" in row else ""
        back, beside = (grouped([row for row in every if what in row], ("way",), "column") for what in ("ttft_ms", "tbt_ms"))
        copies = grouped(found.get("copies", {"rows": []})["rows"], ("memory",), "way")
        shown = [
            ("TTFT of a question behind a history that the device has evicted, TTFT that arithmetic allows, and launched kernels.",
             {"way": "{way}", **across(back, {"": "{ttft_ms:ms}{least}; {kernels:,}"})}, back),
            ("TBT of eight requests beside a short prompt, and its ratio while that question is answered beside them.",
             {"way": "{way}", **across(beside, {"": "{tbt_ms:ms}; {over_alone:spread}"})}, beside),
            ("GB/s of 64 MiB.", {"host memory": "{memory}", **across(copies, {"": "{gbps:spread}"})}, copies)]
        parts += [f"`{name}`:", *(tables.table(*each) for each in shown[: None if everything else 1])]
    return tables.paragraphs(*parts)


def measured(benchmark: str, results: dict) -> str:
    """Return the tables of a benchmark by its CPU results."""
    if f"{benchmark}-cpu" not in results:
        return "Not measured yet."
    return importlib.import_module(f"benchmarks.{benchmark}").report(results[f"{benchmark}-cpu"]["found"])


PARTS = {"conditions": conditions, "claims": claims, "gpu": partial(gpu, everything=False),
         **{name.replace("_", "-"): partial(measured, name) for name in BENCHMARKS}}


# 2. Pages --------------------------------------------------------------------------------------------------------

def written(page: str, results: dict) -> str:
    """Return the text of a page with new parts and numbers. Raises ValueError for an unpaired marker or an
    unknown name."""
    if mark := re.search(r"<!--.*?-->", NUMBER.sub("", PART.sub("", page))):
        raise ValueError(f"the marker {mark[0]} has no other half")
    made = {**PARTS, **{name: lambda _, figure=figure: figure for name, figure in headlines(results).items()}}

    def part(match):
        name = match[1]
        if name not in made:
            raise ValueError(f"nothing is called {name!r}; there are {', '.join(made)}")
        start, end = (at - match.start() for at in match.span(2))
        return match[0][:start] + made[name](results) + "\n" * match[2].endswith("\n") + match[0][end:]
    return NUMBER.sub(part, PART.sub(part, page))


def out_of_date(page: str, results: dict) -> list[str]:
    """Return the names of the parts and numbers of a page that differ from the results."""
    then, now = ([*PART.findall(text), *NUMBER.findall(text)] for text in (page, written(page, results)))
    return [name for (name, said), (_, says) in zip(then, now) if said != says]


if __name__ == "__main__":
    if (sentence := mixed(read())) and sys.argv[1:] != ["--mixed"]:
        sys.exit(f"Nothing is written: {sentence}.")
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8"), read()), encoding="utf-8")
