"""The lesson of each chapter, with its default options, run once for all tests that read what it says.

A demo takes up to a minute. Whoever asks first runs it, and the others read what it said, be it in another of the processes in
which pytest-xdist runs the tests: what it said lies in the temporary directory that these share, behind a lock file.
"""
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from legacy.tests.conftest import ROOT

CHAPTERS = sorted(path.stem for path in ROOT.glob("0[1-9]_*.py"))
DRAWN = [name for name in CHAPTERS if "07" <= name < "09"]             # those that have --svg
TIMEOUT = 900                      # seconds; a demo takes about 60 where two cores have nothing else to do


@dataclass(frozen=True)
class Demo:
    """What `python CHAPTER.py --demo` did; `left` are the directories that it made and did not delete."""
    returncode: int
    stdout: str
    stderr: str
    left: list[str]
    folder: Path

    @property
    def report(self) -> dict:
        """What --json wrote."""
        return json.loads((self.folder / "report.json").read_text())

    @property
    def trace(self) -> dict:
        """What --trace wrote."""
        return json.loads((self.folder / "trace.json").read_text())

    @property
    def picture(self) -> str:
        """What --svg wrote."""
        return (self.folder / "picture.svg").read_text(encoding="utf-8")


def shown(chapter: str, tmp_path_factory) -> Demo:
    """The demo of a chapter, on a CPU. It is run if no test of this session has asked for it; it must have ended well."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demos" / chapter
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        said = folder / "said.json"
        if not said.exists():
            said.write_text(json.dumps(run(chapter, folder)))
    demo = Demo(**json.loads(said.read_text()), folder=folder)
    assert demo.returncode == 0, demo
    return demo


def run(chapter: str, folder: Path) -> dict:
    """In a Python of its own, in which nothing is left of other tests."""
    temporary, cache = folder / "temporary", folder / "cache"
    temporary.mkdir()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "TMPDIR": str(temporary),
                   "XDG_CACHE_HOME": str(cache)}
    names = dict(json="report.json", trace="trace.json", **(dict(svg="picture.svg") if chapter in DRAWN else {}))
    files = [word for option, name in names.items() for word in (f"--{option}", str(folder / name))]
    done = subprocess.run([sys.executable, ROOT / f"{chapter}.py", "--demo", "--device", "cpu", *files], env=environment,
                          capture_output=True, encoding="utf-8", timeout=TIMEOUT)
    left = sorted(path.name for path in temporary.iterdir() if path.name.startswith(("kv-chunks-", "demo-")))
    return dict(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr, left=left)
