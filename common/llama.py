"""The model: the Llama family in plain PyTorch, opened up so that a cache can be taken apart.

Shapes are ragged and flat. A batch is one row of T tokens that may belong to many requests:
    tokens [T]   positions [T]   hidden [T, D]   q [T, H, hd]   k, v [T, KVH, hd]
Positions and caches are arguments; no module remembers a request. The loop over the layers is the
engine's, not the model's, because later chapters reorder it:

    hidden = model.embed(tokens)                                   # [T, D]
    rotation = model.rotary(positions)                             # [T, 1, hd] each, the same for all layers
    for layer, cache in zip(model.layers, kv_cache):
        hidden = layer(hidden, rotation, cache.attend)             # [T, D]
    logits = model.logits(hidden[-1:])                             # [1, V]

Source: Touvron et al., "LLaMA" (2023); RoFormer (Su et al., 2021) for rotary embedding; Llama 3.1's
frequency scaling as published with its weights.
"""
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


class UnsupportedConfig(ValueError):
    """A config.json that asks for mathematics which this model does not do."""


# Fields of a config.json that change nothing in the forward pass of inference.
_HARMLESS = frozenset("""
    _name_or_path architectures model_type dtype torch_dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id initializer_range attention_dropout pretraining_tp
    max_window_layers output_attentions output_hidden_states return_dict torchscript
    tokenizer_class task_specific_params id2label label2id chunk_size_feed_forward
    sliding_window use_sliding_window layer_types
    """.split())  # the last three names are examined below


_ROPE_FIELDS = {"default": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def _require(fine: bool, message: str):
    if not fine:
        raise UnsupportedConfig("config.json: " + message)


def _take(config: dict, name: str, default=None, kinds=(int,)):
    """Take a positive number out of `config`."""
    value = config.pop(name, None)
    value = default if value is None else value
    _require(type(value) in kinds and 0 < value < math.inf,
             f"{name} must be a positive {'whole number' if kinds == (int,) else 'number'}, not {value!r}")
    return value


def _take_rope(config: dict, context: int) -> tuple[float, dict]:
    """Take theta and the scaling out of `config`, with the precedence of transformers, whose version 5 puts
    both in rope_parameters."""
    scaling, parameters = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    name, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or {})
    _require(isinstance(rope, dict), f"{name} must be an object, not {rope!r}")
    rope, outside = dict(rope), config.pop("rope_theta", None)
    before = config.pop("original_max_position_embeddings", None)
    theta = _take(rope, "rope_theta", outside or 10000.0, (int, float))
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or older or "default"
    _require(kind in _ROPE_FIELDS, f"{name} of type {kind!r} is not supported; linear and llama3 are")
    if kind == "llama3":
        before = before or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = before or context
    fields = {each: _take(rope, each, None, (int, float)) for each in _ROPE_FIELDS[kind]}
    for other, value in rope.items():
        fine = other in _ROPE_FIELDS["llama3"] or value in (None, 1.0)
        _require(fine, f"{name}.{other} = {value!r} is not supported")
    return float(theta), {} if kind == "default" else {"rope_type": kind, **fields}


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
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: dict) -> "LlamaConfig":
        """Read a Hugging Face config.json. Raises UnsupportedConfig with the name of any field whose
        value this model would have to ignore."""
        config = dict(config)
        family = config.get("model_type")
        _require(family in ("llama", "mistral", "qwen2"),
                 f"model_type {family!r} is not of the Llama family; llama, mistral and qwen2 are supported")
        slides = config.get("sliding_window") and (family == "mistral" or config.get("use_sliding_window"))
        _require(not slides, "sliding_window is not supported; choose a model with full attention")
        layer_types = config.get("layer_types") or []
        _require(isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types),
                 "layer_types other than full_attention are not supported")
        _require(config.pop("hidden_act", "silu") == "silu", "hidden_act must be silu")

        names = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        known = {name: _take(config, name) for name in names}
        heads = known["num_attention_heads"]
        known["num_key_value_heads"] = kv_heads = _take(config, "num_key_value_heads", heads)
        known["head_dim"] = head_dim = _take(config, "head_dim", known["hidden_size"] // heads)
        known["max_position_embeddings"] = context = _take(config, "max_position_embeddings", 2048)
        known["rms_norm_eps"] = float(_take(config, "rms_norm_eps", 1e-6, (int, float)))
        known["rope_theta"], known["rope_scaling"] = _take_rope(config, context)
        for name in "mlp_bias", "tie_word_embeddings":
            known[name] = bool(config.pop(name, False))
        bias = bool(config.pop("attention_bias", False))
        known.update(qkv_bias=bias or family == "qwen2", output_bias=bias and family != "qwen2")
        _require(heads % kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads")
        _require(known["num_hidden_layers"] <= 1024, "num_hidden_layers must be at most 1024")
        _require(head_dim % 2 == 0, f"head_dim must be even, not {head_dim}")
        for name, value in config.items():  # whatever is left and says something is refused by name
            fine = name in _HARMLESS or value in (None, False, 0, "", [], {})
            _require(fine, f"{name} = {value!r} is not supported")
        return cls(**known)

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token's keys and values take, all layers together."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim


class Linear(nn.Module):
    """y = x W^T + b. On a CPU the weight can be reordered once (`reorder`) into oneDNN's own layout, and the
    plain weight is then released. Decode's one-row products only stream through the weight; two things help:
    - oneDNN streams faster through four rows than through one, so fewer are filled up with zeros;
    - a small weight, for which the call into oneDNN costs more than it saves, is kept in a second layout too,
      one piece a thread: one thread does one small product, all of them do a batch."""
    SMALL = 1 << 20            # numbers
    FEWEST_ROWS = 4

    def __init__(self, inputs: int, outputs: int, bias: bool, **where):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None
        self.reordered = self.pieces = None

    def forward(self, x):                                              # [T, inputs] -> [T, outputs]
        if self.reordered is not None:
            return self.multiply_reordered(x)
        many_on_cpu = x.dtype == torch.bfloat16 and x.shape[0] > 8 and x.device.type == "cpu"
        if many_on_cpu and not cpu_multiplies_bfloat16():
            # Without the instructions these products run a hundred times slower than those in float32
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).bfloat16()
        return F.linear(x, self.weight, self.bias)

    def multiply_reordered(self, x):
        rows = x.shape[0]
        if rows == 1 and self.pieces is not None:
            out = torch.bmm(x.expand(len(self.pieces), 1, -1), self.pieces).view(1, -1)  # [1, outputs]
            return out if self.bias is None else out + self.bias
        if rows < self.FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, self.FEWEST_ROWS - rows))           # [FEWEST_ROWS, inputs]
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")[:rows]

    def reorder(self):
        """Move the weight into the faster layouts, on a CPU, if the operator is there and takes it."""
        if self.weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return
        weight = self.weight.detach()
        try:
            self.reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        except RuntimeError:                # a dtype that this processor has no kernel for
            return
        self.weight = None
        if weight.numel() < self.SMALL and weight.dtype == torch.float32:
            count = math.gcd(len(weight), torch.get_num_threads())
            pieces = weight.unflatten(0, (count, -1))                  # [pieces, outputs / pieces, inputs]
            self.pieces = pieces.transpose(1, 2).contiguous()          # [pieces, inputs, outputs / pieces]


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Rotary(nn.Module):
    """Rotary position embedding in the half-split convention: number i is paired with number i + hd/2. All
    layers turn by the same angles, so an engine looks them up once for a forward pass."""

    def __init__(self, config: LlamaConfig, **where):
        super().__init__()
        if where["device"] == "meta":       # only its size is asked for; products there take long to import
            shape = config.max_position_embeddings, 2, config.head_dim
            self.register_buffer("table", torch.empty(shape, **where), persistent=False)
            return
        frequencies = rotary_frequencies(config)                       # [hd/2], float32
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)                   # [P, hd/2]
        cos, sin = angles.cos(), angles.sin()                          # [P, hd/2] each
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)   # [P, 2, hd]
        self.register_buffer("table", table.to(**where), persistent=False)

    def forward(self, positions):                                      # [T] -> cos and sin, [T, 1, hd] each
        return self.table[positions].unsqueeze(2).unbind(1)


def rotate(x, rotation):
    """q or k [T, H, hd], turned by what `Rotary` gave for its T positions -> [T, H, hd]."""
    cos, sin = rotation                                                # [T, 1, hd] each
    swapped = x.roll(x.shape[-1] // 2, dims=-1)             # [T, H, hd], each number at its partner's place
    return torch.addcmul(x * cos, swapped, sin)


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

    def __init__(self, config: LlamaConfig, rotary: Rotary, **where):
        super().__init__()
        hidden, head_dim, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
        self.head_dim = head_dim
        self.rotary = rotary
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.q_proj = Linear(hidden, config.num_attention_heads * head_dim, config.qkv_bias, **where)
        self.kv_proj = Linear(hidden, 2 * config.num_key_value_heads * head_dim, config.qkv_bias, **where)
        self.o_proj = Linear(config.num_attention_heads * head_dim, hidden, config.output_bias, **where)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps, **where)
        self.gate_up_proj = Linear(hidden, 2 * intermediate, config.mlp_bias, **where)
        self.down_proj = Linear(intermediate, hidden, config.mlp_bias, **where)

    def project_kv(self, hidden, positions):
        """The layer's input [T, D] at `positions` [T] -> k, v [T, KVH, hd], for a restoration from hidden
        states: norm and `keys_values`, as in the forward pass; so what is restored is what was lost."""
        return self.keys_values(self.attention_norm(hidden), self.rotary(positions))

    def keys_values(self, normed, rotation):
        """The layer's input after its norm [T, D] -> k, v [T, KVH, hd]: projection, rotary. The forward pass
        and every restoration call this same function."""
        kv = self.kv_proj(normed)                                                # [T, 2*KVH*hd]
        k, v = kv.view(len(normed), 2, -1, self.head_dim).unbind(1)              # [T, KVH, hd] each
        return rotate(k, rotation), v

    def forward(self, hidden, rotation, attend):
        """hidden [T, D] -> [T, D]. `rotation` is what the model's `rotary` gives for the T positions.
        `attend(q, k, v) -> out` [T, H, hd] belongs to the KV cache: it stores this layer's new k and v and
        attends over all that the batch's requests hold."""
        normed = self.attention_norm(hidden)                                     # [T, D]
        q = self.q_proj(normed).view(len(normed), -1, self.head_dim)             # [T, H, hd]
        k, v = self.keys_values(normed, rotation)                                # [T, KVH, hd] each
        out = attend(rotate(q, rotation), k, v)                                  # [T, H, hd]
        hidden = hidden + self.o_proj(out.flatten(-2))                           # [T, D]
        gate, up = self.gate_up_proj(self.mlp_norm(hidden)).chunk(2, dim=-1)     # [T, I] each
        return hidden + self.down_proj(F.silu(gate) * up)                        # [T, D]


class Llama(nn.Module):
    """Embedding, layers, final norm, head. Weights are allocated, not set: see common/checkpoint.py."""

    def __init__(self, config: LlamaConfig, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.digest = b""  # of config and weights, set by checkpoint.load: saved state depends on it
        where = dict(dtype=dtype, device=device)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.rotary = Rotary(config, **where)
        layers = (Layer(config, self.rotary, **where) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
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

    def weights(self):
        """Hugging Face name -> the tensor that holds it. K and V, and gate and up, lie in one matrix each
        (one product instead of two), so some of these are views of its halves."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            named[prefix + "input_layernorm.weight"] = layer.attention_norm.weight
            named[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
            for names, linear in (
                    (("self_attn.q_proj",), layer.q_proj), (("self_attn.o_proj",), layer.o_proj),
                    (("self_attn.k_proj", "self_attn.v_proj"), layer.kv_proj),
                    (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up_proj),
                    (("mlp.down_proj",), layer.down_proj)):
                for kind in ("weight", "bias"):
                    tensor = getattr(linear, kind)
                    if tensor is not None:
                        parts = tensor.chunk(len(names))
                        named.update({f"{prefix}{name}.{kind}": part for name, part in zip(names, parts)})
        return {name: tensor.detach() for name, tensor in named.items()}

    def reorder_weights(self):
        """Reorder every linear layer for the CPU; plain weights are released one by one."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.reorder()
