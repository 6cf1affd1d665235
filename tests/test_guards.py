"""Each guard of the engine is taken away: then traffic gives wrong tokens, or leaves something behind."""

import pytest
from support import races, traffic
from support.mutants import GUARDS, without


@pytest.mark.parametrize("guard", GUARDS)
def test_without_its_guard_traffic_goes_wrong(monkeypatch, guard):
    without(monkeypatch, *GUARDS[guard])
    try:
        counts = traffic.run("host", 1500, seed=0, share=0.2, until_wrong=True)
        if counts["wrong"] or counts["failed"]:
            return
    except (AssertionError, IndexError, KeyError, ValueError, AttributeError):
        return
    pytest.fail(f"nobody noticed that this is not so any more: {guard}")


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_shows_a_wrong_answer_and_its_guard_none(race, capsys):
    races.show(race)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
