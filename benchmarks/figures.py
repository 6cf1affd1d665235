"""Draw the lanes of single requests, and chapter 06's grid. Needs matplotlib (requirements-dev.txt).

    python -m benchmarks.figures            benchmarks/results -> docs/figures
"""

import sys
from functools import partial
from pathlib import Path

from benchmarks import claims
from benchmarks.tables import median, rows

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "svg.fonttype": "none",
         "svg.hashsalt": "0"}  # fmt: skip


LANES = {  # a timeline's lanes, from the top -> label and color
    "storage": ("storage", "#a3201b"), "load": ("link", "#b3500f"), "compute": ("processor", "#1f5fbf"),
    "save": ("link, out", "#1c7c3c"), "sort": ("a thread sorts", "#a3201b")}  # fmt: skip
ANSWERS = {"02": "02: computed again", "03": "03: K and V", "04": "04: hidden states", "05": "05: a plan, {plan}",
           "06": "06: both ends, storage as fast as computing"}  # fmt: skip
PROJECTED = "#8b5fd3"


def lanes(axes, each: list[dict]):
    """Draw each row's lanes until its first token, the link above the processor; waiting time is hatched.

    A row that takes far longer than the others is cut off at the right edge."""
    *_, second, longest = sorted([each[0]["end_ms"], *(row["end_ms"] for row in each)])
    most, place, ticks = 1.25 * min(longest, 1.5 * second), 0.0, {}
    for row in each:
        end, begin = min(row["end_ms"], most), row.get("begin_ms", 0.0)
        axes.text(0, place - 0.25, row["said"], fontsize=9, fontweight="bold")
        for lane, (name, color) in LANES.items():
            spans = [(span, span["start_ms"] - begin, min(span["end_ms"] - begin, end)) for span in row["spans"] if span["lane"] == lane]
            if not (spans := [span for span in spans if -1 < span[1] < end]):  # leave out spans that began earlier
                continue
            axes.broken_barh([(0, end)], (place, 0.8), facecolor="white", edgecolor="#b9c0ca", hatch="////", linewidth=0.5)
            for span, start, stop in sorted(spans, key=lambda one: one[1] - one[2]):  # draw long spans first, so that spans inside them stay visible
                kind = PROJECTED if lane == "compute" and span["label"].startswith("layer") else color
                axes.broken_barh([(start, stop - start)], (place, 0.8), facecolor=kind, edgecolor="white", linewidth=0.4)
            ticks[place + 0.4] = name
            place += 1
        words = f" first token at {row['end_ms']:.0f} ms{row.get('spread', '')}" if "ttft_ms" in row else ""
        style = dict(ha="left") if row["end_ms"] <= most else dict(ha="right", color="white")
        axes.text(end, place - 0.6, words, fontsize=9, va="center", **style)
        place += 0.9
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set(xlim=(0, most), ylim=(place - 0.8, -0.9), xlabel="ms (hatched: waits; violet: projects hidden states)")
    axes.figure.set_figheight(0.9 + 0.22 * place)


def asked(found: list[dict], chapters=tuple(ANSWERS)) -> dict[str, list[dict]]:
    """Return one panel: the rows of part `lanes` of these chapters, each drawn in its median round."""
    each = [row for row in rows(found, "lanes") if row["chapter"] in chapters]
    spread = " ({min:.0f} to {max:.0f})".format_map  # of TTFT over the rounds
    return {"": [dict(row, said=ANSWERS[row["chapter"]].format_map(row), end_ms=median(row["ttft_ms"]), spread=spread(row["ttft_ms"])) for row in each]}


def prefetched(found: list[dict]) -> dict[str, list[dict]]:
    """Return one panel: the last round under two prefetch policies of chapter 07."""
    each = [row for row in rows(found, "policies", model="random:long", r=1, guard=False) if "lanes" in row]
    return {"": [dict(one, said=way, end_ms=one["ttft_ms"]) for row in each[-1:] for way, one in row["lanes"].items()]}


def decoded(found: list[dict]) -> dict[str, list[dict]]:
    """Return one panel: a decode step with K and V only, with activations only, and with both."""
    policies = [row["policies"] for row in rows(found, "grid", f=1.25)][-1:]
    each = {name: row[name]["spans"] for row in policies for name in ("kv-only", "act-only", "hybrid") if row[name].get("spans")}
    return {"": [dict(said=name, spans=spans, end_ms=max(span["end_ms"] for span in spans)) for name, spans in each.items()]}


def saved(found: list[dict]) -> dict[str, list[dict]]:
    """Return one panel: the last three transfers of hidden states, and the steps that run beside them."""
    for row in (each := rows(found, "saving")):
        begin, *_, last = [span for span in row["spans"] if span["lane"] == "save"][-3:]
        begin_ms = begin["start_ms"] - 2 * row["tbt_ms"]
        row.update(said=f"{row['at_once']} requests", begin_ms=begin_ms, end_ms=last["end_ms"] + row["tbt_ms"] - begin_ms)
    return {"": each}


def by_model(found: list[dict]) -> dict[str, list[dict]]:
    """Return a panel for each model: the rows of chapter 06's grid behind 1,024 tokens."""
    every = rows(found, "grid", history_tokens=1024)
    return {model: [row for row in every if row["model"] == model] for model in dict.fromkeys(row["model"] for row in every)}


def both_ends(axes, each: list[dict]):
    """Draw TTFT over the bound against loading / computing, for computing, loading and both."""
    cells = {row["r"]: row for row in each if row["share"] == 1.0}
    for way, colour in dict(compute="#707070", load="#0072B2", both="#E69F00").items():
        over = [median(cells[ratio]["ttft_ms"][way]) / cells[ratio]["bound_ms"] for ratio in sorted(cells)]
        axes.plot(sorted(cells), over, marker="o", markersize=4, label=way, color=colour)
    axes.axhline(1, color="#222222", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="loading / computing")
    axes.set_xticks(sorted(cells), [f"{ratio:g}" for ratio in sorted(cells)])
    axes.legend(fontsize=8, frameon=False)


PICTURES = {  # file -> benchmark, title, (results) -> panels by title, (axes, rows): draws one panel
    "lanes": ("planned", "One question behind 1,024 tokens that the device has evicted", asked, lanes),
    "03_lanes": ("planned", "03: layer by layer, the question behind it", partial(asked, chapters=("02", "03")), lanes),
    "04_lanes": ("planned", "04: half of the bytes, and a projection of each layer", partial(asked, chapters=("03", "04")), lanes),
    "04_saving": ("planned", "04: sixteen decode, and their states leave", saved, lanes),
    "05_lanes": ("planned", "05: neither lane waits", partial(asked, chapters=("04", "05")), lanes),
    "06_lanes": ("planned", "06: from both ends", partial(asked, chapters=("02", "06")), lanes),
    "07_lanes": ("tiered", "07: storage as fast as computing, under two policies", prefetched, lanes),
    "08_lanes": ("hybrid_blocks", "08: one decode step under three policies (CAPTURE, Figure 1)", decoded, lanes),
    "06_bidirectional": (
        "both_ends", "06: TTFT over the bound, against how long loading takes, behind 1,024 tokens", by_model, both_ends),
}  # fmt: skip


def drawn(results: list[dict], title: str, panels, draw):
    """Return a figure with one panel for each entry of panels(results); None if all are empty."""
    import matplotlib.pyplot as plot

    if not any((each := panels(results)).values()):
        return None
    figure, axes = plot.subplots(1, len(each), figsize=(9, 3.6), squeeze=False, layout="constrained")
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
            figure = drawn(results.get(f"{benchmark}-cpu", {"found": []})["found"], *how)
            if figure:
                figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None, "Creator": None})
            said = f"docs/figures/{name}.svg is written" if figure else f"python -m benchmarks.{benchmark} has not been run"
            print(f"{name}: {said}")


if __name__ == "__main__":
    main()
