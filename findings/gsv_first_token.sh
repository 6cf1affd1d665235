#!/usr/bin/env bash
# gsv-tts-lite 0.4.7 (torch 2.13.0 on a CPU): the first token of each speech is lost, but not at the end of a stream.
#
# Expected: `infer`, `infer_batched` and the last result of `infer_stream` give the same greedy tokens, those of a loop
# without a cache. Each result of a stream is a beginning of the next one.
# Seen: the pass over the prompt gives the first token, and each step one more. All three count only the steps, and take as
# many tokens from the end. So the first token is missing. A stream that ends with the end token takes one token less into its
# text. So its last result is complete, while the results before it lack the first token. Its sound is made from the whole
# result each time, and cut by position. So its last piece is one token late: the last token before the border is heard again.
# A batch forgets the first token a second time, since it writes it into a copy. Nothing is raised.
# (gsv_tts/GPT_SoVITS/GPT/t2s_model.py: `infer`, `infer_stream`, `infer_batched` of Text2SemanticDecoder.)
#
#     seed 0: 10 tokens; infer without the first True; batch without the first True; stream: 10 whole
#     seed 1: 17 tokens; infer without the first True; batch without the first True; stream: 10 without the first, 17 whole
#     seed 2: 11 tokens; infer without the first True; batch without the first True; stream: 10 without the first, 11 whole
# (A small model with random weights, greedy, pieces of ten tokens, three seeds. A token is 40 ms.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile tqdm==4.70.1 2> "$work/log"
"$work/venv/bin/pip" install -q --no-compile --no-deps gsv-tts-lite==0.4.7 2> "$work/log"
TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import importlib.util
import sys
import types

import torch

folder = importlib.util.find_spec("gsv_tts").submodule_search_locations[0]
for name in ("", ".GPT_SoVITS", ".GPT_SoVITS.GPT"):  # without the parts for text and sound
    sys.modules["gsv_tts" + name] = types.ModuleType("gsv_tts" + name)
    sys.modules["gsv_tts" + name].__path__ = [folder + name.replace(".", "/")]
from gsv_tts.GPT_SoVITS.GPT.t2s_model import Text2SemanticDecoder

torch.set_num_threads(1)
GREEDY = dict(top_k=1, repetition_penalty=1.0)

@torch.inference_mode()
def main(seed):
    torch.manual_seed(seed)
    model = Text2SemanticDecoder(dict(model=dict(hidden_dim=64, embedding_dim=64, head=4, n_layer=2, vocab_size=1025,
                                                 phoneme_vocab_size=50, dropout=0.0, EOS=1024))).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    for table in (model.ar_audio_embedding, model.ar_text_embedding):
        table.word_embeddings.weight.normal_()
    model.ar_predict_layer.weight[model.EOS] *= 1.6
    model.initialize_runtime(torch.float32, torch.device("cpu"), [(1, 96), (2, 96)])
    for buckets in model.cuda_graph_buckets.values():  # fresh memory may hold anything
        buckets[-1].k_cache.zero_()
        buckets[-1].v_cache.zero_()
    text, sound, meaning = torch.randint(50, (1, 8)), torch.randint(1000, (1, 6)), 0.1 * torch.randn(1, 8, 1024)

    def plain(hidden):  # tokens of a loop without a cache; `hidden` tokens cannot come in the first ten steps
        tokens, found = sound, []
        while True:
            steps, mask = model.process_single_data(text, tokens, meaning)
            memory = torch.zeros(2, 1, 4, steps.shape[1], 16)
            for block in model.t2s_transformer.blocks:
                steps = block.process_prompt(steps, *memory, mask)
            scores = model.ar_predict_layer(steps[:, -1])
            if len(found) < 10:
                scores[:, hidden] = -torch.inf
            token = scores.argmax(-1, keepdim=True)
            if token.item() == model.EOS:
                return found
            found.append(token.item())
            tokens = torch.cat([tokens, token], 1)

    right = plain(model.suppressed_tokens)
    alone = model.infer(text, sound, meaning, **GREEDY)[0, 0].tolist()
    rows, _ = model.infer_batched(list(text) * 2, list(sound) * 2, list(meaning) * 2, check_interval=1, **GREEDY)
    pieces = [(piece[0, 0].tolist(), last) for piece, last in
              model.infer_stream(text, sound, meaning, stream_chunk=10, debug=False, **GREEDY)]
    kinds = ["whole" if piece == right[:len(piece)] else "without the first" if piece == right[1:][:len(piece)] else "other"
             for piece, _ in pieces]
    batch = all(row.tolist() == plain([])[1:] for row in rows)  # a batch hides no tokens
    print(f"seed {seed}: {len(right)} tokens; infer without the first {alone == right[1:]}; batch without the first {batch};",
          "stream:", ", ".join(f"{len(piece)} {kind}" for (piece, _), kind in zip(pieces, kinds)))
    assert alone == right[1:] and batch and kinds == ["without the first"] * (len(kinds) - 1) + ["whole"], \
        "the behaviour has changed"

for seed in (0, 1, 2):
    main(seed)
PY
