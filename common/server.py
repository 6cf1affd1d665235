"""The engine's thread and waiting line; HTTP: /generate, OpenAI's routes, and what the page asks for.

One thread calls `engine.step()`. HTTP threads call `engine.submit` and `engine.cancel`, read the pieces of
their request, and look at the engine beside its steps: they copy lists, and may see two moments mixed.
"""
import gc
import io
import ipaddress
import json
import logging
import queue
import socket
import statistics
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from operator import eq
from pathlib import Path
from urllib.parse import urlsplit

from common import checkpoint, requests, store
from common.checkpoint import ModelError
from common.requests import SAMPLING, BadRequest, Request, RequestError, Result, Unavailable, check_fields

MAX_BODY = 1 << 20                 # bytes of an HTTP request; a full context fits many times
SILENCE = 0.5                      # seconds after which a thread that waits looks whether its client hung up
ROUNDS = 5                         # of a comparison, after a warm-up
SHUTTING = "The server is shutting down; ask again when it is back."
DEFECT = "An error inside the server; its log says more, and the engine goes on."
# Of errors, by status.
KINDS = {403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "unavailable_error"}
STREAM = {"stream": (lambda v: isinstance(v, bool), "true or false")}
# What OpenAI's clients may send and this server does not do: taken only where it asks for nothing.
NEUTRAL = {"best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0, "logit_bias": {},
           "presence_penalty": 0, "frequency_penalty": 0, "tools": [], "tool_choice": "none", "store": False,
           "response_format": {"type": "text"}}


# 1. The engine's thread -------------------------------------------------------------------------------------

class Server:
    """Run an engine on a thread of its own, and answer any number of threads.

    info: chapter, model, device and dtype. max_waiting: requests in line, beyond which others are refused.
    compare: name -> (function that makes an engine, whether to evict its device), chapter 01 first."""

    def __init__(self, engine, frontend, info: dict, max_waiting: int = 256, compare: dict | None = None):
        self.engine, self.frontend, self.info = engine, frontend, info
        self.max_waiting, self.compare = max_waiting, compare or {}
        self.lock = threading.Lock()                            # of `open` and `closing`
        self.open: list[Request] = []                           # those that somebody waits for
        self.closing = False
        self.jobs = queue.SimpleQueue()                         # (function, Future), to run between two steps
        self.comparing = threading.Lock()
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.thread.start()

    def run(self):
        """Step until the server is closed and everybody is answered."""
        while self.engine.busy or not self.closing:
            while not self.jobs.empty():
                function, future = self.jobs.get()
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            try:
                self.engine.step()
            except Exception:
                logging.getLogger("kv").exception("a step failed")
                self.engine.fail(RequestError(DEFECT))
                self.engine.wake.wait(1.0)                      # a defect that stays fills the log slowly

    def between_steps(self, function):
        """Run `function` on the engine's thread between two steps; return what it returns."""
        if self.closing:
            raise Unavailable(SHUTTING)
        future = Future()
        self.jobs.put((function, future))
        self.engine.wake.set()
        return future.result()

    def waiting(self) -> list[Request]:
        running = list(self.engine.running)
        return [request for request in list(self.open) if request.outcome is None and request not in running]

    def stream(self, gone=lambda: False, **fields):
        """Yield pieces of text and last the Result while the client is not `gone`; closing it cancels the
        request. Other arguments are those of Frontend.request. Raises BadRequest or Unavailable."""
        try:
            request = self.frontend.request(**fields)
            with self.lock:
                if self.closing:
                    raise Unavailable(SHUTTING)
                if len(self.waiting()) >= self.max_waiting:
                    raise BadRequest(f"{self.max_waiting} requests are waiting; try again later.", 429)
                self.engine.submit(request)
                self.open.append(request)
        except RequestError:
            with self.lock:
                self.engine.counts["refused"] += 1
            raise
        pieces = self.pieces(request, gone)
        next(pieces)               # a generator that has not begun does not notice that it is closed
        return pieces

    def pieces(self, request: Request, gone):
        piece = ""
        try:
            yield piece
            while not isinstance(piece, Result):
                with suppress(queue.Empty):
                    piece = ""
                    piece = request.pieces.get(timeout=SILENCE)
                if gone():
                    raise requests.HungUp("The client hung up.")
                if isinstance(piece, Exception):
                    raise piece
                if piece:
                    yield piece
        finally:
            with self.lock:
                self.open.remove(request)
            if request.outcome is None:
                self.engine.cancel(request, requests.HungUp("The client hung up."))

    def close(self, running: bool = False):
        """Stop accepting; reject queued requests, let running ones finish, or cancel them too."""
        with self.lock:
            self.closing = True
        for request in list(self.open) if running else self.waiting():
            if running or not request.new:                      # a preempted one has tokens, and is answered
                self.engine.cancel(request, Unavailable(SHUTTING))
        self.engine.wake.set()


# 2. What the page shows -------------------------------------------------------------------------------------

def look(server: Server) -> dict:
    engine, waiting, running = server.engine, server.waiting(), list(server.engine.running)
    listed, pools, finished = [], {}, []
    for request in running + waiting:
        state = "waiting" if request in waiting else "decode" if request.new else "prefill"
        state = "restoring" if request.restoration is not None else state
        listed.append(dict(
            id=request.id, state=state, found=dict(request.found), prompt_tokens=request.prompt_tokens,
            computed=min(request.computed, request.prompt_tokens), new_tokens=len(request.new)))
    for name, pool in engine.pools.items():
        tables = [(list(request.table), request.computed) for request in running] if name == "device" else []
        states = block_states(pool, tables)
        pools[name] = dict(blocks=len(states), block_bytes=pool.block_bytes, states=states)
    for request in list(engine.over):
        result = vars(request.outcome)
        shown = ("id", "source", "found", "decisions", "usage", "ttft_ms", "tbt_ms")
        finished.append({**{name: result[name] for name in shown}, "version": len(request.timeline.spans)})
    info = dict(server.info, compare=list(server.compare), context=server.frontend.context)
    return dict(info=info, requests=listed, pools=pools, counters=engine.counters(), finished=finished)


def block_states(pool, tables: list[tuple[list[int], int]]) -> str:
    """A letter per block: . free, - cached (unreferenced, found by its prefix), r reserved (not written yet),
    u in use, s shared by several requests, f in flight (referenced, but by no table). `tables`: of running
    requests, each with its number of computed tokens."""
    states = [".-"[prefix is not None] for prefix in list(pool.prefix_of)]
    for block, references in enumerate(list(pool.references)):
        if references:
            states[block] = "f"
    for table, computed in tables:
        for index, block in enumerate(table):
            alone = "u" if index * pool.block_size < computed else "r"
            states[block] = "s" if states[block] in "urs" else alone
    return "".join(states)


def compare(server: Server, asked: Request, gone):
    """Answer one prompt in all ways, in turn, in engines of their own. Yield the progress, and last a row for
    each way: its median TTFT in milliseconds, and whether its tokens are those of the first way."""
    engines, results, done = {}, {name: [] for name in server.compare}, 0
    try:
        for _ in range(1 + ROUNDS):                             # the first is the warm-up
            for name, (make_engine, evict) in server.compare.items():
                yield dict(progress=dict(done=done, of=(1 + ROUNDS) * len(results), way=name))
                if server.closing or gone():
                    return
                engine = engines[name] = engines.get(name) or make_engine()
                if evict and "device" in engine.pools:
                    engine.evict("device")
                request = Request(asked.tokens, asked.max_tokens, end_tokens=asked.end_tokens)
                results[name].append(engine.generate([request])[0].outcome)
                while engine.busy:                              # saving ends before it is asked again
                    engine.step()
                done += 1
    except checkpoint.ModelError as error:                      # there is no memory for one more engine
        raise BadRequest(str(error)) from None
    finally:
        for engine in engines.values():
            engine.close()
    expected, rows = next(iter(results.values()))[0].tokens, []
    for name, found in results.items():
        times = [result.ttft_ms for result in found[1:]]
        rows.append(dict(way=name, ttft_ms=statistics.median(times), min_ms=min(times), max_ms=max(times),
                         samples=len(times), source=found[-1].source,
                         equal=all(result.tokens == expected for result in found)))
    yield dict(rows=rows)


# 3. OpenAI's requests and replies ---------------------------------------------------------------------------

def openai_fields(body, chat: bool, frontend) -> tuple[dict, bool, bool]:
    """Turn the body of a chat, or else of a completion, into arguments for Frontend.request, whether to
    stream, and whether the stream ends with its usage. Raises BadRequest."""
    text = requests.text, "a string"
    own = {**SAMPLING, **frontend.fields}
    if chat:
        own["messages"] = requests.PROMPT["messages"]
    else:
        own["prompt"] = (lambda v: requests.text(v) or isinstance(v, list)), "a string or a list of token ids"
    fields = {**own, **STREAM, "max_completion_tokens": SAMPLING["max_tokens"], "model": text, "user": text,
              "stream_options": (stream_options, 'an object like {"include_usage": true}')}
    for name, nothing in NEUTRAL.items():
        fields[name] = partial(eq, nothing), f"{json.dumps(nothing)}: more is not supported"
    given = check_fields(body, fields)
    asked = {name: given[name] for name in given if name in own}
    asked.setdefault("temperature", 1.0)        # OpenAI's default; our own /generate is greedy
    if "max_completion_tokens" in given:
        asked["max_tokens"] = given["max_completion_tokens"]
    if isinstance(asked.get("prompt"), str):    # a completion continues the text as it stands
        asked["prompt"] = frontend.tokenizer.encode(asked["prompt"])
    return asked, given.get("stream", False), given.get("stream_options", {}).get("include_usage", False)


def stream_options(value) -> bool:
    return isinstance(value, dict) and all(
        name == "include_usage" and isinstance(given, bool) for name, given in value.items())


def openai_body(chat: bool, model: str, stream: bool = False) -> dict:
    """Begin a reply, or a chunk of a stream."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    prefix = "chatcmpl" if chat else "cmpl"
    return dict(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model, object=kind)


def openai_choices(chat: bool, text: str, reason: str | None = None, part: str = "delta", **role):
    content = {part: dict(role, content=text)} if chat else dict(text=text)
    return [dict(index=0, finish_reason=reason, logprobs=None, **content)]


def openai_usage(used: dict) -> dict:
    return dict(used, total_tokens=used["prompt_tokens"] + used["completion_tokens"],
                prompt_tokens_details=dict(cached_tokens=used["cached_tokens"]))


def openai_chunks(pieces, chat: bool, model: str, with_usage: bool):
    """Yield the chunks of a stream: JSON objects, and last the string [DONE]."""
    chunk = openai_body(chat, model, stream=True) | (dict(usage=None) if with_usage else {})
    yield dict(chunk, choices=openai_choices(chat, "", role="assistant"))     # once: clients join roles
    for piece in pieces:
        if isinstance(piece, str):
            yield dict(chunk, choices=openai_choices(chat, piece))
    yield dict(chunk, choices=openai_choices(chat, "", piece.finish_reason))
    if with_usage:
        yield dict(chunk, choices=[], usage=openai_usage(piece.usage))
    yield "[DONE]"


# 4. HTTP ----------------------------------------------------------------------------------------------------

def hung_up(connection) -> bool:
    """Whether the client at the other end of a socket has closed it, or its half of it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)           # which means: still there, and silent


def make_app(server: Server, allow_evict: bool = False):
    from flask import Flask, Response, jsonify, request
    from werkzeug.exceptions import HTTPException

    app = Flask("kv", static_folder=None)
    app.json.sort_keys = False
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    engine, frontend, model = server.engine, server.frontend, server.info["model"]

    def body():
        stream = io.BufferedReader(request.stream)
        try:
            raw = stream.read(MAX_BODY + 1)
            while len(raw) > MAX_BODY and stream.read(MAX_BODY):
                pass                            # whoever is still sending would not see the answer
        except (ValueError, OSError) as error:  # broken chunks
            raise BadRequest(f"The body is not JSON ({str(error)[:80]}).") from None
        if len(raw) > MAX_BODY:
            raise BadRequest(f"The body is larger than {MAX_BODY} bytes; send less.", 413)
        return requests.parse_json(raw)

    def gone():
        """Return the function that says whether the client of this request has hung up."""
        return partial(hung_up, request.environ["werkzeug.socket"])

    def events(chunks):
        """Reply with server-sent events, one for each chunk. A client that hangs up closes `chunks`."""
        def encode():
            with closing(chunks):
                try:
                    for chunk in chunks:
                        yield f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n"
                except Exception as error:      # the headers are out: the error travels as an event
                    yield f"data: {json.dumps(explain(error)[0])}\n\n"
        return Response(encode(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.post("/generate")
    def generate():
        fields = check_fields(body(), {**requests.PROMPT, **SAMPLING, **STREAM, **frontend.fields})
        streaming = fields.pop("stream", False)
        pieces = server.stream(gone(), **fields)
        if streaming:
            return events(dict(text=piece) if isinstance(piece, str) else dict(result=piece.as_json())
                          for piece in pieces)
        *_, result = pieces
        return jsonify(result.as_json())

    @app.post("/v1/chat/completions", defaults=dict(chat=True))
    @app.post("/v1/completions", defaults=dict(chat=False))
    def openai(chat: bool):
        fields, streaming, with_usage = openai_fields(body(), chat, frontend)
        pieces = server.stream(gone(), **fields)
        if streaming:
            return events(openai_chunks(pieces, chat, model, with_usage))
        *_, result = pieces
        choices = openai_choices(chat, result.text, result.finish_reason, "message", role="assistant")
        return jsonify(**openai_body(chat, model), choices=choices, usage=openai_usage(result.usage))

    served = dict(id=model, object="model", created=0, owned_by="local")

    @app.get("/v1/models")
    def models():
        return jsonify(object="list", data=[served])

    @app.get("/v1/models/<path:name>")          # OWNER/NAME has a slash, a folder's path begins with one
    def find_model(name: str):
        if name.strip("/") != model.strip("/"):
            raise BadRequest(f"There is no model {name[:80]!r}; {model!r} is served.", 404)
        return jsonify(served)

    @app.get("/health")
    def health():
        return jsonify(status="ok", **server.info, counters=engine.counters())

    @app.get("/")
    def index():
        return Response(page, mimetype="text/html")

    @app.get("/state")
    def state():
        return jsonify(look(server))

    @app.get("/timelines/<int:number>")
    def timeline(number: int):
        for finished in list(engine.over):
            if finished.id == number:
                return jsonify(spans=finished.timeline.as_json(), plan=finished.timeline.plan)
        raise BadRequest(f"The timeline of request {number} is not kept; GET /state names those kept.", 404)

    def is_local() -> bool:
        """Whether a program on this machine asks, or the page; not a browser sent by another web page."""
        with suppress(ValueError):
            own, name = f"http://{request.host}", urlsplit(f"//{request.host}").hostname
            local = ipaddress.ip_address(request.remote_addr or "").is_loopback
            local &= name in ("127.0.0.1", "::1", "localhost")
            return local and request.headers.get("Origin", own) == own
        return False

    @app.post("/evict")
    def evict():
        if not allow_evict and not is_local():
            raise BadRequest("/evict is for this machine; start the server with --allow-evict.", 403)
        names = list(engine.pools)
        tiers = names.__contains__, f"one of {', '.join(names) or 'none'}"
        fields = check_fields(body(), {"tier": tiers})
        if not fields:
            raise BadRequest("Give the tier to evict.")
        return jsonify(evicted=server.between_steps(partial(engine.evict, fields["tier"])))

    @app.route("/storage", methods=["GET", "POST", "DELETE"])
    def storage():
        """Chapter 07's shared tier: what it is, attach one, detach it."""
        cache = getattr(engine, "cache", None)
        if not hasattr(cache, "attach_storage"):
            raise BadRequest("This chapter has no storage; chapter 07 has.", 404)
        if not is_local():
            raise BadRequest("/storage is for this machine.", 403)
        if request.method == "POST":
            url = lambda value: isinstance(value, str) and value  # noqa: E731
            config = lambda value: isinstance(value, dict)  # noqa: E731
            fields = check_fields(body(), {"url": (url, "a URL"), "config": (config, "an object")})
            if "url" not in fields:
                raise BadRequest("Give the url of the storage.")
            if cache.storage:
                raise BadRequest("A storage is attached already; DELETE /storage detaches it.", 409)
            try:
                backend = store.open_backend(fields["url"], fields.get("config"))
            except ModelError as error:
                raise BadRequest(str(error)) from None
            attached = store.Storage(backend, store.label(fields["url"]))
            server.between_steps(partial(cache.attach_storage, attached))
        elif request.method == "DELETE" and (detached := server.between_steps(cache.detach_storage)):
            detached.close()
        return jsonify(server.between_steps(cache.storage_state))

    @app.post("/compare")
    def comparison():
        fields = check_fields(body(), requests.PROMPT)
        if not server.compare:
            raise BadRequest("This chapter has nothing to compare.", 404)
        asked = frontend.request(**fields, max_tokens=8)
        if not server.comparing.acquire(blocking=False):
            raise BadRequest("Another comparison is running; ask again when it is over.", 429)

        def rows(gone):
            try:
                yield from compare(server, asked, gone)
            finally:
                server.comparing.release()
        return events(rows(gone()))

    @app.errorhandler(Exception)
    def explain(error):
        """Return the body of an error, with one sentence for the user, and its status."""
        if isinstance(error, HTTPException):    # raised by Flask
            there = f"{request.method} {request.path[:80]} is nothing here; see GET / and GET /health."
            error = BadRequest(there if error.code in (404, 405) else error.description, error.code)
        if not isinstance(error, RequestError):
            app.logger.error("unexpected error", exc_info=error)
            error = RequestError(DEFECT)
        kind = KINDS.get(error.status, "invalid_request_error")
        return dict(error=dict(message=str(error), type=kind)), error.status

    return app


def listen(host: str, port: int):
    """Return a WSGI server that holds the port and has no app yet. Raises OSError."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        error_content_type = "application/json"         # of what is not HTTP, and never reaches the app
        error_message_format = '{"error": {"message": "This is not HTTP.", "type": "invalid_request_error"}}'

        def log_request(self, *_):              # one line a request would drown what a class should see
            pass

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as taken:
            return make_server(host, port, None, threaded=True, request_handler=Quiet, fd=taken.fileno())
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while")[0]
        raise OSError(f"Cannot listen on {host}:{port} ({reason}); choose other --host and --port.") from None


def serve(listener, server: Server, allow_evict: bool = False):
    """Answer until Ctrl-C."""
    listener.app = make_app(server, allow_evict)
    gc.freeze()     # else the collector goes through the model at times, and nobody gets a token for 0.1 s
    print(f"{server.info['chapter']} serves {server.info['model']} on http://{listener.host}:{listener.port}"
          "   (Ctrl-C ends it)", flush=True)
    listener.serve_forever()                    # werkzeug takes the KeyboardInterrupt for itself
    server.close()
    server.comparing.acquire(timeout=5)         # a comparison closes its engines
    time.sleep(SILENCE)                         # those in line are being told
    server.close(running=True)
    server.thread.join(timeout=5)
    until = time.perf_counter() + 5             # the last replies are being written, by threads of werkzeug's
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(max(0.0, until - time.perf_counter()))
    raise KeyboardInterrupt
