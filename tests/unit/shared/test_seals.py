"""Seals are compared across processes and restarts, so the digests themselves must never change."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace
from coppice.seals import NO_CHAIN_KEY, NO_SEAL, SEAL_BYTES, ChainKey, chain_key, chain_seals, proved_again

KEY, OTHER = b"k" * 16, b"o" * 64
NAMED = (DomainId("amber"), Namespace(b"model"))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=16), st.integers(0, 5), st.integers(1, 9))
def test_a_seal_is_the_digest_of_its_parent_and_its_tokens(key: bytes, parent: bytes, count: int, words: int) -> None:
    tokens = bytes(range(4 * words)) * count
    packed = chain_seals(ChainKey(key, b""), parent, tokens, 4 * words)
    assert len(packed) == count * SEAL_BYTES
    for index in range(count):
        digest = blake2b(parent, digest_size=SEAL_BYTES, key=key, person=b"coppice.block")
        digest.update(tokens[index * 4 * words : (index + 1) * 4 * words])
        parent = packed[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        assert parent == digest.digest()


def test_digests_that_were_stored_once() -> None:
    key = chain_key(KEY, *NAMED)
    assert key.secret.hex() == "513de3d6d4f7d93c6ccb69ea23297078d2b5a58519b9ff2414abf2c730668a65"
    assert key.proof.hex() == "a95f2984763b75d29f876d45c6358926"
    first, second = "992ccba3ac7221596a034052ea93c35b", "720ab67b354b4a5eb7a5dd66c51c8f33"
    assert chain_seals(key, NO_SEAL, bytes(range(64)) * 2, 64).hex() == first + second


def test_each_tree_has_a_chain_key_of_its_own() -> None:
    names = [(domain, namespace) for domain in ("a", "ab") for namespace in (b"", b"b", b"bc")]
    keys = {chain_key(seal_key, DomainId(d), Namespace(n)) for seal_key in (KEY, OTHER) for d, n in names}
    assert len({key.secret for key in keys}) == len({key.proof for key in keys}) == 12


def test_a_chain_key_is_known_by_its_proof_and_stays_the_same() -> None:
    old = chain_key(KEY, *NAMED)
    new = proved_again((OTHER, KEY), *NAMED, old)
    assert new is not None
    assert new.secret == old.secret
    assert new.proof != old.proof
    assert proved_again((OTHER,), *NAMED, new) == new, "the seal key of before is not needed any more"
    assert proved_again((OTHER,), *NAMED, old) is None


@pytest.mark.parametrize(
    "shown",
    [
        NO_CHAIN_KEY,
        ChainKey(chain_key(KEY, *NAMED).secret, b""),
        ChainKey(bytes(32), chain_key(KEY, *NAMED).proof),
        chain_key(KEY, DomainId("another"), NAMED[1]),
        chain_key(KEY, NAMED[0], Namespace(b"another")),
    ],
    ids=["none", "no proof", "another secret", "of another domain", "of another namespace"],
)
def test_a_chain_key_that_is_not_proved_counts_for_nothing(shown: ChainKey) -> None:
    assert proved_again((KEY, OTHER), *NAMED, shown) is None
