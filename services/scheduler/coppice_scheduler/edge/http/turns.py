"""Messages that an API tells in parts, or that follow each other, as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from coppice_scheduler.edge.frontend.generation_spec import ASSISTANT
from coppice_scheduler.edge.text.chat import ChatMessage


def joined_turns(messages: Iterable[ChatMessage], *texts: str) -> Iterator[ChatMessage]:
    """Runs of the assistant's messages as one each, and of messages of the roles `texts`, line by line."""
    for role, run in groupby(messages, lambda message: message.role):
        if role == ASSISTANT:
            yield _answer([*run])
        elif role in texts:
            yield ChatMessage(role, "\n".join(message.content for message in run))
        else:
            yield from run


def _answer(parts: list[ChatMessage]) -> ChatMessage:
    if len(parts) == 1:
        return parts[0]
    return ChatMessage(
        ASSISTANT,
        "".join(part.content for part in parts),
        reasoning="".join(part.reasoning or "" for part in parts) or None,
        calls=tuple(call for part in parts for call in part.calls),
    )
