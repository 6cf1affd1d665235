#!/usr/bin/env bash
# quantcpp 0.13.0 (quant.cpp, on a CPU, temperature 0): a prompt that is sent again to `chat` gets another answer, a saved context
# holds nothing after `ask` and is not used after `load_context`, and the options for the precision of the cache do nothing.
#
# Expected: `chat` keeps the KV cache from call to call to save time, and gives the answer that it gives after `reset_chat`.
# `save_context` and `load_context` keep a long document, so that questions about it need no second reading. kv_compress=0
# switches the compression off, and progressive=True (the default) keeps the last 128 keys in FP32.
# Seen (all in _quant.h):
# - If the whole prompt is known, tq_generate_continue computes nothing, and takes the first token from what the last call left:
#   the logits behind the end of its answer.
# - `ask` and `generate` work with a state of their own (tq_generate). quant_save_context writes the other one, which is empty.
#   After `chat` it writes a part: of each token's 4-bit keys one block, where there is one per head, from wrong places in all
#   layers but the first; FP32 keys that are not in use; and no 4-bit values.
# - quant_load_context reads keys and values, but not the tokens that belong to them. The next `chat` finds no common beginning,
#   reads its prompt from position 0 on, and writes over the loaded cache.
# - quant_new makes a state with the window of 128 keys. `ask`, `generate` and `reset_chat` replace it by one without.
# - tq_default_gen_config sets 4-bit keys, and quant_new does not change that for kv_compress=0. Only the values differ.
#
#     chat, three times, and after reset_chat:  same other other same
#     saved after ask:  41760 bytes of keys and values, 0 of them not zero
#     saved after chat: 238380 bytes of keys and values, 9859 of them not zero
#     loaded: the next answer is that of a new model; of the saved prompt, 0 tokens are known and 113 are read again
#     ask with no window, with one of 128 keys, and with one of 512: one answer
#     chat with the default window, and once more after reset_chat:  two answers
#     type of the keys with kv_compress=0: 5, with kv_compress=1: 5
# (A small Llama with random weights, an alphabet of bytes as its tokens, answers of up to 24 tokens. "Type" is the number of the
# key's type in the file's header; 5 is TQ_TYPE_UNIFORM_4B. The models are not freed, the process just ends.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6 gguf==0.19.0 quantcpp==0.13.0 2> "$work/log"
cd "$work"
TQ_CHAT_DEBUG=1 "$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import os, re, struct, sys
import gguf
import numpy as np
from quantcpp import Model

width, layers, inner, vocabulary = 128, 3, 256, 300
random = np.random.default_rng(0)


def normal(*shape, scale=0.12):
    return random.normal(0, scale, shape).astype(np.float32)


file = gguf.GGUFWriter("model.gguf", "llama")
file.add_context_length(1024)
file.add_embedding_length(width)
file.add_block_count(layers)
file.add_feed_forward_length(inner)
file.add_head_count(2)
file.add_head_count_kv(2)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(64)
file.add_rope_freq_base(10000.0)
file.add_vocab_size(vocabulary)
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
file.add_tokenizer_model("gpt2")
file.add_tokenizer_pre("llama-bpe")
file.add_token_list([chr(byte) for byte in plain] + [chr(256 + i) for i in range(68)] + [f"<|{i}|>" for i in range(vocabulary - 256)])
file.add_token_types([1] * 256 + [3] * (vocabulary - 256))
file.add_token_merges(["t h"])
file.add_eos_token_id(299)
file.add_tensor("token_embd.weight", normal(vocabulary, width, scale=1))
for layer in range(layers):
    for name, shape in (("attn_q", (width, width)), ("attn_k", (width, width)), ("attn_v", (width, width)),
                        ("attn_output", (width, width)), ("ffn_gate", (inner, width)), ("ffn_up", (inner, width)),
                        ("ffn_down", (width, inner))):
        file.add_tensor(f"blk.{layer}.{name}.weight", normal(*shape))
    for name in ("attn_norm", "ffn_norm"):
        file.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
file.add_tensor("output_norm.weight", np.ones(width, np.float32))
file.add_tensor("output.weight", normal(vocabulary, width))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

alive = []


def new(**options):
    alive.append(Model("model.gguf", temperature=0.0, max_tokens=24, n_threads=1, **options))
    return alive[-1]


def chat(model, prompt):
    return "".join(model.chat(prompt))


def last_prefix():
    with open("/proc/self/fd/2") as file:
        return re.findall(r"prefix_hit=(\d+) prefill=(\d+)", file.read())[-1]


def size_and_rest(path):
    data = open(path, "rb").read()
    return struct.unpack("<7I", data[4:32])[5], len(data) - 64, np.count_nonzero(np.frombuffer(data[64:], np.uint8))


first, second = "the quick brown fox jumps over the lazy dog, and then it sleeps", "a second question about ships"
model = new(progressive=False)
answers = [chat(model, first) for _ in range(3)]
model.reset_chat()
answers.append(chat(model, first))
same = [answer == answers[0] for answer in answers]
print("chat, three times, and after reset_chat: ", *("same" if equal else "other" for equal in same))

model = new(progressive=False)
model.ask(first)
model.save_context("asked.kv")
_, size, rest = size_and_rest("asked.kv")
print(f"saved after ask:  {size} bytes of keys and values, {rest} of them not zero")
empty = rest
model = new(progressive=False)
chat(model, first)
model.save_context("chatted.kv")
_, size, rest = size_and_rest("chatted.kv")
print(f"saved after chat: {size} bytes of keys and values, {rest} of them not zero")
loaded = new(progressive=False)
loaded.load_context("chatted.kv")
equal = chat(loaded, second) == chat(new(progressive=False), second)
again = new(progressive=False)
again.load_context("chatted.kv")
chat(again, first)
known, read = last_prefix()
print(f"loaded: the next answer is {'that of a new model' if equal else 'another one'}; "
      f"of the saved prompt, {known} tokens are known and {read} are read again")

long = first * 3
windows = [new(progressive=on).ask(long) for on in (False, True)] + [new(aggressive=True).ask(long)]
model = new()
before = chat(model, long)
model.reset_chat()
after = chat(model, long)
print("ask with no window, with one of 128 keys, and with one of 512:",
      "one answer" if len(set(windows)) == 1 else "several answers")
print("chat with the default window, and once more after reset_chat: ", "one answer" if before == after else "two answers")
types = []
for compress in (0, 1):
    model = new(kv_compress=compress)
    chat(model, first)
    model.save_context("type.kv")
    types.append(size_and_rest("type.kv")[0])
print(f"type of the keys with kv_compress=0: {types[0]}, with kv_compress=1: {types[1]}")
changed = (same, empty, rest > 0, equal, known, len(set(windows)), before == after, types)
if changed != ([True, False, False, True], 0, True, True, "0", 1, False, [5, 5]):
    print("the behaviour has changed")
    sys.stdout.flush()
    os._exit(1)
sys.stdout.flush()
os._exit(0)
PY
