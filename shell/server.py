"""The server: the engine's loop, and HTTP routes: /generate, OpenAI's, and those of the page.

The main thread calls `engine.step()`. HTTP threads call `engine.submit` and `engine.cancel`, and read the
pieces of their request. They may read the engine's state during a step. So they copy lists before they use
them, and a reply may mix the state before a step with the state after it."""
import gc
import ipaddress
import json
import logging
import math
import queue
import random
import re
import resource
import select
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from weakref import WeakKeyDictionary

from flask import Flask, Response, abort, request, send_from_directory
from werkzeug.exceptions import HTTPException
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from common.requests import BadRequest, ClientDisconnected, Request, RequestError, Result, Unavailable
from shell import check_signals, exit_process, lesson, openai, to_json
from shell.frontend import PROMPT, SAMPLING, check_fields

MAX_BODY = 1 << 20                 # bytes of an HTTP request, many times a full context
MAX_CONVERSATIONS = 26             # conversations with a letter of their own on the page
# Requests at a time. The process needs file descriptors for other files, too.
MAX_REQUESTS = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
POLL_SECONDS = 0.5                 # seconds between a waiting thread's checks for closing and hang-up
EXAMPLE = 1500                     # tokens of the page's example document
TREE_ROWS = 60                     # nodes of chapter 07's tree that the page shows
EXIT_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
EXIT_SECONDS = 5.0                 # seconds from closing to the forced end of the process
SHUTTING_DOWN = "The server is shutting down; ask again when it is back."
ZERO_COUNTS = dict.fromkeys(                    # an engine adds a counter at its first event
    "steps preemptions gpu_hits cpu_hits disk_hits storage_hits misses gpu_hit_tokens cpu_hit_tokens "
    "disk_hit_tokens storage_hit_tokens restored_tokens declined failed_restorations bytes_in bytes_out "
    "swap_ins swap_outs drops blocks_lost pages_lost storage_pages_read storage_pages_written storage_errors "
    "dirty_evicted pages_written".split(), 0)
DEFECT = "An error inside the server; its log has the details, and the engine continues."


# 1. The engine's loop ---------------------------------------------------------------------------------------

class Server:
    """An engine in service: the thread that calls `run` steps it, and any other threads submit requests.

    `info`: chapter, model, device and dtype. `most`: more requests at a time are refused."""

    def __init__(self, engine, frontend, info: dict, most: int = MAX_REQUESTS):
        self.engine, self.frontend, self.info, self.most = engine, frontend, info, most
        cache = getattr(getattr(engine, "lower_tier", None), "cache", None)
        self.cache = cache if hasattr(cache, "tree") else None  # chapter 07's
        self.lock = threading.Lock()            # encode one prompt at a time: it may take much memory
        self.open: list[Request] = []           # requests whose pieces a thread reads
        self.jobs = queue.SimpleQueue()         # (function to run between two steps, queue for its result)
        self.closing, self.reason = 0.0, None   # time.monotonic() of `close`; the error that `serve` raises

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
                    self.engine.cancel(asked, RequestError(DEFECT))
                    asked.pieces.put(RequestError(DEFECT))      # if the engine has lost the request
                self.engine.wake.clear()
                self.engine.wake.wait(1.0)      # so that a lasting defect fills the log slowly

    def between_steps(self, function):
        """Run `function` on the engine's thread, between two steps, and return its result.

        Raises Unavailable."""
        answers = queue.SimpleQueue()
        self.jobs.put((function, answers))
        self.engine.wake.set()
        return self.take(answers)

    def take(self, answers, gone=lambda: False):
        """Wait for the next item of a queue, and return it, or raise it if it is an exception.

        `gone()`: True when the client has hung up; then raise ClientDisconnected. Raises Unavailable if the
        server closes first."""
        while not gone():
            with suppress(queue.Empty):
                answer = answers.get(timeout=POLL_SECONDS)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            if self.closing:        # do not wait for a long last step
                raise Unavailable(SHUTTING_DOWN)
        raise ClientDisconnected("The client hung up.")

    def stream(self, gone, **fields):
        """Submit a request and yield its answer: None once it is accepted, pieces of text, then the Result.

        `fields`: arguments of Frontend.request. `gone()`: True when the client has hung up. The request is
        cancelled in that case, or if the generator is closed. Raises BadRequest or Unavailable."""
        received = time.perf_counter()
        with self.lock:
            if self.closing:
                raise Unavailable(SHUTTING_DOWN)
            if len(self.open) == self.most:
                raise BadRequest(f"{self.most} requests wait or run already; try again later.", 429)
            asked, room = self.frontend.request(received=received, **fields), self.engine.capacity
            if room and fields.get("max_tokens") == math.inf:       # no limit given: all that fits
                asked.max_tokens = max(1, min(asked.max_tokens, room - asked.prompt_tokens + 1))
            self.engine.submit(asked)
            self.open.append(asked)
        try:
            yield
            piece = None
            while not isinstance(piece, Result):
                piece = self.take(asked.pieces, gone)
                yield piece
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


# 2. Guards, bodies, errors ----------------------------------------------------------------------------------

def loopback(host: str) -> bool:
    """Return True if a host name or address means this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def check_sender():
    """Refuse requests that come from other sites' pages, and changes from other machines. Raises BadRequest.

    A page of another site may use a host name of its own that resolves to this machine."""
    host = re.sub(r":\d*$", "", request.host).strip("[]")       # ignore the port: a tunnel may use another
    if loopback(request.environ["SERVER_NAME"]) and not loopback(host):
        raise BadRequest("This server answers to localhost only; start it with --host for others.", 403)
    origin = request.headers.get("Origin")
    if origin and origin.partition("://")[2] != request.host:
        raise BadRequest("Pages of other sites may not call this server.", 403)
    if request.path in ("/evict", "/storage") and not (loopback(request.remote_addr) and loopback(host)):
        raise BadRequest(f"{request.path} may be called from this machine only, as localhost.", 403)


def body():
    """Return the JSON value in the body of the HTTP request. Raises BadRequest if it is not JSON in UTF-8."""
    raw = request.get_data()
    if len(raw) > MAX_BODY:                     # it came in chunks, and Flask truncated it
        abort(413)
    try:
        asked = json.loads(raw)
        json.dumps(asked, ensure_ascii=False).encode()          # raises at half of a surrogate pair
        return asked
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON in UTF-8 ({str(error)[:100]}).") from None


def explain(error: Exception) -> tuple[dict, int, dict]:
    """Return (body, status, headers) for an error. The body has one sentence for the user."""
    methods = getattr(error, "valid_methods", None)
    if isinstance(error, HTTPException):        # raised by Flask
        there = f"{request.method} {request.path[:80]} does not exist here; see GET / and GET /health."
        words = {404: there, 405: there, 413: f"The body is larger than {MAX_BODY} bytes; send less."}
        error = BadRequest(words.get(error.code, error.description), error.code)
    if not isinstance(error, RequestError):
        logging.getLogger("kv").error("unexpected error", exc_info=error)
        error = RequestError(DEFECT)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers = {"Allow": ", ".join(methods)} if methods else {}
    return dict(error=dict(message=str(error), type=kind)), error.status, headers


# 3. The app, and routes that answer prompts -----------------------------------------------------------------

def events(chunks) -> Response:
    """Reply with server-sent events, one per chunk. If the client hangs up, `chunks` is closed."""
    def encode():
        with closing(chunks):
            try:
                for chunk in chunks:
                    yield f"data: {chunk if isinstance(chunk, str) else to_json(chunk)}\n\n"
            except Exception as error:          # too late for a status: send it as an event
                yield f"data: {to_json(explain(error)[0])}\n\n"
    return Response(encode(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})


def make_app(server: Server) -> Flask:
    """Return the app: the routes that answer prompts (ours and OpenAI's), and those of `add_page`."""
    app, frontend, model = Flask(__name__, static_folder=None), server.frontend, server.info["model"]
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY + 1
    app.json.dumps = to_json
    app.before_request(check_sender)
    app.register_error_handler(Exception, explain)
    # Otherwise another page could show ours in a frame and mislead a click.
    app.after_request(lambda reply: reply.headers.set("X-Frame-Options", "DENY") or reply)
    add_page(app, server)

    def answer(fields: dict):
        connection = request.environ["werkzeug.socket"]
        connection.until = 0.0                  # do not drop this connection any more
        pieces = server.stream(connection.is_disconnected, **fields)
        next(pieces)                            # raise errors of the request before a stream begins
        return pieces

    @app.post("/generate")
    def generate():
        fields = check_fields(body(), {**PROMPT, **SAMPLING, "stream": openai.FLAG, **frontend.fields})
        streaming = fields.pop("stream", False)
        replies = (dict(text=piece) if isinstance(piece, str) else dict(result=piece.as_json())
                   for piece in answer(fields))
        return events(replies) if streaming else [*replies][-1]["result"]

    @app.post("/v1/chat/completions", defaults=dict(chat=True))
    @app.post("/v1/completions", defaults=dict(chat=False))
    def complete(chat: bool):
        fields, streaming, with_usage = openai.parse(body(), chat, frontend)
        replies = openai.replies(answer(fields), chat, model, streaming, with_usage)
        return events(replies) if streaming else next(replies)

    @app.get("/v1/models", defaults=dict(name=""))
    @app.get("/v1/models/<path:name>")          # a folder's name has slashes
    def models(name: str):
        if name not in ("", model.lstrip("/")):
            raise BadRequest(f"The only model here is {model!r}; ask for that.", 404)
        entry = dict(id=model, object="model", created=0, owned_by="local")
        return entry if name else dict(object="list", data=[entry])
    return app


# 4. Routes of the page --------------------------------------------------------------------------------------

def look(server: Server, numbers: WeakKeyDictionary, last: dict) -> dict:
    """Describe requests, pools, storage, counters and the last answers, for GET /state.

    `numbers`, `last`: see `owners`."""
    engine, completed, running = server.engine, list(server.engine.completed), list(server.engine.running)
    waiting = [asked for asked in list(server.open) if asked.outcome is None and asked not in running]
    owner = owners(completed + running + waiting, numbers, last)
    requests, tables = [], [(list(asked.table), asked.computed) for asked in running]
    for asked in running + waiting:
        state = "waiting" if asked in waiting else "decode" if asked.new else "prefill"
        requests.append(dict(
            id=asked.id, state="restoring" if asked.restoration else state, found=dict(asked.found),
            prompt_tokens=asked.prompt_tokens, computed=min(asked.computed, asked.prompt_tokens),
            new_tokens=len(asked.new), conversation=numbers[asked]))
    pools = {name: dict(blocks=pool.size, block_bytes=pool.block_bytes,
                        states=block_states(pool, tables if name == "device" else []),
                        owners={at: owner[key] for key, at in list(pool.block_of.items()) if key in owner})
             for name, pool in engine.pools.items()}
    shown = "id", "source", "found", "decisions", "usage", "ttft_ms", "tbt_ms"
    finished = [dict({name: getattr(asked.outcome, name) for name in shown}, conversation=numbers[asked],
                     version=len(asked.timeline.spans)) for asked in completed]
    info, cache = dict(server.info, context=server.frontend.context), server.cache
    storage = None
    if cache:                                   # chapter 07, with or without storage
        kept, pages = cache.storage, cache.pages_in_storage()
        storage = dict(name=kept and str(kept), silent=bool(kept and kept.silent), pages=len(pages),
                       tree=list(islice(tree_rows(cache.tree.root, owner), TREE_ROWS)),
                       owners={at: owner[key] for at, key in enumerate(pages) if key in owner},
                       reading=len(cache.reading), writing=len(cache.writing))
    return dict(info=info, requests=requests, pools=pools, storage=storage, counters=engine.counters(),
                finished=finished)


def tree_rows(node, owner: dict, depth: int = 0):
    """Yield a row for each node below `node`, parents before children.

    `owner`: page -> number of its conversation, from `owners`."""
    for child in list(node.children.values()):
        tiers = dict(device=child.device, host=child.host_blocks, storage=child.stored)
        yield dict(depth=depth, pages=len(child.pages), owner=owner.get(child.pages[-1], -1),
                   tiers=[name for name, present in tiers.items() if present])
        yield from tree_rows(child, owner, depth + 1)


def owners(requests: list[Request], numbers: WeakKeyDictionary, last: dict) -> dict:
    """Number the conversations of `requests`.

    A request belongs to the conversation whose last prompt its own prompt begins with. If there is none, it
    begins a new one. `numbers`: request -> number of its conversation. `last`: number -> (prompt, block keys)
    of its last request. Both are updated.

    Returns: block key -> number of its conversation, or 0 if several conversations have the block."""
    for asked in [one for one in requests if one not in numbers]:
        begun = {number: len(prompt) for number, (prompt, _) in list(last.items())
                 if asked.tokens[:len(prompt)] == prompt}
        numbers[asked] = number = max(begun, key=begun.get, default=max(last, default=0) + 1)
        last[number] = asked.tokens[:asked.prompt_tokens], asked.chain
        last.pop(number - MAX_CONVERSATIONS, None)
    owner = {}
    for number, (_, chain) in list(last.items()):
        owner.update({block_key: 0 if block_key in owner else number for block_key in list(chain)})
    return owner


def block_states(pool, tables: list[tuple[list[int], int]]) -> str:
    """Return one letter per block of a pool.

    . free; - cached: unreferenced, and found by its key; r reserved: in a block table, and not written yet;
    u in use; s shared by several requests; f in flight: referenced, but in no block table.

    `tables`: the block tables of running requests, each with the number of computed tokens."""
    states = ["f" if held else "." if key is None else "-" for held, key in zip(pool.references, pool.key_of)]
    for table, computed in tables:
        for index, block in enumerate(table):
            alone = "u" if index * pool.block_size < computed else "r"
            states[block] = "s" if states[block] in "urs" else alone
    return "".join(states)


def add_page(app: Flask, server: Server):
    """Add the page, and the routes that the page and other programs use.

    PUT /storage must not open module:Class: everybody who can reach the port could run code with it."""
    engine, cache, tiers = server.engine, server.cache, list(server.engine.pools)
    words = "file:DIR, redis://HOST:PORT/N or unix://PATH; give module:Class with --storage at the start"
    tier = {"tier": (tiers.__contains__, f"one of {', '.join(tiers) or 'none'}")}
    place = {"url": (lambda url: isinstance(url, str) and re.match(r"file:|(rediss?|unix)://", url), words),
             "config": openai.OBJECT}

    app.add_url_rule("/", "page", partial(send_from_directory, app.root_path, "page.html"))
    app.add_url_rule("/state", "state", partial(look, server, WeakKeyDictionary(), {}))

    @app.get("/example")
    def example():
        """Return a document that fits in every pool, and questions about it."""
        tokens = [pool.size * pool.block_size for pool in engine.pools.values()]
        tokens = min(EXAMPLE, min([server.frontend.context, *tokens]) * 3 // 4)
        document = lesson.document(server.frontend, random.Random(0), tokens, lesson.SECRET)
        names = re.findall(r"(\w+) lives in", document) or ["Anna"]
        where = f"Where does {min(names, key=names.count)} live?"       # ask for the rarest name
        return dict(document=document, questions=[where, lesson.QUESTION])

    @app.get("/health")
    def health():
        return dict(status="ok", **server.info, counters=ZERO_COUNTS | engine.counters())

    @app.get("/timelines/<int:number>")
    def timeline(number: int):
        for asked in list(engine.completed):
            if asked.id == number:
                return dict(spans=asked.timeline.as_json(), plan=asked.timeline.plan)
        raise BadRequest(f"The timeline of request {number} is not kept; GET /state lists those kept.", 404)

    @app.post("/evict")
    def evict():
        asked = check_fields(body(), tier, needed="tier")
        return dict(evicted=server.between_steps(partial(engine.evict, asked["tier"])))

    @app.route("/storage", methods=["GET", "PUT", "DELETE"])
    def storage():
        """Show, attach or detach the storage of chapter 07's Cache."""
        if not cache:
            raise BadRequest("This chapter has no storage to attach; see GET / and GET /health.", 404)
        if request.method != "GET":             # open it on this thread: it may take 1 s
            put = request.method == "PUT"
            opened = cache.open_storage(**check_fields(body(), place, needed="url")) if put else None
            server.between_steps(partial(cache.attach_storage, opened))
        kept = cache.storage
        rate = kept and server.between_steps(kept.speed)        # only the engine's thread may read it
        said = dict(silent=kept.silent, behind=kept.is_backlogged, gbps=rate / 1e9) if kept else {}
        return dict(storage=kept and str(kept), **said, counters=ZERO_COUNTS | engine.counters())


# 5. Connections ---------------------------------------------------------------------------------------------

class Connection(socket.socket):
    """A client's connection. Its whole request must arrive before `until`, so slow senders cannot hold it.

    `until`: a time of time.monotonic(), or 0 once the request has arrived."""
    asks = False                                # the head of a request has arrived

    def recv_into(self, *buffer):
        if time.monotonic() > self.until:
            raise TimeoutError
        return super().recv_into(*buffer)

    def is_disconnected(self) -> bool:
        """Return True if the client has closed the connection or its half of it.

        On Linux this is noticed even while unread bytes are in the buffer."""
        poll = select.poll()
        poll.register(self, select.POLLIN | getattr(select, "POLLRDHUP", 0))
        with suppress(OSError):
            return any(what != select.POLLIN or not self.recv(1, socket.MSG_PEEK) for _, what in poll.poll(0))
        return True                             # it cannot be read any more


class Handler(WSGIRequestHandler):
    timeout = 20.0                              # seconds without any byte sent or received

    def run_wsgi(self):
        self.protocol_version = min(self.protocol_version, self.request_version)    # HTTP/1.0 has no chunks
        del self.headers["Expect"]              # the server has answered it
        self.connection.asks = True
        super().run_wsgi()


class Listener(ThreadedWSGIServer):
    timeout = 0.1                               # seconds that `handle_request` waits for a connection
    clients: list[Connection] = []              # the oldest first

    def get_request(self):
        """Accept a connection. At 2 * MAX_REQUESTS, first drop the oldest one that has no request yet."""
        self.clients = [client for client in self.clients if client.fileno() >= 0]
        try:
            if len(self.clients) >= 2 * MAX_REQUESTS and (idle := [one for one in self.clients if one.until]):
                self.clients.remove(idle[0])
                idle[0].shutdown(socket.SHUT_RDWR)
            accepted, address = super().get_request()
        except OSError:
            time.sleep(self.timeout)            # do not retry in a busy loop
            raise
        self.clients.append(client := Connection(fileno=accepted.detach()))
        client.until = time.monotonic() + 3 * Handler.timeout
        return client, address


def listen(host: str, port: int) -> Listener:
    """Return a WSGI server that listens on the port and has no app yet. Raises OSError."""
    # A line per request, or per connection that a browser does not use, would bury what a class should see.
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


def accept(listener: Listener, server: Server, ended: threading.Event):
    """Accept connections until the server closes.

    If `ended` is not set within EXIT_SECONDS after that, as in a very long step, end the process."""
    try:
        while not server.closing:
            listener.handle_request()
    except Exception as error:
        server.reason = server.reason or error
    server.close()
    listener.server_close()                     # the system refuses further connections at once
    if not ended.wait(EXIT_SECONDS):
        number = server.reason.args[0] if isinstance(server.reason, KeyboardInterrupt) else signal.SIGTERM
        exit_process(128 + number)


def serve(listener: Listener, server: Server):
    """Serve until a signal or an error, and raise that. Call it on the main thread.

    This thread steps the engine, and other threads answer HTTP requests. Ctrl-C, SIGTERM and SIGHUP do not
    interrupt a step; a second signal ends the process at once."""
    def on_signal(number: int, frame):          # no lock: this thread may hold it
        if server.closing:
            exit_process(128 + number)
        server.closing, server.reason = time.monotonic(), KeyboardInterrupt(number)

    listener.app = make_app(server)
    gc.freeze()     # exclude the model from garbage collection, which would stop tokens for 0.1 s
    handlers = {number: signal.signal(number, on_signal) for number in EXIT_SIGNALS
                if signal.getsignal(number) != signal.SIG_IGN}  # a shell ignores some for background jobs
    ended = threading.Event()
    threading.Thread(target=accept, args=(listener, server, ended), daemon=True).start()
    host = listener.server_address[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    said = f"{server.info['chapter']} serves {server.info['model']} on http://{host}:{listener.port}"
    try:
        check_signals()
        print(f"{said}   (Ctrl-C ends it)", flush=True)
        server.run()
    finally:
        ended.set()
        server.close()                          # clients notice within POLL_SECONDS
        for number, handler in handlers.items():
            signal.signal(number, handler)
        answering, until = [each for each in listener.clients if each.asks], server.closing + EXIT_SECONDS
        while any(each.fileno() >= 0 for each in answering) and time.monotonic() < until:
            time.sleep(0.05)
    if server.reason:
        raise server.reason
