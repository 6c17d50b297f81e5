"""A server of the OpenAI API of a few lines, which says what a test tells it to, in pieces that end anywhere."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "fake"
CONTEXT = 4096


@dataclass
class Say:
    """One answer. `pieces` are written as they are; `is_cut` closes the connection before the end of the body."""

    pieces: Sequence[bytes]
    status: int = 200
    content_type: str = "text/event-stream"
    is_cut: bool = False
    framing: str = "chunked"  # or "length", "close"


def events_of(*events: Any) -> bytes:
    return b"".join(
        b"data: %s\n\n" % (json.dumps(event).encode() if event != "[DONE]" else b"[DONE]") for event in events
    )


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def refusal(status: int, message: str) -> Say:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
    return Say([body], status, "application/json", framing="length")


@dataclass
class OpenAIServer:
    """Counts a token id, or a word, as one token. What was asked is in `asked`, with its key."""

    keys: frozenset[str] = frozenset()
    context: int = CONTEXT
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[int, Say] = field(default_factory=dict)  # instead of a completion: to the n-th request, from 0
    num_connections: int = 0

    def answer(self, path: str, key: str, body: dict[str, Any]) -> Say:
        if self.keys and key not in self.keys:
            return refusal(401, "The API key is not known here.")
        if path.endswith("/models"):
            listed = {"data": [{"id": MODEL, "max_model_len": self.context}]}
            return Say([json.dumps(listed).encode()], content_type="application/json", framing="length")
        self.asked.append({**body, "key": key, "path": path})
        return self.answers.get(len(self.asked) - 1) or self.completion(body)

    def completion(self, body: dict[str, Any]) -> Say:
        return self.generated(body, is_cached=False)

    def generated(self, body: dict[str, Any], *, is_cached: bool) -> Say:
        """As many tokens as may be. Half of the prompt counts as cached, or all but its last token."""
        is_chat = "messages" in body
        prompt = " ".join(m["content"] for m in body["messages"]) if is_chat else body["prompt"]
        num_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
        cached = num_tokens - 1 if is_cached else num_tokens // 2
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if is_chat else []
        piece = {"delta": {"content": "so "}} if is_chat else {"text": "so "}
        events += [{"choices": [piece], "usage": None}] * body["max_tokens"]
        text = events_of(*events, usage(num_tokens, body["max_tokens"], cached), "[DONE]")
        return Say([text[start : start + 37] for start in range(0, len(text), 37)])

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first = await reader.readline()
        if not first:
            return False
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        key = headers.get("authorization", "").removeprefix("Bearer ")
        say = self.answer(first.split()[1].decode(), key, body)
        head = f"HTTP/1.1 {say.status} Whatever\r\nContent-Type: {say.content_type}\r\n"
        head += {
            "chunked": "Transfer-Encoding: chunked\r\n",
            "length": f"Content-Length: {sum(map(len, say.pieces))}\r\n",
            "close": "Connection: close\r\n",
        }[say.framing]
        writer.write(head.encode() + b"\r\n")
        for piece in say.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if say.framing == "chunked" else piece)
        if say.framing == "chunked" and not say.is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not say.is_cut and say.framing != "close"


@contextmanager
def openai_server(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serves from a thread of its own."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(listening.close)
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
