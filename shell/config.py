"""A config.json in Hugging Face layout -> a LlamaConfig, or the field that this model cannot follow."""
import copy
import math
import sys

from common.llama import LlamaConfig

FAMILIES = "llama", "mistral", "qwen2"
# Fields that change the mathematics or the weights: what this model has, and the values that mean it.
NOT_QUANTIZED = "weights that are not quantized", None, {}
FIXED = {"hidden_act": ("SwiGLU", "silu", "swish"), "is_causal": ("causal attention", True),
         "partial_rotary_factor": ("heads that are rotated as a whole", None, 1),
         "quantization_config": NOT_QUANTIZED, "quantization": NOT_QUANTIZED}
# Dynamic scaling begins behind max_position_embeddings, where the context ends.
ROPES = {"default": (), "dynamic": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads")


class ModelError(ValueError):
    """The model cannot be had; the message is one sentence that says what to do."""


def require(fine: bool, message: str):
    if not fine:
        raise ModelError("config.json: " + message)


def read_config(raw: dict) -> LlamaConfig:
    """Read a config.json as `transformers` does, which ignores what it does not know. Raises ModelError with
    the name of the field that asks for other mathematics or other weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    family, kind = raw.get("model_type"), str(raw.get("architectures") or "ForCausalLM")
    require(family in FAMILIES, f"model_type must be {', '.join(FAMILIES)}, not {family!r}")
    require("ForCausalLM" in kind, f"architectures must be one ForCausalLM, not {kind[:80]}")
    try:
        config = CONFIG_MAPPING[family].from_dict(copy.deepcopy(raw))
        config.standardize_rope_params()    # again, as the model does
    except Exception as error:              # the library raises whatever its checks raise
        require(False, " ".join(str(error).split())[:200])
    rope, heads = config.rope_parameters, config.num_attention_heads
    for name, (wanted, *fine) in FIXED.items():
        value = (raw | rope).get(name, fine[0])
        shown = value.get("quant_method", "set") if isinstance(value, dict) else value
        require(value in fine, f"{name} is {shown}, and not supported; choose a model with {wanted}")
    scaling = rope["rope_type"]
    require(scaling in ROPES, f"rotary scaling is {scaling!r}, and not supported; {', '.join(ROPES)} are")
    sizes = {name: getattr(config, name) for name in SIZES}
    numbers = dict(rope_theta=rope["rope_theta"], rms_norm_eps=config.rms_norm_eps)
    fields = {name: rope[name] for name in ROPES[scaling]}
    for name, value in (sizes | numbers | fields).items():
        fine = isinstance(value, (int, float)) and 0 < value < math.inf
        require(fine, f"{name} must be a positive number, not {value!r}")
    fine = heads % config.num_key_value_heads == 0
    require(fine, "num_attention_heads must be a multiple of num_key_value_heads")
    numbers, fields = ({name: float(value) for name, value in given.items()} for given in (numbers, fields))
    bias, mlp = (family == "llama" and bool(getattr(config, f"{part}_bias")) for part in ("attention", "mlp"))
    return LlamaConfig(
        **sizes, **numbers, head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=read_context(config),
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
