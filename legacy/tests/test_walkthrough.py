"""docs/walkthrough.md: what it shows is what the programs print, and what it names is there.

A fenced block that is marked `console` is a command behind `$ ` and what it prints to the standard output. A line `...` stands
for lines left out. What varies is not compared: see `UNITS` and `VARIES`.
"""
import ast
import importlib
import re
import shlex
from functools import cache

import pytest

from common import cli
from legacy import app
from legacy.tests import demos
from legacy.tests.conftest import ROOT

PAGES = ("docs/walkthrough.md", "docs/production.md")
TEXT = (ROOT / PAGES[0]).read_text(encoding="utf-8")
PARTS = ["Run it", "What the class can see in it", "Where to look", "The figure", "One thing to change", "Three questions",
         "The claim"]                                             # of a lesson from 07 on
REBUILT = ["By hand", "Run it", "What to see", "Where to look", "One thing to change", "Three questions", "The claim"]
NAME = r"[A-Za-z_][\w.]*"


def sections(text: str, level: int) -> dict[str, str]:
    """Heading -> what is below it."""
    parts = re.split(rf"^{'#' * level} (.+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


LESSONS = {name: text for name, text in sections(TEXT, 2).items() if re.match("Chapter 0[1-9]", name)}


# 1. What is printed ----------------------------------------------------------------------------------------------

N = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
UNITS = [                          # what never is the same twice, in all chapters
    (rf"^ *(?:compute|load|save|storage) \|[^|]*\|(?: idle +{N}%)?$", "<a lane>"),
    (r"\|[#= ]+\| +(?=\d)", "<a bar> "),
    (rf"{N} to {N}", "N to N"),
    (rf"{N}(?= (?:ms|tokens/s|GB/s)\b)", "N"),
]
VARIES = {                         # what else varies, in one chapter, and what becomes of it
    "01_baseline": [],
    "02_paged_kv": [],
    "03_cpu_offload": [(rf"{N}(?= times as )", "N")],
    "04_hidden_state_cache": [(rf"{N}(?= of (?:chapter|computing))", "N")],
    "05_bubble_free": [
        (r"^A layer, ms: .*", "<costs>"), (r"^Plan [RHK]+: .*", "<a plan>"), (rf"{N}x(?= (?:sooner|than))", "Nx"),
    ],
    "06_bidirectional": [
        (rf"{N}:N(?= GB/s)", "N"), (rf"{N}(?= s each)", "N"), (r"\|[CBL]+\|", "<chunks>"),
        (rf"{N}(?= tokens came|x as soon| times the bound)", "N"),
    ],
    "07_tiered_storage": [
        (r"\d+%", "N%"),
        (r"^  [L ][1 ] [L ][2 ] [L ][3 ] +\d+ pages .*", "  <a node>"),
    ],
    "08_hybrid_blocks": [
        (r"^(  hybrid) .*", r"\1"),
        (r"^(  (?:kv-only|act-only|static) +\d+ +\d+ +\d+) .*", r"\1"),
    ],
    "09_tensor_parallel": [(rf"{N}(?= us)", "N")],
}


def compared(name: str, printed: str) -> list[str]:
    """The lines that are compared: without what varies, lanes and nodes that follow each other as one, spaces as one."""
    printed = re.sub(r"[ \t]+$", "", printed, flags=re.M) + "\n"
    for pattern, instead in UNITS + VARIES[name]:
        printed = re.sub(pattern, instead, printed, flags=re.M)
    lines = []
    for line in (re.sub(" +", " ", line).strip() for line in printed.splitlines()):
        if line and (line not in ("<a lane>", "<a node>") or lines[-1:] != [line]):
            lines.append(line)
    return lines


def first_difference(name: str, shown: str, printed: str) -> str | None:
    """Between what a page shows and what a program has printed; a line `...` of the one may be any lines of the other."""
    printed, at, pieces = compared(name, printed), 0, re.split(r"^\.\.\.$", shown, flags=re.M)
    for number, piece in enumerate(pieces):
        lines = compared(name, piece)
        if number and number == len(pieces) - 1:                # at the end
            at = max(at, len(printed) - len(lines))
        elif number:                                            # the next place where it fits
            at = next((start for start in range(at, len(printed)) if printed[start:start + len(lines)] == lines), at)
        for line in lines:
            if printed[at:at + 1] != [line]:
                return f"shown {line!r}, printed {printed[at:at + 1]}"
            at += 1
    return f"not shown: {printed[at]!r}" if at < len(printed) else None


BLOCKS = re.findall(r"^```console\n\$ (python 0[1-9].+)\n((?s:.*?))^```$", TEXT, re.M)


def test_each_chapter_shows_its_demo_with_default_options():
    assert [command for command, _ in BLOCKS] == [f"python {name}.py --demo" for name in demos.CHAPTERS]
    assert list(VARIES) == demos.CHAPTERS and len(BLOCKS) == 9
    assert all(len(re.findall(r"^(?!\.\.\.$).", shown, re.M)) <= 15 for _, shown in (*BLOCKS[:6], BLOCKS[8]))


@pytest.mark.parametrize("command,shown", BLOCKS, ids=[command.split()[1] for command, _ in BLOCKS])
def test_what_is_shown_is_what_is_printed(command, shown, tmp_path_factory):
    name = command.split()[1].removesuffix(".py")
    assert first_difference(name, shown, demos.shown(name, tmp_path_factory).stdout) is None


WRONG = {
    "01_baseline": [("all 30 tokens", "all 31 tokens"), ("89%", "88%"), ("transformers", "chapter 02")],
    "02_paged_kv": [("0.99 tokens a slot", "0.98 tokens a slot"), ("12966 tokens", "12967 tokens"), ("gpu_hit ", "cpu_hit ")],
    "03_cpu_offload": [("1296 of 1312", "1295 of 1312"), ("safe is tiger", "safe is lion"), (": computed\n", ": loaded\n")],
    "04_hidden_state_cache": [("7168 bytes", "8192 bytes"), ("1077 of 1093", "1076 of 1093"), ("is tiger", "is lion")],
    "05_bubble_free": [("RRHHKKKK  ", "RRHHHKKK  "), ("1077 of 1093", "1076 of 1093")],
    "06_bidirectional": [("1.05 MB", "1.06 MB"), ("1825 tokens", "1826 tokens"), ("is tiger", "is lion")],
    "07_tiered_storage": [("262272 bytes\nL1", "262273 bytes\nL1"), ("64 x", "63 x"), ("  wait_complete  ", "  wait  ")],
    "08_hybrid_blocks": [("562", "561"), ("17.8 MB", "17.9 MB")],
    "09_tensor_parallel": [("528 do, on all", "512 do, on all"), ("verified: all", "verified: some")],
}


@pytest.mark.parametrize("name,right,wrong", [(name, *pair) for name, pairs in WRONG.items() for pair in pairs])
def test_a_wrong_count_and_a_wrong_answer_are_noticed(name, right, wrong):
    """And other times are not."""
    shown, = (shown for command, shown in BLOCKS if command.split()[1] == f"{name}.py")
    other_times = re.sub(rf"{N}(?= (?:ms|GB/s|tokens/s))", "123.4", shown)
    assert first_difference(name, shown, other_times) is None and shown.count(right) >= 1
    if "\n...\n" not in shown:
        assert first_difference(name, shown, shown + "one line more\n")
        assert first_difference(name, shown, shown.split("\n", 1)[1])
    assert first_difference(name, shown, shown.replace(right, wrong))
    assert first_difference(name, shown.replace(right, wrong), shown)


def test_lines_left_out_may_be_any():
    assert first_difference("04_hidden_state_cache", "one\n...\nfour\n", "one\ntwo\nthree\nfour\n") is None
    assert first_difference("04_hidden_state_cache", "one\n...\n", "one\ntwo\n") is None
    assert first_difference("04_hidden_state_cache", "one\n...\nfour\n", "one\ntwo\nthree\n")
    assert first_difference("04_hidden_state_cache", "one\n...\nfour\n", "one\nfour\nfive\n")
    assert first_difference("04_hidden_state_cache", "two\n...\nfour\n", "one\ntwo\nfour\n")


# 2. What is named ------------------------------------------------------------------------------------------------

@cache
def names_in(file: str) -> set[str]:
    """The classes, functions and constants of a file, and the methods of its classes."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        for target in getattr(node, "targets", []):
            names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


def test_what_a_file_defines_is_found():
    assert {"CHAPTERS", "Demo", "Demo.report", "shown"} <= names_in("legacy/tests/demos.py")
    assert not {"report", "Demo.stdout", "ROOT"} & names_in("legacy/tests/demos.py")


def test_each_lesson_has_all_its_parts():
    assert [name.split(":")[0] for name in LESSONS] == [f"Chapter {number:02}" for number in range(1, 10)]
    for (name, text), script in zip(LESSONS.items(), demos.CHAPTERS):
        drawn = script in demos.DRAWN
        assert text.strip().startswith("**The question.** ") and list(sections(text, 3)) == (PARTS if drawn else REBUILT), name
        parts = sections(text, 3)
        assert all(len(part.split()) > 20 for part in parts.values()), name
        assert len(re.findall("<details>", parts["Three questions"])) == 3, name
        assert script in parts["Where to look"] and script in parts["One thing to change"]
        assert not drawn or script in parts["The figure"]
        assert re.search(r"^\| the papers?.* \| ours \|$", parts["The claim"], re.M), name
        assert "(measured.md#" in parts["The claim"], name


@pytest.mark.parametrize("page", PAGES)
def test_every_fold_and_every_block_is_closed(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    marks = re.findall(r"</?(?:details|summary)>", text)
    assert marks == ["<details>", "<summary>", "</summary>", "</details>"] * (len(marks) // 4)
    fences = re.findall(r"^```(.*)$", text, re.M)
    assert len(fences) % 2 == 0 and not any(fences[1::2])
    assert re.findall(r"<details>.*\n\n", text) == re.findall(r"<details><summary>.+</summary>\n\n", text), "Markdown in a fold"


def test_each_place_to_look_at_is_there():
    for name, text in LESSONS.items():
        places = re.findall(r"^- (.+(?:\n  .+)*)", sections(text, 3)["Where to look"], re.M)
        assert len(places) >= 4, name
        for place in places:
            file, *words = re.findall(r"`([^`]+)`", place)
            assert words and set(words) <= names_in(file), f"{file} has no {words}"


def test_each_term_of_the_index_is_in_the_code():
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", sections(TEXT, 2)["Index"], re.M)[1:]
    assert len(rows) > 50
    terms = [term.lower() for term, *_ in rows]
    assert terms == sorted(terms) and len(set(terms)) == len(terms)
    for term in ("hidden states", "radix tree", "page", "prefetch", "mini-batch", "act block"):
        assert term in terms
    for term, _, where in rows:
        for place in where.split("; "):
            found = re.fullmatch(rf"`([\w/]+\.py)`: (`{NAME}`(?:, `{NAME}`)*)", place)
            assert found, f"{term}: {place}"
            assert set(re.findall(NAME, found[2])) <= names_in(found[1]), f"{term}: {place}"


def test_each_name_in_the_text_is_defined_somewhere():
    """In answers and captions, where no file is named."""
    everywhere = set().union(*(names_in(path.relative_to(ROOT).as_posix()) for path in (
        *ROOT.glob("0[1-9]*.py"), *ROOT.glob("legacy/*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("tools/*.py"))))
    for text in LESSONS.values():
        for word in re.findall(r"`([A-Z]\w*\.\w+)`", text):
            assert word in everywhere, word


# 3. Commands, edits, links, figures ------------------------------------------------------------------------------

def commands() -> list[str]:
    blocks = "\n".join(re.findall(r"^```\n((?s:.*?))^```$", TEXT, re.M))
    return re.findall(r"^(?:\$ )?(python 0[1-9].+)$", blocks, re.M) + re.findall(r"`(python 0[1-9][^`]+)`", TEXT)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_each_command_is_one_that_the_chapter_takes(command):
    _, script, *options = shlex.split(command)
    assert (ROOT / script).exists()
    name = script.removesuffix(".py")
    parser = (app if name in demos.DRAWN else cli).parser_for("")
    importlib.import_module(name).add_arguments(parser)
    parser.parse_args(options)


def test_each_edit_is_one_that_can_be_made():
    """Each line to be replaced is there once, and the program is one with the other line too."""
    edits = re.findall(r"^```diff\n--- (0[1-9]\S+)\n-(.+)\n\+(.+)\n```$", TEXT, re.M)
    assert edits
    for file, old, new in edits:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert source.count(f"{old}\n") == 1, f"{file}: {old}"
        edited = source.replace(old, new)
        assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source)), "it changes nothing"


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall("^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page} -> {link}"
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{page} -> {link}"
    labels, defined = set(re.findall(r"\]\[([\w-]+)\]", text)), set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))
    assert labels == defined, "a link without an address, or an address without a link"


def test_each_figure_is_made_by_the_command_below_it():
    for (name, text), script in zip(list(LESSONS.items())[6:8], demos.DRAWN):
        figure = sections(text, 3)["The figure"]
        (words, path), = re.findall(r"!\[(.+)\]\((.+)\)", figure)
        assert path == f"figures/{script}.svg" and len(words) > 30, name
        assert f"\npython {script}.py --demo --svg docs/{path}\n" in figure
        assert (ROOT / "docs" / path).read_text(encoding="utf-8").startswith("<svg "), path


@pytest.mark.parametrize("name", demos.CHAPTERS)
def test_each_demo_is_verified_draws_its_picture_and_leaves_nothing_behind(name, tmp_path_factory):
    demo = demos.shown(name, tmp_path_factory)
    assert demo.report["verified"] is True and (demo.report["chapter"], demo.report["model"]) == (name, "classroom")
    if name in demos.DRAWN:
        assert demo.picture.startswith("<svg ") and demo.picture.rstrip().endswith("</svg>") and "<title>" in demo.picture
    assert demo.left == [] and demo.trace["traceEvents"]
