"""README.md and docs/*.md say what is so: their numbers are those that were measured, and each option, default, command, file,
link, route, field and status that they name is there."""
import argparse
import importlib
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from common import checkpoint, cli, requests, server
from legacy import app
from legacy.tests.conftest import ROOT, chapter
from legacy.tests.test_app import INFO
from tools import report

README, MEASURED, REFERENCE = ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "docs" / "reference.md"
OTHERS = ROOT / "docs" / "production.md"        # which names the options, files and routes of other systems, too
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
ALL = [README, *PAGES[1:], ROOT / "models" / "classroom" / "README.md"]
REBUILT = sorted(path.stem for path in ROOT.glob("0[1-69]_*.py"))     # on common/
OLDER = sorted(path.stem for path in ROOT.glob("0[78]_*.py"))           # on legacy/
CHAPTERS = sorted(REBUILT + OLDER)
FOLDERS = ("benchmarks", "common", "docs", "legacy", "models", "tests", "tools")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# What a page holds -----------------------------------------------------------------------------------------------

@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


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


def commands(markdown: str) -> list[list[str]]:
    """The words of every command that begins with python, in fenced blocks and in backticks."""
    lines = [line for _, content in fences(markdown) for line in content.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *spans(markdown)]:
        line = line.strip().removeprefix("$ ")
        if not re.match(r"(\w+=\S+ +)*(\S*/)?(python|pip)3?\s", line):
            continue
        words = shlex.split(line, comments=True)
        while words:
            end = next((index for index, word in enumerate(words) if word in ("&&", "|", ">", "&", ";")), len(words))
            command, words = words[:end], words[end + 1:]
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command and Path(command[0]).name.startswith("python"):
                found.append(command[1:])
    return found


@cache
def parser(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(name)
    parser = (cli if name in REBUILT else app).parser_for(module.__doc__)
    module.add_arguments(parser)
    parser.exit_on_error = False
    return parser


@cache
def options(name: str) -> dict:
    """Option -> its argparse action."""
    return {string: action for action in parser(name)._actions for string in action.option_strings
            if string not in ("-h", "--help")}


def numbered(words: str) -> set[str]:
    """'all', '03, 07' or '02 to 06, 08' -> the chapters' names."""
    if words == "all":
        return set(CHAPTERS)
    numbers = set()
    for part in words.split(", "):
        first, _, last = part.partition(" to ")
        numbers |= set(range(int(first), int(last or first) + 1))
    return {name for name in CHAPTERS if int(name[:2]) in numbers}


def tables(markdown: str, header: str) -> list[list[str]]:
    """The rows of all tables with this header, as lists of cells."""
    found, inside = [], False
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if inside and cells:
            found.append(cells)
        inside = bool(cells) and (inside or cells == [name.strip() for name in header.split("|")])
    return [cells for cells in found if not set("".join(cells)) <= set("-: ")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Generated parts -------------------------------------------------------------------------------------------------

@cache
def results() -> dict:
    return report.read()


def changed(value, name: str = ""):
    """The same results, each measured number a third larger. What selects a row stays."""
    if isinstance(value, dict):
        return {key: changed(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [changed(entry, name) for entry in value]
    measured = isinstance(value, float) and name not in ("gpu_share", "load_over_compute", "share", "r")
    return value * 4 / 3 if measured else value


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_parts_are_what_was_measured(page):
    assert report.out_of_date(text(page), results()) == [], "run python -m tools.report"


def test_every_part_stands_on_one_page():
    parts = [match.group(1) for page in PAGES for match in report.PART.finditer(text(page))]
    assert sorted(parts) == sorted(report.PARTS)
    assert not any(report.PART.search(text(page)) for page in PAGES if page not in report.PAGES)


def test_other_results_make_other_parts():
    """Each part shows numbers of the results, and each file of results is shown."""
    now = {name: part(results()) for name, part in report.PARTS.items()}
    shown = {name for name, part in now.items() if part.startswith("Not measured yet")}
    for stem in results():
        other = {**results(), stem: changed(results()[stem])}
        differ = {name for name, part in report.PARTS.items() if name != "on-paper" and part(other) != now[name]}
        assert differ - {"chapters"}, f"{stem} is shown nowhere; tools/report.py should report it"
        shown |= differ
    assert shown == set(report.PARTS) - {"on-paper"}


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Copies of the pages, which tools.report takes for its own."""
    copies = [tmp_path / page.name for page in report.PAGES]
    for page, copy in zip(report.PAGES, copies):
        copy.write_text(text(page), encoding="utf-8")
    monkeypatch.setattr(report, "PAGES", copies)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return copies


def run_report(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    report.main()


def test_check_sees_a_number_that_was_typed(pages, monkeypatch):
    page = pages[1].read_text(encoding="utf-8")
    figure = re.search(r"\d\.\d\d \(", page)[0]
    pages[1].write_text(page.replace(figure, "9.99 (", 1), encoding="utf-8")
    with pytest.raises(SystemExit):
        run_report(monkeypatch, "--check")


@pytest.mark.parametrize("page, said", [
    ("<!-- begin engine -->\n", "no other half"), ("text\n<!-- end engine -->\n", "no other half"),
    ("<!-- begin engine -->\n<!-- end planned -->\n", "no other half"), ("<!-- begin pages -->\n<!-- end pages -->\n", "no part")])
def test_wrong_markers(page, said):
    with pytest.raises(ValueError, match=said):
        report.written(page, results())


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_no_measured_number_is_typed(page):
    """Outside of the generated parts only what a paper says has a unit of measurement."""
    units = re.compile(r"\d[\d.,]* ?(ms|us|x|times|%|GB/s|tokens/s)(?!\w)")
    typed = units.findall("2.5x, 12 ms, 3 %")
    assert len(typed) == 3, "the pattern finds nothing any more"
    rest = prose(report.PART.sub("", text(page)))
    for sentence in re.split(r"(?<=[.;])\s+(?=[A-Z-])|\n\n", rest):
        assert not units.search(sentence) or re.search("paper|HCache|Published", sentence), sentence


# Options and commands --------------------------------------------------------------------------------------------

def test_reference_describes_every_option():
    """Each option of each chapter in one row of the reference, with its default and its choices."""
    rows, described = tables(text(REFERENCE), "option | chapters | default | meaning"), []
    assert len(rows) > 30
    for names, chapters, default, meaning in rows:
        names, defaults = [name.split()[0] for name in quoted(names)], [*quoted(default)]
        for name in sorted(numbered(chapters)):
            for number, option in enumerate(names):
                action = options(name).get(option)
                assert action, f"{name} has no {option}"
                described.append((name, option))
                if action.default is None or action.default is False:
                    assert all(word.startswith("--") for word in defaults), f"{option} of {name} has no default {default}"
                else:
                    assert defaults[number] == str(action.default), f"{option} of {name} has the default {action.default}"
                for choice in action.choices or ():
                    assert str(choice) in quoted(meaning), f"{option} of {name} may be {choice}"
    assert len(described) == len(set(described)), "an option is described twice"
    assert set(described) == {(name, option) for name in CHAPTERS for option in options(name)}


def named_chapters(words: str) -> set[str]:
    """The chapters of which a heading or a paragraph speaks."""
    numbers = {int(number) for number in re.findall(r"\b0([1-9])(?:\b|_)", words)}
    for first, last in re.findall(r"\b0([1-9]) to 0([1-9])\b", words):
        numbers |= set(range(int(first), int(last) + 1))
    if after := re.findall(r"from chapter 0([1-9]) on", words):
        numbers |= set(range(min(map(int, after)), 10))
    return {name for name in CHAPTERS if int(name[:2]) in numbers}


def of_tools(paragraph: str) -> str:
    """The source of the tools and benchmarks that a paragraph names."""
    modules = re.findall(r"\b(benchmarks|tools)(?:/(?=\w+\.py)|\.)(\w+)", paragraph)
    return "".join((ROOT / folder / f"{name}.py").read_text(encoding="utf-8") for folder, name in modules)


@pytest.mark.parametrize("page", [MEASURED, REFERENCE], ids=lambda page: page.name)
def test_options_exist(page):
    """Every option in backticks is one of a chapter that its paragraph or its heading names; of any, where they name none."""
    headings, seen = {}, 0
    for paragraph in re.split(r"\n\n+|\n(?=[|#-])", prose(text(page))):
        if match := re.match(r"(#+) (.*)", paragraph):
            headings = {level: words for level, words in headings.items() if level < len(match[1])}
            headings[len(match[1])] = match[2]
        if "What is gone" in headings.values() and "|" in paragraph:
            continue                                            # what some chapters have no more
        named = named_chapters(" ".join(headings.values())) | named_chapters(paragraph)
        for span in spans(paragraph):
            if re.match(r"(\S*/)?(python|pip|\w+=\S+ +python)3?\s", span):
                continue                                        # a command, which its chapter's parser reads: see below
            if "https://" in span:
                continue                                        # pip's
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                seen += 1
                assert any(option in options(name) for name in named or CHAPTERS) or f'"{option}"' in of_tools(paragraph), \
                    f"{option}: {paragraph}"
    assert seen or page != REFERENCE


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_parsed(page):
    """Every command of a chapter by that chapter's own parser; every module and script of the others is there."""
    for program, *arguments in commands(text(page)):
        if program == "-m":
            module, *arguments = arguments
            if module.partition(".")[0] in ("benchmarks", "tests", "tools"):
                path = ROOT / ("benchmarks/__main__.py" if module == "benchmarks" else f"{module.replace('.', '/')}.py")
                assert path.is_file(), module
                used = path.read_text(encoding="utf-8") + (ROOT / "benchmarks" / "paged.py").read_text(encoding="utf-8")
                for argument in arguments:
                    assert not argument.startswith("--") or f'"{argument}"' in used, (module, argument)
            elif module == "pytest":
                for argument in (argument for argument in arguments if argument.partition("/")[0] in ("legacy", "tests")):
                    assert (ROOT / argument.split("::")[0]).is_file(), argument
            else:
                assert module == "venv", module
        elif program.endswith(".py") and not program.startswith("0N_"):
            assert (ROOT / program).is_file(), program
            assert program[:-3] in CHAPTERS, "a script that is no chapter is run as a module"
            try:
                parser(program[:-3]).parse_args(arguments)
            except (SystemExit, argparse.ArgumentError) as error:
                pytest.fail(f"{program} {shlex.join(arguments)}: {error}")


def test_commands_are_found():
    """What the tests above look at is what a reader sees."""
    assert ["-m", "pytest", "-n", "2", "--dist", "loadfile"] in commands(text(README))
    assert {words[0][:2] for words in commands(text(REFERENCE))} >= {"03", "04", "05", "07", "08"}
    for name in ("08_hybrid_blocks", "03_cpu_offload"):
        with pytest.raises(SystemExit):
            parser(name).parse_args(["--storage", "x"])                 # which they do not have


def test_first_command_with_pytest_is_the_one_for_a_fresh_clone():
    """.ci/run takes the README's first line with `-m pytest`, and runs it."""
    line = next(line for line in text(README).splitlines() if "-m pytest" in line)
    assert line == ("python3 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt && .venv/bin/ruff check . && "
                    ".venv/bin/python -m pytest -n 2 --dist loadfile")


# Files and links -------------------------------------------------------------------------------------------------

@every_page
def test_named_files_exist(page):
    """Files and folders of the repository in backticks, wherever they begin: at the root, or beside the page."""
    for span in spans(text(page)):
        if re.fullmatch(r"(benchmarks|legacy|tests|tools)(\.\w+)+", span) and not span.endswith(".py"):
            path = span.replace(".", "/")
            assert (ROOT / f"{path}.py").is_file() or (ROOT / Path(path).parent).with_suffix(".py").is_file(), span
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) or span.startswith("0N_"):
            continue
        ours = span.partition("/")[0] in FOLDERS and "/" in span
        known = "/" not in span and page != OTHERS and re.search(r"\.(py|md|svg|html|toml)$", span)
        if ours or known:
            assert (ROOT / span).exists() or (page.parent / span).exists() or any(
                (ROOT / folder / span).exists() for folder in FOLDERS), span
    for _, content in fences(text(page)):
        for path in re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*", content):
            assert (ROOT / path).exists(), path


def slugs(markdown: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that it sets itself."""
    found = []
    for heading in re.findall(r"^#+ +(.*)$", prose(markdown), re.M):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{sum(other.startswith(slug) for other in found)}")
    return found + re.findall(r"<a (?:id|name)=\"([^\"]+)\"", markdown)


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_resolve(page):
    markdown = prose(text(page))
    bare = re.sub(r"`[^`]*`", "", markdown)
    defined = dict(re.findall(r"^\[([^]]+)\]: +(\S+)", markdown, re.M))
    used = {name for _, name in re.findall(r"\[([^][]+)\]\[([^][]+)\]", bare)}
    assert used <= set(defined), f"{used - set(defined)} are links to nowhere"
    targets = [*re.findall(r"\]\(([^()\s]+)\)", markdown), *re.findall(r"<(?:img|a)[^>]*? (?:src|href)=\"([^\"]+)\"", markdown),
               *defined.values()]
    broken = []
    for target in targets:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not (place.exists() and place.is_relative_to(ROOT)) or anchor and anchor not in slugs(text(place)):
            broken.append(target)
    assert not broken


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w.-]+\.md)\)", text(README)))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}


# HTTP ------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def parts():
    """Model, tokenizer and end tokens of a model that no file holds."""
    return checkpoint.load("random:tiny")


@pytest.fixture(scope="module")
def tiered_app(parts):
    """The server of chapter 07, which has all routes that there are."""
    engine = chapter("07_tiered_storage").Engine(*parts, 16, 16, cpu_blocks=16, bytes_per_second=1e9)
    yield app.make_app(engine, INFO)
    engine.release()


def routes(markdown: str) -> set[tuple[str, str]]:
    """(method, path) of all that are named in backticks, placeholders in capitals as a number."""
    return {(method, re.sub(r"\b[A-Z]+\b", "1", path)) for span in spans(markdown)
            for method, path in re.findall(r"\b(GET|POST|PUT|DELETE|HEAD) (/[\w/.-]*)", span)}


@pytest.fixture(scope="module")
def rebuilt_app(parts):
    """The server of chapter 03, which has all routes of the rebuilt chapters."""
    model, *_ = parts
    paged, offload = (importlib.import_module(name) for name in REBUILT[1:3])
    engine = paged.Engine(paged.Runner(model, 16), offload.HostCache(16, 1e9))
    running = server.Server(engine, requests.Frontend(*parts, engine.fields), INFO)
    yield server.make_app(running)
    running.close(running=True)
    running.thread.join()
    engine.close()


def test_reference_names_every_route(tiered_app, rebuilt_app):
    adapters = [app.url_map.bind("localhost") for app in (tiered_app, rebuilt_app)]
    named = [route for route in routes(gone(text(REFERENCE)))]
    for adapter in adapters:
        matched = {adapter.match(path, method)[0]: path for method, path in named if adapter.test(path, method)}
        there = {rule.endpoint for rule in adapter.map.iter_rules()}
        assert len(there) > 7 and there <= set(matched)
    for method, path in named:
        assert any(adapter.test(path, method) for adapter in adapters), (method, path)


def gone(markdown: str) -> str:
    """Without the section that names what is gone."""
    return re.sub(r"^## What is gone\n.*?(?=^## )", "", markdown, flags=re.M | re.S)


def test_what_is_gone_is_gone(rebuilt_app):
    """Each route and option of that section is none of the rebuilt chapters', and what it names instead is theirs."""
    markdown = text(REFERENCE)
    rows, adapter = tables(markdown, "gone | instead"), rebuilt_app.url_map.bind("localhost")
    theirs = set().union(*(options(name) for name in REBUILT))
    assert len(rows) > 5 and len(gone(markdown)) < len(markdown)
    for was, instead in rows:
        assert not set(re.findall(r"`(--[\w-]+)`", was)) & theirs, was
        assert not any(adapter.test(path, method) for method, path in routes(was)), was
        assert set(re.findall(r"`(--[\w-]+)", instead)) <= theirs, instead
        assert all(adapter.test(path, method) for method, path in routes(instead)), instead


def test_evict_is_there():
    assert all(hasattr(chapter(name).Engine, "post_evict") for name in OLDER)


def test_fields_of_a_request():
    """Each chapter's fields stand in the reference, for that chapter and no other."""
    described = {name: set() for name in CHAPTERS}
    for fields, chapters, _, _ in tables(text(REFERENCE), "field | chapters | default | meaning"):
        for name in numbered(chapters):
            described[name] |= set(quoted(fields))
    for name in OLDER:
        assert described[name] == {*app.PROMPT, *app.SAMPLING, *app.STREAM, *chapter(name).Engine.fields}, name
    offload, hidden = (importlib.import_module(name) for name in REBUILT[2:4])
    own = [{}, *({**requests.CACHE_SALT, **more} for more in ({}, offload.HostCache.fields, hidden.HiddenCache.fields))]
    for name, fields in zip(REBUILT, own):
        assert described[name] == {*requests.PROMPT, *requests.SAMPLING, *server.STREAM, *fields}, name


def fields_of_a_result() -> set[str]:
    request = requests.Request([1], 1)
    request.push(1)
    return set(vars(requests.Result(request)))


def test_fields_of_a_result():
    """Of the rebuilt chapters: those of the reply, and of what the page polls."""
    reply = re.search(r"The reply, in every chapter: (.*?)\. In chapters 01", text(REFERENCE), re.S)[1]
    described = {*quoted(reply), *(quoted(name)[0] for name, _ in tables(text(REFERENCE), "field | what it is"))}
    assert described == {*fields_of_a_result(), "prompt_tokens", "cached_tokens", "completion_tokens"}


def test_statuses():
    """Every error that a client can be told. Flask itself says 404 and 405; nobody is there to be told 499."""
    kinds, there = [app.RequestError, requests.RequestError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__ in (app.__name__, requests.__name__):
            there.add(kind.status)
    described = {int(status) for status, _ in tables(text(REFERENCE), "status | when")}
    assert described >= there - {app.HungUp.status} | {404, 405}
