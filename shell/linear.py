"""Faster linear layers on a CPU; the loader replaces the linear layers of a model by these."""
import ctypes
import math
from contextlib import suppress
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from common.llama import ROWS, Linear

BLOCK = 64      # outputs that lie together in oneDNN's layout of a float32 weight
PARTS = 64      # of a weight, at most; MKL gives them to its threads


class FastLinear(Linear):
    """A linear layer y = x W^T + b that chooses the fastest product on a CPU.

    Several rows are multiplied with a copy of the weight in oneDNN's layout. The copy has the weight's dtype.
    A 16-bit weight gets a float32 copy if the processor has no instructions for its dtype.

    The product of a single row takes the time of reading the matrix. In float32, the fastest way to read it
    depends on the maker of the processor, because MKL chooses its kernels by the maker:

    - On Intel's processors with several threads, MKL multiplies the row with the blocks of the copy, and the
      weight is freed. If the copy has no blocks, the weight stays and is divided. On one thread, oneDNN's
      product with the whole copy is faster.
    - On others, MKL multiplies up to PARTS parts of the weight with the row as a column, and the weight
      stays. On an AMD EPYC, one row of SmolLM2 then takes 0.6 to 0.75 of the time that it takes with blocks.
      On one thread, a weight in one part takes twice as long as one in several.

    A 16-bit weight has half the bytes of its float32 copy, so a single row is multiplied with the weight. A
    16-bit copy is read as a whole. Under --same-bits, every single row is multiplied with the whole copy.

    The same bits. oneDNN sums one to three rows in another order than more rows, but all multiples of ROWS in
    one order. So the number of rows is padded. Then the result of a row does not depend on the other rows.
    Without --same-bits there are two exceptions. A single row that is multiplied with the weight or the
    blocks may have other bits. On a processor with tiles (AMX), a single row is not padded, because padding
    saves time on other processors only. Tiles sum 16 bits in an order that depends on the number of rows. So
    with --same-bits each product has `group` rows there."""
    reordered = None        # a copy of the weight in oneDNN's layout, if there is memory for it
    # The parts with which a single float32 row is multiplied. On Intel's processors: the memory of the copy,
    # [outputs / BLOCK, inputs, BLOCK]. On others: the weight, [parts, outputs / parts, inputs]
    blocks = None
    kind = torch.float32    # dtype of the copy, and of products of several rows
    direct = True           # whether a single row is multiplied with the weight or the blocks
    pads = True             # whether a single row is padded before it is multiplied with the copy
    group = 0               # rows of each product under --same-bits, if the bits depend on their number

    def forward(self, x):                                              # [T, inputs] -> [T, outputs]
        if len(x) == 1 and self.direct and (out := self.alone(x)) is not None:
            return out
        rows, step, dtype = len(x), self.group or ROWS, x.dtype
        if rows == 1 and self.pads:
            x = x.expand(step, -1)
        elif rows > 1 and rows % step:
            x = F.pad(x, (0, 0, 0, -rows % step))
        weight, bias = self.weight if self.reordered is None else self.reordered, self.bias
        if self.kind != dtype:
            x, bias = x.to(self.kind), None if bias is None else bias.to(self.kind)
            weight = weight.to(self.kind) if self.reordered is None else weight
        if self.group and rows > step:
            out = torch.cat([product(part, weight, bias) for part in x.split(step)])
        else:
            out = product(x, weight, bias)
        out = out if len(out) == rows else out[:rows]
        return out if self.kind == dtype else out.to(dtype)

    def alone(self, row):                                              # [1, inputs] -> [1, outputs], or None
        """Multiply a single row with the weight or the blocks. Return None if the whole copy is faster: on
        Intel's processors, if there is one thread now."""
        if row.dtype.itemsize == 2:
            return super().forward(row)
        parts, threads = self.blocks, torch.get_num_threads()
        if not is_intel():
            parts = divided(self.weight, PARTS) if parts is None else parts
            out = torch.bmm(parts, row.mT.expand(len(parts), -1, -1)).view(1, -1)
        elif threads == 1 and self.reordered is not None:
            return None
        else:   # row times matrix takes half the time of matrix times column there
            parts = divided(self.weight, threads).mT if parts is None else parts
            out = torch.bmm(row.expand(len(parts), -1, -1), parts).view(1, -1)
        return out if self.bias is None else out + self.bias


def product(x, weight, bias):
    """Compute x W^T + b on a CPU with oneDNN. The weight may be reordered or not: in float32 the bits are
    the same. PyTorch would take MKL, whose order of summation depends on the numbers of rows and threads."""
    if not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def divided(weight, most: int):
    """-> the weight in at most `most` equal parts, [parts, outputs / parts, inputs]."""
    return weight.unflatten(0, (math.gcd(len(weight), most), -1))


def blocks_of(copy, weight):
    """Return the memory of `copy`, which is `weight` in oneDNN's layout, as a tensor of blocks
    [outputs / BLOCK, inputs, BLOCK]. If the layout is another one, return None."""
    outputs, inputs = weight.shape
    if weight.dtype != torch.float32 or outputs % BLOCK or torch.ops.mkldnn._nbytes(copy) != weight.nbytes:
        return None
    memory = (ctypes.c_float * weight.numel()).from_address(torch.ops.mkldnn.data_ptr(copy))
    memory.owner = copy                                     # it lives as long as the tensor
    blocks = torch.frombuffer(memory, dtype=torch.float32).view(-1, inputs, BLOCK)
    return blocks if torch.equal(blocks.mT, weight.view(-1, BLOCK, inputs)) else None


@cache
def is_intel() -> bool:
    """-> whether this is a processor of Intel's; False if there is no /proc/cpuinfo."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return "GenuineIntel" in file.read()
    return False


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """-> the dtype in which numbers of `dtype` are multiplied. It is float32 if this processor has no
    instructions for `dtype`, because products without them take several times as long."""
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    is_fast = getattr(torch.ops.mkldnn, names[dtype], bool) if dtype in names else lambda: True
    return dtype if is_fast() else torch.float32


def reads_weight(dtype: torch.dtype, same_bits: bool) -> bool:
    """-> whether a single row reads the weight, whatever layout the copy has. Then both stay."""
    faster = not is_intel() if dtype == torch.float32 else product_dtype(dtype) != dtype
    return faster and not same_bits


def speed_up(model: nn.Module, copies: bool, same_bits: bool = False, group: int = 0):
    """Turn the linear layers of a loaded model into FastLinear, in place. Hooks stay, and so does the
    embedding that a tied head shares.

    `copies`: there is enough memory for copies of the weights. A weight that no product reads any more is
    freed. `same_bits`: all rows are multiplied in the same way. `group`: see FastLinear. Layers on a GPU stay
    as they are. Returns: `model`. Set PyTorch's number of threads first. Call it once; the model then stays
    on its device."""
    for linear in model.modules():
        if isinstance(linear, Linear) and linear.weight.device.type == "cpu":
            dtype, several = linear.weight.dtype, torch.get_num_threads() > 1
            linear.__class__, linear.kind, linear.direct = FastLinear, product_dtype(dtype), not same_bits
            linear.pads, linear.group = same_bits or not torch.cpu._is_amx_tile_supported(), group
            if copies:
                with suppress(AttributeError, RuntimeError):    # no kernel for this device or dtype
                    weight, stays = linear.weight.detach().to(linear.kind), reads_weight(dtype, same_bits)
                    linear.reordered = copy = torch.ops.mkldnn._reorder_linear_weight(weight, None)
                    linear.direct &= stays or (several and dtype == torch.float32)
                    if linear.direct and dtype == torch.float32:     # here, since `divided` takes 2 us
                        linear.blocks = divided(weight, PARTS) if stays else blocks_of(copy, weight)
                    if not linear.direct or linear.blocks is not None and not stays:
                        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    return model
