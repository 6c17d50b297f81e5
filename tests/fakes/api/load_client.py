"""A client as `vllm bench serve` is one: what it sends, and how it reads what comes.

It trims each piece of the network before it looks for events, and counts what is left as one if it is complete. So an
event must not depend on blanks around it, and what comes in a piece of its own must not be the beginning of the next.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_PREFIX, _DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`path`: that of completions, or of chats."""

    path: str
    prompt: str
    num_tokens: int
    request_id: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    def body(self, model: str) -> dict[str, Any]:
        asked: dict[str, Any]
        if self.is_chat:
            messages = [{"role": "user", "content": [{"type": "text", "text": self.prompt}]}]
            asked = {"messages": messages, "max_completion_tokens": self.num_tokens}
        else:
            asked = {"prompt": self.prompt, "repetition_penalty": 1.0, "max_tokens": self.num_tokens, "logprobs": None}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, **asked, **stream, "ignore_eos": True, **self.fields}


@dataclass(slots=True)
class LoadAnswer:
    """What the client tells of one request."""

    status: int = 0
    request_id: str = ""
    text: str = ""
    num_chunks: int = 0  # with choices
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    is_done: bool = False

    def take(self, message: str, *, is_chat: bool) -> None:
        if message.startswith(":"):
            return
        data = message.removeprefix(_PREFIX)
        if data == _DONE:
            self.is_done = True
            return
        event = json.loads(data)
        if choices := event.get("choices"):
            self.num_chunks += 1
            self.text += (choices[0]["delta"].get("content") if is_chat else choices[0].get("text")) or ""
        elif usage := event.get("usage"):
            self.num_output_tokens, self.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


class Messages:
    """Pieces of the network to messages."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, piece: bytes) -> Iterator[str]:
        self._rest += piece.strip().decode()
        *whole, self._rest = self._rest.split("\n\n")
        yield from filter(None, map(str.strip, whole))
        if _is_complete(self._rest):
            rest, self._rest = self._rest.strip(), ""
            yield rest


def _is_complete(text: str) -> bool:
    if not text.startswith(_PREFIX):
        return False
    data = text.removeprefix(_PREFIX).strip()
    if data == _DONE:
        return True
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


async def send(client: httpx.AsyncClient, model: str, request: LoadRequest) -> LoadAnswer:
    answer, messages = LoadAnswer(), Messages()
    headers = {"x-request-id": request.request_id, "Authorization": "Bearer none"}
    async with client.stream("POST", request.path, json=request.body(model), headers=headers) as response:
        answer.status, answer.request_id = response.status_code, response.headers.get("x-request-id", "")
        async for piece in response.aiter_raw():
            for message in messages.feed(piece):
                answer.take(message, is_chat=request.is_chat)
    return answer


def send_all(url: str, model: str, requests: Sequence[LoadRequest], timeout_s: float) -> list[LoadAnswer]:
    """All at once."""

    async def run() -> list[LoadAnswer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout_s, trust_env=False) as client:
            return list(await asyncio.gather(*(send(client, model, request) for request in requests)))

    return asyncio.run(run())
