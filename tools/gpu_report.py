"""What the chapters do on a GPU, in one go, in under 25 minutes on an H100; it needs no Flask.

    python -m tools.gpu_report                   all parts; without a GPU it says what it would run
    python -m tools.gpu_report --emulated        what can run without a GPU: tests, and the copies of a return
Each part is a process of its own, with a limit, and the page ends with what failed: benchmarks/results/gpu-DEVICE.json, .md."""
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
from common.requests import Request
from shell import checkpoint, lesson, random_models

ROOT = Path(__file__).resolve().parent.parent
MODELS, HISTORIES, QUESTION = ("tinyllama", "tinyllama-mha"), (1024, 4096), 15  # hidden states want the second; tokens


def bench_of(name: str, tokens: int, folder: Path, kept: int = 4) -> tuple[dict, list[int]]:
    """-> engines of 02 to 07 on one model and one link, with room for `kept` histories; and a question behind a history."""
    random_models.GEOMETRIES[f"{name}, context 8192"] = *random_models.GEOMETRIES[name][:-1], 8192
    model, *_ = checkpoint.load(f"random:{name}, context 8192", "bfloat16", "cuda")
    bench = outside.Bench(model)
    engines = bench.engines(2 * tokens + 4096, kept * tokens, tempfile.mkdtemp(dir=folder))
    engines.pop("no cache")
    for engine in engines.values():
        engine.estimates.always = True
    return engines, bench.prompt(tokens + QUESTION)


def layer_first(engine, folder: Path):
    """Chapter 07's engine once more, with the other layout of host memory."""
    storage = outside.store.Storage(outside.backends.open_backend(f"file:{tempfile.mkdtemp(dir=folder)}", {}), "files")
    cache = outside.tiers.TieredCache(engine.cache.blocks, engine.cache.bandwidth, storage, layout="layer_first")
    made = outside.paged.Engine(outside.paged.Runner(engine.model, engine.runner.pool.size), cache)
    made.estimates.always = True
    return made


def returns(folder: Path):
    """TTFT of a question behind a history that the device has lost. Then TBT of eight that decode while a short prompt is
    answered, and how many times as long while that question is. And what the last asking, or a step, has launched."""
    for model, tokens in product(MODELS, HISTORIES):
        engines, prompt = bench_of(model, tokens, folder)
        engines["07, layer_first"] = layer_first(engines["07"], folder)
        same = dict(model=model, history=tokens, link=str(engines["03"].cache.load_link))
        ways = {name: partial(lesson.ask, engine, prompt, 1, "device") for name, engine in engines.items()}
        ways["02, on the device"] = partial(lesson.ask, engines["02"], prompt)
        for way, taken in lesson.in_turn(ways).items():
            yield dict(same, way=way, ttft_ms=measure.spread(measure.ttft(taken)), found=taken[-1].found, **launched(ways[way]))
        for system, engine in engines.items():
            for number in range(8):
                engine.submit(Request(prompt[number : number + 32], 400))
            ways = dict(alone=partial(tbt, engine, prompt[8:40], 16), back=partial(tbt, engine, prompt, 1))
            alone, back = lesson.in_turn(ways).values()
            yield dict(same, way=system, tbt_ms=measure.spread(alone), over_alone=measure.ratio(back, alone), **launched(engine.step))


def launched(work) -> dict:
    """-> how many kernels and copies, by torch.profiler."""
    with torch.profiler.profile() as profile:
        work()
        torch.cuda.synchronize()
    calls, kinds = profile.key_averages(), dict(kernels="LaunchKernel", copies="MemcpyAsync")
    return {kind: sum(call.count for call in calls if word in call.key) for kind, word in kinds.items()}


def tbt(engine, prompt: list[int], new: int) -> float:
    """Answer a prompt, of which the device has nothing, beside others -> ms a step."""
    engine.evict("device")
    began, before = time.perf_counter(), engine.counts["steps"]
    engine.generate([Request(prompt, new)])
    return 1e3 * (time.perf_counter() - began) / (engine.counts["steps"] - before)


def emulated(folder: Path):
    """Copies to the emulated device: pieces of layers, and numbers. History is in scattered blocks, and 08's in host memory only."""
    with importlib.import_module("tests.support.streams").emulate() as gpu:
        engines, prompt = bench_of("tiny", HISTORIES[0], folder, 12)
        hybrid = importlib.import_module("08_hybrid_blocks")
        model, *_ = hybrid.load("random:tiny, context 8192", "bfloat16", "cuda")
        plan = hybrid.Plan(len(model.layers), 128, 128, 0, 0)
        engines["08"] = outside.paged.Engine(hybrid.HybridRunner(model, plan, None))
        for system, engine in engines.items():
            for pool in engine.pools.values():
                pool.release(pool.allocate(pool.size)[::3])  # none is beside another
            lesson.ask(engine, prompt)
            gpu.copies.clear()
            found = lesson.ask(engine, prompt, 1, "" if system == "08" else "device").found
            sizes = [size for way, size in gpu.copies if way == "to the device"]
            pieces = [size for size in sizes if size >= 1 << 14]
            yield dict(system=system, found=found, pieces=len(pieces), bytes=sum(pieces), numbers=len(sizes) - len(pieces))


def copies(folder: Path):
    """GB/s of 64 MiB in both directions, from and to pinned and pageable memory."""
    device = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    for memory in "pinned", "pageable":
        host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=memory == "pinned")
        ways = dict(load=partial(gbps, device, host), save=partial(gbps, host, device))
        for way, taken in lesson.in_turn(ways).items():
            yield dict(memory=memory, way=way, gbps=measure.spread(taken))


def gbps(to, out_of) -> float:
    began = time.perf_counter()
    to.copy_(out_of)  # and wait for that
    return to.nbytes / 1e9 / (time.perf_counter() - began)


PARTS = {"copies": (copies, 60), "returns": (returns, 480), "emulated": (emulated, 240)}  # at most so many seconds each
JOBS = {"tests": ("-m pytest tests/test_cuda.py", 300 if torch.cuda.is_available() else 600)}  # name -> what Python runs, limit
JOBS |= {path.stem: (f"{path.name} --demo --device cuda --json {{file}}", 75) for path in sorted(ROOT.glob("0[1-8]_*.py"))}
JOBS |= {part: (f"-m tools.gpu_report --part {part} --json {{file}}", limit) for part, (_, limit) in PARTS.items()}


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
        spreads = {key: isinstance(value, dict) and "samples" in value for row in job["rows"] for key, value in row.items()}
        columns = {key: f"{{{key}:spread}}" if spread else f"{{{key}}}" for key, spread in spreads.items()}
        parts += [f"## {name}, {job['seconds']:.0f} s", tables.table("", columns, job["rows"]) or job["said"]]
    failed = [f"- {name} ({job['code']}): {job['said']}" for name, job in found.items() if job["code"]]
    return tables.paragraphs(*parts, "## What failed", "\n".join(failed) or "Nothing.") + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=[name for name in JOBS if name != "emulated"])
    parser.add_argument("--emulated", action="store_const", dest="only", const=["tests", "emulated"])
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # what one of the processes does
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.part:
        rows = []
        for row in PARTS[arguments.part][0](arguments.json.parent):
            rows.append(row)
            arguments.json.write_text(json.dumps(rows))
        return
    device = "emulated" if "emulated" in arguments.only else measure.device_name()
    if device == "cpu":
        would = [f"  python {words} ({limit})" for words, limit in map(JOBS.get, arguments.only)]
        return print("There is no GPU here; with one, this would run (at most so many seconds):", *would, sep="\n")
    path = arguments.json or measure.RESULTS / f"gpu-{device}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.only:
        found[name] = run(name)
        print(f"{name}: ended with {found[name]['code']}; {found[name]['said']}", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(device, found))


if __name__ == "__main__":
    main()
