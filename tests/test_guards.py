"""Each guard of the engine is taken away: then traffic gives wrong tokens, or leaves something behind."""

import pytest
from support import engines, races, traffic
from support.mutants import GUARDS, without

RUNNER = engines.hybrid.HybridRunner
HYBRID = {
    "nothing is used again before it is there": (RUNNER, "forget", "transfer.wait()", "pass"),
    "what is stored is there when the step is over": (
        RUNNER, "step",
        "for transfer in self.saves:\n        transfer.wait()", "pass"),
    "context is waited for": (RUNNER, "rebuild", "if kv_copy:\n        arrive(kv_copy)", "pass"),
    "weights that were half there are fetched anew": (RUNNER, "forget", "self.weights.expect(-1)", "pass"),
}  # fmt: skip


def impatient(*args, **options):
    """An engine that fails when it has computed nothing in many steps."""
    engine = engines.make(*args, **options)
    plain, last, idle = engine.step, [0], [0]

    def step():
        plain()
        idle[0] = idle[0] + 1 if engine.counts["steps"] == last[0] else 0
        last[0] = engine.counts["steps"]
        assert idle[0] < 200, "nobody is computed for"

    engine.step = step
    return engine


@pytest.mark.parametrize("guard", [*GUARDS, *HYBRID])
def test_without_its_guard_traffic_goes_wrong(monkeypatch, guard):
    without(monkeypatch, *{**GUARDS, **HYBRID}[guard])
    plain = "host", 1500, 4, 0.2, engines.make
    cache, requests, seed, share, make = plain if guard in GUARDS else ("hybrid", 100, 0, 0.01, impatient)
    try:
        counts = traffic.run(cache, requests, seed, share, make=make, until_wrong=True)
        if counts["wrong"] or counts["failed"] or counts["given_up"] > counts["requests"] / 4:
            return
    except (AssertionError, IndexError, KeyError, ValueError, RuntimeError, AttributeError):
        return
    pytest.fail(f"nobody noticed that this is not so any more: {guard}")


@pytest.mark.parametrize("race", races.RACES)
def test_a_race_shows_a_wrong_answer_and_its_guard_none(race, capsys):
    races.show(race)
    said = capsys.readouterr().out
    assert "with its guard:    right" in said and "without it:        WRONG" in said, said
