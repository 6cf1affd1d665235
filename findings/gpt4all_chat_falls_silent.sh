#!/usr/bin/env bash
# gpt4all 2.8.2 (CPU): after its context was full once, a long chat can fall silent.
#
# Expected: when the context is full, a chat drops its older part and goes on. So each turn gets an answer.
# Seen: the first time this works. When the context fills up again and a prompt comes near the end of it, the prompt fails, and
# `generate` returns an empty text. No exception is raised, there is only a line on the error stream ("Failed to process
# prompt"). With `n_batch` 8 the chat does not recover: nothing is dropped any more, so all later prompts of 8 tokens or more
# fail too, until the session ends. With the defaults (`n_batch` 8, `n_ctx` 2048) the lengths decide when. With a larger
# `n_batch` it comes soon.
# Cause: before a batch of a prompt, the library asks if the tokens so far and the batch are more than `n_ctx`, and drops tokens
# only then (decodePrompt in llmodel_shared.cpp of gpt4all-backend). But llama.cpp needs as many free cells in a row. After the
# first drop the free cells lie in two places: some at the end of the cache, that the first filling left over, and those of the
# dropped tokens. Both places together are large enough, but if each alone is too small, the batch is refused. With `n_batch` 1,
# a single free cell always suffices, and no answer is empty. The binding gets no error code (prompt_model in
# gpt4all/_pyllmodel.py).
#
#     n_ctx  512, n_batch 8 (default): empty answers from turn 22 on, in 39 of the 39 turns, with 496 tokens in the context
#     n_ctx  512, n_batch 128: empty answers from turn 8 on, in 32 of the 53 turns, with 431 tokens in the context
#     n_ctx  512, n_batch 1: no empty answer in 60 turns
#     n_ctx 2048, n_batch 8 (default): empty answers from turn 19 on, in 82 of the 82 turns, with 2037 tokens in the context
#     n_ctx 2048, n_batch 8 (default): empty answers from turn 50 on, in 51 of the 51 turns, with 2031 tokens in the context
#     n_ctx 2048, n_batch 8 (default): empty answers from turn 33 on, in 68 of the 68 turns, with 2038 tokens in the context
#     n_ctx 2048, n_batch 8 (default): empty answers from turn 35 on, in 66 of the 66 turns, with 2031 tokens in the context
# (A Llama of three layers with random weights. Prompts of 50 to 100 words and answers of 33 tokens with the small context, 90
# to 180 and 60 with the large one. Each of the large chats has another seed. A new session of the same object answers again.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile uv==0.13.9 2> "$work/log"
"$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" gpt4all==2.8.2 gguf==0.19.0 numpy==2.4.6
cd "$work"
cat > model.py <<'PY'
import gguf
import numpy as np

WORDS, WIDTH, LAYERS, HEADS, INNER = 1024, 64, 3, 4, 96
random = np.random.default_rng(0)
pieces = [first + vowel + last for first in "bcdfghkl" for vowel in "aeiou" for last in "bcdfghkl"]
parts = sorted({piece[:length] for piece in pieces for length in (0, 1, 2, 3)}, key=lambda part: (len(part), part))
names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581" + part for part in parts]
names += [f"\u2581q{number}" for number in range(WORDS - len(names))]
writer = gguf.GGUFWriter("model.gguf", "llama")
writer.add_name("random")
writer.add_context_length(4096)
writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(WIDTH // HEADS)
writer.add_vocab_size(WORDS)
writer.add_file_type(0)
writer.add_tokenizer_model("llama")
writer.add_token_list(names)
writer.add_token_scores([0.0] * 259 + [3.0 * len(name) - 20 for name in names[259:]])
writer.add_token_types([2, 3, 3] + 256 * [6] + (WORDS - 259) * [1])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_unk_token_id(0)


def add(name, *shape):
    writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))


def ones(name):
    writer.add_tensor(name, np.ones(WIDTH, np.float32))


add("token_embd.weight", WORDS, WIDTH)
ones("output_norm.weight")
output = random.normal(0, 0.4, (WORDS, WIDTH)).astype(np.float32)
output[[name[1:] not in pieces for name in names]] = 0  # answers are made of the known words, and never end early
writer.add_tensor("output.weight", output)
for layer in range(LAYERS):
    block = f"blk.{layer}."
    ones(block + "attn_norm.weight")
    ones(block + "ffn_norm.weight")
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"{block}{part}.weight", WIDTH, WIDTH)
    add(block + "ffn_gate.weight", INNER, WIDTH)
    add(block + "ffn_up.weight", INNER, WIDTH)
    add(block + "ffn_down.weight", WIDTH, INNER)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
PY
cat > run.py <<'PY'
import sys

import numpy as np
from gpt4all import GPT4All

words = [first + vowel + last for first in "bcdfghkl" for vowel in "aeiou" for last in "bcdfghkl"]


def chat(size, batch, seed, turns, longest=100):
    random = np.random.default_rng(seed)
    llm = GPT4All("model.gguf", model_path=".", allow_download=False, device="cpu", n_threads=1, n_ctx=size)
    options = {"temp": 0, "max_tokens": longest // 3} | ({} if batch is None else {"n_batch": batch})
    with llm.chat_session("", "{0}"):
        answers, held = [], []
        for _ in range(turns):
            answers.append(llm.generate(" ".join(random.choice(words, random.integers(longest // 2, longest + 1))), **options))
            held.append(llm.model.context.n_past)
    with llm.chat_session("", "{0}"):
        again = llm.generate("bab cab dab", **options)
    empty = [turn for turn, answer in enumerate(answers) if not answer]
    name = f"n_ctx {size:4}, n_batch {batch or '8 (default)'}:"
    if empty:
        print(name, f"empty answers from turn {empty[0] + 1} on, in {len(empty)} of the {turns - empty[0]} turns,",
              f"with {held[empty[0]]} tokens in the context", flush=True)
    else:
        print(name, f"no empty answer in {turns} turns", flush=True)
    return len(empty), turns - empty[0] if empty else 0, bool(again)


small, large, single = chat(512, None, 0, 60), chat(512, 128, 0, 60), chat(512, 1, 0, 60)
full = [chat(2048, None, seed, 100, 180) for seed in range(4)]
if not (small[0] == small[1] > 0 and large[0] > 0 and single[0] == 0 and any(empty for empty, *_ in full) and small[2] and large[2]):
    print("the behaviour has changed")
    sys.exit(1)
PY
venv/bin/python model.py
venv/bin/python run.py 2> log
sort log | uniq -c | sort -n | tail -n 2
