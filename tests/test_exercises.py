"""The exercises: the chapters solve them, and what a student would do wrongly is caught, with the right sentence."""

import multiprocessing

import pytest
from conftest import ROOT

from tools import exercise

# Judges are forked from a process that has imported what takes long, and no chapter
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch", "transformers", "hypothesis", "pytest", "numpy", "shell.checkpoint", "shell.lesson", "shell.backends"]
)
WRONG = [  # chapter, what is in it, what a student writes instead, of what the judge speaks
    ("01", "torch.arange(start, start + len(tokens), ", "torch.arange(len(tokens), ", "at its own position"),
    ("01", "model.logits(hidden[-1:])", "model.logits(hidden[:1])", "Chunks give another answer"),
    ("01", "= v.transpose(0, 1)  # [KVH, T, hd]", "= k.transpose(0, 1)", "not with `transformers`"),
    ("02", "self.block_size] * self.block_size + position", "self.block_size] + position", "not in the slot"),
    ("02", "full = request.computed // self.pool.block_size\n        chain = self.extend(request)",
     "chain = self.extend(request)\n        full = len(chain)", "not full was registered"),
    ("02", "range(request.registered, full)", "range(request.registered, full - 1)", "Not all full blocks"),
    ("03", "            yield transfer\n            restoration.layers += 1", "            restoration.layers += 1\n"
     "        yield transfer", "a layer is computed when its history is there"),
    ("03", "            yield transfer\n            restoration.layers += 1", "            yield transfer\n"
     "        restoration.layers = len(transfers)", "and late"),
    ("03", "            self.saving.update(zip(prefixes, places))", "            self.saving.update(zip(prefixes, places))\n"
     "            [*map(self.host.register, places, prefixes)]", "nothing is registered before it has arrived"),
    ("04", "while ahead and len(loading.landing) < DEPTH:", "while ahead and not loading.landing:", "and late"),
    ("04", "        values.index_copy_(0, slots, v)\n\n    def note", "        values.index_copy_(0, slots, k)\n\n    def note",
     "what comes back is what was lost"),
    ("04", "            given = [(loading.store.pool, loading.blocks)]\n", "            given = []\n", "references are left"),
    ("05", '("H", costs.load_states), ("K", costs.load_kv)', '("K", costs.load_kv), ("H", costs.load_states)', "all H, then all K"),
    ("05", " else 0.0) + costs.question", " else 0.0)", "the question passes that layer"),
    ("05", "            yield loading.transfers[layer]\n        elif", "            pass\n        elif", "waited for"),
    ("06", "unread.pop()", "unread.pop(0)", "Chunks come from the back"),
    ("06", "front = max(first, self.front(request))", "front = first", "what prefill has computed is not loaded"),
    ("06", "        yield read\n", "", "when it has arrived"),
    ("07", "        upper.parent.children[upper.pages[0].prefix] = upper\n", "", "a gap"),
    ("07", "node = child if same == len(child.pages) else self.split(child, same)", "node = child", "set of prefixes"),
    ("07", "            self.pages.update((page.prefix, page) for page in new)\n", "", "set of prefixes"),
    ("08", "host - weights - (act * act_init + kv * kv_init)", "host - weights", "all of the memory is divided"),
    ("08", "if held + item.end / 2 > even or held", "if held", "few, and about even"),
    ("08", "        if kv_copy:\n            arrive(kv_copy)\n", "", "was not waited for"),
    ("09", '"o_proj" in name or "down_proj" in name', '"down_proj" in name', "do not make up the model"),
    ("09", "FAILED if self.own.error is not None else ARRIVED +", "ARRIVED +", "a copy that failed has not arrived"),
    ("09", "if self.last and not cache.ranks.all(cache.until[restoration] > 0):", "if cache.until[restoration] == 0:", "all ranks"),
]  # fmt: skip


@pytest.mark.parametrize("number", exercise.CHAPTERS)
def test_the_chapter_solves_its_exercise_and_an_emptied_one_does_not(number, tmp_path):
    path = exercise.CHAPTERS[number]
    assert exercise.judge(number, path) is None
    (tmp_path / path.name).write_text(exercise.emptied(number))
    sentence = exercise.judge(number, tmp_path / path.name)
    assert sentence == f"{exercise.methods(number)[0]} is still empty."
    written = sum(map(len, map(str.splitlines, [path.read_text()]))) - exercise.emptied(number).count("\n")
    assert 0 < written < 30


@pytest.mark.parametrize("number, right, wrong, sentence", WRONG)
def test_a_wrong_solution_is_caught(number, right, wrong, sentence, tmp_path):
    path, source = exercise.CHAPTERS[number], exercise.CHAPTERS[number].read_text()
    assert source.count(right) == 1
    (tmp_path / path.name).write_text(source.replace(right, wrong))
    said = exercise.judge(number, tmp_path / path.name)
    print(number, said)
    assert said and sentence in said
