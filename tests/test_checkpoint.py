"""Loading a model: refusals and their sentences, the places of all weights, and memory."""

import builtins
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, write_model
from safetensors.torch import load_file, save_file

from common.requests import Request
from shell import checkpoint
from shell.checkpoint import reference_model
from shell.linear import product_dtype
from tests.support.engines import baseline


def refusal(name, **options) -> str:
    """Return the sentence with which loading is refused."""
    with pytest.raises(checkpoint.ModelError) as error:
        checkpoint.load(str(name), **{"device": "cpu", **options})
    message = str(error.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 600
    return message


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny model's folder, for tests that damage it."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def change_json(path: Path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def changed(change, file: str = "model.safetensors"):
    """Return a function that changes the tensors in a folder."""
    def change_weights(folder: Path):
        change(tensors := load_file(folder / file))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)

    return change_weights


def index(folder: Path, more: str):
    """Write an index that places all tensors, and one named `more`, in a part file."""
    names, part = [*load_file(folder / "model.safetensors"), more], "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=dict.fromkeys(names, part))))


def convert(folder: Path, tensor: str, dtype: torch.dtype):
    changed(lambda t: t.update({tensor: t[tensor].to(dtype)}))(folder)


def point(folder: Path, name: str):
    """Replace a file by a pointer, as a clone without Git LFS has it."""
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def tied_in_float8(folder: Path):
    change_json(folder / "config.json", tie_word_embeddings=True)
    for name in checkpoint.TIED:
        convert(folder, name, torch.float8_e4m3fn)


# Refusals --------------------------------------------------------------------------------------

Q0 = "model.layers.0.self_attn.q_proj.weight"
BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no model.safetensors"]),
    "truncated weights": (lambda f: os.truncate(f / "model.safetensors", 100_000), ["SafetensorError", "is it whole"]),
    "missing tensor": (changed(lambda t: t.pop(Q0)), [Q0, "lacks"]),
    "wrong shape": (changed(lambda t: t.update({Q0: t[Q0][:32]})), [Q0, "[32, 64]", "[64, 64]"]),
    "extra tensor": (changed(lambda t: t.update(more=torch.zeros(2))), ["more"]),
    **{f"weights in {kind}": (partial(convert, tensor=Q0, dtype=kind), [Q0, f"is {str(kind)[6:]};", "floating point"])
       for kind in (torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)},
    "a tied head in float8": (tied_in_float8, ["model.embed_tokens.weight is float8_e4m3fn;"]),
    "context beyond memory": (lambda f: change_json(f / "config.json", max_position_embeddings=10**11), []),
    "config in bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), ["cannot be loaded"]),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), ["cannot be loaded"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "another head": (lambda f: change_json(f / "config.json", tie_word_embeddings=True), ["lm_head", "tie_word_embeddings"]),
    "broken generation_config": (lambda f: (f / "generation_config.json").write_text("{"), ["JSONDecodeError"]),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ["cannot be loaded"]),
    "a part is missing": (
        lambda f: ((f / "model.safetensors").unlink(), next(write_model(f, max_shard_size="60KB").glob("model-*")).unlink()),
        ["incomplete"]),
    "an index that names a tensor of no part": (lambda f: (changed(lambda t: t.pop(Q0))(f), index(f, Q0)), [Q0, "lacks"]),
    **{f"a Git LFS pointer as {name}": (partial(point, name=name), [name, "git lfs pull"]) for name in ("model.safetensors", "tokenizer.json")},
    "a file": (ROOT / "README.md", ["README.md is a file", "GGUF"]),
    "a hub's name": ("models/nothing", ["'models/nothing'", "no such folder, and the hub was not reached", "random:tinyllama"]),
    "no such name": ("nosuchmodel", ["nosuchmodel", "OWNER/NAME", "random:tinyllama"]),
    "no such folder": ("./no/such/folder", ["no such folder"]), "a long name": ("a" * 300, ["no such folder"]),
    "no such size": ("random:nosuch", ["random:nosuch", "random:tinyllama"]), "no size": ("random:", ["random:tinyllama"]),
    "no context": ("random:tiny:0", ["'random:tiny:0'", "random:opt-30b"]),
}  # fmt: skip


@pytest.mark.parametrize("broken, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_or_missing_model_is_refused_in_one_sentence(folder, broken, words, monkeypatch):
    """`broken`: the name of a model, or a function that damages a folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if callable(broken):
        broken(folder)
    message = refusal(folder if callable(broken) else broken)
    assert [word for word in words if word not in message] == []


def test_tokenizer_json_alone_makes_the_tokenizer_and_no_code_runs(folder, monkeypatch):
    from transformers import AutoTokenizer

    text, auto, marker = "Grüße, what is a KV cache?", AutoTokenizer.from_pretrained(folder), folder / "marker"
    code = f"import transformers\n\n\nclass T(transformers.PreTrainedTokenizerFast):\n    open({str(marker)!r}, 'w')\n"
    (folder / "code.py").write_text(code)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    theirs = dict(tokenizer_class="T", auto_map=dict(AutoTokenizer=[None, "code.T"]))
    for name in "chat_template.jinja", "config.json", "generation_config.json":  # some editors write byte order marks
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    for fields in dict(tokenizer_class="LlamaTokenizerFast"), theirs:
        change_json(folder / "tokenizer_config.json", **fields)
        ours = checkpoint.read_tokenizer(folder)
        assert ours.encode(text) == auto.encode(text) and ours.eos_token_id == auto.eos_token_id
        assert ours.chat_template == auto.chat_template
    assert checkpoint.load(str(folder), device="cpu")[0].digest and not marker.exists()


SETTINGS = json.loads((ROOT / "tests" / "support" / "configs.json").read_text())["tokenizers"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("file", [None, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"])
def test_a_tokenizer_and_its_template_write_what_those_of_transformers_write(settings, file, tmp_path):
    from transformers import PreTrainedTokenizerFast
    folder, rng = Path(shutil.copytree(checkpoint.CLASSROOM, tmp_path / "model")), random.Random(0)
    change_json(folder / "tokenizer_config.json", **settings)
    if file:
        words = {"special_tokens_map.json": '{"unk_token": "the"}', "added_tokens.json": '{"password": 5}', "chat_template.jinja": "{{ messages }}"}
        (folder / file).write_text(words[file])
    ours, theirs = checkpoint.read_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id, ours.chat_template) == (theirs.bos_token_id, theirs.eos_token_id, theirs.chat_template)
    parts = ["<s>", "</s>", "<|user|>", "Where", "is the", "lamp", "password", " ", "\n", "4821", "Zo\u00eb", "\U0001f600", "'s", "<", ""]
    for said in ("".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(30)):
        for special in True, False:
            assert ours.encode(said, add_special_tokens=special) == theirs.encode(said, add_special_tokens=special), said
        messages = [dict(role=role, content=said) for role in ("system", "user")]
        one, other = (each.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for each in (ours, theirs))
        assert one == other


def test_an_unknown_dtype_and_a_missing_device_are_refused(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, words in (dict(dtype="float64"), "float64"), (dict(device="tpu"), "tpu"), (dict(device="cuda"), "--device cpu"):
        assert words in refusal(tiny_folder, **options)
    assert checkpoint.pick_device("auto") == "cpu"


# The hub ---------------------------------------------------------------------------------------

def test_without_network_a_hub_model_comes_from_the_cache(tiny_folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, cached = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--owner--name"
    shutil.copytree(tiny_folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert checkpoint.find_folder("owner/name").samefile(cached / "snapshots" / commit)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A fake hub on which every model is `folder`.

    `asked`: names of requested models. `sent`: names of downloaded files."""
    import huggingface_hub
    hub = Mock(asked=set(), sent=[], cache=tmp_path / "0123abc")
    hub.cache.mkdir()

    def download(name, allow_patterns, ignore_patterns, revision):
        if (folder / "gated").exists():
            raise huggingface_hub.errors.GatedRepoError("403 Client Error.\nAccess is restricted", response=Mock())
        assert revision in (None, hub.cache.name) and ignore_patterns == ["*/*"]
        hub.asked.add(name)
        for path in folder.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns) and not (hub.cache / path.name).exists():
                hub.sent.append(path.name)
                shutil.copy(path, hub.cache)
        return str(hub.cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return hub


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hub_model_downloads_only_its_own_weights(hub, folder, tmp_path, sharded):
    """No fp16 variants, pickles, GGUF files, files of other programs, or parts of an older version are downloaded."""
    own = [*write_model(tmp_path / "parts", max_shard_size="60KB").glob("model*")]
    for path in own:
        shutil.copy(path, folder)
    for name in ("model.fp16.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin",
                 "model.gguf", "model-00001-of-00009.safetensors"):  # fmt: skip
        (folder / name).write_bytes(b"of others")
    if sharded:
        (folder / "model.safetensors").unlink()
    else:  # an index of other files, too: model.safetensors takes precedence
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00009.safetensors"}}')
    for name in "tinyllama", str(folder):
        assert checkpoint.load(name, device="cpu")[0].digest
    assert hub.asked == {"TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
    weights = {path.name for path in own if path.suffix != ".json"} if sharded else {"model.safetensors"}
    assert {name for name in hub.sent if not name.endswith((".json", ".jinja"))} == weights


@pytest.mark.parametrize("break_it, words", [
    (lambda f: change_json(f / "config.json", hidden_act="gelu"), ["config.json", "hidden_act"]),
    (lambda f: (f / "tokenizer.json").unlink(), ["no tokenizer.json", "tokenizer.model"]),
    (lambda f: change_json(f / "config.json", vocab_size=10**12), ["GB", "free"]),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ["owner/name has no model.safetensors", "pickles are not read"]),
    (lambda f: (f / "gated").touch(), ["owner/name", "Access is restricted"]),
    (partial(index, more="vision_tower.patch.weight"), ["vision_tower", "does not have"]),
])  # fmt: skip
def test_a_hub_model_is_refused_before_its_weights_are_downloaded(hub, folder, break_it, words):
    break_it(folder)
    message = refusal("owner/name")
    assert all(word in message for word in words) and not any(name.endswith("tensors") for name in hub.sent)


@pytest.mark.parametrize("named", [None, *checkpoint.TIED])  # an index may name the tensor that no part has
@pytest.mark.parametrize("kept", [["lm_head.weight"], ["model.embed_tokens.weight"], list(checkpoint.TIED)])
def test_one_of_two_tied_tensors_is_enough(folder, kept, named):
    def change(tensors):  # as `transformers` writes it from version 5 on
        embedding, _ = (tensors.pop(name) for name in checkpoint.TIED)
        tensors.update({name: embedding.clone() for name in kept})

    change_json(folder / "config.json", tie_word_embeddings=True)
    changed(change)(folder)
    if named:
        index(folder, named)
    model = checkpoint.load(str(folder), device="cpu", on_host=True)[0]  # so the weights stay
    theirs = reference_model(str(folder), torch.float32)
    assert torch.equal(model.embedding, theirs.model.embed_tokens.weight) and model.head.weight is model.embedding


# Weights ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, options", [
    ("float32", {}), ("bfloat16", dict(max_shard_size="60KB")), ("float16", dict(tie_word_embeddings=True)),
    ("float32", dict(attention_bias=True, mlp_bias=True)), ("bfloat16", dict(dtype="float64")), ("float32", dict(dtype="float16")),
], ids=["plain", "sharded", "tied", "biased", "from float64", "from float16"])  # fmt: skip
def test_each_weight_equals_its_file(dtype, options, tmp_path):
    folder = write_model(tmp_path / "model", **options)
    saved = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    model, tokenizer, end_tokens = checkpoint.load(str(folder), dtype, "cpu", on_host=True)
    loaded = checkpoint.weights(model)
    assert set(loaded) == set(saved)
    for name, tensor in loaded.items():
        assert tensor.dtype == checkpoint.DTYPES[dtype]
        assert torch.equal(tensor, saved[name].to(tensor.dtype)), name
    assert end_tokens == {1} and tokenizer.backend_tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    (request,) = baseline.Engine(model).generate([Request([70, 80, 90], 4)])
    assert len(request.new) == 4


@pytest.mark.parametrize("kept", ["model-00009-of-00009.safetensors", "model.safetensors"])
def test_the_index_names_the_file_of_a_tensor(kept, tmp_path):
    """A stale tensor of the same name, in the first part, the last one, or model.safetensors, is ignored."""
    folder = write_model(tmp_path / "model", max_shard_size="60KB")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    saved = {name: load_file(folder / part)[name] for name, part in places.items()}
    moved = places["lm_head.weight"]
    (folder / moved).rename(folder / kept)
    places = {name: kept if part == moved else part for name, part in places.items()}
    change_json(folder / "model.safetensors.index.json", weight_map=places)
    for part in set(places.values()):
        stale = {name: torch.full_like(tensor, 9.0) for name, tensor in saved.items() if places[name] != part}
        changed(lambda tensors, stale=stale: tensors.update(stale, elsewhere=torch.ones(1)), part)(folder)
    loaded = checkpoint.weights(checkpoint.load(str(folder), device="cpu", on_host=True)[0])  # so the weights stay
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())


def test_end_tokens_come_from_tokenizer_and_configs(folder):
    change_json(folder / "config.json", eos_token_id=7, dtype="bfloat16")
    change_json(folder / "generation_config.json", eos_token_id=[5, 6])
    model, _, end_tokens = checkpoint.load(str(folder), device="cpu")
    assert end_tokens == {1, 5, 6, 7} and model.dtype == torch.float32


# Random models ---------------------------------------------------------------------------------

def test_a_random_model_has_the_same_weights_each_time():
    loaded = [checkpoint.load("random:tiny", dtype, "cpu", on_host=True) for dtype in ("float32", "float32", "bfloat16")]
    (model, tokenizer, end_tokens), again, rounded = loaded
    for name, tensor in checkpoint.weights(model).items():
        assert torch.equal(tensor, checkpoint.weights(again[0])[name])
        assert torch.equal(tensor.bfloat16(), checkpoint.weights(rounded[0])[name])
        assert tensor.std() > 0 or name.endswith("norm.weight")
    assert end_tokens == {tokenizer.eos_token_id} == {1} and len(tokenizer) == model.config.vocab_size
    assert tokenizer.decode(tokenizer.encode("naïve 🙂\n")) == "naïve 🙂\n"


# A process of its own --------------------------------------------------------------------------

@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_a_missing_glibc_is_no_error(monkeypatch, error):
    monkeypatch.setattr(checkpoint.ctypes, "CDLL", Mock(side_effect=error))
    checkpoint.load("random:tiny", "float32", "cpu")


MEASURE = """
import shell.start
import gc, json, sys, torch
from pathlib import Path
from shell import checkpoint

def kilobytes(which):               # ru_maxrss would count the parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which))

checkpoint.load(sys.argv[1], "float32", "cpu")
before = kilobytes("VmHWM")
model = checkpoint.load(sys.argv[2], "bfloat16", "cpu")[0]
taken = 1024 * (kilobytes("VmHWM") - before)
imported = [name for name in ("torch._dynamo", "transformers") if name in sys.modules]
tensors = [torch.ones(7 << 20) for _ in range(3)]   # of 29 MB
before = kilobytes("VmRSS")
del tensors
given_back = before - kilobytes("VmRSS")
project = checkpoint.load("classroom", "float32", "cpu")[0].layers[0].down_proj
before = kilobytes("VmRSS")
for rows in range(5, 513):          # each a kernel of its own
    project(torch.zeros(rows, 384))
print(json.dumps([taken, imported, 1024 * given_back, 1024 * (kilobytes("VmRSS") - before), gc.isenabled()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc/self/status; only glibc keeps what is freed")
def test_loading_needs_little_memory_and_a_process_keeps_freed_memory(tiny_folder, tmp_path):
    """The model takes 100 MB in bfloat16, and its file twice that.

    `transformers` must not be imported, which would take longer than the rest of the start. Freed memory must stay in
    the process, because the next step would otherwise fault all pages in again."""
    sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    folder = write_model(tmp_path / "large", num_attention_heads=16, num_key_value_heads=16, **sizes)
    size = (folder / "model.safetensors").stat().st_size // 2
    largest = 2 * 2816 * 1024 * 4  # gate and up are one matrix
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tiny_folder), str(folder)], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, env={**environment, "OMP_NUM_THREADS": "1"})  # fmt: skip
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    slack = 48 << 20  # for the allocator and oneDNN
    taken, imported, given_back, kernels, collects = json.loads(done.stdout)
    kept = size if product_dtype(torch.bfloat16) == torch.bfloat16 else 3 * size  # the weights, and a copy in float32
    assert 0.9 * size <= taken <= kept + largest + slack, "in 16 bits a process keeps only what products read"
    assert imported == [] and given_back < 20e6 and collects
    assert kernels < 110e6, "a limited number of kernels is cached; without the limit they take 290 MB"
