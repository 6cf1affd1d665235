"""Chapters 06 to 08, and what they stand on, on a GPU."""
import argparse
import gc
import time
import types
from collections import OrderedDict
from contextlib import ExitStack

import pytest
import torch

from common import checkpoint
from legacy import backends, bidirectional, figure, live
from legacy import link as links
from legacy.link import CudaTransfer, Link, TransferError
from legacy.tests.conftest import chapter, make_engine, write_model
from legacy.tests.test_live import NAMES, WAYS, make
from legacy.timeline import Clock

baseline, paged, offload, tiered, hybrid = (chapter(name) for name in (
    "01_baseline", "02_paged_kv", "03_cpu_offload", "07_tiered_storage", "08_hybrid_blocks"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")
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


# Chapter 03 ------------------------------------------------------------------------------------------------------

LONG = 1_000_000_000               # cycles of torch.cuda._sleep: about half a second, and all that is copied here takes less


def offload_engine(folder, dtype="float32", blocks: int = 64, cpu_blocks: int = 256, **options):
    """Chapter 03's engine. A model as small as these is computed sooner than loaded; here it is loaded all the same."""
    engine = offload.Engine(*checkpoint.load(str(folder), dtype, "cuda"), blocks, cpu_blocks=cpu_blocks, **options)
    engine.seconds_to_load = lambda *_, **__: 1e-9
    return engine


def run_offload(engine):
    """Step until nobody runs or waits and nothing is on its way; then every block of both tiers must be back."""
    while engine.step():
        engine.check_integrity()
    engine.flush()
    engine.check_integrity()
    assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size


def ask(engine, prompt=PROMPT, **fields):
    """One request with nobody else around -> the request, answered."""
    request, = engine.submit(prompt, **{"max_tokens": 12, **fields})
    run_offload(engine)
    if isinstance(request.outcome, Exception):
        raise request.outcome
    return request


def come_back(engine, prompt=PROMPT, **fields):
    """Ask, lose everything on the device, and ask again -> both requests; the second comes from the host."""
    first = ask(engine, prompt, **fields)
    offload.empty(engine)
    with torch.inference_mode():
        engine.pool.kv.zero_()
    torch.cuda.synchronize()
    again = ask(engine, prompt, **fields)
    assert again.source == "cpu_hit" and again.cached_tokens == (len(prompt) - 1) // 16 * 16
    return first, again


def prefixes(engine, request) -> list:
    """Of the full blocks of the request's prompt that are looked up."""
    return [engine.prefix(request, index) for index in range((request.answer.prompt_tokens - 1) // engine.pool.block_size)]


def device_bits(engine, request):
    """Keys and values of a prompt's full blocks on the device, as bytes on the host."""
    blocks = [engine.pool.find(prefix) for prefix in prefixes(engine, request)]
    return engine.pool.kv[:, :, blocks].cpu().view(torch.uint8)             # [L, 2, count, block_size, KVH, bytes]


def host_bits(engine, request):
    """The same of what the host holds, in the same order."""
    blocks = [engine.host.find(prefix) for prefix in prefixes(engine, request)]
    return engine.host.kv[blocks].permute(1, 2, 0, 3, 4, 5).contiguous().view(torch.uint8)


@pytest.fixture
def warm():
    """What is launched for the first time may wait for the whole device, and so hide a race."""
    torch.cuda._sleep(1000)
    link, pair = Link("load", Clock("cuda")), (torch.zeros(8, device="cuda"), torch.zeros(8).pin_memory())
    for dst, src in (pair, pair[::-1]):
        link.copy(dst, src, "warm").join()
    torch.cuda.synchronize()


@pytest.mark.parametrize("overlap", [True, False])
def test_what_comes_back_from_the_host_gives_the_tokens_of_chapter_01_on_the_cpu(folder, overlap):
    engine, here = offload_engine(folder, overlap=overlap), make_engine(folder)
    for fields in (dict(), dict(temperature=0.8, top_p=0.9, seed=5)):
        expected = here.generate(PROMPT, max_tokens=12, **fields).tokens
        for request in come_back(engine, **fields, cache_salt=str(fields)):
            assert request.outcome.tokens == expected
    follow_up = [*PROMPT, *expected, *range(60, 90)]
    offload.empty(engine)
    request = ask(engine, follow_up, cache_salt=str(fields))
    assert request.source == "cpu_hit" and request.cached_tokens >= len(PROMPT) // 16 * 16
    assert request.outcome.tokens == here.generate(follow_up, max_tokens=12).tokens
    assert engine.counts["transfer_errors"] == 0


@pytest.mark.parametrize("options", [dict(blocks=16), dict(blocks=16, cpu_blocks=20), dict(blocks=20, token_budget=64),
                                     dict(blocks=70, block_size=3, cpu_blocks=70)], ids=str)
def test_many_over_two_small_tiers_get_the_tokens_of_chapter_01_on_the_cpu(folder, options):
    engine, here = offload_engine(folder, **options), make_engine(folder)
    for _ in range(3):
        asked = mixed(engine.context)
        samples = [(fields, engine.submit(**fields)) for fields in asked]
        run_offload(engine)
        for fields, requests in samples:
            fields = {name: value for name, value in fields.items() if name not in ("n", "cache_salt")}
            for number, request in enumerate(requests):
                seed = dict(seed=fields["seed"] + number) if "seed" in fields else {}
                assert request.outcome.tokens == here.generate(**{**fields, **seed}).tokens
    assert engine.counts["swap_outs"] > 0 < engine.counts["swap_ins"] and engine.counts["transfer_errors"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_comes_back_is_bit_equal(folder, dtype):
    engine = offload_engine(folder, dtype)
    first = ask(engine)
    before = device_bits(engine, first)
    assert torch.equal(host_bits(engine, first), before)
    offload.empty(engine)
    with torch.inference_mode():
        engine.pool.kv.zero_()
    torch.cuda.synchronize()
    again = ask(engine)
    assert again.source == "cpu_hit" and torch.equal(device_bits(engine, again), before) and before.any()
    assert again.outcome.tokens == first.outcome.tokens


def test_the_host_pool_is_pinned(tiny_folder, capsys):
    engine = offload_engine(tiny_folder)
    assert engine.host.kv.is_pinned() and engine.host.kv.device.type == "cpu"
    assert "pinned" not in capsys.readouterr().err


def test_without_pinned_memory_it_warns_and_is_right(tiny_folder, monkeypatch, capsys):
    empty = torch.empty

    def refuse(*arguments, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return empty(*arguments, **options)
    monkeypatch.setattr(torch, "empty", refuse)
    engine = offload_engine(tiny_folder)
    warning, = (line for line in capsys.readouterr().err.splitlines() if "pinned" in line)
    assert "cannot be pinned (CUDA error: out of memory)" in warning and not engine.host.kv.is_pinned()
    expected = make_engine(tiny_folder).generate(PROMPT, max_tokens=12).tokens
    assert [request.outcome.tokens for request in come_back(engine)] == [expected] * 2


@pytest.mark.parametrize("guarded", [True, False])
def test_a_load_overwrites_nothing_that_queued_compute_still_reads(warm, monkeypatch, guarded):
    link, device, seen = Link("load", Clock("cuda")), torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    host = torch.full((1 << 20,), 2.0).pin_memory()
    seen.copy_(device)                                             # once without the race
    torch.cuda.synchronize()
    if not guarded:
        monkeypatch.setattr(link, "wait_for_compute", lambda: None)
    torch.cuda._sleep(LONG)
    seen.copy_(device)                                              # queued; it must read what was there when it was queued
    link.copy(device, host, "layer 0").join()
    torch.cuda.synchronize()
    assert bool((device == 2).all())
    assert bool((seen == (1 if guarded else 2)).all()), "the guard makes no difference" if not guarded else "overwritten"


@pytest.mark.parametrize("guarded", [True, False])
def test_a_swap_in_waits_for_what_is_queued_to_compute(warm, folder, monkeypatch, guarded):
    """Something that was queued before still writes to the blocks that are to be restored."""
    engine = offload_engine(folder)
    before = device_bits(engine, come_back(engine)[1])
    offload.empty(engine)
    swap_in = engine.swap_in

    def late(request, blocks):
        torch.cuda._sleep(LONG)
        for index, _ in blocks:                                     # one by one: a list of indices would stop the host
            engine.pool.kv[:, :, request.table[index]].zero_()
        return swap_in(request, blocks)
    engine.pool.kv[:, :, 0].zero_()                                 # which nobody holds: the kernel is loaded
    torch.cuda.synchronize()
    monkeypatch.setattr(engine, "swap_in", late)
    if not guarded:
        monkeypatch.setattr(engine.load_link, "wait_for_compute", lambda: None)
    request = ask(engine)
    assert request.source == "cpu_hit" and torch.equal(device_bits(engine, request), before) is guarded


@pytest.mark.parametrize("referenced", [True, False])
def test_a_block_is_not_reused_before_its_copy_out_is_done(warm, folder, monkeypatch, referenced):
    """The copy out begins late, and another request wants all blocks at once."""
    engine, other, whole = offload_engine(folder, blocks=7), list(range(150, 250)), []
    ask(engine, other, max_tokens=4, offload_after=False)           # all kernels are loaded, and their memory is there
    ask(engine, [9, *PROMPT[1:]], max_tokens=4)
    offload.empty(engine)
    swap_out = engine.swap_out

    def late(blocks, *options, **named_options):
        whole.append(engine.pool.kv[:, :, [block for block, _ in blocks]].cpu())
        with torch.cuda.stream(engine.save_link.stream):
            torch.cuda._sleep(LONG)
        known = list(engine.swaps)
        more = swap_out(blocks, *options, **named_options)
        for swap in engine.swaps:
            if not referenced and swap not in known:
                device_blocks, swap.device_blocks = swap.device_blocks, []
                engine.pool.release(device_blocks)
        return more
    monkeypatch.setattr(engine, "swap_out", late)
    first, = engine.submit(PROMPT, max_tokens=4)
    second, = engine.submit(other, max_tokens=4, cache_salt="b", offload_after=False)
    run_offload(engine)
    assert first.source == second.source == "miss" and engine.counts["transfer_errors"] == 0
    before = whole[0][:, :, :len(prefixes(engine, first))].view(torch.uint8)
    assert torch.equal(host_bits(engine, first), before) is referenced


def test_waiting_for_a_transfer_does_not_stop_the_host(warm):
    link, device = Link("load", Clock("cuda")), torch.zeros(1 << 16, device="cuda")
    host, seen = torch.ones(1 << 16).pin_memory(), torch.zeros(1 << 16, device="cuda")
    seen.copy_(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(link.stream):
        torch.cuda._sleep(LONG)
    transfer = link.copy(device, host, "layer 0")
    transfer.wait()
    seen.copy_(device)                                              # queued behind the transfer, which is still to come
    assert isinstance(transfer, CudaTransfer) and not transfer.ready and link.backlog() == transfer.bytes == 1 << 18
    transfer.join()
    assert transfer.ready and link.backlog() == 0
    torch.cuda.synchronize()
    assert bool((seen == 1).all())


def test_without_the_wait_compute_reads_too_early(warm):
    """The damage that `wait` prevents."""
    link, device = Link("load", Clock("cuda")), torch.zeros(1 << 16, device="cuda")
    host, seen = torch.ones(1 << 16).pin_memory(), torch.ones(1 << 16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(link.stream):
        torch.cuda._sleep(LONG)
    transfer = link.copy(device, host, "layer 0")
    seen.copy_(device)
    transfer.join()
    torch.cuda.synchronize()
    assert bool((seen == 0).all()) and bool((device == 1).all())


def test_transfers_run_beside_compute_and_beside_each_other(warm):
    clock = Clock("cuda")
    load, save = Link("load", clock), Link("save", clock)
    device, host = torch.zeros(1 << 26, device="cuda"), torch.zeros(1 << 26).pin_memory()           # 256 MiB: milliseconds
    back, there = torch.zeros_like(device), torch.zeros_like(host).pin_memory()
    torch.cuda.synchronize()
    transfers = [load.copy(device, host, "in"), save.copy(there, back, "out")]
    began = clock.mark()
    torch.cuda._sleep(LONG)
    ended = clock.mark()
    spans = [(clock.seconds(began), clock.seconds(ended)), *(transfer.span() for transfer in transfers)]
    for start, end in spans:
        assert all(start < other_end and other_start < end for other_start, other_end in spans), spans
    assert transfers[0].ready and transfers[0].span()[1] < clock.seconds(ended)


def test_a_lane_is_first_in_first_out_on_a_gpu(warm):
    link, device = Link("load", Clock("cuda")), torch.zeros(4, 1 << 20, device="cuda")
    host = torch.arange(1.0, 5.0)[:, None].expand(4, 1 << 20).contiguous().pin_memory()
    transfers = [link.copy(device[0], host[number], str(number)) for number in range(4)]
    transfers[-1].join()
    assert all(transfer.ready for transfer in transfers) and bool((device[0] == 4).all())
    spans = [transfer.span() for transfer in transfers]
    assert all(end <= start + 1e-5 for (_, end), (start, _) in zip(spans, spans[1:]))
    assert all(start < end for start, end in spans)


def test_a_copy_that_cannot_be_issued_is_a_transfer_error_and_the_lane_goes_on(warm, monkeypatch):
    link, device, host = Link("load", Clock("cuda")), torch.zeros(8, device="cuda"), torch.ones(8).pin_memory()
    with monkeypatch.context() as patch:
        def fail(*_, **__):
            raise RuntimeError("CUDA error: invalid argument")
        patch.setattr(links, "pieces", fail)
        transfer = link.copy(device, host, "layer 3")
    transfer.join()
    with pytest.raises(TransferError, match="layer 3.*invalid argument"):
        transfer.wait()
    link.copy(device, host, "layer 4").wait()
    assert bool((device == 1).all())


@pytest.mark.parametrize("lane", ["load", "save"])
def test_the_link_is_real_and_measured(lane):
    link = Link(lane, Clock("cuda"))
    assert not link.modelled and not link.speeds
    assert link.speed() > 1e8 and link.backlog() == 0 and link.speeds
    words = str(link)
    assert words.startswith("link, ") and words.endswith(" GB/s") and "modelled" not in words
    assert float(words.split()[1]) == pytest.approx(link.speed() / 1e9, abs=0.06)


def test_a_speed_cannot_be_asked_for_where_the_link_is_real(tiny_folder):
    model = checkpoint.load(str(tiny_folder), "float32", "cuda")[0]
    assert links.bandwidth(model) is None and links.bandwidth(model, "auto", "l20") is None
    with pytest.raises(checkpoint.ModelError, match="--link"):
        links.bandwidth(model, 0.5)


def test_the_clock_gives_increasing_seconds_of_the_hosts_clock(warm):
    clock, last = Clock("cuda"), 0.0
    clock.REBASE = 0.01                                             # a new base with nearly every mark
    for _ in range(20):
        before = time.perf_counter()
        mark = clock.mark()
        torch.cuda._sleep(20_000_000)                               # about 10 ms
        seconds = clock.seconds(mark)
        assert seconds > last and before - 0.1 <= seconds <= time.perf_counter() + 0.1
        last = seconds
    early, late = clock.mark(), clock.mark()
    torch.cuda._sleep(20_000_000)
    base = clock.mark()
    clock.seconds(base)
    assert clock.base is base, "the next two lie before the base"
    assert last < clock.seconds(early) <= clock.seconds(late) < clock.seconds(base)


def test_the_timeline_of_a_return_shows_layers_that_arrive_and_blocks_that_leave(folder):
    engine = offload_engine(folder)
    first, again = come_back(engine)
    layers = len(engine.model.layers)
    load = [span for span in again.timeline.spans if span.lane == "load"]
    save = [span for span in first.timeline.spans if span.lane == "save"]
    assert [span.label for span in load] == [f"layer {number}" for number in range(layers)]
    assert not [span for span in first.timeline.spans if span.lane == "load"]
    assert len(save) == engine.counts["swap_outs"] > 0 and all(span.label.startswith("block ") for span in save)
    for span in (*load, *save):
        assert -0.1 < span.start < span.end
    assert all(a.start <= b.start and a.end <= b.end for a, b in zip(load, load[1:]))
    result = again.outcome
    assert result.source == "cpu_hit" and result.choice["chosen"] == "load" and result.link.startswith("link, ")
    assert "modelled" not in result.summary() and again.timeline.chart()


def test_memory_is_constant_over_many_swaps(tiny_folder):
    engine = offload_engine(tiny_folder, "bfloat16", blocks=20, cpu_blocks=40, max_running=8)

    def a_round(number: int):
        for fields in mixed(engine.context):
            engine.submit(**{"cache_salt": str(number % 2), **fields})
        run_offload(engine)
        gc.collect()
        return torch.cuda.memory_allocated()
    where, before = (engine.pool.kv.data_ptr(), engine.host.kv.data_ptr()), a_round(0)
    assert {a_round(number) for number in range(1, 8)} == {before}
    assert (engine.pool.kv.data_ptr(), engine.host.kv.data_ptr()) == where
    assert engine.counts["finished"] == 8 * 15 and engine.counts["swap_ins"] > 0 < engine.host.counts["evictions"]


# What chapters 06 to 08 share ------------------------------------------------------------------------------------

STORY = list(range(40, 240))       # twelve chunks of 16 tokens, and eight tokens


def difference(a, b) -> float:
    """The largest, as a share of the largest number."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def delayed(engine, lane: str):
    """What is queued on this lane from now on begins late."""
    with torch.cuda.stream(getattr(engine, f"{lane}_link").stream):
        torch.cuda._sleep(LONG)


# Chapter 06 ------------------------------------------------------------------------------------------------------


# Chapter 07 ------------------------------------------------------------------------------------------------------

PAGES = (len(STORY) - 1) // 16     # whole pages of STORY, without its last token


def tiered_engine(folder, dtype="float32", blocks: int = 64, cpu_blocks: int = 64, directory=None, **options):
    """Chapter 07's engine, with files for storage where there is a directory. A model as small as these is computed sooner than
    loaded; here it is loaded all the same, and storage is waited for."""
    engine = tiered.Engine(*checkpoint.load(str(folder), dtype, "cuda"), blocks, cpu_blocks=cpu_blocks, **{
        "prefetch_policy": "wait_complete", "prefetch_threshold": 16, **options})
    engine.seconds_to_load, engine.seconds_to_compute = lambda *_, **__: 1e-9, lambda *_: 1e3
    if directory:
        engine.attach(backends.open_backend(f"file:{directory}"), "files")
    return engine


def run_tiered(engine):
    """Step until nobody runs or waits and nothing is on its way; then every page of both tiers must be back."""
    while engine.step():
        engine.check_integrity()
    engine.flush()
    engine.check_integrity()
    assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size
    assert not (engine.swaps or engine.prefetches or engine.writes)


def ask_tiered(engine, prompt=STORY, **fields):
    """One request with nobody else around -> the request, answered."""
    request, = engine.submit(prompt, **{"max_tokens": 12, **fields})
    run_tiered(engine)
    if isinstance(request.outcome, Exception):
        raise request.outcome
    return request


def leave_only(engine, tier: str):
    """What is cached lies in host memory ("cpu") or in storage ("storage") only, and elsewhere there is nothing but zeros."""
    offload.empty(engine)
    pools = [engine.pool.kv]
    if tier == "storage":
        with engine.stepping:
            while engine.host.cached:
                engine.host.evict()
        pools.append(engine.host.kv)
    with torch.inference_mode():
        for kv in pools:
            kv.zero_()
    torch.cuda.synchronize()


def come_back_tiered(engine, tier: str, prompt=STORY, **fields):
    """Ask, lose all but one tier, and ask again -> both requests."""
    first = ask_tiered(engine, prompt, **fields)
    leave_only(engine, tier)
    again = ask_tiered(engine, prompt, **fields)
    assert again.source == f"{tier}_hit" and again.cached_tokens == (len(prompt) - 1) // 16 * 16
    return first, again


def device_pages(engine, salt: str = "") -> list[int]:
    """Where the whole pages of STORY lie on the device."""
    path = engine.tree.match(salt, tiered.as_bytes(STORY[:16 * PAGES]))
    return [page for node in path for page in node.device]


def bits_of(engine, salt: str = ""):
    """Keys and values of STORY's pages on the device, as bytes on the host -> [L, 2, PAGES, 16, KVH, bytes]."""
    pages = device_pages(engine, salt)
    assert len(pages) == PAGES
    return engine.pool.kv[:, :, pages].cpu().view(torch.uint8)


@pytest.mark.parametrize("tier", ["cpu", "storage"])
@pytest.mark.parametrize("layout", tiered.LAYOUTS)
def test_what_comes_back_from_any_tier_gives_the_tokens_of_chapter_01_on_the_cpu(folder, tmp_path, layout, tier):
    engine, here = tiered_engine(folder, layout=layout, directory=tmp_path), make_engine(folder)
    for fields in (dict(), dict(temperature=0.8, top_p=0.9, seed=5)):
        expected = here.generate(STORY, max_tokens=12, **fields).tokens
        for request in come_back_tiered(engine, tier, **fields, cache_salt=str(fields)):
            assert request.outcome.tokens == expected
    counts = engine.counters()
    assert counts["transfer_errors"] == counts["storage_errors"] == counts["storage_pages_refused"] == 0
    engine.release()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", tiered.LAYOUTS)
def test_what_comes_back_from_any_tier_is_bit_equal(folder, tmp_path, layout, dtype):
    engine = tiered_engine(folder, dtype, layout=layout, directory=tmp_path)
    first = ask_tiered(engine)
    before = bits_of(engine)
    for tier in ("cpu", "storage"):
        leave_only(engine, tier)
        again = ask_tiered(engine)
        assert again.source == f"{tier}_hit" and torch.equal(bits_of(engine), before) and before.any()
        assert again.outcome.tokens == first.outcome.tokens
    engine.release()


@pytest.mark.parametrize("policy", tiered.WRITE_POLICIES)
@pytest.mark.parametrize("options", [dict(blocks=16), dict(blocks=16, cpu_blocks=20), dict(blocks=20, token_budget=64),
                                     dict(blocks=70, block_size=3, cpu_blocks=90), dict(blocks=40, cpu_blocks=12)], ids=str)
def test_many_over_three_tiers_get_the_tokens_of_chapter_01_on_the_cpu(folder, tmp_path, policy, options):
    engine, here = tiered_engine(folder, directory=tmp_path, write_policy=policy, **options), make_engine(folder)
    for _ in range(3):
        samples = [(fields, engine.submit(**fields)) for fields in mixed(engine.context)]
        run_tiered(engine)
        for fields, requests in samples:
            fields = {name: value for name, value in fields.items() if name not in ("n", "cache_salt")}
            for number, request in enumerate(requests):
                seed = dict(seed=fields["seed"] + number) if "seed" in fields else {}
                assert request.outcome.tokens == here.generate(**{**fields, **seed}).tokens
    counts = engine.counters()
    assert counts["transfer_errors"] == counts["storage_errors"] == 0 < counts["swap_outs"]
    engine.release()


@pytest.mark.parametrize("layout", tiered.LAYOUTS)
def test_the_host_pool_of_every_layout_is_pinned(tiny_folder, layout, capsys):
    engine = tiered_engine(tiny_folder, layout=layout)
    assert engine.host.kv.is_pinned() and engine.host.kv.device.type == "cpu" and "pinned" not in capsys.readouterr().err


@pytest.mark.parametrize("layout", tiered.LAYOUTS)
def test_without_pinned_memory_for_pages_it_warns_and_is_right(tiny_folder, tmp_path, monkeypatch, capsys, layout):
    empty = torch.empty

    def refuse(*arguments, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return empty(*arguments, **options)
    monkeypatch.setattr(torch, "empty", refuse)
    engine = tiered_engine(tiny_folder, layout=layout, directory=tmp_path)
    warning, = (line for line in capsys.readouterr().err.splitlines() if "pinned" in line)
    assert "The host pool cannot be pinned (CUDA error: out of memory)" in warning and not engine.host.kv.is_pinned()
    expected = make_engine(tiny_folder).generate(STORY, max_tokens=12).tokens
    assert [request.outcome.tokens for request in come_back_tiered(engine, "storage")] == [expected] * 2
    engine.release()


@pytest.mark.parametrize("tier", ["cpu", "storage"])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_page_does_not_land_where_what_is_queued_still_works(warm, tiny_folder, tmp_path, monkeypatch, guarded, tier):
    """Something that was queued before still writes to the pages that are to be restored."""
    engine = tiered_engine(tiny_folder, directory=tmp_path)
    come_back_tiered(engine, tier)                                  # all kernels are loaded, and their memory is there
    before = bits_of(engine)
    leave_only(engine, tier)
    swap_in = engine.swap_in

    def late(request, nodes, end):
        torch.cuda._sleep(LONG)
        for page in request.table[request.saved:end]:               # one by one: a list of indices would stop the host
            engine.pool.kv[:, :, page].zero_()
        return swap_in(request, nodes, end)
    monkeypatch.setattr(engine, "swap_in", late)
    if not guarded:
        monkeypatch.setattr(engine.load_link, "wait_for_compute", lambda: None)
    request = ask_tiered(engine)
    torch.cuda.synchronize()
    assert request.source == f"{tier}_hit" and engine.counts["transfer_errors"] == 0
    assert torch.equal(bits_of(engine), before) is guarded, "overwritten" if guarded else "the guard makes no difference"
    engine.release()


@pytest.mark.parametrize("referenced", [True, False])
def test_a_page_is_not_reused_before_its_copy_out_is_done(warm, tiny_folder, monkeypatch, referenced):
    """The copies out begin late, and another request wants all pages at once."""
    engine, other = tiered_engine(tiny_folder, blocks=PAGES + 2), STORY[::-1]
    ask_tiered(engine, other, max_tokens=4, cache_salt="warm")
    ask_tiered(engine, max_tokens=4, cache_salt="warm")
    before = bits_of(engine, "warm")
    offload.empty(engine)
    back_up = engine.back_up

    def late(node, *options, **named_options):
        delayed(engine, "save")
        known = list(engine.swaps)
        sent = back_up(node, *options, **named_options)
        for swap in engine.swaps:
            if not referenced and swap not in known:                # it lets go of its pages at once
                engine.pool.release(swap.device_path + swap.device_blocks)
                swap.device_path, swap.device_blocks = [], []
        return sent
    monkeypatch.setattr(engine, "back_up", late)
    first, = engine.submit(STORY, max_tokens=4)
    while first.outcome is None:
        engine.step()
    assert engine.swaps and not any(swap.ready for swap in engine.swaps), "the answer waited for what is saved"
    second, = engine.submit(other, max_tokens=1)
    while engine.step():
        pass
    engine.flush()
    monkeypatch.setattr(engine, "back_up", back_up)
    assert second.outcome.tokens == make_engine(tiny_folder).generate(other, max_tokens=1).tokens
    path = engine.tree.match("", tiered.as_bytes(STORY[:16 * PAGES]))
    places = [place for node in path for place in node.host or ()]
    saved = engine.host.kv[places].permute(1, 2, 0, 3, 4, 5).contiguous().view(torch.uint8)
    assert len(places) == PAGES and torch.equal(saved, before) is referenced


@pytest.mark.parametrize("guarded", [True, False])
def test_no_page_is_stored_before_it_has_left_the_device(warm, tiny_folder, tmp_path, monkeypatch, guarded):
    """The copy to host memory begins late; it is zeros that lie there before. Their checksum would be right."""
    engine = tiered_engine(tiny_folder, directory=tmp_path)
    ask_tiered(engine, cache_salt="warm")
    before = bits_of(engine, "warm")
    leave_only(engine, "storage")
    back_up = engine.back_up

    def late(*arguments, **options):
        delayed(engine, "save")
        return back_up(*arguments, **options)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "back_up", late)
        if not guarded:
            patch.setattr(tiered.Swap, "ready", property(lambda self: True))
            patch.setattr(tiered.Swap, "failed", property(lambda self: False))
            patch.setattr(CudaTransfer, "join", lambda self: None)
            patch.setattr(CudaTransfer, "span", lambda self: (0.0, 0.0))
        request, = engine.submit(STORY, max_tokens=4)
        while engine.step():
            pass
        engine.flush()
        torch.cuda.synchronize()
    assert request.outcome.tokens and engine.counters()["storage_pages_written"] >= 2 * PAGES
    leave_only(engine, "storage")
    again = ask_tiered(engine, max_tokens=4)
    assert again.source == "storage_hit" and engine.counters()["storage_pages_refused"] == 0
    assert torch.equal(bits_of(engine), before) is guarded
    engine.release()


@pytest.mark.parametrize("held", [True, False])
def test_a_place_in_host_memory_is_not_filled_while_it_is_still_to_be_copied(warm, tiny_folder, monkeypatch, held):
    """The copies in begin late, and there is no other place: who wants one for another page meanwhile must get none."""
    engine = tiered_engine(tiny_folder, cpu_blocks=PAGES + 1)
    come_back_tiered(engine, "cpu", max_tokens=2)
    before = bits_of(engine)
    leave_only(engine, "cpu")
    load, taken = engine.load, []

    def late(swap):
        delayed(engine, "load")
        sent = load(swap)
        if not held:
            engine.host.release(swap.host_blocks)
        places = engine.take_host(PAGES, 1)
        taken.extend(places)
        with torch.inference_mode():
            for place in places:
                engine.host.kv[place].fill_(7.0)                    # what a prefetch would do
        if not held:
            for place in swap.host_blocks:
                engine.host.share(place)
        return sent
    monkeypatch.setattr(engine, "load", late)
    request, = engine.submit(STORY, max_tokens=2)
    while engine.step():
        pass
    engine.flush()
    torch.cuda.synchronize()
    assert request.source == "cpu_hit" and (len(taken) <= 1) is held
    assert torch.equal(bits_of(engine), before) is held


@pytest.mark.parametrize("waits", [True, False])
def test_without_the_wait_tokens_attend_to_a_page_that_has_not_arrived(warm, tiny_folder, tmp_path, monkeypatch, waits):
    engine = tiered_engine(tiny_folder, directory=tmp_path)
    come_back_tiered(engine, "cpu")
    after = bits_of(engine)
    leave_only(engine, "cpu")
    load, seen, layers = engine.load, [], len(engine.model.layers)

    def late(swap):
        delayed(engine, "load")
        return load(swap)
    tap = engine.tap

    def look(index, *arguments):
        tap(index, *arguments)
        if len(seen) < layers:
            seen.append(engine.pool.kv[index].clone())              # queued: what this layer reads
    monkeypatch.setattr(engine, "load", late)
    monkeypatch.setattr(engine, "tap", look)
    if not waits:
        monkeypatch.setattr(CudaTransfer, "wait", lambda self: None)
    request = ask_tiered(engine)
    pages = device_pages(engine)
    read = torch.stack([kv[:, pages] for kv in seen]).cpu().view(torch.uint8)
    assert request.source == "cpu_hit" and len(seen) == layers
    assert torch.equal(read, after) is waits
    engine.release()


def test_who_leaves_does_not_free_what_is_still_on_its_way_to_the_device(warm, tiny_folder, monkeypatch):
    engine = tiered_engine(tiny_folder)
    come_back_tiered(engine, "cpu")
    leave_only(engine, "cpu")
    other, = engine.submit([9, *PROMPT[1:]], max_tokens=100)        # who makes steps meanwhile
    while other.computed < len(PROMPT):
        assert engine.step()
    load = engine.load

    def late(swap):
        delayed(engine, "load")
        return load(swap)
    monkeypatch.setattr(engine, "load", late)
    request, = engine.submit(STORY, max_tokens=4)
    while not (arriving := [swap for swap in engine.swaps if swap.inward]):
        assert engine.step()
    swap, = arriving
    engine.cancel(request)
    assert engine.step()
    held = [pool.references[place] for pool, places in ((engine.pool, swap.device_blocks), (engine.host, swap.host_blocks))
            for place in places]
    assert not swap.ready, "it was not late"
    assert held == [1] * (2 * PAGES), "of the swap itself"
    run_tiered(engine)
    assert engine.counts["cancelled"] == 1 and other.outcome is not None
    assert ask_tiered(engine).source == "gpu_hit", "what came for who left is kept"


def test_pages_go_on_to_the_device_while_the_rest_is_read(tiny_folder, tmp_path):
    """Storage gives 20 Mbit/s: of the pages that have come, some are on the device before the last has been read."""
    engine = tiered_engine(tiny_folder, directory=tmp_path)
    ask_tiered(engine)
    before = bits_of(engine)
    engine.detach()
    engine.attach(backends.open_backend(f"file:{tmp_path}"), "slow files", bidirectional.Bandwidth((20.0,)))
    leave_only(engine, "storage")
    load, happened = engine.load, []

    def note(swap):
        happened.append(engine.storage.counts["storage_pages_read"])
        return load(swap)
    engine.load = note
    request = ask_tiered(engine)
    assert request.source == "storage_hit" and torch.equal(bits_of(engine), before)
    assert len(happened) > 2 and happened[0] < happened[-1] == PAGES
    result = request.outcome
    assert result.link.startswith("link, ") and "modelled" not in result.summary() and result.prefetch["ended"] == "complete"
    engine.release()


@pytest.mark.parametrize("layout", tiered.LAYOUTS)
def test_memory_is_constant_over_many_trips_through_three_tiers(tiny_folder, tmp_path, layout):
    engine = tiered_engine(tiny_folder, "bfloat16", blocks=20, cpu_blocks=30, max_running=8, layout=layout, directory=tmp_path)

    def a_round(number: int):
        for fields in mixed(engine.context):
            engine.submit(**{"cache_salt": str(number % 2), **fields})
        run_tiered(engine)
        gc.collect()
        return torch.cuda.memory_allocated()
    where, before = (engine.pool.kv.data_ptr(), engine.host.kv.data_ptr()), a_round(0)
    assert {a_round(number) for number in range(1, 8)} == {before}
    assert (engine.pool.kv.data_ptr(), engine.host.kv.data_ptr()) == where
    assert engine.counts["finished"] == 8 * 15 and engine.counters()["storage_pages_read"] > 0
    engine.release()


# Chapter 08 ------------------------------------------------------------------------------------------------------

SHORT = LONG // 5                  # cycles: a tenth of a second
MIXED = hybrid.Costs(load_weights=10.0, forward=1.0, attend=0.1, rebuild=3.0, load_act=1.0, load_kv=2.0)    # all kinds of blocks


def hybrid_engine(folder, dtype="float32", device_blocks: int | None = None, host_blocks: int | None = None, **options):
    """Chapter 08's engine, where asked for with room for so many ACT blocks on the device, and so many blocks in the host."""
    loaded = checkpoint.load(str(folder), dtype, "cuda", on_host=True)
    options = {"max_running": 16, "mini_batch": 1024, "token_budget": 2048, "costs": MIXED, **options, "device": "cuda"}
    engine = hybrid.Engine(*loaded, **options)
    if device_blocks is not None:
        options["device_memory"] = engine.device_bytes + device_blocks * engine.act_bytes
    if host_blocks is not None:
        options["host_memory"] = engine.model.host_bytes + host_blocks * max(engine.act_bytes, engine.kv_bytes)
    return engine if device_blocks is host_blocks is None else hybrid.Engine(*loaded, **options)


def run_hybrid(engine):
    """Step until nobody runs or waits; then every block must be back."""
    while engine.step():
        engine.pool.check_integrity([request.table for request in engine.running])
    run_all(engine)


def ask_hybrid(engine, prompt=STORY, **fields):
    """One request with nobody else around -> the request, answered."""
    request, = engine.submit(prompt, **{"max_tokens": 12, **fields})
    run_hybrid(engine)
    if isinstance(request.outcome, Exception):
        raise request.outcome
    return request


def passes(engine, salt: str, **fields) -> torch.Tensor:
    """Logits of all forward passes of one request that finds nothing cached -> [passes, V]."""
    seen, forward = [], engine.forward

    def watch(step):
        seen.append(forward(step))
        return seen[-1]
    engine.forward = watch
    try:
        ask_hybrid(engine, cache_salt=salt, **{"max_tokens": 4, **fields})
    finally:
        engine.forward = forward
    return torch.cat(seen).float().cpu()


def host_states(engine, request) -> torch.Tensor:
    """What the host keeps of a prompt's full blocks, as bytes -> [L, blocks, ...]."""
    torch.cuda.synchronize()
    pool, states = engine.pool, []
    for index in range((request.answer.prompt_tokens - 1) // pool.block_size):
        kind, place, number = pool.entry(pool.find(engine.prefix(request, index)))
        slots = slice(number * pool.block_size, (number + 1) * pool.block_size)
        assert place == "host"
        states.append(pool.act_host[:, slots] if kind == "act" else pool.kv[:, :, slots])
    return torch.stack([state.flatten(1) for state in states], 1).view(torch.uint8)


@pytest.fixture
def mha(tmp_path):
    return write_model(tmp_path / "mha", num_key_value_heads=4)


@pytest.mark.parametrize("resident", [0, 1, 3])
@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_every_policy_gives_the_tokens_of_chapter_01_on_the_same_device(folder, policy, resident):
    engine = hybrid_engine(folder, policy=policy, device_blocks=3, resident_layers=resident)
    alone = make_engine(folder, device="cuda")
    assert engine.pool.allocation.act_device == (0 if policy == "kv-only" or engine.pool.allocation.act_host == 0 else 3)
    for fields in (dict(), dict(temperature=0.8, seed=5)):
        expected = alone.generate(STORY, max_tokens=12, **fields).tokens
        for source in ("miss", None):                               # and again, with what is cached
            request = ask_hybrid(engine, **fields, cache_salt=str(fields))
            assert request.outcome.tokens == expected and (source is None or request.source == source)
    assert engine.counts["transfer_errors"] == 0


@pytest.mark.parametrize("options", [
    dict(mini_batch=256), dict(token_budget=40, resident_layers=1), dict(block_size=3, device_blocks=9),
    dict(device_blocks=20, host_blocks=17, mini_batch=300, token_budget=100)], ids=str)
@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_many_in_mini_batches_get_the_tokens_of_chapter_01_on_the_cpu(folder, policy, options):
    engine, here = hybrid_engine(folder, policy=policy, **{"device_blocks": 5, **options}), make_engine(folder)
    samples = [(fields, engine.submit(**fields)) for fields in mixed(engine.context)]
    run_hybrid(engine)
    for fields, requests in samples:
        fields = {name: value for name, value in fields.items() if name not in ("n", "cache_salt")}
        for number, request in enumerate(requests):
            seed = dict(seed=fields["seed"] + number) if "seed" in fields else {}
            assert request.outcome.tokens == here.generate(**{**fields, **seed}).tokens
    assert engine.counts["transfer_errors"] == 0 < engine.counts["weights_bytes"]


@pytest.mark.parametrize("policy", hybrid.POLICIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_of_every_policy_agrees_with_chapter_01_on_the_same_device(folder, dtype, policy, record_property):
    theirs = logits_of(make_engine(folder, dtype, "cuda"), PROMPT).argmax(-1).tolist()
    starts, same, total = (50, 61, 83), 0, 0
    for start, ours in zip(starts, forced(hybrid_engine(folder, dtype, policy=policy, device_blocks=3), starts), strict=True):
        same += sum(a == b for a, b in zip(ours, theirs[start - 50:], strict=True))
        total += len(ours)
    record_property("token_agreement", same / total)
    print(f"{dtype}, {policy}: token agreement with chapter 01 {same / total:.0%}")
    assert same / total >= 0.8


def test_the_model_stays_in_pinned_host_memory(mha, capsys):
    engine = hybrid_engine(mha, "auto", policy="static", device_blocks=2, resident_layers=1)
    model, pool = engine.on_host, engine.pool
    assert model.device.type == "cpu" and model.dtype == torch.bfloat16, "the dtype is the device's"
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    for layer in model.layers:
        assert layer.piece.is_pinned()
        assert {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()} == {
            layer.piece.untyped_storage().data_ptr()}
    assert pool.kv.is_pinned() and pool.act_host.is_pinned() and pool.act_device.is_cuda
    assert all(tensor.is_cuda for tensor in (*engine.model.pieces, engine.model.embedding, engine.model.rotary.table))
    assert all(parameter.is_cuda for layer in engine.model.resident.values() for parameter in layer.parameters())
    assert "pinned" not in capsys.readouterr().err


def test_without_pinned_memory_for_weights_and_blocks_it_warns_and_is_right(mha, monkeypatch, capsys):
    empty = torch.empty

    def refuse(*arguments, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nand more lines")
        return empty(*arguments, **options)
    monkeypatch.setattr(torch, "empty", refuse)
    engine = hybrid_engine(mha, policy="static")
    warnings = [line.split(" cannot")[0] for line in capsys.readouterr().err.splitlines() if "pinned" in line]
    assert warnings == ["Layer 0", "Layer 1", "Layer 2", "The ACT pool", "The KV pool"]
    assert ask_hybrid(engine).outcome.tokens == make_engine(mha).generate(STORY, max_tokens=12).tokens


# What alone is on the load lane: weights, KV blocks or ACT blocks
ALONE = {"weights": dict(policy="act-only", device_blocks=60), "kv": dict(policy="kv-only", device_blocks=0, resident_layers=3),
         "act": dict(policy="act-only", device_blocks=0, resident_layers=3)}


def late_copies(engine, monkeypatch, lane: str, label: str):
    """What is copied under this label begins a tenth of a second late."""
    link = getattr(engine, f"{lane}_link")
    copy = link.copy

    def late(dst, src, name):
        if name == label:
            with torch.cuda.stream(link.stream):
                torch.cuda._sleep(SHORT)
        return copy(dst, src, name)
    monkeypatch.setattr(link, "copy", late)


def early_copies(engine, monkeypatch, lane: str, label: str):
    """What is copied under this label waits for nothing that is computed from now on."""
    link, early = getattr(engine, f"{lane}_link"), engine.clock.mark()
    copy = link.copy
    monkeypatch.setattr(link, "copy", lambda dst, src, name: copy(dst, src, name, early if name == label else None))


def late_layers(engine, monkeypatch):
    """What is computed in a layer begins a tenth of a second late, from its first part on."""
    rebuild_all = engine.rebuild_all

    def late(*arguments):
        torch.cuda._sleep(SHORT)
        rebuild_all(*arguments)
    monkeypatch.setattr(engine, "rebuild_all", late)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("label", ALONE)
def test_without_the_wait_a_layer_computes_with_what_has_not_arrived(warm, mha, monkeypatch, label, waits):
    engine, wait = hybrid_engine(mha, **ALONE[label]), CudaTransfer.wait
    before = passes(engine, "warm")
    late_copies(engine, monkeypatch, "load", label)
    if not waits:
        monkeypatch.setattr(CudaTransfer, "wait", lambda self: None if self.label == label else wait(self))
    after = passes(engine, "again")
    assert len(after) == len(before) == 4 and engine.counts["transfer_errors"] == 0
    assert (difference(after, before) < 1e-4) is waits, "too early" if waits else "the wait makes no difference"


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("label", ALONE)
def test_nothing_lands_where_a_layer_is_still_to_compute(warm, mha, monkeypatch, label, guarded):
    """There are two places, and the layer before the one that computes is late."""
    engine = hybrid_engine(mha, **ALONE[label])
    before = passes(engine, "warm")
    late_layers(engine, monkeypatch)
    if not guarded:
        early_copies(engine, monkeypatch, "load", label)
    after = passes(engine, "again")
    assert len(after) == len(before) == 4 and engine.counts["transfer_errors"] == 0
    assert (difference(after, before) < 1e-4) is guarded, "overwritten" if guarded else "the guard makes no difference"


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("label", ["kv", "act"])
def test_states_leave_when_they_are_computed_and_not_before(warm, mha, monkeypatch, label, guarded):
    engine = hybrid_engine(mha, **ALONE[label])
    before = host_states(engine, ask_hybrid(engine, cache_salt="warm", max_tokens=1))
    late_layers(engine, monkeypatch)
    if not guarded:
        early_copies(engine, monkeypatch, "save", f"store {label}")
    after = host_states(engine, ask_hybrid(engine, cache_salt="again", max_tokens=1))
    assert before.any() and torch.equal(after, before) is guarded, "too early" if guarded else "the guard makes no difference"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("label", ["kv", "act"])
def test_no_layer_is_staged_where_another_is_still_to_leave(warm, mha, monkeypatch, label, waits):
    """There are two staging buffers, and the copies out are late."""
    engine, wait = hybrid_engine(mha, **ALONE[label]), CudaTransfer.wait
    before = host_states(engine, ask_hybrid(engine, cache_salt="warm", max_tokens=1))
    late_copies(engine, monkeypatch, "save", f"store {label}")
    if not waits:
        monkeypatch.setattr(CudaTransfer, "wait", lambda self: None if self.label.startswith("store") else wait(self))
    after = host_states(engine, ask_hybrid(engine, cache_salt="again", max_tokens=1))
    assert before.any() and torch.equal(after, before) is waits, "overwritten" if waits else "the wait makes no difference"


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("label", ["kv", "act"])
def test_what_a_step_stored_is_there_before_the_next_one_loads_it(warm, mha, monkeypatch, label, settles):
    """The copies out are late; it is zeros that lie there before."""
    engine = hybrid_engine(mha, **ALONE[label])
    engine.pool.kv.zero_()
    engine.pool.act_host.zero_()
    before = passes(engine, "warm")
    late_copies(engine, monkeypatch, "save", f"store {label}")
    if not settles:
        monkeypatch.setattr(engine, "settle", lambda *_: None)
    after = passes(engine, "again")
    assert len(after) == len(before) == 4
    assert (difference(after, before) < 1e-4) is settles, "too early" if settles else "to settle makes no difference"


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_no_layer_stops_the_host(warm, mha, monkeypatch, policy, stops):
    """PyTorch raises where the host would wait for the device, from the first layer to the last."""
    engine = hybrid_engine(mha, policy=policy, device_blocks=3, mini_batch=256)
    model, rebuild_all = engine.model, engine.rebuild_all
    before = [ask_hybrid(engine, prompt, cache_salt="warm").outcome.tokens for prompt in (STORY, STORY[::-1])]
    begin, logits = model.begin, model.logits

    def strictly(index):
        torch.cuda.set_sync_debug_mode("error")
        return begin(index)

    def leniently(states):
        torch.cuda.set_sync_debug_mode("default")
        return logits(states)

    def stop(index, layer, arrival):
        rebuild_all(index, layer, arrival)
        if stops and index == 1:
            engine.hidden.sum().item()
    monkeypatch.setattr(model, "begin", strictly)
    monkeypatch.setattr(model, "logits", leniently)
    monkeypatch.setattr(engine, "rebuild_all", stop)
    try:
        samples = [engine.submit(prompt, max_tokens=12, cache_salt="again")[0] for prompt in (STORY, STORY[::-1])]
        run_hybrid(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if stops:
        assert all(isinstance(sample.outcome, RuntimeError) and "synchroniz" in str(sample.outcome) for sample in samples)
    else:
        assert [sample.outcome.tokens for sample in samples] == before


def test_all_layers_are_queued_before_the_weights_of_the_second_arrive(warm, mha, monkeypatch):
    engine = hybrid_engine(mha, policy="kv-only")
    before = passes(engine, "warm", max_tokens=1)
    copy, logits, transfers, ready = engine.load_link.copy, engine.model.logits, [], []

    def late(*what):
        if not transfers:
            delayed(engine, "load")
        transfers.append(copy(*what))
        return transfers[-1]

    def look(states):
        ready.extend(transfer.ready for transfer in transfers)
        return logits(states)
    monkeypatch.setattr(engine.load_link, "copy", late)
    monkeypatch.setattr(engine.model, "logits", look)
    after = passes(engine, "again", max_tokens=1)
    assert ready == [False] * 3, "the host waited"
    assert difference(after, before) < 1e-4


def test_both_lanes_are_busy_at_once(warm, mha, monkeypatch):
    """A layer computes for 200 ms here, and each of the 30 pieces at most that it needs is copied for 5 ms: most of each copy
    lies within what computes."""
    engine = hybrid_engine(mha, policy="static", device_blocks=2, host_blocks=18)
    compute_rows, pieces = engine.compute_rows, links.pieces

    def both(salt):                                                     # one alone would have ACT blocks only
        for prompt in (STORY, STORY[::-1]):
            engine.submit(prompt, max_tokens=3, cache_salt=salt)
        run_hybrid(engine)
    both("warm")

    def late(*arguments):
        torch.cuda._sleep(2 * SHORT)
        compute_rows(*arguments)

    def slow(*arguments, **options):
        torch.cuda._sleep(SHORT // 20)                                  # on the lane
        yield from pieces(*arguments, **options)
    monkeypatch.setattr(engine, "compute_rows", late)
    monkeypatch.setattr(links, "pieces", slow)
    both("again")
    records = list(engine.records)[-3:]
    spans = [span for span in engine.timeline.spans if span.start >= records[0].start]
    compute = [span for span in spans if span.lane == "compute"]
    arriving = {label: [span for span in spans if span.label == label] for label in ("weights", "kv", "act")}
    assert all(arriving.values()) and len([span for span in compute if span.label == "forward"]) >= 9
    for span in (*arriving["weights"], *arriving["kv"], *arriving["act"]):
        beside = sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in compute)
        assert beside >= 0.5 * (span.end - span.start) > 0, span
    assert {span.lane for span in spans} == {"compute", "load", "save"} and engine.timeline.chart(bubbles=True)


@pytest.mark.parametrize("policy", hybrid.POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_more_device_memory_is_taken_than_was_allowed(tmp_path, dtype, policy):
    folder = write_model(tmp_path / "model", hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
                         num_key_value_heads=8, max_position_embeddings=1024)
    options = dict(policy=policy, device_blocks=20, costs=None, mini_batch=2048, token_budget=1024)

    def answer(engine):
        for number in range(16):
            engine.submit([7 + number, *STORY * 4][:100 + 50 * number], max_tokens=20)
        run_hybrid(engine)
        return engine.memory[0], engine.tensor_bytes + engine.pool.act_device.nbytes
    answer(hybrid_engine(folder, dtype, **options))                     # workspaces of the libraries come with the first
    loaded = checkpoint.load(str(folder), dtype, "cuda", on_host=True)
    gc.collect()
    limit = hybrid_engine(folder, dtype, **options).memory[0]
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    del options["device_blocks"]
    engine = hybrid.Engine(*loaded, device="cuda", max_running=16, **options, device_memory=limit)
    _, kept = answer(engine)
    peak = torch.cuda.max_memory_allocated() - before
    assert kept <= peak <= limit


def test_a_limit_below_what_weights_and_buffers_take_is_refused(mha):
    least = hybrid_engine(mha).device_bytes
    with pytest.raises(checkpoint.ModelError, match="larger --device-memory"):
        hybrid_engine(mha, device_memory=least - 1)
    assert hybrid_engine(mha, device_memory=least).allocation.act_device == 0


@pytest.mark.parametrize("lane,label", [("load", "weights"), ("load", "kv"), ("load", "act"), ("save", "store kv"),
                                        ("save", "store act")])
def test_a_copy_that_cannot_be_issued_costs_a_step(mha, monkeypatch, lane, label):
    engine = hybrid_engine(mha, policy="static", device_blocks=2, host_blocks=18)
    prompts, link, failed = (STORY, STORY[::-1]), getattr(engine, f"{lane}_link"), []
    issue = link.issue

    def fail(*_, **__):
        failed.append(True)
        raise RuntimeError("CUDA error: invalid argument")

    def once(transfer, *after):
        with monkeypatch.context() as patch:
            if transfer.label == label and not failed:
                patch.setattr(links, "pieces", fail)
            issue(transfer, *after)
    monkeypatch.setattr(link, "issue", once)
    samples = [engine.submit(prompt, max_tokens=12)[0] for prompt in prompts]
    run_hybrid(engine)
    alone = make_engine(mha)
    assert failed and engine.counts["transfer_errors"] == 1
    assert [sample.outcome.tokens for sample in samples] == [alone.generate(prompt, max_tokens=12).tokens for prompt in prompts]


def test_the_demo_of_chapter_08_is_verified_over_a_real_link(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hybrid, "REQUESTS", 8)
    folder = write_model(tmp_path / "model", max_position_embeddings=1024, num_key_value_heads=4)
    engine = hybrid_engine(folder, device_blocks=20)
    report, charts = hybrid.demo(engine, argparse.Namespace(max_tokens=16, mini_batch=4096))
    said = capsys.readouterr().out
    assert report["verified"] is True and said.startswith("verified: all 512 tokens ") and "modelled" not in said
    assert report["link"]["modelled"] is False and report["link"]["gbps"] > 0.1
    assert [row["policy"] for row in report["rows"]] == list(hybrid.POLICIES) and len(charts) == 4
    assert all(0 <= row[lane] <= 1 for row in report["rows"] for lane in ("compute_busy", "link_busy"))
    whole = hybrid.whole_model(engine)
    assert whole.device.type == "cuda" and all(parameter.is_cuda for parameter in whole.parameters())


def test_a_links_speed_cannot_be_asked_for_where_the_model_is_on_the_host_of_a_gpu(mha):
    model = checkpoint.load(str(mha), "float32", "cuda", on_host=True)[0]
    assert links.bandwidth(model, device=torch.device("cuda")) is None
    with pytest.raises(checkpoint.ModelError, match="--link"):
        links.bandwidth(model, 0.5, device=torch.device("cuda"))


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_memory_is_constant_over_many_steps_of_mini_batches(mha, policy):
    engine = hybrid_engine(mha, "bfloat16", policy=policy, device_blocks=5, host_blocks=40, max_running=8, mini_batch=256)

    def a_round(number: int):
        for fields in mixed(engine.context):
            engine.submit(**{"cache_salt": str(number % 2), **fields})
        run_hybrid(engine)
        gc.collect()
        return torch.cuda.memory_allocated()
    where, before = (engine.pool.act_device.data_ptr(), engine.pool.kv.data_ptr()), a_round(0)
    assert {a_round(number) for number in range(1, 8)} == {before}
    assert (engine.pool.act_device.data_ptr(), engine.pool.kv.data_ptr()) == where
    assert engine.counts["finished"] == 8 * 15


# 9. What the page shows ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", list(NAMES))
def test_the_page_sees_an_engine_on_a_gpu(number, tmp_path):
    folder = write_model(tmp_path / "model")
    parts = checkpoint.load(str(folder), "float32", "cuda", reorder=False, on_host=number == "08")
    model = types.SimpleNamespace(**dict(zip(("model", "tokenizer", "end_tokens"), parts)))
    engine = make(number, model, tmp_path / "kept", **(dict(device=torch.device("cuda")) if number == "08" else {}))
    expected = make_engine(folder, device="cuda").generate(PROMPT, max_tokens=4)
    assert [engine.generate(PROMPT, max_tokens=4).tokens for _ in range(2)] == [expected.tokens] * 2
    for tier in engine.tiers():
        assert sum(count for _, count, _ in tier.as_json()["runs"]) == len(tier.states)
    for result, request in engine.over:
        assert figure.of(result.timeline, "", lambda request=request: engine.drawn(request)).endswith("</svg>\n")
        assert "idle" in live.in_words(result)
    with ExitStack() as stack:
        *_, table = live.compare(engine, PROMPT, 4, stack)
    assert len(table["rows"]) == len(WAYS[number]) and all(row["equal"] for row in table["rows"])
    engine.close()
    engine.release()
