"""Restore a history from this machine's own disk (chapters 04 to 07) and from Redis (07), beside computing it.

    python -m benchmarks.real_storage                              all; results in benchmarks/results/
    python -m benchmarks.real_storage --only disk
    python -m benchmarks.real_storage --model classroom --histories 1024 1900

disk       GB/s of the disk: direct reads of one large file, and reads of whole files after the page cache was
           dropped; of 1 MiB and of 64 KiB, one at a time and eight at a time.
restored   TTFT of a question of 15 tokens behind a history that only storage has, with each chapter, and in
           chapter 07 with each prefetch policy. The files are read after the page cache was dropped, and
           again while they are in the page cache. The same code also reads modelled storage that has the
           disk's speed. Each row has the restored tokens and bytes, and the bytes that the kernel fetched
           from the disk for them.

The disk's speed is the median of eight direct reads of 1 MiB at a time. A row's bound follows from it, from
the bytes of the row, and from the time of the same question with the history on the device. Device and host
memory are the same memory here: the modelled link between them has 100 GB/s, so that storage is what is
measured. All files lie in a temporary directory in the checkout. A row names its device and its file system;
the benchmark refuses a file system in memory.
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
from benchmarks.planned import both_ends, engine_of, hidden_states, planned
from benchmarks.tiered import ASKED, PAGE, POLICIES, forget, kind_of
from common.requests import BadRequest
from common.store import Storage
from shell import backends, lesson, modelled_link
from shell.chunks import StoredChunks

SIZES, AT_ONCE, READ = {"1 MiB": 1 << 20, "64 KiB": 1 << 16}, 8, 32 << 20  # bytes; reads in flight; bytes of a sample
LINK = 1e11  # bytes/s
SYSTEMS = "04", "05", "06", *(f"07, {policy}" for policy in POLICIES)
IN_REDIS = "07, wait_complete", "07, both_ends"
BOTH = "06", "07, both_ends"
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
    for path in folder.iterdir():
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


def read_files(folder: Path, at_once: int) -> float:
    """Drop the files of a folder from the page cache, and read each whole. Returns: GB/s."""
    drop(folder)
    return gbps([lambda path=path: len(path.read_bytes()) for path in folder.iterdir()], at_once)


def write_file(path: Path, size: int):
    """Write `size` random bytes to a file and to the disk."""
    with open(path, "wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())


def disk(model, arguments):
    """Yield a row for each size of reads and each number of reads in flight."""
    with folder_on_disk() as (folder, device):
        write_file(large := folder / "large", READ)
        ways = {}
        for (name, size), at_once in itertools.product(SIZES.items(), (1, AT_ONCE)):
            if not (small := folder / name).exists():
                small.mkdir()
                for number in range(READ // size):
                    write_file(small / f"{number}", size)
            ways["direct", name, at_once] = partial(read_direct, large, size, at_once)
            ways["files", name, at_once] = partial(read_files, small, at_once)
        taken = lesson.in_turn(ways, arguments.rounds)
    for name, at_once in itertools.product(SIZES, (1, AT_ONCE)):
        yield dict(device=device, size=name, at_once=at_once, direct_gbps=spread(taken["direct", name, at_once]),
                   files_gbps=spread(taken["files", name, at_once]))  # fmt: skip


# 2. Histories that only storage has -------------------------------------------------------------------------

class Memory:
    """A storage back end that is a dictionary. `Storage` gives it the disk's speed."""

    def __init__(self):
        self.index = {}

    def exists(self, keys):
        return [key in self.index for key in keys]

    def get(self, keys):
        return [self.index.get(key) for key in keys]

    def set(self, keys, values):
        self.index.update(zip(keys, values))


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


def cache_of(system: str, blocks: int, storage: Storage):
    """Return the Cache of a system, "CHAPTER" or "07, POLICY", over a storage."""
    chapter, _, policy = system.partition(", ")
    if chapter == "07":
        return kind_of(policy)(blocks, LINK, storage, policy, threshold=PAGE)
    if chapter == "06":
        return both_ends.BidirectionalCache(StoredChunks(storage), memory=1e9)
    return {"04": hidden_states.HiddenCache, "05": planned.PlannedCache}[chapter](blocks, LINK, StoredChunks(storage))


def fetched() -> int:
    """Return how many bytes the kernel has fetched from disks for this process."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def once(engine, history: list[int], before, question: list[int]) -> dict:
    """Evict everything above storage, call `before`, and ask. Returns: TTFT in ms, new tokens, found tokens
    by tier, and the bytes fetched from the disk and over the link."""
    forget(engine)
    before()
    time.sleep(0.02)  # let threads that note the use of files end
    size, disk = engine.counts["bytes_in"], fetched()
    request = lesson.ask(engine, history + question)
    return dict(ttft_ms=request.ttft_ms, new=request.new, found=request.found, fetched=fetched() - disk,
                bytes=engine.counts["bytes_in"] - size)  # fmt: skip


def computed(engine, history: list[int], question: list[int]) -> dict:
    """Ask an engine without a lower tier after it has evicted everything, and again while it has the
    history."""
    (alone, hit) = (lesson.ask(engine, history + question, evict=pool) for pool in ("device", ""))
    return dict(ttft_ms=alone.ttft_ms, new=alone.new, hit_ms=hit.ttft_ms)


def restored(model, arguments):
    """Yield the rows of `behind_history` for each length."""
    for tokens in arguments.histories or [1024]:
        with ExitStack() as stack:
            yield from behind_history(model, arguments.rounds, tokens, stack)


def behind_history(model, rounds: int, tokens: int, stack: ExitStack):
    """Yield a row for each system and each place of its files. `stack` closes the engines and removes the
    files."""
    draws, blocks = partial(draw, random.Random(0), model), tokens // PAGE + 2 * PAGE
    history, (folder, device) = draws(tokens), stack.enter_context(folder_on_disk())
    write_file(large := folder / "large", READ)
    speed = 1e9 * statistics.median(read_direct(large, SIZES["1 MiB"], AT_ONCE) for _ in range(5))
    plain, nothing = engine_of(model, blocks), lambda: None
    stack.callback(plain.close)
    ways, engines = {"computed": partial(computed, plain, history)}, {}

    def add(system: str, place: str, storage: Storage, places: dict):
        """Save the history in a storage of its own. `places`: name -> function that is called before each ask
        there."""
        engine = engine_of(model, blocks, cache_of(system, 2 * blocks, storage), always=True)
        stack.callback(engine.close)
        lesson.ask(engine, history + draws(1))
        lesson.wait_until_idle(engine)
        for name, before in places.items():
            ways[system, name], engines[system, name] = partial(once, engine, history, before), engine

    for system in SYSTEMS:
        (own := folder / system).mkdir()
        files = Storage(backends.open_backend(f"file:{own}", {}), device)
        add(system, device, files, {"dropped": partial(drop, own), "page cache": nothing})
        add(system, device, Storage(Memory(), "modelled", modelled_link.Bandwidth(speed)), {"modelled": nothing})
    try:
        url = stack.enter_context(redis_server())
        for system in IN_REDIS:
            add(system, "Redis", Storage(backends.open_backend(url, {}), "Redis"), {"Redis": nothing})
    except (OSError, BadRequest) as reason:
        yield dict(history_tokens=tokens, system=IN_REDIS[0], place="Redis", skipped=str(reason))

    taken = measure.same_question_in_turn(ways, rounds, partial(draws, ASKED))
    measure.check_alike(model, {name: [found["new"] for found in each] for name, each in taken.items()})
    alone, hit = ([found[what] for found in taken["computed"]] for what in ("ttft_ms", "hit_ms"))
    for (system, place), engine in engines.items():
        found, like = taken[system, place], taken[system, "modelled"]
        ttft, size = [one["ttft_ms"] for one in found], statistics.median(one["bytes"] for one in found)
        yield dict(
            history_tokens=tokens, system=system, place=place, device=device, speed_gbps=speed / 1e9, bytes=size,
            found=max((one["found"] for one in found), key=lambda tiers: sum(tiers.values())),
            restored=statistics.median(sum(one["found"].values()) for one in found),
            fetched=statistics.median(one["fetched"] for one in found), plan=getattr(engine.lower_tier.cache, "letters", ""),
            ttft_ms=spread(ttft), computed_ms=spread(alone), hit_ms=spread(hit), over_computing=ratio(ttft, alone),
            over_modelled=ratio(ttft, [one["ttft_ms"] for one in like]),
            bound_ms=bound_ms(model, system, tokens, size, speed, statistics.median(alone), statistics.median(hit)))  # fmt: skip


def bound_ms(model, system: str, tokens: int, size: float, speed: float, alone: float, hit: float) -> float:
    """Return the least TTFT in ms that storage of `speed` bytes/s allows.

    All bytes arrive, and one layer's share of the question follows. A system that also computes the history
    of `tokens` from the front needs the time until both ends meet, and the whole question follows. `size`:
    bytes that it reads; `alone`, `hit`: TTFT in ms of computing, and with the history on the device."""
    if system in BOTH:
        whole = 1e3 * tokens * model.config.kv_numbers_per_token * model.dtype.itemsize / speed
        return hit + both_ends.time_to_meet(whole, max(1e-3, alone - hit))[0]
    return max(hit, 1e3 * size / speed + hit / len(model.layers))


PARTS = {part.__name__: (part, ["random:long"]) for part in (disk, restored)}


# 3. The tables ----------------------------------------------------------------------------------------------

def report(found: list[dict]) -> str:
    rows = tables.rows(found, "restored")
    skipped = [f"Redis is left out: {row['skipped']}." for row in rows if "skipped" in row]
    rows = [row for row in rows if "skipped" not in row]
    for row in rows:
        row["source"] = ", ".join(tier for tier, count in row["found"].items() if count) or "none"
        row["of_bound"] = row["ttft_ms"]["median"] / row["bound_ms"]
    systems = tables.grouped(rows, ("model", "history_tokens", "system"), "place")
    name = {"model, history": "{model}, {history_tokens:,}", "system": "{system}"}
    return tables.paragraphs(
        tables.table("**The disk**, {device}, in GB/s: direct reads of one file, and reads of whole files:", {
            "reads of": "{size}", "at a time": "{at_once}", "direct": "{direct_gbps:spread}", "files": "{files_gbps:spread}",
        }, tables.rows(found, "disk")),
        tables.table("**TTFT behind a history that only storage has**, and its ratio over computing; the disk reads {speed_gbps:n} GB/s:", {
            **name, "computing": "{computed_ms:ms}",
            **tables.across(systems, {"TTFT": "{ttft_ms:ms}", "over computing": "{over_computing:spread}"}),
        }, systems),
        tables.table("**Restored tokens and bytes**, and bytes that the kernel fetched from the disk for them; TTFT over that from modelled storage, "
                     "and over the bound:", {
            **name, "from": "{place}", "tokens": "{restored:,.0f} ({source})", "bytes": "{bytes:MB}", "fetched": "{fetched:MB}",
            "plan": "{plan:plan}", "over modelled": "{over_modelled:spread}", "over the bound": "{of_bound:n}",
        }, rows), *skipped)  # fmt: skip


if __name__ == "__main__":
    parser = measure.parser(__doc__, PARTS, rounds=5)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens")
    measure.run("real_storage", PARTS, report, parser.parse_args())
