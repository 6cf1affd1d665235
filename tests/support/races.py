"""Races as lessons: what a guard of the engine prevents, with it and without it.

    python -m tests.support.races late-copy         or unwritten-slot, or given-up

The same requests are answered twice, over a link whose copies fail, are late, and write NaN before they fail: by the
engine as it is, and by one without one guard. The first answer that is not chapter 01's is printed."""

import argparse
import inspect
import random
import sys
import textwrap
from contextlib import suppress
from functools import cache

import pytest

from common.cache import Cache
from common.requests import Request, RequestError
from common.restoring import Restorer

from . import engines
from .faults import faulty

# name -> (what the guard guarantees, what happens without it, class, method, the guard, its replacement)
RACES = {
    "late-copy": (
        "a request whose copy failed gets other blocks",
        "A copy has failed, and what was to come back is computed in the same blocks: copies behind it are late,\n"
        "and still write there.",
        Restorer, "give_up", "self.engine.requeue(request)", "self.end_restoration(request)"),
    "unwritten-slot": (
        "slots that were not written are not read",
        "A short table is padded with slots that nobody has written. They are masked, and a masked score has the\n"
        "weight 0; but 0 times NaN is NaN.",
        engines.paged.Batch, "read_padded", "slots.where(mask == 0, slots[:, :1])", "slots"),
    "given-up": (
        "what a copy reads and writes is referenced",
        "A request is over while its blocks are still copied out: they are given to another one, and the copy keeps\n"
        "what that one has written under the first one's name.",
        Cache, "hold", "        pool.share(blocks)\n",
        "        pass\n    [pool.release(blocks) for pool, blocks in given]\n    held = given = ()\n"),
}  # fmt: skip


def without(monkeypatch, owner, name: str, guard: str, instead: str):
    """Replace `guard` in the source of `owner.name` by `instead`. Fails if it is not there exactly once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{guard!r} is not what guards {name} any more"
    space = dict(vars(sys.modules[function.__module__]), __class__=owner)
    exec(compile(source.replace(guard, instead), f"<{name} without a guard>", "exec"), space)
    monkeypatch.setattr(owner, name, space[function.__name__])


@cache
def answers(race: str | None = None, rounds: int = 60, seed: int = 3):
    """-> the first wrong answer without a race's guard (request, tokens of chapter 01), or None."""
    rng, oracle = random.Random(seed), engines.Oracle()
    with pytest.MonkeyPatch.context() as patch, faulty(rng, failing=0.1, late=0.4, noisy=6):
        if race:
            without(patch, *RACES[race][2:])
        engine = engines.make(engines.CACHES["host"](40), 40)
        engine.pool.memory.fill_(float("nan"))  # what nobody has written
        documents = [engines.draw(rng, rng.randrange(60, 250)) for _ in range(4)]
        for _ in range(rounds):
            asked = [Request(rng.choice(documents) + engines.draw(rng, rng.randrange(1, 40)), 6) for _ in range(3)]
            with suppress(RequestError):  # an answer that is wrong may be NaN
                engine.generate(asked)
            for request in asked:
                if isinstance(request.outcome, Exception) or oracle.judge(request) == "wrong":
                    return request, oracle.answer(request.tokens[: request.prompt_tokens], request.max_tokens)[0]
            engine.evict("device")
    return None


def show(race: str) -> bool:
    """Print both -> whether the answer is wrong only without the guard."""
    guard, words, *_ = RACES[race]
    right = not answers()
    print(f"{words}\nThe guard: {guard}.\n\nwith its guard:    {'right, in 180 requests' if right else 'WRONG'}")
    try:
        wrong = answers(race)
    except Exception as error:  # it may break the engine, too
        print(f"without it:        WRONG: the engine ends with {error!r}")
        return right
    if wrong is None:
        print("without it:        right, this time: it is a race")
        return False
    request, tokens = wrong
    print(f"without it:        WRONG: {len(request.new)} tokens behind a prompt of {request.prompt_tokens}, found {request.found}")
    print(f"  chapter 01 says    {tokens}\n  this engine says   {request.new or repr(request.outcome)}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("race", choices=RACES)
    sys.exit(not show(parser.parse_args().race))
