"""Chapter 01 against `transformers` on the same weights, in one interleaved run.

    python -m benchmarks.baseline                       all models; results in benchmarks/results/
    python -m benchmarks.baseline --model classroom --dtype float32

Claims: TBT 1.4 times better on random:tinyllama in float32 and in bfloat16, 1.5 times on classroom; TTFT of a
512-token prompt at least equal. TBT is the mean time between the tokens of one answer; each round measures
both engines, and a ratio is the median over rounds of theirs / ours. Also reported: what share of the
measured memory bandwidth decode reaches, and time and peak memory of loading, each in a fresh process.
"""
import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.reference import reference_model  # noqa: E402
from common import app, checkpoint  # noqa: E402

baseline = importlib.import_module("01_baseline")
CASES = [("classroom", "float32", 1.5), ("random:tinyllama", "float32", 1.4), ("random:tinyllama", "bfloat16", 1.4)]
RESULTS = Path(__file__).resolve().parent / "results"


class Clock(BaseStreamer):
    """Notes when each token leaves `generate`; the first call brings the prompt."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def measure_theirs(model, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """-> TTFT ms, TBT ms, tokens."""
    ids, clock = torch.tensor([prompt], device=model.device), Clock()
    begin = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                         do_sample=False, streamer=clock, pad_token_id=0)
    times = clock.times[1:]
    return (times[0] - begin) * 1e3, (times[-1] - times[0]) / (new - 1) * 1e3, out[0, len(prompt):].tolist()


def measure_ours(engine, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    result = engine.generate(prompt=prompt, max_tokens=new)
    return result.ttft_ms, result.tbt_ms, result.tokens


def memory_bandwidth(device, size: int = 1 << 28, repeats: int = 9) -> float:
    """Bytes per second that a sum over `size` float32 numbers reads; the best of `repeats`."""
    numbers = torch.ones(size, device=device)

    def once():
        begin = time.perf_counter()
        numbers.sum().item()
        return time.perf_counter() - begin

    return size * 4 / min(once() for _ in range(repeats + 1))


def spread(samples: list[float]) -> dict:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def measure_load(name: str, dtype: str, device: str) -> dict:
    """Seconds and peak resident memory of loading, in a fresh process, beyond what the imports took (Linux)."""
    code = ("import time, transformers; from common import checkpoint; "
            "peak = lambda: 1024 * next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line); "
            "base, begin = peak(), time.perf_counter(); "
            f"checkpoint.load({name!r}, {dtype!r}, {device!r}); print(time.perf_counter() - begin, peak() - base)")
    root = str(Path(__file__).resolve().parent.parent)
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    seconds, peak = out.split()
    return {"seconds": float(seconds), "peak_bytes": int(float(peak))}


def run_case(name: str, dtype: str, claim: float, device: str, rounds: int, new: int) -> dict:
    model, tokenizer, _ = checkpoint.load(name, dtype, device)
    engine = baseline.Engine(model, tokenizer, end_tokens=frozenset())
    reference = reference_model(name, model.dtype, model.device.type)
    reference.generation_config.eos_token_id = None
    prompt = torch.randint(5, model.config.vocab_size, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs, same = [], [], 0
    for round_ in tqdm(range(rounds + 1), desc=f"{name} {dtype}", unit="round"):
        a, b = measure_ours(engine, prompt, new), measure_theirs(reference, prompt, new)
        same = sum(x == y for x, y in zip(a[2], b[2]))
        if round_:                                       # the first is the warm-up
            ours.append(a)
            theirs.append(b)
    weights = sum(p.numel() for p in reference.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.embedding.numel()               # one row of it is read for a token
    cached = (len(prompt) + new / 2) * model.config.kv_numbers_per_token
    read = (weights + cached) * model.dtype.itemsize     # bytes per decoded token
    tbt = statistics.median(row[1] for row in ours) / 1e3
    bandwidth = memory_bandwidth(model.device)
    del engine, model, reference
    return {
        "model": name, "dtype": dtype, "claimed_tbt_ratio": claim, "equal_tokens": same, "new_tokens": new,
        "ttft_ms": {"ours": spread([row[0] for row in ours]), "transformers": spread([row[0] for row in theirs])},
        "tbt_ms": {"ours": spread([row[1] for row in ours]), "transformers": spread([row[1] for row in theirs])},
        "ttft_ratio": spread([b[0] / a[0] for a, b in zip(ours, theirs)]),
        "tbt_ratio": spread([b[1] / a[1] for a, b in zip(ours, theirs)]),
        "decode_bytes_per_token": read, "decode_bytes_per_second": read / tbt,
        "memory_bytes_per_second": bandwidth, "share_of_bandwidth": read / tbt / bandwidth,
        "load": measure_load(name, dtype, device),
    }


def processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(benchmark: str, device: str, path: Path | None, **found):
    """Write what was found, and on what, to `path` or to benchmarks/results/BENCHMARK-DEVICE.json."""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    path = path or RESULTS / f"{benchmark}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": " ".join([f"python -m benchmarks.{benchmark}", *sys.argv[1:]]), "processor": processor(),
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "transformers": transformers.__version__, **found}, indent=1) + "\n")
    print(f"\nwritten: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--dtype", help="only this dtype")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=5)
    parser.add_argument("--new-tokens", type=app.bounded(int, 2, 1024), default=33)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/baseline-DEVICE.json)")
    arguments = parser.parse_args()
    device = checkpoint.pick_device(arguments.device)
    wanted = [case for case in CASES if arguments.model in (None, case[0]) and arguments.dtype in (None, case[1])]
    if arguments.model and not wanted:
        wanted = [(arguments.model, arguments.dtype or "float32", 1.4)]
    cases = []
    for name, dtype, claim in wanted:
        case = run_case(name, dtype, claim, device, arguments.rounds, arguments.new_tokens)
        cases.append(case)
        print(f"\n{name} {dtype}   ({case['equal_tokens']} of {case['new_tokens']} tokens equal)")
        for what in ("ttft", "tbt"):
            ours, theirs, ratio = case[f"{what}_ms"]["ours"], case[f"{what}_ms"]["transformers"], case[f"{what}_ratio"]
            print(f"  {what.upper()}  ours {ours['median']:9.2f} ms   transformers {theirs['median']:9.2f} ms   "
                  f"ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}), "
                  f"claimed {claim if what == 'tbt' else 1.0}")
        print(f"  decode reads {case['decode_bytes_per_second'] / 1e9:.1f} GB/s, "
              f"{case['share_of_bandwidth']:.0%} of {case['memory_bytes_per_second'] / 1e9:.1f} GB/s measured")
        print(f"  load {case['load']['seconds']:.1f} s, peak memory {case['load']['peak_bytes'] / 1e6:.0f} MB", flush=True)
    write("baseline", device, arguments.json, cases=cases)


if __name__ == "__main__":
    main()
