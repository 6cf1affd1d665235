"""examples/vllm_connector.py: vLLM restores its blocks from storage, and its tokens stay the same.

If vLLM is installed for another interpreter: VLLM_PYTHON=/path/to/python python -m pytest tests/test_vllm.py"""

import importlib.util
import json
import os
import sys
from subprocess import PIPE, Popen

import pytest
from conftest import ROOT, write_model

from tests.support.serving import eventually

PYTHON = os.environ.get("VLLM_PYTHON", sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or in the interpreter VLLM_PYTHON")
PROMPTS, OFFERED = [[first, *range(10, 201)] for first in (3, 4, 5)], 160  # prompts of 6 blocks; 160 tokens can be restored
PAD_LIMIT = dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1",
             VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", VLLM_CACHE_ROOT="vllm")  # fmt: skip
CHILD = """
import json, os, sys
out, _ = os.fdopen(os.dup(1), "w"), os.dup2(2, 1)
from vllm import LLM, SamplingParams
llm, greedy = LLM(**json.loads(sys.argv[1])), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
for line in sys.stdin:
    llm.reset_prefix_cache()
    answers = llm.generate([dict(prompt_token_ids=ids) for ids in json.loads(line)], greedy, use_tqdm=False)
    print(json.dumps([(each.outputs[0].token_ids, each.num_cached_tokens) for each in answers]), file=out, flush=True)
"""
GATE = """
import os, shell.backends, time
class Gate(shell.backends.Directory):
    def get(self, keys):
        while os.path.exists("shut"):
            time.sleep(0.01)
        return super().get(keys)
"""


def peer(folder, **extra) -> Popen:
    """Start vLLM with the connector, in a new process that ends when its stdin is closed."""
    transfer = dict(kv_connector="StorageConnector", kv_connector_module_path="examples.vllm_connector", kv_role="kv_both",
                    kv_load_failure_policy="recompute", kv_connector_extra_config=extra)  # fmt: skip
    options = dict(model="model", dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, max_num_seqs=4,
                   kv_cache_memory_bytes=1 << 26, distributed_executor_backend="uni", kv_transfer_config=transfer)  # fmt: skip
    words = "timeout", "600", PYTHON, "-c", CHILD, json.dumps(options)
    environment = {**os.environ, **PAD_LIMIT, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, folder]))}
    return Popen(words, cwd=folder, env=environment, stdin=PIPE, stdout=PIPE, stderr=open(folder / "log", "w"), text=True)


def ask(process: Popen, prompts) -> tuple[list, list]:
    """Ask vLLM, after it has dropped all its blocks.

    Returns: (answers, tokens of each prompt that came from storage)."""
    print(json.dumps(prompts), file=process.stdin, flush=True)
    return tuple(map(list, zip(*json.loads(process.stdout.readline()))))


def test_what_vllm_has_lost_comes_back_from_storage(tmp_path):
    write_model(tmp_path / "model", hidden_size=128)
    with peer(tmp_path, url="file:pages") as first:
        answers, cached = ask(first, PROMPTS)
        assert cached == [0, 0, 0] and len(set(map(tuple, answers))) == 3, "the first token changes the answer"
        right = answers, [OFFERED] * 3
        eventually(lambda: ask(first, PROMPTS) == right)  # blocks that storage has not saved are computed and saved again
    (tmp_path / "gate.py").write_text(GATE)
    with peer(tmp_path, url="gate:Gate", config=dict(url="file:pages"), patience=0.5) as second:
        assert ask(second, PROMPTS) == right, "another process restores the blocks"
        pages = [*tmp_path.glob("pages/*.page")]
        for damaged in pages, pages[::2]:
            for page in damaged:
                page.write_bytes(page.read_bytes()[:-1])
            assert ask(second, PROMPTS)[0] == answers, "damaged blocks are computed"
            eventually(lambda: ask(second, PROMPTS) == right)  # damaged pages are written again
        (tmp_path / "shut").touch()
        assert ask(second, PROMPTS) == (answers, [0] * 3), "vLLM does not wait for a read that hangs"
        (tmp_path / "shut").unlink()
        eventually(lambda: ask(second, PROMPTS) == right)
