"""A mistyped variable is refused by every command that takes flags from the environment."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command

from coppice.errors import UsageError
from coppice_cli.app import app

TAKE_NONE = ("sim", "health", "version")


def commands(group: Any, path: str = "") -> dict[str, Any]:
    """All commands by what one types."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        typed = f"{path} {name}".strip()
        found |= commands(command, typed) if hasattr(command, "commands") else {typed: command}
    return found


ALL = {typed: command for typed, command in commands(get_command(app)).items() if typed not in TAKE_NONE}


def test_there_are_commands() -> None:
    assert {"up", "bench rpc", "cache pin", "tenants rotate-key", "audit isolation", "index ingest"} <= ALL.keys()


@pytest.mark.parametrize("typed", ALL)
def test_a_mistyped_variable_ends_the_command_before_it_begins(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_THIS_MISTYPED", "1")
    context = ALL[typed].make_context(typed, [], resilient_parsing=True, auto_envvar_prefix="COPPICE_THIS")
    with pytest.raises(UsageError, match="unknown environment variable COPPICE_THIS_MISTYPED"):
        ALL[typed].invoke(context)
