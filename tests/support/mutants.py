"""Take a guard out of a function, to see that a test notices."""

import inspect
import sys
import textwrap

from common import cache, restoring

from .engines import offload, paged

# what it guarantees -> where, and what is there instead without it
GUARDS = {
    "what a copy reads and writes is referenced": (
        cache.Cache, "hold", "        pool.share(blocks)\n",
        "        pass\n    [pool.release(blocks) for pool, blocks in given]\n    held = given = ()\n"),
    "what has failed to arrive is not found": (offload.HostCache, "saved", "if arrived:", "if True:"),
    "a request whose copy failed gets other blocks": (
        restoring.Restorer, "give_up", "self.engine.requeue(request)", "self.end(request)"),
    "a preempted request is not scheduled": (
        paged.Engine, "schedule", "if request not in self.running:", "if False:"),
    "a step that was given up is no step": (restoring.Restorer, "before_layer", "raise Interrupted", "pass"),
    "slots that were not written are not read": (
        paged.Batch, "read_padded", "slots.where(mask == 0, slots[:, :1])", "slots"),
    "layers are waited for in the pass": (
        restoring.Restorer, "before_layer", "self.advance(request, index + 1, wait=True)", "pass"),
}  # fmt: skip


def without(monkeypatch, owner, name: str, guard: str, instead: str):
    """Replace `guard` in the source of `owner.name` by `instead`. Fails if it is not there exactly once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(guard) == 1, f"{guard!r} is not what guards {name} any more"
    space = dict(vars(sys.modules[function.__module__]), __class__=owner)
    exec(compile(source.replace(guard, instead), f"<{name} without a guard>", "exec"), space)
    monkeypatch.setattr(owner, name, space[function.__name__])
