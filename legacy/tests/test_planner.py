"""The frozen planner of benchmarks/matrix.py, against brute force and a pipeline of its own."""
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legacy import bubble_free as planner
from legacy.bubble_free import Costs, Plan

NEAR = 1 + 2e-9                    # best_plan takes as equal what differs by less than a billionth

some = settings(max_examples=200, deadline=None, derandomize=True, database=None)
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
LAYERS, PARTS = st.integers(1, 12), st.sampled_from([1, 2, 4])
COST = st.floats(0.01, 10) | st.integers(1, 4).map(float) | st.sampled_from([1e-9, 1e-4, 1.0, 1e4, 1e9])
COSTS = st.builds(Costs, COST, COST, COST, COST)


def ends(costs, recompute, hidden, kv, parts: int, behind: float = 0.0, paper: bool = False):
    """Part after part, for many plans at once: when each of them ends."""
    recompute, hidden, kv = (numpy.asarray(layers, dtype=float) for layers in (recompute, hidden, kv))
    projected = 0.0 if paper else numpy.clip(recompute, 0, 1)
    processor = projected * costs.compute_hidden + (recompute - projected) * costs.compute_token
    link = numpy.full(recompute.shape, behind)
    for part in range(round(float(hidden.max()) * parts)):
        more = part < numpy.round(hidden * parts)
        link = numpy.where(more, link + costs.io_hidden / parts, link)
        processor = numpy.where(more, numpy.maximum(link, processor) + costs.compute_hidden / parts, processor)
    link = link + kv * costs.io_kv
    return numpy.where(hidden + kv > 0, numpy.maximum(link, processor), processor)


# 1. The pipeline -------------------------------------------------------------------------------------------------

@some
@given(COSTS, LAYERS, PARTS, st.just(0.0) | st.floats(0, 50), st.booleans())
def test_the_formula_says_when_a_pipeline_of_parts_ends(costs, layers, parts, behind, paper):
    plans = planner.divisions(layers, parts)
    formula = planner.pipeline_seconds(costs, *plans, parts, behind, paper)
    assert formula == pytest.approx(ends(costs, *plans, parts, behind, paper), rel=1e-9)


@some
@given(COSTS, LAYERS, PARTS, st.just(0.0) | st.floats(0, 50), st.booleans(), st.data())
def test_what_is_simulated_ends_when_the_formula_says_and_no_lane_does_two_things_at_once(
        costs, layers, parts, behind, paper, data):
    plans = planner.divisions(layers, parts)
    index = data.draw(st.integers(0, len(plans[0]) - 1))
    plan = Plan(*(float(way[index]) for way in plans))
    timeline = planner.simulate(costs, plan, parts, behind, paper)
    assert timeline.end == pytest.approx(float(ends(costs, *plan[:3], parts, behind, paper)), rel=1e-9)
    for lane in ("compute", "load"):
        spans = [span for span in timeline.spans if span.lane == lane]
        assert all(before.end <= after.start for before, after in zip(spans, spans[1:]))
        assert lane == "compute" or all(span.start >= behind for span in spans)
    labels = "".join(f"{span.lane[0]}{span.label} " for span in timeline.spans)
    if min(costs) > 1e-3 and max(costs) < 1e3:                     # else the shortest of them are lost in rounding
        parts_of_hidden = round(plan.hidden * parts)
        assert labels == "cR " * (plan.recompute > 0) + "lH cH " * parts_of_hidden + "lK " * (plan.kv > 0)


@pytest.mark.parametrize("plan,parts,behind,paper,seconds", [
    (Plan(0, 4, 0), 1, 0, False, 2 + 4 * 3), (Plan(0, 4, 0), 4, 0, False, 0.5 + 4 * 3), (Plan(0, 4, 0), 1, 5, False, 7 + 12),
    (Plan(0, 0, 4), 4, 0, False, 20), (Plan(0, 0, 4), 4, 3, False, 23), (Plan(4, 0, 0), 4, 99, False, 3 + 3 * 11),
    (Plan(4, 0, 0), 1, 0, True, 44), (Plan(1, 2, 1), 1, 0, False, 9), (Plan(1, 2, 1), 1, 0, True, 17),
    (Plan(1, 2, 1), 2, 40, False, 49), (Plan(0.5, 3.5, 0), 2, 0, False, 1.5 + 10.5),
], ids=str)
def test_examples_by_hand(plan, parts, behind, paper, seconds):
    costs = Costs(io_hidden=2, io_kv=5, compute_token=11, compute_hidden=3)
    assert float(planner.pipeline_seconds(costs, *plan[:3], parts, behind, paper)) == pytest.approx(seconds)


# 2. The best plan ------------------------------------------------------------------------------------------------

ALLOWED = {"auto": lambda r, h, k, layers: r >= 0, "naive": lambda r, h, k, layers: h == 0,
           "hidden-only": lambda r, h, k, layers: h == layers, "kv-only": lambda r, h, k, layers: k == layers}


@pytest.mark.parametrize("mode", ALLOWED)
@some
@given(COSTS, LAYERS, PARTS, st.booleans())
def test_no_other_division_is_faster_and_of_equals_none_loads_less(mode, costs, layers, parts, paper):
    plan, seconds = planner.best_plan({parts: costs}, layers, mode, paper=paper)
    recompute, hidden, kv = planner.divisions(layers, parts)
    allowed = ALLOWED[mode](recompute, hidden, kv, layers)
    every = ends(costs, recompute, hidden, kv, parts, paper=paper)[allowed]
    loads = (hidden * costs.io_hidden + kv * costs.io_kv)[allowed]
    assert ALLOWED[mode](*plan[:3], layers) and plan.split is None and plan.layers == layers == sum(plan[:3])
    assert seconds == pytest.approx(float(ends(costs, *plan[:3], parts, paper=paper)), rel=1e-9)
    assert seconds <= every.min() * NEAR
    assert plan.hidden * costs.io_hidden + plan.kv * costs.io_kv <= loads[every <= every.min() * (1 + 1e-12)].min() * NEAR


@some
@given(COSTS, COSTS, LAYERS)
def test_of_several_numbers_of_parts_the_fastest_is_taken_and_auto_is_never_slower_than_a_mode(one, four, layers):
    costs = {1: one, 4: four}
    seconds = {mode: planner.best_plan(costs, layers, mode)[1] for mode in ALLOWED}
    for mode, best in seconds.items():
        assert best == min(planner.best_plan({parts: each}, layers, mode)[1] for parts, each in costs.items())
    assert all(seconds["auto"] <= other * NEAR for other in seconds.values())


@pytest.mark.parametrize("mode,letters", [("auto", "RHHK"), ("naive", "RKKK"), ("hidden-only", "HHHH"), ("kv-only", "KKKK")])
def test_a_mode_may_only_have_its_own_letters(mode, letters):
    costs = Costs(io_hidden=2, io_kv=4, compute_token=10, compute_hidden=3)
    assert str(planner.best_plan({1: costs}, 4, mode)[0]) == letters


def test_where_to_recompute_a_layer_costs_what_it_costs_to_project_it_nothing_is_loaded_for_it():
    plan, seconds = planner.best_plan({1: Costs(1e-6, 9, 99, 1)}, 3)
    assert (plan, seconds) == (Plan(1, 2, 0), 3)                    # as fast as HHH, but for the first transfer, and loads less
    plan, seconds = planner.best_plan({1: Costs(1, 1, 5, 5)}, 1)    # recomputed: 5, projected: 6
    assert (plan, seconds) == (Plan(0, 0, 1), 1)


def test_for_80_layers_all_divisions_are_tried_and_the_best_of_them_is_found():
    count = 80 * planner.PARTS
    recompute, hidden, kv = planner.divisions(80, planner.PARTS)
    assert len(recompute) == len(hidden) == len(kv) == (count + 1) * (count + 2) // 2 == 51681
    assert len({*zip(recompute, kv)}) == 51681 and min(recompute.min(), hidden.min(), kv.min()) == 0
    assert (recompute + hidden + kv == 80).all()
    for costs in (Costs(1, 2, 7, 1.3), Costs(1.7, 3.4, 6, 1), Costs(2, 1, 9, 1), Costs(1, 2, 6, 1)):
        plan, seconds = planner.best_plan({planner.PARTS: costs}, 80)
        every = ends(costs, recompute, hidden, kv, planner.PARTS)
        assert seconds == pytest.approx(every.min(), rel=1e-9) and str(plan).lower() == str(plan).lower()[:80]


# 3. The closed form ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("costs,layers,plan", [
    (Costs(1, 2, 8, 2), 32, Plan(0, 22, 10)),                      # 32 * 2 / (2 + 2 - 1) = 21.3
    (Costs(1, 2, 8, 1.5), 40, Plan(0, 32, 8)),                     # 40 * 2 / 2.5, even
    (Costs(2, 4, 6, 1), 35, Plan(5, 30, 0)),                       # 35 * 6 / 7, even
    (Costs(2, 4, 6, 1), 32, Plan(4, 28, 0)),                       # 27.4
    (Costs(1, 2, 6, 1), 48, Plan(0, 48, 0)),                       # balanced: nothing else
    (Costs(1, 2, 6, 1e9), 8, Plan(0, 1, 7)), (Costs(1e9, 2e9, 6, 1), 8, Plan(7, 1, 0)),       # never less than one layer
], ids=str)
def test_the_closed_form_by_hand(costs, layers, plan):
    assert planner.closed_form(costs, layers) == plan


@pytest.mark.parametrize("towards", [None, 0.0, math.inf], ids=["even", "a trace less to project", "a trace more to project"])
@some
@given(COSTS, st.integers(1, 128))
def test_the_closed_form_never_has_more_layers_than_there_are_also_where_both_lanes_are_even(towards, costs, layers):
    even = costs._replace(compute_hidden=costs.io_hidden if towards is None else math.nextafter(costs.io_hidden, towards))
    for each in (costs, even):
        if each.compute_hidden == each.io_hidden and each.compute_token + each.io_hidden == each.io_hidden:
            continue                                                   # so little beside the rest that rounding loses it
        plan = planner.closed_form(each, layers)
        assert sum(plan[:3]) == layers and 1 <= plan.hidden <= layers and plan.recompute >= 0 <= plan.kv, plan


def at_once(costs, recompute, hidden, kv):
    """Seconds in the paper's accounting, without filling: both lanes begin at once, and a recomputed layer is computed whole."""
    return numpy.maximum(recompute * costs.compute_token + hidden * costs.compute_hidden,
                         hidden * costs.io_hidden + kv * costs.io_kv)


@some
@given(st.builds(Costs, *[st.floats(0.1, 10)] * 4), LAYERS)
def test_the_closed_form_is_within_one_layer_of_the_best_where_hidden_states_are_worth_it(costs, layers):
    """It is meant for costs where a mix of recomputing and loading K and V is no match for hidden states, as with multi-head
    attention: they take a share of what loading takes, and a share of what recomputing takes, which are together below 1."""
    plan = planner.closed_form(costs, layers)
    other = range(layers + 1)
    two_ways = [Plan(0, layers - kv, kv) for kv in other] if plan.recompute == 0 else [Plan(r, layers - r, 0) for r in other]
    seconds = [float(at_once(costs, *each[:3])) for each in two_ways]
    if costs.io_kv > costs.io_hidden and costs.compute_token > costs.compute_hidden:
        best = [each.hidden for each, took in zip(two_ways, seconds) if took <= min(seconds) * NEAR]
        assert min(abs(plan.hidden - hidden) for hidden in best) <= 1
    if costs.io_hidden / costs.io_kv + costs.compute_hidden / costs.compute_token <= 1:
        every = at_once(costs, *planner.divisions(layers, 1))
        assert float(at_once(costs, *plan[:3])) <= every.min() * NEAR + max(costs.io_hidden, costs.compute_hidden)


# 4. A plan in letters --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("plan,shown", [
    (Plan(2, 3, 1), "RRHHHK"), (Plan(0, 0, 3), "KKK"), (Plan(3, 0, 0), "RRR"), (Plan(1.25, 4.5, 0.25), "RhHHHh"),
    (Plan(1.75, 4.5, 1.75), "RrHHHHkK"), (Plan(0, 3.25, 0.75), "HHHk"), (Plan(1.25, 0, 1.75), "RkK"),
    (Plan(0.25, 0.5, 0.25), "h"), (Plan(0, 2, 2, 128), "128 tokens H, the others K"),
    (Plan(2, 2, 0, 128), "128 tokens H, the others R"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_plan_is_a_row_of_letters_small_where_a_layer_is_shared(plan, shown):
    assert str(plan) == shown
    assert plan.split is not None or len(shown) == plan.layers


# 5. Tokens divided -----------------------------------------------------------------------------------------------

def token_wise_ends(costs, layers: int, tokens: int, split: int, computing_rest=None) -> float:
    """Layer after layer: what arrives of one, then what is computed of it."""
    share, link, processor, loads_kv = split / tokens, 0.0, 0.0, costs.compute_hidden > costs.io_hidden
    rest = costs.compute_token * (1 - share) if computing_rest is None else computing_rest(split)
    for _ in range(layers):
        link += costs.io_hidden * share + loads_kv * costs.io_kv * (1 - share)
        processor = max(link, processor) + costs.compute_hidden * share + (not loads_kv) * rest
    return processor


@pytest.mark.parametrize("attention", [False, True])
@few
@given(st.builds(Costs, *[st.floats(0.01, 10)] * 4), LAYERS, st.integers(1, 300), st.sampled_from([1, 7, 64]))
def test_the_split_of_tokens_is_the_best_of_all(attention, costs, layers, tokens, step):
    def rest(split):
        return costs.compute_token * (1 - (split / tokens) ** 2)
    more = (rest,) if attention else ()
    plan, seconds = planner.token_wise_plan(costs, layers, tokens, step, *more)
    every = {split: token_wise_ends(costs, layers, tokens, split, *more) for split in (*range(0, tokens, step), tokens)}
    assert plan.split in every and seconds == pytest.approx(every[plan.split], rel=1e-9)
    assert seconds <= min(every.values()) * NEAR
    assert plan.hidden == pytest.approx(layers * plan.split / tokens) and sum(plan[:3]) == pytest.approx(layers)
    assert (plan.recompute if costs.compute_hidden > costs.io_hidden else plan.kv) == 0
