"""What this machine can do at most: how fast it multiplies matrices, reads memory, and copies between host and device.

    python -m benchmarks.limits                         results in benchmarks/results/
    python -m benchmarks.limits --dtype bfloat16 --rounds 9

Prefill cannot be faster than the products of its weights, decode no faster than its weights are read, and what comes from
host memory no faster than a plain copy. So each of the three is measured here with nothing around it: a large product through
the operator that the model uses, of the sizes of an MLP; a sum over numbers that no cache holds; and, with a GPU, a copy
between pinned memory and the device, in both directions. The limit is the best of all rounds, since whatever else the machine
does can only make them slower.
"""
import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.reference import one_sentence  # noqa: E402
from common import checkpoint  # noqa: E402
from common.llama import Linear  # noqa: E402
from legacy import app  # noqa: E402
from tools import random_models  # noqa: E402

HIDDEN, INTERMEDIATE, *_ = random_models.GEOMETRIES["tinyllama"]
ROWS = {"cpu": 1024, "cuda": 8192}                              # tokens of a product: enough that more are no faster
READ = 1 << 30                                                  # bytes, far more than any cache holds
COPIED = 1 << 28                                                # bytes
ROUNDS = 5


def seconds(what, device: torch.device, rounds: int) -> list[float]:
    """Seconds of a call, for each round after a warm-up. On a GPU a round is many calls, so that launching one costs nothing."""
    calls, taken = 20 if device.type == "cuda" else 1, []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(calls):
            what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / calls)
    return taken[1:]


@torch.inference_mode()
def matrix_rates(dtype: str | torch.dtype, device: str | torch.device = "cpu", rounds: int = ROUNDS, rows: int | None = None,
                 inputs: int | None = None, outputs: int | None = None) -> list[float]:
    """FLOP/s of a product [rows, inputs] x [inputs, outputs] through `Linear`, each round one; by default that of the larger
    matrix of TinyLlama's MLP."""
    device, dtype = torch.device(device), checkpoint.DTYPES.get(dtype, dtype)
    rows, inputs, outputs = rows or ROWS[device.type], inputs or HIDDEN, outputs or 2 * INTERMEDIATE
    linear = Linear(inputs, outputs, False, dtype=dtype, device=device).requires_grad_(False)
    linear.weight.normal_(0, 0.02)
    linear.reorder()
    x = torch.randn(rows, inputs, device=device).to(dtype)      # [T, inputs]
    return [2 * rows * inputs * outputs / taken for taken in seconds(lambda: linear(x), device, rounds)]


def matrix_rate(dtype: str | torch.dtype, device: str | torch.device = "cpu", **sizes) -> float:
    """The best of `matrix_rates`, FLOP/s: no prefill is faster than its FLOP over this."""
    return max(matrix_rates(dtype, device, **sizes))


@torch.inference_mode()
def memory_rates(device: str | torch.device = "cpu", rounds: int = ROUNDS, size: int | None = None) -> list[float]:
    """Bytes per second that a sum over `size` bytes of float32 numbers reads, each round one."""
    device = torch.device(device)
    numbers = torch.ones((size or READ) // 4, device=device)
    return [numbers.nbytes / taken for taken in seconds(numbers.sum, device, rounds)]


def memory_bandwidth(device: str | torch.device = "cpu", **sizes) -> float:
    """The best of `memory_rates`, bytes per second: no decode step is faster than the bytes it reads over this."""
    return max(memory_rates(device, **sizes))


def copy_rates(device: str | torch.device, back: bool = False, rounds: int = ROUNDS, size: int | None = None) -> list[float]:
    """Bytes per second of a plain copy from pinned host memory to the device, or `back`, each round one. Raises ValueError
    without a GPU, where the link is modelled and has no limit of its own."""
    device, size = torch.device(device), size or COPIED
    if device.type != "cuda":
        raise ValueError(f"there is no link to copy over on the device {device.type!r}; copy rates are a GPU's")
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    dst, src = (host, memory) if back else (memory, host)
    return [size / taken for taken in seconds(lambda: dst.copy_(src, non_blocking=True), device, rounds)]


def copy_rate(device: str | torch.device, back: bool = False, **sizes) -> float:
    """The best of `copy_rates`, bytes per second. Raises ValueError without a GPU."""
    return max(copy_rates(device, back, **sizes))


def measure(dtypes: list[str], device: str, rounds: int = ROUNDS) -> dict:
    """-> every limit with its samples; their `max` is the limit."""
    from benchmarks.baseline import spread  # here, since that module imports this one
    found = {"matrix": {"rows": ROWS[device], "inputs": HIDDEN, "outputs": 2 * INTERMEDIATE}, "read_bytes": READ,
             "matrix_flops_per_second": {dtype: spread(matrix_rates(dtype, device, rounds)) for dtype in dtypes},
             "memory_bytes_per_second": spread(memory_rates(device, rounds))}
    if device == "cuda":
        found["copied_bytes"] = COPIED
        found["copy_bytes_per_second"] = spread(copy_rates(device, rounds=rounds))
        found["copy_back_bytes_per_second"] = spread(copy_rates(device, back=True, rounds=rounds))
    return found


def show(found: dict):
    def line(label, figures, scale, unit):
        print(f"  {label:32}{figures['max'] / scale:10.1f} {unit}   (median {figures['median'] / scale:.1f}, "
              f"{len(figures['samples'])} rounds)")
    for dtype, figures in found["matrix_flops_per_second"].items():
        line(f"products in {dtype}", figures, 1e9, "GFLOP/s")
    line("reading memory", found["memory_bytes_per_second"], 1e9, "GB/s")
    for name, label in (("copy_bytes_per_second", "pinned memory to the device"), ("copy_back_bytes_per_second", "and back")):
        if name in found:
            line(label, found[name], 1e9, "GB/s")


def main():
    from benchmarks.baseline import write
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=checkpoint.DTYPES, action="append",
                        help="products in this dtype only (default float32 and bfloat16)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), default=ROUNDS)
    parser.add_argument("--json", type=Path, help="where the results go (default benchmarks/results/limits-DEVICE.json)")
    arguments = parser.parse_args()
    device = checkpoint.pick_device(arguments.device)
    found = measure(arguments.dtype or ["float32", "bfloat16"], device, arguments.rounds)
    show(found)
    write("limits", device, arguments.json, rounds=arguments.rounds, **found)


if __name__ == "__main__":
    with one_sentence():
        main()
