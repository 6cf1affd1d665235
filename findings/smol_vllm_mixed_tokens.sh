#!/usr/bin/env bash
# smol-vllm 0.1.2 (transformers 4.51.3, on a CPU): a request that joins a running one gets the token of the other, and prompts
# of unequal lengths change each other's answers.
#
# Expected: with continuous batching each request gets the tokens that it gets alone. (Its engine takes the most likely token.)
# Seen: LLMEngine.step (engine.py) computes the first tokens of new requests, then the next tokens of running ones, and puts
# them into one list. It hands this list out in the order of the scheduler, where the running requests come first. So in the step
# in which a request joins, the two get each other's token, and go on from it. And CausalLM.prefill (causal_model.py) pads the
# prompts on the left; the steps afterwards give no mask, so each token of a shorter prompt's answer attends to the padding.
#
#     one prompt:                               right
#     two prompts of 9 tokens at once:          right right
#     prompts of 5, 9, 17 and 30 at once:       wrong wrong wrong right
#     the second one joins three steps later:   wrong wrong
#     first request:   gets 112 86 114 40 107, alone 112 86 114 103 112
#     second request:  gets 103 16 40 57 19, alone 40 18 34 123 118
# (A small Llama with random weights, up to ten tokens. Right means: the greedy tokens of transformers for this prompt alone.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile transformers==4.51.3 accelerate==1.15.0 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps smol-vllm==0.1.2 2> "$work/log"
cd "$work"
export HF_HUB_OFFLINE=1
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import contextlib, io
import torch
from smol_vllm import LLMEngine
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.3)
model.save_pretrained("model")
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained("model")


def alone(prompt):
    tokens = torch.tensor([prompt])
    tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=10, do_sample=False, eos_token_id=None)
    return tokens[0, len(prompt):].tolist()


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def serve(prompts, wait):
    with quiet():
        engine = LLMEngine(use_real_model=True, model_name="model", enable_metrics=False)
        for prompt in prompts:
            engine.add_request(prompt, max_tokens=10, temperature=0.0, stop_token_ids=[])
            for _ in range(wait):
                engine.step()
        for _ in range(20):
            engine.step()
    return [group.sequences[0].output_tokens for group in engine.groups.values()]


equal = [torch.randint(3, 128, (9,)).tolist() for _ in range(2)]
unequal = [torch.randint(3, 128, (length,)).tolist() for length in (5, 9, 17, 30)]
counts = []
for name, prompts, wait in (("one prompt", equal[:1], 0), ("two prompts of 9 tokens at once", equal, 0),
                            ("prompts of 5, 9, 17 and 30 at once", unequal, 0), ("the second one joins three steps later", equal, 3)):
    found = serve(prompts, wait)
    counts.append([tokens == alone(prompt) for tokens, prompt in zip(found, prompts)])
    print(f"{name + ':':41}", *("right" if same else "wrong" for same in counts[-1]))
for title, tokens, prompt in zip(("first request", "second request"), found, equal):
    print(f"{title + ':':16} gets {' '.join(map(str, tokens[:5]))}, alone {' '.join(map(str, alone(prompt)[:5]))}")
assert counts == [[True], [True] * 2, [False] * 3 + [True], [False] * 2], "the behaviour has changed"
assert found[0][3] == alone(equal[1])[0], "the behaviour has changed"
PY
