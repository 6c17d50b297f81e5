"""What `coppice.LLM` says no with.

coppice.errors.UsageError
+-- PromptError       a prompt cannot run: empty, too long, not a prompt; nothing was computed
coppice.errors.CoppiceError
+-- RequestFailed     a request ended without its tokens; the others were cancelled, the LLM is usable
+-- EngineBroken      a step failed or was cut off in the middle: this LLM cannot be used any more
"""

from __future__ import annotations

from coppice.errors import CoppiceError, UsageError


class PromptError(UsageError):
    """A prompt cannot run. Nothing was computed."""


class RequestFailed(CoppiceError):
    """A request ended without its tokens."""


class EngineBroken(CoppiceError):
    """What the cores believe and what the device did may differ: nothing is computed any more."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine cannot go on: {why}", hint="make a new LLM")
