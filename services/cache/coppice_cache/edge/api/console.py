"""The console: a web page for operators at `/`, its files below `/console/`, and where it finds the rest of the stack.

    /                      index.html
    /console/config.json   where requests are told, and where the API is
    /console/NAME          a file of the package; nothing else is read from disk

A browser runs no script on it but the ones served here, and lets them ask this listener and the two addresses of
`Elsewhere` alone (Content-Security-Policy). Scripts change nothing here: `guard.py` lets pages ask, nothing more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from coppice import __version__

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Origins that a browser of an operator reaches; empty: nobody said."""

    requests_url: str = ""  # the scheduler's --metrics-port
    rest_url: str = ""  # the public API


NOWHERE_ELSE = Elsewhere()


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    etag: str


def add_console(app: FastAPI, elsewhere: Elsewhere) -> None:
    found = _read(files("coppice_cache.edge").joinpath("console"), "")
    headers = _headers(elsewhere)

    def answer(request: Request, name: str) -> Response:
        file = found.get(name)
        if file is None:
            raise HTTPException(404, "the console has no such file")
        told = {**headers, "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=told)
        return Response(file.content, media_type=file.kind, headers=told)

    @app.get("/", include_in_schema=False)
    def console(request: Request) -> Response:
        return answer(request, _INDEX)

    @app.get("/console/config.json", include_in_schema=False)
    def config() -> JSONResponse:
        return JSONResponse({**asdict(elsewhere), "version": __version__}, headers={"Cache-Control": "no-store"})

    @app.get("/console/{name:path}", include_in_schema=False)
    def console_file(request: Request, name: str) -> Response:
        return answer(request, name)


def _read(folder: Traversable, before: str) -> dict[str, _File]:
    """All files of the package that a page may have, by their path below the folder."""
    found: dict[str, _File] = {}
    for entry in folder.iterdir():
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if entry.is_dir():
            found |= _read(entry, f"{before}{entry.name}/")
        elif kind is not None:
            content = entry.read_bytes()
            found[before + entry.name] = _File(content, kind, f'"{sha256(content).hexdigest()[:32]}"')
    return found


def _headers(elsewhere: Elsewhere) -> dict[str, str]:
    """Files are asked for again each time, and sent again when they changed: versions of them are never mixed."""
    asked = " ".join(["'self'", *(url for url in (elsewhere.requests_url, elsewhere.rest_url) if url)])
    policy = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": asked,
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
