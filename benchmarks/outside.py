"""Measure servers of chapters 02 to 05 under load, over HTTP.

    python -m benchmarks.outside                                   results in benchmarks/results/

sessions        sixteen sessions at once (HCache, Figure 9). Each system is a server of its own, and clients
                ask it over HTTP. The device loses its cached blocks before each round, except in 02, the
                ideal. "02 recomputing" is the same server without its cached blocks: it computes each
                history again. Rounds arrive as a Poisson process, and its rate rises until TTFT diverges.
                All systems play the same rounds in turn, in three runs. TTFT counts from the moment when a
                round was due.
"""

import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio
from benchmarks.planned import CHAPTERS, QUESTION
from shell import handle_signals, interrupt

SESSIONS, RUNS, ROUNDS, BEGINS, ANSWER = 16, 3, 16, 800, 8  # ROUNDS: of all sessions in a run; tokens of a first history, an answer
IDEAL, RECOMPUTING = "02", "02 recomputing"
SYSTEMS = IDEAL, RECOMPUTING, "03", "04", "05"
# Rounds a second; classroom is fast enough for more of them
RATES = {"random:long": [1.5 * 1.6**step for step in range(6)], "classroom": [6.0, 12.0]}
DIVERGED = 4.0  # median TTFT over that at the lowest rate


def percentiles(samples: list[float], *shares: int) -> dict:
    """Return {"p50": ..., "samples": samples} with the given percentiles."""
    values = numpy.percentile(samples, shares)
    return {f"p{share}": float(value) for share, value in zip(shares, values)} | dict(samples=samples)


# 1. Servers -------------------------------------------------------------------------------------------------

class Server:
    """A server in a process of its own, whose processor time and memory are read from outside."""

    def __init__(self, command: list[str], environment=None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], cwd=measure.RESULTS.parent.parent, env=environment,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    def opened(self, path: str, **fields):
        """Post a JSON body. Returns: the open response. Raises OSError, also if the server refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(response.read().decode())
        return response

    def post(self, path: str, **fields) -> dict:
        """Post a JSON body. Returns: the reply. Raises OSError, also if the server refuses."""
        with self.opened(path, **fields) as response:
            return json.loads(response.read())

    def first(self, *asked) -> dict:
        """Ask until the server answers. Raises RuntimeError if its process ends."""
        while True:
            try:
                return self.ask(*asked)
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.process.args[:2]} has ended with {self.process.returncode}.") from None
                time.sleep(0.02)

    def evict(self, *tiers: str):
        for tier in tiers:
            self.post("/evict", tier=tier)

    def seconds(self) -> float:
        """Return the processor time of all threads of the process, including ended threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # as clock_getcpuclockid(3) numbers a process's clock

    def peak(self) -> float:
        """Return the most bytes that the process has had in memory."""
        return 1024.0 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1])

    def close(self):
        self.process.terminate()
        self.process.wait()


def command_of(system: str, model: str, *options: str) -> list[str]:
    """Return the command that starts the server of a chapter. `system` begins with the chapter's number."""
    file = next(f"{chapter}.py" for chapter in (*CHAPTERS, "07_tiered_storage") if chapter.startswith(system[:2]))
    return [sys.executable, file, "--model", model, *options]


class Service(Server):
    """One system's server, with room for all sessions on the device and in host memory."""

    def __init__(self, system: str, model: str, blocks: int):
        options = ["--gpu-blocks", str(blocks)] + ["--cpu-blocks", str(2 * blocks)] * (system[:2] != "02")
        super().__init__(command_of(system, model, *options))
        self.system = system

    def ask(self, prompt: list[int], due: float) -> dict:
        """Ask one round that was due at `due` (seconds of time.perf_counter()). Returns: TTFT and TBT in ms,
        the new tokens, and the tokens restored from host memory."""
        if self.system != IDEAL:
            self.evict("device")
        with self.opened("/generate", prompt=prompt, max_tokens=ANSWER, stream=True) as response:
            first = None
            for line in response:
                event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
                first = first or event and time.perf_counter()
                if "error" in event:
                    raise OSError(event["error"])
                if result := event.get("result"):
                    return dict(ttft_ms=1e3 * (first - due), tbt_ms=result["tbt_ms"] or 0.0, tokens=result["tokens"],
                                restored=result["found"].get("cpu", 0))  # fmt: skip


# 2. Under load, over HTTP -----------------------------------------------------------------------------------

def play(service: Service, texts: list[list[int]], rounds: list[tuple[float, int, list[int]]]) -> list[dict]:
    """Play rounds, each session on a thread of its own; a round waits for its session's previous one.

    `texts`: the first history of each session. `rounds`: (seconds from the start until it is due, session,
    new tokens). Returns: the results of `Service.ask`, in the order of `rounds`."""
    began, answered = time.perf_counter() + 0.05, {}

    def session(number: int):
        told = list(texts[number])
        for at, (after, own, said) in enumerate(rounds):
            if own == number:
                time.sleep(max(0.0, began + after - time.perf_counter()))
                told += said
                answered[at] = service.ask(told, began + after)
                told += answered[at]["tokens"]

    with ThreadPoolExecutor(len(texts)) as clients:
        list(clients.map(session, range(len(texts))))
    return [answered[at] for at in range(len(rounds))]


def arrivals(rng, model, rate: float) -> list[tuple[float, int, list[int]]]:
    """Draw ROUNDS rounds of a Poisson process, `rate` a second. The sessions take turns in random order."""
    order = [number for _ in range(-(-ROUNDS // SESSIONS)) for number in rng.sample(range(SESSIONS), SESSIONS)][:ROUNDS]
    after, rounds = 0.0, []
    for number in order:
        after += rng.expovariate(rate)
        rounds.append((after, number, draw(rng, model, QUESTION)))
    return rounds


def sessions(model, arguments):
    """Yield a row for each rate and each system that has sustained all lower rates."""
    rng, name = random.Random(0), arguments.name
    texts = [draw(rng, model, BEGINS) for _ in range(SESSIONS)]
    blocks = SESSIONS * -(-(BEGINS + 2 * -(-ROUNDS // SESSIONS) * (QUESTION + ANSWER)) // 16)
    with ExitStack() as stack:
        services = {}
        for system in SYSTEMS:
            service = services[system] = Service(system, name, blocks)
            stack.callback(service.close)
            for text in texts:
                service.first(text, time.perf_counter())
        base, left = {}, dict.fromkeys(services, True)  # base: system -> median TTFT at the lowest rate; left: system -> not diverged yet
        for rate in RATES.get(name) or RATES["random:long"]:
            taken = {system: [] for system, sustains in left.items() if sustains}
            for _ in range(RUNS):
                rounds = arrivals(rng, model, rate)
                for system, runs in taken.items():
                    runs.append(play(services[system], texts, rounds))
            for system, runs in taken.items():
                times = [[one["ttft_ms"] for one in run] for run in runs]
                base.setdefault(system, statistics.median(sum(times, [])))
                over = [statistics.median(run) / base[system] for run in times]
                left[system] = statistics.median(over) < DIVERGED
                yield dict(
                    system=system, rate=rate, requests=sum(map(len, times)), over_lowest_rate=measure.spread(over),
                    ttft_ms=percentiles(sum(times, []), 50, 90), diverged=not left[system],
                    tbt_ms=percentiles([one["tbt_ms"] for run in runs for one in run], 50, 90),
                    restored=sum(one["restored"] for run in runs for one in run),
                    **against(runs, taken))  # fmt: skip
            if not any(left.values()):
                return


def against(runs: list[list[dict]], taken: dict) -> dict:
    """Compare p50 and p90 of TTFT with those of 03 and of recomputing, and the mean TBT with 02, run by run,
    as long as these play this rate."""
    def of_runs(figure) -> dict[str, list[float]]:
        return {system: [figure(run) for run in each[: len(runs)]] for system, each in dict(taken, own=runs).items()}

    def percentile(share: int):
        return lambda run: float(numpy.percentile([one["ttft_ms"] for one in run], share))

    found = {f"p{share}": of_runs(percentile(share)) for share in (50, 90)}
    found["tbt"] = of_runs(lambda run: statistics.mean(one["tbt_ms"] for one in run))
    return {f"{what}_over_{base}": ratio(each["own"], each[base]) for what, each in found.items()
            for base in (("03", RECOMPUTING) if what != "tbt" else (IDEAL,)) if base in each}  # fmt: skip


# 3. The tables and main --------------------------------------------------------------------------------------

def sustained(rows: list[dict]) -> dict[str, float]:
    """Return for each system the rounds a second at which its TTFT diverges.

    There its median TTFT is DIVERGED times that at the lowest rate. The rate is interpolated between two
    measured rates on logarithmic scales. A system that never diverged has its highest measured rate."""
    found = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        each = [(row["rate"], tables.median(row["over_lowest_rate"])) for row in rows if row["system"] == system]
        (before, low), (rate, high) = each[-2:] if len(each) > 1 else 2 * each
        share = (numpy.log(DIVERGED / low) / numpy.log(high / low)) if high > max(DIVERGED, low) else 1.0
        found[system] = float(before * (rate / before) ** share)
    return found


def report(found: list[dict]) -> str:
    every = tables.rows(found, "sessions")
    for row in every:
        row["over"] = f"{row['rate']:.1f} a second"
    shown = []
    for model in dict.fromkeys(row["model"] for row in every):
        rows = [row for row in every if row["model"] == model]
        rates, across = [f"{rate:.1f} of {system}" for system, rate in sustained(rows).items()], tables.grouped(rows, ("system", "model"), "over")
        shown += [
            tables.table(
                "**Sixteen sessions at once, over HTTP** (HCache, Figure 9; {model}): TTFT p50 and p90, p50 over that of 03 in the same "
                "run, and p50 of TBT, by rounds a second.", {
                    "system": "{system}",
                    **tables.across(across, {"": "{ttft_ms[p50]:ms}, {ttft_ms[p90]:ms}; {p50_over_03:n}; {tbt_ms[p50]:ms}"}),
                }, across),
            f"The median TTFT reaches {DIVERGED:g} times that at the lowest rate at these rounds a second: {tables.listed(rates)}."]  # fmt: skip
    return tables.paragraphs(*shown)


PARTS = {"sessions": (sessions, list(RATES))}


if __name__ == "__main__":
    handle_signals(interrupt)  # so that `kill` ends the servers as well
    measure.run("outside", PARTS, report, measure.parser(__doc__, PARTS).parse_args())
