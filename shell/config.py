"""A config.json in Hugging Face layout -> a LlamaConfig, or the field that this model cannot follow."""
import copy
import sys

from common.llama import LlamaConfig

FAMILIES = "llama", "mistral", "qwen2"
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


def read_config(raw: dict) -> LlamaConfig:
    """Read a config.json as `transformers` does, which ignores what it does not know. Raises ModelError with
    the name of the field that asks for other mathematics or other weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    family, kind = raw.get("model_type"), str(raw.get("architectures") or "ForCausalLM")
    require(family in FAMILIES, f"model_type must be {', '.join(FAMILIES)}, not {family!r}")
    require("ForCausalLM" in kind, f"architectures must be one ForCausalLM, not {kind[:80]}")
    config = CONFIG_MAPPING[family].from_dict(copy.deepcopy(raw))      # raises whatever its checks raise
    config.standardize_rope_params()        # again, as the model does
    rope, heads, act = config.rope_parameters, config.num_attention_heads, config.hidden_act
    scaling, rotated = rope["rope_type"], rope.get("partial_rotary_factor") or 1
    quantized = raw.get("quantization_config")
    require(not quantized, f"quantization_config is {quantized}; choose a model that is not quantized"[:200])
    require(act in ("silu", "swish"), f"hidden_act is {act}; choose a model with SwiGLU")
    require(rotated == 1, f"partial_rotary_factor is {rotated}; choose a model that rotates whole heads")
    require(scaling in ROPES, f"rotary scaling is {scaling!r}, and not supported; {', '.join(ROPES)} are")
    fine = heads % config.num_key_value_heads == 0
    require(fine, "num_attention_heads must be a multiple of num_key_value_heads")
    fields = {name: float(rope[name]) for name in ROPES[scaling]}
    bias, mlp = (family == "llama" and bool(getattr(config, f"{part}_bias")) for part in ("attention", "mlp"))
    return LlamaConfig(
        **{name: getattr(config, name) for name in SIZES},
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=read_context(config), rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling={"rope_type": scaling, **fields} if fields else {},
        qkv_bias=bias or family == "qwen2", output_bias=bias, mlp_bias=mlp,
        tie_word_embeddings=bool(config.tie_word_embeddings))


def read_context(config) -> int:
    """-> the tokens up to which full attention is exact: all, or a layer's sliding window."""
    kinds, context = set(getattr(config, "layer_types", None) or ()), config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    can = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    require(kinds <= can, f"layer_types must be {' or '.join(sorted(can))} in this model")
    if window is None or (config.model_type != "mistral" and kinds == {"full_attention"}):
        return context
    require(window > 0, f"sliding_window must be a positive number, not {window}")
    if window < context:
        print(f"Attention slides, so the context is {window} tokens, not {context}.", file=sys.stderr)
    return min(window, context)
