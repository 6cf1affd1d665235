"""Who was busy when: spans, the idle share, the text chart, the trace file, and the clock of a GPU."""
import json
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legacy import timeline as timelines
from legacy.timeline import LANES, Clock, Span, Timeline, write_trace


def drawn(*spans) -> Timeline:
    """A timeline of (lane, label, start, end), in seconds since it began."""
    timeline = Timeline()
    for lane, label, start, end in spans:
        timeline.spans.append(Span(lane, label, start, end))
    return timeline


# 1. Spans --------------------------------------------------------------------------------------------------------

def times(timeline) -> list[tuple[float, float]]:
    return [(round(span.start, 6), round(span.end, 6)) for span in timeline.spans]


@pytest.mark.parametrize("idle,expected", [
    ([], [(1, 9)]), ([(2, 3)], [(1, 2), (3, 9)]), ([(2, 3), (4, 8)], [(1, 2), (3, 4), (8, 9)]),
    ([(2.5, 2.5)], [(1, 2.5), (2.5, 9)]),
], ids=str)
def test_a_span_measured_elsewhere_is_cut_where_the_lane_was_idle(idle, expected):
    timeline = Timeline()
    began = timeline.began
    timeline.add("compute", "prefill 7", began + 1, began + 9, [(began + start, began + end) for start, end in idle])
    assert times(timeline) == expected
    assert {(span.lane, span.label) for span in timeline.spans} == {("compute", "prefill 7")}
    assert timeline.end == pytest.approx(9)


def test_idle_may_be_anything_that_yields_pairs():
    timeline = Timeline()
    began = timeline.began
    timeline.add("load", "layer 0", began, began + 4, iter([(began + 1, began + 2)]))
    assert times(timeline) == [(0, 1), (2, 4)]


def test_a_span_is_what_the_host_does_inside_it_even_if_that_fails():
    timeline = Timeline()
    with timeline.span("compute", "outer"):
        with timeline.span("save", "inner"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timeline.span("compute", "bad"):
        raise KeyError
    inner, outer, bad = timeline.spans
    assert (inner.lane, inner.label, outer.label, bad.label) == ("save", "inner", "outer", "bad")
    assert 0 <= outer.start <= inner.start <= inner.end - 0.01 <= inner.end <= outer.end <= bad.start <= bad.end
    assert timeline.end == bad.end and Timeline().end == 0.0


# 2. Bubbles ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spans,bubble", [
    ([(0, 10)], 0), ([(0, 5)], 0.5), ([(0, 2), (5, 8)], 0.5), ([(0, 6), (2, 4)], 0.4), ([(0, 4), (2, 6)], 0.4),
    ([(5, 8), (0, 2)], 0.5), ([(0, 2), (0, 2)], 0.8), ([(3, 3)], 1), ([], 1),
], ids=str)
def test_a_bubble_is_the_share_in_which_a_lane_was_idle(spans, bubble):
    timeline = drawn(("storage", "page", 9, 10), *(("load", "layer 0", *span) for span in spans))
    assert timeline.bubble("load") == pytest.approx(bubble)


def test_a_timeline_without_time_has_no_bubble():
    assert Timeline().bubble("load") == 0.0
    assert drawn(("load", "x", 1, 2)).bubble("load", 1.5, 1.5) == drawn(("load", "x", 1, 2)).bubble("load", 2, 1) == 0.0


INTERVAL = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["load", "compute"]), INTERVAL), max_size=6), INTERVAL, st.booleans())
def test_a_bubble_is_what_counting_gives(spans, within, whole):
    timeline = drawn(*((lane, "x", *span) for lane, span in spans))
    start, end = (0, max([span[1] for _, span in spans], default=0)) if whole else within
    cells = range(start, end)
    idle = [not any(lane == "load" and a <= cell < b for lane, (a, b) in spans) for cell in cells]
    expected = sum(idle) / len(idle) if idle else 0.0
    assert timeline.bubble("load", *(() if whole else within)) == pytest.approx(expected)


# 3. The chart ----------------------------------------------------------------------------------------------------

def test_a_chart_has_a_line_for_each_lane_and_a_column_for_each_share_of_the_time():
    timeline = drawn(("load", "layer 0", 0, 2), ("load", "layer 1", 2, 3), ("load", "layer 12", 3, 4),
                     ("compute", "prefill 20", 4, 6), ("compute", "decode", 7, 8))
    assert timeline.chart(8).splitlines() == [
        " compute |....pp.d|",
        "    load |0012....|",
        "         0  8000 ms"]


@pytest.mark.parametrize("bubbles", [False, True])
def test_a_chunk_is_the_last_digit_of_its_number(bubbles):
    timeline = drawn(("storage", "chunk 12", 0, 2), ("storage", "chunk 11", 2, 4), ("load", "chunk 12", 2, 3),
                     ("load", "chunk 0", 3, 4), ("compute", "chunks 34", 0, 4))
    compute, load, storage, _ = (line.split("|") for line in timeline.chart(8, bubbles=bubbles).splitlines()[:3] + ["|"])
    assert (compute[1], load[1], storage[1]) == ("cccccccc", "....2200", "22221111")


def test_the_lanes_of_a_chart_have_their_order_and_width():
    timeline = drawn(*((lane, lane, 0, 1) for lane in reversed(LANES)))
    lines = timeline.chart().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(LANES)
    assert lines[:-1] == [f"{lane:>8} |{lane[0] * 64}|" for lane in LANES]
    assert lines[-1].endswith(" 1000 ms") and len(lines[-1]) == len(lines[0])


def test_the_shortest_span_is_seen_and_the_last_one_too():
    timeline = drawn(("save", "block 7", 0, 1e-9), ("save", "layer 5", 9.999999, 10), ("load", "layer 3", 10, 10))
    load, save, _ = timeline.chart(10).splitlines()
    assert save == "    save |b........5|" and load == "    load |.........3|"


def test_of_nothing_there_is_a_chart_too():
    assert Timeline().chart() == "(nothing happened)"


@st.composite
def some_spans(draw):
    starts = st.floats(0, 5, allow_subnormal=False)
    spans = draw(st.lists(st.tuples(st.sampled_from(LANES), st.text(min_size=1, max_size=5).map(repr), starts,
                                    st.floats(1e-6, 5)), min_size=1, max_size=8))
    return [(lane, label, start, start + length) for lane, label, start, length in spans]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(some_spans(), st.integers(1, 100))
def test_whatever_happened_can_be_drawn(spans, width):
    timeline, lanes = drawn(*spans), [lane for lane in LANES if lane in {span[0] for span in spans}]
    *lines, axis = timeline.chart(width).splitlines()
    assert [line[:10] for line in lines] == [f"{lane:>8} |" for lane in lanes]
    for lane, line in zip(lanes, lines):
        shown = set(line[10:-1]) - {"."}
        assert len(line) == width + 11 and shown and shown <= {label[0] for name, label, *_ in spans if name == lane}


def test_with_bubbles_a_chart_says_beside_each_lane_how_long_it_was_idle():
    timeline = drawn(("load", "layer 0", 0, 2), ("load", "layer 1", 2, 3), ("compute", "layer 0", 2, 4),
                     ("compute", "layer 1", 4, 8), ("storage", "layer 0", 0, 8))
    plain, said = timeline.chart(8).splitlines(), timeline.chart(8, bubbles=True).splitlines()
    assert said == [" compute |..001111| idle 25%", "    load |001.....| idle 62%", " storage |00000000| idle 0%", plain[-1]]
    assert plain[:-1] == [line.split(" idle")[0] for line in said[:-1]]
    assert Timeline().chart(bubbles=True) == "(nothing happened)"


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted), max_size=6), st.sampled_from([1, 2, 4, 8, 16]))
def test_with_bubbles_a_column_is_a_letter_exactly_where_the_lane_was_busy_for_half_of_it_or_more(spans, width):
    timeline = drawn(("load", "x", 15, 16), *(("load", "x", *span) for span in spans))          # they may overlap
    busy = [any(start <= cell < end for start, end in [*spans, (15, 16)]) for cell in range(16)]
    columns = [busy[column * 16 // width:(column + 1) * 16 // width] for column in range(width)]
    row = timeline.chart(width, bubbles=True).split("|")[1]
    assert row == "".join("x" if 2 * sum(column) >= len(column) else "." for column in columns)


# 4. Windows ------------------------------------------------------------------------------------------------------

MIXED = [("load", "layer 0", 0, 2), ("load", "layer 1", 2, 6), ("compute", "layer 0", 3, 5), ("save", "states", 6, 9)]


@pytest.mark.parametrize("start,end,expected", [
    (0, 9, MIXED), (-1, 20, [(lane, label, a + 1, b + 1) for lane, label, a, b in MIXED]),
    (1, 4, [("load", "layer 0", 0, 1), ("load", "layer 1", 1, 3), ("compute", "layer 0", 2, 3)]),
    (2, 6, [("load", "layer 1", 0, 4), ("compute", "layer 0", 1, 3)]),         # what only touches it is not in it
    (3.5, 4.5, [("load", "layer 1", 0, 1), ("compute", "layer 0", 0, 1)]),
    (9, 12, []), (-5, 0, []),
], ids=str)
def test_a_window_holds_what_happened_in_it_clipped_and_on_a_clock_of_its_own(start, end, expected):
    timeline = drawn(*MIXED)
    before, part = list(timeline.spans), timeline.window(start, end)
    assert [(span.lane, span.label, span.start, span.end) for span in part.spans] == expected
    assert part.began == timeline.began + start and timeline.spans == before
    assert all(0 <= span.start <= span.end <= end - start for span in part.spans)


def test_a_window_of_nothing_is_empty_and_can_be_drawn():
    part = Timeline().window(0, 1)
    assert part.spans == [] and part.end == 0 == part.bubble("load") and part.chart(bubbles=True) == "(nothing happened)"


def test_a_window_of_a_window_is_the_window_of_both():
    timeline = drawn(*MIXED)
    assert timeline.window(1, 8).window(1, 4).spans == timeline.window(2, 5).spans
    assert timeline.window(1, 8).window(1, 4).began == timeline.window(2, 5).began


def test_a_window_is_written_to_a_trace_at_the_time_at_which_it_happened(tmp_path):
    timeline = drawn(*MIXED)
    write_trace([timeline.window(3, 5)], tmp_path / "trace.json")
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert [span["ts"] for span in spans] == pytest.approx([(timeline.began + 3) * 1e6] * 2)
    assert [span["dur"] for span in spans] == pytest.approx([2e6] * 2)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["load", "compute"]), INTERVAL), max_size=6), INTERVAL)
def test_the_bubble_of_a_window_is_that_of_the_timeline_in_it(spans, within):
    timeline, (start, end) = drawn(*((lane, "x", *span) for lane, span in spans)), within
    part = timeline.window(start, end)
    for lane in ("load", "compute", "save"):
        assert part.bubble(lane, 0, end - start) == pytest.approx(timeline.bubble(lane, start, end))
        if part.end:                            # without bounds it ends with its last span
            assert part.bubble(lane) == pytest.approx(timeline.bubble(lane, start, start + part.end))


# 5. What began before --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("start,end", [(-4, 2), (-4, -2), (-90, 2)], ids=["began before", "was over before", "began long before"])
def test_what_was_under_way_before_the_timeline_began_is_not_drawn_outside_of_it(start, end):
    # A request that shares another one's swap in shows its layers, which may have begun before the request came.
    timeline = Timeline()
    began = timeline.began
    timeline.add("load", "layer 0", began + start, began + end)
    timeline.add("compute", "prefill 9", began + 2, began + 8)
    lines = [line for line in timeline.chart(8).splitlines() if line.startswith("    load")]
    assert lines == ["    load |00......|"] if end > 0 else not any("0" in line for line in lines)
    assert all(span.start >= 0 for span in timeline.spans)


# 6. For programs -------------------------------------------------------------------------------------------------

def test_as_json_is_in_milliseconds():
    assert drawn(("load", "layer 0", 0.0012345, 0.5), ("compute", "decode", 1, 2)).as_json() == [
        dict(lane="load", label="layer 0", start_ms=1.234, end_ms=500.0),
        dict(lane="compute", label="decode", start_ms=1000, end_ms=2000)]


def test_a_trace_file_holds_all_timelines_on_one_clock(tmp_path):
    first = drawn(("load", "layer 0", 0, 0.5), ("storage", "page", 1, 2))
    second = drawn(("compute", 'a "label"', 0, 0.25))
    second.began = first.began + 3
    path = tmp_path / "trace.json"
    write_trace([first, second], path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == list(LANES) and {event["name"] for event in events if event["ph"] == "M"} == {"thread_name"}
    assert [(span["name"], span["cat"], names[span["tid"]]) for span in spans] == [
        ("layer 0", "load", "load"), ("page", "storage", "storage"), ('a "label"', "compute", "compute")]
    assert [span["dur"] for span in spans] == pytest.approx([0.5e6, 1e6, 0.25e6])
    assert [span["ts"] - spans[0]["ts"] for span in spans] == pytest.approx([0, 1e6, 3e6])
    assert spans[0]["ts"] == pytest.approx(first.began * 1e6) and len({event["pid"] for event in events}) == 1


# 7. The clock ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_without_a_gpu_a_mark_is_the_time_of_the_host(device):
    clock, before = Clock(device), time.perf_counter()
    mark = clock.mark()
    assert clock.device == torch.device("cpu") and before <= clock.seconds(mark) == mark <= time.perf_counter()


class Gpu:
    """A clock of its own (`now`, in seconds), and events like CUDA's on it: float32 milliseconds between two."""
    now, ahead = 0.0, 5000.0       # the host's perf_counter is so much ahead

    def __init__(self, monkeypatch):
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                self.at, self.passed = None, False

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                assert self.at is not None
                self.passed = True

            def elapsed_time(self, other):
                assert self.passed and other.passed, "the host has not waited"
                return float(numpy.float32((other.at - self.at) * 1e3))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(timelines, "time", SimpleNamespace(perf_counter=lambda: self.now + self.ahead))


@pytest.mark.parametrize("step", [0.001, 0.7, 7.0, 11.0, 100.0])
def test_on_a_gpu_marks_become_seconds_of_the_hosts_clock_for_hours(monkeypatch, step):
    gpu = Gpu(monkeypatch)
    clock, last = Clock("cuda"), 0.0
    for _ in range(1000):
        gpu.now += step
        seconds = clock.seconds(clock.mark())
        assert abs(seconds - (gpu.now + gpu.ahead)) < 1e-3 * max(1, step / 10) and seconds > last
        last = seconds


def test_on_a_gpu_two_marks_that_are_near_are_exact_however_late_it_is(monkeypatch):
    gpu = Gpu(monkeypatch)
    clock = Clock("cuda")
    for hours in range(1, 30):
        gpu.now = hours * 3600.0
        clock.seconds(clock.mark())                                 # the engine marks each step
        before = clock.mark()
        gpu.now += 12e-6
        after = clock.mark()
        # Without a new base, float32 tells no two points apart that are less than 0.25 ms apart
        assert clock.seconds(after) - clock.seconds(before) == pytest.approx(12e-6, abs=1e-6)


def test_on_a_gpu_a_mark_from_before_the_base_has_its_seconds_still(monkeypatch):
    gpu = Gpu(monkeypatch)
    clock = Clock("cuda")
    gpu.now = 1.0
    early = clock.mark()
    gpu.now = 30.0
    assert clock.seconds(clock.mark()) == pytest.approx(30 + gpu.ahead, abs=1e-4)
    gpu.now = 60.0
    assert clock.seconds(clock.mark()) == pytest.approx(60 + gpu.ahead, abs=1e-4)
    assert clock.seconds(early) == pytest.approx(1 + gpu.ahead, abs=1e-4)
