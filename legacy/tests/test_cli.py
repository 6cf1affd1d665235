"""The command line of chapters 07 and 08: Ctrl-C, and what an engine keeps outside of this process."""
import gc
import io
import os
import signal
import subprocess
import sys

import pytest

from common import checkpoint
from legacy import app
from legacy.tests import warm
from legacy.tests.conftest import chapter

TIMEOUT = 300                      # seconds; nothing here takes more than a few
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


def start(*arguments, script, fresh=False, together=False, **environment):
    """The script in its own process. A fresh one is a Python of its own; others are forked where they can be, which is faster."""
    environment = {**ENVIRONMENT, **environment}
    if not fresh and warm.available():
        return warm.Process([script, *arguments], environment, together)
    return subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, env=environment,
                            stderr=subprocess.STDOUT if together else subprocess.PIPE,
                            preexec_fn=heed_ctrl_c if os.name == "posix" else None)


def heed_ctrl_c():
    """A shell may have had Ctrl-C ignored for what it runs in the background, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*arguments, **options) -> subprocess.CompletedProcess:
    process = start(*arguments, **options)
    try:
        said = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    said = (io.TextIOWrapper(io.BytesIO(stream), "utf-8", "replace").read() for stream in said)         # \r\n and \r are \n then
    return subprocess.CompletedProcess(arguments, process.returncode, *said)


TINY = ("--model", "random:tiny")
TINY_CPU = [*TINY, "--device", "cpu"]


# 1. Ctrl-C -------------------------------------------------------------------------------------------------------

class Process:
    """The script in its own process, to be interrupted. stdout and stderr come in one stream."""

    def __init__(self, *arguments, **options):
        self.process = start(*arguments, together=True, **options)
        self.output = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def read_until(self, *words: bytes):
        while not any(word in self.output for word in words):
            piece = os.read(self.process.stdout.fileno(), 4096)
            assert piece, self.output
            self.output += piece

    def interrupt(self, number=signal.SIGINT):
        """Ctrl-C; it must end by itself, and quietly."""
        self.process.send_signal(number)
        self.output += self.process.communicate(timeout=TIMEOUT)[0]
        assert self.process.returncode == 130, self.output
        assert self.output.endswith(b"\nInterrupted.\n") and b"Traceback" not in self.output and b"Error" not in self.output


# 2. What an engine keeps outside of this process -----------------------------------------------------------------

def interrupted(*_):
    raise KeyboardInterrupt


def broken(*_):
    raise RuntimeError("a defect")


OUTCOMES = {
    "an answer": (["--prompt", "Hello", "--max-tokens", "2"], None, None),
    "a prompt too long": (["--prompt", "x" * 600], None, app.BadRequest),
    "numbers that cannot be written": (["--prompt", "Hello", "--max-tokens", "2", "--json", "FILE"], None, OSError),
    "the demo": (["--demo"], lambda engine, arguments: ({}, []), None),
    "a demo that is interrupted": (["--demo"], interrupted, KeyboardInterrupt),
    "a demo that fails": (["--demo"], broken, RuntimeError),
    "a demo that exits": (["--demo"], lambda *_: sys.exit("NOT verified"), SystemExit),
    "a server": (["--port", "0"], None, KeyboardInterrupt),
}


@pytest.mark.parametrize("what", OUTCOMES)
def test_whatever_comes_of_it_the_engine_is_released_once(tmp_path, monkeypatch, capsys, what):
    arguments, demo, error = OUTCOMES[what]
    released, baseline = [], chapter("01_baseline")

    class Engine(baseline.Engine):
        def release(self):
            released.append(self)

    def make(model, tokenizer, end_tokens, _):
        made.append(Engine(model, tokenizer, end_tokens))
        return made[-1]
    made = []
    monkeypatch.setattr("werkzeug.serving.ThreadedWSGIServer.serve_forever", lambda self, *_: None)     # as after Ctrl-C
    monkeypatch.setattr("time.sleep", lambda *_: None)
    parsed = app.parser_for("").parse_args([*TINY_CPU, *arguments])
    if "FILE" in arguments:
        parsed.json = tmp_path / "report.json"
        monkeypatch.setattr(app, "write_trace", None)
        monkeypatch.setattr("pathlib.Path.write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))

    def run_it():
        app.run("01_baseline", parsed, checkpoint.load, make, dict(demo=demo))
    if error:
        with pytest.raises(error):
            run_it()
    else:
        run_it()
    assert len(made) == 1 and released == made


def test_in_a_server_the_garbage_collector_leaves_alone_what_was_there_before(monkeypatch):
    """Going through all that is imported takes 0.1 s and more, in which nobody gets a token."""
    gc.unfreeze()
    counts, parsed = [], app.parser_for("").parse_args([*TINY_CPU, "--port", "0"])
    monkeypatch.setattr(app, "serve", lambda *_: counts.append(gc.get_freeze_count()))

    def make(model, tokenizer, end_tokens, _):
        return chapter("01_baseline").Engine(model, tokenizer, end_tokens)
    app.run("01_baseline", parsed, checkpoint.load, make, {})
    gc.unfreeze()
    assert counts[0] > 100_000


def test_an_engine_that_keeps_nothing_outside_releases_nothing(tiny_engine):
    engine = chapter("02_paged_kv").Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens)
    assert engine.release() is None and engine.generate(prompt="Hello", max_tokens=2).tokens
    engine.close()


