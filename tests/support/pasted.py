"""Compare the output that a lesson shows with the output that a demo prints, except for numbers that vary."""

import re

N = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
VARIES = [  # (pattern in a demo's output, replacement)
    (rf"^ *(?:compute|load|save|storage|link) *\|[^|]*\|(?: idle +{N}%)?$", "<a lane>"),
    (r"\|[#= ]+\| +(?=\d)", "<a bar> "),
    (r"\|[CBL]+\|", "<chunks>"),
    (rf"{N} to {N}", "N to N"),
    (rf"{N}(?=:{N}| GB/s)", "N"),
    (rf"{N}(?=x?(?: (?:ms|us|s|tokens/s|MB|times|tokens came|of (?:chapter|computing)|as soon|s each|sooner|than)\b))", "N"),
    (rf"{N}x", "Nx"),
    (r"^A layer, ms: .*", "<costs>"),
    (r"^Plan [RHK]+: .*", "<a plan>"),
    (r"\d+%", "N%"),
    (r"^  (?:L1|  ) (?:L2|  ) (?:L3|  ) .*", "<a node>"),
    (r"^  (?:hybrid|kv-only|act-only|paper) +busy: .*", "<lanes>"),
    (r"^  hybrid: .*", "<hybrid>"),
]


def compared(printed: str) -> list[str]:
    """Return the lines of an output, with the parts that vary replaced.

    Empty lines are dropped. Consecutive lanes, and consecutive nodes, become one line; several spaces become one."""
    printed, lines = re.sub(r"[ \t]+$", "", printed, flags=re.M) + "\n", []
    for pattern, instead in VARIES:
        printed = re.sub(pattern, instead, printed, flags=re.M)
    for line in (re.sub(" +", " ", line).strip() for line in printed.splitlines()):
        if line and (line not in ("<a lane>", "<a node>") or lines[-1:] != [line]):
            lines.append(line)
    return lines


def first_difference(shown: str, printed: str) -> str | None:
    """Return the first difference between what a page shows and what a demo printed, or None.

    A line `...` on the page stands for any lines."""
    printed, at, pieces = compared(printed), 0, re.split(r"^\.\.\.$", shown, flags=re.M)
    for number, piece in enumerate(pieces):
        lines = compared(piece)
        if number and number == len(pieces) - 1:  # the last piece is at the end
            at = max(at, len(printed) - len(lines))
        elif number:  # find the next place where it fits
            fits = (start for start in range(at, len(printed)) if printed[start : start + len(lines)] == lines)
            at = next(fits, at)
        for line in lines:
            if printed[at : at + 1] != [line]:
                return f"shown {line!r}, printed {printed[at : at + 1]}"
            at += 1
    return f"not shown: {printed[at]!r}" if at < len(printed) else None
