"""OpenAI's format: from requests to arguments of Frontend.request, from pieces of text to replies."""
import json
import math
import time
import uuid

from shell.frontend import PROMPT, SAMPLING, check_fields, text


def only(*values) -> tuple:
    """Return the check of a field that is not supported: it may have `values`, which ask for nothing."""
    written = [*map(json.dumps, values)]        # JSON's true is not 1
    return lambda v: json.dumps(v) in written, f"{' or '.join(written)}: more is not supported"


FLAG = (lambda v: isinstance(v, bool), "true or false")
LABEL = (text, "a string")                      # changes nothing
OBJECT = (lambda v: isinstance(v, dict), "an object")
FIELDS = {                                      # besides SAMPLING's; name -> (test, what it must be)
    "stream": FLAG, "stream_options": OBJECT, "max_completion_tokens": SAMPLING["max_tokens"],
    "n": only(1), "best_of": only(1), "echo": only(False), "suffix": only(""), "logprobs": only(False),
    "top_logprobs": only(0), "presence_penalty": only(0), "frequency_penalty": only(0), "store": only(False),
    "tool_choice": only("auto", "none"), "function_call": only("auto", "none"), "parallel_tool_calls": FLAG,
    "service_tier": only("auto", "default"), "modalities": only(["text"]), "metadata": OBJECT,
    "response_format": only({"type": "text"}), "model": LABEL, "user": LABEL, "safety_identifier": LABEL,
    "prompt_cache_key": LABEL}
OPTIONS = {"include_usage": FLAG, "include_obfuscation": only(False)}       # of a stream


def parse(body, chat: bool, frontend) -> tuple[dict, bool, bool]:
    """Turn the body of a chat, or else of a completion, into arguments for Frontend.request, whether to
    stream, and whether the stream ends with its usage. Raises BadRequest."""
    prompt = "messages" if chat else "prompt"
    given = check_fields(body, {prompt: PROMPT[prompt], **SAMPLING, **frontend.fields, **FIELDS})
    options = check_fields(given.get("stream_options", {}), OPTIONS)
    asked = dict(temperature=1.0, max_tokens=math.inf if chat else 16)  # OpenAI's; ours is greedy
    asked |= {name: value for name, value in given.items() if name not in FIELDS}
    asked["max_tokens"] = given.get("max_completion_tokens", asked["max_tokens"])
    asked["raw"] = not chat                     # a completion continues the text as it stands
    return asked, given.get("stream", False), options.get("include_usage", False)


def replies(pieces, chat: bool, model: str, stream: bool, with_usage: bool):
    """Yield one whole reply, or the chunks of a stream and last the string [DONE]."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = dict(id=name, object=kind, created=int(time.time()), model=model)
    if stream and with_usage:
        head["usage"] = None

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
