"""Chapters 05, 06 and 08 on paper: the platforms and models of HCache (EuroSys '25), Cake (ICML '25) and CAPTURE.

    python -m tools.on_paper

Costs follow from sizes, bandwidth and FLOP/s, and what they give stands beside what the paper prints. The share of a peak
that products reach is calibrated: in HCache by the bandwidth at which projecting takes as long as loading hidden states
(section 6.1.3), in Cake by what 14K tokens take (5.3; on an A100, as we take it), in CAPTURE as in HCache's 7B; others, and
recomputing, are taken to reach the same. Of HCache's Figure 11 the text has ranges only; which GPU runs what is our choice.

Sources: HCache, Tables 2 and 3, sections 3.2, 4.1 and 6; Cake, sections 2.3, 3 and 5; CAPTURE, IV and V; NVIDIA's data sheets.
"""

import importlib
import math
import statistics
from itertools import chain, product
from typing import NamedTuple

from benchmarks.tables import plan as counts

planned, hybrid = importlib.import_module("05_bubble_free"), importlib.import_module("08_hybrid_blocks")
Costs = planned.LayerCosts

# HCache, table 2: peak 16-bit FLOP/s of a GPU, and its link's bytes/s
PLATFORMS = {"a100": (312e12, 32e9), "a30": (165e12, 32e9), "4090": (330e12, 32e9), "l20": (120e12, 32e9), "h800": (990e12, 64e9)}
PEAK, PCIE = PLATFORMS["a100"]
SHARE_OF_PEAK = 4 * 4096**2 / (2 * 4096 / 24e9) / PEAK  # 63 %: projecting and loading are even at 24 GB/s
H100, SSD = 989e12, 6.9e9  # FLOP/s; bytes/s, section 6.2.2
TOKENS, LONGEST = 1024, 16384  # of a history, in HCache
# Table 3: layers by recomputing, hidden states, K and V
PAPER = {"7B schedule": (0, 31, 1), "13B schedule": (0, 36, 4), "30B schedule": (8, 40, 0)}
# Table 3's bytes of a token, K and V over HCache. It prints half of what 16 bits take: only ratios compare.
BYTES = {"7B": 256 / 132, "13B": 400 / 210, "30B": 672 / 280}
OVER_KV = 1.33, 1.81  # speed of HCache over K and V, sections 6.2.1 and 6.2.2
GPUS = {"7B": PLATFORMS, "13B": ("a100", "l20", "h800"), "30B": PLATFORMS}  # 13B does not fit into 24 GB
# CAPTURE: layers, width
OPT = {"6.7B": (32, 4096), "13B": (40, 5120), "30B": (48, 7168), "66B": (64, 9216)}
HOST, DEVICE, BATCH, NEW = 882e9, 24e9, 128, 128  # bytes, requests, tokens; sections V-A and V-B
PROMPTS = 512, 1024, 1920  # tokens


# 1. Costs, and HCache's plans ------------------------------------------------------------------

class Model(NamedTuple):
    name: str
    layers: int
    width: int
    balance: float  # bytes/s at which projecting takes as long as loading hidden states
    gpus: int = 1

    @property
    def efficiency(self) -> float:
        """The share of the A100s' peak with which that is so: 4 T D^2 operations while 2 T D bytes come."""
        return 2 * self.width * self.balance / (self.gpus * PEAK)


MODELS = Model("7B", 32, 4096, 24e9), Model("13B", 40, 5120, 21e9), Model("30B", 48, 7168, 37e9, gpus=4)
SEVEN, THIRTEEN, THIRTY = MODELS


def layer_flops(model: Model, tokens: float, attention: int = 1) -> float:
    """Section 3.2. A token attends to half of the others on average, in scores and sum: `attention` 2; the paper counts 1."""
    return 24 * tokens * model.width**2 + attention * tokens**2 * model.width


def layer_costs(model: Model, tokens: int, peak: float, bandwidth: float) -> Costs:
    """`peak`: FLOP/s of one GPU; `bandwidth`: bytes/s to all of them together."""
    speed, states = model.efficiency * peak * model.gpus, tokens * 2 * model.width / bandwidth
    return Costs(layer_flops(model, tokens) / speed, 4 * tokens * model.width**2 / speed, states, 2 * states)


def on_ssds(model: Model, each: int | None = None, tokens: int = TOKENS) -> Costs:
    """On A100s with `each` SSDs for a GPU; by default the paper's server, four in all."""
    return layer_costs(model, tokens, PEAK, min((each or 4 // model.gpus) * SSD, PCIE) * model.gpus)


def paper_seconds(plan: str, costs: Costs) -> float:
    """As HCache counts, with all R computed whole and without a question: the longest of computing, of what follows the
    first transfer of states, or the last one, and of the link."""
    recompute, hidden, kv = map(plan.count, "RHK")
    computing, loading = recompute * costs.recompute + hidden * costs.project, hidden * costs.load_states
    over_states = max(costs.load_states + hidden * costs.project, loading + costs.project) if hidden else 0.0
    return max(computing, over_states, loading + kv * costs.load_kv)


def restorations(layers: int, costs: Costs) -> tuple[str, dict[str, float]]:
    """-> the paper's plan, and each method's seconds; of the naive mixes of R and K, the best one's."""
    plan = planned.closed_form(layers, costs)
    plans = {"HCache": plan, "KV": "K" * layers, "states": "H" * layers, "recomputing": "R" * layers}
    mixes = ["R" * recompute + "K" * (layers - recompute) for recompute in range(layers + 1)]
    seconds = {name: paper_seconds(each, costs) for name, each in plans.items()}
    return plan, dict(seconds, naive=min(paper_seconds(mix, costs) for mix in mixes))


def ttft_gains(other: str, histories: list[int], new: int) -> list[float]:
    """TTFT over HCache's, of each model behind each history on the paper's server: what comes back, then `new` tokens."""
    gains = []
    for model, tokens in product(MODELS, histories):
        _, seconds = restorations(model.layers, on_ssds(model, None, tokens))
        flops = model.layers * (24 * new * model.width**2 + 4 * new * tokens * model.width)
        question = flops / (model.efficiency * PEAK * model.gpus)
        gains.append((seconds[other] + question) / (seconds["HCache"] + question))
    return gains


def token_wise(costs: Costs, layers: int, tokens: int, step: int = 1) -> tuple[int, int]:
    """Section 4.1.1's other division, with as many tokens projected as ends first, in multiples of `step`: in every layer those
    before are recomputed, where projecting is the faster lane, or else those after them are loaded. A token is taken to cost
    the same however many there are. Returns the first token that is projected, and the one after the last."""
    slower = costs.project + costs.question > costs.load_states

    def seconds(projected: int) -> float:
        share = projected / tokens
        loading = share * costs.load_states + slower * (1 - share) * costs.load_kv
        computing = share * costs.project + (not slower) * (1 - share) * costs.recompute + costs.question
        return max(loading + layers * computing, layers * loading + computing)

    projected = min({*range(0, tokens, step), tokens}, key=seconds)
    return (0, projected) if slower else (tokens - projected, tokens)


def over_plan(plan: str) -> float:
    """Bytes of K and V over those of a plan."""
    return 2 * len(plan) / (plan.count("H") + 2 * plan.count("K"))


def stored() -> list[float]:
    """Table 3 by the closed form."""
    return [over_plan(planned.closed_form(model.layers, on_ssds(model))) for model in MODELS]


def copy_over_computing(tokens: int = 4096) -> float:
    """70B on an H100, over 64 GB/s: K and V of 80 layers of 8 heads of 128 in 16 bits, over computing them."""
    return 4 * 80 * 8 * 128 * tokens / PLATFORMS["h800"][1] / (2 * 70e9 * tokens / (SHARE_OF_PEAK * H100))


# 2. What HCache prints: each yields titles, and (name, the paper's number or range, ours) -------

def schedules():
    yield f"Table 3. Layers restored from hidden states. Four SSDs in all, {TOKENS:,} tokens"
    for model in MODELS:
        costs, theirs = on_ssds(model), "".join(map(str.__mul__, "RHK", PAPER[f"{model.name} schedule"]))
        closed, best = planned.closed_form(model.layers, costs), planned.best_plan(model.layers, costs)
        for way, plan in ("closed form", closed), ("chapter 05", best):
            yield f"{model.name}, {way}: {counts(plan)}", theirs.count("H"), plan.count("H")
        for way, plan in ("closed form", closed), (f"the printed {counts(theirs)}", theirs):
            yield f"{model.name}, bytes: K and V over {way}", BYTES[model.name], over_plan(plan)


def gains(name: str, model: Model, costs: Costs, **papers):
    """Speed of HCache over others."""
    plan, seconds = restorations(model.layers, costs)
    for other, paper in papers.items():
        yield f"{model.name}, {name}, {counts(plan)}: over {other}", paper, seconds[other] / seconds["HCache"]
    return seconds


def gpus():
    yield "Figure 11 a-c. GPUs, host memory behind the PCIe link of each: speed of HCache over others'"
    single = {"7B, a30": 1.33, "13B, a100": 1.66, "13B, h800": 1.77}  # that 1.66 is the 13B's is our reading
    for model in MODELS:
        for gpu in GPUS[model.name]:
            peak, pcie = PLATFORMS[gpu]
            costs = layer_costs(model, TOKENS, peak, pcie * model.gpus)
            over_kv = single.get(f"{model.name}, {gpu}", OVER_KV)
            yield from gains(gpu, model, costs, KV=over_kv, recomputing=(5.04, 9.05))


def ssds():
    yield "Figure 11 d-f. SSDs for each A100. Over KV the text says 1.7-2.6 of all, and 1.33-1.81 of more of them"
    for model in MODELS:
        for each in (1, 2, 3, 4):
            costs, over_kv, over_recomputing = on_ssds(model, each), (1.7, 2.6), (2.3, 6.1)
            if costs.project > costs.load_states:  # our reading of "more"
                over_kv, over_recomputing = OVER_KV, (5.46, 6.08)
            if each == 1:
                over_kv = 2.09, 2.66
            yield from gains(f"{each} each", model, costs, KV=over_kv, recomputing=over_recomputing)
    yield "Figure 12. Speed of HCache over others. The text names no hardware; 3 each were chosen to meet the last row"
    kv, naive, states = (1.45, 2.66), (1.28, 1.42), (1.35, 1.64)
    yield from gains("1 each", THIRTEEN, on_ssds(THIRTEEN, 1), KV=kv, naive=naive, states=states)
    yield from gains("4 each", SEVEN, on_ssds(SEVEN, 4), KV=kv, naive=naive)
    seconds = yield from gains("3 each", THIRTY, on_ssds(THIRTY, 3), KV=kv, naive=naive, states=states)
    yield "30B, 3 each: hidden states only over KV", 0.87, seconds["KV"] / seconds["states"]
    yield "Figure 13a. 13B, one SSD: layers, or tokens, that come from hidden states; others are recomputed"
    costs = on_ssds(THIRTEEN, 1)
    first, last = token_wise(costs, THIRTEEN.layers, TOKENS)
    yield "13B, layers, closed form", 31, planned.closed_form(THIRTEEN.layers, costs).count("H")
    yield "13B, tokens", 794.0, float(last - first)


def lengths():
    times = (f"{6 + tokens / (4 * SEVEN.width):.2f} at {tokens:,}" for tokens in (TOKENS, LONGEST))
    yield f"Section 3.2. Computing a layer over projecting it, 6 + T / (4 D): {', '.join(times)} (7B)"
    yield f"Figure 11 g-i. Four SSDs in all: tokens a second at {LONGEST:,} over those at {TOKENS:,}"
    for attention, name in (1, "T^2 D operations in attention, as in section 3.2"), (2, "2 T^2 D"):
        short, long = (layer_flops(SEVEN, tokens, attention) / tokens for tokens in (TOKENS, LONGEST))
        yield f"7B, recomputing: {name}", 0.72, short / long


# 3. Cake ---------------------------------------------------------------------------------------

TOKEN_BYTES = 2 * 2 * SEVEN.layers * SEVEN.width  # 16 bits; section 5.1 rounds it to 0.5 MB
# Section 5.3: from 90 to 10 % of the GPU (an A100, as we take it), 14K tokens take 8.22 times as long, and 14.34 s longer
SECONDS_14K = 0.9 * 14.34 / (8.22 - 1)


def cake_seconds(tokens, gbps, share=1.0, peak=PEAK) -> tuple[float, float, float, float]:
    """Both pointers, 7B, on one GPU of which prefill has a `share` -> seconds to compute, to load, and until
    they meet, and the share of tokens that is computed."""
    speed = share * peak / PEAK * layer_flops(SEVEN, 14e3, 2) / SECONDS_14K  # FLOP/s, for one layer
    linear, square = 24 * SEVEN.width**2 / speed, 2 * SEVEN.width / speed  # t tokens: linear t + square t^2
    load = 8 * TOKEN_BYTES / (gbps * 1e9)  # seconds a token
    # The first t are computed: linear t + square t^2 = (tokens - t) load
    met = (math.sqrt((linear + load) ** 2 + 4 * square * tokens * load) - linear - load) / (2 * square)
    return linear * tokens + square * tokens**2, tokens * load, (tokens - met) * load, met / tokens


def less(*cell) -> tuple[float, float]:
    """By how much TTFT of both is less than that of only computing, and of only loading."""
    computing, loading, both, _ = cake_seconds(*cell)
    return 1 - both / computing, 1 - both / loading


def both_over(way: int) -> list[float]:
    """TTFT of both over that of computing alone (0) or of loading alone (1): 2 to 10 Gbit/s, 10 to 90 % of an A100, as in appendix C."""
    return [1 - less(*cell)[way] for cell in product((9e3, 14e3), (2, 5, 10), (0.1, 0.5, 0.9))]


def cake():
    yield "Equation 1: 4 times layers x width x bytes; K and V are two. Section 2.3: seconds"
    kv = 2 * 2 * 80 * 8192 / 1e6
    yield "70B, MB a token, by equation 1", 2.5, 2 * kv
    yield "70B, MB a token, K and V (of 64 heads; it has 8, which is an eighth)", 2.5, kv
    yield "7B, seconds to compute 10K tokens on an A100", 1.0, cake_seconds(1e4, 1)[0]
    yield "Figure 5a. 32K tokens, all of the GPU: TTFT of both is less by"
    for gpu, peak, *papers in ("A100", PEAK, 0.935, 0.769, 0.315), ("H100", H100, 0.946, 0.802, 0.267):
        (_, slow), (computing, fast) = (less(32e3, gbps, 1.0, peak) for gbps in (2, 10))
        yield f"{gpu}, only loading, 2 Gbit/s", papers[0], slow
        yield f"{gpu}, only loading, 10 Gbit/s", papers[1], fast
        yield f"{gpu}, only computing, 10 Gbit/s", papers[2], computing
    yield "Figures 3 and 5b. 10 Gbit/s, all of an A100"
    short, long = cake_seconds(2e3, 10), cake_seconds(32e3, 10)
    yield "32K tokens (5.2 names no length): share computed", 0.75, long[3]
    yield "share computed, less at 32K than at 2K by", 0.10, short[3] - long[3]
    yield "TTFT over only computing, less at 32K by", 0.15, short[2] / short[0] - long[2] / long[0]
    yield "Figures 6 and 8. 14K tokens, 10 to 90 % of a GPU (an A100, as we take it), 2 to 10 Gbit/s: TTFT of both is less by"
    computing, loading = zip(*(less(14e3, gbps, share) for gbps in (2, 10) for share in (0.1, 0.9)))
    yield "only computing, least", 0.053, min(computing)
    yield "only computing, most", 0.681, max(computing)
    yield "only loading, least", 0.274, min(loading)
    yield "only loading, most", 0.937, max(loading)
    yield "only loading, at 10 % of the GPU, most", 0.651, max(less(14e3, gbps, 0.1)[1] for gbps in (2, 10))


# 4. CAPTURE ------------------------------------------------------------------------------------

def capture_lanes(name: str, tokens: int, batch: int = BATCH) -> dict[str, float]:
    """Seconds of a layer in a decode step of a `batch` with `tokens` of context in all, on a 4090, as letters of `capture_seconds`."""
    (layers, width), (peak, pcie) = OPT[name], PLATFORMS["4090"]
    rate, weights, kv = SHARE_OF_PEAK * peak, 2 * 12 * width**2, tokens * 4 * width
    device = max(0.0, DEVICE - 2 * weights) / layers  # beside two layers that come and go
    link = dict(W=weights / pcie, K=kv / pcie, M=min(device, weights + kv) / pcie)
    return dict(link, R=4 * tokens * width**2 / rate, B=2 * batch * 12 * width**2 / rate)


def capture_seconds(W, K, R, B, M, act: float) -> float:
    """The slower of two lanes: W weights, K all K and V, M what the device holds, as seconds of link; R rebuilding all, B the
    new tokens' own products. `act`: the share of activations."""
    return max(W + K - act * K / 2 - M, B + act * R)


def capture_gains(name: str, prompt: int, mixes=range(1001)) -> tuple[float, float]:
    """Prefill and NEW steps at half of the answer: the best of `mixes`, activations in a thousand, over none, and over all."""
    lanes, rate = capture_lanes(name, BATCH * (prompt + NEW // 2)), SHARE_OF_PEAK * PLATFORMS["4090"][0]
    prefill = BATCH * layer_flops(Model(name, *OPT[name], 0), prompt, 2) / rate
    none, every, best = (prefill + NEW * min(capture_seconds(**lanes, act=share / 1000) for share in some)
                         for some in ([0], [1000], mixes))  # fmt: skip
    return none / best, every / best


def capture_mean(way: int) -> list[float]:
    """In geometric mean over models and prompts: over K and V only (0), over activations only (1)."""
    return [statistics.geometric_mean(capture_gains(*cell)[way] for cell in product(OPT, PROMPTS))]


def capture_traffic(name: str, requests: int, context: int = 1024) -> float:
    """Bytes of K and V over those of the best share of activations and K and V, decoding; weights left out, as in Figure 9."""
    lanes = capture_lanes(name, requests * context, requests)
    best = min(range(1001), key=lambda share: capture_seconds(**lanes, act=share / 1000))
    return 1 / (1 - best / 2000)


def capture_ratio(name: str) -> float:
    """Algorithm 1 on that platform -> KV blocks to ACT blocks in host memory. A block is a token here."""
    (layers, width), lanes = OPT[name], capture_lanes(name, 1)
    act, kv = 2 * width * layers, 4 * width * layers
    on_device = max(0.0, DEVICE - 4 * 12 * width**2) / act
    acts, kvs = hybrid.algorithm_1(*(lanes[key] for key in "WRK"), on_device, HOST, layers * 24 * width**2, act, kv)
    return kvs / acts


def capture():
    yield "Section V-E. Bytes of KV to ACT in host memory by Algorithm 1. It grows with the width; the printed one falls"
    for name, paper in ("30B", 2.0), ("66B", 1.78):
        yield f"OPT-{name}", paper, 2 * capture_ratio(name)
    yield "Figure 8. Our prompts, 512 to 1,920: over K and V only (the paper: over FlexGen), and activations only"
    for name, over_kv, over_act in ("6.7B", 2.05, 1.23), ("66B", 2.33, 1.40):
        kv, act = zip(*(capture_gains(name, prompt) for prompt in PROMPTS))
        for what, paper, ours in ("K and V", over_kv, kv), ("activations", over_act, act):
            yield f"OPT-{name}, over {what} only, least of the prompts", paper, min(ours)
            yield f"OPT-{name}, over {what} only, most", paper, max(ours)
    yield "Table III. Prompts of 1,920, over activations only: as much memory of each kind (1:1), and all of CAPTURE"
    for name, halves, whole in ("6.7B", 1.26, 1.26), ("13B", 1.34, 1.37), ("30B", 1.38, 1.61), ("66B", 1.39, 1.56):
        yield f"OPT-{name}, 1:1", halves, capture_gains(name, 1920, [667])[1]
        yield f"OPT-{name}, all", whole, capture_gains(name, 1920)[1]


# 5. Comparing ----------------------------------------------------------------------------------

PAPERS = {"HCache": (schedules, gpus, ssds, lengths), "Cake": (cake,), "CAPTURE": (capture,)}


def judge(table: str, name: str, paper, ours: float) -> dict:
    """Say whether `ours` agrees with `paper`: lies, in two digits, in its range (a tuple), within 5 % of its
    number or, of layers (an int), within one; and how far it is from that number, or from the nearer end."""
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    slack = {tuple: 0, int: 1}.get(type(paper), 0.05 * low)
    difference = ours - min(max(ours, low), high)
    agrees = low - slack <= round(ours, 2) <= high + slack
    verdict = "yes" if agrees else f"no: {abs(difference):.2f} {'above' if difference > 0 else 'below'}"
    return dict(table=table, name=name, paper=paper, ours=ours, difference=difference, verdict=verdict)


def main() -> dict:
    """Print all tables -> {"rows": [{table, name, paper, ours, difference, verdict}]}."""
    rows, summary = [], []
    print("A single number agrees within 5%, a number of layers within one.")
    for source, tables in PAPERS.items():
        print(f"\n{source:<72}{'paper':>11}{'ours':>9}{'diff.':>8}   agrees")
        before = len(rows)
        for figure in chain.from_iterable(table() for table in tables):
            if isinstance(figure, str):
                print(title := figure)
                continue
            rows.append(row := judge(title, *figure))
            paper = "{:.2f}-{:.2f}".format(*figure[1]) if isinstance(figure[1], tuple) else f"{figure[1]:.2f}"
            print(f"  {row['name']:<70}{paper:>11}{row['ours']:9.2f}{row['difference']:+8.2f}   {row['verdict']}")
        verdicts = [row["verdict"] for row in rows[before:]]
        summary.append(f"{verdicts.count('yes')} of {len(verdicts)} of {source}")
    print(f"\nRows that agree: {', '.join(summary)}.")
    return dict(rows=rows)


if __name__ == "__main__":
    main()
