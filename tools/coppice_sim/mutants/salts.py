"""What may go wrong between the users of one domain; see `registry.py`."""

from __future__ import annotations

from typing import Any

from coppice.namespaces import without_salt
from coppice_cache.core.state.state import State
from coppice_scheduler.core.kv_client import acquires
from coppice_scheduler.core.state import forks

Patches = list[tuple[Any, str, Any]]


def not_asked_for() -> Patches:
    return [(acquires, "with_salt", lambda namespace, salt: namespace)]


def not_kept_apart() -> Patches:
    return [(State, "with_keyed_salt", lambda self, domain, namespace: without_salt(namespace))]


def forks_across() -> Patches:
    return [(forks, "_shared_by", lambda request: (request.request.domain, request.request.tokens))]
