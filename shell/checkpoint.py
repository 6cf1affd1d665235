"""A name or a folder -> a model and its tokenizer.

    classroom        the model in models/classroom, shipped with this repository
    tinyllama        TinyLlama/TinyLlama-1.1B-Chat-v1.0, from the Hugging Face hub or its local cache
    FOLDER           any folder in Hugging Face layout: config.json, model*.safetensors, tokenizer.json
    OWNER/NAME       any such model on the hub, refused before its weights are downloaded if it does not fit
    random:NAME      random weights, always the same, and a byte-level tokenizer: shell/random_models.py

Weights travel one tensor at a time from the file to their final place and dtype, so loading needs the
model's own memory and one tensor more. On a CPU the products of many rows then get a copy of their own, where
twice as much is free. Only safetensors are read; a pickle can run code.
"""
import ctypes
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from common.llama import Llama, LlamaConfig
from shell import random_models
from shell.config import ModelError, read_config

CLASSROOM = Path(__file__).resolve().parent.parent / "models" / "classroom"
ALIASES = {"classroom": str(CLASSROOM), "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
OFFLINE = "The models classroom (shipped) and random:tinyllama need no network."
INSTEAD = {"adapter_config.json": "an adapter", "*.gguf": "GGUF files", "*.bin": "pickles, which run code"}
TIED = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def keep_freed_memory():
    """What is freed stays with the process, up to 1 GiB. Else glibc may give it back after each layer, and
    the next one has every page faulted in again: now and then, decode steps took ten times as long."""
    with suppress(AttributeError, OSError, TypeError):          # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 1 << 30)                                    # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)        # M_MMAP_THRESHOLD: the largest that glibc takes


def load(name: str, dtype: str = "auto", device: str = "auto", on_host: bool = False, division=None):
    """-> (Llama, tokenizer, end tokens: the ids after which an answer is over). Raises ModelError.

    `dtype` is auto, float32, bfloat16 or float16; `device` auto, cpu or cuda. `on_host`: keep the weights in
    host memory, on any device (08). `division`: take only a rank's part (09)."""
    device = pick_device(device)
    if device == "cuda":            # where cuDNN's attention plans anew for every length, 20 to 40 ms
        torch.backends.cuda.enable_cudnn_sdp(False)
    keep_freed_memory()
    if name.startswith("random:"):
        config, configs = random_models.random_config(name), [{}]
        tokenizer = random_models.byte_tokenizer(config.vocab_size)
        digest = hashlib.sha256(name.encode())
    else:
        folder = find_folder(name)
        configs = [read_json(folder / file) for file in ("config.json", "generation_config.json")]
        if configs[0].keys() <= {"model_type"}:     # with GGUF files, it may say that much
            raise lack(name, folder, "config.json")
        try:
            config = read_config(configs[0])
        except ModelError as error:
            raise ModelError(f"{name}: {error}.") from None
        tokenizer = read_tokenizer(folder)
        digest = hashlib.sha256(repr(config).encode())
    dtype, place = pick_dtype(dtype, device, configs[0]), "cpu" if on_host else device
    model = allocate(config, dtype, place, name, division)
    fill = division.fill if division else lambda place, name, tensor: place.copy_(tensor)
    if name.startswith("random:"):
        random_models.fill_at_random(model, config, fill)
    else:
        fill_from_files(model, config, fill, weight_files(name, folder), digest)
    model.digest = digest.digest()
    model.eval().requires_grad_(False)
    if not on_host and 2 * weight_bytes(model) < free_host_memory():
        model.reorder_weights()
    return model, tokenizer, read_end_tokens(tokenizer, configs)


def pick_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"Unknown device {device!r}: choose auto, cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("No CUDA device is visible to PyTorch here; use --device cpu.")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str, raw_config: dict) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU what the checkpoint was saved in, if that is 16-bit, else bfloat16."""
    if dtype == "auto":
        saved = raw_config.get("dtype") or raw_config.get("torch_dtype")
        dtype = "float32" if device == "cpu" else saved if saved in ("bfloat16", "float16") else "bfloat16"
    if dtype not in DTYPES:
        raise ModelError(f"Unknown dtype {dtype!r}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def find_folder(name: str, files=("*.json", "*.jinja"), commit: str | None = None) -> Path:
    """A name as the user typed it -> a local folder; `files` of a model on the hub are downloaded."""
    repository = ALIASES.get(name, name)
    if os.path.isdir(repository):           # unlike Path.is_dir, False for a name that is too long
        return Path(repository)
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ModelError(f"No model {name!r}: no such folder, and the hub names them OWNER/NAME. {OFFLINE}")
    from huggingface_hub import errors, snapshot_download
    wanted = dict(allow_patterns=list(files), ignore_patterns=["*/*"], revision=commit)
    try:                                    # without a network this is what the cache holds
        return Path(snapshot_download(repository, **wanted))
    except Exception as error:              # the hub's client lets its HTTP library's own errors through
        why = f"could not be downloaded ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
        if isinstance(error, errors.GatedRepoError):
            why = "is gated: accept its licence on huggingface.co and log in with `hf auth login`"
        raise ModelError(f"{repository} is not in the local cache and {why}. {OFFLINE}") from None


def lack(name: str, folder: Path, file: str) -> ModelError:
    """-> the error for a model without `file`, which says what it has instead."""
    files, repository = os.listdir(folder), ALIASES.get(name, name)
    with suppress(Exception):               # no network
        from huggingface_hub import list_repo_files
        files += [] if os.path.isdir(repository) else list_repo_files(repository, revision=folder.name)
    but = [f", but {what}" for end, what in INSTEAD.items() if any(Path(file).match(end) for file in files)]
    return ModelError(f"{name} has no {file}{''.join(but[:1])}; choose the whole model, in safetensors.")


def read_json(path: Path) -> dict:
    """-> {} where there is no such file. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def weight_files(name: str, folder: Path) -> list[Path]:
    """The whole model, or else its parts. Of a model on the hub, these are downloaded now."""
    named = read_json(folder / "model.safetensors.index.json").get("weight_map")
    parts = named.values() if isinstance(named, dict) else ["model-?????-of-?????.safetensors"]
    for wanted in ["model.safetensors"], [str(part) for part in set(parts) if part]:
        find_folder(name, wanted, commit=folder.name)
        if files := [path for path in sorted(folder.iterdir()) if any(map(path.match, wanted))]:
            return files
    raise lack(name, folder, "model.safetensors")


def read_tokenizer(folder: Path):
    """tokenizer.json says it all. (The class that tokenizer_config.json names may build it anew.)"""
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json; AutoTokenizer of transformers, from_pretrained "
                         "and then save_pretrained, makes one of a tokenizer.model.")
    from transformers import PreTrainedTokenizerFast
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, model_max_length=1 << 40)   # the context is checked elsewhere
    except Exception as error:              # the library raises whatever its parsers raise
        raise ModelError(f"The tokenizer in {folder} cannot be read ({type(error).__name__}: "
                         f"{' '.join(str(error).split())[:300]}).") from None


def read_end_tokens(tokenizer, configs: list[dict]) -> frozenset[int]:
    """What the tokenizer, config.json and generation_config.json name as end of text, a token or several."""
    named = [tokenizer.eos_token_id, *(config.get("eos_token_id") for config in configs)]
    tokens = sum((ids if isinstance(ids, list) else [ids] for ids in named), [])
    return frozenset(token for token in tokens if isinstance(token, int))


def allocate(config: LlamaConfig, dtype: torch.dtype, device: str, name: str, division=None) -> Llama:
    """Room for the weights, after a look at whether there is any."""
    config = division.config(config) if division else config
    try:
        shape = Llama(config, dtype, "meta")
    except RuntimeError:                    # a product of its sizes is more than 64 bits
        raise ModelError(f"{name}: the sizes in its config.json are absurd.") from None
    size = weight_bytes(shape)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_host_memory()
    if size > free:
        raise ModelError(f"{name} takes {size / 1e9:.1f} GB in {str(dtype)[6:]} and {free / 1e9:.1f} GB are "
                         "free; choose a smaller model or a 16-bit --dtype.")
    model = Llama(config, dtype, device)
    if division:
        division.divide(model)
    return model


def weight_bytes(model: Llama) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def free_host_memory() -> float:
    """Bytes, where the operating system tells (Linux); otherwise infinite."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return float("inf")


def fill_from_files(model: Llama, config: LlamaConfig, fill, files: list[Path], digest):
    """Copy every tensor to its place, as `fill` does, and its name and bytes into `digest`. Of two that are
    tied, one is enough. `config`: the whole model's."""
    found = {name: (path, name) for path in files for name in read_tensor(path)}
    whole = Llama(replace(config, tie_word_embeddings=False), model.dtype, "meta").weights()
    for name, (path, _) in found.items():
        if name not in whole and not name.endswith("rotary_emb.inv_freq"):      # which Rotary computes
            raise ModelError(f"{path} has a tensor {name}, which this model has no place for.")
    tied = [found[name] for name in TIED if name in found and config.tie_word_embeddings]
    if len(tied) == 2 and not torch.equal(read_tensor(*tied[0]), read_tensor(*tied[1])):
        raise ModelError(f"{TIED[1]} is not the embedding that config.json ties it to; correct "
                         f"tie_word_embeddings in {files[0].parent}.")
    found |= {name: tied[0] for name in TIED if tied}
    for name, place in tqdm(model.weights().items(), "loading", delay=1, leave=False, disable=None):
        if name not in found:
            raise ModelError(f"{files[0].parent} lacks {name}; it is incomplete: copy or download it again.")
        path, source = found[name]
        tensor, shape = read_tensor(path, source), whole[name].shape
        if tensor.shape != shape:
            raise ModelError(f"{path}: {source} is {[*tensor.shape]}, by config.json {[*shape]}.")
        if not (tied and name == TIED[1]):      # of two tied ones, which ranks divide differently, the first
            digest.update(f"{name} {tensor.dtype}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy())
        fill(place, name, tensor)


def read_tensor(path: Path, name: str | None = None):
    """A tensor of a file, or all names in it. Each time it is opened: closing it unmaps what was read."""
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name) if name else list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download it again.") from None
