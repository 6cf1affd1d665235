"""Chapter 07's command line and its HTTP: --fill, wrong options, Ctrl-C, and /storage for whom it is."""
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
from functools import partial

import pytest

from legacy import app, backends
from legacy.backends import open_backend
from legacy.tests.conftest import ROOT, chapter, write_model
from legacy.tests.test_app import ASK, INFO, Serving, another, error_of, events, eventually
from legacy.tests.test_cli import Process
from legacy.tests.test_paged import in_threads
from legacy.tests.test_server import ask as ask_server
from legacy.tests.test_server import counters
from tests.support.redis_server import RedisServer, free_port

tiered = chapter("07_tiered_storage")
SCRIPT = ROOT / "07_tiered_storage.py"
STORY = "It was a long story, and it began with a letter. " * 4
WHOLE = 12                         # pages of 16 tokens of STORY's prompt, but for its last token
TINY = ("--model", "random:tiny", "--device", "cpu", "--link", "0.5")
TIERS = ("L1, the device: ", "L2, the host: ", "L3, storage: ")     # of what is no complaint
needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


def run_here(monkeypatch, capsys, *arguments) -> tuple[str, str]:
    """Run chapter 07 as it stands in this process -> what it printed, to stdout and to stderr."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--link", "0.5", *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr()


def refused_here(monkeypatch, capsys, *arguments) -> str:
    """-> its one line of complaint."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said, complaint = capsys.readouterr()
    if isinstance(end.value.code, str):         # sys.exit("words") prints them and ends with 1
        complaint += end.value.code + "\n"
    line, = (line for line in complaint.splitlines() if not line.startswith(TIERS))
    assert end.value.code and said == "" and line.startswith("07_tiered_storage") and "Traceback" not in line
    return line


def loading_pays(monkeypatch):
    """To compute is estimated to take long, however busy this machine is."""
    offload = chapter("03_cpu_offload")
    monkeypatch.setattr(offload.MeasuringEngine, "seconds_to_compute", lambda engine, start, end: float(end - start))


# 1. The command line ---------------------------------------------------------------------------------------------

def test_help_names_its_options(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, capsys, "--help")
    said = capsys.readouterr().out
    assert end.value.code in (0, None)
    for option in ("--demo", "--prompt", "--page-size", "--gpu-blocks", "--cpu-blocks", "--layout", "--write-policy", "--storage",
                   "--storage-config", "--storage-mbps", "--prefetch-policy", "--prefetch-threshold", "--prefetch-timeout",
                   "--prefetch-timeout-per-1k", "--prefetch-timeout-cap", "--prefetch-limit", "--admin-token", "--fill", "--link",
                   *tiered.LAYOUTS, *tiered.WRITE_POLICIES, *tiered.PREFETCH_POLICIES):
        assert option in said, option


def test_a_prompt_prints_the_tiers_and_the_answer_of_chapter_01_and_the_next_process_finds_its_pages(
        tiny_folder, tiny_engine, tmp_path, monkeypatch, capsys):
    loading_pays(monkeypatch)
    sampling = dict(max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    expected = tiny_engine.generate(prompt=STORY, **sampling)
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    token = tiny_engine.model.config.kv_numbers_per_token * 4
    for source, hits in (("miss", 0), ("storage_hit", WHOLE)):
        said, complaint = run_here(
            monkeypatch, capsys, "--model", tiny_folder, "--prompt", STORY, *options, "--gpu-blocks", 30, "--cpu-blocks", 40,
            "--storage", f"file:{tmp_path}/pages", "--prefetch-threshold", 16, "--prefetch-policy", "wait_complete",
            "--json", report, "--trace", trace, "--layout", "page_first")
        assert complaint == (f"L1, the device: 30 pages of 16 tokens, 480 tokens, {480 * token / 1e6:.1f} MB\n"
                             f"L2, the host: 40 pages of 16 tokens, 640 tokens, {640 * token / 1e6:.1f} MB\n"
                             f"L3, storage: file:{tmp_path}/pages; L2 is reached over a modelled link, 0.5 GB/s\n")
        assert said.startswith(expected.text)
        written = json.loads(report.read_text())
        assert (written["chapter"], written["source"], written["tokens"]) == ("07_tiered_storage", source, expected.tokens)
        assert written["usage"] == dict(expected.usage, cached_tokens=16 * hits)
        assert written["pages"]["storage_hits"] == hits and written["prefetch"]["hit_tokens"] == 16 * hits
        assert f"\nPages: gpu_hits 0, cpu_hits 0, storage_hits {hits}, misses " in said
        assert f"\nPrefetch: policy wait_complete, hit_tokens {16 * hits}, " in said
        assert said.rstrip().endswith(f"(modelled link, 0.5 GB/s; file:{tmp_path}/pages)")
    choice = written["choice"]
    assert f"\nChosen: chosen load, load_ms {choice['load_ms']}, recompute_ms {choice['recompute_ms']}\n" in said
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {span["cat"] for span in spans} == {"compute", "load", "storage", "save"} or {span["cat"] for span in spans} == {
        "compute", "load", "storage"}
    assert sum(int(span["name"].split()[1]) for span in spans if span["cat"] == "storage" and span["name"][0] == "f") == WHOLE
    assert {span["name"] for span in spans if span["cat"] == "load"} == {f"layer {number}" for number in range(3)}
    assert not list((tmp_path / "pages").glob("*.tmp"))


@pytest.mark.parametrize("options", [
    *(["--layout", layout] for layout in tiered.LAYOUTS), *(["--write-policy", policy] for policy in tiered.WRITE_POLICIES),
    *(["--prefetch-policy", policy] for policy in tiered.PREFETCH_POLICIES), ["--prefetch-limit", "1"],
    ["--prefetch-limit", "64"],
    ["--prefetch-timeout", "0", "--prefetch-timeout-per-1k", "0"], ["--storage-mbps", "200:20@0.01"], ["--page-size", "1"],
    ["--page-size", "300", "--gpu-blocks", "3"], ["--cpu-blocks", "3"], ["--storage-config", '{"limit_gb": 0.5}']], ids=" ".join)
def test_every_option_gives_the_answer_of_chapter_01(tiny_folder, tiny_engine, tmp_path, monkeypatch, capsys, options):
    loading_pays(monkeypatch)
    expected = tiny_engine.generate(prompt=STORY, max_tokens=8)
    for _ in range(2):
        said, complaint = run_here(monkeypatch, capsys, "--model", tiny_folder, "--prompt", STORY, "--max-tokens", 8, "--json",
                                   tmp_path / "report.json", "--storage", f"file:{tmp_path}/pages", "--prefetch-threshold", 16,
                                   *options)
        written = json.loads((tmp_path / "report.json").read_text())
        assert written["tokens"] == expected.tokens and said.startswith(expected.text)
        assert all(line.startswith(TIERS) for line in complaint.splitlines())
    if options[0] in ("--layout", "--storage-config") or options == ["--prefetch-policy", "wait_complete"]:
        assert written["source"] == "storage_hit"


def test_a_prompt_leaves_no_thread_behind(tmp_path, monkeypatch, capsys):
    before = set(threading.enumerate())
    run_here(monkeypatch, capsys, *TINY, "--prompt", STORY, "--max-tokens", 3, "--storage", f"file:{tmp_path}/pages")
    gc.collect()
    deadline = time.monotonic() + 60
    while not {thread.name for thread in set(threading.enumerate()) - before} <= {"tqdm_monitor"}:      # which only sleeps
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


ONCE = (*TINY, "--prompt", "Hello")


@pytest.mark.parametrize("words,arguments", [
    ("file:DIR", [*ONCE, "--storage", "nonsense"]), ("file:DIR", [*ONCE, "--storage", "/tmp/pages"]),
    ("file:DIR", [*ONCE, "--storage", "nope://bucket"]), ("names no directory", [*ONCE, "--storage", "file:"]),
    ("File exists", [*ONCE, "--storage", f"file:{SCRIPT}"]), ("not empty", ["--storage", ""]), ("--storage", ["--storage"]),
    ("no address of a Redis", [*ONCE, "--storage", "redis://127.0.0.1:port/0"]),
    ("Cannot import 'no_such_module'", [*ONCE, "--storage", "no_such_module:Class"]),
    ("no class 'Nothing'", [*ONCE, "--storage", "json:Nothing"]), ("has no method", [*ONCE, "--storage", "json:JSONDecoder"]),
    ("cannot be set up", [*ONCE, "--storage", "json:loads"]),
    ("Cannot understand '--storage-config'", [*ONCE, "--storage", "memory://x", "--storage-config", "{"]),
    ("is not an object", [*ONCE, "--storage", "memory://x", "--storage-config", "[]"]),
    ("is not an object", [*ONCE, "--storage-config", "5"]), ("not empty", ["--storage-config", ""]),
    ("No such file", [*ONCE, "--storage-config", "@/no/such.json"]), ("nor a .toml", [*ONCE, "--storage-config", f"@{SCRIPT}"]),
    ("limit_gb", [*ONCE, "--storage", "file:x", "--storage-config", '{"limit_gb": -1}']),
    ("unexpected keyword", [*ONCE, "--storage", "file:x", "--storage-config", '{"limit": 1}']),
    *((repr(part), [*ONCE, "--storage-mbps", speed]) for speed, part in {"fast": "fast", "0": "0", "100:": "",
                                                                         "100@0": "0"}.items()),
    ("page_first", ["--layout", "token-major"]), ("page_first", ["--layout", ""]), ("--layout", ["--layout"]),
    ("write_back", ["--write-policy", "write_around"]), ("wait_complete", ["--prefetch-policy", "never"]),
    ("'0'", ["--prefetch-threshold", "0"]), ("'1.5'", ["--prefetch-threshold", "1.5"]), ("'x'", ["--prefetch-threshold", "x"]),
    ("'-1'", ["--prefetch-timeout=-1"]), ("'nan'", ["--prefetch-timeout", "nan"]), ("'inf'", ["--prefetch-timeout", "inf"]),
    ("'x'", ["--prefetch-timeout-per-1k", "x"]), ("'-0.1'", ["--prefetch-timeout-cap=-0.1"]), ("'0'", ["--prefetch-limit", "0"]),
    ("'-1'", ["--prefetch-limit=-1"]), ("'-1'", ["--cpu-blocks=-1"]), ("'many'", ["--cpu-blocks", "many"]),
    ("--cpu-blocks", [*ONCE, "--gpu-blocks", "20", "--cpu-blocks", str(1 << 26), "--page-size", "4096"]),
    ("larger --cpu-blocks", [*ONCE, "--storage", "memory://x", "--cpu-blocks", "0"]),
    ("'0'", ["--page-size", "0"]), ("'65537'", ["--page-size", "65537"]), ("--block-size", ["--block-size", "16"]),
    ("not empty", ["--admin-token", ""]), ("--fill needs --storage", [*TINY, "--fill", "x.json"]),
    ("the pool has 1", [*TINY, "--gpu-blocks", "1", "--prompt", STORY]), ("512", [*TINY, "--prompt", "x" * 600]),
    ("context of 512 tokens", [*TINY, "--demo"]), ("--demo", ["--demo", "--prompt", "Hello"]),
    ("No model 'nonsense'", ["--prompt", "Hello", "--model", "nonsense"]), ("h800", ["--platform", "h100"]),
    ("--chunk", ["--chunk", "5"]), ("--cpu-block", ["--cpu-block", "5"]), ("'/'", [*ONCE, "--trace", "/"]),
    ("'/'", [*TINY, "--demo", "--json", "/"]),
], ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "")
def test_wrong_options_end_with_one_clear_line(tmp_path, monkeypatch, capsys, words, arguments):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(monkeypatch, capsys, *arguments)


def test_a_redis_that_cannot_be_reached_is_told_without_its_password(monkeypatch, capsys):
    pytest.importorskip("redis")
    url = f"redis://anna:s3cret@127.0.0.1:{free_port()}/0?password=s3cret"
    line = refused_here(monkeypatch, capsys, *ONCE, "--storage", url)
    assert "Cannot reach the storage redis://127.0.0.1:" in line and "refused" in line and "s3cret" not in line
    monkeypatch.setitem(sys.modules, "redis", None)
    line = refused_here(monkeypatch, capsys, *ONCE, "--storage", url)
    assert "pip install redis" in line and "s3cret" not in line


def test_a_port_in_use_is_told_before_the_model_is_looked_for(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused_here(monkeypatch, capsys, "--model", "nonsense", "--port", port)
    assert f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


# 2. --fill -------------------------------------------------------------------------------------------------------

TALKS = [[dict(role="user", content=f"{number}: {STORY}"[:150])] for number in range(3)]


def test_fill_computes_conversations_that_others_answer_from(tiny_folder, tiny_engine, tmp_path, monkeypatch, capsys):
    asked, report, url = tmp_path / "talks.json", tmp_path / "report.json", f"file:{tmp_path}/pages"
    asked.write_text(json.dumps(TALKS))
    said, complaint = run_here(monkeypatch, capsys, "--model", tiny_folder, "--fill", asked, "--storage", url, "--json", report,
                               "--trace", tmp_path / "trace.json", "--write-policy", "write_through")
    written = json.loads(report.read_text())
    tokens = [len(tiny_engine.encode(None, talk)[0]) for talk in TALKS]
    pages = len(list((tmp_path / "pages").iterdir()))
    assert (written["chapter"], written["conversations"], written["tokens"]) == ("07_tiered_storage", 3, sum(tokens))
    assert written["counters"]["storage_pages_written"] == pages >= sum((count - 1) // 16 for count in tokens) - 4
    assert said == f"3 conversations, {sum(tokens)} tokens; {pages} pages written to {url}\n"
    engine = make(tiny_engine)
    engine.attach(open_backend(url), url)
    for talk, count in zip(TALKS, tokens):
        result = engine.generate(messages=talk, max_tokens=4)
        assert result.tokens == tiny_engine.generate(messages=talk, max_tokens=4).tokens
        assert result.usage["cached_tokens"] == (count - 1) // 16 * 16
    assert engine.counts["misses"] == len(TALKS)        # the last page of each, which is not whole
    engine.close()
    engine.release()


@pytest.mark.parametrize("words,content", [
    ("No such file", None), ("give a JSON file", b"{"), ("give a JSON file", b"\xff\xfe"), ("JSON list of conversations", b"{}"),
    ("JSON list of conversations", b"[]"), ("JSON list of conversations", b'"Hello"'), ("messages must be a list", b"[5]"),
    ("messages must be a list", b'[{"role": "user", "content": "Hello"}]'), ("at least one message", b"[[]]"),
    ("role must be", b'[[{"role": "robot", "content": "Hello"}]]'), ("role and a content", b'[[{"role": "user"}]]'),
    ("JSON object", b'[["Hello"]]'), ("Unknown field 'x'", b'[[{"role": "user", "content": "Hello", "x": 1}]]'),
    ("512", json.dumps([[dict(role="user", content="x" * 600)]]).encode()), ("messages", b"[null]"),
], ids=lambda value: repr(value)[:30])
def test_wrong_conversations_are_told_with_one_clear_line(tmp_path, monkeypatch, capsys, words, content):
    asked = tmp_path / "talks.json"
    if content is not None:
        asked.write_bytes(content)
    assert words in refused_here(monkeypatch, capsys, *TINY, "--fill", asked, "--storage", f"file:{tmp_path}/pages")


# 3. A demo that fails --------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A small model with room for the demo's conversations, of up to 1,700 bytes."""
    return write_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=2048, hidden_size=32,
                       intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)


@pytest.mark.parametrize("tampered", [False, True])
def test_a_demo_whose_tokens_differ_ends_and_prints_no_number(long_model, tmp_path, monkeypatch, capsys, tampered):
    """What comes from storage is all zeros."""
    for name, value in dict(CONVERSATIONS=3, ROUNDS=2, ON_DEVICE=1, ON_HOST=1, FACTS=12).items():
        monkeypatch.setattr(tiered, name, value)
    monkeypatch.setattr(tiered.subprocess, "run", lambda *_, **__: None)        # nobody else fills an L3
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fill = tiered.HostPages.fill

    def zeros(self, place, *arguments):
        right = fill(self, place, *arguments)
        self.kv[place].zero_()
        return right
    if tampered:
        monkeypatch.setattr(tiered.HostPages, "fill", zeros)
    monkeypatch.setattr(sys, "argv", ["07_tiered_storage.py", "--model", str(long_model), "--device", "cpu", "--link", "0.5",
                                      "--demo", "--max-tokens", "6", "--prefetch-policy", "wait_complete", "--json",
                                      str(tmp_path / "report.json")])

    def main():
        app.main(tiered.__doc__, "07_tiered_storage", tiered.add_arguments, tiered.make_engine, tiered.demo, fill=tiered.fill)
    if not tampered:
        main()
        assert capsys.readouterr().out.startswith("verified: all ")
        return
    with pytest.raises(SystemExit, match=r"NOT verified: [1-9]\d* of \d+ tokens differ"):
        main()
    assert capsys.readouterr().out == "" and (tmp_path / "report.json").read_text() == ""
    assert not list(tmp_path.glob("demo-*"))


# 4. Ctrl-C -------------------------------------------------------------------------------------------------------

@needs_signals
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_server_that_is_told_to_end_writes_all_that_is_dirty(tiny_folder, tiny_engine, tmp_path, signum, kind):
    """Under write_back, with an L1 and an L2 that are full of it; another engine answers from it."""
    prompts = [f"{number} {number}: {STORY}"[:150] for number in range(4)]
    with RedisServer() if kind == "redis" else tmp_path as where:
        url = where.url if kind == "redis" else f"file:{tmp_path}/pages"
        with Process("--model", tiny_folder, "--device", "cpu", "--link", "0.5", "--port", "0", "--write-policy", "write_back",
                     "--storage", url, "--gpu-blocks", "64", "--cpu-blocks", "30", script=SCRIPT) as process:
            process.read_until(b"(Ctrl-C ends it)\n")
            assert b"07_tiered_storage serves " in process.output and process.output.startswith(b"L1, the device: 64 pages")
            port = int(process.output.split(b"http://127.0.0.1:")[1].split()[0])
            for prompt in prompts:
                assert ask_server(port, dict(prompt=prompt, max_tokens=3)).status_code == 200
            assert counters(port)["storage_pages_written"] == 0
            process.interrupt(signum)
            assert b"could not be written" not in process.output
        engine = make(tiny_engine)
        engine.attach(open_backend(url), url)
        for prompt in prompts:
            result = engine.generate(prompt, max_tokens=3)
            assert result.source == "storage_hit" and result.tokens == tiny_engine.generate(prompt, max_tokens=3).tokens
            assert result.usage["cached_tokens"] == (result.usage["prompt_tokens"] - 1) // 16 * 16
        engine.close()
        engine.release()
    if kind == "file":
        assert all(path.suffix == ".page" for path in (tmp_path / "pages").iterdir())


@needs_signals
def test_ctrl_c_while_many_are_answered(tmp_path):
    with Process(*TINY, "--port", "0", "--max-running", "1", "--write-policy", "write_back", "--storage",
                 f"file:{tmp_path}/pages", script=SCRIPT) as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        port = int(process.output.split(b"http://127.0.0.1:")[1].split()[0])
        statuses = []
        threads = [threading.Thread(target=lambda number=number: statuses.append(ask_server(
            port, dict(prompt=f"{number}: {STORY}", max_tokens=250)).status_code)) for number in range(6)]
        for thread in threads:
            thread.start()
        while counters(port)["requests"] < 6:
            time.sleep(0.01)
        process.interrupt()
        for thread in threads:
            thread.join(60)
    assert 503 in statuses, "who waited was not told"
    assert all(path.suffix == ".page" for path in (tmp_path / "pages").iterdir())


@needs_signals
def test_ctrl_c_in_the_demo_leaves_no_directory(long_model, tmp_path):
    with Process("--model", str(long_model), "--device", "cpu", "--link", "0.5", "--demo", script=SCRIPT,
                 TMPDIR=str(tmp_path)) as process:
        process.read_until(b"L3, storage: ")
        eventually(lambda: list(tmp_path.glob("demo-*/*")))           # not the empty one: nobody may yet hold its name
        process.interrupt()
        assert b"verified" not in process.output
    assert not list(tmp_path.glob("demo-*"))


# 5. HTTP ---------------------------------------------------------------------------------------------------------

def make(tiny_engine, **options):
    """Chapter 07's engine on the model of chapter 01's, without storage. It always estimates to load faster than to compute."""
    engine = tiered.Engine(tiny_engine.model, tiny_engine.tokenizer, tiny_engine.end_tokens, **{
        "blocks": 64, "cpu_blocks": 64, "bytes_per_second": 5e8, "prefetch_policy": "wait_complete", "prefetch_threshold": 16,
        **options})
    engine.seconds_to_load = lambda *_, **__: 1e-9
    engine.seconds_to_compute = lambda *_: 1e3
    return engine


@pytest.fixture
def engine(tiny_engine):
    """One without storage and without anybody's token. Afterwards nothing is on its way, and every page is back."""
    engine = make(tiny_engine)
    yield engine
    eventually(lambda: not (engine.running or engine.waiting or engine.cancelled))
    engine.flush()
    with engine.stepping:
        engine.check_integrity()
        assert engine.pool.available == engine.pool.size and engine.host.available == engine.host.size
    engine.close()
    engine.release()


@pytest.fixture
def client(engine):
    return client_of(engine)


def client_of(engine):
    return app.make_app(engine, dict(INFO, chapter="07_tiered_storage")).test_client()


def asked(client, tiny_engine, stream=False, **fields) -> dict:
    """-> the result of STORY, which is chapter 01's."""
    reply = client.post("/generate", json=dict(prompt=STORY, max_tokens=5, stream=stream, **fields))
    result = events(reply)[-1]["result"] if stream else reply.json
    assert result["tokens"] == tiny_engine.generate(STORY, max_tokens=5).tokens
    return result


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_which_tier_its_pages_came_from_and_health_counts_them(client, engine, tiny_engine, tmp_path, stream):
    url = f"file:{tmp_path}/pages"
    first = asked(client, tiny_engine, stream)
    assert (first["source"], first["prefetch"], first["choice"]) == ("miss", None, None)
    assert client.post("/storage", json=dict(storage=url)).status_code == 200
    engine.flush()
    second = asked(client, tiny_engine, stream)                     # and this sends to storage what is in host memory
    assert second["source"] == "gpu_hit" and second["pages"] == dict(gpu_hits=WHOLE, cpu_hits=0, storage_hits=0, misses=1)
    engine.flush()
    with engine.stepping:
        while engine.pool.cached:
            engine.pool.evict()
    third = asked(client, tiny_engine, stream)
    assert third["source"] == "cpu_hit" and third["pages"] == dict(gpu_hits=0, cpu_hits=WHOLE, storage_hits=0, misses=1)
    assert set(third["choice"]) == {"chosen", "load_ms", "recompute_ms"} and third["choice"]["chosen"] == "load"
    tiered.forget(engine)
    fourth = asked(client, tiny_engine, stream)
    assert fourth["source"] == "storage_hit" and fourth["pages"] == dict(gpu_hits=0, cpu_hits=0, storage_hits=WHOLE, misses=1)
    fetched = fourth["prefetch"]
    assert set(fetched) == {"policy", "hit_tokens", "fetched_tokens", "waited_ms", "ended"} and fetched["waited_ms"] > 0
    assert (fetched["policy"], fetched["ended"], fetched["hit_tokens"], fetched["fetched_tokens"]) == (
        "wait_complete", "complete", 16 * WHOLE, 16 * WHOLE)
    assert fourth["link"] == f"modelled link, 0.5 GB/s; {url}" and first["link"] == "modelled link, 0.5 GB/s"
    assert {span["lane"] for span in fourth["timeline"]} >= {"compute", "load", "storage"}
    engine.flush()
    counts = client.get("/health").json["counters"]
    assert (counts["gpu_hits"], counts["cpu_hits"], counts["storage_hits"], counts["misses"]) == (WHOLE, WHOLE, WHOLE, WHOLE + 4)
    assert counts["storage_pages_read"] == counts["prefetched_pages"] == WHOLE <= counts["storage_pages_written"]
    assert counts["storage"] == url and counts["link"] == "modelled link, 0.5 GB/s" and counts["nodes"] >= 1
    assert counts["storage_errors"] == counts["prefetches_under_way"] == counts["writes_under_way"] == counts["pages_lost"] == 0


STATE = {"storage", "write_policy", "prefetch_policy", "prefetch_threshold", "layout", "page_size", "page_bytes"}
COUNTED = {f"storage_{what}" for what in ("looked_for", "pages_read", "bytes_read", "pages_written", "bytes_written",
                                          "pages_refused", "errors")} | {"last_error", "reading", "writing"}


def test_storage_is_attached_and_detached_and_keeps_what_it_has(client, engine, tiny_engine, tmp_path):
    url, nothing = f"file:{tmp_path}/pages", client.get("/storage").json
    assert nothing == dict(storage=None, write_policy="write_through", prefetch_policy="wait_complete", prefetch_threshold=16,
                           layout="page_first_direct", page_size=16, page_bytes=engine.host.page_bytes) and set(nothing) == STATE
    assert "No storage is attached" in error_of(client.delete("/storage"), 400)["message"]
    state = client.post("/storage", json=dict(storage=url, config=dict(limit_gb=1)))
    assert state.status_code == 200 and set(state.json) == STATE | COUNTED and state.json["storage"] == url
    assert state.json["reading"] is state.json["writing"] is True and state.json["last_error"] is None
    for body in (dict(storage=url), dict(storage="memory://x"), dict(storage="file:")):
        assert f"{url} is attached already" in error_of(client.post("/storage", json=body), 400)["message"]
    asked(client, tiny_engine)
    engine.flush()
    pages = client.get("/storage").json["storage_pages_written"]
    assert pages >= WHOLE
    assert client.delete("/storage").json == dict(storage=None, detached=url, drained=True)
    assert client.get("/storage").json == nothing and len(list((tmp_path / "pages").iterdir())) == pages
    assert asked(client, tiny_engine)["source"] == "gpu_hit", "L1 was lost"
    tiered.forget(engine)
    assert asked(client, tiny_engine)["source"] == "miss"
    engine.flush()
    assert "No storage is attached" in error_of(client.delete("/storage"), 400)["message"]
    assert client.post("/storage", json=dict(storage=url, config=None)).status_code == 200
    tiered.forget(engine)
    assert asked(client, tiny_engine)["source"] == "storage_hit"


@pytest.mark.parametrize("body,words", [
    (b"", "JSON"), (b"{", "JSON"), (b"\xff", "UTF-8"), (b"[]", "object"), (b"null", "object"), (b"5", "object"),
    (b"{}", '{"storage": URL'), (b'{"storage": null}', '{"storage": URL'), (b'{"storage": 5}', "storage must be a URL"),
    (b'{"storage": "\\ud800"}', "storage must be a URL"), (b'{"storage": "file:x", "config": []}', "config must be an object"),
    (b'{"storage": "file:x", "config": "{}"}', "config must be an object"),
    (b'{"storage": "file:x", "force": true}', "Unknown field"),
    (b'{"storage": ""}', ""), (b'{"storage": "file:"}', "names no directory"),
    (b'{"storage": "nope://x"}', "There is no storage"),
    (b'{"storage": "json:loads"}', "only for who has the token"), (b'{"storage": "os.path:join"}', "only for who has the token"),
    (b'{"storage": "x"}', ""), (b'{"storage": "file:x", "config": {"limit_gb": "many"}}', "limit_gb"),
    (b'{"storage": "file:x", "config": {"nonsense": 1}}', "unexpected keyword"),
], ids=lambda value: repr(value)[:40])
def test_a_wrong_body_is_refused_and_nothing_is_attached(client, engine, tmp_path, monkeypatch, body, words):
    monkeypatch.chdir(tmp_path)
    reply = client.post("/storage", data=body)
    assert words in error_of(reply, 400)["message"]
    assert engine.storage is None and client.get("/storage").json["storage"] is None


def test_a_back_end_that_cannot_be_reached_is_told_without_its_password(client, engine):
    pytest.importorskip("redis")
    address = f"127.0.0.1:{free_port()}"
    for body in (dict(storage=f"redis://anna:s3cret@{address}/0"), dict(storage=f"redis://:s3cret@{address}/0"),
                 dict(storage=f"redis://{address}/0", config=dict(username="anna", password="s3cret")),
                 dict(storage=f"redis://{address}/0?password=s3cret")):
        reply = client.post("/storage", json=body)
        message = reply.json["error"]["message"]                    # it quotes what the client says, in two sentences
        assert reply.status_code == 400 and f"Cannot reach the storage redis://{address}/0: " in message
        assert "choose another --storage" in message and "s3cret" not in message and "\n" not in message
    assert engine.storage is None


def test_no_password_is_shown_by_what_is_attached(client, engine, tiny_engine):
    with RedisServer("--requirepass", "s3cret") as server:
        url = server.url.replace("redis://", "redis://:s3cret@")
        assert client.post("/storage", json=dict(storage=url)).status_code == 200
        shown = [client.get(path).get_data(as_text=True) for path in ("/storage", "/health")] + [str(asked(client, tiny_engine))]
        engine.flush()
        server.stop()
        tiered.forget(engine)
        asked(client, tiny_engine)
        shown += [client.get("/storage").get_data(as_text=True), client.delete("/storage").get_data(as_text=True)]
    assert engine.counts["finished"] == 2 and "Error" in shown[3]
    assert not [text for text in shown if "s3cret" in text] and all(server.url in text for text in shown)


class Shelf:
    """A back end of one's own."""
    def __init__(self, **config):
        self.values, self.config, self.closed = {}, config, 0
        made.append(self)

    def get(self, key):
        return self.values.get(key)

    def exists(self, key):
        return key in self.values

    def set(self, key, value):
        self.values[key] = bytes(value)

    def close(self):
        self.closed += 1


made = []
TOKEN = {"Authorization": "Bearer s3same"}


def test_a_class_of_ones_own_is_loaded_only_for_who_has_the_token(engine, tiny_engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "shelf_of_mine", types.SimpleNamespace(Shelf=Shelf))
    engine.admin_token = "s3same"
    client, body = client_of(engine), dict(storage="shelf_of_mine:Shelf", config=dict(color="green"))
    del made[:]
    for headers in ({}, {"Authorization": "Bearer s3sam"}, {"Authorization": "Basic s3same"}):
        assert "--admin-token" in error_of(client.post("/storage", json=body, headers=headers), 400)["message"]
    assert not made and engine.storage is None
    reply = client.post("/storage", json=body, headers=TOKEN)
    assert reply.status_code == 200 and reply.json["storage"] == "shelf_of_mine:Shelf" and "s3same" not in str(reply.json)
    shelf, = made
    assert shelf.config == dict(color="green")
    asked(client, tiny_engine)
    engine.flush()
    assert len(shelf.values) >= WHOLE and client.delete("/storage").json["drained"] and shelf.closed == 1


ELSEWHERE = {
    "a remote address": dict(environ_overrides=dict(REMOTE_ADDR="10.1.2.3")),
    "a remote address of version 6": dict(environ_overrides=dict(REMOTE_ADDR="2001:db8::1")),
    "an address that is none": dict(environ_overrides=dict(REMOTE_ADDR="nonsense")),
    "no address": dict(environ_overrides=dict(REMOTE_ADDR="")),
    "another name (DNS rebinding)": dict(headers={"Host": "evil.example:5000"}),
    "a name that begins as ours": dict(headers={"Host": "localhost.evil.example"}),
    "a name that ends as ours": dict(headers={"Host": "evil-localhost"}),
    "an address of the network": dict(headers={"Host": "192.168.0.5:5000"}),
    "all addresses": dict(headers={"Host": "0.0.0.0:5000"}),
    "a web page": dict(headers={"Origin": "http://evil.example"}),
    "a web page of this machine": dict(headers={"Origin": "http://localhost:5000"}),
    "a sandboxed web page": dict(headers={"Origin": "null"}),
    "a proxy": dict(headers={"X-Forwarded-For": "127.0.0.1"}),
    "a proxy of RFC 7239": dict(headers={"Forwarded": "for=127.0.0.1"}),
}
METHODS = {"GET": None, "POST": dict(storage="memory://elsewhere"), "DELETE": None}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("who", ELSEWHERE)
def test_who_is_not_on_this_machine_needs_the_token(engine, who, method):
    def send(token=None):
        how = dict(ELSEWHERE[who])
        how["headers"] = {**how.get("headers", {}), **({} if token is None else {"Authorization": token})}
        return client_of(engine).open("/storage", method=method, json=METHODS[method], **how)
    tokens = [None, "", "Bearer ", "Bearer", "Bearer None", "Bearer wrong", "Bearer s3sam", "Bearer s3same1", "Bearer S3SAME",
              "Basic s3same", "Bearer \u00e9"]
    for server_has in (None, "s3same"):
        engine.admin_token = server_has
        for token in tokens[:-1] if server_has else [*tokens, "Bearer s3same"]:
            error = error_of(send(token), 403)
            assert error["type"] == "permission_error" and "--admin-token" in error["message"]
            assert "s3same" not in error["message"]
            assert engine.storage is None
    if method == "DELETE":
        engine.attach(open_backend("memory://elsewhere"), "memory://elsewhere")
    assert send("Bearer s3same").status_code == 200
    assert (engine.storage is not None) == (method == "POST")


@pytest.mark.parametrize("how", [
    dict(), dict(headers={"Host": "localhost:5000"}), dict(headers={"Host": "LOCALHOST"}),
    dict(headers={"Host": "127.0.0.1:5000"}),
    dict(headers={"Host": "[::1]:5000"}, environ_overrides=dict(REMOTE_ADDR="::1")),
    dict(environ_overrides=dict(REMOTE_ADDR="127.0.0.9")),
    dict(headers={"Authorization": "Bearer wrong"})], ids=str)
def test_a_program_on_this_machine_needs_none(engine, how):
    client = client_of(engine)
    assert client.post("/storage", json=dict(storage="memory://here"), **how).json["storage"] == "memory://here"
    assert client.get("/storage", **how).json["storage"] == "memory://here"
    assert client.delete("/storage", **how).json["detached"] == "memory://here"


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "", ":", "@", "localhost:port", "[::1]]"])
def test_a_host_that_is_none_is_refused(client, host):
    """And it is no defect of the server."""
    assert client.get("/storage", headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_no_error_of_the_server(client, method):
    assert client.open("/storage", method=method).status_code in (200, 204, 400, 403, 405)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["01_baseline", "02_paged_kv", "03_cpu_offload"])
def test_chapters_without_storage_know_no_such_path(tiny_engine, name, method):
    engine = chapter(name).Engine
    paths = {} if name == "01_baseline" else engine.admin.fget(engine)
    assert set(paths) <= {"/evict"} and engine.admin_token is None
    if name == "01_baseline":
        reply = client_of(another(tiny_engine)).open("/storage", method=method, json=METHODS[method])
        assert "nothing here" in error_of(reply, 404)["message"]


def test_an_openai_client_gets_the_tokens_of_chapter_01_from_storage(client, engine, tiny_engine):
    assert client.post("/storage", json=dict(storage="memory://openai")).status_code == 200
    body = dict(prompt=STORY, max_tokens=6, temperature=0)
    first = client.post("/v1/completions", json=body).json
    engine.flush()
    tiered.forget(engine)
    again = client.post("/v1/completions", json=body).json
    assert again["choices"] == first["choices"] and first["usage"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * ((first["usage"]["prompt_tokens"] - 1) // 16)


def test_who_asks_while_storage_is_attached_and_detached_gets_the_tokens_of_chapter_01(engine, tiny_engine, tmp_path):
    prompts = [f"{number}: {STORY}"[:170] for number in range(4)]
    expected = [tiny_engine.generate(prompt, max_tokens=4).tokens for prompt in prompts]
    done, over, admin = threading.Event(), [], client_of(engine)

    def attach():
        rounds = 0
        while not (done.is_set() and rounds):
            url = ("memory://concurrent", f"file:{tmp_path}/pages")[rounds % 2]
            assert admin.post("/storage", json=dict(storage=url)).status_code == 200
            while not done.is_set() and engine.counts["finished"] < 3 * rounds:
                time.sleep(0.001)
            assert admin.delete("/storage").json["drained"] is True
            if rounds % 3 == 0:
                with engine.stepping:
                    while engine.pool.cached:
                        engine.pool.evict()
            rounds += 1
        return rounds

    def look():
        while not done.is_set():
            assert {admin.get(path).status_code for path in ("/storage", "/health")} == {200}
            time.sleep(0.005)

    def ask(first):
        try:
            for turn in range(12):
                number = (first + turn) % 4
                assert ask_server(port, dict(prompt=prompts[number], max_tokens=4)).json["tokens"] == expected[number]
        finally:
            over.append(first)
            if len(over) == 3:
                done.set()
    with Serving(engine) as port:
        rounds, *others = in_threads(attach, look, *(partial(ask, first) for first in range(3)))
    assert others == [None] * 4 and isinstance(rounds, int) and rounds >= 2, (rounds, others)
    assert engine.storage is None and engine.counts["failed"] == 0 and engine.counts["finished"] == 36


def test_two_who_attach_at_once_do_not_both_succeed(engine, monkeypatch):
    opened, both = [], threading.Barrier(2)
    open_one = backends.open_backend

    def slowly(*arguments):
        backend = open_one(*arguments)
        opened.append(backend)
        both.wait(60)
        return backend
    monkeypatch.setattr(backends, "open_backend", slowly)
    client = client_of(engine)
    replies = in_threads(*[lambda: client.post("/storage", json=dict(storage="memory://both"))] * 2)
    assert sorted(reply.status_code for reply in replies) == [200, 400]
    refused, = (reply for reply in replies if reply.status_code == 400)
    assert "is attached already" in error_of(refused, 400)["message"]
    lost, = (backend for backend in opened if backend is not engine.storage.backend)
    assert lost.threads._shutdown, "the back end that was not taken was never closed"


def test_a_model_without_host_memory_takes_no_storage(tiny_engine):
    engine = make(tiny_engine, cpu_blocks=0)
    message = error_of(client_of(engine).post("/storage", json=dict(storage="memory://none")), 400)["message"]
    assert "larger --cpu-blocks" in message and engine.storage is None
    assert engine.generate(**ASK).tokens == tiny_engine.generate(**ASK).tokens
    engine.close()
