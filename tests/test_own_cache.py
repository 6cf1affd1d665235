"""Code of users: a Cache or a storage of their own, and the lines and commands that they copy from a page."""

import re

from conftest import ROOT

from tests.support import forked
from tests.support.serving import Client, eventually


def test_the_contract_catches_a_forgotten_reference(tmp_path):
    """Other mistakes are in tests/test_exercises.py."""
    source, right = (ROOT / "examples/my_cache.py").read_text(), "(self.pool, [block]), given="
    assert source.count(right) == 1
    (tmp_path / "judged_cache.py").write_text(source.replace(right, "given="))
    words = "-m pytest tests/test_cache_contract.py --cache judged_cache:MyCache -x -q -k copy"  # this test watches each copy
    done = forked.run(tmp_path, *words.split(), path=tmp_path, PYTEST_XDIST_WORKER="")
    assert done.returncode == 1, "the contract's tests must fail"
    assert "AssertionError: blocks that a copy reads or writes are referenced" in done.stdout, done.stdout[-3000:]


def test_the_documented_python_lines_run(tmp_path):
    code = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "docs/one_request.md").read_text(), re.S)[1]
    (tmp_path / "lines.py").write_text(code)
    ran = forked.run(tmp_path, tmp_path / "lines.py")
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["miss", "cpu_hit"] and "Pip" in ran.stdout, ran.stderr


def test_one_process_prefills_and_another_process_decodes(tmp_path):
    """docs/reference.md, "Prefill here, decode there": the processes of its two commands find each other's pages in storage."""
    section = (ROOT / "docs/reference.md").read_text().partition("### Prefill here, decode there")[2]
    text, servers = "Read this:" + 20 * " Anna lives in Rome. The code of the gate is 4821.", []
    body = dict(messages=[dict(role="user", content=f"{text} What is the code of the gate?")])
    try:
        for chapter, options in re.findall(r"^python (\S+)( --storage file:pages .*?) *#.*$", section, re.M):
            (folder := tmp_path / str(len(servers))).mkdir()
            words = options.replace("file:", f"file:{tmp_path}/").split()
            servers.append(forked.start(folder, ROOT / chapter, *words, "--port", "0"))
        said = [tmp_path / number / "stdout" for number in "01"]
        eventually(lambda: all("\n" in path.read_text() for path in said))
        here, there = (Client(int(re.search(r"http://\S+:(\d+)", path.read_text())[1])) for path in said)
        first = here.ask("/generate", dict(body, max_tokens=1)).json
        pages = (first["usage"]["prompt_tokens"] - 1) // 16
        eventually(lambda: here.counters()["storage_pages_written"] >= pages)
        second = there.ask("/generate", dict(body, max_tokens=16)).json
        assert first["source"] == "miss" and second["found"] == {"storage": pages * 16}
        assert second["text"] == "The code of the gate is 4821." and second["tokens"][:1] == first["tokens"]
    finally:
        for server in servers:
            server.kill()
