"""Chat messages of the OpenAI API. Raises ApiError only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import MAX_MESSAGES
from coppice_scheduler.edge.http.field_table import Notes, UnknownFields, unsupported_field
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.openai.parsing.tools import calls_of
from coppice_scheduler.edge.text.chat import ChatMessage

REASONING = ("reasoning_content", "reasoning")  # the older and the newer name
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING})
MESSAGE_NO_EFFECT = frozenset({"annotations", "parsed"})  # the second is of the openai package's
MESSAGE_EMPTY = ("function_call", "refusal", "audio")


def messages_of(fields: Fields, notes: Notes) -> tuple[ChatMessage, ...]:
    value = fields.required_list("messages", MAX_MESSAGES, "messages")
    return tuple(_message(place, message, notes) for place, message in enumerate(value))


def _message(place: int, message: Any, notes: Notes) -> ChatMessage:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with role and content.", param=where)
    fields = Fields(message, f"{where}.")
    role = fields.required_text("role")
    for name, value in message.items():
        # An answer of ours, or of others, is often sent back whole, with its empty fields.
        if name in _MESSAGE_FIELDS or (name in MESSAGE_EMPTY and value in (None, [], {}, "")):
            continue
        if name in MESSAGE_EMPTY or (name not in MESSAGE_NO_EFFECT and notes.unknown is UnknownFields.REFUSE):
            raise unsupported_field(name, where)
        if value is not None:
            notes.ignore(f"messages[].{name}")
    # Some send it empty, in whatever form.
    calls = calls_of(fields, where, notes)
    content = "" if calls and fields.get("content") is None else _content(fields, where)
    reasoning = [fields.text(name) if fields.get(name) not in ([], {}) else None for name in REASONING]
    thought = next((text for text in reasoning if text), None)
    found = ChatMessage(role, content, fields.text("name"), thought, calls, fields.text("tool_call_id"))
    fields.assert_read(_MESSAGE_FIELDS)
    return found


def _content(fields: Fields, where: str) -> str:
    """Text, or parts of type text; parts are joined by newlines, as vLLM does for templates that want a string."""
    value = fields.get("content")
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
        _check_part(part, at)
        parts.append(part["text"])
    return "\n".join(parts)


def _check_part(part: Mapping[str, Any], at: str) -> None:
    """A breakpoint says that what is before it should be cached, as everything is here; it has no time of its own."""
    for name, value in part.items():
        if name in ("type", "text"):
            continue
        if name != "prompt_cache_breakpoint" or value not in (None, {"mode": "explicit"}):
            raise unsupported_field(name, at)
