"""Without a guard of the engine, answers are wrong, or something is left behind."""

import pytest

from tests.support import engines, races, traffic


def test_traffic_fails_without_a_wait_for_copies(monkeypatch):
    races.without(monkeypatch, engines.hybrid.HybridRunner, "forget", "transfer.wait()", "pass")
    try:
        counts = traffic.run("hybrid", 6000, 0, 0.01, until_wrong=True)  # most races show at once
    except Exception:  # an error of the engine counts, too
        return
    assert counts["wrong"] or counts["failed"]


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_gives_a_wrong_answer_only_without_its_guard(race, capsys):
    races.show(race)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
