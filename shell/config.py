"""A config.json in Hugging Face layout -> a LlamaConfig, or the field that this model cannot follow."""
import copy
import math
import sys

from common.llama import LlamaConfig

FAMILIES = "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")
# Dynamic scaling begins behind max_position_embeddings, where the context ends.
ROPES = {"default": (), "dynamic": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


class ModelError(ValueError):
    """The model cannot be had; the message is one sentence that says what to do."""


def require(fine: bool, message: str):
    if not fine:
        raise ModelError(f"The model's config.json: {message}.")


def positive(name: str, number):
    fine = isinstance(number, (int, float)) and 0 < number < math.inf
    require(fine, f"{name} must be a positive number, not {number!r}")
    return number


def read_config(raw: dict) -> LlamaConfig:
    """Read a config.json as `transformers` does, which ignores what it does not know. Raises ModelError with
    the name of the field that asks for other mathematics or other weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    family, kind = raw.get("model_type"), str(raw.get("architectures") or "LlamaForCausalLM").strip("[']")
    require(family in FAMILIES, f"model_type must be {', '.join(FAMILIES)}, not {family!r}")
    plain = kind.lower() in map("{}forcausallm".format, FAMILIES)
    require(plain, f"architectures must be the one ForCausalLM of {', '.join(FAMILIES)}, not {kind[:80]}")
    for name, value in raw.items():
        if value and name.startswith(("quantization", "compression")):
            how = value.get("quant_method", "set") if isinstance(value, dict) else value
            require(False, f"{name} is {how}; choose a model that is not quantized")
        if value is not None and name in (*SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps"):
            positive(name, value)
    require(raw.get("is_causal", True), "is_causal is false; choose a model with causal attention")
    config = CONFIG_MAPPING[family].from_dict(copy.deepcopy(raw))      # raises whatever its checks raise
    config.standardize_rope_params()        # again, as the model does
    rope, heads, act = config.rope_parameters, config.num_attention_heads, config.hidden_act
    scaling, rotated = rope["rope_type"], rope.get("partial_rotary_factor")
    require(act in ("silu", "swish"), f"hidden_act is {act}; choose a model with SwiGLU")
    require(rotated in (None, 1), f"partial_rotary_factor is {rotated}; choose a model that rotates whole heads")
    require(scaling in ROPES, f"rotary scaling is {scaling!r}, and not supported; {', '.join(ROPES)} are")
    fine = heads % config.num_key_value_heads == 0
    require(fine, "num_attention_heads must be a multiple of num_key_value_heads")
    fields = {name: float(positive(name, rope.get(name))) for name in ("rope_theta", *ROPES[scaling])}
    bias = family in ("llama", "qwen3", "smollm3") and config.attention_bias
    turned = config.no_rope_layers if family == "smollm3" else ()       # 1 or 0 for each layer
    return LlamaConfig(
        **{name: getattr(config, name) for name in SIZES},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=read_context(config), rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=fields.pop("rope_theta"),
        rope_scaling={"rope_type": scaling, **fields} if fields else {},
        qkv_bias=bias or family == "qwen2", output_bias=bias, qk_norm=family == "qwen3",
        mlp_bias=family in ("llama", "smollm3") and config.mlp_bias,
        no_rope_layers=tuple(number for number, turns in enumerate(turned) if not turns),
        tie_word_embeddings=bool(config.tie_word_embeddings))


def read_context(config) -> int:
    """-> the tokens up to which full attention is exact: all, or a layer's sliding window."""
    kinds, context = set(getattr(config, "layer_types", None) or ()), config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    can = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    require(kinds <= can, f"layer_types must be {' or '.join(sorted(can))} in this model")
    if window is None or (config.model_type not in ("mistral", "phi3") and kinds == {"full_attention"}):
        return context
    if positive("sliding_window", window) < context:
        print(f"Attention slides, so the context is {window} tokens, not {context}.", file=sys.stderr)
    return min(window, context)
