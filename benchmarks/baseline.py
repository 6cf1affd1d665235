"""Chapters 01 and 02 against `transformers` on the same weights, in one interleaved run.

    python -m benchmarks.baseline                       all models; results in benchmarks/results/
    python -m benchmarks.baseline --model classroom --dtype float32

Claims: TBT 1.4 times better on random:tinyllama in float32 and in bfloat16, 1.5 times on classroom; TTFT of a
512-token prompt at least equal. TBT is the mean time between the tokens of one answer; each round measures
all engines, and a ratio is the median over rounds of theirs / ours. Chapter 02 has one request, and blocks for
more; `transformers` runs eager, with each of its caches: dynamic (its default, and what the claims are against),
static, and on a GPU offloaded to host memory. Also reported: what share of the measured memory bandwidth decode
reaches, and prefill of the measured matrix rate.
"""
import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.limits import matrix_rate, memory_bandwidth  # noqa: E402
from benchmarks.reference import one_sentence, reference_model, set_imports_aside  # noqa: E402
from common import checkpoint, cli  # noqa: E402
from common.requests import Request  # noqa: E402

baseline, paged = importlib.import_module("01_baseline"), importlib.import_module("02_paged_kv")

CASES = [("classroom", "float32", 1.5), ("random:tinyllama", "float32", 1.4), ("random:tinyllama", "bfloat16", 1.4)]
RESULTS = Path(__file__).resolve().parent / "results"
UNITS = "ttft", "tbt"
PEERS = {"dynamic": {}, "static": dict(cache_implementation="static"), "offloaded": dict(cache_implementation="offloaded")}


class Clock(BaseStreamer):
    """Notes when each token leaves `generate`; the first call brings the prompt."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def generate(model, prompt: list[int], new: int, **cache) -> tuple[list[float], list[int]]:
    """`generate` of transformers, greedy and eager (compiling takes longer than it wins, and needs a compiler) -> when each token
    was there, in seconds of time.perf_counter(), and the tokens."""
    ids, clock = torch.tensor([prompt], device=model.device), Clock()                           # [1, T]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                         streamer=clock, pad_token_id=0, disable_compile=True, **cache)
    return clock.times[1:], out[0, len(prompt):].tolist()


def measure_theirs(model, prompt: list[int], new: int, **cache) -> tuple[float, float, list[int]]:
    """-> TTFT ms, TBT ms, tokens."""
    begin = time.perf_counter()
    times, tokens = generate(model, prompt, new, **cache)
    return (times[0] - begin) * 1e3, (times[-1] - times[0]) / (new - 1) * 1e3, tokens


def measure_ours(engine, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """A lone request; nothing of the prompt is cached."""
    if engine.pools:
        engine.evict("device")
    result = engine.generate([Request(prompt, new)])[0].outcome
    return result.ttft_ms, result.tbt_ms, result.tokens


def spread(samples: list[float]) -> dict:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def compare(name: str, dtype: str, claim: float, device: str, rounds: int, new: int) -> dict:
    # 1. All engines on the same weights
    model, *_ = checkpoint.load(name, dtype, device)
    reference = reference_model(name, model.dtype, model.device.type)
    reference.generation_config.eos_token_id = None
    length = min(512, model.config.max_position_embeddings - new)
    prompt = torch.randint(5, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    make = {"01": lambda: partial(measure_ours, baseline.Engine(model)),
            "02": lambda: partial(measure_ours, paged.Engine(paged.Runner(model, (len(prompt) + new) // 8))),
            **{peer: lambda cache=cache: partial(measure_theirs, reference, **cache) for peer, cache in PEERS.items()
               if peer != "offloaded" or device == "cuda"}}

    # 2. They take turns
    measure, taken, same = {what: made() for what, made in make.items()}, {what: [] for what in make}, {}
    for round_ in tqdm(range(rounds + 1), desc=f"{name} {dtype}", unit="round"):
        answers = {what: call(prompt, new) for what, call in measure.items()}
        same = {what: {yardstick: sum(x == y for x, y in zip(answers[what][2], answers[yardstick][2]))
                       for yardstick in ("01", "dynamic")} for what in answers}
        for what, answer in answers.items() if round_ else ():          # the first is the warm-up
            taken[what].append(answer)
    del measure

    # 3. What each needs at least: bytes for a decoded token, products for the prompt
    weights = sum(p.numel() for p in reference.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.embedding.numel()               # one row of it is read for a token
    cached = (len(prompt) + new / 2) * model.config.kv_numbers_per_token
    read = (weights + cached) * model.dtype.itemsize     # bytes per decoded token
    head = model.config.hidden_size * model.config.vocab_size           # logits are computed for the last token only
    flops = 2 * (weights - head) * len(prompt) + 2 * head
    bandwidth, rate = memory_bandwidth(model.device), matrix_rate(model.dtype, model.device)

    def figures(what: str) -> dict:
        ttft, tbt = ([answer[index] for answer in taken[what]] for index in (0, 1))
        return {"ttft_ms": spread(ttft), "tbt_ms": spread(tbt),
                "equal_tokens": same[what]["01"], "share_of_bandwidth": read / statistics.median(tbt) * 1e3 / bandwidth,
                "share_of_matrix_rate": flops / statistics.median(ttft) * 1e3 / rate}

    def ratios(ours: str) -> dict:
        return {f"{unit}_ratio": {peer: spread([b[index] / a[index] for a, b in zip(taken[ours], taken[peer])])
                                  for peer in PEERS if peer in taken}
                for index, unit in enumerate(UNITS)}
    ours, theirs, against = figures("01"), figures("dynamic"), ratios("01")
    tbt = ours["tbt_ms"]["median"] / 1e3
    return {
        "model": name, "dtype": dtype, "claimed_tbt_ratio": claim, "equal_tokens": same["01"]["dynamic"], "new_tokens": new,
        "prompt_tokens": len(prompt),
        "ttft_ms": {"ours": ours["ttft_ms"], "transformers": theirs["ttft_ms"]},
        "tbt_ms": {"ours": ours["tbt_ms"], "transformers": theirs["tbt_ms"]},
        "ttft_ratio": against["ttft_ratio"]["dynamic"], "tbt_ratio": against["tbt_ratio"]["dynamic"],
        "decode_bytes_per_token": read, "decode_bytes_per_second": read / tbt,
        "memory_bytes_per_second": bandwidth, "share_of_bandwidth": ours["share_of_bandwidth"],
        "prefill_flops": flops, "matrix_flops_per_second": rate, "share_of_matrix_rate": ours["share_of_matrix_rate"],
        "paged": dict(figures("02"), **ratios("02")),
        "peers": {peer: dict(figures(peer), ours_over={what: {unit: ratios(what)[f"{unit}_ratio"][peer] for unit in UNITS}
                                                       for what in ("01", "02")})
                  if peer in taken else {"not_run": "needs a GPU"} for peer in PEERS}}


def processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def device_name(device: str) -> str:
    """As files of results are named: cpu, or the GPU's name."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")


def write(benchmark: str, device: str, path: Path | None, **found):
    """Write what was found, and on what, to `path` or to benchmarks/results/BENCHMARK-DEVICE.json."""
    path = path or RESULTS / f"{benchmark}-{device_name(device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": " ".join([f"python -m benchmarks.{benchmark}", *sys.argv[1:]]), "processor": processor(),
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "transformers": transformers.__version__, **found}, indent=1) + "\n")
    print(f"\nwritten: {path}")


def show(case: dict):
    ours = dict(ttft_ms=case["ttft_ms"]["ours"], tbt_ms=case["tbt_ms"]["ours"], equal_tokens=case["new_tokens"],
                **{what: case[what] for what in ("share_of_bandwidth", "share_of_matrix_rate")})
    peers = {f"transformers, {peer}": figures for peer, figures in case["peers"].items()}
    for what, figures in {"chapter 01": ours, "chapter 02": case["paged"], **peers}.items():
        if "not_run" in figures:
            print(f"  {what:24}not run: {figures['not_run']}")
            continue
        ttft, tbt = figures["ttft_ms"]["median"], figures["tbt_ms"]["median"]
        print(f"  {what:24}TTFT {ttft:8.2f} ms, {figures['share_of_matrix_rate']:4.0%} of the matrix rate; "
              f"TBT {tbt:7.2f} ms, {figures['share_of_bandwidth']:4.0%} of the bandwidth; "
              f"{figures['equal_tokens']} tokens equal to chapter 01's")
    for peer in (peer for peer, figures in case["peers"].items() if "not_run" not in figures):
        for unit in UNITS:
            claimed = (case["claimed_tbt_ratio"] if unit == "tbt" else 1.0) if peer == "dynamic" else None
            ratios = {what: case["peers"][peer]["ours_over"][what][unit] for what in ("01", "02")}
            print(f"  {unit.upper()} of {peer} / ours: " + ", ".join(
                f"{what} {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" for what, ratio in ratios.items())
                  + (f"; claimed for 01: {claimed}" if claimed else ""))
    print(f"  limits: {case['matrix_flops_per_second'] / 1e9:.0f} GFLOP/s, {case['memory_bytes_per_second'] / 1e9:.1f} GB/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--dtype", help="only this dtype")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=cli.bounded(int, 1, 1000), default=5)
    parser.add_argument("--new-tokens", type=cli.bounded(int, 2, 1024), default=33)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/baseline-DEVICE.json)")
    arguments = parser.parse_args()
    device = checkpoint.pick_device(arguments.device)
    set_imports_aside()
    wanted = [case for case in CASES if arguments.model in (None, case[0]) and arguments.dtype in (None, case[1])]
    if arguments.model and not wanted:
        wanted = [(arguments.model, arguments.dtype or "float32", 1.4)]
    cases = []
    for name, dtype, claim in wanted:
        case = compare(name, dtype, claim, device, arguments.rounds, arguments.new_tokens)
        cases.append(case)
        print(f"\n{name} {dtype}   ({case['equal_tokens']} of {case['new_tokens']} tokens equal)")
        show(case)
    write("baseline", device, arguments.json, cases=cases)


if __name__ == "__main__":
    with one_sentence():
        main()
