#!/usr/bin/env bash
# dspy 3.4.1: two servers that offer a model under the same name share one cache of answers, on disk as well.
#
# Expected: `LM("openai/llama", api_base=...)` asks the server that it names.
# Seen: the cache is on by default, and its key leaves out `api_base` and `base_url`. Behind two servers may
# be other weights, another quantization, or another KV cache under test: the second one is never asked, and
# its answers are those of the first. A later process finds them on the disk. `top_k` is in the key, and
# `cache=False` asks the server.
#
#     server A: 'I am A', server B: 'I am A'
#     server B in a later process: 'I am A'
#     server B with cache=False: 'I am B'
#     questions that arrived: A 1, B 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile dspy==3.4.1 litellm==1.110.2
export DSPY_CACHEDIR="$work/cache" LITELLM_LOCAL_MODEL_COST_MAP=True
cat > "$work/ask.py" <<'PY'
import sys
import dspy

url, cached = sys.argv[1:]
options = {} if cached == "cached" else {"cache": False}
model = dspy.LM("openai/llama", api_base=url, api_key="none", **options)
print(model("Who are you?")[0])
PY
cat > "$work/main.py" <<'PY'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import dspy

arrived = {"A": 0, "B": 0}


def serve(name):
    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            arrived[name] += 1
            message = {"role": "assistant", "content": f"I am {name}"}
            body = json.dumps({
                "id": "1", "object": "chat.completion", "created": 0, "model": "llama",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def ask(url):
    return dspy.LM("openai/llama", api_base=url, api_key="none")("Who are you?")[0]


def ask_later(url, cached):
    command = [sys.executable, sys.argv[1], url, cached]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split("\n")[-2]


a, b = serve("A"), serve("B")
first, second = ask(a), ask(b)
print(f"server A: {first!r}, server B: {second!r}")
later, fresh = ask_later(b, "cached"), ask_later(b, "fresh")
print(f"server B in a later process: {later!r}")
print(f"server B with cache=False: {fresh!r}")
print(f"questions that arrived: A {arrived['A']}, B {arrived['B']}")
assert first == second == later == "I am A" and fresh == "I am B", "the behaviour has changed"
assert arrived == {"A": 1, "B": 1}, "the behaviour has changed"
PY
"$work/venv/bin/python" "$work/main.py" "$work/ask.py" 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
