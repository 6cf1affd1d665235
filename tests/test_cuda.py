"""Chapters 01 and 02 on a GPU."""
import argparse
import gc
from collections import OrderedDict

import pytest
import torch
from conftest import chapter, make_engine, write_model

from common import checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
baseline, paged = chapter("01_baseline"), chapter("02_paged_kv")
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


# Chapter 02 ------------------------------------------------------------------------------------------------------

def paged_engine(folder, dtype="float32", blocks: int | None = 64, **options):
    return paged.Engine(*checkpoint.load(str(folder), dtype, "cuda"), blocks, **options)


def run_all(engine):
    """Step until nobody runs or waits; then every block must be back."""
    while engine.step():
        pass
    engine.pool.check_integrity([])
    assert engine.pool.available == engine.pool.size


def mixed(context: int) -> list[dict]:
    """What is asked at once: short and long prompts, some with a common beginning, greedy, drawn, and several samples."""
    lengths = (1, 15, 16, 17, 40, 90, 100)
    asked = [dict(prompt=PROMPT[:length], max_tokens=10 + 5 * number) for number, length in enumerate(lengths)]
    asked += [dict(prompt=[7, *PROMPT[:51]], max_tokens=40, temperature=0.8, top_p=0.9, seed=5, n=4),
              dict(prompt=PROMPT[:33], max_tokens=30, n=3), dict(prompt=PROMPT[:64], max_tokens=20, cache_salt="Anna")]
    assert all(len(fields["prompt"]) + fields["max_tokens"] < context for fields in asked)
    return asked


@pytest.mark.parametrize("options", [dict(), dict(blocks=16), dict(token_budget=23), dict(blocks=70, block_size=3),
                                     dict(blocks=20, token_budget=64)], ids=str)
def test_requests_that_run_together_get_the_tokens_of_chapter_01_on_the_cpu(folder, options):
    engine, here = paged_engine(folder, **options), make_engine(folder)
    asked = mixed(engine.context)
    samples = [(fields, engine.submit(**fields)) for fields in asked]
    run_all(engine)
    for fields, requests in samples:
        fields = {name: value for name, value in fields.items() if name not in ("n", "cache_salt")}
        for number, request in enumerate(requests):
            seed = dict(seed=fields["seed"] + number) if "seed" in fields else {}
            assert request.outcome.tokens == here.generate(**{**fields, **seed}).tokens
    if options.get("blocks", 64) <= 20:
        assert engine.counts["preemptions"] > 0
    assert engine.pool.counts["copies"] > 0


def forced(engine, starts, salts=("a", "b", "c")) -> list[list[int]]:
    """PROMPT is computed by several requests at once: the first `start` tokens as a prompt, the others as if they had been
    drawn -> per request, the likeliest token after PROMPT[:start], PROMPT[:start + 1], ..."""
    said, draw = {salt: [] for salt in salts}, engine.draw

    def force(request, logits, likeliest):
        said[request.cache_salt].append(likeliest)
        draw(request, logits, PROMPT[len(request.tokens) % len(PROMPT)])
    engine.draw = force
    for start, salt in zip(starts, salts, strict=True):
        engine.submit(PROMPT[:start], max_tokens=len(PROMPT) - start + 1, cache_salt=salt)
    run_all(engine)
    del engine.draw
    return list(said.values())


@pytest.mark.parametrize("alone", [0, None], ids=["read alone", "read together"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_agrees_with_chapter_01_on_the_same_device(folder, dtype, alone, monkeypatch, record_property):
    if alone is not None:
        monkeypatch.setattr(paged.PagedBatch, "READ_ALONE", dict(cpu=alone, cuda=alone))
    theirs = logits_of(make_engine(folder, dtype, "cuda"), PROMPT).argmax(-1).tolist()      # after 50, 51, ..., 100 tokens
    starts = (50, 61, 83)
    same, total = 0, 0
    for start, ours in zip(starts, forced(paged_engine(folder, dtype), starts), strict=True):
        assert len(ours) == len(PROMPT) - start + 1
        same += sum(a == b for a, b in zip(ours, theirs[start - 50:], strict=True))
        total += len(ours)
    record_property("token_agreement", same / total)
    print(f"{dtype}: token agreement with chapter 01 {same / total:.0%}")
    assert same / total >= 0.8


@pytest.mark.parametrize("alone", [0, None], ids=["read alone", "read together"])
def test_scattered_blocks_give_what_adjacent_ones_give(folder, alone, monkeypatch):
    if alone is not None:
        monkeypatch.setattr(paged.PagedBatch, "READ_ALONE", dict(cpu=alone, cuda=alone))

    def answers(scatter: bool):
        engine, logits, tables = paged_engine(folder, blocks=128), [], []
        if scatter:                # every other block belongs to somebody else, and the rest is free in a strange order
            pool = engine.pool
            other = [block for block in pool.allocate(128) if block % 2]
            pool.release([block for block in range(128) if block % 2 == 0])
            pool.free = OrderedDict.fromkeys(sorted(pool.free, key=lambda block: block * 37 % 128))
        forward = engine.forward

        def watched(batch):
            tables.extend(list(request.table) for request in engine.running)
            logits.append(forward(batch).float().cpu())
            return logits[-1].to(batch.tokens.device)
        engine.forward = watched
        requests = [engine.submit(PROMPT[:length], max_tokens=24, cache_salt=str(length))[0] for length in (20, 50, 70, 99)]
        while engine.step():
            pass
        engine.pool.check_integrity([other] if scatter else [])
        adjacent = [b == a + 1 for table in tables for a, b in zip(table, table[1:])]
        assert adjacent and (not any(adjacent) if scatter else sum(adjacent) > len(adjacent) / 2)
        return [request.outcome.tokens for request in requests], logits
    (tokens, logits), (scattered_tokens, scattered_logits) = answers(False), answers(True)
    assert scattered_tokens == tokens
    assert max((a - b).abs().max() for a, b in zip(logits, scattered_logits, strict=True)) <= 1e-3


def allocated(what: str) -> int:
    return torch.cuda.memory_stats()[f"{what}.all.current"]


def test_the_pool_is_one_allocation_of_the_printed_size(tiny_folder, capsys):
    loaded = checkpoint.load(str(tiny_folder), "bfloat16", "cuda")
    gc.collect()
    before = allocated("allocation"), allocated("requested_bytes")
    engine = paged.make_engine(*loaded, argparse.Namespace(gpu_blocks=2000, block_size=16, token_budget=512, max_running=64))
    size = 2000 * 16 * engine.model.config.kv_numbers_per_token * 2
    assert (allocated("allocation"), allocated("requested_bytes")) == (before[0] + 1, before[1] + size)
    assert engine.pool.kv.nbytes == size
    assert capsys.readouterr().err == f"KV pool: 2000 blocks of 16 tokens, 32000 tokens, {size / 1e6:.1f} MB\n"


def test_the_default_pool_takes_most_of_a_gpu_and_leaves_the_rest_free(tiny_folder):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    engine = paged_engine(tiny_folder, "bfloat16", blocks=None, block_size=1 << 13, max_running=1 << 20)     # more than any has
    assert 0.7 * before <= engine.pool.kv.nbytes <= 0.8 * before
    assert engine.submit(PROMPT, max_tokens=20)
    run_all(engine)
    assert torch.cuda.mem_get_info()[0] >= 0.1 * before
    with pytest.raises(checkpoint.ModelError, match="are free; choose at most --gpu-blocks"):
        paged.pool_size(engine.model, engine.pool.size, 1 << 13, 64)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= 0.9 * before


def test_a_small_models_default_pool_takes_no_more_than_can_be_used(tiny_folder):
    engine = paged_engine(tiny_folder, "bfloat16", blocks=None, max_running=5)
    assert engine.pool.size == 5 * engine.context // 16


def test_memory_is_constant_over_many_requests(tiny_folder):
    engine = paged_engine(tiny_folder, "bfloat16", blocks=40, max_running=8)

    def a_round(number: int):
        for fields in mixed(engine.context):
            engine.submit(**{"cache_salt": str(number), **fields})
        run_all(engine)
        gc.collect()
        return torch.cuda.memory_allocated()
    where, before = engine.pool.kv.data_ptr(), a_round(0)           # workspaces of the libraries come with the first
    torch.cuda.reset_peak_memory_stats()
    assert {a_round(number) for number in range(1, 8)} == {before}
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20       # activations, and padded copies of short contexts
    assert engine.pool.kv.data_ptr() == where and engine.counts["finished"] == 8 * 15
    assert engine.pool.counts["evictions"] > 0
