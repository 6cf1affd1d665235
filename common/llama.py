"""The model: the Llama family in plain PyTorch, opened up so that a cache can be taken apart.

Shapes are ragged and flat. A batch is one row of T tokens that may belong to many requests:
    tokens [T]   positions [T]   hidden [T, D]   q [T, H, hd]   k, v [T, KVH, hd]
Positions and caches are arguments; no module remembers a request. The loop over the layers is the
engine's (chapters 01 and 02), not the model's, because later chapters reorder it.

Source: Touvron et al., "LLaMA" (2023); RoFormer (Su et al., 2021) for rotary embedding; Llama 3.1's
frequency scaling as published with its weights."""
import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LlamaConfig:
    """What the forward pass needs to know. Sizes are counts of numbers, never bytes."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict = field(default_factory=dict)   # {} or {"rope_type": "linear" | "llama3", ...}
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False          # of each head of q and of k, before they are rotated
    no_rope_layers: tuple = ()     # numbers of layers whose q and k are not rotated
    tie_word_embeddings: bool = False

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token's keys and values take, all layers together."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim


class Linear(nn.Linear):
    """y = x W^T + b; the weights are loaded, so none are drawn. shell/linear.py has a faster one for CPUs."""

    def reset_parameters(self): ...


class Rotary(nn.Module):
    """Rotary position embedding in the half-split convention: number i is paired with number i + hd/2. All
    layers turn by the same angles, so an engine looks them up once for a forward pass."""

    def __init__(self, config: LlamaConfig, **where):
        super().__init__()
        table = torch.empty(config.max_position_embeddings, 2, config.head_dim, **where)   # [P, 2, hd]
        self.register_buffer("table", table, persistent=False)
        if not table.is_meta:                                          # of which only the size is asked for
            angles = torch.outer(torch.arange(len(table)).float(), rotary_frequencies(config))   # [P, hd/2]
            table[:, 0] = torch.cat((angles, angles), -1).cos()
            table[:, 1] = torch.cat((-angles, angles), -1).sin()

    def forward(self, positions):                                      # [T] -> cos and sin, [T, 1, hd] each
        return self.table[positions].unsqueeze(2).unbind(1)


def rotary_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Angle per position of every pair, [hd/2] float32, after the config's rope_scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta ** exponents                 # [hd/2]
    scaling = config.rope_scaling
    if scaling.get("rope_type") == "linear":
        return frequencies / scaling["factor"]
    if scaling.get("rope_type") == "llama3":
        # Slow pairs are stretched by `factor`, fast ones stay, those between are blended.
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)              # 0: stretched, 1: as it was
        return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    return frequencies


class Layer(nn.Module):
    """One transformer layer. Its parts are public: chapters 04, 05 and 08 call them one at a time."""

    def __init__(self, config: LlamaConfig, rotates: bool = True, **where):
        super().__init__()
        hidden, head_dim, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
        self.head_dim, self.rotates = head_dim, rotates
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.q_proj = Linear(hidden, config.num_attention_heads * head_dim, config.qkv_bias, **where)
        self.kv_proj = Linear(hidden, 2 * config.num_key_value_heads * head_dim, config.qkv_bias, **where)
        norm = partial(nn.RMSNorm, head_dim, config.rms_norm_eps, **where) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.o_proj = Linear(config.num_attention_heads * head_dim, hidden, config.output_bias, **where)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.gate_up_proj = Linear(hidden, 2 * intermediate, config.mlp_bias, **where)
        self.down_proj = Linear(intermediate, hidden, config.mlp_bias, **where)

    def project_kv(self, hidden, rotation):
        """The layer's input [T, D], `rotation` of its positions -> k, v [T, KVH, hd], for a restoration."""
        return self.keys_values(self.attention_norm(hidden), rotation)

    def keys_values(self, normed, rotation):
        """-> k, v [T, KVH, hd] of the layer's input after its norm [T, D], in all passes and restorations."""
        kv = self.kv_proj(normed)                                                # [T, 2*KVH*hd]
        k, v = kv.view(len(normed), 2, -1, self.head_dim).unbind(1)              # [T, KVH, hd] each
        return self.rotate(self.k_norm(k), rotation), v

    def rotate(self, x, rotation):
        """q or k [T, H, hd], turned by what `Rotary` gave for its T positions, in layers that do."""
        if not self.rotates:
            return x
        cos, sin = rotation                                                      # [T, 1, hd] each
        swapped = x.roll(self.head_dim // 2, dims=-1)       # [T, H, hd], each number at its partner's place
        return torch.addcmul(x * cos, swapped, sin)

    def before_attention(self, hidden, rotation):
        """The layer's input [T, D], `rotation` of its T positions -> q [T, H, hd], k, v [T, KVH, hd]."""
        normed = self.attention_norm(hidden)                                     # [T, D]
        q = self.q_proj(normed).view(len(normed), -1, self.head_dim)             # [T, H, hd]
        return self.rotate(self.q_norm(q), rotation), *self.keys_values(normed, rotation)

    def after_attention(self, hidden, out):
        """The layer's input [T, D], and what attention gave [T, H, hd] -> the next layer's input [T, D]."""
        hidden = hidden + self.o_proj(out.flatten(-2))                           # [T, D]
        gate, up = self.gate_up_proj(self.mlp_norm(hidden)).chunk(2, dim=-1)     # [T, I] each
        return hidden + self.down_proj(F.silu(gate) * up)                        # [T, D]

    def forward(self, hidden, rotation, attend):
        """hidden [T, D], `rotation` of the T positions -> [T, D]. `attend(q, k, v) -> out` [T, H, hd] is the
        KV cache's: it stores this layer's new k and v and attends over all that the requests hold."""
        return self.after_attention(hidden, attend(*self.before_attention(hidden, rotation)))


def attention(q, k, v, mask):
    """q [T, H, hd] over k, v [S, KVH, hd], or each row over its own, [T, S, KVH, hd] -> [T, H, hd]. `mask` is
    added to the scores; None: causal, and a single row sees everything. No KV head is copied."""
    if k.ndim == 4 or len(q) == 1:          # one token each: the heads of a group are as many queries
        shape = len(q), -1, *k.shape[-2:]
        k, v = (side.reshape(shape).transpose(1, 2) for side in (k, v))          # [T, KVH, S, hd] each
        grouped = q.unflatten(1, (k.shape[1], -1))                               # [T, KVH, H/KVH, hd]
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)
    q, k, v = (side.transpose(0, 1)[None] for side in (q, k, v))                 # [1, heads, tokens, hd] each
    causal, gqa = mask is None, k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    return out[0].transpose(0, 1)                                                # [T, H, hd]


def causal_mask(count: int, end: int, device, dtype):
    """-> `mask` for the last `count` of `end` tokens: minus infinity for what comes after a row's own
    position, else 0, [T, S]. None if each of them sees all, or is among the first."""
    if count == 1 or count == end:
        return None
    if device.type == "cuda" and dtype.itemsize == 2:      # flash attention knows the rule, and has no mask
        from torch.nn.attention.bias import causal_lower_right  # which imports a second's worth of others
        return causal_lower_right(count, end)
    return torch.full((count, end), -math.inf, dtype=dtype, device=device).triu_(end - count + 1)


def upload(numbers, device) -> torch.Tensor:
    """Whole numbers of the host -> [n] on the device. A GPU fetches them while the host goes on."""
    numbers = torch.as_tensor(numbers, dtype=torch.long)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class Llama(nn.Module):
    """Embedding, layers, final norm, head. Weights are allocated, not set: see shell/checkpoint.py."""
    def __init__(self, config: LlamaConfig, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.digest = b""  # of config and weights, set by checkpoint.load: saved state depends on it
        self.pieces = None  # on a GPU what runs the layers in fewer launches, set by checkpoint.load
        where = dict(dtype=dtype, device=device)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.rotary = Rotary(config, **where)
        self.layers = nn.ModuleList(
            Layer(config, number not in config.no_rope_layers, **where)
            for number in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.head = Linear(config.hidden_size, config.vocab_size, False, **where)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding

    def embed(self, tokens):
        """tokens [T] -> hidden [T, D]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden):
        """Output of the last layer [T, D] -> [T, V]. Pass only the rows that will be sampled."""
        return self.head(self.norm(hidden))
