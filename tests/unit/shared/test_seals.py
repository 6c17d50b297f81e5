"""Seals are compared across processes and restarts, so the digests themselves must never change."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.seals import SEAL_BYTES, chain_seals


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=16), st.integers(0, 5), st.integers(1, 9))
def test_a_seal_is_the_digest_of_its_parent_and_its_tokens(key: bytes, parent: bytes, count: int, words: int) -> None:
    tokens = bytes(range(4 * words)) * count
    packed = chain_seals(key, parent, tokens, 4 * words)
    assert len(packed) == count * SEAL_BYTES
    for index in range(count):
        digest = blake2b(parent, digest_size=SEAL_BYTES, key=key, person=b"coppice.block")
        digest.update(tokens[index * 4 * words : (index + 1) * 4 * words])
        parent = packed[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        assert parent == digest.digest()


def test_a_digest_that_was_stored_once() -> None:
    seals = chain_seals(b"k" * 16, bytes(16), bytes(range(64)) * 3, 64)
    assert seals.hex() == (
        "235115b17859762be7226186559608cce0d1a7d6b7e54b681be194c23ff8d88734ca6f64aaedb92ad323de11ed2f9107"
    )
