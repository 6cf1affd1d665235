"""Chapters 05, 06, 08 and 09 on paper: the platforms and models of HCache (EuroSys '25), Cake (ICML '25) and CAPTURE, without
a GPU and without a model.

    python -m tools.on_paper

A layer's four costs follow from sizes, bandwidth and FLOP/s. One number per model is taken from the paper's measurements: the
bandwidth at which projecting hidden states takes as long as transferring them (section 6.1.3). It gives the share of the peak
that a model's products reach. The rest is arithmetic, and is held against what the paper reports. The bars of Figure 11 have no
numbers in the text, only ranges; which GPU runs which model is our choice.

Two assumptions carry it: other GPUs reach the same share of their peak, and recomputing the same as projecting.

Sources: Tables 2 and 3, sections 3.2, 4.1.2, 6.1.3, 6.2 and 6.3. H100, H200 and B200: NVIDIA's data sheets, dense 16-bit FLOP/s.
Llama 3 and Qwen2.5: their config.json.
"""
import functools
import importlib
from typing import NamedTuple

from common.link import PLATFORMS, SHARE_OF_PEAK

planner = importlib.import_module("05_bubble_free")
Costs = planner.Costs

MEMORY = {"a100": 40e9, "a30": 24e9, "4090": 24e9, "l20": 48e9, "h800": 80e9}                  # bytes; Table 2
LATER = {"H100, H200": (989e12, 64e9), "B200": (2250e12, 64e9)}          # H200: more memory, but no cost of a layer differs
PEAK, PCIE = PLATFORMS["a100"]     # FLOP/s, bytes/s
SSD = 6.9e9                        # bytes/s; section 6.2.2
TOKENS = 1024                      # of a history, as in section 6.2.2; for Table 3 and section 6.2.1 the paper does not say
LENGTHS = [1024, 2048, 4096, 8192, 16384]
NEAR = 0.05                        # what is no range is met within 5 %, and numbers of layers within one layer

PAPER = {
    "7B schedule": (0, 31, 1), "13B schedule": (0, 36, 4), "30B schedule": (8, 40, 0),         # RE, H, KV; Table 3
    # Bytes per token, KV offload over HCache. Table 3 prints half of what 16 bits take, so only ratios can be compared.
    "7B bytes": 256 / 132, "13B bytes": 400 / 210, "30B bytes": 672 / 280, "bytes in the text": (1.92, 2.40),
    # HCache's speed over others: section 6.2.1, Figure 11 a-c. Whether 1.66 is the 13B's is not quite clear; we take it so.
    "GPUs, over KV": (1.33, 1.81), "GPUs, over recomputing": (5.04, 9.05), "7B, a30": 1.33, "13B, a100": 1.66, "13B, h800": 1.77,
    # Section 6.2.2, Figure 11 d-f
    "SSDs, over KV": (1.7, 2.6), "SSDs, over recomputing": (2.3, 6.1), "one SSD, over KV": (2.09, 2.66),
    "more SSDs, over KV": (1.33, 1.81), "more SSDs, over recomputing": (5.46, 6.08),
    # Section 6.2.3, Figure 11 g-i; that HCache's speed stays the same is said without a number
    "recomputing, 16K over 1K": 0.72, "HCache, 16K over 1K": 1.0, "layers recomputed at 16K": 0,
    # Sections 6.3.1 and 6.3.2; 13, 12 and 7 % slower
    "over KV": (1.45, 2.66), "over naive": (1.28, 1.42), "over HCache-O": (1.35, 1.64), "HCache-O over KV": 0.87,
    "layers H": 31, "tokens H": 794, "token-wise": 0.88, "tokens H, rounded": 768, "token-wise, rounded": 0.93,
}


class Model(NamedTuple):
    """Sizes; a head has width / heads numbers. Without `ffn` a layer's FLOPs are counted as in the paper's section 3.2."""
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    efficiency: float              # share of the peak FLOP/s that its products reach
    ffn: int | None = None
    gpus: int = 1


def calibrated(width: int, balance: float, gpus: int = 1) -> float:
    """The share of the A100s' peak at which projecting a layer takes as long as transferring it at `balance` bytes/s."""
    return 4 * width ** 2 / (2 * width / balance) / (gpus * PEAK)


MODELS = [Model("7B", 32, 4096, 32, 32, calibrated(4096, 24e9)), Model("13B", 40, 5120, 40, 40, calibrated(5120, 21e9)),
          Model("30B", 48, 7168, 56, 56, calibrated(7168, 37e9, 4), gpus=4)]
OWN = [Model("Llama-2-7B", 32, 4096, 32, 32, SHARE_OF_PEAK, 11008), Model("Llama-3-8B", 32, 4096, 32, 8, SHARE_OF_PEAK, 14336),
       Model("Qwen2.5-7B", 28, 3584, 28, 4, SHARE_OF_PEAK, 18944), Model("Llama-3-70B", 80, 8192, 64, 8, SHARE_OF_PEAK, 28672, 4)]


def kept(model: Model, plan: str) -> float:
    """Bytes of a token, in 16 bits: D numbers for each layer of the plan in hidden states, 2 of each KV head for one in K and V."""
    return plan.count("H") * 2 * model.width + plan.count("K") * 2 * 2 * model.kv_heads * model.width // model.heads


def layer_costs(model: Model, tokens: int, peak: float, bandwidth: float):
    """`peak`: FLOP/s of one GPU; `bandwidth`: bytes/s to all of them together."""
    flops_per_second, kv_width = model.efficiency * peak * model.gpus, model.kv_heads * model.width // model.heads
    whole, project = layer_flops(model, tokens)
    return Costs(whole / flops_per_second, project / flops_per_second, tokens * 2 * model.width / bandwidth,
                 tokens * 2 * 2 * kv_width / bandwidth)


def layer_flops(model: Model, tokens: int) -> tuple[float, float]:
    """-> FLOPs of a whole layer, and of projecting its K and V."""
    width, kv_width = model.width, model.kv_heads * model.width // model.heads
    project = 2 * tokens * 2 * width * kv_width
    if model.ffn is None:          # with a gated FFN, as Llama's, it comes to about the same
        return 24 * tokens * width ** 2 + tokens ** 2 * width, project
    weights = 2 * width * width + 2 * width * kv_width + 3 * width * model.ffn
    # a token attends to half of the others on average: 2 FLOPs in the scores, 2 in the sum
    return 2 * tokens * weights + (2 + 2) * tokens ** 2 / 2 * width, project


def on_ssds(model: Model, each: int | None = None, tokens: int = TOKENS):
    """-> the costs on A100s with `each` SSDs per GPU; by default the paper's server, four in all."""
    return layer_costs(model, tokens, PEAK, min((each or 4 // model.gpus) * SSD, PCIE) * model.gpus)


def letters(recompute: int, hidden: int, kv: int) -> str:
    return "R" * recompute + "H" * hidden + "K" * kv


def paper_seconds(plan: str, costs: Costs) -> float:
    """As HCache counts: all R layers are computed whole, and there is no question. The longest path: computing alone; over the
    first, or over the last transfer of states, and on the processor from there; or the link alone."""
    recompute, hidden, kv = map(plan.count, "RHK")
    computing, loading = recompute * costs.recompute + hidden * costs.project, hidden * costs.load_states
    over_states = max(costs.load_states + hidden * costs.project, loading + costs.project) if hidden else 0.0
    return max(computing, over_states, loading + kv * costs.load_kv)


@functools.cache
def best_on_paper(layers: int, costs: Costs, ways: str = "RHK") -> str:
    """The best of all divisions of whole layers into some `ways`; of equals the one that loads least."""
    every = [letters(recompute, hidden, layers - recompute - hidden)
             for recompute in range(layers + 1) for hidden in range(layers + 1 - recompute)]
    seconds = {plan: paper_seconds(plan, costs) for plan in every if set(plan) <= set(ways)}
    least = min(seconds.values())
    return min((plan for plan in seconds if seconds[plan] <= least * (1 + 1e-9)),
               key=lambda plan: plan.count("H") * costs.load_states + plan.count("K") * costs.load_kv)


best_plan = functools.cache(planner.best_plan)


def token_wise(costs: Costs, layers: int, tokens: int, step: int = 1) -> tuple[int, int]:
    """Section 4.1.1's other division, with as many tokens projected as ends first, in multiples of `step`: in every layer those
    before are recomputed, where projecting is the faster lane, or else those behind are loaded -> the first token that is
    projected, and the one behind the last. What a token costs is taken not to depend on how many there are."""
    slower = costs.project + costs.question > costs.load_states

    def seconds(projected: int) -> float:
        share = projected / tokens
        loading = share * costs.load_states + slower * (1 - share) * costs.load_kv
        computing = share * costs.project + (not slower) * (1 - share) * costs.recompute + costs.question
        return max(loading + layers * computing, layers * loading + computing)
    projected = min({*range(0, tokens, step), tokens}, key=seconds)
    return (0, projected) if slower else (tokens - projected, tokens)


def restorations(costs: Costs, layers: int) -> tuple:
    """-> the best plan in the paper's accounting (HCache), the plan of chapter 05, and each method's seconds."""
    found = {name: best_on_paper(layers, costs, ways)
             for name, ways in (("HCache", "RHK"), ("KV", "K"), ("HCache-O", "H"), ("naive", "RK"))}
    own, seconds = best_plan(layers, costs), {name: paper_seconds(plan, costs) for name, plan in found.items()}
    return found["HCache"], own, {**seconds, "chapter 05": planner.plan_seconds(own, costs), "recomputing": layers * costs.recompute}


def counts(plan: str) -> str:
    return " + ".join(f"{plan.count(way)} {name}" for way, name in (("R", "RE"), ("H", "H"), ("K", "KV")) if way in plan)


def judge(rows: list, table: str, name: str, paper, ours: float, slack: float | None = None, **more) -> dict:
    """Add a row: whether `ours`, in two digits, lies in the paper's range, or at most `slack` (5 %) from its single value; and
    how far it is from that, or from the nearer end."""
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    slack = 0.0 if isinstance(paper, tuple) else NEAR * paper if slack is None else slack
    difference = ours - min(max(ours, low), high)
    agrees = low - slack <= round(ours, 2) <= high + slack
    verdict = "yes" if agrees else f"no: {abs(difference):.2f} {'above' if difference > 0 else 'below'}"
    rows.append(dict(table=table, name=name, paper=paper, ours=ours, difference=difference, verdict=verdict, **more))
    return rows[-1]


def printed(paper) -> str:
    return "-".join(f"{end:.2f}" for end in paper) if isinstance(paper, tuple) else f"{paper:.2f}"


def heading(title: str, names: str):
    print(f"\n{title}\n  {names:<66}{'paper':>11}{'ours':>9}{'diff.':>8}   agrees")


def show(row: dict):
    print(f"  {row['name']:<66}{printed(row['paper']):>11}{row['ours']:9.2f}{row['difference']:+8.2f}   {row['verdict']}")


# The paper's tables and figures ----------------------------------------------------------------------------------

def factors(rows: list):
    """Where 6 + T / (4 D) comes from. It is a formula of the paper, and no number that could agree or not."""
    print("\nSection 3.2. FLOPs of a layer, T tokens of D numbers: computed 24 T D^2 + T^2 D, projected 4 T D^2; hence 6 + T / (4 D)\n"
          f"  {'':<24}{'tokens':>7}{'computed':>12}{'of it T^2 D':>13}{'projected':>12}{'ratio':>8}{'6 + T/(4D)':>12}")
    for model in (*MODELS, OWN[0]):
        for tokens in (LENGTHS[0], LENGTHS[2], LENGTHS[-1]):
            whole, project = layer_flops(model, tokens)
            formula, attention = 6 + tokens / (4 * model.width), tokens ** 2 * model.width * (2 if model.ffn else 1)
            rows.append(dict(table="Section 3.2", name=f"{model.name}, {tokens:,} tokens", paper=None, ours=whole / project,
                             difference=whole / project - formula, verdict="a formula", flops=dict(whole=whole, project=project)))
            print(f"  {model.name:<24}{tokens:>7,}{whole / 1e12:>10.3f} T{attention / whole:>13.1%}{project / 1e12:>10.3f} T"
                  f"{whole / project:>8.2f}{formula:>12.2f}")
    print(f"  {OWN[0].name} has a gated FFN of {OWN[0].ffn:,}, and each token attends to half of the others: T^2 D twice, not once.")


def schedules(rows: list):
    heading(f"Table 3. Layers restored from hidden states. A100s with four SSDs in all, 27.6 GB/s; {TOKENS:,} tokens", "schedule")
    for model in MODELS:
        costs, paper = on_ssds(model), letters(*PAPER[f"{model.name} schedule"])
        closed = planner.closed_form(model.layers, costs)
        plan, own, seconds = restorations(costs, model.layers)
        for way, ours in (("closed form", closed), ("all tried, as the paper counts", plan), ("chapter 05", own)):
            hidden = ours.count("H")
            show(judge(rows, "Table 3", f"{model.name}, {way}: {counts(ours)}", paper.count("H"), hidden, slack=1.0))
        ratio, theirs = (kept(model, "K" * model.layers) / kept(model, each) for each in (closed, paper))
        show(judge(rows, "Table 3", f"{model.name}, bytes: KV offload over closed form", PAPER[f"{model.name} bytes"], ratio))
        # at what bandwidth the link would be busy as long as the paper's schedule computes
        even = TOKENS * kept(model, paper) / (paper.count("R") * costs.recompute + paper.count("H") * costs.project)
        longer = paper_seconds(paper, costs) / seconds["HCache"] - 1
        near = [planner.closed_form(model.layers, on_ssds(model, None, tokens)).count("H") for tokens in LENGTHS]
        same = len({abs(hidden - paper.count("H")) <= 1 for hidden in near}) == 1
        print(f"  - The paper's {counts(paper)} is even at {even / 1e9:.1f} GB/s, keeps 1/{theirs:.2f} of the bytes and takes "
              f"{longer:.1%} longer than all tried.\n    Closed form for 1K to 16K tokens: {min(near)} to {max(near)} H, "
              f"{'the same verdict' if same else 'and the verdict changes'}.")
    print("  The closed form leaves out the time that fills the pipeline. The text's ratios of bytes are "
          f"{printed(PAPER['bytes in the text'])}.")


def gains(rows: list, table: str, title: str, cases: list):
    """HCache against the others. `cases`: name, model, costs, the paper's ranges over KV offload and over recomputing."""
    print(f"\n{table}. {title}\n{'':<46}------ over KV offload -------  ------- over recomputing -----  HCache/  ch.05/\n"
          f"{'':<38}tokens/s" + f"{'ours':>6}{'paper':>10}  {'agrees':<15}" * 2 + "    O naive     KV")
    for name, model, costs, over_kv, over_recomputing in cases:
        plan, _, seconds = restorations(costs, model.layers)
        ratio = {other: took / seconds["HCache"] for other, took in seconds.items()}
        kv = judge(rows, table, f"{name}: over KV offload", over_kv, ratio["KV"], seconds=seconds)
        recomputing = judge(rows, table, f"{name}: over recomputing", over_recomputing, ratio["recomputing"], seconds=seconds)
        cells = "".join(f"{row['ours']:6.2f}{printed(row['paper']):>10}  {row['verdict']:<15}" for row in (kv, recomputing))
        print(f"  {name:<17}{counts(plan):<19}{TOKENS / seconds['HCache']:8,.0f}{cells}{ratio['HCache-O']:5.2f}"
              f"{ratio['naive']:6.2f}{seconds['KV'] / seconds['chapter 05']:7.2f}")


def gpus(rows: list):
    cases, left_out = [], []
    for model in MODELS:
        for gpu, (peak, pcie) in PLATFORMS.items():
            name = f"{model.name}, " + (f"{model.gpus} x " if model.gpus > 1 else "") + gpu
            if 2 * 12 * model.layers * model.width ** 2 > model.gpus * MEMORY[gpu]:            # about 12 D^2 weights in a layer
                left_out.append(name)
                continue
            costs = layer_costs(model, TOKENS, peak, pcie * model.gpus)
            cases.append((name, model, costs, PAPER["GPUs, over KV"], PAPER["GPUs, over recomputing"]))
    title = "GPUs, host memory behind the PCIe link of each. O: hidden states only; naive: KV and recomputing"
    gains(rows, "Figure 11 a-c", title, cases)
    print(f"  Left out, as the weights do not fit: {'; '.join(left_out)}. Recomputing costs six projections and more here:\n"
          "  where projecting is the bottleneck, HCache gains about that or more; less only if recomputing runs better.")
    heading("Section 6.2.1, single values", "speed of HCache over KV offload")
    found = {row["name"]: row["ours"] for row in rows}
    for name in ("7B, a30", "13B, a100", "13B, h800"):
        show(judge(rows, "Section 6.2.1", f"{name}, as the text has it", PAPER[name], found[f"{name}: over KV offload"]))


def ssds(rows: list):
    cases = []
    for model in MODELS:
        for each in (1, 2, 3, 4):
            costs = on_ssds(model, each)
            kind = "more SSDs" if costs.project > costs.load_states else "SSDs"           # what the text says of "more"
            name = f"{model.name}, {each * model.gpus} SSD" + "s" * (each * model.gpus > 1)
            over_kv = PAPER[f"{'one SSD' if each == 1 else kind}, over KV"]
            cases.append((name, model, costs, over_kv, PAPER[f"{kind}, over recomputing"]))
    gains(rows, "Figure 11 d-f", f"SSDs of 6.9 GB/s, one to four for each A100; {TOKENS:,} tokens", cases)
    overall, more = printed(PAPER["SSDs, over KV"]), printed(PAPER["more SSDs, over KV"])
    share = MODELS[2].efficiency * rows[-1]["ours"] / PAPER["more SSDs, over recomputing"][1]
    print(f"  The text contradicts itself: {overall} over KV offload for all numbers of SSDs, but {more} for more of them. The\n"
          "  second is used here where projecting is the bottleneck. To be no slower than in the text against HCache with 16\n"
          f"  SSDs, recomputing 30B would have to run at {share:.0%} of the peak.")


def contexts(rows: list):
    print("\nFigure 11 g-i. Length of the history. A100s with four SSDs in all; thousands of tokens/s\n"
          f"  {'':<17}" + "".join(f"{tokens:>9,}" for tokens in LENGTHS))
    speeds, last, causal = {}, {}, OWN[0]
    for model in (*MODELS, causal):
        for tokens in LENGTHS:
            last[model.name], _, seconds = restorations(on_ssds(model, None, tokens), model.layers)
            for method in ("KV", "HCache", "recomputing"):
                speeds.setdefault((model.name, method), []).append(tokens / seconds[method])
    for (name, method), row in speeds.items():
        if name != causal.name:
            print(f"  {name + ', ' + method:<17}" + "".join(f"{speed / 1e3:9.1f}" for speed in row))
    heading("Section 6.2.3", "speed at 16K tokens over that at 1K")
    for model in MODELS:
        row = speeds[model.name, "HCache"]
        show(judge(rows, "Section 6.2.3", f"{model.name}, HCache", PAPER["HCache, 16K over 1K"], row[-1] / row[0]))
    for name, attention in (("7B", "N^2 D FLOPs in attention, as in section 3.2"), (causal.name, "2 N^2 D, half of 4 N^2 D")):
        row = speeds[name, "recomputing"]
        show(judge(rows, "Section 6.2.3", f"7B, recomputing: {attention}", PAPER["recomputing, 16K over 1K"], row[-1] / row[0]))
    name = f"30B, layers recomputed at 16K: {counts(last['30B'])}"
    show(judge(rows, "Section 6.2.3", name, PAPER["layers recomputed at 16K"], last["30B"].count("R"), slack=1.0))


def ablation(rows: list):
    heading("Section 6.3.1. What the mix gains. The text names no hardware; 30B with 12 SSDs was chosen to meet the last row",
            "speed over that of another")
    settings = (("compute-sufficient", MODELS[1], 1), ("balanced", MODELS[0], 4), ("IO-sufficient", MODELS[2], 3))
    for setting, model, each in settings:
        _, _, seconds = restorations(on_ssds(model, each), model.layers)
        name = f"{setting} ({model.name}, {each * model.gpus} SSD{'s' * (each * model.gpus > 1)})"
        for other in ("KV", "naive", "HCache-O")[:2 if setting == "balanced" else 3]:
            ratio = seconds[other] / seconds["HCache"]
            show(judge(rows, "Section 6.3.1", f"{name}: HCache over {other}", PAPER[f"over {other}"], ratio, seconds=seconds))
    ratio = seconds["KV"] / seconds["HCache-O"]
    show(judge(rows, "Section 6.3.1", f"{name}: HCache-O over KV", PAPER["HCache-O over KV"], ratio))


def partitions(rows: list):
    heading("Section 6.3.2. Layers or tokens divided. 13B, one A100, one SSD, 1,024 tokens", "partition")
    model, table = MODELS[1], "Section 6.3.2"
    costs = on_ssds(model, 1)
    plan, _, seconds = restorations(costs, model.layers)
    show(judge(rows, table, f"layer-wise: {counts(plan)}", PAPER["layers H"], plan.count("H"), slack=1.0))
    for name, step in (("", 1), (", rounded", 128)):
        first, last = token_wise(costs, model.layers, TOKENS, step)
        share = (last - first) / TOKENS
        show(judge(rows, table, f"token-wise{name}: {last - first} tokens H, the others R", PAPER[f"tokens H{name}"], last - first))
        loading, computing = share * costs.load_states, share * costs.project + (1 - share) * costs.recompute
        took = max(loading + model.layers * computing, model.layers * loading + computing)
        show(judge(rows, table, f"token-wise{name}: speed over layer-wise", PAPER[f"token-wise{name}"], seconds["HCache"] / took))
    print("  On paper a product's time is in proportion to its rows. That 794 may take as long as 1,024 shows only on a GPU.")


# On our own account ----------------------------------------------------------------------------------------------

def later(rows: list):
    print("\nOn our own account, not measured: chapter 05's plan on later GPUs, and with grouped-query attention. PCIe 5,\n"
          f"64 GB/s; {SHARE_OF_PEAK:.0%} of the peak; 70B on four GPUs with a link each. A hidden state is larger than K and V\n"
          f"where KV heads are fewer than half of the heads.\n  {'':<24}{'tokens':>7}{'bytes/token':>13}{'of KV':>7}"
          f"{'tokens/s':>11}{'over KV':>9}{'over rec.':>11}  plan")
    for gpu, (peak, pcie) in LATER.items():
        for model in OWN:
            for tokens in (LENGTHS[0], LENGTHS[-1]):
                costs = layer_costs(model, tokens, peak, pcie * model.gpus)
                _, plan, seconds = restorations(costs, model.layers)
                over_kv, over_recomputing = (seconds[other] / seconds["chapter 05"] for other in ("KV", "recomputing"))
                size, full = kept(model, plan), kept(model, "K" * model.layers)
                rows.append(dict(table="Own account", name=f"{model.name}, {gpu}, {tokens:,} tokens", paper=None, ours=over_kv,
                                 difference=None, verdict="not in the paper", seconds=seconds, plan=plan, bytes=size))
                print(f"  {model.name + ', ' + gpu:<24}{tokens:>7,}{size:>13,.0f}{size / full:>7.0%}"
                      f"{tokens / seconds['chapter 05']:>11,.0f}{over_kv:>9.2f}{over_recomputing:>11.2f}  {counts(plan)}")


def main() -> dict:
    """Print all tables. -> {"rows": [{table, name, paper, ours, difference, verdict, ...}],
    "agree", "compared"}, for a JSON file; `paper` is a number, a range or, on our own account, None."""
    rows = []
    print("HCache's planner on paper. Share of the A100s' peak that gives the paper's balance: "
          + ", ".join(f"{model.name} {model.efficiency:.0%}" for model in MODELS)
          + f".\nOther GPUs, and recomputing, are taken to reach it. Single values agree within {NEAR:.0%}, layers within one.")
    for table in (factors, schedules, gpus, ssds, contexts, ablation, partitions, later):
        table(rows)
    compared = [row for row in rows if row["paper"] is not None]
    agree = sum(row["verdict"] == "yes" for row in compared)
    near = sum(row["verdict"] != "yes" and abs(row["difference"]) <= NEAR * abs(row["ours"]) for row in compared)
    print(f"\n{agree} of {len(compared)} rows agree with the paper; {near} more are within {NEAR:.0%} of its range.")
    return dict(rows=rows, agree=agree, compared=len(compared))


# Cake ------------------------------------------------------------------------------------------------------------

SEVEN, H100 = MODELS[0], LATER["H100, H200"][0]
TOKEN_BYTES = 2 * 2 * SEVEN.layers * SEVEN.width       # 16 bits; section 5.1 rounds it to 0.5 MB
# Section 5.3: from 90 to 10 % of an A100, 14K tokens take 8.22 times as long, and 14.34 s longer
SECONDS_14K = 0.9 * 14.34 / (8.22 - 1)


def cake_flops(tokens: float) -> float:
    """Of a causal prefill on 7B: 12 D^2 weights a layer, and 2 D operations for each pair of tokens."""
    return SEVEN.layers * (24 * tokens * SEVEN.width ** 2 + 2 * tokens ** 2 * SEVEN.width)


def cake_seconds(tokens: float, gbps: float, share: float = 1.0, peak: float = PEAK, smaller: float = 1.0) -> tuple:
    """Both pointers, on one GPU of which prefill has a `share`; chunks `smaller` than 16 bits -> seconds to compute, to load, and
    until they meet, and the share of tokens that is computed."""
    speed = share * cake_flops(14e3) / SECONDS_14K * peak / PEAK
    byte_seconds = 8 * TOKEN_BYTES / smaller / (gbps * 1e9)
    low, high = 0.0, float(tokens)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cake_flops(middle) / speed < (tokens - middle) * byte_seconds else (low, middle)
    return cake_flops(tokens) / speed, tokens * byte_seconds, cake_flops(low) / speed, low / tokens


def cake() -> dict:
    """Print Cake's figures beside what two pointers give -> as `main`."""
    rows = []

    def add(table: str, name: str, paper: float, ours: float):
        show(judge(rows, table, name, paper, ours))

    def less(index: int, *cell) -> float:
        """By how much than computing (0) or loading (1) alone."""
        return 1 - cake_seconds(*cell)[2] / cake_seconds(*cell)[index]

    print(f"\nCake on paper: 7B, {TOKEN_BYTES / 1e6:.2f} MB a token; an A100 computes 14K tokens in {SECONDS_14K:.2f} s, which "
          f"follows from section 5.3\n({cake_flops(14e3) / SECONDS_14K / PEAK:.0%} of the peak). An H100 is as much faster as its "
          "peak, and a share of a GPU as much slower.")
    heading("Sizes and seconds", "what")
    whole = 2 * 2 * 80 * 8192 / 1e6                    # MB: K and V of 80 layers x 8,192 numbers in 16 bits
    add("Equation 1", "70B, MB a token, by equation 1: it has 4 times layers x width x bytes", 2.5, 2 * whole)
    add("Equation 1", "70B, MB a token, K and V (of 64 heads; it has 8, which is an eighth)", 2.5, whole)
    add("Section 2.3", "7B, seconds to compute 10K tokens on an A100", 1.0, cake_seconds(1e4, 1)[0])
    add("Section 3", "seconds to load 25 GB at 3 GB/s", 8.0, 25 / 3)
    heading("Figure 5a. 32K tokens, all of the GPU: TTFT of both is less by", "than")
    for gpu, peak, loading, computing in ("A100", PEAK, (0.935, 0.769), 0.315), ("H100", H100, (0.946, 0.802), 0.267):
        for gbps, paper in zip((2, 10), loading):
            add("Figure 5a", f"only loading, {gpu}, {gbps} Gbit/s", paper, less(1, 32e3, gbps, 1.0, peak))
        add("Figure 5a", f"only computing, {gpu}, 10 Gbit/s", computing, less(0, 32e3, 10, 1.0, peak))
    heading("Figures 3 and 5b. 10 Gbit/s, all of an A100", "share of the tokens")
    short, long = cake_seconds(2e3, 10), cake_seconds(32e3, 10)
    add("Figure 3", "32K tokens: computed", 0.75, long[3])
    add("Figure 5b", "computed, less at 32K than at 2K by", 0.10, short[3] - long[3])
    add("Figure 5b", "TTFT over that of only computing, less at 32K than at 2K by", 0.15, short[2] / short[0] - long[2] / long[0])
    heading("Figures 6 and 8. 14K tokens, 10 to 90 % of an A100, 2 to 10 Gbit/s: TTFT of both is less by, or sooner", "than")
    for what, index in ("computing", 0), ("loading", 1):
        cells = [less(index, 14e3, gbps, share) for gbps in (2, 10) for share in (0.1, 0.9)]
        for end, paper in zip((min, max), ((0.053, 0.681), (0.274, 0.937))[index]):
            add("Figures 6 and 8", f"only {what}, {'least' if end is min else 'most'}", paper, end(cells))
    tenth = [less(1, 14e3, gbps, 0.1) for gbps in (2, 10)]
    add("Section 5.3", "only loading, at 10 % of the GPU, least", 0.274, min(tenth))
    add("Section 5.3", "only loading, at 10 % of the GPU, most", 0.651, max(tenth))
    for name, smaller, paper in ("8 bit", 2.0, 1.95), ("CacheGen", 8.6, 7.97):
        sooner = max(cake_seconds(14e3, gbps, 0.1)[1] / cake_seconds(14e3, gbps, 0.1, PEAK, smaller)[1] for gbps in (2, 10))
        add("Section 5.4", f"loading, {name}: times", paper, sooner)
    compute, _, both, _ = cake_seconds(14e3, 10, 0.1, PEAK, 8.6)
    add("Section 5.4", "computing at 10 % of the GPU, with CacheGen at 10 Gbit/s: times", 11.83, compute / both)
    agree = sum(row["verdict"] == "yes" for row in rows)
    print(f"\n{agree} of {len(rows)} rows agree with Cake. Equation 1 is twice the paper's own numbers: K and V are two, not four.")
    return dict(rows=rows, agree=agree, compared=len(rows))


# CAPTURE ---------------------------------------------------------------------------------------------------------

OPT = {"6.7B": (32, 4096), "13B": (40, 5120), "30B": (48, 7168), "66B": (64, 9216)}             # layers, width; 16 bits
HOST, DEVICE, BATCH_128, NEW = 882e9, 24e9, 128, 128                # section V-A; section V-B
RATIOS = {"30B": 2.0, "66B": 1.78}                                  # section V-E: KV to ACT, of host memory
SPEEDUPS = {"6.7B": (2.05, 1.23), "66B": (2.33, 1.40)}              # section V-B: over FlexGen, over activations only
TABLE_III = {"6.7B": 1.26, "13B": 1.37, "30B": 1.61, "66B": 1.56}   # over activations only; prompts of 1,920


def capture_lanes(name: str, tokens: int) -> dict:
    """Seconds of a layer in a decode step with `tokens` of context in all, on a 4090: W weights, K all K and V, R rebuilding all,
    B the new tokens' own products, M what the device holds, as seconds of link."""
    layers, width = OPT[name]
    peak, pcie = PLATFORMS["4090"]
    rate, weights = SHARE_OF_PEAK * peak, 2 * 12 * width ** 2
    device = max(0.0, DEVICE - 2 * weights) / layers                # beside two layers that come and go
    return dict(W=weights / pcie, K=tokens * 4 * width / pcie, R=4 * tokens * width ** 2 / rate,
                B=2 * BATCH_128 * 12 * width ** 2 / rate, M=min(device, weights + tokens * 4 * width) / pcie)


def capture_seconds(W, K, R, B, M, act: float) -> float:
    """link = W + K - a K / 2 - M, compute = B + a R; the slower one."""
    return max(W + K - act * K / 2 - M, B + act * R)


def capture_ratio(name: str) -> tuple[float, float]:
    """Algorithm 1 on that platform -> KV blocks to ACT blocks in host memory, and bytes to bytes. A block is a token here."""
    hybrid = importlib.import_module("08_hybrid_blocks")
    layers, width = OPT[name]
    lanes, act, kv = capture_lanes(name, 1), 2 * width * layers, 4 * width * layers
    on_device = max(0.0, DEVICE - 4 * 12 * width ** 2) / act
    acts, kvs = hybrid.algorithm_1(lanes["W"], lanes["R"], lanes["K"], on_device, HOST, layers * 24 * width ** 2, act, kv)
    return kvs / acts, kvs * kv / (acts * act)


def capture() -> dict:
    """Print CAPTURE's ratios and gains beside what its algorithm and the two lanes give -> as `main`."""
    rows = []
    heading("CAPTURE, section V-E. KV to ACT in host memory by Algorithm 1, on an RTX 4090, 882 GB", "ratio")
    for name, paper in RATIOS.items():
        for what, ours in zip(("blocks", "bytes"), capture_ratio(name)):
            show(judge(rows, "Section V-E", f"OPT-{name}, {what}", paper, ours))
    heading("Figure 8. 128 requests, 128 tokens each; decode steps at half of the answer; prompts of 512 to 1,920", "over")
    for name, (over_kv, over_act) in SPEEDUPS.items():
        gains = []
        for prompt in (512, 1024, 1920):
            lanes = capture_lanes(name, BATCH_128 * (prompt + NEW // 2))
            best = min(capture_seconds(**lanes, act=share / 1000) for share in range(1001))
            gains.append([capture_seconds(**lanes, act=act) / best for act in (0, 1)])
        for what, paper, ours in zip(("K and V only", "activations only"), (over_kv, over_act), zip(*gains)):
            show(judge(rows, "Figure 8", f"OPT-{name}, {what}, least of the prompts", paper, min(ours)))
            show(judge(rows, "Figure 8", f"OPT-{name}, {what}, most", paper, max(ours)))
    heading("Table III. Prompts of 1,920: all of CAPTURE over activations only", "model")
    for name, paper in TABLE_III.items():
        lanes = capture_lanes(name, BATCH_128 * (1920 + NEW // 2))
        best = min(capture_seconds(**lanes, act=share / 1000) for share in range(1001))
        show(judge(rows, "Table III", f"OPT-{name}", paper, capture_seconds(**lanes, act=1) / best))
    agree = sum(row["verdict"] == "yes" for row in rows)
    print(f"\n{agree} of {len(rows)} rows agree with CAPTURE. What rebuilding takes over what loading takes grows with the width, and so "
          "must the\nratio; the printed one falls from 30B to 66B. And FlexGen is other code: of 2.33 times the lanes allow the "
          "first number above.")
    return dict(rows=rows, agree=agree, compared=len(rows))


# HCache over ranks -----------------------------------------------------------------------------------------------

def divided() -> list[dict]:
    """Print a layer of OPT-30B over ranks of A100s (figures 9 and 11): what loading, the all-gather and projecting take."""
    model, rows, nvlink = MODELS[2], [], 600e9
    print(f"\nHCache, section 5. OPT-30B, {TOKENS:,} tokens, a layer, ms: each rank loads over its own PCIe, or from its own SSD\n"
          f"  {'ranks':<8}{'from':>6}{'states':>9}{'all-gather':>12}{'projecting':>12}{'the slowest':>13}{'K and V':>10}{'ratio':>8}")
    for source, speed in ("PCIe", PCIE), ("SSD", SSD):
        for count in (1, 2, 4):
            states, project = TOKENS * 2 * model.width, layer_flops(model, TOKENS)[1]
            load, gather = states / count / speed, states * (count - 1) / count / nvlink
            compute, kv = project / count / (model.efficiency * PEAK), 2 * states / count / speed
            slowest = max(load, gather, compute)
            rows.append(dict(source=source, ranks=count, load=load, gather=gather, compute=compute, kv=kv, ratio=kv / slowest))
            print(f"  {count:<8}{source:>6}{1e3 * load:9.2f}{1e3 * gather:12.3f}{1e3 * compute:12.2f}{1e3 * slowest:13.2f}"
                  f"{1e3 * kv:10.2f}{kv / slowest:8.2f}")
    print("  Loading and projecting fall alike and the all-gather stays far below them, so the ratio does not depend on the ranks.\n"
          "  Printed on four: 1.33 to 1.81. By the 37 GB/s at which both are said to be even, projecting is slower than four PCIe\n"
          "  links, and K and V would be ahead there; from an SSD each, hidden states are, by more than is printed.")
    return rows


if __name__ == "__main__":
    main()
    cake()
    capture()
    divided()
