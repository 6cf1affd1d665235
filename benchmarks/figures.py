"""One picture for each chapter from 03 on, drawn from what its benchmark has found. Needs matplotlib (requirements-dev.txt).

    python -m benchmarks.figures            benchmarks/results -> docs/figures
"""

import sys
from functools import partial
from pathlib import Path

from benchmarks import claims
from benchmarks.hybrid_blocks import FACTORS
from benchmarks.planned import LINKS
from benchmarks.tables import median, rows

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
COLOURS = ["#707070", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "svg.fonttype": "none",
         "svg.hashsalt": "0"}  # fmt: skip


def bars(axes, each: list[dict], group: str, names, value, unit: str, xlabel: str = ""):
    """For each row bars side by side, with their spread: value(row, name) of each name, over what `group` makes of the row."""
    width = 0.8 / len(names)
    for at, (name, colour) in enumerate(zip(names, COLOURS)):
        values = [value(row, name) for row in each]
        middle, places = list(map(median, values)), [place + (at - (len(names) - 1) / 2) * width for place in range(len(each))]
        axes.bar(places, middle, width, label=name, color=colour)
        if all(isinstance(value, dict) for value in values):
            ends = [[abs(one - value[end]) for one, value in zip(middle, values)] for end in ("min", "max")]
            axes.errorbar(places, middle, ends, fmt="none", ecolor="#222222", elinewidth=0.8)
    axes.set_xticks(range(len(each)), [group.format_map(row) for row in each])
    axes.set(xlabel=xlabel, ylabel=unit)
    if not axes.figure.legends:  # one for all panels
        axes.figure.legend(loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)


def by_model(found: list[dict], claim: str, **wanted) -> dict[str, list[dict]]:
    every = [row for row in rows(found, claim) if all(row[key] == want for key, want in wanted.items())]
    return {model: [row for row in every if row["model"] == model] for model in dict.fromkeys(row["model"] for row in every)}


def of_longest(found: list[dict], claim: str) -> dict[str, list[dict]]:
    """Of each model the rows of its longest history."""
    each = {model: max(row["history_tokens"] for row in of_model) for model, of_model in by_model(found, claim).items()}
    return {f"{model}, {longest:,} tokens": [row for row in rows(found, claim, model) if row["history_tokens"] == longest]
            for model, longest in each.items()}  # fmt: skip


def host(axes, each: list[dict]):
    names = {"on the device": "device_hit_ms", "in host memory": "ttft_ms", "bytes over the link": "link_ms"}
    bars(axes, each, "{history:,}", names, lambda row, name: row[names[name]], "ms")


def planned(axes, each: list[dict], names: tuple[str, ...] = ("03", "04", "05")):
    for row in each:
        row["group"] = f"{LINKS[row['link']]:g}\n" + row["plan"] * ("05" in names and len(row["plan"]) < 9)
    bars(axes, each, "{group}", names, lambda row, name: row["ttft_ms"][name], "TTFT, ms", "a layer's states: transfer / projecting")


def both_ends(axes, each: list[dict]):
    cells = {row["r"]: row for row in each if row["share"] == 1.0}
    for way, colour in zip(("compute", "load", "both"), COLOURS):
        over = [median(cells[ratio]["ttft_ms"][way]) / cells[ratio]["bound_ms"] for ratio in sorted(cells)]
        axes.plot(sorted(cells), over, marker="o", markersize=4, label=way, color=colour)
    axes.axhline(1, color="#222222", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="loading / computing")
    axes.set_xticks(sorted(cells), [f"{ratio:g}" for ratio in sorted(cells)])
    axes.legend(fontsize=8, frameon=False)


def tiered(axes, each: list[dict]):
    cells = {row["r"]: row for row in each if not row["guard"]}  # as it was measured last
    ways = "computed", "best_effort", "wait_complete", "timeout", "both_ends"
    bars(axes, list(cells.values()), "{r:g}", ways, lambda row, way: row["ttft_ms"][way], "TTFT, ms", "reading / computing")


def hybrid(axes, each: list[dict]):
    cells = {(row["batch"], row["context"]): row for row in each}  # as it was measured last
    bars(axes, list(cells.values()), "{batch}\n{context}", ("kv-only", "act-only", "paper", "hybrid"),
         lambda row, policy: 1 / median(row["policies"][policy]["over"]), "of hybrid's tokens a second", "batch, context")  # fmt: skip


def ranks(axes, each: list[dict]):
    for keep, label, colour in zip(("kv", "states"), ("K and V", "hidden states"), COLOURS[1:]):
        kept = sorted((row for row in each if row["keep"] == keep), key=lambda row: row["ranks"])
        counts = [row["ranks"] for row in kept]
        axes.plot(counts, [median(row["ttft_ms"]) for row in kept], marker="o", color=colour, label=f"{label}: TTFT")
        axes.plot(counts, [row["link_ms"] for row in kept], linestyle=":", color=colour, label=f"{label}: link")
    axes.set_xticks(counts)
    axes.set(xlabel="ranks on two cores", ylabel="ms")
    axes.legend(fontsize=8, frameon=False)


PICTURES = {  # of which benchmark; its title; what it has found -> the panels, title -> rows; what draws one; inches
    "03_cpu_offload": (
        "engine", "03: TTFT of a question whose history is in host memory", partial(by_model, claim="host"), host, 9),
    "04_hidden_state_cache": (
        "planned", "04: TTFT with K and V (03) and with hidden states (04)",
        partial(of_longest, claim="ttft"), partial(planned, names=("03", "04")), 11),
    "05_bubble_free": (
        "planned", "05: TTFT with K and V (03), hidden states (04), and the plan (05)",
        partial(of_longest, claim="ttft"), planned, 11),
    "06_bidirectional": (
        "both_ends", "06: TTFT over the bound, against how long loading takes, behind 1,024 tokens",
        partial(by_model, claim="grid", history_tokens=1024), both_ends, 9),
    "07_tiered_storage": (
        "tiered", "07: one history in slow storage alone, the guard off", partial(by_model, claim="policies"), tiered, 9),
    "08_hybrid_blocks": (
        "hybrid_blocks", "08: throughput of each policy over hybrid's",
        lambda found: {f"f = {f:g}": [row for row in rows(found, "grid") if row["f"] == f] for f in FACTORS},
        hybrid, 12),
    "09_tensor_parallel": (
        "ranks", "09: what each rank's link takes, and TTFT, against ranks", partial(of_longest, claim="ranks"), ranks, 9),
}  # fmt: skip


def drawn(results: list[dict], title: str, panels, draw, width: float):
    """-> a figure with a panel for each of panels(results)."""
    import matplotlib.pyplot as plot

    each = panels(results)
    figure, axes = plot.subplots(1, len(each), figsize=(width, 3.6), squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize=11)
    for one, (name, found) in zip(axes[0], each.items()):
        one.set_title(name)
        draw(one, found)
    return figure


def main():
    try:
        import matplotlib
    except ImportError:
        sys.exit("The pictures need matplotlib: pip install -r requirements-dev.txt.")
    results = claims.read()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
        for name, (benchmark, *how) in PICTURES.items():
            if f"{benchmark}-cpu" not in results:
                print(f"{name}: nothing to draw; run python -m benchmarks.{benchmark} first")
                continue
            metadata = {"Date": None, "Creator": None}
            drawn(results[f"{benchmark}-cpu"]["found"], *how).savefig(FOLDER / f"{name}.svg", facecolor="white", metadata=metadata)
            print(f"written: docs/figures/{name}.svg")


if __name__ == "__main__":
    main()
