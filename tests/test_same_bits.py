"""--same-bits: all K, V and logits are chapter 01's, to the last bit."""

import re
import runpy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from common.requests import Request
from shell import bits
from shell.config import ModelError
from shell.linear import FastLinear
from tests.support import engines, traffic
from tests.support.bits import exact_model, kept_logits, watch
from tests.support.engines import baseline, draw, make, paged

FAMILIES = dict(
    tied=dict(kv_heads=4, tie_word_embeddings=True), biases=dict(qkv_bias=True, output_bias=True, mlp_bias=True),
    norms=dict(qk_norm=True, no_rope_layers=(1,)), one_kv_head=dict(kv_heads=1), plain_weights=dict(copies=False))  # fmt: skip


@pytest.fixture(autouse=True)
def logits():
    threads = torch.get_num_threads()
    with kept_logits(), torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype, threads", [("float32", 1), ("float32", 2), ("bfloat16", 2), ("float16", 1)])
@pytest.mark.parametrize("cache", [*engines.CACHES, "blocks of four kinds"])
def test_a_restored_cache_has_the_bits_of_a_computed_one(cache, dtype, threads):
    """Also after evictions, preemptions, cancellations and failing copies."""
    torch.set_num_threads(threads)
    counts, hybrid = Counter(), cache not in engines.CACHES
    model = exact_model(getattr(torch, dtype), hybrid, kv_heads=4 if hybrid else 2)

    def watched(name, blocks, size, tier, **options):
        runner = engines.hybrid_runner(blocks, size, model=model) if hybrid else None
        return watch(make(None if hybrid else name, blocks, size, model, runner=runner, tier=tier, **options), counts)

    told = traffic.run(cache, 12, seed=3, share=0 if hybrid else 0.05, make=watched, model=model, longest=200, answer=6)
    assert counts["compared"] > 5_000 and not counts["different"] and not told["wrong"], (counts, told)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_keeps_its_bits_in_any_batch(family, dtype):
    """One marked request has the same logits in batches of every size, in portions, and as a single row."""
    model, counts = exact_model(getattr(torch, dtype), **FAMILIES[family]), Counter()
    marked, others = draw(engines.random.Random(0), 150), [draw(engines.random.Random(seed), 40 * seed) for seed in range(1, 8)]
    for neighbours, budget in (0, 512), (0, 37), (1, 512), (3, 64), (7, 1024):
        engine = watch(paged.Engine(paged.Runner(model, 200), None, budget), counts)
        engine.generate([Request(marked, 8), *(Request(one, 9, options=dict(cache_salt="a")) for one in others[:neighbours])])
    assert counts["compared"] > 10**5 and not counts["different"], counts


def test_a_decoded_token_has_the_logits_of_a_prefill():
    model = exact_model(torch.float32)
    decoded, filled = (Request(draw(engines.random.Random(0), 100), 30) for _ in range(2))
    for request, kv_cache in (decoded, True), (filled, False):
        baseline.Engine(model, kv_cache=kv_cache).generate([request])
    assert len(decoded.logits) == len(filled.logits) == 30 and all(map(torch.equal, decoded.logits, filled.logits))


def test_a_seed_draws_the_same_tokens_beside_others_in_16_bits():
    model, prompt = exact_model(torch.bfloat16), draw(engines.random.Random(0), 90)
    sampled = partial(Request, prompt, 24, temperature=1.0, seed=7)
    alone = make("none", model=model).generate([sampled()])[0].new
    crowd = [Request(draw(engines.random.Random(seed), 20 * seed), 40, temperature=1.0) for seed in range(1, 7)]
    assert make("none", model=model).generate([sampled(), *crowd])[0].new == alone and len({*alone}) > 5


@pytest.mark.parametrize("broken", ["products", "attention"])
def test_a_machine_whose_kernels_break_the_rule_refuses_the_option(broken, monkeypatch):
    bits.check(model := exact_model(torch.float32))
    if broken == "products":
        monkeypatch.setattr(FastLinear, "forward", lambda linear, x: F.linear(x, linear.weight) + 1e-6 * len(x))
    else:
        right = bits.attention
        monkeypatch.setattr(bits, "attention", lambda q, k, v, mask: right(q, k, v, mask) + 1e-6 * len(q))
    with pytest.raises(ModelError, match="leave the option out"):
        bits.check(model)


def test_the_lessons_programs_print_its_results(tmp_path, capsys):
    page = (ROOT / "docs" / "lessons" / "why_bits_differ.md").read_text()
    (tmp_path / "programs.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, re.S)))
    runpy.run_path(str(tmp_path / "programs.py"))
    one, four, _, _, whole_blocks = capsys.readouterr().out.split()  # the other two depend on where the numbers lie
    assert (one, four, whole_blocks) == ("False", "True", "True")
