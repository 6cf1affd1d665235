"""Tiny models, written as folders with `transformers`, and an engine on one of them."""
import importlib
import os
import sys
from pathlib import Path

# PyTorch's threads sleep while they wait for each other, here and in all children. By default they spin, and then the threads of
# an engine, of a server and of other processes wait for a core: on two cores most of the time of these tests went there.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")                # read when PyTorch is imported
# Test processes that run side by side share the cores; more threads than cores only wait for each other.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from common import checkpoint
from tools import random_models

TINY = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=1)


FROZEN = {"01_baseline": "legacy.baseline", "02_paged_kv": "legacy.paged", "03_cpu_offload": "legacy.offload"}


def chapter(name: str):
    """A chapter's module; its name begins with a digit. Of the first three: what chapters 07 and 08 stand on."""
    return importlib.import_module(FROZEN.get(name, name))


def write_model(folder: Path, family: str = "llama", seed: int = 0, max_shard_size: str = "1GB", **config) -> Path:
    """A model folder with random weights, biases and norms included, so that a mix-up of two shows."""
    import transformers
    kinds = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
             "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
             "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM)}
    make_config, make_model = kinds[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model(make_config(**{**TINY, **config})).eval()
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                torch.nn.init.normal_(tensor, mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    random_models.byte_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def make_engine(folder, dtype: str = "float32", device: str = "cpu", reorder: bool = True, **options):
    """Chapter 01's engine on a model, as the command line builds it."""
    return chapter("01_baseline").Engine(*checkpoint.load(str(folder), dtype, device, reorder=reorder), **options)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A small Llama: 3 layers x 64, 2 KV heads, 300 byte-level entries, a context of 256. Do not write to it."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def plain_engine(tiny_folder):
    """The same with plain weights, which chapter 08 moves into pieces of its own."""
    return make_engine(tiny_folder, reorder=False)


@pytest.fixture(scope="session")
def tiny_engine(tiny_folder):
    """Chapter 01's engine on `tiny_folder`: float32, on the CPU. Shared, so leave it open and empty."""
    return make_engine(tiny_folder)
