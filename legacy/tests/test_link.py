"""The link without CUDA: copies in order, modelled time, measured speed, failures, and the end of its threads."""
import argparse
import gc
import itertools
import math
import statistics
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint import ModelError
from legacy import link as links
from legacy.link import LATENCY, PLATFORMS, SHARE_OF_PEAK, Link, TransferError, pieces
from legacy.tests.conftest import ROOT
from legacy.timeline import Clock

FAST = 1e12                        # bytes per second: over at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def make(bytes_per_second: float = FAST, lane: str = "load", **options) -> Link:
    return Link(lane, Clock("cpu"), bytes_per_second, **options)


def pattern(*shape, dtype=torch.float32):
    """A tensor of random bits: all values, among them NaNs of all kinds."""
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def numbered(size: int):
    return torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)


def until(condition, seconds: float = 60):
    """Wait for other threads; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gate:
    """Copies out of `tensor` wait until the gate is opened."""

    def __init__(self, monkeypatch, tensor):
        self.reached, self.opened, move = threading.Event(), threading.Event(), links.move

        def gated(dst, src):
            if src is tensor:
                self.reached.set()
                assert self.opened.wait(60)
            move(dst, src)
        monkeypatch.setattr(links, "move", gated)

    def open(self):
        self.opened.set()


@pytest.fixture
def gate(monkeypatch):
    """gate(tensor) -> a Gate; none stays shut after the test."""
    gates = []

    def make_gate(tensor):
        gates.append(Gate(monkeypatch, tensor))
        return gates[-1]
    yield make_gate
    for one in gates:
        one.open()


def broken(monkeypatch, tensor, error):
    """Copies out of `tensor` raise."""
    move = links.move

    def fail(dst, src):
        if src is tensor:
            raise error
        move(dst, src)
    monkeypatch.setattr(links, "move", fail)


# 1. What is copied -----------------------------------------------------------------------------------------------

VIEWS = {
    "whole": lambda t: t, "a slice": lambda t: t[1:4], "one of a dimension": lambda t: t[:, 2],
    "every other": lambda t: t[::2, 1:], "outer dimensions transposed": lambda t: t.transpose(0, 1),
    "a layer of host blocks": lambda t: t[1:4, 3].transpose(0, 1), "one block of all layers": lambda t: t[:, :, 2],
    "backwards": lambda t: t.permute(2, 1, 0, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("strided", ["dst", "src", "both"])
def test_a_view_is_copied_bit_by_bit_and_nothing_else_is_touched(dtype, view, strided):
    view, before, other = VIEWS[view], pattern(6, 4, 5, 8, dtype=dtype), pattern(6, 4, 5, 8, dtype=dtype)
    whole, expected = before.clone(), before.clone()
    if strided == "dst":
        dst, src = view(whole), view(other).contiguous()
    elif strided == "src":
        dst, src, expected = torch.zeros_like(view(whole)).contiguous(), view(other), None
        whole = dst
    else:
        dst, src = view(whole), view(other)
    make().copy(dst, src, "a view").wait()
    assert torch.equal(bits(dst), bits(view(other)))
    if expected is not None:
        view(expected).copy_(view(other))
        assert torch.equal(bits(whole), bits(expected))


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[0, 0]], ids=["T", "columns", "a number"])
def test_a_view_whose_last_dimension_is_strided_is_copied_too(view):
    dst, src = torch.zeros(4, 6), pattern(4, 6)
    make().copy(view(dst), view(src), "a view").wait()
    assert torch.equal(bits(view(dst)), bits(view(src)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_of_pieces_is_one_transfer(dtype):
    src = [pattern(3, 4, dtype=dtype), pattern(2, 5, dtype=dtype)[:, 1:], pattern(7, dtype=dtype)]
    dst = [torch.zeros_like(piece) for piece in src]
    transfer = make().copy(dst, iter(src), "layer 3")
    transfer.wait()
    assert transfer.bytes == (12 + 8 + 7) * dtype.itemsize and (transfer.lane, transfer.label) == ("load", "layer 3")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(dst, src, strict=True))


@pytest.mark.parametrize("dst,src", [([], []), (torch.zeros(0, 4), torch.zeros(0, 4))], ids=["no pieces", "an empty piece"])
def test_nothing_arrives_too(dst, src):
    transfer = make().copy(dst, src, "nothing")
    transfer.wait()
    assert transfer.ready and transfer.bytes == 0


@pytest.mark.parametrize("dst,src", [
    (torch.zeros(4), torch.zeros(5)), (torch.zeros(4, 1), torch.zeros(4)), (torch.zeros(2, 6), torch.zeros(3, 4)),
    ([torch.zeros(4)], [torch.zeros(4)] * 2), ([torch.zeros(4), torch.zeros(3)], [torch.zeros(3), torch.zeros(4)]),
    (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)), (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
], ids=lambda value: "")
def test_two_sides_of_different_shapes_or_dtypes_are_refused_at_once(dst, src):
    link = make()
    with pytest.raises(ValueError, match="layer 5: the two sides differ in shape or dtype"):
        link.copy(dst, src, "layer 5")
    assert link.backlog() == 0
    dst, src = numbered(8)
    link.copy(dst, src, "well").wait()
    assert dst.all()


# 2. One lane is first in, first out ------------------------------------------------------------------------------

def test_a_lane_is_first_in_first_out(gate):
    link, pairs = make(), [numbered(8) for _ in range(4)]
    shut = gate(pairs[1][1])
    transfers = [link.copy(*pair, str(number)) for number, pair in enumerate(pairs)]
    assert shut.reached.wait(60)
    transfers[0].join()
    assert [transfer.ready for transfer in transfers] == [True, False, False, False]
    assert not pairs[2][0].any() and not pairs[3][0].any(), "a later one was copied first"
    shut.open()
    transfers[-1].join()
    assert all(transfer.ready for transfer in transfers) and all(dst.all() for dst, _ in pairs)


def test_two_lanes_do_not_wait_for_each_other(gate):
    load, save, held, free = make(lane="load"), make(lane="save"), numbered(8), numbered(8)
    shut = gate(held[1])
    first = load.copy(*held, "held")
    assert shut.reached.wait(60)
    second = save.copy(*free, "free")
    second.wait()                                                   # would hang if the lanes were one
    assert not first.ready and free[0].all()
    shut.open()
    first.wait()
    (start, end), (other_start, other_end) = first.span(), second.span()
    assert start < other_end and other_start < end, "they were under way at the same time"


# 3. Modelled time ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size,bytes_per_second,latency", [(2000, 1e5, LATENCY), (0, 1e9, 0.02), (1000, 1e5, 0.02)])
def test_a_transfer_arrives_when_latency_and_bandwidth_say_so_and_not_before(size, bytes_per_second, latency):
    link = make(bytes_per_second, latency=latency)
    seconds, before = latency + size / bytes_per_second, time.perf_counter()
    transfer = link.copy(*numbered(size), "one")
    until(lambda: transfer.ready)
    assert time.perf_counter() - before >= seconds
    start, end = transfer.span()
    assert end - start >= seconds * (1 - 1e-9) and before <= start
    assert transfer.dst[0].all()


def test_transfers_back_to_back_take_the_sum_of_their_times():
    link, sizes = make(1e5, latency=1e-3), (400, 1000, 200, 700)
    before = time.perf_counter()
    transfers = [link.copy(*numbered(size), str(size)) for size in sizes]
    transfers[-1].join()
    spans, seconds = [transfer.span() for transfer in transfers], [1e-3 + size / 1e5 for size in sizes]
    assert time.perf_counter() - before >= sum(seconds)
    assert spans[-1][1] - spans[0][0] >= sum(seconds) * (1 - 1e-9)
    for (start, end), (next_start, next_end), took in zip(spans, spans[1:], seconds):
        assert next_start >= start + took * (1 - 1e-9), "it began before the lane was free"
        assert next_end > end


def test_the_spans_of_a_lane_do_not_overlap():
    # Perfetto drops an event that overlaps another one of its track without lying inside it.
    link = make(1e6)
    transfers = [link.copy(*numbered(2000), str(number)) for number in range(10)]
    transfers[-1].join()
    spans = [transfer.span() for transfer in transfers]
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


def test_a_lane_that_was_idle_begins_when_the_transfer_is_issued():
    link = make(1e6)
    link.copy(*numbered(10), "before").join()
    time.sleep(0.02)
    before = time.perf_counter()
    transfer = link.copy(*numbered(10), "after")
    transfer.join()
    assert before <= transfer.span()[0]


def test_no_model_is_faster_than_the_copy_itself(gate):
    dst, src = numbered(8)
    shut, link = gate(src), make()
    transfer = link.copy(dst, src, "slow memory")
    assert shut.reached.wait(60) and not transfer.ready
    opened = time.perf_counter()
    shut.open()
    transfer.join()
    assert transfer.span()[1] >= opened


# 4. What fails ---------------------------------------------------------------------------------------------------

def test_wait_raises_what_the_copy_raised_and_the_lane_goes_on(monkeypatch):
    link, bad, good = make(), numbered(1 << 16), numbered(8)
    broken(monkeypatch, bad[1], OSError("no such memory"))
    transfer, after = link.copy(*bad, "layer 7"), link.copy(*good, "layer 8")
    transfer.join()                                                 # never raises
    assert transfer.ready and not bad[0].any()
    for _ in range(2):
        with pytest.raises(TransferError) as failure:
            transfer.wait()
        assert failure.value.transfer is transfer
        assert "layer 7" in str(failure.value) and "no such memory" in str(failure.value)
    start, end = transfer.span()
    assert end >= start
    after.wait()
    assert good[0].all()
    assert link.backlog() == 0


def test_one_bad_piece_is_a_failed_transfer(monkeypatch):
    link, pieces = make(), [numbered(8) for _ in range(3)]
    broken(monkeypatch, pieces[1][1], ValueError("torn"))
    transfer = link.copy(*zip(*pieces), "layer 2")
    transfer.join()
    with pytest.raises(TransferError, match="layer 2.*torn"):
        transfer.wait()


# 5. Backlog and speed --------------------------------------------------------------------------------------------

def test_backlog_counts_the_bytes_that_have_not_arrived(gate):
    link, pairs = make(), [numbered(size) for size in (10, 200, 3000)]
    assert link.backlog() == 0
    shut = gate(pairs[1][1])
    transfers = [link.copy(*pair, "") for pair in pairs]
    transfers[0].join()
    assert link.backlog() == 3200
    shut.open()
    transfers[1].join()
    assert link.backlog() in (3000, 0)
    transfers[2].join()
    assert link.backlog() == 0


def copies(link) -> list[int]:
    """-> a list that grows with the bytes of each transfer."""
    sizes, copy = [], link.copy
    link.copy = lambda dst, src, label: sizes.append(dst.nbytes) or copy(dst, src, label)
    return sizes


def test_the_speed_of_a_model_is_known_without_a_transfer():
    link = make(123456.0)
    sizes = copies(link)
    assert link.speed() == 123456.0 and not sizes and not link.speeds


@pytest.mark.parametrize("lane", ["load", "save"])
def test_a_speed_can_be_measured(lane):
    speeds = []
    for _ in range(3):                                              # whatever else this machine does, not each time
        link = make(1e6, lane)
        speeds.append(link.measure())
        assert link.speed() == 1e6 and link.backlog() == 0 and not link.on_their_way
    assert all(0 < speed <= 1e6 * (1 + 1e-9) for speed in speeds) and max(speeds) >= 5e5


def test_a_very_slow_link_is_measured_with_few_bytes():
    link = make(1000)
    sizes = copies(link)
    assert 500 <= link.measure() <= 1000 and sum(sizes) <= 1000     # modelled: under a second


def test_a_fast_link_is_measured_with_enough_bytes():
    link = make(1e8)
    sizes = copies(link)
    link.measure()
    assert max(sizes) >= 1e8 * 1e-3 and sizes == sorted(sizes)


def sent(link, *sizes: int) -> list:
    """Transfers of so many bytes, one after the other, that are over."""
    transfers = [link.copy(*numbered(size), "") for size in sizes]
    transfers[-1].join()
    return transfers


def test_the_speed_is_the_median_of_the_last_nine_notes():
    link, taken = make(latency=0.0), []
    for number in range(14):
        link.bytes_per_second = 1e7 * (1 + number * 5 % 14)         # all different
        transfers = sent(link, 1 << 16)
        link.note(transfers)
        taken.append((1 << 16) / (transfers[0].span()[1] - transfers[0].span()[0]))
    assert link.speed() == statistics.median(taken[-9:]) != statistics.median(taken)


def test_a_note_takes_transfers_together_from_the_first_ones_start_to_the_last_ones_end():
    link = make(1e8, latency=0.0)
    transfers = sent(link, 40000, 50000, 60000)
    link.note(transfers)
    assert link.speed() == 150000 / (transfers[-1].span()[1] - transfers[0].span()[0]) <= 1e8 * (1 + 1e-6)


@pytest.mark.parametrize("sizes,counts", [([(1 << 16) - 1], False), ([1 << 16], True), ([1 << 15] * 2, True), ([100] * 5, False)],
                         ids=str)
def test_only_64_kib_and_more_say_something_about_the_speed(sizes, counts):
    link = make(1e9)
    link.note(sent(link, *sizes))
    assert bool(link.speeds) is counts and (link.speed() != 1e9) is counts


def test_notes_wear_out_the_oldest_first_until_the_model_is_believed_again():
    link = make(1e7, latency=0.0)
    for _ in range(2):
        link.note(sent(link, 1 << 16))
        link.bytes_per_second = 1e6
    first, second = link.speeds
    link.wear_out()
    assert link.speed() == second < first
    for _ in range(2):
        link.wear_out()
        assert link.speed() == 1e7


def test_asking_for_the_speed_waits_for_nobody(gate):
    link, held = make(), numbered(1 << 16)
    link.note(sent(link, 1 << 16))
    shut = gate(held[1])
    transfer = link.copy(*held, "held")
    assert shut.reached.wait(60) and link.speed() > 0 and not transfer.ready
    shut.open()
    transfer.join()


@pytest.mark.parametrize("bytes_per_second,words", [
    (5e8, "modelled link, 0.5 GB/s"), (25e9, "modelled link, 25 GB/s"), (123456789, "modelled link, 0.123 GB/s")])
def test_what_is_printed_about_it_says_that_it_is_modelled(bytes_per_second, words):
    link = make(bytes_per_second)
    assert link.modelled and str(link) == words


# 6. Pieces --------------------------------------------------------------------------------------------------------

@st.composite
def layouts(draw):
    """-> two functions that make views of the same shape, each with its own order of dimensions and steps in memory."""
    shape = draw(st.lists(st.integers(0, 4) if draw(st.booleans()) else st.integers(1, 4), min_size=0, max_size=4))

    def view():
        order = draw(st.permutations(range(len(shape))))
        steps = draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=len(shape), max_size=len(shape)))

        def new():
            base = torch.zeros([shape[axis] * steps[axis] for axis in order], dtype=torch.int64)
            view = base.permute([order.index(axis) for axis in range(len(shape))])
            return view[tuple(slice(None, None, step) for step in steps)]
        return new
    return view(), view()


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(layouts(), st.booleans())
def test_pieces_cover_everything_once_and_are_as_few_as_the_hosts_side_allows(layout, host_is_dst):
    dst, src = (new() for new in layout)
    assert dst.shape == src.shape
    host = dst if host_is_dst else src
    src.copy_(torch.arange(1, src.numel() + 1).view(src.shape))
    pairs, touched = list(pieces(dst, src, host)), layout[0]()
    assert all(a.shape == b.shape and (a if host_is_dst else b).is_contiguous() for a, b in pairs)
    for piece, _ in pieces(touched, src, touched if host_is_dst else src):
        piece += 1
    assert bool((touched == 1).all())
    for piece, source in pairs:
        piece.copy_(source)
    assert torch.equal(dst, src)
    depth = 0                                                       # of the first indices that have to be fixed
    while host.numel() and not host[(0,) * depth].is_contiguous():
        depth += 1
    assert len(pairs) == math.prod(host.shape[:depth])


def test_a_layer_comes_in_piece_by_piece_and_a_block_goes_out_in_one():
    device, host = torch.zeros(3, 2, 8, 4, 2, 16), torch.zeros(8, 3, 2, 4, 2, 16)       # as in chapter 03
    into, out_of = device[1, :, 2:5], host[3:6, 1].transpose(0, 1)
    assert [a.shape for a, _ in pieces(into, out_of, out_of)] == [(4, 2, 16)] * 6       # K and V of three blocks
    (dst, src), = pieces(host[3], device[:, :, 2], host[3])
    assert dst.is_contiguous() and dst.shape == src.shape == (3, 2, 4, 2, 16)


# 7. The end of a lane's thread -----------------------------------------------------------------------------------

@pytest.mark.parametrize("busy", [False, True])
def test_the_thread_of_a_lane_ends_when_the_link_is_garbage(busy):
    before = set(threading.enumerate())
    link = make(1.0, latency=0.0)
    thread, = set(threading.enumerate()) - before
    assert thread.daemon and thread.is_alive()
    pairs = [numbered(10000) for _ in range(2 * busy)]             # hours
    transfers = [link.copy(*pair, "") for pair in pairs]
    assert not any(transfer.ready for transfer in transfers)
    del link
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert all(transfer.ready for transfer in transfers), "somebody would wait for ever"
    assert all(dst.all() for dst, _ in pairs)


def test_what_has_arrived_is_not_held_by_the_lane():
    link, (dst, src) = make(), numbered(8)
    alive = weakref.ref(src)
    link.copy(dst, src, "").join()
    del dst, src
    link.settle()
    until(lambda: gc.collect() >= 0 and alive() is None, seconds=5)


EXIT = """
import sys, threading, torch
from legacy.link import Link
from legacy.timeline import Clock
load, save = Link("load", Clock("cpu"), 1.0), Link("save", Clock("cpu"), 1.0)
transfers = [link.copy(torch.zeros(10000), torch.ones(10000), "") for link in (load, save, load)]
threading.Thread(target=transfers[-1].join, daemon=True).start()
print(sys.argv[1], [transfer.ready for transfer in transfers])
if sys.argv[1] == "exit":
    sys.exit(0)
"""


@pytest.mark.parametrize("how", ["end", "exit"])
def test_a_process_ends_at_once_while_hours_of_transfers_are_under_way(how):
    done = subprocess.run([sys.executable, "-c", EXIT, how], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{how} [False, False, False]\n")


# 8. How fast the modelled link is --------------------------------------------------------------------------------

GPU = SimpleNamespace(device=torch.device("cuda"))


@pytest.mark.parametrize("asked", [0.5, 1e-9, 32.0])
def test_gigabytes_per_second_that_are_asked_for_are_taken_as_they_are(asked):
    assert links.bandwidth(SimpleNamespace(device=torch.device("cpu")), asked, "l20") == asked * 1e9


def test_auto_resembles_the_platform(monkeypatch):
    monkeypatch.setattr(links, "like", lambda platform, model: (platform, model))
    here = SimpleNamespace(device=torch.device("cpu"))
    assert links.bandwidth(here) == links.bandwidth(here, "auto") == ("a100", here)
    assert links.bandwidth(here, "auto", "h800") == ("h800", here)


def test_on_a_gpu_the_link_is_real_and_no_speed_can_be_asked_for():
    assert links.bandwidth(GPU) is links.bandwidth(GPU, "auto", "4090") is None
    with pytest.raises(ModelError, match="--link.*leave it out"):
        links.bandwidth(GPU, 0.5)


def projecting(monkeypatch, seconds):
    """Each projection that `like` times takes the next of `seconds`."""
    now, takes, calls = [0.0], itertools.cycle(seconds), itertools.count()

    def perf_counter():
        now[0] += next(takes) if next(calls) % 2 else 1.0
        return now[0]
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=perf_counter))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_projection_and_transfer_have_the_ratio_that_llama_2_7b_has_on_the_platform(monkeypatch, tiny_engine, platform):
    projecting(monkeypatch, [0.5])
    model, (peak, pcie) = tiny_engine.model, PLATFORMS[platform]
    hidden_bytes = 256 * 64 * 4                                     # no more tokens than its context
    ratio = 0.5 / (hidden_bytes / links.like(platform, model))
    assert ratio == pytest.approx(2 * 4096 * pcie / (SHARE_OF_PEAK * peak), rel=1e-9)
    assert links.like(platform, model, tokens=16) == pytest.approx(links.like(platform, model) / 16, rel=1e-9)


def test_the_platforms_are_ordered_as_their_link_per_peak(monkeypatch, tiny_engine):
    projecting(monkeypatch, [0.5])
    speeds = {platform: links.like(platform, tiny_engine.model) for platform in PLATFORMS}
    for one, other in itertools.combinations(PLATFORMS, 2):
        ratio = (PLATFORMS[one][1] / PLATFORMS[one][0]) / (PLATFORMS[other][1] / PLATFORMS[other][0])
        assert speeds[one] / speeds[other] == pytest.approx(ratio, rel=1e-9)
    assert sorted(speeds, key=speeds.get) == ["h800", "4090", "a100", "a30", "l20"]


def test_the_fastest_projection_counts(monkeypatch, tiny_engine):
    projecting(monkeypatch, [0.5])
    alone = links.like("a100", tiny_engine.model)
    projecting(monkeypatch, [3.0, 2.5, 0.5, 7.0])
    assert links.like("a100", tiny_engine.model) == pytest.approx(alone, rel=1e-9)


def test_products_run_at_the_share_of_the_peak_that_hcache_tells():
    assert SHARE_OF_PEAK == pytest.approx(0.63, abs=0.005)
    projection, transfer = 4 * 4096 ** 2 / (SHARE_OF_PEAK * 312e12), 2 * 4096 / 24e9      # of a token, on an A100
    assert projection == pytest.approx(transfer)


def test_the_speed_of_this_processor_is_measured(tiny_engine):
    assert 1e5 < links.like("a100", tiny_engine.model) < 1e13


@pytest.mark.parametrize("string,value", [("auto", "auto"), ("0.5", 0.5), ("32", 32.0), ("1e-9", 1e-9), ("1e6", 1e6)])
def test_speeds_that_can_be_asked_for(string, value):
    assert links.speed(string) == value


@pytest.mark.parametrize("string", ["0", "-1", "nan", "inf", "-inf", "fast", "", "AUTO", "1e7", "1e-10", "1 GB/s"])
def test_speeds_that_cannot(string):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from"):
        links.speed(string)


def test_the_options_are_auto_and_an_a100_unless_told_otherwise(capsys):
    parser = argparse.ArgumentParser()
    links.add_arguments(parser)
    default, told = parser.parse_args([]), parser.parse_args(["--link", "2.5", "--platform", "l20"])
    assert (default.link, default.platform, told.link, told.platform) == ("auto", "a100", 2.5, "l20")
    with pytest.raises(SystemExit):
        parser.parse_args(["--platform", "h100"])
    assert "h100" in capsys.readouterr().err
