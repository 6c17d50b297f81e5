"""The key in an `Authorization` header or `authorization` metadata; who it belongs to says the TenantDirectory."""

from __future__ import annotations


def bearer_key(authorization: str) -> str | None:
    """KEY of `Bearer KEY` (the scheme in any case). Anything else, a bare key too, is no credential."""
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and key else None
