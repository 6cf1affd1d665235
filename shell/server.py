"""The engine's loop and waiting line; HTTP: /generate, OpenAI's routes, and what the page asks for.

The main thread calls `engine.step()`. HTTP threads call `engine.submit` and `engine.cancel`, read the pieces
of their request, and look at the engine beside its steps: they copy lists, and may see two moments mixed.
"""
import gc
import ipaddress
import json
import logging
import os
import queue
import re
import resource
import select
import signal
import socket
import statistics
import sys
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from common.requests import BadRequest, HungUp, Request, RequestError, Result, Unavailable
from shell import lesson
from shell.checkpoint import ModelError
from shell.frontend import PROMPT, SAMPLING, check_fields, parse_json, text

MAX_BODY = 1 << 20                 # bytes of an HTTP request; a full context fits many times
SILENCE = 0.5                      # seconds after which a thread that waits looks whether its client hung up
IDLE = 20.0                        # seconds in which a client must send, or take, something
ENDING = 5.0                       # seconds in which the last step must end, and whoever waits is told
SHUTTING = "The server is shutting down; ask again when it is back."
DEFECT = "An error inside the server; its log says more, and the engine goes on."
STREAM = {"stream": (lambda v: isinstance(v, bool), "true or false")}
# What OpenAI's clients may send and this server does not do: field -> the values that ask for nothing.
NEUTRAL = {"n": [1], "best_of": [1], "echo": [False], "suffix": [""], "logprobs": [False],
           "top_logprobs": [0], "logit_bias": [{}], "presence_penalty": [0], "frequency_penalty": [0],
           "tools": [[]], "tool_choice": ["auto", "none"], "parallel_tool_calls": [True, False],
           "store": [False], "service_tier": ["auto", "default"], "modalities": [["text"]],
           "response_format": [{"type": "text"}], "include_obfuscation": [False]}
LABELS = "model", "user", "safety_identifier", "prompt_cache_key"       # strings that change nothing


# 1. The engine's loop ---------------------------------------------------------------------------------------

class Server:
    """Run an engine on the thread that calls `run`, and answer any number of other threads.

    info: chapter, model, device and dtype. max_waiting: requests in line, beyond which others are refused.
    compare: name -> (function that makes an engine, whether to evict its device), chapter 01 first."""

    def __init__(self, engine, frontend, info: dict, max_waiting: int = 256, compare: dict | None = None):
        self.engine, self.frontend, self.info = engine, frontend, info
        self.max_waiting, self.compare = max_waiting, compare or {}
        self.lock = threading.Lock()                            # from looking at a line to standing in it
        self.open: list[Request] = []                           # those that somebody waits for
        self.closing = 0.0                                      # since when: seconds of time.monotonic()
        # One thread encodes: a tokenizer may take much memory. And what waits for it, or is in it
        self.encoder, self.encoding = ThreadPoolExecutor(1), []
        self.jobs = queue.SimpleQueue()                         # (function, Future), to run between two steps
        self.comparer, self.comparison = ThreadPoolExecutor(1), None    # the last one's Future

    def run(self):
        """Step until the server is closed and everybody is answered. The thread should be the one that has
        loaded the weights: for another one PyTorch starts as many threads again, which hinder the first."""
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
                self.fail(RequestError(DEFECT))
                self.engine.wake.clear()
                self.engine.wake.wait(1.0)                      # a defect that stays fills the log slowly

    def fail(self, error: RequestError):
        """Answer everybody with an error, also whom the engine has lost."""
        for request in list(self.open):
            with suppress(Exception):
                self.engine.finish(request, error)
            if request.outcome is None:
                request.finish(error)

    def between_steps(self, function):
        """Run `function` on the engine's thread between two steps; return what it returns."""
        if self.closing:
            raise Unavailable(SHUTTING)
        future = Future()
        self.jobs.put((function, future))
        self.engine.wake.set()
        return self.result(future)

    def result(self, future: Future):
        """Return what a future returns. Raises Unavailable if the server closes before."""
        while not wait([future], SILENCE).done:
            if self.closing:
                raise Unavailable(SHUTTING)
        return future.result()

    def waiting(self) -> list[Request]:
        running = list(self.engine.running)
        return [request for request in list(self.open) if request.outcome is None and request not in running]

    def stream(self, gone=lambda: False, **fields):
        """Yield pieces of text and last the Result while the client is not `gone`; closing it cancels the
        request. Other arguments are those of Frontend.request. Raises BadRequest or Unavailable."""
        with self.lock:
            if self.closing:
                raise Unavailable(SHUTTING)
            if len(self.waiting()) + len(self.encoding) >= self.max_waiting:
                raise BadRequest(f"{self.max_waiting} requests are waiting; try again later.", 429)
            self.encoding.append(fields)
        try:
            asked = dict(fields, received=time.perf_counter())
            request = self.result(self.encoder.submit(self.frontend.request, **asked))
            self.engine.submit(request)
            self.open.append(request)
        finally:
            self.encoding.pop()
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
                if self.closing and not piece:                  # its step may last longer than we do
                    raise Unavailable(SHUTTING)
                if gone():
                    raise HungUp("The client hung up.")
                if isinstance(piece, Exception):
                    raise piece
                if piece:
                    yield piece
        finally:
            self.open.remove(request)
            if request.outcome is None:
                self.engine.cancel(request, HungUp("The client hung up."))

    def close(self):
        """Stop accepting, and end all requests that are not answered yet."""
        with self.lock:
            self.closing = self.closing or time.monotonic()
        for request in list(self.open):
            self.engine.cancel(request, Unavailable(SHUTTING))
        self.engine.wake.set()


# 2. What the page shows -------------------------------------------------------------------------------------

def look(server: Server) -> dict:
    """Describe requests, pools, counters and the last answers, for GET /state."""
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


def compare(ways: dict, tokens: list[int], max_tokens: int) -> list[dict]:
    """Answer one prompt in all ways, in turn, in engines of their own. Return a row for each way: its median
    TTFT in milliseconds, and whether its tokens are those of the first way. Raises ModelError."""
    engines, asks, rows = [], {}, []
    try:
        for name, (make_engine, evict) in ways.items():
            engines.append(make_engine())
            asks[name] = partial(lesson.ask, engines[-1], tokens, max_tokens, "device" if evict else "")
        asked = lesson.in_turn(asks)
    finally:
        for engine in engines:
            engine.close()
    expected = next(iter(asked.values()))[0].new
    for name, found in asked.items():
        times = [request.outcome.ttft_ms for request in found]
        rows.append(dict(way=name, ttft_ms=statistics.median(times), min_ms=min(times), max_ms=max(times),
                         samples=len(times), source=found[-1].source,
                         equal=all(request.new == expected for request in found)))
    return rows


# 3. OpenAI's requests and replies ---------------------------------------------------------------------------

def neutral(name: str) -> tuple:
    """Return the test of a field of NEUTRAL, and what it must be. JSON's true is not 1, and false not 0."""
    values = [(value, isinstance(value, bool)) for value in NEUTRAL[name]]
    wanted = " or ".join(json.dumps(value) for value in NEUTRAL[name])
    return lambda v: (v, isinstance(v, bool)) in values, f"{wanted}: more is not supported"


def openai_fields(body, chat: bool, frontend) -> tuple[dict, bool, bool]:
    """Turn the body of a chat, or else of a completion, into arguments for Frontend.request, whether to
    stream, and whether the stream ends with its usage. Raises BadRequest."""
    prompt = "messages" if chat else "prompt"
    own = {prompt: PROMPT[prompt], **SAMPLING, **frontend.fields}
    fields = {**own, **STREAM, "max_completion_tokens": SAMPLING["max_tokens"],
              **{name: neutral(name) for name in NEUTRAL},
              **dict.fromkeys(LABELS, (text, "a string")),
              **dict.fromkeys(("metadata", "stream_options"), (lambda v: isinstance(v, dict), "an object"))}
    given = check_fields(body, fields)
    asked = {name: given[name] for name in given if name in own}
    asked.setdefault("temperature", 1.0)        # OpenAI's default; our own /generate is greedy
    if "max_completion_tokens" in given:
        asked["max_tokens"] = given["max_completion_tokens"]
    asked["raw"] = not chat                     # a completion continues the text as it stands
    options = {"include_usage": STREAM["stream"], "include_obfuscation": neutral("include_obfuscation")}
    options = check_fields(given.get("stream_options", {}), options)
    return asked, given.get("stream", False), options.get("include_usage", False)


def openai_replies(pieces, chat: bool, model: str, stream: bool, with_usage: bool):
    """Yield one whole reply, or the chunks of a stream and last the string [DONE]."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = dict(id=name, object=kind, created=int(time.time()), model=model)
    head |= dict(usage=None) if stream and with_usage else {}

    def reply(text: str, reason: str | None = None, **role):
        content = {"delta" if stream else "message": dict(role, content=text)} if chat else dict(text=text)
        return dict(head, choices=[dict(index=0, finish_reason=reason, logprobs=None, **content)])

    if stream:
        yield reply("", role="assistant")       # once: clients join roles
    for piece in pieces:
        if stream and isinstance(piece, str):
            yield reply(piece)
    used = piece.usage
    usage = dict(used, total_tokens=used["prompt_tokens"] + used["completion_tokens"],
                 prompt_tokens_details=dict(cached_tokens=used["cached_tokens"]))
    if not stream:
        yield dict(reply(piece.text, piece.finish_reason, role="assistant"), usage=usage)
        return
    yield reply("", piece.finish_reason)
    if with_usage:
        yield dict(head, choices=[], usage=usage)
    yield "[DONE]"


# 4. HTTP ----------------------------------------------------------------------------------------------------

def hung_up(connection) -> bool:
    """Whether the client at the other end of a socket has closed it, or its half of it."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def loopback(host: str) -> bool:
    """Whether a name or an address means this machine itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def make_app(server: Server, allow_evict: bool = False):
    from flask import Flask, Response, request, send_file
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

    app = Flask("kv", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY + 1
    app.json.sort_keys = False
    app.url_map.merge_slashes = False
    engine, frontend, model = server.engine, server.frontend, server.info["model"]

    @app.before_request
    def allowed():
        """Raise BadRequest at pages from elsewhere, and at other machines that ask for what costs all time.
        A browser says whose page asks, but the page's owner decides which machine its name means."""
        host = re.sub(r":\d*$", "", request.host).strip("[]")  # any port: a tunnel has its own
        if loopback(request.environ["SERVER_NAME"]) and not loopback(host):
            raise BadRequest("This server is asked as localhost only; start it with --host for others.", 403)
        origin = request.headers.get("Origin")
        if origin and origin.partition("://")[2] != request.host:
            raise BadRequest("Pages from elsewhere may not ask this server.", 403)
        here = allow_evict or loopback(request.remote_addr)
        if request.path in ("/evict", "/compare") and not here:
            raise BadRequest(f"{request.path} is for this machine; start the server with --allow-evict.", 403)

    @app.after_request
    def unframed(response):
        """No other page may show ours and lead a click."""
        response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
        return response

    def body():
        raw = request.get_data()
        if len(raw) > MAX_BODY:                 # it came in chunks, and Flask has cut it there
            raise RequestEntityTooLarge
        return parse_json(raw)

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
        known = {**PROMPT, **SAMPLING, **STREAM, **frontend.fields}
        fields = check_fields(body(), known)
        streaming = fields.pop("stream", False)
        pieces = server.stream(gone(), **fields)
        if streaming:
            return events(dict(text=piece) if isinstance(piece, str) else dict(result=piece.as_json())
                          for piece in pieces)
        *_, result = pieces
        return result.as_json()

    @app.post("/v1/chat/completions", defaults=dict(chat=True))
    @app.post("/v1/completions", defaults=dict(chat=False))
    def openai(chat: bool):
        fields, streaming, with_usage = openai_fields(body(), chat, frontend)
        replies = openai_replies(server.stream(gone(), **fields), chat, model, streaming, with_usage)
        return events(replies) if streaming else next(replies)

    @app.get("/v1/models")
    def models():
        return dict(object="list", data=[dict(id=model, object="model", created=0, owned_by="local")])

    @app.get("/v1/models/<path:name>")
    @app.get("/v1/models//<path:name>")         # of a folder
    def one_model(name: str):
        if request.path != f"/v1/models/{model}":
            raise BadRequest(f"The only model here is {model!r}; ask for that.", 404)
        return models()["data"][0]

    @app.get("/health")
    def health():
        return dict(status="ok", **server.info, counters=engine.counters())

    @app.get("/")
    def index():
        return send_file(Path(__file__).with_name("page.html"))

    @app.get("/state")
    def state():
        return look(server)

    @app.get("/timelines/<int:number>")
    def timeline(number: int):
        for finished in list(engine.over):
            if finished.id == number:
                return dict(spans=finished.timeline.as_json(), plan=finished.timeline.plan)
        raise BadRequest(f"The timeline of request {number} is not kept; GET /state names those kept.", 404)

    @app.post("/evict")
    def evict():
        names = list(engine.pools)
        tiers = names.__contains__, f"one of {', '.join(names) or 'none'}"
        fields = check_fields(body(), {"tier": tiers})
        if not fields:
            raise BadRequest("Give the tier to evict.")
        return dict(evicted=server.between_steps(partial(engine.evict, fields["tier"])))

    @app.post("/compare")
    def comparison():
        fields = check_fields(body(), PROMPT)
        if not server.compare:
            raise BadRequest("This chapter has nothing to compare.", 404)
        asked = server.result(server.encoder.submit(frontend.request, **fields, max_tokens=8))
        with server.lock:
            if server.comparison and not server.comparison.done():
                raise BadRequest("Another comparison is running; ask again when it is over.", 429)
            rows = server.comparer.submit(compare, server.compare, asked.tokens, asked.max_tokens)
            server.comparison = rows
        try:
            return dict(rows=server.result(rows))
        except ModelError as error:             # there is no memory for one more engine
            raise BadRequest(str(error)) from None

    @app.errorhandler(Exception)
    def explain(error):
        """Return the body of an error, with one sentence for the user, its status and headers."""
        methods = getattr(error, "valid_methods", None)
        if isinstance(error, HTTPException):    # raised by Flask
            there = f"{request.method} {request.path[:80]} is nothing here; see GET / and GET /health."
            words = {404: there, 405: there, 413: f"The body is larger than {MAX_BODY} bytes; send less."}
            error = BadRequest(words.get(error.code, error.description), error.code)
        if not isinstance(error, RequestError):
            app.logger.error("unexpected error", exc_info=error)
            error = RequestError(DEFECT)
        return error.as_json(), error.status, {"Allow": ", ".join(methods)} if methods else {}

    return app


def listen(host: str, port: int):
    """Return a WSGI server that holds the port and has no app yet. Raises OSError."""
    from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

    class Listener(ThreadedWSGIServer):
        answering = set()                       # handlers
        timeout = 0.1                           # seconds after which `accept` looks whether it is over
        # A connection may take two descriptors; the others are for files
        places = threading.Semaphore(min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3))

        def process_request(self, *connection):
            self.places.acquire()               # nobody else is accepted before
            super().process_request(*connection)

        def shutdown_request(self, connection):
            super().shutdown_request(connection)
            self.places.release()

    class Handler(WSGIRequestHandler):
        timeout = IDLE

        def run_wsgi(self):
            self.protocol_version = min(self.protocol_version, self.request_version)    # 1.0 has no chunks
            self.server.answering.add(self)
            try:
                super().run_wsgi()
            finally:
                self.server.answering.remove(self)

    # A line a request, or a connection that a browser leaves unused, would drown what a class should see
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    try:
        if not host:
            raise OSError("the address is empty")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as taken:
            return Listener(host, port, None, Handler, fd=taken.fileno())
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while")[0]
        raise OSError(f"Cannot listen on {host}:{port} ({reason}); choose other --host and --port.") from None


def accept(listener, server: Server, reasons: list):
    """Accept connections until the server is closed; an error closes it, and is a reason."""
    try:
        while not server.closing:
            listener.handle_request()
    except Exception as error:
        reasons.append(error)
        server.close()
    finally:
        listener.server_close()                 # who comes now is refused at once


@contextmanager
def closed_by_signals(server: Server, reasons: list):
    """Let Ctrl-C and SIGTERM close the server and interrupt no step. The first is a KeyboardInterrupt among
    the reasons; at a second one, or if the last step does not end in time, the process ends.

    A handler in Python would have to wait while the main thread is inside a long product, and for ever if
    that thread holds a lock that `close` needs. So a thread is told of signals, through a socket."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def watch():
        told = receiver.recv(1)                 # a number, or nothing where the server ends without a signal
        if told:
            reasons.append(KeyboardInterrupt(told[0]))
            server.close()
            receiver.settimeout(ENDING)
            with suppress(TimeoutError):
                if not receiver.recv(1):        # it has ended in time
                    return
            end(told[0])

    watcher, handlers = threading.Thread(target=watch, daemon=True), {}
    watcher.start()
    try:
        signal.set_wakeup_fd(sender.fileno())
        for number in signal.SIGINT, signal.SIGTERM:
            if signal.getsignal(number) != signal.SIG_IGN:      # as a shell sets it in the background
                handlers[number] = signal.signal(number, lambda *_: None)
        yield
    finally:
        signal.set_wakeup_fd(-1)
        sender.close()
        watcher.join()
        receiver.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end(number: int):
    """End the process as a signal does."""
    try:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(128 + number)      # at once: other threads may be inside a long product


def serve(listener, server: Server, allow_evict: bool = False):
    """Step on this thread, the main one, and answer on others, until a signal or an error; raise that."""
    listener.app = make_app(server, allow_evict)
    gc.freeze()     # else the collector goes through the model at times, and nobody gets a token for 0.1 s
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listener.server_address[0], listener.server_address[0])
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.port}"
    reasons = []
    accepting = threading.Thread(target=accept, args=(listener, server, reasons), daemon=True)
    accepting.start()
    try:
        with closed_by_signals(server, reasons):
            print(f"{server.info['chapter']} serves {server.info['model']} on {url}   (Ctrl-C ends it)",
                  flush=True)
            server.run()
    finally:
        server.close()                                          # whoever waits is told within SILENCE
        until = server.closing + ENDING
        accepting.join(max(0.0, until - time.monotonic()))
        while listener.answering and time.monotonic() < until:
            time.sleep(0.05)
    if reasons:
        raise reasons[0]
