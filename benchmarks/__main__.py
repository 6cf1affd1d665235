"""Run all benchmarks, one after the other, then judge every claim by the results of this machine.

    python -m benchmarks --quick                some of them, in their shortest form
    python -m benchmarks                        all: less than 40 minutes on two cores
    python -m benchmarks --only tiered ranks    these alone; the results of the others stay
    python -m benchmarks --list                 print the commands, and run nothing

Each benchmark is a process of its own and writes its results to benchmarks/results/last after each of its
parts. If one fails, or takes twice its time, the others still run, and its finished parts are kept. No other
program should run at the same time. With `--json benchmarks/results` one run of all benchmarks makes the
results from which tools/report.py writes the pages.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import RESULTS, device_name

# benchmark -> minutes that it takes on two cores, and options of the quick run (None: it is left out)
PARTS = {
    "baseline": (1, "--model classroom --rounds 2"),
    "engine": (2, "--only throughput host --model classroom --rounds 1"),
    "planned": (3, "--model classroom --histories 1024 --rounds 2"),
    "variants": (2, None),
    "outside": (10, None),
    "both_ends": (3, "--only grid --model classroom --histories 1024 --r 4 1 0.5 --share --rounds 2"),
    "tiered": (3, "--only policies --model classroom --rounds 1"),
    "hybrid_blocks": (4, "--only grid --model classroom --f 1.25 --context 128 --rounds 1"),
    "ranks": (1, "--model classroom --ranks 1 2 --rounds 2"),
    "real_storage": (3, "--model classroom --histories 1024 --rounds 1"),
    "peers": (6, None),
}


def ended(command: list[str], minutes: float) -> int:
    """Run Python with these arguments. Returns: its exit code, or 124 if it took longer than `minutes`; then
    it and all of its child processes are killed."""
    process = subprocess.Popen([sys.executable, *command], start_new_session=True)
    try:
        return process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--json", type=Path, metavar="FOLDER", default=RESULTS / "last")
    arguments = parser.parse_args()
    failed, start = [], time.perf_counter()
    for name in arguments.only:
        minutes, quick = PARTS[name]
        if arguments.quick and quick is None:
            continue
        options = quick.split() if arguments.quick else []
        command = ["-m", f"benchmarks.{name}", *options, "--json", str(arguments.json)]
        print(f"\n$ python {' '.join(command)}" + f"   # {minutes} minutes" * (not arguments.quick), flush=True)
        if arguments.list:
            continue
        began = time.perf_counter()
        code = ended(command, 2 * minutes)
        taken, since = time.perf_counter() - began, time.perf_counter() - start
        print(f"{name}: {taken:.0f} s, {since:.0f} s since the start" + f", ended with {code}" * bool(code), flush=True)
        failed += [f"{name} ({'too late' if code == 124 else code})"] * bool(code)
    if not arguments.list:
        print("\nEvery claim, beside what was measured:\n")
        subprocess.run([sys.executable, "-m", "benchmarks.claims", str(arguments.json), device_name()], check=True)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}; their messages stand above, and the rows that they had measured are written.")


if __name__ == "__main__":
    main()
