"""The exercises: the chapters' own code solves them, and the judge names typical errors by the right sentence."""

import pytest

from tests.support import forked  # noqa: F401  judges are forked from a process that has imported what takes long
from tools import exercise

SECONDS = 300  # long, since the machine may be busy
WRONG = [  # (chapter, its code, wrong code of a student, part of the judge's sentence)
    ("01", "torch.arange(start, start + len(tokens), ", "torch.arange(len(tokens), ", "at its own position"),
    ("01", "model.logits(hidden[-1:])", "model.logits(hidden[:1])", "changes with the size of the chunks"),
    ("01", "= v.transpose(0, 1)  # [KVH, T, hd]", "= k.transpose(0, 1)", "but `transformers` gives others"),
    ("02", "(table[..., None] * self.block_size + offsets)", "(table[..., None] + offsets)", "from other slots than they were written to"),
    ("02", "range(request.registered, full):", "range(request.registered, len(chain)):", "registered before it was full"),
    ("02", "= request.computed // self.pool.block_size, ", "= request.computed // self.pool.block_size - 1, ", "A lookup finds too few"),
    ("02", "                pool.use(chain)\n\n    # Ending", "                pass\n\n    # Ending", "loses its head before its tail"),
    ("03", "                yield transfer\n                restoration.layers += 1",
     "                restoration.layers += 1\n            yield transfer", "a layer is computed only after its history has arrived"),
    ("03", "                yield transfer\n                restoration.layers += 1",
     "                yield transfer\n            restoration.layers = len(transfers)", "right, but late"),
    ("03", "            self.saving.update(zip(block_keys, host_blocks))", "            self.saving.update(zip(block_keys, host_blocks))\n"
     "            [*map(self.host.register, host_blocks, block_keys)]", "a block is not registered before its copy has arrived"),
    ("03", "            self.saved.pop(request, None)  # the next", "            pass  # the next", "it is not begun again"),
    ("03", "        self.host.use(request.chain)\n", "", "is evicted from its tail"),
    ("03", "len(blocks), self.kept_for(request))", "len(blocks))", "evicted its own first blocks"),
    ("03", "        request.timeline.add(\"save\", transfer.label, *transfer.span())\n", "", "a save is in its request's timeline"),
    ("04", "while ahead and len(loading.landing) < DEPTH:", "while ahead and not loading.landing:", "right, but late"),
    ("04", "slots, v)\n\n    def record_spans", "slots, k)\n\n    def record_spans", "restored tokens are those that were computed"),
    ("04", "            given = [(self.store.pool, loading.blocks)]\n", "            given = []\n", "references are left"),
    ("04", "        finally:\n            for", "        except ValueError:\n            1\n        else:\n            for", "may be closed at any"),
    ("04-saving", '        self.hold("save", [job], ', '        self.hold("save", [transfer], ', "until their rows are written"),
    ("04-saving", "(self.head + numpy.concatenate([piece.rows for piece in pieces])) % self.ring", "self.head + numpy.concatenate([piece.rows for piece in pieces])", "the buffer is a ring"),
    ("04-saving", "take_snapshot(states)\n", "take_snapshot(states)\n        transfer.wait()\n", "a step does not wait for a save"),
    ("05", '("H", costs.load_states), ("K", costs.load_kv)', '("K", costs.load_kv), ("H", costs.load_states)', "all H layers, then all K layers"),
    ("05", " else 0.0) + costs.question", " else 0.0)", "The question passes a layer"),
    ("05", "            yield loading.transfers[layer]\n        elif", "            pass\n        elif", "wait for each copy"),
    ("06", "unread.pop()", "unread.pop(0)", "in the wrong order"),
    ("06", "front = max(first, self.front(request))", "front = first", "meet inside a chunk"),
    ("06", "        yield read\n", "", "at the wrong time"),
    ("07", "                upper.parent.children[upper.pages[0]] = upper\n", "", "dictionary of pages"),
    ("07", "upper.pages and len(upper.children) == 1 and upper.state == node.state", "False", "else they are one node"),
    ("08", "host - weights - (act * act_init + kv * kv_init)", "host - weights", "the blocks fill the memory"),
    ("08", "if held + item.end / 2 > even or held", "if held", "few mini-batches of about equal length"),
    ("08", "        if kv_copy:\n            await_transfer(kv_copy)\n", "", "wait for each copy"),
    ("09", '"o_proj" in name or "down_proj" in name', '"down_proj" in name', "do not make up the model"),
    ("09", "FAILED if self.own.error is not None else ARRIVED +", "ARRIVED +", "a failed copy does not count as arrived"),
    ("09", "if self.last and not agree(until[self.restoration] > 0):", "if until[self.restoration] == 0:",
     "after the last layer"),
]  # fmt: skip


@pytest.mark.parametrize("number", exercise.CHAPTERS)
def test_the_chapter_solves_its_exercise_and_an_emptied_one_does_not(number, tmp_path):
    path = exercise.CHAPTERS[number]
    assert exercise.judge(number, path, SECONDS) is None
    (tmp_path / path.name).write_text(exercise.emptied(number))
    sentence = exercise.judge(number, tmp_path / path.name, SECONDS)
    assert sentence == f"{exercise.rows(number, 3)[0][0]} is still empty."
    assert 0 < len(path.read_text().splitlines()) - exercise.emptied(number).count("\n") < 30


@pytest.mark.parametrize("number, right, wrong, sentence", WRONG)
def test_a_wrong_solution_is_caught(number, right, wrong, sentence, tmp_path):
    path, source = exercise.CHAPTERS[number], exercise.CHAPTERS[number].read_text()
    assert source.count(right) == 1
    (tmp_path / path.name).write_text(source.replace(right, wrong))
    said = exercise.judge(number, tmp_path / path.name, SECONDS)
    assert said and sentence in said


@pytest.mark.parametrize("line, sentence, seconds", [
    ("def f(:", "Line {} of 03_cpu_offload.py cannot be read: invalid syntax.", SECONDS),
    ("nothing", "Line {} of 03_cpu_offload.py ends the import: NameError(", SECONDS),
    ("while True: pass", "it has not ended: there is an endless loop", 5),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_a_sentence(line, sentence, seconds, tmp_path):
    path = tmp_path / "03_cpu_offload.py"
    path.write_text((text := exercise.CHAPTERS["03"].read_text()) + line)
    assert sentence.format(text.count("\n") + 1) in exercise.judge("03", path, seconds)


def test_the_command_says_what_is_there_and_what_is_not(tmp_path, monkeypatch, capsys):
    def said(*words) -> str:
        monkeypatch.setattr("sys.argv", ["exercise", *words])
        with pytest.raises(SystemExit) as ended:
            exercise.main()
        return f"{ended.value.code}{capsys.readouterr().out}"

    (tmp_path / "docs").symlink_to(exercise.ROOT / "docs")
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    assert said().startswith("Choose one of 01_baseline, 02_paged_kv, ")
    assert "no chapter 12" in said("12") and "04_hidden_state_cache-saving" in said("12-saving") and "no exercises/03_cpu_offload.py yet" in said("03", "--check")
    monkeypatch.setattr("sys.argv", ["exercise", "3"])
    exercise.main()
    assert "--again" in said("03") and said("03", "--check") == "TrueHostCache.restore is still empty.\n"
