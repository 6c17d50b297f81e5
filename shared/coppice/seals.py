"""Seals: what is in a block.

    chain key = H(domain, namespace)            keyed with the deployment's seal key; H is BLAKE2b
    seal(0)   = H(zeros,       tokens 0)        keyed with the chain key of the tree, 16 bytes
    seal(i)   = H(seal(i - 1), tokens i)

A generation says whose turn it is, a seal says what was written: the chain of all tokens up to and including the
block, in one domain and namespace. The keys keep tenants from computing each other's seals, and whoever sees seals from
trying tokens on them, unless they have the seal key that a tree's chain key follows from.

Seals outlive the seal key that they follow from: a tree keeps its chain key when the deployment gets another seal key.
A proof says whose a chain key is, and is made anew under each seal key.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from coppice.ids import DomainId, Namespace

SEAL_BYTES = 16
NO_SEAL = bytes(SEAL_BYTES)
_SECRET_BYTES = 32


class ChainKey(NamedTuple):
    """Of one (domain, namespace). It leaves the cache service in its recovery log alone, encrypted."""

    secret: bytes
    proof: bytes


NO_CHAIN_KEY = ChainKey(b"", b"")


def chain_key(seal_key: bytes, domain: DomainId, namespace: Namespace) -> ChainKey:
    """What a new tree gets. `seal_key` has 16 to 64 bytes."""
    framed = _framed(domain, namespace)
    secret = blake2b(framed, digest_size=_SECRET_BYTES, key=seal_key, person=b"coppice.chain").digest()
    return ChainKey(secret, _proof(seal_key, framed, secret))


def proved_again(
    seal_keys: tuple[bytes, ...], domain: DomainId, namespace: Namespace, known: ChainKey
) -> ChainKey | None:
    """The same key with a proof under the first of the seal keys; None if it is proved under none of them."""
    framed = _framed(domain, namespace)
    if len(known.secret) != _SECRET_BYTES:
        return None
    if not any(compare_digest(_proof(key, framed, known.secret), known.proof) for key in seal_keys):
        return None
    return ChainKey(known.secret, _proof(seal_keys[0], framed, known.secret))


def chain_seals(key: ChainKey, parent: bytes, tokens: bytes, block_bytes: int) -> bytes:
    """Seals of consecutive full blocks after `parent`, packed, 16 bytes each.

    `parent` is NO_SEAL at the root. `tokens` holds whole blocks of `block_bytes` bytes. The loop is over blocks, not
    tokens.
    """
    assert len(tokens) % block_bytes == 0
    start_digest = _keyed(key.secret).copy
    seals = []
    for start in range(0, len(tokens), block_bytes):
        digest = start_digest()
        digest.update(parent + tokens[start : start + block_bytes])
        parent = digest.digest()
        seals.append(parent)
    return b"".join(seals)


def _framed(domain: DomainId, namespace: Namespace) -> bytes:
    name = domain.encode()
    return len(name).to_bytes(4, "little") + name + namespace


def _proof(seal_key: bytes, framed: bytes, secret: bytes) -> bytes:
    return blake2b(secret + framed, digest_size=SEAL_BYTES, key=seal_key, person=b"coppice.chain.of").digest()


@lru_cache(maxsize=4096)
def _keyed(secret: bytes) -> blake2b:
    """A digest that has taken the key in and nothing else: a copy costs less than its parameters parsed once more."""
    return blake2b(digest_size=SEAL_BYTES, key=secret, person=b"coppice.block")
