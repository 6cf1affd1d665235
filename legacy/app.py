"""The command line and the HTTP server that every chapter gets.

A chapter hands `main` its engine class, its demo and its own options. Of an engine this file knows:

    engine.stream(prompt=... or messages=..., **sampling)   checks the request, then returns an iterator that
                                                             yields pieces of text and, last, a Result
    engine.samples(...)   the same for n answers to one prompt: yields (number of the sample, piece)
    engine.fields         what else a request may say: name -> (test, what it must be), as in SAMPLING
    engine.counters()     numbers for /health
    engine.admin          what else the server does: path -> {method: function(JSON object or None, whether the caller has the
                          token) -> JSON object}; open to who is on this machine, or has `engine.admin_token`
    engine.close()        refuse what comes from now on
    what the page shows of it: see legacy/live.py
    engine.release()      let go of what it keeps outside of this process

and that it raises BadRequest, Busy or Closing, whose messages go to the user as they are.
"""
import argparse
import gc
import hmac
import io
import ipaddress
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import ExitStack, closing, redirect_stderr
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import torch

from common import checkpoint
from legacy import figure, live
from legacy.timeline import write_trace

MAX_BODY = 1 << 20                 # bytes of an HTTP request; a full context fits many times
PROXY = "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via"          # headers that say that one stands between


class RequestError(Exception):
    """A request that is not answered, and why, in one sentence that says what to change."""
    status, kind = 500, "server_error"


class BadRequest(RequestError):
    status, kind = 400, "invalid_request_error"


class Forbidden(RequestError):
    status, kind = 403, "permission_error"


class NotHere(RequestError):
    status, kind = 404, "invalid_request_error"


class TooLarge(RequestError):
    status, kind = 413, "invalid_request_error"


class Busy(RequestError):
    status, kind = 429, "rate_limit_error"


class HungUp(RequestError):
    status = 499


class Closing(RequestError):
    status, kind = 503, "unavailable_error"


# 1. Fields of a request ------------------------------------------------------------------------------------------

def whole(value, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def real(value, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def text(value) -> bool:
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode()      # no lone surrogates


def stop_string(value) -> bool:
    return text(value) and 1 <= len(value) <= 256


# name -> (test, what it must be)
SAMPLING = {
    "max_tokens": (lambda v: whole(v, 1, 1 << 20), "a whole number from 1 up"),
    "temperature": (lambda v: real(v, 0, 100), "a number from 0 (greedy) to 100"),
    "top_p": (lambda v: real(v, 1e-6, 1), "a number above 0 and at most 1"),
    "top_k": (lambda v: whole(v, 0, 1 << 20), "a whole number, 0 for no limit"),
    "seed": (lambda v: whole(v, 0, (1 << 63) - 1), "a whole number from 0 up"),
    "stop": (lambda v: stop_string(v) or (isinstance(v, list) and len(v) <= 16 and all(map(stop_string, v))),
             "a string of 1 to 256 characters or a list of at most 16 of them"),
}
PROMPT = {"prompt": (text, "a string"), "messages": (lambda v: isinstance(v, list), "a list of messages")}
MESSAGE = {
    "role": (lambda v: v in ("system", "user", "assistant"), "system, user or assistant"),
    "content": (lambda v: text(v) or (isinstance(v, list) and all(      # a string, or OpenAI's list of parts
        isinstance(part, dict) and part.get("type") == "text" and text(part.get("text")) for part in v)), "a string"),
}
STREAM = {"stream": (lambda v: isinstance(v, bool), "true or false")}
# What OpenAI's clients may send and this server does not do: taken only where it asks for nothing.
NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0, "logit_bias": {},
           "presence_penalty": 0, "frequency_penalty": 0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}


def parse_json(raw: bytes, what: str = "The body"):
    """Raises BadRequest at what is not JSON in UTF-8."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRequest(f"{what} is not UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{what} is not JSON ({str(error)[:80]}).") from None


def check_fields(body, fields: dict, what: str = "The body") -> dict:
    """The fields of a JSON object that are set. Raises BadRequest at the first that is unknown or wrong."""
    if not isinstance(body, dict):
        raise BadRequest(f"{what} must be a JSON object.")
    for name, value in body.items():
        if name not in fields:
            raise BadRequest(f"Unknown field {name[:40]!r}; the fields are {', '.join(fields)}.")
        test, wanted = fields[name]
        if value is not None and not test(value):
            raise BadRequest(f"{name} must be {wanted}.")
    given = {name: value for name, value in body.items() if value is not None}
    return {**given, "messages": check_messages(given["messages"])} if "messages" in given else given


def check_messages(messages) -> list[dict]:
    """OpenAI's messages -> [{role, content}], contents as strings."""
    checked = []
    for message in messages:
        message = check_fields(message, MESSAGE, "Each message")
        if len(message) < len(MESSAGE):
            raise BadRequest("Each message needs a role and a content.")
        parts = message["content"]
        checked.append(dict(message, content=parts if isinstance(parts, str) else "".join(part["text"] for part in parts)))
    if not checked or not checked[-1]["content"]:
        raise BadRequest("messages must hold at least one message, and the last must not be empty.")
    return checked


def openai_fields(body, chat: bool, tokenizer, more: dict) -> tuple[dict, bool, bool]:
    """What OpenAI's clients send for a chat, or else for a completion -> fields for an engine whose own are `more`, whether to
    stream, whether the stream ends with its usage. Raises BadRequest."""
    prompt_field = "messages" if chat else "prompt"
    neutral = {name: (lambda v, nothing=nothing: v == nothing and isinstance(v, bool) == isinstance(nothing, bool),
                      f"{json.dumps(nothing)}: more is not supported") for name, nothing in NEUTRAL.items()}
    prompt = PROMPT["messages"] if chat else (
        lambda v: text(v) or (isinstance(v, list) and all(whole(token, 0, 1 << 31) for token in v)),
        "a string or a list of token ids")
    others = {"model": (text, "a string"), "user": (text, "a string"), "store": (lambda v: v is False, "false"),
              "stream_options": (lambda v: isinstance(v, dict) and all(name == "include_usage" and isinstance(v[name], bool)
                                                                       for name in v), 'an object like {"include_usage": true}'),
              "max_completion_tokens": SAMPLING["max_tokens"]}
    fields = check_fields(body, {prompt_field: prompt, **SAMPLING, **STREAM, **others, **neutral, **more})
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    fields.setdefault("temperature", 1.0)       # OpenAI's default; our own /generate is greedy
    if isinstance(fields.get("prompt"), str):   # a completion continues the text as it stands
        fields["prompt"] = tokenizer.encode(fields["prompt"])
    return ({name: fields[name] for name in fields if name in (prompt_field, *SAMPLING, *more)},
            fields.get("stream", False), fields.get("stream_options", {}).get("include_usage", False))


def openai_head(chat: bool, model: str, kind: str) -> dict:
    return dict(id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", created=int(time.time()), model=model, object=kind)


def openai_usage(results: list) -> dict:
    """What the samples of one prompt took together."""
    used = dict(results[0].usage, completion_tokens=sum(result.usage["completion_tokens"] for result in results))
    return dict(used, total_tokens=used["prompt_tokens"] + used["completion_tokens"],
                prompt_tokens_details=dict(cached_tokens=used["cached_tokens"]))


def openai_choice(index: int, reason: str | None = None, **content) -> dict:
    return dict(index=index, finish_reason=reason, logprobs=None, **content)


def openai_reply(results: list, chat: bool, model: str) -> dict:
    """The Results of the samples of one prompt, in their order -> the body of a reply that is no stream."""
    return dict(openai_head(chat, model, "chat.completion" if chat else "text_completion"), usage=openai_usage(results), choices=[
        openai_choice(index, result.finish_reason,
                      **(dict(message=dict(role="assistant", content=result.text)) if chat else dict(text=result.text)))
        for index, result in enumerate(results)])


def hung_up(connection) -> bool:
    """Whether the client at the other end of a socket will send no more: it has closed it, or its half of it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)               # which means: still there, and silent


# 2. The server ---------------------------------------------------------------------------------------------------

def make_app(engine, info: dict):
    """A Flask app around one engine. `info` holds chapter, model, device and dtype for /health."""
    from flask import Flask, Response, jsonify, request
    from werkzeug.exceptions import HTTPException

    app = Flask("kv", static_folder=None)
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    feed, comparing = live.Feed(engine), threading.Lock()
    app.comparing = comparing                   # whoever holds it has files and memory of its own

    def body():
        try:
            stream = io.BufferedReader(request.stream)
            raw = stream.read(MAX_BODY + 1)
            if len(raw) > MAX_BODY:
                while stream.read(MAX_BODY):    # who is still sending would not see the answer
                    pass
                raise TooLarge(f"The body is larger than {MAX_BODY} bytes; send less.")
        except (ValueError, OSError) as error:      # broken chunks
            raise BadRequest(f"The body is not JSON ({str(error)[:80]}).") from None
        return parse_json(raw)

    def ask(fields: dict):
        """-> (sample, piece), until the client is gone, even if nothing is sent to it meanwhile."""
        samples, connection = engine.samples(**fields), request.environ.get("werkzeug.socket")

        def pieces():
            with closing(samples):
                for index, piece in samples:
                    if connection and hung_up(connection):
                        raise HungUp("The client hung up.")
                    yield index, piece
        return pieces()

    def events(chunks):
        """Server-sent events, one per chunk. A client that hangs up closes `chunks`, and so what they are made of."""
        def encode():
            with closing(chunks):
                try:
                    for chunk in chunks:
                        yield f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n"
                except Exception as error:      # the headers are out: the error travels as an event
                    yield f"data: {json.dumps(explain(error)[0])}\n\n"
        return stream(encode())

    def stream(lines):
        return Response(lines, mimetype="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.post("/generate")
    def generate():
        fields = check_fields(body(), {**PROMPT, **SAMPLING, **STREAM, **engine.fields})
        streaming, several = fields.pop("stream", False), fields.get("n", 1) > 1
        pieces = ask(fields)
        if not streaming:
            results = [result.as_json() for _, result in sorted(dict(pieces).items())]      # the last piece of each sample
            return jsonify(results=results) if several else jsonify(results[0])
        return events(dict({"index": index} if several else {},
                           **(dict(text=piece) if isinstance(piece, str) else dict(result=piece.as_json())))
                      for index, piece in pieces)

    def openai(chat: bool):
        fields, streaming, with_usage = openai_fields(body(), chat, engine.tokenizer, engine.fields)
        pieces = ask(fields)
        if not streaming:
            return jsonify(openai_reply([result for _, result in sorted(dict(pieces).items())], chat, info["model"]))

        def chunks():
            chunk = openai_head(chat, info["model"], "chat.completion.chunk" if chat else "text_completion")
            if with_usage:
                chunk["usage"] = None
            if chat:
                begin = dict(role="assistant", content="")
                yield dict(chunk, choices=[openai_choice(index, delta=begin) for index in range(fields.get("n", 1))])
            results = []
            for index, piece in pieces:
                if isinstance(piece, str):
                    content = dict(delta=dict(content=piece)) if chat else dict(text=piece)
                    yield dict(chunk, choices=[openai_choice(index, **content)])
                else:
                    results.append(piece)
                    content = dict(delta={}) if chat else dict(text="")
                    yield dict(chunk, choices=[openai_choice(index, piece.finish_reason, **content)])
            if with_usage:
                yield dict(chunk, choices=[], usage=openai_usage(results))
            yield "[DONE]"
        return events(chunks())

    @app.post("/v1/chat/completions")
    def chat_completions():
        return openai(chat=True)

    @app.post("/v1/completions")
    def completions():
        return openai(chat=False)

    served = dict(id=info["model"], object="model", created=0, owned_by="local")

    @app.get("/v1/models")
    def models():
        return jsonify(object="list", data=[served])

    @app.get("/v1/models/<path:name>")              # OWNER/NAME has a slash, and the path of a folder begins with one
    def model(name: str):
        if name.strip("/") != served["id"].strip("/"):
            raise NotHere(f"There is no model {name[:80]!r}; {served['id']!r} is served.")
        return jsonify(served)

    @app.get("/health")
    def health():
        return jsonify(status="ok", **info, counters=engine.counters())

    def has_token() -> bool:
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        return bool(engine.admin_token) and hmac.compare_digest(given, f"Bearer {engine.admin_token}".encode())

    def is_local() -> bool:
        """Whether who asks is a program on this machine: no proxy stands between, and no other web page has sent a browser."""
        try:
            local = ipaddress.ip_address(request.remote_addr or "").is_loopback
            name = urlsplit(f"//{request.host}").hostname
        except ValueError:
            return False
        return (local and name in ("127.0.0.1", "::1", "localhost")
                and request.headers.get("Origin", own := f"http://{request.host}") == own
                and not any(header in request.headers for header in PROXY))

    def administer():
        with_token = has_token()
        if not with_token and not is_local():
            with_a_token = (" or with the header 'Authorization: Bearer TOKEN' and the token that the server was started with "
                            "(--admin-token)") if "/storage" in engine.admin else ""    # elsewhere there is no such option
            raise Forbidden(f"{request.path} is for programs on this machine{with_a_token}; ask from there.")
        method = "GET" if request.method == "HEAD" else request.method
        return jsonify(engine.admin[request.path][method](body() if method == "POST" else None, with_token))

    for path, methods in engine.admin.items():
        app.add_url_rule(path, path, administer, methods=list(methods))

    # What the page shows

    @app.get("/")
    def index():
        return Response(page, mimetype="text/html")

    @cache                      # encoding them takes a while, and a class opens its pages together
    def examples():
        return [dict(name=name, prompt=prompt) for name, prompt in engine.examples().items()]

    @app.get("/events")
    def page_events():
        if feed.pages >= live.PAGES:
            raise Busy(f"{live.PAGES} pages are open already; close one.")
        allowed, connection = has_token() or is_local(), request.environ.get("werkzeug.socket")
        hello = dict(info, examples=examples(), compare=dict(measure=engine.compared), evict="/evict" in engine.admin and allowed)

        def lines():
            try:
                yield from feed.events(hello, lambda: connection is not None and hung_up(connection))
            except Exception as error:
                yield live.event(**explain(error)[0])
        return stream(lines())

    @app.get("/timelines/<int:number>.svg")
    def timeline(number: int):
        over = {result.id: (result, request) for result, request in list(engine.over)}
        if number not in over:
            raise NotHere(f"The timeline of request {number} is not kept; GET /events names the last {engine.over.maxlen}.")
        result, asked = over[number]
        return Response(figure.of(result.timeline, f"Request {number}: {result.source}", lambda: engine.drawn(asked)),
                        mimetype="image/svg+xml", headers={"Cache-Control": "no-store"})

    @app.get("/blocks/<tier>/<int:number>")
    def block(tier: str, number: int):
        known = feed.block(tier, number, has_token() or is_local())
        if known is None:
            raise NotHere(f"There is no block {number} in a tier {tier[:40]!r}; GET /events names the tiers.")
        return jsonify(known)

    @app.post("/compare")
    def compare():
        fields = check_fields(body(), {**PROMPT, "max_tokens": (lambda v: whole(v, 2, 64), "a whole number from 2 to 64")})
        asked, connection = engine.request(**{"max_tokens": 8, **fields}), request.environ.get("werkzeug.socket")
        if not comparing.acquire(blocking=False):
            raise Busy("Another comparison is running; ask again when it is over.")

        def table():
            with ExitStack() as stack:
                stack.callback(comparing.release)
                try:
                    for row in live.compare(engine, asked.tokens, asked.max_tokens, stack):
                        yield row
                        if engine.closing:
                            raise Closing("The server is shutting down; compare again when it is back.")
                        if connection and hung_up(connection):
                            return
                except checkpoint.ModelError as error:          # there is no memory for the engines that are compared
                    raise BadRequest(str(error)) from None
        return events(table())

    @app.errorhandler(Exception)
    def explain(error):
        """-> the body of an error, with one sentence for the user, and its status"""
        if isinstance(error, HTTPException):        # raised by Flask
            message = error.description if error.code not in (404, 405) else (
                f"{request.method} {request.path[:80]} is nothing here; see GET / for the page and GET /health.")
            return dict(error=dict(message=message, type=BadRequest.kind)), error.code
        if not isinstance(error, RequestError):
            app.logger.exception("unexpected error")
            error = RequestError("An error inside the server; its log says more, and the engine goes on.")
        return dict(error=dict(message=str(error), type=error.kind)), error.status

    return app


def listen(host: str, port: int):
    """-> a server that holds the port and has no app yet. Raises OSError."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        error_content_type = "application/json"         # of what is not HTTP, and so never reaches the app
        error_message_format = '{"error": {"message": "This is not an HTTP request.", "type": "invalid_request_error"}}'

        def log_request(self, *_):              # one line a request would drown what a class should see
            pass

    said = io.StringIO()                        # werkzeug prints its own lines before it exits
    try:
        with redirect_stderr(said):
            return make_server(host, port, None, threaded=True, request_handler=Quiet)
    except (OSError, UnicodeError, SystemExit) as error:
        reason = (said.getvalue() or str(error)).splitlines()[0]
        raise OSError(f"Cannot listen on {host}:{port} ({reason}); choose another with --host and --port.") from None


def serve(server, engine, info: dict):
    server.app = make_app(engine, info)
    print(f"{info['chapter']} serves {info['model']} on http://{server.host}:{server.port}   (Ctrl-C ends it)", flush=True)
    server.serve_forever()                      # until Ctrl-C, which werkzeug takes for itself
    engine.close()
    server.app.comparing.acquire(timeout=5)     # a comparison takes its files with it
    time.sleep(0.5)                             # those in line are being told
    raise KeyboardInterrupt


# 3. The command line ---------------------------------------------------------------------------------------------

def bounded(kind, low, high):
    """An argparse type: a number of `kind` from `low` to `high`."""
    def parse(string):
        try:
            value = kind(string)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{string!r} is not a {'whole ' if kind is int else ''}number from {low} to {high}")
        return value
    return parse


def readable(string: str) -> str:
    """An argparse type: some text."""
    if not string or not text(string):
        raise argparse.ArgumentTypeError("it must be text in UTF-8, and not empty")
    return string


def parser_for(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; --help lists the options\n")      # one line
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--demo", action="store_true", help="the lesson, in under a minute")
    what.add_argument("--prompt", type=readable, metavar="TEXT", help="answer TEXT once and end")
    parser.add_argument("--host", default="127.0.0.1", help="address of the server (default: this machine only)")
    parser.add_argument("--port", type=bounded(int, 0, 65535), default=5000,
                        help="port of the server (default 5000, 0: any free one)")
    parser.add_argument("--model", default="classroom",
                        help="classroom (default), tinyllama, FOLDER, OWNER/NAME on the hub, or random:NAME")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--plain-weights", action="store_true", help="on a CPU, do not reorder the weights for oneDNN")
    parser.add_argument("--max-tokens", type=bounded(int, 1, 1 << 20), default=128, help="length of an answer (default 128)")
    parser.add_argument("--temperature", type=bounded(float, 0, 100), default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-p", type=bounded(float, 1e-6, 1), default=1.0)
    parser.add_argument("--top-k", type=bounded(int, 0, 1 << 20), default=0)
    parser.add_argument("--seed", type=bounded(int, 0, (1 << 63) - 1), default=None)
    parser.add_argument("--stop", type=readable, action="append", metavar="TEXT",
                        help="end the answer before TEXT; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the demo or of the answer")
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="write the timeline, for Perfetto or chrome://tracing")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the timeline as a picture, the last one of a demo")
    return parser


def main(doc: str, chapter: str, add_arguments, make_engine, demo, load=checkpoint.load, check=None, **actions):
    """Run a chapter from the command line.

    add_arguments(parser)                                       adds the chapter's own options
    make_engine(model, tokenizer, end_tokens, arguments)        -> its engine
    demo(engine, arguments) -> (report, timelines)              prints the lesson; `report` is what --json writes
    actions                                                     the same for options that do something else than to answer
    load                                                        what reads the model, with the arguments of checkpoint.load
    check(arguments)                                            refuses wrong options, before anything is done
    """
    parser = parser_for(doc)
    add_arguments(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)           # who is told to end leaves nothing behind
    sys.stdout.reconfigure(errors="replace")            # a terminal without UTF-8 shows ?, and the answer goes on
    try:
        if check:
            check(arguments)
        run(chapter, arguments, load, make_engine, dict(actions, demo=demo))
    except BrokenPipeError:         # `... | head` has seen enough
        os._exit(1)
    except (checkpoint.ModelError, RequestError, OSError) as error:
        sys.exit(f"{chapter}: {' '.join(str(error).split())}")         # in one line
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)               # at once: requests in other threads may be inside a long product


def run(chapter: str, arguments, load, make_engine, actions: dict):
    files = [path.resolve() for path in (arguments.json, arguments.trace, arguments.svg) if path]
    if len(set(files)) < len(files):
        raise OSError("--json, --trace and --svg name the same file; give each its own.")
    for path in (arguments.json, arguments.trace, arguments.svg):
        try:
            if path:
                path.open("a").close()          # fails now, not after a minute of work
        except OSError as error:
            raise OSError(f"Cannot write '{path}' ({error.strerror}); choose another file.") from None
    action = next((action for option, action in actions.items() if getattr(arguments, option)), None)
    serving = not action and arguments.prompt is None
    server = listen(arguments.host, arguments.port) if serving else None
    model, tokenizer, end_tokens = load(arguments.model, arguments.dtype, arguments.device, reorder=not arguments.plain_weights)
    engine = make_engine(model, tokenizer, end_tokens, arguments)
    try:
        use(chapter, arguments, engine, server, action)
    finally:
        engine.release()


def use(chapter: str, arguments, engine, server, action):
    """Serve, do what an option asks for, or answer once."""
    info = dict(chapter=chapter, model=arguments.model, dtype=str(engine.model.dtype)[6:],
                device=torch.cuda.get_device_name() if engine.model.device.type == "cuda" else "cpu")
    if server:
        gc.freeze()     # else Python's collector goes through all this now and then, and nobody gets a token for 0.1 s
        return serve(server, engine, info)
    if action:
        report, timelines = action(engine, arguments)
        report = {**info, **report}
    else:
        for piece in engine.stream(
                prompt=arguments.prompt, max_tokens=arguments.max_tokens, temperature=arguments.temperature,
                top_p=arguments.top_p, top_k=arguments.top_k, seed=arguments.seed, stop=arguments.stop or []):
            if isinstance(piece, str):
                print(piece, end="", flush=True)
        report, timelines = {**info, **piece.as_json()}, [piece.timeline]
        piece.timeline.plan = lambda: engine.drawn(engine.over[-1][1])
        print(f"\n\n{piece.summary()}")
    engine.close()
    write(chapter, arguments, report, timelines)


def write(chapter: str, arguments, report: dict, timelines: list):
    """What --json, --trace and --svg ask for."""
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.trace:
        write_trace(timelines, arguments.trace)
    if arguments.svg:
        if not timelines:
            raise OSError(f"There is no timeline to draw in '{arguments.svg}'; leave --svg out here.")
        arguments.svg.write_text(figure.of(timelines[-1], f"{chapter}, {arguments.model}"), encoding="utf-8")
