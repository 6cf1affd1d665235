#!/usr/bin/env bash
# transformers.js (@huggingface/transformers) 4.3.1 on node, onnxruntime-node 1.30.0: a second turn with a kept cache skips
# as many tokens as the cache holds, whatever they are, and without an attention mask it skips none.
#
# Expected: a chat that passes one `DynamicCache` to each turn, as the pull request that brought it to the pipeline shows,
# has the answers of the same chat without a cache. So has `generate` with the whole conversation and the cache that the
# first call returned, with or without `attention_mask`, which is optional.
# Seen: the tokens in the cache are not kept, so they cannot be compared with the new prompt. Qwen3's and other templates
# leave out the thinking of earlier answers. Then the cached tokens are others than the prompt's beginning, and the cut
# falls at the wrong place: the end of the thinking stays, and tokens of the next question are lost. If the cache is longer
# than the new prompt, the whole prompt is put behind it. And without a mask, `generate` makes one for the cache and all the
# tokens, takes that for a sign that the tokens are new, and reads the first turn twice. Nothing is raised.
# (src/models/modeling_utils.js: `decoder_prepare_inputs_for_generation`.)
#
#     seed 0, chat of 4 turns, answers kept whole: 4 answers as without a cache
#     seed 0, chat of 4 turns, thinking left out: 1 answers as without a cache
#     seed 0, generate with the first turn's cache: 12 of 12 tokens right with a mask, 3 without
# (A decoder of two layers with random weights, three seeds. The one right answer in a chat is that of its first turn.)
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
import { AutoModelForCausalLM, DynamicCache, Tensor, env, pipeline } from '@huggingface/transformers';

env.allowRemoteModels = false;
env.localModelPath = './models/';
let state = 7;
const random = (end) => (state = (state * 48271) % 2147483647) % end;
const words = (length) => Array.from({ length }, () => `w${5 + random(59)}`).join(' ');
const tensor = (ids) => new Tensor('int64', BigInt64Array.from(ids.map(BigInt)), [1, ids.length]);
const same = (first, second) => first.filter((item, place) => item === second[place]).length;

// The first four words of an answer stand for its thinking. The second template leaves them out of earlier answers.
const template = (content) => "{% for message in messages %}{% if message.role == 'user' %}<user> {{ message.content }} " +
    `{% else %}<model> {{ ${content} }} {% endif %}<end> {% endfor %}{% if add_generation_prompt %}<model> {% endif %}`;
const templates = {
    'answers kept whole': template('message.content'),
    'thinking left out': template("message.content.strip().split(' ')[4:] | join(' ')"),
};

async function chat(generator, questions, chat_template, cache) {
    const messages = [];
    for (const content of questions) {
        messages.push({ role: 'user', content });
        const options = { max_new_tokens: 8, do_sample: false, chat_template, ...(cache && { past_key_values: cache }) };
        messages.push((await generator(messages, options))[0].generated_text.at(-1));
    }
    return messages.filter(({ role }) => role === 'assistant').map(({ content }) => content);
}

for (const seed of [0, 1, 2]) {
    const generator = await pipeline('text-generation', `seed${seed}`, { dtype: 'fp32' });
    const questions = [9, 7, 6, 8].map(words);
    for (const [name, chat_template] of Object.entries(templates)) {
        const plain = await chat(generator, questions, chat_template);
        const cached = await chat(generator, questions, chat_template, new DynamicCache());
        const right = same(plain, cached);
        console.log(`seed ${seed}, chat of 4 turns, ${name}: ${right} answers as without a cache`);
        if (right !== (name === 'answers kept whole' ? 4 : 1)) throw Error('the behaviour has changed');
    }

    const model = await AutoModelForCausalLM.from_pretrained(`seed${seed}`, { dtype: 'fp32' });
    const generate = async (ids, more) => {
        const options = { input_ids: tensor(ids), max_new_tokens: 12, do_sample: false, return_dict_in_generate: true };
        const { sequences, past_key_values } = await model.generate({ ...options, ...more });
        return { ids: sequences.tolist()[0].map(Number), past_key_values };
    };
    const numbers = (length) => Array.from({ length }, () => 5 + random(59));
    const first = await generate(numbers(9));
    const second = [...first.ids, ...numbers(7)];
    const answer = async (more) => (await generate(second, more)).ids.slice(second.length);
    const copy = () => new DynamicCache({ ...first.past_key_values });
    const plain = await answer();
    const masked = same(plain, await answer({ past_key_values: copy(), attention_mask: tensor(second.map(() => 1)) }));
    const bare = same(plain, await answer({ past_key_values: copy() }));
    console.log(`seed ${seed}, generate with the first turn's cache: ${masked} of 12 tokens right with a mask, ${bare} without`);
    if (masked !== 12 || bare > 6) throw Error('the behaviour has changed');
}
JS
node check.js 2> log || { tail -n 12 log; exit 1; }
