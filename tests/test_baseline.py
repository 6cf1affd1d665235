"""Chapter 01: its loop, compared with `transformers`, and its queue of requests."""

import json
from argparse import Namespace

import pytest
import torch
from conftest import TINY, load, write_model

from common.requests import ClientDisconnected, Request
from shell import limits
from tests.support.engines import answer, baseline, submit, until_over

PROMPT = torch.randint(5, TINY["vocab_size"], (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def model(frontend):
    return frontend.model


def labels(request) -> list[str]:
    return [span.label for span in request.timeline.spans]


# 1. The loop -----------------------------------------------------------------------------------

@pytest.mark.parametrize("chunk", [1, 37, 149, 150, 151])
def test_chunks_of_any_size_give_the_same_tokens(model, chunk):
    request = answer(model, PROMPT, 12, chunk=chunk)
    assert request.new == answer(model, PROMPT, 12).new
    sizes = [min(chunk, 150 - start) for start in range(0, 150, chunk)]
    assert labels(request) == [f"prefill {size}" for size in sizes] + ["decode"] * 11


@pytest.mark.parametrize("chunk", [40, 512])
def test_without_a_cache_each_token_costs_the_whole_prefill(model, chunk):
    (request,) = baseline.Engine(model, chunk=chunk, kv_cache=False).generate([Request(PROMPT[:60], 5)])
    assert request.new == answer(model, PROMPT[:60], 5).new
    sizes = [[min(chunk, length - start) for start in range(0, length, chunk)] for length in range(60, 65)]
    assert labels(request) == [f"prefill {size}" for row in sizes for size in row]


def test_memory_that_was_not_written_is_never_read(model, monkeypatch):
    right, empty = answer(model, PROMPT, 12).new, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, torch.nan, **kind))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **kind: empty(tensor, **kind).fill_(torch.nan))
    assert baseline.KVCache(model, 3).v.isnan().all()
    assert answer(model, PROMPT, 12, chunk=37).new == right


def test_the_comparison_ignores_generation_config(tmp_path):
    frontend = load(folder := write_model(tmp_path))
    request = answer(frontend.model, PROMPT[:20], 12, end_tokens=frontend.end_tokens)
    odd = dict(repetition_penalty=1.5, no_repeat_ngram_size=1, suppress_tokens=request.new[:1], do_sample=True, top_k=5,
               max_length=21, min_new_tokens=2, bad_words_ids=[request.new[1:2]], eos_token_id=request.new[2])
    (folder / "generation_config.json").write_text(json.dumps(odd))
    assert baseline.equal_to_transformers(frontend.model, str(folder), [request])


def test_an_answer_takes_at_most_a_quarter_of_free_memory(model, monkeypatch):
    monkeypatch.setattr(limits, "free_host_memory", lambda: 4 * 2 * 40 * baseline.KVCache(model, 1).k.nbytes)
    (request,) = baseline.make_engine(model, Namespace(explain=False)).generate([Request(PROMPT[:30], 200)])
    assert len(request.tokens) == 41 and request.finish_reason == "length"  # the last token needs no slot


# 2. One request after another ------------------------------------------------------------------

def test_requests_are_answered_in_their_order(model):
    engine, prompts = baseline.Engine(model), [PROMPT[:length] for length in (50, 3, 20)]
    asked = engine.generate([Request(prompt, 6) for prompt in prompts])
    times = [time for request in asked for time in request.times]
    assert times == sorted(times) and [request.id for request in asked] == [1, 2, 3]
    assert [request.new for request in asked] == [answer(model, prompt, 6).new for prompt in prompts]
    assert not engine.busy and not any(request.found for request in asked)


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_hang_up_frees_the_queue_after_at_most_one_more_chunk(model, steps):
    """The prompt has four chunks: the client leaves in the queue, in the prefill, or in the answer."""
    engine = baseline.Engine(model, chunk=40)
    under_way, in_line, last = (Request(prompt, 8) for prompt in (PROMPT, PROMPT, PROMPT[:30]))
    submit(engine, under_way, in_line, last, steps=steps)
    for request in (under_way, in_line):
        engine.cancel(request, ClientDisconnected("gone"))
        engine.cancel(request, ClientDisconnected("gone twice"))
    until_over(engine, last)
    assert str(under_way.outcome) == str(in_line.outcome) == "gone"
    assert len(under_way.timeline.spans) == steps and not in_line.timeline.spans
    assert last.new == answer(model, PROMPT[:30], 8).new and not engine.busy
    assert (engine.counts["finished"], engine.counts["cancelled"], engine.counts["failed"]) == (1, 2, 0)
