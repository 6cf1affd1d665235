#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): a model that is compiled for float32 keeps K and V in 8 bits, and reports them as
# float32.
#
# Expected: with INFERENCE_PRECISION_HINT f32 the cache holds the numbers that were written, or its state says
# what it holds.
# Seen: the CPU rounds the state of attention to 8 bits unless KV_CACHE_PRECISION or EXECUTION_MODE_HINT
# ACCURACY forbids it. `query_state` shows a float32 tensor with the rounded numbers, so a snapshot of it has
# four times the bytes and not the K and V that the model computed. Also, a query row whose mask forbids every
# key gives NaN (PyTorch 2.13: zeros), alone among the rows.
#
#     INFERENCE_PRECISION_HINT f32: state float32, largest error of K 0.042, cache precision uint8
#     and KV_CACHE_PRECISION f32:   state float32, largest error of K 0.000, cache precision float32
#     fully masked row: [nan, nan], next row finite: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile --no-deps openvino==2026.4.1
"$work/venv/bin/python" - <<'PY'
import numpy as np
import openvino as ov
from openvino import opset6, opset13 as ops

draw = np.random.default_rng(0)
K, V = draw.standard_normal((2, 1, 2, 200, 64)).astype(np.float32)
K *= 3
shape = [1, 2, -1, 64]


def attention_with_cache(config):
    """Compile softmax(q K) V whose K and V grow by concatenation, the form of an exported language model."""
    q, k, v = (ops.parameter(shape, np.float32, name=name) for name in "qkv")
    beams = ops.parameter([-1], np.int32, name="beams")
    grown = []
    for name, new in ("K", k), ("V", v):
        empty = ops.constant(np.zeros((1, 2, 0, 64), np.float32))
        past = opset6.read_value(empty, name, ov.Type.f32, ov.PartialShape(shape))
        grown.append(ops.concat([ops.gather(past, beams, ops.constant(np.int32(0))), new], 2))
    out = ops.scaled_dot_product_attention(q, *grown, causal=False)
    keeps = [opset6.assign(value, name) for name, value in zip("KV", grown)]
    return ov.Core().compile_model(ov.Model([ops.result(out)], keeps, [q, k, v, beams]), "CPU", config)


for config, exact in (("f32", None), False), (("f32", "f32"), True):
    names = dict(zip(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), config))
    compiled = attention_with_cache({name: value for name, value in names.items() if value})
    request = compiled.create_infer_request()
    request.infer(dict(q=K, k=K, v=V, beams=np.zeros(1, np.int32)))
    state = next(one.state for one in request.query_state() if one.name == "K")
    error = float(np.abs(state.data - K).max())
    kept = compiled.get_property("KV_CACHE_PRECISION").to_dtype()
    print(f"{names}: state {state.data.dtype}, largest error of K {error:.3f}, cache precision {kept}")
    assert state.data.dtype == np.float32, "the behaviour has changed"
    assert error == 0 if exact else error > 0.01, "the behaviour has changed"

mask = np.ones((3, 200), bool)
mask[1] = False
inputs = [ops.parameter(shape, np.float32) for _ in range(3)]
masked = ops.scaled_dot_product_attention(*inputs, ops.constant(mask), None, causal=False)
model = ov.Core().compile_model(ov.Model([masked], inputs), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
rows = model([K[:, :, :3], K, V])[0][0, 0]
print("fully masked row:", rows[1, :2].tolist(), "next row finite:", bool(np.isfinite(rows[2]).all()))
assert np.isnan(rows[1]).all() and np.isfinite(rows[[0, 2]]).all(), "the behaviour has changed"
PY
