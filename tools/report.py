"""The tables of README.md and docs/measured.md, written from what the benchmarks measured.

    python -m tools.report             write them
    python -m tools.report --check     write nothing; name those that are out of date, and exit with 1

A part of a file lies between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`, where NAME is one of PARTS: the function
that makes the part's text of the JSON files in benchmarks/results/. So a number that was measured is typed nowhere, and when a
benchmark has run again this command alone changes the pages.
"""
import argparse
import importlib
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from benchmarks import claims as benchmark_claims  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "measured.md"]
PART = re.compile(r"^<!-- begin ([\w-]+) -->\n(.*?)^<!-- end \1 -->$", re.M | re.S)



# 1. Numbers and tables -------------------------------------------------------------------------------------------

def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def median(figures: dict, unit: str = "") -> str:
    return number(figures["median"]) + unit


def spread(figures: dict, unit: str = "") -> str:
    """The median, the smallest and the largest; of one sample, that."""
    if len(figures["samples"]) == 1:
        return median(figures, unit)
    return f"{number(figures['median'])}{unit} ({number(figures['min'])} to {number(figures['max'])})"


def milliseconds(figures: dict | float) -> str:
    """The median, or a number."""
    value = figures["median"] if isinstance(figures, dict) else figures
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 20 else f"{value:,.0f} ms"


def table(header: str, rows: list[list]) -> str:
    """Columns' names, divided by |, and the cells."""
    names = [name.strip() for name in header.split("|")]
    assert all(len(row) == len(names) for row in rows), header
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def bullets(*texts: str) -> str:
    return "\n".join(f"- {text}" for text in texts)


def listed(texts) -> str:
    """a, b and c."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def share(count: int, of: int) -> str:
    return f"all {of}" if count == of else f"{count} of {of}"


def conditions(*files: dict) -> str:
    """On what the numbers of these files were measured, and how to measure them again."""
    lines = []
    for file in files:
        rounds = f", {file['rounds']} rounds" if "rounds" in file else ""
        dtype = f", {file['dtype']}" if "dtype" in file else ""
        lines.append(f"`{file['command']}`: {file['threads']} threads of an {file['processor']} ({file['cpu_capability']})"
                     f"{dtype}, PyTorch {file['torch']}{rounds}")
    return "Measured by " + "; ".join(lines) + "."


def entry(file: dict, claim: str, model: str | None = None) -> dict:
    """What a benchmark found about one claim on one model."""
    return next(found for found in file["found"] if found["claim"] == claim and model in (None, found["model"]))


def entries(file: dict, claim: str) -> list[dict]:
    return [found for found in file["found"] if found["claim"] == claim]


def at(rows: list[dict], tokens: int, **wanted) -> dict:
    return next(row for row in rows if row["history_tokens"] == tokens and all(row[name] == wanted[name] for name in wanted))


# 2. The parts ----------------------------------------------------------------------------------------------------

def chapters(results: dict) -> str:
    """README.md: each chapter in one row, and the result that says most about it."""
    cases = results["baseline-cpu"]["cases"]
    case = next(case for case in cases if case["model"] == "classroom")
    tiered = entry(results["tiered-cpu"], "mix", "random:small")["rows"]
    (many,) = results["engine-cpu"]["found"]["throughput classroom"]
    rows = [row for row in entry(results["planned-cpu"], "ttft", "random:small")["rows"] if row["history_tokens"] == 1984]
    loaded = rows[1]["computed_ms"] / rows[1]["ttft_ms"]["03"]["median"]
    slow, even = (row["over_03"]["04"]["median"] for row in rows[:2])
    mixes = [row["over_03"]["05"]["median"] for row in rows]
    both = "not measured yet"
    if "both_ends-cpu" in results:
        row = at(entry(results["both_ends-cpu"], "grid", "classroom")["rows"], 1984, share=1.0, r=1)
        both = (f"where both are equally fast, the first token comes {median(row['better_over_both'])}x as soon as by the "
                "better of the two, behind 1,984 tokens (classroom)")
    blocks = [row["policies"] for row in entry(results["hybrid_blocks-cpu"], "grid")["rows"] if row["f"] == 1.25]
    best = {policy: max(row[policy]["over"]["median"] for row in blocks) for policy in ("kv-only", "act-only")}
    rows = [
        ("01_baseline", "What does it cost to keep nothing?", "the yardstick of all the papers below",
         "nothing: everything is computed again",
         f"writes tokens {median(case['tbt_ratio'])}x as fast as `transformers` (classroom)"),
        ("02_paged_kv", "How do many requests share one memory?",
         "[PagedAttention](https://arxiv.org/abs/2309.06180) (SOSP '23)",
         "KV blocks on the device, shared by prefix: a block table points at them",
         f"16 requests at once: {median(many['ratio'])}x the tokens per second of chapter 01 (classroom)"),
        ("03_cpu_offload", "What if the device is full?",
         "[CachedAttention](https://www.usenix.org/conference/atc24/presentation/gao-bin-cost) (ATC '24)",
         "KV blocks in host memory: a copy over the link, layer by layer, while the layers before are computed",
         f"behind {rows[0]['history_tokens']:,} tokens the first token comes {number(loaded)}x sooner than by computing "
         "(random:small)"),
        ("04_hidden_state_cache", "Can half the bytes do?", "[HCache](https://arxiv.org/abs/2410.05004) (EuroSys '25)",
         "each layer's input, in host memory and in files: projected to K and V again, while the next layer is on its way",
         f"behind {rows[0]['history_tokens']:,} tokens the first token comes {number(slow)}x as soon as with K and V where the "
         f"link is the bottleneck, {number(even)}x where projecting takes as long as the transfer (random:small)"),
        ("05_bubble_free", "Why should link or processor wait?", "HCache, section 4.1",
         "of each layer what a plan says: recomputed, projected or loaded, so that the question is through first",
         f"behind {rows[0]['history_tokens']:,} tokens the first token comes {number(min(mixes))} to {number(max(mixes))}x as "
         "soon as with K and V, over three links (random:small)"),
        ("06_bidirectional", "What if storage is as slow as computing?",
         "[Cake](https://arxiv.org/abs/2410.03065) (ICML '25)",
         "KV chunks in storage: computed from the front while the last are loaded first, until both meet", both),
        ("07_tiered_storage", "How do many engines share what each has read?",
         "[HiCache](https://docs.sglang.io/advanced_features/hicache_design.html)",
         "KV pages on the device, in host memory and in shared storage: a radix tree, and reading ahead under a policy",
         f"against the device alone: TTFT lower by {tiered[0]['lower']['median']:.0%}, {median(tiered[1]['throughput'])}x the "
         "throughput of four at once (random:small)"),
        ("08_hybrid_blocks", "What if not even the weights fit?", "[CAPTURE](https://github.com/casys-kaist/Capture)",
         "KV blocks and activation blocks in host memory, and the weights: some loaded, some rebuilt, in every decode step",
         f"up to {number(best['kv-only'])}x the throughput of K and V only, {number(best['act-only'])}x of activations "
         "only (random:small)"),
    ]
    if "ranks-cpu" in results:
        at_two = {row["keep"]: row for row in entry(results["ranks-cpu"], "ranks", "classroom")["rows"] if row["ranks"] == 2}
        rows.append((
            "09_tensor_parallel", "Who keeps what when the model is divided?", "HCache, section 5; HiCache",
            "what 03 and 04 keep, divided over ranks: disjoint reads and an all-gather; ranks agree on what is there",
            f"on two ranks {at_two['states']['share_of_one_rank']:.0%} of the bytes over each link, and "
            f"{at_two['states']['agreements']:.0f} agreements a restoration (classroom)"))
    return table("chapter | question | paper | what is kept, and how it comes back | measured", [
        [f"[`{name}.py`]({name}.py)", question, paper, kept, found] for name, question, paper, kept, found in rows])


def planned(results: dict) -> str:
    """Chapters 03, 04 and 05 on the new engine."""
    file, texts = results["planned-cpu"], []
    for found in file["found"]:
        if found["claim"] == "tbt":
            texts += [f"**{found['model']}**, time between tokens while states are kept, over that of nothing kept:", table(
                "running | nothing kept | K and V (03) | hidden states (04) | chunks dropped",
                [[row["running"], milliseconds(row["tbt_ms"]["nothing"]), spread(row["over_nothing"]["03"]),
                  spread(row["over_nothing"]["04"]), row["dropped"]] for row in found["rows"]])]
            continue
        texts += [f"**{found['model']}**, {found['claim']}:", table(
            "history | link | 03 | 04 | 05 | 04 as soon as 03 | 05 as soon as 03 | plan | 05 / predicted | 05 / bound | computed / 05",
            [[f"{row['history_tokens']:,}", row["link"], *(milliseconds(row["ttft_ms"][name]) for name in ("03", "04", "05")),
              spread(row["over_03"]["04"]), spread(row["over_03"]["05"]), f"`{row['plan']}`",
              *(number(row["ttft_ms"]["05"]["median"] / row[f"{of}_ms"]) for of in ("predicted", "bound")),
              number(row["computed_ms"] / row["ttft_ms"]["05"]["median"])] for row in found["rows"]])]
    return paragraphs(conditions(file), *texts)


def outside(results: dict) -> str:
    """Chapters 02 to 05 as a user sees them."""
    file, texts = results["outside-cpu"], []
    for found in file["found"]:
        texts += [f"**{found['model']}**, {found['claim']}:", OUTSIDE[found["claim"]](found["rows"])]
    return paragraphs(conditions(file), *texts)


def outside_servers(rows: list[dict]) -> str:
    def met(row: dict) -> str:
        return f"{spread(row['of_03']['05'])}: {verdict(row['of_03']['05']['median'] <= row['at_most'])}"
    return table("history | link | 01 | 03 | 04 | 05 | 04 / 03 | 05 / 03 (asked) | found by 03, 04, 05 | plan | 05 / predicted | "
                 "05 / bound | all at rest", [
                     [f"{row['history_tokens']:,}", f"{row['link']} GB/s" if row["link"] != "auto" else "auto",
                      *(milliseconds(row["client_ms"][name]) for name in ("01", "03", "04", "05")), spread(row["of_03"]["04"]),
                      f"{met(row)} (at most {row['at_most']})", ", ".join(str(row["found"][name]) for name in ("03", "04", "05")),
                      " ".join(f"`{plan}`" for plan in row["plans"]),
                      *(spread(row[f"over_{of}"]) if row["plans"] else "" for of in ("predicted", "bound")),
                      f"{row['at_rest']:.0%}"] for row in rows])


def outside_conversations(rows: list[dict]) -> str:
    return table("asked, tokens that the device holds | system | found (there before) | restored tokens | TTFT p50 | p99 | "
                 "TTFT over 03's, median | answers equal", [
                     [f"{row['what']}: {row['device_tokens']:,} of {row['tokens']:,}" * (name == "no cache"), name,
                      f"{found['found']:.1%} ({row['could_be_found']:.1%})", f"{found['restored']:,}",
                      *(milliseconds(found["ttft_ms"][share]) for share in ("p50", "p99")),
                      f"{row['of_03'][name]['median']:.2f}", share(found["equal"], row["requests"])]
                     for row in rows for name, found in row["systems"].items()])


def outside_beside(rows: list[dict]) -> str:
    return table("system | TBT, mean | of all on the device | of K and V (03) | p99 | bound of the mean | processor | "
                 "histories that came back, restored | bytes a history | TTFT of a history", [
                     [row["system"], milliseconds(row["tbt_mean_ms"]), spread(row["over_02"]), spread(row["over_03"]),
                      milliseconds(row["tbt_p99_ms"]), "" if row["bound_ms"] is None else milliseconds(row["bound_ms"]),
                      f"{row['processor']:.0%}", f"{row['came_back']}, {row['restored']}",
                      f"{row['bytes_in'] / max(1, row['restored']):,.0f}", milliseconds(row["ttft_ms"])] for row in rows])


def outside_arrivals(rows: list[dict]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    rates = {row["of_saturation"]: row for row in rows}
    by = {(row["of_saturation"], row["system"]): row for row in rows}

    def cell(row: dict) -> str:
        waiting = f"; {row['unanswered']} still wait" if row["unanswered"] else ""
        return f"{milliseconds(row['ttft_ms']['p50'])}, {milliseconds(row['ttft_ms']['p90'])}{waiting}"
    return table("arrivals a second (of saturation), TTFT p50 and p90 | requests | " + " | ".join(systems), [
        [f"{number(row['requests_per_second'])} ({rate:g})", row["requests"], *(cell(by[rate, name]) for name in systems)]
        for rate, row in rates.items()])


OUTSIDE = {"servers": outside_servers, "conversations": outside_conversations, "beside": outside_beside,
           "arrivals": outside_arrivals}


def baseline(results: dict) -> str:
    file, rows = results["baseline-cpu"], []
    for case in file["cases"]:
        for name, peer in case["peers"].items():
            if "not_run" in peer:
                continue
            for chapter, ours in (("01", case), ("02", case["paged"])):
                over = peer["ours_over"][chapter]
                tbt = ours["tbt_ms"]["ours"] if chapter == "01" else ours["tbt_ms"]
                ttft = ours["ttft_ms"]["ours"] if chapter == "01" else ours["ttft_ms"]
                met = over["tbt"]["median"] >= case["claimed_tbt_ratio"] and over["ttft"]["median"] >= 1
                asked = f"1 and {case['claimed_tbt_ratio']}: {verdict(met)}" if name == "dynamic" else ""
                rows.append([f"{case['model']}, {case['dtype']}, {chapter} against {name}", milliseconds(ttft),
                             spread(over["ttft"]), milliseconds(tbt), spread(over["tbt"]), asked,
                             f"{ours['share_of_matrix_rate']:.0%}", f"{ours['share_of_bandwidth']:.0%}",
                             f"{ours['equal_tokens']} of {case['new_tokens']}"])
    unrun = sorted({f"{name} ({peer['not_run']})" for case in file["cases"] for name, peer in case["peers"].items()
                    if "not_run" in peer})
    return paragraphs(conditions(file), table(
        "model, chapter, cache of `transformers` | TTFT, ours | times as fast | TBT, ours | times as fast | claimed | "
        "TTFT: share of the matrix rate | TBT: share of memory bandwidth | tokens equal", rows),
        f"Not run: {listed(unrun)}." if unrun else "")


def engine(results: dict) -> str:
    """Chapters 02 and 03 on the rebuilt engine."""
    file, rows, texts = results["engine-cpu"], [], []
    found = file["found"]
    by_part = {part: {name.split()[1]: each for name, each in found.items() if name.split()[0] == part}
               for part in ("throughput", "host", "burst", "overhead")}
    for model, (row,) in by_part["throughput"].items():
        rows.append([f"16 requests at once against chapter 01 one after another, tokens per second, {model}",
                     spread(row["ratio"], "x"), f"at least 5x: {verdict(row['ratio']['median'] >= 5)}"])
    for model, each in by_part["burst"].items():
        for row in each:
            what = "from the host (03)" if row["chapter"] == "03" else "computed once (02)"
            rows.append([f"30 questions about one document at once, {what}, TTFT over the document on the device and one of it, {model}",
                         spread(row["ratio"]), f"at most 1.1: {verdict(row['ratio']['median'] <= 1.1)}"])
    for row in (row for each in by_part["overhead"].values() for row in each):
        step = "context" in row
        rows.append([f"a step without the model, per request, {row['running']} running, {row['context']} tokens of context" if step
                     else f"admission with {row['cached_blocks']:,} cached blocks", spread(row["us"], " us"),
                     f"at most 50 us: {verdict(row['us']['median'] <= 50)}" if step else "the same for all"])
    for model, each in by_part["host"].items():
        texts += [f"**{model}**, a question behind a history in host memory:", table(
            "history | restored | link | TTFT | on the device | restoration / bound (at most 1.05) | TTFT / bound (at most 1.05)", [
                [f"{row['history']:,}", f"{row['bytes_restored'] / 1e6:.1f} MB", f"{row['link_gbps']:.3f} GB/s",
                 milliseconds(row["ttft_ms"]), milliseconds(row["device_hit_ms"]), spread(row["restoration_over_bound"]),
                 spread(row["ttft_over_bound"])] for row in each])]
    return paragraphs(conditions(file), table("what | measured | asked", rows), *texts)


def variants(results: dict) -> str:
    """What chapters 04 and 05 leave out because it loses."""
    file = results["variants-cpu"]
    rows = {claim: [(found["model"], row) for found in entries(file, claim) for row in found["rows"]]
            for claim in ("layouts", "saving", "divisions", "directories", "crossover")}

    def ms(way: dict, base: str) -> str:
        return f"{milliseconds(way['ttft_ms'])}, {spread(way[f'ttft_over_{base}'])}"

    def moved(way: dict) -> str:
        return f"{way['bytes'] / 1e6:.1f} MB, {way['projected']} projected"

    def as_said(row: dict) -> bool:
        """A real link is as it is."""
        return row["link"] == "the link as it is" or abs(row["transfer_over_projecting"] / row["said"] - 1) <= 0.1

    # 1. Layouts and saving
    layouts, saving = [], []
    for model, row in rows["layouts"]:
        one, other = row["ways"]["layer-major"], row["ways"]["token-major"]
        reading = f"{number(other['read_gbps'] / one['read_gbps'])}x" if one["read_gbps"] else ""
        layouts.append([f"{model}, {row['history_tokens']:,}, {row['place']}", moved(one), *(
            f"{way['pieces_a_layer']:,} of {way['bytes_a_piece']:,}" for way in (one, other)), milliseconds(one["restore_ms"]),
            spread(other["restore_over_layer-major"]), reading, milliseconds(one["save_ms"]), spread(other["save_over"])])
    for model, row in rows["saving"]:
        ways = row["ways"]
        saving.append([f"{model}, {row['running']} running", milliseconds(ways["nothing"]["tbt_ms"]), *(
            spread(ways[way]["tbt_over_nothing"]) for way in ("two stages", "direct", "direct to a file")),
            f"{ways['two stages']['bytes_out'] / 1e6:.1f} MB, {ways['direct']['copies_out']:,}",
            sum(way["dropped_chunks"] for way in ways.values())])

    # 2. Divisions: a line for each way, a column for each link
    divisions, measured = [], {}
    for model, row in rows["divisions"]:
        measured.setdefault((model, row["history_tokens"]), []).append(row)
    for (model, tokens), links in measured.items():
        for way in links[0]["ways"]:
            cells = [f"`{row['ways'][way]['plan']}`: {ms(row['ways'][way], '05')}; {moved(row['ways'][way])}"
                     if as_said(row) else f"left out: a transfer took {number(row['transfer_over_projecting'])} projections"
                     for row in links]
            divisions.append([f"{model}, {tokens:,}, {way}", *cells])
    alone = [f"{spread(row['ways']['04']['restore_over_03'])} ({model}, {row['history_tokens']:,})"
             for model, row in rows["divisions"] if row["link"] == "computing is the bottleneck" and as_said(row)]
    alike = [way["answered_alike"].split(" of ") for _, row in rows["divisions"] for way in row["ways"].values()]

    # 3. Directories and crossovers
    directories, crossover = [], []
    for model, row in rows["directories"]:
        directories.append([f"{model}, {row['history_tokens']:,}, {row['directories']} of {row['gbps_each']:.3f} GB/s",
                            number(row["reading_over_projecting"]), *(
            f"`{way['plan']}`: {way['read_gbps']:.3f} GB/s, {ms(way, '03')}; {moved(way)}" for way in row["ways"].values())])
    for model, row in rows["crossover"]:
        rates = [f"{each['history_tokens']:,}: {each['restored_per_second']:,.0f}, {each['computed_per_second']:,.0f}"
                 for each in row["lengths"]]
        crossover.append([f"{model}, {row['link']}, {row['gbps']:.3f} GB/s, {row['chapter']}", "; ".join(rates), *(
            f"{tokens:,.0f}" if tokens else "none" for tokens in row["faster_from"].values())])
    links = [row["link"] for row in next(iter(measured.values()), [])]

    def part(words: str, header: str, lines: list) -> str:
        """What was not measured is not named."""
        return f"{words}\n\n{table(header, lines)}" if lines else ""
    return paragraphs(
        conditions(file),
        part("**The layers of a token together** (token-major), against the tokens of a layer (chapter 04); from files that the "
             "operating system was told to forget. Saving: processor time of stage two, 16 that decode a chunk each.",
             "model, history, from | restored | pieces a layer, bytes | token-major | restoration | token-major, times as long | "
             "read, times as fast | saving | token-major, times as long", layouts),
        part("**Saving without the snapshot** (Figure 14; the paper: TBT up to 1.34 times as long where 16 decode): TBT over that of "
             "nothing kept.",
             "model | nothing kept | two stages | direct | direct to a file | kept, in so many direct copies | chunks dropped", saving),
        part("**Other divisions**: plan, TTFT, that over chapter 05's, and what was restored. All ways answered alike in "
             f"{share(sum(int(same) for same, _ in alike), sum(int(of) for _, of in alike))} questions.",
             "model, history, way | " + " | ".join(links), divisions),
        f"Hidden states alone where computing is the bottleneck: restoration over that of K and V {listed(alone)} (the paper: speed "
        "13 % lower)." if alone else "",
        part("**From 1, 2 and 4 directories** (Figure 11 d to f), each as fast as an SSD would be against this processor (on the "
             "paper's figures for 7B, reading takes 3.5, 1.7 and 0.9 of projecting): plan, what was read a second, TTFT, that over K "
             "and V's, and what was restored.",
             "model, history, directories | reading over projecting | K and V (03) | hidden states (04) | planned (05)", directories),
        part("**From which length on restoring is the faster**: tokens a second restored, and computed, by length.",
             "model, link, chapter | tokens: restored, computed | from, measured | from, as estimated", crossover))


def on_paper(results: dict) -> str:
    """What the planner says on the paper's platforms; no result of a benchmark, but computed too."""
    paper = importlib.import_module("tools.on_paper")
    with redirect_stdout(io.StringIO()) as said:
        found = paper.main()
    schedules = [row["name"].replace(", closed form:", "") for row in found["rows"] if ", closed form:" in row["name"]]
    return paragraphs(said.getvalue().strip().splitlines()[-1], "The paper's formula, on its own figures: " + "; ".join(
        f"{schedule} (Table 3: {paper.counts(paper.letters(*paper.PAPER[f'{schedule.split()[0]} schedule']))})"
        for schedule in schedules) + ".")


def both_ends(results: dict) -> str:
    """Chapter 06 on the new engine."""
    file, texts = results.get("both_ends-cpu"), []
    if file is None:
        return "Not measured yet: `python -m benchmarks.both_ends` does."
    for found in file["found"]:
        model, claim, rows = found["model"], found["claim"], found["rows"]
        if claim == "grid":
            cells = [[f"{row['history_tokens']:,}", f"{row['r']:g}", f"{row['share']:g}", milliseconds(row["ttft_ms"]["compute"]),
                      f"{milliseconds(row['ttft_ms']['load'])} ({milliseconds(row['load_arithmetic_ms'])})",
                      milliseconds(row["ttft_ms"]["both"]), f"{number(row['computed_chunks'])}, {number(row['loaded_chunks'])}",
                      spread(row["better_over_both"]) + "; **behind**" * row["behind"],
                      f"{milliseconds(row['hit_ms'])}; {number(row['slowed'])}", spread(row["over_bound"])] for row in rows]
            less = {way: f"{found['less_on_average'][way]:.0%} less than by only {words} (the paper {found['paper'][way]:.1%})"
                    for way, words in (("compute", "computing"), ("load", "loading"))}
            texts += [f"**{model}**", table(
                "history | r | share | computing | loading (on paper) | both | chunks computed, loaded | as soon as the better | "
                "h; s | both / bound", cells), f"Over the {share(found['telling'], len(rows))} cells in which both had a chunk, TTFT is "
                f"on average {listed(less.values())}."]
        if claim == "overhead":
            texts += [f"**{model}**, a step of {rows[0]['step_tokens']} tokens with the loader beside it, over one without:", table(
                "r | GB/s | steps with over without", [[f"{row['r']:g}", number(row["gbps"]), spread(row["over_without"])]
                                                        for row in rows])]
        if claim in ("trace", "files", "lengths"):
            title = dict(trace="storage that changes its speed", files="a real directory", lengths="one storage for all histories")
            texts += [f"**{model}**, {title[claim]}:", table(
                "history | computing | loading | both | as soon as the better | both / bound | chunks loaded", [
                    [f"{row['history_tokens']:,}", *(milliseconds(row["ttft_ms"][way]) for way in ("compute", "load", "both")),
                     spread(row["better_over_both"]), number(row["over_bound"]), f"{number(row['loaded_chunks'])} of {row['chunks']}"]
                    for row in rows])]
        if claim == "bits":
            texts += [f"**{model}**, 16 bits over 8, in {found['dtype']}:", table(
                "r | loading | both | tokens agree | bytes a chunk | largest error of K and V", [
                    [f"{row['r']:g}", spread(row["load_faster"]), spread(row["both_faster"]), row["both_tokens_agree"],
                     " and ".join(f"{size:,}" for size in row["chunk_bytes"]),
                     f"{row['largest_error']:.2g}, where the largest is {row['largest']:.0f}"] for row in rows])]
    return paragraphs(conditions(file), *texts)


def ranks(results: dict) -> str:
    """Chapter 09."""
    file, texts = results.get("ranks-cpu"), []
    if file is None:
        return "Not measured yet: `python -m benchmarks.ranks` does."
    for found in file["found"]:
        rows = found["rows"]
        texts += [f"**{found['model']}**, {rows[0]['history_tokens']:,} tokens, {number(rows[0]['gbps'])} GB/s for each rank:", table(
            "kept | ranks | MB over a rank's link | of one rank's | what the link takes | TTFT | agreements, steps", [
                [row["keep"], row["ranks"], number(row["bytes_over_link"] / 1e6),
                 "–" if row["share_of_one_rank"] is None else f"{row['share_of_one_rank']:.2f}", milliseconds(row["link_ms"]),
                 spread(row["ttft_ms"]) + " ms", f"{row['agreements']:.0f}, {row['steps']:.0f}"] for row in rows])]
        apart = {row["ranks"]: row["agreement_us"] for row in rows if row["ranks"] > 1}
        texts += ["An agreement takes " + listed(f"{us:,.0f} us on {count} ranks" for count, us in apart.items()) + "."]
    return paragraphs(conditions(file), *texts)


def claims(results: dict) -> str:
    """Each claim in one row, what was missed first."""
    found = sorted(benchmark_claims.table(results), key=lambda row: "missed" not in row[-1])
    met = sum(row[-1] == "met" for row in found)
    return paragraphs(f"Of {len(found)} claims {met} are met.",
                      table("chapter | claim | paper | asked | measured | verdict", found))


def tiered(results: dict) -> str:
    file, texts = results["tiered-cpu"], []
    texts += ["**Conversations behind documents that fit in no single tier.** The device alone against three tiers:", table(
        "model, at once | device alone | three tiers | all on the device | TTFT lower by | throughput | bound / measured | L1, L2, L3",
        [[f"{found['model']}, {row['at_once']}", *(milliseconds(row[what]) for what in (
            "device_alone_ms", "ttft_ms", "all_on_device_ms")),
          f"{row['lower']['median']:.0%} ({row['lower']['min']:.0%} to {row['lower']['max']:.0%})", spread(row["throughput"], "x"),
          spread(row["of_bound"]), ", ".join(f"{row[tier]['median']:.0%}" for tier in ("gpu", "cpu", "storage"))]
         for found in entries(file, "mix") for row in found["rows"]])]
    ways = ("computed", "best_effort", "wait_complete", "timeout", "both_ends")
    texts += ["**One history of 1,024 tokens in slow storage alone.** TTFT, and the share of the prompt from storage:", table(
        "model | reading / computing | guard | rounds | " + " | ".join(ways) + " | behind", [
            [found["model"], f"{row['r']:g}", "on" if row["guard"] else "off", row["rounds"],
             *(f"{milliseconds(row['ttft_ms'][way])}, {row['from_storage'][way]:.0%}" for way in ways),
             ", ".join(row["behind"]) or "-"] for found in entries(file, "policies") for row in found["rows"]])]
    found = entry(file, "admission")
    lengths = list(dict.fromkeys(row["history_tokens"] for row in found["rows"]))
    by = {(row["way"], row["history_tokens"]): row for row in found["rows"]}
    texts += [f"**A hit in each tier**, TTFT over that of computing ({found['model']}), and the tokens found there:", table(
        "found in | " + " | ".join(f"{length:,} tokens" for length in lengths), [
            [way, *(f"{spread(by[way, length]['over_computing'])}; " + ", ".join(
                f"{tokens:.0f} {tier}" for tier, tokens in by[way, length]["found"].items() if tokens) for length in lengths)]
            for way in dict.fromkeys(row["way"] for row in found["rows"]) if way != "computed"])]
    words = "found in L1, L2, L3 | TTFT"

    def hits(row: dict) -> list[str]:
        return [", ".join(f"{row[tier]:.0%}" for tier in ("gpu", "cpu", "storage")), milliseconds(row["ttft_ms"])]
    texts += ["**Write policies**, 60 questions about 12 documents (Zipf):", table(
        f"policy | {words} | MB to L2 | MB to L3 | dirty evicted | pages written | lost by a kill, of pages", [
            [row["policy"], *hits(row), f"{row['saved_bytes'] / 1e6:,.0f}", f"{row['storage_bytes'] / 1e6:,.0f}",
             row["dirty_evicted"], row["pages_written"], f"{row['lost_by_a_kill']} of {row['pages']}"]
            for row in entry(file, "writes")["rows"]])]
    texts += ["**Host memory**, the same traffic without storage:", table(f"times the device | GB | {words}", [
        [f"{row['times_the_device']:g}", f"{row['gb']:.3f}", *hits(row)] for row in entry(file, "sizes")["rows"]])]
    texts += ["**The page size**, the same traffic over three tiers:", table(
        f"tokens a page | {words} | pages in the tree | MB read | match", [
            [row["page_tokens"], *hits(row), f"{row['pages']:,}", f"{row['read_bytes'] / 1e6:,.0f}",
             f"{1e3 * row['match_ms']['median']:.1f} us"] for row in entry(file, "pages")["rows"]])]
    texts += ["**Finding 4,096 tokens**, each page of which is a node:", table("conversations | pages | nodes | time | bytes a page", [
        [f"{row['conversations']:,}", f"{row['pages']:,}", f"{row['nodes']:,}", f"{row['match_ms']['median']:.3f} ms",
         f"{row['bytes_per_page']:.0f}"] for row in entry(file, "match")["rows"]])]
    return paragraphs(conditions(file), *texts)


def hybrid_blocks(results: dict) -> str:
    file, texts = results["hybrid_blocks-cpu"], []
    for found in entries(file, "grid"):
        lines = []
        for row in found["rows"]:
            ours = row["policies"]["hybrid"]
            acts = ours["plan"]["act_host"] + ours["plan"]["act_device"]
            moved = "/".join(f"{ours['bytes'].get(kind, 0) / 1e6:,.0f}" for kind in ("weights", "kv", "act"))
            over = (f"{spread(row['policies'][policy]['over'])} of {number(row['policies'][policy]['allowed'])}"
                    for policy in ("kv-only", "act-only"))
            lines.append([
                f"{row['f']:g}", f"{row['batch']} x {row['context']:,}", median(ours["tokens_per_second"]), spread(row["of_bound"]),
                *over, spread(row["policies"]["paper"]["over"]), f"{ours['link_busy']:.0%}, {ours['compute_busy']:.0%}",
                f"{ours['of_matrix_rate']:.0%}", moved, f"{ours['plan']['resident']}; {acts / (sum(ours['plan'].values()) - ours['plan']['resident']):.0%}",
                ", ".join(row["behind"]) or "-"])
        texts += [f"**{found['model']}**, {found['dtype']}:", table(
            "f | batch x context | tokens/s | of the bound | over `kv-only`, of what is allowed | over `act-only` | over `paper` | "
            "busy: link, processor | of the matrix rate | MB: weights/KV/ACT | resident layers; ACT | behind", lines)]
    for found in entries(file, "steps"):
        row = found["rows"][0]
        texts += [f"**Table III** ({found['model']}, {row['batch']} contexts of {row['contexts'][0]} to {row['contexts'][1]} tokens, "
                  f"f = {row['f']:g}):", table("step | mini-batches | tokens/s | over act-only", [
                      [row["step"], row["mini_batches"], spread(row["tokens_per_second"]), spread(row["over_act_only"])]
                      for row in found["rows"]])]
    for found in entries(file, "end"):
        texts += [f"**From prompt to last token** ({found['model']}, {found['dtype']}):", table(
            "policy | TTFT | TBT | tokens equal chapter 01's", [
                [row["policy"], milliseconds(row["ttft_ms"]), milliseconds(row["tbt_ms"]), "all" if row["tokens_equal"] else "**no**"]
                for row in found["rows"]])]
    return paragraphs(conditions(file), *texts)


PARTS = {
    "claims": claims, "planned": planned, "outside": outside, "variants": variants, "chapters": chapters, "baseline": baseline,
    "engine": engine, "on-paper": on_paper, "both-ends": both_ends, "ranks": ranks, "tiered": tiered,
    "hybrid-blocks": hybrid_blocks,
}


# 3. Pages --------------------------------------------------------------------------------------------------------

def read(folder: Path = RESULTS) -> dict:
    """File name without its ending -> what the benchmark wrote. Quick runs are nobody's reference."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
            if not path.stem.endswith("-quick")}


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
