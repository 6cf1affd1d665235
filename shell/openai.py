"""OpenAI's format: turn requests into arguments of Frontend.request, and pieces of text into replies."""
import json
import math
import time
import uuid

from flask import abort

from common.requests import BadRequest
from shell import read_words
from shell.frontend import FLAG, LABEL, OBJECT, PROMPT, SAMPLING, TEMPLATE, check_fields, number, only
from shell.guards import events, read_body

# Neutral values of unsupported fields of OpenAI, vLLM, SGLang and llama.cpp; a line has a value, and names
NEUTRAL = {name: json.loads(value) for value, *names in read_words("neutral.txt") for name in names}
LABELS = "model prompt_cache_key prompt_cache_retention request_id safety_identifier user"      # ignored
FIELDS = {                                      # in addition to SAMPLING; the same form
    "stream": FLAG, "stream_options": OBJECT, "max_completion_tokens": SAMPLING["max_tokens"],
    "tool_choice": only("auto", "none"), "function_call": only("auto", "none"), "parallel_tool_calls": FLAG,
    "service_tier": only("auto", "default"), "metadata": OBJECT, **dict.fromkeys(LABELS.split(), LABEL),
    "min_tokens": (number(0, 1 << 20), f"a whole number from 0 to {1 << 20}"),
    **{name: only(value) for name, value in NEUTRAL.items()}}
OPTIONS = {                                     # fields of stream_options
    "include_usage": FLAG, "include_obfuscation": only(False), "continuous_usage_stats": FLAG}


def parse(body, chat: bool, frontend) -> tuple[dict, bool, dict]:
    """Parse the body of a request in OpenAI's format. Raises BadRequest.

    `chat`: it is a chat completion; otherwise a completion.

    Returns: (arguments for Frontend.request, whether to stream, the options of the stream)."""
    prompt = "messages" if chat else "prompt"
    ours = {prompt: PROMPT[prompt], **TEMPLATE, **SAMPLING, **frontend.fields}
    special = {"add_special_tokens": only(not chat)}            # a chat template writes its own
    given = check_fields(body, {**ours, **FIELDS, **special})
    options = check_fields(given.get("stream_options", {}), OPTIONS)
    # OpenAI's defaults; /generate is greedy. A completion continues the text, without a chat template.
    asked = dict(temperature=1.0, max_tokens=math.inf if chat else 16, raw=not chat)
    asked |= {name: value for name, value in given.items() if name in ours}
    asked["max_tokens"] = given.get("max_completion_tokens", asked["max_tokens"])
    if given.get("min_tokens", 0) > (asked["max_tokens"] if given.get("ignore_eos") else 0):
        raise BadRequest("min_tokens is supported only with ignore_eos, and must be at most max_tokens.")
    return asked, given.get("stream", False), options


def replies(asked, pieces, chat: bool, model: str, stream: bool, options: dict):
    """Yield one complete reply, or else the chunks of a stream and then the string [DONE].

    `asked`: the Request. `pieces`: pieces of its text, and None where there is nothing new. `model`: the name
    in each reply. `options`: of a stream, see OPTIONS."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = dict(id=name, object=kind, created=int(time.time()), model=model)
    with_usage = options.get("include_usage", False)
    usage_in_each = not stream or with_usage and options.get("continuous_usage_stats")
    if stream and with_usage:
        head["usage"] = None

    def usage() -> dict:
        used = asked.usage
        return dict(used, total_tokens=used["prompt_tokens"] + used["completion_tokens"],
                    prompt_tokens_details=dict(cached_tokens=used["cached_tokens"]))

    def reply(text: str, reason: str | None = None, **role):
        content = {"delta" if stream else "message": dict(role, content=text)} if chat else dict(text=text)
        choice = dict(index=0, finish_reason=reason, logprobs=None, **content)
        return dict(head, choices=[choice], **dict(usage=usage()) if usage_in_each else {})

    first = dict(role="assistant")  # in one chunk only: clients concatenate roles
    for piece in pieces:
        if stream:
            # No chunk comes before the first text, because some programs take the first chunk's time as TTFT
            yield piece and reply(piece, **first)
            first = {} if piece else first
    if stream:
        yield reply("", asked.finish_reason, **first)
        if with_usage:
            yield dict(head, choices=[], usage=usage())
        yield "[DONE]"
    else:
        yield reply(asked.text, asked.finish_reason, **first)


def add_routes(app, answer, frontend, model: str):
    """Add OpenAI's routes to a Flask app.

    `answer(fields)` submits a request. Returns: the Request, and its pieces as `replies` takes them."""
    @app.post("/v1/chat/completions", defaults=dict(chat=True))
    @app.post("/v1/completions", defaults=dict(chat=False))
    def complete(chat: bool):
        fields, streaming, options = parse(read_body(), chat, frontend)
        chunks = replies(*answer(fields), chat, model, streaming, options)
        return events(chunks) if streaming else next(chunks)

    @app.get("/v1/models", defaults=dict(name=""))
    @app.get("/v1/models/<path:name>")          # a folder's name has slashes
    def models(name: str):
        if name not in ("", model.lstrip("/")):
            abort(404, f"The only model here is {model!r}; ask for that.")
        entry = dict(id=model, object="model", created=0, owned_by="local")
        return entry if name else dict(object="list", data=[entry])
