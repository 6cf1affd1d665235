"""Without a guard of the engine, answers are wrong, or something is left behind."""

import pytest

from tests.support import engines, races, traffic


def test_traffic_goes_wrong_where_something_is_used_again_before_it_is_there(monkeypatch):
    races.without(monkeypatch, engines.hybrid.HybridRunner, "forget", "transfer.wait()", "pass")
    try:
        counts = traffic.run("hybrid", 6000, 0, 0.01, until_wrong=True)  # most races show at once
    except Exception:  # an error of the engine counts, too
        return
    assert counts["wrong"] or counts["failed"]


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_shows_a_wrong_answer_and_its_guard_none(race, capsys):
    races.show(race)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
