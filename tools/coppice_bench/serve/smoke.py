"""What `coppice bench smoke` measures. Short and coarse: it shows that a stack works and roughly how fast.

ttft_cold    prompts that nobody sent before, one after another
ttft_warm    the same prompts again, one after another         cached_share: cached of all their prompt tokens
prefill      new prompts, all at once, one token each           prompt tokens / time until the last one answered
decode       new short prompts, all at once, many tokens each   tokens after each first / first token to last token
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coppice.errors import CoppiceError, UnavailableError
from coppice_bench.serve.load.answer import Answer
from coppice_bench.serve.load.http import Endpoint, HttpClient
from coppice_bench.serve.load.prompts import Bodies, Run
from coppice_bench.serve.load.records import Record, record_of
from coppice_bench.serve.options import ServeOptions
from coppice_bench.serve.preflight import find_model

REQUESTS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
CONTEXT_SHARE = 0.5  # of the model's context, so that prompt and output fit a small model
REQUEST_TIMEOUT_S = 300.0
CALIBRATION_WORDS = 32
DECODE_PROMPT_WORDS = 8


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """Rates in tokens per second, times in milliseconds (medians), shares from 0 to 1."""

    model: str
    prefill_tok_s: float
    decode_tok_s: float
    ttft_cold_ms_p50: float
    ttft_warm_ms_p50: float
    cached_share: float
    requests: int
    prompt_tokens_mean: float
    output_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded to what such a short run can tell."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


async def measure(url: str, api_key: str = "") -> SmokeResult:
    """Run all phases against a stack. Raises CoppiceError when it refuses or is not there."""
    client = HttpClient(Endpoint.parse(url))
    try:
        found = await find_model(client, ServeOptions(url=url, api_key=api_key))
        return await _Phases(client, Bodies(found.name, "completions", 0.0), api_key).run(found.name, found.context)
    finally:
        client.close()


class _Phases:
    def __init__(self, client: HttpClient, bodies: Bodies, api_key: str) -> None:
        self._client = client
        self._bodies = bodies
        self._api_key = api_key

    async def run(self, model: str, context: int) -> SmokeResult:
        context = context or 2 * PROMPT_TOKENS
        words = _Words()
        calibration = await self._complete(words.text(CALIBRATION_WORDS), 2)
        wanted_tokens = min(PROMPT_TOKENS, int(context * CONTEXT_SHARE))
        num_words = max(1, CALIBRATION_WORDS * wanted_tokens // calibration.prompt_tokens)
        output_tokens = min(OUTPUT_TOKENS, context // 4)

        prompts = [words.text(num_words) for _ in range(REQUESTS)]
        cold = [await self._complete(prompt, 1) for prompt in prompts]
        warm = [await self._complete(prompt, 1) for prompt in prompts]
        prefill = await self._at_once([words.text(num_words) for _ in range(REQUESTS)], 1)
        decode = await self._at_once([words.text(DECODE_PROMPT_WORDS) for _ in range(REQUESTS)], output_tokens)
        return SmokeResult(
            model=model,
            prefill_tok_s=_prefill_rate(prefill),
            decode_tok_s=_decode_rate(decode),
            ttft_cold_ms_p50=median(record.ttft_ms for record in cold),
            ttft_warm_ms_p50=median(record.ttft_ms for record in warm),
            cached_share=sum(r.cached_tokens for r in warm) / sum(r.prompt_tokens for r in warm),
            requests=REQUESTS,
            prompt_tokens_mean=sum(r.prompt_tokens for r in cold) / REQUESTS,
            output_tokens=output_tokens,
        )

    async def _at_once(self, prompts: Sequence[str], max_tokens: int) -> list[Record]:
        return await asyncio.gather(*(self._complete(prompt, max_tokens) for prompt in prompts))

    async def _complete(self, prompt: str, max_tokens: int) -> Record:
        """Exactly `max_tokens` tokens, greedily. Raises CoppiceError for whatever else comes."""
        body = self._bodies.single(Run((prompt,)), max_tokens)
        request = self._client.endpoint.request("POST", self._bodies.path, body, self._api_key)
        answer, sent_s = Answer(), time.monotonic()
        try:
            await self._client.send(request, answer, REQUEST_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"a completion was not answered within {REQUEST_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise UnavailableError(f"the stack went away: {error}", hint="see the logs of the scheduler") from None
        record = record_of(answer, sender=0, due_s=sent_s, sent_s=sent_s, now_s=time.monotonic())
        if not record.is_ok:
            raise CoppiceError(f"a completion failed ({record.outcome}): {record.message}")
        return record


def _prefill_rate(records: Sequence[Record]) -> float:
    uncached = sum(record.prompt_tokens - record.cached_tokens for record in records)
    return uncached / (max(r.first_s for r in records) - min(r.sent_s for r in records))


def _decode_rate(records: Sequence[Record]) -> float:
    tokens = sum(record.output_tokens - 1 for record in records)
    return tokens / (max(r.last_s for r in records) - min(r.first_s for r in records))


class _Words:
    """Prompts of made-up words; each starts with a word of its own, so that no two share a block."""

    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(64))
        self._vocabulary = ["".join(self._random.choices("aeinorst", k=4)) for _ in range(512)]

    def text(self, num_words: int) -> str:
        return " ".join([secrets.token_hex(4), *self._random.choices(self._vocabulary, k=num_words)])
