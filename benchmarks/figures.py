"""One picture for each chapter, drawn from what its benchmark has found. Needs matplotlib (requirements-dev.txt).

    python -m benchmarks.figures            benchmarks/results -> docs/figures
"""

import sys
from functools import partial
from pathlib import Path

from benchmarks import claims
from benchmarks.planned import LINKS
from benchmarks.tables import median, rows

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
COLOURS = ["#707070", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "svg.fonttype": "none",
         "svg.hashsalt": "0"}  # fmt: skip


def panels(count: int, title: str, width: float = 9.0):
    import matplotlib.pyplot as plot

    figure, axes = plot.subplots(1, count, figsize=(width, 3.6), squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, list(axes[0])


def bars(axes, groups: list[str], series: dict, unit: str):
    """Grouped bars with their spread: series {name: [figure or number, one a group]}."""
    width = 0.8 / len(series)
    for at, (name, values) in enumerate(series.items()):
        middle = [median(value) for value in values]
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, middle, width, label=name, color=COLOURS[at % len(COLOURS)])
        if all(isinstance(value, dict) and "min" in value for value in values):
            low = [one - value["min"] for one, value in zip(middle, values)]
            high = [value["max"] - one for one, value in zip(middle, values)]
            axes.errorbar(places, middle, [low, high], fmt="none", ecolor="#222222", elinewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    if not axes.figure.legends:  # one for all panels
        axes.figure.legend(loc="outside lower center", ncols=len(series), fontsize=8, frameon=False)


def by_model(file: dict, claim: str) -> dict[str, list[dict]]:
    models = {}
    for row in rows(file["found"], claim):
        models.setdefault(row["model"], []).append(row)
    return models


def baseline(file: dict):
    lone = rows(file["found"], "lone")
    figure, axes = panels(2, "01: a lone request, times as fast as generate of transformers")
    for what, one in zip(("ttft", "tbt"), axes):
        series = {chapter: [row["times_as_fast"][chapter]["dynamic"][what] for row in lone] for chapter in ("01", "02")}
        bars(one, [f"{row['model']}\n{row['dtype']}" for row in lone], series, f"{what.upper()}, times as fast")
        one.axhline(1, color="#222222", linewidth=1)
    return figure


def many(file: dict):
    found = rows(file["found"], "throughput")
    figure, axes = panels(1, "02: 16 requests at once, against one after the other", 5)
    series = {chapter: [row["tokens_per_second"][chapter] for row in found] for chapter in ("01", "02")}
    bars(axes[0], [row["model"] for row in found], series, "tokens a second")
    return figure


def host(file: dict):
    found = by_model(file, "host")
    figure, axes = panels(len(found), "03: TTFT of a question whose history is in host memory")
    for one, (model, each) in zip(axes, found.items()):
        names = {"on the device": "device_hit_ms", "in host memory": "ttft_ms", "bytes over the link": "link_ms"}
        series = {name: [row[key] for row in each] for name, key in names.items()}
        bars(one, [f"{row['history']:,}" for row in each], series, "ms")
        one.set_title(model)
    return figure


def planned(file: dict, names: tuple[str, ...], title: str):
    found = by_model(file, "ttft")
    figure, axes = panels(len(found), title, 11)
    for one, (model, each) in zip(axes, found.items()):
        longest = max(row["history_tokens"] for row in each)
        links = [row for row in each if row["history_tokens"] == longest]
        series = {name: [row["ttft_ms"][name] for row in links] for name in names}
        shown = [row["plan"] if "05" in names and len(row["plan"]) < 9 else "" for row in links]
        bars(one, [f"{LINKS[row['link']]:g}\n{plan}" for row, plan in zip(links, shown)], series, "TTFT, ms")
        one.set(title=f"{model}, {longest:,} tokens", xlabel="a layer's states: transfer / projecting")
    return figure


def both_ends(file: dict):
    found = list(by_model(file, "grid").items())[:2]
    figure, axes = panels(len(found), "06: TTFT over the bound, against how long loading takes")
    for one, (model, each) in zip(axes, found):
        longest = max(row["history_tokens"] for row in each)
        cells = {row["r"]: row for row in each if row["history_tokens"] == longest and row["share"] == 1.0}
        ratios = sorted(cells)
        for at, way in enumerate(("compute", "load", "both")):
            over = [median(cells[ratio]["ttft_ms"][way]) / cells[ratio]["bound_ms"] for ratio in ratios]
            one.plot(ratios, over, marker="o", markersize=4, label=way, color=COLOURS[at])
        one.axhline(1, color="#222222", linewidth=1)
        one.set(xscale="log", yscale="log", title=f"{model}, {longest:,} tokens", xlabel="loading / computing")
        one.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        one.legend(fontsize=8, frameon=False)
    return figure


def tiered(file: dict):
    found = by_model(file, "policies")
    figure, axes = panels(len(found) + 1, "07: one history in slow storage alone, the guard off; and host memory against hits", 12)
    ways = "computed", "best_effort", "wait_complete", "timeout", "both_ends"
    for one, (model, each) in zip(axes, found.items()):
        cells = list({row["r"]: row for row in each if not row["guard"]}.values())
        bars(one, [f"{row['r']:g}" for row in cells], {way: [row["ttft_ms"][way] for row in cells] for way in ways}, "TTFT, ms")
        one.set(title=model, xlabel="reading / computing")
    sizes = rows(file["found"], "sizes")
    for at, (tier, label) in enumerate((("gpu", "device"), ("cpu", "host memory"))):
        axes[-1].plot([row["times_the_device"] for row in sizes], [row[tier] for row in sizes], marker="o", label=label,
                      color=COLOURS[at])  # fmt: skip
    axes[-1].set(xlabel="host memory / device memory", ylabel="of the prompts' tokens")
    axes[-1].legend(fontsize=8, frameon=False)
    return figure


def hybrid(file: dict):
    grid = rows(file["found"], "grid", "random:small")
    factors = sorted({row["f"] for row in grid})
    figure, axes = panels(len(factors), "08: throughput of each policy over hybrid's", 12)
    for one, factor in zip(axes, factors):
        cells = list({(row["batch"], row["context"]): row for row in grid if row["f"] == factor}.values())
        series = {policy: [1 / median(cell["policies"][policy]["over"]) for cell in cells]
                  for policy in ("kv-only", "act-only", "paper", "hybrid")}  # fmt: skip
        bars(one, [f"{cell['batch']}\n{cell['context']}" for cell in cells], series, "of hybrid's tokens a second")
        one.set(title=f"f = {factor:g}", xlabel="batch, context")
    return figure


def ranks(file: dict):
    found = by_model(file, "ranks")
    figure, axes = panels(len(found), "09: what each rank's link takes, and TTFT, against ranks")
    for one, (model, each) in zip(axes, found.items()):
        for at, (keep, label) in enumerate((("kv", "K and V"), ("states", "hidden states"))):
            kept = sorted((row for row in each if row["keep"] == keep), key=lambda row: row["ranks"])
            counts = [row["ranks"] for row in kept]
            one.plot(counts, [median(row["ttft_ms"]) for row in kept], marker="o", color=COLOURS[at + 1],
                     label=f"{label}: TTFT")  # fmt: skip
            one.plot(counts, [row["link_ms"] for row in kept], linestyle=":", color=COLOURS[at + 1], label=f"{label}: link")
        one.set_xticks(counts)
        one.set(title=f"{model}, {each[0]['history_tokens']:,} tokens", xlabel="ranks on two cores", ylabel="ms")
        one.legend(fontsize=8, frameon=False)
    return figure


PICTURES = {  # of which benchmark, how
    "01_baseline": ("baseline", baseline),
    "02_paged_kv": ("engine", many),
    "03_cpu_offload": ("engine", host),
    "04_hidden_state_cache": ("planned", partial(
        planned, names=("03", "04"), title="04: TTFT with K and V (03) and with hidden states (04)")),
    "05_bubble_free": ("planned", partial(
        planned, names=("03", "04", "05"), title="05: TTFT with K and V (03), hidden states (04), and the plan (05)")),
    "06_bidirectional": ("both_ends", both_ends),
    "07_tiered_storage": ("tiered", tiered),
    "08_hybrid_blocks": ("hybrid_blocks", hybrid),
    "09_tensor_parallel": ("ranks", ranks),
}


def main():
    try:
        import matplotlib
    except ImportError:
        sys.exit("The pictures need matplotlib: pip install -r requirements-dev.txt.")
    results = claims.read()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
        for name, (benchmark, draw) in PICTURES.items():
            if f"{benchmark}-cpu" not in results:
                print(f"{name}: nothing to draw; run python -m benchmarks.{benchmark} first")
                continue
            metadata = {"Date": None, "Creator": None}
            draw(results[f"{benchmark}-cpu"]).savefig(FOLDER / f"{name}.svg", facecolor="white", metadata=metadata)
            print(f"written: docs/figures/{name}.svg")


if __name__ == "__main__":
    main()
