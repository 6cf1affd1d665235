"""A KV connector that plugs `Storage` into vLLM. It saves full blocks of K and V in files, in Redis or in a
class of your own. They are restored after an eviction, after a restart, and in other processes.
docs/production.md says how to use it.

vLLM creates one connector in its scheduler and one in its worker. Their methods correspond to those of
`Cache` (common/cache.py):

    submitted                       on_new_request
    waits, match -> Match or None   get_num_new_matched_tokens -> None (ask again), or tokens
    restore, a generator            update_state_after_alloc, start_load_kv
    poll                            get_transfer_results, get_block_ids_with_load_errors
    save                            build_connector_meta plans it, wait_for_save does it
    finished                        request_finished
    attach, close                   register_kv_caches, shutdown
    recompute after a failure       kv_load_failure_policy: "recompute"

It has no decision between loading and computing (common/estimates.py), and loads all layers of a block
together. It supports neither several ranks, several groups of KV caches nor GPUs. Requests with an adapter,
images or prompts given as embeddings are computed, and nothing is saved. A key contains vLLM's hash of the
model's configuration: path, revision, dtype, quantization, `hf_overrides` and more. Other weights need
another path or revision. vLLM's attention kernel for CPUs packs K. So a block is stored as bytes, and only
the same vLLM version, instruction set, dtype and block size can read it. Written for vLLM 0.32."""

import hashlib
import time
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import numpy
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from common.link import Transfer
from common.store import Storage
from shell.backends import open_backend
from shell.workers import Worker

LOOK = 2e-3  # seconds to wait for storage when there is no other work, so that vLLM does not spin


@dataclass
class Known:
    """What the scheduler's connector knows about one request."""

    request: "vllm.v1.request.Request"
    keys: list[bytes] = field(default_factory=list)  # of its full blocks
    asked: Transfer | None = None  # the question to storage that is under way
    first: int = 0  # number of the first block that was offered
    loaded: int | None = None  # number of preemptions at the last load: load once for each admission
    saved: int | None = None  # number of leading blocks that need no saving any more


@dataclass
class Work(base.KVConnectorMetadata):
    """A message from the scheduler to the worker: the blocks that a step loads and saves."""

    loads: list[tuple[str, list[bytes], list[int]]]  # (request id, keys, blocks)
    # (keys of a text up to its last full block, blocks of the last of these keys)
    saves: list[tuple[list[bytes], list[int]]] = field(default_factory=list)


class StorageConnector(base.KVConnectorBase_V1):
    """One half of the connector: vLLM creates one in the scheduler (1) and one in the worker (2)."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1 or vllm_config.parallel_config.world_size != 1:
            raise ValueError("StorageConnector supports only one group of KV caches and only one rank")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.storage = Storage(open_backend(extra["url"], extra.get("config")))
        self.patience, self.wake = extra.get("patience", 5.0), Event()
        self.storage.open(partial(Worker, wake=self.wake.set), counts={})
        model, cache, cpu = vllm_config.model_config, vllm_config.cache_config, torch.backends.cpu
        # Everything that K and V depend on, apart from the tokens
        parts = model.compute_hash(), vllm_config.load_config.load_format, cache.cache_dtype, cache.block_size
        self.name = " ".join(map(str, [vllm.__version__, cpu.get_cpu_capability(), *parts]))
        self.size, self.blocks = cache.block_size, kv_cache_config.num_blocks
        self.known, self.loads = {}, []  # in the scheduler: request id -> Known; loads of the next step
        # In the worker: each layer's memory, [blocks, bytes]; request id -> deadline, (block, row, transfer)s
        self.layers, self.loading = [], {}

    # 1. In the scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request):
        self.known[request.request_id] = Known(request)

    def keys(self, known: Known) -> list[bytes]:
        """Return a key for each full block: a hash of all tokens up to the block's end. It is the same in all
        processes."""
        request = known.request
        if request.mm_features or request.lora_request or request.prompt_embeds is not None:
            return []  # its K and V depend on more than its tokens
        for start in range(len(known.keys) * self.size, request.num_tokens - self.size + 1, self.size):
            before = known.keys[-1] if start else f"{self.name} {request.cache_salt or ''}".encode()
            tokens = numpy.array(request.all_token_ids[start : start + self.size], "<i8")
            known.keys.append(hashlib.sha256(before + tokens.tobytes()).digest())
        return known.keys

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """Return how many tokens after the computed ones storage can restore, and whether they are loaded
        between steps. (None, False): storage has not answered yet; vLLM asks again. Do not wait for a storage
        that is silent."""
        known, first = self.known[request.request_id], num_computed_tokens // self.size
        keys = self.keys(known)[: (request.num_tokens - 1) // self.size]  # the last token gives the logits
        if first >= len(keys) or known.loaded == request.num_preemptions:
            return 0, False
        known.asked = known.asked or self.storage.exists(keys)
        if not known.asked.completed.wait(0 if self.storage.silent else LOOK):
            return 0 if self.storage.silent else None, False
        there, known.asked, known.first = known.asked.value or [], None, first  # None: storage has failed
        count = [*there[first:], False].index(False)
        return count * self.size, count > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """Called when vLLM has allocated blocks for the offered tokens: load them in the next step."""
        if num_external_tokens:
            (table,), known = blocks.get_block_ids(), self.known[request.request_id]
            these = slice(known.first, known.first + num_external_tokens // self.size)
            self.loads.append((request.request_id, known.keys[these], table[these]))
            known.loaded = request.num_preemptions

    def build_connector_meta(self, scheduler_output):
        """Return the Work of this step: the loads, and a save for each block that the step fills."""
        work, self.loads, old = Work(self.loads), [], scheduler_output.scheduled_cached_reqs
        computed = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            (table,), known = scheduler_output.kv_connector_block_state.get_block_ids(name), self.known[name]
            first = computed[name] // self.size if known.saved is None else known.saved
            keys = self.keys(known)[: (computed[name] + count) // self.size]
            if first < len(keys):
                work.saves.append((keys, table[first : len(keys)]))
            known.saved = max(first, len(keys))
        return work

    def request_finished(self, request, block_ids):
        """Return False: vLLM may free the blocks now. `wait_for_save` has already copied their bytes."""
        self.known.pop(request.request_id, None)
        return False, None

    # 2. In the worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches):
        for cache in kv_caches.values():  # [blocks, ...]
            if not cache.is_contiguous() or cache.device.type != "cpu" or len(cache) != self.blocks:
                raise ValueError("StorageConnector needs a KV cache in host memory, contiguous and in blocks")
            self.layers.append(cache.view(torch.uint8).flatten(1).numpy())  # [blocks, bytes]

    def start_load_kv(self, forward_context, **kwargs):
        """Called before each step: start reading the blocks of its loads into memory of their own."""
        self.idle = forward_context.attn_metadata is None
        deadline = time.perf_counter() + self.patience * (not self.storage.reader.hangs)
        for name, keys, blocks in self._get_connector_metadata().loads:
            rows = numpy.empty((len(keys), len(self.layers), self.layers[0].shape[1]), numpy.uint8)
            transfers = [self.storage.get([key], [row], "load") for key, row in zip(keys, rows)]
            self.loading[name] = deadline, list(zip(blocks, rows, transfers))

    def get_transfer_results(self, finished_req_ids):
        """Called after each step: return the requests whose blocks have arrived or are late."""
        if self.loading and self.idle:
            self.wake.wait(LOOK)
            self.wake.clear()
        completed, self.failed = set(), set()
        for name, (deadline, parts) in list(self.loading.items()):
            if time.perf_counter() > deadline or all(transfer.ready for *_, transfer in parts):
                self.land(name)
                completed.add(name)
        return base.KVConnectorTransferResults(finished_recving=completed)

    def land(self, name: str):
        """Copy the data that has arrived into the request's blocks, and report the other blocks as failed.
        vLLM recomputes from the first failed block on."""
        for block, row, transfer in self.loading.pop(name)[1]:
            if transfer.ready and transfer.error is None:
                for layer, contents in zip(self.layers, row):
                    layer[block] = contents
            else:
                transfer.cancel()
                self.failed.add(block)

    def get_block_ids_with_load_errors(self):
        return self.failed

    def wait_for_save(self):
        """Called at the end of each step: copy the blocks to be saved, and queue their writes, one for each
        text. Then mark the whole text as used, so that its last block is deleted first."""
        for keys, blocks in self._get_connector_metadata().saves:
            if not self.storage.is_backlogged:
                values = [numpy.stack([layer[block] for layer in self.layers]) for block in blocks]
                self.storage.set(keys[-len(blocks) :], values)
                self.storage.use(keys)

    def shutdown(self):
        self.storage.close()

    def wait_for_layer_load(self, layer_name):
        """Do nothing: blocks arrive between steps, with all their layers."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Do nothing: `wait_for_save` saves all layers together."""
