"""Write your own: what a student would do wrongly is caught by name. (The template is one of the contract's caches.)"""

import re

import pytest
from conftest import ROOT

from common.requests import BadRequest
from shell.backends import open_backend
from tests.support import forked

WRONG = {  # what is changed in examples/my_cache.py, and the rule that is broken then
    "registered too early": (
        [("                self.saving.add(prefix)\n", "                self.host.register(place, prefix)\n"),
         ("        if arrived:\n", "        if arrived and False:\n")],
        "nothing is registered before it has arrived"),
    "a reference forgotten": (
        [("(self.pool, [block]), given=", "given=")], "whatever a copy reads or writes is referenced"),
    "a late copy used": (
        [("            yield transfer\n            restoration.layers += 1\n",
          "            restoration.layers += 1\n        yield transfers[-1]\n")],
        "a layer is computed when its history is there"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_caught(mistake, tmp_path):
    source, (changes, rule) = (ROOT / "examples/my_cache.py").read_text(), WRONG[mistake]
    for right, wrong in changes:
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    (tmp_path / "judged_cache.py").write_text(source)
    words = "-m pytest tests/test_cache_contract.py --cache judged_cache:MyCache -x -q -k what_a_copy_uses"  # which watches each copy
    done = forked.run(tmp_path, *words.split(), path=tmp_path, PYTEST_XDIST_WORKER="")
    assert done.returncode == 1, f"{mistake}: nobody noticed"
    assert f"AssertionError: {rule}" in done.stdout, done.stdout[-3000:]


class Shelf(dict):
    def __init__(self, url: str):
        self.url = url

    def exists(self, keys: list[str]) -> list[bool]:
        return [key in self for key in keys]


def test_a_storage_class_of_ones_own_may_have_a_setting_of_any_name():
    assert open_backend(f"{__name__}:Shelf", dict(url="file:pages")).url == "file:pages"
    with pytest.raises(BadRequest, match="has no setting 'path'; it has url"):
        open_backend(f"{__name__}:Shelf", dict(path="pages"))


def test_the_lines_of_the_readme_that_use_the_engine_from_python_run(tmp_path):
    code = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "lines.py").write_text(code)
    ran = forked.run(tmp_path, tmp_path / "lines.py")
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["miss", "cpu_hit"] and "Pip" in ran.stdout, ran.stderr
