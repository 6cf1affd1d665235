"""A file of requests in, a file of replies out, in OpenAI's batch format.

    python 0N_name.py --batch requests.jsonl --out replies.jsonl

A line of the one is a request, with a custom_id that no other line has:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 20}}

where url may be /v1/completions too, and body is what the server takes there, but for streams. A line of the other is a reply,
written when it is complete, so that they come in another order:

    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

A line that is no request gets a reply with the status_code that the server would give and {"error": {"message", "type"}} as its
body, and so does a request that fails; custom_id is null where it is unknown. The others go on.

The id of a reply is a hash of the number and the content of its line. So the same command, started again after whatever ended it,
sees which lines have their reply, keeps those as they are, and goes on with the rest; a reply that was being written is cut off
and its request answered again. Requests may be added at the end of the file meanwhile. To have some answered again, delete their
replies.

A chapter hands `add_arguments`, `check` and `answer` to app.main; `requests_in` tells it how long the requests are.
"""
import codecs
import hashlib
import json
import sys
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from legacy import app
from legacy.app import BadRequest, Busy, Closing, RequestError
from legacy.timeline import Timeline

try:
    import fcntl
except ImportError:                # not on Windows: nobody locks there
    fcntl = None

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LINE = {
    "custom_id": (lambda v: isinstance(v, str), "a string"),
    "method": (lambda v: v == "POST", "POST"),
    "url": (lambda v: isinstance(v, str) and v in (CHAT, TEXT), f"{CHAT} or {TEXT}"),
    "body": (lambda v: isinstance(v, dict), "a JSON object"),
}


# 1. The request file ---------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Line:
    """A line of the request file. `error`: what is wrong with it, if it is no request."""
    number: int                    # from 1, empty lines included
    id: str                        # of its reply
    custom_id: str | None = None
    chat: bool = False
    body: dict | None = None
    error: BadRequest | None = None

    def parse(self, raw: bytes, used: dict[str, int]):
        """`used`: custom_id -> the line that has it. Raises BadRequest."""
        asked = app.parse_json(raw.removeprefix(codecs.BOM_UTF8), "The line")
        custom_id = asked.get("custom_id") if isinstance(asked, dict) else None
        if isinstance(custom_id, str):
            self.custom_id = custom_id
            if used.setdefault(custom_id, self.number) != self.number:
                raise BadRequest(f"custom_id {custom_id[:40]!r} is that of line {used[custom_id]}; each line needs its own.")
        asked = app.check_fields(asked, LINE, "The line")
        if missing := [name for name in LINE if name not in asked]:
            raise BadRequest(f"The line needs {', '.join(LINE)}; it has no {missing[0]}.")
        self.chat, self.body = asked["url"] == CHAT, asked["body"]

    def fields(self, tokenizer, more: dict) -> dict:
        """-> what the submit of an engine takes whose own fields are `more`. Raises BadRequest."""
        if self.error:
            raise self.error
        fields, streaming, _ = app.openai_fields(self.body, self.chat, tokenizer, more)
        if streaming:
            raise BadRequest("stream must be false: in a file of replies each is written when it is complete.")
        return fields


def numbered(path: Path):
    """-> (number, id of its reply, content) of each line that is not empty. Raises OSError."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw := raw.strip():
                    yield number, f"batch_req_{hashlib.sha256(b'%d %s' % (number, raw)).hexdigest()[:32]}", raw
    except OSError as error:
        raise OSError(f"Cannot read '{path}' ({error.strerror}); give --batch a file of requests.") from None


def read(path: Path):
    """-> an iterator over the Lines, one after the other; those that are no requests say so. Raises OSError."""
    used = {}
    for number, line_id, raw in numbered(path):
        line = Line(number, line_id)
        try:
            line.parse(raw, used)
        except BadRequest as error:
            line.error = error
        yield line


def requests_in(path: Path, frontend, fields: dict | None = None):
    """-> an iterator of (tokens of the prompt, max_tokens at most) over the samples of the valid lines. Raises OSError.

    `frontend`, a Frontend of chapter 01 or any engine, checks and encodes them. `fields`: those of the engine that will answer
    (`engine.fields`), where they are not the frontend's."""
    more = frontend.fields if fields is None else fields
    for line in read(path):
        try:
            asked = line.fields(frontend.tokenizer, more)
            request = frontend.request(**{name: value for name, value in asked.items() if name not in more})
        except BadRequest:
            continue
        for _ in range(asked.get("n", 1)):
            yield len(request.tokens), request.max_tokens


# 2. The file of replies ------------------------------------------------------------------------------------------

class Replies:
    """The out file, which nobody else writes meanwhile: which lines have their reply, and how another is added.

    Raises OSError where a file cannot be read or written, BadRequest where the out file holds something else."""

    def __init__(self, requests: Path, path: Path):
        self.requests, self.path = requests, path
        self.ids = {line_id for _, line_id, _ in numbered(requests)}
        self.done: set[str] = set()                             # ids of the replies that are written
        self.errors = 0                                         # how many of them
        try:
            self.file = path.open("a+b", buffering=0)
        except OSError as error:
            raise OSError(f"Cannot write '{path}' ({error.strerror}); choose another --out.") from None
        try:
            self.lock()
            self.resume()
        except BaseException:
            self.close()
            raise

    def lock(self):
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)       # until it is closed, however this process ends
        except BlockingIOError:
            raise OSError(f"Another process is writing '{self.path}'; wait for its end, or choose another --out.") from None
        except OSError:                                         # a file system without locks
            pass

    def resume(self):
        """See what is written, and cut off what is torn."""
        end = 0
        self.file.seek(0)
        with open(self.file.fileno(), "rb", closefd=False) as written:
            for number, raw in enumerate(written, 1):
                try:
                    reply = json.loads(raw) if raw.endswith(b"\n") else None
                    known, failed = reply["id"] in self.ids, reply["response"]["status_code"] != 200
                except (ValueError, RecursionError, KeyError, TypeError):
                    if next(written, None) is None and self.is_torn(raw):
                        break
                    known = False
                if not known:
                    raise BadRequest(f"Line {number} of '{self.path}' is no reply to a line of '{self.requests}'; "
                                     "choose another --out, or the --batch that it belongs to.")
                self.done.add(reply["id"])
                self.errors += failed
                end += len(raw)
        self.file.truncate(end)

    def is_torn(self, raw: bytes) -> bool:
        """Whether this may have been written for one of the requests, as far as it goes."""
        beginnings = (f'{{"id": "{line_id}"'.encode() for line_id in self.ids)
        return any(beginning.startswith(raw[:len(beginning)]) for beginning in beginnings)

    def append(self, line: Line, status: int, body: dict):
        response = dict(status_code=status, request_id=uuid.uuid4().hex, body=body)
        raw = json.dumps(dict(id=line.id, custom_id=line.custom_id, response=response, error=None)).encode() + b"\n"
        try:
            while raw:                                          # once, unless the disk is full
                raw = raw[self.file.write(raw):]
        except OSError as error:
            raise OSError(f"Cannot write '{self.path}' ({error.strerror}); {self.so_far()}.") from None
        self.done.add(line.id)
        self.errors += status != 200

    def so_far(self) -> str:
        return f"{len(self.done)} of {len(self.ids)} replies are written, and the same command goes on from there"

    def close(self):
        self.file.close()


def opened(arguments) -> Replies:
    """What --batch and --out ask for. Raises BadRequest or OSError, and has changed nothing then."""
    requests, out = arguments.batch, arguments.out
    if requests is None or out is None:
        raise BadRequest("--batch FILE and --out FILE go together: the requests, and where the replies go.")
    if arguments.demo or arguments.prompt is not None:
        raise BadRequest("--batch answers the requests in a file; leave --demo and --prompt out.")
    for option, path in (("--batch", requests), ("--out", out)):
        if path.exists() and not path.is_file():
            raise OSError(f"'{path}' is no file; give {option} a file.")
    options = {}
    for option, path in (("--batch", requests), ("--out", out), ("--json", arguments.json), ("--trace", arguments.trace)):
        if path and (other := options.setdefault(path.resolve(), option)) != option:
            raise BadRequest(f"{other} and {option} are the same file, '{path}'; choose another {option}.")
    return Replies(requests, out)


# 3. Answering ----------------------------------------------------------------------------------------------------

def add_arguments(parser):
    parser.add_argument("--batch", type=Path, metavar="FILE",
                        help="answer the requests in FILE, one JSON object a line as OpenAI's batches have them, and end")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="where the replies of --batch are added; those that are there already are kept")


def check(arguments):
    """For app.main: refuse wrong files before the model is loaded. Raises BadRequest or OSError."""
    if arguments.batch is not None or arguments.out is not None:
        opened(arguments).close()


def answer(engine, arguments):
    """--batch: answer what has no reply yet -> what app.main's actions return. Raises BadRequest or OSError."""
    with closing(opened(arguments)) as replies:
        before, began, taken = len(replies.done), time.perf_counter(), dict(prompt_tokens=0, completion_tokens=0)
        timeline = Timeline()
        lines = (line for line in read(arguments.batch) if line.id not in replies.done)
        try:
            with tqdm(total=len(replies.ids), initial=before, unit="request", disable=None) as bar:
                for line, outcomes in answered(engine, lines):
                    status, body = reply(line, outcomes, arguments.model)
                    replies.append(line, status, body)
                    bar.update()
                    if status == 200:
                        timeline = outcomes[-1].timeline
                        for name in taken:
                            taken[name] += body["usage"][name]
        except KeyboardInterrupt:
            print(f"\n{replies.so_far()}.", file=sys.stderr)
            raise
        seconds = time.perf_counter() - began
        row = dict(replies=len(replies.done), errors=replies.errors, before=before, **taken, seconds=seconds,
                   tokens_per_second=taken["completion_tokens"] / seconds)
        print(f"{row['replies']} replies in '{arguments.out}', {row['errors']} of them errors, {before} of them there before; "
              f"{row['completion_tokens']} new tokens, {row['tokens_per_second']:.1f} tokens/s")
    return dict(rows=[row], counters=engine.counters()), [timeline]


def answered(engine, lines):
    """Have an engine of chapter 02's kind answer the Lines -> an iterator of (line, outcomes of its samples: Results or
    exceptions), in the order in which they are over. In the engine's line stand as many as it can run, and no more."""
    ahead, outstanding, more = min(engine.max_running, engine.max_waiting), {}, True
    while more or outstanding:
        # 1. Who comes next stands in line
        while more and len(engine.waiting) < ahead:
            line = next(lines, None)
            if more := line is not None:
                try:
                    outstanding[line] = engine.submit(**line.fields(engine.tokenizer, engine.fields))
                except Exception as error:
                    yield line, [error]

        # 2. One step. After a defect nobody waits for ever
        try:
            defect = None if engine.step() else RuntimeError("it has nothing left to do and has not answered")
        except Exception as error:
            defect = error
        for samples in outstanding.values() if defect else ():
            for sample in samples:
                engine.finish(sample, defect, "failed")         # which does nothing to those that are over

        # 3. Who is over leaves
        for line in [line for line, samples in outstanding.items() if all(sample.outcome is not None for sample in samples)]:
            yield line, [sample.outcome for sample in outstanding.pop(line)]


def reply(line: Line, outcomes: list, model: str) -> tuple[int, dict]:
    """-> status and body. Raises Busy or Closing where the engine takes nothing more: that is no answer to be kept."""
    error = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
    if isinstance(error, (Busy, Closing)):
        raise error
    if error is None:
        return 200, app.openai_reply(outcomes, line.chat, model)
    if not isinstance(error, RequestError):
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        error = RequestError(f"An error inside the engine ({said}); the other requests go on.")
    return error.status, dict(error=dict(message=f"Line {line.number}: {error}", type=error.kind))
