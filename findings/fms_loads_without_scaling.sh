#!/usr/bin/env bash
# ibm-fms 1.13.1 (torch 2.13.0 on a CPU): a checkpoint loaded with transformers 5 loses its RoPE scaling, a Mistral
# checkpoint its sliding window, and a Qwen3 checkpoint its base of RoPE.
#
# Expected: `get_model("hf_pretrained", model_path=...)` gives the logits of transformers, or raises an error for an
# option that it does not support.
# Seen: all of these load without an error or a warning. With transformers 5.24, which a plain installation brings,
# "llama3" scaling (Llama 3.1 and later) is dropped, so all positions after the first are wrong; with transformers
# 4.57 the same package scales. `linear` and `yarn` are dropped as well; with 4.57 they raise an error. `qwen3` always
# has the base 1,000,000 (Qwen3-4B-Instruct-2507 has 5,000,000). Mistral keeps `sliding_window` in its configuration,
# but no layer reads it.
#
#     llama                    transformers 5.24: 0 of 200 rows off   transformers 4.57: 0
#     llama, llama3 scaling    transformers 5.24: 199 of 200 rows off   transformers 4.57: 0
#     llama, linear scaling    transformers 5.24: 199 of 200 rows off   transformers 4.57: KeyError
#     llama, yarn scaling      transformers 5.24: 199 of 200 rows off   transformers 4.57: KeyError
#     qwen3, base 1e6          transformers 5.24: 0 of 200 rows off   transformers 4.57: 0
#     qwen3, base 5e6          transformers 5.24: 199 of 200 rows off   transformers 4.57: 199
#     mistral, no window       transformers 5.24: 0 of 200 rows off   transformers 4.57: 0
#     mistral, window of 16    transformers 5.24: 184 of 200 rows off   transformers 4.57: 184
# (Small models with random weights, saved by transformers. A row is off if a logit differs from transformers' by more
# than 1 % of the logits' standard deviation.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/compare.py" <<'PY'
import json
import sys
import tempfile

import torch
import transformers
from fms.models import get_model
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
tokens = torch.randint(3, 300, (1, 200), generator=torch.Generator().manual_seed(1))


def rope(base, **scaling):
    if transformers.__version__ >= "5":
        return dict(rope_parameters=dict(rope_theta=base, **(scaling or dict(rope_type="default"))))
    return dict(rope_theta=base, **(dict(rope_scaling=scaling) if scaling else {}))


def count_off(family, **options):
    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | options)).float().eval()
    for weight in (weight for weight in peer.parameters() if weight.dim() > 1):
        weight.normal_(0, 0.15)
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        try:
            model = get_model("hf_pretrained", model_path=folder, data_type=torch.float32).eval()
        except KeyError:
            return "KeyError"
    right = peer(tokens).logits[0]
    return int(((model(tokens)[0] - right).abs().amax(1) > 0.01 * right.std()).sum())


json.dump({
    "llama": count_off("llama", **rope(5e5)),
    "llama, llama3 scaling": count_off("llama", **rope(5e5, **llama3)),
    "llama, linear scaling": count_off("llama", **rope(1e4, rope_type="linear", factor=4.0)),
    "llama, yarn scaling": count_off("llama", **rope(1e4, rope_type="yarn", factor=4.0)),
    "qwen3, base 1e6": count_off("qwen3", **rope(1e6)),
    "qwen3, base 5e6": count_off("qwen3", **rope(5e6)),
    "mistral, no window": count_off("mistral", **rope(1e4), sliding_window=None),
    "mistral, window of 16": count_off("mistral", **rope(1e4), sliding_window=16)}, open(sys.argv[1], "w"))
PY
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
for version in 5.24.0 4.57.6; do
    "$work/venv/bin/pip" install -q --no-compile ibm-fms==1.13.1 transformers==$version 2> "$work/log"
    "$work/venv/bin/python" "$work/compare.py" "$work/$version" > "$work/log" 2>&1 || { tail -n 5 "$work/log"; exit 1; }
done
"$work/venv/bin/python" - "$work" <<'PY'
import json
import sys

new, old = (json.load(open(f"{sys.argv[1]}/{version}")) for version in ("5.24.0", "4.57.6"))
for name in new:
    print(f"{name:24} transformers 5.24: {new[name]} of 200 rows off   transformers 4.57: {old[name]}")
assert list(new.values()) == [0, 199, 199, 199, 0, 199, 0, 184], "the behaviour has changed"
assert list(old.values()) == [0, 0, "KeyError", "KeyError", 0, 199, 0, 184], "the behaviour has changed"
PY
