"""Format the output of tools.by_hand: formulas, tables, lanes, and a picture of all of them."""

import re
from pathlib import Path

from common.timeline import Span, Timeline
from shell import charts


def say(value) -> str:
    """Format a number with at most three decimals, or two from 10 on. A string stays as it is."""
    if isinstance(value, str):
        return value
    return f"{round(value, 2 if abs(value) >= 10 else 3) + 0:,}".removesuffix(".0")


def formulas(title: str, numbers: dict):
    """Yield the formulas under `title` in by_hand.txt, first in symbols and then with `numbers` in their place.

    A line that needs a number which is missing is left out."""
    page = Path(__file__).with_name("by_hand.txt").read_text(encoding="utf-8")
    for line in page.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines():
        if {*re.findall(r"{(\w+)}", line)} <= numbers.keys():
            name, *terms = line.split(" = ")
            symbols = [re.sub("[{}]", "", term) for term in terms[:-1]]
            yield " = ".join([name, *symbols, *terms]).format_map({key: say(each) for key, each in numbers.items()})


def aligned(rows: list[tuple]) -> str:
    """Format rows as a table, with numbers aligned to the right and words to the left."""
    widths = [max(len(say(cell)) for cell in column) for column in zip(*rows)]
    sides = [str.ljust if isinstance(cell, str) else str.rjust for cell in rows[-1]]
    lines = ("  ".join(side(say(cell), width) for side, cell, width in zip(sides, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def chart(spans: list[tuple]) -> str:
    """Draw lanes. A column is 1 ms if the chart then has 12 to 80 columns.

    `spans`: (lane, label, start, end), in ms."""
    timeline, last = Timeline(), max(end for *_, end in spans)
    timeline.spans = [Span(lane, label, start / 1e3, end / 1e3) for lane, label, start, end in spans]
    return charts.chart(timeline, round(last) if 12 <= last <= 80 else 64)


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="monospace" font-size="16.6">
<pattern id="idle" width="8" height="8" patternUnits="userSpaceOnUse"><path d="M0 8L8 0" stroke="#888"/></pattern>
{}</svg>
"""
BOX = '<rect x="{0}" y="{1}" width="10" height="24" fill="{2}"/>'
WORDS = '<text x="{0}" y="{1}" textLength="{2}" xml:space="preserve">{3}</text>\n'


def picture(text: str) -> str:
    """Draw the printed text as SVG. In lanes, busy columns are colored, and idle ones are hatched."""
    parts, lines = [], text.splitlines()
    for y, line in enumerate(lines):
        began, _, row = line.rpartition("|")[0].partition("|")
        for x, letter in enumerate(row, len(began) + 1):
            parts.append(BOX.format(10 * x, 26 * y + 2, "url(#idle)" if letter == "." else "#9ecae1"))
        parts.append(WORDS.format(0, 26 * y + 20, 10 * len(line), line.replace(".", " ") if row else line))
    return SVG.format(10 * max(120, *map(len, lines)), 26 * len(lines), "".join(parts))
