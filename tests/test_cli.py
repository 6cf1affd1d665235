"""The command line: what it prints and writes, what it says to wrong input, and Ctrl-C."""
import http.client
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "01_baseline.py"
TIMEOUT = 300                      # seconds; nothing here takes more than a few
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


def run(*arguments, **environment):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=TIMEOUT,
                          encoding="utf-8", errors="replace", env={**ENVIRONMENT, **environment})


# 1. What is asked rightly ----------------------------------------------------------------------------------------

def test_prompt_prints_the_answer_and_writes_its_numbers(tiny_folder, tiny_engine, tmp_path):
    expected = tiny_engine.generate(prompt="Hello", max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7, stop=["#"])
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    done = run("--model", str(tiny_folder), "--prompt", "Hello", "--max-tokens", "12", "--temperature", "0.8", "--top-p", "0.9",
               "--top-k", "40", "--seed", "7", "--stop", "#", "--json", str(report), "--trace", str(trace))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(expected.text.replace("\r", "\n"))            # a pipe read as text folds line ends
    assert done.stdout.splitlines()[-1].startswith(
        f"{expected.usage['prompt_tokens']} prompt tokens, 0 of them cached (miss); {len(expected.tokens)} new; TTFT ")

    written = json.loads(report.read_text())
    assert (written["chapter"], written["model"], written["dtype"]) == ("01_baseline", str(tiny_folder), "float32")
    assert written["tokens"] == expected.tokens and written["text"] == expected.text and written["usage"] == expected.usage
    assert written["ttft_ms"] > 0

    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [span["name"].split()[0] for span in spans] == ["prefill"] + ["decode"] * (len(spans) - 1)
    assert len(spans) >= len(expected.tokens) and all(span["dur"] > 0 for span in spans)


def test_life_without_a_kv_cache_and_without_reordered_weights_gives_the_same_tokens(tiny_folder, tiny_engine, tmp_path):
    report = tmp_path / "report.json"
    done = run("--model", str(tiny_folder), "--prompt", "Hello", "--max-tokens", "12", "--no-kv-cache", "--plain-weights",
               "--prefill-chunk", "3", "--json", str(report))
    written = json.loads(report.read_text())
    assert done.returncode == 0 and written["tokens"] == tiny_engine.generate(prompt="Hello", max_tokens=12).tokens
    assert not any(span["label"] == "decode" for span in written["timeline"])


def test_help_names_every_option_of_the_design():
    done = run("--help")
    assert done.returncode == 0
    for option in "--demo --prompt --host --port --model --device --dtype --max-tokens --json --trace --no-kv-cache".split():
        assert option in done.stdout


def test_a_terminal_without_utf8_shows_the_answer_all_the_same():
    done = run("--model", "random:tiny", "--prompt", "Hello", "--max-tokens", "40", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "?" in done.stdout and "TTFT" in done.stdout and done.stderr == ""


# 2. What is asked wrongly ----------------------------------------------------------------------------------------

def refused(*arguments) -> str:
    """Run it and -> its one line of complaint."""
    done = run(*arguments)
    assert done.returncode in (1, 2), done
    assert done.stdout == "" and "Traceback" not in done.stderr
    line, = done.stderr.splitlines()
    return line


TINY = ("--model", "random:tiny")


@pytest.mark.parametrize("words,arguments", [
    ("'99999'", ["--port", "99999"]), ("No model 'nonsense'", ["--prompt", "Hello", "--model", "nonsense"]),
    ("no such folder", ["--prompt", "Hello", "--model", "x" * 300]), ("nobody/nothing", ["--demo", "--model", "nobody/nothing"]),
    ("UTF-8", [*TINY, "--prompt", b"\xff\xfe"]), ("512", [*TINY, "--prompt", "x" * 600]),
    ("/no/such/x.json", [*TINY, "--json", "/no/such/x.json"]),
], ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "")
def test_wrong_input_ends_with_one_clear_line(words, arguments):
    assert words in refused(*arguments)


@pytest.mark.parametrize("words,arguments", [
    ("--flash", ["--flash"]), ("--mod", ["--mod", "random:tiny"]), ("bonjour", ["bonjour"]), ("--json", ["--json"]),
    ("--demo", ["--demo", "--prompt", "Hello"]), ("'-1'", ["--port", "-1"]), ("'http'", ["--port", "http"]),
    ("'0'", ["--max-tokens", "0"]), ("'-5'", ["--max-tokens", "-5"]), ("'1.5'", ["--max-tokens", "1.5"]),
    ("'1" + "0" * 30, ["--max-tokens", "1" + "0" * 30]), ("'9" + "9" * 30, ["--seed", "9" * 5000]),
    ("'nan'", ["--temperature", "nan"]), ("'inf'", ["--temperature", "inf"]), ("'-0.1'", ["--temperature=-0.1"]),
    ("'1e999'", ["--temperature", "1e999"]), ("'0'", ["--top-p", "0"]), ("'-1'", ["--top-k", "-1"]), ("'-1'", ["--seed", "-1"]),
    ("'0'", ["--prefill-chunk", "0"]), ("not empty", ["--prompt", ""]), ("not empty", ["--prompt", "Hello", "--stop", ""]),
    ("random:small", ["--prompt", "Hello", "--model", "random:nonsense"]), ("cpu", ["--prompt", "Hello", "--device", "tpu"]),
    ("float32", [*TINY, "--prompt", "Hello", "--dtype", "float8"]), ("'/'", [*TINY, "--prompt", "Hello", "--trace", "/"]),
    ("no.such.host.invalid", ["--host", "no.such.host.invalid"]), ("label", ["--host", "x" * 99]),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_wrong_options_end_with_one_clear_line(monkeypatch, capsys, words, arguments):
    """The script as it stands, but in this process: importing PyTorch takes longer than all of these."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said, complaint = capsys.readouterr()
    if isinstance(end.value.code, str):         # sys.exit("words") prints them and ends with 1
        complaint += end.value.code + "\n"
    line, = complaint.splitlines()
    assert end.value.code and said == "" and words in line and "01_baseline" in line


@pytest.mark.parametrize("missing,words", [("model.safetensors", "has no *.safetensors"), ("config.json", "has no config.json"),
                                           ("tokenizer.json", "has no tokenizer.json")])
def test_a_folder_that_lacks_a_file_is_told_which(tiny_folder, tmp_path, missing, words):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns(missing))
    assert words in refused("--model", str(folder), "--prompt", "Hello")


def test_a_port_in_use_is_told_before_the_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--model", "nonsense", "--port", str(port))
    assert line.startswith("01_baseline: ") and f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


# 3. Ctrl-C -------------------------------------------------------------------------------------------------------

class Process:
    """The script in its own process, to be interrupted. stdout and stderr come in one stream."""

    def __init__(self, *arguments):
        # A shell may have had Ctrl-C ignored for what it runs in the background, and children inherit that
        self.process = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=ENVIRONMENT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
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

    def interrupt(self):
        """Ctrl-C; it must end by itself, and quietly."""
        self.process.send_signal(signal.SIGINT)
        rest, _ = self.process.communicate(timeout=TIMEOUT)
        self.output += rest
        assert self.process.returncode == 130, self.output
        assert self.output.endswith(b"\nInterrupted.\n") and b"Traceback" not in self.output and b"Error" not in self.output


@needs_signals
def test_ctrl_c_while_the_model_is_loaded():
    with Process("--model", "random:small", "--port", "0") as process:
        process.read_until(b"random weights", b" serves ")
        process.interrupt()


@needs_signals
def test_ctrl_c_in_the_middle_of_an_answer():
    with Process(*TINY, "--prompt", "Hello", "--max-tokens", "500", "--no-kv-cache") as process:
        process.output = os.read(process.process.stdout.fileno(), 1)
        process.interrupt()
        assert b"TTFT" not in process.output


@needs_signals
@pytest.mark.parametrize("asking", [False, True])
def test_ctrl_c_while_serving(asking):
    with Process(*TINY, "--port", "0", "--no-kv-cache") as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        assert b"01_baseline serves random:tiny on http://127.0.0.1:" in process.output
        port = int(process.output.split(b"127.0.0.1:")[1].split()[0])
        connections = []
        for _ in range(3 * asking):             # one is being answered, the others wait
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT))
            connections[-1].request("POST", "/generate", json.dumps(dict(prompt="Hello", max_tokens=500)))
        while asking and counters(port)["requests"] < 3:
            time.sleep(0.01)
        process.interrupt()
        if asking:
            assert 503 in map(status, connections)          # who waited was told


def status(connection) -> int:
    """Of the answer, 0 if the server was gone first."""
    try:
        return connection.getresponse().status
    except (http.client.RemoteDisconnected, ConnectionError):
        return 0


def counters(port: int) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())["counters"]


@needs_signals
def test_ctrl_c_in_the_demo():
    with Process(*TINY, "--demo") as process:
        process.read_until(b"\n")
        process.interrupt()
