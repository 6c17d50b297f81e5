"""`instructions` and `input` to the messages that a chat template takes. Raises ApiError only.

What one answer gave, its reasoning, its text and its calls, are items one after the other; they are one message again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coppice_scheduler.edge.base.errors import ApiError, invalid
from coppice_scheduler.edge.frontend.generation_spec import ASSISTANT, MAX_MESSAGES
from coppice_scheduler.edge.http.field_table import Notes, without_effect
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.http.turns import joined_turns
from coppice_scheduler.edge.text.chat import ChatMessage
from coppice_scheduler.edge.text.tools.tool import ToolCall, check_name

ROLES = ("user", ASSISTANT, "system", "developer")
MESSAGE, CALL, RESULT, REASONING = "message", "function_call", "function_call_output", "reasoning"
ITEMS = (MESSAGE, CALL, RESULT, REASONING)
REFERENCE = "item_reference"  # whose type may be left out
PARTS = ("input_text", "output_text", "text")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
# Of items that an answer gave, and of their parts, some of them by the openai package: no template reads them.
ITEM_NO_EFFECT = frozenset(
    {"id", "status", "phase", "caller", "namespace", "async", "encrypted_content", "parsed_arguments", "created_by"}
)
PART_NO_EFFECT = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
_SAYS_NOTHING: tuple[Any, ...] = ([], {}, "", "completed")


@dataclass(slots=True)
class ItemNotes(Notes):
    """Of a body with items of earlier answers, whose empty fields and ids are not worth a note."""

    def only(self, values: dict[str, Any], known: tuple[str, ...], no_effect: frozenset[str], at: str, of: str) -> None:
        """Refuse, or note, every other field. `of`: how the place is named in a list, without its numbers."""
        said = {name: value for name, value in values.items() if name not in no_effect or value not in _SAYS_NOTHING}
        for name in without_effect(said, known, no_effect, at, self.unknown):
            if name not in ("id", "status"):  # of all that was given
                self.ignore(f"{of}.{name}")


def conversation_of(fields: Fields, notes: ItemNotes) -> tuple[ChatMessage, ...]:
    instructions, value = fields.text("instructions"), fields.get("input")
    messages = [ChatMessage("system", instructions)] if instructions else []
    if value is None:
        raise invalid("input is required.", param="input", code="missing")
    if isinstance(value, str):
        return (*messages, ChatMessage("user", value))
    if not isinstance(value, list):
        raise fields.wrong("input", "a string or a list of items")
    fields.at_most("input", MAX_MESSAGES, "items")
    if not value:
        raise invalid("input is an empty list.", param="input", code="empty")
    return (*messages, *joined_turns(_items(value, notes)))


def _items(value: list[Any], notes: ItemNotes) -> Iterator[ChatMessage]:
    for place, entry in enumerate(value):
        at = f"input[{place}]"
        if not isinstance(entry, dict):
            raise invalid(f"{at} must be an object.", param=at)
        fields = Fields(entry, f"{at}.")
        kind = fields.text("type") or (MESSAGE if "role" in entry else REFERENCE if "id" in entry else None)
        if kind is None:
            kind = fields.required_text("type")
        match kind:
            case "message":
                yield _message(fields, entry, at, notes)
            case "function_call":
                yield _called(fields, entry, at, notes)
            case "function_call_output":
                yield _result(fields, entry, at, notes)
            case "reasoning":
                yield _thought(fields, entry, at, notes)
            case "item_reference":
                raise _not_kept(at)
            case _:
                raise invalid(
                    f"{at}.type is {kind[:50]!r}; supported are {', '.join(ITEMS)}.",
                    param=f"{at}.type",
                    code="unsupported_parameter",
                )


def _message(fields: Fields, entry: dict[str, Any], at: str, notes: ItemNotes) -> ChatMessage:
    role = fields.required_text("role")
    if role not in ROLES:
        raise invalid(f"{at}.role is {role[:50]!r}; it must be {', '.join(ROLES)}.", param=f"{at}.role")
    texts = [*_texts(fields, "content", at, PARTS, notes)]
    notes.only(entry, ("type", "role", "content"), ITEM_NO_EFFECT, at, "input[]")
    return ChatMessage(role, ("" if role == ASSISTANT else "\n").join(texts))


def _called(fields: Fields, entry: dict[str, Any], at: str, notes: ItemNotes) -> ChatMessage:
    name = fields.required_text("name")
    check_name(name, f"{at}.name")
    call = ToolCall(fields.required_text("call_id"), name, fields.text("arguments") or "{}")
    notes.only(entry, ("type", "call_id", "name", "arguments"), ITEM_NO_EFFECT, at, "input[]")
    return ChatMessage(ASSISTANT, "", calls=(call,))


def _result(fields: Fields, entry: dict[str, Any], at: str, notes: ItemNotes) -> ChatMessage:
    call_id = fields.required_text("call_id")
    content = "\n".join(_texts(fields, "output", at, PARTS, notes))
    notes.only(entry, ("type", "call_id", "output", "name"), ITEM_NO_EFFECT, at, "input[]")
    return ChatMessage("tool", content, name=fields.text("name"), call_id=call_id)


def _thought(fields: Fields, entry: dict[str, Any], at: str, notes: ItemNotes) -> ChatMessage:
    """Its content, or where there is none, its summary."""
    names = [name for name in ("content", "summary") if entry.get(name) not in (None, [], "")]
    texts = [[*_texts(fields, name, at, REASONING_PARTS, notes)] for name in names]
    notes.only(entry, ("type", "content", "summary"), ITEM_NO_EFFECT, at, "input[]")
    return ChatMessage(ASSISTANT, "", reasoning="".join(texts[0]) if texts else None)


def _texts(fields: Fields, name: str, at: str, kinds: tuple[str, ...], notes: ItemNotes) -> Iterator[str]:
    """Of a text, or a list of parts that are texts."""
    value = fields.get(name)
    if isinstance(value, str):
        yield value
        return
    if value is None:
        raise invalid(f"{at}.{name} is required.", param=f"{at}.{name}", code="missing")
    if not isinstance(value, list):
        raise fields.wrong(name, "a string or a list of parts")
    for place, part in enumerate(value):
        where = f"{at}.{name}[{place}]"
        if not isinstance(part, dict):
            raise invalid(f"{where} must be an object with type and text.", param=where)
        inner = Fields(part, f"{where}.")
        kind = inner.required_text("type")
        if kind == "refusal":
            yield inner.required_text("refusal")
            continue
        if kind not in kinds:
            raise invalid(
                f"{where} has the type {kind[:50]!r}; supported are {', '.join(kinds[:2])}.",
                param=where,
                code="unsupported_parameter",
            )
        notes.only(part, ("type", "text"), PART_NO_EFFECT, where, f"input[].{name}[]")
        yield inner.required_text("text")


def _not_kept(at: str) -> ApiError:
    return invalid(
        f"{at} refers to an item of an earlier response; answers are not kept here. Send the item itself.",
        param=at,
        code="unsupported_parameter",
    )
