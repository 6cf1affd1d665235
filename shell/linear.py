"""Faster linear layers on a CPU; the loader replaces the linear layers of a model by these."""
import math
from contextlib import suppress

import torch
import torch.nn.functional as F

from common.llama import Linear, Llama


class FastLinear(Linear):
    """A linear layer y = x W^T + b that chooses the fastest product on a CPU.

    Several rows are multiplied with a copy of the weight in oneDNN's layout. With a single row, the time is
    that of reading the weight, so each thread reads its own part of the weight."""
    reordered = None        # the weight in oneDNN's layout, if there is memory for it

    def forward(self, x):                                              # [T, inputs] -> [T, outputs]
        if x.device.type == "cpu" and x.dtype == torch.float32 and len(x) == 1:
            count = math.gcd(len(self.weight), torch.get_num_threads())
            parts = self.weight.unflatten(0, (count, -1))              # [parts, outputs / parts, inputs]
            out = torch.bmm(parts, x.t().expand(count, -1, -1)).view(1, -1)
            return out if self.bias is None else out + self.bias
        if self.reordered is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")
        slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and len(x) > 8
        if slow and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # Without bf16 instructions these products take a hundred times as long as in float32.
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).bfloat16()
        return super().forward(x)


def speed_up(model: Llama, copies: bool):
    """Turn the linear layers of a loaded model into FastLinear, in place. Hooks and tied weights stay.

    `copies`: there is enough memory for copies of the weights."""
    for linear in model.modules():
        if isinstance(linear, Linear):
            linear.__class__ = FastLinear
            if copies:
                with suppress(AttributeError, RuntimeError):    # no kernel for this device or dtype
                    linear.reordered = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
