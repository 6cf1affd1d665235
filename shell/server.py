"""The server: the engine's loop, and the routes that answer prompts: /generate, and OpenAI's.

The main thread calls `engine.step()`. Each connection has a thread of its own, which calls `engine.submit`,
reads the pieces of its request, and calls `engine.cancel` if its client has left.

The page and its routes are in shell/page.py. What the server refuses is in shell/guards.py."""
import gc
import logging
import math
import queue
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial

from flask import Flask, Response, abort, request
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from common.requests import END, ClientDisconnected, Request, RequestError, Unavailable
from shell import charts, exit_process, guards, handle_signals, openai, page, to_json
from shell.frontend import PROMPT, SAMPLING, check_fields, result_json

# Requests at a time. The process needs file descriptors for other files, too.
MAX_REQUESTS = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
POLL_SECONDS = 0.5                 # seconds between a waiting thread's checks for closing and hang-up
# Seconds until a stream that has nothing to say sends a comment. Proxies give up after 60 s or so. But to
# `vllm bench serve` and SGLang's bench_serving, an answer with a comment is a failure
SILENCE_SECONDS = 30.0
EXIT_SECONDS = 5.0                 # seconds from closing to the forced end of the process
LOADING = "The server is loading its model; ask again in a few seconds."
SHUTTING_DOWN = "The server is shutting down; ask again when it is back."


# 1. The engine's loop ---------------------------------------------------------------------------------------

class Server:
    """An engine in service: the thread that calls `run` steps it, and any other threads submit requests.

    `info`: chapter, model, device and dtype. `most`: more requests at a time are refused."""

    def __init__(self, engine, frontend, info: dict, most: int = MAX_REQUESTS):
        self.engine, self.frontend, self.info, self.most = engine, frontend, info, most
        self.cache = getattr(getattr(engine, "lower_tier", None), "cache", None)    # chapter 01 has none
        self.lock = threading.Lock()            # encode one prompt at a time: it may take much memory
        self.open: list[Request] = []           # requests whose pieces a thread reads
        self.jobs = queue.SimpleQueue()         # (function to run between two steps, queue for its result)
        self.closing = 0.0                      # time.monotonic() of `close`

    def run(self):
        """Step until the server is closed and all requests are answered.

        Call it on the thread that loaded the weights. For another thread PyTorch would start a second set of
        OpenMP threads, and the two sets would slow each other down."""
        while self.engine.busy or not self.closing:
            while not self.jobs.empty():
                function, answers = self.jobs.get()
                try:
                    answers.put(function())
                except Exception as error:
                    answers.put(error)
            try:
                self.engine.step()
            except Exception:
                logging.getLogger("kv").exception("a step failed")
                for asked in list(self.open):
                    self.engine.cancel(asked, RequestError(guards.DEFECT))
                    asked.pieces.put(RequestError(guards.DEFECT))       # if the engine has lost the request
                self.engine.wake.clear()
                self.engine.wake.wait(1.0)      # so that a lasting defect fills the log slowly

    def between_steps(self, function):
        """Run `function` on the engine's thread, between two steps, and return its result.

        Raises Unavailable."""
        answers = queue.SimpleQueue()
        self.jobs.put((function, answers))
        self.engine.wake.set()
        return self.take(answers)

    def take(self, answers, gone=lambda: False, seconds: float = math.inf):
        """Wait for the next item of a queue, and return it, or raise it if it is an exception.

        `gone()`: True when the client has hung up; then raise ClientDisconnected. Raises Unavailable if the
        server closes first. Returns: None if no item comes for `seconds`."""
        until = time.monotonic() + seconds
        while not gone():
            with suppress(queue.Empty):
                answer = answers.get(timeout=POLL_SECONDS)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            if self.closing:        # do not wait for a long last step
                raise Unavailable(SHUTTING_DOWN)
            if time.monotonic() > until:
                return None
        raise ClientDisconnected("The client hung up.")

    def stream(self, gone, **fields):
        """Submit a request. Yield the Request once it is accepted, and then pieces of its text. Also yield
        None after each SILENCE_SECONDS without a piece.

        `fields`: arguments of Frontend.request. `gone()`: True when the client has hung up. The request is
        cancelled in that case, or if the generator is closed. Raises BadRequest or Unavailable."""
        received = time.perf_counter()
        with self.lock:
            if self.closing:
                raise Unavailable(SHUTTING_DOWN)
            if len(self.open) == self.most:
                abort(429, f"{self.most} requests wait or run already; try again later.")
            asked = self.frontend.request(received=received, **fields)
            if gone():
                raise ClientDisconnected("The client hung up.")
            self.engine.submit(asked)
            self.open.append(asked)
        try:
            yield asked
            yield from iter(partial(self.take, asked.pieces, gone, SILENCE_SECONDS), END)
        finally:
            self.open.remove(asked)
            if asked.outcome is None:
                self.engine.cancel(asked, ClientDisconnected("The client hung up."))

    def close(self):
        """Accept no more requests, and cancel open ones."""
        self.closing = self.closing or time.monotonic()
        with self.lock:             # `stream` adds no request after this
            for asked in list(self.open):
                self.engine.cancel(asked, Unavailable(SHUTTING_DOWN))
        self.engine.wake.set()


# 2. Routes --------------------------------------------------------------------------------------------------

def make_app(server: Server) -> Flask:
    """Return the app, with the routes of the page and OpenAI's."""
    app, frontend = Flask(__name__, static_folder=None), server.frontend
    app.config["MAX_CONTENT_LENGTH"] = guards.MAX_BODY + 1
    app.json.dumps = to_json
    app.before_request(guards.check_sender)
    app.register_error_handler(Exception, guards.explain)
    # Otherwise another page could show ours in a frame and mislead a click.
    app.after_request(lambda reply: reply.headers.set("X-Frame-Options", "DENY") or reply)

    def answer(fields: dict):
        """Submit a request for the client of this connection. Returns: the Request, and its pieces."""
        pieces = server.stream(partial(guards.has_left, request.environ["werkzeug.socket"]), **fields)
        return next(pieces), pieces             # raise errors of the request before a stream begins

    @app.post("/generate")
    def generate():
        own = {**PROMPT, **SAMPLING, "stream": openai.FLAG, **frontend.fields}
        fields = check_fields(guards.read_body(), own)
        streaming = fields.pop("stream", False)

        def replies(asked, pieces):
            for piece in pieces:
                yield piece and dict(text=piece)
            yield dict(result=result_json(asked))

        said = replies(*answer(fields))
        return guards.events(said) if streaming else [*said][-1]["result"]

    @app.get("/health")
    def health():
        return dict(status="ok", **server.info, counters=charts.ZERO_COUNTS | charts.counters(server.engine))

    openai.add_routes(app, answer, frontend, server.info["model"])
    page.add_routes(app, server)
    return app


# 3. Start and end -------------------------------------------------------------------------------------------

class Handler(WSGIRequestHandler):
    """One connection, on a thread of its own: one request and its reply."""
    timeout = 20.0                              # seconds without any byte sent or received

    def run_wsgi(self):
        self.protocol_version = min(self.protocol_version, self.request_version)    # HTTP/1.0 has no chunks
        self.server.replying.add(self)
        try:
            super().run_wsgi()
        finally:
            self.server.replying.discard(self)


def refuse_while_loading(environ: dict, start_response):
    """Answer every request with 503: the app of a server whose model is not loaded yet."""
    words = to_json(guards.explain(Unavailable(LOADING))[0])
    return Response(words, 503, {"Retry-After": "5"}, "application/json")(environ, start_response)


def listen(host: str, port: int) -> ThreadedWSGIServer:
    """Listen on the port, and answer 503 on another thread until the server has another `app`.

    Raises OSError."""
    # A line per request, or per connection that a browser does not use, would bury what a class should see.
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    try:
        if not host:
            raise OSError("the address is empty")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as taken:
            listener = ThreadedWSGIServer(host, port, refuse_while_loading, Handler, fd=taken.fileno())
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while")[0]
        raise OSError(f"Cannot listen on {host}:{port} ({reason}); choose other --host and --port.") from None
    listener.replying = set()                   # the connections that have a request and no whole reply
    threading.Thread(target=listener.serve_forever, args=[0.1], daemon=True).start()
    return listener


def serve(listener: ThreadedWSGIServer, server: Server):
    """Serve until a signal, and raise KeyboardInterrupt then. Call it on the main thread.

    This thread steps the engine, and other threads answer HTTP requests. A signal does not interrupt a step;
    a second one ends the process at once."""
    numbers, ended, (woken, waking) = [], threading.Event(), socket.socketpair()

    def on_signal(number: int, frame):
        if numbers:
            exit_process(128 + number)
        numbers.append(number)

    def close():
        """After a signal, tell the clients. End the process if its last step takes too long."""
        for number in woken.recv(1):            # empty if the server ends without a signal
            server.close()                      # clients notice within POLL_SECONDS
            listener.shutdown()                 # the system refuses further connections at once
            if not ended.wait(EXIT_SECONDS):
                exit_process(128 + number)

    handle_signals(on_signal)
    # This thread may sleep in a lock while a signal arrives, and not run its handler before it wakes. So
    # Python also writes the signal's number here
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    gc.freeze()     # exclude the model from garbage collection, which would stop tokens for 0.1 s
    listener.app = make_app(server)
    threading.Thread(target=close, daemon=True).start()
    host = listener.server_address[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    said = f"{server.info['chapter']} serves {server.info['model']} on http://{host}:{listener.port}"
    try:
        print(f"{said}   (Ctrl-C ends it)", flush=True)
        server.run()
    finally:
        ended.set()
        signal.set_wakeup_fd(-1)
        server.close()
        while listener.replying and time.monotonic() < server.closing + EXIT_SECONDS:
            time.sleep(0.05)
    if numbers:
        raise KeyboardInterrupt(*numbers)
