"""All benchmarks, one after the other, then every claim beside what this machine has measured.

    python -m benchmarks --quick                some of them, in their shortest form
    python -m benchmarks                        all
    python -m benchmarks --only tiered ranks    these; what the others found last stays
    python -m benchmarks --list                 the commands; nothing runs

Each is a process of its own, and nothing else runs beside it. Results go to benchmarks/results/last. What is committed
in benchmarks/results comes from longer runs of each: `python -m benchmarks.NAME` with nothing behind it.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import RESULTS, device_name

# benchmark: options of the full run; of the quick one, None: left out
PARTS = {
    "baseline": ("--model classroom", "--model classroom --dtype float32 --rounds 2"),
    "engine": ("--rounds 3", "--only throughput --model classroom --rounds 1"),
    "planned": ("--model classroom random:small --histories 1024 --rounds 5", "--model classroom --histories 1024 --rounds 2"),
    "variants": ("--model classroom --rounds 3", None),
    "flow": ("--model classroom --rounds 5", None),
    "outside": ("--only conversations --rounds 2", None),
    "both_ends": ("--only grid --model classroom --rounds 3",
                  "--only grid --model classroom --histories 1024 --r 4 1 0.5 --share --rounds 2"),
    "tiered": ("--rounds 2", "--only mix policies match --model classroom --rounds 1"),
    "hybrid_blocks": ("--only grid --model random:small --f 1.25 --batch 16 --rounds 3",
                      "--only grid --model random:small --f 1.25 --batch 16 --context 128 --rounds 1"),
    "ranks": ("--model classroom", "--model classroom --ranks 1 2 --rounds 2"),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--list", action="store_true", help="print the commands, and end")
    parser.add_argument("--json", type=Path, metavar="FOLDER", default=RESULTS / "last")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        options = PARTS[name][arguments.quick]
        if options is None:
            continue
        command = ["-m", f"benchmarks.{name}", *options.split(), "--json", str(arguments.json)]
        print(f"\n$ python {' '.join(command)}", flush=True)
        if arguments.list:
            continue
        began = time.perf_counter()
        code = subprocess.run([sys.executable, *command]).returncode
        print(f"{name}: {time.perf_counter() - began:.0f} s" + f", ended with {code}" * bool(code), flush=True)
        failed += [name] * bool(code)
    if not arguments.list:
        print("\nEvery claim, beside what was measured:\n")
        subprocess.run([sys.executable, "-m", "benchmarks.claims", str(arguments.json), device_name()], check=True)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}; what they said stands above.")


if __name__ == "__main__":
    main()
