"""The command line of chapter 06: what it prints and writes, what it says to wrong input, and Ctrl-C."""
import gc
import http.client
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from common import checkpoint
from legacy import app
from legacy.tests import demos, warm
from legacy.tests.conftest import ROOT, chapter, write_model

CAKE = ROOT / "06_bidirectional.py"
SIZES = ("KV pool: ", "Chunks of ", "Storage, ", "Modelled storage, ")      # of what is no complaint
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


# 1. What is asked wrongly ----------------------------------------------------------------------------------------

TINY = ("--model", "random:tiny")
TINY_CPU = [*TINY, "--device", "cpu"]
STORY = "It was a long story, and it began with a letter. " * 4          # 12 chunks of 16 tokens, and a beginning


def refused_here(monkeypatch, capsys, script, arguments) -> str:
    """Run it in this process, which is faster, and -> its one line of complaint."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    said, complaint = capsys.readouterr()
    if isinstance(end.value.code, str):         # sys.exit("words") prints them and ends with 1
        complaint += end.value.code + "\n"
    line, = (line for line in complaint.splitlines() if not line.startswith(SIZES))
    assert end.value.code and said == ""
    return line


# 2. Ctrl-C -------------------------------------------------------------------------------------------------------

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


# 3. Chapter 06 ---------------------------------------------------------------------------------------------------

LONG_STORY = STORY + "And so it ended."
FOUR_WAYS = {"compute only": "compute", "load only": "load", "both": "both", "both, 8 bit": "both"}
DEVICES = ["storage as fast as computing", "four times slower", "four times faster", "a speed that changes"]


def restored_here(monkeypatch, capsys, *arguments) -> tuple[str, str]:
    """Run chapter 06 as it stands in this process -> what it printed, to stdout and to stderr."""
    monkeypatch.setattr(sys, "argv", [str(CAKE), "--device", "cpu", "--link", "0.5", *map(str, arguments)])
    runpy.run_path(str(CAKE), run_name="__main__")
    return capsys.readouterr()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where this process and its children keep temporary directories."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def left_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("kv-chunks-", "demo-")))


def test_bidirectional_help_names_its_options():
    done = run("--help", script=CAKE)
    assert done.returncode == 0 and done.stderr == ""
    for option in ("--demo", "--prompt", "--chunk", "--disk", "--disk-limit", "--storage-mbps", "--mode", "--gpu-share",
                   "--kv-bits", "--cpu-chunks", "--link", "--platform", "both", "compute", "load"):
        assert option in done.stdout


def test_a_second_process_finds_the_chunks_of_the_first(tiny_folder, tiny_engine, tmp_path):
    sampling = dict(max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    expected = tiny_engine.generate(prompt=LONG_STORY, **sampling)
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    report, trace, folder = (tmp_path / name for name in ("report.json", "trace.json", "chunks"))
    token_bytes = tiny_engine.model.config.kv_numbers_per_token * 4
    whole = (expected.usage["prompt_tokens"] - 1) // 16
    for mode, source, loaded in (("both", "miss", 0), ("load", "storage", whole)):
        done = run("--model", str(tiny_folder), "--device", "cpu", "--prompt", LONG_STORY, *options, "--disk", str(folder),
                   "--json", str(report), "--trace", str(trace), "--gpu-blocks", "50", "--block-size", "8",
                   "--chunk", "16", "--link", "2", "--mode", mode, script=CAKE, fresh=True)
        assert done.returncode == 0 and done.stdout.startswith(expected.text.replace("\r", "\n")), done
        assert done.stderr == (
            f"KV pool: 50 blocks of 8 tokens, {400 * token_bytes / 1e6:.1f} MB\n"
            f"Chunks of 16 tokens, {16 * token_bytes / 1e6:.2f} MB in 32 bit, in {folder}\n"
            "Storage, nothing read yet; the host is reached over a modelled link, 2 GB/s\n")
        summary, restoration = done.stdout.splitlines()[-2:]
        assert f" {16 * loaded} of them cached ({source}); " in summary
        assert restoration.startswith("Restoration (storage, ") and f" mode {mode}, tokens {16 * whole}, " in restoration
        written = json.loads(report.read_text())
        assert (written["chapter"], written["dtype"], written["source"]) == ("06_bidirectional", "float32", source)
        assert written["tokens"] == expected.tokens
        assert written["usage"] == dict(expected.usage, cached_tokens=16 * loaded)
        shown = written["restoration"]
        assert (shown["mode"], shown["chunks"], shown["loaded"], shown["computed"]) == (mode, whole, loaded, whole - loaded)
        assert shown["absent"] <= whole - loaded and shown["bytes"] == loaded * 16 * token_bytes
        assert shown["meeting"] == (0 if loaded else 16 * whole)
        assert len(chunks_of(folder)) == expected.usage["prompt_tokens"] // 16 + (
            expected.usage["prompt_tokens"] % 16 + len(expected.tokens) - 1) // 16
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    for lane in ("storage", "load"):
        assert sorted(span["name"] for span in spans if span["cat"] == lane) == sorted(f"chunk {n}" for n in range(whole))
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)


def chunks_of(*folders) -> list:
    """The files of chunks; nothing else may be left there."""
    files = [path for folder in folders for path in folder.iterdir()]
    assert all(path.suffix == ".chunk" for path in files), files
    return files


@pytest.mark.parametrize("options", [
    ["--mode", "compute"], ["--mode", "load"], ["--gpu-share", "0.01"], ["--kv-bits", "32"], ["--chunk", "32"],
    ["--block-size", "100"], ["--cpu-chunks", "5"], ["--storage-mbps", "200:2000:50@0.01"], ["--storage-mbps", "0.5"],
    ["--disk", "one", "--disk", "two"]], ids=" ".join)
def test_every_option_gives_the_answer_of_chapter_01(tiny_folder, tiny_engine, tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    options = options if "--disk" in options else [*options, "--disk", "one"]
    expected = tiny_engine.generate(prompt=LONG_STORY, max_tokens=8)
    for sources in (("miss",), ("miss", "storage")):
        said, complaint = restored_here(monkeypatch, capsys, "--model", tiny_folder, "--prompt", LONG_STORY, "--max-tokens", 8,
                                        "--json", "report.json", *options)
        written = json.loads((tmp_path / "report.json").read_text())
        assert written["tokens"] == expected.tokens and said.startswith(expected.text.replace("\r", "\n"))
        assert written["source"] in sources and all(line.startswith(SIZES) for line in complaint.splitlines())
    assert (written["source"] == "miss") == (written["restoration"]["loaded"] == 0)
    if options[:2] == ["--mode", "load"]:
        assert written["source"] == "storage"
    if options[:2] == ["--mode", "compute"]:
        assert written["source"] == "miss" and written["restoration"]["absent"] == 0


def test_chunks_of_other_bits_sizes_models_and_dtypes_are_not_found(tiny_folder, tmp_path_factory, tmp_path, monkeypatch, capsys):
    report, other = tmp_path / "report.json", write_model(tmp_path_factory.mktemp("models") / "other", seed=1)

    def source(folder, *options):
        restored_here(monkeypatch, capsys, "--model", folder, "--prompt", LONG_STORY, "--max-tokens", 2, "--json", report,
                      "--disk", tmp_path / "chunks", "--mode", "load", *options)
        return json.loads(report.read_text())["source"]
    for asked in ([tiny_folder], [tiny_folder, "--kv-bits", 8], [tiny_folder, "--chunk", 32], [other],
                  [tiny_folder, "--dtype", "bfloat16"], [tiny_folder, "--dtype", "bfloat16", "--kv-bits", 8]):
        assert [source(*asked), source(*asked)] == ["miss", "storage"], asked
    assert source(tiny_folder, "--block-size", 8, "--chunk", 16) == "storage", "blocks of another size"


@pytest.mark.parametrize("options", [[], ["--disk", "DIR"], ["--disk", "one", "--disk", "two", "--mode", "load"]], ids=" ".join)
def test_bidirectional_prompt_leaves_no_thread_and_no_directory_behind(tmp_path, monkeypatch, capsys, temporary, options):
    """A thread that is inside PyTorch when the interpreter ends aborts the process ("terminate called ...")."""
    before = set(threading.enumerate())
    monkeypatch.chdir(tmp_path)
    said, _ = restored_here(monkeypatch, capsys, *TINY, "--prompt", LONG_STORY, "--max-tokens", 5, *options)
    assert " new; TTFT " in said and left_in(temporary) == []
    gc.collect()                                                    # lanes, readers and writers end with their engine
    deadline = time.monotonic() + 60
    while not {thread.name for thread in set(threading.enumerate()) - before} <= {"tqdm_monitor"}:      # which only sleeps
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("words,arguments", [
    *((repr(part), [*TINY_CPU, "--prompt", "Hello", "--storage-mbps", speed]) for speed, part in {
        "fast": "fast", "0": "0", "-1": "-1", "100:": "", ":100": "", "": "", "100@0": "0", "100@-1": "-1", "100@x": "x",
        "@1": "", "nan": "nan", "100@nan": "nan", "inf": "inf", "100:nan": "nan", "1e10": "1e10", "100@1@2": "1@2",
        "100,200": "100,200", "100@": ""}.items()),
    ("--storage-mbps", ["--storage-mbps"]),
    ("choose --chunk 96", [*TINY_CPU, "--prompt", "Hello", "--chunk", "100"]),
    ("choose --chunk 16", [*TINY_CPU, "--prompt", "Hello", "--chunk", "1"]), ("'0'", ["--chunk", "0"]),
    ("'x'", ["--chunk", "x"]), ("'1e3'", ["--chunk", "1e3"]),
    ("choose --kv-bits 32 or 8", [*TINY_CPU, "--prompt", "Hello", "--kv-bits", "16"]),
    ("choose --kv-bits 16 or 8", [*TINY_CPU, "--prompt", "Hello", "--kv-bits", "32", "--dtype", "bfloat16"]),
    ("--kv-bits", ["--kv-bits", "7"]), ("--kv-bits", ["--kv-bits", "x"]),
    ("'0'", ["--gpu-share", "0"]), ("'2'", ["--gpu-share", "2"]), ("'nan'", ["--gpu-share", "nan"]),
    ("'-0.5'", ["--gpu-share=-0.5"]), ("'half'", ["--gpu-share", "half"]),
    ("load", ["--mode", "x"]), ("load", ["--mode", ""]), ("--mode", ["--mode"]),
    ("'0'", ["--disk-limit", "0"]), ("'nan'", ["--disk-limit", "nan"]), ("not empty", ["--disk", ""]), ("--disk", ["--disk"]),
    ("choose a larger --disk-limit", [*TINY_CPU, "--prompt", "Hello", "--disk-limit", "1e-5"]),
    ("at least 5 are needed", [*TINY_CPU, "--prompt", "Hello", "--cpu-chunks", "1"]),
    ("at least 5 are needed", [*TINY_CPU, "--prompt", "Hello", "--cpu-chunks", "4"]),
    ("'0'", ["--cpu-chunks", "0"]), ("'1.5'", ["--cpu-chunks", "1.5"]),
    (f"{1 << 24} chunks of 16 tokens", [*TINY_CPU, "--prompt", "Hello", "--gpu-blocks", "20", "--cpu-chunks", str(1 << 24)]),
    ("'0'", ["--link", "0"]), ("h800", ["--platform", "h100"]), ("'0'", ["--gpu-blocks", "0"]),
    ("No model 'nonsense'", ["--prompt", "Hello", "--model", "nonsense"]),
    ("No model 'nonsense'", ["--demo", "--model", "nonsense"]),
    ("--layout", ["--layout", "chunked"]), ("--save", ["--save", "direct"]), ("--cpu-chunk", ["--cpu-chunk", "5"]),
    ("--demo", ["--demo", "--prompt", "Hello"]), ("512", [*TINY_CPU, "--prompt", "x" * 600]),
    ("context of 512 tokens", [*TINY_CPU, "--demo"]), ("the pool has 1;", [*TINY_CPU, "--gpu-blocks", "1", "--prompt", STORY]),
    ("'/'", [*TINY, "--prompt", "Hello", "--trace", "/"]), ("'/'", [*TINY, "--demo", "--json", "/"]),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_wrong_options_of_bidirectional_end_with_one_clear_line(monkeypatch, capsys, temporary, words, arguments):
    line = refused_here(monkeypatch, capsys, CAKE, arguments)
    assert words in line and line.startswith("06_bidirectional")
    gc.collect()
    assert left_in(temporary) == []


@pytest.mark.parametrize("reason,below", [("File exists", ""), ("Not a directory", "/sub")])
def test_a_disk_that_is_no_directory_is_told_by_chapter_06(tmp_path, monkeypatch, capsys, reason, below):
    (tmp_path / "file").write_text("in the way")
    line = refused_here(monkeypatch, capsys, CAKE, [*TINY_CPU, "--prompt", "Hello", "--disk", f"{tmp_path}/file{below}"])
    assert line == (f"06_bidirectional: Cannot keep chunks in '{tmp_path}/file{below}' ({reason}); choose another directory with "
                    "--disk.")


def test_a_disk_that_cannot_be_written_is_told_by_chapter_06(tmp_path, monkeypatch, capsys):
    """As root writes everywhere, the directory's files are refused here."""
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    line = refused_here(monkeypatch, capsys, CAKE, [*TINY_CPU, "--prompt", "Hello", "--disk", str(tmp_path)])
    assert line == (f"06_bidirectional: Cannot keep chunks in '{tmp_path}' (Permission denied); choose another directory with "
                    "--disk.")


def test_a_port_in_use_is_told_by_chapter_06(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused_here(monkeypatch, capsys, CAKE, ["--model", "nonsense", "--port", str(port)])
    assert line.startswith("06_bidirectional: ") and f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A small model with room for documents: 31 whole chunks of 128 tokens."""
    return write_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=4096, num_key_value_heads=1)


def check_table(said: str, report: dict, devices: list[str], link: str = "0.5"):
    """For each device a table of four ways, their bars, and the lanes of both. `link`: a pattern of its GB/s."""
    rows = {(row["setting"], row["way"]): row for row in report["rows"]}
    assert list(rows) == [(device, way) for device in devices for way in FOUR_WAYS] and len(rows) == len(report["rows"])
    for (_, way), row in rows.items():
        chunks, computed, loaded = row["chunks"], row["computed"], row["loaded"]
        assert computed + loaded == chunks == 31 and row["absent"] <= (chunks if way == "load only" else 0)
        assert row["source"] == ("storage" if loaded else "miss")
        assert loaded == {"compute only": 0, "load only": chunks}.get(way, loaded)
        assert 0 < row["fastest_ms"] <= row["ttft_ms"] <= row["slowest_ms"] and 0 < row["ms"] < row["ttft_ms"]
        assert 0 < row["bound_ms"] and row["over_bound"] == pytest.approx(row["ms"] / row["bound_ms"])
    first, *tables = re.split(rf"\n(?={'|'.join(device.capitalize() for device in devices)} \()", said)
    assert len(tables) == len(devices)
    for device, table in zip(devices, tables):
        head, titles, *lines = table.splitlines()
        assert head.startswith(f"{device[0].upper()}{device[1:]} (modelled storage, ")
        assert re.search(f"; modelled link, {link} GB/s\\)$", head)
        assert titles.split() == "TTFT computed loaded meet at restored in / bound".split()
        for (way, _), line, bar in zip(FOUR_WAYS.items(), lines, lines[4:]):
            row = rows[device, way]
            real, whole = "([0-9.]+)", r"(\d+)"
            shown = re.fullmatch(f"  {way:14} *{real} ms +{real} to {real} +{whole} +{whole} +{whole} +{real} ms +{real}", line)
            assert shown, line
            ttft, fastest, slowest, computed, loaded, meeting, ms, over = map(float, shown.groups())
            assert (ttft, fastest, slowest) == tuple(round(row[name], 1) for name in ("ttft_ms", "fastest_ms", "slowest_ms"))
            assert (computed, loaded, meeting) == (row["computed"], row["loaded"], row["meeting"])
            assert ms == pytest.approx(row["ms"], abs=0.06) and over == pytest.approx(row["over_bound"], abs=0.006)
            drawn = re.fullmatch(rf"  {way:14}\|([#=]+)\|", bar)[1]
            assert (drawn.count("#"), drawn.count("=")) == (row["computed"], row["loaded"])
            assert drawn == "".join(sorted(drawn)), "computed from the front, loaded from the back"
        assert lines[8] == "  both, the lanes (digits: chunks; p: prefill)"
        lanes = re.findall(r"^ *(compute|load|storage) \|([p0-9.]{64})\| idle (\d+)%$", "\n".join(lines[9:]), re.M)
        assert {lane for lane, *_ in lanes} >= ({"compute"} if rows[device, "both"]["computed"] else set()) | (
            {"load", "storage"} if rows[device, "both"]["loaded"] else set())
    return first, rows


def test_bidirectional_demo_is_told_when_its_document_is_no_chunk(monkeypatch, capsys, long_model):
    line = refused_here(monkeypatch, capsys, CAKE, ["--model", str(long_model), "--device", "cpu", "--demo", "--chunk", "8192",
                                                    "--link", "1"])
    assert line.startswith("06_bidirectional: The demo's document is ") and "less than a chunk; choose a smaller --chunk" in line


@pytest.fixture(scope="module")
def bidirectional_demo(tmp_path_factory):
    """The lesson on the classroom model, run once -> what it printed, its report, its trace, and the directories it left."""
    done = demos.shown(CAKE.stem, tmp_path_factory)
    return done, done.report, done.trace, done.left


def test_bidirectional_demo_is_verified_before_any_time_is_printed(bidirectional_demo):
    done, report, _, left = bidirectional_demo
    assert report["verified"] is True and (report["chapter"], report["model"], report["dtype"], report["device"]) == (
        "06_bidirectional", "classroom", "float32", "cpu")
    first, *others = done.stdout.splitlines()
    assert re.match(r"verified: all [1-9]\d* tokens equal", first) and not any("verified" in line for line in others)
    assert " ms" not in first and sum(" ms" in line for line in others) > 10
    assert [line.startswith(SIZES) for line in done.stderr.splitlines()] == [True] * 3, done.stderr
    assert left == []


def test_bidirectional_demo_compares_four_ways_over_four_devices(bidirectional_demo):
    done, report, *_ = bidirectional_demo
    first, rows = check_table(done.stdout, report, DEVICES, "[0-9.e+-]+")
    equal, = rows[DEVICES[0], "both"]["mbps"]
    for device, factors in zip(DEVICES, ((1,), (0.25,), (4,), (0.4, 4, 0.1))):
        for way in FOUR_WAYS:
            assert rows[device, way]["mbps"] == pytest.approx([factor * equal for factor in factors])
    assert "\n  32 bit: 1.05 MB a chunk; K and V that were loaded are bit-equal to those saved\n" in first
    assert "\n   8 bit: 0.27 MB a chunk; " in first and " - " in first.split(" and then: ")[1].splitlines()[0]
    eight = report["eight_bit"]
    assert 0 <= eight["tokens_equal"] <= eight["tokens"] > 0 < eight["largest_kv_error"] < eight["largest_kv"] / 100
    assert set(report["link"]) == {"modelled", "gbps"} and report["link"]["modelled"] is True and report["link"]["gbps"] > 0


def test_bidirectional_demo_gives_every_block_and_every_buffer_back(bidirectional_demo):
    counts = bidirectional_demo[1]["counters"]
    assert counts["requests"] == counts["finished"] > 0 < counts["restorations"] and counts["loaded_tokens"] % 64 == 0
    for name in ("running", "waiting", "blocks_referenced", "chunks_leaving", "failed", "chunks_dropped", "transfer_errors",
                 "storage_stalls", "load_errors", "file_errors", "readers_retired"):
        assert counts[name] == 0, name
    assert counts["blocks_free"] + counts["blocks_cached"] == counts["blocks"]
    assert (counts["read_buffers_free"], counts["write_buffers_free"]) == (counts["read_buffers"], counts["write_buffers"])
    assert counts["file_writes"] == counts["chunks_saved"] == 31


def test_bidirectional_demo_writes_a_trace_with_chunks_that_are_read_while_others_are_computed(bidirectional_demo):
    trace, rows = bidirectional_demo[2], bidirectional_demo[1]["rows"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    storage, load, compute = ([span for span in spans if span["cat"] == lane] for lane in ("storage", "load", "compute"))
    names = {f"chunk {number}" for number in range(31)}
    assert {span["name"] for span in storage} == {span["name"] for span in load} <= names and "chunk 30" in {
        span["name"] for span in load}
    assert {span["name"].split()[0] for span in compute} == {"prefill", "decode"} and all(span["dur"] > 0 for span in spans)
    assert len(load) == sum(row["loaded"] for row in rows if row["way"] == "both")
    assert any(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"] for a in compute for b in storage), "no overlap"


@needs_signals
@pytest.mark.parametrize("disk", [False, True], ids=["a temporary directory", "--disk"])
def test_ctrl_c_in_the_bidirectional_demo_leaves_no_directory(tmp_path, disk):
    """It ends while documents are computed and written for the first time, or while they are restored."""
    folder, chunks = tmp_path / "temporary", tmp_path / "chunks"
    folder.mkdir()
    options = ["--disk", str(chunks)] if disk else []
    with Process("--demo", "--device", "cpu", "--link", "0.5", *options, script=CAKE, TMPDIR=str(folder)) as process:
        process.read_until(b" GB/s\n")          # the pool, the chunks and the link are there, and the demo begins
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("*.chunk")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.interrupt()
        assert b"verified" not in process.output
    assert left_in(folder) == [] and (not disk or list(chunks.iterdir()) == [])


@needs_signals
@pytest.mark.parametrize("disk,signum", [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGTERM)],
                         ids=["a temporary directory", "--disk", "SIGTERM"])
def test_ctrl_c_while_bidirectional_serves(tmp_path, disk, signum):
    folder, chunks = tmp_path / "temporary", tmp_path / "chunks"
    folder.mkdir()
    options = ["--disk", str(chunks)] if disk else []
    with Process(*TINY_CPU, "--port", "0", "--max-running", "1", *options, script=CAKE, TMPDIR=str(folder),
                 fresh=signum == signal.SIGTERM) as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        assert process.output.startswith(b"KV pool: ") and b"\nChunks of 16 tokens, " in process.output
        assert b"06_bidirectional serves random:tiny on http://127.0.0.1:" in process.output
        port = int(process.output.split(b"127.0.0.1:")[1].split()[0])
        connections = []
        for number in range(8):                 # one is being answered, the others wait
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT))
            connections[-1].request("POST", "/generate", json.dumps(dict(prompt=STORY, max_tokens=250, stream=number % 2 == 1)))
        while counters(port)["requests"] < 8 or not counters(port)["chunks_saved"]:
            time.sleep(0.01)
        assert len(left_in(folder)) == (not disk)
        process.interrupt(signum)
        assert 503 in map(status, connections)              # who waited was told
    assert left_in(folder) == []
    if disk:
        assert len(chunks_of(chunks)) >= 12, "what was computed reached its files"


# 4. What an engine keeps outside of this process -----------------------------------------------------------------

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


def test_release_takes_a_temporary_directory_and_leaves_one_that_was_asked_for(tiny_engine, tmp_path, temporary):
    kind = chapter("06_bidirectional").Engine
    for directories, left in (((), 0), ((tmp_path / "chunks",), 12)):
        engine = kind(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, directories=directories, chunk=16)
        assert len(left_in(temporary)) == (not directories)
        engine.generate(prompt=LONG_STORY[:190], max_tokens=2)
        engine.close()
        folder = directories[0] if directories else temporary / left_in(temporary)[0]
        assert len(chunks_of(folder)) == 12
        for _ in range(2):
            engine.release()
            assert left_in(temporary) == []
        assert not left or len(chunks_of(folder)) == left
