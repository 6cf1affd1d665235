"""Chapter 06's engine: chunks that are loaded from the back while others are computed from the front, with the tokens and the
keys and values of chapter 01 as the yardstick."""
import argparse
import gc
import math
import os
import random
import threading
import time
import weakref
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from common.checkpoint import ModelError
from legacy import link as links
from legacy.app import BadRequest, HungUp
from legacy.tests.conftest import chapter, make_engine, write_model
from legacy.tests.test_offload import HeldLink, Parcel
from legacy.tests.test_paged import NAN, NEW, Crowd, happened, ids, until

baseline, paged, offload, cake = (chapter(name) for name in (
    "01_baseline", "02_paged_kv", "03_cpu_offload", "06_bidirectional"))
Bandwidth, Restoration = cake.Bandwidth, cake.Restoration
MODES = ("both", "compute", "load")
PROMPT = ids(1, 200)               # twelve chunks of 16 tokens, and eight tokens
OTHER = ids(3, 5)                  # who decodes while somebody else is restored
FAMILIES = {
    "multi-head": dict(num_key_value_heads=4),
    "grouped": {},
    "biases": dict(family="qwen2"),
    "scaled": dict(rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                        high_freq_factor=4.0, original_max_position_embeddings=64)),
}
answers = {}                       # of chapter 01


@pytest.fixture
def right(tiny_engine):
    """right(prompt, max_tokens=8, ...) -> the tokens of chapter 01, computed once."""
    def tokens(prompt, max_tokens=8, base=tiny_engine, **sampling):
        key = base.model, tuple(prompt), max_tokens, tuple(sampling.items())
        if key not in answers:
            alone = baseline.Engine(base.model, base.tokenizer, base.end_tokens)
            answers[key] = alone.generate(prompt=list(prompt), max_tokens=max_tokens, **sampling).tokens
        return answers[key]
    return tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family, dtype) -> chapter 01's engine on such a model."""
    folders, engines = {}, {}

    def engine(family, dtype="float32"):
        if family not in folders:
            folders[family] = write_model(tmp_path_factory.mktemp("models") / "it", **FAMILIES[family])
        if (family, dtype) not in engines:
            engines[family, dtype] = make_engine(folders[family], dtype, reorder=False)
        return engines[family, dtype]
    return engine


def difference(a, b) -> float:
    assert a.shape == b.shape
    worst = float((a.float() - b.float()).abs().max())
    return float("inf") if worst != worst else worst


def device_kv(engine, tokens):
    """[L, 2, T, KVH, hd] of the full blocks of these tokens, all of which are on the device."""
    chain, size = [], engine.pool.block_size
    prefixes = [engine.prefixes.nth(index, chain, "", tokens, size) for index in range(len(tokens) // size)]
    return engine.pool.kv[:, :, [engine.pool.find(prefix) for prefix in prefixes]].flatten(2, 3).clone()


@torch.inference_mode()
def true_kv(base, tokens):
    """[L, 2, T, KVH, hd]"""
    cache = baseline.KVCache(base.model.config, len(tokens), base.model.dtype, base.model.device)
    base.forward(cache, tokens, 0)
    return torch.stack((cache.k, cache.v), 1).transpose(2, 3)


# A link and a storage that do what the test says ------------------------------------------------------------------

class Piece(Parcel):
    """It may be waited for by several threads."""

    def arrive(self):
        with self.link.lock:
            super().arrive()


class Lane(HeldLink):
    """A held link that threads may share. A transfer arrives when somebody waits for it, unless it `sticks`."""

    def __init__(self, lane, clock, bytes_per_second):
        super().__init__(lane, clock, bytes_per_second)
        self.lock, self.sent, self.doomed, self.pieces = threading.RLock(), [], (), []           # doomed: labels

    def copy(self, dst, src, label, after=None):
        with self.lock:
            if self.refuses is True or self.refuses == label:
                raise RuntimeError("injected")
            assert [piece.shape for piece in dst] == [piece.shape for piece in src]
            parcel = Piece(self, label, list(dst), list(src))
            parcel.doomed = label in self.doomed
            self.parcels = [*self.under_way(), parcel]
            self.sent.append(label)
            self.pieces += dst
            if not self.held:
                parcel.arrive()
            return parcel

    def seconds(self, size):
        return size / self.bytes_per_second


class CountingLink(links.Link):
    """The modelled link; it remembers what it was given."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent, self.pieces = [], []

    def copy(self, dst, src, label, after=None):
        self.sent.append(label)
        self.pieces += dst
        return super().copy(dst, src, label, after)


class Storage:
    """What the loader sees of the files; the test may do something at each of its steps."""

    def __init__(self, files):
        self.files, self.at = files, lambda step, chunk: None                  # steps: find, open, piece, checked

    def __getattr__(self, name):
        return getattr(self.files, name)

    def find(self, prefix, index):
        self.at("find", index)
        return self.files.find(prefix, index)

    def read_one(self, stored, part, into, progress, pieces):
        self.at("open", stored)

        def slower(size):
            self.at("piece", stored)
            return progress(size)
        whole = self.files.read_one(stored, part, into, slower, pieces)
        self.at("checked", stored)
        return whole


class Hangs:
    """Whoever gets to this step of the storage stays there, until released."""

    def __init__(self, engine, step: str = "find"):
        self.step, self.released, self.inside, self.on = step, threading.Event(), 0, True
        engine.loader.files.at = self

    def __call__(self, step, _):
        if step == self.step and self.on:
            self.inside += 1
            self.released.wait(60)


def build(base, link=Lane, **options):
    """An engine over two links of this kind. Memory that nobody wrote holds NaN."""
    options = {"blocks": 64, "block_size": 4, "chunk": 16, "bytes_per_second": 1e9, **options}
    with mock.patch.object(cake, "Link", link):
        engine = cake.Engine(base.model, base.tokenizer, base.end_tokens, **options)
    engine.loader.files = Storage(engine.files)
    for memory in (engine.pool.kv, engine.loader.buffers.memory, engine.writer.buffers.memory):
        memory.fill_(NAN)
    return engine


def end(engine):
    if isinstance(engine.loader.files.at, Hangs):
        engine.loader.files.at.released.set()
    engine.loader.files.at = lambda step, chunk: None
    for link in (engine.load_link, engine.save_link):
        link.held = False
        if isinstance(link, Lane):
            link.arrive()
    engine.close()
    engine.loader.close()
    engine.writer.close()


@pytest.fixture
def make(tiny_engine):
    """make(link, chunk=..., ...) -> an engine on the tiny model; its threads end with the test."""
    engines = []

    def engine(*arguments, base=tiny_engine, **options):
        engines.append(build(base, *arguments, **options))
        return engines[-1]
    yield engine
    for engine in engines:
        end(engine)


def steps(engine, count: int = 3000, more=lambda: None) -> int:
    """So many steps, or all that there are; a run that does not end fails."""
    for number in range(count):
        left = engine.step()
        engine.check_integrity()
        more()
        if not left:
            return number
    assert count < 3000, "there is always more to do"
    return count


def nothing_is_lost(engine):
    """Nobody runs and everything has arrived: all memory was given back."""
    engine.flush(30)
    at, readers = engine.loader.files.at, engine.loader.readers + engine.loader.retired
    hang = 0
    if isinstance(at, Hangs) and not at.released.is_set():
        hang = at.inside
    until(lambda: sum(reader.chunk is not None for reader in readers) == hang)
    engine.settle()
    engine.check_integrity()
    counters = engine.counters()
    assert counters["blocks_referenced"] == counters["chunks_leaving"] == 0
    assert counters["write_buffers_free"] == counters["write_buffers"]
    assert counters["read_buffers_free"] + hang == counters["read_buffers"]
    assert not (engine.restorations or engine.leaving or engine.writer.waiting or engine.loader.sent)


def answered(engine, *requests) -> list[list[int]]:
    """Step until nothing is left, and everything has arrived -> the tokens of each request."""
    steps(engine)
    nothing_is_lost(engine)
    for request in requests:
        if isinstance(request.outcome, Exception):
            raise request.outcome
    return [request.outcome.tokens for request in requests]


def asked(engine, prompt=PROMPT, **fields):
    """One request with nobody else around, answered -> the request."""
    request, = engine.submit(list(prompt), **{"max_tokens": 8, **fields})
    answered(engine, request)
    return request


def forget_device(engine):
    offload.empty(engine)
    assert not engine.pool.cached
    engine.pool.kv[:, :, list(engine.pool.free)] = NAN


def chain(engine, tokens, salt: str = "") -> list:
    """The prefixes of the whole chunks of these tokens."""
    known, size = [], engine.chunk
    return [engine.chunk_prefixes.nth(index, known, salt, tokens, size) for index in range(len(tokens) // size)]


def kept(engine, tokens=PROMPT, salt: str = "") -> str:
    """One character a whole chunk: x there is a file, - there is none."""
    return "".join("x" if engine.files.find(prefix, index) else "-" for index, prefix in enumerate(chain(engine, tokens, salt)))


def paths(engine, tokens=PROMPT) -> list:
    return [engine.files.find(prefix, index).path for index, prefix in enumerate(chain(engine, tokens))]


def loader_first(engine):
    """The engine moves when the loader has nothing more to do."""
    plain, loader = engine.advance, engine.loader

    def idle():
        with loader.changed:
            return not loader.line or not (any(restoration.to_load for restoration in loader.line) or
                                           any(reader.chunk for reader in loader.readers))

    def advance(request, restoration):
        until(idle)
        return plain(request, restoration)
    engine.advance = advance


def saved(make, right, prompt=PROMPT, base=None, **options):
    """-> an engine that has the prompt in files and not on the device, and K and V that were there."""
    engine = make(**options, **({"base": base} if base else {}))
    first = asked(engine, prompt)
    assert first.source == "miss" and kept(engine, prompt) == "x" * (len(prompt) // engine.chunk)
    before = device_kv(engine, prompt)
    forget_device(engine)
    forget_counts(engine)
    return engine, before


def forget_counts(engine):
    for counts in (engine.counts, engine.files.counts):
        counts.update({name: -count for name, count in counts.items()})
    if isinstance(engine.load_link, Lane):
        engine.load_link.sent.clear()


def all_there(request):
    """What it says of its chunks adds up."""
    restoration, report = request.restored, request.outcome.restoration
    sides = [chunk.side for chunk in restoration.chunks]
    assert set(sides) <= {"compute", "load", "device"}
    assert report["computed"] + report["loaded"] + sides.count("device") == report["chunks"] == len(sides)
    assert restoration.over and all(chunk.buffer is None for chunk in restoration.chunks)
    return sides


# 1. The tokens of chapter 01 ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["multi-head", "grouped", "biases", "scaled"])
@pytest.mark.parametrize("mode", MODES)
def test_what_comes_back_is_what_was_there(make, right, models, family, mode):
    base = models(family)
    engine, before = saved(make, right, base=base, mode=mode)
    again = asked(engine)
    after, sides = device_kv(engine, PROMPT), all_there(again)
    assert again.outcome.tokens == right(PROMPT, base=base)
    assert difference(after, before) < 1e-5 and difference(after, true_kv(base, PROMPT)) < 1e-5
    for index, side in enumerate(sides):
        rows = slice(index * 16, index * 16 + 16)
        assert side != "load" or torch.equal(after[:, :, rows], before[:, :, rows])
    assert mode == "both" or sides == ["load" if mode == "load" else "compute"] * 12
    assert again.cached_tokens == sum(16 - chunk.at for chunk in again.restored.chunks if chunk.side == "load")
    assert again.source == ("storage" if "load" in sides else "miss") and again.outcome.restoration["mode"] == mode


@pytest.mark.parametrize("block_size, chunk", [(1, 1), (1, 7), (4, 4), (4, 12), (16, 16), (16, 64), (48, 96), (64, 64), (8, 200)])
@pytest.mark.parametrize("mode", MODES)
def test_any_size_of_a_chunk_and_of_a_block_gives_the_same_tokens(make, right, mode, block_size, chunk):
    engine, before = saved(make, right, mode=mode, block_size=block_size, chunk=chunk, blocks=-(-300 // block_size))
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT)
    after = device_kv(engine, PROMPT)
    assert difference(after, before) < 1e-5
    if mode == "load" and chunk < 200:
        count = 199 // chunk
        assert all_there(again) == ["load"] * count and again.cached_tokens == count * chunk
        assert torch.equal(after[:, :, :count * chunk], before[:, :, :count * chunk])
    if chunk == 200:
        assert again.outcome.restoration is None and again.source == "miss"    # the last token is computed in any case


@pytest.mark.parametrize("length", [1, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 50])
@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_end_around_the_end_of_a_chunk(make, right, mode, length):
    prompt = PROMPT[:length]
    engine, _ = saved(make, right, prompt, mode=mode)
    again = asked(engine, prompt)
    assert again.outcome.tokens == right(prompt)
    whole = (length - 1) // 16
    assert (again.restored is None) == (not whole) and (not whole or len(again.restored.chunks) == whole)
    assert mode != "load" or again.cached_tokens == whole * 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 9, 46, 47, 48, 49])
def test_a_start_inside_a_chunk(make, right, mode, blocks):
    """The device has so many of the first blocks."""
    engine, before = saved(make, right, mode=mode)
    asked(engine, save=False)
    known = []
    for index in range(blocks, 50):
        engine.pool.forget(engine.pool.find(engine.prefixes.nth(index, known, "", PROMPT, 4)))
    engine.pool.kv[:, :, list(engine.pool.free)] = NAN
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT)
    after = device_kv(engine, PROMPT)
    assert difference(after, before) < 1e-5
    start = blocks * 4
    if start >= 192:
        assert again.restored is None and (again.source, again.cached_tokens) == ("gpu_hit", start)
    else:
        assert (again.restored.start, again.restored.first) == (start, start // 16)
        all_there(again)
    if mode == "load" and start < 192:
        assert (again.source, again.cached_tokens) == ("mixed", 192) and again.restored.chunks[0].at == start % 16
        assert torch.equal(after[:, :, :192], before[:, :, :192])
    if mode == "compute":
        assert (again.source, again.cached_tokens) == ("gpu_hit", start)


@pytest.mark.parametrize("mode", ["both", "load"])
def test_chunks_on_the_device_behind_a_gap_are_not_loaded(make, right, mode):
    engine, before = saved(make, right, mode=mode, blocks=128)
    asked(engine, save=False)
    known = []
    for index in [2, 20, 21]:                                                  # of chunks 0 and 5
        engine.pool.forget(engine.pool.find(engine.prefixes.nth(index, known, "", PROMPT, 4)))
    engine.pool.kv[:, :, list(engine.pool.free)] = NAN
    engine.load_link.sent.clear()
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    sides = all_there(again)
    assert [index for index, side in enumerate(sides) if side != "device"] == [0, 5]
    assert set(engine.load_link.sent) <= {"chunk 0", "chunk 5"}


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.001])
@pytest.mark.parametrize("budget", [1, 5, 16, 40, 512])
def test_any_budget_and_any_share_of_it_give_the_same_tokens(make, right, budget, share):
    engine, before = saved(make, right, token_budget=512)
    engine.token_budget = budget
    works = record_work(engine)
    again = asked(engine, gpu_share=share)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert all(count <= max(1, int(share * budget)) for work in works for _, _, count in work)
    all_there(again)


def record_work(engine) -> list[list]:
    """(request, first token, tokens) of each step that computes."""
    works, plain = [], engine.forward

    def forward(batch):
        works.append([(request, request.computed, count) for request, count in batch.work])
        return plain(batch)
    engine.forward = forward
    return works


@pytest.mark.parametrize("computed", [1, 3, 4, 5, 15])
def test_the_loader_takes_over_a_chunk_that_is_half_computed(make, right, computed):
    """The engine computes some of the first chunk; then storage gives all of it at once."""
    engine, before = saved(make, right, token_budget=1)
    works, hangs = record_work(engine), Hangs(engine)
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, computed)
    assert request.computed == computed and request.restored is None and request.in_flight.chunks[0].side is None
    hangs.on = False
    hangs.released.set()
    until(lambda: all(chunk.side == "load" for chunk in request.in_flight.chunks))
    restoration = request.in_flight
    assert answered(engine, request) == [right(PROMPT)]
    first = restoration.chunks[0]
    assert first.at == computed and request.cached_tokens == 192 - computed
    assert request.outcome.restoration["meeting"] == computed
    after = device_kv(engine, PROMPT)
    assert torch.equal(after[:, :, computed:192], before[:, :, computed:192]) and difference(after, before) < 1e-5
    assert [start for work in works for _, start, _ in work][:computed + 1] == [*range(computed), 192]


def test_rows_that_others_left_no_budget_for_are_computed_although_the_chunk_was_loaded(make, right):
    """A step was to compute ten rows of the chunk and got to compute fewer, as others came first."""
    engine, before = saved(make, right, token_budget=10, blocks=128)
    hangs = Hangs(engine)
    others = [engine.submit([*OTHER, number], max_tokens=40, save=False, gpu_share=1.0)[0] for number in range(2, 6)]
    while any(not other.answer.tokens for other in others):
        steps(engine, 1)
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 1)
    chunk = request.in_flight.chunks[0]
    assert chunk.at == 10 and 0 < request.computed == 6 and chunk.side is None
    hangs.on = False
    hangs.released.set()
    until(lambda: chunk.side == "load")
    answered(engine, request, *others)
    assert request.outcome.tokens == right(PROMPT) and request.cached_tokens == 182
    assert difference(device_kv(engine, PROMPT), before) < 1e-5
    for number, other in zip(range(2, 6), others):
        assert other.outcome.tokens == right([*OTHER, number], 40)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [193, 200])
def test_samples_of_one_prompt(make, right, mode, length):
    prompt = PROMPT[:length]
    engine, _ = saved(make, right, prompt, mode=mode, blocks=128)
    samples = engine.submit(prompt, n=3, max_tokens=8, temperature=1.0, seed=5)
    tokens = answered(engine, *samples)
    assert tokens == [right(prompt, temperature=1.0, seed=5 + number) for number in range(3)]
    assert len({sample.cached_tokens for sample in samples}) == len({sample.source for sample in samples}) == 1
    assert engine.counts["restorations"] == 1 and all(sample.restored is samples[0].restored for sample in samples)


def test_salts_share_nothing(make, right):
    engine = make(mode="load")
    for salt in ("a", "b"):
        request = asked(engine, cache_salt=salt)
        assert request.outcome.tokens == right(PROMPT) and request.source == "miss"
    assert kept(engine) == "-" * 12 and kept(engine, salt="a") == kept(engine, salt="b") == "x" * 12
    forget_device(engine)
    assert asked(engine, save=False).source == "miss"
    again = asked(engine, cache_salt="a")
    assert again.source == "storage" and again.cached_tokens == 192 and again.outcome.tokens == right(PROMPT)


@pytest.mark.parametrize("mode", MODES)
def test_over_the_modelled_link_in_several_directories_it_comes_back_too(make, right, tmp_path, mode):
    engine, before = saved(make, right, link=links.Link, mode=mode, bytes_per_second=2e8,
                           directories=(tmp_path / "a", tmp_path / "b", tmp_path / "c"))
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    sides = all_there(again)
    assert mode != "load" or sides == ["load"] * 12 and torch.equal(device_kv(engine, PROMPT)[:, :, :192], before[:, :, :192])
    assert [len(list((tmp_path / name).glob("*.chunk"))) for name in "abc"] == [4, 4, 4]


def test_a_new_engine_finds_the_files_of_an_old_one_and_other_settings_do_not(make, right, models, tmp_path):
    asked(make(directories=(tmp_path,)))
    again = asked(make(directories=(tmp_path,), mode="load", block_size=8))
    assert again.source == "storage" and again.outcome.tokens == right(PROMPT)
    for other in (dict(chunk=32), dict(kv_bits=8), dict(base=models("grouped", "bfloat16"))):
        request = asked(make(directories=(tmp_path,), mode="load", **other), save=False)
        assert request.source == "miss"


@pytest.mark.parametrize("mode", MODES)
def test_in_16_bit_what_was_loaded_is_bit_equal(make, right, models, mode):
    base = models("grouped", "bfloat16")
    engine, before = saved(make, right, base=base, mode=mode)
    again, after = asked(engine), None
    after = device_kv(engine, PROMPT)
    for index, side in enumerate(all_there(again)):
        rows = slice(index * 16, index * 16 + 16)
        assert side != "load" or torch.equal(after[:, :, rows], before[:, :, rows])
    assert difference(after, before) <= 0.05 * float(before.float().abs().max())
    assert mode == "both" or all_there(again) == ["load" if mode == "load" else "compute"] * 12


@pytest.mark.parametrize("mode", ["both", "load"])
@pytest.mark.parametrize("family, dtype", [("grouped", "float32"), ("multi-head", "float32"), ("grouped", "bfloat16")])
def test_in_8_bit_no_number_is_off_by_more_than_half_a_step(make, right, models, family, dtype, mode):
    base = models(family, dtype)
    engine, before = saved(make, right, base=base, mode=mode, kv_bits=8)
    if mode == "both":
        loader_first(engine)
    again = asked(engine)
    after, before = device_kv(engine, PROMPT)[:, :, :192].float(), before[:, :, :192].float()
    assert all_there(again) == ["load"] * 12
    step = before.abs().amax(-1, keepdim=True) / 127
    rounding = 0.0 if dtype == "float32" else 2.0 ** -8
    error = (after - before).abs()
    assert (error <= step * 0.51 + rounding * before.abs().amax(-1, keepdim=True)).all() and error.max() > 0
    tokens = right(PROMPT, base=base)
    assert len(again.outcome.tokens) == len(tokens) and (
        dtype != "float32" or sum(a == b for a, b in zip(again.outcome.tokens, tokens)) >= 4)
    assert paths(engine)[0].stat().st_size < 0.7 * base.model.config.kv_numbers_per_token * 16 * before.itemsize + 8192


def test_what_does_not_fit_is_refused_with_a_sentence(make):
    for options, word in ((dict(chunk=18), "--chunk 16"), (dict(kv_bits=16), "--kv-bits 32"),
                          (dict(cpu_chunks=4), "--cpu-chunks")):
        with pytest.raises(ModelError, match=word):
            make(**options)
    engine = make(cpu_chunks=5)
    for wrong in (dict(mode="fast"), dict(gpu_share=0), dict(gpu_share=1.5), dict(save=1)):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            engine.submit(PROMPT, **wrong)


@pytest.mark.parametrize("cpu_chunks", [5, 6, 9, 40])
@pytest.mark.parametrize("mode", ["both", "load"])
def test_few_buffers_in_host_memory_are_enough(make, right, mode, cpu_chunks):
    engine, before = saved(make, right, mode=mode, cpu_chunks=cpu_chunks)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert mode == "both" or again.cached_tokens == 192


# K and V in 8 bit --------------------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-40, -1e-45, 6e-8, 1e-5, 7e-3, 1.0, -1.0, 127.0, 3e4, -65000.0]),
    st.floats(-6e4, 6e4, width=32), st.floats(-1.0, 1.0, width=32), st.floats(-2.0 ** -16, 2.0 ** -16, width=32))
SCALE = 2.0 ** -24                 # the smallest that float16 can hold, and the steps between the smallest


def there_and_back(kv):
    into = torch.full_like(kv, NAN)
    packed = cake.pack(kv, 8)
    assert packed.dtype == numpy.uint8 and packed.nbytes == kv.numel() + 2 * kv.numel() // kv.shape[-1]
    cake.unpack(torch.from_numpy(packed), into)
    return into


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from([1, 3, 16]))
def test_any_numbers_come_back_from_8_bit_within_half_a_step(data, dtype, width):
    """Where float16 has no exact scale, within as much of what it can hold at all."""
    numbers = data.draw(st.lists(NUMBERS, min_size=4 * width, max_size=4 * width))
    kv = torch.tensor(numbers).to(DTYPES[dtype]).view(1, 2, 1, 2, width)
    back = there_and_back(kv)
    rows, scales = kv.flatten(0, -2), cake.quantize(kv.flatten(0, -2))[1]
    assert scales.shape == (4, 1) and scales.dtype == torch.float16 and scales.isfinite().all()
    error = (back.flatten(0, -2).double() - rows.double()).abs()
    largest = rows.double().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(kv.dtype).eps * 1.01 * largest    # of its dtype
    assert (error <= scales.double() / 2 + rounding + 127 * SCALE / 2).all()
    assert (error[largest[:, 0] >= 1e-2] <= (scales.double() / 2 + rounding)[largest[:, 0] >= 1e-2]).all()


def test_the_largest_number_of_a_head_comes_back_finite():
    for dtype in DTYPES.values():
        kv = torch.full((1, 2, 1, 1, 4), 65504.0).to(dtype)
        kv[..., 1:3] = torch.tensor([-1.0, 0.5])
        assert there_and_back(kv).isfinite().all(), dtype


def test_zeros_come_back_as_zeros_and_what_is_too_large_for_a_scale_at_its_largest():
    zeros = torch.zeros(1, 2, 3, 2, 8)
    assert torch.equal(there_and_back(zeros), zeros)
    large = torch.full((1, 2, 1, 1, 4), 1e38)
    assert there_and_back(large).isfinite().all() and (there_and_back(large) == 127 * 65504.0).all()


@pytest.mark.parametrize("rows", [1, 2047, 2048, 2049, 5000])
def test_pieces_that_are_packed_one_after_the_other_give_what_all_at_once_would(rows):
    kv = torch.randn(1, 2, rows, 1, 16)
    assert cake.rows_at_once(kv) == 2048
    whole, scales = cake.quantize(kv.flatten(0, -2))
    packed = torch.from_numpy(cake.pack(kv, 8))
    assert torch.equal(packed[:kv.numel()].view(torch.int8), whole.view(-1))
    assert torch.equal(packed[kv.numel():].view(torch.float16), scales.view(-1))
    assert torch.equal(there_and_back(kv), (whole.float() * scales.float()).view_as(kv))
    again = there_and_back(kv)
    assert (there_and_back(again) - again).abs().max() <= again.abs().max() / 127 * 0.51


def test_bytes_of_a_token_are_what_a_file_holds(make, models):
    for family, dtype, bits in (("grouped", "float32", 32), ("grouped", "float32", 8), ("multi-head", "bfloat16", 16),
                                ("multi-head", "bfloat16", 8)):
        base = models(family, dtype)
        engine, config = make(base=base, kv_bits=bits), base.model.config
        expected = config.num_hidden_layers * 2 * config.num_key_value_heads * (
            config.head_dim * bits // 8 + (2 if bits == 8 else 0))
        assert cake.bytes_per_token(config, bits) == expected and engine.loader.chunk_bytes == 16 * expected


# 2. Races at the meeting point ------------------------------------------------------------------------------------

SHORT = PROMPT[:70]                # eight chunks of eight tokens, and six tokens
STEPS_OF_BOTH = ("find", "open", "piece", "checked", "send", "link", "before advance", "after advance", "before compute",
                 "after compute")


class Race:
    """An engine with injected delays; it counts who writes to which slot."""

    def __init__(self, engine):
        self.engine, self.delays, self.rng, self.computed = engine, {}, random.Random(0), []
        engine.loader.files.at = lambda step, _: self.at(step)
        advance, compute, forward, send = engine.advance, engine.compute, engine.forward, engine.loader.send

        def slow_advance(request, restoration):
            self.at("before advance")
            count = advance(request, restoration)
            self.at("after advance")
            return count

        def slow_compute(work):
            self.at("before compute")
            compute(work)
            self.at("after compute")

        def counting_forward(batch):
            self.computed += batch.slots.tolist()
            return forward(batch)

        def slow_send(chunk):
            self.at("send")
            send(chunk)
        engine.advance, engine.compute, engine.forward, engine.loader.send = (
            slow_advance, slow_compute, counting_forward, slow_send)

    def at(self, step):
        if seconds := self.delays.get(step):
            time.sleep(self.rng.random() * seconds)

    def round(self, seed):
        """Others delays, another budget, some of the device's blocks -> the request, and how often each slot was written."""
        engine, self.rng = self.engine, random.Random(seed)
        forget_device(engine)
        if self.rng.random() < 0.3:                                            # the device has some of the beginning
            asked(engine, SHORT[:self.rng.randrange(4, 60)], max_tokens=1, save=False, mode="compute")
        self.delays = {step: self.rng.choice([2e-4, 1e-3, 3e-3]) for step in STEPS_OF_BOTH if self.rng.random() < 0.35}
        engine.load_link.bytes_per_second = self.rng.choice([2e6, 2e7]) if "link" in self.delays else 1e9
        engine.token_budget = self.rng.choice([2, 3, 8, 11, 64])
        self.computed.clear()
        engine.load_link.pieces.clear()
        request, = engine.submit(SHORT, max_tokens=1, save=False, mode=self.rng.choice(["both"] * 8 + ["load"]))
        steps(engine)
        nothing_is_lost(engine)
        return request, Counter(self.computed) + loaded_slots(engine)


def loaded_slots(engine) -> Counter:
    """How often the link wrote to each slot."""
    pool = engine.pool.kv
    row, writes = pool.shape[-1] * pool.shape[-2], Counter()
    for piece in engine.load_link.pieces:
        first, rest = divmod(piece.storage_offset(), row)
        assert piece.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() and not rest
        writes.update(range(first, first + piece.shape[2]))
    return writes


@pytest.mark.parametrize("directories", [1, 2])
def test_however_the_two_meet_each_slot_is_written_once(make, right, tiny_engine, tmp_path, directories):
    """400 rounds in all, with delays at each step of both sides."""
    engine = make(CountingLink, chunk=8, blocks=40, directories=[tmp_path / str(number) for number in range(directories)])
    asked(engine, SHORT, max_tokens=1)
    forget_counts(engine)
    race, true, met = Race(engine), true_kv(tiny_engine, SHORT)[:, :, :68], Counter()
    for seed in range(200):
        request, writes = race.round(f"{directories} {seed}")
        start = request.restored.start if request.restored else request.cached_tokens
        assert set(writes.values()) == {1} and len(writes) == 70 - start, seed
        assert request.outcome.tokens == right(SHORT, 1), seed
        assert difference(device_kv(engine, SHORT), true) < 1e-5, seed
        if request.restored:
            sides = all_there(request)
            met[sides.count("load")] += 1
            met["inside"] += any(
                chunk.at and chunk.side == "load" and chunk.index * 8 >= start for chunk in request.restored.chunks)
            assert "device" not in sides
    assert sum(met[count] > 0 for count in range(9)) >= 6 and met["inside"] >= 10, met
    assert engine.counts["chunks_missed"] == engine.files.counts["file_errors"] == engine.loader.errors == 0


@pytest.mark.parametrize("guard", ["who has the chunk is not asked", "all rows are sent"])
def test_without_the_agreement_of_the_two_a_slot_is_written_twice(make, monkeypatch, guard):
    engine = make(CountingLink, chunk=8, blocks=40)
    asked(engine, SHORT, max_tokens=1)
    if guard[0] == "w":
        monkeypatch.setattr(cake.Loader, "wanted", lambda loader, chunk: not chunk.restoration.over)
    else:
        monkeypatch.setattr(cake, "rows_of", lambda blocks, size, at=0, plain=cake.rows_of: plain(blocks, size, 0))
    race = Race(engine)
    assert any(max(race.round(seed)[1].values()) > 1 for seed in range(200))


# 3. Files that are not what they were -----------------------------------------------------------------------------

def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path):
    os.truncate(path, 0)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-97] ^= 64                                                         # of an exponent
    path.write_bytes(content)


def flip_a_bit_of_the_header(path):
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)


def put_a_directory(path):
    path.unlink()
    path.mkdir()


def put_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {"missing": os.unlink, "truncated": truncate, "empty": cut_to_nothing, "bit": flip_a_bit,
           "bit of the header": flip_a_bit_of_the_header, "directory": put_a_directory, "pipe": put_a_pipe}
WHERE = {"first": [0], "middle": [5, 6], "last": [11], "all": list(range(12))}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("damage", [*DAMAGES, "vanishes", "shrinks"])
@pytest.mark.parametrize("mode", ["both", "load"])
def test_chunks_that_are_damaged_are_computed_counted_and_saved_again(make, right, tmp_path, mode, damage, where):
    engine, before = saved(make, right, mode=mode, directories=(tmp_path,))
    files, bad = paths(engine), WHERE[where]
    if damage in DAMAGES:
        for index in bad:
            DAMAGES[damage](files[index])
    else:
        engine.loader.files.at = lambda step, stored: step == "open" and stored.path in [files[index] for index in bad] and (
            os.unlink(stored.path) if damage == "vanishes" else cut_to_nothing(stored.path))
    loader_first(engine)
    again = asked(engine)
    engine.loader.files.at = lambda step, chunk: None
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert all_there(again) == ["compute" if index in bad else "load" for index in range(12)]
    assert engine.counts["chunks_missed"] == again.outcome.restoration["absent"] == len(bad)
    assert engine.files.counts["file_errors"] >= len(bad) * (damage != "missing") and engine.loader.errors == 0
    assert again.cached_tokens == (12 - len(bad)) * 16
    for index in bad:                                                          # nobody can replace that
        if damage == "directory":
            files[index].rmdir()
    asked(engine)                                                              # what it misses now, it knows now
    assert kept(engine) == "x" * 12
    forget_device(engine)
    assert asked(engine).cached_tokens == 192


@pytest.mark.parametrize("guarded", [True, False])
def test_without_checksums_a_bit_that_was_flipped_gets_to_the_device(make, right, guarded):
    engine, before = saved(make, right, mode="load")
    engine.files.verify = guarded
    flip_a_bit(paths(engine)[4])
    asked(engine)
    assert (difference(device_kv(engine, PROMPT), before) < 1e-5) == guarded


def test_a_chunk_that_was_gone_is_saved_again_by_the_request_that_computes_it(make, right):
    engine, _ = saved(make, right, mode="load")
    for path in paths(engine)[3:5]:
        path.unlink()
    asked(engine)
    assert engine.counts["chunks_missed"] == 2
    assert kept(engine) == "x" * 12


@pytest.mark.parametrize("damage", ["missing", "bit", "vanishes"])
def test_chunks_that_are_damaged_while_both_are_at_work(make, right, tmp_path, damage):
    """Whoever comes first."""
    engine, before = saved(make, right, link=CountingLink, directories=(tmp_path,), token_budget=8, chunk=8)
    rng = random.Random(damage)
    for _ in range(25):
        forget_device(engine)
        asked(engine, cache_salt="", mode="compute")                           # saves what is gone
        files = [path for path in tmp_path.glob("*.chunk") if rng.random() < 0.3]
        forget_device(engine)
        if damage == "vanishes":
            engine.loader.files.at = lambda step, stored, files=files: step == "open" and stored.path in files and (
                os.unlink(stored.path))
        else:
            for path in files:
                DAMAGES[damage](path)
        again = asked(engine)
        engine.loader.files.at = lambda step, chunk: None
        assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
        all_there(again)
    assert engine.counts["chunks_missed"] > 0 and engine.counts["chunks_loaded"] > 0


def test_a_storage_that_raises_something_else_is_counted(make, right):
    engine, _ = saved(make, right, mode="load")

    def raises(step, _):
        if step == "find":
            raise RuntimeError("injected")
    engine.loader.files.at = raises
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and again.source == "miss"
    assert engine.loader.errors == 12 and len(engine.loader.readers) == 1


# 4. Storage that hangs --------------------------------------------------------------------------------------------

@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(cake, "PATIENCE", 0.05)


@pytest.mark.parametrize("mode, step", [
    ("both", "find"), ("both", "open"), ("both", "piece"), ("load", "find"), ("load", "open"), ("load", "piece"),
    ("load", "checked")])
def test_a_storage_that_hangs_is_not_waited_for(make, right, impatient, mode, step):
    engine, before = saved(make, right, mode=mode)
    hangs = Hangs(engine, step)
    request = asked(engine)
    assert request.outcome.tokens == right(PROMPT) and request.source == "miss" and difference(
        device_kv(engine, PROMPT), before) < 1e-5
    stalls = engine.counts["storage_stalls"]
    assert hangs.inside == 1 and stalls in ([1] if mode == "load" else [0, 1])       # 1: it waited in vain, longer than PATIENCE
    assert request.restored.bar() == "#" * 12 and request.restored.given_up == (stalls == 1)
    # The next one has a thread of its own
    hangs.on = False
    forget_device(engine)
    loader_first(engine)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and again.cached_tokens == 192
    assert engine.counters()["readers_retired"] == len(engine.loader.readers) == 1
    # What hung comes back, and leaves
    hangs.released.set()
    until(lambda: not engine.loader.retired)
    nothing_is_lost(engine)
    counters = engine.counters()
    assert counters["read_buffers_free"] == counters["read_buffers"] and counters["readers"] == 1
    assert engine.load_link.sent == [f"chunk {index}" for index in range(11, -1, -1)]


def test_a_storage_that_hangs_after_the_last_byte_is_not_waited_for(make, right, impatient):
    """The checksum is read last."""
    engine, _ = saved(make, right, token_budget=16)
    hangs = Hangs(engine, "checked")
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 300)
    in_time = request.outcome is not None
    hangs.on = False
    hangs.released.set()
    assert answered(engine, request) == [right(PROMPT)] and in_time


@pytest.mark.parametrize("mode", ["both", "load"])
@pytest.mark.parametrize("directories", [1, 3])
def test_only_so_many_threads_are_left_behind_and_then_the_engine_computes(make, right, impatient, tmp_path, mode, directories):
    threads = set(threading.enumerate())
    engine, _ = saved(make, right, mode=mode, cpu_chunks=60, directories=[tmp_path / str(i) for i in range(directories)])
    hangs, most = Hangs(engine), cake.Loader.MOST_RETIRED
    for _ in range(12):
        forget_device(engine)
        request, = engine.submit(PROMPT, max_tokens=4)
        before = hangs.inside
        engine.step()
        until(lambda before=before: hangs.inside > before or not engine.loader.readers or not engine.step())
        assert answered(engine, request) == [right(PROMPT, 4)] and request.source == "miss"
    assert len(engine.loader.retired) <= most
    assert len(set(threading.enumerate()) - threads) <= most + 2 * directories + 4
    hangs.released.set()
    until(lambda: not engine.loader.retired)
    hangs.on = False
    forget_device(engine)
    loader_first(engine)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and again.cached_tokens == 192
    nothing_is_lost(engine)
    engine.loader.close()
    engine.writer.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread not in threads and "(work)" in thread.name])


def test_when_all_buffers_are_with_threads_that_hang_the_engine_computes(make, right, impatient):
    """Five in host memory: one to write, four to read."""
    engine, _ = saved(make, right, mode="load", cpu_chunks=5)
    hangs = Hangs(engine)
    for _ in range(6):
        forget_device(engine)
        request = asked(engine)
        assert request.outcome.tokens == right(PROMPT) and request.source == "miss"
    assert 3 <= hangs.inside <= 4 == len(engine.loader.buffers.free) + hangs.inside
    hangs.on = False
    hangs.released.set()
    until(lambda: len(engine.loader.buffers.free) == 4)
    forget_device(engine)
    assert asked(engine).cached_tokens == 192


def test_while_storage_hangs_others_are_answered(make, right):
    """Who only loads waits for it; who decodes does not."""
    engine, _ = saved(make, right, mode="load")
    hangs = Hangs(engine)
    waits, = engine.submit(PROMPT, max_tokens=8)
    engine.step()
    other, = engine.submit(OTHER, max_tokens=20)
    while other.outcome is None:
        steps(engine, 1)
    assert other.outcome.tokens == right(OTHER, 20) and waits.outcome is None and not waits.computed
    hangs.on = False
    hangs.released.set()
    assert answered(engine, waits) == [right(PROMPT)] and waits.cached_tokens == 192


def test_a_pipe_without_a_writer_is_no_reason_to_wait(make, right):
    engine, _ = saved(make, right, mode="load")
    for path in paths(engine):
        put_a_pipe(path)
    assert asked(engine).outcome.tokens == right(PROMPT) and engine.counts["storage_stalls"] == 0


def test_threads_end_with_the_engine(tiny_engine):
    threads = set(threading.enumerate())
    engine = build(tiny_engine, links.Link)
    asked(engine)
    forget_device(engine)
    asked(engine)
    engine.close()
    gone, folder = weakref.ref(engine), engine.folder.name
    assert len(set(threading.enumerate()) - threads) >= 4 and os.path.isdir(folder)
    del engine
    gc.collect()
    assert gone() is None
    until(lambda: set(threading.enumerate()) <= threads)
    assert not os.path.exists(folder)


# 5. Links and disks that fail -------------------------------------------------------------------------------------

@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", ["both", "load"])
def test_a_link_that_takes_no_chunk_leaves_it_to_the_engine(make, right, mode, where):
    engine, before = saved(make, right, mode=mode)
    bad, plain = WHERE[where], engine.load_link.copy

    def copy(dst, src, label, after=None):
        if label in [f"chunk {index}" for index in bad]:
            raise RuntimeError("injected")
        return plain(dst, src, label, after)
    engine.load_link.copy = copy
    loader_first(engine)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert all_there(again) == ["compute" if index in bad else "load" for index in range(12)]
    assert engine.loader.errors == engine.counts["chunks_missed"] == len(bad)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", ["both", "load"])
def test_a_chunk_lost_on_the_link_before_the_engine_gets_there_is_computed(make, right, mode, where):
    engine, before = saved(make, right, mode=mode)
    bad = WHERE[where]
    engine.load_link.doomed = [f"chunk {index}" for index in bad]
    loader_first(engine)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert all_there(again) == ["compute" if index in bad else "load" for index in range(12)]
    assert engine.counts["transfer_errors"] == engine.counts["chunks_missed"] == len(bad) and not engine.counts["preemptions"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("doomed", ["chunk 0", "chunk 1", "chunk 5"])
@pytest.mark.parametrize("mode", ["both", "load"])
def test_a_chunk_lost_on_the_link_after_the_engine_passed_it(make, right, mode, doomed, alone):
    """The request starts over and computes; nobody reads what did not come."""
    engine, before = saved(make, right, mode=mode, chunk=32)
    loader_first(engine)
    other = None
    if not alone:
        other, = engine.submit(OTHER, max_tokens=30, save=False)
        steps(engine, 3)
    engine.load_link.held, engine.load_link.doomed = True, [doomed]
    request, = engine.submit(PROMPT, max_tokens=8)
    if alone:
        steps(engine)
    else:
        for _ in range(8):
            steps(engine, 1)
        engine.load_link.held = False
        engine.load_link.arrive()
    answered(engine, *[request, *[other] * (not alone)])
    assert request.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    assert engine.counts["transfer_errors"] == 1 and (alone or other.outcome.tokens == right(OTHER, 30))
    assert engine.counts["preemptions"] == (doomed == "chunk 0") or not alone or doomed == "chunk 1"


def test_the_forward_pass_reads_no_chunk_that_did_not_arrive(make, right, monkeypatch):
    """Without waiting for it, it does."""
    wrong = {}
    for guarded in (True, False):
        engine, _ = saved(make, right, mode="load", chunk=32)
        loader_first(engine)
        engine.load_link.held = True
        if not guarded:
            monkeypatch.setattr(cake.Engine, "has_arrived", lambda engine, request: True)
        request, = engine.submit(PROMPT, max_tokens=2)
        try:
            steps(engine)
        except (AssertionError, AttributeError):
            pass
        wrong[guarded] = getattr(request.outcome, "tokens", None) != right(PROMPT, 2)
    assert wrong == {True: False, False: True}


def test_a_save_link_that_takes_nothing_drops_chunks_and_no_token(make, right):
    engine = make()
    engine.save_link.refuses = True
    assert asked(engine).outcome.tokens == right(PROMPT)
    assert kept(engine) == "-" * 12 and engine.counts["chunks_dropped"] == 12
    engine.save_link.refuses = "chunk 3"
    forget_device(engine)
    assert asked(engine).outcome.tokens == right(PROMPT) and kept(engine) == "xxx-xxxxxxxx"
    engine.save_link.refuses = False
    assert asked(engine).outcome.tokens == right(PROMPT) and kept(engine) == "x" * 12


def test_a_chunk_lost_on_its_way_out_is_not_saved(make, right):
    engine = make()
    engine.save_link.doomed = ["chunk 4", "chunk 7"]
    assert asked(engine).outcome.tokens == right(PROMPT) and kept(engine) == "xxxx-xx-xxxx"
    engine.save_link.doomed = []
    assert asked(engine).outcome.tokens == right(PROMPT) and kept(engine) == "x" * 12
    assert (engine.counts["chunks_saved"], engine.counts["chunks_dropped"]) == (12, 2)


def test_a_full_disk_drops_chunks_and_no_token(make, right, monkeypatch):
    engine, plain = make(), cake.ChunkFiles.write

    def full(files, prefix, index, states):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(cake.ChunkFiles, "write", full)
    assert asked(engine).outcome.tokens == right(PROMPT)
    assert kept(engine) == "-" * 12 and (engine.counts["chunks_saved"], engine.counts["chunks_dropped"]) == (0, 12)
    monkeypatch.setattr(cake.ChunkFiles, "write", plain)
    assert asked(engine).outcome.tokens == right(PROMPT) and kept(engine) == "x" * 12


def test_chunks_wait_for_buffers_and_are_saved_then(make, right):
    engine = make(cpu_chunks=5)                                                # one to write
    engine.save_link.held = True
    with mock.patch.object(Piece, "join", lambda piece: until(lambda: piece.ready)):
        request, = engine.submit(PROMPT, max_tokens=8)
        steps(engine)
        assert request.outcome.tokens == right(PROMPT) and kept(engine) == "-" * 12
        assert len(engine.writer.waiting) == 11 and len(engine.leaving) == 12
        assert engine.counters()["blocks_referenced"] == 48                    # nobody may overwrite them
        engine.save_link.held = False
        engine.save_link.arrive()
        nothing_is_lost(engine)
    assert kept(engine) == "x" * 12 and engine.counts["chunks_saved"] == 12


@pytest.mark.parametrize("what", ["who comes in", "who runs"])
def test_who_needs_blocks_is_worth_more_than_chunks_that_wait(make, right, what):
    engine, other = make(cpu_chunks=5, blocks=60), ids(2, 150)
    engine.save_link.held = True
    with mock.patch.object(Piece, "join", lambda piece: until(lambda: piece.ready)):
        first, = engine.submit(PROMPT, max_tokens=8)
        steps(engine)
        assert len(engine.writer.waiting) == 11
        prompt, new = (other, 8) if what == "who comes in" else (OTHER, 120)
        second, = engine.submit(prompt, max_tokens=new, save=False)
        steps(engine)
        engine.save_link.held = False
        engine.save_link.arrive()
        nothing_is_lost(engine)
    assert first.outcome.tokens == right(PROMPT) and second.outcome.tokens == right(prompt, new)
    dropped, written = engine.counts["chunks_dropped"], engine.counts["chunks_saved"]
    assert dropped > 0 and dropped + written == 12 and sorted(kept(engine)) == ["-"] * dropped + ["x"] * written
    assert engine.counts["preemptions"] == 0


def test_a_chunk_is_written_once(make, right):
    engine = make(blocks=128)
    both = engine.submit(PROMPT, max_tokens=8) + engine.submit(PROMPT[:180] + ids(7, 20), max_tokens=8)
    answered(engine, *both)
    for _ in range(2):
        asked(engine)
        forget_device(engine)
    assert engine.files.counts["file_writes"] == 11 + 2 <= engine.counts["chunks_saved"]
    assert len(engine.save_link.sent) == engine.counts["chunks_saved"]


def test_an_engine_that_shares_its_directory_writes_nothing_twice(make, right, tmp_path):
    asked(make(directories=(tmp_path,)))
    engine = make(directories=(tmp_path,), mode="compute")
    assert asked(engine).outcome.tokens == right(PROMPT) and engine.files.counts["file_writes"] == 0
    assert len(list(tmp_path.iterdir())) == 12


def test_without_save_nothing_is_kept_and_what_is_kept_is_used(make, right):
    engine = make(mode="load")
    asked(engine, save=False)
    assert kept(engine) == "-" * 12 and not engine.save_link.sent
    asked(engine)
    forget_device(engine)
    assert asked(engine, save=False).cached_tokens == 192


def test_the_answer_is_saved_as_well(make, right):
    engine = make(mode="load")
    first = asked(engine, PROMPT[:150], max_tokens=60)
    talk = PROMPT[:150] + first.outcome.tokens + ids(8, 3)
    forget_device(engine)
    again = asked(engine, talk)
    assert again.cached_tokens == (150 + len(first.outcome.tokens) - 1) // 16 * 16 and again.outcome.tokens == right(talk)


def test_close_brings_what_was_computed_to_its_file(make, right, tmp_path):
    engine = make(links.Link, directories=(tmp_path,), bytes_per_second=5e6)
    request, = engine.submit(PROMPT, max_tokens=1)
    while request.outcome is None:
        engine.step()
    engine.close()
    assert len(list(tmp_path.glob("*.chunk"))) == 12


# 6. Several requests ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tail", ["same", "another"])
@pytest.mark.parametrize("mode", ["both", "load"])
def test_requests_for_one_document_share_what_is_loaded(make, right, mode, tail, count):
    engine, before = saved(make, right, mode=mode, blocks=256)
    prompts = [PROMPT if tail == "same" else PROMPT[:192 - 4 * number] + ids(9 + number, 8) for number in range(count)]
    loader_first(engine)
    requests = [engine.submit(prompt, max_tokens=8)[0] for prompt in prompts]
    assert answered(engine, *requests) == [right(prompt) for prompt in prompts]
    assert engine.counts["chunks_loaded"] == 12 and len(engine.load_link.sent) == 12
    assert engine.counts["restorations"] == 1 or tail == "another"             # of its own last chunk
    first, *others = requests
    assert first.source == "storage" and all(other.source == "gpu_hit" and other.cached_tokens >= 176 for other in others)
    assert torch.equal(device_kv(engine, PROMPT[:192]), before[:, :, :192])


@pytest.mark.parametrize("what", ["cancelled", "preempted", "fails"])
@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("mode", ["both", "load"])
def test_the_second_goes_on_when_the_first_does_not(make, right, mode, at, what):
    engine, before = saved(make, right, mode=mode, blocks=128, token_budget=24)
    if at % 2:
        engine.load_link.held = True
    first, = engine.submit(PROMPT, max_tokens=8)
    second, = engine.submit(PROMPT[:192] + ids(9, 8), max_tokens=8)
    steps(engine, at)
    if first.outcome is None:
        if what == "cancelled":
            engine.cancel(first)
        elif what == "preempted" and first in engine.running:
            engine.preempt(first)
        elif what == "fails":
            plain = engine.forward

            def fails(batch):
                if any(request is first for request, _ in batch.work):
                    raise RuntimeError("injected")
                return plain(batch)
            engine.forward = fails
    steps(engine, 3)
    engine.load_link.held = False
    engine.load_link.arrive()
    steps(engine)
    nothing_is_lost(engine)
    if not isinstance(first.outcome, Exception):
        assert first.outcome.tokens == right(PROMPT)
    else:
        assert isinstance(first.outcome, HungUp if what == "cancelled" else RuntimeError)
    if what == "fails" and isinstance(second.outcome, RuntimeError):           # they were in one batch
        second = asked(engine, PROMPT[:192] + ids(9, 8))
    assert second.outcome.tokens == right(PROMPT[:192] + ids(9, 8))
    assert difference(device_kv(engine, PROMPT[:192]), before[:, :, :192]) < 1e-5


@pytest.mark.parametrize("mode", ["both", "compute"])
def test_others_decode_between_the_steps_of_a_restoration(make, right, mode):
    engine, before = saved(make, right, mode=mode, token_budget=16)
    hangs = Hangs(engine)
    other, = engine.submit(OTHER, max_tokens=40, save=False)
    steps(engine, 3)
    works = record_work(engine)
    request, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 30)
    together = [work for work in works if {id(entry[0]) for entry in work} == {id(other), id(request)}]
    assert len(together) >= 10 and all(sum(entry[2] for entry in work) <= 16 for work in works)
    hangs.on = False
    hangs.released.set()
    assert answered(engine, request, other) == [right(PROMPT), right(OTHER, 40)]
    assert difference(device_kv(engine, PROMPT), before) < 1e-5


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("what", ["cancel", "preempt"])
@pytest.mark.parametrize("mode", MODES)
def test_whoever_leaves_at_any_step_of_a_restoration_loses_nothing(make, right, mode, what, held):
    engine, before = saved(make, right, mode=mode, token_budget=24)
    for at in range(14):
        forget_device(engine)
        engine.load_link.held = held
        request, = engine.submit(PROMPT, max_tokens=8)
        steps(engine, at)
        if request.outcome is None:
            if what == "cancel":
                engine.cancel(request)
            elif request in engine.running:
                engine.preempt(request)
                engine.check_integrity()
                assert not request.table and request in engine.waiting
        steps(engine, 2)
        engine.load_link.held = False
        engine.load_link.arrive()
        steps(engine)
        nothing_is_lost(engine)
        assert isinstance(request.outcome, HungUp) if what == "cancel" and isinstance(request.outcome, Exception) else (
            request.outcome.tokens == right(PROMPT))
        assert asked(engine).outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5


@pytest.mark.parametrize("guarded", [True, False])
def test_blocks_are_not_taken_while_something_still_travels_into_them(make, right, guarded):
    """The first hangs up; its blocks would go to the second, and then what was on its way arrives."""
    engine, _ = saved(make, right, mode="load", chunk=32, blocks=56)
    other = ids(2, 200)
    loader_first(engine)
    engine.load_link.held = True
    decoding, = engine.submit(OTHER, max_tokens=30, save=False)
    steps(engine, 2)
    first, = engine.submit(PROMPT, max_tokens=8)
    steps(engine, 2)
    assert engine.load_link.under_way()
    if not guarded:
        restoration, = engine.restorations
        engine.pool.release(restoration.blocks)
        engine.restorations.clear()
    engine.cancel(first)
    second, = engine.submit(other, max_tokens=8, save=False, mode="compute")
    for _ in range(6):
        engine.step()
    assert (second.table == []) == guarded                                     # there are no other blocks
    engine.load_link.held = False
    engine.load_link.arrive()
    while engine.step():
        pass
    engine.flush(5)
    assert (difference(device_kv(engine, other), true_kv_of(engine, other)) < 1e-5) == guarded
    assert not guarded or second.outcome.tokens == right(other) and decoding.outcome.tokens == right(OTHER, 30)


def true_kv_of(engine, tokens):
    base = SimpleNamespace(model=engine.model, forward=baseline.Engine(engine.model, engine.tokenizer, engine.end_tokens).forward)
    return true_kv(base, tokens)


@pytest.mark.parametrize("mode", ["both", "load"])
def test_in_a_small_pool_requests_are_preempted_and_right(make, right, mode):
    engine, _ = saved(make, right, mode=mode, blocks=60, token_budget=32)
    prompts = [PROMPT, PROMPT[:100] + ids(4, 30), ids(5, 60), PROMPT[:60]]
    requests = [engine.submit(prompt, max_tokens=24)[0] for prompt in prompts]
    assert answered(engine, *requests) == [right(prompt, 24) for prompt in prompts]


# 7. Any order -----------------------------------------------------------------------------------------------------

TALK = [ids(1, 210), ids(1, 64) + ids(2, 146), ids(1, 100) + ids(3, 110), [7] * 210]
LENGTHS = [1, 15, 16, 17, 30, 48, 49, 64, 65, 100, 128, 129, 160, 193, 210]
ACTIONS = ["ask"] * 4 + ["go_on"] * 8 + ["arrive"] * 3 + ["lose"] * 3 + ["hang_up"] * 2 + ["damage"] * 2 + ["change", "flush"]


class Traffic(Crowd):
    """The crowd of chapter 02 over storage: files get lost and damaged, transfers fail, storage is slow."""
    submit = step = cancel = evict = None                                      # one rule for all, so that no example lacks one

    @initialize(seed=st.uuids())
    def open(self, seed):
        self.requests, self.cancelled, self.seed, self.number = [], [], seed, 0
        rng = random.Random(str(seed))
        size = rng.choice([1, 4, 16])
        self.engine = build(
            self.base, blocks=-(-rng.choice([250, 400, 1000]) // size), block_size=size, chunk=rng.choice([16, 32, 48]),
            token_budget=rng.choice([3, 16, 64, 512]), max_running=rng.choice([4, 64]), cpu_chunks=rng.choice([5, 8, 30]),
            gpu_share=rng.choice([1.0, 1.0, 0.3]), disk_limit=rng.choice([1e9, 4e5]))
        self.slow, self.rng = 0.0, rng
        self.engine.loader.files.at = lambda step, _: self.slow and time.sleep(self.slow)
        self.engine.load_link.held = rng.random() < 0.5

    @rule(seed=st.uuids())
    def act(self, seed):
        self.number += 1
        rng = random.Random(f"{self.seed} {self.number} {seed}")
        getattr(self, rng.choice(ACTIONS))(rng)

    def ask(self, rng):
        submit = self.engine.submit
        fields = dict(save=rng.random() < 0.9, mode=rng.choice([None, "both", "load", "compute"]),
                      gpu_share=rng.choice([None, None, 0.1]))
        with mock.patch.object(self.engine, "submit", lambda *prompt, **others: submit(*prompt, **fields, **others)):
            Crowd.submit(self, text=rng.choice(TALK), length=rng.choice(LENGTHS), new=rng.choice([1, 5, NEW, NEW]),
                         n=rng.choice([1, 1, 1, 1, 2, 4]), salt=rng.choice(["", "", "", "a"]),
                         seed=rng.choice([None, None, 0, 1]))

    def go_on(self, rng):
        for _ in range(rng.choice([1, 2, 4, 8])):
            more = self.engine.step()
            self.whole()
            if not more:
                break

    def hang_up(self, rng):
        alive = [entry for entry in self.requests if entry[0].outcome is None]
        if alive:
            with mock.patch.object(self, "requests", [entry for entry in alive if entry[0].restoration] or alive):
                Crowd.cancel(self, rng.randrange(1 << 16), rng.random() < 0.5)

    def arrive(self, rng):
        """Some arrive, one after the other, and some fail."""
        for parcel in self.engine.load_link.under_way()[:rng.randint(0, 4)]:
            parcel.doomed |= rng.random() < 0.3
            parcel.arrive()

    def lose(self, rng):
        cached = list(self.engine.pool.cached)
        for block in cached[rng.randrange(len(cached)):] if cached and rng.random() < 0.3 else cached:
            self.engine.pool.forget(block)

    def damage(self, rng):
        files = sorted(path for path in self.engine.files.directories[0].glob("*.chunk") if path.is_file())
        for path in rng.sample(files, rng.randint(0, len(files) // 2)):
            try:
                DAMAGES[rng.choice(["missing", "truncated", "empty", "bit", "bit of the header", "pipe"])](path)
            except (OSError, IndexError):                                      # it went meanwhile, or is empty already
                continue
            happened["damaged"] += 1

    def change(self, rng):
        self.engine.load_link.held = rng.random() < 0.5
        self.engine.load_link.refuses, self.engine.save_link.refuses = rng.random() < 0.1, rng.random() < 0.1
        self.slow = rng.choice([0.0, 0.0, 1e-4, 1e-3])

    def flush(self, rng):
        self.slow, self.engine.load_link.held = 0.0, False
        self.engine.load_link.arrive()
        self.engine.flush(0.2)

    @invariant()
    def whole(self):
        self.engine.check_integrity()
        self.engine.pool.kv[:, :, list(self.engine.pool.free)] = NAN           # nobody may read it
        of_salt = {}
        for request, prompt, salt in self.requests:
            assert all(of_salt.setdefault(block, salt) == salt for block in request.table)
            if request.outcome is not None:
                self.right(request, prompt)
        self.requests = [entry for entry in self.requests if entry[0].outcome is None]

    def right(self, request, prompt):
        super().right(request, prompt)
        if isinstance(request.outcome, baseline.Result):
            happened[request.outcome.source] += 1

    def teardown(self):
        engine = self.engine
        self.flush(None)
        for _ in range(3000):
            if not engine.step():
                break
            self.whole()
        else:
            raise AssertionError("there is always more to do")
        engine.save_link.refuses = engine.load_link.refuses = False
        nothing_is_lost(engine)
        super().teardown()
        end(engine)
        happened.update({name: engine.counters()[name] for name in (
            "restorations", "chunks_saved", "chunks_dropped", "chunks_loaded", "chunks_computed", "chunks_missed",
            "transfer_errors", "file_errors", "file_evictions")})


def any_order(base, examples: int):
    """As it comes: making a failure smaller would take minutes. Add Phase.shrink to look into one."""
    Traffic.base = base
    run_state_machine_as_test(Traffic, settings=settings(
        max_examples=examples, stateful_step_count=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck)))


def test_in_any_order_nothing_is_lost_and_the_tokens_are_those_of_chapter_01(tiny_engine):
    happened.clear()
    any_order(tiny_engine, 25)
    often = ("answered", "miss", "gpu_hit", "storage", "cancelled", "evictions", "restorations", "chunks_saved", "chunks_loaded",
             "chunks_computed", "chunks_missed", "damaged")
    assert all(happened[name] >= 5 for name in often), happened
    seldom = ("mixed", "preemptions", "cancelled in restoration", "transfer_errors", "file_errors", "chunks_dropped",
              "file_evictions")
    assert sum(happened[name] > 0 for name in seldom) >= 5 and happened["ties"] <= 5, happened


def release_early(loader, restoration, plain=cake.Loader.drop):
    """What travels into its blocks holds none of them."""
    plain(loader, restoration)
    restoration.chunks = []


def test_in_some_order_blocks_that_a_restoration_does_not_hold_are_noticed(tiny_engine, monkeypatch):
    monkeypatch.setattr(cake.Loader, "drop", release_early)
    with pytest.raises(AssertionError):
        any_order(tiny_engine, 20)


# 8. Arithmetic ----------------------------------------------------------------------------------------------------

def test_one_speed_serves_one_after_the_other():
    device = Bandwidth((80.0,))                                                # ten bytes a microsecond
    assert device.arrival(1000, 5.0) == pytest.approx(5.0 + 1e-4)
    assert device.arrival(1000, 5.0) == pytest.approx(5.0 + 2e-4)             # behind the first
    assert device.arrival(1000, 9.0) == pytest.approx(9.0 + 1e-4)             # it was free
    assert device.arrival(0, 1.0) == pytest.approx(9.0 + 1e-4)
    began = time.perf_counter()
    device.restart()
    assert began <= device.began == device.free <= time.perf_counter()
    assert device.arrival(1000, 0.0) == pytest.approx(device.began + 1e-4)    # nothing is read before it begins


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0.5, 3.0, 40.0, 700.0, 12.5]), min_size=1, max_size=4), st.sampled_from([0.01, 0.1, 1.0]),
       st.lists(st.tuples(st.integers(0, 300000), st.floats(0, 0.5)), min_size=1, max_size=6))
def test_a_trace_gives_as_many_bytes_as_a_slow_integration_of_it(speeds, seconds, asked_for):
    device, now, free = Bandwidth(tuple(speeds), seconds), 0.0, 0.0
    for size, pause in asked_for:
        now += pause
        start, arrival = max(now, free), device.arrival(size, now)
        assert arrival >= start and arrival == device.free
        # So many bytes go over it between the two: slot for slot
        bytes_, number = 0.0, int(start / seconds) - 1
        while number * seconds < arrival:
            overlap = min(arrival, (number + 1) * seconds) - max(start, number * seconds)
            bytes_ += max(0.0, overlap) * speeds[number % len(speeds)] * 1e6 / 8
            number += 1
        assert bytes_ == pytest.approx(size, rel=1e-6, abs=1.0 + max(speeds) * 1e6 / 8 * 1e-9)
        free = arrival


def test_pieces_of_a_chunk_arrive_when_all_of_it_would():
    whole, pieces = Bandwidth((8.0, 80.0, 2.0), 0.05), Bandwidth((8.0, 80.0, 2.0), 0.05)
    assert [pieces.arrival(size, 0.02) for size in (40000,) * 8][-1] == pytest.approx(whole.arrival(320000, 0.02))


@pytest.mark.parametrize("mode", ["both", "load"])
def test_modelled_storage_changes_no_token(make, right, mode):
    engine, before = saved(make, right, mode=mode, bandwidth=Bandwidth((200.0, 2000.0, 50.0), 0.002))
    asked_for, plain = [], engine.loader.bandwidth.arrival
    engine.loader.bandwidth.arrival = lambda size, since: asked_for.append(size) or plain(size, since)
    again = asked(engine)
    assert again.outcome.tokens == right(PROMPT) and difference(device_kv(engine, PROMPT), before) < 1e-5
    sides = all_there(again)
    assert sum(asked_for) % engine.loader.chunk_bytes == 0
    assert sum(asked_for) // engine.loader.chunk_bytes >= sides.count("load") and (mode == "both" or sides == ["load"] * 12)
    for chunk in again.restored.chunks:
        if chunk.side == "load":                                               # no sooner than the model says
            assert chunk.storage[1] - chunk.storage[0] >= 0 and chunk.transfer.span()[1] >= chunk.storage[1] - 1e-3
    assert "modelled storage, 200:2000:50 Mbit/s, 0.002 s each" == again.outcome.storage


@pytest.mark.parametrize("text, mbps, seconds", [("200", (200.0,), 0.1), ("200:2000:50", (200.0, 2000.0, 50.0), 0.1),
                                                 ("1:2@0.5", (1.0, 2.0), 0.5)])
def test_a_trace_is_read_from_the_command_line(text, mbps, seconds):
    device = cake.trace(text)
    assert (device.mbps, device.seconds) == (mbps, seconds)


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1::2", "1@0", "1@", "nan", "inf", "1@x"])
def test_a_trace_that_makes_no_sense_is_refused(text):
    with pytest.raises((ValueError, argparse.ArgumentTypeError)):
        cake.trace(text)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_rows_of_names_each_row_from_at_on_once_and_in_its_slot(size, count, data):
    blocks = data.draw(st.permutations(range(12)))[:count]
    at = data.draw(st.integers(0, size * count))
    pieces = cake.rows_of(blocks, size, at)
    found = {row + offset: slot + offset for slot, row, rows in pieces for offset in range(rows)}
    assert sum(rows for *_, rows in pieces) == len(found) and all(rows > 0 for *_, rows in pieces)
    assert found == {row: blocks[row // size] * size + row % size for row in range(at, size * count)}
    runs = 1 + sum(b != a + 1 for a, b in zip(blocks[at // size:], blocks[at // size + 1:])) if at < size * count else 0
    assert len(pieces) == runs


SPANS = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(SPANS, st.data())
def test_two_pointers_meet_where_a_simulation_of_them_does(computing, data):
    loading = data.draw(st.lists(st.floats(0.0, 10.0), min_size=len(computing), max_size=len(computing)))
    computed, loaded = ([sum(spans[:count]) for count in range(len(computing) + 1)] for spans in (computing, loading))
    seconds, count = cake.meet(computed, loaded)
    # Both go on until together they have all: each is done with a chunk at these points in time
    when = next(now for now in sorted({*computed, *loaded}) if
                sum(end <= now for end in computed) + sum(end <= now for end in loaded) - 2 >= len(computing))
    assert seconds == when and 0 <= count <= len(computing)
    assert max(computed[count], loaded[len(computing) - count]) == seconds
    assert seconds <= min(computed[-1], loaded[-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 15))
def test_seconds_computed_divide_steps_by_their_operations(tiny_engine, counts, at):
    start, end = 32 + at, 32 + 16 * 6
    engine = SimpleNamespace(chunk=16, flops=lambda first, last: paged_flops(tiny_engine, first, last))
    restoration, now, first, ends = restoration_of(2, start, end, "compute", 100.0), 100.0, start, {}
    restoration.chunks = [SimpleNamespace()] * 6
    for count in counts:
        count = min(count, end - first)
        if count == 0:
            break
        restoration.steps.append((first, count, now, now + 0.5))
        for border in range(48, end + 1, 16):
            if first < border <= first + count:
                ends[border] = now + 0.5 * engine.flops(first, border) / engine.flops(first, first + count) - 100.0
        first, now = first + count, now + 0.75
    assert cake.seconds_computed(engine, restoration) == pytest.approx([0.0, *(ends[border] for border in sorted(ends))])


def restoration_of(first, start, end, mode, began=0.0):
    known = dict(first=first, start=start, end=end, mode=mode, began=began, moved=began, share=1.0)
    return Restoration(**{each.name: known[each.name] for each in fields(Restoration) if each.name in known})


def paged_flops(base, first, last):
    return offload.MeasuringEngine.flops(base, first, last)


def test_seconds_loaded_are_those_of_the_second_hop():
    restoration = restoration_of(0, 0, 64, "load", 10.0)
    spans = [(10.5, 14.0), None, (10.1, 11.0), (11.0, 12.5)]
    restoration.chunks = [SimpleNamespace(transfer=span and SimpleNamespace(span=lambda span=span: span)) for span in spans]
    assert cake.seconds_loaded(restoration) == [0.0, 1.0, 2.5, 4.0]


def test_measured_seconds_belong_to_what_was_measured(make, right):
    engine, _ = saved(make, right, token_budget=24)
    alone, loading = (asked(engine, mode=mode, save=False).restored for mode in ("compute", "load") if not forget_device(engine))
    computed, loaded = cake.seconds_computed(engine, alone), cake.seconds_loaded(loading)
    assert len(computed) == len(loaded) == 13 and computed == sorted(computed) and loaded == sorted(loaded)
    assert 0 < cake.meet(computed, loaded)[0] <= min(computed[-1], loaded[-1])


def chunk_of(side=None, buffer=None, at=0):
    return SimpleNamespace(side=side, buffer=buffer, at=at)


@pytest.mark.parametrize("width, bar", [(64, "##-#>..=="), (9, "##-#>..=="), (3, "##."), (1, "#"), (5, "#-#.=")])
def test_the_bar_shows_who_brings_what(width, bar):
    restoration = restoration_of(0, 0, 0, "both", 0.0)
    restoration.chunks = [chunk_of("compute"), chunk_of("compute"), chunk_of("device"), chunk_of(at=3), chunk_of(buffer=0, at=2),
                          chunk_of(), chunk_of(), chunk_of("load"), chunk_of("load", buffer=1)]
    drawn = restoration.bar(width)
    assert len(drawn) == min(width, 9)
    assert drawn == (bar if width >= 9 else "".join("##-#>..=="[column * 9 // width] for column in range(width)))
    restoration.chunks = []
    assert restoration.bar() == ""


@pytest.mark.parametrize("estimate", [(math.inf, 1e-3), (1e-3, math.inf), (math.inf, math.inf), (0.0, 1e-3)])
def test_a_pace_that_nobody_knows_yet_makes_short_steps(make, right, monkeypatch, estimate):
    engine = make()
    asked(engine, PROMPT)
    forget_device(engine)
    monkeypatch.setattr(engine.loader, "estimate", lambda restoration: estimate)
    monkeypatch.setattr(engine, "waits", lambda request, chunk: False)
    request = asked(engine, PROMPT)
    assert request.outcome.tokens == right(PROMPT)


@pytest.mark.parametrize("rest, loader_is_first", [(1e-6, True), (1e6, False), (math.inf, False)])
def test_a_half_loaded_chunk_goes_to_whoever_will_be_done_first(make, monkeypatch, rest, loader_is_first):
    engine = make()
    asked(engine, PROMPT)
    forget_device(engine)
    seen = []
    waits = engine.waits

    def noted(request, chunk):
        with monkeypatch.context() as patch:                    # all that is left is being read, and computing it takes a second
            patch.setattr(engine.loader, "estimate", lambda restoration: (rest, 0.0))
            patch.setattr(engine.loader, "stalled", lambda restoration: False)
            patch.setattr(engine, "seconds_per_token", lambda request, start: 1.0)
            seen.append(waits(request, chunk))
        return False
    monkeypatch.setattr(engine, "waits", noted)
    asked(engine, PROMPT)
    assert seen and seen[0] is loader_is_first
