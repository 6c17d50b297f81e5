"""The load that index structures are compared on: sequences behind shared prefixes, and leaves of one block.

prefix 0 |---- 1024 tokens ----|  sequence 0   |---- 1024 tokens ----|
                               |  sequence 64  |---------------------|
prefix 1 |---------------------|  sequence 1   |---------------------|
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from coppice.ids import TOKEN_BYTES

BLOCK_SIZE = 16  # tokens
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
_VOCABULARY_BYTES = 2  # of a token's four: ids below 65,536


def random_tokens(source: random.Random, num_tokens: int) -> bytes:
    """Packed tokens, each below 65,536."""
    low = source.randbytes(num_tokens * _VOCABULARY_BYTES)
    packed = bytearray(num_tokens * TOKEN_BYTES)
    packed[0::TOKEN_BYTES], packed[1::TOKEN_BYTES] = low[0::2], low[1::2]
    return bytes(packed)


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_sequences` sequences of `sequence_tokens`, of which the first `prefix_tokens` are one of `num_prefixes`."""

    num_sequences: int
    num_prefixes: int = 64
    prefix_tokens: int = 1_024
    sequence_tokens: int = 2_048
    seed: int = 11

    def prefixes(self) -> list[bytes]:
        source = random.Random(self.seed)
        return [random_tokens(source, self.prefix_tokens) for _ in range(self.num_prefixes)]

    def sequences(self) -> list[bytes]:
        source = random.Random(self.seed + 1)
        prefixes, own_tokens = self.prefixes(), self.sequence_tokens - self.prefix_tokens
        return [prefixes[n % self.num_prefixes] + random_tokens(source, own_tokens) for n in range(self.num_sequences)]


def leaf_tokens(number: int) -> bytes:
    """One block that no other number has."""
    return number.to_bytes(8, "little") + bytes(BLOCK_BYTES - 8)
