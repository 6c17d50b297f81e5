"""What can go wrong in the core, as seen by its edge.

CoreError
|- SettingsRefused    the configuration contradicts itself; said once, at start
|- MessageRefused     a whole message was malformed or over a limit; the edge ends the connection with this text
|- OpRefused          one op was wrong; becomes an `Invalid` answer and never leaves the core
`- InvariantBroken    `check()` found our own bug
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of the errors that the cache core raises."""


class SettingsRefused(CoreError):
    """A setting is out of range or contradicts another one."""


class MessageRefused(CoreError):
    """A message as a whole was refused; nothing of it was applied."""


class OpRefused(CoreError):
    """One op was refused; nothing changed."""


class InvariantBroken(CoreError):
    """An invariant of the design does not hold. `name` is its number, for instance "I1"."""

    def __init__(self, name: str, evidence: str) -> None:
        super().__init__(f"{name} broken: {evidence}")
        self.name = name
