"""Environment variables of the command that runs."""

from __future__ import annotations

import os

import typer

from coppice.settings import refuse_unknown_variables


def refuse_unknown_variables_of(context: typer.Context) -> None:
    """A mistyped variable of the command that runs is an error; those of other commands and services may be set."""
    prefix = f"{context.auto_envvar_prefix}_"
    refuse_unknown_variables(prefix, {prefix + name.upper() for name in context.params}, os.environ)
