"""The results of `python -m benchmarks` as pictures.

    python -m benchmarks.figures                                        benchmarks/results/cpu.json -> benchmarks/results/cpu/
    python -m benchmarks.figures benchmarks/results/nvidia-h200.json

One file for each question and model:
    restoration       how long a history takes to come back, against its length, by every method
    ttft              the first token behind the longest history, by every method
    bubbles           how long link and processor are idle meanwhile
    throughput        decoding a large batch with what chapter 08's policies keep, and what the bound allows
    conversations     time to first token in the matrix of all chapters and their peers, half of the requests and the slowest
    documents         the same against how unequal the documents' popularity is
and docs/figures/06_bidirectional.svg from both_ends-DEVICE.json beside the results, if that is there:
    both_ends         where only computing, only loading and both of them win, against how slow storage is (chapter 06)
and docs/figures/09_tensor_parallel.svg from ranks-DEVICE.json:
    ranks             what the link takes and what a user waits, against the number of ranks (chapter 09)
Each is drawn from the results alone, so that the same results give the same bytes. A figure whose part is missing, or failed, is
left out, and that is said. Text stays text, colours are Okabe and Ito's, which differ for colour-blind readers too, and every
picture is 720 pixels wide.
"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import claims  # noqa: E402

NEEDS = "Figures need matplotlib: pip install -r requirements-dev.txt."
WIDTH = 7.5                                                     # inches: 720 pixels in a browser
STYLE = {
    "svg.hashsalt": "figures", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif", "axes.titlesize": 11.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#888888", "axes.labelcolor": "#333333", "xtick.color": "#555555", "ytick.color": "#555555",
    "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "axes.axisbelow": True, "lines.linewidth": 1.8,
    "lines.markersize": 6, "legend.frameon": False, "axes.formatter.use_mathtext": False}
# Of each chapter: colour and marker
LOOKS = {"01": ("#707070", "o"), "02": ("#56B4E9", "s"), "03": ("#0072B2", "^"), "04": ("#E69F00", "D"), "05": ("#D55E00", "v"),
         "06": ("#009E73", "P"), "07": ("#CC79A7", "X"), "08": ("#000000", "*")}
PEERS = (("#707070", "1"), ("#303030", "2"), ("#a0a0a0", "3"), ("#505050", "4"))
POLICIES = {"hybrid": ("#D55E00", "o"), "kv-only": ("#0072B2", "^"), "act-only": ("#E69F00", "D"), "static": ("#009E73", "s")}
LINK, PROCESSOR = "#0072B2", "#D55E00"


class Nothing(ValueError):
    """There is nothing to draw; the message says why."""


# What all figures share -------------------------------------------------------------------------------------------

def canvas(title: str, note: str, height: float = 4.2, left: float = 0.1, right: float = 0.74, above: float = 0.7):
    """-> (figure, axes). The title stands above, `note` (what was measured, on what) below it, both at the left edge; `above`:
    inches over the axes."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left, 0.55 / height, right - left, 1 - (0.55 + above) / height))
    figure.text(0.015, 1 - 0.27 / height, title, fontsize=11.5, fontweight="bold", color="#222222")
    figure.text(0.015, 1 - 0.50 / height, note, fontsize=9, color="#666666")
    return figure, axes


def look(name: str, peers: list[str] = ()) -> dict:
    """How a method, or a system of the matrix, is drawn: by its chapter's number, or as a peer."""
    number = re.search(r"\b0[1-8]\b", name)
    colour, marker = LOOKS[number[0]] if number else PEERS[list(peers).index(name) % len(PEERS) if name in peers else 0]
    return dict(color=colour, marker=marker, linestyle="-" if number else "--")


def plain(axis, values):
    """Ticks at these values and nowhere else, written out."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter([number(value) for value in values]))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def round_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten between the two; only 1 where that would be many, more where few."""
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        values = [digit * 10.0 ** power for power in range(-6, 10) for digit in digits]
        found = [value for value in values if low <= value <= high]
        if len(found) >= 4:
            break
    return found


def log_axis(axes, which: str, values: list[float], room: float = 1.25):
    low, high = min(values) / room, max(values) * room
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    plain(getattr(axes, f"{which}axis"), round_ticks(low, high))


def label_ends(axes, ends: list[tuple[float, float, str, str]], gap: float = 13.0):
    """Write each line's name right of its last point (x, y, text, colour), at least `gap` points apart, with a thin line to the
    point where the name had to move. Call it when the limits are set."""
    placed = sorted(((axes.transData.transform((x, y)), (x, y), text, colour) for x, y, text, colour in ends),
                    key=lambda one: one[0][1])
    scale = 72 / axes.figure.dpi                                # points of a pixel
    heights = [at[1] * scale for at, *_ in placed]
    for _ in range(200):                                        # push neighbours apart, both by half
        for lower in range(len(heights) - 1):
            missing = gap - (heights[lower + 1] - heights[lower])
            if missing > 1e-3:
                heights[lower] -= missing / 2
                heights[lower + 1] += missing / 2
    edge = axes.transAxes.transform((1, 0))[0]
    for (at, point, text, colour), height in zip(placed, heights):
        axes.annotate(text, point, xytext=((edge - at[0]) * scale + 18, height - at[1] * scale), textcoords="offset points",
                      color=colour, va="center", fontsize=9, annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=colour, linewidth=0.6, shrinkA=1, shrinkB=5, relpos=(0, 0.5)))


def error_bars(spreads: list[dict]) -> list[list[float]]:
    """From the median down to the least and up to the most."""
    return [[one["median"] - one["min"] for one in spreads], [one["max"] - one["median"] for one in spreads]]


def rounds(one: dict) -> str:
    count = len(one["samples"])
    return f"median of {count} rounds, bars: least to most" if count > 1 else "one round"


def link_of(found: dict) -> str:
    link = found["link"]
    if isinstance(link, str):
        return link
    return f"{'modelled ' * link['modelled']}link, {link['gbps']:.3g} GB/s"


def conditions(found: dict, *more: str) -> str:
    """What a figure's note says: model, dtype, link, and more."""
    return "; ".join((f"{found['model']}, {found['dtype']}", link_of(found), *more))


# Restoration ------------------------------------------------------------------------------------------------------

def restoration(found: dict):
    """Restoration time against history, every method that restores."""
    rows = [row for row in found["rows"] if row["restoration_ms"] and row["restoration_ms"]["median"] > 0]
    histories = sorted({row["history_tokens"] for row in rows})
    figure, axes = canvas("How long a history takes to come back", conditions(found, rounds(rows[0]["restoration_ms"])), 4.6)
    ends = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = sorted((row for row in rows if row["method"] == method), key=lambda row: row["history_tokens"])
        at, times = [row["history_tokens"] for row in line], [row["restoration_ms"] for row in line]
        middle = [one["median"] for one in times]
        axes.errorbar(at, middle, error_bars(times), elinewidth=0.8, **look(method))
        ends.append((at[-1], middle[-1], method, look(method)["color"]))
    log_axis(axes, "y", [one for row in rows for one in (row["restoration_ms"]["min"] or row["restoration_ms"]["median"],
                                                         row["restoration_ms"]["max"])])
    log_axis(axes, "x", histories, 1.12)
    plain(axes.xaxis, histories)
    axes.set_xlabel("History, tokens")
    axes.set_ylabel("Restoration time, ms")
    label_ends(axes, ends)
    return figure


def longest(found: dict) -> list[dict]:
    history = max(row["history_tokens"] for row in found["rows"])
    return [row for row in found["rows"] if row["history_tokens"] == history]


def ttft(found: dict):
    """TTFT of every method behind the longest history."""
    rows = longest(found)[::-1]
    figure, axes = canvas(f"First token behind {rows[0]['history_tokens']:,} tokens",
                          conditions(found, rounds(rows[0]["ttft_ms"])), 3.9, left=0.26, right=0.97)
    times = [row["ttft_ms"] for row in rows]
    axes.barh(range(len(rows)), [one["median"] for one in times], xerr=error_bars(times), height=0.62,
              color=[look(row["method"])["color"] for row in rows], error_kw=dict(elinewidth=1, ecolor="#222222"))
    most = max(one["max"] for one in times)
    for at, one in enumerate(times):
        axes.annotate(f"{number(one['median'])} ms", (one["max"], at), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=9, color="#333333")
    axes.set_xlim(0, most * 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Time to first token, ms")
    return figure


def bubbles(found: dict):
    """Idle shares of a restoration, every method that loads, behind the longest history."""
    rows = [row for row in longest(found) if row["load_bubble"]][::-1]
    if not rows:
        raise Nothing("no method loaded anything")
    figure, axes = canvas(f"Who is idle while {rows[0]['history_tokens']:,} tokens come back",
                          conditions(found, rounds(rows[0]["load_bubble"])), 4.1, left=0.26, right=0.95, above=0.95)
    for what, label, colour, up in (("load_bubble", "link or storage", LINK, 0.19),
                                    ("compute_bubble", "processor", PROCESSOR, -0.19)):
        shares = [{name: 100 * row[what][name] for name in ("median", "min", "max")} for row in rows]
        axes.barh([at + up for at in range(len(rows))], [one["median"] for one in shares], xerr=error_bars(shares), height=0.34,
                  color=colour, label=label, error_kw=dict(elinewidth=1, ecolor="#222222"))
        for at, one in enumerate(shares):
            axes.annotate(f"{one['median']:.0f} %", (one["max"], at + up), xytext=(5, 0), textcoords="offset points", va="center",
                          fontsize=8.5, color=colour)
    axes.set_xlim(0, 110)
    axes.set_xticks(range(0, 101, 20))
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Share of the restoration in which it was idle, %")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=2, fontsize=9, borderaxespad=0)
    return figure


# Chapter 08 ------------------------------------------------------------------------------------------------------

def throughput(grid: dict):
    """Chapter 08's policies over the cells of one grid, with the bound; of the whole model."""
    cells, at, places, batches = grid["cells"], 0.0, [], {}
    for before, cell in zip([None, *cells], cells):
        at += 1.6 if before and before["batch"] != cell["batch"] else 1.0
        places.append(at)
        batches.setdefault(cell["batch"], []).append(at)
    middle = cells[0]["gain"]["static"]
    figure, axes = canvas("Decoding with all weights in host memory", f"{grid['model']}, {grid['dtype']}; link like an "
                          f"{grid['platform'].upper()}'s, {grid['link_bytes_per_second'] / 1e9:.3g} GB/s; "
                          f"{rounds(middle).split(',')[0]}", 4.8, left=0.1, right=0.97, above=0.95)
    values = []
    for policy, (colour, marker) in POLICIES.items():
        for batch, numbers in batches.items():
            line = [cell["policies"][policy]["whole_model_tokens_per_second"] for cell in cells if cell["batch"] == batch]
            axes.plot(numbers, line, color=colour, marker=marker, markersize=5, linewidth=1.2, alpha=0.9,
                      label=policy if batch == cells[0]["batch"] else None)
            values += line
    for place, cell in zip(places, cells):
        mine = cell["policies"]["hybrid"]
        share = mine["whole_model_tokens_per_second"] / mine["tokens_per_second"]
        bound = cell["batch"] / cell["bound_seconds"]["hybrid"] * share
        axes.plot([place - 0.35, place + 0.35], [bound, bound], color="#222222", linewidth=1.4,
                  label="bound of hybrid" if place == places[0] else None)
        values.append(bound)
    log_axis(axes, "y", values, 1.2)
    axes.set_xticks(places, [f"{cell['context']:,}" for cell in cells])
    axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
    for batch, numbers in batches.items():
        axes.annotate(f"batch of {batch}", (sum(numbers) / len(numbers), 0), xycoords=("data", "axes fraction"), xytext=(0, 6),
                      textcoords="offset points", ha="center", fontsize=9, color="#666666")
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("Context of each request, tokens")
    axes.set_ylabel("Tokens per second")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=5, fontsize=9, borderaxespad=0, columnspacing=1.2)
    return figure


# The matrix -------------------------------------------------------------------------------------------------------

def measured(systems: list[dict]) -> list[dict]:
    return [system for system in systems if system.get("ttft_ms")]


def conversations(found: dict):
    """TTFT of each system: half of the requests are faster than the first mark, 95 and 99 of 100 than the others."""
    systems = measured(found["systems"])[::-1]
    peers = [system["system"] for system in systems if system["kind"] == "peer"]
    figure, axes = canvas("Conversations: time to first token", conditions(found),
                          1.9 + 0.32 * len(systems), left=0.35, right=0.97, above=0.95)
    values = []
    for at, system in enumerate(systems):
        times, colour = [system["ttft_ms"][share] for share in ("p50", "p95", "p99")], look(system["system"], peers)["color"]
        axes.plot(times, [at] * 3, color=colour, linewidth=1.2, alpha=0.6)
        for value, marker in zip(times, "o|D"):
            axes.plot([value], [at], color=colour, marker=marker, linestyle="", markeredgewidth=2 if marker == "|" else 1,
                      markerfacecolor=colour if marker == "o" else "white", markersize=8 if marker == "|" else 6)
        values += times
    for marker, label in zip("o|D", ("p50", "p95", "p99")):
        axes.plot([], [], color="#555555", marker=marker, linestyle="", label=label, markeredgewidth=2 if marker == "|" else 1,
                  markerfacecolor="#555555" if marker == "o" else "white")
    log_axis(axes, "x", values)
    axes.set_yticks(range(len(systems)), [system["system"] for system in systems])
    for text, system in zip(axes.get_yticklabels(), systems):
        text.set_fontstyle("italic" if system["kind"] == "peer" else "normal")
    axes.set_ylim(-0.6, len(systems) - 0.4)
    axes.set_xlabel("Time to first token, ms (italics: what a user would otherwise pick)")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=3, fontsize=9, borderaxespad=0)
    return figure


def documents(found: dict):
    """TTFT against the Zipf exponent of the documents' popularity."""
    skews = sorted(found["skews"], key=lambda skew: skew["zipf"])
    times, peers = {}, []
    for skew in skews:
        for system in measured(skew["systems"]):
            times.setdefault(system["system"], []).append((skew["zipf"], system["ttft_ms"]["p50"]))
            if system["kind"] == "peer" and system["system"] not in peers:
                peers.append(system["system"])
    figure, axes = canvas("Documents: time to first token, by how unequal their popularity is",
                          conditions(found, "half of the requests are faster"), 4.8, right=0.66)
    for name, points in times.items():
        axes.plot(*zip(*points), **look(name, peers))
    log_axis(axes, "y", [value for points in times.values() for _, value in points])
    axes.set_xticks([skew["zipf"] for skew in skews])
    axes.set_xlabel("Zipf exponent (0: all documents alike)")
    axes.set_ylabel("Time to first token, ms")
    label_ends(axes, [(*points[-1], name, look(name, peers)["color"]) for name, points in times.items()])
    return figure


# Chapter 06 ------------------------------------------------------------------------------------------------------

def both_ends(grids: list[dict]):
    """TTFT of only computing, of only loading and of both over their bound, against how long loading takes; a panel a model."""
    figure, first = canvas("Where computing, loading and both of them win", "Storage from four times as fast as computing to 16 times "
                           f"as slow; medians of {grids[0]['rows'][0]['rounds']} rounds", 4.4)
    first.remove()
    ways = {"compute": ("only computing", "#707070", "o"), "load": ("only loading", "#0072B2", "^"), "both": ("both", "#009E73", "P")}
    for at, grid in enumerate(grids):
        most = max(row["history_tokens"] for row in grid["rows"])
        rows = {row["r"]: row for row in grid["rows"] if row["history_tokens"] == most and row["share"] == 1.0}
        ratios, axes = sorted(rows), figure.add_axes((0.09 + 0.48 * at, 0.14, 0.41, 0.58))
        for way, (label, colour, marker) in ways.items():
            times = [rows[ratio]["ttft_ms"][way] for ratio in ratios]
            times = [one["median"] if isinstance(one, dict) else one for one in times]
            over = [time / rows[ratio]["bound_ms"] for ratio, time in zip(ratios, times)]
            axes.plot(ratios, over, color=colour, marker=marker, markersize=5, label=label)
        axes.axhline(1, color="#222222", linewidth=1)
        log_axis(axes, "x", ratios)
        plain(axes.xaxis, ratios)
        log_axis(axes, "y", [1, 8], 1.1)
        axes.set_xlabel("time to load / time to compute")
        axes.set_ylabel("TTFT / bound" if at == 0 else "")
        axes.set_title(f"{grid['model']}, {most:,} tokens", fontsize=10)
        if at == 0:
            figure.legend(loc="lower left", bbox_to_anchor=(0.07, 0.79), ncols=3, fontsize=9, borderaxespad=0)
    return figure


# Chapter 09 ------------------------------------------------------------------------------------------------------

def ranks(found: list[dict]):
    """What the link takes and what a user waits, against the number of ranks; a panel a model."""
    figure, first = canvas("Divided over ranks", "A link so slow that one rank takes half a second for K and V; two cores, a thread "
                           "for each rank", 4.4)
    first.remove()
    ways = {"kv": ("K and V", "#0072B2", "^"), "states": ("hidden states", "#009E73", "P")}
    for at, one in enumerate(found):
        axes = figure.add_axes((0.09 + 0.48 * at, 0.14, 0.41, 0.58))
        for keep, (label, colour, marker) in ways.items():
            rows = sorted((row for row in one["rows"] if row["keep"] == keep), key=lambda row: row["ranks"])
            counts = [row["ranks"] for row in rows]
            axes.plot(counts, [row["ttft_ms"]["median"] for row in rows], color=colour, marker=marker, label=f"{label}: TTFT")
            axes.plot(counts, [row["link_ms"] for row in rows], color=colour, linestyle=":", label="what the link takes")
        log_axis(axes, "x", counts)
        plain(axes.xaxis, counts)
        log_axis(axes, "y", [min(row["link_ms"] for row in rows), max(row["ttft_ms"]["median"] for row in one["rows"])])
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms" if at == 0 else "")
        axes.set_title(f"{one['model']}, {one['rows'][0]['history_tokens']:,} tokens", fontsize=10)
        if at == 0:
            figure.legend(loc="lower left", bbox_to_anchor=(0.07, 0.79), ncols=2, fontsize=9, borderaxespad=0)
    return figure


# All of them ------------------------------------------------------------------------------------------------------

# name of the figure, the parts' names begin with, what draws it, which entry of a benchmark with several claims
FIGURES = [("restoration", "restoration", restoration, None), ("ttft", "restoration", ttft, None),
           ("bubbles", "restoration", bubbles, None), ("throughput", "hybrid_blocks", throughput, None),
           ("conversations", "matrix-conversations", conversations, None),
           ("documents", "matrix-documents", documents, None)]


def entries(results: dict, begins: str, claim: str | None) -> list[tuple[str, dict]]:
    """What the parts whose names begin so have found -> (what tells one figure from another, what it draws)."""
    found = []
    for name, part in results["parts"].items():
        if (name + "-").startswith(begins + "-") and part.get("found") and not part.get("error"):
            whole = part["found"]
            if claim:
                more = {"dtype": whole.get("dtype")}
                found += [(slug(entry["model"]), {**more, **entry}) for entry in whole["found"] if entry["claim"] == claim]
            elif "grids" in whole:
                found += [(f"{slug(grid['model'])}-{grid['platform']}", grid) for grid in whole["grids"]]
            else:
                found.append((slug(whole["model"]), whole))
    return found


def slug(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model.removeprefix("random:")).strip("-")


def why_none(results: dict, begins: str, claim: str | None) -> str:
    """Why there is nothing to draw from these parts."""
    wanted = f"{begins}-{claim}" if claim else begins
    failed = {name: part["error"] for name, part in results["parts"].items()
              if (name + "-").startswith(wanted + "-") and part.get("error")}
    return "; ".join(f"{name} failed: {error}" for name, error in failed.items()) or f"no part {wanted} was run"


def draw(results: dict, folder: Path) -> list[Path]:
    """Draw what `results` (a file that `python -m benchmarks` writes) has parts for -> the files, all of them SVG. Says which
    figures are left out, and why. Without matplotlib it says how to get it, and draws none."""
    try:
        import matplotlib
    except ImportError:
        print(NEEDS)
        return []
    folder, paths = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
        for name, begins, function, claim in FIGURES:
            found = entries(results, begins, claim)
            if not found:
                print(f"Left out {name}: {why_none(results, begins, claim)}.")
            for model, entry in found:
                path = folder / f"{name}-{model}.svg"
                if path in paths:
                    path = path.with_name(f"{path.stem}-{entry.get('dtype')}.svg")
                try:
                    figure = function(entry)
                except Nothing as reason:
                    print(f"Left out {path.stem}: {reason}.")
                    continue
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    print(f"Left out {path.stem}: its part lacks what is drawn ({type(error).__name__}: {error}).")
                    continue
                figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
                paths.append(path)
    names = tuple(f"{name}-" for name, *_ in FIGURES)
    for old in set(folder.glob("*.svg")) - set(paths):
        if old.name.startswith(names):                          # of other results: it would contradict those beside it
            old.unlink()
    return paths


OF_CHAPTERS = {"06_bidirectional": ("both_ends", "grid", both_ends), "09_tensor_parallel": ("ranks", "ranks", ranks)}


def draw_chapters(path: Path, folder: Path) -> list[Path]:
    """The figures of chapters, from the results of their own benchmarks beside `path`."""
    import matplotlib
    written = []
    for chapter, (benchmark, claim, make) in OF_CHAPTERS.items():
        own = path.with_name(f"{benchmark}-{path.name}")
        if own.exists():
            found = [entry for entry in json.loads(own.read_text())["found"] if entry["claim"] == claim]
            written.append(folder / f"{chapter}.svg")
            with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
                make(found[:2]).savefig(written[-1], format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return written


def main():
    path, results = claims.read_results(__doc__)
    paths = draw(results, path.with_suffix(""))
    paths += draw_chapters(path, path.parent.parent.parent / "docs/figures") if paths else []
    for each in paths:
        print(f"written: {each}")
    if not paths:
        sys.exit(1)


if __name__ == "__main__":
    main()
