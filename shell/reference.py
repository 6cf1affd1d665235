"""The same weights in `transformers`, which every claim of equality is checked against."""
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from common.llama import Llama
from shell import checkpoint, random_models


def reference_model(name: str, dtype: torch.dtype, device: str = "cpu"):
    """A name as `--model` takes it -> the model as `transformers` runs it, with attention by sdpa. It decodes greedily."""
    if not name.startswith("random:"):
        model = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.find_folder(name)), dtype=dtype, attn_implementation="sdpa", use_safetensors=True).to(device).eval()
        model.generation_config = GenerationConfig()    # not the folder's: it may sample, or punish repetition
        return model
    ours = random_models.random_config(name)
    plain = Llama(ours, dtype, device)
    random_models.fill_at_random(plain, ours)
    return as_transformers(plain, dtype, device)


def as_transformers(plain: Llama, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """The same weights in a model of `transformers`."""
    config = LlamaConfig(**{field: getattr(plain.config, field) for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    model.load_state_dict(plain.weights(), assign=True)
    return model
