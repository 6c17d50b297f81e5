"""A client of the cache's admin REST, for the commands of `coppice cache`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from coppice.tls.identity import Role
from coppice_cli.operator_client import OperatorClient

DEFAULT_URL = "http://127.0.0.1:8071"
AUDIT_S = 600.0  # an audit of a large index takes as long as it takes


class CacheClient(OperatorClient):
    role = Role.CACHE
    service = "cache service"
    flag = "--url"
    printed = "cache admin"
    unknown = ("domain_not_found", "worker_not_found", "pin_not_found")

    def stats(self) -> Any:
        return self._call("GET", "/v1/stats")

    def statement(self, worker: str) -> Any:
        return self._call("GET", "/v1/statements?" + urlencode({"worker_id": worker}))

    def tree(self, domain: str, **query: object) -> Any:
        given = {name: value for name, value in query.items() if value != ""}
        return self._call("GET", f"/v1/domains/{quote(domain)}/tree?{urlencode(given)}")

    def explain(self, domain: str, tokens: list[int], namespace: str) -> Any:
        return self._call("POST", "/v1/explain", {"domain": domain, "tokens": tokens, "namespace": namespace})

    def audit(self) -> Any:
        return self._call("POST", "/v1/audit", {}, timeout_s=AUDIT_S)

    def invalidate(self, what: dict[str, Any]) -> Any:
        return self._call("POST", "/v1/invalidate", what)

    def pin(self, name: str, domain: str, namespace: str, tokens: list[int]) -> Any:
        body = {"domain": domain, "namespace": namespace, "tokens": tokens}
        return self._call("PUT", f"/v1/pins/{quote(name)}", body)

    def unpin(self, name: str) -> Any:
        return self._call("DELETE", f"/v1/pins/{quote(name)}")

    def pins(self) -> Any:
        return self._call("GET", "/v1/pins")

    def _refused(self, status: int, body: Any) -> Any:
        if "holds" in body:
            return body  # an audit that found something says so with a status of its own
        return super()._refused(status, body)
