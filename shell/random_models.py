"""Models of `--model random:NAME`: a known geometry, random weights, and a byte-level tokenizer.

Their answers mean nothing. `random:NAME:TOKENS` sets the context."""
import re
from pathlib import Path

import torch

from common.llama import LlamaConfig
from shell import read_words
from shell.config import ModelError

# The first line of the file names the columns. opt-30b is a Llama with OPT-30B's sizes: with 19,136, its
# three MLP matrices are as large as OPT's two
GEOMETRIES = {name: tuple(map(int, sizes)) for name, *sizes in read_words("geometries.txt")[1:]}
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


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
