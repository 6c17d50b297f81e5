"""What the command loads before it knows what is asked, completion, and numbers as people read them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from coppice_cli.app import app
from coppice_cli.epochs import short_of, start_of

HEAVY = (
    "torch",
    "grpc",
    "pydantic",
    "fastapi",
    "redis",
    "jinja2",
    "tokenizers",
    "numpy",
    "coppice_cli.size.arithmetic",
)


def coppice(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coppice_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb", **environ},
    )


def test_help_loads_nothing_heavy() -> None:
    """Completion runs the command at each press of the key."""
    program = "import sys, coppice_cli.app; coppice_cli.app.command(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {name for name in loaded.stdout.split() if name.startswith(HEAVY)}


def test_help_tells_of_completion_without_variables() -> None:
    listed = coppice("--help").stdout
    assert "--install-completion" in listed
    assert "COPPICE_INSTALL_COMPLETION" not in listed
    assert "COPPICE_SHOW_COMPLETION" not in listed


def test_a_shell_is_told_which_commands_and_flags_there_are() -> None:
    def completed(words: str) -> list[str]:
        count = str(len(words.split()) - 1)
        return coppice(_COPPICE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count).stdout.split()

    assert completed("coppice cache ex") == ["explain"]
    assert completed("coppice cache explain --mes") == ["--messages"]
    assert {"top", "trace", "tenants"} == set(completed("coppice t"))


@pytest.mark.parametrize(
    ("epoch", "said"),
    [(1, "1st start"), (2, "2nd start"), (3, "3rd start"), (4, "4th start"), (11, "11th start"), (13, "13th start")],
)
def test_a_cache_epoch_counts_starts(epoch: int, said: str) -> None:
    assert start_of(epoch) == said


def test_more_starts() -> None:
    assert [start_of(epoch) for epoch in (21, 112, 123)] == ["21st start", "112th start", "123rd start"]


def test_epochs_that_begin_anywhere_are_told_by_their_end() -> None:
    assert (short_of(7), short_of(5352513672)) == ("7", "...3672")


def test_the_command_knows_its_subcommands() -> None:
    ended = CliRunner().invoke(app, ["--help"])
    for name in ("top", "trace", "doctor", "size"):
        assert f" {name} " in ended.output
