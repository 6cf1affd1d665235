"""Measure servers of chapters 02 to 05 under load, over HTTP.

    python -m benchmarks.outside                                   results in benchmarks/results/

sessions        sixteen sessions at once (HCache, Figure 9). Each system is a server of its own, and clients
                ask it over HTTP. The device loses its cached blocks before each round, except in 02, the
                ideal. Rounds arrive as a Poisson process, and its rate rises until TTFT diverges. All systems
                play the same rounds in turn, in three runs. TTFT counts from the moment when a round was due.
"""

import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio
from benchmarks.planned import CHAPTERS, QUESTION
from shell import handle_signals, interrupt

SESSIONS, RUNS, ROUNDS, BEGINS, ANSWER = 16, 3, 24, 800, 8  # ROUNDS: of all sessions in a run; tokens of a first history, an answer
RATES, DIVERGED = [2.0 * 1.6**step for step in range(6)], 4.0  # rounds a second; median TTFT over that at the lowest rate


def percentiles(samples: list[float], *shares: int) -> dict:
    """Return {"p50": ..., "samples": samples} with the given percentiles."""
    values = numpy.percentile(samples, shares)
    return {f"p{share}": float(value) for share, value in zip(shares, values)} | dict(samples=samples)


# 1. Under load, over HTTP -----------------------------------------------------------------------------------

class Service:
    """One chapter's server, in a process of its own, with room for all sessions on the device and in host
    memory."""

    def __init__(self, system: str, model: str, blocks: int):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        file = next(f"{chapter}.py" for chapter in CHAPTERS if chapter.startswith(system))
        options = ["--model", model, "--port", str(self.port), "--gpu-blocks", str(blocks)]
        options += ["--cpu-blocks", str(2 * blocks)] if system != "02" else []
        self.system = system
        self.process = subprocess.Popen([sys.executable, file, *options], cwd=measure.RESULTS.parent.parent,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self):
        """Wait until the server answers. Raises RuntimeError if its process has ended."""
        while True:
            try:
                with self.opened("GET", "/health"):
                    return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"The server of {self.system} has ended with {self.process.returncode}.") from None
                time.sleep(0.1)

    def close(self):
        self.process.terminate()
        self.process.wait()

    def opened(self, method: str, path: str, **fields):
        """Send a request with a JSON body. Returns: the open response. Raises OSError, also if the server
        refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, json.dumps(fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(response.read().decode())
        return response

    def ask(self, prompt: list[int], due: float) -> dict:
        """Ask one round that was due at `due` (seconds of time.perf_counter()). Returns: TTFT and TBT in ms,
        the new tokens, and the tokens restored from host memory."""
        if self.system != "02":
            self.opened("POST", "/evict", tier="device").read()
        with self.opened("POST", "/generate", prompt=prompt, max_tokens=ANSWER, stream=True) as response:
            first = None
            for line in response:
                event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
                first = first or event and time.perf_counter()
                if "error" in event:
                    raise OSError(event["error"])
                if result := event.get("result"):
                    return dict(ttft_ms=1e3 * (first - due), tbt_ms=result["tbt_ms"] or 0.0, tokens=result["tokens"],
                                restored=result["found"].get("cpu", 0))


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
        for system in ("02", "03", "04", "05"):
            service = services[system] = Service(system, name, blocks)
            stack.callback(service.close)
            service.wait()
            for text in texts:
                service.ask(text, time.perf_counter())
        base, left = {}, dict.fromkeys(services, True)  # base: system -> median TTFT at the lowest rate; left: system -> not diverged yet
        for rate in RATES:
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
    """Compare p50 and p90 of TTFT with 03, and the mean TBT with 02, run by run, as long as these play this
    rate."""
    def percentile(runs: list, share: int) -> list[float]:
        return [float(numpy.percentile([one["ttft_ms"] for one in run], share)) for run in runs]

    found = {}
    if "03" in taken:
        found |= {f"p{share}_over_03": ratio(percentile(runs, share), percentile(taken["03"][: len(runs)], share)) for share in (50, 90)}
    if "02" in taken:
        means = [[statistics.mean(one["tbt_ms"] for one in run) for run in each] for each in (runs, taken["02"][: len(runs)])]
        found["tbt_over_02"] = ratio(*means)
    return found


# 2. The tables and main --------------------------------------------------------------------------------------

def sustained(rows: list[dict]) -> dict[str, float]:
    """Return for each system the rounds a second at which its TTFT diverges.

    There its median TTFT is DIVERGED times that at the lowest rate. The rate is interpolated between two measured rates on logarithmic scales. A system that never diverged has its
    highest measured rate."""
    found = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        each = [(row["rate"], tables.median(row["over_lowest_rate"])) for row in rows if row["system"] == system]
        (before, low), (rate, high) = each[-2:] if len(each) > 1 else 2 * each
        share = (numpy.log(DIVERGED / low) / numpy.log(high / low)) if high > max(DIVERGED, low) else 1.0
        found[system] = float(before * (rate / before) ** share)
    return found


def report(found: list[dict]) -> str:
    sessions = tables.rows(found, "sessions")
    rates = [f"{rate:.1f} of {system}" for system, rate in sustained(sessions).items()]
    for row in sessions:
        row["over"] = f"{row['rate']:.1f} a second"
    return tables.paragraphs(
        tables.table(
            "**Sixteen sessions at once, over HTTP** (HCache, Figure 9; {model}): TTFT p50 and p90, p50 over that of 03 in the same "
            "run, and p50 of TBT, by rounds a second.", {
                "system": "{system}",
                **tables.across(tables.grouped(sessions, ("system", "model"), "over"), {
                    "": "{ttft_ms[p50]:ms}, {ttft_ms[p90]:ms}; {p50_over_03:n}; {tbt_ms[p50]:ms}"}),
            }, tables.grouped(sessions, ("system", "model"), "over")),
        f"The median TTFT reaches {DIVERGED:g} times that at the lowest rate at these rounds a second: {tables.listed(rates)}." if rates else "")


PARTS = {"sessions": (sessions, ["random:long"])}


if __name__ == "__main__":
    handle_signals(interrupt)  # so that `kill` ends the servers as well
    measure.run("outside", PARTS, report, measure.parser(__doc__, PARTS).parse_args())
