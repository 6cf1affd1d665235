"""`python -m benchmarks`: its parts are commands that the benchmarks take, what they find is kept whatever happens, and the
claims say what was found. No clock is looked at here."""
import argparse
import copy
import itertools
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import claims
from benchmarks.claims import MET, MISSED, UNKNOWN
from legacy.tests.conftest import ROOT

RUNS = ["", "--quick", "--model random:llama2-7b --dtype bfloat16 --device cuda --histories 4096,16384",
        "--quick --model classroom", "--quick --model random:tinyllama --dtype bfloat16 --rounds 1 --scale 0.1"]


def asked_for(line: str) -> argparse.Namespace:
    return benchmarks.parser_for().parse_args(shlex.split(line))


def parts_of(line: str) -> list[benchmarks.Part]:
    return benchmarks.parts_for(asked_for(line))[0]


@cache
def parser(module: str) -> argparse.ArgumentParser:
    """The one that `python -m MODULE` reads its arguments with."""
    class Read(Exception):
        """What stops the module before it measures."""

    def parse_args(self, *arguments):
        raise Read(self)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Read) as read:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.delitem(sys.modules, module, raising=False)       # some import each other; runpy makes one of its own
        runpy.run_module(module, run_name="__main__")
    return read.value.args[0]


def takes(module: str, arguments: list[str]) -> argparse.Namespace:
    try:
        return parser(module).parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{module} does not take {shlex.join(arguments)}")


# The parts -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("line", RUNS)
def test_benchmarks_take_the_parts(line):
    parts = parts_of(line)
    assert len(parts) >= 9 and len({part.name for part in parts}) == len(parts)
    for part in parts:
        dash, module, *arguments = part.arguments
        asked = takes(module, [*arguments, "--json", "found.json"])
        assert dash == "-m" and asked.json == Path("found.json")
        if "--only" in arguments:
            assert part.name.startswith(f"{module.removeprefix('benchmarks.')}-{asked.only}")
        assert shlex.split(part.command) == ["python", *part.arguments]


def test_claims_are_measured():
    """Each part that a claim is read from is one of the full run, under the same name."""
    names = {part.name for part in parts_of("")}
    for claim in claims.CLAIMS:
        for model in claim.models:
            assert (f"{claim.kind}-{model}" if model else claim.kind) in names, claim.text
    kinds = {claim.kind for claim in claims.CLAIMS}
    unread = [name for name in names if not any(name.startswith(kind) for kind in kinds)]
    assert unread == ["limits"], "what is measured is also claimed"


def test_options_of_a_run_reach_its_parts():
    line = "--quick --model random:llama2-7b --dtype bfloat16 --device cuda --histories 4096,16384 --rounds 7 --scale 0.1"
    parts = {part.name: part.arguments for part in parts_of(line)}
    ways = takes("benchmarks.restoration", parts["restoration-llama2-7b"][2:])
    assert (ways.model, ways.dtype, ways.device, ways.histories, ways.rounds) == (
        "random:llama2-7b", "bfloat16", "cuda", (4096, 16384), 7)
    assert takes("benchmarks.baseline", parts["baseline-llama2-7b-bfloat16"][2:]).dtype == "bfloat16"
    assert takes("benchmarks.matrix", parts["matrix-conversations-llama2-7b"][2:]).scale == 0.1
    assert takes("benchmarks.tiered", parts["tiered-match"][2:]).model is None
    assert not any("random:small" in arguments or "classroom" in arguments for arguments in parts.values())


def test_what_is_left_out_is_said():
    parts, left_out = benchmarks.parts_for(asked_for("--quick"))
    assert "baseline-tinyllama-bfloat16 is left out of the quick run." in left_out
    assert len(parts) + len(left_out) == len(benchmarks.PARTS)
    parts, left_out = benchmarks.parts_for(asked_for("--model classroom"))
    assert [sentence.split()[0] for sentence in left_out] == ["hybrid_blocks"]
    assert not any(part.name.startswith("hybrid") for part in parts)
    assert benchmarks.parts_for(asked_for("--model random:tiny"))[1] == []


def main(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        return benchmarks.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_list_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(benchmarks, "run", None)
    assert main(monkeypatch, "--list", "--quick") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in parts_of("--quick")]
    assert main(monkeypatch, "--list", "--quick", "--only", "restoration-small") == 0       # which --quick leaves out
    assert capsys.readouterr().out.split()[:3] == ["restoration-small", "python", "-m"]


@pytest.mark.parametrize("arguments, said", [
    (["--only", "tiered-mixes-classroom"], "tiered-mix-classroom"), (["--device", "tpu"], "tpu"), (["--dtype", "int3"], "int3"),
    (["--rounds", "0"], "0"), (["--scale", "-1"], "-1")])
def test_wrong_options(monkeypatch, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(monkeypatch, *arguments)
    assert ended.value.code not in (0, None)
    assert said in f"{ended.value.code} {capsys.readouterr().err}"


# Running ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code, error", [
    ("raise ValueError('the link broke')", "ValueError: the link broke"),
    ("import sys; sys.stderr.write('a bar: 10%\\r\\x1b[Aa bar: 20%\\n'); sys.exit('--link is 0.')", "--link is 0."),
    ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"), ("pass", "it has written no results"),
    ("import sys; sys.exit(3)", "it said nothing")])
def test_a_part_that_fails(code, error):
    found = benchmarks.run(benchmarks.Part("broken", ["-c", code]))
    assert found["error"] == error and found["found"] is None and found["seconds"] >= 0


def test_bars_of_a_part_are_shown_under_the_one_of_all(capfd):
    code = ("import sys; from tqdm import tqdm; bar = tqdm(range(2), desc='rounds'); [0 for _ in bar]; "
            "assert not bar.leave; open(sys.argv[-1], 'w').write('{\"rows\": []}')")
    found = benchmarks.run(benchmarks.Part("bars", ["-c", code]))
    assert found["error"] is None and found["found"] == {"rows": [], "command": found["command"]}
    assert "rounds" in capfd.readouterr().err


TINY = ["--quick", "--model", "random:tiny", "--histories", "128", "--rounds", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def two_parts(tmp_path_factory):
    """Results of two parts on a model that no file holds; one has failed."""
    path = tmp_path_factory.mktemp("results") / "tiny.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarks, "PARTS", [("tiered-mix", "classroom", "", ""), ("tiered-nothing", "classroom", "", "")])
        status = main(patch, *TINY, "--json", path)
    return path, status


def test_the_others_go_on_when_a_part_fails(two_parts):
    path, status = two_parts
    results = json.loads(path.read_text())
    assert status == 1 and list(results["parts"]) == ["tiered-mix-tiny", "tiered-nothing-tiny"]
    hit, nothing = results["parts"].values()
    assert hit["error"] is None and nothing["found"] is None and "'nothing'" in nothing["error"]
    found, = hit["found"]["found"]
    assert (found["claim"], found["model"]) == ("mix", "random:tiny") and found["rows"]
    assert hit["found"]["command"] == hit["command"]
    assert results["quick"] and results["device"] == "cpu" and results["models"] == ["tiny"]
    assert {"processor", "threads", "cpu_capability", "torch", "transformers", "python", "seconds"} <= set(results)
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name], "no temporary file stays"


def test_only_replaces_that_part(two_parts, monkeypatch, capsys):
    path, _ = two_parts
    before = json.loads(path.read_text())
    before["parts"]["tiered-mix-tiny"]["found"] = {"found": []}
    before["parts"]["other"] = {"command": "python -m other", "seconds": 1.0, "error": None, "found": {"kept": 1}}
    copied = path.with_name("again.json")
    copied.write_text(json.dumps(before))
    assert main(monkeypatch, *TINY, "--json", copied, "--only", "tiered-mix-tiny") == 0
    after = json.loads(copied.read_text())
    assert list(after["parts"]) == ["tiered-mix-tiny", "tiered-nothing-tiny", "other"]
    assert after["parts"]["tiered-mix-tiny"]["found"]["found"] and after["parts"]["other"] == before["parts"]["other"]
    assert after["command"] == before["command"] and after["seconds"] >= before["seconds"]
    out = capsys.readouterr().out
    assert "tiered-mix-tiny" in out and str(copied) in out and "claims." in out


@pytest.mark.parametrize("words, sentence", [
    (["--model", "random:nothing"], "No geometry"), (["--model", "nothing"], "No model 'nothing'"),
    (["--histories", "100"], "128"), (["--json", "results"], "name a file that ends in .json"),
    (["--device", "tpu"], "Unknown device"), (["--only", "nothing"], "There is no part nothing")])
def test_wrong_words_are_one_sentence_before_anything_runs(words, sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmarks, "run", lambda part: pytest.fail("a part began"))
    with pytest.raises(SystemExit) as error:
        main(monkeypatch, "--quick", *words)
    assert sentence in str(error.value) and not list(tmp_path.iterdir())


def test_results_that_are_none_are_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("[1, 2")
    with pytest.raises(SystemExit, match="does not hold the results"):
        main(monkeypatch, *TINY, "--json", path, "--only", "tiered-mix-tiny")
    assert path.read_text() == "[1, 2"


def test_a_whole_run_begins_anew(two_parts, monkeypatch, capsys):
    """Without --only and --model nothing of the results that are there stays, and every claim has its row."""
    path = two_parts[0].with_name("whole.json")
    path.write_text(two_parts[0].read_text())
    monkeypatch.setattr(benchmarks, "PARTS", [("tiered-layouts", "random:tiny", "--rounds 2", "--rounds 1")])
    assert main(monkeypatch, "--quick", "--json", path, "--device", "cpu") == 0
    results = json.loads(path.read_text())
    assert list(results["parts"]) == ["tiered-layouts-tiny"] and results["models"] == []
    assert f"{len(claims.rows(dict(parts={})))} claims." in capsys.readouterr().out


def processes_with(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_text(errors="replace") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(two_parts, tmp_path, number):
    path = tmp_path / "tiny.json"
    path.write_text(two_parts[0].read_text())
    run = subprocess.Popen([sys.executable, "-m", "benchmarks", *TINY, "--only", "tiered-match", "--json", str(path)], cwd=ROOT,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           env={**os.environ, "TMPDIR": str(tmp_path)},
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))    # a shell's background ignores it
    while not processes_with(f"{tmp_path}/benchmark-"):         # the part has begun
        assert run.poll() is None, "it ended before it was stopped"
        time.sleep(0.05)
    run.send_signal(number)
    out, _ = run.communicate()
    assert run.returncode == 130 and f"What was measured is in {path}." in out
    assert json.loads(path.read_text()) == json.loads(two_parts[0].read_text())
    assert processes_with(f"{tmp_path}/benchmark-") == [] and list(tmp_path.glob("benchmark-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_part_that_begins_while_the_signal_comes_is_stopped(monkeypatch, number):
    children, popen = [], subprocess.Popen

    def interrupted(*arguments, **options):
        children.append(popen(*arguments, **options))
        signal.raise_signal(number)                             # the part runs, and nobody has been told of it
        return children[0]
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            benchmarks.run(benchmarks.Part("sleep", ["-c", "import time; time.sleep(600)"]))
        assert children[0].poll() is not None
        assert {signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} == {signal.default_int_handler}
    finally:
        signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])


# Claims ----------------------------------------------------------------------------------------------------------

def spread(*samples: float) -> dict:
    ordered = sorted(samples)
    return dict(median=ordered[len(ordered) // 2], min=ordered[0], max=ordered[-1], samples=list(samples))


def part(command: str, found: dict) -> dict:
    return dict(command=command, seconds=1.0, error=None, found=found)


def system(name: str, kind: str, ttft: float, tbt: float, rate: float) -> dict:
    return dict(system=name, kind=kind, ttft_ms=dict(p50=ttft, p95=ttft, p99=ttft, samples=[ttft]), equal_tokens="9 of 9",
                tbt_ms=dict(p50=tbt, p95=tbt, p99=tbt, samples=[tbt]), tokens_per_second=spread(rate),
                limit=dict(ttft_share=0.5, tbt_share=0.25))


def systems() -> list[dict]:
    return [system("01 recompute", "ours", 50.0, 4.0, 90.0),
            system("06 both ends", "ours", 20.0, 4.5, 95.0),
            system("07 three tiers", "ours", 10.0, 5.0, 99.0), system("dynamic", "peer", 40.0, 6.0, 80.0),
            dict(system="08 hybrid blocks", kind="ours", not_run="no room"),
            dict(system="offloaded", kind="peer", not_run="needs a GPU")]


@pytest.fixture(scope="module")
def measured() -> dict:
    """What one run has measured; what is compared between systems is made up, so that a test can change it."""
    parts = json.loads((claims.RESULTS / "cpu.json").read_text())["parts"]
    rows = [dict(history_tokens=1024, method=name, ttft_ms=spread(ttft), over_bound=over and spread(over),
                 ttft_gain_over_recompute=spread(100.0 / ttft))
            for name, ttft, over in (("recompute (01)", 100.0, None), ("KV offload (03)", 20.0, 1.02),
                                     ("both ends (06)", 9.0, 1.05))]
    for model in ("classroom", "small"):
        parts[f"restoration-{model}"] = part("python -m benchmarks.restoration", dict(
            model=model, dtype="float32", rows=rows, equal_tokens=True))
    parts["matrix-conversations-classroom"] = part("python -m benchmarks.matrix --only conversations", dict(
        dtype="float32", systems=systems()))
    parts["matrix-documents-classroom"] = part("python -m benchmarks.matrix --only documents", dict(
        dtype="float32", skews=[dict(zipf=zipf, systems=systems()) for zipf in (0.0, 1.0, 2.0)]))
    return dict(parts=parts)


def row_of(results: dict, words: str) -> dict:
    row, = (row for row in claims.rows(results) if words in row["claim"])
    return row


def test_every_claim_is_read(measured):
    rows = claims.rows(measured)
    assert len(rows) == sum(not claim.real for claim in claims.CLAIMS)
    for row in rows:
        assert row["verdict"] in (MET, MISSED) and row["ours"] not in ("", "-"), row
        assert set(row) == {"claim", "chapter", "paper", "asked", "ours", "verdict", "limit", "command", "part"}
        assert all(isinstance(value, str) and value for value in row.values()), row


def test_numbers_are_those_of_the_results(measured):
    found = claims.entry(measured["parts"]["tiered-mix-small"]["found"])
    gain = next(row for row in found["rows"] if row["platform"] == "a100")["throughput"]
    row = row_of(measured, "from three tiers: throughput")
    few = f", {len(gain['samples'])} rounds" if len(gain["samples"]) < 5 else ""
    assert row["ours"] == f"{gain['median']:.2f}x ({gain['min']:.2f} to {gain['max']:.2f}{few})" and row["asked"] == "at least 3x"
    assert row["part"] == "tiered-mix-small" and row["limit"].endswith("%") and row["chapter"] == "07"


SELECT = ("gpu_share", "load_over_compute", "zipf", "history_tokens", "layers")         # what tells rows apart


def transformed(value, change, name: str = ""):
    if isinstance(value, dict):
        return {key: transformed(entry, change, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [transformed(entry, change, name) for entry in value]
    return value if name in SELECT or isinstance(value, str) or value is None else change(value, name)


def rising(by: float):
    """Every number changed by so much more than the one before, up to a point."""
    count = itertools.count(1)
    return lambda value, name: value * by ** min(next(count), 300) if type(value) is float else value


CHANGES = {
    "larger": lambda value, name: value * 100 if type(value) is float else value,
    "smaller": lambda value, name: value / 100 if type(value) is float else value,
    "false": lambda value, name: not value if type(value) is bool else value,
    "counted": lambda value, name: value + 1 if name in ("equal_tokens", "equal_from_layer") else value,
}


def test_other_numbers_make_other_verdicts(measured):
    """No claim is met, or missed, whatever is measured."""
    before = {row["claim"]: row["verdict"] for row in claims.rows(measured)}
    seen = {claim: {verdict} for claim, verdict in before.items()}
    made = [lambda found, change=change: transformed(found, change) for change in CHANGES.values()]
    made += [lambda found, by=by: transformed(found, rising(by)) for by in (2.0, 0.5)]
    for make in made:
        results = dict(parts={name: {**entry, "found": make(entry["found"])} for name, entry in measured["parts"].items()})
        for row in claims.rows(results):
            seen[row["claim"]].add(row["verdict"])
    for slower in ("ours", "07"):                               # than the other systems, of which each has its own numbers
        results = copy.deepcopy(measured)
        found = [results["parts"][f"matrix-{workload}-classroom"]["found"] for workload in ("conversations", "documents")]
        for each in [each for part in (found[0], *found[1]["skews"]) for each in part["systems"] if "ttft_ms" in each]:
            each["equal_tokens"] = "8 of 9"
            if slower in (each["kind"], each["system"][:2]):
                each["ttft_ms"]["p50"] *= 100
                each["tbt_ms"]["p50"] *= 100
                each["tokens_per_second"] = spread(1.0)
        for row in claims.rows(results):
            seen[row["claim"]].add(row["verdict"])
    assert [claim for claim, verdicts in seen.items() if verdicts != {MET, MISSED}] == []


def test_where_a_peer_is_faster_is_said():
    lost = dict(system="02 blocks", measure="TBT p50", ms=9.04, peer="static", peer_ms=8.06)
    parts = {"matrix-documents-tiny": part("", dict(skews=[dict(zipf=2.0, peer_faster=[lost]), dict(zipf=0.0, peer_faster=[])])),
             "matrix-conversations-tiny": part("", dict(peer_faster=[lost])), "tiered-match": part("", None)}
    assert claims.losses(dict(parts=parts)) == [
        "A peer is faster (matrix-documents-tiny, Zipf 2): TBT p50 of 02 blocks, 9.0 ms, against 8.1 ms of static.",
        "A peer is faster (matrix-conversations-tiny): TBT p50 of 02 blocks, 9.0 ms, against 8.1 ms of static."]


def test_few_rounds_are_said():
    assert claims.spread(spread(1.0, 2.0, 3.0), "x") == "2.00x (1.00 to 3.00, 3 rounds)"
    assert claims.spread(spread(1.0, 2.0, 3.0, 4.0, 5.0), "x") == "3.00x (1.00 to 5.00)"


def test_missing_parts_are_not_measured(measured):
    rows = claims.rows(dict(parts={}))
    assert {row["verdict"] for row in rows} == {UNKNOWN} and len(rows) == len(claims.rows(measured))
    results = copy.deepcopy(measured)
    results["parts"]["tiered-match"] = dict(command="python -m benchmarks.tiered", seconds=1.0, error="MemoryError", found=None)
    row = row_of(results, "finding 4,096 tokens")
    assert row["verdict"] == UNKNOWN and row["ours"] == "-"
    results["parts"]["tiered-layouts-small"].update(error="MemoryError", found=None)
    row = row_of(results, "page_first to storage")
    assert row["verdict"] == MET and "failed: tiered-layouts-small" in row["ours"] and row["part"] == "tiered-layouts-classroom"


def test_other_models_have_their_own_rows(measured):
    """Of a run with --model, only what it has measured."""
    found = copy.deepcopy(measured["parts"]["tiered-mix-small"])
    rows = claims.rows(dict(models=["llama2-7b"], parts={"tiered-mix-llama2-7b": found}))
    assert {row["part"] for row in rows} == {"tiered-mix-llama2-7b"} and UNKNOWN not in {row["verdict"] for row in rows}


def test_commands_of_the_rows(measured):
    for results in (measured, dict(parts={})):
        for row in claims.rows(results):
            python, dash, module, *arguments = shlex.split(row["command"])
            assert (python, dash) == ("python", "-m")
            if module == "benchmarks":
                asked = asked_for(shlex.join(arguments))
                assert [each.name for each in benchmarks.chosen(parts_of(""), asked)] and set(asked.only) == set(
                    row["part"].split(", "))
            else:
                takes(module, arguments)


def test_table_says_first_what_was_missed(measured):
    results = copy.deepcopy(measured)
    del results["parts"]["tiered-match"]
    rows = claims.rows(results)
    text = claims.table(rows)
    lines = text.splitlines()
    assert lines[0].startswith("Missed") and all(len(line) <= 150 for line in lines if "python -m" not in line)
    order = [next(number for number, line in enumerate(lines) if line.startswith(word)) for word in ("Missed", "Not m", "Met")]
    assert order == sorted(order)
    for index, row in enumerate(rows, 1):
        line = next(number for number, line in enumerate(lines) if line.startswith(f"{index} "))
        section = sum(line > start for start in order)
        assert row["verdict"] == (MISSED, UNKNOWN, MET)[section - 1]
        assert row["command"] in text
    counts = [sum(row["verdict"] == verdict for row in rows) for verdict in (MET, MISSED, UNKNOWN)]
    assert f"{counts[0]} met, {counts[1]} missed, {counts[2]} not measured, of {len(rows)} claims." in lines


def test_claims_alone(measured, tmp_path):
    """Nothing heavy is imported to read them, and their own command shows them."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(measured))
    code = ("import sys; sys.argv = ['claims', sys.argv[1]]; from benchmarks import claims; claims.main(); "
            "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)")
    out = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.strip() == claims.table(claims.rows(measured)).strip()
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "none.json")], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 1 and "python -m benchmarks" in out.stderr and "Traceback" not in out.stderr
