"""Environment variables of the command that runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand


def refuse_unknown_variables_of(context: typer.Context, *, beside: Iterable[str] = ()) -> None:
    """A mistyped variable of the command that runs is an error; those of other commands and services may be set.

    `beside` are variables of the command that are no flags.
    """
    from coppice.settings import refuse_unknown_variables  # here: help and completion need none of it

    prefix = f"{context.auto_envvar_prefix}_"
    refuse_unknown_variables(prefix, {prefix + name.upper() for name in context.params} | set(beside), os.environ)


class Command(TyperCommand):
    """One whose variables are its flags."""

    def invoke(self, ctx: Any) -> Any:
        refuse_unknown_variables_of(ctx)
        return super().invoke(ctx)
