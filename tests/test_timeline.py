"""Timelines: spans, idle shares, the chart, the trace file, and the clock of a GPU."""
import json
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import timeline as timelines
from common.timeline import Clock, Span, Timeline
from shell import charts
from shell.charts import LANES, bubble, chart, duration, write_trace


def of(*spans) -> Timeline:
    """Return a timeline with spans (lane, label, start, end), in seconds since it began."""
    timeline = Timeline()
    timeline.spans = [Span(*span) for span in spans]
    return timeline


@pytest.mark.parametrize("idle,expected", [
    ([], [(1, 9)]), ([(2, 3)], [(1, 2), (3, 9)]), ([(2, 3), (4, 8)], [(1, 2), (3, 4), (8, 9)])], ids=str)
def test_a_span_excludes_idle_times_and_the_time_before_the_timeline(idle, expected):
    timeline = Timeline()
    began = timeline.began
    timeline.add("compute", "prefill 7", began + 1, began + 9, [(began + a, began + b) for a, b in idle])
    assert [(round(span.start, 6), round(span.end, 6)) for span in timeline.spans] == expected
    assert duration(timeline) == pytest.approx(9)
    timeline.spans.clear()  # spans are cut at the beginning of the timeline
    timeline.add("load", "layer 0", timeline.began - 4, timeline.began - 2)
    timeline.add("load", "layer 1", timeline.began - 4, timeline.began + 2)
    assert [(span.label, span.start, round(span.end, 6)) for span in timeline.spans] == [("layer 1", 0, 2)]


INTERVAL = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(INTERVAL, min_size=1, max_size=6))
def test_a_bubble_equals_the_counted_idle_time(spans):
    timeline = of(*(("load", "x", *span) for span in spans), ("compute", "x", 0, 13))       # spans may overlap
    idle = [not any(start <= cell < end for start, end in spans) for cell in range(13)]
    assert bubble(timeline, "load") == pytest.approx(sum(idle) / 13)


def test_a_chart_has_a_line_per_lane_and_a_column_per_share_of_the_time():
    timeline = of(("load", "layer 0", 0, 2), ("load", "layer 1", 2, 3), ("load", "chunk 12", 3, 4),
                  ("compute", "prefill 20", 4, 6), ("compute", "decode", 7, 8), ("save", "block 7", 8, 8))
    assert chart(timeline, 8).splitlines() == [
        " compute |....pp.d| idle 62%", "    load |0012....| idle 50%", "    save |.......b| idle 100%",
        "         0  8000 ms"]
    assert chart(Timeline(), 8) == "         0     0 ms"


def test_a_trace_has_one_clock_and_a_reply_has_milliseconds(tmp_path):
    first = of(("load", "layer 0", 0, 0.5), ("storage", "page", 1, 2))
    second = of(("compute", 'a "label"', 0, 0.25))
    second.began = first.began + 3
    write_trace([first, second], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == list(LANES)
    assert [(span["name"], names[span["tid"]]) for span in spans] == [
        ("layer 0", "load"), ("page", "storage"), ('a "label"', "compute")]
    assert [span["dur"] for span in spans] == pytest.approx([0.5e6, 1e6, 0.25e6])
    assert [span["ts"] - spans[0]["ts"] for span in spans] == pytest.approx([0, 1e6, 3e6])
    assert charts.spans(of(("load", "layer 0", 0.0012345, 0.5))) == [
        dict(lane="load", label="layer 0", start_ms=1.234, end_ms=500.0)]


def test_a_mark_without_a_gpu_is_the_time_of_the_host():
    clock, before = Clock("cpu"), time.perf_counter()
    assert before <= clock.seconds(mark := clock.mark()) == mark <= time.perf_counter()


@pytest.mark.parametrize("drift", [0.0, 1e-4])
@pytest.mark.parametrize("step", [0.001, 7.0, 100.0])
def test_marks_on_a_gpu_become_seconds_of_the_hosts_clock_for_hours(monkeypatch, step, drift):
    now = [0.0]                    # the GPU's time; the host's clock is 5000 s ahead and drifts

    def host():
        return now[0] * (1 + drift) + 5000

    class Event:                   # like CUDA's: float32 milliseconds between two events
        def __init__(self, enable_timing):
            self.passed = False

        def record(self, stream=None):
            self.at = now[0]

        def synchronize(self):
            self.passed = True

        def elapsed_time(self, other):
            assert self.passed and other.passed, "the host must wait for both events first"
            return float(numpy.float32((other.at - self.at) * 1e3))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    monkeypatch.setattr(timelines, "time", SimpleNamespace(perf_counter=host))
    clock, early = Clock("cuda"), None
    for _ in range(200):
        now[0] += step
        mark = clock.mark()
        early = early or (mark, now[0])
        assert clock.seconds(mark) == pytest.approx(host(), abs=1.1e-3)
    before = clock.mark()
    now[0] += 12e-6
    # float32 can tell these two apart only because the clock takes a new base now and then.
    assert clock.seconds(clock.mark()) - clock.seconds(before) == pytest.approx(12e-6, abs=1e-6)
    assert clock.seconds(early[0]) == pytest.approx(early[1] + 5000, abs=0.1 + drift * now[0])
