"""The command line and the HTTP server that every chapter gets.

A chapter hands `main` its engine class, its demo and its own options. Of an engine this file knows:

    engine.stream(prompt=... or messages=..., **sampling)   checks the request, then returns an iterator that
                                                             yields pieces of text and, last, a Result
    engine.counters()     numbers for /health
    engine.close()        refuse what comes from now on

and that it raises BadRequest, Busy or Closing, whose messages go to the user as they are.
"""
import argparse
import json
import math
import os
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path

import torch

from common import checkpoint
from common.timeline import write_trace

MAX_BODY = 1 << 20                 # bytes of an HTTP request; a full context fits many times


class RequestError(Exception):
    """A request that is not answered, and why, in one sentence that says what to change."""
    status, kind = 500, "server_error"


class BadRequest(RequestError):
    status, kind = 400, "invalid_request_error"


class Busy(RequestError):
    status, kind = 429, "rate_limit_error"


class Closing(RequestError):
    status, kind = 503, "unavailable_error"


# 1. Fields of a request ------------------------------------------------------------------------------------------

def whole(value, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def real(value, low: float, high: float) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)
            and abs(value) < 1e308 and math.isfinite(value) and low <= value <= high)


def text(value) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def text_list(value, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(text(item) and item for item in value)


# name -> (test, what it must be)
SAMPLING = {
    "max_tokens": (lambda v: whole(v, 1, 1 << 20), "a whole number from 1 up"),
    "temperature": (lambda v: real(v, 0, 100), "a number from 0 (greedy) to 100"),
    "top_p": (lambda v: real(v, 1e-6, 1), "a number above 0 and at most 1"),
    "top_k": (lambda v: whole(v, 0, 1 << 20), "a whole number, 0 for no limit"),
    "seed": (lambda v: whole(v, 0, (1 << 63) - 1), "a whole number from 0 up"),
    "stop": (lambda v: (text(v) and v != "") or text_list(v, 16), "a string or a list of at most 16 strings"),
}
PROMPT = {"prompt": (text, "a string"), "messages": (lambda v: isinstance(v, list), "a list of messages")}
STREAM = {"stream": (lambda v: isinstance(v, bool), "true or false")}
# What OpenAI's clients may send and this server does not do: taken only where it asks for nothing.
NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "top_logprobs": 0, "logit_bias": {},
           "presence_penalty": 0, "frequency_penalty": 0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}


def check_fields(body, fields: dict) -> dict:
    """The fields of a JSON object that are set. Raises BadRequest at the first that is unknown or wrong."""
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    for name, value in body.items():
        if name not in fields:
            raise BadRequest(f"Unknown field {name[:40]!r}; the fields are {', '.join(fields)}.")
        test, wanted = fields[name]
        if value is not None and not test(value):
            raise BadRequest(f"{name} must be {wanted}.")
    return {name: value for name, value in body.items() if value is not None}


def check_messages(messages) -> list[dict]:
    """OpenAI's messages -> [{role, content}], contents as strings."""
    checked = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise BadRequest("Each message must be an object with a role: system, user or assistant.")
        unknown = set(message) - {"role", "content", "name"}
        if unknown:
            raise BadRequest(f"Unknown field {min(unknown)[:40]!r} in a message; the fields are role and content.")
        content = message.get("content")
        if isinstance(content, list):           # OpenAI's list of parts
            if not all(isinstance(part, dict) and part.get("type") == "text" and text(part.get("text")) for part in content):
                raise BadRequest("The parts of a message's content must be of type text.")
            content = "".join(part["text"] for part in content)
        if not text(content):
            raise BadRequest("The content of a message must be a string.")
        checked.append(dict(role=message["role"], content=content))
    if not checked or not checked[-1]["content"]:
        raise BadRequest("messages must hold at least one message, and the last must not be empty.")
    return checked


def openai_fields(body, prompt_field: str) -> tuple[dict, bool, bool]:
    """-> fields for engine.stream, whether to stream, whether the stream ends with its usage."""
    neutral = {name: (lambda v, nothing=nothing: v == nothing, f"{json.dumps(nothing)}: more is not supported")
               for name, nothing in NEUTRAL.items()}
    prompt = {"messages": PROMPT["messages"]} if prompt_field == "messages" else {"prompt": (
        lambda v: text(v) or (isinstance(v, list) and all(whole(token, 0, 1 << 31) for token in v)),
        "a string or a list of token ids")}
    ignored = {"model": (text, "a string"), "user": (text, "a string"), "store": (lambda v: v is False, "false")}
    options = {"stream_options": (lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}, "an object with include_usage"),
               "max_completion_tokens": SAMPLING["max_tokens"]}
    fields = check_fields(body, {**prompt, **SAMPLING, **STREAM, **options, **ignored, **neutral})
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    streaming = fields.get("stream", False)
    usage = bool(fields.get("stream_options", {}).get("include_usage"))
    fields.setdefault("temperature", 1.0)       # OpenAI's default; our own /generate is greedy
    return {name: fields[name] for name in fields if name in SAMPLING or name == prompt_field}, streaming, usage


# 2. The server ---------------------------------------------------------------------------------------------------

def make_app(engine, info: dict):
    """A Flask app around one engine. `info` holds chapter, model, device and dtype for /health."""
    from flask import Flask, Response, jsonify, request
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

    app = Flask("kv", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    def body():
        try:
            return json.loads(request.get_data().decode("utf-8"))
        except UnicodeDecodeError:
            raise BadRequest("The body is not UTF-8.") from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"The body is not JSON ({str(error)[:80]}).") from None

    def events(pieces):
        """Server-sent events. When the client hangs up, closing this closes `pieces`, which ends the request."""
        def encode():
            try:
                for piece in pieces:
                    yield f"data: {piece if isinstance(piece, str) else json.dumps(piece)}\n\n"
            except RequestError as error:       # the headers are out: the error travels as an event
                yield f"data: {json.dumps(dict(error=dict(message=str(error), type=error.kind)))}\n\n"
            finally:
                pieces.close()
        return Response(encode(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})

    def last(pieces):
        """The Result of a request that is not streamed."""
        for piece in pieces:
            pass
        return piece

    @app.post("/generate")
    def generate():
        fields = check_fields(body(), {**PROMPT, **SAMPLING, **STREAM})
        streaming = fields.pop("stream", False)
        if "messages" in fields:
            fields["messages"] = check_messages(fields["messages"])
        pieces = engine.stream(**fields)
        if not streaming:
            return jsonify(last(pieces).as_json())

        def named():
            with closing(pieces):
                for piece in pieces:
                    yield dict(text=piece) if isinstance(piece, str) else dict(result=piece.as_json())
        return events(named())

    def openai(kind: str, prompt_field: str):
        fields, streaming, with_usage = openai_fields(body(), prompt_field)
        if "messages" in fields:
            fields["messages"] = check_messages(fields["messages"])
        elif isinstance(fields.get("prompt"), str):     # a completion continues the text as it stands
            fields["prompt"] = engine.tokenizer.encode(fields["prompt"])
        pieces = engine.stream(**fields)
        chat = prompt_field == "messages"
        head = dict(id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", created=int(time.time()), model=info["model"])

        def usage(result):
            return dict(result.usage, total_tokens=result.usage["prompt_tokens"] + result.usage["completion_tokens"],
                        prompt_tokens_details=dict(cached_tokens=result.usage["cached_tokens"]))

        def choice(content, reason=None):
            message = {("delta" if streaming else "message"): content} if chat else dict(text=content)
            return dict(index=0, finish_reason=reason, logprobs=None, **message)

        if not streaming:
            result = last(pieces)
            content = dict(role="assistant", content=result.text) if chat else result.text
            return jsonify(**head, object=kind, choices=[choice(content, result.finish_reason)], usage=usage(result))

        def chunks():
            chunk = dict(head, object=kind + ".chunk" if chat else kind)
            with closing(pieces):
                if chat:
                    yield dict(chunk, choices=[choice(dict(role="assistant", content=""))])
                for piece in pieces:
                    if isinstance(piece, str):
                        yield dict(chunk, choices=[choice(dict(content=piece) if chat else piece)])
                    else:
                        yield dict(chunk, choices=[choice({} if chat else "", piece.finish_reason)])
                        if with_usage:
                            yield dict(chunk, choices=[], usage=usage(piece))
            yield "[DONE]"
        return events(chunks())

    @app.post("/v1/chat/completions")
    def chat_completions():
        return openai("chat.completion", "messages")

    @app.post("/v1/completions")
    def completions():
        return openai("text_completion", "prompt")

    @app.get("/v1/models")
    def models():
        return jsonify(object="list", data=[dict(id=info["model"], object="model", created=0, owned_by="local")])

    @app.get("/health")
    def health():
        return jsonify(status="ok", **info, counters=engine.counters())

    @app.get("/")
    def index():
        return Response(page, mimetype="text/html")

    @app.errorhandler(RequestError)
    def refused(error):
        return jsonify(error=dict(message=str(error), type=error.kind)), error.status

    @app.errorhandler(HTTPException)
    def http_error(error):
        if isinstance(error, RequestEntityTooLarge):
            message = f"The body is larger than {MAX_BODY} bytes; send less."
        elif error.code in (404, 405):
            message = f"{request.method} {request.path[:80]} is nothing here; see GET / for the page and GET /health."
        else:
            message = error.description or error.name
        return jsonify(error=dict(message=message, type="invalid_request_error")), error.code

    @app.errorhandler(Exception)
    def unexpected(error):
        app.logger.exception("unexpected error")
        return jsonify(error=dict(message="An error inside the server; its log says more. The engine goes on.",
                                  type="server_error")), 500

    return app


def serve(engine, info: dict, host: str, port: int):
    try:
        from werkzeug.serving import WSGIRequestHandler, make_server
    except ImportError:
        sys.exit("The server needs Flask: pip install -r requirements.txt")

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_):              # one line a request would drown what a class should see
            pass

    try:
        server = make_server(host, port, make_app(engine, info), threaded=True, request_handler=Quiet)
    except (OSError, SystemExit) as error:
        sys.exit(f"Cannot listen on {host}:{port} ({error}); choose another with --port.")
    server.daemon_threads = True
    print(f"{info['chapter']} serves {info['model']} on http://{host}:{server.server_port}   (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    finally:
        engine.close()
        server.server_close()


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


def parser_for(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--demo", action="store_true", help="the lesson, in under a minute")
    what.add_argument("--prompt", metavar="TEXT", help="answer TEXT once and end")
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
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the demo or of the answer")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline, for Perfetto or chrome://tracing")
    return parser


def main(doc: str, chapter: str, add_arguments, make_engine, demo):
    """Run a chapter from the command line.

    add_arguments(parser)                                       adds the chapter's own options
    make_engine(model, tokenizer, end_tokens, arguments)        -> its engine
    demo(engine, arguments) -> (report, timelines)              prints the lesson; `report` is what --json writes
    """
    parser = parser_for(doc)
    add_arguments(parser)
    arguments = parser.parse_args()
    try:
        run(chapter, arguments, make_engine, demo)
    except (checkpoint.ModelError, RequestError) as error:
        sys.exit(f"{chapter}: {error}")
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)               # at once: requests in other threads may be inside a long product
    except BrokenPipeError:         # `... | head` has seen enough
        os._exit(1)


def run(chapter: str, arguments, make_engine, demo):
    for path in (arguments.json, arguments.trace):
        try:
            if path:
                path.open("a").close()          # now, not after a minute of work
        except OSError as error:
            sys.exit(f"{chapter}: {path} cannot be written ({error.strerror}).")
    model, tokenizer, end_tokens = checkpoint.load(
        arguments.model, arguments.dtype, arguments.device, reorder=not arguments.plain_weights)
    engine = make_engine(model, tokenizer, end_tokens, arguments)
    info = dict(chapter=chapter, model=arguments.model, device=describe_device(model), dtype=str(model.dtype)[6:])
    if not arguments.demo and arguments.prompt is None:
        return serve(engine, info, arguments.host, arguments.port)
    if arguments.demo:
        report, timelines = demo(engine, arguments)
        report = {**info, **report}
    else:
        for piece in engine.stream(
                prompt=arguments.prompt, max_tokens=arguments.max_tokens, temperature=arguments.temperature,
                top_p=arguments.top_p, top_k=arguments.top_k, seed=arguments.seed, stop=arguments.stop or []):
            if isinstance(piece, str):
                print(piece, end="", flush=True)
        report, timelines = {**info, **piece.as_json()}, [piece.timeline]
        print(f"\n\n{piece.summary()}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.trace:
        write_trace(timelines, arguments.trace)


def describe_device(model) -> str:
    return torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
