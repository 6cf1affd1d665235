"""A name or a folder -> a model and its tokenizer.

    classroom        the model in models/classroom, shipped with this repository
    tinyllama        TinyLlama/TinyLlama-1.1B-Chat-v1.0, from the Hugging Face hub or its local cache
    FOLDER           any folder in Hugging Face layout: config.json, model*.safetensors, tokenizer.json
    OWNER/NAME       any such model on the hub
    random:NAME      random weights, always the same, and a byte-level tokenizer: tools/random_models.py

Weights travel one tensor at a time from the file to their final place and dtype, so loading needs the
model's own memory and one tensor more. Only safetensors are read; a pickle can run code.
"""
import ctypes
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from common.llama import Llama, LlamaConfig, UnsupportedConfig

CLASSROOM = Path(__file__).resolve().parent.parent / "models" / "classroom"
ALIASES = {"tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
OFFLINE = "The models classroom (shipped) and random:tinyllama need no network."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ValueError):
    """The model cannot be had; the message is one sentence that says what to do."""


def keep_freed_memory():
    """What is freed stays with the process, up to 1 GiB. Else glibc may give it back to the system after each
    layer, and the next one has every page of it faulted in again: now and then, decode steps took ten times
    as long."""
    with suppress(AttributeError, OSError, TypeError):          # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 1 << 30)                                    # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)        # M_MMAP_THRESHOLD: the largest that glibc takes


def load(name: str, dtype: str = "auto", device: str = "auto", reorder: bool = True, on_host: bool = False,
         division=None):
    """-> (Llama, tokenizer, end tokens: the ids after which an answer is over). Raises ModelError.

    `dtype` is auto, float32, bfloat16 or float16; `device` auto, cpu or cuda. `reorder=False` keeps the plain
    weights on a CPU; `on_host` in host memory, plain, whatever the device (chapter 08). `division`: take only
    a rank's part of it (chapter 09)."""
    device = pick_device(device)
    keep_freed_memory()
    place = "cpu" if on_host else device
    if name.startswith("random:"):
        from tools import random_models
        config, dtype = random_models.random_config(name), pick_dtype(dtype, device, None)
        model = allocate(config, dtype, place, name, division)
        random_models.fill_at_random(model, config, division)
        digest = hashlib.sha256(name.encode())
        tokenizer = random_models.byte_tokenizer(config.vocab_size)
        end_tokens = {tokenizer.eos_token_id}
    else:
        folder = find_folder(name)
        raw = read_json(folder / "config.json")
        try:
            config = LlamaConfig.from_hf(raw)
        except UnsupportedConfig as error:
            raise ModelError(f"{name}: {error}.") from None
        files = weight_files(folder)
        tokenizer = read_tokenizer(folder)
        end_tokens = read_end_tokens(folder, raw, tokenizer)
        model = allocate(config, pick_dtype(dtype, device, raw), place, name, division)
        digest = hashlib.sha256(repr(config).encode())
        fill_from_files(model, files, digest, config, division)
    model.digest = digest.digest()
    model.eval().requires_grad_(False)
    if reorder and not on_host:
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

def find_folder(name: str) -> Path:
    """A name as the user typed it -> a local folder, downloading from the hub if need be."""
    if name == "classroom":
        return CLASSROOM
    if os.path.isdir(name):                 # unlike Path.is_dir, False for a name that is too long
        return Path(name)
    repository = ALIASES.get(name, name)
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ModelError(f"No model {name!r}: there is no such folder, and a model on the hub is named "
                         f"OWNER/NAME. {OFFLINE}")
    from huggingface_hub import snapshot_download
    wanted = dict(allow_patterns=["*.json", "model*.safetensors", "*.jinja"], ignore_patterns=["*/*"])
    try:                                    # without a network this is what the cache holds
        return Path(snapshot_download(repository, **wanted))
    except Exception as error:              # the hub's client lets its HTTP library's own errors through
        raise ModelError(f"{repository} is not in the local cache and could not be downloaded "
                         f"({type(error).__name__}: {' '.join(str(error).split())[:160]}). "
                         f"{OFFLINE}") from None


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The whole model, or else its parts."""
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no model.safetensors and no parts of it; other weights are not read, "
                         "since a pickle can run code.")
    return files


def read_tokenizer(folder: Path):
    """tokenizer.json says it all. (The class that tokenizer_config.json names may build it anew.)"""
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json; copy the tokenizer's files there.")
    from transformers import PreTrainedTokenizerFast
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, model_max_length=1 << 40)   # the context is checked elsewhere
    except Exception as error:              # the library raises whatever its parsers raise
        raise ModelError(f"The tokenizer in {folder} cannot be read ({type(error).__name__}: "
                         f"{' '.join(str(error).split())[:300]}).") from None


def read_end_tokens(folder: Path, config: dict, tokenizer) -> set[int]:
    """What the tokenizer, config.json and generation_config.json name as end of text, a token or several."""
    generation = folder / "generation_config.json"
    named = [tokenizer.eos_token_id, config.get("eos_token_id"),
             read_json(generation).get("eos_token_id") if generation.exists() else None]
    tokens = sum((ids if isinstance(ids, list) else [ids] for ids in named), [])
    return {token for token in tokens if isinstance(token, int)}


# Filling the model ------------------------------------------------------------------------------------------

def allocate(config: LlamaConfig, dtype: torch.dtype, device: str, name: str, division=None) -> Llama:
    """Room for the weights, after a look at whether there is any."""
    if division:
        config = division.config(config)
    try:
        shape = Llama(config, dtype, "meta")
    except RuntimeError:                    # a product of its sizes is more than 64 bits
        raise ModelError(f"{name}: the sizes in its config.json are absurd.") from None
    size = sum(tensor.numel() for tensor in (*shape.parameters(), *shape.buffers())) * dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_host_memory()
    if size > free:
        raise ModelError(f"{name} takes {size / 1e9:.1f} GB in {str(dtype)[6:]} and {free / 1e9:.1f} GB are "
                         "free; choose a smaller model or a 16-bit --dtype.")
    model = Llama(config, dtype, device)
    if division:
        division.divide(model)
    return model


def free_host_memory() -> float:
    """Bytes, where the operating system tells (Linux); otherwise infinite."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def fill_from_files(model: Llama, files: list[Path], digest, config: LlamaConfig, division=None):
    """Copy every tensor to its place, and its name and bytes into `digest`. `division`: copy a rank's part
    (chapter 09)."""
    places, tied = model.weights(), config.tie_word_embeddings
    shapes = {name: whole.shape for name, whole in Llama(config, model.dtype, "meta").weights().items()}
    bar = tqdm(total=len(places), desc="loading", unit="tensor", delay=1, leave=False)
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
            for name in names:
                if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                    continue                # Rotary computes the first; the second is the embedding itself
                place = places.pop(name, None)
                if place is None:
                    raise ModelError(f"{path} has a tensor {name}, which this model has no place for.")
                with safe_open(path, "pt") as file:         # reopened: closing unmaps what was read
                    tensor = file.get_tensor(name)
                    if tensor.shape != shapes[name]:
                        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}, "
                                         f"but config.json makes it {list(shapes[name])}.")
                    digest.update(f"{name} {tensor.dtype}".encode())
                    digest.update(tensor.flatten().view(torch.uint8).numpy())
                    if division is None:
                        place.copy_(tensor)
                    else:
                        division.fill(place, name, tensor)
                        if tied and name.endswith("embed_tokens.weight"):
                            division.fill(places.pop("lm_head.weight"), "lm_head.weight", tensor)
                    del tensor
                bar.update()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}); copy or download it "
                             "again.") from None
    bar.close()
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise ModelError(f"{files[0].parent} lacks the tensor {next(iter(places))}{more}; its weights are "
                         "incomplete: copy or download them again.")
