"""docs/vllm_connector.py in vLLM: what its blocks hold comes back from storage, and the tokens stay the same.

    VLLM_PYTHON=/path/to/python python -m pytest tests/test_vllm.py         an interpreter that has vLLM
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, write_model
from support.serving import eventually

pytestmark = pytest.mark.skipif(
    "VLLM_PYTHON" not in os.environ and importlib.util.find_spec("vllm") is None,
    reason="needs vLLM, here or in the interpreter that VLLM_PYTHON names")
PROMPTS = [[first, *range(10, 201)] for first in (3, 4, 5)]     # 192 tokens, six blocks
OFFERED = 160                                                   # the last one's last token is computed
CHILD = """
import json, os, sys
out, _ = os.fdopen(os.dup(1), "w"), os.dup2(2, 1)
from vllm import LLM, SamplingParams
transfer = dict(kv_connector="StorageConnector", kv_connector_module_path="docs.vllm_connector",
                kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=json.loads(sys.argv[2]))
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, max_num_seqs=4,
          kv_cache_memory_bytes=1 << 26, distributed_executor_backend="uni", kv_transfer_config=transfer)
for line in sys.stdin:
    llm.reset_prefix_cache()
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    answers = llm.generate([dict(prompt_token_ids=ids) for ids in json.loads(line)], greedy, use_tqdm=False)
    print(json.dumps([(answer.outputs[0].token_ids, answer.num_cached_tokens) for answer in answers]), file=out, flush=True)
"""
GATE = """
import os, time
from shell.backends import Directory

class Gate(Directory):
    def get(self, keys):
        while os.path.exists("shut"):
            time.sleep(0.01)
        return super().get(keys)
"""


class Peer:
    """vLLM in a process of its own, killed if it has not ended after ten minutes."""

    def __init__(self, folder, model, **extra):
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(folder / "vllm")}  # fmt: skip
        words = os.environ.get("VLLM_PYTHON", sys.executable), "-c", CHILD, model, json.dumps(extra)
        pipe, log = subprocess.PIPE, open(folder / "log", "w")
        self.process = subprocess.Popen(words, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.timer = threading.Timer(600, self.process.kill)
        self.timer.start()

    def ask(self, *prompts) -> tuple[list, list]:
        """-> the answers of a vLLM that has lost all its blocks; how many tokens came from storage for each."""
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        return tuple(map(list, zip(*json.loads(self.process.stdout.readline()))))

    def close(self):
        self.process.communicate()
        self.timer.cancel()


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Yield a process of vLLM that is given what another one has stored, its answers, and the folder."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "gate.py").write_text(GATE)
    model = write_model(folder / "model", hidden_size=128)
    first = Peer(folder, model, url="file:pages")
    answers, found = first.ask(*PROMPTS)
    assert found == [0, 0, 0] and len(set(map(tuple, answers))) == 3, "what is far back decides"
    eventually(lambda: len([*(folder / "pages").glob("*.page")]) == 3 * 7)
    assert first.ask(*PROMPTS) == (answers, [OFFERED] * 3)
    first.close()
    peer = Peer(folder, model, url="gate:Gate", config=dict(url="file:pages"), patience=0.5)
    yield peer, answers, folder
    peer.close()


def test_another_process_continues_with_the_same_tokens(second):
    peer, answers, _ = second
    assert peer.ask(*PROMPTS) == (answers, [OFFERED] * 3)


def test_what_is_damaged_is_computed_and_written_anew(second):
    peer, answers, folder = second
    pages = {page: page.read_bytes() for page in (folder / "pages").glob("*.page")}
    for page in [*pages][::2]:
        page.write_bytes(pages[page][:-1])
    assert peer.ask(*PROMPTS)[0] == answers
    eventually(lambda: all(page.read_bytes() == contents for page, contents in pages.items()))
    assert peer.ask(*PROMPTS) == (answers, [OFFERED] * 3)


def test_a_storage_that_hangs_is_given_up_and_used_again(second):
    peer, answers, folder = second
    (folder / "shut").touch()
    assert peer.ask(*PROMPTS) == (answers, [0] * 3)
    (folder / "shut").unlink()
    eventually(lambda: peer.ask(*PROMPTS) == (answers, [OFFERED] * 3))
