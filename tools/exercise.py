"""Make exercises: copy a chapter without the bodies of its central methods, and judge the student's version of them.

    python -m tools.exercise 03             copy chapter 03 to exercises/, without these bodies
    python -m tools.exercise 03 --check     exit with 0 if all rules hold; else print the first broken rule and exit with 1
    python -m tools.exercise 04-saving      a second exercise on chapter 04

The judge runs this project's tests on the student's file, in a process that is killed after a time limit.
"""

import argparse
import ast
import importlib.util
import inspect
import multiprocessing
import os
import re
import sys
import textwrap
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = {path.stem[:2]: path for path in sorted(ROOT.glob("0[1-9]_*.py"))}
CHAPTERS["04-saving"] = CHAPTERS["04"]
SLIPS = ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError


def rows(number: str, columns: int) -> list[list[str]]:
    """Return the rows of exercises.txt for a chapter.

    `columns`: 3 for rows about a method to write, 2 for rows about a test."""
    lines = Path(__file__).with_name("exercises.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition(" ")[2].split(" | ") for line in lines if line.startswith(f"{number} ")]
    return [row for row in found if len(row) == columns]


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Return name or Class.name -> the function, for all functions and methods in a source."""
    top = ast.parse(source).body
    places = [("", top), *((f"{node.name}.", node.body) for node in top if isinstance(node, ast.ClassDef))]
    return {owner + each.name: each for owner, body in places for each in body if isinstance(each, ast.FunctionDef)}


def place_in_lesson(number: str, words: str) -> str:
    """Return page:first-last, the lines of the lesson's paragraph that contains `words`.

    Tables and formulas after the paragraph belong to it. Raises ValueError if no paragraph has the words."""
    page, first = f"docs/lessons/{CHAPTERS[number].stem}.md", 1
    for paragraph in re.split(r"\n\n(?![ |])", (ROOT / page).read_text(encoding="utf-8")):
        if words in " ".join(paragraph.split()):
            return f"{page}:{first}-{first + paragraph.rstrip().count(chr(10))}"
        first += paragraph.count("\n") + 2
    raise ValueError(f"{page} does not say: {words}")


def emptied(number: str) -> str:
    """Return a chapter's source, with a task in place of the bodies of its central methods."""
    source = CHAPTERS[number].read_text(encoding="utf-8")
    lines, found = source.splitlines(), functions(source)
    for name, words, task in sorted(rows(number, 3), key=lambda row: -found[row[0]].lineno):  # from the last to the first, so that line numbers stay valid
        first = found[name].body[0]
        begin = first.end_lineno if ast.get_docstring(found[name]) else first.lineno - 1
        notes = *textwrap.wrap(f"To write: {task}", 100), f"Why: {place_in_lesson(number, words)}"
        body = *(f"# {note}" for note in notes), f"raise NotImplementedError({name!r})"
        lines[begin : found[name].end_lineno] = [" " * first.col_offset + line for line in body]
    return "\n".join(lines) + "\n"


@contextmanager
def recorded_slips(raised: list):
    """Context manager: append an exception of type SLIPS to `raised`, and raise it again.

    SLIPS are typical programming errors. Chapters use other classes for exceptions that they raise on purpose."""
    try:
        yield
    except SLIPS as error:
        raised.append(error)
        raise


def judge(number: str, path: Path, seconds: float = 120.0) -> str | None:
    """Run the tests of a chapter on a student's file, for at most `seconds`.

    Returns: a sentence about the first broken rule, or None if all rules hold."""
    try:
        found = functions(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"Line {error.lineno} of {path.name} cannot be read: {error.msg}."
    for name, *_ in rows(number, 3):
        if name not in found or ast.unparse(found[name].body[-1]) == f"raise NotImplementedError({name!r})":
            return f"{name} is still empty."
    processes = multiprocessing.get_context("forkserver")
    receive, send = processes.Pipe(False)
    process = processes.Process(target=run, args=(number, path, send))
    process.start()
    send.close()
    try:
        late = f"After {seconds:.0f} s it has not ended: there is an endless loop, or a wait for an event that never comes."
        return receive.recv() if receive.poll(seconds) else late
    except EOFError:
        return "The process that ran the tests has crashed."
    finally:
        process.kill()
        process.join()


def run(number: str, path: Path, send):
    """Load a file in place of a chapter, run the tests, and send the judge's sentence. Runs in a process of its own."""
    import torch  # imported here, since only the judge needs it
    os.chdir(ROOT)
    for stream in 1, 2:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    torch.set_num_threads(1)  # the models are tiny
    raised = []
    try:
        load(number, path, raised)
    except Exception as error:
        return send.send(f"{where(error, path)} ends the import: {error!r}.")
    import pytest  # after the file was loaded as the chapter
    judging = Judging(number)
    code = pytest.main([*judging.files, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], [judging])
    sentence = judging.sentence or (code and f"pytest ends with {code!r}.")
    if sentence and raised:
        sentence = sentence.replace(f": {raised[0]}", "")
        sentence = f"{where(raised[0], path)} raises {raised[0]!r}: {sentence}"
    send.send(sentence or None)


def load(number: str, path: Path, raised: list):
    """Import a file as the chapter, and record in `raised` what its new methods raise.

    The engine may contain such an exception, so that no test sees it."""
    spec = importlib.util.spec_from_file_location(CHAPTERS[number].stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for *owner, name in (name.split(".") for name, *_ in rows(number, 3)):
        place = getattr(module, owner[0]) if owner else module
        setattr(place, name, recording_slips(getattr(place, name), raised))


def recording_slips(function, raised: list):
    """Return a function, or generator function, that records slips in `raised`."""
    def generate(*given, **options):
        with recorded_slips(raised):
            return (yield from function(*given, **options))
    return generate if inspect.isgeneratorfunction(function) else recorded_slips(raised)(function)


def where(error: Exception, path: Path) -> str:
    """Return the last line of the student's file in an exception's traceback, or the file's name."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"Line {lines[-1]} of {path.name}" if lines else path.name


class Judging:
    """A plugin of pytest that runs the tests of exercises.txt in their order, and turns the first failure into a sentence."""

    def __init__(self, number: str):
        self.rules = [(f"tests/test_{test.replace('::', '.py::test_')}", rule) for test, rule in rows(number, 2)]
        self.files, self.sentence = sorted({test.partition("::")[0] for test, _ in self.rules}), None
        self.rules.append(("", "The tests cannot begin:"))  # for errors outside of these tests

    def place(self, name: str) -> int:
        """Return the number of the first rule that a test checks."""
        test, *words = re.split(r"[\[\]-]", name)
        for place, (judging, _) in enumerate(self.rules):
            begins, *needed = re.split(r"[\[\]-]", judging)
            if test.startswith(begins) and set(needed) <= set(words):
                return place

    def pytest_collection_modifyitems(self, items):
        places = {item: self.place(item.nodeid) for item in items}
        items[:] = sorted((item for item in items if places[item] < len(self.rules) - 1), key=places.get)
        assert {*places.values()} >= {*range(len(self.rules) - 1)}, "a rule has no test"

    def pytest_exception_interact(self, node, call):
        rule, own = self.rules[self.place(node.nodeid)][1], str(call.excinfo.value).partition("\n")[0]
        own = own if rule.endswith(":") and not own.startswith("assert ") else ""
        self.sentence = f"{rule} {own}".rstrip(": ") + "."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", nargs="?", default="", help="01 to 09, or 04-saving")
    parser.add_argument("--check", action="store_true", help="judge your file in exercises/")
    parser.add_argument("--again", action="store_true", help="begin again; your file is overwritten")
    arguments = parser.parse_args()
    chapter, *part = arguments.chapter.partition("-")
    number = chapter.zfill(2)[:2] + "".join(part)
    if number not in CHAPTERS:
        there = f"There is no chapter {arguments.chapter}: choose" if arguments.chapter else "Choose"
        sys.exit(f"{there} one of {', '.join(path.stem + number[2:] for number, path in CHAPTERS.items())}.")
    path = ROOT / (name := f"exercises/{CHAPTERS[number].stem}{number[2:]}.py")
    if arguments.check:
        if not path.is_file():
            sys.exit(f"There is no {name} yet; python -m tools.exercise {number} makes it.")
        sentence = judge(number, path)
        print(sentence or f"All rules hold. Compare your file with {path.name}, or run it: PYTHONPATH=. python {name} --demo")
        sys.exit(bool(sentence))
    if path.exists() and not arguments.again:
        sys.exit(f"{name} exists already; --again makes it anew, and your changes are lost.")
    path.parent.mkdir(exist_ok=True)
    path.write_text(emptied(number), encoding="utf-8")
    print(f"{name} is ready: write the methods, and check them with python -m tools.exercise {number} --check")


if __name__ == "__main__":
    main()
