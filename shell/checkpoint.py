"""Load a model and its tokenizer, given a name or a folder.

    classroom        the model in models/classroom, shipped with this repository
    tinyllama        TinyLlama/TinyLlama-1.1B-Chat-v1.0, from the Hugging Face hub or its local cache
    FOLDER           any folder in Hugging Face layout: config.json, model*.safetensors, tokenizer.json
    OWNER/NAME       such a model on the hub; if it does not fit, its weights are not downloaded
    random:NAME      random weights and a byte-level tokenizer; random:NAME:TOKENS sets the context.
                     The weights are the same in each run on one device. See shell/random_models.py

Weights are read one tensor at a time. On a CPU, linear layers get a second copy of their weights in a faster
layout (shell/linear.py), if there is enough free memory for it.
"""
import ctypes
import gc
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from common.llama import Llama, LlamaConfig
from shell import bits, limits, random_models, read_words
from shell.config import ModelError, read_config
from shell.families import layer_of
from shell.linear import product_dtype, reads_weight, speed_up
from shell.pieces import Pieces
from shell.tokenizer import plain_tokenizer

CLASSROOM = Path(__file__).resolve().parent.parent / "models" / "classroom"
ALIASES = {"classroom": str(CLASSROOM), "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
OFFLINE = "The models classroom (shipped) and random:tinyllama need no network."
WHOLE = "Choose a complete model in safetensors format; GGUF files, adapters and pickles are not read."
HUB = {"LocalEntryNotFoundError": "the hub was not reached",         # error -> its meaning
       "RepositoryNotFoundError": "the hub has none of that name",
       "HFValidationError": "the hub allows no such name"}
LFS = b"version https://git-lfs"    # the beginning of a file that stands for another one
TIED = "model.embed_tokens.weight", "lm_head.weight"
PAGE = 2 << 20      # bytes of a large page
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Our name of a part of a layer -> Hugging Face's names of it, or of its halves
NAMES = {own: names for own, *names in read_words("weights.txt")}


def reserve(size: int):
    """Let glibc take the next `size` bytes from one area with pages of 2 MB, if the kernel has them. The
    allocator keeps these settings until `keep_freed_memory`.

    A token reads all weights. With pages of 4 KB, a token of SmolLM2 took 1.2 times as long. `size`: bytes of
    the weights, or of their copies."""
    with suppress(AttributeError, OSError, TypeError):          # not glibc, or no room
        libc, address, number = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t
        libc.malloc.restype = address
        libc.mallopt(-1, -1)                                    # M_TRIM_THRESHOLD: keep what is freed
        libc.mallopt(-4, 0)                                     # M_MMAP_MAX: allocate everything there
        area = libc.malloc(number(size))
        libc.madvise(address(-(-area // PAGE) * PAGE), number(max(0, size - PAGE)), 14)     # MADV_HUGEPAGE
        libc.free(address(area))


def keep_freed_memory():
    """Let glibc keep up to 1 GiB of memory that is freed from now on, for reuse, in pieces of up to 32 MB.

    Otherwise glibc may return memory to the kernel after each layer, and the next layer faults every page in
    again. Some decode steps then took ten times as long."""
    with suppress(AttributeError, OSError, TypeError):          # not glibc
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)                                     # free what is left of loading
        libc.mallopt(-1, 1 << 30)                               # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)                              # M_MMAP_THRESHOLD: the largest allowed value
        libc.mallopt(-4, 1 << 16)                               # M_MMAP_MAX: the default


def load(name: str, dtype: str = "auto", device: str = "auto", on_host: bool = False, sharding=None,
         same_bits: bool = False):
    """Load a model. Raises ModelError.

    `dtype`: auto or a key of DTYPES. `device`: auto, cpu or cuda. `on_host`: keep the weights in host memory
    even on a GPU (chapter 08). `sharding`: load only this rank's part (chapter 09). `same_bits`: on a CPU,
    give each request the bits that it has alone (--same-bits).

    Returns: (Llama, tokenizer, end tokens: the ids that end an answer)."""
    try:
        return read_model(name, dtype, device, on_host, sharding, same_bits)
    except ModelError:
        raise
    except Exception as error:              # parsers raise errors of any kind
        kind = type(error).__name__
        if kind in HUB:
            raise ModelError(f"No model {name!r}: no such folder, and {HUB[kind]}. {OFFLINE}") from error
        pointers = [path.name for path in sorted(Path(ALIASES.get(name, name)).glob("*"))
                    if path.is_file() and path.stat().st_size < 1000 and path.read_bytes().startswith(LFS)]
        hint = f"run git lfs pull, which fetches {', '.join(pointers)}." if pointers else "is it whole?"
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"{name} cannot be loaded ({kind}: {words}); {hint} {OFFLINE}") from error
    finally:
        gc.enable()         # shell/start.py disables it
        keep_freed_memory()


def read_model(name: str, dtype: str, device: str, on_host: bool, sharding, same_bits: bool):
    device = pick_device(device)
    if same_bits:
        bits.ask_for_strict_sums()
    torch.backends.cuda.enable_cudnn_sdp(False)     # cuDNN takes 20 to 40 ms for each new length
    if name.startswith("random:"):
        config, configs = random_models.random_config(name), [{}]
        tokenizer = random_models.byte_tokenizer(config.vocab_size)
        made_by = torch.cuda.get_device_name() if device == "cuda" else ""
        digest = hashlib.sha256(f"{name}{made_by}".encode())
    else:
        folder = find_folder(name)
        configs = [read_json(folder / file) for file in ("config.json", "generation_config.json")]
        if not configs[0]:
            raise ModelError(f"{name} has no config.json. {WHOLE}")
        config, tokenizer = read_config(configs[0]), read_tokenizer(folder)
        digest = hashlib.sha256(repr(config).encode())
    dtype, place = pick_dtype(dtype, device, configs[0]), "cpu" if on_host else device
    model = allocate(config, dtype, place, name, sharding)
    places = weights(model)
    whole = weights(Llama(replace(config, tie_word_embeddings=False), dtype, "meta", layer_of(config)))
    if name.startswith("random:"):
        tensors = random_models.random_tensors(whole, device)
    else:
        tensors = read_tensors(places, whole, find_tensors(name, folder, whole), config, digest)
    fill = sharding.fill if sharding else lambda place, key, tensor: place.copy_(tensor)
    for key, tensor in tqdm(tensors, "loading", len(places), delay=1, disable=None):
        fill(places[key], key, tensor)
    del places, tensors  # speed_up cannot free a weight to which they refer
    model.eval().requires_grad_(False)
    if device == "cpu":
        prepare_for_cpu(model, on_host, sharding, same_bits, digest)
    elif not on_host and not sharding:  # CUDA graphs here have no all-reduce
        model.pieces = Pieces(model)
    if same_bits and device != "cpu":
        print(bits.ON_A_GPU, file=sys.stderr)
    model.digest = digest.digest()
    named = [tokenizer.eos_token_id, *(config.get("eos_token_id") for config in configs)]
    ends = sum((ids if isinstance(ids, list) else [ids] for ids in named), [])
    return model, tokenizer, frozenset(token for token in ends if isinstance(token, int))


def prepare_for_cpu(model: Llama, on_host: bool, sharding, same_bits: bool, digest):
    """Choose the products of a model on a CPU, and add to `digest` what decides their bits. Raises
    ModelError."""
    size = weight_bytes(model) * (1 + product_dtype(model.dtype).itemsize / model.dtype.itemsize)
    copies = not on_host and size < limits.free_host_memory()
    ranks = sharding and sharding.ranks
    copies = ranks.all_true(copies) if ranks else copies
    model.same_bits = same_bits
    if copies:  # a copy takes memory of weights freed before, if it has their dtype; the head is the largest
        freed = product_dtype(model.dtype) == model.dtype and not reads_weight(model.dtype, same_bits)
        reserve(model.head.weight.nbytes if freed else int(size) - weight_bytes(model))
    speed_up(model, copies, same_bits)
    copied = sum(getattr(part, "reordered", None) is not None for part in model.modules())
    digest.update(f"{copied} copies".encode())
    if same_bits:
        count = ranks.count if ranks else 1
        found = bits.check(model)
        digest.update(f"rule3 {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {count}".encode())
        digest.update(found if count == 1 else b"")     # all ranks need one digest, but compute other parts


def pick_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("No CUDA device is visible to PyTorch here; use --device cpu.")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str, raw_config: dict) -> torch.dtype:
    """Pick a dtype. auto: float32 on a CPU; on a GPU the checkpoint's own dtype if 16-bit, else bfloat16."""
    if dtype == "auto":
        saved = raw_config.get("dtype") or raw_config.get("torch_dtype")
        dtype = "float32" if device == "cpu" else saved if saved in ("bfloat16", "float16") else "bfloat16"
    return DTYPES[dtype]


def find_folder(name: str, files=("*.json", "*.jinja"), commit: str | None = None) -> Path:
    """Return the local folder of a model, given its name as the user typed it.

    Download `files` (patterns) of a model on the hub, at `commit` or the newest. Raises ModelError."""
    repository = ALIASES.get(name, name)
    if os.path.isdir(repository):           # no error at a name that is too long
        return Path(repository)
    if os.path.exists(repository):
        raise ModelError(f"{name} is a file, and a model is a folder. {WHOLE}")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise ModelError(f"No model {name!r}: no such folder, and the hub's names are OWNER/NAME. {OFFLINE}")
    from huggingface_hub import snapshot_download
    # Without a network, this finds the files in the local cache
    return Path(snapshot_download(repository, revision=commit, allow_patterns=files, ignore_patterns=["*/*"]))


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, or {} if there is no such file."""
    return dict(**json.loads(path.read_text(encoding="utf-8-sig"))) if path.exists() else {}


def find_tensors(name: str, folder: Path, whole: dict) -> dict:
    """Find the file of each tensor of a model: model.safetensors, or the file that the index names.

    Tensors in a file other than the one that the index names are ignored. The files of a model on the hub are
    downloaded, unless the index names a tensor that is not in `whole` (name -> tensor). Raises ModelError.

    Returns: tensor name -> path, for the tensors that their files have."""
    one = "model.safetensors"
    stored = read_json(folder / f"{one}.index.json").get("weight_map", {})
    if one not in stored.values():
        find_folder(name, [one], commit=folder.name)
        stored = dict.fromkeys(tensor_names(folder / one), one) or stored
    if not stored:
        raise ModelError(f"{name} has no model.safetensors. {WHOLE}")
    for key, file in stored.items():
        if key not in whole and not key.endswith("rotary_emb.inv_freq"):        # Rotary computes it
            raise ModelError(f"{folder / file} has a tensor {key}, which this model does not have.")
    find_folder(name, set(stored.values()), commit=folder.name)
    held = {file: tensor_names(folder / file) for file in set(stored.values())}
    return {key: folder / file for key, file in stored.items() if key in held[file]}


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file; a missing file has none."""
    if not path.exists():
        return []
    with safe_open(path, "pt") as file:
        return list(file.keys())


def read_tokenizer(folder: Path):
    """Read the tokenizer from tokenizer.json. Raises ModelError.

    The class that tokenizer_config.json names is not used: it may build another tokenizer."""
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json; to make one from a tokenizer.model, call "
                         "AutoTokenizer.from_pretrained of transformers, then save_pretrained.")
    tokenizer = plain_tokenizer(folder, read_json(folder / "tokenizer_config.json"))
    if tokenizer is None:
        from transformers import PreTrainedTokenizerFast
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, model_max_length=1 << 40)   # the context is checked elsewhere
    if isinstance(template := tokenizer.chat_template, str):
        tokenizer.chat_template = template.removeprefix("\ufeff")           # a file's byte order mark
    return tokenizer


def allocate(config: LlamaConfig, dtype: torch.dtype, device: str, name: str, sharding=None) -> Llama:
    """Return a Llama with room for the weights. Raises ModelError if there is not enough free memory."""
    config = sharding.config(config) if sharding else config
    size = weight_bytes(Llama(config, dtype, "meta", layer_of(config)))
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else limits.free_host_memory()
    if size > free:
        raise ModelError(f"{name} takes {size / 1e9:.1f} GB in {str(dtype)[6:]}, but {free / 1e9:.1f} GB are "
                         "free; choose a smaller model or a 16-bit --dtype.")
    if device == "cpu":
        reserve(size)
    model = Llama(config, dtype, device, layer_of(config))
    if sharding:
        sharding.divide(model)
    return model


def weights(model: Llama) -> dict[str, torch.Tensor]:
    """Return Hugging Face's name of each weight -> the model's tensor for it.

    The model keeps K and V in one matrix, and gate and up in another, because one product is faster than two.
    So some of the tensors are views of half a matrix."""
    named = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.weight}
    if not model.config.tie_word_embeddings:
        named["lm_head.weight"] = model.head.weight
    for index, layer in enumerate(model.layers):
        for own, names in NAMES.items():
            for kind, tensor in getattr(layer, own, nn.Identity()).named_parameters():
                for name, part in zip(names, tensor.chunk(len(names))):
                    named[f"model.layers.{index}.{name}.{kind}"] = part
    return {name: tensor.detach() for name, tensor in named.items()}


def weight_bytes(model: Llama) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def read_tensors(names, whole: dict, found: dict, config: LlamaConfig, digest):
    """Yield (name, tensor) for each of `names`, and add the tensors to `digest`. Raises ModelError.

    `whole`: name -> a tensor of the expected shape. `found`: name -> path. If two weights are tied, the file
    needs only one of them."""
    both = [name for name in TIED if config.tie_word_embeddings and name in found]
    if len(both) == 2 and not torch.equal(*(read_tensor(found[name], name) for name in both)):
        raise ModelError(f"{TIED[1]} is not the embedding that config.json ties it to; correct "
                         f"tie_word_embeddings in {found[both[0]].parent}.")
    with ThreadPoolExecutor(1) as thread:       # it hashes one tensor while the caller copies it
        hashing = thread.submit(int)
        for name in names:
            source = both[0] if both and name in TIED else name
            if source not in found:
                raise ModelError(f"The model lacks {name}; it is incomplete: copy or download it again.")
            tensor, shape = read_tensor(found[source], source), whole[name].shape
            if tensor.shape != shape:
                sizes = f"{source} is {[*tensor.shape]}; config.json says {[*shape]}"
                raise ModelError(f"{found[source]}: {sizes}.")
            hashing.result()
            if not (both and name == TIED[1]):  # ranks shard two tied weights differently: hash one
                digest.update(f"{name} {tensor.dtype}".encode())
                hashing = thread.submit(digest.update, tensor.flatten().view(torch.uint8).numpy())
            yield name, tensor


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Read one tensor of a file. Raises ModelError.

    Each call opens the file again, because closing it unmaps the pages that were read."""
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor(name)
    if tensor.dtype not in (torch.float64, *DTYPES.values()):
        raise ModelError(f"{path}: {name} is {str(tensor.dtype)[6:]}; choose a model that is not quantized, "
                         "with weights in 16-, 32- or 64-bit floating point.")
    return tensor


def reference_model(name: str, dtype: torch.dtype, device: str = "cpu"):
    """Load a model with `transformers`, for sdpa attention and greedy decoding.

    Every claim of equality is checked against this model."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging
    how = dict(dtype=dtype, attn_implementation="sdpa")
    if name.startswith("random:"):      # on_host: no weights in another layout
        plain = load(name, str(dtype)[6:], device, on_host=True)[0]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **asdict(plain.config)), **how)
        model.load_state_dict(weights(plain), assign=True)
    else:
        logging.disable_progress_bar()      # they would appear in a demo's output
        model = AutoModelForCausalLM.from_pretrained(find_folder(name), use_safetensors=True, **how)
        model.generation_config = GenerationConfig()    # the folder's may sample or penalize repetition
    return model.to(device).eval()
