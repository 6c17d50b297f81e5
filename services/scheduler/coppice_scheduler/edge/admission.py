"""From what a client asks to what the core takes: every check that needs no engine, in the order of its cost."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np

from coppice.messages.step import SamplingParams
from coppice_scheduler.edge.chat import ChatTemplate
from coppice_scheduler.edge.checkpoint_text import SamplingDefaults
from coppice_scheduler.edge.engine import ModelInfo
from coppice_scheduler.edge.errors import ApiError, invalid
from coppice_scheduler.edge.generation_spec import (
    COMPLETION_MAX_TOKENS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    ROLES,
    ChatPrompt,
    GenerationSpec,
    Prompt,
    TextPrompt,
)
from coppice_scheduler.edge.tokenizer import TOKEN_DTYPE, Tokenizer

_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that can run: packed tokens, and how many tokens may follow."""

    tokens: bytes
    max_new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) // TOKEN_DTYPE.itemsize


def sampling_of(spec: GenerationSpec, defaults: SamplingDefaults) -> SamplingParams:
    """Check the sampling options and fill in defaults. Raises ApiError. A call without a seed gets a random one."""
    temperature = defaults.temperature if spec.temperature is None else spec.temperature
    if not 0 <= temperature <= MAX_TEMPERATURE and spec.temperature is not None:
        raise invalid(f"temperature is {temperature:g}; it must be from 0 to {MAX_TEMPERATURE:g}", param="temperature")
    top_p = defaults.top_p if spec.top_p is None else spec.top_p
    if not 0 < top_p <= 1 or math.isnan(top_p):
        raise invalid(f"top_p is {top_p:g}; it must be above 0 and at most 1", param="top_p")
    top_k = defaults.top_k if spec.top_k is None else spec.top_k
    if not -1 <= top_k < 2**31:
        raise invalid(f"top_k is {top_k}; it must be -1 or 0 (off) or a count of tokens", param="top_k")
    if spec.seed is not None and not -(2**63) <= spec.seed <= _U64:
        raise invalid("seed must be an integer of at most 64 bits", param="seed")
    seed = secrets.randbits(64) if spec.seed is None else spec.seed & _U64
    return SamplingParams(temperature=float(temperature), top_k=max(top_k, 0), top_p=float(top_p), seed=seed)


def check_stops(spec: GenerationSpec, vocab_size: int) -> None:
    """Raises ApiError."""
    if len(spec.stop) > MAX_STOPS:
        raise invalid(f"stop has {len(spec.stop)} strings; at most {MAX_STOPS} are taken", param="stop")
    for stop in spec.stop:
        if not stop:
            raise invalid("stop has an empty string", param="stop")
        if len(stop.encode("utf-8", "replace")) > MAX_STOP_BYTES:
            raise invalid(f"a stop string has more than {MAX_STOP_BYTES} bytes", param="stop")
    if len(spec.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    for token_id in spec.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"stop_token_ids has {token_id}; token ids of this model are 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )


def check_messages(prompt: ChatPrompt) -> None:
    """Raises ApiError."""
    if not prompt.messages:
        raise invalid("messages is empty.", param="messages", code="empty")
    if len(prompt.messages) > MAX_MESSAGES:
        raise invalid(
            f"messages has {len(prompt.messages)} entries; at most {MAX_MESSAGES} are taken.", param="messages"
        )
    for place, message in enumerate(prompt.messages):
        if message.role not in ROLES:
            raise invalid(
                f"messages[{place}].role is {message.role[:50]!r}; supported are {', '.join(ROLES)}.",
                param=f"messages[{place}].role",
                code="unsupported_parameter",
            )


class PromptReader:
    """Turns prompts into tokens that fit the model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, model: ModelInfo, chat_max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context = model.max_context
        self._chat_max_tokens = chat_max_tokens
        self.vocab_size = model.vocab_size or tokenizer.vocab_size

    async def admit(self, spec: GenerationSpec) -> tuple[Admitted, ...]:
        """All prompts of a call, or ApiError for the first that cannot run."""
        if not spec.prompts:
            raise invalid("prompt is empty", param="prompt", code="empty")
        if len(spec.prompts) > MAX_PROMPTS:
            raise invalid(f"prompt has {len(spec.prompts)} entries; at most {MAX_PROMPTS} are taken", param="prompt")
        if spec.max_tokens is not None and spec.max_tokens < 1:
            raise invalid(f"max_tokens is {spec.max_tokens}; it must be at least 1", param="max_tokens")
        admitted = []
        for prompt in spec.prompts:
            tokens = await self._tokens_of(prompt, spec.prompt_field)
            admitted.append(self._fit(tokens, spec))
        return tuple(admitted)

    async def _tokens_of(self, prompt: Prompt, field: str) -> bytes:
        if isinstance(prompt, ChatPrompt):
            check_messages(prompt)
            text = await self._template.render(prompt.messages)
            self._refuse_hopeless(text, field)
            return await self._tokenizer.encode(text, add_special_tokens=False)
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise invalid("The prompt is empty.", param=field, code="empty")
            self._refuse_hopeless(prompt.text, field)
            return await self._tokenizer.encode(prompt.text, add_special_tokens=True)
        self._check_ids(prompt.tokens, field)
        return prompt.tokens

    def _refuse_hopeless(self, text: str, field: str) -> None:
        at_least = self._tokenizer.at_least_tokens(text)
        if at_least >= self._max_context:
            raise _too_long(f"at least {at_least}", self._max_context, field)

    def _check_ids(self, tokens: bytes, field: str) -> None:
        if len(tokens) % TOKEN_DTYPE.itemsize:
            raise invalid(f"{len(tokens)} bytes are no whole number of 4-byte tokens", param=field)
        ids = np.frombuffer(tokens, dtype=TOKEN_DTYPE)
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise invalid(
                f"token id {int(ids.max())} does not exist; token ids of this model are 0 to {self.vocab_size - 1}",
                param=field,
                code="invalid_token_id",
            )

    def _fit(self, tokens: bytes, spec: GenerationSpec) -> Admitted:
        num_tokens = len(tokens) // TOKEN_DTYPE.itemsize
        if not num_tokens:
            raise invalid("The prompt is empty.", param=spec.prompt_field, code="empty")
        room = self._max_context - num_tokens
        if room < 1:
            raise _too_long(str(num_tokens), self._max_context, spec.prompt_field)
        if spec.max_tokens is None:
            wanted = (self._chat_max_tokens or room) if spec.is_chat else COMPLETION_MAX_TOKENS
            return Admitted(tokens, min(wanted, room))
        if spec.max_tokens > room:
            raise invalid(
                f"This model's context is {self._max_context} tokens; {num_tokens} in the prompt and max_tokens "
                f"{spec.max_tokens} are {num_tokens + spec.max_tokens}. At most {room} tokens can follow this prompt.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return Admitted(tokens, spec.max_tokens)


def _too_long(num_tokens: str, max_context: int, field: str) -> ApiError:
    return invalid(
        f"This model's context is {max_context} tokens and must hold at least one new one; the prompt has "
        f"{num_tokens} tokens. Shorten it.",
        param=field,
        code="context_length_exceeded",
    )
