"""Names of contents: a prefix is a block of tokens after all that come before it. Every tier finds what it
holds by prefixes, in this process as objects, and by their keys outside."""

import hashlib
import itertools
import struct
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


@dataclass(eq=False)
class BlockKey:
    """`tokens` after all that `parent`, if any, stands for. One object per content: compare with `is`."""

    parent: "BlockKey | None" = field(repr=False)
    tokens: tuple
    digest: bytes  # SHA-256 chain: the name of the content outside of this process
    used: int = 0  # when it was used last: every pool that holds it evicts by this


class BlockKeys:
    """Interns prefixes of `size` tokens. Compares (parent, tokens), as a collision of hashes would give a
    request another user's text. `namespace`: what K and V depend on besides tokens."""

    def __init__(self, namespace: str, size: int):
        self.namespace, self.size = hashlib.sha256(namespace.encode()).digest(), size
        self.known: WeakValueDictionary[tuple, BlockKey] = WeakValueDictionary()
        self.uses = itertools.count(1)

    def extend(self, chain: list[BlockKey], tokens: list[int], salt: str = "") -> list[BlockKey]:
        """Extend `chain`, one Prefix per full block, to all full blocks of `tokens`. Salts share nothing."""
        while (end := (len(chain) + 1) * self.size) <= len(tokens):
            parent, block = chain[-1] if chain else None, tuple(tokens[end - self.size : end])
            block_key = self.known.get((parent or salt, block))
            if block_key is None:
                before = parent.digest if parent else hashlib.sha256(self.namespace + salt.encode()).digest()
                digest = hashlib.sha256(before + struct.pack(f"<{self.size}i", *block)).digest()
                block_key = self.known[parent or salt, block] = BlockKey(parent, block, digest)
            chain.append(block_key)
        return chain

    def use(self, chain: list[BlockKey]):
        """Make a chain the most recently used, in every tier that holds it; its end is evicted first."""
        for block_key in reversed(chain):
            block_key.used = next(self.uses)
