"""What this process may use of memory and processors, by the machine, its control groups and `ulimit`.

Where a system tells nothing (macOS has no control groups, and no /proc), nothing is limited."""
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path("/")        # of /proc and /sys
# Version 2 and 1 of control groups: files with the limit and the use of memory, and the beginning of lines in
# memory.stat with the part of this use that holds files, which the kernel takes back
MEMORY = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
SIZES = "gpu_blocks", "cpu_blocks", "hicache_size", "hicache_ratio", "blocks", "mini_batch", "token_budget"
SHORT = re.compile("MemoryError|allocate memory|out of memory|enough memory|bad_alloc|start new thread")


def numbers(folder: Path, *names: str, pattern: str = r"-?\d+") -> list[int]:
    """Return what matches in files of a folder, as numbers; none of a file that is not there."""
    found = []
    for name in names:
        with suppress(OSError):
            found += map(int, re.findall(pattern, (folder / name).read_text(), re.MULTILINE))
    return found


def groups(controller: str):
    """Yield the folders of this process's control groups, in both versions, and all that contain them."""
    with suppress(OSError):
        lines = (ROOT / "proc/self/cgroup").read_text()
        for named, path in re.findall(rf"^\d+:(|[^:\n]*\b{controller}\b[^:\n]*):/?(.*)", lines, re.MULTILINE):
            folder = ROOT / "sys/fs/cgroup" / (named and controller) / path
            yield from (folder, *folder.parents)


def free_host_memory() -> float:
    """Return the bytes that can still be allocated; infinite where nothing limits them."""
    free = [1024 * size for size in numbers(ROOT, "proc/meminfo", pattern=r"^MemAvailable: +(\d+)")]
    for folder in groups("memory"):
        for limit, used, kind in MEMORY:
            if len(found := numbers(folder, limit, used)) == 2:         # and the limit is not "max"
                files = numbers(folder, "memory.stat", pattern=rf"^{kind}(?:in)?active_file (\d+)")
                free.append(found[0] - found[1] + sum(files))
    if pages := numbers(ROOT, "proc/self/statm"):
        for kind, used in (resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5]):
            if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                free.append(limit - used * resource.getpagesize())
    return max(0, min(free, default=float("inf")))


def limit_threads():
    """Give PyTorch no more threads than the control groups give this process processors, at least one.
    More would be stopped together for the rest of each period. OMP_NUM_THREADS has the say."""
    for folder in groups("cpu"):
        for names in ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"):   # microseconds in each period
            if len(found := numbers(folder, *names)) == 2 and found[0] > 0:     # neither "max" nor -1
                if "OMP_NUM_THREADS" not in os.environ:
                    torch.set_num_threads(max(1, min(torch.get_num_threads(), found[0] // found[1])))


def shortage(error: Exception, options: dict) -> str | None:
    """Return a sentence that says what to make smaller if an allocation has failed. PyTorch and safetensors
    say so only in words. `options`: of the command line."""
    if SHORT.search(f"{type(error).__name__}: {error}"):
        smaller = ["--model", *(f"--{name.replace('_', '-')}" for name in SIZES if name in options)]
        return f"Memory is short here; make {', '.join(smaller)} smaller, or take a 16-bit --dtype."
