"""What a page in a browser may make its user's machine send here, refused in one place for all routes.

With TLS, operators have certificates, and other roles may ask for health and metrics alone. Without, there are no
credentials here. A browser on a machine that reaches this port may be led by a foreign page to send something to it.

- The page's own name may have been bent to our address, so that its scripts can read answers (DNS rebinding). Then
  `Host` is that name. So names are answered to only where the operator listed them; an address in digits is no name.
- What a page can send without our consent is a form, and whatever it sends carries an `Origin`. So what is not only
  read is refused with an `Origin`, and with a body that is not called `application/json`; no form can call it so.
  Answers cannot be read by other origins, because we never allow it (CORS).
- The console is a page of our own. Of what is not only read it may send the questions that are too long for a URL
  (`_QUESTIONS`), with our own `Origin`. So whoever gets a script into it can still change nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coppice.tls.identity import Identity
from coppice.tls.rights import why_not_rest

LOOPBACK_NAMES = ("localhost",)
PEER = "coppice.peer"  # in the scope of a request: the identity of who asks
_READS = ("GET", "HEAD", "OPTIONS")
_QUESTIONS = ("/v1/explain",)  # sent by POST; they change nothing

ErrorResponse = Callable[[int, str, str], JSONResponse]


class Guard:
    """Middleware. `names` are the hosts that are answered to beside addresses; `refuse` makes a response from status,
    message and code."""

    def __init__(
        self, app: ASGIApp, names: Iterable[str], refuse: ErrorResponse, wants_operators: bool = False
    ) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in (*LOOPBACK_NAMES, *names))
        self._refuse = refuse
        self._wants_operators = wants_operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._role_refusal(scope) or self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)

    def _role_refusal(self, scope: Scope) -> JSONResponse | None:
        if not self._wants_operators:
            return None
        peer = scope.get(PEER)
        why_not = why_not_rest(peer, scope["path"]) if isinstance(peer, Identity) else "the certificate names nobody"
        return self._refuse(403, why_not, "wrong_role") if why_not else None

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        if not self._answers_to(_host_of(headers.get("host", ""))):
            hint = "use an address, or list the name with --http-names"
            return self._refuse(400, f"this host name is not answered to; {hint}", "unknown_host")
        if scope["method"] in _READS:
            return None
        if "origin" in headers and not (scope["path"] in _QUESTIONS and _is_ours(headers)):
            return self._refuse(403, "pages in a browser may not send this", "foreign_origin")
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if has_body and kind != "application/json":
            return self._refuse(403, "the body must be sent as Content-Type: application/json", "foreign_origin")
        return None

    def _answers_to(self, host: str) -> bool:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        return True


def _is_ours(headers: Headers) -> bool:
    """Sent by a page that came from where this is sent to. `Host` was found to be ours before."""
    origins = headers.getlist("origin")
    return len(origins) == 1 and origins[0].partition("://")[2].lower() == headers.get("host", "").lower() != ""


def _host_of(header: str) -> str:
    """The name or address in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
