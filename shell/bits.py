"""Check whether a row's result depends on its neighbours here. `--same-bits` promises that it does not.

Whether that holds depends on the kernels that PyTorch, oneDNN and MKL choose for this processor."""
import torch

from common.llama import KEYS, attention, causal_mask
from shell.config import ModelError
from shell.linear import FastLinear

ON_A_GPU = ("--same-bits has no effect on a GPU, whose libraries choose other kernels for other numbers of "
            "rows; only tokens are compared.")
REFUSED = ("--same-bits cannot be promised here: the results of this processor's kernels depend on the "
           "number of rows or threads; leave the option out.")
# Tokens of the attention, and rows of the products (of large weights), computed as a whole and in parts
TOKENS, ROWS, FEWER = 800, 515, 67
# (rows, tokens) of portions that end inside a block of keys or at its end, and inside a block of rows
PORTIONS = (1, 60), (1, 180), (1, TOKENS), (2, 300), (12, KEYS), (99, 612), (100, 100), (300, 300)


@torch.inference_mode()
def check(model):
    """Compute, with this model's shapes, results that must have the same bits. Raises ModelError if the bits
    differ."""
    threads, parts = torch.get_num_threads(), [*model.layers[0].modules(), model.head]
    linears = [part for part in parts if isinstance(part, FastLinear)]
    try:
        for work, part in [(attentions, model), *((products, linear) for linear in linears)]:
            wholes = []
            for count in 1, threads:
                torch.set_num_threads(count)
                whole, pairs = work(part)
                wholes.append(whole)
                if not all(torch.equal(*pair) for pair in [*pairs, (whole, wholes[0])]):
                    raise ModelError(REFUSED)
    finally:
        torch.set_num_threads(threads)


def products(linear):
    """Return the product of many rows, and pairs (some rows, computed alone; these rows of it)."""
    x = noise(ROWS if len(linear.weight) < 4096 else FEWER, linear.in_features, dtype=linear.weight.dtype)
    whole = FastLinear.forward(linear, x)       # without hooks, which may call other ranks
    parts = slice(0, 1), slice(1, 3), slice(3, 10), slice(10, 26)
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
