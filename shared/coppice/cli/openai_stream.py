"""A streaming client of `/v1/completions` over plain sockets, cheap enough not to be what is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from coppice.errors import CoppiceError, UnavailableError, UsageError

LINE_BYTES_MAX = 4 * 1024 * 1024
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One completion: moments in seconds on one monotonic clock, counts as the server's usage reports them."""

    sent_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.first_token_s - self.sent_s) * 1e3


class OpenAIStream:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--url {url} is no address of a stack", hint="give http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises CoppiceError for any status but 200."""
        body = b"".join([line async for line in self._lines("GET", path, b"")])
        found = json.loads(body)
        assert isinstance(found, dict), f"{path} answers with an object"
        return found

    async def complete(self, model: str, prompt: str, max_tokens: int) -> Timing:
        """Generate exactly `max_tokens` tokens greedily; the server is told to ignore the end-of-text token."""
        request = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.monotonic()
        first_s = last_s = 0.0
        usage: dict[str, Any] = {}
        async for line in self._lines("POST", "/v1/completions", json.dumps(request).encode()):
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                raise CoppiceError(f"the stack ended a completion: {chunk['error'].get('message')}")
            if chunk.get("choices"):
                last_s = time.monotonic()
                first_s = first_s or last_s
            usage = chunk.get("usage") or usage
        if not usage or not first_s:
            raise CoppiceError("a completion ended without tokens or usage", hint="see the logs of the scheduler")
        details = usage.get("prompt_tokens_details") or {}
        return Timing(
            sent_s=sent_s,
            first_token_s=first_s,
            last_token_s=last_s,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage["completion_tokens"]),
        )

    async def _lines(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES_MAX)
                try:
                    head = f"{method} {path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
                    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
                    async for line in _response_lines(reader, path):
                        yield line
                finally:
                    writer.close()
        except TimeoutError:
            raise UnavailableError(f"{path} was not answered within {REQUEST_TIMEOUT_S:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise UnavailableError(
                f"no answer from {self._host}:{self._port}: {error}", hint="is the stack running? coppice up starts one"
            ) from None


async def _response_lines(reader: asyncio.StreamReader, path: str) -> AsyncIterator[bytes]:
    status_line = await reader.readline()
    words = status_line.split(None, 2)
    if len(words) < 2:
        raise OSError("the connection was closed without an answer")
    chunked = False
    while (header := (await reader.readline()).strip().lower()) != b"":
        chunked = chunked or (header.startswith(b"transfer-encoding:") and b"chunked" in header)
    rest = b""
    lines: list[bytes] = []
    refused = words[1] != b"200"
    async for piece in _chunks(reader) if chunked else _until_closed(reader):
        *complete, rest = (rest + piece).split(b"\n")
        for line in complete:
            if refused:
                lines.append(line)
            else:
                yield line.rstrip(b"\r")
    if refused:
        raise CoppiceError(f"{path} answered {words[1].decode()}: {_message(b''.join([*lines, rest]))}")
    if rest:
        yield rest


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while (size := int((await reader.readline()).split(b";")[0] or b"0", 16)) > 0:
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(65536):
        yield piece


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
