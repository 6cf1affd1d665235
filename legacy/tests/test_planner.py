"""Chapter 05's planner against brute force and a pipeline of its own, and the profile on which it plans."""
import itertools
import json
import math
import re
import subprocess
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legacy.tests.conftest import ROOT, chapter, make_engine, write_model

planner = chapter("05_bubble_free")
Costs, Plan, Profile, CHUNK = planner.Costs, planner.Plan, planner.Profile, planner.CHUNK
NEAR = 1 + 2e-9                    # best_plan takes as equal what differs by less than a billionth

some = settings(max_examples=200, deadline=None, derandomize=True, database=None)
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
LAYERS, PARTS = st.integers(1, 12), st.sampled_from([1, 2, 4])
COST = st.floats(0.01, 10) | st.integers(1, 4).map(float) | st.sampled_from([1e-9, 1e-4, 1.0, 1e4, 1e9])
COSTS = st.builds(Costs, COST, COST, COST, COST)
LIKELY = COSTS.filter(lambda costs: costs.compute_token >= costs.compute_hidden)         # all of a layer is more than a part


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


def optimum(costs, layers: int, first_is_projected: bool) -> float:
    """The linear programme: the layers in three ways, in whatever shares, and the fewest seconds in which both lanes do what
    they must. It lies in a corner, or where a line between two corners has both lanes equally busy. In exact fractions."""
    costs = Costs(*map(Fraction, costs))

    def corners(rest, compute=0):
        return [(compute + rest * costs.compute_token, 0), (compute + rest * costs.compute_hidden, rest * costs.io_hidden),
                (compute, rest * costs.io_kv)]
    points, best = corners(layers) + (corners(layers - 1, costs.compute_hidden) if first_is_projected else []), math.inf
    for (x, y), (u, v) in itertools.product(points, points):
        best = min(best, max(x, y))
        if (x - y) * (u - v) < 0:
            share = (x - y) / (x - y - u + v)
            best = min(best, x + share * (u - x))
    return float(best)


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
    assert seconds["auto"] >= planner.bound_seconds(costs, layers) * (1 - 1e-9)


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
        assert seconds >= planner.bound_seconds({1: costs}, 80) * (1 - 1e-9)


# 3. The bound ----------------------------------------------------------------------------------------------------

@some
@given(COSTS, COSTS, LAYERS)
def test_the_bound_is_the_optimum_of_the_linear_programme(one, other, layers):
    assert planner.bound_seconds({1: one}, layers) == pytest.approx(optimum(one, layers, True), rel=1e-6)
    cheapest = Costs(*map(min, one, other))
    assert planner.bound_seconds({1: one, 4: other}, layers) == pytest.approx(optimum(cheapest, layers, True), rel=1e-6)


@some
@given(COSTS, LAYERS, PARTS)
def test_no_division_ends_before_the_bound(costs, layers, parts):
    every = ends(costs, *planner.divisions(layers, parts), parts)
    assert every.min() >= planner.bound_seconds({1: costs}, layers) * (1 - 1e-9)


@few
@given(LIKELY, st.integers(1, 3))
def test_with_fine_parts_the_best_plan_comes_as_near_to_the_bound_as_one_likes(costs, layers):
    parts = 128
    seconds = planner.best_plan({parts: costs}, layers)[1]
    # A step from the optimum costs at most a step of each way, and to fill the pipeline takes a part of each lane
    assert seconds <= planner.bound_seconds({1: costs}, layers) * (1 + 1e-9) + 2 * sum(costs) / parts


# 4. The closed form ----------------------------------------------------------------------------------------------

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


# 5. A plan in letters --------------------------------------------------------------------------------------------

@some
@given(st.integers(1, 12), PARTS, st.sampled_from([4, 8, 16]), st.integers(0, 5), st.data())
def test_the_letters_of_all_chunks_add_up_to_the_plan(layers, parts, count, first, data):
    plans = planner.divisions(layers, parts)
    index = data.draw(st.integers(0, len(plans[0]) - 1))
    plan = Plan(*(float(way[index]) for way in plans))
    rows = [plan.letters(chunk, first, count) for chunk in range(first, first + count)]
    for letters in rows:
        assert len(letters) == layers and letters == "".join(sorted(letters, key="RHK".index))
    for letter, share in zip("RHK", plan[:3]):
        assert sum(row.count(letter) for row in rows) == share * count
    for layer in range(layers):
        column = "".join(row[layer] for row in rows)
        assert column == "".join(sorted(column, key="RHK".index)), "in a shared layer the first tokens have the earlier letter"


@some
@given(st.integers(1, 12), PARTS, st.integers(1, 40), st.integers(0, 5), st.integers(0, 100), st.data())
def test_every_chunk_has_a_letter_for_each_layer_also_those_beside_the_plan(layers, parts, count, first, chunk, data):
    """The last chunk of a prompt is seldom whole, and those of an answer were not foreseen."""
    plans = planner.divisions(layers, parts)
    index = data.draw(st.integers(0, len(plans[0]) - 1))
    plan = Plan(*(float(way[index]) for way in plans))
    letters = plan.letters(chunk, first, count)
    assert len(letters) == layers and letters == "".join(sorted(letters, key="RHK".index))
    for letter, share in zip("RHK", plan[:3]):
        assert math.floor(share) <= letters.count(letter) <= math.ceil(share)


@pytest.mark.parametrize("plan", [Plan(0, 3, 0), Plan(2, 3, 1), Plan(0, 0, 4), Plan(1, 0, 2)], ids=str)
def test_a_plan_of_whole_layers_has_the_same_letters_for_every_chunk(plan):
    expected = "R" * plan.recompute + "H" * plan.hidden + "K" * plan.kv
    assert {plan.letters(chunk, 2, 3) for chunk in range(9)} == {expected} and str(plan) == expected


@pytest.mark.parametrize("plan,rows", [
    (Plan(0, 4 * 0.6, 4 * 0.4, 154), ["HHHH", "HHHH", "BBBB", "KKKK"]), (Plan(0, 2, 2, 128), ["HHHH", "HHHH", "KKKK", "KKKK"]),
    (Plan(1.6, 2.4, 0, 154), ["HHHH", "HHHH", "HHHH", "RRRR"]), (Plan(2, 2, 0, 128), ["HHHH", "HHHH", "RRRR", "RRRR"]),
    (Plan(0, 0, 4, 0), ["KKKK"] * 4), (Plan(4, 0, 0, 0), ["RRRR"] * 4), (Plan(0, 4, 0, 256), ["HHHH"] * 4),
], ids=str)
def test_the_letters_of_a_plan_that_divides_tokens(plan, rows):
    assert [plan.letters(chunk, 0, 4) for chunk in range(4)] == rows


@pytest.mark.parametrize("plan,shown", [
    (Plan(2, 3, 1), "RRHHHK"), (Plan(0, 0, 3), "KKK"), (Plan(3, 0, 0), "RRR"), (Plan(1.25, 4.5, 0.25), "RhHHHh"),
    (Plan(1.75, 4.5, 1.75), "RrHHHHkK"), (Plan(0, 3.25, 0.75), "HHHk"), (Plan(1.25, 0, 1.75), "RkK"),
    (Plan(0.25, 0.5, 0.25), "h"), (Plan(0, 2, 2, 128), "128 tokens H, the others K"),
    (Plan(2, 2, 0, 128), "128 tokens H, the others R"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_plan_is_a_row_of_letters_small_where_a_layer_is_shared(plan, shown):
    assert str(plan) == shown
    assert plan.split is not None or len(shown) == plan.layers


# 6. Tokens divided -----------------------------------------------------------------------------------------------

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


# 7. What a profile says ------------------------------------------------------------------------------------------

KNOWN = Profile([64, 128, 512], [1.0, 2.0, 8.0], [2.0, 4.0, 16.0], [6.0, 13.0, 64.0], [3.0, 5.0, 17.0], 1e9, 1e9)
NAMES = Costs._fields


def test_costs_are_linear_between_lengths_and_from_zero():
    assert [KNOWN.seconds("compute_token", tokens) for tokens in (0, 32, 64, 96, 128, 320, 512)] == pytest.approx(
        [0, 3, 6, 9.5, 13, 38.5, 64])
    assert KNOWN.costs(0, 64, 1e9) == {1: Costs(1, 2, 6, 3)}
    assert KNOWN.costs(0, 128, 1e9)[1] == Costs(2, 4, 13, 5)


def test_parts_are_at_least_a_chunk_and_cost_what_so_few_rows_cost():
    assert [list(KNOWN.costs(0, tokens, 1e9)) for tokens in (1, 64, 127, 128, 192, 255, 256, 4096)] == [
        [1], [1], [1], [1, 2], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4]]
    costs = KNOWN.costs(0, 256, 1e9)
    assert [costs[parts].compute_hidden for parts in (1, 2, 4)] == pytest.approx([9, 2 * 5, 4 * 3])
    assert len({(cost.io_kv, cost.compute_token) for cost in costs.values()}) == 1        # which are not cut


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
@some
def test_computing_is_additive_over_start_and_end_and_the_rest_depends_on_how_many(one, two, three):
    start, middle, end = sorted((one, two, three))
    whole, first, second = (KNOWN.costs(*between, 1e9)[1] for between in ((start, end), (start, middle), (middle, end)))
    assert first.compute_token + second.compute_token == pytest.approx(whole.compute_token, abs=1e-9)
    again = KNOWN.costs(0, end - start, 1e9)[1]
    assert whole._replace(compute_token=0) == again._replace(compute_token=0)
    assert whole.compute_token >= again.compute_token - 1e-9         # they attend to those before them


def test_a_link_half_as_fast_doubles_transfers_and_a_slower_processor_the_rest():
    for (parts, before), after, slower in zip(KNOWN.costs(64, 512, 1e9).items(), KNOWN.costs(64, 512, 5e8).values(),
                                              KNOWN.costs(64, 512, 1e9, (1.5, 2.0)).values()):
        assert after == pytest.approx(before._replace(io_hidden=2 * before.io_hidden, io_kv=2 * before.io_kv))
        assert slower == pytest.approx(before._replace(compute_token=1.5 * before.compute_token,
                                                       compute_hidden=2.0 * before.compute_hidden))


@pytest.mark.parametrize("known", [KNOWN, Profile([100], [1.0], [2.0], [3.0], [4.0], 1.0, 1.0)], ids=["three", "one length"])
@pytest.mark.parametrize("name", NAMES)
def test_beyond_the_longest_costs_grow_on_and_attention_faster(known, name):
    longest = known.lengths[-1]
    tokens = [longest, longest + 1, 2 * longest, 4 * longest, 16 * longest]
    seconds = [known.seconds(name, count) for count in tokens]
    assert seconds[0] == getattr(known, name)[-1] and all(a < b for a, b in zip(seconds, seconds[1:]))
    rates = [second / count for second, count in zip(seconds, tokens)]
    if name == "compute_token" and len(known.lengths) > 1:
        assert all(a < b for a, b in zip(rates, rates[1:]))
    else:
        assert rates == pytest.approx([rates[0]] * len(rates))


def test_costs_are_not_negative_where_the_measurement_of_a_longer_history_came_out_shorter():
    noisy = KNOWN._replace(compute_token=[6.0, 5.9, 64.0])
    assert noisy.costs(64, 128, 1e9)[1].compute_token >= 0


# 8. A profile on the disk ----------------------------------------------------------------------------------------

IDENTITY = dict(format=1, machine="here", model="abc", dtype="torch.float32", link="a100", torch="2", threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where profiles are kept: the user's own are left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept() -> dict:
    """What the file holds."""
    return json.loads(planner.profile_path(IDENTITY).read_text())


def keep(content) -> None:
    path = planner.profile_path(IDENTITY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def load(link_speed: float = 1e9):
    return Profile.load(IDENTITY, link_speed)


def test_what_was_saved_is_loaded(cache):
    assert load() is None
    KNOWN.save(IDENTITY)
    assert load() == KNOWN
    KNOWN._replace(io_kv=[7.0, 8.0, 9.0]).save(IDENTITY)
    assert load().io_kv == [7, 8, 9]
    path = planner.profile_path(IDENTITY)
    assert list(cache.rglob("*")) == [path.parent, path] and path.parent.parent == cache


def test_without_a_cache_directory_it_is_the_one_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value) if value is not None else monkeypatch.delenv("XDG_CACHE_HOME")
        assert planner.profile_path(IDENTITY).parent == tmp_path / ".cache" / "kv-restoration"


def test_a_file_that_was_cut_anywhere_is_refused():
    KNOWN.save(IDENTITY)
    whole = planner.profile_path(IDENTITY).read_bytes()
    for length in range(len(whole.rstrip())):
        keep(whole[:length])
        assert load() is None, length
    keep(whole.rstrip())
    assert load() == KNOWN


@some
@given(st.integers(0, 400), st.sampled_from(b'0123456789.,eE+-"[]{}:\0\xff nNtT'))
def test_a_file_with_a_byte_changed_is_refused_or_sound(tmp_path_factory, place, byte):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        KNOWN.save(IDENTITY)
        whole = bytearray(planner.profile_path(IDENTITY).read_bytes())
        whole[place] = byte
        keep(bytes(whole))
        found = load()
    assert found is None or all(0 < value < math.inf for column in found[:5] for value in column)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"null", b"[]", b"3", b'"text"', b"{}", b"[" * 100_000, b"9" * 5000,
                                     b'{"lengths": 3}'], ids=lambda content: repr(content)[:20])
def test_what_is_no_profile_is_refused(content):
    keep(content)
    assert load() is None


WRONG = [None, "1", [], {}, True, [1.0], math.nan, math.inf, -math.inf, -1.0, 0.0, 0, 10 ** 400]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", [*NAMES, "lengths", "bytes_per_second", "link_speed", "measured"])
def test_a_wrong_number_is_refused(name, value):
    KNOWN.save(IDENTITY)
    content = kept()
    if isinstance(content[name], list):
        content[name][1] = value
    else:
        content[name] = value
    keep(content)
    assert load() is None


@pytest.mark.parametrize("value", [None, 1.0, "abc", {}, [], [1.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0], dict(a=1.0, b=2.0, c=3.0)],
                         ids=repr)
@pytest.mark.parametrize("name", [*NAMES, "lengths"])
def test_a_wrong_column_is_refused(name, value):
    KNOWN.save(IDENTITY)
    keep({**kept(), name: value})
    assert load() is None


@pytest.mark.parametrize("name", [*Profile._fields, "identity", "measured"])
def test_a_field_that_is_missing_is_refused(name):
    KNOWN.save(IDENTITY)
    content = kept()
    del content[name]
    keep(content)
    assert load() is None


@pytest.mark.parametrize("lengths", [[128, 64, 512], [64, 64, 512], [512, 128, 64]], ids=str)
def test_lengths_out_of_order_are_refused(lengths):
    KNOWN._replace(lengths=lengths).save(IDENTITY)
    assert load() is None


@pytest.mark.parametrize("name,value", [("machine", "there"), ("model", "abd"), ("dtype", "torch.bfloat16"), ("link", "2.0 GB/s"),
                                        ("torch", "3"), ("threads", 2), ("format", 2)])
def test_a_profile_of_another_is_not_found_and_under_this_name_is_refused(name, value):
    other = {**IDENTITY, name: value}
    KNOWN.save(other)
    assert load() is None and Profile.load(other, 1e9) == KNOWN
    keep(planner.profile_path(other).read_bytes())
    assert load() is None


@pytest.mark.parametrize("days,found", [(-29.9, True), (-30.1, False), (-3000, False), (0.1, False), (3000, False)])
def test_what_is_old_or_of_the_future_is_refused(days, found):
    KNOWN.save(IDENTITY)
    keep({**kept(), "measured": time.time() + days * 86400})
    assert (load() is not None) is found and planner.PROFILE_DAYS == 30


@pytest.mark.parametrize("now,found", [(1.0, True), (1.19, True), (0.81, True), (1.21, False), (0.79, False), (100, False),
                                       (1e-6, False)])
def test_a_profile_of_a_link_that_was_a_fifth_faster_or_slower_is_refused(now, found):
    KNOWN.save(IDENTITY)
    assert (load(now * 1e9) is not None) is found


@pytest.mark.parametrize("where", ["cache", "cache/kv-restoration"])
def test_a_file_where_the_directory_should_be_is_no_error(tmp_path, where):
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text("not a directory")
    KNOWN.save(IDENTITY)
    assert load() is None and (tmp_path / where).read_text() == "not a directory"


def test_a_directory_where_the_file_should_be_is_no_error_and_nothing_is_left_beside_it():
    path = planner.profile_path(IDENTITY)
    path.mkdir(parents=True)
    KNOWN.save(IDENTITY)
    assert load() is None
    assert list(path.parent.iterdir()) == [path]


def test_two_processes_that_write_at_once_leave_one_whole_file(cache):
    words = ("import importlib, sys; planner = importlib.import_module('05_bubble_free'); number = float(sys.argv[1]); "
             f"known = planner.Profile(*{tuple(KNOWN)!r})._replace(io_kv=[number] * 3); print(flush=True); sys.stdin.readline(); "
             f"[known.save({IDENTITY!r}) for _ in range(300)]")
    writers = [subprocess.Popen([sys.executable, "-c", words, str(number)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE) for number in (1, 2)]
    for writer in writers:
        assert writer.stdout.readline() == "\n"
    KNOWN._replace(io_kv=[1.0] * 3).save(IDENTITY)
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = []
    while any(writer.poll() is None for writer in writers):
        seen.append(load().io_kv)
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0] and load().io_kv in ([1] * 3, [2] * 3)
    assert seen and all(io_kv in ([1] * 3, [2] * 3) for io_kv in seen)
    path = planner.profile_path(IDENTITY)
    assert list(path.parent.iterdir()) == [path]


# 9. Measured -----------------------------------------------------------------------------------------------------

def engine_on(tiny_engine, **options):
    return planner.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens,
                          **{"blocks": 32, "cpu_chunks": 8, "bytes_per_second": 1e9, **options})


@pytest.fixture
def measured(monkeypatch):
    """Measuring takes no time, and is counted."""
    calls = []
    monkeypatch.setattr(planner, "profile", lambda engine: calls.append(engine) or KNOWN)
    return calls


@pytest.mark.parametrize("options", [dict(), dict(blocks=1), dict(blocks=1, block_size=1), dict(blocks=5, block_size=3),
                                     dict(token_budget=7), dict(token_budget=100, blocks=12)], ids=str)
def test_measured_costs_are_positive_and_nothing_is_left_behind(tiny_engine, options):
    engine = engine_on(tiny_engine, known=KNOWN, **options)
    found, longest = planner.profile(engine, rounds=2), min(engine.pool.size * engine.pool.block_size, 256)
    assert found.lengths == sorted({*(length for length in (64, 128) if length < longest), longest})
    for column in (*found[1:5], [found.bytes_per_second, found.link_speed]):
        assert all(0 < seconds < math.inf for seconds in column)
    assert all(len(column) == len(found.lengths) and column == sorted(column) for column in found[:5])
    assert found.bytes_per_second <= 1.01e9 == 1.01 * found.link_speed      # the model's, less what a transfer takes besides
    engine.check_integrity()
    assert engine.pool.available == engine.pool.size == len(engine.pool.free) and not engine.landing.taken
    assert engine.chunks.available == engine.chunks.size and engine.load_link.backlog() == 0
    found.save(IDENTITY)
    assert Profile.load(IDENTITY, found.link_speed) == found


@pytest.mark.parametrize("context", [2, 8, 65])
def test_a_model_with_a_tiny_context_is_measured_too(tmp_path, context):
    alone = make_engine(write_model(tmp_path / "model", max_position_embeddings=context))
    engine = engine_on(alone)
    assert engine.profile.lengths == [64, 65][context < 65:] if context == 65 else engine.profile.lengths == [context]
    assert sum(engine.plan(context)[0][:3]) == 3


def test_an_engine_without_a_name_for_its_link_measures_and_keeps_nothing(tiny_engine, cache, measured):
    assert engine_on(tiny_engine).profile == KNOWN and len(measured) == 1
    assert engine_on(tiny_engine, known=KNOWN).profile is KNOWN and len(measured) == 1
    assert not cache.exists()


def test_an_engine_measures_once_for_each_link_and_again_when_it_is_told(tiny_engine, measured):
    for asked, count in ((dict(link_name="a"), 1), (dict(link_name="a"), 1), (dict(link_name="b"), 2), (dict(link_name="a"), 2),
                         (dict(link_name="a", measure_again=True), 3), (dict(link_name="a", measure_again=False), 3),
                         (dict(link_name="a", bytes_per_second=1.3e9), 4), (dict(link_name="a", block_size=8), 5)):
        assert engine_on(tiny_engine, **asked).profile == KNOWN and len(measured) == count, asked


@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: content[:-9], lambda content: b"\xff" + content, lambda content: b"[]",
    lambda content: content.replace(b"512", b"96"), lambda content: content.replace(b'"measured": 1', b'"measured": 9'),
    lambda content: content.replace(b"64.0", b"NaN"), lambda content: content.replace(b"64.0", b"-64.0"),
    lambda content: content.replace(b"1000000000.0", b"0.0"), lambda content: content.replace(b"float32", b"float16"),
    lambda content: b"[" * 100_000,
], ids=["empty", "cut", "no text", "a list", "lengths", "of the future", "NaN", "negative", "a link of speed 0", "another dtype",
        "nested"])
def test_where_what_was_kept_is_damaged_the_engine_measures_anew_and_keeps_that(tiny_engine, cache, measured, damage):
    engine_on(tiny_engine, link_name="a")
    path, = cache.rglob("*.json")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert engine_on(tiny_engine, link_name="a").profile == KNOWN and len(measured) == 2
    assert engine_on(tiny_engine, link_name="a").profile == KNOWN and len(measured) == 2


# 10. What the demo says of it ------------------------------------------------------------------------------------

@pytest.mark.parametrize("pace", [1.0, 0.5, 2.0])
def test_the_plans_and_the_bound_that_the_demo_prints_are_those_of_the_same_costs(tiny_engine, capsys, pace):
    engine = engine_on(tiny_engine, known=KNOWN)
    for paces in engine.paces:                                      # as the last restorations taught it
        paces.extend([pace] * 9)
    computed = SimpleNamespace(restoration=None, source="miss", choice=None)
    planner.show("balanced", 192, engine, {"planned mix": [computed]})
    line = capsys.readouterr().out.splitlines()[-1]
    formula, best, bound = (float(number) for number in re.findall(r"([0-9.]+) ms", line))
    assert bound <= best <= formula and best == pytest.approx(engine.plan(192)[1] * 1e3, abs=0.06)
    assert bound == pytest.approx(planner.bound_seconds(engine.costs(0, 192), 3) * 1e3, abs=0.06)
