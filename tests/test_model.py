"""The model against `transformers`, on folders that `transformers` wrote."""

import copy
import json
import math
from collections import namedtuple
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, load, write_model

from common.llama import Linear, attention, causal_mask
from shell import checkpoint, cli, limits
from shell.checkpoint import reference_model
from shell.config import ModelError, read_config
from shell.linear import FastLinear, blocks_of, product_dtype, speed_up
from tests.support.engines import answer, ask_and_evict, baseline, hybrid, hybrid_runner, make

FOLDERS = {
    "gqa": dict(num_key_value_heads=2),
    "one KV head": dict(num_key_value_heads=1),
    "qwen2": dict(family="qwen2"),
    "qwen3": dict(family="qwen3", head_dim=24),
    "smollm3": dict(family="smollm3", no_rope_layer_interval=2),
}


def reorders(dtype: torch.dtype) -> bool:
    """Return True if PyTorch can reorder weights of this dtype on this processor."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(30, 48, dtype=dtype), None)
    except (AttributeError, RuntimeError):
        return False
    return True


Pair = namedtuple("Pair", "ours, theirs, name")  # our model, transformers' model, and the name for --model


def make_pair(kind: str, folder: Path, dtype: str = "float32") -> Pair:
    """Load a model twice, as ours and with `transformers`.

    `kind`: a key of FOLDERS, which is first written to `folder`, or a name for --model."""
    name = str(write_model(folder, **FOLDERS[kind])) if kind in FOLDERS else kind
    reference = reference_model(name, checkpoint.DTYPES[dtype])
    reference.generation_config.eos_token_id = None  # so that no answer ends early
    return Pair(load(name, dtype).model, reference, name)


@pytest.fixture(scope="module", params=[*FOLDERS, "random:tiny", "classroom"])
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("parity"))


def random_prompt(length: int, vocabulary: int = TINY["vocab_size"]) -> list[int]:
    return torch.randint(5, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits_of(model, tokens: list[int], chunk: int):
    """Return the logits [T / chunk, V] after each chunk of the tokens."""
    cache, starts = baseline.KVCache(model, len(tokens)), range(0, len(tokens), chunk)
    return torch.stack([baseline.forward(model, cache, tokens[start : start + chunk], start) for start in starts])


@torch.inference_mode()
def reference_logits(model, tokens: list[int]):
    return model(torch.tensor([tokens])).logits[0]  # [T, V]


@torch.inference_mode()
def reference_tokens(model, prompt: list[int], count: int) -> list[int]:
    row = torch.tensor([prompt])
    options = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


# Parity ----------------------------------------------------------------------------------------

def test_logits_at_every_position_equal_those_of_transformers(pair):
    """Compare logits token by token with exact ones, computed in float64.

    A trained model's float32 logits differ from the exact ones by more than 1e-4, in `transformers` as well. Our error
    may be at most twice its error."""
    tokens = random_prompt(80, pair.ours.config.vocab_size)
    exact = reference_logits(copy.deepcopy(pair.theirs).double(), tokens)
    sides = logits_of(pair.ours, tokens, 1), reference_logits(pair.theirs, tokens)
    ours, theirs = ((logits - exact).abs().max() for logits in sides)
    assert ours <= max(1e-4, 2 * theirs)


def test_64_greedy_tokens_equal_those_of_transformers(pair):
    prompt = random_prompt(20, pair.ours.config.vocab_size)
    expected = reference_tokens(pair.theirs, prompt, 64)
    assert answer(pair.ours, prompt, 64).new == expected
    assert len(set(expected)) > 4, "an answer that repeats few tokens would prove little"


@pytest.mark.parametrize("kind, dtype", [("gqa", "bfloat16"), ("classroom", "bfloat16"), ("gqa", "float16"), ("classroom", "float16")])
def test_16_bits_stay_near_transformers(kind, dtype, tmp_path):
    pair = make_pair(kind, tmp_path, dtype)
    tokens = random_prompt(100, pair.ours.config.vocab_size)
    ours, theirs = logits_of(pair.ours, tokens, 1).float(), reference_logits(pair.theirs, tokens).float()
    exact = reference_logits(reference_model(pair.name, torch.float32), tokens)
    assert (ours - theirs).abs().max() <= 3 * (theirs - exact).abs().max()
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.8


# Linear layers on a CPU ------------------------------------------------------------------------

@pytest.mark.parametrize("intel, tiles, plain", [(True, True, False), (False, False, False), (True, False, True), (False, False, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [30, 31, 128], ids=["divided", "in one piece", "in blocks"])
@pytest.mark.parametrize("dtype, rtol, atol", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 0.1)])
@torch.inference_mode()
def test_a_fast_product_equals_the_plain_product(bias, outputs, dtype, rtol, atol, intel, tiles, plain, monkeypatch):
    """Also without a copy of the weights, where the operator is missing or has no kernel."""
    monkeypatch.setattr("shell.linear.is_intel", lambda: intel)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    if plain:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    generator, can_reorder = torch.Generator().manual_seed(0), reorders(product_dtype(dtype))
    x = torch.randn(33, 48, generator=generator).to(dtype)
    transposed = x.t().contiguous().t()
    for error in None, AttributeError("missing"), RuntimeError("no kernel"):
        linear = Linear(48, outputs, bias, dtype=dtype)
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        expected = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        with monkeypatch.context() as patch:
            if error:
                patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", Mock(side_effect=error), raising=False)
            if isinstance(error, AttributeError):  # a PyTorch without oneDNN
                patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
                patch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
            speed_up(linear, copies=True)
            assert isinstance(linear, FastLinear) and (linear.reordered is not None) == (can_reorder and error is None)
            for rows in (0, 1, 2, 3, 4, 5, 33):
                for given in (x[:rows], transposed[:rows]):
                    out = linear(given)
                    assert out.is_contiguous()
                    torch.testing.assert_close(out.double(), expected[:rows], rtol=rtol, atol=atol)


@pytest.mark.skipif(not reorders(torch.float32), reason="weights cannot be reordered here")
@pytest.mark.parametrize("tiles, same_bits, rows", [(True, False, 1), (True, True, 4), (False, False, 4)])
def test_a_single_row_is_padded_for_speed_without_tiles_and_for_its_bits(tiles, same_bits, rows, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("shell.linear.is_intel", lambda: True)
    monkeypatch.setattr("shell.linear.product", product := Mock(side_effect=lambda x, *_: x))
    speed_up(Linear(64, 64), True, same_bits)(torch.randn(1, 64))
    assert len(product.call_args.args[0]) == rows


@pytest.mark.parametrize("intel, threads, rows", [(True, 2, 1), (False, 5, 2), (False, 1, 2)])
def test_a_single_row_is_multiplied_in_the_way_that_is_fast_on_processors_of_this_maker(intel, threads, rows, monkeypatch):
    """On Intel, matrix times column takes twice as long. On AMD, blocks take 1.5 times as long, and one part twice as long as several."""
    monkeypatch.setattr("shell.linear.is_intel", lambda: intel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "bmm", bmm := Mock(wraps=torch.bmm))
    speed_up(Linear(64, 128), True)(torch.randn(1, 64))
    assert bmm.call_args.args[0].shape[1:] == (rows, 64)


@pytest.mark.skipif(not reorders(torch.float32), reason="weights cannot be reordered here")
def test_short_memory_prevents_copies_of_weights(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model")
    size = checkpoint.weight_bytes(load(folder).model)
    for free, copied in ((1.9 * size, False), (2.1 * size, True)):
        monkeypatch.setattr(limits, "free_host_memory", lambda free=free: free)
        assert (load(folder).model.head.reordered is not None) == copied


@pytest.mark.parametrize("dtype, same_bits, threads", [("float32", 0, 1), ("float32", 0, 2), ("float32", 1, 2), ("bfloat16", 0, 2), ("float16", 0, 2)])
@pytest.mark.parametrize("intel", [True, False])
def test_weights_take_memory_only_while_a_product_reads_them(intel, dtype, same_bits, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("shell.linear.is_intel", lambda: intel)
    model, *_ = checkpoint.load("random:tiny", dtype, "cpu", same_bits=same_bits)
    weight, copied = torch.randn(64, 64), reorders(torch.float32)
    in_blocks = copied and blocks_of(torch.ops.mkldnn._reorder_linear_weight(weight, None), weight) is not None
    assert in_blocks or not copied or torch.backends.cpu.get_cpu_capability() != "AVX512"
    read = not intel or (threads > 1 and not in_blocks) if dtype == "float32" else product_dtype(model.dtype) == torch.float32
    stays = read and not same_bits
    assert all(part.weight.is_meta == (not stays and part.reordered is not None) for part in model.modules() if isinstance(part, FastLinear))


def test_pinned_memory_counts_as_a_power_of_two(monkeypatch):
    monkeypatch.setattr(limits, "free_host_memory", lambda: 40.0e9)
    fitting = partial(cli.blocks_that_fit, block_bytes=1 << 20, device=torch.device("cpu"), option="--cpu-blocks")
    assert fitting(None, 1 << 20) == int(10e9) >> 20 and fitting(34_000, 1) == 34_000
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert fitting(None, 1 << 20) == 8192 and fitting(None, 5000) == 5000 and fitting(32768, 1) == 32768
    with pytest.raises(ModelError, match="35.7 GB, rounded up.*at most --cpu-blocks 32768"):
        fitting(34_000, 1)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)])
@pytest.mark.parametrize("count, end, heads", [(1, 9, 2), (5, 5, 2), (4, 9, 4), (8, 9, 2)])
def test_each_row_of_a_chunk_attends_to_earlier_rows(count, end, heads, device, dtype, tiles, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    q, k, v = (torch.randn(rows, heads, 8).to(dtype) for rows, heads in ((count, 4), (end, heads), (end, heads)))
    seen = range(end - count + 1, end + 1)
    alone = torch.cat([attention(row[None], k[:tokens], v[:tokens], None) for row, tokens in zip(q, seen)])
    mask = causal_mask(count, end, torch.device(device), dtype)
    torch.testing.assert_close(attention(q, k, v, mask), alone, atol=0.02, rtol=0.02)
    group = torch.zeros(count, end, dtype=dtype).masked_fill(torch.arange(end) >= torch.tensor(seen)[:, None], -torch.inf)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel := Mock(wraps=F.scaled_dot_product_attention))
    for same_bits in False, True:
        of_each = attention(q, *(side.expand(count, *side.shape) for side in (k, v)), group[:, None, None], same_bits)
        torch.testing.assert_close(of_each, alone, atol=0.02, rtol=0.02)
        assert kernel.call_args.args[0].shape[2] == (1 if tiles and heads == 4 and not same_bits else 4), "queries per KV head"


# The basis of restoration ----------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gqa", "qwen2", "qwen3", "smollm3"])
@torch.inference_mode()
def test_project_kv_rebuilds_the_cache_bit_by_bit(kind, dtype, tmp_path):
    model = load(write_model(tmp_path / "model", **FOLDERS[kind]), dtype).model
    inputs = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].clone()))
    tokens = random_prompt(100)
    cache = baseline.KVCache(model, len(tokens))
    baseline.forward(model, cache, tokens, 0)
    assert len(inputs) == len(model.layers)
    for index, (layer, hidden) in enumerate(zip(model.layers, inputs)):
        k, v = layer.project_kv(hidden, model.rotary(torch.arange(len(tokens))))  # [T, KVH, hd] each
        assert torch.equal(k.transpose(0, 1), cache.k[index])
        assert torch.equal(v.transpose(0, 1), cache.v[index])


@pytest.mark.parametrize("cache", ["host", "hidden", "planned", 89, 90])  # a number: chapter 08 with that number of blocks
@pytest.mark.parametrize("kind", ["qwen3", "smollm3"])
def test_restored_blocks_give_the_tokens_of_transformers(kind, cache, tmp_path):
    pair = make_pair(kind, tmp_path)
    if isinstance(cache, int):
        engine = make(None, runner=hybrid_runner(cache, model=hybrid.load(pair.name, device="cpu")[0]))
    else:
        engine = make(cache, model=pair.ours)
    prompt = random_prompt(100)
    expected = reference_tokens(pair.theirs, prompt, 20)
    first, again = (ask_and_evict(engine, prompt, 20) for _ in range(2))
    assert first.new == again.new == expected and (again.found or isinstance(cache, int))


# Configs ---------------------------------------------------------------------------------------

def raw_config(**fields) -> dict:
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
    return dict(model_type="llama", **sizes) | fields


CONFIGS = json.loads((ROOT / "tests" / "support" / "configs.json").read_text())


def published(name: str) -> dict:
    """Return the fields of a published config. If it is `like` another one, its row has only what differs."""
    own = dict(CONFIGS["published"][name])
    return (published(own.pop("like")) if "like" in own else {}) | own


SLIDING = {"Mistral 0.1": 4096, "Mistral without the key": 4096} | dict.fromkeys(
    ["Zephyr", "Qwen2, some layers slide", "llama of a Qwen"], 64)


@pytest.mark.parametrize("name", CONFIGS["published"])
def test_a_published_config_gives_the_tokens_of_transformers(name, tmp_path, capsys):
    raw = raw_config(**published(name))  # the published config with smaller sizes
    weights = json.loads(json.dumps(dict(num_key_value_heads=None) | raw | dict(initializer_range=0.15)))  # `transformers` changes it
    write_model(tmp_path, weights.pop("model_type"), **weights)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = load(tmp_path).model, reference_model(str(tmp_path), torch.float32)
    assert ours.config.max_position_embeddings == SLIDING.get(name, raw.get("max_position_embeddings", 2048))
    assert ("uses a window" in capsys.readouterr().err) == (name in SLIDING)
    prompt = random_prompt(40)
    assert answer(ours, prompt, 20).new == reference_tokens(theirs, prompt, 20)
    torch.testing.assert_close(ours.config.rotary_frequencies(), theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


REFUSED = [*CONFIGS["refused"], ("rms_norm_eps must be a positive number", dict(rms_norm_eps=math.nan))]  # JSON has no NaN


@pytest.mark.parametrize("rest", [{}, dict(max_position_embeddings=256, rms_norm_eps=1e-5)], ids=["with defaults", "complete"])
@pytest.mark.parametrize("name, fields", REFUSED, ids=[f"{number} {row[0]}" for number, row in enumerate(REFUSED)])
def test_an_unsupported_config_is_refused_by_name(name, fields, rest):
    with pytest.raises(Exception, match=name):
        read_config(raw_config(num_key_value_heads=4, **rest) | fields)
