"""examples/vllm_connector.py: vLLM restores its blocks from storage, and its tokens stay the same.

If vLLM is installed for another interpreter: VLLM_PYTHON=/path/to/python python -m pytest tests/test_vllm.py
The first tests need no vLLM: they call the connector as vLLM does, with objects that have the attributes it uses."""

import importlib.util
import json
import os
import sys
from subprocess import PIPE, Popen
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT, write_model

from tests.support.serving import eventually

PYTHON = os.environ.get("VLLM_PYTHON", sys.executable if importlib.util.find_spec("vllm") else None)
PROMPTS, OFFERED = [[first, *range(10, 201)] for first in (3, 4, 5)], 160  # prompts of 6 blocks; 160 tokens can be restored
ENVIRONMENT = dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1",
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
    def get_into(self, *given):
        while os.path.exists("shut"):
            time.sleep(0.01)
        return super().get_into(*given)
"""


def peer(folder, overrides=None, **extra) -> Popen:
    """Start vLLM with the connector, in a new process that ends when its stdin is closed.

    `overrides`: the model's `hf_overrides`. `extra`: the connector's settings."""
    transfer = dict(kv_connector="StorageConnector", kv_connector_module_path="examples.vllm_connector", kv_role="kv_both",
                    kv_load_failure_policy="recompute", kv_connector_extra_config=extra)  # fmt: skip
    options = dict(model="model", dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, max_num_seqs=4,
                   kv_cache_memory_bytes=1 << 26, distributed_executor_backend="uni", kv_transfer_config=transfer,
                   hf_overrides=overrides or {})  # fmt: skip
    words = "timeout", "600", PYTHON, "-c", CHILD, json.dumps(options)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, folder]))}
    return Popen(words, cwd=folder, env=environment, stdin=PIPE, stdout=PIPE, stderr=open(folder / "log", "w"), text=True)


def ask(process: Popen, prompts) -> tuple[list, list]:
    """Ask vLLM, after it has dropped all its blocks.

    Returns: (answers, tokens of each prompt that came from storage)."""
    print(json.dumps(prompts), file=process.stdin, flush=True)
    return tuple(map(list, zip(*json.loads(process.stdout.readline()))))


class Base:
    """Stands for vLLM's KVConnectorBase_V1."""

    def __init__(self, *what):
        self.work = None

    def _get_connector_metadata(self):
        return self.work


@pytest.fixture
def connector(monkeypatch, tmp_path):
    """Return function(overrides) that makes a connector over files in `tmp_path`, for a model with these `hf_overrides`."""
    name, base = "vllm.distributed.kv_transfer.kv_connector.v1", ModuleType("base")
    base.KVConnectorMetadata, base.KVConnectorBase_V1 = object, Base
    for at in range(1, 1 + len(name.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:at]), ModuleType("part"))
    sys.modules["vllm"].__version__, sys.modules[name].base = "0.32.0", base
    monkeypatch.delitem(sys.modules, "examples.vllm_connector", raising=False)
    made = []

    def make(**overrides):
        model = SimpleNamespace(model="m", revision=None, dtype=torch.float32, compute_hash=lambda: repr(overrides))
        config = SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(cache_dtype="auto", block_size=4), load_config=SimpleNamespace(load_format="auto"),
            parallel_config=SimpleNamespace(world_size=1), kv_transfer_config=SimpleNamespace(kv_connector_extra_config=dict(url=f"file:{tmp_path}")))  # fmt: skip
        kind = importlib.import_module("examples.vllm_connector").StorageConnector
        made.append(kind(config, None, SimpleNamespace(kv_cache_groups=[0], num_blocks=8)))
        made[-1].register_kv_caches({"layer": torch.arange(8 * 16.0).view(8, 16)})
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def arrives(connector, tokens, **more) -> SimpleNamespace:
    """Return a request that vLLM has passed to the connector. `more`: its other attributes."""
    fields = dict(request_id="r", mm_features=[], lora_request=None, prompt_embeds=None, cache_salt=None, num_preemptions=0)
    request = SimpleNamespace(**{**fields, **more}, num_tokens=len(tokens), all_token_ids=tokens)
    connector.on_new_request(request)
    return request


def computes(connector, start: int, count: int):
    """Make a step of vLLM that computes `count` tokens of the request, and wait until its blocks are saved."""
    new, blocks = SimpleNamespace(req_id="r", num_computed_tokens=start), SimpleNamespace(get_block_ids=lambda name: ([*range(8)],))
    connector.work = connector.build_connector_meta(SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]), scheduled_new_reqs=[new],
        num_scheduled_tokens={"r": count}, kv_connector_block_state=blocks))  # fmt: skip
    connector.wait_for_save()
    connector.storage.set([], []).wait(60)


def test_storage_deletes_the_tail_of_a_text_first(connector, tmp_path):
    saving = connector()
    arrives(saving, [*range(24)])
    for start, count in (0, 12), (12, 12):
        computes(saving, start, count)
    files = sorted(tmp_path.iterdir(), key=lambda file: -file.stat().st_mtime_ns)  # the last one is deleted first
    assert [file.stem for file in files] == [key.hex() for key in saving.keys(saving.known["r"])] and len(files) == 6


@pytest.mark.parametrize("more, overrides, blocks", [
    ({}, {}, 2), (dict(prompt_embeds=torch.ones(12, 4)), {}, 0), (dict(lora_request="adapter"), {}, 0), (dict(mm_features=["image"]), {}, 0),
    (dict(cache_salt="b"), {}, 0), ({}, dict(rope_parameters=dict(rope_theta=5e5)), 0),
])  # fmt: skip
def test_a_request_gets_only_blocks_of_its_own_model_and_inputs(connector, tmp_path, more, overrides, blocks):
    saving, asking = connector(), connector(**overrides)
    arrives(saving, [0] * 12)
    computes(saving, 0, 12)
    request = arrives(asking, [0] * 12, **more)
    count = [asking.get_num_new_matched_tokens(request, 0)]
    eventually(lambda: count[-1] != (None, False) or count.append(asking.get_num_new_matched_tokens(request, 0)))
    assert count[-1] == (4 * blocks, blocks > 0)
    computes(asking, 0, 12)
    saved = more.keys() & {"prompt_embeds", "lora_request", "mm_features"} or not (more or overrides)
    assert len(list(tmp_path.iterdir())) == (3 if saved else 6)


@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or in the interpreter VLLM_PYTHON")
def test_vllm_restores_lost_blocks_from_storage(tmp_path):
    write_model(tmp_path / "model", hidden_size=128)
    with peer(tmp_path, url="file:pages") as first:
        answers, cached = ask(first, PROMPTS)
        assert cached == [0, 0, 0] and len(set(map(tuple, answers))) == 3, "the first token changes the answer"
        right = answers, [OFFERED] * 3
        eventually(lambda: ask(first, PROMPTS) == right)  # blocks that storage has not saved are computed and saved again
    (tmp_path / "gate.py").write_text(GATE)
    with peer(tmp_path, url="gate:Gate", config=dict(url="file:pages"), patience=0.5) as second:
        assert ask(second, PROMPTS) == right, "another process restores the blocks"
        pages = [*tmp_path.glob("pages/*.parts")]
        for damaged in pages, pages[::2]:
            for page in damaged:
                page.write_bytes(page.read_bytes()[:-1])
            assert ask(second, PROMPTS)[0] == answers, "damaged blocks are computed"
            eventually(lambda: ask(second, PROMPTS) == right)  # damaged pages are written again
        (tmp_path / "shut").touch()
        assert ask(second, PROMPTS) == (answers, [0] * 3), "vLLM does not wait for a read that hangs"
        (tmp_path / "shut").unlink()
        eventually(lambda: ask(second, PROMPTS) == right)
    with peer(tmp_path, dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)), url="file:pages") as third:
        assert ask(third, PROMPTS)[1] == [0] * 3, "under other numbers no block is found"
