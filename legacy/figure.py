"""The picture of a request: who was busy when, and above it the chapter's plan.

An SVG document for the page, for `--svg FILE`, and for the texts in docs/. It needs nothing but itself, is readable on a
light and on a dark page, and says in words whatever a colour says. A plan is one of Cells, Pointers, Tree and MiniBatches:
`draw(y, at)` gives its elements, from `y` down, and where they end (`at`: seconds -> x, as in the lanes); `words()` is what
a screen reader says of it.
"""
import itertools
import math
import re
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from legacy.timeline import LANES, Span, Timeline

WIDTH, LEFT, RIGHT = 800, 92, 712                   # px: the picture; from LEFT to RIGHT is the time
LANE, SIZE = 28, 12                                 # px: the height of a lane, and of letters
LONG = 4                                            # times until the first token: what is drawn of a longer timeline
NEAR, SMALL, TINY = 0.3, 2.0, 0.5                   # px: gaps and spans that are too small to be drawn one by one
COLORS = dict(compute=("#2a5cc4", "#8ab4ff"), load=("#9a5b00", "#f0b64a"), save=("#0f7464", "#5fcfb8"),
              storage=("#b5372a", "#ff9c8a"), hidden=("#7a3fb0", "#cfa4ff"), device=("#2f7a2a", "#86d67a"),
              other=("#566174", "#a3afc0"))         # on a light page, on a dark one; letters on them have the page's colour
KINDS = dict(R="compute", m="compute", H="hidden", K="load", c="load", g="device", s="storage")
TEXTURES = dict(load="M0 6L6 0", hidden="M1.5 1.5h2v2h-2z", device="M0 3h6", save="M3 0v6", storage="M0 0L6 6",
                other="M0 3h6M3 0v6")               # where there is no room for a letter; compute has none


def style() -> str:
    """The style sheet, and the patterns of idle time and of cells without a letter."""
    light, dark = (";".join(f"--{name}:{pair[number]}" for name, pair in COLORS.items()) for number in (0, 1))
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in (*COLORS, "page", "ink", "soft"))
    textures = "".join(f".{name}.t{{fill:url(#{name})}}" for name in TEXTURES)
    rules = (f"svg{{--page:#fff;--ink:#1b2330;--soft:#566174;--line:#d3d9e2;{light};font:{SIZE}px system-ui,sans-serif}}"
             f"@media(prefers-color-scheme:dark){{svg{{--page:#161b22;--ink:#e5eaf1;--soft:#a3afc0;--line:#343e4d;{dark}}}}}"
             f"text{{fill:var(--ink)}}{fills}{textures}.t{{shape-rendering:crispEdges}}.on{{fill:var(--page);font-size:11px}}"
             ".title{font-size:16px;font-weight:600}.head{font-size:13px;font-weight:600}.end{text-anchor:end}"
             ".mid{text-anchor:middle}.halo{stroke:var(--page);stroke-width:4px;paint-order:stroke}.idle{fill:url(#idle)}"
             ".lane{fill:var(--line);opacity:.35}.apart{stroke:var(--page);stroke-width:.7px}"
             ".line{stroke:var(--line)}.thin{stroke:var(--soft);fill:none}.mark{stroke:var(--ink);fill:none}")
    shapes = {name: (f'<rect class="{name}" width="6" height="6"/>', path, "page") for name, path in TEXTURES.items()}
    shapes["idle"] = "", "M-1 1L1 -1M0 6L6 0M5 7L7 5", "soft"
    patterns = [f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">{ground}<path d="{path}" '
                f'style="stroke:var(--{line})"/></pattern>' for name, (ground, path, line) in shapes.items()]
    return f"<style>{rules}</style><defs>{''.join(patterns)}</defs>"


def plain(words) -> str:
    """Text for XML: escaped, and without what XML does not allow."""
    return escape(re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(words)))


def wide(words: str, size: float = SIZE) -> float:
    """Pixels, at most, that `words` take."""
    return 0.58 * size * len(words)


def text(x: float, y: float, words: str, names: str = "", room: float = WIDTH) -> str:
    if wide(words) > room:
        words = words[:max(1, int(room / wide("m")) - 1)] + "\u2026"
    return f'<text class="{names}" x="{x:.6g}" y="{y:.6g}">{plain(words)}</text>'


def box(x: float, y: float, width: float, height: float, names: str, tip: str = "", letters=()) -> list[str]:
    """A rectangle, with the first of `letters` that fits into it."""
    body = f"><title>{plain(tip)}</title></rect>" if tip else "/>"
    parts = [f'<rect class="{names}" x="{x:.2f}" y="{y:.6g}" width="{width:.2f}" height="{height:.6g}"{body}']
    fitting = [words for words in letters if words and wide(words, 11) <= width - 2.5 and height >= 11]
    return parts + [text(round(x + width / 2, 2), y + height / 2 + 4, words, "on mid") for words in fitting[:1]]


def legend(y: float, entries: list[tuple[str, str, str]], textures: bool = False) -> tuple[list[str], float]:
    """(color, letter, words) each, in as many lines as they take -> elements, and where they end."""
    parts, x = [], LEFT
    for names, letter, words in entries:
        size = max(14, wide(letter, 11) + 3)
        if x > LEFT and x + size + 20 + wide(words) > WIDTH - 10:
            x, y = LEFT, y + 18
        parts += box(x, y + 2, size, 14, names, "", [letter])
        if textures:
            parts, size = parts + box(x + size, y + 2, 14, 14, names + " t"), size + 14
        parts.append(text(x + size + 6, y + 13, words, room=WIDTH - 16 - size - x))
        x += size + 22 + wide(words)
    return parts, y + 18 * bool(entries)


def number(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def and_more(y: float, items: list, most: int) -> tuple[list[str], float]:
    return ([text(LEFT, y + 13, f"and {len(items) - most} more")], y + 18) if len(items) > most else ([], y)


@dataclass
class Cells:
    """Rows of cells, such as layers x chunks, or the blocks of a prompt. A kind is a letter; `legend` says what it stands for."""
    title: str
    rows: list[tuple[str, list[tuple[str, str]]]]                               # (what it is, [(kind, tooltip)])
    legend: dict[str, str]
    MOST = 2000                    # rectangles that say what they are; beyond, a row says it

    def color(self, kind: str) -> str:
        return KINDS.get(kind) or KINDS.get(kind.upper(), "other")

    def words(self) -> str:
        rows = []
        for kinds, alike in groupby(self.rows, lambda row: [kind for kind, _ in row[1]]):
            labels, runs = [label for label, _ in alike], [f"{len(list(run))} {kind}" for kind, run in groupby(kinds)]
            rows.append(" to ".join(dict.fromkeys([labels[0], labels[-1]])) + ": " * any(labels) + ", ".join(runs[:20]) +
                        ", and so on" * (len(runs) > 20))
        return "; ".join(rows[:100] + [", ".join(f"{kind}: {words}" for kind, words in self.legend.items())])

    def draw(self, y: float, at) -> tuple[list[str], float]:
        columns, parts = max((len(cells) for _, cells in self.rows), default=0), []
        width, height = min(24.0, (WIDTH - 12 - LEFT) / max(columns, 1)), min(18.0, max(4.0, 320 / max(len(self.rows), 1)))
        lettered = width >= 10 and height >= 12
        rows = [[[cell] for cell in cells] if lettered else [list(run) for _, run in groupby(cells, lambda cell: cell[0])]
                for _, cells in self.rows]                                      # without letters, equal neighbours are one
        crowded = sum(map(len, rows)) > self.MOST
        for (label, cells), runs, top in zip(self.rows, rows, (y + row * height for row in range(len(rows)))):
            x, paths = LEFT, {}
            if height >= 12 or (top - y) % 60 < height:
                parts.append(text(LEFT - 8, top + height / 2 + 4, label, "end", LEFT - 16))
            for run in runs:
                kind, room, tip = run[0][0], len(run) * width, " to ".join(dict.fromkeys([run[0][1], run[-1][1]]))
                if crowded:
                    paths[kind] = paths.get(kind, "") + f"M{x:.1f} {top:.6g}h{room:.1f}v{height:.6g}h-{room:.1f}z"
                else:
                    parts += box(x, top, room - min(1, width / 4), height - (height > 6), self.color(kind) +
                                 ("" if height >= 12 and room >= 10 else " t"), tip + f": {len(run)}" * (len(run) > 1),
                                 [f"{kind} {len(run)}" * (len(run) > 1), kind])
                x += room
            for kind, path in paths.items():
                tip = f"{label}: {sum(cell[0] == kind for cell in cells)} of {len(cells)} {self.legend.get(kind, kind)}"
                parts.append(f'<path class="{self.color(kind)} t" d="{path}"><title>{plain(tip)}</title></path>')
        found = {kind for _, cells in self.rows for kind, _ in cells}
        below, end = legend(y + len(rows) * height + 4, [(self.color(kind), kind, words) for kind, words in self.legend.items()
                                                         if kind in found], textures=not lettered)
        return parts + below, end


@dataclass
class Pointers:
    """Chunks computed from the front and loaded from the back, each where it lies in the prompt and when it took place, as
    (chunk, start, end) in seconds of the timeline."""
    title: str
    chunks: int
    computed: list[tuple[int, float, float]]
    loaded: list[tuple[int, float, float]]
    HEIGHT = 150

    def words(self) -> str:
        computed, loaded = (len({chunk for chunk, *_ in side}) for side in (self.computed, self.loaded))
        return (f"{number(self.chunks, 'chunk')}, the first at the bottom: {computed} computed from the front, {loaded} loaded "
                f"from the back. {self.meeting()}")

    def meeting(self) -> str:
        if not self.computed or not self.loaded:
            return "They do not meet: nothing is " + ("loaded" if self.computed else "computed" if self.loaded else "to be done")
        return f"They meet at chunk {min(chunk for chunk, *_ in self.loaded)} of {self.chunks}"

    def draw(self, y: float, at) -> tuple[list[str], float]:
        bottom, step = y + self.HEIGHT, self.HEIGHT / max(self.chunks, 1)
        parts = box(LEFT, y, RIGHT - LEFT, self.HEIGHT, "lane")
        parts += [text(LEFT - 8, y + 10, f"chunk {self.chunks - 1}", "end", LEFT - 16), text(LEFT - 8, bottom, "chunk 0", "end")]
        for names, did, spans in (("compute", "computed", self.computed), ("load t", "loaded", self.loaded)):
            for chunk, start, end in spans:
                parts += box(at(start), bottom - (chunk + 1) * step, max(1.0, at(end) - at(start)), max(0.7, step - 0.5), names,
                             f"chunk {chunk} {did}: {start * 1e3:.2f} to {end * 1e3:.2f} ms", [str(chunk)])
        if self.computed and self.loaded:
            level = bottom - min(chunk for chunk, *_ in self.loaded) * step
            x = at(max(end for *_, end in self.computed + self.loaded))
            left = x + 12 if x + 20 + wide(self.meeting()) < RIGHT else LEFT + 8
            parts += [f'<path class="mark" stroke-dasharray="4 3" d="M{LEFT} {level:.6g}H{RIGHT}"/>',
                      f'<circle class="mark" cx="{x:.6g}" cy="{level:.6g}" r="5" stroke-width="2"/>',
                      text(left, level - 8 if level > y + 24 else level + 18, self.meeting(), "halo")]
        below, end = legend(bottom + 6, [("compute", "\u25b2", "computed, from the front"),
                                         ("load", "\u25bc", "loaded, from the back")])
        return parts + below, end


@dataclass
class Tree:
    """A radix tree as an indented list: nodes of (depth, pages, hits, tiers that hold it, whether on the request's path)."""
    title: str
    nodes: list[tuple[int, int, int, tuple[str, ...], bool]]
    legend: dict[str, str] = field(default_factory=dict)                        # tier -> words
    MOST = 40

    def shown(self) -> list[tuple]:
        """The first nodes, and those on the path wherever they stand."""
        room = self.MOST - sum(node[4] for node in self.nodes)
        beside = itertools.count()
        return [node for node in self.nodes if node[4] or next(beside) < room]

    def words(self) -> str:
        lines = [f"depth {depth}, {number(pages, 'page')}, {number(hits, 'hit')}, in {' and '.join(tiers) or 'no tier'}" +
                 ", on the path" * on_path for depth, pages, hits, tiers, on_path in self.shown()]
        more = len(self.nodes) - len(lines)
        lines += [f"and {more} more"] * (more > 0)
        return "; ".join(lines + [f"{tier}: {words}" for tier, words in self.legend.items()])

    def draw(self, y: float, at) -> tuple[list[str], float]:
        tiers = sorted({*self.legend, *(tier for node in self.nodes for tier in node[3])})
        longest, parts, parents = max((pages for _, pages, *_ in self.nodes), default=1) or 1, [], {}
        for depth, pages, hits, where, on_path in self.shown():
            x, said = 28 + 14 * min(depth, 14), f"{number(pages, 'page')}, {number(hits, 'hit')}"
            length, parents[depth] = max(6, pages / longest * (260 - 14 * min(depth, 14))), y
            if depth:
                parts.append(f'<path class="thin" d="M{x - 9} {parents.get(depth - 1, y) + 18:.6g}V{y + 9:.6g}H{x}"/>')
            parts += box(x, y + 2, length, 14, "compute" if on_path else "other", said)
            if on_path:
                parts.append(f'<path class="mark" stroke-width="2" d="M{x - 1} {y + 1:.6g}h{length + 2:.6g}v16H{x - 1}z"/>'
                             f'<path class="ink" d="M{x - 12} {y + 4:.6g}l8 5l-8 5z"/>')
            parts.append(text(x + length + 8, y + 13, said + ", on the path" * on_path))
            for left, tier in enumerate(tiers):
                left = 530 + left * min(40, 250 / len(tiers))
                parts += (box(left, y + 1, 36, 15, "device", f"held in {tier}", [tier]) if tier in where else
                          [f'<path class="thin" stroke-dasharray="2 3" d="M{left:.6g} {y + 1:.6g}h36v15h-36z"/>'])
            y += 19
        more, y = and_more(y, self.nodes, len(self.shown()))
        below, end = legend(y + 4, [("device", tier, words) for tier, words in self.legend.items()])
        return parts + more + below, end


@dataclass
class MiniBatches:
    """Of each mini-batch its blocks, and what link and processor take for it: (requests, ACT blocks on the device, ACT blocks
    in host memory, KV blocks, seconds of the link, seconds of the processor)."""
    title: str
    batches: list[tuple[int, int, int, int, float, float]]
    MOST = 12
    BLOCKS = (("device", "A", "activations on the device"), ("hidden", "H", "activations in host memory"),
              ("load", "K", "K and V"))

    def words(self) -> str:
        lines = [f"{number(requests, 'request')}, blocks: " + ", ".join(
            f"{count} {what}" for count, (*_, what) in zip(blocks, self.BLOCKS)) +
            f", link {link * 1e3:.2f} ms, processor {compute * 1e3:.2f} ms"
            for requests, *blocks, link, compute in self.batches[:self.MOST]]
        return "; ".join(lines + [f"and {len(self.batches) - self.MOST} more"] * (len(self.batches) > self.MOST))

    def draw(self, y: float, at) -> tuple[list[str], float]:
        most = max((sum(batch[1:4]) for batch in self.batches), default=1) or 1
        slowest = max((max(batch[4:]) for batch in self.batches), default=1) or 1
        parts = [text(LEFT, y + 10, "blocks", "soft"), text(490, y + 10, "link and processor: balanced if equal", "soft")]
        for batch, (requests, *blocks, link, compute) in enumerate(self.batches[:self.MOST], 1):
            y += 16 if batch == 1 else 38
            parts += [text(LEFT - 8, y + 13, f"batch {batch}", "end"),
                      text(LEFT - 8, y + 27, number(requests, "request"), "end soft")]
            x, counts = LEFT, [f"{letter} {count}" for (_, letter, _), count in zip(self.BLOCKS, blocks)]
            for (names, _, what), count, said in zip(self.BLOCKS, blocks, counts):
                length = count / most * 240
                parts += box(x, y + 2, max(0.5, length - 1), 26, names, f"{count}: {what}", [said]) if count else []
                x += length
            parts.append(text(x + 8, y + 19, ", ".join(counts)))
            for names, what, seconds, top in (("load", "link", link, y + 1), ("compute", "processor", compute, y + 16)):
                length, said = max(1, seconds / slowest * 160), f"{what} {seconds * 1e3:.2f} ms"
                parts += box(490, top, length, 13, names, said) + [text(496 + length, top + 11, said)]
        more, y = and_more(y + 38, self.batches, self.MOST)
        below, end = legend(y, list(self.BLOCKS))
        return parts + more + below, end


def kind(label: str) -> str:
    return re.sub(r"\s*\d+", "", label)


def gaps(spans: list[Span], start: float, end: float) -> list[tuple[float, float]]:
    """When a lane is idle, from `start` to `end`."""
    found, reached = [], start
    for span in sorted(spans, key=lambda span: span.start):
        if min(span.start, end) > reached:
            found.append((reached, min(span.start, end)))
        reached = max(reached, span.end)
    return found + [(reached, end)] * (reached < end)


def runs(spans: list[Span], scale: float) -> list[list[Span]]:
    """The spans of a lane, each by itself, but for neighbours of a kind that are too small for that, at `scale` px a second."""
    found, reached = [], 0.0
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        last = found[-1][-1] if found else None
        size = max(span.end - span.start, last.end - last.start) * scale if last else 0
        if last and (span.start - reached) * scale < NEAR and size < (SMALL if kind(span.label) == kind(last.label) else TINY):
            found[-1].append(span)
            reached = max(reached, span.end)
        else:
            found.append([span])
            reached = span.end
    return found


def busy(run: list[Span]) -> float:
    """The share of the time from the first to the last in which they were busy."""
    start, end = run[0].start, max(span.end for span in run)
    return 1 - sum(resume - stop for stop, resume in gaps(run, start, end)) / (end - start or 1)


def draw_run(run: list[Span], at, top: float) -> list[str]:
    """A rectangle from the first to the last; of many it is as high as the share of the time in which they were busy."""
    start, end, label, share = run[0].start, max(span.end for span in run), run[0].label, busy(run)
    match = re.fullmatch(r"(?:([A-Z]) )?(?:layer|chunk|block)s? (\d+)", label)
    letters = ["".join(filter(None, match.groups()))] if match else [label, label.split(" ")[0], label[:1]]
    if len(run) > 1:
        names = list(dict.fromkeys(span.label for span in run))
        names = list(dict.fromkeys(map(kind, names))) if len(names) > 1 else names
        label = f"{' and '.join(names[:4])}, {len(run)} of them"
        letters = [label, *names[:1]]
    left, high = min(at(start), RIGHT - 0.6), (LANE - 6) * max(share, 0.1)
    tip = f"{label}: {start * 1e3:.2f} to {end * 1e3:.2f} ms" + f", busy {share:.0%} of it" * (share < 0.995)
    width, names = max(0.6, at(end) - left), run[0].lane + " apart" * (at(end) - left > 3)
    return box(left, top + LANE - 3 - high, width, high, names, tip, letters)


def ticks(end: float) -> tuple[list[float], int]:
    """Round numbers from 0 to `end`, eight steps at most, and their decimals."""
    power = 10.0 ** math.floor(math.log10(end / 8)) if end > 0 else 1.0
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power, 20 * power) if end / step <= 8)
    return [number * step for number in range(int(end / step + 1e-9) + 1)], max(0, -math.floor(math.log10(step) + 1e-9))


def before_first_token(timeline: Timeline) -> tuple[float, bool]:
    """Seconds until something is decoded, or else until the last that computes or brings is over; whether anything is decoded."""
    starts = [span.start for span in timeline.spans if span.label == "decode"]
    return min(starts, default=max((span.end for span in timeline.spans if span.lane != "save"), default=0.0)), bool(starts)


def picture(timeline: Timeline, plan=None, title: str = "") -> str:
    """An SVG document: `plan`, and under it the lanes of `timeline` that occur, with their idle time before the first token."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    first, decodes = before_first_token(timeline)
    parts, y, scale = [], 12.0, (RIGHT - LEFT) / (timeline.end or 1.0)

    def at(seconds: float) -> float:
        return LEFT + min(max(0.0, seconds), timeline.end) * scale

    # 1. The plan
    if title:
        parts, y = [text(12, 26, title, "title", WIDTH * 0.7)], 40.0
    if plan is not None:
        drawn, end = plan.draw(y + 24, at)
        parts, y = [*parts, text(12, y + 12, plan.title, "head", WIDTH), *drawn], end + 14

    # 2. The lanes
    y, said, low = y + 16 * decodes, [], False
    bottom, (marks, decimals) = y + LANE * len(lanes), ticks(timeline.end * 1e3)
    for mark in marks if lanes else ():
        x = at(mark / 1e3)
        parts += [f'<path class="line" d="M{x:.2f} {y:.6g}V{bottom + 3:.6g}"/>',
                  text(round(x, 2), bottom + 16, f"{mark:.{decimals}f}" + " ms" * (mark == marks[-1]), "mid")]
    for top, lane in zip((y + LANE * number for number in range(len(lanes))), lanes):
        spans = [span for span in timeline.spans if span.lane == lane]
        parts += [text(LEFT - 8, top + 18, lane, "end"), *box(LEFT, top + 3, RIGHT - LEFT, LANE - 6, "lane")]
        if lane != "save":
            for start, end in gaps(spans, 0.0, first):
                if (end - start) * scale >= TINY:
                    tip = f"idle {round((end - start) * 1e3, 2):g} ms"
                    parts += box(at(start), top + 3, at(end) - at(start), LANE - 6, "idle", tip)
            said.append(f"{lane} idle {timeline.bubble(lane, 0, first):.0%}")
            parts.append(text(RIGHT + 8, top + 18, said[-1][len(lane) + 1:]))
        for run in runs(spans, scale):
            parts += draw_run(run, at, top)
            low |= busy(run) < 0.995
    if decodes:
        x = at(first)
        parts += [f'<path class="mark" stroke-width="1.5" d="M{x:.2f} {y - 3:.6g}V{bottom:.6g}"/>',
                  text(round(x, 2), y - 6, "first token", "mid halo" if x < RIGHT else "end halo")]
    if lanes:
        y = bottom + 24
        parts += box(LEFT, y + 2, 22, 14, "idle") + [text(LEFT + 28, y + 13, "idle" + " before the first token" * decodes +
                                                          "; a lower bar: many spans, and the share they were busy" * low)]
    else:
        parts.append(text(LEFT, y + 14, "(nothing happened)"))
    height = math.ceil(y + 26)

    # 3. What it says in words
    until = "Before the first token" if decodes else "Until the end"
    words = [f"{plan.title}. {plan.words()}"] if plan is not None else []
    if lanes:
        words.append(f"Who was busy when, in {timeline.end * 1e3:.1f} ms: {', '.join(lanes)}")
    if said:
        words.append(f"{until}, after {first * 1e3:.1f} ms: {', '.join(said)}")
    size = f'width="{WIDTH}" height="{height}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size} role="img">',
        f"<title>{plain(title or 'Who was busy when')}</title>",
        f"<desc>{plain('. '.join(words) or '(nothing happened)')}</desc>",
        style(), f'<rect class="page" {size}/>', *parts, "</svg>\n"])


def of(timeline: Timeline, title: str = "", plan=None) -> str:
    """The picture of a timeline with the plan that goes with it, or that the function `plan` returns. Of a long answer it shows
    the beginning, so that what came before the first token is not too narrow to see."""
    plan, lanes = plan or timeline.plan, timeline.detail or timeline
    first, decodes = before_first_token(lanes)
    if decodes and lanes.end > LONG * first:
        title, lanes = f"{title}, the first {LONG * first * 1e3:.0f} of {lanes.end * 1e3:.0f} ms", lanes.window(0, LONG * first)
    return picture(lanes, plan and plan(), title)
