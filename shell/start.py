"""The first line of a chapter that runs as a program: settings, and handlers of signals.

PyTorch takes seconds to import, and may swallow an exception that a handler raises. So until there is an
engine, a signal ends the process at once. Process 1 of a container ignores signals that have no handler.

Garbage is not collected before a model is loaded (shell/checkpoint.py). Imports make none, and collecting
takes a tenth of their time."""
import gc

import shell.settings  # noqa: F401
from shell import exit_process, handle_signals

gc.disable()
handle_signals(lambda number, frame: exit_process(128 + number))
