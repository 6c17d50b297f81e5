"""Seals: what is in a block.

    seal(0) = H(root,        tokens of block 0)        root = H(domain, namespace)
    seal(i) = H(seal(i - 1), tokens of block i)        H = BLAKE2b-128, keyed with the deployment's seal key

A generation says whose turn it is, a seal says what was written: the chain of all tokens up to and including the
block, in one domain and namespace. The key keeps tenants from computing each other's seals.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from coppice.ids import DomainId, Namespace

SEAL_BYTES = 16
NO_SEAL = bytes(SEAL_BYTES)


def root_seal(key: bytes, domain: DomainId, namespace: Namespace) -> bytes:
    """Start of the chain for one (domain, namespace). `key` has 16 to 64 bytes."""
    name = domain.encode()
    framed = len(name).to_bytes(4, "little") + name + namespace
    return blake2b(framed, digest_size=SEAL_BYTES, key=key, person=b"coppice.root").digest()


def chain_seals(key: bytes, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
    """Seals of consecutive full blocks after `parent`, packed, 16 bytes each.

    `tokens` holds whole blocks of `block_bytes` bytes. The loop is over blocks, not tokens.
    """
    assert len(tokens) % block_bytes == 0
    start_digest = _keyed(key).copy
    seals = []
    for start in range(0, len(tokens), block_bytes):
        digest = start_digest()
        digest.update(parent + tokens[start : start + block_bytes])
        parent = digest.digest()
        seals.append(parent)
    return b"".join(seals)


@lru_cache(maxsize=8)
def _keyed(key: bytes) -> blake2b:
    """A digest that has taken the key in and nothing else: a copy costs less than its parameters parsed once more."""
    return blake2b(digest_size=SEAL_BYTES, key=key, person=b"coppice.block")
