#!/usr/bin/env bash
# torch 2.13.0 and ptflops 0.7.5 (beside transformers 5.24.0 on a CPU): a count of FLOPs leaves out the experts.
#
# Expected: FlopCounterMode counts the same FLOPs for a model whichever way its experts are computed. Three
# ways that transformers offers give equal logits and do equal multiplications.
# Seen: transformers computes experts with `torch.nn.functional.grouped_mm` unless it is told otherwise.
# FlopCounterMode knows no formula for that operation and counts zero for it, without a warning, forwards and
# backwards. Of a small Mixtral it counts a quarter, of a gpt-oss a third, of a Qwen3-MoE three quarters. ptflops
# gives the same small numbers with both of its backends. (Attention is "eager" here: that fused attention
# counts zero on a CPU has been reported.)
# Cause: flop_registry in torch/utils/flop_counter.py lacks aten._grouped_mm and aten._scaled_grouped_mm.
#
#     mixtral:   eager 747, batched_mm 747, grouped_mm 206, with backward 2241 and 618; ptflops 206 and 206
#     gpt_oss:   eager 848, batched_mm 848, grouped_mm 307, with backward 2543 and 920; ptflops 307 and 307
#     qwen3_moe: eager 407, batched_mm 407, grouped_mm 307, with backward 1222 and 920; ptflops 307 and 307
#     largest difference between the logits of the three ways: 0.000001
# (Millions, for 64 tokens. Mixtral by hand: 747.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 ptflops==0.7.5
"$work/venv/bin/python" - 2> "$work/log" <<'PY' || { tail -n 5 "$work/log"; exit 1; }
import contextlib
import io
import ptflops
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

sizes = dict(vocab_size=3200, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_experts_per_tok=2,
             num_attention_heads=8, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
families = dict(
    mixtral=dict(num_local_experts=4), gpt_oss=dict(num_local_experts=4, head_dim=64),
    qwen3_moe=dict(num_experts=4, head_dim=64, moe_intermediate_size=128, tie_word_embeddings=False))
tokens = torch.randint(3, 3200, (1, 64), generator=torch.Generator().manual_seed(0))


def count(name, **way):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | families[name]),
                                             attn_implementation="eager", dtype=torch.float32, **way).eval()
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, use_cache=False).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    return forward, counter.get_total_flops(), logits.detach(), model


def by_ptflops(model, backend):
    with contextlib.redirect_stdout(io.StringIO()):
        multiplications, _ = ptflops.get_model_complexity_info(
            model, (64,), input_constructor=lambda _: dict(input_ids=tokens, use_cache=False), as_strings=False,
            print_per_layer_stat=False, backend=backend)
    return 2 * multiplications


drift = 0
for name in families:
    eager, batched, default = (count(name, **way) for way in (
        dict(experts_implementation="eager"), dict(experts_implementation="batched_mm"), {}))
    drift = max(drift, *(float((other[2] - eager[2]).abs().max()) for other in (batched, default)))
    pt = [by_ptflops(default[3], backend) for backend in ("aten", "pytorch")]
    million = [round(number / 1e6) for number in (
        eager[0], batched[0], default[0], eager[1], default[1], *pt)]
    print("{:10} eager {}, batched_mm {}, grouped_mm {}, with backward {} and {}; ptflops {} and {}".format(
        name + ":", *million))
    assert default[3].config._experts_implementation == "grouped_mm", "the behaviour has changed"
    assert eager[0] == batched[0] and default[0] < 0.8 * eager[0], "the behaviour has changed"
    assert default[1] == 3 * default[0] and max(pt) < 0.8 * eager[0], "the behaviour has changed"
    if name == "mixtral":
        attention = 2 * 256 * 256 + 2 * 256 * 64
        token = 4 * (attention + 4 * 256 + 2 * 3 * 256 * 688 + 2 * 64 * 256) + 3200 * 256
        hand = 2 * 64 * token
        assert hand == eager[0]
print(f"largest difference between the logits of the three ways: {drift:.6f}")
assert drift < 1e-4
PY
