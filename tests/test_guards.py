"""Each guard of the engine is taken away: then traffic gives wrong tokens, or leaves something behind."""

import pytest
from support import traffic
from support.engines import offload, paged
from support.mutants import without

from common import restoring

GUARDS = {
    "what a copy reads and writes is referenced": (
        restoring.Cache, "hold",
        "        pool.share(blocks)\n", "        pass\n    held = ()\n",
    ),
    "nothing is found before it has arrived": (
        offload.HostCache, "save_blocks",
        "self.saving.update(zip(prefixes, places))",
        "self.saving.update(zip(prefixes, places)); [*map(self.host.register, places, prefixes)]",
    ),
    "what has failed to arrive is not found": (offload.HostCache, "saved", "if arrived:", "if True:"),
    "a request whose copy failed gets other blocks": (
        restoring.Restorer, "give_up", "self.engine.requeue(request)", "self.end(request)",
    ),
    "a preempted request is not scheduled": (
        paged.Engine, "schedule", "if request not in self.running:", "if False:",
    ),
    "a step that was given up is no step": (
        restoring.Restorer, "wait", "raise Interrupted", "pass",
    ),
    "slots that were not written are not read": (
        paged.Batch, "read_padded", "slots.where(seen, slots[:, :1])", "slots",
    ),
    "layers are waited for in the pass": (
        paged.Engine, "before_layer", "self.restorer.wait(request, index + 1)", "pass",
    ),
    "blocks that are found were filled": (
        paged.Engine, "register",
        "full = request.computed // self.pool.block_size",
        "full = -(-request.computed // self.pool.block_size)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_without_its_guard_traffic_goes_wrong(monkeypatch, guard):
    without(monkeypatch, *GUARDS[guard])
    try:
        for seed in range(3):
            counts = traffic.run("host", 500, seed, share=0.2)
            if counts["wrong"] or counts["failed"]:
                return
    except (AssertionError, IndexError, KeyError, ValueError, AttributeError):
        return
    pytest.fail(f"nobody noticed that this is not so any more: {guard}")
