"""A config.json in Hugging Face layout -> a LlamaConfig, or the field that this model cannot follow."""
import math
import re
import sys

from common.llama import LlamaConfig

# What `transformers` assumes in a family where a config.json is silent.
FAMILIES = {"llama": dict(max_position_embeddings=2048),
            "mistral": dict(max_position_embeddings=1 << 17, num_key_value_heads=8, sliding_window=4096),
            "qwen2": dict(max_position_embeddings=1 << 15, num_key_value_heads=32, max_window_layers=28)}
# Fields that change the mathematics or the weights: what this model has, and the values that mean it.
NOT_QUANTIZED = "weights that are not quantized", None, {}
FIXED = {"hidden_act": ("SwiGLU", "silu", "swish"), "is_causal": ("causal attention", True),
         "partial_rotary_factor": ("heads that are rotated as a whole", None, 1),
         "quantization_config": NOT_QUANTIZED, "quantization": NOT_QUANTIZED}
# Dynamic scaling begins behind max_position_embeddings, where the context ends.
ROPES = {"default": (), "dynamic": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


class ModelError(ValueError):
    """The model cannot be had; the message is one sentence that says what to do."""


def require(fine: bool, message: str):
    if not fine:
        raise ModelError("config.json: " + message)


def positive(config: dict, name: str, default=None, kind=int):
    value = default if config.get(name) is None else config[name]
    require(type(value) in (int, kind) and 0 < value < math.inf,
            f"{name} must be a positive {'whole ' * (kind is int)}number, not {value!r}")
    return kind(value)


def read_config(raw: dict) -> LlamaConfig:
    """Read a config.json as `transformers` does, which ignores what it does not know. Raises ModelError with
    the name of the field that asks for other mathematics or other weights."""
    family, kind = raw.get("model_type"), str(raw.get("architectures") or "ForCausalLM")
    require(str(family) in FAMILIES, f"model_type must be {', '.join(FAMILIES)}, not {family!r}")
    require(re.search(r"ForCausalLM\b", kind), f"architectures must be one ForCausalLM, not {kind[:80]}")
    config = FAMILIES[family] | raw
    context = positive(config, "max_position_embeddings")
    config = flatten_rope(config, context)
    for name, (wanted, *fine) in FIXED.items():
        value = config.get(name, fine[0])
        shown = value.get("quant_method", "set") if isinstance(value, dict) else value
        require(value in fine, f"{name} is {shown}, and not supported; choose a model with {wanted}")
    sizes, scaling = read_sizes(config), config["rope_type"]
    fields = {field: positive(config, field, None, float) for field in ROPES[scaling]}
    bias, mlp = (family == "llama" and bool(config.get(f"{part}_bias")) for part in ("attention", "mlp"))
    return LlamaConfig(
        **sizes, max_position_embeddings=read_context(config, context),
        rms_norm_eps=positive(config, "rms_norm_eps", 1e-6, float),
        rope_theta=positive(config, "rope_theta", 10000.0, float),
        rope_scaling={"rope_type": scaling, **fields} if fields else {},
        qkv_bias=bias or family == "qwen2", output_bias=bias, mlp_bias=mlp,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")))


def flatten_rope(config: dict, context: int) -> dict:
    """-> `config` with all about rotary embedding at its top; `rope_type` is one of ROPES."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope, original = config.get(name) or {}, "original_max_position_embeddings"
    require(isinstance(rope, dict) and "full_attention" not in rope, f"{name} must be one object")
    scaling = str(rope.get("rope_type") or rope.get("type") or "default")
    require(scaling in ROPES, f"{name} is {scaling!r}, and not supported; {', '.join(ROPES)} are")
    before = config.get(original) or rope.get(original) or context
    return config | rope | {"rope_type": scaling, original: before}


def read_sizes(config: dict) -> dict[str, int]:
    names = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    sizes = {name: positive(config, name) for name in names}
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = kv_heads = positive(config, "num_key_value_heads", heads)
    sizes["head_dim"] = head_dim = positive(config, "head_dim", sizes["hidden_size"] // heads)
    require(heads % kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads")
    require(sizes["num_hidden_layers"] <= 1024, "num_hidden_layers must be at most 1024")
    require(head_dim % 2 == 0, f"head_dim must be even, not {head_dim}")
    return sizes


def read_context(config: dict, context: int) -> int:
    """-> the tokens up to which full attention is exact: `context`, or a layer's sliding window."""
    kinds = set(re.findall(r"\w+", str(config.get("layer_types") or "")))
    family, window = config["model_type"], config.get("sliding_window")
    if family == "qwen2":
        some = kinds or config.get("max_window_layers") in range(config["num_hidden_layers"])
        window = window if some and config.get("use_sliding_window") else None
    can = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    require(kinds <= can, f"layer_types must be {' or '.join(sorted(can))} in this model")
    if window is None or (family != "mistral" and kinds == {"full_attention"}):
        return context
    window = positive(config, "sliding_window")
    if window < context:
        print(f"Attention slides, so the context is {window} tokens, not {context}.", file=sys.stderr)
    return min(window, context)
