"""Find how much memory and how many processors this process may use, and how much one call should read.

The machine, its control groups and `ulimit` set limits. A limit that a system does not report counts as none;
macOS, for example, has no control groups and no /proc."""
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path("/")        # the folder of proc and sys
# For version 2 and version 1 of control groups: the file with the limit, the file with the memory in use, and
# the prefix of lines in memory.stat. Those lines say how much of the memory in use is page cache, which the
# kernel can reclaim.
MEMORY = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
SIZES = "gpu_blocks", "cpu_blocks", "hicache_size", "hicache_ratio", "blocks", "mini_batch", "token_budget"
SHORT = re.compile("MemoryError|allocate memory|out of memory|enough memory|bad_alloc|start new thread")


def numbers(folder: Path, *names: str, pattern: str = r"-?\d+") -> list[int]:
    """Return all numbers in the files `names` of a folder that match `pattern`; a missing file has none."""
    found = []
    for name in names:
        with suppress(OSError):
            found += map(int, re.findall(pattern, (folder / name).read_text(), re.MULTILINE))
    return found


def groups(controller: str):
    """Yield the folders of this process's control groups, in both versions, and all their parent folders."""
    with suppress(OSError):
        lines = (ROOT / "proc/self/cgroup").read_text()
        for named, path in re.findall(rf"^\d+:(|[^:\n]*\b{controller}\b[^:\n]*):/?(.*)", lines, re.MULTILINE):
            folder = ROOT / "sys/fs/cgroup" / (named and controller) / path
            yield from (folder, *folder.parents)


def free_host_memory() -> float:
    """Return the bytes that can still be allocated, or infinity if there is no limit."""
    free = [1024 * size for size in numbers(ROOT, "proc/meminfo", pattern=r"^MemAvailable: +(\d+)")]
    for folder in groups("memory"):
        for limit, used, kind in MEMORY:
            if len(found := numbers(folder, limit, used)) == 2:         # the limit may be "max", not a number
                files = numbers(folder, "memory.stat", pattern=rf"^{kind}(?:in)?active_file (\d+)")
                free.append(found[0] - found[1] + sum(files))
    if pages := numbers(ROOT, "proc/self/statm"):
        for kind, used in (resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5]):
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                free.append(limit - used * resource.getpagesize())
    return max(0, min(free, default=float("inf")))


def pad_limits(device: torch.device) -> tuple[int, int]:
    """Return the limits of chapter 02's groups of contexts, in bytes of K and V in one layer.

    A context of at least the first number is read alone, because padding the others to its length costs more
    than another call. A group, with its padding, has at most the second number. Then it is still in a
    processor's cache when attention reads it. A GPU has no such limit. The numbers of processors were
    measured on an AMD EPYC, and on an Intel Xeon with tiles (AMX) in float32 and bfloat16."""
    if device.type == "cuda":
        return 1 << 24, 1 << 62
    return (4 << 20, 16 << 20) if torch.cpu._is_amx_tile_supported() else (1 << 20, 4 << 20)


def limit_threads():
    """Limit PyTorch's threads to the processors that the control groups grant, but at least one.

    With more threads, the kernel would stop all of them for the rest of each scheduling period. If
    OMP_NUM_THREADS is set, change nothing."""
    for folder in groups("cpu") if "OMP_NUM_THREADS" not in os.environ else ():
        # Quota and period in microseconds: in one file (version 2) or in two (version 1)
        found = numbers(folder, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if len(found) == 2 and found[0] > 0:        # neither "max" nor -1
            torch.set_num_threads(max(1, min(torch.get_num_threads(), found[0] // found[1])))


def shortage(error: Exception, options: dict) -> str | None:
    """Return a sentence that tells the user what to make smaller, if `error` is a failed allocation.

    It is recognized by its message, because PyTorch and safetensors have no class for it. `options`: the
    options of the command line. Returns: None for any other error."""
    if SHORT.search(f"{type(error).__name__}: {error}"):
        smaller = ["--model", *(f"--{name.replace('_', '-')}" for name in SIZES if name in options)]
        return f"There is not enough memory; make {', '.join(smaller)} smaller, or choose a 16-bit --dtype."
