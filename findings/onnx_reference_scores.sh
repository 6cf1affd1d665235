#!/usr/bin/env bash
# onnx 1.23.2 and onnxruntime 1.31.1 (CPU): asked for the raw scores of Attention, the standard's own
# reference returns them after the soft cap.
#
# Expected: qk_matmul_output_mode 0 of operator set 23 gives q k / sqrt(d) in both, as the standard's text
# says.
# Seen: with `softcap` (Gemma 2) the reference returns the same numbers for modes 0 and 1. onnxruntime follows
# the text. An eviction policy that sums raw scores is judged against wrong numbers. The outputs Y agree, and
# so do present K and V, GQA, past K and V with causal masks, padded static caches and fully masked rows.
#
#     mode 0: largest difference from the raw scores: reference 7.692, onnxruntime 0.000
#     mode 1: largest difference from the capped scores: reference 0.000, onnxruntime 0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$work/venv/bin/python" - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

draw = np.random.default_rng(0)
given = {name: 2 * draw.standard_normal((1, 2, 3, 8)).astype(np.float32) for name in "QKV"}
raw = given["Q"] @ given["K"].swapaxes(-1, -2) / np.sqrt(8)
expected = {0: ("raw", raw), 1: ("capped", 2 * np.tanh(raw / 2))}
for mode, (name, right) in expected.items():
    options = dict(softcap=2.0, qk_matmul_output_mode=mode)
    node = helper.make_node("Attention", [*"QKV"], ["Y", "", "", "S"], **options)
    inputs = [helper.make_tensor_value_info(one, TensorProto.FLOAT, raw.shape[:3] + (8,)) for one in "QKV"]
    outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, raw.shape[:3] + (8,)),
               helper.make_tensor_value_info("S", TensorProto.FLOAT, raw.shape)]
    model = helper.make_model(helper.make_graph([node], "attention", inputs, outputs), ir_version=11,
                              opset_imports=[helper.make_opsetid("", 23)])
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    runs = ReferenceEvaluator(model).run(None, given), session.run(None, given)
    np.testing.assert_allclose(runs[0][0], runs[1][0], atol=1e-5)
    reference, runtime = (float(np.abs(run[1] - right).max()) for run in runs)
    print(f"mode {mode}: largest difference from the {name} scores: reference {reference:.3f}, "
          f"onnxruntime {runtime:.3f}")
    assert runtime < 1e-5 and (reference > 1 if mode == 0 else reference < 1e-5), "the behaviour has changed"
PY
