"""docs/reference.md, "Prefill here, decode there": its two commands, as two processes on one storage."""

import json
import re
import sys
from subprocess import DEVNULL, PIPE, Popen
from urllib.request import Request, urlopen

from conftest import ROOT
from support.serving import eventually


def ask(url: str, **body) -> dict:
    data = json.dumps(body).encode() if body else None
    return json.load(urlopen(Request(url, data, {"Content-Type": "application/json"})))


def test_one_process_prefills_and_another_one_decodes(tmp_path):
    section = (ROOT / "docs/reference.md").read_text().partition("### Prefill here, decode there")[2]
    prompt, servers = "Anna lives in Rome. The code of the gate is 4821. " * 16 + "The code of the gate is", []
    try:
        for chapter, options in re.findall(r"^python (\S+)( --storage file:pages .*?) *#.*$", section, re.M):
            words = [sys.executable, ROOT / chapter, *options.split(), "--port", "0"]
            servers.append(Popen(words, cwd=tmp_path, stdout=PIPE, stderr=DEVNULL, text=True))
        here, there = (re.search(r"http://\S+:\d+", server.stdout.readline())[0] for server in servers)
        first = ask(f"{here}/generate", prompt=prompt, max_tokens=1)
        pages = (first["usage"]["prompt_tokens"] - 1) // 16
        eventually(lambda: ask(f"{here}/health")["counters"].get("storage_pages_written", 0) >= pages)
        second, alone = (ask(f"{url}/generate", prompt=prompt, max_tokens=8) for url in (there, here))
        assert first["source"] == "miss" and second["found"] == {"storage": pages * 16}
        assert second["tokens"] == alone["tokens"] and second["tokens"][:1] == first["tokens"]
    finally:
        for server in servers:
            server.kill()
