"""Check whether a row's result depends on its neighbours here. `--same-bits` promises that it does not.

Whether that holds depends on the kernels that PyTorch, oneDNN and MKL choose for this processor."""
import hashlib
import os

import torch

from common.llama import KEYS, attention, causal_mask
from shell.config import ModelError
from shell.linear import FastLinear, is_intel

ON_A_GPU = ("--same-bits has no effect on a GPU, whose libraries choose other kernels for other numbers of "
            "rows; only tokens are compared.")
REFUSED = ("--same-bits cannot be promised here: the results of this processor's kernels depend on the "
           "number of rows or threads; leave the option out.")
# Tokens of the attention, and rows of the products (of large weights), computed as a whole and in parts. A
# product has at least NUMBERS results: of 10,000 different sums, rounding to 16 bits shows only one or so
TOKENS, ROWS, FEWER, NUMBERS = 800, 515, 67, 1 << 18
# Rows of each product, tried in this order. 0 means any multiple of 4
GROUPS = 0, 64, 32
# (rows, tokens) of portions that end inside a block of keys or at its end, and inside a block of rows
PORTIONS = (1, 60), (1, 180), (1, TOKENS), (2, 300), (12, KEYS), (99, 612), (100, 100), (300, 300)


def ask_for_strict_sums():
    """On Intel's processors, let MKL sum in an order that does not depend on the numbers of rows and threads.

    Attention in float32 and float16 needs it for heads of more than 80 numbers, or without AVX-512. It has no
    effect after the first product of a process. On other processors MKL might take slow kernels."""
    if is_intel() and not os.environ.get("MKL_CBWR"):
        os.environ["MKL_CBWR"] = "AUTO,STRICT"


def has_tiles(dtype: torch.dtype) -> bool:
    """-> whether this processor multiplies `dtype` in tiles (AMX). Then the order of summation changes at
    many numbers of rows."""
    names = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}
    return dtype in names and getattr(torch.cpu, names[dtype], bool)()


@torch.inference_mode()
def check(model) -> bytes:
    """Compute, with this model's shapes, results that must have the same bits. The first of GROUPS with which
    all products have them becomes the model's. Returns: a hash of the results. Raises ModelError if there are
    different bits."""
    linears = [part for part in model.modules() if isinstance(part, FastLinear)]
    samples = [part for part in [*model.layers[0].modules(), model.head] if part in linears]
    for group in GROUPS[1:] if has_tiles(model.head.kind) else GROUPS:
        for linear in linears:
            linear.group = group
        found = [agreed(products, linear) for linear in samples]
        if all(found):
            break
    found.append(agreed(attentions, model))
    if not all(found):
        raise ModelError(REFUSED)
    return b"".join(found)


def agreed(work, part) -> bytes:
    """Compute `work(part)` with one thread and with all. Returns: a hash of its whole if that is the same
    each time, and if its pairs are equal; else nothing."""
    threads, wholes = torch.get_num_threads(), []
    try:
        for count in 1, threads:
            torch.set_num_threads(count)
            whole, pairs = work(part)
            wholes.append(whole)
            if not all(torch.equal(*pair) for pair in [*pairs, (whole, wholes[0])]):
                return b""
        return hashlib.sha256(whole.contiguous().view(torch.uint8).numpy()).digest()
    finally:
        torch.set_num_threads(threads)


def products(linear):
    """Return the product of many rows, and pairs (some rows, computed alone; these rows of it)."""
    outputs = linear.out_features
    count = max(ROWS, NUMBERS // outputs) if outputs < 4096 else FEWER
    x = noise(count, linear.in_features, dtype=linear.weight.dtype)
    whole = FastLinear.forward(linear, x)       # without hooks, which may call other ranks
    parts = slice(0, 1), slice(1, 3), slice(3, 10), slice(10, 26), slice(26, 126)
    return whole, [(FastLinear.forward(linear, x[rows]), whole[rows]) for rows in parts]


def attentions(model):
    """Return the attention of TOKENS tokens, and pairs (some rows, computed alone or in a batch; these rows
    of it)."""
    config, dtype = model.config, model.dtype
    q = noise(TOKENS, config.num_attention_heads, config.head_dim, dtype=dtype)
    k, v = (noise(2 * KEYS, config.num_key_value_heads, config.head_dim, dtype=dtype) for _ in range(2))

    def portion(count: int, end: int):
        mask = causal_mask(count, end, k.device, dtype, True)
        return attention(q[end - count : end], k[:end], v[:end], mask)

    whole, last = portion(TOKENS, TOKENS), torch.tensor([end - 1 for _, end in PORTIONS])
    mask = torch.where(torch.arange(2 * KEYS) > last[:, None], -torch.inf, 0).to(dtype)     # [B, S]
    both = (side.expand(len(last), *side.shape) for side in (k, v))                         # [B, S, KVH, hd]
    batch = attention(q[last], *both, mask[:, None, None])
    pairs = [(portion(count, end), whole[end - count : end]) for count, end in PORTIONS]
    return whole, [(batch, whole[last]), *pairs]


def noise(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
