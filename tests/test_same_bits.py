"""--same-bits: all K, V and logits are chapter 01's, to the last bit."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, write_model

from common.llama import attention, causal_mask
from common.requests import Request
from shell import bits, limits, linear
from shell.config import ModelError
from shell.linear import FastLinear
from tests import test_bidirectional, test_tiered
from tests.support import engines, forked, traffic
from tests.support.bits import exact_model, kept_logits, watch
from tests.support.engines import baseline, draw, make, paged

DTYPES = torch.float32, torch.bfloat16, torch.float16
FAMILIES = dict(
    tied=dict(kv_heads=4, tie_word_embeddings=True), biases=dict(qkv_bias=True, output_bias=True, mlp_bias=True),
    norms=dict(qk_norm=True, no_rope_layers=(1,)), one_kv_head=dict(kv_heads=1), plain_weights=dict(copies=False),
    groups=dict(group=32))  # fmt: skip


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
def test_every_family_keeps_its_bits_in_any_batch(family, dtype, monkeypatch):
    """One marked request has the same logits in batches of every size, in portions, and as a single row."""
    monkeypatch.setattr(limits, "pad_limits", lambda _: (1 << 20, 1 << 17))  # bytes, so the batches have several groups
    model, counts = exact_model(getattr(torch, dtype), **FAMILIES[family]), Counter()
    marked, others = draw(engines.random.Random(0), 150), [draw(engines.random.Random(seed), 40 * seed) for seed in range(1, 8)]
    for neighbours, budget in (0, 512), (0, 37), (1, 512), (3, 64), (7, 1024):
        engine = watch(paged.Engine(paged.Runner(model, 200), None, budget), counts)
        engine.generate([Request(marked, 8), *(Request(one, 9, options=dict(cache_salt="a")) for one in others[:neighbours])])
    assert counts["compared"] > 10**5 and not counts["different"], counts


def test_a_demo_with_large_heads_has_equal_bits_or_refuses_the_option(tmp_path):
    """In a process of its own, because MKL has to be asked before its first product."""
    folder, report, about = write_model(tmp_path / "model", head_dim=128), tmp_path / "report.json", Path("/proc/cpuinfo")
    done = forked.run(tmp_path, "02_paged_kv.py", "--model", folder, "--same-bits", "--demo", "--rounds", 1, "--json", report, MKL_CBWR="")
    intel = about.exists() and "GenuineIntel" in about.read_text()
    found = json.loads(report.read_text())["bits"] if intel or done.returncode == 0 else {}
    assert found.get("equal") and found["compared"] > 5000 or not found and bits.REFUSED in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache, budget", [("host", 1024), ("hidden", 8192)])
def test_long_contexts_and_large_budgets_keep_the_bits(cache, budget, dtype, monkeypatch):
    monkeypatch.setattr(engines, "CONTEXT", 4096)
    engine, text = make(cache, 400, model=exact_model(dtype), token_budget=budget), draw(engines.random.Random(0), 2600)
    watch(engine, counts := Counter())
    for _ in range(2):  # the second time, the texts come back
        asked = [Request(text[:count], 3) for count in (2600, 700, 99)]
        engine.generate(asked)
        engines.evict(engine)
    assert counts["compared"] > 10**6 and not counts["different"] and sum(asked[0].found.values()) > 2048, counts


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ends_that_meet_inside_a_block_keep_the_bits(dtype, monkeypatch):
    monkeypatch.setattr(engines, "tiny_model", lambda: exact_model(dtype))
    monkeypatch.setattr(engines.ORACLE, "judge", lambda request: "")  # the bits are compared instead
    engine, _, storage = test_bidirectional.engine_for(budget=test_bidirectional.CHUNK - 12)
    watch(engine, counts := Counter())
    request = test_bidirectional.submit(engine, steps=1)
    storage.deliver(6)
    engines.until_over(engine, request)
    with test_tiered.only_stored(480, "both_ends") as (tiers, shelf, prompt):
        test_tiered.read_in_steps(watch(tiers, counts), shelf)
        tiers.token_budget = 23  # tokens, so steps end inside a block
        found = engines.ask(tiers, prompt).found["storage"]
    assert request.found == {"storage": test_bidirectional.SIX - test_bidirectional.CHUNK + 12} and 0 < found < 464 and counts["compared"] > 10**5 and not counts["different"], counts


@pytest.mark.skipif(os.name != "posix", reason="ranks are POSIX processes here")
@pytest.mark.parametrize("keep, dtype", [("kv", "float32"), ("states", "bfloat16")])
def test_two_ranks_have_the_bits_of_a_request_alone_on_two_ranks(keep, dtype, tiny_folder, tmp_path):
    asked = "--ranks", 2, "--cache", keep, "--dtype", dtype, "--model", tiny_folder, "--requests", 12, "--threads", 1
    done = forked.run(tmp_path, "-m", "tests.support.bits", *asked)
    assert done.returncode == 0 and re.search(r"[1-9]\d* restored, .*[1-9]\d* compared, 0 different", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_single_rows_has_the_bits_of_a_prefill_without_grouped_queries(dtype):
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    q, k, v = (torch.randn(400, 4, 64, generator=generator).to(dtype) for _ in range(3))
    rows = [attention(q[end - 1 : end], k[:end], v[:end], causal_mask(1, end, cpu, dtype, True)) for end in range(1, 401)]
    assert torch.equal(attention(q, k, v, causal_mask(400, 400, cpu, dtype, True)), torch.cat(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoded_token_has_the_log_probabilities_of_a_prefill_in_batches_of_every_size(dtype):
    model, marked = exact_model(dtype), draw(engines.random.Random(0), 100)
    baseline.Engine(model, kv_cache=False).generate([filled := Request(marked, 6)])
    for size in range(1, 18):
        others = [Request(draw(engines.random.Random(other), 9 * other), 7) for other in range(1, size)]
        paged.Engine(paged.Runner(model, 200)).generate([decoded := Request(marked, 6), *others])
        theirs, ours = (torch.stack(one.logits).log_softmax(-1) for one in (filled, decoded))
        assert torch.equal(theirs, ours), size


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_seed_draws_the_same_tokens_beside_others_in_16_bits(dtype):
    model, prompt = exact_model(dtype), draw(engines.random.Random(0), 90)
    sampled = partial(Request, prompt, 24, temperature=1.0, seed=7)
    alone = make("none", model=model).generate([sampled()])[0].new
    crowd = [Request(draw(engines.random.Random(seed), 20 * seed), 40, temperature=1.0) for seed in range(1, 7)]
    assert make("none", model=model).generate([sampled(), *crowd])[0].new == alone and len({*alone}) > 5


@pytest.mark.parametrize("broken, group", [("products", None), ("attention", None), ("rows", 64), ("threads", 32)])
def test_a_machine_whose_kernels_break_the_rule_multiplies_in_groups_or_refuses_the_option(broken, group, monkeypatch):
    torch.set_num_threads(2)
    usual = bits.check(model := exact_model(torch.float32))
    forward, product, attention = FastLinear.forward, linear.product, bits.attention
    if broken == "products":
        monkeypatch.setattr(FastLinear, "forward", lambda linear, x: forward(linear, x) + 1e-6 * len(x))
    elif broken == "attention":
        monkeypatch.setattr(bits, "attention", lambda q, k, v, mask: attention(q, k, v, mask) + 1e-6 * len(q))
    else:
        threads = lambda x: torch.get_num_threads() if broken == "threads" and len(x) > 32 else 1  # noqa: E731
        monkeypatch.setattr(linear, "product", lambda x, *rest: product(x, *rest) + 1e-6 * len(x) * threads(x))
    with pytest.raises(ModelError, match="leave the option out") if group is None else nullcontext():
        found = bits.check(model)
        assert {part.group for part in model.modules() if isinstance(part, FastLinear)} == {group}
        assert found != usual  # other blocks than those of a machine with other kernels


def test_chapter_08_multiplies_in_the_groups_of_its_model(monkeypatch):
    model, product, rows = exact_model(torch.float32, True, kv_heads=4, group=32), linear.product, set()
    monkeypatch.setattr(linear, "product", lambda x, *rest: rows.add(len(x)) or product(x, *rest))
    make(None, model=model, runner=engines.hybrid_runner(40, model=model)).generate([Request(draw(engines.random.Random(0), 50), 3)])
    assert rows == {32}


def test_the_lessons_programs_print_its_results(tmp_path):
    page = (ROOT / "docs" / "lessons" / "why_bits_differ.md").read_text()
    (tmp_path / "programs.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, re.S)))
    plain = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}  # as a class runs them
    printed = subprocess.run([sys.executable, tmp_path / "programs.py"], env=plain, capture_output=True, text=True, check=True).stdout
    one, _, _, _, whole_blocks = printed.split()  # the others depend on the processor
    assert (one, whole_blocks) == ("False", "True")


@pytest.mark.parametrize("requests, same, rows", [(1, False, 1), (1, True, 4), (3, False, 4), (4, False, 4), (5, False, 8)])
def test_the_rows_of_a_step_are_padded_before_the_first_layer(requests, same, rows, monkeypatch):
    model, seen = exact_model(torch.float32), []
    monkeypatch.setattr(model, "same_bits", same)
    hook, engine = model.layers[0].register_forward_pre_hook(lambda layer, given: seen.append(len(given[0]))), make(model=model, blocks=200)
    engine.lower_tier.before_layer = lambda index, hidden, batch: index or seen.append(len(hidden))
    engine.generate([Request(draw(engines.random.Random(number), 20), 3) for number in range(requests)])
    hook.remove()
    assert seen[-2:] == [requests, rows], "a Cache sees the tokens only"
