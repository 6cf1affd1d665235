"""Show a race condition that a guard of the engine prevents, with the guard and without it.

    python -m tests.support.races late-copy         or unwritten-slot, or given-up

Two engines answer the same requests: the engine as it is, and one without the guard. Copies over their link fail, are
late, and write NaN before they fail. The first answer that differs from chapter 01's is printed."""

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

# name -> (what the guard guarantees, what happens without it, class, method, source of the guard, its replacement)
RACES = {
    "late-copy": (
        "a request whose copy failed gets other blocks",
        "A copy has failed, and its tokens are recomputed into the same blocks. Later copies of the restoration are still\n"
        "on their way, and overwrite these blocks.",
        Restorer, "give_up", "self.engine.requeue(request)", "self.end_restoration(request)"),
    "unwritten-slot": (
        "slots that were not written are not read",
        "A short block table is padded with slots that were never written. Their scores are masked, and a masked score has\n"
        "weight 0; but 0 times NaN is NaN.",
        engines.paged.Batch, "plan_reads", "slots.where(mask == 0, slots[:, :1])", "slots"),
    "given-up": (
        "blocks that a copy reads or writes stay referenced",
        "A request ends while its blocks are still being copied out. Another request gets these blocks and writes to them,\n"
        "and the copy saves its data under the keys of the first request.",
        Cache, "hold", "        pool.share(blocks)\n",
        "        pass\n    [pool.release(blocks) for pool, blocks in given]\n    held = given = ()\n"),
}  # fmt: skip


def without(monkeypatch, owner, name: str, guard: str, instead: str):
    """Replace `guard` in the source of the method `owner.name` by `instead`.

    Fails unless the source contains `guard` exactly once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{guard!r} is no longer in the source of {name} once"
    space = dict(vars(sys.modules[function.__module__]), __class__=owner)
    exec(compile(source.replace(guard, instead), f"<{name} without a guard>", "exec"), space)
    monkeypatch.setattr(owner, name, space[function.__name__])


@cache
def answers(race: str | None = None, rounds: int = 60, seed: int = 3):
    """Answer requests without the guard of `race` (None: with all guards).

    Returns: the first wrong answer, as (request, chapter 01's tokens), or None."""
    rng, oracle = random.Random(seed), engines.Oracle()
    with pytest.MonkeyPatch.context() as patch, faulty(rng, failing=0.1, late=0.4, noisy=6):
        if race:
            without(patch, *RACES[race][2:])
        engine = engines.make(engines.CACHES["host"](40), 40)
        engine.pool.memory.fill_(float("nan"))  # NaN marks slots that were never written
        documents = [engines.draw(rng, rng.randrange(60, 250)) for _ in range(4)]
        for _ in range(rounds):
            asked = [Request(rng.choice(documents) + engines.draw(rng, rng.randrange(1, 40)), 6) for _ in range(3)]
            with suppress(RequestError):  # the logits of a wrong answer may be NaN
                engine.generate(asked)
            for request in asked:
                if isinstance(request.outcome, Exception) or oracle.judge(request) == "wrong":
                    return request, oracle.answer(request.tokens[: request.prompt_tokens], request.max_tokens)[0]
            engine.evict("device")
    return None


def show(race: str, rounds: int = 60) -> bool:
    """Print both results. Returns: True if answers are wrong only without the guard.

    `rounds`: of three requests, with the guard."""
    guard, words, *_ = RACES[race]
    right = not answers(rounds=rounds)
    print(f"{words}\nThe guard: {guard}.\n\nwith its guard:    {f'right: all {3 * rounds} answers' if right else 'WRONG'}")
    try:
        wrong = answers(race)
    except Exception as error:  # without the guard the engine itself may break
        print(f"without it:        WRONG: the engine ends with {error!r}")
        return right
    if wrong is None:
        print("without it:        right this time; a race does not always go wrong")
        return False
    request, tokens = wrong
    print(f"without it:        WRONG: an answer to {request.prompt_tokens} tokens, {request.cached_tokens} of them restored")
    print(f"  tokens of chapter 01: {tokens}\n  its own tokens:       {request.new or repr(request.outcome)}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("race", choices=RACES)
    sys.exit(not show(parser.parse_args().race))
