"""What this machine can do at most: how fast it multiplies matrices, and how fast it reads memory.

Prefill cannot be faster than the products of its weights, and decode no faster than its weights are read. The limit is
the best of all rounds, since whatever else the machine does can only make them slower.
"""

import time

import torch

from common import checkpoint
from common.llama import Linear
from tools import random_models

HIDDEN, INTERMEDIATE, *_ = random_models.GEOMETRIES["tinyllama"]
ROWS = {"cpu": 1024, "cuda": 8192}  # tokens of a product: enough that more are no faster
READ = 1 << 30  # bytes, far more than any cache holds


def least_seconds(what, device: torch.device, rounds: int = 5) -> float:
    """Of a call. On a GPU a round is many calls, so that launching one costs nothing."""
    calls, taken = 20 if device.type == "cuda" else 1, []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(calls):
            what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - began) / calls)
    return min(taken[1:])


@torch.inference_mode()
def matrix_rate(dtype: str | torch.dtype, device: str | torch.device = "cpu") -> float:
    """FLOP/s of a product through `Linear`, as large as that of TinyLlama's MLP."""
    device, dtype = torch.device(device), checkpoint.DTYPES.get(dtype, dtype)
    rows = ROWS[device.type]
    linear = Linear(HIDDEN, 2 * INTERMEDIATE, False, dtype=dtype, device=device).requires_grad_(False)
    linear.weight.normal_(0, 0.02)
    linear.reorder()
    x = torch.randn(rows, HIDDEN, device=device).to(dtype)  # [T, D]
    return 4 * rows * HIDDEN * INTERMEDIATE / least_seconds(lambda: linear(x), device)


@torch.inference_mode()
def memory_bandwidth(device: str | torch.device = "cpu") -> float:
    """Bytes/s of a sum over numbers that no cache holds."""
    device = torch.device(device)
    numbers = torch.ones(READ // 4, device=device)
    return numbers.nbytes / least_seconds(numbers.sum, device)
