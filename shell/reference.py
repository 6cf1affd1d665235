"""The same weights in `transformers`, which every claim of equality is checked against."""
from dataclasses import asdict

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, logging

from common.llama import Llama
from shell import checkpoint


def reference_model(name: str, dtype: torch.dtype, device: str = "cpu"):
    """A name as `--model` takes it -> the model as `transformers` runs it, by sdpa. It decodes greedily."""
    if name.startswith("random:"):      # on the host, where no weight is copied for products
        return as_transformers(checkpoint.load(name, str(dtype)[6:], device, on_host=True)[0]).to(device)
    folder = str(checkpoint.find_folder(name))
    logging.disable_progress_bar()      # of reading, in a demo's output
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True).to(device).eval()
    model.generation_config = GenerationConfig()    # not the folder's: it may sample, or punish repetition
    return model


def as_transformers(plain: Llama):
    """The same weights in a model of `transformers`."""
    fields = asdict(plain.config)
    sizes = {name: fields[name] for name in fields if not name.startswith("rope_") and "bias" not in name}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes), dtype=plain.dtype, attn_implementation="sdpa").eval()
    model.load_state_dict(plain.weights(), assign=True)
    return model
