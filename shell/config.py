"""Turn a Hugging Face config.json into a LlamaConfig, or name the field that is not supported."""
import math
import sys
from types import SimpleNamespace

from common.llama import LlamaConfig
from shell.families import FamilyConfig

FAMILIES = "llama", "mistral", "qwen2", "qwen3", "smollm3"
NUMBERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")
# Fields with which `transformers` must read a config
UNUSUAL = "rope_scaling", "partial_rotary_factor", "sliding_window", "layer_types", "per_layer_config"
# Dynamic scaling changes nothing within max_position_embeddings, and the context ends there.
ROPES = {"default": (), "dynamic": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


class ModelError(ValueError):
    """The model cannot be loaded. The message is one sentence that tells the user what to do."""


def require(fine: bool, message: str):
    if not fine:
        raise ModelError(f"The model's config.json: {message}.")


def read_config(raw: dict) -> LlamaConfig:
    """Read a config.json as `transformers` does: unknown fields are ignored.

    May add fields to `raw`. Raises ModelError with the name of a field that asks for another computation or
    other weights."""
    family, kind = raw.get("model_type"), str(raw.get("architectures") or "ForCausalLM").strip("[']")
    require(family in FAMILIES, f"model_type must be {', '.join(FAMILIES)}, not {family!r}")
    require(kind.endswith("ForCausalLM"), f"architectures must be one ForCausalLM, not {kind[:80]}")
    require(raw.get("is_causal", True), "is_causal is false; choose a model with causal attention")
    for name, value in raw.items():
        quantized = value and name.startswith(("quantization", "compression"))
        how = value.get("quant_method", "set") if isinstance(value, dict) else value
        require(not quantized, f"{name} is {how}; choose a model that is not quantized")
    config = plain_llama(raw)
    if config is None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        config = CONFIG_MAPPING[family].from_dict(raw)      # may raise errors of any kind
        config.standardize_rope_params()        # a second time, as in transformers' models
    rope, heads, act = config.rope_parameters, config.num_attention_heads, config.hidden_act
    scaling, rotated = rope["rope_type"], rope.get("partial_rotary_factor")
    require(act in ("silu", "swish"), f"hidden_act is {act}; choose a model with SwiGLU")
    require(rotated in (None, 1), f"partial_rotary_factor is {rotated}; choose one that rotates whole heads")
    require(scaling in ROPES, f"rotary scaling {scaling!r} is not supported; {', '.join(ROPES)} are")
    numbers = {name: (vars(config) | rope)[name] for name in (*NUMBERS, *ROPES[scaling])}
    for name, value in numbers.items():
        fine = isinstance(value, (int, float)) and 0 < value < math.inf
        require(fine, f"{name} must be a positive number, not {value!r}")
    fine = heads % config.num_key_value_heads == 0
    require(fine, "num_attention_heads must be a multiple of num_key_value_heads")
    fields = {name: numbers.pop(name) for name in ROPES[scaling]}
    bias = family in ("llama", "qwen3", "smollm3") and config.attention_bias        # other families ignore it
    turned = config.no_rope_layers if family == "smollm3" else ()
    own = dict(
        rope_scaling={"rope_type": scaling, **fields} if fields else {},
        qkv_bias=bias or family == "qwen2", output_bias=bias, qk_norm=family == "qwen3",
        mlp_bias=family in ("llama", "smollm3") and config.mlp_bias,
        no_rope_layers=tuple(number for number, turns in enumerate(turned) if not turns))
    return (FamilyConfig if any(own.values()) else LlamaConfig)(
        **numbers | {"max_position_embeddings": read_context(config)},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tie_word_embeddings=bool(config.tie_word_embeddings), **own if any(own.values()) else {})


def plain_llama(raw: dict) -> SimpleNamespace | None:
    """Return the fields of the config of a plain Llama with all of its sizes, or None.

    `transformers` reads any other config, and its import takes seconds."""
    fields = dict(hidden_act="silu", head_dim=None, attention_bias=False, mlp_bias=False,
                  tie_word_embeddings=False, rope_theta=10000.0) | raw
    rope = {"rope_type": "default", "rope_theta": fields["rope_theta"], **(raw.get("rope_parameters") or {})}
    sizes = [*map(raw.get, NUMBERS[:7]), fields["head_dim"] or 2]
    whole = raw.get("rms_norm_eps") and all(type(size) is int and size > 0 for size in sizes)
    unusual = any(raw.get(name) is not None for name in UNUSUAL) or len(rope) > 2
    uneven = whole and (sizes[1] % (2 * sizes[4]) or sizes[7] % 2)
    if raw["model_type"] != "llama" or unusual or not whole or uneven:
        return None
    return SimpleNamespace(**fields | {"rope_parameters": rope})


def read_context(config) -> int:
    """Return the most tokens for which full attention is exact.

    That is the context, or a layer's sliding window if it is smaller. Raises ModelError."""
    kinds, context = set(getattr(config, "layer_types", None) or ()), config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    can = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    require(kinds <= can, f"layer_types must be {' or '.join(sorted(can))} in this model")
    if window is None or (config.model_type != "mistral" and kinds == {"full_attention"}):
        return context
    require(window > 0, f"sliding_window must be a positive number, not {window}")
    if window < context:
        print(f"Attention uses a window, so the context is {window} tokens, not {context}.", file=sys.stderr)
    return min(window, context)
