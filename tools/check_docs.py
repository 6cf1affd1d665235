"""Check README.md and docs/*.md against the code.

    python -m tools.check_docs          list what is wrong, and exit with 1 if there is anything

Checked are: the generated tables; every option of every chapter, with its default; every command that is shown; the output of
tools.by_hand and tools.figure in lessons; links and files; names of code, where a page says in which file they are.
tests/test_demos.py runs the demos and compares their output with the lessons.
"""

import argparse
import ast
import importlib
import re
import shlex
import sys
from functools import cache
from itertools import product
from pathlib import Path

from shell import cli
from tools import by_hand, exercise, figure, report

ROOT = exercise.ROOT
LESSONS, REFERENCE = ROOT / "docs/lessons", ROOT / "docs/reference.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "models/classroom/README.md"]
CHAPTERS = sorted(path.stem for path in ROOT.glob("0[1-9]_*.py"))
DRAWINGS = {"tools.by_hand": by_hand.printed, "tools.figure": figure.printed}
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)

# 1. Parse pages and chapters --------------------------------------------------------------------------------


def prose(markdown: str) -> str:
    """Return a page without fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", markdown), flags=re.S)


def spans(markdown: str) -> list[str]:
    """Return all texts in backticks."""
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(markdown).replace("\n", " "))


def commands(markdown: str) -> list[list[str]]:
    """Return the words after `python` of every command on a page."""
    lines = [line for _, content in FENCE.findall(markdown) for line in content.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *spans(markdown)]:
        for part in re.split(r"&&|[|>;]", line.strip().removeprefix("$ ").partition("  #")[0]):
            if match := re.match(r"\s*(?:\w+=\S+ +)*(?:\S*/)?python3? +(.*)", part):
                found.append(shlex.split(match[1], comments=True))
    return found


@cache
def parser(chapter: str) -> argparse.ArgumentParser:
    module = importlib.import_module(chapter)
    made = cli.parser_for(module.__doc__)
    module.add_arguments(made)
    made.exit_on_error = False
    return made


def options(chapter: str) -> dict:
    """Return option -> its argparse action, for all options of a chapter."""
    actions = parser(chapter)._actions
    return {option: action for action in actions for option in action.option_strings if action.dest != "help"}


def numbered(words: str) -> set[str]:
    """Return the names of chapters, given 'all', '03, 07' or '02 to 06, 08'."""
    numbers = set()
    for part in words.replace("all", "01 to 09").split(", "):
        first, _, last = part.partition(" to ")
        numbers |= set(range(int(first), int(last or first) + 1))
    return {name for name in CHAPTERS if int(name[:2]) in numbers}


@cache
def names_in(file: str) -> set[str]:
    """Return the names of a file's classes, functions and constants, and Class.method of its methods."""
    source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
    names = set(exercise.functions(source))
    for node in ast.parse(source).body:
        names |= {node.name} if isinstance(node, ast.ClassDef) else set()
        names |= {name.id for target in getattr(node, "targets", []) for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def anchors(markdown: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# 2. Checks: each yields a sentence for each error on a page ----------------------------------------------------


def generated(page: Path, text: str):
    for name in report.out_of_date(text, report.read()) if page in report.PAGES else ():
        yield f"the table {name} differs from the measured results; run python -m tools.report"


def described_options(page: Path, text: str):
    if page != REFERENCE:
        return
    described = set()
    for row in re.findall(r"^\| (`-.+) \|$", text, re.M):
        names, chapters, default, meaning = re.split(r" (?<!\\)\| ", row)
        defaults = re.findall(r"`([^`]+)`", default)
        words = enumerate(word.split()[0] for word in re.findall(r"`([^`]+)`", names))
        for chapter, (number, option) in product(sorted(numbered(chapters)), words):
            described.add((chapter, option))
            action = options(chapter).get(option)
            if action is None:
                yield f"{chapter} has no {option}"
                continue
            used = str(action.default)
            if used not in ("None", "False", "[]", "{}") and defaults[number : number + 1] != [used]:
                yield f"{option} of {chapter} has the default {used}"
            yield from (f"{option} of {chapter} may be {choice}" for choice in action.choices or () if f"`{choice}`" not in meaning)
    missing = {(chapter, option) for chapter in CHAPTERS for option in options(chapter)} - described
    yield from (f"{option} of {chapter} is not described" for chapter, option in sorted(missing))


def shown_commands(page: Path, text: str):
    for program, *words in commands(text):
        said = f"python {program} {' '.join(words)}"
        chapter, drawing = re.fullmatch(r"(0[1-9]\w*)\.py", program), DRAWINGS.get(words[0] if words else "")
        if chapter or drawing:
            try:
                drawing(words[1:]) if drawing else parser(chapter[1]).parse_args(words)
            except (SystemExit, ImportError, argparse.ArgumentError) as error:
                yield f"{said}: {error}"
        elif program == "-m" and re.match(r"(benchmarks|examples|models|tests|tools)\.(?!NAME)", words[0]):
            path = ROOT / f"{words[0].replace('.', '/')}.py"
            files = (path, ROOT / "benchmarks" / "measure.py") if path.is_file() else ()  # measure.py has options of all benchmarks
            source = "".join(file.read_text(encoding="utf-8") for file in files)
            missing = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
            if missing or not source:
                yield f"{said}: there is no {' '.join(missing) or path.name}"


def links_and_files(page: Path, text: str):
    for target in re.findall(r"\]\((?!https://)([^()\s]+)\)", prose(text)):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or anchor and anchor not in anchors(place.read_text(encoding="utf-8")):
            yield f"{target} leads nowhere"
    for span in spans(text) if page.name != "production.md" else ():  # this page names files of other projects, too
        folder = re.match(r"(benchmarks|common|docs|examples|models|tests|tools)/[\w./-]+$", span.replace("NAME-DEVICE.json", ""))
        if folder and not (ROOT / folder[0]).exists() and "/last" not in span:
            yield f"there is no {span}"


def names(page: Path, text: str):
    """Check names that follow a file, as in `file.py`: `Name`, `Class.method`, and in lessons every `Class.method`."""
    for line in re.sub(r"\n  (?=\S)", " ", prose(text)).splitlines():
        parts = re.split(r"`([\w/]+\.py)`: ", line)
        for file, words in zip(parts[1::2], parts[2::2]):
            mentioned = re.findall(r"`([A-Za-z_][\w.]*)`", words)
            yield from (f"{file} has no {name}" for name in mentioned if name not in names_in(file))
    files = *ROOT.glob("0[1-9]*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("examples/*.py")
    known = set().union(*(names_in(path.relative_to(ROOT).as_posix()) for path in files))
    methods = (word for word in spans(text) if page.parent == LESSONS and re.fullmatch(r"[A-Z]\w*\.\w+", word))
    yield from (f"{word} is defined nowhere" for word in methods if word not in known)


def numbers_by_hand(page: Path, text: str):
    """Compare the output below a command of tools.by_hand or tools.figure with its real output. A line `...` stands for any
    lines."""
    for block in re.findall(r"^```console\n(\$ python -m tools\.(?:by_hand|figure) .*?)^```$", text, re.M | re.S):
        for command, shown in re.findall(r"^\$ python -m (.*)\n((?:[^$].*\n|\n)*)", block, re.M):
            (program, *words), pattern = command.split(), ".*".join(map(re.escape, re.split(r"^\.\.\.\n", shown, flags=re.M)))
            if not re.fullmatch(pattern, DRAWINGS[program](words) + "\n", re.S):
                yield f"{command} prints other output"


def pasted() -> dict[str, str]:
    """Return chapter -> the output of its demo, as its lesson shows it."""
    text = "".join(page.read_text(encoding="utf-8") for page in LESSONS.glob("*.md"))
    return dict(re.findall(r"^```console\n\$ python (0[1-9]\w+)\.py --demo\n((?s:.*?))^```$", text, re.M))


def lessons(page: Path, text: str):
    if page.parent == LESSONS and page.stem in CHAPTERS:
        lines = [line for line in pasted().get(page.stem, "").splitlines() if line.strip() not in ("", "...")]
        if not 0 < len(lines) <= 15:
            yield f"{len(lines)} lines of the demo {page.stem} are pasted instead of 1 to 15"


CHECKS = generated, described_options, shown_commands, numbers_by_hand, links_and_files, names, lessons


def main():
    pages = ((page, page.read_text(encoding="utf-8")) for page in PAGES)
    wrong = [f"{page.name}: {sentence}" for page, text in pages for check in CHECKS for sentence in check(page, text)]
    print("\n".join(wrong) or "The documents agree with the code.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
