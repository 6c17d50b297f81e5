"""Messages that an API tells in parts, or that follow each other, as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import ASSISTANT
from coppice_scheduler.edge.text.chat import ChatMessage
from coppice_scheduler.edge.text.tools.tool import MAX_CALLS


def joined_turns(messages: Iterable[ChatMessage], *texts: str) -> Iterator[ChatMessage]:
    """Runs of the assistant's messages as one each; of the roles `texts` line by line. Raises ApiError."""
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
    num_calls = sum(len(part.calls) for part in parts)
    if num_calls > MAX_CALLS:
        raise invalid(f"An earlier answer has {num_calls} calls; at most {MAX_CALLS} are taken.", param="messages")
    return ChatMessage(
        ASSISTANT,
        "".join(part.content for part in parts),
        reasoning="".join(part.reasoning or "" for part in parts) or None,
        calls=tuple(call for part in parts for call in part.calls),
    )
