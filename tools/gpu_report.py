"""What the chapters do on a GPU, in one go, in under 25 minutes on an H100; it needs no Flask.

    python -m tools.gpu_report                   all parts; without a GPU it says what it would run
    python -m tools.gpu_report --only returns    this part; what the others found last stays
    python -m tools.gpu_report --emulated        what can run without a GPU: tests, and the copies of a return
Each part is a process of its own, with a limit, and the page ends with what failed: benchmarks/results/gpu-DEVICE.json, .md.
"""
import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import measure, outside, tables
from common.link import Link
from common.requests import Request
from common.timeline import Clock
from shell import checkpoint, lesson, random_models

ROOT = Path(__file__).resolve().parent.parent
MODELS, HISTORIES, QUESTION = ("tinyllama", "tinyllama-mha"), (1024, 4096), 32  # hidden states want the second; tokens
NUMBERS = 1 << 14  # bytes: a smaller copy brings positions or places, and no piece of a layer


def bench_of(name: str, tokens: int, folder: Path, kept: int = 4):
    """-> engines of 02 to 07 on one model and one link, with room for `kept` histories; and question(): a history, and more."""
    random_models.GEOMETRIES[f"{name}, context 8192"] = *random_models.GEOMETRIES[name][:-1], 8192
    model, *_ = checkpoint.load(f"random:{name}, context 8192", "bfloat16", "cuda")
    bench = outside.Bench(model)
    engines, history = bench.engines(2 * tokens + 4096, kept * tokens, tempfile.mkdtemp(dir=folder)), bench.prompt(tokens)
    engines.pop("no cache")
    for engine in engines.values():
        engine.estimates.always = True
    return engines, lambda: history + bench.prompt(QUESTION)


def ask(engine, question, evict: str = "device") -> Request:
    return lesson.ask(engine, question(), 1, evict)


def returns(folder: Path):
    """TTFT of a question behind a history that the device has lost, and the kernels and copies of its last asking."""
    for model, tokens in product(MODELS, HISTORIES):
        engines, question = bench_of(model, tokens, folder)
        ways = {name: partial(ask, engine, question) for name, engine in engines.items()}  # the first time, it is read
        ways["02, on the device"] = partial(ask, engines["02"], question, "")
        for way, taken in lesson.in_turn(ways).items():
            yield dict(model=model, history=tokens, way=way, ttft_ms=measure.spread(measure.ttft(taken)), found=taken[-1].found,
                       link=str(engines["03"].cache.load_link), **launched(ways[way]))  # fmt: skip


def launched(work) -> dict:
    """-> how many kernels and copies, by torch.profiler."""
    with torch.profiler.profile() as profile:
        work()
        torch.cuda.synchronize()
    calls, kinds = profile.key_averages(), dict(kernels="LaunchKernel", copies="MemcpyAsync")
    return {kind: sum(call.count for call in calls if word in call.key) for kind, word in kinds.items()}


def copies(folder: Path):
    for pinned, lane in product((True, False), ("load", "save")):
        link, device = Link(lane, Clock("cuda")), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        host = torch.zeros(device.shape, dtype=torch.uint8, pin_memory=pinned)
        for _ in range(9):
            link.copy(*((device, host) if lane == "load" else (host, device)), "64 MB").wait()
        yield dict(memory="pinned" if pinned else "pageable", lane=lane, gbps=link.speed() / 1e9)


def beside(folder: Path):
    """TBT of eight that decode: alone, and over that from a question's coming to its first token; what a step launches."""
    engines, question = bench_of(MODELS[0], HISTORIES[-1], folder)
    for system, engine in engines.items():
        for _ in range(8):
            engine.submit(Request(question()[-QUESTION:], 400))
        alone, meanwhile = [], []
        for _ in range(9):
            alone.append(tbt(engine, Request(question()[-QUESTION:], 16)))
            engine.evict("device")
            meanwhile.append(tbt(engine, back := Request(question(), 1)))
        yield dict(system=system, tbt_ms=measure.spread(alone[1:]), over_alone=measure.ratio(meanwhile[1:], alone[1:]),
                   found=back.found, **launched(engine.step))  # fmt: skip


def tbt(engine, request: Request) -> float:
    """Answer a request beside others -> ms a step."""
    began, before = time.perf_counter(), engine.counts["steps"]
    engine.generate([request])
    return 1e3 * (time.perf_counter() - began) / (engine.counts["steps"] - before)


def emulated(folder: Path):
    """What a question behind a history in scattered blocks copies to the device, that of tests/support/streams.py. (08 never
    loses it: in each step it comes from host memory.)"""
    with importlib.import_module("tests.support.streams").emulate() as gpu:
        engines, question = bench_of("tiny", HISTORIES[0], folder, 12)
        hybrid = importlib.import_module("08_hybrid_blocks")
        model, *_ = hybrid.load("random:tiny, context 8192", "bfloat16", "cuda")
        layers = len(model.layers)
        plan = hybrid.Plan(layers, 128, 128, 0, 0)  # all weights on the device; of blocks only those on the host
        engines["08"] = outside.paged.Engine(hybrid.HybridRunner(model, plan, None))
        for system, engine in engines.items():
            for pool in engine.pools.values():
                pool.release(pool.allocate(pool.size)[::3])  # none is beside another
            ask(engine, question)
            before = len(gpu.copies)
            request = ask(engine, question, "" if system == "08" else "device")
            sizes = [size for way, size in gpu.copies[before:] if way == "to the device"]
            pieces = [size for size in sizes if size >= NUMBERS]
            yield dict(system=system, found=request.found, layers=layers, pieces=len(pieces), bytes=sum(pieces),
                       numbers=len(sizes) - len(pieces))  # fmt: skip


PARTS = {"returns": returns, "copies": copies, "beside": beside, "emulated": emulated}
JOBS = {"tests": ("-m pytest tests/test_cuda.py", 420)}  # name -> what Python runs, at most how many seconds
JOBS |= {path.stem: (f"{path.name} --demo --device cuda --json {{file}}", 75) for path in sorted(ROOT.glob("0[1-8]_*.py"))}
JOBS |= {part: (f"-m tools.gpu_report --part {part} --json {{file}}", 300 if part == "returns" else 90) for part in PARTS}


def run(name: str) -> dict:
    """Run a part -> the code that it ended with (124: too late), its last line, seconds, and the rows that it found."""
    (words, limit), began = JOBS[name], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = ["timeout", str(limit), sys.executable, *words.format(file=file).split()]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = json.loads(file.read_text()) if file.exists() else []
    rows = found if isinstance(found, list) else [{key: found[key] for key in ("dtype", "link", "verified")}, *found["rows"]]
    return dict(code=done.returncode, said=done.stdout.strip().rpartition("\n")[2], seconds=time.perf_counter() - began, rows=rows)


def page(device: str, found: dict) -> str:
    """The results as Markdown."""
    parts = [f"# {device}, PyTorch {torch.__version__}"]
    for name, job in found.items():
        keys = list(dict.fromkeys(key for row in job["rows"] for key in row))
        lines = [[shown(row.get(key, "")) for key in keys] for row in job["rows"]]
        parts += [f"## {name}, {job['seconds']:.0f} s", tables.markdown(keys, lines) if lines else job["said"]]
    failed = [f"- {name} ({job['code']}): {job['said']}" for name, job in found.items() if job["code"]]
    return tables.paragraphs(*parts, "## What failed", "\n".join(failed) or "Nothing.") + "\n"


def shown(figure) -> str:
    return tables.with_spread(figure) if isinstance(figure, dict) and "samples" in figure else str(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=[name for name in JOBS if name != "emulated"])
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what one of the processes does
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    if arguments.part:
        for row in PARTS[arguments.part](arguments.json.parent):
            rows.append(row)
            arguments.json.write_text(json.dumps(rows))
        return
    names = ["tests", "emulated"] if arguments.emulated else arguments.only
    device = "emulated" if arguments.emulated else measure.device_name()
    if device == "cpu":
        would = "\n".join(f"  python {words} ({limit})" for words, limit in map(JOBS.get, names))
        return print(f"There is no GPU here; with one, this would run (at most so many seconds):\n{would}")
    path = arguments.json or measure.RESULTS / f"gpu-{device}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        found[name] = run(name)
        print(f"{name}: ended with {found[name]['code']}; {found[name]['said']}", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(device, found))


if __name__ == "__main__":
    main()
