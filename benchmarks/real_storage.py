"""Restore a history from storage: hidden states (04), the plan (05), and K and V (07), each in files of its own, in turn.

    python -m benchmarks.real_storage                              all; results in benchmarks/results/
    python -m benchmarks.real_storage --only disk
    python -m benchmarks.real_storage --only restored --histories 1024 --rounds 3

disk       GB/s of the disk: direct reads of 1 MiB and of 64 KiB, one at a time and eight at a time.
restored   TTFT of a question of 15 tokens behind a history that only storage has (HCache, 6.2.2: states
           against K and V from the same storage). Storage is in turn:
             dropped      this machine's disk: the files are read after the page cache was dropped
             page cache   the same files, which are in the page cache
             modelled     the same files, which arrive at one of three speeds: a layer's hidden states take
                          twice as long to read as to project, as long, and half as long
             Redis        chapter 07 alone
           Both ends (06, and 07 with examples/both_ends.py) take part where storage is not modelled.

Chapter 07 waits until all pages have arrived. Chapter 05 plans for the speed that it measures at its start,
with files that are not in the page cache. A row has the restored tokens and bytes, the read calls and the
bytes that this process has read, and the bytes that the kernel fetched from the disk for them.

A row's bound is the longer of two times: its bytes at the speed of the storage, and projecting or recomputing
its layers and answering the question. The speed of the disk is the median of five series of direct reads of
1 MiB, eight at a time; that of the page cache is one read of as many bytes. For both ends the bound is the
time until computing and reading meet, and the question. Device and host memory are the same memory here: the
modelled link between them has 100 GB/s, so that storage is what is measured. All files lie in a temporary
directory in the checkout. A row names its device and its file system; the benchmark refuses a file system in
memory.
"""

import itertools
import mmap
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from benchmarks import measure, tables
from benchmarks.measure import draw, ratio, spread
from benchmarks.planned import both_ends, engine_of, even_speed, hidden_states, links_of, planned
from benchmarks.tiered import ASKED, PAGE, forget, kind_of
from common.requests import BadRequest
from shell import backends, lesson
from shell.modelled_link import Bandwidth

SIZES, AT_ONCE, READ = {"1 MiB": 1 << 20, "64 KiB": 1 << 16}, 8, 32 << 20  # bytes; reads in flight; bytes of a sample
LINK, HISTORIES = 1e11, [512, 1024, 1984]  # bytes/s; tokens
SYSTEMS, BOTH, LIMIT_GB = ("04", "05", "07"), ("06", "07, both_ends"), 10.0
IN_MEMORY = "tmpfs", "ramfs"


# 1. The disk ------------------------------------------------------------------------------------------------

@contextmanager
def folder_on_disk():
    """Yield a temporary directory in the checkout, and which device and file system it is on. Ends if that is
    memory."""
    (ignored := measure.RESULTS / "last").mkdir(parents=True, exist_ok=True)  # by git, if the process is killed
    with tempfile.TemporaryDirectory(prefix="real-storage-", dir=ignored) as folder:
        mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
        device, _, kind = max((mount for mount in mounts if Path(mount[1]) in Path(folder).parents), key=lambda mount: len(mount[1]))
        if kind in IN_MEMORY:
            raise ValueError(f"{folder} is on {kind}, which is memory: put the checkout on a disk.")
        yield Path(folder), f"{device} ({kind})"


def drop(folder: Path):
    """Drop the files of a folder from the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)  # the kernel drops clean pages only
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def gbps(reads: list, at_once: int) -> float:
    """Call all functions, at most `at_once` at the same time. Each reads, and returns its number of bytes.

    Returns: GB/s of all together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(lambda read: read(), reads)) / 1e9 / (time.perf_counter() - began)


def read_direct(path: Path, size: int, at_once: int) -> float:
    """Read READ bytes of a file in pieces of `size` bytes, past the page cache. Returns: GB/s."""
    def read(offset: int) -> int:
        with mmap.mmap(-1, size) as buffer:  # aligned, as O_DIRECT asks
            return os.preadv(file, [buffer], offset)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return gbps([partial(read, offset) for offset in range(0, READ, size)], at_once)
    finally:
        os.close(file)


def write_file(path: Path, size: int):
    """Write `size` random bytes to a file and to the disk."""
    with open(path, "wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())


def disk(model, arguments):
    """Yield a row for each size of reads and each number of reads in flight."""
    with folder_on_disk() as (folder, device):
        write_file(large := folder / "large", READ)
        cells = [*itertools.product(SIZES, (1, AT_ONCE))]
        taken = lesson.in_turn({cell: partial(read_direct, large, SIZES[cell[0]], cell[1]) for cell in cells}, arguments.rounds)
    for name, at_once in cells:
        yield dict(device=device, size=name, at_once=at_once, direct_gbps=spread(taken[name, at_once]))


# 2. Histories that only storage has -------------------------------------------------------------------------

@contextmanager
def redis_server():
    """Context manager: start a Redis server, yield its URL, and stop it at the end. Raises OSError if
    redis-server is missing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"redis-server --bind 127.0.0.1 --port {port} --appendonly no --save".split()
    process = subprocess.Popen([*command, ""], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def cache_of(system: str, blocks: int, url: str, bandwidth: Bandwidth | None):
    """Return the Cache of a system, "CHAPTER" or "07, POLICY", over files or a Redis server, as the chapter's
    options would make it. `bandwidth`: of modelled storage."""
    chapter, _, policy = system.partition(", ")
    if chapter == "07":
        policy = policy or "wait_complete"
        return kind_of(policy)(blocks, LINK, backends.open_storage(url, {}, bandwidth), policy, threshold=PAGE)
    chunks = backends.in_directories([Path(url.removeprefix("file:"))], LIMIT_GB)
    for storage in chunks.storages:
        storage.bandwidth = bandwidth
    if chapter == "06":
        return both_ends.BidirectionalCache(chunks, memory=1e9)
    return {"04": hidden_states.HiddenCache, "05": planned.PlannedCache}[chapter](blocks, LINK, chunks)


def counted() -> dict[str, int]:
    """Return how many read calls this process has made, the bytes that they read, and the bytes that the
    kernel has fetched from disks for it."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(told[key]) for name, key in dict(reads="syscr", read_bytes="rchar", fetched="read_bytes").items()}


def once(engine, history: list[int], before, question: list[int]) -> dict:
    """Evict everything above storage, call `before`, and ask. Returns: TTFT in ms, new tokens, found tokens
    by tier, bytes over the link, and the differences of `counted`."""
    forget(engine)
    before()
    time.sleep(0.02)  # let threads that note the use of files end
    size, then = engine.counts["bytes_in"], counted()
    request = lesson.ask(engine, history + question)
    return dict(ttft_ms=request.ttft_ms, new=request.new, found=request.found, bytes=engine.counts["bytes_in"] - size,
                **{name: count - then[name] for name, count in counted().items()})  # fmt: skip


def computed(engine, history: list[int], question: list[int]) -> dict:
    """Ask an engine without a lower tier after it has evicted everything, and again while it has the
    history."""
    (alone, hit) = (lesson.ask(engine, history + question, evict=pool) for pool in ("device", ""))
    return dict(ttft_ms=alone.ttft_ms, new=alone.new, hit_ms=hit.ttft_ms)


def restored(model, arguments):
    """Yield the rows of `behind_history` for each length and each kind of storage."""
    for tokens in arguments.histories:
        with ExitStack() as stack:
            folder, device = stack.enter_context(folder_on_disk())
            draws = partial(draw, random.Random(0), model)
            plain, history = engine_of(model, tokens // PAGE + 2 * PAGE), draws(tokens)
            stack.callback(plain.close)
            write_file(large := folder / "large", READ)
            speed = 1e9 * statistics.median(read_direct(large, SIZES["1 MiB"], AT_ONCE) for _ in range(5))
            behind = partial(behind_history, plain, history, draws, arguments.rounds, folder)
            same, even = dict(history_tokens=tokens, device=device), even_speed(model)
            yield from behind(same, (*SYSTEMS, *BOTH), {"dropped": speed, "page cache": None})
            for words, share in links_of(model).items():
                place = f"modelled, {words.replace('the link', 'storage')}"
                yield from behind(same, SYSTEMS, {place: even / share}, Bandwidth(even / share))
            try:
                with redis_server() as url:
                    yield from behind(same, ("07", "07, both_ends"), {"Redis": None}, url=url)
            except (OSError, BadRequest) as reason:
                yield dict(same, system="07", place="Redis", skipped=str(reason))


def behind_history(plain, history, draws, rounds: int, folder: Path, same: dict, systems, places: dict, bandwidth=None, url=""):
    """Yield a row for each system and each place of its files, all asked in turn with `plain`, which computes.

    `same`: fields of all rows. `places`: name -> bytes/s of the storage, None for that of one read from the
    page cache. `bandwidth`: of modelled storage. `url`: of a server, in place of files in `folder`."""
    model, tokens, layers = plain.model, len(history), len(plain.model.layers)
    blocks = tokens // PAGE + 2 * PAGE
    with ExitStack() as stack:
        ways, engines = {"computed": partial(computed, plain, history)}, {}
        for system in systems:
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            engines[system] = engine = engine_of(model, blocks, cache_of(system, 2 * blocks, url or f"file:{own}", bandwidth), always=True)
            stack.callback(engine.close)
            lesson.ask(engine, history + draws(1))
            lesson.wait_until_idle(engine)
            for place in places:
                ways[system, place] = partial(once, engine, history, partial(drop, own) if place == "dropped" else lambda: None)
        taken = measure.same_question_in_turn(ways, rounds, partial(draws, ASKED))
        projecting = 1e3 * engines["04"].lower_tier.cache.seconds_to_project(tokens) if "04" in engines else 0.0
        plans = {"04": "R" + "H" * (layers - 1), "07": "K" * layers}
        plans |= {name: engine.lower_tier.cache.letters for name, engine in engines.items() if name == "05"}
    measure.check_alike(model, {name: [found["new"] for found in each] for name, each in taken.items()})
    without, median = taken.pop("computed"), statistics.median
    alone, hit = ([found[what] for found in without] for what in ("ttft_ms", "hit_ms"))
    ttft = {way: [one["ttft_ms"] for one in each] for way, each in taken.items()}
    for (system, place), found in taken.items():
        counts = {what: median(one[what] for one in found) for what in ("bytes", "reads", "read_bytes", "fetched")}
        speed = places[place] or one_read(folder, int(counts["bytes"]))
        plan = plans.get(system, "")
        yield dict(
            same, system=system, place=place, speed_gbps=speed / 1e9, is_slower=speed < 0.9 * even_speed(model), plan=plan, **counts,
            found=max((one["found"] for one in found), key=lambda tiers: sum(tiers.values())),
            restored=median(sum(one["found"].values()) for one in found),
            ttft_ms=spread(ttft[system, place]), computed_ms=spread(alone), hit_ms=spread(hit),
            **lanes_ms(model, system, plan, tokens, counts["bytes"], speed, projecting, min(alone), min(hit)),  # noise only slows
            over_computing=ratio(ttft[system, place], alone),
            sooner_than={other: ratio(ttft[other, place], ttft[system, place]) for other in SYSTEMS if (other, place) in ttft})  # fmt: skip


def one_read(folder: Path, size: int) -> float:
    """Return the bytes/s of one read of `size` bytes from the page cache into memory of the caller."""
    write_file(path := folder / "one", max(1, size))
    memory, seconds = bytearray(size), []
    with open(path, "rb", buffering=0) as file:
        for _ in range(5):
            began = time.perf_counter()
            os.preadv(file.fileno(), [memory], 0)
            seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def lanes_ms(model, system: str, plan: str, tokens: int, size: float, speed: float, project: float, alone: float, hit: float) -> dict:
    """Return for how many ms a restoration reads, and projects or recomputes its layers; and its bound.

    `size`: bytes that it reads, at `speed` bytes/s. `project`: ms to project a layer. `alone`, `hit`: TTFT in
    ms of computing, and with the history on the device. The last recomputed layer is only projected."""
    recomputed, whole = plan.count("R"), 1e3 * tokens * model.config.kv_numbers_per_token * model.dtype.itemsize / speed
    reading = 1e3 * size / speed
    projecting = (plan.count("H") + (recomputed > 0)) * project + max(0, recomputed - 1) * alone / len(model.layers)
    bound = max(reading, projecting + hit)
    if system in BOTH:
        bound = hit + both_ends.time_to_meet(whole, max(1e-3, alone - hit))[0]
    return dict(reading_ms=reading, projecting_ms=projecting, bound_ms=bound)


PARTS = {part.__name__: (part, ["random:long"]) for part in (disk, restored)}


# 3. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    rows = tables.rows(found, "restored")
    skipped = [f"Redis is left out: {row['skipped']}." for row in rows if "skipped" in row]
    rows = [row for row in rows if "skipped" not in row]
    for row in rows:
        row["source"] = ", ".join(tier for tier, count in row["found"].items() if count) or "none"
        row["of_bound"] = row["ttft_ms"]["median"] / row["bound_ms"]
    places, each = tables.grouped(rows, ("model", "history_tokens", "place"), "system"), {"TTFT": "{ttft_ms:ms}"}
    name = {"model, history": "{model}, {history_tokens:,}", "from": "{place}"}
    return tables.paragraphs(
        tables.table("**The disk**, {device}, in GB/s: direct reads of one file:", {
            "reads of": "{size}", "at a time": "{at_once}", "GB/s": "{direct_gbps:spread}",
        }, tables.rows(found, "disk")),
        tables.table(
            "**States against K and V from the same storage** (HCache, 6.2.2: K and V take 2.09 to 2.66 times as long as its plan "
            "from one SSD for each A100): TTFT, and that of K and V (07) over that of hidden states (04) and of the plan (05):", {
                **name, "computing": "{computed_ms:ms}", **tables.across(places, each),
                "07 / 04": "{at[04][sooner_than][07]:spread}", "07 / 05": "{at[05][sooner_than][07]:spread}",
                "04 / 05": "{at[05][sooner_than][04]:spread}",
            }, places),
        tables.table(
            "**What each has read**: restored tokens and bytes, the process's read calls and their bytes, and bytes that the kernel "
            "fetched from the disk; the time of the bytes at the storage's speed, that of projecting, and TTFT over its bound and over "
            "computing:", {
                **name, "system": "{system}", "plan": "{plan:plan}", "tokens": "{restored:,.0f} ({source})", "bytes": "{bytes:MB}",
                "calls": "{reads:,.0f}, {read_bytes:MB}", "fetched": "{fetched:MB}", "at GB/s": "{speed_gbps:n}",
                "reading": "{reading_ms:ms}", "projecting": "{projecting_ms:ms}", "over the bound": "{of_bound:n}",
                "over computing": "{over_computing:spread}",
            }, rows), *skipped)  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=int, nargs="+", default=HISTORIES, help="tokens")
    measure.run("real_storage", PARTS, report, parser.parse_args())
