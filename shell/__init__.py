"""The program around an engine: model loading, command line, server, demos. No lesson opens it.

To import it changes nothing in the process. Two of its modules do, for the programs of this project:
`shell.settings` and `shell.start`."""
import json
import os
import signal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

# Prints a line on stderr the first time that it is given
warn_once = cache(lambda line: print(line, file=sys.stderr))


def exit_process(code: int, words: str = "\nInterrupted."):
    """Print `words` and end the process at once, since other threads may compute for long or wait forever."""
    with suppress(BaseException):       # the pipe may be closed
        print(words, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def handle_signals(handler):
    """Call `handler(number, frame)` for each signal that ends a program, unless this process ignores it.

    A shell makes background jobs ignore Ctrl-C, and nohup makes a program ignore SIGHUP."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number: int, frame):
    """Handle a signal by an exception, so that files and child processes are cleaned up."""
    raise KeyboardInterrupt(number)


def read_words(name: str) -> list[list[str]]:
    """Return the words of each line of a text file in this folder."""
    return [line.split() for line in Path(__file__).with_name(name).read_text().splitlines()]


def to_json(value, **options) -> str:
    """Write strict JSON, which has no infinity and no NaN: a number that is not finite becomes null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), **options)
