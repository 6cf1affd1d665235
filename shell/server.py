"""The engine's loop; HTTP: /generate, OpenAI's routes, and what the page asks for.

The main thread calls `engine.step()`. HTTP threads call `engine.submit` and `engine.cancel`, read the pieces
of their request, and read the engine's state during its steps: they copy lists, and may mix two moments.
"""
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
from pathlib import Path
from weakref import WeakKeyDictionary

from flask import Flask, Response, abort, request, send_file
from werkzeug.exceptions import HTTPException
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from common.requests import BadRequest, ClientDisconnected, Request, RequestError, Result, Unavailable
from shell import check_signals, exit_process, lesson, openai, to_json
from shell.frontend import PROMPT, SAMPLING, check_fields

MAX_BODY = 1 << 20                 # bytes of an HTTP request; a full context fits many times
MAX_CONVERSATIONS = 26             # conversations whose blocks the page tells apart: a letter each
MAX_REQUESTS = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # at a time; files need some
POLL_SECONDS = 0.5                 # seconds between two looks of a waiting thread: closing? hung up?
EXAMPLE = 1500                     # tokens of the page's example document
TREE_ROWS = 60                     # nodes of chapter 07's tree that the page shows
EXIT_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
EXIT_SECONDS = 5.0                 # seconds from closing, after which the process ends
SHUTTING_DOWN = "The server is shutting down; ask again when it is back."
ZERO_COUNTS = dict.fromkeys(                    # counters that an engine adds when it counts
    "steps preemptions gpu_hits cpu_hits disk_hits storage_hits misses gpu_hit_tokens cpu_hit_tokens "
    "disk_hit_tokens storage_hit_tokens restored_tokens declined failed_restorations bytes_in bytes_out "
    "swap_ins swap_outs drops blocks_lost pages_lost storage_pages_read storage_pages_written storage_errors "
    "dirty_evicted pages_written".split(), 0)
DEFECT = "An error inside the server; its log says more, and the engine goes on."


# 1. The engine's loop ---------------------------------------------------------------------------------------

class Server:
    """Run an engine on the thread that calls `run`, and answer any number of other threads.

    info: chapter, model, device and dtype. most: requests at a time, beyond which others are refused."""

    def __init__(self, engine, frontend, info: dict, most: int = MAX_REQUESTS):
        self.engine, self.frontend, self.info, self.most = engine, frontend, info, most
        self.cache = getattr(getattr(engine, "lower_tier", None), "cache", None)   # below the device
        self.lock = threading.Lock()            # for one prompt at a time: a tokenizer may take much memory
        self.open: list[Request] = []           # submitted, and a thread reads their pieces
        self.jobs = queue.SimpleQueue()         # (function, queue of its answer), between two steps
        self.closing, self.reason = 0.0, None   # since when (time.monotonic()), and the error to raise then

    def run(self):
        """Step until the server is closed and all requests are answered. Call it on the thread that loaded
        the weights: for another one PyTorch starts as many threads again, which hinder the first."""
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
                    asked.pieces.put(RequestError(DEFECT))      # for one that the engine has lost
                self.engine.wake.clear()
                self.engine.wake.wait(1.0)      # a defect that stays fills the log slowly

    def between_steps(self, function):
        """Run `function` on the engine's thread between two steps; return its result. Raises Unavailable."""
        answers = queue.SimpleQueue()
        self.jobs.put((function, answers))
        self.engine.wake.set()
        return self.take(answers)

    def take(self, answers, gone=lambda: False):
        """Return the next of a queue, or raise it. Raises Unavailable if the server closes before, HungUp if
        `gone()`: the client has hung up."""
        while not gone():
            with suppress(queue.Empty):
                answer = answers.get(timeout=POLL_SECONDS)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            if self.closing:        # a step may last longer than the server
                raise Unavailable(SHUTTING_DOWN)
        raise ClientDisconnected("The client hung up.")

    def stream(self, gone=lambda: False, **fields):
        """Submit the request that `fields` make (arguments of Frontend.request), and yield None; then its
        pieces of text, and last its Result. Cancel it if the generator is closed, or if `gone()`. Raises
        BadRequest or Unavailable."""
        received = time.perf_counter()
        with self.lock:
            if self.closing:
                raise Unavailable(SHUTTING_DOWN)
            if len(self.open) == self.most:
                raise BadRequest(f"{self.most} requests wait or run already; try again later.", 429)
            asked, room = self.frontend.request(received=received, **fields), self.engine.capacity
            if room and fields.get("max_tokens") == math.inf:       # as long as it can be
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

    def close(self, reason: BaseException | None = None):
        """Stop accepting; cancel the requests that are not answered. `reason`: an error to raise then."""
        self.closing, self.reason = self.closing or time.monotonic(), self.reason or reason
        with self.lock:             # from now on no request is added
            for asked in list(self.open):
                self.engine.cancel(asked, Unavailable(SHUTTING_DOWN))
        self.engine.wake.set()


# 2. Guards, bodies, errors ----------------------------------------------------------------------------------

def loopback(host: str) -> bool:
    """Whether a name or an address means this machine itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def check_sender():
    """Raise BadRequest at pages from elsewhere, whose names may mean this machine, and at other machines that
    would change something."""
    host = re.sub(r":\d*$", "", request.host).strip("[]")       # any port: a tunnel has its own
    if loopback(request.environ["SERVER_NAME"]) and not loopback(host):
        raise BadRequest("This server is asked as localhost only; start it with --host for others.", 403)
    origin = request.headers.get("Origin")
    if origin and origin.partition("://")[2] != request.host:
        raise BadRequest("Pages from elsewhere may not ask this server.", 403)
    if request.path in ("/evict", "/storage") and not (loopback(request.remote_addr) and loopback(host)):
        raise BadRequest(f"{request.path} is for this machine only, asked as localhost.", 403)


def body():
    """Return the JSON of the HTTP request. Raises BadRequest at what is not JSON in UTF-8."""
    raw = request.get_data()
    if len(raw) > MAX_BODY:                     # it came in chunks, and Flask has cut it here
        abort(413)
    try:
        asked = json.loads(raw)
        json.dumps(asked, ensure_ascii=False).encode()          # half of a surrogate pair is no text
        return asked
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON in UTF-8 ({str(error)[:100]}).") from None


def explain(error: Exception) -> tuple[dict, int, dict]:
    """Return the body of an error, with one sentence for the user, its status and headers."""
    methods = getattr(error, "valid_methods", None)
    if isinstance(error, HTTPException):        # raised by Flask
        there = f"{request.method} {request.path[:80]} is nothing here; see GET / and GET /health."
        words = {404: there, 405: there, 413: f"The body is larger than {MAX_BODY} bytes; send less."}
        error = BadRequest(words.get(error.code, error.description), error.code)
    if not isinstance(error, RequestError):
        logging.getLogger("kv").error("unexpected error", exc_info=error)
        error = RequestError(DEFECT)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers = {"Allow": ", ".join(methods)} if methods else {}
    return dict(error=dict(message=str(error), type=kind)), error.status, headers


def make_app(server: Server) -> Flask:
    app = Flask("kv", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY + 1
    app.json.dumps = to_json
    app.before_request(check_sender)
    app.register_error_handler(Exception, explain)
    # Another page could show ours and lead a click
    app.after_request(lambda reply: reply.headers.set("X-Frame-Options", "DENY") or reply)
    add_answers(app, server)
    add_page(app, server)
    return app


# 3. Routes that answer prompts ------------------------------------------------------------------------------

def events(chunks) -> Response:
    """Reply with server-sent events, one for each chunk. A client that hangs up closes `chunks`."""
    def encode():
        with closing(chunks):
            try:
                for chunk in chunks:
                    yield f"data: {chunk if isinstance(chunk, str) else to_json(chunk)}\n\n"
            except Exception as error:          # the headers are out: the error travels as an event
                yield f"data: {to_json(explain(error)[0])}\n\n"
    return Response(encode(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})


def add_answers(app: Flask, server: Server):
    """Add our own route and OpenAI's."""
    frontend, model = server.frontend, server.info["model"]

    def answer(fields: dict):
        connection = request.environ["werkzeug.socket"]
        connection.until = 0.0                  # from now on it is not dropped
        pieces = server.stream(connection.is_disconnected, **fields)
        next(pieces)                            # what is wrong is told before a stream begins
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
    @app.get("/v1/models/<path:name>")          # Flask merges slashes, of a folder's name too
    def models(name: str):
        if name not in ("", model.lstrip("/")):
            raise BadRequest(f"The only model here is {model!r}; ask for that.", 404)
        entry = dict(id=model, object="model", created=0, owned_by="local")
        return entry if name else dict(object="list", data=[entry])


# 4. Routes of the page --------------------------------------------------------------------------------------

def look(server: Server, numbers: WeakKeyDictionary, last: dict) -> dict:
    """Describe requests, memories, counters and the last answers, for GET /state. The rest: see `owners`."""
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
    if hasattr(cache, "tree"):                  # chapter 07, with or without a storage
        kept, pages = cache.storage, cache.pages_in_storage()
        storage = dict(name=kept and str(kept), silent=bool(kept and kept.silent), pages=len(pages),
                       tree=list(islice(tree_rows(cache.tree.root, owner), TREE_ROWS)),
                       owners={at: owner[key] for at, key in enumerate(pages) if key in owner},
                       reading=len(cache.reading), writing=len(cache.writing))
    return dict(info=info, requests=requests, pools=pools, storage=storage, counters=engine.counters(),
                finished=finished)


def tree_rows(node, owner: dict, depth: int = 0):
    """Yield a row for each node below this one: a parent, then its children. `owner`: see `owners`."""
    for child in list(node.children.values()):
        tiers = dict(device=child.device, host=child.host_blocks, storage=child.stored)
        yield dict(depth=depth, pages=len(child.pages), owner=owner.get(child.pages[-1], -1),
                   tiers=[name for name, present in tiers.items() if present])
        yield from tree_rows(child, owner, depth + 1)


def owners(requests: list[Request], numbers: WeakKeyDictionary, last: dict) -> dict:
    """Number conversations: a request goes on with the one with whose last prompt it begins. Return the
    number of each prefix, 0 if several conversations have it. `numbers` of requests, and `last`, number ->
    prompt and prefixes of the last request, are updated."""
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
    """A letter per block: . free, - cached (unreferenced, found by its prefix), r reserved (not written yet),
    u in use, s shared by several requests, f in flight (referenced, but by no table). `tables`: of running
    requests, each with its number of computed tokens."""
    blocks = zip(pool.references, pool.key_of)
    states = ["f" if held else "." if block_key is None else "-" for held, block_key in blocks]
    for table, computed in tables:
        for index, block in enumerate(table):
            alone = "u" if index * pool.block_size < computed else "r"
            states[block] = "s" if states[block] in "urs" else alone
    return "".join(states)


def add_page(app: Flask, server: Server):
    """Add the page, and the routes that it, other programs and people look at. What attaches a storage opens
    no module:Class, with which anybody who reaches the port could run code."""
    engine, cache, tiers = server.engine, server.cache, list(server.engine.pools)
    words = "file:DIR, redis://HOST:PORT/N or unix://PATH; give module:Class with --storage at the start"
    tier = {"tier": (tiers.__contains__, f"one of {', '.join(tiers) or 'none'}")}
    place = {"url": (lambda url: isinstance(url, str) and re.match(r"file:|(rediss?|unix)://", url), words),
             "config": openai.OBJECT}

    app.add_url_rule("/", "page", partial(send_file, Path(__file__).with_name("page.html")))
    app.add_url_rule("/state", "state", partial(look, server, WeakKeyDictionary(), {}))

    @app.get("/example")
    def example():
        """Return a document that fits in all memories, and questions about it."""
        tokens = [pool.size * pool.block_size for pool in engine.pools.values()]
        tokens = min(EXAMPLE, min([server.frontend.context, *tokens]) * 3 // 4)
        document = lesson.document(server.frontend, random.Random(0), tokens, lesson.SECRET)
        names = re.findall(r"(\w+) lives in", document) or ["Anna"]
        where = f"Where does {min(names, key=names.count)} live?"       # a name that is told once
        return dict(document=document, questions=[where, lesson.QUESTION])

    @app.get("/health")
    def health():
        return dict(status="ok", **server.info, counters=ZERO_COUNTS | engine.counters())

    @app.get("/timelines/<int:number>")
    def timeline(number: int):
        for asked in list(engine.completed):
            if asked.id == number:
                return dict(spans=asked.timeline.as_json(), plan=asked.timeline.plan)
        raise BadRequest(f"The timeline of request {number} is not kept; GET /state names those kept.", 404)

    @app.post("/evict")
    def evict():
        asked = check_fields(body(), tier, needed="tier")
        return dict(evicted=server.between_steps(partial(engine.evict, asked["tier"])))

    @app.route("/storage", methods=["GET", "PUT", "DELETE"])
    def storage():
        """Show, attach and detach the storage of a Cache that has any (07)."""
        if not hasattr(cache, "tree"):
            raise BadRequest("This chapter has no storage to attach; see GET / and GET /health.", 404)
        if request.method != "GET":             # a storage is opened on this thread: it may take a second
            put = request.method == "PUT"
            opened = cache.open_storage(**check_fields(body(), place, needed="url")) if put else None
            server.between_steps(partial(cache.attach_storage, opened))
        kept = cache.storage
        rate = kept and server.between_steps(kept.speed)        # only the engine's thread settles a lane
        said = dict(silent=kept.silent, behind=kept.is_backlogged, gbps=rate / 1e9) if kept else {}
        return dict(storage=kept and str(kept), **said, counters=ZERO_COUNTS | engine.counters())


# 5. Connections ---------------------------------------------------------------------------------------------

class Connection(socket.socket):
    """A client's, whose request must be here at `until`: a byte now and then is not enough. 0: it is here."""
    asks = False                                # its head is here

    def recv_into(self, *buffer):
        if time.monotonic() > self.until:
            raise TimeoutError
        return super().recv_into(*buffer)

    def is_disconnected(self) -> bool:
        """Whether the client has closed it, or its half of it; on Linux also behind bytes that wait here."""
        poll = select.poll()
        poll.register(self, select.POLLIN | getattr(select, "POLLRDHUP", 0))
        try:
            return any(what != select.POLLIN or not self.recv(1, socket.MSG_PEEK) for _, what in poll.poll(0))
        except OSError:
            return True


class Handler(WSGIRequestHandler):
    timeout = 20.0                              # seconds in which a client must send, or take, something

    def run_wsgi(self):
        self.protocol_version = min(self.protocol_version, self.request_version)    # 1.0 has no chunks
        del self.headers["Expect"]              # it is answered
        self.connection.asks = True
        super().run_wsgi()


class Listener(ThreadedWSGIServer):
    timeout = 0.1                               # seconds that `handle_request` waits for a connection
    clients: list[Connection] = []              # oldest first

    def get_request(self):
        """Accept a connection. Of twice MOST, the oldest that asks for no answer yet gives way."""
        self.clients = [client for client in self.clients if client.fileno() >= 0]
        try:
            if len(self.clients) >= 2 * MAX_REQUESTS and (idle := [one for one in self.clients if one.until]):
                self.clients.remove(idle[0])
                idle[0].shutdown(socket.SHUT_RDWR)
            accepted, address = super().get_request()
        except OSError:
            time.sleep(self.timeout)            # else this thread would try again at once, for ever
            raise
        self.clients.append(client := Connection(fileno=accepted.detach()))
        client.until = time.monotonic() + 3 * Handler.timeout
        return client, address


def listen(host: str, port: int) -> Listener:
    """Return a WSGI server that holds the port and has no app yet. Raises OSError."""
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


def accept(listener: Listener, server: Server, ended: threading.Event):
    """Accept connections until the server closes. A last step longer than ENDING ends the process."""
    try:
        while not server.closing:
            listener.handle_request()
        server.close()
    except Exception as error:
        server.close(error)
    listener.server_close()                     # further connections are refused at once
    if not ended.wait(EXIT_SECONDS):
        number = server.reason.args[0] if isinstance(server.reason, KeyboardInterrupt) else signal.SIGTERM
        exit_process(128 + number)


def serve(listener: Listener, server: Server):
    """Step on this thread, the main one, and answer on others, until a signal or error, which it raises.
    Ctrl-C, SIGTERM and SIGHUP interrupt no step; a second one ends the process."""
    def on_signal(number: int, frame):          # it takes no lock: this thread may hold it
        if server.closing:
            exit_process(128 + number)
        server.closing, server.reason = time.monotonic(), KeyboardInterrupt(number)

    listener.app = make_app(server)
    gc.freeze()     # else the collector goes through the model at times, and no token comes for 0.1 s
    handlers = {number: signal.signal(number, on_signal) for number in EXIT_SIGNALS
                if signal.getsignal(number) != signal.SIG_IGN}  # as a shell sets it in the background
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
        server.close()                          # clients are told within SILENCE
        for number, handler in handlers.items():
            signal.signal(number, handler)
        answering, until = [each for each in listener.clients if each.asks], server.closing + EXIT_SECONDS
        while any(each.fileno() >= 0 for each in answering) and time.monotonic() < until:
            time.sleep(0.05)
    if server.reason:
        raise server.reason
