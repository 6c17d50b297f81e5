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
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coppice.cli.openai_stream import OpenAIStream, Timing
from coppice.errors import CoppiceError

REQUESTS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
CONTEXT_SHARE = 0.5  # of the model's context, so that prompt and output fit a small model
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


async def measure(client: OpenAIStream) -> SmokeResult:
    """Run all phases against a stack. Raises CoppiceError when it refuses or is not there."""
    models = (await client.get("/v1/models")).get("data") or []
    if not models:
        raise CoppiceError("the stack serves no model", hint="is a worker running?")
    model = str(models[0]["id"])
    context = int(models[0].get("max_model_len") or 2 * PROMPT_TOKENS)
    words = _Words()
    calibration = await client.complete(model, words.text(CALIBRATION_WORDS), 2)
    wanted_tokens = min(PROMPT_TOKENS, int(context * CONTEXT_SHARE))
    num_words = max(1, CALIBRATION_WORDS * wanted_tokens // calibration.prompt_tokens)
    output_tokens = min(OUTPUT_TOKENS, context // 4)

    prompts = [words.text(num_words) for _ in range(REQUESTS)]
    cold = [await client.complete(model, prompt, 1) for prompt in prompts]
    warm = [await client.complete(model, prompt, 1) for prompt in prompts]
    prefill = await _at_once(client, model, [words.text(num_words) for _ in range(REQUESTS)], 1)
    decode = await _at_once(client, model, [words.text(DECODE_PROMPT_WORDS) for _ in range(REQUESTS)], output_tokens)
    return SmokeResult(
        model=model,
        prefill_tok_s=_prefill_rate(prefill),
        decode_tok_s=_decode_rate(decode),
        ttft_cold_ms_p50=median(timing.ttft_ms for timing in cold),
        ttft_warm_ms_p50=median(timing.ttft_ms for timing in warm),
        cached_share=sum(t.cached_tokens for t in warm) / sum(t.prompt_tokens for t in warm),
        requests=REQUESTS,
        prompt_tokens_mean=sum(t.prompt_tokens for t in cold) / REQUESTS,
        output_tokens=output_tokens,
    )


async def _at_once(client: OpenAIStream, model: str, prompts: Sequence[str], max_tokens: int) -> list[Timing]:
    return await asyncio.gather(*(client.complete(model, prompt, max_tokens) for prompt in prompts))


def _prefill_rate(timings: Sequence[Timing]) -> float:
    uncached = sum(timing.prompt_tokens - timing.cached_tokens for timing in timings)
    return uncached / (max(t.first_token_s for t in timings) - min(t.sent_s for t in timings))


def _decode_rate(timings: Sequence[Timing]) -> float:
    tokens = sum(timing.completion_tokens - 1 for timing in timings)
    return tokens / (max(t.last_token_s for t in timings) - min(t.first_token_s for t in timings))


class _Words:
    """Prompts of made-up words; each starts with a word of its own, so that no two share a block."""

    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(64))
        self._vocabulary = ["".join(self._random.choices("aeinorst", k=4)) for _ in range(512)]

    def text(self, num_words: int) -> str:
        return " ".join([secrets.token_hex(4), *self._random.choices(self._vocabulary, k=num_words)])
