"""Chapter 05: plans, saving by a plan, and restoring by it."""

import random
from unittest import mock

import pytest

from common.link import Transfer
from common.requests import BadRequest, Request
from shell import cli, hardware
from shell.machine import flops, machine_of
from tests.support import engines
from tests.support.engines import ORACLE, ask, ask_and_evict, chunk_files, draw, planned, wait_until_idle
from tests.support.serving import eventually

Costs, best_plan, closed_form = planned.LayerCosts, planned.best_plan, planned.closed_form
plan_seconds, bound_seconds = planned.plan_seconds, planned.bound_seconds
PROMPT = draw(random.Random(0), 150)


def engine_for(plan="RHK", storage=None, blocks=256, bandwidth=2e9, model=None, **options):
    cache = planned.PlannedCache(blocks, bandwidth, storage, plan)
    return engines.make(cache, 64, model=model, **options), cache


# 1. The planner --------------------------------------------------------------------------------

def test_a_shorter_history_is_restored_no_later_than_by_chapter_03():
    long, short = Costs(80.0, 11.0, 5.0, 11.0, 5.0), Costs(40.0, 6.0, 3.0, 5.5, 5.0)
    assert plan_seconds(best_plan(12, long), short) > plan_seconds("K" * 12, short)
    both = best_plan(12, long, short)
    assert plan_seconds(both, short) <= plan_seconds("K" * 12, short) - planned.MIX
    assert plan_seconds(both, long) < plan_seconds("K" * 12, long)
    assert best_plan(12, long, Costs(40.0, 6.0, 3.0, 5.5, 99.0)) == "K" * 12, "no plan makes a dear question cheaper"


@pytest.mark.parametrize("letters, seconds", [
    ("KKK", 6 + 0.5),  # layers arrive at 2, 4, 6; then the question passes the last layer
    ("HHH", 1 + 3 * (3 + 0.5)),  # the first arrives at 1; then projecting is slower than the link
    ("RKK", 4 + 0.5),
    ("HKK", 1 + 3 + 0.5 * 3),  # the K layers arrive at 3 and 5
    ("RRH", 7 + 3 + 0.5 * 2 + 3 + 0.5),  # recompute, project, 2 layers of the question, project, 1 layer of it
    ("RHK", 3 + 0.5 + 3 + 0.5 + 0.5),  # K arrives at 3, while H is projected
])  # fmt: skip
def test_the_seconds_of_a_plan_equal_a_computation_by_hand(letters, seconds):
    assert plan_seconds(letters, Costs(7.0, 3.0, 1.0, 2.0, 0.5)) == pytest.approx(seconds)


def test_the_plan_with_the_least_busy_lane_is_taken_among_nearly_equal_ones():
    costs = Costs(7.0, 3.0, 1.0, 2.0, 0.5)
    assert [planned.busier_lane(letters, costs) for letters in ("KKK", "HKK", "RRHK")] == [6.0, 5.0, 15.0]
    long, short = Costs(43.0, 5.75, 5.75, 11.5, 3.4), Costs(21.5, 2.9, 2.9, 5.8, 3.4)
    assert (best_plan(8, long), best_plan(8, long, short)) == ("RHHHHKKK", "RHHHKKKK")
    assert plan_seconds("RHHHKKKK", long) <= plan_seconds("RHHHHKKK", long) / planned.BETTER
    slow, short = Costs(46.9, 6.9, 17.7, 35.3, 5.8), Costs(21.6, 3.5, 8.8, 17.7, 5.8)
    assert planned.busier_lane("RHHHHHHK", short) < planned.busier_lane("RHHHHHHH", short)
    assert best_plan(8, slow, short) == "RHHHHHHH", "no slower than chapter 04"


def test_a_longer_history_is_restored_nearly_as_fast_as_by_chapter_04():
    long, short, longer = (Costs(recompute, 8 * times, 8 * times, 16 * times, 6.5) for times, recompute in ((1, 40), (0.5, 17), (2, 88)))
    without, chosen = best_plan(8, long, short), best_plan(8, long, short, longer)
    assert (without, chosen) == ("RHHKKKKK", "RHHHKKKK")
    for letters, fast in (without, False), (chosen, True):
        assert (plan_seconds(letters, longer) <= planned.LOSS * plan_seconds("RHHHHHHH", longer)) == fast
    assert 1.0 < plan_seconds(chosen, longer) / plan_seconds("RHHHHHHH", longer), "a little slower is allowed"
    dear = Costs(88.0, 1.0, 1.0, 99.0, 9.0)
    assert best_plan(3, Costs(9.0, 9.0, 9.0, 1.0, 0.1), Costs(9.0, 9.0, 9.0, 1.0, 0.1), dear) == "KKK", "the only plan that is left stays"


def test_the_best_plan_is_the_fastest_of_all_and_none_is_below_the_bound():
    rng = random.Random(1)
    for _ in range(200):
        layers, costs = rng.randrange(1, 9), Costs(*(10 ** rng.uniform(-3, 0) for _ in Costs._fields))
        plans = ["R" * r + "H" * h + "K" * (layers - r - h)
                 for r in range(layers) for h in range(layers - r + 1)]  # fmt: skip
        best = best_plan(layers, costs)
        assert best in plans and len(closed_form(layers, costs)) == layers
        assert plan_seconds(best, costs) == min(plan_seconds(letters, costs) for letters in plans)
        assert plan_seconds(best, costs) <= plan_seconds("K" * layers, costs), "a plan is never slower than chapter 03"
        assert plan_seconds(best, costs) >= bound_seconds(layers, costs) * 0.999
    endless = bound_seconds(101, Costs(1e9, 1.0, 1.0, 3.0, 0.0))
    assert endless == pytest.approx(100, rel=0.02), "one kind of layer keeps both lanes busy"


# 2. The cache ----------------------------------------------------------------------------------

@pytest.mark.parametrize("plan", ["KKK", "HHH", "RRK", "HKK", "RHK", "RRH"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_every_plan_gives_the_same_tokens(plan, kv_heads):
    model = engines.tiny_model(1, kv_heads)
    engine, cache = engine_for(plan, model=model, block_size=4, token_budget=48)
    oracle, talk = engines.Oracle(model), PROMPT
    for turn in range(3):
        request = ask(engine, talk, 6)
        assert oracle.judge(request) == "equal"
        assert request.found.get("cpu", 0) == ((len(talk) - 6) // 4 * 4 if turn else 0), "all full blocks of the earlier turns"
        talk = request.tokens + draw(random.Random(turn), 5)
        engines.evict(engine)
    engines.check_pools(engine)


def test_a_plan_keeps_no_more_bytes_than_it_needs():
    states, kv = 16 * 64 * 4, 16 * 2 * 32 * 4  # bytes of a block's states, and of its K and V, per layer
    for plan, size in dict(HHH=3 * states, RHH=2 * states, RRK=kv, HKK=states + 2 * kv).items():
        assert engine_for(plan)[1].store.pool.block_bytes == size


def test_states_are_copied_before_k_and_v_and_recomputing_comes_first():
    engine, cache = engine_for("RHK")
    ask_and_evict(engine, PROMPT, 1)
    order, copy = [], cache.load_link.copy
    cache.load_link.copy = lambda *what: order.append(what[2]) or copy(*what)
    for step, does in ("project", cache.project), ("recompute", cache.recompute):
        setattr(cache, step, lambda *what, step=step, does=does: order.append(step) or does(*what))
    plan = ask(engine, PROMPT + [3], 1).timeline.plan
    assert order == ["layer 1", "layer 2", "recompute", "project", "project"] and plan["rows"] == [["layers", "RHK"]]
    costs = Costs(**{name: ms / 1e3 for name, ms in plan["costs_ms"].items()})
    assert plan["predicted_ms"] == pytest.approx(1e3 * plan_seconds("RHK", costs))


def test_recomputing_pauses_between_portions_while_others_decode():
    engine, _ = engine_for("RRK", token_budget=32)
    ask_and_evict(engine, PROMPT, 1)
    decoding, back = Request(draw(random.Random(3), 10), 40), Request(PROMPT + [3], 2)
    engines.submit(engine, decoding, steps=1)
    engine.submit(back)
    eventually(lambda: back.new or engine.step())
    assert len(decoding.new) > 5, "150 tokens are recomputed in portions of 32"
    engines.until_over(engine, decoding, back)
    assert ORACLE.judge(decoding) == ORACLE.judge(back) == "equal" and back.found == {"cpu": 144}


def test_an_estimate_excludes_the_question():
    engine, cache = engine_for("KKK", bandwidth=1e7)
    ask(engine, PROMPT, 1)
    wait_until_idle(engine)
    cache.question = 1e15  # operations; the question follows in either case
    request = Request(PROMPT + [3], 1)
    engine.block_keys.extend(request.chain, request.tokens, request.salt)
    assert cache.match(request).seconds == pytest.approx(3 * 144 * 2 * 32 * 4 / 1e7, rel=0.05)


@pytest.mark.parametrize("share, source", [(0.3, "disk_hit"), (0.6, "disk_hit"), (0.9, "miss")])
def test_an_estimate_includes_reading_once(share, source):
    """The estimates are set to about an hour, so real times do not matter."""
    engine, cache = engine_for("RHK", chunk_files(), always_restore=False)
    engine.lower_tier.estimates.learn = lambda *work: None
    engine.lower_tier.estimates.computing.samples.clear()
    engine.lower_tier.estimates.computing.record(flops(engine.model.config, 0, 144), 3600.0)
    ask_and_evict(engine, PROMPT, 1)
    engine.evict("host")
    (storage,) = cache.storage.storages
    storage.measured.samples.clear()
    storage.measured.record(9 * cache.store.pool.block_bytes, share * 3600.0)
    request = ask(engine, PROMPT + [3], 1)
    assert request.source == source, request.decisions


def test_the_plan_of_stored_files_is_kept_unless_another_one_is_named(monkeypatch, tmp_path):
    costs = Costs(9.0, 1.0, 1.0, 2.0, 0.0)
    monkeypatch.setattr(planned.PlannedCache, "costs", lambda cache, *span: costs)
    for plan, letters, found in ("best", "RHH", {}), ("best", "RHH", {"disk": 144}), ("RRH", "RRH", {}):
        engine, cache = engine_for(plan, chunk_files(tmp_path))
        request = ask(engine, PROMPT + [3])
        assert cache.letters == letters and request.found == found and ORACLE.judge(request) == "equal"
        wait_until_idle(engine)
        engine.close()
        costs = Costs(9.0, 1.0, 0.1, 0.2, 0.0)
        assert best_plan(3, costs) == "KKK", "at other costs another plan would be the best"


@pytest.mark.parametrize("blocks, rows, history", [(1, 16, 0), (3, 32, 16), (64, 32, 256)])
def test_the_question_is_measured_in_a_pool_of_any_size(blocks, rows, history):
    """The planner asks for a history of 256 tokens, and a question of 32."""
    with mock.patch.object(planned.paged, "Batch", wraps=planned.paged.Batch) as batch:
        engine = engines.make(cache := planned.PlannedCache(64, 2e9), blocks)
    (((_, [(asked, count)]), _),) = batch.call_args_list
    assert (count, asked.computed) == (rows, history) and cache.question > 0, "a small pool must not give a question that costs nothing"
    engines.check_pools(engine)


def test_a_new_directory_is_measured_before_the_plan_is_made(monkeypatch):
    storage, costs = chunk_files(), []
    (inner,) = storage.storages

    def get(keys, into, label=""):
        inner.reader.measured.record(1e6, 1.0)  # as if the disk had 1 MB/s
        read = Transfer("storage", label)
        read.finish(0.0, 0.0)
        return read

    monkeypatch.setattr(inner, "get", get)
    monkeypatch.setattr(planned, "best_plan", lambda layers, *three: costs.append(three) or "RHK")
    engine, cache = engine_for("best", storage)
    assert costs == [tuple(cache.costs(0, end, 1.0) for end in (256, 256, 512))] and costs[0][0].load_kv == 256 * 2 * 32 * 4 / 1e6
    engine.close()


def test_a_plan_does_not_depend_on_the_speed_of_the_machine():
    plans, model = set(), engines.tiny_model(2)
    for slower in 1.0, 5.0:
        machine_of(model).fastest = 1e6 / slower  # FLOP/s: so slow that a plan takes many seconds
        cache = planned.PlannedCache(256, hardware.bandwidth(model), None, "best")
        with mock.patch.object(planned, "measure", lambda *given: (None, 1e5)):
            engines.make(cache, 64, model=model)
        plans.add(cache.letters)
    assert len(plans) == 1


def test_an_arrived_layer_is_projected_before_the_next_one_is_awaited(tmp_path):
    """A read completes only when the engine waits for it."""
    ask(engine := engine_for("RHK", chunk_files(tmp_path))[0], PROMPT, 1)
    wait_until_idle(engine)
    engine, cache = engine_for("RHK", chunk_files(tmp_path))
    said, project = [], cache.project
    cache.project = lambda layer, *rest: said.append(f"project {layer}") or project(layer, *rest)

    def read(chunks, into, label):
        for place in into:
            place.arrays.fill(0)  # the old contents of this memory may be NaN
        return [Transfer("storage", label, 1)]

    def arrived(restoration, wait):
        if transfer := restoration.awaited:
            said.append(transfer.label)
            if transfer.lane == "storage":
                transfer.finish(0.0, 0.1)
            transfer.wait()
        return True

    engine.lower_tier.arrived, cache.storage.read = arrived, read
    ask(engine, PROMPT + [3], 1)
    assert said == ["project 0", "part 0", "layer 1", "project 1", "part 1", "layer 2"]


def test_a_wrong_plan_is_refused_in_one_sentence(capsys):
    parser = cli.parser_for("")
    planned.add_arguments(parser)
    for plan in ("RHX", "KHR", "RRR"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--plan", plan])
        assert "is not best, paper, or letters: R, H, K in this order" in capsys.readouterr().err
    with pytest.raises(BadRequest, match="--plan has 4 letters, but this model has 3 layers; give one letter for each layer."):
        planned.make_engine(engines.tiny_model(), parser.parse_args(["--plan", "RHHK"]))
