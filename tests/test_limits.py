"""shell/limits.py: how much memory and how many processors the machine, its control groups and `ulimit` leave."""
import resource

import pytest
import torch

from shell import limits

MACHINE = {"proc/meminfo": "MemTotal:  99999 kB\nMemAvailable:   4000 kB\nSwapFree:   7 kB\n"}
GROUP, FREE = "sys/fs/cgroup/", 4000 * 1024
V1 = {"proc/self/cgroup": "9:name=systemd:/memory\n4:memory:/a/b\n3:cpuset:/c\n2:cpu,cpuacct:/a\n1:pids:/\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}
FILES = "anon 1000\nfile 9999\ninactive_file 300\nactive_file 70\ntotal_inactive_file 600\ntotal_active_file 400\n"


def memory(limit, used: int, folder: str = "a/b/") -> dict[str, str]:
    """Return the files of a control group of version 2, with a limit and the memory in use, in bytes."""
    return {f"{GROUP}{folder}memory.max": f"{limit}\n", f"{GROUP}{folder}memory.current": f"{used}\n"}


def memory_1(limit: int, used: int, folder: str = "a/b/") -> dict[str, str]:
    return {f"{GROUP}memory/{folder}memory.{name}_in_bytes": f"{size}\n" for name, size in dict(limit=limit, usage=used).items()}


def share(quota, period=100_000) -> dict[str, str]:
    return V2 | {f"{GROUP}a/cpu.max": f"{quota} {period}\n"}


def share_1(quota) -> dict[str, str]:
    return V1 | {f"{GROUP}cpu/a/cpu.cfs_{name}_us": f"{us}\n" for name, us in dict(quota=quota, period=50_000).items()}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def write(files: dict[str, str]):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    return write


@pytest.mark.parametrize("files, free", [
    ({}, float("inf")), (MACHINE, FREE), (MACHINE | V2, FREE), (MACHINE | V1, FREE),
    (MACHINE | V2 | memory("max", 10), FREE), (MACHINE | V1 | memory_1(9223372036854771712, 10), FREE),
    (MACHINE | V2 | memory(5000, 2000), 3000), (MACHINE | V1 | memory_1(5000, 2000), 3000), (memory(5000, 2000), float("inf")),
    (V2 | memory("max", 9) | memory(8000, 100, "a/") | memory(9000, 5000, ""), 4000),     # limits of parent groups count, too
    (V1 | memory_1(8000, 6000, ""), 2000),                  # a container that sees its own group as the root
    (V2 | memory(5000, 4900) | {f"{GROUP}a/b/memory.stat": FILES}, 470),      # the kernel can reclaim the page cache
    (V1 | memory_1(5000, 4900) | {f"{GROUP}memory/a/b/memory.stat": FILES}, 1100),
    (V2 | memory(5000, 6000), 0),
])  # fmt: skip
def test_the_tightest_limit_decides_the_free_memory(machine, files, free):
    machine(files)
    assert limits.free_host_memory() == free


@pytest.mark.parametrize("kind, field", [(resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)])
def test_ulimit_limits_the_free_memory(kind, field):
    before, page = resource.getrlimit(kind), resource.getpagesize()
    used = int(open("/proc/self/statm").read().split()[field]) * page
    try:
        resource.setrlimit(kind, (used + 10**9, before[1]))
        assert abs(limits.free_host_memory() - 10**9) < 10**8
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("files, threads", [
    ({}, 8), (V2, 8), (share("max"), 8), (share(300_000), 3), (share(250_000), 2), (share(20_000), 1), (share(900_000), 8),
    (share_1(-1), 8), (share_1(100_000), 2), (share(300_000) | {f"{GROUP}cpu.max": "200000 100000\n"}, 2),
])  # fmt: skip
@pytest.mark.parametrize("says", [None, "7"])
def test_pytorch_gets_at_most_as_many_threads_as_its_group_has_processors(machine, monkeypatch, files, threads, says):
    machine(files)
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: given.append(count))
    monkeypatch.setenv("OMP_NUM_THREADS", says) if says else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = [8]
    limits.limit_threads()
    assert given[-1] == (8 if says else threads)
