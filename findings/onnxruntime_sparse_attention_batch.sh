#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU): in SparseAttention, rows of unequal lengths in a batch disturb each other.
#
# Expected: the operator takes the length of each row (`key_total_sequence_lengths`, without padding), and the largest one
# (`total_sequence_length`). So each row of a batch gets what it gets alone, in the prompt and in each later step.
# Seen: rows alone agree with the formula, and so do rows of equal lengths. With unequal lengths, each row that is shorter than
# the longest one is far off, in the prompt and in each step, even if it is one token shorter. Nothing is raised, and the cache
# of keys and values is right.
# Cause: the first half of the kernel writes the attention weights of each row and head at a place that is computed with the
# largest length (ComputeAttentionProbs). The second half looks for them at a place computed with the row's own length
# (ComputeVxAttentionScore). So a shorter row takes weights of another row or head. (sparse_attention_base.h in
# onnxruntime/contrib_ops/cpu/sparse.)
#
#     full mask, lengths (50, 50):
#         prompt: alone 0.000, 0.000 off; in the batch 0.000, 0.000 off
#         steps: alone 0.000, 0.000 off; in the batch 0.000, 0.000 off
#     full mask, lengths (50, 33):
#         prompt: alone 0.000, 0.000 off; in the batch 0.000, 3.490 off
#         steps: alone 0.000, 0.000 off; in the batch 0.000, 2.129 off
#     full mask, lengths (50, 49):
#         prompt: alone 0.000, 0.000 off; in the batch 0.000, 3.211 off
#         steps: alone 0.000, 0.000 off; in the batch 0.000, 1.650 off
#     full mask, lengths (20, 70):
#         prompt: alone 0.000, 0.000 off; in the batch 2.995, 0.000 off
#         steps: alone 0.000, 0.000 off; in the batch 2.395, 0.000 off
# (And so on with a sparse mask. The numbers are the largest differences to the formula for each row, with random numbers of
# about 1. Prompts are padded on the right.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile uv==0.13.9 2> "$work/log"
"$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$work"
cat > run.py <<'PY'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

HEADS, KV_HEADS, SIZE, BLOCK, ROOM = 4, 2, 16, 16, 128
BLOCKS = ROOM // BLOCK
onnxruntime.set_default_logger_severity(3)
names = ["query", "key", "value", "past_key", "past_value", "rows", "columns", "largest", "lengths"]
kinds = 5 * [TensorProto.FLOAT] + 4 * [TensorProto.INT32]
ranks = [3, 3, 3, 4, 4, 2, 2, 1, 1]
results = ["output", "present_key", "present_value"]
graph = helper.make_graph(
    [helper.make_node("SparseAttention", names, results, domain="com.microsoft", num_heads=HEADS, kv_num_heads=KV_HEADS,
                      sparse_block_size=BLOCK)],
    "graph", [helper.make_tensor_value_info(*value) for value in zip(names, kinds, ([None] * rank for rank in ranks))],
    [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results])
model = helper.make_model(graph, ir_version=10,
                          opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)])
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


class Cache:
    def __init__(self, mask, rows):
        self.keys, self.values = (np.zeros((rows, KV_HEADS, ROOM, SIZE), np.float32) for _ in range(2))
        places = [np.flatnonzero(row) for row in mask]
        self.rows = np.cumsum([0] + [len(place) for place in places], dtype=np.int32)[None]
        self.columns = np.concatenate(places).astype(np.int32)[None]

    def attend(self, query, key, value, lengths):
        flat = [part.reshape(*part.shape[:2], -1) for part in (query, key, value)]
        inputs = [onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(part)) for part in (
            *flat, self.keys, self.values, self.rows, self.columns, np.array([max(lengths)], np.int32), np.array(lengths, np.int32))]
        binding = session.io_binding()
        for name, part in zip(names, inputs):
            binding.bind_ortvalue_input(name, part)
        binding.bind_output("output")
        binding.bind_ortvalue_output("present_key", inputs[3])  # the operator wants one buffer for past and present
        binding.bind_ortvalue_output("present_value", inputs[4])
        session.run_with_iobinding(binding)
        self.keys, self.values = inputs[3].numpy().copy(), inputs[4].numpy().copy()
        return binding.get_outputs()[0].numpy().copy()


def formula(mask, query, key, value):
    length = len(query)
    seen = np.kron(mask, np.ones((BLOCK, BLOCK)))[:length, :length] * np.tri(length) > 0
    key, value = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (key, value))
    scores = np.where(seen, np.einsum("qhd,khd->hqk", query, key, dtype=np.float64) / SIZE ** 0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value).reshape(length, -1)


def run(mask, query, key, value, lengths):
    """The results of the prompts (padded on the right) and of four steps, row for row."""
    cache, longest = Cache(mask, len(lengths)), max(lengths)
    prompt = cache.attend(query[:, :longest], key[:, :longest], value[:, :longest], lengths)
    steps = [cache.attend(*(np.stack([row[length + step][None] for row, length in zip(part, lengths)])
                            for part in (query, key, value)), [length + step + 1 for length in lengths]) for step in range(4)]
    held = [max(np.abs(cache.keys[row, :, :length + 4] - key[row, :length + 4].swapaxes(0, 1)).max(),
                np.abs(cache.values[row, :, :length + 4] - value[row, :length + 4].swapaxes(0, 1)).max())
            for row, length in enumerate(lengths)]
    return ([prompt[row, :length] for row, length in enumerate(lengths)],
            [np.concatenate([step[row] for step in steps]) for row in range(len(lengths))], max(held))


random = np.random.default_rng(0)
full = np.tri(BLOCKS)
sparse = np.maximum(np.eye(BLOCKS), np.tri(BLOCKS) * (random.random((BLOCKS, BLOCKS)) < 0.4))
for name, mask in (("full mask", full), ("sparse mask", sparse)):
    for lengths in ((50, 50), (50, 33), (50, 49), (20, 70)):
        query, key, value = (random.normal(size=(2, ROOM, heads, SIZE)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
        right = [formula(mask, *(part[row, :length + 4] for part in (query, key, value))) for row, length in enumerate(lengths)]
        alone = [run(mask, *(part[row:row + 1] for part in (query, key, value)), [lengths[row]]) for row in range(2)]
        batch = run(mask, query, key, value, lengths)
        print(f"{name}, lengths {lengths}:")
        for what, place in (("prompt", 0), ("steps", 1)):
            wanted = [row[:length] if place == 0 else row[length:] for row, length in zip(right, lengths)]
            off = [[float(np.abs(part - good).max()) for part, good in zip(parts, wanted)]
                   for parts in ([single[place][0] for single in alone], batch[place])]
            print(f"    {what}: alone {off[0][0]:.3f}, {off[0][1]:.3f} off; in the batch {off[1][0]:.3f}, {off[1][1]:.3f} off")
            bad = [difference > 0.1 for difference in off[1]]
            if max(off[0]) > 1e-3 or bad != [length < max(lengths) for length in lengths] or batch[2] > 0:
                print("the behaviour has changed")
                sys.exit(1)
PY
venv/bin/python run.py
