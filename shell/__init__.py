"""A program around an engine: models, the command line, the server, demos. No lesson opens it."""
import atexit
import json
import os
import signal
import sys
from contextlib import suppress

# How often PyTorch's threads look for work before they sleep, read when it is imported. By default they look
# for some ms: beside other processes that takes time from those who work (a token took 1.9 times as long).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# PyTorch and oneDNN keep 128 kernels, and not 1,024: each is for one number of rows and one shape of weights,
# and takes some 0.7 MB, or 0.3 ms to make it again. Whoever sets these variables has the say.
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def print_exception(kind, error, trace, others=sys.excepthook):
    """End with one line after Ctrl-C, also while PyTorch is imported; with none where `| head` has enough."""
    if kind is BrokenPipeError:
        os._exit(1)
    print("\nInterrupted.", file=sys.stderr) if kind is KeyboardInterrupt else others(kind, error, trace)


@atexit.register
def flush():
    """Python says it otherwise when the last words find nobody."""
    try:
        sys.stdout and sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


signals: list[int] = []     # that have told this process to end


def interrupt(number: int, frame):
    """Handle a signal as Python handles Ctrl-C, and note it: in a __del__, or where C calls Python, the
    exception is lost."""
    signals.append(number)
    raise KeyboardInterrupt(number)


def handle_signals(*numbers: int):
    """Let these signals interrupt this process, except those that are ignored, or handled otherwise."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


def check_signals():
    """Raise the KeyboardInterrupt that was lost, if any. Call it before work that takes long."""
    if signals:
        raise KeyboardInterrupt(signals[0])


sys.excepthook = print_exception
unraisable = sys.unraisablehook
sys.unraisablehook = lambda lost: lost.exc_type is KeyboardInterrupt or unraisable(lost)
with suppress(ValueError):      # on another thread than the main one
    handle_signals(signal.SIGINT)
import numpy  # noqa: E402, F401  (else PyTorch does it, in C, where Ctrl-C is lost)


def exit_process(code: int, words: str = "\nInterrupted."):
    """Say so and end the process at once: other threads may be inside a long product, or wait for ever."""
    with suppress(BaseException):       # as of a pipe that is closed
        print(words, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def to_json(value, **options) -> str:
    """Write strict JSON, which knows no infinity: a number that is not finite is null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), **options)
