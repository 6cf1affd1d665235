"""The lower tier of the chapters' engines: a Cache, its driver, and the speeds of this machine."""
from common.estimates import Estimates
from common.restoring import Restorer
from shell.machine import machine_of


def restorer(model, cache, always: bool) -> Restorer:
    """Return the driver of a Cache. `always`: restore even if computing is faster (--always-restore)."""
    return Restorer(cache, Estimates(machine_of(model), always))
