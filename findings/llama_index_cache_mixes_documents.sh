#!/usr/bin/env bash
# llama-index-core 0.14.25: the cache of an ingestion pipeline gives one document the chunks of another, and
# does not see a change of the tokenizer.
#
# Expected: chunks from the cache belong to the document that was put in, as without a cache, and a splitter
# with another tokenizer, or a transformation with another setting, splits anew.
# Seen: the key has the text with its metadata, and those public fields of the transformation that are no
# functions. Two documents of one text share their chunks. So the second document's chunks point to the first
# one, have the ids of its chunks, and exclude from embedding what the first one excludes.
# A splitter that counts letters gets the chunks of one that counts
# words. A subclass's private attributes and the options of `run` are not in the key either.
#
#     second document, not cached: chunks of ['B'], excluded ['owner'], ids of its own
#     second document, cached:     chunks of ['A'], excluded [], the first one's ids
#     other tokenizer:             not cached 5 chunks, cached 1
#     other private attribute:     not cached 'new', cached 'old'
#     other option of run:         not cached 'new', cached 'old'
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile llama-index-core==0.14.25
"$work/venv/bin/python" - <<'PY' 2> "$work/log" || { tail -n 5 "$work/log"; exit 1; }
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, TextNode, TransformComponent

text = "one two three. " * 20


class Stamp(TransformComponent):
    _word: str = PrivateAttr()

    def __init__(self, word):
        super().__init__()
        self._word = word

    def __call__(self, nodes, word=None, **options):
        return [TextNode(text=word or self._word) for node in nodes]


def run(cache, step, document=None, **options):
    pipeline = IngestionPipeline(transformations=[step], cache=cache, disable_cache=cache is None)
    return pipeline.run(documents=[document or Document(text=text, id_="A")], **options)


def both(first, second):
    """Run the second call without a cache, and with the cache that the first call has filled."""
    cache = IngestionCache()
    before = run(cache, *first[0], **first[1])
    return before, run(None, *second[0], **second[1]), run(cache, *second[0], **second[1])


splitter = SentenceSplitter(chunk_size=60, chunk_overlap=0)
first = Document(text=text, id_="A", metadata={"owner": "x"})
second = Document(text=text, id_="B", metadata={"owner": "x"}, excluded_embed_metadata_keys=["owner"])
before, alone, cached = both(((splitter, first), {}), ((splitter, second), {}))
for name, nodes, ids, owner in (("not cached:", alone, "ids of its own", "B"),
                                ("cached:", cached, "the first one's ids", "A")):
    documents, excluded = sorted({node.ref_doc_id for node in nodes}), nodes[0].excluded_embed_metadata_keys
    print(f"second document, {name:11} chunks of {documents}, excluded {excluded}, {ids}")
    same_ids = [node.id_ for node in nodes] == [node.id_ for node in before]
    assert documents == [owner] and same_ids == (nodes is cached), "the behaviour has changed"
    assert excluded == (["owner"] if nodes is alone else []), "the behaviour has changed"
words, letters = (SentenceSplitter(chunk_size=60, chunk_overlap=0, tokenizer=count)
                  for count in (lambda text: text.split(), lambda text: list(text)))
_, alone, cached = both(((words,), {}), ((letters,), {}))
print(f"other tokenizer:             not cached {len(alone)} chunks, cached {len(cached)}")
assert len(alone) > len(cached) == 1, "the behaviour has changed"
for name, calls in (("other private attribute:", (((Stamp("old"),), {}), ((Stamp("new"),), {}))),
                    ("other option of run:", (((Stamp("old"),), {}), ((Stamp("old"),), {"word": "new"})))):
    _, alone, cached = both(*calls)
    print(f"{name:28} not cached {alone[0].text!r}, cached {cached[0].text!r}")
    assert (alone[0].text, cached[0].text) == ("new", "old"), "the behaviour has changed"
PY
