"""The tables of README.md and docs/measured.md, written from what the benchmarks measured.

    python -m tools.report             write them
    python -m tools.report --check     write nothing; name those that are out of date, and exit with 1

A part of a file lies between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`, where NAME is one of PARTS. Most are what a
benchmark prints at its end, made of its results in benchmarks/results/ (`report` of benchmarks/NAME.py). So a number that was
measured is typed nowhere, and when a benchmark has run again this command alone changes the pages.
"""
import argparse
import importlib
import io
import re
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from benchmarks import claims as benchmark_claims
from benchmarks.tables import markdown, median, number, rows

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "measured.md"]
PART = re.compile(r"^<!-- begin ([\w-]+) -->\n(.*?)^<!-- end \1 -->$", re.M | re.S)
BENCHMARKS = "baseline", "engine", "planned", "variants", "outside", "both_ends", "tiered", "hybrid_blocks", "ranks"


# 1. The parts ----------------------------------------------------------------------------------------------------

CHAPTERS = [  # file, question, paper, what is kept and how it comes back, what was measured
    ("01_baseline", "What does it cost to keep nothing?", "the yardstick of all the papers below",
     "nothing: everything is computed again", "writes tokens {writes}x as fast as `transformers` (classroom)"),
    ("02_paged_kv", "How do many requests share one memory?", "[PagedAttention](https://arxiv.org/abs/2309.06180) (SOSP '23)",
     "KV blocks on the device, shared by prefix: a block table points at them",
     "16 requests at once: {many}x the tokens per second of chapter 01 (classroom)"),
    ("03_cpu_offload", "What if the device is full?",
     "[CachedAttention](https://www.usenix.org/conference/atc24/presentation/gao-bin-cost) (ATC '24)",
     "KV blocks in host memory: a copy over the link, layer by layer, while the layers before are computed",
     "behind 1,984 tokens the first token comes {restored}x sooner than by computing (random:small)"),
    ("04_hidden_state_cache", "Can half the bytes do?", "[HCache](https://arxiv.org/abs/2410.05004) (EuroSys '25)",
     "each layer's input, in host memory and in files: projected to K and V again, while the next layer is on its way",
     "behind 1,984 tokens the first token comes {states}x as soon as with K and V where the link is the bottleneck, {states_even}x where "
     "projecting takes as long as the transfer (random:small)"),
    ("05_bubble_free", "Why should link or processor wait?", "HCache, section 4.1",
     "of each layer what a plan says: recomputed, projected or loaded, so that the question is through first",
     "behind 1,984 tokens the first token comes {plan_least} to {plan_most}x as soon as with K and V, over three links (random:small)"),
    ("06_bidirectional", "What if storage is as slow as computing?", "[Cake](https://arxiv.org/abs/2410.03065) (ICML '25)",
     "KV chunks in storage: computed from the front while the last are loaded first, until both meet",
     "where both are equally fast, the first token comes {both}x as soon as by the better of the two, behind 1,984 tokens (classroom)"),
    ("07_tiered_storage", "How do many engines share what each has read?",
     "[HiCache](https://docs.sglang.io/advanced_features/hicache_design.html)",
     "KV pages on the device, in host memory and in shared storage: a radix tree, and reading ahead under a policy",
     "against the device alone: TTFT lower by {lower}, {throughput}x the throughput of four at once (random:small)"),
    ("08_hybrid_blocks", "What if not even the weights fit?", "[CAPTURE](https://github.com/casys-kaist/Capture)",
     "KV blocks and activation blocks in host memory, and the weights: some loaded, some rebuilt, in every decode step",
     "up to {over_kv}x the throughput of K and V only, {over_act}x of activations only (random:small)"),
    ("09_tensor_parallel", "Who keeps what when the model is divided?", "HCache, section 5; HiCache",
     "what 03 and 04 keep, divided over ranks: disjoint reads and an all-gather; ranks agree on what is there",
     "on two ranks {share} of the bytes over each link, and {agreements} agreements a restoration (classroom)"),
]


def headlines(results: dict) -> dict[str, str]:
    """The numbers of README.md's table: of each chapter the result that says most about it."""
    def only(file: str, claim: str, model: str, **wanted) -> list[dict]:
        every = rows(results[f"{file}-cpu"]["found"], claim, model)
        return [row for row in every if all(row[key] == want for key, want in wanted.items())]
    alone, many = only("baseline", "lone", "classroom")[0], only("engine", "throughput", "classroom")[0]
    slow, even, fast = only("planned", "ttft", "random:small", history_tokens=1984)
    (both,) = only("both_ends", "grid", "classroom", history_tokens=1984, share=1.0, r=1)
    one, four = only("tiered", "mix", "random:small")
    blocks = only("hybrid_blocks", "grid", "random:small", f=1.25)
    (ranks,) = only("ranks", "ranks", "classroom", ranks=2, keep="states")
    by_plan = [median(row["over_03"]["05"]) for row in (slow, even, fast)]
    over = {policy: max(median(row["policies"][policy]["over"]) for row in blocks) for policy in ("kv-only", "act-only")}
    figures = dict(
        writes=alone["times_as_fast"]["01"]["dynamic"]["tbt"], many=many["ratio"],
        restored=even["computed_ms"] / median(even["ttft_ms"]["03"]), states=slow["over_03"]["04"], states_even=even["over_03"]["04"],
        plan_least=min(by_plan), plan_most=max(by_plan), both=both["better_over_both"], throughput=four["throughput"],
        over_kv=over["kv-only"], over_act=over["act-only"])
    return dict({name: number(median(figure)) for name, figure in figures.items()}, lower=f"{median(one['lower']):.0%}",
                share=f"{ranks['share_of_one_rank']:.0%}", agreements=f"{ranks['agreements']:.0f}")


def chapters(results: dict) -> str:
    """README.md: each chapter in one row."""
    measured = headlines(results)
    lines = [[f"[`{name}.py`]({name}.py)", *words, said.format_map(measured)] for name, *words, said in CHAPTERS]
    return markdown(["chapter", "question", "paper", "what is kept, and how it comes back", "measured"], lines)


def claims(results: dict) -> str:
    """Each claim in one row, what was missed first."""
    found = sorted(benchmark_claims.table(results), key=lambda row: "missed" not in row[-1])
    met = sum(row[-1] == "met" for row in found)
    return f"Of {len(found)} claims {met} are met.\n\n" + markdown(benchmark_claims.HEADER, found)


def conditions(results: dict) -> str:
    """On what the numbers were measured, and how to measure them again."""
    machines: dict[str, list] = {}
    for file in (file for name, file in results.items() if name.endswith("-cpu")):
        machine = f"{file['threads']} threads of an {file['processor']} ({file['cpu_capability']}), PyTorch {file['torch']}"
        machines.setdefault(machine, []).append(f"`{file['command']}`")
    return "\n".join(f"Measured on {machine}, by {', '.join(commands)}." for machine, commands in machines.items())


def on_paper(results: dict) -> str:
    """How far the papers' own figures are met by arithmetic: what `tools.on_paper` says at its end."""
    with redirect_stdout(io.StringIO()) as said:
        importlib.import_module("tools.on_paper").main()
    return said.getvalue().strip().splitlines()[-1]


def measured(benchmark: str, results: dict) -> str:
    return importlib.import_module(f"benchmarks.{benchmark}").report(results[f"{benchmark}-cpu"]["found"])


PARTS = {"chapters": chapters, "conditions": conditions, "claims": claims, "on-paper": on_paper,
         **{name.replace("_", "-"): partial(measured, name) for name in BENCHMARKS}}


# 2. Pages --------------------------------------------------------------------------------------------------------

read = benchmark_claims.read


def written(page: str, results: dict) -> str:
    """The text of a page, its parts made anew. Raises ValueError at a marker without its other half, or of no part."""
    for mark in re.findall(r"^<!-- (?:begin|end) (.*) -->$", PART.sub("", page), re.M):
        raise ValueError(f"the marker of {mark!r} has no other half")

    def part(match):
        name = match.group(1)
        if name not in PARTS:
            raise ValueError(f"no part is called {name!r}; they are {', '.join(PARTS)}")
        return f"<!-- begin {name} -->\n{PARTS[name](results)}\n<!-- end {name} -->"
    return PART.sub(part, page)


def out_of_date(page: str, results: dict) -> list[str]:
    """The names of the parts that are not what the results say."""
    return [now.group(1) for now, then in zip(PART.finditer(written(page, results)), PART.finditer(page)) if now[0] != then[0]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a part is out of date")
    check, results, stale = parser.parse_args().check, read(), False
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        for name in out_of_date(page, results):
            stale = True
            print(f"{path.relative_to(ROOT)}: {name} {'is out of date' if check else 'written'}")
        if not check:
            path.write_text(written(page, results), encoding="utf-8")
    if check and stale:
        sys.exit("python -m tools.report writes them.")


if __name__ == "__main__":
    main()
