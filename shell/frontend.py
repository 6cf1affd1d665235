"""What is asked -> a Request: fields and their checks, chat templates, text with stop strings."""
import time

from tokenizers.decoders import DecodeStream

from common.requests import BadRequest, Request

# 1. Fields --------------------------------------------------------------------------------------------------

def number(low: float, high: float, kinds=int):
    """Return a test: whether a value is a number from `low` to `high`."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def text(value, low: int = 0, high: float = float("inf")) -> bool:
    """Test for a string of `low` to `high` characters, without lone surrogates."""
    return (isinstance(value, str) and low <= len(value) <= high
            and value == value.encode("utf-8", "ignore").decode())


def stop_strings(value) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= 16 and all(text(stop, 1, 256) for stop in stops)


def text_parts(value) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and text(part.get("text")) for part in value)


# name -> (test, what it must be)
SAMPLING = {
    "max_tokens": (number(1, 1 << 20), f"a whole number from 1 to {1 << 20}"),
    "temperature": (number(0, 100, (int, float)), "a number from 0 (greedy) to 100"),
    "top_p": (number(0, 1, (int, float)), "a number from 0 (the likeliest token only) to 1"),
    "top_k": (number(0, 1 << 20), f"a whole number from 0 (no limit) to {1 << 20}"),
    "seed": (number(0, (1 << 63) - 1), f"a whole number from 0 to {(1 << 63) - 1}"),
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
    asked = {name: value for name, value in body.items() if value not in (None, [], {})}
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

class Writer:
    """Turn tokens into text one by one; hold back what may be the beginning of a stop string.

    before: the tokens that this text continues. A decoder that begins anew drops the first space."""

    def __init__(self, tokenizer, stop: str | list[str] = (), before: list[int] = ()):
        self.tokenizer = tokenizer.backend_tokenizer
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.before = list(before[-16:])
        if self.tokenizer.decode(self.before).endswith("\ufffd"):   # an open character would be said again
            self.before = []
        self.decoder = DecodeStream(ids=self.before, skip_special_tokens=True)
        self.text, self.sent, self.stopped = "", 0, False

    def push(self, token: int) -> str:
        """Return the text that is certain after this token; "" while a character or stop string is open."""
        try:
            piece = self.decoder.step(self.tokenizer, token)
        except Exception:          # bytes that are no text change the text before them: begin anew
            self.decoder = DecodeStream(skip_special_tokens=True)
            piece = self.decoder.step(self.tokenizer, token)
        self.text += piece or ""
        ends = [end for stop in self.stop if (end := self.text.find(stop, self.sent)) >= 0]
        if ends:
            self.text, self.stopped = self.text[:min(ends)], True
            return self.release(len(self.text))
        text, certain = self.text, self.sent        # what begins no stop string never will: it is passed once
        while certain < len(text) and not any(stop.startswith(text[certain:]) for stop in self.stop):
            certain += 1
        return self.release(certain)

    def release(self, end: int) -> str:
        """Return the text up to `end` that was not released before."""
        piece, self.sent = self.text[self.sent:end], max(self.sent, end)
        return piece


# 3. From what is asked to a Request -------------------------------------------------------------------------

class Frontend:
    """Make requests of what is asked. `fields`: the chapter's own, as in SAMPLING."""

    def __init__(self, model, tokenizer, end_tokens, fields: dict | None = None):
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
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise BadRequest("prompt must be one prompt; send a request for each.")
            prompt, = prompt
        raw = raw or isinstance(prompt, list) or self.tokenizer.chat_template is None
        tokens = self.encode(prompt, messages, raw)
        if len(tokens) >= self.context:
            raise BadRequest(f"The prompt is {len(tokens)} tokens and the context of this model is "
                             f"{self.context}, answer included; shorten the prompt.")
        max_tokens = min(asked.pop("max_tokens", 128), self.context - len(tokens))
        writer = Writer(self.tokenizer, asked.pop("stop", ()), tokens if raw else ())
        options = {name: asked.pop(name) for name in self.fields if name in asked}
        return Request(tokens, max_tokens, options=options, end_tokens=self.end_tokens, writer=writer,
                       received=received, **asked)

    def encode(self, prompt, messages, raw: bool = False) -> list[int]:
        """Return the prompt's tokens; `raw`: without the chat template. Raises BadRequest."""
        if (prompt is None) == (messages is None):
            raise BadRequest("Give either prompt or messages, not both and not empty.")
        if isinstance(prompt, list):
            tokens = prompt
        else:
            said = check_messages([dict(role="user", content=prompt)] if messages is None else messages)
            plain = messages is None and (raw or self.tokenizer.chat_template is None)
            characters = sum(len(message["content"]) for message in said)
            if characters > self.context * self.longest:        # what cannot fit is not encoded
                raise BadRequest(f"The prompt is {characters} characters, more than the {self.context} "
                                 "tokens of this model's context can hold; shorten the prompt.")
            tokens = self.tokenizer.encode(prompt) if plain else self.converse(said)
            if tokens[:2] == [self.tokenizer.bos_token_id] * 2:
                tokens = tokens[1:]             # the prompt has its own
        top = self.model.config.vocab_size - 1
        if not tokens or not all(map(number(0, top), tokens)):
            raise BadRequest(f"Token ids must be from 0 to {top}, one at least.")
        return tokens

    def converse(self, messages: list[dict]) -> list[int]:
        """Return the tokens of a conversation; of a model without a chat template, those of a line for each
        message. A template may refuse an order of roles: raises BadRequest."""
        if self.tokenizer.chat_template is None:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.tokenizer.encode("".join(lines) + "assistant:")
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise BadRequest(f"The model's chat template refuses these messages ({error}).") from None
        # Some have no system role: what it says goes before what the user says first
        said = "\n\n".join(message["content"] for message in messages[:2])
        return self.converse([dict(role="user", content=said), *messages[2:]])
