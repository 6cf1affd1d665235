"""Provide the parts that all benchmarks share: samples, rounds in turn, options, and the file of results."""

import argparse
import gc
import json
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers

from common.cuda_link import Link
from common.requests import Request
from common.timeline import Clock
from shell import checkpoint, cli, lesson
from shell.modelled_link import Bandwidth

RESULTS = Path(__file__).resolve().parent / "results"
AS_IT_IS = "the link as it is"
TRAINED = "smollm2"  # a trained model in models/ that is not shipped: `python -m models.real_model` makes it
count = partial(cli.bounded, int, 1)  # count(most): the type of an option, an integer from 1 to `most`


# 1. Samples -------------------------------------------------------------------------------------------------

def spread(samples: list[float]) -> dict:
    """Return a figure: median, smallest, largest, and the samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def ratio(over: list[float], under: list[float]) -> dict:
    """Return the spread of `over` / `under`, divided round by round."""
    return spread([a / b for a, b in zip(over, under)])


def ttft(requests: list[Request]) -> list[float]:
    """Return the TTFT of each request in ms."""
    return [request.ttft_ms for request in requests]


def is_slower(ratios: list[float], by: float = 0.03) -> bool:
    """Return True if paired ratios of times show a slowdown of more than `by`: their median exceeds 1 + by,
    and their lower quartile exceeds 1."""
    low = statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    return statistics.median(ratios) > 1 + by and low > 1


# 2. Asking --------------------------------------------------------------------------------------------------

def draw(rng, model, tokens: int) -> list[int]:
    """Return `tokens` random token ids of the model's vocabulary."""
    return [rng.randrange(300, model.config.vocab_size) for _ in range(tokens)]


def same_question_in_turn(ways: dict, rounds: int, question) -> dict[str, list]:
    """Call all `ways` in turn (`lesson.in_turn`), in each round with the same value of `question()`.

    Returns: name -> results of the rounds after the warm-up."""
    drawn = [question() for _ in range(rounds + 1)]
    return lesson.in_turn({name: map(way, drawn).__next__ for name, way in ways.items()}, rounds)


def change_speed(engine, slowed, lane, bandwidth: Bandwidth | None):
    """Give a modelled link or storage a new bandwidth, and clear the speeds that its lane has measured.

    Transfers in flight end first, because their times would count as the new speed."""
    lesson.wait_until_idle(engine)
    lane.reap_completed()
    lane.measured.samples.clear()
    slowed.bandwidth = bandwidth


def check_alike(model, answers: dict[str, list[list[int]]]):
    """Raise AssertionError if a float32 model has answered differently in one round. 16 bits may differ.

    `answers`: name -> the tokens of each round."""
    alike = all(tokens == each[0] for each in zip(*answers.values()) for tokens in each)
    assert alike or model.dtype != torch.float32, "the tokens differ"


# 3. The command line ----------------------------------------------------------------------------------------

def parser(doc: str, parts=(), rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; `rounds` is the default of --rounds."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        made.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="measure only these parts")
    made.add_argument("--model", nargs="+", help="only these models")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--rounds", type=count(1000), default=rounds, help="rounds of each timed comparison")
    made.add_argument("--json", type=Path, metavar="PATH", default=RESULTS, help="a file, or the folder of NAME-DEVICE.json")
    return made


@contextmanager
def one_sentence():
    """Context manager: end the process with one sentence if a model, a dtype or a device is not available."""
    try:
        yield
    except checkpoint.ModelError as error:
        sys.exit(str(error))


def run(benchmark: str, parts: dict, report, arguments, load=checkpoint.load):
    """Measure all parts on their models, write results after each, and print the tables of `report`.

    `parts`: name -> (function, models). A function takes (model, arguments) and yields rows; each row is
    printed as it comes. `arguments.name` is the name or folder from which the model was loaded. A part that
    fails keeps its rows; the other parts still run, and then the process ends with code 1."""
    found, failed, device = [], [], "cpu"
    names = dict.fromkeys(name for part in arguments.only for name in parts[part][1])
    for model_name in arguments.model or names:
        arguments.name = place_of(model_name)
        if not arguments.name:
            print(f"{model_name} is left out: python -m models.real_model makes it.")
            continue
        with one_sentence():
            model, *_ = load(arguments.name, arguments.dtype, arguments.device)
        device, link = model.device.type, link_of(model.device)
        gc.freeze()  # a collection over all imported objects would stop a measurement for a quarter of a second
        for part in arguments.only:
            function, models = parts[part]
            if arguments.model or model_name in models:
                entry = dict(claim=part, model=model_name, dtype=str(model.dtype).removeprefix("torch."), rows=[])
                found.append(entry)
                began = time.perf_counter()
                try:
                    for row in function(model, arguments):
                        entry["rows"].append({**link, **row})
                        progress(part, model_name, entry["rows"][-1])
                except Exception:  # the other parts still run
                    traceback.print_exc()
                    failed.append(f"{part} of {model_name}")
                print(f"{part}, {model_name}: {time.perf_counter() - began:.0f} s", flush=True)
                write(benchmark, device, arguments.json, found)
        del model
    print(f"\n{report(found)}\n")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


def place_of(name: str) -> str:
    """Return the name or folder for `checkpoint.load`; empty for the trained model if its folder does not
    exist."""
    folder = RESULTS.parent.parent / "models" / name
    return name if name != TRAINED else str(folder) if folder.is_dir() else ""


def short_dtype() -> str:
    """Return bfloat16 if the processor multiplies it, else float32: without it each operand is converted."""
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def modelled(model, speed: float) -> float | None:
    """Return the bytes/s of a modelled link; None with a GPU, whose link is real."""
    return None if model.device.type == "cuda" else speed


def link_of(device) -> dict:
    """Return the fields that describe the link in each row. A real link has its measured speed; a row with a
    modelled link has its own."""
    if device.type != "cuda":
        return dict(modelled=True)
    return dict(modelled=False, link=AS_IT_IS, link_gbps=Link("load", Clock(device)).speed() / 1e9)


def progress(part: str, model: str, row: dict):
    """Print the numbers and words of a row; a figure with samples is printed as its median."""
    plain = {name: value["median"] if isinstance(value, dict) and "median" in value else value for name, value in row.items()}
    words = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
             for name, value in plain.items() if isinstance(value, (int, float, str)))  # fmt: skip
    print(f"{part}, {model}: " + ", ".join(words), flush=True)


# 4. The file of results -------------------------------------------------------------------------------------

def processor(device: str = "cpu") -> str:
    """Return the name of the processor, or of the GPU for "cuda"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def device_name(device: str = "auto") -> str:
    """Return the device's part of a result file's name: cpu, or the GPU's name, such as
    nvidia-h100-80gb-hbm3."""
    return re.sub(r"\W+", "-", processor("cuda").lower()) if checkpoint.pick_device(device) == "cuda" else "cpu"


def commit() -> str:
    """Return the last commit that changed code, with " with changes" if code differs from it; empty without
    git."""
    git = partial(subprocess.run, cwd=RESULTS.parent, capture_output=True, text=True)
    try:
        last = git(["git", "log", "-1", "--format=%H", "--", ":/*.py"]).stdout[:10]
        return last and last + " with changes" * bool(git(["git", "diff", "--quiet", "HEAD", "--", ":/*.py"]).returncode)
    except OSError:
        return ""


def write(benchmark: str, device: str, path: Path, found: list[dict]):
    """Write results with their commit, machine and versions to the file `path`, or to BENCHMARK-DEVICE.json
    in that folder."""
    path = path if path.suffix else path / f"{benchmark}-{device_name(device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": " ".join([f"python -m benchmarks.{benchmark}", *sys.argv[1:]]).replace(f"{RESULTS.parents[1]}/", ""),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"), "processor": processor(device),
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "transformers": transformers.__version__, "found": found}, indent=1) + "\n")
    print(f"written: {path}")
