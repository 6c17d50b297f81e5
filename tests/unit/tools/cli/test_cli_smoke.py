"""`coppice bench smoke` against a server of a few lines, and the rates it computes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice_bench.serve import smoke
from coppice_bench.serve.load.records import Record
from coppice_up.ports import free_addresses
from tests.fakes.api.openai_server import OpenAIServer, Say, events_of, openai_server, refusal


class Stack(OpenAIServer):
    """Caches whole prompts. Its context is short, as that of the demo model."""

    def completion(self, body: dict[str, Any]) -> Say:
        before = [asked["prompt"] for asked in self.asked[:-1]]
        return self.generated(body, is_cached=body["prompt"] in before)


def test_all_phases_against_a_stack() -> None:
    with openai_server(Stack(context=400)) as stack:
        result = asyncio.run(smoke.measure(stack.url))
    assert result.model == "fake"
    assert result.output_tokens == 64
    assert 150 < result.prompt_tokens_mean <= 201
    assert 0.99 < result.cached_share < 1
    assert len({asked["prompt"] for asked in stack.asked}) == 1 + 3 * smoke.REQUESTS, "only the warm phase repeats"
    assert result.prefill_tok_s > 0
    assert result.decode_tok_s > 0
    assert result.as_dict()["ttft_cold_ms_p50"] > 0


def record(sent: float, first: float, last: float, *, cached: int = 0) -> Record:
    return Record(0, "ok", "", sent, sent, first, last, last, prompt_tokens=100, cached_tokens=cached, output_tokens=11)


def test_rates_by_hand() -> None:
    records = [record(0.0, 1.0, 2.0), record(0.5, 2.0, 3.0, cached=20)]
    assert smoke._prefill_rate(records) == pytest.approx(180 / 2.0)
    assert smoke._decode_rate(records) == pytest.approx(20 / 2.0)


def test_a_refusal_is_told_with_the_servers_words() -> None:
    server = OpenAIServer(keys=frozenset({"k"}))
    server.answers[0] = refusal(429, "come back later")
    with openai_server(server):
        with pytest.raises(UsageError, match="does not take the key in --api-key: The API key is not known"):
            asyncio.run(smoke.measure(server.url, "wrong"))
        with pytest.raises(CoppiceError, match=r"a completion failed \(429\): come back later"):
            asyncio.run(smoke.measure(server.url, "k"))


def test_an_error_in_the_stream_is_told() -> None:
    server = OpenAIServer(answers={0: Say([events_of({"error": {"message": "worker gone"}})])})
    with openai_server(server), pytest.raises(CoppiceError, match="worker gone"):
        asyncio.run(smoke.measure(server.url))


def test_no_stack_is_told() -> None:
    url = f"http://{free_addresses(1)[0]}"
    with pytest.raises(UnavailableError, match="no answer from"):
        asyncio.run(smoke.measure(url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_an_address_of_the_wrong_kind_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a server"):
        asyncio.run(smoke.measure(url))
