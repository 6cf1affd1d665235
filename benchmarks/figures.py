"""One picture for each chapter, drawn from what its benchmark has found. Needs matplotlib (requirements-dev.txt).

    python -m benchmarks.figures            benchmarks/results -> docs/figures
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import claims  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
COLOURS = ["#707070", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "0"}
LINKS = {"the link is the bottleneck": "2", "balanced": "1", "computing is the bottleneck": "0.5"}


def panels(count: int, title: str, width: float = 9.0):
    import matplotlib.pyplot as plot

    figure, axes = plot.subplots(1, count, figsize=(width, 3.6), squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, list(axes[0])


def bars(axes, groups: list[str], series: dict, unit: str, log: bool = False):
    """Grouped bars with their spread: series {name: [figure or number, one a group]}."""
    width = 0.8 / len(series)
    for at, (name, values) in enumerate(series.items()):
        middle = [claims.median(value) for value in values]
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, middle, width, label=name, color=COLOURS[at % len(COLOURS)])
        if all(isinstance(value, dict) and "min" in value for value in values):
            low = [one - value["min"] for one, value in zip(middle, values)]
            high = [value["max"] - one for one, value in zip(middle, values)]
            axes.errorbar(places, middle, [low, high], fmt="none", ecolor="#222222", elinewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
    if not axes.figure.legends:  # one for all panels
        axes.figure.legend(loc="outside lower center", ncols=len(series), fontsize=8, frameon=False)


def entries(file: dict, claim: str) -> list[dict]:
    return [each for each in file["found"] if each["claim"] == claim]


def baseline(file: dict):
    cases = file["cases"]
    figure, axes = panels(2, "01: a lone request, times as fast as generate of transformers")
    for what, one in zip(("ttft", "tbt"), axes):
        series = {chapter: [case["peers"]["dynamic"]["ours_over"][chapter][what] for case in cases] for chapter in ("01", "02")}
        bars(one, [f"{case['model']}\n{case['dtype']}" for case in cases], series, f"{what.upper()}, times as fast")
        one.axhline(1, color="#222222", linewidth=1)
    return figure


def many(file: dict):
    found = {name.split()[1]: rows[0] for name, rows in file["found"].items() if name.startswith("throughput")}
    figure, axes = panels(1, "02: 16 requests at once, against one after the other", 5)
    series = {chapter: [row["tokens_per_second"][chapter] for row in found.values()] for chapter in ("01", "02")}
    bars(axes[0], list(found), series, "tokens a second", log=True)
    return figure


def host(file: dict):
    found = {name.split()[1]: rows for name, rows in file["found"].items() if name.startswith("host ")}
    figure, axes = panels(len(found), "03: TTFT of a question whose history is in host memory")
    for one, (name, rows) in zip(axes, found.items()):
        series = {"on the device": [row["device_hit_ms"] for row in rows], "in host memory": [row["ttft_ms"] for row in rows],
                  "bytes over the link": [row["link_ms"] for row in rows]}  # fmt: skip
        bars(one, [f"{row['history']:,}" for row in rows], series, "ms")
        one.set_title(name, fontsize=10)
    return figure


def planned(file: dict, names: tuple[str, ...], title: str):
    found = entries(file, "ttft")
    figure, axes = panels(len(found), title, 11)
    for one, each in zip(axes, found):
        longest = max(row["history_tokens"] for row in each["rows"])
        rows = [row for row in each["rows"] if row["history_tokens"] == longest]
        series = {name: [row["ttft_ms"][name] for row in rows] for name in names}
        groups = [LINKS[row["link"]] + (f"\n{row['plan']}" if "05" in names and len(row["plan"]) < 9 else "") for row in rows]
        bars(one, groups, series, "TTFT, ms")
        one.set_title(f"{each['model']}, {longest:,} tokens", fontsize=10)
        one.set_xlabel("a layer's states: transfer / projecting")
    return figure


def both_ends(file: dict):
    found = entries(file, "grid")[:2]
    figure, axes = panels(len(found), "06: TTFT over the bound, against how long loading takes")
    for one, each in zip(axes, found):
        longest = max(row["history_tokens"] for row in each["rows"])
        rows = {row["r"]: row for row in each["rows"] if row["history_tokens"] == longest and row["share"] == 1.0}
        ratios = sorted(rows)
        for at, way in enumerate(("compute", "load", "both")):
            over = [claims.median(rows[ratio]["ttft_ms"][way]) / rows[ratio]["bound_ms"] for ratio in ratios]
            one.plot(ratios, over, marker="o", markersize=4, label=way, color=COLOURS[at])
        one.axhline(1, color="#222222", linewidth=1)
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        one.set_title(f"{each['model']}, {longest:,} tokens", fontsize=10)
        one.set_xlabel("loading / computing")
        one.legend(fontsize=8, frameon=False)
    return figure


def tiered(file: dict):
    found = entries(file, "policies")
    figure, axes = panels(len(found) + 1, "07: one history in slow storage alone, the guard off; and host memory against hits", 12)
    ways = "computed", "best_effort", "wait_complete", "timeout", "both_ends"
    for one, each in zip(axes, found):
        rows = list({row["r"]: row for row in each["rows"] if not row["guard"]}.values())
        bars(one, [f"{row['r']:g}" for row in rows], {way: [row["ttft_ms"][way] for row in rows] for way in ways}, "TTFT, ms")
        one.set_title(each["model"], fontsize=10)
        one.set_xlabel("reading / computing")
    rows = entries(file, "sizes")[0]["rows"]
    for at, (tier, label) in enumerate((("gpu", "device"), ("cpu", "host memory"))):
        axes[-1].plot([row["times_the_device"] for row in rows], [row[tier] for row in rows], marker="o", label=label,
                      color=COLOURS[at])  # fmt: skip
    axes[-1].set_xlabel("host memory / device memory")
    axes[-1].set_ylabel("of the prompts' tokens")
    axes[-1].legend(fontsize=8, frameon=False)
    return figure


def hybrid(file: dict):
    rows = entries(file, "grid")[0]["rows"]
    factors = sorted({row["f"] for row in rows})
    figure, axes = panels(len(factors), "08: throughput of each policy over hybrid's", 12)
    for one, factor in zip(axes, factors):
        cells = list({(row["batch"], row["context"]): row for row in rows if row["f"] == factor}.values())
        series = {policy: [1 / claims.median(cell["policies"][policy]["over"]) for cell in cells]
                  for policy in ("kv-only", "act-only", "paper", "hybrid")}  # fmt: skip
        bars(one, [f"{cell['batch']}\n{cell['context']}" for cell in cells], series, "of hybrid's tokens a second")
        one.set_title(f"f = {factor:g}", fontsize=10)
        one.set_xlabel("batch, context")
    return figure


def ranks(file: dict):
    found = entries(file, "ranks")
    figure, axes = panels(len(found), "09: what each rank's link takes, and TTFT, against ranks")
    for one, each in zip(axes, found):
        for at, (keep, label) in enumerate((("kv", "K and V"), ("states", "hidden states"))):
            rows = sorted((row for row in each["rows"] if row["keep"] == keep), key=lambda row: row["ranks"])
            counts = [row["ranks"] for row in rows]
            one.plot(counts, [claims.median(row["ttft_ms"]) for row in rows], marker="o", color=COLOURS[at + 1],
                     label=f"{label}: TTFT")  # fmt: skip
            one.plot(counts, [row["link_ms"] for row in rows], linestyle=":", color=COLOURS[at + 1], label=f"{label}: link")
        one.set_xticks(counts)
        one.set_xlabel("ranks on two cores")
        one.set_ylabel("ms")
        one.set_title(f"{each['model']}, {each['rows'][0]['history_tokens']:,} tokens", fontsize=10)
        one.legend(fontsize=8, frameon=False)
    return figure


PICTURES = {
    "01_baseline": ("baseline", baseline),
    "02_paged_kv": ("engine", many),
    "03_cpu_offload": ("engine", host),
    "04_hidden_state_cache": ("planned", lambda file: planned(
        file, ("03", "04"), "04: TTFT with K and V (03) and with hidden states (04)")),
    "05_bubble_free": ("planned", lambda file: planned(
        file, ("03", "04", "05"), "05: TTFT with K and V (03), hidden states (04), and the plan (05: R, H, K of each layer)")),
    "06_bidirectional": ("both_ends", both_ends),
    "07_tiered_storage": ("tiered", tiered),
    "08_hybrid_blocks": ("hybrid_blocks", hybrid),
    "09_tensor_parallel": ("ranks", ranks),
}  # fmt: skip


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
