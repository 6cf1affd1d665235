"""What Llama's relatives add to it: scaled RoPE, biases, norms of q and k, layers without RoPE."""
import math
from dataclasses import dataclass, field

import torch
from torch import nn

from common.llama import Layer, LlamaConfig


@dataclass(frozen=True)
class FamilyConfig(LlamaConfig):
    """The config of a model that is not a plain Llama. Llama 3.1's frequency scaling is as published with its
    weights."""
    rope_scaling: dict = field(default_factory=dict)   # {} or {"rope_type": "linear" | "llama3", ...}
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False          # normalize each head of q and k before RoPE
    no_rope_layers: tuple = ()     # layers without RoPE

    def rotary_frequencies(self) -> torch.Tensor:
        frequencies, scaling = super().rotary_frequencies(), self.rope_scaling         # [hd/2]
        if scaling.get("rope_type") == "linear":
            return frequencies / scaling["factor"]
        if scaling.get("rope_type") == "llama3":
            # Stretch slow pairs by `factor`, keep fast pairs, blend the pairs between them.
            turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = ((turns - low) / (high - low)).clamp(0, 1)              # 0: stretched, 1: unchanged
            return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
        return frequencies


class FamilyLayer(Layer):
    """A layer with what its FamilyConfig asks for."""

    def __init__(self, config: FamilyConfig, index: int = 0, **where):
        super().__init__(config, index, **where)
        self.no_rope_layers = config.no_rope_layers
        biased = config.qkv_bias * [self.q_proj, self.kv_proj] + config.output_bias * [self.o_proj]
        for linear in biased + config.mlp_bias * [self.gate_up_proj, self.down_proj]:
            linear.bias = nn.Parameter(torch.empty(linear.out_features, **where))
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, config.rms_norm_eps, **where) for _ in "qk")

    def keys_values(self, normed, rotation):
        kv = self.kv_proj(normed)                                                # [T, 2*KVH*hd]
        k, v = kv.view(len(normed), 2, -1, self.head_dim).unbind(1)              # [T, KVH, hd] each
        return self.rotate(self.k_norm(k) if hasattr(self, "k_norm") else k, rotation), v

    def before_attention(self, hidden, rotation):
        normed = self.attention_norm(hidden)                                     # [T, D]
        q = self.q_proj(normed).view(len(normed), -1, self.head_dim)             # [T, H, hd]
        q = self.q_norm(q) if hasattr(self, "q_norm") else q
        return self.rotate(q, rotation), *self.keys_values(normed, rotation)

    def rotate(self, x, rotation):
        return x if self.index in self.no_rope_layers else super().rotate(x, rotation)


def layer_of(config: LlamaConfig) -> type[Layer]:
    """-> the class of a model's layers."""
    return FamilyLayer if isinstance(config, FamilyConfig) else Layer
