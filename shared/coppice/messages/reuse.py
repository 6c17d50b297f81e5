"""What is known of the future of a prompt: the client's word, its kind of call, and how its answer ended."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Reuse(Enum):
    """What the client knows of the future of a prompt; eviction weighs it."""

    UNKNOWN = "unknown"
    LIKELY = "likely"  # its conversation stays open, or an agent loops over it
    UNLIKELY = "unlikely"  # one of a kind, or its conversation is over


class Outcome(Enum):
    """How an answer ended that could call tools; eviction learns how often prompts come again after each."""

    UNKNOWN = "unknown"
    CALLED_TOOLS = "called_tools"  # a prompt that goes on with their results is on its way
    CALLED_NONE = "called_none"  # its loop may be over


CALL_KINDS: Final = 16  # that a scheduler may tell apart
