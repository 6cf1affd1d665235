"""The link without CUDA: contents and order of copies, modelled times, failures, and measured speeds."""

import argparse
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from conftest import ROOT

from common import link as links
from common.link import BlockPairs, TransferError
from common.timeline import Clock
from shell import hardware, workers
from shell.modelled_link import LATENCY, PIECE, Bandwidth, LikeA100, ModelledLink
from shell.workers import Worker
from tests.support.engines import tiers, tiny_model
from tests.support.serving import eventually
from tests.support.unordered import pageable

FAST = 1e12  # bytes/s: copies complete at once
HOURS = 1.0


def make(bandwidth=FAST, lane="load", **options) -> ModelledLink:
    return ModelledLink(lane, Clock("cpu"), bandwidth, **options)


def pattern(*shape, dtype=torch.float32):
    """Return a tensor of random bits, which may be any value, NaNs included."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def numbered(size: int):
    """Return `size` zeros as a destination, and `size` ones as a source."""
    return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


# 1. Contents ----------------------------------------------------------------------------------

VIEWS = {
    "whole": lambda t: t,
    "a slice": lambda t: t[1:4],
    "every other": lambda t: t[::2, 1:],
    "a layer of host blocks": lambda t: t[1:4, 3].transpose(0, 1),
    "one block of all layers": lambda t: t[:, :, 2],
    "backwards": lambda t: t.permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_copied_bit_by_bit_in_one_transfer(dtype, view):
    view, whole, other = VIEWS[view], pattern(6, 4, 5, 8, dtype=dtype), pattern(6, 4, 5, 8, dtype=dtype)
    expected = whole.clone()
    view(expected).copy_(view(other))
    out = torch.empty_like(view(other)).contiguous()
    transfer = make().copy([view(whole), out], [view(other)] * 2, "layer 3")
    transfer.wait(30)
    assert (transfer.lane, transfer.label, transfer.bytes) == ("load", "layer 3", 2 * out.nbytes)
    assert torch.equal(bits(whole), bits(expected)), "nothing else is written"
    assert torch.equal(bits(out), bits(view(other)))


# 2. Times -------------------------------------------------------------------------------------


def test_transfers_of_a_lane_follow_each_other_at_the_modelled_speed():
    link, sizes = make(HOURS), (400, 10_000, 0, 7000)
    transfers = [link.copy(*numbered(size), str(size)) for size in sizes]
    make(lane="save").copy(*numbered(8), "another lane").wait(30)
    with pytest.raises(TransferError, match="400 is late"):
        transfers[0].wait(0.01)
    assert not transfers[0].ready and transfers[0].queue_wait() is False, "a modelled copy cannot be ordered on a stream, so the host must wait"
    link.close()  # copies that would take hours complete now
    transfers[-1].wait(30)
    assert all(transfer.ready for transfer in transfers)
    spans = [transfer.span() for transfer in transfers]
    for (start, end), size in zip(spans, sizes):
        assert end - start == pytest.approx(LATENCY + (size > 0) * PIECE + size / HOURS, abs=1e-7)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]], "a transfer begins when the one before ends"


@pytest.mark.parametrize("size, hangs", [(10_000, True), (10**9, False)])  # bytes: a job may take a second for each 2 MB
def test_a_lane_hangs_if_its_job_is_too_slow_for_its_size_but_not_if_only_the_model_delays_it(size, hangs, monkeypatch):
    monkeypatch.setattr("shell.workers.HANG_SECONDS", 0.01)
    lane, begun, gate = Worker("storage"), threading.Event(), threading.Event()
    transfer = lane.submit("", size, lambda: (begun.set(), gate.wait()), model=lambda start: start + 3600 * HOURS)
    assert begun.wait(30)
    time.sleep(0.05)
    hung = lane.hangs
    gate.set()
    eventually(lambda: lane.began[0] == float("inf"))  # the job has ended, not the model
    assert hung == hangs and not lane.hangs and not transfer.ready
    lane.close()


@pytest.mark.parametrize("bandwidth, size", [(1e5, 10), (1e5, 2000), (1e18, 1 << 25)])
def test_a_copy_takes_the_modelled_time_but_no_less_than_copying_memory(bandwidth, size):
    transfer = (link := make(bandwidth)).copy(*numbered(size), "")
    transfer.wait(30)
    start, end = transfer.span()
    assert start == transfer.issued and end - start >= (LATENCY + size / min(bandwidth, 1e12)) * (1 - 1e-9)
    assert time.perf_counter() >= end and link.speed() == bandwidth


# 3. Failures -----------------------------------------------------------------------------------

WRONG = {
    "would be broadcast": (torch.zeros(4, 4), torch.zeros(4)),
    "more pieces": ([torch.zeros(4)], [torch.zeros(4)] * 2),
    "pieces of other shapes": ([torch.zeros(4), torch.zeros(3)], [torch.zeros(3), torch.zeros(4)]),
    "a dtype of the same size": (torch.zeros(4), torch.ones(4, dtype=torch.int32)),
    "memory that is none": (torch.zeros(4), torch.zeros(4, device="meta")),
    "one piece of it": ([torch.zeros(4)] * 2, [torch.zeros(4), torch.zeros(4, device="meta")]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_copy_fails_its_transfer_and_not_the_lane(wrong):
    link, (dst, src) = make(), numbered(8)
    bad, good = link.copy(*WRONG[wrong], "layer 5"), link.copy(dst, src, "layer 6")
    good.wait(30)
    assert bad.ready and bad.error is not None and dst.all()
    for _ in range(2):
        with pytest.raises(TransferError, match="layer 5 failed"):
            bad.wait()
    start, end = bad.span()
    assert start <= end and not any(piece.any() for piece in WRONG[wrong][0])


def test_a_transfer_that_completes_or_fails_wakes_the_sleeper():
    link = make(1e6, wake=(woken := threading.Semaphore(0)).release)
    for dst, src in (torch.zeros(4), torch.zeros(5)), numbered(5000):  # the first copy is refused
        transfer = link.copy(dst, src, "")
        assert woken.acquire(timeout=30) and transfer.completed.wait(30)


# 4. Measured speeds -------------------------------------------------------------------------


def test_a_lane_measures_its_speed_from_completed_transfers_and_a_modelled_link_keeps_its_own():
    lane, link = Worker("storage"), make(1e9)
    lane.submit("fails", 10**12, lambda: 1 / 0).completed.wait(30)
    (transfer := lane.submit("", 10**6, time.sleep, 1e-3)).wait(30)
    start, end = transfer.span()
    assert lane.speed() == transfer.bytes / (end - start)
    link.copy(*numbered(1 << 16), "").wait(30)
    assert link.speed() == 1e9


def test_seconds_include_queued_transfers_but_no_cancelled_ones():
    link = make(HOURS)
    assert link.seconds(500) == LATENCY + 500 / HOURS
    for size in (10, 200, 3000):
        last = link.copy(*numbered(size), "queued")
    link.copy(*numbered(9000), "nobody needs it").cancel()
    assert link.seconds(500) == LATENCY + 3710 / HOURS
    link.close()
    last.wait(30)
    assert link.seconds(500) == LATENCY + 500 / HOURS


# 5. The modelled speed ------------------------------------------------------------------------


def test_the_option_link_sets_the_speed_or_is_refused(capsys):
    parser = argparse.ArgumentParser()
    hardware.add_link(parser)
    words = [], ["--link=2.5"], ["--link=0.1:2:0.5@0.3"]
    auto, asked, trace = (hardware.bandwidth(tiny_model(), parser.parse_args(each).link) for each in words)
    assert isinstance(auto, LikeA100) and 1e5 < auto.value < 1e14 and asked.value == 2.5e9
    assert str(make(asked)) == str(asked) == "modelled link, 2.5 GB/s" and "as for an A100" in str(make(auto))
    assert (trace.values, trace.seconds) == ((1e8, 2e9, 5e8), 0.3)
    for word in "0", "-1", "nan", "inf", "fast", "", "AUTO", "1e7", "1e-10", "1 GB/s", "0.1:", ":0.1", "0.1:1@", "0.1:1@0":
        with pytest.raises(SystemExit):
            parser.parse_args([f"--link={word}"])
        assert "--link" in capsys.readouterr().err


# 6. Memory on the host -------------------------------------------------------------------------


def test_host_memory_is_not_pinned_without_a_gpu_or_if_pinning_fails(capsys):
    memory = links.host_memory((2, 3), torch.bfloat16, torch.device("cpu"), "The host pool")
    assert (memory.shape, memory.dtype, memory.device.type) == ((2, 3), torch.bfloat16, "cpu")
    assert not memory.is_pinned() and not capsys.readouterr().err
    with pageable():
        assert links.host_memory((2, 3), torch.float32, torch.device("cuda"), "The host pool").shape == (2, 3)
    assert capsys.readouterr().err.startswith("The host pool cannot be pinned (no memory):")


@pytest.mark.parametrize("to, at, runs", [
    ([], [], []), ([4], [9], [(4, 9, 1)]), ([4, 5, 6], [9, 10, 11], [(4, 9, 3)]),
    ([4, 5, 6], [9, 11, 12], [(4, 9, 1), (5, 11, 2)]), ([4, 6, 7], [9, 10, 11], [(4, 9, 1), (6, 10, 2)]),
    ([7, 6, 5], [3, 2, 1], [(7, 3, 1), (6, 2, 1), (5, 1, 1)]),
])  # fmt: skip
def test_a_run_is_adjacent_on_both_sides(to, at, runs):
    assert BlockPairs(to, at).runs == runs
    dst, src = torch.zeros(20, 3), torch.arange(1.0, 61.0).view(20, 3)
    workers.move([dst], [src], BlockPairs(to, at))
    assert dst[to].tolist() == src[at].tolist() and dst.count_nonzero() == 3 * len(to)


@pytest.mark.parametrize("layout, order", tiers.LAYOUTS.items())
def test_pages_have_as_many_pieces_as_the_lesson_says(layout, order):
    shape, pages = (8, 6, 2, 16, 4, 8), [1, 2, 3, 4]  # layers, pages, K and V, tokens, heads, head size
    host = torch.zeros([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(6)])
    device = torch.zeros(2, 6, 16, 4, 8).transpose(0, 1)  # one layer of a device pool
    counted, link, value = [], make(Bandwidth(FAST)), workers.as_integers(host.permute(1, *(axis for axis in order if axis != 1)))[0]
    link.bandwidth.arrival = lambda start, size, pieces: counted.append(pieces) or start
    for some in pages[:1], pages, pages[::-1]:
        link.copy(device, host[0], "", BlockPairs(some, some)).wait()
    page, adjacent, backwards = counted
    written, read = (link.bandwidth.of([value] * count).keywords["pieces"] for count in (1, 2))
    assert backwards == 4 * page and read == 2 * written
    assert f"| `{layout}` | {page} | {adjacent} | {written} |" in (ROOT / "docs/lessons/07_tiered_storage.md").read_text()


# 7. The end of a lane --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["garbage", "closed"])
def test_the_thread_of_a_lane_ends_after_its_transfers(how):
    before = set(threading.enumerate())
    link, pairs = make(HOURS), [numbered(10_000) for _ in range(3)]
    transfers = [link.copy(*pair, "") for pair in pairs]
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive() and not any(transfer.ready for transfer in transfers)
    if how == "closed":
        link.close()
    del link
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert all(transfer.ready for transfer in transfers) and all(dst.all() for dst, _ in pairs)


def test_a_lane_releases_the_tensors_of_completed_transfers():
    woken = threading.Semaphore(0)
    link, (dst, src) = make(wake=woken.release), numbered(8)
    weakref.finalize(src, (ended := threading.Event()).set)
    link.copy(dst, src, "")
    assert woken.acquire(timeout=30)
    link.seconds(0)  # drops completed transfers
    del dst, src
    gc.collect()
    assert ended.wait(30)


EXIT = """
import torch
from shell.modelled_link import ModelledLink as Link
from common.timeline import Clock
load, save = Link("load", Clock("cpu"), 1.0), Link("save", Clock("cpu"), 1.0)
print([link.copy(torch.zeros(10000), torch.ones(10000), "").ready for link in (load, save, load)])
"""


def test_a_process_ends_although_transfers_would_take_hours():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[False, False, False]\n")
