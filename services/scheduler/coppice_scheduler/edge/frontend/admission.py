"""From what a client asks to what the core takes: every check that needs no engine, in the order of its cost."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from coppice.ids import DomainId
from coppice.messages.reuse import CALL_KINDS
from coppice.messages.sampling import COMPLETION_TOKENS
from coppice.namespaces import digest_salt
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.base.json_size import check_json_size
from coppice_scheduler.edge.base.tenant_model import ContextLimit
from coppice_scheduler.edge.frontend.generation_spec import (
    ASSISTANT,
    MAX_CACHE_SALT,
    MAX_MESSAGES,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPTS,
    MAX_RUNS,
    MAX_STREAMED_PROMPT_LOGPROBS,
    MAX_TIMEOUT_S,
    ROLES,
    ChatPrompt,
    Endpoint,
    GenerationSpec,
    Prompt,
    TextPrompt,
)
from coppice_scheduler.edge.frontend.text_work import TextWork
from coppice_scheduler.edge.text.chat import ChatTemplate, PromptEnd
from coppice_scheduler.edge.text.output_format import OutputFormat
from coppice_scheduler.edge.text.reasoning.formats import ReasoningFormat
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE, Tokenizer, TooManyTokens

# With tools it is one more. Who does not tell calls apart says 0.
_KIND_BY_ENDPOINT = {Endpoint.COMPLETIONS: 1, Endpoint.CHAT: 2, Endpoint.RESPONSES: 4, Endpoint.MESSAGES: 6}
_LOW_PRIORITY = CALL_KINDS // 2
_MESSAGE_COST = 100  # characters of text that take as long as what a template does for a message


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that can run: packed tokens, and how many tokens may follow."""

    tokens: bytes
    max_new_tokens: int
    text: str | None = None  # what the client sent, where that was text
    opens_reasoning: bool | None = None  # the chat template ends within it; None of what is no chat

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) // TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class _Read:
    tokens: bytes
    opens_reasoning: bool | None = None


def check_messages(prompt: ChatPrompt) -> None:
    """Raises ApiError."""
    if not prompt.messages:
        raise invalid("messages is empty.", param="messages", code="empty")
    if len(prompt.messages) > MAX_MESSAGES:
        raise invalid(
            f"messages has {len(prompt.messages)} entries; at most {MAX_MESSAGES} are taken.", param="messages"
        )
    arguments = [call.arguments.encode("utf-8", "replace") for message in prompt.messages for call in message.calls]
    check_json_size(arguments, "the arguments of calls", "messages")
    for place, message in enumerate(prompt.messages):
        if message.role not in ROLES:
            raise invalid(
                f"messages[{place}].role is {message.role[:50]!r}; supported are {', '.join(ROLES)}.",
                param=f"messages[{place}].role",
                code="unsupported_parameter",
            )
        if message.calls and message.role != ASSISTANT:
            where = f"messages[{place}].tool_calls"
            raise invalid(f"{where} are for messages of the assistant.", param=where)


def check_goes_on(output_format: OutputFormat | None) -> None:
    """A form is that of a whole answer: none is had of one that goes on from a message. Raises ApiError."""
    if output_format is not None:
        field = output_format.field
        raise invalid(f"{field} cannot be had of an answer that goes on from a message.", param=field)


def opens_reasoning(reasoning: ReasoningFormat | None, chat: ChatPrompt, text: str) -> bool:
    """Whether an answer to the prompt `text` begins within reasoning. `reasoning`: as the model writes it, or None."""
    if reasoning is None:
        return False
    if chat.end is PromptEnd.WITHIN_LAST_MESSAGE:
        return reasoning.is_open_within(chat.messages[-1].content)
    return reasoning.is_open_after(text)


def check_width(spec: GenerationSpec, tenant: Tenant) -> None:
    """The beams of a search run at once. Raises ApiError."""
    if spec.uses_beams and spec.num_candidates > tenant.concurrency:
        raise invalid(
            f"{spec.num_candidates} beams run at once; this tenant may have {tenant.concurrency} requests at work.",
            param="n" if spec.best_of is None else "best_of",
        )


def deadline_ns_of(spec: GenerationSpec, arrived_ns: int) -> int | None:
    if spec.timeout_s is None or spec.timeout_s > MAX_TIMEOUT_S:
        return None
    if not spec.timeout_s > 0:
        raise invalid(f"timeout is {spec.timeout_s:g}; it must be above 0", param="timeout")
    return arrived_ns + int(spec.timeout_s * 1e9)


def capped_retain_ms(spec: GenerationSpec, tenant: Tenant, most_ms: int) -> int:
    """How long the prompt is kept: as asked, up to the service's maximum and the tenant's."""
    return min(spec.retain_ms, most_ms, most_ms if tenant.max_retain_ms is None else tenant.max_retain_ms)


def call_kind_of(spec: GenerationSpec) -> int:
    """The number of the call's kind, 1 to CALL_KINDS - 1: by endpoint, with tools or without, and whether others go
    first, as before batches. Prompts of one kind may come again more often than those of another."""
    kind = _KIND_BY_ENDPOINT[spec.endpoint] + (spec.tool_use is not None)
    return kind + _LOW_PRIORITY * (spec.priority > 0)


def salt_of(spec: GenerationSpec, domain: DomainId) -> bytes:
    """Digest of the client's salt, empty without one. The text goes no further. Raises ApiError."""
    if spec.cache_salt is None:
        return b""
    if not 1 <= len(spec.cache_salt) <= MAX_CACHE_SALT:
        count = len(spec.cache_salt)
        raise invalid(f"cache_salt has {count} characters; it must have 1 to {MAX_CACHE_SALT}.", param="cache_salt")
    return digest_salt(domain, spec.cache_salt)


def size_of(chat: ChatPrompt) -> int:
    """Characters of text that take as long to render. A template may look at its values once for each message."""
    texts = sum(len(m.content) + len(m.name or "") + len(m.reasoning or "") + _MESSAGE_COST for m in chat.messages)
    texts += sum(len(call.name) + len(call.arguments) + _MESSAGE_COST for m in chat.messages for call in m.calls)
    texts += sum(len(tool.description or "") + len(tool.parameters) + _MESSAGE_COST for tool in chat.tools)
    values = len(json.dumps(chat.template_values)) if chat.template_values else 0
    return texts + values * (1 + len(chat.messages))


class PromptReader:
    """Turns prompts into tokens that fit the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: ModelInfo,
        chat_max_tokens: int,
        text_work: TextWork,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """`reasoning`: as the model writes it, if it does."""
        self._reasoning = reasoning
        self._text_work = text_work
        self._tokenizer = tokenizer
        self._template = template
        self._chat_max_tokens = chat_max_tokens
        self.vocab_size = model.vocab_size or tokenizer.vocab_size

    async def admit(self, tenant: str, spec: GenerationSpec, context: ContextLimit) -> tuple[Admitted, ...]:
        """All prompts of a call, or ApiError for the first that cannot run."""
        if spec.goes_on:
            check_goes_on(spec.output_format)
        if not spec.prompts:
            raise invalid("prompt is empty", param="prompt", code="empty")
        if len(spec.prompts) > MAX_PROMPTS:
            raise invalid(f"prompt has {len(spec.prompts)} entries; at most {MAX_PROMPTS} are taken", param="prompt")
        if len(spec.prompts) * spec.num_candidates > MAX_RUNS:
            name = "n" if spec.best_of is None else "best_of"
            raise invalid(
                f"{len(spec.prompts)} prompts with {name}={spec.num_candidates} are more than {MAX_RUNS} answers",
                param=name,
            )
        admitted = []
        for prompt in spec.prompts:
            read = await self._read(tenant, prompt, spec.prompt_field, context, at_most=context.num_tokens - 1)
            text = prompt.text if isinstance(prompt, TextPrompt) else None
            admitted.append(Admitted(read.tokens, self._room(read.tokens, spec, context), text, read.opens_reasoning))
        _check_prompt_logprobs(sum(prompt.num_prompt_tokens for prompt in admitted), spec)
        return tuple(admitted)

    async def tokens_of(
        self, tenant: str, prompt: Prompt, field: str, context: ContextLimit, *, add_special_tokens: bool = True
    ) -> bytes:
        """Packed tokens of one prompt; `field` is what an error names. A chat has its special tokens in its template.

        Raises ApiError, also for a text that is far beyond the context.
        """
        read = await self._read(tenant, prompt, field, context, add_special_tokens=add_special_tokens)
        return read.tokens

    async def _read(
        self,
        tenant: str,
        prompt: Prompt,
        field: str,
        context: ContextLimit,
        *,
        add_special_tokens: bool = True,
        at_most: int | None = None,
    ) -> _Read:
        if isinstance(prompt, ChatPrompt):
            chat = prompt
            check_messages(chat)
            size = size_of(chat)

            def rendered() -> _Read:
                text = self._template.render_now(chat.messages, chat.template_values, chat.tools, chat.end)
                tokens = self._encoded(text, field, context, False, at_most)
                return _Read(tokens, opens_reasoning(self._reasoning, chat, text))

            return await self._text_work.run(tenant, size, rendered)
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            if not text:
                raise invalid("The prompt is empty.", param=field, code="empty")
            self._refuse_hopeless(text, field, context)
            return await self._text_work.run(
                tenant, len(text), lambda: _Read(self._encoded(text, field, context, add_special_tokens, at_most))
            )
        self.check_ids(prompt.tokens, field)
        return _Read(prompt.tokens)

    def _encoded(
        self, text: str, field: str, context: ContextLimit, add_special_tokens: bool, at_most: int | None
    ) -> bytes:
        self._refuse_hopeless(text, field, context)
        try:
            return self._tokenizer.encode_now(text, add_special_tokens=add_special_tokens, at_most=at_most)
        except TooManyTokens as error:
            raise context.too_long(str(error.num_tokens), field) from None

    def _refuse_hopeless(self, text: str, field: str, context: ContextLimit) -> None:
        at_least = self._tokenizer.at_least_tokens(text)
        if at_least >= context.num_tokens:
            raise context.too_long(f"at least {at_least}", field)

    def check_ids(self, tokens: bytes, field: str) -> None:
        """Raises ApiError for what is no list of token ids of this model."""
        if len(tokens) % TOKEN_DTYPE.itemsize:
            raise invalid(f"{len(tokens)} bytes are no whole number of 4-byte tokens", param=field)
        ids = np.frombuffer(tokens, dtype=TOKEN_DTYPE)
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise invalid(
                f"token id {int(ids.max())} does not exist; token ids of this model are 0 to {self.vocab_size - 1}",
                param=field,
                code="invalid_token_id",
            )

    def _room(self, tokens: bytes, spec: GenerationSpec, context: ContextLimit) -> int:
        """How many tokens may follow."""
        num_tokens = len(tokens) // TOKEN_DTYPE.itemsize
        if not num_tokens:
            raise invalid("The prompt is empty.", param=spec.prompt_field, code="empty")
        room = context.num_tokens - num_tokens
        if room < 1:
            raise context.too_long(str(num_tokens), spec.prompt_field)
        if spec.max_tokens is None:
            wanted = (self._chat_max_tokens or room) if spec.is_chat else COMPLETION_TOKENS
            return min(wanted, room)
        if spec.max_tokens > room and not spec.fills_context:
            raise context.too_many(num_tokens, spec.max_tokens)
        # The engine samples at least one; TextStream shows none of it where none was asked for.
        return min(max(spec.max_tokens, 1), room)


def _check_prompt_logprobs(num_tokens: int, spec: GenerationSpec) -> None:
    """What is told of prompts is bounded: it is large, and made by the process that all tenants share."""
    asked = [
        (spec.num_prompt_logprobs, "prompt_logprobs", spec.n),
        (spec.num_logprobs if spec.echo else None, "logprobs", spec.num_candidates),  # each computes the prompt
    ]
    most = MAX_STREAMED_PROMPT_LOGPROBS if spec.streams else MAX_PROMPT_LOGPROBS
    for number, name, times in asked:
        told = 0 if number is None else num_tokens * (number + 1) * times
        if told > most:
            raise invalid(
                f"{name} would tell {told} tokens of the prompt; at most {most} are told in one "
                f"{'stream' if spec.streams else 'answer'}. Ask for fewer of them, or shorten the prompt.",
                param=name,
            )
