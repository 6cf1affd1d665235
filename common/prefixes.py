"""Block keys: each identifies a full block by its tokens and by all tokens that come before them. Every tier
finds its blocks by these keys. Within this process the key object is used, and outside of it the key's
digest."""

import hashlib
import struct
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


@dataclass(eq=False)
class BlockKey:
    """The key of a block that holds `tokens` after all tokens of `parent`. There is one object per content,
    so compare keys with `is`."""

    parent: "BlockKey | None" = field(repr=False)
    tokens: tuple
    digest: bytes  # SHA-256 of the parent's digest and the tokens: the key outside this process
    depth: int = 0  # number of blocks before this one


class BlockKeys:
    """The block keys of one engine: one object per content.

    Keys are found by (parent, tokens) and never by a hash alone, because a collision of hashes would give a
    request another user's text. A key that nothing references any more is forgotten."""

    def __init__(self, namespace: str, size: int):
        """`namespace`: everything other than tokens that a block's contents depend on, such as the model.
        `size`: tokens per block."""
        self.namespace, self.size = hashlib.sha256(namespace.encode()).digest(), size
        self.known: WeakValueDictionary[tuple, BlockKey] = WeakValueDictionary()

    def extend(self, chain: list[BlockKey], tokens: list[int], salt: str = "") -> list[BlockKey]:
        """Append a key to `chain` for each further full block of `tokens`, and return `chain`.

        Requests with different `salt` never share a key."""
        while (end := (len(chain) + 1) * self.size) <= len(tokens):
            parent, block = chain[-1] if chain else None, tuple(tokens[end - self.size : end])
            block_key = self.known.get((parent or salt, block))
            if block_key is None:
                before = parent.digest if parent else hashlib.sha256(self.namespace + salt.encode()).digest()
                digest = hashlib.sha256(before + struct.pack(f"<{self.size}i", *block)).digest()
                block_key = self.known[parent or salt, block] = BlockKey(parent, block, digest, len(chain))
            chain.append(block_key)
        return chain
