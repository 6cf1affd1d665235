"""Read a tokenizer and its chat template without importing `transformers`, which takes seconds.

Files that ask for more than a plain tokenizer are left to `transformers`."""
from contextlib import suppress
from functools import cache
from pathlib import Path

from jinja2 import TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from shell import read_words

# Fields of tokenizer_config.json that name special tokens; fields that list more of them; fields that change
# no token; and the variables of a plain chat template. (Other variables include functions that
# `transformers` defines.)
NAMED, EXTRA, HARMLESS, VARIABLES = ({*words} for _, *words in read_words("tokenizer.txt"))
JINJA = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
compiled = cache(JINJA.from_string)


class PlainTokenizer:
    """A tokenizer with the part of the interface of `PreTrainedTokenizerFast` that this project uses.

    `named`: names of NAMED -> special tokens."""

    def __init__(self, backend: Tokenizer, named: dict[str, str], chat_template: str | None):
        self.backend_tokenizer, self.named, self.chat_template = backend, named, chat_template
        ids = {name: backend.token_to_id(token) for name, token in named.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(self, messages, chat_template=None, tokenize=False, **variables) -> str:
        """Return the text of a conversation. `tokenize` must be False."""
        known = {**self.named, "tools": None, "documents": None, **variables, "messages": messages}
        return compiled(chat_template or self.chat_template).render(known)


def plain_tokenizer(folder: Path, settings: dict) -> PlainTokenizer | None:
    """Read tokenizer.json; return None if `transformers` may change the tokenizer after it has read it.

    `settings`: the contents of tokenizer_config.json. `transformers` adds the special tokens that they name
    and tokenizer.json lacks."""
    added = settings.pop("added_tokens_decoder", None)
    files = "added_tokens.json", "special_tokens_map.json", "additional_chat_templates"
    others = [file for file in files if (folder / file).exists() and (added is None or file == files[-1])]
    template = settings.pop("chat_template", None)
    if (file := folder / "chat_template.jinja").exists():
        template = file.read_text(encoding="utf-8-sig")
    named = {name: content(token) for name in NAMED if (token := settings.pop(name, None))}
    extra = {content(token) for name in EXTRA for token in settings.pop(name, None) or ()}
    if others or not is_plain(template) or any(settings[name] for name in settings.keys() - HARMLESS):
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own = backend.get_added_tokens_decoder().values()
    same = {repr(AddedToken(**token)) for token in (added or {}).values()} <= {*map(repr, own)}
    if not same or backend.padding or not {*named.values()} | extra <= {token.content for token in own}:
        return None
    backend.no_truncation()
    return PlainTokenizer(backend, named, template)


def content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def is_plain(template) -> bool:
    """Return True if a chat template, or None, needs nothing that `transformers` adds to Jinja."""
    if not isinstance(template, str):               # several templates
        return template is None
    with suppress(TemplateSyntaxError):             # a tag of `transformers`
        return "tojson" not in template and meta.find_undeclared_variables(JINJA.parse(template)) <= VARIABLES
    return False
