"""Each guard of the engine is taken away: then traffic gives wrong tokens, or leaves something behind."""

import pytest

from tests.support import engines, races, traffic
from tests.support.mutants import GUARDS, without

HYBRID = {"nothing is used again before it is there": (
    engines.hybrid.HybridRunner, "forget", "transfer.wait()", "pass")}  # fmt: skip

SEEDS = {"a step that was given up is no step": 2, "layers are waited for in the pass": 3}  # that show it soon; 4 the others
SHOWN = [guard for guard, _ in races.RACES.values()]


@pytest.mark.parametrize("guard", [guard for guard in (*GUARDS, *HYBRID) if guard not in SHOWN])
def test_without_its_guard_traffic_goes_wrong(monkeypatch, guard):
    without(monkeypatch, *{**GUARDS, **HYBRID}[guard])
    cache, seed, share = ("host", SEEDS.get(guard, 4), 0.2) if guard in GUARDS else ("hybrid", 0, 0.01)
    try:
        counts = traffic.run(cache, 6000, seed, share, until_wrong=True)  # most show at once
        if counts["wrong"] or counts["failed"]:
            return
    except Exception:  # an engine that trips over what is left is noticed as well
        return
    pytest.fail(f"nobody noticed that this is not so any more: {guard}")


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_shows_a_wrong_answer_and_its_guard_none(race, capsys):
    races.show(race)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
