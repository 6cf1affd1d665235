"""The command line of all chapters: its output and files, its errors for wrong input, and how it ends."""
import gc
import io
import itertools
import json
import mmap
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import numpy
import pytest
import torch
from conftest import ROOT

from shell import checkpoint, limits, server
from tests.support import forked
from tests.support.serving import TIMEOUT, Client, Reply, eventually
from tests.support.stub import Engine

SCRIPT = ROOT / "tests" / "support" / "chapter.py"
TINY = ("--model", "random:tiny")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}


def run_here(monkeypatch, capsys, *arguments) -> tuple[str, str]:
    """Run the command line in this process, which saves the import of PyTorch. Returns: (stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr()


def refused_here(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    """Run a command line that must be refused, in this process. Returns: (exit code, its one line of error)."""
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, capsys, *arguments)
    said, complaint = capsys.readouterr()
    code = end.value.code
    if isinstance(code, str):                   # sys.exit("words") prints them and ends with 1
        code, complaint = 1, complaint + code
    line, = (line for line in complaint.splitlines() if not line.startswith("KV pool"))
    assert said == ""
    return code, line


@pytest.fixture(autouse=True)
def signals(monkeypatch):
    """Keep `main` from changing this process: its signal handlers, and the encoding errors of stdout."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(type(sys.stdout), "reconfigure", lambda *_, **__: None, raising=False)


# 1. Valid input --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("explain", [False, True])
def test_prompt_prints_the_answer_and_closes_the_engine(monkeypatch, capsys, tiny_folder, tmp_path, explain):
    files, closed, limited = {name: tmp_path / name for name in ("json", "trace")}, [], []
    monkeypatch.setattr(limits, "limit_threads", lambda: limited.append(True))
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr(sys, "stderr", sys.stdout)      # as on a terminal, which shows both
    said, _ = run_here(monkeypatch, capsys, "--model", tiny_folder, "--prompt", "Hello", "--max-tokens", 20,
                       *["--explain"] * explain, *(f"--{name}={path}" for name, path in files.items()))
    report, (engine,) = json.loads(files["json"].read_text()), closed
    request, = engine.asked
    assert limited and (request.temperature, request.max_tokens, engine.explain) == (0, 20, explain)
    before, _, rest = said.partition(report["text"] + "\n\n")
    assert {line[:5] for line in before.splitlines()} == {"KV po", *["step "] * explain} and "20 new; TTFT" in rest
    assert said.endswith("nothing was offered: the prompt is computed\n")
    assert (report["chapter"], report["model"], report["device"]) == ("stub", str(tiny_folder), "cpu")
    assert len(report["tokens"]) == 20 and report["finish_reason"] == "length" and report["source"] == "miss"
    spans = [event for event in json.loads(files["trace"].read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 20 == len(report["timeline"])


def test_the_end_prints_the_number_of_dropped_writes(monkeypatch, capsys):
    for dropped in 0, 3:
        monkeypatch.setattr(Engine, "close", lambda engine, count=dropped: engine.counts.update(writes_dropped=count))
        _, said = run_here(monkeypatch, capsys, *TINY, "--prompt", "Hello")
        assert ("3 writes were dropped" in said) == bool(dropped)


def test_help_lists_the_options(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, capsys, "--help")
    assert end.value.code == 0 and "--max-tokens" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", None])
def test_an_odd_terminal_does_not_stop_an_answer(monkeypatch, capsys, tmp_path, encoding):
    """The terminal has no UTF-8, or stdout and stderr are closed (`>&- 2>&-`)."""
    with monkeypatch.context() as patch:
        for name in "stdout", "stderr":
            patch.setattr(sys, name, encoding and io.TextIOWrapper(io.BytesIO(), encoding))
        patch.setattr(sys, "argv", [str(SCRIPT), *TINY, "--prompt", "Gr\u00fc\u00dfe", "--max-tokens", "40", "--json", str(tmp_path / "json")])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        sys.stdout.flush()
        assert encoding is None or b"Gr??e" in sys.stdout.buffer.getvalue()
    assert json.loads((tmp_path / "json").read_text())["text"]


@pytest.mark.parametrize("words, unbuffered", [((SCRIPT, *TINY, "--prompt", "Hello"), "1"), (("-m", "tools.by_hand", "05"), "")])
def test_a_closed_pipe_ends_a_program_quietly(words, unbuffered):
    """Without a buffer the pipe breaks during the run, and with one at exit."""
    reading, writing = os.pipe()
    os.close(reading)                           # as after `| head`
    with open(writing, "w") as closed:
        done = subprocess.run([sys.executable, *words], stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                              env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}, timeout=TIMEOUT)
    said = [line for line in done.stderr.splitlines() if not line.startswith("KV pool")]
    assert done.returncode == 1 and said == []


# 2. Wrong input --------------------------------------------------------------------------------------------

NO_MEMORY = "There is not enough memory; make --model smaller, or choose a 16-bit --dtype."
REFUSED = [  # (exit code, words of the error, arguments); arguments are checked before the model is looked for
    (2, "'99999'", ["--port", "99999"]), (2, "'-1'", ["--port", "-1"]), (2, "'http'", ["--port", "http"]),
    (2, "--flash", ["--flash"]), (2, "--mod", ["--mod", "random:tiny"]), (2, "bonjour", ["bonjour"]), (2, "--json", ["--json"]),
    (2, "--demo", ["--demo", "--prompt", "Hello"]), (2, "'0'", ["--max-tokens", "0"]), (2, "'1.5'", ["--max-tokens", "1.5"]),
    (2, "'9" + "9" * 30, ["--max-tokens", "9" * 5000]), (2, "'nan'", ["--pause", "nan"]), (2, "'-1'", ["--pause", "-1"]),
    (2, "cpu", ["--prompt", "Hello", "--device", "tpu"]),
    (1, "No model 'nonsense'", ["--prompt", "Hello", "--model", "nonsense"]), (1, "512", [*TINY, "--prompt", "x" * 600]),
    (1, "must not be empty", [*TINY, "--prompt", ""]), (1, "UTF-8", [*TINY, "--prompt", "\udcff"]),
    (1, "address is empty", ["--host", ""]), (1, "Cannot listen", ["--host", "x" * 99]),
    (1, "no.such.host.invalid", ["--host", "no.such.host.invalid"]),
    (1, "/no/such/x.json", [*TINY, "--json", "/no/such/x.json"]), (1, "'/'", [*TINY, "--prompt", "Hello", "--trace", "/"]),
]


@pytest.mark.parametrize("code, words, arguments", REFUSED, ids=[" ".join(row[2])[:40] for row in REFUSED])
def test_a_refused_command_line_prints_one_line_and_changes_no_file(monkeypatch, capsys, tmp_path, code, words, arguments):
    (tmp_path / "trace").write_text("before")
    files = [f"--{name}={tmp_path / name}" for name in ("json", "trace")]
    ended, line = refused_here(monkeypatch, capsys, *files, *arguments)
    assert ended == code and words in line and ("stub" in line or "chapter.py" in line)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_port_in_use_is_refused_before_the_model_is_loaded(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, line = refused_here(monkeypatch, capsys, "--model", "nonsense", "--port", port)
    assert f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


@pytest.mark.parametrize("allocate", [
    lambda *_, **__: torch.empty(1 << 50, dtype=torch.uint8), lambda *_, **__: numpy.empty(1 << 50, "u1"),
    lambda *_, **__: mmap.mmap(-1, 1 << 50)], ids=["torch", "numpy", "mmap"])
@pytest.mark.parametrize("where", [(Engine, "__init__"), (checkpoint, "allocate")], ids=["engine", "model"])
def test_a_failed_allocation_names_the_options_to_make_smaller(monkeypatch, capsys, where, allocate):
    monkeypatch.setattr(*where, allocate)
    for words in ["--prompt", "Hello"], ["--demo"], ["--port", "0"]:
        assert refused_here(monkeypatch, capsys, *TINY, *words) == (1, f"stub: {NO_MEMORY}")


# 3. Serving and Ctrl-C --------------------------------------------------------------------------------------

@pytest.mark.parametrize("host,shown", [("", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")])
def test_a_server_listens_on_loopback_and_prints_an_address_for_browsers(monkeypatch, capsys, host, shown):
    served, frozen, ends, serve = [], [], [], server.serve
    monkeypatch.setattr(server, "serve", lambda *given: served.append(given) or serve(*given))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(server.Server, "run", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "_exit", ends.append)
    said, complaint = run_here(monkeypatch, capsys, *TINY, "--port", "0", *["--host", host][:2 * bool(host)])
    (listener, made), = served
    assert listener.host == (host or "127.0.0.1") and made.info["chapter"] == "stub"
    assert made.frontend.fields == Engine.fields
    assert frozen == [True] and ends == [130] and complaint.endswith("\nInterrupted.\n")
    assert f"stub serves random:tiny on http://{shown}:{listener.port} " in said    # an address that works in a browser


SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
CHAPTERS = sorted(path.name for path in ROOT.glob("0*.py"))
SWALLOWED = """
import os, signal
signal.getsignal({0:d}) or exit("no handler")
try:
    os.kill(os.getpid(), {0:d})
except BaseException:
    pass
"""


@pytest.mark.parametrize("chapter, number", zip(CHAPTERS, itertools.cycle(SIGNALS)))
def test_a_signal_during_the_import_of_pytorch_ends_a_chapter(tmp_path, chapter, number):
    """PyTorch's C code drops exceptions, and process 1 needs a handler."""
    (tmp_path / "torch.py").write_text(SWALLOWED.format(number))
    done = subprocess.run([sys.executable, ROOT / chapter], capture_output=True, timeout=TIMEOUT,
                          env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"\nInterrupted.\n")


HOST = """
import importlib, os, signal, sys, torch, transformers
from pathlib import Path
def state():
    return dict(os.environ), [*map(signal.getsignal, range(1, 65))], sys.excepthook, sys.unraisablehook
before = state()
for path in sorted([*Path().glob("*.py"), *Path("common").glob("*.py"), *Path("shell").glob("*.py")]):
    if path.stem not in ("settings", "start"):
        importlib.import_module(".".join(path.with_suffix("").parts))
        assert state() == before, path
"""


def test_an_import_changes_nothing_in_the_process():
    bare = {name: value for name, value in ENVIRONMENT.items() if name not in ("OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY")}
    done = subprocess.run([sys.executable, "-c", HOST], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, env=bare)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def running(folder, *arguments, before: str = ""):
    """Context manager: run the script in a process of its own, for tests that interrupt it.

    `before`: code that the process runs first. `said()`: its output on stdout, then on stderr."""
    (folder / "script.py").write_text(f"{before}\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    process = forked.start(folder, folder / "script.py", *TINY, *arguments)
    process.said = lambda: "".join((folder / name).read_text() for name in forked.OUTPUTS)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def says(process, words: str):
    """Wait until the output has these words, and fail if the process ends before."""
    eventually(lambda: words in process.said() or process.exitcode is not None)
    assert words in process.said(), process.said()


def interrupted(process, number=signal.SIGINT, status: int = 130) -> str:
    """Send a signal (default: Ctrl-C). The process must end by itself, with `status` and without a traceback.

    Returns: its output."""
    os.kill(process.pid, number)
    process.join(TIMEOUT)
    said = process.said()
    assert process.exitcode == status, said
    assert said.endswith("\nInterrupted.\n") and "Traceback" not in said and "Error" not in said
    return said


def test_ctrl_c_ends_an_answer_at_once(tmp_path):
    with running(tmp_path, "--prompt", "Hello", "--pause", "0.1", "--max-tokens", "400") as process:
        says(process, "Hel")
        assert "TTFT" not in interrupted(process)


def ask_three(process) -> list:
    """Send three requests to a server and return the connections. One request runs, the others are queued."""
    says(process, "(Ctrl-C ends it)\n")
    process.client = client = Client(int(process.said().split("127.0.0.1:")[1].split()[0]))
    connections = [client.send("/generate", dict(prompt="Hello", max_tokens=400)) for _ in range(3)]
    eventually(lambda: client.counters()["requests"] == 3)
    assert client.ask("/health").json["title"] == "A chapter with the stub engine, for tests of the command line."
    return connections


@pytest.mark.parametrize("pause,ending,number,status", [
    ("0.05", "60", signal.SIGTERM, 143), ("60", "1", signal.SIGINT, 130),  # a step that takes longer than the server waits
    ("60", "60", signal.SIGINT, 130)])  # a second Ctrl-C ends it at once
def test_a_closing_server_answers_its_clients(tmp_path, pause, ending, number, status):
    with running(tmp_path, "--port", "0", "--pause", pause, "--explain", "--ending", ending) as process:
        connections = ask_three(process)
        if pause == ending:
            os.kill(process.pid, signal.SIGINT)
            assert told(connections[0])
            connections.clear()  # the others may not be told
        lines = interrupted(process, number, status).splitlines()
        assert all(map(told, connections))
        threads = {line.partition(" on ")[2] for line in lines if " rows " in line and " on " in line}
        assert threads == {"MainThread"}, "all steps run on the thread that loaded the weights"
        closed = [line.rpartition("  ")[2] for line in lines if "  close " in line]
        assert closed == (["between steps"] if number == signal.SIGTERM else []), "the engine is not closed during a step"


def test_a_server_under_nohup_ignores_hang_ups(tmp_path):
    ignored = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"      # as nohup does it
    with running(tmp_path, "--port", "0", "--pause", "0.05", before=ignored) as process:
        connections = ask_three(process)
        before = process.client.counters()["steps"]
        os.kill(process.pid, signal.SIGHUP)
        eventually(lambda: process.client.counters()["steps"] > before + 20)
        interrupted(process, signal.SIGTERM, 143)
        assert all(map(told, connections))


def test_a_signal_to_another_thread_ends_an_idle_server(tmp_path):
    asleep = "import signal, threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    asleep += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"      # of the main thread: nothing wakes it
    with running(tmp_path, "--port", "0", before=asleep) as process:
        says(process, "(Ctrl-C ends it)\n")
        interrupted(process, signal.SIGTERM, 143)


def told(connection) -> bool:
    return "shutting down" in Reply(connection.getresponse()).error(503, "server_error")
