#!/usr/bin/env bash
# max 26.7.0 (Modular, on a CPU): two surprises of its prefix cache, which is on by default.
#
# Expected: a request that is sent a second time gets the same greedy answer as the first time. With `echo` it gets the
# log probabilities of the whole prompt again.
# Seen, 1: LFM2 has layers with short convolutions, each with a state. On a hit the server takes K and V of the prefix from
# its pages, but the states start with zeros, as for a new text. So the first tokens behind the prefix are computed with a
# wrong state, and the answer can differ without a word. (The class of the cache is ConvStateCache, and a request claims a
# slot in architectures/lfm2/batch_processor.py. Other models with states, as Nemotron-H, ask for
# `enable_prefix_caching: False` in their arch.py. LFM2 does not.) Without the prefix cache all answers are equal, also when
# the prompt is read in chunks of 128 tokens.
# Seen, 2: with `echo` the answer lists log probabilities of those prompt tokens only that were computed in the last step.
# The tokens of reused pages are missing, and so are all chunks of a long prompt but the last one (the chunks come with each
# prompt that is longer than `max_batch_input_tokens`, 8192 by default). The list does not say which tokens it holds:
# `tokens` and `text_offset` are null. A sum over it, as for perplexity, is too small in silence.
# (compute_log_probabilities_ragged in pipelines/lib/log_probabilities.py reads the tokens of one step.)
#
#     the defaults:
#       129 tokens, the second time 128 of them reused: first log probability 7.2e-02 off, answer changed;
#         with echo 140, then 12 log probabilities
#       257 tokens, the second time 256 of them reused: first log probability 6.2e-01 off, answer changed;
#         with echo 268, then 12 log probabilities
#     no prefix cache, chunks of 128 tokens:
#       129 tokens, the second time 0 of them reused: first log probability 0.0e+00 off, answer equal;
#         with echo 12, then 12 log probabilities
# (Three layers with random weights, float32. Five lengths of prompts; 12 tokens are generated. The server compiles the model
# for some minutes.)
set -euo pipefail
work=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" 2> "$work/log" || true; wait "$server" || true; fi; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile uv==0.13.9 2> "$work/log"
"$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" "max[serve]==26.7.0" mojo==1.2.0 numpy==2.4.6 \
    transformers==5.12.1 tokenizers==0.22.2 safetensors==0.8.0
cd "$work"
export HF_HUB_OFFLINE=1 MAX_SERVE_DISABLE_TELEMETRY=1 MODULAR_HOME="$work/cache"
venv/bin/python - > log 2>&1 <<'PY' || { tail -n 5 log; exit 1; }
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Lfm2Config, PreTrainedTokenizerFast

random, hidden = np.random.default_rng(0), 256
kinds = ["conv", "full_attention", "conv"]
shapes = {"lm_head.weight": (303, hidden), "model.embed_tokens.weight": (303, hidden), "model.embedding_norm.weight": (hidden,)}
for layer, kind in enumerate(kinds):
    part = {"operator_norm": (hidden,), "ffn_norm": (hidden,)}
    part |= {f"feed_forward.w{number}": (hidden, hidden) for number in (1, 2, 3)}
    if kind == "conv":
        part |= {"conv.conv": (hidden, 1, 3), "conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}
    else:
        part |= {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden),
                 "self_attn.out_proj": (hidden, hidden), "self_attn.q_layernorm": (64,), "self_attn.k_layernorm": (64,)}
    shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in part.items()}
weights = {name: random.normal(0, 0.12, shape) if len(shape) > 1 else np.ones(shape) for name, shape in shapes.items()}
config = Lfm2Config(vocab_size=303, hidden_size=hidden, block_ff_dim=hidden, intermediate_size=hidden, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, layer_types=kinds, conv_L_cache=3, max_position_embeddings=1024,
                    block_auto_adjust_ff_dim=False, bos_token_id=301, eos_token_id=302, pad_token_id=0,
                    tie_word_embeddings=False, architectures=["Lfm2ForCausalLM"], dtype="float32")
config.save_pretrained("lfm2")
save_file({name: weight.astype(np.float32) for name, weight in weights.items()}, "lfm2/model.safetensors", {"format": "pt"})
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(303)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w302", pad_token="w0")
tokenizer.chat_template = "{{ messages[0]['content'] }}"
tokenizer.save_pretrained("lfm2")
PY

check() {  # name of the run, expectation (reused, chunked), options of the server
    local name=$1 kind=$2 port
    shift 2
    port=$(venv/bin/python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
    MAX_SERVE_METRICS_ENDPOINT_PORT=$((port - 1)) venv/bin/max serve --model-path lfm2 --devices cpu \
        --quantization-encoding float32 --port "$port" --max-length 512 --max-batch-size 4 --enable-echo "$@" > server.log 2>&1 &
    server=$!
    venv/bin/python - "$name" "$kind" "$port" <<'PY' || { tail -n 5 server.log; exit 1; }
import json
import sys
import time
import urllib.request

import numpy as np

name, kind, port = sys.argv[1:]


def ask(tokens, **options):
    body = dict(model="lfm2", prompt=tokens, max_tokens=12, temperature=0, ignore_eos=True, logprobs=1, **options)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        answer = json.load(answer)
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


for _ in range(500):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        break
    except OSError:
        time.sleep(1)
print(f"{name}:")
random, changed = np.random.default_rng(7), []
for length in (129, 130, 200, 257, 300):
    prompt = random.integers(3, 300, length).tolist()
    first, second = ask(prompt), ask(prompt)
    off = max(abs(a - b) for a, b in zip(first[1]["token_logprobs"][:1], second[1]["token_logprobs"][:1]))
    changed.append(first[0] != second[0])
    echo = random.integers(3, 300, length).tolist()
    counts = []
    for _ in range(2):
        _, logprobs, reused = ask(echo, echo=True)
        counts.append(len(logprobs["token_logprobs"]))
        assert logprobs["tokens"] is None and logprobs["text_offset"] is None, "the behaviour has changed"
    print(f"  {length} tokens, the second time {second[2]} of them reused: first log probability {off:.1e} off, answer",
          "changed;" if changed[-1] else "equal;", f"with echo {counts[0]}, then {counts[1]} log probabilities")
    pages = 128 * ((length - 1) // 128)
    whole = length + 11
    if kind == "reused":
        assert second[2] == reused == pages and off > 1e-3, "the behaviour has changed"
        assert counts == [whole, whole - pages], "the behaviour has changed"
    else:
        assert second[2] == reused == 0 and off < 1e-4 and not changed[-1], "the behaviour has changed"
        assert counts == [whole - pages, whole - pages], "the behaviour has changed"
assert any(changed) == (kind == "reused"), "the behaviour has changed"
PY
    kill "$server"
    wait "$server" || true
    server=
}

check "the defaults" reused
check "no prefix cache, chunks of 128 tokens" chunked --no-enable-prefix-caching --max-batch-input-tokens 128
