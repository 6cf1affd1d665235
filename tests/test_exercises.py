"""The exercises: the chapters solve them, and the judge answers an incomplete or wrong file with a rule in words."""

from unittest.mock import Mock

import pytest

from tests.support import forked  # judges, too, are forked from a process that has imported what takes long
from tools import exercise

SECONDS = 300  # long, since the machine may be busy
METHODS = [(number, name) for number in exercise.CHAPTERS for name, *_ in exercise.rows(number, 3)]
METHODS.remove(("03", "HostCache.save_blocks"))  # without its count, each step looks again for blocks to save
MISTAKES = [  # (chapter, its code, wrong code of a student, part of the judge's sentence)
    ("02", "range(request.registered, full):", "range(request.registered, len(chain)):", "registered before it was full"),
    ("03", "                yield transfer\n                restoration.layers += 1",
     "                yield transfer\n            restoration.layers = len(transfers)", "right, but late"),
    ("03", "            self.saved.pop(request, None)  # the next", "            pass  # the next", "it is not begun again"),
    ("03", "len(blocks), self.kept_for(request))", "len(blocks))", "evicted its own first blocks"),
    ("04", "        finally:\n            for", "        except ValueError:\n            1\n        else:\n            for", "may be closed at any"),
    ("04-saving", "(self.head + numpy.concatenate([piece.rows for piece in pieces])) % self.ring",
     "self.head + numpy.concatenate([piece.rows for piece in pieces])", "the buffer is a ring"),
    ("05", '("H", costs.load_states), ("K", costs.load_kv)', '("K", costs.load_kv), ("H", costs.load_states)', "all H layers, then all K layers"),
    ("09", "FAILED if self.own.error is not None else ARRIVED +", "ARRIVED +", "a failed copy does not count as arrived"),
]  # fmt: skip


@pytest.mark.parametrize("number", ["03", "05"])
def test_a_chapter_solves_its_exercise(number):
    """The tests of all rules also run on every chapter without the judge."""
    assert exercise.judge(number, exercise.CHAPTERS[number], SECONDS) is None


def test_each_rule_has_a_test(tmp_path):
    judges = [exercise.Judging(number) for number in exercise.CHAPTERS]
    files = {file for judge in judges for file in judge.files}
    collected = forked.run(tmp_path, "-m", "pytest", "--collect-only", *files).stdout.splitlines()
    for judge in judges:
        judge.pytest_collection_modifyitems([Mock(nodeid=name) for name in collected if "::" in name])


@pytest.mark.parametrize("number", exercise.CHAPTERS)
def test_an_emptied_chapter_does_not_solve_its_exercise(number, tmp_path):
    path = exercise.CHAPTERS[number]
    (tmp_path / path.name).write_text(exercise.emptied(number))
    sentence = exercise.judge(number, tmp_path / path.name, SECONDS)
    assert sentence == f"{exercise.rows(number, 3)[0][0]} is still empty."
    assert 0 < len(path.read_text().splitlines()) - exercise.emptied(number).count("\n") < 30


@pytest.mark.parametrize("number, name", METHODS)
def test_a_method_without_its_last_statement_breaks_a_rule(number, name, tmp_path):
    path = exercise.CHAPTERS[number]
    lines, last = path.read_text().splitlines(), exercise.functions(path.read_text())[name].body[-1]
    lines[last.lineno - 1 : last.end_lineno] = [" " * last.col_offset + "pass"]
    (tmp_path / path.name).write_text("\n".join(lines) + "\n")
    said = exercise.judge(number, tmp_path / path.name, SECONDS)
    assert said and any(rule.rstrip(":") in said for _, rule in exercise.rows(number, 2)), said


@pytest.mark.parametrize("number, right, wrong, sentence", MISTAKES)
def test_a_typical_mistake_gets_the_sentence_of_its_rule(number, right, wrong, sentence, tmp_path):
    path, source = exercise.CHAPTERS[number], exercise.CHAPTERS[number].read_text()
    assert source.count(right) == 1
    (tmp_path / path.name).write_text(source.replace(right, wrong))
    said = exercise.judge(number, tmp_path / path.name, SECONDS)
    assert said and sentence in said


@pytest.mark.parametrize("line, sentence, seconds", [
    ("def f(:", "Line {} of 03_cpu_offload.py cannot be read: invalid syntax.", SECONDS),
    ("nothing", "Line {} of 03_cpu_offload.py ends the import: NameError(", SECONDS),
    ("while True: pass", "it has not ended: there is an endless loop", 2),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_gets_a_sentence(line, sentence, seconds, tmp_path):
    path = tmp_path / "03_cpu_offload.py"
    path.write_text((text := exercise.CHAPTERS["03"].read_text()) + line)
    assert sentence.format(text.count("\n") + 1) in exercise.judge("03", path, seconds)


def test_the_command_lists_the_exercises_and_judges_a_file(tmp_path, monkeypatch, capsys):
    def said(*words) -> str:
        monkeypatch.setattr("sys.argv", ["exercise", *words])
        with pytest.raises(SystemExit) as ended:
            exercise.main()
        return f"{ended.value.code}{capsys.readouterr().out}"

    (tmp_path / "docs").symlink_to(exercise.ROOT / "docs")
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    assert said().startswith("Choose one of 01_baseline, 02_paged_kv, ") and "no chapter 12" in said("12")
    assert "04_hidden_state_cache-saving" in said("12-saving") and "no exercises/03_cpu_offload.py yet" in said("03", "--check")
    monkeypatch.setattr("sys.argv", ["exercise", "3"])
    exercise.main()
    assert "--again" in said("03") and said("03", "--check") == "TrueHostCache.restore is still empty.\n"
