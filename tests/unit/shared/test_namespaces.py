"""Salts subdivide a namespace: no two of them, and no salt and none, ever share a name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace
from coppice.namespaces import (
    SALT_BYTES,
    NamespaceFields,
    covers,
    digest_salt,
    encode_namespace,
    salt_of,
    with_keyed_salt,
    with_salt,
    without_salt,
)
from coppice.seals import chain_key

A, B = DomainId("a"), DomainId("b")
KEY = b"k" * 16
MODEL = encode_namespace(NamespaceFields("m", "r", "bf16", 16, "rope"))
SALT = digest_salt(A, "user 1")


@given(st.text(), st.text(), st.text(), st.text())
@settings(max_examples=100, deadline=None)
def test_a_salt_is_a_digest_of_its_domain_and_its_text(domain: str, text: str, other: str, word: str) -> None:
    salt = digest_salt(DomainId(domain), text)
    assert len(salt) == SALT_BYTES
    assert (salt == digest_salt(DomainId(other), word)) == ((domain, text) == (other, word))
    assert text.encode() not in salt or len(text.encode()) < 3


def test_where_one_ends_and_the_other_begins_counts() -> None:
    assert digest_salt(DomainId("ab"), "c") != digest_salt(DomainId("a"), "bc")


@given(st.binary(max_size=40), st.binary(min_size=SALT_BYTES, max_size=SALT_BYTES))
@settings(max_examples=100, deadline=None)
def test_what_is_put_behind_a_namespace_is_found_there(namespace: bytes, salt: bytes) -> None:
    plain = Namespace(namespace)
    salted = with_salt(plain, salt)
    assert (salt_of(salted), without_salt(salted)) == (salt, plain)
    assert with_salt(plain, b"") == plain
    assert salted != plain


def test_no_namespace_of_a_worker_has_a_salt() -> None:
    assert (salt_of(MODEL), without_salt(MODEL)) == (b"", MODEL)
    assert with_keyed_salt(KEY, A, MODEL) == MODEL


def test_a_namespace_covers_its_salts_and_a_salt_itself() -> None:
    salted, other = with_salt(MODEL, SALT), with_salt(MODEL, digest_salt(A, "user 2"))
    assert covers(MODEL, MODEL)
    assert covers(MODEL, salted)
    assert covers(salted, salted)
    assert not covers(salted, other)
    assert not covers(salted, MODEL)
    assert not covers(Namespace(b"another"), salted)


def test_what_the_cache_service_shows_needs_its_key_and_tells_no_two_domains_alike() -> None:
    """Whoever knows a salt, or can guess it, finds it in no name without the key."""
    salted = with_salt(MODEL, SALT)
    shown = with_keyed_salt(KEY, A, salted)
    assert without_salt(shown) == MODEL
    assert shown == with_keyed_salt(KEY, A, salted), "the same after a restart"
    assert len({salted, shown, with_keyed_salt(b"l" * 16, A, salted), with_keyed_salt(KEY, B, salted)}) == 4


def test_chains_of_two_salts_begin_at_different_roots() -> None:
    names = [MODEL, with_salt(MODEL, SALT), with_salt(MODEL, digest_salt(A, "user 2"))]
    assert len({chain_key(KEY, domain, name) for domain in (A, B) for name in names}) == 6
