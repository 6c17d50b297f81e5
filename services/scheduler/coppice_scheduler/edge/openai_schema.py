"""Request bodies of the OpenAI API to a GenerationSpec, and how the answer is to be shown. Raises ApiError only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coppice_scheduler.edge.chat import ChatMessage
from coppice_scheduler.edge.errors import ApiError, invalid
from coppice_scheduler.edge.generation_spec import (
    MAX_PROMPTS,
    ChatPrompt,
    GenerationSpec,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from coppice_scheduler.edge.json_body import Fields, parse_object
from coppice_scheduler.edge.openai_fields import CHAT_ONLY, COMPLETION_ONLY, check_fields
from coppice_scheduler.edge.tokenizer import TOKEN_DTYPE

_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
_MESSAGE_EMPTY = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content")
_STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation", "continuous_usage_stats"})


@dataclass(frozen=True, slots=True)
class Presentation:
    """How the answer is shown. None of it reaches the engine."""

    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    spec: GenerationSpec
    presentation: Presentation


def parse_chat(raw: bytes) -> ParsedRequest:
    body = parse_object(raw)
    check_fields(body, CHAT_ONLY)
    fields = Fields(body)
    return _parse(fields, (ChatPrompt(_messages(fields)),))


def parse_completion(raw: bytes) -> ParsedRequest:
    body = parse_object(raw)
    check_fields(body, COMPLETION_ONLY)
    fields = Fields(body)
    return _parse(fields, _prompts(fields))


def _parse(fields: Fields, prompts: tuple[Prompt, ...]) -> ParsedRequest:
    fields.text("user")
    fields.text("safety_identifier")
    return ParsedRequest(
        spec=GenerationSpec(
            model=fields.required_text("model"),
            prompts=prompts,
            max_tokens=_max_tokens(fields),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=fields.integer("top_k"),
            seed=fields.integer("seed"),
            stop=fields.texts("stop"),
            stop_token_ids=fields.integers("stop_token_ids"),
            ignore_eos=fields.flag("ignore_eos"),
        ),
        presentation=_presentation(fields),
    )


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens ({old}) and max_completion_tokens ({new}) mean the same and differ; send one.",
            param="max_tokens",
        )
    return old if new is None else new


def _presentation(fields: Fields) -> Presentation:
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    include_usage = False
    if options is not None:
        if not isinstance(options, dict):
            raise fields.wrong("stream_options", "an object")
        for name, value in options.items():
            if name not in _STREAM_OPTIONS or (name != "include_usage" and value):
                raise invalid(
                    f"stream_options.{name[:100]} is not supported; known: include_usage.",
                    param="stream_options",
                    code="unsupported_parameter",
                )
        if not stream:
            raise invalid("stream_options is only for stream: true.", param="stream_options")
        include_usage = Fields(options, "stream_options.").flag("include_usage")
    return Presentation(stream, include_usage, fields.flag("return_token_ids"))


# --- prompts ------------------------------------------------------------------------------------------------------


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    """Text, a list of texts, token ids, or a list of lists of token ids."""
    value = fields.get("prompt")
    if value is None:
        raise invalid("prompt is required.", param="prompt", code="missing")
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise fields.wrong("prompt", "a string, a list of strings, token ids or a list of those")
    if not value:
        raise invalid("prompt is an empty list.", param="prompt", code="empty")
    if type(value[0]) is int:
        return (TokenPrompt(_packed_ids(value)),)
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(value)} entries; at most {MAX_PROMPTS} are taken.", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(item) for item in value)
    if all(isinstance(item, list) for item in value):
        return tuple(TokenPrompt(_packed_ids(item)) for item in value)
    raise fields.wrong("prompt", "a string, a list of strings, token ids or a list of those")


def _packed_ids(ids: list[Any]) -> bytes:
    if set(map(type, ids)) - {int}:
        raise invalid("A prompt of token ids has an entry that is no integer.", param="prompt", code="invalid_token_id")
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:
        raise _no_token_id("larger than 64 bits") from None
    if array.size and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise _no_token_id(str(int(array.min() if int(array.min()) < 0 else array.max())))
    return array.astype(TOKEN_DTYPE).tobytes()


def _no_token_id(what: str) -> ApiError:
    return invalid(f"A prompt of token ids has one that is {what}.", param="prompt", code="invalid_token_id")


# --- messages -----------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    value = fields.get("messages")
    if value is None:
        raise invalid("messages is required.", param="messages", code="missing")
    if not isinstance(value, list):
        raise fields.wrong("messages", "a list of messages")
    return tuple(_message(place, message) for place, message in enumerate(value))


def _message(place: int, message: Any) -> ChatMessage:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with role and content.", param=where)
    fields = Fields(message, f"{where}.")
    role = fields.required_text("role")
    for name, value in message.items():
        # An answer of ours, or of others, is often sent back whole, with its empty fields.
        if name in _MESSAGE_FIELDS or (name in _MESSAGE_EMPTY and value in (None, [], {}, "")):
            continue
        raise invalid(
            f"{where}.{name[:100]} is not supported.", param=f"{where}.{name[:100]}", code="unsupported_parameter"
        )
    return ChatMessage(role=role, content=_content(fields, message, where), name=fields.text("name"))


def _content(fields: Fields, message: Mapping[str, Any], where: str) -> str:
    """Text, or parts of type text; parts are joined by newlines, as vLLM does for templates that want a string."""
    value = message.get("content")
    if isinstance(value, str):
        return value
    if value is None:
        raise invalid(f"{where}.content is required.", param=f"{where}.content", code="missing")
    if not isinstance(value, list):
        raise fields.wrong("content", "a string or a list of text parts")
    parts = []
    for number, part in enumerate(value):
        at = f"{where}.content[{number}]"
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            what = f"has the type {str(kind)[:50]!r}" if kind not in (None, "text") else "is no text part"
            raise invalid(
                f'{at} {what}; only {{"type": "text", "text": ...}} is supported.',
                param=at,
                code="unsupported_parameter",
            )
        parts.append(part["text"])
    return "\n".join(parts)
