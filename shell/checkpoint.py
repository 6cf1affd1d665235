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

from common.llama import Llama, LlamaConfig, UnsupportedConfig

CLASSROOM = Path(__file__).resolve().parent.parent / "models" / "classroom"
ALIASES = {"classroom": str(CLASSROOM), "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
OFFLINE = "The models classroom (shipped) and random:tinyllama need no network."
INSTEAD = {"adapter_config.json": "an adapter", "*.gguf": "GGUF files", "*.bin": "pickles, which run code"}
TIED = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ValueError):
    """The model cannot be had; the message is one sentence that says what to do."""


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
    keep_freed_memory()
    place = "cpu" if on_host else device
    if name.startswith("random:"):
        from shell import random_models
        if name.removeprefix("random:") not in random_models.GEOMETRIES:
            known = ", ".join(f"random:{known}" for known in random_models.GEOMETRIES)
            raise ModelError(f"No geometry {name!r}: choose one of {known}.")
        config, dtype = random_models.random_config(name), pick_dtype(dtype, device, None)
        model = allocate(config, dtype, place, name, division)
        random_models.fill_at_random(model, config, division)
        digest = hashlib.sha256(name.encode())
        tokenizer = random_models.byte_tokenizer(config.vocab_size)
        end_tokens = {tokenizer.eos_token_id}
    else:
        folder = find_folder(name)
        raw = read_json(folder / "config.json")
        if raw.keys() <= {"model_type"}:    # with GGUF files, it may say that much
            raise lack(name, folder, "config.json")
        try:
            config = LlamaConfig.from_hf(raw)
        except UnsupportedConfig as error:
            raise ModelError(f"{name}: {error}.") from None
        tokenizer = read_tokenizer(folder)
        end_tokens = read_end_tokens(folder, raw, tokenizer)
        model = allocate(config, pick_dtype(dtype, device, raw), place, name, division)
        digest = hashlib.sha256(repr(config).encode())
        fill_from_files(model, weight_files(name, folder), digest, config, division)
    model.digest = digest.digest()
    model.eval().requires_grad_(False)
    if not on_host and 2 * weight_bytes(model) < free_host_memory():
        model.reorder_weights()
    return model, tokenizer, frozenset(end_tokens)


def pick_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"Unknown device {device!r}: choose auto, cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("No CUDA device is visible to PyTorch here; use --device cpu.")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str, raw_config: dict | None) -> torch.dtype:
    """auto: float32 on a CPU; on a GPU what the checkpoint was saved in, if that is 16-bit, else bfloat16."""
    if dtype == "auto":
        saved = (raw_config or {}).get("dtype") or (raw_config or {}).get("torch_dtype")
        dtype = "float32" if device == "cpu" else saved if saved in ("bfloat16", "float16") else "bfloat16"
    if dtype not in DTYPES:
        raise ModelError(f"Unknown dtype {dtype!r}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


# Finding the files ------------------------------------------------------------------------------------------

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


def read_end_tokens(folder: Path, config: dict, tokenizer) -> set[int]:
    """What the tokenizer, config.json and generation_config.json name as end of text, a token or several."""
    named = [tokenizer.eos_token_id, config.get("eos_token_id"),
             read_json(folder / "generation_config.json").get("eos_token_id")]
    tokens = sum((ids if isinstance(ids, list) else [ids] for ids in named), [])
    return {token for token in tokens if isinstance(token, int)}


# Filling the model ------------------------------------------------------------------------------------------

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
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def fill_from_files(model: Llama, files: list[Path], digest, config: LlamaConfig, division=None):
    """Copy every tensor to its place, and its name and bytes into `digest`; with `division` a rank's part."""
    # Is all there, and nothing else? One of two tensors that are tied is enough
    places, found = model.weights(), {name: path for path in files for name in read_tensor(path)}
    whole = Llama(replace(config, tie_word_embeddings=False), model.dtype, "meta").weights()
    other = dict(zip(TIED, reversed(TIED))) if config.tie_word_embeddings else {}
    for name, path in found.items():
        if name not in whole and not name.endswith("rotary_emb.inv_freq"):      # which Rotary computes
            raise ModelError(f"{path} has a tensor {name}, which this model has no place for.")
    both = [read_tensor(found[name], name) for name in other if name in found]
    if len(both) == 2 and not torch.equal(*both):
        raise ModelError(f"{TIED[1]} is not the embedding that config.json ties it to; correct "
                         f"tie_word_embeddings in {files[0].parent}.")
    fill = division.fill if division else lambda place, name, tensor: place.copy_(tensor)
    for name, place in tqdm(places.items(), desc="loading", unit="tensor", delay=1, leave=False):
        source = name if name in found else other.get(name)
        if source not in found:
            raise ModelError(f"{files[0].parent} lacks {name}; it is incomplete: copy or download it again.")
        tensor, shape = read_tensor(found[source], source), whole[name].shape
        if tensor.shape != shape:
            raise ModelError(f"{found[source]}: {source} is {[*tensor.shape]}, by config.json {[*shape]}.")
        if not (other and name == TIED[1]):     # of two tied ones, which ranks divide differently, the first
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
