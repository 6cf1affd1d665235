"""Measure the chapters on a GPU, beside the papers' numbers and the bounds by arithmetic. It needs no Flask.

    python -m tools.gpu_report                         under 14 minutes on an H100, then tests and demos in 10
    python -m tools.gpu_report --only papers --eager   with CUDA graphs (pieces) and without, in turn
    python -m tools.gpu_report --emulated              without a GPU, on a tiny model, without demos: times mean nothing
Each part is a process of its own with a time limit; the most important part runs first. Each row is written as soon as it is
measured, to benchmarks/results/gpu-DEVICE.json and .md. The page begins with the claims and ends with the failures."""
import argparse
import gc
import importlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import timeit
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.nn.attention.bias  # before a device is emulated

from benchmarks import both_ends, claims, hybrid_blocks, measure, tables
from benchmarks.planned import engine_of, hidden_states, offload, paged, planned
from benchmarks.tiered import tiers
from common.cache import Cache
from common.cuda_link import Link
from common.requests import Request
from shell import checkpoint, lesson
from tools import on_paper, report

ROOT, cake, hybrid = Path(__file__).resolve().parent.parent, both_ends.both_ends, hybrid_blocks.hybrid
QUESTION, OTHERS, SPARE = 15, 8, 256  # tokens of a question; requests that decode beside it, and blocks for them
STORAGE, PCIE = 1e10, (25, 12)  # bytes/s of the storage of 06; GB/s of PCIe 4 and 3
BATCH, NEW, DEVICE = 32, 12, 6e9  # in 08: requests, tokens of an answer, bytes of device memory that it may use


def caches(model, blocks: int) -> dict:
    """Return way -> function that makes its Cache, with room for `blocks` blocks of K and V; 07 once for each
    I/O back end."""
    size = 16 * blocks * model.config.kv_numbers_per_token * model.dtype.itemsize
    return {"03": partial(offload.HostCache, blocks), "04": partial(hidden_states.HiddenCache, blocks),
            "05": partial(planned.PlannedCache, 3 * blocks), "02": Cache,
            **{f"07, {way}": partial(tiers.TieredCache, blocks, io_backend=way) for way in ("direct", "kernel")},
            "06": lambda: cake.BidirectionalCache(cake.StoredChunks(cake.ModelledStorage(size, STORAGE)))}  # fmt: skip


def after_history(model, histories: list[int], arguments, only=()):
    """Yield (fields that the rows share, rows) for each history and way. Two engines may not fit, so each
    closes first."""
    for tokens in histories:
        made = caches(model, tokens // 16 + SPARE)
        for way in only or made:
            yield dict(history=tokens, way=way), cell(model, made[way], way, tokens, arguments)


def cell(model, make_cache, way: str, tokens: int, arguments):
    """Yield rows: TTFT of a question behind a history that the device has evicted (`hit`: that it holds),
    then TBT of eight decoding requests beside a short prompt, and its ratio while the question is answered
    beside them. Each row counts the kernels, graphs and copies that the last question, or a step, has
    launched."""
    engine = engine_of(model, tokens // 16 + SPARE, make_cache(), always=True)
    prompt = measure.draw(random.Random(tokens), model, tokens + QUESTION)

    def ask(evict="", eager=False):
        with mock.patch.object(engine.runner, "pieces", None) if eager else nullcontext():
            return lesson.ask(engine, prompt, 1, evict)
    ways = {"hit": ask} if way == "03" else {}
    ways[way] = partial(ask, "device")
    if arguments.eager and getattr(engine.runner, "pieces", None):
        ways |= {f"{name}, eager": partial(work, eager=True) for name, work in ways.items()}
    ask()  # compute the history and save it
    for name, taken in lesson.in_turn(ways, arguments.rounds).items():
        yield dict(way=name, link=str(getattr(engine.lower_tier.cache, "load_link", "")), ttft_ms=measure.spread(measure.ttft(taken)),
                   allowed_ms=1e3 * allowed(engine, name, tokens), found=taken[-1].found, **launched(ways[name]))  # fmt: skip
    for number in range(OTHERS):
        engine.submit(Request(prompt[number : number + 32], 400))
    ways = dict(alone=partial(tbt, engine, prompt[8:40], 3 * arguments.rounds), back=partial(tbt, engine, prompt, 1))
    alone, back = lesson.in_turn(ways, arguments.rounds).values()
    yield dict(tbt_ms=measure.spread(alone), over_alone=measure.ratio(back, alone), **launched(engine.step))
    engine.close()


def launched(work) -> dict:
    """Call `work`. Returns: how many kernels, graphs and copies it has launched, by torch.profiler."""
    with torch.profiler.profile() as profile:
        work()
        torch.cuda.synchronize()
    calls, kinds = profile.key_averages(), dict(kernels="LaunchKernel", graphs="GraphLaunch", copies="MemcpyAsync")
    return {kind: sum(call.count for call in calls if word in call.key) for kind, word in kinds.items()}


def tbt(engine, prompt: list[int], new: int) -> float:
    """Answer a prompt, of which the device holds nothing, beside other requests. Returns: ms for each
    step."""
    engine.evict("device")
    began, before = time.perf_counter(), engine.counts["steps"]
    engine.generate([Request(prompt, new)])
    return 1e3 * (time.perf_counter() - began) / (engine.counts["steps"] - before)


def allowed(engine, way: str, tokens: int) -> float:
    """Return the least TTFT in seconds by arithmetic, from this engine's measured speeds: link, prefill and
    projection."""
    estimates, config, layers = engine.lower_tier.estimates, engine.model.config, len(engine.model.layers)
    numbers, link = (config.hidden_size, config.kv_numbers_per_token // layers), getattr(engine.lower_tier.cache, "load_link", None)
    speed = link.speed() if link and way[:3] != "hit" else math.inf
    states, kv = (tokens * count * engine.model.dtype.itemsize for count in numbers)  # bytes of a layer
    question, compute = (estimates.seconds_to_compute(*span) for span in ((tokens, tokens + QUESTION), (0, tokens)))
    if way[:2] == "06":
        return cake.time_to_meet(layers * kv / STORAGE, compute)[0] + question
    project = tokens * estimates.machine.projecting / estimates.computing.value
    costs = planned.LayerCosts(compute / layers, project, states / speed, kv / speed, question / layers)
    plans = {"02": "R" * layers, "04": "R" + "H" * (layers - 1), "05": planned.best_plan(layers, costs)}
    return planned.plan_seconds(plans.get(way[:2], "K" * layers), costs)


def slowed(times: int):
    """Context manager: links send each byte `times` times on their stream, so that a real link is as slow as
    an older one."""
    def again(link, *given, copy=Link.copy):
        return [copy(link, *given) for _ in range(times)][-1]
    return mock.patch.object(Link, "copy", again)


def slower(model, histories: list[int], arguments):
    """Yield as `after_history` does, for 03 to 05 over links about as fast as PCIe 4 and 3. Rows have the
    measured speed."""
    gbps = measure.link_of(model.device)["link_gbps"]
    for times in sorted({max(2, round(gbps / wanted)) for wanted in PCIE}):
        with slowed(times):
            for same, rows in after_history(model, histories, arguments, ("03", "04", "05")):
                yield dict(same, model=f"{model.name}, each byte {times} times"), rows


def both(model, histories: list[int], arguments):
    """Yield as `after_history` does, for 06 with loading r times as slow as computing, as far as this host
    reads so fast."""
    for row in both_ends.grid(model, SimpleNamespace(histories=histories, r=[1.0, 0.25, 4.0], share=[], rounds=arguments.rounds)):
        for way, ms in row["ttft_ms"].items():
            least, chunks = row["bound_ms"] if way == "both" else tables.median(ms), (row["computed_chunks"], row["loaded_chunks"])
            yield dict(history=row["history_tokens"], way=f"06, r = {row['r']:g}, {way}"), [dict(
                ttft_ms=ms, allowed_ms=least, chunks_of_both=chunks)]  # fmt: skip


def mixed(model, histories: list[int], arguments):
    """Yield as `after_history` does, for 08 with 6 GB of device memory (or half of a smaller model), prefill
    counted."""
    for context in histories:
        device = min(DEVICE, (2 + len(model.layers) // 2) * hybrid.sizes_of(model, 16).weights + 1)
        planner, bandwidth = hybrid.make_planner(model, SimpleNamespace(
            policy="hybrid", device_memory=device / 1e9, blocks=BATCH * -(-(context + NEW) // 16), block_size=16, max_running=BATCH,
            mini_batch=8192, link=None))  # fmt: skip
        for policy in hybrid.POLICIES[:3]:
            yield dict(history=context, way=f"08, {policy}"), batch(model, context, planner._replace(policy=policy), bandwidth)


def batch(model, context: int, planner, bandwidth):
    """Yield one row: a batch under one policy. `allowed_ms` is the bound of a decode step."""
    runner = hybrid.make_runner(planner, model, bandwidth)
    prompts = [measure.draw(random.Random(number), model, context) for number in range(BATCH)]
    found = hybrid_blocks.answer(paged.Engine(runner, None, BATCH * context, BATCH), prompts, NEW)
    ms, prefill = 1e3 * found["seconds"], found["prefill"]
    yield dict(tokens_per_second=1e3 * BATCH * NEW / ms, answers_ms=ms, prefill=prefill, step_ms=ms * (1 - prefill) / (NEW - 1),
               allowed_ms=1e3 * max(planner.lane_seconds(runner.plan)), plan=tuple(runner.plan))  # fmt: skip


def copies(model, histories: list[int], arguments):
    """Yield rows: GB/s of copies of 64 MiB in both directions, with pinned and with pageable host memory."""
    device = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    for memory in "pinned", "pageable":
        host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=memory == "pinned")
        for way, to, out_of in ("load", device, host), ("save", host, device):
            _, *seconds = timeit.repeat(partial(to.copy_, out_of), number=1, repeat=1 + arguments.rounds)  # each call blocks until the copy ends
            yield dict(memory=memory, way=way), [dict(gbps=measure.spread([to.nbytes / 1e9 / each for each in seconds]))]


PARTS = {  # function, seconds at most, geometry, tokens of its histories
    "papers": (after_history, 320, "llama2-7b", [4096, 8192, 1024, 16384]), "slower": (slower, 70, "llama2-7b", [4096]),
    "cake": (both, 50, "llama2-7b", [4096]), "returns": (after_history, 95, "tinyllama", [1024, 4096]),
    "larger": (after_history, 120, "llama2-13b", [4096]), "hybrid": (mixed, 150, "llama2-13b", [1024]), "copies": (copies, 30, "tiny", [1]),
}  # fmt: skip
JOBS = {part: (f"-m tools.gpu_report --part {part} --json {{path}}", limit) for part, (_, limit, *_) in PARTS.items()}
JOBS["tests"] = "-m pytest tests/test_cuda.py", 120 if torch.cuda.is_available() else 600  # arguments of Python, limit in seconds
JOBS |= {path.stem: (f"{path.name} --demo --device cuda --json {{file}}", 60) for path in sorted(ROOT.glob("0[1-8]_*.py"))}


def measured(arguments):
    """Measure a part in this process, and write each row. A way that fails leaves a row with its error, and
    the others run."""
    function, _, name, histories = PARTS[arguments.part]
    streams = importlib.import_module("tests.support.streams") if arguments.emulated else None
    name, histories, rows = *(("tiny", [192]) if streams else (arguments.model or name, arguments.histories or histories)), []
    torch.set_num_threads(1 if streams else torch.get_num_threads())
    with streams.emulate("early") if streams else nullcontext():
        load = hybrid.load if function is mixed else checkpoint.load
        model, *_ = load(f"random:{name}:{max(histories) + 1024}", "bfloat16", "cuda")
        model.name = name
        gc.freeze()  # a collection then looks at engines alone
        for same, cell in function(model, histories, arguments):
            try:
                for row in cell:
                    rows.append(dict(model=name) | same | row)
                    keep(arguments.json, arguments.part, rows=rows)
            except Exception as error:
                rows.append(dict(model=name) | same | dict(failed=f"{type(error).__name__}: {error}"[:300]))
            gc.collect()
            torch.cuda.empty_cache()
            with suppress(AttributeError, RuntimeError):  # an older PyTorch, or an emulated device
                torch.accelerator.empty_host_cache()  # PyTorch keeps pinned memory, a power of two for each tensor
        keep(arguments.json, arguments.part, rows=rows)


def run(name: str, path: Path) -> dict:
    """Run a part as a process. Write its exit code (124: too late), its last line, its seconds, and the rows
    of a demo."""
    (words, limit), began = JOBS[name], time.perf_counter()
    keep(path, name, code="cut short", rows=[])
    with tempfile.TemporaryDirectory() as folder:
        file, options = Path(folder) / "found.json", sys.argv[1:] if name in PARTS else []
        how, what, *words = words.format(file=file, path=path.resolve()).split()
        command = ["timeout", str(600 if "--emulated" in options else limit), sys.executable, how, what, *options, *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        demo = json.loads(file.read_text()) if file.exists() else None
    more = dict(rows=[{key: demo[key] for key in ("dtype", "link", "verified")}, *demo["rows"]]) if demo else {}
    said = done.stdout.strip().rpartition("\n")[2]
    return keep(path, name, code=done.returncode, said=said, seconds=time.perf_counter() - began, **more)


def keep(path: Path, name: str, **job) -> dict:
    """Update the file of results with the fields of a part, and write the page anew. Returns: all results."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[name] = dict(code="cut short", said="", seconds=0.0, rows=[]) | found.get(name, {}) | job
    (new := path.with_suffix(".new")).write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)  # the file is whole even if this process is killed
    path.with_suffix(".md").write_text(page(path.stem, found))
    return found


def page(device: str, found: dict) -> str:
    """The results as Markdown; the rows of demos are in the JSON alone."""
    failed = [f"- {name} ({job['code']}): {job['said']}" for name, job in found.items() if job["code"]]
    failed += [f"- {name}, {row['model']}, {row['way']} behind {row.get('history', 0)}: {row['failed']}"
               for name, job in found.items() for row in job["rows"] if "failed" in row]  # fmt: skip
    said = [f"{name}, {job['seconds']:.0f} s: {job['said']}" for name, job in found.items()]
    results = {f"gpu-{device.removeprefix('gpu-')}": found}
    asked = [[*row[1:4], row[6]] for row in claims.table(results, paper=on_paper) if row[6] != claims.ABSENT]
    shown = tables.markdown([*claims.HEADER[1:4], "here"], asked), report.gpu(results), "\n\n".join(said)
    return tables.paragraphs(f"# PyTorch {torch.__version__}", *shown, "## What failed", "\n".join(failed) or "Nothing.") + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--eager", action="store_true", help="ask also without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each timed comparison (5)")
    parser.add_argument("--model", metavar="NAME", help="geometry random:NAME, in place of the part's own")
    parser.add_argument("--histories", nargs="+", type=int, metavar="TOKENS")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # the part that this process measures
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.part:
        return measured(arguments)
    device = "emulated" if arguments.emulated else measure.device_name()
    names = arguments.only or [name for name in JOBS if name in (*PARTS, "tests") or not arguments.emulated]
    if device == "cpu":
        would = [f"  python {words} ({limit})" for words, limit in map(JOBS.get, names)]
        return print("There is no GPU here. With one, these would run (limit in seconds):", *would, sep="\n")
    path = arguments.json or measure.RESULTS / f"gpu-{device}.json"
    for name in names:
        job = run(name, path)[name]
        print(f"{name}: ended with {job['code']}; {job['said']}", flush=True)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
