"""Settings of all tests, and fixtures: tiny models that `transformers` writes to folders."""
import os
import signal
import sys
from pathlib import Path

# Let PyTorch's threads sleep while they wait for each other, here and in all child processes. By default they
# spin. On two cores the threads of engine and server then spent most of the time waiting for a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch reads it at its import
# Parallel test processes share the cores. With more threads than cores, threads would only wait for each other.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# A shell makes background jobs and their children ignore Ctrl-C. The tests need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import shell.settings  # noqa: F401, I001  (before PyTorch)
import pytest
import torch

from shell import bits, checkpoint, machine, random_models, workers
from shell.frontend import Frontend
from tests.support.stub import Engine

bits.ask_for_strict_sums()  # as the loader does for --same-bits, before the first product
machine.PAUSE = machine.OPERATIONS = 0.0  # do not measure speed: no test depends on it
workers.HANG_SECONDS = 30.0  # a thread that waits for a core must not count as hanging

TINY = dict(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=1, pad_token_id=None,
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--cache", metavar="MODULE:CLASS", help="a Cache of your own for test_cache_contract.py")


def pytest_collection_modifyitems(items):
    """Run the longest tests first. If one ran last, a parallel process would wait for it alone."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/test_benchmarks", "tests/test_demos", "tests/test_ranks")))


def write_model(folder: Path, family="llama", seed: int = 0, max_shard_size: str = "1GB", **config) -> Path:
    """Write a model folder with random weights, and return it.

    Biases and norms are random too, so that a test notices if two are swapped. `config`: fields other than TINY's."""
    import transformers
    config = transformers.AutoConfig.for_model(family, **{**TINY, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                torch.nn.init.normal_(tensor, mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    random_models.byte_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def load(folder, dtype: str = "float32", fields=None) -> Frontend:
    """Load a model from a folder and return its Frontend; the model is in `.model`."""
    return Frontend(*checkpoint.load(str(folder), dtype, "cpu"), fields)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A folder with a small Llama: 3 layers of width 64, 2 KV heads, 300 tokens, a context of 256.

    Tests must not change it."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def frontend(tiny_folder) -> Frontend:
    """The Frontend of `tiny_folder`, with the stub engine's fields. Tests share it and must not change it."""
    return load(tiny_folder, fields=Engine.fields)
