#!/usr/bin/env bash
# mini-infer 0.2.5 (on a CPU): with its prefix cache (the default), a prompt whose beginning is known gets another answer,
# and spoils the answer of the request that it shares the beginning with.
#
# Expected: the prefix cache keeps K and V of common beginnings, so that they are not computed again, and changes no answer.
# Seen: InferenceEngine.step (engine.py) takes the known blocks into the table of the new request, and counts their tokens as
# read. But the pass over the rest gets no keys and values of them (past_key_values is None), and starts at position 0. Then it
# writes the K and V of the rest from the start of the table on (write_sequence_kv with start_token_idx=0), that is into the
# shared blocks. So the new request never sees its beginning, and a request that still uses these blocks goes on with wrong
# ones. The same prompt once more differs from its first answer, too. And Sequence makes its table for blocks of 16 tokens,
# whatever block_size the engine has.
#
#     A, B, A again, one after the other:       right wrong wrong
#     A, then B while A is running:             wrong wrong
#     A, B, A again, without the prefix cache:  right right right
#     A, then B, without the prefix cache:      right right
#     a prompt of 60 tokens, blocks of 16:      right
#     a prompt of 60 tokens, blocks of 32:      wrong
# (A small Qwen2 with random weights; A and B share 48 tokens, three blocks. An answer is right if it has the 12 greedy
# tokens of transformers.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps mini-infer==0.2.5 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
import transformers
from mini_infer.engine import InferenceEngine
from mini_infer.models.config import Qwen2Config
from mini_infer.models.qwen2 import Qwen2ForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False)
reference = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
    **sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, eos_token_id=None, bos_token_id=None, pad_token_id=0)).eval()
for weight in reference.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.3)
config = Qwen2Config.from_dict({**sizes, "rope_theta": 1e4})
model = Qwen2ForCausalLM(config).eval()
model.load_state_dict(reference.state_dict())


def right(sequence):
    tokens = torch.tensor([sequence.prompt_token_ids])
    tokens = reference.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
    return "right" if tokens[0, len(sequence.prompt_token_ids):].tolist() == sequence.output_token_ids else "wrong"


def engine(**options):
    return InferenceEngine(model, config, num_blocks=128, device=torch.device("cpu"), **options)


def serve(engine, prompts, wait=None):
    """One request after the other, or each a few steps behind the one before."""
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, max_tokens=12))
        for _ in range(wait or 100):
            if engine.scheduler.has_unfinished_sequences():
                engine.step()
    while engine.scheduler.has_unfinished_sequences():
        engine.step()
    return [right(request) for request in requests]


def tokens(count):
    return torch.randint(3, 128, (count,)).tolist()


common = tokens(48)
a, b, c = common + tokens(9), common + tokens(20), tokens(60)
found = []
for name, prompts, wait, options in (
        ("A, B, A again, one after the other", [a, b, a], None, {}),
        ("A, then B while A is running", [a, b], 4, {}),
        ("A, B, A again, without the prefix cache", [a, b, a], None, {"enable_prefix_caching": False}),
        ("A, then B, without the prefix cache", [a, b], 4, {"enable_prefix_caching": False}),
        ("a prompt of 60 tokens, blocks of 16", [c], None, {}),
        ("a prompt of 60 tokens, blocks of 32", [c], None, {"block_size": 32})):
    found.append(serve(engine(**options), prompts, wait))
    print(f"{name + ':':41}", *found[-1])
good, bad = "right", "wrong"
assert found == [[good, bad, bad], [bad, bad], [good] * 3, [good] * 2, [good], [bad]], "the behaviour has changed"
PY
