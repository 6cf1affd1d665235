"""The command line: what it prints and writes, what it says to wrong input, and Ctrl-C."""
import gc
import http.client
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "01_baseline.py"
PAGED, OFFLOAD = SCRIPT.with_name("02_paged_kv.py"), SCRIPT.with_name("03_cpu_offload.py")
SIZES = ("KV pool: ", "Host pool: ", "The host is reached over a ")       # how lines begin that are no complaint
TIMEOUT = 300                      # seconds; nothing here takes more than a few
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


def run(*arguments, script=SCRIPT, **environment):
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=TIMEOUT,
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

def refused(*arguments, script=SCRIPT) -> str:
    """Run it and -> its one line of complaint."""
    done = run(*arguments, script=script)
    assert done.returncode in (1, 2), done
    assert done.stdout == "" and "Traceback" not in done.stderr
    line, = (line for line in done.stderr.splitlines() if not line.startswith(SIZES))
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
    line = refused_here(monkeypatch, capsys, SCRIPT, arguments)
    assert words in line and "01_baseline" in line


def refused_here(monkeypatch, capsys, script, arguments) -> str:
    """`refused` of the script as it stands, but in this process: importing PyTorch takes longer than all of these."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    said, complaint = capsys.readouterr()
    if isinstance(end.value.code, str):         # sys.exit("words") prints them and ends with 1
        complaint += end.value.code + "\n"
    line, = (line for line in complaint.splitlines() if not line.startswith(SIZES))
    assert end.value.code and said == ""
    return line


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

    def __init__(self, *arguments, script=SCRIPT):
        # A shell may have had Ctrl-C ignored for what it runs in the background, and children inherit that
        self.process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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


# 4. Chapter 02 ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options,blocks,size", [(["--gpu-blocks", "500", "--block-size", "100"], 500, 100),
                                                 (["--max-running", "3"], 3 * 256 // 16, 16)], ids=str)
def test_paged_prompt_prints_the_pool_and_the_answer_of_chapter_01(tiny_folder, tiny_engine, tmp_path, options, blocks, size):
    expected = tiny_engine.generate(prompt="Hello", max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    done = run("--model", str(tiny_folder), "--device", "cpu", "--prompt", "Hello", "--max-tokens", "12", "--temperature", "0.8",
               "--top-p", "0.9", "--top-k", "40", "--seed", "7", "--json", str(report), "--trace", str(trace), *options,
               script=PAGED)
    assert done.returncode == 0 and done.stdout.startswith(expected.text.replace("\r", "\n"))
    assert " 0 of them cached (miss); " in done.stdout.splitlines()[-1]
    megabytes = blocks * size * tiny_engine.model.config.kv_numbers_per_token * 4 / 1e6
    assert done.stderr == f"KV pool: {blocks} blocks of {size} tokens, {blocks * size} tokens, {megabytes:.1f} MB\n"

    written = json.loads(report.read_text())
    assert (written["chapter"], written["dtype"], written["source"]) == ("02_paged_kv", "float32", "miss")
    assert written["tokens"] == expected.tokens and written["usage"] == expected.usage
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [name.split()[0] for name in spans] == ["prefill"] + ["decode"] * (len(expected.tokens) - 1)


def test_paged_prompt_leaves_no_thread_behind(monkeypatch, capsys):
    """One that is inside PyTorch when the interpreter ends aborts the process ("terminate called ...")."""
    before = set(threading.enumerate())
    monkeypatch.setattr(sys, "argv", [str(PAGED), *TINY, "--device", "cpu", "--prompt", "Hello", "--max-tokens", "5"])
    runpy.run_path(str(PAGED), run_name="__main__")
    assert "5 new; TTFT " in capsys.readouterr().out
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"tqdm_monitor"}      # which only sleeps


def test_paged_answers_in_the_fewest_blocks_that_hold_it_and_in_no_fewer(tiny_folder, tiny_engine, tmp_path):
    prompt, report = len(tiny_engine.encode("Hello", None)[0]), tmp_path / "report.json"
    ask = ("--model", str(tiny_folder), "--device", "cpu", "--prompt", "Hello", "--max-tokens", "50", "--block-size", "4",
           "--json", str(report))
    needed = -(-(prompt + 49) // 4)
    line = refused(*ask, "--gpu-blocks", str(needed - 1), script=PAGED)
    assert line.startswith("02_paged_kv: ") and f"take {needed} blocks" in line and f"the pool has {needed - 1}" in line
    assert f"--gpu-blocks {needed}" in line
    done = run(*ask, "--gpu-blocks", str(needed), script=PAGED)
    assert done.returncode == 0
    assert json.loads(report.read_text())["tokens"] == tiny_engine.generate(prompt="Hello", max_tokens=50).tokens


def test_paged_demo_in_too_few_blocks_is_told_how_many():
    line = refused(*TINY, "--demo", "--gpu-blocks", "1", script=PAGED)
    assert line.startswith("02_paged_kv: ") and "the pool has 1;" in line and "--gpu-blocks" in line


def test_paged_pool_too_large_for_the_memory_is_refused_with_what_would_fit(monkeypatch, capsys):
    asked = ["--model", "random:tiny", "--prompt", "Hello", "--gpu-blocks", str(1 << 24), "--block-size", str(1 << 16)]
    line = refused_here(monkeypatch, capsys, PAGED, asked)
    assert line.startswith("02_paged_kv: ") and f"{1 << 24} blocks" in line and "are free" in line
    assert 1 <= int(line.split("at most --gpu-blocks ")[1].rstrip(".")) < 1 << 24


@pytest.mark.parametrize("words,arguments", [
    ("'0'", ["--gpu-blocks", "0"]), ("'-1'", ["--gpu-blocks", "-1"]), ("'many'", ["--gpu-blocks", "many"]),
    ("'99999999'", ["--gpu-blocks", "99999999"]), ("'0'", ["--block-size", "0"]), ("'1.5'", ["--block-size", "1.5"]),
    ("'65537'", ["--block-size", "65537"]), ("'x'", ["--token-budget", "x"]), ("'0'", ["--token-budget", "0"]),
    ("'0'", ["--max-running", "0"]), ("'nan'", ["--max-running", "nan"]), ("--gpu-block", ["--gpu-block", "5"]),
    ("--no-kv-cache", ["--no-kv-cache"]), ("--demo", ["--demo", "--prompt", "Hello"]),
    ("512", [*TINY, "--prompt", "x" * 600]), ("'/'", [*TINY, "--prompt", "Hello", "--trace", "/"]),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_wrong_options_of_paged_end_with_one_clear_line(monkeypatch, capsys, words, arguments):
    line = refused_here(monkeypatch, capsys, PAGED, arguments)
    assert words in line and "02_paged_kv" in line


def test_paged_port_in_use_is_told_before_the_model_is_looked_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--model", "nonsense", "--port", str(port), script=PAGED)
    assert line.startswith("02_paged_kv: ") and f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


@pytest.fixture(scope="module")
def paged_demo(tmp_path_factory):
    """The lesson on the classroom model, run once -> what it printed, its report and its trace."""
    folder = tmp_path_factory.mktemp("demo")
    done = run("--demo", "--device", "cpu", "--json", str(folder / "report.json"), "--trace", str(folder / "trace.json"),
               script=PAGED)
    assert done.returncode == 0, done
    return done, json.loads((folder / "report.json").read_text()), json.loads((folder / "trace.json").read_text())


def test_paged_demo_is_verified_before_any_number_is_printed(paged_demo):
    done, report, _ = paged_demo
    assert report["verified"] is True and (report["chapter"], report["model"], report["dtype"], report["device"]) == (
        "02_paged_kv", "classroom", "float32", "cpu")
    first, *others = done.stdout.splitlines()
    assert first.startswith("verified: all ") and not any("verified" in line for line in others)
    assert all(line.startswith("KV pool: ") for line in done.stderr.splitlines() if line)


def test_paged_demo_reports_memory_sharing_and_throughput(paged_demo):
    done, report, _ = paged_demo
    rows = report["rows"]
    contiguous, blocks = (row for row in rows if "memory" in row)
    assert "2048 tokens reserved" in contiguous["memory"] and "blocks of 16" in blocks["memory"]
    assert contiguous["waste"] > 0.6 and 0 < blocks["waste"] < 0.04
    for row in (contiguous, blocks):
        assert row["waste"] == pytest.approx(1 - row["used_bytes"] / row["reserved_bytes"])
        assert f" {row['waste']:.1%} wasted" in done.stdout
    assert contiguous["used_bytes"] == blocks["used_bytes"] > 0
    sources = {row["source"]: row for row in rows if "source" in row}
    throughput = {row["throughput"]: row for row in rows if "throughput" in row}
    assert set(sources) == {"gpu_hit", "miss"} and len(rows) == 3 + len(sources) + len(throughput)
    sharing, = (row for row in rows if "sharing" in row)
    assert 0.5 < sharing["sharing"] == sharing["cached_tokens"] / sharing["prompt_tokens"] < 1
    assert 0 < sharing["blocks"] < sharing["blocks_in_tables"]
    assert [name.split()[0] for name in throughput] == ["chapter", "1", "4", "16"]
    for row, name in [*((row, "ttft_ms") for row in sources.values()),
                      *((row, "tokens_per_second") for row in throughput.values())]:
        assert 0 < row["min"] <= row[name] <= row["max"] and row["samples"] >= 5


def test_paged_demo_gives_every_block_back(paged_demo):
    counters = paged_demo[1]["counters"]
    assert counters["requests"] == counters["finished"] > 0 and counters["cached_tokens"] > 0
    assert counters["running"] == counters["waiting"] == counters["blocks_referenced"] == counters["failed"] == 0
    assert counters["blocks_free"] + counters["blocks_cached"] == counters["blocks"]


def test_paged_demo_writes_a_trace(paged_demo):
    spans = [event for event in paged_demo[2]["traceEvents"] if event["ph"] == "X"]
    assert {span["name"].split()[0] for span in spans} == {"prefill", "decode"}
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)


@needs_signals
def test_ctrl_c_in_the_paged_demo():
    with Process("--demo", "--device", "cpu", script=PAGED) as process:
        process.read_until(b" MB\n")           # the pool is there, and the demo begins
        process.interrupt()
        assert b"verified" not in process.output


@needs_signals
def test_ctrl_c_in_the_middle_of_a_paged_answer():
    with Process(*TINY, "--prompt", "Hello", "--max-tokens", "500", script=PAGED) as process:
        process.read_until(b" MB\n")
        process.output += os.read(process.process.stdout.fileno(), 1)
        process.interrupt()
        assert b"TTFT" not in process.output


@needs_signals
@pytest.mark.parametrize("asking", [False, True])
def test_ctrl_c_while_paged_serves(asking):
    with Process(*TINY, "--port", "0", "--max-running", "1", script=PAGED) as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        assert process.output.startswith(b"KV pool: ")
        assert b"02_paged_kv serves random:tiny on http://127.0.0.1:" in process.output
        port = int(process.output.split(b"127.0.0.1:")[1].split()[0])
        connections = []
        for number in range(8 * asking):        # one is being answered, the others wait
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT))
            connections[-1].request("POST", "/generate", json.dumps(dict(prompt="Hello", max_tokens=500, stream=number % 2 == 1)))
        while asking and counters(port)["requests"] < 8:
            time.sleep(0.01)
        process.interrupt()
        if asking:
            assert 503 in map(status, connections)          # who waited was told


# 5. Chapter 03 ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("link,speed", [(["--link", "2"], "2"), ([], r"[0-9.e+-]+")], ids=["2 GB/s", "auto"])
def test_offload_prompt_prints_both_pools_the_link_and_the_answer_of_chapter_01(tiny_folder, tiny_engine, tmp_path, link, speed):
    expected = tiny_engine.generate(prompt="Hello", max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    done = run("--model", str(tiny_folder), "--device", "cpu", "--prompt", "Hello", "--max-tokens", "12", "--temperature", "0.8",
               "--top-p", "0.9", "--top-k", "40", "--seed", "7", "--json", str(report), "--trace", str(trace),
               "--gpu-blocks", "50", "--cpu-blocks", "20", "--block-size", "8", *link, script=OFFLOAD)
    assert done.returncode == 0 and done.stdout.startswith(expected.text.replace("\r", "\n"))
    token_bytes = tiny_engine.model.config.kv_numbers_per_token * 4
    assert re.fullmatch(f"KV pool: 50 blocks of 8 tokens, 400 tokens, {400 * token_bytes / 1e6:.1f} MB\n"
                        f"Host pool: 20 blocks of 8 tokens, 160 tokens, {160 * token_bytes / 1e6:.1f} MB\n"
                        f"The host is reached over a modelled link, {speed} GB/s\n", done.stderr)
    summary, blocks = done.stdout.splitlines()[-2:]
    assert " 0 of them cached (miss); " in summary and re.fullmatch(r"Blocks: gpu_hits 0, cpu_hits 0, misses \d+", blocks)

    written = json.loads(report.read_text())
    assert (written["chapter"], written["dtype"], written["source"]) == ("03_cpu_offload", "float32", "miss")
    assert written["tokens"] == expected.tokens and written["usage"] == expected.usage
    needed = -(-expected.usage["prompt_tokens"] // 8)
    assert written["blocks"] == dict(gpu_hits=0, cpu_hits=0, misses=needed) and written["choice"] is None
    assert re.fullmatch(f"modelled link, {speed} GB/s", written["link"])
    spans = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "compute"]
    assert [name.split()[0] for name in spans] == ["prefill"] + ["decode"] * (len(expected.tokens) - 1)


@pytest.mark.parametrize("cpu_blocks", ["0", "3"])
def test_offload_prompt_leaves_no_thread_behind(monkeypatch, capsys, cpu_blocks):
    """One that is inside PyTorch when the interpreter ends aborts the process ("terminate called ...")."""
    before = set(threading.enumerate())
    monkeypatch.setattr(sys, "argv", [str(OFFLOAD), *TINY, "--device", "cpu", "--prompt", "Hello", "--max-tokens", "5",
                                      "--cpu-blocks", cpu_blocks, "--gpu-blocks", "20"])
    runpy.run_path(str(OFFLOAD), run_name="__main__")
    said, complaint = capsys.readouterr()
    assert "5 new; TTFT " in said and f"\nHost pool: {cpu_blocks} blocks of 16 tokens, " in complaint
    gc.collect()                                                    # the lanes end with their links
    deadline = time.monotonic() + 60
    while not {thread.name for thread in set(threading.enumerate()) - before} <= {"tqdm_monitor"}:      # which only sleeps
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_offload_demo_in_too_few_blocks_is_told_how_many():
    line = refused(*TINY, "--demo", "--device", "cpu", "--gpu-blocks", "1", script=OFFLOAD)
    assert line.startswith("03_cpu_offload: ") and "do not fit into 1 blocks of 16 tokens" in line
    assert int(line.split("ask for at least ")[1].rstrip(".")) > 1 and "--gpu-blocks" in line


def test_offload_host_pool_too_large_for_the_memory_is_refused_with_what_would_fit(monkeypatch, capsys):
    asked = [*TINY, "--device", "cpu", "--prompt", "Hello", "--gpu-blocks", "1", "--cpu-blocks", str(1 << 26),
             "--block-size", str(1 << 12)]
    line = refused_here(monkeypatch, capsys, OFFLOAD, asked)
    assert line.startswith("03_cpu_offload: ") and f"{1 << 26} host blocks of {1 << 12} tokens" in line and "are free" in line
    assert 1 <= int(line.split("at most --cpu-blocks ")[1].rstrip(".")) < 1 << 26


def test_offload_device_pool_too_large_for_the_memory_is_refused_too(monkeypatch, capsys):
    line = refused_here(monkeypatch, capsys, OFFLOAD, [*TINY, "--prompt", "Hello", "--gpu-blocks", str(1 << 24),
                                                       "--block-size", str(1 << 16)])
    assert line.startswith("03_cpu_offload: ") and 1 <= int(line.split("at most --gpu-blocks ")[1].rstrip(".")) < 1 << 24


@pytest.mark.parametrize("words,arguments", [
    ("'-1'", ["--cpu-blocks", "-1"]), ("'many'", ["--cpu-blocks", "many"]), ("'1.5'", ["--cpu-blocks", "1.5"]),
    ("'99999999'", ["--cpu-blocks", "99999999"]), ("'0'", ["--gpu-blocks", "0"]), ("'x'", ["--token-budget", "x"]),
    ("'0'", ["--link", "0"]), ("'-1'", ["--link", "-1"]), ("'fast'", ["--link", "fast"]), ("'nan'", ["--link", "nan"]),
    ("'inf'", ["--link", "inf"]), ("''", ["--link", ""]), ("'1e7'", ["--link", "1e7"]), ("--link", ["--link"]),
    ("'h100'", ["--platform", "h100"]), ("h800", ["--platform", "A100"]), ("--cpu-block", ["--cpu-block", "5"]),
    ("--no-kv-cache", ["--no-kv-cache"]), ("--demo", ["--demo", "--prompt", "Hello"]),
    ("512", [*TINY, "--device", "cpu", "--prompt", "x" * 600]), ("'/'", [*TINY, "--prompt", "Hello", "--trace", "/"]),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_wrong_options_of_offload_end_with_one_clear_line(monkeypatch, capsys, words, arguments):
    line = refused_here(monkeypatch, capsys, OFFLOAD, arguments)
    assert words in line and "03_cpu_offload" in line


@pytest.fixture(scope="module")
def offload_demo(tmp_path_factory):
    """The lesson on the classroom model, run once -> what it printed, its report and its trace."""
    folder = tmp_path_factory.mktemp("offload")
    done = run("--demo", "--device", "cpu", "--json", str(folder / "report.json"), "--trace", str(folder / "trace.json"),
               script=OFFLOAD)
    assert done.returncode == 0, done
    return done, json.loads((folder / "report.json").read_text()), json.loads((folder / "trace.json").read_text())


def test_offload_demo_is_verified_before_any_time_is_printed(offload_demo):
    done, report, _ = offload_demo
    assert report["verified"] is True and (report["chapter"], report["model"], report["dtype"], report["device"]) == (
        "03_cpu_offload", "classroom", "float32", "cpu")
    first, *others = done.stdout.splitlines()
    assert re.match(r"verified: all [1-9]\d* tokens equal", first) and not any("verified" in line for line in others)
    assert " ms" not in first and sum(" ms" in line for line in others) > 10
    assert [line.startswith(SIZES) for line in done.stderr.splitlines()] == [True] * 3


def test_offload_demo_calls_the_link_modelled_wherever_it_names_it(offload_demo):
    done, report, _ = offload_demo
    named = [line for line in (done.stdout + done.stderr).splitlines() if "link" in line.lower() or "GB/s" in line]
    assert len(named) >= 4 and all(re.search(r"modelled link, [0-9.e+-]+ GB/s", line) for line in named)
    assert set(report["link"]) == {"modelled", "gbps"} and report["link"]["modelled"] is True and report["link"]["gbps"] > 0
    for beginning in ("TTFT of ", "This return "):
        assert any(line.startswith(beginning) for line in named), "times and the chart say over what they were taken"


def test_offload_demo_shows_all_sources(offload_demo):
    done, report, _ = offload_demo
    phases = {}
    for row in report["rows"]:
        if "phase" in row:
            phases.setdefault(row["phase"], []).append(row)
            found = row["gpu_hits"] + row["cpu_hits"]
            assert row["cached_tokens"] == 16 * found < row["prompt_tokens"]
            assert found + row["misses"] == -(-row["prompt_tokens"] // 16)
            assert row["ttft_ms"] > 0 and row["text"]
    assert [row["source"] for row in phases["cold"]] == ["miss", "gpu_hit", "gpu_hit"]
    assert phases["cold"][0]["cached_tokens"] == 0 < phases["cold"][1]["gpu_hits"]
    assert phases["repeat"] and {row["source"] for row in phases["repeat"]} == {"gpu_hit"}
    assert len(phases["pressure"]) >= 3 and phases["pressure"][-1]["evictions"] > 0
    assert {(row["source"], row["gpu_hits"], row["cpu_hits"]) for row in phases["pressure"]} == {("miss", 0, 0)}
    back, = phases["return"]
    assert back["source"] == "cpu_hit" and back["cpu_hits"] == back["swap_ins"] > 0 == back["gpu_hits"]
    assert "tiger" in back["text"] and "tiger" not in " ".join(row["text"] for row in phases["pressure"])
    assert " - " + back["text"] in done.stdout


def test_offload_demo_compares_what_the_three_ways_cost(offload_demo):
    done, report, _ = offload_demo
    table = {row["case"]: row for row in report["rows"] if "case" in row}
    assert set(table) == {"miss", "gpu_hit", "cpu_hit", "cpu_hit, all layers first"}
    assert {name: row["source"] for name, row in table.items()} == {name: name.split(",")[0] for name in table}
    miss, on_device, on_host, waited = (table[name] for name in ("miss", "gpu_hit", "cpu_hit", "cpu_hit, all layers first"))
    assert miss["bytes_in"] == on_device["bytes_in"] == 0 < on_host["bytes_in"] == waited["bytes_in"]
    assert miss["cached_tokens"] == 0 < on_device["cached_tokens"] == on_host["cached_tokens"]
    assert on_host["bytes_in"] == on_host["cached_tokens"] * 8 * 2 * 256 * 4          # 8 layers, K and V of 256 in float32
    for row in table.values():
        assert 0 < row["min"] <= row["ttft_ms"] <= row["max"] and row["samples"] >= 5
        assert f"{row['bytes_in'] / 1e6:.1f} MB" in next(
            line for line in done.stdout.split("TTFT of ")[1].splitlines() if line.startswith("  " + row["source"]))


def test_offload_demo_gives_every_block_of_both_pools_back(offload_demo):
    counters = offload_demo[1]["counters"]
    assert counters["requests"] == counters["finished"] > 0
    assert counters["swap_ins"] > 0 < counters["swap_outs"] and counters["bytes_in"] > 0 < counters["bytes_out"]
    for name in ("running", "waiting", "blocks_referenced", "cpu_blocks_referenced", "swaps_under_way", "failed",
                 "transfer_errors"):
        assert counters[name] == 0
    assert counters["blocks_free"] + counters["blocks_cached"] == counters["blocks"]
    assert counters["cpu_blocks_free"] + counters["cpu_blocks_cached"] == counters["cpu_blocks"]


def test_offload_demo_writes_a_trace_with_layers_that_arrive_while_others_are_computed(offload_demo):
    spans = [event for event in offload_demo[2]["traceEvents"] if event["ph"] == "X"]
    load, compute = ([span for span in spans if span["cat"] == lane] for lane in ("load", "compute"))
    assert {span["name"] for span in load} == {f"layer {number}" for number in range(8)}
    assert {span["name"].split()[0] for span in compute} == {"prefill", "decode"}
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)
    arrived = max(span["ts"] + span["dur"] for span in load)
    assert min(span["ts"] for span in compute) < arrived, "it waited for all layers"
    chart = offload_demo[0].stdout.split("This return ")[1]
    layers = re.search(r"^    load \|([0-7.]+)\|$", chart, re.M)[1].replace(".", "")
    assert layers and list(layers) == sorted(layers) and re.search(r"^ compute \|.*p.*d", chart, re.M)


@needs_signals
def test_ctrl_c_in_the_offload_demo():
    with Process("--demo", "--device", "cpu", script=OFFLOAD) as process:
        process.read_until(b" GB/s\n")          # the pools and the link are there, and the demo begins
        process.interrupt()
        assert b"verified" not in process.output


@needs_signals
def test_ctrl_c_while_offload_serves():
    with Process(*TINY, "--device", "cpu", "--port", "0", "--max-running", "1", script=OFFLOAD) as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        assert process.output.startswith(b"KV pool: ") and b"\nHost pool: " in process.output
        assert b"03_cpu_offload serves random:tiny on http://127.0.0.1:" in process.output
        port = int(process.output.split(b"127.0.0.1:")[1].split()[0])
        connections = []
        for number in range(8):                 # one is being answered, the others wait
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT))
            connections[-1].request("POST", "/generate", json.dumps(dict(prompt="Hello", max_tokens=500, stream=number % 2 == 1)))
        while counters(port)["requests"] < 8:
            time.sleep(0.01)
        process.interrupt()
        assert 503 in map(status, connections)              # who waited was told
