"""`system` and `messages` to the messages that a chat template takes. Raises ApiError only.

    user        text joins to one message; each result of a tool is a message of its own, where it stands
    assistant   one message: what was thought, what was said, what was called

Turns of one role that follow each other are one turn, as many templates take them in turns only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coppice_scheduler.edge.anthropic.blocks import Block, MessageNotes, blocks_of, text_of, texts_of
from coppice_scheduler.edge.anthropic.fields import CACHE_CONTROL
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import ASSISTANT, MAX_MESSAGES
from coppice_scheduler.edge.http.json_body import Fields
from coppice_scheduler.edge.http.turns import joined_turns
from coppice_scheduler.edge.text.chat import ChatMessage
from coppice_scheduler.edge.text.tools.tool import ToolCall, check_name

SYSTEM, USER, TOOL = "system", "user", "tool"
ROLES = (USER, ASSISTANT, SYSTEM)
# Fields of an answer that is sent back whole.
OF_ANSWER = frozenset(
    {"id", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container", "diagnostics"}
)
# Coding agents put a line of this beginning first. It is for a gateway and differs with each call: a prompt that began
# with it would never be found again.
BILLING = "x-anthropic-billing-header:"


def conversation_of(fields: Fields, notes: MessageNotes) -> tuple[ChatMessage, ...]:
    system = [*_system(fields, notes)]
    value = fields.required_list("messages", MAX_MESSAGES, "messages")
    if not value:
        raise invalid("messages is an empty list.", param="messages", code="empty")
    turns = [message for place, entry in enumerate(value) for message in _message(f"messages[{place}]", entry, notes)]
    if len(turns) > MAX_MESSAGES:
        message = f"messages has {len(turns)} turns and results of tools; at most {MAX_MESSAGES} are taken."
        raise invalid(message, param="messages")
    return tuple(joined_turns([*system, *turns], USER, SYSTEM))


def _system(fields: Fields, notes: MessageNotes) -> Iterator[ChatMessage]:
    if fields.get("system") is not None:
        text = _system_text(fields, "system", "system", "system", notes)
        if text:
            yield ChatMessage(SYSTEM, text)


def _system_text(fields: Fields, name: str, where: str, pattern: str, notes: MessageNotes) -> str:
    texts = []
    for text in texts_of(fields, name, where, pattern, notes):
        if text.startswith(BILLING):
            notes.ignore(f"system.{BILLING[:-1]}")
            text = text.partition("\n")[2]
        if text:
            texts.append(text)
    return "\n".join(texts)


def _message(where: str, entry: Any, notes: MessageNotes) -> Iterator[ChatMessage]:
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object with role and content.", param=where)
    fields = Fields(entry, f"{where}.")
    role = fields.required_text("role")
    if role not in ROLES:
        raise invalid(f"{where}.role is {role[:50]!r}; it must be {' or '.join(ROLES)}.", param=f"{where}.role")
    Block(role, where, "messages[]", fields, entry).only(("role", "content"), OF_ANSWER, notes)
    if fields.get("content") is None:
        raise invalid(f"{where}.content is required.", param=f"{where}.content", code="missing")
    where, pattern = f"{where}.content", "messages[].content"
    if role == SYSTEM:
        yield ChatMessage(SYSTEM, _system_text(fields, "content", where, pattern, notes))
    elif role == USER:
        yield from _user(blocks_of(fields, "content", where, pattern), notes)
    else:
        yield _assistant(blocks_of(fields, "content", where, pattern), notes)


def _user(blocks: Iterator[Block], notes: MessageNotes) -> Iterator[ChatMessage]:
    texts: list[str] = []
    is_empty = True
    for block in blocks:
        is_empty = False
        if block.kind == "text":
            texts.append(text_of(block, notes))
        elif block.kind == "tool_result":
            if texts:
                yield ChatMessage(USER, "\n".join(texts))
                texts = []
            yield _result(block, notes)
        else:
            raise block.not_supported(("text", "tool_result"))
    if texts or is_empty:
        yield ChatMessage(USER, "\n".join(texts))


def _result(block: Block, notes: MessageNotes) -> ChatMessage:
    fields = block.fields
    call_id = fields.required_text("tool_use_id")
    has_failed = fields.flag("is_error")
    if has_failed:
        notes.ignore(f"{block.pattern}.is_error")  # templates have no place for it; what failed the content says
    content = ""
    if fields.get("content") is not None:
        content = "\n".join(texts_of(fields, "content", f"{block.where}.content", f"{block.pattern}.content", notes))
    block.only(("tool_use_id", "content", "is_error", CACHE_CONTROL), ("toolset_name",), notes)
    return ChatMessage(TOOL, content, call_id=call_id)


def _assistant(blocks: Iterator[Block], notes: MessageNotes) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.kind:
            case "text":
                texts.append(text_of(block, notes))
            case "thinking":
                thoughts.append(block.fields.required_text("thinking"))
                block.fields.text("signature")
                block.only(("thinking", "signature"), (), notes)
            case "redacted_thinking":
                block.only((), ("data",), notes)  # of another server: nobody here can read it
            case "tool_use":
                calls.append(_call(block, notes))
            case _:
                raise block.not_supported(("text", "thinking", "tool_use"))
    # Blocks of one answer were one text; a template that wants reasoning apart gets it apart.
    return ChatMessage(ASSISTANT, "".join(texts), reasoning="".join(thoughts) or None, calls=tuple(calls))


def _call(block: Block, notes: MessageNotes) -> ToolCall:
    fields = block.fields
    name = fields.required_text("name")
    check_name(name, f"{block.where}.name")
    arguments = fields.json_object("input")
    if arguments is None:
        raise invalid(f"{block.where}.input is required.", param=f"{block.where}.input", code="missing")
    call = ToolCall(fields.required_text("id"), name, arguments)
    block.only(("id", "name", "input", CACHE_CONTROL), ("caller", "toolset_name"), notes)
    return call
