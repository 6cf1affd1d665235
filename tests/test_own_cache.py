"""Write your own: what a student would do wrongly is caught by name. (The template is one of the contract's caches.)"""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

WRONG = {  # what is changed in docs/my_cache.py, and the rule that is broken then
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


def judged(folder, source: str) -> tuple[int, str]:
    (folder / "judged_cache.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "tests/test_cache_contract.py", "--cache", "judged_cache:MyCache"]
    command += ["-x", "-q", "-k", "what_a_copy_uses"]  # which watches each copy
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_XDIST_WORKER": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_caught(mistake, tmp_path):
    source, (changes, rule) = (ROOT / "docs/my_cache.py").read_text(), WRONG[mistake]
    for right, wrong in changes:
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    code, said = judged(tmp_path, source)
    assert code == 1, f"{mistake}: nobody noticed"
    assert f"AssertionError: {rule}" in said, said[-3000:]


def test_the_lines_of_the_readme_that_use_the_engine_from_python_run():
    code = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["miss", "cpu_hit"] and "Pip" in ran.stdout, ran.stderr
