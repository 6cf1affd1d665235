"""Make Markdown tables of results: a benchmark prints them at its end, and docs/measured.md shows them.

A figure is a number, or the `spread` of samples: {median, min, max, samples} (`benchmarks.measure`).
"""

import re
from collections.abc import Iterable

# 1. Rows ----------------------------------------------------------------------------------------------------

def rows(found: list[dict], claim: str, **wanted) -> list[dict]:
    """Return the rows of a part (`claim` in the file) that have the `wanted` values, each with its
    `model`."""
    every = [dict(row, model=entry["model"]) for entry in found if entry["claim"] == claim for row in entry["rows"]]
    return [row for row in every if all(row.get(key) == want for key, want in wanted.items())]


def grouped(rows: list[dict], same: tuple[str, ...], by: str) -> list[dict]:
    """Group rows that have equal values in the keys `same`. Returns: one row for each group, a copy of its
    last row with `at`: value of the key `by` -> row."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in same), {})[row[by]] = row
    return [dict(list(group.values())[-1], at=group) for group in groups.values()]


def median(figure) -> float:
    return float(figure["median"] if isinstance(figure, dict) else figure)


# 2. Numbers -------------------------------------------------------------------------------------------------

def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def milliseconds(figure) -> str:
    value = median(figure)
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 20 else f"{value:,.0f} ms"


def with_spread(figure: dict, unit: str = "", text=number) -> str:
    """Return the median with the smallest and the largest sample in brackets; a single sample stands
    alone."""
    middle = text(figure["median"]) + unit
    if len(figure["samples"]) == 1:
        return middle
    return f"{middle} ({text(figure['min'])} to {text(figure['max'])})"


def plan(letters: str) -> str:
    """Count the layers of each way in a plan of one letter a layer, as "1 R, 7 H". Other text is returned
    unchanged."""
    if set(letters) - set("RHK"):
        return letters
    return ", ".join(f"{letters.count(way)} {way}" for way in "RHK" if way in letters)


def listed(words: Iterable[str]) -> str:
    """Join words as "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# 3. Tables --------------------------------------------------------------------------------------------------

FORMATS = {
    "n": lambda figure: number(median(figure)),
    "ms": milliseconds,
    "MB": lambda size: f"{size / 1e6:.1f} MB",
    "spread": with_spread,
    "x": lambda figure: with_spread(figure, "x"),
    "%": lambda figure: with_spread(figure, text="{:.0%}".format) if isinstance(figure, dict) else f"{figure:.0%}",
    "plan": plan,
}  # fmt: skip


class Shown:
    """A value of a row, for use in a template such as "{ttft_ms:ms}, {over[03]:spread}"."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, key):
        """Look a key up by its text: `str.format` passes [03] as a number and [True] as a word."""
        for name, value in self.value.items():
            if str(name) in (str(key), f"0{key}"):
                return Shown(value)
        raise KeyError(key)

    def __format__(self, kind: str) -> str:
        return FORMATS[kind](self.value) if kind in FORMATS else format(self.value, kind)


def table(caption: str, columns: dict[str, str], rows: list[dict]) -> str:
    """Return a Markdown table under its caption; empty without rows.

    `columns`: header -> template of its cells. A cell is empty if its row lacks a key of the template. The
    caption is a template as well, filled from the first row."""
    def cell(template: str, row: dict) -> str:
        try:
            return template.format_map({key: Shown(value) for key, value in row.items()})
        except KeyError:
            return ""
    lines = [[cell(template, row) for template in columns.values()] for row in rows]
    return paragraphs(cell(caption, rows[0]), markdown(list(columns), lines)) if lines else ""


def across(rows: list[dict], cells: dict[str, str]) -> dict[str, str]:
    """Return columns for grouped rows: the templates of `cells` once for each key of `at`, side by side."""
    columns = {}
    for by in dict.fromkeys(by for row in rows for by in row["at"]):
        for header, template in cells.items():
            columns[f"{by}: {header}" if header else f"{by}"] = re.sub(r"{(\w+)", rf"{{at[{by}][\1]", template)
    return columns


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
