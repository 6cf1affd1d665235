"""The server's guards and errors: who may call it, what a body may be, and which reply an error becomes."""
import ipaddress
import json
import logging
import re
import select
import socket
from contextlib import closing, suppress

from flask import Response, abort, request
from werkzeug.exceptions import HTTPException

from common.requests import BadRequest, RequestError
from shell import to_json

MAX_BODY = 1 << 20                 # bytes of an HTTP request, many times a full context
DEFECT = "An error inside the server; its log has the details, and the engine continues."


# 1. Requests ------------------------------------------------------------------------------------------------

def loopback(host: str) -> bool:
    """Return True if a host name or address means this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def check_sender():
    """Refuse requests that come from other sites' pages, and changes from other machines (status 403).

    A page of another site may use a host name of its own that resolves to this machine."""
    host = re.sub(r":\d*$", "", request.host).strip("[]")       # ignore the port: a tunnel may use another
    if loopback(request.environ["SERVER_NAME"]) and not loopback(host):
        abort(403, "This server answers to localhost only; start it with --host for others.")
    origin = request.headers.get("Origin")
    if origin and origin.partition("://")[2] != request.host:
        abort(403, "Pages of other sites may not call this server.")
    if request.path in ("/evict", "/storage") and not (loopback(request.remote_addr) and loopback(host)):
        abort(403, f"{request.path} may be called from this machine only, as localhost.")


def read_body():
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


def has_left(client: socket.socket) -> bool:
    """Return True if the client has closed its connection or its half of it.

    On Linux this is noticed even while unread bytes are in the buffer."""
    poll = select.poll()
    poll.register(client, select.POLLIN | getattr(select, "POLLRDHUP", 0))
    with suppress(OSError):
        return any(what != select.POLLIN or not client.recv(1, socket.MSG_PEEK) for _, what in poll.poll(0))
    return True                                 # it cannot be read any more


# 2. Replies -------------------------------------------------------------------------------------------------

def explain(error: Exception) -> tuple[dict, int, dict]:
    """Return (body, status, headers) for an error. The body has one sentence for the user."""
    methods = getattr(error, "valid_methods", None)
    if isinstance(error, HTTPException):        # raised by Flask, or by `abort`
        status, words = error.code, error.description
        if words == type(error).description:    # werkzeug's own
            there = f"{request.method} {request.path[:80]} does not exist here; see GET / and GET /health."
            body = f"The body is larger than {MAX_BODY} bytes; send less."
            words = {404: there, 405: there, 413: body}.get(status, words)
        error = BadRequest(words)
        error.status = status
    if not isinstance(error, RequestError):
        logging.getLogger("kv").error("unexpected error", exc_info=error)
        error = RequestError(DEFECT)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers, said = {"Allow": ", ".join(methods)} if methods else {}, dict(message=str(error), type=kind)
    if error.code:
        asked = request and request.get_json(force=True, silent=True) or {}
        said |= dict(code=error.code, param="messages" if "messages" in asked else "prompt")
    return dict(error=said), error.status, headers


def events(chunks) -> Response:
    """Reply with server-sent events, one per chunk, and send the headers at once.

    The chunk None becomes a comment, so that clients and proxies do not give up a silent connection. If the
    client hangs up, `chunks` is closed."""
    def encode():
        with closing(chunks):
            yield ""                            # werkzeug sends the headers with the first item
            try:
                for chunk in chunks:
                    said = chunk if isinstance(chunk, str) else to_json(chunk)
                    yield ": waiting\n\n" if chunk is None else f"data: {said}\n\n"
            except Exception as error:          # too late for a status: send it as an event
                yield f"data: {to_json(explain(error)[0])}\n\n"
    return Response(encode(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"})
