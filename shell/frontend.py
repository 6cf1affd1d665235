"""What is asked -> a Request: fields and their checks, chat templates, text with stop strings."""
import codecs
import re
import time
from itertools import compress

from common.requests import BadRequest, Request

# 1. Fields --------------------------------------------------------------------------------------------------

def number(low: float, high: float, kinds=int):
    """Return a test: whether a value is a number from `low` to `high`."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def whole(value):
    """Return a float without a fraction as an int, as 16 for 16.0, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text(value, low: int = 0, high: float = float("inf")) -> bool:
    """Test for a string of `low` to `high` characters, without lone surrogates."""
    return isinstance(value, str) and low <= len(value) <= high and not re.search("[\ud800-\udfff]", value)


def stop_strings(value) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= 16 and all(text(stop, 1, 256) for stop in stops)


def text_parts(value) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and text(part.get("text")) for part in value)


UNSET = ("seed", -1), ("top_k", -1)             # as clients of vLLM ask for the default
# name -> (test, what it must be)
SAMPLING = {
    "max_tokens": (number(1, 1 << 20), f"a whole number from 1 to {1 << 20}"),
    "temperature": (number(0, 100, (int, float)), "a number from 0 (greedy) to 100"),
    "top_p": (number(0, 1, (int, float)), "a number from 0 (the likeliest token only) to 1"),
    "top_k": (number(0, 1 << 20), f"a whole number from -1 or 0 (no limit) to {1 << 20}"),
    "seed": (number(0, (1 << 63) - 1), f"a whole number from -1 (a random seed) to {(1 << 63) - 1}"),
    "stop": (stop_strings, "a string of 1 to 256 characters or a list of at most 16 of them"),
}
PROMPT = {
    "prompt": (lambda v: text(v) or isinstance(v, list), "a string or a list of token ids"),
    "messages": (lambda v: isinstance(v, list), "a list of messages"),
}
ROLES = ["system", "developer", "user", "assistant"]
MESSAGE = {
    "role": (ROLES.__contains__, "system, developer, user or assistant"),
    "content": (lambda v: text(v) or text_parts(v), "text in UTF-8"),
    "name": (text, "a string"),
}


def check_fields(body, fields: dict, what: str = "The body", needed: str = "") -> dict:
    """Return the fields of a JSON object that are set; null, [] and {} ask for nothing, whatever the name.
    Raises BadRequest at one that is unknown or wrong, and where the one `needed` is not set."""
    if not isinstance(body, dict):
        raise BadRequest(f"{what} must be a JSON object.")
    asked = {name: whole(value) for name, value in body.items()
             if value not in (None, [], {}) and (name, value) not in UNSET}
    for name, value in asked.items():
        if name not in fields:
            raise BadRequest(f"Unknown field {name[:40]!r}; the fields are {', '.join(fields)}.")
        test, wanted = fields[name]
        if not test(value):
            raise BadRequest(f"{name} must be {wanted}.")
    if needed and needed not in asked:
        raise BadRequest(f"{what} needs {needed}.")
    return asked


def check_messages(messages) -> list[dict]:
    """Turn OpenAI's messages into [{role, content}] with strings as contents. Raises BadRequest."""
    checked = []
    for message in messages:
        message = check_fields(message, MESSAGE, "Each message", needed="role")
        content = message.get("content", "")    # an answer that called tools has none
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        checked.append(dict(role=message["role"].replace("developer", "system"), content=content))
    if not checked or not checked[-1]["content"]:
        raise BadRequest("The prompt, or the last of the messages, must not be empty.")
    return checked


# 2. Text ----------------------------------------------------------------------------------------------------

BYTE = re.compile("<0x([0-9A-F]{2})>")          # a token of one byte, in a vocabulary of words


class Writer:
    """Turn tokens into text one by one; hold back what may be the beginning of a stop string. Special tokens
    are not part of the text, but may be part of a stop string.

    before: the tokens that this text continues. A decoder that begins anew drops the first space."""

    def __init__(self, tokenizer, stop: str | list[str] = (), before: list[int] = ()):
        self.tokenizer = tokenizer.backend_tokenizer
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {number: token.content for number, token in added if token.special}
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.before = self.context = list(before[-16:])         # the context tells where a space belongs
        self.decoded = len(self.tokenizer.decode(self.context))     # characters of it that are not new
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.held, self.visible = "", []        # not released yet, and whether each character is for the text
        self.text, self.stopped = "", False

    def decode(self, token: int) -> str:
        """Return the text that a token adds, without a character at its end that is still open."""
        if byte := BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            text, is_open = self.utf8.decode(bytes.fromhex(byte[1])), False
        else:
            self.context = [*self.context, token]
            whole = self.tokenizer.decode(self.context)
            certain = whole.rstrip("\ufffd")
            text, is_open = self.utf8.decode(b"", final=True) + certain[self.decoded:], certain != whole
            self.decoded = max(self.decoded, len(certain))
        if not is_open:
            self.context, self.decoded = [token], len(self.tokenizer.decode([token]))
        return text

    def push(self, token: int, is_end: bool = False) -> str:
        """Return the text that is certain after this token; "" while a character or stop string is open."""
        hidden = self.tokenizer.id_to_token(token) or "" if is_end else self.special.get(token)
        piece = self.decode(token) if hidden is None else hidden
        self.held += piece
        self.visible += [hidden is None] * len(piece)
        start = self.first(lambda rest: rest.startswith(tuple(self.stop)))
        if start < len(self.held):
            self.stopped = True
            piece, self.held = self.release(start), ""
            return piece
        return self.release(self.first(lambda rest: any(stop.startswith(rest) for stop in self.stop)))

    def first(self, test) -> int:
        """Return from where on the held text passes `test`, with special tokens or without; or its length."""
        some_hidden = not all(self.visible)
        for start in range(len(self.held)):
            rest = self.held[start:]
            if test(rest) or some_hidden and test("".join(compress(rest, self.visible[start:]))):
                return start
        return len(self.held)

    def release(self, end: int) -> str:
        """Return the text of the first `end` characters that are held back, and hold the rest."""
        piece = "".join(compress(self.held[:end], self.visible))
        self.text, self.held, self.visible = self.text + piece, self.held[end:], self.visible[end:]
        return piece


# 3. From what is asked to a Request -------------------------------------------------------------------------

LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class Frontend:
    """Make requests of what is asked. `fields`: the chapter's own, as in SAMPLING."""

    def __init__(self, model, tokenizer, end_tokens, fields: dict | None = None):
        words = sorted(Writer(tokenizer).special.values(), key=len, reverse=True)
        self.special = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})")
        self.model, self.tokenizer, self.end_tokens = model, tokenizer, frozenset(end_tokens)
        self.fields = fields or {}
        self.context = model.config.max_position_embeddings     # tokens, answer included
        self.longest = max(map(len, tokenizer.backend_tokenizer.get_vocab()))   # characters of a token

    def request(self, prompt=None, messages=None, raw: bool = False, received=None, **asked) -> Request:
        """Make a Request. `prompt`: one user's message as a string, or a list of token ids taken as they are,
        or one of these in a list. `messages`: a conversation [{role, content}]. `raw`: the answer continues
        the string. `received`: when, in seconds of time.perf_counter(). `asked`: SAMPLING and own fields,
        checked by `check_fields`. Raises BadRequest."""
        received = received or time.perf_counter()
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt[:2]):
            if len(prompt) > 1:
                raise BadRequest("prompt must be one prompt; send a request for each.")
            prompt, = prompt
        raw = raw or isinstance(prompt, list) or self.tokenizer.chat_template is None
        tokens = self.encode(prompt, messages, raw)
        self.check_length(len(tokens), "tokens")
        max_tokens = min(asked.pop("max_tokens", 128), self.context - len(tokens))
        writer = Writer(self.tokenizer, asked.pop("stop", ()), tokens if raw else ())
        options = {name: asked.pop(name) for name in self.fields if name in asked}
        return Request(tokens, max_tokens, options=options, end_tokens=self.end_tokens, writer=writer,
                       received=received, **asked)

    def encode(self, prompt, messages, raw: bool = False) -> list[int]:
        """Return the prompt's tokens; `raw`: a prompt stays as it is, outside any chat. Raises BadRequest."""
        if (prompt is None) == (messages is None):
            raise BadRequest("Give either prompt or messages, not both and not empty.")
        if isinstance(prompt, list):
            self.check_length(len(prompt), "tokens")            # what cannot fit is not looked at
            tokens = [*map(whole, prompt)]
        else:
            self.check_length(len(messages or ()), "messages")  # each takes a token at least
            said = check_messages([dict(role="user", content=prompt)] if messages is None else messages)
            self.check_length(sum(len(message["content"]) for message in said), "characters", self.longest)
            tokens = self.tokenizer.encode(prompt) if raw and messages is None else self.converse(said)
            if tokens[:2] == [self.tokenizer.bos_token_id] * 2:
                tokens = tokens[1:]             # the prompt has its own
        top = self.model.config.vocab_size - 1
        if not tokens or not all(map(number(0, top), tokens)):
            raise BadRequest(f"Token ids must be from 0 to {top}, one at least.")
        return tokens

    def check_length(self, count: int, what: str, most: int = 1):
        """Raise BadRequest at a prompt of `count` pieces, of which a token holds `most`, that cannot fit."""
        if count >= self.context * most:
            raise BadRequest(f"The prompt is {count} {what}, and the context of this model is {self.context} "
                             "tokens, answer included; shorten the prompt.")

    def converse(self, messages: list[dict]) -> list[int]:
        """Return the tokens of a conversation. Special tokens are the template's only: in a message they are
        encoded as the words that they look like, so that no message can end itself and begin another one."""
        said = "".join(message["content"] for message in messages)
        begin = self.tokenizer.chat_template is None            # a template writes what a text begins with
        if not self.special.search(said):
            return self.tokenizer.encode(self.render(messages), add_special_tokens=begin)
        gap = next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in said)
        # A letter that nobody says keeps the words of special tokens apart
        messages = [dict(message, content=self.special.sub(
            lambda word: gap.join(word[0]) + gap, message["content"])) for message in messages]
        tokens = self.tokenizer.encode("", add_special_tokens=begin)
        for index, part in enumerate(self.special.split(self.render(messages))):    # odd ones are special
            tokens += self.tokenizer.encode(part.replace(gap, ""), add_special_tokens=False,
                                            split_special_tokens=index % 2 == 0)
        return tokens

    def render(self, messages: list[dict]) -> str:
        """Return the text of a conversation; of a model without a chat template, a line for each message. A
        template may refuse an order of roles: raises BadRequest."""
        template = LINES if self.tokenizer.chat_template is None else None      # None: the tokenizer's own
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise BadRequest(f"The model's chat template refuses these messages ({error}).") from None
        # Some have no system role: what it says goes before what the user says first
        said = "\n\n".join(message["content"] for message in messages[:2])
        return self.render([dict(role="user", content=said), *messages[2:]])
