"""Compute figures of HCache (EuroSys '25), Cake and CAPTURE by arithmetic, for their hardware and models.

    python -m tools.on_paper

Costs follow from sizes, bandwidth and FLOP/s. Each result stands beside the number that the paper prints.
Matrix products reach a share of the peak FLOP/s, which is calibrated. HCache: by the bandwidth at which
projecting takes as long as loading hidden states (section 6.1.3). Cake: by the time to compute 14K tokens
(5.3), on an A100, which is our assumption. CAPTURE: by the share of HCache's 7B. Other GPUs, and recomputing,
are assumed to reach the same share. The text of HCache gives ranges for most of Figure 11; the pairs of GPU
and model are our choice.

Sources: HCache, Tables 2 and 3, sections 3.2, 4.1 and 6; Cake (the first version, under review), sections
2.3, 3 and 5; CAPTURE, IV and V; NVIDIA's data sheets.
"""

import importlib
import statistics
from itertools import chain, product
from typing import NamedTuple

from benchmarks.tables import plan as counts

planned, hybrid = importlib.import_module("05_bubble_free"), importlib.import_module("08_hybrid_blocks")

# HCache, table 2: name -> peak 16-bit FLOP/s of a GPU, bytes/s of its link
PLATFORMS = {"a100": (312e12, 32e9), "a30": (165e12, 32e9), "4090": (330e12, 32e9), "l20": (120e12, 32e9), "h800": (990e12, 64e9)}
PEAK, PCIE = PLATFORMS["a100"]
SHARE_OF_PEAK = 4 * 4096**2 / (2 * 4096 / 24e9) / PEAK  # 63 %: projecting and loading are even at 24 GB/s
H100, SSD = 989e12, 6.9e9  # FLOP/s; bytes/s, section 6.2.2
TOKENS, LONGEST = 1024, 16384  # of a history, in HCache
# Table 3: layers that are recomputed, restored from hidden states, and loaded as K and V
PAPER = {"7B schedule": (0, 31, 1), "13B schedule": (0, 36, 4), "30B schedule": (8, 40, 0)}
# Table 3: bytes of a token as K and V over those of HCache. The paper prints half of the bytes of 16 bits:
# compare ratios only.
BYTES = {"7B": 256 / 132, "13B": 400 / 210, "30B": 672 / 280}
OVER_KV = 1.33, 1.81  # speed of HCache over K and V, sections 6.2.1 and 6.2.2
GPUS = {"7B": PLATFORMS, "13B": ("a100", "l20", "h800"), "30B": PLATFORMS}  # 13B does not fit into 24 GB
# CAPTURE: layers, width
OPT = {"6.7B": (32, 4096), "13B": (40, 5120), "30B": (48, 7168), "66B": (64, 9216)}
HOST, DEVICE, BATCH, NEW = 882e9, 24e9, 128, 128  # bytes, requests, tokens; sections V-A and V-B
PROMPTS = 512, 1024, 1920  # tokens


# 1. Costs, and HCache's plans ------------------------------------------------------------------

class Model(NamedTuple):
    """A model of HCache's evaluation and the GPUs that serve it."""

    name: str
    layers: int
    width: int
    balance: float  # bytes/s at which projecting takes as long as loading hidden states
    gpus: int = 1

    @property
    def efficiency(self) -> float:
        """The share of the A100s' peak at which both are balanced: 4 T D^2 operations in the time of 2 T D
        bytes."""
        return 2 * self.width * self.balance / (self.gpus * PEAK)


MODELS = Model("7B", 32, 4096, 24e9), Model("13B", 40, 5120, 21e9), Model("30B", 48, 7168, 37e9, gpus=4)
SEVEN, THIRTEEN, THIRTY = MODELS


def layer_flops(model: Model, tokens: float, attention: int = 1) -> float:
    """Return the operations of a layer for `tokens` tokens (section 3.2). The T^2 D term has the factor
    `attention`: 2 for scores and weighted sum, each over half of the tokens on average; the paper counts
    1."""
    return 24 * tokens * model.width**2 + attention * tokens**2 * model.width


def layer_costs(model: Model, tokens: int, peak: float, bandwidth: float) -> planned.LayerCosts:
    """Return the costs of a layer. `peak`: FLOP/s of one GPU; `bandwidth`: bytes/s to all GPUs together."""
    speed, states = model.efficiency * peak * model.gpus, tokens * 2 * model.width / bandwidth
    return planned.LayerCosts(layer_flops(model, tokens) / speed, 4 * tokens * model.width**2 / speed, states, 2 * states)


def on_ssds(model: Model, each: int | None = None, tokens: int = TOKENS) -> planned.LayerCosts:
    """Return the costs of a layer on A100s with `each` SSDs for each GPU; by default the paper's server, with
    four in all."""
    return layer_costs(model, tokens, PEAK, min((each or 4 // model.gpus) * SSD, PCIE) * model.gpus)


def paper_seconds(plan: str, costs: planned.LayerCosts) -> float:
    """Return the seconds of a plan as HCache counts them.

    Recomputed layers are computed whole, and no question follows. The result is the longest of three times:
    all computing; loading and projecting the hidden states in a pipeline; and the link."""
    recompute, hidden, kv = map(plan.count, "RHK")
    computing, loading = recompute * costs.recompute + hidden * costs.project, hidden * costs.load_states
    over_states = max(costs.load_states + hidden * costs.project, loading + costs.project) if hidden else 0.0
    return max(computing, over_states, loading + kv * costs.load_kv)


def restorations(layers: int, costs: planned.LayerCosts) -> tuple[str, dict[str, float]]:
    """Return the paper's plan, and method -> seconds. "naive" is the best mix of recomputed layers and K and
    V."""
    plan = planned.closed_form(layers, costs)
    plans = {"HCache": plan, "KV": "K" * layers, "states": "H" * layers, "recomputing": "R" * layers}
    naive = min(paper_seconds("R" * recompute + "K" * (layers - recompute), costs) for recompute in range(layers + 1))
    return plan, {name: paper_seconds(each, costs) for name, each in plans.items()} | {"naive": naive}


def ttft_gains(other: str, histories: list[int], new: int, each: int | None = None) -> list[float]:
    """Return TTFT of method `other` over that of HCache on the paper's server, for each model and history.

    TTFT is the restoration of a history plus the prefill of `new` tokens. `each`: see `on_ssds`."""
    gains = []
    for model, tokens in product(MODELS, histories):
        _, seconds = restorations(model.layers, on_ssds(model, each, tokens))
        flops = model.layers * (24 * new * model.width**2 + 4 * new * tokens * model.width)
        question = flops / (model.efficiency * PEAK * model.gpus)
        gains.append((seconds[other] + question) / (seconds["HCache"] + question))
    return gains


def projected_tokens(costs: planned.LayerCosts, layers: int, tokens: int) -> int:
    """Divide by tokens (section 4.1.1), where projecting is faster than loading hidden states. In each layer
    the first tokens are recomputed, and the others are projected. A token's cost is assumed not to depend on
    their number. Returns: the number of projected tokens for which a restoration ends first."""
    def seconds(projected: int) -> float:
        share = projected / tokens
        loading, computing = share * costs.load_states, share * costs.project + (1 - share) * costs.recompute
        return max(loading, computing) * layers + min(loading, computing)
    return min(range(tokens + 1), key=seconds)


def over_plan(plan: str) -> float:
    """Return the bytes of K and V in all layers over the bytes that a plan keeps."""
    return 2 * len(plan) / (plan.count("H") + 2 * plan.count("K"))


def copy_over_computing(tokens: int = 4096) -> float:
    """Return the time to copy K and V over the time to compute them: a 70B on an H100, 64 GB/s, 16 bits, 80
    layers with 8 KV heads of 128."""
    return 4 * 80 * 8 * 128 * tokens / PLATFORMS["h800"][1] / (2 * 70e9 * tokens / (SHARE_OF_PEAK * H100))


# 2. HCache: each yields titles, and tuples (name, the paper's number or range, ours) -------

def schedules():
    yield f"Table 3. Layers restored from hidden states. Four SSDs in all, {TOKENS:,} tokens"
    for model in MODELS:
        costs, theirs = on_ssds(model), "".join(map(str.__mul__, "RHK", PAPER[f"{model.name} schedule"]))
        closed, best = planned.closed_form(model.layers, costs), planned.best_plan(model.layers, costs)
        for way, plan in ("closed form", closed), ("chapter 05", best):
            yield f"{model.name}, {way}: {counts(plan)}", theirs.count("H"), plan.count("H")
        for way, plan in ("closed form", closed), (f"the printed {counts(theirs)}", theirs):
            yield f"{model.name}, bytes: K and V over {way}", BYTES[model.name], over_plan(plan)


def gains(name: str, model: Model, costs: planned.LayerCosts, **papers):
    """Yield the speed of HCache over that of each method in `papers` (method -> the paper's number). Returns:
    the seconds."""
    plan, seconds = restorations(model.layers, costs)
    for other, paper in papers.items():
        yield f"{model.name}, {name}, {counts(plan)}: over {other}", paper, seconds[other] / seconds["HCache"]
    return seconds


def gpus():
    yield "Figure 11 a-c. GPUs, host memory over the PCIe link of each: speed of HCache over other methods"
    single = {"7B, a30": 1.33, "13B, a100": 1.66, "13B, h800": 1.77}  # the text does not say clearly that 1.66 is the 13B's
    for model in MODELS:
        for gpu in GPUS[model.name]:
            (peak, pcie), over_kv = PLATFORMS[gpu], single.get(f"{model.name}, {gpu}", OVER_KV)
            yield from gains(gpu, model, layer_costs(model, TOKENS, peak, pcie * model.gpus), KV=over_kv, recomputing=(5.04, 9.05))


def ssds():
    yield "Figure 11 d-f. SSDs for each A100. Over KV the text says 1.7-2.6 for all numbers, and 1.33-1.81 for more SSDs"
    for model in MODELS:
        for each in (1, 2, 3, 4):
            costs, over_kv, over_recomputing = on_ssds(model, each), (1.7, 2.6), (2.3, 6.1)
            if costs.project > costs.load_states:  # our reading of "more SSDs"
                over_kv, over_recomputing = OVER_KV, (5.46, 6.08)
            if each == 1:
                over_kv = 2.09, 2.66
            yield from gains(f"{each} each", model, costs, KV=over_kv, recomputing=over_recomputing)
    yield "Figure 12. Speed of HCache over other methods. The text names no hardware; 3 SSDs each were chosen to meet the last row"
    kv, naive, states = (1.45, 2.66), (1.28, 1.42), (1.35, 1.64)
    yield from gains("1 each", THIRTEEN, on_ssds(THIRTEEN, 1), KV=kv, naive=naive, states=states)
    yield from gains("4 each", SEVEN, on_ssds(SEVEN, 4), KV=kv, naive=naive)
    seconds = yield from gains("3 each", THIRTY, on_ssds(THIRTY, 3), KV=kv, naive=naive, states=states)
    yield "30B, 3 each: hidden states only over KV", 0.87, seconds["KV"] / seconds["states"]
    yield "Figure 13a. 13B, one SSD: layers, or tokens, restored from hidden states; the others are recomputed"
    costs = on_ssds(THIRTEEN, 1)
    yield "13B, layers, closed form", 31, planned.closed_form(THIRTEEN.layers, costs).count("H")
    yield "13B, tokens", 794.0, float(projected_tokens(costs, THIRTEEN.layers, TOKENS))


def lengths():
    times = (f"{6 + tokens / (4 * SEVEN.width):.2f} at {tokens:,}" for tokens in (TOKENS, LONGEST))
    yield f"Section 3.2. Computing a layer over projecting it, 6 + T / (4 D): {', '.join(times)} (7B)"
    yield f"Figure 11 g-i. Four SSDs in all: tokens a second at {LONGEST:,} over those at {TOKENS:,}"
    for attention, name in (1, "T^2 D operations in attention, as in section 3.2"), (2, "2 T^2 D"):
        short, long = (layer_flops(SEVEN, tokens, attention) / tokens for tokens in (TOKENS, LONGEST))
        yield f"7B, recomputing: {name}", 0.72, short / long


# 3. Cake ---------------------------------------------------------------------------------------

TOKEN_BYTES = 2 * 2 * SEVEN.layers * SEVEN.width  # 16 bits; section 5.1 rounds it to 0.5 MB
# Section 5.3: with 10 instead of 90 % of the GPU (we assume an A100), 14K tokens take 8.22 times as long, and
# 14.34 s more
SECONDS_14K = 0.9 * 14.34 / (8.22 - 1)


def cake_seconds(tokens, gbps, share=1.0, peak=PEAK) -> tuple[float, float, float, float]:
    """Run both pointers for a 7B on one GPU, of which prefill has a `share`.

    Returns: seconds to compute all tokens, to load all, and until both meet; and the share of tokens that is
    computed."""
    speed = share * peak / PEAK * layer_flops(SEVEN, 14e3, 2) / SECONDS_14K  # FLOP/s, for one layer
    linear, square = 24 * SEVEN.width**2 / speed, 2 * SEVEN.width / speed  # t tokens: linear t + square t^2
    load = 8 * TOKEN_BYTES / (gbps * 1e9)  # seconds a token
    # The first t are computed: linear t + square t^2 = (tokens - t) load
    met = (((linear + load) ** 2 + 4 * square * tokens * load) ** 0.5 - linear - load) / (2 * square)
    return linear * tokens + square * tokens**2, tokens * load, (tokens - met) * load, met / tokens


def less(*cell) -> tuple[float, float]:
    """Return by which share both ends reduce TTFT of computing alone, and of loading alone. `cell`: as for
    `cake_seconds`."""
    computing, loading, both, _ = cake_seconds(*cell)
    return 1 - both / computing, 1 - both / loading


def cake():
    yield "Equation 1 counts 4 x layers x width x bytes; K and V are 2 x. Section 2.3: seconds"
    kv = 2 * 2 * 80 * 8192 / 1e6
    yield "70B, MB a token, by equation 1", 2.5, 2 * kv
    yield "70B, MB a token, K and V (of 64 heads; it has 8, which is an eighth)", 2.5, kv
    yield "7B, seconds to compute 10K tokens on an A100", 1.0, cake_seconds(1e4, 1)[0]
    yield "Figure 5a. 32K tokens, the whole GPU: both ends reduce TTFT by"
    for gpu, peak, *papers in ("A100", PEAK, 0.935, 0.769, 0.315), ("H100", H100, 0.946, 0.802, 0.267):
        (_, slow), (computing, fast) = (less(32e3, gbps, 1.0, peak) for gbps in (2, 10))
        yield f"{gpu}, of loading alone, 2 Gbit/s", papers[0], slow
        yield f"{gpu}, of loading alone, 10 Gbit/s", papers[1], fast
        yield f"{gpu}, of computing alone, 10 Gbit/s", papers[2], computing
    yield "Figures 3 and 5b. 10 Gbit/s, a whole A100"
    short, long = cake_seconds(2e3, 10), cake_seconds(32e3, 10)
    yield "32K tokens (5.2 names no length): share computed", 0.75, long[3]
    yield "share computed, less at 32K than at 2K by", 0.10, short[3] - long[3]
    yield "TTFT over that of computing alone, less at 32K by", 0.15, short[2] / short[0] - long[2] / long[0]
    yield "Figures 6 and 8. 14K tokens, 10 to 90 % of a GPU (we assume an A100), 2 to 10 Gbit/s: both ends reduce TTFT by"
    computing, loading = zip(*(less(14e3, gbps, share) for gbps in (2, 10) for share in (0.1, 0.9)))
    yield "of computing alone, least", 0.053, min(computing)
    yield "of computing alone, most", 0.681, max(computing)
    yield "of loading alone, least", 0.274, min(loading)
    yield "of loading alone, most", 0.937, max(loading)
    yield "of loading alone, at 10 % of the GPU, most", 0.651, max(less(14e3, gbps, 0.1)[1] for gbps in (2, 10))


# 4. CAPTURE ------------------------------------------------------------------------------------

def capture_lanes(name: str, tokens: int, batch: int = BATCH) -> dict[str, float]:
    """Return the seconds of a layer in a decode step on a 4090, as arguments of `capture_seconds`.

    `tokens`: of context, of all `batch` requests together."""
    (layers, width), (peak, pcie) = OPT[name], PLATFORMS["4090"]
    rate, weights, kv = SHARE_OF_PEAK * peak, 2 * 12 * width**2, tokens * 4 * width
    device = max(0.0, DEVICE - 2 * weights) / layers  # beside two places for layers that come and go
    link = dict(W=weights / pcie, K=kv / pcie, M=min(device, weights + kv) / pcie)
    return dict(link, R=4 * tokens * width**2 / rate, B=2 * batch * 12 * width**2 / rate)


def capture_seconds(W, K, R, B, M, act: float) -> float:
    """Return the seconds of the slower lane in a layer.

    Seconds of the link: W the weights, K all K and V, M the bytes that the device holds. Seconds of the GPU:
    R rebuilding all K and V, B the products of the new tokens. `act`: the share of the context that is kept
    as activations."""
    return max(W + K - act * K / 2 - M, B + act * R)


def capture_gains(name: str, prompt: int, mixes=range(1001)) -> tuple[float, float]:
    """Return the throughput of the best of `mixes` over K and V only, and over activations only.

    It counts prefill, and NEW decode steps with half of the answer in the context. `mixes`: activations in a
    thousand."""
    lanes, rate = capture_lanes(name, BATCH * (prompt + NEW // 2)), SHARE_OF_PEAK * PLATFORMS["4090"][0]
    prefill = BATCH * layer_flops(Model(name, *OPT[name], 0), prompt, 2) / rate
    none, every, best = (prefill + NEW * min(capture_seconds(**lanes, act=share / 1000) for share in some)
                         for some in ([0], [1000], mixes))  # fmt: skip
    return none / best, every / best


def capture_mean(way: int) -> list[float]:
    """Return the gain in geometric mean over models and prompts, over K and V only (`way` 0) or activations
    only (1)."""
    return [statistics.geometric_mean(capture_gains(*cell)[way] for cell in product(OPT, PROMPTS))]


def capture_ratio(name: str) -> float:
    """Return the number of KV blocks over that of ACT blocks in host memory, by Algorithm 1. A block is a
    token here."""
    (layers, width), lanes = OPT[name], capture_lanes(name, 1)
    act, kv, weights = 2 * width * layers, 4 * width * layers, 24 * width**2
    acts, kvs = hybrid.algorithm_1(*(lanes[key] for key in "WRK"), max(0.0, DEVICE - 2 * weights) / act, HOST, layers * weights, act, kv)
    return kvs / acts


def capture():
    yield "Section V-E. Bytes of KV to ACT in host memory by Algorithm 1. It grows with the width; the printed ratio falls"
    for name, paper in ("30B", 2.0), ("66B", 1.78):
        yield f"OPT-{name}", paper, 2 * capture_ratio(name)
    yield "Figure 8. Prompts of our choice, 512 to 1,920: over K and V only (the paper: over FlexGen), and activations only"
    for name, over_kv, over_act in ("6.7B", 2.05, 1.23), ("66B", 2.33, 1.40):
        kv, act = zip(*(capture_gains(name, prompt) for prompt in PROMPTS))
        for what, paper, ours in ("K and V", over_kv, kv), ("activations", over_act, act):
            yield f"OPT-{name}, over {what} only, least of the prompts", paper, min(ours)
            yield f"OPT-{name}, over {what} only, most", paper, max(ours)
    yield "Table III. Prompts of 1,920, over activations only: equal memory for both kinds (1:1), and all of CAPTURE"
    for name, halves, whole in ("6.7B", 1.26, 1.26), ("13B", 1.34, 1.37), ("30B", 1.38, 1.61), ("66B", 1.39, 1.56):
        yield f"OPT-{name}, 1:1", halves, capture_gains(name, 1920, [667])[1]
        yield f"OPT-{name}, all", whole, capture_gains(name, 1920)[1]


# 5. Sentences ----------------------------------------------------------------------------------

def sentences():
    yield "HCache 2.4 and 6.3.3; Cake's introduction and 2.3; part 12 of the series behind chapter 03"
    for model, billions, paper in (SEVEN, 6.74, 48.0), (THIRTEEN, 13.0, 17.0):
        yield f"{model.name}, thousands of tokens beside the weights in 40 GB", paper, (40e6 - 2e6 * billions) / (4 * model.layers * model.width)
    yield "13B, ms of a layer's prefill, 10 MB of hidden states", 3.0, 1e3 * layer_flops(THIRTEEN, TOKENS) / (THIRTEEN.efficiency * PEAK)
    yield "70B, GB of 72K tokens of 2.5 MB", 180.0, 72 * 2.5
    larger = 80 * layer_flops(Model("70B", 80, 8192, 0), 72e3, 2) / (SEVEN.layers * layer_flops(SEVEN, 14e3, 2))
    yield "70B, seconds to compute 72K tokens on an A100", 30.0, larger * SECONDS_14K
    for gbps, paper in (24, 8.0), (20, 10.0):
        yield f"70B, seconds to load 25 GB at {gbps} Gbit/s", paper, 25 * 8 / gbps
    yield "70B, contexts of 4,096 tokens beside 35 GB in 80 GB", 35.0, 45e9 / (4 * 80 * 8 * 128 * 4096)


# 6. Comparing ----------------------------------------------------------------------------------

PAPERS = {"HCache": (schedules, gpus, ssds, lengths), "Cake": (cake,), "CAPTURE": (capture,), "Sentences": (sentences,)}


def judge(table: str, name: str, paper, ours: float) -> dict:
    """Judge whether `ours` agrees with `paper`. Returns: the row that `main` describes.

    With two decimals it must lie in the paper's range (a tuple), within 5 % of a number (a float), or within
    one of a number of layers (an int). `difference` is the distance to that number, or to the closer end of
    the range."""
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    slack = {tuple: 0, int: 1}.get(type(paper), 0.05 * low)
    difference = ours - min(max(ours, low), high)
    distance = f"no: {abs(difference):.2f} {'above' if difference > 0 else 'below'}"
    verdict = "yes" if low - slack <= round(ours, 2) <= high + slack else distance
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
        summary.append(f"{sum(row['verdict'] == 'yes' for row in rows[before:])} of {len(rows) - before} of {source}")
    print(f"\nRows that agree: {', '.join(summary)}.")
    return dict(rows=rows)


if __name__ == "__main__":
    main()
