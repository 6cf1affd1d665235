"""What was found, as Markdown: a benchmark prints it at its end, and docs/measured.md shows it.

A figure is a number, or the `spread` of samples: {median, min, max, samples} (`benchmarks.measure`).
"""

import re
from collections.abc import Iterable

# 1. Rows ----------------------------------------------------------------------------------------------------

def rows(found: list[dict], claim: str, **wanted) -> list[dict]:
    """What was found about this claim: rows that have the `wanted` values, `model` among them."""
    every = [dict(row, model=entry["model"]) for entry in found if entry["claim"] == claim for row in entry["rows"]]
    return [row for row in every if all(row.get(key) == want for key, want in wanted.items())]


def grouped(rows: list[dict], same: tuple[str, ...], by: str) -> list[dict]:
    """Rows that are the same in these keys become one, the last of them, whose `at` has all: `by` -> row."""
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
    """The median, the smallest and the largest; of one sample, that."""
    middle = text(figure["median"]) + unit
    if len(figure["samples"]) == 1:
        return middle
    return f"{middle} ({text(figure['min'])} to {text(figure['max'])})"


def plan(letters: str) -> str:
    """Of a letter for each layer, how many of each; what is no such plan stays as it is."""
    if set(letters) - set("RHK"):
        return letters
    return ", ".join(f"{letters.count(way)} {way}" for way in "RHK" if way in letters)


def between(values: Iterable[float], text=number) -> str:
    """The smallest and the largest."""
    values = list(values)
    return f"{text(min(values))} to {text(max(values))}"


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
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
    """A row's value in a template such as "{ttft_ms:ms}, {over[03]:spread}"."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, key):
        """By a key's text: `str.format` takes [03] for a number, and [True] for a word."""
        for name, value in self.value.items():
            if str(name) in (str(key), f"0{key}"):
                return Shown(value)
        raise KeyError(key)

    def __format__(self, kind: str) -> str:
        return FORMATS[kind](self.value) if kind in FORMATS else format(self.value, kind)


def table(caption: str, columns: dict[str, str], rows: list[dict]) -> str:
    """`columns`: header -> the template of its cells; a cell whose row lacks something is empty. The caption is a
    template too, for the first row. Without rows: nothing."""
    def cell(template: str, row: dict) -> str:
        try:
            return template.format_map({key: Shown(value) for key, value in row.items()})
        except KeyError:
            return ""
    lines = [[cell(template, row) for template in columns.values()] for row in rows]
    return paragraphs(cell(caption, rows[0]), markdown(list(columns), lines)) if lines else ""


def across(rows: list[dict], cells: dict[str, str]) -> dict[str, str]:
    """The same columns for each row that is in `at` of the grouped `rows`, side by side."""
    columns = {}
    for by in dict.fromkeys(by for row in rows for by in row["at"]):
        for header, template in cells.items():
            columns[f"{by}: {header}" if header else f"{by}"] = re.sub(r"{(\w+)", rf"{{at[{by}][\1]", template)
    return columns


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
