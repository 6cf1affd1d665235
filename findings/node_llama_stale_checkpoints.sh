#!/usr/bin/env bash
# node-llama-cpp 3.22.1 (llama.cpp v0.5.0 on a CPU, node 20): a model with a recurrent state computes with tokens that were erased,
# or with those of another text, once a sequence has checkpoints.
#
# Expected: `contextTokens` tells which tokens the state of a sequence stands for. A sequence whose tokens were erased, shifted or
# loaded from a file answers like a fresh sequence that evaluates these tokens. A checkpoint only saves time.
# Seen: without checkpoints all answers are equal. With one, `contextTokens` is right and the answer belongs to another text:
# - After an erased range, checkpoints that lie behind it stay, if their index is within the shorter text. The next restored one still
#   holds the erased tokens. It counts for as many tokens of the shorter text, so those behind the range are lost or doubled.
# - A context shift erases in the same way. So a long answer goes astray at the first shift, with nothing but the option `interval`.
# - `loadStateFromFile` keeps the checkpoints of the old text. A later erase of the end restores one of them.
# Nothing is raised.
#
#     seed 0: erased range: equal without a checkpoint True, with one False (equal to the mixture True)
#     seed 0: context shift: first token that differs without checkpoints none, with them 236, the first one after the shift
#     seed 0: loaded file: equal without an old checkpoint True, with one False (equal to the mixture True)
#     seed 1: erased range: equal without a checkpoint True, with one False (equal to the mixture True)
#     seed 1: context shift: first token that differs without checkpoints none, with them 236, the first one after the shift
#     seed 1: loaded file: equal without an old checkpoint True, with one False (equal to the mixture True)
# (A Mamba of four layers with random weights, two seeds, 15 greedy tokens of an answer each, 300 in the test of the shift.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile gguf==0.19.0 numpy==2.4.6 2> "$work/log"
cd "$work"
npm init -y > log
npm install -s --no-audit --no-fund --ignore-scripts --omit=optional node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
cat > model.py <<'PY'
import sys

import gguf
import numpy as np

WORDS, WIDTH, LAYERS, INNER, STATE, RANK, TAPS = 2048, 64, 4, 128, 16, 8, 4
seed = int(sys.argv[1])
random = np.random.default_rng(seed)
writer = gguf.GGUFWriter(f"{seed}.gguf", "mamba")
writer.add_context_length(4096)
writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_feed_forward_length(0)
writer.add_head_count(0)
writer.add_ssm_conv_kernel(TAPS)
writer.add_ssm_inner_size(INNER)
writer.add_ssm_state_size(STATE)
writer.add_ssm_time_step_rank(RANK)
writer.add_vocab_size(WORDS)
names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
kinds = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
more = WORDS - len(names)
writer.add_tokenizer_model("llama")
writer.add_token_list(names + [f"word{number}" for number in range(more)])
writer.add_token_scores([0.0] * WORDS)
writer.add_token_types(kinds + more * [gguf.TokenType.NORMAL])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)


def add(name, *shape, scale=0.15):
    writer.add_tensor(name, random.normal(0, scale, shape).astype(np.float32))


def ones(name, size):
    writer.add_tensor(name, np.ones(size, np.float32))


add("token_embd.weight", WORDS, WIDTH, scale=1)
ones("output_norm.weight", WIDTH)
for layer in range(LAYERS):
    block = f"blk.{layer}."
    ones(block + "attn_norm.weight", WIDTH)
    ones(block + "ssm_d", INNER)
    add(block + "ssm_in.weight", 2 * INNER, WIDTH)
    add(block + "ssm_conv1d.weight", INNER, TAPS, scale=0.4)
    add(block + "ssm_conv1d.bias", INNER)
    add(block + "ssm_x.weight", RANK + 2 * STATE, INNER)
    add(block + "ssm_dt.weight", INNER, RANK, scale=0.3)
    add(block + "ssm_dt.bias", INNER)
    add(block + "ssm_out.weight", WIDTH, INNER)
    writer.add_tensor(block + "ssm_a", -np.tile(np.arange(1, STATE + 1, dtype=np.float32) / 128, (INNER, 1)))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
PY
cat > run.mjs <<'JS'
import assert from "node:assert";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});
const word = value => value ? "True" : "False";
const equal = (one, other) => JSON.stringify(one) === JSON.stringify(other);

async function answer(sequence, tokens, length = 15) {
    const made = [];
    for await (const token of sequence.evaluate(tokens, {yieldEogToken: true})) {
        made.push(token);
        if (made.length === length)
            break;
    }
    return made;
}

for (const seed of [0, 1]) {
    const model = await llama.loadModel({modelPath: `${seed}.gguf`});
    const context = await model.createContext({contextSize: 256, sequences: 2, batchSize: 64, threads: 1});
    let number = 777;
    const texts = [0, 1].map(() => Array.from({length: 120}, () => {
        number = (number * 1103515245 + 12345) % 2147483648;
        return 259 + number % 1789;
    }));
    const [text, other] = texts;
    const next = other.slice(100, 110);

    async function anew(tokens) {
        const sequence = context.getSequence({checkpoints: {interval: false}});
        const made = await answer(sequence, tokens);
        await sequence.dispose();
        return made;
    }

    async function erased(checkpoint) {
        const sequence = context.getSequence();
        await sequence.evaluateWithoutGeneratingNewTokens(text.slice(0, 80));
        if (checkpoint)
            await sequence.takeCheckpoint();
        await sequence.evaluateWithoutGeneratingNewTokens(text.slice(80));
        await sequence.eraseContextTokenRanges([{start: 10, end: 30}]);
        assert(equal(sequence.contextTokens, left), "the behaviour has changed");
        const made = await answer(sequence, next);
        await sequence.dispose();
        return made;
    }

    async function shifted(interval) {
        const sequence = context.getSequence({checkpoints: {interval}});
        const made = await answer(sequence, text.slice(0, 20), 300);
        await sequence.dispose();
        return made;
    }

    async function loaded(checkpoint) {
        const sequence = context.getSequence();
        await sequence.evaluateWithoutGeneratingNewTokens(text);
        await sequence.saveStateToFile("state");
        await sequence.clearHistory();
        await sequence.evaluateWithoutGeneratingNewTokens(other.slice(0, 60));
        if (checkpoint)
            await sequence.takeCheckpoint();
        await sequence.loadStateFromFile("state", {acceptRisk: true});
        await sequence.eraseContextTokenRanges([{start: 70, end: 120}]);
        assert(equal(sequence.contextTokens, text.slice(0, 70)), "the behaviour has changed");
        const made = await answer(sequence, next);
        await sequence.dispose();
        return made;
    }

    const left = [...text.slice(0, 10), ...text.slice(30)];
    let right = await anew([...left, ...next]);
    let mixture = await anew([...text.slice(0, 80), ...left.slice(80), ...next]);
    let seen = [equal(await erased(false), right), equal(await erased(true), right), equal(await erased(true), mixture)];
    console.log(`seed ${seed}: erased range: equal without a checkpoint ${word(seen[0])}, with one ${word(seen[1])}`,
        `(equal to the mixture ${word(seen[2])})`);
    assert(equal(seen, [true, false, true]), "the behaviour has changed");

    // The context holds 255 tokens, 20 of them are the prompt. So the 236th token is the last one before a shift, which drops 100 tokens.
    const [plain, checked] = [await shifted(false), await shifted(64)];
    const fresh = await anew([...text.slice(0, 20), ...plain.slice(0, 236)].slice(100));
    const first = plain.findIndex((token, index) => token !== checked[index]);
    console.log(`seed ${seed}: context shift: first token that differs without checkpoints`,
        `${equal(plain.slice(236, 251), fresh) ? "none" : "some"}, with them ${first}, the first one after the shift`);
    assert(equal(plain.slice(236, 251), fresh) && first === 236, "the behaviour has changed");

    right = await anew([...text.slice(0, 70), ...next]);
    mixture = await anew([...other.slice(0, 60), ...text.slice(60, 70), ...next]);
    seen = [equal(await loaded(false), right), equal(await loaded(true), right), equal(await loaded(true), mixture)];
    console.log(`seed ${seed}: loaded file: equal without an old checkpoint ${word(seen[0])}, with one ${word(seen[1])}`,
        `(equal to the mixture ${word(seen[2])})`);
    assert(equal(seen, [true, false, true]), "the behaviour has changed");
    await model.dispose();
}
await llama.dispose();
JS
venv/bin/python model.py 0
venv/bin/python model.py 1
OMP_NUM_THREADS=1 node run.mjs
