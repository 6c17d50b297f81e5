"""Logs are one line each."""

from __future__ import annotations

import logging

import pytest

from coppice.errors import UsageError
from coppice.telemetry.logs import configure_logging


def test_a_log_record_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    logging.getLogger("coppice.test").info("unseen")
    logging.getLogger("coppice.test").warning("two\nlines from %s", "w0")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("Z WARNING coppice.test: two\\nlines from w0")


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(UsageError, match="'loud'"):
        configure_logging("loud")
