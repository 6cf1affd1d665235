"""Take a guard out of a function, to see that a test notices."""

import inspect
import sys
import textwrap


def without(monkeypatch, owner, name: str, guard: str, instead: str):
    """Replace `guard` in the source of `owner.name` by `instead`. Fails if it is not there exactly once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{guard!r} is not what guards {name} any more"
    space = dict(vars(sys.modules[function.__module__]), __class__=owner)
    exec(compile(source.replace(guard, instead), f"<{name} without a guard>", "exec"), space)
    monkeypatch.setattr(owner, name, space[function.__name__])
