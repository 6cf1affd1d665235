"""Chapter 08's command line and its HTTP: prompts, files of requests, wrong options, memory, Ctrl-C."""
import gc
import json
import re
import runpy
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from functools import partial

import pytest
import torch

from common import checkpoint
from legacy import app, batch
from legacy import link as links
from legacy.tests.conftest import ROOT, chapter, make_engine, write_model
from legacy.tests.test_app import CHAT, client_of, error_of, events, eventually
from legacy.tests.test_batch import asked, by_name, chat, replies, texts, write
from legacy.tests.test_cli import Process, needs_signals
from legacy.tests.test_paged import in_threads
from legacy.tests.test_server import Reply, before_each_pass, counters, sent, serving
from legacy.tests.test_server import ask as ask_server

baseline, paged, hybrid = (chapter(name) for name in ("01_baseline", "02_paged_kv", "08_hybrid_blocks"))
SCRIPT = ROOT / "08_hybrid_blocks.py"
STORY = "It was a long story, and it began with a letter. " * 3         # 11 blocks of 16 tokens as a prompt
SIZES = ("Weights: ", "Blocks of ", "The host is reached over a ")      # of what is no complaint
TINY = ("--model", "random:tiny", "--device", "cpu", "--link", "0.5")
BLOCKS = re.compile(r"Blocks of (\d+) tokens: (\d+) ACT on the device, (\d+) ACT and (\d+) KV in host memory; an ACT block takes "
                    r"([\d.]+) MB, a KV block ([\d.]+) MB")
# A layer of these costs gets blocks of all three kinds, whatever this machine is doing.
COSTS = hybrid.Costs(load_weights=10.0, forward=1.0, attend=0.1, rebuild=3.0, load_act=1.0, load_kv=2.0)


@pytest.fixture(scope="module")
def mha_folder(tmp_path_factory):
    """The tiny model with as many KV heads as heads: an ACT block has half the bytes of a KV block. Do not write to it."""
    return write_model(tmp_path_factory.mktemp("models") / "mha", num_key_value_heads=4)


@pytest.fixture(scope="module")
def alone(mha_folder):
    """Chapter 01's engine on it, with plain weights, as those are in chapter 08."""
    return make_engine(mha_folder, reorder=False)


@pytest.fixture(scope="module")
def on_host(mha_folder):
    """The same as chapter 08 loads it -> (model, tokenizer, end tokens)."""
    return checkpoint.load(str(mha_folder), "float32", "cpu", on_host=True)


def run_here(monkeypatch, capsys, *arguments, link="0.5") -> tuple[str, str]:
    """Run chapter 08 as it stands in this process -> what it printed, to stdout and to stderr."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", *(["--link", link] if link else []), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr()


def refused_here(monkeypatch, capsys, *arguments) -> str:
    """-> its one line of complaint."""
    monkeypatch.setattr(app, "serve", lambda *_: pytest.fail("it serves"))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said, complaint = capsys.readouterr()
    if isinstance(end.value.code, str):         # sys.exit("words") prints them and ends with 1
        complaint += end.value.code + "\n"
    line, = (line for line in complaint.splitlines() if not line.startswith(SIZES))
    assert end.value.code and said == "" and line.startswith("08_hybrid_blocks") and "Traceback" not in line
    return line


def sizes(complaint: str) -> dict:
    """What it says about memory before it answers, and nothing else."""
    weights, blocks, link = complaint.splitlines()
    words = r"Weights: (\d+) layers, ([\d.]+) MB, in host memory, (\d+) on the device"
    layers, size, resident = re.fullmatch(words, weights).groups()
    names = ("block_size", "act_device", "act_host", "kv_host", "act_mb", "kv_mb")
    return dict(layers=int(layers), weights_mb=float(size), resident=int(resident), link=link,
                **dict(zip(names, map(float, BLOCKS.fullmatch(blocks).groups()))))


def prompted(monkeypatch, capsys, tmp_path, folder, *options, prompt=STORY, **named) -> tuple[dict, dict]:
    """Answer one prompt -> what --json has, and the sizes on stderr."""
    said, complaint = run_here(monkeypatch, capsys, "--model", folder, "--prompt", prompt, "--json", tmp_path / "report.json",
                               *options, **named)
    written = json.loads((tmp_path / "report.json").read_text())
    assert said.startswith(written["text"]) and "; TTFT " in said.splitlines()[-1]
    return written, sizes(complaint)


def built(folder, *options):
    """-> the engine that these options make."""
    parser = app.parser_for("")
    hybrid.add_arguments(parser)
    arguments = parser.parse_args(["--model", str(folder), "--device", "cpu", "--link", "0.5", *map(str, options)])
    return hybrid.make_engine(*checkpoint.load(str(folder), arguments.dtype, "cpu", on_host=True), arguments)


# 1. Prompts ------------------------------------------------------------------------------------------------------

def test_help_names_its_options(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, capsys, "--help")
    said = capsys.readouterr().out
    assert end.value.code in (0, None)
    for option in ("--demo", "--prompt", "--policy", "--device-memory", "--host-memory", "--resident-layers", "--mini-batch",
                   "--block-size", "--token-budget", "--max-running", "--link", "--platform", "--batch", "--out",
                   *hybrid.POLICIES):
        assert option in said, option
    assert "--gpu-blocks" not in said


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_a_prompt_prints_the_sizes_and_the_answer_of_chapter_01(mha_folder, alone, tmp_path, monkeypatch, capsys, policy):
    sampling = dict(max_tokens=12, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    expected = alone.generate(prompt=STORY, **sampling)
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]
    trace = tmp_path / "trace.json"
    written, known = prompted(monkeypatch, capsys, tmp_path, mha_folder, *options, "--policy", policy, "--trace", trace)
    assert (written["chapter"], written["model"], written["dtype"], written["device"]) == (
        "08_hybrid_blocks", str(mha_folder), "float32", "cpu")
    assert written["tokens"] == expected.tokens and written["usage"] == expected.usage and written["source"] == "miss"
    config, layer = alone.model.config, 64 * (4 * 64 + 3 * 128) + 2 * 64                        # numbers
    assert (known["layers"], known["resident"], known["block_size"]) == (3, 0, 16)
    assert known["weights_mb"] == round(3 * layer * 4 / 1e6, 1) and known["link"].endswith("a modelled link, 0.5 GB/s")
    assert known["kv_mb"] == round(16 * config.kv_numbers_per_token * 4 / 1e6, 3) == pytest.approx(2 * known["act_mb"], abs=2e-3)
    assert sum(known[kind] for kind in hybrid.Allocation._fields) == 128 * (256 // 16 + 1), "128 contexts, and a block more each"
    act, kv = known["act_device"] + known["act_host"], known["kv_host"]
    assert (act > 0, kv > 0) == dict({"kv-only": (False, True), "act-only": (True, False), "static": (True, True)}).get(
        policy, (act > 0, kv > 0))
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [span["name"].split()[0] for span in spans] == ["prefill"] + ["decode"] * (len(expected.tokens) - 1)


@pytest.mark.parametrize("options", [
    ["--resident-layers", "1"], ["--resident-layers", "2"], ["--resident-layers", "3"],
    ["--resident-layers", "3", "--policy", "kv-only"], ["--block-size", "1"],
    ["--block-size", "300"], ["--mini-batch", "1"], ["--token-budget", "1"], ["--token-budget", "7"], ["--max-running", "1"],
    ["--device-memory", "1"], ["--max-running", "1", "--host-memory", "0.00051", "--device-memory", "1"],
    ["--max-running", "2", "--host-memory", "0.002"],
    ["--max-running", "1", "--token-budget", "1", "--block-size", "1", "--mini-batch", "1", "--policy", "static"],
    ["--plain-weights"], ["--policy", "act-only", "--resident-layers", "1", "--block-size", "5"]], ids=" ".join)
def test_every_option_gives_the_answer_of_chapter_01(mha_folder, alone, tmp_path, monkeypatch, capsys, options):
    written, known = prompted(monkeypatch, capsys, tmp_path, mha_folder, "--max-tokens", 8, *options)
    assert written["tokens"] == alone.generate(prompt=STORY, max_tokens=8).tokens
    resident = int(options[1]) if options[0] == "--resident-layers" else 1 if "--resident-layers" in options else 0
    assert (known["layers"], known["resident"]) == (3 - resident, resident)
    if "--block-size" in options:
        assert known["block_size"] == int(options[options.index("--block-size") + 1])


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_with_grouped_queries_hybrid_keeps_no_activations(tiny_folder, tiny_engine, tmp_path, monkeypatch, capsys, policy):
    """They would be no smaller than K and V. Who asks for them gets them."""
    written, known = prompted(monkeypatch, capsys, tmp_path, tiny_folder, "--max-tokens", 8, "--policy", policy)
    assert written["tokens"] == tiny_engine.generate(prompt=STORY, max_tokens=8).tokens
    assert known["act_mb"] == known["kv_mb"]
    kinds = {kind for kind in hybrid.Allocation._fields if known[kind]}
    assert kinds == {"hybrid": {"kv_host"}, "kv-only": {"kv_host"}, "act-only": {"act_device", "act_host"},
                     "static": {"act_device", "act_host", "kv_host"}}[policy]


@pytest.mark.parametrize("policy", ["kv-only", "act-only", "static"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_takes_half_the_memory_and_begins_as_chapter_01(mha_folder, alone, tmp_path, monkeypatch, capsys, dtype, policy):
    """The first token, where the likeliest is likelier than the next by more than rounding makes."""
    def margin(prompt):
        tokens = alone.encode(prompt, None)[0]
        cache = baseline.KVCache(alone.model.config, len(tokens), torch.float32, "cpu")
        first, second = alone.forward(cache, tokens, 0).topk(2).values.tolist()
        return first - second
    prompt = max((STORY[:end] for end in range(120, 140)), key=margin)
    assert margin(prompt) > 1
    written, known = prompted(monkeypatch, capsys, tmp_path, mha_folder, "--max-tokens", 8, "--dtype", dtype, "--policy", policy,
                              prompt=prompt)
    assert written["dtype"] == dtype and written["tokens"][0] == alone.generate(prompt=prompt, max_tokens=1).tokens[0]
    assert known["kv_mb"] == round(16 * alone.model.config.kv_numbers_per_token * 2 / 1e6, 3)
    assert known["weights_mb"] == 0.2


def test_the_links_speed_is_asked_for_or_is_like_a_platforms(mha_folder, tmp_path, monkeypatch, capsys):
    ask = (monkeypatch, capsys, tmp_path, mha_folder, "--max-tokens", 2)
    assert prompted(*ask, link="0.125")[1]["link"] == "The host is reached over a modelled link, 0.125 GB/s"
    speeds = {platform: 1e9 * (1 + number) for number, platform in enumerate(links.PLATFORMS)}
    monkeypatch.setattr(links, "like", lambda platform, model: speeds[platform])
    for options, platform in (([], "a100"), (["--platform", "l20"], "l20"), (["--platform", "h800", "--link", "auto"], "h800")):
        known = prompted(*ask, *options, link=None)[1]
        assert known["link"] == f"The host is reached over a modelled link, {speeds[platform] / 1e9:.3g} GB/s"


def test_a_prompt_leaves_no_thread_behind(monkeypatch, capsys):
    before = set(threading.enumerate())
    run_here(monkeypatch, capsys, "--model", "random:tiny", "--prompt", STORY, "--max-tokens", 3)
    gc.collect()
    names = {"tqdm_monitor"}                    # which only sleeps
    eventually(lambda: {thread.name for thread in set(threading.enumerate()) - before} <= names)


# 2. Memory -------------------------------------------------------------------------------------------------------

def test_device_memory_is_filled_with_act_blocks_and_never_passed(mha_folder):
    options = ("--policy", "act-only", "--max-running", 4, "--mini-batch", 512)
    plain = built(mha_folder, *options)
    least, block = plain.device_bytes, plain.act_bytes
    for blocks in (0, 1, 7):
        limit = least + blocks * block + block // 2
        engine = built(mha_folder, *options, "--device-memory", limit / 1e9)
        assert engine.allocation.act_device == blocks and engine.counters()["device_bytes"] == least + blocks * block <= limit
    resident = built(mha_folder, *options, "--resident-layers", 1)
    layer = resident.model.pieces[0].nbytes
    assert resident.device_bytes == pytest.approx(least + layer, rel=0.01)
    assert resident.counters()["host_bytes"] - resident.pool.act_host.nbytes == 2 * layer


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_host_memory_is_filled_and_never_passed(mha_folder, policy, monkeypatch):
    monkeypatch.setattr(hybrid.Engine, "measure", lambda *_, **__: COSTS)
    weights = built(mha_folder, "--max-running", 1).model.host_bytes
    limit = weights + 1_000_000
    counts = built(mha_folder, "--policy", policy, "--host-memory", limit / 1e9).counters()
    act, kv = 16 * 64 * 3 * 4, 16 * 64 * 3 * 4 * 2
    room = 1_000_000 if policy != "static" else 500_000                     # bytes of each kind
    used = counts["act_host"] * act, counts["kv_host"] * kv
    assert counts["host_bytes"] == weights + sum(used) <= limit
    if policy == "static":
        assert all(room - size < used_of_kind <= room for size, used_of_kind in zip((act, kv), used))
    else:
        assert room - (act if policy != "kv-only" else kv) < sum(used) <= room
    assert (used[0] > 0, used[1] > 0) == (policy != "kv-only", policy != "act-only")


@pytest.mark.parametrize("words,options", [
    (("2 layers", "buffers for 8192 tokens", "MB of device memory, and there are 1.5 MB", "larger --device-memory",
      "smaller --mini-batch"), ["--device-memory", "0.0015"]),
    (("device memory, and there are 0.0 MB", "fewer --resident-layers"), ["--device-memory", "0", "--resident-layers", "2"]),
    (("3 layers take 0.5 MB of host memory, and there are 0.4 MB", "larger --host-memory"), ["--host-memory", "0.0004"]),
    (("2 layers take 0.3 MB of host memory, and there are 0.0 MB",), ["--host-memory", "0", "--resident-layers", "1"]),
    (("request of 256 tokens takes 16 blocks", "for 1:", "of 0.5 MB of host memory the weights take 0.5 MB", "0.025 MB",
      "larger --host-memory"), ["--host-memory", "0.00052", "--policy", "kv-only"]),
    (("999999.0 GB", "are more than the", "GB that are free", "smaller --host-memory"), ["--host-memory", "999999"]),
    (("The model has 3 layers", "--resident-layers 3 or less"), ["--resident-layers", "4"]),
], ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "")
def test_too_little_memory_is_told_with_the_sizes_and_what_to_do(mha_folder, monkeypatch, capsys, words, options):
    line = refused_here(monkeypatch, capsys, "--model", mha_folder, "--device", "cpu", "--link", "0.5", "--prompt", "Hello",
                        *options)
    assert line.startswith("08_hybrid_blocks: ") and line.endswith(".")
    for word in words:
        assert word in line


# 3. What is asked wrongly ----------------------------------------------------------------------------------------

ONCE = (*TINY, "--prompt", "Hello")


@pytest.mark.parametrize("words,arguments", [
    ("kv-only", ["--policy", "kv"]), ("act-only", ["--policy", ""]), ("--policy", ["--policy"]),
    ("'-1'", ["--device-memory=-1"]), ("'nan'", ["--device-memory", "nan"]), ("'much'", ["--device-memory", "much"]),
    ("'-0.1'", ["--host-memory=-0.1"]), ("'inf'", ["--host-memory", "inf"]), ("--host-memory", ["--host-memory"]),
    ("'-1'", ["--resident-layers=-1"]), ("'1.5'", ["--resident-layers", "1.5"]), ("'2000'", ["--resident-layers", "2000"]),
    ("'0'", ["--mini-batch", "0"]), ("'many'", ["--mini-batch", "many"]), ("'0'", ["--block-size", "0"]),
    ("'65537'", ["--block-size", "65537"]), ("'1.5'", ["--block-size", "1.5"]), ("'0'", ["--token-budget", "0"]),
    ("'x'", ["--token-budget", "x"]), ("'0'", ["--max-running", "0"]), ("'5000'", ["--max-running", "5000"]),
    ("'0'", ["--link", "0"]), ("'fast'", ["--link", "fast"]), ("h800", ["--platform", "h100"]),
    ("--gpu-blocks", ["--gpu-blocks", "5"]), ("--page-size", ["--page-size", "5"]), ("--resident", ["--resident", "1"]),
    ("--demo", ["--demo", "--prompt", "Hello"]), ("No model 'nonsense'", ["--prompt", "Hello", "--model", "nonsense"]),
    ("512", [*TINY, "--prompt", "x" * 600]), ("4 layers", [*ONCE, "--resident-layers", "5"]),
    ("float32", [*ONCE, "--dtype", "float8"]), ("'/'", [*ONCE, "--trace", "/"]), ("'/'", [*TINY, "--demo", "--json", "/"]),
    ("go together", [*TINY, "--batch", str(SCRIPT)]), ("go together", [*TINY, "--out", "replies.jsonl"]),
    ("leave --demo and --prompt out", [*ONCE, "--batch", str(SCRIPT), "--out", "replies.jsonl"]),
    ("leave --demo and --prompt out", [*TINY, "--demo", "--batch", str(SCRIPT), "--out", "replies.jsonl"]),
    ("No such file", ["--model", "nonsense", "--batch", "no.jsonl", "--out", "replies.jsonl"]),
    ("is no file", ["--model", "nonsense", "--batch", str(SCRIPT), "--out", "."]),
    ("same file", ["--model", "nonsense", "--batch", str(SCRIPT), "--out", str(SCRIPT)]),
], ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "")
def test_wrong_options_end_with_one_clear_line(tmp_path, monkeypatch, capsys, words, arguments):
    monkeypatch.chdir(tmp_path)
    assert words in refused_here(monkeypatch, capsys, *arguments)


def test_a_port_in_use_is_told_before_the_model_is_looked_for(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused_here(monkeypatch, capsys, "--model", "nonsense", "--port", port)
    assert f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


# 4. A demo that fails --------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A small model with room for the demo's prompts."""
    return write_model(tmp_path_factory.mktemp("models") / "long", max_position_embeddings=1024, hidden_size=32,
                       intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3)


def zeros_rebuilt(self, layer, states, buffer, targets, positions):
    for rows in buffer.kv:
        rows.index_fill_(0, targets, 0.0)


def zeros_stored(store):
    def damaged(self, index, part, staging, number):
        staging.act.zero_()
        staging.kv.zero_()
        return store(self, index, part, staging, number)
    return damaged


def wrong_weights(begin):
    def damaged(self, index):
        layer = begin(self, index)
        layer.o_proj.weight.zero_()
        return layer
    return damaged


def main_here():
    """What SCRIPT does, with the module as a test has left it."""
    app.main(hybrid.__doc__, "08_hybrid_blocks", hybrid.add_arguments, hybrid.make_engine, hybrid.demo,
             load=partial(checkpoint.load, on_host=True), check=batch.check, batch=batch.answer)


@pytest.mark.parametrize("dtype,damage", [
    ("float32", None), ("float32", "rebuilt"), ("float32", "stored"), ("float32", "weights"), ("bfloat16", "rebuilt")])
def test_a_demo_whose_tokens_differ_ends_and_prints_no_number(long_model, tmp_path, monkeypatch, capsys, dtype, damage):
    """Keys and values that are rebuilt, or states that go to the host, are all zeros; or a layer has not its own weights. In 16
    bit it says how many tokens are equal."""
    monkeypatch.setattr(hybrid, "REQUESTS", 6)
    monkeypatch.setattr(hybrid.Engine, "measure", lambda *_, **__: COSTS)
    if damage == "rebuilt":
        monkeypatch.setattr(hybrid.Engine, "rebuild", zeros_rebuilt)
    if damage == "stored":
        monkeypatch.setattr(hybrid.Engine, "store", zeros_stored(hybrid.Engine.store))
    if damage == "weights":
        monkeypatch.setattr(hybrid.OffloadedModel, "begin", wrong_weights(hybrid.OffloadedModel.begin))
    monkeypatch.setattr(sys, "argv", [
        "08_hybrid_blocks.py", "--model", str(long_model), "--device", "cpu", "--link", "0.5", "--dtype", dtype, "--demo",
        "--json", str(tmp_path / "report.json"), "--svg", str(tmp_path / "trace.svg")])
    if damage is None or dtype != "float32":
        main_here()
        said = capsys.readouterr().out
        assert "tokens/s" in said and (tmp_path / "trace.svg").read_text().startswith("<svg ")
        if damage is None:
            assert said.startswith("verified: all 384 tokens ")
        else:
            assert re.match(r"[1-9]\d* of 384 tokens equal those of chapter 01 \(16-bit ", said) and "verified" not in said
        assert json.loads((tmp_path / "report.json").read_text())["verified"] is (damage is None)
        return
    with pytest.raises(SystemExit, match=r"NOT verified: [1-9]\d* of 384 tokens differ"):
        main_here()
    assert capsys.readouterr().out == ""
    assert (tmp_path / "report.json").read_text() == (tmp_path / "trace.svg").read_text() == ""


# 5. Files of requests --------------------------------------------------------------------------------------------

def right(alone, line) -> str:
    """The text of chapter 01 for the body of a line."""
    body = dict(line["body"])
    if isinstance(body.get("prompt"), str):
        body["prompt"] = alone.tokenizer.encode(body["prompt"])
    return alone.generate(**body).text


MIXED = [asked("a", max_tokens=9), chat("b", STORY[:90], max_tokens=20), asked("c", prompt=[5, 6, 7] * 30, max_tokens=12),
         asked("d", prompt=STORY, max_tokens=5, temperature=2, seed=4), chat("e", "What is it?", stop=["e"]),
         *(asked(f"f{number}", prompt=f"{number}: {STORY}"[:60 + 9 * number], max_tokens=5 + number) for number in range(8))]
WRONG = [b"{", asked("a", prompt="a second a"), asked("long", prompt="x" * 300), chat("stream", stream=True),
         asked("field", max_new_tokens=4)]


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_a_file_of_requests_gets_the_answers_of_chapter_01(mha_folder, alone, tmp_path, monkeypatch, capsys, policy):
    requests, out, report = (tmp_path / name for name in ("requests.jsonl", "replies.jsonl", "report.json"))
    write(requests, *MIXED, *WRONG)
    said, complaint = run_here(monkeypatch, capsys, "--model", mha_folder, "--batch", requests, "--out", out, "--policy", policy,
                               "--max-running", 5, "--block-size", 8, "--json", report, "--trace", tmp_path / "trace.json")
    answers = {line["custom_id"]: line["response"] for line in replies(out) if line["response"]["status_code"] == 200}
    assert set(answers) == {line["custom_id"] for line in MIXED}
    for line in MIXED:
        assert texts(answers[line["custom_id"]]) == [right(alone, line)], line["custom_id"]
    wrong = {line["custom_id"]: line["response"] for line in replies(out) if line["response"]["status_code"] != 200}
    errors = {name: response["body"]["error"]["message"] for name, response in wrong.items()}
    assert set(errors) == {None, "a", "long", "stream", "field"} and {one["status_code"] for one in wrong.values()} == {400}
    assert "not JSON" in errors[None] and "that of line 1" in errors["a"] and "stream must be false" in errors["stream"]
    assert "300 tokens" in errors["long"] and "shorten the prompt" in errors["long"] and "'max_new_tokens'" in errors["field"]
    count = len(MIXED) + len(WRONG)
    assert said.startswith(f"{count} replies in '{out}', {len(WRONG)} of them errors, 0 of them there before; ")
    written = json.loads(report.read_text())
    row, = written["rows"]
    assert (written["chapter"], row["replies"], row["errors"]) == ("08_hybrid_blocks", count, len(WRONG))
    assert written["counters"]["policy"] == policy and written["counters"]["blocks_referenced"] == 0
    assert written["counters"]["transfer_errors"] == 0 and sizes(complaint)["block_size"] == 8
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_prompt_beyond_the_context_is_told_the_models_context(mha_folder, tmp_path, monkeypatch, capsys):
    """However short the others are."""
    out = tmp_path / "replies.jsonl"
    run_here(monkeypatch, capsys, "--model", mha_folder, "--batch", write(tmp_path / "requests.jsonl", asked("a"), WRONG[2]),
             "--out", out)
    assert "the context of this model is 256," in by_name(out)["long"]["body"]["error"]["message"]


@pytest.mark.parametrize("running", [1, 3, 100])
def test_memory_is_divided_for_the_lengths_in_the_file(mha_folder, tmp_path, monkeypatch, capsys, running):
    """Of the longest that may run at once; a block more for each, which must be free when another one comes in."""
    lengths = {"a": (5, 4), "b": (100, 50), "c": (17, 15), "d": (60, 1), "e": (200, 500)}
    lines = [asked(name, prompt=[7] * prompt, max_tokens=new, cache_salt=name) for name, (prompt, new) in lengths.items()]
    requests, out = write(tmp_path / "requests.jsonl", *lines, *WRONG), tmp_path / "replies.jsonl"
    known = sizes(run_here(monkeypatch, capsys, "--model", mha_folder, "--batch", requests, "--out", out, "--policy", "act-only",
                           "--max-running", running)[1])
    tokens = sorted((min(prompt + new, 256) for prompt, new in lengths.values()), reverse=True)[:running]
    assert known["act_device"] + known["act_host"] == sum(-(-length // 16) + 1 for length in tokens) and known["kv_host"] == 0
    used = {name: response["body"]["usage"] for name, response in by_name(out).items() if name in lengths and name != "a"}
    assert {name: usage["prompt_tokens"] for name, usage in used.items()} == {
        name: prompt for name, (prompt, _) in lengths.items() if name != "a"}


def test_a_request_for_which_there_is_no_memory_is_told_what_to_change(mha_folder, alone, tmp_path, monkeypatch, capsys):
    """It is the only one that needs more than there is."""
    lines = [asked("short", prompt="Hello", max_tokens=4), asked("long", prompt="x" * 150, max_tokens=50)]
    requests, out = write(tmp_path / "requests.jsonl", *lines), tmp_path / "replies.jsonl"
    try:
        run_here(monkeypatch, capsys, "--model", mha_folder, "--batch", requests, "--out", out, "--policy", "kv-only",
                 "--host-memory", 0.00052)
    except SystemExit as end:
        message = end.code
    else:
        answers = by_name(out)
        assert texts(answers["short"]) == [right(alone, lines[0])]
        message = answers["long"]["body"]["error"]["message"]
    assert "13 blocks" in message and "--host-memory" in message and "--gpu-blocks" not in message


@needs_signals
def test_killed_in_the_middle_it_goes_on_from_there(mha_folder, alone, tmp_path, monkeypatch, capsys):
    """The first time, over a link on which a step takes about 50 ms."""
    lines = [asked(str(number), prompt=f"{number}: {STORY}"[:40 + 5 * number], max_tokens=3 + 2 * number) for number in range(12)]
    requests, out = write(tmp_path / "requests.jsonl", *lines, b"{"), tmp_path / "replies.jsonl"
    arguments = ["--model", str(mha_folder), "--device", "cpu", "--max-running", "3", "--batch", str(requests), "--out", str(out)]
    with Process(*arguments, "--link", "0.01", script=SCRIPT) as process:
        eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3)
        process.process.kill()
        process.process.communicate()
        assert process.process.returncode == -signal.SIGKILL
    raw = out.read_bytes()
    there = raw.count(b"\n")
    assert 3 <= there < 12, "it was over before"
    raw = raw[:raw.rindex(b"\n") + 1]
    out.write_bytes(raw + b'{"id": "batch_req_')                        # as if it had been within a line
    said, _ = run_here(monkeypatch, capsys, *arguments)
    assert said.startswith(f"13 replies in '{out}', 1 of them errors, {there} of them there before; ")
    assert out.read_bytes().startswith(raw)
    answers = by_name(out)
    assert len(replies(out)) == 13 and answers.pop(None)["status_code"] == 400
    assert {name: texts(response) for name, response in answers.items()} == {
        line["custom_id"]: [right(alone, line)] for line in lines}


# 6. Ctrl-C -------------------------------------------------------------------------------------------------------

@needs_signals
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_many_are_answered(mha_folder, alone, signum):
    """Over a link on which a step takes about 50 ms: who runs may not be answered any more, and who waits is told."""
    with Process("--model", str(mha_folder), "--device", "cpu", "--link", "0.01", "--port", "0", "--max-running", "2",
                 script=SCRIPT) as process:
        process.read_until(b"(Ctrl-C ends it)\n")
        assert b"08_hybrid_blocks serves " in process.output and process.output.startswith(b"Weights: 3 layers, 0.5 MB, ")
        port = int(process.output.split(b"http://127.0.0.1:")[1].split()[0])
        reply = ask_server(port, dict(prompt="Hello", max_tokens=3)).json
        assert reply["tokens"] == alone.generate(prompt="Hello", max_tokens=3).tokens
        statuses = []

        def one(number):
            try:
                statuses.append(ask_server(port, dict(prompt=f"{number}: {STORY}", max_tokens=80)).status_code)
            except OSError:                                             # cut off with the process
                statuses.append(0)
        threads = [threading.Thread(target=one, args=[number]) for number in range(6)]
        for thread in threads:
            thread.start()
        while counters(port)["requests"] < 7:
            time.sleep(0.01)
        process.interrupt(signum)
        for thread in threads:
            thread.join(60)
    assert statuses.count(503) >= 3, "who waited was not told"


@needs_signals
def test_ctrl_c_in_the_demo(long_model):
    with Process("--model", str(long_model), "--device", "cpu", "--link", "0.5", "--demo", script=SCRIPT) as process:
        process.read_until(b"The host is reached over a ")
        process.interrupt()
        assert b"verified" not in process.output


# 7. HTTP ---------------------------------------------------------------------------------------------------------

def make(on_host, policy="hybrid", end_tokens=None, **options):
    """Chapter 08's engine on the model in host memory."""
    model, tokenizer, known = on_host
    return hybrid.Engine(model, tokenizer, known if end_tokens is None else end_tokens, **{
        "policy": policy, "block_size": 4, "max_running": 8, "bytes_per_second": 5e8, **options})


@pytest.fixture(autouse=True)
def known_costs(request, monkeypatch):
    """Of the engines behind HTTP: there are blocks of all kinds, whatever this machine is doing."""
    if "on_host" in request.fixturenames:
        monkeypatch.setattr(hybrid.Engine, "measure", lambda *_, **__: COSTS)


def tokens_of(alone, body: dict) -> list[int]:
    return alone.generate(**{name: value for name, value in body.items() if name not in ("n", "stream", "cache_salt")}).tokens


@pytest.mark.parametrize("policy", hybrid.POLICIES)
@pytest.mark.parametrize("stream", [False, True])
def test_generate_answers_as_chapter_01_and_health_counts_what_travelled(on_host, alone, policy, stream):
    body, least = dict(prompt=STORY, max_tokens=6, stream=stream), make(on_host, policy, max_running=1)
    engine = make(on_host, policy, frozenset(), max_running=1, device_memory=least.device_bytes + 5 * least.act_bytes)
    with serving(engine) as port:
        before = counters(port)
        reply = ask_server(port, body)
        if stream:
            *pieces, last = events(reply)
            result = last["result"]
            assert "".join(piece["text"] for piece in pieces) == result["text"]
        else:
            result = reply.json
        eventually(lambda: counters(port)["running"] == 0)
        counts = counters(port)
    prompt = len(alone.encode(STORY, None)[0])
    assert result["tokens"] == make_alone(alone).generate(prompt=STORY, max_tokens=6).tokens
    assert result["source"] == "miss" and {span["lane"] for span in result["timeline"]} == {"compute"}
    assert before.keys() == counts.keys() and {
        "policy", "act_device", "act_host", "kv_host", "device_bytes", "host_bytes", "weights_bytes", "act_bytes", "kv_bytes",
        "stored_bytes", "transfer_errors", "blocks", "blocks_free", "blocks_cached", "blocks_referenced", "steps", "requests",
        "finished", "running", "waiting", "preemptions", "cached_tokens"} <= counts.keys()
    assert counts["policy"] == policy and counts["transfer_errors"] == counts["failed"] == 0 < counts["device_bytes"]
    assert counts["act_device"] + counts["act_host"] + counts["kv_host"] == counts["blocks"] == engine.pool.size
    assert not any(before[name] for name in ("weights_bytes", "act_bytes", "kv_bytes", "stored_bytes"))
    layer = 64 * (4 * 64 + 3 * 128) * 4 + 2 * 64 * 4
    assert counts["steps"] == 6 and counts["weights_bytes"] == 6 * 3 * layer, "in each step all layers, once"
    assert counts["host_bytes"] == 3 * layer + 4 * 64 * 3 * 4 * (counts["act_host"] + 2 * counts["kv_host"])
    used = [engine.pool.kind(block) for block in engine.pool.cached]
    assert (counts["act_bytes"] > 0, counts["kv_bytes"] > 0) == (1 in used, 2 in used)
    assert set(used) >= {"hybrid": {0, 1, 2}, "kv-only": {2}, "act-only": {0, 1}, "static": {0, 1}}[policy]
    if policy == "kv-only":
        assert counts["stored_bytes"] == (prompt + 5) * alone.model.config.kv_numbers_per_token * 4, "each token once"


def make_alone(alone):
    """Chapter 01's engine without end tokens."""
    return baseline.Engine(alone.model, alone.tokenizer, frozenset())


def test_who_asks_again_finds_its_prompt_in_host_memory(on_host, alone):
    engine = make(on_host, "kv-only")
    with serving(engine) as port:
        body = dict(prompt=STORY, max_tokens=4)
        first, again, salted = (ask_server(port, dict(body, cache_salt=salt)).json for salt in ("", "", "b"))
    assert first["tokens"] == again["tokens"] == salted["tokens"] == tokens_of(alone, body)
    assert [reply["source"] for reply in (first, again, salted)] == ["miss", "cpu_hit", "miss"]
    assert again["usage"]["cached_tokens"] == (again["usage"]["prompt_tokens"] - 1) // 4 * 4
    assert first["usage"]["cached_tokens"] == salted["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_two_answers_to_one_prompt(on_host, alone, policy, stream):
    engine, body = make(on_host, policy), dict(prompt=STORY, max_tokens=9, temperature=2.0, seed=5)
    with serving(engine) as port:
        reply = ask_server(port, dict(body, n=2, stream=stream))
        if stream:
            results = {event["index"]: event["result"] for event in events(reply) if "result" in event}
            results = [results[number] for number in range(2)]
        else:
            results = reply.json["results"]
        openai = ask_server(port, dict(body, n=2), "/v1/completions").json
    expected = [tokens_of(alone, dict(body, seed=seed)) for seed in (5, 6)]
    assert [result["tokens"] for result in results] == expected and expected[0] != expected[1]
    assert [choice["index"] for choice in openai["choices"]] == [0, 1] and openai["usage"]["completion_tokens"] > 9


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_answer_in_openais_format(on_host, alone, stream):
    expected = alone.generate(messages=CHAT["messages"], max_tokens=8)
    with serving(make(on_host)) as port:
        reply = ask_server(port, dict(CHAT, model="whatever", stream=stream), "/v1/chat/completions")
    if stream:
        *chunks, done = events(reply)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert done == "[DONE]" and (text, choices[-1]["finish_reason"]) == (expected.text, expected.finish_reason)
    else:
        choice, = reply.json["choices"]
        assert choice["message"] == dict(role="assistant", content=expected.text)
        assert choice["finish_reason"] == expected.finish_reason
        assert reply.json["usage"]["completion_tokens"] == len(expected.tokens)


@pytest.mark.parametrize("policy", hybrid.POLICIES)
def test_16_clients_at_once_in_little_memory_get_the_tokens_of_chapter_01(on_host, alone, policy):
    """Mini-batches of few requests, blocks that run out, some that stream, draw, or ask for two answers."""
    engine = make(on_host, policy, mini_batch=300, token_budget=100, host_memory=make(on_host).model.host_bytes + 200_000,
                  device_memory=make(on_host, mini_batch=300, token_budget=100).device_bytes + 8 * 3072, lengths=[80] * 8)
    bodies = [dict(prompt=f"{number % 12}: {STORY}"[:20 + 3 * number], max_tokens=4 + number % 7, stream=number % 3 == 0,
                   **(dict(temperature=1.5, seed=number) if number % 2 else {}), **(dict(n=2) if number % 5 == 1 else {}))
              for number in range(16)]

    def one(port, body):
        reply = ask_server(port, body)
        if body["stream"]:
            return [event["result"]["tokens"] for event in sorted(
                (event for event in events(reply) if "result" in event), key=lambda event: event.get("index", 0))]
        return [result["tokens"] for result in reply.json.get("results", [reply.json])]
    with serving(engine) as port:
        answers = in_threads(*(partial(one, port, body) for body in bodies))
        counts = counters(port)
    for body, tokens in zip(bodies, answers):
        seeds = [dict(seed=body["seed"] + number) if "seed" in body else {} for number in range(body.get("n", 1))]
        assert tokens == [tokens_of(alone, {**body, **seed}) for seed in seeds], body
    assert counts["failed"] == counts["transfer_errors"] == 0 and counts["finished"] == 16 + 3
    assert (counts["act_bytes"] > 0, counts["kv_bytes"] > 0) == (policy != "kv-only", policy != "act-only")


@pytest.mark.parametrize("policy", ["hybrid", "kv-only"])
@pytest.mark.parametrize("n,stream", [(1, False), (1, True), (2, True)])
def test_a_client_that_hangs_up_frees_its_blocks_and_disturbs_nobody(on_host, alone, policy, n, stream):
    """What it reads is on its way for the step in which it leaves."""
    engine, waits = make(on_host, policy, frozenset(), mini_batch=1), threading.Event()

    def look(number):
        if number == 0:
            eventually(lambda: engine.counters()["requests"] == n + 1)
        if number == 6:
            assert engine.ahead is not None and len(engine.running) == n + 1
            waits.set()
            eventually(lambda: len(engine.cancelled) == n)
    before_each_pass(engine, look)
    stays = dict(prompt=STORY[7:120], max_tokens=12)
    with serving(engine) as port:
        leaves = sent(port, dict(prompt=STORY, max_tokens=60, n=n, stream=stream))
        with closing(sent(port, stays)) as other:
            assert waits.wait(60) and engine.counters()["blocks_referenced"] > 40
            leaves.close()
            reply = Reply(other.getresponse())
        eventually(lambda: counters(port)["cancelled"] == n)
        counts = counters(port)
        assert reply.json["tokens"] == make_alone(alone).generate(**stays).tokens
        assert counts["finished"] == 1 and counts["completion_tokens"] == 12 and counts["transfer_errors"] == 0


def test_a_copy_that_fails_costs_a_step_and_three_in_a_row_the_request(on_host, alone, monkeypatch):
    engine, move, fails = make(on_host, "static"), links.move, []

    def broken(*sides):
        if fails and fails.pop():
            raise OSError("it broke")
        move(*sides)
    monkeypatch.setattr(links, "move", broken)
    with serving(engine) as port:
        fails += [False] * 40 + [True] + [False] * 20                   # popped from the end: in the second step or so
        assert ask_server(port, dict(prompt=STORY, max_tokens=8)).json["tokens"] == tokens_of(alone, dict(
            prompt=STORY, max_tokens=8))
        assert counters(port)["transfer_errors"] == 1 and not any(fails), "none failed"
        fails += [True] * 400
        assert "inside the server" in error_of(ask_server(port, dict(prompt=STORY[3:], max_tokens=8)), 500)["message"]
        fails.clear()
        assert ask_server(port, dict(prompt=STORY[5:], max_tokens=8)).json["tokens"] == tokens_of(alone, dict(
            prompt=STORY[5:], max_tokens=8))
        counts = counters(port)
    assert (counts["transfer_errors"], counts["failed"], counts["finished"]) == (1 + hybrid.RETRIES, 1, 2)


@pytest.mark.parametrize("body,status,words", [
    (b"", 400, "JSON"), (b"{", 400, "JSON"), (b"\xff", 400, "UTF-8"), (b"[]", 400, "object"), (b"{}", 400, "prompt or messages"),
    (dict(prompt="x" * 300), 400, "shorten the prompt"), (dict(prompt="x" * 300, stream=True), 400, "this model is 256"),
    (dict(prompt="Hello", n=9), 400, "at most 8 may run at once"), (dict(prompt="Hello", n=0), 400, "n must be"),
    (dict(prompt="Hello", policy="kv-only"), 400, "Unknown field 'policy'"), (b" " * (1 << 20) + b"{}", 413, "larger than"),
    (dict(prompt="Hello", cache_salt=5), 400, "cache_salt"),
], ids=lambda value: repr(value)[:40])
def test_what_is_asked_wrongly_is_refused_in_one_sentence(wrong_client, body, status, words):
    reply = wrong_client.post("/generate", **(dict(data=body) if isinstance(body, bytes) else dict(json=body)))
    assert words in error_of(reply, status)["message"]


@pytest.fixture(scope="module")
def wrong_client(on_host):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid.Engine, "measure", lambda *_, **__: COSTS)
        engine = make(on_host)
    yield client_of(engine)
    assert engine.counters()["requests"] == engine.counters()["steps"] == 0
    engine.close()


def test_the_page_and_the_models_are_served(wrong_client):
    page = wrong_client.get("/")
    assert page.status_code == 200 and page.mimetype == "text/html" and "<title>" in page.get_data(as_text=True)
    assert [model["id"] for model in wrong_client.get("/v1/models").json["data"]] == ["tiny"]
    assert "nothing here" in error_of(wrong_client.get("/storage"), 404)["message"]
