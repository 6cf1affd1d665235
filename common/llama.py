"""The Llama family in plain PyTorch, split into parts that the chapters can call one at a time.

Batches are flat: the T tokens of a batch are in one list, and may belong to many requests:

    tokens [T]   positions [T]   hidden [T, D]   q [T, H, hd]   k, v [T, KVH, hd]

    T: tokens of the batch   S: tokens in the cache   L: layers   V: vocabulary   I: size of the MLP
    D: hidden size   H: query heads   KVH: KV heads   hd: numbers per head

Positions and caches are arguments; no module stores the state of a request. The loop over the layers is in
the engines (chapters 01 and 02), because later chapters change it.

Other families add biases, norms or another RoPE (shell/families.py).

Sources: Touvron et al., "LLaMA" (2023); RoFormer (Su et al., 2021) for rotary embedding."""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LlamaConfig:
    """The model's sizes and options. Sizes are counts of numbers, never bytes."""
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
    tie_word_embeddings: bool = False

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers in one token's keys and values, in all layers."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim

    def rotary_frequencies(self) -> torch.Tensor:
        """-> the angle per position of each pair of numbers, [hd/2] float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1.0 / self.rope_theta ** exponents


class Linear(nn.Linear):
    """y = x W^T + b. Weights are not initialized, because a checkpoint is loaded into them. shell/linear.py
    has a faster class for CPUs."""

    def reset_parameters(self): ...


class Rotary(nn.Module):
    """Rotary position embedding (RoPE) in the half-split convention: number i of a head is paired with number
    i + hd/2.

    All layers use the same angles, so a forward pass looks them up once."""

    def __init__(self, config: LlamaConfig, **where):
        super().__init__()
        table = torch.empty(config.max_position_embeddings, 2, config.head_dim, **where)   # [P, 2, hd]
        self.register_buffer("table", table, persistent=False)
        if not table.is_meta:                                          # a meta tensor has no data
            angles = torch.outer(torch.arange(len(table)).float(), config.rotary_frequencies())   # [P, hd/2]
            table[:, 0] = torch.cat((angles, angles), -1).cos()
            table[:, 1] = torch.cat((-angles, angles), -1).sin()

    def forward(self, positions):                                      # [T] -> cos and sin, [T, 1, hd] each
        """positions [T] -> cos and sin, [T, 1, hd] each."""
        return self.table[positions].unsqueeze(2).unbind(1)


class Layer(nn.Module):
    """One transformer layer. Chapters 04, 05 and 08 call its parts one at a time."""

    def __init__(self, config: LlamaConfig, index: int = 0, **where):
        """`index`: the layer's number. `where`: dtype and device."""
        super().__init__()
        hidden, head_dim, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
        self.index, self.head_dim = index, head_dim
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.q_proj = Linear(hidden, config.num_attention_heads * head_dim, False, **where)
        self.kv_proj = Linear(hidden, 2 * config.num_key_value_heads * head_dim, False, **where)
        self.o_proj = Linear(config.num_attention_heads * head_dim, hidden, False, **where)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.gate_up_proj = Linear(hidden, 2 * intermediate, False, **where)
        self.down_proj = Linear(intermediate, hidden, False, **where)

    def project_kv(self, hidden, rotation):
        """Project a layer's input to K and V, for a restoration.

        `hidden` [T, D]; `rotation`: cos and sin of its positions. Returns: k, v [T, KVH, hd]."""
        return self.keys_values(self.attention_norm(hidden), rotation)

    def keys_values(self, normed, rotation):
        """Project the normed input [T, D] to k, v [T, KVH, hd].

        The forward pass and all restorations call this, so that their K and V are equal."""
        kv = self.kv_proj(normed)                                                # [T, 2*KVH*hd]
        k, v = kv.view(len(normed), 2, -1, self.head_dim).unbind(1)              # [T, KVH, hd] each
        return self.rotate(k, rotation), v

    def rotate(self, x, rotation):
        """Apply RoPE to `x`, which is q or k [T, H, hd]."""
        cos, sin = rotation                                                      # [T, 1, hd] each
        swapped = x.roll(self.head_dim // 2, dims=-1)       # [T, H, hd]: swap the two halves
        return torch.addcmul(x * cos, swapped, sin)

    def before_attention(self, hidden, rotation):
        """Compute the layer's q [T, H, hd] and k, v [T, KVH, hd].

        `hidden` [T, D]: the layer's input. `rotation`: cos and sin of its T positions."""
        normed = self.attention_norm(hidden)                                     # [T, D]
        q = self.q_proj(normed).view(len(normed), -1, self.head_dim)             # [T, H, hd]
        return self.rotate(q, rotation), *self.keys_values(normed, rotation)

    def after_attention(self, hidden, out):
        """Apply the output projection and the MLP.

        `hidden` [T, D]: the layer's input. `out` [T, H, hd]: the output of attention. Returns: the next
        layer's input [T, D]."""
        hidden = hidden + self.o_proj(out.flatten(-2))                           # [T, D]
        gate, up = self.gate_up_proj(self.mlp_norm(hidden)).chunk(2, dim=-1)     # [T, I] each
        return hidden + self.down_proj(F.silu(gate) * up)                        # [T, D]

    def forward(self, hidden, rotation, attend):
        """Run the layer on its input `hidden` [T, D]. Returns: the next layer's input [T, D].

        `attend(q, k, v)` belongs to the KV cache: it stores the new k and v, attends over all tokens of each
        request, and returns [T, H, hd]."""
        return self.after_attention(hidden, attend(*self.before_attention(hidden, rotation)))


# Why a row can have the same bits alone and in a batch: PyTorch's attention on a CPU sums over the keys in
# blocks of KEYS, from the first key on, and a masked key adds exactly 0. It takes rows in groups of ROWS. A
# shorter last block or group may be summed in another order. So `whole_blocks` pads the keys, and rows are
# padded to a multiple of ROWS. Then a row's result does not depend on the other rows of the batch.
KEYS, ROWS = 512, 4


def whole_blocks(keys: int) -> int:
    """-> `keys` rounded up to a length that the kernel sums in the same order as full blocks.

    The result is a multiple of 32. A last block of more than 192 keys is filled up, because the kernel may
    sum a part of a block in two halves: 193 to 383 keys on some processors, 257 to 511 on others."""
    step = KEYS if keys % KEYS > 192 else 32
    return keys + -keys % step


def attention(q, k, v, mask, same_bits: bool = True):
    """Compute attention of q [T, H, hd] over k, v [S, KVH, hd]; or of each row over its own k, v
    [T, S, KVH, hd].

    `mask` is added to the scores. If it is wider than k [S, KVH, hd], k and v are padded with zeros. None
    means causal, except that a single row attends to everything. The KV heads are not copied for the query
    heads that share them. `same_bits`: a single row with a mask must get the same bits as in a batch. False
    allows a faster way. Returns: [T, H, hd]."""
    if q.device.type == "cpu" and q.dtype == torch.float16:    # float32 is up to 8 times as fast
        q, k, v, mask = (None if each is None else each.float() for each in (q, k, v, mask))
        return attention(q, k, v, mask, same_bits).half()
    if mask is not None and (more := mask.shape[-1] - k.shape[-3]):
        k, v = (torch.cat((side, side.new_zeros(more, *side.shape[1:]))) for side in (k, v))
    if alone := k.ndim == 4 or len(q) == 1:
        # Pass the query heads that share a KV head as several queries of one head
        # [T, KVH, S, hd] each
        k, v = (side.reshape(len(q), -1, *side.shape[-2:]).transpose(1, 2) for side in (k, v))
        rows = q.unflatten(1, (k.shape[1], -1))                                  # [T, KVH, H/KVH, hd]
    else:
        rows, k, v = (side.transpose(0, 1)[None] for side in (q, k, v))          # [1, heads, tokens, hd] each
    count, causal, gqa = rows.shape[2], mask is None and not alone, k.shape[1] != rows.shape[1]
    if q.device.type == "cpu" and count % ROWS and (mask is not None or q.dtype.itemsize == 2):
        # One query per KV head: on Intel with tiles (AMX) it takes 0.4 to 0.95 of the time of ROWS queries.
        # On other processors it takes up to twice their time
        if same_bits or count > 1 or not torch.cpu._is_amx_tile_supported():
            rows = F.pad(rows, (0, 0, 0, -count % ROWS))
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    return out[:, :, :count].flatten(1, 2) if alone else out[0, :, :count].transpose(0, 1)   # [T, H, hd]


def causal_mask(count: int, end: int, device, dtype, same_bits: bool = False):
    """Return the mask [rows, S] of the last `count` of `end` tokens. On a CPU it is padded.

    It is 0 up to a row's own position, and minus infinity after it. Returns None if no mask is needed:
    for a whole sequence, if it needs no padding, and for a single row without `same_bits`."""
    on_cpu = device.type == "cpu"
    rows, wide = (count + -count % ROWS if count > 1 else 1, whole_blocks(end)) if on_cpu else (count, end)
    if count == end == wide or count == 1 and not (same_bits and on_cpu):
        return None
    if device.type == "cuda" and dtype.itemsize == 2:      # flash attention takes no mask tensor
        from torch.nn.attention.bias import causal_lower_right  # a slow import (1 s)
        return causal_lower_right(count, end)
    return torch.full((rows, wide), -math.inf, dtype=dtype, device=device).triu_(end - count + 1)


def upload(numbers, device) -> torch.Tensor:
    """Copy integers from the host to the device -> [n]. With a GPU, the host does not wait for the copy."""
    numbers = torch.as_tensor(numbers, dtype=torch.long)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class Llama(nn.Module):
    """The model: embedding, layers, final norm, head. Weights are allocated but not set; shell/checkpoint.py
    loads them."""
    def __init__(self, config: LlamaConfig, dtype=torch.float32, device="cpu", layer=Layer):
        """`layer`: the class of the layers."""
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.digest = b""  # SHA-256 of config and weights, set by checkpoint.load; part of each block key
        self.same_bits = False  # CPU only: True: a row gives the same bits alone and in a batch
        self.pieces = None  # GPU only: CUDA graphs of the layers, set by checkpoint.load
        where = dict(dtype=dtype, device=device)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.rotary = Rotary(config, **where)
        self.layers = nn.ModuleList(layer(config, at, **where) for at in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.head = Linear(config.hidden_size, config.vocab_size, False, **where)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding

    def embed(self, tokens):
        """tokens [T] -> hidden states [T, D]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden):
        """Output of the last layer [T, D] -> logits [T, V]. Pass only the rows from which a token is
        sampled."""
        return self.head(self.norm(hidden))
