"""Exercises: a chapter without the bodies of its central methods, and a judge of what is written in their place.

    python -m tools.exercise 03             copy chapter 03, so emptied, to exercises/
    python -m tools.exercise 03 --check     which rule is broken?  Exits with 1, or with 0 if all hold

The judge loads the reader's file under the chapter's name, and runs tests of this project with it: in a process of its own,
which ends after a while even if the reader's loops do not.
"""

import argparse
import ast
import importlib.util
import inspect
import multiprocessing
import os
import re
import sys
import threading
import traceback
from functools import partial, wraps
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PLACE, SECONDS = ROOT / "exercises", 120  # the judge's process ends after so many
CHAPTERS = {path.stem[:2]: path.stem for path in sorted(ROOT.glob("0[1-9]_*.py"))}
# What tells of a slip of the pen; other exceptions belong to the chapters
SLIPS = (ArithmeticError, AttributeError, LookupError, NameError, NotImplementedError, RuntimeError, TypeError, ValueError)

# Chapter -> what is to be written: name -> (in words, words of the lesson's paragraph that says why)
TASKS = {
    "03": {
        "HostCache.restore": ("copy in match.blocks behind restoration.start; yield each layer's transfer, then count the layer",
                              "**By hand.**"),
        "HostCache.save_blocks": ("of the lacking pairs copy out those that fit; note in `saving` where each goes; hold both sides",
                                  "**What keeps a block from being overwritten"),
        "HostCache.saved": ("forget that they are on their way, register what has arrived, add a span to the timeline",
                            "**By hand.**"),
    },
}  # fmt: skip
# Chapter -> tests that judge it, in this order: file::test, or file::test[words of its parameters], and the rule. Without a
# rule the failing assertion says it
RULES = {
    "03": [
        ("cache_contract::what_left_the_device_comes_back[host-16]", ""),
        ("cache_contract::what_a_copy_uses_is_referenced_and_found_only_when_it_is_there[host]", ""),
        ("offload::what_has_failed_is_copied_again_and_what_the_host_has_or_is_about_to_have_is_not", "x"),
        ("offload::the_question_follows_its_history_through_the_layers", "y"),
        ("cuda::what_left_the_device_comes_back[host]", "z"),
    ],
}

# 1. The exercise --------------------------------------------------------------------------------------------


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Name, or Class.name -> the function."""
    found = {}
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                found[inner.name if inner is node else f"{node.name}.{inner.name}"] = inner
    return found


def body_of(function: ast.FunctionDef) -> tuple[int, int]:
    """-> the first line behind signature and docstring, and the last one, counted from 0 and 1."""
    documented = ast.get_docstring(function) is not None
    first = function.body[0].end_lineno if documented else function.body[0].lineno - 1
    return first, function.end_lineno


def lines_of(chapter: str, words: str) -> str:
    """-> page:first-last, of the paragraph with these words, with the tables and formulas behind it."""
    page = f"docs/lessons/{chapter}.md"
    blocks = re.split(r"\n\n(?![ |])", text := (ROOT / page).read_text(encoding="utf-8"))
    (block,) = (block for block in blocks if words in block.replace("\n", " "))
    first = text[: text.index(block)].count("\n") + 1
    return f"{page}:{first}-{first + block.strip().count(chr(10))}"


def emptied(number: str) -> str:
    """-> the chapter's source, without the bodies of its central methods."""
    lines = (ROOT / f"{CHAPTERS[number]}.py").read_text(encoding="utf-8").splitlines()
    tasks, found = TASKS[number], functions("\n".join(lines))
    for name in sorted(tasks, key=lambda name: -found[name].lineno):  # the last one first
        first, last = body_of(found[name])
        words, why = tasks[name]
        indent = " " * (found[name].col_offset + 4)
        comments = f"# To write: {words}.", f"# Why: {lines_of(CHAPTERS[number], why)}"
        lines[first:last] = [indent + line for line in (*comments, f'raise NotImplementedError("{name}")')]
    return "\n".join(lines) + "\n"


def still_empty(number: str, source: str) -> str | None:
    """-> a sentence on the first method that is not there, or not written."""
    found = functions(source)
    for name in TASKS[number]:
        if name not in found:
            return f"{name} is not there any more."
        if "NotImplementedError" in ast.unparse(found[name].body[-1]) and isinstance(found[name].body[-1], ast.Raise):
            return f"{name} is still empty."


# 2. The judge -----------------------------------------------------------------------------------------------


def judge(number: str, path: Path, seconds: float = SECONDS) -> str | None:
    """Run the tests on a reader's file, in a process -> a sentence on what is wrong, or None."""
    try:
        if sentence := still_empty(number, path.read_text(encoding="utf-8")):
            return sentence
    except SyntaxError as error:
        return f"Line {error.lineno} of {path.name} is no Python: {error.msg}."
    processes = multiprocessing.get_context("forkserver")
    receive, send = processes.Pipe(False)
    process = processes.Process(target=run, args=(number, path, seconds, send))
    process.start()
    send.close()
    try:
        if receive.poll(seconds + 5):
            return receive.recv()
        return f"After {seconds:.0f} s it has not ended."
    except EOFError:
        return "The process that ran it has ended by itself."
    finally:
        process.kill()
        process.join()


def run(number: str, path: Path, seconds: float, send):
    """In a process of its own: load the file in the chapter's place, and send what the tests say."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tests/conftest.py
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in 1, 2:
        os.dup2(silence, stream)
    os.chdir(ROOT)
    timer = threading.Timer(seconds, late, (path, seconds, threading.main_thread().ident, send))
    timer.daemon = True
    timer.start()
    raised: list[BaseException] = []
    try:
        load(number, path, raised)
    except Exception as error:
        send.send(f"{where(error, path)}: {error!r}: so it cannot be imported.")
        return
    import pytest

    rules = [(f"tests/test_{test.replace('::', '.py::test_')}", rule) for test, rule in RULES[number]]
    judging = Judging(rules)
    files = sorted({test.partition("[")[0] for test, _ in rules})
    code = pytest.main([*files, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], [judging])
    sentence = judging.sentence
    if sentence and raised:
        sentence = f"{where(raised[0], path)}: {raised[0]!r}."
    send.send(sentence or (f"pytest has ended with {code}." if code else None))


def load(number: str, path: Path, raised: list):
    """Load the file as the chapter, whose new methods note in `raised` what they raise."""
    spec = importlib.util.spec_from_file_location(CHAPTERS[number], path)
    module = sys.modules[CHAPTERS[number]] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in TASKS[number]:
        *owner, last = name.split(".")
        place = getattr(module, owner[0]) if owner else module
        if inspect.isfunction(function := vars(place)[last]):
            setattr(place, last, noting(function, raised))


def noting(function, raised: list):
    """The function, or generator function, which notes what it raises by a slip."""

    @wraps(function)
    def call(*given, **options):
        try:
            made = function(*given, **options)
        except SLIPS as error:
            raised.append(error)
            raise
        return (yield_from(made) if inspect.isgenerator(made) else made)

    def yield_from(made):
        try:
            return (yield from made)
        except SLIPS as error:
            raised.append(error)
            raise

    return call


def where(error: BaseException, path: Path) -> str:
    """-> the last line of the reader's file that the exception came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"Line {frames[-1].lineno} of {path.name}" if frames else path.name


def late(path: Path, seconds: float, thread: int, send):
    """Time is up: say where the reader's file is, and end."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    place = f"line {lines[-1]} of {path.name}" if lines else "the engine"
    send.send(f"After {seconds:.0f} s it has not ended: {place} goes round, or waits for what never comes.")
    os._exit(1)
