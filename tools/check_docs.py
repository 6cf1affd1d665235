"""README.md and docs/*.md say what is so.

    python -m tools.check_docs          name what is not, and exit with 1

Checked: the generated tables; every option of every chapter, with its default; that each chapter takes the commands that
are shown; links and anchors; files, and names of code where the lessons say where to look, and of the terms; that each
edit of a lesson can be made; routes, fields and statuses; the parts of a lesson. What a lesson shows of a demo is compared
by tests/test_demos.py, which runs them: `first_difference`.
"""

import argparse
import ast
import importlib
import re
import shlex
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from common import cli, requests, server  # noqa: E402
from tools import report  # noqa: E402

README, LESSONS, REFERENCE = ROOT / "README.md", ROOT / "docs/walkthrough.md", ROOT / "docs/reference.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "models/classroom/README.md"]
CHAPTERS = sorted(path.stem for path in ROOT.glob("0[1-9]_*.py"))
FOLDERS = "benchmarks", "common", "docs", "models", "tests", "tools"
PARTS = ["The question", "By hand", "Run it", "What to see", "Where to look", "One thing to change", "Three questions"]
N = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
VARIES = [  # in what a demo prints: pattern, what becomes of it
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


# 1. What a page holds ---------------------------------------------------------------------------------------


def fences(markdown: str) -> list[tuple[str, str]]:
    """-> (language, content) of the fenced blocks."""
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", markdown, re.M | re.S)


def prose(markdown: str) -> str:
    """Without fenced blocks and comments."""
    markdown = re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", markdown, flags=re.S)


def spans(markdown: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(markdown).replace("\n", " "))


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> what is below it."""
    parts = re.split(rf"^{'#' * level} (.+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def tables(markdown: str, header: str) -> list[list[str]]:
    """The rows of all tables with this header."""
    found, inside = [], False
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if inside and cells:
            found.append(cells)
        inside = bool(cells) and (inside or cells == [name.strip() for name in header.split("|")])
    return [cells for cells in found if not set("".join(cells)) <= set("-: ")]


def commands(markdown: str) -> list[list[str]]:
    """The words behind `python` of every command."""
    lines = [line for _, content in fences(markdown) for line in content.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *spans(markdown)]:
        for part in re.split(r"&&|[|>;]", line.strip().removeprefix("$ ").partition("  #")[0]):
            match = re.match(r"\s*(?:\w+=\S+ +)*(?:\S*/)?python3? +(.*)", part)
            if match:
                found.append(shlex.split(match[1], comments=True))
    return found


@cache
def parser(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(name)
    made = cli.parser_for(module.__doc__)
    module.add_arguments(made)
    made.exit_on_error = False
    return made


@cache
def options(name: str) -> dict:
    """Option -> its argparse action."""
    known = ((string, action) for action in parser(name)._actions for string in action.option_strings)
    return {string: action for string, action in known if string not in ("-h", "--help")}


def numbered(words: str) -> set[str]:
    """'all', '03, 07' or '02 to 06, 08' -> the chapters' names."""
    if words == "all":
        return set(CHAPTERS)
    numbers = set()
    for part in words.split(", "):
        first, _, last = part.partition(" to ")
        numbers |= set(range(int(first), int(last or first) + 1))
    return {name for name in CHAPTERS if int(name[:2]) in numbers}


@cache
def names_in(file: str) -> set[str]:
    """The classes, functions and constants of a file, and the methods of its classes."""
    if not (ROOT / file).is_file():
        return set()
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        for target in getattr(node, "targets", []):
            names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def anchors(markdown: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# 2. What is checked: each yields sentences on what is not so ------------------------------------------------


def generated():
    for page in report.PAGES:
        for name in report.out_of_date(page.read_text(encoding="utf-8"), report.read()):
            yield f"{page.name}: the part {name} is not what was measured; run python -m tools.report"


def described_options():
    rows, described = tables(REFERENCE.read_text(encoding="utf-8"), "option | chapters | default | meaning"), set()
    for names, chapters, default, meaning in rows:
        quoted = re.findall(r"`([^`]+)`", default)
        for name in sorted(numbered(chapters)):
            for number, option in enumerate(word.split()[0] for word in re.findall(r"`([^`]+)`", names)):
                action = options(name).get(option)
                described.add((name, option))
                if action is None:
                    yield f"reference.md: {name} has no {option}"
                    continue
                if action.default not in (None, False, [], {}) and quoted[number : number + 1] != [str(action.default)]:
                    yield f"reference.md: {option} of {name} has the default {action.default}"
                for choice in action.choices or ():
                    if f"`{choice}`" not in meaning:
                        yield f"reference.md: {option} of {name} may be {choice}"
    missing = {(name, option) for name in CHAPTERS for option in options(name)} - described
    yield from (f"reference.md does not describe {option} of {name}" for name, option in sorted(missing))


def shown_commands():
    for page in PAGES:
        for program, *arguments in commands(page.read_text(encoding="utf-8")):
            said = f"{page.name}: python {program} {' '.join(arguments)}"
            if program == "-m" and arguments and arguments[0].partition(".")[0] in ("benchmarks", "tests", "tools"):
                module, *rest = arguments
                path = ROOT / f"{module.replace('.', '/')}.py"
                path = path if path.is_file() else ROOT / module / "__main__.py"
                source = path.read_text(encoding="utf-8") if path.is_file() else ""
                yield from (f"{said}: no {word}" for word in rest if word.startswith("--") and f'"{word}"' not in source)
                if not source and "NAME" not in module:
                    yield f"{said}: there is no such module"
            elif re.fullmatch(r"0[1-9]\w*\.py", program):
                try:
                    parser(program[:-3]).parse_args(arguments)
                except (SystemExit, KeyError, ImportError, argparse.ArgumentError) as error:
                    yield f"{said}: {error}"


def links_and_files():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^()\s]+)\)", prose(text)):
            path, _, anchor = target.partition("#")
            place = (page.parent / path).resolve() if path else page
            if not target.startswith("https://") and (
                not place.exists() or anchor and anchor not in anchors(place.read_text(encoding="utf-8"))):  # fmt: skip
                yield f"{page.name}: {target} leads nowhere"
        for span in spans(text.replace("NAME-DEVICE.json", "")) if page.name != "production.md" else ():
            if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+", span) and not (ROOT / span).exists() and "/last" not in span:
                yield f"{page.name}: there is no {span}"


def lessons():
    text = LESSONS.read_text(encoding="utf-8")
    chapters = {name: body for name, body in sections(text, 2).items() if re.match("Chapter 0[1-9]", name)}
    if len(chapters) != len(CHAPTERS):
        yield f"walkthrough.md has {len(chapters)} lessons"
    for name, body in chapters.items():
        split = re.split(rf"^\*\*({'|'.join(PARTS)})[.:]", body, flags=re.M)
        parts = dict(zip(split[1::2], split[2::2]))
        if list(parts) != PARTS:
            yield f"walkthrough.md, {name}: its parts are {', '.join(parts)}"
            continue
        if len(re.findall(r"^\d\. \*\*.+?\*\* ", parts["Three questions"], re.M | re.S)) != 3:
            yield f"walkthrough.md, {name}: not three questions"
        shown = [line for line in re.findall(r"```console\n\$ .*\n(.*?)```", body, re.S) for line in line.splitlines()]
        if len([line for line in shown if line.strip() not in ("", "...")]) > 15:
            yield f"walkthrough.md, {name}: more than 15 pasted lines"
        for place in re.findall(r"^- (.+(?:\n  .+)*)", parts["Where to look"], re.M):
            file, *words = re.findall(r"`([^`]+)`", place)
            yield from (f"walkthrough.md, {name}: {file} has no {word}" for word in words if word not in names_in(file))
        everywhere = set().union(*(names_in(path.relative_to(ROOT).as_posix()) for path in (
            *ROOT.glob("0[1-9]*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("tools/*.py"))))  # fmt: skip
        for word in re.findall(r"`([A-Z]\w*\.\w+)`", body):
            if word not in everywhere:
                yield f"walkthrough.md, {name}: {word} is defined nowhere"
    for file, old, new in re.findall(r"^```diff\n--- (\S+)\n-(.+)\n\+(.+)\n```$", text, re.M):
        source = (ROOT / file).read_text(encoding="utf-8")
        if source.count(f"{old}\n") != 1:
            yield f"walkthrough.md: {file} does not have this line once: {old.strip()}"
        else:
            ast.parse(source.replace(old, new))
    for term, _, where in tables(REFERENCE.read_text(encoding="utf-8"), "term | what it is | in the code"):
        for file, words in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", where):
            for word in re.findall(r"`([\w.]+)`", words):
                if word not in names_in(file):
                    yield f"reference.md, terms, {term}: {file} has no {word}"


def http():
    text = REFERENCE.read_text(encoding="utf-8")
    fields = {name: set() for name in CHAPTERS}
    for quoted, chapters, *_ in tables(text, "field | chapters | default | meaning"):
        for name in numbered(chapters):
            fields[name] |= set(re.findall(r"`([^`]+)`", quoted))
    every = {*requests.PROMPT, *requests.SAMPLING, *server.STREAM}
    for name in CHAPTERS:
        if every - fields[name]:
            yield f"reference.md does not describe {every - fields[name]} of {name}"
    kinds, statuses = [requests.RequestError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        statuses.add(kind.status)
    described = {int(status) for status, _ in tables(text, "status | when")}
    for status in statuses - {requests.HungUp.status} - described:
        yield f"reference.md does not describe the status {status}"


CHECKS = generated, described_options, shown_commands, links_and_files, lessons, http


# 3. What is pasted ------------------------------------------------------------------------------------------


def pasted() -> dict[str, str]:
    """Chapter -> what its lesson shows of its demo."""
    text = LESSONS.read_text(encoding="utf-8")
    return dict(re.findall(r"^```console\n\$ python (0[1-9]\w+)\.py --demo\n((?s:.*?))^```$", text, re.M))


def compared(printed: str) -> list[str]:
    """The lines without what varies; lanes and nodes that follow each other as one, spaces as one."""
    printed, lines = re.sub(r"[ \t]+$", "", printed, flags=re.M) + "\n", []
    for pattern, instead in VARIES:
        printed = re.sub(pattern, instead, printed, flags=re.M)
    for line in (re.sub(" +", " ", line).strip() for line in printed.splitlines()):
        if line and (line not in ("<a lane>", "<a node>") or lines[-1:] != [line]):
            lines.append(line)
    return lines


def first_difference(shown: str, printed: str) -> str | None:
    """Between what a page shows and what a demo printed; a line `...` of the one may be any lines of the other."""
    printed, at, pieces = compared(printed), 0, re.split(r"^\.\.\.$", shown, flags=re.M)
    for number, piece in enumerate(pieces):
        lines = compared(piece)
        if number and number == len(pieces) - 1:  # at the end
            at = max(at, len(printed) - len(lines))
        elif number:  # the next place where it fits
            fits = (start for start in range(at, len(printed)) if printed[start : start + len(lines)] == lines)
            at = next(fits, at)
        for line in lines:
            if printed[at : at + 1] != [line]:
                return f"shown {line!r}, printed {printed[at : at + 1]}"
            at += 1
    return f"not shown: {printed[at]!r}" if at < len(printed) else None


def main():
    wrong = [sentence for check in CHECKS for sentence in check()]
    print("\n".join(wrong) or "The documents say what is so.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
