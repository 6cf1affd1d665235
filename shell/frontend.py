"""Turn a user's input into a Request: check fields, apply the chat template, stop at stop strings.

`result_json` turns a finished Request into JSON."""
import codecs
import json
import re
import time
from functools import cached_property
from itertools import compress

from tokenizers import Tokenizer, normalizers

from common.requests import BadRequest, Request, TooLong
from shell import charts

# 1. Fields --------------------------------------------------------------------------------------------------

def number(low: float, high: float, kinds=int):
    """Return a predicate: True for a number of type `kinds` from `low` to `high`."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def whole(value):
    """Return a float without a fraction as an int (16.0 as 16), and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text(value) -> bool:
    """Return True for a string without lone surrogates."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def stop_strings(value) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= 16 and all(text(stop) and 1 <= len(stop) <= 256 for stop in stops)


def text_parts(value) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and text(part.get("text")) for part in value)


def only(*values) -> tuple:
    """Return the check of an unsupported field: only `values`, which change nothing, are accepted."""
    written = [*map(json.dumps, values)]        # so that true is not 1
    return lambda v: json.dumps(v) in written, f"{' or '.join(written)}: more is not supported"


FLAG = (lambda v: isinstance(v, bool), "true or false")
LABEL = (text, "a string")
OBJECT = (lambda v: isinstance(v, dict), "an object")
UNSET = "seed", "top_k", "max_tokens", "max_completion_tokens"     # clients of vLLM ask for a default by -1
# name -> (predicate, the words of an error: "NAME must be ...")
SAMPLING = {
    "max_tokens": (number(1, 1 << 20), f"a whole number from -1 (not set) or 1 to {1 << 20}"),
    "temperature": (number(0, 100, (int, float)), "a number from 0 (greedy) to 100"),
    "top_p": (number(0, 1, (int, float)), "a number from 0 (the likeliest token only) to 1"),
    "top_k": (number(0, 1 << 20), f"a whole number from -1 or 0 (no limit) to {1 << 20}"),
    "seed": (number(0, (1 << 63) - 1), f"a whole number from -1 (a random seed) to {(1 << 63) - 1}"),
    "stop": (stop_strings, "a string of 1 to 256 characters or a list of at most 16 of them"),
    "ignore_eos": FLAG,
}
TEMPLATE = {"chat_template_kwargs": OBJECT, "enable_thinking": FLAG, "reasoning_effort": LABEL}
PROMPT = {
    "prompt": (lambda v: text(v) or isinstance(v, list), "a string or a list of token ids"),
    "messages": (lambda v: isinstance(v, list), "a list of messages"),
    **TEMPLATE,
}
ROLES = ["system", "developer", "user", "assistant"]
MESSAGE = {
    "role": (ROLES.__contains__, "system, developer, user or assistant"),
    "content": (lambda v: text(v) or text_parts(v), "text in UTF-8"),
    "name": LABEL, "id": LABEL, "cache_control": OBJECT, "provider_specific_fields": OBJECT,   # ignored
    **dict.fromkeys(("refusal", "reasoning", "reasoning_content", "thinking", "tool_call_id"), only("")),
    "prefix": only(False), "partial": only(False),
}


def check_fields(body, fields: dict, what: str = "The body", needed: str = "") -> dict:
    """Check the fields of a JSON object. Raises BadRequest.

    A field of any name whose value is null, [] or {} counts as not set.

    `fields`: name -> (predicate, words), as SAMPLING has them. `what`: the object's name in errors. `needed`:
    the name of a field that must be set.

    Returns: the fields that are set."""
    if not isinstance(body, dict):
        raise BadRequest(f"{what} must be a JSON object.")
    asked = {name: whole(value) for name, value in body.items()
             if value not in (None, [], {}) and (value != -1 or name not in UNSET)}
    for name, value in asked.items():
        if name not in fields:
            supported = [field for field, (_, words) in fields.items() if not words.endswith("not supported")]
            raise BadRequest(f"Unknown field {name[:40]!r}; the fields are {', '.join(supported)}.")
        test, wanted = fields[name]
        if not test(value):
            raise BadRequest(f"{name} must be {wanted}.")
    if needed and needed not in asked:
        raise BadRequest(f"{what} needs {needed}.")
    return asked


def check_messages(messages) -> list[dict]:
    """Check OpenAI's messages. Raises BadRequest.

    Returns: [{role, content}], with each content as one string."""
    checked = []
    for message in messages:
        message = check_fields(message, MESSAGE, "Each message", needed="role")
        content = message.get("content", "")    # a message with tool calls has no content
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        checked.append(dict(role=message["role"].replace("developer", "system"), content=content))
    if not checked or not checked[-1]["content"]:
        raise BadRequest("The prompt, or the last of the messages, must not be empty.")
    return checked


# 2. Text ----------------------------------------------------------------------------------------------------

BYTE = re.compile("<0x([0-9A-F]{2})>")          # the name of a token that is one byte


class Writer:
    """A decoder of one answer: it turns tokens into text one by one, up to a stop string.

    It holds back text that may be the beginning of a stop string. Special tokens are not part of the text,
    but they may be part of a stop string.

    `stop`: a stop string or several. `before`: the tokens that the answer continues. They are decoded as
    context, because a tokenizer drops the space at the beginning of a text. They may end inside a character:
    if the answer completes it, the character belongs to the answer."""

    def __init__(self, tokenizer, stop: str | list[str] = (), before: list[int] = ()):
        self.tokenizer = tokenizer.backend_tokenizer
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {number: token.content for number, token in added if token.special}
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.before = self.context = list(before[-16:])         # decoded before each new token
        text = self.tokenizer.decode(self.context)
        self.decoded = len(text.rstrip("\ufffd"))      # characters that are not new
        self.broken = text[self.decoded:]               # what `before` shows of an incomplete last character
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self.before:
            byte = BYTE.fullmatch(self.tokenizer.id_to_token(token) or "")
            self.utf8.decode(bytes.fromhex(byte[1]) if byte else b"", final=not byte)
        self.held, self.visible = "", []        # held back, and which characters are visible
        self.text, self.stopped = "", False

    def decode(self, token: int) -> str:
        """Return the text that a token adds, without a last character that is still incomplete."""
        if byte := BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            text, is_open = self.utf8.decode(bytes.fromhex(byte[1])), False
        else:
            self.context = [*self.context, token]
            whole = self.tokenizer.decode(self.context)
            certain = whole.rstrip("\ufffd")
            broken, text = self.utf8.decode(b"", final=True), certain[self.decoded:]
            text, is_open = text.removeprefix(self.broken) if self.broken else broken + text, certain != whole
            self.decoded = max(self.decoded, len(certain))
        if not is_open:
            self.context, self.decoded, self.broken = [token], len(self.tokenizer.decode([token])), ""
        return text

    def push(self, token: int, is_end: bool = False) -> str:
        """Add a token and return the text that can be released now.

        `is_end`: the token ends the answer and is never visible. Returns: "" while a character is incomplete,
        or while the text may still turn out to be a stop string."""
        hidden = self.tokenizer.id_to_token(token) or "" if is_end else self.special.get(token)
        piece = self.decode(token) if hidden is None else hidden
        self.held += piece
        self.visible += [hidden is None] * len(piece)
        start = self.first(lambda rest: rest.startswith(tuple(self.stop)))
        if start < len(self.held):
            self.stopped, self.held = True, self.held[:start]
            return self.release(start)
        return self.release(self.first(lambda rest: any(stop.startswith(rest) for stop in self.stop)))

    def first(self, test) -> int:
        """Return the first index from which the held text passes `test`, with or without its special tokens.

        Returns: the length of the held text if there is no such index."""
        some_hidden = not all(self.visible)
        for start in range(len(self.held)):
            rest = self.held[start:]
            if test(rest) or some_hidden and test("".join(compress(rest, self.visible[start:]))):
                return start
        return len(self.held)

    def release(self, end: int) -> str:
        """Release the first `end` characters that are held back, and return the visible ones."""
        piece = "".join(compress(self.held[:end], self.visible))
        self.text, self.held, self.visible = self.text + piece, self.held[end:], self.visible[end:]
        return piece


# 3. Requests ------------------------------------------------------------------------------------------------

LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class Frontend:
    """Makes a Request from a prompt or messages, for one model and its tokenizer.

    `fields`: the chapter's own request fields, in the form of SAMPLING."""

    def __init__(self, model, tokenizer, end_tokens, fields: dict | None = None):
        self.special_ids = Writer(tokenizer).special
        words = sorted(self.special_ids.values(), key=len, reverse=True)
        self.special = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})")
        self.model, self.tokenizer, self.end_tokens = model, tokenizer, frozenset(end_tokens)
        self.fields = fields or {}
        self.context = model.config.max_position_embeddings     # tokens, including the answer
        self.longest = max(map(len, tokenizer.backend_tokenizer.get_vocab()))   # characters in a token

    def request(self, prompt=None, messages=None, raw: bool = False, received=None, **asked) -> Request:
        """Make a Request. Raises BadRequest.

        `prompt`: a user's message as a string, or a list of token ids, or a list with one of these in it.
        `messages`: a conversation, [{role, content}]. `raw`: do not apply the chat template; the answer
        continues the string. `received`: the arrival time, in seconds of time.perf_counter(). `asked`: the
        fields of TEMPLATE, SAMPLING and the chapter; `check_fields` must have checked them."""
        received = received or time.perf_counter()
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt[:2]):
            if len(prompt) > 1:
                raise BadRequest("prompt must be one prompt; send a request for each.")
            prompt, = prompt
        raw = raw or isinstance(prompt, list) or self.tokenizer.chat_template is None
        variables = asked.pop("chat_template_kwargs", {})
        if effort := asked.get("reasoning_effort"):
            variables = {"enable_thinking": effort != "none", **variables}      # as in vLLM
        variables = {**variables, **{name: asked.pop(name) for name in TEMPLATE if name in asked}}
        tokens = self.encode(prompt, messages, raw, variables)
        max_tokens = min(asked.pop("max_tokens", 128), self.context - len(tokens))
        writer = Writer(self.tokenizer, asked.pop("stop", ()), tokens if raw else ())
        options = {name: asked.pop(name) for name in self.fields if name in asked}
        end_tokens = frozenset() if asked.pop("ignore_eos", False) else self.end_tokens
        return Request(tokens, max_tokens, options=options, end_tokens=end_tokens, writer=writer,
                       received=received, **asked)

    def encode(self, prompt, messages, raw: bool = False, variables: dict | None = None) -> list[int]:
        """Return the tokens of a prompt, or of messages. Raises BadRequest.

        `raw`: do not apply the chat template to a prompt. `variables`: of the chat template."""
        if (prompt is None) == (messages is None):
            raise BadRequest("Give either prompt or messages, not both and not empty.")
        if isinstance(prompt, list):
            tokens = [*map(whole, prompt)]
        else:
            self.check_length(len(messages or ()), "messages")  # each takes at least one token
            said = check_messages([dict(role="user", content=prompt)] if messages is None else messages)
            self.check_length(sum(len(message["content"]) for message in said), "characters", self.longest)
            raw = raw and messages is None
            tokens = self.tokenizer.encode(prompt) if raw else self.converse(said, variables)
            if tokens[:2] == [self.tokenizer.bos_token_id] * 2:
                tokens = tokens[1:]             # the prompt began with one
        self.check_length(len(tokens), "tokens")
        top = self.model.config.vocab_size - 1
        if not tokens or not all(map(number(0, top), tokens)):
            raise BadRequest(f"Token ids must be from 0 to {top}; give at least one.")
        return tokens

    def check_length(self, count: int, what: str, most: int = 1):
        """Raise TooLong if a prompt cannot fit in the context.

        `count`: its length in units of `what`. `most`: how many of these a token may hold."""
        if count >= self.context * most:
            raise TooLong(f"The prompt is {count} {what}, and the context of this model is {self.context} "
                          "tokens, answer included; shorten the prompt.")

    def converse(self, messages: list[dict], variables: dict | None = None) -> list[int]:
        """Return the tokens of a conversation. `variables`: see `encode`. Raises BadRequest.

        Only the chat template may write special tokens. The text of a special token in a message is encoded
        as ordinary text, so that a message cannot end itself and begin another one."""
        said = "".join(message["content"] for message in messages)
        begin = self.tokenizer.chat_template is None            # a template writes its own
        if not self.special.search(said):
            return self.tokenizer.encode(self.render(messages, variables), add_special_tokens=begin)
        gap = next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in said)
        # Put a letter that no message contains between the letters of a special token's text, so that the
        # tokenizer finds only the template's special tokens. After that, its normalizer removes the letter.
        text = self.render([dict(message, content=self.special.sub(
            lambda word: gap.join(word[0]) + gap, message["content"])) for message in messages], variables)
        backend, cleaner = self.tokenizer.backend_tokenizer, self.cleaner
        remove = normalizers.Replace(gap, "")
        cleaner.normalizer = normalizers.Sequence([remove, *filter(None, [backend.normalizer])])
        spaced, plain = (each.encode(text, add_special_tokens=begin).ids for each in (backend, cleaner))
        counts = {sum(token in self.special_ids for token in tokens) for tokens in (spaced, plain)}
        # A Unigram model has special tokens among its words, and would write one without the letter.
        return plain if len(counts) == 1 else spaced

    @cached_property
    def cleaner(self) -> Tokenizer:
        """A copy of the tokenizer that finds special tokens before it normalizes the text.

        Special tokens that the normalizer would change are still found after it."""
        backend = self.tokenizer.backend_tokenizer
        state, normalizer = json.loads(backend.to_str()), backend.normalizer or normalizers.Sequence([])
        for token in state["added_tokens"]:
            if token["special"] and normalizer.normalize_str(token["content"]) == token["content"]:
                token["normalized"] = False
        return Tokenizer.from_str(json.dumps(state))

    def render(self, messages: list[dict], variables: dict | None = None) -> str:
        """Return a conversation as text: by the chat template, or else with one line per message.

        `variables`: see `encode`. Raises BadRequest if the template refuses them or the order of roles."""
        variables = variables or {}
        if self.special.search(json.dumps(variables, ensure_ascii=False)):
            raise BadRequest("chat_template_kwargs must not contain special tokens.")
        template = LINES if self.tokenizer.chat_template is None else None      # None: the tokenizer's own
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **variables)
        except Exception as error:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise BadRequest(f"The model's chat template refuses these messages ({error}).") from None
        # Some templates have no system role: put the system's message before the user's first message.
        said = "\n\n".join(message["content"] for message in messages[:2])
        return self.render([dict(role="user", content=said), *messages[2:]], variables)


def result_json(request) -> dict:
    """-> a finished request as the server's JSON. Times are in milliseconds."""
    names = "id", "text", "finish_reason", "usage", "source", "found", "decisions", "ttft_ms", "tbt_ms"
    result = {name: getattr(request, name) for name in names}
    return result | dict(tokens=request.new, timeline=charts.spans(request.timeline))
