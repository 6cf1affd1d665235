"""The program around an engine: model loading, command line, server, demos. No lesson opens it."""
import atexit
import json
import os
import signal
import sys
from contextlib import suppress
from functools import cache

# PyTorch's OpenMP threads spin before they sleep; PyTorch reads this setting when it is imported. The default
# is to spin for milliseconds, which slows other processes down: a token took 1.9 times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Cache 128 kernels in PyTorch and in oneDNN instead of 1,024. Each serves one number of rows and one shape
# of weights. It takes about 0.7 MB, and 0.3 ms to build again. Values that the user has set take precedence.
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def print_exception(kind, error, trace, others=sys.excepthook):
    """Print one line after Ctrl-C, even while PyTorch is imported; print nothing after a broken pipe."""
    if kind is BrokenPipeError:
        os._exit(1)
    print("\nInterrupted.", file=sys.stderr) if kind is KeyboardInterrupt else others(kind, error, trace)


@atexit.register
def flush():
    """Flush stdout at exit, and suppress Python's own BrokenPipeError message."""
    try:
        sys.stdout and sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


signals: list[int] = []     # signals received so far
warn_once = cache(print)    # prints a line only the first time


def interrupt(number: int, frame):
    """Handle a signal as Python handles Ctrl-C, and record it for `check_signals`.

    Python drops an exception that is raised in a __del__, or in Python code that C has called."""
    signals.append(number)
    raise KeyboardInterrupt(number)


def handle_signals(*numbers: int):
    """Let these signals interrupt this process, unless they are ignored or already have a handler."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


def check_signals():
    """Raise KeyboardInterrupt if a signal arrived whose exception was lost. Call it before long work."""
    if signals:
        raise KeyboardInterrupt(signals[0])


sys.excepthook = print_exception
unraisable = sys.unraisablehook
sys.unraisablehook = lambda lost: lost.exc_type is KeyboardInterrupt or unraisable(lost)
with suppress(ValueError):      # only the main thread may set handlers
    handle_signals(signal.SIGINT)
import numpy  # noqa: E402, F401  (else PyTorch imports it from C, where Ctrl-C is lost)


def exit_process(code: int, words: str = "\nInterrupted."):
    """Print `words` and end the process at once, since other threads may compute for long or wait forever."""
    with suppress(BaseException):       # the pipe may be closed
        print(words, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def to_json(value, **options) -> str:
    """Write strict JSON, which has no infinity and no NaN: a number that is not finite becomes null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), **options)
