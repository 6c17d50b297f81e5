"""Which requests at work a tenant means by a name. Here it is decided whose a request is.

    (tenant, "job-7")         -> chatcmpl-job-7-1f..-0, chatcmpl-job-7-1f..-1, cmpl-job-7-9a..-0
    (tenant, "*-job-7-1f..")  -> chatcmpl-job-7-1f..-0, chatcmpl-job-7-1f..-1

The tenant is a part of what is looked up: a request of another one is not found and then refused, it is not found.
"""

from __future__ import annotations

from collections.abc import Iterable

from coppice_scheduler.core.state.request import Request

_Key = tuple[str, str]  # tenant, name


class CallNames:
    """The requests at work by their names. As large as what is at work."""

    def __init__(self) -> None:
        self._request_ids: dict[_Key, dict[str, None]] = {}  # in the order in which they came
        self._keys: dict[str, tuple[_Key, ...]] = {}  # by request id

    def add(self, request: Request) -> None:
        """`request` is at work now."""
        assert request.request_id not in self._keys, f"request id {request.request_id} is in use"
        keys = self._keys[request.request_id] = tuple((request.tenant, name) for name in dict.fromkeys(request.names))
        for key in keys:
            self._request_ids.setdefault(key, {})[request.request_id] = None

    def remove(self, request_id: str) -> None:
        """It has ended."""
        for key in self._keys.pop(request_id):
            of_key = self._request_ids[key]
            del of_key[request_id]
            if not of_key:
                del self._request_ids[key]

    def find(self, tenant: str, names: Iterable[str]) -> tuple[str, ...]:
        """Ids of the tenant's requests that have one of these names, each once."""
        found: dict[str, None] = {}
        for name in names:
            found.update(self._request_ids.get((tenant, name), {}))
        return tuple(found)
