#!/usr/bin/env bash
# litellm 1.110.2: an answer from its cache can differ from the server's. If a caller changes its vector, the
# cached one changes. A stream loses its log probabilities. Two schemas of one name share an answer.
#
# Expected: what comes from the cache equals what the server gave, and a changed `response_format` asks the
# server again.
# Seen: the memory cache keeps the list of numbers that it gives to the first caller. If that caller scales
# its vector in place, the next caller gets the scaled one. A stream with `logprobs=True` comes back without
# them. The key has only the name of a Pydantic class, so a new class of the same name gets an answer in
# the old schema. After a plain `pip install litellm` the cache fails: it imports fastapi, orjson and
# soundfile, which are not installed.
#
#     vector:    first [3.0, 4.0], from the cache [0.6, 0.8]
#     stream:    first 3 chunks with log probabilities, from the cache 0
#     schema:    first asked for ['city'], class of that name with ['town', 'zip']: server asked 0 times
#     schema:    class of another name: server asked 1 times
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile litellm==1.110.2 fastapi==0.165.0 orjson==3.13.0 \
    soundfile==0.14.0
export LITELLM_LOCAL_MODEL_COST_MAP=True
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import litellm
from litellm.caching import Cache
from pydantic import create_model

asked = []


class Server(BaseHTTPRequestHandler):
    """Answer as an OpenAI-compatible server does."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.append(body)
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        common = {"id": "1", "created": 1, "model": body["model"], "usage": usage}
        if "input" in body:
            vector = {"object": "embedding", "index": 0, "embedding": [3.0, 4.0]}
            self.answer(json.dumps({**common, "object": "list", "data": [vector]}))
        elif not body.get("stream"):
            message = {"role": "assistant", "content": "{}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer(json.dumps({**common, "object": "chat.completion", "choices": [choice]}))
        else:
            del common["usage"]
            choices = [{"index": 0, "delta": {"content": word}, "finish_reason": None, "logprobs": {
                "content": [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}}
                for word in ("one ", "two ", "three")]
            choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
            chunks = [json.dumps({**common, "object": "chat.completion.chunk", "choices": [choice]})
                      for choice in choices]
            self.answer("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]), "text/event-stream")

    def answer(self, text, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = dict(api_key="none", api_base=f"http://127.0.0.1:{server.server_port}/v1", caching=True)
litellm.cache = Cache()


async def embed():
    answer = await litellm.aembedding(model="openai/text-embedding-3-small", input=["text"], **options)
    await asyncio.sleep(1)
    return answer.data[0]["embedding"]


async def embed_twice():
    vector = await embed()
    first, length = list(vector), sum(number ** 2 for number in vector) ** 0.5
    for place in range(len(vector)):
        vector[place] /= length
    return first, await embed()


def chat(text, **more):
    before = len(asked)
    messages = [{"role": "user", "content": text}]
    answer = litellm.completion(model="openai/m", messages=messages, **options, **more)
    chunks = [chunk for chunk in answer] if more.get("stream") else []
    time.sleep(1)
    return len(asked) - before, sum(bool(getattr(chunk.choices[0], "logprobs", None)) for chunk in chunks)


first, second = asyncio.run(embed_twice())
print(f"vector:    first {first}, from the cache {second}")
assert first == [3.0, 4.0] and second == [0.6, 0.8], "the behaviour has changed"
(_, first), (again, second) = (chat("stream", stream=True, logprobs=True) for _ in range(2))
print(f"stream:    first {first} chunks with log probabilities, from the cache {second}")
assert (first, again, second) == (3, 0, 0), "the behaviour has changed"
places = create_model("Place", city=(str, ...)), create_model("Place", town=(str, ...), zip=(int, ...))
(first, _), (second, _) = (chat("schema", response_format=place) for place in places)
print(f"schema:    first asked for {list(places[0].model_fields)}, class of that name with "
      f"{list(places[1].model_fields)}: server asked {second} times")
other, _ = chat("schema", response_format=create_model("Town", town=(str, ...), zip=(int, ...)))
print(f"schema:    class of another name: server asked {other} times")
assert (first, second, other) == (1, 0, 1), "the behaviour has changed"
PY
