"""A client of what services tell operators over REST; `coppice cache` and `coppice why` have one each."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlsplit

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import NoIdentity, Role, identity_of

CALL_S = 30.0


class _CheckedConnection(http.client.HTTPSConnection):
    """No host name is compared: the certificate says which service it is, wherever it runs."""

    role: ClassVar[Role]

    def connect(self) -> None:
        super().connect()
        try:
            server = identity_of(self.sock.getpeercert())
        except NoIdentity as error:
            raise OSError(str(error)) from error
        if server.role is not self.role:
            raise OSError(f"{server} answers there")


class _CacheConnection(_CheckedConnection):
    role = Role.CACHE


class _SchedulerConnection(_CheckedConnection):
    role = Role.SCHEDULER


class _WorkerConnection(_CheckedConnection):
    role = Role.WORKER


_CONNECTIONS: dict[Role, type[_CheckedConnection]] = {
    Role.CACHE: _CacheConnection,
    Role.SCHEDULER: _SchedulerConnection,
    Role.WORKER: _WorkerConnection,
}


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, tls: Credentials, role: Role) -> None:
        super().__init__(context=tls.client_context())
        self._tls = tls
        self._connection: type[http.client.HTTPSConnection] = _CONNECTIONS[role]

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request, context=self._tls.client_context())


class OperatorClient:
    """Raises UsageError for what the service calls wrong or unknown, UnavailableError when nobody answers."""

    role: ClassVar[Role]  # that the service has
    service: ClassVar[str]  # its name in messages
    flag: ClassVar[str]  # that gives the address
    printed: ClassVar[str]  # what `coppice up` calls the address
    call_s: ClassVar[float] = CALL_S
    unknown: ClassVar[tuple[str, ...]] = ()  # codes of what is not found there; another 404 is another service

    def __init__(self, url: str, tls: Credentials | None = None) -> None:
        """With `tls`, whoever answers must be such a service by its certificate."""
        parts = urlsplit(url)
        try:
            bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:
            bad = True
        if bad or parts.query or parts.path.strip("/"):
            raise UsageError(f"{self.flag} {url} is no address of a {self.service}", hint="give http://HOST:PORT")
        if (parts.scheme == "https") != (tls is not None):
            raise UsageError(
                f"{self.flag} {url} and certificates do not go together",
                hint="with https, give --tls-cert, --tls-key and --tls-ca of an operator before the command",
            )
        self._url = url.rstrip("/")
        handlers = () if tls is None else (_Https(tls, self.role),)
        self._opener = urllib.request.build_opener(*handlers)

    def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        return self._asked(request, timeout_s, self._parsed)

    def _text(self, path: str) -> str:
        """A page that is no JSON."""
        page = self._asked(urllib.request.Request(self._url + path), None, lambda body: body.decode(errors="replace"))
        return str(page)

    def _asked(self, request: urllib.request.Request, timeout_s: float | None, read: Callable[[bytes], Any]) -> Any:
        try:
            with self._opener.open(request, timeout=timeout_s or self.call_s) as answer:
                return read(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error.code, self._parsed(error.read()))
        except http.client.HTTPException:  # a gRPC port, say: what answers does not speak HTTP/1.1
            raise self._another_service() from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(
                f"no {self.service} answers at {self._url}: {reason}",
                hint=f"is it running? coppice up prints its address as `{self.printed}`; give it as {self.flag}",
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
            f"what answers at {self._url} is no {self.service}",
            hint=f"give the address that coppice up prints as `{self.printed}` as {self.flag}",
        )

    def _refused(self, status: int, body: Any) -> Any:
        error = body.get("error")
        message = str(error.get("message")) if isinstance(error, dict) else f"{self._url} answered with status {status}"
        if status == 404 and not (isinstance(error, dict) and error.get("code") in self.unknown):
            raise self._another_service()
        raise (UsageError if status in (400, 403, 404, 422) else CoppiceError)(message)
