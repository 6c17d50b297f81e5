"""Versions of the session protocol: a build speaks the newest one and the one before it.

    client                      server
    Hello(6, 7)  ---------->    speaks 6 and 7: the highest common one is 7
                 <----------    Welcome(7)

Both ends speak that one for as long as the session lives. What only the newer one has (a message with a higher `SINCE`)
is never sent to a peer that speaks the older one.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 7
PROTOCOL_VERSION_MIN = PROTOCOL_VERSION - 1
_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Versions:
    """A range, both ends included."""

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        assert self.lowest <= self.highest

    def common(self, others: Versions) -> int | None:
        """The highest version in both; None: there is none."""
        highest = min(self.highest, others.highest)
        return highest if highest >= max(self.lowest, others.lowest) else None

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        return f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


SPOKEN = Versions(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)


def no_common_version(client: str, clients: Versions, servers: Versions) -> str:
    """Why `client` and the server that it called cannot talk, and what to do."""
    is_client_older = clients.highest < servers.lowest
    client = repr(client[:_NAME_CHARACTERS])  # whoever it is may say anything
    older = client if is_client_older else "the service that it called"
    wanted = (servers if is_client_older else clients).lowest
    return (
        f"{client} speaks session protocol {clients}, the service that it called {servers}: "
        f"upgrade {older} to a build that speaks {wanted}"
    )
