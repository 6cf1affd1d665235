"""Chapter 01 on a GPU."""
import pytest
import torch
from conftest import chapter, make_engine, write_model

from common import checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
baseline = chapter("01_baseline")
PROMPT = list(range(40, 140))
FOLDERS = {"mha": dict(num_key_value_heads=4), "gqa": dict(num_key_value_heads=2), "one KV head": dict(num_key_value_heads=1),
           "qwen2": dict(family="qwen2"), "tied": dict(tie_word_embeddings=True)}


@pytest.fixture(autouse=True)
def exact_float32():
    """No TF32: float32 means float32 here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    return write_model(tmp_path / "model", **FOLDERS[request.param])


def logits_of(engine, tokens: list[int]):
    """Logits [T, V] after every token: half of them by prefill one by one, so that decode is compared too."""
    model = engine.model
    cache = baseline.KVCache(model.config, len(tokens), model.dtype, model.device)
    first = engine.forward(cache, tokens[:50], 0)
    return torch.stack([first, *(engine.forward(cache, [token], 50 + n) for n, token in enumerate(tokens[50:]))]).float().cpu()


def test_float32_gives_the_tokens_of_the_cpu(folder):
    there, here = make_engine(folder, device="cuda"), make_engine(folder)
    assert there.model.device.type == "cuda"
    assert (logits_of(there, PROMPT) - logits_of(here, PROMPT)).abs().max() <= 1e-3
    for options in (dict(), dict(temperature=0.8, top_p=0.9, seed=5)):
        assert there.generate(PROMPT, max_tokens=64, **options).tokens == here.generate(PROMPT, max_tokens=64, **options).tokens


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_gives_the_same_tokens(folder, chunk):
    whole, chunked = make_engine(folder, device="cuda"), make_engine(folder, device="cuda", prefill_chunk=chunk)
    assert chunked.generate(PROMPT, max_tokens=32).tokens == whole.generate(PROMPT, max_tokens=32).tokens


def test_life_without_a_cache_gives_the_same_tokens(folder):
    bare, cached = make_engine(folder, device="cuda", kv_cache=False), make_engine(folder, device="cuda")
    assert bare.generate(PROMPT, max_tokens=16).tokens == cached.generate(PROMPT, max_tokens=16).tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_stays_near_the_cpu(folder, dtype, record_property):
    there, here = logits_of(make_engine(folder, dtype, "cuda"), PROMPT), logits_of(make_engine(folder, dtype), PROMPT)
    exact = logits_of(make_engine(folder), PROMPT)
    error, rounding = (there - here).abs().max().item(), (here - exact).abs().max().item()
    agreement = (there.argmax(-1) == here.argmax(-1)).float().mean().item()
    record_property("largest_error", error)
    record_property("token_agreement", agreement)
    print(f"{dtype}: largest error {error:.4f} (rounding on the CPU {rounding:.4f}), token agreement {agreement:.0%}")
    assert error <= 4 * rounding
    assert agreement >= 0.8


def test_auto_is_the_gpu_and_16_bit(tiny_folder):
    model = checkpoint.load(str(tiny_folder))[0]
    assert model.device.type == "cuda" and model.dtype == torch.bfloat16
    assert model.layers[0].q_proj.reordered is None


def test_project_kv_rebuilds_the_cache_bit_by_bit(folder):
    engine = make_engine(folder, "bfloat16", "cuda")
    model, inputs = engine.model, []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].clone()))
    cache = baseline.KVCache(model.config, len(PROMPT), model.dtype, model.device)
    engine.forward(cache, PROMPT, 0)
    with torch.inference_mode():
        for index, (layer, hidden) in enumerate(zip(model.layers, inputs, strict=True)):
            k, v = layer.project_kv(hidden, torch.arange(len(PROMPT), device=model.device))        # [T, KVH, hd] each
            assert torch.equal(k.transpose(0, 1), cache.k[index]) and torch.equal(v.transpose(0, 1), cache.v[index])


def test_a_request_gives_its_memory_back(tiny_folder):
    engine = make_engine(tiny_folder, "bfloat16", "cuda")
    model, config = engine.model, engine.model.config
    engine.generate(PROMPT, max_tokens=8)                          # workspaces of the libraries come with the first
    before = torch.cuda.memory_allocated()
    assert before >= sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    engine.generate(PROMPT, max_tokens=100)
    peak, cache = torch.cuda.max_memory_allocated(), 200 * config.kv_numbers_per_token * model.dtype.itemsize
    assert cache <= peak - before <= cache + (64 << 20)            # the slack is activations and workspaces
    assert torch.cuda.memory_allocated() == before


def test_a_model_too_large_for_the_device_is_refused(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 2000))
    with pytest.raises(checkpoint.ModelError, match="GB are free"):
        checkpoint.load(str(tiny_folder), device="cuda")
