"""The measuring client against a server of a few lines, and the rates it computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coppice.cli import smoke
from coppice.cli.openai_stream import OpenAIStream, Timing
from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.up.ports import free_addresses

Answer = Callable[[str, dict[str, Any]], tuple[int, list[bytes]]]


async def with_server(answer: Answer, use: Callable[[str], Awaitable[Any]]) -> Any:
    """Serve `answer(path, request) -> (status, chunks)` while `use(url)` runs."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        length = 0
        while (header := (await reader.readline()).strip()) != b"":
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        body = json.loads(await reader.readexactly(length) or b"{}")
        status, chunks = answer(path, body)
        writer.write(b"HTTP/1.1 %d Whatever\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        for chunk in chunks:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


class FakeStack:
    """Counts a word as a token and caches whole prompts."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, path: str, request: dict[str, Any]) -> tuple[int, list[bytes]]:
        if path == "/v1/models":
            return 200, [json.dumps({"data": [{"id": "m", "max_model_len": 400}]}).encode()]
        tokens = len(request["prompt"].split())
        cached = tokens - 1 if request["prompt"] in self.seen else 0
        self.seen.add(request["prompt"])
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": request["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events = [{"choices": [{"text": "x"}], "usage": None}] * request["max_tokens"]
        events.append({"choices": [], "usage": usage})
        text = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
        # Chunks end in the middle of lines, as they may on a network.
        return 200, [text[start : start + 37] for start in range(0, len(text), 37)]


def test_all_phases_against_a_stack() -> None:
    stack = FakeStack()
    result = asyncio.run(with_server(stack, lambda url: smoke.measure(OpenAIStream(url))))
    assert result.model == "m"
    assert result.output_tokens == 64
    assert 150 < result.prompt_tokens_mean <= 201
    assert 0.99 < result.cached_share < 1
    assert len(stack.seen) == 1 + 3 * smoke.REQUESTS, "only the warm phase repeats prompts"
    assert set(result.as_dict()) >= {
        "prefill_tok_s",
        "decode_tok_s",
        "ttft_cold_ms_p50",
        "ttft_warm_ms_p50",
        "cached_share",
    }
    assert result.prefill_tok_s > 0
    assert result.decode_tok_s > 0


def timing(sent: float, first: float, last: float, *, cached: int = 0) -> Timing:
    return Timing(sent, first, last, prompt_tokens=100, cached_tokens=cached, completion_tokens=11)


def test_rates_by_hand() -> None:
    timings = [timing(0.0, 1.0, 2.0), timing(0.5, 2.0, 3.0, cached=20)]
    assert smoke._prefill_rate(timings) == pytest.approx(180 / 2.0)
    assert smoke._decode_rate(timings) == pytest.approx(20 / 2.0)
    assert timing(0.5, 2.0, 3.0).ttft_ms == pytest.approx(1500)


def test_a_refusal_is_told_with_the_servers_words() -> None:
    def refuse(path: str, request: dict[str, Any]) -> tuple[int, list[bytes]]:
        return 401, [json.dumps({"error": {"message": "no such key"}}).encode()]

    with pytest.raises(CoppiceError, match="/v1/models answered 401: no such key"):
        asyncio.run(with_server(refuse, lambda url: smoke.measure(OpenAIStream(url))))


def test_an_error_in_the_stream_is_told() -> None:
    def fail(path: str, request: dict[str, Any]) -> tuple[int, list[bytes]]:
        return 200, [b'data: {"error": {"message": "worker gone"}}\n\n']

    with pytest.raises(CoppiceError, match="worker gone"):
        asyncio.run(with_server(fail, lambda url: OpenAIStream(url).complete("m", "p", 1)))


def test_no_stack_is_told() -> None:
    url = f"http://{free_addresses(1)[0]}"
    with pytest.raises(UnavailableError, match="no answer from"):
        asyncio.run(smoke.measure(OpenAIStream(url)))


@pytest.mark.parametrize("url", ["localhost:8000", "https://x", "http://"])
def test_an_address_of_the_wrong_kind_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a stack"):
        OpenAIStream(url)
