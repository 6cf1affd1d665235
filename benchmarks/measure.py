"""What every benchmark shares: its options, asking in turn, samples, measuring again, and the file of results."""

import argparse
import gc
import json
import platform
import re
import statistics
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers

from common.link import Link
from common.requests import Request
from common.timeline import Clock
from shell import checkpoint, cli, lesson

RESULTS = Path(__file__).resolve().parent / "results"
AS_IT_IS = "the link as it is"
count = partial(cli.bounded, int, 1)  # the type of an option: a number of at most ...


# 1. Samples -------------------------------------------------------------------------------------------------

def spread(samples: list[float]) -> dict:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": samples}


def ratio(over: list[float], under: list[float]) -> dict:
    """The spread of what was measured in the same round, one over the other."""
    return spread([a / b for a, b in zip(over, under)])


def ttft(requests: list[Request]) -> list[float]:
    return [request.outcome.ttft_ms for request in requests]


def is_behind(ratios: list[float]) -> bool:
    """Whether something took longer than what it is compared with: the median of the paired ratios is above
    1.03 and their lower quartile above 1, or the median above 1.06."""
    middle, low = statistics.median(ratios), statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    return middle > 1.03 and low > 1 or middle > 1.06


def again_if_behind(cell, rounds: int):
    """Yield the row of `cell(rounds)`; if something is behind in it, then that of twice the rounds: both stand."""
    for times in (1, 2):
        row = cell(times * rounds)
        yield row
        if not row["behind"]:
            return


# 2. Asking --------------------------------------------------------------------------------------------------

def draw(rng, model, tokens: int) -> list[int]:
    return [rng.randrange(300, model.config.vocab_size) for _ in range(tokens)]


def same_question_in_turn(ways: dict, rounds: int, question) -> dict[str, list]:
    """`lesson.in_turn`, where in each round all ways are called with what `question()` draws for it."""
    drawn = [question() for _ in range(rounds + 1)]
    return lesson.in_turn({name: map(way, drawn).__next__ for name, way in ways.items()}, rounds)  # each asks the next one


def check_alike(model, answers: dict[str, list[list[int]]]):
    """End if the ways have answered differently in a round, unless 16-bit rounding may be why."""
    alike = all(tokens == each[0] for each in zip(*answers.values()) for tokens in each)
    assert alike or model.dtype != torch.float32, "the tokens differ"


# 3. The command line ----------------------------------------------------------------------------------------

def parser(doc: str, parts=(), rounds: int | None = None) -> argparse.ArgumentParser:
    """The options of every benchmark; `rounds` by default."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        made.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="these parts")
    made.add_argument("--model", nargs="+", help="only these models")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--rounds", type=count(1000), default=rounds, help="of all that is timed")
    made.add_argument("--json", type=Path, metavar="PATH", default=RESULTS, help="a file, or the folder of NAME-DEVICE.json")
    return made


@contextmanager
def one_sentence():
    """A model, a dtype or a device that cannot be had ends a benchmark with one sentence."""
    try:
        yield
    except checkpoint.ModelError as error:
        sys.exit(str(error))


def run(benchmark: str, parts: dict, report, arguments, load=checkpoint.load):
    """Measure `parts`, name -> (function, models): (model, arguments) -> its rows, one by one. Print a line
    for each, at the end the tables that `report` makes, and write all. `arguments.name` is the model's name."""
    found, device = [], "cpu"
    names = dict.fromkeys(name for part in arguments.only for name in parts[part][1])
    for name in arguments.model or names:
        arguments.name = name
        with one_sentence():
            model, *_ = load(name, arguments.dtype, arguments.device)
        device, link = model.device.type, link_of(model.device)
        gc.freeze()  # so that no collection of all that was imported stops everything for a quarter of a second
        for part in arguments.only:
            function, models = parts[part]
            if arguments.model or name in models:
                entry = dict(claim=part, model=name, dtype=str(model.dtype).removeprefix("torch."), rows=[])
                found.append(entry)
                for row in function(model, arguments):
                    entry["rows"].append({**link, **row})
                    progress(part, name, entry["rows"][-1])
        del model
    print(f"\n{report(found)}\n")
    write(benchmark, device, arguments.json, found)


def modelled(model, speed: float) -> float | None:
    """Bytes/s of the link: with a GPU it is as fast as it is."""
    return None if model.device.type == "cuda" else speed


def link_of(device) -> dict:
    """What each row says of its link: a real one is one, and is measured; a modelled one's speed is the row's own."""
    if device.type != "cuda":
        return dict(modelled=True)
    return dict(modelled=False, link=AS_IT_IS, link_gbps=Link("load", Clock(device)).speed() / 1e9)


def progress(part: str, model: str, row: dict):
    """Print the row's numbers and words, medians for samples."""
    plain = {name: value["median"] if isinstance(value, dict) and "median" in value else value for name, value in row.items()}
    words = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
             for name, value in plain.items() if isinstance(value, (int, float, str)))  # fmt: skip
    print(f"{part}, {model}: " + ", ".join(words), flush=True)


# 4. The file of results -------------------------------------------------------------------------------------

def processor(device: str = "cpu") -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def device_name(device: str = "auto") -> str:
    """Of what a file of results is called after: cpu, or the GPU, as nvidia-h100-80gb-hbm3."""
    return re.sub(r"\W+", "-", processor("cuda").lower()) if checkpoint.pick_device(device) == "cuda" else "cpu"


def write(benchmark: str, device: str, path: Path, found: list[dict]):
    """Write what was found, and on what, to the file `path`, or in that folder to BENCHMARK-DEVICE.json."""
    path = path if path.suffix else path / f"{benchmark}-{device_name(device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": " ".join([f"python -m benchmarks.{benchmark}", *sys.argv[1:]]), "processor": processor(device),
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "transformers": transformers.__version__, "found": found}, indent=1) + "\n")
    print(f"written: {path}")
