#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU): with persistent_manager=True, generate_batch answers with keys and values of the
# weights before a training step, and ignores the settings of later calls.
#
# Expected: generate_batch with greedy search gives the answers of generate, also after some steps of training, and it ends an
# answer at the eos_token_id of the generation_config that it is given. Keeping the manager from call to call
# (persistent_manager=True) should change only the speed. Without it all of that holds.
# Seen: a kept manager also keeps the blocks of earlier prompts, to share common beginnings. They are found by their tokens
# alone. After a training step a known prompt gets its old keys and values, and only its end and the answer are computed with
# the new weights. ContinuousBatchProcessor.reset, which runs between two calls, frees the requests and leaves the blocks
# (free_all_requests without clear_ledgers, generation/continuous_batching/continuous_api.py). And init_continuous_batching
# returns a kept manager before it looks at the generation_config and the continuous_batching_config, so a later call keeps the
# settings of the first one. A call without persistent_manager gets the kept manager too. The only warning is about its size.
# With allow_block_sharing=False the first fault is gone.
#
#     kept manager: 6 of 6 answers right; the same call again: 6 of 6
#     kept manager, after 3 steps of training: 0 of 6
#     a call without persistent_manager:       0 of 6
#     a new manager:                           6 of 6
#     kept, without shared blocks: before 6 of 6, after 3 steps 6 of 6
#     with another eos_token_id: answers of 24 24 24 24 24 24 tokens, a new manager gives 3 3 3 3 3 1
# (A small Llama with random weights, six prompts of 33 to 64 tokens, blocks of 16. An answer is right if it has the tokens of
# generate with the weights of that moment. For the last line, the third token of each answer is an end token.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==5.24.0 psutil==7.0.0 2> "$work/log"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=98, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                                     num_key_value_heads=2, intermediate_size=96, pad_token_id=0, eos_token_id=None,
                                     bos_token_id=None)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.3)
model.generation_config.eos_token_id = None
prompts = [torch.randint(3, 98, (length,)).tolist() for length in (33, 40, 45, 50, 57, 64)]


def alone():
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False)
        answers.append(tokens[0, len(prompt):].tolist())
    return answers


def together(keep, share=True, end=-1):
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=end, pad_token_id=0)
    blocks = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=256, allow_block_sharing=share)
    outputs = model.generate_batch(prompts, settings, blocks, persistent_manager=keep)
    return [list(output.generated_tokens) for output in outputs.values()]


def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.tensor([prompts[0]])
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()


def right(answers):
    return sum(found == expected for found, expected in zip(answers, alone()))


first, again = right(together(True)), right(together(True))
print(f"kept manager: {first} of 6 answers right; the same call again: {again} of 6")
before = alone()
train()
assert all(old != new for old, new in zip(before, alone())), "the behaviour has changed"
kept = right(together(True))
print(f"kept manager, after 3 steps of training: {kept} of 6")
other = right(together(False))
print(f"a call without persistent_manager:       {other} of 6")
model.destroy_cached_continuous_batching_manager()
new = right(together(False))
print(f"a new manager:                           {new} of 6")
unshared = [right(together(True, share=False))]
train()
unshared.append(right(together(True, share=False)))
model.destroy_cached_continuous_batching_manager()
print(f"kept, without shared blocks: before {unshared[0]} of 6, after 3 steps {unshared[1]} of 6")

together(True)
ends = sorted({answer[2] for answer in alone()})
ignored = [len(answer) for answer in together(True, end=ends)]
model.destroy_cached_continuous_batching_manager()
obeyed = [len(answer) for answer in together(False, end=ends)]
print("with another eos_token_id: answers of", *ignored, "tokens, a new manager gives", *obeyed)
assert first == again == new == 6 and unshared == [6, 6] and max(obeyed) <= 3, "the behaviour has changed"
assert max(kept, other) < 3 and min(ignored) == 24, "the behaviour has changed"
PY
