"""Who was busy when.

A timeline is a list of spans (lane, label, start, end): a text chart in the demos, a picture on the page and
with `--svg`, a trace file that opens in Perfetto or chrome://tracing. On a GPU a point in time is a CUDA
event, which Clock turns into seconds of the host's clock when it has passed.
"""
import json
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import torch

LANES = ("compute", "load", "save", "storage")
WIDTH, LEFT = 800, 92              # px: of the picture, and where time 0 is in it
LONG = 4                           # times until the first token: what is drawn of a longer timeline
COLORS = dict(compute=("#2a5cc4", "#8ab4ff"), load=("#9a5b00", "#f0b64a"), save=("#0f7464", "#5fcfb8"),
              storage=("#b5372a", "#ff9c8a"), hidden=("#7a3fb0", "#cfa4ff"), device=("#2f7a2a", "#86d67a"),
              other=("#566174", "#a3afc0"))                     # on a light page, on a dark one
CELLS = dict(m="compute", c="load", H="hidden", K="load", R="compute", g="device", s="storage")


class Clock:
    """Mark points in time where a device computes or copies, in seconds of time.perf_counter()."""
    REBASE = 10.0                  # seconds: CUDA gives float32 milliseconds between events, exact while few

    def __init__(self, device):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.base = self.mark()
            self.base.synchronize()
            self.base_seconds = time.perf_counter()

    def mark(self):
        """Now, on the host; on a GPU when the current stream gets here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark) -> float:
        """Wait on the host until the point has passed; return its seconds."""
        if self.device.type != "cuda":
            return mark
        mark.synchronize()
        seconds = self.base_seconds + self.base.elapsed_time(mark) / 1e3
        if seconds - self.base_seconds > self.REBASE:
            self.base, self.base_seconds = mark, seconds
        return seconds


@dataclass(frozen=True)
class Span:
    lane: str
    label: str
    start: float                   # seconds since the timeline began
    end: float


class Timeline:
    def __init__(self):
        self.began = time.perf_counter()
        self.spans: list[Span] = []
        self.plan: dict | None = None       # {"title", "rows": [[label, letters]], "legend": {letter: words}}

    @contextmanager
    def span(self, lane: str, label: str):
        """Add what the host does inside. (On a GPU: until the work is queued, not until it is done.)"""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, label, start, time.perf_counter())

    def add(self, lane: str, label: str, start: float, end: float, idle=()):
        """Add a span measured elsewhere, in seconds of time.perf_counter(), without the (start, end) in
        `idle`, in order, and without what was before the timeline began."""
        for stop, resume in (*idle, (end, end)):
            if stop >= self.began:
                self.spans.append(Span(lane, label, max(0.0, start - self.began), stop - self.began))
            start = resume

    @property
    def end(self) -> float:
        """Seconds from the beginning to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def lanes(self) -> dict[str, list[Span]]:
        """The lanes that occur, in their order, each with its spans by start."""
        spans = sorted(self.spans, key=lambda span: span.start)
        lanes = {lane: [span for span in spans if span.lane == lane] for lane in LANES}
        return {lane: found for lane, found in lanes.items() if found}

    def bubble(self, lane: str, start: float = 0.0, end: float | None = None) -> float:
        """Share of the time from `start` to `end` (seconds since the timeline began; default: all) in which
        `lane` was idle."""
        end, busy, reached = self.end if end is None else end, 0.0, start
        for span in self.lanes().get(lane, ()):
            busy += max(0.0, min(span.end, end) - max(span.start, reached))     # spans may overlap
            reached = max(reached, span.end)
        return 1 - busy / (end - start) if end > start else 0.0

    def as_json(self) -> list[dict]:
        """[{lane, label, start_ms, end_ms}], for an HTTP reply."""
        return [dict(lane=span.lane, label=span.label, start_ms=round(span.start * 1e3, 3),
                     end_ms=round(span.end * 1e3, 3)) for span in list(self.spans)]

    def chart(self, width: int = 64, bubbles: bool = False) -> str:
        """The lanes as lines of text. A column is 1/width of the time; a letter is the first of the label,
        a digit the last of a layer's or a chunk's number. With `bubbles`, each lane's idle share is added."""
        if not self.spans:
            return "(nothing happened)"
        lines = []
        for lane, spans in self.lanes().items():
            row = ["."] * width
            for span in spans:
                first, last = int(span.start / self.end * width), int(span.end / self.end * width)
                letter = span.label[-1 if span.label.startswith(("layer ", "chunk ")) else 0]
                for column in range(first, max(first + 1, min(last, width))):
                    row[min(column, width - 1)] = letter
            idle = f" idle {self.bubble(lane):.0%}" if bubbles else ""
            lines.append(f"{lane:>8} |{''.join(row)}|{idle}")
        lines.append(f"{'':>8} 0{f'{self.end * 1e3:.0f} ms':>{width + 1}}")
        return "\n".join(lines)

    def svg(self, title: str = "") -> str:
        """A picture that needs nothing but itself: the plan's cells, and below them the lanes. Of a long
        answer it shows the beginning, or what came before the first token would be too narrow to see."""
        decoded = min((span.start for span in self.spans if span.label == "decode"), default=0.0)
        end = min(self.end, LONG * decoded or self.end) or 1.0
        parts, y = [text(12, 26, title, "title")], 44
        if self.plan:
            cells, y = draw_plan(self.plan, y)
            parts += cells
        width = WIDTH - LEFT - 92                               # px of the time
        for lane, spans in self.lanes().items():
            parts.append(text(LEFT - 8, y + 17, lane, "end"))
            parts.append(f'<rect class="track" x="{LEFT}" y="{y}" width="{width}" height="24"/>')
            parts.append(text(WIDTH - 84, y + 17, f"idle {self.bubble(lane, 0, decoded or end):.0%}"))
            for span in spans:
                left, right = (width * min(moment / end, 1) for moment in (span.start, span.end))
                tip = f"{span.label}: {span.start * 1e3:.2f} to {span.end * 1e3:.2f} ms"
                if left < width:
                    parts.append(box(LEFT + left, y, right - left, 24, lane, tip))
            y += 30
        of = f" of {self.end * 1e3:.1f}" if end < self.end else ""
        axis = f"0 to {end * 1e3:.1f}{of} ms" + (f", first token at {decoded * 1e3:.1f}" if decoded else "")
        parts.append(text(LEFT, y + 12, axis if self.spans else "(nothing happened)"))
        light = ";".join(f"--{name}:{color}" for name, (color, _) in COLORS.items())
        dark = ";".join(f"--{name}:{color}" for name, (_, color) in COLORS.items())
        style = (f"svg{{--page:#fff;--ink:#1b2330;--line:#d3d9e2;{light};font:12px system-ui,sans-serif}}"
                 "@media(prefers-color-scheme:dark)"
                 f"{{svg{{--page:#161b22;--ink:#e5eaf1;--line:#343e4d;{dark}}}}}"
                 ".title{font-size:16px}.end{text-anchor:end}.page{fill:var(--page)}text{fill:var(--ink)}"
                 ".track{fill:var(--line);opacity:.4}.on{fill:var(--page);font-size:10px;text-anchor:middle}"
                 + "".join(f".{name}{{fill:var(--{name})}}" for name in COLORS))
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 22}" role="img">',
            f"<title>{plain(title or 'Who was busy when')}</title><style>{style}</style>",
            f'<rect class="page" width="{WIDTH}" height="{y + 22}"/>', *parts, "</svg>\n"])


def plain(words) -> str:
    """Escape text for XML, and replace what XML does not allow."""
    return escape(re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(words)))


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.6g}" y="{y}">{plain(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    """A rectangle with a tooltip, wide enough to be seen."""
    width = max(0.6, width - 0.4)
    return (f'<rect class="{style}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}">'
            f"<title>{plain(tip)}</title></rect>")


def draw_plan(plan: dict, y: int) -> tuple[list[str], int]:
    """A plan's elements from `y` down, a rectangle for each run of equal cells, and where they end."""
    parts, y = [text(12, y + 4, plan["title"])], y + 12
    size = min(24.0, (WIDTH - LEFT - 12) / max((len(cells) for _, cells in plan["rows"]), default=1))
    for label, cells in plan["rows"]:
        parts.append(text(LEFT - 8, y + 12, label, "end"))
        x = LEFT
        for letter, run in groupby(cells):
            width, words = len(list(run)) * size, plan["legend"].get(letter, letter)
            tip = f"{label}: {round(width / size)} {words}"
            parts.append(box(x, y, width, 15, CELLS.get(letter, "other"), tip))
            parts.append(text(x + width / 2, y + 12, letter if width > 9 else "", "on"))
            x += width
        y += 17
    legend = "   ".join(f"{letter}: {words}" for letter, words in plan["legend"].items())
    return [*parts, text(LEFT, y + 14, legend)], y + 28


def write_trace(timelines: list[Timeline], path: Path):
    """All timelines in one Chrome-trace file, on the clock that they share."""
    events = []
    for timeline in timelines:
        for span in timeline.spans:
            events.append(dict(name=span.label, cat=span.lane, ph="X", pid=1, tid=LANES.index(span.lane) + 1,
                               ts=(timeline.began + span.start) * 1e6, dur=(span.end - span.start) * 1e6))
    for number, lane in enumerate(LANES, 1):
        events.append(dict(name="thread_name", ph="M", pid=1, tid=number, args=dict(name=lane)))
    path.write_text(json.dumps(dict(traceEvents=events, displayTimeUnit="ms")))
