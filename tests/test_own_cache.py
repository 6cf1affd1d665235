"""A Cache of the student's own: the contract's tests find a mistake and name its rule.

The template itself passes them elsewhere."""

import re

import pytest
from conftest import ROOT

from common.requests import BadRequest
from shell.backends import open_backend
from tests.support import forked


def test_the_contract_catches_a_forgotten_reference(tmp_path):
    """Other mistakes are in tests/test_exercises.py."""
    source, right = (ROOT / "examples/my_cache.py").read_text(), "(self.pool, [block]), given="
    assert source.count(right) == 1
    (tmp_path / "judged_cache.py").write_text(source.replace(right, "given="))
    words = "-m pytest tests/test_cache_contract.py --cache judged_cache:MyCache -x -q -k copy"  # this test watches each copy
    done = forked.run(tmp_path, *words.split(), path=tmp_path, PYTEST_XDIST_WORKER="")
    assert done.returncode == 1, "the contract's tests must fail"
    assert "AssertionError: blocks that a copy reads or writes are referenced" in done.stdout, done.stdout[-3000:]


class Shelf(dict):
    def __init__(self, url: str):
        self.url = url

    def exists(self, keys: list[str]) -> list[bool]:
        return [key in self for key in keys]


def test_a_users_storage_class_may_name_a_setting_url():
    assert open_backend(f"{__name__}:Shelf", dict(url="file:pages")).url == "file:pages"
    with pytest.raises(BadRequest, match="has no setting 'path'; it has url"):
        open_backend(f"{__name__}:Shelf", dict(path="pages"))


def test_the_documented_python_lines_run(tmp_path):
    code = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "docs/one_request.md").read_text(), re.S)[1]
    (tmp_path / "lines.py").write_text(code)
    ran = forked.run(tmp_path, tmp_path / "lines.py")
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["miss", "cpu_hit"] and "Pip" in ran.stdout, ran.stderr
