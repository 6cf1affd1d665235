#!/usr/bin/env bash
# tokenizers 0.23.3: a DecodeStream that goes on behind a prompt writes the whole prompt again if the
# prompt's last token ends inside a character, and it never gives the end of a text that stops there.
#
# Expected: `DecodeStream(ids=prompt)` gives the text of the new tokens alone, wherever the prompt ends, and
# the pieces of a stream add up to `decode` of its tokens.
# Seen: behind a prompt that was cut after two of an emoji's four bytes (by a token limit, or by the pages
# of a cache) the first piece begins with the prompt. A text that ends inside a character, or with U+FFFD
# itself, lacks that end, and the stream has no call that would flush it.
#
#     prompt ends before the emoji: '🌞 today'
#     prompt ends inside the emoji: 'The weather is fine. 🌞 today'
#     prompt ends after the emoji:  ' today'
#     text ends inside the emoji:   stream 'fine. ', decode 'fine. �'
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile --no-deps tokenizers==0.23.3
"$work/venv/bin/python" - <<'PY'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokens = tokenizer.encode("The weather is fine. 🌞 today").ids


def streamed(prompt, new):
    stream = DecodeStream(ids=prompt)
    return "".join(stream.step(tokenizer, token) or "" for token in new)


for place, cut, expected in (("before", 21, "🌞 today"), ("inside", 23, "The weather is fine. 🌞 today"),
                             ("after", 25, " today")):
    text = streamed(tokens[:cut], tokens[cut:])
    print(f"prompt ends {place} the emoji:".ljust(29), repr(text))
    assert text == expected, "the behaviour has changed"
end = tokens[15:23]
text, whole = streamed([], end), tokenizer.decode(end)
print(f"text ends inside the emoji:   stream {text!r}, decode {whole!r}")
assert text == "fine. " and whole.startswith(text) and len(whole) > len(text), "the behaviour has changed"
PY
