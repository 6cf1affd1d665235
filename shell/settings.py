"""Settings of this project's programs: how PyTorch's threads wait, and how a program ends.

To import this module changes environment variables and exception hooks of the process. Import it before
PyTorch, and only from the main module of a program, from its package, or from the tests."""
import atexit
import os
import sys

# PyTorch's OpenMP threads spin before they sleep; PyTorch reads this setting when it is imported. The default
# is to spin for milliseconds, which slows other processes down: a token took 1.9 times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Cache 128 kernels in PyTorch and in oneDNN instead of 1,024. Each serves one number of rows and one shape
# of weights. It takes about 0.7 MB, and 0.3 ms to build again. Values that the user has set take precedence.
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def print_exception(kind, error, trace, others=sys.excepthook):
    """Print one line after Ctrl-C, and nothing after a broken pipe."""
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


sys.excepthook = print_exception
