"""A client of the cache's admin REST, for the commands of `coppice cache`."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import NoIdentity, Role, identity_of

DEFAULT_URL = "http://127.0.0.1:8071"
CALL_S = 30.0
_UNKNOWN = ("domain_not_found", "worker_not_found", "pin_not_found")
AUDIT_S = 600.0  # an audit of a large index takes as long as it takes


class _CheckedConnection(http.client.HTTPSConnection):
    """No host name is compared: the certificate says that it is a cache service, wherever it runs."""

    def connect(self) -> None:
        super().connect()
        try:
            server = identity_of(self.sock.getpeercert())
        except NoIdentity as error:
            raise OSError(str(error)) from error
        if server.role is not Role.CACHE:
            raise OSError(f"{server} answers there")


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, tls: Credentials) -> None:
        super().__init__(context=tls.client_context())
        self._tls = tls

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_CheckedConnection, request, context=self._tls.client_context())


class CacheClient:
    """Raises UsageError for what the service calls wrong or unknown, UnavailableError when nobody answers."""

    def __init__(self, url: str, tls: Credentials | None = None) -> None:
        """With `tls`, whoever answers must be a cache service by its certificate."""
        parts = urlsplit(url)
        try:
            bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:
            bad = True
        if bad or parts.query or parts.path.strip("/"):
            raise UsageError(f"--url {url} is no address of a cache service", hint="give http://HOST:PORT")
        if (parts.scheme == "https") != (tls is not None):
            raise UsageError(
                f"--url {url} and certificates do not go together",
                hint="with https, give --tls-cert, --tls-key and --tls-ca of an operator before the command",
            )
        self._url = url.rstrip("/")
        handlers = () if tls is None else (_Https(tls),)
        self._opener = urllib.request.build_opener(*handlers)

    def stats(self) -> Any:
        return self._call("GET", "/v1/stats")

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

    def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float = CALL_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return self._parsed(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error.code, self._parsed(error.read()))
        except http.client.HTTPException:  # a gRPC port, say: what answers does not speak HTTP/1.1
            raise self._another_service() from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(
                f"no cache service answers at {self._url}: {reason}",
                hint="is it running? coppice up prints its address as `cache admin`; give it as --url",
            ) from None

    def _parsed(self, body: bytes) -> Any:
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._another_service()
        return found

    def _another_service(self) -> UsageError:
        return UsageError(
            f"what answers at {self._url} is no cache service", hint="give the address of its admin REST as --url"
        )

    def _refused(self, status: int, body: Any) -> Any:
        if "holds" in body:
            return body  # an audit that found something says so with a status of its own
        error = body.get("error")
        message = str(error.get("message")) if isinstance(error, dict) else f"{self._url} answered with status {status}"
        if status == 404 and not (isinstance(error, dict) and error.get("code") in _UNKNOWN):
            raise self._another_service()
        raise (UsageError if status in (400, 403, 404, 422) else CoppiceError)(message)
