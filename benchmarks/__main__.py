"""All benchmarks, one after the other: what is claimed of each chapter, beside what this machine measures.

    python -m benchmarks --quick                        under 10 minutes on two cores
    python -m benchmarks                                under an hour
    python -m benchmarks --only tiered-mix-classroom    this part again, in the results that are there
    python -m benchmarks --list                         the parts and their commands; nothing runs

Each part is a command of its own, in a process of its own, and nothing else runs beside it. After each part all that was found
is written to benchmarks/results/DEVICE.json (DEVICE-quick.json), where DEVICE is `cpu` or the GPU's name. A part that fails is
noted there with its error, and the others go on; the exit status is then 1. In the end stand the claims, what was missed first,
each with the command that measures it alone, and figures are drawn. With --model all parts measure that model; those that cannot
are left out. Chapters 02 to 05 have files of their own: python -m benchmarks.engine, .planned and .outside.
"""
import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from legacy import app  # noqa: E402

from benchmarks import claims  # noqa: E402
from common import checkpoint  # noqa: E402
from tools import random_models  # noqa: E402

# kind: the benchmark, and what it measures by --only; model: None where only the benchmark's own makes sense. Then the options of
# the full run, and those of the quick one, which leaves out what has None. Without --rounds a benchmark takes its own, mostly 5.
PARTS = [
    # kind                      model                   full                           quick
    ("limits",                   None,                   "",                            ""),
    ("baseline",                 "classroom",            "--dtype float32",             "--dtype float32 --rounds 3"),
    ("baseline",                 "random:tinyllama",     "--dtype float32 --new-tokens 17", None),
    ("baseline",                 "random:tinyllama",     "--dtype bfloat16 --new-tokens 17", None),
    ("tiered-match",             None,                   "",                            ""),
    ("tiered-layouts",           "random:small",         "",                            ""),
    ("tiered-layouts",           "classroom",            "",                            ""),
    ("tiered-admission",         "classroom",            "",                            "--rounds 1"),
    ("tiered-mix",               "classroom",            "",                            "--rounds 2"),
    ("tiered-mix",               "random:small",         "--rounds 2",                  None),
    ("hybrid_blocks",            "random:small",         "--platform a100 --cell 32x512 --cell 64x512 --rounds 3",
                                                         "--platform a100 --cell 32x512 --cell 64x256 --rounds 2"),
    ("hybrid_blocks",            "random:small",         "--platform 4090 --cell 64x256 --cell 32x1024 --rounds 3", None),
    ("hybrid_blocks",            "random:tinyllama-mha", "--platform a100 --cell 32x128 --rounds 2", None),
    ("restoration",              "classroom",            "",                            "--rounds 3"),
    ("restoration",              "random:small",         "--histories 256,1024 --rounds 3", None),
    ("matrix-conversations",     "classroom",            "--scale 0.1",
                                                         "--conversations 8 --scale 0.05 --systems 01,06,07,dynamic"),
    ("matrix-documents",         "classroom",            "--conversations 10 --systems 06,07,dynamic", None),
]
# Of these --histories sets the lengths.
HISTORIES = ("tiered-admission", "restoration")
ONLY_RANDOM = ("hybrid_blocks",)                                # they change the geometry
GRACE = 3.0                                                     # seconds that a part has to end after each signal
CODES = re.compile(r"\x1b\[[\d;]*[A-Za-z]")                     # what moves a terminal's cursor


class Part(NamedTuple):
    name: str
    arguments: list[str]                                        # of the interpreter

    @property
    def command(self) -> str:
        return f"python {shlex.join(self.arguments)}"


# 1. Which parts --------------------------------------------------------------------------------------------------

def part(kind: str, model: str | None, options: str, asked: argparse.Namespace) -> Part:
    """One part as a command. What was asked for replaces the table's own dtype and histories."""
    benchmark, _, claim = kind.partition("-")
    words, name = options.split(), [kind]
    replaced = {"--dtype": asked.dtype if model else None, "--device": None if asked.device == "auto" else asked.device,
                "--histories": asked.histories if kind in HISTORIES else None,
                "--rounds": asked.rounds, "--scale": asked.scale if benchmark == "matrix" else None}
    if benchmark == "matrix":
        del replaced["--rounds"]                                # it is long enough as it is
    if asked.model and benchmark == "baseline":
        replaced["--dtype"] = asked.dtype or "float32"
    replaced = {option: str(value) for option, value in replaced.items() if value is not None}
    pairs = [(words[index], replaced.pop(words[index], words[index + 1])) for index in range(0, len(words), 2)]
    pairs = [*[("--only", claim)] * bool(claim), *[("--model", model)] * bool(model), *pairs, *replaced.items()]
    if model:
        name.append(model.removeprefix("random:").replace("/", "--"))
    name += [value for option, value in pairs if option == {"baseline": "--dtype", "hybrid_blocks": "--platform"}.get(benchmark)]
    return Part("-".join(name), ["-m", f"benchmarks.{benchmark}", *(word for pair in pairs for word in pair)])


def refused(kind: str, model: str) -> str | None:
    """Why a part cannot be measured on a model."""
    if kind == "hybrid_blocks" and not model.startswith("random:"):
        return "it changes the geometry, so it needs random weights (random:NAME)"
    return None


def parts_for(asked: argparse.Namespace) -> tuple[list[Part], list[str]]:
    """-> the parts of this run, and sentences on those that are left out."""
    found, left_out, kinds = [], [], set()
    for kind, model, full, quick in PARTS:
        options = quick if asked.quick else full
        if asked.model and model:
            if kind in kinds or options is None and any(other[0] == kind and other[3] is not None for other in PARTS):
                continue                                        # once, as on the first model that the run has
            kinds.add(kind)
            why = refused(kind, asked.model)
            if why:
                left_out.append(f"{kind} is left out: {why}.")
            else:
                found.append(part(kind, asked.model, full if options is None else options, asked))
        elif options is not None:
            found.append(part(kind, model, options, asked))
        else:
            left_out.append(f"{part(kind, model, full, asked).name} is left out of the quick run.")
    return found, left_out


def chosen(parts: list[Part], asked: argparse.Namespace) -> list[Part]:
    """Those of --only. A name that the quick run leaves out is measured as in the full run. Raises SystemExit."""
    if not asked.only:
        return parts
    full, _ = parts_for(argparse.Namespace(**{**vars(asked), "quick": False}))
    known = {each.name: each for each in [*full, *parts]}
    unknown = [name for name in asked.only if name not in known]
    if unknown:
        sys.exit(f"There is no part {', '.join(unknown)}; they are:\n" + "\n".join(f"  {name}" for name in known))
    return [each for name, each in known.items() if name in asked.only]


# 2. Running them -------------------------------------------------------------------------------------------------

def conditions(device: str) -> dict:
    """What the results depend on besides the parts; device: as `checkpoint.pick_device` says."""
    baseline = importlib.import_module("benchmarks.baseline")
    torch, transformers = baseline.torch, baseline.transformers
    return dict(device=baseline.device_name(device), processor=baseline.processor(), threads=torch.get_num_threads(),
                cpu_capability=torch.backends.cpu.get_cpu_capability(), torch=torch.__version__,
                transformers=transformers.__version__, python=platform.python_version())


def write(path: Path, results: dict):
    """All or nothing: a run that ends here leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def last_line(text: bytes) -> str:
    """Of what a command said before it ended, without its progress bars' codes."""
    lines = CODES.sub("", text.decode(errors="replace")).replace("\r", "\n").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


@contextlib.contextmanager
def signals_wait():
    """Ctrl-C and SIGTERM come through at the end: a part that has just begun has no name yet by which it could be stopped."""
    arrived = []
    handlers = {number: signal.signal(number, lambda number, _: arrived.append(number))
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def stop(child: subprocess.Popen):
    """Ends the part and all that it started; asks first, as Ctrl-C does, and again, as an import may swallow the first."""
    for number, patience in ((signal.SIGINT, GRACE), (signal.SIGINT, GRACE), (signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):         # who is impatient gets the next signal
            child.wait(patience)
            break


def run(each: Part) -> dict:
    """Runs a part, its progress bars under the one of all parts -> command, seconds, error and found."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path, said, began = Path(folder) / "found.json", b"", time.perf_counter()
        child = None
        try:
            with signals_wait():
                child = subprocess.Popen([sys.executable, *each.arguments, "--json", str(path)], cwd=ROOT,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                                         env={**os.environ, "TQDM_POSITION": "1", "TQDM_LEAVE": "",
                                              "TMPDIR": folder})        # what it leaves behind goes with it
            while piece := os.read(child.stderr.fileno(), 1 << 16):
                sys.stderr.buffer.write(piece)
                sys.stderr.buffer.flush()
                said = (said + piece)[-1 << 16:]
            code = child.wait()
        except BaseException:
            if child:
                stop(child)
            raise
        finally:
            if child:
                child.stderr.close()
        seconds, error, found = time.perf_counter() - began, None, None
        if code:
            error = last_line(said) if code > 0 else f"ended by {signal.Signals(-code).name}"
        elif not path.exists():
            error = "it has written no results"
        else:
            found = {**json.loads(path.read_text(encoding="utf-8")), "command": each.command}
    return dict(command=each.command, seconds=round(seconds, 1), error=error, found=found)


def measure(parts: list[Part], results: dict, path: Path) -> list[str]:
    """Runs the parts and writes what they find -> the names of those that failed."""
    failed, before = [], results["seconds"]
    began = time.perf_counter()
    with tqdm(total=len(parts), unit="part", position=0) as bar:
        for each in parts:
            bar.set_description(each.name)
            found = run(each)
            results["parts"][each.name] = found
            results["seconds"] = round(before + time.perf_counter() - began, 1)
            write(path, results)
            ended = f"failed after {found['seconds']:.1f} s: {found['error']}" if found["error"] else f"{found['seconds']:.1f} s"
            tqdm.write(f"{each.name:40}{ended}", file=sys.stdout)
            sys.stdout.flush()
            failed += [each.name] * bool(found["error"])
            bar.update()
    return failed


def begun(path: Path, asked: argparse.Namespace, now: dict) -> dict:
    """The results that this run adds to: those that are there, if it measures only some parts or another model."""
    results = {}
    if (asked.only or asked.model) and path.exists():
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            results["parts"], results["seconds"]
        except (ValueError, TypeError, KeyError):
            sys.exit(f"{path} does not hold the results of this command; move it away, or name another file with --json.")
    model = [asked.model.removeprefix("random:")] if asked.model else []
    models = list(dict.fromkeys([*results.get("models", []), *model]))
    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}".strip()
    return {"command": results.get("command", command), "quick": results.get("quick", asked.quick),
            **now, "models": models, "seconds": results.get("seconds", 0.0),
            "parts": results.get("parts", {})}


# 3. The command line ---------------------------------------------------------------------------------------------

def parser_for() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models, shorter histories, fewer rounds")
    parser.add_argument("--only", action="append", metavar="PART", help="only this part, whatever --quick leaves out; repeatable")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands, and end")
    parser.add_argument("--model", help="measure this model in all parts that depend on one")
    parser.add_argument("--dtype", choices=checkpoint.DTYPES, help="in all parts that depend on one")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--histories", metavar="TOKENS,...", help="instead of the parts' own, such as 4096,16384")
    parser.add_argument("--rounds", type=app.bounded(int, 1, 1000), help="instead of the parts' own")
    parser.add_argument("--scale", type=app.bounded(float, 1e-3, 10), help="of the matrix: lengths and pauses against the "
                                                                          "published ones")
    parser.add_argument("--json", type=Path, help="the results (default benchmarks/results/DEVICE.json, or DEVICE-quick.json)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="(default benchmarks/results/DEVICE)")
    return parser


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # as Ctrl-C
    asked = parser_for().parse_args()
    parts, left_out = parts_for(asked)
    parts = chosen(parts, asked)
    if asked.list:
        print("\n".join(f"{each.name:40}{each.command}" for each in parts))
        return 0
    try:
        device = checkpoint.pick_device(asked.device)
        if asked.model:
            (random_models.random_config if asked.model.startswith("random:") else checkpoint.find_folder)(asked.model)
        if asked.histories:
            importlib.import_module("benchmarks.paged").lengths(asked.histories)
    except (checkpoint.ModelError, argparse.ArgumentTypeError) as error:
        sys.exit(str(error))
    now = conditions(device)
    path = (asked.json or claims.RESULTS / f"{now['device']}{'-quick' * asked.quick}.json").resolve()
    if path.suffix != ".json" or path.is_dir():
        sys.exit(f"--json {path}: name a file that ends in .json; without that it is the folder of the figures.")
    if not asked.only and left_out:
        print("\n".join(left_out), flush=True)
    results = begun(path, asked, now)
    try:
        failed = measure(parts, results, path)
        print(f"\nwritten: {path}\n")
        for line in claims.losses(results):
            print(line)
        print(claims.table(claims.rows(results)), flush=True)
        folder = asked.figures or path.with_suffix("")
        drawn = importlib.import_module("benchmarks.figures").draw(results, folder)
        print(f"\n{len(drawn)} figures: {folder}")
    except KeyboardInterrupt:
        print(f"\nStopped. What was measured is in {path}." if results["parts"] else "\nStopped; nothing was measured.")
        return 130
    if failed:
        print(f"\nFailed: {', '.join(failed)}. The errors are in {path}.")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:                                   # while libraries are imported
        print("\nStopped; nothing was measured.")
        sys.exit(130)
