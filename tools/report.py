"""What was measured, written into README.md and docs/measured.md: `python -m tools.report`.

A part of a page lies between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`, where NAME is one of PARTS: most are what a
benchmark prints at its end (`report` of benchmarks/NAME.py, of benchmarks/results/). A number inside of a line lies between
`<!--NAME-->` and `<!---->`, where NAME is one of `headlines`. tools/check_docs.py names what is out of date.
"""
import importlib
import re
from functools import partial
from pathlib import Path

from benchmarks.claims import HEADER, read, table
from benchmarks.tables import markdown, median, number, rows

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "measured.md"]
PART = re.compile(r"^<!-- begin ([\w-]+) -->\n(.*?)^<!-- end \1 -->$", re.M | re.S)
NUMBER = re.compile(r"<!--(\w+)-->([^<]*)<!---->")
BENCHMARKS = "baseline", "engine", "planned", "variants", "flow", "outside", "both_ends", "tiered", "hybrid_blocks", "ranks"


# 1. The parts ----------------------------------------------------------------------------------------------------

def headlines(results: dict) -> dict[str, str]:
    """The numbers in README.md's table: of each chapter the result that says most about it."""
    def only(file: str, claim: str, model: str, **wanted) -> list[dict]:
        every = rows(results[f"{file}-cpu"]["found"], claim, model)
        return [row for row in every if all(row[key] == want for key, want in wanted.items())]
    alone, trained = (only("baseline", "lone", model)[0] for model in ("classroom", "SmolLM2-135M-Instruct"))
    slow, even, fast = only("planned", "ttft", "random:small", history_tokens=1984)
    (both,) = only("both_ends", "grid", "classroom", history_tokens=1984, share=1.0, r=1)
    one, four = only("tiered", "mix", "random:small")
    blocks = only("hybrid_blocks", "grid", "random:small", f=1.25)
    (ranks,) = only("ranks", "ranks", "classroom", ranks=2, keep="states")
    by_plan = [median(row["over_03"]["05"]) for row in (slow, even, fast)]
    over = {policy: max(median(row["policies"][policy]["over"]) for row in blocks) for policy in ("kv-only", "act-only")}
    figures = dict(
        writes=alone["times_as_fast"]["01"]["dynamic"]["tbt"], many=only("engine", "throughput", "classroom")[0]["ratio"],
        writes_trained=trained["times_as_fast"]["01"]["dynamic"]["tbt"],
        restored=even["computed_ms"] / median(even["ttft_ms"]["03"]), states=slow["over_03"]["04"], states_even=even["over_03"]["04"],
        plan_least=min(by_plan), plan_most=max(by_plan), both=both["better_over_both"], throughput=four["throughput"],
        over_kv=over["kv-only"], over_act=over["act-only"])
    return dict({name: number(median(figure)) for name, figure in figures.items()}, lower=f"{median(one['lower']):.0%}",
                share=f"{ranks['share_of_one_rank']:.0%}", agreements=f"{ranks['agreements']:.0f}")


def claims(results: dict) -> str:
    """Each claim in one row, what was missed first."""
    found = sorted(table(results), key=lambda row: "missed" not in row[-1])
    met = sum(row[-1] == "met" for row in found)
    return f"Of {len(found)} claims {met} are met.\n\n" + markdown(HEADER, found)


def conditions(results: dict) -> str:
    """On what the numbers were measured, and how to measure them again."""
    machines: dict[str, list] = {}
    for file in (file for name, file in results.items() if name.endswith("-cpu")):
        machine = f"{file['threads']} threads of an {file['processor']} ({file['cpu_capability']}), PyTorch {file['torch']}"
        machines.setdefault(machine, []).append(f"`{file['command']}`")
    return "\n".join(f"Measured on {machine}, by {', '.join(commands)}." for machine, commands in machines.items())


def measured(benchmark: str, results: dict) -> str:
    return importlib.import_module(f"benchmarks.{benchmark}").report(results[f"{benchmark}-cpu"]["found"])


PARTS = {"conditions": conditions, "claims": claims,
         **{name.replace("_", "-"): partial(measured, name) for name in BENCHMARKS}}


# 2. Pages --------------------------------------------------------------------------------------------------------

def written(page: str, results: dict) -> str:
    """The text of a page, its parts and numbers made anew. Raises ValueError at a marker without its other half, or of nothing."""
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
    """The names of what is not what the results say."""
    then, now = ([*PART.findall(text), *NUMBER.findall(text)] for text in (page, written(page, results)))
    return [name for (name, said), (_, says) in zip(then, now) if said != says]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8"), read()), encoding="utf-8")
