#!/usr/bin/env bash
# transformers.js (@huggingface/transformers) 4.3.1 on node, onnxruntime-node 1.30.0: an answer in a batch goes on
# behind its end token, unless all answers write their end tokens at the same step.
#
# Expected: each answer in a batch is the one that its prompt gets alone, and padding follows its end token.
# Seen: `generate` asks at each step whether the newest tokens of all rows are end tokens, and keeps no note of rows that
# have ended. So a row that has ended gets further tokens, and the batch runs up to `max_new_tokens`, since ends seldom fall
# together. The pipeline removes the end token from the text, so nothing shows where the answer ended. Nothing warns.
# (src/models/modeling_utils.js: `generate`; src/generation/stopping_criteria.js: EosTokenCriteria.)
#
#     seed 0, words of the answers: alone  6, 24, 24; in a batch 24, 24, 24; the first one twice  6,  6
#         first answer, behind its end: w29 w17 w15 w48 w48 w17 ...
# (A decoder of two layers with random weights, three seeds. Without an end token, batches are exact.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile onnx==1.23.2 numpy==2.4.6 2> "$work/log"
cd "$work"
echo '{"type": "module"}' > package.json
export ONNXRUNTIME_NODE_INSTALL=skip
npm install --silent --no-audit --no-fund @huggingface/transformers@4.3.1 onnxruntime-node@1.30.0 > log 2>&1 || {
    tail -n 5 log; exit 1; }
"$work/venv/bin/python" - <<'PY'
import json
import os

import numpy as np
import onnx
from onnx import TensorProto as Kind
from onnx import helper, numpy_helper

vocabulary, width, heads, layers, places = 64, 32, 2, 2, 256


def build(folder, seed):
    """A decoder with two layers, learned positions and random weights, with the inputs that exported models have."""
    random, nodes, weights, count = np.random.default_rng(seed), [], [], iter(range(10 ** 6))

    def const(value, kind):
        weights.append(numpy_helper.from_array(np.asarray(value, dtype=kind), f"c{next(count)}"))
        return weights[-1].name

    def numbers(*value):
        return const(value, np.int64)

    def matrix(*shape, scale=0.3):
        return const(random.normal(0, scale, shape), np.float32)

    def op(name, *inputs, output=None, **attributes):
        nodes.append(helper.make_node(name, inputs, [output or f"t{next(count)}"], **attributes))
        return nodes[-1].output[0]

    def length(of):
        return op("Slice", op("Shape", of), numbers(1), numbers(2))

    def up_to(end):
        return op("Range", const(0, np.int64), op("Squeeze", end), const(1, np.int64))

    x = op("Add", op("Gather", matrix(vocabulary, width, scale=1), "input_ids"),
           op("Gather", matrix(places, width, scale=0.5), "position_ids"))
    new, whole = length("input_ids"), length("attention_mask")
    query = op("Unsqueeze", op("Add", up_to(new), op("Sub", whole, new)), numbers(1))
    causal = op("Unsqueeze", op("LessOrEqual", op("Unsqueeze", up_to(whole), numbers(0)), query), numbers(0, 1))
    mask = op("Cast", op("Unsqueeze", "attention_mask", numbers(1, 2)), to=Kind.BOOL)
    bias = op("Where", op("And", causal, mask), const(0, np.float32), const(-1e9, np.float32))
    for layer in range(layers):
        query, key, value = (op("Transpose", op("Reshape", op("MatMul", x, matrix(width, width)),
                                                numbers(0, 0, heads, width // heads)), perm=[0, 2, 1, 3])
                             for _ in range(3))
        key, value = (op("Concat", f"past_key_values.{layer}.{name}", part, output=f"present.{layer}.{name}", axis=2)
                      for name, part in (("key", key), ("value", value)))
        scores = op("Mul", op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2])),
                    const((width / heads) ** -0.5, np.float32))
        seen = op("MatMul", op("Softmax", op("Add", scores, bias), axis=-1), value)
        seen = op("Reshape", op("Transpose", seen, perm=[0, 2, 1, 3]), numbers(0, 0, width))
        x = op("Add", x, op("MatMul", seen, matrix(width, width)))
        x = op("Add", x, op("MatMul", op("Tanh", op("MatMul", x, matrix(width, width))), matrix(width, width)))
    op("Add", op("MatMul", x, matrix(width, vocabulary)), const([-1e4] * 5 + [0] * (vocabulary - 5), np.float32),
       output="logits")

    def cache(name, length):
        return [helper.make_tensor_value_info(f"{name}.{layer}.{part}", Kind.FLOAT,
                                              ["batch_size", heads, length, width // heads])
                for layer in range(layers) for part in ("key", "value")]

    inputs = [helper.make_tensor_value_info(name, Kind.INT64, ["batch_size", length]) for name, length in
              (("input_ids", "new"), ("attention_mask", "whole"), ("position_ids", "new"))]
    logits = helper.make_tensor_value_info("logits", Kind.FLOAT, ["batch_size", "new", vocabulary])
    graph = helper.make_graph(nodes, "decoder", inputs + cache("past_key_values", "past"),
                              [logits] + cache("present", "whole"), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    os.makedirs(f"{folder}/onnx")
    onnx.save(model, f"{folder}/onnx/model.onnx")
    words = ["<pad>", "<end>", "<user>", "<model>", "<think>"] + [f"w{n}" for n in range(5, vocabulary)]
    special = [{"id": n, "content": words[n], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for n in (0, 1)]
    files = {
        "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary,
                   "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads,
                   "num_hidden_layers": layers, "max_position_embeddings": places},
        "generation_config": {},
        "tokenizer": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
                      "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
                      "decoder": None, "model": {"type": "WordLevel", "unk_token": "<pad>",
                                                 "vocab": {word: n for n, word in enumerate(words)}}},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>",
                             "eos_token": "<end>", "clean_up_tokenization_spaces": False}}
    for name, content in files.items():
        with open(f"{folder}/{name}.json", "w") as file:
            json.dump(content, file)


for seed in range(3):
    build(f"models/seed{seed}", seed)
PY
cat > check.js <<'JS'
import { env, pipeline } from '@huggingface/transformers';

env.allowRemoteModels = false;
env.localModelPath = './models/';
let state = 7;
const random = (end) => (state = (state * 48271) % 2147483647) % end;
const prompt = (length) => Array.from({ length }, () => `w${5 + random(59)}`).join(' ');
const words = (text) => text.trim().split(' ').filter((word) => word);

for (const seed of [0, 1, 2]) {
    const generator = await pipeline('text-generation', `seed${seed}`, { dtype: 'fp32' });
    const prompts = [9, 5, 7].map(prompt);
    const options = { max_new_tokens: 24, do_sample: false, return_full_text: false };
    const answer = async (text, more) => (await generator(text, { ...options, ...more })).map(
        (item) => words((item[0] ?? item).generated_text));
    const free = [];
    for (const text of prompts) free.push((await answer(text))[0]);
    if (JSON.stringify(await answer(prompts)) !== JSON.stringify(free)) throw Error('batches differ without an end token');
    // The end token is one that the first answer writes.
    const end = Number(free[0][5].slice(1));
    const alone = [];
    for (const text of prompts) alone.push((await answer(text, { eos_token_id: end }))[0]);
    const batch = await answer(prompts, { eos_token_id: end });
    const twice = await answer([prompts[0], prompts[0]], { eos_token_id: end });
    const lengths = (answers) => answers.map((words) => String(words.length).padStart(2)).join(', ');
    console.log(`seed ${seed}, words of the answers: alone ${lengths(alone)}; in a batch ${lengths(batch)}; ` +
        `the first one twice ${lengths(twice)}`);
    console.log(`    first answer, behind its end: ${batch[0].slice(alone[0].length).slice(0, 6).join(' ')} ...`);
    if (!alone.every((words, row) => words.every((word, place) => word === batch[row][place])))
        throw Error('the behaviour has changed');
    if (batch[0].length !== 24 || alone[0].length > 6 || lengths(twice) !== lengths([alone[0], alone[0]]))
        throw Error('the behaviour has changed');
}
JS
node check.js 2> log || { tail -n 12 log; exit 1; }
