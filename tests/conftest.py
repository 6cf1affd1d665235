"""Tiny models, written as folders with `transformers`, and one of them loaded."""
import os
import signal
import sys
from pathlib import Path

# PyTorch's threads sleep while they wait for each other, here and in all children. By default they spin, and
# the threads of an engine, a server and others wait for a core: on two cores most of the time went there.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when PyTorch is imported
# Test processes that run side by side share the cores; more threads than cores only wait for each other.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# Where a shell has started the tests in the background, they and their children would ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from common import machine
from shell import checkpoint, random_models
from shell.frontend import Frontend
from tests.support.stub import Engine

LIMIT = 900  # seconds, of a test: what waits for something that never comes fails, and the next test begins
machine.PAUSE = machine.OPERATIONS = 0.0  # all tests make engines, and none judges how fast one is

TINY = dict(
    vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=1, pad_token_id=None,
)  # fmt: skip


def pytest_addoption(parser):
    words = "a Cache of your own for tests/test_cache_contract.py"
    parser.addoption("--cache", metavar="MODULE:CLASS", help=words)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def overdue(*_):
    pytest.fail(f"This test has not ended within {LIMIT} s.")  # as no Exception: nothing contains it


def pytest_collection_modifyitems(items):
    """Demos and ranks first, which take longest: of two processes none is left alone with one at the end. And
    benchmarks last, which take more than one core."""
    items.sort(key=lambda item: "test_benchmarks" in item.nodeid)
    items.sort(key=lambda item: "test_demos" not in item.nodeid and "test_ranks" not in item.nodeid)


def write_model(folder: Path, family="llama", seed: int = 0, max_shard_size: str = "1GB", **config) -> Path:
    """A model folder with random weights, biases and norms included, so that a mix-up of two shows."""
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
    """What makes requests of questions to a model; the model is in its `model`."""
    return Frontend(*checkpoint.load(str(folder), dtype, "cpu"), fields)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A small Llama: 3 layers x 64, 2 KV heads, 300 byte-level entries, a context of 256. To be read only."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def frontend(tiny_folder) -> Frontend:
    """`tiny_folder`, loaded, for requests with the stub engine's fields. Shared, so leave it as it is."""
    return load(tiny_folder, fields=Engine.fields)
