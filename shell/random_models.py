"""Models without a checkpoint, `--model random:NAME`: a known geometry, seeded random weights, a tokenizer of bytes.

For times and bytes, which depend on sizes alone; their answers mean nothing.
"""
import torch
from tqdm import tqdm

from common.llama import Llama, LlamaConfig

# hidden, intermediate, layers, heads, KV heads, vocabulary, context
GEOMETRIES = {
    "tiny": (64, 128, 4, 4, 4, 512, 512),
    "small": (1024, 2816, 12, 16, 16, 32000, 2048),
    "long": (512, 1408, 8, 8, 8, 8192, 8192),
    "tinyllama": (2048, 5632, 22, 32, 4, 32000, 2048),
    "tinyllama-mha": (2048, 5632, 22, 32, 32, 32000, 2048),
    "llama2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "llama2-13b": (5120, 13824, 40, 40, 40, 32000, 4096),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128256, 8192),
}
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token "
                 "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")


def random_config(name: str) -> LlamaConfig:
    geometry = GEOMETRIES[name.removeprefix("random:")]
    hidden, intermediate, layers, heads, kv_heads, vocabulary, context = geometry
    return LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
                       num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                       head_dim=hidden // heads, max_position_embeddings=context)


def fill_at_random(model: Llama, config: LlamaConfig, division=None):
    """Normal numbers of deviation 0.02 (ones for the norms), the same on every device and for every dtype's rounding. `config`:
    the whole model's, of which `division` takes a rank's part (chapter 09)."""
    generator, places = torch.Generator().manual_seed(0), model.weights()
    whole = Llama(config, model.dtype, "meta").weights()
    for name in tqdm(whole, desc="random weights", unit="tensor", delay=1, leave=False):
        if name.endswith("norm.weight"):
            places[name].fill_(1.0)
            continue
        tensor = torch.randn(whole[name].shape, generator=generator).mul_(0.02)
        if division:
            division.fill(places[name], name, tensor)
        else:
            places[name].copy_(tensor)


def byte_tokenizer(vocabulary: int):
    """A tokenizer for a model that has none: one token a byte, fillers for the rest of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = (f"\u0120t{number}" for number in range(vocabulary))       # shown as " t0", " t1", ...; never read
    words = [*SPECIAL, *alphabet, *fillers][:vocabulary]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
