"""Models of `--model random:NAME`: a known geometry, random weights, and a byte-level tokenizer.

Their answers mean nothing. `random:NAME:TOKENS` sets the context."""
import re

import torch

from common.llama import LlamaConfig
from shell.config import ModelError

# vocabulary size, hidden size, intermediate size, layers, heads, KV heads, head dimension, context
GEOMETRIES = {
    "tiny": (512, 64, 128, 4, 4, 4, 16, 512),
    "small": (32000, 1024, 2816, 12, 16, 16, 64, 2048),
    "long": (8192, 512, 1408, 8, 8, 8, 64, 8192),
    "tinyllama": (32000, 2048, 5632, 22, 32, 4, 64, 2048),
    "tinyllama-mha": (32000, 2048, 5632, 22, 32, 32, 64, 2048),
    "llama2-7b": (32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama2-13b": (32000, 5120, 13824, 40, 40, 40, 128, 4096),
    "llama3-8b": (128256, 4096, 14336, 32, 32, 8, 128, 8192),
    # A Llama with OPT-30B's sizes. With 19,136, its three MLP matrices are as large as OPT's two.
    "opt-30b": (50272, 7168, 19136, 48, 56, 56, 128, 2048),
}
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")


def random_config(name: str) -> LlamaConfig:
    """Return the config of random:NAME or random:NAME:TOKENS. Raises ModelError."""
    geometry, tokens = re.fullmatch(r"(?:random:)?(.*?)(?::([1-9]\d{0,5}))?", name, re.S).groups()
    if geometry not in GEOMETRIES:
        raise ModelError(f"No geometry {name!r}: choose one of random:{', random:'.join(GEOMETRIES)}.")
    *sizes, context = GEOMETRIES[geometry]
    return LlamaConfig(*sizes, int(tokens or context))


def random_tensors(whole: dict, device: str):
    """Yield (name, tensor): ones for norms, otherwise normal numbers with deviation 0.02, for any dtype.

    They are made on `device`, since a host would take 50 s for 7 billion numbers. Another kind of GPU may
    make other numbers."""
    generator = torch.Generator(device).manual_seed(0)
    for name, place in whole.items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(place.shape)
        else:
            yield name, torch.randn(place.shape, generator=generator, device=device).mul_(0.02)


def byte_tokenizer(vocabulary: int):
    """Return a tokenizer with one token per byte, and filler tokens for the rest of the vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import GPT2Tokenizer
    fillers = (f"\u0120t{number}" for number in range(vocabulary))    # shown as " t0", " t1", ...; never read
    words = [*SPECIAL, *sorted(ByteLevel.alphabet()), *fillers][:vocabulary]
    return GPT2Tokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token=None, bos_token="<s>",
        eos_token="</s>", extra_special_tokens=SPECIAL, chat_template=CHAT_TEMPLATE)
